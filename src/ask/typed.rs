//! A question as command-line arguments and files. It refuses everything that may not be asked for
//! from outside; whether values make sense is for the command to decide.

use super::allowed::{Allowed, Kind, argument, find, is_list};
use super::answer::{PROGRESS, REPORT, WRITTEN};
use super::{Refusal, Request};
use foretell_models::Model;
use foretell_topologies::Topology;
use serde_json::Value;
use std::path::{Path, PathBuf};

/// The longest value that is not a file.
const LONGEST_VALUE: usize = 4096;
/// The most values of one option.
const MOST_VALUES: usize = 64;
/// The longest name of a file.
const LONGEST_NAME: usize = 64;

/// A question, ready to be asked.
#[derive(Debug)]
pub(super) struct Typed {
    /// The command and its options, without `--json`.
    pub arguments: Vec<String>,
    /// Arguments without an option's name. They go after `--`, so that none is taken for an option.
    pub positional: Vec<String>,
    /// Files to write before the command starts, in a folder of their own.
    pub files: Vec<(PathBuf, String)>,
    /// The command as a person would type it.
    pub line: String,
    /// Whether it writes files into a folder that are part of the answer.
    pub writes_files: bool,
}

impl Typed {
    /// Converts a question. `line` is clap's description of the command line.
    pub fn new(line: &clap::Command, request: &Request) -> Result<Self, Refusal> {
        let Some((allowed, described)) = find(line, &request.command) else {
            let known: Vec<&str> = super::commands().collect();
            return Err(refused(format!("`{}` cannot be asked for", short(&request.command)), known.join(", ")));
        };
        let mut typed = Self {
            arguments: allowed.command.split(' ').map(str::to_owned).collect(),
            positional: Vec::new(),
            files: Vec::new(),
            line: format!("foretell {}", allowed.command),
            writes_files: allowed.writes_files,
        };
        for name in request.options.keys() {
            if allowed.kind(name).is_none() {
                let hint = foretell_units::suggest(name, allowed.names());
                return Err(refused(format!("`{}` of `{}` cannot be asked for", short(name), allowed.command), hint));
            }
        }
        // In the order of the list, so that equal questions give equal arguments.
        for name in allowed.names() {
            let given = request.options.get(name).filter(|value| !value.is_null());
            if let (Some(value), Some(kind), Some(argument)) = (given, allowed.kind(name), argument(described, name)) {
                typed.option(allowed, argument, (name, kind), value)?;
            }
        }
        Ok(typed)
    }

    /// The words of the command line after the program's own options, including the options for
    /// files that the question asks for.
    pub fn words(&self, request: &Request) -> Vec<String> {
        let mut words = self.arguments.clone();
        words.extend(request.report.then(|| format!("--report={REPORT}")));
        words.extend(request.progress.then(|| format!("--progress={PROGRESS}")));
        words.extend(self.writes_files.then(|| format!("--output={WRITTEN}")));
        words.push("--".into());
        words.extend_from_slice(&self.positional);
        words
    }

    fn option(
        &mut self,
        allowed: &Allowed,
        argument: &clap::Arg,
        (name, kind): (&str, Kind),
        value: &Value,
    ) -> Result<(), Refusal> {
        if !argument.get_action().takes_values() {
            return match value {
                Value::Bool(true) => {
                    self.push(argument, None, None);
                    Ok(())
                }
                Value::Bool(false) => Ok(()),
                _ => Err(refused(format!("`{name}` is a switch"), "give `true` or `false`")),
            };
        }
        let values = match value {
            Value::Array(values) if is_list(argument) => values.as_slice(),
            Value::Array(_) => return Err(refused(format!("`{name}` takes one value"), "give one")),
            value => std::slice::from_ref(value),
        };
        if values.len() > MOST_VALUES {
            return Err(refused(format!("`{name}` has {} values", values.len()), format!("give at most {MOST_VALUES}")));
        }
        for value in values {
            match contents(name, kind, value)? {
                Some((file, text)) => {
                    let path = Path::new(name).join(&file);
                    if self.files.iter().any(|(known, _)| *known == path) {
                        return Err(refused(format!("two files of `{name}` are called `{file}`"), "give each its own name"));
                    }
                    let shown = path.display().to_string();
                    self.files.push((path, text));
                    self.push(argument, Some(&shown), Some(&file));
                }
                None => {
                    let text = plain(name, value)?;
                    if allowed.excludes(name, &text) {
                        return Err(refused(format!("`{name}` cannot be `{text}` here"), "use the command line for it"));
                    }
                    if kind == Kind::NameOrContents {
                        require_name(name, &text)?;
                    }
                    self.push(argument, Some(&text), None);
                }
            }
        }
        Ok(())
    }

    /// Adds an argument. In the command that is shown to people, `shown` replaces the value.
    fn push(&mut self, argument: &clap::Arg, value: Option<&str>, shown: Option<&str>) {
        match (argument.get_long(), value) {
            // With `=` no value can be taken for an option.
            (Some(long), Some(value)) => self.arguments.push(format!("--{long}={value}")),
            (Some(long), None) => self.arguments.push(format!("--{long}")),
            (None, value) => self.positional.push(value.unwrap_or_default().to_owned()),
        }
        let words = argument.get_long().map(|long| format!("--{long}")).into_iter();
        for word in words.chain(shown.or(value).map(quoted)) {
            self.line.push(' ');
            self.line.push_str(&word);
        }
    }
}

fn refused(message: impl Into<String>, hint: impl Into<String>) -> Refusal {
    Refusal::Question(message.into(), hint.into())
}

/// The beginning of a text that may be long, without control characters.
fn short(text: &str) -> String {
    text.chars().filter(|character| !character.is_control()).take(LONGEST_NAME).collect()
}

/// The name and text of a value that is the contents of a file; `None` if it is a plain value.
fn contents(option: &str, kind: Kind, value: &Value) -> Result<Option<(String, String)>, Refusal> {
    let is_text = |text: &str| kind == Kind::Contents || text.contains('\n') || text.trim_start().starts_with('{');
    match (kind, value) {
        (Kind::Plain, _) => Ok(None),
        (_, Value::String(text)) if is_text(text) => {
            let ending = if text.trim_start().starts_with('{') { "json" } else { "yaml" };
            Ok(Some((format!("{option}.{ending}"), text.clone())))
        }
        (_, Value::Object(fields)) => match (fields.get("name"), fields.get("text"), fields.len()) {
            (Some(Value::String(name)), Some(Value::String(text)), 2) => Ok(Some((file_name(name)?, text.clone()))),
            _ => Ok(Some((format!("{option}.json"), value.to_string()))),
        },
        (Kind::NameOrContents, Value::String(_)) => Ok(None),
        _ => Err(refused(format!("`{option}` is the contents of a file"), "give a text, or the document itself")),
    }
}

/// A name of an uploaded file that is safe in a folder.
fn file_name(name: &str) -> Result<String, Refusal> {
    let is_plain = |character: char| character.is_ascii_alphanumeric() || matches!(character, '.' | '_' | '-');
    let is_sound = !name.is_empty() && name.len() <= LONGEST_NAME && !name.starts_with(['.', '-']) && name.chars().all(is_plain);
    is_sound.then(|| name.to_owned()).ok_or_else(|| {
        let hint = format!("use letters, digits, `.`, `_` and `-`, at most {LONGEST_NAME}");
        refused(format!("`{}` is no name of a file here", short(name)), hint)
    })
}

/// A plain value as it would be typed.
fn plain(option: &str, value: &Value) -> Result<String, Refusal> {
    let text = match value {
        Value::String(text) => text.clone(),
        Value::Number(number) => match number.as_f64() {
            // Options that count accept no fraction, and JavaScript may send 8 as 8.0.
            Some(whole) if number.is_f64() && whole.fract() == 0.0 && whole.abs() < 9e15 => format!("{whole:.0}"),
            _ => number.to_string(),
        },
        _ => return Err(refused(format!("`{option}` is a text or a number"), "give one")),
    };
    if text.len() > LONGEST_VALUE || text.chars().any(char::is_control) {
        return Err(refused(format!("`{option}` is too long, or has control characters"), "give a word or a number"));
    }
    Ok(text)
}

/// Refuses a path if a name of the library is expected. The contents of a file may be given
/// instead.
fn require_name(option: &str, text: &str) -> Result<(), Refusal> {
    let is_known = match option {
        "topology" | "name" => Topology::said(text).is_some(),
        "model" => Model::named_on_hub(text).is_some(),
        _ => false,
    };
    let is_path = text.contains(['/', '\\']) && !is_known;
    match is_path {
        true => Err(refused(format!("`{option}` is a path, which is not read here"), "give the contents of the file")),
        false => Ok(()),
    }
}

/// A word in the form in which a shell reads it back.
fn quoted(word: &str) -> String {
    let is_plain = |character: char| character.is_ascii_alphanumeric() || "._/:=,@%+-".contains(character);
    if !word.is_empty() && word.chars().all(is_plain) { word.to_owned() } else { format!("'{}'", word.replace('\'', r"'\''")) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;
    use serde_json::json;

    fn typed(command: &str, options: Value) -> Result<Typed, Refusal> {
        let options = options.as_object().cloned().unwrap_or_default();
        Typed::new(&crate::Arguments::command(), &Request { command: command.into(), options, ..Request::default() })
    }

    #[test]
    fn a_question_becomes_arguments() {
        let question = json!({"model": "gpt2", "topology": "2x8xa100-80g@200Gbit/s", "nodes": 2.0, "precision": ["bf16", "fp8"],
            "front": true, "oversubscribe": false, "fix": null});
        let typed = typed("plan", question).expect("it is allowed");
        let expected = [
            "plan",
            "--model=gpt2",
            "--topology=2x8xa100-80g@200Gbit/s",
            "--nodes=2",
            "--precision=bf16",
            "--precision=fp8",
            "--front",
        ];
        assert_eq!(typed.arguments, expected);
        assert_eq!(
            typed.line,
            "foretell plan --model gpt2 --topology 2x8xa100-80g@200Gbit/s --nodes 2 --precision bf16 \
                                --precision fp8 --front"
        );
        assert!(typed.files.is_empty());
    }

    #[test]
    fn contents_become_files() {
        let plan = json!({"model": "gpt2"});
        let typed = typed("simulate", json!({"plan": plan, "what-if": ["device.peak*2"]})).expect("it is allowed");
        assert_eq!(typed.arguments, ["simulate", "--plan=plan/plan.json", "--what-if=device.peak*2"]);
        assert_eq!(typed.files, [("plan/plan.json".into(), r#"{"model":"gpt2"}"#.to_owned())]);
        assert_eq!(typed.line, "foretell simulate --plan plan.json --what-if 'device.peak*2'");
        let question = json!({"form": "hf-config", "files": {"name": "config.json", "text": "{}"}});
        let typed = super::tests::typed("import", question).expect("it is allowed");
        assert_eq!(
            (typed.arguments, typed.positional),
            (vec!["import".into()], vec!["hf-config".into(), "files/config.json".into()])
        );
    }

    #[test]
    fn hostile_questions_are_refused() {
        let questions = [
            ("execute", json!({})),
            ("plan --output x", json!({})),
            ("plan", json!({"output": "x"})),
            ("plan", json!({"report": "x"})),
            ("plan", json!({"progress": "x"})),
            ("plan", json!({"model": "/etc/passwd"})),
            ("plan", json!({"model": "../x.yaml"})),
            ("plan", json!({"model": "gpt2", "topology": "8x/etc/passwd"})),
            ("plan", json!({"model": {"name": "../x", "text": ""}})),
            ("plan", json!({"model": {"name": ".x", "text": ""}})),
            ("plan", json!({"profile": 3})),
            ("plan", json!({"top": [1, 2]})),
            ("plan", json!({"front": "yes"})),
            ("plan", json!({"fix": "a\u{0}b"})),
            ("plan", json!({"fix": "x".repeat(LONGEST_VALUE + 1)})),
            ("simulate", json!({"beside": "plan.yaml"})),
            ("simulate", json!({"what-if": vec!["peak*2"; MOST_VALUES + 1]})),
            ("export", json!({"plan": {}, "to": "chakra"})),
            ("export", json!({"plan": {}, "to": "Perfetto"})),
            ("import", json!({"form": "hf-config", "files": [{"name": "a", "text": ""}, {"name": "a", "text": ""}]})),
        ];
        for (command, options) in questions {
            let refusal = typed(command, options.clone());
            assert!(matches!(refusal, Err(Refusal::Question(..))), "{command} {options}: {refusal:?}");
        }
    }

    #[test]
    fn words_are_quoted_for_a_shell() {
        assert_eq!(quoted("8xh100"), "8xh100");
        assert_eq!(quoted("a b'c;$(d)"), r"'a b'\''c;$(d)'");
        assert_eq!(quoted(""), "''");
    }

    #[test]
    fn a_value_that_looks_like_an_option_stays_a_value() {
        let option = typed("plan", json!({"model": "--output=x"})).expect("the command refuses it");
        assert_eq!(option.arguments, ["plan", "--model=--output=x"]);
        let shown = typed("models show", json!({"name": "--help"})).expect("the command refuses it");
        assert_eq!((shown.arguments.len(), shown.positional), (2, vec!["--help".to_owned()]));
    }
}
