//! `config.json` files of Transformers: the number of parameters, and what is refused.
//! `benches/hugging_face.py` writes the cases with the real package.
#![allow(clippy::panic, reason = "a test that fails may panic")]

use foretell_models::{GraphOptions, Model, PositionKind, from_hugging_face, from_hugging_face_as, hugging_face_types};
use foretell_units::diagnostic::one_line;
use serde_json::{Value, json};

fn cases() -> Vec<Value> {
    let text = include_str!("hugging_face.json");
    let document: Value = serde_json::from_str(text).expect("it is JSON");
    document["cases"].as_array().expect("a list").clone()
}

/// The number of parameters without those of multi-token prediction, which Transformers leaves out.
fn parameters(config: &Value) -> Result<usize, String> {
    let mut imported = from_hugging_face(&config.to_string(), None).map_err(|error| one_line(&error))?;
    if let Model::Decoder(decoder) = &mut imported.model {
        decoder.prediction_modules = 0;
    }
    // Long sequences make large activations, which a count does not need.
    let graph = imported.model.graph("m", &GraphOptions::ONE).map_err(|error| one_line(&error))?;
    Ok(graph.parameter_count())
}

#[test]
fn every_config_has_the_parameters_that_transformers_counts() {
    for case in cases() {
        for form in ["whole", "sparse"] {
            let counted = parameters(&case[form]).unwrap_or_else(|error| panic!("{} {form}: {error}", case["name"]));
            assert_eq!(Some(counted as u64), case["parameters"].as_u64(), "{} {form}", case["name"]);
        }
    }
}

#[test]
fn every_model_type_has_a_case() {
    let cases = cases();
    // Others' readers, and types with tests of their own.
    let elsewhere = ["xlm-roberta", "kimi_k2", "mimo", "deepseek_v32", "glm_moe_dsa", "minimax_m1", "minimax_text_01"];
    for name in hugging_face_types().filter(|name| !elsewhere.contains(name)) {
        let is_of = |case: &Value| case["whole"]["model_type"] == name || case["whole"]["text_config"]["model_type"] == name;
        assert!(cases.iter().any(is_of), "{name}");
    }
}

#[test]
fn a_field_that_is_not_understood_is_named() {
    for case in cases() {
        let mut config = case["whole"].clone();
        config["number_of_gears"] = json!(5);
        let error = parameters(&config).expect_err("an unknown field");
        assert!(error.contains("`number_of_gears` is not understood") && error.contains("hint: "), "{}: {error}", case["name"]);
    }
}

#[test]
fn a_value_that_no_graph_expresses_is_refused() {
    let find = |name: &str| cases().into_iter().find(|case| case["name"] == name).expect("a case")["whole"].clone();
    let changes = [
        ("llama", "hidden_act", json!("gelu"), "`hidden_act: \"gelu\"` cannot be expressed"),
        ("llama", "rms_norm_eps", json!(3e-6), "`rms_norm_eps: 3e-6`"),
        ("llama", "hidden_size", json!("wide"), "`hidden_size` is \"wide\""),
        ("gpt2", "add_cross_attention", json!(true), "`add_cross_attention: true`"),
        ("gpt2", "embd_pdrop", json!(0.2), "`embd_pdrop: 0.2`"),
        ("opt", "do_layer_norm_before", json!(false), "`do_layer_norm_before: false`"),
        ("qwen3-moe", "output_router_logits", json!(true), "`output_router_logits: true`"),
        ("resnet", "depths", json!([9, 9, 9, 9]), "`depths: [9,9,9,9]`"),
        ("t5", "num_decoder_layers", json!(5), "`num_decoder_layers: 5`"),
        ("bert", "model_type", json!("deepseek_v99"), "models of type `deepseek_v99` cannot be read"),
        ("qwen2-moe", "mlp_only_layers", json!([2]), "`mlp_only_layers: [2]`"),
        ("deepseek-v2", "moe_layer_freq", json!(2), "`moe_layer_freq: 2`"),
        ("deepseek-v3", "topk_method", json!("greedy"), "`topk_method: \"greedy\"`"),
        ("deepseek-v2", "topk_method", json!("lazy"), "`topk_method: \"lazy\"`"),
        ("llama", "rope_parameters", json!({"rope_theta": 1e4, "twist": [2]}), "`rope_parameters.twist` is not"),
        ("bert", "model_type", json!("albert"), "comes nearest: {family: bert, layers: 3, hidden: 64, heads: 4, ffn: 160"),
        ("resnet", "model_type", json!("albert"), "it states no `num_hidden_layers`"),
    ];
    for (name, field, value, expected) in changes {
        let mut config = find(name);
        config[field] = value;
        let error = parameters(&config).expect_err(expected);
        assert!(error.contains(expected) && error.contains("hint: "), "{name}: {error}");
    }
    for (text, expected) in [
        ("", "not a `config.json` of Transformers"),
        ("[]", "not a `config.json` of Transformers"),
        ("{}", "it has no `model_type`"),
        ("{\"model_type\": 4}", "it has no `model_type`"),
    ] {
        let error = one_line(&from_hugging_face(text, None).expect_err("not a configuration"));
        assert!(error.contains(expected), "{text}: {error}");
    }
    // As files before 2020 are.
    let older = r#"{"n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 32, "n_ctx": 32, "vocab_size": 100}"#;
    let named = from_hugging_face_as(older, None, "gpt2").expect("it is one").model;
    assert_eq!(named, from_hugging_face(&older.replace("{", "{\"model_type\": \"gpt2\", "), None).expect("it says so").model);
}

#[test]
fn models_of_images_and_text_are_read_and_what_is_left_out_is_noted() {
    let find = |name: &str| cases().into_iter().find(|case| case["name"] == name).expect("a case")["whole"].clone();
    let read = |config: &Value| from_hugging_face(&config.to_string(), None).map_err(|error| one_line(&error));
    for name in ["llama4-images", "gemma3-4b", "qwen2-vl", "qwen2.5-vl", "qwen3-vl"] {
        let config = find(name);
        let imported = read(&config).expect("it is sound");
        let said = match name {
            "llama4-images" => "the part that sees images (`vision_config`) is left out, with its parameters, time and memory",
            _ => "a sample has 1 image of ",
        };
        assert!(imported.notes.iter().any(|note| note.contains(said)), "{name}: {:?}", imported.notes);
        // Published files leave out what is Transformers' default; older ones have one object.
        let mut older = config.clone();
        let Value::Object(text) = older["text_config"].take() else { unreachable!("an object") };
        for (field, value) in text.into_iter().filter(|(field, _)| field != "model_type") {
            older[field] = value;
        }
        assert_eq!(read(&older).expect("it is sound").model, imported.model, "{name}");
    }
    let mut positions = find("qwen2.5-vl");
    positions["text_config"]["rope_scaling"] = json!({"type": "mrope", "mrope_section": [2, 3, 3]});
    assert_eq!(read(&positions), read(&find("qwen2.5-vl")));

    let refused: [(&str, &str, Value, &str); 4] = [
        ("gemma3-4b", "hidden_size", json!(999), "`hidden_size: 999` cannot be expressed; hint: `text_config` has 2560 there"),
        ("gemma3-4b", "number_of_eyes", json!(2), "`number_of_eyes` is not understood for models of type `gemma3_text`"),
        ("llama4-images", "text_config", json!({"model_type": "llama"}), "the text model of this type is `llama4_text`"),
        ("qwen2-vl", "text_config", json!({"model_type": "albert"}), "the text model of this type is `qwen2_vl_text`"),
    ];
    for (name, field, value, expected) in refused {
        let mut config = find(name);
        config[field] = value;
        let error = read(&config).expect_err(expected);
        assert!(error.contains(expected), "{name}: {error}");
    }
}

/// Counted by Transformers 5.24 on the `meta` device: all parameters, and those of indexers.
#[test]
fn indexers_are_left_out_with_their_parameters() {
    let small = json!({
        "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 160,
        "vocab_size": 500, "max_position_embeddings": 128, "q_lora_rank": 48, "kv_lora_rank": 32, "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8, "v_head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1,
        "moe_intermediate_size": 48, "first_k_dense_replace": 1, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 32,
        "n_group": 1, "topk_group": 1, "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "layer_types": ["indexed_attention", "indexed_attention", "indexed_attention", "indexed_attention"],
    });
    for name in ["deepseek_v32", "glm_moe_dsa"] {
        let mut config = small.clone();
        config["model_type"] = name.into();
        let imported = from_hugging_face(&config.to_string(), None).expect(name);
        let count = parameters(&config).expect("a sound model");
        assert_eq!(count + 10_880, 430_592, "{name}");
        assert!(imported.notes.iter().any(|note| note.contains("its 10880 parameters")), "{:?}", imported.notes);
        config["mlp_layer_types"] = json!(["sparse", "dense", "sparse", "sparse"]);
        assert!(one_line(&from_hugging_face(&config.to_string(), None).expect_err("another order")).contains("mlp_layer_types"));
    }
}

#[test]
fn a_hint_names_a_type_only_where_its_reading_comes_near() {
    let sizes = json!({
        "model_type": "new_model", "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 160, "vocab_size": 500, "max_position_embeddings": 128, "hidden_act": "silu",
    });
    let hint = |more: Value| {
        let mut config = sizes.clone();
        for (field, value) in more.as_object().expect("an object") {
            config[field] = value.clone();
        }
        one_line(&from_hugging_face(&config.to_string(), None).expect_err("an unknown type"))
    };
    assert!(hint(json!({})).contains("--as llama"));
    let latent = json!({"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "kv_lora_rank": 32, "q_lora_rank": 48});
    assert!(hint(latent).contains("--as deepseek_v3"));
    for (other, name) in [
        (json!({"full_attention_interval": 4}), "full_attention_interval"),
        (json!({"hybrid_override_pattern": "M-M*"}), "hybrid_override_pattern"),
        (json!({"mamba_n_heads": 4}), "mamba_n_heads"),
        (json!({"layer_types": ["linear_attention", "full_attention"]}), "layer_types"),
    ] {
        let hint = hint(other);
        assert!(hint.contains(name) && !hint.contains("--as"), "{hint}");
    }
    assert!(hint(json!({"layer_types": ["sliding_attention", "full_attention"]})).contains("--as"));
    // A type that would be refused in turn is not named.
    let refused = hint(json!({"hidden_act": "swigluoai"}));
    assert!(!refused.contains("--as") && refused.contains("swigluoai"), "{refused}");
    // The text model within others is entered, by the hint and by `--as`.
    let mut inner = sizes.clone();
    inner["model_type"] = "new_text".into();
    let outer = json!({"model_type": "new_outer", "thinker_config": {"text_config": inner}, "vision_config": {}}).to_string();
    assert!(one_line(&from_hugging_face(&outer, None).expect_err("an unknown type")).contains("--as llama"));
    let imported = from_hugging_face_as(&outer, None, "llama").expect("it is read");
    assert!(imported.notes.iter().any(|note| note.contains("new_outer")), "{:?}", imported.notes);
}

#[test]
fn fields_of_older_code_in_published_files_are_read() {
    let find = |name: &str| cases().into_iter().find(|case| case["name"] == name).expect("a case")["whole"].clone();
    let mut coder = find("qwen3-moe");
    let plain = from_hugging_face(&coder.to_string(), None).expect("it is sound").model;
    for (field, value) in
        [("shared_expert_intermediate_size", json!(0)), ("use_qk_norm", json!(true)), ("qkv_bias", json!(false))]
    {
        coder[field] = value;
    }
    assert_eq!(from_hugging_face(&coder.to_string(), None).expect("it is sound").model, plain);
    let mut mimo = find("qwen2");
    let model = |config: &Value| from_hugging_face(&config.to_string(), None).expect("it is sound").model;
    let qwen = model(&mimo);
    mimo["model_type"] = "mimo".into();
    mimo["architectures"] = json!(["MiMoForCausalLM"]);
    assert_eq!(model(&mimo), qwen);
    mimo["num_nextn_predict_layers"] = 1.into();
    assert_ne!(model(&mimo), qwen);
}

#[test]
fn names_on_the_hub_are_those_of_the_zoo() {
    for (hub, zoo) in [
        ("Qwen/Qwen3-8B", Some("qwen3-8b")),
        ("meta-llama/Llama-3.1-8B-Instruct", Some("llama3-8b")),
        ("meta-llama/Meta-Llama-3-70B", Some("llama3-70b")),
        ("mistralai/Mistral-7B-Instruct-v0.1", Some("mistral-7b")),
        ("meta-llama/Llama-2-13b-chat-hf", Some("llama2-13b")),
        ("mistralai/Mixtral-8x7B-v0.1", Some("mixtral-8x7b")),
        ("Qwen/Qwen2.5-7B-Instruct", Some("qwen2.5-7b")),
        ("mistralai/Mistral-7B-v0.3", Some("mistral-7b-v0.3")),
        ("Qwen/QwQ-32B", Some("qwen2.5-32b")),
        ("google/gemma-2-9b-it", Some("gemma2-9b")),
        ("TinyLlama/TinyLlama-1.1B-Chat-v1.0", Some("tinyllama-1.1b")),
        ("meta-llama/Llama-3.2-1B-Instruct", Some("llama3.2-1b")),
        ("FacebookAI/roberta-base", Some("roberta-base")),
        ("answerdotai/ModernBERT-base", Some("modernbert-base")),
        ("CohereForAI/c4ai-command-r-v01", Some("command-r")),
        ("bigcode/starcoder2-15b-instruct-v0.1", Some("starcoder2-15b")),
        ("EleutherAI/gpt-j-6b", Some("gpt-j-6b")),
        ("mosaicml/mpt-7b-instruct", Some("mpt-7b")),
        ("Llama-3 70B", Some("llama3-70b")),
        ("someone/else-3b", None),
    ] {
        assert_eq!(Model::named_on_hub(hub), zoo, "{hub}");
    }
}

#[test]
fn names_of_older_versions_are_read() {
    let neox = json!({
        "model_type": "gpt_neox", "architectures": ["GPTNeoXForCausalLM"], "torch_dtype": "float16", "num_hidden_layers": 2,
        "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 256, "vocab_size": 100, "max_position_embeddings": 64,
        "rotary_pct": 0.5, "rotary_emb_base": 500, "transformers_version": "4.19.0.dev0",
    });
    let Model::Decoder(decoder) = from_hugging_face(&neox.to_string(), None).expect("it is sound").model else {
        unreachable!("it is a decoder")
    };
    assert_eq!((decoder.rotary_dimension, decoder.rope_theta), (Some(8), 500));
    let llama = json!({
        "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 256,
        "vocab_size": 100, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
        "rope_scaling": {"factor": 8.0, "rope_type": "llama3"}, "pretraining_tp": 1,
    });
    let model = from_hugging_face(&llama.to_string(), Some(32)).expect("it is sound").model;
    assert_eq!(model.planned_only(), ["`rope_scaling`"]);
    assert_eq!(model.sample().tokens(), Some((32, 100)));
}

#[test]
fn a_window_that_hides_nothing_is_executable() {
    let mistral = cases().into_iter().find(|case| case["name"] == "mistral-7b").expect("a case")["whole"].clone();
    let planned_only = |sequence| from_hugging_face(&mistral.to_string(), sequence).expect("it is sound").model.planned_only();
    assert!(planned_only(Some(4096)).is_empty());
    assert_eq!(planned_only(None), ["`window`"]);
}

#[test]
fn bloom_is_planned_and_its_positions_cost_nothing() {
    let bloom = cases().into_iter().find(|case| case["name"] == "bloom").expect("a case")["whole"].clone();
    let Model::Decoder(decoder) = from_hugging_face(&bloom.to_string(), None).expect("it is sound").model else {
        unreachable!("it is a decoder")
    };
    assert_eq!(decoder.positions, PositionKind::Alibi);
}

#[test]
fn multi_token_prediction_of_a_config_is_planned() {
    let config = cases().into_iter().find(|case| case["name"] == "deepseek-v3-671b").expect("a case")["whole"].clone();
    assert_eq!(config["num_nextn_predict_layers"], 1);
    let imported = from_hugging_face(&config.to_string(), None).expect("it is sound");
    assert!(imported.notes.iter().any(|note| note.contains("multi-token prediction")), "{:?}", imported.notes);
    let graph = imported.model.graph("m", &GraphOptions::ONE).expect("it is sound");
    // A module: a mixture's layer, three norms more, and a product of both inputs.
    let hidden = 7168;
    let attention = hidden * 1536 + 1536 + 1536 * 128 * 192 + hidden * (512 + 64) + 512 + 512 * 128 * 256 + 128 * 128 * hidden;
    let experts = 257 * 3 * hidden * 2048 + 256 * hidden;
    let module = attention + experts + 2 * hidden + 2 * hidden * hidden + 3 * hidden;
    assert_eq!(graph.parameter_count(), parameters(&config).expect("it is sound") + module);
    // The public figure: 671 billion, and 14 billion of the module, which counts embedding and head
    // twice (DeepSeek-AI 2024, section 2.2).
    assert_eq!((module + 2 * 129_280 * hidden).div_ceil(1_000_000_000), 14);
    assert_eq!(imported.model.planned_only(), ["`rotary_part`", "`prediction_modules`"]);
}

#[test]
fn latent_attention_multiplies_what_its_heads_have() {
    let case = cases().into_iter().find(|case| case["name"] == "deepseek-v2").expect("a case")["whole"].clone();
    let Model::Decoder(decoder) = from_hugging_face(&case.to_string(), None).expect("it is sound").model else {
        unreachable!("it is a decoder")
    };
    let sizes = (decoder.head_dimension, decoder.rotary_part, decoder.value_dimension);
    assert_eq!(sizes, (Some(16), Some(8), Some(12)));
    let graph = Model::Decoder(decoder).graph("m", &GraphOptions::ONE).expect("it is sound");
    let attention = graph.operators.iter().find(|operator| operator.is_attention()).expect("there is attention");
    let flops = attention.kernel(&attention.extents()).model_flops().value();
    // 4 heads, 128 positions: products over 24 features for scores, and over 12 for values.
    assert_eq!(flops, 2.0 * 4.0 * 128.0 * 128.0 * (24.0 + 12.0));
}

#[test]
fn routing_that_is_limited_to_groups_is_noted() {
    let imported = |name: &str, fields: &[(&str, Value)]| {
        let mut config = cases().into_iter().find(|case| case["name"] == name).expect("a case")["whole"].clone();
        for (field, value) in fields {
            config[field] = value.clone();
        }
        from_hugging_face(&config.to_string(), None).expect("it is sound").notes.join("; ")
    };
    assert!(imported("deepseek-v3-671b", &[]).contains("experts to 4 of 8 groups"));
    assert!(!imported("deepseek-v3-671b", &[("topk_group", json!(8))]).contains("groups"));
    let (method, greedy) = (json!("group_limited_greedy"), json!("greedy"));
    let groups = [("n_group", json!(8)), ("topk_group", json!(3))];
    let limited = [&groups[..], &[("topk_method", method)]].concat();
    assert!(imported("deepseek-v2-236b", &limited).contains("experts to 3 of 8 groups"));
    // The greedy method takes no heed of groups.
    let greedy = [&groups[..], &[("topk_method", greedy)]].concat();
    assert!(!imported("deepseek-v2-236b", &greedy).contains("groups"));
}

fn notes(name: &str, fields: &[(&str, Value)]) -> String {
    let mut config = cases().into_iter().find(|case| case["name"] == name).expect("a case")["whole"].clone();
    for (field, value) in fields {
        config[field] = value.clone();
    }
    from_hugging_face(&config.to_string(), None).expect("it is sound").notes.join("; ")
}

/// A case, fields to change in it, and a text.
type Change<'a> = (&'a str, &'a [(&'a str, Value)], &'a str);

#[test]
fn fields_that_change_a_run_are_named() {
    let changes: [Change; 9] = [
        ("llama", &[("gradient_checkpointing", json!(true))], "`recompute: full` in the plan"),
        ("bert", &[("output_attentions", json!(true))], "keep the scores of every layer"),
        ("t5", &[("output_hidden_states", json!(true))], "keep the result of every layer"),
        ("qwen2", &[("_attn_implementation", json!("eager"))], "attention is one kernel"),
        ("gpt2", &[("reorder_and_upcast_attn", json!(true))], "computes scores in fp32"),
        ("llama", &[("pretraining_tp", json!(2))], "into 2 slices"),
        ("bloom", &[("pretraining_tp", json!(4)), ("slow_but_exact", json!(true))], "into 4 slices"),
        ("llama", &[("architectures", json!(["LlamaForSequenceClassification"]))], "planned as LlamaForCausalLM"),
        ("llama4", &[("use_qk_norm", json!(true))], "normed without weights"),
    ];
    for (name, fields, expected) in changes {
        assert!(notes(name, fields).contains(expected), "{name} {fields:?}: {}", notes(name, fields));
    }
    let unchanged: [Change; 6] = [
        ("llama", &[("gradient_checkpointing", json!(false))], "recompute"),
        ("qwen2", &[("_attn_implementation", json!("sdpa"))], "one kernel"),
        ("llama", &[("architectures", json!(["LlamaForCausalLM"]))], "planned as"),
        ("llama", &[("pretraining_tp", json!(1))], "slices"),
        ("bloom", &[("pretraining_tp", json!(4))], "slices"),
        ("llama4", &[("use_qk_norm", json!(false))], "normed without weights"),
    ];
    for (name, fields, unexpected) in unchanged {
        assert!(!notes(name, fields).contains(unexpected), "{name} {fields:?}: {}", notes(name, fields));
    }
}

#[test]
fn layers_of_llama_4_see_what_the_file_says() {
    let case = cases().into_iter().find(|case| case["name"] == "llama4").expect("a case")["whole"].clone();
    let kinds = |kinds: [&str; 4]| {
        let mut config = case.clone();
        config["attention_chunk_size"] = json!(16);
        config["layer_types"] = json!(kinds);
        from_hugging_face(&config.to_string(), None).map(|imported| match imported.model {
            Model::Decoder(decoder) => (decoder.window, decoder.full_attention_every),
            _ => unreachable!("it is a decoder"),
        })
    };
    let [full, chunk] = ["full_attention", "chunked_attention"];
    assert_eq!(kinds([chunk, chunk, chunk, full]), Ok((Some(16), Some(4))));
    assert_eq!(kinds([chunk, full, chunk, full]), Ok((Some(16), Some(2))));
    assert_eq!(kinds([chunk; 4]), Ok((Some(16), None)));
    assert_eq!(kinds([full; 4]), Ok((None, None)));
    assert!(kinds([full, chunk, chunk, full]).is_err());
}

/// Fields that say nothing of a model's costs do not stop it from being read: those of generation,
/// and how weights are stored.
#[test]
fn fields_of_generation_and_storage_are_no_obstacle() {
    for case in cases() {
        let mut config = case["whole"].clone();
        config["cache_implementation"] = json!("hybrid");
        config["max_new_tokens"] = json!(20);
        config["quantization_config"] = json!({"quant_method": "fp8", "fmt": "e4m3"});
        let counted = parameters(&config).unwrap_or_else(|error| panic!("{}: {error}", case["name"]));
        assert_eq!(Some(counted as u64), case["parameters"].as_u64(), "{}", case["name"]);
        let notes = from_hugging_face(&config.to_string(), None).expect("it is sound").notes;
        assert!(notes.iter().any(|note| note.contains("`quantization_config`")), "{}: {notes:?}", case["name"]);
    }
}

#[test]
fn numbers_that_python_writes_and_json_lacks_are_read() {
    let find = |name: &str| cases().into_iter().find(|case| case["name"] == name).expect("a case")["whole"].clone();
    let text = find("llama").to_string();
    let model = from_hugging_face(&text, None).expect("it is sound").model;
    let python =
        text.replacen('{', "{\"temperature\": Infinity, \"top_p\": -Infinity, \"min_p\": NaN, \"prefix\": \"NaN \\\"\",", 1);
    assert!(foretell_models::is_hugging_face_config(&python));
    assert_eq!(from_hugging_face(&python, None).expect("it is sound").model, model);
}

#[test]
fn a_text_model_is_found_however_deep_it_lies() {
    let find = |name: &str| cases().into_iter().find(|case| case["name"] == name).expect("a case")["whole"].clone();
    let inner = find("qwen3-moe");
    let model = from_hugging_face(&inner.to_string(), None).expect("it is sound").model;
    let llava = json!({"model_type": "some_eyes", "vision_config": {"depth": 2}, "text_config": inner});
    let omni =
        json!({"model_type": "all_senses", "thinker_config": {"model_type": "thinker", "text_config": llava["text_config"]}});
    for config in [&llava, &omni] {
        let imported = from_hugging_face(&config.to_string(), None).expect("it is sound");
        assert_eq!(imported.model, model);
        assert!(imported.notes.iter().any(|note| note.contains("its other parts are left out")), "{:?}", imported.notes);
    }
    // Published files leave out what Transformers' own defaults say.
    let text = json!({"model_type": "llama", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "vocab_size": 32064});
    let short = json!({"model_type": "llava", "text_config": text, "vision_config": {"model_type": "clip_vision_model"}});
    let imported = from_hugging_face(&short.to_string(), None).expect("it is sound");
    let decoder = imported.model.as_decoder().expect("a decoder");
    assert_eq!((decoder.layers, decoder.hidden, decoder.ffn, decoder.vocab), (32, 4096, 11_008, 32_064));
    let unknown = json!({"model_type": "some_eyes", "text_config": {"model_type": "albert"}});
    let error = one_line(&from_hugging_face(&unknown.to_string(), None).expect_err("no reader"));
    assert!(error.contains("`some_eyes`") && error.contains("use a model of `foretell models`"), "{error}");
}

#[test]
fn an_unknown_type_is_read_as_another_where_that_is_asked_for() {
    let find = |name: &str| cases().into_iter().find(|case| case["name"] == name).expect("a case")["whole"].clone();
    let mut config = find("llama");
    let model = from_hugging_face(&config.to_string(), None).expect("it is sound").model;
    config["model_type"] = json!("olmo9");
    config["number_of_gears"] = json!(5);
    let error = one_line(&from_hugging_face(&config.to_string(), None).expect_err("no reader"));
    assert!(error.contains("--as llama") && error.contains("{family: decoder, layers: 3,"), "{error}");
    for (fields, expected) in [
        (json!({"num_local_experts": 8, "num_experts_per_tok": 2}), "--as mixtral` reads"),
        (json!({"num_local_experts": 8, "experts_per_token": 2}), "mixtures: {experts: 8, top_k: 2, ffn: 160}"),
        (json!({"model_type": "nomic_bert", "hidden_act": "gelu", "tie_word_embeddings": true}), "--as bert` reads"),
    ] {
        let mut other = config.clone();
        other.as_object_mut().expect("an object").extend(fields.as_object().expect("an object").clone());
        let error = one_line(&from_hugging_face(&other.to_string(), None).expect_err("no reader"));
        assert!(error.contains(expected), "{error}");
    }
    let imported = from_hugging_face_as(&config.to_string(), None, "llama").expect("it is asked for");
    assert_eq!(imported.model, model);
    assert!(imported.notes.iter().any(|note| note.contains("`number_of_gears`")), "{:?}", imported.notes);
    // Kimi K2 has the fields and the class of DeepSeek V3.
    let mut kimi = find("deepseek-v3");
    let deepseek = from_hugging_face(&kimi.to_string(), None).expect("it is sound");
    kimi["model_type"] = json!("kimi_k2");
    assert_eq!(from_hugging_face(&kimi.to_string(), None).expect("it is sound"), deepseek);
}

#[test]
fn images_that_do_not_fit_are_left_out_and_that_is_said() {
    let config = cases().into_iter().find(|case| case["name"] == "llava-1.5-7b").expect("a case")["whole"].to_string();
    let read = |sequence| from_hugging_face(&config, Some(sequence)).expect("it is sound");
    let [long, short] = [read(1024), read(512)];
    let tower = |model: &Model| model.as_decoder().and_then(|decoder| decoder.vision).map(|tower| tower.tokens());
    assert_eq!((tower(&long.model), tower(&short.model)), (Some(576), None));
    assert!(short.notes.iter().any(|note| note.contains("an image is 576 tokens, and a sample has 512")), "{:?}", short.notes);
    assert_eq!(long.model.planned_only(), ["`vision`"]);
}
