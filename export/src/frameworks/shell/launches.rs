//! Commands that start jobs: Python scripts after a launcher, and tools with a command of their
//! own. It must not know how a script's variables are expanded.

use super::{Script, Started, is_flags, words_of};

/// The module path of TRL's scripts.
const TRL_MODULES: &str = "trl.scripts.";

/// Whether a launcher with its first word starts a job that names no Python script.
fn is_foreign(launcher: &str, command: &str) -> bool {
    let launcher = launcher.rsplit('/').next().unwrap_or(launcher);
    match launcher {
        "swift" | "megatron" => matches!(command, "sft" | "pt" | "rlhf" | "train"),
        "llamafactory-cli" | "axolotl" => command == "train",
        "trl" => matches!(command, "sft" | "dpo" | "grpo" | "kto" | "reward" | "rloo"),
        "tune" => command == "run",
        "nemo" => command == "llm",
        // `torchrun -m trl.scripts.dpo`
        "-m" => command.starts_with(TRL_MODULES),
        _ => false,
    }
}

/// Returns `true` for a word that names a file of settings.
pub(in super::super) fn is_recipe(word: &str) -> bool {
    [".yaml", ".yml"].iter().any(|end| word.ends_with(end)) && !word.starts_with('-')
}

/// A command that starts a Python script.
#[derive(Debug)]
pub(super) struct Launch {
    pub(super) script: String,
    /// The words before the script.
    pub(super) launcher: Vec<String>,
    pub(super) arguments: Vec<String>,
    /// The visible devices, if the script sets them.
    pub(super) visible: Option<String>,
    /// `true` if the command is in a script that the first one runs with a shell.
    pub(super) is_inner: bool,
}

/// The position of the module that `python -m` or `deepspeed --module` starts, except modules that
/// are launchers.
fn module_of(words: &[String]) -> Option<usize> {
    let is_launcher = |name: &str| name.starts_with("torch.") || name.starts_with("accelerate.");
    let is_module = |pair: &[String]| {
        let name = pair[1].as_str();
        matches!(pair[0].as_str(), "-m" | "--module") && name.contains("train") && name.contains('.') && !is_launcher(name)
    };
    words.windows(2).position(is_module).map(|at| at + 1)
}

impl Script<'_> {
    /// The job of a script without a launch: a list of arguments, or variables that have them.
    pub(super) fn without_launch(mut self) -> Started {
        if self.arguments.is_empty() {
            let begins = |name: &&String| self.variables.get(*name).is_some_and(|values| is_flags(values));
            let holders: Vec<String> = self.order.iter().filter(begins).cloned().collect();
            for name in &holders {
                let values = self.variables.get(name).into_iter().flatten();
                // A text of several words is split, as where it is used without quotes.
                let words = values
                    .flat_map(|value| if value.trim_start().starts_with("--") { words_of(value) } else { vec![value.clone()] });
                self.arguments.extend(words);
            }
            if !holders.is_empty() {
                let names = holders.join("`, `");
                self.notes.push(format!("the script starts nothing itself: the arguments in `{names}` are taken"));
            }
        }
        let Self { arguments, notes, unexpanded, foreign, command, settings, .. } = self;
        let script = command.filter(|_| settings.is_some());
        Started { script, launcher: Vec::new(), arguments, ranks: None, notes, unexpanded, foreign, settings }
    }

    fn note_launch(&mut self, script: String, launcher: Vec<String>, arguments: Vec<String>) {
        let visible = self.variables.get("CUDA_VISIBLE_DEVICES").and_then(|devices| devices.first()).cloned();
        self.launches.push(Launch { script, launcher, arguments, visible, is_inner: self.is_inner });
    }

    /// Records the job that a command starts, if it starts one.
    pub(super) fn start(&mut self, words: Vec<String>) {
        // The command may be one word.
        let words: Vec<String> =
            words.into_iter().flat_map(|word| if word.contains(".py ") { words_of(&word) } else { vec![word] }).collect();
        // `python tool.py --option -- accelerate launch train.py --bf16`: the tool starts the
        // launch.
        let words = match words.iter().rposition(|word| word == "--") {
            Some(at) if words[at..].iter().any(|word| word.ends_with(".py")) => words[at + 1..].to_vec(),
            _ => words,
        };
        let script = |word: &String| word.ends_with(".py");
        let Some(place) = words.iter().position(script).or_else(|| module_of(&words)) else {
            let is_foreign = |pair: &[String]| matches!(pair, [one, two] if is_foreign(one, two));
            if let Some(at) = words.windows(2).position(is_foreign) {
                let arguments = words.get(at + 2..).unwrap_or_default();
                // `llamafactory-cli train --stage sft ...`, `trl sft --config job.yaml`
                let [launcher, job] = [at, at + 1].map(|at| words.get(at).cloned().unwrap_or_default());
                let name = launcher.rsplit('/').next().unwrap_or_default();
                let is_read = matches!(name, "llamafactory-cli" | "trl" | "-m" | "swift" | "megatron") && is_flags(arguments);
                if is_read || name == "tune" {
                    let script = match name {
                        "llamafactory-cli" => name.to_owned(),
                        "swift" | "megatron" | "tune" => format!("{name}-{job}"),
                        _ => job.replacen(TRL_MODULES, "", 1),
                    };
                    let arguments = arguments.to_vec();
                    self.note_launch(script, words[..at].to_vec(), arguments);
                    return;
                }
                let settings = words.iter().find(|word| word.ends_with(".yaml") || word.ends_with(".yml"));
                let command = words.get(at..at + 2).unwrap_or_default().join(" ");
                self.command = self.command.take().or_else(|| Some(format!("{launcher}-{job}")));
                self.settings = self.settings.take().or_else(|| settings.cloned());
                self.foreign.get_or_insert(match settings {
                    Some(file) => format!("`{command}`, whose settings are in `{file}`"),
                    None => format!("`{command}`"),
                });
            }
            return;
        };
        let arguments = words.get(place + 1..).unwrap_or_default().to_vec();
        // `accelerate launch train.py recipe.yaml`
        let is_launcher = |word: &String| matches!(word.rsplit('/').next(), Some("accelerate" | "torchrun" | "deepspeed"));
        let has_recipe = words.iter().take(place).any(is_launcher) && arguments.first().is_some_and(|word| is_recipe(word));
        if has_recipe || arguments.iter().any(|word| word.starts_with("--") || word.starts_with('$')) {
            let script = words.get(place).cloned().unwrap_or_default();
            let launcher = words.get(..place).unwrap_or_default().to_vec();
            self.note_launch(script, launcher, arguments);
        }
    }
}
