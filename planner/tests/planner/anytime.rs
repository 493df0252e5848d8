//! Searches have an answer at any time, improve it around the best layout, and prefer simple ones.

use crate::common::{DGX, GptSizes, fixed, own_costs, short_gpt};
use foretell_models::{Mlp, Model, Resnet, Stem};
use foretell_planner::{Request, SearchResult, lower_bounds, plan};
use foretell_program::{Layout, Plan};
use foretell_simulator::Stop;
use foretell_topologies::Topology;
use foretell_units::{Bytes, DataType};

fn models() -> [Model; 3] {
    let resnet = Resnet { depth: 18, stem: Stem::Small, image: 32, channels: 3, classes: 10, width: 16 };
    [Model::named("gpt2").expect("in the zoo"), Model::Resnet(resnet), short_gpt(8, 256, 8192, true)]
}

/// Plans a model on 16 devices, after `change`.
fn planned(model: &Model, change: impl Fn(&mut Request<'_>)) -> SearchResult {
    let topology = DGX.clone().with_nodes(2).expect("there may be as many");
    let costs = own_costs(&topology, DataType::Bf16);
    let base = Plan { precision: DataType::Bf16, ..Plan::new(Layout::default(), 64) };
    let mut request = Request::new(model, "model", &topology, &costs, &base);
    change(&mut request);
    plan(&request).expect("some layout fits")
}

#[test]
fn a_search_that_is_stopped_at_once_has_a_good_answer() {
    for model in models() {
        // It asks for the end before the first simulation.
        let stopped = planned(&model, |request| request.stop = Stop::when(|| true));
        let whole = planned(&model, |_| {});
        assert!(stopped.search.is_cut_off && !whole.search.is_cut_off);
        assert!(stopped.search.probed > 0 && stopped.search.simulated == 0, "{:?}", stopped.search);
        let (first, best) = (stopped.search.best_seconds, whole.search.best_seconds);
        assert!(first <= 1.35 * best, "{first} s against {best} s");
        // The gap of the stopped search is honest.
        assert!(stopped.search.lower_bound_seconds <= best && stopped.search.gap.is_finite());
    }
}

#[test]
fn neighbours_of_the_answer_may_be_better_than_the_space() {
    let model = Model::Mlp(Mlp { widths: vec![4096; 6] });
    let shape = "data=16,tensor=1,pipeline=1,zero=0,recompute=none,micro_batch=4,offload=none";
    let within = |choices: &str, searches_locally: bool| {
        planned(&model, |request| {
            request.fixed = fixed(&format!("{shape}{choices}"));
            request.searches_locally = searches_locally;
        })
    };
    let (space, around) = (within("", false), within("", true));
    assert!(around.search.best_seconds <= space.search.best_seconds);
    assert!(around.search.lower_bound_seconds <= around.search.best_seconds && around.search.gap >= 0.0);
    assert!(around.search.probed > space.search.probed, "{:?}", around.search);
    // What the user fixes stays.
    let bucket = within(",bucket=25MiB", true).candidates[0].plan.layout.bucket;
    assert_eq!(bucket, Bytes::new(25 << 20));
}

/// The bound of a smaller bucket is larger, since it sends more messages. But less of the last
/// reduction is exposed.
#[test]
fn smaller_buckets_are_tried_around_the_answer() {
    let text = "name: far\ndevices:\n  old: {base: v100-sxm-32g}\nnodes:\n  - {name: node, count: 2, \
                devices: {kind: old, count: 3}, link: nvswitch-300GB/s, nics: {count: 1, bandwidth: 400Gbit/s}}\n\
                network: {kind: fat-tree, oversubscription: 4, latency: 5us}\n";
    let topology = Topology::from_yaml(text, "far.yaml").expect("it is sound");
    let costs = own_costs(&topology, DataType::Fp16);
    let model = GptSizes { layers: 7, hidden: 768, heads: 16, vocab: 50257, sequence: 512, tied_embeddings: false }.model();
    let layout = Layout { bucket: Bytes::new(160 << 20), ..Layout::default() };
    let base = Plan { precision: DataType::Fp16, ..Plan::new(layout, 100) };
    let found = |searches_locally: bool| {
        let fixed = fixed("data=5,tensor=1,pipeline=1,zero=1,micro_batch=20,recompute=none");
        let request = Request { searches_locally, fixed, ..Request::new(&model, "model", &topology, &costs, &base) };
        plan(&request).expect("it fits").search.best_seconds
    };
    let (space, around) = (found(false), found(true));
    assert!(around < space, "{around} s beside {space} s");
}

#[test]
fn a_simpler_layout_is_preferred_within_the_margin() {
    let model = short_gpt(8, 256, 8192, true);
    let with_margin = |margin: f64| {
        planned(&model, |request| {
            request.searches_locally = true;
            request.simplicity_margin = margin;
            request.fixed = fixed("tensor=1");
        })
    };
    let (fastest, simple) = (with_margin(0.0), with_margin(10.0));
    let stages = |planned: &SearchResult| planned.candidates[0].plan.layout.pipeline;
    assert!(simple.search.best_seconds >= fastest.search.best_seconds);
    assert!(simple.search.lower_bound_seconds <= fastest.search.best_seconds, "a known faster layout is below the bound");
    assert!(simple.search.best_seconds <= 11.0 * fastest.search.best_seconds);
    assert_eq!(stages(&simple), 1);
    assert_eq!(simple.candidates[0].plan.layout.zero, 0, "a lower stage of ZeRO is simpler");
}

#[test]
fn headroom_keeps_memory_free() {
    let model = Model::named("gpt2").expect("in the zoo");
    let largest = |planned: &SearchResult| planned.candidates[0].prediction.peak_memory_bytes.iter().copied().max();
    let all = planned(&model, |_| {});
    let held = largest(&all).expect("some stage").value();
    let memory = DGX.device_kinds()[0].memory.value();
    // So much that the fastest layout does not fit any more.
    let headroom = 1.0 - 0.9 * held / memory;
    let less = planned(&model, |request| request.headroom = headroom);
    assert!(largest(&less).expect("some stage").value() <= memory * (1.0 - headroom));
    assert!(less.search.best_seconds >= all.search.best_seconds);
}

#[test]
fn the_statement_counts_what_is_left_out() {
    let model = Model::named("gpt2").expect("in the zoo");
    let search = planned(&model, |_| {}).search;
    let counted: usize = search.space.iter().filter_map(|dimension| dimension.left_out).sum();
    assert_eq!(search.heuristic_exclusions, counted);
    assert!(counted > 0 && search.space.iter().all(|dimension| !dimension.is_covered() || dimension.left_out == Some(0)));
    let is_covered = |name: &str| search.covers.iter().any(|covered| covered == name);
    assert!(is_covered("expert") && !is_covered("bucket") && !is_covered("cuts"), "{:?}", search.covers);
    // On two nodes of eight devices 12 heads allow `tensor` to be 1, 2, 3, 4, 6 or 12. Three of
    // these divide neither the nodes nor the devices.
    let left_out = |name: &str| search.space.iter().find(|dimension| dimension.name == name).expect("it is a dimension").left_out;
    assert_eq!((left_out("tensor"), left_out("bucket"), left_out("expert")), (Some(3), None, Some(0)));
    let fixed_tensor = planned(&model, |request| request.fixed = fixed("tensor=2")).search;
    let tensor = fixed_tensor.space.iter().find(|dimension| dimension.name == "tensor").expect("it is a dimension");
    assert_eq!((tensor.values.as_str(), tensor.left_out), ("fixed", Some(0)));
}

#[test]
fn the_answer_of_the_local_search_is_no_less_than_its_own_bound() {
    let topology = DGX.clone().with_nodes(2).expect("there may be as many");
    let costs = own_costs(&topology, DataType::Bf16);
    let base = Plan { precision: DataType::Bf16, ..Plan::new(Layout::default(), 64) };
    let model = short_gpt(8, 256, 8192, true);
    let request = Request { searches_locally: true, ..Request::new(&model, "model", &topology, &costs, &base) };
    let best = &plan(&request).expect("some layout fits").candidates[0];
    let bounds = lower_bounds(&request, &best.plan.layout).expect("the model is sound").expect("it divides the model");
    assert!(bounds.step <= best.prediction.step_seconds);
}
