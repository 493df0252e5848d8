//! The choices that `plan` and `run` offer: model, cluster, batch, precision, fixed dimensions,
//! limits. Resolves names, takes defaults, and runs the planner over what is left open.

use crate::binding::Limits;
use crate::confined;
use crate::failure::{Failure, code};
use crate::host::Instant;
use crate::inputs::{self, NamedModel};
use crate::method::{Method, MethodChoices};
use crate::plan_file::{ModelReference, PlanFile, PolicyTraining};
use crate::predict;
use crate::price_limit;
use crate::usual_stack::Trainer;
use clap::Args;
use foretell_planner::{Fixed, Framework, Planned, Progress, Request, StackLimits, plan};
use foretell_program::{Layout, MomentFormat, Optimizer, Plan, Profile, Rollout, RolloutPlacement, Stack, Trained};
use foretell_simulator::Stop;
use foretell_topologies::{Architecture, NodeGroup, Topology, TopologyReference};
use foretell_units::diagnostic::Mistake;
use foretell_units::{Bytes, DataType, Price, Seconds, count};
use std::path::Path;

/// Command-line choices of `plan` and `run`.
#[derive(Debug, Clone, Args)]
pub struct Choices {
    /// A zoo name (see `foretell models`) or a model file
    #[arg(long)]
    pub model: String,
    /// A library name (see `foretell topologies`), a topology file, `local` (this machine's cores)
    /// or `local-gpus`
    #[arg(long, default_value = "", hide_default_value = true)]
    pub topology: String,
    /// Length of the model's sequences, instead of the model's own
    #[arg(long, value_name = "POSITIONS", value_parser = count)]
    pub sequence: Option<usize>,
    /// Node kind (a `name` in `nodes`) that holds the first ranks; left open, the best one is
    /// chosen
    #[arg(long, value_name = "NAME")]
    pub first_nodes: Option<String>,
    /// Number of nodes of the topology's node template
    #[arg(long, value_name = "N", value_parser = count)]
    pub nodes: Option<usize>,
    /// Samples per step over all ranks [default: 32 per device; 8 if samples are sequences]
    #[arg(long, value_name = "SAMPLES", value_parser = count)]
    pub global_batch: Option<usize>,
    /// Number format of activations and products; of several, the one with the fastest step is
    /// chosen [default: bf16 on GPUs (V100: fp16), fp32 on CPUs]
    #[arg(long, value_name = "FORMAT,...", value_delimiter = ',')]
    pub precision: Vec<Precision>,
    #[command(flatten)]
    pub method: MethodChoices,
    /// Optimizer [default: sgd for MLPs and convolutional networks, adamw for others]
    #[arg(long, value_name = "NAME")]
    pub optimizer: Option<OptimizerName>,
    /// Memory limit per rank, such as 72GB
    #[arg(long, value_name = "SIZE")]
    pub memory_limit: Option<Bytes>,
    /// Share of each GPU's memory to leave free, such as `6%`, for the driver, the libraries and
    /// what an allocator loses [default: 2.5% with our own stack, 6% with others; none with
    /// `--memory-limit`]
    #[arg(long, value_name = "SHARE", value_parser = share)]
    pub headroom: Option<f64>,
    /// Layouts to prefer among those within 0.5 % of the fastest: the simplest, or the fastest
    #[arg(long, value_enum, default_value_t = Prefer::Simple)]
    pub prefer: Prefer,
    /// Fixed dimensions of the layout: data, tensor, pipeline, context, expert, micro_batch,
    /// schedule, virtual_stages, recompute, zero, shard_group, offload, collective,
    /// sequence_parallel, context_method, context_order, bucket, shares, cuts, placement,
    /// stage_places, stages
    #[arg(long, value_name = "tensor=8,pipeline=4,...", default_value = "", hide_default_value = true)]
    pub fix: Fixed,
    /// Samples that share batch-norm statistics [default: a rank's micro-batch]
    #[arg(long, value_name = "SAMPLES")]
    pub batch_norm_group: Option<usize>,
    /// Software that trains: foretell, megatron-core, fsdp2, torchtitan, nemo, deepspeed, ddp, ...
    /// [default: on a cluster of one kind of GPU megatron-core for transformers and ddp for others,
    /// on TPUs maxtext-tpu for transformers; else foretell]
    #[arg(long, value_name = "NAME")]
    pub stack: Option<String>,
    /// How evenly tokens choose experts: balanced, lognormal:SIGMA, zipf:S, or a file of measured
    /// loads (one number an expert, or such a list a layer) [default: balanced]
    #[arg(long, value_name = "balanced|lognormal:SIGMA|zipf:S|FILE")]
    pub routing: Option<String>,
    /// Learning rate [default: 0.05 for sgd, 0.001 for adam and adamw]
    #[arg(long, value_name = "RATE")]
    pub learning_rate: Option<f32>,
    /// Let ranks share devices, to check a layout without timing it. `--fix` gives data, tensor and
    /// pipeline
    #[arg(long)]
    pub oversubscribe: bool,
    /// Stop the search after this time with the best layout so far; the gap says how far it may be
    /// from the optimum
    #[arg(long, value_name = "10s")]
    pub time_limit: Option<Seconds>,
    /// Highest price per hour of the nodes used, in the currency of the topology file
    #[arg(long, value_name = "PRICE")]
    pub price_limit: Option<Price>,
    /// What to optimise
    #[arg(long, value_enum, default_value_t = Objective::Time)]
    pub objective: Objective,
}

/// Preferences among layouts that are about as fast.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Prefer {
    /// Fewer stages, no context parallelism, usual cuts.
    Simple,
    /// The fastest, however odd.
    Fastest,
}

/// Objectives on the command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Objective {
    Time,
    /// The slower end of the step time's interval.
    P90,
    Cost,
    Energy,
    Goodput,
    /// Time to a loss: of modes that need more samples it counts these, too (`plan --mode any`).
    TimeToLoss,
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
    #[value(name = "adamw-8bit")]
    AdamwEightBit,
    /// Moments in eight bits, in memory that device and host share
    #[value(name = "paged-adamw-8bit")]
    PagedAdamwEightBit,
    /// One number for each row and column in place of a moment for each parameter
    Adafactor,
    Lamb,
}

/// The resolved job: names looked up and defaults taken.
pub struct Setting {
    /// The model.
    pub model: NamedModel,
    /// The devices.
    pub topology: Topology,
    /// The node kind that holds the first ranks, if that is not the first of the file.
    pub first_nodes: Option<String>,
    /// The plan without its layout, which the search varies.
    pub base: Plan,
    /// Options whose defaults were taken, as they would be typed.
    pub taken: Vec<String>,
    /// RL post-training, if that is the method.
    pub policy: Option<PolicyTraining>,
}

impl Choices {
    /// Looks names up and takes defaults. `trainer` decides the default of the stack.
    pub fn setting(&self, trainer: Trainer) -> Result<Setting, Failure> {
        let model = self.model()?;
        if self.topology.is_empty() {
            let hint = "name a cluster of `foretell topologies`, a file, or devices such as 8xh100";
            return Err(Failure::input(code::OPTION_MISSING, "`--topology` is missing").hint(hint));
        }
        let topology = inputs::topology(&self.topology, self.nodes)?;
        let topology = match &self.first_nodes {
            Some(first) => topology.beginning_with(first)?,
            None => topology,
        };
        let mut taken = Vec::new();
        let policy = self.policy(&mut taken)?;
        let sequences = model.model.sample().is_sequence();
        let global_batch = self.global_batch.unwrap_or_else(|| {
            let batch = match &policy {
                Some(policy) => policy.rollout.responses(),
                None => topology.device_count() * if sequences { 8 } else { 32 },
            };
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
            let optimizer = model.model.usual_optimizer();
            taken.push(format!("--optimizer {}", optimizer.name()));
            optimizer
        });
        let mut base =
            Plan { precision, optimizer, batch_norm_group: self.batch_norm_group, ..Plan::new(Layout::default(), global_batch) };
        let stack = self.stack.as_deref().unwrap_or_else(|| {
            let is_here = [inputs::LOCAL, inputs::LOCAL_GPUS].contains(&self.topology.as_str());
            let of_framework = policy.as_ref().and_then(|policy| Framework::named(policy.rollout.framework.as_deref()?).ok());
            let stack = match of_framework.and_then(|framework| framework.stacks.first()) {
                Some(stack) => stack.as_str(),
                None => trainer.usual_stack(&model.model, &topology, is_here, self.method.is_fine_tuning()),
            };
            taken.push(format!("--stack {stack}"));
            stack
        });
        let defaults = &inputs::stack(stack)?.defaults;
        (base.stack, base.overlap, base.layout.bucket) = (Stack::new(stack), defaults.overlap, defaults.bucket);
        base.training.learning_rate = self.learning_rate;
        if let Some(name) = self.optimizer {
            (base.workload.moments, base.workload.paged_moments) = name.moments();
        }
        let mut method = self.method.clone();
        if method.method.is_none() && defaults.trains == Trained::Adapters {
            taken.push("--method lora".into());
            method.method = Some(Method::Lora);
        }
        method.apply(&mut base, &model.model, &mut taken)?;
        if let Some(routing) = &self.routing {
            base.workload.routing = inputs::routing(routing)?;
            base.validate_routing(model.model.experts(), model.model.mixture_layers()).map_err(Failure::of_input)?;
        }
        Ok(Setting { model, topology, first_nodes: self.first_nodes.clone(), base, taken, policy })
    }

    /// RL post-training, if that is the method.
    fn policy(&self, taken: &mut Vec<String>) -> Result<Option<PolicyTraining>, Failure> {
        let Some(method) = self.method.method.and_then(Method::policy) else { return Ok(None) };
        if self.sequence.is_some() {
            let hint = "state `prompt`, `response` and `response-max` in `--rollout`";
            return Err(Failure::input(code::OPTION_VALUE, "`--sequence`: the rollout decides the lengths").hint(hint));
        }
        let rollout = self.method.rollout.clone().unwrap_or_default().rollout(method, taken).map_err(Failure::of_input)?;
        let update = self.global_batch.unwrap_or(rollout.responses());
        // A placement that the search finds is checked there.
        let stated = Rollout { off_policy: 0, placement: RolloutPlacement::Colocated, ..rollout.clone() };
        let is_placed = self.method.rollout.as_ref().is_some_and(|choices| choices.fixed().placement.is_some());
        let checked = if is_placed { &rollout } else { &stated };
        checked.validate(update).map_err(|error| Failure::of_input(error).about("`--rollout`"))?;
        Ok(Some(PolicyTraining { method, rollout }))
    }

    /// Refuses RL post-training where only `plan` itself and `simulate` know it.
    pub fn refuse_policy(&self, what: &str) -> Result<(), Failure> {
        match self.method.method.filter(|method| method.policy().is_some()) {
            None => Ok(()),
            Some(method) => {
                let message = format!("{what} has no answer for `--method {}`", method.name());
                Err(Failure::input(code::OPTION_VALUE, message).hint("leave it out, or use another method"))
            }
        }
    }

    /// The model, with `--sequence` if that is given.
    fn model(&self) -> Result<NamedModel, Failure> {
        let named = inputs::model(&self.model)?;
        let Some(length) = self.sequence else { return Ok(named) };
        let Some(model) = named.model.with_sequence(length) else {
            let hint = "write its lengths into a model file with `base`";
            return Err(
                Failure::input(code::OPTION_VALUE, format!("`{}` has no one length of its samples", named.name)).hint(hint)
            );
        };
        inputs::sound(NamedModel { model, ..named }, Path::new("--sequence"))
    }

    /// Number of ranks that the search may use: one per device within `--price-limit`. With
    /// `--oversubscribe` it is the world size of the fixed layout, as with `mpirun`.
    pub fn devices(&self, topology: &Topology) -> usize {
        match (self.oversubscribe, self.fix.data, self.fix.tensor, self.fix.pipeline) {
            (true, Some(data), Some(tensor), Some(pipeline)) => {
                let others = [tensor, pipeline, self.fix.context.unwrap_or(1), self.fix.expert.unwrap_or(1)];
                others.into_iter().fold(data, usize::saturating_mul)
            }
            _ => self.price_limit.as_ref().map_or(topology.device_count(), |limit| price_limit::affordable(topology, limit)),
        }
    }

    /// The fields of the layout that the search leaves alone: those of `--fix`, and those that the
    /// stack has only one value of.
    pub fn fixed(&self, stack: &Stack) -> Fixed {
        let mut fixed = self.fix.clone();
        if let Some(limits) = StackLimits::of(stack) {
            limits.fix(&mut fixed);
        }
        fixed
    }

    /// The number formats to try: those of `--precision`, or the default.
    pub fn formats(&self, setting: &Setting) -> Vec<DataType> {
        let mut formats = vec![setting.base.precision];
        for format in self.precision.iter().copied().map(DataType::from) {
            if !formats.contains(&format) {
                formats.push(format);
            }
        }
        formats
    }

    /// Share of each GPU's memory that layouts leave free.
    ///
    /// Our own executor maps one arena: the driver's context and the libraries need about 2 GiB of
    /// 80. Allocators of frameworks also lose some between blocks, unless their allocations are
    /// replayed one by one.
    pub fn headroom(&self, stack: &Stack) -> f64 {
        let knows_allocator = || inputs::stack(stack.name()).is_ok_and(|profile| profile.tables.is_some());
        self.headroom.unwrap_or(match self.memory_limit {
            Some(_) => 0.0,
            None if stack.is_own() || knows_allocator() => 0.025,
            None => 0.06,
        })
    }

    /// How much slower a simpler layout may be.
    pub fn simplicity_margin(&self) -> f64 {
        if self.prefer == Prefer::Simple { SIMPLICITY_MARGIN } else { 0.0 }
    }

    /// The limits of a device's memory.
    pub fn limits(&self, stack: &Stack) -> Limits {
        Limits { memory_limit: self.memory_limit, headroom: self.headroom(stack) }
    }

    /// Searches all number formats, and unless `--first-nodes` fixes it also topologies that begin
    /// with another node kind. Sets the setting's topology to that of the answer.
    pub fn search(&self, setting: &mut Setting, profile: Option<&Profile>, top: usize) -> Result<Planned, Failure> {
        self.search_watched(setting, profile, top, &|_, _| {})
    }

    /// Whether [`Self::search`] is one search, so that its progress is that of the whole.
    pub fn is_one_search(&self, setting: &Setting) -> bool {
        self.formats(setting).len() == 1 && self.without_first_nodes(setting).is_empty()
    }

    /// Searches as [`Self::search`] does. Tells `watch` how far the search is, with the seconds
    /// since it began.
    pub fn search_watched(
        &self,
        setting: &mut Setting,
        profile: Option<&Profile>,
        top: usize,
        watch: &(dyn Fn(f64, Progress) + Sync),
    ) -> Result<Planned, Failure> {
        self.refuse_policy("the search over layouts alone")?;
        let started = Instant::now();
        let watch = |progress: Progress| watch(started.elapsed().as_secs_f64(), progress);
        let formats = self.formats(setting);
        if formats.len() > 1 && !matches!(self.objective, Objective::Time | Objective::TimeToLoss) {
            let hint = "omit `--objective`, or name one format";
            return Err(Failure::input(code::OPTION_VALUE, "several number formats can only be compared by step time").hint(hint));
        }
        let devices = self.devices(&setting.topology);
        let mut planned = self.search_devices(setting, (&setting.topology, devices), profile, (top, None), started, &watch);
        // The other searches leave some kinds of devices out.
        let on_all_devices = planned.as_ref().ok().and_then(|planned| planned.search.all_devices_seconds);
        for (first, topology, devices) in self.without_first_nodes(setting) {
            if planned.is_ok() && self.is_over(started) {
                planned = planned.map(|planned| planned.cut_off());
                break;
            }
            let elsewhere = planned.as_ref().ok().map(|planned| planned.value);
            let found = self.search_devices(setting, (&topology, devices), profile, (top, elsewhere), started, &watch);
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
        planned.search.all_devices_seconds = on_all_devices;
        planned.search.wall_seconds = started.elapsed().as_secs_f64();
        Ok(planned)
    }

    /// Searches the first `devices` of a topology for the best `top` layouts. `elsewhere` is the
    /// best value on other topologies: only better layouts count.
    fn search_devices(
        &self,
        setting: &Setting,
        (topology, devices): (&Topology, usize),
        profile: Option<&Profile>,
        (top, elsewhere): (usize, Option<f64>),
        started: Instant,
        watch: &(dyn Fn(Progress) + Sync),
    ) -> Result<Planned, Failure> {
        if let Some(limit) = &self.price_limit {
            price_limit::check_currency(topology, limit)?;
        }
        if devices == 0 {
            let hint = "raise or omit `--price-limit`; every node needs a `price_per_hour`";
            return Err(
                Failure::input(code::OPTION_VALUE, format!("no node of `{}` costs so little", topology.name())).hint(hint)
            );
        }
        // The clock stops a search a little later if that still gives an answer.
        let (stop, give_up) = (self.stop_after(started, 0.0), self.stop_after(started, LATE_ANSWER));
        let search = |base: &Plan| -> Result<Planned, Failure> {
            let costs = predict::costs(profile, topology, base, &setting.model.model)?;
            let request = Request {
                fixed: self.fixed(&base.stack),
                devices,
                objective: self.objective.into(),
                stop: stop.clone(),
                give_up: give_up.clone(),
                watch,
                oversubscription: predict::oversubscription(self.oversubscribe),
                memory_limit: self.memory_limit,
                headroom: self.headroom(&base.stack),
                searches_locally: true,
                simplicity_margin: self.simplicity_margin(),
                top,
                must_beat: elsewhere,
                ..Request::new(&setting.model.model, &setting.model.name, topology, &costs, base)
            };
            Ok(plan(&request)?)
        };
        let mut planned = search(&setting.base);
        for &precision in &self.formats(setting)[1..] {
            if planned.is_ok() && stop.is_raised() {
                return planned.map(|planned| planned.cut_off());
            }
            // A model that does not fit in one format may fit in another.
            planned = match (planned, search(&Plan { precision, ..setting.base.clone() })) {
                (Ok(one), Ok(other)) => Ok(one.merged(other, top)),
                (Err(_), other) => other,
                (one, Err(_)) => one,
            };
        }
        planned
    }

    /// Stops a search that began at `started` so many seconds after the time limit.
    pub fn stop_after(&self, started: Instant, seconds: f64) -> Stop {
        let end = self.time_limit.map(|limit| limit.value() + seconds);
        Stop::when(move || end.is_some_and(|end| started.elapsed().as_secs_f64() > end))
    }

    /// Whether the time limit is over.
    pub fn is_over(&self, started: Instant) -> bool {
        self.time_limit.is_some_and(|limit| started.elapsed().as_secs_f64() > limit.value())
    }

    /// Topologies that begin with another node kind: that kind's name, the reordered topology, and
    /// the number of devices without the kinds that come before it in the file (or those within the
    /// price limit).
    fn without_first_nodes(&self, setting: &Setting) -> Vec<(String, Topology, usize)> {
        let groups = setting.topology.node_groups();
        let unnamed = |groups: &[NodeGroup]| -> Vec<NodeGroup> {
            groups.iter().map(|group| NodeGroup { name: String::new(), ..group.clone() }).collect()
        };
        let (mut seen, mut found) = (Vec::new(), Vec::new());
        for place in (1..groups.len()).filter(|_| self.first_nodes.is_none() && !self.oversubscribe).take(MOST_KINDS_LEFT_OUT) {
            // Skips what equals a prefix of the file's nodes: the search has seen it.
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

    /// Returns the plan file of a layout that the search found.
    pub fn plan_file(&self, setting: &Setting, plan: &Plan) -> PlanFile {
        let topology = TopologyReference::Named(self.topology.clone());
        let model = match self.sequence {
            Some(_) => ModelReference::InPlace(setting.model.model.clone()),
            None => ModelReference::Named(self.model.clone()),
        };
        let mut file = PlanFile::new(model, topology, self.nodes, plan);
        file.first_nodes.clone_from(&setting.first_nodes);
        file
    }

    /// As [`Self::plan_file`], for a file in any folder.
    pub fn movable_plan_file(&self, setting: &Setting, plan: &Plan) -> Result<PlanFile, Failure> {
        let mut file = self.plan_file(setting, plan);
        if confined::is_confined() && !inputs::is_zoo_name(&self.model) {
            file.model = ModelReference::InPlace(setting.model.model.clone());
        }
        file.topology = inputs::topology_reference(&self.topology)?;
        file.absolute_paths()?;
        Ok(file)
    }
}

/// Seconds beyond its time limit for which a search without an answer goes on. Most have one by
/// then.
const LATE_ANSWER: f64 = 0.25;

/// How much slower a simpler layout may be: less than any prediction is sure of.
const SIMPLICITY_MARGIN: f64 = 0.005;

/// Most node kinds at the beginning of a file that are left out. Each needs a search of its own.
const MOST_KINDS_LEFT_OUT: usize = 3;

/// Parses a share of something, such as `6%` or `0.06`.
fn share(text: &str) -> Result<f64, Mistake> {
    let (number, unit) = text.trim().strip_suffix('%').map_or((text.trim(), 1.0), |number| (number.trim(), 100.0));
    let share = number.parse::<f64>().ok().map(|number| number / unit).filter(|share| (0.0..1.0).contains(share));
    share.ok_or_else(|| Mistake::new(format!("`{text}` is not a share"), "write for example 6%"))
}

impl From<Objective> for foretell_planner::Objective {
    fn from(objective: Objective) -> Self {
        match objective {
            // Of layouts in one mode the fastest is the first to reach a loss.
            Objective::Time | Objective::TimeToLoss => Self::Time,
            Objective::P90 => Self::SlowEnd,
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

impl OptimizerName {
    /// The format of the moments, and whether they are paged.
    fn moments(self) -> (MomentFormat, bool) {
        match self {
            Self::Sgd | Self::Adam | Self::Adamw | Self::Lamb => (MomentFormat::Single, false),
            Self::AdamwEightBit => (MomentFormat::EightBit, false),
            Self::PagedAdamwEightBit => (MomentFormat::EightBit, true),
            Self::Adafactor => (MomentFormat::Factored, false),
        }
    }
}

impl From<OptimizerName> for Optimizer {
    fn from(name: OptimizerName) -> Self {
        match name {
            OptimizerName::Sgd => Optimizer::Sgd,
            OptimizerName::Adam => Optimizer::Adam,
            OptimizerName::Adamw
            | OptimizerName::AdamwEightBit
            | OptimizerName::PagedAdamwEightBit
            | OptimizerName::Adafactor => Optimizer::AdamW,
            OptimizerName::Lamb => Optimizer::Lamb,
        }
    }
}

/// The precision of a plan that states none: fp32 on CPUs, bf16 where every device has it, else
/// fp16.
pub fn usual_precision(topology: &Topology) -> DataType {
    let kinds = topology.device_kinds();
    if kinds.iter().any(|kind| kind.architecture == Architecture::Cpu) {
        return DataType::Fp32;
    }
    if kinds.iter().all(|kind| kind.peak.contains_key(&DataType::Bf16)) { DataType::Bf16 } else { DataType::Fp16 }
}
