//! Blocks of a graph: which of them are equal, and the same model with fewer of them.
//!
//! Two blocks are equal if they have the same operators on tensors of the same shapes. So a planner
//! finds the pattern of a model's layers in its graph, whatever the family: dense layers before
//! mixtures, windows alternating with full attention, an encoder before a decoder. It must not know
//! families or plans.

use super::{Block, Dimension, Graph, Loop, LoopId, Operand, Operator, Role, Tensor, TensorId};
use crate::attention::Attention;
use crate::dropout::{AttentionDropout, Dropout};
use crate::kernel::Kernel;
use crate::storage::Storage;
use std::collections::BTreeMap;
use std::mem::{Discriminant, discriminant};

/// The features of a block by which blocks are compared: no names and no values.
#[derive(PartialEq)]
struct BlockShape<'a> {
    recomputable: bool,
    operators: Vec<(Kernel, &'a [Loop], Vec<OperandShape<'a>>)>,
}

/// A tensor that an operator reads or writes, without its name.
#[derive(PartialEq)]
struct OperandShape<'a> {
    axes: &'a [Option<LoopId>],
    dimensions: &'a [Dimension],
    storage: Storage,
    purpose: Discriminant<Role>,
    /// Number of the tensor within the block, by first appearance.
    index: usize,
    /// Whether the block makes it.
    is_made_here: bool,
    is_frozen: bool,
}

impl Graph {
    /// Returns a number for each block. Two blocks are equal if they have the same number. Numbers
    /// count up from 0 by first appearance.
    ///
    /// Equal blocks have the same operators in the same order on tensors of the same shapes and
    /// purposes. Names and initial values do not matter; whether a parameter of that name is frozen
    /// does.
    pub fn kinds_of_blocks(&self, is_frozen: impl Fn(&str) -> bool) -> Vec<usize> {
        let mut different: Vec<BlockShape<'_>> = Vec::new();
        let shapes = (0..self.blocks.len()).map(|block| self.shape_of_block(block, &is_frozen));
        let kind = |shape| {
            different.iter().position(|other| *other == shape).unwrap_or_else(|| {
                different.push(shape);
                different.len() - 1
            })
        };
        shapes.map(kind).collect()
    }

    /// Returns `true` if a graph differs from another in names and initial values alone. Whether
    /// parameters of their names are frozen matters.
    pub fn is_like(&self, other: &Self, is_frozen: impl Fn(&str) -> bool) -> bool {
        let has_frozen = |tensor: &Tensor| matches!(tensor.role, Role::Parameter(_)) && is_frozen(&tensor.name);
        let tensor = |(left, right): (&Tensor, &Tensor)| {
            let purposes = [left, right].map(|tensor| (discriminant(&tensor.role), has_frozen(tensor)));
            left.dimensions == right.dimensions && left.storage == right.storage && purposes[0] == purposes[1]
        };
        let operator = |(left, right): (&Operator, &Operator)| {
            let kinds = [left, right].map(|operator| (without_site(operator.kind), operator.block));
            kinds[0] == kinds[1] && left.loops == right.loops && left.inputs == right.inputs && left.outputs == right.outputs
        };
        let recomputable = |graph: &Self| graph.blocks.iter().map(|block| block.recomputable).collect::<Vec<_>>();
        recomputable(self) == recomputable(other)
            && self.tensors.len() == other.tensors.len()
            && self.operators.len() == other.operators.len()
            && self.tensors.iter().zip(&other.tensors).all(tensor)
            && self.operators.iter().zip(&other.operators).all(operator)
    }

    fn shape_of_block(&self, block: usize, is_frozen: &impl Fn(&str) -> bool) -> BlockShape<'_> {
        // The tensors of the block, each with whether the block makes it.
        let mut seen: Vec<(TensorId, bool)> = Vec::new();
        let mut shape = |operand: &'_ Operand, is_output: bool| {
            let index = seen.iter().position(|(id, _)| *id == operand.tensor).unwrap_or_else(|| {
                seen.push((operand.tensor, is_output));
                seen.len() - 1
            });
            let tensor = self.tensor(operand.tensor);
            let is_parameter = matches!(tensor.role, Role::Parameter(_));
            (tensor, index, seen[index].1, is_parameter && is_frozen(&tensor.name))
        };
        let mut operators = Vec::new();
        for operator in self.operators.iter().filter(|operator| operator.block == block) {
            let operands = operator.inputs.iter().map(|operand| (operand, false));
            let operands = operands.chain(operator.outputs.iter().map(|operand| (operand, true)));
            let operands = operands.map(|(operand, is_output)| {
                let (tensor, index, is_made_here, is_frozen) = shape(operand, is_output);
                let Tensor { role, dimensions, storage, .. } = tensor;
                let (axes, purpose) = (&operand.axes[..], discriminant(role));
                OperandShape { axes, dimensions, storage: *storage, purpose, index, is_made_here, is_frozen }
            });
            operators.push((without_site(operator.kind), &operator.loops[..], operands.collect()));
        }
        BlockShape { recomputable: self.blocks[block].recomputable, operators }
    }

    /// Returns the graph with only some of its blocks; `kept` has their indices in increasing
    /// order. A tensor that a kept block reads from omitted blocks is replaced by one that the
    /// omitted blocks read.
    ///
    /// Returns `None` if the replacement is not clear. Consecutive omitted blocks may pass on a
    /// single tensor only, and must read exactly one tensor of the same shape that no later block
    /// reads. A graph with running statistics has no clear replacement either, since no operator
    /// names them.
    pub fn with_blocks(&self, kept: &[usize]) -> Option<Self> {
        if self.tensors.iter().any(|tensor| tensor.role == Role::Running) {
            return None;
        }
        let uses = Uses::of(self);
        // The replacement of each tensor that omitted blocks pass on.
        let mut stand_ins: BTreeMap<TensorId, TensorId> = BTreeMap::new();
        let mut start = 0;
        for end in kept.iter().copied().chain([self.blocks.len()]) {
            if let Some((passed, read)) = self.passed_through(start, end, &uses)? {
                stand_ins.insert(passed, stand_ins.get(&read).copied().unwrap_or(read));
            }
            start = end + 1;
        }
        let operators = self.operators.iter().filter_map(|operator| {
            let mut operator = Operator { block: kept.binary_search(&operator.block).ok()?, ..operator.clone() };
            for operand in &mut operator.inputs {
                operand.tensor = stand_ins.get(&operand.tensor).copied().unwrap_or(operand.tensor);
            }
            Some(operator)
        });
        let blocks = kept.iter().map(|&block| self.blocks[block].clone()).collect();
        Some(self.with_operators(operators.collect(), blocks))
    }

    /// Returns the tensor that the blocks `start..end` pass on to later ones, and the tensor that
    /// replaces it. The inner `None` means that they pass on nothing; the outer one, that they pass
    /// on more than one tensor or that the replacement is not clear.
    #[allow(clippy::option_option, reason = "nothing to pass on is not the same as no answer")]
    fn passed_through(&self, start: usize, end: usize, uses: &Uses) -> Option<Option<(TensorId, TensorId)>> {
        let inside = || self.operators.iter().filter(|operator| (start..end).contains(&operator.block));
        let is_read_later = |id: TensorId| uses.last_read[id.0] >= Some(end);
        let mut passed = inside().flat_map(outputs).filter(|&id| is_read_later(id));
        let Some(first) = passed.next() else { return Some(None) };
        if passed.next().is_some() {
            return None;
        }
        let shape = |id: TensorId| (&self.tensor(id).dimensions, self.tensor(id).storage);
        let is_passed_in = |id: &TensorId| {
            let is_made_before = uses.maker[id.0].is_some_and(|block| block < start);
            is_made_before && self.tensor(*id).role == Role::Activation && shape(*id) == shape(first) && !is_read_later(*id)
        };
        let mut read: Vec<TensorId> = inside().flat_map(inputs).filter(is_passed_in).collect();
        read.sort_unstable();
        read.dedup();
        match read[..] {
            [read] => Some(Some((first, read))),
            _ => None,
        }
    }

    /// Returns the graph with these operators and blocks, and the tensors that they use.
    fn with_operators(&self, mut operators: Vec<Operator>, blocks: Vec<Block>) -> Self {
        let mut used: Vec<TensorId> = operators.iter().flat_map(|operator| inputs(operator).chain(outputs(operator))).collect();
        used.extend(used.clone().iter().filter_map(|&id| match self.tensor(id).role {
            Role::OfParameter(parameter) => Some(parameter),
            _ => None,
        }));
        used.sort_unstable();
        used.dedup();
        let new = |id: TensorId| TensorId(used.binary_search(&id).expect("invariant: the tensor is in use"));
        let mut tensors: Vec<Tensor> = used.iter().map(|&id| self.tensor(id).clone()).collect();
        for tensor in &mut tensors {
            if let Role::OfParameter(parameter) = &mut tensor.role {
                *parameter = new(*parameter);
            }
        }
        for operator in &mut operators {
            operator.inputs.iter_mut().chain(&mut operator.outputs).for_each(|operand| operand.tensor = new(operand.tensor));
        }
        Self { name: self.name.clone(), tensors, operators, blocks, ..*self }
    }
}

/// Which blocks make and read each tensor.
struct Uses {
    /// By tensor, the block that makes it.
    maker: Vec<Option<usize>>,
    /// By tensor, the last block that reads it.
    last_read: Vec<Option<usize>>,
}

impl Uses {
    fn of(graph: &Graph) -> Self {
        let mut uses = Self { maker: vec![None; graph.tensors.len()], last_read: vec![None; graph.tensors.len()] };
        for operator in &graph.operators {
            let block = Some(operator.block);
            outputs(operator).for_each(|id| uses.maker[id.0] = block);
            inputs(operator).for_each(|id| uses.last_read[id.0] = uses.last_read[id.0].max(block));
        }
        uses
    }
}

fn inputs(operator: &Operator) -> impl Iterator<Item = TensorId> + '_ {
    operator.inputs.iter().map(|operand| operand.tensor)
}

fn outputs(operator: &Operator) -> impl Iterator<Item = TensorId> + '_ {
    operator.outputs.iter().map(|operand| operand.tensor)
}

/// Returns a kind as if its dropout were the model's first.
fn without_site(mut kind: Kernel) -> Kernel {
    match &mut kind {
        Kernel::Dropout(Dropout { site, .. })
        | Kernel::Attention(Attention { dropout: Some(AttentionDropout { site, .. }), .. })
        | Kernel::AttentionGradient(Attention { dropout: Some(AttentionDropout { site, .. }), .. }) => site.site = 0,
        _ => {}
    }
    kind
}

#[cfg(test)]
mod tests {
    use crate::families::{Decoder, SharedKeys};
    use crate::{GraphOptions, Model};

    fn graph(name: &str) -> crate::Graph {
        let model = Model::named(name).expect("in the zoo");
        model.graph(name, &GraphOptions::ONE).expect("its sizes are sound")
    }

    #[test]
    fn layers_of_a_plain_stack_are_equal() {
        let kinds = graph("llama3-8b").kinds_of_blocks(|_| false);
        assert_eq!(kinds, [vec![0], vec![1; 32], vec![2]].concat());
    }

    #[test]
    fn a_frozen_layer_equals_no_trained_one() {
        let kinds = graph("gpt2").kinds_of_blocks(|name| name.starts_with("transformer.h.3."));
        assert_eq!(kinds[1..6], [1, 1, 1, 2, 1]);
    }

    #[test]
    fn dense_layers_and_windows_are_kinds_of_their_own() {
        let kinds = graph("deepseek-v3").kinds_of_blocks(|_| false);
        assert_eq!(kinds, [vec![0], vec![1; 3], vec![2; 58], vec![3]].concat());
        let kinds = graph("gpt-oss-120b").kinds_of_blocks(|_| false);
        assert_eq!(kinds[..6], [0, 1, 2, 1, 2, 1]);
    }

    #[test]
    fn fewer_blocks_are_the_smaller_model() {
        for name in ["llama3-8b", "gpt2", "mixtral-8x7b", "bert-large-uncased", "vit_b_16"] {
            let model = Model::named(name).expect("in the zoo");
            let layers = model.layers().expect("it has layers");
            let small = model.with_layers(3).expect("it has layers");
            let small = small.graph(name, &GraphOptions::ONE).expect("its sizes are sound");
            let kept = [0, 1, layers - 1, layers, layers + 1];
            let cut = graph(name).with_blocks(&kept).expect("one tensor goes from layer to layer");
            assert_eq!(cut.parameter_count(), small.parameter_count(), "{name}");
            assert_eq!(cut.model_flops(), small.model_flops(), "{name}");
            assert!(cut.is_like(&small, |_| false), "{name}");
            assert!(!cut.is_like(&graph(name), |_| false), "{name}");
            // The cut graph has other numbers in the names of its last layers.
            let last = format!("{}.", layers - 1);
            assert!(!cut.is_like(&small, |parameter| parameter.contains(&last)), "{name}");
        }
    }

    #[test]
    fn an_encoder_and_a_decoder_lose_layers_each() {
        let whole = graph("flan-t5-base");
        let kinds = whole.kinds_of_blocks(|_| false);
        let last_of_runs: Vec<usize> = (2..kinds.len()).filter(|&block| kinds[block] == kinds[block - 1]).collect();
        let kept: Vec<usize> = (0..kinds.len()).filter(|block| !last_of_runs[..4].contains(block)).collect();
        let cut = whole.with_blocks(&kept).expect("one tensor goes from layer to layer");
        assert_eq!(cut.blocks.len(), whole.blocks.len() - 4);
        assert!(cut.parameter_count() < whole.parameter_count());
    }

    #[test]
    fn blocks_with_running_statistics_cannot_be_left_out() {
        assert!(graph("resnet50").with_blocks(&[0, 1, 2]).is_none());
    }

    #[test]
    fn a_layer_whose_keys_others_use_cannot_be_left_out() {
        let sizes = Decoder { shared_keys: Some(SharedKeys { layers: 2, ffn: None }), ..Decoder::llama([6, 64, 4, 128, 96, 32]) };
        let whole = Model::Decoder(sizes).graph("decoder", &GraphOptions::ONE).expect("its sizes are sound");
        // Layers 4 and 5 use the keys of layer 3, which is block 4.
        assert!(whole.with_blocks(&[0, 1, 2, 4, 5, 6, 7]).is_some());
        assert!(whole.with_blocks(&[0, 1, 2, 3, 5, 6, 7]).is_none());
    }
}
