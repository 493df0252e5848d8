//! torchtune's recipes: YAML files whose components are named by Python paths. It must not know the
//! other frameworks.

mod launch;
mod read;
mod recipe;

pub(super) use read::import;

use super::nearest::{Nearest, usual_training};
use super::stated::decimal;
use super::{FrameworkError, Job, JobFiles};
use foretell_models::Model;
use foretell_program::{Lora, LossKernel, MomentFormat, Offload, Optimizer, Plan, PlannedWorkload, Recompute};
use foretell_units::DataType;
use recipe::Recipe;
use serde_json::Value;

const VERSION: &str = "torchtune 0.6.1";

const STACK: &str = "torchtune";

const FRAMEWORK: &str = "torchtune";

/// The schedule of the learning rate in torchtune's recipes for DPO.
const SCHEDULE: &str = "lr_scheduler:\n  _component_: torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup\n  \
                        num_warmup_steps: 20\n";

/// Models of our zoo with torchtune's names: the package, the builder, and the tokenizer.
const MODELS: [(&str, &str, &str, &str); 7] = [
    ("llama3-8b", "llama3_1", "llama3_1_8b", "llama3.llama3_tokenizer"),
    ("llama3-70b", "llama3_1", "llama3_1_70b", "llama3.llama3_tokenizer"),
    ("llama3-405b", "llama3_1", "llama3_1_405b", "llama3.llama3_tokenizer"),
    ("llama2-7b", "llama2", "llama2_7b", "llama2.llama2_tokenizer"),
    ("llama2-13b", "llama2", "llama2_13b", "llama2.llama2_tokenizer"),
    ("llama2-70b", "llama2", "llama2_70b", "llama2.llama2_tokenizer"),
    ("mistral-7b", "mistral", "mistral_7b", "mistral.mistral_tokenizer"),
];

/// Names of modules with adapters in a plan, with torchtune's names: those of attention, of the
/// feed-forward network, and the head.
const ATTENTION: [(&str, &str); 4] =
    [("q_proj", "q_proj"), ("k_proj", "k_proj"), ("v_proj", "v_proj"), ("o_proj", "output_proj")];
const FEED_FORWARD: [&str; 3] = ["gate_proj", "up_proj", "down_proj"];
const HEAD: &str = "lm_head";

/// The modules with adapters.
struct Targets {
    attention: Vec<&'static str>,
    feed_forward: bool,
    head: bool,
}

impl Targets {
    fn of(lora: &Lora) -> Option<Self> {
        if !lora.also_train.is_empty() {
            return None;
        }
        let patterns = serde_json::to_value(&lora.targets).ok()?;
        let names: Vec<&str> = patterns.as_array()?.iter().filter_map(Value::as_str).collect();
        if names == ["*"] {
            return Some(Self { attention: ATTENTION.map(|(_, own)| own).to_vec(), feed_forward: true, head: false });
        }
        let has = |name: &str| names.iter().any(|pattern| pattern.strip_prefix('*') == Some(name));
        let attention: Vec<&'static str> = ATTENTION.iter().filter(|(name, _)| has(name)).map(|(_, own)| *own).collect();
        let parts = FEED_FORWARD.into_iter().filter(|name| has(name)).count();
        let known = attention.len() + parts + usize::from(has(HEAD));
        let is_whole = known == names.len() && !attention.is_empty() && [0, FEED_FORWARD.len()].contains(&parts);
        is_whole.then(|| Self { attention, feed_forward: parts > 0, head: has(HEAD) })
    }
}

pub(super) fn export(job: &Job<'_>) -> Result<JobFiles, FrameworkError> {
    let (package, builder, tokenizer) = find_model(job.model)?;
    recipe::check(job.plan.workload.preference)?;
    let (plan, lora, workload) = taken_out(job.plan);
    let mut nearest = Nearest::new(&plan, FRAMEWORK, STACK)?;
    restrict(&mut nearest)?;
    put_method(&mut nearest, lora, workload)?;
    nearest.state_fine_tuning_rate(job.plan.training.learning_rate);
    let Nearest { plan, differences, .. } = nearest;
    let sequence = job.model.sample().tokens().map(|(length, _)| length);
    let text = text(&plan, [package, builder, tokenizer], sequence)?;
    let run = Recipe::of(&plan, job.ranks()?).script(job)?;
    Ok(JobFiles {
        version: VERSION,
        files: vec![("torchtune.yaml".into(), text), ("run.sh".into(), run)],
        command: "bash run.sh MODEL_DIR".into(),
        plan,
        differences,
    })
}

/// Separates a plan into a plan without the method, the adapters, and the workload.
fn taken_out(plan: &Plan) -> (Plan, Option<Lora>, PlannedWorkload) {
    let mut rest = plan.clone();
    let lora = rest.training.lora.take();
    let usual = PlannedWorkload::default();
    let workload = &mut rest.workload;
    (workload.base_bits, workload.adapter_dropout) = (usual.base_bits, usual.adapter_dropout);
    (workload.attention, workload.loss) = (usual.attention, usual.loss);
    (workload.no_master_copy, workload.moments) = (usual.no_master_copy, usual.moments);
    (workload.paged_moments, workload.updates_in_backward) = (usual.paged_moments, usual.updates_in_backward);
    workload.preference = None;
    (rest, lora, plan.workload.clone())
}

/// Finds torchtune's names of a model, of any sequence length.
fn find_model(model: &Model) -> Result<(&'static str, &'static str, &'static str), FrameworkError> {
    let sequence = model.sample().tokens().map(|(sequence, _)| sequence);
    let is_same = |name: &str| {
        let known = Model::named(name).ok();
        known.zip(sequence).is_some_and(|(known, sequence)| known.with_sequence(sequence).as_ref() == Some(model))
    };
    let found = MODELS.into_iter().find(|(name, ..)| is_same(name));
    found.map(|(_, package, builder, tokenizer)| (package, builder, tokenizer)).ok_or_else(|| FrameworkError::Model {
        framework: FRAMEWORK,
        reason: format!("of our zoo its builders have {}", MODELS.map(|(name, ..)| name).join(", ")),
        hint: "use one of these models, or `--to trl` for others",
    })
}

/// Replaces settings that torchtune lacks.
fn restrict(nearest: &mut Nearest) -> Result<(), FrameworkError> {
    nearest.only_data_parallel()?;
    let ranks = nearest.plan.layout.data;
    let zero = nearest.plan.layout.zero;
    if ranks > 1 && zero < 2 {
        nearest.replace(|plan| &mut plan.layout.zero, 3, "the recipes for several devices shard parameters: `zero: 3`");
    } else if ranks == 1 {
        nearest.replace(|plan| &mut plan.layout.zero, 0, "one device has nothing to shard");
    }
    nearest.replace(|plan| &mut plan.layout.shard_group, None, "all ranks of `data` are one shard group");
    nearest.coarse_recompute(&[Recompute::None, Recompute::Full]);
    let offload = nearest.plan.layout.offload;
    let allowed = match offload {
        Offload::State if nearest.plan.layout.zero == 3 => Offload::State,
        Offload::Activations | Offload::Both if nearest.plan.layout.recompute == Recompute::Full => Offload::Activations,
        _ => Offload::None,
    };
    nearest.replace(
        |plan| &mut plan.layout.offload,
        allowed,
        "the recipes offload parameters with the optimizer's state, or activations of recomputed blocks",
    );
    match nearest.plan.precision {
        DataType::Fp32 | DataType::Tf32 => nearest.replace(|plan| &mut plan.precision, DataType::Fp32, "the precision is fp32"),
        _ => nearest.replace(|plan| &mut plan.precision, DataType::Bf16, "the precision is bf16"),
    }
    nearest.usual_bucket();
    usual_training(&mut nearest.plan);
    Ok(())
}

/// Puts adapters, kernels and preferences into the plan, as far as recipes express them.
fn put_method(nearest: &mut Nearest, lora: Option<Lora>, workload: PlannedWorkload) -> Result<(), FrameworkError> {
    let lora = lora.filter(|lora| {
        let is_known = Targets::of(lora).is_some();
        if !is_known {
            nearest
                .differences
                .push("adapters are left out: torchtune's are at all parts of attention or of the feed-forward network".into());
        }
        is_known
    });
    let has_adapters = lora.is_some();
    let is_narrow = nearest.plan.precision == DataType::Bf16;
    let plan = &mut nearest.plan;
    plan.training.lora = lora;
    plan.workload.preference = workload.preference;
    plan.workload.base_bits = workload.base_bits.filter(|_| has_adapters);
    plan.workload.adapter_dropout = workload.adapter_dropout && has_adapters;
    plan.workload.loss = workload.loss;
    plan.workload.moments = workload.moments;
    plan.workload.no_master_copy = is_narrow;
    if has_adapters && workload.base_bits == Some(8) {
        nearest.replace(|plan| &mut plan.workload.base_bits, Some(4), "quantised weights have four bits");
    }
    if workload.no_master_copy != is_narrow {
        nearest.differences.push("parameters are kept in the format in which they are trained, without a wider copy".into());
    }
    if workload.attention.is_some() {
        nearest.differences.push("attention is PyTorch's own".into());
    }
    if workload.preference.is_some() {
        nearest.replace(|plan| &mut plan.workload.loss, LossKernel::Plain, "the loss of DPO takes all logits at once");
        if has_adapters {
            nearest.replace(|plan| &mut plan.training.clip_norm, None, "the recipes of DPO with adapters do not clip gradients");
        }
    }
    if nearest.plan.workload.loss == LossKernel::Liger {
        nearest.replace(|plan| &mut plan.workload.loss, LossKernel::Chunked, "the loss is in chunks of the sequence");
    }
    if matches!(workload.moments, MomentFormat::Half | MomentFormat::Factored) || nearest.plan.optimizer == Optimizer::Sgd {
        nearest.replace(|plan| &mut plan.workload.moments, MomentFormat::Single, "the optimizer's moments are in its own format");
    }
    let is_paged = workload.paged_moments && nearest.plan.workload.moments == MomentFormat::EightBit;
    let plan = &nearest.plan;
    // Recipes that update in the backward pass refuse to accumulate and to clip.
    let updates =
        workload.updates_in_backward && !has_adapters && plan.micro_batches()? == 1 && plan.training.clip_norm.is_none();
    (nearest.plan.workload.paged_moments, nearest.plan.workload.updates_in_backward) = (is_paged, updates);
    if workload.paged_moments != is_paged {
        nearest.differences.push("the optimizer's moments stay in device memory".into());
    }
    if workload.updates_in_backward != updates {
        nearest.differences.push("parameters are updated after the backward pass".into());
    }
    Ok(())
}

/// The text of a recipe.
fn text(plan: &Plan, [package, builder, tokenizer]: [&str; 3], sequence: Option<usize>) -> Result<String, FrameworkError> {
    let layout = &plan.layout;
    let number = |number: f32| match decimal(number) {
        // PyYAML reads `5e-5` as text.
        Value::Number(number) => number.as_f64().map_or_else(|| number.to_string(), |number| format!("{number}")),
        other => other.to_string(),
    };
    let method = match (&plan.training.lora, plan.workload.base_bits) {
        (None, _) => "",
        (Some(_), None) => "lora_",
        (Some(_), Some(_)) => "qlora_",
    };
    let mut model = format!("model:\n  _component_: torchtune.models.{package}.{method}{builder}\n");
    if let Some((lora, targets)) = plan.training.lora.as_ref().and_then(|lora| Some((lora, Targets::of(lora)?))) {
        model.push_str(&format!(
            "  lora_attn_modules: [{}]\n  apply_lora_to_mlp: {}\n  apply_lora_to_output: {}\n  lora_rank: {}\n  lora_alpha: {}\n  \
             lora_dropout: {}\n",
            targets.attention.join(", "),
            targets.feed_forward,
            targets.head,
            lora.rank,
            lora.alpha,
            if plan.workload.adapter_dropout { 0.05 } else { 0.0 },
        ));
    }
    let training = &plan.training;
    let optimizer = match (plan.optimizer, plan.workload.moments) {
        (Optimizer::Sgd, _) => format!(
            "torch.optim.SGD\n  lr: {}\n  momentum: {}\n  nesterov: {}\n  weight_decay: {}\n",
            number(plan.learning_rate()),
            number(training.momentum),
            training.nesterov,
            number(training.weight_decay)
        ),
        (kind, moments) => {
            let component = match (kind, moments) {
                (_, MomentFormat::EightBit) if plan.workload.paged_moments => "bitsandbytes.optim.PagedAdamW8bit\n",
                (_, MomentFormat::EightBit) => "bitsandbytes.optim.AdamW8bit\n",
                (Optimizer::AdamW, _) => "torch.optim.AdamW\n  fused: true\n",
                _ => "torch.optim.Adam\n  fused: true\n",
            };
            format!(
                "{component}  lr: {}\n  betas: [{}, {}]\n  eps: {}\n  weight_decay: {}\n",
                number(plan.learning_rate()),
                number(training.beta1),
                number(training.beta2),
                number(training.epsilon),
                number(training.weight_decay)
            )
        }
    };
    let is_on_preferences = plan.workload.preference.is_some();
    let loss = match plan.workload.loss {
        _ if is_on_preferences => "torchtune.rlhf.loss.DPOLoss",
        LossKernel::Plain => "torch.nn.CrossEntropyLoss",
        LossKernel::Chunked => "torchtune.modules.loss.CEWithChunkedOutputLoss",
        LossKernel::Liger => unreachable!("invariant: `restrict` has replaced it"),
    };
    let dataset = match is_on_preferences {
        true => "torchtune.datasets.stack_exchange_paired_dataset",
        false => "torchtune.datasets.alpaca_dataset\n  packed: true",
    };
    let checkpoint = format!(
        "  _component_: torchtune.training.FullModelHFCheckpointer\n  checkpoint_dir: ${{model_dir}}\n  checkpoint_files:\n    \
         filename_format: model-{{}}-of-{{}}.safetensors\n    max_filename: \"00004\"\n  output_dir: ${{output_dir}}\n  model_type: {}\n",
        if package.starts_with("mistral") {
            "MISTRAL"
        } else if package.starts_with("llama3") {
            "LLAMA3"
        } else {
            "LLAMA2"
        }
    );
    let of_preferences = match (is_on_preferences, &plan.training.lora) {
        (false, _) => String::new(),
        // The recipes for DPO require a schedule. With adapters, their reference is the model
        // without them.
        (true, Some(_)) => SCHEDULE.into(),
        (true, None) => format!("{SCHEDULE}# The reference: a frozen copy of the model.\nref_checkpointer:\n{checkpoint}"),
    };
    let updates = if plan.workload.updates_in_backward { "optimizer_in_bwd: true\n" } else { "" };
    let clip = training.clip_norm.map_or_else(|| "null".into(), number);
    let sequence = sequence.map_or_else(|| "null".into(), |length| length.to_string());
    Ok(format!(
        "# {VERSION}\nmodel_dir: /path/to/model\noutput_dir: output\n{model}\ntokenizer:\n  _component_: torchtune.models.{tokenizer}\n  \
         path: ${{model_dir}}/tokenizer.model\n  max_seq_len: {sequence}\ncheckpointer:\n{checkpoint}{of_preferences}\
         resume_from_checkpoint: false\ndataset:\n  _component_: {dataset}\nseed: null\nshuffle: true\n\
         batch_size: {}\ngradient_accumulation_steps: {}\noptimizer:\n  _component_: {optimizer}loss:\n  _component_: {loss}\n\
         clip_grad_norm: {clip}\nfsdp_reshard_after_forward: {}\nfsdp_cpu_offload: {}\nenable_activation_checkpointing: {}\n\
         enable_activation_offloading: {}\ncompile: false\nepochs: 1\nmax_steps_per_epoch: 50\ndevice: cuda\ndtype: {}\nmetric_logger:\n  \
         _component_: torchtune.training.metric_logging.DiskLogger\n  log_dir: ${{output_dir}}/logs\nlog_every_n_steps: 1\n\
         log_peak_memory_stats: true\n{updates}",
        layout.micro_batch,
        plan.micro_batches()?,
        layout.zero != 2,
        layout.offload == Offload::State,
        layout.recompute == Recompute::Full,
        layout.offload == Offload::Activations,
        if plan.precision == DataType::Fp32 { "fp32" } else { "bf16" },
    ))
}
