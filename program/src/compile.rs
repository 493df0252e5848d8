//! The compiler: model, plan → Program. A small ahead-of-time compiler in the order of its passes:
//!
//! 1. the graph of one mesh-wide micro-batch, with its gradients (`foretell-models`);
//! 2. a strategy for every operator, and so the placement of every tensor ([`crate::strategy`]);
//! 3. fusion ([`crate::fusion`]);
//! 4. cutting into stages, and what each keeps from step to step ([`state`]);
//! 5. each stage's instructions, in its schedule's order ([`emit`], with communication from the table of conversions);
//! 6. the memory plan, and dependencies between streams ([`crate::memory`], [`dependencies`]).
//!
//! Layouts end here: what leaves is instructions.

mod convert;
mod dependencies;
mod emit;
mod limits;
mod state;
mod update;

use crate::fusion::fuse;
use crate::memory;
use crate::mesh::{Axis, Mesh};
use crate::plan::{Plan, PlanError};
use crate::program::{Operation, Program, StageProgram};
use crate::schedule::{StagePass, Task};
use crate::strategy::{Sharding, consumers, makers};
use emit::StageEmitter;
use foretell_models::{Graph, GraphOptions, Model, OperatorId, Pass, Role, TensorId, differentiate};
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
    let cuts = cuts(&training.graph, plan)?;
    let states: Vec<StageState> =
        (0..cuts.len()).map(|stage| StageState::plan(&training, &cuts, stage, plan, &mesh)).collect::<Result<_, _>>()?;
    let evaluation = Lowering::evaluation(model, name, plan, &mesh)?;
    Ok(Compiled {
        training: training.lower(plan, &mesh, &cuts, &states, Purpose::Training)?,
        evaluation: evaluation.lower(plan, &mesh, &cuts, &states, Purpose::Evaluation)?,
    })
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
        let sharding = Sharding::choose(graph, mesh, plan.layout.sequence_parallel)?;
        let (graph, sharding) = fuse(graph, sharding);
        Ok(Self { consumers: consumers(&graph), makers: makers(&graph), graph, sharding })
    }

    fn lower(
        &self,
        plan: &Plan,
        mesh: &Mesh,
        cuts: &[usize],
        states: &[StageState],
        purpose: Purpose,
    ) -> Result<Program, PlanError> {
        let micro_batches = plan.micro_batches()?;
        let stage_of_block = stage_of_block(cuts);
        let mut stages = Vec::with_capacity(cuts.len());
        for (stage, state) in states.iter().enumerate() {
            let tasks = match purpose {
                Purpose::Training => plan.layout.schedule.order(cuts.len(), micro_batches, stage),
                Purpose::Evaluation => {
                    (0..micro_batches).map(|micro_batch| Task { pass: StagePass::Forward, micro_batch }).collect()
                }
            };
            let mut emitter = StageEmitter::new(self, plan, mesh, &stage_of_block, stage, state);
            emitter.tasks(&tasks);
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

    /// The operators of a pass of a stage, in order.
    fn operators(&self, stage: usize, pass: StagePass, stage_of_block: &[usize]) -> Vec<OperatorId> {
        let of_pass = |kind: Pass| (kind == Pass::Forward) == (pass == StagePass::Forward);
        (0..self.graph.operators.len())
            .map(OperatorId)
            .filter(|&id| {
                let operator = &self.graph.operators[id.0];
                of_pass(operator.pass) && stage_of_block[operator.block] == stage
            })
            .collect()
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

/// How many blocks each stage has: the plan's, or as even in arithmetic as cuts between blocks allow.
fn cuts(graph: &Graph, plan: &Plan) -> Result<Vec<usize>, PlanError> {
    let stages = plan.layout.pipeline;
    let blocks = graph.blocks.len();
    if stages > blocks {
        return Err(PlanError::Invalid {
            field: "pipeline",
            reason: format!("{stages} stages, but `{}` can be cut into {blocks} at most", graph.name),
            hint: format!("use `pipeline: {blocks}` or less"),
        });
    }
    if let Some(cuts) = &plan.layout.cuts {
        if cuts.len() != stages
            || cuts.contains(&0)
            || cuts.iter().try_fold(0usize, |sum, &one| sum.checked_add(one)) != Some(blocks)
        {
            return Err(PlanError::Invalid {
                field: "cuts",
                reason: format!("{cuts:?} does not share out {blocks} blocks among {stages} stages"),
                hint: "give one positive number a stage, adding up to the number of blocks".into(),
            });
        }
        return Ok(cuts.clone());
    }
    let mut work = vec![0.0; blocks];
    for operator in &graph.operators {
        work[operator.block] += operator.kernel(&operator.extents()).flops().value();
    }
    Ok(even_cuts(&work, stages))
}

/// Cuts `work` into `stages` runs whose largest sum is least: exact, by dynamic programming over prefixes.
fn even_cuts(work: &[f64], stages: usize) -> Vec<usize> {
    let blocks = work.len();
    let mut prefix = vec![0.0];
    for (index, &amount) in work.iter().enumerate() {
        prefix.push(prefix[index] + amount);
    }
    // best[end]: the least largest sum of the stages so far over the first `end` blocks; starts[stage][end]: where the last of them began.
    let mut best = prefix.clone();
    let mut starts = vec![vec![0u32; blocks + 1]];
    for stage in 1..stages {
        let mut largest = vec![f64::INFINITY; blocks + 1];
        let mut began = vec![0u32; blocks + 1];
        for end in stage + 1..=blocks {
            let last = |start: usize| prefix[end] - prefix[start];
            // The later the last stage begins the less it has, and the more those before it: the best is where they cross.
            let crossing = first_where(stage..end, |start| best[start] >= last(start));
            let start = match crossing {
                Some(crossing) if crossing == stage || best[crossing] < last(crossing - 1) => crossing,
                _ => {
                    let least = last(crossing.unwrap_or(end) - 1);
                    first_where(stage..end, |start| last(start) <= least).unwrap_or(stage)
                }
            };
            largest[end] = best[start].max(last(start));
            began[end] = start as u32;
        }
        best = largest;
        starts.push(began);
    }
    let mut cuts = vec![0; stages];
    let mut end = blocks;
    for stage in (0..stages).rev() {
        let start = starts[stage][end] as usize;
        cuts[stage] = end - start;
        end = start;
    }
    cuts
}

/// The first of `range` where what holds from some point on holds, by bisection.
fn first_where(range: std::ops::Range<usize>, holds: impl Fn(usize) -> bool) -> Option<usize> {
    let (mut from, mut until) = (range.start, range.end);
    while from < until {
        let middle = from.midpoint(until);
        if holds(middle) {
            until = middle;
        } else {
            from = middle + 1;
        }
    }
    (from < range.end).then_some(from)
}

fn stage_of_block(cuts: &[usize]) -> Vec<usize> {
    cuts.iter().enumerate().flat_map(|(stage, &blocks)| std::iter::repeat_n(stage, blocks)).collect()
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

#[cfg(test)]
mod tests {
    use super::even_cuts;

    #[test]
    fn cuts_are_the_most_even_there_are() {
        assert_eq!(even_cuts(&[1.0, 1.0, 1.0, 3.0], 2), [3, 1]);
        assert_eq!(even_cuts(&[5.0, 1.0, 1.0, 1.0, 1.0, 5.0], 3), [1, 4, 1]);
        assert_eq!(even_cuts(&[0.0, 0.0, 0.0], 3), [1, 1, 1], "every stage has a block, even one without work");
    }

    #[test]
    fn no_other_cuts_are_more_even() {
        // Every list of up to six small numbers that a fixed linear congruence makes, against all ways to cut it.
        let mut state = 1u32;
        for round in 0..500 {
            let blocks = 1 + round % 6;
            let work: Vec<f64> = (0..blocks)
                .map(|_| {
                    state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    f64::from(state >> 30)
                })
                .collect();
            for stages in 1..=blocks {
                let largest = |cuts: &[usize]| {
                    let mut rest = &work[..];
                    let mut sums = cuts.iter().map(|&cut| {
                        let (stage, after) = rest.split_at(cut);
                        rest = after;
                        stage.iter().sum::<f64>()
                    });
                    sums.by_ref().fold(0.0, f64::max)
                };
                let ways = (0..1usize << (blocks - 1)).filter(|ends| ends.count_ones() as usize == stages - 1);
                let least = ways
                    .map(|ends| {
                        let mut cuts = vec![1];
                        for block in 0..blocks - 1 {
                            if ends >> block & 1 == 1 {
                                cuts.push(1);
                            } else if let Some(last) = cuts.last_mut() {
                                *last += 1;
                            }
                        }
                        largest(&cuts)
                    })
                    .fold(f64::INFINITY, f64::min);
                let cuts = even_cuts(&work, stages);
                assert!(cuts.iter().all(|&cut| cut > 0) && cuts.iter().sum::<usize>() == blocks, "{cuts:?}");
                assert_eq!(largest(&cuts), least, "{work:?} in {stages}");
            }
        }
    }
}
