//! The settings of a Trainer: a JSON or YAML file, or the flags of a script that is launched
//! (`deepspeed train.py --bf16 True`).

use super::super::arguments::{Spelling, flags_of};
use super::super::shell;
use super::super::stated::Stated;
use super::super::{FrameworkError, Surroundings};
use super::accelerate_launch::AccelerateLaunch;

/// The settings, and what the launch tells about them.
pub(super) struct Given {
    pub(super) stated: Stated,
    /// The launch by Accelerate, if its words state something about the job.
    pub(super) launch: Option<AccelerateLaunch>,
    /// The Python script that takes the flags; `None` for a file of settings.
    pub(super) script: Option<String>,
}

/// Reads the settings of either form.
pub(super) fn read(text: &str, surroundings: &Surroundings<'_>) -> Result<Given, FrameworkError> {
    let is_script = text.starts_with("#!");
    let parsed = Stated::parse(text, "TrainingArguments as JSON (`training_args.to_json_string()`) or YAML");
    match parsed {
        Ok(stated) if !is_script && !is_command(text) => Ok(Given { stated, launch: None, script: None }),
        Err(error) if !is_script && text.trim_start().starts_with(['{', '[']) => Err(error),
        other => {
            let mut started = shell::launch(text, surroundings.file)?;
            if started.script.as_deref() == Some("tune-run") {
                return Err(FrameworkError::Form {
                    reason: "`tune run` starts a recipe of torchtune".into(),
                    hint: "import it with `foretell import torchtune`".into(),
                });
            }
            if let Some(job) = started.script.as_deref().and_then(|script| script.strip_prefix("megatron-")) {
                return Err(FrameworkError::Form {
                    reason: format!("`megatron {job}` trains with Megatron-Core, and its arguments are Megatron's"),
                    hint: "import it with `foretell import megatron-args`".into(),
                });
            }
            // The alignment-handbook's scripts take the recipe as their first argument.
            if started.script.is_some() && started.arguments.first().is_some_and(|word| shell::is_recipe(word)) {
                started.arguments.insert(0, "--config".into());
            }
            if !started.arguments.is_empty() {
                let (launch, script) = (AccelerateLaunch::of_words(&started.launcher), started.script.clone());
                let mut stated = flags_of(started, surroundings.ranks, Spelling::Underscores)?;
                // DeepSpeed's own flags are the switch `--deepspeed`, and a file next to it.
                stated.drop_switch("deepspeed");
                stated.rename("deepspeed_config", "deepspeed")?;
                return Ok(Given { stated: with_recipe(stated, surroundings)?, launch, script });
            }
            // `llamafactory-cli train job.yaml`
            if let Some(name) = &started.settings {
                let Some(text) = (surroundings.file)(name) else {
                    return Err(FrameworkError::Form {
                        reason: format!("the job's settings are in `{name}`, and there is no such file beside this one"),
                        hint: "put it there, or import that file itself".into(),
                    });
                };
                let stated = Stated::parse(&text, "the settings as YAML")?;
                // Other tools' files identify their tool themselves.
                let script = started.script.filter(|script| script.starts_with("swift-"));
                return Ok(Given { stated, launch: None, script });
            }
            if let Some(foreign) = started.foreign {
                return Err(FrameworkError::Form {
                    reason: format!("{foreign} starts the job, and its arguments are not read"),
                    hint: "put a script that this one runs beside it, or give the job as TrainingArguments in YAML or JSON (`per_device_train_batch_size: 1`, ...), or as the command of \
                           a script that takes a Trainer's arguments"
                        .into(),
                });
            }
            match other {
                Err(error) if !is_script && !looks_like_shell(text) => Err(error),
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

/// Whether a text that parses as a mapping of YAML is in fact a command: `torchrun train.py
/// --kwargs '{"a": 1}'`.
fn is_command(text: &str) -> bool {
    let first = text.lines().find(|line| !line.trim().is_empty() && !line.trim_start().starts_with('#')).unwrap_or_default();
    first.contains(".py ") && first.contains(" --")
}

/// Whether a text without a `#!` line is nevertheless a script.
fn looks_like_shell(text: &str) -> bool {
    text.lines().any(|line| line.trim_end().ends_with('\\') || line.trim_start().starts_with("export "))
}

/// The flags, with the settings of the file that `--config` names, which TRL's and the
/// alignment-handbook's scripts read. A flag has precedence.
fn with_recipe(mut flags: Stated, surroundings: &Surroundings<'_>) -> Result<Stated, FrameworkError> {
    let is_file = |name: &str| [".yaml", ".yml", ".json"].iter().any(|end| name.ends_with(end));
    let Some(name) = flags.peek("config").and_then(|name| name.as_str()).filter(|name| is_file(name)).map(str::to_owned) else {
        return Ok(flags);
    };
    let Some(text) = (surroundings.file)(&name) else {
        return Err(FrameworkError::Form {
            reason: format!("the job's settings are in `--config {name}`, and there is no such file beside this one"),
            hint: "put it there, or import that file itself".into(),
        });
    };
    flags.take("config");
    let mut recipe = Stated::parse(&text, "TrainingArguments as JSON or YAML")?;
    recipe.replace_by(flags);
    Ok(recipe)
}
