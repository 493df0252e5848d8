//! The layouts that a request allows.

use crate::common::{DGX, GptSizes, distinct_layouts, fixed, own_costs, schedule, splitting_schedule};
use foretell_models::Model;
use foretell_planner::{Request, SearchResult, layouts, plan};
use foretell_program::{Axis, ContextMethod, Layout, Optimizer, Plan, Recompute, Schedule, Stack, compile};
use foretell_simulator::CostModel;
use foretell_units::diagnostic::one_line;
use foretell_units::{Bytes, DataType};

fn gpt(layers: usize, hidden: usize, sequence: usize) -> Model {
    GptSizes { layers, hidden, heads: 4, vocab: 512, sequence, tied_embeddings: false }.model()
}

fn base(global_batch: usize) -> Plan {
    Plan { precision: DataType::Bf16, optimizer: Optimizer::AdamW, ..Plan::new(Layout::default(), global_batch) }
}

#[test]
fn no_more_blocks_are_recomputed_than_must_be() {
    let (model, base) = (gpt(16, 512, 512), base(16));
    let costs = own_costs(&DGX, DataType::Bf16);
    let one_stage = "data=1,tensor=1,pipeline=1".to_owned();
    // The first of two stages holds two micro-batches, the second one.
    let two_stages = format!("data=1,tensor=1,pipeline=2,schedule={},virtual_stages=1", Schedule::default());
    let of_stages = |layers: [usize; 2]| Recompute::FullLayersOfStages(layers.to_vec());
    let cases = [
        (one_stage, Recompute::FullLayers(2), Recompute::FullLayers(6), "full:6"),
        (two_stages, of_stages([3, 0]), of_stages([6, 4]), "full:6+4"),
    ];
    for (shape, few, more, words) in cases {
        let has_stages = matches!(more, Recompute::FullLayersOfStages(_));
        let shape = format!("{shape},zero=0,micro_batch=8,offload=none,bucket=25MiB");
        let request = Request { devices: 2, fixed: fixed(&shape), ..Request::new(&model, "model", &DGX, &costs, &base) };
        let arena = |layout: &Layout| {
            let compiled = compile(&model, "model", &Plan { layout: layout.clone(), ..base.clone() }).expect("it divides");
            compiled.arenas().into_iter().max().expect("there is a stage")
        };
        let all = layouts(&request).expect("the model is sound");
        let arenas: Vec<(&Recompute, Bytes)> = all.iter().map(|layout| (&layout.recompute, arena(layout))).collect();
        let arena_of = |recompute: &Recompute| arenas.iter().find(|(own, _)| *own == recompute).expect("in the space").1;
        assert!(arena_of(&Recompute::Full) < arena_of(&more) && arena_of(&more) < arena_of(&few), "{arenas:?}");
        let found =
            |limit: Bytes| -> SearchResult { plan(&Request { memory_limit: Some(limit), ..request.clone() }).expect("one fits") };
        let step = |planned: &SearchResult| planned.candidates[0].prediction.step_seconds;
        let (none, some) = (found(arena_of(&Recompute::None)), found(arena_of(&more)));
        assert_eq!(none.candidates[0].plan.layout.recompute, Recompute::None);
        assert_eq!(some.candidates[0].plan.layout.recompute, more, "{arenas:?}");
        let full = found(arena_of(&Recompute::Full));
        assert!(step(&none) < step(&some) && step(&some) < step(&full), "{} {} {}", step(&none), step(&some), step(&full));
        for planned in [&none, &some, &full] {
            let counts = (planned.search.layouts, distinct_layouts(planned));
            assert_eq!(counts, (arenas.len(), arenas.len()), "{:?}", planned.search);
        }
        // A fixed recomputation is the only layout. With as many blocks on all stages as on the
        // fullest, the layout needs no less memory and takes longer.
        let with = |words: &str| {
            let request = Request { fixed: fixed(&format!("{shape},recompute={words}")), ..request.clone() };
            let layouts = layouts(&request).expect("the model is sound");
            assert_eq!(layouts.len(), 1);
            (arena(&layouts[0]), step(&plan(&request).expect("it fits")))
        };
        let (uniform, own) = (with("full:6"), with(words));
        assert_eq!((uniform.0, own), (arena_of(&more), (arena_of(&more), step(&some))));
        assert_eq!(own.1 < uniform.1, has_stages, "{} {}", own.1, uniform.1);
    }
}

#[test]
fn recomputation_of_another_number_of_stages_is_refused() {
    let (model, base) = (gpt(6, 64, 64), base(4));
    let layout =
        Layout { pipeline: 3, micro_batch: 1, recompute: Recompute::FullLayersOfStages(vec![1, 0]), ..Layout::default() };
    let text = one_line(&compile(&model, "model", &Plan { layout, ..base }).expect_err("two numbers for three stages"));
    assert!(text.contains("2 numbers of layers for 3 stages"), "{text}");
}

#[test]
fn devices_stay_idle_where_all_of_them_do_not_suit_the_request() {
    let (model, costs) = (gpt(6, 64, 64), CostModel::new(None, &DGX));
    let has = |devices: usize, batch: usize, choices: &str, is_wanted: &dyn Fn(&Layout) -> bool| {
        let base = base(batch);
        let request = Request { devices, fixed: fixed(choices), ..Request::new(&model, "model", &DGX, &costs, &base) };
        layouts(&request).expect("the model is sound").iter().any(is_wanted)
    };
    // Seven devices divide neither the batch nor the heads. Two pipelines of three stages leave two
    // of eight devices idle.
    assert!(has(7, 8, "", &|layout| (layout.data, layout.tensor, layout.pipeline) == (1, 4, 1)));
    assert!(has(8, 2, "pipeline=3", &|layout| (layout.data, layout.tensor, layout.pipeline) == (2, 1, 3)));
    assert!(!has(8, 2, "data=1", &|layout| layout.data != 1));
    assert!(has(8, 2, "data=1,tensor=1,pipeline=3", &|_| true));
}

#[test]
fn weight_gradients_may_be_postponed_in_a_pipeline_that_is_never_full() {
    let (model, costs, base) = (gpt(6, 64, 64), CostModel::new(None, &DGX), base(1));
    let request = Request { devices: 4, fixed: fixed("pipeline=4"), ..Request::new(&model, "model", &DGX, &costs, &base) };
    let all = layouts(&request).expect("the model is sound");
    assert!(all.iter().any(|layout| layout.schedule == splitting_schedule()));
}

#[test]
fn fixed_cuts_rank_orders_and_shares_are_kept() {
    let (model, costs, base) = (gpt(6, 64, 64), CostModel::new(None, &DGX), base(8));
    let with = |choices: &str| {
        let request = Request { fixed: fixed(choices), ..Request::new(&model, "model", &DGX, &costs, &base) };
        let found = layouts(&request).expect("the model is sound");
        assert!(!found.is_empty(), "{choices}");
        assert!(plan(&request).expect("it is one of them").candidates[0].prediction.fits, "{choices}");
        found
    };
    let cuts = with("cuts=2+3+3");
    assert!(cuts.iter().all(|layout| layout.pipeline == 3 && layout.cuts == Some(vec![2, 3, 3])));
    let two_chunks = schedule(|schedule| !schedule.allows(1));
    let chunks = with(&format!("cuts=2+2+2+2,virtual_stages=2,schedule={two_chunks}"));
    assert!(chunks.iter().all(|layout| (layout.pipeline, layout.virtual_stages) == (2, 2)));
    let order = [Axis::Pipeline, Axis::Tensor];
    assert!(with("placement=pipeline+tensor").iter().all(|layout| layout.placement.as_deref() == Some(&order)));
    assert!(with("shares=1+3").iter().all(|layout| layout.data == 2 && layout.shares == Some(vec![1, 3])));
    assert!(with("context=2,context_method=ring").iter().all(|layout| layout.context_method == ContextMethod::Ring));
}

#[test]
fn tensor_divides_key_heads_where_the_stack_does_whatever_the_devices() {
    let model = r#"{"family": "llama", "layers": 4, "hidden": 512, "heads": 16, "kv_heads": 4, "ffn": 1024, "vocab": 512, "sequence": 512}"#;
    let model: Model = serde_json::from_str(model).expect("it is sound");
    let two = DGX.clone().with_nodes(2).expect("there may be two");
    let costs = own_costs(&two, DataType::Bf16);
    for devices in [8, 10] {
        for (stack, most) in [("megatron-core", 4), ("foretell", 8)] {
            let base = Plan { stack: Stack::new(stack), ..base(1) };
            let request = Request { devices, ..Request::new(&model, "model", &two, &costs, &base) };
            let all = layouts(&request).expect("the model is sound");
            let widest = all.iter().map(|layout| layout.tensor).max();
            assert_eq!(widest, Some(most), "{stack} on {devices} devices");
        }
    }
}
