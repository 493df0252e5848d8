//! The error of a search that found no layout.

use crate::error::{PlannerError, fixes_anything, usual_hint};
use crate::space::Request;
use foretell_program::Offload;
use foretell_simulator::gpu::StackLimits;
use foretell_topologies::Architecture;
use foretell_units::Bytes;
use foretell_units::diagnostic::Mistake;

/// Returns the error of a search without candidates. `blocks` is the number of the model's blocks,
/// `needed` the least memory of a layout that does not fit, and `reason` a message of the compiler.
pub(super) fn nothing_found(
    request: &Request<'_>,
    blocks: usize,
    needed: Option<Bytes>,
    limit: Bytes,
    reason: Option<Mistake>,
) -> PlannerError {
    if let Some(needed) = needed {
        let offload = hint_to_offload(request);
        let less = hint_to_choose_less(request);
        let hint = format!("use more devices, a smaller global batch, or a smaller model{less}{offload}");
        return PlannerError::out_of_memory(request, needed, limit, hint);
    }
    match contradiction(request, blocks) {
        Some((reason, hint)) => PlannerError::no_layout(request, reason, hint),
        None => match reason {
            Some(reason) => PlannerError::impossible(request, &reason),
            None => PlannerError::no_layout(request, String::new(), &usual_hint(request)),
        },
    }
}

/// Returns a message about fixed fields that no layout can have, and a hint. `None` if nothing
/// obvious contradicts the model, the batch or the devices.
fn contradiction(request: &Request<'_>, blocks: usize) -> Option<(String, &'static str)> {
    let (fixed, batch, devices) = (&request.fixed, request.base.global_batch, request.devices);
    let sizes = [fixed.data, fixed.tensor, fixed.pipeline, fixed.context, fixed.expert];
    let ranks = sizes.into_iter().flatten().fold(1, usize::saturating_mul);
    if ranks > devices {
        return Some((format!("the fixed sizes make {ranks} ranks"), "`--fix` smaller sizes, or use more nodes"));
    }
    let chunks = fixed.pipeline.unwrap_or(1).saturating_mul(fixed.virtual_stages.unwrap_or(1));
    if chunks > blocks {
        let reason = format!("a pipeline of {chunks} chunks is fixed, and the model has {blocks} blocks");
        return Some((reason, "`--fix` a shorter pipeline, or fewer `virtual_stages`"));
    }
    let samples = [fixed.data, fixed.expert, fixed.micro_batch].into_iter().flatten().fold(1, usize::saturating_mul);
    if !batch.is_multiple_of(samples) {
        let reason = format!("a micro-batch of {samples} samples over all ranks is fixed, which does not divide {batch}");
        return Some((reason, "choose a global batch that it divides, or `--fix` another `micro_batch`, `data` or `expert`"));
    }
    None
}

/// Returns a hint to relax a choice: the stack, if it cannot split the model further, or fixed
/// fields.
fn hint_to_choose_less(request: &Request<'_>) -> String {
    match StackLimits::of(&request.base.stack).and_then(|limits| Some((limits.wider()?, limits.reason.as_str()))) {
        Some((wider, reason)) => format!("; or choose a stack that splits more, such as `--stack {wider}`: {reason}"),
        None if fixes_anything(request) => "; or `--fix` less".into(),
        None => String::new(),
    }
}

/// Returns a hint to state the hosts' memory, or to lift the stack's limit, if that would allow
/// optimizer state on the hosts.
fn hint_to_offload(request: &Request<'_>) -> &'static str {
    let (topology, stack) = (request.topology, &request.base.stack);
    let is_unknown = topology
        .node_groups()
        .iter()
        .any(|group| group.host_memory.is_none() && topology.device_kinds()[group.kind].architecture != Architecture::Cpu);
    match (is_unknown, stack.is_own()) {
        (true, true) => "; or write `host_memory: 1TB` of the nodes into the topology's file, and optimizer state may lie there",
        (false, false) if request.fixed.offload == Some(Offload::None) && StackLimits::of(stack).is_some() => {
            "; or `--fix offload=both`, if your release of the stack can keep activations and optimizer state on the hosts"
        }
        _ => "",
    }
}
