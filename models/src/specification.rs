//! What a user writes to name a model: a zoo name, or a family with its sizes. See the contract's "A model file".

use crate::dropout::DropoutRate;
use crate::graph::{Graph, Tensor};
use crate::zoo;
use serde::{Deserialize, Serialize};
use thiserror::Error;

/// Why a model cannot be built.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum ModelError {
    /// No such name in the zoo.
    #[error("no model is called `{name}`; hint: {hint}")]
    Unknown {
        /// What was asked for.
        name: String,
        /// Names that do exist.
        hint: String,
    },
    /// Sizes that contradict each other.
    #[error("model `{name}`: {reason}; hint: {hint}")]
    Inconsistent {
        /// The model.
        name: String,
        /// What contradicts what.
        reason: String,
        /// The mend.
        hint: String,
    },
}

/// The most layers of a model: a hundred times those of the deepest language models.
const MOST_LAYERS: usize = 10_000;

/// The most elements of a tensor over all ranks. What is counted in elements, bytes or reads of a few tensors stays far below what a
/// 64-bit number holds.
const MOST_ELEMENTS: usize = 1 << 48;

/// The most samples of a batch. With images of 8192 x 8192 pixels their product still is a 64-bit number.
const MOST_SAMPLES: usize = 1 << 32;

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
        /// The share of the embedding and of what goes into the residual stream that dropout drops (not of attention's probabilities); 0 if left out.
        #[serde(default, skip_serializing_if = "DropoutRate::is_none")]
        dropout: DropoutRate,
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
        /// Inner width of an expert, and of a layer that is no mixture.
        ffn: usize,
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
        /// The share of the embeddings and of what goes into the residual streams that dropout drops (not of attention's probabilities); 0 if left out.
        #[serde(default, skip_serializing_if = "DropoutRate::is_none")]
        dropout: DropoutRate,
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
        /// The share of the embedding and of what goes into the residual stream that dropout drops (not of attention's probabilities); 0 if left out.
        #[serde(default, skip_serializing_if = "DropoutRate::is_none")]
        dropout: DropoutRate,
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

fn default_theta() -> usize {
    10_000
}

fn default_classifier() -> usize {
    4096
}

/// How many tokens of a sample are masked and to be found: 15 %, rounded, and at least one.
pub(crate) fn masked_predictions(sequence: usize) -> usize {
    ((15 * sequence + 50) / 100).max(1)
}

/// The slots of a mixture's experts over what balanced routing needs: a positive, finite number.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "f64", into = "f64")]
pub struct CapacityFactor(f64);

// It is no NaN.
impl Eq for CapacityFactor {}

impl Default for CapacityFactor {
    /// GShard's (Lepikhin et al. 2021) and Switch Transformer's usual factor.
    fn default() -> Self {
        Self(1.25)
    }
}

impl TryFrom<f64> for CapacityFactor {
    type Error = String;

    fn try_from(factor: f64) -> Result<Self, String> {
        if factor > 0.0 && factor <= 1e6 {
            return Ok(Self(factor));
        }
        Err(format!("`capacity_factor` is {factor}; hint: it is a number above 0, such as 1.25"))
    }
}

impl From<CapacityFactor> for f64 {
    fn from(factor: CapacityFactor) -> f64 {
        factor.0
    }
}

fn default_one() -> usize {
    1
}

fn default_moe_theta() -> usize {
    1_000_000
}

fn default_buckets() -> usize {
    32
}

fn default_max_distance() -> usize {
    128
}

fn default_image() -> usize {
    224
}

fn default_channels() -> usize {
    3
}

fn default_classes() -> usize {
    1000
}

fn default_width() -> usize {
    64
}

fn default_tied() -> bool {
    true
}

/// What one training sample of a model looks like.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Sample {
    /// An image, channels last, and its class.
    Image {
        /// Channels of a pixel.
        channels: usize,
        /// Rows.
        height: usize,
        /// Columns.
        width: usize,
        /// Classes to tell apart.
        classes: usize,
    },
    /// A vector, and its class.
    Features {
        /// Its length.
        width: usize,
        /// Classes to tell apart.
        classes: usize,
    },
    /// Tokens; each position's label is the next token.
    Tokens {
        /// Positions.
        sequence: usize,
        /// Tokens that there are; those of a sample are below it.
        vocabulary: usize,
    },
    /// A sequence, and another to be made from it: each position's label is its token, its input the token before.
    Pair {
        /// Positions of the first.
        source: usize,
        /// Positions of the second.
        target: usize,
        /// Tokens that there are in the first.
        source_vocabulary: usize,
        /// Tokens that there are in the second.
        target_vocabulary: usize,
    },
    /// Tokens of which some are masked; their labels are what they were, and no other position has one.
    MaskedTokens {
        /// Positions.
        sequence: usize,
        /// Tokens that there are; those of a sample are below it.
        vocabulary: usize,
        /// How many are masked.
        predictions: usize,
    },
}

impl Sample {
    /// The positions and the vocabulary of a sample of tokens.
    pub fn tokens(&self) -> Option<(usize, usize)> {
        match *self {
            Sample::Tokens { sequence, vocabulary } | Sample::MaskedTokens { sequence, vocabulary, .. } => {
                Some((sequence, vocabulary))
            }
            Sample::Image { .. } | Sample::Features { .. } | Sample::Pair { .. } => None,
        }
    }
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

    /// The names in the zoo.
    pub fn names() -> &'static [&'static str] {
        zoo::NAMES
    }

    /// What its training samples look like.
    pub fn sample(&self) -> Sample {
        match *self {
            Model::Mlp { ref widths } => {
                Sample::Features { width: widths.first().copied().unwrap_or(0), classes: widths.last().copied().unwrap_or(0) }
            }
            Model::Resnet { image, channels, classes, .. }
            | Model::Vit { image, channels, classes, .. }
            | Model::Vgg { image, channels, classes, .. } => Sample::Image { channels, height: image, width: image, classes },
            Model::Gpt { sequence, vocab, .. } | Model::Llama { sequence, vocab, .. } => {
                Sample::Tokens { sequence, vocabulary: vocab }
            }
            Model::Moe { sequence, vocab, .. } => Sample::Tokens { sequence, vocabulary: vocab },
            Model::T5 { source_sequence, target_sequence, vocab, .. } => Sample::Pair {
                source: source_sequence,
                target: target_sequence,
                source_vocabulary: vocab,
                target_vocabulary: vocab,
            },
            Model::LstmSeq2seq { source_vocab, target_vocab, source_sequence, target_sequence, .. } => Sample::Pair {
                source: source_sequence,
                target: target_sequence,
                source_vocabulary: source_vocab,
                target_vocabulary: target_vocab,
            },
            Model::Bert { sequence, vocab, .. } => {
                Sample::MaskedTokens { sequence, vocabulary: vocab, predictions: masked_predictions(sequence) }
            }
        }
    }

    /// Whether it has batch normalisation, whose statistics depend on how samples are grouped.
    pub fn has_batch_norm(&self) -> bool {
        matches!(self, Model::Resnet { .. } | Model::Vgg { batch_norm: true, .. })
    }

    /// The forward graph over a batch.
    ///
    /// # Errors
    /// [`ModelError::Inconsistent`] when sizes contradict each other, or a tensor would be larger than can be counted with.
    pub fn graph(&self, name: &str, options: &GraphOptions) -> Result<Graph, ModelError> {
        self.validate(name)?;
        let GraphOptions { batch, normalization_groups: groups, .. } = *options;
        let wrong = |reason, hint: &str| Err(ModelError::Inconsistent { name: name.into(), reason, hint: hint.into() });
        if batch == 0 || batch > MOST_SAMPLES || groups == 0 || !batch.is_multiple_of(groups) {
            return wrong(
                format!("a batch of {batch} samples in {groups} groups"),
                "a batch has 1 to 4,294,967,296 samples, in groups of equal size",
            );
        }
        let graph = self.build(name, options);
        let too_large = |tensor: &&Tensor| tensor.checked_elements().is_none_or(|elements| elements > MOST_ELEMENTS);
        match graph.tensors.iter().find(too_large) {
            None => Ok(graph),
            Some(tensor) => {
                let shape: Vec<String> = tensor.dimensions.iter().map(|one| format!("{} {}", one.name, one.extent)).collect();
                wrong(
                    format!("`{}` ({}) has more than 2^48 elements", tensor.name, shape.join(", ")),
                    "use a smaller micro-batch, or smaller sizes in the model",
                )
            }
        }
    }

    /// The graph of sizes that were found to be sound.
    fn build(&self, name: &str, options: &GraphOptions) -> Graph {
        match self {
            Model::Mlp { widths } => zoo::mlp(name, widths, options),
            Model::Resnet { depth, stem, image, channels, classes, width } => {
                let shape = zoo::ResnetShape {
                    depth: *depth,
                    stem: *stem,
                    image: *image,
                    channels: *channels,
                    classes: *classes,
                    width: *width,
                };
                zoo::resnet(name, &shape, options)
            }
            Model::Gpt { layers, hidden, heads, ffn, vocab, sequence, tied_embeddings, dropout } => {
                let shape = zoo::GptShape {
                    layers: *layers,
                    hidden: *hidden,
                    heads: *heads,
                    ffn: ffn.unwrap_or(4 * hidden),
                    vocabulary: *vocab,
                    sequence: *sequence,
                    tied_embeddings: *tied_embeddings,
                    dropout: *dropout,
                };
                zoo::gpt(name, &shape, options)
            }
            &Model::Moe {
                layers,
                hidden,
                heads,
                kv_heads,
                ffn,
                vocab,
                sequence,
                experts,
                top_k,
                moe_every,
                capacity_factor,
                rope_theta,
                tied_embeddings,
            } => {
                let balanced = sequence as f64 * top_k as f64 / experts as f64;
                let shape = zoo::MixtralShape {
                    layers,
                    hidden,
                    heads,
                    kv_heads: kv_heads.unwrap_or(heads),
                    ffn,
                    vocabulary: vocab,
                    sequence,
                    experts,
                    top: top_k,
                    moe_every,
                    // No expert gets a token twice.
                    slots_per_sample: ((f64::from(capacity_factor) * balanced).ceil() as usize).clamp(1, sequence),
                    rope_theta,
                    tied_embeddings,
                };
                zoo::mixtral(name, &shape, options)
            }
            &Model::T5 {
                layers,
                hidden,
                heads,
                head_dimension,
                ffn,
                vocab,
                source_sequence,
                target_sequence,
                relative_buckets,
                relative_max_distance,
                gated,
                tied_embeddings,
                dropout,
            } => {
                let shape = zoo::T5Shape {
                    layers,
                    hidden,
                    heads,
                    head_dimension: head_dimension.unwrap_or(hidden / heads),
                    ffn,
                    vocabulary: vocab,
                    sequences: [source_sequence, target_sequence],
                    buckets: relative_buckets,
                    max_distance: relative_max_distance,
                    gated,
                    tied_embeddings,
                    dropout,
                };
                zoo::t5(name, &shape, options)
            }
            Model::LstmSeq2seq { layers, hidden, embedding, source_vocab, target_vocab, source_sequence, target_sequence } => {
                let shape = zoo::LstmShape {
                    layers: *layers,
                    hidden: *hidden,
                    embedding: embedding.unwrap_or(*hidden),
                    vocabularies: [*source_vocab, *target_vocab],
                    sequences: [*source_sequence, *target_sequence],
                };
                zoo::lstm_seq2seq(name, &shape, options)
            }
            Model::Llama { layers, hidden, heads, kv_heads, ffn, vocab, sequence, tied_embeddings, rope_theta } => {
                let shape = zoo::LlamaShape {
                    layers: *layers,
                    hidden: *hidden,
                    heads: *heads,
                    kv_heads: kv_heads.unwrap_or(*heads),
                    ffn: *ffn,
                    vocabulary: *vocab,
                    sequence: *sequence,
                    tied_embeddings: *tied_embeddings,
                    rope_theta: *rope_theta,
                };
                zoo::llama(name, &shape, options)
            }
            Model::Bert { layers, hidden, heads, ffn, vocab, sequence, dropout } => {
                let shape = zoo::BertShape {
                    layers: *layers,
                    hidden: *hidden,
                    heads: *heads,
                    ffn: ffn.unwrap_or(4 * hidden),
                    vocabulary: *vocab,
                    sequence: *sequence,
                    dropout: *dropout,
                };
                zoo::bert(name, &shape, options)
            }
            Model::Vit { layers, hidden, heads, ffn, patch, image, channels, classes, dropout } => {
                let shape = zoo::VitShape {
                    layers: *layers,
                    hidden: *hidden,
                    heads: *heads,
                    ffn: ffn.unwrap_or(4 * hidden),
                    patch: *patch,
                    image: *image,
                    channels: *channels,
                    classes: *classes,
                    dropout: *dropout,
                };
                zoo::vit(name, &shape, options)
            }
            Model::Vgg { depth, batch_norm, stem, image, channels, classes, width, hidden, dropout } => {
                let shape = zoo::VggShape {
                    depth: *depth,
                    batch_norm: *batch_norm,
                    stem: *stem,
                    image: *image,
                    channels: *channels,
                    classes: *classes,
                    width: *width,
                    hidden: *hidden,
                    dropout: *dropout,
                };
                zoo::vgg(name, &shape, options)
            }
        }
    }

    fn validate(&self, name: &str) -> Result<(), ModelError> {
        let wrong = |reason: String, hint: &str| Err(ModelError::Inconsistent { name: name.into(), reason, hint: hint.into() });
        let positive = |what: &str, value: usize| match value {
            0 => wrong(format!("`{what}` is 0"), "every size is at least 1"),
            value if value > 1 << 24 => wrong(format!("`{what}` is {value}"), "no size is larger than 16,777,216"),
            _ => Ok(()),
        };
        let transformer = |layers: usize, hidden: usize, heads: usize, ffn: usize| {
            for (what, value) in [("layers", layers), ("hidden", hidden), ("heads", heads), ("ffn", ffn)] {
                positive(what, value)?;
            }
            if layers > MOST_LAYERS {
                return wrong(format!("`layers` is {layers}"), "a model has 10,000 layers at most");
            }
            if !hidden.is_multiple_of(heads) {
                return wrong(format!("hidden {hidden} is not a multiple of heads {heads}"), "choose heads that divide hidden");
            }
            Ok(())
        };
        match *self {
            Model::Mlp { ref widths } => {
                if widths.len() < 2 {
                    return wrong("`widths` needs an input and an output".into(), "write for example widths: [784, 512, 10]");
                }
                if widths.len() > MOST_LAYERS + 1 {
                    return wrong(format!("`widths` has {} entries", widths.len()), "a model has 10,000 layers at most");
                }
                widths.iter().try_for_each(|&width| positive("widths", width))
            }
            Model::Resnet { depth, stem, image, channels, classes, width } => {
                if ![18, 34, 50, 101, 152].contains(&depth) {
                    return wrong(format!("there is no ResNet of depth {depth}"), "use depth 18, 34, 50, 101 or 152");
                }
                positive("channels", channels)?;
                positive("classes", classes)?;
                positive("width", width)?;
                let smallest = if stem == Stem::Imagenet { 32 } else { 4 };
                if image < smallest || image > 8192 {
                    return wrong(
                        format!("`image` is {image}"),
                        "images are 32 to 8192 pixels wide, or from 4 with `stem: small`",
                    );
                }
                Ok(())
            }
            Model::Gpt { layers, hidden, heads, ffn, vocab, sequence, .. }
            | Model::Bert { layers, hidden, heads, ffn, vocab, sequence, .. } => {
                positive("vocab", vocab)?;
                positive("sequence", sequence)?;
                transformer(layers, hidden, heads, ffn.unwrap_or(1))
            }
            Model::Moe {
                layers, hidden, heads, kv_heads, ffn, vocab, sequence, experts, top_k, moe_every, rope_theta, ..
            } => {
                let kv_heads = kv_heads.unwrap_or(heads);
                for (what, value) in [
                    ("layers", layers),
                    ("hidden", hidden),
                    ("heads", heads),
                    ("kv_heads", kv_heads),
                    ("ffn", ffn),
                    ("vocab", vocab),
                    ("sequence", sequence),
                    ("experts", experts),
                    ("top_k", top_k),
                    ("moe_every", moe_every),
                    ("rope_theta", rope_theta),
                ] {
                    positive(what, value)?;
                }
                if layers > MOST_LAYERS {
                    return wrong(format!("`layers` is {layers}"), "a model has 10,000 layers at most");
                }
                if !hidden.is_multiple_of(2 * heads) {
                    let reason = format!("hidden {hidden} is not a multiple of twice the heads, {heads}");
                    return wrong(reason, "choose heads that divide hidden into heads of an even width");
                }
                if !heads.is_multiple_of(kv_heads) {
                    return wrong(
                        format!("heads {heads} is not a multiple of kv_heads {kv_heads}"),
                        "choose kv_heads that divide heads",
                    );
                }
                if top_k > experts || experts > 1 << 14 {
                    return wrong(
                        format!("each token goes to {top_k} of {experts} experts"),
                        "`top_k` is at most `experts`, and that at most 16,384",
                    );
                }
                Ok(())
            }
            Model::T5 {
                layers,
                hidden,
                heads,
                head_dimension,
                ffn,
                vocab,
                source_sequence,
                target_sequence,
                relative_buckets,
                relative_max_distance,
                ..
            } => {
                for (what, value) in [
                    ("layers", layers),
                    ("hidden", hidden),
                    ("heads", heads),
                    ("head_dimension", head_dimension.unwrap_or(1)),
                    ("ffn", ffn),
                    ("vocab", vocab),
                    ("source_sequence", source_sequence),
                    ("target_sequence", target_sequence),
                    ("relative_max_distance", relative_max_distance),
                ] {
                    positive(what, value)?;
                }
                if layers > MOST_LAYERS / 2 {
                    return wrong(format!("`layers` is {layers}"), "encoder and decoder have 5,000 layers each at most");
                }
                if head_dimension.is_none() && !hidden.is_multiple_of(heads) {
                    return wrong(
                        format!("hidden {hidden} is not a multiple of heads {heads}"),
                        "choose heads that divide hidden, or give `head_dimension`",
                    );
                }
                if relative_buckets < 4 || relative_max_distance <= relative_buckets {
                    return wrong(
                        format!("{relative_buckets} buckets for distances up to {relative_max_distance}"),
                        "`relative_buckets` is at least 4, and `relative_max_distance` is larger",
                    );
                }
                Ok(())
            }
            Model::LstmSeq2seq { layers, hidden, embedding, source_vocab, target_vocab, source_sequence, target_sequence } => {
                for (what, value) in [
                    ("layers", layers),
                    ("hidden", hidden),
                    ("embedding", embedding.unwrap_or(1)),
                    ("source_vocab", source_vocab),
                    ("target_vocab", target_vocab),
                    ("source_sequence", source_sequence),
                    ("target_sequence", target_sequence),
                ] {
                    positive(what, value)?;
                }
                // Four gates lie side by side.
                if hidden > 1 << 22 {
                    return wrong(format!("`hidden` is {hidden}"), "a recurrent layer has 4,194,304 features at most");
                }
                if layers > MOST_LAYERS / 2 {
                    return wrong(format!("`layers` is {layers}"), "encoder and decoder have 5,000 layers each at most");
                }
                Ok(())
            }
            Model::Llama { layers, hidden, heads, kv_heads, ffn, vocab, sequence, rope_theta, .. } => {
                for (what, value) in [("vocab", vocab), ("sequence", sequence), ("rope_theta", rope_theta)] {
                    positive(what, value)?;
                }
                transformer(layers, hidden, heads, ffn)?;
                let kv_heads = kv_heads.unwrap_or(heads);
                positive("kv_heads", kv_heads)?;
                if !heads.is_multiple_of(kv_heads) {
                    return wrong(
                        format!("heads {heads} is not a multiple of kv_heads {kv_heads}"),
                        "choose kv_heads that divide heads",
                    );
                }
                if !(hidden / heads).is_multiple_of(2) {
                    return wrong(
                        format!("a head has {} features, an odd number", hidden / heads),
                        "rotary positions turn pairs of features: choose hidden and heads so that a head has an even number",
                    );
                }
                Ok(())
            }
            Model::Vit { layers, hidden, heads, ffn, patch, image, channels, classes, .. } => {
                for (what, value) in [("patch", patch), ("image", image), ("channels", channels), ("classes", classes)] {
                    positive(what, value)?;
                }
                transformer(layers, hidden, heads, ffn.unwrap_or(1))?;
                if image > 8192 || !image.is_multiple_of(patch) {
                    return wrong(
                        format!("`image` is {image} and `patch` {patch}"),
                        "images are 8192 pixels wide at most, and a whole number of patches",
                    );
                }
                Ok(())
            }
            Model::Vgg { depth, stem, image, channels, classes, width, hidden, dropout, .. } => {
                if ![11, 13, 16, 19].contains(&depth) {
                    return wrong(format!("there is no VGG of depth {depth}"), "use depth 11, 13, 16 or 19");
                }
                for (what, value) in [("channels", channels), ("classes", classes), ("width", width), ("hidden", hidden)] {
                    positive(what, value)?;
                }
                if stem == Stem::Small && !dropout.is_none() {
                    return wrong(
                        format!("`dropout` is {}", dropout.value()),
                        "it is of the classifier's inner layers, which `stem: small` does not have: leave it out",
                    );
                }
                match stem {
                    // What is left after five poolings is what the classifier was made for.
                    Stem::Imagenet if image / 32 != 7 => {
                        wrong(format!("`image` is {image}"), "images are 224 to 255 pixels wide, or any size with `stem: small`")
                    }
                    Stem::Small if !(32..=8192).contains(&image) => {
                        wrong(format!("`image` is {image}"), "with `stem: small` images are 32 to 8192 pixels wide")
                    }
                    _ => Ok(()),
                }
            }
        }
    }
}
