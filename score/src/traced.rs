//! Predicts rows of frameworks that were traced: their steps follow from operator tables instead of
//! a stack's profile.
//!
//! A row is traced if the library has a table of its framework, architecture and settings, and if
//! its ranks are data-parallel. All other rows use the profile of their stack.

use crate::names::{has_word, loss, trains_adapters};
use crate::prediction::StepPrediction;
use crate::row::Row;
use crate::run::Run;
use crate::traced_prediction::TracedPrediction;
use foretell_models::Model;
use foretell_program::traced::TracedPlan;
use foretell_program::{AttentionKernel, Lora, LossKernel, MomentFormat, NamePatterns, Optimizer, Plan, PlannedWorkload};
use foretell_simulator::gpu::ProductFormat;
use foretell_simulator::gpu::traced::TracedTime;
use foretell_simulator::{memory_within, repeated_time};
use foretell_units::DataType;
use std::collections::BTreeMap;

/// Architectures of the library by words of a model's name. The first match is used.
const ARCHITECTURES: [(&str, &str); 19] = [
    ("santacoder", "gpt_bigcode"),
    ("baichuan", ""),
    ("mixtral", "mixtral"),
    ("qwen3-30b", "qwen3_moe"),
    ("qwen3-235b", "qwen3_moe"),
    ("qwen3", "qwen3"),
    ("qwen2", "qwen2"),
    ("qwen1.5", "qwen2"),
    ("qwen", "qwen2"),
    ("mistral", "mistral"),
    ("granite", "granite"),
    ("powerlm", "granite"),
    ("llama", "llama"),
    ("tinyllama", "llama"),
    ("vicuna", "llama"),
    ("gpt2", "gpt2"),
    ("gpt-2", "gpt2"),
    ("bert", "bert"),
    ("phi-3", "phi3"),
];

/// Words of frameworks that run Hugging Face's models. `litgpt` has its own models, with the same
/// operators as Hugging Face's Llama.
const HUGGING_FACE: [&str; 11] = [
    "hugging face",
    "hf trainer",
    "trl",
    "transformers",
    "accelerate",
    "llama-recipes",
    "llama-factory",
    "axolotl",
    "openrlhf",
    "deepspeed-chat",
    "litgpt",
];

/// Rank of adapters for rows that do not state it: 16 in peft's examples and in most threads.
const USUAL_RANK: usize = 16;

/// The release of transformers for rows that do not tell theirs: most published runs are older than
/// release 5, of December 2025.
const USUAL_RELEASE: &str = "4.48";

/// The release of transformers whose tables are used for a row: the stated one (`version`), one
/// inferred for `fms_acceleration` and SantaCoder, or else [`USUAL_RELEASE`].
///
/// `fms_acceleration` stores requirements with 4.45.2 and 4.48.1 beside its results, but not which
/// of its files was measured with which. That was inferred from the rows' measured memory, so these
/// rows do not test the memory prediction.
fn release(row: &Row) -> &'static str {
    let stated = row.cells.get("version").map_or("", String::as_str);
    if stated.starts_with("4.45") || row.notes.contains("refs/a100_80gb_liger.csv") || has_word(&row.model, "santacoder") {
        "4.45"
    } else if stated.starts_with('5') {
        "latest"
    } else {
        USUAL_RELEASE
    }
}

/// The keys that select a row's tables, in addition to its plan: framework, release, architecture,
/// and other libraries' kernels. `None` if no table fits: the framework or architecture was not
/// traced, activations are offloaded, or products are in TF32.
fn table_keys(row: &Row, run: &Run) -> Option<BTreeMap<String, String>> {
    let framework = |word: &str| has_word(&row.framework, word);
    let is_hugging_face = HUGGING_FACE.into_iter().any(framework);
    let is_ddp_bert = framework("ddp") && has_word(&row.model, "bert");
    let is_torchtune = framework("torchtune");
    let has_foreign_kernels = ["scattermoe", "unsloth", "megatron", "thunder", "modded"].into_iter().any(framework);
    let cell = |column: &str| row.cells.get(column).map_or("", String::as_str);
    let is_compiled = cell("compiled") == "1" || framework("compiled") || has_word(&row.notes, "compile");
    // Rows of nanoGPT's script may name only PyTorch as framework; then the name of the row's table
    // tells.
    let is_nanogpt = is_compiled && has_word(&row.model, "gpt-2") && (framework("nanogpt") || has_word(&row.table, "nanogpt"));
    let offloads_activations = matches!(cell("offload"), "checkpoints" | "activations");
    // TF32 has other rates than the tables' single precision.
    let is_left_out = has_foreign_kernels || offloads_activations || run.format == ProductFormat::Tf32;
    if !(is_hugging_face || is_ddp_bert || is_torchtune || is_nanogpt) || is_left_out {
        return None;
    }
    let owned = |keys: Vec<(&str, &str)>| -> BTreeMap<String, String> {
        let compiled = is_compiled.then_some(("compiled", "inductor"));
        keys.into_iter().chain(compiled).map(|(name, value)| (name.to_owned(), value.to_owned())).collect()
    };
    if is_nanogpt {
        return Some(owned(vec![("framework", "nanogpt"), ("architecture", "gpt2"), ("dropout", "none")]));
    }
    let name = row.model.to_lowercase();
    let named = ARCHITECTURES.into_iter().find(|(word, _)| has_word(&name, word));
    // Decoders with gated networks that have no table are most like Llama.
    let like_llama = (row.number("gated_ffn") == Some(1.0) && row.count("experts").is_none()).then_some(("", "llama"));
    let (_, architecture) = named.or(like_llama)?;
    if is_torchtune {
        // torchtune's tables name its default, the chunked loss, `model`.
        let loss = if loss(row) == LossKernel::Chunked { "model" } else { "whole" };
        let keys = vec![("framework", "torchtune"), ("architecture", architecture), ("precision", "bf16"), ("loss", loss)];
        return Some(owned([keys, vec![("wrapper", "fsdp2")]].concat()));
    }
    // Compiled steps were traced with the newest release only.
    let release = if is_compiled { "latest" } else { release(row) };
    let mut keys = vec![("framework", "hf"), ("version", release), ("architecture", architecture)];
    // These runs used bf16 without autocast, adapters included: inferred from measured memory.
    if row.notes.contains("refs/a100_80gb.csv") {
        keys.push(("precision", "bf16"));
    }
    // The defaults of its train.py: everything in bf16, without autocast. Steps of this kind were
    // traced with the newest release.
    if framework("fsdp_qlora") {
        keys.extend([("version", "latest"), ("precision", "bf16"), ("adapters", "bf16")]);
    }
    // The Trainer's default since release 5; older ones shard so where the row says it.
    if framework("fsdp2") || (release == "latest" && !is_compiled) {
        keys.push(("wrapper", "accelerate-fsdp2"));
    }
    if is_deepspeed(row) {
        keys.push(("wrapper", "deepspeed"));
    }
    if cell("kernels") == "foak" {
        keys.push(("kernels", if loss(row) == LossKernel::Liger { "foak-liger" } else { "foak" }));
    }
    Some(owned(keys))
}

/// Whether DeepSpeed shards and updates the parameters.
fn is_deepspeed(row: &Row) -> bool {
    has_word(&row.framework, "deepspeed")
}

/// A run's plan, with the kernels, adapters and formats that the row states.
fn traced_plan(row: &Row, run: &Run) -> Plan {
    let cell = |column: &str| row.cells.get(column).map_or("", String::as_str);
    let mut plan = run.plan.clone();
    plan.precision = if run.format == ProductFormat::Fp32 { DataType::Fp32 } else { DataType::Bf16 };
    plan.workload = PlannedWorkload::default();
    // DeepSpeed's optimizers keep a copy in single precision of 16-bit parameters.
    plan.workload.no_master_copy = !is_deepspeed(row) && (stores_16_bit(row) || has_word(&row.framework, "torchtune"));
    let says_flash = has_word(cell("attention"), "flash") || has_word(&row.notes, "flash attention");
    let says_note = |text: &str| row.notes.to_lowercase().contains(text);
    if says_note("adamw8bit") || says_note("adamw 8 bit") {
        (plan.workload.moments, plan.workload.paged_moments) = (MomentFormat::EightBit, says_note("pagedadamw"));
        plan.optimizer = Optimizer::AdamW;
    }
    plan.workload.updates_in_backward = says_note("optimizer in backward");
    plan.workload.attention = match cell("attention") {
        "eager" => Some(AttentionKernel::Eager),
        _ if plan.precision == DataType::Fp32 => None,
        _ => Some(if says_flash { AttentionKernel::Flash } else { AttentionKernel::Sdpa }),
    };
    plan.workload.loss = loss(row);
    if trains_adapters(row) {
        let is_attention = has_word(&row.notes, "q k v o") || has_word(&row.notes, "attention projections");
        let targets = NamePatterns::from_iter([if is_attention { "*attn*" } else { "*" }]);
        let rank = row.count("adapter_rank").unwrap_or(USUAL_RANK);
        plan.training.lora = Some(Lora { rank, targets, ..Lora::default() });
        plan.workload.base_bits = has_word(cell("method"), "qlora").then_some(4);
    }
    plan
}

/// Whether parameters and optimizer states are stored in 16 bits, without a copy in single
/// precision.
fn stores_16_bit(row: &Row) -> bool {
    ["no fp32 copy", "pure bf16", "parameters in bf16"].into_iter().any(|text| row.notes.contains(text))
        || has_word(&row.stated_precision, "pure")
}

/// Replaces the step, its interval and the compute time by those of the operator tables; does
/// nothing if none fit.
pub(crate) fn apply_traced(row: &Row, run: &Run, prediction: &mut StepPrediction) {
    let Some((time, traced)) = predict(row, run) else { return };
    prediction.step = time.step;
    [prediction.p10, prediction.p90] = time.step_range;
    prediction.compute = time.arithmetic + time.memory_bound;
    prediction.traced = Some(traced);
}

fn predict(row: &Row, run: &Run) -> Option<(TracedTime, TracedPrediction)> {
    let mut job = TracedPlan::new(&traced_plan(row, run), &run.model, &table_keys(row, run)?).ok()?.job;
    if let Model::Llama(llama) = &run.model {
        // These frameworks do not pad the vocabulary; `run.model` may pad it.
        job.sizes = job.sizes.with("v", row.count("vocab").unwrap_or(llama.vocab));
        // `run.model` stands for an ungated network by a narrower gated one with as many
        // parameters. The tables need the stated width.
        if let (Some(ffn), Some(0.0)) = (row.count("ffn"), row.number("gated_ffn")) {
            job.sizes = job.sizes.with("f", ffn);
        }
    }
    let (memory, outside) = memory_within(&job, &run.cluster, run.cluster.gpu.memory).ok()?;
    job.pages_out = memory.pages_out;
    let time = repeated_time(&job, &run.cluster, memory.flushes).ok()?;
    Some((time, TracedPrediction { memory, outside }))
}
