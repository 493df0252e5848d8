//! Gradients: how they are copied, reduced to the rank's shard, and accumulated.

use super::super::{
    AllocationStream, Contents, Emitter, Fsdp2Groups, ParameterOf, RankEvent, Sharding, TracedCollective, TrainedTensor,
};
use super::Wrapper;
use super::units::Unit;

/// Copies of gradients by `DistributedDataParallel`.
const INTO_BUCKETS: &str = "copy into buckets";
const OUT_OF_BUCKETS: &str = "copy out of buckets";

impl Wrapper {
    /// Reduces what waits in a bucket.
    pub(super) fn reduce_bucket<'a, V: FnMut(RankEvent<'a>)>(&mut self, emitter: &mut Emitter<'a, V>) {
        let bytes = std::mem::take(&mut self.unreduced);
        if bytes > 0 && emitter.job.ranks > 1 {
            // `gradient_as_bucket_view` is off unless it is asked for: gradients are divided by the
            // number of ranks on their way into the bucket, and copied back.
            if self.sharding == Sharding::Ddp {
                emitter.send(RankEvent::Moves { name: INTO_BUCKETS, bytes: 2 * bytes, launches: 1 });
            }
            emitter.send(RankEvent::Collective { kind: TracedCollective::AllReduce, bytes });
        }
    }

    /// Reduces the gradients of a unit to the rank's shard, and releases its gathered parameters.
    pub(super) fn reduce<'a, V: FnMut(RankEvent<'a>)>(&mut self, emitter: &mut Emitter<'a, V>, unit: usize) {
        let mut own: Vec<(ParameterOf, u64)> = emitter.gradients.iter().map(|(parameter, id)| (*parameter, *id)).collect();
        own.extend(self.unreduced_parameters.iter().map(|(parameter, id)| (*parameter, *id)));
        own.retain(|(parameter, _)| self.units.of(*parameter) == unit);
        own.sort_by_key(|&(parameter, id)| (parameter.index, id));
        for (parameter, _) in &own {
            emitter.gradients.remove(parameter);
            self.unreduced_parameters.remove(parameter);
        }
        let Unit { trained, trained_shard, .. } = *self.units.unit(unit);
        let stored = emitter.job.stored.bytes();
        match self.sharding {
            Sharding::Fsdp1 if trained > 0 => {
                // The views' gradients are concatenated to the flat parameter's.
                let whole = emitter.allocate(trained * self.compute_width, Contents::Gradients, AllocationStream::Compute);
                emitter.send(RankEvent::Moves {
                    name: "concatenation of gradients",
                    bytes: 2 * trained * self.compute_width,
                    launches: 1,
                });
                own.into_iter().for_each(|(_, id)| emitter.release(id));
                self.release_gathered(emitter, unit);
                let whole = self.accumulate(emitter, unit, whole, trained * self.compute_width);
                // Trainers accumulate under `no_sync`: whole gradients wait for the last
                // micro-batch.
                if !emitter.is_last_pass {
                    self.accumulated.insert(unit, whole);
                    return;
                }
                let shard =
                    emitter.allocate(trained_shard * self.compute_width, Contents::Communication, AllocationStream::Reduce);
                emitter
                    .send(RankEvent::Collective { kind: TracedCollective::ReduceScatter, bytes: trained * self.compute_width });
                self.keep_reduced(emitter, unit, trained_shard * stored, shard, stored != self.compute_width);
                emitter.release(whole);
            }
            Sharding::Fsdp2 { groups: Fsdp2Groups::Accelerate, .. } if !emitter.is_last_pass => {
                self.release_gathered(emitter, unit);
                self.unreduced_parameters.extend(own);
            }
            Sharding::Fsdp2 { reduce, .. } if !own.is_empty() => {
                self.release_gathered(emitter, unit);
                self.previous_reduction.take().into_iter().for_each(|id| emitter.release(id));
                let input = emitter.allocate(trained * reduce.bytes(), Contents::Communication, AllocationStream::Compute);
                let moved = trained * (self.compute_width + reduce.bytes());
                emitter.send(RankEvent::Moves { name: "copy into a reduction", bytes: moved, launches: 1 });
                own.into_iter().for_each(|(_, id)| emitter.release(id));
                let shard = emitter.allocate(trained_shard * reduce.bytes(), Contents::Gradients, AllocationStream::Reduce);
                emitter.send(RankEvent::Collective { kind: TracedCollective::ReduceScatter, bytes: trained * reduce.bytes() });
                self.previous_reduction = Some(input);
                self.keep_reduced(emitter, unit, trained_shard * stored, shard, stored != reduce.bytes());
            }
            // A unit without trained parameters; wrappers without units have gathered nothing.
            Sharding::Fsdp1 | Sharding::Fsdp2 { .. } | Sharding::Replicated | Sharding::Ddp | Sharding::Zero { .. } => {
                self.release_gathered(emitter, unit);
            }
        }
    }

    /// Adds a unit's whole gradient to what earlier micro-batches left of it, if they did. Returns
    /// the allocation of the sum.
    fn accumulate<'a, V: FnMut(RankEvent<'a>)>(
        &mut self,
        emitter: &mut Emitter<'a, V>,
        unit: usize,
        whole: u64,
        bytes: u64,
    ) -> u64 {
        let Some(sum) = self.accumulated.remove(&unit) else { return whole };
        emitter.send(RankEvent::Moves { name: "accumulation of a gradient", bytes: 3 * bytes, launches: 1 });
        emitter.release(whole);
        sum
    }

    /// Casts a reduced shard to the stored format, and adds it to what earlier micro-batches left.
    fn keep_reduced<'a, V: FnMut(RankEvent<'a>)>(
        &mut self,
        emitter: &mut Emitter<'a, V>,
        unit: usize,
        bytes: u64,
        shard: u64,
        is_cast: bool,
    ) {
        let kept = if is_cast {
            let kept = emitter.allocate(bytes, Contents::Gradients, AllocationStream::Reduce);
            emitter.release(shard);
            kept
        } else {
            shard
        };
        if emitter.job.offloads_parameters {
            // `_post_reduce_grad_callback` copies it to the host (`flat_param._cpu_grad`).
            emitter.send(RankEvent::HostCopy { bytes, stream: AllocationStream::Reduce });
            return emitter.release(kept);
        }
        if *self.reduced.entry(unit).or_insert(kept) != kept {
            emitter.send(RankEvent::Moves { name: "accumulation of a gradient", bytes: 3 * bytes, launches: 1 });
            emitter.release(kept);
        }
    }

    /// Before the update: reduces what is left, and waits.
    pub(super) fn reduce_rest<'a, V: FnMut(RankEvent<'a>)>(&mut self, emitter: &mut Emitter<'a, V>) {
        if self.sharding == Sharding::Replicated && emitter.job.ranks > 1 {
            self.unreduced = self.trained.iter().map(TrainedTensor::bytes).sum();
        }
        self.reduce_bucket(emitter);
        emitter.send(RankEvent::Wait(TracedCollective::ReduceScatter));
        emitter.send(RankEvent::Wait(TracedCollective::AllReduce));
        if self.sharding == Sharding::Ddp && emitter.job.ranks > 1 {
            let bytes: u64 = self.trained.iter().map(TrainedTensor::bytes).sum();
            emitter.send(RankEvent::Moves { name: OUT_OF_BUCKETS, bytes: 2 * bytes, launches: self.trained.len() as u64 });
        }
    }

    /// After the update: gradients are dropped.
    pub(super) fn release_gradients<'a, V: FnMut(RankEvent<'a>)>(&mut self, emitter: &mut Emitter<'a, V>) {
        std::mem::take(&mut self.reduced).into_values().for_each(|id| emitter.release(id));
        std::mem::take(&mut self.whole).into_iter().for_each(|id| emitter.release(id));
        self.with_whole.clear();
    }
}
