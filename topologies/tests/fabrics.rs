//! Fabrics: routes end where they should, use as few links as possible, and carry the stated rates.
#![allow(clippy::unwrap_used, clippy::panic)]

use foretell_topologies::{DeviceId, Junction, LinkClass, Topology};
use foretell_units::diagnostic::one_line;
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

fn cluster(nodes: &str, network: &str) -> Topology {
    let text = format!("name: c\nnodes:\n  - {nodes}\nnetwork: {network}\n");
    Topology::from_yaml(&text, "c.yaml").unwrap_or_else(|error| panic!("{error}\n{text}"))
}

fn names(topology: &Topology, from: usize, to: usize) -> Vec<String> {
    let route = topology.route(DeviceId(from), DeviceId(to)).unwrap();
    route.links.iter().map(|link| topology.links()[link.0].name.clone()).collect()
}

/// Junctions at which a device's data may enter the links: the device, or where NICs read its
/// memory.
fn places(topology: &Topology, device: DeviceId) -> BTreeSet<Junction> {
    BTreeSet::from([Junction::Device(device.0), Junction::Node(topology.node_of(device).0)])
}

/// Asserts that a route is connected, repeats no link, and has the right ends.
fn is_a_way(topology: &Topology, from: DeviceId, to: DeviceId) -> Result<Vec<usize>, TestCaseError> {
    let route = topology.route(from, to).unwrap();
    let links: Vec<usize> = route.links.iter().map(|link| link.0).collect();
    let text = names(topology, from.0, to.0).join(" ");
    if from == to {
        prop_assert!(links.is_empty());
        return Ok(links);
    }
    let (first, last) = (&topology.links()[links[0]], &topology.links()[links[links.len() - 1]]);
    prop_assert!(places(topology, from).contains(&first.from), "{from:?} -> {to:?} begins elsewhere: {text}");
    prop_assert!(places(topology, to).contains(&last.to), "{from:?} -> {to:?} ends elsewhere: {text}");
    for pair in links.windows(2) {
        let (one, next) = (&topology.links()[pair[0]], &topology.links()[pair[1]]);
        // Data forwarded inside the node is read by the other device's NIC.
        let is_read = |device| next.class == LinkClass::Nic && places(topology, DeviceId(device)).contains(&next.from);
        let goes_on = one.to == next.from || matches!(one.to, Junction::Device(device) if is_read(device));
        prop_assert!(goes_on, "{from:?} -> {to:?} is broken: {text}");
    }
    prop_assert!(links.iter().collect::<BTreeSet<_>>().len() == links.len(), "a link repeats: {text}");
    Ok(links)
}

/// Least number of links between two sets of junctions, by breadth-first search over all links.
fn fewest_links(topology: &Topology, from: &BTreeSet<Junction>, to: &BTreeSet<Junction>) -> usize {
    let mut next: BTreeMap<Junction, Vec<Junction>> = BTreeMap::new();
    for link in topology.links() {
        next.entry(link.from).or_default().push(link.to);
    }
    let mut seen: BTreeMap<Junction, usize> = from.iter().map(|&junction| (junction, 0)).collect();
    let mut queue: VecDeque<Junction> = from.iter().copied().collect();
    while let Some(at) = queue.pop_front() {
        if to.contains(&at) {
            return seen[&at];
        }
        for &other in next.get(&at).into_iter().flatten() {
            if !seen.contains_key(&other) {
                seen.insert(other, seen[&at] + 1);
                queue.push_back(other);
            }
        }
    }
    usize::MAX
}

const HOST: &str = "devices: {kind: cpu-core}, nics: {bandwidth: 10Gbit/s}";

#[derive(Debug, Clone)]
struct Case {
    nodes: String,
    network: String,
    /// Whether every route must have the least number of links.
    is_shortest: bool,
}

fn trees() -> impl Strategy<Value = Case> {
    let level = (1usize..5, prop_oneof![Just(1.0), Just(2.0), Just(3.5)]);
    (1usize..40, 1usize..6, proptest::option::of(1usize..4), level.clone(), level, any::<u8>(), any::<bool>()).prop_map(
        |(nodes, per_leaf, pod, (up, over), (pod_up, pod_over), seed, is_spread)| {
            let routing = if is_spread { "spread" } else { "ecmp" };
            let levels = match pod {
                Some(leaves) => {
                    format!("leaves_per_pod: {leaves}, uplinks: [{up}, {pod_up}], oversubscription: [{over}, {pod_over}]")
                }
                None => format!("uplinks: {up}, oversubscription: {over}"),
            };
            let network = format!("{{kind: fat-tree, nodes_per_leaf: {per_leaf}, {levels}, seed: {seed}, routing: {routing}}}");
            Case { nodes: format!("{{name: n, count: {nodes}, {HOST}}}"), network, is_shortest: true }
        },
    )
}

fn rails() -> impl Strategy<Value = Case> {
    (1usize..10, 1usize..5, 1usize..5, 1usize..4, any::<u8>(), any::<bool>()).prop_map(
        |(nodes, devices, per_leaf, uplinks, seed, forwards)| {
            let cross = if forwards { "forward" } else { "spine" };
            let network = format!(
                "{{kind: rail-optimised, nodes_per_leaf: {per_leaf}, uplinks: {uplinks}, seed: {seed}, cross_rail: {cross}}}"
            );
            let node = format!(
                "{{name: n, count: {nodes}, devices: {{kind: a100-sxm-80g, count: {devices}}}, nics: {{count: {devices}, bandwidth: 100Gbit/s}}}}"
            );
            // Every NIC of a node is equally near, but a device uses its own.
            Case { nodes: node, network, is_shortest: false }
        },
    )
}

fn tori() -> impl Strategy<Value = Case> {
    (proptest::collection::vec(1usize..6, 1..4), any::<bool>(), any::<bool>(), any::<u8>()).prop_map(
        |(sizes, wraps, is_ecmp, seed)| {
            let routing = if is_ecmp { "ecmp" } else { "dimension-order" };
            let count: usize = sizes.iter().product();
            let network =
                format!("{{kind: torus, dimensions: {sizes:?}, wrap_around: {wraps}, routing: {routing}, seed: {seed}}}");
            Case { nodes: format!("{{name: n, count: {count}, devices: {{kind: tpu-v4}}}}"), network, is_shortest: true }
        },
    )
}

fn dragonflies() -> impl Strategy<Value = Case> {
    (1usize..4, 1usize..5, 1usize..4, 1usize..50, any::<bool>(), any::<u8>()).prop_map(
        |(per_router, routers, global, nodes, is_valiant, seed)| {
            // The most nodes that so few global links allow.
            let nodes = nodes.min((routers * global + 1) * per_router * routers);
            let routing = if is_valiant { "valiant" } else { "minimal" };
            let network = format!(
                "{{kind: dragonfly, nodes_per_router: {per_router}, routers_per_group: {routers}, global_links: {global}, \
                 routing: {routing}, seed: {seed}}}"
            );
            // The shortest path may cross a third group; minimal routing never does.
            Case { nodes: format!("{{name: n, count: {nodes}, {HOST}}}"), network, is_shortest: false }
        },
    )
}

fn pcie() -> impl Strategy<Value = Case> {
    (1usize..4, 1usize..9, 1usize..4, proptest::option::of(1usize..3), 1usize..9).prop_map(
        |(nodes, devices, per_switch, sockets, nics)| {
            let sockets = sockets.map_or(String::new(), |count| format!(", switches_per_socket: {count}, socket_link: 50GB/s"));
            let node = format!(
                "{{name: n, count: {nodes}, devices: {{kind: l40s, count: {devices}}}, link: {{kind: pcie, devices_per_switch: {per_switch}{sockets}}}, \
                 nics: {{count: {nics}, bandwidth: 100Gbit/s}}}}"
            );
            Case { nodes: node, network: "switch".into(), is_shortest: false }
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn every_pair_has_a_route_from_link_to_link(case in prop_oneof![trees(), rails(), tori(), dragonflies(), pcie()]) {
        let topology = cluster(&case.nodes, &case.network);
        prop_assert_eq!(&topology, &Topology::from_yaml(&serde_json::to_string(&topology).unwrap(), "again").unwrap());
        for from in topology.devices() {
            for to in topology.devices() {
                let links = is_a_way(&topology, from, to)?;
                prop_assert!(topology.equal_paths(from, to) > 0);
                if case.is_shortest && from != to {
                    let fewest = fewest_links(&topology, &places(&topology, from), &places(&topology, to));
                    prop_assert_eq!(links.len(), fewest, "{:?}", names(&topology, from.0, to.0));
                }
            }
        }
    }

    /// Equal paths all differ, can all be stated, and are all taken under some seed.
    #[test]
    fn equal_paths_counts_the_paths_that_hashes_reach(case in trees(), ends in (0usize..40, 0usize..40)) {
        let topology = cluster(&case.nodes, &case.network);
        let [from, to] = [ends.0, ends.1].map(|end| DeviceId(end % topology.device_count()));
        let paths = topology.equal_paths(from, to) as usize;
        if from == to || topology.node_count() < 2 || case.network.contains("spread") {
            return Ok(());
        }
        let network = case.network.trim_end_matches('}');
        let mut seen = BTreeSet::new();
        for path in 0..paths {
            if paths > 1 {
                let stated = format!("{network}, routes: [{{from: n-{}, to: n-{}, path: {path}}}]}}", from.0, to.0);
                let stated = cluster(&case.nodes, &stated);
                seen.insert(is_a_way(&stated, from, to)?);
                let reads_back = Topology::from_yaml(&serde_json::to_string(&stated).unwrap(), "again").unwrap();
                prop_assert_eq!(reads_back, stated);
            } else {
                seen.insert(is_a_way(&topology, from, to)?);
            }
        }
        prop_assert_eq!(seen.len(), paths);
        let network = network.rsplit_once("seed:").unwrap().0;
        let taken = |seed: usize| is_a_way(&cluster(&case.nodes, &format!("{network} seed: {seed}}}")), from, to);
        let mut by_hash = BTreeSet::new();
        for seed in 0..paths * 12 {
            by_hash.insert(taken(seed)?);
        }
        prop_assert_eq!(by_hash, seen);
    }

    /// In a torus hashes choose exactly the shortest paths, about equally often.
    #[test]
    fn a_torus_chooses_among_all_shortest_ways(sizes in proptest::collection::vec(2usize..5, 1..4), ends in (0usize..64, 0usize..64)) {
        let count: usize = sizes.iter().product();
        let nodes = format!("{{name: n, count: {count}, devices: {{kind: tpu-v4}}}}");
        let [from, to] = [ends.0 % count, ends.1 % count].map(DeviceId);
        let at = |seed: usize| cluster(&nodes, &format!("{{kind: torus, dimensions: {sizes:?}, routing: ecmp, seed: {seed}}}"));
        let paths = at(0).equal_paths(from, to) as usize;
        prop_assume!(from != to && paths <= 24);
        let mut taken: BTreeMap<Vec<usize>, usize> = BTreeMap::new();
        for seed in 0..paths * 40 {
            *taken.entry(is_a_way(&at(seed), from, to)?).or_default() += 1;
        }
        prop_assert_eq!(taken.len(), paths);
        prop_assert!(taken.values().all(|&count| (10..=90).contains(&count)), "{:?}", taken.values());
    }

    /// Traffic out of a leaf, and out of a pod, is limited by the rate of its nodes over the
    /// oversubscription.
    #[test]
    fn a_bisection_carries_what_the_oversubscription_says(
        (pods, leaves, per_leaf) in (2usize..4, 1usize..4, 1usize..5),
        (up, pod_up) in (1usize..5, 1usize..5),
        (over, pod_over) in (1.0f64..4.0, 1.0f64..4.0),
        routing in prop_oneof![Just("spread"), Just("ecmp")],
    ) {
        let nodes = format!("{{name: n, count: {}, {HOST}}}", pods * leaves * per_leaf);
        let topology = cluster(&nodes, &format!(
            "{{kind: fat-tree, nodes_per_leaf: {per_leaf}, leaves_per_pod: {leaves}, uplinks: [{up}, {pod_up}], \
             oversubscription: [{over}, {pod_over}], routing: {routing}}}"
        ));
        let of = |prefix: &str, way: &str| -> f64 {
            let links = topology.links().iter().filter(|link| link.name.starts_with(prefix) && link.name.contains(way));
            links.map(|link| link.bandwidth.value()).sum()
        };
        for pod in 0..pods {
            for way in ["/up", "/down"] {
                let sent = 1.25e9 * (leaves * per_leaf) as f64;
                let share = of(&format!("pod-{pod}/"), way) * over * pod_over / sent;
                prop_assert!((share - 1.0).abs() < 1e-12);
            }
        }
        for leaf in 0..pods * leaves {
            for way in ["/up", "/down"] {
                let sent = 1.25e9 * per_leaf as f64;
                let share = of(&format!("leaf-{leaf}/"), way) * over / sent;
                prop_assert!((share - 1.0).abs() < 1e-12);
            }
        }
    }
}

#[test]
fn rails_meet_in_their_leaf_and_cross_as_stated() {
    let nodes = "{name: n, count: 4, devices: {kind: a100-sxm-80g, count: 2}, nics: {count: 2, bandwidth: 100Gbit/s}}";
    let by = |cross: &str| cluster(nodes, &format!("{{kind: rail-optimised, nodes_per_leaf: 2, cross_rail: {cross}}}"));
    assert_eq!(names(&by("spine"), 1, 3), ["n-0/nic-1/egress", "n-1/nic-1/ingress"]);
    assert_eq!(names(&by("spine"), 0, 3), ["n-0/nic-0/egress", "leaf-0/up", "leaf-1/down", "n-1/nic-1/ingress"]);
    let forwarded = ["n-0/device-0/egress", "n-0/device-1/ingress", "n-0/nic-1/egress", "n-1/nic-1/ingress"];
    assert_eq!(names(&by("forward"), 0, 3), forwarded);
    assert_eq!(names(&by("spine"), 1, 5), ["n-0/nic-1/egress", "leaf-1/up", "leaf-3/down", "n-2/nic-1/ingress"]);
}

#[test]
fn pcie_routes_use_the_lowest_common_switch() {
    let server = Topology::library("pcie-l40s").unwrap().with_nodes(2).unwrap();
    assert_eq!(names(&server, 0, 3), ["server-0/device-0/egress", "server-0/device-3/ingress"]);
    let across = [
        "server-0/device-0/egress",
        "server-0/pcie-switch-0/up",
        "server-0/socket-0/egress",
        "server-0/socket-1/ingress",
        "server-0/pcie-switch-1/down",
        "server-0/device-7/ingress",
    ];
    assert_eq!(names(&server, 0, 7), across);
    let out = ["server-0/device-5/egress", "server-0/nic-1/egress", "server-1/nic-0/ingress", "server-1/device-0/ingress"];
    assert_eq!(names(&server, 5, 8), out);
    // One NIC serves both switches, so the second switch's traffic crosses the first.
    let nodes = "{name: s, count: 2, devices: {kind: l40s, count: 4}, link: {kind: pcie, devices_per_switch: 2}, nics: {bandwidth: 25Gbit/s}}";
    let one = ["s-0/device-3/egress", "s-0/pcie-switch-1/up", "s-0/pcie-switch-0/down", "s-0/nic-0/egress"];
    assert_eq!(names(&cluster(nodes, "switch"), 3, 4)[..4], one);
}

#[test]
fn torus_routes_take_the_shorter_direction() {
    let ring = cluster("{name: n, count: 5, devices: {kind: tpu-v4}}", "{kind: torus, dimensions: 1, bandwidth: 50GB/s}");
    assert_eq!(names(&ring, 0, 4), ["dimension-0/device-0/to-4"]);
    assert_eq!(names(&ring, 4, 1), ["dimension-0/device-4/to-0", "dimension-0/device-0/to-1"]);
    let open = cluster("{name: n, count: 5, devices: {kind: tpu-v4}}", "{kind: torus, dimensions: [5], wrap_around: false}");
    assert_eq!(names(&open, 0, 4).len(), 4);
    let cube = Topology::library("tpu-v4").unwrap();
    assert_eq!((cube.device_count(), cube.links().len()), (64, 64 * 6));
    assert_eq!(names(&cube, 0, 1 + 4 + 16).len(), 3);
    // A device's six links share its kind's total link rate.
    assert!(cube.links().iter().all(|link| link.bandwidth.value() == 50e9));
}

#[test]
fn a_dragonfly_joins_all_pairs_of_groups_equally() {
    let topology = Topology::library("dragonfly-a100").unwrap().with_nodes(5 * 64).unwrap();
    let mut between: BTreeMap<(usize, usize), usize> = BTreeMap::new();
    for link in topology.links() {
        if let (Junction::Switch(from), Junction::Switch(to)) = (link.from, link.to) {
            let (from, to) = (from / 8, to / 8);
            if from != to {
                *between.entry((from, to)).or_default() += 1;
            }
        }
    }
    assert_eq!(between.len(), 5 * 4);
    assert!(between.values().all(|&links| links == 16), "{between:?}");
    // At most one hop in each group and one between them; twice that through a third group.
    let most = |routing: &str| {
        let text = format!("{{base: dragonfly-a100, nodes: 4160, network: {{routing: {routing}}}}}");
        let topology = Topology::from_yaml(&text, "d.yaml").unwrap();
        let far = (0..400).map(|node| names(&topology, 0, 4 * (64 + 9 * node)).len() - 2);
        far.max().unwrap()
    };
    assert_eq!((most("minimal"), most("valiant")), (3, 5));
}

#[test]
fn a_hundred_thousand_devices_need_no_route_table() {
    for (base, nodes) in [("dgx-h100-rails", 12_500), ("dragonfly-a100", 4_096), ("tpu-v4", 25_000), ("fat-tree-1024", 100_000)] {
        let topology = Topology::library(base).unwrap().with_nodes(nodes).unwrap();
        let last = DeviceId(topology.device_count() - 1);
        for from in (0..topology.device_count()).step_by(997).map(DeviceId) {
            is_a_way(&topology, from, last).unwrap();
        }
        assert!(topology.links().len() < 8 * topology.device_count(), "{base}: {} links", topology.links().len());
    }
}

#[test]
fn errors_in_a_network_name_their_place_and_a_hint() {
    let hosts = "nodes:\n  - {name: n, count: 8, devices: {kind: cpu-core}, nics: {bandwidth: 10Gbit/s}}\n";
    let chips = "nodes:\n  - {name: n, count: 8, devices: {kind: tpu-v4}}\n";
    let cards = "nodes:\n  - {name: n, devices: {kind: l40s, count: 8}, link: {kind: pcie, LINK}}\n";
    let network = |nodes: &str, network: &str| format!("{nodes}network: {network}\n");
    let link = |fields: &str| cards.replace("LINK", fields);
    let cases = [
        (
            network(hosts, "{kind: fat-tree, routing: ecmp}"),
            "c.yaml:3:36: `ecmp` chooses among the uplinks of a switch, and the file does not say how many there are; hint: add \
             `uplinks`, such as `uplinks: 4`",
        ),
        (
            network(hosts, "{kind: fat-tree, uplinks: 2, routing: valiant}"),
            "c.yaml:3:48: unknown routing of this network `valiant`; hint: there are `ecmp`, `spread`",
        ),
        (
            network(hosts, "{kind: fat-tree, oversubscription: [1, 2]}"),
            "c.yaml:3:45: `oversubscription` has 2 values, and the tree 1 level of uplinks; hint: write one number, or add \
             `leaves_per_pod` for a third level of switches",
        ),
        (
            network(hosts, "{kind: fat-tree, leaves_per_pod: 2, uplinks: 4}"),
            "c.yaml:3:55: a tree with pods has uplinks of leaves and of the switches above them; hint: write both, such as \
             `uplinks: [4, 4]`",
        ),
        (
            network(hosts, "{kind: fat-tree, leaves_per_pod: 2, oversubscription: [2, 0.5]}"),
            "c.yaml:3:68: `oversubscription` is `0.5`; hint: write a plain number, at least 1",
        ),
        (
            network(hosts, "{kind: fat-tree, nodes_per_leaf: 2, uplinks: 2, routes: [{from: n-0, to: n-9, path: 0}]}"),
            "c.yaml:3:83: unknown node `n-9`; hint: nodes are called as their group, numbered from 0 where it has several, such as \
             `node-0`",
        ),
        (
            network(hosts, "{kind: fat-tree, nodes_per_leaf: 2, uplinks: 2, routes: [{from: n-0, to: n-7, path: 2}]}"),
            "c.yaml:3:67: there is no path 2 from `n-0` to `n-7`; hint: the paths are numbered from 0 to 1",
        ),
        (
            network(hosts, "{kind: fat-tree, nodes_per_leaf: 2, routes: [{from: n-0, to: n-7, path: 0}]}"),
            "c.yaml:3:54: `routes` are stated, but with `spread` routing a flow has no path of its own; hint: leave them out, or add \
             `uplinks` to a tree",
        ),
        (
            network(hosts, "{kind: rail-optimised, cross_rail: pxn}"),
            "c.yaml:3:45: unknown way between rails `pxn`; hint: there are `spine`, `forward`",
        ),
        (
            network(hosts, "{kind: torus, dimensions: [2, 4], bandwidth: 1GB/s}"),
            "c.yaml:3:17: node `n` has `nics`, which nothing crosses where a torus joins the devices; hint: leave it out: the \
             `bandwidth` of `network` is that of a link",
        ),
        (
            network(chips, "{kind: torus, dimensions: [2, 3]}"),
            "c.yaml:3:10: a torus of 2 x 3 does not hold 8 devices; hint: write `dimensions` whose product is 8, or only how many \
             there are, such as `dimensions: 2`",
        ),
        (
            network(chips, "{kind: torus}"),
            "c.yaml:3:10: the torus does not state `dimensions`; hint: write how long it is in each, such as `dimensions: [4, 4, 4]`, or only \
             how many there are",
        ),
        (
            network(chips, "{kind: torus, dimensions: 9}"),
            "c.yaml:3:36: a torus has between one and 6 dimensions; hint: write their sizes, such as `dimensions: [4, 4, 4]`",
        ),
        (
            network(chips, "{kind: torus, dimensions: 3, wrap_around: 2}"),
            "c.yaml:3:52: this is neither yes nor no; hint: write `true` or `false`",
        ),
        (
            network(hosts, "{kind: dragonfly, nodes_per_router: 1, routers_per_group: 1}"),
            "c.yaml:3:10: the dragonfly does not state `global_links`; hint: write `nodes_per_router`, `routers_per_group` and `global_links`",
        ),
        (
            network(hosts, "{kind: dragonfly, nodes_per_router: 1, routers_per_group: 2, global_links: 1}"),
            "c.yaml:3:10: a dragonfly of 4 groups needs 3 global links a group, and it has 2; hint: raise `global_links`, \
             `routers_per_group` or `nodes_per_router`",
        ),
        (
            network(hosts, "{kind: switch, seed: 3}"),
            "c.yaml:3:31: a `switch` network has no `seed`; hint: leave it out, or write `kind: fat-tree`",
        ),
        (
            link("uplink: 20GB/s"),
            "c.yaml:2:75: `uplink` is of PCIe switches, and none are described; hint: say `devices_per_switch`",
        ),
        (
            link("devices_per_switch: 4, switches_per_socket: 1"),
            "c.yaml:2:111: sockets need a `socket_link`; hint: say what one sends to the others, one way",
        ),
        (
            link("devices_per_switch: 4").replace("pcie", "nvlink-mesh").replace("mesh, ", "mesh, bandwidth: 1GB/s, "),
            "c.yaml:2:112: a `nvlink-mesh` link has no `devices_per_switch`; hint: leave it out, or write `kind: pcie`",
        ),
    ];
    for (text, expected) in cases {
        assert_eq!(one_line(&Topology::from_yaml(&text, "c.yaml").unwrap_err()), expected, "{text}");
    }
    // A number of nodes that contradicts the stated torus or routes.
    let torus = Topology::from_yaml(&network(chips, "{kind: torus, dimensions: [2, 4]}"), "c.yaml").unwrap();
    assert!(one_line(&torus.with_nodes(9).unwrap_err()).starts_with("a torus of 2 x 4 does not hold 9 devices"));
    let stated = network(hosts, "{kind: fat-tree, nodes_per_leaf: 2, uplinks: 2, routes: [{from: n-0, to: n-7, path: 1}]}");
    let error = one_line(&Topology::from_yaml(&stated, "c.yaml").unwrap().with_nodes(4).unwrap_err());
    assert_eq!(error, "a route is stated for node 7, and there are 4 nodes; hint: leave it out, or name another node");
}

#[test]
fn node_groups_can_be_rotated() {
    let nodes = "{name: a, count: 2, devices: {kind: a100-sxm-80g, count: 2}, link: nvswitch-300GB/s, nics: {count: 1, bandwidth: 100Gbit/s}}\n  \
        - {name: b, count: 4, devices: {kind: h100-sxm-80g, count: 4}, link: nvswitch-450GB/s, nics: {count: 4, bandwidth: 400Gbit/s}}";
    for network in ["{kind: switch}", "{kind: fat-tree, nodes_per_leaf: 2, uplinks: 1}"] {
        let usual = cluster(nodes, network);
        let turned = usual.clone().beginning_with("b").unwrap();
        assert_eq!(usual.clone().beginning_with("a").unwrap(), usual);
        assert_eq!((turned.node_name(turned.node_of(DeviceId(0))), turned.device_count()), ("b-0".into(), 20));
        // The route between two devices stays the same.
        let was = |device: usize| DeviceId((device + 4) % 20);
        for (from, to) in (0..20).flat_map(|from| (0..20).map(move |to| (from, to))) {
            let of = |topology: &Topology, from: DeviceId, to: DeviceId| -> Vec<(LinkClass, f64)> {
                let route = topology.route(from, to).unwrap();
                route
                    .links
                    .iter()
                    .map(|link| &topology.links()[link.0])
                    .map(|link| (link.class, link.bandwidth.value()))
                    .collect()
            };
            assert_eq!(of(&turned, DeviceId(from), DeviceId(to)), of(&usual, was(from), was(to)), "{network} {from} {to}");
            assert_eq!(turned.device_kind(DeviceId(from)).name, usual.device_kind(was(from)).name);
        }
    }
    for (network, group, words) in [
        ("{kind: switch}", "c", "`c` has no kind of node called `c`; hint: there are `a`, `b`"),
        ("{kind: fat-tree, nodes_per_leaf: 3, uplinks: 1}", "b", "the nodes of `c` have their places in its network"),
    ] {
        let error = one_line(&cluster(nodes, network).beginning_with(group).unwrap_err());
        assert!(error.contains(words), "{error}");
    }
}
