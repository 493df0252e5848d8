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
            let made = outputs
                .iter()
                .filter(|output| self.lowering.is_activation(output.tensor))
                .all(|output| self.live.contains_key(&(output.tensor, micro_batch)));
            if !made {
                self.operator(id, micro_batch, Phase::Recompute);
            }
        }
    }

    /// Of each block that may be recomputed, the forward operators whose outputs gradients read, and those that these read.
    pub(super) fn find_needed_again(&self) -> Vec<Vec<OperatorId>> {
        let graph = &self.lowering.graph;
        let recompute = self.plan.layout.recompute;
        let mut repeated = self.forward_operators().iter().map(|id| graph.operators[id.0].block).collect::<Vec<_>>();
        repeated.dedup();
        repeated.retain(|&block| graph.blocks[block].recomputable);
        if let Recompute::FullLayers(layers) = recompute {
            repeated.truncate(layers);
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
    fn kept_nevertheless(&self, recompute: Recompute) -> Vec<bool> {
        let sharding = &self.lowering.sharding;
        let mut products = 0;
        let mut block = None;
        let is_kept = |operator: &Operator| match recompute {
            Recompute::Selective => !operator.kind.is_attention(),
            Recompute::AllBut(kept) => {
                if block != Some(operator.block) {
                    (block, products) = (Some(operator.block), 0);
                }
                let is_product = operator.pass == Pass::Forward && is_product(operator);
                products += usize::from(is_product);
                let is_summed =
                    || operator.outputs.iter().any(|output| sharding.produced(output.tensor).partial_axes().next().is_some());
                (kept.attention && operator.kind.is_attention())
                    || (is_product && (kept.products || kept.odd_products && products % 2 == 1))
                    || (kept.sums && is_summed())
            }
            _ => false,
        };
        self.lowering.graph.operators.iter().map(is_kept).collect()
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
                let leaves_block = self.lowering.consumers[output.tensor.0]
                    .iter()
                    .any(|&id| graph.operators[id.0].pass == Pass::Forward && graph.operators[id.0].block != block);
                if !leaves_block {
                    self.live.remove(&(output.tensor, micro_batch));
                }
            }
        }
    }
}
