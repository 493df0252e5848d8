//! Hugging Face Accelerate: its configuration, and the `TrainingArguments` of a Trainer beside it.

pub(super) mod method;
mod read;

pub(super) use read::import;

use super::hf_stack;
use super::nearest::{Nearest, usual_training};
use super::stated::decimal;
use super::{FrameworkError, Job, JobFiles};
use foretell_program::{MomentFormat, Offload, Optimizer, Plan, Recompute, Training};
use foretell_units::DataType;
use serde_json::{Value, json};

const VERSION: &str = "accelerate 1.15.0";

const FRAMEWORK: &str = "Accelerate";

pub(super) fn export(job: &Job<'_>) -> Result<JobFiles, FrameworkError> {
    let (plan, method) = method::taken_out(job.plan);
    let mut nearest = Nearest::new(&plan, FRAMEWORK, hf_stack::FSDP2)?;
    restrict(&mut nearest)?;
    method::put_back(method, &mut nearest);
    let read_back = hf_stack::of_pytorch(&nearest.plan.layout, "hf-trainer");
    nearest.plan.stack = hf_stack::kept(&job.plan.stack, &hf_stack::PYTORCH, read_back);
    let plan = nearest.plan;
    let [nodes, per_node] = job.nodes()?;
    let mut arguments = training_arguments(&plan)?;
    // TRL's scripts, the ones that know adapters, have their own setting of the length.
    if let Some((sequence, _)) = job.model.sample().tokens().filter(|_| plan.training.lora.is_some()) {
        arguments["max_length"] = json!(sequence);
    }
    let arguments = serde_json::to_string_pretty(&arguments).expect("invariant: a JSON value has a text");
    let run = format!(
        "#!/bin/bash\n# {VERSION}, for {} on {nodes} nodes of {per_node} GPUs. Run it on each node with NODE_RANK and MASTER_ADDR set. The\n\
         # first argument is a training script that reads TrainingArguments from a JSON file\n\
         # (HfArgumentParser), with TRL's settings of adapters and kernels if any.\nset -e\n\
         here=$(dirname \"$(readlink -f \"$0\")\")\n\
         accelerate launch --config_file \"$here/accelerate.yaml\" --machine_rank \"${{NODE_RANK:-0}}\" \\\n  \
         --main_process_ip \"${{MASTER_ADDR:-localhost}}\" --main_process_port \"${{MASTER_PORT:-29500}}\" \\\n  \
         \"$1\" \"$here/training_arguments.json\" \"${{@:2}}\"\n",
        job.name
    );
    Ok(JobFiles {
        version: VERSION,
        files: vec![
            ("accelerate.yaml".into(), configuration(&plan, nodes, per_node)),
            ("training_arguments.json".into(), format!("{arguments}\n")),
            ("run.sh".into(), run),
        ],
        command: "bash run.sh train.py".into(),
        plan,
        differences: nearest.differences,
    })
}

/// Replaces settings that Accelerate lacks. Refuses the axes `tensor`, `pipeline`, `context` and
/// `expert`.
pub(super) fn restrict(nearest: &mut Nearest) -> Result<(), FrameworkError> {
    nearest.only_data_parallel()?;
    if nearest.plan.layout.zero == 1 {
        nearest.replace(|plan| &mut plan.layout.zero, 2, "FSDP shards gradients with the optimizer's state: `zero: 2`");
    }
    nearest.replace(|plan| &mut plan.layout.shard_group, None, "all ranks of `data` are one shard group");
    nearest.coarse_recompute(&[Recompute::None, Recompute::Full]);
    if nearest.plan.layout.offload != Offload::State || nearest.plan.layout.zero != 3 {
        nearest.replace(|plan| &mut plan.layout.offload, Offload::None, "everything stays in device memory");
    }
    match nearest.plan.precision {
        DataType::Tf32 => nearest.replace(|plan| &mut plan.precision, DataType::Fp32, "the precision is fp32"),
        DataType::Fp8 => nearest.replace(|plan| &mut plan.precision, DataType::Bf16, "the precision is bf16"),
        _ => {}
    }
    nearest.usual_bucket();
    // A Trainer's SGD has no momentum.
    if nearest.plan.optimizer == Optimizer::Sgd {
        nearest.replace(|plan| &mut plan.training.momentum, 0.0, "a Trainer's SGD has no momentum");
        nearest.plan.training.nesterov = false;
    }
    usual_training(&mut nearest.plan);
    nearest.plan.training.loss_scale = Training::default().loss_scale;
    Ok(())
}

/// The text of `accelerate.yaml`.
fn configuration(plan: &Plan, nodes: usize, per_node: usize) -> String {
    let layout = &plan.layout;
    let precision = match plan.precision {
        DataType::Bf16 => "bf16",
        DataType::Fp16 => "fp16",
        _ => "'no'",
    };
    let (kind, fsdp) = if layout.zero == 0 {
        (if nodes * per_node > 1 { "MULTI_GPU" } else { "'NO'" }, String::new())
    } else {
        let fsdp = format!(
            "fsdp_config:\n  fsdp_version: 2\n  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n  fsdp_reshard_after_forward: {}\n  \
             fsdp_activation_checkpointing: {}\n  fsdp_offload_params: {}\n  fsdp_state_dict_type: SHARDED_STATE_DICT\n",
            layout.zero == 3,
            layout.recompute == Recompute::Full,
            layout.offload == Offload::State,
        );
        ("FSDP", fsdp)
    };
    format!(
        "# {VERSION}\ncompute_environment: LOCAL_MACHINE\ndebug: false\ndistributed_type: {kind}\n{fsdp}machine_rank: 0\n\
         main_training_function: main\nmixed_precision: {precision}\nnum_machines: {nodes}\nnum_processes: {}\nrdzv_backend: static\n\
         same_network: true\nuse_cpu: false\n",
        nodes * per_node
    )
}

/// The arguments of a Trainer.
pub(super) fn training_arguments(plan: &Plan) -> Result<Value, FrameworkError> {
    let layout = &plan.layout;
    let training = &plan.training;
    let optimizer = if plan.optimizer == Optimizer::Sgd { "sgd" } else { "adamw_torch_fused" };
    let mut document = json!({
        "output_dir": "output",
        "per_device_train_batch_size": layout.micro_batch,
        "gradient_accumulation_steps": plan.micro_batches()?,
        "bf16": plan.precision == DataType::Bf16,
        "fp16": plan.precision == DataType::Fp16,
        "optim": optimizer,
        "learning_rate": decimal(plan.learning_rate()),
        "weight_decay": decimal(training.weight_decay),
        "adam_beta1": decimal(training.beta1),
        "adam_beta2": decimal(training.beta2),
        "adam_epsilon": decimal(training.epsilon),
        "max_grad_norm": decimal(training.clip_norm.unwrap_or(0.0)),
        "max_steps": 50,
    });
    let optimizer = match (plan.workload.moments, plan.workload.paged_moments) {
        (MomentFormat::EightBit, true) => Some("paged_adamw_8bit"),
        (MomentFormat::EightBit, false) => Some("adamw_bnb_8bit"),
        (MomentFormat::Factored, _) => Some("adafactor"),
        (MomentFormat::Single | MomentFormat::Half, _) => None,
    };
    if let Some(optimizer) = optimizer.filter(|_| plan.optimizer != Optimizer::Sgd) {
        document["optim"] = json!(optimizer);
    }
    for (name, value) in method::settings(plan) {
        document[name] = value;
    }
    let recomputes = layout.recompute == Recompute::Full;
    if layout.zero > 0 {
        document["fsdp"] = json!(true);
        // FSDP's recomputation gathers parameters once less often than the Trainer's.
        document["fsdp_config"] =
            json!({"version": 2, "reshard_after_forward": layout.zero == 3, "activation_checkpointing": recomputes});
        if layout.offload == Offload::State {
            document["fsdp_config"]["offload_params"] = json!(true);
        }
    } else {
        document["activation_checkpointing"] = json!(recomputes);
    }
    Ok(document)
}
