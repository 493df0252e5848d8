//! The certificate of a search holds against layouts that it never looked at: those of its space,
//! and random ones of everything that a plan file can say.

use crate::common::{bound_cases, cases, fixed, schedules_with_chunks};
use foretell_models::Model;
use foretell_planner::{Request, layouts, plan};
use foretell_program::{Axis, CollectiveAlgorithm, ContextMethod, Layout, Offload, Plan, Recompute, StageLayout, compile};
use foretell_simulator::{CostModel, Folding, Oversubscription, predict};
use foretell_topologies::Topology;
use foretell_units::{Bytes, DataType};
use proptest::prelude::*;

/// Layouts of the space that are simulated for each search.
const OF_SPACE: usize = 4;

/// Models of different kinds with few blocks: dense, mixture of experts, encoder-decoder,
/// convolutional. Launches take most of the time of small ones, arithmetic that of wide ones.
fn models() -> impl Strategy<Value = Model> {
    let model = |text: String| serde_json::from_str(&text).expect("it is sound");
    let sizes = || prop_oneof![Just((64usize, 256usize, 32usize)), Just((1024, 8192, 512)), Just((4096, 50257, 1024))];
    let dense = (2usize..8, any::<bool>(), sizes()).prop_map(move |(layers, tied, (hidden, vocab, sequence))| {
        model(format!(
            r#"{{"family": "gpt", "layers": {layers}, "hidden": {hidden}, "heads": 4, "vocab": {vocab}, "sequence": {sequence},
                "tied_embeddings": {tied}}}"#
        ))
    });
    let mixture = (1usize..6, 1usize..3, sizes()).prop_map(move |(layers, top_k, (hidden, vocab, sequence))| {
        model(format!(
            r#"{{"family": "moe", "layers": {layers}, "hidden": {hidden}, "heads": 4, "ffn": {hidden}, "vocab": {vocab},
                "sequence": {sequence}, "experts": 4, "top_k": {top_k}}}"#
        ))
    });
    let encoder_decoder = (1usize..3).prop_map(move |layers| {
        model(format!(
            r#"{{"family": "t5", "layers": {layers}, "hidden": 64, "heads": 4, "ffn": 128, "vocab": 256, "source_sequence": 32, "target_sequence": 16}}"#
        ))
    });
    let convolutional = prop_oneof![Just((8, 1, 4)), Just((64, 3, 64))].prop_map(move |(image, channels, width)| {
        model(format!(
            r#"{{"family": "resnet", "depth": 18, "stem": "small", "image": {image}, "channels": {channels}, "classes": 10,
                "width": {width}}}"#
        ))
    });
    prop_oneof![3 => dense, 2 => mixture, 1 => encoder_decoder, 1 => convolutional]
}

prop_compose! {
    /// One or two kinds of nodes, some with an odd number of devices, on links of any speed.
    fn topologies()(
        first in 1usize..4, second in 0usize..3, slow in any::<bool>(), count in prop_oneof![3 => Just(1usize), 1 => Just(2)],
        rate in prop_oneof![Just("1Gbit/s"), Just("100Gbit/s"), Just("400Gbit/s")]
    ) -> Topology {
        let node = |name: &str, kind: &str, count: usize, devices: usize| format!(
            "  - {{name: {name}, count: {count}, devices: {{kind: {kind}, count: {devices}}}, link: nvswitch-300GB/s, \
                nics: {{count: 1, bandwidth: {rate}}}, host_memory: 100GB}}\n"
        );
        let other = if slow { "v100-sxm-32g" } else { "a100-sxm-80g" };
        let second = if second > 0 { node("b", "b", 1, second) } else { String::new() };
        let text = format!(
            "name: drawn\ndevices:\n  a: {{base: a100-sxm-80g}}\n  b: {{base: {other}}}\nnodes:\n{}{second}network: {{kind: switch, latency: 5us}}\n",
            node("a", "a", count, first)
        );
        Topology::from_yaml(&text, "drawn.yaml").expect("it is sound")
    }
}

prop_compose! {
    /// Numbers that [`layout`] makes a layout of.
    fn choices()(numbers in proptest::collection::vec(0usize..5040, 48)) -> Vec<usize> {
        numbers
    }
}

/// Makes a layout of random numbers. It may contradict itself or the model.
fn layout(numbers: &[usize], blocks: usize, global_batch: usize) -> Layout {
    let mut numbers = numbers.iter().copied();
    let mut below = |count: usize| numbers.next().unwrap_or(0) % count.max(1);
    let order = |mut number: usize, mut items: Vec<usize>| -> Vec<usize> {
        let mut order = Vec::new();
        while !items.is_empty() {
            order.push(items.remove(number % items.len()));
            number /= 2;
        }
        order
    };
    let (data, tensor, pipeline) = (1 + below(4), [1, 1, 2, 3, 4][below(5)], 1 + below(4));
    let (context, expert) = ([1, 1, 1, 2][below(4)], [1, 1, 2, 4][below(4)]);
    let all = schedules_with_chunks();
    let (schedule, virtual_stages) = all[below(all.len())];
    let (schedule, virtual_stages) = if pipeline > 1 { (schedule, virtual_stages) } else { (Layout::default().schedule, 1) };
    let samples = (global_batch / data / expert).max(1);
    let micro_batch = [1, samples, (samples / 2).max(1)][below(3)];
    let by_stage = (0..pipeline).map(|stage| (stage + below(3)) % 3).collect();
    let recompute = match below(5) {
        0 => Recompute::Selective,
        1 => Recompute::Full,
        2 => Recompute::FullLayers(1),
        3 => Recompute::FullLayersOfStages(by_stage),
        _ => Recompute::None,
    };
    let mut cuts = vec![1; pipeline * virtual_stages];
    for _ in cuts.len()..blocks {
        let chunk = below(cuts.len());
        cuts[chunk] += 1;
    }
    let cuts = (below(2) == 0 && cuts.iter().sum::<usize>() == blocks).then_some(cuts);
    let axes = [Axis::Tensor, Axis::Context, Axis::Expert, Axis::Data, Axis::Pipeline];
    let placement = (below(3) == 0).then(|| order(below(5040), (0..5).collect()).into_iter().map(|axis| axes[axis]).collect());
    let stage_places = (below(4) == 0).then(|| order(below(5040), (0..pipeline).collect()));
    let shares = (below(6) == 0 && data > 1).then(|| (0..data).map(|rank| 1 + (rank + below(2)) % 2).collect());
    let stages = (below(8) == 0).then(|| {
        let mesh = |own: usize| StageLayout { data: 1 + own % 2, tensor: [1, 2, 4][own / 2 % 3], ..StageLayout::default() };
        (0..pipeline).map(|stage| mesh(stage + below(12))).collect()
    });
    Layout {
        data,
        tensor,
        pipeline,
        context,
        expert,
        schedule,
        virtual_stages,
        micro_batch,
        recompute,
        cuts,
        placement,
        stage_places,
        shares,
        stages,
        zero: below(4),
        shard_group: [None, None, Some(2)][below(3)],
        offload: if below(4) == 0 { Offload::ALL[below(Offload::ALL.len())] } else { Offload::None },
        collective: CollectiveAlgorithm::ALL[below(CollectiveAlgorithm::ALL.len())],
        sequence_parallel: below(2) == 0,
        context_method: ContextMethod::ALL[below(2)],
        expert_tensor: [None, Some(1)][below(2)],
        bucket: Bytes::new(1 << (10 + below(21))),
        ..Layout::default()
    }
}

proptest! {
    // A search for each: a part of the cases of single bounds.
    #![proptest_config(cases(bound_cases().div_ceil(2)))]

    /// Layouts of the space are no faster than `lower_bound_seconds`, and layouts of any kind no
    /// faster than `bound_of_any_layout_seconds`.
    #[test]
    fn no_layout_is_faster_than_the_certificate_says(
        model in models(), topology in topologies(), drawn in proptest::collection::vec(choices(), 8),
        batch in prop_oneof![Just(4usize), Just(6), Just(8)], is_half in any::<bool>(),
        fixed_choice in prop_oneof![Just("pipeline=1"), Just("tensor=1"), Just("micro_batch=1"), Just("recompute=none")]
    ) {
        let precision = if is_half && topology.device_kinds().len() == 1 { DataType::Bf16 } else { DataType::Fp16 };
        let costs = CostModel::new(None, &topology).with_stack(&topology, "foretell", precision).expect("the library knows it");
        let base = Plan { precision, ..Plan::new(Layout::default(), batch) };
        let request = Request { fixed: fixed(fixed_choice), ..Request::new(&model, "model", &topology, &costs, &base) };
        let Ok(planned) = plan(&request) else { return Ok(()) };
        let search = &planned.search;
        prop_assert!(search.bound_of_any_layout_seconds <= search.lower_bound_seconds * (1.0 + 1e-9), "{search:?}");
        prop_assert!(search.lower_bound_seconds <= search.best_seconds);
        let simulated = |layout: &Layout| {
            let compiled = compile(&model, "model", &Plan { layout: layout.clone(), ..base.clone() }).ok()?;
            let predicted = predict(&compiled.training, &topology, &costs, Oversubscription::Refused, Folding::On).ok()?.0;
            predicted.fits.then(|| predicted.step_seconds.value())
        };
        // A form that offloads is in the space only where the layout does not fit without.
        let space: Vec<Layout> = layouts(&request).expect("the model is sound").into_iter().filter(|layout| layout.offload.is_none()).collect();
        let picked = drawn.iter().filter_map(|numbers| space.get(numbers[0] * 7919 % space.len().max(1))).take(OF_SPACE);
        for layout in picked {
            if let Some(step) = simulated(layout) {
                prop_assert!(step >= search.lower_bound_seconds * (1.0 - 1e-9), "{step} below {search:?}: {layout:?}");
            }
        }
        let blocks = model.graph("model", &foretell_models::GraphOptions::ONE).expect("it is sound").blocks.len();
        for layout in drawn.iter().map(|numbers| layout(numbers, blocks, batch)) {
            let Some(step) = simulated(&layout) else { continue };
            let bound = if space.contains(&layout) { search.lower_bound_seconds } else { search.bound_of_any_layout_seconds };
            prop_assert!(step >= bound * (1.0 - 1e-9), "{step} below {search:?}: {layout:?}");
        }
    }
}
