//! The end of a step: gradients and batch statistics are summed over the ranks that hold parts of them, parameters updated.
//!
//! Where ZeRO shards a bucket, what is summed is scattered, each rank updates its shard, and the parameters are gathered again: in the next step when
//! they are needed, beside its kernels; or at the end of this one where no kernels run beside gathers of parameters and every rank keeps them whole.

use super::emit::{Norms, StageEmitter};
use super::keep::BucketBuffers;
use super::offload::Rooms;
use super::state::Bucket;
use crate::mesh::{Axis, Group};
use crate::placement::{Placement, Placements};
use crate::plan::Optimizer;
use crate::program::{BufferId, BufferRole, Collective, CollectiveRole, Initial, Metric, MetricKind, Operation, Phase, Stream};
use foretell_models::{Control, Kernel};
use foretell_units::DataType;
use std::collections::BTreeMap;

/// The numbers of the control that a run reports.
const CONTROL_METRICS: [(Control, MetricKind); 3] = [
    (Control::LossScale, MetricKind::LossScale),
    (Control::SquaredGradientNorm, MetricKind::SquaredGradientNorm),
    (Control::SkippedSteps, MetricKind::SkippedSteps),
];

impl StageEmitter<'_> {
    /// Adds a micro-batch's gradients to the rank's shard of the bucket's.
    pub(super) fn shard_gradients(&mut self, index: usize, root: BufferId) {
        let name = format!("gradients {index}");
        let kept = self.buckets[index].gradients;
        let group = Group::along(Axis::Shard);
        if self.buckets[index].reduced.replace(kept).is_none() {
            self.exchange(&name, Collective::ReduceScatter, group, root, kept, Phase::Backward);
            return;
        }
        let elements = self.state.buckets[index].shard_elements();
        let shard = self.buffer(&name, BufferRole::Workspace, vec![elements], DataType::Fp32);
        self.exchange(&name, Collective::ReduceScatter, group, root, shard, Phase::Backward);
        self.compute(&name, Kernel::Accumulate { elements }, vec![shard], vec![kept], Phase::Backward);
    }

    /// Sums a bucket's gradients over every axis along which they are parts.
    pub(super) fn reduce(&mut self, index: usize) {
        let bucket = &self.state.buckets[index];
        let name = format!("gradients {index}");
        let gradients = self.buckets[index].gradients;
        let is_cut = |axis: &Axis| *axis == Axis::Shard && bucket.shards > 1;
        let axes: Vec<Axis> = bucket.gradient.partial_axes().filter(|axis| !is_cut(axis)).collect();
        let reduced = match self.buckets[index].reduced {
            Some(shard) => shard,
            None if bucket.shards > 1 => {
                let shard = self.buffer(&name, BufferRole::Gradient, vec![bucket.shard_elements()], DataType::Fp32);
                self.exchange(&name, Collective::ReduceScatter, Group::along(Axis::Shard), gradients, shard, Phase::Update);
                shard
            }
            None => gradients,
        };
        // In the stream of `tensor` this sum, which is of norms and biases, would wait for the shard, and the next activations behind it.
        let is_behind = bucket.shards > 1 && axes == [Axis::Tensor];
        self.buckets[index].reduced = Some(reduced);
        match axes.is_empty() {
            true => {}
            false if is_behind => self.summed_last.push((index, axes)),
            false => self.exchange(&name, Collective::AllReduce, Group::over(axes), reduced, reduced, Phase::Update),
        }
    }

    /// Sums gradients that were left for after the last activations.
    fn sum_last(&mut self) {
        for (index, axes) in std::mem::take(&mut self.summed_last) {
            let Some(reduced) = self.buckets[index].reduced else { continue };
            let name = format!("gradients {index}");
            self.exchange(&name, Collective::AllReduce, Group::over(axes), reduced, reduced, Phase::Update);
        }
    }

    /// Sums the gradients of parameters that several stages share over these stages: at the end of the step, since only then all have their
    /// parts, and bucket by bucket, in which order all have them.
    fn reduce_across_stages(&mut self) {
        for (index, bucket) in self.state.buckets.iter().enumerate().filter(|(_, bucket)| bucket.stages.len() > 1) {
            let Some(reduced) = self.buckets[index].reduced else { continue };
            let group = Group::across(bucket.stages.clone());
            self.exchange(&format!("gradients {index}"), Collective::AllReduce, group, reduced, reduced, Phase::Update);
        }
    }

    /// A collective that belongs to no micro-batch.
    pub(super) fn exchange(&mut self, name: &str, kind: Collective, group: Group, from: BufferId, to: BufferId, phase: Phase) {
        let role = if kind == Collective::AllGather { CollectiveRole::Parameters } else { CollectiveRole::Gradients };
        let operation = self.collective_operation(kind, role, group, from, to);
        let Operation::Collective { group, .. } = operation else { unreachable!("just made") };
        self.push(name, operation, Stream::Group(group), vec![from], vec![to], None, phase);
    }

    /// A kernel that belongs to no micro-batch.
    pub(super) fn compute(&mut self, name: &str, kernel: Kernel, reads: Vec<BufferId>, writes: Vec<BufferId>, phase: Phase) {
        let operation = Operation::Compute { kernel, accumulate: false, group: None };
        self.push(name, operation, Stream::Compute, reads, writes, None, phase);
    }

    /// Room for what clipping and loss scaling keep from step to step, where the plan has either.
    pub(super) fn keep_control(&mut self) {
        let is_scaled = self.plan.scales_loss();
        if self.plan.training.clip_norm.is_none() && !is_scaled {
            return;
        }
        let control = self.persistent("update control", BufferRole::OptimizerState, vec![Control::LENGTH], DataType::Fp32);
        let scale = if is_scaled { self.plan.training.loss_scale.initial } else { 1.0 };
        self.program.buffers[control.0 as usize].initial = Some(Box::new(Initial::Values(vec![scale])));
        self.control = Some(control);
        // Every rank has the same: one reports.
        if self.program.stage == 0 {
            let reported = CONTROL_METRICS.into_iter().filter(|(_, kind)| is_scaled || *kind == MetricKind::SquaredGradientNorm);
            for (number, kind) in reported {
                let buffer = self.piece("update control", control, number.place(), vec![1]);
                self.program.metrics.push(Metric { kind, buffer, placements: Placements::default() });
            }
        }
    }

    /// The control, where the loss is scaled by it.
    pub(super) fn loss_scale(&self) -> Option<BufferId> {
        self.control.filter(|_| self.plan.scales_loss())
    }

    /// Emits what follows the last backward pass.
    pub(super) fn update(&mut self) {
        for index in std::mem::take(&mut self.put_off) {
            self.reduce(index);
        }
        self.sum_last();
        self.reduce_across_stages();
        self.gradient_norm();
        let mut rooms = self.rooms_of_states();
        for index in 0..self.state.buckets.len() {
            self.update_bucket(index, rooms.as_ref());
            if let Some(rooms) = &mut rooms {
                self.take_out(rooms, index);
            }
        }
        self.update_running_statistics();
    }

    /// Room for the sums of squares of gradients. Parameters that several stages share are counted in the first of them.
    pub(super) fn keep_norms(&mut self) {
        let mut alike: BTreeMap<Placements, Vec<usize>> = BTreeMap::new();
        for (index, bucket) in self.state.buckets.iter().enumerate() {
            if bucket.stages.first() == Some(&self.program.stage) {
                alike.entry(after_reduction(bucket)).or_default().push(index);
            }
        }
        for (number, (placements, buckets)) in alike.into_iter().enumerate() {
            let name = format!("squared norms {number}");
            let root = self.persistent(&name, BufferRole::Sum, vec![buckets.len()], DataType::Fp32);
            let piece = |(place, index): (usize, usize)| (index, self.piece(&name, root, place, vec![1]));
            let buckets = buckets.into_iter().enumerate().map(piece).collect();
            self.norms.push(Norms { placements, root, buckets });
        }
    }

    /// The squares of all reduced gradients, summed bucket by bucket. Where an update depends on them, they are summed over the whole
    /// model, too, before it: over buckets, the ranks that hold other parts, and the stages.
    fn gradient_norm(&mut self) {
        let total = self.norms.len().max(1);
        let totals = self.buffer("squared norms", BufferRole::Sum, vec![total], DataType::Fp32);
        if self.control.is_some() && self.norms.is_empty() {
            self.compute("squared norms", Kernel::Zero { elements: 1 }, vec![], vec![totals], Phase::Update);
        }
        for (number, Norms { placements, root, buckets }) in std::mem::take(&mut self.norms).into_iter().enumerate() {
            let name = format!("squared norms {number}");
            for &(index, norm) in &buckets {
                let Some(gradient) = self.buckets[index].reduced else { continue };
                let elements = self.program.buffer(gradient).shape.iter().product();
                self.compute(&name, Kernel::SumOfSquares { elements }, vec![gradient], vec![norm], Phase::Update);
                if self.control.is_none() {
                    self.program.metrics.push(Metric { kind: MetricKind::SquaredGradientNorm, buffer: norm, placements });
                }
            }
            if self.control.is_some() {
                let axes: Vec<Axis> = placements.sharded_axes().collect();
                let sum = self.piece("squared norms", totals, number, vec![1]);
                self.compute(&name, Kernel::Sum { elements: buckets.len() }, vec![root], vec![sum], Phase::Update);
                if !axes.is_empty() {
                    self.exchange(&name, Collective::AllReduce, Group::over(axes), sum, sum, Phase::Update);
                }
            }
        }
        self.decide_update(totals, total);
    }

    /// From the sum of squares over the whole model: how, and whether, parameters are updated.
    fn decide_update(&mut self, totals: BufferId, elements: usize) {
        let Some(control) = self.control else { return };
        let name = "squared norm";
        let norm = self.buffer(name, BufferRole::Sum, vec![1], DataType::Fp32);
        let stages = 0..self.mesh.stage_count();
        let (ranks, first) = (self.lowering.mesh.ranks(), self.mesh.stage(0));
        if stages.clone().all(|stage| self.mesh.stage(stage).is_as_large_as(first)) {
            self.compute(name, Kernel::Sum { elements }, vec![totals], vec![norm], Phase::Update);
            if stages.len() > 1 {
                self.exchange(name, Collective::AllReduce, Group::across(stages.collect()), norm, norm, Phase::Update);
            }
        } else {
            // All ranks of all stages sum: of each stage one rank has its share, the others nothing.
            let shares = self.buffer(name, BufferRole::Sum, vec![ranks], DataType::Fp32);
            let own = self.piece(name, shares, 0, vec![1]);
            self.compute(name, Kernel::Zero { elements: ranks }, vec![], vec![shares], Phase::Update);
            self.compute(name, Kernel::Sum { elements }, vec![totals], vec![own], Phase::Update);
            let group = self.group(Group::over(Axis::WITHIN_STAGE.to_vec()));
            let kernel = Kernel::Slice { outer: 1, parts: ranks, inner: 1 };
            let slice = Operation::Compute { kernel, accumulate: false, group: Some(group) };
            self.push(name, slice, Stream::Compute, vec![shares], vec![norm], None, Phase::Update);
            self.exchange(name, Collective::AllReduce, Group::everyone(self.mesh), norm, norm, Phase::Update);
        }
        let kernel = Kernel::UpdateControl { clip: self.plan.training.clip_norm.is_some(), scaled: self.plan.scales_loss() };
        self.compute("update control", kernel, vec![norm], vec![control], Phase::Update);
    }

    fn update_bucket(&mut self, index: usize, rooms: Option<&Rooms>) {
        let bucket = &self.state.buckets[index];
        let (shards, elements) = (bucket.shards, bucket.shard_elements());
        let BucketBuffers { parameters, gradients, states, reduced } = &self.buckets[index];
        let (parameters, gradients) = (*parameters, reduced.unwrap_or(*gradients));
        let states = rooms.map_or(states, |rooms| &rooms.places[index]).clone();
        let name = format!("parameters {index}");
        // Where every rank has all parameters but updates a shard, it updates a copy of it that is then gathered.
        let gathers = shards > 1 && !self.state.shards_parameters;
        let updated = if gathers {
            let shard = self.buffer(&name, BufferRole::Workspace, vec![elements], self.state.precision);
            // With a single-precision copy the shard is only written.
            if !self.state.master {
                let group = self.group(Group::along(Axis::Shard));
                let kernel = Kernel::Slice { outer: 1, parts: shards, inner: elements };
                let slice = Operation::Compute { kernel, accumulate: false, group: Some(group) };
                self.push(&name, slice, Stream::Compute, vec![parameters], vec![shard], None, Phase::Update);
            }
            shard
        } else {
            parameters
        };
        let training = self.plan.training;
        let controlled = self.control.is_some();
        let kernel = match self.plan.optimizer {
            Optimizer::Sgd => {
                Kernel::Sgd { elements, momentum: training.momentum != 0.0, nesterov: training.nesterov, controlled }
            }
            Optimizer::Adam | Optimizer::AdamW => Kernel::AdamW { elements, controlled },
        };
        let reads = std::iter::once(gradients).chain(self.control).collect();
        let writes = std::iter::once(updated).chain(states).collect();
        self.compute(&name, kernel, reads, writes, Phase::Update);
        if gathers {
            self.exchange(&name, Collective::AllGather, Group::along(Axis::Shard), updated, parameters, Phase::Update);
        }
    }

    fn update_running_statistics(&mut self) {
        let state = self.state;
        for (axes, root) in std::mem::take(&mut self.statistics).into_iter().filter(|(axes, _)| !axes.is_empty()) {
            self.exchange("batch statistics", Collective::AllReduce, Group::over(axes), root, root, Phase::Update);
        }
        let micro_batches = self.plan.global_batch / self.plan.layout.samples_at_once();
        for running in &state.running {
            let [Some(statistics), Some(buffer)] = [self.kept(&running.statistics), self.kept(&running.name)] else { continue };
            let channels = running.shape.last().copied().unwrap_or(1);
            let kernel = Kernel::RunningStatistics { channels, contributions: running.contributions * micro_batches };
            self.compute(&running.name, kernel, vec![statistics], vec![buffer], Phase::Update);
        }
    }
}

/// How a bucket's gradients lie when they are reduced.
fn after_reduction(bucket: &Bucket) -> Placements {
    bucket.gradient.partial_axes().fold(bucket.gradient, |kept, axis| {
        let is_cut = axis == Axis::Shard && bucket.shards > 1;
        kept.with(axis, if is_cut { Placement::Shard(0) } else { Placement::Replicate })
    })
}
