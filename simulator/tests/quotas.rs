//! Devices with a CPU quota: they run until a period's budget is used up, then pause until the next
//! period.
#![allow(clippy::unwrap_used)]

mod common;

use common::*;
use foretell_program::{Axis, Collective, Group, InstructionId, Operation, Program, Rank};
use foretell_simulator::{CostModel, Folding, Options, Oversubscription, Simulation, predict, simulate};
use foretell_topologies::{QUOTA_PERIOD, Topology};
use foretell_units::{Picoseconds, Seconds};
use proptest::prelude::*;

/// A cluster of nodes with a whole device and nodes with a device under a quota. A relu of 1000
/// elements moves 8 KB and takes a whole device some 10 us.
fn cluster_of(whole: usize, partial: usize, share: f64) -> Topology {
    let device = "architecture: cpu, memory: 1GiB, memory_bandwidth: 1GB/s, peak: {fp32: 1TFLOP/s}";
    let node = |name, kind, count| {
        let nic = "nics: {count: 1, bandwidth: 1GB/s}";
        format!("  - {{name: {name}, count: {count}, devices: {{kind: {kind}, count: 1}}, link: shared-memory, {nic}}}\n")
    };
    let text = format!(
        "name: test\ndevices:\n  whole: {{{device}}}\n  part: {{{device}, cpu_quota: {share}}}\nnodes:\n{}{}\
         network: {{kind: switch, latency: 10us}}\n",
        node("a", "whole", whole),
        node("b", "part", partial),
    );
    Topology::from_yaml(&text, "test.yaml").unwrap()
}

fn kind(topology: &Topology, name: &str) -> usize {
    topology.device_kinds().iter().position(|kind| kind.name == name).unwrap()
}

fn run(program: &Program, topology: &Topology, costs: &CostModel) -> Simulation {
    simulate(program, topology, costs, &Options::default()).unwrap()
}

/// Returns a kernel's duration on a whole device.
fn whole(costs: &CostModel, topology: &Topology, kernel: &foretell_models::Kernel) -> Picoseconds {
    costs.kernel_time(kernel, false, foretell_units::DataType::Fp32, kind(topology, "whole")).median.into()
}

/// Returns the number of elements for which a kernel takes a whole device `milliseconds`.
fn elements(costs: &CostModel, topology: &Topology, milliseconds: f64) -> usize {
    const SOME: usize = 1_000_000;
    let some = Seconds::from(whole(costs, topology, &foretell_models::Kernel::Relu { elements: SOME }));
    (milliseconds * 1e-3 / some.value() * SOME as f64).round() as usize
}

/// Returns a kernel's end by a walk in steps of at most 10 us. `used` is the budget that its device
/// has used in the period of `begin`.
fn slowly(begin: Picoseconds, work: Picoseconds, share: f64, (period, used): &mut (u64, u64)) -> Picoseconds {
    const TICK: u64 = 10_000_000;
    let length = Picoseconds::from(QUOTA_PERIOD).0;
    let budget = (length as f64 * share) as u64;
    let (mut now, mut left) = (begin.0, work.0);
    while left > 0 {
        if now / length != *period {
            (*period, *used) = (now / length, 0);
        }
        let until_period = length - now % length;
        if *used == budget {
            now += until_period;
            continue;
        }
        let step = TICK.min(left).min(until_period).min(budget - *used);
        (now, left, *used) = (now + step, left - step, *used + step);
    }
    Picoseconds(now)
}

#[test]
fn half_of_a_core_runs_for_half_of_each_period() {
    let topology = cluster_of(1, 1, 0.5);
    let costs = ideal(&topology);
    for (kernel_milliseconds, ends) in [(4.0, 4.0), (4.9, 4.9), (8.0, 13.0), (19.9, 34.9), (23.0, 43.0)] {
        let mut stages = [StageBuilder::new(0), StageBuilder::new(1)];
        stages[0].compute(1000, &[]);
        stages[1].compute(elements(&costs, &topology, kernel_milliseconds), &[]);
        let simulation = run(&program(1, 1, stages.map(StageBuilder::done).into()), &topology, &costs);
        let end = Seconds::from(simulation.timeline.ranks[1].end);
        assert!((end.value() - ends * 1e-3).abs() < 1e-6, "{kernel_milliseconds} ms took {end}");
    }
}

#[test]
fn a_device_that_waits_for_others_stays_within_its_quota() {
    let topology = cluster_of(1, 1, 0.5);
    let costs = ideal(&topology);
    let step = |turns: usize, of_first: f64| {
        let mut stages = [StageBuilder::new(0), StageBuilder::new(1)];
        let mut last: Vec<InstructionId> = Vec::new();
        for _ in 0..turns {
            let own = stages[0].compute(elements(&costs, &topology, of_first), &last);
            stages[0].send(1, 8, &[own]);
            let received = stages[1].receive(0, 8, &[]);
            let own = stages[1].compute(elements(&costs, &topology, 2.0), &[received]);
            stages[1].send(0, 8, &[own]);
            last = vec![stages[0].receive(1, 8, &[])];
        }
        let program = program(1, 1, stages.map(StageBuilder::done).into());
        let (prediction, _) = predict(&program, &topology, &costs, Oversubscription::Refused, Folding::On).unwrap();
        prediction.step_seconds.value()
    };
    // In the first case the device runs 2 ms of every 5 ms, within its quota. In the second it
    // wants 2 ms of 3 ms but gets 1.5 ms in the long run.
    assert!((step(10, 3.0) - 50e-3).abs() < 1e-3, "{}", step(10, 3.0));
    let busy = step(50, 1.0);
    assert!((195e-3..205e-3).contains(&busy), "{busy}");
}

/// A random kernel, message or collective on one of the two stages.
#[derive(Clone, Copy, Debug)]
enum Draw {
    Compute(usize),
    Message(u64),
    Reduce(u64),
}

fn drawn(data: usize, draws: &[(bool, Draw)]) -> Program {
    let mut stages = [StageBuilder::new(0), StageBuilder::new(1)];
    let mut last: [Vec<InstructionId>; 2] = [Vec::new(), Vec::new()];
    for &(second, draw) in draws {
        let own = usize::from(second);
        match draw {
            Draw::Compute(elements) => last[own] = vec![stages[own].compute(elements, &last[own])],
            Draw::Message(bytes) => {
                stages[own].send(1 - own, bytes, &last[own]);
                let received = stages[1 - own].receive(own, bytes, &[]);
                last[1 - own].push(received);
            }
            Draw::Reduce(bytes) => {
                let id = stages[own].collective(Collective::AllReduce, Group::along(Axis::Data), bytes, &last[own]);
                last[own].push(id);
            }
        }
    }
    program(data, 1, stages.map(StageBuilder::done).into())
}

fn draws() -> impl Strategy<Value = Vec<(bool, Draw)>> {
    let draw = prop_oneof![
        4 => (1000usize..600_000).prop_map(Draw::Compute),
        2 => (1u64..2_000_000).prop_map(Draw::Message),
        1 => (1u64..2_000_000).prop_map(Draw::Reduce),
    ];
    proptest::collection::vec((any::<bool>(), draw), 1..40)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn kernel_ends_agree_with_a_walk_through_the_periods(draws in draws(), share in prop_oneof![Just(0.25), Just(0.5), Just(0.8)]) {
        let topology = cluster_of(1, 1, share);
        let costs = ideal(&topology);
        let program = drawn(1, &draws);
        let simulation = run(&program, &topology, &costs);
        let mut used = (0, 0);
        for (instruction, span) in program.lists[1].instructions.iter().zip(&simulation.timeline.ranks[1].spans) {
            if let Operation::Compute { kernel, .. } = &*instruction.operation {
                let end = slowly(span.start, whole(&costs, &topology, kernel), share, &mut used);
                prop_assert!(span.end.0.abs_diff(end.0) < 100_000, "{:?} and {:?}", span, end);
            }
        }
    }

    #[test]
    fn folding_does_not_change_ends_under_quotas(draws in draws(), communication in prop_oneof![Just(0.0), Just(0.3)]) {
        let topology = cluster_of(2, 2, 0.5);
        let mut costs = ideal(&topology);
        for kind in 0..costs.kind_count() {
            costs.parameters_mut(kind).communication_share = communication;
        }
        let program = drawn(2, &draws);
        let with = |folding| simulate(&program, &topology, &costs, &Options { folding, ..Options::default() }).unwrap();
        let (folded, unfolded) = (with(Folding::On), with(Folding::Off));
        prop_assert_eq!(unfolded.simulated_ranks, 4);
        for rank in 0..4 {
            let [one, other] = [&folded, &unfolded].map(|simulation| &simulation.timeline.ranks[rank]);
            for (one, other) in one.spans.iter().zip(&other.spans) {
                prop_assert!(one.end.0.abs_diff(other.end.0) < 10_000, "{:?} and {:?}", one, other);
            }
        }
        prop_assert!(folded.timeline.ranks.len() == 4 && program.list_of(Rank(3)).stage == 1);
    }
}
