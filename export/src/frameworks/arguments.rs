//! Command lines as words, and as flags with values.

use super::FrameworkError;
use super::shell;
use super::stated::{Notation, Stated};
use serde_json::{Map, Value};

/// Splits a command line or a script into words, as a shell does: quotes keep blanks, `#` begins a
/// comment, a backslash joins lines. Parentheses of arrays are left out.
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

/// Reads the flags of a job's arguments, or of the script that starts it. A flag without a value is
/// a switch that is on; one with several has a list.
///
/// # Errors
/// If a word belongs to no flag.
pub(super) fn flags(text: &str, ranks: usize) -> Result<Stated, FrameworkError> {
    let started = shell::launch(text)?;
    let mut values: Map<String, Value> = Map::new();
    let mut last: Option<String> = None;
    for word in started.arguments {
        match word.strip_prefix("--") {
            Some(flag) if !flag.is_empty() => {
                let (name, value) = flag.split_once('=').map_or((flag, None), |(name, value)| (name, Some(value)));
                let name = name.replace('_', "-");
                values.insert(name.clone(), value.map_or(Value::Bool(true), Value::from));
                last = value.is_none().then_some(name);
            }
            _ => {
                let Some(value) = last.as_ref().and_then(|last| values.get_mut(last)) else {
                    let hint = if word.contains('$') {
                        "give the command as the shell expands it, without variables"
                    } else {
                        "give the arguments alone, or a script that starts a Python script with them"
                    };
                    return Err(FrameworkError::Form {
                        reason: format!("the word `{word}` belongs to no argument"),
                        hint: hint.into(),
                    });
                };
                match value {
                    Value::Array(words) => words.push(word.into()),
                    Value::String(first) => *value = Value::Array(vec![std::mem::take(first).into(), word.into()]),
                    _ => *value = word.into(),
                }
            }
        }
    }
    let mut stated = Stated::new(values, Notation::Flags);
    started.notes.into_iter().for_each(|note| stated.assume(note));
    if let Some(own) = started.ranks.filter(|&own| own != ranks) {
        stated.assume(format!("the script starts {own} ranks, and the topology has {ranks} devices, which the plan uses"));
    }
    Ok(stated)
}
