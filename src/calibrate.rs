//! `foretell calibrate`: times this machine's kernels and transport, and writes a profile; or
//! measures how fast modes converge.

mod convergence;
mod needs;

pub use convergence::ConvergenceAnswer;
pub use needs::Needs;

use crate::choices::Precision;
use crate::failure::{Failure, code};
use crate::framework;
use crate::inputs::{self, NamedModel};
use crate::launch::{Hosts, backend_here};
use crate::output;
use crate::plan_file::PlanFile;
use clap::Args;
use convergence::ConvergenceArguments;
use foretell_executor::data::{DataSource, Dataset};
use foretell_executor::{
    CalibratedDevice, CalibratedGroup, CalibrationJob, ExecutorError, TransportKind, calibrate, executable, input_costs,
    message_sizes, storage_costs, supported,
};
use foretell_models::Model;
use foretell_planner::Fixed;
use foretell_program::{Exchange, InputCosts, Plan, Profile, Reach};
use foretell_simulator::require_products;
use foretell_topologies::{DeviceId, DeviceKind, LinkClass, Topology};
use foretell_units::{Bytes, DataType, Seconds};
use needs::MOST_BETWEEN_EXCHANGES;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Time this machine's kernels and transport
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  foretell calibrate --topology local --model mlp --global-batch 128 -o profile.yaml")]
pub struct Arguments {
    /// Topology whose devices are measured: `local`, `local-gpus`, or a file that describes this
    /// machine
    #[arg(long, required_unless_present = "stack")]
    topology: Option<String>,
    /// Model whose kernels are measured [default: a small model of each family]
    #[arg(long)]
    model: Option<String>,
    /// Samples per step, from which kernel sizes follow
    #[arg(long, value_name = "SAMPLES", value_parser = foretell_units::count)]
    global_batch: Option<usize>,
    /// Measure the kernels of this plan only
    #[arg(long, value_name = "FILE", conflicts_with_all = ["model", "global_batch", "precision"])]
    plan: Option<PathBuf>,
    /// Have the plan's software stack time its own operators on this machine's processors, such as
    /// hf-trainer
    #[arg(long, value_name = "NAME", requires = "plan", conflicts_with_all = ["convergence", "data", "storage", "tcp"])]
    stack: Option<String>,
    /// Python that has the stack's framework [default: python3]
    #[arg(long, value_name = "PROGRAM", requires = "stack")]
    python: Option<PathBuf>,
    /// Precision in which kernels are measured [default: the plan's, or fp32]
    #[arg(long, value_name = "FORMAT")]
    precision: Option<Precision>,
    #[command(flatten)]
    patience: Patience,
    #[command(flatten)]
    convergence: ConvergenceArguments,
    /// Folder of pictures whose reading and decoding is measured too; with --convergence, the data
    /// of the runs
    #[arg(long, value_name = "DIR")]
    data: Option<DataSource>,
    /// Folder into which runs will write checkpoints: how fast it takes them is measured too
    #[arg(long, value_name = "DIR")]
    storage: Option<PathBuf>,
    /// Measure TCP over the loopback interface instead of shared memory
    #[arg(long)]
    tcp: bool,
    /// The profile or table to write [default: profile.yaml, or samples-needed.yaml with
    /// --convergence]
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
}

/// How thorough a calibration is.
#[derive(Debug, Clone, Copy, Args)]
pub struct Patience {
    /// How long each collective and message is timed, and each kernel on a GPU; slow ones run a few
    /// times at least
    #[arg(long, value_name = "TIME", default_value = "25ms")]
    patience: Seconds,
    /// Least duration of the six passes over all kernels; longer passes show how the devices' pace
    /// varies
    #[arg(long, value_name = "TIME", default_value = "6s")]
    calibration_time: Seconds,
}

/// Runs the command.
pub fn run(arguments: &Arguments, json: bool) -> Result<(), Failure> {
    if let (Some(stack), Some(path)) = (&arguments.stack, &arguments.plan) {
        return calibrate_framework(arguments, stack, path, json);
    }
    let named = arguments.topology.as_deref().expect("invariant: clap demands it without --stack");
    let topology = inputs::topology(named, None)?;
    let backend = backend_here(&topology)?;
    let transport = if arguments.tcp { TransportKind::Tcp } else { TransportKind::SharedMemory };
    if arguments.convergence.convergence {
        return run_convergence(arguments, &topology, transport, json);
    }
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
        (None, None) => Model::examples().map(|(name, model)| NamedModel { name: name.into(), model }).collect(),
    };
    models.iter().try_for_each(|named| executable(&named.model))?;
    require_products(&topology, precision).map_err(Failure::of_input)?;
    for model in models.iter().filter(|_| arguments.plan.is_none()) {
        let sequences = model.model.sample().is_sequence();
        let batch = arguments.global_batch.unwrap_or(topology.device_count() * if sequences { 8 } else { 32 });
        let base = Plan { precision, batch_norm_group: None, ..Plan::new(Default::default(), batch) };
        supported(&base, backend)?;
        for optimizer in [foretell_program::Optimizer::Sgd, foretell_program::Optimizer::AdamW] {
            let base = Plan { optimizer, ..base.clone() };
            let added =
                needs.add_layouts(&model.model, &model.name, &base, &topology, topology.device_count(), &Fixed::default());
            // Some default models cannot be laid out in every precision.
            if arguments.model.is_some() {
                added?;
            }
        }
    }
    if arguments.plan.is_none() && arguments.model.is_none() {
        needs.longest_message = message_sizes().into_iter().fold(Bytes::ZERO, Bytes::max);
    }
    let model = models.first().map(|model| model.model.clone());
    let input = match (&arguments.data, &model) {
        (Some(_), Some(_)) if arguments.model.is_none() && arguments.plan.is_none() => {
            return Err(
                Failure::input(code::OPTION_MISSING, "`--data` needs the model that reads it").hint("give `--model` or `--plan`")
            );
        }
        (Some(data), Some(model)) => measure_input(data, model)?,
        _ => None,
    };
    let measured = measure(needs, precision.tensor_format(), model, &topology, arguments.patience, transport)?;
    let storage = arguments.storage.as_deref().map(|folder| storage_costs(folder, measured.machine.devices)).transpose();
    let profile = Profile { input, storage: storage.map_err(ExecutorError::from)?, ..measured };
    let path = write(arguments, &profile)?;
    if json {
        return output::json_as_it_is(&profile);
    }
    output::line(&format!(
        "{} kernels and {} collectives and messages of {} ({} at once) are in {}\n\
         overheads: {} per instruction, {} per hand-over between streams, {} per step",
        profile.kernels.len(),
        profile.exchanges.len(),
        profile.machine.device,
        profile.machine.devices,
        path.display(),
        profile.instruction_overhead.median,
        profile.stream_handoff.median,
        profile.step_overhead.median,
    ))
}

/// Writes the profile, and returns where.
fn write(arguments: &Arguments, profile: &Profile) -> Result<PathBuf, Failure> {
    let path = arguments.output.clone().unwrap_or_else(|| "profile.yaml".into());
    output::write(&path, inputs::profile_yaml(profile)?.as_bytes())?;
    Ok(path)
}

/// Has the framework of a plan's stack time its operators.
fn calibrate_framework(arguments: &Arguments, stack: &str, path: &Path, json: bool) -> Result<(), Failure> {
    let loaded = PlanFile::load(path)?;
    if loaded.plan.stack.name() != stack {
        let message = format!("the plan's stack is `{}`, not `{stack}`", loaded.plan.stack.name());
        let hint = format!("write `stack: {stack}` into the plan");
        return Err(Failure::input(code::PLAN_CONTRADICTION, message).hint(hint).in_file(path));
    }
    let profile = framework::calibrate(&loaded, arguments.python.as_ref())?;
    let path = write(arguments, &profile)?;
    if json {
        return output::json_as_it_is(&profile);
    }
    let (operators, moves) = profile.framework.as_ref().map_or((0, 0), |own| (own.operators.len(), own.moves.len()));
    output::line(&format!(
        "{operators} operators, {moves} passes of optimizer and wrapper, and {} collectives of `{stack}` are in {}\n\
         overheads: {} per operator, {} per step",
        profile.exchanges.len(),
        path.display(),
        profile.instruction_overhead.median,
        profile.step_overhead.median,
    ))
}

/// Measures how many samples each mode needs.
fn run_convergence(arguments: &Arguments, topology: &Topology, transport: TransportKind, json: bool) -> Result<(), Failure> {
    let Some(path) = &arguments.plan else {
        let hint = "give `--plan FILE`, whose model and recipe the runs train";
        return Err(Failure::input(code::OPTION_MISSING, "`--convergence` needs a plan").hint(hint));
    };
    let loaded = PlanFile::load(path)?;
    executable(&loaded.model.model)?;
    let table = arguments.output.clone().unwrap_or_else(|| "samples-needed.yaml".into());
    let answer = convergence::run(&arguments.convergence, &loaded, topology, transport, arguments.data.as_ref(), &table)?;
    if json {
        return output::json(&answer);
    }
    answer.lines().iter().try_for_each(|line| output::line(line))
}

/// Measures the cost of reading and decoding the samples of a data set.
fn measure_input(data: &DataSource, model: &Model) -> Result<Option<InputCosts>, Failure> {
    let costs = Dataset::open(data, &model.sample(), 0).and_then(|dataset| input_costs(&dataset));
    let costs = costs.map_err(ExecutorError::from)?;
    if costs.is_none() {
        output::note("the samples of this data are in memory, so there is nothing to measure but their copy");
    }
    Ok(costs)
}

/// The device kind that a calibration measures: one at full speed, if there is one.
fn measured_kind(topology: &Topology) -> String {
    let used: Vec<&DeviceKind> = topology.devices().map(|device| topology.device_kind(device)).collect();
    let whole = used.iter().find(|kind| kind.speed() == 1.0);
    whole.or(used.first()).expect("invariant: a topology has a device").name.clone()
}

/// One group of all ranks of a machine, and messages between the first two.
fn whole_machine(devices: usize) -> Vec<CalibratedGroup> {
    let exchanges = vec![Exchange::AllReduce, Exchange::ReduceScatter, Exchange::AllGather, Exchange::SendReceive];
    vec![CalibratedGroup { ranks: (0..devices).collect(), reach: Reach::Node, exchanges, messages: message_sizes() }]
}

/// Groups of GPUs that reach each other directly: the first ranks for each group size that is
/// needed, and all ranks, which also show how collectives and kernels slow each other. Messages are
/// timed between the first two ranks.
fn gpu_groups(devices: usize, sizes: &BTreeSet<usize>, memory: Bytes) -> Vec<CalibratedGroup> {
    let mut wanted: BTreeSet<usize> = sizes.iter().copied().filter(|&size| (2..=devices).contains(&size)).collect();
    wanted.extend((devices > 1).then_some(devices));
    let group = |(place, size): (usize, usize)| {
        let mut exchanges = vec![Exchange::AllReduce, Exchange::ReduceScatter, Exchange::AllGather];
        if place == 0 {
            exchanges.push(Exchange::SendReceive);
        }
        // From 1 KiB to 1 GiB, as far as memory holds source, destination and the rest.
        let messages =
            (0..=10).map(|power| Bytes::new(1 << (10 + 2 * power))).filter(|bytes| bytes.value() * 8.0 <= memory.value());
        let messages = messages.collect();
        CalibratedGroup { ranks: (0..size).collect(), reach: Reach::Node, exchanges, messages }
    };
    // The largest first, so that the group of all ranks is always included.
    wanted.into_iter().rev().take(MOST_GROUPS).enumerate().map(group).collect()
}

/// Longest time of a message that a lab's calibration tries, by the slowest link's rate.
const LONGEST_MESSAGE: Seconds = Seconds::new(0.7);

/// One group for each size and reach that a layout may have in a lab. Members are equally spaced
/// ranks.
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

/// Most groups at once: the transport has this many streams for groups.
const MOST_GROUPS: usize = 7;

/// Runs the calibration on this machine.
pub fn measure(
    needs: Needs,
    precision: DataType,
    model: Option<Model>,
    topology: &Topology,
    patience: Patience,
    transport: TransportKind,
) -> Result<Profile, Failure> {
    let hosts = Hosts::open(topology, transport, None, None)?;
    let cores = foretell_executor::machine::core_count();
    // A lab's devices share cores, as in a run.
    let devices = if topology.is_lab() { topology.device_count() } else { topology.device_count().min(cores).max(1) };
    let kind = measured_kind(topology);
    let Patience { patience, calibration_time } = patience;
    let reach_each_other = hosts.options.backend.is_direct(devices);
    let mut groups = match topology.is_lab() {
        true => lab_groups(topology)?,
        false if reach_each_other => gpu_groups(devices, &needs.group_sizes, topology.least_memory()),
        false => whole_machine(devices),
    };
    for group in &mut groups {
        // Up to the first size that covers the longest message, so that no message needs
        // extrapolation.
        let enough = group.messages.iter().position(|&bytes| bytes >= needs.longest_message).map_or(usize::MAX, |last| last + 1);
        group.messages.truncate(enough);
    }
    let devices_of = hosts.slots().iter().enumerate().map(|(number, slot)| CalibratedDevice {
        kind: topology.device_kind(DeviceId(number)).name.clone(),
        ranks_on_core: hosts.slots().iter().filter(|other| other.core == slot.core).count(),
        speed: slot.speed,
    });
    let job = CalibrationJob {
        reuse_distances: needs.kernels.values().map(|places| usual_distances(places)).collect(),
        kernels: needs.kernels.into_keys().collect(),
        timed_plans: needs.passages,
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
    let profile = calibrate(&job, devices, &kind, &hosts.options, &mut show)?;
    hosts.close()?;
    bar.finish_and_clear();
    Ok(profile)
}

/// For each operand, the median reuse distance over all places where a kernel occurs.
fn usual_distances(places: &[Vec<Bytes>]) -> Vec<Bytes> {
    let operands = places.iter().map(Vec::len).min().unwrap_or(0);
    (0..operands).map(|operand| median(places.iter().map(|distances| distances[operand]).collect())).collect()
}

/// The median of sizes; 0 without any.
fn median(all: Vec<Bytes>) -> Bytes {
    foretell_units::median(all, Ord::cmp).unwrap_or(Bytes::ZERO)
}
