//! Plans as files of the tools that fine-tune with Hugging Face's Trainer: TRL, Axolotl and
//! LLaMA-Factory. Each file states a Trainer's arguments, some under the tool's names, and what is
//! trained. A job on DeepSpeed also has DeepSpeed's configuration.

mod preferences;

use super::accelerate::{self, method};
use super::nearest::Nearest;
use super::{FrameworkError, Job, JobFiles, deepspeed, hf_stack};
use foretell_program::{AttentionKernel, LossKernel, MomentFormat, Offload, Plan, Recompute};
use foretell_units::DataType;
use serde_json::{Map, Value, json};

/// A tool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tuner {
    Trl,
    Axolotl,
    LlamaFactory,
}

impl Tuner {
    const fn framework(self) -> &'static str {
        match self {
            Self::Trl => "TRL",
            Self::Axolotl => "Axolotl",
            Self::LlamaFactory => "LLaMA-Factory",
        }
    }

    const fn version(self) -> &'static str {
        match self {
            Self::Trl => "trl 1.16.0",
            Self::Axolotl => "axolotl 0.19.0",
            Self::LlamaFactory => "llamafactory 0.9.5",
        }
    }

    const fn file(self) -> &'static str {
        match self {
            Self::Trl => "trl.yaml",
            Self::Axolotl => "axolotl.yaml",
            Self::LlamaFactory => "llama_factory.yaml",
        }
    }

    /// The stack with which the tool's files are read back.
    const fn usual_stack(self) -> &'static str {
        if matches!(self, Self::Trl) { "trl" } else { "hf-trainer" }
    }
}

/// DeepSpeed's configuration, next to the tool's file.
const DEEPSPEED_FILE: &str = "deepspeed.json";

/// The script for ORPO, next to TRL's file.
const ORPO_FILE: &str = "orpo.py";

pub(super) fn export(job: &Job<'_>, tuner: Tuner) -> Result<JobFiles, FrameworkError> {
    let is_zero = hf_stack::DEEPSPEED[..2].contains(&job.plan.stack.name())
        || matches!(job.plan.layout.offload, Offload::Optimizer | Offload::Both);
    let (mut plan, method) = method::taken_out(job.plan);
    let preference = plan.workload.preference.take();
    let precomputed_reference = std::mem::take(&mut plan.workload.precomputed_reference);
    let mut nearest = Nearest::new(&plan, tuner.framework(), hf_stack::FSDP2)?;
    if is_zero {
        restrict_zero(&mut nearest)?;
    } else {
        accelerate::restrict(&mut nearest)?;
    }
    method::put_back(method, &mut nearest);
    restrict_method(&mut nearest, tuner, is_zero);
    nearest.plan.workload.preference = preference;
    nearest.plan.workload.precomputed_reference = precomputed_reference;
    if let Some(preference) = preference {
        preferences::restrict(preference, &mut nearest, tuner, is_zero)?;
    }
    nearest.state_fine_tuning_rate(job.plan.training.learning_rate);
    let layout = &nearest.plan.layout;
    let (accepted, read_back) = match is_zero {
        true => (&hf_stack::DEEPSPEED[..1], hf_stack::of_deepspeed(layout, "hf-deepspeed")),
        false => (&hf_stack::PYTORCH[..], hf_stack::of_pytorch(layout, tuner.usual_stack())),
    };
    nearest.plan.stack = hf_stack::kept(&job.plan.stack, accepted, read_back);
    let Nearest { plan, differences, .. } = nearest;
    let sequence = job.model.sample().tokens().map(|(length, _)| length);
    let settings = settings(&plan, tuner, sequence, is_zero)?;
    let comment = preference.map(|preference| preferences::comment(&plan, preference)).unwrap_or_default();
    let mut files = vec![(tuner.file().into(), text(tuner, &comment, &settings))];
    if is_zero {
        files.push((DEEPSPEED_FILE.into(), deepspeed::configuration_text(&plan)?));
    }
    if tuner == Tuner::Trl && preferences::trl_script(preference).is_none() {
        files.push((ORPO_FILE.into(), preferences::ORPO_SCRIPT.into()));
    }
    files.push(("run.sh".into(), script(job, tuner)?));
    Ok(JobFiles { version: tuner.version(), files, command: command(tuner).into(), plan, differences })
}

/// Replaces settings that DeepSpeed's configuration under a Trainer lacks. The Trainer itself
/// recomputes.
fn restrict_zero(nearest: &mut Nearest) -> Result<(), FrameworkError> {
    nearest.coarse_recompute(&[Recompute::None, Recompute::Full]);
    let recompute = std::mem::replace(&mut nearest.plan.layout.recompute, Recompute::None);
    deepspeed::restrict(nearest)?;
    nearest.plan.layout.recompute = recompute;
    Ok(())
}

/// Replaces settings that a tool lacks.
fn restrict_method(nearest: &mut Nearest, tuner: Tuner, is_zero: bool) {
    let has_adapters = nearest.plan.training.lora.is_some();
    if is_zero {
        nearest.replace(
            |plan| &mut plan.workload.moments,
            MomentFormat::Single,
            "the optimizer's moments are in single precision, as DeepSpeed's own optimizer has them",
        );
        nearest.replace(
            |plan| &mut plan.workload.no_master_copy,
            false,
            "DeepSpeed keeps parameters in single precision beside others",
        );
        // Moments in single precision have no pages.
        nearest.plan.workload.paged_moments = false;
    }
    let is_narrow = nearest.plan.precision == DataType::Bf16;
    if tuner == Tuner::Axolotl {
        let is_wide = !is_narrow || has_adapters || is_zero || nearest.plan.layout.zero > 0;
        let reason = if is_wide {
            "parameters that are trained are kept in single precision"
        } else {
            "Axolotl loads parameters in bf16, and trains them so"
        };
        nearest.replace(|plan| &mut plan.workload.no_master_copy, !is_wide, reason);
    } else if !is_narrow {
        nearest.replace(|plan| &mut plan.workload.no_master_copy, false, "parameters in bf16 come with `precision: bf16` alone");
    }
    if tuner == Tuner::LlamaFactory {
        let loss = if nearest.plan.workload.loss == LossKernel::Chunked { LossKernel::Plain } else { nearest.plan.workload.loss };
        nearest.replace(|plan| &mut plan.workload.loss, loss, "LLaMA-Factory has no loss in chunks of the vocabulary");
    }
}

/// The settings of a plan, by the tool's names.
fn settings(plan: &Plan, tuner: Tuner, sequence: Option<usize>, is_zero: bool) -> Result<Map<String, Value>, FrameworkError> {
    let Value::Object(mut settings) = accelerate::training_arguments(plan)? else {
        unreachable!("invariant: arguments are an object")
    };
    let recomputes = plan.layout.recompute == Recompute::Full;
    settings.remove("activation_checkpointing");
    if is_zero {
        settings.remove("fsdp");
        settings.remove("fsdp_config");
        settings.insert("deepspeed".into(), json!(DEEPSPEED_FILE));
    }
    // FSDP's recomputation replaces the Trainer's.
    let by_trainer = recomputes && !settings.contains_key("fsdp");
    if let Some(sequence) = sequence {
        settings.insert("max_length".into(), json!(sequence));
    }
    match tuner {
        Tuner::Trl => _ = settings.insert("gradient_checkpointing".into(), json!(by_trainer)),
        Tuner::Axolotl => of_axolotl(plan, &mut settings, by_trainer),
        Tuner::LlamaFactory => of_llama_factory(plan, &mut settings, by_trainer),
    }
    if let Some(preference) = plan.workload.preference {
        preferences::state(plan, preference, tuner, &mut settings);
    }
    Ok(settings)
}

fn rename(settings: &mut Map<String, Value>, names: &[(&str, &str)]) {
    for (general, own) in names {
        if let Some(value) = settings.remove(*general) {
            settings.insert((*own).into(), value);
        }
    }
}

fn of_axolotl(plan: &Plan, settings: &mut Map<String, Value>, recomputes: bool) {
    rename(
        settings,
        &[("per_device_train_batch_size", "micro_batch_size"), ("optim", "optimizer"), ("max_length", "sequence_len")],
    );
    settings.remove("dtype");
    settings.insert("gradient_checkpointing".into(), json!(recomputes));
    if settings.remove("fsdp").is_some() {
        settings.insert("fsdp_version".into(), json!(2));
        let wraps = ("auto_wrap_policy", json!("TRANSFORMER_BASED_WRAP"));
        if let Some(config) = settings.get_mut("fsdp_config").and_then(Value::as_object_mut) {
            config.remove("version");
            config.insert(wraps.0.into(), wraps.1);
        }
    }
    if settings.remove("use_peft").is_some() {
        let adapter = if plan.workload.base_bits == Some(4) { "qlora" } else { "lora" };
        settings.insert("adapter".into(), json!(adapter));
        if settings.get("lora_target_modules").is_some_and(|names| names == "all-linear") {
            settings.remove("lora_target_modules");
            settings.insert("lora_target_linear".into(), json!(true));
        }
    }
    let mut plug = |plugin: &str, switch: &str| {
        settings.insert("plugins".into(), json!([plugin]));
        settings.insert(switch.into(), json!(true));
    };
    match plan.workload.loss {
        LossKernel::Plain => {}
        LossKernel::Chunked => plug("axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin", "cut_cross_entropy"),
        LossKernel::Liger => plug("axolotl.integrations.liger.LigerPlugin", "liger_fused_linear_cross_entropy"),
    }
    // Axolotl's plugins choose its losses.
    for name in ["loss_type", "use_liger_kernel"] {
        settings.remove(name);
    }
}

fn of_llama_factory(plan: &Plan, settings: &mut Map<String, Value>, recomputes: bool) {
    rename(
        settings,
        &[
            ("max_length", "cutoff_len"),
            ("lora_r", "lora_rank"),
            ("use_liger_kernel", "enable_liger_kernel"),
            ("lora_target_modules", "lora_target"),
            ("lora_modules_to_save", "additional_target"),
        ],
    );
    settings.insert("stage".into(), json!("sft"));
    settings.insert("do_train".into(), json!(true));
    let method = if settings.remove("use_peft").is_some() { "lora" } else { "full" };
    settings.insert("finetuning_type".into(), json!(method));
    settings.insert("disable_gradient_checkpointing".into(), json!(!recomputes));
    for (setting, bits) in [("load_in_4bit", 4), ("load_in_8bit", 8)] {
        if settings.remove(setting).is_some() {
            settings.insert("quantization_bit".into(), json!(bits));
        }
    }
    if settings.remove("dtype").is_some() {
        settings.insert("pure_bf16".into(), json!(true));
        settings.insert("bf16".into(), json!(false));
    }
    settings.remove("attn_implementation");
    match plan.workload.attention {
        None | Some(AttentionKernel::Sdpa) => {}
        Some(AttentionKernel::Flash) => _ = settings.insert("flash_attn".into(), json!("fa2")),
        Some(AttentionKernel::Eager) => _ = settings.insert("flash_attn".into(), json!("disabled")),
    }
    for name in ["lora_target", "additional_target"] {
        let Some(value) = settings.get_mut(name) else { continue };
        let listed = value.as_array().map(|names| names.iter().filter_map(Value::as_str).collect::<Vec<_>>().join(","));
        match listed {
            Some(names) => *value = json!(names),
            None if *value == "all-linear" => *value = json!("all"),
            None => {}
        }
    }
}

/// A value in YAML. Numbers have no exponent: PyYAML reads `5e-05` as text.
fn yaml(value: &Value) -> String {
    match value {
        Value::Number(number) if number.is_f64() => {
            number.as_f64().map_or_else(|| number.to_string(), |number| number.to_string())
        }
        Value::String(word) if word.chars().all(|letter| letter.is_ascii_alphanumeric() || "_-./".contains(letter)) => {
            word.clone()
        }
        Value::Array(list) => format!("[{}]", list.iter().map(yaml).collect::<Vec<_>>().join(", ")),
        other => other.to_string(),
    }
}

/// The text of a tool's file, with a comment on its job.
fn text(tuner: Tuner, comment: &str, settings: &Map<String, Value>) -> String {
    let mut text = format!("# {}\n{comment}", tuner.version());
    for (name, value) in settings {
        match value {
            Value::Object(section) => {
                text.push_str(&format!("{name}:\n"));
                for (inner, value) in section {
                    text.push_str(&format!("  {inner}: {}\n", yaml(value)));
                }
            }
            value => text.push_str(&format!("{name}: {}\n", yaml(value))),
        }
    }
    text
}

const fn command(tuner: Tuner) -> &'static str {
    match tuner {
        Tuner::Trl => "bash run.sh MODEL DATASET",
        Tuner::Axolotl => "bash run.sh MODEL",
        Tuner::LlamaFactory => "bash run.sh MODEL DATASET TEMPLATE",
    }
}

fn script(job: &Job<'_>, tuner: Tuner) -> Result<String, FrameworkError> {
    let [nodes, per_node] = job.nodes()?;
    let head = format!(
        "#!/bin/bash\n# {}, for {} on {nodes} nodes of {per_node} GPUs. Run it on each node with NODE_RANK and MASTER_ADDR set.\n",
        tuner.version(),
        job.name
    );
    let here = "set -e\nhere=$(dirname \"$(readlink -f \"$0\")\")\ncd \"$here\"\n";
    let launch = format!(
        "--nnodes {nodes} --nproc_per_node {per_node} --node_rank \"${{NODE_RANK:-0}}\" \\\n  \
         --master_addr \"${{MASTER_ADDR:-localhost}}\" --master_port \"${{MASTER_PORT:-29500}}\""
    );
    let run = match tuner {
        Tuner::Trl => {
            let script = preferences::trl_script(job.plan.workload.preference);
            let module = script.map_or_else(|| ORPO_FILE.into(), |name| format!("-m trl.scripts.{name}"));
            let meant = script.map_or_else(|| ORPO_FILE.into(), |name| format!("trl {name}"));
            format!(
                "# The arguments are the model and the data set, and further ones of `{meant}`.\n{here}\
                 torchrun {launch} \\\n  {module} --config trl.yaml --model_name_or_path \"$1\" --dataset_name \"$2\" \"${{@:3}}\"\n"
            )
        }
        Tuner::Axolotl => format!(
            "# The argument is the model. Write your `datasets` into axolotl.yaml first.\n{here}\
             axolotl train axolotl.yaml --base-model \"$1\" --launcher torchrun -- {launch}\n"
        ),
        Tuner::LlamaFactory => format!(
            "# The arguments are the model, the data set and its template.\n{here}\
             export FORCE_TORCHRUN=1 NNODES={nodes} NPROC_PER_NODE={per_node} NODE_RANK=\"${{NODE_RANK:-0}}\"\n\
             export MASTER_ADDR=\"${{MASTER_ADDR:-localhost}}\" MASTER_PORT=\"${{MASTER_PORT:-29500}}\"\n\
             llamafactory-cli train llama_factory.yaml model_name_or_path=\"$1\" dataset=\"$2\" template=\"$3\" \"${{@:4}}\"\n"
        ),
    };
    Ok(head + &run)
}
