//! Errors of a run, worded for the person who started it.

use crate::backend::BackendError;
use crate::checkpoint_error::CheckpointError;
use crate::data::DataError;
use crate::transport::{StreamNumber, TransportError};
use foretell_program::PlanError;
use foretell_units::Bytes;
use miette::Diagnostic;
use signal_hook::consts::{SIGINT, SIGTERM, SIGUSR1};
use std::any::Any;
use std::path::{Path, PathBuf};
use std::time::Duration;
use thiserror::Error;

/// The reason why a run failed.
#[derive(Debug, Error, Diagnostic)]
pub enum ExecutorError {
    /// The plan does not compile to a Program.
    #[error(transparent)]
    #[diagnostic(transparent)]
    Plan(#[from] PlanError),
    /// The data cannot be used.
    #[error(transparent)]
    #[diagnostic(transparent)]
    Data(#[from] DataError),
    /// A kernel refused its operands, or found invalid data in them.
    #[error("instruction {instruction} (`{name}`): {source}")]
    #[diagnostic(code(run::kernel))]
    Kernel {
        /// The instruction's index in the rank's list.
        instruction: u32,
        /// The instruction's operator.
        name: String,
        /// The backend's error.
        #[diagnostic_source]
        source: BackendError,
    },
    /// A rank cannot be reached.
    #[error(transparent)]
    #[diagnostic(transparent)]
    Transport(#[from] TransportError),
    /// A GPU, its driver or one of its libraries failed.
    #[error(transparent)]
    #[diagnostic(transparent)]
    Cuda(#[from] crate::backend::CudaError),
    /// A checkpoint or a file of weights cannot be used or written.
    #[error(transparent)]
    #[diagnostic(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// An arena cannot be allocated.
    #[error("cannot allocate {wanted} for a rank's arena: {reason}")]
    #[diagnostic(code(run::out_of_memory), help("use more ranks, a smaller micro-batch or `recompute: full`"))]
    OutOfMemory {
        /// The arena's size.
        wanted: Bytes,
        /// The system's message.
        reason: String,
    },
    /// This version cannot execute the plan, though it can simulate it.
    #[error("{what} cannot be executed here")]
    #[diagnostic(code(run::unsupported), help("{hint}"))]
    Unsupported {
        /// The part of the plan or job that cannot be executed.
        what: String,
        /// What to do instead.
        hint: String,
    },
    /// A rank's process ended early.
    #[error("rank {rank}{} {cause}", on_host(host))]
    #[diagnostic(code(run::rank_died), help("{hint}"))]
    RankDied {
        /// The rank.
        rank: usize,
        /// The name of its node, if the run has several nodes.
        host: Option<String>,
        /// The cause, worded so that it continues "rank 3 ...".
        cause: String,
        /// Where to look, or what to change.
        hint: String,
    },
    /// Bytes between two ranks do not arrive, though both ranks reach the launcher.
    #[error("the link between rank {peer}{} and rank {rank}{} is lost: rank {rank} has waited {waited:?} for {} on {stream}, though both ranks run", on_host(peer_host), on_host(host), if *is_connected { format!("bytes that rank {peer} has sent") } else { format!("a connection to rank {peer}") })]
    #[diagnostic(code(run::link_lost), help("see the network between their hosts, or `--peer-timeout` allows longer"))]
    LinkLost {
        /// The rank that waits.
        rank: usize,
        /// The name of its node, if the run has several nodes.
        host: Option<String>,
        /// The rank at the other end.
        peer: usize,
        /// The name of its node, if the run has several nodes.
        peer_host: Option<String>,
        /// The stream on which it waits.
        stream: StreamNumber,
        /// How long it has waited at least.
        waited: Duration,
        /// `true` if the connection was lost, `false` if it was never made.
        is_connected: bool,
    },
    /// A rank failed and said why.
    #[error("rank {rank}{} failed: {message}", on_host(host))]
    #[diagnostic(code(run::rank_failed), help("{hint}"))]
    RankFailed {
        /// The rank.
        rank: usize,
        /// The name of its node, if the run has several nodes.
        host: Option<String>,
        /// The rank's own error.
        message: String,
        /// How to fix it; may be empty.
        hint: String,
    },
    /// A signal stopped the run.
    #[error("{} stopped the run after {steps} steps; {}", stop_signal_name(*signal), state_left(checkpoint.as_deref()))]
    #[diagnostic(code(run::stopped), help("{}", how_to_go_on(checkpoint.as_deref())))]
    Stopped {
        /// The signal's number.
        signal: i32,
        /// The number of steps that were made, those before this command included.
        steps: usize,
        /// The run's last checkpoint.
        checkpoint: Option<PathBuf>,
    },
    /// The loss is not finite.
    #[error("the loss became {loss} at step {step}")]
    #[diagnostic(code(run::diverged), help("lower the learning rate; `--allow-divergence` goes on"))]
    Diverged {
        /// The step, counted from 0.
        step: usize,
        /// The loss: NaN or an infinity.
        loss: f64,
    },
    /// A system call failed.
    #[error("could not {doing}: {source}")]
    #[diagnostic(code(run::system))]
    System {
        /// The attempted action, worded so that it continues "could not ...".
        doing: String,
        /// The system's error.
        source: std::io::Error,
    },
    /// A stream's thread panicked.
    #[error("the {stream} stream panicked: {message}")]
    #[diagnostic(code(run::panicked), help("this is a fault in Foretell: please report it"))]
    Panicked {
        /// The stream.
        stream: String,
        /// The panic's message.
        message: String,
    },
    /// Another stream of the rank failed and reports the cause itself.
    #[error("another stream of the rank failed")]
    #[diagnostic(code(run::other_stream))]
    OtherStream,
}

impl ExecutorError {
    /// The error of a failed system call; `doing` continues the words "could not".
    pub fn system(doing: impl Into<String>, source: std::io::Error) -> Self {
        ExecutorError::System { doing: doing.into(), source }
    }

    /// The error of a rank that reports what has no place in the job.
    pub(crate) fn unexpected_report(what: &str, rank: usize) -> Self {
        let what = format!("{what}, from rank {rank},");
        ExecutorError::Unsupported { what, hint: "this is a fault of Foretell: please report it".into() }
    }

    /// The error of a stream's panic, from the payload that `catch_unwind` returned.
    pub(crate) fn panicked(stream: impl Into<String>, panic: &(dyn Any + Send)) -> Self {
        let message =
            panic.downcast_ref::<&str>().map(|text| (*text).to_string()).or_else(|| panic.downcast_ref::<String>().cloned());
        ExecutorError::Panicked { stream: stream.into(), message: message.unwrap_or_else(|| "no message".into()) }
    }

    /// Whether the error only follows from a failure elsewhere: in another stream or rank.
    pub fn is_consequence(&self) -> bool {
        matches!(
            self,
            ExecutorError::OtherStream
                | ExecutorError::Cuda(crate::backend::CudaError::Aborted)
                | ExecutorError::Transport(TransportError::PeerLost { .. } | TransportError::Aborted)
        )
    }
}

/// The name of a signal that stops runs.
pub fn stop_signal_name(signal: i32) -> &'static str {
    match signal {
        SIGTERM => "SIGTERM",
        SIGINT => "SIGINT",
        SIGUSR1 => "SIGUSR1",
        _ => "a signal",
    }
}

fn state_left(checkpoint: Option<&Path>) -> String {
    match checkpoint {
        Some(checkpoint) => format!("its state is in `{}`", checkpoint.display()),
        None => "it wrote no checkpoint".into(),
    }
}

fn how_to_go_on(checkpoint: Option<&Path>) -> String {
    match checkpoint.and_then(|checkpoint| checkpoint.parent()?.parent()) {
        Some(run) => format!("go on with `foretell execute --resume {}`", run.display()),
        None => "start it again, without `--save-every never` if it is to go on".into(),
    }
}

fn on_host(host: &Option<String>) -> String {
    host.as_ref().map_or_else(String::new, |host| format!(" on host `{host}`"))
}
