//! Checks a Program: no two accesses of the same memory race, every read sees what was written, and
//! the lists of all ranks run to their ends without message buffers. A failure is a bug of the
//! compiler, never of a plan. It must not know which layout the Program is for.

mod contents;
mod deadlock;
mod messages;
mod order;
mod races;

use crate::mesh::Rank;
use crate::program::{MemoryKind, Operation, Program, StageProgram, Stream};
use miette::Diagnostic;
use thiserror::Error;

/// A fault of a Program. Instructions and buffers are named as in its lists.
#[derive(Clone, Debug, PartialEq, Eq, Error, Diagnostic)]
pub enum Unsound {
    /// An instruction waits for one that comes later in its list.
    #[error("stage {stage}: `{instruction}` waits for a later instruction")]
    #[diagnostic(code(program::waits_for_later))]
    WaitsForLater {
        /// The stage of the list.
        stage: usize,
        /// The instruction.
        instruction: String,
    },
    /// A buffer does not lie inside its arena, or a part not inside its whole.
    #[error("stage {stage}: buffer `{buffer}` lies outside of its arena or of the buffer that it is a part of")]
    #[diagnostic(code(program::outside))]
    Outside {
        /// The stage of the list.
        stage: usize,
        /// The buffer.
        buffer: String,
    },
    /// Two instructions touch the same memory, one of them writes, and nothing orders them.
    #[error("stage {stage}: `{first}` and `{second}` race for buffer `{buffer}`")]
    #[diagnostic(code(program::race))]
    Race {
        /// The stage of the list.
        stage: usize,
        /// The racing instruction that comes first in the list.
        first: String,
        /// The racing instruction that comes later.
        second: String,
        /// The buffer that the second instruction accesses.
        buffer: String,
    },
    /// An instruction reads a buffer that was never written, or whose memory was overwritten since.
    #[error("stage {stage}: `{instruction}` reads buffer `{buffer}`, which is not there")]
    #[diagnostic(code(program::unwritten))]
    Unwritten {
        /// The stage of the list.
        stage: usize,
        /// The instruction.
        instruction: String,
        /// The buffer.
        buffer: String,
    },
    /// A copy does not move a whole buffer to the other memory on the stream of its direction, or
    /// another instruction touches the host's memory.
    #[error("stage {stage}: `{instruction}` touches memory that it must not")]
    #[diagnostic(code(program::wrong_memory))]
    WrongMemory {
        /// The stage of the list.
        stage: usize,
        /// The instruction.
        instruction: String,
    },
    /// The messages that one rank sends to another are not those that the other receives.
    #[error("what {from} sends is not what {to} receives, from message {message} on")]
    #[diagnostic(code(program::unmatched))]
    Unmatched {
        /// The sender.
        from: Rank,
        /// The receiver.
        to: Rank,
        /// The number of the first message that differs.
        message: usize,
    },
    /// A rank waits forever.
    #[error("{rank} never runs `{instruction}`: the ranks wait for each other")]
    #[diagnostic(code(program::deadlock))]
    Deadlock {
        /// The rank.
        rank: Rank,
        /// The first instruction that it does not run.
        instruction: String,
    },
}

impl Program {
    /// Checks the whole Program. It must have a memory plan. The time is proportional to the number
    /// of ranks.
    ///
    /// # Errors
    /// The first fault that is found.
    pub fn check(&self) -> Result<(), Unsound> {
        self.check_lists()?;
        messages::check(self)?;
        deadlock::check(self)
    }

    /// Checks each list by itself, whatever the number of ranks that run it.
    ///
    /// # Errors
    /// The first fault that is found.
    pub fn check_lists(&self) -> Result<(), Unsound> {
        for list in &self.lists {
            races::check(list)?;
            contents::check(list)?;
            check_memories(list)?;
        }
        Ok(())
    }
}

/// Checks that kernels and communication touch only the device's memory, and that every copy moves
/// a whole buffer to the other memory, on the stream of its direction.
fn check_memories(list: &StageProgram) -> Result<(), Unsound> {
    for instruction in &list.instructions {
        let mut touched = instruction.reads.iter().chain(&instruction.writes).map(|&id| list.buffer(id));
        let is_right = match (&*instruction.operation, &instruction.reads[..], &instruction.writes[..]) {
            (&Operation::Copy { to, bytes }, &[read, ..], &[written, ..]) => {
                let (read, written) = (list.buffer(read), list.buffer(written));
                let is_whole = (read.bytes, written.bytes) == (bytes, bytes);
                let goes_over = written.memory == to && read.memory != to;
                is_whole && goes_over && list.streams[instruction.stream.0 as usize] == Stream::CopyTo(to)
            }
            (Operation::Copy { .. }, ..) => false,
            _ => touched.all(|buffer| buffer.memory == MemoryKind::Device),
        };
        if !is_right {
            return Err(Unsound::WrongMemory { stage: list.stage, instruction: list.name_of(instruction).into() });
        }
    }
    Ok(())
}
