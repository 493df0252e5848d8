//! Families of models. One file has everything about a family: its sizes as in model files, their
//! checks, the form of its samples, its usual optimizer, its named models, a small example, and its
//! graph with the public names of the weights.
//!
//! A family knows the builder and no other family, except that Llama and Mixtral are decoders
//! ([`decoder`]). To add a family, add its file, its name here, and its variant in `model.rs`.

mod bert;
mod check;
mod clip;
mod decoder;
mod gpt;
mod images;
mod llama;
mod lstm;
mod mlp;
mod modern_bert;
mod moe;
mod network;
mod pre_norm;
mod resnet;
mod t5;
mod vgg;
mod vit;
mod whisper;

pub use bert::Bert;
pub use clip::{Clip, ClipForm, ImageEncoder, TextEncoder};
pub use decoder::{
    CapacityFactor, Decoder, FeedForward, FullAttention, JoinedPatches, LayerInputs, LayerKind, LinearAttention, LinearNorm,
    Mixtures, NormEpsilon, NormKind, ParallelBlock, PositionKind, Projector, ResidualStreams, SharedKeys, VisionTower,
};
pub use gpt::Gpt;
pub use images::Stem;
pub use llama::Llama;
pub use lstm::LstmSeq2seq;
pub use mlp::Mlp;
pub use modern_bert::ModernBert;
pub use moe::Moe;
pub use network::{
    Network, NetworkBlock, NetworkInput, NetworkLayer, NetworkOperation, NetworkStorage, NetworkWindow, NetworkWork,
};
pub use resnet::Resnet;
pub use t5::T5;
pub use vgg::Vgg;
pub use vit::Vit;
pub use whisper::Whisper;

pub(crate) use check::{Check, MOST};

use crate::builder::GraphOptions;
use crate::error::ModelError;
use crate::graph::Graph;
use crate::optimizer::Optimizer;
use crate::sample::SampleShape;

/// The sizes of one model of a family, and everything that follows from them.
pub(crate) trait Family: Sized {
    /// Name of the family in model files.
    const NAME: &'static str;

    /// Optimizer that usually trains its models.
    const OPTIMIZER: Optimizer;

    /// Returns the named models of the zoo, in the order of listings.
    fn zoo() -> Vec<(&'static str, Self)>;

    /// Returns small models with their names. A calibration without a model times their kernels.
    fn examples() -> Vec<(&'static str, Self)>;

    /// Refuses sizes that no graph can be built from.
    ///
    /// # Errors
    /// [`ModelError::Inconsistent`]
    fn validate(&self, check: &Check<'_>) -> Result<(), ModelError>;

    /// Returns the form of a training sample.
    fn sample(&self) -> SampleShape;

    /// Returns the optimizer that trains the model, as far as the model says.
    fn usual_optimizer(&self) -> Optimizer {
        Self::OPTIMIZER
    }

    /// Builds the forward graph. The sizes and the options are sound.
    fn graph(&self, name: &str, options: &GraphOptions) -> Graph;

    /// Returns the number of equal blocks between the first block and the last. `None` if the model
    /// is not a stack of equal blocks.
    fn repeated_layers(&self) -> Option<usize> {
        None
    }

    /// Returns the number of layers, for families whose models can be stacks of equal blocks.
    fn layers_mut(&mut self) -> Option<&mut usize> {
        None
    }

    /// Whether the model has batch normalisation, whose statistics depend on the grouping of
    /// samples.
    fn has_batch_norm(&self) -> bool {
        false
    }

    /// Whether the model is a stack of blocks with attention.
    fn is_transformer(&self) -> bool {
        false
    }

    /// Returns the parts of the model that are planned and simulated, but not executed, as a model
    /// file names them.
    fn planned_only(&self) -> Vec<&'static str> {
        Vec::new()
    }
}
