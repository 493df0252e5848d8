//! The `TrainingArguments` of Hugging Face's Trainer, as JSON, YAML or the flags of a script that
//! is launched; and the files of tools that extend them: TRL, LLaMA-Factory, Axolotl, ms-swift,
//! OpenRLHF.

mod accelerate_launch;
mod formats;
mod intern_vl;
mod kernels;
mod launch;
mod method;
mod names;
mod open_rlhf;
mod preferences;
mod published;
mod script;
mod scripts;
mod swift;

use super::deepspeed::{Trainer, read_config as read_deepspeed};
use super::degrees;
use super::fsdp;
use super::hf_stack::{self, VersionSource};
use super::stated::{Stated, object_of};
use super::{FrameworkError, ImportedPlan, Surroundings};
use accelerate_launch::AccelerateLaunch;
use foretell_program::{ContextMethod, Layout, Offload, Plan, Recompute, Stack};
use foretell_units::Bytes;
use formats::Loaded;
use launch::Launched;
use names::{NEUTRAL, REFUSED, RENAMED, SWITCHES};
use serde_json::{Value, json};

/// The tool that a file is for. The tools' defaults differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Tool {
    Trainer,
    Trl,
    Axolotl,
    LlamaFactory,
    /// A command of ms-swift.
    Swift,
    OpenRlhf(open_rlhf::Job),
}

impl Tool {
    /// The tool, by settings that only it has. Scripts of other authors have flags with TRL's names
    /// and other defaults.
    fn of(stated: &Stated, script: Option<&str>, named: Option<&str>) -> Self {
        let has = |names: &[&str]| names.iter().any(|name| stated.has(name));
        let script = script.map(|path| path.rsplit('/').next().unwrap_or(path));
        let is_by_peft = has(&["use_peft"]) && script.is_none_or(|name| !name.contains("lora"));
        let is_of_trl = script.is_none_or(|name| TRL_SCRIPTS.iter().any(|start| name.starts_with(start)));
        // Scripts of other authors have flags of the same names (alpaca-lora's `--base_model`).
        let is_factory = script.is_none_or(|name| name.starts_with("llamafactory") || has(&["stage", "template"]));
        if script.is_none() && has(&["base_model", "micro_batch_size", "sequence_len", "adapter"]) {
            Self::Axolotl
        } else if is_factory && has(&["finetuning_type", "stage", "cutoff_len", "template"]) {
            Self::LlamaFactory
        } else if named == Some("trl") || is_by_peft || (is_of_trl && has(&OF_TRL) && !has(&OF_OTHERS)) {
            Self::Trl
        } else {
            Self::Trainer
        }
    }

    const fn name(self) -> &'static str {
        match self {
            Self::Trainer => "peft",
            Self::Trl => "TRL",
            Self::Axolotl => "Axolotl",
            Self::LlamaFactory => "LLaMA-Factory",
            Self::Swift => "ms-swift",
            Self::OpenRlhf(_) => "OpenRLHF",
        }
    }
}

/// Settings that TRL adds to the Trainer's.
const OF_TRL: [&str; 9] = [
    "lora_r",
    "max_seq_length",
    "max_length",
    "packing",
    "dataset_text_field",
    "assistant_only_loss",
    "completion_only_loss",
    "dataset_num_proc",
    "dataset_mixer",
];

/// Settings of scripts by other authors (Firefly, open-instruct) that also have some of those
/// names.
const OF_OTHERS: [&str; 3] = ["lora_rank", "train_mode", "with_tracking"];

/// Settings of LLaVA's scripts, which assemble a model from parts.
const SEES: [&str; 4] = ["vision_tower", "pretrain_mm_mlp_adapter", "mm_vision_tower_lr", "mm_projector_type"];

/// Beginnings of the names of TRL's scripts, and of scripts modelled on them.
const TRL_SCRIPTS: [&str; 7] = ["sft", "run_sft", "dpo", "run_dpo", "reward", "orpo", "kto"];

/// Settings of the Trainer. Every file has at least one of them.
const KNOWN: [&str; 8] =
    ["per_device_train_batch_size", "num_train_epochs", "output_dir", "bf16", "fp16", "learning_rate", "optim", "fsdp"];

pub(super) fn import(text: &str, surroundings: &Surroundings<'_>) -> Result<ImportedPlan, FrameworkError> {
    let script::Given { mut stated, launch, script } = script::read(text, surroundings)?;
    let tool = match (script.as_deref().map(open_rlhf::job).transpose()?.flatten(), script.as_deref().and_then(swift::job)) {
        (Some(job), _) => {
            open_rlhf::translate(&mut stated, job, surroundings)?;
            Tool::OpenRlhf(job)
        }
        (None, Some(job)) => {
            swift::translate(&mut stated, job, surroundings)?;
            Tool::Swift
        }
        (None, None) => Tool::of(&stated, script.as_deref(), surroundings.tool),
    };
    // In ms-swift, `model_name` is what the model calls itself.
    if stated.has("model") {
        stated.drop("model_name");
    }
    // Names for the model in scripts of other authors. They are ignored if one of the usual names
    // is there.
    for name in ["model_id", "pretrain", "config_name"] {
        let is_name = |value: &str| !["true", "false"].contains(&value.to_ascii_lowercase().as_str());
        let is_named = stated.peek(name).and_then(Value::as_str).is_some_and(is_name);
        if is_named
            && !stated.has("model")
            && ["model_name_or_path", "base_model", "model_name"].iter().all(|own| !stated.has(own))
        {
            stated.rename(name, "model_name_or_path")?;
        }
    }
    scripts::translate(&mut stated, script.as_deref(), tool, surroundings)?;
    for (older, newer) in RENAMED {
        stated.rename(older, newer)?;
    }
    if !stated.has_section("model") {
        stated.rename("model", "model_name_or_path")?;
    }
    intern_vl::read(&mut stated)?;
    if !KNOWN.iter().any(|name| stated.has(name)) {
        return Err(FrameworkError::Form {
            reason: "no argument of a Trainer is in it".into(),
            hint: "give TrainingArguments as JSON (`training_args.to_json_string()`) or YAML, or the script that launches them"
                .into(),
        });
    }
    let (preference, precomputed_reference) = preferences::read(&mut stated, tool, script.as_deref())?;
    stated.refuse_with(
        &SEES,
        "the script puts a tower that sees images before a language model",
        "plan the whole model: `foretell import hf-config` with its `config.json` makes a model file for `--model`; then leave these flags \
         out",
    )?;
    stated.refuse(&REFUSED, "no plan expresses it, and it decides model, layout, optimizer or memory")?;
    stated.refuse_variables(&SWITCHES)?;
    stated.neutral(&NEUTRAL);
    stated.usual("load_in_kbits", &json!("16"));
    stated.usual("load_in_kbits", &json!(16));
    if stated.is_on("auto_find_batch_size")? {
        stated.assume("`auto_find_batch_size`: the stated batch is planned, which the Trainer halves where memory runs out");
    }
    let sequence = read_sequence(&mut stated, tool, surroundings)?;
    note_packing(&mut stated)?;
    let unknown_model = stated.name("model_name_or_path")?;
    if stated.is_on("torch_compile")? {
        stated.neutral(&["torch_compile_*"]);
        stated.assume(
            "`torch_compile`: kernels are those of the stack, whose operators are eager; `stack: hf-trainer-compiled` has compiled \
             ones of Llama's layers",
        );
    }
    let beside =
        || surroundings.launch_file.map(|file| AccelerateLaunch { file: Some(file.into()), ..AccelerateLaunch::default() });
    let launch = launch.or_else(beside);
    let is_recipe = script.is_none() && matches!(tool, Tool::Trl | Tool::LlamaFactory);
    let says_shards = ["deepspeed", "fsdp", "fsdp_config"].iter().any(|name| stated.has(name));
    if is_recipe && launch.is_none() && !says_shards && surroundings.ranks > 1 {
        stated.assume(
            "the launch is taken to shard nothing: where `accelerate launch --config_file` starts the job, give that file as a second one",
        );
    }
    let launched = launch.map(|launch| launch::follow(&launch, &mut stated, surroundings)).transpose()?;
    let (mut plan, loaded, version) = read_plan(&mut stated, tool, surroundings)?;
    plan.workload.preference = preference;
    plan.workload.precomputed_reference = precomputed_reference;
    let mut has_deepspeed = stated.has("deepspeed");
    let usual = if tool == Tool::Trl { "trl" } else { "hf-trainer" };
    let mut is_followed = false;
    if has_deepspeed {
        is_followed = follow_deepspeed(&mut stated, surroundings, &mut plan)?;
    }
    let version_source = launched.as_ref().map_or(VersionSource::File, Launched::version_source);
    if let Some(launched) = launched {
        is_followed |= launch::put(launched, &mut stated, &mut plan, version)?;
        has_deepspeed |= is_followed;
    }
    method::read(&mut stated, tool, &mut plan)?;
    plan.workload.adapter_dropout &= preferences::keeps_dropout(&mut stated, tool, preference)?;
    method::read_frozen(&mut stated, tool, &mut plan)?;
    kernels::read(&mut stated, &mut plan)?;
    // A wider copy exists under DeepSpeed, which keeps one in single precision; under FSDP, which
    // widens what is not computed in pure bf16; and for adapters, which peft keeps wide.
    // LLaMA-Factory's `pure_bf16` leaves adapters in bf16.
    let has_wide_adapters = plan.training.lora.is_some() && !(tool == Tool::LlamaFactory && stated.is_on("pure_bf16")?);
    let is_wide = has_deepspeed || has_wide_adapters || (loaded == Loaded::Narrow && plan.layout.zero > 0);
    plan.workload.no_master_copy = loaded != Loaded::Single && !is_wide;
    if plan.workload.no_master_copy && tool == Tool::Axolotl && !stated.has("dtype") {
        stated.assume("`workload.no_master_copy`: Axolotl loads parameters in bf16, and trains them so");
    }
    // Accelerate's own setting; scripts that shard sequences themselves have other names.
    let is_by_accelerate =
        plan.layout.context_method == ContextMethod::AllToAll && stated.own_name("sp_size").ends_with("sp_size");
    if is_by_accelerate && !is_followed {
        return Err(FrameworkError::Form {
            reason: format!("{}: Accelerate shards sequences by heads with DeepSpeed alone", stated.written("sp_size")),
            hint: "name DeepSpeed's configuration (`deepspeed`), or write `cp_size` in place of `sp_size`".into(),
        });
    }
    if is_followed {
        let stack = hf_stack::of_deepspeed(&plan.layout, "hf-deepspeed");
        hf_stack::choose(&mut stated, &mut plan, stack, "hf-deepspeed");
    } else {
        let stack = hf_stack::of_imported(&plan, usual);
        hf_stack::choose_of_pytorch(&mut stated, &mut plan, stack, usual, version_source);
    }
    Ok(ImportedPlan { sequence, unknown_model, ..ImportedPlan::new(plan, stated.finish()?) })
}

/// Positions of a sample. Tools have defaults; a model's own number of positions is not one.
fn read_sequence(stated: &mut Stated, tool: Tool, surroundings: &Surroundings<'_>) -> Result<Option<usize>, FrameworkError> {
    if let Some(sequence) = stated.size("max_length")? {
        return Ok(Some(sequence));
    }
    let usual = match tool {
        Tool::Trainer | Tool::Swift | Tool::OpenRlhf(_) => {
            if surroundings.sequence.is_none() {
                stated.assume("the positions of a sample are the model's own: the file states none (`--sequence`)");
            }
            None
        }
        Tool::Trl => Some((1024, "TRL's default of `max_length`")),
        Tool::Axolotl => Some((512, "Axolotl's default of `sequence_len`")),
        Tool::LlamaFactory => Some((2048, "LLaMA-Factory's default of `cutoff_len`")),
    };
    Ok(usual.filter(|_| surroundings.sequence.is_none()).map(|(positions, what)| {
        stated.assume(format!("{positions} positions of a sample: {what}"));
        positions
    }))
}

/// Notes that samples are packed.
fn note_packing(stated: &mut Stated) -> Result<(), FrameworkError> {
    for name in ["packing", "sample_packing"] {
        if stated.is_on(name)? {
            stated.assume_packed(name);
        }
    }
    stated.neutral(&["packing*", "sample_packing*", "pad_to_sequence_len", "padding_free"]);
    Ok(())
}

/// Reads everything except DeepSpeed's configuration, the method and the kernels. Also returns
/// FSDP's version if one is stated.
fn read_plan(
    stated: &mut Stated,
    tool: Tool,
    surroundings: &Surroundings<'_>,
) -> Result<(Plan, Loaded, Option<usize>), FrameworkError> {
    let micro_batch = match stated.size("per_device_train_batch_size")?.or(surroundings.micro_batch) {
        Some(size) => size,
        None => {
            stated.assume("`micro_batch` 8: the Trainer's default of `per_device_train_batch_size`");
            8
        }
    };
    let accumulation = stated.size("gradient_accumulation_steps")?.unwrap_or(1);
    let mut layout = Layout { micro_batch, ..Layout::default() };
    let mut section = stated.section("parallelism_config");
    let shards = if section.is_empty() {
        degrees::read(stated, degrees::Names::Axolotl, surroundings, &mut layout)?
    } else {
        let shards = degrees::read(&mut section, degrees::Names::Accelerate, surroundings, &mut layout)?;
        stated.absorb(section.finish()?);
        shards
    };
    if recomputes(stated, tool, &mut layout)? {
        layout.recompute = Recompute::Full;
    }
    if let Some(megabytes) = stated.size("ddp_bucket_cap_mb")? {
        stated.state_bucket();
        layout.bucket = Bytes::new((megabytes as u64).saturating_mul(1 << 20));
    }
    let version = fsdp::read_trainer(stated, surroundings, &mut layout)?;
    degrees::apply(shards, &mut layout);
    stated.usual("fsdp_min_num_params", &json!(0));
    stated.neutral(&["fsdp_transformer_layer_cls_to_wrap", "fsdp_final_state_dict_type"]);
    let global = micro_batch.saturating_mul(accumulation).saturating_mul(layout.data);
    let mut plan = Plan::new(layout, global);
    if version == Some(1) {
        plan.stack = Stack::new(hf_stack::FSDP1[0]);
    }
    let (precision, loaded) = formats::read_precision(stated, tool, surroundings)?;
    plan.precision = precision;
    formats::read_optimizer(stated, tool, &mut plan)?;
    Ok((plan, loaded, version))
}

/// Whether blocks are recomputed. Also reads the offload of their activations into the layout.
fn recomputes(stated: &mut Stated, tool: Tool, layout: &mut Layout) -> Result<bool, FrameworkError> {
    let is_usual = match tool {
        Tool::LlamaFactory => !stated.is_on("disable_gradient_checkpointing")?,
        Tool::Trl | Tool::Swift => true,
        Tool::Trainer | Tool::Axolotl | Tool::OpenRlhf(_) => false,
    };
    let is_disabled = tool == Tool::LlamaFactory && !is_usual;
    if is_usual && !stated.has("activation_checkpointing") && !stated.has("fsdp_config.activation_checkpointing") {
        let what = match tool {
            Tool::Trl => "TRL recomputes since 0.20 (`gradient_checkpointing`)",
            Tool::Swift => "ms-swift recomputes unless `gradient_checkpointing` is off",
            Tool::LlamaFactory => "LLaMA-Factory recomputes unless `disable_gradient_checkpointing` is on",
            Tool::Trainer | Tool::Axolotl | Tool::OpenRlhf(_) => unreachable!("invariant: it does not usually recompute"),
        };
        stated.assume(format!("`recompute` full: {what}"));
        stated.provide("activation_checkpointing", Value::Bool(true));
    }
    if is_disabled {
        stated.provide("activation_checkpointing", Value::Bool(false));
    }
    // Axolotl's switch also takes two words.
    let is_offloaded =
        matches!(stated.take("activation_checkpointing"), Some(Value::String(word)) if word.starts_with("offload"));
    let recomputes = is_offloaded || stated.is_on("activation_checkpointing")?;
    // Axolotl's words for where activations are offloaded, and which.
    let is_offloaded = is_offloaded
        || match stated.peek("activation_offloading").and_then(Value::as_str) {
            Some("legacy" | "hidden_states") => stated.take("activation_offloading").is_some(),
            Some("disk") => {
                return Err(stated.unknown("activation_offloading", "places: the host (`true`, `legacy`, `hidden_states`)"));
            }
            _ => false,
        };
    if is_offloaded || stated.is_on("activation_offloading")? {
        layout.offload = Offload::Activations;
    }
    Ok(recomputes)
}

/// Reads DeepSpeed's configuration, in place or in a file that the arguments name. Returns whether
/// there is one.
fn follow_deepspeed(stated: &mut Stated, surroundings: &Surroundings<'_>, plan: &mut Plan) -> Result<bool, FrameworkError> {
    let inline = stated.peek("deepspeed").and_then(Value::as_str).filter(|text| text.trim_start().starts_with('{'));
    if let Some(text) = inline.map(str::to_owned) {
        let object = object_of(&text, "DeepSpeed's configuration as JSON, or the name of its file")?;
        stated.replace_by_section("deepspeed", Value::Object(object));
    }
    let is_section = stated.has_section("deepspeed");
    let mut section = match if is_section { None } else { stated.text("deepspeed")? } {
        None => stated.section("deepspeed"),
        Some(path) => match (surroundings.file)(&path) {
            Some(text) => Stated::parse(&text, "DeepSpeed's JSON configuration")?,
            None => {
                if let Some((configuration, sentence)) = published::of_path(&path) {
                    stated.assume(sentence);
                    stated.replace_by_section("deepspeed", configuration);
                    return follow_deepspeed(stated, surroundings, plan);
                }
                // A name that states its stage is accepted even though the file is missing: the
                // note says what the plan lacks.
                if !names_stage(&path) {
                    return Err(FrameworkError::Form {
                        reason: format!(
                            "`deepspeed: {path}`: there is no such file beside this one, and it says what DeepSpeed shards"
                        ),
                        hint: "put it there, or give its contents in its place".into(),
                    });
                }
                stated.assume(format!(
                    "`deepspeed: {path}` is not followed, as there is no such file beside this one: the plan lacks its ZeRO stage and \
                     offload, and is another job if that file has them; put it there and import again"
                ));
                return Ok(false);
            }
        },
    };
    if plan.layout.zero > 0 {
        return Err(FrameworkError::Form {
            reason: "`deepspeed` beside `fsdp`".into(),
            hint: "keep one of them, as the Trainer demands".into(),
        });
    }
    let layout = &plan.layout;
    if layout.tensor > 1 || (layout.context > 1 && layout.context_method == ContextMethod::Gather) {
        return Err(FrameworkError::Form {
            reason: "`deepspeed` beside axes over which DeepSpeed shards nothing".into(),
            hint:
                "of these axes, keep `sp_size` alone; `tensor_parallel.autotp_size` in DeepSpeed's configuration shards operators"
                    .into(),
        });
    }
    let steps = plan.global_batch / layout.micro_batch.saturating_mul(layout.data).max(1);
    let trainer = Trainer {
        micro_batch: (layout.micro_batch, "the Trainer's"),
        accumulation: steps,
        precision: (plan.precision, "the Trainer's"),
        optimizer: plan.optimizer,
        training: plan.training.clone(),
        context: (layout.context, layout.context_method),
        is_stated: true,
    };
    let is_on = |value: Option<&Value>| {
        value.is_some_and(|value| *value == true || value.as_str().is_some_and(|text| text.eq_ignore_ascii_case("true")))
    };
    for (own, other) in [("bf16", "fp16"), ("fp16", "bf16")] {
        if is_on(stated.peek(own)) && section.peek(&format!("{other}.enabled")) == Some(&Value::Bool(true)) {
            return Err(FrameworkError::Form {
                reason: format!("{} beside `{other}.enabled: true` in DeepSpeed's configuration", stated.written(own)),
                hint: "write \"auto\" there, as the Trainer demands equal values".into(),
            });
        }
    }
    // A configuration without batch or precision gets the Trainer's.
    let has_precision = ["bf16.enabled", "fp16.enabled", "bfloat16.enabled"].iter().any(|name| section.has(name));
    let recompute = layout.recompute.clone();
    let workload = plan.workload.clone();
    let mut followed = read_deepspeed(&mut section, surroundings, &trainer)?;
    if !has_precision {
        followed.precision = plan.precision;
    }
    if followed.global_batch != plan.global_batch || followed.layout.micro_batch != plan.layout.micro_batch {
        return Err(FrameworkError::Form {
            reason: format!(
                "the arguments say {} samples of a micro-batch and {} of a step, and DeepSpeed's configuration {} and {}",
                plan.layout.micro_batch, plan.global_batch, followed.layout.micro_batch, followed.global_batch
            ),
            hint: "write \"auto\" in DeepSpeed's configuration, as the Trainer demands equal values".into(),
        });
    }
    if plan.layout.offload == Offload::Activations {
        let is_both = followed.layout.offload == Offload::Optimizer;
        followed.layout.offload = if is_both { Offload::Both } else { Offload::Activations };
    }
    followed.layout.recompute = recompute;
    followed.workload = workload;
    *plan = followed;
    stated.absorb(section.finish()?);
    Ok(true)
}

/// Whether a file's name states a stage of ZeRO, as `zero3.json`, `ds_z2_config.json` and
/// `stage_1.json` do.
fn names_stage(path: &str) -> bool {
    let name = path.rsplit('/').next().unwrap_or(path).to_ascii_lowercase();
    let is_stage = |rest: &str| rest.trim_start_matches(['_', '-']).starts_with(|letter: char| letter.is_ascii_digit());
    ["zero", "stage", "z"].iter().any(|word| name.split(word).skip(1).any(is_stage))
}
