//! Writes a plan back into the file that the job was imported from: changes the settings that the
//! plan changes, and leaves everything else as it was written, including comments.
//!
//! The changed settings are those in which two exports differ: that of the plan that the file
//! states, and that of the new plan. The changed file is read again, and must state the plan.

mod edit;
mod json_text;

use super::{Framework, FrameworkError, Job, JobFiles, PlanForm, Surroundings, export_job, import_plan};
use edit::Notation;
use foretell_program::Plan;
use serde_json::Value;
use similar::{ChangeTag, TextDiff};
use std::collections::{BTreeMap, BTreeSet};

/// The change of one setting.
#[derive(Clone, Copy, Debug)]
enum Edit<'a> {
    Set(&'a Value),
    Remove,
}

/// A file, with settings that were changed to state a plan.
#[derive(Clone, Debug, PartialEq)]
pub struct ChangedFile {
    /// The text.
    pub text: String,
    /// Removed and added lines, with `-` and `+` before them.
    pub difference: Vec<String>,
    /// The job that the file now states.
    pub job: JobFiles,
}

/// The main file of a framework's job, which users edit: the name under which it is exported, its
/// form, and its notation.
fn main_file(framework: Framework, original: &str) -> Option<(&'static str, PlanForm, Notation)> {
    let found = match framework {
        Framework::Torchtitan => ("torchtitan.toml", PlanForm::Torchtitan, Notation::Toml),
        Framework::Deepspeed => ("deepspeed.json", PlanForm::Deepspeed, Notation::Json),
        Framework::Accelerate if original.contains("distributed_type") => {
            ("accelerate.yaml", PlanForm::Accelerate, Notation::Yaml)
        }
        Framework::Accelerate => ("training_arguments.json", PlanForm::HuggingFaceTrainer, Notation::Yaml),
        Framework::Trl => ("trl.yaml", PlanForm::HuggingFaceTrainer, Notation::Yaml),
        Framework::Axolotl => ("axolotl.yaml", PlanForm::HuggingFaceTrainer, Notation::Yaml),
        Framework::LlamaFactory => ("llama_factory.yaml", PlanForm::HuggingFaceTrainer, Notation::Yaml),
        Framework::Torchtune => ("torchtune.yaml", PlanForm::Torchtune, Notation::Yaml),
        Framework::Megatron | Framework::Slurm => return None,
    };
    // Except for TOML, the first character decides: JSON starts with `{`.
    let notation = match (found.2, original.trim_start().starts_with('{')) {
        (Notation::Toml, _) => Notation::Toml,
        (_, true) => Notation::Json,
        (_, false) => Notation::Yaml,
    };
    Some((found.0, found.1, notation))
}

/// Pairs of names of the same setting: the exporter's, and another one that files have.
const NAMES: [(&str, &str); 14] = [
    ("per_device_train_batch_size", "per_gpu_train_batch_size"),
    ("gradient_checkpointing", "activation_checkpointing"),
    ("optimizer", "optim"),
    ("sequence_len", "max_seq_length"),
    ("max_length", "max_seq_length"),
    ("bf16", "bfloat16"),
    ("dtype", "torch_dtype"),
    ("lora_rank", "lora_r"),
    ("fsdp_config.reshard_after_forward", "fsdp_config.fsdp_reshard_after_forward"),
    ("fsdp_config.activation_checkpointing", "fsdp_config.fsdp_activation_checkpointing"),
    ("fsdp_config.offload_params", "fsdp_config.fsdp_offload_params"),
    ("fsdp_config.fsdp_reshard_after_forward", "fsdp_config.fsdp_sharding_strategy"),
    ("train_micro_batch_size_per_gpu", "micro_batch_per_gpu"),
    ("bf16.enabled", "bfloat16.enabled"),
];

/// Changes the file that a job came from so that it states a plan.
///
/// # Errors
/// [`FrameworkError`] if the file cannot be read, if the framework does not express the plan, or if
/// the changed file does not state it.
pub fn change_file(
    job: &Job<'_>,
    framework: Framework,
    original: &str,
    surroundings: Surroundings<'_>,
) -> Result<ChangedFile, FrameworkError> {
    let refuse =
        |reason: String| FrameworkError::Form { reason, hint: "leave out `--into` to write the job as new files".into() };
    let Some((name, form, notation)) = main_file(framework, original) else {
        return Err(refuse("scripts and lists of flags are not changed".into()));
    };
    let before = import_plan(original, form, surroundings)?;
    let exported = export_job(job, framework)?;
    // Export both plans of the same job: settings that only the training script decides are then
    // equal.
    let of_file = export_job(&Job { plan: &before.plan, ..*job }, framework)?;
    let settings = |files: &JobFiles| -> Result<BTreeMap<String, Value>, FrameworkError> {
        let file = files.files.iter().find(|(file, _)| file == name);
        let (_, text) = file.expect("invariant: a framework's job has its main file");
        edit::settings(text, notation_of(name)).map_err(refuse)
    };
    let [old, new] = [settings(&of_file)?, settings(&exported)?];
    let mut text = original.to_string();
    let names: BTreeSet<&String> = old.keys().chain(new.keys()).collect();
    for path in names {
        let (was, is) = (old.get(path), new.get(path));
        if was == is || path == "model.config" {
            continue;
        }
        let others = NAMES.iter().filter(|(left, right)| left == path || right == path);
        let own = std::iter::once(path.as_str()).chain(others.flat_map(|(left, right)| [*left, *right]));
        let edit = is.map_or(Edit::Remove, Edit::Set);
        text = edit::apply(&text, notation, own, edit).map_err(refuse)?;
    }
    let after = import_plan(&text, form, surroundings)
        .map_err(|error| refuse(format!("the file cannot state this plan beside its other settings: {error}")))?;
    if !states(&after.plan, &exported.plan, form) {
        return Err(refuse(
            "the file's other settings contradict the plan: with its own values changed it still states another".into(),
        ));
    }
    Ok(ChangedFile { difference: difference(original, &text), text, job: exported })
}

/// The notation of an exported file.
fn notation_of(name: &str) -> Notation {
    match name.rsplit('.').next() {
        Some("json") => Notation::Json,
        Some("toml") => Notation::Toml,
        _ => Notation::Yaml,
    }
}

/// Whether a file states the plan, as far as its form has fields for it.
fn states(read: &Plan, plan: &Plan, form: PlanForm) -> bool {
    let is_same_layout = read.layout.clone().normalised() == plan.layout.clone().normalised();
    let is_whole = form != PlanForm::Accelerate;
    let is_same_job = read.global_batch == plan.global_batch
        && read.optimizer == plan.optimizer
        && read.training.lora == plan.training.lora
        && read.workload == plan.workload;
    is_same_layout && read.precision == plan.precision && (is_same_job || !is_whole)
}

/// The lines that differ, in order.
fn difference(before: &str, after: &str) -> Vec<String> {
    let of_lines = TextDiff::from_lines(before, after);
    let changes = of_lines.iter_all_changes().filter(|change| change.tag() != ChangeTag::Equal);
    changes.map(|change| format!("{}{}", change.tag(), change.value().trim_end_matches(['\r', '\n']))).collect()
}

#[cfg(test)]
mod tests {
    use super::difference;

    #[test]
    fn lines_that_differ_are_listed_in_order() {
        assert_eq!(difference("a\nb\nc\n", "a\nx\nc\nd\n"), ["-b", "+x", "+d"]);
        assert_eq!(difference("a\n", "a\n"), Vec::<String>::new());
    }
}
