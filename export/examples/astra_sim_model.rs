//! Compares Foretell's predictions with ASTRA-sim's model, on the same all-reduces and the same
//! small training steps. The model follows ASTRA-sim's sources
//! (`docs/how-to/compare-with-astra-sim.md`); ASTRA-sim itself does not run. With a folder, the
//! example also writes the traces and configuration files for it.
//!
//! `cargo run --release -p foretell-export --example astra_sim_model [FOLDER]`
#![allow(clippy::unwrap_used)]

#[path = "../tests/schema/mod.rs"]
mod schema;

use foretell_export::{AstraSim, Chakra};
use foretell_models::Model;
use foretell_program::*;
use foretell_simulator::{CostModel, Simulation, simulate};
use foretell_topologies::{LinkClass, Topology};
use foretell_units::{Bytes, DataType, Flops, Seconds};
use schema::{COLLECTIVE, COMPUTE, Node, SEND, read};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::path::PathBuf;
use std::sync::Arc;

/// One switch dimension of ASTRA-sim's analytical network.
struct Network {
    /// Latency of one hop in nanoseconds. A message through a switch takes two hops.
    hop: f64,
    /// Rate of a link in bytes per nanosecond.
    rate: f64,
    /// Delay of each message at its receiver in nanoseconds.
    endpoint: f64,
    /// Rate of a device's memory in bytes per nanosecond.
    memory: f64,
    /// True if the switch receives a whole message before it forwards it. The congestion-aware
    /// network does (with one chunk), the unaware one does not.
    stores: bool,
}

impl Network {
    /// Returns the nanoseconds of a message.
    fn message(&self, bytes: f64) -> f64 {
        let serialisations = if self.stores { 2.0 } else { 1.0 };
        self.endpoint + 2.0 * self.hop + serialisations * bytes / self.rate
    }

    /// Returns the nanoseconds of a collective, given its code and size as in a trace.
    fn collective(&self, code: u64, members: usize, size: f64) -> f64 {
        let (count, steps) = (members as f64, members as f64 - 1.0);
        // A reduction reads two operands and writes one (`PacketBundle.cc`) before the next
        // message.
        let reduction = steps * 3.0 * (size / count) / self.memory;
        match code {
            0 => 2.0 * steps * self.message(size / count) + reduction,
            2 => steps * self.message(size),
            7 => steps * self.message(size / count) + reduction,
            _ => steps * self.message(size / count),
        }
    }
}

fn main() {
    let folder = std::env::args().nth(1).map(PathBuf::from);
    let topology = Topology::library("dgx-a100-80g").unwrap();
    let costs = CostModel::new(None, &topology);
    let device = LinkClass::Device;
    let network = |stores| Network {
        hop: topology.links()[0].latency.value() * 1e9,
        rate: topology.links()[0].bandwidth.value() * costs.links.of(device) / 1e9,
        endpoint: 10.0,
        memory: topology.device_kinds()[0].memory_bandwidth.value() / 1e9,
        stores,
    };
    println!("| all-reduce of 8 | Foretell | ASTRA-sim's model, congestion unaware | aware |\n| ---: | ---: | ---: | ---: |");
    for bytes in [64 << 10, 1 << 20, 16 << 20, 256 << 20, 1u64 << 30] {
        let program = all_reduce(bytes);
        let ours = run(&program, &topology, &costs);
        // The span excludes the step's own overhead.
        let span = &ours.timeline.ranks[0].spans[0];
        let model = |stores| Seconds::new(network(stores).collective(0, 8, bytes as f64) / 1e9);
        println!("| {} | {} | {} | {} |", Bytes::new(bytes), Seconds::from(span.duration()), model(false), model(true));
        write(folder.as_ref(), &format!("all_reduce_{bytes}"), &program, &ours, &topology, &costs);
    }
    let model = r#"{"family": "gpt", "layers": 4, "hidden": 1024, "heads": 16, "vocab": 8192, "sequence": 512}"#;
    let model: Model = serde_json::from_str(model).unwrap();
    println!(
        "\n| step of a small GPT on 8 | Foretell | ASTRA-sim's rules, congestion unaware | aware |\n| --- | ---: | ---: | ---: |"
    );
    for (name, data, tensor, pipeline) in [("data 8", 8, 1, 1), ("tensor 8", 1, 8, 1), ("data 2, tensor 2, pipeline 2", 2, 2, 2)]
    {
        let layout = Layout { data, tensor, pipeline, micro_batch: 2, ..Layout::default() };
        let mut plan = Plan::new(layout, 32);
        plan.precision = DataType::Bf16;
        let program = compile(&model, "gpt", &plan).unwrap().training;
        let ours = run(&program, &topology, &costs);
        let (traces, communicators) = traces(&program, &ours);
        let overhead = costs.parameters(0).step_overhead.median;
        let theirs = |stores| Seconds::new(feed(&traces, &communicators, &network(stores)) / 1e9);
        println!("| {name} | {} | {} | {} |", Seconds::from(ours.step) - overhead, theirs(false), theirs(true));
        write(folder.as_ref(), &format!("gpt_{data}_{tensor}_{pipeline}"), &program, &ours, &topology, &costs);
    }
}

fn run(program: &Program, topology: &Topology, costs: &CostModel) -> Simulation {
    simulate(program, topology, costs, &Default::default()).unwrap()
}

/// Returns a Program of eight ranks with a single all-reduce.
fn all_reduce(bytes: u64) -> Program {
    let mesh = Mesh::new(|axis| if axis == Axis::Data { 8 } else { 1 }, &[]).unwrap();
    let group = GroupId(0);
    let plan = Plan::new(Layout { data: 8, micro_batch: 1, ..Layout::default() }, 8);
    // Taken from a compiled Program, so that all fields are the compiler's.
    let mut program = compile(&Model::named("mlp").unwrap(), "mlp", &plan).unwrap().training;
    let list = &mut program.lists[0];
    let is_reduction =
        |instruction: &&Instruction| matches!(*instruction.operation, Operation::Collective { kind: Collective::AllReduce, .. });
    let mut only = list.instructions.iter().find(is_reduction).unwrap().clone();
    if let Operation::Collective { bytes: size, group: group_id, .. } = Arc::make_mut(&mut only.operation) {
        (*size, *group_id) = (Bytes::new(bytes), group);
    }
    only.after.clear();
    list.groups = vec![Group::along(Axis::Data)];
    (list.streams, only.stream) = (vec![Stream::Group(group)], StreamId(0));
    list.instructions = vec![only];
    Program { mesh, model_flops: Flops::ZERO, hardware_flops: Flops::ZERO, ..program }
}

/// Returns the traces of all ranks, and the size of each communicator.
fn traces(program: &Program, simulation: &Simulation) -> (Vec<Vec<Node>>, BTreeMap<usize, usize>) {
    let chakra = Chakra::new(program, &simulation.timeline).unwrap();
    let traces = (0..program.mesh.world_size()).map(|rank| read(&chakra.trace(Rank(rank)).unwrap())).collect();
    let communicators: BTreeMap<String, Vec<usize>> = serde_json::from_str(&chakra.communicators()).unwrap();
    (traces, communicators.into_iter().map(|(name, ranks)| (name.parse().unwrap(), ranks.len())).collect())
}

/// Writes the traces and the configuration files to a folder, if there is one.
fn write(
    folder: Option<&PathBuf>,
    name: &str,
    program: &Program,
    simulation: &Simulation,
    topology: &Topology,
    costs: &CostModel,
) {
    let Some(folder) = folder.map(|folder| folder.join(name)) else { return };
    std::fs::create_dir_all(&folder).unwrap();
    let chakra = Chakra::new(program, &simulation.timeline).unwrap();
    for rank in 0..program.mesh.world_size() {
        std::fs::write(folder.join(format!("step.{rank}.et")), chakra.trace(Rank(rank)).unwrap()).unwrap();
    }
    let files = AstraSim::new(topology, program.mesh.world_size(), &|class| costs.links.of(class)).unwrap();
    let communicators = chakra.communicators();
    for (file, text) in [
        ("communicators.json", &communicators),
        ("network.yml", &files.network),
        ("system.json", &files.system),
        ("remote_memory.json", &files.remote_memory),
    ] {
        std::fs::write(folder.join(file), text).unwrap();
    }
}

/// Returns the slot that a node occupies while it runs: kernel, host operation or communication. A
/// rank has one of each. Receives occupy none.
fn slot(node: &Node) -> Option<usize> {
    match node.node_type {
        COMPUTE => Some(node.number("is_cpu_op") as usize),
        COLLECTIVE | SEND => Some(2),
        _ => None,
    }
}

/// An event: time in tenths of nanoseconds, rank, node, message. A node ends, or if the rank is
/// [`ARRIVAL`], the message arrives.
type Event = (u64, usize, u64, [u64; 3]);

/// The rank of an event that is the arrival of a message.
const ARRIVAL: usize = usize::MAX;

/// Runs traces by ASTRA-sim's rules. Returns the duration in nanoseconds.
///
/// Of the ready nodes, the one with the lowest id starts first. A rank runs one kernel, one host
/// operation, and one collective or send at a time.
fn feed(traces: &[Vec<Node>], communicators: &BTreeMap<usize, usize>, network: &Network) -> f64 {
    let mut done: Vec<Vec<bool>> = traces.iter().map(|trace| vec![false; trace.len() + 1]).collect();
    let mut pending: Vec<Vec<&Node>> = traces.iter().map(|trace| trace.iter().collect()).collect();
    let mut busy = vec![[false; 3]; traces.len()];
    let mut entered: BTreeMap<(usize, usize), Vec<(usize, u64)>> = BTreeMap::new();
    let mut counts: Vec<BTreeMap<usize, usize>> = vec![BTreeMap::new(); traces.len()];
    // Messages that have arrived, and receives that wait for one.
    let mut arrived: BTreeMap<[u64; 3], bool> = BTreeMap::new();
    let mut waiting: BTreeMap<[u64; 3], (usize, u64)> = BTreeMap::new();
    let mut events: BinaryHeap<Reverse<Event>> = BinaryHeap::new();
    let key = |node: &Node| ["comm_src", "comm_dst", "comm_tag"].map(|name| node.number(name));
    let after = |now: u64, nanoseconds: f64| now + (nanoseconds * 10.0) as u64;
    let mut now = 0;
    loop {
        for rank in 0..traces.len() {
            let mut left = Vec::with_capacity(pending[rank].len());
            for node in std::mem::take(&mut pending[rank]) {
                let is_ready = node.data_deps.iter().all(|&before| done[rank][before as usize]);
                let slot = slot(node);
                if !is_ready || slot.is_some_and(|slot| busy[rank][slot]) {
                    left.push(node);
                    continue;
                }
                if let Some(slot) = slot {
                    busy[rank][slot] = true;
                }
                let no_message = [0; 3];
                match node.node_type {
                    // ASTRA-sim counts a duration of zero as one nanosecond.
                    COMPUTE => {
                        let duration = if node.duration_micros == 0 { 1.0 } else { node.duration_micros as f64 * 1e3 };
                        events.push(Reverse((after(now, duration), rank, node.id, no_message)));
                    }
                    COLLECTIVE => {
                        let communicator = node.communicator();
                        let count_before = counts[rank].entry(communicator).or_default();
                        let members = entered.entry((communicator, *count_before)).or_default();
                        *count_before += 1;
                        members.push((rank, node.id));
                        let count = communicators[&communicator];
                        if members.len() == count {
                            let size = node.number("comm_size") as f64;
                            let end = after(now, network.collective(node.number("comm_type"), count, size));
                            events.extend(members.iter().map(|&(member, id)| Reverse((end, member, id, no_message))));
                        }
                    }
                    SEND => {
                        let end = after(now, network.message(node.number("comm_size") as f64));
                        events.push(Reverse((end, rank, node.id, no_message)));
                        events.push(Reverse((end, ARRIVAL, 0, key(node))));
                    }
                    _ if arrived.contains_key(&key(node)) => events.push(Reverse((now, rank, node.id, no_message))),
                    _ => drop(waiting.insert(key(node), (rank, node.id))),
                }
            }
            pending[rank] = left;
        }
        let Some(Reverse((time, rank, id, message))) = events.pop() else { break };
        now = time;
        let (rank, id) = if rank == ARRIVAL {
            arrived.insert(message, true);
            match waiting.remove(&message) {
                Some(receive) => receive,
                None => continue,
            }
        } else {
            (rank, id)
        };
        done[rank][id as usize] = true;
        if let Some(slot) = slot(&traces[rank][id as usize - 1]) {
            busy[rank][slot] = false;
        }
    }
    assert!(pending.iter().all(Vec::is_empty), "the traces do not run to completion");
    now as f64 / 10.0
}
