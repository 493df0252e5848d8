//! `foretell execute` for a plan of another framework, which then trains on this machine's
//! processors.

use super::{Request, TrainedSteps, ask, python};
use crate::failure::{Failure, code};
use crate::output;
use crate::plan_file::LoadedPlan;
use crate::predict;
use crate::run_folder::{MEASURED_OPERATORS, Measured, PREDICTED_OPERATORS, Predicted, RunFolder};
use crate::training::{SaveEvery, TrainingArguments};
use foretell_program::{Preference, Profile};
use foretell_simulator::traced_prediction;
use foretell_units::{SchemaVersion, median};
use std::collections::BTreeMap;
use std::path::PathBuf;

/// Steps of a run whose length is not stated.
const STEPS: usize = 20;

/// The folder, in a run's, of what was trained.
pub const CHECKPOINTS: &str = "checkpoints";

/// Whether the trained parameters are saved at the end.
pub fn saves(arguments: &TrainingArguments) -> bool {
    arguments.save_every != Some(SaveEvery::Never)
}

/// Refuses options that a framework's run does not read.
///
/// # Errors
/// [`Failure::Input`] that names the first of them.
pub fn refuse_options(arguments: &TrainingArguments) -> Result<(), Failure> {
    let given = [
        ("--epochs", arguments.epochs.is_some()),
        ("--data", arguments.data.is_some()),
        ("--workers", arguments.workers.is_some()),
        ("--prefetch", arguments.prefetch.is_some()),
        ("--augment", arguments.augment.is_some()),
        ("--on-bad-sample", arguments.on_bad_sample.is_some()),
        ("--init", arguments.init.is_some()),
        ("--save-every", matches!(arguments.save_every, Some(SaveEvery::Steps(_)))),
        ("--keep", arguments.keep.is_some()),
        ("--tensorboard", arguments.tensorboard),
        ("--record-order", arguments.record_order.is_some()),
        ("--replay-order", arguments.replay_order.is_some()),
        ("--tcp", arguments.tcp),
        ("--transport", arguments.transport.is_some()),
    ];
    let Some((option, _)) = given.into_iter().find(|(_, is_given)| *is_given) else { return Ok(()) };
    let message = format!("`{option}` is of our own executor, and the plan's framework trains: on random samples, over gloo");
    Err(Failure::input(code::OPTION_VALUE, message)
        .hint("leave it out; `--steps`, `--seed`, `--run` and `--save-every never` count here"))
}

/// Says what the trainer takes where the plan leaves it open, and what the prediction assumes.
fn note_assumptions(loaded: &LoadedPlan) {
    if loaded.plan.training.learning_rate.is_none() {
        output::note("the trainer's learning rate is 0.0001; `training.learning_rate` states another");
    }
    if let Some(preference @ (Preference::Orpo | Preference::Kto)) = loaded.plan.workload.preference {
        let name = preference.name();
        output::note(&format!("`{name}`: its loss over the vocabulary is predicted as that of language modelling"));
    }
}

fn unreadable(error: std::io::Error) -> Failure {
    Failure::undone(code::SYSTEM, format!("the folder of the run has no absolute path: {error}"))
}

/// Predicts a plan, and lets its framework train. Returns the framework's measurements.
pub fn execute(
    loaded: &LoadedPlan,
    profile: &Profile,
    arguments: &TrainingArguments,
    stated: Option<&PathBuf>,
    folder: &RunFolder,
) -> Result<TrainedSteps, Failure> {
    let mut request = Request::of(loaded)?;
    request.steps = arguments.steps.unwrap_or(STEPS);
    request.seed = arguments.seed.unwrap_or(0);
    request.checkpoint =
        saves(arguments).then(|| std::path::absolute(folder.file(CHECKPOINTS))).transpose().map_err(unreadable)?;
    note_assumptions(loaded);
    let costs = predict::costs(Some(profile), &loaded.topology, &loaded.plan, &loaded.model.model)?;
    let traced = traced_prediction(&loaded.plan, &loaded.model.model, &loaded.topology, &costs).map_err(|untraced| {
        let message = format!("the profile does not predict this plan: its operators are not known for {}", untraced.reason);
        let hint = "measure this plan with `foretell calibrate --stack`";
        Failure::input(code::PLAN_CONTRADICTION, message).hint(hint).in_file(&loaded.path)
    })?;
    let predicted = predict::predict(loaded, Some(profile), false)?;
    predict::require_fit(&predicted, loaded)?;
    folder.keep_profile(profile)?;
    let operators: BTreeMap<&str, f64> =
        traced.time.by_operator.iter().map(|(name, time)| (name.as_str(), time.value())).collect();
    folder.keep(PREDICTED_OPERATORS, &operators)?;
    let document = Predicted {
        schema_version: SchemaVersion,
        name: loaded.model.name.clone(),
        prediction: predicted.prediction,
        timeline: predicted.timeline,
        input: None,
    };
    folder.keep_prediction(&document)?;
    folder.keep_plan(loaded)?;
    let module = "foretell.trace.train";
    let trained: TrainedSteps = output::with_spinner("train", || ask(python(stated), module, &request))?;
    let step = median(trained.step_seconds.iter().copied(), f64::total_cmp).ok_or_else(|| {
        Failure::undone(code::FRAMEWORK, "the framework trained no step that counts").hint("train more steps with `--steps`")
    })?;
    let measured = Measured {
        schema_version: SchemaVersion,
        step_seconds: step,
        steps: trained.step_seconds.len(),
        peak_memory_bytes: trained.peak_bytes.clone(),
        checkpoint_seconds: None,
        checkpoint_write_seconds: None,
        reference: None,
    };
    folder.keep_measured(&measured)?;
    folder.keep(MEASURED_OPERATORS, &trained)?;
    Ok(trained)
}
