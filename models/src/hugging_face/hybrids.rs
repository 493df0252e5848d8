//! Models with linear attention in some layers or all: Qwen3-Next and 3.5, Granite 4, Bamba,
//! Falcon-H1, Nemotron-H, Mamba-2.

use super::decoders::{Defaults, LLAMA, common, dense_layers, mixtures, router, silu};
use super::fields::{ConfigError, Fields, inexpressible};
use crate::families::{Decoder, FeedForward, LayerKind, LinearAttention, LinearNorm, Mixtures, PositionKind};
use crate::kernel::ScanRule;
use crate::model::Model;
use serde_json::{Value, json};

/// Positions of a chunk of the gated delta rule (`chunk_gated_delta_rule` of
/// flash-linear-attention and of Transformers).
pub(super) const DELTA_CHUNK: usize = 64;

/// The most layers that a file may list.
const MOST_LAYERS: usize = 10_000;

/// The kinds of the listed layers, by their names in `known`.
pub(super) fn kinds_of(layers: &[Value], field: &str, known: &[(&str, LayerKind)]) -> Result<Vec<LayerKind>, ConfigError> {
    if layers.len() > MOST_LAYERS {
        return Err(inexpressible(field, &json!(layers.len()), "a model has 10,000 layers at most"));
    }
    let one = |layer: &Value| known.iter().find(|(name, _)| layer == name).map(|(_, kind)| *kind);
    let all: Option<Vec<LayerKind>> = layers.iter().map(one).collect();
    let names: Vec<&str> = known.iter().map(|(name, _)| *name).collect();
    all.ok_or_else(|| inexpressible(field, &json!(layers), &format!("layers of this type are {}", names.join(", "))))
}

/// Refuses a list of layers of another length than the model.
pub(super) fn is_of_all_layers(listed: Option<usize>, layers: usize) -> Result<(), ConfigError> {
    match listed {
        Some(listed) if listed != layers => {
            Err(inexpressible("layer_types", &json!(format!("{listed} layers")), &format!("`num_hidden_layers` is {layers}")))
        }
        _ => Ok(()),
    }
}

/// The shortest list whose repetition gives the kinds of all layers.
pub(super) fn shortest(kinds: Vec<LayerKind>) -> Vec<LayerKind> {
    let repeats = |period: &usize| kinds.iter().enumerate().all(|(layer, kind)| *kind == kinds[layer % period]);
    let period = (1..=kinds.len()).find(repeats).unwrap_or(kinds.len());
    kinds[..period].to_vec()
}

/// The names of a layer with attention and of one without, in version 5 and before.
pub(super) const KINDS: [(&str, LayerKind); 4] = [
    ("linear_attention", LayerKind::Linear),
    ("mamba", LayerKind::Linear),
    ("full_attention", LayerKind::Attention),
    ("attention", LayerKind::Attention),
];

/// Reads the fields that Qwen3-Next and 3.5 have: the gated delta rule in three of four layers, and
/// gated attention in the fourth.
fn qwen_parts(fields: &mut Fields, defaults: &Defaults) -> Result<Decoder, ConfigError> {
    silu(fields)?;
    fields.must_be("attn_output_gate", &[json!(true)], "a gate weighs what attention gives")?;
    fields.must_be("linear_act", &[json!("silu")], "the convolution has a SiLU")?;
    fields.neutral(&["mamba_ssm_dtype", "mtp_use_dedicated_embeddings"]);
    let modules = fields.count_or("mtp_num_hidden_layers", 0)?;
    if modules > 0 {
        fields.note(format!("{modules} layers of multi-token prediction are left out, as in Transformers"));
    }
    let every = fields.size_or("full_attention_interval", 4)?;
    let kinds = fields.list("layer_types")?;
    let linear = LinearAttention {
        rule: ScanRule::GatedDelta,
        heads: fields.size_or("linear_num_value_heads", 32)?,
        head_dimension: fields.size_or("linear_value_head_dim", 128)?,
        key_heads: fields.size_or("linear_num_key_heads", 16)?,
        key_dimension: fields.size_or("linear_key_head_dim", 128)?,
        convolution: fields.size_or("linear_conv_kernel_dim", 4)?,
        convolution_bias: false,
        bias: false,
        rank: None,
        norm: LinearNorm::Heads,
        chunk: DELTA_CHUNK,
    };
    let listed = kinds.as_ref().map(Vec::len);
    let layer_kinds = match kinds {
        Some(kinds) => shortest(kinds_of(&kinds, "layer_types", &KINDS)?),
        None => (1..=every.min(MOST_LAYERS))
            .map(|layer| if layer == every { LayerKind::Attention } else { LayerKind::Linear })
            .collect(),
    };
    let has_bias = fields.flag_or("attention_bias", false)?;
    fields.default_rotary_share(0.25);
    let decoder = common(fields, defaults)?;
    is_of_all_layers(listed, decoder.layers)?;
    Ok(Decoder {
        qkv_bias: has_bias,
        attention_output_bias: has_bias,
        query_key_norm: true,
        attention_gate: true,
        layer_kinds,
        linear: Some(linear),
        ..decoder
    })
}

const QWEN_NEXT: Defaults = Defaults { sequence: 32_768, kv_heads: Some(2), head_dimension: Some(256), ..LLAMA };

/// Reads the mixtures of Qwen3-Next and 3.5: a shared expert with a gate of its own.
fn qwen_mixtures(fields: &mut Fields, [experts, top_k]: [usize; 2]) -> Result<Mixtures, ConfigError> {
    let (first, every) = dense_layers(fields)?;
    let sizes = [
        fields.size_or("num_experts", experts)?,
        fields.size_or("num_experts_per_tok", top_k)?,
        fields.size_or("moe_intermediate_size", 512)?,
    ];
    let shared = fields.count_or("shared_expert_intermediate_size", 512)?;
    let is_normalised = fields.flag_or("norm_topk_prob", true)?;
    router(fields)?;
    Ok(Mixtures {
        first,
        every,
        shared_ffn: Some(shared).filter(|&ffn| ffn > 0),
        shared_gate: shared > 0,
        unnormalised_gates: !is_normalised,
        ..mixtures(sizes)
    })
}

pub(super) fn qwen3_next(fields: &mut Fields) -> Result<Model, ConfigError> {
    let mixtures = qwen_mixtures(fields, [512, 10])?;
    let decoder = qwen_parts(fields, &QWEN_NEXT)?;
    Ok(Model::Decoder(Decoder { mixtures: Some(mixtures), ..decoder }))
}

pub(super) fn qwen3_5(fields: &mut Fields) -> Result<Model, ConfigError> {
    Ok(Model::Decoder(qwen_parts(fields, &Defaults { kv_heads: Some(4), ..QWEN_NEXT })?))
}

pub(super) fn qwen3_5_moe(fields: &mut Fields) -> Result<Model, ConfigError> {
    let mixtures = qwen_mixtures(fields, [256, 8])?;
    // Every layer is a mixture, so a file states no dense width.
    if !fields.has("intermediate_size") {
        fields.set("intermediate_size", json!(mixtures.ffn));
    }
    let decoder = qwen_parts(fields, &QWEN_NEXT)?;
    Ok(Model::Decoder(Decoder { mixtures: Some(mixtures), ..decoder }))
}

/// Names of the fields of Mamba-2 layers in one type, with defaults: heads, features of a head,
/// groups, state, window, chunk.
type MambaFields = [(&'static str, usize); 6];

const MAMBA: MambaFields = [
    ("mamba_n_heads", 128),
    ("mamba_d_head", 64),
    ("mamba_n_groups", 1),
    ("mamba_d_state", 256),
    ("mamba_d_conv", 4),
    ("mamba_chunk_size", 256),
];

/// Reads the sizes of Mamba-2 layers. `biases` are the fields for the convolution's bias and for
/// those of the products.
fn mamba(fields: &mut Fields, names: &MambaFields, biases: [&str; 2]) -> Result<LinearAttention, ConfigError> {
    fields.neutral(&["time_step_limit", "time_step_min", "time_step_max", "time_step_floor", "time_step_rank"]);
    fields.neutral(&["mamba_dt_min", "mamba_dt_max", "mamba_dt_limit", "mamba_dt_init_floor"]);
    fields.neutral(&["mamba_ssm_cache_dtype", "use_mamba_kernels", "residual_in_fp32", "rescale_prenorm_residual"]);
    // The inner width follows from the number of heads and their features.
    fields.neutral(&["mamba_expand", "expand", "num_logits_to_keep"]);
    let mut sizes = [0; 6];
    for (size, (name, default)) in sizes.iter_mut().zip(names) {
        *size = fields.size_or(name, *default)?;
    }
    let [heads, head_dimension, key_heads, key_dimension, convolution, chunk] = sizes;
    Ok(LinearAttention {
        rule: ScanRule::StateSpace,
        heads,
        head_dimension,
        key_heads,
        key_dimension,
        convolution,
        convolution_bias: fields.flag_or(biases[0], true)?,
        bias: fields.flag_or(biases[1], false)?,
        rank: None,
        norm: if key_heads > 1 { LinearNorm::Groups } else { LinearNorm::Whole },
        chunk,
    })
}

/// Numbers with which a type scales parts of a layer. A product with one number is part of the
/// kernel before it.
const SCALES: [&str; 12] = [
    "embedding_multiplier",
    "logits_scaling",
    "residual_multiplier",
    "attention_multiplier",
    "lm_head_multiplier",
    "mlp_multipliers",
    "key_multiplier",
    "attention_out_multiplier",
    "attention_in_multiplier",
    "ssm_multipliers",
    "ssm_in_multiplier",
    "ssm_out_multiplier",
];

/// Granite 4: Mamba-2 in most layers, and a dense network beside the experts.
pub(super) fn granite_hybrid(fields: &mut Fields) -> Result<Model, ConfigError> {
    silu(fields)?;
    fields.neutral(&SCALES);
    fields.neutral(&["normalization_function", "init_method"]);
    // Older files say `auto`: the inner width divided by the number of heads.
    let hidden = fields.size("hidden_size")?;
    let widen = fields.size_or("mamba_expand", 2)?;
    if fields.take("mamba_d_head").is_none_or(|features| features == "auto") {
        let heads = fields.size_or("mamba_n_heads", 128)?;
        fields.set("mamba_d_head", json!(hidden * widen / heads));
    }
    let linear = mamba(fields, &MAMBA, ["mamba_conv_bias", "mamba_proj_bias"])?;
    let kinds = match fields.list("layers_block_type")? {
        Some(kinds) => Some(kinds),
        None => fields.list("layer_types")?,
    };
    let listed = kinds.as_ref().map(Vec::len);
    let layer_kinds = match kinds {
        Some(kinds) => shortest(kinds_of(&kinds, "layer_types", &KINDS)?),
        None => vec![LayerKind::Linear],
    };
    let experts = fields.count_or("num_local_experts", 8)?;
    let top_k = fields.count_or("num_experts_per_tok", 2)?;
    let shared = fields.size_or("shared_intermediate_size", 1024)?;
    let has_bias = fields.flag_or("attention_bias", false)?;
    let position = fields.text_or("position_embedding_type", "nope")?;
    let positions = match position.as_str() {
        "nope" => PositionKind::None,
        "rope" => PositionKind::Rotary,
        _ => return Err(inexpressible("position_embedding_type", &json!(position), "positions: nope, rope")),
    };
    router(fields)?;
    fields.note("Granite's scales of embedding, scores, layers and logits are left out: they cost nothing, and results differ");
    let decoder = common(fields, &LLAMA)?;
    is_of_all_layers(listed, decoder.layers)?;
    let mixtures = (experts > 0).then(|| Mixtures { shared_ffn: Some(shared), ..mixtures([experts, top_k.max(1), decoder.ffn]) });
    Ok(Model::Decoder(Decoder {
        ffn: if mixtures.is_some() { decoder.ffn } else { shared },
        qkv_bias: has_bias,
        attention_output_bias: has_bias,
        positions,
        rotary_dimension: decoder.rotary_dimension.filter(|_| positions == PositionKind::Rotary),
        layer_kinds,
        linear: Some(linear),
        mixtures,
        ..decoder
    }))
}

pub(super) fn bamba(fields: &mut Fields) -> Result<Model, ConfigError> {
    silu(fields)?;
    fields.neutral(&["z_loss_coefficient", "attn_rotary_emb"]);
    let linear = mamba(fields, &MAMBA, ["mamba_conv_bias", "mamba_proj_bias"])?;
    let with_attention = fields.list("attn_layer_indices")?.unwrap_or_default();
    fields.list("layers_block_type")?;
    fields.list("layer_types")?;
    let has_bias = fields.flag_or("attention_bias", false)?;
    let ffn_bias = fields.flag_or("mlp_bias", false)?;
    fields.default_rotary_share(0.5);
    let decoder = common(fields, &Defaults { sequence: 262_144, epsilon: 1e-5, kv_heads: Some(8), ..LLAMA })?;
    let kind = |layer: usize| match with_attention.iter().any(|index| *index == layer) {
        true => LayerKind::Attention,
        false => LayerKind::Linear,
    };
    let layer_kinds = shortest((0..decoder.layers.min(MOST_LAYERS)).map(kind).collect());
    Ok(Model::Decoder(Decoder {
        qkv_bias: has_bias,
        attention_output_bias: has_bias,
        ffn_bias,
        layer_kinds,
        linear: Some(linear),
        ..decoder
    }))
}

pub(super) fn falcon_h1(fields: &mut Fields) -> Result<Model, ConfigError> {
    silu(fields)?;
    fields.neutral(&SCALES);
    fields.neutral(&["mamba_norm_before_gate", "mamba_use_mlp"]);
    let inner = fields.size_or("mamba_d_ssm", 1024)?;
    let heads = fields.size_or("mamba_n_heads", 128)?;
    if fields.take("mamba_d_head").is_none_or(|features| features == "auto") {
        fields.set("mamba_d_head", json!(inner / heads));
    }
    let features = fields.size("mamba_d_head")?;
    if features.saturating_mul(heads) != inner {
        let hint = format!("{heads} heads of {features} features make another width, which Transformers refuses");
        return Err(inexpressible("mamba_d_ssm", &json!(inner), &hint));
    }
    let has_norm = fields.flag_or("mamba_rms_norm", false)?;
    let linear = mamba(fields, &MAMBA, ["mamba_conv_bias", "mamba_proj_bias"])?;
    if fields.flag_or("projectors_bias", false)? != linear.bias {
        let hint = "the products of Mamba-2 have biases or they have none";
        return Err(inexpressible("projectors_bias", &json!(!linear.bias), hint));
    }
    let norm = if has_norm { linear.norm } else { LinearNorm::None };
    let has_bias = fields.flag_or("attention_bias", false)?;
    let ffn_bias = fields.flag_or("mlp_bias", false)?;
    fields.note("Falcon-H1's multipliers are left out: they cost nothing, and results differ");
    let decoder = common(fields, &Defaults { sequence: 8192, epsilon: 1e-5, kv_heads: Some(8), ..LLAMA })?;
    Ok(Model::Decoder(Decoder {
        qkv_bias: has_bias,
        attention_output_bias: has_bias,
        ffn_bias,
        layer_kinds: vec![LayerKind::AttentionAndLinear],
        linear: Some(LinearAttention { norm, ..linear }),
        ..decoder
    }))
}

/// Nemotron-H's names of layers, in version 5 and before, and their letters in
/// `hybrid_override_pattern`.
const NEMOTRON_KINDS: [(&str, LayerKind); 10] = [
    ("linear_attention", LayerKind::LinearAlone),
    ("mamba", LayerKind::LinearAlone),
    ("full_attention", LayerKind::AttentionAlone),
    ("attention", LayerKind::AttentionAlone),
    ("mlp", LayerKind::DenseAlone),
    ("moe", LayerKind::MixtureAlone),
    ("M", LayerKind::LinearAlone),
    ("*", LayerKind::AttentionAlone),
    ("-", LayerKind::DenseAlone),
    ("E", LayerKind::MixtureAlone),
];

/// Nemotron-H and 3: each layer has a single part.
pub(super) fn nemotron_h(fields: &mut Fields) -> Result<Model, ConfigError> {
    fields.must_be("mlp_hidden_act", &[json!("relu2")], "feed-forward networks of this type have a squared ReLU")?;
    fields.must_be("mamba_hidden_act", &[json!("silu")], "the convolution has a SiLU")?;
    fields.must_be("moe_latent_size", &[], "experts work on all features")?;
    fields.must_be("sliding_window", &[], "every layer sees all positions")?;
    fields.must_be_off("attention_bias", "attention has no biases")?;
    fields.neutral(&["routed_scaling_factor", "n_group", "topk_group", "moe_shared_expert_overlap", "n_shared_experts"]);
    fields.neutral(&["mtp_layers_block_type", "mtp_hybrid_override_pattern", "attention_head_dim", "mamba_proj_bias"]);
    let names: MambaFields = [
        ("mamba_num_heads", 128),
        ("mamba_head_dim", 64),
        (if fields.has("mamba_n_groups") { "mamba_n_groups" } else { "n_groups" }, 8),
        ("ssm_state_size", 128),
        (if fields.has("mamba_d_conv") { "mamba_d_conv" } else { "conv_kernel" }, 4),
        (if fields.has("mamba_chunk_size") { "mamba_chunk_size" } else { "chunk_size" }, 128),
    ];
    let linear = mamba(fields, &names, ["use_conv_bias", "use_bias"])?;
    let pattern = fields.text_or("hybrid_override_pattern", "")?;
    let letters = || pattern.chars().map(|letter| Value::String(letter.to_string())).collect::<Vec<_>>();
    let listed = match fields.list("layers_block_type")? {
        Some(kinds) => kinds,
        None if !pattern.is_empty() => letters(),
        None => ["linear_attention", "moe", "full_attention", "mlp"].map(Value::from).to_vec(),
    };
    let kinds = kinds_of(&listed, "layers_block_type", &NEMOTRON_KINDS)?;
    fields.set("num_hidden_layers", json!(kinds.len()));
    let modules = fields.count_or("num_nextn_predict_layers", 0)?;
    if modules > 0 {
        fields.note(format!("{modules} layers of multi-token prediction are left out"));
    }
    let sizes = [
        fields.size_or("n_routed_experts", 8)?,
        fields.size_or("num_experts_per_tok", 2)?,
        fields.size_or("moe_intermediate_size", 7688)?,
    ];
    let shared = fields.count_or("moe_shared_expert_intermediate_size", 7688)?;
    let is_normalised = fields.flag_or("norm_topk_prob", true)?;
    let mixtures = match kinds.contains(&LayerKind::MixtureAlone) {
        true => {
            router(fields)?;
            fields.note("gates are a softmax over the chosen experts, and in Nemotron 3 they are sigmoids, normed and scaled");
            let shared_ffn = Some(shared).filter(|&ffn| ffn > 0);
            Some(Mixtures { shared_ffn, unnormalised_gates: !is_normalised, ..mixtures(sizes) })
        }
        false => {
            fields.neutral(&["router_aux_loss_coef", "output_router_logits"]);
            None
        }
    };
    let ffn_bias = fields.flag_or("mlp_bias", false)?;
    // Three names of one number.
    let epsilon = fields.number_or("layer_norm_epsilon", 1e-5)?;
    let epsilon = fields.number_or("norm_eps", epsilon)?;
    let epsilon = fields.number_or("rms_norm_eps", epsilon)?;
    fields.set("rms_norm_eps", json!(epsilon));
    let dropout = fields.dropout(&[("hidden_dropout", 0.0)])?;
    if !fields.has("intermediate_size") {
        fields.set("intermediate_size", json!(21_504));
    }
    let defaults = Defaults { sequence: 4096, kv_heads: Some(8), head_dimension: Some(128), ..LLAMA };
    let decoder = common(fields, &defaults)?;
    Ok(Model::Decoder(Decoder {
        feed_forward: FeedForward::SquaredRelu,
        ffn_bias,
        positions: PositionKind::None,
        rotary_dimension: None,
        layer_kinds: shortest(kinds),
        linear: Some(linear),
        mixtures,
        dropout,
        ..decoder
    }))
}

/// Positions of a sample of Mamba-2, whose files state no length (Dao and Gu 2024, section 9.2).
const MAMBA_SEQUENCE: usize = 2048;

pub(super) fn mamba2(fields: &mut Fields) -> Result<Model, ConfigError> {
    silu(fields)?;
    let names: MambaFields =
        [("num_heads", 128), ("head_dim", 64), ("n_groups", 8), ("state_size", 128), ("conv_kernel", 4), ("chunk_size", 256)];
    let linear = mamba(fields, &names, ["use_conv_bias", "use_bias"])?;
    let [layers, hidden] = [fields.size_or("num_hidden_layers", 64)?, fields.size_or("hidden_size", 4096)?];
    let vocab = fields.size_or("vocab_size", 32_768)?;
    let sequence = fields.asked_sequence().unwrap_or(MAMBA_SEQUENCE);
    if fields.asked_sequence().is_none() {
        fields.note(format!("a sample has {sequence} positions: the file states no length (`--sequence` sets another)"));
    }
    Ok(Model::Decoder(Decoder {
        // No layer has attention or a feed-forward network.
        head_dimension: Some(linear.head_dimension),
        positions: PositionKind::None,
        norm_epsilon: fields.epsilon("layer_norm_epsilon", 1e-5)?,
        tied_embeddings: fields.flag_or("tie_word_embeddings", false)?,
        layer_kinds: vec![LayerKind::LinearAlone],
        linear: Some(linear),
        ..Decoder::llama([layers, hidden, 1, 1, vocab, sequence])
    }))
}
