//! What can go wrong in a run, in words for the person who started it.

use crate::backend::BackendError;
use crate::data::DataError;
use crate::transport::TransportError;
use foretell_program::PlanError;
use foretell_units::Bytes;
use std::any::Any;
use thiserror::Error;

/// Why a run could not be done.
#[derive(Debug, Error)]
pub enum ExecutorError {
    /// The plan makes no Program.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The data cannot be used.
    #[error(transparent)]
    Data(#[from] DataError),
    /// A kernel refused its operands.
    #[error("instruction {instruction} (`{name}`): {source}")]
    Kernel {
        /// The instruction.
        instruction: u32,
        /// Its operator.
        name: String,
        /// What the backend says.
        source: BackendError,
    },
    /// A rank could not be reached.
    #[error(transparent)]
    Transport(#[from] TransportError),
    /// A GPU, or what belongs to it, fails.
    #[error(transparent)]
    Cuda(#[from] crate::backend::CudaError),
    /// The arena does not fit.
    #[error(
        "{wanted} for a rank's arena could not be had: {reason}; hint: use more ranks, a smaller micro-batch or `recompute: full`"
    )]
    OutOfMemory {
        /// The arena's size.
        wanted: Bytes,
        /// What the system says.
        reason: String,
    },
    /// What this version cannot execute, though it can be simulated.
    #[error("{what} cannot be executed here; hint: {hint}")]
    Unsupported {
        /// What was asked for.
        what: String,
        /// What can.
        hint: String,
    },
    /// A rank ended before its time.
    #[error("rank {rank}{} {cause}", on_host(host))]
    RankDied {
        /// The rank.
        rank: usize,
        /// The name of its node, if the run has several nodes.
        host: Option<String>,
        /// How it ended, as the rest of a sentence that begins with the rank.
        cause: String,
    },
    /// The loss is no number any more.
    #[error("the loss became {loss} at step {step}; hint: lower the learning rate")]
    Diverged {
        /// The step.
        step: usize,
        /// What it became.
        loss: f64,
    },
    /// The operating system refused something.
    #[error("could not {doing}: {source}")]
    System {
        /// What was tried.
        doing: String,
        /// What the system says.
        source: std::io::Error,
    },
    /// A thread of the rank ended as none should.
    #[error("the {stream} stream panicked: {message}; hint: this is a fault in Foretell: please report it")]
    Panicked {
        /// What the thread does.
        stream: String,
        /// The panic's words.
        message: String,
    },
    /// Another thread of the rank failed, and says why itself.
    #[error("another stream of the rank failed")]
    OtherStream,
}

impl ExecutorError {
    /// An operating system's refusal of `doing`.
    pub fn system(doing: impl Into<String>, source: std::io::Error) -> Self {
        ExecutorError::System { doing: doing.into(), source }
    }

    /// The panic of a stream's thread, from what caught it.
    pub(crate) fn panicked(stream: impl Into<String>, panic: &(dyn Any + Send)) -> Self {
        let said =
            panic.downcast_ref::<&str>().map(|text| (*text).to_string()).or_else(|| panic.downcast_ref::<String>().cloned());
        ExecutorError::Panicked { stream: stream.into(), message: said.unwrap_or_else(|| "it does not say why".into()) }
    }

    /// Whether the error only follows from another rank's.
    pub fn is_consequence(&self) -> bool {
        matches!(
            self,
            ExecutorError::OtherStream
                | ExecutorError::Cuda(crate::backend::CudaError::Aborted)
                | ExecutorError::Transport(TransportError::PeerLost { .. } | TransportError::Aborted)
        )
    }
}

fn on_host(host: &Option<String>) -> String {
    host.as_ref().map_or_else(String::new, |host| format!(" on host `{host}`"))
}
