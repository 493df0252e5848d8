//! The data of a training run: samples by global index, in the shape of the model's input.
//!
//! A [`DataSource`] is the name of some data, a [`SampleShape`] the shape of a model's input, and a
//! [`Dataset`] joins the two. Its batches are lists of global indices ([`EpochOrder`],
//! [`Dataset::evaluation_indices`]). Any rank can fill its own part of a batch in place. The same
//! seed gives the same bytes on any number of ranks: this module knows no ranks, layouts, devices
//! or Programs.
//!
//! ```
//! use foretell_executor::data::{DataSource, Dataset, SampleShape, Split};
//! let shape = SampleShape::Image { channels: 1, height: 8, width: 8, classes: 10 };
//! let digits = Dataset::open(&DataSource::Digits, &shape, 42)?;
//! let batch = digits.epoch_order(0).batch(3, 64)?;
//! let second_of_two_ranks = &batch[32..];
//! let mut images = vec![0.0; 32 * digits.sample_size()];
//! digits.fill_images(Split::Training, 0, second_of_two_ranks, &mut images)?;
//! # Ok::<(), foretell_executor::data::DataError>(())
//! ```

// A test that unwraps an error should stop there.
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod cifar;
mod error;
mod files;
mod idx;
mod images;
mod masking;
mod options;
mod order;
mod pictures;
mod source;
mod synthetic;
#[cfg(test)]
mod tests;
mod tokens;

pub use error::DataError;
pub use options::{Augmentation, AugmentationError, InputOptions, OnBadSample};
pub use order::EpochOrder;
pub use source::{DataSource, EmptyDataName};
pub use tokens::TokenFileWriter;

pub use foretell_models::SampleShape;

use files::FileContents;
use images::ImageData;
use options::Filled;
use pictures::PictureFolder;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use synthetic::Synthetic;
use tokens::{TokenData, Tokens};

/// The index of a row without a sample. It is filled with zeros, and its labels are
/// [`IGNORED_LABEL`].
pub const PADDING: usize = usize::MAX;
/// The label that loss and accuracy ignore.
pub const IGNORED_LABEL: i32 = -1;

/// The most elements of one sample, a gigabyte in single precision. A larger shape is a mistake.
const MAX_SAMPLE: usize = 1 << 28;

/// The most workers per rank that are started unless the user asks for more.
const MOST_USUAL_WORKERS: usize = 4;

/// A part of the data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Split {
    /// The samples that the model is trained on.
    Training,
    /// The samples that the model is evaluated on and never trained on.
    Evaluation,
}

/// Data that was read, checked and fitted to a model.
#[derive(Debug)]
pub struct Dataset {
    name: String,
    shape: SampleShape,
    seed: u64,
    contents: Contents,
}

#[derive(Debug)]
enum Contents {
    Images(ImageData),
    Pictures(Box<PictureFolder>),
    Tokens(TokenData),
    Synthetic(Synthetic),
}

impl Dataset {
    /// Opens data for a model. The order of the samples and the values of synthetic data depend on
    /// the seed; the splits do not.
    ///
    /// # Errors
    /// If the data cannot be read, is not valid in its format, or does not fit the model.
    pub fn open(source: &DataSource, shape: &SampleShape, seed: u64) -> Result<Dataset, DataError> {
        Self::open_with(source, shape, seed, &InputOptions::default())
    }

    /// Opens data for a model, with random changes of pictures and a policy for bad samples.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_with(source: &DataSource, shape: &SampleShape, seed: u64, options: &InputOptions) -> Result<Dataset, DataError> {
        let (name, policy) = (source.to_string(), options.on_bad_sample);
        check_shape(&name, shape)?;
        let contents = match source {
            DataSource::Synthetic => Contents::Synthetic(Synthetic::new(*shape, seed)),
            DataSource::Digits => {
                let (training, evaluation) = shipped_digits()?.split_off_every_fifth();
                Contents::Images(ImageData::new(&name, training, evaluation, shape, policy)?)
            }
            DataSource::Text => {
                let text = concat!(include_str!("../../data/LICENSE-MIT"), "\n", include_str!("../../data/LICENSE-APACHE"));
                Contents::Tokens(TokenData::new(&name, Tokens::text(&name, text), shape, policy)?)
            }
            DataSource::Path(path) => match files::open_path(path, policy)? {
                FileContents::Images { training, evaluation } => {
                    Contents::Images(ImageData::new(&name, training, evaluation, shape, policy)?)
                }
                FileContents::Pictures => Contents::Pictures(Box::new(PictureFolder::open(path, shape, seed, options)?)),
                FileContents::Tokens(tokens) => Contents::Tokens(TokenData::new(&name, tokens, shape, policy)?),
            },
        };
        Ok(Dataset { name, shape: *shape, seed, contents })
    }

    /// The number of workers of each rank: the user's choice, or else one per core up to 4 for
    /// pictures, which take long to read, and 0 for samples in memory. `cores` is the number of
    /// cores per rank.
    pub fn workers(&self, options: &InputOptions, cores: usize) -> usize {
        options.workers.unwrap_or(match self.contents {
            Contents::Pictures(_) => cores.clamp(1, MOST_USUAL_WORKERS),
            _ => 0,
        })
    }

    /// The number of classes, files and samples that were left out when the data was opened. Only
    /// [`OnBadSample::Skip`] leaves anything out.
    pub fn bad_samples(&self) -> usize {
        match &self.contents {
            Contents::Images(images) => images.bad_samples(),
            Contents::Pictures(pictures) => pictures.bad_samples(),
            Contents::Tokens(tokens) => tokens.bad_samples(),
            Contents::Synthetic(_) => 0,
        }
    }

    /// The number of samples of a split: at least one for training. A folder of pictures without
    /// `val` has none for evaluation.
    pub fn len(&self, split: Split) -> usize {
        match &self.contents {
            Contents::Images(images) => images.split(split).labels.len(),
            Contents::Pictures(pictures) => pictures.len(split),
            Contents::Tokens(tokens) => tokens.len(split),
            Contents::Synthetic(synthetic) => synthetic.len(split),
        }
    }

    /// The number of elements or tokens of one sample; for a pair, of its source sequence.
    pub fn sample_size(&self) -> usize {
        match self.shape {
            SampleShape::Image { channels, height, width, .. } => channels * height * width,
            SampleShape::Features { width, .. } => width,
            SampleShape::Tokens { sequence, .. } | SampleShape::MaskedTokens { sequence, .. } => sequence,
            SampleShape::Pair { source, .. } => source,
        }
    }

    /// The shape of the samples.
    pub fn shape(&self) -> SampleShape {
        self.shape
    }

    /// Reads the file of a sample and returns its length; `None` if the sample has no file of its
    /// own. A file that cannot be read has no bytes.
    pub fn stored_bytes(&self, split: Split, index: usize) -> Option<u64> {
        match &self.contents {
            Contents::Pictures(pictures) => {
                let read = pictures.path(split, index).map(|path| pictures::read_file(&path));
                Some(read.and_then(Result::ok).map_or(0, |bytes| bytes.len() as u64))
            }
            _ => None,
        }
    }

    /// The name of a sample for messages: its file, if it has one of its own.
    pub fn sample_name(&self, split: Split, index: usize) -> String {
        let file = match &self.contents {
            Contents::Pictures(pictures) => pictures.path(split, index),
            _ => None,
        };
        file.map_or_else(|| format!("sample {index} of {}", self.name), |path| path.display().to_string())
    }

    /// The number of steps of one epoch of training. A last incomplete batch is dropped.
    ///
    /// # Errors
    /// If the global batch is zero or larger than the training split.
    pub fn steps_per_epoch(&self, global_batch: usize) -> Result<usize, DataError> {
        order::steps_per_epoch(self.len(Split::Training), global_batch)
    }

    /// The order of one epoch's training samples. Keep it for the epoch: computing it takes time
    /// proportional to the number of samples.
    pub fn epoch_order(&self, epoch: u64) -> EpochOrder {
        EpochOrder::shuffled(self.len(Split::Training), self.seed, epoch)
    }

    /// The number of batches of an evaluation. The last one may be padded. 0 for a global batch of
    /// zero.
    pub fn evaluation_batches(&self, global_batch: usize) -> usize {
        if global_batch == 0 { 0 } else { self.len(Split::Evaluation).div_ceil(global_batch) }
    }

    /// The evaluation samples of one batch. Over all batches each sample comes exactly once. The
    /// last batch is filled up with [`PADDING`].
    ///
    /// # Errors
    /// If there is no such batch.
    pub fn evaluation_indices(&self, batch: usize, global_batch: usize) -> Result<Vec<usize>, DataError> {
        order::evaluation_batch(self.len(Split::Evaluation), batch, global_batch)
    }

    /// Fills `out` with images, `[sample, height, width, channels]`, or with features, `[sample,
    /// width]`. Both are normalised: pictures of a folder by ImageNet's mean and deviation, others
    /// over the training split. Training pictures are augmented at random, differently in each
    /// epoch.
    ///
    /// Returns which samples could not be read and were replaced by others, in ascending order.
    ///
    /// # Errors
    /// If the data holds tokens, an index is beyond the split, the buffer is not exactly as long as
    /// the samples, or a picture cannot be read.
    pub fn fill_images(
        &self,
        split: Split,
        epoch: u64,
        indices: &[usize],
        out: &mut [f32],
    ) -> Result<BTreeSet<usize>, DataError> {
        self.check_classified("images")?;
        self.check_request(split, indices, self.sample_size(), out.len())?;
        let mut replaced = BTreeSet::new();
        for (&index, sample) in indices.iter().zip(out.chunks_exact_mut(self.sample_size())) {
            match &self.contents {
                _ if index == PADDING => sample.fill(0.0),
                Contents::Pictures(pictures) => {
                    if pictures.fill(split, epoch, index, sample)? == Filled::Replaced {
                        replaced.insert(index);
                    }
                }
                Contents::Images(images) => {
                    images.fill(images.split(split).get(index).expect("invariant: the request was checked").0, sample);
                }
                Contents::Synthetic(synthetic) => synthetic.fill(split, index, sample),
                Contents::Tokens(_) => unreachable!("invariant: the kind was checked"),
            }
        }
        Ok(replaced)
    }

    /// Fills `out` with the class of each sample, [`IGNORED_LABEL`] for padding.
    ///
    /// # Errors
    /// If the data holds tokens, an index is beyond the split, or the buffer is not exactly as long
    /// as the samples.
    pub fn fill_labels(&self, split: Split, indices: &[usize], out: &mut [i32]) -> Result<(), DataError> {
        self.check_classified("class labels")?;
        self.check_request(split, indices, 1, out.len())?;
        for (&index, label) in indices.iter().zip(out) {
            *label = match &self.contents {
                _ if index == PADDING => IGNORED_LABEL,
                Contents::Pictures(pictures) => pictures.label(split, index),
                Contents::Images(images) => {
                    i32::from(images.split(split).get(index).expect("invariant: the request was checked").1)
                }
                Contents::Synthetic(synthetic) => synthetic.label(split, index) as i32,
                Contents::Tokens(_) => unreachable!("invariant: the kind was checked"),
            }
        }
        Ok(())
    }

    /// Fills tokens and labels, both `[sample, sequence]`. The labels are the tokens shifted by
    /// one. If tokens are masked, the labels are the original tokens at the masked positions and
    /// [`IGNORED_LABEL`] elsewhere. The labels of padding are [`IGNORED_LABEL`].
    ///
    /// Returns which samples could not be used and were replaced by others, in ascending order.
    ///
    /// # Errors
    /// If the data holds images, an index is beyond the split, or a buffer is not exactly as long
    /// as the samples.
    pub fn fill_tokens(
        &self,
        split: Split,
        indices: &[usize],
        tokens: &mut [i32],
        labels: &mut [i32],
    ) -> Result<BTreeSet<usize>, DataError> {
        let sequence = self.sample_size();
        if self.shape.tokens().is_none() {
            return Err(DataError::WrongKind { asked: "tokens", opened_for: "images or features" });
        }
        self.check_request(split, indices, sequence, tokens.len())?;
        self.check_request(split, indices, sequence, labels.len())?;
        let mut replaced = BTreeSet::new();
        let rows = tokens.chunks_exact_mut(sequence).zip(labels.chunks_exact_mut(sequence));
        for (&index, (tokens, labels)) in indices.iter().zip(rows) {
            match &self.contents {
                _ if index == PADDING => {
                    tokens.fill(0);
                    labels.fill(IGNORED_LABEL);
                }
                Contents::Tokens(data) => {
                    if data.fill(split, index, tokens, labels)? == Filled::Replaced {
                        replaced.insert(index);
                    }
                }
                Contents::Synthetic(data) => data.fill_tokens(split, index, tokens, labels),
                Contents::Images(_) | Contents::Pictures(_) => {
                    unreachable!("invariant: pictures are not opened for a model of tokens")
                }
            }
            if let SampleShape::MaskedTokens { vocabulary, predictions, .. } = self.shape
                && index != PADDING
            {
                masking::mask(self.seed, split, index, vocabulary, predictions, tokens, labels);
            }
        }
        Ok(replaced)
    }

    /// Fills pairs of sequences. `sources` is `[sample, source]`. `labels`, the target, and
    /// `tokens`, the target shifted by one as the decoder's input, are `[sample, target]`. The
    /// labels of padding are [`IGNORED_LABEL`].
    ///
    /// # Errors
    /// If the data holds no pairs, an index is beyond the split, or a buffer is not exactly as long
    /// as the samples.
    pub fn fill_pairs(
        &self,
        split: Split,
        indices: &[usize],
        sources: &mut [i32],
        tokens: &mut [i32],
        labels: &mut [i32],
    ) -> Result<(), DataError> {
        let SampleShape::Pair { source, target, .. } = self.shape else {
            return Err(DataError::WrongKind { asked: "pairs of sequences", opened_for: "something else" });
        };
        self.check_request(split, indices, source, sources.len())?;
        self.check_request(split, indices, target, tokens.len())?;
        self.check_request(split, indices, target, labels.len())?;
        let rows = sources.chunks_exact_mut(source).zip(tokens.chunks_exact_mut(target)).zip(labels.chunks_exact_mut(target));
        for (&index, ((source, tokens), labels)) in indices.iter().zip(rows) {
            match &self.contents {
                _ if index == PADDING => {
                    source.fill(0);
                    tokens.fill(0);
                    labels.fill(IGNORED_LABEL);
                }
                Contents::Synthetic(data) => data.fill_pair(split, index, source, tokens, labels),
                Contents::Images(_) | Contents::Pictures(_) | Contents::Tokens(_) => {
                    unreachable!("invariant: only synthetic data is opened for a model of pairs")
                }
            }
        }
        Ok(())
    }

    fn check_classified(&self, asked: &'static str) -> Result<(), DataError> {
        match self.shape {
            SampleShape::Tokens { .. } | SampleShape::MaskedTokens { .. } => {
                Err(DataError::WrongKind { asked, opened_for: "tokens" })
            }
            SampleShape::Pair { .. } => Err(DataError::WrongKind { asked, opened_for: "pairs of sequences" }),
            SampleShape::Image { .. } | SampleShape::Features { .. } => Ok(()),
        }
    }

    /// Checks a request before anything is written.
    fn check_request(&self, split: Split, indices: &[usize], per_sample: usize, given: usize) -> Result<(), DataError> {
        let samples = self.len(split);
        if let Some(&index) = indices.iter().find(|&&index| index >= samples && index != PADDING) {
            return Err(DataError::SampleOutOfRange { index, samples });
        }
        let needed = indices.len().saturating_mul(per_sample);
        if given != needed {
            return Err(DataError::BufferSize { given, samples: indices.len(), needed });
        }
        Ok(())
    }
}

/// The shipped digits, which are in MNIST's format.
fn shipped_digits() -> Result<images::LabelledImages, DataError> {
    let images = include_bytes!("../../data/digits-images.idx3-ubyte");
    let labels = include_bytes!("../../data/digits-labels.idx1-ubyte");
    idx::labelled_images("the images of `digits`", images, "the labels of `digits`", labels, OnBadSample::Error)
}

/// Refuses shapes with a size of zero, and those larger than any buffer.
fn check_shape(name: &str, shape: &SampleShape) -> Result<(), DataError> {
    let (sizes, kinds) = match *shape {
        SampleShape::Image { channels, height, width, classes } => ([channels, height, width], classes),
        SampleShape::Features { width, classes } => ([width, 1, 1], classes),
        SampleShape::Tokens { sequence, vocabulary } => ([sequence, 1, 1], vocabulary),
        // `sizes` holds a zero, which is refused, if any of the four is zero.
        SampleShape::Pair { source, target, source_vocabulary, target_vocabulary } => {
            let smallest = source.min(target).min(source_vocabulary).min(target_vocabulary);
            ([source.max(target), smallest.min(1), 1], source_vocabulary.max(target_vocabulary))
        }
        SampleShape::MaskedTokens { sequence, vocabulary, predictions } => {
            ([sequence, usize::from((1..=sequence).contains(&predictions)), 1], vocabulary)
        }
    };
    let size = sizes.iter().try_fold(1_usize, |product, &size| product.checked_mul(size));
    let is_valid = size.is_some_and(|size| (1..=MAX_SAMPLE).contains(&size)) && (1..=i32::MAX as usize).contains(&kinds);
    if is_valid {
        return Ok(());
    }
    let problem = format!("the sizes of {shape:?} are out of range");
    let hint = format!("every size is at least 1, and a sample has at most {MAX_SAMPLE} elements");
    Err(DataError::unsuitable(name, problem, hint))
}
