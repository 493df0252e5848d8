//! The persistent buffers of a stage: parameters, gradients, optimizer state, running statistics
//! and sums. Training and evaluation declare the same buffers in the same order.

use super::averaging::{Averaging, Slice};
use super::list::ListBuilder;
use super::push::Push;
use super::stage::{Duty, Stage};
use crate::compile::recipe::Constant;
use crate::compile::state::{Bucket, Member, RunningStatistics};
use crate::mesh::Axis;
use crate::placement::{Placement, Placements};
use crate::program::{BufferId, BufferRole, MemoryKind, Metric, MetricKind, StateContents, StateValue, TensorShard};
use foretell_models::{Control, Role, TOP_FIVE, TensorId, WEIGHT};
use foretell_units::DataType;
use rustc_hash::FxHashMap;
use std::collections::BTreeMap;
use std::sync::Arc;

/// The alignment of parts within a buffer, in units of the buffer (elements or bytes): at least a
/// cache line of 64 bytes.
const BUFFER_ALIGNMENT: usize = 64;

/// The fields of the update control that a run reports.
const CONTROL_METRICS: [(Control, MetricKind); 3] = [
    (Control::LossScale, MetricKind::LossScale),
    (Control::SquaredGradientNorm, MetricKind::SquaredGradientNorm),
    (Control::SkippedSteps, MetricKind::SkippedSteps),
];

/// The persistent buffers of a stage.
#[derive(Default)]
pub(super) struct PersistentBuffers {
    /// Parameters, gradients, running statistics and sums, by tensor name. Tensors that are kept as
    /// shards of a bucket have no entry.
    by_name: FxHashMap<String, BufferId>,
    pub(super) buckets: Vec<BucketBuffers>,
    pub(super) norms: Vec<SquaredNorms>,
    /// The input and state of gradient clipping and loss scaling, if the plan has either.
    pub(super) control: Option<BufferId>,
    pub(super) statistics: Vec<BatchStatistics>,
}

/// The persistent buffers of a bucket.
pub(super) struct BucketBuffers {
    /// All parameters, or the rank's shard if ZeRO shards parameters.
    pub(super) parameters: BufferId,
    /// All gradients, or the rank's shard if ZeRO shards gradients; `None` if the bucket is frozen.
    pub(super) gradients: Option<BufferId>,
    /// The optimizer's values, each for the rank's shard. The single-precision copy comes last.
    /// Empty if the bucket is frozen.
    pub(super) states: Vec<BufferId>,
    /// The outer parameters, and the outer optimizer's velocity if it has one. Empty if replicas
    /// have no outer optimizer.
    pub(super) outer: Vec<BufferId>,
    /// The buffers of an exchange that overlaps with steps.
    pub(super) travelling: InFlightExchange,
    /// Only for workers: each server's part of the bucket.
    pub(super) parts: Vec<ServerPart>,
    /// Only for servers whose workers are not synchronised: for each worker, a copy of the
    /// parameters and the buffer for its push.
    pub(super) sessions: Vec<[BufferId; 2]>,
}

/// A server's part of a worker's bucket.
pub(super) struct ServerPart {
    pub(super) parameters: BufferId,
    pub(super) gradients: BufferId,
    /// The rounding errors of earlier pushes; `None` if pushes are not compressed.
    pub(super) residual: Option<BufferId>,
}

/// The changes of a bucket whose exchange overlaps steps. Fragments use the same memory, one after
/// the other.
#[derive(Default)]
pub(super) struct InFlightExchange {
    /// The changes, then their sum, in single precision; `None` if changes are kept in messages, or
    /// if no exchange overlaps with steps.
    pub(super) changes: Option<BufferId>,
    /// The slices in which the changes are exchanged.
    pub(super) slices: Vec<Slice>,
}

/// The sums of squared gradients of buckets with equal placements after reduction.
pub(super) struct SquaredNorms {
    pub(super) placements: Placements,
    /// One number for each bucket.
    pub(super) root: BufferId,
    /// Each bucket's index, and its element of `root` as a view.
    pub(super) buckets: Vec<(usize, BufferId)>,
}

/// The sums of batch statistics that are reduced together.
pub(super) struct BatchStatistics {
    /// The axes to reduce over; none if every rank has whole sums.
    pub(super) axes: Vec<Axis>,
    pub(super) root: BufferId,
}

impl PersistentBuffers {
    /// Declares all persistent buffers of a stage.
    pub(super) fn declare(list: &mut ListBuilder, stage: &Stage<'_>) -> Self {
        let mut buffers = Self::default();
        for index in 0..stage.state.buckets.len() {
            buffers.declare_bucket(list, stage, index);
        }
        buffers.declare_travelling(list, stage);
        buffers.norms = squared_norms(list, stage);
        buffers.control = update_control(list, stage);
        buffers.declare_statistics(list, stage);
        buffers.declare_constants(list, stage);
        buffers.declare_sums(list, stage);
        buffers
    }

    /// The buffer of a tensor, by its name.
    pub(super) fn find(&self, name: &str) -> Option<BufferId> {
        self.by_name.get(name).copied()
    }

    /// Parameters, gradients and optimizer state of one bucket.
    fn declare_bucket(&mut self, list: &mut ListBuilder, stage: &Stage<'_>, index: usize) {
        let state = stage.state;
        let bucket = &state.buckets[index];
        let shape = |is_sharded: bool| vec![if is_sharded { bucket.shard_elements() } else { bucket.elements }];
        let (shards_parameters, shards_gradients) = (state.shards_parameters(index), state.shards_gradients(index));
        let name = format!("parameters {index}");
        let parameters = list.add_persistent(&name, BufferRole::Parameter, shape(shards_parameters), state.precision);
        let is_frozen = bucket.training.is_frozen();
        let push = Push::of(stage.plan);
        // Each unsynchronised worker has its own push buffer.
        let pacing = stage.plan.pacing().filter(|_| stage.duty == Duty::Server);
        let workers = pacing.map_or(0, |pacing| pacing.workers);
        let name = format!("gradients {index}");
        // Compressed pushes of these workers are decompressed into one gradient buffer, one at a
        // time. An update that waits for several pushes adds them there.
        let adds = pacing.is_some_and(|pacing| pacing.quorum.is_some());
        let holds_gradients = workers == 0 || push.is_compressed() || adds;
        let gradients = (!is_frozen && holds_gradients)
            .then(|| list.add_persistent(&name, BufferRole::Gradient, shape(shards_gradients), DataType::Fp32));
        let is_offloaded = stage.plan.layout.offload.is_of_optimizer();
        let memory = if is_offloaded { MemoryKind::Host } else { MemoryKind::Device };
        let state_count = if is_frozen { 0 } else { bucket.optimizer_states + usize::from(state.has_master_copy) };
        let states: Vec<BufferId> = (0..state_count)
            .map(|number| {
                let name = format!("optimizer state {index}.{number}");
                let buffer = list.add_persistent(&name, BufferRole::OptimizerState, shape(true), DataType::Fp32);
                list.set_memory(buffer, memory);
                buffer
            })
            .collect();
        let outer = stage.plan.mode.outer().filter(|_| !is_frozen);
        let outer_values = [StateValue::OuterParameter, StateValue::OuterVelocity];
        let outer_count = outer.map_or(0, |outer| if outer.momentum == 0.0 { 1 } else { 2 });
        let outer: Vec<BufferId> = (0..outer_count)
            .map(|number| {
                let name = format!("outer state {index}.{number}");
                list.add_persistent(&name, BufferRole::OptimizerState, shape(true), DataType::Fp32)
            })
            .collect();
        let members: Arc<[(usize, TensorShard)]> =
            bucket.members.iter().map(|member| (member.offset, tensor_shard(member))).collect();
        let contents = |value: StateValue, is_sharded: bool| StateContents::Tensors {
            value,
            members: Arc::clone(&members),
            axes: if is_sharded { bucket.shard_axes().into() } else { Arc::from([]) },
            replicas: stage.plan.replica_axis().filter(|_| stage.plan.mode.differs_after_exchange(value) && !is_frozen),
        };
        // A worker's parameters are copies of the servers', pulled at the start of each step, so
        // they are no state of the run.
        if is_frozen || stage.duty != Duty::Worker {
            list.set_state(parameters, contents(StateValue::Parameter, shards_parameters));
        }
        for (number, &buffer) in states.iter().enumerate() {
            let is_master = state.has_master_copy && number == bucket.optimizer_states;
            let value = if is_master { StateValue::Master } else { StateValue::Optimizer(number) };
            list.set_state(buffer, contents(value, true));
        }
        for (value, &buffer) in outer_values.into_iter().zip(&outer) {
            list.set_state(buffer, contents(value, true));
        }
        for member in &bucket.members {
            if !shards_parameters {
                let parameter = list.add_view(&member.name, parameters, member.offset, member.shape.clone());
                self.by_name.insert(member.name.clone(), parameter);
            }
            if let Some(gradients) = gradients.filter(|_| !shards_gradients) {
                let name = format!("{}.gradient", member.name);
                let gradient = list.add_view(&name, gradients, member.offset, member.shape.clone());
                self.by_name.insert(name, gradient);
            }
        }
        let parts = match gradients {
            Some(gradients) if stage.duty == Duty::Worker => {
                let residual = push.is_compressed().then(|| {
                    let name = format!("residual {index}");
                    let residual = list.add_persistent(&name, BufferRole::Gradient, shape(false), DataType::Fp32);
                    let (value, members) = (StateValue::Residual, Arc::clone(&members));
                    let (axes, replicas) = (Arc::from([]), Some(Axis::Data));
                    list.set_state(residual, StateContents::Tensors { value, members, axes, replicas });
                    residual
                });
                parts_of_servers(list, stage, [parameters, gradients], residual)
            }
            _ => Vec::new(),
        };
        let sessions = (0..workers).map(|worker| {
            let mut add = |name: &str, role: BufferRole, elements: usize, data_type: DataType| {
                list.add_persistent(&format!("{name} {index} of worker {worker}"), role, vec![elements], data_type)
            };
            let elements = bucket.shard_elements();
            let (size, data_type) = push.message(elements);
            [
                add("parameters", BufferRole::ParameterCopy, elements, state.precision),
                add("gradients", BufferRole::Gradient, size, data_type),
            ]
        });
        let sessions = sessions.collect();
        let travelling = InFlightExchange::default();
        self.buckets.push(BucketBuffers { parameters, gradients, states, outer, travelling, parts, sessions });
    }

    /// Declares the buffers of an exchange that overlaps with steps. A run stops only between
    /// exchanges, so they are no part of the state.
    fn declare_travelling(&mut self, list: &mut ListBuilder, stage: &Stage<'_>) {
        let overlap = stage.plan.mode.overlap();
        if overlap == 0 {
            return;
        }
        let averaging = Averaging::of(stage.plan);
        let trained: Vec<usize> = stage.state.trained_buckets().collect();
        let elements = |index: usize| stage.state.buckets[index].shard_elements();
        // The offsets of a bucket's buffers. Every fragment's offsets start at 0.
        let mut ends = vec![0; stage.plan.mode.fragments()];
        let mut place = |index: usize, size: usize| {
            let end = &mut ends[stage.state.buckets[index].fragment];
            *end += size.next_multiple_of(BUFFER_ALIGNMENT);
            *end - size.next_multiple_of(BUFFER_ALIGNMENT)
        };
        let mut places = Vec::new();
        for &index in &trained {
            let sizes = averaging.sizes(elements(index), overlap);
            places.push(sizes.into_iter().map(|size| (place(index, size), size)).collect::<Vec<_>>());
        }
        let data_type = if averaging.is_compressed() { DataType::Int8 } else { DataType::Fp32 };
        let size = ends.into_iter().max().unwrap_or(0);
        let root = list.add_persistent("changes", BufferRole::Workspace, vec![size], data_type);
        for (index, places) in trained.into_iter().zip(places) {
            let name = format!("changes {index}");
            let mut buffers = places.into_iter().map(|(start, size)| list.add_view(&name, root, start, vec![size]));
            let changes = if averaging.is_compressed() { None } else { buffers.next() };
            let slices = averaging.cut(elements(index), overlap, &mut buffers);
            self.buckets[index].travelling = InFlightExchange { changes, slices };
        }
    }

    /// Running statistics, and the sums of batch statistics that update them. Sums over the same
    /// axes share a buffer, so that one collective reduces them.
    fn declare_statistics(&mut self, list: &mut ListBuilder, stage: &Stage<'_>) {
        let mut by_axes: BTreeMap<Vec<Axis>, Vec<&RunningStatistics>> = BTreeMap::new();
        for running in &stage.state.running {
            by_axes.entry(stage.summed_axes(running.statistics_placements)).or_default().push(running);
        }
        for (axes, members) in by_axes {
            let elements: usize = members.iter().map(|member| member.shape.iter().product::<usize>()).sum();
            let root = list.add_persistent("batch statistics", BufferRole::Sum, vec![elements], DataType::Fp32);
            let mut offset = 0;
            for running in members {
                let statistics = list.add_view(&running.statistics, root, offset, running.shape.clone());
                self.by_name.insert(running.statistics.clone(), statistics);
                offset += running.shape.iter().product::<usize>();
                let buffer = list.add_persistent(&running.name, BufferRole::Running, running.shape.clone(), DataType::Fp32);
                let shard = TensorShard { tensor: running.tensor, placements: running.placements, zigzag: None };
                let members = Arc::from([(0, shard)]);
                let (axes, replicas) = (Arc::from([]), None);
                list.set_state(buffer, StateContents::Tensors { value: StateValue::Running, members, axes, replicas });
                self.by_name.insert(running.name.clone(), buffer);
            }
            self.statistics.push(BatchStatistics { axes, root });
        }
    }

    /// Constant tensors, whose values the graph gives. Evaluation declares them too.
    fn declare_constants(&mut self, list: &mut ListBuilder, stage: &Stage<'_>) {
        for Constant { name, values } in &stage.state.constants {
            let buffer = list.add_persistent(name, BufferRole::Running, vec![values.len()], DataType::Fp32);
            list.set_state(buffer, StateContents::Constant(Arc::clone(values)));
            self.by_name.insert(name.clone(), buffer);
        }
    }

    /// The loss, the numbers of correct predictions and of labels among the five best classes, the
    /// weight of the labels, and the number of expert choices without a free slot, in the stage
    /// that computes them.
    fn declare_sums(&mut self, list: &mut ListBuilder, stage: &Stage<'_>) {
        let operators = stage.forward_operators();
        let outputs = operators.into_iter().flat_map(|id| &stage.operator(id).outputs);
        let name_of = |tensor: TensorId| &stage.lowering.graph.tensor(tensor).name;
        let is_own = |tensor: TensorId| [WEIGHT, TOP_FIVE].contains(&name_of(tensor).as_str());
        // Sums that only training or only evaluation has come last, so that the shared ones have
        // the same offsets in both.
        let (shared, own): (Vec<_>, Vec<_>) = outputs.map(|output| output.tensor).partition(|&tensor| !is_own(tensor));
        for id in shared.into_iter().chain(own) {
            let tensor = stage.lowering.graph.tensor(id);
            if tensor.role != Role::Sum || self.by_name.contains_key(&tensor.name) {
                continue;
            }
            let buffer = list.add_persistent(&tensor.name, BufferRole::Sum, vec![1], DataType::Fp32);
            self.by_name.insert(tensor.name.clone(), buffer);
            let kind = match tensor.name.as_str() {
                "loss" => MetricKind::Loss,
                "dropped" => MetricKind::Dropped,
                WEIGHT => MetricKind::Weight,
                TOP_FIVE => MetricKind::TopFive,
                "correct" => MetricKind::Correct,
                other => unreachable!("invariant: no sum is called `{other}`"),
            };
            let placements = stage.lowering.sharding.produced(id);
            list.add_metric(Metric { kind, buffer, placements });
        }
    }
}

/// Each server's part of a worker's parameters and gradients, and of the rounding errors in
/// `residual`.
fn parts_of_servers(
    list: &mut ListBuilder,
    stage: &Stage<'_>,
    [parameters, gradients]: [BufferId; 2],
    residual: Option<BufferId>,
) -> Vec<ServerPart> {
    let servers = stage.plan.mode.servers().max(1);
    let mut part = |buffer: BufferId, number: usize| {
        let (name, elements) = (Arc::clone(&list.buffer(buffer).name), list.elements(buffer) / servers);
        list.add_view(&name, buffer, number * elements, vec![elements])
    };
    let all = (0..servers).map(|number| ServerPart {
        parameters: part(parameters, number),
        gradients: part(gradients, number),
        residual: residual.map(|residual| part(residual, number)),
    });
    all.collect()
}

fn tensor_shard(member: &Member) -> TensorShard {
    TensorShard { tensor: member.parameter, placements: member.placements, zigzag: member.zigzag }
}

/// The buffers for squared gradient norms. Parameters that several stages hold count in the first
/// of those stages.
fn squared_norms(list: &mut ListBuilder, stage: &Stage<'_>) -> Vec<SquaredNorms> {
    let mut by_placements: BTreeMap<Placements, Vec<usize>> = BTreeMap::new();
    for index in stage.state.trained_buckets() {
        let bucket = &stage.state.buckets[index];
        if bucket.stages.first() == Some(&stage.index) && stage.duty != Duty::Worker {
            by_placements.entry(placements_after_reduction(bucket)).or_default().push(index);
        }
    }
    let norms = by_placements.into_iter().enumerate().map(|(number, (placements, buckets))| {
        let name = format!("squared norms {number}");
        let root = list.add_persistent(&name, BufferRole::Sum, vec![buckets.len()], DataType::Fp32);
        let view = |(place, index): (usize, usize)| (index, list.add_view(&name, root, place, vec![1]));
        let buckets = buckets.into_iter().enumerate().map(view).collect();
        SquaredNorms { placements, root, buckets }
    });
    norms.collect()
}

/// The placements of a bucket's gradients after their reduction.
pub(super) fn placements_after_reduction(bucket: &Bucket) -> Placements {
    bucket.gradient.partial_axes().fold(bucket.gradient, |reduced, axis| {
        reduced.with(axis, if bucket.scatters_over(axis) { Placement::Shard(0) } else { Placement::Replicate })
    })
}

/// The buffer of the update control: the values that gradient clipping and loss scaling keep from
/// step to step. `None` if the plan needs none, or on workers.
fn update_control(list: &mut ListBuilder, stage: &Stage<'_>) -> Option<BufferId> {
    let scales_loss = stage.plan.scales_loss();
    let training = &stage.plan.training;
    if stage.duty == Duty::Worker || training.clip_norm.is_none() && !training.weighs_classes() && !scales_loss {
        return None;
    }
    let control = list.add_persistent("update control", BufferRole::OptimizerState, vec![Control::LENGTH], DataType::Fp32);
    let scale = if scales_loss { stage.plan.training.loss_scale.initial } else { 1.0 };
    list.set_state(control, StateContents::Control(vec![scale]));
    // The control is equal on all ranks: the first stage reports it.
    if stage.index == stage.updating_stages().start {
        let reported = CONTROL_METRICS.into_iter().filter(|(_, kind)| scales_loss || *kind == MetricKind::SquaredGradientNorm);
        for (number, kind) in reported {
            let buffer = list.add_view("update control", control, number.place(), vec![1]);
            list.add_metric(Metric { kind, buffer, placements: Placements::default() });
        }
    }
    Some(control)
}
