//! Plans from Megatron-LM's arguments.

use super::super::arguments::{Spelling, flags_of};
use super::super::deepspeed::{Trainer, read_config as read_deepspeed};
use super::super::nearest::bucket_of;
use super::super::shell::{self, Started};
use super::super::stated::Stated;
use super::super::{FrameworkError, ImportedPlan, Surroundings};
use super::names::{BY_REWARDS, NEUTRAL, NEUTRAL_SWITCHES, OTHER_MODELS, REFUSED, RENAMED};
use super::read_pipeline::{impossible, read_chunks};
use super::{STACK, model, swift};
use foretell_models::NEWTON_SCHULZ_STEPS;
use foretell_program::{ContextMethod, Layout, Offload, Optimizer, Plan, Recompute, Stack, Training};
use foretell_units::DataType;
use serde_json::json;

pub(in super::super) fn import(text: &str, surroundings: &Surroundings<'_>) -> Result<ImportedPlan, FrameworkError> {
    let ranks = surroundings.ranks;
    let started = shell::launch(text, surroundings.file)?;
    check_script(&started)?;
    let script = started.script.clone();
    let mut stated = flags_of(started, ranks, Spelling::Dashes)?;
    let job = script.as_deref().and_then(swift::job);
    let unknown_model = job.map(|job| swift::translate(&mut stated, job)).transpose()?.flatten();
    // Arguments that do not describe the model state the sequence length of a sample only.
    let sequence = if job.is_some() { stated.size("seq-length")? } else { None };
    for (older, newer) in RENAMED {
        stated.rename(older, newer)?;
    }
    stated.refuse(&REFUSED, "no plan expresses it, and it decides model, layout, precision or memory")?;
    stated.refuse_with(
        &BY_REWARDS,
        "training by rewards is not planned: it has other models and passes",
        "leave out the settings of rewards and rollouts to plan the policy's training alone",
    )?;
    for switch in NEUTRAL_SWITCHES {
        stated.flag(switch)?;
    }
    stated.neutral(&NEUTRAL_SWITCHES);
    stated.noted(&["overlap-moe-expert-parallel-comm", "batch-p2p-communication", "delay-wgrad-compute", "tp-comm-overlap"]);
    // These decide something only where they differ from the default.
    for name in ["main-grads-dtype", "main-params-dtype", "exp-avg-dtype", "exp-avg-sq-dtype"] {
        stated.usual(name, &json!("fp32"));
    }
    let (model, sequence_is_stated) = model::read(&mut stated, surroundings)?;
    stated.neutral(&NEUTRAL);
    let mut layout = read_layout(&mut stated, ranks)?;
    layout.recompute = read_recompute(&mut stated)?;
    let mut plan = read_training(&mut stated, layout, surroundings)?;
    follow_deepspeed(&mut stated, &mut plan, surroundings)?;
    if model.is_some() && !sequence_is_stated {
        return Err(FrameworkError::Form {
            reason: "there is no `--seq-length`, which Megatron demands".into(),
            hint: "say the length of a sample with `--sequence`".into(),
        });
    }
    Ok(ImportedPlan { model, unknown_model, sequence, ..ImportedPlan::new(plan, stated.finish()?) })
}

/// Refuses a text without arguments of Megatron-LM's GPT, and says what it has instead.
fn check_script(started: &Started) -> Result<(), FrameworkError> {
    let name = started.script.as_deref().and_then(|path| path.rsplit('/').next()).unwrap_or_default();
    if let Some(other) = OTHER_MODELS.iter().find(|other| name.split(['_', '.', '-']).any(|word| word == **other)) {
        return Err(FrameworkError::Form {
            reason: format!(
                "`{name}` trains a model with parts ({other}) that the arguments of `pretrain_gpt.py` do not describe"
            ),
            hint:
                "describe the model in a file of its own (`foretell models show`), and use `foretell plan --stack megatron-core`"
                    .into(),
        });
    }
    // `tasks/main.py`, which every fork has.
    if let (true, Some(at)) = (name == "main.py", started.arguments.iter().position(|word| word == "--task")) {
        let task = started.arguments.get(at + 1).map(String::as_str).unwrap_or_default();
        return Err(FrameworkError::Form {
            reason: format!("`--task {task}` fine-tunes or evaluates a trained model, with another head or none"),
            hint: "plan training itself with the arguments of `pretrain_gpt.py`".into(),
        });
    }
    let is_override = |word: &&String| {
        let word = word.trim_start_matches('+');
        word.contains('=')
            && ["trainer.", "model.", "exp_manager.", "data.", "optim."].iter().any(|start| word.starts_with(start))
    };
    if let Some(first) = started.arguments.iter().find(is_override) {
        return Err(FrameworkError::Form {
            reason: format!("`{first}` changes a recipe of NeMo, whose other settings are elsewhere"),
            hint: "give the whole job as arguments of Megatron-LM (`--tensor-model-parallel-size 2 ...`), or plan it with \
                   `foretell plan --stack nemo` and `--fix tensor=2,pipeline=1`"
                .into(),
        });
    }
    if !started.arguments.is_empty() {
        return Ok(());
    }
    let reason = match (&started.foreign, started.unexpanded.first_key_value()) {
        (Some(command), _) => format!("the script starts {command}, which takes no arguments of Megatron-LM"),
        (None, Some((variable, why))) => format!("no command with arguments is known: `${variable}` {why}"),
        (None, None) => "there are no arguments of Megatron-LM".into(),
    };
    Err(FrameworkError::Form {
        reason,
        hint: "give the arguments of `pretrain_gpt.py` as the shell expands them, or a script that has them".into(),
    })
}

fn read_layout(stated: &mut Stated, ranks: usize) -> Result<Layout, FrameworkError> {
    let tensor = stated.size("tensor-model-parallel-size")?.unwrap_or(1);
    let pipeline = stated.size("pipeline-model-parallel-size")?.unwrap_or(1);
    // Megatron-DeepSpeed's name for the number of ranks that exchange parts of a sequence for
    // heads.
    let heads = stated.size("ds-sequence-parallel-size")?.filter(|&size| size > 1);
    let stated_context = stated.size("context-parallel-size")?;
    if heads.is_some() && stated_context.is_some_and(|context| context > 1) {
        let reason = "`--ds-sequence-parallel-size` beside `--context-parallel-size`".into();
        return Err(impossible(reason, "keep one of them: a plan has one axis `context`"));
    }
    let context = heads.or(stated_context).unwrap_or(1);
    let model_ranks = [tensor, pipeline, context].into_iter().try_fold(1usize, usize::checked_mul).unwrap_or(0);
    if model_ranks == 0 || !ranks.is_multiple_of(model_ranks) {
        let reason =
            format!("{ranks} ranks are no multiple of tensor x pipeline x context, which is {tensor} x {pipeline} x {context}");
        return Err(impossible(reason, "say the cluster with `--topology` and `--nodes`"));
    }
    // Without experts, the sizes of expert parallelism have no effect. A model that is named but
    // not described may have experts.
    let is_described = stated.has("num-layers") || stated.has("hidden-size");
    let has_experts = stated.has("num-experts") || !is_described;
    let expert_tensor = stated.size("expert-tensor-parallel-size")?.filter(|_| has_experts).unwrap_or(tensor);
    let experts = stated.size("expert-model-parallel-size")?.filter(|_| has_experts).unwrap_or(1);
    if experts.saturating_mul(expert_tensor) < tensor {
        let reason = format!(
            "experts on {experts} x {expert_tensor} ranks beside `tensor` {tensor}: Megatron lays them out so, and no plan does"
        );
        let hint = format!(
            "choose `--expert-model-parallel-size` and `--expert-tensor-parallel-size` whose product is {tensor} or a multiple"
        );
        return Err(FrameworkError::Form { reason, hint });
    }
    let expert = experts.saturating_mul(expert_tensor) / tensor.max(1);
    let data_ranks = ranks / model_ranks;
    if expert == 0 || experts.checked_mul(expert_tensor) != Some(expert * tensor) || !data_ranks.is_multiple_of(expert) {
        let reason = format!(
            "experts on {experts} x {expert_tensor} ranks cannot be laid out over `tensor` {tensor} and {data_ranks} ranks of data"
        );
        return Err(impossible(reason, "choose sizes with a whole number of expert groups along tensor and data"));
    }
    if let Some(all) = stated.size("num-experts")?
        && !all.is_multiple_of(experts)
    {
        let reason = format!("{all} experts cannot be divided by {experts} ranks of experts");
        return Err(impossible(reason, "choose an `--expert-model-parallel-size` that divides them, as Megatron demands"));
    }
    let data = data_ranks / expert;
    let mut layout = Layout { data, tensor, pipeline, context, expert, ..Layout::default() };
    layout.expert_tensor = Some(expert_tensor).filter(|&ranks| ranks != tensor);
    layout.sequence_parallel = stated.is_on("sequence-parallel")?;
    layout.context_method = match stated.text("cp-comm-type")?.as_deref() {
        _ if heads.is_some() => ContextMethod::AllToAll,
        Some("all_gather") => ContextMethod::Gather,
        None | Some("p2p") if context > 1 => ContextMethod::Ring,
        None | Some("p2p") => ContextMethod::Gather,
        Some(_) if context == 1 => ContextMethod::Gather,
        Some("a2a") => ContextMethod::AllToAll,
        Some(_) => return Err(stated.unknown("cp-comm-type", "methods: p2p, all_gather, a2a")),
    };
    read_sharding(stated, &mut layout)?;
    if let Some(parameters) = stated.size("ddp-bucket-size")? {
        stated.state_bucket();
        layout.bucket = bucket_of(parameters as u64);
    }
    read_chunks(stated, &mut layout)?;
    Ok(layout)
}

/// Reads what the data-parallel ranks shard, and what is kept in host memory.
fn read_sharding(stated: &mut Stated, layout: &mut Layout) -> Result<(), FrameworkError> {
    stated.rename("use-custom-fsdp", "use-megatron-fsdp")?;
    let is_optimizer_distributed = stated.is_on("use-distributed-optimizer")?;
    let has_own_fsdp = stated.is_on("use-megatron-fsdp")?;
    let has_torch_fsdp = stated.is_on("use-torch-fsdp2")?;
    let strategy = stated.text("data-parallel-sharding-strategy")?;
    layout.zero = match (has_own_fsdp, strategy.as_deref()) {
        _ if has_torch_fsdp => 3,
        (true, None | Some("no_shard")) | (false, _) => usize::from(is_optimizer_distributed),
        (true, Some("optim")) => 1,
        (true, Some("optim_grads")) => 2,
        (true, Some("optim_grads_params")) => 3,
        (true, Some(_)) => {
            let known = "strategies: no_shard, optim, optim_grads, optim_grads_params";
            return Err(stated.unknown("data-parallel-sharding-strategy", known));
        }
    };
    if let Some(instances) = stated.size("num-distributed-optimizer-instances")?.filter(|&instances| instances > 1) {
        let data = layout.data;
        if !data.is_multiple_of(instances) {
            let reason = format!("{instances} instances of the optimizer do not divide {data} ranks of data");
            return Err(impossible(reason, "choose a number that divides them"));
        }
        layout.shard_group = Some(data / instances);
    }
    if stated.is_on("optimizer-cpu-offload")? {
        layout.offload = Offload::Optimizer;
        let share = stated.number("optimizer-offload-fraction")?.unwrap_or(1.0);
        if share < 1.0 {
            return Err(stated.wrong("optimizer-offload-fraction", "1, and a plan keeps all of the state in host memory or none"));
        }
        stated.neutral(&["overlap-cpu-optimizer-d2h-h2d", "use-torch-optimizer-for-cpu-offload", "no-pin-cpu-*"]);
    }
    Ok(())
}

/// Reads what is recomputed.
fn read_recompute(stated: &mut Stated) -> Result<Recompute, FrameworkError> {
    let granularity = stated.text("recompute-granularity")?;
    let method = stated.text("recompute-method")?;
    let layers = stated.size("recompute-num-layers")?;
    let modules = stated.list("recompute-modules")?;
    // An older name of the selective granularity.
    let is_selective = stated.is_on("recompute-activations")?;
    // Names that Megatron had before `recompute-granularity`.
    let is_full = stated.is_on("checkpoint-activations")? || (granularity.is_none() && method.is_some() && !is_selective);
    if is_full && granularity.is_none() {
        let method = if stated.has("recompute-method") { method } else { Some("uniform".into()) };
        return recompute_fully(stated, method.as_deref(), layers);
    }
    match granularity.as_deref().or(is_selective.then_some("selective")) {
        None => Ok(Recompute::None),
        Some("selective") => {
            if modules.is_empty() || modules.iter().all(|module| module == "core_attn") {
                return Ok(Recompute::Selective);
            }
            Err(FrameworkError::Form {
                reason: format!("{} is read for `core_attn` alone", stated.written("recompute-modules")),
                hint: "leave the other modules out of the file to plan the job without them".into(),
            })
        }
        Some("full") => recompute_fully(stated, method.as_deref(), layers),
        Some(_) => Err(stated.unknown("recompute-granularity", "granularities: full, selective")),
    }
}

fn recompute_fully(stated: &mut Stated, method: Option<&str>, layers: Option<usize>) -> Result<Recompute, FrameworkError> {
    match method {
        Some("block") => Ok(Recompute::full_layers(vec![layers.unwrap_or(1)])),
        Some("uniform") => {
            // Megatron keeps one input for each group of layers; our groups have one layer.
            if layers.is_some_and(|layers| layers > 1) {
                stated.in_part("recompute-num-layers");
            }
            Ok(Recompute::Full)
        }
        None => Err(impossible(
            "`--recompute-granularity full` without `--recompute-method`".into(),
            "add `--recompute-method uniform` or `block`, as Megatron demands",
        )),
        Some(_) => Err(stated.unknown("recompute-method", "methods: uniform, block")),
    }
}

fn read_training(stated: &mut Stated, layout: Layout, surroundings: &Surroundings<'_>) -> Result<Plan, FrameworkError> {
    let usual = Training::default();
    let micro_batch = match stated.size("micro-batch-size")?.or(surroundings.micro_batch) {
        Some(size) => size,
        None => {
            stated.assume("`micro_batch` 1: there is no `--micro-batch-size`, which Megatron demands");
            1
        }
    };
    let replicas = layout.data.saturating_mul(layout.expert);
    let global_batch = stated.size("global-batch-size")?.unwrap_or(micro_batch.saturating_mul(replicas));
    let step = micro_batch.saturating_mul(replicas).max(1);
    if !global_batch.is_multiple_of(step) {
        let reason =
            format!("`--global-batch-size {global_batch}` is no multiple of {micro_batch} samples on {replicas} ranks of data");
        return Err(impossible(reason, "choose a batch that divides, as Megatron demands"));
    }
    if stated.has("rampup-batch-size") {
        stated.list("rampup-batch-size")?;
        stated.assume(format!("`global_batch` {global_batch}: the batch after `--rampup-batch-size`"));
    }
    let mut plan = Plan::new(Layout { micro_batch, ..layout }, global_batch);
    plan.stack = Stack::new(STACK);
    let mut training = Training { learning_rate: stated.number("lr")?, ..usual.clone() };
    // Megatron's defaults differ from ours.
    training.weight_decay = stated.number("weight-decay")?.unwrap_or(0.01);
    training.clip_norm = Some(stated.number("clip-grad")?.unwrap_or(1.0f32)).filter(|&norm| norm > 0.0);
    plan.optimizer = match stated.text("optimizer")?.as_deref() {
        Some("sgd") => Optimizer::Sgd,
        Some("muon" | "dist_muon") => Optimizer::Muon,
        Some(other) if other != "adam" => return Err(stated.unknown("optimizer", "optimizers: adam, muon, sgd")),
        _ if training.weight_decay == 0.0 => Optimizer::Adam,
        _ => Optimizer::AdamW,
    };
    stated.neutral(&["decoupled-weight-decay", "no-decoupled-weight-decay"]);
    let momentum = if plan.optimizer == Optimizer::Muon { "muon-momentum" } else { "sgd-momentum" };
    training.momentum = stated.number(momentum)?.unwrap_or(plan.optimizer.usual_momentum());
    if plan.optimizer == Optimizer::Muon {
        read_muon(stated)?;
    } else {
        stated.neutral(&["muon-*"]);
    }
    training.beta1 = stated.number("adam-beta1")?.unwrap_or(usual.beta1);
    training.beta2 = stated.number("adam-beta2")?.unwrap_or(usual.beta2);
    training.epsilon = stated.number("adam-eps")?.unwrap_or(usual.epsilon);
    training.loss_scale.initial = stated.number("initial-loss-scale")?.unwrap_or(usual.loss_scale.initial);
    let window = stated.size("loss-scale-window")?.map(u32::try_from).transpose();
    let window = window.map_err(|_| stated.wrong("loss-scale-window", "a number of steps below 4294967296"))?;
    training.loss_scale.growth_interval = window.unwrap_or(usual.loss_scale.growth_interval);
    stated.neutral(&["loss-scale", "min-loss-scale"]);
    plan.training = training;
    plan.precision = read_precision(stated)?;
    Ok(plan)
}

/// Reads the configuration with which Megatron-DeepSpeed starts DeepSpeed's engine: what ZeRO
/// shards, and what is kept in host memory.
fn follow_deepspeed(stated: &mut Stated, plan: &mut Plan, surroundings: &Surroundings<'_>) -> Result<(), FrameworkError> {
    if !stated.is_on("deepspeed")? {
        stated.refuse_with(
            &["zero-stage"],
            "the stage of ZeRO is that of Megatron-DeepSpeed's engine, which `--deepspeed` starts",
            "add `--deepspeed --deepspeed_config FILE`, or write `--use-distributed-optimizer` for stage 1 and \
             `--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads` (or `optim_grads_params`) for 2 (or 3) of Megatron-Core",
        )?;
        stated.neutral(&["deepspeed-config"]);
        return Ok(());
    }
    let missing = |reason: String| FrameworkError::Form {
        reason: format!("{reason}, and it says what ZeRO shards"),
        hint:
            "put it there, and name it with `--deepspeed_config`; or leave `--deepspeed` out to plan the job with Megatron's own \
               optimizer"
                .into(),
    };
    let Some(path) = stated.text("deepspeed-config")? else {
        return Err(missing("`--deepspeed` without `--deepspeed_config`: the configuration is not known".into()));
    };
    let Some(text) = (surroundings.file)(&path) else {
        return Err(missing(format!("`--deepspeed_config {path}`: there is no such file beside this one")));
    };
    let mut section = Stated::parse(&text, "DeepSpeed's JSON configuration")?;
    let has_precision = ["bf16.enabled", "fp16.enabled", "bfloat16.enabled"].iter().any(|name| section.has(name));
    let layout = &plan.layout;
    let replicas = layout.data.saturating_mul(layout.expert);
    let trainer = Trainer {
        micro_batch: (layout.micro_batch, "Megatron's"),
        accumulation: plan.global_batch / layout.micro_batch.saturating_mul(replicas).max(1),
        precision: (plan.precision, "Megatron's"),
        optimizer: plan.optimizer,
        training: plan.training.clone(),
        context: (1, ContextMethod::Gather),
        is_stated: true,
    };
    let followed = read_deepspeed(&mut section, &Surroundings { ranks: replicas, ..*surroundings }, &trainer)?;
    let differ = |what: &str| FrameworkError::Form {
        reason: format!("the arguments and `{path}` differ in {what}"),
        hint: "write the same in both, or leave it out of DeepSpeed's configuration".into(),
    };
    if followed.layout.tensor > 1 || followed.layout.context > 1 {
        return Err(differ("the ranks that share a layer or a sequence"));
    }
    if (followed.global_batch, followed.layout.micro_batch) != (plan.global_batch, plan.layout.micro_batch) {
        return Err(differ("their batches"));
    }
    if has_precision && followed.precision != plan.precision && plan.precision != DataType::Fp8 {
        return Err(differ("their precision"));
    }
    let layout = &mut plan.layout;
    (layout.zero, layout.offload) = (followed.layout.zero, followed.layout.offload);
    layout.shard_group = followed.layout.shard_group;
    let account = section.finish()?;
    if account.states_bucket {
        layout.bucket = followed.layout.bucket;
    }
    (plan.optimizer, plan.training) = (followed.optimizer, followed.training);
    stated.absorb(account);
    // The file's stage has precedence, and without a pipeline `no-pipeline-parallel` changes
    // nothing.
    stated.neutral(&["zero-stage"]);
    if plan.layout.pipeline == 1 {
        stated.neutral(&["no-pipeline-parallel"]);
    }
    Ok(())
}

fn read_precision(stated: &mut Stated) -> Result<DataType, FrameworkError> {
    let is_bf16 = stated.is_on("bf16")?;
    let is_fp16 = stated.is_on("fp16")?;
    if is_bf16 && is_fp16 {
        return Err(impossible("`--bf16` beside `--fp16`".into(), "keep one of them, as Megatron demands"));
    }
    // Older names of fp8 formats.
    let is_older = stated.is_on("fp8-hybrid")? | stated.is_on("fp8-e4m3")?;
    let format = stated.text("fp8-format")?;
    let has_eight_bits = is_older || format.is_some_and(|format| matches!(format.as_str(), "hybrid" | "e4m3"));
    if has_eight_bits {
        // The stack decides how fp8 numbers are scaled.
        stated.neutral(&["fp8-recipe", "fp8-margin", "fp8-interval", "fp8-amax-*", "no-fp8-wgrad"]);
    }
    Ok(match (is_bf16, is_fp16) {
        _ if has_eight_bits => DataType::Fp8,
        (true, _) => DataType::Bf16,
        (_, true) => DataType::Fp16,
        _ => {
            stated.assume("`precision` fp32: there is neither `--bf16` nor `--fp16`");
            DataType::Fp32
        }
    })
}

/// Reads Megatron's settings of Muon: refuses values that no plan expresses, and notes others that
/// differ from the plan.
fn read_muon(stated: &mut Stated) -> Result<(), FrameworkError> {
    if stated.size("muon-num-ns-steps")?.is_some_and(|steps| steps != NEWTON_SCHULZ_STEPS) {
        return Err(stated.wrong("muon-num-ns-steps", "5: a plan's Muon makes five steps of Newton and Schulz"));
    }
    if stated.text("muon-scalar-optimizer")?.is_some_and(|other| other != "adam") {
        return Err(stated.wrong("muon-scalar-optimizer", "adam, which a plan's Muon leaves other parameters to"));
    }
    let mode = stated.text("muon-tp-mode")?.unwrap_or_else(|| "blockwise".into());
    if mode != "duplicated" {
        stated.assume(format!("`muon-tp-mode` {mode}: the plan gathers whole matrices, as `duplicated` does"));
    }
    let scale = stated.text("muon-scale-mode")?.unwrap_or_else(|| "spectral".into());
    let extra: f32 = stated.number("muon-extra-scale-factor")?.unwrap_or(1.0);
    if scale != "spectral" || extra != 0.2 {
        stated.assume(format!(
            "updates are as long as AdamW's (`muon-scale-mode` spectral, `muon-extra-scale-factor` 0.2), and not of {scale}, {extra}"
        ));
    }
    // These do not change the time of a step, or its memory.
    stated.neutral(&["muon-nesterov", "muon-use-nesterov", "muon-no-split-qkv", "muon-split-qkv", "muon-fp32-matmul-prec"]);
    stated.neutral(&["muon-coefficient-type", "use-layer-wise-distributed-optimizer", "sgd-momentum"]);
    Ok(())
}
