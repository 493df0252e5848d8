//! Collectives simulated step by step, compared with closed forms and with flows.
#![allow(clippy::unwrap_used)]

mod common;

use common::*;
use foretell_program::{Axis, Collective, Group, Program, Rank};
use foretell_simulator::{Collectives, CostModel, Disturbance, Folding, Options, Recording, Simulation, simulate};
use foretell_topologies::Topology;
use foretell_units::{DataType, Picoseconds, Seconds};

fn of_one_collective(kind: Collective, ranks: usize, bytes: u64) -> Program {
    let mut stage = StageBuilder::new(0);
    stage.collective(kind, Group::along(Axis::Data), bytes, &[]);
    program(ranks, 1, vec![stage.done()])
}

fn with(program: &Program, topology: &Topology, costs: &CostModel, collectives: Collectives, folding: Folding) -> Simulation {
    simulate(program, topology, costs, &Options { collectives, folding, ..Options::default() }).unwrap()
}

#[test]
fn uncontended_steps_take_their_closed_form() {
    for ranks in [2u64, 3, 8, 64] {
        let topology = node(ranks as usize);
        let mut costs = ideal(&topology);
        costs.parameters_mut(0).exchange_overhead = Seconds::new(6e-6);
        // Latency of a hop, without its data.
        let hop = Seconds::from(
            with(&of_one_collective(Collective::Shift, 2, 1), &topology, &ideal(&topology), Collectives::Flow, Folding::Off).step,
        ) - Seconds::new(1e-9);
        for (kind, steps) in
            [(Collective::AllReduce, 2 * (ranks - 1)), (Collective::ReduceScatter, ranks - 1), (Collective::AllGather, ranks - 1)]
        {
            let bytes = 64_000 * ranks;
            let program = of_one_collective(kind, ranks as usize, bytes);
            let stepped = with(&program, &topology, &costs, Collectives::Steps, Folding::Off);
            // Each message is 64 kB at 1 GB/s.
            let expected = Seconds::new(6e-6) + (hop + Seconds::new(64e-6)) * steps as f64;
            let rounding = steps * 2 + 2;
            assert!(
                stepped.step.0.abs_diff(Picoseconds::from(expected).0) <= rounding,
                "{kind:?} {ranks}: {} {expected}",
                stepped.step
            );
            // The flow uses a tree where that is faster, which it is not for two members.
            if kind != Collective::AllReduce || ranks == 2 {
                let flow = with(&program, &topology, &costs, Collectives::Flow, Folding::Off);
                assert!(stepped.step.0.abs_diff(flow.step.0) <= rounding, "{kind:?} {ranks}: {} {}", stepped.step, flow.step);
            }
            // One event per step and rank, and one per rank for the setup.
            assert_eq!(stepped.events, ranks * steps + ranks, "{kind:?} {ranks}");
            let folded = with(&program, &topology, &costs, Collectives::Steps, Folding::On);
            assert_eq!((folded.step, folded.simulated_ranks, folded.events), (stepped.step, 1, steps + 1), "{kind:?} {ranks}");
        }
    }
}

#[test]
fn rings_between_nodes_use_every_interface_and_fold_to_one_member() {
    let topology = Topology::library("dgx-a100-80g").unwrap().with_nodes(4).unwrap();
    let costs = CostModel::new(None, &topology);
    let program = of_one_collective(Collective::AllReduce, 32, 1 << 30);
    let stepped = with(&program, &topology, &costs, Collectives::Steps, Folding::Off);
    let folded = with(&program, &topology, &costs, Collectives::Steps, Folding::On);
    assert!(about(stepped.step, folded.step), "{} {}", stepped.step, folded.step);
    assert_eq!(folded.simulated_ranks, 1);
    // 62 steps with a message from each of 32 members in each of eight rings.
    assert!(stepped.events >= 8 * 32 * 62);
    // A ring moves at the pace of its slowest hop, as the flow does. A faster hop before it need
    // not wait.
    let flow = with(&program, &topology, &costs, Collectives::Flow, Folding::Off);
    let ratio = stepped.step.0 as f64 / flow.step.0 as f64;
    assert!((0.95..1.05).contains(&ratio), "{ratio}");
}

/// The rule covers NCCL's protocols, the links' measured rates and the ranks' waiting for each
/// other.
#[test]
fn steps_on_gpus_agree_with_the_rule_for_whole_collectives() {
    let topology = Topology::library("dgx-a100-80g").unwrap().with_nodes(4).unwrap();
    let costs = CostModel::new(None, &topology).with_stack(&topology, "megatron-deepspeed", DataType::Fp16).unwrap();
    let ratio = |program: &Program| {
        let [stepped, flow] = [Collectives::Steps, Collectives::Flow]
            .map(|collectives| with(program, &topology, &costs, collectives, Folding::Off).step.0 as f64);
        stepped / flow
    };
    for ranks in [8, 32] {
        for kind in [Collective::AllReduce, Collective::ReduceScatter, Collective::AllGather] {
            for bytes in [1 << 12, 1 << 22, 1 << 30] {
                let ratio = ratio(&of_one_collective(kind, ranks, bytes));
                // Between nodes, eight rings share interfaces, whose rates differ slightly from the
                // rule's.
                let most = if ranks == 8 { 1.001 } else { 1.06 };
                assert!((0.999..most).contains(&ratio), "{kind:?} of {bytes} bytes among {ranks}: {ratio}");
            }
        }
        let mut stage = StageBuilder::new(0);
        for bytes in [1 << 12, 1 << 24, 1 << 28] {
            stage.collective(Collective::AllReduce, Group::along(Axis::Data), bytes, &[]);
        }
        let ratio = ratio(&program(ranks, 1, vec![stage.done()]));
        assert!((0.9..1.1).contains(&ratio), "three sizes among {ranks}: {ratio}");
    }
}

#[test]
fn a_straggler_delays_a_ring_as_it_does_a_flow() {
    // A rank ends once it has the straggler's part, which takes as many messages to go around as in
    // the flow.
    let topology = node(8);
    let costs = ideal(&topology);
    let mut stage = StageBuilder::new(0);
    let work = stage.compute(1_000_000, &[]);
    let reduce = stage.collective(Collective::ReduceScatter, Group::along(Axis::Data), 8_000, &[work]);
    let program = program(8, 1, vec![stage.done()]);
    let late = Disturbance { stragglers: vec![(Rank(3), 2.0)], ..Disturbance::default() };
    let ends = |collectives, folding| -> Vec<Picoseconds> {
        let options = Options { collectives, folding, disturbance: late.clone(), ..Options::default() };
        let simulation = simulate(&program, &topology, &costs, &options).unwrap();
        simulation.timeline.ranks.iter().map(|rank| rank.spans[reduce.0 as usize].end).collect()
    };
    let flow = ends(Collectives::Flow, Folding::Off);
    let stepped = ends(Collectives::Steps, Folding::Off);
    assert!(flow.iter().zip(&stepped).all(|(&flow, &stepped)| about(flow, stepped)), "{flow:?} {stepped:?}");
    assert!(flow[0].0 > 2 * kernel(&costs, 1_000_000).0);
    assert_eq!(ends(Collectives::Steps, Folding::On), stepped);
}

#[test]
fn recording_only_ends_gives_the_same_answer() {
    let topology = node(8);
    let costs = CostModel::new(None, &topology);
    let mut stage = StageBuilder::new(0);
    let work = stage.compute(1_000_000, &[]);
    let more = stage.compute(2_000_000, &[]);
    let reduce = stage.collective(Collective::AllReduce, Group::along(Axis::Data), 8_000_000, &[work]);
    stage.update(1_000_000, &[reduce, more]);
    let program = program(8, 1, vec![stage.done()]);
    let run = |recording| simulate(&program, &topology, &costs, &Options { recording, ..Options::default() }).unwrap();
    let (with, without) = (run(Recording::Spans), run(Recording::Ends));
    assert_eq!((with.step, with.breakdown, with.events), (without.step, without.breakdown, without.events));
    assert!(without.timeline.ranks.iter().all(|rank| rank.spans.is_empty() && rank.end == with.timeline.ranks[0].end));
}
