//! Decoders whose mixtures have shared experts: Qwen2's, and DeepSeek V2 and V3 with latent
//! attention.

use super::decoders::{Defaults, LLAMA, common, dense_layers, mixtures, qwen_window, router, silu, windowed};
use super::fields::{ConfigError, Fields, inexpressible};
use super::rotary::rotary;
use crate::families::{Decoder, Mixtures};
use crate::model::Model;
use serde_json::{Value, json};

/// Qwen2's mixtures, whose shared expert has a gate of its own.
pub(super) fn qwen2_moe(fields: &mut Fields) -> Result<Model, ConfigError> {
    silu(fields)?;
    let window = qwen_window(fields)?;
    let (first, every) = dense_layers(fields)?;
    let experts = fields.size_or("num_experts", 60)?;
    let top_k = fields.size_or("num_experts_per_tok", 4)?;
    let ffn = fields.size_or("moe_intermediate_size", 1408)?;
    let shared_ffn = fields.size_or("shared_expert_intermediate_size", 5632)?;
    let is_normalised = fields.flag_or("norm_topk_prob", false)?;
    let qkv_bias = fields.flag_or("qkv_bias", true)?;
    router(fields)?;
    let decoder = common(fields, &Defaults { sequence: 32_768, kv_heads: Some(16), ..LLAMA })?;
    let mixtures = Mixtures {
        first,
        every,
        shared_ffn: Some(shared_ffn),
        shared_gate: true,
        unnormalised_gates: !is_normalised,
        ..mixtures([experts, top_k, ffn])
    };
    Ok(Model::Decoder(windowed(Decoder { qkv_bias, mixtures: Some(mixtures), ..decoder }, window)))
}

/// Transformers' defaults of one of DeepSeek's versions.
pub(super) struct DeepseekDefaults {
    pub(super) sequence: usize,
    pub(super) experts: usize,
    pub(super) top_k: Option<usize>,
    pub(super) expert_ffn: usize,
    pub(super) shared_experts: usize,
    pub(super) dense_layers: usize,
    pub(super) normalises_gates: bool,
}

pub(super) fn deepseek_v2(fields: &mut Fields) -> Result<Model, ConfigError> {
    match fields.text_or("topk_method", "greedy")?.as_str() {
        "greedy" => fields.neutral(&["n_group", "topk_group"]),
        "group_limited_greedy" => limited_groups(fields, [1, 1])?,
        other => return Err(inexpressible("topk_method", &json!(other), "methods: greedy, group_limited_greedy")),
    }
    let defaults = DeepseekDefaults {
        sequence: 2048,
        experts: 64,
        top_k: None,
        expert_ffn: 1407,
        shared_experts: 2,
        dense_layers: 0,
        normalises_gates: false,
    };
    deepseek(fields, &defaults).map(Model::Decoder)
}

pub(super) fn deepseek_v3(fields: &mut Fields) -> Result<Model, ConfigError> {
    fields.must_be("topk_method", &[json!("noaux_tc")], "a bias without a gradient balances the experts")?;
    fields.must_be("scoring_func", &[json!("sigmoid")], "gates are sigmoids of the router's logits")?;
    limited_groups(fields, [8, 4])?;
    fields.note("gates are a softmax over the chosen experts, and in DeepSeek V3 they are sigmoids, normed and scaled");
    let defaults = DeepseekDefaults {
        sequence: 4096,
        experts: 256,
        top_k: Some(8),
        expert_ffn: 2048,
        shared_experts: 1,
        dense_layers: 3,
        normalises_gates: true,
    };
    let other = fields.count_or("num_mtp_layers", 0)?;
    let prediction_modules = fields.count_or("num_nextn_predict_layers", other)?;
    if prediction_modules > 0 {
        fields.note(format!(
            "multi-token prediction is planned with {prediction_modules} of `prediction_modules`, whose parameters Transformers does \
             not count"
        ));
    }
    Ok(Model::Decoder(Decoder { prediction_modules, ..deepseek(fields, &defaults)? }))
}

/// DeepSeek V3.2 and GLM-5: V3 with an indexer beside attention, which chooses the positions that a
/// query sees. Attention is planned over all positions, without the indexer.
pub(super) fn deepseek_v32(fields: &mut Fields) -> Result<Model, ConfigError> {
    fields.neutral(&["indexer_rope_interleave", "index_share_for_mtp_iteration", "layer_types"]);
    // The indexer is left out. `indexer_types` says which layers have one.
    fields.neutral(&["index_topk_freq", "index_skip_topk_offset", "moe_router_dtype"]);
    let features = fields.size_or("index_head_dim", 128)?;
    let heads = fields.size_or("index_n_heads", 64)?;
    let chosen = fields.size_or("index_topk", 2048)?;
    let shares = fields.list("indexer_types")?;
    let kinds = fields.list("mlp_layer_types")?;
    let model = deepseek_v3(fields)?;
    let Model::Decoder(decoder) = &model else { return Ok(model) };
    let first = decoder.mixtures.map_or(decoder.layers, |mixtures| mixtures.first);
    let is_as_said = |(layer, kind): (usize, &Value)| (kind == "dense") == (layer < first);
    if let Some(kinds) = kinds.filter(|kinds| !kinds.iter().enumerate().all(is_as_said)) {
        return Err(inexpressible("mlp_layer_types", &json!(kinds), "the first `first_k_dense_replace` layers are dense"));
    }
    // Layers without an indexer use the choice of an earlier layer.
    let indexers = shares.map_or(decoder.layers, |shares| shares.iter().filter(|kind| **kind == "full").count());
    let width = decoder.query_rank.unwrap_or(decoder.hidden);
    let of_a_layer = width * heads * features + decoder.hidden * (features + heads) + 2 * features;
    fields.note(format!(
        "the indexer, which chooses {chosen} positions for each query, is left out with its {} parameters: attention sees all positions, \
         which takes longer where sequences are longer than that",
        of_a_layer * indexers
    ));
    Ok(model)
}

/// Notes that a token's experts are limited to a few groups. The groups are nodes in training, so
/// that the limit saves messages between nodes (DeepSeek-V3's report, section 2.1.2).
fn limited_groups(fields: &mut Fields, [groups, chosen]: [usize; 2]) -> Result<(), ConfigError> {
    let groups = fields.optional("n_group")?.unwrap_or(groups);
    let chosen = fields.optional("topk_group")?.unwrap_or(chosen);
    if chosen < groups {
        fields.note(format!(
            "the file limits a token's experts to {chosen} of {groups} groups: where a group is a node, a plan under \
             `megatron-bridge` may say so (`workload: {{nodes_per_token: {chosen}}}`)"
        ));
    }
    Ok(())
}

/// Reads the fields that both versions have.
pub(super) fn deepseek(fields: &mut Fields, defaults: &DeepseekDefaults) -> Result<Decoder, ConfigError> {
    silu(fields)?;
    // Keys have as many heads as queries, whatever the file says: keys are made from the rank.
    fields.neutral(&["num_key_value_heads", "head_dim", "qk_head_dim", "ep_size"]);
    fields.sliced_products(true)?;
    // These fields choose and weigh experts, or balance them, which costs nothing compared with the
    // experts' products.
    fields.neutral(&["rope_interleave", "routed_scaling_factor", "seq_aux", "aux_loss_alpha"]);
    fields.must_be("moe_layer_freq", &[json!(1)], "every layer after the first dense ones is a mixture")?;
    router(fields)?;
    let [layers, hidden, heads] =
        [fields.size("num_hidden_layers")?, fields.size("hidden_size")?, fields.size("num_attention_heads")?];
    let (ffn, vocab) = (fields.size("intermediate_size")?, fields.size("vocab_size")?);
    let sequence = fields.sequence("max_position_embeddings", defaults.sequence)?;
    // A file without the field has the usual rank, and null says that there is none.
    let usual_rank = if fields.has("q_lora_rank") { None } else { Some(1536) };
    let rope = rotary(fields, 10_000.0, 1.0)?;
    let has_bias = fields.flag_or("attention_bias", false)?;
    let top_k = match defaults.top_k {
        Some(top_k) => fields.size_or("num_experts_per_tok", top_k)?,
        None => fields.size("num_experts_per_tok")?,
    };
    let experts = fields.size_or("n_routed_experts", defaults.experts)?;
    let expert_ffn = fields.size_or("moe_intermediate_size", defaults.expert_ffn)?;
    let shared_experts = fields.count_or("n_shared_experts", defaults.shared_experts)?;
    let is_normalised = fields.flag_or("norm_topk_prob", defaults.normalises_gates)?;
    let mixtures = Mixtures {
        first: fields.count_or("first_k_dense_replace", defaults.dense_layers)?,
        shared_ffn: Some(expert_ffn * shared_experts).filter(|&ffn| ffn > 0),
        unnormalised_gates: !is_normalised,
        ..mixtures([experts, top_k, expert_ffn])
    };
    let head_dimension = fields.size_or("qk_nope_head_dim", 128)?;
    Ok(Decoder {
        head_dimension: Some(head_dimension),
        query_rank: fields.optional("q_lora_rank")?.or(usual_rank),
        key_value_rank: Some(fields.size_or("kv_lora_rank", 512)?),
        rank_bias: has_bias,
        rotary_part: Some(fields.size_or("qk_rope_head_dim", 64)?),
        value_dimension: Some(fields.size_or("v_head_dim", 128)?).filter(|&features| features != head_dimension),
        attention_output_bias: has_bias,
        ffn_bias: fields.flag_or("mlp_bias", false)?,
        tied_embeddings: fields.flag_or("tie_word_embeddings", false)?,
        norm_epsilon: fields.epsilon("rms_norm_eps", 1e-6)?,
        rope_theta: rope.theta,
        rope_scaling: rope.is_scaled,
        attention_dropout: fields.dropout(&[("attention_dropout", 0.0)])?,
        mixtures: Some(mixtures),
        ..Decoder::llama([layers, hidden, heads, ffn, vocab, sequence])
    })
}
