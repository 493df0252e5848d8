//! A stream of tokens, and the windows that are its samples.
//!
//! The stream is one or several shards: texts in memory, or files that are mapped, not read. The
//! last tenth is for evaluation, unless the files say which part is. A sample is a window of the
//! sequence length plus one token: the labels are the inputs shifted by one. This module knows no
//! batches.

mod file;
mod files;
mod mapped;
mod megatron;
mod shard;

pub use file::TokenFileWriter;
pub(crate) use files::{open_file, open_folder};
pub(crate) use shard::{Shard, TokenWidth};

use super::error::DataError;
use super::options::{Filled, OnBadSample};
use super::{SampleShape, Split};

/// The least number of training windows of a short text, whose windows overlap if necessary.
///
/// With it the shipped text has epochs of some hundred steps at common batch sizes, instead of two
/// or three.
const MIN_TRAINING_WINDOWS: usize = 4096;

/// The most bytes of a shard that are searched for its highest token when it is opened. In a longer
/// shard, a token beyond the vocabulary is found when its window is read.
const LOOKED_THROUGH: usize = 64 << 20;

/// The most windows in a row that are tried when bad ones are skipped.
const MAX_SKIPPED: usize = 1024;

/// The tokens at a path, in shards.
#[derive(Debug, Default)]
pub(crate) struct Tokens {
    pub(crate) shards: Vec<Shard>,
    /// How many of the shards, the first ones, are for training. `None`: the last tenth of all
    /// tokens is for evaluation.
    pub(crate) training_shards: Option<usize>,
    /// Parts of files that were missing or in excess.
    pub(crate) bad: usize,
}

impl Tokens {
    /// One text in memory, a token per byte.
    pub(crate) fn text(name: &str, text: &str) -> Self {
        Self { shards: vec![Shard::in_memory(name, text.as_bytes().to_vec(), TokenWidth::Byte)], ..Self::default() }
    }
}

/// A stream of tokens that is cut into windows.
#[derive(Debug)]
pub(crate) struct TokenData {
    shards: Vec<Shard>,
    /// The position of each shard's first token, and the end of the last.
    starts: Vec<usize>,
    sequence: usize,
    vocabulary: u32,
    /// The number of tokens of the training split, which comes first.
    training: usize,
    /// Tokens from the start of one training window to the start of the next. Evaluation windows do
    /// not overlap.
    stride: usize,
    policy: OnBadSample,
    bad: usize,
}

impl TokenData {
    /// Fits a stream of tokens to a model.
    pub(crate) fn new(name: &str, tokens: Tokens, shape: &SampleShape, policy: OnBadSample) -> Result<Self, DataError> {
        if matches!(shape, SampleShape::Pair { .. }) {
            let problem = "it holds one stream of tokens, the model wants pairs of sequences";
            return Err(DataError::unsuitable(name, problem, "use `synthetic` data"));
        }
        let Some((sequence, vocabulary)) = shape.tokens() else {
            let problem = "it holds tokens, the model wants images or features";
            return Err(DataError::unsuitable(name, problem, "use `digits`, `synthetic`, or the folder of a data set of images"));
        };
        let Tokens { shards, training_shards, bad } = tokens;
        let mut starts = vec![0];
        let mut count = 0_usize;
        for shard in &shards {
            count = count.saturating_add(shard.len);
            starts.push(count);
        }
        let vocabulary = u32::try_from(vocabulary).unwrap_or(u32::MAX);
        let mut data = TokenData { shards, starts, sequence, vocabulary, training: 0, stride: sequence, policy, bad };
        data.check_vocabulary()?;
        let window = sequence.saturating_add(1);
        data.training = match training_shards {
            Some(shards) => data.starts[shards],
            None => count.saturating_sub((count / 10).max(window)),
        };
        if data.training < window || count - data.training < window {
            let problem = format!("its {count} tokens do not yield two windows of {window}");
            let longest = match training_shards {
                Some(_) => data.training.min(count - data.training).saturating_sub(1),
                None => (count / 2).saturating_sub(1),
            };
            let hint = match longest {
                0 => "use a longer text, or `synthetic` data".to_owned(),
                _ => format!("give the model a sequence of at most {longest}, or use a longer text or `synthetic` data"),
            };
            return Err(DataError::unsuitable(name, problem, hint));
        }
        data.stride = ((data.training - sequence) / MIN_TRAINING_WINDOWS).clamp(1, sequence);
        let windows = data.len(Split::Training);
        if u32::try_from(windows).is_err() {
            let problem = format!("its {count} tokens are {windows} windows, more than are shuffled at once");
            return Err(DataError::unsuitable(name, problem, "give the model a longer sequence, or train on a part"));
        }
        Ok(data)
    }

    /// Refuses shards with tokens beyond the vocabulary, as far as that is known without reading
    /// long shards.
    fn check_vocabulary(&self) -> Result<(), DataError> {
        if self.policy == OnBadSample::Skip {
            return Ok(());
        }
        for shard in &self.shards {
            let highest = match shard.highest {
                Some(highest) => Some(highest).filter(|_| shard.len > 0),
                None if shard.len * shard.width.bytes() <= LOOKED_THROUGH => shard.tokens(0, shard.len).max(),
                None => None,
            };
            if let Some(highest) = highest.filter(|&highest| highest >= self.vocabulary) {
                return Err(self.beyond_vocabulary(shard, highest));
            }
        }
        Ok(())
    }

    fn beyond_vocabulary(&self, shard: &Shard, token: u32) -> DataError {
        let problem = format!("it has the token {token}, the model a vocabulary of {}", self.vocabulary);
        let hint = format!("give the model a vocabulary of at least {}", u64::from(token) + 1);
        DataError::unsuitable(&shard.name, problem, hint)
    }

    /// The number of windows of a split.
    pub(crate) fn len(&self, split: Split) -> usize {
        let (tokens, stride) = match split {
            Split::Training => (self.training, self.stride),
            Split::Evaluation => {
                (self.starts.last().expect("invariant: the first shard has a start") - self.training, self.sequence)
            }
        };
        tokens.saturating_sub(self.sequence).saturating_sub(1) / stride + 1
    }

    /// Parts of files that were missing or in excess.
    pub(crate) fn bad_samples(&self) -> usize {
        self.bad
    }

    /// Fills the inputs and the labels of one window, which must be below [`len`](Self::len). A
    /// window with a token beyond the vocabulary is replaced by the next good one, if the options
    /// say so.
    pub(crate) fn fill(&self, split: Split, window: usize, inputs: &mut [i32], labels: &mut [i32]) -> Result<Filled, DataError> {
        let windows = self.len(split);
        let mut failure = None;
        for attempt in 0..windows.min(MAX_SKIPPED) {
            match self.fill_window(split, (window + attempt) % windows, inputs, labels) {
                Ok(()) => return Ok(if attempt == 0 { Filled::Whole } else { Filled::Replaced }),
                Err(error) if self.policy == OnBadSample::Error => return Err(error),
                Err(error) => failure = failure.or(Some(error)),
            }
        }
        failure.map_or(Ok(Filled::Whole), Err)
    }

    fn fill_window(&self, split: Split, window: usize, inputs: &mut [i32], labels: &mut [i32]) -> Result<(), DataError> {
        let start = match split {
            Split::Training => window.saturating_mul(self.stride),
            Split::Evaluation => self.training.saturating_add(window.saturating_mul(self.sequence)),
        };
        let mut shard = self.starts.partition_point(|&first| first <= start).saturating_sub(1);
        let (mut position, mut filled) = (start, 0);
        // One token more than inputs: the last label.
        while filled <= self.sequence {
            let (Some(tokens), Some(&first)) = (self.shards.get(shard), self.starts.get(shard)) else { break };
            let before = filled;
            for token in tokens.tokens(position - first, self.sequence + 1 - filled) {
                if token >= self.vocabulary {
                    return Err(self.beyond_vocabulary(tokens, token));
                }
                if let Some(input) = inputs.get_mut(filled) {
                    *input = token as i32;
                }
                if let Some(label) = filled.checked_sub(1).and_then(|before| labels.get_mut(before)) {
                    *label = token as i32;
                }
                filled += 1;
            }
            position += filled - before;
            shard += 1;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use foretell_units::diagnostic::one_line;

    fn shape(sequence: usize, vocabulary: usize) -> SampleShape {
        SampleShape::Tokens { sequence, vocabulary }
    }

    fn counting(count: u16) -> Vec<u8> {
        (0..count).flat_map(u16::to_le_bytes).collect()
    }

    fn open(bytes: Vec<u8>, width: TokenWidth, shape: &SampleShape) -> Result<TokenData, DataError> {
        let tokens = Tokens { shards: vec![Shard::in_memory("d", bytes, width)], ..Tokens::default() };
        TokenData::new("d", tokens, shape, OnBadSample::Error)
    }

    fn refused(bytes: &[u8], width: TokenWidth, shape: SampleShape) -> String {
        one_line(&open(bytes.to_vec(), width, &shape).unwrap_err())
    }

    #[test]
    fn labels_are_shifted_inputs_and_the_evaluation_split_comes_last() {
        let data = open(counting(1000), TokenWidth::TwoBytes, &shape(4, 1000)).unwrap();
        let (mut inputs, mut labels) = ([0; 4], [0; 4]);
        data.fill(Split::Training, 3, &mut inputs, &mut labels).unwrap();
        assert_eq!((inputs, labels), ([3, 4, 5, 6], [4, 5, 6, 7]));
        assert_eq!(data.len(Split::Training), 896);
        data.fill(Split::Training, 895, &mut inputs, &mut labels).unwrap();
        assert_eq!(labels[3], 899);
        assert_eq!(data.len(Split::Evaluation), 24);
        data.fill(Split::Evaluation, 0, &mut inputs, &mut labels).unwrap();
        assert_eq!(inputs, [900, 901, 902, 903]);
        data.fill(Split::Evaluation, 23, &mut inputs, &mut labels).unwrap();
        assert_eq!(labels, [993, 994, 995, 996]);
    }

    #[test]
    fn windows_of_long_texts_do_not_overlap() {
        let data = open(vec![7; 100_000], TokenWidth::Byte, &shape(4, 8)).unwrap();
        assert_eq!((data.stride, data.len(Split::Training), data.len(Split::Evaluation)), (4, 22_499, 2_499));
        let data = open(vec![7; 100_000], TokenWidth::Byte, &shape(512, 8)).unwrap();
        assert_eq!((data.stride, data.len(Split::Training)), (21, 4262));
    }

    #[test]
    fn a_stream_has_at_least_two_windows() {
        let data = open(vec![0; 10], TokenWidth::Byte, &shape(4, 1)).unwrap();
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
        let features = SampleShape::Features { width: 4, classes: 2 };
        assert!(refused(&[0; 30], TokenWidth::Byte, features).contains("hint: use `digits`"));
    }
}
