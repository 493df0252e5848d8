//! The form of a training sample: all that a data source has to know of a model.

use serde::{Deserialize, Serialize};

/// The form of a model's training samples.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SampleShape {
    /// An image, channels last, and its class.
    Image {
        /// Channels of a pixel.
        channels: usize,
        /// Rows of pixels.
        height: usize,
        /// Columns of pixels.
        width: usize,
        /// Number of classes.
        classes: usize,
    },
    /// A vector and its class.
    Features {
        /// Length of the vector.
        width: usize,
        /// Number of classes.
        classes: usize,
    },
    /// A sequence of tokens. The label of each position is the next token.
    Tokens {
        /// Positions.
        sequence: usize,
        /// Size of the vocabulary: every token is below it.
        vocabulary: usize,
    },
    /// A source sequence, and a target sequence to be made from it. The label of each target
    /// position is its token, and its input is the token before.
    Pair {
        /// Positions of the source.
        source: usize,
        /// Positions of the target.
        target: usize,
        /// Size of the source's vocabulary.
        source_vocabulary: usize,
        /// Size of the target's vocabulary.
        target_vocabulary: usize,
    },
    /// A sequence of tokens of which some are masked. The label of a masked position is its
    /// original token; other positions have no label.
    MaskedTokens {
        /// Positions.
        sequence: usize,
        /// Size of the vocabulary: every token is below it.
        vocabulary: usize,
        /// Number of masked positions.
        predictions: usize,
    },
}

impl SampleShape {
    /// Whether a sample is made of sequences of tokens.
    pub fn is_sequence(&self) -> bool {
        match self {
            SampleShape::Tokens { .. } | SampleShape::MaskedTokens { .. } | SampleShape::Pair { .. } => true,
            SampleShape::Image { .. } | SampleShape::Features { .. } => false,
        }
    }

    /// The positions and the vocabulary of a sample of one sequence. `None` for other samples.
    pub fn tokens(&self) -> Option<(usize, usize)> {
        match *self {
            SampleShape::Tokens { sequence, vocabulary } | SampleShape::MaskedTokens { sequence, vocabulary, .. } => {
                Some((sequence, vocabulary))
            }
            SampleShape::Image { .. } | SampleShape::Features { .. } | SampleShape::Pair { .. } => None,
        }
    }
}
