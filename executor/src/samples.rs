//! The samples of one global batch, as loads ask for them: by their position in the batch, whatever the layout.

use crate::backend::Operand;
use crate::data::{DataError, Dataset, Split};
use crate::error::ExecutorError;
use crate::half::Half;
use foretell_models::{InputKind, SampleShape};
use std::sync::Arc;

/// A global batch.
#[derive(Clone, Debug)]
pub(crate) struct Samples {
    pub(crate) dataset: Arc<Dataset>,
    pub(crate) split: Split,
    /// The data set's samples, in the order of the batch.
    pub(crate) indices: Vec<usize>,
}

impl Samples {
    /// Fills `write` with one kind of input of `count` samples from position `first` of the batch; images and features in `half`, if
    /// there is one.
    ///
    /// # Safety
    /// The operand is valid, aligned to four bytes, and nobody else's until this returns.
    pub(crate) unsafe fn load(
        &self,
        input: InputKind,
        half: Option<Half>,
        first: usize,
        count: usize,
        write: &Operand,
    ) -> Result<(), ExecutorError> {
        let Some(indices) = self.indices.get(first..first + count) else {
            return Err(ExecutorError::Unsupported {
                what: format!("a batch of {} samples where {} are read", self.indices.len(), first + count),
                hint: "use data with more samples, or a smaller global batch".into(),
            });
        };
        if let (InputKind::Images | InputKind::Features, Some(half)) = (input, half) {
            // SAFETY: the caller's promise.
            let halves = unsafe { std::slice::from_raw_parts_mut(write.pointer.cast::<u16>(), write.bytes / 2) };
            let mut sample = vec![0.0; self.dataset.sample_size()];
            if halves.len() != count * sample.len() {
                let (given, needed) = (halves.len(), count * sample.len());
                return Err(DataError::BufferSize { given, samples: count, needed }.into());
            }
            for (index, halves) in indices.iter().zip(halves.chunks_mut(sample.len().max(1))) {
                self.dataset.fill_images(self.split, &[*index], &mut sample)?;
                half.narrow(halves, &sample);
            }
            return Ok(());
        }
        let elements = write.bytes / 4;
        // SAFETY: the caller's promise.
        let floats = || unsafe { std::slice::from_raw_parts_mut(write.pointer.cast::<f32>(), elements) };
        // SAFETY: the caller's promise.
        let integers = || unsafe { std::slice::from_raw_parts_mut(write.pointer.cast::<i32>(), elements) };
        // A data set makes the sequences of a pair together.
        if let SampleShape::Pair { source, target, .. } = self.dataset.shape() {
            let beside = |length: usize| vec![0; indices.len().saturating_mul(length)];
            match input {
                InputKind::SourceTokens => {
                    let (mut tokens, mut labels) = (beside(target), beside(target));
                    self.dataset.fill_pairs(self.split, indices, integers(), &mut tokens, &mut labels)?;
                }
                InputKind::Labels => {
                    let (mut sources, mut tokens) = (beside(source), beside(target));
                    self.dataset.fill_pairs(self.split, indices, &mut sources, &mut tokens, integers())?;
                }
                _ => {
                    let (mut sources, mut labels) = (beside(source), beside(target));
                    self.dataset.fill_pairs(self.split, indices, &mut sources, integers(), &mut labels)?;
                }
            }
            return Ok(());
        }
        let has_tokens = self.dataset.shape().tokens().is_some();
        match input {
            InputKind::Images | InputKind::Features => self.dataset.fill_images(self.split, indices, floats())?,
            // A data set makes tokens and the labels that follow them together.
            InputKind::Tokens | InputKind::SourceTokens => {
                let mut labels = vec![0; elements];
                self.dataset.fill_tokens(self.split, indices, integers(), &mut labels)?;
            }
            InputKind::Labels if has_tokens => {
                let mut tokens = vec![0; elements];
                self.dataset.fill_tokens(self.split, indices, &mut tokens, integers())?;
            }
            InputKind::Labels => self.dataset.fill_labels(self.split, indices, integers())?,
            InputKind::TokenTypes => integers().fill(0),
        }
        Ok(())
    }
}
