//! Skewed routing of tokens to experts, under a stack that drops none.
#![allow(clippy::unwrap_used)]

use foretell_models::{Kernel, Model};
use foretell_program::{Collective, Layout, Operation, Plan, Program, Rank, Routing, Stack, StageProgram, compile_training};
use foretell_simulator::gpu::RoutingSkew;
use foretell_simulator::{
    CostModel, Folding, Options, Oversubscription, Prediction, Simulation, predict_with, simulate_representatives,
};
use foretell_topologies::Topology;
use foretell_units::DataType;

/// Mixtures whose experts have slots for exactly the tokens of balanced routing.
fn model() -> Model {
    let text = r#"{"family": "moe", "layers": 2, "hidden": 2048, "heads": 16, "ffn": 8192, "vocab": 1024, "sequence": 4096,
                   "experts": 16, "top_k": 2, "capacity_factor": 1.0}"#;
    serde_json::from_str(text).unwrap()
}

fn run(expert: usize, routing: &Routing) -> (Program, Prediction, Simulation) {
    let topology = Topology::library("dgx-h100").unwrap();
    let layout = Layout { data: 8 / expert, expert, micro_batch: 1, ..Layout::default() };
    let mut plan = Plan { precision: DataType::Bf16, stack: Stack::new("megatron-core"), ..Plan::new(layout, 8) };
    plan.workload.routing = routing.clone();
    let model = model();
    let program = compile_training(&model, "model", &plan).unwrap();
    let costs = CostModel::new(None, &topology).with_plan(&topology, &plan, &model).unwrap();
    let options = Options { oversubscription: Oversubscription::Refused, folding: Folding::On, ..Options::default() };
    let (prediction, simulation) = predict_with(&program, &topology, &costs, &options).unwrap();
    let one = simulate_representatives(&program, &costs, |_| 0).unwrap();
    let ratio = one.step.0 as f64 / simulation.step.0 as f64;
    assert!((ratio - 1.0).abs() < 0.001, "a representative takes {ratio} of the step");
    (program, prediction, simulation)
}

/// Returns the time of a rank's instructions with a property.
fn time(program: &Program, simulation: &Simulation, has: impl Fn(&StageProgram, &Operation, &str) -> bool) -> f64 {
    let list = program.list_of(Rank(0));
    let spans = list.instructions.iter().zip(&simulation.timeline.ranks[0].spans);
    let named =
        |instruction: &foretell_program::Instruction| list.names.get(instruction.name as usize).map_or("", |name| &**name);
    let chosen = spans.filter(|(span, _)| has(list, &span.operation, named(span)));
    chosen.map(|(_, span)| span.duration().0 as f64).sum()
}

#[test]
fn the_fullest_rank_decides_the_work_of_experts() {
    let routing = Routing::Zipf(1.0);
    let skew = RoutingSkew::of(&routing, &model()).unwrap();
    let fullest = skew.fullest(2);
    assert!((1.5..4.0).contains(&fullest), "{fullest}");
    let [(program, before, balanced), (_, after, skewed)] = [Routing::Balanced, routing].map(|routing| run(8, &routing));
    let ratio = |has: &dyn Fn(&Operation, &str) -> bool| {
        let [one, other] =
            [&balanced, &skewed].map(|simulation| time(&program, simulation, |_, operation, name| has(operation, name)));
        assert!(one > 0.0);
        other / one
    };
    let is_product = |operation: &Operation, _: &str| match operation {
        Operation::Compute { kernel, .. } => matches!(
            kernel,
            Kernel::ExpertMatmul { .. } | Kernel::ExpertMatmulInputGradient { .. } | Kernel::ExpertMatmulWeightGradient { .. }
        ),
        _ => false,
    };
    let is_all_to_all =
        |operation: &Operation, _: &str| matches!(operation, Operation::Collective { kind: Collective::AllToAll, .. });
    let is_compute = |operation: &Operation| matches!(operation, Operation::Compute { .. });
    for (what, found) in [
        ("products", ratio(&is_product)),
        ("all-to-alls", ratio(&is_all_to_all)),
        (
            "activations",
            ratio(&|operation, name| is_compute(operation) && !is_product(operation, name) && name.contains("experts.act")),
        ),
    ] {
        // Latencies and launches do not grow.
        assert!((0.8..1.05).contains(&(found / fullest)), "{what} take {found} times as long, {fullest} of the rows");
    }
    // All else is as before, also the dispatch of a rank's own tokens.
    for part in ["self_attn", "gate", "lm_head"] {
        let others = ratio(&|operation, name| is_compute(operation) && name.contains(part));
        assert!((others - 1.0).abs() < 1e-3, "{part}: {others}");
    }
    assert!(after.peak_memory_bytes[0] > before.peak_memory_bytes[0]);
}

#[test]
fn nothing_changes_where_each_rank_has_all_experts() {
    let [(.., before, balanced), (.., after, skewed)] = [Routing::Balanced, Routing::Zipf(2.0)].map(|routing| run(1, &routing));
    assert_eq!(balanced.step, skewed.step);
    assert_eq!(before.peak_memory_bytes, after.peak_memory_bytes);
}
