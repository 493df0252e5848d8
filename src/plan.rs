//! `foretell plan`: the fastest layouts of a model on a topology.

use crate::failure::Failure;
use crate::inputs::{self, NamedModel};
use crate::output;
use crate::plan_answers;
use crate::plan_file::{ModelReference, PlanFile};
use crate::predict;
use clap::Args;
use foretell_models::Model;
use foretell_planner::{Fixed, Planned, Request, plan};
use foretell_program::{Layout, MOST_RANKS, Optimizer, Plan, Profile, Stack};
use foretell_reports::layouts_table;
use foretell_topologies::{Architecture, NodeGroup, Topology, TopologyReference};
use foretell_units::{Bytes, DataType, Seconds};
use serde_json::json;
use std::path::PathBuf;
use std::time::Instant;

/// Find the fastest layouts of a model on a topology
#[derive(Debug, Args)]
#[command(
    after_help = "Example:\n  foretell plan --model resnet50 --topology dgx-a100-80g --global-batch 256 --precision bf16 --top 3"
)]
pub struct Arguments {
    #[command(flatten)]
    pub choices: Choices,
    /// Measured costs, from `foretell calibrate`
    #[arg(long, value_name = "FILE")]
    profile: Option<PathBuf>,
    /// How many layouts to show
    #[arg(long, default_value_t = 5, value_name = "K")]
    top: usize,
    /// Say what the search did, why the best is best, what the others lose, and what would change the answer
    #[arg(long)]
    explain: bool,
    /// The best layout at each size: the devices double from the first number to the second
    #[arg(long, value_name = "8..4096", value_parser = sizes, conflicts_with_all = ["output", "explain", "front"])]
    scaling: Option<(usize, usize)>,
    /// What can be traded for what: the layouts than which none is faster, smaller and on fewer devices at once
    #[arg(long, conflicts_with_all = ["output", "explain"])]
    front: bool,
    /// Write the plot of `--scaling` or `--front` (SVG and PNG) into a folder
    #[arg(long, value_name = "DIR")]
    plots: Option<PathBuf>,
    /// Write the best plan to a file
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
}

/// What `plan` and `run` let a user choose.
#[derive(Debug, Clone, Args)]
pub struct Choices {
    /// A zoo name (see `foretell models`) or a model file
    #[arg(long)]
    pub model: String,
    /// A library name (see `foretell topologies`), a topology file, `local` (this machine's cores) or `local-gpus`
    #[arg(long)]
    pub topology: String,
    /// The kind of node (the `name` of one in `nodes`) that has the first ranks; left open, the one that is best is chosen
    #[arg(long, value_name = "NAME")]
    pub first_nodes: Option<String>,
    /// How many of the topology's node template there are
    #[arg(long, value_name = "N")]
    pub nodes: Option<usize>,
    /// Samples of one step over all ranks [default: 32 a device, sequences 8]
    #[arg(long, value_name = "SAMPLES")]
    pub global_batch: Option<usize>,
    /// Number format of activations and products; of several the one is taken with which a step is the fastest [default: bf16 (V100:
    /// fp16) on GPUs, fp32 on processors]
    #[arg(long, value_name = "FORMAT,...", value_delimiter = ',')]
    pub precision: Vec<Precision>,
    /// Who updates the parameters [default: sgd for mlp and resnet, adamw for gpt]
    #[arg(long, value_name = "NAME")]
    pub optimizer: Option<OptimizerName>,
    /// Memory that a rank may use, such as 72GB
    #[arg(long, value_name = "SIZE")]
    pub memory_limit: Option<Bytes>,
    /// Choices that are yours: data, tensor, pipeline, context, expert, micro_batch, schedule, virtual_stages, recompute, zero, shard_group,
    /// offload, collective, sequence_parallel, context_method, bucket, shares, cuts, placement, stage_places, stages
    #[arg(long, value_name = "tensor=8,pipeline=4,...", default_value = "", hide_default_value = true)]
    pub fix: Fixed,
    /// Samples that share batch-norm statistics [default: a rank's micro-batch]
    #[arg(long, value_name = "SAMPLES")]
    pub batch_norm_group: Option<usize>,
    /// Whose run it is on GPUs: foretell, megatron-core, fsdp2, torchtitan, nemo, deepspeed, ddp, ...
    #[arg(long, value_name = "NAME", default_value = "foretell")]
    pub stack: String,
    /// The step size [default: 0.05 for sgd, 0.001 for adam and adamw]
    #[arg(long, value_name = "RATE")]
    pub learning_rate: Option<f32>,
    /// Let several ranks share a device, to check layouts, not to time them: as many ranks as `--fix` says with data, tensor and pipeline
    #[arg(long)]
    pub oversubscribe: bool,
    /// Stop searching after so long, with what there is: the gap says what that cost. As long as nothing fits it goes on for ten seconds at least
    #[arg(long, value_name = "10s")]
    pub time_limit: Option<Seconds>,
    /// What an hour of the nodes may cost, in the currency of the topology's file
    #[arg(long, value_name = "PRICE")]
    pub price_limit: Option<f64>,
    /// What to make best
    #[arg(long, value_enum, default_value_t = Objective::Time)]
    pub objective: Objective,
}

/// What a plan can be best in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Objective {
    Time,
    Cost,
    Energy,
    Goodput,
}

/// Number formats on the command line.
#[derive(Debug, Clone, Copy, clap::ValueEnum)]
pub enum Precision {
    Fp32,
    Tf32,
    Bf16,
    Fp16,
    Fp8,
}

/// Optimizers on the command line.
#[derive(Debug, Clone, Copy, clap::ValueEnum)]
pub enum OptimizerName {
    Sgd,
    Adam,
    Adamw,
}

/// What a plan is sought for, with everything found and every default taken.
pub struct Setting {
    /// The model.
    pub model: NamedModel,
    /// The devices.
    pub topology: Topology,
    /// The kind of node whose devices have the first ranks, where that is not the first of the file.
    pub first_nodes: Option<String>,
    /// The plan but for its layout.
    pub base: Plan,
    /// What was taken by default.
    pub taken: Vec<String>,
}

impl Choices {
    /// Finds what was named and takes defaults for what was not.
    pub fn setting(&self) -> Result<Setting, Failure> {
        let model = inputs::model(&self.model)?;
        let topology = inputs::topology(&self.topology, self.nodes)?;
        let topology = match &self.first_nodes {
            Some(first) => topology.beginning_with(first)?,
            None => topology,
        };
        let mut taken = Vec::new();
        let sequences = model.model.sample().is_sequence();
        let global_batch = self.global_batch.unwrap_or_else(|| {
            let batch = topology.device_count() * if sequences { 8 } else { 32 };
            taken.push(format!("--global-batch {batch}"));
            batch
        });
        let precision = self.precision.first().copied().map(DataType::from).unwrap_or_else(|| {
            let precision = usual_precision(&topology);
            taken.push(format!("--precision {precision}"));
            precision
        });
        for format in self.precision.iter().copied().map(DataType::from) {
            predict::has_products(&topology, format)?;
        }
        let optimizer = self.optimizer.map(Optimizer::from).unwrap_or_else(|| {
            let (optimizer, name) = usual_optimizer(&model.model);
            taken.push(format!("--optimizer {name}"));
            optimizer
        });
        let mut base =
            Plan { precision, optimizer, batch_norm_group: self.batch_norm_group, ..Plan::new(Layout::default(), global_batch) };
        let stack = inputs::stack(&self.stack)?;
        (base.stack, base.overlap, base.layout.bucket) = (Stack::new(&self.stack), stack.defaults.overlap, stack.defaults.bucket);
        base.training.learning_rate = self.learning_rate;
        Ok(Setting { model, topology, first_nodes: self.first_nodes.clone(), base, taken })
    }

    /// The ranks that may be used: a device each, as far as the money goes; with `--oversubscribe`, as with `mpirun`, those of the layout that is fixed.
    pub fn devices(&self, topology: &Topology) -> usize {
        match (self.oversubscribe, self.fix.data, self.fix.tensor, self.fix.pipeline) {
            (true, Some(data), Some(tensor), Some(pipeline)) => {
                let others = [tensor, pipeline, self.fix.context.unwrap_or(1), self.fix.expert.unwrap_or(1)];
                others.into_iter().fold(data, usize::saturating_mul)
            }
            _ => self.price_limit.map_or(topology.device_count(), |limit| affordable(topology, limit)),
        }
    }

    /// The number formats that are left open, or the one that is not.
    pub fn formats(&self, setting: &Setting) -> Vec<DataType> {
        let mut formats = vec![setting.base.precision];
        for format in self.precision.iter().copied().map(DataType::from) {
            if !formats.contains(&format) {
                formats.push(format);
            }
        }
        formats
    }

    /// Searches: with each of the number formats that are left open, and where the first nodes of the file are left out, if that is left open.
    /// The setting's topology is that of the answer then.
    pub fn search(&self, setting: &mut Setting, profile: Option<&Profile>, top: usize) -> Result<Planned, Failure> {
        let started = Instant::now();
        let formats = self.formats(setting);
        if formats.len() > 1 && self.objective != Objective::Time {
            let hint = "leave out `--objective`, or name one format";
            return Err(Failure::Input(format!("several number formats are compared by the time of a step alone; hint: {hint}")));
        }
        let devices = self.devices(&setting.topology);
        let mut planned = self.search_devices(setting, (&setting.topology, devices), profile, (top, None), started);
        for (first, topology, devices) in self.without_first_nodes(setting) {
            let elsewhere = planned.as_ref().ok().map(|planned| planned.value);
            let found = self.search_devices(setting, (&topology, devices), profile, (top, elsewhere), started);
            planned = match (planned, found) {
                (Ok(before), Ok(found)) if found.candidates.is_empty() => Ok(before.counting(&found)),
                (Ok(before), Err(_)) => Ok(before),
                (before, Ok(found)) => {
                    (setting.topology, setting.first_nodes) = (topology, Some(first));
                    Ok(match before {
                        Ok(before) => found.counting(&before),
                        Err(_) => found,
                    })
                }
                (before, Err(_)) => before,
            };
        }
        let mut planned = planned?;
        planned.search.wall_seconds = started.elapsed().as_secs_f64();
        Ok(planned)
    }

    /// Searches the first devices of a topology for so many of the best, and only for what is better than was found on others.
    fn search_devices(
        &self,
        setting: &Setting,
        (topology, devices): (&Topology, usize),
        profile: Option<&Profile>,
        (top, elsewhere): (usize, Option<f64>),
        started: Instant,
    ) -> Result<Planned, Failure> {
        if devices == 0 {
            let hint = "allow more, or leave out `--price-limit`; every node needs a `price_per_hour`";
            return Err(Failure::Input(format!("no node of `{}` is as cheap as that; hint: {hint}", topology.name())));
        }
        let is_hopeless =
            || self.time_limit.is_some_and(|limit| started.elapsed().as_secs_f64() > limit.value().max(FIRST_ANSWER));
        let is_over = || self.time_limit.is_some_and(|limit| started.elapsed().as_secs_f64() > limit.value());
        let search = |base: &Plan| -> Result<Planned, Failure> {
            let costs = predict::costs(profile, topology, base)?;
            let request = Request {
                fixed: self.fix.clone(),
                devices,
                objective: self.objective.into(),
                stop: &is_over,
                give_up: &is_hopeless,
                oversubscription: predict::oversubscription(self.oversubscribe),
                memory_limit: self.memory_limit,
                top,
                must_beat: elsewhere,
                ..Request::new(&setting.model.model, &setting.model.name, topology, &costs, base)
            };
            Ok(plan(&request)?)
        };
        let mut planned = search(&setting.base);
        for &precision in &self.formats(setting)[1..] {
            // What does not fit in one format may in another.
            planned = match (planned, search(&Plan { precision, ..setting.base.clone() })) {
                (Ok(one), Ok(other)) => Ok(one.merged(other, top)),
                (Err(_), other) => other,
                (one, Err(_)) => one,
            };
        }
        planned
    }

    /// The topology counted from each other kind of node on, if that is left open: that kind's name, and how many devices there are without those that
    /// then come last; or that the money is enough for.
    fn without_first_nodes(&self, setting: &Setting) -> Vec<(String, Topology, usize)> {
        let groups = setting.topology.node_groups();
        let unnamed = |groups: &[NodeGroup]| -> Vec<NodeGroup> {
            groups.iter().map(|group| NodeGroup { name: String::new(), ..group.clone() }).collect()
        };
        let (mut seen, mut found) = (Vec::new(), Vec::new());
        for place in (1..groups.len()).filter(|_| self.first_nodes.is_none() && !self.oversubscribe).take(MOST_KINDS_LEFT_OUT) {
            // What is left is the same nodes as a beginning of the file's.
            let left = unnamed(&groups[place..]);
            let is_known = seen.contains(&left) || unnamed(&groups[..groups.len() - place]) == left;
            if let Ok(topology) = setting.topology.clone().beginning_with(&groups[place].name)
                && !is_known
            {
                let rest = groups[place..].iter().map(|group| group.devices * group.count).sum();
                let devices = if self.price_limit.is_some() { self.devices(&topology) } else { rest };
                found.push((groups[place].name.clone(), topology, devices));
                seen.push(left);
            }
        }
        found
    }

    /// The file of a plan that was found.
    pub fn plan_file(&self, setting: &Setting, plan: &Plan) -> PlanFile {
        let topology = TopologyReference::Named(self.topology.clone());
        let mut file = PlanFile::new(ModelReference::Named(self.model.clone()), topology, self.nodes, plan);
        file.first_nodes.clone_from(&setting.first_nodes);
        file
    }
}

/// Kinds of node, the first of the file, that are left out at most: each of these has a search of its own.
const MOST_KINDS_LEFT_OUT: usize = 3;

/// Seconds for which a search goes on at least, whatever its time limit, as long as it has found nothing: most have an answer by then.
const FIRST_ANSWER: f64 = 10.0;

/// How many devices the first nodes have that together cost no more an hour; none where one of these has no price.
fn affordable(topology: &Topology, limit: f64) -> usize {
    let (mut price, mut devices) = (0.0, 0);
    for group in topology.node_groups() {
        let Some(each) = group.price_per_hour else { break };
        for _ in 0..group.count {
            price += each;
            if price > limit {
                return devices;
            }
            devices += group.devices;
        }
    }
    devices
}

/// Reads `8..4096`.
fn sizes(text: &str) -> Result<(usize, usize), String> {
    let wrong = || format!("`{text}` is no range of numbers of devices; hint: write for example 8..4096");
    let (from, to) = text.split_once("..").ok_or_else(wrong)?;
    match (from.trim().parse(), to.trim().parse()) {
        (Ok(from), Ok(to)) if from > 0 && from <= to && to <= MOST_RANKS => Ok((from, to)),
        _ => Err(wrong()),
    }
}

impl From<Objective> for foretell_planner::Objective {
    fn from(objective: Objective) -> Self {
        match objective {
            Objective::Time => Self::Time,
            Objective::Cost => Self::Cost,
            Objective::Energy => Self::Energy,
            Objective::Goodput => Self::Goodput,
        }
    }
}

impl From<Precision> for DataType {
    fn from(precision: Precision) -> Self {
        match precision {
            Precision::Fp32 => DataType::Fp32,
            Precision::Tf32 => DataType::Tf32,
            Precision::Bf16 => DataType::Bf16,
            Precision::Fp16 => DataType::Fp16,
            Precision::Fp8 => DataType::Fp8,
        }
    }
}

impl From<OptimizerName> for Optimizer {
    fn from(name: OptimizerName) -> Self {
        match name {
            OptimizerName::Sgd => Optimizer::Sgd,
            OptimizerName::Adam => Optimizer::Adam,
            OptimizerName::Adamw => Optimizer::AdamW,
        }
    }
}

fn usual_precision(topology: &Topology) -> DataType {
    let kinds = topology.device_kinds();
    if kinds.iter().any(|kind| kind.architecture == Architecture::Cpu) {
        return DataType::Fp32;
    }
    if kinds.iter().all(|kind| kind.peak.contains_key(&DataType::Bf16)) { DataType::Bf16 } else { DataType::Fp16 }
}

fn usual_optimizer(model: &Model) -> (Optimizer, &'static str) {
    match model {
        Model::Mlp { .. } | Model::Resnet { .. } | Model::Vgg { .. } => (Optimizer::Sgd, "sgd"),
        Model::Gpt { .. }
        | Model::Llama { .. }
        | Model::Bert { .. }
        | Model::Vit { .. }
        | Model::Moe { .. }
        | Model::T5 { .. }
        | Model::LstmSeq2seq { .. } => (Optimizer::AdamW, "adamw"),
    }
}

/// Runs the command.
pub fn run(arguments: &Arguments, json: bool) -> Result<(), Failure> {
    let mut setting = arguments.choices.setting()?;
    let profile = inputs::profile(arguments.profile.as_deref())?;
    if arguments.scaling.is_some() || arguments.front {
        return points(arguments, &setting, json);
    }
    let planned = match arguments.choices.search(&mut setting, profile.as_ref(), arguments.top) {
        Err(Failure::Undone(reason)) if reason.starts_with("no layout fits") && !arguments.choices.oversubscribe => {
            let enough = plan_answers::enough_nodes(&arguments.choices, &setting)?;
            let change = enough.map_or_else(String::new, |nodes| format!("; it fits on {nodes} such nodes"));
            return Err(Failure::Undone(format!("{reason}{change}")));
        }
        planned => planned?,
    };
    let Some(best) = planned.candidates.first() else {
        return Err(Failure::Undone("the search returned nothing".into()));
    };
    if let Some(path) = &arguments.output {
        let mut file = arguments.choices.plan_file(&setting, &best.plan);
        file.absolute_paths()?;
        output::write(path, file.to_yaml()?.as_bytes())?;
    }
    predict::remarks(&setting.topology, &best.prediction, best.plan.mesh()?.world_size());
    if json {
        return output::json(&document(&arguments.choices, &setting, &planned));
    }
    let rows: Vec<_> = planned.candidates.iter().map(|candidate| predict::row(&candidate.plan, &candidate.prediction)).collect();
    let title = format!("{} on {} ({} devices)", setting.model.name, setting.topology.name(), setting.topology.device_count());
    output::line(&format!("{title}\n{}", layouts_table(&rows)))?;
    for (index, candidate) in planned.candidates.iter().enumerate() {
        let format =
            if arguments.choices.precision.len() > 1 { format!("{}, ", candidate.plan.precision) } else { String::new() };
        output::line(&format!("{}: {format}{}", index + 1, plan_answers::words(&candidate.plan.layout)))?;
    }
    if !setting.taken.is_empty() {
        output::line(&format!("taken by default: {}", setting.taken.join(", ")))?;
    }
    if arguments.explain {
        let limit = arguments.choices.memory_limit;
        output::line(&plan_answers::explanation(&planned, &setting, profile.as_ref(), limit)?)?;
    }
    match &arguments.output {
        Some(path) => output::line(&format!("the first is in {}", path.display())),
        None => Ok(()),
    }
}

/// The contract's document of `plan`.
pub fn document(choices: &Choices, setting: &Setting, planned: &Planned) -> serde_json::Value {
    let candidate = |candidate: &foretell_planner::Candidate| json!({"plan": choices.plan_file(setting, &candidate.plan), "predicted": candidate.prediction});
    let best = planned.candidates.first();
    json!({
        "plan": best.map(|best| choices.plan_file(setting, &best.plan)),
        "predicted": best.map(|best| &best.prediction),
        "alternatives": planned.candidates.iter().skip(1).map(candidate).collect::<Vec<_>>(),
        "search": planned.search,
    })
}

/// Answers `--scaling` and `--front`.
fn points(arguments: &Arguments, setting: &Setting, json: bool) -> Result<(), Failure> {
    let (name, points) = match arguments.scaling {
        Some(sizes) => ("scaling", plan_answers::scaling(&arguments.choices, setting, sizes)?),
        None => ("front", plan_answers::front(&arguments.choices, setting)?),
    };
    if let Some(folder) = &arguments.plots {
        let plot = plan_answers::plot(name, setting, &points);
        output::write(&folder.join(format!("{name}.svg")), plot.svg()?.as_bytes())?;
        output::write(&folder.join(format!("{name}.png")), &plot.png()?)?;
    }
    if json {
        return output::json(&json!({ name: points }));
    }
    output::line(&format!("{} on {}\n{}", setting.model.name, setting.topology.name(), plan_answers::points_table(&points)))
}
