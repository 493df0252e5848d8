//! A network under construction: what is known of each tensor of the graph, and the layers so far.

use super::OnnxError;
use super::messages::{BOOL, GraphMessage, INT32, INT64, Node, ValueInfo};
use super::values::Known;
use crate::families::{MOST, Network, NetworkInput, NetworkLayer, NetworkOperation};
use std::collections::{BTreeMap, BTreeSet};

/// A network under construction.
pub(super) struct Translator {
    /// What is known of each tensor, by its name.
    known: BTreeMap<String, Known>,
    pub(super) layers: Vec<NetworkLayer>,
    /// Shapes of the input and of each layer's result.
    shapes: Vec<Vec<usize>>,
    names: BTreeSet<String>,
    /// The batch that the file states, if it is a number.
    pub(super) batch: Option<i64>,
    /// Whether the input is tokens, and the rows of the first table that they look up.
    tokens: bool,
    vocabulary: usize,
    notes: BTreeSet<String>,
}

impl Translator {
    pub(super) fn new(graph: &GraphMessage) -> Result<Self, OnnxError> {
        let mut known = BTreeMap::new();
        for tensor in &graph.initializers {
            let value = Known::of_tensor(tensor, true).ok_or_else(|| OnnxError::NotOnnx {
                reason: format!("the weight `{}` has a negative dimension, or one that is too large", tensor.name),
            })?;
            known.insert(tensor.name.clone(), value);
        }
        // Old files list their weights among the inputs.
        let samples: Vec<&ValueInfo> = graph.inputs.iter().filter(|input| !known.contains_key(&input.name)).collect();
        let Some((first, others)) = samples.split_first() else {
            return Err(OnnxError::NotOnnx { reason: "the graph has no input".into() });
        };
        let (shape, batch, tokens) = sample(first)?;
        let mut notes = BTreeSet::from(["initial weights are drawn, and not those of the file".to_string()]);
        for other in others {
            let (shape, _, is_whole) = sample(other)?;
            if !is_whole && tokens == is_whole {
                let hint = "give the graph one input of floating-point numbers, or of tokens";
                return Err(OnnxError::Input { name: other.name.clone(), reason: "is a second sample".into(), hint });
            }
            notes.insert(format!("input `{}` counts as numbers that are the same in every sample", other.name));
            known.insert(other.name.clone(), Known::Constant { shape: [&[1], &shape[..]].concat() });
        }
        notes.extend(shared_weights(graph, &known));
        known.insert(first.name.clone(), Known::Layer { place: 0, shape: shape.clone(), merged: false });
        Ok(Self { known, layers: Vec::new(), shapes: vec![shape], names: BTreeSet::new(), batch, tokens, vocabulary: 1, notes })
    }

    /// What is known of an input of a node.
    pub(super) fn input(&self, node: &Node, index: usize) -> Result<Known, String> {
        let name = node.inputs.get(index).filter(|name| !name.is_empty());
        let name = name.ok_or_else(|| format!("input {index} is missing"))?;
        self.known.get(name).cloned().ok_or_else(|| format!("`{name}` is made by no earlier node"))
    }

    /// What is known of all inputs of a node. Optional ones in the middle count as empty constants.
    pub(super) fn inputs(&self, node: &Node) -> Result<Vec<Known>, String> {
        let one = |(index, name): (usize, &String)| match name.is_empty() {
            true => Ok(Known::Constant { shape: vec![0] }),
            false => self.input(node, index),
        };
        node.inputs.iter().enumerate().map(one).collect()
    }

    /// Records the result of a node.
    pub(super) fn made(&mut self, node: &Node, output: usize, value: Known) {
        if let Some(name) = node.outputs.get(output).filter(|name| !name.is_empty()) {
            self.known.insert(name.clone(), value);
        }
    }

    pub(super) fn note(&mut self, note: &str) {
        self.notes.insert(note.into());
    }

    /// Adds a layer, and returns its result.
    pub(super) fn layer(&mut self, title: &str, operation: NetworkOperation, reads: &[usize]) -> Result<Known, String> {
        operation.validate()?;
        let shapes: Vec<&[usize]> = reads.iter().filter_map(|&read| self.shapes.get(read)).map(Vec::as_slice).collect();
        let shape = operation.shape(&shapes)?;
        // Shapes of shapes are one shape.
        if let (NetworkOperation::Reshape { .. }, [read]) = (&operation, reads)
            && let Some(source) = read.checked_sub(1).and_then(|index| self.layers.get(index))
            && matches!(source.operation, NetworkOperation::Reshape { .. })
        {
            let reads = source.reads.clone();
            if self.shapes.get(reads[0]) == Some(&shape) {
                return Ok(Known::Layer { place: reads[0], shape, merged: false });
            }
            return self.push(title, operation, reads, shape);
        }
        self.push(title, operation, reads.to_vec(), shape)
    }

    fn push(&mut self, title: &str, operation: NetworkOperation, reads: Vec<usize>, shape: Vec<usize>) -> Result<Known, String> {
        let title = if title.is_empty() { "layer" } else { title.trim_start_matches('/') };
        let mut name = title.to_string();
        let mut number = 1;
        while !self.names.insert(name.clone()) {
            number += 1;
            name = format!("{title}.{number}");
        }
        self.layers.push(NetworkLayer { name, reads, operation });
        self.shapes.push(shape.clone());
        Ok(Known::Layer { place: self.layers.len(), shape, merged: false })
    }

    /// Adds a look-up in a table of the result of a layer, which must be tokens.
    pub(super) fn embedding(&mut self, title: &str, table: &[usize], place: usize) -> Result<Known, String> {
        let [rows, features] = *table else { return Err("the table of a look-up has rows and features".into()) };
        if !self.tokens {
            return Err("a look-up needs whole numbers, and the graph's input has others".into());
        }
        self.vocabulary = self.vocabulary.max(rows);
        self.layer(title, NetworkOperation::Embedding { rows, features }, &[place])
    }

    /// The place of the graph's tokens. `None` if it reads something else.
    pub(super) fn tokens(&self) -> Option<Known> {
        self.tokens.then(|| Known::Layer { place: 0, shape: self.shapes[0].clone(), merged: false })
    }

    /// The network of all layers that the first output needs, without the softmax that the loss
    /// has.
    pub(super) fn finish(mut self, graph: &GraphMessage) -> Result<(Network, Vec<String>), OnnxError> {
        let not_onnx = |reason: String| OnnxError::NotOnnx { reason };
        let output = graph.outputs.first().ok_or_else(|| not_onnx("the graph has no output".into()))?;
        let Some(Known::Layer { mut place, .. }) = self.known.get(&output.name).cloned() else {
            return Err(not_onnx(format!("output `{}` does not depend on the input", output.name)));
        };
        if graph.outputs.len() > 1 {
            self.note("only the first output of the graph is planned");
        }
        while let Some(layer) = place.checked_sub(1).and_then(|index| self.layers.get(index))
            && layer.operation == NetworkOperation::Softmax
        {
            place = layer.reads[0];
            self.note("the last softmax is that of the loss");
        }
        if place == 0 {
            return Err(not_onnx("the graph has no layers".into()));
        }
        let mut is_needed = vec![false; place + 1];
        is_needed[place] = true;
        for index in (1..=place).rev() {
            if is_needed[index] {
                self.layers[index - 1].reads.iter().for_each(|&read| is_needed[read] = true);
            }
        }
        let mut new_places = vec![0; place + 1];
        let mut layers = Vec::new();
        for (index, layer) in self.layers.into_iter().enumerate().take(place).filter(|(index, _)| is_needed[index + 1]) {
            let reads = layer.reads.iter().map(|&read| new_places[read]).collect();
            layers.push(NetworkLayer { reads, ..layer });
            new_places[index + 1] = layers.len();
        }
        let input = match (self.tokens, self.shapes[0].as_slice()) {
            (true, &[sequence]) => NetworkInput::Tokens { sequence, vocabulary: self.vocabulary },
            (false, &[channels, height, width]) => NetworkInput::Image { channels, height, width },
            (false, &[width]) => NetworkInput::Features { width },
            (_, shape) => {
                let reason = format!("has samples of the shape {shape:?}");
                let hint = "a sample is an image [channels, rows, columns], a vector, or a sequence of tokens";
                return Err(OnnxError::Input {
                    name: graph.inputs.first().map_or_else(String::new, |one| one.name.clone()),
                    reason,
                    hint,
                });
            }
        };
        Ok((Network { input, layers }, self.notes.into_iter().collect()))
    }
}

/// Sentences on weights that several nodes read.
fn shared_weights(graph: &GraphMessage, known: &BTreeMap<String, Known>) -> Vec<String> {
    let mut readers: BTreeMap<&str, usize> = BTreeMap::new();
    for name in
        graph.nodes.iter().flat_map(|node| &node.inputs).filter(|name| matches!(known.get(*name), Some(Known::Weight { .. })))
    {
        *readers.entry(name).or_default() += 1;
    }
    let shared = readers.into_iter().filter(|&(_, count)| count > 1);
    shared
        .map(|(name, count)| format!("weight `{name}` is shared by {count} nodes, and each is planned with one of its own"))
        .collect()
}

/// The shape of one sample of an input, the batch if it is stated, and whether its elements are
/// whole numbers.
fn sample(input: &ValueInfo) -> Result<(Vec<usize>, Option<i64>, bool), OnnxError> {
    let wrong = |reason: String| OnnxError::Input {
        name: input.name.clone(),
        reason,
        hint: "export the graph with fixed sizes but for the batch, which comes first",
    };
    let tensor = input.kind.as_ref().and_then(|kind| kind.tensor.as_ref());
    let tensor = tensor.ok_or_else(|| wrong("is no tensor".into()))?;
    let dims = tensor.shape.as_ref().map_or(&[][..], |shape| &shape.dims);
    let Some((batch, rest)) = dims.split_first() else { return Err(wrong("has no dimensions".into())) };
    let extent = |one: &super::messages::DimensionMessage| match one.value.and_then(|value| usize::try_from(value).ok()) {
        Some(extent) if (1..=MOST).contains(&extent) => Ok(extent),
        _ => Err(wrong(format!("has a dimension `{}` of no fixed size", one.name.as_deref().unwrap_or("?")))),
    };
    let shape = rest.iter().map(extent).collect::<Result<_, _>>()?;
    let is_whole = matches!(tensor.data_type, INT32 | INT64 | BOOL);
    Ok((shape, batch.value.filter(|&batch| batch > 0), is_whole))
}
