//! `foretell import`: other tools' files as topology, model and plan files.

#[cfg(not(target_family = "wasm"))]
pub mod kineto;

use crate::choices::usual_precision;
use crate::failure::{Failure, code};
use crate::foreign;
use crate::inputs::{self, NamedModel};
use crate::output;
use crate::plan_file::{ModelReference, PlanFile, usual_bucket, usual_overlap};
use clap::{Args, ValueEnum};
use foretell_export::{ImportedPlan, PlanForm, Surroundings, check_stack, import_plan};
use foretell_models::{GraphOptions, Model};
use foretell_program::traced::TracedPlan;
use foretell_program::{AttentionKernel, Plan};
use foretell_simulator::require_products;
use foretell_topologies::{ImportOptions, TopologyReference, from_nccl_xml, from_rocm_topo, from_slurm_nodes, from_smi_topo};
use schemars::JsonSchema;
use serde::Serialize;
use std::path::{Path, PathBuf};

/// Make a topology, model or plan file from other tools' files
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  nvidia-smi topo -m > topo.txt; foretell import nvidia-smi-topo topo.txt --device h100-sxm-80g --nic-bandwidth 400Gbit/s -o here.yaml
  scontrol show node > nodes.txt; foretell import slurm-nodes nodes.txt --nic-bandwidth 400Gbit/s -o cluster.yaml
  NCCL_TOPO_DUMP_FILE=topo.xml all_reduce_perf -g 8; foretell import nccl-xml topo.xml -o here.yaml
  foretell import hf-config Qwen3-8B/config.json --sequence 4096 -o qwen3-8b.yaml
  python -m foretell.trace my_script.py:step -o trace.json; foretell import torch trace.json -o model.yaml
  foretell import megatron-args train.sh --topology dgx-h100 --nodes 4 -o plan.yaml
  foretell import kineto rank0.json rank1.json --plan plan.yaml -o profile.yaml --run theirs; foretell check theirs
  foretell import deepspeed-json ds_config.json --model llama3-8b --topology dgx-a100-80g -o plan.yaml")]
pub struct Arguments {
    /// The file's format
    #[arg(value_enum)]
    form: Form,
    /// The file; for `kineto` one for each rank, or for a rank of each stage; for `hf-trainer` also
    /// accelerate's configuration of the launch, as the second
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Library name of the GPUs, if the file does not identify them
    #[arg(long, value_name = "KIND")]
    device: Option<String>,
    /// Rate of one NIC, if the file does not state it
    #[arg(long, value_name = "RATE")]
    nic_bandwidth: Option<String>,
    /// Positions of a sample [default: as the file or the model says; for `hf-config` the most that
    /// it allows, for `torch` those of the trace]
    #[arg(long, value_name = "N")]
    sequence: Option<usize>,
    /// The plan's model, if the file does not describe it: a zoo name or a model file
    #[arg(long)]
    model: Option<String>,
    /// Read a `config.json` as one of another model type, such as `llama`, where its own cannot be
    /// read
    #[arg(long = "as", value_name = "TYPE")]
    like: Option<String>,
    /// Samples of a micro-batch, if the file leaves them to a training script
    #[arg(long, value_name = "N")]
    micro_batch: Option<usize>,
    /// Words of the vocabulary, if a script leaves them to a tokenizer
    #[arg(long, value_name = "N")]
    vocab: Option<usize>,
    /// The plan's cluster: a library name, a topology file, or devices such as `8xh100`
    #[arg(long)]
    topology: Option<String>,
    /// Number of nodes of the topology's node template
    #[arg(long, value_name = "N")]
    nodes: Option<usize>,
    /// The plan that was run, for `kineto`
    #[arg(long, value_name = "FILE")]
    plan: Option<PathBuf>,
    /// Also make a run's folder, which `foretell check` reads, for `kineto`
    #[arg(long, value_name = "DIR")]
    run: Option<PathBuf>,
    /// Costs of the prediction in `--run` [default: those of the trace]
    #[arg(long, value_name = "FILE")]
    profile: Option<PathBuf>,
    /// The file to write [default: standard output]
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
}

/// Formats that can be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Form {
    /// The output of `nvidia-smi topo -m`
    NvidiaSmiTopo,
    /// The output of `rocm-smi --showtopo`
    RocmSmiTopo,
    /// The output of Slurm's `scontrol show node`
    SlurmNodes,
    /// NCCL's topology dump (`NCCL_TOPO_DUMP_FILE`)
    NcclXml,
    /// The `config.json` beside a model's weights (Hugging Face Transformers)
    HfConfig,
    /// A PyTorch step, as `python -m foretell.trace FILE.py:step -o trace.json` writes it
    Torch,
    /// Arguments of Megatron-LM's `pretrain_gpt.py`, or a script that has them
    MegatronArgs,
    /// torchtitan's TOML file
    TorchtitanToml,
    /// DeepSpeed's configuration
    DeepspeedJson,
    /// The `TrainingArguments` of Hugging Face's Trainer, as JSON or YAML, also of LLaMA-Factory
    /// and Axolotl
    #[value(aliases = ["axolotl", "llama-factory"])]
    HfTrainer,
    /// The same of TRL, whose defaults differ
    Trl,
    /// Accelerate's configuration
    Accelerate,
    /// A recipe of torchtune
    Torchtune,
    /// Traces of PyTorch's profiler: a profile, and with `--run` a measured run
    Kineto,
}

impl Form {
    /// The form of a plan. `None` for topologies and models.
    fn plan(self) -> Option<PlanForm> {
        match self {
            Form::MegatronArgs => Some(PlanForm::MegatronArguments),
            Form::TorchtitanToml => Some(PlanForm::Torchtitan),
            Form::DeepspeedJson => Some(PlanForm::Deepspeed),
            Form::HfTrainer | Form::Trl => Some(PlanForm::HuggingFaceTrainer),
            Form::Accelerate => Some(PlanForm::Accelerate),
            Form::Torchtune => Some(PlanForm::Torchtune),
            Form::NvidiaSmiTopo
            | Form::RocmSmiTopo
            | Form::SlurmNodes
            | Form::NcclXml
            | Form::HfConfig
            | Form::Torch
            | Form::Kineto => None,
        }
    }

    /// Whether the form becomes a topology.
    fn is_topology(self) -> bool {
        matches!(self, Form::NvidiaSmiTopo | Form::NcclXml | Form::RocmSmiTopo | Form::SlurmNodes)
    }
}

impl Arguments {
    /// The one file. A Trainer's file may be accompanied by that of its launch.
    fn file(&self) -> Result<&Path, Failure> {
        match self.files.as_slice() {
            [file] => Ok(file),
            [file, _] if matches!(self.form, Form::HfTrainer | Form::Trl) => Ok(file),
            _ => Err(Failure::input(code::IMPORT_OPTIONS, "this format is read from one file")
                .hint("give one file, or import `kineto`")),
        }
    }

    /// Refuses options that have no effect on this form.
    fn check_options(&self) -> Result<(), Failure> {
        let (is_plan, is_topology) = (self.form.plan().is_some(), self.form.is_topology());
        let is_kineto = self.form == Form::Kineto;
        let options = [
            ("--device", self.device.is_some(), is_topology),
            ("--nic-bandwidth", self.nic_bandwidth.is_some(), is_topology),
            ("--sequence", self.sequence.is_some(), is_plan || matches!(self.form, Form::HfConfig | Form::Torch)),
            ("--as", self.like.is_some(), self.form == Form::HfConfig),
            ("--model", self.model.is_some(), is_plan),
            ("--micro-batch", self.micro_batch.is_some(), is_plan),
            ("--vocab", self.vocab.is_some(), self.form == Form::MegatronArgs),
            ("--topology", self.topology.is_some(), is_plan),
            ("--nodes", self.nodes.is_some(), is_plan),
            ("--plan", self.plan.is_some(), is_kineto),
            ("--run", self.run.is_some(), is_kineto),
            ("--profile", self.profile.is_some(), is_kineto),
        ];
        match options.into_iter().find(|(_, is_given, has_effect)| *is_given && !has_effect) {
            None => Ok(()),
            Some((name, ..)) => {
                let form = self.form.to_possible_value().map_or_else(String::new, |form| form.get_name().to_string());
                Err(Failure::input(code::IMPORT_OPTIONS, format!("`{name}` has no effect on an import of `{form}`"))
                    .hint("leave it out"))
            }
        }
    }
}

/// The document of `import`, which has one of `model`, `topology` and `plan`.
#[derive(Debug, Serialize, JsonSchema)]
pub struct ImportAnswer {
    /// The text of a model file.
    #[serde(skip_serializing_if = "Option::is_none")]
    model: Option<String>,
    /// The text of a topology file.
    #[serde(skip_serializing_if = "Option::is_none")]
    topology: Option<String>,
    /// The text of a plan file.
    #[serde(skip_serializing_if = "Option::is_none")]
    plan: Option<String>,
    /// The file that was written.
    file: Option<PathBuf>,
    /// Settings that were not understood and may change time or memory.
    unread: Vec<String>,
    /// Values that the file leaves open, with their source, a sentence each.
    assumed: Vec<String>,
    /// Settings at their default, switched off, or without effect on a step.
    without_effect: Vec<String>,
}

/// The settings of a file that need attention, beside the plan.
#[derive(Default)]
struct Settings {
    unread: Vec<String>,
    assumed: Vec<String>,
    without_effect: Vec<String>,
}

/// Runs the command.
pub fn run(arguments: &Arguments, json: bool) -> Result<(), Failure> {
    arguments.check_options()?;
    // `serve` does not offer this form.
    #[cfg(not(target_family = "wasm"))]
    if arguments.form == Form::Kineto {
        return kineto::run(arguments, json);
    }
    let file = arguments.file()?;
    let text = inputs::read(file)?;
    let mut settings = Settings::default();
    let (what, imported) = match (arguments.form, arguments.form.plan()) {
        (_, Some(form)) => {
            let (yaml, others) = plan(arguments, &text, form)?;
            settings = others;
            ("plan", yaml)
        }
        (form, _) if form.is_topology() => ("topology", topology(arguments, &text)?),
        (Form::Torch, _) => {
            let named = inputs::torch_trace(&text, file, arguments.sequence)?;
            ("model", inputs::ModelFile::to_yaml(&named.model)?)
        }
        (Form::HfConfig, None) => {
            let named = inputs::hugging_face(&text, file, arguments.sequence, arguments.like.as_deref())?;
            ("model", inputs::ModelFile::to_yaml(&named.model)?)
        }
        (Form::Kineto, None) => {
            return Err(Failure::input(code::OPTION_VALUE, "a page reads no trace of a profiler")
                .hint("use `foretell import kineto` on a command line"));
        }
        (form, None) => unreachable!("invariant: {form:?} is read before"),
    };
    match &arguments.output {
        Some(path) => output::write(path, imported.as_bytes())?,
        None if !json => return output::line(imported.trim_end()),
        None => {}
    }
    match (json, &arguments.output) {
        (true, path) => {
            let text = |kind| Some(imported.clone()).filter(|_| what == kind);
            let (model, topology, plan) = (text("model"), text("topology"), text("plan"));
            let Settings { unread, assumed, without_effect } = settings;
            output::json(&ImportAnswer { model, topology, plan, file: path.clone(), unread, assumed, without_effect })
        }
        (false, Some(path)) => output::line(&format!("the {what} is in {}", path.display())),
        (false, None) => Ok(()),
    }
}

/// The text of a plan file, and the settings that need attention.
fn plan(arguments: &Arguments, text: &str, form: PlanForm) -> Result<(String, Settings), Failure> {
    let path = arguments.file()?;
    foreign::refuse_other_kinds(text, form, path)?;
    let missing = |what: &str| {
        Failure::input(code::OPTION_MISSING, format!("`{}` does not say the {what}", path.display()))
            .hint(format!("add `--{what}`"))
    };
    let name = arguments.topology.as_deref().ok_or_else(|| missing("topology"))?;
    let topology = inputs::topology(name, arguments.nodes)?;
    let folder = path.parent().unwrap_or(Path::new("."));
    let launch_file = arguments.files.get(1).and_then(|path| path.to_str());
    // A file that exists but cannot be read is an error, unlike a missing one.
    let unreadable = std::cell::RefCell::new(None);
    let read_beside = |name: &str| {
        let text = inputs::read_beside(folder, Path::new(name))?;
        text.map_err(|failure| unreadable.replace(Some(failure))).ok()
    };
    let surroundings = Surroundings {
        ranks: topology.device_count(),
        devices_per_node: topology.device_count() / topology.node_count().max(1),
        device: topology.device_kinds().first().map_or("h100-sxm-80g", |kind| kind.name.as_str()),
        precision: usual_precision(&topology),
        micro_batch: arguments.micro_batch,
        sequence: arguments.sequence,
        vocab: arguments.vocab,
        tool: (arguments.form == Form::Trl).then_some("trl"),
        launch_file,
        file: &read_beside,
    };
    let imported = import_plan(text, form, surroundings).map_err(|error| Failure::of_input(error).in_file(path));
    if let Some(failure) = unreadable.take() {
        return Err(failure);
    }
    let imported = imported?;
    if let Some(size) = arguments.micro_batch.filter(|&size| size != imported.plan.layout.micro_batch) {
        let own = imported.plan.layout.micro_batch;
        let message = format!("the file states its micro-batch, {own}, and `--micro-batch` is {size}");
        return Err(Failure::input(code::IMPORT_OPTIONS, message).hint("leave one of them out").in_file(path));
    }
    require_products(&topology, imported.plan.precision).map_err(Failure::of_input)?;
    let mut imported = imported;
    let model = model(arguments, &mut imported, path)?;
    let mut plan = Plan { overlap: usual_overlap(&imported.plan.stack).unwrap_or_default(), ..imported.plan };
    // If the file states no bucket, readers leave Foretell's default, so take the stack's. DDP
    // without shards has that default itself.
    if plan.layout.zero > 0 && !imported.states_bucket {
        plan.layout.bucket = usual_bucket(&plan.stack, plan.layout.bucket);
    }
    let settings = Settings { unread: imported.unread, assumed: imported.assumed, without_effect: imported.without_effect };
    settings.note();
    let mut file = PlanFile::new(model, TopologyReference::Named(name.into()), arguments.nodes, &plan);
    if let Some(folder) = arguments.output.as_ref().and_then(|path| path.parent()).filter(|folder| !folder.as_os_str().is_empty())
    {
        file.relative_to(Path::new("."), folder)?;
    }
    Ok((file.to_yaml()?, settings))
}

impl Settings {
    /// Prints what a user must know. Settings without effect are counted; with `-v` they are
    /// listed.
    fn note(&self) {
        for setting in &self.unread {
            output::note(&format!("not understood, and it may change time or memory: `{setting}`"));
        }
        for sentence in &self.assumed {
            output::note(sentence);
        }
        if !self.without_effect.is_empty() {
            output::note(&format!(
                "settings without effect on a step, or at their default: {} (`-v` lists them)",
                self.without_effect.len()
            ));
        }
        for setting in &self.without_effect {
            tracing::info!("without effect on a step, or at its default: {setting}");
        }
    }
}

/// The plan's model: the one that the file states, or `--model`. Checks that the stack's framework
/// accepts the plan.
fn model(arguments: &Arguments, imported: &mut ImportedPlan, path: &Path) -> Result<ModelReference, Failure> {
    let in_file = |message: String, hint: &str| Failure::input(code::IMPORT_OPTIONS, message).hint(hint).in_file(path);
    let stated = imported.model.clone();
    let on_hub = imported.unknown_model.as_deref().filter(|_| arguments.model.is_none() && stated.is_none());
    let on_hub = on_hub.and_then(|name| Some((name.to_string(), Model::named_on_hub(name)?)));
    let asked = arguments.model.clone().or_else(|| on_hub.as_ref().map(|(_, known)| (*known).into()));
    if let Some((name, known)) = on_hub {
        imported.assumed.push(format!("`model` {known}: the file names `{name}`"));
    }
    let (name, model) = match (&asked, stated) {
        (Some(name), stated) => {
            let NamedModel { model, .. } = inputs::model(name)?;
            let same = |stated: &Model| {
                let (length, _) = stated.sample().tokens()?;
                Some(model.with_sequence(length)? == *stated)
            };
            if stated.as_ref().is_some_and(|stated| same(stated) != Some(true)) {
                return Err(in_file(format!("the file states its model, and it is not `{name}`"), "leave out `--model`"));
            }
            (Some(name.clone()), stated.unwrap_or(model))
        }
        (None, Some(model)) => (None, model),
        (None, None) => {
            return Err(match &imported.unknown_model {
                Some(name) => in_file(
                    format!("the file names the model {name}, which is not known here"),
                    "add `--model` with its `config.json` or a model file",
                ),
                None => Failure::input(code::OPTION_MISSING, format!("`{}` does not say the model", path.display()))
                    .hint("add `--model`"),
            });
        }
    };
    let stated = imported.sequence.filter(|_| imported.model.is_none());
    let own = imported.model.as_ref().and_then(|model| model.sample().tokens()).map(|(length, _)| length).or(stated);
    if let (Some(length), Some(own)) = (arguments.sequence, own)
        && length != own
    {
        output::note(&format!("samples have {length} positions by `--sequence`, and {own} in the file"));
    }
    let model = match arguments.sequence.or(stated) {
        None => model,
        Some(length) => model
            .with_sequence(length)
            .ok_or_else(|| in_file("the model's samples are no sequences".into(), "leave out the sequence's length"))?,
    };
    check_stack(&model, &imported.plan).map_err(|error| Failure::of_input(error).in_file(path))?;
    keep_known_attention(&model, imported);
    // Adapters name layers of the model, so they can only be checked now.
    imported.plan.training.graph(&model, "model", &GraphOptions::ONE).map_err(|error| Failure::of_input(error).in_file(path))?;
    let by_path = name.filter(|name| inputs::model(name).is_ok_and(|named| named.model == model));
    let known = by_path.or_else(|| Model::zoo().find(|(_, known)| *known == model).map(|(name, _)| name.into()));
    Ok(known.map_or(ModelReference::InPlace(model), ModelReference::Named))
}

/// Drops the choice of an attention kernel if the stack has no operators of this job: then its
/// profile has a single kernel, which is as fast as the best.
fn keep_known_attention(model: &Model, imported: &mut ImportedPlan) {
    let plan = &mut imported.plan;
    let tables = inputs::stack(plan.stack.name()).ok().and_then(|stack| stack.tables.as_ref());
    let is_known = tables.is_some_and(|tables| TracedPlan::new(plan, model, tables).is_ok());
    if plan.workload.attention == Some(AttentionKernel::Flash) && !is_known {
        plan.workload.attention = None;
        let stack = plan.stack.name();
        imported
            .assumed
            .push(format!("attention is that of the stack `{stack}`, which has no operators of this job to tell kernels apart"));
    }
}

/// The text of a topology file.
fn topology(arguments: &Arguments, text: &str) -> Result<String, Failure> {
    let path = arguments.file()?;
    let stem = arguments.output.as_deref().unwrap_or(path).file_stem();
    let name = stem.map_or_else(|| "imported".into(), |stem| stem.to_string_lossy().into_owned());
    let options = ImportOptions { name, device: arguments.device.clone(), nic_bandwidth: arguments.nic_bandwidth.clone() };
    let imported = match arguments.form {
        Form::NcclXml => from_nccl_xml(text, &options),
        Form::RocmSmiTopo => from_rocm_topo(text, &options),
        Form::SlurmNodes => from_slurm_nodes(text, &options),
        Form::NvidiaSmiTopo => from_smi_topo(text, &options),
        form => unreachable!("invariant: {form:?} is no topology"),
    };
    imported.map_err(|error| Failure::of_input(error).in_file(path))
}
