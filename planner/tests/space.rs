//! What the space has, and what of it the answers are: blocks of which some are computed again, devices that have nothing to do, and what is fixed that
//! no layout can have.

use foretell_models::{DropoutRate, Gpt, Model};
use foretell_planner::{Fixed, Planned, PlannerError, Request, layouts, plan};
use foretell_program::{Axis, ContextMethod, Layout, Optimizer, Plan, Recompute, Schedule, compile};
use foretell_simulator::{CostModel, Folding, Oversubscription, predict};
use foretell_topologies::Topology;
use foretell_units::{Bytes, DataType, Seconds};
use std::sync::LazyLock;

static DGX: LazyLock<Topology> = LazyLock::new(|| Topology::library("dgx-a100-80g").expect("in the library"));

fn gpt(layers: usize, hidden: usize, sequence: usize) -> Model {
    let (attention_dropout, dropout) = (DropoutRate::NONE, DropoutRate::NONE);
    Model::Gpt(Gpt {
        layers,
        hidden,
        heads: 4,
        ffn: None,
        vocab: 512,
        sequence,
        tied_embeddings: false,
        dropout,
        attention_dropout,
    })
}

fn fixed(text: &str) -> Fixed {
    text.parse().expect("well formed")
}

fn base(global_batch: usize) -> Plan {
    Plan { precision: DataType::Bf16, optimizer: Optimizer::AdamW, ..Plan::new(Layout::default(), global_batch) }
}

#[test]
fn no_more_blocks_are_computed_again_than_must() {
    let (model, base) = (gpt(16, 512, 512), base(16));
    let costs = CostModel::new(None, &DGX).with_stack(&DGX, "foretell", DataType::Bf16).expect("the library knows it");
    let [one, two] = ["data=1,tensor=1,pipeline=1", "data=1,tensor=1,pipeline=2,schedule=1f1b,virtual_stages=1"];
    // The first stage of two holds two micro-batches of its blocks, the last one.
    let of_two = |layers: [usize; 2]| Recompute::FullLayersOfStages(layers.to_vec());
    let cases = [(one, Recompute::FullLayers(2), Recompute::FullLayers(6)), (two, of_two([3, 0]), of_two([6, 4]))];
    for (shape, few, more) in cases {
        let shape = format!("{shape},zero=0,micro_batch=8,offload=none,bucket=25MiB");
        let request = Request { devices: 2, fixed: fixed(&shape), ..Request::new(&model, "model", &DGX, &costs, &base) };
        let all = layouts(&request).expect("the model is sound");
        let of = |layout: &Layout| {
            let compiled = compile(&model, "model", &Plan { layout: layout.clone(), ..base.clone() }).expect("it divides");
            compiled.arenas().into_iter().max().expect("there is a stage")
        };
        let needed: Vec<(&Recompute, Bytes)> = all.iter().map(|layout| (&layout.recompute, of(layout))).collect();
        let of_recompute = |recompute: &Recompute| needed.iter().find(|(own, _)| *own == recompute).expect("in the space").1;
        assert!(of_recompute(&Recompute::Full) < of_recompute(&more) && of_recompute(&more) < of_recompute(&few), "{needed:?}");
        let found =
            |limit: Bytes| -> Planned { plan(&Request { memory_limit: Some(limit), ..request.clone() }).expect("one fits") };
        let step = |planned: &Planned| planned.candidates[0].prediction.step_seconds;
        let (none, some) = (found(of_recompute(&Recompute::None)), found(of_recompute(&more)));
        assert_eq!(none.candidates[0].plan.layout.recompute, Recompute::None);
        assert_eq!(some.candidates[0].plan.layout.recompute, more, "{needed:?}");
        let all = found(of_recompute(&Recompute::Full));
        assert!(step(&none) < step(&some) && step(&some) < step(&all), "{} {} {}", step(&none), step(&some), step(&all));
        // Each layout is counted once.
        for Planned { search, .. } in [&none, &some, &all] {
            let different = search.needless + search.indivisible + search.bounded_out + search.out_of_memory + search.simulated;
            assert_eq!((search.layouts, different), (needed.len(), needed.len()), "{search:?}");
        }
        // The user's word is the only layout there is. In all stages as many as the fullest must needs no less, and takes longer.
        let of_all = |words: &str| {
            let request = Request { fixed: fixed(&format!("{shape},recompute={words}")), ..request.clone() };
            let layouts = layouts(&request).expect("the model is sound");
            assert_eq!(layouts.len(), 1);
            (of(&layouts[0]), step(&plan(&request).expect("it fits")))
        };
        let (uniform, own) = (of_all("full:6"), of_all(if shape.contains("pipeline=2") { "full:6+4" } else { "full:6" }));
        assert_eq!((uniform.0, own), (of_recompute(&more), (of_recompute(&more), step(&some))));
        assert_eq!(own.1 < uniform.1, shape.contains("pipeline=2"), "{} {}", own.1, uniform.1);
    }
}

#[test]
fn of_more_stages_than_there_are_nothing_is_said() {
    let (model, base) = (gpt(6, 64, 64), base(4));
    let layout =
        Layout { pipeline: 3, micro_batch: 1, recompute: Recompute::FullLayersOfStages(vec![1, 0]), ..Layout::default() };
    let said = compile(&model, "model", &Plan { layout, ..base }).expect_err("two numbers of three stages").to_string();
    assert!(said.contains("2 numbers of layers for 3 stages"), "{said}");
}

#[test]
fn some_devices_may_have_nothing_to_do() {
    let (model, costs) = (gpt(6, 64, 64), CostModel::new(None, &DGX));
    let has = |devices: usize, batch: usize, text: &str, is_asked: &dyn Fn(&Layout) -> bool| {
        let base = base(batch);
        let request = Request { devices, fixed: fixed(text), ..Request::new(&model, "model", &DGX, &costs, &base) };
        layouts(&request).expect("the model is sound").iter().any(is_asked)
    };
    // A batch and heads that seven do not divide; a pipeline of three stages on eight devices, where two such have a batch of two.
    assert!(has(7, 8, "", &|layout| (layout.data, layout.tensor, layout.pipeline) == (1, 4, 1)));
    assert!(has(8, 2, "pipeline=3", &|layout| (layout.data, layout.tensor, layout.pipeline) == (2, 1, 3)));
    // What is fixed is so.
    assert!(!has(8, 2, "data=1", &|layout| layout.data != 1));
    assert!(has(8, 2, "data=1,tensor=1,pipeline=3", &|_| true));
    // A pipeline that is never full may leave what no other waits for until later.
    assert!(has(4, 1, "pipeline=4", &|layout| layout.schedule == Schedule::ZeroBubbleH1));
}

#[test]
fn cuts_orders_and_shares_are_as_is_said() {
    let (model, costs, base) = (gpt(6, 64, 64), CostModel::new(None, &DGX), base(8));
    let of = |text: &str| {
        let request = Request { fixed: fixed(text), ..Request::new(&model, "model", &DGX, &costs, &base) };
        let found = layouts(&request).expect("the model is sound");
        assert!(!found.is_empty(), "{text}");
        assert!(plan(&request).expect("it is one of them").candidates[0].prediction.fits, "{text}");
        found
    };
    let cuts = of("cuts=2+3+3");
    assert!(cuts.iter().all(|layout| layout.pipeline == 3 && layout.cuts == Some(vec![2, 3, 3])));
    let chunks = of("cuts=2+2+2+2,virtual_stages=2,schedule=zb-v");
    assert!(chunks.iter().all(|layout| (layout.pipeline, layout.virtual_stages) == (2, 2)));
    let inside = [Axis::Pipeline, Axis::Tensor];
    assert!(of("placement=pipeline+tensor").iter().all(|layout| layout.placement.as_deref() == Some(&inside)));
    assert!(of("shares=1+3").iter().all(|layout| layout.data == 2 && layout.shares == Some(vec![1, 3])));
    assert!(of("context=2,context_method=ring").iter().all(|layout| layout.context_method == ContextMethod::Ring));
}

#[test]
fn what_no_layout_can_have_is_said_as_such() {
    let (model, base, costs) = (gpt(4, 64, 64), base(8), CostModel::new(None, &DGX));
    let refused = |text: &str| -> PlannerError {
        plan(&Request { fixed: fixed(text), ..Request::new(&model, "model", &DGX, &costs, &base) })
            .expect_err("it is to be refused")
    };
    for (text, words) in [
        ("data=4,tensor=4", "what is fixed makes 16 ranks"),
        ("pipeline=8", "a pipeline of 8 chunks is fixed, and the model has 6 blocks to cut it between"),
        ("pipeline=4,virtual_stages=2,schedule=zb-v", "a pipeline of 8 chunks is fixed"),
        ("micro_batch=3", "by what is fixed ranks take 3 samples at a time, which do not divide 8"),
    ] {
        let said = refused(text).to_string();
        assert!(said.contains(words) && said.contains("hint: "), "{text}: {said}");
    }
}

#[test]
fn what_computes_nothing_again_is_returned_once() {
    let (model, costs) = (Model::named("mlp").expect("in the zoo"), CostModel::new(None, &DGX));
    let base = Plan::new(Layout::default(), 64);
    let planned = plan(&Request { devices: 2, top: 8, ..Request::new(&model, "mlp", &DGX, &costs, &base) }).expect("it fits");
    let seen: Vec<(Layout, Seconds)> =
        planned.candidates.iter().map(|one| (one.plan.layout.clone(), one.prediction.step_seconds)).collect();
    let same = |(one, step): &(Layout, Seconds), (other, of_other): &(Layout, Seconds)| {
        step == of_other && Layout { recompute: other.recompute.clone(), ..one.clone() } == *other
    };
    for (place, one) in seen.iter().enumerate() {
        assert!(!seen[..place].iter().any(|other| same(one, other)), "{one:?}");
    }
    assert_eq!(seen.len(), 8);
}

#[test]
fn what_was_found_elsewhere_is_to_be_beaten() {
    let text = "name: two\ndevices:\n  fast: {base: a100-sxm-80g}\n  slow: {base: v100-sxm-32g}\nnodes:\n  \
        - {name: new, count: 1, devices: {kind: fast, count: 2}, link: nvswitch-150GB/s, nics: {count: 1, bandwidth: 10Gbit/s}}\n  \
        - {name: old, count: 1, devices: {kind: slow, count: 2}, link: nvswitch-150GB/s, nics: {count: 1, bandwidth: 10Gbit/s}}\n\
        network: {kind: switch, latency: 5us}\n";
    let topology = Topology::from_yaml(text, "two.yaml").expect("it is sound");
    let (model, base) = (gpt(6, 256, 128), Plan { precision: DataType::Fp16, ..base(16) });
    let costs = CostModel::new(None, &topology).with_stack(&topology, "foretell", DataType::Fp16).expect("the library knows it");
    let request = Request { tolerance: 0.0, devices: 2, ..Request::new(&model, "model", &topology, &costs, &base) };
    let beating = |elsewhere: f64| plan(&Request { must_beat: Some(elsewhere), ..request.clone() }).expect("it is searched");
    // The best is found, whatever it has to beat.
    let found = beating(f64::INFINITY);
    let [best] = &found.candidates[..] else { unreachable!("one was asked for") };
    assert_eq!((best.prediction.step_seconds.value(), found.value), (found.search.best_seconds, found.search.best_seconds));
    let steps = layouts(&request).expect("the model is sound").into_iter().filter_map(|layout| {
        let compiled = compile(&model, "model", &Plan { layout, ..base.clone() }).ok()?;
        let predicted = predict(&compiled.training, &topology, &costs, Oversubscription::Refused, Folding::On).ok()?;
        Some(predicted.0.step_seconds.value())
    });
    assert_eq!(steps.reduce(f64::min), Some(found.value));
    assert_eq!(beating(found.value * 1.001).value, found.value);
    // Nothing beats it.
    let none = beating(found.value * 0.999);
    assert!(none.candidates.is_empty() && none.value == found.value * 0.999 && none.search.gap == 0.0, "{none:?}");
    for Planned { search, .. } in [&found, &none] {
        let different = search.needless + search.indivisible + search.bounded_out + search.out_of_memory + search.simulated;
        assert_eq!(search.layouts, search.alike + different);
    }
    // Beside another answer it counts, and says how much better something in it could be.
    let all = plan(&Request { devices: 4, ..request.clone() }).expect("it fits");
    let beside = all.clone().counting(&none);
    assert_eq!(beside.search.layouts, all.search.layouts + none.search.layouts);
    assert!(beside.search.best_seconds == all.search.best_seconds && beside.value == all.value);
    let least = none.value.min(all.search.lower_bound_seconds);
    assert!((beside.search.lower_bound_seconds - least).abs() <= 1e-12 * least, "{beside:?}");
    assert!((beside.search.gap - (all.value / least - 1.0)).abs() < 1e-9);
}
