//! The settings of a Trainer: those of a JSON or YAML file, or the flags of a script that is
//! launched (`deepspeed train.py --bf16 True`).

use super::super::arguments::{Spelling, flags_of};
use super::super::shell;
use super::super::stated::Stated;
use super::super::{FrameworkError, Surroundings};

/// Reads the settings of either form.
pub(super) fn read(text: &str, surroundings: &Surroundings<'_>) -> Result<Stated, FrameworkError> {
    let is_script = text.starts_with("#!");
    let parsed = Stated::parse(text, "TrainingArguments as JSON (`training_args.to_json_string()`) or YAML");
    match parsed {
        Ok(stated) if !is_script => Ok(stated),
        Err(error) if !is_script && text.trim_start().starts_with(['{', '[']) => Err(error),
        other => {
            let started = shell::launch(text)?;
            if !started.arguments.is_empty() {
                let ranks = surroundings.ranks;
                refuse_launch_file(&started.launcher)?;
                return flags_of(started, ranks, Spelling::Underscores);
            }
            match other {
                Err(error) if !is_script => Err(error),
                _ => Err(FrameworkError::Form {
                    reason: "the script starts no Python script with arguments of a Trainer".into(),
                    hint:
                        "give the command that does (`torchrun train.py --bf16 True ...`), or TrainingArguments as JSON or YAML"
                            .into(),
                }),
            }
        }
    }
}

/// Refuses a launch whose layout stands in another file.
fn refuse_launch_file(launcher: &[String]) -> Result<(), FrameworkError> {
    let named = launcher.iter().position(|word| word == "--config_file" || word.starts_with("--config_file="));
    let Some(place) = named else { return Ok(()) };
    let word = launcher.get(place).map_or("", String::as_str);
    let file = word.split_once('=').map(|(_, file)| file).or_else(|| launcher.get(place + 1).map(String::as_str));
    let file = file.unwrap_or_default();
    Err(FrameworkError::Form {
        reason: format!("the layout of the launch is in `--config_file {file}`, which is not followed from a script"),
        hint: format!(
            "import `{file}` with `foretell import accelerate`, or leave `--config_file` out to plan the arguments alone"
        ),
    })
}
