//! The end of a step: the gradient norm, the update of all parameters, and the update of running
//! statistics.
//!
//! If ZeRO shards a bucket, each rank updates its shard. Ranks that keep whole parameters gather
//! the updated shards right away; with sharded parameters, the next step gathers them before the
//! kernels that read them.

mod muon;

use super::buckets::GradientBuckets;
use super::exchange::{Begun, Exchange, Updated};
use super::list::{Label, ListBuilder};
use super::optimizer_states::StagedStates;
use super::persistent::{BatchStatistics, PersistentBuffers, placements_after_reduction};
use super::stage::{Duty, Stage};
use crate::collective::Collective;
use crate::compile::recipe::BucketTraining;
use crate::mesh::{Axis, Group};
use crate::placement::Placements;
use crate::plan::Optimizer;
use crate::program::{BufferId, BufferRole, Metric, MetricKind, Phase};
use foretell_models::{Kernel, WEIGHT};
use foretell_units::DataType;

/// Appends the update of one stage to a list, after all gradients are reduced.
pub(super) struct Update<'a> {
    pub(super) list: &'a mut ListBuilder,
    pub(super) stage: &'a Stage<'a>,
    pub(super) persistent: &'a PersistentBuffers,
    pub(super) gradients: &'a GradientBuckets,
    /// The exchange between replicas at the end of the step, if there is one.
    pub(super) exchange: Option<&'a Exchange<'a>>,
}

impl Update<'_> {
    /// Ends the step. `early` has the exchanges of buckets that are updated already.
    pub(super) fn run(&mut self, early: Vec<Begun>) {
        if self.stage.duty == Duty::Worker {
            self.update_running_statistics();
            return;
        }
        self.gradient_norm(&early);
        let mut staged = StagedStates::new(self.list, self.persistent);
        let mut others = Vec::new();
        for bucket in self.stage.state.trained_buckets().filter(|&bucket| !has(&early, bucket)) {
            let Some((updated, gradients)) = self.update_bucket(bucket, staged.as_ref()) else { continue };
            match self.begin_exchange(bucket, gradients, updated) {
                None => self.gather(bucket, updated),
                Some(begun) => others.push(begun),
            }
            if let Some(staged) = &mut staged {
                staged.take_out(self.list, self.persistent, bucket);
            }
        }
        if let Some(exchange) = self.exchange {
            let begun: Vec<Begun> = early.into_iter().chain(others).collect();
            begun.iter().for_each(|begun| exchange.add(self.list, begun));
            for begun in begun {
                exchange.end(self.list, &self.persistent.buckets[begun.index], &begun);
                self.gather(begun.index, begun.parameters);
            }
        }
        self.update_running_statistics();
    }

    /// Begins the exchange of an updated bucket. `None` if no exchange of it ends with the step.
    fn begin_exchange(&mut self, index: usize, gradients: BufferId, parameters: BufferId) -> Option<Begun> {
        let exchange = self.exchange.filter(|exchange| exchange.concerns(index))?;
        let buffers = &self.persistent.buckets[index];
        exchange.begin(self.list, &Updated { index, buffers, gradients, parameters })
    }

    /// Updates one bucket during the backward pass, and begins its exchange.
    pub(super) fn run_bucket_early(&mut self, bucket: usize) -> Option<Begun> {
        self.norms_of(bucket);
        let (updated, gradients) = self.update_bucket(bucket, None)?;
        self.begin_exchange(bucket, gradients, updated)
    }

    /// Updates one bucket, unless all updates wait for the norm of all gradients.
    pub(super) fn run_early(&mut self, bucket: usize) {
        if self.persistent.control.is_some() {
            return;
        }
        self.norms_of(bucket);
        self.update_bucket(bucket, None);
    }

    /// Sums the squares of one bucket's gradients.
    fn norms_of(&mut self, bucket: usize) {
        for (number, norms) in self.persistent.norms.iter().enumerate() {
            for &(_, norm) in norms.buckets.iter().filter(|(one, _)| *one == bucket) {
                self.squared_norm(&format!("squared norms {number}"), norms.placements, bucket, norm);
            }
        }
    }

    /// Updates one bucket with one worker's gradients. It computes no gradient norm: that would
    /// cover one worker and one server's part only.
    pub(super) fn run_session(&mut self, bucket: usize) {
        self.update_bucket(bucket, None);
    }

    /// Updates the buckets that [`Self::run_early`] left out because all updates wait for the
    /// gradient norm.
    pub(super) fn run_late(&mut self) {
        if self.persistent.control.is_some() {
            self.gradient_norm(&[]);
            for bucket in self.stage.state.trained_buckets() {
                self.update_bucket(bucket, None);
            }
        }
    }

    fn compute(&mut self, name: &str, kernel: Kernel, reads: &[BufferId], writes: &[BufferId]) {
        self.list.compute(Label::of_step(name, Phase::Update), kernel, reads, writes);
    }

    /// Copies this rank's part of a buffer, one of `parts` equal parts over `group`, to `to`.
    fn slice(&mut self, name: &str, (parts, elements): (usize, usize), group: Group, from: BufferId, to: BufferId) {
        let group = self.list.group(group);
        let kernel = Kernel::Slice { outer: 1, parts, inner: elements };
        self.list.compute_in_group(Label::of_step(name, Phase::Update), kernel, Some(group), &[from], &[to]);
    }

    /// Sums the squares of all reduced gradients, bucket by bucket, except for buckets in `early`,
    /// which were updated before. If the update depends on the norm, also sums them over buckets,
    /// ranks with other shards, and stages.
    fn gradient_norm(&mut self, early: &[Begun]) {
        let persistent = self.persistent;
        let (norms, is_controlled) = (&persistent.norms, persistent.control.is_some());
        let count = norms.len().max(1);
        let totals = self.list.add_buffer("squared norms", BufferRole::Sum, vec![count], DataType::Fp32);
        if is_controlled && norms.is_empty() {
            self.compute("squared norms", Kernel::Zero { elements: 1 }, &[], &[totals]);
        }
        for (number, norms) in norms.iter().enumerate() {
            let name = format!("squared norms {number}");
            for &(bucket, norm) in norms.buckets.iter().filter(|(bucket, _)| !has(early, *bucket)) {
                self.squared_norm(&name, norms.placements, bucket, norm);
            }
            if is_controlled {
                let axes: Vec<Axis> = norms.placements.sharded_axes().collect();
                let sum = self.list.add_view("squared norms", totals, number, vec![1]);
                self.compute(&name, Kernel::Sum { elements: norms.buckets.len() }, &[norms.root], &[sum]);
                if !axes.is_empty() {
                    self.list.all_reduce_of_step(&name, Group::over(axes), sum);
                }
            }
        }
        if let Some(control) = persistent.control {
            self.decide_update(totals, count, control);
        }
    }

    /// Sums the squares of the reduced gradients of a bucket. Without an update control, this sum
    /// is reported as a metric.
    fn squared_norm(&mut self, name: &str, placements: Placements, bucket: usize, norm: BufferId) {
        let Some(gradient) = self.gradients.reduced(bucket) else { return };
        let elements = self.list.elements(gradient);
        self.compute(name, Kernel::SumOfSquares { elements }, &[gradient], &[norm]);
        if self.persistent.control.is_none() {
            self.list.add_metric(Metric { kind: MetricKind::SquaredGradientNorm, buffer: norm, placements });
        }
    }

    /// Sums the squares over all stages, and decides from the norm whether and how parameters are
    /// updated.
    fn decide_update(&mut self, totals: BufferId, elements: usize, control: BufferId) {
        let plan = self.stage.plan;
        let mut reads = vec![self.sum_over_stages("squared norm", Some((totals, elements)))];
        let weighted = plan.training.weighs_classes();
        if weighted {
            reads.push(self.weight_of_labels());
        }
        let predictions = if weighted { self.stage.predictions() } else { 0 };
        let (clip, scaled) = (plan.training.clip_norm.is_some(), plan.scales_loss());
        let kernel = Kernel::UpdateControl { clip, scaled, predictions };
        self.compute("update control", kernel, &reads, &[control]);
    }

    /// Sums the weights of the step's labels over all ranks. Stages without the loss have none.
    fn weight_of_labels(&mut self) -> BufferId {
        let own = self.persistent.find(WEIGHT).map(|own| {
            let sum = self.list.add_buffer(WEIGHT, BufferRole::Sum, vec![1], DataType::Fp32);
            self.compute(WEIGHT, Kernel::Sum { elements: 1 }, &[own], &[sum]);
            let axes = self.stage.summed_axes(self.stage.placements_of_sum(WEIGHT));
            if !axes.is_empty() {
                self.list.all_reduce_of_step(WEIGHT, Group::over(axes), sum);
            }
            (sum, 1)
        });
        self.sum_over_stages(WEIGHT, own)
    }

    /// Sums the elements of a stage's buffer, which are equal on all its ranks, and then these sums
    /// over all stages. A stage without a buffer contributes zero.
    fn sum_over_stages(&mut self, name: &str, own: Option<(BufferId, usize)>) -> BufferId {
        let sum = self.list.add_buffer(name, BufferRole::Sum, vec![1], DataType::Fp32);
        let mesh = self.stage.mesh;
        let stages = self.stage.updating_stages();
        if stages.clone().all(|stage| mesh.stage(stage).has_sizes_of(mesh.stage(stages.start))) {
            self.sum_or_zero(name, own, sum);
            if stages.len() > 1 {
                self.list.all_reduce_of_step(name, Group::across(stages.collect()), sum);
            }
        } else {
            // The all-reduce is over all ranks of all stages. In each stage, one rank contributes
            // the stage's sum and the others contribute zero.
            let ranks = self.stage.lowering.mesh.ranks();
            let contributions = self.list.add_buffer(name, BufferRole::Sum, vec![ranks], DataType::Fp32);
            let first = self.list.add_view(name, contributions, 0, vec![1]);
            self.compute(name, Kernel::Zero { elements: ranks }, &[], &[contributions]);
            self.sum_or_zero(name, own, first);
            self.slice(name, (ranks, 1), Group::over(Axis::WITHIN_STAGE.to_vec()), contributions, sum);
            self.list.all_reduce_of_step(name, Group::everyone(mesh), sum);
        }
        sum
    }

    fn sum_or_zero(&mut self, name: &str, own: Option<(BufferId, usize)>, sum: BufferId) {
        match own {
            Some((numbers, elements)) => self.compute(name, Kernel::Sum { elements }, &[numbers], &[sum]),
            None => self.compute(name, Kernel::Zero { elements: 1 }, &[], &[sum]),
        }
    }

    /// Whether a rank keeps whole parameters of a bucket, but updates only a shard of them.
    fn gathers(&self, bucket: usize) -> bool {
        let state = self.stage.state;
        state.buckets[bucket].shards > 1 && !state.shards_parameters(bucket)
    }

    /// Gathers the updated shards of a bucket, if ranks keep whole parameters.
    fn gather(&mut self, bucket: usize, updated: BufferId) {
        if self.gathers(bucket) {
            let (name, buffers) = (format!("parameters {bucket}"), [updated, self.persistent.buckets[bucket].parameters]);
            let group = self.stage.state.buckets[bucket].shard_group();
            self.list.collective_of_step(&name, Collective::AllGather, group, buffers, Phase::Update);
        }
    }

    /// Updates a bucket, or the rank's shard of it. Returns the buffers with the new parameters and
    /// with the gradients, which are no longer needed.
    fn update_bucket(&mut self, index: usize, staged: Option<&StagedStates>) -> Option<(BufferId, BufferId)> {
        let (state, persistent) = (self.stage.state, self.persistent);
        let (bucket, buffers) = (&state.buckets[index], &persistent.buckets[index]);
        let elements = bucket.shard_elements();
        let gradients = self.gradients.reduced(index).or(buffers.gradients)?;
        let states = staged.map_or(buffers.states.as_slice(), |staged| staged.of_bucket(index));
        let name = format!("parameters {index}");
        // A rank that keeps whole parameters updates a copy of its shard, which is then gathered.
        let updated = if self.gathers(index) {
            let shard = self.list.add_buffer(&name, BufferRole::Workspace, vec![elements], state.precision);
            // With a single-precision copy, the update reads that copy and not the shard.
            if !state.has_master_copy {
                let group = bucket.shard_group();
                self.slice(&name, (bucket.shards, elements), group, buffers.parameters, shard);
            }
            shard
        } else {
            buffers.parameters
        };
        let training = &self.stage.plan.training;
        let controlled = persistent.control.is_some();
        let exempt = bucket.training == BucketTraining::Exempt;
        let reads: Vec<BufferId> = std::iter::once(gradients).chain(persistent.control).collect();
        let writes: Vec<BufferId> = std::iter::once(updated).chain(states.iter().copied()).collect();
        match self.stage.plan.optimizer {
            Optimizer::Sgd => {
                let (momentum, nesterov) = (training.momentum != 0.0, training.nesterov);
                self.compute(&name, Kernel::Sgd { elements, momentum, nesterov, controlled, exempt }, &reads, &writes);
            }
            Optimizer::Lamb => self.update_by_lamb(index, &name, (&reads, &writes)),
            Optimizer::Muon if let Some(matrix) = bucket.matrix => self.update_by_muon(index, &name, matrix, (&reads, &writes)),
            Optimizer::Adam | Optimizer::AdamW | Optimizer::Muon => {
                self.compute(&name, Kernel::AdamW { elements, controlled, exempt }, &reads, &writes);
            }
        }
        Some((updated, gradients))
    }

    /// Updates the one parameter of a bucket by LAMB: each rank finds the direction of its shard,
    /// the ranks add the norms of their shards, and each steps along its own.
    fn update_by_lamb(&mut self, index: usize, name: &str, (reads, writes): (&[BufferId], &[BufferId])) {
        let bucket = &self.stage.state.buckets[index];
        let elements = bucket.shard_elements();
        let controlled = self.persistent.control.is_some();
        let exempt = bucket.training == BucketTraining::Exempt;
        let direction = self.list.add_buffer(name, BufferRole::Workspace, vec![elements], DataType::Fp32);
        let norms = self.list.add_buffer(name, BufferRole::Sum, vec![2], DataType::Fp32);
        // After the parameter come the two moments and, in mixed precision, its master copy.
        let (updated, moments, master) = (writes[0], &writes[1..3], writes.get(3).copied());
        let parameter = master.unwrap_or(updated);
        let direction_reads = [reads, &[parameter]].concat();
        let direction_writes = [&[direction], moments, &[norms]].concat();
        self.compute(name, Kernel::LambDirection { elements, controlled, exempt }, &direction_reads, &direction_writes);
        let axes: Vec<Axis> = placements_after_reduction(bucket).sharded_axes().collect();
        if !axes.is_empty() {
            self.list.all_reduce_of_step(name, Group::over(axes), norms);
        }
        let step_reads: Vec<BufferId> = std::iter::once(direction).chain(self.persistent.control).chain([norms]).collect();
        let step_writes: Vec<BufferId> = std::iter::once(updated).chain(master).collect();
        self.compute(name, Kernel::LambStep { elements, controlled }, &step_reads, &step_writes);
    }

    fn update_running_statistics(&mut self) {
        for BatchStatistics { axes, root } in self.persistent.statistics.iter().filter(|one| !one.axes.is_empty()) {
            self.list.all_reduce_of_step("batch statistics", Group::over(axes.clone()), *root);
        }
        let micro_batches = self.stage.micro_batches();
        let mut updated = Vec::new();
        for running in &self.stage.state.running {
            let buffers = [&running.statistics, &running.name].map(|name| self.persistent.find(name));
            let [Some(statistics), Some(buffer)] = buffers else { continue };
            let channels = *running.shape.last().expect("invariant: running statistics have channels");
            let kernel = Kernel::RunningStatistics { channels, contributions: running.contributions * micro_batches };
            self.compute(&running.name, kernel, &[statistics], &[buffer]);
            updated.push(buffer);
        }
        if let Some(exchange) = self.exchange {
            exchange.average(self.list, "running statistics", &updated);
        }
    }
}

/// Whether the exchange of a bucket is among those that have begun.
fn has(begun: &[Begun], bucket: usize) -> bool {
    begun.iter().any(|begun| begun.index == bucket)
}
