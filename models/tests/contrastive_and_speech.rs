//! Whisper, CLIP, SigLIP and Gemma 3n as their files describe them: what costs time in them, and
//! what is refused. Their counts of parameters are beside those of other types
//! (`hugging_face.json`).
#![allow(clippy::panic, reason = "a test that fails may panic")]

use foretell_models::{
    ClipForm, Extent, Graph, GraphOptions, ImportedModel, Kernel, Model, Role, differentiate, from_hugging_face,
};
use foretell_units::diagnostic::one_line;
use serde_json::{Value, json};

fn case(name: &str) -> Value {
    let document: Value = serde_json::from_str(include_str!("hugging_face.json")).expect("it is JSON");
    let cases = document["cases"].as_array().expect("a list");
    cases.iter().find(|case| case["name"] == name).expect("a case")["whole"].clone()
}

fn read(config: &Value, sequence: Option<usize>) -> ImportedModel {
    from_hugging_face(&config.to_string(), sequence).unwrap_or_else(|error| panic!("{}", one_line(&error)))
}

fn graph(model: &Model, batch: usize) -> Graph {
    model.graph("m", &GraphOptions { batch, ..GraphOptions::ONE }).unwrap_or_else(|error| panic!("{}", one_line(&error)))
}

/// The error for a configuration with one other value.
fn refusal(config: &Value, part: Option<&str>, field: &str, value: Value) -> String {
    let mut config = config.clone();
    match part {
        Some(part) => config[part][field] = value,
        None => config[field] = value,
    }
    one_line(&from_hugging_face(&config.to_string(), None).expect_err(field))
}

/// Multiply-adds of the forward operators whose names begin so.
fn work(graph: &Graph, name: &str) -> usize {
    let counted = |kind: &Kernel| matches!(kind, Kernel::Planned { .. } | Kernel::Matmul { .. });
    let operators = graph.operators.iter().filter(|operator| operator.name.starts_with(name) && counted(&operator.kind));
    operators
        .map(|operator| operator.loops.iter().filter(|of| of.role != Extent::Parts).map(|of| of.extent).product::<usize>())
        .sum()
}

fn assert_every_parameter_is_trained(graph: &Graph) {
    let whole = differentiate(graph, 1, |_| false);
    let gradients = whole.tensors.iter().filter(|tensor| matches!(tensor.role, Role::ParameterGradient(_))).count();
    let parameters = graph.tensors.iter().filter(|tensor| matches!(tensor.role, Role::Parameter(_))).count();
    assert_eq!(gradients, parameters);
}

fn extents(graph: &Graph, tensor: &str) -> Vec<usize> {
    let found = graph.tensors.iter().find(|existing| existing.name == tensor).unwrap_or_else(|| panic!("no tensor {tensor}"));
    found.dimensions.iter().map(|dimension| dimension.extent).collect()
}

#[test]
fn whisper_halves_the_frames_and_its_decoder_sees_all_of_them() {
    let imported = read(&case("whisper-large-v3"), Some(128));
    let Model::Whisper(whisper) = &imported.model else { panic!("{:?}", imported.model) };
    assert_eq!((whisper.mel_bins, whisper.target_sequence, whisper.target_rows), (128, 128, Some(448)));
    let graph = graph(&imported.model, 2);
    // A convolution of three frames over 128 bins and over 1280 channels, for two samples.
    assert_eq!(work(&graph, "model.encoder.conv1"), 2 * 3000 * 1280 * 128 * 3);
    assert_eq!(work(&graph, "model.encoder.conv2"), 2 * 1500 * 1280 * 1280 * 3);
    assert_eq!(extents(&graph, "model.decoder.layers.0.encoder_attn.k_proj"), [2, 1500, 20, 64]);
    assert_eq!(extents(&graph, "model.decoder.layers.0.encoder_attn.q_proj"), [2, 128, 20, 64]);
    assert!(imported.notes.iter().any(|note| note.contains("3000 frames of 128 bins and 128 tokens")), "{:?}", imported.notes);
    assert_eq!(imported.model.planned_only(), ["`family: whisper`"]);
    assert_eq!(imported.model.with_sequence(448), Some(read(&case("whisper-large-v3"), None).model));
    assert_eq!(read(&case("whisper-large-v3"), None).model.with_sequence(128).as_ref(), Some(&imported.model));
    // Every parameter has a gradient.
    assert_every_parameter_is_trained(&graph);
}

#[test]
fn what_whisper_does_not_have_is_refused() {
    let config = case("whisper-tiny");
    for (field, value) in [
        ("decoder_attention_heads", json!(8)),
        ("encoder_layerdrop", json!(0.1)),
        ("activation_function", json!("relu")),
        ("activation_dropout", json!(0.1)),
    ] {
        let error = refusal(&config, None, field, value);
        assert!(error.contains(&format!("`{field}: ")) && error.contains("hint: "), "{error}");
    }
    let long = one_line(&read(&config, Some(449)).model.graph("m", &GraphOptions::ONE).expect_err("448 rows"));
    assert!(long.contains("a table of 448 positions for 449 tokens"), "{long}");
}

#[test]
fn clip_compares_each_image_of_a_batch_with_each_text_in_both_directions() {
    let imported = read(&case("clip-vit-large-patch14"), None);
    let graph = graph(&imported.model, 64);
    assert_eq!(extents(&graph, "visual_projection"), [64, 768]);
    for direction in ["logits_per_image", "logits_per_text"] {
        assert_eq!(extents(&graph, direction), [64, 64]);
        let compared = graph.operators.iter().find(|operator| operator.name == direction).expect("a product");
        let [rows, columns] = [0, 1].map(|axis| &compared.loops[axis]);
        // Ranks that shard the images need all texts.
        assert!(rows.shardable && !columns.shardable);
        assert_eq!(compared.loops.iter().map(|dimension| dimension.extent).collect::<Vec<_>>(), [64, 64, 768]);
    }
    // 256 patches and the class; 77 tokens, of which each sees those before it.
    assert_eq!(extents(&graph, "vision_model.encoder.layers.0.self_attn.out_proj"), [64, 257, 1024]);
    assert_eq!(extents(&graph, "text_model.encoder.layers.0.self_attn.out_proj"), [64, 77, 768]);
    let losses = graph.operators.iter().filter(|operator| matches!(operator.kind, Kernel::CrossEntropy { .. })).count();
    assert_eq!((losses, graph.predictions_per_sample), (2, 2));
    let note = "each image of a micro-batch is compared with each text of it";
    assert!(imported.notes.iter().any(|line| line.contains(note)), "{:?}", imported.notes);
    assert_every_parameter_is_trained(&graph);
}

#[test]
fn siglip_pools_its_patches_and_compares_once() {
    let imported = read(&case("siglip-so400m-patch14-384"), None);
    let Model::Clip(clip) = &imported.model else { panic!("{:?}", imported.model) };
    assert_eq!((clip.form, clip.projection), (ClipForm::Siglip, 1152));
    let graph = graph(&imported.model, 4);
    // 27 patches on each side: 6 pixels of the image are not seen.
    assert_eq!(extents(&graph, "vision_model.encoder.layers.0.self_attn.out_proj"), [4, 729, 1152]);
    assert_eq!(extents(&graph, "vision_model.head.attention.out_proj"), [4, 1, 1152]);
    assert_eq!(graph.operators.iter().filter(|operator| matches!(operator.kind, Kernel::CrossEntropy { .. })).count(), 1);
    assert!(
        imported.notes.iter().any(|note| note.contains("sigmoid of each pair is planned as a softmax")),
        "{:?}",
        imported.notes
    );
}

#[test]
fn an_older_file_says_the_encoders_twice_and_the_second_counts() {
    let mut config = case("clip-vit-base-patch32");
    let model = read(&config, None).model;
    config["text_config"]["hidden_size"] = json!(64);
    config["text_config_dict"] = json!({"hidden_size": 512, "projection_dim": null});
    assert_eq!(read(&config, None).model, model);
}

#[test]
fn a_field_of_an_encoder_is_named_with_its_part() {
    let config = case("siglip");
    for (part, field, value, expected) in [
        ("vision_config", "hidden_act", json!("relu"), "`vision_config.hidden_act: \"relu\"`"),
        ("text_config", "attention_dropout", json!(0.1), "`text_config.attention_dropout: 0.1`"),
        ("text_config", "projection_size", json!(24), "`text_config.projection_size: 24`"),
        ("text_config", "number_of_gears", json!(3), "`text_config.number_of_gears`"),
        ("vision_config", "model_type", json!("siglip2_vision_model"), "`vision_config.model_type"),
        ("vision_config", "hidden_size", json!("wide"), "`vision_config.hidden_size` is \"wide\""),
    ] {
        let error = refusal(&config, Some(part), field, value);
        assert!(error.contains(expected) && error.contains("hint: "), "{error}");
    }
}

#[test]
fn gemma_3n_carries_all_its_streams_from_layer_to_layer() {
    let imported = read(&case("gemma3n-e4b"), Some(1024));
    let decoder = imported.model.as_decoder().expect("a decoder");
    let streams = decoder.residual_streams.expect("streams");
    assert_eq!((streams.streams, streams.rank, decoder.sparse_activation_layers), (4, 64, 10));
    let graph = graph(&imported.model, 2);
    assert_eq!(extents(&graph, "model.layers.7.per_layer_input.residual"), [2, 1024, 4, 2048]);
    // Every stream is mixed of all, for each feature of each position.
    assert_eq!(work(&graph, "model.layers.7.altup.predicted.residual"), 0);
    let mixed = graph.operators.iter().find(|operator| operator.name == "model.layers.7.altup.predicted").expect("a prediction");
    assert_eq!(mixed.loops.iter().map(|dimension| dimension.extent).product::<usize>(), 2 * 1024 * 2048 * 4 * 4);
    let cuts = graph.operators.iter().filter(|operator| operator.name.ends_with("gate_proj.cut")).count();
    assert_eq!(cuts, 10);
    assert_every_parameter_is_trained(&graph);
}

#[test]
fn layers_of_gemma_3n_that_differ_are_refused() {
    let config = case("gemma3n");
    let widths: Vec<usize> = (0..10).map(|layer| 100 + layer).collect();
    for (field, value) in [
        ("intermediate_size", json!(widths)),
        ("activation_sparsity_pattern", json!([0.0, 0.95, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0])),
        ("altup_correct_scale", json!(false)),
    ] {
        let error = refusal(&config, None, field, value);
        assert!(error.contains(&format!("`{field}: ")) && error.contains("hint: "), "{error}");
    }
    // The part that hears and the part that sees are left out, and a note says so.
    let whole = json!({"model_type": "gemma3n", "text_config": config, "vision_config": {"model_type": "gemma3n_vision"}});
    let imported = read(&whole, None);
    assert_eq!(imported.model, read(&config, None).model);
    assert!(imported.notes.iter().any(|note| note.contains("other parts are left out")), "{:?}", imported.notes);
}

#[test]
fn sizes_beyond_any_model_do_not_panic() {
    let most = 1_usize << 24;
    for (name, part, field) in [
        ("whisper-tiny", None, "d_model"),
        ("whisper-tiny", None, "num_mel_bins"),
        ("whisper-tiny", None, "max_source_positions"),
        ("clip", Some("vision_config"), "num_channels"),
        ("clip", Some("vision_config"), "hidden_size"),
        ("siglip", Some("text_config"), "vocab_size"),
        ("gemma3n", None, "hidden_size"),
        ("gemma3n", None, "altup_num_inputs"),
        ("gemma3n", None, "laurel_rank"),
    ] {
        let mut config = case(name);
        match part {
            Some(part) => config[part][field] = json!(most),
            None => config[field] = json!(most),
        }
        let Ok(imported) = from_hugging_face(&config.to_string(), None) else { continue };
        // It is refused, or fits the most that a tensor may have.
        if let Ok(graph) = imported.model.graph("m", &GraphOptions { batch: 1 << 20, ..GraphOptions::ONE }) {
            assert!(graph.parameter_count() > most, "{name}: {field}");
        }
    }
}
