//! Errors in a described cluster, with their place in the file.

use foretell_units::diagnostic::{SourceFile, help, span_at};
use miette::{Diagnostic, LabeledSpan, SourceCode};
use std::fmt;
use std::sync::Arc;
use thiserror::Error;

/// A place in a file, counted from 1 as editors do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Place {
    /// The line.
    pub line: u64,
    /// The column, in characters.
    pub column: u64,
}

/// Why a topology cannot be read, built or used as requested.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{problem}")]
pub struct TopologyError {
    /// The file that was read, if one was.
    pub file: Option<Arc<SourceFile>>,
    /// The place in that file.
    pub place: Option<Place>,
    /// What is wrong at that place.
    pub problem: TopologyProblem,
}

/// What is wrong, without the place.
#[derive(Debug, Clone, PartialEq, Eq, Error, Diagnostic)]
pub enum TopologyProblem {
    /// The text is not YAML, or does not match the schema: an unknown field, or a list in place of
    /// a mapping.
    #[error("{message}")]
    #[diagnostic(code(topology::syntax), help("{hint}"))]
    Syntax {
        /// What is wrong.
        message: String,
        /// What is expected; may be empty.
        hint: String,
    },
    /// A quantity without its unit, or with one of another kind.
    #[error("`{field}`: {reason}")]
    #[diagnostic(code(topology::quantity), help("{hint}"))]
    Quantity {
        /// The field that holds it.
        field: String,
        /// The unit parser's message.
        reason: String,
        /// How to write it.
        hint: String,
    },
    /// An unknown name of a device kind, library topology, link kind or network kind.
    #[error("unknown {what} `{name}`")]
    #[diagnostic(code(topology::unknown_name), help("{hint}"))]
    UnknownName {
        /// What the name should denote, such as a device kind.
        what: &'static str,
        /// The name as written.
        name: String,
        /// The known names.
        hint: String,
    },
    /// A field without a default is missing.
    #[error("{owner} does not state `{field}`")]
    #[diagnostic(code(topology::missing), help("{hint}"))]
    Missing {
        /// The thing that lacks the field.
        owner: String,
        /// The field.
        field: &'static str,
        /// What to write.
        hint: String,
    },
    /// An impossible value: a count of 0, an oversubscription below 1, two nodes with one name.
    #[error("{what}")]
    #[diagnostic(code(topology::invalid), help("{hint}"))]
    Invalid {
        /// What is wrong.
        what: String,
        /// How to fix it.
        hint: String,
    },
    /// No route joins two devices.
    #[error("{from} cannot reach {to}: {reason}")]
    #[diagnostic(code(topology::unreachable), help("{hint}"))]
    Unreachable {
        /// The sending device, in words.
        from: String,
        /// The receiving device, in words.
        to: String,
        /// What is missing between them.
        reason: &'static str,
        /// What to write.
        hint: &'static str,
    },
}

impl TopologyError {
    /// Returns the error with `file` and its text as its file, for a topology written in place in
    /// another file.
    pub fn in_file(mut self, file: &str, text: &str) -> Self {
        self.file = Some(Arc::new(SourceFile::new(file, text.into())));
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

impl Diagnostic for TopologyError {
    fn code<'a>(&'a self) -> Option<Box<dyn fmt::Display + 'a>> {
        self.problem.code()
    }

    fn help<'a>(&'a self) -> Option<Box<dyn fmt::Display + 'a>> {
        help(&self.problem).map(|help| Box::new(help) as Box<dyn fmt::Display>)
    }

    fn source_code(&self) -> Option<&dyn SourceCode> {
        self.file.as_deref().map(|file| file as &dyn SourceCode)
    }

    fn labels(&self) -> Option<Box<dyn Iterator<Item = LabeledSpan> + '_>> {
        let (file, place) = (self.file.as_ref()?, self.place?);
        let position = |number: u64| usize::try_from(number).unwrap_or(usize::MAX);
        let span = span_at(file.inner(), position(place.line), position(place.column));
        Some(Box::new(std::iter::once(LabeledSpan::new_with_span(None, span))))
    }
}
