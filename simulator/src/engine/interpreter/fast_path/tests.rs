//! Compares the fast path with the interpreter event by event.

use crate::cost::{CostModel, Quantile};
use crate::engine::{FastPath, Recording, Runnable, Scenario, interpret};
use crate::equivalence::{Folding, lower};
use crate::lowering::Oversubscription;
use crate::network::Collectives;
use foretell_models::Model;
use foretell_program::{Plan, compile_training};
use foretell_topologies::Topology;

/// The programs have handoffs or none, hosts that launch ahead or do not, folded ranks or every
/// rank, and kernels with or without communication beside them.
#[test]
fn the_fast_path_agrees_with_running_event_by_event() {
    let model = r#"{"family": "gpt", "layers": 8, "hidden": 512, "heads": 8, "vocab": 8192, "sequence": 256}"#;
    let model: Model = serde_json::from_str(model).expect("a model");
    let layouts = [
        r#""data": 2, "tensor": 8, "pipeline": 2, "micro_batch": 1, "zero": 1, "sequence_parallel": true"#,
        r#""tensor": 8, "pipeline": 4, "micro_batch": 2, "schedule": "interleaved", "virtual_stages": 2, "recompute": "full""#,
        r#""data": 8, "tensor": 2, "pipeline": 2, "micro_batch": 1, "schedule": "zb-h1""#,
        r#""data": 32, "micro_batch": 1, "zero": 3"#,
        r#""tensor": 4, "micro_batch": 8"#,
    ];
    let mut runs_ahead = 0;
    for (layout, stack) in layouts.iter().flat_map(|layout| ["foretell", "megatron-core"].map(|stack| (layout, stack))) {
        let text = format!(
            r#"{{"global_batch": 32, "precision": "bf16", "optimizer": "adam", "stack": "{stack}", "layout": {{{layout}}}}}"#
        );
        let plan: Plan = serde_json::from_str(&text).expect("a plan");
        let program = compile_training(&model, "m", &plan).expect("it can be laid out");
        let topology = Topology::library("dgx-h100").expect("in the library").with_nodes(4).expect("four nodes");
        let plain = CostModel::new(None, &topology);
        let stacked = plain.clone().with_stack(&topology, plan.stack.name(), plan.unstated_format()).expect("a known stack");
        for (costs, folding) in [(&plain, Folding::On), (&stacked, Folding::On), (&plain, Folding::Off)] {
            let modes = (Oversubscription::Refused, Collectives::Flow);
            let lowered = lower(&program, &topology, costs, modes, folding, &[]).expect("it fits");
            let runnable = Runnable::new(lowered);
            let paces: Vec<f64> = (0..program.mesh.world_size()).map(|rank| 1.0 + 0.01 * (rank % 3) as f64).collect();
            let paces = if folding == Folding::On { Vec::new() } else { paces };
            let run = |fast_path| {
                let recording = Recording::Spans;
                let scenario =
                    Scenario { quantile: Quantile::P90, recording, paces: paces.clone(), fast_path, ..Scenario::default() };
                interpret(&runnable, &scenario).expect("it ends")
            };
            let (fast, each) = (run(FastPath::On), run(FastPath::Off));
            // `assert_eq` would print both timelines.
            assert!(fast.timeline == each.timeline, "{layout} of {stack}, folding {folding:?}");
            assert_eq!(fast.breakdowns, each.breakdowns);
            runs_ahead += u32::from(fast.queue_events < each.queue_events);
        }
    }
    assert!(runs_ahead > 10, "the fast path was taken in only {runs_ahead} runs");
}
