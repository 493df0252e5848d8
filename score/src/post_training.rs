//! Rows of RL post-training (`tests/published/rl.csv`), predicted as a plan with a rollout. Columns
//! for the actor's training are named as in other tables, so [`Run::of`] reads its plan.
//! [`is_held_out`] tells which sources are held out; the others decided `STEP_OVERHEAD` and
//! `BETWEEN_NODES` of the simulator's `post_training/engine.rs`.

use crate::refusal::Refusal;
use crate::row::Row;
use crate::run::Run;
use foretell_program::{Plan, PolicyMethod, Reward, Rollout, RolloutOffload, RolloutPlacement};
use foretell_simulator::gpu::Profiles;
use foretell_simulator::{ActorJob, CostModel, PostTrainingPrediction, predict_post_training};
use foretell_units::diagnostic::one_line;
use rayon::prelude::*;
use schemars::JsonSchema;
use serde::Serialize;
use sha2::{Digest, Sha256};

/// A row of RL post-training with its prediction.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct ScoredRollout {
    /// The row's name.
    pub row_id: String,
    /// Its source.
    pub source: String,
    /// Whether its source is held out.
    pub held_out: bool,
    /// Measured seconds of a step.
    pub measured_step_seconds: Option<f64>,
    /// Predicted seconds of a step.
    pub predicted_step_seconds: Option<f64>,
    /// Predicted over measured, less one.
    pub error: Option<f64>,
    /// Measured bytes of a device.
    pub measured_memory_bytes: Option<f64>,
    /// Predicted bytes of the fullest device.
    pub predicted_memory_bytes: Option<f64>,
    /// Whether all roles are predicted to fit in memory. Rows with a measured step did fit.
    pub fits: Option<bool>,
    /// Predicted over measured memory, less one.
    pub memory_error: Option<f64>,
    /// Measured and predicted seconds of generation.
    pub generation_seconds: [Option<f64>; 2],
    /// Measured and predicted seconds of updates.
    pub training_seconds: [Option<f64>; 2],
    /// Why there is no prediction.
    pub refused: Option<String>,
}

/// The scores of rows of RL post-training.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct RolloutScores {
    /// Every row of the table.
    pub rows: Vec<ScoredRollout>,
    /// Errors of step times and memory over rows of sources that are not held out.
    pub seen: RolloutErrors,
    /// The same errors over rows of held-out sources.
    pub held_out: RolloutErrors,
}

/// Errors of some rows.
#[derive(Clone, Copy, Debug, Default, Serialize, JsonSchema)]
pub struct RolloutErrors {
    /// Rows with a prediction and a measured step.
    pub rows: usize,
    /// Mean of the absolute errors of step times.
    pub mean_error: Option<f64>,
    /// Median of the absolute errors of step times.
    pub median_error: Option<f64>,
    /// Rows whose predicted step is within 25 % of the measured one.
    pub within_a_quarter: usize,
    /// Rows with a prediction and a measured step that are predicted to fit.
    pub said_to_fit: usize,
    /// Rows with a prediction and measured memory.
    pub rows_with_memory: usize,
    /// Mean of the absolute errors of memory.
    pub mean_memory_error: Option<f64>,
}

/// Whether this is a table of RL post-training: some row has the column `prompts_per_step`.
pub fn are_rollouts(rows: &[Row]) -> bool {
    rows.iter().any(|row| row.cells.contains_key("prompts_per_step"))
}

/// Whether a source is held out: the SHA-256 of its name begins with an even byte.
pub fn is_held_out(source: &str) -> bool {
    Sha256::digest(source.as_bytes())[0].is_multiple_of(2)
}

/// Predicts every row.
pub fn score_rollouts(rows: &[Row], profiles: &Profiles) -> RolloutScores {
    let rows: Vec<ScoredRollout> = rows.par_iter().map(|row| scored(row, profiles)).collect();
    let errors = |held_out| RolloutErrors::of(rows.iter().filter(|row| row.held_out == held_out));
    RolloutScores { seen: errors(false), held_out: errors(true), rows }
}

fn scored(row: &Row, profiles: &Profiles) -> ScoredRollout {
    let source = row.cells.get("source").cloned().unwrap_or_default();
    let predicted = predict(row, profiles);
    let (measured, memory) = (row.step_seconds(), row.memory_bytes());
    let figure = |figure: fn(&PostTrainingPrediction) -> f64| predicted.as_ref().ok().map(figure);
    let error = |predicted: Option<f64>, measured: Option<f64>| Some(predicted? / measured? - 1.0);
    let step = figure(|prediction| prediction.step_seconds);
    let peak = figure(|prediction| prediction.peak_memory_bytes as f64);
    ScoredRollout {
        row_id: row.row_id.clone(),
        held_out: is_held_out(&source),
        source,
        measured_step_seconds: measured,
        predicted_step_seconds: step,
        error: error(step, measured),
        measured_memory_bytes: memory,
        predicted_memory_bytes: peak,
        fits: predicted.as_ref().ok().map(|prediction| prediction.fits),
        memory_error: error(peak, memory),
        generation_seconds: [row.number("generation_s"), figure(|prediction| prediction.generation_seconds)],
        training_seconds: [row.number("training_s"), figure(|prediction| prediction.training_seconds)],
        refused: predicted.err().map(|Refusal(reason)| reason),
    }
}

/// Predicts a row.
fn predict(row: &Row, profiles: &Profiles) -> Result<PostTrainingPrediction, Refusal> {
    let refused = |error: &dyn miette::Diagnostic| Refusal(one_line(error));
    let (method, rollout) = rollout(row)?;
    let run = Run::of(row, profiles)?;
    let topology = run.topology()?;
    let devices = run.devices() + rollout.own_devices();
    let nodes = devices.div_ceil(run.cluster.devices_per_node);
    let topology = topology.with_nodes(nodes.max(1)).map_err(|error| refused(&error))?;
    let update = row.count("update_responses").unwrap_or(rollout.responses());
    let plan = Plan { global_batch: update, ..run.plan.clone() };
    let job = ActorJob::new(&run.model, &plan, &rollout, None).map_err(|error| refused(&error))?;
    let costs = CostModel::new(None, &topology).with_plan(&topology, &job.plan, &job.model).map_err(|error| refused(&error))?;
    let predicted =
        predict_post_training(method, &rollout, &job, &row.model, &topology, &costs).map_err(|error| refused(&error))?;
    match predicted.engine {
        Some(_) => Ok(predicted),
        None => Err(Refusal("an engine has no memory for a sequence".into())),
    }
}

/// The rollout of a row.
fn rollout(row: &Row) -> Result<(PolicyMethod, Rollout), Refusal> {
    let required = |column: &str, what: &str| row.count(column).ok_or_else(|| Refusal(format!("{what} not stated")));
    let algorithm = row.cells.get("algorithm").map_or("", String::as_str);
    let method = match algorithm {
        text if text.starts_with("GRPO") || text.starts_with("DAPO") => PolicyMethod::Grpo,
        text if text.starts_with("PPO") => PolicyMethod::Ppo,
        text => return Err(Refusal(format!("the algorithm `{text}` is not planned"))),
    };
    let responses = required("responses", "the number of responses is")?;
    let prompt = required("prompt_mean", "the length of prompts is")?;
    let response = required("response_mean", "the mean length of responses is")?;
    let response_max = required("response_most", "the greatest length of responses is")?;
    let samples = row.count("rollouts_per_prompt").unwrap_or(1);
    let mut rollout = Rollout::new([responses / samples.max(1), samples], [prompt, response, response_max]);
    rollout.tensor = row.count("rollout_tensor_parallel").unwrap_or(1);
    rollout.memory_share = row.number("engine_share").unwrap_or(rollout.memory_share);
    rollout.concurrency = row.count("engine_sequences").unwrap_or(rollout.concurrency);
    rollout.reference = !algorithm.starts_with("DAPO");
    // Methods with a critic are assumed to have a reward model as well.
    rollout.reward = if method.has_critic() { Reward::Model } else { Reward::Verifier };
    match row.count("engine_gpus") {
        Some(devices) => {
            rollout.placement = RolloutPlacement::Split(devices);
            rollout.off_policy = row.count("off_policy").unwrap_or(0);
        }
        None => rollout.offload = RolloutOffload::All,
    }
    Ok((method, rollout))
}

impl RolloutErrors {
    fn of<'a>(rows: impl Iterator<Item = &'a ScoredRollout> + Clone) -> Self {
        let absolute =
            |error: fn(&ScoredRollout) -> Option<f64>| -> Vec<f64> { rows.clone().filter_map(error).map(f64::abs).collect() };
        let (mut steps, memory) = (absolute(|row| row.error), absolute(|row| row.memory_error));
        steps.sort_by(f64::total_cmp);
        let mean = |errors: &[f64]| (!errors.is_empty()).then(|| errors.iter().sum::<f64>() / errors.len() as f64);
        Self {
            rows: steps.len(),
            mean_error: mean(&steps),
            median_error: foretell_units::median(steps.iter().copied(), f64::total_cmp),
            within_a_quarter: steps.iter().filter(|error| **error <= 0.25).count(),
            said_to_fit: rows.clone().filter(|row| row.error.is_some() && row.fits == Some(true)).count(),
            rows_with_memory: memory.len(),
            mean_memory_error: mean(&memory),
        }
    }
}
