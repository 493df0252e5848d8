//! The cost model: how long one thing takes when nothing hinders it. It answers from a profile
//! where something alike was measured; for GPUs that nobody here has timed, from what was fitted on
//! runs that others published ([`crate::gpu`]); else from the data sheet; and says which of the
//! three it did.
//!
//! It must not know Programs: it is asked about a kernel or a message, never about a layout or a
//! schedule.

use super::communication::{CommunicationCost, CommunicationTable};
use super::device_kind::{KindCosts, is_of};
use super::estimate::{Estimate, KernelCost, Source};
use super::link_efficiency::LinkEfficiency;
use super::parameters::Parameters;
use super::profiled_gpu::ProfiledGpu;
use super::roofline;
use super::scale::CostScale;
use super::uncertainty::Uncertainty;
use crate::gpu::{Cluster, ProductFormat, ProfileError, Profiles, StackProfile, Workload};
use foretell_models::Kernel;
use foretell_program::{Phase, Profile, Reach};
use foretell_topologies::{Architecture, Topology};
use foretell_units::{Bytes, DataType, FlopsPerSecond, Seconds};

/// What setting up a copy takes, however small it is: an estimate for want of a measurement, as it
/// is of the order of a small copy over PCIe.
const COPY_LATENCY: Seconds = Seconds::new(10e-6);

/// What copies get of a slot's stated rate: large pinned copies reach 25 of 31 GB/s in PCIe 4 x16;
/// an estimate for others.
const HOST_LINK_EFFICIENCY: f64 = 0.8;

/// How long things take on the devices of one topology.
#[derive(Clone, Debug)]
pub struct CostModel {
    kinds: Vec<KindCosts>,
    /// What exchanges get of the links that were not measured.
    pub links: LinkEfficiency,
    /// Bytes that a sender may be ahead of its receiver; messages of more than that wait for it.
    /// None without a profile of some kind.
    pub buffered: Bytes,
    /// How much slower than its costs say a device is over time: quantiles at equal steps of
    /// probability (see [`Profile::paces`]). None is below 1: costs are those of a device at its
    /// best, and a lower bound made of them has to stay one.
    pub paces: Vec<f64>,
    /// Cores that a lab's devices share in turn, where the profile was measured in one: device n is
    /// on core n modulo this.
    pub cores: Option<usize>,
    /// How far off step times that are made of these costs may be for what no cost says.
    pub uncertainty: Uncertainty,
    /// What a what-if question makes of all that.
    scale: CostScale,
    /// The 10th and 90th percentile of a step over its prediction, where that is known of such runs
    /// as a whole.
    pub step_spread: Option<[f64; 2]>,
}

impl CostModel {
    /// A model of the topology's kinds of device. The profile is believed for the kind that it
    /// names, or that was made from the library device that it names; the data sheet for all
    /// others. Where it is of no kind of device here, nothing of it counts.
    pub fn new(profile: Option<&Profile>, topology: &Topology) -> Self {
        let kinds = topology.device_kinds();
        let profile = profile.filter(|profile| kinds.iter().any(|kind| is_of(profile, kind, topology)));
        let buffered = profile.map_or(Bytes::ZERO, |profile| Bytes::new(profile.buffered_bytes));
        let paces = profile.map(|profile| {
            let paces = profile.paces.iter().copied().filter(|pace| pace.is_finite());
            paces.map(|pace| pace.max(1.0)).collect()
        });
        Self {
            kinds: kinds
                .iter()
                .map(|kind| KindCosts::new(kind, profile.filter(|profile| is_of(profile, kind, topology))))
                .collect(),
            links: profile.map_or_else(LinkEfficiency::default, |profile| LinkEfficiency::measured(profile, topology)),
            buffered,
            paces: paces.unwrap_or_default(),
            cores: profile.filter(|_| topology.is_lab()).and_then(|profile| profile.machine.cores),
            uncertainty: Uncertainty::MEASURED,
            scale: CostScale::NONE,
            step_spread: None,
        }
    }

    /// The same with what is known of a software stack on those kinds of device that are in the
    /// profiles of GPUs and were not calibrated.
    ///
    /// # Errors
    /// [`ProfileError::Unknown`] where there is no such stack.
    pub fn with_stack(mut self, topology: &Topology, stack: &str, precision: DataType) -> Result<Self, ProfileError> {
        let profiles = Profiles::library()?;
        let stack = profiles.stack(stack)?;
        let clusters: Vec<_> = (0..self.kinds.len()).map(|kind| ProfiledGpu::cluster(profiles, topology, kind)).collect();
        let format = ProductFormat::of(precision);
        for (costs, cluster) in self.kinds.iter_mut().zip(clusters) {
            if let Some(cluster) = cluster.filter(|_| costs.kernels.is_none()) {
                costs.profiled_gpu = Some(ProfiledGpu::new(cluster, stack.clone(), format, Workload::default()));
            }
        }
        self.take_from_profiled_gpus();
        Ok(self)
    }

    /// A model of kinds of GPU under a software stack, of which everything is said: kind n is that
    /// of the n-th cluster.
    pub fn of_clusters(clusters: &[&Cluster], stack: &StackProfile, format: ProductFormat, workload: Workload) -> Self {
        let kinds = clusters.iter().map(|&cluster| KindCosts {
            kind: ProfiledGpu::device_kind(cluster),
            speed: 1.0,
            parameters: roofline::parameters(Architecture::Gpu),
            kernels: None,
            exchanges: None,
            scaled_kind: None,
            profiled_gpu: Some(ProfiledGpu::new(cluster.clone(), stack.clone(), format, workload)),
        });
        let mut costs = Self {
            kinds: kinds.collect(),
            links: LinkEfficiency::IDEAL,
            buffered: Bytes::ZERO,
            paces: Vec::new(),
            cores: None,
            uncertainty: Uncertainty::NONE,
            scale: CostScale::NONE,
            step_spread: None,
        };
        costs.take_from_profiled_gpus();
        costs
    }

    /// What else follows from the stack.
    fn take_from_profiled_gpus(&mut self) {
        for costs in &mut self.kinds {
            if let Some(profiled_gpu) = &costs.profiled_gpu {
                costs.parameters = profiled_gpu.parameters();
            }
        }
        if let Some(profiled_gpu) = self.kinds.iter().find_map(|costs| costs.profiled_gpu.as_ref()) {
            self.links = profiled_gpu.link_efficiency();
            self.step_spread = Some(profiled_gpu.stack.spread);
            // Sends are put into NCCL's buffers, and frameworks post receives before they need
            // them.
            self.buffered = Bytes::new(u64::MAX / 2);
        }
    }

    /// How long a kernel takes alone on a device of a kind (an index into
    /// [`Topology::device_kinds`]).
    pub fn kernel_time(&self, kernel: &Kernel, accumulate: bool, precision: DataType, kind: usize) -> Estimate {
        self.kernel_cost(kernel, accumulate, precision, kind).time
    }

    /// The same, and what its launch takes of the host.
    pub fn kernel_cost(&self, kernel: &Kernel, accumulate: bool, precision: DataType, kind: usize) -> KernelCost {
        let costs = &self.kinds[kind];
        if let Some(profiled_gpu) = &costs.profiled_gpu {
            let KernelCost { time, launch } = profiled_gpu.kernel_cost(kernel, accumulate, precision);
            return KernelCost { time: time.over(self.scale.speed), launch };
        }
        let whole = costs
            .kernels
            .as_ref()
            .and_then(|table| table.estimate(kernel, accumulate, precision, &costs.kind))
            .unwrap_or_else(|| Estimate::assumed(roofline::kernel_time(kernel, accumulate, precision, &costs.kind)));
        let scaled = match &costs.scaled_kind {
            None => whole,
            Some(scaled) => {
                let launch = roofline::launch(costs.kind.architecture);
                let alone = |kind| roofline::kernel_time(kernel, accumulate, precision, kind) - launch;
                let before = alone(&costs.kind);
                let ratio = if before > Seconds::ZERO { alone(scaled) / before } else { 1.0 } / self.scale.speed;
                // What was measured has no launch that could be told apart; its overhead is among
                // the parameters.
                let launch = if whole.source == Source::Roofline { launch } else { Seconds::ZERO };
                whole.changed(|time, spread| (time - launch * spread) * ratio + launch * (spread * self.scale.launch))
            }
        };
        KernelCost { time: scaled.over(costs.speed), launch: Seconds::ZERO }
    }

    /// Answers for other devices and links from here on.
    pub(crate) fn rescale(&mut self, scale: CostScale) {
        self.scale = scale;
        for costs in &mut self.kinds {
            costs.scaled_kind = Some(costs.kind.scaled(scale.peak, scale.memory_bandwidth));
            if let Some(profiled_gpu) = &mut costs.profiled_gpu {
                profiled_gpu.rescale(&scale);
            }
        }
    }

    /// What an exchange takes over the links that are asked about, from what was measured over
    /// those that there are.
    pub(crate) fn rescaled(&self, cost: CommunicationCost, reach: Reach) -> CommunicationCost {
        let links = &self.scale.links;
        let (bandwidth, latency) = match reach {
            Reach::Node => (links.intra_node_bandwidth, links.intra_node_latency),
            _ => (links.inter_node_bandwidth, links.inter_node_latency),
        };
        CommunicationCost { latency: cost.latency * latency, flow: cost.flow / bandwidth, ..cost }
    }

    /// What a launch in a phase takes of the host over what it takes in the forward pass.
    pub fn launch_share(&self, kind: usize, phase: Phase) -> f64 {
        self.kinds[kind].profiled_gpu.as_ref().map_or(1.0, |profiled_gpu| profiled_gpu.launch_share(phase))
    }

    /// How long a device of a kind takes to copy so much to its host's memory, or from it: with the
    /// rate that exchanges get of what its link states where the device has such a link, and on top
    /// of `COPY_LATENCY`.
    pub fn copy_time(&self, kind: usize, bytes: Bytes) -> Estimate {
        let latency = if self.kinds[kind].has_host_link() { COPY_LATENCY } else { Seconds::ZERO };
        Estimate::assumed(self.copy_seconds_per_byte(kind) * bytes.value() + latency)
    }

    /// What each byte of it takes.
    pub fn copy_seconds_per_byte(&self, kind: usize) -> Seconds {
        let costs = &self.kinds[kind];
        let (share, speed) = if costs.has_host_link() { (HOST_LINK_EFFICIENCY, 1.0) } else { (1.0, costs.speed) };
        Seconds::new(1.0 / (costs.kind.host_rate().value() * share * speed))
    }

    /// What the launch of a collective or a message takes of the host.
    pub fn exchange_launch(&self, kind: usize) -> Seconds {
        self.kinds[kind].profiled_gpu.as_ref().map_or(Seconds::ZERO, ProfiledGpu::communication_launch)
    }

    /// The rate that no product of matrices passes on a kind of device, by its number among the
    /// topology's; nothing where the profiles of GPUs do not say what products take there.
    pub fn fastest_products(&self, kind: usize) -> Option<FlopsPerSecond> {
        let rate = self.kinds.get(kind)?.profiled_gpu.as_ref()?.fastest_products();
        Some(rate * self.scale.speed)
    }

    /// A kind that is known by the profiles of GPUs. Whether the profiles of GPUs say what
    /// collectives take on devices of a kind, by its number among the topology's.
    pub fn knows_collectives(&self, kind: usize) -> bool {
        kind < self.kind_count() && self.profiled_gpu(kind).is_some()
    }

    /// Whether ranks on a kind of device that shard a sequence have as much of it to do as each
    /// other ([`StackProfile::balances_parts`]).
    pub(crate) fn balances_parts(&self, kind: usize) -> bool {
        self.profiled_gpu(kind).is_some_and(|profiled_gpu| profiled_gpu.stack.balances_parts)
    }

    pub(crate) fn profiled_gpu(&self, kind: usize) -> Option<&ProfiledGpu> {
        self.kinds[kind].profiled_gpu.as_ref()
    }

    /// How fast a kind of device is beside a whole device of its figures.
    pub(crate) fn speed(&self, kind: usize) -> f64 {
        self.kinds[kind].speed
    }

    /// The same of a kind that has a share of its processor's time: it goes at a whole device's
    /// speed until its budget of a period is used up.
    pub(crate) fn quota(&self, kind: usize) -> Option<f64> {
        let costs = &self.kinds[kind];
        costs.kind.cpu_quota.filter(|&share| share < 1.0).map(|_| costs.speed).filter(|&speed| speed > 0.0 && speed < 1.0)
    }

    /// What a kind of device costs beside its kernels.
    pub fn parameters(&self, kind: usize) -> &Parameters {
        &self.kinds[kind].parameters
    }

    /// The same, to change: for what-if questions, and for what a calibration found out otherwise.
    pub fn parameters_mut(&mut self, kind: usize) -> &mut Parameters {
        &mut self.kinds[kind].parameters
    }

    /// Its kinds of device and after them those of another: of a job beside, which may have another
    /// stack. What is the same for all kinds is this one's, but that links give what they give the
    /// more efficient of the two.
    pub(crate) fn and(mut self, other: &CostModel) -> Self {
        self.kinds.extend(other.kinds.iter().cloned());
        let (own, theirs) = (self.links, other.links);
        self.links = LinkEfficiency {
            device: own.device.max(theirs.device),
            host_memory: own.host_memory.max(theirs.host_memory),
            nic: own.nic.max(theirs.nic),
            switch: own.switch.max(theirs.switch),
        };
        self
    }

    /// How many kinds of device it knows.
    pub fn kind_count(&self) -> usize {
        self.kinds.len()
    }

    /// The exchanges that were measured on devices of a kind.
    pub(crate) fn exchanges(&self, kind: usize) -> Option<&CommunicationTable> {
        self.kinds[kind].exchanges.as_ref()
    }

    /// The name of a kind.
    pub(crate) fn kind_name(&self, kind: usize) -> &str {
        &self.kinds[kind].kind.name
    }
}
