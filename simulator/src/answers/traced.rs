//! The prediction of a step whose framework was traced: memory and time operator by operator, in
//! place of a stack's profile.
//!
//! It knows nothing of layouts but the number of ranks: [`foretell_program::traced`] builds the
//! step.

use super::memory::{MemoryUse, OverfullDevice};
use super::prediction::Prediction;
use super::rates::StepAmounts;
use crate::cost::{CostModel, Interval};
use crate::engine::Breakdown;
use crate::gpu::traced::{TracedMachine, TracedMemory, TracedTime, traced_memory, traced_time, traced_timeline};
use foretell_models::Model;
use foretell_program::traced::{Contents, TracedJob, TracedPlan, Untraced};
use foretell_program::{Footprint, Origin, Plan, Preference, Program, RankTimeline, Recompute, Timeline};
use foretell_topologies::{DeviceId, Topology};
use foretell_units::{Bytes, FlopsPerSecond, Seconds};
use statrs::distribution::{ContinuousCDF, Normal};
use std::sync::Arc;

/// A prediction from a framework's own operators.
#[derive(Clone, Debug)]
pub struct TracedPrediction {
    /// The figures of the step.
    pub prediction: Prediction,
    /// Memory of a device, in the form of [`Prediction`].
    pub memory_use: MemoryUse,
    /// Memory of a rank in the allocator's terms.
    pub memory: TracedMemory,
    /// The time by operator.
    pub time: TracedTime,
    /// Bytes of a device outside the allocator: CUDA's context, and NCCL's buffers.
    pub outside: Bytes,
    /// The assumptions for parts that were not traced, one sentence each.
    pub assumptions: Vec<String>,
    /// The step that the prediction is for.
    pub job: TracedJob,
}

/// Standard deviation of the logarithm of needed over predicted memory. For a traced release with
/// all settings known, memory is within 0.3 %. Users' reports leave some settings open and run
/// other releases: half of the sources are within 10.5 % (`users.csv` and `more-users.csv`, every
/// source with equal weight), which corresponds to this spread.
const MEMORY_SPREAD: f64 = 0.15;

/// After this many micro-batches, each further one takes as long as the one before, and memory
/// repeats.
const DISTINCT_PASSES: usize = 3;

/// The result for a plan by its framework's operators.
#[derive(Clone, Debug)]
pub enum TracedOutcome {
    /// It needs this much memory of a device, more than the limit. Its time was not predicted.
    TooLarge(Bytes),
    /// Its prediction.
    Predicted(Box<TracedPrediction>),
}

/// Predicts a plan's step by its framework's operators.
///
/// # Errors
/// [`Untraced`] if the stack has no tables, or none for this plan. The stack's profile can still
/// predict the plan.
pub fn traced_prediction(
    plan: &Plan,
    model: &Model,
    topology: &Topology,
    costs: &CostModel,
) -> Result<TracedPrediction, Untraced> {
    match traced_within(plan, model, topology, costs, None)? {
        TracedOutcome::Predicted(predicted) => Ok(*predicted),
        TracedOutcome::TooLarge(_) => unreachable!("invariant: without a limit nothing is too large"),
    }
}

/// Predicts a plan as [`traced_prediction`] does, unless it needs more memory than `limit` on a
/// device.
///
/// # Errors
/// As [`traced_prediction`].
pub fn traced_within(
    plan: &Plan,
    model: &Model,
    topology: &Topology,
    costs: &CostModel,
    limit: Option<Bytes>,
) -> Result<TracedOutcome, Untraced> {
    let untraced = |reason: &str| Untraced { reason: reason.into() };
    let kind = topology.kind_index(DeviceId(0));
    let TracedPlan { job, assumptions } = traced_plan(plan, model, costs, kind)?;
    if job.ranks > topology.device_count() {
        return Err(untraced("ranks that share a device"));
    }
    if topology.devices().take(job.ranks).any(|device| topology.kind_index(device) != kind) {
        return Err(untraced("several kinds of device"));
    }
    let machine = machine_of(costs, kind)?;
    let device = topology.device_kind(DeviceId(0)).memory;
    let available = limit.map_or(device, |limit| limit.min(device));
    let (mut memory, outside) = memory_within(&job, machine, available)?;
    if limit.is_some() && memory.runs_out {
        return Ok(TracedOutcome::TooLarge(memory.needed + outside));
    }
    if memory.wanted + outside > available && available < device {
        // The limit decides only whether a layout is accepted; the framework can use the whole
        // device.
        (memory, _) = memory_within(&job, machine, device)?;
    }
    let job = TracedJob { pages_out: memory.pages_out, ..job };
    let time = repeated_time(&job, machine, memory.flushes)?;
    let memory_use = memory_use(&memory, outside, job.ranks, topology);
    let prediction =
        prediction(plan, model, (&time, costs.framework(kind).is_some()), memory.host, topology).with_memory(memory_use.clone());
    let prediction = Prediction {
        chance_of_running_out: Some(chance_of_running_out(&memory, device.value() - outside.value())),
        memory_peak: Some(peak_in_words(&memory)),
        ..prediction
    };
    let predicted = TracedPrediction { prediction, memory_use, memory, time, outside, assumptions, job };
    Ok(TracedOutcome::Predicted(Box::new(predicted)))
}

/// The course of a traced step: its Program and the predicted timeline. Mesh and samples are those
/// of `own`, our compiler's Program of the same plan.
///
/// # Errors
/// As [`traced_prediction`].
pub fn traced_course(
    traced: &TracedPrediction,
    own: &Program,
    topology: &Topology,
    costs: &CostModel,
) -> Result<(Program, Timeline), Untraced> {
    let machine = machine_of(costs, topology.kind_index(DeviceId(0)))?;
    let rank = traced_timeline(&traced.job, machine, traced.memory.flushes)?;
    let program = traced.job.step_program(own)?;
    let timeline = all_alike(rank, program.mesh.world_size());
    Ok((program, timeline))
}

/// The timeline of a traced step on `ranks` ranks, with its end and without spans.
pub fn traced_ends(traced: &TracedPrediction, ranks: usize) -> Timeline {
    all_alike(RankTimeline { spans: Vec::new(), end: traced.prediction.step_seconds.into() }, ranks)
}

/// A timeline in which all ranks have the spans of `rank`.
fn all_alike(rank: RankTimeline, ranks: usize) -> Timeline {
    let rank = Arc::new(rank);
    Timeline { origin: Origin::Predicted, ranks: (0..ranks).map(|_| Arc::clone(&rank)).collect() }
}

/// The machine of a traced step on devices of kind `kind`.
fn machine_of(costs: &CostModel, kind: usize) -> Result<TracedMachine<'_>, Untraced> {
    let without_profile = || Untraced { reason: "devices without a profile".into() };
    match costs.framework(kind) {
        Some(framework) => Ok(TracedMachine::Measured(framework)),
        None => costs.cluster(kind).map(TracedMachine::from).ok_or_else(without_profile),
    }
}

/// The step of a plan's ranks on a kind of device: from the operators that its framework measured
/// there, or else from a built-in table.
///
/// # Errors
/// [`Untraced`] if the stack has no tables on that kind, or none for this plan.
pub fn traced_plan(plan: &Plan, model: &Model, costs: &CostModel, kind: usize) -> Result<TracedPlan, Untraced> {
    let tables = costs.tables(kind).ok_or_else(|| Untraced { reason: "this stack".into() })?;
    match costs.framework(kind) {
        Some(framework) => {
            let traced = TracedPlan::of_table(plan, model, tables, framework.table()?)?;
            framework.lacks(&traced.job)?.map_or(Ok(traced), |reason| Err(Untraced { reason }))
        }
        None => TracedPlan::new(plan, model, tables),
    }
}

/// Memory of a job on devices with `device` bytes, and the bytes outside of the allocator. If a
/// device has less than the allocator would like to hold, the allocator returns segments (a flush),
/// which takes time.
///
/// # Errors
/// [`Untraced`] if the table needs a size that is not given.
pub fn memory_within<'a>(
    job: &TracedJob,
    machine: impl Into<TracedMachine<'a>>,
    device: Bytes,
) -> Result<(TracedMemory, Bytes), Untraced> {
    let machine = machine.into();
    let (outside, workspace) = (machine.outside(job.ranks), machine.workspace());
    let limit = Bytes::new(device.count().saturating_sub((outside + workspace).count()));
    let few = TracedJob { micro_batches: job.micro_batches.min(DISTINCT_PASSES), ..job.clone() };
    let mut memory = traced_memory(&few, None)?;
    if !machine.caches_memory() {
        (memory.reserved, memory.wanted) = (memory.allocated, memory.allocated);
    }
    memory.runs_out = memory.allocated > limit;
    memory.pages_out = memory.paged > Bytes::ZERO && memory.allocated + memory.paged > limit;
    let fits_by_sum = !memory.runs_out;
    if memory.reserved > limit && fits_by_sum {
        let passes = job.micro_batches.div_ceil(few.micro_batches.max(1)) as u64;
        let limited = traced_memory(&few, Some(limit))?;
        (memory.flushes, memory.runs_out) = (limited.flushes * passes, limited.runs_out);
    }
    memory.reserved = memory.reserved.min(limit.max(memory.allocated)) + workspace;
    memory.wanted += workspace;
    memory.allocated += workspace;
    memory.needed = if memory.runs_out && fits_by_sum { memory.wanted } else { memory.allocated };
    Ok((memory, outside))
}

/// The time of a job's step. All micro-batches between the first and the last take equally long, so
/// the times of two numbers of micro-batches are extrapolated.
///
/// # Errors
/// [`Untraced`] if the table needs a size that is not given.
pub fn repeated_time<'a>(job: &TracedJob, machine: impl Into<TracedMachine<'a>>, flushes: u64) -> Result<TracedTime, Untraced> {
    let machine = machine.into();
    let passes = |micro_batches| traced_time(&TracedJob { micro_batches, ..job.clone() }, machine, flushes);
    let more = job.micro_batches.saturating_sub(DISTINCT_PASSES);
    if more == 0 {
        return Ok(passes(job.micro_batches)?);
    }
    let (fewer, time) = (passes(DISTINCT_PASSES - 1)?, passes(DISTINCT_PASSES)?);
    Ok(time.extended(&fewer, more as f64))
}

/// The chance that a job does not fit into `limit`, given the spread of errors of predictions. How
/// much the allocator needs beyond the allocated bytes depends on fragmentation: half of what it
/// would like to hold beyond them counts.
fn chance_of_running_out(memory: &TracedMemory, limit: f64) -> f64 {
    if limit <= 0.0 {
        return 1.0;
    }
    let needed = (memory.allocated.value() + memory.wanted.value()) / 2.0;
    Normal::standard().cdf((needed / limit).ln() / MEMORY_SPREAD)
}

fn peak_in_words(memory: &TracedMemory) -> String {
    format!("{} pass, at `{}`: {} allocated, {} reserved", memory.phase, memory.operator, memory.allocated, memory.reserved)
}

/// The bytes that the ranks of a node hold in its host's memory. `None` if they fit, or if the
/// host's memory is unknown.
fn overfull_host(of_rank: Bytes, ranks: usize, topology: &Topology) -> Option<Bytes> {
    let group = topology.node_groups().first()?;
    let held = of_rank * ranks.min(group.devices) as u64;
    (held > group.host_memory?).then_some(held)
}

fn memory_use(memory: &TracedMemory, outside: Bytes, ranks: usize, topology: &Topology) -> MemoryUse {
    let device = topology.device_kind(DeviceId(0));
    let held = |contents: &[Contents]| contents.iter().filter_map(|contents| memory.contents.get(contents).copied()).sum();
    let named: Bytes = memory.contents.values().copied().sum();
    let components = Footprint {
        parameters: held(&[Contents::Parameters, Contents::Gathered, Contents::Reference]),
        gradients: held(&[Contents::Gradients]),
        optimizer_state: held(&[Contents::OptimizerStates]),
        activations: held(&[Contents::Activations]),
        workspace: held(&[Contents::Communication]) + Bytes::new(memory.allocated.count().saturating_sub(named.count())),
        unused: Bytes::new(memory.reserved.count().saturating_sub(memory.allocated.count())),
        context: outside,
    };
    let needed = memory.needed + outside;
    MemoryUse {
        peak_by_stage: vec![memory.reserved + outside],
        components_by_stage: vec![components],
        needed_by_stage: vec![needed],
        overfull_device: memory.runs_out.then(|| OverfullDevice {
            stage: 0,
            ranks: 1,
            needed,
            kind: device.name.clone(),
            memory: device.memory,
        }),
        overfull_host: overfull_host(memory.host, ranks, topology),
    }
}

fn prediction(
    plan: &Plan,
    model: &Model,
    (time, is_measured): (&TracedTime, bool),
    host: Bytes,
    topology: &Topology,
) -> Prediction {
    let step = time.step;
    let interval = Interval::of_spread(step, time.step_range.map(|bound| bound / step));
    let hardware = time.forward_flops + time.reference_flops + time.backward_flops;
    let sequences = plan.workload.preference.map_or(1, Preference::sequences);
    let repeated = if plan.layout.recompute == Recompute::Full { time.forward_flops } else { 0.0 };
    // Leave out recomputation. It may repeat less than the whole forward pass.
    let flops = hardware - repeated.min(time.backward_flops);
    // The FLOPs are those of one rank, so one device counts.
    let amounts = StepAmounts {
        samples: plan.global_batch as f64,
        tokens: model.sample().tokens().map(|(tokens, _)| (tokens * plan.global_batch * sequences) as f64),
        model_flops: flops,
        hardware_flops: hardware,
        devices: 1.0,
        peak: topology.device_kind(DeviceId(0)).peak_rate(plan.precision).unwrap_or(FlopsPerSecond::ZERO),
    };
    let rates = amounts.rates(step);
    let kernels = time.arithmetic + time.memory_bound - time.optimizer;
    let optimizer = time.optimizer + time.host_update;
    let waits = step - kernels - optimizer - time.exposed;
    let by_profile = || vec!["kernels by the device's profile".to_owned()];
    let uncalibrated = if is_measured { time.estimated.iter().cloned().collect() } else { by_profile() };
    Prediction {
        step_seconds: step,
        step_seconds_p05: interval.p05,
        step_seconds_p10: interval.p10,
        step_seconds_p90: interval.p90,
        step_seconds_p95: interval.p95,
        samples_per_second: rates.samples_per_second,
        tokens_per_second: rates.tokens_per_second,
        model_flops_per_device_per_second: rates.model_flops_per_device_per_second,
        mfu: rates.mfu,
        hfu: rates.hfu,
        peak_memory_bytes: Vec::new(),
        host_memory_bytes: vec![host],
        memory_by_component: Vec::new(),
        fits: true,
        chance_of_running_out: None,
        memory_peak: None,
        breakdown_seconds: Breakdown {
            compute: kernels,
            exposed_communication: time.exposed,
            bubble: waits.max(Seconds::ZERO),
            data: Seconds::ZERO,
            optimizer,
        },
        calibrated: uncalibrated.is_empty(),
        uncalibrated,
        events: time.launches,
        simulated_ranks: 1,
        cycle: Vec::new(),
        paces: None,
        load: None,
        checkpoint_seconds: None,
        checkpoint_write_seconds: None,
        wall_seconds: Seconds::ZERO,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_chance_is_even_at_the_limit_and_sure_far_from_it() {
        let chance = |allocated, wanted, limit| {
            let memory = TracedMemory { allocated: Bytes::new(allocated), wanted: Bytes::new(wanted), ..TracedMemory::default() };
            chance_of_running_out(&memory, limit)
        };
        assert!((chance(80_000, 80_000, 8e4) - 0.5).abs() < 1e-9 && (chance(70_000, 90_000, 8e4) - 0.5).abs() < 1e-9);
        assert!(chance(30_000, 30_000, 8e4) < 1e-6 && chance(200_000, 200_000, 8e4) > 1.0 - 1e-6);
        assert!((chance(1, 1, 0.0) - 1.0).abs() < 1e-9);
    }
}
