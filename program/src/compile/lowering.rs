//! Lowering a model onto a stage's mesh: its graph (with gradients, for training), the placement of
//! every tensor, fusion, and eight-bit operands.
//!
//! A lowering covers the whole model, as if every stage had this mesh. Each stage later takes its
//! own blocks from the lowering of its mesh.

use super::recipe::check_recipe;
use super::tiling::Tiling;
use crate::fusion::{Fusions, fuse};
use crate::mesh::{Axis, Coordinates, Mesh, StageMesh};
use crate::plan::{Layout, Plan, PlanError, ShardedPart};
use crate::quantisation::quantise;
use crate::strategy::{Sharding, consumers, producers};
use foretell_models::{
    Graph, GraphOptions, HiddenMatrix, Model, OperatorId, Role, TensorId, differentiate, logits_only, with_evaluation,
};
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;

/// The use of a Program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Purpose {
    /// A training step.
    Training,
    /// The loss and the number of correct predictions, without gradients.
    Evaluation,
    /// The logits, without a loss.
    Logits,
}

/// A model, or some of its blocks.
pub(super) struct Source<'a> {
    pub(super) model: Cow<'a, Model>,
    /// The model's name in error messages.
    pub(super) name: &'a str,
    /// Indices of the blocks in increasing order. `None`: all.
    pub(super) blocks: Option<Vec<usize>>,
}

impl Source<'_> {
    fn graph(&self, plan: &Plan, options: &GraphOptions) -> Result<Graph, PlanError> {
        let graph = plan.training.graph(&self.model, self.name, options)?;
        let Some(blocks) = &self.blocks else { return Ok(graph) };
        graph.with_blocks(blocks).ok_or_else(|| PlanError::Invalid {
            field: "model",
            reason: "some of its blocks pass on more than one tensor, so that they cannot be left out".into(),
            hint: "keep all blocks".into(),
        })
    }
}

/// The graph of one micro-batch before it is cut into stages: sharded over a stage's mesh, fused,
/// and quantised if the plan says so.
pub(super) struct Lowering {
    /// The mesh that the whole model is sharded over, with the same number of samples on every
    /// rank.
    pub(super) mesh: StageMesh,
    pub(super) graph: Graph,
    pub(super) sharding: Sharding,
    /// The matrices of hidden layers, which [`Optimizer::Muon`](crate::plan::Optimizer::Muon)
    /// updates as such.
    pub(super) hidden_matrices: BTreeMap<TensorId, HiddenMatrix>,
    /// The operators that read each tensor, indexed by tensor.
    pub(super) consumers: Vec<Vec<OperatorId>>,
    /// The operator that writes each tensor, indexed by tensor.
    pub(super) producers: Vec<Option<OperatorId>>,
    /// The parts that run a few positions at a time.
    pub(super) tiling: Tiling,
}

impl Lowering {
    pub(super) fn new(
        source: &Source<'_>,
        plan: &Plan,
        mesh: StageMesh,
        vocabulary_parts: usize,
        purpose: Purpose,
    ) -> Result<Self, PlanError> {
        let graph = graph(source, plan, &mesh, vocabulary_parts, purpose)?;
        let hidden_matrices = graph.hidden_matrices();
        let sharding = Sharding::choose(&graph, &mesh, &plan.layout)?;
        let (mut graph, mut sharding) = fuse(&graph, sharding, Fusions::of(plan));
        if plan.quantises() {
            (graph, sharding) = quantise(graph, sharding)?;
        }
        let tiles = |layout: &Layout| Tiling::new(&graph, &sharding, &mesh, layout, source.blocks.is_some());
        let whole_loss = || Layout { loss_chunk: None, ..plan.layout.clone() };
        let tiling = match purpose {
            Purpose::Training => tiles(&plan.layout)?,
            // The five best of sharded classes are counted from statistics of all positions.
            Purpose::Evaluation => tiles(&plan.layout).or_else(|_| tiles(&whole_loss()))?,
            // Logits that are asked for are whole.
            Purpose::Logits => tiles(&whole_loss())?,
        };
        Ok(Self { consumers: consumers(&graph), producers: producers(&graph), graph, sharding, hidden_matrices, mesh, tiling })
    }

    /// The stages other than `stage` whose operators read a tensor, ascending.
    pub(super) fn other_readers(&self, tensor: TensorId, stage: usize, stage_of_block: &[usize]) -> Vec<usize> {
        let mut stages: Vec<usize> = self.consumers[tensor.0]
            .iter()
            .map(|&id| stage_of_block[self.graph.operators[id.0].block])
            .filter(|&reader| reader != stage)
            .collect();
        stages.sort_unstable();
        stages.dedup();
        stages
    }

    pub(super) fn is_activation(&self, tensor: TensorId) -> bool {
        self.graph.tensor(tensor).role == Role::Activation
    }

    /// The global shape of a tensor.
    pub(super) fn shape(&self, tensor: TensorId) -> Vec<usize> {
        self.graph.tensor(tensor).dimensions.iter().map(|dimension| dimension.extent).collect()
    }
}

/// The lowerings of a plan: one for each distinct mesh of a stage and each distinct number of
/// samples on a rank. A tensor has the same id in all of them.
pub(super) struct Lowerings(Vec<Arc<Lowering>>);

impl Lowerings {
    /// Collects one lowering for each distinct mesh and number of samples among the first `stages`
    /// stages. (Later stages are servers, which hold no part of the model's graph.) `lowering`
    /// makes the lowering of a given mesh.
    pub(super) fn new(
        mesh: &Mesh,
        stages: usize,
        mut lowering: impl FnMut(StageMesh) -> Result<Arc<Lowering>, PlanError>,
    ) -> Result<Self, PlanError> {
        let mut lowerings: Vec<Arc<Lowering>> = Vec::new();
        for stage in mesh.distinct_stages().iter().take(stages) {
            for samples in stage.distinct_samples() {
                let even = stage.with_even_samples(samples);
                if !lowerings.iter().any(|known| known.mesh == even) {
                    lowerings.push(lowering(even)?);
                }
            }
        }
        Ok(Self(lowerings))
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Lowering> {
        self.0.iter().map(Arc::as_ref)
    }

    /// One of the lowerings, for facts that all share: which blocks and stages produce and read a
    /// tensor.
    pub(super) fn any(&self) -> &Lowering {
        &self.0[0]
    }

    /// The lowering of the rank at `coordinates` of a stage's mesh.
    pub(super) fn of(&self, mesh: &StageMesh, coordinates: Coordinates) -> &Lowering {
        let even = mesh.with_even_samples(mesh.samples(coordinates));
        self.0.iter().find(|lowering| lowering.mesh == even).map_or(self.any(), Arc::as_ref)
    }
}

/// The graph of a training micro-batch on the first stage's mesh, and that mesh. Every rank has as
/// many samples as the rank with the fewest. Nothing is sharded or fused yet.
pub(crate) fn training_graph(model: &Model, name: &str, plan: &Plan) -> Result<(Graph, StageMesh), PlanError> {
    plan.validate()?;
    let mesh = plan.mesh()?;
    let first = mesh.stage(0);
    let stage = first.with_even_samples(first.distinct_samples()[0]);
    let source = Source { model: Cow::Borrowed(model), name, blocks: None };
    let graph = graph(&source, plan, &stage, vocabulary_parts(plan, &mesh), Purpose::Training)?;
    Ok((graph, stage))
}

/// The number of parts that the head's vocabulary is cut into: the `tensor` size of the stage that
/// has the last block. Only that stage has a head. It is 1 for a smoothed or weighted loss, which
/// needs all classes on one rank.
pub(super) fn vocabulary_parts(plan: &Plan, mesh: &Mesh) -> usize {
    if !plan.training.loss_target().is_plain() {
        return 1;
    }
    let Layout { pipeline, virtual_stages, schedule, .. } = plan.layout;
    let positions = pipeline.saturating_mul(virtual_stages);
    let (last_stage, _) = schedule.place(pipeline, positions.saturating_sub(1));
    mesh.stage(last_stage).size(Axis::Tensor)
}

/// The graph of one micro-batch over all ranks of a stage's mesh.
fn graph(
    source: &Source<'_>,
    plan: &Plan,
    mesh: &StageMesh,
    vocabulary_parts: usize,
    purpose: Purpose,
) -> Result<Graph, PlanError> {
    let inference = purpose != Purpose::Training;
    let options = GraphOptions {
        batch: mesh.samples_at_once(),
        normalization_groups: normalization_groups(&source.model, plan, mesh)?,
        inference,
        vocabulary_parts,
    };
    let forward = source.graph(plan, &options)?;
    // No overflow: a global batch is at most 2^32 samples, and a sample has at most 2^24
    // predictions. The loss is normalised over all samples of one update, so that the sum of
    // gradients is that of the mean loss.
    let normalizer = plan.samples_of_update() * forward.predictions_per_sample;
    match purpose {
        Purpose::Evaluation => Ok(with_evaluation(forward)),
        Purpose::Logits => logits_only(forward).ok_or_else(|| PlanError::Invalid {
            field: "layout.tensor",
            reason: "it shards the vocabulary, so that no rank has whole logits".into(),
            hint: "use one rank".into(),
        }),
        Purpose::Training => {
            check_recipe(&forward, &plan.training)?;
            let forward = plan.training.loss_target().apply(forward);
            Ok(differentiate(&forward, normalizer, |name| plan.training.is_frozen(name)))
        }
    }
}

/// The number of sample groups of a micro-batch, over all ranks of a stage. The samples of one
/// group share batch statistics.
///
/// Without a `batch_norm_group`, a group is the samples that one rank has. If some operators are
/// sharded along samples over the `tensor` ranks, a group is one such rank's part of those samples.
fn normalization_groups(model: &Model, plan: &Plan, mesh: &StageMesh) -> Result<usize, PlanError> {
    let samples = mesh.samples_at_once() / mesh.batch_parts();
    let Some(group) = plan.batch_norm_group.filter(|_| model.has_batch_norm()) else {
        let shards_batch = plan.layout.operators.iter().any(|(_, part)| part == ShardedPart::Batch);
        let parts = if shards_batch && model.has_batch_norm() { mesh.size(Axis::Tensor) } else { 1 };
        if !samples.is_multiple_of(parts) {
            return Err(PlanError::Indivisible {
                what: "micro_batch".into(),
                value: samples,
                by: "tensor, which shards samples".into(),
                divisor: parts,
                hint: "choose a micro-batch that is a multiple of it, or state a `batch_norm_group`".into(),
            });
        }
        return Ok(mesh.batch_parts() * parts);
    };
    if group == 0 || !samples.is_multiple_of(group) {
        return Err(PlanError::Indivisible {
            what: "micro_batch".into(),
            value: samples,
            by: "batch_norm_group".into(),
            divisor: group,
            hint: "samples that share statistics lie on one rank: choose a group that divides the micro-batch".into(),
        });
    }
    Ok(mesh.samples_at_once() / group)
}
