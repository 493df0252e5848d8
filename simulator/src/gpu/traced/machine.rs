//! The machine on which a traced step runs: how long its operators, passes over memory and
//! collectives take, and the host's time.

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
/// part. This value and `HOOK_OPERATORS` in `time.rs` do not come from a device's profile. Both
/// were fitted to the rows of Qwen's README with 512 and 1,024 tokens (`more-users.csv`), whose
/// steps wait for the host.
const HOST_OPERATOR: f64 = 10e-6;
/// Ratio of the host time on a fast and on a slow machine to the expected time.
const HOSTS: [f64; 2] = [0.7, 2.5];
/// Ratio of kernel times on a fast and on a slow machine to the expected times, on devices whose
/// kernels were measured.
const MEASURED_KERNELS: [f64; 2] = [0.87, 1.17];
/// Ratio of kernel times on a fast and on a slow machine to the expected times, on devices whose
/// rates are taken from a related device.
const ESTIMATED_KERNELS: [f64; 2] = [0.75, 1.33];
/// Ratio of the time of collectives on a fast and on a slow machine to the expected time.
const COLLECTIVES: [f64; 2] = [0.8, 1.6];
/// Ratio of the time of a step in a run that nobody tuned to the expected time. The causes are
/// loading of data, logging, throttled and shared machines. Chosen so that three of four sources of
/// users' runs are inside the interval (`users.csv`, `more-users.csv`; all sources have equal
/// weight). Runs of the fourth were reported because they were slow, up to 18 times, without a
/// stated cause.
const UNTUNED: f64 = 1.8;
/// Ratio of times on a fast and on a slow machine to the expected times, if they were measured on
/// this very machine: its speed varies from hour to hour.
const SAME_MACHINE: [f64; 2] = [0.95, 1.07];

/// The machine on which a traced step runs.
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
    /// Bytes of cuBLAS's two workspaces, which PyTorch allocates: 8 MiB each, on Hopper and later
    /// 32 MiB (`getCUDABlasLtWorkspaceSize` and `parseChosenWorkspaceSize` in `CUDABlas.cpp`). Zero
    /// if operators were measured.
    pub(crate) fn workspace(self) -> Bytes {
        let Self::Gpu(cluster) = self else { return Bytes::ZERO };
        let is_later = ["hopper", "blackwell"].iter().any(|generation| cluster.gpu.generation.starts_with(generation));
        Bytes::new(if is_later { 64 << 20 } else { 16 << 20 })
    }

    /// Bytes outside the allocator: the CUDA context with PyTorch's modules, and NCCL's buffers if
    /// there are several ranks. Zero if operators were measured.
    pub(crate) fn outside(self, ranks: usize) -> Bytes {
        match self {
            Self::Gpu(_) => Bytes::new(if ranks > 1 { 1400 << 20 } else { 600 << 20 }),
            Self::Measured(_) => Bytes::ZERO,
        }
    }

    /// Whether memory comes from a caching allocator, which reserves more than is allocated.
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
    /// The names of operators that were not measured.
    pub(super) estimated: BTreeSet<String>,
}

impl<'a> Durations<'a> {
    pub(super) fn new(machine: TracedMachine<'a>, job: &TracedJob) -> Self {
        let ranks = job.ranks;
        let spread = match machine {
            TracedMachine::Gpu(cluster) => Some(NodeSpread::of_devices(0..ranks, cluster)),
            TracedMachine::Measured(_) => None,
        };
        // PyTorch casts several elements together since the end of 2024 (pytorch/pytorch#137053).
        // Releases 4 of transformers that have tables are older than that, and are assumed to have
        // run on older PyTorch.
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

    /// The rate between a device and its host, in bytes per second.
    pub(super) fn host_rate(&self) -> f64 {
        match self.machine {
            TracedMachine::Gpu(cluster) => cluster.gpu.host_rate.value(),
            TracedMachine::Measured(_) => unreachable!("invariant: `lacks` refuses copies to hosts"),
        }
    }

    /// Number of ranks that share a host.
    pub(super) fn ranks_of_host(&self) -> usize {
        match self.machine {
            TracedMachine::Gpu(cluster) => self.ranks.min(cluster.devices_per_node),
            TracedMachine::Measured(_) => self.ranks,
        }
    }

    /// The paces of the expected machine, and of machines at the 10th and the 90th percentile.
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

    /// The framework's own time per step, in seconds.
    pub(super) fn step_overhead(&self) -> f64 {
        match self.machine {
            TracedMachine::Gpu(_) => 0.0,
            TracedMachine::Measured(framework) => framework.step_overhead,
        }
    }

    /// Ratio of the time of a step in a run that nobody tuned to the expected time.
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

/// Ratios of the durations on one machine to the expected ones.
///
/// A step's interval follows from a fast and a slow machine. So it is wide if the step waits for
/// the parts that vary most between machines: the host, which issues operators, and the network.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Pace {
    /// Host time per operator, in seconds.
    pub(super) host: f64,
    pub(super) kernels: f64,
    pub(super) collectives: f64,
    /// Ratio for parameter updates by the host.
    pub(super) updates: f64,
    /// The share of the device that a collective takes from kernels.
    pub(super) shared: f64,
    /// Whether the host is the device and runs the kernels itself.
    pub(super) is_host: bool,
}
