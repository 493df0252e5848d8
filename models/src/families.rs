//! The families of models. One file holds all that a family states: its sizes as model files have them, which sizes are sound, its
//! samples, its usual optimizer, its named models, a small example, and its graph with the weights' public names.
//!
//! A family knows the builder and nothing of the other families. [`decoder`] has what Llama and Mixtral share.

mod bert;
mod check;
mod decoder;
mod gpt;
mod images;
mod llama;
mod lstm;
mod mlp;
mod moe;
mod resnet;
mod t5;
mod vgg;
mod vit;

pub use bert::Bert;
pub use gpt::Gpt;
pub use images::Stem;
pub use llama::Llama;
pub use lstm::LstmSeq2seq;
pub use mlp::Mlp;
pub use moe::{CapacityFactor, Moe};
pub use resnet::Resnet;
pub use t5::T5;
pub use vgg::Vgg;
pub use vit::Vit;

pub(crate) use check::Check;

use crate::builder::GraphOptions;
use crate::error::ModelError;
use crate::graph::Graph;
use crate::optimizer::Optimizer;
use crate::sample::SampleShape;

/// A family: the sizes of one model, and all that follows from them.
pub(crate) trait Family: Sized {
    /// The name of the family in model files.
    const NAME: &'static str;

    /// The optimizer with which its models are usually trained.
    const OPTIMIZER: Optimizer;

    /// The named models of the zoo, in the order in which they are listed.
    fn zoo() -> Vec<(&'static str, Self)>;

    /// Small models, with their names, whose kernels are timed when a calibration names no model.
    fn examples() -> Vec<(&'static str, Self)>;

    /// Refuses sizes of which no graph can be built.
    ///
    /// # Errors
    /// [`ModelError::Inconsistent`]
    fn validate(&self, check: &Check<'_>) -> Result<(), ModelError>;

    /// The form of a training sample.
    fn sample(&self) -> SampleShape;

    /// The forward graph. The sizes and the options are sound.
    fn graph(&self, name: &str, options: &GraphOptions) -> Graph;

    /// The number of equal blocks between the first block and the last. `None` for a model that is not a stack of equal blocks.
    fn repeated_layers(&self) -> Option<usize> {
        None
    }

    /// The number of layers, of a family whose models are stacks of equal blocks.
    fn layers_mut(&mut self) -> Option<&mut usize> {
        None
    }

    /// Whether it has batch normalisation, whose statistics depend on how samples are grouped.
    fn has_batch_norm(&self) -> bool {
        false
    }

    /// Experts of each mixture of experts.
    fn experts(&self) -> Option<usize> {
        None
    }
}
