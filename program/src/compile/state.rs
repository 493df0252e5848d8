//! The state that a stage keeps from step to step: parameters in buckets, with their gradients and
//! optimizer state, and running statistics.
//!
//! A bucket is a run of parameters whose gradients are complete at about the same time and have the
//! same placements. One collective reduces it and one kernel updates it. ZeRO (Rajbhandari et al.
//! 2020) is the placement of a bucket's optimizer state, gradients and parameters along the mesh
//! axes over which its gradients are partial sums: `shard`, `context`, and `expert` outside of
//! experts. Training and evaluation have the same state at the same offsets.

use super::cuts::Cuts;
use super::lowering::Lowering;
use super::recipe::{BucketTraining, Constant, constants, exempt_parameters, frozen_parameters};
use crate::mesh::{Axis, Group, Mesh, StageMesh};
use crate::placement::{Placement, Placements};
use crate::plan::{Optimizer, Plan, PlanError};
use foretell_models::{Graph, HiddenMatrix, Kernel, Operator, Role, TensorId, Zigzag};
use foretell_units::{Bytes, DataType};
use rustc_hash::FxHashMap;
use std::collections::BTreeSet;

/// The alignment of a parameter's start in its bucket, in elements: 64 bytes in single precision, a
/// cache line.
pub const BUCKET_ALIGNMENT: usize = 16;

/// One parameter of a bucket.
#[derive(Clone, Debug)]
pub(super) struct Member {
    pub(super) parameter: TensorId,
    pub(super) name: String,
    /// The shape on one rank.
    pub(super) shape: Vec<usize>,
    pub(super) placements: Placements,
    /// The order in which rows for positions are held, if it is not their own.
    pub(super) zigzag: Option<Zigzag>,
    /// The first element within the bucket.
    pub(super) offset: usize,
}

/// Parameters that are reduced and updated together.
#[derive(Clone, Debug)]
pub(super) struct Bucket {
    pub(super) members: Vec<Member>,
    /// The number of elements, padding included.
    pub(super) elements: usize,
    /// The axes whose ranks hold the parts that ZeRO cuts the bucket into; none without ZeRO.
    shard_axes: Vec<Axis>,
    /// The number of equal parts that ZeRO cuts the bucket into; 1 without ZeRO.
    pub(super) shards: usize,
    /// The block before which the parameters are gathered, if ZeRO shards them too.
    block: Option<usize>,
    /// The placements of the gradients as the stage's operators leave them, with every sharded
    /// dimension replaced by 0.
    pub(super) gradient: Placements,
    /// The stages that have these parameters, ascending.
    pub(super) stages: Vec<usize>,
    /// The number of operators that add to the gradients, for one micro-batch.
    pub(super) writers: usize,
    pub(super) training: BucketTraining,
    /// How the one parameter forms matrices, if the optimizer updates them as matrices.
    pub(super) matrix: Option<HiddenMatrix>,
    /// The number of optimizer values for each parameter, without the single-precision copy. 0 on
    /// workers of parameter servers, which keep these values.
    pub(super) optimizer_states: usize,
    /// The fragment of an exchange between replicas that the bucket belongs to; 0 if exchanges are
    /// not in fragments.
    pub(super) fragment: usize,
}

/// The running statistics of one batch norm.
#[derive(Clone, Debug)]
pub(super) struct RunningStatistics {
    pub(super) tensor: TensorId,
    pub(super) name: String,
    /// The shape on one rank.
    pub(super) shape: Vec<usize>,
    pub(super) placements: Placements,
    /// The name of the tensor with the sums of batch statistics that update them.
    pub(super) statistics: String,
    pub(super) statistics_placements: Placements,
    /// The number of sample groups that one micro-batch adds to the statistics, over all ranks of a
    /// replica.
    pub(super) contributions: usize,
}

/// The persistent state of a stage.
#[derive(Clone, Debug)]
pub(super) struct StageState {
    pub(super) buckets: Vec<Bucket>,
    /// The bucket of each parameter, keyed by name, since evaluation numbers its tensors
    /// differently.
    bucket_of_parameter: FxHashMap<String, usize>,
    /// Whether each rank keeps only its shard of the gradients between micro-batches (ZeRO 2).
    shards_gradients: bool,
    /// Whether ZeRO shards anything.
    shards_state: bool,
    pub(super) gathers: ParameterGathers,
    pub(super) running: Vec<RunningStatistics>,
    /// The number format of the parameters that operators read.
    pub(super) precision: DataType,
    /// Whether the optimizer state has a single-precision copy of the parameters.
    pub(super) has_master_copy: bool,
    /// The constants that the training step reads.
    pub(super) constants: Vec<Constant>,
    /// Whether the optimizer treats each parameter as a whole, so that each has its own bucket.
    one_bucket_each: bool,
    /// The number of fragments that replicas exchange one after the other.
    fragments: usize,
}

/// When parameters that are kept as shards are gathered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ParameterGathers {
    /// Never: every rank keeps whole parameters.
    Never,
    /// Once in a step, before the first pass that reads them: Megatron's overlapped parameter
    /// gather.
    Once,
    /// Whenever a block needs them. They are dropped when no nearby operator reads them (ZeRO 3).
    EveryPass,
}

impl Bucket {
    /// The number of elements of one shard.
    pub(super) fn shard_elements(&self) -> usize {
        self.elements / self.shards
    }

    /// The start and length of every run of elements that belongs to no parameter.
    pub(super) fn gaps(&self) -> Vec<(usize, usize)> {
        let mut gaps = Vec::new();
        let mut end = 0;
        for member in &self.members {
            if member.offset > end {
                gaps.push((end, member.offset - end));
            }
            end = member.offset + member.shape.iter().product::<usize>();
        }
        if self.elements > end {
            gaps.push((end, self.elements - end));
        }
        gaps
    }

    /// Whether the reduction over `axis` leaves each rank only its shard.
    pub(super) fn scatters_over(&self, axis: Axis) -> bool {
        self.shard_axes.contains(&axis)
    }

    /// The axes whose ranks hold the parts that ZeRO cuts the bucket into; none without ZeRO.
    pub(super) fn shard_axes(&self) -> &[Axis] {
        &self.shard_axes
    }

    /// The ranks that hold the parts.
    pub(super) fn shard_group(&self) -> Group {
        Group::over(self.shard_axes.clone())
    }
}

impl StageState {
    pub(super) fn new(lowering: &Lowering, cuts: &Cuts, stage: usize, plan: &Plan, mesh: &Mesh) -> Result<Self, PlanError> {
        let servers = plan.mode.servers();
        if stage >= cuts.stages {
            let workers = Self::new(lowering, cuts, stage - cuts.stages, plan, mesh)?;
            return Ok(workers.of_servers(servers, cuts.stages, plan));
        }
        if plan.pacing().is_some() {
            refuse_common_versions(lowering, cuts, stage, plan)?;
        }
        let may_shard = plan.layout.zero > 0 && Axis::ZERO.iter().any(|&axis| lowering.mesh.size(axis) > 1);
        let gathers = if may_shard && plan.layout.zero == 3 {
            ParameterGathers::EveryPass
        } else if may_shard && plan.overlap.parameters {
            ParameterGathers::Once
        } else {
            ParameterGathers::Never
        };
        let is_of_stage = |operator: &Operator| cuts.stage(operator) == stage;
        let mut state = Self {
            buckets: Vec::new(),
            bucket_of_parameter: FxHashMap::default(),
            shards_gradients: may_shard && plan.layout.zero >= 2,
            shards_state: may_shard,
            gathers,
            running: running_statistics(lowering, cuts, stage, plan),
            precision: plan.storage(),
            has_master_copy: plan.has_master_copy() && servers == 0,
            constants: constants(&lowering.graph, is_of_stage),
            one_bucket_each: plan.optimizer == Optimizer::Lamb,
            fragments: plan.mode.fragments(),
        };
        let exempt = exempt_parameters(&lowering.graph, &plan.training);
        for completed in completed_gradients(lowering, cuts, stage) {
            refuse_unequal_meshes(lowering, completed.parameter, &completed.stages, stage, mesh)?;
            let training = if exempt.contains(&completed.parameter) { BucketTraining::Exempt } else { BucketTraining::Decayed };
            let matrix = lowering.hidden_matrices.get(&completed.parameter).filter(|_| plan.optimizer == Optimizer::Muon);
            let index = state.add_trained(lowering, completed, (training, matrix.copied()), plan.layout.bucket);
            if servers == 0 {
                state.buckets[index].optimizer_states = plan.optimizer_states_of(matrix.is_some());
            }
        }
        let is_trained = |name: &str| state.bucket_of_parameter(name).is_some();
        for (operator, parameter) in frozen_parameters(&lowering.graph, is_of_stage, is_trained) {
            let stages = stages_with(lowering, cuts, parameter);
            refuse_unequal_meshes(lowering, parameter, &stages, stage, mesh)?;
            state.add_frozen(lowering, operator, parameter, stages, plan.layout.bucket);
        }
        for bucket in &mut state.buckets {
            bucket.elements = bucket.elements.next_multiple_of(BUCKET_ALIGNMENT * bucket.shards * servers.max(1));
        }
        for operator in lowering.graph.operators.iter().filter(|operator| cuts.stage(operator) == stage) {
            for bucket in state.buckets_written(&lowering.graph, operator) {
                state.buckets[bucket].writers += 1;
            }
        }
        Ok(state)
    }

    /// The state of servers whose workers have this state: equal parts of the trained buckets, with
    /// the optimizer's values for them. A server's stage is its workers' stage plus `stages`.
    fn of_servers(mut self, servers: usize, stages: usize, plan: &Plan) -> Self {
        self.buckets.retain(|bucket| !bucket.training.is_frozen());
        self.bucket_of_parameter.clear();
        for (index, bucket) in self.buckets.iter_mut().enumerate() {
            self.bucket_of_parameter.extend(bucket.members.iter().map(|member| (member.name.clone(), index)));
            if servers > 1 {
                (bucket.shard_axes, bucket.shards) = (vec![Axis::Data], servers);
                // Servers shard along `data` even if a single worker has nothing to sum along it.
                bucket.gradient = bucket.gradient.with(Axis::Data, Placement::Partial);
            }
            bucket.stages.iter_mut().for_each(|stage| *stage += stages);
            bucket.optimizer_states = plan.optimizer_states_of(bucket.matrix.is_some());
        }
        Self {
            shards_gradients: true,
            shards_state: true,
            gathers: ParameterGathers::EveryPass,
            running: Vec::new(),
            constants: Vec::new(),
            has_master_copy: plan.has_master_copy(),
            ..self
        }
    }

    /// Adds a parameter with a gradient to a bucket. Returns the bucket's number.
    fn add_trained(
        &mut self,
        lowering: &Lowering,
        completed: CompletedGradient,
        update: (BucketTraining, Option<HiddenMatrix>),
        limit: Bytes,
    ) -> usize {
        let CompletedGradient { operator, parameter, gradient, stages, .. } = completed;
        let kind = bucket_kind(lowering.sharding.produced(gradient));
        self.add_to_bucket(lowering, (operator, parameter), (kind, stages, update), limit)
    }

    /// Adds a frozen parameter to a bucket. ZeRO shards it only if it shards parameters: there are
    /// no gradients and no optimizer state.
    fn add_frozen(&mut self, lowering: &Lowering, operator: usize, parameter: TensorId, stages: Vec<usize>, limit: Bytes) {
        let settled = lowering.sharding.settled(parameter);
        // ZeRO shards a bucket over the axes along which its gradients are `Partial`. A frozen
        // bucket has no gradients, so set these placements here.
        let kind = Axis::ZERO.into_iter().fold(settled, |kind, axis| {
            let is_sharded = self.gathers == ParameterGathers::EveryPass && kind.get(axis) == Placement::Replicate;
            if is_sharded { kind.with(axis, Placement::Partial) } else { kind }
        });
        self.add_to_bucket(lowering, (operator, parameter), (bucket_kind(kind), stages, (BucketTraining::Frozen, None)), limit);
    }

    /// Adds a parameter to the last bucket of its kind, or to a new one if that bucket would become
    /// larger than `limit`. Returns the bucket's number.
    fn add_to_bucket(
        &mut self,
        lowering: &Lowering,
        (operator, parameter): (usize, TensorId),
        (kind, stages, (training, matrix)): (Placements, Vec<usize>, (BucketTraining, Option<HiddenMatrix>)),
        limit: Bytes,
    ) -> usize {
        let placements = lowering.sharding.settled(parameter);
        // Parameters that are dropped after use are gathered block by block.
        let is_dropped = self.gathers == ParameterGathers::EveryPass && stages.len() == 1;
        let block = is_dropped.then(|| lowering.graph.operators[operator].block);
        let shape = placements.local_shape(&lowering.shape(parameter), &lowering.mesh);
        let elements: usize = shape.iter().product();
        let padded = elements.next_multiple_of(BUCKET_ALIGNMENT);
        let most_elements = limit.count() as usize / 4;
        // Frozen parameters are not exchanged.
        let fragment = if training.is_frozen() { 0 } else { first_block(lowering, parameter) % self.fragments };
        let takes_more = training.is_frozen() || !(self.one_bucket_each || matrix.is_some());
        let is_alike = |bucket: &Bucket| {
            let kinds = (bucket.gradient, bucket.block, bucket.training, bucket.fragment);
            bucket.stages == stages && bucket.matrix.is_none() && kinds == (kind, block, training, fragment)
        };
        let open = self.buckets.iter().rposition(is_alike);
        let open = open.filter(|&index| takes_more && self.buckets[index].elements + padded <= most_elements);
        let index = open.unwrap_or_else(|| {
            let shard_axes = if self.shards_state { shard_axes(kind, &lowering.mesh) } else { Vec::new() };
            let shards = shard_axes.iter().map(|&axis| lowering.mesh.size(axis)).product();
            let (members, elements, writers) = (Vec::new(), 0, 0);
            self.buckets.push(Bucket {
                members,
                elements,
                shard_axes,
                shards,
                block,
                gradient: kind,
                stages,
                writers,
                training,
                matrix,
                optimizer_states: 0,
                fragment,
            });
            self.buckets.len() - 1
        });
        let name = lowering.graph.tensor(parameter).name.clone();
        self.bucket_of_parameter.insert(name.clone(), index);
        let bucket = &mut self.buckets[index];
        let zigzag = lowering.sharding.order_of_tensor(&lowering.graph, parameter);
        bucket.members.push(Member { parameter, name, shape, placements, zigzag, offset: bucket.elements });
        bucket.elements += padded;
        index
    }

    /// Whether each rank keeps only its shard of a bucket's gradients between micro-batches.
    pub(super) fn shards_gradients(&self, bucket: usize) -> bool {
        self.shards_gradients && self.buckets[bucket].shards > 1
    }

    /// Whether each rank keeps only its shard of a bucket's parameters between steps.
    pub(super) fn shards_parameters(&self, bucket: usize) -> bool {
        self.gathers != ParameterGathers::Never && self.buckets[bucket].shards > 1
    }

    /// The numbers of the buckets that are trained.
    pub(super) fn trained_buckets(&self) -> impl Iterator<Item = usize> + use<'_> {
        (0..self.buckets.len()).filter(|&bucket| !self.buckets[bucket].training.is_frozen())
    }

    /// The bucket of a gradient tensor.
    pub(super) fn bucket_of_gradient(&self, graph: &Graph, tensor: TensorId) -> Option<usize> {
        // By the parameter's name, since graphs number their tensors differently.
        let Role::ParameterGradient(parameter) = graph.tensor(tensor).role else { return None };
        self.bucket_of_parameter(&graph.tensor(parameter).name)
    }

    /// The bucket of a parameter.
    pub(super) fn bucket_of_parameter(&self, name: &str) -> Option<usize> {
        self.bucket_of_parameter.get(name).copied()
    }

    /// The buckets whose gradients an operator adds to, ascending.
    pub(super) fn buckets_written(&self, graph: &Graph, operator: &Operator) -> BTreeSet<usize> {
        operator.outputs.iter().filter_map(|output| self.bucket_of_gradient(graph, output.tensor)).collect()
    }
}

/// The axes over which ZeRO shards parameters whose gradients have these placements.
fn shard_axes(gradient: Placements, mesh: &StageMesh) -> Vec<Axis> {
    Axis::ZERO.into_iter().filter(|&axis| gradient.get(axis) == Placement::Partial && mesh.size(axis) > 1).collect()
}

/// A parameter, and where its stage completes its gradient.
struct CompletedGradient {
    /// The index of the last operator that adds to the gradient.
    operator: usize,
    /// The position of the gradient among that operator's outputs.
    output: usize,
    parameter: TensorId,
    gradient: TensorId,
    /// The stages that have the parameter, ascending.
    stages: Vec<usize>,
}

/// The parameters of a stage in the order in which the backward pass completes their gradients.
/// Parameters of several stages come last, by id: all of these stages make the same buckets of
/// them.
fn completed_gradients(lowering: &Lowering, cuts: &Cuts, stage: usize) -> Vec<CompletedGradient> {
    let graph = &lowering.graph;
    let mut last: FxHashMap<TensorId, (usize, usize, TensorId)> = FxHashMap::default();
    for (index, operator) in graph.operators.iter().enumerate().filter(|(_, operator)| cuts.stage(operator) == stage) {
        for (position, output) in operator.outputs.iter().enumerate() {
            if let Role::ParameterGradient(parameter) = graph.tensor(output.tensor).role {
                last.insert(parameter, (index, position, output.tensor));
            }
        }
    }
    let mut completed: Vec<CompletedGradient> = last
        .into_iter()
        .map(|(parameter, (operator, output, gradient))| {
            let stages = stages_with(lowering, cuts, parameter);
            CompletedGradient { operator, output, parameter, gradient, stages }
        })
        .collect();
    completed.sort_unstable_by_key(|parameter| {
        if parameter.stages.len() > 1 { (true, parameter.parameter.0, 0) } else { (false, parameter.operator, parameter.output) }
    });
    completed
}

/// Refuses a parameter of several stages whose meshes have different sizes.
fn refuse_unequal_meshes(
    lowering: &Lowering,
    parameter: TensorId,
    stages: &[usize],
    stage: usize,
    mesh: &Mesh,
) -> Result<(), PlanError> {
    let has_other_sizes = |&&other: &&usize| !mesh.stage(other).has_sizes_of(mesh.stage(stage));
    let Some(other) = stages.iter().find(has_other_sizes) else { return Ok(()) };
    Err(PlanError::Invalid {
        field: "stages",
        reason: format!(
            "stages {stage} and {other} share `{}`, but their meshes have different sizes",
            lowering.graph.tensor(parameter).name
        ),
        hint: "give them the same sizes, or use a model that shares no parameters (`tied_embeddings: false`)".into(),
    })
}

/// Refuses state that unsynchronised workers, or stages, would have to share: running statistics,
/// and parameters of several stages.
fn refuse_common_versions(lowering: &Lowering, cuts: &Cuts, stage: usize, plan: &Plan) -> Result<(), PlanError> {
    let refuse =
        |reason: String, hint: &str| Err(PlanError::Invalid { field: "mode.parameter_server", reason, hint: hint.into() });
    if !running_statistics(lowering, cuts, stage, plan).is_empty() {
        return refuse(
            "workers that go at their own pace have no common running statistics of batch norms".into(),
            "use `staleness: 0` without `backup_workers`, or a model without batch norm",
        );
    }
    let is_shared = |gradient: &CompletedGradient| gradient.stages.len() > 1;
    match completed_gradients(lowering, cuts, stage).into_iter().find(is_shared) {
        Some(shared) => {
            let name = &lowering.graph.tensor(shared.parameter).name;
            refuse(
                format!("stages share `{name}`, and their servers would hold different versions of it"),
                "use `staleness: 0` without `backup_workers`, `pipeline: 1`, or a model that shares no parameters \
                 (`tied_embeddings: false`)",
            )
        }
        None => Ok(()),
    }
}

/// The placements that distinguish buckets: they keep which axes shard the parameters, but not
/// along which dimension.
fn bucket_kind(placements: Placements) -> Placements {
    Axis::WITHIN_STAGE.iter().fold(placements, |kind, &axis| match placements.get(axis) {
        Placement::Shard(_) => kind.with(axis, Placement::Shard(0)),
        _ => kind,
    })
}

/// The first block that reads a parameter, whatever stages read it.
fn first_block(lowering: &Lowering, parameter: TensorId) -> usize {
    let readers = lowering.consumers[parameter.0].iter();
    readers.map(|&id| lowering.graph.operators[id.0].block).min().expect("invariant: an operator reads each parameter")
}

/// The stages whose operators read a parameter, ascending.
fn stages_with(lowering: &Lowering, cuts: &Cuts, parameter: TensorId) -> Vec<usize> {
    let readers = lowering.consumers[parameter.0].iter();
    let mut stages: Vec<usize> = readers.map(|&id| cuts.stage(&lowering.graph.operators[id.0])).collect();
    stages.sort_unstable();
    stages.dedup();
    stages
}

/// The running statistics of a stage's batch norms, each with the sums that update it.
fn running_statistics(lowering: &Lowering, cuts: &Cuts, stage: usize, plan: &Plan) -> Vec<RunningStatistics> {
    let graph = &lowering.graph;
    let mut all = Vec::new();
    for operator in &graph.operators {
        if !matches!(operator.kind, Kernel::BatchNorm { .. }) || cuts.stage(operator) != stage {
            continue;
        }
        let statistics = &operator.outputs[2];
        let name = format!("{}.running", operator.name);
        let Some(tensor) = graph.tensors.iter().position(|tensor| tensor.name == name).map(TensorId) else { continue };
        let statistics_placements = lowering.sharding.produced(statistics.tensor);
        let placements = statistics_placements.summed();
        let groups = operator.loops[0].extent;
        // With a stated group size, the number of groups scales with the samples of all ranks.
        // Otherwise each rank's samples are one group.
        let of_all = match plan.batch_norm_group {
            Some(_) => groups * plan.layout.samples_at_once() / lowering.mesh.samples_at_once(),
            None => groups,
        };
        let contributions = of_all / plan.replicas();
        all.push(RunningStatistics {
            tensor,
            name,
            shape: placements.local_shape(&lowering.shape(tensor), &lowering.mesh),
            placements,
            statistics: graph.tensor(statistics.tensor).name.clone(),
            statistics_placements,
            contributions,
        });
    }
    all
}
