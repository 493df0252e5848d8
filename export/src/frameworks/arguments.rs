//! Command lines as words, and as flags with their values.

use super::FrameworkError;
use super::shell::Started;
use super::stated::{Notation, Stated, is_variable, unexpanded_in};
use serde_json::{Map, Value};
use std::collections::BTreeMap;

/// Splits a command line or a script into words, as a shell does: quotes keep blanks, `#` begins a
/// comment, a backslash joins lines. Drops the parentheses of arrays.
pub fn words(text: &str) -> Vec<String> {
    let mut words = Vec::new();
    let mut word: Option<String> = None;
    let mut quote = None;
    let mut characters = text.chars().peekable();
    while let Some(character) = characters.next() {
        match (quote, character) {
            (Some(open), close) if open == close => quote = None,
            (Some(_), other) => word.get_or_insert_default().push(other),
            (None, '"' | '\'') => {
                quote = Some(character);
                word.get_or_insert_default();
            }
            (None, '\\') => {
                if let Some(next) = characters.next().filter(|&next| next != '\n') {
                    word.get_or_insert_default().push(next);
                }
            }
            (None, '#') if word.is_none() => while characters.next_if(|&next| next != '\n').is_some() {},
            (None, '(' | ')') => words.extend(word.take()),
            (None, blank) if blank.is_whitespace() => words.extend(word.take()),
            (None, other) => word.get_or_insert_default().push(other),
        }
    }
    words.extend(word);
    words
}

/// How a framework spells flags of several words; readers use these names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Spelling {
    /// `--micro-batch-size`
    Dashes,
    /// `--micro_batch_size`
    Underscores,
}

/// Reads the flags of a job's arguments. A flag without a value is a switch that is on; one with
/// several values has a list.
///
/// # Errors
/// If a word belongs to no flag, or a variable could contain flags.
pub(super) fn flags_of(started: Started, ranks: usize, spelling: Spelling) -> Result<Stated, FrameworkError> {
    let mut values: Map<String, Value> = Map::new();
    let mut last: Option<String> = None;
    for word in started.arguments {
        match word.strip_prefix("--") {
            Some(flag) if !flag.is_empty() => {
                let (name, value) = flag.split_once('=').map_or((flag, None), |(name, value)| (name, Some(value)));
                let name = match spelling {
                    Spelling::Dashes => name.replace('_', "-"),
                    Spelling::Underscores => name.replace('-', "_"),
                };
                values.insert(name.clone(), value.map_or(Value::Bool(true), Value::from));
                last = value.is_none().then_some(name);
            }
            _ => {
                let found = last.as_ref().and_then(|last| Some((last, values.get_mut(last)?)));
                let Some((flag, value)) = found else {
                    return Err(stray(&word, &started.unexpanded));
                };
                if is_variable(&word) && may_hold_flags(flag, value) {
                    return Err(undecided(flag, value, &word, &started.unexpanded));
                }
                match value {
                    Value::Array(words) => words.push(word.into()),
                    Value::String(first) => *value = Value::Array(vec![std::mem::take(first).into(), word.into()]),
                    _ => *value = word.into(),
                }
            }
        }
    }
    let mut stated = Stated::new(values, Notation::Flags);
    stated.unexpanded = started.unexpanded;
    stated.takes_words = spelling == Spelling::Underscores;
    started.notes.into_iter().for_each(|note| stated.assume(note));
    if let Some(own) = started.ranks.filter(|&own| own != ranks) {
        stated.assume(format!("the script starts {own} ranks, and the topology has {ranks} devices, which the plan uses"));
    }
    Ok(stated)
}

/// Returns `true` if a variable that follows a flag and its value could contain further flags: if
/// the flag already has its value, or takes none (`--no-...`). After a number among data, a
/// variable is data (`--data-path 0.5 $ONE 0.5 $OTHER`).
fn may_hold_flags(flag: &str, value: &Value) -> bool {
    let is_weight = |word: &str| word.parse::<f64>().is_ok();
    match value {
        Value::Array(words) => !(flag.contains("data") && words.last().and_then(Value::as_str).is_some_and(is_weight)),
        Value::String(word) => !(flag.contains("data") && is_weight(word)),
        _ => ["no-", "no_"].iter().any(|start| flag.starts_with(start)),
    }
}

/// The error for a variable that could contain any flags.
fn undecided(flag: &str, value: &Value, word: &str, unexpanded: &BTreeMap<String, String>) -> FrameworkError {
    let values: Vec<&str> = match value {
        Value::Array(words) => words.iter().filter_map(Value::as_str).collect(),
        value => value.as_str().into_iter().collect(),
    };
    let before: Vec<&str> = std::iter::once(flag).chain(values).collect();
    FrameworkError::Form {
        reason: format!("`--{} {word}`: `{word}` is not expanded, and may hold any arguments", before.join(" ")),
        hint: expansion_hint(word, unexpanded)
            .unwrap_or_else(|| "give the command as the shell expands it, without variables".into()),
    }
}

/// The hint for a command with a variable whose value the script leaves open.
fn expansion_hint(word: &str, unexpanded: &BTreeMap<String, String>) -> Option<String> {
    unexpanded_in(word, unexpanded).map(|why| format!("{why}; give the command as the shell expands it"))
}

/// The error for a word that belongs to no flag.
fn stray(word: &str, unexpanded: &BTreeMap<String, String>) -> FrameworkError {
    let hint = match expansion_hint(word, unexpanded) {
        Some(hint) => hint,
        None if word.contains('$') => "give the command as the shell expands it, without variables".into(),
        None => "give the arguments alone, or a script that starts a Python script with them".into(),
    };
    FrameworkError::Form { reason: format!("the word `{word}` belongs to no argument"), hint }
}
