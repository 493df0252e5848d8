//! Why a question has no answer.

use crate::failure::FailureAnswer;
use foretell_units::{Bytes, Seconds};
use std::fmt;

/// Why a question has no answer. A failure that the command itself reports is an answer.
#[derive(Clone, Debug, PartialEq)]
pub enum Refusal {
    /// The question is wrong: a sentence, and a hint.
    Question(String, String),
    /// A later question replaced this one, or the client does not want the answer any more.
    Cancelled,
    /// The answer took longer than allowed.
    Time(Seconds),
    /// The answer took more memory than allowed.
    Memory(Bytes),
    /// Too many questions wait already.
    Busy,
    /// The system does not let a child answer, or the child ended without a document.
    Broken(String),
}

impl Refusal {
    /// An identifier of the reason, for programs.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Question(..) => "input",
            Self::Cancelled => "cancelled",
            Self::Time(_) => "time",
            Self::Memory(_) => "memory",
            Self::Busy => "busy",
            Self::Broken(_) => "undone",
        }
    }

    /// How to get an answer.
    pub fn hint(&self) -> Option<&str> {
        match self {
            Self::Question(_, hint) => Some(hint),
            Self::Cancelled | Self::Broken(_) => None,
            Self::Time(_) => Some("ask for a shorter search with `time-limit`, or start with a longer `--answer-time`"),
            Self::Memory(_) => Some("ask about fewer devices, or start with more `--answer-memory`"),
            Self::Busy => Some("ask again later"),
        }
    }

    /// The document of a command that fails for this reason.
    pub fn document(&self) -> FailureAnswer {
        FailureAnswer::new(self.code(), self.to_string(), self.hint())
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Question(message, _) | Self::Broken(message) => formatter.write_str(message),
            Self::Cancelled => formatter.write_str("the question was cancelled"),
            Self::Time(limit) => write!(formatter, "the answer took longer than {limit}"),
            Self::Memory(limit) => write!(formatter, "the answer took more memory than {limit}"),
            Self::Busy => formatter.write_str("too many questions wait for an answer"),
        }
    }
}
