//! The samples of one global batch, as loads ask for them: by their position in the batch, whatever the layout.

use crate::backend::Operand;
use crate::data::{Dataset, SampleShape, Split};
use crate::error::ExecutorError;
use foretell_models::{InputKind, Sample};
use std::sync::Arc;

/// A global batch.
#[derive(Clone, Debug)]
pub(crate) struct Samples {
    pub(crate) dataset: Arc<Dataset>,
    pub(crate) split: Split,
    /// The data set's samples, in the order of the batch.
    pub(crate) indices: Vec<usize>,
}

/// What a model wants of a data set.
pub fn sample_shape(sample: Sample) -> SampleShape {
    match sample {
        Sample::Image { size, channels, classes } => SampleShape::Image { channels, height: size, width: size, classes },
        Sample::Features { width, classes } => SampleShape::Features { width, classes },
        Sample::Tokens { sequence, vocabulary } => SampleShape::Tokens { sequence, vocabulary },
        Sample::Pair { source, target, source_vocabulary, target_vocabulary } => {
            SampleShape::Pair { source, target, source_vocabulary, target_vocabulary }
        }
    }
}

impl Samples {
    /// Fills `write` with one kind of input of `count` samples from position `first` of the batch.
    ///
    /// # Safety
    /// The operand is valid, aligned to four bytes, and nobody else's until this returns.
    pub(crate) unsafe fn load(&self, input: InputKind, first: usize, count: usize, write: &Operand) -> Result<(), ExecutorError> {
        let Some(indices) = self.indices.get(first..first + count) else {
            return Err(ExecutorError::Unsupported {
                what: format!("a batch of {} samples where {} are read", self.indices.len(), first + count),
                hint: "use data with more samples, or a smaller global batch".into(),
            });
        };
        let elements = write.bytes / 4;
        // SAFETY: the caller's promise.
        let floats = || unsafe { std::slice::from_raw_parts_mut(write.pointer.cast::<f32>(), elements) };
        // SAFETY: the caller's promise.
        let integers = || unsafe { std::slice::from_raw_parts_mut(write.pointer.cast::<i32>(), elements) };
        match (input, self.dataset.wanted()) {
            (InputKind::Images | InputKind::Features, _) => self.dataset.fill_images(self.split, indices, floats())?,
            // A data set makes the sequences of a pair together.
            (kind, SampleShape::Pair { source, target, .. }) => {
                let of_samples = |length: usize| vec![0; indices.len().saturating_mul(length)];
                let (mut sources, mut tokens, mut labels) = (of_samples(source), of_samples(target), of_samples(target));
                let place = integers();
                match kind {
                    InputKind::SourceTokens => {
                        self.dataset.fill_pairs(self.split, indices, place, &mut tokens, &mut labels)?;
                    }
                    InputKind::Labels => self.dataset.fill_pairs(self.split, indices, &mut sources, &mut tokens, place)?,
                    _ => self.dataset.fill_pairs(self.split, indices, &mut sources, place, &mut labels)?,
                }
            }
            // A data set makes tokens and the labels that follow them together.
            (InputKind::Tokens | InputKind::SourceTokens, _) => {
                let mut labels = vec![0; elements];
                self.dataset.fill_tokens(self.split, indices, integers(), &mut labels)?;
            }
            (InputKind::Labels, SampleShape::Tokens { .. }) => {
                let mut tokens = vec![0; elements];
                self.dataset.fill_tokens(self.split, indices, &mut tokens, integers())?;
            }
            (InputKind::Labels, _) => self.dataset.fill_labels(self.split, indices, integers())?,
        }
        Ok(())
    }
}
