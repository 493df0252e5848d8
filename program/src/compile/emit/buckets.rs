//! Gradient buckets: where gradients are accumulated, and when buckets are reduced.
//!
//! A bucket is reduced once the last operator of the step has added to its gradients; the reduction
//! overlaps the rest of the backward pass. If ZeRO shards gradients, each micro-batch has a bucket
//! buffer of its own, which is scattered into the rank's shard as soon as it is complete.

use super::list::{Label, ListBuilder};
use super::persistent::{BucketBuffers, PersistentBuffers};
use super::stage::{Duty, Stage};
use super::workers::WorkerMessages;
use crate::collective::Collective;
use crate::compile::cuts::ChunkPass;
use crate::mesh::{Axis, Group};
use crate::program::{BufferId, BufferRole, Phase};
use crate::schedule::Task;
use foretell_models::{Kernel, OperatorId, TensorId};
use foretell_units::DataType;
use rustc_hash::{FxHashMap, FxHashSet};
use std::collections::BTreeMap;
use std::rc::Rc;

/// A bucket's gradients of one micro-batch, before they are scattered.
struct UnscatteredBucket {
    root: BufferId,
    /// The buffer of each gradient, by name.
    views: FxHashMap<String, BufferId>,
    /// The number of operators that have yet to add to it.
    writers_left: usize,
}

/// The buffer that a sum over micro-batches is added to.
pub(super) struct SumTarget {
    pub(super) buffer: BufferId,
    /// Whether the buffer already holds a part of this step's sum.
    pub(super) has_contents: bool,
}

/// The progress of a stage's gradient buckets through one step.
pub(super) struct GradientBuckets {
    /// By bucket: the reduced gradients, whole or the rank's shard. `None` until they are reduced.
    reduced: Vec<Option<BufferId>>,
    /// Keyed by bucket and micro-batch.
    unscattered: FxHashMap<(usize, usize), UnscatteredBucket>,
    /// Sums and gradients that this step has already written to.
    written: FxHashSet<BufferId>,
    /// By bucket: the number of operators in the rest of the step that add to the bucket.
    writers_left: Vec<usize>,
    /// The buckets that each pass adds to, with the number of operators; found when first asked
    /// for.
    writers: FxHashMap<ChunkPass, Rc<[(usize, usize)]>>,
    /// Complete buckets that are reduced after the backward pass.
    postponed: Vec<usize>,
    /// Reduce-scattered buckets, with the axes over which they are still to be summed after the
    /// backward pass.
    unsummed: Vec<(usize, Vec<Axis>)>,
}

impl GradientBuckets {
    /// The state at the start of a step.
    pub(super) fn new(stage: &Stage<'_>) -> Self {
        Self {
            reduced: vec![None; stage.state.buckets.len()],
            unscattered: FxHashMap::default(),
            written: FxHashSet::default(),
            writers_left: Vec::new(),
            writers: FxHashMap::default(),
            postponed: Vec::new(),
            unsummed: Vec::new(),
        }
    }

    /// Sets the number of micro-batches of the step.
    pub(super) fn expect_micro_batches(&mut self, stage: &Stage<'_>, micro_batches: usize) {
        self.writers_left = stage.state.buckets.iter().map(|bucket| bucket.writers * micro_batches).collect();
    }

    /// The reduced gradients of a bucket.
    pub(super) fn reduced(&self, bucket: usize) -> Option<BufferId> {
        self.reduced[bucket]
    }

    /// The buffer for an operator's contribution to a sum or a parameter gradient.
    pub(super) fn sum_target(
        &mut self,
        list: &mut ListBuilder,
        stage: &Stage<'_>,
        persistent: &PersistentBuffers,
        (tensor, micro_batch): (TensorId, usize),
    ) -> Option<SumTarget> {
        let name = stage.name(tensor);
        let buffer = match stage
            .state
            .bucket_of_gradient(&stage.lowering.graph, tensor)
            .filter(|&bucket| stage.state.shards_gradients(bucket))
        {
            Some(bucket) => {
                let unscattered =
                    self.unscattered.entry((bucket, micro_batch)).or_insert_with(|| unscattered_bucket(list, stage, bucket));
                unscattered.views.get(name).copied()
            }
            None => persistent.find(name),
        }?;
        let has_contents = !self.written.insert(buffer);
        Some(SumTarget { buffer, has_contents })
    }

    /// Counts the writers of a task whose instructions were copied from another micro-batch. Such a
    /// task completes no bucket.
    pub(super) fn count_copied_task(&mut self, stage: &Stage<'_>, task: &Task) {
        let writers = self.writers.entry((task.chunk, task.pass)).or_insert_with(|| {
            let mut counts: BTreeMap<usize, usize> = BTreeMap::new();
            for &id in stage.operators_of(task) {
                for bucket in stage.state.buckets_written(&stage.lowering.graph, stage.operator(id)) {
                    *counts.entry(bucket).or_default() += 1;
                }
            }
            counts.into_iter().collect()
        });
        for &(bucket, count) in writers.iter() {
            self.writers_left[bucket] -= count;
        }
    }

    /// Counts an operator that was just emitted, and reduces the buckets that it completes.
    pub(super) fn after_operator(
        &mut self,
        list: &mut ListBuilder,
        stage: &Stage<'_>,
        persistent: &PersistentBuffers,
        messages: &mut WorkerMessages,
        (id, micro_batch): (OperatorId, usize),
    ) {
        for bucket in stage.state.buckets_written(&stage.lowering.graph, stage.operator(id)) {
            self.writers_left[bucket] -= 1;
            let is_complete = self.writers_left[bucket] == 0;
            if stage.state.shards_gradients(bucket) {
                let Some(unscattered) = self.unscattered.get_mut(&(bucket, micro_batch)) else { continue };
                unscattered.writers_left -= 1;
                if unscattered.writers_left == 0 {
                    let root = unscattered.root;
                    self.unscattered.remove(&(bucket, micro_batch));
                    self.scatter_micro_batch(list, stage, persistent, bucket, root);
                }
            }
            if !is_complete {
                continue;
            }
            if stage.plan.overlap.gradients {
                self.reduce(list, stage, persistent, messages, bucket);
            } else {
                // Kernels wait for reductions that do not overlap with them, so the reduction comes
                // after the messages that other stages wait for.
                self.postponed.push(bucket);
            }
        }
    }

    /// Scatters a micro-batch's gradients, and adds them to the rank's shard.
    fn scatter_micro_batch(
        &mut self,
        list: &mut ListBuilder,
        stage: &Stage<'_>,
        persistent: &PersistentBuffers,
        bucket: usize,
        root: BufferId,
    ) {
        let name = format!("gradients {bucket}");
        let Some(sum) = persistent.buckets[bucket].gradients else { return };
        let group = stage.state.buckets[bucket].shard_group();
        if self.reduced[bucket].replace(sum).is_none() {
            list.collective_of_step(&name, Collective::ReduceScatter, group, [root, sum], Phase::Backward);
            return;
        }
        let elements = stage.state.buckets[bucket].shard_elements();
        let shard = list.add_buffer(&name, BufferRole::Workspace, vec![elements], DataType::Fp32);
        list.collective_of_step(&name, Collective::ReduceScatter, group, [root, shard], Phase::Backward);
        list.compute(Label::of_step(&name, Phase::Backward), Kernel::Accumulate { elements }, &[shard], &[sum]);
    }

    /// Reduces a complete bucket over every axis along which its gradients are partial sums.
    fn reduce(
        &mut self,
        list: &mut ListBuilder,
        stage: &Stage<'_>,
        persistent: &PersistentBuffers,
        messages: &mut WorkerMessages,
        index: usize,
    ) {
        let bucket = &stage.state.buckets[index];
        let name = format!("gradients {index}");
        let Some(gradients) = persistent.buckets[index].gradients else { return };
        let mut axes = stage.summed_axes(bucket.gradient);
        // Servers add the gradients of workers.
        axes.retain(|&axis| !bucket.scatters_over(axis) && (stage.duty == Duty::Alone || axis != Axis::Data));
        let reduced = match self.reduced[index] {
            Some(shard) => shard,
            None if bucket.shards > 1 => {
                let shard = list.add_buffer(&name, BufferRole::Gradient, vec![bucket.shard_elements()], DataType::Fp32);
                let buffers = [gradients, shard];
                list.collective_of_step(&name, Collective::ReduceScatter, bucket.shard_group(), buffers, Phase::Update);
                shard
            }
            None => gradients,
        };
        self.reduced[index] = Some(reduced);
        // A sum over `tensor` alone is for norms and biases. In the stream of `tensor` it would
        // wait for the shard, and collectives of later activations would wait behind it.
        let would_block_activations = bucket.shards > 1 && axes == [Axis::Tensor];
        if would_block_activations {
            self.unsummed.push((index, axes));
        } else if !axes.is_empty() {
            list.all_reduce_of_step(&name, Group::over(axes), reduced);
        }
        // Buckets of several stages are pushed after their sum over stages ([`Self::finish`]).
        if stage.duty == Duty::Worker && bucket.stages.len() == 1 {
            messages.push(list, persistent, index);
        }
    }

    /// Returns whether all gradients of a bucket are there, and the bucket needs no sum over ranks.
    pub(super) fn are_whole(&self, stage: &Stage<'_>, index: usize) -> bool {
        let bucket = &stage.state.buckets[index];
        let is_summed = bucket.shards > 1 || bucket.stages.len() > 1 || !stage.summed_axes(bucket.gradient).is_empty();
        self.writers_left[index] == 0 && self.reduced[index].is_some() && !is_summed
    }

    /// Reads the gradients that one worker has pushed: from the buffer that its push is
    /// decompressed into, or else from the push itself.
    pub(super) fn take_session(&mut self, persistent: &PersistentBuffers, worker: usize) {
        let gradients = |bucket: &BucketBuffers| bucket.gradients.or_else(|| bucket.sessions.get(worker).map(|&[_, push]| push));
        self.reduced = persistent.buckets.iter().map(gradients).collect();
    }

    /// Reads the persistent gradient buffers, which hold sums made by other Programs.
    pub(super) fn take_whole(&mut self, persistent: &PersistentBuffers) {
        self.reduced = persistent.buckets.iter().map(|bucket| bucket.gradients).collect();
    }

    /// Completes all reductions after the last backward pass.
    pub(super) fn finish(
        &mut self,
        list: &mut ListBuilder,
        stage: &Stage<'_>,
        persistent: &PersistentBuffers,
        messages: &mut WorkerMessages,
    ) {
        for bucket in std::mem::take(&mut self.postponed) {
            self.reduce(list, stage, persistent, messages, bucket);
        }
        for (bucket, axes) in std::mem::take(&mut self.unsummed) {
            let Some(reduced) = self.reduced[bucket] else { continue };
            list.all_reduce_of_step(&format!("gradients {bucket}"), Group::over(axes), reduced);
        }
        // Buckets of several stages are summed over those stages last, when all have their parts.
        // Every stage does so in bucket order.
        for (index, bucket) in stage.state.buckets.iter().enumerate().filter(|(_, bucket)| bucket.stages.len() > 1) {
            let Some(reduced) = self.reduced[index] else { continue };
            list.all_reduce_of_step(&format!("gradients {index}"), Group::across(bucket.stages.clone()), reduced);
            if stage.duty == Duty::Worker {
                messages.push(list, persistent, index);
            }
        }
    }
}

/// Adds the buffers for a bucket's gradients of one micro-batch. Gaps between parameters are
/// zeroed, since the reduction sums them too.
fn unscattered_bucket(list: &mut ListBuilder, stage: &Stage<'_>, index: usize) -> UnscatteredBucket {
    let bucket = &stage.state.buckets[index];
    let name = format!("gradients {index}");
    let root = list.add_buffer(&name, BufferRole::Gradient, vec![bucket.elements], DataType::Fp32);
    for (start, elements) in bucket.gaps() {
        let gap = list.add_view(&name, root, start, vec![elements]);
        list.compute(Label::of_step(&name, Phase::Backward), Kernel::Zero { elements }, &[], &[gap]);
    }
    let mut views = FxHashMap::default();
    for member in &bucket.members {
        let gradient = format!("{}.gradient", member.name);
        let view = list.add_view(&gradient, root, member.offset, member.shape.clone());
        views.insert(gradient, view);
    }
    UnscatteredBucket { root, views, writers_left: bucket.writers }
}
