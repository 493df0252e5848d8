//! A recipe as it is launched: `tune run RECIPE --config FILE key=value`, where `key=value`
//! overwrites a setting of the file.

use super::super::shell;
use super::super::stated::{Notation, Stated};
use super::super::{FrameworkError, Surroundings};
use serde_json::{Map, Value};

/// Reads a recipe's file, or the command that runs a recipe with changes.
pub(super) fn read(text: &str, surroundings: &Surroundings<'_>) -> Result<Stated, FrameworkError> {
    const WHAT: &str = "a recipe of torchtune (`tune cp`), or the command that runs one";
    let parsed = Stated::parse(text, WHAT);
    let is_script = text.starts_with("#!") || text.contains("tune run");
    if !is_script || parsed.as_ref().is_ok_and(|stated| stated.has("model")) {
        return parsed;
    }
    let started = shell::launch(text, surroundings.file)?;
    if started.script.as_deref() != Some("tune-run") {
        return Err(FrameworkError::Form {
            reason: "the script starts no recipe of torchtune".into(),
            hint: format!("give {WHAT}"),
        });
    }
    let Command { config, changes, ranks } = Command::of(&started.arguments)?;
    let Some(file) = (surroundings.file)(&config) else {
        return Err(FrameworkError::Form {
            reason: format!("the recipe is in `--config {config}`, and there is no such file beside this one"),
            hint: match config.ends_with(".yaml") || config.ends_with(".yml") {
                true => "put it there, or import that file itself".into(),
                false => format!("copy torchtune's own with `tune cp {config} recipe.yaml`, and write `--config recipe.yaml`"),
            },
        });
    };
    let mut stated = Stated::parse(&file, WHAT)?;
    changes.into_iter().try_for_each(|change| change.apply(&mut stated))?;
    started.notes.into_iter().for_each(|note| stated.assume(note));
    if let Some(ranks) = ranks.filter(|&ranks| ranks != surroundings.ranks) {
        let devices = surroundings.ranks;
        stated.assume(format!("the command starts {ranks} ranks, and the topology has {devices} devices, which the plan uses"));
    }
    Ok(stated)
}

/// A change of a recipe's setting.
struct Change {
    path: String,
    /// The new value; `None` if the setting is removed (`~path`).
    value: Option<Value>,
}

impl Change {
    fn apply(self, stated: &mut Stated) -> Result<(), FrameworkError> {
        let Self { path, value } = self;
        // The name of a component without `._component_` means the component.
        let component = format!("{path}._component_");
        let path = if stated.has(&component) && value.as_ref().is_some_and(Value::is_string) { component } else { path };
        let Some(value) = value else {
            return match stated.remove(&path) {
                true => Ok(()),
                false => Err(FrameworkError::Form {
                    reason: format!("`~{path}`: the recipe has no such setting"),
                    hint: "name one that the file states, as torchtune demands".into(),
                }),
            };
        };
        if stated.has_section(&path) {
            stated.remove(&path);
        }
        let changed = Stated::new(Map::from_iter([(path, value)]), Notation::Json);
        stated.replace_by(changed);
        Ok(())
    }
}

/// The words of `tune run`.
struct Command {
    config: String,
    changes: Vec<Change>,
    ranks: Option<usize>,
}

impl Command {
    fn of(words: &[String]) -> Result<Self, FrameworkError> {
        let (mut config, mut changes, mut recipe) = (None, Vec::new(), None);
        let (mut nodes, mut per_node) = (Some(1), None);
        let mut rest = words.iter();
        while let Some(word) = rest.next() {
            if let Some(flag) = word.strip_prefix("--") {
                let (name, value) = match flag.split_once('=') {
                    Some((name, value)) => (name, Some(value)),
                    None if matches!(flag, "standalone" | "no-python") => (flag, None),
                    None => (flag, rest.next().map(String::as_str)),
                };
                match name.replace('-', "_").as_str() {
                    "config" => config = value.map(str::to_owned),
                    "nnodes" => nodes = value.and_then(|value| value.parse::<usize>().ok()),
                    "nproc_per_node" => per_node = value.and_then(|value| value.parse::<usize>().ok()),
                    _ => {}
                }
            } else if let Some(path) = word.strip_prefix('~') {
                changes.push(Change { path: path.into(), value: None });
            } else if let Some((path, value)) = word.split_once('=') {
                if value.contains('$') {
                    return Err(FrameworkError::Form {
                        reason: format!("`{word}`: the script does not say what the variable is"),
                        hint: "give the command as the shell expands it, without variables".into(),
                    });
                }
                let options = serde_saphyr::options! { with_snippet: false };
                let parsed = serde_saphyr::from_str_with_options::<Value>(value, options);
                changes.push(Change { path: path.into(), value: Some(parsed.unwrap_or_else(|_| value.into())) });
            } else if recipe.is_none() {
                recipe = Some(word);
            } else {
                return Err(FrameworkError::Form {
                    reason: format!("the word `{word}` belongs to no argument"),
                    hint: "write changes of the recipe as `key=value`".into(),
                });
            }
        }
        let config = config.ok_or_else(|| FrameworkError::Form {
            reason: "`tune run` without `--config`".into(),
            hint: "name the recipe's file, as torchtune demands".into(),
        })?;
        let ranks = nodes.zip(per_node).and_then(|(nodes, per_node)| nodes.checked_mul(per_node));
        Ok(Self { config, changes, ranks })
    }
}
