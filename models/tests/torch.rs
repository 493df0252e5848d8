//! Traces of PyTorch steps: parameters and arithmetic against counts by hand and PyTorch's own, and
//! what is refused. The steps are those of `python/tests/trace/steps.py`, which says how to write
//! the files.
#![allow(clippy::panic, reason = "a test that fails may panic")]

use foretell_models::{
    Graph, GraphOptions, Model, NetworkOperation, Optimizer, SampleShape, differentiate, from_torch, is_torch_trace,
};
use foretell_units::diagnostic::one_line;
use serde_json::{Value, json};

const MLP: &str = include_str!("torch/mlp.json");
const CNN: &str = include_str!("torch/cnn.json");
const TRANSFORMER: &str = include_str!("torch/transformer.json");
const HYBRID: &str = include_str!("torch/hybrid.json");
const UNET: &str = include_str!("torch/unet.json");
const EXPERTS: &str = include_str!("torch/experts.json");
const ALL: [(&str, &str); 6] =
    [("mlp", MLP), ("cnn", CNN), ("transformer", TRANSFORMER), ("hybrid", HYBRID), ("unet", UNET), ("experts", EXPERTS)];

fn model(text: &str) -> Model {
    from_torch(text, None).unwrap_or_else(|error| panic!("{error}")).model
}

fn graph(model: &Model, batch: usize) -> Graph {
    model.graph("network", &GraphOptions { batch, ..GraphOptions::ONE }).unwrap_or_else(|error| panic!("{error}"))
}

fn document(text: &str) -> Value {
    serde_json::from_str(text).expect("it is JSON")
}

/// The notes of a trace, one under the other.
fn notes(text: &str) -> String {
    from_torch(text, None).unwrap_or_else(|error| panic!("{error}")).notes.join("\n")
}

#[test]
fn parameters_are_those_of_the_modules() {
    let product = |inputs: usize, outputs: usize| inputs * outputs + outputs;
    let mlp = product(784, 512) + product(512, 256) + product(256, 10);
    let block = 16 * 9 + 2 * 16 + 16 * 16;
    let cnn = product(27, 16) + 2 * block + product(16 * 3, 24) + product(24, 10);
    let layer = 4 * product(64, 64) + product(64, 256) + product(256, 64) + 4 * 64;
    let transformer = 500 * 64 + 64 * 64 + 2 * layer + 2 * 64;
    for (text, parameters) in [(MLP, mlp), (CNN, cnn), (TRANSFORMER, transformer)] {
        assert_eq!(graph(&model(text), 1).parameter_count(), parameters);
    }
    for (name, text) in ALL {
        let listed = document(text)["parameters"].as_array().expect("a list").clone();
        let sizes =
            |value: &Value| -> u64 { value["shape"].as_array().into_iter().flatten().filter_map(Value::as_u64).product() };
        let listed: u64 = listed.iter().map(sizes).sum();
        assert_eq!(graph(&model(text), 1).parameter_count() as u64, listed, "{name}");
    }
}

#[test]
fn products_are_those_that_pytorch_counts() {
    for (name, text) in ALL {
        let document = document(text);
        let batch = document["sizes"]["batch"].as_u64().expect("a batch");
        let counted: u64 =
            document["operators"].as_array().into_iter().flatten().filter_map(|operator| operator["flops"].as_u64()).sum();
        let own = graph(&model(text), usize::try_from(batch).expect("it is small")).model_flops().value();
        assert!((own / counted as f64 - 1.0).abs() < 1e-9, "{name}: {own} and {counted}");
    }
}

#[test]
fn twice_the_samples_are_twice_the_products_and_the_same_parameters() {
    for (name, text) in ALL {
        let model = model(text);
        let [one, six] = [1, 6].map(|batch| differentiate(&graph(&model, batch), 1, |_| false));
        assert!((six.model_flops().value() / one.model_flops().value() - 6.0).abs() < 1e-9, "{name}");
        assert_eq!(one.parameter_count(), six.parameter_count(), "{name}");
        assert_eq!(one.operators.len(), six.operators.len(), "{name}");
    }
}

#[test]
fn a_trace_of_two_lengths_gives_every_length() {
    let of = |sequence| from_torch(TRANSFORMER, Some(sequence)).unwrap_or_else(|error| panic!("{error}")).model;
    assert_eq!(of(16), model(TRANSFORMER));
    assert_eq!(of(48).sample(), SampleShape::Tokens { sequence: 48, vocabulary: 500 });
    let products = |s: usize| 2 * (s * (4 * 64 * 64 + 2 * 64 * 256) + 2 * s * s * 64) + s * 64 * 500;
    assert_eq!(graph(&of(48), 1).model_flops().value(), 2.0 * products(48) as f64);
    assert!(from_torch(MLP, Some(8)).expect_err("no sequence").to_string().contains("one length"));
    let error = from_torch(HYBRID, Some(33)).map(|imported| imported.model.graph("network", &GraphOptions::ONE));
    assert!(error.is_ok(), "a scan has no blocks of positions");
}

#[test]
fn repeated_modules_are_blocks() {
    let names = |text: &str| graph(&model(text), 1).blocks.into_iter().map(|block| block.name).collect::<Vec<_>>();
    assert_eq!(names(TRANSFORMER), ["input", "layers.0", "layers.1", "head"]);
    assert_eq!(names(HYBRID), ["input", "layers.0", "layers.1", "layers.2", "head"]);
    assert_eq!(names(CNN), ["input", "blocks.0", "blocks.1", "head"]);
    // Without repeated modules, a block begins where one tensor is all that is read from there on.
    assert_eq!(graph(&model(MLP), 1).blocks.len(), 3);
    assert!(notes(TRANSFORMER).contains("the step checkpoints 2 times"), "{}", notes(TRANSFORMER));
}

#[test]
fn what_the_step_trains_with_is_kept() {
    assert_eq!(model(MLP).usual_optimizer(), Optimizer::Sgd);
    assert_eq!(model(TRANSFORMER).usual_optimizer(), Optimizer::AdamW);
    assert_eq!(model(EXPERTS).usual_optimizer(), Optimizer::Adam);
    assert!(notes(EXPERTS).contains("`router.weight` is frozen, and so are 0 other parameters"), "{}", notes(EXPERTS));
    assert!(notes(HYBRID).contains("plan with `--precision bf16`"), "{}", notes(HYBRID));
    assert!(model(CNN).has_batch_norm());
    assert_eq!(model(CNN).sample(), SampleShape::Image { channels: 3, height: 32, width: 32, classes: 10 });
}

#[test]
fn a_model_file_of_a_network_reads_back() {
    for (name, text) in ALL {
        let model = model(text);
        let written = serde_json::to_string(&model).expect("it can be written");
        assert_eq!(serde_json::from_str::<Model>(&written).expect("it reads back"), model, "{name}");
        assert_eq!(model.planned_only(), ["`family: network`"]);
        assert!(is_torch_trace(text) && !is_torch_trace(&written), "{name}");
    }
}

#[test]
fn an_operator_without_a_mapping_is_counted_and_noted() {
    let changed = MLP.replace("aten.sigmoid", "mine.gate");
    let text = notes(&changed);
    assert!(text.contains("count as reading and writing their operands: `mine.gate` (1 times, 256 numbers a sample)"), "{text}");
    assert_eq!(graph(&model(&changed), 1).model_flops(), graph(&model(MLP), 1).model_flops());
    // Unless PyTorch counts arithmetic for it.
    let error = one_line(&from_torch(&MLP.replace("aten.addmm", "mine.product"), None).expect_err("a product"));
    assert!(error.contains("(`mine.product` in `0`)") && error.contains("hint: "), "{error}");
}

#[test]
fn a_network_that_does_not_fit_is_refused() {
    let Model::Network(network) = model(MLP) else { panic!("it is a network") };
    let refused = |change: &dyn Fn(&mut foretell_models::Network), expected: &str| {
        let mut changed = network.clone();
        change(&mut changed);
        let error = one_line(&Model::Network(changed).graph("network", &GraphOptions::ONE).expect_err(expected));
        assert!(error.contains(expected) && error.contains("hint: "), "{error}");
    };
    let product = network.layers.iter().position(|layer| matches!(layer.operation, NetworkOperation::Product { .. }));
    let product = product.expect("there is one");
    refused(&|network| network.layers[product].reads[0] = 999, "reads a layer that does not come before it");
    refused(&|network| network.layers[product].shape = vec![511], "do not fit the operation");
    refused(&|network| network.layers[product].shape = vec![0], "empty or too large");
    refused(&|network| network.layers[product].shape = vec![usize::MAX, 2], "empty or too large");
    refused(&|network| network.layers[product].reads.clear(), "it reads 0 tensors");
    refused(&|network| network.layers[product].shared = true, "`shared` does not say");
    refused(&|network| network.layers[1].name = network.layers[0].name.clone(), "two layers have the name");
    refused(&|network| network.layers.truncate(product + 1), "it has no loss");
    refused(&|network| network.inputs.clear(), "it has 0 inputs");
}

#[test]
fn hostile_traces_are_refused_with_a_reason() {
    let refused = |text: &str, expected: &str| {
        let error = one_line(&from_torch(text, None).expect_err(expected));
        assert!(error.contains(expected) && error.contains("hint: "), "{error}");
    };
    for text in ["", "{}", "[]", "null", &UNET[..UNET.len() / 2]] {
        refused(text, "this is not a trace of a PyTorch step: ");
    }
    let changed = |place: &str, value: Value| {
        let mut document = document(UNET);
        *document.pointer_mut(place).unwrap_or_else(|| panic!("{place} is there")) = value;
        document.to_string()
    };
    refused(&changed("/format", json!("other")), "`format` is `other`");
    refused(&changed("/version", json!(2)), "`version` 2");
    refused(&changed("/sizes/batch", json!(0)), "the batch is 0");
    refused(&changed("/operators", json!([])), "it has no operators");
    refused(&changed("/losses", json!([])), "or no loss");
    refused(&changed("/losses", json!([0])), "the loss is no mean or sum");
    refused(&changed("/losses", json!([usize::MAX])), "the loss is no mean or sum");
    // A cycle would read what comes later.
    refused(&changed("/operators/1/in", json!([9999])), "which no earlier operator makes");
    refused(&changed("/operators/0/out/0/shape", json!([[1, -1]])), "no size");
    refused(&changed("/operators/0/out/0/shape", json!([[1, 0.5]])), "no size");
    refused(&changed("/operators/0/out/0/shape", json!([[2, 1]])), "no size");
    refused(&changed("/operators/0/out/0/shape", json!([[1, 1e300]])), "no size");
    refused(&changed("/operators/0/out/0/shape", json!([[]])), "0 terms");
    refused(&changed("/operators/0/out/0/shape", json!([[1, 2], [1, 2]])), "samples meet each other");
    refused(&changed("/operators/0/out/0/shape", json!([1_u64 << 39, 1_u64 << 39])), "too large");
    refused(&changed("/operators/0/out/0/shape", json!(vec![1; 99])), "more than 16 dimensions");
    refused(&changed("/parameters/0/shape", json!([1_u64 << 50])), "its shape is too large");
    refused(&changed("/inputs/0/shape", json!([[1, 1e18]])), "no size");
}
