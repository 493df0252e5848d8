//! What a user writes to name a model: a zoo name, or a family with its sizes. See the contract's "A model file".

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
            Sample::Image { .. } | Sample::Features { .. } => None,
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
            Model::Gpt { layers, hidden, heads, ffn, vocab, sequence, tied_embeddings } => {
                let shape = zoo::GptShape {
                    layers: *layers,
                    hidden: *hidden,
                    heads: *heads,
                    ffn: ffn.unwrap_or(4 * hidden),
                    vocabulary: *vocab,
                    sequence: *sequence,
                    tied_embeddings: *tied_embeddings,
                };
                zoo::gpt(name, &shape, options)
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
            Model::Bert { layers, hidden, heads, ffn, vocab, sequence } => {
                let shape = zoo::BertShape {
                    layers: *layers,
                    hidden: *hidden,
                    heads: *heads,
                    ffn: ffn.unwrap_or(4 * hidden),
                    vocabulary: *vocab,
                    sequence: *sequence,
                };
                zoo::bert(name, &shape, options)
            }
            Model::Vit { layers, hidden, heads, ffn, patch, image, channels, classes } => {
                let shape = zoo::VitShape {
                    layers: *layers,
                    hidden: *hidden,
                    heads: *heads,
                    ffn: ffn.unwrap_or(4 * hidden),
                    patch: *patch,
                    image: *image,
                    channels: *channels,
                    classes: *classes,
                };
                zoo::vit(name, &shape, options)
            }
            Model::Vgg { depth, batch_norm, stem, image, channels, classes, width, hidden } => {
                let shape = zoo::VggShape {
                    depth: *depth,
                    batch_norm: *batch_norm,
                    stem: *stem,
                    image: *image,
                    channels: *channels,
                    classes: *classes,
                    width: *width,
                    hidden: *hidden,
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
            | Model::Bert { layers, hidden, heads, ffn, vocab, sequence } => {
                positive("vocab", vocab)?;
                positive("sequence", sequence)?;
                transformer(layers, hidden, heads, ffn.unwrap_or(1))
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
            Model::Vit { layers, hidden, heads, ffn, patch, image, channels, classes } => {
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
            Model::Vgg { depth, stem, image, channels, classes, width, hidden, .. } => {
                if ![11, 13, 16, 19].contains(&depth) {
                    return wrong(format!("there is no VGG of depth {depth}"), "use depth 11, 13, 16 or 19");
                }
                for (what, value) in [("channels", channels), ("classes", classes), ("width", width), ("hidden", hidden)] {
                    positive(what, value)?;
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
