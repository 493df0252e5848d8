//! `foretell calibrate`: times this machine's kernels and transport, and writes a profile.

use crate::execute::executable_here;
use crate::failure::Failure;
use crate::inputs::{self, NamedModel};
use crate::output;
use crate::plan::Precision;
use crate::plan_file::PlanFile;
use clap::Args;
use foretell_executor::{CalibrationJob, LaunchOptions, TransportKind, calibrate, message_sizes, supported};
use foretell_models::{Kernel, Model};
use foretell_planner::{Fixed, space};
use foretell_program::{Compiled, Operation, Plan, Profile, compile};
use foretell_topologies::Topology;
use foretell_units::{Bytes, DataType, Seconds};
use std::collections::BTreeSet;
use std::path::PathBuf;

/// Time this machine's kernels and transport
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  foretell calibrate --topology local --model mlp --global-batch 128 -o profile.yaml")]
pub struct Arguments {
    /// The topology whose devices are measured: `local`, or a file that describes this machine
    #[arg(long)]
    topology: String,
    /// The model whose kernels are measured; without it, those of a small model of each family
    #[arg(long)]
    model: Option<String>,
    /// Samples of one step, from which the kernels' sizes follow
    #[arg(long, value_name = "SAMPLES")]
    global_batch: Option<usize>,
    /// Measure the kernels of this plan only
    #[arg(long, value_name = "FILE", conflicts_with_all = ["model", "global_batch", "precision"])]
    plan: Option<PathBuf>,
    /// The precision in which kernels are measured [default: the plan's, or fp32]
    #[arg(long, value_name = "FORMAT")]
    precision: Option<Precision>,
    #[command(flatten)]
    patience: Patience,
    /// Measure TCP over the loopback interface instead of shared memory
    #[arg(long)]
    tcp: bool,
    /// The profile to write
    #[arg(short, long, value_name = "FILE", default_value = "profile.yaml")]
    output: PathBuf,
}

/// How thorough a calibration is.
#[derive(Debug, Clone, Copy, Args)]
pub struct Patience {
    /// How long each kernel is timed, over all passes; a slow one at least a few times
    #[arg(long, value_name = "TIME", default_value = "25ms")]
    patience: Seconds,
    /// How long the passes over all kernels go on at least: to see how the devices change their pace
    #[arg(long, value_name = "TIME", default_value = "6s")]
    calibration_time: Seconds,
}

/// Runs the command.
pub fn run(arguments: &Arguments, json: bool) -> Result<(), Failure> {
    let topology = inputs::topology(&arguments.topology, None)?;
    executable_here(&topology)?;
    let mut kernels = BTreeSet::new();
    let mut footprint = Bytes::ZERO;
    let mut precision = arguments.precision.map_or(DataType::Fp32, DataType::from);
    let models = match (&arguments.plan, &arguments.model) {
        (Some(path), _) => {
            let loaded = PlanFile::load(path)?;
            supported(&loaded.plan)?;
            let compiled = loaded.compile()?;
            footprint = collect(&compiled, &mut kernels);
            precision = loaded.plan.precision;
            vec![loaded.model]
        }
        (None, Some(name)) => vec![inputs::model(name)?],
        (None, None) => small_models(),
    };
    for model in models.iter().filter(|_| arguments.plan.is_none()) {
        let sequences = matches!(model.model, Model::Gpt { .. });
        let batch = arguments.global_batch.unwrap_or(topology.device_count() * if sequences { 8 } else { 32 });
        let base = Plan { precision, batch_norm_group: None, ..Plan::new(Default::default(), batch) };
        supported(&base)?;
        for optimizer in [foretell_program::Optimizer::Sgd, foretell_program::Optimizer::AdamW] {
            let base = Plan { optimizer, ..base.clone() };
            let (wanted, bytes) = wanted(&model.model, &model.name, &base, &topology, topology.device_count(), &Fixed::default());
            kernels.extend(wanted);
            footprint = footprint.max(bytes);
        }
    }
    let model = models.first().map(|model| model.model.clone());
    let transport = if arguments.tcp { TransportKind::Tcp } else { TransportKind::SharedMemory };
    let profile = measure(kernels, precision, footprint, model, &topology, arguments.patience, transport)?;
    let text = to_yaml(&profile)?;
    output::write(&arguments.output, text.as_bytes())?;
    if json {
        return output::json(&profile);
    }
    output::line(&format!(
        "{} kernels and {} exchanges of {} ({} at once) are in {}\n\
         an instruction costs {} beside its kernel, a hand-over between streams {}, a step {}",
        profile.kernels.len(),
        profile.exchanges.len(),
        profile.machine.device,
        profile.machine.devices,
        arguments.output.display(),
        profile.instruction_overhead.median,
        profile.stream_handoff.median,
        profile.step_overhead.median,
    ))
}

/// A profile as YAML.
pub fn to_yaml(profile: &Profile) -> Result<String, Failure> {
    serde_saphyr::to_string(profile).map_err(|error| Failure::Undone(format!("the profile cannot be written: {error}")))
}

/// Measures on this machine.
pub fn measure(
    kernels: BTreeSet<(Kernel, bool)>,
    precision: DataType,
    footprint: Bytes,
    model: Option<Model>,
    topology: &Topology,
    patience: Patience,
    transport: TransportKind,
) -> Result<Profile, Failure> {
    let cores = foretell_executor::machine::core_count();
    let devices = topology.device_count().min(cores).max(1);
    let kind = topology.device_kinds().first().map(|kind| kind.name.clone()).unwrap_or_default();
    let Patience { patience, calibration_time } = patience;
    let kernels = kernels.into_iter().collect();
    let (messages, duration) = (message_sizes(), calibration_time);
    let job = CalibrationJob { kernels, precision, footprint, messages, patience, duration, model };
    let bar = output::progress(100, "calibrate");
    let mut show = |share: f64| bar.set_position((share * 100.0) as u64);
    let profile = calibrate(&job, devices, &kind, &launch_options(transport, None)?, &mut show)?;
    bar.finish_and_clear();
    Ok(profile)
}

/// How the command line starts ranks: as this program again.
pub fn launch_options(transport: TransportKind, logs: Option<PathBuf>) -> Result<LaunchOptions, Failure> {
    let program =
        std::env::current_exe().map_err(|error| Failure::Undone(format!("this program cannot find itself: {error}")))?;
    Ok(LaunchOptions { program, transport, logs })
}

/// The kernels of every layout in a plan's space, and about how many bytes a step of theirs touches.
/// Layouts that do not fit the devices are left out.
pub fn wanted(
    model: &Model,
    name: &str,
    base: &Plan,
    topology: &Topology,
    devices: usize,
    fixed: &Fixed,
) -> (BTreeSet<(Kernel, bool)>, Bytes) {
    let memory = topology.device_kinds().iter().map(|kind| kind.memory).min().unwrap_or(Bytes::ZERO);
    let mut kernels = BTreeSet::new();
    let mut footprint = Bytes::ZERO;
    for layout in space::layouts(&base.layout, devices, usize::MAX, base.global_batch, fixed) {
        // What cannot be laid out has no kernels.
        let Ok(compiled) = compile(model, name, &Plan { layout, ..base.clone() }) else { continue };
        if compiled.arenas().into_iter().all(|arena| arena <= memory) {
            footprint = footprint.max(collect(&compiled, &mut kernels));
        }
    }
    (kernels, footprint)
}

/// Adds a training step's kernels; returns the largest arena.
fn collect(compiled: &Compiled, kernels: &mut BTreeSet<(Kernel, bool)>) -> Bytes {
    for instruction in compiled.training.stages.iter().flat_map(|stage| &stage.instructions) {
        if let Operation::Compute { kernel, accumulate, .. } = &instruction.operation {
            kernels.insert((kernel.without_constants(), *accumulate));
        }
    }
    compiled.arenas().into_iter().fold(Bytes::ZERO, Bytes::max)
}

/// A small model of each family.
fn small_models() -> Vec<NamedModel> {
    let gpt = Model::Gpt { layers: 1, hidden: 256, heads: 4, ffn: None, vocab: 1024, sequence: 128, tied_embeddings: true };
    let resnet = Model::Resnet { depth: 18, stem: foretell_models::Stem::Small, image: 16, channels: 3, classes: 10, width: 32 };
    let mlp = Model::Mlp { widths: vec![784, 512, 512, 10] };
    [("mlp", mlp), ("small-resnet", resnet), ("small-gpt", gpt)]
        .map(|(name, model)| NamedModel { name: name.into(), model })
        .into_iter()
        .collect()
}
