//! Errors of labs.

use foretell_executor::ExecutorError;
use foretell_topologies::TopologyError;
use miette::Diagnostic;
use thiserror::Error;

/// An error of a lab.
#[derive(Debug, Error, Diagnostic)]
pub enum LabError {
    /// The topology describes something that cannot be made into a lab.
    #[error("`{topology}` cannot be made into a lab: {what}")]
    #[diagnostic(code(lab::unsupported), help("{hint}"))]
    Unsupported {
        /// The topology's name.
        topology: String,
        /// The part that cannot be made.
        what: String,
        /// The solution.
        hint: String,
    },
    /// The topology has no routes.
    #[error(transparent)]
    #[diagnostic(transparent)]
    Topology(#[from] TopologyError),
    /// This machine or this user cannot make labs.
    #[error("a lab cannot be made on this machine: {0}")]
    #[diagnostic(code(lab::not_possible), help("`foretell doctor` says what is missing"))]
    NotPossible(String),
    /// There is a lab of that name already.
    #[error("the lab `{name}` is up {state}")]
    #[diagnostic(code(lab::is_up), help("take it down with `foretell lab down --topology {name}`"))]
    IsUp {
        /// The lab's name.
        name: String,
        /// Its state, as the end of a sentence.
        state: &'static str,
    },
    /// There is no lab of that name.
    #[error("the lab `{name}` is not up")]
    #[diagnostic(code(lab::is_down), help("`foretell lab up --topology {name}`"))]
    IsDown {
        /// The lab's name.
        name: String,
    },
    /// The lab has no node of that name.
    #[error("the lab `{name}` has no node `{node}`")]
    #[diagnostic(code(lab::no_such_node), help("it has {known}"))]
    NoSuchNode {
        /// The lab's name.
        name: String,
        /// The node that was asked for.
        node: String,
        /// The nodes that there are.
        known: String,
    },
    /// A command failed.
    #[error("`{command}` failed: {reason}")]
    #[diagnostic(code(lab::command))]
    Command {
        /// The command line.
        command: String,
        /// Its first line on standard error, or its exit status.
        reason: String,
    },
    /// Something could not be removed.
    #[error("the lab `{name}` could not be taken down completely: {reason}")]
    #[diagnostic(code(lab::not_removed), help("`ip netns pids NAME` lists the processes in a namespace"))]
    NotRemoved {
        /// The lab's name.
        name: String,
        /// The parts that are left, or the error.
        reason: String,
    },
    /// The operating system refused something.
    #[error("could not {doing}: {source}")]
    #[diagnostic(code(lab::system))]
    System {
        /// The action that failed.
        doing: String,
        /// The system's error.
        source: std::io::Error,
    },
    /// The state file could not be written.
    #[error(transparent)]
    #[diagnostic(transparent)]
    File(#[from] ExecutorError),
}

impl LabError {
    pub(crate) fn system(doing: impl Into<String>, source: impl Into<std::io::Error>) -> Self {
        LabError::System { doing: doing.into(), source: source.into() }
    }
}
