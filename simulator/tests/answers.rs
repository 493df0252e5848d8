//! Predictions, and the errors for invalid Programs.
#![allow(clippy::unwrap_used)]

mod common;

use common::*;
use foretell_program::{Axis, Collective, Group, InstructionId};
use foretell_simulator::{
    Folding, Options, Oversubscription, Prediction, SimulationError, Stop, critical_path, predict, predict_with, simulate,
};
use foretell_units::diagnostic::one_line;
use foretell_units::{Picoseconds, Seconds};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

#[test]
fn a_deadlock_names_the_waiting_ranks_and_instructions() {
    let topology = node(2);
    let costs = ideal(&topology);
    let stages = (0..2)
        .map(|stage| {
            let mut builder = StageBuilder::new(stage);
            let receive = builder.receive(1 - stage, 8, &[]);
            builder.send(1 - stage, 8, &[receive]);
            builder.done()
        })
        .collect();
    let error = simulate(&program(1, 1, stages), &topology, &costs, &Options::default()).unwrap_err();
    assert_eq!(
        one_line(&error),
        "deadlock after 0 of 4 instructions: rank 0 in instruction 0 (`receive` of `x`); rank 1 in instruction 0 (`receive` of `x`)"
    );
}

#[test]
fn unmatched_messages_and_unknown_dependencies_are_errors() {
    let topology = node(2);
    let costs = ideal(&topology);
    let check = |stages| simulate(&program(1, 1, stages), &topology, &costs, &Options::default()).unwrap_err();
    let mut sender = StageBuilder::new(0);
    sender.send(1, 8, &[]);
    let sender = sender.done();
    assert!(matches!(check(vec![sender.clone(), StageBuilder::new(1).done()]), SimulationError::Unmatched { .. }));
    let mut receiver = StageBuilder::new(1);
    receiver.receive(0, 9, &[]);
    assert!(matches!(check(vec![sender, receiver.done()]), SimulationError::Unmatched { .. }));
    let mut receiver = StageBuilder::new(1);
    receiver.receive(0, 9, &[]);
    assert!(matches!(check(vec![StageBuilder::new(0).done(), receiver.done()]), SimulationError::Unmatched { .. }));
    let mut waits = StageBuilder::new(0);
    waits.compute(1, &[InstructionId(7)]);
    let error = check(vec![waits.done(), StageBuilder::new(1).done()]);
    assert_eq!(one_line(&error), "stage 0, instruction 0: it depends on instruction 7, which the list does not have");
}

#[test]
fn too_many_ranks_are_refused_or_share_processors() {
    let topology = node(2);
    let costs = ideal(&topology);
    let mut stage = StageBuilder::new(0);
    stage.compute(1_000_000, &[]);
    let program = program(4, 1, vec![stage.done()]);
    let error = simulate(&program, &topology, &costs, &Options::default()).unwrap_err();
    assert_eq!(one_line(&error), "4 ranks need as many devices, and `test` has 2; hint: use more nodes, or oversubscribe");
    let options = Options { oversubscription: Oversubscription::Allowed, ..Options::default() };
    let shared = simulate(&program, &topology, &costs, &options).unwrap();
    assert!(about(shared.step, Picoseconds(2 * kernel(&costs, 1_000_000).0)));
}

/// Three hundred kernels of each of two ranks, with a message after each.
#[test]
fn a_simulation_ends_when_it_is_told_to_stop() {
    let topology = node(2);
    let costs = ideal(&topology);
    let (mut first, mut second) = (StageBuilder::new(0), StageBuilder::new(1));
    for _ in 0..300 {
        let kernel = first.compute(50_000, &[]);
        first.send(1, 60_000, &[kernel]);
        let receive = second.receive(0, 60_000, &[]);
        second.compute(80_000, &[receive]);
    }
    let program = program(1, 1, vec![first.done(), second.done()]);
    let asked = Arc::new(AtomicUsize::new(0));
    let stop_after = |checks: usize| {
        let asked = Arc::clone(&asked);
        Options { stop: Stop::when(move || asked.fetch_add(1, Ordering::Relaxed) + 1 >= checks), ..Options::default() }
    };
    let predicted = |options: &Options| predict_with(&program, &topology, &costs, options).map(|(prediction, _)| prediction);
    assert_eq!(predicted(&stop_after(3)), Err(SimulationError::Interrupted));
    assert_eq!(asked.load(Ordering::Relaxed), 3);
    assert_eq!(predicted(&stop_after(usize::MAX)), predicted(&Options::default()));
}

/// Two stages of 2 x 2 ranks with every sort of instruction.
fn everything() -> foretell_program::Program {
    let (mut first, mut second) = (StageBuilder::new(0), StageBuilder::new(1));
    let data = first.load(100_000);
    let mut gradients = Vec::new();
    for _ in 0..6 {
        let forward = first.compute(50_000, &[data]);
        let reduce = first.collective(Collective::AllReduce, Group::along(Axis::Tensor), 70_000, &[forward]);
        first.send(1, 60_000, &[reduce]);
        let receive = second.receive(0, 60_000, &[]);
        let loss = second.compute(80_000, &[receive]);
        second.send(0, 60_000, &[loss]);
        gradients.push(second.collective(Collective::AllReduce, Group::along(Axis::Data), 90_000, &[loss]));
    }
    for _ in 0..6 {
        let receive = first.receive(1, 60_000, &[]);
        let backward = first.compute(90_000, &[receive]);
        first.collective(Collective::AllReduce, Group::along(Axis::Data), 300_000, &[backward]);
    }
    second.update(20_000, &gradients);
    program(2, 2, vec![first.done(), second.done()])
}

#[test]
fn the_same_input_gives_the_same_output() {
    let topology = cluster(2, 4, "nvswitch-1GB/s");
    let mut costs = ideal(&topology);
    costs.parameters_mut(0).communication_share = 0.4;
    let program = everything();
    let one = run(&program, &topology, &costs);
    let two = run(&program, &topology, &costs);
    assert_eq!(one, two);
    let handles: Vec<_> = (0..2)
        .map(|_| {
            let (program, topology, costs) = (program.clone(), topology.clone(), costs.clone());
            std::thread::spawn(move || run(&program, &topology, &costs))
        })
        .collect();
    for handle in handles {
        assert_eq!(handle.join().unwrap(), one);
    }
}

#[test]
fn a_prediction_has_all_documented_json_fields() {
    let topology = cluster(2, 4, "nvswitch-1GB/s");
    let costs = ideal(&topology);
    let (prediction, simulation) = predict(&everything(), &topology, &costs, Oversubscription::Refused, Folding::On).unwrap();
    assert!(prediction.step_seconds_p10 < prediction.step_seconds && prediction.step_seconds < prediction.step_seconds_p90);
    assert_eq!(Picoseconds::from(prediction.step_seconds), simulation.step);
    assert!(prediction.fits && !prediction.calibrated && prediction.hfu > prediction.mfu && prediction.mfu > 0.0);
    let json = serde_json::to_value(&prediction).unwrap();
    for field in [
        "step_seconds",
        "step_seconds_p10",
        "step_seconds_p90",
        "step_seconds_p05",
        "step_seconds_p95",
        "samples_per_second",
        "model_flops_per_device_per_second",
        "mfu",
        "hfu",
        "events",
        "simulated_ranks",
        "wall_seconds",
    ] {
        assert!(json[field].is_number(), "{field}: {}", json[field]);
    }
    assert!(json["tokens_per_second"].is_null());
    assert_eq!(json["peak_memory_bytes"], serde_json::json!([1 << 20, 1 << 20]));
    for part in ["compute", "exposed_communication", "bubble", "data", "optimizer"] {
        assert!(json["breakdown_seconds"][part].is_number(), "{part}");
    }
    assert_eq!(serde_json::from_value::<foretell_simulator::Prediction>(json).unwrap().events, prediction.events);
}

#[test]
fn the_critical_path_leads_from_start_to_end_without_gaps() {
    let topology = cluster(2, 4, "nvswitch-1GB/s");
    let mut costs = ideal(&topology);
    let program = everything();
    let simulation = run(&program, &topology, &costs);
    let path = critical_path(&simulation.timeline, &program).unwrap();
    assert_eq!(path.segments.first().unwrap().start, Picoseconds::ZERO);
    assert_eq!(path.segments.last().unwrap().end, simulation.step);
    assert!(path.segments.windows(2).all(|pair| pair[0].end == pair[1].start), "{:?}", path.segments);
    assert_eq!(path.between, Seconds::ZERO);
    assert!(path.by_kind.windows(2).all(|pair| pair[0].1 >= pair[1].1));
    // With stream handoffs, the gaps are the handoffs' durations.
    costs.parameters_mut(0).stream_handoff = exactly(Seconds::new(1e-6), costs.parameters(0));
    let simulation = run(&program, &topology, &costs);
    let path = critical_path(&simulation.timeline, &program).unwrap();
    assert!(path.between > Seconds::ZERO && path.between < simulation.step.into());
}

#[test]
fn a_cycle_takes_the_mean_of_its_steps() {
    let topology = node(2);
    let costs = ideal(&topology);
    // An exchange of 3 kB between two ranks with links of 1 GB/s takes 3 us, and its latency.
    let step = |exchanged: Option<u64>| {
        let mut stage = StageBuilder::new(0);
        let computed = stage.compute(1000, &[]);
        exchanged.map(|bytes| stage.collective(Collective::AllReduce, Group::along(Axis::Data), bytes, &[computed]));
        program(2, 1, vec![stage.done()])
    };
    let [plain, short, long] = [None, Some(1), Some(3001)]
        .map(|exchanged| predict(&step(exchanged), &topology, &costs, Oversubscription::Refused, Folding::On).unwrap().0);
    let computing = Seconds::from(kernel(&costs, 1000));
    assert!(about(plain.step_seconds.into(), computing), "{} {computing}", plain.step_seconds);
    let latency = short.step_seconds - computing;
    let exchange = long.step_seconds - computing - latency;
    assert!((exchange.value() - 3e-6).abs() < 2e-9, "{exchange}");
    let cycle = Prediction::of_cycle(vec![(plain.clone(), 3), (long.clone(), 1)]).unwrap();
    let expected = computing + (Seconds::new(3e-6) + latency) / 4.0;
    assert!(about(cycle.step_seconds.into(), expected), "{} {expected}", cycle.step_seconds);
    assert!((cycle.samples_per_second - 8.0 / expected.value()).abs() < 1e-3 * cycle.samples_per_second);
    let parts = cycle.breakdown_seconds;
    assert!(about(parts.exposed_communication.into(), (Seconds::new(3e-6) + latency) / 4.0), "{parts:?}");
    assert_eq!(cycle.cycle.iter().map(|kind| kind.steps).collect::<Vec<_>>(), [3, 1]);
    assert_eq!(Prediction::of_cycle(vec![(long.clone(), 1)]), Some(long));
    assert_eq!(Prediction::of_cycle(Vec::new()), None);
}
