//! `foretell calibrate`: times this machine's kernels and transport, and writes a profile.

use crate::failure::Failure;
use crate::inputs::{self, NamedModel};
use crate::output;
use clap::Args;
use foretell_executor::{CalibrationJob, LaunchOptions, TransportKind, calibrate, message_sizes};
use foretell_models::{Kernel, Model};
use foretell_planner::{Fixed, space};
use foretell_program::{Operation, Plan, Profile, compile};
use foretell_topologies::Topology;
use foretell_units::{Bytes, Seconds};
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
    /// How long each kernel is timed at most, such as 20ms
    #[arg(long, value_name = "TIME", default_value = "25ms")]
    patience: Seconds,
    /// Measure TCP over the loopback interface instead of shared memory
    #[arg(long)]
    tcp: bool,
    /// The profile to write
    #[arg(short, long, value_name = "FILE", default_value = "profile.yaml")]
    output: PathBuf,
}

/// Runs the command.
pub fn run(arguments: &Arguments, json: bool) -> Result<(), Failure> {
    let topology = inputs::topology(&arguments.topology, None)?;
    let models = match &arguments.model {
        Some(name) => vec![inputs::model(name)?],
        None => small_models(),
    };
    let mut kernels = BTreeSet::new();
    let mut footprint = Bytes::ZERO;
    for model in &models {
        let sequences = matches!(model.model, Model::Gpt { .. });
        let batch = arguments.global_batch.unwrap_or(topology.device_count() * if sequences { 8 } else { 32 });
        let base = Plan { batch_norm_group: None, ..Plan::new(Default::default(), batch) };
        for optimizer in [foretell_program::Optimizer::Sgd, foretell_program::Optimizer::AdamW] {
            let base = Plan { optimizer, ..base.clone() };
            let (wanted, bytes) = wanted(&model.model, &model.name, &base, topology.device_count(), &Fixed::default());
            kernels.extend(wanted);
            footprint = footprint.max(bytes);
        }
    }
    let model = models.first().map(|model| model.model.clone());
    let transport = if arguments.tcp { TransportKind::Tcp } else { TransportKind::SharedMemory };
    let profile = measure(kernels, footprint, model, &topology, arguments.patience, transport)?;
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
    footprint: Bytes,
    model: Option<Model>,
    topology: &Topology,
    patience: Seconds,
    transport: TransportKind,
) -> Result<Profile, Failure> {
    let cores = foretell_executor::machine::allowed_cores().len();
    let devices = topology.device_count().min(cores).max(1);
    let kind = topology.device_kinds().first().map(|kind| kind.name.clone()).unwrap_or_default();
    let job = CalibrationJob { kernels: kernels.into_iter().collect(), footprint, messages: message_sizes(), patience, model };
    let bar = output::progress(job.kernels.len(), "calibrate");
    let profile = calibrate(&job, devices, &kind, &launch_options(transport, None)?, &mut |done| bar.set_position(done as u64))?;
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
pub fn wanted(model: &Model, name: &str, base: &Plan, devices: usize, fixed: &Fixed) -> (BTreeSet<(Kernel, bool)>, Bytes) {
    let mut kernels = BTreeSet::new();
    let mut footprint = Bytes::ZERO;
    for layout in space::layouts(&base.layout, devices, usize::MAX, base.global_batch, fixed) {
        // What cannot be laid out has no kernels.
        let Ok(compiled) = compile(model, name, &Plan { layout, ..base.clone() }) else { continue };
        footprint = compiled.arenas().into_iter().fold(footprint, Bytes::max);
        for instruction in compiled.training.stages.iter().flat_map(|stage| &stage.instructions) {
            if let Operation::Compute { kernel, accumulate, .. } = &instruction.operation {
                kernels.insert((*kernel, *accumulate));
            }
        }
    }
    (kernels, footprint)
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
