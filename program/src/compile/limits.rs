//! Limits on the size of a Program, so that a mistaken or hostile size is an error, and never an
//! overflow or a list that fills the memory. They are far beyond any known run.

use super::lowering::Lowering;
use crate::plan::{Offload, Plan, PlanError};
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

/// The most servers. An unoptimised build simulates 300 servers of a small model in 2 s, and
/// 3000 in 2 minutes.
const MOST_SERVERS: usize = 1 << 10;

/// The most workers of servers: a list numbers its peers in 16 bits, which leaves some numbers for
/// peers of other kinds.
const MOST_WORKERS: usize = 1 << 14;

/// The most pairs of a worker's rank and a server's rank that send to each other. The compiler
/// keeps a list of them.
const MOST_CONNECTIONS: usize = 1 << 20;

/// The most stages. The compiler goes through the whole graph for each of them.
const MOST_STAGES: usize = 1024;

/// Refuses a step that is too large, before anything of that size is allocated.
pub(super) fn check(lowering: &Lowering, plan: &Plan) -> Result<(), PlanError> {
    let micro_batches = plan.micro_batches()?;
    let invalid = |field, reason: String, hint: &str| Err(PlanError::Invalid { field, reason, hint: hint.into() });
    if plan.layout.pipeline > MOST_STAGES {
        return invalid("pipeline", format!("{} stages", plan.layout.pipeline), "use at most 1024 stages");
    }
    if plan.layout.offload == Offload::State && plan.stack.is_own() {
        let reason = "`state` is of frameworks whose operators were traced, and this job's were not".into();
        return invalid("offload", reason, "use `offload: optimizer` or `both`, or a job that `hf-deepspeed` was traced for");
    }
    if micro_batches > MOST_MICRO_BATCHES {
        let reason = format!("{micro_batches} micro-batches in a step, and at most {MOST_MICRO_BATCHES} are possible");
        return invalid("global_batch", reason, "lower it, or raise `data` or `micro_batch`");
    }
    let graph = &lowering.graph;
    let operators = graph.operators.len().saturating_add(lowering.tiling.kernels());
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
    check_servers(lowering, plan)?;
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
        // Slots of tokens are stored as `Int32` too.
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

/// Refuses so many servers or workers that their messages or session Programs would not fit into
/// memory.
fn check_servers(lowering: &Lowering, plan: &Plan) -> Result<(), PlanError> {
    let (servers, workers, layout) = (plan.mode.servers(), plan.layout.data, &plan.layout);
    if servers == 0 {
        return Ok(());
    }
    let refuse = |reason: String| {
        let hint = "use fewer `servers`, a smaller `data`, or a larger `bucket`".into();
        Err(PlanError::Invalid { field: "mode.parameter_server", reason, hint })
    };
    if servers > MOST_SERVERS || workers > MOST_WORKERS {
        let most = format!("at most {MOST_SERVERS} servers and {MOST_WORKERS} workers are possible");
        return refuse(format!("{servers} servers of {workers} workers, and {most}"));
    }
    // The mesh has at most 2^20 ranks, so nothing overflows.
    let parts = layout.tensor * layout.context * layout.expert * layout.pipeline;
    if servers * workers * parts > MOST_CONNECTIONS {
        let connections = servers * workers * parts;
        return refuse(format!(
            "{servers} servers of {workers} workers make {connections} connections, more than {MOST_CONNECTIONS}"
        ));
    }
    let parameters = || lowering.graph.parameters().map(|(_, tensor)| tensor.elements());
    let in_bucket = (plan.layout.bucket.count() as usize / 4).max(1).saturating_mul(layout.tensor * layout.expert);
    let one_bucket_each = plan.optimizer.is_by_parameter();
    let full_buckets = if one_bucket_each { usize::MAX } else { parameters().sum::<usize>() / in_bucket + layout.pipeline };
    let buckets = parameters().count().min(full_buckets);
    // An unsynchronised worker has five Programs on each server, and each Program declares the
    // copies and pushes of all workers.
    let of_sessions = if plan.pacing().is_some() { 10 * workers * workers } else { 0 };
    if (3 * (servers + workers) + of_sessions).checked_mul(buckets).is_none_or(|messages| messages > MOST_INSTRUCTIONS) {
        let name = &lowering.graph.name;
        return refuse(format!(
            "{workers} workers and {servers} servers of `{name}` in {buckets} buckets have too many messages"
        ));
    }
    Ok(())
}
