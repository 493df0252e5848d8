//! Time of a traced step: the host issues operators in order, kernels run on one stream and
//! collectives on another.

use super::kernels::DeviceKernels;
use crate::gpu::cluster::Cluster;
use crate::gpu::nccl::NodeSpread;
use foretell_models::operator_tables::{TableError, TracedOperator};
use foretell_program::traced::{RankEvent, TracedCollective, TracedJob, TracedPhase};
use foretell_program::{Collective, CollectiveAlgorithm};
use foretell_units::Seconds;
use rustc_hash::FxHashMap;
use std::collections::BTreeMap;

/// Host time of an operator that eager Python issues, from the call to the launch. The one value of
/// traced stacks that is not a device's: 4 to 8 us a launch in the profiles of torchtitan and
/// Hugging Face's Trainer.
const HOST_OPERATOR: f64 = 6e-6;
/// Host time of a collective with the wrapper's code around it, in operators.
const COLLECTIVE_OPERATORS: f64 = 20.0;
/// Time that an empty cache of the allocator takes: it waits for the device, and frees and
/// allocates segments.
const FLUSH: f64 = 0.05;

/// Where the time of a traced step goes.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TracedTime {
    /// The step.
    pub step: Seconds,
    /// Kernels of matrix products and attention.
    pub arithmetic: Seconds,
    /// Kernels that move memory.
    pub memory_bound: Seconds,
    /// Collectives, overlapped or not.
    pub communication: Seconds,
    /// Waiting for collectives.
    pub exposed: Seconds,
    /// Waiting for the host.
    pub host_bound: Seconds,
    /// Kernels of the optimizer.
    pub optimizer: Seconds,
    /// Operations of matrix products and attention in the forward pass.
    pub forward_flops: f64,
    /// The same in the backward pass, with what it computes again.
    pub backward_flops: f64,
    /// Kernels that are launched.
    pub launches: u64,
    /// Kernel time by operator.
    pub by_operator: BTreeMap<String, Seconds>,
}

impl TracedTime {
    /// The time of a step with `more` micro-batches than this one has, each like its last but one.
    /// `fewer` is the time of a step with one less.
    #[must_use]
    pub fn extended(mut self, fewer: &Self, more: f64) -> Self {
        let add = |sum: &mut Seconds, before: Seconds| *sum += (*sum - before) * more;
        add(&mut self.step, fewer.step);
        add(&mut self.arithmetic, fewer.arithmetic);
        add(&mut self.memory_bound, fewer.memory_bound);
        add(&mut self.communication, fewer.communication);
        add(&mut self.exposed, fewer.exposed);
        add(&mut self.host_bound, fewer.host_bound);
        add(&mut self.optimizer, fewer.optimizer);
        for (operator, sum) in &mut self.by_operator {
            add(sum, fewer.by_operator.get(operator).copied().unwrap_or_default());
        }
        self.forward_flops += (self.forward_flops - fewer.forward_flops) * more;
        self.backward_flops += (self.backward_flops - fewer.backward_flops) * more;
        self.launches += ((self.launches - fewer.launches) as f64 * more).round() as u64;
        self
    }
}

/// The clocks of a rank.
#[derive(Default)]
struct Clocks {
    host: f64,
    compute: f64,
    communication: f64,
    /// When the last collective of each kind ends.
    ends: FxHashMap<TracedCollective, f64>,
}

/// The time of a step whose memory returned cached segments `flushes` times.
///
/// # Errors
/// [`TableError`] if the table needs a size that is not given.
pub fn traced_time(job: &TracedJob, cluster: &Cluster, flushes: u64) -> Result<TracedTime, TableError> {
    let kernels = DeviceKernels { gpu: &cluster.gpu };
    let values = job.table.values(&job.sizes)?;
    let spread = NodeSpread::of_devices(0..job.ranks, cluster);
    let mut known: FxHashMap<*const TracedOperator, (Seconds, f64)> = FxHashMap::default();
    let mut clocks = Clocks::default();
    let mut time = TracedTime::default();
    let mut phase = TracedPhase::Idle;
    job.emit(1, |event| match event {
        RankEvent::Phase(next) => phase = next,
        RankEvent::Operator(operator) => {
            let of_operator = || (kernels.operator(operator, &values), kernels.flops(operator, &values));
            let (duration, operations) = *known.entry(std::ptr::from_ref(operator)).or_insert_with(of_operator);
            launch(&mut clocks, &mut time, duration.value(), 1);
            let is_arithmetic = is_arithmetic(&operator.name);
            let flops = if phase == TracedPhase::Forward { &mut time.forward_flops } else { &mut time.backward_flops };
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
            let duration = kernels.moving(bytes as f64) + cluster.gpu.launch * launches as f64;
            launch(&mut clocks, &mut time, duration.value(), launches);
            time.memory_bound += duration;
            if phase == TracedPhase::Optimizer {
                time.optimizer += duration;
            }
            let sum = time.by_operator.entry(name.to_owned()).or_default();
            *sum += duration;
        }
        RankEvent::Collective { kind, bytes } => {
            clocks.host += HOST_OPERATOR * COLLECTIVE_OPERATORS;
            let collective = match kind {
                TracedCollective::AllGather => Collective::AllGather,
                TracedCollective::ReduceScatter => Collective::ReduceScatter,
                TracedCollective::AllReduce => Collective::AllReduce,
            };
            let (duration, _) = spread.choose(collective, bytes as f64, CollectiveAlgorithm::Automatic, cluster);
            // Gradients are reduced once the kernels before have made them, and so are parameters
            // gathered that the optimizer updates; others are there already.
            let is_there = kind == TracedCollective::AllGather && phase != TracedPhase::Optimizer;
            let ready = if is_there { 0.0 } else { clocks.compute };
            clocks.communication = clocks.communication.max(clocks.host).max(ready) + duration.value();
            clocks.ends.insert(kind, clocks.communication);
            time.communication += duration;
        }
        RankEvent::Wait(kind) => {
            let end = clocks.ends.get(&kind).copied().unwrap_or(0.0);
            time.exposed += Seconds::new((end - clocks.compute).max(0.0));
            clocks.compute = clocks.compute.max(end);
        }
        _ => {}
    })?;
    let end = clocks.compute.max(clocks.host).max(clocks.communication);
    time.step = Seconds::new(end + flushes as f64 * FLUSH);
    Ok(time)
}

/// Launches kernels that take `duration` together.
fn launch(clocks: &mut Clocks, time: &mut TracedTime, duration: f64, launches: u64) {
    clocks.host += HOST_OPERATOR * launches as f64;
    let start = clocks.compute.max(clocks.host);
    time.host_bound += Seconds::new(start - clocks.compute);
    clocks.compute = start + duration;
    time.launches += launches;
}

fn is_arithmetic(name: &str) -> bool {
    let name = name.rsplit('.').next().unwrap_or("");
    name.ends_with("mm") || name.contains("_attention") || name.starts_with("convolution")
}
