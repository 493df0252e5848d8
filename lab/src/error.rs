//! Why a lab cannot be made or used, in words for the person who asked for it.

use foretell_executor::ExecutorError;
use foretell_topologies::TopologyError;
use thiserror::Error;

/// What is wrong with a lab.
#[derive(Debug, Error)]
pub enum LabError {
    /// The topology describes what cannot be made here.
    #[error("`{topology}` cannot be made here: {what}; hint: {hint}")]
    Unsupported {
        /// The topology's name.
        topology: String,
        /// What of it.
        what: String,
        /// The mend.
        hint: String,
    },
    /// The routes of the topology cannot be found.
    #[error(transparent)]
    Topology(#[from] TopologyError),
    /// This machine or this user cannot make labs.
    #[error("a lab cannot be made here: {0}; hint: `foretell doctor` says what is missing")]
    NotHere(String),
    /// There is one already.
    #[error("the lab `{name}` is up {how}; hint: take it down with `foretell lab down --topology {name}`")]
    IsUp {
        /// Its name.
        name: String,
        /// In what state.
        how: &'static str,
    },
    /// There is none.
    #[error("the lab `{name}` is not up; hint: `foretell lab up --topology {name}`")]
    IsDown {
        /// Its name.
        name: String,
    },
    /// A node that the lab does not have.
    #[error("the lab `{name}` has no node `{node}`; hint: it has {known}")]
    NoSuchNode {
        /// The lab.
        name: String,
        /// The node asked for.
        node: String,
        /// Those that there are.
        known: String,
    },
    /// A command failed.
    #[error("`{command}` failed: {reason}")]
    Command {
        /// The command line.
        command: String,
        /// Its words.
        reason: String,
    },
    /// Something could not be removed.
    #[error("the lab `{name}` could not be taken down wholly: {left} is left; hint: see what uses it with `ip netns pids`")]
    NotRemoved {
        /// The lab.
        name: String,
        /// What is left.
        left: String,
    },
    /// The operating system refused something.
    #[error("could not {doing}: {source}")]
    System {
        /// What was tried.
        doing: String,
        /// What the system says.
        source: std::io::Error,
    },
    /// The state file could not be written.
    #[error(transparent)]
    File(#[from] ExecutorError),
}

impl LabError {
    pub(crate) fn system(doing: impl Into<String>, source: impl Into<std::io::Error>) -> Self {
        LabError::System { doing: doing.into(), source: source.into() }
    }
}
