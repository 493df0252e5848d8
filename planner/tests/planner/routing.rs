//! Skewed routing of tokens to experts: what bounds and searches make of it.

use crate::common::{cases, fixed};
use foretell_models::Model;
use foretell_planner::{Request, SearchResult, lower_bounds, plan};
use foretell_program::{Layout, Plan, Routing, Stack, compile};
use foretell_simulator::{CostModel, Folding, Oversubscription, Prediction, predict};
use foretell_topologies::Topology;
use foretell_units::DataType;
use proptest::prelude::*;

fn mixture([layers, hidden, ffn, experts, top_k]: [usize; 5]) -> Model {
    let text = format!(
        r#"{{"family": "moe", "layers": {layers}, "hidden": {hidden}, "heads": 8, "ffn": {ffn}, "vocab": 8192, "sequence": 1024,
            "experts": {experts}, "top_k": {top_k}}}"#
    );
    serde_json::from_str(&text).expect("it is sound")
}

/// Returns the plan of a run under Megatron-Core, with the costs of its routing.
fn job(model: &Model, topology: &Topology, batch: usize, routing: Routing) -> (Plan, CostModel) {
    let mut base = Plan { precision: DataType::Bf16, stack: Stack::new("megatron-core"), ..Plan::new(Layout::default(), batch) };
    base.workload.routing = routing;
    let costs = CostModel::new(None, topology).with_plan(topology, &base, model).expect("the library knows it");
    (base, costs)
}

fn simulated(model: &Model, topology: &Topology, plan: &Plan, costs: &CostModel) -> Option<Prediction> {
    let compiled = compile(model, "model", plan).ok()?;
    let predicted = predict(&compiled.training, topology, costs, Oversubscription::Refused, Folding::On);
    Some(predicted.expect("it can be simulated").0)
}

#[test]
fn a_search_ranks_layouts_by_the_fullest_rank_of_experts() {
    let topology = Topology::library("dgx-h100").expect("in the library").with_nodes(8).expect("64 devices");
    let model = mixture([8, 4096, 14336, 8, 2]);
    let search = |routing: Routing| -> (SearchResult, CostModel) {
        let (base, costs) = job(&model, &topology, 256, routing);
        let fixed = fixed("pipeline=1,context=1,recompute=none,offload=none");
        let request = Request { fixed, ..Request::new(&model, "model", &topology, &costs, &base) };
        (plan(&request).expect("some layout fits"), costs)
    };
    let (balanced, _) = search(Routing::Balanced);
    let (skewed, costs) = search(Routing::Zipf(1.2));
    let expert = |planned: &SearchResult| planned.candidates[0].plan.layout.expert;
    let of = |planned: &SearchResult| planned.search.best_seconds;
    assert!(of(&skewed) >= of(&balanced) * (1.0 - 1e-9), "{} after {}", of(&skewed), of(&balanced));
    assert!(expert(&skewed) < expert(&balanced) || of(&skewed) > 1.01 * of(&balanced), "{}", expert(&skewed));
    assert!(skewed.search.lower_bound_seconds <= of(&skewed));
    // The best layout of balanced routing is no better than the answer.
    let before = simulated(&model, &topology, &balanced.candidates[0].plan, &costs).expect("it was compiled");
    assert!(before.step_seconds.value() >= of(&skewed) * (1.0 - 1e-9), "{} beside {}", before.step_seconds, of(&skewed));
}

proptest! {
    #![proptest_config(cases(48))]

    /// A skew makes no step shorter and no device emptier, and bounds hold with it.
    #[test]
    fn a_skew_is_never_faster_and_bounds_hold_with_it(
        sizes in proptest::sample::select(vec![[2usize, 64, 64, 8, 2], [2, 1024, 2048, 8, 1], [1, 2048, 512, 16, 4]]),
        (data, tensor, pipeline) in (1usize..3, 1usize..3, 1usize..3),
        expert in proptest::sample::select(vec![1usize, 2, 4, 8]), micro_batch in 1usize..3, zero in 0usize..4,
        spreads_over_tensor in any::<bool>(), sequence_parallel in any::<bool>(), is_zipf in any::<bool>(), tenths in 1u32..20
    ) {
        let topology = Topology::library("dgx-h100").expect("in the library").with_nodes(8).expect("64 devices");
        let model = mixture(sizes);
        let expert_tensor = (spreads_over_tensor && tensor > 1 && expert > 1).then_some(1);
        let mesh = Layout { data, tensor, pipeline, expert, micro_batch, zero, ..Layout::default() };
        let layout = Layout { sequence_parallel, expert_tensor, ..mesh };
        let batch = layout.samples_at_once() * 2;
        let skew = f64::from(tenths) / 10.0;
        let law = |skew| if is_zipf { Routing::Zipf(skew) } else { Routing::Lognormal(skew) };
        let mut last: Option<Prediction> = None;
        // Of two skews, the mean over random orders of the experts is right within this.
        for (routing, slack) in [(Routing::Balanced, 1.0), (law(skew), 1.0), (law(skew + 1.0), 0.998)] {
            let (base, costs) = job(&model, &topology, batch, routing);
            let Some(now) = simulated(&model, &topology, &Plan { layout: layout.clone(), ..base.clone() }, &costs) else { break };
            let request = Request::new(&model, "model", &topology, &costs, &base);
            if let Some(bounds) = lower_bounds(&request, &layout).expect("it is sound") {
                prop_assert!(bounds.step <= now.step_seconds, "{} above {}", bounds.step, now.step_seconds);
            }
            if let Some(before) = last {
                prop_assert!(now.step_seconds >= before.step_seconds * slack, "{} after {}", now.step_seconds, before.step_seconds);
                let fullest = |prediction: &Prediction| prediction.peak_memory_bytes.iter().map(|held| held.value()).fold(0.0, f64::max);
                prop_assert!(fullest(&now) >= fullest(&before) * slack);
            }
            last = Some(now);
        }
    }
}
