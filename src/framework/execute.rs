//! `foretell execute` for a plan of another framework, which then trains on this machine's
//! processors.

use super::{Request, TrainedSteps, ask, python};
use crate::failure::{Failure, code};
use crate::output;
use crate::plan_file::LoadedPlan;
use crate::predict;
use crate::run_folder::{MEASURED_OPERATORS, Measured, PREDICTED_OPERATORS, Predicted, RunFolder};
use foretell_program::Profile;
use foretell_simulator::traced_prediction;
use foretell_units::{SchemaVersion, median};
use std::collections::BTreeMap;
use std::path::PathBuf;

/// Steps of a run whose length is not stated.
const STEPS: usize = 20;

/// Predicts a plan, and lets its framework train. Returns the framework's measurements.
pub fn execute(
    loaded: &LoadedPlan,
    profile: &Profile,
    steps: Option<usize>,
    stated: Option<&PathBuf>,
    folder: &RunFolder,
) -> Result<TrainedSteps, Failure> {
    if let Some(preference) = loaded.plan.workload.preference {
        let message = format!("the Trainer that is started here trains on texts, and not by `{}`", preference.name());
        let hint =
            "plan with `--method full` or `--method lora` to execute it here, or write TRL's job with `foretell export --to trl`";
        return Err(Failure::input(code::PLAN_CONTRADICTION, message).hint(hint).in_file(&loaded.path));
    }
    let request = Request::of(loaded, steps.unwrap_or(STEPS))?;
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
