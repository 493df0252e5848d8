//! The cost model: the duration of one kernel, collective, message or copy without contention.
//!
//! Costs come from a profile if similar work was measured, else on known GPUs from figures fitted
//! to published runs ([`crate::gpu`]), else from the data sheet. Each estimate states its source.
//!
//! This module must not know Programs. Callers ask about a kernel or a message, never about a
//! layout or a schedule.

use super::communication::{CommunicationCost, CommunicationTable};
use super::device_kind::{KindCosts, is_of};
use super::estimate::{Estimate, KernelCost, Source};
use super::link_efficiency::LinkEfficiency;
use super::parameters::Parameters;
use super::profiled_gpu::ProfiledGpu;
use super::roofline;
use super::scale::CostScale;
use super::uncertainty::Uncertainty;
use crate::gpu::traced::MeasuredFramework;
use crate::gpu::{Cluster, MemoryRates, ProductFormat, ProfileError, Profiles, StackProfile, StateKind, Workload};
use foretell_models::Kernel;
use foretell_program::{Phase, Profile, Reach, StorageCosts};
use foretell_topologies::{Architecture, Topology};
use foretell_units::{Bytes, BytesPerSecond, DataType, FlopsPerSecond, Seconds};
use std::collections::BTreeMap;

/// The time to set up a copy. An assumption: about the time of a small copy over PCIe.
const COPY_LATENCY: Seconds = Seconds::new(10e-6);

/// The share of the stated rate of a PCIe slot that copies reach. Large pinned copies reach 25 of
/// 31 GB/s on PCIe 4 x16. For other slots it is an assumption.
const HOST_LINK_EFFICIENCY: f64 = 0.8;

/// The costs of the devices and links of one topology.
#[derive(Clone, Debug)]
pub struct CostModel {
    kinds: Vec<KindCosts>,
    /// The efficiency of the links, for communication that was not measured.
    pub links: LinkEfficiency,
    /// The number of bytes that a sender may be ahead of its receiver. A larger message waits for
    /// its receiver. Zero without a measured or a GPU profile.
    pub buffered: Bytes,
    /// The factors by which a device is slower than its costs over time: quantiles at equal steps
    /// of probability (see [`Profile::paces`]). No value is below 1: costs are those of a device at
    /// its best, so lower bounds derived from them stay valid.
    pub paces: Vec<f64>,
    /// The number of cores that a lab's devices share, if the profile was measured in a lab. Device
    /// `n` runs on core `n` modulo this number.
    pub cores: Option<usize>,
    /// The measured costs of checkpoints.
    pub storage: Option<StorageCosts>,
    /// The error of predicted step times that no cost covers.
    pub uncertainty: Uncertainty,
    /// The factors of a what-if question.
    scale: CostScale,
    /// The 10th and 90th percentile of measured over predicted step time, if runs of this kind have
    /// a known spread.
    pub step_spread: Option<[f64; 2]>,
    /// The assumptions of the costs, for facts that were neither measured nor stated by the plan,
    /// one sentence each.
    pub remarks: Vec<String>,
}

/// Returns the remark on a profile that holds for no device of the topology.
fn unused_profile(profile: &Profile) -> String {
    format!("the profile is not used: it was measured on `{}`, and the topology has no such device", profile.device)
}

impl CostModel {
    /// Returns the costs of the kinds of device in a topology. The profile holds for the kind that
    /// it names and for kinds that match it. Costs of other kinds come from the data sheet. A
    /// profile that matches no kind is ignored, with a remark.
    pub fn new(profile: Option<&Profile>, topology: &Topology) -> Self {
        let kinds = topology.device_kinds();
        let given = profile;
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
            storage: profile.and_then(|profile| profile.storage),
            uncertainty: Uncertainty::MEASURED,
            scale: CostScale::NONE,
            step_spread: None,
            remarks: given.filter(|_| profile.is_none()).map(unused_profile).into_iter().collect(),
        }
    }

    /// Adds a software stack to the kinds of device that have a GPU profile and were not
    /// calibrated.
    ///
    /// # Errors
    /// [`ProfileError::Unknown`] if there is no such stack.
    pub fn with_stack(self, topology: &Topology, stack: &str, precision: DataType) -> Result<Self, ProfileError> {
        let stack = Profiles::library()?.stack(stack)?.clone();
        self.with_profile(topology, &stack, ProductFormat::of(precision), Workload::default())
    }

    /// Adds a software stack with a workload's settings to the kinds of device that have a GPU
    /// profile and were not calibrated.
    ///
    /// # Errors
    /// As [`CostModel::with_stack`].
    pub fn with_workload(
        self,
        topology: &Topology,
        stack: &str,
        format: ProductFormat,
        workload: Workload,
    ) -> Result<Self, ProfileError> {
        let profiles = Profiles::library()?;
        let profile = profiles.stack(stack)?.clone().applied(&workload, profiles.unseen);
        self.with_framework(stack, profile.tables.as_ref()).with_profile(topology, &profile, format, workload)
    }

    /// Uses measured operators only for the steps of the stack that measured them.
    fn with_framework(mut self, stack: &str, tables: Option<&BTreeMap<String, String>>) -> Self {
        for costs in &mut self.kinds {
            let is_of_stack = costs.framework.as_ref().is_some_and(|framework| framework.stack() == stack);
            costs.framework_tables = tables.filter(|_| is_of_stack).cloned();
        }
        self
    }

    fn with_profile(
        mut self,
        topology: &Topology,
        stack: &StackProfile,
        format: ProductFormat,
        workload: Workload,
    ) -> Result<Self, ProfileError> {
        let profiles = Profiles::library()?;
        for kind in 0..self.kinds.len() {
            let costs = &mut self.kinds[kind];
            if costs.kernels.is_some() {
                continue;
            }
            if let Some((cluster, remark)) = ProfiledGpu::cluster(profiles, topology, kind) {
                costs.profiled_gpu = Some(ProfiledGpu::new(cluster, stack.clone(), format, workload.clone()));
                self.remarks.extend(remark);
            }
        }
        self.take_from_profiled_gpus();
        Ok(self)
    }

    /// Returns the costs of GPUs under a software stack, without a topology. Kind `n` is the device
    /// of `clusters[n]`.
    pub fn of_clusters(clusters: &[&Cluster], stack: &StackProfile, format: ProductFormat, workload: Workload) -> Self {
        let kinds = clusters.iter().map(|&cluster| KindCosts {
            kind: ProfiledGpu::device_kind(cluster),
            speed: 1.0,
            parameters: roofline::parameters(Architecture::Gpu),
            kernels: None,
            exchanges: None,
            scaled_kind: None,
            profiled_gpu: Some(ProfiledGpu::new(cluster.clone(), stack.clone(), format, workload.clone())),
            framework: None,
            framework_tables: None,
        });
        let mut costs = Self {
            kinds: kinds.collect(),
            links: LinkEfficiency::IDEAL,
            buffered: Bytes::ZERO,
            paces: Vec::new(),
            cores: None,
            storage: None,
            uncertainty: Uncertainty::NONE,
            scale: CostScale::NONE,
            step_spread: None,
            remarks: Vec::new(),
        };
        costs.take_from_profiled_gpus();
        costs
    }

    /// Sets the parameters, link efficiency, spread and buffers from the GPU profiles and the
    /// stack.
    fn take_from_profiled_gpus(&mut self) {
        for costs in &mut self.kinds {
            if let Some(profiled_gpu) = &costs.profiled_gpu {
                costs.parameters = profiled_gpu.parameters();
            }
        }
        let gpus = || self.kinds.iter().filter_map(|costs| costs.profiled_gpu.as_ref());
        if let Some(profiled_gpu) = gpus().next() {
            self.links = profiled_gpu.link_efficiency();
            self.step_spread = Some(profiled_gpu.stack.spread_on(gpus().map(|gpu| &gpu.cluster)));
            // NCCL buffers sends, and frameworks post receives before they need them.
            self.buffered = Bytes::new(u64::MAX / 2);
        }
    }

    /// Returns the time of a kernel without contention. `kind` is an index into
    /// [`Topology::device_kinds`].
    pub fn kernel_time(&self, kernel: &Kernel, accumulate: bool, precision: DataType, kind: usize) -> Estimate {
        self.kernel_cost(kernel, accumulate, precision, kind).time
    }

    /// Returns the time of a kernel without contention and the host time of its launch.
    pub fn kernel_cost(&self, kernel: &Kernel, accumulate: bool, precision: DataType, kind: usize) -> KernelCost {
        let costs = &self.kinds[kind];
        if let Some(profiled_gpu) = &costs.profiled_gpu {
            let KernelCost { time, launch } = profiled_gpu.kernel_cost(kernel, accumulate, precision);
            return KernelCost { time: time.over(self.scale.speed), launch };
        }
        let unscaled = costs
            .kernels
            .as_ref()
            .and_then(|table| table.estimate(kernel, accumulate, precision, &costs.kind))
            .unwrap_or_else(|| Estimate::assumed(roofline::kernel_time(kernel, accumulate, precision, &costs.kind)));
        let scaled = match &costs.scaled_kind {
            None => unscaled,
            Some(scaled) => {
                let launch = roofline::launch(costs.kind.architecture);
                let alone = |kind| roofline::kernel_time(kernel, accumulate, precision, kind) - launch;
                let before = alone(&costs.kind);
                let ratio = if before > Seconds::ZERO { alone(scaled) / before } else { 1.0 } / self.scale.speed;
                // Measured times have no separate launch. The overhead is among the parameters.
                let launch = if unscaled.source == Source::Roofline { launch } else { Seconds::ZERO };
                unscaled.changed(|time, spread| (time - launch * spread) * ratio + launch * (spread * self.scale.launch))
            }
        };
        KernelCost { time: scaled.over(costs.speed), launch: Seconds::ZERO }
    }

    /// Changes the costs to those of a what-if question.
    pub(crate) fn rescale(&mut self, scale: CostScale) {
        self.scale = scale;
        for costs in &mut self.kinds {
            costs.scaled_kind = Some(costs.kind.scaled(scale.peak, scale.memory_bandwidth));
            if let Some(profiled_gpu) = &mut costs.profiled_gpu {
                profiled_gpu.rescale(&scale);
            }
        }
    }

    /// Returns the cost of a collective or message over the scaled links of a what-if question,
    /// from its cost over the actual links.
    pub(crate) fn rescaled(&self, cost: CommunicationCost, reach: Reach) -> CommunicationCost {
        let links = &self.scale.links;
        let (bandwidth, latency) = match reach {
            Reach::Node => (links.intra_node_bandwidth, links.intra_node_latency),
            Reach::Switch | Reach::Fabric => (links.inter_node_bandwidth, links.inter_node_latency),
        };
        CommunicationCost { latency: cost.latency * latency, flow: cost.flow / bandwidth, ..cost }
    }

    /// Returns the ratio of the host time of a launch in a phase to that in the forward pass.
    pub fn launch_share(&self, kind: usize, phase: Phase) -> f64 {
        self.kinds[kind].profiled_gpu.as_ref().map_or(1.0, |profiled_gpu| profiled_gpu.launch_share(phase))
    }

    /// Returns the time to copy `bytes` between a device of a kind and its host, in either
    /// direction. Devices with a host link also need `COPY_LATENCY`.
    pub fn copy_time(&self, kind: usize, bytes: Bytes) -> Estimate {
        let latency = if self.kinds[kind].has_host_link() { COPY_LATENCY } else { Seconds::ZERO };
        Estimate::assumed(self.copy_seconds_per_byte(kind) * bytes.value() + latency)
    }

    /// Returns the rate at which all ranks together write to storage: from the calibration, or else
    /// from the topology.
    pub fn storage_rate(&self, topology: &Topology) -> Option<BytesPerSecond> {
        self.storage.map(|storage| storage.write).or(topology.storage_bandwidth())
    }

    /// Returns the time in which a rank on a device of a kind copies `bytes` of its state, for a
    /// checkpoint.
    pub fn save_time(&self, kind: usize, bytes: Bytes) -> Estimate {
        match self.storage.filter(|_| self.kinds[kind].kernels.is_some()) {
            Some(storage) => Estimate::steady(bytes / storage.save / self.speed(kind), Source::Measured),
            None => self.copy_time(kind, bytes),
        }
    }

    /// Returns the time per byte of a copy between a device and its host.
    pub fn copy_seconds_per_byte(&self, kind: usize) -> Seconds {
        let costs = &self.kinds[kind];
        let (share, speed) = if costs.has_host_link() { (HOST_LINK_EFFICIENCY, 1.0) } else { (1.0, costs.speed) };
        Seconds::new(1.0 / (costs.kind.host_rate().value() * share * speed))
    }

    /// Returns the host time to launch a collective or a message.
    pub fn exchange_launch(&self, kind: usize) -> Seconds {
        self.kinds[kind].profiled_gpu.as_ref().map_or(Seconds::ZERO, ProfiledGpu::communication_launch)
    }

    /// Returns an upper bound on the rate of matrix products on a kind of device. `None` if the
    /// kind has no GPU profile, so that no bound is known.
    pub fn fastest_products(&self, kind: usize) -> Option<FlopsPerSecond> {
        let rate = self.kinds.get(kind)?.profiled_gpu.as_ref()?.fastest_products();
        Some(rate * self.scale.speed)
    }

    /// Returns a lower bound on the time of all kernels that together do a kernel's work, however
    /// ranks and micro-batches divide it. `None` if times were measured (parts that fit into a
    /// cache may be faster than any sample) or scaled by a what-if question.
    pub fn least_total_time(&self, kernel: &Kernel, accumulate: bool, precision: DataType, kind: usize) -> Option<Seconds> {
        let costs = self.kinds.get(kind)?;
        if let Some(profiled_gpu) = &costs.profiled_gpu {
            return Some(profiled_gpu.least_total_time(kernel, accumulate, precision) / self.scale.speed);
        }
        if costs.kernels.is_some() || costs.scaled_kind.is_some() {
            return None;
        }
        // A device with a processor quota runs at full speed while it has budget left, so its lower
        // speed does not count.
        Some(roofline::least_total_time(kernel, accumulate, precision, &costs.kind) / costs.speed.max(1.0))
    }

    /// Returns the ratio of the fullest rank's rows to its slots in the Program, if all experts are
    /// spread over `ranks` ranks. 1 if routing is balanced.
    pub fn rows_over_slots(&self, ranks: usize) -> f64 {
        let of_kinds = (0..self.kind_count()).filter_map(|kind| self.profiled_gpu(kind));
        of_kinds.map(|gpu| gpu.rows_over_slots_of(ranks)).fold(1.0, f64::max)
    }

    /// Returns true if a GPU profile gives the costs of collectives on devices of a kind. False if
    /// there is no such kind.
    pub fn knows_collectives(&self, kind: usize) -> bool {
        kind < self.kind_count() && self.profiled_gpu(kind).is_some()
    }

    /// Returns true if the stack on this kind of device gives context-parallel ranks equal work
    /// ([`StackProfile::balances_parts`]).
    pub(crate) fn balances_parts(&self, kind: usize) -> bool {
        self.profiled_gpu(kind).is_some_and(|profiled_gpu| profiled_gpu.stack.balances_parts)
    }

    /// Returns the devices and links of a kind with a GPU profile. `None` for other kinds.
    pub fn cluster(&self, kind: usize) -> Option<&Cluster> {
        self.kinds.get(kind)?.profiled_gpu.as_ref().map(|profiled_gpu| &profiled_gpu.cluster)
    }

    /// Returns the values for the keys of the stack's operator tables on a kind of device; `None`
    /// if the stack has no tables there.
    pub fn tables(&self, kind: usize) -> Option<&BTreeMap<String, String>> {
        let kind = self.kinds.get(kind)?;
        kind.framework_tables.as_ref().or_else(|| kind.profiled_gpu.as_ref()?.stack.tables.as_ref())
    }

    /// Returns the operators that the plan's framework measured on a kind of device.
    pub fn framework(&self, kind: usize) -> Option<&MeasuredFramework> {
        let kind = self.kinds.get(kind)?;
        kind.framework.as_deref().filter(|_| kind.framework_tables.is_some())
    }

    /// Returns the GPU profile of a kind. `None` if the kind has none.
    pub(crate) fn profiled_gpu(&self, kind: usize) -> Option<&ProfiledGpu> {
        self.kinds[kind].profiled_gpu.as_ref()
    }

    /// Returns the speed of a kind relative to the whole device.
    pub(crate) fn speed(&self, kind: usize) -> f64 {
        self.kinds[kind].speed
    }

    /// Returns the speed of a kind with a CPU quota, between 0 and 1. `None` without a quota. Such
    /// a device runs at full speed until it has used up its quota of a period.
    pub(crate) fn quota(&self, kind: usize) -> Option<f64> {
        let costs = &self.kinds[kind];
        costs.kind.cpu_quota.filter(|&share| share < 1.0).map(|_| costs.speed).filter(|&speed| speed > 0.0 && speed < 1.0)
    }

    /// Returns the least device memory for each byte of a Program's buffers on a kind of device.
    pub fn memory_rates(&self, kind: usize, state: StateKind) -> MemoryRates {
        self.profiled_gpu(kind).map_or(MemoryRates::ARENA, |profiled_gpu| profiled_gpu.memory_rates(state))
    }

    /// Returns the costs of a kind of device other than those of kernels.
    pub fn parameters(&self, kind: usize) -> &Parameters {
        &self.kinds[kind].parameters
    }

    /// Returns these costs for changes: what-if questions, and values that a calibration measured
    /// separately.
    pub fn parameters_mut(&mut self, kind: usize) -> &mut Parameters {
        &mut self.kinds[kind].parameters
    }

    /// Appends the kinds of device of another model, for a second job that may have another stack.
    /// Values that hold for all kinds remain those of `self`. The exception: each link efficiency
    /// becomes the larger of the two.
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

    /// Returns the number of kinds of device.
    pub fn kind_count(&self) -> usize {
        self.kinds.len()
    }

    /// Returns the samples of collectives and messages on devices of a kind. `None` if there are
    /// none.
    pub(crate) fn exchanges(&self, kind: usize) -> Option<&CommunicationTable> {
        self.kinds[kind].exchanges.as_ref()
    }

    /// Returns the name of a kind.
    pub(crate) fn kind_name(&self, kind: usize) -> &str {
        &self.kinds[kind].kind.name
    }
}
