//! Plans from Accelerate's configuration. It has layout and precision; batch, model and optimizer
//! are the training script's.

use super::super::deepspeed::{Trainer, read_config as read_deepspeed};
use super::super::fsdp::{self, Sharding};
use super::super::stated::Stated;
use super::super::{FrameworkError, ImportedPlan, Surroundings};
use super::STACK;
use foretell_program::{Layout, Offload, Plan, Stack};
use foretell_units::DataType;

/// Settings that change neither the time of a step nor its memory.
const NEUTRAL: [&str; 27] = [
    "compute_environment",
    "debug",
    "machine_rank",
    "main_training_function",
    "main_process_ip",
    "main_process_port",
    "rdzv_backend",
    "rdzv_*",
    "same_network",
    "use_cpu",
    "tpu_*",
    "gpu_ids",
    "downcast_bf16",
    "enable_cpu_affinity",
    "deepspeed_hostfile",
    "command*",
    "commands",
    "mpirun_config.*",
    "ipex_config.*",
    "dynamo_*",
    "dynamo_config.*",
    "num_cpu_threads_per_process",
    "deepspeed_multinode_launcher",
    "fp8_config.*",
    "cluster_name",
    "zone",
    "tpu_name",
];

pub(in super::super) fn import(text: &str, surroundings: &Surroundings<'_>) -> Result<ImportedPlan, FrameworkError> {
    let mut stated = Stated::parse(text, "Accelerate's configuration, which `accelerate config` writes")?;
    if !["distributed_type", "compute_environment", "num_processes"].iter().any(|name| stated.has(name)) {
        return Err(FrameworkError::Form {
            reason: "no setting of Accelerate is in it".into(),
            hint: "give the file that `accelerate config` writes".into(),
        });
    }
    check_ranks(&mut stated, surroundings)?;
    stated.refuse(&["megatron_lm_config"], "Megatron-LM's part is not read")?;
    stated.neutral(&NEUTRAL);
    let mut trainer = Trainer::usual(surroundings);
    let accumulation = stated.size("gradient_accumulation_steps")?;
    trainer.accumulation = accumulation.unwrap_or(1);
    let precision = read_precision(&mut stated)?;
    let kind = stated.text("distributed_type")?.unwrap_or_else(|| "MULTI_GPU".into());
    let plan = match kind.as_str() {
        "DEEPSPEED" => read_deepspeed_part(&mut stated, surroundings, &mut trainer, precision)?,
        "NO" | "MULTI_GPU" | "FSDP" | "NPU" | "MULTI_NPU" | "no" => {
            let (size, source) = trainer.micro_batch;
            stated.assume(format!("`micro_batch` {size}: the file leaves it to the training script; this is {source}"));
            let mut layout = Layout { data: surroundings.ranks, micro_batch: size, ..Layout::default() };
            let words = Some(Sharding { zero: 3, is_hybrid: false }).filter(|_| kind == "FSDP");
            let section = stated.section("fsdp_config");
            let account = fsdp::read_config(section, words, &mut layout, surroundings.devices_per_node)?;
            stated.absorb(account);
            let batch = size.saturating_mul(trainer.accumulation).saturating_mul(surroundings.ranks);
            let mut plan = Plan::new(layout, batch);
            plan.precision = precision;
            stated.assume("`optimizer` adamw: the file leaves it to the training script; this is the Trainer's default");
            plan.optimizer = trainer.optimizer;
            plan.training = trainer.training.clone();
            plan
        }
        _ => return Err(stated.unknown("distributed_type", "types: NO, MULTI_GPU, FSDP, DEEPSPEED")),
    };
    let plan = Plan { stack: Stack::new(STACK), ..plan };
    Ok(ImportedPlan::new(plan, stated.finish()?))
}

/// Refuses a number of processes that the topology does not have.
fn check_ranks(stated: &mut Stated, surroundings: &Surroundings<'_>) -> Result<(), FrameworkError> {
    let ranks = surroundings.ranks;
    let (processes, machines) = (stated.size("num_processes")?, stated.size("num_machines")?);
    match processes {
        Some(processes) if processes != ranks => Err(FrameworkError::Form {
            reason: format!("`num_processes: {processes}` on a topology of {ranks} devices"),
            hint: match machines {
                Some(machines) => format!("say a topology of {machines} nodes with `--topology` and `--nodes`"),
                None => "say the cluster with `--topology` and `--nodes`".into(),
            },
        }),
        _ => Ok(()),
    }
}

fn read_precision(stated: &mut Stated) -> Result<DataType, FrameworkError> {
    let precision = stated.take("mixed_precision");
    match precision.as_ref().and_then(serde_json::Value::as_str) {
        Some("bf16") => Ok(DataType::Bf16),
        Some("fp16") => Ok(DataType::Fp16),
        Some("fp8") => Ok(DataType::Fp8),
        // YAML reads a bare `no` as false.
        Some("no") | None => {
            stated.assume("`precision` fp32: `mixed_precision` is not on, and the model's own type is the training script's");
            Ok(DataType::Fp32)
        }
        Some(_) => Err(stated.unknown("mixed_precision", "precisions: no, bf16, fp16, fp8")),
    }
}

/// Reads `deepspeed_config`: DeepSpeed's file, or Accelerate's short form of it.
fn read_deepspeed_part(
    stated: &mut Stated,
    surroundings: &Surroundings<'_>,
    trainer: &mut Trainer,
    precision: DataType,
) -> Result<Plan, FrameworkError> {
    let mut section = stated.section("deepspeed_config");
    section.neutral(&["zero3_init_flag", "zero3_save_16bit_model", "deepspeed_hostfile", "deepspeed_multinode_launcher"]);
    if let Some(path) = section.text("deepspeed_config_file")? {
        let Some(text) = (surroundings.file)(&path) else {
            return Err(FrameworkError::Form {
                reason: format!("`deepspeed_config_file: {path}`: there is no such file beside this one"),
                hint: "put it there, or import it with `deepspeed-json`".into(),
            });
        };
        let mut file = Stated::parse(&text, "DeepSpeed's JSON configuration")?;
        let plan = read_deepspeed(&mut file, surroundings, trainer)?;
        stated.absorb(file.finish()?);
        stated.absorb(section.finish()?);
        return Ok(plan);
    }
    trainer.accumulation = section.size("gradient_accumulation_steps")?.unwrap_or(trainer.accumulation);
    let (size, source) = trainer.micro_batch;
    stated.assume(format!("`micro_batch` {size}: the file leaves it to the training script; this is {source}"));
    stated.assume("`optimizer` adamw: the file leaves it to the training script; this is the Trainer's default");
    let mut layout = Layout { data: surroundings.ranks, micro_batch: size, ..Layout::default() };
    layout.zero = section.count("zero_stage")?.unwrap_or(2);
    if layout.zero > 3 {
        return Err(section.wrong("zero_stage", "a stage of ZeRO, which are 0 to 3"));
    }
    match section.text("offload_optimizer_device")?.as_deref() {
        None | Some("none") => {}
        Some("cpu" | "nvme") => layout.offload = Offload::Optimizer,
        Some(_) => return Err(section.unknown("offload_optimizer_device", "devices: none, cpu, nvme")),
    }
    section.neutral(&["offload_optimizer_nvme_path", "offload_param_nvme_path"]);
    section.refuse(&["offload_param_device"], "no plan keeps parameters in host memory")?;
    let batch = size.saturating_mul(trainer.accumulation).saturating_mul(surroundings.ranks);
    let mut plan = Plan::new(layout, batch);
    plan.precision = precision;
    plan.optimizer = trainer.optimizer;
    plan.training = trainer.training.clone();
    if let Some(norm) = section.number("gradient_clipping")? {
        plan.training.clip_norm = Some(norm).filter(|&norm| norm > 0.0);
    }
    stated.absorb(section.finish()?);
    Ok(plan)
}
