//! RL post-training: how long a step takes, and what memory its roles need on their devices.
//!
//! The nouns: the *actor* trains, and is an [`ActorJob`], a plan like any other. *Rollout engines*
//! generate responses: an [`Engine`] does the [`TokenWork`] of each token for responses of some
//! [`Lengths`](crate::Lengths). Frozen models and a critic run on the actor's devices.
//! [`RoleSetting`] places all roles on devices, and predicts the [`crate::Phase`]s of a step.
//!
//! This module must not know frameworks. The planner knows which placements each framework
//! supports.

mod actor;
mod engine;
mod error;
mod memory;
mod step;
mod token_work;
mod transfer;

pub use actor::{ActorCosts, ActorJob};
pub use engine::{Engine, Generation, STEP_OVERHEAD};
pub use error::PostTrainingError;
pub use memory::{PhaseMemory, Residents, RoleMemory};
pub use step::{DeviceGroup, EngineAnswer, PostTrainingPrediction, RoleSetting, predict_post_training};
pub use token_work::TokenWork;
