//! The bound on step time in closed form.

use super::costs::PipelineCosts;

/// Whether the optimizer update counts in a bound. It is left out if data-parallel ranks may shard
/// it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::bounds) enum OptimizerUpdate {
    Counted,
    LeftOut,
}

impl PipelineCosts<'_> {
    /// Returns a lower bound on the step time, in picoseconds.
    ///
    /// Each stage gives several bounds, and the largest of all counts:
    /// - The first micro-batch's forward pass through the stages before it, all its own forward and
    ///   backward passes, and the last micro-batch's backward pass through the stages before it.
    /// - The first micro-batch's forward pass through the stages before it, all its own passes
    ///   including weight gradients, and the update.
    /// - The launches of all its passes, one after another by the host.
    /// - Collectives of gradients and parameters, which occupy one stream.
    /// - Copies of offloaded activations.
    pub(in crate::bounds) fn least_time(&self, micro_batches: usize, update: OptimizerUpdate) -> f64 {
        let update_share = if update == OptimizerUpdate::Counted { 1.0 } else { 0.0 };
        let count = micro_batches as f64;
        // A micro-batch's forward and backward pass through the first chunks of the stages so far.
        let (mut forward_before, mut backward_before) = (0.0, 0.0);
        let mut bound: f64 = 0.0;
        for stage in 0..self.stages {
            let (mut both_passes, mut all_passes, mut launches, mut update) = (0.0, 0.0, 0.0, 0.0);
            let (mut shard_collectives, mut replica_collectives) = (0.0, 0.0);
            for chunk in 0..self.chunks {
                let cost = self.chunk(stage, chunk);
                let (forward, backward) = (cost.forward.from_compute.compute, cost.backward.from_compute.compute);
                both_passes += forward + backward;
                all_passes += forward + backward + cost.weights.from_compute.compute;
                launches += self.launches(stage, chunk) * count;
                update += cost.update * update_share;
                shard_collectives += cost.shard_collectives.total(count);
                replica_collectives += cost.replica_collectives.total(count);
            }
            let update = update.max(self.optimizer_copy_time(stage));
            bound = bound
                .max(self.activation_copy_time(stage, micro_batches))
                .max(forward_before + both_passes * count + backward_before)
                .max(forward_before + all_passes * count + update)
                .max(launches)
                .max(shard_collectives)
                .max(replica_collectives);
            let own = self.chunk(stage, 0);
            // A pass may do work that needs no message, such as recomputation, before the message
            // arrives. So only the chain from the message's arrival counts.
            forward_before += if stage == 0 { own.forward.from_compute.message } else { own.forward.from_arrival.message };
            backward_before += own.backward.from_arrival.message;
        }
        bound
    }

    /// Returns the launch time of a micro-batch's passes through a chunk. Neighbouring chunks on
    /// one stage exchange no messages.
    fn launches(&self, stage: usize, chunk: usize) -> f64 {
        let position = self.schedule.position(self.stages, stage, chunk);
        let is_on_stage = |other: usize| other < self.stages * self.chunks && self.schedule.place(self.stages, other).0 == stage;
        let cost = self.chunk(stage, chunk);
        let all = cost.forward.launch + cost.backward.launch + cost.weights.launch;
        let to_next = if is_on_stage(position + 1) { cost.forward.send_launch + cost.backward.receive_launch } else { 0.0 };
        let from_previous = if position.checked_sub(1).is_some_and(is_on_stage) {
            cost.forward.receive_launch + cost.backward.send_launch
        } else {
            0.0
        };
        (all - to_next - from_previous).max(0.0)
    }
}
