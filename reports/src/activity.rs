//! The kind of work that an instruction does, as drawings colour it. It knows no colours.

use foretell_program::{Instruction, Operation, Phase};

/// The kind of work that a colour shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Activity {
    Forward,
    Backward,
    Recompute,
    Update,
    Communication,
    Load,
}

impl Activity {
    /// Every kind, in the order of a legend.
    pub(crate) const ALL: [Self; 6] =
        [Self::Forward, Self::Backward, Self::Recompute, Self::Update, Self::Communication, Self::Load];

    /// The kind of an instruction's work.
    pub(crate) fn of(instruction: &Instruction) -> Self {
        match (&*instruction.operation, instruction.phase) {
            (Operation::Load { .. }, _) => Self::Load,
            (Operation::Collective { .. } | Operation::Send { .. } | Operation::Receive { .. }, _)
            | (Operation::Copy { .. } | Operation::Save { .. } | Operation::Write { .. }, _) => Self::Communication,
            (Operation::Compute { .. } | Operation::Traced { .. }, Phase::Forward) => Self::Forward,
            (Operation::Compute { .. } | Operation::Traced { .. }, Phase::Backward) => Self::Backward,
            (Operation::Compute { .. } | Operation::Traced { .. }, Phase::Recompute) => Self::Recompute,
            (Operation::Compute { .. } | Operation::Traced { .. }, Phase::Update) => Self::Update,
        }
    }

    /// The name in a legend.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Forward => "forward",
            Self::Backward => "backward",
            Self::Recompute => "recompute",
            Self::Update => "update",
            Self::Communication => "communication",
            Self::Load => "load",
        }
    }
}
