//! Routes: which one-way links data crosses between two devices.
#![allow(clippy::unwrap_used)]

use foretell_topologies::{DeviceId, Route, Topology};
use foretell_units::diagnostic::one_line;
use foretell_units::{BytesPerSecond, Seconds};

fn cluster(nodes: &str, network: &str) -> Topology {
    Topology::from_yaml(&format!("name: c\nnodes:\n{nodes}\nnetwork: {network}\n"), "c.yaml").unwrap()
}

fn route(topology: &Topology, from: usize, to: usize) -> Route {
    topology.route(DeviceId(from), DeviceId(to)).unwrap()
}

fn names(topology: &Topology, from: usize, to: usize) -> Vec<String> {
    route(topology, from, to).links.iter().map(|link| topology.links()[link.0].name.clone()).collect()
}

fn close(left: Seconds, right: &str) {
    let right: Seconds = right.parse().unwrap();
    assert!((left.value() - right.value()).abs() < 1e-15, "{left} is not {right}");
}

#[test]
fn a_route_within_a_node_uses_two_ports() {
    let dgx = Topology::library("dgx-a100-80g").unwrap();
    assert_eq!(names(&dgx, 1, 6), ["dgx/device-1/egress", "dgx/device-6/ingress"]);
    close(route(&dgx, 1, 6).latency, "936.25ns");
    assert_eq!(route(&dgx, 1, 6).single_flow_limit, None);
    assert_eq!(route(&dgx, 3, 3), Route { links: vec![], latency: Seconds::ZERO, single_flow_limit: None });
}

#[test]
fn a_mesh_limits_one_flow_to_the_wires_of_its_pair() {
    let mesh = cluster("  - {name: v, devices: {kind: v100-sxm-32g, count: 4}, link: nvlink-mesh-150GB/s}", "none");
    assert_eq!(names(&mesh, 0, 3), ["v/device-0/egress", "v/device-3/ingress"]);
    assert_eq!(route(&mesh, 0, 3).single_flow_limit, Some(BytesPerSecond::new(50e9)));
}

#[test]
fn cores_of_a_node_share_its_memory_link() {
    let pair = Topology::library("cpu-pair").unwrap();
    assert_eq!(names(&pair, 0, 1), ["host-0/memory"]);
    assert_eq!(names(&pair, 2, 3), ["host-1/memory"]);
    assert_eq!(names(&pair, 1, 2), ["host-0/nic-0/egress", "host-1/nic-0/ingress"]);
    close(route(&pair, 1, 2).latency, "50us");
}

#[test]
fn each_device_uses_its_own_rail_between_nodes() {
    let nodes = "  - {name: a, count: 2, devices: {kind: a100-sxm-80g, count: 8}, nics: {count: 4, bandwidth: 200Gbit/s}}";
    let rails = cluster(nodes, "{kind: switch, latency: 5us}");
    assert_eq!(names(&rails, 0, 8), ["a-0/nic-0/egress", "a-1/nic-0/ingress"]);
    assert_eq!(names(&rails, 3, 14), ["a-0/nic-1/egress", "a-1/nic-3/ingress"]);
    // With more NICs than devices, each device has several bonded ones.
    let nodes = "  - {name: p5, count: 2, devices: {kind: h100-sxm-80g, count: 8}, nics: {count: 32, bandwidth: 100Gbit/s}}";
    let bonded = cluster(nodes, "switch");
    let first = route(&bonded, 7, 15).links[0];
    assert_eq!(bonded.links()[first.0].name, "p5-0/nic-7/egress");
    assert_eq!(bonded.links()[first.0].bandwidth, BytesPerSecond::new(50e9));
}

#[test]
fn pcie_lanes_carry_traffic_to_neighbours_and_network() {
    let nodes =
        "  - {name: p, count: 2, devices: {kind: a100-sxm-40g, count: 2}, link: pcie-20GB/s, nics: {bandwidth: 25Gbit/s}}";
    let pcie = cluster(nodes, "switch");
    assert_eq!(names(&pcie, 1, 2), ["p-0/device-1/egress", "p-0/nic-0/egress", "p-1/nic-0/ingress", "p-1/device-0/ingress"]);
}

#[test]
fn oversubscription_limits_traffic_between_leaves() {
    let nodes = "  - {name: n, count: 5, devices: {kind: a100-sxm-80g, count: 8}, nics: {count: 8, bandwidth: 200Gbit/s}}";
    let tree = cluster(nodes, "{kind: fat-tree, oversubscription: 4, nodes_per_leaf: 2, latency: 5us}");
    assert_eq!(names(&tree, 0, 8), ["n-0/nic-0/egress", "n-1/nic-0/ingress"]);
    close(route(&tree, 0, 8).latency, "5us");
    assert_eq!(names(&tree, 0, 16), ["n-0/nic-0/egress", "leaf-0/up", "leaf-1/down", "n-2/nic-0/ingress"]);
    close(route(&tree, 0, 16).latency, "6.2us");
    let bandwidth = |name: &str| tree.links().iter().find(|link| link.name == name).unwrap().bandwidth;
    assert_eq!(bandwidth("leaf-0/up"), BytesPerSecond::new(100e9), "two nodes of 200 GB/s, over 4");
    assert_eq!(bandwidth("leaf-2/down"), BytesPerSecond::new(50e9), "the last leaf has one node");
}

#[test]
fn an_unreachable_pair_is_an_error_that_names_both() {
    let nodes = "  - {name: n, count: 2, devices: {kind: a100-sxm-80g, count: 8}, nics: {bandwidth: 25Gbit/s}}";
    let apart = cluster(nodes, "{kind: none}");
    assert_eq!(
        one_line(&apart.validate().unwrap_err()),
        "device 0 (a100-sxm-80g 0 of node `n-0`) cannot reach device 8 (a100-sxm-80g 0 of node `n-1`): the nodes have no network; \
         hint: write `network: {kind: switch}`"
    );
    assert_eq!(names(&apart, 8, 9).len(), 2, "within a node they still do");

    let nodes = "  - {name: a, devices: {kind: cpu-core}, nics: {bandwidth: 1Gbit/s}}\n  - {name: b, devices: {kind: cpu-core}}";
    assert_eq!(
        one_line(&cluster(nodes, "switch").validate().unwrap_err()),
        "device 0 (cpu-core 0 of node `a`) cannot reach device 1 (cpu-core 0 of node `b`): a node without network interfaces is on \
         the way; hint: give it `nics`, such as `{count: 1, bandwidth: 25Gbit/s}`"
    );
}

#[test]
fn a_route_does_not_depend_on_the_number_of_nodes() {
    let small = Topology::library("dgx-h100").unwrap().with_nodes(64).unwrap();
    let large = Topology::library("dgx-h100").unwrap().with_nodes(12_500).unwrap();
    assert_eq!(large.device_count(), 100_000);
    for (from, to) in [(0, 1), (0, 8), (5, 300), (300, 5), (511, 0)] {
        assert_eq!(names(&small, from, to), names(&large, from, to));
    }
}

#[test]
fn every_pair_of_a_mixed_cluster_has_a_route_over_its_own_links() {
    let nodes = "  - {name: a, count: 3, devices: {kind: a100-sxm-80g, count: 8}, nics: {count: 8, bandwidth: 200Gbit/s}}
  - {name: v, count: 2, devices: {kind: v100-sxm-32g, count: 4}, link: pcie, nics: {bandwidth: 25Gbit/s}}
  - {name: c, devices: {kind: cpu-core, count: 2}, nics: {bandwidth: 10Gbit/s}}";
    let mixed = cluster(nodes, "{kind: fat-tree, oversubscription: 2}");
    mixed.validate().unwrap();
    for from in mixed.devices() {
        for to in mixed.devices() {
            let route = mixed.route(from, to).unwrap();
            let latency: Seconds = route.links.iter().map(|link| mixed.links()[link.0].latency).sum();
            assert_eq!(route.latency, latency);
            if from != to {
                let own = |device| mixed.node_name(mixed.node_of(device));
                let first = &mixed.links()[route.links[0].0].name;
                let last = &mixed.links()[route.links[route.links.len() - 1].0].name;
                assert!(first.starts_with(&own(from)) && last.starts_with(&own(to)), "{first} .. {last}");
            }
        }
    }
}

#[test]
fn equal_nodes_under_one_switch_are_interchangeable() {
    let many = [
        "  - {name: dgx, count: 5, devices: {kind: a100-sxm-80g, count: 8}, nics: {count: 4, bandwidth: 200Gbit/s}}",
        "  - {name: v, count: 4, devices: {kind: v100-sxm-32g, count: 2}, link: pcie, nics: {count: 1, bandwidth: 25Gbit/s}}",
    ];
    let one_switch = ["{kind: switch, latency: 5us}", "{kind: fat-tree, nodes_per_leaf: 8, latency: 5us}"];
    for (nodes, network) in many.iter().flat_map(|nodes| one_switch.map(|network| (nodes, network))) {
        let topology = cluster(nodes, network);
        let alike = topology.interchangeable_nodes().unwrap();
        assert_eq!(alike.count * alike.devices, topology.device_count());
        // Rotates all nodes by one.
        let moved = |number: usize, size: usize| {
            if number / size < alike.count { (number + size) % (alike.count * size) } else { number }
        };
        for (from, to) in topology.devices().flat_map(|from| topology.devices().map(move |to| (from.0, to.0))) {
            let (own, other) =
                (route(&topology, from, to), route(&topology, moved(from, alike.devices), moved(to, alike.devices)));
            let links: Vec<usize> = own.links.iter().map(|link| moved(link.0, alike.links)).collect();
            assert_eq!(links, other.links.iter().map(|link| link.0).collect::<Vec<_>>(), "{from} to {to} on {network}");
            assert_eq!((own.latency, own.single_flow_limit), (other.latency, other.single_flow_limit));
        }
        for (number, link) in topology.links().iter().enumerate() {
            let other = &topology.links()[moved(number, alike.links)];
            assert_eq!(
                (link.class, link.bandwidth, link.latency),
                (other.class, other.bandwidth, other.latency),
                "{}",
                link.name
            );
        }
    }
    for network in
        ["{kind: fat-tree, nodes_per_leaf: 2}", "{kind: dragonfly, nodes_per_router: 1, routers_per_group: 2, global_links: 9}"]
    {
        assert_eq!(cluster(many[0], network).interchangeable_nodes(), None, "{network}");
    }
    assert_eq!(cluster(&many.join("\n"), "switch").interchangeable_nodes(), None, "nodes of two kinds");
}
