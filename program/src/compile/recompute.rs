//! What is computed again in the backward pass: which operators, when their outputs are forgotten, and running them once more.

use super::emit::StageEmitter;
use crate::plan::Recompute;
use crate::program::Phase;
use crate::schedule::Task;
use crate::strategy::is_product;
use foretell_models::{Operator, OperatorId, Pass, TensorId};

impl StageEmitter<'_> {
    /// Runs the forward operators of a tensor's block again, as far as its backward pass needs them.
    pub(super) fn recompute(&mut self, tensor: TensorId, micro_batch: usize) {
        let Some(maker) = self.lowering.makers[tensor.0] else { return };
        let block = self.lowering.graph.operators[maker.0].block;
        for id in self.needed_again.get(block).cloned().unwrap_or_default() {
            let outputs = &self.lowering.graph.operators[id.0].outputs;
            let made = outputs.iter().filter(|output| self.lowering.is_activation(output.tensor)).all(|output| {
                let made = (output.tensor, micro_batch);
                self.live.contains_key(&made) || self.offloaded.contains_key(&made)
            });
            if !made {
                self.operator(id, micro_batch, Phase::Recompute);
            }
        }
    }

    /// Of each block that may be recomputed, the forward operators whose outputs gradients read, and those that these read.
    pub(super) fn find_needed_again(&self, recompute: &Recompute) -> Vec<Vec<OperatorId>> {
        let graph = &self.lowering.graph;
        let mut repeated = self.forward_operators().iter().map(|id| graph.operators[id.0].block).collect::<Vec<_>>();
        repeated.dedup();
        repeated.retain(|&block| graph.blocks[block].recomputable);
        if let Recompute::FullLayers(layers) = recompute {
            repeated.truncate(*layers);
        }
        let is_kept = self.kept_nevertheless(recompute);
        let mut needed = vec![false; graph.operators.len()];
        for index in (0..graph.operators.len()).rev() {
            let operator = &graph.operators[index];
            // What is kept is not made again, and needs nothing that is.
            if operator.pass == Pass::Forward && (!needed[index] || is_kept[index]) {
                continue;
            }
            for input in &operator.inputs {
                if let Some(maker) = self.lowering.makers[input.tensor.0]
                    && self.lowering.is_activation(input.tensor)
                    && graph.operators[maker.0].pass == Pass::Forward
                    && graph.operators[maker.0].block == operator.block
                {
                    needed[maker.0] = true;
                }
            }
        }
        let mut blocks = vec![Vec::new(); graph.blocks.len()];
        for id in self.forward_operators() {
            let operator = &graph.operators[id.0];
            if needed[id.0] && repeated.contains(&operator.block) && !is_kept[id.0] {
                blocks[operator.block].push(id);
            }
        }
        blocks
    }

    /// Of each operator, whether what it makes is kept where its block is computed again.
    fn kept_nevertheless(&self, recompute: &Recompute) -> Vec<bool> {
        let graph = &self.lowering.graph;
        let kept = match recompute {
            Recompute::Selective => return graph.operators.iter().map(|operator| !operator.kind.is_attention()).collect(),
            Recompute::AllBut(kept) => *kept,
            _ => return vec![false; graph.operators.len()],
        };
        let sharding = &self.lowering.sharding;
        let is_summed = |operator: &Operator| {
            operator.outputs.iter().any(|output| sharding.produced(output.tensor).partial_axes().next().is_some())
        };
        // Of each block the products so far, and whether its attention is still to come.
        let mut products = vec![0usize; graph.blocks.len()];
        let mut is_before_attention = vec![false; graph.blocks.len()];
        let forward = || graph.operators.iter().filter(|operator| operator.pass == Pass::Forward);
        forward().filter(|one| one.kind.is_attention()).for_each(|one| is_before_attention[one.block] = true);
        let mut is_kept = |operator: &Operator| {
            if operator.pass != Pass::Forward {
                return false;
            }
            if operator.kind.is_attention() {
                is_before_attention[operator.block] = false;
            }
            let is_product = is_product(operator);
            products[operator.block] += usize::from(is_product);
            let is_odd = products[operator.block] % 2 == 1;
            let of_products =
                kept.products || (kept.odd_products && is_odd) || (kept.projections && is_before_attention[operator.block]);
            (kept.attention && operator.kind.is_attention()) || (is_product && of_products) || (kept.sums && is_summed(operator))
        };
        graph.operators.iter().map(&mut is_kept).collect()
    }

    /// After a forward pass through a chunk, forgets what only the same block has read and can make again.
    pub(super) fn forget_recomputable(&mut self, task: &Task) {
        let micro_batch = task.micro_batch;
        let graph = &self.lowering.graph;
        for (block, operators) in self.needed_again.iter().enumerate() {
            if self.cuts.chunk_of_block[block] != task.chunk {
                continue;
            }
            for output in operators.iter().flat_map(|id| &graph.operators[id.0].outputs) {
                if self.stays_in_block(output.tensor, block) {
                    self.live.remove(&(output.tensor, micro_batch));
                }
            }
        }
    }

    /// Whether only a block itself reads in its forward pass what it has made.
    fn stays_in_block(&self, tensor: TensorId, block: usize) -> bool {
        let operators = &self.lowering.graph.operators;
        let leaves = |id: &OperatorId| operators[id.0].pass == Pass::Forward && operators[id.0].block != block;
        !self.lowering.consumers[tensor.0].iter().any(leaves)
    }

    /// Whether a tensor is forgotten after its forward pass, to be made again.
    pub(super) fn is_forgotten(&self, tensor: TensorId) -> bool {
        let Some(maker) = self.lowering.makers[tensor.0] else { return false };
        let block = self.lowering.graph.operators[maker.0].block;
        self.needed_again.get(block).is_some_and(|again| again.contains(&maker)) && self.stays_in_block(tensor, block)
    }
}
