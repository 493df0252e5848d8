//! What a traced step runs on: how long its operators, passes over memory and collectives take, and
//! what the host does beside them.

use super::kernels::DeviceKernels;
use super::measured::MeasuredFramework;
use crate::gpu::cluster::Cluster;
use crate::gpu::nccl::NodeSpread;
use foretell_models::operator_tables::TracedOperator;
use foretell_program::traced::{TracedCollective, TracedJob};
use foretell_program::{Collective, CollectiveAlgorithm};
use foretell_units::{Bytes, Seconds};
use std::collections::BTreeSet;

/// Host time of an operator that eager Python issues, from the call to the launch, with autograd's
/// part. It and the hooks of `time.rs` are the values of traced stacks that are not a device's;
/// both were chosen by the rows of Qwen's README with 512 and 1,024 tokens (`more-users.csv`),
/// which wait for the host.
const HOST_OPERATOR: f64 = 10e-6;
/// Host time on a fast and on a slow machine over the expected one.
const HOSTS: [f64; 2] = [0.7, 2.5];
/// Time of kernels on a fast and on a slow machine, of devices whose kernels were measured.
const MEASURED_KERNELS: [f64; 2] = [0.87, 1.17];
/// The same of devices whose rates are those of a related one.
const ESTIMATED_KERNELS: [f64; 2] = [0.75, 1.33];
/// Time of collectives on a fast and on a slow machine.
const COLLECTIVES: [f64; 2] = [0.8, 1.6];
/// A step of a run that nobody tuned, over the expected one: loading data, logging, throttled and
/// shared machines. Chosen so that three of four sources of users' runs are inside the interval
/// (`users.csv`, `more-users.csv`; every source counting alike). The fourth are runs that were
/// reported because they were slow, up to 18 times, with nothing stated that says why.
const UNTUNED: f64 = 1.8;
/// The same of what was measured on this very machine: it changes its pace from hour to hour.
const SAME_MACHINE: [f64; 2] = [0.95, 1.07];

/// What a traced step runs on.
#[derive(Clone, Copy, Debug)]
pub enum TracedMachine<'a> {
    /// GPUs with a profile.
    Gpu(&'a Cluster),
    /// Devices on which the framework measured its own operators.
    Measured(&'a MeasuredFramework),
}

impl<'a> From<&'a Cluster> for TracedMachine<'a> {
    fn from(cluster: &'a Cluster) -> Self {
        Self::Gpu(cluster)
    }
}

impl TracedMachine<'_> {
    /// cuBLAS's workspaces, which PyTorch allocates: two of 8 MiB, on Hopper and later of 32 MiB
    /// (`getCUDABlasLtWorkspaceSize` and `parseChosenWorkspaceSize` in `CUDABlas.cpp`). Nothing
    /// where operators were measured.
    pub(crate) fn workspace(self) -> Bytes {
        let Self::Gpu(cluster) = self else { return Bytes::ZERO };
        let is_later = ["hopper", "blackwell"].iter().any(|generation| cluster.gpu.generation.starts_with(generation));
        Bytes::new(if is_later { 64 << 20 } else { 16 << 20 })
    }

    /// The context of CUDA with PyTorch's modules, and NCCL's buffers if there are several ranks.
    pub(crate) fn outside(self, ranks: usize) -> Bytes {
        match self {
            Self::Gpu(_) => Bytes::new(if ranks > 1 { 1400 << 20 } else { 600 << 20 }),
            Self::Measured(_) => Bytes::ZERO,
        }
    }

    /// Whether memory is that of a caching allocator, which holds more than is allocated.
    pub(crate) fn caches_memory(self) -> bool {
        matches!(self, Self::Gpu(_))
    }
}

/// The durations of a job's work on a machine.
pub(super) struct Durations<'a> {
    machine: TracedMachine<'a>,
    spread: Option<NodeSpread>,
    ranks: usize,
    narrows_at_once: bool,
    /// What was not measured, by name.
    pub(super) estimated: BTreeSet<String>,
}

impl<'a> Durations<'a> {
    pub(super) fn new(machine: TracedMachine<'a>, job: &TracedJob) -> Self {
        let ranks = job.ranks;
        let spread = match machine {
            TracedMachine::Gpu(cluster) => Some(NodeSpread::of_devices(0..ranks, cluster)),
            TracedMachine::Measured(_) => None,
        };
        // PyTorch does since the end of 2024 (pytorch/pytorch#137053); releases 4 of transformers
        // that have tables are as old, and are taken to have run on older ones.
        let narrows_at_once = job.table.key.get("version").is_none_or(|version| !version.starts_with("4."));
        Self { machine, spread, ranks, narrows_at_once, estimated: BTreeSet::new() }
    }

    fn kernels(&self, cluster: &'a Cluster) -> DeviceKernels<'a> {
        DeviceKernels { gpu: &cluster.gpu, narrows_at_once: self.narrows_at_once }
    }

    pub(super) fn operator(&mut self, operator: &TracedOperator, values: &[f64]) -> Seconds {
        match self.machine {
            TracedMachine::Gpu(cluster) => self.kernels(cluster).operator(operator, values) * cluster.paces.kernels,
            TracedMachine::Measured(framework) => {
                let (time, is_measured) = framework.operator(operator, values);
                self.note(is_measured, &operator.name);
                time
            }
        }
    }

    pub(super) fn moving(&mut self, name: &str, bytes: f64, launches: u64) -> Seconds {
        match self.machine {
            TracedMachine::Gpu(cluster) => {
                let time = self.kernels(cluster).moving(bytes) + cluster.gpu.launch * launches as f64;
                time * cluster.paces.kernels
            }
            TracedMachine::Measured(framework) => {
                let (time, is_measured) = framework.moving(name, bytes);
                self.note(is_measured, name);
                time
            }
        }
    }

    pub(super) fn collective(&self, kind: TracedCollective, bytes: f64) -> Seconds {
        let collective = match kind {
            TracedCollective::AllGather => Collective::AllGather,
            TracedCollective::ReduceScatter => Collective::ReduceScatter,
            TracedCollective::AllReduce => Collective::AllReduce,
        };
        match (self.machine, &self.spread) {
            (TracedMachine::Gpu(cluster), Some(spread)) => {
                spread.choose(collective, bytes, CollectiveAlgorithm::Automatic, cluster).0
            }
            (TracedMachine::Measured(framework), _) => framework.collective(kind, self.ranks, bytes),
            (TracedMachine::Gpu(_), None) => unreachable!("invariant: a job on GPUs knows how its nodes are joined"),
        }
    }

    /// Bytes of a second between a device and its host.
    pub(super) fn host_rate(&self) -> f64 {
        match self.machine {
            TracedMachine::Gpu(cluster) => cluster.gpu.host_rate.value(),
            TracedMachine::Measured(_) => unreachable!("invariant: `lacks` refuses copies to hosts"),
        }
    }

    /// Ranks that share a host.
    pub(super) fn ranks_of_host(&self) -> usize {
        match self.machine {
            TracedMachine::Gpu(cluster) => self.ranks.min(cluster.devices_per_node),
            TracedMachine::Measured(_) => self.ranks,
        }
    }

    /// The host's part: how it works, and the machines at the 10th and the 90th percentile.
    pub(super) fn paces(&self) -> [Pace; 3] {
        match self.machine {
            TracedMachine::Gpu(cluster) => {
                let [fast, slow] = if cluster.gpu.estimated { ESTIMATED_KERNELS } else { MEASURED_KERNELS };
                let spread = self.spread.as_ref().expect("invariant: a job on GPUs knows how its nodes are joined");
                let shared = (spread.channels(cluster) / cluster.gpu.multiprocessors).min(1.0);
                let pace = |host: f64, kernels, collectives| Pace {
                    host: HOST_OPERATOR * host * cluster.paces.host,
                    kernels,
                    collectives,
                    updates: host,
                    shared,
                    is_host: false,
                };
                [pace(1.0, 1.0, 1.0), pace(HOSTS[0], fast, COLLECTIVES[0]), pace(HOSTS[1], slow, COLLECTIVES[1])]
            }
            TracedMachine::Measured(framework) => {
                let [fast, slow] = [0, 1].map(|end| framework.spread[end] * SAME_MACHINE[end]);
                let pace = |scale: f64| Pace {
                    host: framework.operator_overhead * scale,
                    kernels: scale,
                    collectives: scale,
                    updates: scale,
                    shared: framework.communication_share,
                    is_host: true,
                };
                [pace(1.0), pace(fast.min(SAME_MACHINE[0])), pace(slow.max(SAME_MACHINE[1]))]
            }
        }
    }

    /// The framework's own time of a step.
    pub(super) fn step_overhead(&self) -> f64 {
        match self.machine {
            TracedMachine::Gpu(_) => 0.0,
            TracedMachine::Measured(framework) => framework.step_overhead,
        }
    }

    /// How much longer than expected a step may take in a run that nobody tuned.
    pub(super) fn untuned(&self) -> f64 {
        match self.machine {
            TracedMachine::Gpu(cluster) if cluster.gpu.estimated => UNTUNED * ESTIMATED_KERNELS[1] / MEASURED_KERNELS[1],
            TracedMachine::Gpu(_) => UNTUNED,
            TracedMachine::Measured(_) => 1.0,
        }
    }

    fn note(&mut self, is_measured: bool, name: &str) {
        if !is_measured && !self.estimated.contains(name) {
            self.estimated.insert(name.to_owned());
        }
    }
}

/// Durations on a machine over the expected ones.
///
/// A step's interval follows from a fast and a slow machine, so that it is wide where the step
/// waits for what varies most between machines: the host, which issues operators, and the network.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Pace {
    /// Host time of an operator, in seconds.
    pub(super) host: f64,
    pub(super) kernels: f64,
    pub(super) collectives: f64,
    /// Updates of parameters by the host.
    pub(super) updates: f64,
    /// The share of the device that a collective takes from kernels.
    pub(super) shared: f64,
    /// Whether the host is the device and runs the kernels itself.
    pub(super) is_host: bool,
}
