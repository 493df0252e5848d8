//! A profiled GPU under a software stack as a part of the cost model: the costs of [`crate::gpu`]
//! in the model's own types.

use super::communication::{CollectiveCall, CommunicationCost};
use super::estimate::{Estimate, KernelCost, Source};
use super::link_efficiency::LinkEfficiency;
use super::parameters::{HostWaits, Parameters};
use super::scale::CostScale;
use crate::gpu::{
    Cluster, GpuCosts, MemoryRates, NodeSpread, ProductFormat, Profiles, StackProfile, StageMemory, StateKind, Workload,
};
use foretell_models::Kernel;
use foretell_program::{Footprint, Phase, Slowdown, StageProgram};
use foretell_topologies::{Architecture, DeviceId, DeviceKind, NodeLink, NodeLinkKind, Topology};
use foretell_units::{BytesPerSecond, DataType, FlopsPerSecond, Seconds};
use std::collections::BTreeMap;

/// A kind of GPU with its links, and the software that runs on it.
#[derive(Clone, Debug)]
pub(crate) struct ProfiledGpu {
    pub(crate) cluster: Cluster,
    pub(crate) stack: StackProfile,
    format: ProductFormat,
    workload: Workload,
}

/// PCIe generations with sixteen lanes: the name of the link's profile, and the rate one way
/// (`link_specs.csv`).
const PCIE: [(&str, BytesPerSecond); 3] =
    [("pcie3", BytesPerSecond::new(15.75e9)), ("pcie4", BytesPerSecond::new(31e9)), ("pcie5", BytesPerSecond::new(63e9))];

/// Returns the generation of a PCIe link: the slowest that carries its rate.
fn pcie_generation(link: NodeLink) -> (&'static str, BytesPerSecond) {
    PCIE.into_iter().find(|(_, rate)| link.bandwidth <= *rate * 1.05).unwrap_or(PCIE[PCIE.len() - 1])
}

impl ProfiledGpu {
    pub(crate) fn new(cluster: Cluster, stack: StackProfile, format: ProductFormat, workload: Workload) -> Self {
        Self { cluster, stack, format, workload }
    }

    /// Returns the cluster of a topology's kind of device, with the topology's own figures, and a
    /// remark if the device's behaviour was not measured. A device without a profile gets that of a
    /// similar device; `None` if there is no similar one.
    pub(crate) fn cluster(profiles: &Profiles, topology: &Topology, kind: usize) -> Option<(Cluster, Option<String>)> {
        let device = &topology.device_kinds()[kind];
        let names = [Some(&device.name), device.base.as_ref()];
        let known = names.into_iter().flatten().find(|name| profiles.gpu(name).is_ok());
        let name = known.map(String::as_str).or_else(|| profiles.similar_gpu(device))?;
        let group = topology.node_groups().iter().find(|group| group.kind == kind)?;
        let rate = group.nics.map(|nics| nics.total_bandwidth());
        let link = group.link.filter(|link| link.kind == NodeLinkKind::Pcie).map(|link| pcie_generation(link).0);
        let mut cluster = profiles.cluster(name, link, group.devices, topology.device_count(), rate).ok()?;
        if known.is_none() {
            (cluster.gpu.estimated, cluster.gpu.unseen) = (true, true);
            cluster.gpu.spread = Some(profiles.unseen_device.unwrap_or(profiles.unseen));
        }
        let generation = &cluster.gpu.generation;
        let remark = match known {
            None => Some(format!(
                "device `{}` is known by its data sheet only: it is given the behaviour of `{name}` (generation `{generation}`) \
                 and a wider interval",
                device.name
            )),
            Some(_) if cluster.gpu.estimated => Some(format!(
                "no kernels and too few runs were measured on `{name}`: it is given the behaviour of its generation \
                 (`{generation}`) and a wider interval"
            )),
            Some(_) if cluster.gpu.unseen => Some(format!(
                "too few published runs on `{name}` were fitted: its interval is wider, as for devices that a fit left out"
            )),
            Some(_) => None,
        };
        cluster.gpu.take_data_sheet(device);
        if let Some(link) = group.link {
            // If the topology states a link, its node is the set of devices that the link joins.
            // Without one, the fabric joins devices.
            let total = rate.unwrap_or(cluster.gpu.network_rate * group.devices as f64);
            (cluster.devices_per_node, cluster.node_rate) = (group.devices, total);
            let usual = if link.kind == NodeLinkKind::Pcie { Some(pcie_generation(link).1) } else { device.link };
            if let Some(usual) = usual {
                cluster.link.scale(link.bandwidth / usual);
            }
        }
        cluster.network = profiles.network(topology.network().transport.name()).ok()?;
        Some((cluster, remark))
    }

    /// Returns an upper bound on the rate of matrix products.
    pub(crate) fn fastest_products(&self) -> FlopsPerSecond {
        self.costs().fastest_products()
    }

    /// Returns a lower bound on the device time of all kernels that together do a kernel's work.
    pub(crate) fn least_total_time(&self, kernel: &Kernel, accumulate: bool, precision: DataType) -> Seconds {
        self.costs().least_total_time(&kernel.without_constants(), accumulate, precision)
    }

    /// Scales the figures for a what-if question.
    pub(crate) fn rescale(&mut self, scale: &CostScale) {
        let Cluster { gpu, link, network, node_rate, paces, .. } = &mut self.cluster;
        (paces.host, paces.kernels) = (paces.host * scale.launch, paces.kernels / scale.speed);
        gpu.scale(scale.peak, scale.memory_bandwidth);
        gpu.launch = gpu.launch * scale.launch;
        self.stack.host.host_launch = self.stack.host.host_launch * scale.launch;
        link.scale(scale.links.intra_node_bandwidth);
        link.latency_scale *= scale.links.intra_node_latency;
        link.launch = link.launch * scale.exchange_overhead;
        network.latency_scale *= scale.links.inter_node_latency;
        *node_rate = *node_rate * scale.links.inter_node_bandwidth;
    }

    /// Returns a cluster's device in the form of a topology's device, without the figures that
    /// profiled costs replace.
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

    /// Returns the source of all estimates of this GPU.
    fn source(&self) -> Source {
        if self.stack.estimated || self.cluster.gpu.estimated { Source::Roofline } else { Source::Fitted }
    }

    /// Returns the cost of an instruction's kernels.
    pub(crate) fn kernel_cost(&self, kernel: &Kernel, accumulate: bool, precision: DataType) -> KernelCost {
        let time = self.costs().kernel_time(&kernel.without_constants(), accumulate, precision);
        KernelCost { time: Estimate::steady(time.device, self.source()), launch: time.host }
    }

    /// Returns the ratio of the host time of a launch in a phase to that in the forward pass.
    pub(crate) fn launch_share(&self, phase: Phase) -> f64 {
        self.costs().launch_share(phase)
    }

    /// Returns the host time to launch a collective or a message.
    pub(crate) fn communication_launch(&self) -> Seconds {
        self.costs().communication_launch()
    }

    /// Returns the ratio of the fullest rank's rows to its slots, if each rank has `experts`
    /// experts.
    pub(crate) fn rows_over_slots(&self, experts: usize) -> f64 {
        self.workload.rows_over_slots(experts)
    }

    /// The same ratio, if all experts are spread over `ranks` ranks.
    pub(crate) fn rows_over_slots_of(&self, ranks: usize) -> f64 {
        self.workload.rows_over_slots_of(ranks)
    }

    /// Returns whether tokens choose experts unevenly.
    pub(crate) fn has_skewed_routing(&self) -> bool {
        self.workload.routing.is_some()
    }

    /// Returns whether the memory of a device is exactly the Program's arena.
    pub(crate) fn holds_arena(&self) -> bool {
        self.stack.memory.is_arena
    }

    /// Returns the memory of a device that runs a list of a Program.
    pub(crate) fn memory(&self, list: &StageProgram, precision: DataType) -> Footprint {
        if self.holds_arena() {
            return Footprint::of(list);
        }
        StageMemory::of_workload(list, precision, &self.workload).footprint(&self.stack, self.format, &self.workload)
    }

    /// Returns the least memory of a device for each byte of a Program's buffers.
    pub(crate) fn memory_rates(&self, state: StateKind) -> MemoryRates {
        if self.holds_arena() {
            return MemoryRates::ARENA;
        }
        MemoryRates::of(&self.stack, self.format, &self.workload, state)
    }

    fn costs(&self) -> GpuCosts<'_> {
        GpuCosts { cluster: &self.cluster, stack: &self.stack, format: self.format, workload: self.workload.clone() }
    }

    /// Returns the stack's costs other than those of kernels and communication.
    pub(crate) fn parameters(&self) -> Parameters {
        let StackProfile { host, communication, .. } = &self.stack;
        let steady = |seconds| Estimate::steady(seconds, self.source());
        let slowdown = Slowdown { kernel: communication.compute_slowdown, exchange: communication.communication_slowdown };
        let (share, growth) = slowdown.share_and_growth();
        Parameters {
            instruction_overhead: steady(Seconds::ZERO),
            stream_handoff: steady(Seconds::ZERO),
            launch: Seconds::ZERO,
            step_overhead: steady(host.step_overhead),
            micro_batch_overhead: host.micro_batch_overhead,
            exchange_overhead: Seconds::ZERO,
            has_trees: true,
            load_seconds_per_byte: Seconds::ZERO,
            communication_share: share,
            copy_share: 0.0,
            communication_growth: Some(growth),
            host_waits: HostWaits { for_messages: host.waits_for_messages, between_passes: host.waits_between_passes },
            interruption: Seconds::ZERO,
        }
    }

    /// Returns the efficiency of links at which the collectives of one layout exactly fill a node's
    /// network. NCCL's rule already divides the network equally among them.
    pub(crate) fn link_efficiency(&self) -> LinkEfficiency {
        let faster = 1.0 / self.stack.communication.communication;
        let reached = self.cluster.reached_node_rate() / self.cluster.node_rate;
        LinkEfficiency { device: faster, host_memory: faster, nic: reached * faster, switch: faster }
    }

    /// Returns how devices spread over nodes.
    pub(crate) fn node_spread(&self, devices: &[DeviceId]) -> NodeSpread {
        NodeSpread::of_devices(devices.iter().map(|device| device.0), &self.cluster)
    }

    /// Returns the cost of a collective without contention. `bytes` is the whole tensor in the
    /// Program, and each flow carries `flow_share` of it.
    pub(crate) fn collective(
        &self,
        spread: &NodeSpread,
        CollectiveCall { kind, role, bytes, algorithm }: CollectiveCall,
        flow_share: f64,
    ) -> CommunicationCost {
        let costs = self.costs();
        let time = costs.collective_time(kind, role, spread, bytes, algorithm);
        self.cost(time, bytes * costs.fullest_network_share(kind, role, spread.members) * flow_share)
    }

    /// Returns the cost of a message between stages without contention. Each of `parts` ranks sends
    /// a part of the message.
    pub(crate) fn message(&self, spread: &NodeSpread, bytes: f64, parts: usize) -> CommunicationCost {
        let communication = &self.stack.communication;
        let size = bytes * communication.message_scale;
        let is_partitioned = parts > 1 && spread.nodes > 1;
        let partitioned = if is_partitioned { communication.partitioned_message } else { Seconds::ZERO };
        self.cost(spread.message(size, &self.cluster) * communication.communication + partitioned, size)
    }

    fn cost(&self, flow: Seconds, bytes: f64) -> CommunicationCost {
        CommunicationCost { latency: Seconds::ZERO, flow, bytes, processor_share: None, source: self.source() }
    }
}
