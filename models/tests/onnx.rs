//! ONNX graphs: parameters and arithmetic against counts by hand, and what is refused.
//! `benches/onnx_graphs.py` writes the files: with the `onnx` package, and with PyTorch's
//! exporters.
#![allow(clippy::panic, reason = "a test that fails may panic")]

use foretell_models::{Graph, GraphOptions, Model, SampleShape, from_onnx};
use foretell_units::diagnostic::one_line;

const MLP: &[u8] = include_bytes!("onnx/mlp.onnx");
const CNN: &[u8] = include_bytes!("onnx/cnn.onnx");
const RESNET: &[u8] = include_bytes!("onnx/resnet50.onnx");
const TRANSFORMER: &[u8] = include_bytes!("onnx/transformer.onnx");
const MERGED: &[u8] = include_bytes!("onnx/merged.onnx");
const UNKNOWN: &[u8] = include_bytes!("onnx/unknown.onnx");

fn model(file: &[u8]) -> Model {
    from_onnx(file.to_vec()).unwrap_or_else(|error| panic!("{error}")).model
}

fn graph(model: &Model) -> Graph {
    model.graph("network", &GraphOptions::ONE).expect("it is sound")
}

/// Parameters, and multiply-adds of the forward pass over one sample.
fn figures(file: &[u8]) -> (usize, f64) {
    let graph = graph(&model(file));
    (graph.parameter_count(), graph.model_flops().value() / 2.0)
}

#[test]
fn a_network_of_layers_has_their_parameters_and_products() {
    let products = 784 * 512 + 512 * 256 + 256 * 10;
    assert_eq!(figures(MLP), (products + 512 + 256 + 10, products as f64));
    assert_eq!(model(MLP).sample(), SampleShape::Features { width: 784, classes: 10 });
}

#[test]
fn a_network_of_convolutions_has_their_parameters_and_products() {
    let block = 16 * 9 + 2 * 16 + 16 * 16;
    let parameters = 3 * 16 * 9 + 16 + 2 * block + 16 * 8 * 4 + 24 * 16 * 10 + 10;
    let pixels = 32 * 32;
    let products = pixels * 16 * (27 + 2 * (9 + 16)) + 16 * 16 * 8 * 64 + 24 * 16 * 10;
    assert_eq!(figures(CNN), (parameters, f64::from(products)));
}

#[test]
fn resnet_50_is_that_of_the_library() {
    let imported = graph(&model(RESNET));
    assert_eq!(imported.parameter_count(), 25_557_032);
    let library = graph(&Model::named("resnet50").expect("it is in the zoo"));
    assert_eq!(imported.model_flops(), library.model_flops());
    // One block for the stem, one for each bottleneck, one for the head.
    assert_eq!(imported.blocks.len(), library.blocks.len());
    assert!(model(RESNET).has_batch_norm());
}

#[test]
fn a_transformer_has_its_attention_as_products() {
    let layer = 2 * 128 + 4 * (64 * 64 + 64) + 64 * 256 + 256 + 256 * 64 + 64;
    let parameters = 500 * 64 + 16 * 64 + 2 * layer + 64 * 500;
    let products = 2 * (16 * (4 * 64 * 64 + 2 * 64 * 256) + 2 * 4 * 16 * 16 * 16) + 16 * 64 * 500;
    assert_eq!(figures(TRANSFORMER), (parameters, f64::from(products)));
    assert_eq!(model(TRANSFORMER).sample(), SampleShape::Tokens { sequence: 16, vocabulary: 500 });
}

#[test]
fn samples_and_rows_in_one_dimension_are_told_apart() {
    let parameters = 500 * 64 + 64 * 192 + 192 + 64 * 500;
    let products = 16 * 64 * 192 + 2 * 4 * 16 * 16 * 16 + 16 * 64 * 500;
    assert_eq!(figures(MERGED), (parameters, f64::from(products)));
    let batch = |batch| model(MERGED).graph("network", &GraphOptions { batch, ..GraphOptions::ONE }).expect("it is sound");
    assert_eq!(batch(6).model_flops().value(), 6.0 * batch(1).model_flops().value());
}

/// Multiply-adds of a layer of the exported transformers: products with weights at each position,
/// and those of four heads of 16 features.
fn layer(positions: usize) -> usize {
    positions * (4 * 64 * 64 + 2 * 64 * 256) + 2 * 4 * positions * positions * 16
}

/// A layer's parameters: those products, their biases, two norms.
const LAYER: usize = 4 * (64 * 64 + 64) + 2 * 64 * 256 + 256 + 64 + 2 * 128;

#[test]
fn modules_of_pytorch_may_have_the_batch_second() {
    let figures_of_encoder = (500 * 64 + 2 * LAYER + 64 * 500 + 500, (2 * layer(16) + 16 * 64 * 500) as f64);
    let files: [(&str, &[u8]); 4] = [
        ("first", include_bytes!("onnx/torch_encoder_first.onnx")),
        ("second", include_bytes!("onnx/torch_encoder_second.onnx")),
        ("one", include_bytes!("onnx/torch_encoder_second_one.onnx")),
        ("old", include_bytes!("onnx/torch_encoder_second_old.onnx")),
    ];
    for (name, file) in files {
        assert_eq!(figures(file), figures_of_encoder, "{name}");
        assert_eq!(model(file).sample(), SampleShape::Tokens { sequence: 16, vocabulary: 500 }, "{name}");
        let batch = |batch| model(file).graph("network", &GraphOptions { batch, ..GraphOptions::ONE }).expect("it is sound");
        assert_eq!(batch(6).model_flops().value(), 6.0 * batch(1).model_flops().value(), "{name}");
    }
    let notes = from_onnx(files[2].1.to_vec()).expect("it is understood").notes.join("; ");
    assert!(notes.contains("dimension 2 of input `x` counts as the batch"), "{notes}");
}

#[test]
fn samples_may_be_several_inputs_of_vectors() {
    let attention = include_bytes!("onnx/torch_attention.onnx");
    let products = 16 * 4 * 64 * 64 + 2 * 4 * 16 * 16 * 16;
    assert_eq!(figures(attention), (4 * (64 * 64 + 64), f64::from(products)));
    assert_eq!(model(attention).sample(), SampleShape::Features { width: 3 * 16 * 64, classes: 64 });
    let vectors = include_bytes!("onnx/torch_vectors_old_stated.onnx");
    assert_eq!(figures(vectors), (2 * LAYER + 64 * 500 + 500, (2 * layer(16) + 16 * 64 * 500) as f64));
    assert_eq!(model(vectors).sample(), SampleShape::Features { width: 16 * 64, classes: 500 });
}

#[test]
fn models_of_transformers_are_read_as_pytorch_exports_them() {
    // Tables and heads beside the layers. Exporters keep 16 of the 64 positions where they can
    // compute them, and a head has weights of its own.
    let norms = |count: usize| count * 128;
    let vit = 3 * 64 * 64 + 64 + 64 + 17 * 64 + 2 * LAYER + norms(1) + 64 * 10 + 10;
    let gpt2 = 500 * 64 + 16 * 64 + 2 * LAYER + norms(1) + 64 * 500;
    let bert = |positions: usize| (500 + positions + 2) * 64 + norms(1) + 2 * LAYER + 64 * 64 + 64 + norms(1) + 64 * 500 + 500;
    let llama_layer = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 256;
    let llama = 500 * 64 + 2 * (llama_layer + 2 * 64) + 64 + 64 * 500;
    let head = 16 * 64 * 500;
    let files: [(&str, &[u8], usize, usize); 5] = [
        ("vit", include_bytes!("onnx/torch_vit.onnx"), vit, 16 * 3 * 64 * 64 + 2 * layer(17) + 64 * 10),
        ("gpt2", include_bytes!("onnx/torch_gpt2.onnx"), gpt2, 2 * layer(16) + head),
        ("bert", include_bytes!("onnx/torch_bert.onnx"), bert(16), 2 * layer(16) + 16 * 64 * 64 + head),
        // Its positions depend on the tokens.
        ("roberta", include_bytes!("onnx/torch_roberta.onnx"), bert(64), 2 * layer(16) + 16 * 64 * 64 + head),
        ("llama", include_bytes!("onnx/torch_llama.onnx"), llama, 2 * (16 * llama_layer + 2 * 4 * 16 * 16 * 16) + head),
    ];
    for (name, file, parameters, products) in files {
        assert_eq!(figures(file), (parameters, products as f64), "{name}");
    }
}

#[test]
fn a_model_file_of_a_network_reads_back() {
    for file in [MLP, CNN, RESNET, TRANSFORMER, MERGED, include_bytes!("onnx/torch_attention.onnx")] {
        let model = model(file);
        let text = serde_json::to_string(&model).expect("it can be written");
        assert_eq!(serde_json::from_str::<Model>(&text).expect("it reads back"), model);
        assert_eq!(model.planned_only(), ["`family: network`"]);
    }
}

#[test]
fn what_differs_from_the_graph_is_noted() {
    let notes = |file: &[u8]| from_onnx(file.to_vec()).expect("it is understood").notes.join("\n");
    assert!(notes(MLP).contains("the last softmax is that of the loss"));
    assert!(!notes(TRANSFORMER).contains("shared"));
    // A weight that another layer has under the same name.
    let mut bytes = MLP.to_vec();
    let place = bytes.windows(8).position(|eight| eight == b"fc3.bias").expect("it is there");
    bytes[place..place + 8].copy_from_slice(b"fc1.bias");
    assert!(notes(&bytes).contains("weight `fc1.bias` is shared by 2 nodes"), "{}", notes(&bytes));
}

#[test]
fn what_is_not_understood_is_named() {
    let error = one_line(&from_onnx(UNKNOWN.to_vec()).expect_err("unknown operators"));
    assert!(error.starts_with("`Hardmax`, `LpNormalization` are operators that are not understood; hint: "), "{error}");
    for bytes in [&b"family: mlp"[..], b"", &RESNET[..RESNET.len() / 2]] {
        let error = one_line(&from_onnx(bytes.to_vec()).expect_err("no graph"));
        assert!(error.starts_with("this is not an ONNX file: ") && error.contains("hint: "), "{error}");
    }
}

#[test]
fn a_network_that_does_not_fit_is_refused() {
    let changes = [
        ("\"reads\":[1]", "\"reads\":[9]", "reads a layer that does not come before it"),
        ("\"name\":\"relu1\"", "\"name\":\"fc1\"", "two layers have the name `fc1`"),
        ("\"features\":256", "\"features\":0", "a layer has a size of 0"),
        ("\"shift\":{\"shape\":[256]}", "\"shift\":{\"shape\":[255]}", "do not fit each other"),
        (
            "\"sigmoid\",\"reads\":[4],\"operation\":\"function\"",
            "\"sigmoid\",\"reads\":[4],\"operation\":\"batch_norm\"",
            "wants an image",
        ),
    ];
    let text = serde_json::to_string(&model(MLP)).expect("it can be written");
    for (from, to, expected) in changes {
        assert!(text.contains(from), "{from} in {text}");
        let model: Model = serde_json::from_str(&text.replacen(from, to, 1)).expect("it is a model");
        let error = one_line(&model.graph("network", &GraphOptions::ONE).expect_err(expected));
        assert!(error.contains(expected) && error.contains("hint: "), "{error}");
    }
}
