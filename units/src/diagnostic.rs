//! The parts of a fault besides its message: how to fix it, and where it is. Programs read these
//! parts, not the message, with one exception: serde keeps only an error's text, so a mistake that
//! a deserialisation recorded belongs to an error if the texts agree ([`Mistake::recorded`]).
//!
//! Errors of all crates are [`miette::Diagnostic`]s: a stable code, a message, and usually a help.
//! This file has what they share, and must not know the errors of other crates.

use miette::{Diagnostic, NamedSource, SourceOffset, SourceSpan};
use serde::{Deserialize, Deserializer, de};
use std::cell::RefCell;
use std::fmt;
use std::sync::Arc;
use thiserror::Error;

/// A value that its option or field does not accept.
#[derive(Clone, Debug, PartialEq, Eq, Error, Diagnostic)]
#[error("{message}")]
#[diagnostic(code(value::refused), help("{hint}"))]
pub struct Mistake {
    /// What is wrong.
    pub message: String,
    /// How to fix it.
    pub hint: String,
}

thread_local! {
    /// The mistake that the last deserialisation of this thread ended with.
    static RECORDED: RefCell<Option<Mistake>> = const { RefCell::new(None) };
}

impl Mistake {
    /// Returns a mistake. `hint` says how to fix it.
    pub fn new(message: impl Into<String>, hint: impl Into<String>) -> Self {
        Self { message: message.into(), hint: hint.into() }
    }

    /// Converts an error of another crate to a mistake.
    pub fn of(error: &dyn Diagnostic) -> Self {
        Self::new(error.to_string(), help(error).unwrap_or_default())
    }

    /// Records the mistake for the reader of the file, and returns serde's error, which is only a
    /// text and would lose the hint.
    pub fn into_serde<E: de::Error>(self) -> E {
        let error = E::custom(&self);
        self.record();
        error
    }

    /// Records the mistake for the reader of the file: see [`Self::recorded`].
    pub fn record(self) {
        RECORDED.set(Some(self));
    }

    /// Returns the mistake that the last deserialisation of this thread ended with, if `error`
    /// starts with its message. Serde may have added the position.
    pub fn recorded(error: &str) -> Option<Self> {
        RECORDED.take().filter(|mistake| error.starts_with(&mistake.message))
    }
}

/// Reads a `Form` and converts it. As `serde(try_from)`, but the hint of the conversion's error is
/// kept.
///
/// # Errors
/// The form's, or the conversion's.
pub fn deserialize_from<'de, Form, Value, D>(deserializer: D) -> Result<Value, D::Error>
where
    Form: Deserialize<'de>,
    Value: TryFrom<Form, Error: Diagnostic>,
    D: Deserializer<'de>,
{
    Value::try_from(Form::deserialize(deserializer)?).map_err(|error| Mistake::of(&error).into_serde())
}

/// A file's name and its text, to which the positions of faults refer.
pub type SourceFile = NamedSource<Arc<str>>;

/// Returns the span of the word at a position in a text. Line and column count from 1, the column
/// in characters.
pub fn span_at(text: &str, line: usize, column: usize) -> SourceSpan {
    let start = SourceOffset::from_location(text, line, column).offset();
    // The word or quantity that begins there.
    let rest = text.get(start..).unwrap_or_default();
    let is_in_word = |character: char| character.is_alphanumeric() || matches!(character, '_' | '-' | '.' | '/' | '@');
    let length = rest.find(|character| !is_in_word(character)).unwrap_or(rest.len());
    (start, length).into()
}

/// Where a fault is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FaultPlace {
    /// The file, if the text has a name.
    pub file: Option<String>,
    /// Line and column in it, from 1, the column in characters. `None` for the whole file.
    pub position: Option<(usize, usize)>,
}

impl fmt::Display for FaultPlace {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.file, self.position) {
            (Some(file), Some((line, column))) => write!(formatter, "{file}:{line}:{column}"),
            (Some(file), None) => formatter.write_str(file),
            (None, Some((line, column))) => write!(formatter, "line {line}, column {column}"),
            (None, None) => Ok(()),
        }
    }
}

/// Returns where a fault is: its source, and in it the first label.
pub fn place(error: &dyn Diagnostic) -> Option<FaultPlace> {
    let source = first(error, |error| error.source_code())?;
    let label = first(error, |error| error.labels()?.next());
    let start = label.as_ref().map_or(0, |label| label.offset());
    // The text from its beginning to the label.
    let contents = source.read_span(&(0, start).into(), 0, 0).ok()?;
    let before = String::from_utf8_lossy(contents.data().get(..start)?);
    let position = label.map(|_| {
        let line = before.matches('\n').count() + 1;
        (line, before.rsplit('\n').next().unwrap_or_default().chars().count() + 1)
    });
    let file = contents.name().filter(|name| !name.is_empty()).map(str::to_owned);
    (file.is_some() || position.is_some()).then_some(FaultPlace { file, position })
}

/// Returns how to fix a fault: its help, or that of its first cause with one.
pub fn help(error: &dyn Diagnostic) -> Option<String> {
    first(error, |error| error.help().map(|help| help.to_string())).filter(|help| !help.is_empty())
}

/// Returns a fault in one line, for logs, tables and tests: its place, its message and its help.
pub fn one_line(error: &dyn Diagnostic) -> String {
    let place = place(error).map_or_else(String::new, |place| format!("{place}: "));
    let help = help(error).map_or_else(String::new, |help| format!("; hint: {help}"));
    format!("{place}{error}{help}")
}

/// Returns a part of an error, or of its first cause that has it.
fn first<'a, T>(error: &'a dyn Diagnostic, part: impl Fn(&'a dyn Diagnostic) -> Option<T>) -> Option<T> {
    std::iter::successors(Some(error), |error| error.diagnostic_source()).find_map(part)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, Error, Diagnostic)]
    #[error("`kind` is wrong")]
    struct Wrong {
        #[source_code]
        file: SourceFile,
        #[label]
        at: SourceSpan,
        #[diagnostic_source]
        #[source]
        cause: Mistake,
    }

    #[test]
    fn a_fault_in_one_line_has_its_place_and_its_help() {
        let text = "# Größe\nkind: fat\n";
        let error = Wrong {
            file: SourceFile::new("a.yaml", text.into()),
            at: span_at(text, 2, 7),
            cause: Mistake::new("`fat` is no kind", "write `slim`"),
        };
        assert_eq!(error.at, (16, 3).into());
        assert_eq!(one_line(&error), "a.yaml:2:7: `kind` is wrong; hint: write `slim`");
        let column = span_at(text, 1, 6);
        assert_eq!(place(&Wrong { at: column, ..error }).and_then(|place| place.position), Some((1, 6)));
    }

    #[test]
    fn a_hint_passes_through_serde() {
        let error: de::value::Error = Mistake::new("`x` is wrong", "write `y`").into_serde();
        let recorded = Mistake::recorded(&error.to_string());
        assert_eq!(recorded, Some(Mistake::new("`x` is wrong", "write `y`")));
        // Each is read once, and belongs to its message.
        assert_eq!(Mistake::recorded(&error.to_string()), None);
        Mistake::new("`x` is wrong", "write `y`").record();
        assert_eq!(Mistake::recorded("something else"), None);
    }
}
