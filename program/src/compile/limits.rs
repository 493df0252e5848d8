//! Limits on the size of a Program, so that a mistaken or hostile size is an error, and never an
//! overflow or a list that fills the memory. They are far beyond any known run.

use super::lowering::Lowering;
use crate::plan::{Plan, PlanError};
use foretell_models::{Kernel, OperatorId};

/// The most instructions of a step over all stages, estimated as operators times micro-batches. The
/// compiler needs 0.8 kB for each of them (training and evaluation of a small GPT, measured), so at
/// most about 6 GB. GPT-3's 96 layers with 1536 micro-batches have 5 million.
const MOST_INSTRUCTIONS: usize = 8_000_000;

/// The most micro-batches of a step: ten times those of any published run (GPT-3: 1536).
const MOST_MICRO_BATCHES: usize = 1 << 14;

/// The most bytes (256 PiB) of all tensors of a step over all ranks. An arena holds each tensor at
/// most a few times (in other placements, as optimizer state), so its offsets fit into 64 bits.
const MOST_BYTES: u128 = 1 << 58;

/// The most stages. The compiler goes through the whole graph for each of them.
const MOST_STAGES: usize = 1024;

/// Refuses a step that is too large, before anything of that size is allocated.
pub(super) fn check(lowering: &Lowering, plan: &Plan) -> Result<(), PlanError> {
    let micro_batches = plan.micro_batches()?;
    let invalid = |field, reason: String, hint: &str| Err(PlanError::Invalid { field, reason, hint: hint.into() });
    if plan.layout.pipeline > MOST_STAGES {
        return invalid("pipeline", format!("{} stages", plan.layout.pipeline), "use at most 1024 stages");
    }
    if micro_batches > MOST_MICRO_BATCHES {
        let reason = format!("{micro_batches} micro-batches in a step, and at most {MOST_MICRO_BATCHES} are possible");
        return invalid("global_batch", reason, "lower it, or raise `data` or `micro_batch`");
    }
    let graph = &lowering.graph;
    let operators = graph.operators.len();
    if micro_batches.checked_mul(operators).is_none_or(|instructions| instructions > MOST_INSTRUCTIONS) {
        return invalid(
            "micro_batch",
            format!("{micro_batches} micro-batches of `{}` with {operators} operators are too many for a step", graph.name),
            "raise `micro_batch`, or lower `global_batch`",
        );
    }
    let kinds = plan.cycle().program_count();
    if (micro_batches * operators).checked_mul(kinds).is_none_or(|instructions| instructions > MOST_INSTRUCTIONS) {
        return invalid(
            "mode",
            format!("{kinds} kinds of steps of `{}` with {operators} operators are too many", graph.name),
            "use fewer `fragments` or a smaller `overlap`",
        );
    }
    let (fragments, blocks) = (plan.mode.fragments(), graph.blocks.len());
    if fragments > blocks {
        return invalid(
            "mode.local_sgd",
            format!("{fragments} fragments, but `{}` has only {blocks} blocks to put into them", graph.name),
            &format!("use `fragments: {blocks}` or less"),
        );
    }
    let elements: u128 = graph.tensors.iter().map(|tensor| tensor.elements() as u128).sum();
    if elements * 4 * micro_batches as u128 > MOST_BYTES {
        return invalid(
            "global_batch",
            format!("the tensors of `{}` over {} samples are larger than 256 PiB", graph.name, plan.global_batch),
            "lower `global_batch`, or use smaller sizes in the model",
        );
    }
    for (index, operator) in graph.operators.iter().enumerate() {
        let kernel = operator.kernel(&lowering.sharding.local_extents(graph, OperatorId(index), &lowering.mesh));
        // The positions of the maxima are stored as `Int32`.
        if let Kernel::MaxPool(window) = kernel
            && window.input_elements() > i32::MAX as usize
        {
            return invalid(
                "micro_batch",
                format!("`{}` has more than 2^31 input elements on one rank", operator.name),
                "lower `micro_batch`, or use smaller images",
            );
        }
        // So are the slots of tokens.
        if let Kernel::Dispatch(sizes) = kernel
            && sizes.capacity > i32::MAX as usize
        {
            return invalid(
                "micro_batch",
                format!("`{}` has more than 2^31 slots for each expert on one rank", operator.name),
                "lower `micro_batch`, or the model's sequence",
            );
        }
    }
    Ok(())
}
