//! The described cluster and its queries.

use crate::device::DeviceKind;
use crate::error::{Place, TopologyError, TopologyProblem};
use crate::fabric::{Fabric, Leaf, Network};
use crate::layout::{DeviceId, InterchangeableNodes, Layout, NodeId, Route, device_in_words, node_name, unreachable};
use crate::link::{Link, LinkClass};
use crate::node::{Nics, NodeGroup};
use crate::spec::TopologySpec;
use foretell_units::{Bytes, BytesPerSecond, Price, Seconds};
use serde::Serialize;
use std::ops::Range;
use std::sync::Arc;

/// Largest number of devices of a topology: ten times that of the largest clusters, and still
/// little memory.
pub const MAXIMUM_DEVICES: usize = 1_000_000;

/// A cluster: its nodes, their devices, and the links between them.
///
/// It serialises to a normal form of the topology file with every default written out, and reads
/// back equal.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(try_from = "TopologySpec", into = "TopologySpec")]
pub struct Topology {
    pub(crate) name: String,
    pub(crate) kinds: Vec<DeviceKind>,
    pub(crate) groups: Vec<NodeGroup>,
    pub(crate) network: Network,
    pub(crate) storage_bandwidth: Option<BytesPerSecond>,
    pub(crate) restart_time: Option<Seconds>,
    pub(crate) currency: Option<String>,
    pub(crate) is_lab: bool,
    pub(crate) notes: Vec<String>,
    /// Indices derived from the fields above. Shared, because plans and simulations clone
    /// topologies.
    layout: Arc<Layout>,
}

/// The places in the file of the network and of each stated route.
#[derive(Default)]
pub(crate) struct NetworkPlaces {
    pub(crate) network: Option<Place>,
    pub(crate) routes: Vec<Option<Place>>,
}

/// Factors on the links of a topology, for what-if questions.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LinkScale {
    /// Factor on rates of links inside nodes.
    pub intra_node_bandwidth: f64,
    /// Factor on rates between nodes: those of network interfaces, from which the uplinks of
    /// switches follow, and links of a torus or dragonfly.
    pub inter_node_bandwidth: f64,
    /// Factor on latencies inside nodes.
    pub intra_node_latency: f64,
    /// Factor on latencies between nodes.
    pub inter_node_latency: f64,
}

impl LinkScale {
    /// The scale that changes nothing.
    pub const NONE: Self =
        Self { intra_node_bandwidth: 1.0, inter_node_bandwidth: 1.0, intra_node_latency: 1.0, inter_node_latency: 1.0 };
}

/// The part of a topology that a file describes.
pub(crate) struct Description {
    pub(crate) name: String,
    pub(crate) kinds: Vec<DeviceKind>,
    pub(crate) groups: Vec<NodeGroup>,
    pub(crate) network: Network,
    pub(crate) storage_bandwidth: Option<BytesPerSecond>,
    pub(crate) restart_time: Option<Seconds>,
    pub(crate) currency: Option<String>,
    pub(crate) is_lab: bool,
    pub(crate) notes: Vec<String>,
}

impl Topology {
    /// Returns the cluster with `count` nodes (`--nodes`). It must have only one node group.
    pub fn with_nodes(self, count: usize) -> Result<Topology, TopologyError> {
        let mut description = self.into_description();
        if count == 0 {
            return Err(TopologyError::invalid(None, "a topology cannot have 0 nodes", "ask for 1 or more"));
        }
        match description.groups.as_mut_slice() {
            [template] => template.count = count,
            groups => {
                let names = groups.iter().map(|group| format!("`{}`", group.name)).collect::<Vec<_>>().join(", ");
                return Err(TopologyError::invalid(
                    None,
                    format!(
                        "`{}` has several kinds of node ({names}), so a number of nodes does not say how many of each",
                        description.name
                    ),
                    "set each `count` in the topology file",
                ));
            }
        }
        description.build()
    }

    /// Returns the cluster with this price per device and hour, in place of its own prices.
    #[must_use]
    pub fn with_device_price(mut self, price: &Price) -> Topology {
        for group in &mut self.groups {
            group.price_per_hour = Some(price.amount * group.devices as f64);
        }
        self.currency.clone_from(&price.currency);
        self
    }

    /// Returns the cluster with its node groups rotated so that `group` comes first. Ranks fill
    /// devices in order, so the first ranks run on that group.
    ///
    /// # Errors
    /// The group does not exist, or the groups cannot be reordered: the network is neither one
    /// switch nor a tree whose leaves each hold nodes of one group.
    pub fn beginning_with(self, group: &str) -> Result<Topology, TopologyError> {
        let mut description = self.into_description();
        let names = description.groups.iter().map(|group| format!("`{}`", group.name)).collect::<Vec<_>>().join(", ");
        let Some(place) = description.groups.iter().position(|known| known.name == group) else {
            let what = format!("`{}` has no kind of node called `{group}`", description.name);
            return Err(TopologyError::invalid(None, what, format!("there are {names}")));
        };
        let counts: Vec<usize> = description.groups.iter().map(|group| group.count).collect();
        let may_rotate = description.network.stated.is_empty() && description.network.fabric.groups_may_rotate(&counts);
        if place > 0 && !may_rotate {
            let what = format!("the nodes of `{}` have their places in its network", description.name);
            return Err(TopologyError::invalid(None, what, "list them in another order in the topology file"));
        }
        description.groups.rotate_left(place);
        description.build()
    }

    /// Returns the cluster in which all NICs of a node together have the rate `total`, one way.
    pub fn with_inter_node_bandwidth(self, total: BytesPerSecond) -> Result<Topology, TopologyError> {
        let mut description = self.into_description();
        if let Fabric::Torus(_) = description.network.fabric {
            let hint = "say what one link carries, as the `bandwidth` of `network`";
            return Err(TopologyError::invalid(
                None,
                "`inter_node_bandwidth` says nothing of a torus, which joins devices",
                hint,
            ));
        }
        for group in &mut description.groups {
            let count = group.nics.map_or(1, |nics| nics.count);
            group.nics = Some(Nics { count, bandwidth: total / count as f64 });
        }
        description.build()
    }

    /// Returns the cluster with scaled links.
    ///
    /// # Errors
    /// Never for a valid topology.
    pub fn with_links_scaled(self, scale: &LinkScale) -> Result<Topology, TopologyError> {
        let mut description = self.into_description();
        for group in &mut description.groups {
            if let Some(link) = &mut group.link {
                link.bandwidth = link.bandwidth * scale.intra_node_bandwidth;
                link.latency = link.latency * scale.intra_node_latency;
            }
            if let Some(nics) = &mut group.nics {
                nics.bandwidth = nics.bandwidth * scale.inter_node_bandwidth;
            }
        }
        description.network.fabric.scale(scale.inter_node_bandwidth);
        description.network.latency = description.network.latency * scale.inter_node_latency;
        description.build()
    }

    /// Returns the cluster with its storage rate, if any, multiplied by `factor`.
    ///
    /// # Errors
    /// Never for a valid topology.
    pub fn with_storage_scaled(self, factor: f64) -> Result<Topology, TopologyError> {
        let mut description = self.into_description();
        description.storage_bandwidth = description.storage_bandwidth.map(|rate| rate * factor);
        description.build()
    }

    /// Returns the cluster with the devices' peaks of all formats multiplied by `peak`, and their
    /// memory bandwidths by `memory_bandwidth`.
    ///
    /// # Errors
    /// Never for a valid topology.
    pub fn with_devices_scaled(self, peak: f64, memory_bandwidth: f64) -> Result<Topology, TopologyError> {
        let mut description = self.into_description();
        for kind in &mut description.kinds {
            *kind = kind.scaled(peak, memory_bandwidth);
        }
        description.build()
    }

    /// Name of the cluster.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Number of devices. Their indices go from 0, node by node.
    pub fn device_count(&self) -> usize {
        self.layout.device_count
    }

    /// The device of a rank. Ranks fill all devices in order.
    pub fn device_of_rank(&self, rank: usize) -> DeviceId {
        DeviceId::of_rank(rank, DeviceId(0), self.device_count())
    }

    /// Number of nodes.
    pub fn node_count(&self) -> usize {
        self.layout.node_count
    }

    /// All devices, in order.
    pub fn devices(&self) -> impl ExactSizeIterator<Item = DeviceId> + use<> {
        (0..self.layout.device_count).map(DeviceId)
    }

    /// Device kinds that the file defines or uses.
    pub fn device_kinds(&self) -> &[DeviceKind] {
        &self.kinds
    }

    /// Node groups, in the order of their nodes.
    pub fn node_groups(&self) -> &[NodeGroup] {
        &self.groups
    }

    /// The network between the nodes.
    pub fn network(&self) -> &Network {
        &self.network
    }

    /// Leaf switches in the order of their nodes. Empty unless the network is a fat tree that is
    /// not rail-optimised.
    pub fn leaves(&self) -> Vec<Leaf> {
        self.layout.leaves()
    }

    /// The outermost class of link on a route: [`LinkClass::Switch`] between leaf switches,
    /// [`LinkClass::Nic`] between nodes under one switch, the node's own class within a node.
    /// `None` from a device to itself.
    pub fn farthest_link(&self, from: DeviceId, to: DeviceId) -> Result<Option<LinkClass>, TopologyError> {
        let route = self.route(from, to)?;
        Ok(route.links.iter().map(|link| self.layout.links[link.0].class).max())
    }

    /// Kind of a device.
    ///
    /// # Panics If the device does not exist. So do all queries about a device or a node.
    pub fn device_kind(&self, device: DeviceId) -> &DeviceKind {
        &self.kinds[self.kind_index(device)]
    }

    /// Kind of a device, as an index into [`Topology::device_kinds`].
    pub fn kind_index(&self, device: DeviceId) -> usize {
        self.groups[self.layout.position(&self.groups, device).group].kind
    }

    /// Node of a device.
    pub fn node_of(&self, device: DeviceId) -> NodeId {
        let position = self.layout.position(&self.groups, device);
        NodeId(self.layout.groups[position.group].first_node + position.node_in_group)
    }

    /// Group of a node: an index into [`Topology::node_groups`].
    pub fn group_of(&self, node: NodeId) -> usize {
        assert!(node.0 < self.layout.node_count, "node {} of {}", node.0, self.layout.node_count);
        self.layout.group_of_node(node.0)
    }

    /// Name of a node.
    pub fn node_name(&self, node: NodeId) -> String {
        let group = self.group_of(node);
        node_name(&self.groups[group], node.0 - self.layout.groups[group].first_node)
    }

    /// The range of a node's device indices.
    pub fn devices_of(&self, node: NodeId) -> Range<usize> {
        let group = self.group_of(node);
        let (layout, devices) = (&self.layout.groups[group], self.groups[group].devices);
        let first = layout.first_device + (node.0 - layout.first_node) * devices;
        first..first + devices
    }

    /// All one-way links, indexed by [`crate::LinkId`].
    pub fn links(&self) -> &[Link] {
        &self.layout.links
    }

    /// Returns the interchangeable nodes. `None` if nodes differ or are joined by more than one
    /// switch.
    pub fn interchangeable_nodes(&self) -> Option<InterchangeableNodes> {
        self.layout.interchangeable_nodes()
    }

    /// Computes the route between two devices. It is empty from a device to itself.
    pub fn route(&self, from: DeviceId, to: DeviceId) -> Result<Route, TopologyError> {
        let (start, end) = (self.layout.position(&self.groups, from), self.layout.position(&self.groups, to));
        self.layout.route(&self.groups, start, end).map_err(|missing| {
            let words = |device, position: crate::layout::Position| {
                device_in_words(device, &self.groups[position.group], &self.kinds, position)
            };
            unreachable(words(from, start), words(to, end), missing)
        })
    }

    /// Rate at which a device can send to those of `others` that are on its node, all together, one
    /// way. `None` unless the node's NVLinks are stated pair by pair, and if none of `others` is on
    /// the node.
    pub fn rate_of_wires(&self, from: DeviceId, others: &[DeviceId]) -> Option<BytesPerSecond> {
        if self.groups.iter().all(|group| group.wires.is_none()) {
            return None;
        }
        let position = self.layout.position(&self.groups, from);
        let group = &self.groups[position.group];
        let (wires, link) = group.wires.as_ref().zip(group.link)?;
        let is_beside = |other: &&DeviceId| **other != from && self.node_of(**other) == self.node_of(from);
        let beside = others.iter().filter(is_beside).map(|&other| self.layout.position(&self.groups, other).device_in_node);
        let beside: Vec<usize> = beside.collect();
        (!beside.is_empty()).then(|| wires.rate(position.device_in_node, &beside, link.bandwidth))
    }

    /// Number of shortest paths among which the routing may choose for a flow: 1 within a node or
    /// if flows spread, 0 without a route, at most `u64::MAX`.
    pub fn equal_paths(&self, from: DeviceId, to: DeviceId) -> u64 {
        self.layout.equal_paths(self.layout.position(&self.groups, from), self.layout.position(&self.groups, to))
    }

    /// Checks that every device can reach every other. The nodes of a group are equal, so checking
    /// a few pairs is enough.
    pub fn validate(&self) -> Result<(), TopologyError> {
        let ends: Vec<DeviceId> = self
            .layout
            .groups
            .iter()
            .zip(&self.groups)
            .flat_map(|(layout, group)| {
                let first = layout.first_device;
                // The first two devices of the first node, and the first device of the second.
                [0, 1, group.devices]
                    .into_iter()
                    .filter(|offset| *offset < group.count * group.devices)
                    .map(move |offset| DeviceId(first + offset))
            })
            .collect();
        for &from in &ends {
            for &to in &ends {
                self.route(from, to)?;
            }
        }
        Ok(())
    }

    /// Checks that stated routes name existing nodes and paths.
    fn check_stated_routes(&self, places: &[Option<Place>]) -> Result<(), TopologyError> {
        for (number, route) in self.network.stated.iter().enumerate() {
            let (place, nodes) = (places.get(number).copied().flatten(), self.node_count());
            if route.from >= nodes || route.to >= nodes {
                let what = format!("a route is stated for node {}, and there are {nodes} nodes", route.from.max(route.to));
                return Err(TopologyError::invalid(place, what, "leave it out, or name another node"));
            }
            let [from, to] = [route.from, route.to].map(|node| DeviceId(self.devices_of(NodeId(node)).start));
            let paths = self.equal_paths(from, to);
            if route.path as u64 >= paths {
                let names = [route.from, route.to].map(|node| self.node_name(NodeId(node)));
                let what = format!("there is no path {} from `{}` to `{}`", route.path, names[0], names[1]);
                let hint = match paths {
                    0 => "nothing joins these two".into(),
                    1 => "there is one way only: leave it out".into(),
                    _ => format!("the paths are numbered from 0 to {}", paths - 1),
                };
                return Err(TopologyError::invalid(place, what, hint));
            }
        }
        Ok(())
    }

    /// Memory of the device kind with the least.
    pub fn least_memory(&self) -> Bytes {
        self.device_kinds().iter().map(|kind| kind.memory).min().expect("invariant: a topology has a kind of device")
    }

    /// Price of the whole cluster per hour, if every node has a price.
    pub fn price_per_hour(&self) -> Option<f64> {
        self.groups.iter().map(|group| group.price_per_hour.map(|price| price * group.count as f64)).sum()
    }

    /// Currency of the prices: a code such as `USD`, or a sign that several currencies share.
    /// `None` if no price names it.
    pub fn currency(&self) -> Option<&str> {
        self.currency.as_deref()
    }

    /// Rate at which all nodes together read from or write to storage.
    pub fn storage_bandwidth(&self) -> Option<BytesPerSecond> {
        self.storage_bandwidth
    }

    /// Time from a failure until the run continues, without reading its checkpoint.
    pub fn restart_time(&self) -> Option<Seconds> {
        self.restart_time
    }

    /// Whether the hosts are created on this machine (`lab: true`).
    pub fn is_lab(&self) -> bool {
        self.is_lab
    }

    /// Notes for the user, one sentence each: defaults that were used, estimated figures, and
    /// suspicious values.
    pub fn notes(&self) -> Vec<String> {
        let mut notes = self.notes.clone();
        for group in &self.groups {
            if let (Some(link), Some(own)) = (group.link, self.kinds[group.kind].link)
                && link.bandwidth > own * 1.01
            {
                notes.push(format!(
                    "node `{}`: its link carries {} one way, but a `{}` has ports for {}; data sheets often count both directions",
                    group.name, link.bandwidth, self.kinds[group.kind].name, own
                ));
            }
        }
        notes.extend(self.network.fabric.worked_out(self.node_count(), self.device_count()));
        notes
    }

    fn into_description(self) -> Description {
        let Topology { name, kinds, groups, network, storage_bandwidth, restart_time, currency, is_lab, notes, layout: _ } = self;
        Description { name, kinds, groups, network, storage_bandwidth, restart_time, currency, is_lab, notes }
    }
}

impl Description {
    /// Builds the topology and checks everything that depends on the number of nodes. Single values
    /// must have been checked before.
    pub(crate) fn build(self) -> Result<Topology, TopologyError> {
        self.build_from(&NetworkPlaces::default())
    }

    /// Like [`build`](Self::build), for a description from a file, so that errors have places.
    pub(crate) fn build_from(self, places: &NetworkPlaces) -> Result<Topology, TopologyError> {
        let devices = self.groups.iter().try_fold(0usize, |sum, group| sum.checked_add(group.count.checked_mul(group.devices)?));
        if devices.is_none_or(|devices| devices > MAXIMUM_DEVICES) {
            return Err(TopologyProblem::Invalid {
                what: format!("`{}` would have more than {MAXIMUM_DEVICES} devices", self.name),
                hint: "lower the `count` of its nodes or of their devices".into(),
            }
            .into());
        }
        let nodes = self.groups.iter().map(|group| group.count).sum();
        let fits = self.network.fabric.fits(nodes, devices.expect("invariant: the devices were counted"));
        fits.map_err(|(what, hint)| TopologyError::invalid(places.network, what, hint))?;
        let topology = self.number();
        topology.check_stated_routes(&places.routes)?;
        Ok(topology)
    }

    /// Builds a description that is known to be valid and small.
    pub(crate) fn number(self) -> Topology {
        let layout = Arc::new(Layout::new(&self.groups, &self.network));
        let Description { name, kinds, groups, network, storage_bandwidth, restart_time, currency, is_lab, notes } = self;
        Topology { name, kinds, groups, network, storage_bandwidth, restart_time, currency, is_lab, notes, layout }
    }
}
