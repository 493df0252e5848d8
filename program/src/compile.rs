//! The compiler: model, plan → Program. A small ahead-of-time compiler in the order of its passes:
//!
//! 1. the graph of one mesh-wide micro-batch, with its gradients (`foretell-models`);
//! 2. a strategy for every operator, and so the placement of every tensor ([`crate::strategy`]);
//! 3. fusion ([`crate::fusion`]), and operands of eight bits ([`crate::quantisation`]);
//!    (these three for each mesh that a stage has, as if all stages had it);
//! 4. cutting into chunks, and what each stage keeps from step to step ([`cuts`], [`state`]);
//! 5. who sends what to whom where stages' meshes differ, and so which ranks run one list ([`reshard`]);
//! 6. each list's instructions, in its stage's order ([`emit`], with communication from the table of conversions, and
//!    [`messages`] between stages ([`passing`]), and [`ring`] attention), once for micro-batches that do alike ([`repeats`]), without copies that
//!    nobody reads ([`unread`]);
//! 7. the memory plan, and dependencies between streams ([`crate::memory`], [`dependencies`]).
//!
//! Layouts end here: what leaves is instructions.

mod activations;
mod append;
mod compiler;
mod convert;
mod cuts;
mod dependencies;
mod emit;
mod keep;
mod limits;
mod messages;
mod offload;
mod passing;
mod recompute;
mod repeats;
mod reshard;
mod ring;
mod state;
mod unread;
mod update;
mod zero;

use crate::fusion::{Fusions, fuse};
use crate::memory;
use crate::mesh::{Axis, Coordinates, Mesh, Rank, StageMesh};
use crate::plan::{Layout, Plan, PlanError, Share};
use crate::program::{Operation, Program, StageProgram};
use crate::quantisation::quantise;
use crate::schedule::StagePass;
use crate::strategy::{Sharding, consumers, makers};
pub use compiler::Compiler;
use cuts::Cuts;
pub use cuts::{cuts_by_speed, usual_cuts, work_of_blocks};
use emit::StageEmitter;
use foretell_models::{Graph, GraphOptions, Model, OperatorId, Role, TensorId, differentiate};
use foretell_units::{Bytes, Flops};
use rayon::prelude::*;
use reshard::{Crossings, Part};
pub use state::BUCKET_ALIGNMENT;
use state::StageState;
use std::sync::Arc;

/// The Programs of a run, over one arena: what is kept from step to step lies in the same place in both.
#[derive(Clone, Debug)]
pub struct Compiled {
    /// One training step.
    pub training: Program,
    /// The loss and the right predictions of one global batch, without gradients.
    pub evaluation: Program,
}

impl Compiled {
    /// The bytes of each stage's largest arena: what training and evaluation need at most.
    pub fn arenas(&self) -> Vec<Bytes> {
        let both = self.training.arenas().into_iter().zip(self.evaluation.arenas());
        both.map(|(training, evaluation)| training.max(evaluation)).collect()
    }

    /// What a rank of each stage has in its host's memory, at most.
    pub fn host_arenas(&self) -> Vec<Bytes> {
        let both = self.training.host_arenas().into_iter().zip(self.evaluation.host_arenas());
        both.map(|(training, evaluation)| training.max(evaluation)).collect()
    }

    /// The bytes that a rank has in its host's memory.
    pub fn host_arena_of(&self, rank: Rank) -> Bytes {
        self.training.list_of(rank).host_arena.max(self.evaluation.list_of(rank).host_arena)
    }

    /// The bytes of a rank's arena.
    pub fn arena_of(&self, rank: Rank) -> Bytes {
        self.training.list_of(rank).arena.max(self.evaluation.list_of(rank).arena)
    }
}

/// Compiles a run of `model`, called `name`, as `plan` lays it out.
///
/// # Errors
/// [`PlanError`] where the plan does not fit the model: sizes that do not divide or are beyond any machine, more stages than blocks, or
/// what cannot be laid out yet.
pub fn compile(model: &Model, name: &str, plan: &Plan) -> Result<Compiled, PlanError> {
    Compiler::new(model, name).compile(plan)
}

/// Compiles the training step alone, for who only simulates it.
///
/// # Errors
/// As [`compile`].
pub fn compile_training(model: &Model, name: &str, plan: &Plan) -> Result<Program, PlanError> {
    Compiler::new(model, name).training(plan)
}

/// The graph of a training step's micro-batch as the first stage's mesh has it, with that mesh, before it is shared out.
pub(crate) fn training_graph(model: &Model, name: &str, plan: &Plan) -> Result<(Graph, StageMesh), PlanError> {
    plan.validate()?;
    let mesh = plan.mesh()?;
    let own = mesh.stage(0);
    let stage = own.with_even_samples(own.distinct_samples()[0]);
    let graph = graph(model, name, plan, &stage, vocabulary_parts(plan, &mesh), Purpose::Training)?;
    Ok((graph, stage))
}

/// Programs over one arena: what is kept from step to step is what the training step needs, and lists are those of ranks that do alike in both
/// training and evaluation where evaluation is meant.
fn programs<const COUNT: usize>(
    compiler: &Compiler<'_>,
    plan: &Plan,
    purposes: [Purpose; COUNT],
    emission: Emission,
    places: Places,
) -> Result<[Program; COUNT], PlanError> {
    plan.validate()?;
    let mesh = plan.mesh()?;
    let training = Lowerings::new(compiler, plan, &mesh, Purpose::Training)?;
    for lowering in &training.0 {
        limits::check(lowering, plan)?;
    }
    let cuts = Cuts::new(&training.any().graph, plan)?;
    let mut lowered = vec![(Purpose::Training, training)];
    if purposes.contains(&Purpose::Evaluation) {
        lowered.push((Purpose::Evaluation, Lowerings::new(compiler, plan, &mesh, Purpose::Evaluation)?));
    }
    let crossings =
        lowered.iter().map(|(_, lowerings)| Crossings::new(lowerings, &cuts, &mesh)).collect::<Result<Vec<_>, PlanError>>()?;
    let parts = reshard::parts(&mesh, &crossings);
    let state = |part: &Part| StageState::plan(lowered[0].1.of_part(part, &mesh), &cuts, part.stage, plan, &mesh);
    let states = parts.iter().map(state).collect::<Result<Vec<_>, PlanError>>()?;
    let run = Run { plan, mesh: &mesh, cuts: &cuts, parts: &parts, states: &states, emission, places };
    let programs = lowered.iter().zip(&crossings).filter(|((purpose, _), _)| purposes.contains(purpose));
    let programs = programs.map(|((purpose, lowerings), crossings)| run.lower(lowerings, crossings, *purpose));
    let programs = programs.collect::<Result<Vec<_>, PlanError>>()?;
    Ok(programs.try_into().unwrap_or_else(|_| unreachable!("there is one for each purpose, in their order")))
}

/// Whether buffers are given places.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Places {
    Planned,
    None,
}

/// What a Program is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Purpose {
    Training,
    Evaluation,
}

/// How often what micro-batches have in common is emitted. The answer is the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Emission {
    /// Once, as far as [`repeats`] finds it.
    Once,
    /// For each of them: the oracle of tests.
    #[cfg(test)]
    Each,
}

/// A graph that is shared out over the ranks of one stage's mesh and fused, ready to be cut into stages.
struct Lowering {
    /// The mesh over which the whole model is shared out, as if every stage had it and every rank as many samples.
    mesh: StageMesh,
    graph: Graph,
    sharding: Sharding,
    /// For each tensor its readers.
    consumers: Vec<Vec<OperatorId>>,
    /// For each tensor its maker.
    makers: Vec<Option<OperatorId>>,
}

/// One lowering for each mesh that a stage has, and each number of samples that a rank has. They number tensors alike.
struct Lowerings(Vec<Arc<Lowering>>);

impl Lowerings {
    fn new(compiler: &Compiler<'_>, plan: &Plan, mesh: &Mesh, purpose: Purpose) -> Result<Self, PlanError> {
        let vocabulary_parts = vocabulary_parts(plan, mesh);
        let mut lowerings: Vec<Arc<Lowering>> = Vec::new();
        for own in mesh.distinct_stages() {
            for samples in own.distinct_samples() {
                let even = own.with_even_samples(samples);
                if !lowerings.iter().any(|lowering| lowering.mesh == even) {
                    lowerings.push(compiler.lowering(plan, even, vocabulary_parts, purpose)?);
                }
            }
        }
        Ok(Self(lowerings))
    }

    /// One of them, to ask what is the same in all: which blocks and which stages make and read what.
    fn any(&self) -> &Lowering {
        &self.0[0]
    }

    /// That of the rank at a position of a stage's mesh.
    fn of(&self, mesh: &StageMesh, coordinates: Coordinates) -> &Lowering {
        let even = mesh.with_even_samples(mesh.samples(coordinates));
        self.0.iter().find(|lowering| lowering.mesh == even).map_or(self.any(), Arc::as_ref)
    }

    fn of_part(&self, part: &Part, mesh: &Mesh) -> &Lowering {
        part.ranks.first().map_or(self.any(), |&rank| self.of(mesh.stage(part.stage), mesh.coordinates(rank)))
    }
}

impl Lowering {
    fn new(
        model: &Model,
        name: &str,
        plan: &Plan,
        mesh: StageMesh,
        vocabulary_parts: usize,
        purpose: Purpose,
    ) -> Result<Self, PlanError> {
        let graph = graph(model, name, plan, &mesh, vocabulary_parts, purpose)?;
        let sharding = Sharding::choose(&graph, &mesh, &plan.layout)?;
        let (mut graph, mut sharding) = fuse(&graph, sharding, Fusions::of(plan));
        if plan.quantises() {
            (graph, sharding) = quantise(graph, sharding)?;
        }
        Ok(Self { consumers: consumers(&graph), makers: makers(&graph), graph, sharding, mesh })
    }

    /// The stages other than `stage` whose operators read a tensor.
    fn other_readers(&self, tensor: TensorId, stage: usize, stage_of_block: &[usize]) -> Vec<usize> {
        let mut stages: Vec<usize> = self.consumers[tensor.0]
            .iter()
            .map(|&id| stage_of_block[self.graph.operators[id.0].block])
            .filter(|&reader| reader != stage)
            .collect();
        stages.sort_unstable();
        stages.dedup();
        stages
    }

    fn is_activation(&self, tensor: TensorId) -> bool {
        self.graph.tensor(tensor).role == Role::Activation
    }
}

/// Into how many parts the vocabulary is cut: only the stage of the last block has a head, whose loss is cut into parts of it.
fn vocabulary_parts(plan: &Plan, mesh: &Mesh) -> usize {
    let Layout { pipeline, virtual_stages, schedule, .. } = plan.layout;
    let positions = pipeline.saturating_mul(virtual_stages);
    mesh.stage(schedule.place(pipeline, virtual_stages, positions.saturating_sub(1)).0).size(Axis::Tensor)
}

/// The graph of one micro-batch over all ranks of a mesh.
fn graph(
    model: &Model,
    name: &str,
    plan: &Plan,
    mesh: &StageMesh,
    vocabulary_parts: usize,
    purpose: Purpose,
) -> Result<Graph, PlanError> {
    let inference = purpose == Purpose::Evaluation;
    let options = GraphOptions {
        batch: mesh.samples_at_once(),
        normalization_groups: normalization_groups(model, plan, mesh)?,
        inference,
        vocabulary_parts,
    };
    let forward = model.graph(name, &options)?;
    // Both are bounded (2^32 samples, 2^24 positions), and so is every product of the two.
    let normalizer = plan.global_batch * forward.predictions_per_sample;
    Ok(if inference { forward } else { differentiate(&forward, normalizer) })
}

/// Groups of samples that share batch statistics, if all ranks of a stage have as many. Where no size of them is stated they are a rank's samples:
/// where `tensor` shares out samples of some operators, those that it then has.
fn normalization_groups(model: &Model, plan: &Plan, mesh: &StageMesh) -> Result<usize, PlanError> {
    let samples = mesh.samples_at_once() / mesh.batch_parts();
    let Some(group) = plan.batch_norm_group.filter(|_| model.has_batch_norm()) else {
        let shares_batch = plan.layout.operators.iter().any(|(_, share)| share == Share::Batch);
        let parts = if shares_batch && model.has_batch_norm() { mesh.size(Axis::Tensor) } else { 1 };
        if !samples.is_multiple_of(parts) {
            return Err(PlanError::Indivisible {
                what: "micro_batch".into(),
                value: samples,
                by: "tensor, which shares out samples".into(),
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

/// What all lists of a run share.
struct Run<'a> {
    plan: &'a Plan,
    mesh: &'a Mesh,
    cuts: &'a Cuts,
    parts: &'a [Part],
    /// By part.
    states: &'a [StageState],
    emission: Emission,
    places: Places,
}

impl Run<'_> {
    fn lower(&self, lowerings: &Lowerings, crossings: &Crossings, purpose: Purpose) -> Result<Program, PlanError> {
        let Run { plan, mesh, cuts, .. } = *self;
        let micro_batches = plan.micro_batches()?;
        let mut orders = plan.layout.schedule.orders(cuts.stages, micro_batches, cuts.chunks);
        if purpose == Purpose::Evaluation {
            // What is left of lists that do not wait for each other in a circle does not either.
            orders.iter_mut().for_each(|order| order.retain(|task| task.pass == StagePass::Forward));
        }
        let any = lowerings.any();
        let receives = messages::receives(any, cuts, plan.layout.schedule, &orders);
        let list = |(part, state): (&Part, &StageState)| {
            let routes = crossings.routes(part.stage, &part.ranks);
            let mut emitter = StageEmitter::new(lowerings.of_part(part, mesh), plan, mesh, cuts, part.stage, state, &routes);
            emitter.tasks(&orders[part.stage], &receives[part.stage], self.emission);
            if purpose == Purpose::Training {
                emitter.update();
            }
            let mut program = emitter.finish();
            unread::leave_out(&mut program);
            dependencies::connect(&mut program, &plan.overlap);
            if self.places == Places::Planned {
                memory::plan(&mut program);
            }
            dependencies::prune(&mut program);
            (hardware_flops(&program) * part.ranks.len() as f64, program)
        };
        // No list knows of another. Whoever compiles must hold no lock that other work of its threads asks for: it may be done in between. Who wants no
        // places wants many Programs, and shares out these: one that waited for its lists would take up another Program meanwhile, and so on.
        let each: Vec<(Flops, StageProgram)> = match self.places {
            Places::Planned => self.parts.par_iter().zip(self.states).map(list).collect(),
            Places::None => self.parts.iter().zip(self.states).map(list).collect(),
        };
        let mut list_of_rank = vec![0; mesh.world_size()];
        for (number, part) in (0..).zip(self.parts) {
            part.ranks.iter().for_each(|rank| list_of_rank[rank.0] = number);
        }
        let (flops, lists): (Vec<Flops>, Vec<StageProgram>) = each.into_iter().unzip();
        let samples_at_once = plan.layout.samples_at_once() as f64;
        let graph_flops: Flops = any.graph.model_flops() * (samples_at_once / any.mesh.samples_at_once() as f64);
        Ok(Program {
            mesh: mesh.clone(),
            precision: plan.storage(),
            format: plan.precision,
            hardware_flops: flops.into_iter().sum(),
            lists,
            list_of_rank,
            samples: plan.global_batch,
            predictions: plan.global_batch * any.graph.predictions_per_sample,
            tokens: any.graph.tokens_per_sample.map(|tokens| tokens * plan.global_batch),
            model_flops: graph_flops * micro_batches as f64,
        })
    }
}

/// The matrix products that a rank runs, each counted as for model FLOPs (attention in full), so that the two differ by what is
/// computed again and by what several ranks compute alike, and by nothing else.
fn hardware_flops(list: &StageProgram) -> Flops {
    list.instructions
        .iter()
        .filter_map(|instruction| match &*instruction.operation {
            Operation::Compute { kernel, .. } => Some(kernel.model_flops()),
            _ => None,
        })
        .sum()
}
