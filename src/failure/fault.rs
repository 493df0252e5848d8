//! A diagnostic with the context that the command adds: a hint, and the file that is wrong.

use super::code::Code;
use foretell_topologies::Place;
use foretell_units::diagnostic::{SourceFile, help, place, span_at};
use miette::{Diagnostic, LabeledSpan, SourceCode, SourceSpan};
use std::error::Error;
use std::fmt;
use std::path::Path;

/// A fault: a code, a message, usually a hint, and the place in a file if there is one.
#[derive(Debug)]
pub struct Fault {
    cause: Cause,
    subject: Option<String>,
    hint: Option<String>,
    file: Option<SourceFile>,
    span: Option<SourceSpan>,
}

#[derive(Debug)]
enum Cause {
    /// The command found it.
    Command(Code, String),
    /// Another crate found it.
    Diagnostic(Box<dyn Diagnostic + Send + Sync>),
}

impl Fault {
    /// A fault without a hint.
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        Self { cause: Cause::Command(code, message.into()), subject: None, hint: None, file: None, span: None }
    }

    /// A fault that another crate found.
    pub fn of(cause: impl Diagnostic + Send + Sync + 'static) -> Self {
        Self { cause: Cause::Diagnostic(Box::new(cause)), subject: None, hint: None, file: None, span: None }
    }

    /// Sets the hint, in place of the cause's own.
    pub fn hint(self, hint: impl Into<String>) -> Self {
        Self { hint: Some(hint.into()), ..self }
    }

    /// Puts the subject, such as an option, before the message.
    pub fn about(self, subject: &str) -> Self {
        Self { subject: Some(subject.to_owned()), ..self }
    }

    /// Adds the file that is wrong, unless the fault has a place.
    pub fn in_file(self, path: &Path) -> Self {
        if place(&self).is_some() { self } else { self.in_text(path, "", None) }
    }

    /// Adds the file, its text, and where in it the fault is.
    pub fn in_text(self, path: &Path, text: &str, place: Option<Place>) -> Self {
        let position = |number: u64| usize::try_from(number).unwrap_or(usize::MAX);
        let span = place.map(|place| span_at(text, position(place.line), position(place.column)));
        Self { file: Some(SourceFile::new(path.display().to_string(), text.into())), span, ..self }
    }

    fn cause(&self) -> Option<&dyn Diagnostic> {
        match &self.cause {
            Cause::Command(..) => None,
            Cause::Diagnostic(cause) => Some(&**cause),
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(subject) = &self.subject {
            write!(formatter, "{subject}: ")?;
        }
        match &self.cause {
            Cause::Command(_, message) => formatter.write_str(message),
            Cause::Diagnostic(cause) => cause.fmt(formatter),
        }
    }
}

// `source` stays empty: the message includes the cause's.
impl Error for Fault {}

impl Diagnostic for Fault {
    fn code<'a>(&'a self) -> Option<Box<dyn fmt::Display + 'a>> {
        match &self.cause {
            Cause::Command(code, _) => Some(Box::new(code)),
            Cause::Diagnostic(cause) => cause.code(),
        }
    }

    fn help<'a>(&'a self) -> Option<Box<dyn fmt::Display + 'a>> {
        let help = self.hint.clone().or_else(|| help(self.cause()?))?;
        Some(Box::new(help))
    }

    fn source_code(&self) -> Option<&dyn SourceCode> {
        match &self.file {
            Some(file) => Some(file),
            None => self.cause()?.source_code(),
        }
    }

    fn labels(&self) -> Option<Box<dyn Iterator<Item = LabeledSpan> + '_>> {
        match (self.span, &self.file) {
            (Some(span), _) => Some(Box::new(std::iter::once(LabeledSpan::new_with_span(None, span)))),
            (None, Some(_)) => None,
            (None, None) => self.cause()?.labels(),
        }
    }

    fn diagnostic_source(&self) -> Option<&dyn Diagnostic> {
        self.cause()?.diagnostic_source()
    }
}
