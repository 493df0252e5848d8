//! The choices that `plan` and `run` offer: model, cluster, batch, precision, fixed dimensions,
//! limits. It resolves names, applies defaults, and runs the planner over the open choices.

use crate::binding::Limits;
use crate::confined;
use crate::failure::{Failure, code};
use crate::host::Instant;
use crate::inputs::{self, NamedModel};
use crate::method::{Method, MethodChoices};
use crate::plan_file::{LoadedPlan, ModelReference, PlanFile, PolicyTraining};
use crate::usual_stack::Trainer;
use clap::Args;
use foretell_planner::{Clock, Fixed, Framework, PlanJob, Progress, SearchResult, plan_job, usual_headroom};
use foretell_program::{Layout, MomentFormat, Optimizer, Plan, Profile, Rollout, RolloutPlacement, Stack, Trained};
use foretell_simulator::require_products;
use foretell_topologies::{Architecture, Topology, TopologyReference};
use foretell_units::diagnostic::Mistake;
use foretell_units::{Bytes, DataType, Price, Seconds, count};
use std::path::{Path, PathBuf};

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
    /// sequence_parallel, context_method, context_order, loss_chunk, mlp_chunk, bucket, shares,
    /// cuts, placement, stage_places, stages
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
    /// Muon for matrices of hidden layers, and AdamW for other parameters
    Muon,
}

/// The resolved job: names looked up and defaults taken.
pub struct Setting {
    /// The model.
    pub model: NamedModel,
    /// The devices.
    pub topology: Topology,
    /// The node kind that holds the first ranks, if it is not the first one of the file.
    pub first_nodes: Option<String>,
    /// The plan without its layout, which the search varies.
    pub base: Plan,
    /// Options that got their defaults, as they would be typed.
    pub taken: Vec<String>,
    /// RL post-training, if that is the method.
    pub policy: Option<PolicyTraining>,
}

impl Choices {
    /// Looks names up and applies defaults. `trainer` decides the default of the stack.
    pub fn setting(&self, trainer: Trainer) -> Result<Setting, Failure> {
        let mut taken = Vec::new();
        let model = self.model(&mut taken)?;
        self.check_batch_norm(&model)?;
        if self.topology.is_empty() {
            let hint = "name a cluster of `foretell topologies`, a file, or devices such as 8xh100";
            return Err(Failure::input(code::OPTION_MISSING, "`--topology` is missing").hint(hint));
        }
        let topology = inputs::topology(&self.topology, self.nodes)?;
        let topology = match &self.first_nodes {
            Some(first) => topology.beginning_with(first)?,
            None => topology,
        };
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
            require_products(&topology, format).map_err(Failure::of_input)?;
        }
        let optimizer = self.optimizer.map(Optimizer::from).unwrap_or_else(|| {
            let optimizer = model.model.usual_optimizer();
            taken.push(format!("--optimizer {}", optimizer.name()));
            optimizer
        });
        let mut base =
            Plan { precision, optimizer, batch_norm_group: self.batch_norm_group, ..Plan::new(Layout::default(), global_batch) };
        let stack = self.stack.as_deref().map(|stack| {
            if stack != "deepspeed" || !self.method.is_fine_tuning() {
                return stack;
            }
            crate::output::note(
                "`--stack deepspeed` is `hf-deepspeed`, with which people fine-tune; its pipelines are `deepspeed-3d`",
            );
            "hf-deepspeed"
        });
        let stack = stack.unwrap_or_else(|| {
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
        base.training.momentum = optimizer.usual_momentum();
        if let Some(name) = self.optimizer {
            (base.workload.moments, base.workload.paged_moments) = name.moments();
        }
        let mut method = self.method.clone();
        if method.method.is_none() && defaults.trains == Trained::Adapters {
            taken.push("--method lora".into());
            method.method = Some(Method::Lora);
        }
        base.layout.loss_chunk = self.fix.loss_chunk;
        method.apply(&mut base, &model.model, &mut taken)?;
        if let Some(routing) = &self.routing {
            base.workload.routing = inputs::routing(routing)?;
            base.validate_routing(model.model.experts(), model.model.mixture_layers()).map_err(Failure::of_input)?;
        }
        Ok(Setting { model, topology, first_nodes: self.first_nodes.clone(), base, taken, policy })
    }

    /// Refuses a group of samples of which none share statistics.
    fn check_batch_norm(&self, model: &NamedModel) -> Result<(), Failure> {
        let refused = |message: String, hint: &str| Err(Failure::input(code::OPTION_VALUE, message).hint(hint));
        match self.batch_norm_group {
            Some(0) => refused("`--batch-norm-group 0` has no samples".into(), "ask for 1 or more"),
            Some(_) if !model.model.has_batch_norm() => {
                refused(format!("`--batch-norm-group`: `{}` has no batch normalisation", model.name), "leave it out")
            }
            _ => Ok(()),
        }
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
        // The search checks the placements that it finds.
        let stated = Rollout { off_policy: 0, placement: RolloutPlacement::Colocated, ..rollout.clone() };
        let is_placed = self.method.rollout.as_ref().is_some_and(|choices| choices.fixed().placement.is_some());
        let checked = if is_placed { &rollout } else { &stated };
        checked.validate(update).map_err(|error| Failure::of_input(error).about("`--rollout`"))?;
        Ok(Some(PolicyTraining { method, rollout }))
    }

    /// Refuses RL post-training for commands other than `plan` and `simulate`. `what` names the
    /// command.
    pub fn refuse_policy(&self, what: &str) -> Result<(), Failure> {
        match self.method.method.filter(|method| method.policy().is_some()) {
            None => Ok(()),
            Some(method) => {
                let message = format!("{what} has no answer for `--method {}`", method.name());
                Err(Failure::input(code::OPTION_VALUE, message).hint("leave it out, or use another method"))
            }
        }
    }

    /// The model, with `--sequence` if that is given. Fine-tuning seldom has sequences as long as
    /// the model's own.
    fn model(&self, taken: &mut Vec<String>) -> Result<NamedModel, Failure> {
        /// The usual `cutoff_len` of LLaMA-Factory and `sequence_len` of Axolotl; TRL's is 1,024.
        const USUAL_LENGTH: usize = 2048;
        let named = inputs::model(&self.model)?;
        let trains_further = self.method.is_fine_tuning() && self.method.method.and_then(Method::policy).is_none();
        let is_longer = named.model.sample().tokens().is_some_and(|(length, _)| length > USUAL_LENGTH);
        let usual = (self.sequence.is_none() && trains_further && is_longer).then_some(USUAL_LENGTH);
        let Some(length) = self.sequence.or(usual) else { return Ok(named) };
        let Some(model) = named.model.with_sequence(length) else {
            if self.sequence.is_none() {
                return Ok(named);
            }
            let hint = "write its lengths into a model file with `base`";
            return Err(
                Failure::input(code::OPTION_VALUE, format!("`{}` has no one length of its samples", named.name)).hint(hint)
            );
        };
        if self.sequence.is_none() {
            taken.push(format!("--sequence {length}"));
        }
        inputs::sound(NamedModel { model, ..named }, Path::new("--sequence"))
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
    pub fn headroom(&self, stack: &Stack) -> f64 {
        self.headroom.unwrap_or_else(|| usual_headroom(stack, self.memory_limit))
    }

    /// The limits of a device's memory.
    pub fn limits(&self, stack: &Stack) -> Limits {
        Limits { memory_limit: self.memory_limit, headroom: self.headroom(stack) }
    }

    /// Ranks that the search may use.
    pub fn devices(&self, setting: &Setting) -> usize {
        self.job(setting, None, Instant::now()).devices()
    }

    /// Whether the planner makes a single search, so that the search's progress is that of the
    /// answer.
    pub fn is_one_search(&self, setting: &Setting) -> bool {
        self.job(setting, None, Instant::now()).is_one_search()
    }

    /// The question that the planner answers. Its time runs from `started`.
    pub fn job<'a>(&'a self, setting: &'a Setting, profile: Option<&'a Profile>, started: Instant) -> PlanJob<'a> {
        PlanJob {
            profile,
            formats: self.formats(setting),
            fixed: self.fix.clone(),
            keeps_node_order: self.first_nodes.is_some(),
            oversubscribes: self.oversubscribe,
            memory_limit: self.memory_limit,
            headroom: self.headroom,
            price_limit: self.price_limit.clone(),
            prefers_simple: self.prefer == Prefer::Simple,
            objective: self.objective.into(),
            clock: Clock::new(move || Seconds::new(started.elapsed().as_secs_f64())),
            end: self.time_limit,
            ..PlanJob::new(&setting.model.model, &setting.model.name, &setting.topology, &setting.base)
        }
    }

    /// Answers the question. Sets the setting's topology to that of the answer.
    pub fn search(&self, setting: &mut Setting, profile: Option<&Profile>, top: usize) -> Result<SearchResult, Failure> {
        self.search_watched(setting, profile, top, &|_, _| {})
    }

    /// As [`Self::search`]. Also reports the search's progress to `watch`, with the seconds since
    /// the search began.
    pub fn search_watched(
        &self,
        setting: &mut Setting,
        profile: Option<&Profile>,
        top: usize,
        watch: &(dyn Fn(f64, Progress) + Sync),
    ) -> Result<SearchResult, Failure> {
        self.refuse_policy("the search over layouts alone")?;
        let started = Instant::now();
        let watch = |progress: Progress| watch(started.elapsed().as_secs_f64(), progress);
        let answer = plan_job(&PlanJob { top, watch: &watch, ..self.job(setting, profile, started) })?;
        setting.topology = answer.topology;
        setting.first_nodes = answer.first_nodes.or(setting.first_nodes.take());
        Ok(answer.planned)
    }

    /// Returns the plan file of a layout that the search found.
    pub fn plan_file(&self, setting: &Setting, plan: &Plan) -> PlanFile {
        let topology = TopologyReference::Named(self.topology.clone());
        let has_own_length = inputs::model(&self.model).is_ok_and(|named| named.model == setting.model.model);
        let model = if has_own_length {
            ModelReference::Named(self.model.clone())
        } else {
            ModelReference::InPlace(setting.model.model.clone())
        };
        let mut file = PlanFile::new(model, topology, self.nodes, plan);
        file.first_nodes.clone_from(&setting.first_nodes);
        file
    }

    /// A plan that the search found, as if it were loaded from `path`.
    pub fn loaded(&self, setting: &Setting, plan: &Plan, path: PathBuf) -> Result<LoadedPlan, Failure> {
        Ok(LoadedPlan {
            model: setting.model.clone(),
            topology: setting.topology.clone(),
            plan: plan.clone(),
            file: self.movable_plan_file(setting, plan)?,
            path,
            remarks: Vec::new(),
            policy: None,
        })
    }

    /// As [`Self::plan_file`], for a file that can be moved to any folder.
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

/// Parses a share of something, such as `6%` or `0.06`.
fn share(text: &str) -> Result<f64, Mistake> {
    let (number, unit) = text.trim().strip_suffix('%').map_or((text.trim(), 1.0), |number| (number.trim(), 100.0));
    let share = number.parse::<f64>().ok().map(|number| number / unit).filter(|share| (0.0..1.0).contains(share));
    share.ok_or_else(|| Mistake::new(format!("`{text}` is not a share"), "write for example 6%"))
}

impl From<Objective> for foretell_planner::Objective {
    fn from(objective: Objective) -> Self {
        match objective {
            // Layouts are compared in one mode, so the fastest is the first to reach a loss.
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
            Self::Sgd | Self::Adam | Self::Adamw | Self::Lamb | Self::Muon => (MomentFormat::Single, false),
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
            OptimizerName::Muon => Optimizer::Muon,
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
