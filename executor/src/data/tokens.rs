//! A stream of tokens in memory, and the windows that are its samples.
//!
//! The last tenth of the stream is for evaluation. A sample is a window of the sequence length plus
//! one token: the labels are the inputs shifted by one. This module knows neither files nor
//! batches.

use super::error::DataError;
use super::{SampleShape, Split};

/// The least number of training windows of a short text, whose windows overlap if necessary.
///
/// With it the shipped text has epochs of some hundred steps at common batch sizes, instead of two
/// or three.
const MIN_TRAINING_WINDOWS: usize = 4096;

/// The encoding of a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TokenWidth {
    /// One byte.
    Byte,
    /// Two bytes, little-endian.
    TwoBytes,
}

impl TokenWidth {
    fn bytes(self) -> usize {
        match self {
            TokenWidth::Byte => 1,
            TokenWidth::TwoBytes => 2,
        }
    }
}

/// A stream of tokens that is cut into windows.
#[derive(Debug)]
pub(crate) struct TokenData {
    bytes: Vec<u8>,
    width: TokenWidth,
    sequence: usize,
    /// The number of tokens of the training split, which comes first.
    training: usize,
    /// Tokens from the start of one training window to the start of the next. Evaluation windows do
    /// not overlap.
    stride: usize,
}

impl TokenData {
    /// Fits a stream of tokens to a model.
    pub(crate) fn new(name: &str, bytes: Vec<u8>, width: TokenWidth, shape: &SampleShape) -> Result<Self, DataError> {
        if matches!(shape, SampleShape::Pair { .. }) {
            let problem = "it holds one stream of tokens, the model wants pairs of sequences";
            return Err(DataError::unsuitable(name, problem, "use `synthetic` data"));
        }
        let Some((sequence, vocabulary)) = shape.tokens() else {
            let problem = "it holds tokens, the model wants images or features";
            return Err(DataError::unsuitable(name, problem, "use `digits`, `synthetic`, or the folder of a data set of images"));
        };
        if !bytes.len().is_multiple_of(width.bytes()) {
            let problem = format!("has {} bytes, which are not whole 16-bit tokens", bytes.len());
            return Err(DataError::malformed(
                name,
                problem,
                "write it as little-endian 16-bit numbers, or name the file `.txt` if it is text",
            ));
        }
        let mut data = TokenData { bytes, width, sequence, training: 0, stride: sequence };
        let highest = data.tokens(0).max().unwrap_or_default();
        if usize::from(highest) >= vocabulary {
            let needed = usize::from(highest) + 1;
            let problem = format!("it has the token {highest}, the model a vocabulary of {vocabulary}");
            return Err(DataError::unsuitable(name, problem, format!("give the model a vocabulary of at least {needed}")));
        }
        let count = data.bytes.len() / width.bytes();
        let window = sequence.saturating_add(1);
        let evaluation = (count / 10).max(window);
        data.training = count.saturating_sub(evaluation);
        if data.training < window {
            let problem = format!("its {count} tokens do not yield two windows of {window}");
            let longest = (count / 2).saturating_sub(1);
            let hint = match longest {
                0 => "use a longer text, or `synthetic` data".to_owned(),
                _ => format!("give the model a sequence of at most {longest}, or use a longer text or `synthetic` data"),
            };
            return Err(DataError::unsuitable(name, problem, hint));
        }
        data.stride = ((data.training - sequence) / MIN_TRAINING_WINDOWS).clamp(1, sequence);
        Ok(data)
    }

    /// The number of windows of a split.
    pub(crate) fn len(&self, split: Split) -> usize {
        let (tokens, stride) = match split {
            Split::Training => (self.training, self.stride),
            Split::Evaluation => (self.bytes.len() / self.width.bytes() - self.training, self.sequence),
        };
        tokens.saturating_sub(self.sequence).saturating_sub(1) / stride + 1
    }

    /// Fills the inputs and the labels of one window, which must be below [`len`](Self::len).
    pub(crate) fn fill(&self, split: Split, window: usize, inputs: &mut [i32], labels: &mut [i32]) {
        let start = match split {
            Split::Training => window.saturating_mul(self.stride),
            Split::Evaluation => self.training.saturating_add(window.saturating_mul(self.sequence)),
        };
        inputs.iter_mut().zip(self.tokens(start)).for_each(|(input, token)| *input = i32::from(token));
        labels.iter_mut().zip(self.tokens(start + 1)).for_each(|(label, token)| *label = i32::from(token));
    }

    /// The tokens from one position on.
    fn tokens(&self, start: usize) -> impl Iterator<Item = u16> {
        let bytes = self.bytes.get(start.saturating_mul(self.width.bytes())..).unwrap_or_default();
        bytes.chunks_exact(self.width.bytes()).map(|token| match *token {
            [low, high] => u16::from_le_bytes([low, high]),
            [byte] => u16::from(byte),
            _ => 0,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(sequence: usize, vocabulary: usize) -> SampleShape {
        SampleShape::Tokens { sequence, vocabulary }
    }

    fn counting(count: u16) -> Vec<u8> {
        (0..count).flat_map(u16::to_le_bytes).collect()
    }

    fn refused(bytes: &[u8], width: TokenWidth, shape: SampleShape) -> String {
        TokenData::new("d", bytes.to_vec(), width, &shape).unwrap_err().to_string()
    }

    #[test]
    fn labels_are_shifted_inputs_and_the_evaluation_split_comes_last() {
        let data = TokenData::new("d", counting(1000), TokenWidth::TwoBytes, &shape(4, 1000)).unwrap();
        let (mut inputs, mut labels) = ([0; 4], [0; 4]);
        data.fill(Split::Training, 3, &mut inputs, &mut labels);
        assert_eq!((inputs, labels), ([3, 4, 5, 6], [4, 5, 6, 7]));
        assert_eq!(data.len(Split::Training), 896);
        data.fill(Split::Training, 895, &mut inputs, &mut labels);
        assert_eq!(labels[3], 899);
        assert_eq!(data.len(Split::Evaluation), 24);
        data.fill(Split::Evaluation, 0, &mut inputs, &mut labels);
        assert_eq!(inputs, [900, 901, 902, 903]);
        data.fill(Split::Evaluation, 23, &mut inputs, &mut labels);
        assert_eq!(labels, [993, 994, 995, 996]);
    }

    #[test]
    fn windows_of_long_texts_do_not_overlap() {
        let data = TokenData::new("d", vec![7; 100_000], TokenWidth::Byte, &shape(4, 8)).unwrap();
        assert_eq!((data.stride, data.len(Split::Training), data.len(Split::Evaluation)), (4, 22_499, 2_499));
        let data = TokenData::new("d", vec![7; 100_000], TokenWidth::Byte, &shape(512, 8)).unwrap();
        assert_eq!((data.stride, data.len(Split::Training)), (21, 4262));
    }

    #[test]
    fn a_stream_has_at_least_two_windows() {
        let data = TokenData::new("d", vec![0; 10], TokenWidth::Byte, &shape(4, 1)).unwrap();
        assert_eq!((data.len(Split::Training), data.len(Split::Evaluation)), (1, 1));
        assert!(refused(&[0; 9], TokenWidth::Byte, shape(4, 1)).contains("hint: give the model a sequence of at most 3"));
        assert!(refused(&[], TokenWidth::Byte, shape(4, 1)).contains("hint: use a longer text"));
        assert!(refused(&[0; 9], TokenWidth::Byte, shape(usize::MAX, 1)).contains("do not yield two windows"));
    }

    #[test]
    fn tokens_that_do_not_fit_are_refused_with_a_hint() {
        assert!(
            refused(&[0, 200], TokenWidth::Byte, shape(1, 200)).contains("hint: give the model a vocabulary of at least 201")
        );
        assert!(refused(&[0, 255], TokenWidth::TwoBytes, shape(1, 9)).contains("vocabulary of at least 65281"));
        assert!(refused(&[0; 3], TokenWidth::TwoBytes, shape(1, 9)).contains("has 3 bytes, which are not whole 16-bit tokens"));
        let features = SampleShape::Features { width: 4, classes: 2 };
        assert!(refused(&[0; 30], TokenWidth::Byte, features).contains("hint: use `digits`"));
    }
}
