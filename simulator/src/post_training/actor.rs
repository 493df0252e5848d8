//! The actor's own training: an ordinary plan over the responses of an update, which the simulator
//! predicts like any other. Its layout is that of the user's plan.
//!
//! Responses are packed into sequences of the greatest length, or padded to the longest in a
//! micro-batch. This module must not know engines.

use super::error::PostTrainingError;
use crate::answers::{Options, Prediction, memory_use, predict_step, predict_with_memory, traced_prediction};
use crate::cost::CostModel;
use crate::lengths::Lengths;
use foretell_models::Model;
use foretell_program::{Compiled, Plan, Rollout, compile};
use foretell_topologies::Topology;
use foretell_units::{Bytes, Seconds};

/// Sequences are padded to a multiple of this many tokens, so that ranks can shard them.
const GRANULE: usize = 128;

/// Training sequences of one length, and the plan that trains on them.
#[derive(Clone, Debug, PartialEq)]
pub struct ActorJob {
    /// The model, with samples of the length that is trained on.
    pub model: Model,
    /// The plan. Its global batch counts sequences of this length.
    pub plan: Plan,
    /// The model with samples of the greatest length, which determines the memory.
    pub longest: Model,
    /// Number of updates in a step.
    pub updates: usize,
}

impl ActorJob {
    /// The training job of a plan whose global batch counts the responses of an update. The number
    /// of sequences of an update is rounded up to a multiple of `multiple`, or of the layout's
    /// samples at once if `multiple` is `None`. Pass `multiple` if the search is to choose the
    /// layout.
    ///
    /// # Errors
    /// [`PostTrainingError`] if the model's samples are not sequences, or the rollout contradicts
    /// the plan.
    pub fn new(model: &Model, plan: &Plan, rollout: &Rollout, multiple: Option<usize>) -> Result<Self, PostTrainingError> {
        rollout.validate(plan.global_batch)?;
        let lengths = Lengths::of(rollout);
        let longest = rollout.longest().next_multiple_of(GRANULE);
        let with_length = |length: usize| model.with_sequence(length).ok_or(PostTrainingError::NoSequences);
        let mut plan = plan.clone();
        let updates = rollout.responses() / plan.global_batch;
        let multiple = multiple.unwrap_or_else(|| plan.layout.samples_at_once()).max(1);
        let prompt = rollout.prompt as f64;
        let (length, sequences) = if rollout.packing {
            let tokens = plan.global_batch as f64 * (prompt + lengths.mean());
            plan.workload.packed = Some(lengths.mean_of_tokens(prompt).round() as usize);
            (longest, (tokens / longest as f64).ceil() as usize)
        } else {
            let padded = lengths.mean_longest_of(plan.layout.micro_batch);
            (((prompt + padded) as usize).next_multiple_of(GRANULE).min(longest), plan.global_batch)
        };
        plan.global_batch = sequences.next_multiple_of(multiple);
        Ok(Self { model: with_length(length)?, plan, longest: with_length(longest)?, updates })
    }
}

/// The time and memory of an actor's training.
#[derive(Clone, Debug)]
pub struct ActorCosts {
    /// Prediction of an update.
    pub update: Prediction,
    /// Time of a forward pass over the responses of an update, without gradients.
    pub forward: Seconds,
    /// Number of updates in a step.
    pub updates: usize,
    /// The assumptions, one sentence each.
    pub remarks: Vec<String>,
}

impl ActorCosts {
    /// Predicts an actor's training.
    ///
    /// # Errors
    /// [`PostTrainingError`] if the plan cannot be compiled or simulated.
    pub fn of(job: &ActorJob, name: &str, topology: &Topology, costs: &CostModel) -> Result<Self, PostTrainingError> {
        let compiled = compile(&job.model, name, &job.plan)?;
        let options = Options::default();
        let memory = memory_use(&compiled.training, Some(&compiled.evaluation), topology, costs);
        let (mut update, _) = predict_with_memory(&compiled.training, memory, topology, costs, &options)?;
        let mut forward = forward(&compiled, topology, costs)?;
        let mut remarks = Vec::new();
        let traced = |model: &Model| traced_prediction(&job.plan, model, topology, costs).ok();
        if let Some(traced) = traced(&job.model) {
            // `forward` and the step come from the stack's profile. Both are assumed to have the
            // same relative error.
            forward = forward * (traced.prediction.step_seconds / update.step_seconds);
            update = traced.prediction;
        }
        if job.longest != job.model {
            let longest = match traced(&job.longest) {
                Some(traced) => traced.prediction,
                None => {
                    let program = compile(&job.longest, name, &job.plan)?.training;
                    let memory = memory_use(&program, None, topology, costs);
                    update.clone().with_memory(memory)
                }
            };
            update = Prediction {
                peak_memory_bytes: longest.peak_memory_bytes,
                memory_by_component: longest.memory_by_component,
                fits: longest.fits,
                chance_of_running_out: longest.chance_of_running_out,
                memory_peak: longest.memory_peak,
                ..update
            };
        }
        if job.plan.global_batch > 1 && job.plan.layout.samples_at_once() == job.plan.global_batch {
            remarks.push("an update has one micro-batch for each replica: some replicas may have less to do".into());
        }
        Ok(Self { update, forward, updates: job.updates, remarks })
    }

    /// The memory of the fullest rank.
    pub fn peak(&self) -> Bytes {
        self.update.peak_memory_bytes.iter().copied().max().expect("invariant: a plan has a stage")
    }
}

/// The time of a forward pass over the samples of a training step, from the simulated evaluation:
/// its micro-batches follow one another through all stages.
fn forward(compiled: &Compiled, topology: &Topology, costs: &CostModel) -> Result<Seconds, PostTrainingError> {
    let evaluation = &compiled.evaluation;
    let step = predict_step(evaluation, topology, costs, &Options::default())?;
    let at_once = |samples: usize| (samples * evaluation_passes(compiled)) as f64 / evaluation.samples as f64;
    let behind = (evaluation.mesh.stage_count() - 1) as f64;
    let passes = evaluation_passes(compiled) as f64;
    Ok(step * ((at_once(compiled.training.samples) + behind) / (passes + behind)))
}

/// Number of micro-batches of the evaluation.
fn evaluation_passes(compiled: &Compiled) -> usize {
    let numbers = compiled.evaluation.lists.iter().flat_map(|list| &list.instructions).filter_map(|list| list.micro_batch);
    numbers.max().map_or(1, |last| last as usize + 1)
}
