//! Random layouts and recipes.

use foretell_models::*;
use foretell_program::*;
use foretell_units::DataType;
use proptest::prelude::*;

/// Every schedule, with at most three chunks on each stage.
pub fn schedules() -> impl Strategy<Value = (Schedule, usize)> {
    proptest::sample::select(Schedule::ALL.to_vec()).prop_flat_map(|schedule| {
        let chunks = schedule.chunks();
        (Just(schedule), *chunks.start()..=(*chunks.end()).min(3))
    })
}

/// Random cuts of a model's blocks into `runs` runs. `None` if the seed is even, or if there are
/// too few blocks.
pub fn uneven_cuts(model: &Model, runs: usize, seed: u64) -> Option<Vec<usize>> {
    let options = GraphOptions { batch: 1, normalization_groups: 1, inference: false, vocabulary_parts: 1 };
    let blocks = model.graph("model", &options).ok()?.blocks.len();
    if seed.is_multiple_of(2) || runs > blocks {
        return None;
    }
    let mut cuts = vec![1; runs];
    let mut state = seed;
    for _ in runs..blocks {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        cuts[(state >> 33) as usize % runs] += 1;
    }
    Some(cuts)
}

/// Choices for single operators: mostly none, else for all operators whose names match a short
/// pattern.
pub fn operators() -> impl Strategy<Value = OperatorPatterns> {
    let pattern =
        prop_oneof![2 => Just("*"), 1 => Just("*1*"), 1 => Just("*n*"), 1 => Just("*0*"), 1 => Just("*1"), 1 => Just("*t*")];
    let asked = proptest::collection::vec((pattern, proptest::sample::select(ShardedPart::ALL.to_vec())), 1..4);
    prop_oneof![Just(OperatorPatterns::default()), asked.prop_map(|asked| asked.into_iter().collect())]
}

/// Stage places rotated by `by`; `None` if that leaves the stages in order.
pub fn rotated(stages: usize, by: usize) -> Option<Vec<usize>> {
    (!by.is_multiple_of(stages)).then(|| (0..stages).map(|stage| (stage + by) % stages).collect())
}

prop_compose! {
    pub fn layouts()(
        data in prop_oneof![Just(1usize), Just(2), Just(3), Just(4)],
        tensor in prop_oneof![Just(1usize), Just(2), Just(4)],
        context in prop_oneof![4 => Just(1usize), 1 => Just(2), 1 => Just(4)],
        context_method in proptest::sample::select(ContextMethod::ALL.to_vec()),
        context_order in proptest::sample::select(ContextOrder::ALL.to_vec()),
        (schedule, virtual_stages) in schedules(),
        pipeline in 1usize..5,
        micro_batch in prop_oneof![Just(1usize), Just(2), Just(4)],
        micro_batches in 1usize..8,
        recompute in recomputes(),
        operators in operators(),
        sequence_parallel in any::<bool>(),
        zero in 0usize..4,
        group in any::<bool>(),
        bucket in prop_oneof![Just(64u64), Just(4096), Just(25 << 20)],
        [loss_chunk, mlp_chunk] in proptest::array::uniform2(proptest::sample::select(vec![None, None, None, None, None, Some(3)])),
        offload in prop_oneof![3 => Just(Offload::None), 3 => proptest::sample::select(Offload::ALL.to_vec())],
    ) -> (Layout, usize) {
        let bucket = foretell_units::Bytes::new(bucket);
        let shard_group = (zero > 0 && group && data == 4).then_some(2);
        let layout = Layout {
            data, tensor, context, pipeline, virtual_stages, micro_batch, schedule, recompute, bucket, offload, zero, shard_group, sequence_parallel,
            context_method, context_order, loss_chunk, mlp_chunk, operators: if tensor > 1 { operators } else { OperatorPatterns::default() },
            stage_places: rotated(pipeline, micro_batches),
            ..Layout::default()
        };
        (layout, data * micro_batch * micro_batches)
    }
}

prop_compose! {
    pub fn overlaps()(beside in prop_oneof![Just([true; 5]), any::<[bool; 5]>()], passes in any::<bool>()) -> Overlap {
        let [tensor, context, expert, gradients, parameters] = beside;
        Overlap { tensor, context, expert, gradients, parameters, pipeline: true, passes }
    }
}

pub fn recomputes() -> impl Strategy<Value = Recompute> {
    let kept = proptest::array::uniform5(any::<bool>()).prop_map(|[attention, products, projections, odd_products, sums]| Kept {
        attention,
        products,
        projections,
        odd_products,
        sums,
    });
    prop_oneof![
        Just(Recompute::None),
        Just(Recompute::Selective),
        Just(Recompute::Full),
        Just(Recompute::FullLayers(1)),
        kept.prop_map(Recompute::AllBut)
    ]
}

/// Number formats with and without single-precision copies of weights, and with eight-bit operands.
pub fn precisions() -> impl Strategy<Value = DataType> {
    prop_oneof![Just(DataType::Fp32), Just(DataType::Bf16), Just(DataType::Fp8)]
}

/// Optimizers with what a recipe may ask of them.
pub fn recipes() -> impl Strategy<Value = (Optimizer, Training)> {
    let optimizers = prop_oneof![Just(Optimizer::Sgd), Just(Optimizer::AdamW), Just(Optimizer::Lamb), Just(Optimizer::Muon)];
    let frozen = prop_oneof![2 => Just(None), 1 => Just(Some("*0*")), 1 => Just(Some("*0*weight"))];
    let exemptions = (any::<bool>(), any::<bool>());
    (optimizers, any::<bool>(), frozen, exemptions, any::<bool>(), any::<bool>()).prop_map(
        |(optimizer, clip, frozen, (biases, norms), smooth, weighted)| {
            let training = Training {
                clip_norm: clip.then_some(1.0),
                weight_decay: 0.1,
                no_decay: DecayExemptions { biases, norms, names: NamePatterns::default() },
                frozen: frozen.into_iter().collect(),
                label_smoothing: if smooth { 0.1 } else { 0.0 },
                class_weights: if weighted { vec![1.0, 2.0] } else { Vec::new() },
                ..Training::default()
            };
            (optimizer, training)
        },
    )
}

/// The recipe with a weight for each class of the model, if it weighs classes.
pub fn for_model(mut training: Training, model: &Model) -> Training {
    let classes = match model.sample() {
        SampleShape::Image { classes, .. } | SampleShape::Features { classes, .. } => classes,
        _ => 0,
    };
    if !training.class_weights.is_empty() {
        training.class_weights = (0..classes).map(|class| 1.0 + class as f32).collect();
    }
    training
}

pub fn modes() -> impl Strategy<Value = Mode> {
    let outer = prop_oneof![
        Just(None),
        Just(Some(OuterOptimizer { optimizer: OuterRule::Sgd, learning_rate: 0.5, momentum: 0.0 })),
        Just(Some(OuterOptimizer { optimizer: OuterRule::Nesterov, learning_rate: 0.7, momentum: 0.9 })),
    ];
    let graph = proptest::sample::select(vec![AveragingGraph::Ring, AveragingGraph::Exponential, AveragingGraph::Complete]);
    prop_oneof![
        (1usize..4, outer.clone()).prop_map(|(every, outer)| Mode::LocalSgd(LocalSgd { outer, ..LocalSgd::new(every) })),
        (1usize..9, outer, 1usize..4, 0usize..4, compressions()).prop_map(|(every, outer, fragments, overlap, compression)| {
            Mode::LocalSgd(LocalSgd { every, outer, fragments, overlap, mixing: None, compression })
        }),
        (1usize..4, graph).prop_map(|(every, graph)| Mode::Decentralised(Decentralised { graph, every })),
    ]
}

pub fn compressions() -> impl Strategy<Value = Option<Compression>> {
    prop_oneof![2 => Just(None), 1 => Just(Some(Compression::Fp16)), 2 => Just(Some(Compression::Int8))]
}
