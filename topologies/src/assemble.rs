//! Builds a topology from a parsed file: applies bases, resolves names, parses units, fills in
//! defaults and notes them. It must not know models, plans or times.

use crate::device::DeviceKind;
use crate::device_kinds;
use crate::error::{Place, TopologyError, TopologyProblem};
use crate::library;
use crate::node::{NodeGroup, NodeLink};
use crate::spec::{DeviceSpec, NodeSpec, NodesSpec, ShortOrFull, StorageSpec, TopologySpec};
use crate::text::At;
use crate::topology::{Description, Topology};
use foretell_units::{BytesPerSecond, Price, suggest};
use node_link::{default_link, network_interfaces, node_link, wires};
use std::collections::BTreeMap;

mod network;
mod node_link;

impl TopologySpec {
    /// Builds the topology. Errors have line and column but no file; [`TopologyError::in_file`]
    /// adds it.
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
        let currency = currency(group_specs)?;
        let (network, places) = network::network(spec.network.as_ref(), &mut groups, &kinds.found, &mut notes)?;
        let description = Description {
            name: spec.name.unwrap_or_else(|| "topology".into()),
            kinds: kinds.in_order_of_names(&mut groups),
            groups,
            network,
            storage_bandwidth: spec.storage.as_ref().map(storage_bandwidth).transpose()?,
            restart_time: spec.restart_time.as_ref().map(|time| time.quantity("restart_time")).transpose()?,
            currency,
            is_lab: spec.lab.unwrap_or(false),
            notes,
        };
        let topology = description.build_from(&places)?;
        match spec.inter_node_bandwidth {
            Some(total) => topology.with_inter_node_bandwidth(total.positive("inter_node_bandwidth")?),
            None => Ok(topology),
        }
    }

    /// Returns this description with the library topology that it names as `base` filled in where
    /// it states nothing.
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

/// Device kinds found so far: those of the file, and library kinds that a node names directly.
struct Kinds {
    found: Vec<DeviceKind>,
}

impl Kinds {
    fn new(specs: &BTreeMap<String, At<DeviceSpec>>, notes: &mut Vec<String>) -> Result<Self, TopologyError> {
        let found = specs.iter().map(|(name, spec)| device_kinds::device_kind(name, spec, notes)).collect::<Result<_, _>>()?;
        Ok(Kinds { found })
    }

    /// Index of the kind called `name`. The library's kind is added if the file has none of that
    /// name.
    fn index(&mut self, name: &At<String>) -> Result<usize, TopologyError> {
        if let Some(index) = self.found.iter().position(|kind| kind.name == name.value) {
            return Ok(index);
        }
        let Some(kind) = device_kinds::of_library(&name.value)? else {
            let library = device_kinds::library_names()?.map(str::to_owned);
            let known: Vec<String> = self.found.iter().map(|kind| kind.name.clone()).chain(library).collect();
            let hint = suggest(&name.value, known.iter().map(String::as_str));
            let problem = TopologyProblem::UnknownName { what: "device kind", name: name.value.clone(), hint };
            return Err(TopologyError::at(name.place, problem));
        };
        self.found.push(kind);
        Ok(self.found.len() - 1)
    }

    /// Sorts the kinds by name, as the serialised form lists them, and updates the indices in the
    /// groups.
    fn in_order_of_names(self, groups: &mut [NodeGroup]) -> Vec<DeviceKind> {
        let mut order: Vec<usize> = (0..self.found.len()).collect();
        order.sort_by_key(|&index| &self.found[index].name);
        for group in groups {
            group.kind = order.iter().position(|&index| index == group.kind).expect("invariant: the kind was found");
        }
        order.into_iter().map(|index| self.found[index].clone()).collect()
    }
}

/// Price of a node per hour.
fn price(node: &NodeSpec) -> Result<Option<Price>, TopologyError> {
    node.price_per_hour.as_ref().map(|price| price.quantity("price_per_hour")).transpose()
}

/// Returns the currency of the prices. Refuses several currencies, since such prices cannot be
/// added.
fn currency(nodes: &[At<NodeSpec>]) -> Result<Option<String>, TopologyError> {
    let mut first: Option<String> = None;
    for node in nodes {
        let Some(named) = price(&node.value)?.and_then(|price| price.currency) else { continue };
        match &first {
            Some(other) if *other != named => {
                let place = node.value.price_per_hour.as_ref().map_or(node.place, |price| price.place);
                let what = format!("`price_per_hour` is in `{named}`, and that of another node in `{other}`");
                return Err(TopologyError::invalid(place, what, "write all prices in one currency"));
            }
            _ => first = Some(named),
        }
    }
    Ok(first)
}

/// Builds a node group. `usual_link` returns the link between devices that applies if the file
/// states none.
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
    let stated = spec.link.as_ref().and_then(|link| match &link.value {
        ShortOrFull::Full(full) => Some(full),
        ShortOrFull::Short(_) => None,
    });
    let wires = match (stated, link) {
        (Some(full), Some(link)) => wires(full, link.kind, devices, kinds.found[kind].slot_rate())?,
        _ => None,
    };
    Ok(NodeGroup {
        wires,
        host_memory: spec.host_memory.as_ref().map(|memory| memory.positive("host_memory")).transpose()?,
        nics: spec.nics.as_ref().map(|nics| network_interfaces(nics, &name)).transpose()?,
        price_per_hour: price(spec)?.map(|price| price.amount),
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

/// Reads the rate of the storage.
fn storage_bandwidth(storage: &At<StorageSpec>) -> Result<BytesPerSecond, TopologyError> {
    let Some(bandwidth) = &storage.value.bandwidth else {
        let hint = "write what all nodes together read or write, such as `bandwidth: 40GB/s`".into();
        let problem = TopologyProblem::Missing { owner: "`storage`".into(), field: "bandwidth", hint };
        return Err(TopologyError::at(storage.place, problem));
    };
    bandwidth.positive("storage.bandwidth")
}
