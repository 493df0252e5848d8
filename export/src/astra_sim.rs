//! The files beside the traces by which ASTRA-sim 2 runs them on its analytical network: the network, the system, remote memory, and the
//! logical dimensions that its other networks want.
//!
//! Its networks are products of dimensions: a rank's number is its place in each, the first varies fastest. Ours is devices in a node,
//! nodes under a leaf switch, leaf switches. `bandwidth` is what one device has on a link of the dimension, in units of 2^30 bytes a second
//! (`common/NetworkFunction.cc` of `astra-network-analytical`, commit 0f6d65e), `latency` that of one hop in nanoseconds; a `Switch` is two hops, a
//! `FullyConnected` one. Won et al. 2023, <https://arxiv.org/abs/2303.14006>.

use crate::error::ExportError;
use foretell_topologies::{DeviceId, Fabric, LinkClass, NodeLinkKind, Topology};
use foretell_units::{BytesPerSecond, Seconds};
use serde_json::json;

/// ASTRA-sim's files for a topology; each is the text of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AstraSim {
    /// `--network-configuration`, as YAML.
    pub network: String,
    /// `--system-configuration`.
    pub system: String,
    /// `--remote-memory-configuration`: there is none.
    pub remote_memory: String,
    /// `--logical-topology-configuration`, which only its packet-level networks ask for.
    pub logical_topology: String,
}

/// How the members of a dimension are joined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Block {
    Switch,
    FullyConnected,
}

struct Dimension {
    block: Block,
    size: usize,
    /// What a device has on a link of it.
    bandwidth: BytesPerSecond,
    /// From one device to another.
    latency: Seconds,
}

impl AstraSim {
    /// The files for so many ranks, one a device. `efficiency` is the share of each class of link that exchanges get.
    ///
    /// # Errors
    /// [`ExportError::Irregular`] where the ranks' devices are no product of dimensions.
    pub fn new(topology: &Topology, ranks: usize, efficiency: &dyn Fn(LinkClass) -> f64) -> Result<Self, ExportError> {
        let irregular = |reason| ExportError::Irregular { topology: topology.name().into(), ranks, reason };
        let dimensions = dimensions(topology, ranks, efficiency).map_err(irregular)?;
        let each = |value: &dyn Fn(&Dimension) -> String| {
            let values: Vec<String> = dimensions.iter().map(value).collect();
            values.join(", ")
        };
        let name = |one: &Dimension| match one.block {
            Block::Switch => "Switch".to_string(),
            Block::FullyConnected => "FullyConnected".to_string(),
        };
        let hops = |one: &Dimension| if one.block == Block::Switch { 2.0 } else { 1.0 };
        let bandwidth = |one: &Dimension| format!("{:?}", one.bandwidth.value() / f64::from(1u32 << 30));
        let latency = |one: &Dimension| format!("{:?}", one.latency.value() * 1e9 / hops(one));
        let network = format!(
            "topology: [ {} ]\nnpus_count: [ {} ]\nbandwidth: [ {} ]  # 2^30 B/s\nlatency: [ {} ]  # ns\n",
            each(&name),
            each(&|one| one.size.to_string()),
            each(&bandwidth),
            each(&latency),
        );
        let implementation = |algorithm: &'static str| vec![algorithm; dimensions.len()];
        let kind = topology.device_kind(DeviceId(0));
        let peak = kind.peak.values().map(|rate| rate.value()).fold(0.0, f64::max);
        let system = json!({
            "scheduling-policy": "LIFO",
            // Nanoseconds a message; as in the files that ASTRA-sim's authors validated.
            "endpoint-delay": 10,
            "active-chunks-per-dimension": 1,
            // One chunk, as we have one flow: more would run through the dimensions one behind the other.
            "preferred-dataset-splits": 1,
            "all-reduce-implementation": implementation("ring"),
            "all-gather-implementation": implementation("ring"),
            "reduce-scatter-implementation": implementation("ring"),
            "all-to-all-implementation": implementation("direct"),
            "collective-optimization": "localBWAware",
            "local-mem-bw": kind.memory_bandwidth.value() / 1e9,
            "peak-perf": peak / 1e12,
            // Kernels take what the trace says.
            "roofline-enabled": 0,
            "boost-mode": 0,
        });
        let sizes: Vec<String> = dimensions.iter().map(|one| one.size.to_string()).collect();
        Ok(Self {
            network,
            system: format!("{system:#}\n"),
            remote_memory: "{\"memory-type\": \"NO_MEMORY_EXPANSION\"}\n".into(),
            logical_topology: format!("{}\n", json!({"logical-dims": sizes})),
        })
    }
}

/// The dimensions in which the first devices of a topology lie, or why they lie in none.
fn dimensions(topology: &Topology, ranks: usize, efficiency: &dyn Fn(LinkClass) -> f64) -> Result<Vec<Dimension>, &'static str> {
    if ranks > topology.device_count() {
        return Err("several ranks share a device; hint: use more nodes");
    }
    if ranks < 2 {
        return Err("one rank has no network; hint: use a layout of two or more");
    }
    let nodes = topology.node_of(DeviceId(ranks - 1)).0 + 1;
    let group = &topology.node_groups()[0];
    let in_node = group.devices.min(ranks);
    if nodes * in_node != ranks || nodes > group.count {
        return Err("its nodes do not all have as many ranks, or are not alike; hint: use whole nodes of one kind");
    }
    let mut dimensions = Vec::new();
    let mut stride = 1;
    let mut add = |block, size: usize, bandwidth| {
        let other = DeviceId(stride);
        stride *= size;
        let route = topology.route(DeviceId(0), other).map_err(|_| "not all of its devices are joined")?;
        if size > 1 {
            dimensions.push(Dimension { block, size, bandwidth, latency: route.latency });
        }
        Ok::<(), &'static str>(())
    };
    if in_node > 1 {
        let link = group.link.ok_or("the devices of a node are not joined")?;
        let (block, bandwidth) = match link.kind {
            NodeLinkKind::NvSwitch | NodeLinkKind::Pcie => (Block::Switch, link.bandwidth * efficiency(LinkClass::Device)),
            NodeLinkKind::NvLinkMesh => {
                let wires = group.devices.max(2) as f64 - 1.0;
                (Block::FullyConnected, link.bandwidth * efficiency(LinkClass::Device) / wires)
            }
            // What all share is each one's part: exact while all send.
            NodeLinkKind::SharedMemory => (Block::Switch, link.bandwidth * efficiency(LinkClass::HostMemory) / in_node as f64),
        };
        add(block, in_node, bandwidth)?;
    }
    if nodes > 1 {
        if !matches!(topology.network().fabric, Fabric::Switch | Fabric::FatTree { .. }) {
            return Err("its network is no switch and no fat tree");
        }
        let nics = group.nics.ok_or("its nodes have no network interfaces")?;
        let leaves = topology.leaves();
        let under_one = leaves.first().map_or(nodes, |leaf| leaf.nodes.len().min(nodes));
        if !nodes.is_multiple_of(under_one) {
            return Err("its leaf switches do not all have as many nodes; hint: use whole leaves");
        }
        let per_device = 1.0 / group.devices as f64;
        if under_one > 1 {
            add(Block::Switch, under_one, nics.total_bandwidth() * efficiency(LinkClass::Nic) * per_device)?;
        }
        if let Some(leaf) = leaves.first().filter(|_| nodes > under_one) {
            let per_device = per_device / under_one as f64;
            // An uplink that oversubscribes nothing is no wider than the interfaces below it.
            let uplink = (leaf.uplink * efficiency(LinkClass::Switch) * per_device)
                .min(nics.total_bandwidth() * efficiency(LinkClass::Nic) / group.devices as f64);
            add(Block::Switch, nodes / under_one, uplink)?;
        }
    }
    Ok(dimensions)
}
