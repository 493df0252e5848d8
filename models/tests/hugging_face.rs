//! `config.json` files of Transformers: the number of parameters, and what is refused.
//! `benches/hugging_face.py` writes the cases with the real package.
#![allow(clippy::panic, reason = "a test that fails may panic")]

use foretell_models::{GraphOptions, Model, PositionKind, from_hugging_face, hugging_face_types};
use serde_json::{Value, json};

fn cases() -> Vec<Value> {
    let text = include_str!("hugging_face.json");
    let document: Value = serde_json::from_str(text).expect("it is JSON");
    document["cases"].as_array().expect("a list").clone()
}

fn parameters(config: &Value) -> Result<usize, String> {
    let imported = from_hugging_face(&config.to_string(), None).map_err(|error| error.to_string())?;
    // Long sequences make large activations, which a count does not need.
    let graph = imported.model.graph("m", &GraphOptions::ONE).map_err(|error| error.to_string())?;
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
    for name in hugging_face_types().filter(|&name| name != "xlm-roberta") {
        assert!(cases.iter().any(|case| case["whole"]["model_type"] == name), "{name}");
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
        ("bert", "model_type", json!("deepseek_v3"), "models of type `deepseek_v3` cannot be read"),
        ("bert", "model_type", json!("albert"), "types that can be: gpt2, llama"),
    ];
    for (name, field, value, expected) in changes {
        let mut config = find(name);
        config[field] = value;
        let error = parameters(&config).expect_err(expected);
        assert!(error.contains(expected) && error.contains("hint: "), "{name}: {error}");
    }
    for text in ["", "[]", "{}", "{\"model_type\": 4}"] {
        let error = from_hugging_face(text, None).expect_err("not a configuration").to_string();
        assert!(error.contains("not a `config.json` of Transformers"), "{text}: {error}");
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
