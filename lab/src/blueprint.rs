//! What is to be made of a topology: its hosts, and the commands that make them. Touches nothing.

use crate::error::LabError;
use foretell_topologies::{Architecture, Fabric, FatTree, LeafSwitches, NodeId, NodeLinkKind, Routing, Topology};
use foretell_units::BytesPerSecond;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::net::Ipv4Addr;

/// What the names of all namespaces and control groups of labs begin with.
pub const PREFIX: &str = "foretell-lab_";

/// The most nodes of a lab: more would fit its addresses, but hardly a machine.
const MOST_NODES: usize = 250;

/// What a shaper may send at once, in seconds of its rate; and never less than a full Ethernet frame, which is the least that it can
/// send. Small, because what is sent at once is faster than the rate.
const BURST: f64 = 15e-6;
const SMALLEST_BURST: f64 = 2000.0;

/// The most bytes that TCP hands to an interface as one piece, which the kernel's shaper lets pass as a whole. With the usual 64 KiB a
/// lone message of that size crossed a link of 1 Gbit/s in 20 us instead of 0.5 ms; smaller pieces cost the processor more.
const PIECE_BYTES: usize = 6000;

/// The most bytes that a socket may have on the way. Smaller than all queues together, so that no packet is ever dropped and
/// TCP has no reason to slow down; larger than what any of the links holds in a round trip.
const SOCKET_BYTES: usize = 1 << 20;

/// How many packets wait at a shaper at most: more than all sockets of a run can have on the way.
const QUEUE_PACKETS: usize = 20_000;

/// One program to run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Command {
    /// `ip` or `tc`.
    pub program: &'static str,
    /// Its arguments.
    pub arguments: Vec<String>,
}

impl fmt::Display for Command {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{} {}", self.program, self.arguments.join(" "))
    }
}

/// A device of a host.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LabDevice {
    /// Its number in the topology.
    pub number: usize,
    /// The name of its control group within the lab's, and the share of a core that the group has; none where the file asks for none.
    pub quota: Option<(String, f64)>,
}

/// A node of the topology.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
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

/// What is to be made.
#[derive(Clone, Debug, PartialEq)]
pub struct Blueprint {
    /// The hosts, in the order of the topology's nodes.
    pub hosts: Vec<Host>,
    /// What makes the namespaces, links and switches, in order. The first makes the namespace of the switches, and fails if there is one.
    pub commands: Vec<Command>,
}

/// The namespace that holds the switches of a lab.
pub(crate) fn switches(id: &str) -> String {
    format!("{PREFIX}{id}_switches")
}

/// What may be part of the name of a namespace and is not the mark between parts.
pub(crate) fn identifier(name: &str) -> String {
    name.chars().map(|letter| if letter.is_ascii_alphanumeric() || "-.~".contains(letter) { letter } else { '-' }).collect()
}

impl Blueprint {
    /// The lab of a topology, whose parts are named after `id`.
    ///
    /// # Errors
    /// [`LabError::Unsupported`] where the topology describes something that cannot be made of one machine's cores.
    pub fn new(topology: &Topology, id: &str) -> Result<Self, LabError> {
        check(topology)?;
        let mut commands = Commands { list: Vec::new(), switches: switches(id) };
        let mut hosts = Vec::new();
        commands.switches();
        let leaves = topology.leaves();
        if leaves.is_empty() {
            commands.bridge("switch");
        } else {
            commands.bridge("spine");
        }
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
            let namespace = format!("{PREFIX}{id}_node-{}", identifier(&name));
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
                let quota = topology.device_kind(foretell_topologies::DeviceId(number)).cpu_quota;
                LabDevice { number, quota: quota.map(|share| (format!("device-{number}"), share)) }
            });
            hosts.push(Host { name, namespace, address, devices: devices.collect() });
        }
        Ok(Self { hosts, commands: commands.list })
    }
}

/// Refuses what a lab cannot be made of.
fn check(topology: &Topology) -> Result<(), LabError> {
    let refused =
        |what: String, hint: &str| Err(LabError::Unsupported { topology: topology.name().into(), what, hint: hint.into() });
    if !topology.is_lab() {
        let hint = "write `lab: true` into the file if its hosts are to be made of this machine";
        return refused("it does not describe a lab".into(), hint);
    }
    if topology.node_count() > MOST_NODES {
        return refused(format!("it has {} nodes", topology.node_count()), "a lab has 250 nodes at most");
    }
    for group in topology.node_groups() {
        let name = &group.name;
        let kind = &topology.device_kinds()[group.kind];
        if kind.architecture != Architecture::Cpu {
            return refused(
                format!("node `{name}` has devices that are no cores"),
                "use devices of `architecture: cpu`, such as `cpu-core`",
            );
        }
        if kind.cores.is_some_and(|cores| cores != 1) {
            return refused(format!("a device of node `{name}` has several cores"), "use devices of one core each");
        }
        if group.nics.is_some_and(|nics| nics.count != 1) {
            return refused(
                format!("node `{name}` has several network interfaces"),
                "write `nics: {count: 1, ...}` with their summed rate",
            );
        }
        if group.link.is_some_and(|link| link.kind != NodeLinkKind::SharedMemory) {
            let hint = "cores of one node share memory: write `link: shared-memory-10GB/s`";
            return refused(format!("the devices of node `{name}` are joined otherwise than by memory"), hint);
        }
    }
    let network = topology.network();
    let is_made = match &network.fabric {
        Fabric::None | Fabric::Switch => true,
        Fabric::FatTree(FatTree { leaf_switches, pods, .. }) => {
            *leaf_switches == LeafSwitches::OfNodes && pods.is_none() && network.routing == Routing::Spread
        }
        Fabric::Torus(_) | Fabric::Dragonfly(_) => false,
    };
    if !is_made {
        let hint = "describe a `switch`, or a `fat-tree` of two levels with `routing: spread`";
        return refused(format!("a `{}` like this cannot be made of bridges", network.fabric.name()), hint);
    }
    topology.validate()?;
    Ok(())
}

struct Commands {
    list: Vec<Command>,
    /// The namespace of the switches.
    switches: String,
}

impl Commands {
    fn add(&mut self, program: &'static str, namespace: Option<&str>, words: &str) {
        let namespace = namespace.map_or_else(Vec::new, |namespace| vec!["-n".to_owned(), namespace.to_owned()]);
        let arguments = namespace.into_iter().chain(words.split_whitespace().map(str::to_owned)).collect();
        self.list.push(Command { program, arguments });
    }

    fn ip(&mut self, namespace: Option<&str>, words: &str) {
        self.add("ip", namespace, words);
    }

    fn in_switches(&mut self, words: &str) {
        let switches = self.switches.clone();
        self.ip(Some(&switches), words);
    }

    fn switches(&mut self) {
        let switches = self.switches.clone();
        self.ip(None, &format!("netns add {switches}"));
    }

    /// A node's namespace. Its TCP is the same on every machine: no congestion control that measures and probes, since nothing is dropped.
    fn namespace(&mut self, name: &str) {
        self.ip(None, &format!("netns add {name}"));
        self.ip(Some(name), "link set lo up");
        let settings = [
            "net.ipv4.tcp_congestion_control=reno".to_owned(),
            format!("net.ipv4.tcp_rmem=4096 131072 {SOCKET_BYTES}"),
            format!("net.ipv4.tcp_wmem=4096 131072 {SOCKET_BYTES}"),
        ];
        for setting in settings {
            let mut arguments: Vec<String> = ["netns", "exec", name, "sysctl", "-q", "-w"].map(str::to_owned).into();
            arguments.push(setting);
            self.list.push(Command { program: "ip", arguments });
        }
    }

    fn bridge(&mut self, name: &str) {
        // A bridge of our own needs no spanning tree, and so forwards at once.
        self.in_switches(&format!("link add {name} type bridge forward_delay 0 mcast_snooping 0"));
        self.in_switches(&format!("link set {name} up"));
    }

    /// A veth pair from the switches' namespace to another, or within it.
    fn pair(&mut self, near: &str, far: &str, namespace: Option<&str>) {
        let there = namespace.map_or_else(String::new, |namespace| format!(" netns {namespace}"));
        self.in_switches(&format!("link add {near} type veth peer name {far}{there}"));
    }

    fn attach(&mut self, end: &str, bridge: &str) {
        self.in_switches(&format!("link set {end} master {bridge} up"));
    }

    /// Bounds what leaves an interface. Each link has one at either end, so each direction has its own.
    fn shape(&mut self, namespace: Option<&str>, interface: &str, rate: BytesPerSecond) {
        let namespace = namespace.map_or_else(|| self.switches.clone(), str::to_owned);
        let burst = (rate.value() * BURST).max(SMALLEST_BURST).round();
        let bits = (rate.value() * 8.0).round();
        let mut tc = |words: String| self.add("tc", Some(&namespace), &words);
        tc(format!("qdisc add dev {interface} root handle 1: htb default 1"));
        // The quantum is of no consequence with one class; said, because the kernel warns of the one that it would choose.
        let class = format!("rate {bits}bit ceil {bits}bit burst {burst}b cburst {burst}b quantum 60000");
        tc(format!("class add dev {interface} parent 1: classid 1:1 htb {class}"));
        tc(format!("qdisc add dev {interface} parent 1:1 pfifo limit {QUEUE_PACKETS}"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn commands(topology: &Topology) -> Vec<String> {
        let blueprint = Blueprint::new(topology, "t").expect("a lab");
        blueprint.commands.iter().map(Command::to_string).collect()
    }

    fn library(name: &str) -> Topology {
        Topology::library(name).expect("in the library")
    }

    #[test]
    fn two_hosts_are_two_namespaces_at_a_switch_shaped_in_both_directions() {
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
            assert!(rest.any(|one| one == line), "{line}\nis not among, or not in order in\n{}", list.join("\n"));
        }
        assert_eq!(list[0], expected[0]);
        assert_eq!(list.iter().filter(|line| line.contains("class add")).count(), 4);
    }

    #[test]
    fn a_racks_uplink_has_the_rate_that_the_simulators_link_has() {
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
    fn a_slow_device_has_a_quota_and_a_whole_one_has_none() {
        let blueprint = Blueprint::new(&library("lab-hetero"), "t").expect("a lab");
        assert_eq!(blueprint.hosts[0].devices, [LabDevice { number: 0, quota: None }]);
        assert_eq!(blueprint.hosts[1].devices, [LabDevice { number: 1, quota: Some(("device-1".into(), 0.5)) }]);
        assert_eq!(blueprint.hosts[1].namespace, "foretell-lab_t_node-slow");
    }

    #[test]
    fn no_name_is_too_long_for_an_interface() {
        let many = library("lab-4x1g-200m").with_nodes(250).expect("many");
        for line in commands(&many) {
            let names = line.split_whitespace().skip_while(|word| *word != "dev" && *word != "name").skip(1).take(1);
            assert!(names.into_iter().all(|name| name.len() <= 15), "{line}");
        }
    }

    #[test]
    fn what_cannot_be_made_is_refused_with_the_mend() {
        let refused = |text: &str| {
            let topology = Topology::from_yaml(text, "lab.yaml").expect("sound");
            Blueprint::new(&topology, "t").expect_err("cannot be made").to_string()
        };
        let node = "nodes: [{name: n, count: 2, devices: {kind: KIND, count: 1}, nics: {count: NICS, bandwidth: 1Gbit/s}}]\n";
        let lab = |kind: &str, nics: &str| format!("name: x\nlab: true\n{}", node.replace("KIND", kind).replace("NICS", nics));
        assert!(refused(&lab("cpu-core", "2")).contains("several network interfaces"));
        assert!(refused(&lab("a100-sxm-40g", "1")).contains("no cores"));
        assert!(refused(&lab("cpu-core", "1").replace("lab: true\n", "")).contains("`lab: true`"));
        let tree = lab("cpu-core", "1") + "network: {kind: fat-tree, nodes_per_leaf: 1, uplinks: 2}\n";
        assert!(refused(&tree).contains("a `fat-tree` like this"), "a bridge has one uplink");
    }
}
