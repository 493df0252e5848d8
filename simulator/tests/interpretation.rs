//! Simulated steps of small Programs, compared with closed forms.
#![allow(clippy::unwrap_used)]

mod common;

use common::*;
use foretell_program::{Axis, Collective, Group};
use foretell_simulator::{CostModel, Options, simulate};
use foretell_units::{Bytes, Picoseconds, Seconds};

#[test]
fn a_chain_of_kernels_takes_their_sum() {
    let topology = node(1);
    let mut costs = ideal(&topology);
    let mut stage = StageBuilder::new(0);
    for _ in 0..10 {
        stage.compute(1000, &[]);
    }
    let program = program(1, 1, vec![stage.done()]);
    let one = kernel(&costs, 1000);
    assert_eq!(run(&program, &topology, &costs).step, Picoseconds(10 * one.0));
    // One overhead per instruction and one per step.
    costs.parameters_mut(0).instruction_overhead = exactly(Seconds::new(1e-6), costs.parameters(0));
    costs.parameters_mut(0).step_overhead = exactly(Seconds::new(5e-6), costs.parameters(0));
    let simulation = run(&program, &topology, &costs);
    assert_eq!(simulation.step, Picoseconds(10 * (one.0 + 1_000_000) + 5_000_000));
    assert!(!simulation.calibrated);
    assert_eq!(simulation.uncalibrated, ["relu in fp32 on one"]);
}

#[test]
fn a_handoff_delays_only_streams_that_wait() {
    let topology = node(2);
    let mut costs = ideal(&topology);
    costs.parameters_mut(0).stream_handoff = exactly(Seconds::new(2e-6), costs.parameters(0));
    let mut stage = StageBuilder::new(0);
    let first = stage.compute(10_000, &[]);
    let reduce = stage.collective(Collective::AllReduce, Group::along(Axis::Data), 1000, &[first]);
    let beside = stage.compute(1_000_000, &[]);
    stage.compute(1000, &[reduce]);
    let simulation = run(&program(2, 1, vec![stage.done()]), &topology, &costs);
    let spans = &simulation.timeline.ranks[0].spans;
    assert_eq!(spans[reduce.0 as usize].start, spans[first.0 as usize].end + Picoseconds(2_000_000));
    // The reduction ended long before.
    assert_eq!(spans[3].start, spans[beside.0 as usize].end);
}

#[test]
fn a_stream_takes_the_processor_only_from_a_kernel_that_runs() {
    let topology = node(2);
    let mut costs = ideal(&topology);
    let step = |costs: &CostModel, beside: bool| {
        let mut stage = StageBuilder::new(0);
        let first = stage.compute(10_000, &[]);
        let reduce = stage.collective(Collective::AllReduce, Group::along(Axis::Data), 1000, &[first]);
        if beside {
            stage.compute(1_000_000, &[]);
        } else {
            stage.compute(10_000, &[reduce]);
        }
        run(&program(2, 1, vec![stage.done()]), &topology, costs).step
    };
    let before = [step(&costs, true), step(&costs, false)];
    costs.parameters_mut(0).interruption = Seconds::new(3e-6);
    // One interruption at the collective's start and one at its end.
    assert!(about(step(&costs, true), before[0] + Picoseconds(6_000_000)));
    assert_eq!(step(&costs, false), before[1], "who waits is not interrupted");
}

#[test]
fn a_ring_all_reduce_takes_its_closed_form() {
    for members in [2usize, 4, 8] {
        let topology = node(members);
        let costs = ideal(&topology);
        let bytes = 64_000_000u64;
        let mut stage = StageBuilder::new(0);
        stage.collective(Collective::AllReduce, Group::along(Axis::Data), bytes, &[]);
        let simulation = run(&program(members, 1, vec![stage.done()]), &topology, &costs);
        let n = members as f64;
        let latency = topology.route(foretell_topologies::DeviceId(0), foretell_topologies::DeviceId(1)).unwrap().latency;
        let expected = 2.0 * (n - 1.0) / n * bytes as f64 / 1e9 + 2.0 * (n - 1.0) * latency.value();
        assert!(about(simulation.step, Seconds::new(expected)), "{members}: {} {expected}", simulation.step);
    }
}

#[test]
fn the_halves_of_an_all_reduce_take_half_each() {
    let topology = node(4);
    let costs = ideal(&topology);
    let step = |kinds: &[Collective]| {
        let mut stage = StageBuilder::new(0);
        for &kind in kinds {
            stage.collective(kind, Group::along(Axis::Data), 40_000_000, &[]);
        }
        run(&program(4, 1, vec![stage.done()]), &topology, &costs).step
    };
    assert!(about(step(&[Collective::AllReduce]), step(&[Collective::ReduceScatter, Collective::AllGather])));
}

#[test]
fn a_shift_takes_one_hop_for_any_number_of_members() {
    for members in [2usize, 4, 8] {
        let topology = node(members);
        let costs = ideal(&topology);
        let bytes = 64_000_000u64;
        let mut stage = StageBuilder::new(0);
        stage.collective(Collective::Shift, Group::along(Axis::Data), bytes, &[]);
        let simulation = run(&program(members, 1, vec![stage.done()]), &topology, &costs);
        let latency = topology.route(foretell_topologies::DeviceId(0), foretell_topologies::DeviceId(1)).unwrap().latency;
        let expected = Seconds::new(bytes as f64 / 1e9 + latency.value());
        assert!(about(simulation.step, expected), "{members}: {} {expected}", simulation.step);
    }
}

#[test]
fn small_all_reduces_of_many_ranks_use_trees() {
    let topology = node(32);
    let costs = ideal(&topology);
    let one_small_sum = || {
        let mut stage = StageBuilder::new(0);
        stage.collective(Collective::AllReduce, Group::along(Axis::Data), 8, &[]);
        stage.done()
    };
    let step: Seconds = run(&program(32, 1, vec![one_small_sum()]), &topology, &costs).step.into();
    let hop = 936.25e-9;
    assert!((step.value() - 10.0 * hop).abs() < 1e-7, "{step}");
    // Our transport between CPUs sums along rings alone.
    let mut without = costs;
    without.parameters_mut(0).has_trees = false;
    let step: Seconds = run(&program(32, 1, vec![one_small_sum()]), &topology, &without).step.into();
    assert!((step.value() - 62.0 * hop).abs() < 1e-7, "{step}");
}

#[test]
fn kernels_and_communication_overlap() {
    let topology = node(2);
    let costs = ideal(&topology);
    let mut stage = StageBuilder::new(0);
    let first = stage.compute(1000, &[]);
    stage.collective(Collective::AllReduce, Group::along(Axis::Data), 10_000_000, &[first]);
    stage.compute(100_000_000, &[]);
    let simulation = run(&program(2, 1, vec![stage.done()]), &topology, &costs);
    // The reduction takes 10 ms, the kernel beside it a second.
    assert_eq!(simulation.step, kernel(&costs, 1000) + kernel(&costs, 100_000_000));
    assert_eq!(simulation.breakdown.exposed_communication, Seconds::ZERO);
}

#[test]
fn sharing_a_processor_slows_both() {
    let topology = node(2);
    let mut costs = ideal(&topology);
    costs.parameters_mut(0).communication_share = 1.0;
    let mut stage = StageBuilder::new(0);
    stage.collective(Collective::AllReduce, Group::along(Axis::Data), 10_000_000, &[]);
    stage.compute(10_000_000, &[]);
    let simulation = run(&program(2, 1, vec![stage.done()]), &topology, &costs);
    let spans = &simulation.timeline.ranks[0].spans;
    let latency = Picoseconds(2 * 936_250);
    let alone = kernel(&costs, 10_000_000);
    // The flow needs 10 ms of processor and gets half of the processor. The kernel ends when both
    // have had their processor time.
    assert!(about(spans[0].end, Picoseconds(20_000_000_000) + latency), "{}", spans[0].end);
    assert!(about(spans[1].end, alone + Picoseconds(10_000_000_000)), "{} {alone}", spans[1].end);
    // With a third of the processor the flow runs as if alone, and the kernel pays for it.
    costs.parameters_mut(0).communication_share = 1.0 / 3.0;
    let mut stage = StageBuilder::new(0);
    stage.collective(Collective::AllReduce, Group::along(Axis::Data), 10_000_000, &[]);
    stage.compute(10_000_000, &[]);
    let simulation = run(&program(2, 1, vec![stage.done()]), &topology, &costs);
    let spans = &simulation.timeline.ranks[0].spans;
    assert!(about(spans[0].end, Picoseconds(10_000_000_000) + latency), "{}", spans[0].end);
    assert!(about(spans[1].end, alone + Picoseconds(3_333_333_333)), "{} {alone}", spans[1].end);
}

#[test]
fn two_groups_on_one_link_take_twice_as_long() {
    // The members of a data group are on different nodes, each with one network interface.
    let topology = cluster(2, 2, "nvswitch-1GB/s");
    let costs = ideal(&topology);
    let mut stage = StageBuilder::new(0);
    stage.collective(Collective::AllReduce, Group::along(Axis::Data), 100_000_000, &[]);
    let stage = stage.done();
    let latency = Picoseconds(2 * 10_000_000);
    let both = run(&program(2, 2, vec![stage.clone()]), &topology, &costs).step;
    assert!(about(both, Picoseconds(200_000_000_000) + latency), "{both}");
    let topology = cluster(2, 1, "nvswitch-1GB/s");
    let one = run(&program(2, 1, vec![stage]), &topology, &ideal(&topology)).step;
    assert!(about(one, Picoseconds(100_000_000_000) + latency), "{one}");
}

#[test]
fn only_unbuffered_messages_wait_for_the_receiver() {
    let topology = node(2);
    let mut costs = ideal(&topology);
    let build = || {
        let mut first = StageBuilder::new(0);
        let forward = first.compute(1000, &[]);
        let send = first.send(1, 1000, &[forward]);
        first.compute(1000, &[send]);
        let mut second = StageBuilder::new(1);
        let busy = second.compute(1_000_000, &[]);
        let receive = second.receive(0, 1000, &[busy]);
        second.compute(1000, &[receive]);
        program(1, 1, vec![first.done(), second.done()])
    };
    let wire = Picoseconds(936_250 + 1_000_000);
    let waiting = run(&build(), &topology, &costs);
    let (small, large) = (kernel(&costs, 1000), kernel(&costs, 1_000_000));
    assert_eq!(waiting.timeline.ranks[0].spans[1].end, large + wire);
    assert_eq!(waiting.step, large + wire + small);
    costs.buffered = Bytes::new(4096);
    let ahead = run(&build(), &topology, &costs);
    assert_eq!(ahead.timeline.ranks[0].spans[1].end, small + wire);
    assert_eq!(ahead.timeline.ranks[1].spans[1].end, large, "the message is already there");
}

#[test]
fn a_full_buffer_holds_the_sender_back() {
    let topology = node(2);
    let mut costs = ideal(&topology);
    costs.buffered = Bytes::new(2000);
    let mut first = StageBuilder::new(0);
    let mut second = StageBuilder::new(1);
    let busy = second.compute(1_000_000, &[]);
    for _ in 0..3 {
        first.send(1, 1000, &[]);
        second.receive(0, 1000, &[busy]);
    }
    let simulation = run(&program(1, 1, vec![first.done(), second.done()]), &topology, &costs);
    let sends = &simulation.timeline.ranks[0].spans;
    let busy = kernel(&costs, 1_000_000);
    assert!(sends[1].end < busy && sends[2].end > busy, "{sends:?}");
}

#[test]
fn a_pipeline_of_two_stages_has_its_bubble() {
    let topology = node(2);
    let costs = ideal(&topology);
    let micro_batches = 4;
    let (mut first, mut second) = (StageBuilder::new(0), StageBuilder::new(1));
    for _ in 0..micro_batches {
        let forward = first.compute(1_000_000, &[]);
        first.send(1, 1000, &[forward]);
        let receive = second.receive(0, 1000, &[]);
        second.compute(1_000_000, &[receive]);
    }
    let simulation = run(&program(1, 1, vec![first.done(), second.done()]), &topology, &costs);
    let pass = kernel(&costs, 1_000_000);
    let wire = Picoseconds(936_250 + 1_000_000);
    assert_eq!(simulation.step, Picoseconds((micro_batches + 1) * pass.0) + wire);
    let breakdown = simulation.breakdown;
    assert!(about(Picoseconds::from(breakdown.bubble), pass), "{breakdown:?}");
    assert!(about(Picoseconds::from(breakdown.exposed_communication), wire));
    assert!(about(Picoseconds::from(breakdown.total()), simulation.step));
}

#[test]
fn groups_across_stages_meet() {
    let topology = node(3);
    let costs = ideal(&topology);
    let stages = (0..3)
        .map(|stage| {
            let mut builder = StageBuilder::new(stage);
            let compute = builder.compute(1_000_000 * (stage + 1), &[]);
            if stage != 1 {
                builder.collective(Collective::AllReduce, Group::across(vec![0, 2]), 1_000_000, &[compute]);
            }
            builder.done()
        })
        .collect();
    let simulation = run(&program(1, 1, stages), &topology, &costs);
    let spans = |rank: usize| simulation.timeline.ranks[rank].spans.clone();
    assert_eq!(spans(0)[1].end, spans(2)[1].end);
    assert!(about(spans(2)[1].duration(), Picoseconds(1_000_000_000 + 2 * 936_250)));
    let mut lonely = StageBuilder::new(0);
    lonely.collective(Collective::AllReduce, Group::across(vec![0, 5]), 8, &[]);
    let broken = program(1, 1, vec![lonely.done()]);
    assert!(simulate(&broken, &topology, &costs, &Options::default()).is_err());
}
