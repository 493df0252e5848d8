//! Plans as jobs of other frameworks, and back: Megatron-Core, torchtitan, DeepSpeed, Accelerate,
//! TRL, Axolotl, LLaMA-Factory, torchtune, and batch scripts for Slurm.
//!
//! No framework expresses all plans. Each exporter first makes the nearest plan that its framework
//! expresses, with a sentence for each difference, and then writes that plan. The written files
//! read back as the same plan. These modules know plans, and must not know Programs or the cost of
//! a plan.

mod accelerate;
mod arguments;
mod changed;
mod deciding;
mod deepspeed;
mod degrees;
mod fsdp;
mod hf_stack;
mod hf_trainer;
mod megatron;
mod nearest;
mod rules;
mod shell;
mod slurm;
mod stated;
mod torchtitan;
mod torchtune;
mod tuners;

pub use arguments::words;
pub use changed::{ChangedFile, change_file};
pub use rules::check_stack;

use foretell_models::Model;
use foretell_program::{Plan, PlanError};
use foretell_units::DataType;
use miette::Diagnostic;
use stated::Account;
use thiserror::Error;
use tuners::Tuner;

/// A plan, and what a framework needs in addition.
#[derive(Clone, Copy, Debug)]
pub struct Job<'a> {
    /// Name of the model.
    pub name: &'a str,
    /// The model.
    pub model: &'a Model,
    /// The plan.
    pub plan: &'a Plan,
    /// Devices of a node, one rank each.
    pub devices_per_node: usize,
}

impl Job<'_> {
    /// The number of ranks.
    fn ranks(&self) -> Result<usize, FrameworkError> {
        Ok(self.plan.mesh()?.world_size())
    }

    /// The number of nodes, and of ranks on each. The ranks of a node divide all ranks, since
    /// launchers start the same number on every node.
    fn nodes(&self) -> Result<[usize; 2], FrameworkError> {
        let ranks = self.ranks()?;
        let most = self.devices_per_node.clamp(1, ranks.max(1));
        let per_node = (1..=most).rev().find(|&count| ranks.is_multiple_of(count)).expect("invariant: 1 divides every number");
        Ok([ranks / per_node, per_node])
    }
}

/// A framework's job.
#[derive(Clone, Debug, PartialEq)]
pub struct JobFiles {
    /// The framework's release that the files are for.
    pub version: &'static str,
    /// Names and contents of the files.
    pub files: Vec<(String, String)>,
    /// The command that runs the job. It is started on each node, in the files' folder.
    pub command: String,
    /// The plan that the files express.
    pub plan: Plan,
    /// How it differs from the requested plan, a sentence each.
    pub differences: Vec<String>,
}

/// A plan that was read from a framework's files.
#[derive(Clone, Debug, PartialEq)]
pub struct ImportedPlan {
    /// The plan.
    pub plan: Plan,
    /// The model, if the files describe it.
    pub model: Option<Model>,
    /// The name of the model in the files, if that model is not known.
    pub unknown_model: Option<String>,
    /// Positions of a sample, if the files state them separately from the model.
    pub sequence: Option<usize>,
    /// Settings that were not read and may change time or memory.
    pub unread: Vec<String>,
    /// Settings at their default, switched off, or without effect on a step.
    pub without_effect: Vec<String>,
    /// Values that the files leave open, with their source, a sentence each.
    pub assumed: Vec<String>,
    /// `true` if the files state the bucket. If not, the caller uses the stack's default.
    pub states_bucket: bool,
}

impl ImportedPlan {
    fn new(plan: Plan, account: Account) -> Self {
        let Account { unread, without_effect, assumed, states_bucket } = account;
        Self { plan, model: None, unknown_model: None, sequence: None, unread, without_effect, assumed, states_bucket }
    }
}

/// What the reader of a framework's files has to know in addition to them.
#[derive(Clone, Copy)]
pub struct Surroundings<'a> {
    /// The number of ranks.
    pub ranks: usize,
    /// Devices of a node, one rank each.
    pub devices_per_node: usize,
    /// Library name of the devices, for messages.
    pub device: &'a str,
    /// The precision for files that leave it open (`"auto"`).
    pub precision: DataType,
    /// Samples of a micro-batch, for files that leave it open.
    pub micro_batch: Option<usize>,
    /// Positions of a sample, for files that leave them open.
    pub sequence: Option<usize>,
    /// Words of the vocabulary, for files that leave it to a tokenizer.
    pub vocab: Option<usize>,
    /// The tool that the file is for, if the user names it, such as `trl`. Files of tools on a
    /// Trainer look alike.
    pub tool: Option<&'a str>,
    /// The name, for `file`, of Accelerate's configuration with which a Trainer's job is launched.
    pub launch_file: Option<&'a str>,
    /// Reads a file that another file names. `None` if it does not exist.
    pub file: &'a dyn Fn(&str) -> Option<String>,
}

impl From<usize> for Surroundings<'_> {
    /// Nodes of up to 8 H100 devices, bf16, and no other files.
    fn from(ranks: usize) -> Self {
        Self {
            ranks,
            devices_per_node: 8.min(ranks.max(1)),
            device: "h100-sxm-80g",
            precision: DataType::Bf16,
            micro_batch: None,
            sequence: None,
            vocab: None,
            tool: None,
            launch_file: None,
            file: &|_| None,
        }
    }
}

/// Why a plan was not exported or imported.
#[derive(Clone, Debug, PartialEq, Error, Diagnostic)]
pub enum FrameworkError {
    /// The framework does not train this model.
    #[error("{framework} does not train this model: {reason}")]
    #[diagnostic(code(framework::model), help("{hint}"))]
    Model {
        /// The framework.
        framework: &'static str,
        /// What the framework lacks.
        reason: String,
        /// What to do instead.
        hint: &'static str,
    },
    /// The framework supports neither this layout nor one close to it.
    #[error("{framework} has no plan near this one: {reason}")]
    #[diagnostic(code(framework::layout), help("{hint}"))]
    Layout {
        /// The framework.
        framework: &'static str,
        /// What the framework lacks.
        reason: String,
        /// What to do instead.
        hint: String,
    },
    /// The framework does not train by the plan's method.
    #[error("{framework} does not train by `{method}`: {reason}")]
    #[diagnostic(code(framework::method), help("{hint}"))]
    Method {
        /// The framework.
        framework: &'static str,
        /// The method, as on the command line.
        method: &'static str,
        /// What the framework lacks.
        reason: &'static str,
        /// What to do instead.
        hint: &'static str,
    },
    /// The framework refuses the plan's sizes.
    #[error("{framework} refuses this plan: {reason}")]
    #[diagnostic(code(framework::refused), help("{hint}"))]
    Refused {
        /// The framework.
        framework: &'static str,
        /// The framework's reason.
        reason: String,
        /// What to do instead.
        hint: &'static str,
    },
    /// A file that does not have the form of its framework.
    #[error("{reason}")]
    #[diagnostic(code(framework::form), help("{hint}"))]
    Form {
        /// What is wrong with it.
        reason: String,
        /// How to fix it.
        hint: String,
    },
    /// A plan that contradicts itself.
    #[error(transparent)]
    #[diagnostic(transparent)]
    Plan(#[from] PlanError),
}

/// The frameworks that plans are written for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Framework {
    /// Megatron-LM with Megatron-Core.
    Megatron,
    /// torchtitan.
    Torchtitan,
    /// DeepSpeed.
    Deepspeed,
    /// Hugging Face Accelerate.
    Accelerate,
    /// TRL.
    Trl,
    /// Axolotl.
    Axolotl,
    /// LLaMA-Factory.
    LlamaFactory,
    /// torchtune.
    Torchtune,
    /// A batch script for Slurm that runs Foretell's executor.
    Slurm,
}

impl Framework {
    /// Whether the framework chooses the bucket, so that its files state none.
    pub fn chooses_bucket(self) -> bool {
        matches!(self, Self::Torchtitan | Self::Accelerate | Self::Torchtune)
    }
}

/// Writes a plan as a framework's job.
///
/// # Errors
/// [`FrameworkError`] if the framework expresses neither the plan nor one near it.
pub fn export_job(job: &Job<'_>, framework: Framework) -> Result<JobFiles, FrameworkError> {
    let exported = match framework {
        Framework::Megatron => megatron::export(job),
        Framework::Torchtitan => torchtitan::export(job),
        Framework::Deepspeed => deepspeed::export(job),
        Framework::Accelerate => accelerate::export(job),
        Framework::Trl => tuners::export(job, Tuner::Trl),
        Framework::Axolotl => tuners::export(job, Tuner::Axolotl),
        Framework::LlamaFactory => tuners::export(job, Tuner::LlamaFactory),
        Framework::Torchtune => torchtune::export(job),
        Framework::Slurm => slurm::export(job),
    }?;
    if framework != Framework::Slurm {
        check_stack(job.model, &exported.plan)?;
    }
    Ok(exported)
}

/// The forms of files that plans are read from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlanForm {
    /// Arguments of Megatron-LM's `pretrain_gpt.py`.
    MegatronArguments,
    /// torchtitan's TOML file, or its command line.
    Torchtitan,
    /// DeepSpeed's configuration.
    Deepspeed,
    /// The `TrainingArguments` of Hugging Face's Trainer, as JSON or YAML.
    HuggingFaceTrainer,
    /// Accelerate's configuration.
    Accelerate,
    /// A recipe of torchtune.
    Torchtune,
}

/// Reads a plan for a number of ranks.
///
/// # Errors
/// [`FrameworkError::Form`] if the text has another form, or has a setting that decides what is
/// planned and that the reader does not know; [`FrameworkError::Layout`] if the framework itself
/// refuses the job.
pub fn import_plan<'a>(
    text: &str,
    form: PlanForm,
    surroundings: impl Into<Surroundings<'a>>,
) -> Result<ImportedPlan, FrameworkError> {
    let surroundings = surroundings.into();
    let imported = match form {
        PlanForm::MegatronArguments => megatron::import(text, &surroundings),
        PlanForm::Torchtitan => torchtitan::import(text, &surroundings),
        PlanForm::Deepspeed => deepspeed::import(text, &surroundings),
        PlanForm::HuggingFaceTrainer => hf_trainer::import(text, &surroundings),
        PlanForm::Accelerate => accelerate::import(text, &surroundings),
        PlanForm::Torchtune => torchtune::import(text, &surroundings),
    }?;
    if let Some(model) = &imported.model {
        check_stack(model, &imported.plan)?;
    }
    imported.plan.validate()?;
    Ok(imported)
}
