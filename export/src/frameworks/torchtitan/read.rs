//! Plans from torchtitan's TOML files, of any release up to 0.2 and of our exporter.

use super::super::stated::{Account, Notation, Stated};
use super::super::{FrameworkError, ImportedPlan, Surroundings};
use super::{MODELS, READ_MODELS, SELECTIVE, STACK, UNCLIPPED};
use foretell_models::Model;
use foretell_program::{ContextMethod, Layout, Optimizer, Plan, PlanError, Recompute, Schedule, Stack, Training};
use foretell_units::DataType;
use serde_json::{Value, json};

/// Settings that change neither the time of a step nor its memory.
const NEUTRAL: [&str; 38] = [
    "job.*",
    "profiling.*",
    "profiler.*",
    "metrics.*",
    "checkpoint.*",
    "lr_scheduler.*",
    "comm.*",
    "fault_tolerance.*",
    "validation.*",
    "debug.*",
    "tokenizer.*",
    "training.steps",
    "training.dataset",
    "training.dataset_path",
    "training.data_files",
    "training.seed",
    "training.deterministic",
    "training.gc_freq",
    "training.gc_debug",
    "training.warmup_steps",
    "training.disable_cuda_graphs",
    "training.dataloader.*",
    "training.debug_moe_force_load_balance",
    "model.hf_assets_path",
    "model.tokenizer_path",
    "model.print_after_conversion",
    "model.norm_type",
    "optimizer.implementation",
    "optimizer.fused",
    "experimental.custom_import",
    "experimental.custom_args_module",
    "experimental.custom_model_path",
    "compile.components",
    "compile.backend",
    "parallelism.disable_loss_parallel",
    "parallelism.enable_loss_parallel",
    "experimental.enable_compiled_autograd",
    "memory_estimation.*",
];

/// Older names of settings, with the current ones.
const RENAMED: [(&str, &str); 22] = [
    ("training.batch_size", "training.local_batch_size"),
    ("training.data_parallel_degree", "parallelism.data_parallel_shard_degree"),
    ("training.data_parallel_shard_degree", "parallelism.data_parallel_shard_degree"),
    ("training.data_parallel_replicate_degree", "parallelism.data_parallel_replicate_degree"),
    ("training.tensor_parallel_degree", "parallelism.tensor_parallel_degree"),
    ("training.context_parallel_degree", "parallelism.context_parallel_degree"),
    ("training.pipeline_parallel_degree", "parallelism.pipeline_parallel_degree"),
    ("training.fsdp_reshard_after_forward", "parallelism.fsdp_reshard_after_forward"),
    ("training.enable_loss_parallel", "parallelism.enable_loss_parallel"),
    ("experimental.context_parallel_degree", "parallelism.context_parallel_degree"),
    ("experimental.context_parallel_rotate_method", "parallelism.context_parallel_rotate_method"),
    ("experimental.pipeline_parallel_degree", "parallelism.pipeline_parallel_degree"),
    ("experimental.pipeline_parallel_split_points", "parallelism.pipeline_parallel_split_points"),
    ("experimental.pipeline_parallel_schedule", "parallelism.pipeline_parallel_schedule"),
    ("experimental.pipeline_parallel_schedule_csv", "parallelism.pipeline_parallel_schedule_csv"),
    ("experimental.pipeline_parallel_microbatches", "parallelism.pipeline_parallel_microbatches"),
    ("experimental.pipeline_parallel_layers_per_stage", "parallelism.pipeline_parallel_layers_per_stage"),
    ("experimental.enable_async_tensor_parallel", "parallelism.enable_async_tensor_parallel"),
    ("training.compile", "compile.enable"),
    ("training.enable_compile", "compile.enable"),
    ("training.enable_cpu_offload", "training.cpu_offload"),
    ("experimental.module_fqns_per_model_part", "parallelism.module_fqns_per_model_part"),
];

/// Settings that no plan expresses.
const REFUSED: [&str; 6] = [
    "training.cpu_offload",
    "training.enable_fp8_linear",
    "parallelism.pipeline_parallel_schedule_csv",
    "activation_checkpoint.memory_budget",
    "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns",
    "experimental.custom_model",
];

pub(in super::super) fn import(text: &str, surroundings: &Surroundings<'_>) -> Result<ImportedPlan, FrameworkError> {
    let form = |reason: String| FrameworkError::Form { reason, hint: "give a TOML file of torchtitan".into() };
    let table: toml::Table = text.parse().map_err(|error: toml::de::Error| form(error.message().to_string()))?;
    if let Some((name, _)) = table.iter().find(|(_, content)| !content.is_table()) {
        return Err(form(format!("`{name}` is no section")));
    }
    if !table.contains_key("training") && !table.contains_key("parallelism") {
        return Err(form("it has neither `[training]` nor `[parallelism]`".into()));
    }
    let Value::Object(object) = json(toml::Value::Table(table)) else { return Err(form("it has no sections".into())) };
    let mut stated = Stated::new(object, Notation::Toml);
    for (older, newer) in RENAMED {
        stated.rename(older, newer)?;
    }
    stated.refuse(&REFUSED, "no plan expresses it, and it decides layout, optimizer or memory")?;
    stated.neutral(&NEUTRAL);
    stated.noted(&["parallelism.enable_async_tensor_parallel", "parallelism.context_parallel_load_balancer"]);
    if stated.is_on("compile.enable")? {
        stated.assume("`compile.enable`: kernels are those that the stack `torchtitan` is fitted to");
    }
    let (model, unknown_model) = read_model(&mut stated)?;
    let blocks = model.as_ref().and_then(Model::repeated_layers).map(|layers| layers + 2);
    let layout = read_layout(&mut stated, surroundings.ranks, blocks)?;
    let plan = read_training(&mut stated, layout, surroundings)?;
    let account = finish(stated)?;
    Ok(ImportedPlan { model, unknown_model, ..ImportedPlan::new(plan, account) })
}

/// Accounts for the remaining settings. Settings of a section that is switched off have no effect.
fn finish(mut stated: Stated) -> Result<Account, FrameworkError> {
    for (switch, rest) in [("float8.enable_float8_linear", "float8.*"), ("memory_estimation.enabled", "memory_estimation.*")] {
        if stated.has(switch) && !stated.is_on(switch)? {
            stated.neutral(&[rest]);
        }
    }
    stated.usual("training.mixed_precision_reduce", &json!("float32"));
    stated.usual("parallelism.expert_tensor_parallel_degree", &json!(1));
    stated.usual("parallelism.pipeline_parallel_first_stage_less_layers", &json!(1));
    stated.usual("parallelism.pipeline_parallel_last_stage_less_layers", &json!(1));
    stated.finish()
}

/// A TOML value as JSON. A date becomes a text.
fn json(value: toml::Value) -> Value {
    match value {
        toml::Value::Table(table) => Value::Object(table.into_iter().map(|(name, value)| (name, json(value))).collect()),
        toml::Value::Array(list) => Value::Array(list.into_iter().map(json).collect()),
        toml::Value::String(text) => Value::String(text),
        toml::Value::Integer(number) => number.into(),
        toml::Value::Float(number) => number.into(),
        toml::Value::Boolean(flag) => flag.into(),
        toml::Value::Datetime(date) => date.to_string().into(),
    }
}

/// The model, or its name if it is unknown.
fn read_model(stated: &mut Stated) -> Result<(Option<Model>, Option<String>), FrameworkError> {
    let module = stated.text("model.name")?.unwrap_or_default();
    let config = stated.text("model.config")?;
    let flavor = stated.text("model.flavor")?;
    let sequence = stated.size("training.seq_len")?;
    let is_meant = |row: &(&str, &str, &str, &str)| {
        row.1 == module && (config.as_deref() == Some(row.2) || (config.is_none() && flavor.as_deref() == Some(row.3)))
    };
    let known = MODELS.into_iter().chain(READ_MODELS).find(is_meant);
    let model = known.map(|(name, ..)| Model::named(name).map_err(PlanError::from)).transpose()?;
    let Some(model) = model else {
        let name = format!("{module} {}", config.or(flavor).unwrap_or_default());
        return Ok((None, Some(name.trim().to_string()).filter(|name| !name.is_empty())));
    };
    // torchtitan's default.
    let model = model.with_sequence(sequence.unwrap_or(2048)).unwrap_or(model);
    Ok((Some(model), None))
}

/// A degree; `None` if it is missing or -1, which means that torchtitan chooses.
fn degree(stated: &mut Stated, name: &str) -> Result<Option<usize>, FrameworkError> {
    if stated.take(name).is_some_and(|value| value == -1) {
        return Ok(None);
    }
    stated.size(name)
}

fn read_layout(stated: &mut Stated, ranks: usize, blocks: Option<usize>) -> Result<Layout, FrameworkError> {
    let mut one = |name: &str| Ok::<usize, FrameworkError>(degree(stated, name)?.unwrap_or(1));
    let tensor = one("parallelism.tensor_parallel_degree")?;
    let pipeline = one("parallelism.pipeline_parallel_degree")?;
    let context = one("parallelism.context_parallel_degree")?;
    let replicate = one("parallelism.data_parallel_replicate_degree")?;
    let experts = one("parallelism.expert_parallel_degree")?;
    let model_ranks = [tensor, pipeline, context, replicate].into_iter().try_fold(1usize, usize::checked_mul).unwrap_or(0);
    let wrong = |reason: String| FrameworkError::Form { reason, hint: "say the cluster with `--topology` and `--nodes`".into() };
    if model_ranks == 0 || !ranks.is_multiple_of(model_ranks) {
        return Err(wrong(format!("{ranks} ranks are no multiple of the degrees' product, {model_ranks}")));
    }
    let shard = degree(stated, "parallelism.data_parallel_shard_degree")?.unwrap_or(ranks / model_ranks);
    let product = model_ranks.saturating_mul(shard);
    if product != ranks {
        return Err(wrong(format!("the degrees make {product} ranks of {ranks}")));
    }
    // Context-parallel ranks shard parameters as well (`ParallelDims.fsdp_enabled`).
    let zero = match (shard.saturating_mul(context), stated.text("parallelism.fsdp_reshard_after_forward")?.as_deref()) {
        (1, _) => 0,
        (_, Some("never")) => 2,
        // By default, a pipeline does not free gathered parameters.
        (_, None | Some("default")) => {
            if pipeline > 1 {
                2
            } else {
                3
            }
        }
        (_, Some("always")) => 3,
        (_, Some(_)) => return Err(stated.unknown("parallelism.fsdp_reshard_after_forward", "policies: default, always, never")),
    };
    // Experts are distributed over the ranks that shard parameters.
    if !shard.is_multiple_of(experts) {
        return Err(FrameworkError::Form {
            reason: format!("`expert_parallel_degree = {experts}` does not divide the {shard} ranks that shard parameters"),
            hint:
                "use a degree that divides `data_parallel_shard_degree`; experts on ranks of `context` or `tensor` are not read"
                    .into(),
        });
    }
    let data = replicate * shard / experts;
    let mut layout = Layout { data, tensor, pipeline, context, expert: experts, zero, ..Layout::default() };
    layout.shard_group = Some(shard / experts).filter(|&shard| zero > 0 && shard != data);
    layout.sequence_parallel = stated.flag("parallelism.enable_sequence_parallel")?.unwrap_or(true) && tensor > 1;
    layout.context_method = match stated.text("parallelism.context_parallel_rotate_method")?.as_deref() {
        None | Some("allgather") => ContextMethod::Gather,
        Some("alltoall") => {
            if context > 1 {
                ContextMethod::Ring
            } else {
                ContextMethod::Gather
            }
        }
        Some(_) => {
            return Err(stated.unknown("parallelism.context_parallel_rotate_method", "methods: allgather, alltoall"));
        }
    };
    layout.recompute = read_recompute(stated)?;
    read_pipeline(stated, &mut layout, blocks)?;
    Ok(layout)
}

fn read_recompute(stated: &mut Stated) -> Result<Recompute, FrameworkError> {
    let option = stated.take("activation_checkpoint.selective_ac_option");
    stated.neutral(&["activation_checkpoint.preserve_rng_state", "activation_checkpoint.determinism_check"]);
    stated.neutral(&["activation_checkpoint.early_stop", "activation_checkpoint.debug"]);
    match stated.text("activation_checkpoint.mode")?.as_deref() {
        Some("none") => Ok(Recompute::None),
        Some("full") => Ok(Recompute::Full),
        None | Some("selective") => {
            match option.as_ref().map(|option| option.as_str().map_or_else(|| option.to_string(), String::from)) {
                None => Ok(Recompute::AllBut(SELECTIVE)),
                Some(option) if option == "op" => Ok(Recompute::AllBut(SELECTIVE)),
                Some(option) if option == "1" => Ok(Recompute::Full),
                Some(_) => Err(stated.unknown("activation_checkpoint.selective_ac_option", "options: op, 1")),
            }
        }
        Some(_) => Err(stated.unknown("activation_checkpoint.mode", "modes: none, selective, full")),
    }
}

fn read_pipeline(stated: &mut Stated, layout: &mut Layout, blocks: Option<usize>) -> Result<(), FrameworkError> {
    const SCHEDULE: &str = "parallelism.pipeline_parallel_schedule";
    let schedule = stated.text(SCHEDULE)?;
    let per_stage = stated.size("parallelism.pipeline_parallel_layers_per_stage")?;
    let parts = read_parts(stated)?;
    let points = stated.list("parallelism.pipeline_parallel_split_points")?;
    if layout.pipeline == 1 {
        return Ok(());
    }
    layout.cuts = match (parts, points.is_empty()) {
        (Some(parts), _) => Some(parts),
        (None, true) => None,
        (None, false) => Some(split(stated, &points, blocks)?),
    };
    layout.schedule = match schedule.as_deref() {
        Some("GPipe") => Schedule::Gpipe,
        Some("ZBVZeroBubble") => Schedule::ZeroBubbleV,
        None | Some("1F1B") => Schedule::OneForwardOneBackward,
        Some("Interleaved1F1B") => Schedule::Interleaved,
        Some(_) => return Err(stated.unknown(SCHEDULE, "schedules: 1F1B, Interleaved1F1B, GPipe, ZBVZeroBubble")),
    };
    let from_layers = per_stage.and_then(|per_stage| Some(blocks?.div_ceil(per_stage)));
    let chunks = layout.cuts.as_ref().map(Vec::len).or(from_layers);
    // By default, torchtitan gives each stage two chunks under a schedule of several chunks.
    let usual = *layout.schedule.chunks().start();
    let Some(chunks) = chunks else {
        layout.virtual_stages = usual;
        return Ok(());
    };
    if !chunks.is_multiple_of(layout.pipeline) {
        return Err(FrameworkError::Form {
            reason: format!("{chunks} chunks of layers cannot be divided by {} stages", layout.pipeline),
            hint: "choose numbers that divide, as torchtitan demands".into(),
        });
    }
    layout.virtual_stages = chunks / layout.pipeline;
    Ok(())
}

/// The blocks of each chunk, from lists of modules. The final norm and the head are one block.
fn read_parts(stated: &mut Stated) -> Result<Option<Vec<usize>>, FrameworkError> {
    const NAME: &str = "parallelism.module_fqns_per_model_part";
    let lists = stated.list(NAME)?;
    if lists.is_empty() {
        return Ok(None);
    }
    let is_block = |module: &&Value| module.as_str() != Some("norm");
    let blocks = lists.iter().map(|list| Some(list.as_array()?.iter().filter(is_block).count()));
    blocks.collect::<Option<Vec<usize>>>().map(Some).ok_or_else(|| stated.wrong(NAME, "a list of lists"))
}

/// The blocks of each chunk, from the layers that chunks begin with.
fn split(stated: &Stated, points: &[Value], blocks: Option<usize>) -> Result<Vec<usize>, FrameworkError> {
    const NAME: &str = "parallelism.pipeline_parallel_split_points";
    let layer = |point: &Value| point.as_str()?.strip_prefix("layers.")?.parse::<usize>().ok();
    let starts: Option<Vec<usize>> = points.iter().map(layer).collect();
    let starts = starts.ok_or_else(|| stated.wrong(NAME, "a list of layers, such as `layers.8`"))?;
    let Some(blocks) = blocks else { return Err(stated.wrong(NAME, "readable without the model, which the file does not say")) };
    let edges: Vec<usize> = [0].into_iter().chain(starts.iter().map(|start| start + 1)).chain([blocks]).collect();
    let sizes: Option<Vec<usize>> =
        edges.windows(2).map(|pair| pair.get(1)?.checked_sub(*pair.first()?).filter(|&size| size > 0)).collect();
    sizes.ok_or_else(|| stated.wrong(NAME, "in the order of the model's layers"))
}

fn read_training(stated: &mut Stated, layout: Layout, surroundings: &Surroundings<'_>) -> Result<Plan, FrameworkError> {
    let own = surroundings.micro_batch.filter(|_| layout.pipeline == 1);
    let local = match stated.size("training.local_batch_size")?.or(own) {
        Some(local) => local,
        None => {
            stated.assume("`micro_batch` 8: torchtitan's default of `local_batch_size`");
            8
        }
    };
    let data = layout.data.saturating_mul(layout.expert);
    let global = degree(stated, "training.global_batch_size")?.unwrap_or_else(|| local.saturating_mul(data));
    if !global.is_multiple_of(local.saturating_mul(data).max(1)) {
        return Err(FrameworkError::Form {
            reason: format!("`global_batch_size = {global}` is no multiple of {local} samples on {data} ranks of data"),
            hint: "choose a batch that divides, as torchtitan demands".into(),
        });
    }
    // Releases before 0.1 state the number of micro-batches.
    let older = stated.size("parallelism.pipeline_parallel_microbatches")?;
    let micro = stated.size("parallelism.pipeline_parallel_microbatch_size")?;
    let micro = micro.or_else(|| Some(local / older?)).unwrap_or(1).max(1);
    if layout.pipeline > 1 && !local.is_multiple_of(micro) {
        return Err(FrameworkError::Form {
            reason: format!("`local_batch_size = {local}` cannot be divided into micro-batches of {micro}"),
            hint: "choose numbers that divide, as torchtitan demands".into(),
        });
    }
    let micro_batch = if layout.pipeline > 1 { micro } else { local };
    let mut plan = Plan::new(Layout { micro_batch, ..layout }, global);
    plan.stack = Stack::new(STACK);
    plan.precision = read_precision(stated)?;
    plan.workload.updates_in_backward = stated.is_on("optimizer.early_step_in_backward")?;
    match stated.text("training.dtype")?.as_deref() {
        None | Some("float32") => {}
        Some("bfloat16") if plan.precision == DataType::Bf16 => {
            plan.workload.no_master_copy = true;
            stated.assume("`workload.no_master_copy`: the file keeps parameters in bf16 (`training.dtype`)");
        }
        Some(_) => return Err(stated.unknown("training.dtype", "formats: float32, and bfloat16 without eight-bit products")),
    }
    plan.optimizer = match stated.text("optimizer.name")?.as_deref() {
        Some("Adam") => Optimizer::Adam,
        None | Some("AdamW") => Optimizer::AdamW,
        Some(_) => return Err(stated.unknown("optimizer.name", "optimizers: Adam, AdamW")),
    };
    let mut number = |name: &str, usual: f32| Ok::<f32, FrameworkError>(stated.number(name)?.unwrap_or(usual));
    plan.training = Training {
        learning_rate: Some(number("optimizer.lr", 8e-4)?),
        beta1: number("optimizer.beta1", 0.9)?,
        beta2: number("optimizer.beta2", 0.95)?,
        epsilon: number("optimizer.eps", 1e-8)?,
        weight_decay: number("optimizer.weight_decay", 0.1)?,
        clip_norm: Some(number("training.max_norm", 1.0)?).filter(|&norm| norm < UNCLIPPED),
        ..Training::default()
    };
    Ok(plan)
}

fn read_precision(stated: &mut Stated) -> Result<DataType, FrameworkError> {
    let converters = stated.list("model.converters")?;
    let older = stated.is_on("float8.enable_float8_linear")?;
    if let Some(other) = converters.iter().find(|name| !matches!(name.as_str(), Some("float8" | "quantize.linear.float8"))) {
        return Err(FrameworkError::Form {
            reason: format!("the converter {other} of `model.converters` is not read"),
            hint: "leave it out of the file to plan the job without it; `float8` is read".into(),
        });
    }
    if older || !converters.is_empty() {
        // The stack decides how fp8 numbers are scaled and gathered.
        stated.neutral(&["float8.*", "quantize.linear.float8.*"]);
        return Ok(DataType::Fp8);
    }
    // Without a converter, these settings have no effect.
    stated.neutral(&["float8.*", "quantize.*", "mx.*"]);
    match stated.text("training.mixed_precision_param")?.as_deref() {
        Some("float32") => Ok(DataType::Fp32),
        None | Some("bfloat16") => Ok(DataType::Bf16),
        Some(_) => Err(stated.unknown("training.mixed_precision_param", "precisions: bfloat16, float32")),
    }
}
