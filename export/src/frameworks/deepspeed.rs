//! DeepSpeed's configuration. It has batches, ZeRO, precision and the optimizer. The training
//! script decides the model and what is recomputed.

mod read;

pub(super) use read::{Trainer, import, read_config};

use super::hf_stack;
use super::nearest::{Nearest, bucket_elements, usual_training};
use super::stated::decimal;
use super::{FrameworkError, Job, JobFiles};
use foretell_program::{Offload, Optimizer, Plan, Recompute};
use foretell_units::DataType;
use serde_json::{Value, json};

const VERSION: &str = "deepspeed 0.19.8";

const FRAMEWORK: &str = "DeepSpeed";

pub(super) fn export(job: &Job<'_>) -> Result<JobFiles, FrameworkError> {
    let mut nearest = Nearest::new(job.plan, FRAMEWORK, hf_stack::FSDP2)?;
    restrict(&mut nearest)?;
    nearest.plan.stack = hf_stack::kept(&job.plan.stack, &hf_stack::DEEPSPEED, "deepspeed-zero");
    let plan = nearest.plan;
    let text = configuration_text(&plan)?;
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
        files: vec![("deepspeed.json".into(), text), ("run.sh".into(), run)],
        command: "bash run.sh train.py".into(),
        plan,
        differences: nearest.differences,
    })
}

/// Replaces settings that DeepSpeed's configuration cannot express.
pub(super) fn restrict(nearest: &mut Nearest) -> Result<(), FrameworkError> {
    nearest.only_data_and_heads()?;
    // Only MiCS has shard groups, and DeepSpeed removed it in release 0.19.
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

/// The text of DeepSpeed's file.
pub(super) fn configuration_text(plan: &Plan) -> Result<String, FrameworkError> {
    let text = serde_json::to_string_pretty(&configuration(plan)?).expect("invariant: a JSON value has a text");
    Ok(format!("{text}\n"))
}

fn configuration(plan: &Plan) -> Result<Value, FrameworkError> {
    let layout = &plan.layout;
    let training = &plan.training;
    let mut zero = json!({"stage": layout.zero, "reduce_bucket_size": bucket_elements(layout), "overlap_comm": true});
    if layout.offload.is_of_optimizer() {
        zero["offload_optimizer"] = json!({"device": "cpu", "pin_memory": true});
    }
    if layout.offload == Offload::State {
        zero["offload_param"] = json!({"device": "cpu", "pin_memory": true});
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
    if layout.context > 1 {
        document["sequence_parallel_size"] = json!(layout.context);
    }
    if plan.precision == DataType::Fp16 {
        document["fp16"] = json!({"enabled": true, "initial_scale_power": training.loss_scale.initial.log2().round() as u32,
            "loss_scale_window": training.loss_scale.growth_interval});
    }
    Ok(document)
}
