//! Errors in a described cluster, with their place in the file.
//!
//! A message is one sentence in the form `file:line:column: what is wrong; hint: the fix`.

use std::fmt;
use thiserror::Error;

/// A place in a file, counted from 1 as editors do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Place {
    /// The line.
    pub line: u64,
    /// The column, in characters.
    pub column: u64,
}

/// Why a topology cannot be read, built or used as asked.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{}{problem}", Prefix(self))]
pub struct TopologyError {
    /// The file that was read, if one was.
    pub file: Option<String>,
    /// Where in that file.
    pub place: Option<Place>,
    /// What is wrong there.
    pub problem: TopologyProblem,
}

/// What is wrong, without the place.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum TopologyProblem {
    /// The text is not YAML, or not of the schema: an unknown field, a list where a mapping
    /// belongs.
    #[error("{0}")]
    Syntax(String),
    /// A quantity without its unit, or with one of another kind.
    #[error("`{field}`: {reason}")]
    Quantity {
        /// The field that holds it.
        field: String,
        /// The unit parser's message, hint included.
        reason: String,
    },
    /// An unknown name of a device kind, library topology, link kind or network kind.
    #[error("unknown {what} `{name}`; hint: {hint}")]
    UnknownName {
        /// The kind of thing that the name should denote.
        what: &'static str,
        /// The name as written.
        name: String,
        /// The known names.
        hint: String,
    },
    /// A field without a default is missing.
    #[error("{owner} does not state `{field}`; hint: {hint}")]
    Missing {
        /// The thing that lacks the field.
        owner: String,
        /// The field.
        field: &'static str,
        /// What to write.
        hint: String,
    },
    /// An impossible value: a count of 0, an oversubscription below 1, two nodes with one name.
    #[error("{what}; hint: {hint}")]
    Invalid {
        /// What is wrong.
        what: String,
        /// How to fix it.
        hint: String,
    },
    /// No route joins two devices.
    #[error("{from} cannot reach {to}: {reason}")]
    Unreachable {
        /// The sending device, in words.
        from: String,
        /// The receiving device, in words.
        to: String,
        /// What is missing between them, with a hint.
        reason: &'static str,
    },
}

impl TopologyError {
    /// Returns the error with `file` as its file, for a topology written in place in another file.
    pub fn in_file(mut self, file: &str) -> Self {
        self.file = Some(file.to_owned());
        self
    }

    pub(crate) fn at(place: Option<Place>, problem: TopologyProblem) -> Self {
        TopologyError { file: None, place, problem }
    }

    pub(crate) fn invalid(place: Option<Place>, what: impl Into<String>, hint: impl Into<String>) -> Self {
        Self::at(place, TopologyProblem::Invalid { what: what.into(), hint: hint.into() })
    }
}

impl From<TopologyProblem> for TopologyError {
    fn from(problem: TopologyProblem) -> Self {
        TopologyError::at(None, problem)
    }
}

/// The known part of `file:line:column: `.
struct Prefix<'a>(&'a TopologyError);

impl fmt::Display for Prefix<'_> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.0.file, self.0.place) {
            (Some(file), Some(place)) => write!(formatter, "{file}:{}:{}: ", place.line, place.column),
            (Some(file), None) => write!(formatter, "{file}: "),
            (None, Some(place)) => write!(formatter, "line {}, column {}: ", place.line, place.column),
            (None, None) => Ok(()),
        }
    }
}
