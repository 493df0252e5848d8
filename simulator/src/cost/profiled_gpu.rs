//! A kind of GPU under a software stack as the cost model has it: what [`crate::gpu`] says of kernels, collectives and messages, in the terms
//! in which everything else is simulated.

use super::communication::{CollectiveCall, CommunicationCost};
use super::estimate::{Estimate, KernelCost, Source};
use super::link_efficiency::LinkEfficiency;
use super::parameters::{HostWaits, Parameters};
use super::scale::CostScale;
use crate::gpu::{Cluster, GpuCosts, ProductFormat, Profiles, Reachable, StackKind, StageMemory, Workload};
use foretell_models::Kernel;
use foretell_program::{Footprint, Phase, Slowdown, StageProgram};
use foretell_topologies::{Architecture, DeviceId, DeviceKind, Topology};
use foretell_units::{DataType, FlopsPerSecond, Seconds};
use std::collections::BTreeMap;

/// A kind of GPU, what joins it to others, and the software that runs on it.
#[derive(Clone, Debug)]
pub(crate) struct ProfiledGpu {
    pub(crate) cluster: Cluster,
    pub(crate) stack: StackKind,
    format: ProductFormat,
    workload: Workload,
}

impl ProfiledGpu {
    pub(crate) fn new(cluster: Cluster, stack: StackKind, format: ProductFormat, workload: Workload) -> Self {
        Self { cluster, stack, format, workload }
    }

    /// The cluster around a topology's kind of device, with that topology's own figures; `None` where no profile knows the device.
    pub(crate) fn cluster(profiles: &Profiles, topology: &Topology, kind: usize) -> Option<Cluster> {
        let device = &topology.device_kinds()[kind];
        let names = [Some(&device.name), device.base.as_ref()];
        let name = names.into_iter().flatten().find(|name| profiles.gpu(name).is_ok())?;
        let group = topology.node_groups().iter().find(|group| group.kind == kind)?;
        let rate = group.nics.map(|nics| nics.total_bandwidth());
        let mut cluster = profiles.cluster(name, None, group.devices, topology.device_count(), rate).ok()?;
        cluster.gpu.take_data_sheet(device);
        if let (Some(link), Some(usual)) = (group.link, device.link) {
            cluster.link.scale(link.bandwidth / usual);
        }
        Some(cluster)
    }

    /// The rate that no product of matrices passes.
    pub(crate) fn fastest_products(&self) -> FlopsPerSecond {
        let gpu = &self.cluster.gpu;
        let rate =
            |format| gpu.peak(format) * (gpu.product_efficiency(format) * self.stack.product_share(&self.cluster.device, format));
        // Where a run is in eight bits, products that these cannot do are in sixteen.
        let (own, other) = (rate(self.format), rate(ProductFormat::Bf16));
        if self.format.is_cast() && other > own { other } else { own }
    }

    /// The same with other figures, for what-if questions.
    pub(crate) fn rescale(&mut self, scale: &CostScale) {
        let Cluster { gpu, link, network, node_rate, .. } = &mut self.cluster;
        gpu.scale(scale.peak, scale.memory_bandwidth);
        gpu.launch = gpu.launch * scale.launch;
        self.stack.host_launch = self.stack.host_launch * scale.launch;
        link.scale(scale.links.intra_node_bandwidth);
        link.latency_scale *= scale.links.intra_node_latency;
        link.launch = link.launch * scale.exchange_overhead;
        network.latency_scale *= scale.links.inter_node_latency;
        *node_rate = *node_rate * scale.links.inter_node_bandwidth;
    }

    /// The device of a cluster, for who asks what is simulated.
    pub(crate) fn device_kind(cluster: &Cluster) -> DeviceKind {
        DeviceKind {
            name: cluster.device.clone(),
            base: None,
            architecture: Architecture::Gpu,
            memory: cluster.gpu.memory,
            memory_bandwidth: cluster.gpu.memory_bandwidth,
            peak: BTreeMap::new(),
            power: None,
            idle_power: None,
            host_link: None,
            link: None,
            cores: None,
            cpu_quota: None,
            source: Some(cluster.gpu.source.clone()),
        }
    }

    fn source(&self) -> Source {
        if self.stack.estimated || self.cluster.gpu.estimated { Source::Roofline } else { Source::Fitted }
    }

    pub(crate) fn kernel_cost(&self, kernel: &Kernel, accumulate: bool, precision: DataType) -> KernelCost {
        let time = self.costs().kernel_time(&kernel.without_constants(), accumulate, precision);
        KernelCost { time: Estimate::steady(time.device, self.source()), launch: time.host }
    }

    /// What the host takes for a launch in a phase over what it takes in the forward pass.
    pub(crate) fn launch_share(&self, phase: Phase) -> f64 {
        self.costs().launch_share(phase)
    }

    pub(crate) fn exchange_launch(&self) -> Seconds {
        self.costs().exchange_launch()
    }

    /// What a device holds of a list of a Program.
    pub(crate) fn memory(&self, list: &StageProgram, precision: DataType) -> Footprint {
        if self.stack.memory.is_arena {
            return Footprint::of(list);
        }
        StageMemory::of(list, precision).footprint(&self.stack, self.format, self.workload.trained)
    }

    fn costs(&self) -> GpuCosts<'_> {
        GpuCosts { cluster: &self.cluster, stack: &self.stack, format: self.format, workload: self.workload }
    }

    /// What the stack costs beside kernels and exchanges. While both run, kernels take `compute_slowdown` longer and communication
    /// `communication_slowdown`.
    pub(crate) fn parameters(&self) -> Parameters {
        let steady = |seconds| Estimate::steady(seconds, self.source());
        let slowdown = Slowdown { kernel: self.stack.compute_slowdown, exchange: self.stack.communication_slowdown };
        let (share, growth) = slowdown.share_and_growth();
        Parameters {
            instruction_overhead: steady(Seconds::ZERO),
            stream_handoff: steady(Seconds::ZERO),
            launch: Seconds::ZERO,
            step_overhead: steady(self.stack.step_overhead),
            micro_batch_overhead: self.stack.micro_batch_overhead,
            exchange_overhead: Seconds::ZERO,
            load_seconds_per_byte: Seconds::ZERO,
            communication_share: share,
            copy_share: 0.0,
            communication_growth: Some(growth),
            host_waits: HostWaits {
                for_messages: self.stack.waits_for_messages,
                between_passes: self.stack.waits_between_passes,
            },
            interruption: Seconds::ZERO,
        }
    }

    /// Rates such that the exchanges of one layout, which the rule for collectives has share a node's network evenly, fill it and no more.
    pub(crate) fn link_efficiency(&self) -> LinkEfficiency {
        let faster = 1.0 / self.stack.communication;
        LinkEfficiency { device: faster, host_memory: faster, nic: self.cluster.network.efficiency * faster, switch: faster }
    }

    /// How ranks on these devices spread over nodes.
    pub(crate) fn reach(&self, devices: &[DeviceId]) -> Reachable {
        Reachable::of_devices(devices.iter().map(|device| device.0), &self.cluster)
    }

    /// What a collective takes alone, if `bytes` is its whole tensor in the Program and each flow carries `flow_share` of it.
    pub(crate) fn collective(
        &self,
        reach: &Reachable,
        CollectiveCall { kind, role, bytes, algorithm }: CollectiveCall,
        flow_share: f64,
    ) -> CommunicationCost {
        let costs = self.costs();
        let time = costs.collective_time(kind, role, reach, bytes, algorithm);
        self.cost(time, bytes * costs.travelling(kind, role) * flow_share)
    }

    /// What a message between stages takes alone.
    pub(crate) fn message(&self, reach: &Reachable, bytes: f64) -> CommunicationCost {
        let size = bytes * self.stack.message_scale;
        let partitioned =
            if self.workload.tensor > 1 && reach.nodes > 1 { self.stack.partitioned_message } else { Seconds::ZERO };
        self.cost(reach.message(size, &self.cluster) * self.stack.communication + partitioned, size)
    }

    fn cost(&self, flow: Seconds, bytes: f64) -> CommunicationCost {
        CommunicationCost { latency: Seconds::ZERO, flow, bytes, processor_share: None, source: self.source() }
    }
}
