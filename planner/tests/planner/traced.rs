//! Plans under a framework whose steps were traced: the search is brute force over what the
//! framework can run, and says what does not fit.

use foretell_models::{Llama, Model};
use foretell_planner::{PlannerError, Request, plan};
use foretell_program::{Layout, Lora, Plan, Recompute, Stack};
use foretell_simulator::{CostModel, Stop, TracedOutcome, traced_within};
use foretell_topologies::Topology;
use foretell_units::{Bytes, DataType};

fn base(global_batch: usize) -> Plan {
    let mut base = Plan::new(Layout::default(), global_batch);
    base.precision = DataType::Bf16;
    base.optimizer = foretell_program::Optimizer::AdamW;
    base.stack = Stack::new("hf-trainer");
    base.training.lora = Some(Lora { rank: 16, ..Lora::default() });
    base
}

/// Two layers of Llama-3 8B.
fn short_llama() -> Model {
    let Model::Llama(llama) = Model::named("llama3-8b").expect("it is in the zoo") else { unreachable!("it is a Llama") };
    Model::Llama(Llama { layers: 2, sequence: 1024, ..llama })
}

#[test]
fn a_search_under_a_traced_framework_finds_what_brute_force_finds() {
    let (model, topology, base) = (short_llama(), Topology::library("rtx4090-8").expect("in the library"), base(16));
    let costs = CostModel::new(None, &topology).with_plan(&topology, &base, &model).expect("profiles are sound");
    let request =
        Request { top: 3, memory_limit: Some(Bytes::new(12 << 30)), ..Request::new(&model, "llama", &topology, &costs, &base) };
    let planned = plan(&request).expect("adapters fit");
    let limit = Bytes::new(12 << 30);
    let mut steps = Vec::new();
    for data in [1, 2, 4, 8] {
        for micro_batch in [1, 2, 4, 8, 16].into_iter().filter(|size| 16 / data % size == 0 && size * data <= 16) {
            for recompute in [Recompute::None, Recompute::Full] {
                for zero in [0, 3] {
                    let layout = Layout { data, micro_batch, recompute: recompute.clone(), zero, ..Layout::default() };
                    let plan = Plan { layout, ..base.clone() };
                    let outcome = traced_within(&plan, &model, &topology, &costs, Some(limit)).expect("it was traced");
                    if let TracedOutcome::Predicted(traced) = outcome {
                        steps.push(traced.prediction.step_seconds.value());
                    }
                }
            }
        }
    }
    steps.sort_by(f64::total_cmp);
    let found: Vec<f64> = planned.candidates.iter().map(|candidate| candidate.prediction.step_seconds.value()).collect();
    assert!((found[0] / steps[0] - 1.0).abs() < 1e-9, "{found:?} beside {steps:?}");
    assert!(found.windows(2).all(|pair| pair[0] <= pair[1]), "{found:?}");
    assert!(planned.search.gap == 0.0 && planned.search.out_of_memory > 0, "{:?}", planned.search);
    assert!(
        planned.candidates.iter().all(|candidate| candidate.prediction.chance_of_running_out.is_some_and(|chance| chance < 0.5))
    );
}

#[test]
fn a_search_that_is_stopped_has_an_answer_or_says_that_time_was_short() {
    let (model, topology, base) = (short_llama(), Topology::library("rtx4090-8").expect("in the library"), base(64));
    let costs = CostModel::new(None, &topology).with_plan(&topology, &base, &model).expect("profiles are sound");
    let now = || Stop::when(|| true);
    let request = Request { stop: now(), ..Request::new(&model, "llama", &topology, &costs, &base) };
    // It goes on until there is an answer, and proves nothing.
    let planned = plan(&request).expect("a first answer");
    assert!(planned.search.is_cut_off && planned.search.gap.is_infinite() && planned.search.lower_bound_seconds == 0.0);
    let best = plan(&Request::new(&model, "llama", &topology, &costs, &base)).expect("adapters fit");
    assert!(!best.search.is_cut_off && best.search.simulated > planned.search.simulated && best.value <= planned.value);
    let given_up = Request { stop: now(), give_up: now(), ..Request::new(&model, "llama", &topology, &costs, &base) };
    assert!(matches!(plan(&given_up), Err(PlannerError::OutOfTime { .. })));
}

#[test]
fn what_does_not_fit_says_how_much_the_smallest_layout_needs() {
    let (model, topology) = (short_llama(), Topology::library("rtx4090-8").expect("in the library"));
    let base = Plan { training: Default::default(), ..base(64) };
    let costs = CostModel::new(None, &topology).with_plan(&topology, &base, &model).expect("profiles are sound");
    let request = Request {
        fixed: "data=1".parse().expect("well formed"),
        memory_limit: Some(Bytes::new(16 << 30)),
        ..Request::new(&model, "llama", &topology, &costs, &base)
    };
    let Err(PlannerError::OutOfMemory { needed, limit, .. }) = plan(&request) else { unreachable!("all states do not fit") };
    // Parameters, gradients and two moments in single precision.
    assert!(needed > limit && needed.value() > 16.0 * 1.5e9, "{needed}");
}

#[test]
fn deepspeed_is_searched_over_its_stages() {
    let (model, topology) = (short_llama(), Topology::library("rtx4090-8").expect("in the library"));
    let base = Plan { stack: Stack::new("hf-deepspeed"), ..base(16) };
    let costs = CostModel::new(None, &topology).with_plan(&topology, &base, &model).expect("profiles are sound");
    let request = Request {
        top: 200,
        fixed: "data=8,micro_batch=1".parse().expect("well formed"),
        ..Request::new(&model, "llama", &topology, &costs, &base)
    };
    let planned = plan(&request).expect("adapters fit");
    let zeros: std::collections::BTreeSet<usize> =
        planned.candidates.iter().map(|candidate| candidate.plan.layout.zero).collect();
    // Sixteen bits of 8 billion parameters leave a 24 GB card room at stages 1 and 2, or
    // partitioned.
    assert!(zeros.contains(&3) && !zeros.contains(&0), "{zeros:?}");
    let space = planned.search.space.iter().find(|dimension| dimension.name == "zero").expect("it is searched");
    assert_eq!(space.values, "1, 2, 3");
}

#[test]
fn a_simpler_layout_is_no_proof_that_none_is_faster() {
    let (model, topology, base) = (short_llama(), Topology::library("rtx4090-8").expect("in the library"), base(16));
    let costs = CostModel::new(None, &topology).with_plan(&topology, &base, &model).expect("profiles are sound");
    let fastest = Request::new(&model, "llama", &topology, &costs, &base);
    let simple = Request { simplicity_margin: 0.5, ..fastest.clone() };
    let (fastest, simple) = (plan(&fastest).expect("it fits"), plan(&simple).expect("it fits"));
    let ratio = simple.search.best_seconds / fastest.search.best_seconds;
    assert!(ratio > 1.0 && (simple.search.gap - (ratio - 1.0)).abs() < 1e-9, "{ratio} beside {}", simple.search.gap);
    assert!((simple.search.lower_bound_seconds / fastest.search.best_seconds - 1.0).abs() < 1e-9);
}

#[test]
fn the_stages_of_zero_are_those_of_the_framework() {
    let (model, topology) = (short_llama(), Topology::library("rtx4090-8").expect("in the library"));
    for (stack, zero, is_one) in
        [("hf-trainer", 2, false), ("hf-trainer", 3, true), ("hf-deepspeed", 2, true), ("hf-deepspeed", 0, false)]
    {
        let base = Plan { stack: Stack::new(stack), ..base(16) };
        let costs = CostModel::new(None, &topology).with_plan(&topology, &base, &model).expect("profiles are sound");
        let fixed = format!("data=8,zero={zero}").parse().expect("well formed");
        let planned = plan(&Request { fixed, ..Request::new(&model, "llama", &topology, &costs, &base) });
        assert_eq!(planned.is_ok(), is_one, "{stack} with stage {zero}: {:?}", planned.err());
    }
}
