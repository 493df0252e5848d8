//! Recomputation: the forward operators of each block that the backward pass runs again, and the
//! tensors that are dropped until then.

use crate::compile::lowering::Lowering;
use crate::plan::Recompute;
use crate::strategy::is_product;
use foretell_models::{Operator, OperatorId, Pass, TensorId};

/// The operators that a stage recomputes, by block.
#[derive(Default)]
pub(super) struct Recomputation {
    /// The recomputed operators of each block of the model, in the graph's order.
    operators: Vec<Vec<OperatorId>>,
}

impl Recomputation {
    /// Finds the operators to recompute among a stage's `forward` operators: those whose outputs
    /// gradients of the same block read, and those that these operators read in turn.
    pub(super) fn new(lowering: &Lowering, forward: &[OperatorId], recompute: &Recompute) -> Self {
        if *recompute == Recompute::None {
            return Self::default();
        }
        let graph = &lowering.graph;
        let mut recomputed_blocks = forward.iter().map(|id| graph.operators[id.0].block).collect::<Vec<_>>();
        recomputed_blocks.dedup();
        recomputed_blocks.retain(|&block| graph.blocks[block].recomputable);
        if let Recompute::FullLayers(layers) = recompute {
            recomputed_blocks.truncate(*layers);
        }
        let is_kept = kept_operators(lowering, recompute);
        let is_needed = needed_operators(lowering, &is_kept);
        let mut operators = vec![Vec::new(); graph.blocks.len()];
        for &id in forward {
            let block = graph.operators[id.0].block;
            if is_needed[id.0] && recomputed_blocks.contains(&block) {
                operators[block].push(id);
            }
        }
        Self { operators }
    }

    /// The recomputed operators of a block, in the graph's order.
    pub(super) fn of_block(&self, block: usize) -> &[OperatorId] {
        self.operators.get(block).map_or(&[], Vec::as_slice)
    }

    /// Whether an operator is recomputed.
    pub(super) fn contains(&self, id: OperatorId) -> bool {
        self.operators.iter().any(|block| block.contains(&id))
    }

    /// The tensors of some blocks that are dropped after the forward pass and recomputed later.
    pub(super) fn forgotten_tensors(&self, lowering: &Lowering, is_of_pass: impl Fn(usize) -> bool) -> Vec<TensorId> {
        let blocks = self.operators.iter().enumerate().filter(|(block, _)| is_of_pass(*block));
        let made = blocks.flat_map(|(block, operators)| {
            let outputs = operators.iter().flat_map(|id| &lowering.graph.operators[id.0].outputs);
            outputs.map(move |output| (output.tensor, block))
        });
        made.filter(|&(tensor, block)| stays_in_block(lowering, tensor, block)).map(|(tensor, _)| tensor).collect()
    }

    /// Whether a tensor is dropped after its forward pass and recomputed later.
    pub(super) fn forgets(&self, lowering: &Lowering, tensor: TensorId) -> bool {
        let Some(producer) = lowering.producers[tensor.0] else { return false };
        let block = lowering.graph.operators[producer.0].block;
        self.of_block(block).contains(&producer) && stays_in_block(lowering, tensor, block)
    }
}

/// For each operator, whether its results are not kept and gradients of the same block, or
/// operators that run again for them, read them.
fn needed_operators(lowering: &Lowering, is_kept: &[bool]) -> Vec<bool> {
    let (graph, tiling) = (&lowering.graph, &lowering.tiling);
    let mut is_needed = vec![false; graph.operators.len()];
    loop {
        for (index, operator) in graph.operators.iter().enumerate().rev() {
            // A forward operator is not recomputed, and needs no inputs, if nothing reads its
            // results or they are kept.
            if operator.pass == Pass::Forward && !is_needed[index] {
                continue;
            }
            // Tiles of wide tensors are made again, from what is not wide.
            let again = tiling.again_for(OperatorId(index));
            let inputs = operator.inputs.iter().chain(again.iter().flat_map(|id| &graph.operators[id.0].inputs));
            for input in inputs {
                if let Some(producer) = lowering.producers[input.tensor.0]
                    && lowering.is_activation(input.tensor)
                    && graph.operators[producer.0].pass == Pass::Forward
                    && graph.operators[producer.0].block == operator.block
                    && !is_kept[producer.0]
                    && !again.contains(&producer)
                {
                    is_needed[producer.0] = true;
                }
            }
        }
        // The operators of a wave run together.
        let found: Vec<OperatorId> = tiling
            .forward_waves(graph)
            .filter(|wave| wave.iter().any(|id| is_needed[id.0]))
            .flatten()
            .copied()
            .filter(|id| !is_needed[id.0])
            .collect();
        if found.is_empty() {
            return is_needed;
        }
        found.iter().for_each(|id| is_needed[id.0] = true);
    }
}

/// Whether no other block reads a block's tensor in the forward pass.
fn stays_in_block(lowering: &Lowering, tensor: TensorId, block: usize) -> bool {
    let operators = &lowering.graph.operators;
    let leaves = |id: &OperatorId| operators[id.0].pass == Pass::Forward && operators[id.0].block != block;
    !lowering.consumers[tensor.0].iter().any(leaves)
}

/// For each operator, whether its results are kept although its block is recomputed.
fn kept_operators(lowering: &Lowering, recompute: &Recompute) -> Vec<bool> {
    let graph = &lowering.graph;
    let kept = match recompute {
        Recompute::Selective => return graph.operators.iter().map(|operator| !operator.is_attention()).collect(),
        Recompute::AllBut(kept) => *kept,
        Recompute::None | Recompute::Full | Recompute::FullLayers(_) | Recompute::FullLayersOfStages(_) => {
            return vec![false; graph.operators.len()];
        }
    };
    let is_summed = |operator: &Operator| {
        let mut outputs = operator.outputs.iter();
        outputs.any(|output| lowering.sharding.produced(output.tensor).is_partial())
    };
    // By block: the number of products so far, and whether its attention is still to come.
    let mut products = vec![0usize; graph.blocks.len()];
    let mut is_before_attention = vec![false; graph.blocks.len()];
    let forward = || graph.operators.iter().filter(|operator| operator.pass == Pass::Forward);
    forward().filter(|operator| operator.is_attention()).for_each(|operator| is_before_attention[operator.block] = true);
    let mut is_kept = |operator: &Operator| {
        if operator.pass != Pass::Forward {
            return false;
        }
        if operator.is_attention() {
            is_before_attention[operator.block] = false;
        }
        let is_product = is_product(operator);
        products[operator.block] += usize::from(is_product);
        let is_odd = products[operator.block] % 2 == 1;
        let keeps_product =
            kept.products || (kept.odd_products && is_odd) || (kept.projections && is_before_attention[operator.block]);
        (kept.attention && operator.is_attention()) || (is_product && keeps_product) || (kept.sums && is_summed(operator))
    };
    graph.operators.iter().map(&mut is_kept).collect()
}
