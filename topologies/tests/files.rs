//! Topology files: accepted forms, the written form, and error messages.
#![allow(clippy::unwrap_used, clippy::panic)]

use foretell_topologies::{
    Architecture, DeviceId, Fabric, FatTree, LeafSwitches, NodeId, NodeLinkKind, Topology, TopologyReference, TopologySpec,
    Transport, Uplinks,
};
use foretell_units::diagnostic::{Mistake, one_line};
use foretell_units::{Bytes, BytesPerSecond, DataType, FlopsPerSecond, Seconds, Watts};

/// The example of `docs/reference/contract.md`.
const CONTRACT: &str = "\
name: two-kinds
devices:
  a100: {base: a100-sxm-80g}                 # a library device ...
  old:  {base: v100-sxm-32g, memory: 30GiB}  # ... changed where the file says so; or all figures given in full:
             # memory, memory_bandwidth, peak: {fp32: 15.7TFLOP/s, fp16: 125TFLOP/s}, power
nodes:
  - {name: new, count: 2, devices: {kind: a100, count: 8}, link: nvswitch-600GB/s, nics: {count: 8, bandwidth: 200Gbit/s}, price_per_hour: 32.77}
  - {name: old, count: 4, devices: {kind: old, count: 4}, link: nvlink-mesh-150GB/s, nics: {count: 1, bandwidth: 25Gbit/s}, price_per_hour: 12.24}
network: {kind: fat-tree, oversubscription: 2, latency: 5us}
";

/// Own devices beside the library's, with many defaults.
const OWN: &str = "\
devices:
  mine: {memory: 24GiB, memory_bandwidth: 600GB/s, peak: {fp32: 31.2TFLOP/s, bf16: 125TFLOP/s}, power: 150W, idle_power: 20W}
nodes:
  - devices: {kind: mine, count: 2}
    link: {kind: pcie, bandwidth: 20GB/s, latency: 2us}
  - {name: lone, devices: {kind: a100-sxm-40g}, mean_time_between_failures: 5000h}
network: {kind: switch, bandwidth: 10Gbit/s}
storage: {bandwidth: 40GB/s}
restart_time: 10min
";

/// A tree of two levels of which only the total rate of the uplinks is known.
fn tree(oversubscription: f64, nodes_per_leaf: Option<usize>) -> Fabric {
    let uplinks = Uplinks { oversubscription, count: None };
    Fabric::FatTree(FatTree { leaf_switches: LeafSwitches::OfNodes, nodes_per_leaf, uplinks, pods: None })
}

fn message(text: &str) -> String {
    one_line(&Topology::from_yaml(text, "cluster.yaml").unwrap_err())
}

#[test]
fn the_documented_example_is_read() {
    let cluster = Topology::from_yaml(CONTRACT, "cluster.yaml").unwrap();
    assert_eq!((cluster.name(), cluster.node_count(), cluster.device_count()), ("two-kinds", 6, 32));
    cluster.validate().unwrap();

    let new = cluster.device_kind(DeviceId(0));
    assert_eq!((new.name.as_str(), new.base.as_deref()), ("a100", Some("a100-sxm-80g")));
    assert_eq!(new.peak_rate(DataType::Bf16), Some(FlopsPerSecond::new(312e12)));
    let old = cluster.device_kind(DeviceId(16));
    assert_eq!((old.name.as_str(), old.memory, old.architecture), ("old", Bytes::new(30 << 30), Architecture::Gpu));
    assert_eq!(old.peak_rate(DataType::Bf16), Some(FlopsPerSecond::new(15.7e12)), "a V100 widens bf16 to fp32");

    assert_eq!(cluster.node_of(DeviceId(17)), NodeId(2));
    assert_eq!(cluster.devices_of(NodeId(2)), 16..20);
    assert_eq!(cluster.node_name(NodeId(5)), "old-3");
    let groups = cluster.node_groups();
    let link = groups[1].link.unwrap();
    assert_eq!((link.kind, link.bandwidth), (NodeLinkKind::NvLinkMesh, BytesPerSecond::new(150e9)));
    assert_eq!(groups[0].nics.unwrap().total_bandwidth(), BytesPerSecond::new(200e9));
    assert_eq!(cluster.network().fabric, tree(2.0, None));
    assert!((cluster.price_per_hour().unwrap() - (2.0 * 32.77 + 4.0 * 12.24)).abs() < 1e-9);
    assert!(!cluster.is_lab());
    assert_eq!(
        cluster.notes(),
        [
            "node `new`: its link carries 600 GB/s one way, but a `a100` has ports for 300 GB/s; data sheets often count both directions",
            "network: 3 nodes under each leaf switch, since the file does not say `nodes_per_leaf`",
        ]
    );
}

#[test]
fn prices_failures_and_storage_are_read() {
    let own = Topology::from_yaml(OWN, "own.yaml").unwrap();
    assert_eq!(own.device_kinds().iter().find_map(|kind| kind.idle_power), Some(Watts::new(20.0)));
    let between_failures: Vec<_> = own.node_groups().iter().map(|group| group.mean_time_between_failures).collect();
    assert_eq!(between_failures, [None, Some(Seconds::new(5000.0 * 3600.0))]);
    assert_eq!(own.storage_bandwidth(), Some(BytesPerSecond::new(40e9)));
    assert_eq!(own.restart_time(), Some(Seconds::new(600.0)));
    assert!(message("base: dgx-h100\nstorage: {}\n").contains("hint: write what all nodes together read or write"));
    assert!(message("base: dgx-h100\nstorage: {bandwidth: 0GB/s}\n").contains("must be above zero"));
    assert!(message("base: dgx-h100\nrestart_time: 600\n").contains("restart_time"));
    let built = Topology::from_yaml("base: dgx-h100\nstorage: {bandwidth: 1GB/s}\nrestart_time: 1h\n", "built.yaml").unwrap();
    assert_eq!((built.storage_bandwidth(), built.restart_time()), (Some(BytesPerSecond::new(1e9)), Some(Seconds::new(3600.0))));
}

#[test]
fn a_written_topology_reads_back_equal() {
    let mut topologies: Vec<Topology> = Topology::library_names().map(|name| Topology::library(name).unwrap()).collect();
    topologies.push(Topology::from_yaml(CONTRACT, "cluster.yaml").unwrap());
    topologies.push(Topology::library("dgx-h100").unwrap().with_nodes(3).unwrap());
    topologies.push(Topology::from_yaml(OWN, "clusters/own.yaml").unwrap());
    topologies.push(foretell_topologies::discover("processor: 0\ncpu MHz: 2345.678\n", "MemTotal: 1234567 kB\n", &[]));
    for topology in topologies {
        let text = serde_saphyr::to_string(&topology).unwrap();
        let again = Topology::from_yaml(&text, "written.yaml").unwrap_or_else(|error| panic!("{error}\n{text}"));
        assert_eq!(again, topology, "{text}");
        assert_eq!(again.notes(), topology.notes());
    }
}

#[test]
fn the_written_form_is_readable() {
    let text = serde_saphyr::to_string(&Topology::library("cpu-pair").unwrap()).unwrap();
    assert_eq!(
        text,
        "\
schema_version: 1
name: cpu-pair
devices:
  cpu-core:
    base: cpu-core
    architecture: cpu
    memory: 4GiB
    memory_bandwidth: 10GB/s
    peak:
      fp64: 48GFLOP/s
      fp32: 96GFLOP/s
    cores: 1
    source: estimate for a 3 GHz core with AVX2
nodes:
- name: host
  count: 2
  devices:
    kind: cpu-core
    count: 2
  link:
    kind: shared-memory
    bandwidth: 10GB/s
    latency: 1us
  nics:
    count: 1
    bandwidth: 125MB/s
network:
  kind: switch
  latency: 50us
lab: true
"
    );
}

#[test]
fn every_library_topology_is_sound() {
    for name in Topology::library_names() {
        let topology = Topology::library(name).unwrap();
        assert_eq!(topology.name(), name);
        topology.validate().unwrap();
        // A node count is ambiguous with several node groups.
        if topology.node_groups().len() > 1 {
            continue;
        }
        let many = topology.with_nodes(100).unwrap();
        many.validate().unwrap();
        assert_eq!(many.node_count(), 100);
        assert!(!many.notes().iter().any(|note| note.contains("data sheets")), "{:?}", many.notes());
    }
    let error = one_line(&Topology::library("dgx-a100").unwrap_err());
    assert_eq!(
        error,
        "unknown topology `dgx-a100`; hint: did you mean `dgx-a100-80g`? Of 30 others, the nearest are `dgx-h100`, `dgx-v100`, \
         `dgx-b200`, `hgx-h200`, `hgx-h20`"
    );
}

#[test]
fn the_library_has_the_topologies_that_scripts_name() {
    // `docs/reference/contract.md` lists them.
    let of_contract = "dgx-v100 dgx-a100-80g dgx-h100 hgx-h200 hgx-h20 dgx-b200 gb200-nvl72 gb300-nvl72 mi300x-8 mi325x-8 \
                       tpu-v4 tpu-v5e tpu-v5p tpu-v6e rtx4090-8 gtx1080ti-2 l4-8 grand-teton perlmutter aws-p4d aws-p5 \
                       gcp-a3-mega azure-nd-h100 cpu-pair";
    for name in of_contract.split_whitespace() {
        let topology = Topology::library(name).unwrap();
        assert!(topology.device_kinds().iter().all(|kind| kind.source.is_some()), "{name}");
    }
    assert_eq!(Topology::library("gb200-nvl72").unwrap().device_count(), 72);
}

#[test]
fn a_network_states_its_transport() {
    let cluster = |network: &str| {
        let text =
            format!("name: n\nnodes: [{{devices: {{kind: l4, count: 2}}, nics: {{bandwidth: 10Gbit/s}}}}]\nnetwork: {network}\n");
        Topology::from_yaml(&text, "n.yaml")
    };
    let network = |text: &str| cluster(text).unwrap().network().clone();
    assert_eq!(network("switch").transport, Transport::InfiniBand);
    let tcp = network("{kind: switch, transport: tcp}");
    assert_eq!((tcp.transport, tcp.latency), (Transport::Tcp, Seconds::new(50e-6)));
    for transport in Transport::ALL {
        let topology = cluster(&format!("{{kind: fat-tree, transport: {}}}", transport.name())).unwrap();
        assert_eq!(topology.network().transport, transport);
        let written = serde_json::to_string(&topology).unwrap();
        assert_eq!(serde_json::from_str::<Topology>(&written).unwrap(), topology);
    }
    let error = |text: &str| one_line(&cluster(text).unwrap_err());
    assert!(
        error("{kind: switch, transport: rocee}").contains("did you mean `roce`"),
        "{}",
        error("{kind: switch, transport: rocee}")
    );
    let torus = error("{kind: torus, dimensions: 1, bandwidth: 1GB/s, transport: tcp}");
    assert!(torus.contains("a `torus` network has no `transport`"), "{torus}");
}

#[test]
fn a_topology_in_place_may_name_a_library_base() {
    let text = "{base: dgx-a100-80g, nodes: 16, inter_node_bandwidth: 800Gbit/s}";
    let TopologyReference::InPlace(spec) = serde_saphyr::from_str(text).unwrap() else { panic!("a mapping") };
    let cluster = spec.build().unwrap();
    assert_eq!((cluster.name(), cluster.node_count(), cluster.device_count()), ("dgx-a100-80g", 16, 128));
    let nics = cluster.node_groups()[0].nics.unwrap();
    assert_eq!((nics.count, nics.total_bandwidth()), (8, BytesPerSecond::new(100e9)));

    let named: TopologyReference = serde_saphyr::from_str("dgx-h100").unwrap();
    assert_eq!(named, TopologyReference::Named("dgx-h100".into()));

    let text = "{base: dgx-a100-80g, name: mine, network: {latency: 2us}}";
    let cluster = serde_saphyr::from_str::<TopologySpec>(text).unwrap().build().unwrap();
    assert_eq!(cluster.name(), "mine");
    assert_eq!(cluster.network().fabric, tree(1.0, Some(20)));
    assert_eq!(cluster.network().latency, "2us".parse::<Seconds>().unwrap());
}

#[test]
fn short_and_full_forms_are_equivalent() {
    let cluster = Topology::from_yaml(OWN, "clusters/own.yaml").unwrap();
    assert_eq!(cluster.name(), "own");
    cluster.validate().unwrap();
    let groups = cluster.node_groups();
    assert_eq!((groups[0].name.as_str(), groups[1].link, groups[1].devices), ("node0", None, 1));
    assert_eq!(groups[1].nics.unwrap().bandwidth, BytesPerSecond::new(1.25e9));
    assert_eq!(cluster.notes(), ["device `mine`: taken for a gpu, since the file does not say its `architecture`"]);
    assert_eq!(cluster.price_per_hour(), None);
}

#[test]
fn prices_and_counts_may_have_a_currency_and_separators() {
    let cluster = |first: &str, second: &str| {
        let node = |name: &str, price: &str| {
            format!("  - name: {name}\n    count: 1,024\n    devices: {{kind: l4, count: 1}}\n    price_per_hour: {price}\n")
        };
        Topology::from_yaml(&format!("nodes:\n{}{}", node("a", first), node("b", second)), "cluster.yaml")
    };
    for (first, second, currency) in [
        ("$98", "1,024.50", Some("USD")),
        ("98 USD", "$1_024.5", Some("USD")),
        ("98", "1,024.50 EUR", Some("EUR")),
        ("98", "1024.5", None),
    ] {
        let cluster = cluster(first, second).unwrap();
        assert_eq!(cluster.currency(), currency, "{first}, {second}");
        assert_eq!(cluster.node_count(), 2048);
        let prices: Vec<_> = cluster.node_groups().iter().map(|group| group.price_per_hour).collect();
        assert_eq!(prices, [Some(98.0), Some(1024.5)], "{first}, {second}");
        let written = serde_json::to_string(&cluster).unwrap();
        assert_eq!(serde_json::from_str::<Topology>(&written).unwrap(), cluster);
    }
    assert_eq!(cluster("0", "$0").unwrap().price_per_hour(), Some(0.0));
    let place = "cluster.yaml:9:21: `price_per_hour`";
    let error = |price: &str| one_line(&cluster("$98", price).unwrap_err());
    for wrong in ["-1", "1,02", "98 dollars", "cheap", "1e308"] {
        let hint = "hint: write a number, such as `98.32`, `$98.32` or `98.32 EUR`, of at most 1e12";
        assert_eq!(error(wrong), format!("{place}: `{wrong}` is not a price; {hint}"));
    }
    assert_eq!(
        error("98 EUR"),
        format!("{place} is in `EUR`, and that of another node in `USD`; hint: write all prices in one currency")
    );
}

#[test]
fn errors_in_a_file_name_their_place_and_a_hint() {
    let node = "nodes:\n  - {name: n, devices: {kind: a100-sxm-80g, count: 8}, link: nvswitch-300GB/s}\n";
    let cases: [(String, &str); 22] = [
        (
            "devices:\n  old: {base: v100-sxm-32g, memory: 30}\n".to_owned() + node,
            "cluster.yaml:2:37: `memory`: `30` is a bare number where a size in bytes is wanted; \
             hint: give it a unit, such as `30GiB`",
        ),
        (
            node.replace("300GB/s", "300GiB"),
            "cluster.yaml:2:62: `link`: `300GiB` is not a data rate: unknown unit `GiB`; hint: the units are `GB/s`, `MB/s`, `kB/s`, \
             `TB/s`, `B/s`, `GiB/s`, `MiB/s`, `Gbit/s`, `Mbit/s`, `kbit/s`, `Tbit/s`, `Gb/s`, `Tb/s`, `Mb/s`, `Gbps`, `Tbps`, `Mbps`, `GBps`, `TBps`, `MBps`",
        ),
        (
            node.replace("a100-sxm-80g", "a100-sxm-80"),
            "cluster.yaml:2:31: unknown device kind `a100-sxm-80`; hint: did you mean `a100-sxm-80g`? Of 56 others, the nearest are \
             `a100-sxm-40g`, `a800-sxm-80g`, `h100-sxm-80g`, `h800-sxm-80g`, `b200-sxm-180g`",
        ),
        (
            node.replace("link:", "lnk:"),
            "cluster.yaml:2:56: unknown field `lnk`; hint: did you mean `link`? There are `name`, `count`, `devices`, `link`, `nics`, \
             `host_memory`, `price_per_hour`, `mean_time_between_failures`",
        ),
        (
            node.replace("count: 8", "count: 0"),
            "cluster.yaml:2:52: `devices.count` is 0; hint: write how many there are, at least 1",
        ),
        (
            node.replace("count: 8", "count: eight"),
            "cluster.yaml:2:52: `devices.count` is `eight`, which is not a whole number below 2^64; hint: write how many there are, such as `8`",
        ),
        (
            "devices:\n  x: {memory: 1GiB, peak: {fp32: 1TFLOP/s}}\n".to_owned() + node,
            "cluster.yaml:2:6: device `x` does not state `memory_bandwidth`; hint: write `memory_bandwidth: 900GB/s`, or build on a \
             library device with `base`",
        ),
        (
            "devices:\n  x: {base: k80}\n".to_owned() + node,
            "cluster.yaml:2:13: unknown library device `k80`; hint: did you mean `a10`? Of 56 others, the nearest are \
             `a30`, `a40`, `h20`, `l20`, `l40`",
        ),
        (
            "devices:\n  x: {base: cpu-core, peak: {fp33: 1TFLOP/s}}\n".to_owned() + node,
            "cluster.yaml:2:30: unknown name `fp33`; hint: did you mean `fp32`? There are `fp64`, `fp32`, `tf32`, `bf16`, `fp16`, \
             `fp8`, `int8`, `int32`",
        ),
        (
            node.replace("nvswitch-", "nvlinkmesh-"),
            "cluster.yaml:2:62: unknown kind of link `nvlinkmesh`; hint: did you mean `nvlink-mesh`? There are `nvswitch`, \
             `nvlink-mesh`, `pcie`, `shared-memory`",
        ),
        (
            node.replace("}, link", "}, nics: {count: 8}, link"),
            "cluster.yaml:2:62: `nics` of node `n` does not state `bandwidth`; hint: say what one carries, such as `bandwidth: 25Gbit/s`",
        ),
        (
            node.to_owned() + "network: {kind: fat-tree, oversubscription: 0.5}\n",
            "cluster.yaml:3:45: `oversubscription` is `0.5`; hint: write a plain number, at least 1",
        ),
        (
            node.to_owned() + "network: {kind: fat-tree, leaves_per_pod: 2, uplinks: [9223372036854775808, 8]}\n",
            "cluster.yaml:3:56: `uplinks` is `9223372036854775808`, and a count is at most 16777216; hint: write how many there are",
        ),
        (
            node.to_owned() + "network: {kind: switch, oversubscription: 2}\n",
            "cluster.yaml:3:43: a `switch` network has no `oversubscription`; hint: leave it out, or write `kind: fat-tree`",
        ),
        (
            node.to_owned() + "  - {name: n, devices: {kind: cpu-core}}\n",
            "cluster.yaml:3:12: two kinds of node are called `n`; hint: give each its own `name`",
        ),
        (
            "nodes: 4\n".into(),
            "cluster.yaml:1:8: `nodes` is a number, but there is no `base`; hint: list the nodes, or add the library topology it \
             counts nodes of, such as `base: dgx-a100-80g`",
        ),
        (
            "base: dgx-a100\nnodes: 4\n".into(),
            "cluster.yaml:1:7: unknown topology `dgx-a100`; hint: did you mean `dgx-a100-80g`? Of 30 others, the nearest are \
             `dgx-h100`, `dgx-v100`, `dgx-b200`, `hgx-h200`, `hgx-h20`",
        ),
        ("base: dgx-h100\nnodes: 0\n".into(), "cluster.yaml:2:8: `nodes` is 0; hint: write how many there are, at least 1"),
        (
            "base: dgx-h100\nnodes: 1000000\n".into(),
            "cluster.yaml: `cluster` would have more than 1000000 devices; hint: lower the `count` of its nodes or of their devices",
        ),
        (
            "name: empty\n".into(),
            "cluster.yaml: the topology does not state `nodes`; hint: list `nodes`, or build on a library topology with `base`",
        ),
        (
            "nodes:\n  - {name: n}\n".into(),
            "cluster.yaml:2:5: node `n` does not state `devices`; hint: write `devices: {kind: a100-sxm-80g, count: 8}`",
        ),
        ("name: a\nname: b\n".into(), "cluster.yaml:2:1: `name` is written twice; hint: keep one of the two"),
    ];
    for (text, expected) in cases {
        assert_eq!(message(&text), expected, "{text}");
    }
    let kinds = Fabric::NAMES.map(|name| format!("`{name}`")).join(", ");
    let unknown = "cluster.yaml:3:17: unknown kind of network `fattree`; hint: did you mean `fat-tree`? There are";
    assert_eq!(message(&(node.to_owned() + "network: {kind: fattree}\n")), format!("{unknown} {kinds}"));
}

#[test]
fn text_that_is_no_topology_is_refused_with_a_place() {
    for (text, expected) in [
        ("", "cluster.yaml: the topology does not state `nodes`; hint: list `nodes`, or build on a library topology with `base`"),
        ("[1, 2]", "cluster.yaml:1:1: something else stands where a mapping belongs"),
        ("nodes: {a: 1}", "cluster.yaml:1:8: a mapping stands where a list of nodes, or a number of them on a `base`, belongs"),
        ("nodes: []", "cluster.yaml:1:8: `nodes` is empty; hint: list at least one kind of node"),
        ("nodes: [1]", "cluster.yaml:1:9: something else stands where a mapping belongs"),
        ("name: [1]", "cluster.yaml:1:7: something else stands where a single value belongs"),
        ("lab: perhaps", "cluster.yaml:1:6: this is neither yes nor no; hint: write `true` or `false`"),
    ] {
        assert_eq!(message(text), expected);
    }
}

#[test]
fn errors_of_a_topology_in_place_have_their_place_in_the_plan() {
    #[derive(serde::Deserialize)]
    struct Plan {
        topology: TopologyReference,
    }
    let text = "topology:\n  base: dgx-h100\n  inter_node_bandwidth: 800\n";
    let plan: Plan = serde_saphyr::from_str(text).unwrap();
    let TopologyReference::InPlace(spec) = plan.topology else { panic!("a mapping") };
    assert_eq!(
        one_line(&spec.build().unwrap_err().in_file("plan.yaml", text)),
        "plan.yaml:3:25: `inter_node_bandwidth`: `800` is a bare number where a data rate is wanted; \
         hint: give it a unit, such as `800GB/s`"
    );
}

#[test]
fn a_topology_is_read_from_json() {
    let topology = Topology::from_yaml(CONTRACT, "cluster.yaml").unwrap();
    let text = serde_json::to_string(&topology).unwrap();
    assert_eq!(serde_json::from_str::<Topology>(&text).unwrap(), topology);
    let value: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(serde_json::from_value::<Topology>(value).unwrap(), topology);
    let error = serde_json::from_str::<Topology>(r#"{"nodes": [{"devices": {"kind": "cpu-core", "count": 0}}]}"#).unwrap_err();
    let mistake = Mistake::recorded(&error.to_string()).expect("it has a hint");
    assert_eq!(one_line(&mistake), "`devices.count` is 0; hint: write how many there are, at least 1");
}

#[test]
fn a_node_count_needs_a_single_node_group() {
    let error = one_line(&Topology::from_yaml(CONTRACT, "cluster.yaml").unwrap().with_nodes(4).unwrap_err());
    assert_eq!(
        error,
        "`two-kinds` has several kinds of node (`new`, `old`), so a number of nodes does not say how many of each; \
         hint: set each `count` in the topology file"
    );
}
