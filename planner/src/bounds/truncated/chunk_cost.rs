//! Least time and memory of the blocks that one stage runs in one chunk.

use crate::bounds::passes::{Chain, MicroBatchMemory, PassTime, PersistentMemory, StreamTime, TimedList};
use foretell_program::{Axis, ScheduledPass, StagePass, Task};
use foretell_simulator::MemoryRates;

/// The passes whose kernels are added up. [`TruncatedModel`](super::TruncatedModel) reads the first
/// two.
const KERNEL_PASSES: [StagePass; 4] =
    [StagePass::Forward, StagePass::Backward, StagePass::InputGradient, StagePass::WeightGradient];

/// The blocks of a chunk.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(in crate::bounds) struct Chunk {
    /// Number of blocks that repeat in the model.
    pub(in crate::bounds) equal_blocks: usize,
    /// The position within a period of the first equal block.
    pub(in crate::bounds) offset: usize,
    /// Number of blocks that may be recomputed.
    pub(in crate::bounds) recomputable: usize,
    /// Number of recomputed blocks, if only some of the stage's blocks are recomputed; else 0.
    pub(in crate::bounds) recomputed: usize,
    /// Whether all blocks before those that repeat are in the chunk. If the chunk has only some of
    /// them, they count as nothing.
    pub(in crate::bounds) has_first: bool,
    /// Whether all blocks after those that repeat are in the chunk. If the chunk has only some of
    /// them, they count as nothing.
    pub(in crate::bounds) has_last: bool,
}

/// Least time of a chunk, in picoseconds, and the bytes that it holds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(in crate::bounds) struct ChunkCost {
    pub(in crate::bounds) forward: PassTime,
    /// Backward pass, or input-gradient pass if weight gradients are separate.
    pub(in crate::bounds) backward: PassTime,
    /// Weight-gradient pass; zero if it is part of the backward pass.
    pub(in crate::bounds) weights: PassTime,
    /// From the start of the last pass to the end of the step.
    pub(in crate::bounds) tail: PassTime,
    /// From the start of the step to the end of the first pass.
    pub(in crate::bounds) head: Chain,
    /// Time of the parameter gathers before the end of the first pass.
    pub(in crate::bounds) gather_time: f64,
    /// Collectives over the ranks among which parameters are sharded.
    pub(in crate::bounds) shard_collectives: StreamTime,
    /// Collectives over the ranks that have the same shard.
    pub(in crate::bounds) replica_collectives: StreamTime,
    /// Time of the kernels after the last pass.
    pub(in crate::bounds) update: f64,
    pub(in crate::bounds) persistent: PersistentMemory,
    pub(in crate::bounds) micro_batch: MicroBatchMemory,
    /// Time of the kernels of each of [`KERNEL_PASSES`].
    pub(super) kernels: [f64; 4],
    pub(in crate::bounds) offloaded: OffloadedActivations,
}

/// Activations that a micro-batch moves to the host and back, if activations are offloaded.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(in crate::bounds) struct OffloadedActivations {
    /// Bytes of the blocks whose activations certainly leave the device.
    pub(in crate::bounds) bytes: f64,
    /// Bytes of all equal blocks, which leave the device if the backward pass does not follow at
    /// once.
    pub(in crate::bounds) all_bytes: f64,
    /// Time of the kernels of the blocks counted in `bytes`, in the forward pass, in picoseconds.
    pub(in crate::bounds) forward: f64,
    /// Time of the kernels of the blocks counted in `bytes`, in the backward pass, in picoseconds.
    pub(in crate::bounds) backward: f64,
}

impl ChunkCost {
    /// Reads the cost of all blocks of an instruction list under a stack with these rates. A pass
    /// that runs several times counts with the least of each number.
    pub(super) fn of(timed: &TimedList<'_>, rates: &MemoryRates) -> Self {
        let list = timed.list;
        let end_of_passes = list.passes.last().map_or(0, |pass| pass.instructions.end as usize);
        let end_of_first = list.passes.first().map_or(0, |pass| pass.instructions.end);
        let micro_batches = list.passes.iter().map(|pass| pass.task.micro_batch + 1).max().unwrap_or(1);
        Self {
            tail: timed.tail_time(),
            head: timed.head_chain(end_of_first),
            gather_time: timed.gather_time(end_of_first),
            shard_collectives: timed.busiest_stream(micro_batches, |axes| axes.contains(&Axis::Shard)),
            replica_collectives: timed
                .busiest_stream(micro_batches, |axes| axes.contains(&Axis::Data) && !axes.contains(&Axis::Shard)),
            update: timed.kernel_time(end_of_passes..list.instructions.len()),
            persistent: PersistentMemory::of(list, rates),
            micro_batch: MicroBatchMemory::of(list, rates.transient),
            ..Self::least_passes(timed, |_| true)
        }
    }

    /// Reads the cost of the passes of one chunk of an instruction list, and nothing else.
    pub(in crate::bounds) fn of_passes(timed: &TimedList<'_>, chunk: usize) -> Self {
        Self::least_passes(timed, |task| task.chunk == chunk)
    }

    /// Returns the time of a micro-batch's kernels, in picoseconds.
    pub(in crate::bounds) fn kernel_time(&self) -> f64 {
        self.kernels.iter().sum()
    }

    /// A pass that runs several times counts with the least of each number.
    fn least_passes(timed: &TimedList<'_>, counts: impl Fn(&Task) -> bool) -> Self {
        let of_pass = |selects: &dyn Fn(StagePass) -> bool| -> Vec<&ScheduledPass> {
            timed.list.passes.iter().filter(|pass| counts(&pass.task) && selects(pass.task.pass)).collect()
        };
        let least = |selects: &dyn Fn(StagePass) -> bool| {
            let passes = of_pass(selects).into_iter();
            passes.map(|pass| timed.pass_time(&pass.instructions)).reduce(|a, b| a.with(b, f64::min)).unwrap_or_default()
        };
        let least_kernels = |own: StagePass| {
            let passes = of_pass(&|pass| pass == own).into_iter();
            let ranges = passes.map(|pass| pass.instructions.start as usize..pass.instructions.end as usize);
            ranges.map(|range| timed.kernel_time(range)).reduce(f64::min).unwrap_or(0.0)
        };
        Self {
            forward: least(&|pass| pass == StagePass::Forward),
            backward: least(&|pass| matches!(pass, StagePass::Backward | StagePass::InputGradient)),
            weights: least(&|pass| pass == StagePass::WeightGradient),
            kernels: KERNEL_PASSES.map(least_kernels),
            ..Self::default()
        }
    }

    /// Combines each number with that of other blocks, except for `offloaded`, which is reset.
    pub(in crate::bounds) fn with(&self, other: &Self, combine: impl Fn(f64, f64) -> f64) -> Self {
        Self {
            forward: self.forward.with(other.forward, &combine),
            backward: self.backward.with(other.backward, &combine),
            weights: self.weights.with(other.weights, &combine),
            tail: self.tail.with(other.tail, &combine),
            head: self.head.with(other.head, &combine),
            gather_time: combine(self.gather_time, other.gather_time),
            shard_collectives: self.shard_collectives.with(other.shard_collectives, &combine),
            replica_collectives: self.replica_collectives.with(other.replica_collectives, &combine),
            update: combine(self.update, other.update),
            persistent: self.persistent.with(other.persistent, &combine),
            micro_batch: self.micro_batch.with(other.micro_batch, &combine),
            kernels: [0, 1, 2, 3].map(|pass| combine(self.kernels[pass], other.kernels[pass])),
            offloaded: OffloadedActivations::default(),
        }
    }

    /// Returns the cost of these blocks followed by `next` in the same chunk.
    pub(super) fn then(&self, next: &Self) -> Self {
        let sum = |left: f64, right: f64| left + right;
        Self {
            forward: self.forward.then(next.forward),
            backward: next.backward.then(self.backward),
            weights: next.weights.then(self.weights),
            tail: next.backward.then(self.tail),
            head: self.head.then(next.forward.from_compute),
            ..self.with(next, sum)
        }
    }
}
