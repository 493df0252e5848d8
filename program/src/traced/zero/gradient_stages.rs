//! ZeRO 1 and 2: every rank has all parameters, and a partition of the optimizer's states.
//!
//! Source: `DeepSpeedZeroOptimizer` in `zero/stage_1_and_2.py`, whose functions are named here.
//! `overlap_comm` is off, its default, so that kernels wait for reductions.

use super::super::rank_state::RankState;
use super::super::{AllocationStream, Contents, Emitter, ParameterOf, RankEvent, Sharding, TracedCollective, TrainedTensor};
use super::{
    ZeroSettings, clip_and_step, copy_to_parameters, gradient_norm, in_model_order, offload, optimizer_group, single_gradients,
};
use rustc_hash::FxHashMap;

/// Where a parameter's elements lie in its group's flat buffer.
#[derive(Clone, Copy, Debug)]
struct Span {
    /// Its position among all parameters.
    position: usize,
    elements: u64,
    /// The first and last rank whose partitions have elements of it.
    first_rank: u64,
    last_rank: u64,
}

/// A gradient in the bucket.
#[derive(Clone, Copy, Debug)]
struct Bucketed {
    span: Span,
    /// Its own allocation, if it is larger than the bucket.
    allocation: Option<u64>,
}

/// The state of a rank under stage 1 or 2. Among ranks, it is the one with most gradients.
#[derive(Debug)]
pub(in super::super) struct GradientStages {
    /// Whether each micro-batch's gradients are reduced (stage 2).
    partitions_gradients: bool,
    settings: ZeroSettings,
    /// Bytes of an element of the model.
    width: u64,
    rank: u64,
    spans: FxHashMap<ParameterOf, Span>,
    /// Elements of the rank's partition of each of the optimizer's groups.
    partitions: Vec<u64>,
    /// Elements of all parameters that have some in the rank's partition.
    owned: u64,
    /// Most elements that the rank's partition has of one parameter.
    largest: u64,
    /// Whole gradients that wait for the last micro-batch (stage 1).
    whole: FxHashMap<ParameterOf, u64>,
    /// The buffer that gradients are copied to before they are reduced.
    buffer: Option<u64>,
    bucket: Vec<Bucketed>,
    bucket_elements: u64,
    /// Reduced gradients of the rank: of this micro-batch, and the sum of those before.
    reduced: Option<u64>,
    averaged: Option<u64>,
    /// Micro-batches of the step that have been reduced.
    passes: usize,
    /// Large gradients of others that stage 1 drops at the end of the backward pass.
    dropped_later: Vec<u64>,
}

impl GradientStages {
    /// Allocates what lives before the first step.
    ///
    /// The flat copy is filled beside the parameters only if the device has enough memory, so this
    /// moment is left out.
    pub(in super::super) fn new<'a, V: FnMut(RankEvent<'a>)>(emitter: &mut Emitter<'a, V>) -> Self {
        let ranks = emitter.job.ranks.max(1) as u64;
        let width = emitter.job.stored.bytes();
        let stage = if let Sharding::Zero { stage } = emitter.job.sharding { stage } else { 0 };
        let mut groups: [Vec<(ParameterOf, usize)>; 2] = Default::default();
        for (position, parameter) in in_model_order(emitter).into_iter().enumerate() {
            if emitter.is_trained(parameter) {
                groups[optimizer_group(emitter, parameter)].push((parameter, position));
            } else {
                let bytes = emitter.elements(parameter.index) * emitter.stored(parameter).bytes();
                emitter.allocate(bytes, Contents::Parameters, AllocationStream::Compute);
            }
        }
        let (mut spans, mut partitions) = (FxHashMap::default(), Vec::new());
        // Of each rank: the elements of parameters that it has some of, and the most of one.
        let mut by_rank = vec![(0_u64, 0_u64); ranks as usize];
        for group in groups.into_iter().filter(|group| !group.is_empty()) {
            let total: u64 = group.iter().map(|(parameter, _)| emitter.elements(parameter.index)).sum();
            // `nccl_start_alignment_factor`.
            let padded = total.next_multiple_of(2 * ranks).max(2 * ranks);
            let partition = padded / ranks;
            let mut offset = 0;
            for (parameter, position) in group {
                let elements = emitter.elements(parameter.index);
                if elements == 0 {
                    continue;
                }
                let [first_rank, last_rank] = [offset, offset + elements - 1].map(|element| element / partition);
                for rank in first_rank..=last_rank {
                    let (all, largest) = &mut by_rank[rank as usize];
                    let [start, end] = [offset.max(rank * partition), (offset + elements).min((rank + 1) * partition)];
                    *all += elements;
                    *largest = (*largest).max(end - start);
                }
                spans.insert(parameter, Span { position, elements, first_rank, last_rank });
                offset += elements;
            }
            emitter.allocate(padded * width, Contents::Parameters, AllocationStream::Compute);
            partitions.push(partition);
            if emitter.job.offloads_optimizer {
                emitter.send(RankEvent::HostMemory { bytes: (offload::STATE_BYTES + width) * partition });
                continue;
            }
            // The partition's clone, its copy in single precision, and
            // `initialize_optimizer_states`.
            emitter.passing(partition * width, Contents::Parameters, AllocationStream::Compute);
            emitter.allocate(partition * 4, Contents::OptimizerStates, AllocationStream::Compute);
            emitter.passing(partition * 4, Contents::Gradients, AllocationStream::Compute);
        }
        for &partition in partitions.iter().filter(|_| !emitter.job.offloads_optimizer) {
            for bytes in emitter.job.optimizer.state_bytes(TrainedTensor::flat(partition, 4)) {
                emitter.allocate(bytes, Contents::OptimizerStates, AllocationStream::Compute);
            }
        }
        let fullest = by_rank.iter().enumerate().max_by_key(|(rank, held)| (**held, std::cmp::Reverse(*rank)));
        let (rank, (owned, largest)) = fullest.map_or((0, (0, 0)), |(rank, held)| (rank as u64, *held));
        if emitter.job.offloads_optimizer {
            // `temp_grad_buffer_for_gpu_offload`, as large as the largest parameter; and on the
            // host the gradients of earlier micro-batches.
            let largest = spans.values().map(|span: &Span| span.elements).max().unwrap_or(0);
            emitter.allocate(largest * width, Contents::Gradients, AllocationStream::Compute);
            let bytes = if emitter.job.micro_batches > 1 { owned * width } else { 0 };
            emitter.send(RankEvent::HostMemory { bytes });
        }
        GradientStages {
            partitions_gradients: stage >= 2,
            settings: ZeroSettings::new(emitter, stage),
            width,
            rank,
            spans,
            partitions,
            owned,
            largest,
            whole: FxHashMap::default(),
            buffer: None,
            bucket: Vec::new(),
            bucket_elements: 0,
            reduced: None,
            averaged: None,
            passes: 0,
            dropped_later: Vec::new(),
        }
    }

    /// Adds a gradient to the bucket, which is reduced before if it would overflow
    /// (`reduce_independent_p_g_buckets_and_remove_grads`).
    fn fill_bucket<'a, V: FnMut(RankEvent<'a>)>(&mut self, emitter: &mut Emitter<'a, V>, span: Span, id: u64) {
        if self.bucket_elements + span.elements > self.settings.reduce_bucket {
            self.reduce(emitter);
        }
        let is_larger = span.elements > self.settings.reduce_bucket;
        if !is_larger {
            emitter.send(RankEvent::Moves { name: "copy to a bucket", bytes: 2 * span.elements * self.width, launches: 1 });
            emitter.release(id);
        }
        self.bucket.push(Bucketed { span, allocation: is_larger.then_some(id) });
        self.bucket_elements += span.elements;
    }

    /// Reduces the bucket to all ranks, of which each keeps its own (`average_tensor`, with
    /// `use_multi_rank_bucket_allreduce`, and `reduce_ipg_grads`).
    fn reduce<'a, V: FnMut(RankEvent<'a>)>(&mut self, emitter: &mut Emitter<'a, V>) {
        let bytes = std::mem::take(&mut self.bucket_elements) * self.width;
        if bytes == 0 {
            return;
        }
        emitter.send(RankEvent::Moves { name: "averaging of gradients", bytes: 2 * bytes, launches: 1 });
        // `allreduce_bucket` concatenates the slices of several ranks.
        let is_copied = self.slices() > 1;
        let copy = is_copied.then(|| emitter.allocate(bytes, Contents::Communication, AllocationStream::Compute));
        if is_copied {
            emitter.send(RankEvent::Moves { name: "concatenation of gradients", bytes: 2 * bytes, launches: 1 });
        }
        if emitter.job.ranks > 1 {
            emitter.send(RankEvent::Collective { kind: TracedCollective::AllReduce, bytes });
            emitter.send(RankEvent::Wait(TracedCollective::AllReduce));
        }
        copy.into_iter().for_each(|id| emitter.release(id));
        for Bucketed { span, allocation } in std::mem::take(&mut self.bucket) {
            let is_owned = (span.first_rank..=span.last_rank).contains(&self.rank);
            if is_owned && emitter.job.offloads_optimizer {
                offload::copy_gradient(emitter, [span.elements, self.elements_of_rank(span)], self.width, self.passes == 0);
                allocation.into_iter().for_each(|id| emitter.release(id));
            } else if is_owned {
                // `copy_grads_in_partition`.
                let bytes = self.owned * self.width;
                self.reduced.get_or_insert_with(|| emitter.allocate(bytes, Contents::Gradients, AllocationStream::Compute));
                let moved = 2 * span.elements * self.width;
                emitter.send(RankEvent::Moves { name: "copy of the rank's gradients", bytes: moved, launches: 1 });
                allocation.into_iter().for_each(|id| emitter.release(id));
            } else if self.partitions_gradients {
                allocation.into_iter().for_each(|id| emitter.release(id));
            } else {
                self.dropped_later.extend(allocation);
            }
        }
    }

    /// `all_gather_into_tensor_dp_groups`, in place.
    fn after_update<'a, V: FnMut(RankEvent<'a>)>(&self, emitter: &mut Emitter<'a, V>) {
        if emitter.job.ranks == 1 {
            return;
        }
        for &partition in &self.partitions {
            let bytes = partition * self.width * emitter.job.ranks as u64;
            emitter.send(RankEvent::Collective { kind: TracedCollective::AllGather, bytes });
        }
        emitter.send(RankEvent::Wait(TracedCollective::AllGather));
    }

    /// Elements of a parameter in the rank's partition: of one that lies in several, about an equal
    /// share each.
    fn elements_of_rank(&self, span: Span) -> u64 {
        (span.elements / (span.last_rank - span.first_rank + 1)).min(self.largest)
    }

    /// Ranges of the bucket that belong to one rank each.
    fn slices(&self) -> usize {
        let ranks = self.bucket.iter().flat_map(|bucketed| bucketed.span.first_rank..=bucketed.span.last_rank);
        let (mut count, mut before) = (0, None);
        for rank in ranks {
            count += usize::from(before != Some(rank));
            before = Some(rank);
        }
        count
    }
}

impl RankState for GradientStages {
    fn before_forward<'a, V: FnMut(RankEvent<'a>)>(&mut self, _: &mut Emitter<'a, V>) {}

    fn before_backward<'a, V: FnMut(RankEvent<'a>)>(&mut self, _: &mut Emitter<'a, V>) {}

    fn begin_layer<'a, V: FnMut(RankEvent<'a>)>(&mut self, _: &mut Emitter<'a, V>, _: usize, _: bool) {}

    fn end_layer<'a, V: FnMut(RankEvent<'a>)>(&mut self, _: &mut Emitter<'a, V>, _: usize, _: bool) {}

    fn gradient<'a, V: FnMut(RankEvent<'a>)>(&mut self, emitter: &mut Emitter<'a, V>, parameter: ParameterOf, id: u64) {
        emitter.send(RankEvent::Becomes { id, contents: Contents::Gradients });
        let Some(span) = self.spans.get(&parameter).copied() else { return emitter.release(id) };
        // `setup_buckets`. Stage 1 keeps the buffer until it reduces, after the last micro-batch.
        let bytes = self.settings.reduce_bucket * self.width;
        self.buffer.get_or_insert_with(|| emitter.allocate(bytes, Contents::Communication, AllocationStream::Compute));
        if self.partitions_gradients {
            self.fill_bucket(emitter, span, id);
        } else if *self.whole.entry(parameter).or_insert(id) != id {
            let bytes = 3 * span.elements * self.width;
            emitter.send(RankEvent::Moves { name: "accumulation of a gradient", bytes, launches: 1 });
            emitter.release(id);
        }
    }

    /// `reduce_gradients` and `independent_gradient_partition_epilogue`.
    fn after_backward<'a, V: FnMut(RankEvent<'a>)>(&mut self, emitter: &mut Emitter<'a, V>) {
        if !self.partitions_gradients && !emitter.is_last_pass {
            return;
        }
        let whole = std::mem::take(&mut self.whole).into_iter();
        let mut whole: Vec<(Span, u64)> = whole.filter_map(|(parameter, id)| Some((*self.spans.get(&parameter)?, id))).collect();
        whole.sort_by_key(|(span, _)| span.position);
        for (span, id) in whole {
            self.fill_bucket(emitter, span, id);
        }
        self.reduce(emitter);
        if let (Some(sum), Some(reduced)) = (self.averaged, self.reduced) {
            let bytes = 3 * self.owned * self.width;
            emitter.send(RankEvent::Moves { name: "accumulation of the rank's gradients", bytes, launches: 1 });
            emitter.release(reduced);
            self.averaged = Some(sum);
            self.reduced = None;
        }
        self.averaged = self.averaged.or(self.reduced.take());
        self.passes += 1;
        let dropped = std::mem::take(&mut self.dropped_later).into_iter().chain(self.buffer.take());
        dropped.for_each(|id| emitter.release(id));
    }

    /// `step`.
    fn update<'a, V: FnMut(RankEvent<'a>)>(&mut self, emitter: &mut Emitter<'a, V>) {
        let width = self.width;
        self.passes = 0;
        if emitter.job.offloads_optimizer {
            self.partitions.iter().for_each(|&partition| offload::update(emitter, partition, width));
            return self.after_update(emitter);
        }
        let whole: u64 = self.partitions.iter().sum();
        // `_has_inf_or_nan` has at once: a copy in single precision, where it is not a number,
        // where it is infinite, either of these, and that in single precision.
        let copies = if width < 4 { 4 + 1 + 1 + 1 + 4 } else { 1 + 1 + 1 + 4 };
        emitter.passing(copies * self.largest, Contents::Gradients, AllocationStream::Compute);
        emitter.send(RankEvent::Moves { name: "check for overflow", bytes: (width + 34) * whole, launches: 8 });
        gradient_norm(emitter, [whole, self.largest], width);
        for (index, &partition) in self.partitions.iter().enumerate() {
            let single = single_gradients(emitter, partition, width);
            // Both groups' gradients are views of one buffer.
            if index + 1 == self.partitions.len() {
                self.averaged.take().into_iter().for_each(|id| emitter.release(id));
            }
            clip_and_step(emitter, partition);
            emitter.release(single);
            copy_to_parameters(emitter, partition, width);
        }
        self.after_update(emitter);
    }
}
