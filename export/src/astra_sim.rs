//! The configuration files with which ASTRA-sim 2 runs exported traces on a topology.
//!
//! ASTRA-sim's analytical network is a product of dimensions. A rank's number gives its coordinate
//! in each dimension, and the first dimension varies fastest. The dimensions here are the devices
//! of a node, the nodes under a leaf switch, and the leaf switches.
//!
//! `bandwidth` is that of one device on a link of the dimension, in units of 2^30 bytes per second
//! (`common/NetworkFunction.cc` of `astra-network-analytical`, commit 0f6d65e). `latency` is that
//! of one hop in nanoseconds; a `Switch` is two hops, a `FullyConnected` dimension one. Won et al.
//! 2023, <https://arxiv.org/abs/2303.14006>.

use crate::error::ExportError;
use foretell_topologies::{DeviceId, Fabric, LinkClass, NodeLinkKind, Topology};
use foretell_units::{BytesPerSecond, Seconds};
use serde_json::json;

/// The texts of ASTRA-sim's configuration files for a topology.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AstraSim {
    /// For `--network-configuration`, in YAML.
    pub network: String,
    /// For `--system-configuration`, in JSON.
    pub system: String,
    /// For `--remote-memory-configuration`, in JSON. It says that there is no remote memory.
    pub remote_memory: String,
    /// For `--logical-topology-configuration`, in JSON. Only the packet-level networks read it.
    pub logical_topology: String,
}

/// How the members of a dimension are connected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wiring {
    Switch,
    FullyConnected,
}

/// A dimension of the network.
struct Dimension {
    wiring: Wiring,
    size: usize,
    /// Bandwidth of one device on one link of the dimension.
    bandwidth: BytesPerSecond,
    /// Latency between two devices.
    latency: Seconds,
}

impl AstraSim {
    /// Makes the files for the first `ranks` devices of a topology, with one rank per device.
    /// `efficiency` returns the share of a link's rate that communication reaches, by class of
    /// link.
    ///
    /// # Errors
    /// [`ExportError::Irregular`] if the devices do not form a product of dimensions.
    pub fn new(topology: &Topology, ranks: usize, efficiency: &dyn Fn(LinkClass) -> f64) -> Result<Self, ExportError> {
        let irregular = |Irregularity { reason, hint }| {
            let topology = topology.name().into();
            ExportError::Irregular { topology, ranks, reason, hint }
        };
        let dimensions = dimensions(topology, ranks, efficiency).map_err(irregular)?;
        let each = |value: &dyn Fn(&Dimension) -> String| {
            let values: Vec<String> = dimensions.iter().map(value).collect();
            values.join(", ")
        };
        let name = |dimension: &Dimension| match dimension.wiring {
            Wiring::Switch => "Switch".to_string(),
            Wiring::FullyConnected => "FullyConnected".to_string(),
        };
        let hops = |dimension: &Dimension| if dimension.wiring == Wiring::Switch { 2.0 } else { 1.0 };
        let bandwidth = |dimension: &Dimension| format!("{:?}", dimension.bandwidth.value() / f64::from(1u32 << 30));
        let latency = |dimension: &Dimension| format!("{:?}", dimension.latency.value() * 1e9 / hops(dimension));
        let network = format!(
            "topology: [ {} ]\nnpus_count: [ {} ]\nbandwidth: [ {} ]  # 2^30 B/s\nlatency: [ {} ]  # ns\n",
            each(&name),
            each(&|dimension| dimension.size.to_string()),
            each(&bandwidth),
            each(&latency),
        );
        let implementation = |algorithm: &'static str| vec![algorithm; dimensions.len()];
        let kind = topology.device_kind(DeviceId(0));
        let peak = kind.peak.values().map(|rate| rate.value()).fold(0.0, f64::max);
        let system = json!({
            "scheduling-policy": "LIFO",
            // Nanoseconds per message, as in the files that ASTRA-sim's authors validated.
            "endpoint-delay": 10,
            "active-chunks-per-dimension": 1,
            // One chunk, since our simulator has one flow per collective. Several would be
            // pipelined through the dimensions.
            "preferred-dataset-splits": 1,
            "all-reduce-implementation": implementation("ring"),
            "all-gather-implementation": implementation("ring"),
            "reduce-scatter-implementation": implementation("ring"),
            "all-to-all-implementation": implementation("direct"),
            "collective-optimization": "localBWAware",
            "local-mem-bw": kind.memory_bandwidth.value() / 1e9,
            "peak-perf": peak / 1e12,
            // Kernel durations come from the trace.
            "roofline-enabled": 0,
            "boost-mode": 0,
        });
        let sizes: Vec<String> = dimensions.iter().map(|dimension| dimension.size.to_string()).collect();
        Ok(Self {
            network,
            system: format!("{system:#}\n"),
            remote_memory: "{\"memory-type\": \"NO_MEMORY_EXPANSION\"}\n".into(),
            logical_topology: format!("{}\n", json!({"logical-dims": sizes})),
        })
    }
}

/// Why the devices form no dimensions, and what to change.
struct Irregularity {
    reason: &'static str,
    hint: &'static str,
}

fn irregular(reason: &'static str, hint: &'static str) -> Irregularity {
    Irregularity { reason, hint }
}

/// Returns the dimensions that the first `ranks` devices of a topology form, or the reason why they
/// form none.
fn dimensions(topology: &Topology, ranks: usize, efficiency: &dyn Fn(LinkClass) -> f64) -> Result<Vec<Dimension>, Irregularity> {
    if ranks > topology.device_count() {
        return Err(irregular("several ranks share a device", "use more nodes"));
    }
    if ranks < 2 {
        return Err(irregular("a single rank has no network", "use a layout of at least two ranks"));
    }
    let nodes = topology.node_of(DeviceId(ranks - 1)).0 + 1;
    let group = &topology.node_groups()[0];
    let ranks_per_node = group.devices.min(ranks);
    if nodes * ranks_per_node != ranks || nodes > group.count {
        return Err(irregular("its nodes differ, or have different numbers of ranks", "use whole nodes of one kind"));
    }
    let mut dimensions = Vec::new();
    let mut stride = 1;
    let mut add = |wiring, size: usize, bandwidth| {
        let other = DeviceId(stride);
        stride *= size;
        let route = topology
            .route(DeviceId(0), other)
            .map_err(|_| irregular("some of its devices have no route between them", "describe the network that joins them"))?;
        if size > 1 {
            dimensions.push(Dimension { wiring, size, bandwidth, latency: route.latency });
        }
        Ok::<(), Irregularity>(())
    };
    if ranks_per_node > 1 {
        let link = group.link.ok_or(irregular("the devices of a node have no link", "give the node a `link`"))?;
        let (wiring, bandwidth) = match link.kind {
            NodeLinkKind::NvSwitch | NodeLinkKind::Pcie => (Wiring::Switch, link.bandwidth * efficiency(LinkClass::Device)),
            NodeLinkKind::NvLinkMesh => {
                let wires = group.devices.max(2) as f64 - 1.0;
                (Wiring::FullyConnected, link.bandwidth * efficiency(LinkClass::Device) / wires)
            }
            // An equal share for each device: exact while all of them send.
            NodeLinkKind::SharedMemory => {
                (Wiring::Switch, link.bandwidth * efficiency(LinkClass::HostMemory) / ranks_per_node as f64)
            }
        };
        add(wiring, ranks_per_node, bandwidth)?;
    }
    if nodes > 1 {
        if !matches!(topology.network().fabric, Fabric::Switch | Fabric::FatTree { .. }) {
            return Err(irregular("its network is neither a switch nor a fat tree", "describe one of these two"));
        }
        let nics = group.nics.ok_or(irregular("its nodes have no network interfaces", "give them `nics`"))?;
        let leaves = topology.leaves();
        let nodes_per_leaf = leaves.first().map_or(nodes, |leaf| leaf.nodes.len().min(nodes));
        if !nodes.is_multiple_of(nodes_per_leaf) {
            return Err(irregular("its leaf switches have different numbers of nodes", "use whole leaves"));
        }
        let per_device = 1.0 / group.devices as f64;
        if nodes_per_leaf > 1 {
            add(Wiring::Switch, nodes_per_leaf, nics.total_bandwidth() * efficiency(LinkClass::Nic) * per_device)?;
        }
        if let Some(leaf) = leaves.first().filter(|_| nodes > nodes_per_leaf) {
            let per_device = per_device / nodes_per_leaf as f64;
            // Without oversubscription, an uplink carries no more than the interfaces below it.
            let uplink = (leaf.uplink * efficiency(LinkClass::Switch) * per_device)
                .min(nics.total_bandwidth() * efficiency(LinkClass::Nic) / group.devices as f64);
            add(Wiring::Switch, nodes / nodes_per_leaf, uplink)?;
        }
    }
    Ok(dimensions)
}
