//! The law of averages: replicas that average after every step train as the synchronous mode does,
//! in random layouts.

use super::case::Case;
use super::modes::same_curve;
use super::random::{WEIGHTS, cases};
use super::{failure_persistence, law_cases, tolerances};
use proptest::prelude::*;

/// Modes in which two or three replicas have the mean of all after each step.
const AMONG_FEW: [&str; 4] = [
    "{local_sgd: {every: 1}}",
    "{local_sgd: {every: 1, outer: {optimizer: sgd}}}",
    "{decentralised: {graph: ring}}",
    "{decentralised: {graph: complete}}",
];
/// And any number of replicas.
const AMONG_ANY: [&str; 2] = [AMONG_FEW[0], AMONG_FEW[1]];

/// The plan of a case with plain SGD: an average of updates is the update of an average.
fn without_momentum(case: &Case) -> String {
    case.plan().replace("training: {", "training: {momentum: 0.0, ")
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: law_cases(6),
        max_shrink_iters: 20,
        failure_persistence: failure_persistence(),
        ..ProptestConfig::default()
    })]

    #[test]
    fn random_replicas_that_average_after_every_step_train_as_one(case in cases(), choice in any::<proptest::sample::Index>()) {
        let zero = if case.hybrid && case.data == 4 { case.zero } else { 0 };
        let (data, expert) = if case.data == 1 { (2, 1) } else { (case.data, case.expert) };
        // What replicas refuse.
        let offload = if matches!(case.offload, "optimizer" | "both") { "none" } else { case.offload };
        let precision = if case.precision == "fp16" { "fp32" } else { case.precision };
        // Weights of classes differ between replicas, so the mean of their losses is not that of
        // all samples. A vision transformer with adapters stands still (see `modes`).
        let stands_still = case.recipe.contains("lora") && case.model.contains("vit");
        let recipe = if case.recipe == WEIGHTS || stands_still { "" } else { case.recipe };
        // A mesh of unequal parts may have had a tensor axis.
        let operators = if case.tensor == 1 { "{}" } else { case.operators };
        // Clipping is not linear either. Few micro-batches, since each has samples of its own.
        let (clip, micro_batches) = (false, case.micro_batches.min(3));
        let case = Case {
            data, expert, zero, offload, precision, recipe, operators, micro_batches, clip, micro_batch: 2, uneven: None,
            optimizer: "sgd", ..case
        };
        let replicas = if zero > 0 { data / 2 } else { data };
        let mode = if replicas < 4 { *choice.get(&AMONG_FEW) } else { *choice.get(&AMONG_ANY) };
        let plan = without_momentum(&case);
        let (_, tolerance) = tolerances(&case);
        same_curve(&plan, &format!("{plan}mode: {mode}\n"), tolerance);
    }
}
