//! Properties of every Program, for random models and layouts.

use foretell_models::{
    Bert, Compression, Decoder, DropoutRate, FeedForward, FullAttention, Gpt, GraphOptions, LayerInputs, LayerKind,
    LinearAttention, LinearNorm, Llama, Mixtures, Mlp, Model, ModernBert, NormKind, ParallelBlock, PositionKind, Resnet,
    SampleShape, ScanRule, SharedKeys, Stem, Vit,
};
use foretell_program::{
    AveragingGraph, Axis, BufferId, BufferRole, Compiled, ContextMethod, ContextOrder, DecayExemptions, Decentralised, Footprint,
    Instruction, Kept, Layout, LocalSgd, Mode, NamePatterns, Offload, Operation, OperatorPatterns, Optimizer, OuterOptimizer,
    OuterRule, Overlap, ParameterServer, Phase, Plan, Program, Rank, Recompute, Schedule, Session, ShardedPart, StageLayout,
    StageProgram, Staleness, Training, compile,
};
use foretell_units::diagnostic::one_line;
use foretell_units::{Bytes, DataType};
use proptest::prelude::*;
use proptest::test_runner::FileFailurePersistence;
use std::sync::Arc;

fn models() -> impl Strategy<Value = Model> {
    prop_oneof![
        proptest::collection::vec(prop_oneof![Just(4usize), Just(8), Just(12)], 2..10)
            .prop_map(|widths| Model::Mlp(Mlp { widths })),
        Just(Model::Resnet(Resnet { depth: 18, stem: Stem::Small, image: 8, channels: 1, classes: 10, width: 4 })),
        (1usize..8, any::<bool>()).prop_map(|(layers, tied_embeddings)| Model::Gpt(Gpt {
            layers,
            hidden: 16,
            heads: 4,
            ffn: None,
            vocab: 32,
            sequence: 8,
            tied_embeddings,
            dropout: if layers % 2 == 0 { DropoutRate::TENTH } else { DropoutRate::NONE },
            attention_dropout: if layers % 4 < 2 { DropoutRate::TENTH } else { DropoutRate::NONE }
        })),
        prop_oneof![Just(1usize), Just(2), Just(4)].prop_map(|kv_heads| Model::Llama(Llama {
            layers: 2,
            hidden: 16,
            heads: 4,
            kv_heads: Some(kv_heads),
            head_dimension: None,
            ffn: 24,
            vocab: 32,
            sequence: 8,
            tied_embeddings: false,
            rope_theta: 10_000,
        })),
        Just(Model::Bert(Bert {
            layers: 2,
            hidden: 16,
            heads: 4,
            ffn: None,
            vocab: 32,
            sequence: 8,
            position_rows: None,
            first_position: 0,
            token_types: 2,
            dropout: DropoutRate::TENTH,
            attention_dropout: DropoutRate::TENTH,
            keeps_attention_output: false
        })),
        Just(Model::Vit(Vit {
            layers: 2,
            hidden: 16,
            heads: 4,
            ffn: None,
            patch: 4,
            image: 8,
            channels: 1,
            classes: 10,
            dropout: DropoutRate::NONE,
            attention_dropout: DropoutRate::NONE
        })),
        (0usize..3, any::<bool>(), any::<bool>()).prop_map(|(first, tied, kv)| Model::Decoder(latent(first, tied, kv))),
        (any::<bool>(), 0usize..4, 1usize..3).prop_map(|(delta, norm, keys)| Model::Decoder(hybrid(delta, norm, keys))),
        any::<bool>().prop_map(|alternates| Model::Decoder(with_sinks(alternates))),
        any::<bool>().prop_map(|has_norms| Model::Decoder(without_shifts(has_norms))),
        any::<bool>().prop_map(|shares| Model::Decoder(with_layer_inputs(shares))),
        any::<bool>().prop_map(|has_latents| Model::Decoder(other_scans(has_latents))),
        any::<bool>().prop_map(|has_window| Model::ModernBert(modern_bert(has_window))),
        proptest::sample::select(NETWORKS.map(network).to_vec()),
        // Every family has an example, also those that are not listed here.
        proptest::sample::select(Model::examples().map(|(_, model)| model).collect::<Vec<_>>()),
    ]
}

/// Traced steps: convolutions in groups and transposed, attention, experts, a scan, the batch
/// behind the positions, values made from parameters alone, and none of these.
const NETWORKS: [&str; 6] = [
    include_str!("../../models/tests/torch/mlp.json"),
    include_str!("../../models/tests/torch/cnn.json"),
    include_str!("../../models/tests/torch/transformer.json"),
    include_str!("../../models/tests/torch/hybrid.json"),
    include_str!("../../models/tests/torch/unet.json"),
    include_str!("../../models/tests/torch/experts.json"),
];

fn network(trace: &str) -> Model {
    foretell_models::from_torch(trace, None).expect("it is understood").model
}

/// A small hybrid with every kind of layer: Mamba-2 or the gated delta rule, attention with a gate,
/// mixtures without gates.
fn hybrid(delta: bool, norm: usize, key_heads: usize) -> Decoder {
    let linear = LinearAttention {
        rule: if delta { ScanRule::GatedDelta } else { ScanRule::StateSpace },
        heads: 4,
        head_dimension: 4,
        key_heads,
        key_dimension: 6,
        convolution: if delta { 0 } else { 3 },
        convolution_bias: true,
        bias: delta,
        rank: None,
        norm: [LinearNorm::None, LinearNorm::Whole, LinearNorm::Groups, LinearNorm::Heads][norm % 4],
        chunk: 4,
    };
    let mixtures = Mixtures { shared_gate: false, unnormalised_gates: false, ..mixtures(1) };
    let kinds = vec![
        LayerKind::Linear,
        LayerKind::AttentionAndLinear,
        LayerKind::MixtureAlone,
        LayerKind::AttentionAlone,
        LayerKind::LinearAlone,
        LayerKind::DenseAlone,
    ];
    Decoder {
        kv_heads: Some(2),
        attention_gate: true,
        query_key_norm_of_all_heads: delta,
        feed_forward: FeedForward::SquaredRelu,
        layer_kinds: kinds,
        linear: Some(linear),
        mixtures: Some(mixtures),
        ..Decoder::llama([6, 16, 4, 24, 32, 8])
    }
}

/// A small gpt-oss, with OLMo 2's norms.
fn with_sinks(alternates: bool) -> Decoder {
    Decoder {
        kv_heads: Some(2),
        window: Some(3),
        full_attention_every: alternates.then_some(2),
        sinks: true,
        no_input_norms: alternates,
        output_norms: alternates,
        mixtures: Some(Mixtures { router_bias: true, expert_bias: true, shared_ffn: None, shared_gate: false, ..mixtures(0) }),
        ..Decoder::llama([2, 16, 4, 24, 32, 8])
    }
}

/// A small Command R+, or R7B.
fn without_shifts(has_norms: bool) -> Decoder {
    Decoder {
        kv_heads: Some(2),
        norm: NormKind::LayerWithoutShift,
        parallel_block: ParallelBlock::OneNorm,
        query_key_norm: has_norms,
        query_key_scales_of_heads: has_norms,
        window: (!has_norms).then_some(3),
        full_attention_every: (!has_norms).then_some(2),
        unrotated_every: (!has_norms).then_some(2),
        logit_scale: true,
        ..Decoder::llama([2, 16, 4, 24, 32, 8])
    }
}

/// A small Gemma 4, with an embedding for each layer or with keys as values.
fn with_layer_inputs(shares: bool) -> Decoder {
    let full = FullAttention { head_dimension: Some(6), kv_heads: (!shares).then_some(1), keys_as_values: !shares };
    Decoder {
        kv_heads: Some(2),
        window: Some(3),
        full_attention_every: Some(2),
        full_attention: Some(full),
        shared_keys: shares.then_some(SharedKeys { layers: 2, ffn: Some(48) }),
        value_norm: true,
        layer_inputs: shares.then_some(LayerInputs { features: 4, vocab: Some(16) }),
        layer_scales: true,
        ..Decoder::llama([4, 16, 4, 24, 32, 8])
    }
}

/// A small Kimi Linear, or MiniMax-01.
fn other_scans(has_latents: bool) -> Decoder {
    let linear = LinearAttention {
        rule: if has_latents { ScanRule::KimiDelta } else { ScanRule::FixedDecay },
        heads: 4,
        head_dimension: 4,
        key_heads: 4,
        key_dimension: 4,
        convolution: if has_latents { 3 } else { 0 },
        convolution_bias: false,
        bias: false,
        rank: has_latents.then_some(4),
        norm: if has_latents { LinearNorm::Heads } else { LinearNorm::Whole },
        chunk: 4,
    };
    let own = Decoder { residual_after_norm: true, ..Decoder::llama([2, 16, 4, 24, 32, 8]) };
    let decoder = if has_latents { Decoder { positions: PositionKind::None, ..latent(1, false, false) } } else { own };
    Decoder {
        prediction_modules: 0,
        layer_kinds: vec![LayerKind::Linear, LayerKind::Attention],
        linear: Some(linear),
        mixtures: Some(Mixtures { shared_gate: false, unnormalised_gates: false, ..mixtures(1) }),
        ..decoder
    }
}

fn modern_bert(has_window: bool) -> ModernBert {
    ModernBert {
        layers: 3,
        hidden: 16,
        heads: 4,
        ffn: 24,
        vocab: 32,
        sequence: 8,
        window: has_window.then_some(3),
        full_attention_every: 2,
        rope_theta: 160_000,
        local_rope_theta: 10_000,
        norm: if has_window { NormKind::LayerWithoutShift } else { NormKind::Layer },
        norm_epsilon: Default::default(),
        attention_bias: has_window,
        ffn_bias: !has_window,
        transform_bias: has_window,
        no_head_bias: has_window,
    }
}

fn mixtures(first: usize) -> Mixtures {
    Mixtures {
        experts: 4,
        top_k: 2,
        ffn: 8,
        shared_ffn: Some(16),
        shared_gate: true,
        every: 1,
        first,
        capacity_factor: Default::default(),
        router_bias: false,
        expert_bias: false,
        unnormalised_gates: true,
    }
}

/// A small DeepSeek with all that its versions and Qwen2's mixtures have.
fn latent(first: usize, tied_embeddings: bool, groups_queries: bool) -> Decoder {
    Decoder {
        kv_heads: groups_queries.then_some(2),
        head_dimension: Some(6),
        query_rank: Some(12),
        key_value_rank: Some(8),
        rank_bias: true,
        rotary_part: Some(4),
        value_dimension: Some(5),
        prediction_modules: 1,
        tied_embeddings,
        mixtures: Some(mixtures(first)),
        ..Decoder::llama([2, 16, 4, 24, 32, 8])
    }
}

/// Every schedule, with at most three chunks on each stage.
fn schedules() -> impl Strategy<Value = (Schedule, usize)> {
    proptest::sample::select(Schedule::ALL.to_vec()).prop_flat_map(|schedule| {
        let chunks = schedule.chunks();
        (Just(schedule), *chunks.start()..=(*chunks.end()).min(3))
    })
}

/// Random cuts of a model's blocks into `runs` runs. `None` if the seed is even, or if there are
/// too few blocks.
fn uneven_cuts(model: &Model, runs: usize, seed: u64) -> Option<Vec<usize>> {
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
fn operators() -> impl Strategy<Value = OperatorPatterns> {
    let pattern =
        prop_oneof![2 => Just("*"), 1 => Just("*1*"), 1 => Just("*n*"), 1 => Just("*0*"), 1 => Just("*1"), 1 => Just("*t*")];
    let asked = proptest::collection::vec((pattern, proptest::sample::select(ShardedPart::ALL.to_vec())), 1..4);
    prop_oneof![Just(OperatorPatterns::default()), asked.prop_map(|asked| asked.into_iter().collect())]
}

/// Stage places rotated by `by`; `None` if that leaves the stages in order.
fn rotated(stages: usize, by: usize) -> Option<Vec<usize>> {
    (!by.is_multiple_of(stages)).then(|| (0..stages).map(|stage| (stage + by) % stages).collect())
}

prop_compose! {
    fn layouts()(
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
        offload in prop_oneof![3 => Just(Offload::None), 3 => proptest::sample::select(Offload::ALL.to_vec())],
    ) -> (Layout, usize) {
        let bucket = foretell_units::Bytes::new(bucket);
        let shard_group = (zero > 0 && group && data == 4).then_some(2);
        let layout = Layout {
            data, tensor, context, pipeline, virtual_stages, micro_batch, schedule, recompute, bucket, offload, zero, shard_group, sequence_parallel,
            context_method, context_order, operators: if tensor > 1 { operators } else { OperatorPatterns::default() },
            stage_places: rotated(pipeline, micro_batches),
            ..Layout::default()
        };
        (layout, data * micro_batch * micro_batches)
    }
}

prop_compose! {
    fn overlaps()(beside in prop_oneof![Just([true; 5]), any::<[bool; 5]>()], passes in any::<bool>()) -> Overlap {
        let [tensor, context, expert, gradients, parameters] = beside;
        Overlap { tensor, context, expert, gradients, parameters, pipeline: true, passes }
    }
}

fn recomputes() -> impl Strategy<Value = Recompute> {
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
fn precisions() -> impl Strategy<Value = DataType> {
    prop_oneof![Just(DataType::Fp32), Just(DataType::Bf16), Just(DataType::Fp8)]
}

/// Sums that only training or only evaluation has.
const OWN_SUMS: [&str; 3] = ["weight", "top5", "scores"];

/// Optimizers with what a recipe may ask of them.
fn recipes() -> impl Strategy<Value = (Optimizer, Training)> {
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
fn for_model(mut training: Training, model: &Model) -> Training {
    let classes = match model.sample() {
        SampleShape::Image { classes, .. } | SampleShape::Features { classes, .. } => classes,
        _ => 0,
    };
    if !training.class_weights.is_empty() {
        training.class_weights = (0..classes).map(|class| 1.0 + class as f32).collect();
    }
    training
}

/// Asserts that training and evaluation share an arena: persistent buffers have the same offsets in
/// both. Each may have sums of its own behind them, and views of what they share.
fn assert_shares_arena(compiled: &Compiled) {
    let is_own = |one: &(Arc<str>, Bytes, Bytes, bool)| OWN_SUMS.contains(&&*one.0) || one.3;
    for rank in (0..compiled.training.mesh.world_size()).map(Rank) {
        let [training, evaluation] = [&compiled.training, &compiled.evaluation].map(|program| {
            let kept = program.list_of(rank).buffers.iter().filter(|one| one.persistent);
            kept.map(|one| (one.name.clone(), one.offset, one.bytes, one.parent.is_some())).collect::<Vec<_>>()
        });
        let shared = training.iter().zip(&evaluation).take_while(|(one, other)| one == other).count();
        assert!(training[shared..].iter().chain(&evaluation[shared..]).all(is_own), "{training:?}\n{evaluation:?}");
    }
}

/// A number of random cases, after the recorded failures.
fn cases(cases: u32) -> ProptestConfig {
    let failed = FileFailurePersistence::Direct("tests/programs.proptest-regressions");
    ProptestConfig { cases, failure_persistence: Some(Box::new(failed)), ..ProptestConfig::default() }
}

proptest! {
    #![proptest_config(cases(256))]

    #[test]
    fn every_program_is_sound_and_shares_its_arena_with_evaluation(
        model in models(), (layout, batch) in layouts(), (optimizer, training) in recipes(), precision in precisions(),
        seed in any::<u64>(), overlap in overlaps()
    ) {
        let cuts = uneven_cuts(&model, layout.pipeline * layout.virtual_stages, seed);
        let layout = Layout { cuts, ..layout };
        let mut plan = Plan { optimizer, training: for_model(training, &model), ..Plan::new(layout, batch) };
        plan.overlap = overlap;
        plan.precision = precision;
        let compiled = match compile(&model, "model", &plan) {
            Ok(compiled) => compiled,
            Err(error) => { prop_assert!(one_line(&error).contains("hint"), "{error}"); return Ok(()); }
        };
        compiled.training.check().expect("sound");
        compiled.evaluation.check().expect("sound");
        for list in &compiled.training.lists {
            prop_assert_eq!(Footprint::of(list).total(), list.arena, "the components add up to the arena");
        }
        assert_shares_arena(&compiled);
    }
}

fn modes() -> impl Strategy<Value = Mode> {
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

fn compressions() -> impl Strategy<Value = Option<Compression>> {
    prop_oneof![2 => Just(None), 1 => Just(Some(Compression::Fp16)), 2 => Just(Some(Compression::Int8))]
}

/// The first instruction of a pass that reads parameters which the step has updated already.
fn reads_updated_parameters(list: &StageProgram) -> Option<usize> {
    let root = |id: BufferId| list.buffer(id).parent.unwrap_or(id);
    let mut updated = std::collections::BTreeSet::new();
    list.instructions.iter().position(|one| {
        if one.phase == Phase::Update {
            updated.extend(one.writes.iter().map(|&id| root(id)).filter(|&id| list.buffer(id).role == BufferRole::Parameter));
            return false;
        }
        one.reads.iter().any(|&id| updated.contains(&root(id)))
    })
}

/// Whether an instruction communicates with a rank of another replica.
fn is_between_replicas(program: &Program, rank: Rank, instruction: &Instruction) -> bool {
    let (mesh, list) = (&program.mesh, program.list_of(rank));
    let replica = |rank: Rank| mesh.coordinates(rank).along(Axis::Data);
    match *instruction.operation {
        Operation::Collective { group, .. } => {
            list.groups[group.0 as usize].members(mesh, rank).into_iter().any(|member| replica(member) != replica(rank))
        }
        Operation::Send { peer, .. } | Operation::Receive { peer, .. } => {
            replica(list.peers[peer.0 as usize].of(mesh, rank)) != replica(rank)
        }
        _ => false,
    }
}

proptest! {
    #![proptest_config(cases(128))]

    #[test]
    fn all_steps_of_a_mode_are_sound_and_plain_steps_exchange_nothing(
        model in models(), (layout, batch) in layouts(), (optimizer, training) in recipes(), precision in precisions(),
        mode in modes()
    ) {
        let plan = Plan { optimizer, training: for_model(training, &model), precision, mode, ..Plan::new(layout, batch) };
        let compiled = match compile(&model, "model", &plan) {
            Ok(compiled) => compiled,
            Err(error) => { prop_assert!(one_line(&error).contains("hint"), "{error}"); return Ok(()); }
        };
        let (steps, cycle) = (compiled.step_programs(), compiled.cycle);
        prop_assert_eq!(steps.len(), cycle.program_count());
        let (fragments, overlap) = match mode {
            Mode::LocalSgd(mode) => (mode.fragments, mode.overlap),
            _ => (1, 0),
        };
        let has_plain = cycle.round_steps() > fragments * (overlap + 1);
        for step in 0..cycle.steps() {
            let program = steps[cycle.program_of_step(step)];
            program.check().expect("sound");
            for list in &program.lists {
                prop_assert_eq!(reads_updated_parameters(list), None);
            }
            for rank in (0..program.mesh.world_size()).map(Rank) {
                let exchanges = program.list_of(rank).instructions.iter().any(|one| is_between_replicas(program, rank, one));
                prop_assert!(!has_plain || cycle.program_of_step(step) > 0 || !exchanges, "step {} exchanges", step);
                prop_assert!(program.list_of(rank).arena == compiled.training.list_of(rank).arena);
            }
            let all = program.lists.iter().flat_map(|list| &list.instructions);
            let averages = all.filter(|one| matches!(one.operation.kind(), "average" | "outer_step")).count();
            // A fragment may have no trained parameters.
            let ends_round = (step + 1).is_multiple_of(cycle.round_steps());
            prop_assert!(fragments > 1 || (averages > 0) == ends_round, "step {}", step);
            let training = program.clone();
            assert_shares_arena(&Compiled { training, ..compiled.clone() });
        }
    }
}

proptest! {
    #![proptest_config(cases(96))]

    #[test]
    fn workers_and_servers_are_sound_and_only_servers_update(
        model in models(), (layout, batch) in layouts(), (optimizer, training) in recipes(), precision in precisions(),
        servers in 1usize..4, staleness in proptest::sample::select(vec![Staleness::None, Staleness::Steps(2), Staleness::Unbounded]),
        compression in compressions(), backup_workers in 0usize..3
    ) {
        let mode = Mode::ParameterServer(ParameterServer { servers, staleness, beside_workers: false, compression, backup_workers });
        let layout = Layout { zero: 0, shard_group: None, ..layout };
        let plan = Plan { optimizer, training: for_model(training, &model), precision, mode, ..Plan::new(layout, batch) };
        let compiled = match compile(&model, "model", &plan) {
            Ok(compiled) => compiled,
            Err(error) => { prop_assert!(one_line(&error).contains("hint"), "{error}"); return Ok(()); }
        };
        for program in [&compiled.training, &compiled.evaluation] {
            program.check().expect("sound");
            for list in &program.lists {
                let is_server = list.stage >= plan.layout.pipeline;
                let is_update = |one: &Instruction| matches!(one.operation.kind(), "adamw" | "sgd" | "lamb_step" | "muon_step");
                prop_assert!(is_server || !list.instructions.iter().any(is_update));
                let keeps = list.buffers.iter().any(|buffer| buffer.role == BufferRole::OptimizerState);
                prop_assert!(is_server || !keeps, "a worker keeps optimizer state");
                let has_model = list.instructions.iter().any(|one| matches!(*one.operation, Operation::Load { .. }));
                prop_assert!(!is_server || !has_model, "a server loads samples");
            }
        }
        let updates = |list: &StageProgram| list.stage >= plan.layout.pipeline && list.instructions.iter().any(|one| {
            matches!(one.operation.kind(), "adamw" | "sgd" | "lamb_step" | "muon_step")
        });
        prop_assert!(compiled.training.lists.iter().any(updates), "nothing is updated");
        let waits_for_all = staleness == Staleness::None && backup_workers == 0;
        prop_assert_eq!(compiled.sessions.len(), if waits_for_all { 0 } else { plan.layout.data });
        for session in &compiled.sessions {
            let Session { snapshot, send, receive, add, update } = session;
            for (part, shares) in [(snapshot, true), (send, false), (receive, false), (add, true), (update, true)] {
                for (list, of_step) in part.lists.iter().zip(&compiled.training.lists) {
                    prop_assert_eq!(list.arena, of_step.arena);
                    prop_assert!(list.stage >= plan.layout.pipeline || list.instructions.is_empty(), "a worker in a session");
                    // Sessions run side by side: they may touch what others do in turns only.
                    for &id in list.instructions.iter().flat_map(|one| one.reads.iter().chain(&one.writes)) {
                        let buffer = list.buffer(id);
                        prop_assert!(buffer.persistent, "`{}` has no place of its own", buffer.name);
                        prop_assert!(shares || buffer.name.contains("of worker"), "`{}` outside a turn", buffer.name);
                    }
                }
            }
        }
        assert_shares_arena(&compiled);
    }
}

prop_compose! {
    /// The mesh of one stage whose samples of a micro-batch can be a multiple of four.
    fn stage_layouts()(
        (data, expert, shares) in prop_oneof![
            Just((1usize, 1usize, None)), Just((2, 1, None)), Just((4, 1, None)),
            Just((2, 1, Some(vec![3, 1]))), Just((2, 1, Some(vec![1, 1]))), Just((3, 1, Some(vec![1, 2, 1]))),
            Just((2, 1, Some(vec![2, 6]))),
        ],
        tensor in prop_oneof![3 => Just(1usize), 2 => Just(2), 1 => Just(4)],
        context in prop_oneof![4 => Just(1usize), 1 => Just(2), 1 => Just(4)],
    ) -> StageLayout {
        StageLayout { data, tensor, context, expert, shares }
    }
}

prop_compose! {
    fn uneven_layouts()(
        (layout, _) in layouts(),
        stages in proptest::collection::vec(stage_layouts(), 1..4),
        uniform in any::<bool>(),
        micro_batches in 1usize..5,
    ) -> (Layout, usize) {
        let first = stages[0].clone();
        let pipeline = stages.len();
        let parts = first.shares.as_ref().map_or(first.data, |shares| shares.iter().sum()) * first.expert;
        // Eight samples can be sharded in all of these ways.
        let micro_batch = 8 / parts;
        let stage_places = rotated(pipeline, micro_batches);
        let base = Layout { pipeline, micro_batch, stage_places, shard_group: None, context: 1, tensor: 1, data: 1, ..layout };
        let StageLayout { data, tensor, context, expert, shares } = first;
        let layout = match uniform {
            true => Layout { data, tensor, context, expert, shares, ..base },
            false => Layout { stages: Some(stages), ..base },
        };
        (layout, 8 * micro_batches)
    }
}

proptest! {
    #![proptest_config(cases(256))]

    /// As above, for stages with different meshes and ranks with different numbers of samples.
    #[test]
    fn programs_with_unequal_meshes_and_shares_are_sound(
        model in models(), (layout, batch) in uneven_layouts(), (optimizer, training) in recipes(), precision in precisions(),
        overlap in overlaps()
    ) {
        let mut plan = Plan { optimizer, training: for_model(training, &model), ..Plan::new(layout, batch) };
        plan.overlap = overlap;
        plan.precision = precision;
        if plan.layout.stages.is_some() || plan.layout.shares.is_some() { plan.batch_norm_group = Some(1); }
        let compiled = match compile(&model, "model", &plan) {
            Ok(compiled) => compiled,
            Err(error) => { prop_assert!(one_line(&error).contains("hint"), "{error}"); return Ok(()); }
        };
        compiled.training.check().expect("sound");
        compiled.evaluation.check().expect("sound");
        assert_shares_arena(&compiled);
    }
}
