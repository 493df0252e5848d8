//! The samples of each batch: a seeded permutation for each epoch. Also the seeded random numbers
//! of all of `data`.
//!
//! A batch is a list of global indices. It depends on the seed, the epoch, the step and the global
//! batch alone, so every rank of every layout sees the same list and takes its own part. This
//! module does not know what a sample is.

use super::{DataError, PADDING};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

/// The purpose of a stream of seeded numbers. Streams of different purposes are independent.
#[derive(Clone, Copy)]
#[repr(u64)]
pub(crate) enum Purpose {
    Order = 1,
    ClassPattern = 2,
    TrainingSample = 3,
    EvaluationSample = 4,
    MarkovChain = 5,
    TrainingMask = 6,
    EvaluationMask = 7,
    Augmentation = 8,
}

/// The stream of seeded numbers for one purpose and one item (an epoch, a class, a sample).
pub(crate) fn stream(seed: u64, purpose: Purpose, item: u64) -> ChaCha8Rng {
    stream_in_epoch(seed, purpose, item, 0)
}

/// The stream of seeded numbers for one purpose and one item in one epoch.
pub(crate) fn stream_in_epoch(seed: u64, purpose: Purpose, item: u64, epoch: u64) -> ChaCha8Rng {
    let words = [seed, purpose as u64, item, epoch];
    let mut key = [0_u8; 32];
    for (bytes, word) in key.chunks_exact_mut(8).zip(words) {
        bytes.copy_from_slice(&word.to_le_bytes());
    }
    ChaCha8Rng::from_seed(key)
}

/// A uniformly distributed number below `bound`; 0 if `bound` is 0.
///
/// The method is multiplication with rejection of the biased part (D. Lemire, "Fast Random Integer
/// Generation in an Interval", 2019). It is not taken from `rand`, whose sequences may change
/// between versions: recorded runs must stay repeatable.
pub(crate) fn below(random: &mut ChaCha8Rng, bound: u64) -> u64 {
    if bound == 0 {
        return 0;
    }
    let biased = bound.wrapping_neg() % bound;
    loop {
        let product = u128::from(random.next_u64()) * u128::from(bound);
        if product as u64 >= biased {
            return (product >> 64) as u64;
        }
    }
}

/// A uniformly distributed number from 0 to 1, without 1.
pub(crate) fn unit(random: &mut ChaCha8Rng) -> f64 {
    /// A float holds 53 bits.
    const STEP: f64 = 1.0 / (1_u64 << 53) as f64;
    (random.next_u64() >> 11) as f64 * STEP
}

/// The order of the training samples in one epoch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EpochOrder {
    // 32 bits are enough, because no file is larger than `files::MAX_FILE`. They take half the
    // memory.
    permutation: Vec<u32>,
}

impl EpochOrder {
    /// A Fisher-Yates shuffle of `samples` indices that depends on the seed and the epoch.
    pub(crate) fn shuffled(samples: usize, seed: u64, epoch: u64) -> Self {
        let samples = u32::try_from(samples).expect("invariant: data of more samples is refused");
        let mut random = stream(seed, Purpose::Order, epoch);
        let mut permutation: Vec<u32> = (0..samples).collect();
        for last in (1..permutation.len()).rev() {
            let other = below(&mut random, last as u64 + 1) as usize;
            permutation.swap(last, other);
        }
        EpochOrder { permutation }
    }

    /// The global indices of one step's samples. A last incomplete batch is dropped.
    ///
    /// # Errors
    /// If the global batch is zero or too large, or the step is beyond the epoch.
    pub fn batch(&self, step: usize, global_batch: usize) -> Result<Vec<usize>, DataError> {
        let batches = steps_per_epoch(self.permutation.len(), global_batch)?;
        let indices = self.permutation.chunks_exact(global_batch).nth(step);
        let indices = indices.ok_or(DataError::BatchOutOfRange { batch: step, batches })?;
        Ok(indices.iter().map(|&index| index as usize).collect())
    }
}

/// The number of complete batches in an epoch of `samples`: at least one, or an error.
pub(crate) fn steps_per_epoch(samples: usize, global_batch: usize) -> Result<usize, DataError> {
    match samples.checked_div(global_batch) {
        None | Some(0) => Err(DataError::GlobalBatch { global_batch, samples }),
        Some(steps) => Ok(steps),
    }
}

/// The largest batch that an evaluation pads to. A larger global batch is a mistake.
const MAX_EVALUATION_BATCH: usize = 1 << 24;

/// One batch of the evaluation split, in the split's own order. The last one is filled up with
/// [`PADDING`].
pub(crate) fn evaluation_batch(samples: usize, batch: usize, global_batch: usize) -> Result<Vec<usize>, DataError> {
    if !(1..=MAX_EVALUATION_BATCH).contains(&global_batch) {
        return Err(DataError::GlobalBatch { global_batch, samples });
    }
    let batches = samples.div_ceil(global_batch);
    if batch >= batches {
        return Err(DataError::BatchOutOfRange { batch, batches });
    }
    let start = batch * global_batch;
    let padded = (start..samples).chain(std::iter::repeat(PADDING));
    Ok(padded.take(global_batch).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_epoch_visits_each_sample_at_most_once_in_complete_batches() {
        let order = EpochOrder::shuffled(103, 7, 0);
        let mut seen: Vec<usize> = (0..10).flat_map(|step| order.batch(step, 10).unwrap()).collect();
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen.len(), 100);
        assert!(seen.iter().all(|&index| index < 103));
        assert_eq!(order.batch(10, 10), Err(DataError::BatchOutOfRange { batch: 10, batches: 10 }));
    }

    #[test]
    fn the_order_depends_on_the_seed_and_the_epoch_alone() {
        let order = EpochOrder::shuffled(50, 7, 3);
        assert_eq!(order, EpochOrder::shuffled(50, 7, 3));
        assert_ne!(order, EpochOrder::shuffled(50, 7, 4));
        assert_ne!(order, EpochOrder::shuffled(50, 8, 3));
        let large = order.batch(0, 20).unwrap();
        let small = [order.batch(0, 10).unwrap(), order.batch(1, 10).unwrap()].concat();
        assert_eq!(large, small);
    }

    #[test]
    fn the_order_is_the_same_in_every_version() {
        assert_eq!(EpochOrder::shuffled(8, 1, 0).permutation, RECORDED_ORDER);
    }
    const RECORDED_ORDER: [u32; 8] = [4, 6, 0, 3, 7, 2, 5, 1];

    #[test]
    fn a_global_batch_of_zero_or_beyond_the_split_is_refused() {
        let order = EpochOrder::shuffled(5, 0, 0);
        assert_eq!(order.batch(0, 6), Err(DataError::GlobalBatch { global_batch: 6, samples: 5 }));
        assert_eq!(order.batch(0, 0), Err(DataError::GlobalBatch { global_batch: 0, samples: 5 }));
        assert!(EpochOrder::shuffled(0, 0, 0).batch(0, 1).is_err());
    }

    #[test]
    fn evaluation_visits_each_sample_once_and_pads_the_last_batch() {
        let batches: Vec<Vec<usize>> = (0..3).map(|batch| evaluation_batch(10, batch, 4).unwrap()).collect();
        assert_eq!(batches, [vec![0, 1, 2, 3], vec![4, 5, 6, 7], vec![8, 9, PADDING, PADDING]]);
        assert!(evaluation_batch(10, 3, 4).is_err());
        assert!(evaluation_batch(10, 0, 0).is_err());
        assert!(evaluation_batch(10, 0, usize::MAX).is_err());
    }

    #[test]
    fn bounded_numbers_reach_every_value_below_the_bound() {
        let mut random = stream(0, Purpose::Order, 0);
        let mut seen = [0; 5];
        for _ in 0..5000 {
            seen[below(&mut random, 5) as usize] += 1;
        }
        assert!(seen.iter().all(|&times| (900..1100).contains(&times)), "{seen:?}");
        assert_eq!(below(&mut random, 0), 0);
        assert_eq!(below(&mut random, 1), 0);
    }
}
