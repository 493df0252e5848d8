//! Random small models.

use foretell_models::*;
use proptest::prelude::*;

pub fn models() -> impl Strategy<Value = Model> {
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
    include_str!("../../../models/tests/torch/mlp.json"),
    include_str!("../../../models/tests/torch/cnn.json"),
    include_str!("../../../models/tests/torch/transformer.json"),
    include_str!("../../../models/tests/torch/hybrid.json"),
    include_str!("../../../models/tests/torch/unet.json"),
    include_str!("../../../models/tests/torch/experts.json"),
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
