//! The costs of every chunk of a pipeline.

use super::cuts::PipelineCuts;
use crate::bounds::passes::PassTime;
use crate::bounds::truncated::{Chunk, ChunkCost, TruncatedModel};
use foretell_program::{Offload, Schedule, StagePass, Task};
use std::borrow::Cow;
use std::sync::Arc;

/// Bytes by which a stage may have less state than its chunks' costs add up to, because buckets are
/// rounded to 64 KiB. The factor 4: software stacks hold up to four bytes for each byte of a
/// Program.
pub(in crate::bounds) const BUCKET_ROUNDING: f64 = 4.0 * 65536.0;

/// The costs of a pipeline's chunks, where each stage is on devices of one kind. Kinds are numbered
/// among the kinds in use.
pub(in crate::bounds) struct PipelineCosts<'a> {
    /// Index, in the costs of a kind, of the chunk at each position in the model.
    chunk_of_position: Cow<'a, [usize]>,
    /// Indexed by kind of device, then by chunk.
    costs: Vec<Vec<ChunkCost>>,
    /// Kind of each stage's devices.
    kind_of_stage: Cow<'a, [usize]>,
    /// Memory weight of each kind; see [`DeviceKinds`](crate::space::DeviceKinds).
    memory_weights: &'a [f64],
    pub(super) schedule: Schedule,
    pub(super) stages: usize,
    /// Chunks of each stage.
    pub(super) chunks: usize,
    pub(super) offload: Option<PipelineOffload<'a>>,
}

/// The offloading of a pipeline to its hosts, and the limits that it depends on.
#[derive(Clone, Copy, Debug)]
pub(in crate::bounds) struct PipelineOffload<'a> {
    pub(in crate::bounds) offload: Offload,
    /// Picoseconds in which a device of each kind copies a byte to its host.
    pub(in crate::bounds) copy_time_per_byte: &'a [f64],
    /// The most ranks over which the optimizer state in the costs is sharded.
    pub(in crate::bounds) shards: usize,
    /// Smallest memory limit of a device, less what the software stack holds for any Program.
    pub(in crate::bounds) device_limit: f64,
    /// Bytes on a device for each byte of activations, at least.
    pub(in crate::bounds) activations: f64,
}

impl<'a> PipelineCosts<'a> {
    /// Creates the costs from one truncated model for each kind of device.
    pub(in crate::bounds) fn new(
        models: &[Arc<TruncatedModel>],
        kind_of_stage: &'a [usize],
        memory_weights: &'a [f64],
        cuts: &'a PipelineCuts,
        schedule: Schedule,
        chunks: usize,
    ) -> Self {
        let stages = kind_of_stage.len();
        let costs = models.iter().map(|model| costs_on_kind(model, cuts, schedule, stages, chunks)).collect();
        let chunk_of_position = Cow::Borrowed(&cuts.chunk_of_position[..]);
        Self {
            chunk_of_position,
            costs,
            kind_of_stage: Cow::Borrowed(kind_of_stage),
            memory_weights,
            schedule,
            stages,
            chunks,
            offload: None,
        }
    }

    /// Creates the costs of a pipeline on one kind of device from those of the chunk at each
    /// position in the model.
    pub(in crate::bounds) fn of_positions(of_positions: &[ChunkCost], schedule: Schedule, stages: usize, chunks: usize) -> Self {
        Self {
            chunk_of_position: (0..of_positions.len()).collect(),
            costs: vec![of_positions.to_vec()],
            kind_of_stage: vec![0; stages].into(),
            memory_weights: &[],
            schedule,
            stages,
            chunks,
            offload: None,
        }
    }

    /// Returns these costs for a layout with this offloading; `None` for none.
    pub(in crate::bounds) fn offloading(self, offload: Option<PipelineOffload<'a>>) -> Self {
        Self { offload, ..self }
    }

    /// Returns the cost of a stage's chunk.
    pub(super) fn chunk(&self, stage: usize, chunk: usize) -> &ChunkCost {
        let position = self.schedule.position(self.stages, stage, chunk);
        &self.costs[self.kind_of_stage[stage]][self.chunk_of_position[position]]
    }

    /// Returns the least time of a stage's task.
    pub(super) fn pass_time(&self, stage: usize, task: &Task) -> PassTime {
        let cost = self.chunk(stage, task.chunk);
        match task.pass {
            StagePass::Forward => cost.forward,
            StagePass::Backward | StagePass::InputGradient => cost.backward,
            StagePass::WeightGradient => cost.weights,
        }
    }

    /// Returns the memory weight of a stage's devices.
    pub(super) fn memory_weight(&self, stage: usize) -> f64 {
        self.memory_weights.get(self.kind_of_stage[stage]).copied().unwrap_or(1.0)
    }

    /// Returns the least time, in picoseconds, after the last kernel of a stage's last pass.
    pub(super) fn time_after_passes(&self, stage: usize) -> f64 {
        let update: f64 = (0..self.chunks).map(|chunk| self.chunk(stage, chunk).update).sum();
        update.max(self.optimizer_copy_time(stage))
    }

    /// Returns the least optimizer state, in bytes, that each rank of a stage keeps on its host.
    fn optimizer_state_on_host(&self, stage: usize) -> f64 {
        let Some(offload) = self.offload.filter(|offload| offload.offload.is_of_optimizer()) else { return 0.0 };
        let all: f64 = (0..self.chunks).map(|chunk| self.chunk(stage, chunk).persistent.state_of_program).sum();
        (all / offload.shards.max(1) as f64 - BUCKET_ROUNDING).max(0.0)
    }

    /// Returns the least bytes that any rank keeps on its host.
    pub(in crate::bounds) fn least_host_memory(&self) -> f64 {
        (0..self.stages).map(|stage| self.optimizer_state_on_host(stage)).reduce(f64::min).unwrap_or(0.0)
    }

    /// Returns the picoseconds in which a stage's optimizer state is copied back to the host. All
    /// of it is copied after the last pass, once it is updated.
    pub(super) fn optimizer_copy_time(&self, stage: usize) -> f64 {
        self.optimizer_state_on_host(stage) * self.copy_time_per_byte(stage)
    }

    /// Returns the least picoseconds that offloaded activations of a step occupy a stage.
    ///
    /// Copies in one direction take at least the time of their bytes. If a stage holds one
    /// micro-batch at a time, its backward pass needs first the activations that were copied out
    /// last. So its forward pass ends, and its backward pass starts, no sooner than all copies to
    /// the host have ended.
    pub(super) fn activation_copy_time(&self, stage: usize, micro_batches: usize) -> f64 {
        if !self.offloads_activations() {
            return 0.0;
        }
        let per_byte = self.copy_time_per_byte(stage);
        let offloaded = (0..self.chunks).map(|chunk| self.chunk(stage, chunk).offloaded);
        let per_micro_batch: f64 = if self.schedule.in_flight_bound(self.stages, micro_batches, self.chunks, stage) == 1 {
            offloaded.map(|chunk| chunk.forward.max(chunk.bytes * per_byte) + chunk.backward.max(chunk.bytes * per_byte)).sum()
        } else {
            offloaded.map(|chunk| chunk.bytes * per_byte).sum()
        };
        micro_batches as f64 * per_micro_batch
    }

    pub(super) fn offloads_activations(&self) -> bool {
        self.offload.is_some_and(|offload| offload.offload.is_of_activations())
    }

    /// Returns the picoseconds in which a stage's devices copy a byte to the host; 0 if the layout
    /// does not offload.
    pub(super) fn copy_time_per_byte(&self, stage: usize) -> f64 {
        let of_kind = |offload: PipelineOffload<'_>| offload.copy_time_per_byte.get(self.kind_of_stage[stage]).copied();
        self.offload.and_then(of_kind).unwrap_or(0.0)
    }

    /// Returns the most bytes of activations that fit on a stage's devices beside persistent
    /// memory; infinite if the layout does not offload.
    pub(super) fn free_memory(&self, stage: usize) -> f64 {
        let Some(offload) = self.offload else { return f64::INFINITY };
        let persistent = |chunk: usize| {
            let persistent = self.chunk(stage, chunk).persistent;
            persistent.total() - if offload.offload.is_of_optimizer() { persistent.optimizer_state } else { 0.0 }
        };
        let persistent: f64 = (0..self.chunks).map(persistent).sum();
        let free = offload.device_limit / self.memory_weight(stage) - persistent + BUCKET_ROUNDING;
        free.max(0.0) / offload.activations.max(f64::MIN_POSITIVE)
    }
}

/// Returns the cost of each different chunk on devices of one kind.
fn costs_on_kind(
    model: &TruncatedModel,
    cuts: &PipelineCuts,
    schedule: Schedule,
    stages: usize,
    chunks: usize,
) -> Vec<ChunkCost> {
    let mut costs: Vec<ChunkCost> = cuts.chunks.iter().map(|&chunk| model.chunk(chunk)).collect();
    let stage_of = |position: usize| schedule.place(stages, position).0;
    let (end, is_cut) = (stages * chunks - 1, stages * chunks > 1);
    if let Some(&last) = cuts.chunk_of_position.last().filter(|_| is_cut && stage_of(0) == stage_of(end)) {
        // The model's first and last chunk are on one stage. If they share a table, the stage holds
        // it once, so its memory and update count with the first chunk only. Nor does the stage
        // need the collective in which the truncated model sums the table's gradients. That
        // collective follows the last pass, so the tail is taken from a chunk without ends. With
        // one micro-batch it is part of the backward pass, and takes at most half of what the last
        // block adds to that pass.
        let without_ends = |chunk: usize| model.chunk(Chunk { has_first: false, has_last: false, ..cuts.chunks[chunk] });
        let half = |without: f64, with: f64| 0.5 * (without + with);
        if let Some(&first) = cuts.chunk_of_position.first() {
            costs[first].tail = without_ends(first).tail;
        }
        let (without, last) = (without_ends(last), &mut costs[last]);
        if !model.has_several_micro_batches {
            last.backward = without.backward.with(last.backward, half);
            last.weights = without.weights.with(last.weights, half);
        }
        (last.persistent, last.update, last.tail) = (without.persistent, without.update, without.tail);
    }
    costs
}
