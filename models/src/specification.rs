//! What a user writes to name a model: a zoo name, or a family with its sizes. See the contract's "A model file".
//! It must not know how models are built from operators: that is the zoo's.

mod build;
mod defaults;
mod error;
mod sample;
mod validate;

pub use defaults::CapacityFactor;
pub use error::ModelError;
pub use sample::SampleShape;

pub(crate) use sample::masked_predictions;

use crate::dropout::DropoutRate;
use crate::zoo;
use defaults::{
    default_buckets, default_channels, default_classes, default_classifier, default_image, default_max_distance,
    default_moe_theta, default_one, default_theta, default_tied, default_width, is_zero,
};
use serde::{Deserialize, Serialize};

/// The first layers of a ResNet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Stem {
    /// A 7x7 convolution of stride 2 and a max-pool, for 224x224 images.
    #[default]
    Imagenet,
    /// A 3x3 convolution of stride 1, for 32x32 images and smaller.
    Small,
}

/// The sizes of a model, by family.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "family", rename_all = "lowercase", deny_unknown_fields)]
pub enum Model {
    /// A multi-layer perceptron with ReLU between its layers.
    Mlp {
        /// Features in, hidden widths, classes out.
        widths: Vec<usize>,
    },
    /// He et al. 2016, as torchvision builds it.
    Resnet {
        /// 18, 34, 50, 101 or 152.
        depth: usize,
        /// The first layers.
        #[serde(default)]
        stem: Stem,
        /// Side of the square images.
        #[serde(default = "default_image")]
        image: usize,
        /// Channels of the images.
        #[serde(default = "default_channels")]
        channels: usize,
        /// Classes to tell apart.
        #[serde(default = "default_classes")]
        classes: usize,
        /// Channels of the first stage.
        #[serde(default = "default_width")]
        width: usize,
    },
    /// GPT-2's architecture (Radford et al. 2019) in any size.
    Gpt {
        /// Transformer layers.
        layers: usize,
        /// Features of a position.
        hidden: usize,
        /// Attention heads.
        heads: usize,
        /// Inner width of the feed-forward network; four times `hidden` if left out.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        ffn: Option<usize>,
        /// Tokens that there are.
        vocab: usize,
        /// Positions of a training sample.
        sequence: usize,
        /// Whether the head shares the embedding's weights.
        #[serde(default = "default_tied")]
        tied_embeddings: bool,
        /// The share of the embedding and of what goes into the residual stream that dropout drops; 0 if left out.
        #[serde(default, skip_serializing_if = "DropoutRate::is_none")]
        dropout: DropoutRate,
        /// The share of attention's probabilities that dropout drops; 0 if left out.
        #[serde(default, skip_serializing_if = "DropoutRate::is_none")]
        attention_dropout: DropoutRate,
    },
    /// Mixtral's architecture (Jiang et al. 2024) in any size: a Llama with mixtures of experts.
    Moe {
        /// Transformer layers.
        layers: usize,
        /// Features of a position.
        hidden: usize,
        /// Attention heads.
        heads: usize,
        /// Heads of keys and values; as `heads` if left out.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        kv_heads: Option<usize>,
        /// Features of a head; `hidden / heads` if left out.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        head_dimension: Option<usize>,
        /// Queries are made through so many features with a norm, as DeepSeek's latent attention makes them; straight from `hidden` if left out.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        query_rank: Option<usize>,
        /// Keys and values are made through so many features with a norm; straight from `hidden` if left out.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        key_value_rank: Option<usize>,
        /// Inner width of an expert, and of a layer that is no mixture unless `dense_ffn` says another.
        ffn: usize,
        /// Inner width of a layer that is no mixture.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        dense_ffn: Option<usize>,
        /// Inner width of the experts that every token goes to, all together; there are none if left out.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        shared_ffn: Option<usize>,
        /// So many layers at the beginning are no mixtures.
        #[serde(default, skip_serializing_if = "is_zero")]
        dense_layers: usize,
        /// Tokens that there are.
        vocab: usize,
        /// Positions of a training sample.
        sequence: usize,
        /// Experts of a mixture.
        experts: usize,
        /// Experts that a token is sent to.
        top_k: usize,
        /// Every so many layers one is a mixture.
        #[serde(default = "default_one")]
        moe_every: usize,
        /// The slots of the experts over what balanced routing needs. What finds no slot is dropped; with `experts / top_k` nothing is.
        #[serde(default)]
        capacity_factor: CapacityFactor,
        /// The base of the rotary position embedding.
        #[serde(default = "default_moe_theta")]
        rope_theta: usize,
        /// Whether the head shares the embedding's weights.
        #[serde(default)]
        tied_embeddings: bool,
    },
    /// T5 (Raffel et al. 2020) in any size.
    T5 {
        /// Layers of the encoder, and of the decoder.
        layers: usize,
        /// Features of a position.
        hidden: usize,
        /// Attention heads.
        heads: usize,
        /// Features of a head; `hidden / heads` if left out.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        head_dimension: Option<usize>,
        /// Inner width of the feed-forward network.
        ffn: usize,
        /// Tokens that there are.
        vocab: usize,
        /// Tokens that are read.
        source_sequence: usize,
        /// Tokens that are written.
        target_sequence: usize,
        /// Buckets of distances between positions.
        #[serde(default = "default_buckets")]
        relative_buckets: usize,
        /// Distances from this on share the last bucket.
        #[serde(default = "default_max_distance")]
        relative_max_distance: usize,
        /// Whether the feed-forward network is a gated GELU, as in T5 v1.1 and FLAN-T5, instead of a ReLU.
        #[serde(default)]
        gated: bool,
        /// Whether the head shares the embedding's weights.
        #[serde(default = "default_tied")]
        tied_embeddings: bool,
        /// The share of the embeddings and of what goes into the residual streams that dropout drops; 0 if left out.
        #[serde(default, skip_serializing_if = "DropoutRate::is_none")]
        dropout: DropoutRate,
        /// The share of attention's probabilities that dropout drops; 0 if left out.
        #[serde(default, skip_serializing_if = "DropoutRate::is_none")]
        attention_dropout: DropoutRate,
    },
    /// An encoder and a decoder of LSTM layers (Sutskever et al. 2014): the decoder begins in the states in which the encoder ends.
    #[serde(rename = "lstm-seq2seq")]
    LstmSeq2seq {
        /// Layers of the encoder, and of the decoder.
        layers: usize,
        /// Features of a state.
        hidden: usize,
        /// Features of a token; as `hidden` if left out.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        embedding: Option<usize>,
        /// Tokens that there are in what is read.
        source_vocab: usize,
        /// Tokens that there are in what is written.
        target_vocab: usize,
        /// Tokens that are read.
        source_sequence: usize,
        /// Tokens that are written.
        target_sequence: usize,
    },
    /// Llama's architecture (Touvron et al. 2023).
    Llama {
        /// Transformer layers.
        layers: usize,
        /// Features of a position.
        hidden: usize,
        /// Attention heads.
        heads: usize,
        /// Heads of keys and values; as many as `heads` if left out.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        kv_heads: Option<usize>,
        /// Features of a head; `hidden / heads` if left out.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        head_dimension: Option<usize>,
        /// Inner width of the feed-forward network.
        ffn: usize,
        /// Tokens that there are.
        vocab: usize,
        /// Positions of a training sample.
        sequence: usize,
        /// Whether the head shares the embedding's weights.
        #[serde(default)]
        tied_embeddings: bool,
        /// Base of the rotary embedding's frequencies.
        #[serde(default = "default_theta")]
        rope_theta: usize,
    },
    /// BERT (Devlin et al. 2019), trained to find masked words.
    Bert {
        /// Transformer layers.
        layers: usize,
        /// Features of a position.
        hidden: usize,
        /// Attention heads.
        heads: usize,
        /// Inner width of the feed-forward network; four times `hidden` if left out.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        ffn: Option<usize>,
        /// Tokens that there are.
        vocab: usize,
        /// Positions of a training sample.
        sequence: usize,
        /// The share of the embedding and of what goes into the residual stream that dropout drops; 0 if left out.
        #[serde(default, skip_serializing_if = "DropoutRate::is_none")]
        dropout: DropoutRate,
        /// The share of attention's probabilities that dropout drops; 0 if left out.
        #[serde(default, skip_serializing_if = "DropoutRate::is_none")]
        attention_dropout: DropoutRate,
    },
    /// The vision transformer (Dosovitskiy et al. 2021), as torchvision builds it.
    Vit {
        /// Transformer layers.
        layers: usize,
        /// Features of a position.
        hidden: usize,
        /// Attention heads.
        heads: usize,
        /// Inner width of the perceptron; four times `hidden` if left out.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        ffn: Option<usize>,
        /// Side of the square patches, which divides the image's.
        patch: usize,
        /// Side of the square images.
        #[serde(default = "default_image")]
        image: usize,
        /// Channels of the images.
        #[serde(default = "default_channels")]
        channels: usize,
        /// Classes to tell apart.
        #[serde(default = "default_classes")]
        classes: usize,
        /// The share of the embedding and of what goes into the residual stream that dropout drops (not within the perceptron); 0 if left out.
        #[serde(default, skip_serializing_if = "DropoutRate::is_none")]
        dropout: DropoutRate,
        /// The share of attention's probabilities that dropout drops; 0 if left out.
        #[serde(default, skip_serializing_if = "DropoutRate::is_none")]
        attention_dropout: DropoutRate,
    },
    /// VGG (Simonyan and Zisserman 2015), as torchvision builds it.
    Vgg {
        /// 11, 13, 16 or 19.
        depth: usize,
        /// Whether convolutions are followed by batch normalisation.
        #[serde(default)]
        batch_norm: bool,
        /// `imagenet`: a classifier of three layers; `small`: of one, after pooling what is left of the image.
        #[serde(default)]
        stem: Stem,
        /// Side of the square images.
        #[serde(default = "default_image")]
        image: usize,
        /// Channels of the images.
        #[serde(default = "default_channels")]
        channels: usize,
        /// Classes to tell apart.
        #[serde(default = "default_classes")]
        classes: usize,
        /// Channels of the first stage.
        #[serde(default = "default_width")]
        width: usize,
        /// Width of the classifier's inner layers.
        #[serde(default = "default_classifier")]
        hidden: usize,
        /// The share of the classifier's inner layers that dropout drops (torchvision's: 0.5); with `stem: imagenet` only; 0 if left out.
        #[serde(default, skip_serializing_if = "DropoutRate::is_none")]
        dropout: DropoutRate,
    },
}

/// For what, and for how many samples, a graph is built.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GraphOptions {
    /// Samples in the batch.
    pub batch: usize,
    /// Groups of samples that share batch-norm statistics; they divide the batch.
    pub normalization_groups: usize,
    /// Whether batch norm uses running statistics instead of the batch's.
    pub inference: bool,
    /// Ranks that share out the vocabulary, from the embedding to the loss, where it divides by them; 1 for nobody.
    pub vocabulary_parts: usize,
}

impl GraphOptions {
    /// One sample on one rank, with batch statistics.
    pub const ONE: GraphOptions = GraphOptions { batch: 1, normalization_groups: 1, inference: false, vocabulary_parts: 1 };
}

impl Model {
    /// The zoo's model of a name.
    ///
    /// # Errors
    /// [`ModelError::Unknown`], naming what there is.
    pub fn named(name: &str) -> Result<Self, ModelError> {
        zoo::named(name).ok_or_else(|| ModelError::Unknown {
            name: name.into(),
            hint: format!("the zoo has {}; or give a model file", zoo::NAMES.join(", ")),
        })
    }

    /// How many equal blocks it is a stack of, between the first and the last: `None` where its blocks are not all alike.
    pub fn repeated_layers(&self) -> Option<usize> {
        match *self {
            Self::Gpt { layers, .. } | Self::Llama { layers, .. } | Self::Bert { layers, .. } | Self::Vit { layers, .. } => {
                Some(layers)
            }
            Self::Moe { layers, moe_every, dense_layers, .. } => (moe_every == 1 && dense_layers == 0).then_some(layers),
            Self::Mlp { .. } | Self::Resnet { .. } | Self::Vgg { .. } | Self::T5 { .. } | Self::LstmSeq2seq { .. } => None,
        }
    }

    /// How many experts its mixtures have, if it has any.
    pub fn experts(&self) -> Option<usize> {
        match *self {
            Self::Moe { experts, .. } => Some(experts),
            _ => None,
        }
    }

    /// The same with another number of blocks, if it is a stack of equal ones ([`Model::repeated_layers`]).
    pub fn with_repeated_layers(&self, count: usize) -> Option<Self> {
        self.repeated_layers()?;
        let mut model = self.clone();
        match &mut model {
            Self::Gpt { layers, .. }
            | Self::Llama { layers, .. }
            | Self::Bert { layers, .. }
            | Self::Vit { layers, .. }
            | Self::Moe { layers, .. } => *layers = count,
            Self::Mlp { .. } | Self::Resnet { .. } | Self::Vgg { .. } | Self::T5 { .. } | Self::LstmSeq2seq { .. } => {
                return None;
            }
        }
        Some(model)
    }

    /// The names in the zoo.
    pub fn names() -> &'static [&'static str] {
        zoo::NAMES
    }

    /// Whether it has batch normalisation, whose statistics depend on how samples are grouped.
    pub fn has_batch_norm(&self) -> bool {
        matches!(self, Model::Resnet { .. } | Model::Vgg { batch_norm: true, .. })
    }
}
