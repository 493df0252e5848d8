//! The traced architecture whose layers a model of ours has.

use crate::families::{Decoder, FeedForward, NormKind, ParallelBlock, PositionKind};
use crate::model::Model;

/// The value of `architecture` in the keys of the tables whose layers a model has; `None` if its
/// layers are none of the traced ones.
pub fn traced_architecture(model: &Model) -> Option<&'static str> {
    match model {
        Model::Llama(_) => Some("llama"),
        Model::Gpt(_) => Some("gpt2"),
        Model::Bert(_) => Some("bert"),
        Model::Moe(model) => {
            let is_mixtral = model.shared_ffn.is_none() && model.dense_layers == 0 && model.moe_every == 1;
            (is_mixtral && model.query_rank.is_none() && model.key_value_rank.is_none()).then_some("mixtral")
        }
        Model::Decoder(model) => of_decoder(model),
        // The sizes of images and classes are written into its tables.
        Model::Vit(model) => ([model.image, model.patch, model.channels, model.classes] == [224, 16, 3, 1000]).then_some("vit"),
        _ => None,
    }
}

/// Whether a model's head has the embedding's weights although its architecture may have its own.
pub fn is_tied(model: &Model) -> bool {
    match model {
        Model::Llama(model) => model.tied_embeddings,
        Model::Decoder(model) => model.tied_embeddings,
        Model::Moe(model) => model.tied_embeddings,
        _ => false,
    }
}

/// Whether a decoder has parts that no traced architecture has.
fn has_later_parts(model: &Decoder) -> bool {
    let of_mixtures = model.mixtures.is_some_and(|mixtures| mixtures.router_bias || mixtures.expert_bias);
    let of_norms = model.query_key_norm_of_all_heads || model.no_input_norms || model.residual_after_norm;
    let of_norms = of_norms || model.query_key_scales_of_heads;
    let of_logits = model.logit_scale || model.unrotated_every.is_some();
    let of_layers = model.full_attention.is_some() || model.shared_keys.is_some() || model.layer_inputs.is_some();
    let of_layers = of_layers || model.value_norm || model.layer_scales;
    of_norms
        || of_logits
        || of_layers
        || of_mixtures
        || model.vision.is_some()
        || model.sinks
        || model.attention_gate
        || !model.layer_kinds.is_empty()
}

fn of_decoder(model: &Decoder) -> Option<&'static str> {
    let is_plain = model.query_rank.is_none() && model.key_value_rank.is_none() && model.prediction_modules == 0;
    let is_usual =
        model.positions == PositionKind::Rotary && !model.embedding_norm && !model.head_bias && !has_later_parts(model);
    if !is_plain || !is_usual {
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
}
