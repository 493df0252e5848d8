//! A network under construction: what is known of each value of the trace, and the layers so far.

use super::blocks::Blocks;
use super::document::{Document, TracedOperator, TracedValue};
use super::losses;
use super::notes::Notes;
use super::values::{Known, Sample, elements, sample, storage};
use super::{TorchError, notes};
use crate::families::{Network, NetworkInput, NetworkLayer, NetworkOperation, NetworkStorage, NetworkWork};
use crate::kernel::MOST_PLANNED_READS;
use std::collections::{BTreeMap, BTreeSet};

/// The vocabulary of integer inputs that no table looks up.
const CLASSES: usize = 1000;

/// Why an operator has no layer.
pub(super) struct Problem {
    pub(super) reason: String,
    pub(super) hint: &'static str,
}

/// Makes the problem of an operator that mixes samples.
pub(super) fn problem(reason: impl Into<String>) -> Problem {
    Problem { reason: reason.into(), hint: "each sample is to be computed alone, but for the mean over the batch in the loss" }
}

/// A network under construction.
pub(super) struct Translator<'a> {
    pub(super) known: Vec<Known>,
    inputs: Vec<NetworkInput>,
    layers: Vec<NetworkLayer>,
    names: BTreeSet<String>,
    /// Views that were added already, by the value that they view and by their shape.
    views: BTreeMap<(usize, Vec<usize>), usize>,
    sequence: f64,
    /// The number format of most products.
    base: &'a str,
    blocks: Blocks<'a>,
    /// The values between the samples and the loss.
    pub(super) loss: losses::LossTerms,
    pub(super) notes: Notes,
}

impl<'a> Translator<'a> {
    pub(super) fn new(document: &'a Document, sequence: Option<usize>) -> Result<Self, TorchError> {
        let sequence = sequence.map_or(document.sizes.sequence.unwrap_or(0) as f64, |length| length as f64);
        let base = notes::base_format(document);
        let shape = |value: &TracedValue, what: &str, number: usize| {
            sample(value, sequence).map_err(|reason| TorchError::Shape {
                place: format!("{what} {number}"),
                reason,
                hint: "give a sequence for which every dimension is a whole number, such as a multiple of the traced one",
            })
        };
        let mut translator = Self {
            known: Vec::new(),
            inputs: Vec::new(),
            layers: Vec::new(),
            names: BTreeSet::new(),
            views: BTreeMap::new(),
            sequence,
            base,
            blocks: Blocks::new(document),
            loss: losses::LossTerms::new(document),
            notes: Notes::default(),
        };
        for (number, value) in document.inputs.iter().enumerate() {
            let Sample { shape, .. } = shape(value, "input", number)?;
            let is_integer = storage(&value.dtype, base) == NetworkStorage::Integer;
            let shape = if shape.is_empty() { vec![1] } else { shape };
            translator.inputs.push(NetworkInput { shape, vocabulary: is_integer.then_some(CLASSES) });
        }
        // A network needs an input, even if the step creates its own.
        if translator.inputs.is_empty() {
            translator.inputs.push(NetworkInput { shape: vec![1], vocabulary: None });
        }
        for parameter in &document.parameters {
            let shape: Option<Vec<usize>> = parameter.shape.iter().map(|&extent| usize::try_from(extent).ok()).collect();
            let shape = shape.filter(|shape| shape.iter().all(|&extent| extent <= 1 << 40)).ok_or_else(|| TorchError::Shape {
                place: format!("parameter `{}`", parameter.name),
                reason: "its shape is too large".into(),
                hint: "a parameter has fewer than 2^40 elements",
            })?;
            let shape = if shape.is_empty() { vec![1] } else { shape };
            let place = translator.push(&parameter.name, NetworkOperation::Parameter, Vec::new(), shape.clone(), true, "");
            translator.known.push(Known::Layer { place, shape, shared: true, transposed: false });
        }
        for (number, value) in document.inputs.iter().enumerate() {
            let Sample { shape, shared, .. } = shape(value, "input", number)?;
            translator.known.push(Known::Layer { place: number, shape, shared, transposed: false });
        }
        for (number, value) in document.constants.iter().enumerate() {
            let Sample { shape, .. } = shape(value, "constant", number)?;
            translator.known.push(Known::Constant { shape });
        }
        Ok(translator)
    }

    /// The shape of one sample of an operator's result.
    pub(super) fn sample(&self, value: &TracedValue) -> Result<Sample, Problem> {
        sample(value, self.sequence).map_err(problem)
    }

    /// The values that an operator reads.
    pub(super) fn reads(&self, operator: &TracedOperator) -> Result<Vec<Known>, Problem> {
        let read = |&number: &usize| {
            let known = self.known.get(number).cloned();
            known.ok_or_else(|| problem(format!("it reads value {number}, which no earlier operator makes")))
        };
        operator.reads.iter().map(read).collect()
    }

    /// Translates an operator.
    ///
    /// # Errors
    /// The reason why the operator cannot be expressed.
    pub(super) fn operator(&mut self, operator: &TracedOperator) -> Result<(), Problem> {
        let first = self.known.len();
        let results = operator.results.iter().map(|value| self.sample(value)).collect::<Result<Vec<_>, _>>()?;
        let reads = self.reads(operator)?;
        if self.loss.is_behind(first) {
            self.known.extend(results.into_iter().map(|result| Known::Constant { shape: result.shape }));
            return Ok(());
        }
        if self.loss.is_term(first) {
            self.loss_term(operator, &reads)?;
            self.known.extend(results.into_iter().map(|result| Known::Constant { shape: result.shape }));
            return Ok(());
        }
        self.blocks.enter(operator);
        let made = self.translate(operator, &reads, &results)?;
        self.known.extend(made);
        Ok(())
    }

    /// Adds the loss over the operand that an operator averages over the batch.
    fn loss_term(&mut self, operator: &TracedOperator, reads: &[Known]) -> Result<(), Problem> {
        let is_float = |place: usize| !self.is_integer(place);
        let layers = reads.iter().filter(|known| matches!(known, Known::Layer { shared: false, place, .. } if is_float(*place)));
        let largest = layers.max_by_key(|known| known.elements()).cloned();
        let Some(known) = largest else { return Err(problem("it makes a loss of no result")) };
        self.blocks.enter(operator);
        let place = self.shaped(&known)?;
        // A single number for each sample still needs a dimension.
        let place = if known.shape().is_empty() {
            self.push("loss.shape", NetworkOperation::View, vec![place], vec![1], false, "")
        } else {
            place
        };
        let shape = self.shape_of(place).to_vec();
        self.push("loss", NetworkOperation::Loss, vec![place], shape, false, "");
        Ok(())
    }

    /// Whether a value consists of integers.
    pub(super) fn is_integer(&self, place: usize) -> bool {
        match place.checked_sub(self.inputs.len()) {
            None => self.inputs[place].vocabulary.is_some(),
            Some(layer) => self.layers[layer].storage == NetworkStorage::Integer,
        }
    }

    /// Whether the value with this index is a parameter.
    pub(super) fn is_parameter(&self, place: usize) -> bool {
        place.checked_sub(self.inputs.len()).is_some_and(|layer| self.layers[layer].operation == NetworkOperation::Parameter)
    }

    /// The shape of the value with this index.
    pub(super) fn shape_of(&self, place: usize) -> &[usize] {
        match place.checked_sub(self.inputs.len()) {
            None => &self.inputs[place].shape,
            Some(layer) => &self.layers[layer].shape,
        }
    }

    /// The index of a value in the shape in which the trace has it. Adds a view if the network has
    /// it in another shape.
    pub(super) fn shaped(&mut self, known: &Known) -> Result<usize, Problem> {
        let Known::Layer { place, shape, shared, transposed } = known else {
            return Err(problem("an operand depends on no parameter and no input"));
        };
        // Parameters are read in their own shape.
        if *shared || (self.shape_of(*place) == shape && !transposed) {
            return Ok(*place);
        }
        let key = (*place, shape.clone());
        if let Some(&view) = self.views.get(&key) {
            return Ok(view);
        }
        let storage = if self.is_integer(*place) { "i64" } else { "" };
        let is_same = elements(self.shape_of(*place)) == elements(shape);
        let operation =
            if is_same { NetworkOperation::View } else { NetworkOperation::Work { kind: NetworkWork::Move, steps: 0 } };
        let view = self.push("view", operation, vec![*place], shape.clone(), *shared, storage);
        self.views.insert(key, view);
        Ok(view)
    }

    /// Sets an input's vocabulary to the rows of the table that it is looked up in.
    pub(super) fn look_up(&mut self, place: usize, rows: usize) {
        let mut place = place;
        while let Some(layer) = place.checked_sub(self.inputs.len()) {
            match self.layers[layer].reads.first() {
                Some(&read) => place = read,
                None => return,
            }
        }
        let vocabulary = &mut self.inputs[place].vocabulary;
        *vocabulary = vocabulary.map(|own| if own == CLASSES { rows.clamp(1, 1 << 24) } else { own });
    }

    /// Adds work on operands in their own shapes. Work on more than three operands is added in
    /// steps.
    pub(super) fn work(
        &mut self,
        operator: &TracedOperator,
        kind: NetworkWork,
        reads: &[usize],
        result: &Sample,
        dtype: &str,
    ) -> Known {
        let mut reads = reads.to_vec();
        let is_shared = |translator: &Self, reads: &[usize]| reads.iter().all(|&read| translator.is_shared(read));
        while reads.len() > MOST_PLANNED_READS {
            let (first, rest) = reads.split_at(MOST_PLANNED_READS);
            let joined: usize = first.iter().map(|&read| elements(self.shape_of(read))).fold(0, usize::saturating_add);
            let joined = if kind == NetworkWork::Move {
                joined.min(elements(&result.shape).max(1))
            } else {
                elements(&result.shape).max(1)
            };
            let shared = is_shared(self, first);
            let rest = rest.to_vec();
            let operation = NetworkOperation::Work { kind, steps: 0 };
            let part = self.push(&self.title(operator), operation, first.to_vec(), vec![joined], shared, dtype);
            reads = [vec![part], rest].concat();
        }
        let shared = is_shared(self, &reads);
        let operation = NetworkOperation::Work { kind, steps: 0 };
        let place = self.push(&self.title(operator), operation, reads, shape_or_one(&result.shape), shared, dtype);
        Known::Layer { place, shape: result.shape.clone(), shared, transposed: false }
    }

    /// Whether all samples share the value with this index.
    pub(super) fn is_shared(&self, place: usize) -> bool {
        place.checked_sub(self.inputs.len()).is_some_and(|layer| self.layers[layer].shared)
    }

    /// The name of an operator's layer.
    pub(super) fn title(&self, operator: &TracedOperator) -> String {
        match operator.module.as_str() {
            "" => operator.short().into(),
            module => format!("{module}.{}", operator.short()),
        }
    }

    /// Adds a layer, and returns the index of its value. `dtype` is the number format of the
    /// result.
    pub(super) fn push(
        &mut self,
        title: &str,
        operation: NetworkOperation,
        reads: Vec<usize>,
        shape: Vec<usize>,
        shared: bool,
        dtype: &str,
    ) -> usize {
        let mut name = title.to_string();
        let mut number = 1;
        while !self.names.insert(name.clone()) {
            number += 1;
            name = format!("{title}.{number}");
        }
        let is_usual = matches!(operation, NetworkOperation::Work { .. } | NetworkOperation::View | NetworkOperation::Slice);
        let storage = if is_usual { storage(dtype, self.base) } else { NetworkStorage::Precision };
        let block = self.blocks.begin();
        self.layers.push(NetworkLayer { name, reads, operation, shape, shared, storage, block });
        self.inputs.len() + self.layers.len() - 1
    }

    /// The network, and notes on how it differs from the traced step.
    pub(super) fn finish(mut self, document: &Document) -> Result<(Network, Vec<String>), TorchError> {
        if !self.layers.iter().any(|layer| layer.operation == NetworkOperation::Loss) {
            return Err(TorchError::Loss { reason: "is no mean or sum over results of the network".into() });
        }
        let kept = reachable(&self.layers, self.inputs.len());
        let unread: usize = self
            .layers
            .iter()
            .zip(&kept)
            .filter(|(layer, kept)| !**kept && layer.operation == NetworkOperation::Parameter)
            .count();
        self.notes.unread_parameters(unread);
        let layers = renumbered(std::mem::take(&mut self.layers), &kept, self.inputs.len());
        let network = Network { inputs: self.inputs, optimizer: notes::optimizer(document, &mut self.notes), layers };
        let notes = self.notes.finish(document, &network);
        Ok((network, notes))
    }
}

fn shape_or_one(shape: &[usize]) -> Vec<usize> {
    if shape.is_empty() { vec![1] } else { shape.to_vec() }
}

/// Whether a loss depends on each layer. All parameters are kept.
fn reachable(layers: &[NetworkLayer], inputs: usize) -> Vec<bool> {
    let mut kept: Vec<bool> = layers.iter().map(|layer| layer.operation == NetworkOperation::Loss).collect();
    for index in (0..layers.len()).rev() {
        if kept[index] {
            layers[index].reads.iter().filter_map(|read| read.checked_sub(inputs)).for_each(|read| kept[read] = true);
        }
    }
    kept
}

/// The layers that are kept, with the indices that they read renumbered. A block begins with the
/// first of its layers that is kept.
fn renumbered(layers: Vec<NetworkLayer>, kept: &[bool], inputs: usize) -> Vec<NetworkLayer> {
    let mut numbers = vec![0; layers.len()];
    let mut left: Vec<NetworkLayer> = Vec::new();
    let mut block = None;
    for (index, mut layer) in layers.into_iter().enumerate() {
        block = layer.block.take().or(block);
        let is_parameter = layer.operation == NetworkOperation::Parameter;
        if !kept[index] && !is_parameter {
            continue;
        }
        numbers[index] = inputs + left.len();
        layer.reads.iter_mut().for_each(|read| {
            if let Some(place) = read.checked_sub(inputs) {
                *read = numbers[place];
            }
        });
        if !is_parameter {
            layer.block = block.take();
        }
        left.push(layer);
    }
    left
}
