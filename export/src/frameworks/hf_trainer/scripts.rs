//! Flags and defaults of widely copied scripts, in the Trainer's names: alpaca-lora's `finetune.py`
//! and `qlora.py`, Firefly's recipes, and what ChatGLM's scripts train.

use super::super::stated::{Stated, object_of};
use super::super::{FrameworkError, Surroundings};
use super::Tool;
use serde_json::{Value, json};

/// Defaults of `qlora.py` (github.com/artidoro/qlora), which trains adapters on all linear layers.
fn defaults_of_qlora() -> [(&'static str, Value); 9] {
    [
        ("lora_r", json!(64)),
        ("lora_alpha", json!(16)),
        ("lora_dropout", json!(0.0)),
        ("lora_target_linear", json!(true)),
        ("quantization_bit", json!(4)),
        ("optim", json!("paged_adamw_32bit")),
        ("per_device_train_batch_size", json!(1)),
        ("gradient_accumulation_steps", json!(16)),
        ("gradient_checkpointing", json!(true)),
    ]
}

/// Defaults of alpaca-lora's `finetune.py` (github.com/tloen/alpaca-lora), whose weights are frozen
/// in eight bits. Its batch is that of all ranks.
fn defaults_of_alpaca_lora() -> [(&'static str, Value); 9] {
    [
        ("micro_batch_size", json!("4")),
        ("batch_size", json!(128)),
        ("cutoff_len", json!(256)),
        ("lora_r", json!(8)),
        ("lora_alpha", json!(16)),
        ("lora_dropout", json!(0.05)),
        ("load_in_8bit", json!(true)),
        ("fp16", json!(true)),
        ("use_lora", json!(true)),
    ]
}

/// Pairs of names for the lengths of a prompt and of its answer, in tokens.
const TWO_LENGTHS: [[&str; 2]; 2] = [["source_max_len", "target_max_len"], ["max_source_length", "max_target_length"]];

/// Translates the flags of such a script, and its defaults, to the Trainer's.
pub(super) fn translate(
    stated: &mut Stated,
    script: Option<&str>,
    tool: Tool,
    surroundings: &Surroundings<'_>,
) -> Result<(), FrameworkError> {
    let script = script.map(|path| path.rsplit('/').next().unwrap_or(path));
    // Encoder-decoders have two sequences.
    let has_two = script.is_some_and(|name| ["summarization", "translation", "seq2seq"].iter().any(|part| name.contains(part)));
    if !has_two && stated.peek("predict_with_generate").is_none() {
        read_two_lengths(stated)?;
    }
    stated.neutral(&["predict_with_generate"]);
    read_adapters_file(stated, surroundings)?;
    if script == Some("finetune.py") && stated.has("base_model") {
        let others: &[&str] = if stated.has("bf16") { &["fp16"] } else { &[] };
        provide_all(stated, "alpaca-lora's `finetune.py`", &defaults_of_alpaca_lora(), others);
    }
    if tool == Tool::Trainer && script.is_some() {
        read_batch(stated, surroundings)?;
    }
    if script == Some("qlora.py") {
        read_qlora(stated)?;
    }
    read_firefly(stated)?;
    stated.refuse_with(
        &["pre_seq_len", "prefix_tuning", "num_virtual_tokens", "prompt_tuning", "ptuning_checkpoint"],
        "trained prefixes are not planned",
        "plan adapters in their place (`--lora_r 8`), which train as few parameters",
    )
}

/// Adds the lengths of a prompt and of its answer, which form one sequence of a decoder.
fn read_two_lengths(stated: &mut Stated) -> Result<(), FrameworkError> {
    let has_total = ["max_length", "max_seq_length", "model_max_length", "cutoff_len"].iter().any(|name| stated.has(name));
    for [source, target] in TWO_LENGTHS {
        if stated.has(source)
            && stated.has(target)
            && !has_total
            && let (Some(before), Some(after)) = (stated.size(source)?, stated.size(target)?)
        {
            let total = before.saturating_add(after);
            stated.assume(format!("{total} positions of a sample: {} and {}", stated.written(source), stated.written(target)));
            stated.provide("max_length", json!(total));
        }
    }
    Ok(())
}

/// Reads adapters in a file of their own (BELLE's `--use_lora --lora_config FILE`).
fn read_adapters_file(stated: &mut Stated, surroundings: &Surroundings<'_>) -> Result<(), FrameworkError> {
    let Some(name) = stated.peek("lora_config").and_then(Value::as_str).filter(|name| name.ends_with(".json")) else {
        return Ok(());
    };
    let name = name.to_owned();
    let Some(text) = (surroundings.file)(&name) else { return Ok(()) };
    stated.drop("lora_config");
    for (setting, value) in object_of(&text, "adapters as JSON")? {
        let setting = if setting == "r" { "lora_r" } else { setting.as_str() };
        if !stated.has(setting) {
            stated.set(setting, value);
        }
    }
    Ok(())
}

/// Reads the batch of a step of scripts like alpaca-lora's, which also state the micro-batch.
fn read_batch(stated: &mut Stated, surroundings: &Surroundings<'_>) -> Result<(), FrameworkError> {
    if !stated.has("micro_batch_size") || stated.has("gradient_accumulation_steps") {
        return Ok(());
    }
    let micro = stated.peek("micro_batch_size").and_then(Value::as_str).and_then(|micro| micro.parse::<usize>().ok());
    let (Some(batch), Some(micro)) = (stated.size("batch_size")?, micro) else { return Ok(()) };
    let at_once = micro.max(1).saturating_mul(surroundings.ranks);
    stated.assume(format!("{}: samples of a step on all ranks, as alpaca-lora's script has it", stated.written("batch_size")));
    stated.provide("gradient_accumulation_steps", json!((batch / at_once).max(1)));
    Ok(())
}

fn read_qlora(stated: &mut Stated) -> Result<(), FrameworkError> {
    stated.rename("lora_modules", "lora_target_modules")?;
    if stated.peek("lora_target_modules").is_some_and(|modules| modules == "all") {
        stated.drop("lora_target_modules");
    }
    if stated.is_on("full_finetune")? {
        return Ok(());
    }
    stated.provide("use_lora", true.into());
    let mut others: Vec<&str> = Vec::new();
    if stated.has("lora_target_modules") {
        others.push("lora_target_linear");
    }
    if stated.has("bits") {
        others.push("quantization_bit");
    }
    provide_all(stated, "`qlora.py`", &defaults_of_qlora(), &others);
    Ok(())
}

/// Adds a script's defaults for settings that are not stated, and notes them. `others` are stated
/// under other names.
fn provide_all(stated: &mut Stated, whose: &str, defaults: &[(&str, Value)], others: &[&str]) {
    let mut taken = Vec::new();
    for (name, value) in defaults {
        if !stated.has(name) && !others.contains(name) {
            taken.push(format!("{name} {value}"));
            stated.provide(name, value.clone());
        }
    }
    if !taken.is_empty() {
        stated.assume(format!("defaults of {whose}: {}", taken.join(", ")));
    }
}

/// Reads Firefly's name of the method. Its adapters are on all linear layers.
fn read_firefly(stated: &mut Stated) -> Result<(), FrameworkError> {
    let mode = stated.text("train_mode")?;
    match mode.as_deref() {
        None => return Ok(()),
        Some("lora") => {}
        Some("qlora") => stated.provide("load_in_4bit", true.into()),
        Some("full") => {
            ["lora_r", "lora_rank"].into_iter().for_each(|name| stated.drop(name));
            return Ok(());
        }
        Some(_) => return Err(stated.unknown("train_mode", "modes: full, lora, qlora")),
    }
    if !stated.has("lora_r") && !stated.has("lora_rank") {
        stated.assume("`training.lora.rank` 64: Firefly's default of `lora_rank`");
        stated.provide("lora_r", json!(64));
    }
    if !stated.has("lora_target_modules") {
        stated.assume("`training.lora.targets`: all linear layers, as Firefly finds them");
        stated.provide("lora_target_linear", true.into());
    }
    stated.provide("use_lora", true.into());
    Ok(())
}
