//! Time of a traced step: the host issues operators in order, kernels run on one stream and
//! collectives on another.

use super::kernels;
use super::machine::{Durations, Pace, TracedMachine};
use foretell_models::operator_tables::{TableError, TracedOperator};
use foretell_program::traced::{AllocationStream, HostOptimizer, RankEvent, TracedCollective, TracedJob, TracedPhase};
use foretell_units::Seconds;
use rustc_hash::FxHashMap;
use std::collections::{BTreeMap, BTreeSet};

/// Host time of a collective with the wrapper's code around it, in operators.
const COLLECTIVE_OPERATORS: f64 = 20.0;
/// Host time of a hook around a module, in operators: DeepSpeed's stage 3 fetches, releases and
/// gathers ahead in Python.
const HOOK_OPERATORS: f64 = 15.0;
/// Time in which a node's processors update an element, by `DeepSpeedCPUAdam` and by PyTorch: 2.57
/// and 14.76 s for 10 billion (Ren et al. 2021, "ZeRO-Offload", table 4, two Xeon Platinum 8168).
const DEEPSPEED_UPDATE: f64 = 0.257e-9;
const PYTORCH_UPDATE: f64 = 1.476e-9;
/// Time that an empty cache of the allocator takes: it waits for the device, and frees and
/// allocates segments.
const FLUSH: f64 = 0.05;

/// Where the time of a traced step goes.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TracedTime {
    /// The step.
    pub step: Seconds,
    /// 10th and 90th percentile of the step: that of a fast and of a slow machine.
    pub step_range: [Seconds; 2],
    /// Kernels of matrix products and attention.
    pub arithmetic: Seconds,
    /// Kernels that move memory.
    pub memory_bound: Seconds,
    /// Collectives, and copies between device and host, overlapped or not.
    pub communication: Seconds,
    /// Waiting for collectives.
    pub exposed: Seconds,
    /// Waiting for the host.
    pub host_bound: Seconds,
    /// Kernels of the optimizer.
    pub optimizer: Seconds,
    /// The host's time to update parameters.
    pub host_update: Seconds,
    /// Operations of matrix products and attention in the forward pass.
    pub forward_flops: f64,
    /// The same in passes without gradients.
    pub reference_flops: f64,
    /// The same in the backward pass, with what it computes again.
    pub backward_flops: f64,
    /// Kernels that are launched.
    pub launches: u64,
    /// Kernel time by operator.
    pub by_operator: BTreeMap<String, Seconds>,
    /// Operators whose time is an estimate although the framework measured others.
    pub estimated: BTreeSet<String>,
}

impl TracedTime {
    /// The time of a step with `more` micro-batches than this one has, each like its last but one.
    /// `fewer` is the time of a step with one less.
    #[must_use]
    pub fn extended(mut self, fewer: &Self, more: f64) -> Self {
        let add = |sum: &mut Seconds, before: Seconds| *sum += (*sum - before) * more;
        add(&mut self.step, fewer.step);
        self.step_range.iter_mut().zip(fewer.step_range).for_each(|(sum, before)| add(sum, before));
        add(&mut self.arithmetic, fewer.arithmetic);
        add(&mut self.memory_bound, fewer.memory_bound);
        add(&mut self.communication, fewer.communication);
        add(&mut self.exposed, fewer.exposed);
        add(&mut self.host_bound, fewer.host_bound);
        add(&mut self.optimizer, fewer.optimizer);
        add(&mut self.host_update, fewer.host_update);
        for (operator, sum) in &mut self.by_operator {
            add(sum, fewer.by_operator.get(operator).copied().unwrap_or_default());
        }
        self.forward_flops += (self.forward_flops - fewer.forward_flops) * more;
        self.reference_flops += (self.reference_flops - fewer.reference_flops) * more;
        self.backward_flops += (self.backward_flops - fewer.backward_flops) * more;
        self.launches += ((self.launches - fewer.launches) as f64 * more).round() as u64;
        self
    }
}

/// The clocks of a rank.
struct Clocks {
    pace: Pace,
    host: f64,
    compute: f64,
    communication: f64,
    /// When the last collective of each kind ends.
    ends: FxHashMap<TracedCollective, f64>,
}

impl Clocks {
    fn new(pace: Pace) -> Self {
        Self { pace, host: 0.0, compute: 0.0, communication: 0.0, ends: FxHashMap::default() }
    }

    /// Launches kernels that take `duration` together. Returns how long the device waited for the
    /// host.
    fn launch(&mut self, duration: f64, launches: u64) -> f64 {
        self.host += self.pace.host * launches as f64;
        let start = self.compute.max(self.host);
        let waited = start - self.compute;
        self.compute = start + duration * self.pace.kernels;
        if self.pace.shared.is_some() {
            self.host = self.compute;
        }
        waited
    }

    /// Starts a collective. What it sends is there now, or once the kernels before have made it.
    fn collective(&mut self, kind: TracedCollective, duration: f64, is_there: bool) {
        self.host += self.pace.host * COLLECTIVE_OPERATORS;
        let ready = if is_there { 0.0 } else { self.compute };
        let duration = duration * self.pace.collectives;
        self.communication = self.communication.max(self.host).max(ready) + duration;
        // Threads of the collective run on the kernels' own processor.
        self.compute += duration * self.pace.shared.unwrap_or(0.0);
        self.ends.insert(kind, self.communication);
    }

    /// Runs a wrapper's code around modules.
    fn hooks(&mut self, calls: u64) {
        self.host += self.pace.host * HOOK_OPERATORS * calls as f64;
    }

    /// Copies between device and host, on the stream of kernels or on that of collectives.
    fn host_copy(&mut self, duration: f64, stream: AllocationStream) {
        self.host += self.pace.host;
        // Parameters are there before the kernels that use them.
        let ready = if stream == AllocationStream::Gather { 0.0 } else { self.compute };
        let start = self.host.max(ready);
        let duration = duration * self.pace.collectives;
        if stream == AllocationStream::Compute {
            self.compute = start + duration;
        } else {
            self.communication = self.communication.max(start) + duration;
            let last =
                [TracedCollective::AllGather, TracedCollective::ReduceScatter][usize::from(stream == AllocationStream::Reduce)];
            self.ends.insert(last, self.communication);
        }
    }

    /// The host updates parameters, once the device has done all that it was given.
    fn host_update(&mut self, duration: f64) {
        self.host = self.end() + duration * self.pace.updates;
        self.compute = self.host;
    }

    /// Makes kernels wait for the last collective of a kind. Returns how long.
    fn wait(&mut self, kind: TracedCollective) -> f64 {
        let end = self.ends.get(&kind).copied().unwrap_or(0.0);
        let waited = (end - self.compute).max(0.0);
        self.compute += waited;
        waited
    }

    fn end(&self) -> f64 {
        self.compute.max(self.host).max(self.communication)
    }
}

/// The time of a step whose memory returned cached segments `flushes` times.
///
/// # Errors
/// [`TableError`] if the table needs a size that is not given.
pub fn traced_time<'a>(job: &TracedJob, machine: impl Into<TracedMachine<'a>>, flushes: u64) -> Result<TracedTime, TableError> {
    let mut durations = Durations::new(machine.into(), job.ranks);
    let values = job.table.values(&job.sizes)?;
    let mut known: FxHashMap<*const TracedOperator, (Seconds, f64)> = FxHashMap::default();
    // The expected machine comes first: only its time is told apart.
    let mut machines = durations.paces().map(Clocks::new);
    let mut time = TracedTime::default();
    let mut phase = TracedPhase::Idle;
    job.emit(1, |event| match event {
        RankEvent::Phase(next) => phase = next,
        RankEvent::Operator(operator) => {
            let of_operator = || (durations.operator(operator, &values), kernels::flops(operator, &values));
            let (duration, operations) = *known.entry(std::ptr::from_ref(operator)).or_insert_with(of_operator);
            time.launch(&mut machines, duration, 1);
            let is_arithmetic = is_arithmetic(&operator.name);
            let flops = match phase {
                TracedPhase::Forward => &mut time.forward_flops,
                TracedPhase::Reference => &mut time.reference_flops,
                TracedPhase::Idle | TracedPhase::Backward | TracedPhase::Optimizer => &mut time.backward_flops,
            };
            *flops += operations;
            let part = if is_arithmetic { &mut time.arithmetic } else { &mut time.memory_bound };
            *part += duration;
            if let Some(sum) = time.by_operator.get_mut(&operator.name) {
                *sum += duration;
            } else {
                time.by_operator.insert(operator.name.clone(), duration);
            }
        }
        RankEvent::Moves { name, bytes, launches } => {
            let duration = durations.moving(name, bytes as f64, launches);
            time.launch(&mut machines, duration, launches);
            time.memory_bound += duration;
            if phase == TracedPhase::Optimizer {
                time.optimizer += duration;
            }
            let sum = time.by_operator.entry(name.to_owned()).or_default();
            *sum += duration;
        }
        RankEvent::Collective { kind, bytes } => {
            let duration = durations.collective(kind, bytes as f64);
            // Gradients are reduced once the kernels before have made them, and so are parameters
            // gathered that the optimizer updates; others are there already.
            let is_there = kind == TracedCollective::AllGather && phase != TracedPhase::Optimizer;
            machines.iter_mut().for_each(|clocks| clocks.collective(kind, duration.value(), is_there));
            time.communication += duration;
        }
        RankEvent::Wait(kind) => {
            let [exposed, ..] = machines.each_mut().map(|clocks| clocks.wait(kind));
            time.exposed += Seconds::new(exposed);
        }
        RankEvent::Hooks { calls } => machines.iter_mut().for_each(|clocks| clocks.hooks(calls)),
        RankEvent::HostCopy { bytes, stream } => {
            let duration = bytes as f64 / durations.host_rate();
            machines.iter_mut().for_each(|clocks| clocks.host_copy(duration, stream));
            time.communication += Seconds::new(duration);
            if stream == AllocationStream::Compute {
                time.exposed += Seconds::new(duration);
            }
        }
        RankEvent::HostUpdate { elements, by } => {
            let of_element = match by {
                HostOptimizer::DeepSpeed => DEEPSPEED_UPDATE,
                HostOptimizer::PyTorch => PYTORCH_UPDATE,
            };
            let duration = of_element * elements as f64 * durations.ranks_of_host() as f64;
            machines.iter_mut().for_each(|clocks| clocks.host_update(duration));
            time.host_update += Seconds::new(duration);
        }
        RankEvent::HostMemory { .. }
        | RankEvent::Part(_)
        | RankEvent::Allocate { .. }
        | RankEvent::Release { .. }
        | RankEvent::Becomes { .. } => {}
    })?;
    let beside = flushes as f64 * FLUSH + durations.step_overhead();
    let [step, fast, slow] = machines.map(|clocks| Seconds::new(clocks.end() + beside));
    (time.step, time.step_range, time.estimated) = (step, [fast, slow], durations.estimated);
    Ok(time)
}

impl TracedTime {
    /// Launches kernels that take `duration` together, on each of the machines.
    fn launch(&mut self, machines: &mut [Clocks; 3], duration: Seconds, launches: u64) {
        let [waited, ..] = machines.each_mut().map(|clocks| clocks.launch(duration.value(), launches));
        self.host_bound += Seconds::new(waited);
        self.launches += launches;
    }
}

fn is_arithmetic(name: &str) -> bool {
    let name = name.rsplit('.').next().unwrap_or("");
    name.ends_with("mm") || name.contains("_attention") || name.starts_with("convolution")
}
