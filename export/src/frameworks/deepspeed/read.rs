//! Reads plans from DeepSpeed's configuration, alone or inside a Trainer's arguments.

use super::super::nearest::bucket_of;
use super::super::stated::Stated;
use super::super::{FrameworkError, ImportedPlan, Surroundings, hf_stack};
use foretell_program::{ContextMethod, Layout, Offload, Optimizer, Plan, Training};
use foretell_units::DataType;
use serde_json::json;

/// Sections of the configuration. Every file has at least one of them.
const KNOWN: [&str; 14] = [
    "zero_optimization",
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "bf16",
    "fp16",
    "optimizer",
    "scheduler",
    "gradient_clipping",
    "activation_checkpointing",
    "bfloat16",
    "amp",
    "zero_allow_untested_optimizer",
    "tensor_parallel",
];

/// Settings that change neither the time of a step nor its memory, or only how buffers are cut.
const NEUTRAL: [&str; 64] = [
    "steps_per_print",
    "wall_clock_breakdown",
    "memory_breakdown",
    "dump_state",
    "tensorboard*",
    "wandb*",
    "comet*",
    "csv_monitor*",
    "monitor_config*",
    "flops_profiler*",
    "comms_logger*",
    "scheduler*",
    "prescale_gradients",
    "gradient_predivide_factor",
    "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
    "aio.*",
    "checkpoint.*",
    "nebula*",
    "seed",
    "disable_allgather",
    "dataloader_drop_last",
    "zero_optimization.contiguous_gradients",
    "zero_optimization.round_robin_gradients",
    "zero_optimization.allgather_partitions",
    "zero_optimization.allgather_bucket_size",
    "zero_optimization.use_multi_rank_bucket_allreduce",
    "zero_optimization.sub_group_size",
    "zero_optimization.stage3_*",
    "zero_optimization.prefetch_bucket_size",
    "zero_optimization.param_persistence_threshold",
    "zero_optimization.model_persistence_threshold",
    "zero_optimization.max_live_parameters",
    "zero_optimization.max_reuse_distance",
    "zero_optimization.gather_16bit_weights_on_model_save",
    "zero_optimization.elastic_checkpoint",
    "zero_optimization.ignore_unused_parameters",
    "zero_optimization.load_from_fp32_weights",
    "zero_optimization.legacy_stage1",
    "zero_optimization.memory_efficient_linear",
    "zero_optimization.offload_optimizer.pin_memory",
    "zero_optimization.offload_param.pin_memory",
    "zero_optimization.offload_param.nvme_path",
    "zero_optimization.offload_param.buffer_*",
    "zero_optimization.offload_param.max_in_cpu",
    "zero_optimization.offload_optimizer.nvme_path",
    "zero_optimization.offload_optimizer.buffer_*",
    "zero_optimization.offload_optimizer.pipeline*",
    "zero_optimization.offload_optimizer.fast_init",
    "bf16.hysteresis",
    "bf16.initial_scale_power",
    "bf16.loss_scale*",
    "bf16.min_loss_scale",
    "bf16.auto_cast",
    "seq_parallel_communication_data_type",
    "fp16.hysteresis",
    "fp16.consecutive_hysteresis",
    "fp16.min_loss_scale",
    "fp16.auto_cast",
    "activation_checkpointing.number_checkpoints",
    "activation_checkpointing.partition_activations",
    "activation_checkpointing.contiguous_*",
    "activation_checkpointing.synchronize_*",
    "activation_checkpointing.profile",
];

/// Settings that no plan expresses, with the reason.
const REFUSED: [(&str, &str); 21] = [
    ("bf16.bf16_optimizer_states", "no plan keeps the optimizer's state in 16 bits"),
    ("bf16.bf16_master_weights_and_grads", "no plan goes without parameters in single precision"),
    ("fp16.fp16_master_weights_and_grads", "no plan goes without parameters in single precision"),
    ("fp16.fp16_optimizer_states", "no plan keeps the optimizer's state in 16 bits"),
    ("amp.enabled", "Apex's mixed precision is not planned; `bf16` and `fp16` are"),
    ("torch_autocast.enabled", "autocast keeps parameters in single precision, which is not planned; `bf16` and `fp16` are"),
    ("zero_optimization.zero_quantized_weights", "quantized exchanges are not planned"),
    ("zero_optimization.zero_quantized_gradients", "quantized exchanges are not planned"),
    ("zero_optimization.zero_quantized_nontrainable_weights", "quantized exchanges are not planned"),
    ("zero_optimization.zeropp_loco_param", "quantized exchanges are not planned"),
    ("zero_optimization.cpu_offload_params", "no plan keeps parameters in host memory"),
    ("zero_optimization.offload_optimizer.super_offload", "its order of updates is not planned"),
    ("activation_checkpointing.cpu_checkpointing", "recomputation is the training script's, and its inputs' place too"),
    ("elasticity.enabled", "the batch follows from the ranks in a way that is not read"),
    ("autotuning.enabled", "it would choose another layout"),
    ("hybrid_engine.enabled", "its other engine is not planned"),
    ("progressive_layer_drop.enabled", "the number of layers would change from step to step"),
    ("sparse_attention", "sparse attention is not planned"),
    ("compression_training", "compressed training is not planned"),
    ("zenflow", "its order of updates is not planned"),
    ("zero_optimization.zenflow", "its order of updates is not planned"),
];

/// The Trainer's values for settings that the configuration leaves to it (`"auto"`).
pub(in super::super) struct Trainer {
    /// Samples of a micro-batch, with their source.
    pub(in super::super) micro_batch: (usize, &'static str),
    /// Micro-batches of a step.
    pub(in super::super) accumulation: usize,
    /// The precision, with its source.
    pub(in super::super) precision: (DataType, &'static str),
    /// The optimizer.
    pub(in super::super) optimizer: Optimizer,
    /// The optimizer's hyperparameters.
    pub(in super::super) training: Training,
    /// Ranks that share a sequence, and the method of their attention.
    pub(in super::super) context: (usize, ContextMethod),
    /// `true` if the Trainer's arguments are known, so that values from them need no note.
    pub(in super::super) is_stated: bool,
}

impl Trainer {
    /// The Trainer's defaults, and bf16, in which most models are trained.
    pub(in super::super) fn usual(surroundings: &Surroundings<'_>) -> Self {
        let training = Training { learning_rate: Some(5e-5), weight_decay: 0.0, clip_norm: Some(1.0), ..Training::default() };
        let micro_batch = match surroundings.micro_batch {
            Some(size) => (size, "`--micro-batch`"),
            None => (8, "the Trainer's default; `--micro-batch` says another"),
        };
        Self {
            micro_batch,
            accumulation: 1,
            precision: (surroundings.precision, "that of most models; a Trainer takes its own `bf16` or `fp16`"),
            optimizer: Optimizer::AdamW,
            training,
            context: (1, ContextMethod::Gather),
            is_stated: false,
        }
    }

    fn assume(&self, stated: &mut Stated, sentence: String) {
        if !self.is_stated {
            stated.assume(sentence);
        }
    }
}

pub(in super::super) fn import(text: &str, surroundings: &Surroundings<'_>) -> Result<ImportedPlan, FrameworkError> {
    let mut stated = Stated::parse(text, "DeepSpeed's JSON configuration")?;
    if !KNOWN.iter().any(|name| stated.has(name)) {
        return Err(FrameworkError::Form {
            reason: "no setting of DeepSpeed is in it".into(),
            hint: "give DeepSpeed's JSON configuration, which has `zero_optimization`, `bf16` or a batch".into(),
        });
    }
    let usual = if stated.leaves_open() { "hf-deepspeed" } else { "deepspeed-zero" };
    let mut plan = read_config(&mut stated, surroundings, &Trainer::usual(surroundings))?;
    let stack = hf_stack::of_deepspeed(&plan.layout, usual);
    hf_stack::choose(&mut stated, &mut plan, stack, usual);
    Ok(ImportedPlan::new(plan, stated.finish()?))
}

/// Reads the configuration. The caller finishes `stated`.
pub(in super::super) fn read_config(
    stated: &mut Stated,
    surroundings: &Surroundings<'_>,
    trainer: &Trainer,
) -> Result<Plan, FrameworkError> {
    stated.rename("bfloat16.enabled", "bf16.enabled")?;
    // The Trainer switches sections off that are `auto` here.
    stated.usual("amp.enabled", &json!("auto"));
    for (name, why) in REFUSED {
        if stated.has_section(name) && !stated.has(&format!("{name}.enabled")) {
            let hint = "leave it out of the file to plan the job without it".into();
            return Err(FrameworkError::Form { reason: format!("`{name}`: {why}"), hint });
        }
        stated.refuse(&[name], why)?;
    }
    stated.neutral(&NEUTRAL);
    stated.usual("communication_data_type", &json!("fp32"));
    stated.usual("data_types.grad_accum_dtype", &json!("fp32"));
    stated.usual("zero_optimization.overlap_comm", &json!(true));
    stated.usual("zero_optimization.reduce_scatter", &json!(true));
    stated.usual("zero_optimization.zero_hpz_partition_size", &json!(1));
    stated.usual("zero_optimization.offload_optimizer.ratio", &json!(1.0));
    if !stated.has("amp.enabled") || !stated.is_on("amp.enabled")? {
        stated.neutral(&["amp.*", "torch_autocast.*"]);
    }
    let (tensor, (context, context_method)) = read_degrees(stated, surroundings.ranks, trainer)?;
    let data = surroundings.ranks / (tensor * context);
    let (micro_batch, global_batch) = read_batch(stated, data, trainer)?;
    let mut layout = Layout { data, tensor, context, context_method, micro_batch, ..Layout::default() };
    read_zero(stated, &mut layout)?;
    let mut plan = Plan::new(layout, global_batch);
    plan.training = Training::default();
    read_precision(stated, &mut plan, trainer)?;
    if let Some(elements) = stated.size("zero_optimization.reduce_bucket_size")? {
        stated.state_bucket();
        plan.layout.bucket = bucket_of(elements as u64);
    }
    read_optimizer(stated, &mut plan, trainer)?;
    let is_auto = stated.is_auto("gradient_clipping");
    let norm = stated.number("gradient_clipping")?.or(trainer.training.clip_norm.filter(|_| is_auto));
    plan.training.clip_norm = norm.filter(|&norm| norm > 0.0);
    Ok(plan)
}

/// The number of ranks that operators are sharded over; the number that shares a sequence, and its
/// method. DeepSpeed's method exchanges parts of the sequence for heads (Ulysses).
fn read_degrees(stated: &mut Stated, ranks: usize, trainer: &Trainer) -> Result<(usize, (usize, ContextMethod)), FrameworkError> {
    const CONTEXT: &str = "sequence_parallel_size";
    let tensor = stated.size("tensor_parallel.autotp_size")?.unwrap_or(1);
    stated.neutral(&["tensor_parallel.enabled", "tensor_parallel.tp.*", "tensor_parallel.tp_grain_size"]);
    let own = stated.size(CONTEXT)?;
    if let Some(own) = own.filter(|&own| trainer.context.0 > 1 && own != trainer.context.0) {
        return Err(FrameworkError::Form {
            reason: format!("`{CONTEXT}: {own}`, and the job's arguments say {}", trainer.context.0),
            hint: "write the same number in both".into(),
        });
    }
    let (context, method) = match own.filter(|&own| own > 1) {
        Some(own) => (own, ContextMethod::AllToAll),
        None => trainer.context,
    };
    if tensor > 1 && context > 1 && method == ContextMethod::AllToAll {
        return Err(FrameworkError::Form {
            reason: format!("`{CONTEXT}: {context}` beside `tensor_parallel.autotp_size: {tensor}`: both shard heads"),
            hint: "keep one of them".into(),
        });
    }
    if !ranks.is_multiple_of(tensor.saturating_mul(context)) {
        let (name, size) = if tensor > 1 { ("tensor_parallel.autotp_size", tensor) } else { (CONTEXT, context) };
        return Err(FrameworkError::Form {
            reason: format!("`{name}: {size}` does not divide {ranks} ranks"),
            hint: "say the cluster with `--topology` and `--nodes`".into(),
        });
    }
    Ok((tensor, (context, method)))
}

/// The micro-batch and the global batch. DeepSpeed requires global batch = micro-batch ×
/// accumulation steps × data-parallel ranks.
fn read_batch(stated: &mut Stated, data: usize, trainer: &Trainer) -> Result<(usize, usize), FrameworkError> {
    const MICRO: &str = "train_micro_batch_size_per_gpu";
    const STEPS: &str = "gradient_accumulation_steps";
    const GLOBAL: &str = "train_batch_size";
    let (micro_is_auto, steps_is_auto) = (stated.is_auto(MICRO), stated.is_auto(STEPS));
    stated.is_auto(GLOBAL);
    let (micro, steps, global) = (stated.size(MICRO)?, stated.size(STEPS)?, stated.size(GLOBAL)?);
    let (size, source) = trainer.micro_batch;
    let (micro, steps) = match (micro, steps, global) {
        (Some(micro), steps, None) => (micro, steps.unwrap_or(if steps_is_auto { trainer.accumulation } else { 1 })),
        (Some(micro), Some(steps), Some(_)) => (micro, steps),
        (Some(micro), None, Some(global)) => (micro, global / micro.saturating_mul(data).max(1)),
        (None, Some(steps), Some(global)) => (global / steps.saturating_mul(data).max(1), steps),
        (None, None, Some(global)) if micro_is_auto => (size, global / size.saturating_mul(data).max(1)),
        (None, None, Some(global)) => (global / data.max(1), 1),
        (None, steps, None) => {
            let why = if micro_is_auto { "the file leaves it to the Trainer (`\"auto\"`)" } else { "the file does not state it" };
            trainer.assume(stated, format!("`micro_batch` {size}: {why}; this is {source}"));
            (size, steps.unwrap_or(trainer.accumulation))
        }
    };
    let product = micro.saturating_mul(steps).saturating_mul(data);
    match global {
        Some(global) if global != product || product == 0 => Err(FrameworkError::Form {
            reason: format!(
                "`{GLOBAL}: {global}` is not {micro} samples x {steps} accumulation steps x {data} ranks, which is {product}"
            ),
            hint: "choose numbers whose product it is, as DeepSpeed demands, or other `--topology` and `--nodes`".into(),
        }),
        _ => Ok((micro, product)),
    }
}

/// Reads ZeRO's section.
fn read_zero(stated: &mut Stated, layout: &mut Layout) -> Result<(), FrameworkError> {
    const STAGE: &str = "zero_optimization.stage";
    layout.zero = stated.count(STAGE)?.unwrap_or(0);
    if layout.zero > 3 {
        return Err(stated.wrong(STAGE, "a stage of ZeRO, which are 0 to 3"));
    }
    // The name before `offload_optimizer` existed.
    if stated.is_on("zero_optimization.cpu_offload")? {
        layout.offload = Offload::Optimizer;
    }
    match stated.text("zero_optimization.offload_optimizer.device")?.as_deref() {
        None | Some("none") => {}
        Some("cpu") => layout.offload = Offload::Optimizer,
        Some("nvme") => {
            stated.assume("the optimizer's state lies on NVMe in the file, and in host memory in the plan, which is faster");
            layout.offload = Offload::Optimizer;
        }
        Some(_) => return Err(stated.unknown("zero_optimization.offload_optimizer.device", "devices: none, cpu, nvme")),
    }
    match stated.text("zero_optimization.offload_param.device")?.as_deref() {
        None | Some("none") => stated.neutral(&["zero_optimization.offload_param.*"]),
        Some("cpu") if layout.zero == 3 && layout.offload == Offload::Optimizer => layout.offload = Offload::State,
        Some(_) => {
            let reason = format!(
                "{}: plans keep parameters in host memory only at stage 3, with the optimizer's state",
                stated.written("zero_optimization.offload_param.device")
            );
            let hint = match layout.zero {
                3 => "use `offload_optimizer` too, both with the device `cpu`; or remove `offload_param`",
                _ => "remove `offload_param`, which DeepSpeed describes for stage 3 alone",
            };
            let hint = hint.into();
            return Err(FrameworkError::Form { reason, hint });
        }
    }
    // -1 means all ranks.
    stated.usual("zero_optimization.mics_shard_size", &json!(-1));
    stated.usual("zero_optimization.mics_hierarchical_params_gather", &json!(false));
    if !stated.take("zero_optimization.mics_shard_size").is_some_and(|size| size == -1) {
        layout.shard_group = stated.size("zero_optimization.mics_shard_size")?.filter(|&group| group != layout.data);
    }
    Ok(())
}

fn read_precision(stated: &mut Stated, plan: &mut Plan, trainer: &Trainer) -> Result<(), FrameworkError> {
    let [bf16_is_open, fp16_is_open] = ["bf16.enabled", "fp16.enabled"].map(|name| stated.is_auto(name));
    let (bf16, fp16) = (stated.flag("bf16.enabled")?, stated.flag("fp16.enabled")?);
    plan.precision = match (bf16, fp16) {
        (Some(true), Some(true)) => {
            return Err(FrameworkError::Form {
                reason: "`bf16` and `fp16` are both enabled".into(),
                hint: "keep one of them, as DeepSpeed demands".into(),
            });
        }
        (Some(true), _) => DataType::Bf16,
        (_, Some(true)) => DataType::Fp16,
        // A Trainer fills in only sections that exist: without a section `bf16` the job is in fp16
        // or fp32.
        (None, None) if fp16_is_open && !bf16_is_open && !trainer.is_stated => {
            stated.assume("`precision` fp16: the file leaves `fp16` to the Trainer (`\"auto\"`), and has no `bf16` that a Trainer could fill in");
            DataType::Fp16
        }
        _ if bf16_is_open || fp16_is_open => {
            let (precision, source) = trainer.precision;
            trainer.assume(
                stated,
                format!("`precision` {precision}: the file leaves it to the Trainer (`\"auto\"`); this is {source}"),
            );
            precision
        }
        (None, None) => {
            trainer.assume(
                stated,
                "`precision` fp32: the file has neither `bf16` nor `fp16`, and that is DeepSpeed's default".into(),
            );
            DataType::Fp32
        }
        _ => DataType::Fp32,
    };
    for name in ["fp16.initial_scale_power", "fp16.loss_scale_window"] {
        stated.is_auto(name);
    }
    let (power, window) = (stated.count("fp16.initial_scale_power")?, stated.size("fp16.loss_scale_window")?);
    let fixed = stated.number("fp16.loss_scale")?.filter(|&scale| scale > 0.0);
    if plan.precision == DataType::Fp16 {
        if let Some(power) = power {
            plan.training.loss_scale.initial = f32::powi(2.0, power.min(100) as i32);
        }
        if let Some(window) = window {
            let window = u32::try_from(window);
            plan.training.loss_scale.growth_interval =
                window.map_err(|_| stated.wrong("fp16.loss_scale_window", "a number of steps below 4294967296"))?;
        }
        plan.training.loss_scale.initial = fixed.unwrap_or(plan.training.loss_scale.initial);
    }
    Ok(())
}

fn read_optimizer(stated: &mut Stated, plan: &mut Plan, trainer: &Trainer) -> Result<(), FrameworkError> {
    let is_auto = stated.is_auto("optimizer.type");
    let kind = stated.text("optimizer.type")?.map(|kind| kind.to_ascii_lowercase());
    let own = plan.training.clone();
    plan.optimizer = match kind.as_deref() {
        Some("sgd") => Optimizer::Sgd,
        Some("adam" | "fusedadam" | "cpuadam" | "deepspeedcpuadam") => Optimizer::Adam,
        Some("adamw") => Optimizer::AdamW,
        Some("lamb" | "fusedlamb") => Optimizer::Lamb,
        Some("muon") => Optimizer::Muon,
        Some(_) => return Err(stated.unknown("optimizer.type", "optimizers: Adam, AdamW, Lamb, Muon, SGD")),
        None => {
            let why = if is_auto { "the file leaves it to the Trainer" } else { "the file does not state it" };
            let name = trainer.optimizer.name();
            trainer.assume(stated, format!("`optimizer` {name}: {why}; this is the Trainer's default"));
            let loss_scale = own.loss_scale;
            plan.training = Training { loss_scale, ..trainer.training.clone() };
            plan.optimizer = trainer.optimizer;
            return Ok(());
        }
    };
    let usual = Training::default();
    let of_trainer = |is_auto: bool, value: f32| Some(value).filter(|_| is_auto);
    let mut number = |name: &str, auto: Option<f32>| -> Result<Option<f32>, FrameworkError> {
        let path = format!("optimizer.params.{name}");
        let auto = of_trainer(stated.is_auto(&path), auto.unwrap_or_default()).filter(|_| auto.is_some());
        Ok(stated.number(&path)?.or(auto))
    };
    let training = &mut plan.training;
    training.learning_rate = number("lr", trainer.training.learning_rate)?;
    training.weight_decay = number("weight_decay", Some(trainer.training.weight_decay))?.unwrap_or(0.0);
    training.momentum = number("momentum", None)?.unwrap_or(plan.optimizer.usual_momentum());
    training.epsilon = number("eps", Some(trainer.training.epsilon))?.unwrap_or(usual.epsilon);
    let betas_are_auto = stated.is_auto("optimizer.params.betas");
    let betas = stated.list("optimizer.params.betas")?;
    let beta = |index: usize| betas.get(index)?.as_f64().map(|beta| beta as f32);
    let standard = if betas_are_auto { &trainer.training } else { &usual };
    training.beta1 = beta(0).unwrap_or(standard.beta1);
    training.beta2 = beta(1).unwrap_or(standard.beta2);
    training.nesterov = stated.is_on("optimizer.params.nesterov")?;
    stated.neutral(&["optimizer.params.bias_correction", "optimizer.params.torch_adam", "optimizer.params.fused"]);
    stated.neutral(&[
        "optimizer.params.foreach",
        "optimizer.params.max_coeff",
        "optimizer.params.min_coeff",
        "optimizer.legacy_fusion",
    ]);
    let is_decoupled = stated.flag("optimizer.params.adam_w_mode")?.unwrap_or(true);
    // DeepSpeed's Adam decouples weight decay, as AdamW does.
    if plan.optimizer == Optimizer::Adam && training.weight_decay != 0.0 && is_decoupled {
        plan.optimizer = Optimizer::AdamW;
    }
    Ok(())
}
