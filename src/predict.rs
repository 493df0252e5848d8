//! Foretelling a loaded plan: what `simulate`, `execute` and `run` have in common.

use crate::failure::Failure;
use crate::output::note;
use crate::plan_file::LoadedPlan;
use foretell_program::{Compiled, Footprint, Plan, Profile, Rank, StageLayout};
use foretell_reports::{Breakdown, LayoutRow, PredictionSummary, prediction_table};
use foretell_simulator::{
    CostModel, Disturbance, Options, Oversubscription, Prediction, Recording, Simulation, device_memory, device_memory_by_stage,
    host_memory, predict_with, simulate,
};
use foretell_topologies::{Architecture, Topology};
use foretell_units::{Bytes, DataType, Seconds};
use std::collections::BTreeMap;
use std::time::Instant;

/// A plan's Programs and what is foretold of them.
pub struct Foretold {
    /// The Programs.
    pub compiled: Compiled,
    /// The summary.
    pub prediction: Prediction,
    /// The timeline and its analysis.
    pub simulation: Simulation,
    /// Where jitter or stragglers were asked for, the step without them.
    pub undisturbed: Option<Seconds>,
    /// The first device that has too little memory, if any has.
    misfit: Option<Misfit>,
    /// What the ranks of a node have on its host, where that is more than it has.
    crowded: Option<Bytes>,
}

/// Whether several ranks may share a device.
pub fn oversubscription(allowed: bool) -> Oversubscription {
    if allowed { Oversubscription::Allowed } else { Oversubscription::Refused }
}

/// Compiles and simulates.
pub fn foretell(loaded: &LoadedPlan, profile: Option<&Profile>, oversubscribe: bool) -> Result<Foretold, Failure> {
    foretell_with(loaded, profile, &Options { oversubscription: oversubscription(oversubscribe), ..Options::default() })
}

/// Compiles and simulates as the options say.
pub fn foretell_with(loaded: &LoadedPlan, profile: Option<&Profile>, options: &Options) -> Result<Foretold, Failure> {
    let started = Instant::now();
    let compiled = loaded.compile()?;
    let ranks = compiled.training.mesh.world_size();
    let devices = loaded.topology.device_count();
    if ranks > devices && options.oversubscription == Oversubscription::Refused {
        let hint = "use a smaller layout, more `nodes`, or `--oversubscribe` to check it without timing it";
        return Err(Failure::Input(format!(
            "{}: the layout has {ranks} ranks, but `{}` has {devices} devices; hint: {hint}",
            loaded.path.display(),
            loaded.topology.name()
        )));
    }
    if let Some((rank, _)) = options.disturbance.stragglers.iter().find(|(rank, _)| rank.0 >= ranks) {
        return Err(Failure::Input(format!("`--straggler` names {rank}, but the layout has {ranks} ranks, which begin with 0")));
    }
    let costs = costs(profile, &loaded.topology, &loaded.plan)?;
    let (prediction, simulation) = predict_with(&compiled.training, &loaded.topology, &costs, options)?;
    let undisturbed = (!options.disturbance.is_none()).then(|| {
        let options = Options { disturbance: Disturbance::default(), recording: Recording::Ends, ..options.clone() };
        simulate(&compiled.training, &loaded.topology, &costs, &options)
    });
    let undisturbed = undisturbed.transpose()?.map(|simulation| simulation.step.into());
    let memory = Memory::of(&compiled, &loaded.plan, &loaded.topology, &costs);
    let mut prediction = memory.applied(prediction);
    prediction.wall_seconds = Seconds::new(started.elapsed().as_secs_f64());
    Ok(Foretold { compiled, prediction, simulation, undisturbed, misfit: memory.misfit, crowded: memory.crowded })
}

/// What devices hold of a plan's Programs.
pub struct Memory {
    /// Of each stage the most of any of its ranks.
    peaks: Vec<Bytes>,
    footprints: Vec<Footprint>,
    misfit: Option<Misfit>,
    /// What the ranks of a node have on its host, where that is more than it has.
    crowded: Option<Bytes>,
}

impl Memory {
    /// With the whole arena, which is also evaluation's, of which the simulator knows nothing; or with what the plan's stack holds, where that is not ours.
    pub fn of(compiled: &Compiled, plan: &Plan, topology: &Topology, costs: &CostModel) -> Self {
        let training = &compiled.training;
        let mesh = &training.mesh;
        let (ranks, devices) = (mesh.world_size(), topology.device_count());
        let mut known: BTreeMap<(usize, usize), Bytes> = BTreeMap::new();
        let (mut peaks, mut footprints) = (compiled.arenas(), Footprint::of_stages(training));
        let is_own = plan.stack.is_own();
        let mut need_of = |rank: Rank, kind: usize| {
            if is_own {
                // A processor's memory is its host's.
                let is_host = topology.device_kinds()[kind].architecture == Architecture::Cpu;
                let on_host = if is_host { compiled.host_arena_of(rank) } else { Bytes::ZERO };
                return compiled.arena_of(rank) + on_host;
            }
            let list = training.list_index(rank);
            let held = || device_memory(&training.lists[list], training.precision, costs, kind).total();
            *known.entry((list, kind)).or_insert_with(held)
        };
        // Ranks go round the devices, as in the simulator, so that several may share one.
        let mut misfit = None;
        for (index, device) in topology.devices().take(ranks).enumerate() {
            let sharers: Vec<Rank> = (index..ranks).step_by(devices).map(Rank).collect();
            let kind = topology.kind_index(device);
            let need = sharers.iter().map(|&rank| need_of(rank, kind)).fold(Bytes::ZERO, |sum, need| sum + need);
            let limit = topology.device_kind(device).memory;
            if need <= limit || misfit.is_some() {
                continue;
            }
            let largest = sharers.iter().copied().max_by_key(|&rank| (need_of(rank, kind), std::cmp::Reverse(rank)));
            let stage = largest.map_or(0, |rank| mesh.stage_of(rank));
            let kind = topology.device_kind(device).name.clone();
            misfit = Some(Misfit { stage, ranks: sharers.len(), need, kind, limit });
        }
        if !is_own {
            footprints = device_memory_by_stage(training, topology, costs);
            peaks = footprints.iter().map(Footprint::total).collect();
        }
        let on_hosts = host_memory(training, topology);
        let crowded = (!on_hosts.fits).then_some(on_hosts.fullest_node);
        Self { peaks, footprints, misfit, crowded }
    }

    /// A prediction that says so.
    pub fn applied(&self, mut prediction: Prediction) -> Prediction {
        prediction.peak_memory_bytes.clone_from(&self.peaks);
        prediction.memory_by_component.clone_from(&self.footprints);
        prediction.fits = self.misfit.is_none() && self.crowded.is_none();
        prediction
    }
}

/// What things cost: by the profile where there is one for a kind of device, by what is known of such GPUs and the plan's stack, or by the data
/// sheet.
pub fn costs(profile: Option<&Profile>, topology: &Topology, plan: &Plan) -> Result<CostModel, Failure> {
    has_products(topology, plan.precision)?;
    let costs = CostModel::new(profile, topology).with_stack(topology, plan.stack.name(), plan.unstated_format());
    costs.map_err(|error| Failure::Input(error.to_string()))
}

/// Refuses a precision of whose products a topology's devices know nothing.
pub fn has_products(topology: &Topology, precision: DataType) -> Result<(), Failure> {
    if precision == DataType::Fp8 {
        let kinds = topology.device_kinds().iter();
        // Processors have no arithmetic of eight bits either, and run it to the same numbers: to try out what a GPU would train.
        let without = kinds.filter(|kind| kind.architecture != Architecture::Cpu && !kind.peak.contains_key(&DataType::Fp8));
        let names: Vec<String> = without.map(|kind| format!("`{}`", kind.name)).collect();
        if !names.is_empty() {
            return Err(Failure::Input(format!(
                "`precision: fp8`: no products of eight bits are known of {}; hint: use `precision: bf16`, or state the device's `peak: {{fp8: ..}}`",
                names.join(", ")
            )));
        }
    }
    Ok(())
}

/// Refuses a plan that does not fit its devices.
pub fn fitting(foretold: &Foretold, loaded: &LoadedPlan) -> Result<(), Failure> {
    let plan = loaded.path.display();
    if let Some(held) = &foretold.crowded {
        let hint = "use `offload: none`, a higher `zero`, or more nodes";
        return Err(Failure::Undone(format!(
            "{plan}: the plan does not fit: the ranks of a node have {held} on its host, which is more than it has; hint: {hint}"
        )));
    }
    let Some(Misfit { stage, ranks, need, kind, limit }) = &foretold.misfit else {
        return Ok(());
    };
    let who = if *ranks > 1 { format!("stage {stage} and what shares its device need") } else { format!("stage {stage} needs") };
    let hint = "use a larger `tensor` or `pipeline`, a smaller `micro_batch`, or `recompute: full`";
    Err(Failure::Undone(format!(
        "{plan}: the plan does not fit: {who} {need}, but a device of `{kind}` has {limit}; hint: {hint}"
    )))
}

/// A device that has less memory than its ranks need.
struct Misfit {
    /// The stage of that which needs the most.
    stage: usize,
    /// The ranks on the device.
    ranks: usize,
    need: Bytes,
    /// The kind of the device, and its memory.
    kind: String,
    limit: Bytes,
}

/// What a person sees of a prediction.
pub fn table(prediction: &Prediction, topology: &Topology) -> String {
    let breakdown = &prediction.breakdown_seconds;
    let known_peak = prediction.mfu > 0.0;
    let fullest = prediction.memory_by_component.iter().max_by_key(|footprint| footprint.total());
    prediction_table(&PredictionSummary {
        step: prediction.step_seconds,
        interval: Some((prediction.step_seconds_p10, prediction.step_seconds_p90)),
        samples_per_second: prediction.samples_per_second,
        tokens_per_second: prediction.tokens_per_second,
        mfu: known_peak.then_some(prediction.mfu),
        hfu: known_peak.then_some(prediction.hfu),
        peak_memory: prediction.peak_memory_bytes.clone(),
        memory_parts: fullest.map(foretell_program::Footprint::parts).unwrap_or_default(),
        device_memory: topology.device_kinds().first().map(|kind| kind.memory).filter(|memory| {
            // Of what is not the same for all nothing is said.
            topology.device_kinds().iter().all(|kind| kind.memory == *memory)
        }),
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
    let sizes = |size: &dyn Fn(&StageLayout) -> usize| {
        let mut sizes: Vec<usize> = layout.stages.iter().flatten().map(size).collect();
        sizes.dedup();
        if sizes.is_empty() { vec![size(&layout.stage(0))] } else { sizes }
    };
    LayoutRow {
        data: sizes(&|stage| stage.data),
        tensor: sizes(&|stage| stage.tensor),
        pipeline: layout.pipeline,
        schedule: if layout.follows_schedule() { layout.schedule.name().into() } else { "-".into() },
        micro_batch: layout.micro_batch,
        recompute: layout.recompute.to_string(),
        step: prediction.step_seconds,
        samples_per_second: prediction.samples_per_second,
        memory: prediction.peak_memory_bytes.iter().copied().max().unwrap_or_default(),
        mfu: (prediction.mfu > 0.0).then_some(prediction.mfu),
    }
}
