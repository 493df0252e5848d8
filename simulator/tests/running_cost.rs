//! Price and energy of a step, compared with closed forms.
#![allow(clippy::unwrap_used)]

mod common;

use common::*;
use foretell_program::{Axis, Collective, Group};
use foretell_simulator::{PowerModel, running_cost};
use foretell_topologies::Topology;
use foretell_units::{Joules, Seconds};

fn described(power: &str, price: &str) -> Topology {
    let text = format!(
        "name: test\n\
         devices:\n  one: {{architecture: gpu, memory: 1GiB, memory_bandwidth: 1GB/s, peak: {{fp32: 1TFLOP/s}}{power}}}\n\
         nodes:\n  - {{name: node, count: 3, devices: {{kind: one, count: 2}}, link: nvswitch-1GB/s, nics: {{count: 1, bandwidth: 1GB/s}}{price}}}\n"
    );
    Topology::from_yaml(&text, "test.yaml").unwrap()
}

#[test]
fn energy_is_the_power_of_each_activity_times_its_time() {
    let topology = described(", power: 100W, idle_power: 10W", ", price_per_hour: 36");
    let costs = ideal(&topology);
    let mut stage = StageBuilder::new(0);
    // Bound by memory, with negligible arithmetic.
    let first = stage.compute(10_000_000, &[]);
    stage.collective(Collective::AllReduce, Group::along(Axis::Data), 50_000_000, &[first]);
    let program = program(3, 1, vec![stage.done()]);
    let simulation = run(&program, &topology, &costs);
    let (kernel, step) = (Seconds::from(kernel(&costs, 10_000_000)), Seconds::from(simulation.step));
    let model = PowerModel { arithmetic: 1.0, memory: 0.7, communication: 0.4, idle: 0.9 };
    let cost = running_cost(&program, &topology, &simulation.timeline, &model);
    // Three ranks run on two nodes, and the fourth device's energy does not count.
    assert_eq!((cost.nodes, cost.devices), (2, 3));
    let expected = 3.0 * (70.0 * kernel.value() + 40.0 * (step - kernel).value());
    assert!((cost.step_energy.unwrap().value() - expected).abs() < 1e-6 * expected, "{:?} and not {expected}", cost.step_energy);
    assert_eq!(cost.price_per_hour, Some(72.0));
    assert_eq!(cost.price(Seconds::new(50.0)), Some(1.0));
}

#[test]
fn an_idle_rank_draws_what_idle_devices_draw() {
    let topology = described(", power: 100W", "");
    let costs = ideal(&topology);
    let mut first = StageBuilder::new(0);
    first.compute(10_000_000, &[]);
    let program = program(1, 1, vec![first.done(), StageBuilder::new(1).done()]);
    let simulation = run(&program, &topology, &costs);
    let cost = running_cost(&program, &topology, &simulation.timeline, &PowerModel::default());
    let step = Seconds::from(simulation.step).value();
    let expected = 75.0 * step + 20.0 * step;
    assert!((cost.step_energy.unwrap().value() - expected).abs() < 1e-6 * expected);
}

#[test]
fn unstated_prices_and_powers_give_no_cost() {
    let topology = described("", "");
    let mut stage = StageBuilder::new(0);
    stage.compute(1000, &[]);
    let program = program(6, 1, vec![stage.done()]);
    let simulation = run(&program, &topology, &ideal(&topology));
    let cost = running_cost(&program, &topology, &simulation.timeline, &PowerModel::default());
    assert_eq!((cost.price_per_hour, cost.step_energy), (None, None::<Joules>));
    assert_eq!((cost.unpriced, cost.unpowered), (vec!["node".to_string()], vec!["one".to_string()]));
}

#[test]
fn ranks_that_share_a_device_share_its_power() {
    let topology = described(", power: 100W", "");
    let mut costs = ideal(&topology);
    costs.parameters_mut(0).communication_share = 1.0;
    let mut stage = StageBuilder::new(0);
    stage.compute(10_000_000, &[]);
    let program = program(12, 1, vec![stage.done()]);
    let options =
        foretell_simulator::Options { oversubscription: foretell_simulator::Oversubscription::Allowed, ..Default::default() };
    let simulation = foretell_simulator::simulate(&program, &topology, &costs, &options).unwrap();
    let cost = running_cost(&program, &topology, &simulation.timeline, &PowerModel::default());
    let most = 6.0 * 100.0 * Seconds::from(simulation.step).value();
    assert!(cost.step_energy.unwrap().value() <= most * (1.0 + 1e-9));
    assert_eq!(cost.devices, 6);
}
