//! Invariants of every simulation, on random Programs.
#![allow(clippy::unwrap_used)]

mod common;

use common::*;
use foretell_program::{Axis, Collective, Group, InstructionId, Operation, Program, Rank};
use foretell_simulator::{Collectives, CostModel, Disturbance, Folding, Options, Simulation, critical_path, simulate};
use foretell_topologies::Topology;
use foretell_units::{Bytes, Picoseconds, Seconds};
use proptest::prelude::*;
use proptest::test_runner::FileFailurePersistence;

/// A random instruction or message.
#[derive(Clone, Copy, Debug)]
enum Draw {
    Compute(usize),
    Reduce(Axis, u64),
    Gather(Axis, u64),
    Forward(u64),
    Backward(u64),
    Load(u64),
}

fn draws() -> impl Strategy<Value = Vec<Draw>> {
    let axis = prop_oneof![Just(Axis::Data), Just(Axis::Tensor)];
    let bytes = 1u64..1_000_000;
    proptest::collection::vec(
        prop_oneof![
            4 => (1usize..1_000_000).prop_map(Draw::Compute),
            1 => (axis.clone(), bytes.clone()).prop_map(|(axis, bytes)| Draw::Reduce(axis, bytes)),
            1 => (axis, bytes.clone()).prop_map(|(axis, bytes)| Draw::Gather(axis, bytes)),
            1 => bytes.clone().prop_map(Draw::Forward),
            1 => bytes.clone().prop_map(Draw::Backward),
            1 => bytes.prop_map(Draw::Load),
        ],
        1..40,
    )
}

/// Builds two stages from the draws, in order. Every receive comes before all later instructions in
/// both stages, so there is no deadlock.
fn drawn(data: usize, tensor: usize, draws: &[Draw]) -> Program {
    let mut stages = [StageBuilder::new(0), StageBuilder::new(1)];
    let mut last: [Vec<InstructionId>; 2] = [Vec::new(), Vec::new()];
    for (index, &draw) in draws.iter().enumerate() {
        let own = index % 2;
        let (stage, after) = (&mut stages[own], &mut last[own]);
        match draw {
            Draw::Compute(elements) => *after = vec![stage.compute(elements, after)],
            Draw::Reduce(axis, bytes) => {
                let id = stage.collective(Collective::AllReduce, Group::along(axis), bytes, after);
                // Later instructions wait for a third of these; the rest overlap.
                if index % 3 == 0 {
                    after.push(id);
                }
            }
            Draw::Gather(axis, bytes) => after.push(stage.collective(Collective::AllGather, Group::along(axis), bytes, after)),
            Draw::Load(bytes) => after.push(stage.load(bytes)),
            Draw::Forward(bytes) | Draw::Backward(bytes) => {
                let from = usize::from(matches!(draw, Draw::Backward(_)));
                let to = 1 - from;
                stages[from].send(to, bytes, &last[from]);
                let received = stages[to].receive(from, bytes, &[]);
                last[to].push(received);
            }
        }
    }
    program(data, tensor, stages.map(StageBuilder::done).into())
}

fn check(program: &Program, costs: &CostModel, simulation: &Simulation, share: f64) -> Result<(), TestCaseError> {
    for rank in 0..program.mesh.world_size() {
        let stage = program.list_of(Rank(rank));
        let timeline = &simulation.timeline.ranks[rank];
        let (mut work, mut busy) = (0, 0);
        let mut last_of_stream = vec![Picoseconds::ZERO; stage.streams.len()];
        for (instruction, span) in stage.instructions.iter().zip(&timeline.spans) {
            prop_assert!(span.start <= span.end && span.end <= timeline.end);
            let last = &mut last_of_stream[instruction.stream.0 as usize];
            prop_assert!(*last <= span.start, "a stream does one thing at a time, in order");
            *last = span.end;
            for after in &instruction.after {
                prop_assert!(timeline.spans[after.0 as usize].end <= span.start);
            }
            if let Operation::Compute { kernel, .. } = *instruction.operation {
                let alone: Picoseconds = costs.kernel_time(&kernel, false, program.precision, 0).median.into();
                prop_assert!(span.duration().0 + 1 >= alone.0, "no kernel is faster than alone");
                work += alone.0;
                busy += span.duration().0;
            }
        }
        prop_assert!(share > 0.0 || busy == work, "with a processor to itself the busy time is the work");
    }
    let total: Picoseconds = simulation.breakdown.total().into();
    prop_assert!(about(total, simulation.step), "the parts sum to the step");
    Ok(())
}

/// Checks that folded ranks have the same spans as without folding.
fn check_folding(
    program: &Program,
    topology: &Topology,
    (share, buffered): (f64, u64),
    collectives: Collectives,
    stragglers: &[(usize, f64)],
) -> Result<(), TestCaseError> {
    let mut costs = ideal(topology);
    costs.parameters_mut(0).communication_share = share;
    costs.buffered = Bytes::new(buffered);
    let stragglers = stragglers.iter().map(|&(rank, times)| (Rank(rank), times)).collect();
    let disturbance = Disturbance { stragglers, ..Disturbance::default() };
    let with = |folding| {
        let options = Options { folding, collectives, disturbance: disturbance.clone(), ..Options::default() };
        simulate(program, topology, &costs, &options).unwrap()
    };
    let (folded, unfolded) = (with(Folding::On), with(Folding::Off));
    prop_assert_eq!(unfolded.simulated_ranks, program.mesh.world_size());
    prop_assert!(folded.simulated_ranks <= unfolded.simulated_ranks);
    for (rank, (one, other)) in folded.timeline.ranks.iter().zip(&unfolded.timeline.ranks).enumerate() {
        // Sums of equal parts and their product round differently. Later instructions then share
        // links for slightly different times.
        let same = |time: Picoseconds, other: Picoseconds| time.0.abs_diff(other.0) <= 1_000 + other.0 / 1_000_000_000;
        for (one, other) in one.spans.iter().zip(&other.spans) {
            prop_assert!(same(one.start, other.start) && same(one.end, other.end), "rank {}: {:?} and {:?}", rank, one, other);
        }
        prop_assert!(same(one.end, other.end));
    }
    prop_assert_eq!(&folded.uncalibrated, &unfolded.uncalibrated);
    Ok(())
}

/// Runs `cases` cases, or `FORETELL_FOLDING_CASES` if set, after the stored regressions.
fn cases(cases: u32) -> ProptestConfig {
    let cases = std::env::var("FORETELL_FOLDING_CASES").ok().and_then(|given| given.parse().ok()).unwrap_or(cases);
    let failed = FileFailurePersistence::Direct("tests/properties.proptest-regressions");
    ProptestConfig { cases, failure_persistence: Some(Box::new(failed)), ..ProptestConfig::default() }
}

proptest! {
    #![proptest_config(cases(200))]

    #[test]
    fn every_simulation_keeps_order_and_conserves_work(
        draws in draws(),
        (data, tensor) in (1usize..4, 1usize..3),
        share in prop_oneof![Just(0.0), Just(0.3), Just(1.0)],
        buffered in prop_oneof![Just(0u64), Just(500_000u64)],
    ) {
        let topology = cluster(3, 4, "nvswitch-1GB/s");
        let mut costs = ideal(&topology);
        costs.parameters_mut(0).communication_share = share;
        costs.buffered = Bytes::new(buffered);
        let program = drawn(data, tensor, &draws);
        let simulation = run(&program, &topology, &costs);
        check(&program, &costs, &simulation, share)?;
        prop_assert_eq!(&simulation, &run(&program, &topology, &costs), "the same input gives the same output");
        let path = critical_path(&simulation.timeline, &program).unwrap();
        prop_assert!(path.segments.windows(2).all(|pair| pair[0].end <= pair[1].start), "{:?}", path.segments);
        let kinds: Seconds = path.by_kind.iter().map(|(_, time)| *time).sum();
        let times = path.by_time.compute + path.by_time.optimizer + path.by_time.communication + path.by_time.data;
        for parts in [kinds, times] {
            prop_assert!(about(simulation.step, parts + path.between), "{parts} and {} of {}", path.between, simulation.step);
        }
        if buffered == 0 {
            prop_assert!(path.segments.windows(2).all(|pair| pair[0].end == pair[1].start), "{:?}", path.segments);
        }
    }

    /// Groups lie within nodes, across them and unevenly in both. Links and processors are shared,
    /// and some fabrics have colliding flows.
    #[test]
    fn folding_does_not_change_spans(
        draws in draws(),
        (data, tensor) in (1usize..7, 1usize..4),
        (nodes, devices) in prop_oneof![Just((1usize, 36usize)), Just((9, 4)), Just((5, 8)), Just((13, 3)), Just((36, 1)), Just((18, 2))],
        share in prop_oneof![Just(0.0), Just(0.3), Just(1.0)],
        buffered in prop_oneof![Just(0u64), Just(500_000u64)],
        collectives in prop_oneof![Just(Collectives::Flow), Just(Collectives::Steps)],
        stragglers in proptest::collection::vec((0usize..36, 1.0f64..2.0), 0..3),
        network in prop_oneof![
            2 => Just("{kind: switch, latency: 10us}"),
            1 => Just("{kind: fat-tree, nodes_per_leaf: 36, latency: 10us}"),
            1 => Just("{kind: fat-tree, nodes_per_leaf: 2, uplinks: 2, latency: 10us}"),
            1 => Just("{kind: fat-tree, nodes_per_leaf: 1, oversubscription: 3, latency: 10us}"),
            1 => Just("{kind: dragonfly, nodes_per_router: 1, routers_per_group: 2, global_links: 9, routing: valiant, latency: 10us}"),
        ],
    ) {
        let topology = cluster_on(network, nodes, devices, "nvswitch-1GB/s");
        check_folding(&drawn(data, tensor, &draws), &topology, (share, buffered), collectives, &stragglers)?;
    }

    /// Meshes with a rotation symmetry: data-parallel ranks on equal nodes, with each node's
    /// devices in one row of the mesh. Only one rank of each orbit is then built.
    #[test]
    fn folding_by_mesh_rotation_does_not_change_spans(
        draws in draws(),
        (data, (tensor, devices)) in (2usize..9, prop_oneof![Just((1, 1)), Just((2, 1)), Just((2, 2)), Just((3, 3)), Just((4, 2)), Just((4, 4))]),
        share in prop_oneof![Just(0.0), Just(0.3), Just(1.0)],
        buffered in prop_oneof![Just(0u64), Just(500_000u64)],
        collectives in prop_oneof![Just(Collectives::Flow), Just(Collectives::Steps)],
        stragglers in prop_oneof![
            3 => Just(Vec::new()),
            1 => proptest::collection::vec((0usize..64, 1.0f64..2.0), 1..3),
        ],
        network in prop_oneof![
            Just("{kind: switch, latency: 10us}"),
            Just("{kind: fat-tree, nodes_per_leaf: 64, latency: 10us}"),
        ],
    ) {
        let topology = cluster_on(network, 64 / devices, devices, "nvswitch-1GB/s");
        check_folding(&drawn(data, tensor, &draws), &topology, (share, buffered), collectives, &stragglers)?;
    }

    #[test]
    fn a_faster_network_never_makes_two_lone_ranks_slower(draws in draws()) {
        // Schedules in general lack this property (Graham 1969). Here each stream has one order and
        // nothing shares a processor.
        let program = drawn(1, 1, &draws);
        let step = |link: &str| {
            let topology = cluster(1, 2, link);
            run(&program, &topology, &ideal(&topology)).step
        };
        let rounding = Picoseconds(1_000_000);
        prop_assert!(step("nvswitch-2GB/s") <= step("nvswitch-1GB/s") + rounding);
    }
}

#[test]
fn equivalent_ranks_are_simulated_once() {
    let draws = [Draw::Compute(1000), Draw::Compute(2000), Draw::Reduce(Axis::Data, 50_000), Draw::Forward(20_000)];
    let ranks = |nodes: usize, data: usize, tensor: usize| {
        let topology = cluster(nodes, 8, "nvswitch-1GB/s");
        run(&drawn(data, tensor, &draws), &topology, &ideal(&topology)).simulated_ranks
    };
    // A stage that fills a node needs one simulated rank.
    assert_eq!([ranks(2, 4, 2), ranks(2, 8, 1), ranks(2, 1, 8)], [2, 2, 2]);
    // A double tree has leaves and inner nodes, so it needs few classes for any number of ranks.
    assert_eq!([ranks(16, 64, 1), ranks(128, 512, 1)], [4, 4]);
    // A stage of six ranks begins inside a node, so its ranks share network interfaces unequally.
    assert!(ranks(2, 3, 2) > 2);
}
