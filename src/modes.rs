//! `plan --mode any`: which mode is best for the layouts that a search has found.
//!
//! Steps in two modes can be compared only if they bring training equally far. The plain objective
//! therefore compares modes with the synchronous result. `--objective time-to-loss` multiplies each
//! mode's time by the samples that it needs according to a table: an assumption, which the answer
//! states.

mod samples_needed;

pub use samples_needed::{SamplesNeeded, name, table};

use crate::choices::{Choices, Objective, Setting};
use crate::failure::{Failure, code};
use crate::plan_file::PlanFile;
use crate::predict;
use foretell_planner::{Candidate, SearchResult};
use foretell_program::{Mode, Plan, Profile, compile};
use foretell_simulator::{Options, Prediction, memory_use, predict_cycle};
use foretell_units::Bytes;
use foretell_units::diagnostic::one_line;
use schemars::JsonSchema;
use serde::Serialize;
use std::path::Path;

/// The number of found layouts with which each mode is tried.
const LAYOUTS: usize = 3;

/// Modes on the command line.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum ModeChoice {
    /// Only the synchronous mode.
    #[default]
    Synchronous,
    /// Every mode of the table of samples needed.
    Any,
}

/// A mode with its best layout.
struct ModeAnswer {
    candidate: Candidate,
    needed: SamplesNeeded,
    /// The time to a loss, relative to the synchronous mode's.
    relative_time: f64,
}

impl ModeAnswer {
    /// The samples that the mode needs, including those whose late gradients servers drop.
    fn samples(&self) -> f64 {
        self.needed.at(self.staleness()) / self.candidate.plan.counted_share()
    }

    /// The mean staleness of the pushes that count; late pushes do not count.
    fn staleness(&self) -> f64 {
        let Candidate { plan, prediction, .. } = &self.candidate;
        let mean = prediction.paces.as_ref().map_or(0.0, |paces| paces.staleness.mean);
        if plan.counted_share() < 1.0 { 0.0 } else { mean }
    }

    /// The time to a loss: seconds for each step that the synchronous mode needs.
    fn time(&self) -> f64 {
        self.candidate.prediction.step_seconds.value() * self.samples()
    }
}

/// The modes, the best first.
pub struct ModeAnswers {
    answers: Vec<ModeAnswer>,
    /// Each mode that no layout can run in, with the reason.
    refused: Vec<(String, String)>,
    /// What the order assumes.
    assumption: String,
}

/// The document of the modes.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "Modes")]
pub struct ModesAnswer {
    /// The modes, the best first.
    modes: Vec<ModeEntry>,
    /// The modes that no layout can run in.
    refused: Vec<RefusedMode>,
    /// What the order assumes.
    assumption: String,
}

/// A mode with its best layout.
#[derive(Debug, Serialize, JsonSchema)]
struct ModeEntry {
    /// The plan. Its paths are absolute.
    plan: PlanFile,
    /// The plan's prediction.
    predicted: Prediction,
    /// The samples that the mode needs to reach a loss, including those whose late gradients
    /// servers drop, as a multiple of the synchronous mode's.
    samples_needed: f64,
    /// The source of that number.
    source: String,
    /// The time to a loss, relative to the synchronous mode's.
    relative_time: f64,
}

/// A mode that no layout can run in.
#[derive(Debug, Serialize, JsonSchema)]
pub struct RefusedMode {
    /// The mode.
    pub mode: String,
    /// The reason.
    pub reason: String,
}

/// Tries modes with the layouts that a search found.
pub fn compare(
    choices: &Choices,
    setting: &Setting,
    profile: Option<&Profile>,
    planned: &SearchResult,
    table: Option<&Path>,
) -> Result<ModeAnswers, Failure> {
    let to_loss = match choices.objective {
        Objective::Time => false,
        Objective::TimeToLoss => true,
        _ => {
            let hint = "use `--objective time` or `--objective time-to-loss`, or leave out `--mode`";
            return Err(Failure::input(code::OPTION_VALUE, "`--mode any` compares times, and no other objective").hint(hint));
        }
    };
    let mut modes = samples_needed::samples_needed(table)?;
    if !to_loss {
        modes.retain(|needed| needed.mode.has_synchronous_result());
    }
    let (mut answers, mut refused) = (Vec::new(), Vec::new());
    for needed in modes {
        match best_layout(choices, setting, profile, planned, needed.mode)? {
            Ok(candidate) => answers.push(ModeAnswer { candidate, needed, relative_time: 0.0 }),
            Err(reason) => refused.push((name(&needed.mode), reason)),
        }
    }
    let synchronous = answers.iter().find(|answer| answer.needed.mode == Mode::Synchronous);
    let synchronous = synchronous.expect("invariant: the search's own mode is synchronous").time();
    for answer in &mut answers {
        answer.relative_time = if synchronous > 0.0 { answer.time() / synchronous } else { 1.0 };
    }
    answers.sort_by(|answer, other| answer.relative_time.total_cmp(&other.relative_time));
    let said_by = match table {
        Some(path) => format!("`{}` says so", path.display()),
        None => {
            "a built-in table from the literature says so, and nothing here measured it with this model; `foretell calibrate \
                 --convergence` does"
                .into()
        }
    };
    let assumption = match to_loss {
        true => format!("this order assumes how many samples each mode needs to reach the same loss: {said_by}"),
        false => {
            "only modes whose result is that of the synchronous mode are compared; `--objective time-to-loss` compares all".into()
        }
    };
    Ok(ModeAnswers { answers, refused, assumption })
}

impl ModeAnswers {
    /// The best mode with its layout.
    pub fn best(&self) -> Option<&Candidate> {
        self.answers.first().map(|answer| &answer.candidate)
    }

    /// The modes in text, a line each.
    pub fn lines(&self) -> Vec<String> {
        let line = |answer: &ModeAnswer| {
            let Candidate { plan, prediction, .. } = &answer.candidate;
            format!(
                "mode {}: {:.2} of the synchronous time to a loss; step {}, {:.2} times the samples ({}); {}",
                name(&plan.mode),
                answer.relative_time,
                prediction.step_seconds,
                answer.samples(),
                answer.needed.source,
                plan.layout.in_words()
            )
        };
        let refused = self.refused.iter().map(|(mode, reason)| format!("mode {mode}: not possible here: {reason}"));
        self.answers.iter().map(line).chain(refused).chain([format!("assumption: {}", self.assumption)]).collect()
    }

    /// The modes as a document.
    pub fn document(&self, choices: &Choices, setting: &Setting) -> Result<ModesAnswer, Failure> {
        let entry = |answer: &ModeAnswer| -> Result<ModeEntry, Failure> {
            Ok(ModeEntry {
                plan: choices.movable_plan_file(setting, &answer.candidate.plan)?,
                predicted: answer.candidate.prediction.clone(),
                samples_needed: answer.samples(),
                source: answer.needed.source.clone(),
                relative_time: answer.relative_time,
            })
        };
        let modes = self.answers.iter().map(entry).collect::<Result<Vec<_>, _>>()?;
        let refused = self.refused.iter().map(|(mode, reason)| RefusedMode { mode: mode.clone(), reason: reason.clone() });
        Ok(ModesAnswer { modes, refused: refused.collect(), assumption: self.assumption.clone() })
    }
}

/// The fastest of the found layouts in a mode, or the reason why the first one cannot run in it.
fn best_layout(
    choices: &Choices,
    setting: &Setting,
    profile: Option<&Profile>,
    planned: &SearchResult,
    mode: Mode,
) -> Result<Result<Candidate, String>, Failure> {
    let (mut best, mut reason): (Option<Candidate>, Option<String>) = (None, None);
    for found in planned.candidates.iter().take(LAYOUTS) {
        match in_mode(choices, setting, profile, found, mode)? {
            Ok(candidate) => {
                let is_better = |best: &Candidate| candidate.prediction.step_seconds < best.prediction.step_seconds;
                if best.as_ref().is_none_or(is_better) {
                    best = Some(candidate);
                }
            }
            Err(why) => {
                reason.get_or_insert(why);
            }
        }
    }
    Ok(best.ok_or_else(|| reason.unwrap_or_else(|| "the search found no layout".into())))
}

/// A found layout in a mode, or the reason why it cannot run in it.
fn in_mode(
    choices: &Choices,
    setting: &Setting,
    profile: Option<&Profile>,
    found: &Candidate,
    mode: Mode,
) -> Result<Result<Candidate, String>, Failure> {
    if mode == found.plan.mode {
        return Ok(Ok(found.clone()));
    }
    let Some(plan) = with_mode(&found.plan, mode, choices.devices(setting)) else {
        return Ok(Err("no devices are left for the servers, or no number of workers divides the batch".into()));
    };
    let (model, topology) = (&setting.model, &setting.topology);
    let compiled = match compile(&model.model, &model.name, &plan) {
        Ok(compiled) => compiled,
        Err(error) => return Ok(Err(one_line(&error))),
    };
    let costs = predict::costs(profile, topology, &plan, &model.model)?;
    let memory = memory_use(&compiled.training, Some(&compiled.evaluation), topology, &costs);
    let options = Options { oversubscription: predict::oversubscription(choices.oversubscribe), ..Options::default() };
    let (prediction, _) = predict_cycle(&compiled, &memory, topology, &costs, &options)?;
    let fullest: Bytes = prediction.peak_memory_bytes.iter().copied().max().unwrap_or_default();
    if !prediction.fits || choices.memory_limit.is_some_and(|limit| fullest > limit) {
        return Ok(Err(format!("a rank would need {fullest}, and no device has so much to spare")));
    }
    let value = prediction.step_seconds.value();
    Ok(Ok(Candidate { plan, prediction, value }))
}

/// A plan in another mode, with at most `devices` devices. Replicas hold complete models. If no
/// device is free for servers, they replace workers.
fn with_mode(plan: &Plan, mode: Mode, devices: usize) -> Option<Plan> {
    let mut plan = Plan { mode, ..plan.clone() };
    let (batch, servers) = (plan.global_batch, mode.servers());
    let layout = &mut plan.layout;
    let has_replicas = layout.shard_group.is_some_and(|group| group < layout.data) && servers == 0;
    if !has_replicas {
        (layout.zero, layout.shard_group) = (0, None);
    }
    let others = layout.tensor * layout.context * layout.expert * layout.pipeline;
    let most = (devices / others.max(1)).checked_sub(servers)?;
    let expert = layout.expert;
    layout.data = (1..=layout.data.min(most)).rev().find(|&workers| batch.is_multiple_of(workers * expert))?;
    let samples = batch / (layout.data * expert);
    layout.micro_batch = (1..=layout.micro_batch).rev().find(|&size| samples.is_multiple_of(size))?;
    Some(plan)
}

#[cfg(test)]
mod tests {
    use super::*;
    use foretell_program::Layout;

    #[test]
    fn servers_take_the_place_of_workers_where_no_device_is_free() {
        let servers = |text: &str| serde_json::from_str::<Mode>(text).expect("a mode");
        let plan = Plan::new(Layout { data: 8, tensor: 2, zero: 1, micro_batch: 3, ..Layout::default() }, 48);
        let two = servers(r#"{"parameter_server": {"servers": 2}}"#);
        let on =
            |devices| with_mode(&plan, two, devices).map(|plan| (plan.layout.data, plan.layout.micro_batch, plan.layout.zero));
        assert_eq!(on(20), Some((8, 3, 0)));
        assert_eq!(on(16), Some((6, 2, 0)));
        assert_eq!((on(6), on(4), on(2)), (Some((1, 3, 0)), None, None));
    }
}
