//! Configurations of GPT-J, StarCoder2, MPT, Command R, DistilBERT, ModernBERT, Kimi Linear and
//! MiniMax-01 as they are published, and what costs time in them. Counts of all are beside those of
//! other types (`hugging_face.json`).
#![allow(clippy::panic, reason = "a test that fails may panic")]

use foretell_models::{
    Bert, Decoder, GraphOptions, Kernel, LayerKind, Model, NormKind, ParallelBlock, PositionKind, from_hugging_face,
};
use foretell_units::diagnostic::one_line;
use serde_json::{Value, json};

fn read(config: &Value, sequence: usize) -> Model {
    from_hugging_face(&config.to_string(), Some(sequence)).unwrap_or_else(|error| panic!("{}", one_line(&error))).model
}

fn decoder(config: &Value, sequence: usize) -> Decoder {
    read(config, sequence).as_decoder().expect("a decoder")
}

fn count(model: &Model) -> usize {
    model.graph("m", &GraphOptions::ONE).expect("it is sound").parameter_count()
}

/// The error for a configuration with one other value.
fn refusal(config: &Value, field: &str, value: Value) -> String {
    let mut config = config.clone();
    config[field] = value;
    one_line(&from_hugging_face(&config.to_string(), None).expect_err(field))
}

/// Fields of the file of StarCoder2 3B on the hub.
fn starcoder2() -> Value {
    json!({
        "activation_function": "gelu", "architectures": ["Starcoder2ForCausalLM"], "attention_dropout": 0.1,
        "attention_softmax_in_fp32": true, "bos_token_id": 0, "embedding_dropout": 0.1, "eos_token_id": 0,
        "hidden_act": "gelu_pytorch_tanh", "hidden_size": 3072, "initializer_range": 0.018042, "intermediate_size": 12288,
        "layer_norm_epsilon": 1e-5, "max_position_embeddings": 16384, "mlp_type": "default", "model_type": "starcoder2",
        "norm_epsilon": 1e-5, "norm_type": "layer_norm", "num_attention_heads": 24, "num_hidden_layers": 30,
        "num_key_value_heads": 2, "residual_dropout": 0.1, "rope_theta": 999_999.442_035_881_3,
        "scale_attention_softmax_in_fp32": true, "scale_attn_weights": true, "sliding_window": 4096, "use_bias": true,
        "use_cache": true, "vocab_size": 49152,
    })
}

#[test]
fn starcoder2_is_read_with_its_window_and_its_dropout() {
    let config = starcoder2();
    let imported = from_hugging_face(&config.to_string(), None).expect("it is sound");
    assert_eq!(count(&imported.model), 3_030_371_328);
    let decoder = imported.model.as_decoder().expect("a decoder");
    assert_eq!((decoder.window, decoder.rope_theta, decoder.norm), (Some(4096), 999_999, NormKind::Layer));
    assert!(!decoder.dropout.is_none() && !decoder.attention_dropout.is_none());
    assert!(imported.notes.iter().any(|note| note.contains("`rope_theta` 999999.442035881")), "{:?}", imported.notes);
    // Its parts have kernels where the window hides nothing.
    assert!(read(&config, 4096).planned_only().is_empty());
    assert!(refusal(&config, "mlp_type", json!("gated")).contains("`mlp_type: \"gated\"`"));
    assert!(refusal(&config, "norm_type", json!("rms")).contains("`norm_type"));
}

#[test]
fn gpt_j_has_biases_in_its_feed_forward_network_and_its_head() {
    let config = json!({
        "activation_function": "gelu_new", "architectures": ["GPTJForCausalLM"], "attn_pdrop": 0.0, "embd_pdrop": 0.0,
        "gradient_checkpointing": false, "layer_norm_epsilon": 1e-5, "model_type": "gptj", "n_embd": 4096, "n_head": 16,
        "n_inner": null, "n_layer": 28, "n_positions": 2048, "resid_pdrop": 0.0, "rotary": true, "rotary_dim": 64,
        "scale_attn_weights": true, "summary_activation": null, "summary_type": "cls_index", "tie_word_embeddings": false,
        "tokenizer_class": "GPT2Tokenizer", "use_cache": true, "vocab_size": 50400,
    });
    let decoder = decoder(&config, 2048);
    assert_eq!(count(&Model::Decoder(decoder.clone())), 6_050_882_784);
    assert_eq!(decoder.rotary_dimension, Some(64));
    let biases = [decoder.qkv_bias, decoder.attention_output_bias, decoder.ffn_bias, decoder.head_bias];
    assert_eq!((biases, decoder.parallel_block), ([false, false, true, true], ParallelBlock::OneNorm));
    assert!(Model::Decoder(decoder).planned_only().is_empty());
    assert!(refusal(&config, "rotary", json!(false)).contains("`rotary: false`"));
}

#[test]
fn mpt_has_no_shifts_and_what_its_attention_might_have_is_refused() {
    let attention = json!({
        "alibi": true, "alibi_bias_max": 8, "attn_impl": "torch", "attn_pdrop": 0, "attn_type": "multihead_attention",
        "attn_uses_sequence_id": false, "clip_qkv": null, "prefix_lm": false, "qk_ln": false, "softmax_scale": null,
    });
    let config = json!({
        "architectures": ["MPTForCausalLM"], "attn_config": attention, "d_model": 4096, "emb_pdrop": 0, "embedding_fraction": 1.0,
        "expansion_ratio": 4, "init_config": {"name": "kaiming_normal_"}, "init_device": "cpu", "learned_pos_emb": true,
        "logit_scale": null, "max_seq_len": 2048, "model_type": "mpt", "n_heads": 32, "n_layers": 32, "no_bias": true,
        "norm_type": "low_precision_layernorm", "resid_pdrop": 0, "use_cache": false, "verbose": 0, "vocab_size": 50432,
    });
    let decoder = decoder(&config, 2048);
    assert_eq!((decoder.positions, decoder.norm), (PositionKind::Alibi, NormKind::LayerWithoutShift));
    let model = Model::Decoder(decoder);
    assert_eq!(count(&model), 6_649_286_656);
    assert_eq!(model.planned_only(), ["`positions: alibi`", "`norm: layer_without_shift`"]);
    for (field, value) in
        [("clip_qkv", json!(6)), ("qk_ln", json!(true)), ("attn_type", json!("multiquery_attention")), ("alibi", json!(false))]
    {
        let mut other = attention.clone();
        other[field] = value;
        let error = refusal(&config, "attn_config", other);
        assert!(error.contains(&format!("`attn_config.{field}: ")) && error.contains("hint: "), "{error}");
    }
    assert!(refusal(&config, "expansion_ratio", json!(3)).contains("`expansion_ratio: 3`"));
    assert!(refusal(&config, "logit_scale", json!("inv_sqrt_d_model")).contains("`logit_scale"));
}

#[test]
fn command_r_reads_one_norm_and_scales_its_logits() {
    let config = json!({
        "model_type": "cohere", "hidden_size": 12288, "intermediate_size": 33792, "num_hidden_layers": 64,
        "num_attention_heads": 96, "num_key_value_heads": 8, "vocab_size": 256_000, "max_position_embeddings": 131_072,
        "use_qk_norm": true, "logit_scale": 0.833_333, "layer_norm_eps": 1e-5, "rope_theta": 75_000_000.0,
    });
    let model = read(&config, 4096);
    assert_eq!(count(&model), 103_810_674_688);
    assert_eq!(model.planned_only(), ["`logit_scale`", "`norm: layer_without_shift`", "`query_key_scales_of_heads`"]);
    let graph = model.graph("m", &GraphOptions::ONE).expect("it is sound");
    // One norm of the layer, and a scale of every query head and key head.
    let shape = |name: &str| graph.tensors.iter().find(|tensor| tensor.name == name).map(|tensor| tensor.elements());
    assert_eq!(shape("model.layers.0.self_attn.q_norm.weight"), Some(96 * 128));
    assert_eq!(shape("model.layers.0.self_attn.k_norm.weight"), Some(8 * 128));
    assert_eq!(shape("model.layers.0.post_attention_layernorm.weight"), None);
    assert!(graph.operators.iter().any(|operator| operator.name == "lm_head.scale"));
}

#[test]
fn command_r7b_does_not_rotate_where_it_sees_all_positions() {
    let config = json!({
        "architectures": ["Cohere2ForCausalLM"], "cache_implementation": "hybrid", "head_dim": 128, "hidden_act": "silu",
        "hidden_size": 4096, "intermediate_size": 14336, "layer_norm_eps": 1e-5, "layer_switch": 4, "logit_scale": 0.25,
        "max_position_embeddings": 8192, "model_type": "cohere2", "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 8, "order_of_interleaved_layers": "local_attn_first", "position_embedding_type": "rope_gptj",
        "rope_scaling": null, "rope_theta": 50000, "rotary_pct": 1.0, "sliding_window": 4096, "sliding_window_pattern": 4,
        "use_embedding_sharing": true, "use_gated_activation": true, "use_parallel_block": true,
        "use_parallel_embedding": false, "use_qk_norm": false, "vocab_size": 256_000,
    });
    for (sequence, windows) in [(8192, 24), (2048, 0)] {
        let model = read(&config, sequence);
        assert_eq!(count(&model), 8_028_033_024);
        let graph = model.graph("m", &GraphOptions::ONE).expect("it is sound");
        let kernels: Vec<Kernel> = graph.operators.iter().map(|operator| operator.kernel(&operator.extents())).collect();
        let rotations = kernels.iter().filter(|kernel| matches!(kernel, Kernel::Rope { .. })).count();
        let with_window = |kernel: &&Kernel| matches!(kernel, Kernel::Attention(attention) if attention.window.is_some());
        assert_eq!((rotations, kernels.iter().filter(with_window).count()), (2 * 24, windows), "{sequence}");
    }
    assert!(refusal(&config, "use_parallel_block", json!(false)).contains("`use_parallel_block: false`"));
    assert!(refusal(&config, "rotary_pct", json!(0.5)).contains("`rotary_pct: 0.5`"));
}

#[test]
fn distilbert_is_bert_without_token_types() {
    let config = json!({
        "activation": "gelu", "architectures": ["DistilBertForMaskedLM"], "attention_dropout": 0.1, "dim": 768, "dropout": 0.1,
        "hidden_dim": 3072, "initializer_range": 0.02, "max_position_embeddings": 512, "model_type": "distilbert", "n_heads": 12,
        "n_layers": 6, "pad_token_id": 0, "qa_dropout": 0.1, "seq_classif_dropout": 0.2, "sinusoidal_pos_embds": false,
        "tie_weights_": true, "vocab_size": 30522,
    });
    let Model::Bert(bert) = read(&config, 512) else { panic!("it is a BERT") };
    assert_eq!((bert.layers, bert.token_types, bert.keeps_attention_output), (6, 0, true));
    let model = Model::Bert(bert.clone());
    assert_eq!(count(&model), 66_985_530);
    assert!(model.planned_only().is_empty());
    // Transformers drops nothing between attention and the sum.
    let drops = |bert: &Bert| {
        let graph = Model::Bert(bert.clone()).graph("m", &GraphOptions::ONE).expect("it is sound");
        graph.operators.iter().filter(|operator| operator.name.ends_with("attention.output.dropout")).count()
    };
    assert_eq!((drops(&bert), drops(&Bert { keeps_attention_output: false, ..bert.clone() })), (0, 6));
    assert!(refusal(&config, "sinusoidal_pos_embds", json!(true)).contains("`sinusoidal_pos_embds: true`"));
    assert!(refusal(&config, "activation", json!("relu")).contains("`activation: \"relu\"`"));
}

/// The file of ModernBERT-base on the hub.
fn modernbert() -> Value {
    json!({
        "architectures": ["ModernBertForMaskedLM"], "attention_bias": false, "attention_dropout": 0.0, "bos_token_id": 50281,
        "classifier_activation": "gelu", "classifier_bias": false, "classifier_dropout": 0.0, "classifier_pooling": "mean",
        "cls_token_id": 50281, "decoder_bias": true, "deterministic_flash_attn": false, "embedding_dropout": 0.0,
        "global_attn_every_n_layers": 3, "global_rope_theta": 160_000.0, "hidden_activation": "gelu", "hidden_size": 768,
        "initializer_cutoff_factor": 2.0, "intermediate_size": 1152, "layer_norm_eps": 1e-5, "local_attention": 128,
        "local_rope_theta": 10000.0, "max_position_embeddings": 8192, "mlp_bias": false, "mlp_dropout": 0.0,
        "model_type": "modernbert", "norm_bias": false, "norm_eps": 1e-5, "num_attention_heads": 12, "num_hidden_layers": 22,
        "position_embedding_type": "absolute", "sep_token_id": 50282, "vocab_size": 50368,
    })
}

#[test]
fn modernbert_is_not_taken_for_bert() {
    let config = modernbert();
    let model = read(&config, 8192);
    assert_eq!((model.family(), count(&model)), ("modernbert", 149_655_232));
    assert_eq!(model.planned_only(), ["`window`", "`norm: layer_without_shift`"]);
    let graph = model.graph("m", &GraphOptions::ONE).expect("it is sound");
    let scores: Vec<f64> = graph
        .operators
        .iter()
        .filter_map(|operator| match operator.kernel(&operator.extents()) {
            Kernel::Attention(attention) => Some(attention.scores()),
            _ => None,
        })
        .collect();
    // The first of three layers sees all positions, the others 64 on each side.
    let whole = 8192.0 * 8192.0;
    let local = 8192.0 * 129.0 - 64.0 * 65.0;
    let expected: Vec<f64> = (0..22).map(|layer| if layer % 3 == 0 { whole } else { local }).collect();
    assert_eq!(scores, expected);
    for (field, value) in [
        ("sparse_prediction", json!(true)),
        ("mlp_dropout", json!(0.1)),
        ("hidden_activation", json!("silu")),
        ("tie_word_embeddings", json!(false)),
        ("rope_scaling", json!({"rope_type": "yarn", "factor": 2.0})),
        ("layer_types", json!(["sliding_attention", "full_attention"])),
    ] {
        let error = refusal(&config, field, value);
        assert!(error.contains(&format!("`{field}: ")), "{error}");
    }
}

#[test]
fn kimi_linear_is_read_as_published() {
    let linear = json!({
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27], "head_dim": 128, "num_heads": 32, "short_conv_kernel_size": 4,
        "kda_layers": [1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 14, 15, 17, 18, 19, 21, 22, 23, 25, 26],
    });
    let config = json!({
        "architectures": ["KimiLinearForCausalLM"], "first_k_dense_replace": 1, "head_dim": 72, "hidden_act": "silu",
        "hidden_size": 2304, "intermediate_size": 9216, "kv_lora_rank": 512, "linear_attn_config": linear, "mla_use_nope": true,
        "model_max_length": 1_048_576, "model_type": "kimi_linear", "moe_intermediate_size": 1024, "moe_layer_freq": 1,
        "moe_renormalize": true, "moe_router_activation_func": "sigmoid", "num_attention_heads": 32, "num_expert_group": 1,
        "num_experts": 256, "num_experts_per_token": 8, "num_hidden_layers": 27, "num_key_value_heads": 32,
        "num_nextn_predict_layers": 0, "num_shared_experts": 1, "q_lora_rank": null, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "rms_norm_eps": 1e-5, "rope_scaling": null, "rope_theta": 10000.0,
        "routed_scaling_factor": 2.446, "tie_word_embeddings": false, "topk_group": 1, "use_grouped_topk": true,
        "v_head_dim": 128, "vocab_size": 163_840,
    });
    let decoder = decoder(&config, 4096);
    // Counted by Transformers 5.24 on the `meta` device.
    assert_eq!(count(&Model::Decoder(decoder.clone())), 49_122_675_072);
    let attention = decoder.layer_kinds.iter().filter(|kind| **kind == LayerKind::Attention).count();
    assert_eq!((decoder.positions, attention, decoder.layer_kinds.len()), (PositionKind::None, 7, 27));
    let graph = Model::Decoder(decoder).graph("m", &GraphOptions::ONE).expect("it is sound");
    assert!(!graph.operators.iter().any(|operator| matches!(operator.kernel(&operator.extents()), Kernel::Rope { .. })));
    assert!(refusal(&config, "mla_use_nope", json!(false)).contains("`mla_use_nope: false`"));
    assert!(refusal(&config, "num_nextn_predict_layers", json!(1)).contains("`num_nextn_predict_layers: 1`"));
    assert!(refusal(&config, "mlp_layer_types", json!(["sparse", "dense"])).contains("`mlp_layer_types"));
}

#[test]
fn minimax_m1_is_read_from_its_authors_file() {
    let kinds: Vec<usize> = (0..80).map(|layer| usize::from(layer % 8 == 7)).collect();
    let config = json!({
        "architectures": ["MiniMaxM1ForCausalLM"], "attention_dropout": 0.0, "attn_type_list": kinds, "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 6144, "intermediate_size": 9216, "layernorm_full_attention_alpha": 3.55,
        "layernorm_full_attention_beta": 1.0, "layernorm_linear_attention_alpha": 3.55, "layernorm_linear_attention_beta": 1.0,
        "layernorm_mlp_alpha": 3.55, "layernorm_mlp_beta": 1.0, "max_position_embeddings": 10_240_000, "model_type": "minimax_m1",
        "num_attention_heads": 64, "num_experts_per_tok": 2, "num_hidden_layers": 80, "num_key_value_heads": 8,
        "num_local_experts": 32, "output_router_logits": false, "postnorm": true, "rms_norm_eps": 1e-5, "rope_theta": 10_000_000,
        "rotary_dim": 64, "router_aux_loss_coef": 0.001, "router_jitter_noise": 0.0, "shared_intermediate_size": 0,
        "shared_moe_mode": "sigmoid", "sliding_window": null, "tie_word_embeddings": false, "vocab_size": 200_064,
    });
    let decoder = decoder(&config, 4096);
    // 456 billion, the public figure (MiniMax 2025).
    assert_eq!(count(&Model::Decoder(decoder.clone())), 456_089_655_296);
    assert_eq!((decoder.layer_kinds.len(), decoder.rotary_dimension, decoder.residual_after_norm), (8, Some(64), true));
    assert!(refusal(&config, "postnorm", json!(false)).contains("`postnorm: false`"));
    assert!(refusal(&config, "shared_intermediate_size", json!(64)).contains("`shared_intermediate_size: 64`"));
}

/// Layers of Gemma 4 E2B, whose last 20 share keys.
fn gemma4() -> Value {
    let kinds: Vec<&str> = (0..35).map(|layer| if layer % 5 == 4 { "full_attention" } else { "sliding_attention" }).collect();
    json!({
        "model_type": "gemma4_text", "attention_k_eq_v": false, "enable_moe_block": false, "final_logit_softcapping": 30.0,
        "global_head_dim": 512, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1536,
        "hidden_size_per_layer_input": 256, "intermediate_size": 6144, "layer_types": kinds, "max_position_embeddings": 131_072,
        "num_attention_heads": 8, "num_global_key_value_heads": null, "num_hidden_layers": 35, "num_key_value_heads": 1,
        "num_kv_shared_layers": 20, "rms_norm_eps": 1e-6, "sliding_window": 512, "tie_word_embeddings": true,
        "use_bidirectional_attention": null, "use_double_wide_mlp": true, "vocab_size": 262_144,
        "vocab_size_per_layer_input": 262_144, "rope_parameters": {
            "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0, "rope_type": "proportional"},
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        },
    })
}

#[test]
fn gemma_4_has_other_heads_in_some_layers_and_shares_keys() {
    let config = gemma4();
    let model = read(&config, 4096);
    assert_eq!(count(&model), 4_628_569_344);
    let graph = model.graph("m", &GraphOptions::ONE).expect("it is sound");
    let named = |part: &str| graph.tensors.iter().filter(|tensor| tensor.name.ends_with(part)).count();
    assert_eq!((named("k_proj.weight"), named("q_proj.weight"), named("per_layer_projection.weight")), (15, 35, 35));
    let attentions: Vec<_> = graph
        .operators
        .iter()
        .filter_map(|operator| match operator.kernel(&operator.extents()) {
            Kernel::Attention(attention) => Some((attention.head_dimension, attention.window)),
            _ => None,
        })
        .collect();
    let expected: Vec<_> = (0..35).map(|layer| if layer % 5 == 4 { (512, None) } else { (256, Some(512)) }).collect();
    assert_eq!(attentions, expected);
    assert!(refusal(&config, "enable_moe_block", json!(true)).contains("`gemma3_text`"));
    assert!(refusal(&config, "use_bidirectional_attention", json!("all")).contains("`use_bidirectional_attention: \"all\"`"));
    // A layer that shares keys needs one of its kind before it.
    let mut all = config.clone();
    all["num_kv_shared_layers"] = json!(33);
    let error = one_line(&read(&all, 4096).graph("m", &GraphOptions::ONE).expect_err("no keys to share"));
    assert!(error.contains("33 of 35 layers share keys"), "{error}");
    // Newer files list the layers.
    let mut listed = config.clone();
    let heads: serde_json::Map<String, Value> =
        (0..7).map(|layer| (format!("{}", 5 * layer + 4), json!({"head_dim": 512}))).collect();
    listed["per_layer_config"] = heads.into();
    assert_eq!(read(&listed, 4096), model);
    listed["per_layer_config"]["4"] = json!({"head_dim": 64});
    assert!(one_line(&from_hugging_face(&listed.to_string(), None).expect_err("two sizes")).contains("`per_layer_config: "));
}

#[test]
fn a_refusal_says_what_is_missing_and_what_comes_nearest() {
    for (config, missing, nearest) in [
        (json!({"model_type": "siglip_vision_model", "hidden_size": 768}), "an encoder alone has no loss", "`vit`"),
        (json!({"model_type": "siglip2", "text_config": {}, "vision_config": {}}), "any number of patches", "`siglip`"),
        (json!({"model_type": "chinese_clip", "text_config": {"hidden_size": 512}}), "differ from CLIP's", "`clip`"),
        (json!({"model_type": "moonshine", "hidden_size": 288}), "samples of a sound", "`whisper`"),
    ] {
        let error = one_line(&from_hugging_face(&config.to_string(), None).expect_err("no reader"));
        assert!(error.contains(missing) && error.contains(nearest) && error.contains("cannot be read"), "{error}");
    }
}
