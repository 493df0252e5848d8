//! A network under construction: what is known of each tensor of the graph, and the layers so far.

use super::OnnxError;
use super::batch::BatchPlace;
use super::messages::{BOOL, DimensionMessage, GraphMessage, INT32, INT64, Node, TensorMessage, ValueInfo};
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
    token_batch: BatchPlace,
    vocabulary: usize,
    notes: BTreeSet<String>,
    /// Results of `Constant` nodes that are weights.
    weights: BTreeSet<String>,
}

impl Translator {
    /// `batch_axis`: the dimension of the batch in files that state all sizes.
    pub(super) fn new(graph: &GraphMessage, batch_axis: usize) -> Result<Self, OnnxError> {
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
        let first_sample = Sample::of(first, batch_axis)?;
        let tokens = first_sample.is_whole;
        let mut notes = BTreeSet::from(["initial weights are drawn, and not those of the file".to_string()]);
        let mut parts = vec![(&first.name, &first_sample)];
        let others = others
            .iter()
            .map(|other| Ok((&other.name, Sample::of(other, batch_axis)?)))
            .collect::<Result<Vec<_>, OnnxError>>()?;
        for (name, other) in &others {
            if !tokens && !other.is_whole && other.has_samples(&first_sample) {
                parts.push((*name, other));
                continue;
            }
            notes.insert(format!("input `{name}` counts as the same for every sample"));
            known.insert(name.to_string(), Known::Constant { shape: other.beside(&first_sample) });
        }
        if first_sample.axis > 0 {
            notes.insert(format!("dimension {} of input `{}` counts as the batch", first_sample.axis + 1, first.name));
        }
        notes.extend(shared_weights(graph, &known));
        let mut translator = Self {
            known,
            layers: Vec::new(),
            shapes: Vec::new(),
            names: BTreeSet::new(),
            batch: first_sample.stated,
            tokens,
            token_batch: BatchPlace { axis: first_sample.axis, ..BatchPlace::FIRST },
            vocabulary: 1,
            notes,
            weights: constant_weights(graph),
        };
        translator.read(&parts).map_err(|reason| OnnxError::Input {
            name: first.name.clone(),
            reason,
            hint: "a sample has at most 16,777,216 numbers",
        })?;
        Ok(translator)
    }

    /// Makes the graph's inputs known. A single input that is neither tokens, an image nor a vector
    /// becomes a vector that is reshaped; several inputs become parts of one vector.
    fn read(&mut self, parts: &[(&String, &Sample)]) -> Result<(), String> {
        if let [(name, sample)] = parts
            && (self.tokens || matches!(sample.shape.len(), 1 | 3))
        {
            self.shapes.push(sample.shape.clone());
            self.known.insert(name.to_string(), Known::Layer { place: 0, shape: sample.shape.clone(), batch: sample.place() });
            return Ok(());
        }
        let size = |shape: &[usize]| shape.iter().try_fold(1usize, |product, &extent| product.checked_mul(extent));
        let width = parts.iter().try_fold(0usize, |sum, (_, sample)| sum.checked_add(size(&sample.shape)?));
        self.shapes.push(vec![width.filter(|&width| width <= MOST).ok_or("has samples of too many numbers")?]);
        for (name, sample) in parts {
            let shape = sample.shape.clone();
            let operation = match parts.len() {
                1 => NetworkOperation::Reshape { shape },
                _ => NetworkOperation::Take { shape },
            };
            let part = self.layer(name, operation, &[0], sample.place())?;
            self.known.insert(name.to_string(), part);
        }
        if parts.len() > 1 {
            let names = parts.iter().map(|(name, _)| format!("`{name}`")).collect::<Vec<_>>().join(", ");
            self.note(&format!("inputs {names} are parts of one sample"));
        }
        Ok(())
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

    /// Whether a `Constant` node holds a weight.
    pub(super) fn is_weight(&self, node: &Node) -> bool {
        node.outputs.first().is_some_and(|output| self.weights.contains(output))
    }

    pub(super) fn note(&mut self, note: &str) {
        self.notes.insert(note.into());
    }

    /// Adds a layer, and returns its result. `batch`: where the graph has the batch in it.
    pub(super) fn layer(
        &mut self,
        title: &str,
        operation: NetworkOperation,
        reads: &[usize],
        batch: BatchPlace,
    ) -> Result<Known, String> {
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
                return Ok(Known::Layer { place: reads[0], shape, batch });
            }
            let place = self.push(title, operation, reads, shape.clone());
            return Ok(Known::Layer { place, shape, batch });
        }
        let place = self.push(title, operation, reads.to_vec(), shape.clone());
        Ok(Known::Layer { place, shape, batch })
    }

    fn push(&mut self, title: &str, operation: NetworkOperation, reads: Vec<usize>, shape: Vec<usize>) -> usize {
        let title = if title.is_empty() { "layer" } else { title.trim_start_matches('/') };
        let mut name = title.to_string();
        let mut number = 1;
        while !self.names.insert(name.clone()) {
            number += 1;
            name = format!("{title}.{number}");
        }
        self.layers.push(NetworkLayer { name, reads, operation });
        self.shapes.push(shape);
        self.layers.len()
    }

    /// Adds a look-up in a table of the result of a layer, which must be tokens.
    pub(super) fn embedding(&mut self, title: &str, table: &[usize], place: usize, batch: BatchPlace) -> Result<Known, String> {
        let [rows, features] = *table else { return Err("the table of a look-up has rows and features".into()) };
        if !self.tokens {
            return Err("a look-up needs whole numbers, and the graph's input has others".into());
        }
        self.vocabulary = self.vocabulary.max(rows);
        self.layer(title, NetworkOperation::Embedding { rows, features }, &[place], batch)
    }

    /// The place of the graph's tokens. `None` if it reads something else.
    pub(super) fn tokens(&self) -> Option<Known> {
        self.tokens.then(|| Known::Layer { place: 0, shape: self.shapes[0].clone(), batch: self.token_batch })
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

/// Results of `Constant` nodes that are weights. Some exporters (Paddle's) write all weights so:
/// then no weight is an initializer, and every constant counts. Otherwise a constant is a weight
/// where an operator takes one.
fn constant_weights(graph: &GraphMessage) -> BTreeSet<String> {
    let is_float =
        |tensor: &TensorMessage| !tensor.is_whole() && tensor.shape().is_some_and(|shape| shape.iter().any(|&extent| extent > 1));
    let constants = graph.nodes.iter().filter(|node| node.operator == "Constant");
    let of_floats = constants.filter(|node| node.tensor("value").is_some_and(is_float));
    let mut names: BTreeSet<String> = of_floats.filter_map(|node| node.outputs.first().cloned()).collect();
    if graph.initializers.iter().any(is_float) {
        let takes = |node: &&Node| TAKE_WEIGHTS.contains(&node.operator.as_str());
        let taken: BTreeSet<&String> = graph.nodes.iter().filter(takes).flat_map(|node| node.inputs.iter().skip(1)).collect();
        names.retain(|name| taken.contains(name));
    }
    names
}

/// Operators whose inputs from the second on are weights.
const TAKE_WEIGHTS: [&str; 7] =
    ["BatchNormalization", "Conv", "ConvTranspose", "Gemm", "InstanceNormalization", "LayerNormalization", "MatMul"];

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

/// One sample of an input.
struct Sample {
    shape: Vec<usize>,
    /// The dimension of the batch: the first without a fixed size, else `batch_axis`.
    axis: usize,
    /// The batch, if it is stated.
    stated: Option<i64>,
    is_whole: bool,
}

impl Sample {
    fn of(input: &ValueInfo, batch_axis: usize) -> Result<Self, OnnxError> {
        let wrong = |reason: String| OnnxError::Input {
            name: input.name.clone(),
            reason,
            hint: "export the graph with fixed sizes but for the batch",
        };
        let tensor = input.kind.as_ref().and_then(|kind| kind.tensor.as_ref());
        let tensor = tensor.ok_or_else(|| wrong("is no tensor".into()))?;
        let dims = tensor.shape.as_ref().map_or(&[][..], |shape| &shape.dims);
        let fixed = |one: &DimensionMessage| one.value.filter(|&value| value > 0);
        let usual = batch_axis.min(dims.len().saturating_sub(1));
        let axis = dims.iter().position(|one| fixed(one).is_none()).unwrap_or(usual);
        let batch = dims.get(axis).ok_or_else(|| wrong("has no dimensions".into()))?;
        let extent = |one: &DimensionMessage| match one.value.and_then(|value| usize::try_from(value).ok()) {
            Some(extent) if (1..=MOST).contains(&extent) => Ok(extent),
            _ => Err(wrong(format!("has a dimension `{}` of no fixed size", one.name.as_deref().unwrap_or("?")))),
        };
        let rest = dims.iter().enumerate().filter(|&(index, _)| index != axis);
        let shape = rest.map(|(_, one)| extent(one)).collect::<Result<_, _>>()?;
        Ok(Self { shape, axis, stated: fixed(batch), is_whole: matches!(tensor.data_type, INT32 | INT64 | BOOL) })
    }

    fn place(&self) -> BatchPlace {
        BatchPlace { axis: self.axis, ..BatchPlace::FIRST }
    }

    /// Whether it has the batch of the first input.
    fn has_samples(&self, first: &Self) -> bool {
        self.stated == first.stated
    }

    /// Its extents, with 1 for the batch if it has that of the first input.
    fn beside(&self, first: &Self) -> Vec<usize> {
        let batch =
            if self.has_samples(first) { 1 } else { self.stated.and_then(|batch| usize::try_from(batch).ok()).unwrap_or(1) };
        let mut shape = self.shape.clone();
        shape.insert(self.axis.min(shape.len()), batch);
        shape
    }
}
