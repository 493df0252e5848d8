//! The batches of a run, by step: which samples, and in which epoch.
//!
//! A batch is a function of the seed, the step and the global batch alone. So every rank of every
//! layout knows it without communication, a run can start at any step, and batches of later steps
//! are known even beyond the end of an epoch.

use crate::data::{DataError, Dataset, EpochOrder};
use std::sync::Arc;

/// The samples of one step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Batch {
    pub(crate) epoch: u64,
    /// Indices into the training split.
    pub(crate) indices: Vec<usize>,
}

/// The batches of a run.
pub(crate) struct BatchSequence {
    dataset: Arc<Dataset>,
    global_batch: usize,
    steps_per_epoch: usize,
    /// The order of the last epoch that was asked for.
    order: Option<(u64, EpochOrder)>,
}

impl BatchSequence {
    /// # Errors
    /// [`DataError::GlobalBatch`] if the training split has fewer samples.
    pub(crate) fn new(dataset: &Arc<Dataset>, global_batch: usize) -> Result<Self, DataError> {
        let steps_per_epoch = dataset.steps_per_epoch(global_batch)?;
        Ok(Self { dataset: Arc::clone(dataset), global_batch, steps_per_epoch, order: None })
    }

    /// The batch of a step, counted from the start of the run.
    pub(crate) fn batch(&mut self, step: usize) -> Result<Batch, DataError> {
        let (epoch, within) = ((step / self.steps_per_epoch) as u64, step % self.steps_per_epoch);
        let (_, order) = match self.order.take().filter(|(known, _)| *known == epoch) {
            Some(known) => self.order.insert(known),
            None => self.order.insert((epoch, self.dataset.epoch_order(epoch))),
        };
        let indices = order.batch(within, self.global_batch)?;
        Ok(Batch { epoch, indices })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::{DataSource, SampleShape};

    fn digits() -> Arc<Dataset> {
        let shape = SampleShape::Features { width: 64, classes: 10 };
        Arc::new(Dataset::open(&DataSource::Digits, &shape, 3).expect("the shipped digits"))
    }

    #[test]
    fn a_sequence_that_starts_in_the_middle_goes_on_as_a_whole_one() {
        let dataset = digits();
        let mut whole = BatchSequence::new(&dataset, 100).expect("a batch of 100");
        let all: Vec<Batch> = (0..40).map(|step| whole.batch(step).expect("a batch")).collect();
        assert_eq!((whole.steps_per_epoch, all[13].epoch, all[14].epoch), (14, 0, 1));
        for start in [1, 13, 14, 27, 39] {
            let mut resumed = BatchSequence::new(&dataset, 100).expect("a batch of 100");
            // As a run asks: a step, and those after it.
            for step in start..40 {
                for ahead in (step..40).take(3) {
                    assert_eq!(resumed.batch(ahead).expect("a batch"), all[ahead]);
                }
            }
        }
    }

    #[test]
    fn every_epoch_has_each_sample_at_most_once() {
        let mut sequence = BatchSequence::new(&digits(), 100).expect("a batch of 100");
        for epoch in 0..2 {
            let steps = epoch * 14..(epoch + 1) * 14;
            let mut seen: Vec<usize> = steps.flat_map(|step| sequence.batch(step).expect("a batch").indices).collect();
            seen.sort_unstable();
            seen.dedup();
            assert_eq!(seen.len(), 1400);
        }
    }
}
