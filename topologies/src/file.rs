//! Reads topologies from text, and writes them back.

use crate::device::DeviceKind;
use crate::error::TopologyError;
use crate::library;
use crate::node::{NodeGroup, NodeLink};
use crate::spec::{
    self, DeviceSpec, LinkSpec, NetworkSpec, NicsSpec, NodeDevicesSpec, NodeSpec, NodesSpec, ShortOrFull, StorageSpec,
    TopologySpec,
};
use crate::text::{At, Scalar, written};
use crate::topology::Topology;
use crate::wires::Wires;
use foretell_units::SchemaVersion;
use foretell_units::diagnostic::deserialize_from;
use serde::{Deserialize, Deserializer};

impl Topology {
    /// Reads a topology file. `file_name` appears in error messages, and names the topology if the
    /// file states no name.
    pub fn from_yaml(text: &str, file_name: &str) -> Result<Topology, TopologyError> {
        spec::read(text).and_then(|spec| spec.named_after(file_name).build()).map_err(|error| error.in_file(file_name, text))
    }

    /// Returns the library topology of that name. The error of an unknown name lists the known
    /// ones.
    pub fn library(name: &str) -> Result<Topology, TopologyError> {
        let (file, text) = library::topology_text(name)?;
        Topology::from_yaml(text, file)
    }

    /// Names of the library's topologies.
    pub fn library_names() -> impl Iterator<Item = &'static str> {
        library::topology_names()
    }
}

impl<'de> Deserialize<'de> for Topology {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserialize_from::<TopologySpec, _, _>(deserializer)
    }
}

impl TryFrom<TopologySpec> for Topology {
    type Error = TopologyError;

    fn try_from(spec: TopologySpec) -> Result<Self, TopologyError> {
        spec.build()
    }
}

impl From<Topology> for TopologySpec {
    fn from(topology: Topology) -> Self {
        let kinds = &topology.kinds;
        TopologySpec {
            schema_version: Some(SchemaVersion),
            devices: kinds.iter().map(|kind| (kind.name.clone(), device_spec(kind).into())).collect(),
            nodes: Some(
                NodesSpec::Groups(
                    topology.groups.iter().map(|group| node_spec(group, kinds, topology.currency()).into()).collect(),
                )
                .into(),
            ),
            network: Some(ShortOrFull::Full(NetworkSpec::from_network(&topology.network, &topology.groups)).into()),
            storage: topology.storage_bandwidth.map(|rate| StorageSpec { bandwidth: Some(written(rate)) }.into()),
            restart_time: topology.restart_time.map(written),
            lab: topology.is_lab.then_some(true),
            name: Some(topology.name),
            notes: topology.notes,
            base: None,
            inter_node_bandwidth: None,
        }
    }
}

fn device_spec(kind: &DeviceKind) -> DeviceSpec {
    DeviceSpec {
        base: kind.base.clone().map(At::from),
        architecture: Some(kind.architecture),
        memory: Some(written(kind.memory)),
        memory_bandwidth: Some(written(kind.memory_bandwidth)),
        peak: kind.peak.iter().map(|(format, rate)| (*format, written(*rate))).collect(),
        power: kind.power.map(written),
        idle_power: kind.idle_power.map(written),
        link: kind.link.map(written),
        host_link: kind.host_link.map(written),
        cores: kind.cores.map(|cores| Scalar::from(cores).into()),
        cpu_quota: kind.cpu_quota.map(|quota| Scalar::from(quota).into()),
        source: kind.source.clone(),
    }
}

fn node_spec(group: &NodeGroup, kinds: &[DeviceKind], currency: Option<&str>) -> NodeSpec {
    let link = group.link.map(|link| link_spec(link, group.wires.as_ref()));
    let nics = group
        .nics
        .map(|nics| NicsSpec { count: Some(Scalar::from(nics.count).into()), bandwidth: Some(written(nics.bandwidth)) });
    NodeSpec {
        name: Some(group.name.clone().into()),
        count: Some(Scalar::from(group.count).into()),
        devices: Some(At::from(NodeDevicesSpec {
            kind: kinds.get(group.kind).map(|kind| kind.name.clone().into()),
            count: Some(Scalar::from(group.devices).into()),
        })),
        link: link.map(|link| ShortOrFull::Full(link).into()),
        nics: nics.map(At::from),
        host_memory: group.host_memory.map(written),
        price_per_hour: group.price_per_hour.map(|price| {
            let scalar = currency.map_or_else(|| Scalar::from(price), |currency| Scalar::from(format!("{price} {currency}")));
            scalar.into()
        }),
        mean_time_between_failures: group.mean_time_between_failures.map(written),
    }
}

fn link_spec(link: NodeLink, wires: Option<&Wires>) -> LinkSpec {
    let (wires, unlinked) = wires.map(|wires| (wires.counts.to_vec().into(), written(wires.unlinked))).unzip();
    let sockets = link.tree.and_then(|tree| tree.sockets);
    LinkSpec {
        kind: Some(link.kind.name().to_owned().into()),
        bandwidth: Some(written(link.bandwidth)),
        latency: Some(written(link.latency)),
        devices_per_switch: link.tree.map(|tree| Scalar::from(tree.devices_per_switch).into()),
        uplink: link.tree.map(|tree| written(tree.uplink)),
        switches_per_socket: sockets.map(|sockets| Scalar::from(sockets.switches).into()),
        socket_link: sockets.map(|sockets| written(sockets.link)),
        wires,
        unlinked,
    }
}
