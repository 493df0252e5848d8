//! Foretelling a loaded plan: what `simulate`, `execute` and `run` have in common.

use crate::failure::Failure;
use crate::output::note;
use crate::plan_file::LoadedPlan;
use foretell_program::{Compiled, Plan, Profile, Recompute, compile};
use foretell_reports::{Breakdown, LayoutRow, PredictionSummary, prediction_table};
use foretell_simulator::{CostModel, Oversubscription, Prediction, Simulation};
use foretell_topologies::Topology;
use std::time::Instant;

/// A plan's Programs and what is foretold of them.
pub struct Foretold {
    /// The Programs.
    pub compiled: Compiled,
    /// The summary.
    pub prediction: Prediction,
    /// The timeline and its analysis.
    pub simulation: Simulation,
}

/// Whether several ranks may share a device.
pub fn oversubscription(allowed: bool) -> Oversubscription {
    if allowed { Oversubscription::Allowed } else { Oversubscription::Refused }
}

/// Compiles and simulates.
pub fn foretell(loaded: &LoadedPlan, profile: Option<&Profile>, oversubscribe: bool) -> Result<Foretold, Failure> {
    let started = Instant::now();
    let compiled = compile(&loaded.model.model, &loaded.model.name, &loaded.plan)?;
    let ranks = compiled.training.mesh.world_size();
    let devices = loaded.topology.device_count();
    if ranks > devices && !oversubscribe {
        let hint = "use a smaller layout, more `nodes`, or `--oversubscribe` to check it without timing it";
        return Err(Failure::Input(format!(
            "the layout has {ranks} ranks, but `{}` has {devices} devices; hint: {hint}",
            loaded.topology.name()
        )));
    }
    let costs = CostModel::new(profile, &loaded.topology);
    let (mut prediction, simulation) =
        foretell_simulator::predict(&compiled.training, &loaded.topology, &costs, oversubscription(oversubscribe))?;
    prediction.peak_memory_bytes = compiled.arenas();
    prediction.wall_seconds = foretell_units::Seconds::new(started.elapsed().as_secs_f64());
    Ok(Foretold { compiled, prediction, simulation })
}

/// What a person sees of a prediction.
pub fn table(prediction: &Prediction, topology: &Topology) -> String {
    let breakdown = &prediction.breakdown_seconds;
    let known_peak = prediction.mfu > 0.0;
    prediction_table(&PredictionSummary {
        step: prediction.step_seconds,
        interval: Some((prediction.step_seconds_p10, prediction.step_seconds_p90)),
        samples_per_second: prediction.samples_per_second,
        tokens_per_second: prediction.tokens_per_second,
        mfu: known_peak.then_some(prediction.mfu),
        hfu: known_peak.then_some(prediction.hfu),
        peak_memory: prediction.peak_memory_bytes.clone(),
        device_memory: topology.device_kinds().iter().map(|kind| kind.memory).min(),
        breakdown: Breakdown {
            compute: breakdown.compute,
            exposed_communication: breakdown.exposed_communication,
            bubble: breakdown.bubble,
            data: breakdown.data,
            optimizer: breakdown.optimizer,
        },
        calibrated: prediction.calibrated,
    })
}

/// What every answer has to say of itself.
pub fn remarks(topology: &Topology, prediction: &Prediction, ranks: usize) {
    for remark in topology.notes() {
        note(&remark);
    }
    if !prediction.calibrated {
        let example = prediction.uncalibrated.first().map_or(String::new(), |what| format!(" (first: {what})"));
        note(&format!("this prediction is not calibrated: {} durations are estimates{example}", prediction.uncalibrated.len()));
    }
    if ranks > topology.device_count() {
        note(&format!("{ranks} ranks share {} devices: good for checking a layout, not for timing it", topology.device_count()));
    }
}

/// A layout's row in the planner's table.
pub fn row(plan: &Plan, prediction: &Prediction) -> LayoutRow {
    let layout = &plan.layout;
    LayoutRow {
        data: layout.data,
        tensor: layout.tensor,
        pipeline: layout.pipeline,
        schedule: if layout.pipeline > 1 { layout.schedule.name().into() } else { "-".into() },
        micro_batch: layout.micro_batch,
        recompute: match layout.recompute {
            Recompute::None => "none",
            Recompute::Selective => "selective",
            Recompute::Full => "full",
        }
        .into(),
        step: prediction.step_seconds,
        samples_per_second: prediction.samples_per_second,
        memory: prediction.peak_memory_bytes.iter().copied().max().unwrap_or_default(),
        mfu: (prediction.mfu > 0.0).then_some(prediction.mfu),
    }
}
