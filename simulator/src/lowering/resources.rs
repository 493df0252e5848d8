//! Numbers the links and processors that ranks share.

use super::Lowered;
use super::backlog::links_with_backlog;
use super::communicators::ProcessGroup;
use crate::network::{LoadedLinks, Shape, capacity, has_queue, links_that_can_saturate};
use foretell_topologies::Topology;
use std::collections::BTreeSet;

impl Lowered<'_> {
    /// Numbers the shared resources: first the links that some communication uses and that can
    /// saturate, then the processors. Removes all other links from all shapes.
    pub(crate) fn with_resources_numbered(mut self, topology: &Topology) -> Self {
        let used = self.shared_links(topology);
        let mut number = vec![u32::MAX; topology.links().len()];
        used.iter().zip(0..).for_each(|(&link, index)| number[link] = index);
        let renumber = |shape: &mut Shape| {
            shape.link_pairs = Vec::new();
            shape.loads.retain(|&(link, _)| number[link] != u32::MAX);
            shape.loads.iter_mut().for_each(|(link, _)| *link = number[*link] as usize);
        };
        self.groups.iter_mut().flat_map(ProcessGroup::shapes_mut).flatten().for_each(renumber);
        self.channels.iter_mut().map(|channel| &mut channel.shape).for_each(renumber);
        self.hops.iter_mut().map(|hop| &mut hop.shape).for_each(renumber);
        self.capacities = used.iter().map(|&link| capacity(topology, &self.costs.links, link)).collect();
        self.has_queue = used.iter().map(|&link| has_queue(topology, link)).collect();
        let links = self.capacities.len();
        self.capacities.resize(links + self.processors, 1.0);
        for rank in &mut self.ranks {
            rank.processor += links as u32;
        }
        self
    }

    /// The links that some communication uses, without those that cannot saturate.
    fn shared_links(&self, topology: &Topology) -> Vec<usize> {
        let Self { groups, channels, hops, costs, .. } = self;
        // A channel or hop has at most one message in flight.
        let singles = || channels.iter().map(|channel| &channel.shape).chain(hops.iter().map(|hop| &hop.shape));
        let shapes = || groups.iter().flat_map(ProcessGroup::shapes).flatten().chain(singles());
        if self.communication_overlaps() {
            return shapes().flat_map(Shape::links).collect::<BTreeSet<_>>().into_iter().collect();
        }
        let users = groups.iter().map(ProcessGroup::shapes).chain(singles().map(|shape| [Some(shape), None, None, None]));
        let users = users.map(|shapes| shapes.into_iter().flatten().flat_map(Shape::links));
        let capacity = |link| capacity(topology, &costs.links, link);
        // A backlog slows the next user of a link, even a link wide enough for both.
        let has_backlog = links_with_backlog(self, topology);
        let link_pairs = shapes().flat_map(|shape| &shape.link_pairs);
        let loaded = LoadedLinks::new(topology.links().len(), shapes().flat_map(Shape::links));
        links_that_can_saturate(&loaded, users, link_pairs, capacity, |link| has_backlog[link], self.rotation.as_ref())
    }
}
