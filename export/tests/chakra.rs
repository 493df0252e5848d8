//! Reads written traces back with another implementation of the wire format (prost), and runs them
//! with a feeder that follows ASTRA-sim's rules.

mod schema;

use foretell_export::{AstraSim, Chakra, ExportError};
use foretell_models::Model;
use foretell_program::{
    Collective, InstructionId, Layout, Operation, Origin, Overlap, Plan, Program, Rank, RankTimeline, Schedule, ShardedPart,
    Span, StageLayout, Timeline, compile,
};
use foretell_topologies::Topology;
use foretell_units::Picoseconds;
use schema::{COLLECTIVE, COMPUTE, Node, RECEIVE, SEND, read};
use std::collections::{BTreeMap, BTreeSet};

/// `CollectiveCommType` of an all-gather.
const ALL_GATHER: u64 = 2;

fn program(layout: &Layout) -> Program {
    program_of_plan(&Plan::new(layout.clone(), 8))
}

fn program_of_plan(plan: &Plan) -> Program {
    let layout = &plan.layout;
    // Stages with meshes of their own cannot share parameters.
    let tied = layout.stages.is_none();
    let model = format!(
        r#"{{"family": "gpt", "layers": 4, "hidden": 32, "heads": 4, "vocab": 64, "sequence": 16, "tied_embeddings": {tied}}}"#
    );
    let model: Model = serde_json::from_str(&model).expect("a model");
    compile(&model, "gpt", plan).expect("the plan can be laid out").training
}

fn layouts() -> Vec<Layout> {
    use foretell_program::ContextMethod;
    let basic = Layout { micro_batch: 1, ..Layout::default() };
    vec![
        Layout { data: 2, micro_batch: 4, ..basic.clone() },
        Layout { data: 4, zero: 3, ..basic.clone() },
        Layout { data: 2, tensor: 2, sequence_parallel: true, zero: 1, ..basic.clone() },
        Layout { context: 4, context_method: ContextMethod::Ring, ..basic.clone() },
        Layout { data: 2, pipeline: 2, schedule: Schedule::OneForwardOneBackward, ..basic.clone() },
        Layout { tensor: 2, pipeline: 2, virtual_stages: 2, schedule: Schedule::ZeroBubbleV, ..basic.clone() },
        Layout { data: 2, tensor: 2, pipeline: 2, zero: 2, virtual_stages: 2, schedule: Schedule::Interleaved, ..basic.clone() },
        Layout { context: 2, context_method: ContextMethod::Ring, tensor: 2, pipeline: 2, ..basic.clone() },
        // `tensor` shards the samples of all operators.
        Layout { tensor: 2, micro_batch: 2, operators: [("*", ShardedPart::Batch)].into_iter().collect(), ..basic.clone() },
        // Stages with different meshes, and ranks with unequal shares: peers are listed rank by
        // rank.
        Layout {
            stages: Some(vec![
                StageLayout { data: 2, ..StageLayout::default() },
                StageLayout { tensor: 2, ..StageLayout::default() },
            ]),
            pipeline: 2,
            ..basic.clone()
        },
        Layout { data: 2, shares: Some(vec![3, 1]), pipeline: 2, ..basic },
    ]
}

/// Instructions run one after the other. Instruction `n` takes (`n` modulo 3) + 0.4 microseconds.
fn timeline(program: &Program) -> Timeline {
    let rank = |rank| {
        let mut now = Picoseconds::ZERO;
        let spans = (0..program.list_of(Rank(rank)).instructions.len() as u32).map(|instruction| {
            let start = now;
            now += Picoseconds(400_000 + 1_000_000 * u64::from(instruction % 3));
            Span { instruction: InstructionId(instruction), start, end: now }
        });
        let spans = spans.collect();
        RankTimeline { spans, end: now }.into()
    };
    Timeline { origin: Origin::Predicted, ranks: (0..program.mesh.world_size()).map(rank).collect() }
}

fn exported(program: &Program) -> (Vec<Vec<Node>>, BTreeMap<usize, Vec<usize>>) {
    let timeline = timeline(program);
    let chakra = Chakra::new(program, &timeline).expect("the timeline belongs to the Program");
    let traces = (0..program.mesh.world_size()).map(|rank| read(&chakra.trace(Rank(rank)).expect("sound"))).collect();
    let communicators: BTreeMap<String, Vec<usize>> = serde_json::from_str(&chakra.communicators()).expect("JSON");
    (traces, communicators.into_iter().map(|(name, ranks)| (name.parse().expect("a number"), ranks)).collect())
}

#[test]
fn every_dependency_is_written_and_points_backwards() {
    for layout in layouts() {
        for trace in exported(&program(&layout)).0 {
            for (place, node) in trace.iter().enumerate() {
                assert_eq!(node.id, place as u64 + 1);
                assert!(node.data_deps.iter().all(|&before| (1..node.id).contains(&before)), "{node:?}");
                let data: BTreeSet<u64> = node.data_deps.iter().copied().collect();
                assert_eq!(data.len(), node.data_deps.len(), "no dependency is listed twice");
                assert!(
                    node.ctrl_deps.iter().all(|before| data.contains(before)),
                    "every control dependency must be a data dependency"
                );
            }
        }
    }
}

#[test]
fn sizes_and_work_are_those_of_the_program() {
    for layout in layouts() {
        let program = program(&layout);
        let (traces, communicators) = exported(&program);
        for (rank, trace) in traces.iter().enumerate() {
            let (mut communicated, mut flops, mut loaded) = (0u64, 0u64, 0u64);
            for node in trace {
                match node.node_type {
                    COMPUTE if node.number("is_cpu_op") == 1 => loaded += node.number("tensor_size"),
                    COMPUTE => flops += node.number("num_ops"),
                    COLLECTIVE => {
                        let members = &communicators[&node.communicator()];
                        assert!(members.contains(&rank));
                        let size = node.number("comm_size");
                        let is_gather = node.number("comm_type") == ALL_GATHER;
                        communicated += if is_gather { size * members.len() as u64 } else { size };
                    }
                    SEND | RECEIVE => communicated += node.number("comm_size"),
                    other => assert_eq!(other, COLLECTIVE, "a node of another type"),
                }
            }
            let list = program.list_of(Rank(rank));
            let (mut expected, mut expected_flops, mut expected_loaded) = (0, 0, 0);
            for instruction in &list.instructions {
                match *instruction.operation {
                    Operation::Compute { kernel, .. } => expected_flops += kernel.flops().value() as u64,
                    // Counted by the send and by the receive.
                    Operation::Collective { kind: Collective::Shift, bytes, .. } => expected += 2 * bytes.count(),
                    Operation::Collective { bytes, .. } => expected += bytes.count(),
                    Operation::Send { bytes, .. } | Operation::Receive { bytes, .. } => expected += bytes.count(),
                    Operation::Traced { .. } | Operation::Copy { .. } | Operation::Save { .. } | Operation::Write { .. } => {}
                    Operation::Load { .. } => expected_loaded += list.buffer(instruction.writes[0]).bytes.count(),
                }
            }
            assert_eq!((communicated, flops, loaded), (expected, expected_flops, expected_loaded), "rank {rank} of {layout:?}");
        }
    }
}

#[test]
fn every_message_is_received_by_the_rank_it_was_sent_to() {
    for layout in layouts() {
        let (mut sent, mut received) = (BTreeMap::new(), BTreeMap::new());
        for (rank, trace) in exported(&program(&layout)).0.iter().enumerate() {
            for node in trace.iter().filter(|node| [SEND, RECEIVE].contains(&node.node_type)) {
                let [source, destination, tag] = ["comm_src", "comm_dst", "comm_tag"].map(|name| node.number(name));
                let (map, own) = if node.node_type == SEND { (&mut sent, source) } else { (&mut received, destination) };
                assert_eq!(own, rank as u64);
                let before = map.insert((source, destination, tag), node.number("comm_size"));
                assert_eq!(before, None, "two messages with the same tag: {node:?}");
            }
        }
        assert_eq!(sent, received, "{layout:?}");
    }
}

#[test]
fn kernels_rounded_to_microseconds_keep_their_sum() {
    let program = program(&layouts()[0]);
    let exact: f64 = timeline(&program).ranks[0]
        .spans
        .iter()
        .zip(&program.lists[0].instructions)
        .filter(|(_, instruction)| matches!(*instruction.operation, Operation::Compute { .. }))
        .map(|(span, _)| span.duration().0 as f64 / 1e6)
        .sum();
    let trace = &exported(&program).0[0];
    let kernels = trace.iter().filter(|node| node.node_type == COMPUTE && node.number("is_cpu_op") == 0);
    let rounded: u64 = kernels.map(|node| node.duration_micros).sum();
    assert!((rounded as f64 - exact).abs() <= 0.5 + 1e-6, "{rounded} for {exact}");
}

/// Runs traces by ASTRA-sim's rules for order (`HardwareResource.cc`, `Workload.cc`). Returns
/// whether all nodes complete.
///
/// Of the nodes whose dependencies are done, the one with the lowest id comes first. A rank has one
/// kernel, one host operation, and one collective or send at a time. A collective ends when all
/// members have entered it. A send ends by itself, and a receive when its message was sent.
/// Durations do not matter, but the rank `slow` computes only when no other rank can go on.
fn completes(traces: &[Vec<Node>], communicators: &BTreeMap<usize, Vec<usize>>, slow: usize) -> bool {
    let mut done: Vec<Vec<bool>> = traces.iter().map(|trace| vec![false; trace.len() + 1]).collect();
    let mut pending: Vec<Vec<&Node>> = traces.iter().map(|trace| trace.iter().collect()).collect();
    let mut in_flight: Vec<Option<&Node>> = vec![None; traces.len()];
    let mut entered: BTreeMap<(usize, usize), usize> = BTreeMap::new();
    let mut counts: Vec<BTreeMap<usize, usize>> = vec![BTreeMap::new(); traces.len()];
    let mut sent = BTreeSet::new();
    let key = |node: &Node| ["comm_src", "comm_dst", "comm_tag"].map(|name| node.number(name));
    loop {
        let mut progress = false;
        for rank in 0..traces.len() {
            for node in &pending[rank] {
                if !node.data_deps.iter().all(|&before| done[rank][before as usize]) {
                    continue;
                }
                let ends = match node.node_type {
                    COMPUTE => rank != slow || !progress,
                    RECEIVE => sent.contains(&key(node)),
                    SEND if in_flight[rank].is_none() => sent.insert(key(node)),
                    COLLECTIVE if in_flight[rank].is_none() => {
                        let index = counts[rank].entry(node.communicator()).or_default();
                        *entered.entry((node.communicator(), *index)).or_default() += 1;
                        in_flight[rank] = Some(node);
                        progress = true;
                        false
                    }
                    _ => false,
                };
                done[rank][node.id as usize] |= ends;
                progress |= ends;
            }
        }
        for rank in 0..traces.len() {
            if let Some(node) = in_flight[rank] {
                let communicator = node.communicator();
                let index = counts[rank].entry(communicator).or_default();
                if entered[&(communicator, *index)] == communicators[&communicator].len() {
                    *index += 1;
                    in_flight[rank] = None;
                    done[rank][node.id as usize] = true;
                    progress = true;
                }
            }
            pending[rank].retain(|node| !done[rank][node.id as usize]);
        }
        if !progress {
            return pending.iter().all(Vec::is_empty);
        }
    }
}

#[test]
fn one_communication_at_a_time_never_deadlocks() {
    for (layout, passes) in layouts().into_iter().flat_map(|layout| [false, true].map(|passes| (layout.clone(), passes))) {
        let overlap = Overlap { passes, ..Overlap::default() };
        let (traces, communicators) = exported(&program_of_plan(&Plan { overlap, ..Plan::new(layout.clone(), 8) }));
        for slow in [0, traces.len() - 1] {
            assert!(completes(&traces, &communicators, slow), "{layout:?} with a slow rank {slow}, woven: {passes}");
        }
    }
}

#[test]
fn a_timeline_of_another_program_is_an_error() {
    let (one, other) = (program(&layouts()[0]), program(&layouts()[1]));
    assert!(matches!(Chakra::new(&one, &timeline(&other)), Err(ExportError::Unmatched { rank: 0, .. })));
}

#[test]
fn the_dimensions_of_a_cluster_multiply_to_its_ranks() {
    let network = |topology: &Topology, ranks| AstraSim::new(topology, ranks, &|_| 1.0).map(|files| files.network);
    let node = Topology::library("dgx-a100-80g").expect("in the library");
    // 300 GB/s are 279.4 x 2^30 B/s. NVSwitch's latency of 936.25 ns is that of two hops.
    assert_eq!(
        network(&node, 8).as_deref(),
        Ok(
            "topology: [ Switch ]\nnpus_count: [ 8 ]\nbandwidth: [ 279.39677238464355 ]  # 2^30 B/s\nlatency: [ 468.125 ]  # ns\n"
        )
    );
    let cluster = node.clone().with_nodes(40).expect("forty nodes");
    let text = network(&cluster, 320).expect("two leaves of twenty nodes");
    assert!(text.contains("npus_count: [ 8, 20, 2 ]"), "{text}");
    // Interfaces of 25 GB/s, and uplinks without oversubscription.
    assert!(text.contains("23.283064365386963, 23.283064365386963"), "{text}");
    assert!(matches!(network(&cluster, 12), Err(ExportError::Irregular { ranks: 12, .. })), "a node and a half");
    assert!(matches!(network(&cluster, 240), Err(ExportError::Irregular { .. })), "a leaf and a half");
    assert!(matches!(network(&node, 9), Err(ExportError::Irregular { .. })), "more ranks than devices");
    let system = AstraSim::new(&cluster, 320, &|_| 1.0).expect("regular").system;
    let system: serde_json::Value = serde_json::from_str(&system).expect("JSON");
    assert_eq!(system["all-reduce-implementation"].as_array().map(Vec::len), Some(3), "one entry per dimension");
}
