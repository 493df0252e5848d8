//! Stacks of one and of two equal blocks, and the cost of any number of them.

use super::ChunkCost;
use crate::bounds::passes::{MicroBatchMemory, StreamTime};

/// Equal blocks of the shorter and of the longer stack.
pub(super) const SHORT: usize = 1;
pub(super) const LONG: usize = 2;

/// Costs of a truncated model's stages.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stacks {
    /// The model's first blocks and an equal one.
    pub(super) first: ChunkCost,
    /// The shorter stack; without a pipeline, with the model's first and last blocks.
    pub(super) short: ChunkCost,
    /// The longer stack; without a pipeline, with the model's first and last blocks.
    pub(super) long: ChunkCost,
    /// An equal block and the model's last ones.
    pub(super) last: ChunkCost,
}

impl Stacks {
    /// Reads the stages of a truncated pipeline.
    pub(super) fn of_pipeline(stages: &[ChunkCost]) -> Self {
        Self { first: stages[0], short: stages[1], long: stages[2], last: stages[3] }
    }

    /// Stacks for a layout without a pipeline, from the whole truncated model with each stack.
    pub(super) fn without_pipeline(short: ChunkCost, long: ChunkCost) -> Self {
        Self { first: ChunkCost::default(), short, long, last: ChunkCost::default() }
    }

    /// Returns the cost that one equal block adds.
    pub(super) fn per_block(&self) -> ChunkCost {
        self.long.with(&self.short, |long, short| (long - short) / (LONG - SHORT) as f64)
    }

    /// Returns the cost of a chunk with `more` equal blocks than `from` has; `more` may be
    /// negative.
    pub(super) fn extrapolate(&self, from: &ChunkCost, more: f64) -> ChunkCost {
        let mut cost = from.with(&self.per_block(), |own, of_block| (own + more * of_block).max(0.0));
        // Bucketed work may need fewer buckets per block in a longer stack. So a block adds the
        // least of its average costs in both stacks and of the difference between the stacks.
        let bucketed = |value: &dyn Fn(&ChunkCost) -> f64| {
            let (short, long) = (value(&self.short), value(&self.long));
            let average = (short / SHORT as f64).min(long / LONG as f64);
            (value(from) + more * average.min((long - short) / (LONG - SHORT) as f64)).max(0.0)
        };
        cost.shard_collectives = StreamTime {
            per_micro_batch: bucketed(&|cost| cost.shard_collectives.per_micro_batch),
            per_step: bucketed(&|cost| cost.shard_collectives.per_step),
        };
        cost.replica_collectives = StreamTime {
            per_micro_batch: bucketed(&|cost| cost.replica_collectives.per_micro_batch),
            per_step: bucketed(&|cost| cost.replica_collectives.per_step),
        };
        cost.tail.from_compute.end = bucketed(&|cost| cost.tail.from_compute.end);
        cost.tail.from_arrival.end = bucketed(&|cost| cost.tail.from_arrival.end);
        cost.update = bucketed(&|cost| cost.update);
        cost.gather_time = bucketed(&|cost| cost.gather_time);
        // A pass uses the memory beyond `saved` for one block at a time. With fewer blocks than
        // were compiled, that memory is unknown and counts as zero.
        let beyond_saved = if more < 0.0 { 0.0 } else { 1.0 };
        let MicroBatchMemory { saved, forward_peak, backward_peak, .. } = from.micro_batch;
        cost.micro_batch.forward_peak = cost.micro_batch.saved + beyond_saved * (forward_peak - saved);
        cost.micro_batch.backward_peak = cost.micro_batch.saved + beyond_saved * (backward_peak - saved);
        cost
    }
}
