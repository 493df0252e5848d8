//! The law of resuming: a run that stops at any step and goes on from its checkpoint has the losses
//! of the run that did not stop. In the same layout they have the same bits, in another one they
//! agree as the losses of layouts do.

use super::case::Case;
use super::common::Scratch;
use super::{cases, failure_persistence, law_cases, tolerances};
use proptest::prelude::*;

/// Steps of the run that does not stop.
const STEPS: usize = 5;

/// The same samples in another layout: a part of the ranks along one axis, other buckets, another
/// stage of ZeRO.
fn elsewhere(case: &Case, axis: usize, zero: usize) -> Case {
    let batch = case.global_batch();
    let one = Case { bucket: if case.bucket == "4KiB" { "256B" } else { "4KiB" }, ..case.on_one_rank() };
    // A part of a batch has at least one group of batch norm, of two samples.
    match axis {
        1 if batch.is_multiple_of(4) => Case { data: 2, micro_batch: batch / 2, zero, ..one },
        2 => Case { tensor: 2, ..one },
        3 => Case { pipeline: 2, ..one },
        4 if batch.is_multiple_of(4) => Case { data: 2, tensor: 2, micro_batch: batch / 2, zero, offload: "optimizer", ..one },
        _ => one,
    }
}

fn check(case: &Case, stop: usize, axis: usize, zero: usize) {
    let scratch = Scratch::new();
    let data = ["--data", "synthetic"];
    let train = |case: &Case, steps, more: &[&str]| scratch.train(&case.plan(), steps, case.seed, &[&data[..], more].concat());
    let whole = train(case, STEPS, &["--run", "whole", "--save-every", "never"]);
    train(case, stop, &["--run", "stopped"]);
    let same = train(case, STEPS, &["--resume", "stopped", "--run", "same"]);
    assert_eq!(same.document["resumed_from_step"], stop);
    let bits = |losses: &[f64]| losses.iter().map(|loss| loss.to_bits()).collect::<Vec<_>>();
    assert_eq!(bits(&same.losses), bits(&whole.losses[stop..]), "the same layout goes on otherwise from step {stop}\n{case:?}");
    let other = elsewhere(case, axis, zero);
    let resumed = train(&other, STEPS, &["--resume", "stopped", "--run", "other"]);
    let (_, tolerance) = tolerances(case);
    assert_eq!(resumed.losses.len(), STEPS - stop);
    for (step, (one, other_loss)) in whole.losses[stop..].iter().zip(&resumed.losses).enumerate() {
        assert!(
            (one - other_loss).abs() <= tolerance * one.abs().max(1.0),
            "step {}: {one} without a stop, {other_loss} in another layout\n{case:?}\n{other:?}",
            stop + step
        );
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: law_cases(6),
        max_shrink_iters: 20,
        failure_persistence: failure_persistence(),
        ..ProptestConfig::default()
    })]

    #[test]
    fn a_stopped_run_goes_on_as_if_it_had_not_stopped(
        case in cases(),
        stop in 1..STEPS,
        axis in 0usize..5,
        zero in 0usize..4,
    ) {
        check(&case, stop, axis, zero);
    }
}
