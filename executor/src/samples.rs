//! The samples of one global batch, from which `load` instructions fill their buffers.

use crate::backend::Operand;
use crate::data::{DataError, Dataset, Split};
use crate::error::ExecutorError;
use crate::half::Half;
use foretell_models::{InputKind, SampleShape};
use std::sync::Arc;

/// A global batch. Samples are addressed by their position in it, in every layout.
#[derive(Clone, Debug)]
pub(crate) struct Samples {
    pub(crate) dataset: Arc<Dataset>,
    pub(crate) split: Split,
    /// The batch's samples, as indices into the data set's split.
    pub(crate) indices: Vec<usize>,
}

impl Samples {
    /// Fills `write` with one kind of input of `count` samples, from position `first` of the batch
    /// on. With `half`, images and features are stored in that format.
    ///
    /// # Errors
    /// [`ExecutorError::Unsupported`] if the batch has fewer samples, and errors of the data set.
    ///
    /// # Safety
    /// The operand is valid, aligned to four bytes, and not in use elsewhere until this returns.
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
                what: format!("a batch of {} samples, of which {} are read,", self.indices.len(), first + count),
                hint: "use data with more samples, or a smaller global batch".into(),
            });
        };
        if let (InputKind::Images | InputKind::Features, Some(half)) = (input, half) {
            // SAFETY: the caller's promise.
            let halves = unsafe { std::slice::from_raw_parts_mut(write.pointer.cast::<u16>(), write.bytes / 2) };
            return self.load_in_half_precision(half, indices, halves);
        }
        let elements = write.bytes / 4;
        // SAFETY: the caller's promise.
        let floats = || unsafe { std::slice::from_raw_parts_mut(write.pointer.cast::<f32>(), elements) };
        // SAFETY: the caller's promise.
        let integers = || unsafe { std::slice::from_raw_parts_mut(write.pointer.cast::<i32>(), elements) };
        if let SampleShape::Pair { source, target, .. } = self.dataset.shape() {
            return self.load_pairs(input, indices, [source, target], integers());
        }
        let has_tokens = self.dataset.shape().tokens().is_some();
        match input {
            InputKind::Images | InputKind::Features => self.dataset.fill_images(self.split, indices, floats())?,
            // The data set makes tokens and labels together; the half that is not asked for is
            // thrown away.
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

    /// Fills `halves` with images or features, narrowed sample by sample.
    fn load_in_half_precision(&self, half: Half, indices: &[usize], halves: &mut [u16]) -> Result<(), ExecutorError> {
        let mut sample = vec![0.0; self.dataset.sample_size()];
        let needed = indices.len() * sample.len();
        if halves.len() != needed {
            return Err(DataError::BufferSize { given: halves.len(), samples: indices.len(), needed }.into());
        }
        for (index, halves) in indices.iter().zip(halves.chunks_mut(sample.len().max(1))) {
            self.dataset.fill_images(self.split, &[*index], &mut sample)?;
            half.narrow(halves, &sample);
        }
        Ok(())
    }

    /// Fills `integers` with one sequence of each source-target pair. The data set makes source
    /// tokens, target tokens and labels together; the other two are thrown away.
    fn load_pairs(
        &self,
        input: InputKind,
        indices: &[usize],
        [source, target]: [usize; 2],
        integers: &mut [i32],
    ) -> Result<(), ExecutorError> {
        let unused = |length: usize| vec![0; indices.len().saturating_mul(length)];
        match input {
            InputKind::SourceTokens => {
                let (mut tokens, mut labels) = (unused(target), unused(target));
                self.dataset.fill_pairs(self.split, indices, integers, &mut tokens, &mut labels)?;
            }
            InputKind::Labels => {
                let (mut sources, mut tokens) = (unused(source), unused(target));
                self.dataset.fill_pairs(self.split, indices, &mut sources, &mut tokens, integers)?;
            }
            _ => {
                let (mut sources, mut labels) = (unused(source), unused(target));
                self.dataset.fill_pairs(self.split, indices, &mut sources, integers, &mut labels)?;
            }
        }
        Ok(())
    }
}
