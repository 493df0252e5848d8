//! Programs as the compiler makes them, on clusters of the library.
#![allow(clippy::unwrap_used)]

use foretell_models::Model;
use foretell_program::{Layout, Plan, Schedule, compile};
use foretell_simulator::{CostModel, Options, Oversubscription, critical_path, predict, simulate};
use foretell_topologies::Topology;
use foretell_units::{Picoseconds, Seconds};

fn plan(layout: Layout, global_batch: usize) -> Plan {
    let text = format!("{{\"global_batch\": {global_batch}}}");
    Plan { layout, ..serde_json::from_str(&text).unwrap() }
}

#[test]
fn every_small_layout_of_a_network_can_be_foretold() {
    let model = Model::named("resnet18").unwrap();
    let topology = Topology::library("hgx-h200").unwrap();
    let costs = CostModel::new(None, &topology);
    let mut foretold = 0;
    for (data, tensor, pipeline) in [(1, 1, 1), (8, 1, 1), (1, 2, 1), (2, 2, 2), (1, 1, 4), (4, 1, 2)] {
        for schedule in Schedule::ALL {
            let layout = Layout { data, tensor, pipeline, schedule, micro_batch: 4, ..Layout::default() };
            let Ok(compiled) = compile(&model, "resnet18", &plan(layout, 128)) else { continue };
            let program = &compiled.training;
            let (prediction, simulation) = predict(program, &topology, &costs, Oversubscription::Refused).unwrap();
            assert!(prediction.mfu > 0.0 && prediction.mfu < 1.0, "{data} {tensor} {pipeline}: {prediction:?}");
            let total: Picoseconds = prediction.breakdown_seconds.total().into();
            assert!(total.0.abs_diff(simulation.step.0) < 1000);
            let path = critical_path(&simulation.timeline, program).unwrap();
            assert_eq!(path.segments.first().unwrap().start, Picoseconds::ZERO);
            assert!(prediction.step_seconds > Seconds::ZERO);
            foretold += 1;
        }
    }
    assert!(foretold >= 6, "only {foretold} layouts were compiled");
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
