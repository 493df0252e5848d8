//! Limits on what a plan may ask of the compiler, so that a mistaken or hostile size is an error and never a number that wraps around
//! or a list that fills the memory. They are far beyond any run that has been heard of.

use super::lowering::Lowering;
use crate::plan::{Plan, PlanError};
use foretell_models::{Kernel, OperatorId};

/// The most instructions, roughly, of one step over all stages: operators times micro-batches. Training and evaluation together take 0.8 kB
/// of the compiler's memory for each (measured with a small GPT), so 6 GB at most. GPT-3's 96 layers with 1536 micro-batches have 5 million.
const MOST_INSTRUCTIONS: usize = 8_000_000;

/// The most bytes (256 PiB) of all that one step makes over all ranks, if nothing of it were ever given up. An arena holds it several
/// times over at most (copies in other placements, optimizer state), so that its offsets are 64-bit numbers.
const MOST_BYTES: u128 = 1 << 58;

/// The most stages: what is found out for each of them goes through the whole graph.
const MOST_STAGES: usize = 1024;

/// Refuses what is too large to be laid out, before anything of that size is made.
pub(super) fn check(lowering: &Lowering, plan: &Plan) -> Result<(), PlanError> {
    let micro_batches = plan.micro_batches()?;
    let invalid = |field, reason: String, hint: &str| Err(PlanError::Invalid { field, reason, hint: hint.into() });
    if plan.layout.pipeline > MOST_STAGES {
        return invalid("pipeline", format!("{} stages", plan.layout.pipeline), "use 1024 stages or less");
    }
    let graph = &lowering.graph;
    let operators = graph.operators.len();
    if micro_batches.checked_mul(operators).is_none_or(|instructions| instructions > MOST_INSTRUCTIONS) {
        return invalid(
            "micro_batch",
            format!("{micro_batches} micro-batches of `{}`, which has {operators} operators, are too long a step", graph.name),
            "raise `micro_batch`, or lower `global_batch`",
        );
    }
    let elements: u128 = graph.tensors.iter().map(|tensor| tensor.elements() as u128).sum();
    if elements * 4 * micro_batches as u128 > MOST_BYTES {
        return invalid(
            "global_batch",
            format!("a step of `{}` over {} samples makes more than 256 PiB", graph.name, plan.global_batch),
            "lower `global_batch`, or use smaller sizes in the model",
        );
    }
    for (index, operator) in graph.operators.iter().enumerate() {
        let kernel = operator.kernel(&lowering.sharding.local_extents(graph, OperatorId(index), &lowering.mesh));
        // The places of the maxima are kept as `Int32`.
        if let Kernel::MaxPool(window) = kernel
            && window.input_elements() > i32::MAX as usize
        {
            return invalid(
                "micro_batch",
                format!("`{}` takes more than 2^31 elements on one rank", operator.name),
                "lower `micro_batch`, or use smaller images",
            );
        }
        // So are the places of tokens.
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
