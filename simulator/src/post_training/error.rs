//! Errors of a prediction of RL post-training.

use crate::error::SimulationError;
use foretell_models::ModelError;
use foretell_program::PlanError;
use miette::Diagnostic;
use thiserror::Error;

/// Why RL post-training has no prediction.
#[derive(Clone, Debug, PartialEq, Error, Diagnostic)]
pub enum PostTrainingError {
    /// The model does not generate tokens.
    #[error("the model's samples are not sequences of tokens, so it generates none")]
    #[diagnostic(code(post_training::no_sequences), help("use a decoder, such as `llama3-8b` or `qwen3-8b`"))]
    NoSequences,
    /// The devices have no profile, or are of several kinds.
    #[error("engines are not predicted on `{topology}`: {reason}")]
    #[diagnostic(code(post_training::devices), help("use devices of one kind of GPU of `foretell topologies`"))]
    Devices {
        /// The name of the topology.
        topology: String,
        /// What is wrong with its devices.
        reason: String,
    },
    /// The topology does not have enough devices for actor and engines.
    #[error("the actor has {actor} ranks and engines {engines} devices of their own, but `{topology}` has {devices} devices")]
    #[diagnostic(code(post_training::too_few_devices), help("{hint}"))]
    TooFewDevices {
        /// Ranks of the actor.
        actor: usize,
        /// Devices used only by engines.
        engines: usize,
        /// The name of the topology.
        topology: String,
        /// Number of its devices.
        devices: usize,
        /// How to fix it.
        hint: String,
    },
    /// The devices of an engine do not divide the actor's devices, which they share.
    #[error("engines of {tensor} devices do not divide the actor's {devices}")]
    #[diagnostic(code(post_training::indivisible), help("use a `tensor` in `rollout` that divides the actor's ranks"))]
    Indivisible {
        /// Devices of an engine.
        tensor: usize,
        /// Ranks of the actor.
        devices: usize,
    },
    /// The model's sizes contradict each other.
    #[error(transparent)]
    #[diagnostic(transparent)]
    Model(#[from] ModelError),
    /// The plan contradicts itself or its model.
    #[error(transparent)]
    #[diagnostic(transparent)]
    Plan(#[from] PlanError),
    /// The actor's step cannot be simulated.
    #[error(transparent)]
    #[diagnostic(transparent)]
    Simulation(#[from] SimulationError),
}
