//! Compiled Programs on clusters of the library.
#![allow(clippy::unwrap_used)]

use foretell_models::Model;
use foretell_program::{Layout, Plan, Schedule, compile};
use foretell_simulator::{CostModel, Folding, Options, Oversubscription, critical_path, predict, simulate};
use foretell_topologies::Topology;
use foretell_units::{Picoseconds, Seconds};

fn plan(layout: Layout, global_batch: usize) -> Plan {
    let text = format!("{{\"global_batch\": {global_batch}}}");
    Plan { layout, ..serde_json::from_str(&text).unwrap() }
}

#[test]
fn every_small_layout_of_resnet18_can_be_predicted() {
    let model = Model::named("resnet18").unwrap();
    let topology = Topology::library("hgx-h200").unwrap();
    let costs = CostModel::new(None, &topology);
    let mut foretold = 0;
    for (data, tensor, pipeline) in [(1, 1, 1), (8, 1, 1), (1, 2, 1), (2, 2, 2), (1, 1, 4), (4, 1, 2)] {
        for schedule in Schedule::ALL {
            let virtual_stages = if schedule.allows(1) { 1 } else { 2 };
            let layout = Layout { data, tensor, pipeline, virtual_stages, schedule, micro_batch: 4, ..Layout::default() };
            let Ok(compiled) = compile(&model, "resnet18", &plan(layout, 128)) else { continue };
            let program = &compiled.training;
            let (prediction, simulation) = predict(program, &topology, &costs, Oversubscription::Refused, Folding::On).unwrap();
            assert!(prediction.mfu > 0.0 && prediction.mfu < 1.0, "{data} {tensor} {pipeline}: {prediction:?}");
            let total: Picoseconds = prediction.breakdown_seconds.total().into();
            assert!(total.0.abs_diff(simulation.step.0) < 1000);
            let path = critical_path(&simulation.timeline, program).unwrap();
            assert_eq!(path.segments.first().unwrap().start, Picoseconds::ZERO);
            assert!(prediction.step_seconds > Seconds::ZERO);
            foretold += 1;
        }
    }
    assert!(foretold >= 20, "only {foretold} layouts were compiled");
}

#[test]
fn more_devices_make_a_step_shorter() {
    let model = Model::named("resnet18").unwrap();
    let topology = Topology::library("hgx-h200").unwrap();
    let costs = CostModel::new(None, &topology);
    let step = |data| {
        let layout = Layout { data, micro_batch: 16, ..Layout::default() };
        let compiled = compile(&model, "resnet18", &plan(layout, 128)).unwrap();
        simulate(&compiled.training, &topology, &costs, &Options::default()).unwrap().step
    };
    let steps = [1, 2, 4, 8].map(step);
    assert!(steps.windows(2).all(|pair| pair[1] < pair[0]), "{steps:?}");
    assert!(steps[3].0 * 8 > steps[0].0, "eight devices are at most eight times as fast: {steps:?}");
}

#[test]
fn shorter_bubbles_make_shorter_steps() {
    let model = Model::named("gpt2-xl").unwrap();
    let topology = Topology::library("dgx-a100-80g").unwrap();
    let costs = CostModel::new(None, &topology);
    // 50 blocks: the embedding costs nothing, the head almost as much as three layers. Stages are
    // as equal as blocks allow.
    let step = |schedule: Schedule, virtual_stages: usize| {
        let layout = Layout { pipeline: 8, schedule, virtual_stages, micro_batch: 1, ..Layout::default() };
        let mut plan = plan(layout, 16);
        plan.precision = foretell_units::DataType::Bf16;
        plan.optimizer = foretell_program::Optimizer::AdamW;
        let compiled = compile(&model, "gpt2-xl", &plan).unwrap();
        let (prediction, _) = predict(&compiled.training, &topology, &costs, Oversubscription::Refused, Folding::On).unwrap();
        let most = compiled.arenas().into_iter().map(|arena| arena.value()).fold(0.0, f64::max);
        println!(
            "{schedule} {virtual_stages}: step {}, bubble {}, at most {:.2} GB a rank",
            prediction.step_seconds,
            prediction.breakdown_seconds.bubble,
            most / 1e9
        );
        prediction.step_seconds
    };
    let gpipe = step(Schedule::Gpipe, 1);
    let one = step(Schedule::OneForwardOneBackward, 1);
    let interleaved = step(Schedule::Interleaved, 2);
    let interleaved_more = step(Schedule::Interleaved, 4);
    let h1 = step(Schedule::ZeroBubbleH1, 1);
    let v = step(Schedule::ZeroBubbleV, 2);
    assert!((gpipe.value() / one.value() - 1.0).abs() < 0.02);
    assert!(interleaved < one && interleaved_more < one);
    assert!(h1 < one && v < h1);
}
