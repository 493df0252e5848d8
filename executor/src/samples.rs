//! The samples of one global batch, from which `load` instructions fill their buffers. It must not
//! know how a data set is stored (`data`), or which layout splits the batch.

#[cfg(test)]
mod tests;
mod workers;

pub(crate) use workers::WorkerPool;

use crate::backend::Operand;
use crate::data::{DataError, Dataset, Split};
use crate::error::ExecutorError;
use crate::half::SixteenBits;
use foretell_models::{InputKind, SampleShape, Zigzag, position_runs};
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};
use workers::Prepared;

/// A global batch. Samples are addressed by their position in it, in every layout.
#[derive(Debug)]
pub(crate) struct Samples {
    dataset: Arc<Dataset>,
    split: Split,
    /// The epoch that random changes belong to.
    epoch: u64,
    /// The batch's samples, as indices into the data set's split.
    indices: Vec<usize>,
    /// The images that workers prepare. The others are read when they are loaded.
    prepared: Option<Arc<Prepared>>,
    /// The samples that could not be read, of those that this rank has loaded.
    replaced: Mutex<BTreeSet<usize>>,
}

impl Samples {
    pub(crate) fn new(dataset: Arc<Dataset>, split: Split, epoch: u64, indices: Vec<usize>) -> Self {
        Self { dataset, split, epoch, indices, prepared: None, replaced: Mutex::default() }
    }

    /// Has workers prepare the images at these positions, in this order.
    pub(crate) fn prepared_by(mut self, pool: &WorkerPool, positions: &[usize]) -> Self {
        let samples = positions.iter().filter_map(|&position| Some((position, *self.indices.get(position)?)));
        self.prepared = Some(pool.prepare(&self.dataset, self.split, self.epoch, samples));
        self
    }

    /// The samples that could not be read and were replaced, of those that this rank has loaded.
    pub(crate) fn replaced(&self) -> BTreeSet<usize> {
        self.replaced.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn note_replaced(&self, samples: BTreeSet<usize>) {
        if !samples.is_empty() {
            self.replaced.lock().unwrap_or_else(PoisonError::into_inner).extend(samples);
        }
    }

    /// Fills `write` with one kind of input of `count` samples, from position `first` of the batch
    /// on. With `half`, images and features are stored in that format. With `order`, the tokens,
    /// labels or positions of a sample are stored in that order.
    ///
    /// # Errors
    /// [`ExecutorError::Unsupported`] if the batch has fewer samples, and errors of the data set.
    ///
    /// # Safety
    /// The operand is valid, aligned to four bytes, and not in use elsewhere until this returns.
    pub(crate) unsafe fn load(
        &self,
        input: InputKind,
        half: Option<SixteenBits>,
        first: usize,
        count: usize,
        order: Option<Zigzag>,
        write: &Operand,
    ) -> Result<(), ExecutorError> {
        // SAFETY: the caller's promise.
        unsafe { self.load_in_order(input, half, first, count, write) }?;
        if let Some(order) = order {
            // SAFETY: the caller's promise.
            reorder(unsafe { std::slice::from_raw_parts_mut(write.pointer.cast::<i32>(), write.bytes / 4) }, order);
        }
        Ok(())
    }

    /// As [`load`](Self::load), in the order of positions.
    ///
    /// # Safety
    /// As for [`load`](Self::load).
    unsafe fn load_in_order(
        &self,
        input: InputKind,
        half: Option<SixteenBits>,
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
            return self.load_images(first, indices, halves, |halves, values| half.narrow(halves, values));
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
            InputKind::Images | InputKind::Features => {
                return self.load_images(first, indices, floats(), <[f32]>::copy_from_slice);
            }
            // The data set makes tokens and labels together; the one that is not wanted is
            // discarded.
            InputKind::Tokens | InputKind::SourceTokens => {
                let mut labels = vec![0; elements];
                self.note_replaced(self.dataset.fill_tokens(self.split, indices, integers(), &mut labels)?);
            }
            InputKind::Labels if has_tokens => {
                let mut tokens = vec![0; elements];
                self.note_replaced(self.dataset.fill_tokens(self.split, indices, &mut tokens, integers())?);
            }
            InputKind::Labels => self.dataset.fill_labels(self.split, indices, integers())?,
            InputKind::TokenTypes => integers().fill(0),
            InputKind::Positions { first } => {
                for sequence in integers().chunks_mut((elements / count.max(1)).max(1)) {
                    sequence.iter_mut().zip(first..).for_each(|(row, place)| *row = place as i32);
                }
            }
        }
        Ok(())
    }

    /// Stores images or features sample by sample: those that workers prepare when they are ready,
    /// the others at once. `first` is the position of the first.
    fn load_images<T>(
        &self,
        first: usize,
        indices: &[usize],
        out: &mut [T],
        store: impl Fn(&mut [T], &[f32]),
    ) -> Result<(), ExecutorError> {
        let size = self.dataset.sample_size();
        let needed = indices.len() * size;
        if out.len() != needed {
            return Err(DataError::BufferSize { given: out.len(), samples: indices.len(), needed }.into());
        }
        let mut sample = Vec::new();
        for ((position, &index), out) in (first..).zip(indices).zip(out.chunks_mut(size.max(1))) {
            match self.prepared.as_ref().and_then(|prepared| prepared.get(position)) {
                Some(ready) => {
                    let ready = ready?;
                    store(out, &ready.values);
                    self.note_replaced(ready.is_replaced.then_some(index).into_iter().collect());
                }
                None => {
                    sample.resize(size, 0.0);
                    self.note_replaced(self.dataset.fill_images(self.split, self.epoch, &[index], &mut sample)?);
                    store(out, &sample);
                }
            }
        }
        Ok(())
    }

    /// Fills `integers` with one sequence of each source-target pair. The data set makes source
    /// tokens, target tokens and labels together; the other two are discarded.
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
            InputKind::Tokens => {
                let (mut sources, mut labels) = (unused(source), unused(target));
                self.dataset.fill_pairs(self.split, indices, &mut sources, integers, &mut labels)?;
            }
            InputKind::Images | InputKind::Features | InputKind::TokenTypes | InputKind::Positions { .. } => {
                unreachable!("invariant: a model of pairs reads tokens and labels")
            }
        }
        Ok(())
    }
}

/// Stores the positions of each sequence in `order`.
fn reorder(sequences: &mut [i32], order: Zigzag) {
    let mut positions = vec![0; order.positions()];
    for sequence in sequences.chunks_exact_mut(order.positions()) {
        positions.copy_from_slice(sequence);
        for run in position_runs(Some(order), 0..order.positions()) {
            sequence[run.start..][..run.length].copy_from_slice(&positions[run.position..][..run.length]);
        }
    }
}
