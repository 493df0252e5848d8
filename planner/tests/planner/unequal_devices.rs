//! Searches on devices of several kinds.

use crate::common::{GptSizes, assert_every_layout_is_counted_once, distinct_layouts, fixed, own_costs, simulated_step};
use foretell_models::{Mlp, Model};
use foretell_planner::{Request, SearchResult, layouts, plan};
use foretell_program::{Layout, Optimizer, Plan, Rank, compile};
use foretell_simulator::{CostModel, Folding, Oversubscription, predict};
use foretell_topologies::{DeviceId, Topology};
use foretell_units::{DataType, Seconds};

/// Returns a node of slow devices, with that memory, and a node of two fast ones.
fn slow_and_fast(slow_devices: usize, slow_memory: &str) -> Topology {
    let text = format!(
        "name: two\ndevices:\n  slow: {{base: v100-sxm-32g, memory: {slow_memory}}}\n  fast: {{base: a100-sxm-80g}}\nnodes:\n  \
            - {{name: old, count: 1, devices: {{kind: slow, count: {slow_devices}}}, link: nvlink-mesh-150GB/s, nics: {{count: 1, bandwidth: 100Gbit/s}}}}\n  \
            - {{name: new, count: 1, devices: {{kind: fast, count: 2}}, link: nvswitch-300GB/s, nics: {{count: 1, bandwidth: 100Gbit/s}}}}\n\
            network: {{kind: switch, latency: 5us}}\n"
    );
    Topology::from_yaml(&text, "two.yaml").expect("it is sound")
}

#[test]
fn a_search_on_unequal_devices_finds_what_brute_force_finds() {
    let mut reordered = 0;
    for memory in ["32GiB", "30MiB"] {
        let topology = slow_and_fast(2, memory);
        let model = Model::Mlp(Mlp { widths: [vec![1024; 9], vec![16]].concat() });
        let costs = CostModel::new(None, &topology);
        let base = Plan { precision: DataType::Fp16, ..Plan::new(Layout::default(), 16384) };
        // With one bucket size, since compiling every layout takes long.
        let fixed_bucket = fixed("bucket=25MiB");
        let request = Request { tolerance: 0.0, fixed: fixed_bucket, ..Request::new(&model, "model", &topology, &costs, &base) };
        let planned = plan(&request).expect("some layout fits");
        let all = layouts(&request).expect("the model is sound");
        let cut_by_speed = all.iter().filter(|layout| layout.cuts.is_some()).count();
        assert!(cut_by_speed > 0, "stages on slower devices may have fewer blocks");
        // Thousands of micro-batches of a few samples compile for minutes, and are never the best.
        let steps = all.into_iter().filter(|layout| layout.micro_batch >= 64).filter_map(|layout| {
            let compiled = compile(&model, "model", &Plan { layout, ..base.clone() }).ok()?;
            let (prediction, _) = predict(&compiled.training, &topology, &costs, Oversubscription::Refused, Folding::On).ok()?;
            let arenas = compiled.arenas();
            let mesh = &compiled.training.mesh;
            let fits = (0..mesh.world_size())
                .all(|rank| arenas[mesh.stage_of(Rank(rank))] <= topology.device_kind(DeviceId(rank)).memory);
            fits.then_some(prediction.step_seconds)
        });
        let best = &planned.candidates[0];
        assert_eq!(steps.reduce(Seconds::min), Some(best.prediction.step_seconds), "{memory}");
        assert!(best.prediction.fits);
        reordered += usize::from(best.plan.layout.stage_places.is_some());
        let with = |text: &str| Request { fixed: fixed(text), ..request.clone() };
        let found = plan(&with("stage_places=1+0,micro_batch=256")).expect("some layout fits").candidates[0].plan.layout.clone();
        assert_eq!((found.pipeline, found.stage_places), (2, Some(vec![1, 0])));
        assert!(layouts(&with("stage_places=0+1")).expect("sound").iter().all(|layout| layout.stage_places.is_none()));
        assert!(plan(&with("stage_places=5+0")).is_err(), "there are no such places");
    }
    assert!(reordered > 0, "the fullest stage lies on the devices with the most memory");
}

#[test]
fn stages_have_meshes_of_their_own_where_that_is_best() {
    let topology = slow_and_fast(4, "32GiB");
    let model = GptSizes { layers: 6, hidden: 1024, heads: 16, vocab: 1024, sequence: 256, tied_embeddings: false }.model();
    let costs = own_costs(&topology, DataType::Fp16);
    let base = Plan { precision: DataType::Fp16, ..Plan::new(Layout::default(), 16) };
    let choices = fixed("recompute=none,virtual_stages=1,context=1");
    let request = Request { tolerance: 0.0, fixed: choices, ..Request::new(&model, "model", &topology, &costs, &base) };
    let planned = plan(&request).expect("some layout fits");
    let all = layouts(&request).expect("the model is sound");
    assert!(all.iter().any(|layout| layout.stages.is_none()));
    let step = |layout: Layout| simulated_step(&model, &Plan { layout, ..base.clone() }, &topology, &costs);
    let best = &planned.candidates[0];
    assert_eq!(all.into_iter().filter_map(step).reduce(Seconds::min), Some(best.prediction.step_seconds));
    let stages = best.plan.layout.stages.clone().expect("four slow devices and two fast ones want meshes of their own");
    let request = Request { fixed: fixed("stages=1x4+2x1,micro_batch=4"), ..request };
    let found = layouts(&request).expect("the model is sound");
    let meshes = |layout: &Layout| layout.stages.iter().flatten().map(|stage| (stage.data, stage.tensor)).collect::<Vec<_>>();
    assert!(!found.is_empty() && found.iter().all(|layout| meshes(layout) == [(1, 4), (2, 1)]), "{stages:?}");
}

#[test]
fn only_layouts_that_beat_the_value_of_another_search_are_returned() {
    let text = "name: two\ndevices:\n  fast: {base: a100-sxm-80g}\n  slow: {base: v100-sxm-32g}\nnodes:\n  \
        - {name: new, count: 1, devices: {kind: fast, count: 2}, link: nvswitch-150GB/s, nics: {count: 1, bandwidth: 10Gbit/s}}\n  \
        - {name: old, count: 1, devices: {kind: slow, count: 2}, link: nvswitch-150GB/s, nics: {count: 1, bandwidth: 10Gbit/s}}\n\
        network: {kind: switch, latency: 5us}\n";
    let topology = Topology::from_yaml(text, "two.yaml").expect("it is sound");
    let model = GptSizes { layers: 6, hidden: 256, heads: 4, vocab: 512, sequence: 128, tied_embeddings: false }.model();
    let (precision, optimizer) = (DataType::Fp16, Optimizer::AdamW);
    let base = Plan { precision, optimizer, ..Plan::new(Layout::default(), 16) };
    let costs = own_costs(&topology, DataType::Fp16);
    let request = Request { tolerance: 0.0, devices: 2, ..Request::new(&model, "model", &topology, &costs, &base) };
    let beating = |value: f64| plan(&Request { must_beat: Some(value), ..request.clone() }).expect("it is searched");
    let found = beating(f64::INFINITY);
    let [best] = &found.candidates[..] else { unreachable!("one layout was asked for") };
    assert_eq!((best.prediction.step_seconds.value(), found.value), (found.search.best_seconds, found.search.best_seconds));
    let all = layouts(&request).expect("the model is sound").into_iter();
    let steps = all.filter_map(|layout| simulated_step(&model, &Plan { layout, ..base.clone() }, &topology, &costs));
    assert_eq!(steps.reduce(Seconds::min).map(Seconds::value), Some(found.value));
    assert_eq!(beating(found.value * 1.001).value, found.value);
    let none = beating(found.value * 0.999);
    assert!(none.candidates.is_empty() && none.value == found.value * 0.999 && none.search.gap == 0.0, "{none:?}");
    [&found, &none].into_iter().for_each(assert_every_layout_is_counted_once);
    // A search without candidates still adds its layouts, and its bound limits what it might have.
    let larger = plan(&Request { devices: 4, ..request.clone() }).expect("it fits");
    let both: SearchResult = larger.clone().counting(&none);
    assert_eq!(both.search.layouts, larger.search.layouts + none.search.layouts);
    assert_eq!(distinct_layouts(&both), distinct_layouts(&larger) + distinct_layouts(&none));
    assert!(both.search.best_seconds == larger.search.best_seconds && both.value == larger.value);
    let least = none.value.min(larger.search.lower_bound_seconds);
    assert!((both.search.lower_bound_seconds - least).abs() <= 1e-12 * least, "{both:?}");
    assert!((both.search.gap - (larger.value / least - 1.0)).abs() < 1e-9);
}
