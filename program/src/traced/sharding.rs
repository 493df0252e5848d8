//! What wrappers that shard or replicate a model allocate and send around each layer.

mod reduction;
mod units;

use super::rank_state::RankState;
use super::{
    AllocationStream, Contents, Emitter, Fsdp2Groups, HostOptimizer, ParameterOf, RankEvent, Sharding, TracedCollective,
    TracedOptimizer, TrainedTensor,
};
use foretell_models::operator_tables::ParameterRole;
use rustc_hash::FxHashSet;
use std::collections::BTreeMap;
use units::{Unit, Units, image_bytes};

/// The invariant of what only FSDP does.
const SHARDED: &str = "invariant: only FSDP shards parameters by unit";

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
    /// Trained tensors that the rank holds.
    trained: Vec<TrainedTensor>,
    /// Bytes of the states that the first update makes, as `torch.optim` does: they lie in what the
    /// first backward pass has released.
    states_to_come: Vec<u64>,
    /// Bytes of whole gradients that no collective has reduced yet (DDP).
    unreduced: u64,
    /// Whether the micro-batch's backward pass has made a gradient of the tail.
    has_tail_gradient: bool,
    /// Bytes of a computed element, such as 2.
    compute_width: u64,
    /// The micro-batch's images as they came, if a cast of them is used.
    images: Option<u64>,
}

/// Bytes of a bucket of `DistributedDataParallel` (its default, 25 MiB).
const BUCKET: u64 = 25 << 20;

impl Wrapper {
    /// Allocates what lives before the first step: parameters and buffers, and states unless the
    /// first update makes them.
    pub(super) fn new<'a, V: FnMut(RankEvent<'a>)>(emitter: &mut Emitter<'a, V>) -> Self {
        let (sharding, ranks) = (emitter.job.sharding, emitter.job.ranks.max(1) as u64);
        let is_sharded = matches!(sharding, Sharding::Fsdp1 | Sharding::Fsdp2 { .. });
        let mut units = Units::new(emitter.job);
        let (mut trained, mut order) = (Vec::new(), Vec::new());
        let mut compute_width = 2;
        let mut flat: BTreeMap<(usize, bool, u64), u64> = BTreeMap::new();
        for parameter in emitter.parameters() {
            let (elements, stored) = (emitter.elements(parameter.index), emitter.stored(parameter).bytes());
            let is_trained = emitter.is_trained(parameter);
            if emitter.role(parameter) == ParameterRole::Buffer || !is_sharded {
                emitter.allocate(elements * stored, Contents::Parameters, AllocationStream::Compute);
                if is_trained {
                    order.push((emitter.update_order(parameter), emitter.trained(parameter)));
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
                Sharding::Fsdp1 => (elements.div_ceil(ranks), of_table),
                Sharding::Replicated | Sharding::Ddp | Sharding::Zero { .. } => unreachable!("{SHARDED}"),
            };
            unit.shard += shard;
            unit.gathered.push(shard * ranks * computed);
            unit.stored_bytes += shard * stored;
            if computed != stored {
                unit.cast_shard += shard;
                unit.cast_bytes += shard * computed;
            }
            if is_trained {
                compute_width = computed;
                unit.trained += shard * ranks;
                unit.trained_shard += shard;
            }
            match sharding {
                // A unit has one flat parameter.
                Sharding::Fsdp1 => *flat.entry((number, is_trained, stored)).or_default() += shard,
                Sharding::Replicated | Sharding::Ddp | Sharding::Zero { .. } => unreachable!("{SHARDED}"),
                Sharding::Fsdp2 { .. } => {
                    if emitter.job.offloads_parameters {
                        emitter.send(RankEvent::HostMemory { bytes: shard * stored });
                    } else {
                        emitter.allocate(shard * stored, Contents::Parameters, AllocationStream::Compute);
                    }
                    if is_trained {
                        trained.push(TrainedTensor::flat(shard, stored));
                    }
                }
            }
        }
        if sharding == Sharding::Fsdp1 {
            units.cast_as_a_whole(ranks);
        }
        // Only its peak depends on the order.
        if emitter.job.optimizer == TracedOptimizer::Adafactor {
            order.sort_by_key(|(order, _)| *order);
        }
        trained.extend(order.into_iter().map(|(_, held)| held));
        let is_offloaded = emitter.job.offloads_parameters;
        for ((_, is_trained, stored), shard) in flat {
            if is_offloaded {
                emitter.send(RankEvent::HostMemory { bytes: shard * stored });
            } else {
                emitter.allocate(shard * stored, Contents::Parameters, AllocationStream::Compute);
            }
            if is_trained {
                trained.push(TrainedTensor::flat(shard, stored));
            }
        }
        let mut states_to_come = Vec::new();
        for &tensor in &trained {
            if is_offloaded {
                // Two moments and the gradient.
                emitter.send(RankEvent::HostMemory { bytes: 3 * tensor.bytes() });
                continue;
            }
            let states = emitter.job.optimizer.state_bytes(tensor);
            if emitter.is_first_step && !emitter.job.updates_in_backward {
                states_to_come.extend(states);
            } else {
                for bytes in states {
                    emitter.allocate(bytes, Contents::OptimizerStates, AllocationStream::Compute);
                }
            }
            let paged = emitter.job.optimizer.paged_bytes(tensor.elements);
            if paged > 0 {
                emitter.send(RankEvent::PagedMemory { bytes: paged });
            }
        }
        if sharding == Sharding::Ddp {
            // The buckets that gradients are copied to, all the time.
            let bytes = trained.iter().map(TrainedTensor::bytes).sum();
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
            has_tail_gradient: false,
            compute_width,
            images: None,
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
        let Unit { stored_bytes, cast_shard, cast_bytes, .. } = *self.units.unit(unit);
        let gathered_bytes = self.units.unit(unit).gathered_bytes();
        // `FlatParamHandle.pre_unshard` copies the shard to the device.
        let copy = emitter.job.offloads_parameters.then(|| {
            emitter.send(RankEvent::HostCopy { bytes: stored_bytes, stream: AllocationStream::Gather });
            emitter.allocate(stored_bytes, Contents::Communication, AllocationStream::Gather)
        });
        let cast = (cast_bytes > 0).then(|| emitter.allocate(cast_bytes, Contents::Communication, AllocationStream::Gather));
        let whole = emitter.allocate(gathered_bytes, Contents::Gathered, AllocationStream::Gather);
        if cast_bytes > 0 {
            emitter.send(RankEvent::Moves { name: "cast of a shard", bytes: 4 * cast_shard + cast_bytes, launches: 1 });
        }
        emitter.send(RankEvent::Collective { kind: TracedCollective::AllGather, bytes: gathered_bytes });
        cast.into_iter().chain(copy).for_each(|id| emitter.release(id));
        match self.sharding {
            Sharding::Fsdp1 => {
                self.gathered.insert(unit, vec![whole]);
            }
            Sharding::Replicated | Sharding::Ddp | Sharding::Zero { .. } => unreachable!("{SHARDED}"),
            Sharding::Fsdp2 { .. } => {
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
}

impl RankState for Wrapper {
    /// Before the forward pass: the root is gathered for the whole step, and the embedding for its
    /// own pass, unless the tail has it.
    fn before_forward<'a, V: FnMut(RankEvent<'a>)>(&mut self, emitter: &mut Emitter<'a, V>) {
        self.has_tail_gradient = false;
        let images = image_bytes(emitter.job, &emitter.values);
        if images > 0 {
            self.images = Some(emitter.allocate(images, Contents::Activations, AllocationStream::Compute));
        }
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
            // `_backward_prefetch` of the tail, which begins with the head's gradients.
            if self.units.of(parameter) == self.units.tail()
                && !std::mem::replace(&mut self.has_tail_gradient, true)
                && let Some(last) = self.units.last_layer()
            {
                self.gather(emitter, last);
            }
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
        let tensor = emitter.trained(parameter);
        let bytes = tensor.bytes();
        if emitter.job.updates_in_backward {
            emitter.job.optimizer.step(emitter, &[tensor]);
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
        let buffers = [self.previous_gather.take(), self.previous_reduction.take(), self.images.take()];
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
            let elements = self.trained.iter().map(|tensor| tensor.elements).sum();
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
