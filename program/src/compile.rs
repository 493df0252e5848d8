//! The compiler: model, plan → Program. A small ahead-of-time compiler in the order of its passes:
//!
//! 1. the graph of one mesh-wide micro-batch, with its gradients (`foretell-models`);
//! 2. a strategy for every operator, and so the placement of every tensor ([`crate::strategy`]);
//! 3. fusion ([`crate::fusion`]);
//! 4. cutting into chunks, and what each stage keeps from step to step ([`cuts`], [`state`]);
//! 5. each stage's instructions, in its schedule's order ([`emit`], with communication from the table of conversions, and
//!    [`messages`] between stages, and [`ring`] attention);
//! 6. the memory plan, and dependencies between streams ([`crate::memory`], [`dependencies`]).
//!
//! Layouts end here: what leaves is instructions.

mod convert;
mod cuts;
mod dependencies;
mod emit;
mod limits;
mod messages;
mod ring;
mod state;
mod update;

use crate::fusion::fuse;
use crate::memory;
use crate::mesh::{Axis, Mesh};
use crate::plan::{Plan, PlanError};
use crate::program::{Operation, Program, StageProgram};
use crate::schedule::StagePass;
use crate::strategy::{Sharding, consumers, makers};
use cuts::Cuts;
use emit::StageEmitter;
use foretell_models::{Graph, GraphOptions, Model, OperatorId, Role, TensorId, differentiate};
use foretell_units::{Bytes, Flops};
use state::StageState;

/// The Programs of a run, over one arena: what is kept from step to step lies in the same place in both.
#[derive(Clone, Debug)]
pub struct Compiled {
    /// One training step.
    pub training: Program,
    /// The loss and the right predictions of one global batch, without gradients.
    pub evaluation: Program,
}

impl Compiled {
    /// The bytes of each stage's arena: what training and evaluation need at most.
    pub fn arenas(&self) -> Vec<Bytes> {
        let both = self.training.arenas().into_iter().zip(self.evaluation.arenas());
        both.map(|(training, evaluation)| training.max(evaluation)).collect()
    }
}

/// Compiles a run of `model`, called `name`, as `plan` lays it out.
///
/// # Errors
/// [`PlanError`] where the plan does not fit the model: sizes that do not divide or are beyond any machine, more stages than blocks, or
/// what cannot be laid out yet.
pub fn compile(model: &Model, name: &str, plan: &Plan) -> Result<Compiled, PlanError> {
    plan.validate()?;
    let mesh = plan.mesh()?;
    let training = Lowering::training(model, name, plan, &mesh)?;
    limits::check(&training, plan, &mesh)?;
    let cuts = Cuts::new(&training.graph, plan)?;
    let states: Vec<StageState> =
        (0..cuts.stages).map(|stage| StageState::plan(&training, &cuts, stage, plan, &mesh)).collect::<Result<_, _>>()?;
    let evaluation = Lowering::evaluation(model, name, plan, &mesh)?;
    Ok(Compiled {
        training: training.lower(plan, &mesh, &cuts, &states, Purpose::Training)?,
        evaluation: evaluation.lower(plan, &mesh, &cuts, &states, Purpose::Evaluation)?,
    })
}

/// Compiles the training step alone, for who only simulates it.
///
/// # Errors
/// As [`compile`].
pub fn compile_training(model: &Model, name: &str, plan: &Plan) -> Result<Program, PlanError> {
    plan.validate()?;
    let mesh = plan.mesh()?;
    let training = Lowering::training(model, name, plan, &mesh)?;
    limits::check(&training, plan, &mesh)?;
    let cuts = Cuts::new(&training.graph, plan)?;
    let states: Vec<StageState> =
        (0..cuts.stages).map(|stage| StageState::plan(&training, &cuts, stage, plan, &mesh)).collect::<Result<_, _>>()?;
    training.lower(plan, &mesh, &cuts, &states, Purpose::Training)
}

/// What a Program is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Purpose {
    Training,
    Evaluation,
}

/// A graph that is shared out and fused, ready to be cut into stages.
struct Lowering {
    graph: Graph,
    sharding: Sharding,
    /// For each tensor its readers.
    consumers: Vec<Vec<OperatorId>>,
    /// For each tensor its maker.
    makers: Vec<Option<OperatorId>>,
}

impl Lowering {
    fn training(model: &Model, name: &str, plan: &Plan, mesh: &Mesh) -> Result<Self, PlanError> {
        let graph = model.graph(name, &graph_options(model, plan, false)?)?;
        // Both are bounded (2^32 samples, 2^24 positions), and so is every product of the two.
        let normalizer = plan.global_batch * graph.predictions_per_sample;
        Self::shard(&differentiate(&graph, normalizer), plan, mesh)
    }

    fn evaluation(model: &Model, name: &str, plan: &Plan, mesh: &Mesh) -> Result<Self, PlanError> {
        let graph = model.graph(name, &graph_options(model, plan, true)?)?;
        Self::shard(&graph, plan, mesh)
    }

    fn shard(graph: &Graph, plan: &Plan, mesh: &Mesh) -> Result<Self, PlanError> {
        let sharding = Sharding::choose(graph, mesh, plan.layout.sequence_parallel, plan.layout.context_method)?;
        let (graph, sharding) = fuse(graph, sharding);
        Ok(Self { consumers: consumers(&graph), makers: makers(&graph), graph, sharding })
    }

    fn lower(
        &self,
        plan: &Plan,
        mesh: &Mesh,
        cuts: &Cuts,
        states: &[StageState],
        purpose: Purpose,
    ) -> Result<Program, PlanError> {
        let micro_batches = plan.micro_batches()?;
        let mut orders = plan.layout.schedule.orders(cuts.stages, micro_batches, cuts.chunks);
        if purpose == Purpose::Evaluation {
            // What is left of lists that do not wait for each other in a circle does not either.
            orders.iter_mut().for_each(|order| order.retain(|task| task.pass == StagePass::Forward));
        }
        let receives = messages::receives(self, cuts, plan.layout.schedule, &orders);
        let mut stages = Vec::with_capacity(cuts.stages);
        for (stage, state) in states.iter().enumerate() {
            let mut emitter = StageEmitter::new(self, plan, mesh, cuts, stage, state);
            emitter.tasks(&orders[stage], &receives[stage]);
            if purpose == Purpose::Training {
                emitter.update();
            }
            let mut program = emitter.finish();
            dependencies::connect(&mut program);
            memory::plan(&mut program);
            dependencies::prune(&mut program);
            stages.push(program);
        }
        let graph_flops: Flops = self.graph.model_flops();
        Ok(Program {
            mesh: mesh.clone(),
            precision: plan.precision,
            hardware_flops: stages.iter().map(|stage| hardware_flops(stage, mesh)).sum(),
            stages,
            samples: plan.global_batch,
            predictions: plan.global_batch * self.graph.predictions_per_sample,
            tokens: self.graph.tokens_per_sample.map(|tokens| tokens * plan.global_batch),
            model_flops: graph_flops * micro_batches as f64,
        })
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

/// The sizes of the graph of one mesh-wide micro-batch.
fn graph_options(model: &Model, plan: &Plan, inference: bool) -> Result<GraphOptions, PlanError> {
    let batch = plan.layout.samples_at_once();
    let normalization_groups = match plan.batch_norm_group {
        Some(group) if model.has_batch_norm() => {
            if group == 0 || !plan.layout.micro_batch.is_multiple_of(group) {
                return Err(PlanError::Indivisible {
                    what: "micro_batch".into(),
                    value: plan.layout.micro_batch,
                    by: "batch_norm_group".into(),
                    divisor: group,
                    hint: "samples that share statistics lie on one rank: choose a group that divides the micro-batch".into(),
                });
            }
            batch / group
        }
        _ => plan.layout.batch_ranks(),
    };
    Ok(GraphOptions { batch, normalization_groups, inference, vocabulary_parts: plan.layout.tensor })
}

/// The matrix products that the ranks of a stage run, each counted as for model FLOPs (attention in full), so that the two differ by what is
/// computed again and by what several ranks compute alike, and by nothing else.
fn hardware_flops(stage: &StageProgram, mesh: &Mesh) -> Flops {
    let one_rank: Flops = stage
        .instructions
        .iter()
        .filter_map(|instruction| match &instruction.operation {
            Operation::Compute { kernel, .. } => Some(kernel.model_flops()),
            _ => None,
        })
        .sum();
    one_rank * (mesh.world_size() / mesh.size(Axis::Pipeline)) as f64
}
