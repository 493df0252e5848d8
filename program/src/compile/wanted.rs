//! The Programs that a caller can request from the compiler.

use super::lowering::Purpose;
use crate::cycle::ExchangePart;

/// One of the Programs of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wanted {
    /// A training step, with its part of an exchange between replicas.
    Step(Option<ExchangePart>),
    Evaluation,
    /// The outputs of the model alone.
    Logits,
    /// A part of a server's session for a worker.
    Serve(usize, SessionPart),
}

/// A part of a session, as a Program of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SessionPart {
    Snapshot,
    Send,
    Receive,
    /// Empty unless updates wait for several pushes.
    Add,
    Update,
}

impl SessionPart {
    /// Every part, in order.
    pub(super) const ALL: [Self; 5] = [Self::Snapshot, Self::Send, Self::Receive, Self::Add, Self::Update];
}

impl Wanted {
    /// The purpose of the graph from which the Program is made.
    pub(super) fn purpose(self) -> Purpose {
        match self {
            Self::Step(_) | Self::Serve(..) => Purpose::Training,
            Self::Evaluation => Purpose::Evaluation,
            Self::Logits => Purpose::Logits,
        }
    }
}
