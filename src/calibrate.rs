//! `foretell calibrate`: times this machine's kernels and transport, and writes a profile.

mod needs;
mod small_models;

pub use needs::Needs;

use crate::execute::executable_here;
use crate::failure::Failure;
use crate::inputs;
use crate::lab::Ground;
use crate::output;
use crate::plan::Precision;
use crate::plan_file::PlanFile;
use crate::predict;
use clap::Args;
use foretell_executor::{
    BackendKind, CalibratedDevice, CalibratedGroup, CalibrationJob, LaunchOptions, TransportKind, calibrate, message_sizes,
    supported,
};
use foretell_models::Model;
use foretell_planner::Fixed;
use foretell_program::{Exchange, Plan, Profile, Reach};
use foretell_topologies::{DeviceId, DeviceKind, LinkClass, Topology};
use foretell_units::{Bytes, DataType, Seconds};
use needs::MOST_BETWEEN_EXCHANGES;
use small_models::small_models;
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

/// Time this machine's kernels and transport
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  foretell calibrate --topology local --model mlp --global-batch 128 -o profile.yaml")]
pub struct Arguments {
    /// The topology whose devices are measured: `local`, `local-gpus`, or a file that describes this machine
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
    /// How long each exchange is timed, and each kernel on a GPU; a slow one at least a few times
    #[arg(long, value_name = "TIME", default_value = "25ms")]
    patience: Seconds,
    /// How long the passes over all kernels go on at least: six of them, and to see how the devices change their pace
    #[arg(long, value_name = "TIME", default_value = "6s")]
    calibration_time: Seconds,
}

/// Runs the command.
pub fn run(arguments: &Arguments, json: bool) -> Result<(), Failure> {
    let topology = inputs::topology(&arguments.topology, None)?;
    let backend = executable_here(&topology)?;
    let mut needs = Needs::default();
    let mut precision = arguments.precision.map_or(DataType::Fp32, DataType::from);
    let models = match (&arguments.plan, &arguments.model) {
        (Some(path), _) => {
            let loaded = PlanFile::load(path)?;
            supported(&loaded.plan, backend)?;
            let compiled = loaded.compile()?;
            needs.add(&loaded.model.model, &loaded.model.name, &loaded.plan, &compiled);
            precision = loaded.plan.precision;
            vec![loaded.model]
        }
        (None, Some(name)) => vec![inputs::model(name)?],
        (None, None) => small_models(),
    };
    predict::has_products(&topology, precision)?;
    for model in models.iter().filter(|_| arguments.plan.is_none()) {
        let sequences = model.model.sample().is_sequence();
        let batch = arguments.global_batch.unwrap_or(topology.device_count() * if sequences { 8 } else { 32 });
        let base = Plan { precision, batch_norm_group: None, ..Plan::new(Default::default(), batch) };
        supported(&base, backend)?;
        for optimizer in [foretell_program::Optimizer::Sgd, foretell_program::Optimizer::AdamW] {
            let base = Plan { optimizer, ..base.clone() };
            let added =
                needs.add_layouts(&model.model, &model.name, &base, &topology, topology.device_count(), &Fixed::default());
            // Of the usual models some cannot be laid out in every precision.
            if arguments.model.is_some() {
                added?;
            }
        }
    }
    if arguments.plan.is_none() && arguments.model.is_none() {
        needs.longest_message = message_sizes().into_iter().fold(Bytes::ZERO, Bytes::max);
    }
    let model = models.first().map(|model| model.model.clone());
    let transport = if arguments.tcp { TransportKind::Tcp } else { TransportKind::SharedMemory };
    let profile = measure(needs, precision.of_tensors(), model, &topology, arguments.patience, transport)?;
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

/// The kind of device that a calibration's samples are of: a whole one, where there is one.
fn measured_kind(topology: &Topology) -> String {
    let used: Vec<&DeviceKind> = topology.devices().map(|device| topology.device_kind(device)).collect();
    let whole = used.iter().find(|kind| kind.speed() == 1.0);
    whole.or(used.first()).map(|kind| kind.name.clone()).unwrap_or_default()
}

/// All ranks of one machine, and messages between the first two.
fn everyone(devices: usize) -> Vec<CalibratedGroup> {
    let exchanges = vec![Exchange::AllReduce, Exchange::ReduceScatter, Exchange::AllGather, Exchange::SendReceive];
    vec![CalibratedGroup { ranks: (0..devices).collect(), reach: Reach::Node, exchanges, messages: message_sizes() }]
}

/// GPUs of one machine that reach each other directly: the first ranks of each size that a group of the needs has, and all ranks, by whom is
/// found what exchanges and kernels do to each other; messages between the first two.
fn gpu_groups(devices: usize, sizes: &BTreeSet<usize>, memory: Bytes) -> Vec<CalibratedGroup> {
    let mut wanted: BTreeSet<usize> = sizes.iter().copied().filter(|&size| (2..=devices).contains(&size)).collect();
    wanted.extend((devices > 1).then_some(devices));
    let group = |(place, size): (usize, usize)| {
        let mut exchanges = vec![Exchange::AllReduce, Exchange::ReduceScatter, Exchange::AllGather];
        if place == 0 {
            exchanges.push(Exchange::SendReceive);
        }
        // From 1 KiB to 1 GiB; what is read and what is written lie beside each other, and other things too.
        let messages =
            (0..=10).map(|power| Bytes::new(1 << (10 + 2 * power))).filter(|bytes| bytes.value() * 8.0 <= memory.value());
        let messages = messages.collect();
        CalibratedGroup { ranks: (0..size).collect(), reach: Reach::Node, exchanges, messages }
    };
    // The largest first: all ranks are among them however many sizes there are.
    wanted.into_iter().rev().take(MOST_GROUPS).enumerate().map(group).collect()
}

/// How long the largest message of a lab may take, by the rate of its slowest link.
const LONGEST_MESSAGE: Seconds = Seconds::new(0.7);

/// A group of each size and reach that a layout may have in a lab: every so-many-eth rank of a run of consecutive ones.
fn lab_groups(topology: &Topology) -> Result<Vec<CalibratedGroup>, Failure> {
    let devices = topology.device_count();
    let mut found: BTreeMap<(std::cmp::Reverse<usize>, Reach), (Vec<usize>, f64)> = BTreeMap::new();
    for size in (2..=devices).filter(|size| devices.is_multiple_of(*size)) {
        for stride in (1..=devices / size).filter(|stride| (devices / size).is_multiple_of(*stride)) {
            let ranks: Vec<usize> = (0..size).map(|member| member * stride).collect();
            let (mut reach, mut rate) = (Reach::Node, f64::INFINITY);
            for (&from, &to) in ranks.iter().zip(ranks.iter().cycle().skip(1)) {
                let route = topology.route(DeviceId(from), DeviceId(to))?;
                reach = reach.max(match topology.farthest_link(DeviceId(from), DeviceId(to))? {
                    Some(LinkClass::Switch) => Reach::Fabric,
                    Some(LinkClass::Nic) => Reach::Switch,
                    Some(LinkClass::Device | LinkClass::HostMemory) | None => Reach::Node,
                });
                rate = route.links.iter().map(|link| topology.links()[link.0].bandwidth.value()).fold(rate, f64::min);
            }
            found.entry((std::cmp::Reverse(size), reach)).or_insert((ranks, rate));
        }
    }
    let group = |((_, reach), (ranks, rate)): (_, (Vec<usize>, f64))| {
        let mut exchanges = vec![Exchange::AllReduce, Exchange::ReduceScatter, Exchange::AllGather];
        if ranks.len() == 2 {
            exchanges.push(Exchange::SendReceive);
        }
        let messages = message_sizes().into_iter().filter(|bytes| bytes.value() / rate <= LONGEST_MESSAGE.value());
        CalibratedGroup { ranks, reach, exchanges, messages: messages.collect() }
    };
    Ok(found.into_iter().map(group).take(MOST_GROUPS).collect())
}

/// The transport has so many streams for groups.
const MOST_GROUPS: usize = 7;

/// A profile as YAML.
pub fn to_yaml(profile: &Profile) -> Result<String, Failure> {
    serde_saphyr::to_string(profile).map_err(|error| Failure::Undone(format!("the profile cannot be written: {error}")))
}

/// Measures on this machine.
pub fn measure(
    needs: Needs,
    precision: DataType,
    model: Option<Model>,
    topology: &Topology,
    patience: Patience,
    transport: TransportKind,
) -> Result<Profile, Failure> {
    let ground = Ground::of(topology, transport, None, None)?;
    let cores = foretell_executor::machine::core_count();
    // A lab's devices share cores as they do in a run.
    let devices = if topology.is_lab() { topology.device_count() } else { topology.device_count().min(cores).max(1) };
    let kind = measured_kind(topology);
    let Patience { patience, calibration_time } = patience;
    let reach_each_other = ground.options.backend.is_direct(devices);
    let mut groups = match topology.is_lab() {
        true => lab_groups(topology)?,
        false if reach_each_other => gpu_groups(devices, &needs.group_sizes, topology.least_memory()),
        false => everyone(devices),
    };
    for group in &mut groups {
        // Up to the first that is as long as the longest, so that nothing lies outside of what was timed.
        let enough = group.messages.iter().position(|&bytes| bytes >= needs.longest_message).map_or(usize::MAX, |last| last + 1);
        group.messages.truncate(enough);
    }
    let devices_of = ground.slots().iter().enumerate().map(|(number, slot)| CalibratedDevice {
        kind: topology.device_kind(DeviceId(number)).name.clone(),
        ranks_on_core: ground.slots().iter().filter(|other| other.core == slot.core).count(),
        speed: slot.speed,
    });
    let job = CalibrationJob {
        reuse_distances: needs.kernels.values().map(|places| usual_distances(places)).collect(),
        kernels: needs.kernels.into_keys().collect(),
        timed_steps: needs.passages,
        message_reuse_distances: needs.messages.iter().map(|(&bytes, distances)| (bytes, median(distances.clone()))).collect(),
        precision,
        footprint: needs.footprint,
        bytes_between_communications: median(needs.between_exchanges).min(MOST_BETWEEN_EXCHANGES),
        groups,
        devices: devices_of.collect(),
        time_per_item: patience,
        least_duration: calibration_time,
        model,
    };
    let bar = output::progress(100, "calibrate");
    let mut show = |share: f64| bar.set_position((share * 100.0) as u64);
    let profile = calibrate(&job, devices, &kind, &ground.options, &mut show)?;
    ground.close()?;
    bar.finish_and_clear();
    Ok(profile)
}

/// Where this program lies, which starts itself again for ranks and for labs.
pub fn this_program() -> Result<PathBuf, Failure> {
    std::env::current_exe().map_err(|error| Failure::Undone(format!("this program cannot find itself: {error}")))
}

/// How the command line starts ranks: as this program again.
pub fn launch_options(transport: TransportKind, logs: Option<PathBuf>) -> Result<LaunchOptions, Failure> {
    Ok(LaunchOptions { program: this_program()?, transport, logs, slots: Vec::new(), backend: BackendKind::Cpu, world: None })
}

/// Operand by operand, the median of the distances in all places where a kernel stands.
fn usual_distances(places: &[Vec<Bytes>]) -> Vec<Bytes> {
    let operands = places.iter().map(Vec::len).min().unwrap_or(0);
    (0..operands).map(|operand| median(places.iter().map(|distances| distances[operand]).collect())).collect()
}

fn median(mut all: Vec<Bytes>) -> Bytes {
    all.sort_unstable();
    all.get(all.len() / 2).copied().unwrap_or(Bytes::ZERO)
}
