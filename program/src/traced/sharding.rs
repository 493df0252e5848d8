//! What wrappers that shard or replicate a model allocate and send around each layer.

mod units;

use super::rank_state::RankState;
use super::{
    AllocationStream, Contents, Emitter, Fsdp2Groups, HostOptimizer, ParameterOf, RankEvent, Sharding, TracedCollective,
    TracedOptimizer,
};
use foretell_models::operator_tables::ParameterRole;
use rustc_hash::FxHashSet;
use std::collections::BTreeMap;
use units::{Unit, Units};

/// The state of a rank's wrapper: what is gathered, what waits to be released.
#[derive(Debug)]
pub(super) struct Wrapper {
    sharding: Sharding,
    units: Units,
    /// Allocations of what is gathered, by unit.
    gathered: BTreeMap<usize, Vec<u64>>,
    /// Buffers of gathering that are not yet copied out, by unit (FSDP2).
    in_flight: BTreeMap<usize, u64>,
    /// The buffer of the gathering before, kept until the next is waited for (FSDP2).
    previous_gather: Option<u64>,
    /// The input of the reduction before, kept until the next (FSDP2).
    previous_reduction: Option<u64>,
    /// Reduced gradients of the rank, by unit.
    reduced: BTreeMap<usize, u64>,
    /// Whole gradients of a replica, and the parameters that have one.
    whole: Vec<u64>,
    with_whole: FxHashSet<ParameterOf>,
    /// Whole gradients that micro-batches before the last have left, by unit, in the format in
    /// which they were computed (FSDP1 under `no_sync`, as Accelerate runs all micro-batches but
    /// the last).
    accumulated: BTreeMap<usize, u64>,
    /// The same by parameter (FSDP2 without gradient synchronisation, which is Accelerate's
    /// `no_sync`).
    unreduced_parameters: BTreeMap<ParameterOf, u64>,
    /// Trained tensors that the rank holds: elements and bytes of each.
    trained: Vec<(u64, u64)>,
    /// Bytes of the states that the first update makes, as `torch.optim` does: they lie in what the
    /// first backward pass has released.
    states_to_come: Vec<u64>,
    /// Bytes of whole gradients that no collective has reduced yet (DDP).
    unreduced: u64,
    /// Bytes of a computed element, such as 2.
    compute_width: u64,
}

/// Bytes of a bucket of `DistributedDataParallel` (its default, 25 MiB).
const BUCKET: u64 = 25 << 20;
/// Its copies of gradients.
const INTO_BUCKETS: &str = "copy into buckets";
const OUT_OF_BUCKETS: &str = "copy out of buckets";

impl Wrapper {
    /// Allocates what lives before the first step: parameters and buffers, and states unless the
    /// first update makes them.
    pub(super) fn new<'a, V: FnMut(RankEvent<'a>)>(emitter: &mut Emitter<'a, V>) -> Self {
        let (sharding, ranks) = (emitter.job.sharding, emitter.job.ranks.max(1) as u64);
        let is_sharded = matches!(sharding, Sharding::Fsdp1 | Sharding::Fsdp2 { .. });
        let mut units = Units::new(emitter.job);
        let mut trained = Vec::new();
        let mut compute_width = 2;
        let mut flat: BTreeMap<(usize, bool, u64), u64> = BTreeMap::new();
        for parameter in emitter.parameters() {
            let (elements, stored) = (emitter.elements(parameter.index), emitter.stored(parameter).bytes());
            let is_trained = emitter.is_trained(parameter);
            if emitter.role(parameter) == ParameterRole::Buffer || !is_sharded {
                emitter.allocate(elements * stored, Contents::Parameters, AllocationStream::Compute);
                if is_trained {
                    trained.push((elements, stored));
                }
                continue;
            }
            let number = units.of(parameter);
            let unit = units.unit_mut(number);
            let of_table = emitter.job.table.parameters[parameter.index].element.bytes();
            let (shard, computed) = match sharding {
                // `MixedPrecisionPolicy` has one format for parameters and reduction.
                Sharding::Fsdp2 { reduce, groups: Fsdp2Groups::Accelerate } => {
                    (emitter.shard_elements(parameter.index), of_table.min(reduce.bytes()))
                }
                Sharding::Fsdp2 { .. } => (emitter.shard_elements(parameter.index), of_table),
                _ => (elements.div_ceil(ranks), of_table),
            };
            unit.shard += shard;
            unit.gathered.push(shard * ranks * computed);
            unit.stored_bytes += shard * stored;
            unit.cast_bytes += if computed == stored { 0 } else { shard * computed };
            if is_trained {
                compute_width = computed;
                unit.trained += shard * ranks;
                unit.trained_shard += shard;
            }
            match sharding {
                // A unit has one flat parameter.
                Sharding::Fsdp1 => *flat.entry((number, is_trained, stored)).or_default() += shard,
                _ => {
                    if emitter.job.offloads_parameters {
                        emitter.send(RankEvent::HostMemory { bytes: shard * stored });
                    } else {
                        emitter.allocate(shard * stored, Contents::Parameters, AllocationStream::Compute);
                    }
                    if is_trained {
                        trained.push((shard, stored));
                    }
                }
            }
        }
        let is_offloaded = emitter.job.offloads_parameters;
        for ((_, is_trained, stored), shard) in flat {
            if is_offloaded {
                emitter.send(RankEvent::HostMemory { bytes: shard * stored });
            } else {
                emitter.allocate(shard * stored, Contents::Parameters, AllocationStream::Compute);
            }
            if is_trained {
                trained.push((shard, stored));
            }
        }
        let mut states_to_come = Vec::new();
        for &(elements, stored) in &trained {
            if is_offloaded {
                // Two moments and the gradient.
                emitter.send(RankEvent::HostMemory { bytes: 3 * elements * stored });
                continue;
            }
            let states = emitter.job.optimizer.state_bytes(elements, stored);
            if emitter.is_first_step && !emitter.job.updates_in_backward {
                states_to_come.extend(states);
            } else {
                for bytes in states {
                    emitter.allocate(bytes, Contents::OptimizerStates, AllocationStream::Compute);
                }
            }
            let paged = emitter.job.optimizer.paged_bytes(elements);
            if paged > 0 {
                emitter.send(RankEvent::PagedMemory { bytes: paged });
            }
        }
        if sharding == Sharding::Ddp {
            // The buckets that gradients are copied to, all the time.
            let bytes = trained.iter().map(|(elements, stored)| elements * stored).sum();
            emitter.allocate(bytes, Contents::Communication, AllocationStream::Compute);
        }
        Wrapper {
            sharding,
            units,
            gathered: BTreeMap::new(),
            in_flight: BTreeMap::new(),
            previous_gather: None,
            previous_reduction: None,
            reduced: BTreeMap::new(),
            whole: Vec::new(),
            with_whole: FxHashSet::default(),
            accumulated: BTreeMap::new(),
            unreduced_parameters: BTreeMap::new(),
            trained,
            states_to_come,
            unreduced: 0,
            compute_width,
        }
    }

    fn is_sharded(&self) -> bool {
        matches!(self.sharding, Sharding::Fsdp1 | Sharding::Fsdp2 { .. })
    }

    /// Begins to gather a unit, unless it is gathered or on its way.
    fn gather<'a, V: FnMut(RankEvent<'a>)>(&mut self, emitter: &mut Emitter<'a, V>, unit: usize) {
        let is_there = self.gathered.contains_key(&unit) || self.in_flight.contains_key(&unit);
        if !self.is_sharded() || is_there || self.units.unit(unit).shard == 0 {
            return;
        }
        let Unit { stored_bytes, cast_bytes, shard, .. } = *self.units.unit(unit);
        let gathered_bytes = self.units.unit(unit).gathered_bytes();
        // `FlatParamHandle.pre_unshard` copies the shard to the device.
        let copy = emitter.job.offloads_parameters.then(|| {
            emitter.send(RankEvent::HostCopy { bytes: stored_bytes, stream: AllocationStream::Gather });
            emitter.allocate(stored_bytes, Contents::Communication, AllocationStream::Gather)
        });
        let cast = (cast_bytes > 0).then(|| emitter.allocate(cast_bytes, Contents::Communication, AllocationStream::Gather));
        let whole = emitter.allocate(gathered_bytes, Contents::Gathered, AllocationStream::Gather);
        if cast_bytes > 0 {
            emitter.send(RankEvent::Moves { name: "cast of a shard", bytes: 4 * shard + cast_bytes, launches: 1 });
        }
        emitter.send(RankEvent::Collective { kind: TracedCollective::AllGather, bytes: gathered_bytes });
        cast.into_iter().chain(copy).for_each(|id| emitter.release(id));
        match self.sharding {
            Sharding::Fsdp1 => {
                self.gathered.insert(unit, vec![whole]);
            }
            _ => {
                self.in_flight.insert(unit, whole);
            }
        }
    }

    /// Waits for a unit, and copies it out of the buffer that it was gathered into (FSDP2).
    fn wait<'a, V: FnMut(RankEvent<'a>)>(&mut self, emitter: &mut Emitter<'a, V>, unit: usize, forward: bool) {
        if !self.is_sharded() {
            return;
        }
        emitter.send(RankEvent::Wait(TracedCollective::AllGather));
        let Some(buffer) = self.in_flight.remove(&unit) else { return };
        if forward {
            self.previous_gather.take().into_iter().for_each(|id| emitter.release(id));
        }
        let of_unit = self.units.unit(unit);
        let copied = of_unit.gathered.iter().map(|&bytes| emitter.allocate(bytes, Contents::Gathered, AllocationStream::Compute));
        self.gathered.insert(unit, copied.collect());
        let bytes = 2 * of_unit.gathered_bytes();
        emitter.send(RankEvent::Moves { name: "copy out of a gathering", bytes, launches: 1 });
        if forward {
            self.previous_gather = Some(buffer);
        } else {
            emitter.release(buffer);
        }
    }

    fn release_gathered<'a, V: FnMut(RankEvent<'a>)>(&mut self, emitter: &mut Emitter<'a, V>, unit: usize) {
        self.gathered.remove(&unit).into_iter().flatten().for_each(|id| emitter.release(id));
    }

    fn reduce_bucket<'a, V: FnMut(RankEvent<'a>)>(&mut self, emitter: &mut Emitter<'a, V>) {
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
    fn reduce<'a, V: FnMut(RankEvent<'a>)>(&mut self, emitter: &mut Emitter<'a, V>, unit: usize) {
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
            _ => self.release_gathered(emitter, unit),
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
    fn reduce_rest<'a, V: FnMut(RankEvent<'a>)>(&mut self, emitter: &mut Emitter<'a, V>) {
        if self.sharding == Sharding::Replicated && emitter.job.ranks > 1 {
            self.unreduced = self.trained.iter().map(|(elements, stored)| elements * stored).sum();
        }
        self.reduce_bucket(emitter);
        emitter.send(RankEvent::Wait(TracedCollective::ReduceScatter));
        emitter.send(RankEvent::Wait(TracedCollective::AllReduce));
        if self.sharding == Sharding::Ddp && emitter.job.ranks > 1 {
            let bytes: u64 = self.trained.iter().map(|(elements, stored)| elements * stored).sum();
            emitter.send(RankEvent::Moves { name: OUT_OF_BUCKETS, bytes: 2 * bytes, launches: self.trained.len() as u64 });
        }
    }

    /// After the update: gradients are dropped.
    fn release_gradients<'a, V: FnMut(RankEvent<'a>)>(&mut self, emitter: &mut Emitter<'a, V>) {
        std::mem::take(&mut self.reduced).into_values().for_each(|id| emitter.release(id));
        std::mem::take(&mut self.whole).into_iter().for_each(|id| emitter.release(id));
        self.with_whole.clear();
    }
}

impl RankState for Wrapper {
    /// Before the forward pass: the root is gathered for the whole step, and the embedding for its
    /// own pass, unless the tail has it.
    fn before_forward<'a, V: FnMut(RankEvent<'a>)>(&mut self, emitter: &mut Emitter<'a, V>) {
        let first = if self.units.is_tied { self.units.tail() } else { self.units.embedding() };
        for unit in [self.units.root(), first] {
            self.gather(emitter, unit);
            self.wait(emitter, unit, true);
        }
    }

    /// The forward pass has ended: FSDP2 drops the last buffer, and FSDP1 begins to gather the
    /// layer that comes first.
    fn before_backward<'a, V: FnMut(RankEvent<'a>)>(&mut self, emitter: &mut Emitter<'a, V>) {
        self.previous_gather.take().into_iter().for_each(|id| emitter.release(id));
        if self.sharding == Sharding::Fsdp1
            && let Some(last) = self.units.last_layer()
        {
            self.gather(emitter, last);
        }
    }

    /// A layer's pass begins.
    fn begin_layer<'a, V: FnMut(RankEvent<'a>)>(&mut self, emitter: &mut Emitter<'a, V>, layer: usize, backward: bool) {
        if !backward && layer == 0 {
            self.release_gathered(emitter, self.units.embedding());
        }
        self.gather(emitter, layer);
        // The tail's backward pass is over. With the embedding in it, that of the model must be.
        if backward && Some(layer) == self.units.last_layer() && !self.units.is_tied {
            self.reduce(emitter, self.units.tail());
        }
        self.wait(emitter, layer, !backward);
        if backward && !emitter.job.keeps_layer_inputs() {
            self.gather(emitter, layer.checked_sub(1).unwrap_or(self.units.embedding()));
        }
    }

    /// A layer's pass ends. The tail stays gathered from its forward pass to its backward pass.
    fn end_layer<'a, V: FnMut(RankEvent<'a>)>(&mut self, emitter: &mut Emitter<'a, V>, layer: usize, backward: bool) {
        if !self.is_sharded() {
            return;
        }
        if backward {
            self.reduce(emitter, layer);
        } else {
            self.release_gathered(emitter, layer);
        }
        let (tail, embedding) = (self.units.tail(), self.units.embedding());
        if !backward && Some(layer) == self.units.last_layer() {
            self.gather(emitter, tail);
            self.wait(emitter, tail, true);
        } else if backward && layer == 0 && self.units.unit(embedding).trained > 0 {
            self.wait(emitter, embedding, false);
        }
    }

    /// The table's gradient of a parameter is complete.
    fn gradient<'a, V: FnMut(RankEvent<'a>)>(&mut self, emitter: &mut Emitter<'a, V>, parameter: ParameterOf, id: u64) {
        emitter.send(RankEvent::Becomes { id, contents: Contents::Gradients });
        if self.is_sharded() {
            if self.unreduced_parameters.contains_key(&parameter) {
                let bytes = 3 * emitter.elements(parameter.index) * self.compute_width;
                emitter.send(RankEvent::Moves { name: "accumulation of a gradient", bytes, launches: 1 });
                return emitter.release(id);
            }
            // A parameter that is used twice has its gradients added in place.
            if let Some(before) = emitter.gradients.insert(parameter, id) {
                emitter.release(before);
            }
            return;
        }
        let (elements, width) = (emitter.elements(parameter.index), emitter.stored(parameter).bytes());
        let bytes = elements * width;
        if emitter.job.updates_in_backward {
            emitter.job.optimizer.step(emitter, &[(elements, width)]);
            emitter.release(id);
            return;
        }
        if self.with_whole.insert(parameter) {
            self.whole.push(id);
        } else {
            // Added to what earlier micro-batches left.
            emitter.send(RankEvent::Moves { name: "accumulation of a gradient", bytes: 3 * bytes, launches: 1 });
            emitter.release(id);
        }
        if self.sharding == Sharding::Ddp && emitter.is_last_pass {
            self.unreduced += bytes;
            emitter.send(RankEvent::Moves { name: "copy to a bucket", bytes: 2 * bytes, launches: 1 });
            if self.unreduced >= BUCKET {
                self.reduce_bucket(emitter);
            }
        }
    }

    /// After the backward pass: what is in no layer is reduced, and buffers are released.
    fn after_backward<'a, V: FnMut(RankEvent<'a>)>(&mut self, emitter: &mut Emitter<'a, V>) {
        if self.is_sharded() {
            // The order of FSDP2's final callback: modules in reverse.
            for unit in [self.units.tail(), self.units.embedding(), self.units.root()] {
                self.reduce(emitter, unit);
            }
        }
        let buffers = [self.previous_gather.take(), self.previous_reduction.take()];
        buffers.into_iter().flatten().for_each(|id| emitter.release(id));
        let left: Vec<u64> = std::mem::take(&mut self.in_flight).into_values().collect();
        left.into_iter().for_each(|id| emitter.release(id));
    }

    fn update<'a, V: FnMut(RankEvent<'a>)>(&mut self, emitter: &mut Emitter<'a, V>) {
        self.reduce_rest(emitter);
        if emitter.job.updates_in_backward {
            return;
        }
        if emitter.job.offloads_optimizer {
            let elements = self.trained.iter().map(|(elements, _)| elements).sum();
            let is_fused = emitter.job.optimizer == TracedOptimizer::AdamWFused;
            let by = if is_fused { HostOptimizer::OneLoop } else { HostOptimizer::Lists };
            emitter.send(RankEvent::HostUpdate { elements, by });
            return;
        }
        for bytes in std::mem::take(&mut self.states_to_come) {
            emitter.allocate(bytes, Contents::OptimizerStates, AllocationStream::Compute);
        }
        emitter.job.optimizer.update(emitter, &self.trained);
        self.release_gradients(emitter);
    }
}
