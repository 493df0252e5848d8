//! The described cluster, and the questions that the rest of Foretell asks of it.

use crate::device::DeviceKind;
use crate::error::{Place, TopologyError, TopologyProblem};
use crate::fabric::{Fabric, Leaf, Network};
use crate::layout::{AlikeNodes, DeviceId, Layout, NodeId, Route, device_in_words, node_name, unreachable};
use crate::link::{Link, LinkClass};
use crate::node::{Nics, NodeGroup};
use crate::spec::TopologySpec;
use crate::{library, spec};
use foretell_units::{Bytes, BytesPerSecond, Seconds};
use serde::{Deserialize, Serialize};
use std::ops::Range;
use std::sync::Arc;

/// The most devices a topology may have: ten times the largest clusters there are, and still little memory.
pub const MAXIMUM_DEVICES: usize = 1_000_000;

/// A cluster: its nodes, their devices, and the links between them.
///
/// It serialises to a normal form of the topology file, in which every default is written out, and reads back equal.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "TopologySpec", into = "TopologySpec")]
pub struct Topology {
    pub(crate) name: String,
    pub(crate) kinds: Vec<DeviceKind>,
    pub(crate) groups: Vec<NodeGroup>,
    pub(crate) network: Network,
    pub(crate) storage_bandwidth: Option<BytesPerSecond>,
    pub(crate) restart_time: Option<Seconds>,
    pub(crate) is_lab: bool,
    pub(crate) notes: Vec<String>,
    /// What follows from the above; shared, because plans and simulations copy topologies freely.
    layout: Arc<Layout>,
}

/// Where the network stands in its file, and each of the routes that it states.
#[derive(Default)]
pub(crate) struct NetworkPlaces {
    pub(crate) network: Option<Place>,
    pub(crate) routes: Vec<Option<Place>>,
}

/// How links differ from those of a file, as factors: what somebody asks who thinks of buying others.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LinkScale {
    /// Of what links between devices of a node carry.
    pub intra_node_bandwidth: f64,
    /// Of what network interfaces carry; switches' uplinks follow them.
    pub inter_node_bandwidth: f64,
    /// Of the time from one device of a node to another.
    pub intra_node_latency: f64,
    /// Of the time from one node to another.
    pub inter_node_latency: f64,
}

impl LinkScale {
    /// Links as they are.
    pub const NONE: Self =
        Self { intra_node_bandwidth: 1.0, inter_node_bandwidth: 1.0, intra_node_latency: 1.0, inter_node_latency: 1.0 };
}

/// What a topology is made of: the part of it that a file describes.
pub(crate) struct Description {
    pub(crate) name: String,
    pub(crate) kinds: Vec<DeviceKind>,
    pub(crate) groups: Vec<NodeGroup>,
    pub(crate) network: Network,
    pub(crate) storage_bandwidth: Option<BytesPerSecond>,
    pub(crate) restart_time: Option<Seconds>,
    pub(crate) is_lab: bool,
    pub(crate) notes: Vec<String>,
}

impl Topology {
    /// Reads a topology file. `file_name` is for messages, and names the topology where the file does not.
    pub fn from_yaml(text: &str, file_name: &str) -> Result<Topology, TopologyError> {
        spec::read(text).and_then(|spec| spec.named_after(file_name).build()).map_err(|error| error.in_file(file_name))
    }

    /// The library's topology of that name. An unknown name is answered with those there are.
    pub fn library(name: &str) -> Result<Topology, TopologyError> {
        library::topology(name)
    }

    /// The names of the library's topologies.
    pub fn library_names() -> impl Iterator<Item = &'static str> {
        library::topology_names()
    }

    /// The same cluster with `count` nodes: how `--nodes` scales a file that describes one kind of node.
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

    /// The same cluster with its kinds of node counted from `group` on, those before it after the last: ranks lie on the first devices.
    ///
    /// # Errors
    /// There is no such kind of node, or nodes cannot change places: where the network is not one switch, or a tree whose leaves have nodes of one kind
    /// each.
    pub fn beginning_with(self, group: &str) -> Result<Topology, TopologyError> {
        let mut description = self.into_description();
        let names = description.groups.iter().map(|group| format!("`{}`", group.name)).collect::<Vec<_>>().join(", ");
        let Some(place) = description.groups.iter().position(|one| one.name == group) else {
            let what = format!("`{}` has no kind of node called `{group}`", description.name);
            return Err(TopologyError::invalid(None, what, format!("there are {names}")));
        };
        let count = description.groups.iter().map(|group| group.count).sum();
        let may_turn = description.network.stated.is_empty()
            && match &description.network.fabric {
                Fabric::None | Fabric::Switch => true,
                Fabric::FatTree(tree) => {
                    let leaf = tree.nodes_per_leaf(count);
                    tree.pods.is_none() && description.groups.iter().all(|group| group.count.is_multiple_of(leaf))
                }
                Fabric::Torus(_) | Fabric::Dragonfly(_) => false,
            };
        if place > 0 && !may_turn {
            let what = format!("the nodes of `{}` have their places in its network", description.name);
            return Err(TopologyError::invalid(None, what, "list them in another order in the topology file"));
        }
        description.groups.rotate_left(place);
        description.build()
    }

    /// The same cluster with `total` from each node into the network: all its NICs together, one way.
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

    /// The same cluster with links so many times as fast, and latencies so many times as long.
    ///
    /// # Errors
    /// Never for a topology that could be built.
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

    /// The same cluster with storage so many times as fast, where it says how fast that is.
    ///
    /// # Errors
    /// Never for a topology that could be built.
    pub fn with_storage_scaled(self, factor: f64) -> Result<Topology, TopologyError> {
        let mut description = self.into_description();
        description.storage_bandwidth = description.storage_bandwidth.map(|rate| rate * factor);
        description.build()
    }

    /// The same cluster with devices whose peaks, in every format, and whose memory are so many times as fast.
    ///
    /// # Errors
    /// Never for a topology that could be built.
    pub fn with_devices_scaled(self, peak: f64, memory_bandwidth: f64) -> Result<Topology, TopologyError> {
        let mut description = self.into_description();
        for kind in &mut description.kinds {
            *kind = kind.scaled(peak, memory_bandwidth);
        }
        description.build()
    }

    /// The name of the cluster.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// How many devices there are; they are numbered from 0, node by node.
    pub fn device_count(&self) -> usize {
        self.layout.device_count
    }

    /// The device of a rank, where ranks fill all devices in order.
    pub fn device_of_rank(&self, rank: usize) -> DeviceId {
        DeviceId::of_rank(rank, DeviceId(0), self.device_count())
    }

    /// How many nodes there are.
    pub fn node_count(&self) -> usize {
        self.layout.node_count
    }

    /// All devices, in order.
    pub fn devices(&self) -> impl ExactSizeIterator<Item = DeviceId> + use<> {
        (0..self.layout.device_count).map(DeviceId)
    }

    /// The kinds of device that the file names or uses.
    pub fn device_kinds(&self) -> &[DeviceKind] {
        &self.kinds
    }

    /// The groups of nodes that are alike, in the order of their nodes.
    pub fn node_groups(&self) -> &[NodeGroup] {
        &self.groups
    }

    /// The network between the nodes.
    pub fn network(&self) -> &Network {
        &self.network
    }

    /// The leaf switches, in the order of their nodes, where the network is a fat tree.
    pub fn leaves(&self) -> Vec<Leaf> {
        self.layout.leaves()
    }

    /// The kind of link on the way between devices that is farthest from them: [`LinkClass::Switch`] where data cross from one leaf switch
    /// to another, [`LinkClass::Nic`] between nodes under one, the node's own within a node. `None` from a device to itself.
    pub fn farthest_link(&self, from: DeviceId, to: DeviceId) -> Result<Option<LinkClass>, TopologyError> {
        let route = self.route(from, to)?;
        Ok(route.links.iter().map(|link| self.layout.links[link.0].class).max())
    }

    /// The kind of a device.
    ///
    /// # Panics
    /// If there is no such device; so do the other functions that are asked about one device or one node.
    pub fn device_kind(&self, device: DeviceId) -> &DeviceKind {
        &self.kinds[self.kind_index(device)]
    }

    /// The kind of a device, as an index into [`Topology::device_kinds`].
    pub fn kind_index(&self, device: DeviceId) -> usize {
        self.groups[self.layout.position(&self.groups, device).group].kind
    }

    /// The node that holds a device.
    pub fn node_of(&self, device: DeviceId) -> NodeId {
        let position = self.layout.position(&self.groups, device);
        NodeId(self.layout.groups[position.group].first_node + position.node_in_group)
    }

    /// The group of a node: an index into [`Topology::node_groups`].
    pub fn group_of(&self, node: NodeId) -> usize {
        assert!(node.0 < self.layout.node_count, "node {} of {}", node.0, self.layout.node_count);
        self.layout.group_of_node(node.0)
    }

    /// A node's name.
    pub fn node_name(&self, node: NodeId) -> String {
        let group = self.group_of(node);
        node_name(&self.groups[group], node.0 - self.layout.groups[group].first_node)
    }

    /// The numbers of the devices of a node.
    pub fn devices_of(&self, node: NodeId) -> Range<usize> {
        let group = self.group_of(node);
        let (layout, devices) = (&self.layout.groups[group], self.groups[group].devices);
        let first = layout.first_device + (node.0 - layout.first_node) * devices;
        first..first + devices
    }

    /// Every one-way link resource; a [`crate::LinkId`] is an index into it.
    pub fn links(&self) -> &[Link] {
        &self.layout.links
    }

    /// What nodes have that may change places; `None` where not all may: where they differ, or are joined by more than one switch.
    pub fn alike_nodes(&self) -> Option<AlikeNodes> {
        self.layout.alike_nodes()
    }

    /// The way from one device to another, computed on demand. From a device to itself it is empty.
    pub fn route(&self, from: DeviceId, to: DeviceId) -> Result<Route, TopologyError> {
        let (start, end) = (self.layout.position(&self.groups, from), self.layout.position(&self.groups, to));
        self.layout.route(&self.groups, start, end).map_err(|reason| {
            let words = |device, position: crate::layout::Position| {
                device_in_words(device, &self.groups[position.group], &self.kinds, position)
            };
            unreachable(words(from, start), words(to, end), reason)
        })
    }

    /// How many ways of the fewest hops the network's routing may choose among for a flow from one device to another: 1 where they are in
    /// one node or flows are spread, 0 where nothing joins them, at most `u64::MAX`.
    pub fn equal_paths(&self, from: DeviceId, to: DeviceId) -> u64 {
        self.layout.equal_paths(self.layout.position(&self.groups, from), self.layout.position(&self.groups, to))
    }

    /// Checks that every device can reach every other. Nodes of one group are alike, so a few pairs stand for all.
    pub fn validate(&self) -> Result<(), TopologyError> {
        let ends: Vec<DeviceId> = self
            .layout
            .groups
            .iter()
            .zip(&self.groups)
            .flat_map(|(layout, group)| {
                let first = layout.first_device;
                // The first two devices of the first node, and the first of the second.
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

    /// Routes are stated between nodes that there are, over ways that there are.
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

    /// The memory of the device that has the least.
    pub fn least_memory(&self) -> Bytes {
        self.device_kinds().iter().map(|kind| kind.memory).min().unwrap_or(Bytes::ZERO)
    }

    /// What the whole cluster costs an hour, if every node has a price.
    pub fn price_per_hour(&self) -> Option<f64> {
        self.groups.iter().map(|group| group.price_per_hour.map(|price| price * group.count as f64)).sum()
    }

    /// What all nodes together read from storage, or write to it.
    pub fn storage_bandwidth(&self) -> Option<BytesPerSecond> {
        self.storage_bandwidth
    }

    /// From a failure until a run goes on, without reading its checkpoint.
    pub fn restart_time(&self) -> Option<Seconds> {
        self.restart_time
    }

    /// Whether the file describes hosts to be made on this machine, rather than hosts that there are.
    pub fn is_lab(&self) -> bool {
        self.is_lab
    }

    /// What a reader should know of this topology: the defaults that were taken, the figures that are estimates, and what looks
    /// like a slip. One sentence each.
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
        let Topology { name, kinds, groups, network, storage_bandwidth, restart_time, is_lab, notes, layout: _ } = self;
        Description { name, kinds, groups, network, storage_bandwidth, restart_time, is_lab, notes }
    }
}

impl Description {
    /// Numbers everything. What the file says of each thing has been checked before; here what depends on the number of nodes is.
    pub(crate) fn build(self) -> Result<Topology, TopologyError> {
        self.build_from(&NetworkPlaces::default())
    }

    /// The same for a description that was read from a file.
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
        let fits = self.network.fabric.fits(nodes, devices.unwrap_or_default());
        fits.map_err(|(what, hint)| TopologyError::invalid(places.network, what, hint))?;
        let topology = self.number();
        topology.check_stated_routes(&places.routes)?;
        Ok(topology)
    }

    /// Numbers a description known to be small.
    pub(crate) fn number(self) -> Topology {
        let layout = Arc::new(Layout::new(&self.groups, &self.network));
        let Description { name, kinds, groups, network, storage_bandwidth, restart_time, is_lab, notes } = self;
        Topology { name, kinds, groups, network, storage_bandwidth, restart_time, is_lab, notes, layout }
    }
}
