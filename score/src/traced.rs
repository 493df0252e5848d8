//! Rows of frameworks that were traced: their steps follow from operator tables instead of a
//! stack's profile.
//!
//! A row is traced if the library has a table of its framework, architecture and settings, and if
//! its ranks are data-parallel. All others keep the profile of their stack.

use crate::names::{says, trains_adapters};
use crate::prediction::StepPrediction;
use crate::row::Row;
use crate::run::Run;
use crate::traced_prediction::TracedPrediction;
use foretell_models::Model;
use foretell_models::operator_tables::{Element, OperatorTable, ParameterRole, TableSizes};
use foretell_program::Recompute;
use foretell_program::traced::{Sharding, TracedJob, TracedOptimizer};
use foretell_simulator::gpu::ProductFormat;
use foretell_simulator::gpu::traced::{TracedTime, traced_memory, traced_time};
use foretell_units::Bytes;

/// Architectures of the library by words of a model's name. The first match wins.
const ARCHITECTURES: [(&str, &str); 18] = [
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
    ("vicuna", "llama"),
    ("gpt2", "gpt2"),
    ("gpt-2", "gpt2"),
    ("bert", "bert"),
    ("phi-3", "phi3"),
];

/// Rank of adapters that a row does not state: peft's examples and most threads have 16.
const USUAL_RANK: usize = 16;

/// The newest release of transformers that was traced, and what a row without a known release
/// takes.
const NEWEST: &str = "latest";

/// The release of transformers that a row ran on, if it states one (`version`).
///
/// `fms_acceleration` stores requirements with 4.45.2 and 4.48.1 beside its results, but not which
/// file of results had which. That was chosen here by the rows' measured memory, so these rows do
/// not test it.
fn release(row: &Row) -> &'static str {
    let stated = row.cells.get("version").map_or("", String::as_str);
    if stated.starts_with("4.45") || row.notes.contains("refs/a100_80gb_liger.csv") || says(&row.model, "santacoder") {
        "4.45"
    } else if stated.starts_with("4.4") || row.notes.contains("refs/a100_80gb.csv") {
        "4.48"
    } else {
        NEWEST
    }
}

/// A measurement over its prediction: 10th and 90th percentile. A guess: no rows were kept apart to
/// calibrate it on yet.
const SPREAD: [f64; 2] = [0.88, 1.25];

/// What a row's framework was traced with; `None` if it was not.
fn key(row: &Row, run: &Run) -> Option<Vec<(&'static str, &'static str)>> {
    let framework = |word: &str| says(&row.framework, word);
    let is_hugging_face =
        ["hugging face", "hf trainer", "trl", "transformers", "accelerate", "llama-recipes", "llama-factory", "axolotl"]
            .into_iter()
            .any(framework);
    let is_plain = framework("ddp") && says(&row.model, "bert");
    let is_other = ["deepspeed", "scattermoe", "compiled", "unsloth", "megatron"].into_iter().any(framework);
    let cell = |column: &str| row.cells.get(column).map_or("", String::as_str);
    let is_compiled = cell("compiled") == "1" || says(&row.notes, "compile");
    let layout = &run.plan.layout;
    let is_divided = layout.tensor * layout.pipeline * layout.context * layout.expert > 1;
    // Chunked losses and offloading are other tables.
    let is_special = !cell("offload").is_empty() || cell("loss").contains("chunked");
    // ZeRO's first stages shard states alone, which no wrapper here does; TF32 has other rates than
    // the table's single precision.
    let is_partly_sharded = matches!(layout.zero, 1 | 2) && run.devices() > 1;
    let is_left_out =
        is_other || is_compiled || is_divided || is_special || is_partly_sharded || run.format == ProductFormat::Tf32;
    if !(is_hugging_face || is_plain) || is_left_out {
        return None;
    }
    let name = row.model.to_lowercase();
    let (_, architecture) = ARCHITECTURES.into_iter().find(|(word, _)| says(&name, word))?;
    let release = release(row);
    let has_adapters = trains_adapters(row);
    let is_sharded = layout.zero == 3;
    let stores_narrow = stores_narrow(row);
    let precision = match run.format {
        ProductFormat::Fp32 => "fp32",
        // Without autocast, adapters too: inferred from the rows' measured memory.
        _ if row.notes.contains("refs/a100_80gb.csv") => "bf16",
        _ if has_adapters => "mixed",
        _ if stores_narrow => "bf16",
        _ if is_sharded => "mixed",
        _ => "autocast",
    };
    let checkpoint = match layout.recompute {
        Recompute::None => "none",
        // Reentrant checkpoints are the default of transformers before 5.
        Recompute::Full if release != NEWEST => "full-reentrant",
        Recompute::Full => "full",
        _ => return None,
    };
    let says_flash = says(cell("attention"), "flash") || says(&row.notes, "flash attention");
    let attention = match cell("attention") {
        "eager" => "eager",
        _ if precision == "fp32" => "sdpa",
        _ if says_flash => "flash",
        _ => "sdpa",
    };
    let is_attention = says(&row.notes, "q k v o") || says(&row.notes, "attention projections");
    let targets = match () {
        () if !has_adapters => "none",
        // Older releases were traced with dropout on adapters, which most recipes had.
        () if is_attention && release != NEWEST => "lora-attention-dropout",
        () if release != NEWEST => "lora-all-dropout",
        // FSDP casts adapters within a unit.
        () if is_attention && is_sharded => "lora-attention-bf16",
        () if is_attention => "lora-attention",
        () if is_sharded => "lora-all-bf16",
        () => "lora-all",
    };
    // Kernels by Triton that fuse the loss with the head: Liger's own, and those of others that use
    // its loss.
    let fuses_loss = cell("kernels").contains("liger") || row.notes.contains("liger fused");
    let kernels = match () {
        () if release != NEWEST && cell("kernels") == "foak" && fuses_loss => "foak-liger",
        () if release != NEWEST && cell("kernels") == "foak" => "foak",
        () if fuses_loss => "liger",
        () => "hf",
    };
    Some(vec![
        ("architecture", architecture),
        ("framework", "hf"),
        ("head", if is_tied(&run.model) { "tied" } else { "usual" }),
        ("dropout", if matches!(architecture, "gpt2" | "bert" | "gpt_bigcode") { "some" } else { "none" }),
        ("experts", if matches!(architecture, "mixtral" | "qwen3_moe") { "grouped_mm" } else { "none" }),
        ("attention", attention),
        ("checkpoint", checkpoint),
        ("precision", precision),
        ("adapter", targets),
        ("loss", "model"),
        ("kernels", kernels),
        ("version", release),
    ])
}

/// Whether a model's head has the embedding's weights although its architecture usually has its
/// own.
fn is_tied(model: &Model) -> bool {
    matches!(model, Model::Llama(llama) if llama.tied_embeddings)
}

/// Whether parameters and states are stored in sixteen bits, without a copy in single precision.
fn stores_narrow(row: &Row) -> bool {
    ["no fp32 copy", "pure bf16", "parameters in bf16"].into_iter().any(|text| row.notes.contains(text))
        || says(&row.stated_precision, "pure")
}

/// Replaces a prediction by what the row's traced framework does; leaves it if the framework was
/// not traced.
pub(crate) fn replace(row: &Row, run: &Run, prediction: &mut StepPrediction) {
    let Some((time, traced)) = predict(row, run) else { return };
    let step = time.step;
    prediction.step = step;
    prediction.p10 = step * SPREAD[0];
    prediction.p90 = step * SPREAD[1];
    prediction.compute = time.arithmetic + time.memory_bound;
    prediction.traced = Some(traced);
}

fn predict(row: &Row, run: &Run) -> Option<(TracedTime, TracedPrediction)> {
    let key = key(row, run)?;
    // Adapters in single precision stand in where none in bf16 were traced: they are small.
    let strip = |value: &'static str| value.strip_suffix("-bf16").unwrap_or(value);
    let wide: Vec<_> = key.iter().map(|&(name, value)| (name, strip(value))).collect();
    let find = |key: &[(&str, &str)]| OperatorTable::library(key).ok().flatten();
    let table = find(&key).or_else(|| find(&wide))?;
    let layout = &run.plan.layout;
    let mut sizes = TableSizes::of_model(&run.model, layout.micro_batch)?;
    sizes = sizes.with("r", row.count("adapter_rank").unwrap_or(USUAL_RANK));
    if let Model::Llama(llama) = &run.model {
        // Rows do not pad vocabularies under these frameworks.
        sizes = sizes.with("v", row.count("vocab").unwrap_or(llama.vocab));
    }
    let has_adapters = table.parameters.iter().any(|parameter| parameter.role == ParameterRole::Adapter);
    let is_narrow = stores_narrow(row) && !has_adapters;
    let sharding = match (layout.zero, run.devices()) {
        (3, 2..) => Sharding::Fsdp1,
        (3, _) | (_, 0 | 1) => Sharding::Replicated,
        _ => Sharding::Ddp,
    };
    let micro_batches = run.plan.micro_batches().ok()?;
    let job = TracedJob {
        table: &table,
        sizes,
        ranks: run.devices(),
        sharding,
        stored: if is_narrow { Element::Bf16 } else { Element::F32 },
        optimizer: TracedOptimizer::AdamWForeach,
        micro_batches,
    };
    let outside = outside(run);
    let limit = Bytes::new(run.cluster.gpu.memory.count().saturating_sub(outside.count()));
    let mut memory = traced_memory(&job, None).ok()?;
    if memory.reserved > limit && memory.allocated <= limit {
        memory.flushes = traced_memory(&job, Some(limit)).ok()?.flushes;
    }
    let time = traced_time(&job, &run.cluster, memory.flushes).ok()?;
    let workspace = workspace(run);
    memory.allocated += workspace;
    memory.reserved = (memory.reserved + workspace).min(limit.max(memory.allocated));
    Some((time, TracedPrediction { memory, outside }))
}

/// cuBLAS's workspaces, which PyTorch allocates: two of 8 MiB, on Hopper and later of 32 MiB
/// (`getCUDABlasLtWorkspaceSize` and `parseChosenWorkspaceSize` in `CUDABlas.cpp`).
fn workspace(run: &Run) -> Bytes {
    let is_later = ["hopper", "blackwell"].iter().any(|generation| run.cluster.gpu.generation.starts_with(generation));
    Bytes::new(if is_later { 64 << 20 } else { 16 << 20 })
}

/// The context of CUDA with PyTorch's modules, and NCCL's buffers if there are several ranks.
fn outside(run: &Run) -> Bytes {
    Bytes::new(if run.devices() > 1 { 1400 << 20 } else { 600 << 20 })
}
