//! Builds the network of a topology file: fabric, routing and stated routes.

use crate::device::DeviceKind;
use crate::error::{Place, TopologyError, TopologyProblem};
use crate::fabric::{
    CrossRail, DEFAULT_NETWORK_LATENCY, DEFAULT_TORUS_LATENCY, Dimensions, Dragonfly, Fabric, FatTree, LeafSwitches, Network,
    Pods, Routing, StatedRoute, Torus, Transport, Uplinks,
};
use crate::layout::node_name;
use crate::node::{Nics, NodeGroup};
use crate::spec::{NetworkSpec, RouteSpec, ShortOrFull};
use crate::text::{At, Scalar, Scalars};
use crate::topology::NetworkPlaces;
use foretell_units::{BytesPerSecond, suggest};

/// Overlays a network on that of the base, field by field, so that `network: {latency: 2us}` keeps
/// the base's kind. A network of a stated kind replaces the base's.
pub(super) fn over(
    network: At<ShortOrFull<NetworkSpec>>,
    base: Option<At<ShortOrFull<NetworkSpec>>>,
) -> At<ShortOrFull<NetworkSpec>> {
    match (network, base) {
        (
            At { value: ShortOrFull::Full(own @ NetworkSpec { kind: None, .. }), place },
            Some(At { value: ShortOrFull::Full(base), .. }),
        ) => At { value: ShortOrFull::Full(own.with_defaults_from(base)), place },
        (network, _) => network,
    }
}

/// Whether a network of this kind joins devices directly, so that nodes need no link of their own.
pub(super) fn joins_devices(spec: Option<&At<ShortOrFull<NetworkSpec>>>) -> bool {
    match spec.map(|spec| &spec.value) {
        Some(ShortOrFull::Short(kind)) => kind == "torus",
        Some(ShortOrFull::Full(spec)) => spec.kind.as_ref().is_some_and(|kind| kind.value == "torus"),
        None => false,
    }
}

/// Builds the network. Nodes without NICs get one if the network states a rate.
pub(super) fn network(
    spec: Option<&At<ShortOrFull<NetworkSpec>>>,
    groups: &mut [NodeGroup],
    kinds: &[DeviceKind],
    notes: &mut Vec<String>,
) -> Result<(Network, NetworkPlaces), TopologyError> {
    let short;
    let (spec, place) = match spec {
        None => {
            if groups.iter().any(|group| group.nics.is_some()) {
                notes.push(format!("network: taken to be one non-blocking switch with {DEFAULT_NETWORK_LATENCY} of latency"));
            }
            return Ok((Network::plain(Fabric::Switch), NetworkPlaces::default()));
        }
        Some(At { value: ShortOrFull::Full(full), place }) => (full, *place),
        Some(At { value: ShortOrFull::Short(kind), place }) => {
            short = NetworkSpec { kind: Some(At { value: kind.clone(), place: *place }), ..NetworkSpec::default() };
            (&short, *place)
        }
    };
    let Some(kind) = &spec.kind else {
        let hint = "write `kind: switch`, `fat-tree`, `rail-optimised`, `torus`, `dragonfly` or `none`".into();
        return Err(TopologyError::at(place, TopologyProblem::Missing { owner: "`network`".into(), field: "kind", hint }));
    };
    if !Fabric::NAMES.contains(&kind.value.as_str()) {
        let hint = suggest(&kind.value, Fabric::NAMES);
        let problem = TopologyProblem::UnknownName { what: "kind of network", name: kind.value.clone(), hint };
        return Err(TopologyError::at(kind.place, problem));
    }
    refuse_what_it_has_not(spec, &kind.value)?;
    let bandwidth: Option<BytesPerSecond> = spec.bandwidth.as_ref().map(|rate| rate.positive("bandwidth")).transpose()?;
    if kind.value != "torus"
        && let Some(bandwidth) = bandwidth
    {
        for group in groups.iter_mut().filter(|group| group.nics.is_none()) {
            group.nics = Some(Nics { count: 1, bandwidth });
        }
    }
    let assembler = Assembler { spec, kind, place };
    let fabric = match kind.value.as_str() {
        "none" => Fabric::None,
        "fat-tree" => assembler.tree(LeafSwitches::OfNodes)?,
        "rail-optimised" => assembler.tree(LeafSwitches::OfRails(assembler.cross_rail()?))?,
        "torus" => assembler.torus(bandwidth, groups, kinds)?,
        "dragonfly" => assembler.dragonfly(groups, notes)?,
        "switch" => Fabric::Switch,
        other => unreachable!("invariant: no kind of network is called `{other}`"),
    };
    let transport = assembler.transport()?;
    let usual_latency = if matches!(fabric, Fabric::Torus(_)) { DEFAULT_TORUS_LATENCY } else { transport.usual_latency() };
    let latency = spec.latency.as_ref().map_or(Ok(usual_latency), |latency| latency.quantity("latency"))?;
    let routing = assembler.routing(&fabric)?;
    let seed = spec.seed.as_ref().map_or(Ok(0), |seed| seed.whole("seed"))?;
    let (stated, routes) = assembler.stated(routing, groups)?;
    Ok((Network { fabric, transport, latency, routing, seed, stated }, NetworkPlaces { network: place, routes }))
}

/// Refuses fields that this kind of network does not have: a user must not believe that, for
/// example, an oversubscribed switch is modelled.
fn refuse_what_it_has_not(spec: &NetworkSpec, kind: &str) -> Result<(), TopologyError> {
    const TREES: &[&str] = &["fat-tree", "rail-optimised"];
    const DRAGONFLY: &[&str] = &["dragonfly"];
    const CHOOSING: &[&str] = &["fat-tree", "rail-optimised", "torus", "dragonfly"];
    const OF_NODES: &[&str] = &["switch", "fat-tree", "rail-optimised", "dragonfly"];
    const STATING: &[&str] = &["fat-tree", "rail-optimised", "dragonfly"];
    fn place<T>(field: &Option<At<T>>) -> Option<Option<Place>> {
        field.as_ref().map(|field| field.place)
    }
    let fields = [
        ("transport", place(&spec.transport), OF_NODES),
        ("oversubscription", place(&spec.oversubscription), TREES),
        ("nodes_per_leaf", place(&spec.nodes_per_leaf), TREES),
        ("uplinks", place(&spec.uplinks), TREES),
        ("leaves_per_pod", place(&spec.leaves_per_pod), TREES),
        ("cross_rail", place(&spec.cross_rail), &["rail-optimised"]),
        ("dimensions", place(&spec.dimensions), &["torus"]),
        ("wrap_around", place(&spec.wrap_around), &["torus"]),
        ("nodes_per_router", place(&spec.nodes_per_router), DRAGONFLY),
        ("routers_per_group", place(&spec.routers_per_group), DRAGONFLY),
        ("global_links", place(&spec.global_links), DRAGONFLY),
        ("local_bandwidth", place(&spec.local_bandwidth), DRAGONFLY),
        ("global_bandwidth", place(&spec.global_bandwidth), DRAGONFLY),
        ("routing", place(&spec.routing), CHOOSING),
        ("seed", place(&spec.seed), CHOOSING),
        ("routes", place(&spec.routes), STATING),
    ];
    for (field, place, kinds) in fields {
        if let (Some(place), Some(likely), false) = (place, kinds.first(), kinds.contains(&kind)) {
            let what = format!("a `{kind}` network has no `{field}`");
            return Err(TopologyError::invalid(place, what, format!("leave it out, or write `kind: {likely}`")));
        }
    }
    Ok(())
}

/// The inputs of building a network.
struct Assembler<'a> {
    spec: &'a NetworkSpec,
    kind: &'a At<String>,
    place: Option<Place>,
}

impl Assembler<'_> {
    fn tree(&self, leaf_switches: LeafSwitches) -> Result<Fabric, TopologyError> {
        let spec = self.spec;
        let leaves_per_pod = spec.leaves_per_pod.as_ref().map(|leaves| leaves.count("leaves_per_pod")).transpose()?;
        let levels = if leaves_per_pod.is_some() { 2 } else { 1 };
        let factors = self.levels(spec.oversubscription.as_ref(), "oversubscription", levels)?;
        let factor = |level: usize| factors.get(level).map_or(Ok(1.0), |factor| factor.number("oversubscription", 1.0));
        let counts = self.levels(spec.uplinks.as_ref(), "uplinks", levels)?;
        if let (Some(uplinks), true) = (&spec.uplinks, !counts.is_empty() && counts.len() < levels) {
            let what = "a tree with pods has uplinks of leaves and of the switches above them";
            return Err(TopologyError::invalid(uplinks.place, what, "write both, such as `uplinks: [4, 4]`"));
        }
        let count = |level: usize| counts.get(level).map(|count| count.count("uplinks")).transpose();
        let uplinks = |level: usize| Ok::<_, TopologyError>(Uplinks { oversubscription: factor(level)?, count: count(level)? });
        let switches = counts.iter().map(|count| count.count("uplinks")).collect::<Result<Vec<_>, _>>()?;
        let core_switches = switches.into_iter().fold(1, usize::saturating_mul);
        if let Some(uplinks) = spec.uplinks.as_ref().filter(|_| core_switches > MOST_CORE_SWITCHES) {
            let what = format!("`uplinks` lead to {core_switches} switches at the top of the tree");
            return Err(TopologyError::invalid(uplinks.place, what, format!("write {MOST_CORE_SWITCHES} at most")));
        }
        Ok(Fabric::FatTree(FatTree {
            leaf_switches,
            nodes_per_leaf: spec.nodes_per_leaf.as_ref().map(|nodes| nodes.count("nodes_per_leaf")).transpose()?,
            uplinks: uplinks(0)?,
            pods: leaves_per_pod.map(|leaves| Ok::<_, TopologyError>(Pods { leaves, uplinks: uplinks(1)? })).transpose()?,
        }))
    }

    /// Values per level, lowest level first. Higher levels may be left to their default.
    fn levels(&self, values: Option<&At<Scalars>>, field: &str, levels: usize) -> Result<Vec<At<Scalar>>, TopologyError> {
        let Some(values) = values else { return Ok(Vec::new()) };
        let each = values.each();
        if each.is_empty() || each.len() > levels {
            let what = format!("`{field}` has {} values, and the tree {levels} level{} of uplinks", each.len(), plural(levels));
            let hint = if levels == 1 {
                "write one number, or add `leaves_per_pod` for a third level of switches"
            } else {
                "write two numbers"
            };
            return Err(TopologyError::invalid(values.place, what, hint));
        }
        Ok(each)
    }

    fn cross_rail(&self) -> Result<CrossRail, TopologyError> {
        let Some(name) = &self.spec.cross_rail else { return Ok(CrossRail::Spine) };
        let known = [CrossRail::Spine, CrossRail::Forward];
        known.into_iter().find(|known| known.name() == name.value).ok_or_else(|| {
            let hint = suggest(&name.value, known.map(CrossRail::name));
            let problem = TopologyProblem::UnknownName { what: "way between rails", name: name.value.clone(), hint };
            TopologyError::at(name.place, problem)
        })
    }

    fn transport(&self) -> Result<Transport, TopologyError> {
        let Some(name) = &self.spec.transport else { return Ok(Transport::default()) };
        Transport::ALL.into_iter().find(|transport| transport.name() == name.value).ok_or_else(|| {
            let hint = suggest(&name.value, Transport::ALL.map(Transport::name));
            TopologyError::at(name.place, TopologyProblem::UnknownName { what: "transport", name: name.value.clone(), hint })
        })
    }

    fn torus(
        &self,
        bandwidth: Option<BytesPerSecond>,
        groups: &[NodeGroup],
        kinds: &[DeviceKind],
    ) -> Result<Fabric, TopologyError> {
        let missing = |field, hint: String| {
            let problem = TopologyProblem::Missing { owner: "the torus".into(), field, hint };
            Err(TopologyError::at(self.place, problem))
        };
        let Some(written) = &self.spec.dimensions else {
            let hint = "write how long it is in each, such as `dimensions: [4, 4, 4]`, or only how many there are";
            return missing("dimensions", hint.into());
        };
        let sizes = written.each().iter().map(|size| size.count("dimensions")).collect::<Result<Vec<_>, _>>()?;
        let is_list = matches!(written.value, Scalars::List(_));
        let count = if is_list { sizes.len() } else { sizes[0] };
        if !(1..=MOST_DIMENSIONS).contains(&count) {
            let what = format!("a torus has between one and {MOST_DIMENSIONS} dimensions");
            return Err(TopologyError::invalid(written.place, what, "write their sizes, such as `dimensions: [4, 4, 4]`"));
        }
        let dimensions = if is_list { Dimensions::Sizes(sizes) } else { Dimensions::Count(count) };
        for group in groups {
            // Refused because these fields have no effect here.
            let other = if group.nics.is_some() { Some("nics") } else { group.link.map(|_| "link") };
            if let Some(field) = other {
                let what = format!("node `{}` has `{field}`, which nothing crosses where a torus joins the devices", group.name);
                return Err(TopologyError::invalid(
                    self.kind.place,
                    what,
                    "leave it out: the `bandwidth` of `network` is that of a link",
                ));
            }
        }
        // A device's total link rate, divided over its two links in each dimension.
        let own = || groups.first().and_then(|group| kinds.get(group.kind)?.link).map(|link| link / (2 * count) as f64);
        let Some(bandwidth) = bandwidth.or_else(own) else {
            return missing("bandwidth", "say what one link carries, one way, such as `bandwidth: 50GB/s`".into());
        };
        let wraps_around = self.spec.wrap_around.as_ref().is_none_or(|wraps| wraps.value);
        Ok(Fabric::Torus(Torus { dimensions, bandwidth, wraps_around }))
    }

    fn dragonfly(&self, groups: &[NodeGroup], notes: &mut Vec<String>) -> Result<Fabric, TopologyError> {
        let spec = self.spec;
        let count = |value: &Option<At<Scalar>>, field: &'static str| match value {
            Some(value) => value.count(field),
            None => {
                let hint = "write `nodes_per_router`, `routers_per_group` and `global_links`".into();
                let problem = TopologyProblem::Missing { owner: "the dragonfly".into(), field, hint };
                Err(TopologyError::at(self.place, problem))
            }
        };
        let mut rate = |value: &Option<At<Scalar>>, field: &'static str| match (value, groups.iter().find_map(|group| group.nics))
        {
            (Some(value), _) => value.positive(field),
            (None, Some(nics)) => {
                notes.push(format!("network: `{field}` taken to be {}, as a NIC carries", nics.bandwidth));
                Ok(nics.bandwidth)
            }
            (None, None) => {
                let hint = format!("say what such a link carries, one way, as in `{field}: 200Gbit/s`");
                Err(TopologyError::at(self.place, TopologyProblem::Missing { owner: "the dragonfly".into(), field, hint }))
            }
        };
        Ok(Fabric::Dragonfly(Dragonfly {
            local_bandwidth: rate(&spec.local_bandwidth, "local_bandwidth")?,
            global_bandwidth: rate(&spec.global_bandwidth, "global_bandwidth")?,
            nodes_per_router: count(&spec.nodes_per_router, "nodes_per_router")?,
            routers_per_group: count(&spec.routers_per_group, "routers_per_group")?,
            global_links: count(&spec.global_links, "global_links")?,
        }))
    }

    /// Returns the stated routing, or the fabric's default: by hash if the file states the number
    /// of equal paths.
    fn routing(&self, fabric: &Fabric) -> Result<Routing, TopologyError> {
        let known: &[Routing] = match fabric {
            Fabric::None | Fabric::Switch => return Ok(Routing::Spread),
            Fabric::FatTree(FatTree { uplinks: Uplinks { count: Some(_), .. }, .. }) => &[Routing::Ecmp, Routing::Spread],
            Fabric::FatTree(_) => &[Routing::Spread],
            Fabric::Torus(_) => &[Routing::DimensionOrder, Routing::Ecmp],
            Fabric::Dragonfly(_) => &[Routing::Minimal, Routing::Valiant],
        };
        let Some(written) = &self.spec.routing else { return Ok(known[0]) };
        if let Some(&found) = known.iter().find(|routing| routing.name() == written.value) {
            return Ok(found);
        }
        if written.value == Routing::Ecmp.name() && matches!(fabric, Fabric::FatTree(_)) {
            let what = "`ecmp` chooses among the uplinks of a switch, and the file does not say how many there are";
            return Err(TopologyError::invalid(written.place, what, "add `uplinks`, such as `uplinks: 4`"));
        }
        let hint = suggest(&written.value, known.iter().map(|routing| routing.name()));
        let what = if Routing::ALL.iter().any(|routing| routing.name() == written.value) {
            "routing of this network"
        } else {
            "routing"
        };
        Err(TopologyError::at(written.place, TopologyProblem::UnknownName { what, name: written.value.clone(), hint }))
    }

    /// Returns the stated routes and their places in the file. Whether these paths exist is checked
    /// later, when links are numbered.
    fn stated(&self, routing: Routing, groups: &[NodeGroup]) -> Result<(Vec<StatedRoute>, Vec<Option<Place>>), TopologyError> {
        let Some(routes) = &self.spec.routes else { return Ok((Vec::new(), Vec::new())) };
        if !matches!(routing, Routing::Ecmp | Routing::Minimal) {
            let what = format!("`routes` are stated, but with `{}` routing a flow has no path of its own", routing.name());
            return Err(TopologyError::invalid(routes.place, what, "leave them out, or add `uplinks` to a tree"));
        }
        let node = |name: &At<String>| {
            number_of(&name.value, groups).ok_or_else(|| {
                let hint = "nodes are called as their group, numbered from 0 where it has several, such as `node-0`".into();
                TopologyError::at(name.place, TopologyProblem::UnknownName { what: "node", name: name.value.clone(), hint })
            })
        };
        let route = |route: &At<RouteSpec>| {
            let RouteSpec { from, to, path } = &route.value;
            let path = usize::try_from(path.whole("path")?).unwrap_or(usize::MAX);
            Ok::<_, TopologyError>(StatedRoute { from: node(from)?, to: node(to)?, path })
        };
        let stated = routes.value.iter().map(route).collect::<Result<Vec<_>, _>>()?;
        for (number, route) in stated.iter().enumerate() {
            if stated[..number].iter().any(|other| (other.from, other.to) == (route.from, route.to)) {
                let what = "two routes are stated from one node to the same other";
                return Err(TopologyError::invalid(routes.value[number].place, what, "keep one of the two"));
            }
        }
        Ok((stated, routes.value.iter().map(|route| route.place).collect()))
    }
}

/// Largest number of dimensions of a torus, as in the largest machines (Fugaku's Tofu has 6).
const MOST_DIMENSIONS: usize = 6;

/// Largest number of switches at the top of a tree: a three-level tree of 256-port switches has a
/// quarter of 256 squared.
const MOST_CORE_SWITCHES: usize = 1 << 14;

/// Returns the index of the node called `name`.
fn number_of(name: &str, groups: &[NodeGroup]) -> Option<usize> {
    let mut first = 0;
    for group in groups {
        let number = if group.count == 1 { Some(0) } else { name.rsplit_once('-').and_then(|(_, number)| number.parse().ok()) };
        if let Some(number) = number.filter(|&number| number < group.count && node_name(group, number) == name) {
            return Some(first + number);
        }
        first += group.count;
    }
    None
}

fn plural(count: usize) -> &'static str {
    if count == 1 { "" } else { "s" }
}
