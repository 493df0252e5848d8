//! Dragonflies (Kim, Dally, Scott and Abts 2008): routers in groups. Within a group, each router
//! has a link to each other router. Global links join each group to each other group, equally many
//! per pair.

use super::routing::{Choice, Routing};
use super::{End, MOST_LINKS, NodePorts, SWITCH_HOP_LATENCY};
use crate::link::{Junction, Link, LinkClass, LinkId, NewLinks};
use foretell_units::BytesPerSecond;

/// A dragonfly. Consecutive nodes share a router, and consecutive routers form a group. The number
/// of groups follows from the number of nodes.
#[derive(Debug, Clone, PartialEq)]
pub struct Dragonfly {
    /// Nodes per router.
    pub nodes_per_router: usize,
    /// Routers per group.
    pub routers_per_group: usize,
    /// Links to other groups, per router.
    pub global_links: usize,
    /// Rate of a link between two routers of a group, one way.
    pub local_bandwidth: BytesPerSecond,
    /// Rate of a link between two groups, one way.
    pub global_bandwidth: BytesPerSecond,
}

impl Dragonfly {
    fn groups(&self, nodes: usize) -> usize {
        nodes.div_ceil(self.nodes_per_router * self.routers_per_group).max(1)
    }

    pub(super) fn fits(&self, nodes: usize) -> Result<(), (String, String)> {
        let (groups, ports) = (self.groups(nodes), self.routers_per_group * self.global_links);
        let links =
            (self.routers_per_group - 1).saturating_mul(self.routers_per_group).saturating_add(ports).saturating_mul(groups);
        if links > MOST_LINKS {
            let what = format!("a dragonfly of {groups} groups of {} routers has {links} links", self.routers_per_group);
            return Err((what, format!("describe one of at most {MOST_LINKS} links")));
        }
        if groups - 1 <= ports {
            return Ok(());
        }
        Err((
            format!("a dragonfly of {groups} groups needs {} global links a group, and it has {ports}", groups - 1),
            "raise `global_links`, `routers_per_group` or `nodes_per_router`".into(),
        ))
    }
}

/// A dragonfly with numbered links. Links are numbered group by group: first the local links,
/// router by router, then the links of the global ports.
///
/// Port `round x (groups - 1) + offset - 1` of a group leads to the group `offset` further on. The
/// reverse direction leaves that group by its port of the same round and the opposite offset. The
/// first router of a group has the first `global_links` ports, the next router the next ones, and
/// so on.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct DragonflyLayout {
    nodes_per_router: usize,
    /// Routers per group.
    routers: usize,
    groups: usize,
    /// Global ports per router.
    ports: usize,
    /// Number of links between each two groups.
    rounds: usize,
    first_link: usize,
}

impl DragonflyLayout {
    pub(super) fn new(dragonfly: &Dragonfly, nodes: &[NodePorts], links: &mut NewLinks) -> Self {
        let groups = dragonfly.groups(nodes.len());
        let ports = dragonfly.routers_per_group * dragonfly.global_links;
        let layout = DragonflyLayout {
            nodes_per_router: dragonfly.nodes_per_router,
            routers: dragonfly.routers_per_group,
            groups,
            ports: dragonfly.global_links,
            rounds: if groups > 1 { ports / (groups - 1) } else { 0 },
            first_link: links.next(),
        };
        let mut add = |name: String, bandwidth, from: usize, to: usize| {
            let (from, to) = (Junction::Switch(from), Junction::Switch(to));
            links.push(Link { name, class: LinkClass::Switch, bandwidth, latency: SWITCH_HOP_LATENCY, from, to });
        };
        for group in 0..groups {
            let first = group * layout.routers;
            for from in first..first + layout.routers {
                for to in (first..first + layout.routers).filter(|&to| to != from) {
                    add(format!("group-{group}/router-{from}/to-{to}"), dragonfly.local_bandwidth, from, to);
                }
            }
            for round in 0..layout.rounds {
                for offset in 1..groups {
                    let [from, to] = layout.ends(group, round, offset);
                    let other = to / layout.routers;
                    add(format!("group-{group}/global-{round}/to-{other}"), dragonfly.global_bandwidth, from, to);
                }
            }
        }
        layout
    }

    /// The router of a node.
    pub(super) fn router(&self, node: usize) -> usize {
        node / self.nodes_per_router
    }

    /// The routers at the two ends of a global link.
    fn ends(&self, group: usize, round: usize, offset: usize) -> [usize; 2] {
        let port_router = |offset: usize| (round * (self.groups - 1) + offset - 1) / self.ports;
        let other = (group + offset) % self.groups;
        [group * self.routers + port_router(offset), other * self.routers + port_router(self.groups - offset)]
    }

    pub(super) fn path(&self, from: End, to: End, routing: Routing, choice: Choice, links: &mut Vec<LinkId>) {
        let (from, to) = (self.router(from.node), self.router(to.node));
        let (first, last) = (from / self.routers, to / self.routers);
        if routing != Routing::Valiant || first == last || self.groups < 3 {
            self.minimal(from, to, choice, links);
            return;
        }
        // The intermediate group: neither the first nor the last.
        let mut middle = choice.among(self.groups - 2);
        for other in [first.min(last), first.max(last)] {
            middle += usize::from(middle >= other);
        }
        let offset = (middle + self.groups - first) % self.groups;
        let [.., arrival] = self.ends(first, self.round(from, None, offset, choice.next()), offset);
        self.minimal(from, arrival, choice.next(), links);
        self.minimal(arrival, to, choice.next().next(), links);
    }

    /// Appends the minimal path between two routers.
    fn minimal(&self, from: usize, to: usize, choice: Choice, links: &mut Vec<LinkId>) {
        let (group, other) = (from / self.routers, to / self.routers);
        if group == other {
            self.local(from, to, links);
            return;
        }
        let offset = (other + self.groups - group) % self.groups;
        let round = self.round(from, Some(to), offset, choice);
        let [exit, entry] = self.ends(group, round, offset);
        self.local(from, exit, links);
        let global = self.first_of_group(group) + self.routers * (self.routers - 1) + round * (self.groups - 1) + offset - 1;
        links.push(LinkId(global));
        self.local(entry, to, links);
    }

    fn first_of_group(&self, group: usize) -> usize {
        self.first_link + group * (self.routers * (self.routers - 1) + self.rounds * (self.groups - 1))
    }

    fn local(&self, from: usize, to: usize, links: &mut Vec<LinkId>) {
        if from != to {
            let (router, other) = (from % self.routers, to % self.routers);
            let place = other - usize::from(other > router);
            links.push(LinkId(self.first_of_group(from / self.routers) + router * (self.routers - 1) + place));
        }
    }

    /// Number of local hops on a path over the group's global link of this round: to its near end,
    /// and from its far end if `to` is given.
    fn local_hops(&self, from: usize, to: Option<usize>, round: usize, offset: usize) -> usize {
        let [exit, entry] = self.ends(from / self.routers, round, offset);
        usize::from(exit != from) + to.map_or(0, |to| usize::from(entry != to))
    }

    /// Chooses one of the links to a group that need the fewest local hops.
    fn round(&self, from: usize, to: Option<usize>, offset: usize, choice: Choice) -> usize {
        let hops = |round: &usize| self.local_hops(from, to, *round, offset);
        let fewest = (0..self.rounds).map(|round| hops(&round)).min().expect("invariant: each two groups have a link");
        let shortest = || (0..self.rounds).filter(|round| hops(round) == fewest);
        shortest().nth(choice.among(shortest().count())).expect("invariant: a choice is among the shortest")
    }

    pub(super) fn equal_paths(&self, from: End, to: End) -> usize {
        let (from, to) = (self.router(from.node), self.router(to.node));
        let (group, other) = (from / self.routers, to / self.routers);
        if group == other {
            return 1;
        }
        let offset = (other + self.groups - group) % self.groups;
        let hops = |round: usize| self.local_hops(from, Some(to), round, offset);
        let fewest = (0..self.rounds).map(hops).min();
        (0..self.rounds).filter(|&round| Some(hops(round)) == fewest).count()
    }
}
