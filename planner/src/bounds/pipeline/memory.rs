//! The least memory of a pipeline's stages.

use super::costs::PipelineCosts;
use super::in_flight::{HeldMicroBatches, InFlight};
use crate::bounds::passes::{MicroBatchMemory, gathers_parameters_once};
use crate::bounds::truncated::ChunkCost;
use foretell_program::Offload;

impl PipelineCosts<'_> {
    /// Returns the least weighted bytes of the fullest stage: persistent memory, part of which ZeRO
    /// shards over `ranks(stage)` ranks, and the micro-batches that the stage holds. `samples` is
    /// the number of samples of a micro-batch over that in the costs.
    pub(in crate::bounds) fn least_memory(
        &self,
        in_flight: &InFlight,
        zero: usize,
        ranks: impl Fn(usize) -> usize,
        samples: f64,
    ) -> f64 {
        let offload = self.offload.map_or(Offload::None, |offload| offload.offload);
        let memory = |stage: usize, held: &HeldMicroBatches| -> f64 {
            let costs: Vec<&ChunkCost> = (0..self.chunks).map(|chunk| self.chunk(stage, chunk)).collect();
            stage_memory(&costs, held, zero, ranks(stage), samples, offload) * self.memory_weight(stage)
        };
        let times = |stage: usize| in_flight.of_stage(stage).iter().map(move |held| (stage, held));
        (0..self.stages).flat_map(times).map(|(stage, held)| memory(stage, held)).fold(0.0, f64::max)
    }
}

/// Returns the least bytes of a stage with chunks of these costs while it holds these
/// micro-batches; see [`PipelineCosts::least_memory`].
pub(in crate::bounds) fn stage_memory(
    costs: &[&ChunkCost],
    held: &HeldMicroBatches,
    zero: usize,
    ranks: usize,
    samples: f64,
    offload: Offload,
) -> f64 {
    // Offloaded activations do not count, even while they are still on the device.
    let activations = if offload.is_of_activations() { 0.0 } else { 1.0 };
    let of_chunk = |(chunk, cost): (usize, &&ChunkCost)| {
        let mut persistent = cost.persistent.sharded(zero, ranks);
        if offload.is_of_optimizer() {
            persistent.optimizer_state = 0.0;
        }
        let saved = cost.micro_batch.saved * held.saved[chunk] as f64;
        let held = saved + cost.micro_batch.saved_for_weights * held.awaiting_weights[chunk] as f64;
        persistent.total() + activations * samples * held
    };
    // Memory that the running pass uses beyond `saved`. It is not multiplied by `samples`, since
    // part of it may not grow with the samples.
    let beyond_saved = |chunk: Option<usize>, peak: fn(MicroBatchMemory) -> f64| {
        chunk.map_or(0.0, |chunk| peak(costs[chunk].micro_batch) - costs[chunk].micro_batch.saved)
    };
    let in_pass = beyond_saved(held.forward_chunk, |memory| memory.forward_peak)
        .max(beyond_saved(held.backward_chunk, |memory| memory.backward_peak));
    let all: f64 = costs.iter().enumerate().map(of_chunk).sum();
    // In the last pass of a step, gathered parameters are freed one after another.
    let may_be_last_pass = gathers_parameters_once(zero, ranks) && held.total_saved() <= 1;
    all + activations * if may_be_last_pass { 0.0 } else { in_pass }
}
