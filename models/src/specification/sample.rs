//! What one training sample of a model looks like: all that who makes samples has to know of a model.

use super::Model;
use serde::{Deserialize, Serialize};

/// What one training sample of a model looks like.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SampleShape {
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

impl SampleShape {
    /// Whether it has positions one after the other.
    pub fn is_sequence(&self) -> bool {
        match self {
            SampleShape::Tokens { .. } | SampleShape::MaskedTokens { .. } | SampleShape::Pair { .. } => true,
            SampleShape::Image { .. } | SampleShape::Features { .. } => false,
        }
    }

    /// The positions and the vocabulary of a sample of tokens.
    pub fn tokens(&self) -> Option<(usize, usize)> {
        match *self {
            SampleShape::Tokens { sequence, vocabulary } | SampleShape::MaskedTokens { sequence, vocabulary, .. } => {
                Some((sequence, vocabulary))
            }
            SampleShape::Image { .. } | SampleShape::Features { .. } | SampleShape::Pair { .. } => None,
        }
    }
}

/// How many tokens of a sample are masked and to be found: 15 %, rounded, and at least one.
pub(crate) fn masked_predictions(sequence: usize) -> usize {
    ((15 * sequence + 50) / 100).max(1)
}

impl Model {
    /// What its training samples look like.
    pub fn sample(&self) -> SampleShape {
        match *self {
            Model::Mlp { ref widths } => SampleShape::Features {
                width: widths.first().copied().unwrap_or(0),
                classes: widths.last().copied().unwrap_or(0),
            },
            Model::Resnet { image, channels, classes, .. }
            | Model::Vit { image, channels, classes, .. }
            | Model::Vgg { image, channels, classes, .. } => {
                SampleShape::Image { channels, height: image, width: image, classes }
            }
            Model::Gpt { sequence, vocab, .. } | Model::Llama { sequence, vocab, .. } => {
                SampleShape::Tokens { sequence, vocabulary: vocab }
            }
            Model::Moe { sequence, vocab, .. } => SampleShape::Tokens { sequence, vocabulary: vocab },
            Model::T5 { source_sequence, target_sequence, vocab, .. } => SampleShape::Pair {
                source: source_sequence,
                target: target_sequence,
                source_vocabulary: vocab,
                target_vocabulary: vocab,
            },
            Model::LstmSeq2seq { source_vocab, target_vocab, source_sequence, target_sequence, .. } => SampleShape::Pair {
                source: source_sequence,
                target: target_sequence,
                source_vocabulary: source_vocab,
                target_vocabulary: target_vocab,
            },
            Model::Bert { sequence, vocab, .. } => {
                SampleShape::MaskedTokens { sequence, vocabulary: vocab, predictions: masked_predictions(sequence) }
            }
        }
    }
}
