//! From the words of a topology file to a topology: bases are filled in, names looked up, units read, defaults taken and noted.

use crate::device::{Architecture, DEFAULT_PCIE_BANDWIDTH, DeviceKind};
use crate::error::{Place, TopologyError, TopologyProblem};
use crate::library;
use crate::node::{Nics, NodeGroup, NodeLink, NodeLinkKind, PcieTree, Sockets};
use crate::spec::{DeviceSpec, LinkSpec, NicsSpec, NodeSpec, NodesSpec, ShortOrFull, StorageSpec, TopologySpec};
use crate::text::{At, Scalar, suggest};
use crate::topology::{Description, Topology};
use foretell_units::{BytesPerSecond, Seconds};
use std::collections::BTreeMap;

mod network;

/// One core copying through memory: an estimate, the same as discovery takes. Calibration measures it.
pub(crate) const DEFAULT_SHARED_MEMORY_BANDWIDTH: BytesPerSecond = BytesPerSecond::new(10e9);

impl TopologySpec {
    /// Gives the description its meaning. Errors have the line and column, but no file: add it with [`TopologyError::in_file`].
    pub fn build(self) -> Result<Topology, TopologyError> {
        let spec = self.over_its_base()?;
        let mut notes = spec.notes.clone();
        let mut kinds = Kinds::new(&spec.devices, &mut notes)?;

        let Some(nodes) = &spec.nodes else {
            let hint = "list `nodes`, or build on a library topology with `base`".into();
            return Err(TopologyProblem::Missing { owner: "the topology".into(), field: "nodes", hint }.into());
        };
        let group_specs = match &nodes.value {
            NodesSpec::Groups(groups) if !groups.is_empty() => groups,
            NodesSpec::Groups(_) => {
                return Err(TopologyError::invalid(nodes.place, "`nodes` is empty", "list at least one kind of node"));
            }
            NodesSpec::Count(_) => {
                let hint = "list the nodes, or add the library topology it counts nodes of, such as `base: dgx-a100-80g`";
                return Err(TopologyError::invalid(nodes.place, "`nodes` is a number, but there is no `base`", hint));
            }
        };
        let usual_link = if network::joins_devices(spec.network.as_ref()) { |_: &DeviceKind| None } else { default_link };
        let mut groups: Vec<NodeGroup> = Vec::with_capacity(group_specs.len());
        for group_spec in group_specs {
            let group = node_group(group_spec, (groups.len(), group_specs.len()), &mut kinds, usual_link, &mut notes)?;
            if groups.iter().any(|other| other.name == group.name) {
                let place = group_spec.value.name.as_ref().map_or(group_spec.place, |name| name.place);
                let what = format!("two kinds of node are called `{}`", group.name);
                return Err(TopologyError::invalid(place, what, "give each its own `name`"));
            }
            groups.push(group);
        }

        let (network, places) = network::network(spec.network.as_ref(), &mut groups, &kinds.found, &mut notes)?;
        let description = Description {
            name: spec.name.unwrap_or_else(|| "topology".into()),
            kinds: kinds.in_order_of_names(&mut groups),
            groups,
            network,
            storage_bandwidth: spec.storage.as_ref().map(storage_bandwidth).transpose()?,
            restart_time: spec.restart_time.as_ref().map(|time| time.quantity("restart_time")).transpose()?,
            is_lab: spec.lab.unwrap_or(false),
            notes,
        };
        let topology = description.build_from(&places)?;
        match spec.inter_node_bandwidth {
            Some(total) => topology.with_inter_node_bandwidth(total.positive("inter_node_bandwidth")?),
            None => Ok(topology),
        }
    }

    /// The library topology it builds on, with what it says itself written over that.
    fn over_its_base(mut self) -> Result<TopologySpec, TopologyError> {
        let Some(name) = self.base.take() else { return Ok(self) };
        let mut base = library::topology_spec(&name.value).map_err(|error| TopologyError { place: name.place, ..error })?;
        base.name = self.name.or(base.name);
        base.devices.extend(self.devices);
        base.inter_node_bandwidth = self.inter_node_bandwidth.or(base.inter_node_bandwidth);
        base.storage = self.storage.or(base.storage);
        base.restart_time = self.restart_time.or(base.restart_time);
        base.lab = self.lab.or(base.lab);
        base.notes.extend(self.notes);
        if let Some(network) = self.network {
            base.network = Some(network::over(network, base.network));
        }
        match self.nodes {
            None => {}
            Some(At { value: NodesSpec::Count(count), place }) => {
                let count = At { value: count, place };
                count.count("nodes")?;
                match base.nodes.as_mut().map(|nodes| &mut nodes.value) {
                    Some(NodesSpec::Groups(groups)) if groups.len() == 1 => groups[0].value.count = Some(count),
                    _ => {
                        let what = format!("`{}` has several kinds of node, so `nodes` cannot count them", name.value);
                        return Err(TopologyError::invalid(place, what, "list the nodes instead"));
                    }
                }
            }
            Some(list) => base.nodes = Some(list),
        }
        Ok(base)
    }
}

/// The device kinds found so far: those of the file, and those of the library that a node names directly.
struct Kinds {
    found: Vec<DeviceKind>,
}

impl Kinds {
    fn new(specs: &BTreeMap<String, At<DeviceSpec>>, notes: &mut Vec<String>) -> Result<Self, TopologyError> {
        let found = specs.iter().map(|(name, spec)| device_kind(name, spec, notes)).collect::<Result<_, _>>()?;
        Ok(Kinds { found })
    }

    /// The index of the kind called `name`, which is taken from the library if the file has none.
    fn index(&mut self, name: &At<String>) -> Result<usize, TopologyError> {
        if let Some(index) = self.found.iter().position(|kind| kind.name == name.value) {
            return Ok(index);
        }
        let Some(kind) = library::device_kind(&name.value)? else {
            let library = library::device_names()?.map(str::to_owned);
            let known: Vec<String> = self.found.iter().map(|kind| kind.name.clone()).chain(library).collect();
            let hint = suggest(&name.value, known.iter().map(String::as_str));
            let problem = TopologyProblem::UnknownName { what: "device kind", name: name.value.clone(), hint };
            return Err(TopologyError::at(name.place, problem));
        };
        self.found.push(kind);
        Ok(self.found.len() - 1)
    }

    /// The kinds sorted by name, the order in which the written form lists them, and the groups' indices with them.
    fn in_order_of_names(self, groups: &mut [NodeGroup]) -> Vec<DeviceKind> {
        let mut order: Vec<usize> = (0..self.found.len()).collect();
        order.sort_by_key(|&index| &self.found[index].name);
        for group in groups {
            group.kind = order.iter().position(|&index| index == group.kind).unwrap_or(group.kind);
        }
        order.into_iter().map(|index| self.found[index].clone()).collect()
    }
}

/// A device kind from its own figures over those of its base. Also reads the library's devices, which have no base.
pub(crate) fn device_kind(name: &str, spec: &At<DeviceSpec>, notes: &mut Vec<String>) -> Result<DeviceKind, TopologyError> {
    let At { value: spec, place } = spec;
    let base = match &spec.base {
        None => None,
        Some(base) => Some(library::device_kind(&base.value)?.ok_or_else(|| {
            let hint = library::device_names().map_or_else(|_| String::new(), |names| suggest(&base.value, names));
            let problem = TopologyProblem::UnknownName { what: "library device", name: base.value.clone(), hint };
            TopologyError::at(base.place, problem)
        })?),
    };
    let missing = |field, example: &str| {
        let hint = format!("write `{field}: {example}`, or build on a library device with `base`");
        TopologyError::at(*place, TopologyProblem::Missing { owner: format!("device `{name}`"), field, hint })
    };
    let own = |base: &DeviceKind| {
        let same = spec.memory.is_none()
            && spec.memory_bandwidth.is_none()
            && spec.peak.is_empty()
            && spec.power.is_none()
            && spec.link.is_none()
            && spec.host_link.is_none();
        base.source.as_ref().map(|source| if same { source.clone() } else { format!("{source}; changed in the topology file") })
    };

    let mut peak = base.as_ref().map(|base| base.peak.clone()).unwrap_or_default();
    for (format, rate) in &spec.peak {
        peak.insert(*format, rate.positive(&format!("peak.{format}"))?);
    }
    if peak.is_empty() {
        return Err(missing("peak", "{fp32: 15.7TFLOP/s}"));
    }
    let memory = spec.memory.as_ref().map(|memory| memory.positive("memory")).transpose()?;
    let memory_bandwidth = spec.memory_bandwidth.as_ref().map(|rate| rate.positive("memory_bandwidth")).transpose()?;
    let architecture = spec.architecture.or(base.as_ref().map(|base| base.architecture)).unwrap_or_else(|| {
        let (assumed, name_of_it) = if spec.cores.is_some() { (Architecture::Cpu, "cpu") } else { (Architecture::Gpu, "gpu") };
        notes.push(format!("device `{name}`: taken for a {name_of_it}, since the file does not say its `architecture`"));
        assumed
    });
    Ok(DeviceKind {
        name: name.to_owned(),
        base: base.as_ref().map(|base| base.name.clone()),
        architecture,
        memory: memory.or(base.as_ref().map(|base| base.memory)).ok_or_else(|| missing("memory", "32GiB"))?,
        memory_bandwidth: memory_bandwidth
            .or(base.as_ref().map(|base| base.memory_bandwidth))
            .ok_or_else(|| missing("memory_bandwidth", "900GB/s"))?,
        peak,
        power: spec
            .power
            .as_ref()
            .map(|power| power.positive("power"))
            .transpose()?
            .or(base.as_ref().and_then(|base| base.power)),
        idle_power: spec
            .idle_power
            .as_ref()
            .map(|power| power.quantity("idle_power"))
            .transpose()?
            .or(base.as_ref().and_then(|base| base.idle_power)),
        link: spec.link.as_ref().map(|link| link.positive("link")).transpose()?.or(base.as_ref().and_then(|base| base.link)),
        host_link: spec
            .host_link
            .as_ref()
            .map(|link| link.positive("host_link"))
            .transpose()?
            .or(base.as_ref().and_then(|base| base.host_link)),
        cores: spec.cores.as_ref().map(|cores| cores.count("cores")).transpose()?.or(base.as_ref().and_then(|base| base.cores)),
        cpu_quota: spec.cpu_quota.as_ref().map(cpu_quota).transpose()?.or(base.as_ref().and_then(|base| base.cpu_quota)),
        source: spec.source.clone().or(base.as_ref().and_then(own)),
    })
}

/// A share of a core: more than none of it, and no more than all.
fn cpu_quota(quota: &At<Scalar>) -> Result<f64, TopologyError> {
    let share = quota.number("cpu_quota", 0.0)?;
    if share > 0.0 && share <= 1.0 {
        return Ok(share);
    }
    let what = format!("`cpu_quota: {share}` is no share of a core's time");
    Err(TopologyError::invalid(quota.place, what, "write a number above 0 and up to 1, such as `cpu_quota: 0.5`"))
}

/// A kind of node. `usual_link` is what joins several devices where the file does not say.
fn node_group(
    spec: &At<NodeSpec>,
    (index, groups): (usize, usize),
    kinds: &mut Kinds,
    usual_link: fn(&DeviceKind) -> Option<NodeLink>,
    notes: &mut Vec<String>,
) -> Result<NodeGroup, TopologyError> {
    let At { value: spec, place } = spec;
    let default_name = || if groups == 1 { "node".to_owned() } else { format!("node{index}") };
    let name = spec.name.as_ref().map_or_else(default_name, |name| name.value.clone());
    let count = spec.count.as_ref().map_or(Ok(1), |count| count.count("count"))?;

    let owner = || format!("node `{name}`");
    let missing = |place: Option<Place>, field, hint: &str| {
        TopologyError::at(place, TopologyProblem::Missing { owner: owner(), field, hint: hint.into() })
    };
    let devices_spec =
        spec.devices.as_ref().ok_or_else(|| missing(*place, "devices", "write `devices: {kind: a100-sxm-80g, count: 8}`"))?;
    let kind_name = devices_spec.value.kind.as_ref().ok_or_else(|| {
        missing(
            devices_spec.place,
            "devices.kind",
            "name a kind of the file's `devices` or of the library, such as `a100-sxm-80g`",
        )
    })?;
    let kind = kinds.index(kind_name)?;
    let devices = devices_spec.value.count.as_ref().map_or(Ok(1), |count| count.count("devices.count"))?;

    let link = match &spec.link {
        Some(link) => Some(node_link(link, &name, &kinds.found[kind])?),
        None if devices == 1 => None,
        None => {
            let usual = usual_link(&kinds.found[kind]);
            let taken = |link: &NodeLink| {
                format!("node `{name}`: devices taken to be joined by {} at {}", link.kind.name(), link.bandwidth)
            };
            notes.extend(usual.as_ref().map(taken));
            usual
        }
    };
    Ok(NodeGroup {
        host_memory: spec.host_memory.as_ref().map(|memory| memory.positive("host_memory")).transpose()?,
        nics: spec.nics.as_ref().map(|nics| network_interfaces(nics, &name)).transpose()?,
        price_per_hour: spec.price_per_hour.as_ref().map(|price| price.number("price_per_hour", 0.0)).transpose()?,
        mean_time_between_failures: spec
            .mean_time_between_failures
            .as_ref()
            .map(|time| time.positive("mean_time_between_failures"))
            .transpose()?,
        name,
        count,
        kind,
        devices,
        link,
    })
}

/// What storage carries.
fn storage_bandwidth(storage: &At<StorageSpec>) -> Result<BytesPerSecond, TopologyError> {
    let Some(bandwidth) = &storage.value.bandwidth else {
        let hint = "write what all nodes together read or write, such as `bandwidth: 40GB/s`".into();
        let problem = TopologyProblem::Missing { owner: "`storage`".into(), field: "bandwidth", hint };
        return Err(TopologyError::at(storage.place, problem));
    };
    bandwidth.positive("storage.bandwidth")
}

/// What joins devices of a kind where the file does not say.
fn default_link(kind: &DeviceKind) -> Option<NodeLink> {
    let (link, bandwidth) = match (kind.architecture, kind.link) {
        (Architecture::Cpu, _) => (NodeLinkKind::SharedMemory, DEFAULT_SHARED_MEMORY_BANDWIDTH),
        (Architecture::Gpu | Architecture::Tpu, Some(bandwidth)) => (NodeLinkKind::NvSwitch, bandwidth),
        (Architecture::Gpu | Architecture::Tpu, None) => (NodeLinkKind::Pcie, DEFAULT_PCIE_BANDWIDTH),
    };
    Some(NodeLink { kind: link, bandwidth, latency: link.default_latency(), tree: None })
}

/// A node's link from its short form `KIND-RATE`, or from a mapping.
fn node_link(link: &At<ShortOrFull<LinkSpec>>, node: &str, device: &DeviceKind) -> Result<NodeLink, TopologyError> {
    let none = LinkSpec::default();
    let (kind, bandwidth, full) = match &link.value {
        ShortOrFull::Short(text) => {
            let kind = NodeLinkKind::ALL
                .into_iter()
                .find(|kind| text.strip_prefix(kind.name()).is_some_and(|rest| rest.is_empty() || rest.starts_with('-')));
            let kind = kind.ok_or_else(|| {
                unknown_link(text.trim_end_matches(|letter| letter != '-').trim_end_matches('-'), text, link.place)
            })?;
            let rate = text[kind.name().len()..].strip_prefix('-');
            (kind, rate.map(|rate| At { value: rate.into(), place: link.place }), &none)
        }
        ShortOrFull::Full(full) => {
            let kind = full.kind.as_ref().ok_or_else(|| {
                let hint = "write `kind: nvswitch`, `nvlink-mesh`, `pcie` or `shared-memory`".into();
                let owner = format!("the link of node `{node}`");
                TopologyError::at(link.place, TopologyProblem::Missing { owner, field: "kind", hint })
            })?;
            let found = NodeLinkKind::ALL.into_iter().find(|known| known.name() == kind.value);
            let found = found.ok_or_else(|| unknown_link(&kind.value, &kind.value, kind.place))?;
            (found, full.bandwidth.clone(), full)
        }
    };
    let bandwidth = match (bandwidth, kind, device.link) {
        (Some(bandwidth), _, _) => bandwidth.positive("link")?,
        (None, NodeLinkKind::Pcie, _) => DEFAULT_PCIE_BANDWIDTH,
        (None, NodeLinkKind::SharedMemory, _) => DEFAULT_SHARED_MEMORY_BANDWIDTH,
        (None, _, Some(own)) => own,
        (None, _, None) => {
            let hint = format!("say what one device sends, such as `{}-300GB/s`", kind.name());
            let owner = format!("the link of node `{node}`");
            return Err(TopologyError::at(link.place, TopologyProblem::Missing { owner, field: "bandwidth", hint }));
        }
    };
    let latency = full.latency.as_ref().map_or(Ok(kind.default_latency()), |latency| latency.quantity::<Seconds>("latency"))?;
    Ok(NodeLink { kind, bandwidth, latency, tree: pcie_tree(full, kind, bandwidth)? })
}

/// The switches of a PCIe link, where it says any. An uplink is as wide as a device's lanes unless it says otherwise.
fn pcie_tree(link: &LinkSpec, kind: NodeLinkKind, lanes: BytesPerSecond) -> Result<Option<PcieTree>, TopologyError> {
    let LinkSpec { devices_per_switch, uplink, switches_per_socket, socket_link, .. } = link;
    let refused = |value: &At<Scalar>, what: String, hint: &str| Err(TopologyError::invalid(value.place, what, hint));
    let of_tree = [
        ("devices_per_switch", devices_per_switch),
        ("uplink", uplink),
        ("switches_per_socket", switches_per_socket),
        ("socket_link", socket_link),
    ];
    for (field, value) in of_tree {
        if let Some(value) = value {
            if kind != NodeLinkKind::Pcie {
                let what = format!("a `{}` link has no `{field}`", kind.name());
                return refused(value, what, "leave it out, or write `kind: pcie`");
            }
            if devices_per_switch.is_none() {
                return refused(
                    value,
                    format!("`{field}` is of PCIe switches, and none are described"),
                    "say `devices_per_switch`",
                );
            }
        }
    }
    let Some(devices_per_switch) = devices_per_switch else { return Ok(None) };
    let sockets = match (switches_per_socket, socket_link) {
        (None, None) => None,
        (Some(switches), Some(link)) => {
            Some(Sockets { switches: switches.count("switches_per_socket")?, link: link.positive("socket_link")? })
        }
        (Some(switches), None) => {
            return refused(switches, "sockets need a `socket_link`".into(), "say what one sends to the others, one way");
        }
        (None, Some(link)) => {
            return refused(link, "a `socket_link` needs `switches_per_socket`".into(), "say how many switches a socket has");
        }
    };
    Ok(Some(PcieTree {
        devices_per_switch: devices_per_switch.count("devices_per_switch")?,
        uplink: uplink.as_ref().map_or(Ok(lanes), |uplink| uplink.positive("uplink"))?,
        sockets,
    }))
}

fn unknown_link(kind: &str, written: &str, place: Option<Place>) -> TopologyError {
    let near = if kind.is_empty() { written } else { kind };
    let hint = suggest(near, NodeLinkKind::ALL.map(NodeLinkKind::name));
    TopologyError::at(place, TopologyProblem::UnknownName { what: "kind of link", name: near.into(), hint })
}

fn network_interfaces(nics: &At<NicsSpec>, node: &str) -> Result<Nics, TopologyError> {
    let bandwidth = nics.value.bandwidth.as_ref().ok_or_else(|| {
        let hint = "say what one carries, such as `bandwidth: 25Gbit/s`".into();
        let owner = format!("`nics` of node `{node}`");
        TopologyError::at(nics.place, TopologyProblem::Missing { owner, field: "bandwidth", hint })
    })?;
    Ok(Nics {
        count: nics.value.count.as_ref().map_or(Ok(1), |count| count.count("nics.count"))?,
        bandwidth: bandwidth.positive("bandwidth")?,
    })
}
