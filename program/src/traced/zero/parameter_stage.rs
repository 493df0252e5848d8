//! ZeRO 3: parameters, gradients and states are partitioned; parameters are gathered around each
//! layer.
//!
//! Source: `DeepSpeedZeroOptimizer_Stage3` in `zero/stage3.py`, `PartitionedParameterCoordinator` in
//! `zero/partitioned_param_coordinator.py`, and `zero/partition_parameters.py`, whose functions are
//! named here. `overlap_comm` is on, its default. The steps are those after the first, which records
//! the order of modules and gathers nothing ahead.
//!
//! DeepSpeed gathers around each module. Tables do not say which module runs an operator, so within
//! a layer this has the largest pair of gathered pieces: the one that computes and the next.

use super::super::rank_state::RankState;
use super::super::{AllocationStream, Contents, Emitter, ParameterOf, RankEvent, TracedCollective};
use super::{REUSE_DISTANCE, SUB_GROUP, ZeroSettings, in_model_order, optimizer_group};
use foretell_models::operator_tables::ParameterRole;
use std::collections::{BTreeMap, BTreeSet};

/// Parameters that are gathered by one collective.
#[derive(Clone, Copy, Debug, Default)]
struct Piece {
    /// Bytes of the gathered parameters, each padded to a multiple of the number of ranks.
    bytes: u64,
    elements: u64,
    parameters: u64,
}

/// A layer, or what runs before or after all layers.
#[derive(Clone, Debug, Default)]
struct Unit {
    pieces: Vec<Piece>,
    /// Elements of all its parameters, those that stay gathered too.
    elements: u64,
}

/// A gradient in the bucket.
#[derive(Clone, Copy, Debug)]
struct Bucketed {
    elements: u64,
    /// Its own allocation, if it is larger than the bucket.
    allocation: Option<u64>,
}

/// The state of a rank under stage 3.
#[derive(Debug)]
pub(in super::super) struct ParameterStage {
    settings: ZeroSettings,
    /// Bytes of an element of the model.
    width: u64,
    ranks: u64,
    /// The layers, then [`Self::start`] and [`Self::end`].
    units: Vec<Unit>,
    /// Layers that stay gathered from the forward to the backward pass, as they are used again soon.
    kept: Vec<bool>,
    /// Whether the backward pass computes layers again.
    is_recomputed: bool,
    /// Units whose gathering has begun since they were last released.
    begun: BTreeSet<usize>,
    /// Allocations of units that are gathered as a whole.
    gathered: BTreeMap<usize, Vec<u64>>,
    /// Allocations of the pieces of the layer that runs.
    passing: Vec<u64>,
    bucket: Vec<Bucketed>,
    bucket_elements: u64,
    /// Micro-batches of the step that have been reduced.
    reduced_passes: usize,
    /// Bytes of the parameters that stay gathered.
    persistent_bytes: u64,
    /// Elements of the rank's partitions, by group of the update.
    sub_groups: Vec<u64>,
    /// Most elements that the rank has of one parameter.
    largest: u64,
}

impl ParameterStage {
    /// Allocates what lives before the first step.
    pub(in super::super) fn new<'a, V: FnMut(RankEvent<'a>)>(emitter: &mut Emitter<'a, V>) -> Self {
        let (ranks, layers) = (emitter.job.ranks.max(1) as u64, emitter.job.sizes.layers);
        let mut stage = ParameterStage {
            settings: ZeroSettings::new(emitter, 3),
            width: emitter.job.stored.bytes(),
            ranks,
            units: vec![Unit::default(); layers + 2],
            kept: vec![false; layers],
            is_recomputed: emitter.job.table.key.get("checkpoint").is_some_and(|checkpoint| checkpoint != "none"),
            begun: BTreeSet::new(),
            gathered: BTreeMap::new(),
            passing: Vec::new(),
            bucket: Vec::new(),
            bucket_elements: 0,
            reduced_passes: 0,
            persistent_bytes: 0,
            sub_groups: Vec::new(),
            largest: 0,
        };
        let parameters = in_model_order(emitter);
        let trained = stage.divide(emitter, &parameters);
        stage.kept = stage.layers_kept();
        let partitions: u64 = trained.iter().flatten().sum();
        // `defragment`: one buffer of all trained partitions.
        emitter.allocate(partitions * stage.width, Contents::Parameters, AllocationStream::Compute);
        stage.allocate_states(emitter, &trained);
        // The buckets of `_setup_for_real_optimizer`.
        let bucket = stage.settings.reduce_bucket * stage.width;
        emitter.allocate(bucket, Contents::Communication, AllocationStream::Compute);
        emitter.allocate(partitions * stage.width, Contents::Gradients, AllocationStream::Compute);
        if stage.persistent_bytes > 0 {
            emitter.allocate(stage.persistent_bytes, Contents::Gathered, AllocationStream::Gather);
        }
        stage
    }

    /// Divides parameters into units and pieces, and allocates those that are not trained. Returns
    /// the elements of trained partitions, by group of the optimizer.
    fn divide<'a, V: FnMut(RankEvent<'a>)>(&mut self, emitter: &mut Emitter<'a, V>, parameters: &[ParameterOf]) -> [Vec<u64>; 2] {
        let first_layered = parameters.iter().position(|parameter| parameter.layer.is_some());
        let mut trained: [Vec<u64>; 2] = Default::default();
        for (position, &parameter) in parameters.iter().enumerate() {
            let (elements, stored) = (emitter.elements(parameter.index), emitter.stored(parameter).bytes());
            if emitter.role(parameter) == ParameterRole::Buffer {
                emitter.allocate(elements * stored, Contents::Parameters, AllocationStream::Compute);
                continue;
            }
            let shard = elements.div_ceil(self.ranks);
            if emitter.is_trained(parameter) {
                trained[optimizer_group(emitter, parameter)].push(shard);
                self.largest = self.largest.max(shard);
            } else {
                emitter.allocate(shard * stored, Contents::Parameters, AllocationStream::Compute);
            }
            let is_before = first_layered.is_none_or(|first| position < first);
            let unit = parameter.layer.unwrap_or(if is_before { self.start() } else { self.end() });
            let unit = &mut self.units[unit];
            unit.elements += elements;
            let bytes = shard * self.ranks * stored;
            if elements <= self.settings.persistence {
                // `mark_persistent_parameters`.
                self.persistent_bytes += bytes;
                continue;
            }
            // Gathering ahead goes on until it has a bucket of elements (`fetch_sub_module`).
            match unit.pieces.last_mut().filter(|piece| piece.elements < self.settings.prefetch_bucket) {
                Some(piece) => {
                    piece.bytes += bytes;
                    piece.elements += elements;
                    piece.parameters += 1;
                }
                None => unit.pieces.push(Piece { bytes, elements, parameters: 1 }),
            }
        }
        if emitter.job.table.parameters.iter().any(|parameter| parameter.role == ParameterRole::Tied) {
            // The head has the embedding's weight.
            let Unit { pieces, elements } = self.units[self.start()].clone();
            let end = self.end();
            self.units[end].pieces.extend(pieces);
            self.units[end].elements += elements;
        }
        trained
    }

    /// Allocates the optimizer's copies and states: `_create_fp16_sub_groups`,
    /// `_create_fp32_partitions`, `initialize_optimizer_states`.
    fn allocate_states<'a, V: FnMut(RankEvent<'a>)>(&mut self, emitter: &mut Emitter<'a, V>, trained: &[Vec<u64>; 2]) {
        for group in trained.iter().filter(|group| !group.is_empty()) {
            let mut open = 0;
            for shard in group {
                open += shard;
                if open >= SUB_GROUP {
                    self.sub_groups.push(std::mem::take(&mut open));
                }
            }
            self.sub_groups.extend((open > 0).then_some(open));
        }
        if self.width < 4 {
            for &elements in &self.sub_groups {
                // The cast and its clone.
                emitter.passing(elements * 4, Contents::OptimizerStates, AllocationStream::Compute);
                emitter.allocate(elements * 4, Contents::OptimizerStates, AllocationStream::Compute);
            }
        }
        let largest = self.sub_groups.iter().copied().max().unwrap_or(0);
        emitter.passing(largest * 4, Contents::Gradients, AllocationStream::Compute);
        for &elements in &self.sub_groups {
            for bytes in emitter.job.optimizer.state_bytes(elements, 4) {
                emitter.allocate(bytes, Contents::OptimizerStates, AllocationStream::Compute);
            }
        }
    }

    /// The layers whose parameters are used again before [`REUSE_DISTANCE`] others
    /// (`__params_to_release`): the last ones of the forward pass.
    fn layers_kept(&self) -> Vec<bool> {
        let layers = self.units.len() - 2;
        let uses = if self.is_recomputed { 3 } else { 2 };
        let mut kept = vec![false; layers];
        let mut between = 2 * self.units[self.end()].elements;
        for layer in (0..layers).rev() {
            let elements = self.units[layer].elements;
            kept[layer] = between + elements < REUSE_DISTANCE;
            between += uses * elements;
        }
        kept
    }

    fn start(&self) -> usize {
        self.units.len() - 2
    }

    fn end(&self) -> usize {
        self.units.len() - 1
    }

    /// Begins to gather a unit, unless it is on its way or there.
    fn begin<'a, V: FnMut(RankEvent<'a>)>(&mut self, emitter: &mut Emitter<'a, V>, unit: usize) {
        if !self.begun.insert(unit) || self.ranks == 1 {
            return;
        }
        for piece in &self.units[unit].pieces {
            emitter.send(RankEvent::Collective { kind: TracedCollective::AllGather, bytes: piece.bytes });
        }
    }

    /// Waits for a unit.
    fn wait<'a, V: FnMut(RankEvent<'a>)>(&mut self, emitter: &mut Emitter<'a, V>, unit: usize) {
        self.begin(emitter, unit);
        emitter.send(RankEvent::Wait(TracedCollective::AllGather));
        for piece in self.units[unit].pieces.iter().filter(|piece| piece.parameters > 1) {
            let launches = piece.parameters;
            emitter.send(RankEvent::Moves { name: "copy out of a gathering", bytes: 2 * piece.bytes, launches });
        }
    }

    /// Allocates a gathered piece. Several parameters are copied out of the buffer that they were
    /// gathered into (`AllGatherCoalescedHandle.wait`).
    fn allocate_piece<'a, V: FnMut(RankEvent<'a>)>(emitter: &mut Emitter<'a, V>, piece: Piece) -> u64 {
        let buffer = emitter.allocate(piece.bytes, Contents::Gathered, AllocationStream::Gather);
        if piece.parameters == 1 {
            return buffer;
        }
        let copies = emitter.allocate(piece.bytes, Contents::Gathered, AllocationStream::Gather);
        emitter.release(buffer);
        copies
    }

    /// Waits for a unit, all of whose pieces stay until they are released.
    fn gather_whole<'a, V: FnMut(RankEvent<'a>)>(&mut self, emitter: &mut Emitter<'a, V>, unit: usize) {
        if self.gathered.contains_key(&unit) {
            return;
        }
        self.wait(emitter, unit);
        let pieces = self.units[unit].pieces.iter();
        let allocations = pieces.map(|&piece| Self::allocate_piece(emitter, piece)).collect();
        self.gathered.insert(unit, allocations);
    }

    /// Waits for a layer whose pieces come and go: the largest pair of neighbours.
    fn gather_passing<'a, V: FnMut(RankEvent<'a>)>(&mut self, emitter: &mut Emitter<'a, V>, layer: usize) {
        self.wait(emitter, layer);
        let pieces = &self.units[layer].pieces;
        let pairs = pieces.iter().zip(pieces.iter().cycle().skip(1));
        let Some((&one, &next)) = pairs.max_by_key(|(one, next)| one.bytes + next.bytes) else { return };
        self.passing = vec![Self::allocate_piece(emitter, one), Self::allocate_piece(emitter, next)];
    }

    fn release_unit<'a, V: FnMut(RankEvent<'a>)>(&mut self, emitter: &mut Emitter<'a, V>, unit: usize) {
        self.begun.remove(&unit);
        self.gathered.remove(&unit).into_iter().flatten().for_each(|id| emitter.release(id));
    }

    /// Reduces the bucket to each rank's partitions (`__reduce_and_partition_ipg_grads`).
    fn reduce<'a, V: FnMut(RankEvent<'a>)>(&mut self, emitter: &mut Emitter<'a, V>) {
        self.bucket_elements = 0;
        let bucket = std::mem::take(&mut self.bucket);
        if bucket.is_empty() {
            return;
        }
        let shard: u64 = bucket.iter().map(|bucketed| bucketed.elements.div_ceil(self.ranks)).sum();
        let bytes = shard * self.ranks * self.width;
        // `reduce_scatter_coalesced` orders gradients by rank, unless there is a single one.
        let is_copied = !matches!(bucket.as_slice(), [one] if one.elements.is_multiple_of(self.ranks));
        let copy = is_copied.then(|| emitter.allocate(bytes, Contents::Communication, AllocationStream::Reduce));
        if is_copied {
            emitter.send(RankEvent::Moves { name: "concatenation of gradients", bytes: 2 * bytes, launches: 1 });
        }
        emitter.send(RankEvent::Moves { name: "averaging of gradients", bytes: 2 * bytes, launches: 1 });
        if self.ranks > 1 {
            emitter.send(RankEvent::Collective { kind: TracedCollective::ReduceScatter, bytes });
        }
        // `partition_grads`.
        let (name, tensors) = match self.reduced_passes {
            0 => ("copy of the rank's gradients", 2),
            _ => ("accumulation of the rank's gradients", 3),
        };
        let launches = bucket.len() as u64;
        emitter.send(RankEvent::Moves { name, bytes: tensors * shard * self.width, launches });
        let large = bucket.into_iter().filter_map(|bucketed| bucketed.allocation);
        copy.into_iter().chain(large).for_each(|id| emitter.release(id));
    }
}

impl RankState for ParameterStage {
    fn before_forward<'a, V: FnMut(RankEvent<'a>)>(&mut self, emitter: &mut Emitter<'a, V>) {
        self.gather_whole(emitter, self.start());
    }

    fn before_backward<'a, V: FnMut(RankEvent<'a>)>(&mut self, _: &mut Emitter<'a, V>) {}

    fn begin_layer<'a, V: FnMut(RankEvent<'a>)>(&mut self, emitter: &mut Emitter<'a, V>, layer: usize, backward: bool) {
        let last = self.kept.len() - 1;
        if backward {
            self.release_unit(emitter, self.end());
            if self.is_recomputed || self.kept[layer] {
                self.gather_whole(emitter, layer);
            } else {
                self.gather_passing(emitter, layer);
            }
            let next = layer.checked_sub(1).unwrap_or(self.start());
            let is_gathered_ahead = self.is_recomputed && self.kept.get(next) != Some(&true);
            if let Some(&piece) = self.units[next].pieces.first().filter(|_| is_gathered_ahead) {
                self.passing.push(Self::allocate_piece(emitter, piece));
            }
            self.begin(emitter, next);
        } else {
            self.release_unit(emitter, self.start());
            if self.kept[layer] {
                self.gather_whole(emitter, layer);
            } else {
                self.gather_passing(emitter, layer);
            }
            self.begin(emitter, if layer == last { self.end() } else { layer + 1 });
        }
    }

    fn end_layer<'a, V: FnMut(RankEvent<'a>)>(&mut self, emitter: &mut Emitter<'a, V>, layer: usize, backward: bool) {
        std::mem::take(&mut self.passing).into_iter().for_each(|id| emitter.release(id));
        if backward || !self.kept[layer] {
            self.release_unit(emitter, layer);
        }
        match (backward, layer) {
            (true, 0) => self.gather_whole(emitter, self.start()),
            (false, _) if layer + 1 == self.kept.len() => self.gather_whole(emitter, self.end()),
            _ => {}
        }
    }

    /// `reduce_independent_p_g_buckets_and_remove_grads` and `__add_grad_to_ipg_bucket`.
    fn gradient<'a, V: FnMut(RankEvent<'a>)>(&mut self, emitter: &mut Emitter<'a, V>, parameter: ParameterOf, id: u64) {
        emitter.send(RankEvent::Becomes { id, contents: Contents::Gradients });
        let elements = emitter.elements(parameter.index);
        if elements == 0 || !emitter.is_trained(parameter) {
            return emitter.release(id);
        }
        if self.bucket_elements + elements > self.settings.reduce_bucket {
            self.reduce(emitter);
        }
        let is_larger = elements > self.settings.reduce_bucket;
        if !is_larger {
            emitter.send(RankEvent::Moves { name: "copy to a bucket", bytes: 2 * elements * self.width, launches: 1 });
            emitter.release(id);
        }
        self.bucket.push(Bucketed { elements, allocation: is_larger.then_some(id) });
        self.bucket_elements += elements;
    }

    /// `independent_gradient_partition_epilogue`.
    fn after_backward<'a, V: FnMut(RankEvent<'a>)>(&mut self, emitter: &mut Emitter<'a, V>) {
        self.reduce(emitter);
        self.reduced_passes += 1;
        emitter.send(RankEvent::Wait(TracedCollective::ReduceScatter));
        for unit in 0..self.units.len() {
            self.release_unit(emitter, unit);
        }
    }

    /// `step`.
    fn update<'a, V: FnMut(RankEvent<'a>)>(&mut self, emitter: &mut Emitter<'a, V>) {
        self.reduced_passes = 0;
        let (width, optimizer) = (self.width, emitter.job.optimizer);
        let partitions: u64 = self.sub_groups.iter().sum();
        // `get_grad_norm_direct`, in double precision.
        emitter.passing(8 * self.largest, Contents::Gradients, AllocationStream::Compute);
        emitter.send(RankEvent::Moves { name: "gradients' norm", bytes: (width + 16) * partitions, launches: 2 });
        for &elements in &self.sub_groups {
            // `_prepare_fp32_grad_for_sub_group`.
            let flat = emitter.allocate(elements * width, Contents::Gradients, AllocationStream::Compute);
            emitter.send(RankEvent::Moves { name: "flat gradients", bytes: 2 * elements * width, launches: 1 });
            let single = if width < 4 {
                let single = emitter.allocate(elements * 4, Contents::Gradients, AllocationStream::Compute);
                let bytes = elements * (width + 4);
                emitter.send(RankEvent::Moves { name: "gradients in single precision", bytes, launches: 1 });
                emitter.release(flat);
                single
            } else {
                flat
            };
            emitter.send(RankEvent::Moves { name: "gradients' clipping", bytes: 8 * elements, launches: 1 });
            optimizer.step(emitter, &[(elements, 4)]);
            if width < 4 {
                let bytes = elements * (4 + width);
                emitter.send(RankEvent::Moves { name: "copy to the model's parameters", bytes, launches: 1 });
            }
            emitter.release(single);
        }
        // `_post_step`.
        if self.persistent_bytes > 0 && self.ranks > 1 {
            emitter.send(RankEvent::Collective { kind: TracedCollective::AllGather, bytes: self.persistent_bytes });
            emitter.send(RankEvent::Wait(TracedCollective::AllGather));
        }
    }
}
