//! DeepSpeed's configuration. It has batches, ZeRO, precision and the optimizer; the model is the
//! training script's, and so is what it recomputes.

use super::json_object::{JsonObject, decimal};
use super::nearest::{Nearest, bucket_elements, bucket_of, usual_training};
use super::{FrameworkError, ImportedPlan, Job, JobFiles};
use foretell_program::{Layout, Offload, Optimizer, Plan, Recompute, Stack, Training};
use foretell_units::DataType;
use serde_json::{Map, Value, json};

const VERSION: &str = "deepspeed 0.19.8";

/// ZeRO without Megatron behaves as FSDP does in our profiles.
const STACK: &str = "fsdp2";

const FRAMEWORK: &str = "DeepSpeed";

pub(super) fn export(job: &Job<'_>) -> Result<JobFiles, FrameworkError> {
    let mut nearest = Nearest::new(job.plan, FRAMEWORK, STACK)?;
    restrict(&mut nearest)?;
    let plan = nearest.plan;
    let text = serde_json::to_string_pretty(&configuration(&plan)?).unwrap_or_default();
    let [nodes, per_node] = job.nodes()?;
    let run = format!(
        "#!/bin/bash\n# {VERSION}, for {} on {nodes} nodes of {per_node} GPUs. The first argument is your training script, which calls\n\
         # deepspeed.initialize; a hostfile names the nodes.\nset -e\n\
         here=$(dirname \"$(readlink -f \"$0\")\")\n\
         deepspeed --num_nodes {nodes} --num_gpus {per_node} \"$1\" --deepspeed --deepspeed_config \"$here/deepspeed.json\" \"${{@:2}}\"\n",
        job.name
    );
    Ok(JobFiles {
        version: VERSION,
        files: vec![("deepspeed.json".into(), format!("{text}\n")), ("run.sh".into(), run)],
        command: "bash run.sh train.py".into(),
        plan,
        differences: nearest.differences,
    })
}

/// Replaces what DeepSpeed's configuration lacks.
fn restrict(nearest: &mut Nearest) -> Result<(), FrameworkError> {
    nearest.only_data_parallel()?;
    // MiCS had them until release 0.19.
    nearest.replace(|plan| &mut plan.layout.shard_group, None, "all ranks of `data` are one shard group");
    nearest.replace(
        |plan| &mut plan.layout.recompute,
        Recompute::None,
        "the file does not say what is recomputed: the script does (`model.gradient_checkpointing_enable()`)",
    );
    match nearest.plan.layout.offload {
        Offload::Both => {
            nearest.replace(|plan| &mut plan.layout.offload, Offload::Optimizer, "activations stay in device memory")
        }
        Offload::Activations => {
            nearest.replace(|plan| &mut plan.layout.offload, Offload::None, "activations stay in device memory")
        }
        _ => {}
    }
    match nearest.plan.precision {
        DataType::Tf32 => nearest.replace(|plan| &mut plan.precision, DataType::Fp32, "the precision is fp32"),
        DataType::Fp8 => nearest.replace(|plan| &mut plan.precision, DataType::Bf16, "the precision is bf16"),
        _ => {}
    }
    usual_training(&mut nearest.plan);
    let initial = f32::powi(2.0, nearest.plan.training.loss_scale.initial.log2().round() as i32);
    nearest.replace(|plan| &mut plan.training.loss_scale.initial, initial, "the first loss scale is a power of two");
    nearest.whole_bucket();
    Ok(())
}

fn configuration(plan: &Plan) -> Result<Value, FrameworkError> {
    let layout = &plan.layout;
    let training = &plan.training;
    let mut zero = json!({"stage": layout.zero, "reduce_bucket_size": bucket_elements(layout), "overlap_comm": true});
    if layout.offload == Offload::Optimizer {
        zero["offload_optimizer"] = json!({"device": "cpu", "pin_memory": true});
    }
    let optimizer = match plan.optimizer {
        Optimizer::Sgd => {
            json!({"type": "SGD", "params": {"lr": decimal(plan.learning_rate()), "momentum": decimal(training.momentum),
            "nesterov": training.nesterov, "weight_decay": decimal(training.weight_decay)}})
        }
        adam => json!({"type": if adam == Optimizer::AdamW { "AdamW" } else { "Adam" }, "params": {
            "lr": decimal(plan.learning_rate()), "betas": [decimal(training.beta1), decimal(training.beta2)],
            "eps": decimal(training.epsilon), "weight_decay": decimal(training.weight_decay)}}),
    };
    let mut document = json!({
        "train_batch_size": plan.global_batch,
        "train_micro_batch_size_per_gpu": layout.micro_batch,
        "gradient_accumulation_steps": plan.micro_batches()?,
        "zero_optimization": zero,
        "optimizer": optimizer,
        "gradient_clipping": decimal(training.clip_norm.unwrap_or(0.0)),
        "bf16": {"enabled": plan.precision == DataType::Bf16},
    });
    if plan.precision == DataType::Fp16 {
        document["fp16"] = json!({"enabled": true, "initial_scale_power": training.loss_scale.initial.log2().round() as u32,
            "loss_scale_window": training.loss_scale.growth_interval});
    }
    Ok(document)
}

/// Entries that change neither the time of a step nor its memory.
const NEUTRAL: [&str; 12] = [
    "steps_per_print",
    "wall_clock_breakdown",
    "dump_state",
    "tensorboard",
    "wandb",
    "csv_monitor",
    "flops_profiler",
    "comms_logger",
    "scheduler",
    "prescale_gradients",
    "gradient_predivide_factor",
    "zero_allow_untested_optimizer",
];

/// Entries of `zero_optimization` that are read, or change nothing that we model.
const ZERO: [&str; 8] = [
    "stage",
    "reduce_bucket_size",
    "overlap_comm",
    "offload_optimizer",
    "mics_shard_size",
    "contiguous_gradients",
    "stage3_gather_16bit_weights_on_model_save",
    "round_robin_gradients",
];

/// Whether `section` is enabled.
fn is_enabled(section: &Option<Value>) -> bool {
    section.as_ref().is_some_and(|section| section["enabled"] == true)
}

pub(super) fn import(text: &str, ranks: usize) -> Result<ImportedPlan, FrameworkError> {
    let mut document = JsonObject::parse(text, "DeepSpeed's JSON configuration")?;
    document.neutral(&NEUTRAL);
    let micro = document.size("train_micro_batch_size_per_gpu")?;
    let global = document.size("train_batch_size")?;
    let accumulation = document.size("gradient_accumulation_steps")?;
    let per_rank = global.map(|global| global / ranks.max(1));
    let micro_batch = micro.or_else(|| Some(per_rank? / accumulation.unwrap_or(1))).unwrap_or(1).max(1);
    let global_batch = global.unwrap_or(micro_batch.saturating_mul(accumulation.unwrap_or(1)).saturating_mul(ranks));
    let mut plan = Plan::new(Layout { data: ranks, micro_batch, ..Layout::default() }, global_batch);
    plan.stack = Stack::new(STACK);
    let mut unread = Vec::new();
    if let Some(Value::Object(zero)) = document.take("zero_optimization") {
        unread.extend(read_zero(&zero, &mut plan.layout));
    }
    let (bf16, fp16) = (document.take("bf16"), document.take("fp16"));
    plan.training = Training::default();
    if is_enabled(&bf16) {
        plan.precision = DataType::Bf16;
    } else if is_enabled(&fp16) {
        plan.precision = DataType::Fp16;
        let entry = |name: &str| fp16.as_ref().and_then(|section| section[name].as_u64());
        if let Some(power) = entry("initial_scale_power").and_then(|power| i32::try_from(power).ok()) {
            plan.training.loss_scale.initial = f32::powi(2.0, power.min(100));
        }
        if let Some(window) = entry("loss_scale_window").and_then(|window| u32::try_from(window).ok()) {
            plan.training.loss_scale.growth_interval = window;
        }
    }
    plan.training.clip_norm = document.number("gradient_clipping").filter(|&norm| norm > 0.0);
    read_optimizer(document.take("optimizer"), &mut plan)?;
    unread.extend(document.unread());
    Ok(ImportedPlan { plan, model: None, unread })
}

/// Reads ZeRO's section. Returns what was not understood.
fn read_zero(zero: &Map<String, Value>, layout: &mut Layout) -> Vec<String> {
    layout.zero = zero.get("stage").and_then(Value::as_u64).map_or(0, |stage| stage.min(4) as usize);
    if let Some(elements) = zero.get("reduce_bucket_size").and_then(Value::as_u64) {
        layout.bucket = bucket_of(elements);
    }
    if zero.get("offload_optimizer").is_some_and(|offload| offload["device"] == "cpu") {
        layout.offload = Offload::Optimizer;
    }
    layout.shard_group = zero.get("mics_shard_size").and_then(Value::as_u64).map(|group| group as usize);
    let unread = zero.iter().filter(|(name, _)| !ZERO.contains(&name.as_str()));
    unread.map(|(name, value)| format!("zero_optimization.{name}: {value}")).collect()
}

fn read_optimizer(section: Option<Value>, plan: &mut Plan) -> Result<(), FrameworkError> {
    let Some(section) = section else { return Ok(()) };
    let parameters = &section["params"];
    let number = |name: &str| parameters[name].as_f64().map(|number| number as f32);
    let usual = Training::default();
    plan.optimizer = match section["type"].as_str() {
        Some("SGD") => Optimizer::Sgd,
        Some("Adam") => Optimizer::Adam,
        Some("AdamW") => Optimizer::AdamW,
        _ => {
            return Err(FrameworkError::Form {
                reason: format!("the optimizer {} is not one of ours", section["type"]),
                hint: "optimizers: Adam, AdamW, SGD".into(),
            });
        }
    };
    let training = &mut plan.training;
    training.learning_rate = number("lr");
    training.weight_decay = number("weight_decay").unwrap_or(0.0);
    training.momentum = number("momentum").unwrap_or(usual.momentum);
    training.nesterov = parameters["nesterov"] == true;
    training.epsilon = number("eps").unwrap_or(usual.epsilon);
    let beta = |index: usize| parameters["betas"][index].as_f64().map(|beta| beta as f32);
    training.beta1 = beta(0).unwrap_or(usual.beta1);
    training.beta2 = beta(1).unwrap_or(usual.beta2);
    // DeepSpeed's Adam decouples the decay as AdamW does.
    if plan.optimizer == Optimizer::Adam && training.weight_decay != 0.0 {
        plan.optimizer = Optimizer::AdamW;
    }
    Ok(())
}
