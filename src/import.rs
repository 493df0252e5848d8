//! `foretell import`: other tools' files as topology, model and plan files.

pub mod kineto;

use crate::failure::Failure;
use crate::inputs;
use crate::output;
use crate::plan_file::{ModelReference, PlanFile, usual_overlap};
use clap::{Args, ValueEnum};
use foretell_export::{PlanForm, import_plan};
use foretell_program::Plan;
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
  foretell import megatron-args train.sh --topology dgx-h100 --nodes 4 -o plan.yaml
  foretell import kineto rank0.json rank1.json --plan plan.yaml -o profile.yaml --run theirs; foretell check theirs
  foretell import deepspeed-json ds_config.json --model llama3-8b --topology dgx-a100-80g -o plan.yaml")]
pub struct Arguments {
    /// The file's format
    #[arg(value_enum)]
    form: Form,
    /// The file; for `kineto` one for each rank, or for a rank of each stage
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Library name of the GPUs, if the file does not identify them
    #[arg(long, value_name = "KIND")]
    device: Option<String>,
    /// Rate of one NIC, if the file does not state it
    #[arg(long, value_name = "RATE")]
    nic_bandwidth: Option<String>,
    /// Positions of a sample; default for `hf-config`: the most that the file allows
    #[arg(long, value_name = "N")]
    sequence: Option<usize>,
    /// The plan's model, if the file does not describe it: a zoo name or a model file
    #[arg(long)]
    model: Option<String>,
    /// The plan's cluster: a library name or a topology file
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
    /// An ONNX graph
    Onnx,
    /// Arguments of Megatron-LM's `pretrain_gpt.py`, or a script that has them
    MegatronArgs,
    /// torchtitan's TOML file
    TorchtitanToml,
    /// DeepSpeed's configuration
    DeepspeedJson,
    /// The `TrainingArguments` of Hugging Face's Trainer, as JSON
    HfTrainer,
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
            Form::HfTrainer => Some(PlanForm::HuggingFaceTrainer),
            _ => None,
        }
    }
}

impl Arguments {
    /// The one file.
    fn file(&self) -> Result<&Path, Failure> {
        match self.files.as_slice() {
            [file] => Ok(file),
            _ => Err(Failure::Input("this format is read from one file; hint: give one file, or import `kineto`".into())),
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
}

/// Runs the command.
pub fn run(arguments: &Arguments, json: bool) -> Result<(), Failure> {
    if arguments.form == Form::Kineto {
        return kineto::run(arguments, json);
    }
    let file = arguments.file()?;
    let text = if arguments.form == Form::Onnx { String::new() } else { inputs::read(file)? };
    let mut unread = Vec::new();
    let (what, imported) = match (arguments.form, arguments.form.plan()) {
        (_, Some(form)) => {
            let (yaml, ignored) = plan(arguments, &text, form)?;
            unread = ignored;
            ("plan", yaml)
        }
        (Form::NvidiaSmiTopo | Form::NcclXml | Form::RocmSmiTopo | Form::SlurmNodes, _) => {
            ("topology", topology(arguments, &text)?)
        }
        (Form::Onnx, _) => ("model", inputs::ModelFile::to_yaml(&inputs::onnx(file)?.model)?),
        _ => {
            let named = inputs::hugging_face(&text, file, arguments.sequence)?;
            ("model", inputs::ModelFile::to_yaml(&named.model)?)
        }
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
            output::json(&ImportAnswer { model, topology, plan, file: path.clone(), unread })
        }
        (false, Some(path)) => output::line(&format!("the {what} is in {}", path.display())),
        (false, None) => Ok(()),
    }
}

/// The text of a plan file, and the settings that were not understood.
fn plan(arguments: &Arguments, text: &str, form: PlanForm) -> Result<(String, Vec<String>), Failure> {
    let path = arguments.file()?;
    let missing = |what: &str| Failure::Input(format!("`{}` does not say the {what}; hint: add `--{what}`", path.display()));
    let name = arguments.topology.as_deref().ok_or_else(|| missing("topology"))?;
    let topology = inputs::topology(name, arguments.nodes)?;
    let imported = import_plan(text, form, topology.device_count()).map_err(|error| Failure::in_file(path, &error))?;
    let model = match (&arguments.model, imported.model) {
        (Some(name), _) => {
            inputs::model(name)?;
            ModelReference::Named(name.clone())
        }
        (None, Some(model)) => {
            let known = foretell_models::Model::zoo().find(|(_, known)| *known == model);
            known.map_or(ModelReference::InPlace(model), |(name, _)| ModelReference::Named(name.into()))
        }
        (None, None) => return Err(missing("model")),
    };
    for setting in &imported.unread {
        output::note(&format!("not understood, and it may change time or memory: `{setting}`"));
    }
    let plan = Plan { overlap: usual_overlap(&imported.plan.stack).unwrap_or_default(), ..imported.plan };
    let mut file = PlanFile::new(model, TopologyReference::Named(name.into()), arguments.nodes, &plan);
    if let Some(folder) = arguments.output.as_ref().and_then(|path| path.parent()).filter(|folder| !folder.as_os_str().is_empty())
    {
        file.relative_to(std::path::Path::new("."), folder)?;
    }
    Ok((file.to_yaml()?, imported.unread))
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
        _ => from_smi_topo(text, &options),
    };
    imported.map_err(|error| Failure::Input(format!("`{}`: {error}", path.display())))
}
