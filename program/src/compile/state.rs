//! What a stage keeps from step to step: parameters in buckets, their gradients and optimizer state beside them, running statistics.
//!
//! A bucket is a run of parameters whose gradients are complete at about the same time and are shared out alike, so that one
//! collective reduces and one kernel updates them. ZeRO (Rajbhandari et al. 2020) is the placement of a bucket's optimizer state, gradients
//! and parameters along the mesh's `shard` axis. Training and evaluation have the same state in the same place.

use super::Lowering;
use super::cuts::Cuts;
use super::repeats::Gathers;
use crate::mesh::{Axis, Mesh};
use crate::placement::{Placement, Placements};
use crate::plan::{Plan, PlanError};
use foretell_models::{Operator, Role, TensorId};
use foretell_units::{Bytes, DataType};
use rustc_hash::FxHashMap;
use std::collections::BTreeSet;

/// Elements to which a parameter's start is aligned: 64 bytes in single precision, a cache line.
pub const BUCKET_ALIGNMENT: usize = 16;

/// One parameter of a bucket.
#[derive(Clone, Debug)]
pub(super) struct Member {
    pub(super) parameter: TensorId,
    pub(super) name: String,
    pub(super) shape: Vec<usize>,
    pub(super) placements: Placements,
    /// The first element within the bucket.
    pub(super) offset: usize,
}

/// Parameters that are reduced and updated together.
#[derive(Clone, Debug)]
pub(super) struct Bucket {
    pub(super) members: Vec<Member>,
    /// Elements with padding.
    pub(super) elements: usize,
    /// Into how many equal parts ZeRO cuts what it shards; 1 without.
    pub(super) shards: usize,
    /// Where ZeRO shards parameters, too: the block that they are gathered for.
    block: Option<usize>,
    /// How the gradients lie when the stage has made them.
    pub(super) gradient: Placements,
    /// All stages that have the parameters, where they are more than one.
    pub(super) stages: Vec<usize>,
    /// Operators that add to the gradients, for one micro-batch.
    pub(super) writers: usize,
}

/// Running statistics of one norm.
#[derive(Clone, Debug)]
pub(super) struct Running {
    pub(super) tensor: TensorId,
    pub(super) name: String,
    pub(super) shape: Vec<usize>,
    pub(super) placements: Placements,
    /// The sums of batch statistics that update them: the tensor's name.
    pub(super) statistics: String,
    pub(super) statistics_placements: Placements,
    /// Groups of samples that one micro-batch adds to the statistics, over all ranks.
    pub(super) contributions: usize,
}

/// Everything a stage keeps.
#[derive(Clone, Debug)]
pub(super) struct StageState {
    pub(super) buckets: Vec<Bucket>,
    /// The bucket of each gradient tensor.
    bucket_of: FxHashMap<TensorId, usize>,
    /// The bucket of each parameter.
    bucket_of_parameter: FxHashMap<String, usize>,
    /// Whether each rank keeps only its shard of the gradients from micro-batch to micro-batch (ZeRO 2).
    pub(super) shards_gradients: bool,
    /// Whether each rank keeps only its shard of the parameters from step to step: ZeRO 3, and where updated parameters are gathered beside the
    /// next step's kernels (Megatron's overlapped parameter gather).
    pub(super) shards_parameters: bool,
    /// Whether gathered parameters are dropped when no operator near needs them, to be gathered again (ZeRO 3).
    pub(super) drops_parameters: bool,
    pub(super) running: Vec<Running>,
    /// Format of the parameters that operators read.
    pub(super) precision: DataType,
    /// Whether a single-precision copy is kept beside them.
    pub(super) master: bool,
    /// Optimizer values for each parameter.
    pub(super) optimizer_states: usize,
}

impl Bucket {
    /// The elements of one shard.
    pub(super) fn shard_elements(&self) -> usize {
        self.elements / self.shards
    }

    /// The runs of elements that belong to no parameter: where they start and how long they are.
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
}

impl StageState {
    pub(super) fn plan(lowering: &Lowering, cuts: &Cuts, stage: usize, plan: &Plan, mesh: &Mesh) -> Result<Self, PlanError> {
        let stage_of_block = cuts.stage_of_block.clone();
        let graph = &lowering.graph;
        // Of each parameter its gradient and who adds to it last; then in the order in which the backward pass completes them.
        let mut last: FxHashMap<TensorId, (usize, usize, TensorId)> = FxHashMap::default();
        for (index, operator) in graph.operators.iter().enumerate() {
            if stage_of_block[operator.block] != stage {
                continue;
            }
            for (position, output) in operator.outputs.iter().enumerate() {
                if let Role::ParameterGradient(parameter) = graph.tensor(output.tensor).role {
                    last.insert(parameter, (index, position, output.tensor));
                }
            }
        }
        let mut complete: Vec<(usize, usize, TensorId, TensorId)> =
            last.into_iter().map(|(parameter, (index, position, gradient))| (index, position, parameter, gradient)).collect();
        // Parameters that several stages share come last, in an order that all of these have: they make the same buckets of them.
        complete.sort_unstable_by_key(|&(index, position, parameter, _)| {
            if stages_with(lowering, parameter, &stage_of_block).len() > 1 {
                (true, parameter.0, 0)
            } else {
                (false, index, position)
            }
        });
        let mut bucket_of = FxHashMap::default();
        let mut bucket_of_parameter = FxHashMap::default();
        let mut buckets: Vec<Bucket> = Vec::new();
        let shards = lowering.mesh.size(Axis::Shard);
        let drops_parameters = shards > 1 && plan.layout.zero == 3;
        let shards_parameters = drops_parameters || (shards > 1 && plan.layout.zero > 0 && plan.overlap.parameters);
        for (index, _, parameter, gradient) in complete {
            let placements = lowering.sharding.settled(parameter);
            let gradient_placements = lowering.sharding.produced(gradient);
            let stages = stages_with(lowering, parameter, &stage_of_block);
            if let Some(&other) = stages.iter().find(|&&other| !mesh.stage(other).is_as_large_as(mesh.stage(stage))) {
                return Err(PlanError::Invalid {
                    field: "stages",
                    reason: format!(
                        "stages {stage} and {other} share `{}`, and their meshes are not as large as each other",
                        graph.tensor(parameter).name
                    ),
                    hint: "give them the same sizes, or a model that shares no parameters (`tied_embeddings: false`)".into(),
                });
            }
            // What is dropped is gathered block by block.
            let block = (drops_parameters && stages.len() == 1).then(|| graph.operators[index].block);
            let tensor = graph.tensor(parameter);
            let full: Vec<usize> = tensor.dimensions.iter().map(|one| one.extent).collect();
            let shape = placements.local_shape(&full, &lowering.mesh);
            let elements: usize = shape.iter().product();
            let padded = elements.next_multiple_of(BUCKET_ALIGNMENT);
            let whole_bucket = plan.layout.bucket.count() as usize / 4;
            let kind = kind_of(gradient_placements);
            let found = buckets
                .iter()
                .rposition(|bucket| bucket.stages == stages && bucket.gradient == kind && bucket.block == block)
                .filter(|&index| buckets[index].elements + padded <= whole_bucket);
            let index = match found {
                Some(index) => index,
                None => {
                    buckets.push(Bucket {
                        members: Vec::new(),
                        elements: 0,
                        shards: if kind.get(Axis::Shard) == Placement::Partial { shards } else { 1 },
                        block,
                        gradient: kind,
                        stages,
                        writers: 0,
                    });
                    buckets.len() - 1
                }
            };
            bucket_of.insert(gradient, index);
            bucket_of_parameter.insert(tensor.name.clone(), index);
            let bucket = &mut buckets[index];
            let name = tensor.name.clone();
            bucket.members.push(Member { parameter, name, shape, placements, offset: bucket.elements });
            bucket.elements += padded;
        }
        for bucket in &mut buckets {
            bucket.elements = bucket.elements.next_multiple_of(BUCKET_ALIGNMENT * bucket.shards);
        }
        let running = running(lowering, stage, &stage_of_block, plan)?;
        let mixed = plan.storage().size() < Bytes::new(4);
        let optimizer_states = plan.optimizer_states();
        let mut state = Self {
            buckets,
            bucket_of,
            bucket_of_parameter,
            shards_gradients: shards > 1 && plan.layout.zero >= 2,
            shards_parameters,
            drops_parameters,
            running,
            precision: plan.storage(),
            master: mixed,
            optimizer_states,
        };
        for operator in graph.operators.iter().filter(|operator| stage_of_block[operator.block] == stage) {
            for bucket in state.buckets_written(operator) {
                state.buckets[bucket].writers += 1;
            }
        }
        Ok(state)
    }

    /// What is done for parameters beside operators.
    pub(super) fn gathers(&self) -> Gathers {
        match (self.shards_parameters, self.drops_parameters) {
            (_, true) => Gathers::Always,
            (true, false) => Gathers::Once,
            (false, false) => Gathers::Nothing,
        }
    }

    /// The bucket of a gradient.
    pub(super) fn bucket_of_gradient(&self, gradient: TensorId) -> Option<usize> {
        self.bucket_of.get(&gradient).copied()
    }

    /// The bucket of a parameter, by its name: evaluation's graph numbers tensors otherwise.
    pub(super) fn bucket_of_parameter(&self, parameter: &str) -> Option<usize> {
        self.bucket_of_parameter.get(parameter).copied()
    }

    /// The buckets to whose gradients an operator adds, in order.
    pub(super) fn buckets_written(&self, operator: &Operator) -> BTreeSet<usize> {
        operator.outputs.iter().filter_map(|output| self.bucket_of.get(&output.tensor).copied()).collect()
    }
}

/// The placements by which buckets are told apart: which axes hold parts, not which dimension they cut.
fn kind_of(placements: Placements) -> Placements {
    Axis::WITHIN_STAGE.iter().fold(placements, |kind, &axis| match placements.get(axis) {
        Placement::Shard(_) => kind.with(axis, Placement::Shard(0)),
        _ => kind,
    })
}

/// The stages whose operators use a parameter.
fn stages_with(lowering: &Lowering, parameter: TensorId, stage_of_block: &[usize]) -> Vec<usize> {
    let mut stages: Vec<usize> =
        lowering.consumers[parameter.0].iter().map(|&id| stage_of_block[lowering.graph.operators[id.0].block]).collect();
    stages.sort_unstable();
    stages.dedup();
    stages
}

/// The running statistics of a stage's norms, each with the sums that update it.
fn running(lowering: &Lowering, stage: usize, stage_of_block: &[usize], plan: &Plan) -> Result<Vec<Running>, PlanError> {
    let graph = &lowering.graph;
    let mut all = Vec::new();
    for operator in &graph.operators {
        if operator.kind != foretell_models::OperatorKind::BatchNorm || stage_of_block[operator.block] != stage {
            continue;
        }
        let statistics = &operator.outputs[2];
        let name = format!("{}.running", operator.name);
        let Some(index) = graph.tensors.iter().position(|tensor| tensor.name == name) else { continue };
        let produced = lowering.sharding.produced(statistics.tensor);
        let placements = produced.partial_axes().fold(produced, |kept, axis| kept.with(axis, Placement::Replicate));
        let full: Vec<usize> = graph.tensors[index].dimensions.iter().map(|one| one.extent).collect();
        let groups = operator.loops[0].extent;
        // Groups of a stated size are as many as there are samples for; else each rank's samples are one.
        let contributions = match plan.batch_norm_group {
            Some(_) => groups * plan.layout.samples_at_once() / lowering.mesh.samples_at_once(),
            None => groups,
        };
        all.push(Running {
            tensor: TensorId(index),
            name,
            shape: placements.local_shape(&full, &lowering.mesh),
            placements,
            statistics: graph.tensor(statistics.tensor).name.clone(),
            statistics_placements: produced,
            contributions,
        });
    }
    Ok(all)
}
