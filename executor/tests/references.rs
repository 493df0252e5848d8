//! Whole models against PyTorch: logits, loss and every gradient of tiny models from torchvision
//! and Hugging Face, with their weights and names.
//!
//! `references/generate.py` generates the files and describes their contents. To add a model, add a
//! case there and a test here.

#![allow(clippy::unwrap_used, reason = "a test that fails may panic")]

use foretell_executor::backend::{Backend as _, CpuBackend, Hyperparameters, KernelCall, Operand};
use foretell_models::{Graph, GraphOptions, InputKind, Kernel, Model, Parameter, Role, Tensor, TensorId, differentiate};
use foretell_units::DataType;
use std::collections::{BTreeMap, BTreeSet};

/// The largest difference from PyTorch, relative to the largest number of the tensor. It allows for
/// rounding to single precision from layer to layer.
const TOLERANCE: f64 = 1e-4;

/// The least scale of a gradient, relative to the largest gradient of the model. Some gradients are
/// zero except for rounding, such as that of a bias before a norm.
const FLOOR: f64 = 1e-2;

/// The contents of a file.
struct Reference {
    model: Model,
    /// Shape and 32-bit words of each tensor, by name.
    tensors: BTreeMap<String, (Vec<usize>, Vec<u32>)>,
}

fn read(name: &str) -> Reference {
    let path = format!("{}/tests/references/{name}.safetensors", env!("CARGO_MANIFEST_DIR"));
    let bytes = std::fs::read(path).unwrap();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let (header, data) = bytes[8..].split_at(length);
    let header: BTreeMap<String, serde_json::Value> = serde_json::from_slice(header).unwrap();
    let model = serde_json::from_str(header["__metadata__"]["model"].as_str().unwrap()).unwrap();
    let numbers = |value: &serde_json::Value| -> Vec<usize> {
        value.as_array().unwrap().iter().map(|number| number.as_u64().unwrap() as usize).collect()
    };
    let tensors = header.iter().filter(|(name, _)| *name != "__metadata__").map(|(name, entry)| {
        let place = numbers(&entry["data_offsets"]);
        let words = data[place[0]..place[1]].chunks_exact(4).map(|word| u32::from_le_bytes(word.try_into().unwrap()));
        (name.clone(), (numbers(&entry["shape"]), words.collect()))
    });
    Reference { model, tensors: tensors.collect() }
}

/// For each element of our tensor, its index in the public tensor, whose dimensions are permuted.
fn public_indices(extents: &[usize], parameter: &Parameter) -> Vec<usize> {
    let public: Vec<usize> = parameter.permutation.iter().map(|&dimension| extents[dimension]).collect();
    let mut strides = vec![0; extents.len()];
    for (position, &dimension) in parameter.permutation.iter().enumerate() {
        strides[dimension] = public[position + 1..].iter().product();
    }
    let elements = extents.iter().product();
    let public_index = |mut index: usize| {
        let mut sum = 0;
        for (&extent, &stride) in extents.iter().zip(&strides).rev() {
            sum += index % extent * stride;
            index /= extent;
        }
        sum
    };
    (0..elements).map(public_index).collect()
}

/// The words of a parameter's public tensors, concatenated.
fn public_words(tensor: &Tensor, tensors: &BTreeMap<String, (Vec<usize>, Vec<u32>)>, prefix: &str) -> Vec<u32> {
    let words = tensor.public_tensors().into_iter().flat_map(|public| {
        let name = format!("{prefix}{}", public.name);
        let (shape, words) = tensors.get(&name).unwrap_or_else(|| unreachable!("the file has no `{name}`"));
        assert_eq!((shape, words.len()), (&public.shape, public.elements.len()), "{name}");
        words.clone()
    });
    words.collect()
}

fn extents(graph: &Graph, tensor: TensorId) -> Vec<usize> {
    graph.tensor(tensor).dimensions.iter().map(|dimension| dimension.extent).collect()
}

/// The contents of every tensor before the graph runs.
fn memory(graph: &Graph, reference: &Reference) -> Vec<Vec<u32>> {
    let tensors = (0..graph.tensors.len()).map(TensorId).map(|id| {
        let tensor = graph.tensor(id);
        let given = |name: &str| {
            let (_, words) = reference.tensors.get(name).unwrap_or_else(|| unreachable!("the file has no `{name}`"));
            assert_eq!(words.len(), tensor.elements(), "{name}");
            words.clone()
        };
        match &tensor.role {
            Role::Input(InputKind::Images) => {
                (0..tensor.elements()).map(|index| (((index * 7919) % 1000) as f32 / 500.0 - 1.0).to_bits()).collect()
            }
            Role::Input(InputKind::TokenTypes) => vec![0; tensor.elements()],
            Role::Input(_) => given(&format!("input.{}", tensor.name)),
            Role::Parameter(parameter) => {
                let words = public_words(tensor, &reference.tensors, "");
                public_indices(&extents(graph, id), parameter).into_iter().map(|index| words[index]).collect()
            }
            _ => vec![0; tensor.elements()],
        }
    });
    tensors.collect()
}

/// Runs all operators of a graph, in order.
fn run(graph: &Graph, memory: &mut [Vec<u32>]) {
    let mut backend = CpuBackend::new();
    let mut written = BTreeSet::new();
    let operands: Vec<Operand> =
        memory.iter_mut().map(|words| Operand { pointer: words.as_mut_ptr().cast(), bytes: 4 * words.len() }).collect();
    for operator in &graph.operators {
        let kernel = operator.kernel(&operator.extents());
        let operands_of = |list: &[foretell_models::Operand]| -> Vec<Operand> {
            list.iter().map(|operand| operands[operand.tensor.0]).collect()
        };
        let summed = operator.outputs.iter().map(|output| output.tensor).filter(|&tensor| {
            let role = &graph.tensor(tensor).role;
            *role == Role::Sum || matches!(role, Role::ParameterGradient(_))
        });
        // Sums and parameter gradients accumulate from the second write on. `count` inserts all of
        // them, where `any` would stop early.
        let accumulate = summed.filter(|&tensor| !written.insert(tensor)).count() > 0;
        let (reads, writes) = (operands_of(&operator.inputs), operands_of(&operator.outputs));
        let call = KernelCall {
            kernel: &kernel,
            reads: &reads,
            writes: &writes,
            accumulate,
            hyperparameters: &Hyperparameters::default(),
            group_index: 0,
            samples_before: 0,
            precision: DataType::Fp32,
        };
        // SAFETY: every tensor has memory of its own, which outlives the call.
        unsafe { backend.run(&call) }.unwrap();
    }
}

fn numbers(words: &[u32]) -> Vec<f64> {
    words.iter().map(|&word| f64::from(f32::from_bits(word))).collect()
}

fn largest(values: &[f64]) -> f64 {
    values.iter().fold(0.0, |largest, value| value.abs().max(largest))
}

fn assert_close(name: &str, ours: &[f64], theirs: &[f64], floor: f64) {
    assert_eq!(ours.len(), theirs.len(), "{name}");
    let scale = largest(theirs).max(floor);
    for (index, (ours, theirs)) in ours.iter().zip(theirs).enumerate() {
        assert!((ours - theirs).abs() <= TOLERANCE * scale, "{name}[{index}] is {ours}, expected {theirs} (scale {scale})");
    }
}

/// Compares a model with its reference file.
fn compare(name: &str) {
    let reference = read(name);
    let labels = &reference.tensors["input.labels"].1;
    let predictions = labels.iter().filter(|&&label| label as i32 >= 0).count();
    let options = GraphOptions { batch: reference.tensors["input.labels"].0[0], ..GraphOptions::ONE };
    let forward = reference.model.graph(name, &options).unwrap();
    let graph = differentiate(&forward, predictions, |_| false);
    let mut memory = memory(&graph, &reference);
    run(&graph, &mut memory);

    let theirs = |name: &str| numbers(&reference.tensors[name].1);
    let loss = graph.operators.iter().find(|operator| matches!(operator.kind, Kernel::CrossEntropy { .. })).unwrap();
    assert_close("logits", &numbers(&memory[loss.inputs[0].tensor.0]), &theirs("output.logits"), 0.0);
    let sum = numbers(&memory[loss.outputs[0].tensor.0]);
    assert_close("loss", &[sum[0] / predictions as f64], &theirs("output.loss"), 0.0);

    let gradients: BTreeMap<&str, Vec<f64>> = reference
        .tensors
        .iter()
        .filter_map(|(name, (_, words))| Some((name.strip_prefix("gradient.")?, numbers(words))))
        .collect();
    let floor = FLOOR * gradients.values().map(|values| largest(values)).fold(0.0, f64::max);
    let mut compared = 0;
    for (index, tensor) in graph.tensors.iter().enumerate() {
        let Role::ParameterGradient(parameter) = tensor.role else { continue };
        let Role::Parameter(public) = &graph.tensor(parameter).role else { continue };
        let name = &graph.tensor(parameter).name;
        let indices = public_indices(&extents(&graph, parameter), public);
        let gradient = numbers(&public_words(graph.tensor(parameter), &reference.tensors, "gradient."));
        let theirs: Vec<f64> = indices.into_iter().map(|index| gradient[index]).collect();
        assert_close(&format!("gradient of {name}"), &numbers(&memory[index]), &theirs, floor);
        compared += graph.tensor(parameter).public_tensors().len();
    }
    let parameters: usize = graph.parameters().map(|(_, tensor)| tensor.public_tensors().len()).sum();
    assert_eq!(compared, parameters, "every parameter has a gradient");
    assert_eq!(compared, gradients.len(), "PyTorch's model has no other parameters");
}

#[test]
fn gpt2_matches_hugging_face() {
    compare("gpt2");
}

#[test]
fn llama_with_grouped_queries_matches_hugging_face() {
    compare("llama");
}

#[test]
fn llama_with_tied_embeddings_matches_hugging_face() {
    compare("llama_tied");
}

#[test]
fn bert_for_masked_language_modelling_matches_hugging_face() {
    compare("bert");
}

#[test]
fn the_vision_transformer_matches_torchvision() {
    compare("vit");
}

#[test]
fn vgg16_matches_torchvision() {
    compare("vgg16");
}

#[test]
fn vgg11_with_batch_norm_matches_torchvision() {
    compare("vgg11_bn");
}

#[test]
fn resnet18_matches_torchvision() {
    compare("resnet");
}

#[test]
fn the_lstm_encoder_decoder_matches_pytorch() {
    compare("lstm_seq2seq");
}

#[test]
fn t5_with_tied_embeddings_matches_hugging_face() {
    compare("t5");
}

#[test]
fn t5_with_gated_gelu_matches_hugging_face() {
    compare("t5_gated");
}

#[test]
fn mixtral_matches_hugging_face() {
    compare("mixtral");
}
