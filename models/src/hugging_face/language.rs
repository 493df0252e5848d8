//! Decoders with layer norms: GPT-2, GPT-J, Phi, GPT-NeoX, StarCoder2, MPT, OPT, BLOOM, Falcon.

use super::decoders::windowed;
use super::fields::{ConfigError, Fields, inexpressible, is_neutral, is_off};
use super::rotary::rotary;
use crate::families::{Decoder, FeedForward, Gpt, NormKind, ParallelBlock, PositionKind};
use crate::model::Model;
use serde_json::{Map, Value, json};

/// Reads an activation without a gate.
fn activation(fields: &mut Fields, field: &str, default: &str) -> Result<FeedForward, ConfigError> {
    let name = fields.text_or(field, default)?;
    match name.as_str() {
        "gelu" => Ok(FeedForward::Gelu),
        "gelu_new" | "gelu_fast" | "gelu_pytorch_tanh" => Ok(FeedForward::GeluTanh),
        "relu" => Ok(FeedForward::Relu),
        _ => Err(inexpressible(field, &json!(name), "activations: gelu, gelu_new, gelu_fast, gelu_pytorch_tanh, relu")),
    }
}

pub(super) fn gpt2(fields: &mut Fields) -> Result<Model, ConfigError> {
    fields.neutral(&["n_ctx", "summary_activation", "summary_first_dropout"]);
    fields.neutral(&["summary_proj_to_labels", "summary_type", "summary_use_proj"]);
    fields.must_be("scale_attn_weights", &[json!(true)], "scores are scaled by a head's features")?;
    fields.must_be_off("scale_attn_by_inverse_layer_idx", "scores are scaled in the same way in every layer")?;
    fields.must_be_off("add_cross_attention", "it is a decoder alone")?;
    if fields.flag_or("reorder_and_upcast_attn", false)? {
        fields.note(
            "`reorder_and_upcast_attn` computes scores in fp32 where attention is eager; here they have the plan's precision",
        );
    }
    let [layers, hidden, heads] = [fields.size_or("n_layer", 12)?, fields.size_or("n_embd", 768)?, fields.size_or("n_head", 12)?];
    let vocab = fields.size_or("vocab_size", 50_257)?;
    let rows = fields.size_or("n_positions", 1024)?;
    let sequence = fields.asked_sequence().unwrap_or(rows);
    let ffn = fields.optional("n_inner")?;
    let feed_forward = activation(fields, "activation_function", "gelu_new")?;
    let tied_embeddings = fields.flag_or("tie_word_embeddings", true)?;
    let dropout = fields.dropout(&[("resid_pdrop", 0.1), ("embd_pdrop", 0.1)])?;
    let attention_dropout = fields.dropout(&[("attn_pdrop", 0.1)])?;
    let norm_epsilon = fields.epsilon("layer_norm_epsilon", 1e-5)?;
    if feed_forward == FeedForward::GeluTanh && sequence == rows && norm_epsilon == Default::default() {
        return Ok(Model::Gpt(Gpt { layers, hidden, heads, ffn, vocab, sequence, tied_embeddings, dropout, attention_dropout }));
    }
    Ok(Model::Decoder(Decoder {
        positions: PositionKind::Learned,
        position_rows: Some(rows),
        feed_forward,
        tied_embeddings,
        dropout,
        attention_dropout,
        norm_epsilon,
        ..biased([layers, hidden, heads, ffn.unwrap_or(4 * hidden), vocab, sequence])
    }))
}

/// A decoder with layer norms and a bias in every product.
fn biased(sizes: [usize; 6]) -> Decoder {
    Decoder {
        norm: NormKind::Layer,
        feed_forward: FeedForward::GeluTanh,
        qkv_bias: true,
        attention_output_bias: true,
        ffn_bias: true,
        ..Decoder::llama(sizes)
    }
}

pub(super) fn phi(fields: &mut Fields) -> Result<Model, ConfigError> {
    fields.must_be_off("qk_layernorm", "queries and keys are not normed in Phi 1, 1.5 and 2")?;
    let [layers, hidden, heads] =
        [fields.size("num_hidden_layers")?, fields.size("hidden_size")?, fields.size("num_attention_heads")?];
    let (ffn, vocab) = (fields.size("intermediate_size")?, fields.size("vocab_size")?);
    let sequence = fields.sequence("max_position_embeddings", 2048)?;
    let rope = rotary(fields, 10_000.0, 0.5)?;
    let decoder = Decoder {
        kv_heads: fields.optional("num_key_value_heads")?.filter(|&kv_heads| kv_heads != heads),
        feed_forward: activation(fields, "hidden_act", "gelu_new")?,
        head_bias: true,
        parallel_block: ParallelBlock::OneNorm,
        rope_theta: rope.theta,
        rope_scaling: rope.is_scaled,
        norm_epsilon: fields.epsilon("layer_norm_eps", 1e-5)?,
        tied_embeddings: fields.flag_or("tie_word_embeddings", false)?,
        dropout: fields.dropout(&[("resid_pdrop", 0.0), ("embd_pdrop", 0.0)])?,
        attention_dropout: fields.dropout(&[("attention_dropout", 0.0)])?,
        ..biased([layers, hidden, heads, ffn, vocab, sequence])
    };
    Ok(Model::Decoder(Decoder { rotary_dimension: rope.rotated(&decoder)?, ..decoder }))
}

pub(super) fn gpt_neox(fields: &mut Fields) -> Result<Model, ConfigError> {
    fields.must_be_off("is_decoder", "it has no cross-attention")?;
    let [layers, hidden, heads] =
        [fields.size("num_hidden_layers")?, fields.size("hidden_size")?, fields.size("num_attention_heads")?];
    let (ffn, vocab) = (fields.size("intermediate_size")?, fields.size("vocab_size")?);
    let sequence = fields.sequence("max_position_embeddings", 2048)?;
    let is_parallel = fields.flag_or("use_parallel_residual", true)?;
    let has_bias = fields.flag_or("attention_bias", true)?;
    // The names before version 5.
    let share = fields.number_or("rotary_pct", 0.25)?;
    let base = fields.number_or("rotary_emb_base", 10_000.0)?;
    let rope = rotary(fields, base, share)?;
    let decoder = Decoder {
        feed_forward: activation(fields, "hidden_act", "gelu")?,
        qkv_bias: has_bias,
        attention_output_bias: has_bias,
        parallel_block: if is_parallel { ParallelBlock::OwnNorms } else { ParallelBlock::None },
        rope_theta: rope.theta,
        rope_scaling: rope.is_scaled,
        norm_epsilon: fields.epsilon("layer_norm_eps", 1e-5)?,
        tied_embeddings: fields.flag_or("tie_word_embeddings", false)?,
        dropout: fields.dropout(&[("hidden_dropout", 0.0)])?,
        attention_dropout: fields.dropout(&[("attention_dropout", 0.0)])?,
        ..biased([layers, hidden, heads, ffn, vocab, sequence])
    };
    Ok(Model::Decoder(Decoder { rotary_dimension: rope.rotated(&decoder)?, ..decoder }))
}

/// GPT-J: the products of attention have no biases, and the head has one.
pub(super) fn gptj(fields: &mut Fields) -> Result<Model, ConfigError> {
    fields.neutral(&["summary_activation", "summary_first_dropout"]);
    fields.neutral(&["summary_proj_to_labels", "summary_type", "summary_use_proj"]);
    fields.must_be("rotary", &[json!(true)], "queries and keys are rotated")?;
    fields.must_be("scale_attn_weights", &[json!(true)], "scores are scaled by a head's features")?;
    let [layers, hidden, heads] =
        [fields.size_or("n_layer", 28)?, fields.size_or("n_embd", 4096)?, fields.size_or("n_head", 16)?];
    let vocab = fields.size_or("vocab_size", 50_400)?;
    let sequence = fields.sequence("n_positions", 2048)?;
    let ffn = fields.size_or("n_inner", 4 * hidden)?;
    let rotated = fields.size_or("rotary_dim", 64)?;
    let decoder = Decoder {
        feed_forward: activation(fields, "activation_function", "gelu_new")?,
        qkv_bias: false,
        attention_output_bias: false,
        head_bias: true,
        parallel_block: ParallelBlock::OneNorm,
        norm_epsilon: fields.epsilon("layer_norm_epsilon", 1e-5)?,
        tied_embeddings: fields.flag_or("tie_word_embeddings", false)?,
        dropout: fields.dropout(&[("resid_pdrop", 0.0), ("embd_pdrop", 0.0)])?,
        attention_dropout: fields.dropout(&[("attn_pdrop", 0.0)])?,
        ..biased([layers, hidden, heads, ffn, vocab, sequence])
    };
    Ok(Model::Decoder(Decoder {
        rotary_dimension: Some(rotated).filter(|&rotated| rotated != decoder.head_features()),
        ..decoder
    }))
}

pub(super) fn starcoder2(fields: &mut Fields) -> Result<Model, ConfigError> {
    // Published files also have fields of older code. Its activation is `hidden_act`.
    fields.neutral(&["activation_function", "attention_softmax_in_fp32", "scale_attention_softmax_in_fp32"]);
    fields.neutral(&["layer_norm_epsilon"]);
    fields.must_be("mlp_type", &[json!("default")], "the feed-forward network has no gate")?;
    fields.must_be("norm_type", &[json!("layer_norm")], "norms have a scale and a shift")?;
    fields.must_be("scale_attn_weights", &[json!(true)], "scores are scaled by a head's features")?;
    let [layers, hidden, heads] = [
        fields.size_or("num_hidden_layers", 30)?,
        fields.size_or("hidden_size", 3072)?,
        fields.size_or("num_attention_heads", 24)?,
    ];
    let (ffn, vocab) = (fields.size_or("intermediate_size", 12_288)?, fields.size_or("vocab_size", 49_152)?);
    let sequence = fields.sequence("max_position_embeddings", 4096)?;
    let window = fields.optional("sliding_window")?;
    let has_bias = fields.flag_or("use_bias", true)?;
    let rope = rotary(fields, 10_000.0, 1.0)?;
    let decoder = Decoder {
        kv_heads: Some(fields.size_or("num_key_value_heads", 2)?).filter(|&kv_heads| kv_heads != heads),
        feed_forward: activation(fields, "hidden_act", "gelu_pytorch_tanh")?,
        qkv_bias: has_bias,
        attention_output_bias: has_bias,
        ffn_bias: has_bias,
        rope_theta: rope.theta,
        rope_scaling: rope.is_scaled,
        norm_epsilon: fields.epsilon("norm_epsilon", 1e-5)?,
        tied_embeddings: fields.flag_or("tie_word_embeddings", true)?,
        dropout: fields.dropout(&[("residual_dropout", 0.0), ("embedding_dropout", 0.0)])?,
        attention_dropout: fields.dropout(&[("attention_dropout", 0.0)])?,
        ..biased([layers, hidden, heads, ffn, vocab, sequence])
    };
    let decoder = Decoder { rotary_dimension: rope.rotated(&decoder)?, ..decoder };
    Ok(Model::Decoder(windowed(decoder, window)))
}

/// Checks the settings of MPT's attention that a file states. Each entry: the field of
/// `attn_config`, its allowed value, the reason.
fn mpt_attention(object: &Map<String, Value>) -> Result<(), ConfigError> {
    let fixed = [
        ("attn_type", json!("multihead_attention"), "each head has its own keys"),
        ("alibi", json!(true), "positions are known by ALiBi, as in Transformers' class"),
        ("qk_ln", json!(false), "queries and keys are not normed"),
        ("prefix_lm", json!(false), "a position sees itself and those before it"),
        ("attn_uses_sequence_id", json!(false), "a sample is one text"),
        ("clip_qkv", Value::Null, "queries, keys and values are not clipped"),
        ("rope", json!(false), "positions are known by ALiBi"),
        ("attn_pdrop", json!(0), "nothing is dropped"),
    ];
    // These choose a kernel, or scale the scores, which costs nothing.
    const FREE: [&str; 6] =
        ["attn_impl", "softmax_scale", "alibi_bias_max", "kv_n_heads", "model_type", "chunk_size_feed_forward"];
    for (name, value) in object.iter().filter(|(name, value)| !value.is_null() && !FREE.contains(&name.as_str())) {
        let field = format!("attn_config.{name}");
        match fixed.iter().find(|(known, _, _)| known == name) {
            Some((_, allowed, _)) if value == allowed || (*allowed == 0 && value.as_f64() == Some(0.0)) => {}
            Some((_, _, hint)) => return Err(inexpressible(&field, value, hint)),
            None if is_neutral(name) || is_off(value) => {}
            None => return Err(inexpressible(&field, value, "MPT's attention as in Transformers' class")),
        }
    }
    Ok(())
}

/// MPT: ALiBi, no biases, and norms without a shift.
pub(super) fn mpt(fields: &mut Fields) -> Result<Model, ConfigError> {
    fields.neutral(&["init_device", "init_config", "initializer_range", "learned_pos_emb", "verbose", "loss_fn", "fc_type"]);
    fields.neutral(&["ffn_config", "use_pad_tok_in_ffn"]);
    fields.must_be("no_bias", &[json!(true)], "neither products nor norms have biases")?;
    fields.must_be("expansion_ratio", &[json!(4)], "the feed-forward network is four times as wide")?;
    fields.must_be("logit_scale", &[], "logits are not scaled")?;
    fields.must_be("embedding_fraction", &[json!(1.0), json!(1)], "the whole gradient of the embedding counts")?;
    let norms = [json!("low_precision_layernorm"), json!("layernorm")];
    fields.must_be("norm_type", &norms, "norms are layer norms with a scale")?;
    for field in ["resid_pdrop", "emb_pdrop"] {
        fields.must_be(field, &[json!(0.0), json!(0)], "nothing is dropped")?;
    }
    if let Some(attention) = fields.object("attn_config")? {
        mpt_attention(&attention)?;
    }
    let [layers, hidden, heads] =
        [fields.size_or("n_layers", 24)?, fields.size_or("d_model", 2048)?, fields.size_or("n_heads", 16)?];
    let vocab = fields.size_or("vocab_size", 50_368)?;
    let sequence = fields.sequence("max_seq_len", 2048)?;
    Ok(Model::Decoder(Decoder {
        norm: NormKind::LayerWithoutShift,
        positions: PositionKind::Alibi,
        feed_forward: FeedForward::Gelu,
        norm_epsilon: fields.epsilon("layer_norm_epsilon", 1e-5)?,
        tied_embeddings: fields.flag_or("tie_word_embeddings", true)?,
        ..Decoder::llama([layers, hidden, heads, 4 * hidden, vocab, sequence])
    }))
}

/// Rows before the first position in OPT's table.
const OPT_OFFSET: usize = 2;

pub(super) fn opt(fields: &mut Fields) -> Result<Model, ConfigError> {
    fields.neutral(&["init_std", "activation_dropout"]);
    fields.must_be("do_layer_norm_before", &[json!(true)], "norms come before attention and the feed-forward network")?;
    fields.must_be_off("_remove_final_layer_norm", "the last norm is there")?;
    fields.must_be("layerdrop", &[json!(0.0), json!(0)], "no layers are dropped")?;
    fields.must_be("layer_norm_elementwise_affine", &[json!(true)], "norms have a scale and a shift")?;
    let [layers, hidden, heads] = [
        fields.size_or("num_hidden_layers", 12)?,
        fields.size_or("hidden_size", 768)?,
        fields.size_or("num_attention_heads", 12)?,
    ];
    let projected = fields.size_or("word_embed_proj_dim", hidden)?;
    if projected != hidden {
        return Err(inexpressible("word_embed_proj_dim", &json!(projected), "the embedding has `hidden_size` features"));
    }
    let has_bias = fields.flag_or("enable_bias", true)?;
    let (ffn, vocab) = (fields.size_or("ffn_dim", 3072)?, fields.size_or("vocab_size", 50_272)?);
    let longest = fields.size_or("max_position_embeddings", 2048)?;
    Ok(Model::Decoder(Decoder {
        positions: PositionKind::Learned,
        position_rows: Some(longest + OPT_OFFSET),
        first_position: OPT_OFFSET,
        feed_forward: activation(fields, "activation_function", "relu")?,
        qkv_bias: has_bias,
        attention_output_bias: has_bias,
        ffn_bias: has_bias,
        tied_embeddings: fields.flag_or("tie_word_embeddings", true)?,
        dropout: fields.dropout(&[("dropout", 0.1)])?,
        attention_dropout: fields.dropout(&[("attention_dropout", 0.0)])?,
        ..biased([layers, hidden, heads, ffn, vocab, fields.asked_sequence().unwrap_or(longest)])
    }))
}

pub(super) fn bloom(fields: &mut Fields) -> Result<Model, ConfigError> {
    fields.neutral(&["offset_alibi", "masked_softmax_fusion", "bias_dropout_fusion"]);
    let is_exact = fields.flag_or("slow_but_exact", false)?;
    fields.sliced_products(is_exact)?;
    fields.neutral(&["skip_bias_add", "skip_bias_add_qkv", "attention_softmax_in_fp32", "unk_token_id"]);
    fields.must_be_off("apply_residual_connection_post_layernorm", "the residual stream is not normed")?;
    let old = fields.optional("n_embed")?;
    let hidden = fields.optional("hidden_size")?.or(old).unwrap_or(64);
    let names = [("n_layer", "num_hidden_layers", 2), ("n_head", "num_attention_heads", 8)];
    let [layers, heads] = {
        let mut sizes = [0; 2];
        for (size, (name, other, default)) in sizes.iter_mut().zip(names) {
            let other = fields.optional(other)?;
            *size = fields.optional(name)?.or(other).unwrap_or(default);
        }
        sizes
    };
    let ffn = fields.size_or("n_inner", 4 * hidden)?;
    let vocab = fields.size_or("vocab_size", 250_880)?;
    // Positions are distances, so there is no longest length; BLOOM was trained with 2048.
    let sequence = fields.sequence("seq_length", 2048)?;
    Ok(Model::Decoder(Decoder {
        positions: PositionKind::Alibi,
        embedding_norm: true,
        norm_epsilon: fields.epsilon("layer_norm_epsilon", 1e-5)?,
        tied_embeddings: fields.flag_or("tie_word_embeddings", true)?,
        dropout: fields.dropout(&[("hidden_dropout", 0.0)])?,
        attention_dropout: fields.dropout(&[("attention_dropout", 0.0)])?,
        ..biased([layers, hidden, heads, ffn, vocab, sequence])
    }))
}

pub(super) fn falcon(fields: &mut Fields) -> Result<Model, ConfigError> {
    fields.must_be_off("apply_residual_connection_post_layernorm", "the residual stream is not normed")?;
    let old = [("n_layer", "num_hidden_layers", 32), ("n_head", "num_attention_heads", 71)];
    let mut sizes = [0; 2];
    for (size, (name, other, default)) in sizes.iter_mut().zip(old) {
        let other = fields.optional(other)?;
        *size = fields.optional(name)?.or(other).unwrap_or(default);
    }
    let [layers, heads] = sizes;
    let hidden = fields.size_or("hidden_size", 4544)?;
    let ffn = fields.size_or("ffn_hidden_size", 4 * hidden)?;
    let vocab = fields.size_or("vocab_size", 65_024)?;
    let sequence = fields.sequence("max_position_embeddings", 2048)?;
    let is_new = fields.flag_or("new_decoder_architecture", false)?;
    let shares_keys = fields.flag_or("multi_query", true)?;
    let old_heads = fields.optional("n_head_kv")?;
    let stated = fields.optional("num_kv_heads")?.or(old_heads).unwrap_or(heads);
    let kv_heads = if is_new {
        stated
    } else if shares_keys {
        1
    } else {
        heads
    };
    let is_parallel = fields.flag_or("parallel_attn", true)?;
    let norms = fields.optional("num_ln_in_parallel_attn")?.unwrap_or(if is_new { 2 } else { 1 });
    let has_bias = fields.flag_or("bias", false)?;
    let has_alibi = fields.flag_or("alibi", false)?;
    let rope = rotary(fields, 10_000.0, 1.0)?;
    let parallel_block = match (is_parallel || is_new, norms) {
        (false, _) => ParallelBlock::None,
        (true, 1) => ParallelBlock::OneNorm,
        (true, _) => ParallelBlock::OwnNorms,
    };
    Ok(Model::Decoder(Decoder {
        kv_heads: Some(kv_heads).filter(|&kv_heads| kv_heads != heads),
        positions: if has_alibi { PositionKind::Alibi } else { PositionKind::Rotary },
        rope_theta: rope.theta,
        rope_scaling: rope.is_scaled,
        feed_forward: activation(fields, "activation", "gelu")?,
        qkv_bias: has_bias,
        attention_output_bias: has_bias,
        ffn_bias: has_bias,
        parallel_block,
        norm_epsilon: fields.epsilon("layer_norm_epsilon", 1e-5)?,
        tied_embeddings: fields.flag_or("tie_word_embeddings", true)?,
        dropout: fields.dropout(&[("hidden_dropout", 0.0)])?,
        attention_dropout: fields.dropout(&[("attention_dropout", 0.0)])?,
        ..biased([layers, hidden, heads, ffn, vocab, sequence])
    }))
}
