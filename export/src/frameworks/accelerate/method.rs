//! What a fine-tuning job trains and with which kernels, as the settings that TRL's scripts add to
//! `TrainingArguments`.

use super::super::nearest::Nearest;
use foretell_program::{AttentionKernel, Lora, LossKernel, MomentFormat, NamePatterns, Optimizer, Plan, PlannedWorkload};
use serde_json::{Map, Value, json};

/// The part of a plan that [`put_back`] writes.
#[derive(Clone, Debug)]
pub(in super::super) struct Method {
    lora: Option<Lora>,
    workload: PlannedWorkload,
}

/// Separates a plan into a plan without the method, and the method.
pub(in super::super) fn taken_out(plan: &Plan) -> (Plan, Method) {
    let mut rest = plan.clone();
    let method = Method { lora: rest.training.lora.take(), workload: plan.workload.clone() };
    let usual = PlannedWorkload::default();
    let workload = &mut rest.workload;
    (workload.base_bits, workload.adapter_dropout) = (usual.base_bits, usual.adapter_dropout);
    (workload.attention, workload.loss) = (usual.attention, usual.loss);
    (workload.no_master_copy, workload.moments) = (usual.no_master_copy, usual.moments);
    workload.paged_moments = usual.paged_moments;
    (rest, method)
}

/// Puts the method back into the nearest plan. Records each part that the settings cannot express
/// as a difference.
pub(in super::super) fn put_back(method: Method, nearest: &mut Nearest) {
    let Method { lora, workload } = method;
    let lora = lora.filter(|lora| {
        let is_named = names_of(&lora.targets, &["*"], &[""]).is_some() && names_of(&lora.also_train, &["*"], &["*"]).is_some();
        if !is_named {
            nearest.differences.push("adapters are left out: their targets are no names of modules".into());
        }
        is_named
    });
    let has_adapters = lora.is_some();
    let plan = &mut nearest.plan;
    plan.training.lora = lora;
    plan.workload.base_bits = workload.base_bits.filter(|_| has_adapters);
    plan.workload.adapter_dropout = workload.adapter_dropout && has_adapters;
    plan.workload.loss = workload.loss;
    // PyTorch's own kernel is the libraries' default.
    plan.workload.attention = workload.attention.filter(|kernel| *kernel != AttentionKernel::Sdpa);
    plan.workload.moments = workload.moments;
    if workload.moments == MomentFormat::Half || (workload.moments != MomentFormat::Single && plan.optimizer == Optimizer::Sgd) {
        nearest.plan.workload.moments = MomentFormat::Single;
        nearest.differences.push("the optimizer's moments are in single precision".into());
    }
    // Of the paged optimizers, only the one of eight bits can be written.
    let is_paged = workload.paged_moments && nearest.plan.workload.moments == MomentFormat::EightBit;
    nearest.plan.workload.paged_moments = is_paged;
    if workload.paged_moments != is_paged {
        nearest.differences.push("the optimizer's moments stay in device memory".into());
    }
    let is_wide = nearest.plan.layout.zero > 0 || has_adapters;
    nearest.plan.workload.no_master_copy = workload.no_master_copy && !is_wide;
    if workload.no_master_copy && is_wide {
        nearest.differences.push("parameters that are trained are kept in single precision, as FSDP and peft widen them".into());
    }
}

/// The names within patterns that start with one of `begins` and end with one of `ends`. `None` if
/// a pattern has another form.
fn names_of(patterns: &NamePatterns, begins: &[&str], ends: &[&str]) -> Option<Vec<String>> {
    let Value::Array(patterns) = serde_json::to_value(patterns).ok()? else { return None };
    let name = |pattern: &Value| {
        let pattern = pattern.as_str()?;
        if pattern == "*" {
            return Some("all-linear".to_string());
        }
        let rest = begins.iter().find_map(|start| pattern.strip_prefix(start))?;
        let rest = ends.iter().find_map(|end| rest.strip_suffix(end))?;
        rest.chars().all(|letter| letter.is_ascii_alphanumeric() || "_-.".contains(letter)).then(|| rest.to_string())
    };
    patterns.iter().map(name).collect()
}

/// The settings of a plan's method.
pub(super) fn settings(plan: &Plan) -> Map<String, Value> {
    let mut settings = Map::new();
    let mut set = |name: &str, value: Value| _ = settings.insert(name.into(), value);
    let workload = &plan.workload;
    if let Some(lora) = &plan.training.lora {
        set("use_peft", json!(true));
        set("lora_r", json!(lora.rank));
        set("lora_alpha", json!(lora.alpha));
        set("lora_dropout", json!(if workload.adapter_dropout { 0.05 } else { 0.0 }));
        let targets = names_of(&lora.targets, &["*"], &[""]).unwrap_or_default();
        // peft accepts this word alone, and not within a list.
        let is_all = targets.iter().any(|name| name == "all-linear");
        set("lora_target_modules", if is_all { json!("all-linear") } else { json!(targets) });
        if !lora.also_train.is_empty() {
            set("lora_modules_to_save", json!(names_of(&lora.also_train, &["*"], &["*"]).unwrap_or_default()));
        }
        match workload.base_bits {
            None => {}
            Some(8) => set("load_in_8bit", json!(true)),
            Some(_) => set("load_in_4bit", json!(true)),
        }
    }
    if workload.no_master_copy {
        set("dtype", json!("bfloat16"));
    }
    match workload.loss {
        LossKernel::Plain => {}
        LossKernel::Chunked => set("loss_type", json!("chunked_nll")),
        LossKernel::Liger => set("use_liger_kernel", json!(true)),
    }
    match workload.attention {
        None | Some(AttentionKernel::Sdpa) => {}
        Some(AttentionKernel::Flash) => set("attn_implementation", json!("flash_attention_2")),
        Some(AttentionKernel::Eager) => set("attn_implementation", json!("eager")),
    }
    settings
}
