//! ZeRO 3: parameters, gradients and states are partitioned; parameters are gathered around each
//! layer.
//!
//! Source: `DeepSpeedZeroOptimizer_Stage3` in `zero/stage3.py`, `PartitionedParameterCoordinator`
//! in `zero/partitioned_param_coordinator.py`, and `zero/partition_parameters.py`, whose functions
//! are named here. `overlap_comm` is on, its default. The steps are those after the first, which
//! records the order of modules and gathers nothing ahead.
//!
//! DeepSpeed fetches around each module, of which many have no parameters; each call gathers ahead
//! by another bucket. So after a few layers [`MAX_LIVE`] elements are gathered, or all: here from
//! the first layer on. Messages are sent one layer ahead. Tables do not say which module runs an
//! operator, so a layer is released as a whole.

use super::super::rank_state::RankState;
use super::super::{AllocationStream, Contents, Emitter, ParameterOf, RankEvent, TracedCollective, TrainedTensor};
use super::modules::{MODULES_OF_ADAPTED_EXPERT, MODULES_OF_EXPERT, WEIGHTS_OF_EXPERTS, modules_named};
use super::{
    MAX_LIVE, REUSE_DISTANCE, SUB_GROUP, ZeroSettings, clip_and_step, copy_to_parameters, gradient_norm, in_model_order, offload,
    optimizer_group, single_gradients,
};
use foretell_models::operator_tables::{ParameterRole, TableParameter};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

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
    /// Modules: those with parameters, and those around them.
    modules: u64,
}

/// A piece that is gathered.
#[derive(Clone, Copy, Debug)]
struct Gathered {
    allocation: u64,
    elements: u64,
    /// The last use that it is known to be needed for.
    until: usize,
    /// Whether its message was sent.
    is_sent: bool,
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
    /// The unit of each use in a micro-batch: what comes before the layers, these, what comes after
    /// them, and the same in reverse.
    uses: Vec<usize>,
    /// Units that are not released between their two uses, as the second comes soon.
    kept: Vec<bool>,
    /// Whether the backward pass computes layers again.
    is_recomputed: bool,
    /// What is gathered, by unit and piece, and its elements.
    gathered: BTreeMap<(usize, usize), Gathered>,
    live_elements: u64,
    /// The use and piece up to which parameters have been gathered ahead.
    ahead: (usize, usize),
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
            uses: Vec::new(),
            kept: Vec::new(),
            is_recomputed: emitter.job.table.key.get("checkpoint").is_some_and(|checkpoint| checkpoint != "none"),
            gathered: BTreeMap::new(),
            live_elements: 0,
            ahead: (0, 0),
            bucket: Vec::new(),
            bucket_elements: 0,
            reduced_passes: 0,
            persistent_bytes: 0,
            sub_groups: Vec::new(),
            largest: 0,
        };
        let parameters = in_model_order(emitter);
        let trained = stage.divide(emitter, &parameters);
        let forward = [stage.start()].into_iter().chain(0..layers).chain([stage.end()]);
        stage.uses = forward.clone().chain(forward.rev()).collect();
        stage.kept = stage.units_kept();
        let partitions: u64 = trained.iter().flatten().sum();
        // `defragment`: one buffer of all trained partitions.
        stage_partition(emitter, partitions * stage.width);
        stage.allocate_states(emitter, &trained);
        // The buckets of `_setup_for_real_optimizer`.
        let bucket = stage.settings.reduce_bucket * stage.width;
        emitter.allocate(bucket, Contents::Communication, AllocationStream::Compute);
        if emitter.job.offloads_optimizer {
            emitter.send(RankEvent::HostMemory { bytes: partitions * stage.width });
        } else {
            emitter.allocate(partitions * stage.width, Contents::Gradients, AllocationStream::Compute);
        }
        if stage.persistent_bytes > 0 {
            emitter.allocate(stage.persistent_bytes, Contents::Gathered, AllocationStream::Gather);
        }
        stage
    }

    /// Divides parameters into units and pieces, and allocates those that are not trained. Returns
    /// the elements of trained partitions, by group of the optimizer.
    fn divide<'a, V: FnMut(RankEvent<'a>)>(&mut self, emitter: &mut Emitter<'a, V>, parameters: &[ParameterOf]) -> [Vec<u64>; 2] {
        let first_layered = parameters.iter().position(|parameter| parameter.layer.is_some());
        let table = Arc::clone(&emitter.job.table);
        let mut modules: BTreeSet<(usize, &str)> = BTreeSet::new();
        let is_adapter_of_experts =
            |parameter: &TableParameter| parameter.role == ParameterRole::Adapter && parameter.name.contains(".experts.");
        let modules_of_expert =
            if table.parameters.iter().any(is_adapter_of_experts) { MODULES_OF_ADAPTED_EXPERT } else { MODULES_OF_EXPERT };
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
                stage_partition(emitter, shard * stored);
            }
            let is_before = first_layered.is_none_or(|first| position < first);
            let unit_index = parameter.layer.unwrap_or(if is_before { self.start() } else { self.end() });
            let of_table = &table.parameters[parameter.index];
            let unit = &mut self.units[unit_index];
            // The modules of other experts are as many as those of the first.
            if parameter.expert == 0 {
                let name = of_table.name.as_str();
                let ends = name.match_indices('.').map(|(end, _)| &name[..end]);
                let new = ends.filter(|module| modules.insert((unit_index, module)));
                let copies = of_table.copies(&emitter.values) as u64;
                unit.modules += new.map(|module| modules_named(module, copies)).sum::<u64>();
            }
            unit.elements += elements;
            let experts = emitter.experts(parameter.index);
            unit.modules += experts * modules_of_expert / WEIGHTS_OF_EXPERTS;
            for _ in 0..experts.max(1) {
                let elements = elements / experts.max(1);
                let bytes = elements.div_ceil(self.ranks) * self.ranks * stored;
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
        }
        if emitter.job.table.parameters.iter().any(|parameter| parameter.role == ParameterRole::Tied) {
            // The head has the embedding's weight.
            let Unit { pieces, elements, .. } = self.units[self.start()].clone();
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
        if emitter.job.offloads_optimizer {
            emitter.send(RankEvent::HostMemory { bytes: offload::STATE_BYTES * self.sub_groups.iter().sum::<u64>() });
            return;
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
            for bytes in emitter.job.optimizer.state_bytes(TrainedTensor::flat(elements, 4)) {
                emitter.allocate(bytes, Contents::OptimizerStates, AllocationStream::Compute);
            }
        }
    }

    /// The units whose parameters are used again before [`REUSE_DISTANCE`] others
    /// (`__params_to_release`): the last ones of the forward pass.
    fn units_kept(&self) -> Vec<bool> {
        let uses = if self.is_recomputed { 3 } else { 2 };
        let mut kept = vec![true; self.units.len()];
        let mut between = 2 * self.units[self.end()].elements;
        let layers = self.units.len() - 2;
        for unit in (0..layers).rev().chain([self.start()]) {
            let elements = self.units[unit].elements;
            kept[unit] = between + elements < REUSE_DISTANCE;
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

    /// The use of a layer.
    fn use_of(&self, layer: usize, backward: bool) -> usize {
        if backward { self.uses.len() - 2 - layer } else { layer + 1 }
    }

    /// Gathers a piece for a use, unless it is there.
    fn gather<'a, V: FnMut(RankEvent<'a>)>(&mut self, emitter: &mut Emitter<'a, V>, at: usize, index: usize) {
        let unit = self.uses[at];
        if let Some(gathered) = self.gathered.get_mut(&(unit, index)) {
            gathered.until = gathered.until.max(at);
            return;
        }
        let Piece { bytes, elements, parameters } = self.units[unit].pieces[index];
        let mut allocation = emitter.allocate(bytes, Contents::Gathered, AllocationStream::Gather);
        if parameters > 1 {
            // Several are copied out of the buffer (`AllGatherCoalescedHandle.wait`).
            let copies = emitter.allocate(bytes, Contents::Gathered, AllocationStream::Gather);
            emitter.release(std::mem::replace(&mut allocation, copies));
        }
        self.live_elements += elements;
        self.gathered.insert((unit, index), Gathered { allocation, elements, until: at, is_sent: false });
    }

    /// Gathers the unit of a use, and sends what was not yet.
    fn send<'a, V: FnMut(RankEvent<'a>)>(&mut self, emitter: &mut Emitter<'a, V>, at: usize) {
        let Some(&unit) = self.uses.get(at) else { return };
        for index in 0..self.units[unit].pieces.len() {
            self.gather(emitter, at, index);
            let Piece { bytes, parameters, .. } = self.units[unit].pieces[index];
            let Some(gathered) = self.gathered.get_mut(&(unit, index)) else { continue };
            if std::mem::replace(&mut gathered.is_sent, true) {
                continue;
            }
            if emitter.job.offloads_parameters {
                emitter.send(RankEvent::HostCopy { bytes: bytes / self.ranks, stream: AllocationStream::Gather });
            }
            if self.ranks == 1 {
                continue;
            }
            emitter.send(RankEvent::Collective { kind: TracedCollective::AllGather, bytes });
            if parameters > 1 {
                let name = "copy out of a gathering";
                emitter.send(RankEvent::Moves { name, bytes: 2 * bytes, launches: parameters });
            }
        }
    }

    /// A use begins: waits for its unit, and gathers ahead (`fetch_sub_module`).
    fn begin<'a, V: FnMut(RankEvent<'a>)>(&mut self, emitter: &mut Emitter<'a, V>, at: usize) {
        // Hooks before and after each module, and once more where the backward pass computes it
        // again. The layer itself is a module, too.
        let is_again = at >= self.uses.len() / 2 && self.is_recomputed && self.uses[at] < self.start();
        let visits = if is_again { 2 } else { 1 };
        emitter.send(RankEvent::Hooks { calls: 2 * visits * (self.units[self.uses[at]].modules + 1) });
        self.send(emitter, at);
        emitter.send(RankEvent::Wait(TracedCollective::AllGather));
        self.send(emitter, at + 1);
        self.ahead = self.ahead.max((at + 2, 0));
        while let (ahead, index) = self.ahead
            && let Some(&unit) = self.uses.get(ahead)
            && self.live_elements < MAX_LIVE
        {
            if index < self.units[unit].pieces.len() {
                self.gather(emitter, ahead, index);
                self.ahead.1 += 1;
            } else {
                self.ahead = (ahead + 1, 0);
            }
        }
    }

    /// A use ends: releases what no use is known for.
    fn end_use<'a, V: FnMut(RankEvent<'a>)>(&mut self, emitter: &mut Emitter<'a, V>, at: usize) {
        let unit = self.uses[at];
        let next = self.uses.len() - 1 - at;
        for index in 0..self.units[unit].pieces.len() {
            let Some(gathered) = self.gathered.get_mut(&(unit, index)) else { continue };
            if self.kept[unit] && next > at {
                gathered.until = gathered.until.max(next);
            }
            if gathered.until <= at {
                self.live_elements -= gathered.elements;
                emitter.release(gathered.allocation);
                self.gathered.remove(&(unit, index));
            }
        }
    }

    /// `_post_step`.
    fn after_update<'a, V: FnMut(RankEvent<'a>)>(&self, emitter: &mut Emitter<'a, V>) {
        if self.persistent_bytes > 0 && self.ranks > 1 {
            emitter.send(RankEvent::Collective { kind: TracedCollective::AllGather, bytes: self.persistent_bytes });
            emitter.send(RankEvent::Wait(TracedCollective::AllGather));
        }
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
        if emitter.job.offloads_optimizer {
            let is_first = self.reduced_passes == 0;
            offload::partition_gradients(emitter, shard, self.width, is_first);
            let large = bucket.into_iter().filter_map(|bucketed| bucketed.allocation);
            return copy.into_iter().chain(large).for_each(|id| emitter.release(id));
        }
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

/// Takes memory for a rank's partition of parameters, on the device or on its host.
fn stage_partition<'a, V: FnMut(RankEvent<'a>)>(emitter: &mut Emitter<'a, V>, bytes: u64) {
    if emitter.job.offloads_parameters {
        emitter.send(RankEvent::HostMemory { bytes });
    } else {
        emitter.allocate(bytes, Contents::Parameters, AllocationStream::Compute);
    }
}

impl RankState for ParameterStage {
    fn before_forward<'a, V: FnMut(RankEvent<'a>)>(&mut self, emitter: &mut Emitter<'a, V>) {
        self.ahead = (0, 0);
        self.begin(emitter, 0);
    }

    fn before_backward<'a, V: FnMut(RankEvent<'a>)>(&mut self, emitter: &mut Emitter<'a, V>) {
        let middle = self.uses.len() / 2;
        self.end_use(emitter, middle - 1);
        self.begin(emitter, middle);
    }

    fn begin_layer<'a, V: FnMut(RankEvent<'a>)>(&mut self, emitter: &mut Emitter<'a, V>, layer: usize, backward: bool) {
        let at = self.use_of(layer, backward);
        if at == 1 || at == self.uses.len() / 2 + 1 {
            self.end_use(emitter, at - 1);
        }
        self.begin(emitter, at);
    }

    fn end_layer<'a, V: FnMut(RankEvent<'a>)>(&mut self, emitter: &mut Emitter<'a, V>, layer: usize, backward: bool) {
        let at = self.use_of(layer, backward);
        self.end_use(emitter, at);
        if at + 2 == self.uses.len() / 2 || at + 2 == self.uses.len() {
            self.begin(emitter, at + 1);
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
        for gathered in std::mem::take(&mut self.gathered).into_values() {
            emitter.release(gathered.allocation);
        }
        self.live_elements = 0;
    }

    /// `step`.
    fn update<'a, V: FnMut(RankEvent<'a>)>(&mut self, emitter: &mut Emitter<'a, V>) {
        self.reduced_passes = 0;
        let width = self.width;
        if emitter.job.offloads_optimizer {
            self.sub_groups.iter().for_each(|&elements| offload::update(emitter, elements, width));
            return self.after_update(emitter);
        }
        gradient_norm(emitter, [self.sub_groups.iter().sum(), self.largest], width);
        for &elements in &self.sub_groups {
            // `_prepare_fp32_grad_for_sub_group`.
            let single = single_gradients(emitter, elements, width);
            clip_and_step(emitter, elements);
            if width < 4 {
                copy_to_parameters(emitter, elements, width);
            }
            emitter.release(single);
        }
        self.after_update(emitter);
    }
}
