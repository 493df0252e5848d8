//! Plans from Accelerate's configuration. It states layout and precision; batch, model and
//! optimizer are in the training script.

use super::super::deepspeed::{Trainer, read_config as read_deepspeed};
use super::super::fsdp::{self, Sharding};
use super::super::hf_stack::VersionSource;
use super::super::stated::Stated;
use super::super::{FrameworkError, ImportedPlan, Surroundings, degrees, hf_stack};
use foretell_program::{ContextMethod, Layout, Plan, Stack};
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
    let kind = stated.word("distributed_type")?.unwrap_or_else(|| "MULTI_GPU".into()).to_ascii_uppercase();
    check_ranks(&mut stated, &kind, surroundings)?;
    stated.refuse(&["megatron_lm_config*"], "Megatron-LM's part is not read")?;
    stated.neutral(&NEUTRAL);
    let mut trainer = Trainer::usual(surroundings);
    trainer.accumulation = stated.size("gradient_accumulation_steps")?.unwrap_or(1);
    let precision = read_precision(&mut stated)?;
    let states_version = ["fsdp_config.fsdp_version", "fsdp_config.version"].iter().any(|name| stated.has(name));
    let version = if states_version { VersionSource::File } else { VersionSource::Launcher };
    let mut plan = match kind.as_str() {
        "DEEPSPEED" => read_deepspeed_part(&mut stated, surroundings, &mut trainer, precision)?,
        "NO" | "MULTI_GPU" | "FSDP" | "NPU" | "MULTI_NPU" => read_pytorch_part(&mut stated, surroundings, &trainer, &kind)?,
        _ => return Err(stated.unknown("distributed_type", "types: NO, MULTI_GPU, FSDP, DEEPSPEED")),
    };
    if kind == "DEEPSPEED" {
        let stack = hf_stack::of_deepspeed(&plan.layout, "hf-deepspeed");
        hf_stack::choose(&mut stated, &mut plan, stack, "hf-deepspeed");
    } else {
        plan.precision = precision.unwrap_or_else(|| assumed_precision(&mut stated));
        let stack = hf_stack::of_imported(&plan, "hf-trainer");
        hf_stack::choose_of_pytorch(&mut stated, &mut plan, stack, "hf-trainer", version);
    }
    Ok(ImportedPlan::new(plan, stated.finish()?))
}

/// Refuses numbers of processes and machines that differ from the topology's.
fn check_ranks(stated: &mut Stated, kind: &str, surroundings: &Surroundings<'_>) -> Result<(), FrameworkError> {
    let Surroundings { ranks, devices_per_node, device, .. } = *surroundings;
    let nodes = ranks / devices_per_node.max(1);
    let (processes, machines) = (stated.size("num_processes")?, stated.size("num_machines")?);
    let one_process = kind == "NO";
    if one_process && ranks > 1 {
        return Err(FrameworkError::Form {
            reason: format!("`distributed_type: NO` is one process, and the topology has {ranks} devices"),
            hint: format!("say `--topology 1x{device}`"),
        });
    }
    let wanted = processes.filter(|_| !one_process).unwrap_or(ranks);
    let wanted_nodes = machines.filter(|_| !one_process).unwrap_or(if wanted == ranks { nodes } else { 1 });
    if (wanted, wanted_nodes) == (ranks, nodes) {
        return Ok(());
    }
    let stated_sizes = match (processes, machines) {
        (Some(processes), Some(machines)) => format!("`num_processes: {processes}` on `num_machines: {machines}`"),
        (Some(processes), None) => format!("`num_processes: {processes}`"),
        _ => format!("`num_machines: {wanted_nodes}`"),
    };
    let hint = match (wanted.is_multiple_of(wanted_nodes), wanted_nodes) {
        (true, 1) => format!("say `--topology {wanted}x{device}`"),
        (true, _) => format!("say `--topology {wanted_nodes}x{}x{device}`", wanted / wanted_nodes),
        (false, _) => "choose a number of processes that the machines divide".into(),
    };
    Err(FrameworkError::Form { reason: format!("{stated_sizes}, and the topology has {ranks} devices on {nodes} nodes"), hint })
}

/// The precision; `None` if mixed precision is off.
fn read_precision(stated: &mut Stated) -> Result<Option<DataType>, FrameworkError> {
    match stated.word("mixed_precision")?.as_deref() {
        Some("bf16") => Ok(Some(DataType::Bf16)),
        Some("fp16") => Ok(Some(DataType::Fp16)),
        Some("fp8") => Ok(Some(DataType::Fp8)),
        Some("no") | None => Ok(None),
        Some(_) => Err(stated.unknown("mixed_precision", "precisions: no, bf16, fp16, fp8")),
    }
}

fn assumed_precision(stated: &mut Stated) -> DataType {
    stated.assume("`precision` fp32: `mixed_precision` is not on, and the model's own type is the training script's");
    DataType::Fp32
}

/// Reads the parallelism of PyTorch: DDP, FSDP, and further axes.
fn read_pytorch_part(
    stated: &mut Stated,
    surroundings: &Surroundings<'_>,
    trainer: &Trainer,
    kind: &str,
) -> Result<Plan, FrameworkError> {
    let (size, source) = trainer.micro_batch;
    stated.assume(format!("`micro_batch` {size}: the file leaves it to the training script; this is {source}"));
    let mut layout = Layout { data: surroundings.ranks, micro_batch: size, ..Layout::default() };
    let mut section = stated.section("parallelism_config");
    let shards = degrees::read(&mut section, degrees::Names::Accelerate, surroundings, &mut layout)?;
    if layout.context_method == ContextMethod::AllToAll {
        return Err(FrameworkError::Form {
            reason: format!("{}: Accelerate shards sequences by heads with DeepSpeed alone", section.written("sp_size")),
            hint: "write `distributed_type: DEEPSPEED`, or `cp_size` in place of `sp_size`".into(),
        });
    }
    stated.absorb(section.finish()?);
    let words = Some(Sharding::FULL).filter(|_| kind == "FSDP");
    let section = stated.section("fsdp_config");
    let (account, version) = fsdp::read_config(section, words, &mut layout, surroundings.devices_per_node)?;
    stated.absorb(account);
    degrees::apply(shards, &mut layout);
    let batch = size.saturating_mul(trainer.accumulation).saturating_mul(layout.data);
    let mut plan = Plan::new(layout, batch);
    // `accelerate launch` takes the first version where a file states none.
    if version.unwrap_or(1) == 1 {
        plan.stack = Stack::new(hf_stack::FSDP1[0]);
    }
    stated.assume("`optimizer` adamw: the file leaves it to the training script; this is the Trainer's default");
    plan.optimizer = trainer.optimizer;
    plan.training = trainer.training.clone();
    Ok(plan)
}

/// Accelerate's short names of DeepSpeed's settings.
const SHORT: [(&str, &str); 5] = [
    ("zero_stage", "zero_optimization.stage"),
    ("offload_optimizer_device", "zero_optimization.offload_optimizer.device"),
    ("offload_optimizer_nvme_path", "zero_optimization.offload_optimizer.nvme_path"),
    ("offload_param_device", "zero_optimization.offload_param.device"),
    ("offload_param_nvme_path", "zero_optimization.offload_param.nvme_path"),
];

/// Reads `deepspeed_config`: DeepSpeed's settings, in place, in a file, or by Accelerate's short
/// names.
fn read_deepspeed_part(
    stated: &mut Stated,
    surroundings: &Surroundings<'_>,
    trainer: &mut Trainer,
    precision: Option<DataType>,
) -> Result<Plan, FrameworkError> {
    let mut axes = stated.section("parallelism_config");
    if !axes.is_empty() {
        let mut layout = Layout::default();
        degrees::read(&mut axes, degrees::Names::Accelerate, surroundings, &mut layout)?;
        let is_by_heads = layout.context == 1 || layout.context_method == ContextMethod::AllToAll;
        if layout.tensor > 1 || !is_by_heads {
            return Err(FrameworkError::Form {
                reason: "`parallelism_config` has axes over which DeepSpeed shards nothing".into(),
                hint: "of these axes, keep `sp_size` alone beside `distributed_type: DEEPSPEED`".into(),
            });
        }
        trainer.context = (layout.context, layout.context_method);
        stated.absorb(axes.finish()?);
    }
    let mut section = stated.section("deepspeed_config");
    section.neutral(&[
        "zero3_init_flag",
        "zero3_save_16bit_model",
        "deepspeed_hostfile",
        "deepspeed_multinode_launcher",
        "deepspeed_moe_layer_cls_names",
    ]);
    if let Some(precision) = precision {
        trainer.precision = (precision, "`mixed_precision`");
    }
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
    for (short, name) in SHORT {
        section.rename(short, name)?;
    }
    section.provide("zero_optimization.stage", 2.into());
    trainer.accumulation = section.size("gradient_accumulation_steps")?.unwrap_or(trainer.accumulation);
    section.provide("gradient_accumulation_steps", trainer.accumulation.into());
    section.provide("gradient_clipping", "auto".into());
    if !["bf16.enabled", "fp16.enabled", "bfloat16.enabled"].iter().any(|name| section.has(name)) {
        let precision = precision.unwrap_or_else(|| assumed_precision(&mut section));
        section.provide("bf16.enabled", (precision == DataType::Bf16).into());
        section.provide("fp16.enabled", (precision == DataType::Fp16).into());
    }
    let plan = read_deepspeed(&mut section, surroundings, trainer)?;
    stated.absorb(section.finish()?);
    Ok(plan)
}
