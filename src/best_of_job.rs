//! The best layout of each of several jobs that are compared: the cells of a table, or numbers of
//! devices.

use crate::choices::{Choices, Setting};
use crate::explain::safest;
use crate::failure::{Failure, code};
use crate::post_training;
use crate::usual_stack::Trainer;
use foretell_planner::{PlannerError, PostTrainingPlanError};
use foretell_program::Profile;
use foretell_simulator::PostTrainingError;
use foretell_units::Bytes;

/// The result of a job's search.
pub enum BestOfJob {
    /// A layout that fits.
    Fits(Fitting),
    /// No layout fits. Contains the memory of the smallest one; `None` if there are too few devices
    /// for any.
    DoesNotFit(Option<Bytes>),
    /// The job cannot be planned.
    Refused(Failure),
}

/// A layout that fits.
pub struct Fitting {
    /// Its number of ranks; with engines, the number of devices of all roles.
    pub devices: usize,
    /// Memory of the fullest device.
    pub memory: Option<u64>,
    /// The predicted step.
    pub step_seconds: f64,
    /// Tokens per second over all devices, or samples if they are no sequences.
    pub rate: f64,
    /// The chance of running out of memory, if it is known.
    pub chance_of_running_out: Option<f64>,
    /// Whether running out of memory is likelier than not.
    pub probably_runs_out: bool,
    /// The layout in words.
    pub layout: String,
}

/// Searches a job. Of the `layouts` fastest, returns the first that is unlikely to run out of
/// memory, or the fastest if there is none.
///
/// # Errors
/// Fails if a plan that was found has no mesh.
pub fn best_of_job(job: &Choices, profile: Option<&Profile>, layouts: usize) -> Result<BestOfJob, Failure> {
    let mut setting = match job.setting(Trainer::Framework) {
        Ok(setting) => setting,
        Err(failure) => return Ok(BestOfJob::Refused(failure)),
    };
    if setting.policy.is_some() {
        return best_placement(job, &setting, profile);
    }
    let planned = match job.search(&mut setting, profile, layouts) {
        Ok(planned) => planned,
        Err(Failure::Unplanned(PlannerError::OutOfMemory { needed, .. })) => return Ok(BestOfJob::DoesNotFit(Some(needed))),
        Err(failure) => return Ok(BestOfJob::Refused(failure)),
    };
    let Some(best) = safest(&planned.candidates).or(planned.candidates.first()) else {
        return Ok(BestOfJob::Refused(Failure::undone(code::NOTHING_FITS, "the search returned nothing")));
    };
    let prediction = &best.prediction;
    Ok(BestOfJob::Fits(Fitting {
        devices: best.plan.mesh()?.world_size(),
        memory: prediction.peak_memory_bytes.iter().copied().max().map(Bytes::count),
        step_seconds: prediction.step_seconds.value(),
        rate: prediction.tokens_per_second.unwrap_or(prediction.samples_per_second),
        chance_of_running_out: prediction.chance_of_running_out,
        probably_runs_out: prediction.probably_runs_out(),
        layout: best.plan.layout.in_words(),
    }))
}

/// Searches placements of the roles of RL post-training.
fn best_placement(job: &Choices, setting: &Setting, profile: Option<&Profile>) -> Result<BestOfJob, Failure> {
    let planned = match post_training::search(job, setting, profile, 1)? {
        Ok(planned) => planned,
        Err(PostTrainingPlanError::OutOfMemory { needed, .. }) => return Ok(BestOfJob::DoesNotFit(Some(needed))),
        Err(
            PostTrainingPlanError::NoPlacement { .. }
            | PostTrainingPlanError::Prediction(PostTrainingError::TooFewDevices { .. }),
        ) => return Ok(BestOfJob::DoesNotFit(None)),
        Err(PostTrainingPlanError::Planner(error)) => return Ok(BestOfJob::Refused(Failure::Unplanned(error))),
        Err(error) => return Ok(BestOfJob::Refused(Failure::of_undone(error))),
    };
    let Some(best) = planned.candidates.first() else {
        return Ok(BestOfJob::Refused(Failure::undone(code::NOTHING_FITS, "the search returned nothing")));
    };
    Ok(BestOfJob::Fits(Fitting {
        devices: best.plan.mesh()?.world_size() + best.rollout.own_devices(),
        memory: Some(best.prediction.peak_memory_bytes),
        step_seconds: best.prediction.step_seconds,
        rate: best.prediction.tokens_per_second,
        chance_of_running_out: None,
        probably_runs_out: false,
        layout: format!("{}; {}", post_training::engines_in_words(&best.rollout), best.plan.layout.in_words()),
    }))
}
