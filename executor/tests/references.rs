//! Whole models against PyTorch: loss, logits and every gradient of tiny models with the weights and names of torchvision and Hugging Face.
//!
//! `references/generate.py` made the files and says what is in them. To add a model, add a case there and a test here.

#![allow(clippy::unwrap_used, reason = "a test that fails may panic")]

use foretell_executor::backend::{Backend as _, CpuBackend, Hyperparameters, KernelCall, Operand};
use foretell_models::{Graph, GraphOptions, InputKind, Model, OperatorKind, Parameter, Role, Tensor, TensorId, differentiate};
use foretell_units::DataType;
use std::collections::{BTreeMap, BTreeSet};

/// How far a number may be from PyTorch's, as a part of the largest of its tensor: rounding to single precision from layer to layer.
const TOLERANCE: f64 = 1e-4;

/// A tensor that is zero but for rounding, such as the gradient of a bias before a norm, is measured by this part of the largest gradient.
const FLOOR: f64 = 1e-2;

/// The tensors of a file in the order of its bytes, each as words of 32 bits, and the model.
struct Reference {
    model: Model,
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

/// For each of our elements, in order, its place in the public tensor.
fn public_places(extents: &[usize], parameter: &Parameter) -> Vec<usize> {
    let public: Vec<usize> = parameter.permutation.iter().map(|&place| extents[place]).collect();
    let mut strides = vec![0; extents.len()];
    for (position, &dimension) in parameter.permutation.iter().enumerate() {
        strides[dimension] = public[position + 1..].iter().product();
    }
    let elements = extents.iter().product();
    let place = |mut index: usize| {
        let mut sum = 0;
        for (&extent, &stride) in extents.iter().zip(&strides).rev() {
            sum += index % extent * stride;
            index /= extent;
        }
        sum
    };
    (0..elements).map(place).collect()
}

/// The words of a parameter's public tensors, one after the other.
fn public_words(tensor: &Tensor, tensors: &BTreeMap<String, (Vec<usize>, Vec<u32>)>, prefix: &str) -> Vec<u32> {
    let words = tensor.public_tensors().into_iter().flat_map(|public| {
        let name = format!("{prefix}{}", public.name);
        let (shape, words) = tensors.get(&name).unwrap_or_else(|| unreachable!("the file lacks `{name}`"));
        assert_eq!((shape, words.len()), (&public.shape, public.elements.len()), "{name}");
        words.clone()
    });
    words.collect()
}

fn extents(graph: &Graph, tensor: TensorId) -> Vec<usize> {
    graph.tensor(tensor).dimensions.iter().map(|one| one.extent).collect()
}

/// Every tensor as it stands before the graph runs.
fn memory(graph: &Graph, reference: &Reference) -> Vec<Vec<u32>> {
    let tensors = (0..graph.tensors.len()).map(TensorId).map(|id| {
        let tensor = graph.tensor(id);
        let given = |name: &str| {
            let (_, words) = reference.tensors.get(name).unwrap_or_else(|| unreachable!("the file lacks `{name}`"));
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
                public_places(&extents(graph, id), parameter).into_iter().map(|place| words[place]).collect()
            }
            _ => vec![0; tensor.elements()],
        }
    });
    tensors.collect()
}

/// Runs all operators, in order.
fn run(graph: &Graph, memory: &mut [Vec<u32>]) {
    let mut backend = CpuBackend::new();
    let mut written = BTreeSet::new();
    let operands: Vec<Operand> =
        memory.iter_mut().map(|words| Operand { pointer: words.as_mut_ptr().cast(), bytes: 4 * words.len() }).collect();
    for operator in &graph.operators {
        let kernel = operator.kernel(&operator.extents());
        let of = |operands_of: &[foretell_models::Operand]| -> Vec<Operand> {
            operands_of.iter().map(|operand| operands[operand.tensor.0]).collect()
        };
        let summed = operator.outputs.iter().map(|output| output.tensor).filter(|&tensor| {
            let role = &graph.tensor(tensor).role;
            *role == Role::Sum || matches!(role, Role::ParameterGradient(_))
        });
        // Sums and gradients of parameters are added to from the second time on.
        // Each is written, whatever was found for those before it.
        let accumulate = summed.map(|tensor| !written.insert(tensor)).filter(|&again| again).count() > 0;
        let (reads, writes) = (of(&operator.inputs), of(&operator.outputs));
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
        // SAFETY: every tensor has memory of its own that lives until the end.
        unsafe { backend.run(&call) }.unwrap();
    }
}

fn numbers(words: &[u32]) -> Vec<f64> {
    words.iter().map(|&word| f64::from(f32::from_bits(word))).collect()
}

fn largest(values: &[f64]) -> f64 {
    values.iter().fold(0.0, |largest, value| value.abs().max(largest))
}

fn assert_close(what: &str, ours: &[f64], theirs: &[f64], floor: f64) {
    assert_eq!(ours.len(), theirs.len(), "{what}");
    let scale = largest(theirs).max(floor);
    for (place, (ours, theirs)) in ours.iter().zip(theirs).enumerate() {
        assert!((ours - theirs).abs() <= TOLERANCE * scale, "{what} at {place}: {ours} for {theirs}, among {scale}");
    }
}

/// Compares a model with its file.
fn compare(name: &str) {
    let reference = read(name);
    let labels = &reference.tensors["input.labels"].1;
    let predictions = labels.iter().filter(|&&label| label as i32 >= 0).count();
    let options = GraphOptions { batch: reference.tensors["input.labels"].0[0], ..GraphOptions::ONE };
    let forward = reference.model.graph(name, &options).unwrap();
    let graph = differentiate(&forward, predictions);
    let mut memory = memory(&graph, &reference);
    run(&graph, &mut memory);

    let theirs = |name: &str| numbers(&reference.tensors[name].1);
    let loss = graph.operators.iter().find(|operator| operator.kind == OperatorKind::CrossEntropy).unwrap();
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
        let places = public_places(&extents(&graph, parameter), public);
        let gradient = numbers(&public_words(graph.tensor(parameter), &reference.tensors, "gradient."));
        let theirs: Vec<f64> = places.into_iter().map(|place| gradient[place]).collect();
        assert_close(&format!("gradient of {name}"), &numbers(&memory[index]), &theirs, floor);
        compared += graph.tensor(parameter).public_tensors().len();
    }
    let parameters: usize = graph.parameters().map(|(_, tensor)| tensor.public_tensors().len()).sum();
    assert_eq!(compared, parameters, "every parameter has a gradient");
    assert_eq!(compared, gradients.len(), "and PyTorch's model has no other parameters");
}

#[test]
fn gpt2_is_hugging_faces() {
    compare("gpt2");
}

#[test]
fn llama_with_grouped_queries_is_hugging_faces() {
    compare("llama");
}

#[test]
fn llama_with_tied_embeddings_is_hugging_faces() {
    compare("llama_tied");
}

#[test]
fn bert_for_masked_language_modelling_is_hugging_faces() {
    compare("bert");
}

#[test]
fn the_vision_transformer_is_torchvisions() {
    compare("vit");
}

#[test]
fn vgg16_is_torchvisions() {
    compare("vgg16");
}

#[test]
fn vgg11_with_batch_norm_is_torchvisions() {
    compare("vgg11_bn");
}

#[test]
fn resnet18_is_torchvisions() {
    compare("resnet");
}

#[test]
fn the_lstm_encoder_decoder_is_pytorchs() {
    compare("lstm_seq2seq");
}

#[test]
fn t5_with_tied_embeddings_is_hugging_faces() {
    compare("t5");
}

#[test]
fn t5_with_gated_gelu_is_hugging_faces() {
    compare("t5_gated");
}

#[test]
fn mixtral_is_hugging_faces() {
    compare("mixtral");
}
