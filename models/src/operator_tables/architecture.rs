//! The traced architecture whose layers equal those of a model.

use crate::families::{Decoder, FeedForward, LayerKind, LinearAttention, LinearNorm, NormKind, ParallelBlock, PositionKind};
use crate::kernel::ScanRule;
use crate::model::Model;

/// The value of `architecture` in the keys of the tables that were traced from layers like the
/// model's; `None` if no architecture has such layers.
pub fn traced_architecture(model: &Model) -> Option<&'static str> {
    match model {
        Model::Llama(_) => Some("llama"),
        Model::Gpt(_) => Some("gpt2"),
        // DistilBERT has no token types.
        Model::Bert(model) => (model.token_types > 0 && !model.keeps_attention_output).then_some("bert"),
        Model::Moe(model) => {
            let is_mixtral = model.shared_ffn.is_none() && model.dense_layers == 0 && model.moe_every == 1;
            (is_mixtral && model.query_rank.is_none() && model.key_value_rank.is_none()).then_some("mixtral")
        }
        Model::Decoder(model) if has_untraced_parts(model) => None,
        Model::Decoder(model) => of_decoder(model).or_else(|| of_later_parts(model)),
        // Whisper's tables have equally many layers in encoder and decoder, and fixed sizes of the
        // spectrogram.
        Model::Whisper(model) => {
            let is_even = model.decoder_layers.is_none_or(|layers| layers == model.layers);
            (is_even && model.mel_bins == 80 && model.source_positions == 1500).then_some("whisper")
        }
        Model::T5(model) => (!model.gated && model.tied_embeddings && model.relative_buckets == 32).then_some("t5"),
        // The sizes of images and classes are written into its tables.
        Model::Vit(model) => ([model.image, model.patch, model.channels, model.classes] == [224, 16, 3, 1000]).then_some("vit"),
        _ => None,
    }
}

/// Whether a model's head shares the embedding's weights, although its architecture also allows a
/// head of its own.
pub fn is_tied(model: &Model) -> bool {
    match model {
        Model::Llama(model) => model.tied_embeddings,
        Model::Decoder(model) => model.tied_embeddings,
        Model::Moe(model) => model.tied_embeddings,
        _ => false,
    }
}

/// The number of table layers that a decoder's layers correspond to; one table layer may stand for
/// several. Dense layers before the first mixture are in no table.
pub(super) fn table_layers(model: &Decoder) -> usize {
    let before = model.mixtures.map_or(0, |mixtures| mixtures.first);
    model.layers.saturating_sub(before) / layers_of_one(model)
}

/// How many of a decoder's layers one table layer stands for: a period of layers if some have
/// linear attention, else 1.
fn layers_of_one(model: &Decoder) -> usize {
    model.layer_kinds.len().max(1)
}

/// How many of a model's layers one table layer stands for.
pub fn layers_of_table_layer(model: &Model) -> usize {
    if let Model::Decoder(model) = model { layers_of_one(model) } else { 1 }
}

/// Whether a decoder has parts that only some traced architectures have.
fn has_later_parts(model: &Decoder) -> bool {
    let of_mixtures = model.mixtures.is_some_and(|mixtures| mixtures.router_bias || mixtures.expert_bias);
    let of_norms = model.query_key_norm_of_all_heads || model.no_input_norms;
    of_norms || of_mixtures || model.vision.is_some() || model.sinks || model.attention_gate || !model.layer_kinds.is_empty()
}

/// Whether a decoder has parts that no traced architecture has.
fn has_untraced_parts(model: &Decoder) -> bool {
    let of_norms = model.query_key_scales_of_heads || model.value_norm || model.residual_after_norm;
    let of_layers = model.full_attention.is_some() || model.shared_keys.is_some() || model.layer_inputs.is_some();
    of_norms || of_layers || model.layer_scales || model.logit_scale || model.unrotated_every.is_some()
}

/// Architectures with parts of their own: sinks, keys and values of low rank, linear attention, a
/// bias of the head.
fn of_later_parts(model: &Decoder) -> Option<&'static str> {
    let is_plain = model.query_rank.is_none() && model.prediction_modules == 0 && model.vision.is_none();
    if !is_plain || model.query_key_norm_of_all_heads || model.no_input_norms || model.output_norms || model.embedding_norm {
        return None;
    }
    if model.head_bias {
        let is_phi = model.norm == NormKind::Layer && model.parallel_block == ParallelBlock::OneNorm && model.mixtures.is_none();
        return (is_phi && model.qkv_bias && model.ffn_bias && model.positions == PositionKind::Rotary).then_some("phi");
    }
    let is_usual = model.norm == NormKind::Rms
        && model.parallel_block == ParallelBlock::None
        && model.feed_forward == FeedForward::GatedSilu
        && model.mixtures.is_none_or(|mixtures| mixtures.every == 1);
    let has_biases = model.qkv_bias || model.attention_output_bias || model.ffn_bias;
    match (&model.linear, &model.mixtures) {
        _ if !is_usual => None,
        (Some(linear), _) if !has_biases => of_linear_attention(model, linear),
        (None, Some(mixtures)) if model.sinks => {
            let has_all_biases = model.qkv_bias && mixtures.router_bias && mixtures.expert_bias;
            (has_all_biases && mixtures.first == 0 && mixtures.shared_ffn.is_none()).then_some("gpt_oss")
        }
        (None, Some(mixtures)) if model.key_value_rank.is_some() && model.rotary_part.is_some() => {
            let is_v2 = mixtures.first == 1 && mixtures.shared_ffn == Some(2 * mixtures.ffn) && mixtures.unnormalised_gates;
            (is_v2 && !has_biases && !model.rank_bias && !mixtures.shared_gate).then_some("deepseek_v2")
        }
        _ => None,
    }
}

/// Hybrids. Each layer of their tables is a period of the model's layers.
fn of_linear_attention(model: &Decoder, linear: &LinearAttention) -> Option<&'static str> {
    let attention = model.layer_kinds.iter().position(|&kind| kind == LayerKind::Attention)?;
    let is_periodic = model.layers.is_multiple_of(model.layer_kinds.len())
        && model.layer_kinds.iter().enumerate().all(|(layer, &kind)| layer == attention || kind == LayerKind::Linear);
    if !is_periodic || model.mixtures.is_some_and(|mixtures| mixtures.first > 0) || linear.bias || linear.convolution != 4 {
        return None;
    }
    let shared = model.mixtures.map(|mixtures| (mixtures.shared_ffn.is_some(), mixtures.shared_gate));
    match (linear.rule, attention, model.layer_kinds.len()) {
        (ScanRule::GatedDelta, 3, 4) if shared == Some((true, true)) && model.attention_gate && model.query_key_norm => {
            Some("qwen3_next")
        }
        (ScanRule::StateSpace, 5, 10)
            if linear.norm == LinearNorm::Whole
                && linear.key_heads == 1
                && linear.chunk == 256
                && linear.heads * linear.head_dimension == 2 * model.hidden
                && model.positions == PositionKind::None =>
        {
            match shared {
                None => Some("granite_hybrid"),
                Some((true, false)) => Some("granite_hybrid_moe"),
                _ => None,
            }
        }
        _ => None,
    }
}

/// Decoders with layer norms, a bias in every product, and the embedding's weights in the head. A
/// GPT-2 is one where its sequence is shorter than its table of positions.
fn of_layer_norms(model: &Decoder) -> Option<&'static str> {
    let has_biases = model.qkv_bias && model.attention_output_bias && model.ffn_bias;
    let is_one_after_the_other = model.parallel_block == ParallelBlock::None && model.mixtures.is_none();
    let is_plain = !model.query_key_norm && !model.output_norms && is_one_after_the_other;
    if model.norm != NormKind::Layer || !has_biases || !is_plain || !model.tied_embeddings {
        return None;
    }
    let is_grouped = model.kv_heads.is_some_and(|heads| heads != model.heads);
    match (model.positions, model.feed_forward, model.first_position) {
        (PositionKind::Learned, FeedForward::GeluTanh, 0) if !is_grouped => Some("gpt2"),
        (PositionKind::Learned, FeedForward::Relu, 2) if !is_grouped => Some("opt"),
        (PositionKind::Rotary, FeedForward::GeluTanh, _) => Some("starcoder2"),
        _ => None,
    }
}

fn of_decoder(model: &Decoder) -> Option<&'static str> {
    let is_plain = model.query_rank.is_none() && model.key_value_rank.is_none() && model.prediction_modules == 0;
    if !is_plain || model.embedding_norm || model.head_bias || has_later_parts(model) {
        return None;
    }
    if let Some(architecture) = of_layer_norms(model) {
        return Some(architecture);
    }
    if model.positions != PositionKind::Rotary {
        return None;
    }
    if model.parallel_block != ParallelBlock::None {
        let is_neox = model.norm == NormKind::Layer && model.qkv_bias && model.ffn_bias && model.mixtures.is_none();
        return is_neox.then_some("gpt_neox");
    }
    let has_biases = model.ffn_bias || model.attention_output_bias;
    if model.norm != NormKind::Rms || has_biases {
        return None;
    }
    if let Some(mixtures) = &model.mixtures {
        let is_each_layer = mixtures.every == 1 && mixtures.first == 0;
        let is_usual = is_each_layer && model.feed_forward == FeedForward::GatedSilu && !model.output_norms;
        return match (mixtures.shared_ffn.is_some(), model.query_key_norm, model.qkv_bias) {
            _ if !is_usual => None,
            (false, true, false) => Some("qwen3_moe"),
            (false, false, false) => Some("mixtral"),
            (true, false, true) if mixtures.shared_gate => Some("qwen2_moe"),
            _ => None,
        };
    }
    match (model.feed_forward, model.query_key_norm, model.output_norms) {
        (FeedForward::GatedGeluTanh, true, true) => Some("gemma3"),
        (FeedForward::GatedGeluTanh, false, true) => Some("gemma2"),
        (FeedForward::GatedGeluTanh, false, false) if !model.qkv_bias && model.tied_embeddings => Some("gemma"),
        (FeedForward::GatedSilu, true, false) if !model.qkv_bias => Some("qwen3"),
        (FeedForward::GatedSilu, false, false) if model.qkv_bias => Some("qwen2"),
        (FeedForward::GatedSilu, false, false) => Some(if model.window.is_some() { "mistral" } else { "llama" }),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::from_hugging_face;

    #[test]
    fn the_parts_of_a_mixture_tell_its_architecture() {
        let architecture = |model_type: &str, experts: &str, own: &str| {
            let text = format!(
                r#"{{"model_type": "{model_type}", "hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 16,
                "num_key_value_heads": 4, "intermediate_size": 5632, "vocab_size": 151936, {experts}, "num_experts_per_tok": 4{own}}}"#
            );
            traced_architecture(&from_hugging_face(&text, None).expect("it is read").model)
        };
        assert_eq!(architecture("mixtral", r#""num_local_experts": 8"#, ""), Some("mixtral"));
        assert_eq!(architecture("qwen2_moe", r#""num_experts": 60"#, ""), Some("qwen2_moe"));
        assert_eq!(architecture("qwen3_moe", r#""num_experts": 60"#, ""), Some("qwen3_moe"));
        assert_eq!(architecture("qwen2_moe", r#""num_experts": 60"#, r#", "decoder_sparse_step": 2"#), None);
    }

    /// The traced architecture of a `config.json`, and the layers of its table.
    fn of_config(own: &str) -> (Option<&'static str>, usize) {
        let text = format!(r#"{{"hidden_size": 2048, "num_attention_heads": 16, "vocab_size": 1000, {own}}}"#);
        let model = from_hugging_face(&text, None).expect("it is read").model;
        let layers = if let Model::Decoder(decoder) = &model { table_layers(decoder) } else { 0 };
        (traced_architecture(&model), layers)
    }

    #[test]
    fn the_parts_of_later_decoders_tell_their_architecture() {
        let sinks = r#""model_type": "gpt_oss", "num_hidden_layers": 24, "intermediate_size": 2880, "num_key_value_heads": 8"#;
        assert_eq!(of_config(sinks), (Some("gpt_oss"), 24));
        let parallel = r#""model_type": "phi", "num_hidden_layers": 24, "intermediate_size": 8192"#;
        assert_eq!(of_config(parallel), (Some("phi"), 24));
        let lite = r#""model_type": "deepseek_v2", "num_hidden_layers": 27, "intermediate_size": 10944, "q_lora_rank": null,
            "first_k_dense_replace": 1, "moe_intermediate_size": 1408, "num_experts_per_tok": 6"#;
        assert_eq!(of_config(lite), (Some("deepseek_v2"), 26));
        assert_eq!(of_config(&lite.replace("null", "1536")).0, None);
        let next = r#""model_type": "qwen3_next", "num_hidden_layers": 48, "intermediate_size": 5632"#;
        assert_eq!(of_config(next), (Some("qwen3_next"), 12));
        let kinds = ["mamba"; 5].into_iter().chain(["attention"]).chain(["mamba"; 4]).map(|kind| format!("\"{kind}\""));
        let kinds = vec![kinds.collect::<Vec<_>>().join(", "); 4].join(", ");
        let granite = format!(
            r#""model_type": "granitemoehybrid", "num_hidden_layers": 40, "intermediate_size": 8192, "num_key_value_heads": 8,
            "shared_intermediate_size": 8192, "mamba_n_heads": 64, "mamba_d_state": 128, "layer_types": [{kinds}], "num_local_experts": 0"#
        );
        assert_eq!(of_config(&granite), (Some("granite_hybrid"), 4));
        assert_eq!(
            of_config(&granite.replace(r#""num_local_experts": 0"#, r#""num_local_experts": 64"#)),
            (Some("granite_hybrid_moe"), 4)
        );
        assert_eq!(of_config(&granite.replacen("attention", "mamba", 1)).0, None);
    }
}
