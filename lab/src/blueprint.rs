//! The blueprint of a lab: the hosts of a topology, and the commands that make them. It must not
//! run anything.

use crate::command::Command;
use crate::error::LabError;
use crate::names::{node_namespace, switches_namespace};
use foretell_topologies::{Architecture, DeviceId, Fabric, FatTree, LeafSwitches, NodeId, NodeLinkKind, Routing, Topology};
use foretell_units::BytesPerSecond;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::net::Ipv4Addr;

/// The most nodes of a lab. There are addresses for more, but one machine hardly runs more.
const MAX_NODES: usize = 250;

/// The burst of a shaper, in seconds at its rate. It is short because a burst passes faster than
/// the link would send it.
const BURST_SECONDS: f64 = 15e-6;
/// The smallest burst in bytes: a shaper cannot send less than one full Ethernet frame.
const MIN_BURST_BYTES: f64 = 2000.0;

/// The most bytes that TCP passes to an interface in one piece. The kernel's shaper lets such a
/// piece pass at once. With the usual 64 KiB, a single message of that size crossed a link of 1
/// Gbit/s in 20 us instead of 0.5 ms. Smaller pieces cost more CPU time.
const PIECE_BYTES: usize = 6000;

/// The most bytes that a socket may have in flight. Small enough that no queue overflows
/// ([`QUEUE_PACKETS`]), so no packet is dropped and TCP never slows down; more than any of the
/// links carries in a round trip.
const SOCKET_BYTES: usize = 1 << 20;

/// The packets that a shaper's queue holds: more than all sockets of a run can have in flight.
const QUEUE_PACKETS: usize = 20_000;

/// A device of a host.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct LabDevice {
    /// Its number in the topology.
    pub number: usize,
    /// The name of its control group within the lab's, and its share of a core, from 0 to 1. `None`
    /// if the file has no `cpu_quota`.
    pub quota: Option<(String, f64)>,
}

/// A node of the topology.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Host {
    /// Its name in the topology.
    pub name: String,
    /// Its network namespace.
    pub namespace: String,
    /// Its address in the lab's network.
    pub address: Ipv4Addr,
    /// Its devices, in the order of their numbers.
    pub devices: Vec<LabDevice>,
}

/// The hosts of a lab and the commands that make them.
#[derive(Clone, Debug, PartialEq)]
pub struct Blueprint {
    /// The hosts, in the order of the topology's nodes.
    pub hosts: Vec<Host>,
    /// The commands that make the namespaces, links and switches, in order. The first one makes the
    /// namespace of the switches, and fails if it exists.
    pub commands: Vec<Command>,
}

impl Blueprint {
    /// The blueprint of a topology. `id` is part of the name of everything in the lab.
    ///
    /// # Errors
    /// [`LabError::Unsupported`] if the topology describes something that cannot be made on one
    /// machine.
    pub fn new(topology: &Topology, id: &str) -> Result<Self, LabError> {
        check(topology)?;
        let mut commands = Commands { list: Vec::new(), switches: switches_namespace(id) };
        let mut hosts = Vec::new();
        commands.switches();
        let leaves = topology.leaves();
        commands.bridge(if leaves.is_empty() { "switch" } else { "spine" });
        for (number, leaf) in leaves.iter().enumerate() {
            let bridge = format!("leaf{number}");
            let (up, down) = (format!("up{number}"), format!("down{number}"));
            commands.bridge(&bridge);
            commands.pair(&up, &down, None);
            for (end, bridge) in [(&up, bridge.as_str()), (&down, "spine")] {
                commands.attach(end, bridge);
                commands.shape(None, end, leaf.uplink);
            }
        }
        for node in 0..topology.node_count() {
            let name = topology.node_name(NodeId(node));
            let namespace = node_namespace(id, &name);
            let [high, low] = (node as u16 + 1).to_be_bytes();
            let address = Ipv4Addr::new(10, 77, high, low);
            commands.namespace(&namespace);
            if let Some(nics) = topology.node_groups()[topology.group_of(NodeId(node))].nics {
                let port = format!("node{node}");
                let leaf = leaves.iter().position(|leaf| leaf.nodes.contains(&node));
                commands.pair(&port, "eth0", Some(&namespace));
                commands.attach(&port, &leaf.map_or_else(|| "switch".into(), |leaf| format!("leaf{leaf}")));
                commands.ip(Some(&namespace), &format!("address add {address}/16 dev eth0"));
                commands.ip(Some(&namespace), &format!("link set eth0 up gso_max_size {PIECE_BYTES}"));
                commands.shape(Some(&namespace), "eth0", nics.total_bandwidth());
                commands.shape(None, &port, nics.total_bandwidth());
            }
            let devices = topology.devices_of(NodeId(node)).map(|number| {
                let quota = topology.device_kind(DeviceId(number)).cpu_quota;
                LabDevice { number, quota: quota.map(|share| (format!("device-{number}"), share)) }
            });
            hosts.push(Host { name, namespace, address, devices: devices.collect() });
        }
        Ok(Self { hosts, commands: commands.list })
    }
}

/// Refuses a topology that cannot be made into a lab.
fn check(topology: &Topology) -> Result<(), LabError> {
    let refused =
        |what: String, hint: &str| Err(LabError::Unsupported { topology: topology.name().into(), what, hint: hint.into() });
    if !topology.is_lab() {
        let hint = "write `lab: true` into the file if its hosts are to be made on this machine";
        return refused("it does not describe a lab".into(), hint);
    }
    if topology.node_count() > MAX_NODES {
        return refused(format!("it has {} nodes", topology.node_count()), "a lab has at most 250 nodes");
    }
    for group in topology.node_groups() {
        let name = &group.name;
        let kind = &topology.device_kinds()[group.kind];
        if kind.architecture != Architecture::Cpu {
            let hint = "use devices of `architecture: cpu`, such as `cpu-core`";
            return refused(format!("node `{name}` has devices that are not CPU cores"), hint);
        }
        if kind.cores.is_some_and(|cores| cores != 1) {
            return refused(format!("a device of node `{name}` has several cores"), "use devices of one core each");
        }
        if group.nics.is_some_and(|nics| nics.count != 1) {
            let hint = "write `nics: {count: 1, ...}` with their summed rate";
            return refused(format!("node `{name}` has several network interfaces"), hint);
        }
        if group.link.is_some_and(|link| link.kind != NodeLinkKind::SharedMemory) {
            let hint = "cores of one node share memory: write `link: shared-memory-10GB/s`";
            return refused(format!("the devices of node `{name}` do not communicate through memory"), hint);
        }
    }
    let network = topology.network();
    let is_supported = match &network.fabric {
        Fabric::None | Fabric::Switch => true,
        Fabric::FatTree(FatTree { leaf_switches, pods, .. }) => {
            *leaf_switches == LeafSwitches::OfNodes && pods.is_none() && network.routing == Routing::Spread
        }
        Fabric::Torus(_) | Fabric::Dragonfly(_) => false,
    };
    if !is_supported {
        let hint = "describe a `switch`, or a `fat-tree` of two levels with `routing: spread`";
        return refused(format!("a `{}` like this cannot be made of bridges", network.fabric.name()), hint);
    }
    topology.validate()?;
    Ok(())
}

/// A list of commands under construction.
struct Commands {
    list: Vec<Command>,
    /// The namespace of the switches.
    switches: String,
}

impl Commands {
    /// Appends a command. Without a namespace it runs in this machine's own.
    fn add(&mut self, program: &'static str, namespace: Option<&str>, arguments: &str) {
        let namespace = namespace.map_or_else(String::new, |namespace| format!("-n {namespace} "));
        self.list.push(Command::new(program, &(namespace + arguments)));
    }

    fn ip(&mut self, namespace: Option<&str>, arguments: &str) {
        self.add("ip", namespace, arguments);
    }

    fn ip_in_switches(&mut self, arguments: &str) {
        let switches = self.switches.clone();
        self.ip(Some(&switches), arguments);
    }

    fn switches(&mut self) {
        let switches = self.switches.clone();
        self.ip(None, &format!("netns add {switches}"));
    }

    /// Makes a node's namespace. TCP uses Reno in all namespaces, whatever the machine's default:
    /// no packet is dropped, so congestion control that measures and probes would only disturb.
    fn namespace(&mut self, name: &str) {
        self.ip(None, &format!("netns add {name}"));
        self.ip(Some(name), "link set lo up");
        let settings = [
            "net.ipv4.tcp_congestion_control=reno".to_owned(),
            format!("net.ipv4.tcp_rmem=4096 131072 {SOCKET_BYTES}"),
            format!("net.ipv4.tcp_wmem=4096 131072 {SOCKET_BYTES}"),
        ];
        for setting in settings {
            let mut command = Command::new("ip", &format!("netns exec {name} sysctl -q -w"));
            // One argument, though it contains spaces.
            command.arguments.push(setting);
            self.list.push(command);
        }
    }

    fn bridge(&mut self, name: &str) {
        // The switches form a tree, so a bridge may forward at once, without the delay of the
        // spanning tree protocol.
        self.ip_in_switches(&format!("link add {name} type bridge forward_delay 0 mcast_snooping 0"));
        self.ip_in_switches(&format!("link set {name} up"));
    }

    /// Makes a veth pair from the switches' namespace to another one, or within it.
    fn pair(&mut self, near: &str, far: &str, namespace: Option<&str>) {
        let far_namespace = namespace.map_or_else(String::new, |namespace| format!(" netns {namespace}"));
        self.ip_in_switches(&format!("link add {near} type veth peer name {far}{far_namespace}"));
    }

    fn attach(&mut self, end: &str, bridge: &str) {
        self.ip_in_switches(&format!("link set {end} master {bridge} up"));
    }

    /// Limits the rate at which an interface sends; without a namespace, an interface of the
    /// switches. A link has one shaper at each end, for each direction.
    fn shape(&mut self, namespace: Option<&str>, interface: &str, rate: BytesPerSecond) {
        let namespace = namespace.map_or_else(|| self.switches.clone(), str::to_owned);
        let burst = (rate.value() * BURST_SECONDS).max(MIN_BURST_BYTES).round();
        let bits = (rate.value() * 8.0).round();
        let mut tc = |arguments: String| self.add("tc", Some(&namespace), &arguments);
        tc(format!("qdisc add dev {interface} root handle 1: htb default 1"));
        // With one class, the quantum has no effect. If it is not stated, the kernel logs a warning
        // about its choice.
        let class = format!("rate {bits}bit ceil {bits}bit burst {burst}b cburst {burst}b quantum 60000");
        tc(format!("class add dev {interface} parent 1: classid 1:1 htb {class}"));
        tc(format!("qdisc add dev {interface} parent 1:1 pfifo limit {QUEUE_PACKETS}"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use foretell_units::diagnostic::one_line;

    fn commands(topology: &Topology) -> Vec<String> {
        let blueprint = Blueprint::new(topology, "t").expect("a lab");
        blueprint.commands.iter().map(Command::to_string).collect()
    }

    fn library(name: &str) -> Topology {
        Topology::library(name).expect("in the library")
    }

    #[test]
    fn two_hosts_are_namespaces_on_a_switch_with_links_shaped_both_ways() {
        let list = commands(&library("lab-2x1g"));
        let expected = [
            "ip netns add foretell-lab_t_switches",
            "ip -n foretell-lab_t_switches link add switch type bridge forward_delay 0 mcast_snooping 0",
            "ip netns add foretell-lab_t_node-host-1",
            "ip -n foretell-lab_t_switches link add node1 type veth peer name eth0 netns foretell-lab_t_node-host-1",
            "ip -n foretell-lab_t_switches link set node1 master switch up",
            "ip -n foretell-lab_t_node-host-1 address add 10.77.0.2/16 dev eth0",
            "tc -n foretell-lab_t_node-host-1 class add dev eth0 parent 1: classid 1:1 htb rate 1000000000bit ceil 1000000000bit \
             burst 2000b cburst 2000b quantum 60000",
            "tc -n foretell-lab_t_switches qdisc add dev node1 parent 1:1 pfifo limit 20000",
        ];
        let mut rest = list.iter();
        for line in expected {
            assert!(rest.any(|written| written == line), "{line}\nis missing, or out of order, in\n{}", list.join("\n"));
        }
        assert_eq!(list[0], expected[0]);
        assert_eq!(list.iter().filter(|line| line.contains("class add")).count(), 4);
    }

    #[test]
    fn an_uplink_has_the_same_rate_as_in_the_topology() {
        let topology = library("lab-4x1g-200m");
        let uplink = topology.links().iter().find(|link| link.name == "leaf-1/up").expect("a tree").bandwidth;
        assert_eq!(uplink, BytesPerSecond::new(25e6));
        let list = commands(&topology);
        for end in ["up0", "down0", "up1", "down1"] {
            let shaped = format!("class add dev {end} parent 1: classid 1:1 htb rate 200000000bit");
            assert_eq!(list.iter().filter(|line| line.contains(&shaped)).count(), 1, "{}", list.join("\n"));
        }
        assert!(list.iter().any(|line| line.ends_with("link set node1 master leaf0 up")));
        assert!(list.iter().any(|line| line.ends_with("link set node2 master leaf1 up")));
        assert!(list.iter().any(|line| line.ends_with("link set down1 master spine up")));
    }

    #[test]
    fn only_a_device_with_a_cpu_quota_has_a_control_group() {
        let blueprint = Blueprint::new(&library("lab-hetero"), "t").expect("a lab");
        assert_eq!(blueprint.hosts[0].devices, [LabDevice { number: 0, quota: None }]);
        assert_eq!(blueprint.hosts[1].devices, [LabDevice { number: 1, quota: Some(("device-1".into(), 0.5)) }]);
        assert_eq!(blueprint.hosts[1].namespace, "foretell-lab_t_node-slow");
    }

    #[test]
    fn interface_names_have_at_most_15_characters() {
        let many = library("lab-4x1g-200m").with_nodes(250).expect("many");
        for line in commands(&many) {
            let names = line.split_whitespace().skip_while(|word| *word != "dev" && *word != "name").skip(1).take(1);
            assert!(names.into_iter().all(|name| name.len() <= 15), "{line}");
        }
    }

    #[test]
    fn an_unsupported_topology_is_refused_with_a_hint() {
        let refused = |text: &str| {
            let topology = Topology::from_yaml(text, "lab.yaml").expect("sound");
            one_line(&Blueprint::new(&topology, "t").expect_err("cannot be made"))
        };
        let node = "nodes: [{name: n, count: 2, devices: {kind: KIND, count: 1}, nics: {count: NICS, bandwidth: 1Gbit/s}}]\n";
        let lab = |kind: &str, nics: &str| format!("name: x\nlab: true\n{}", node.replace("KIND", kind).replace("NICS", nics));
        assert!(refused(&lab("cpu-core", "2")).contains("several network interfaces"));
        assert!(refused(&lab("a100-sxm-40g", "1")).contains("not CPU cores"));
        assert!(refused(&lab("cpu-core", "1").replace("lab: true\n", "")).contains("`lab: true`"));
        let tree = lab("cpu-core", "1") + "network: {kind: fat-tree, nodes_per_leaf: 1, uplinks: 2}\n";
        assert!(refused(&tree).contains("a `fat-tree` like this"), "a bridge has one uplink");
    }
}
