//! Steps over samples of different lengths: padded, sorted by length, or packed.
//!
//! The steps of a data set are sampled at random, since there is no closed form for the longest of
//! a few samples, or for how the ranks of a step wait for each other. Equal seeds give equal steps.

use crate::lengths::Lengths;
use foretell_units::Seconds;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::collections::BTreeMap;

/// Number of samples, at equidistant quantiles, that stand for a distribution.
const QUANTILES: usize = 4096;

/// Largest number of steps, and of samples of all steps together, that are drawn.
const MOST_STEPS: usize = 400;
const MOST_SAMPLES: usize = 1 << 21;

/// Number of batches in a block of samples that is sorted by length: `mega_batch_mult` of
/// transformers' `LengthGroupedSampler`.
const BATCHES_SORTED_TOGETHER: usize = 50;

/// The lengths of a data set's samples, in tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SampleLengths {
    /// In ascending order. Not empty, and none is zero.
    sorted: Vec<usize>,
    /// The largest length that a sample can have: the longest, unless a distribution allows more.
    most: usize,
}

/// Which samples share a micro-batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SampleOrder {
    /// Any samples.
    Shuffled,
    /// Samples of similar length (`group_by_length` of transformers).
    ByLength,
}

/// The micro-batches of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchShape {
    /// Rows of a micro-batch.
    pub rows: usize,
    /// Micro-batches of a rank in a step.
    pub micro_batches: usize,
    /// Number of ranks that have different samples.
    pub ranks: usize,
    /// When ranks wait for each other.
    pub waits_for: WaitsFor,
}

/// When the ranks of a step wait for each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WaitsFor {
    /// In every micro-batch, because parameters are gathered there.
    EveryMicroBatch,
    /// Once per step, when gradients are reduced.
    EveryStep,
}

/// Statistics of the steps over a data set.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LengthCourse {
    /// The mean step time.
    pub mean: Seconds,
    /// The 10th percentile of the step time.
    pub p10: Seconds,
    /// The 90th percentile of the step time.
    pub p90: Seconds,
    /// Mean number of samples in a step.
    pub samples: f64,
    /// Mean number of tokens in a step's samples, without padding.
    pub tokens: f64,
    /// Share of the positions that hold no token.
    pub padding: f64,
}

impl LengthCourse {
    /// Tokens of samples per second, without padding.
    pub fn tokens_per_second(&self) -> f64 {
        self.tokens / self.mean.value()
    }
}

impl SampleLengths {
    /// Measured lengths, in any order. `None` if there are none, or one is zero.
    pub fn measured(mut lengths: Vec<usize>) -> Option<Self> {
        lengths.sort_unstable();
        let (shortest, most) = (*lengths.first()?, *lengths.last()?);
        (shortest > 0).then_some(Self { sorted: lengths, most })
    }

    /// The number of samples. For a distribution, the number of its quantiles.
    pub fn count(&self) -> usize {
        self.sorted.len()
    }

    /// Lengths of a log-normal distribution, none above `most`.
    pub fn log_normal(mean: usize, p95: usize, most: usize) -> Self {
        let lengths = Lengths::new(mean, Some(p95), most);
        let quantile = |index: usize| lengths.quantile((index as f64 + 0.5) / QUANTILES as f64).round().max(1.0) as usize;
        Self { sorted: (0..QUANTILES).map(quantile).collect(), most }
    }

    /// The lengths after samples are truncated to `positions`, which must be at least 1.
    pub fn cut_at(&self, positions: usize) -> Self {
        let cut = |length: &usize| (*length).min(positions);
        Self { sorted: self.sorted.iter().map(cut).collect(), most: self.most.min(positions) }
    }

    /// Share of the samples that are longer than `positions`.
    pub fn share_above(&self, positions: usize) -> f64 {
        let longer = self.sorted.len() - self.sorted.partition_point(|length| *length <= positions);
        longer as f64 / self.sorted.len() as f64
    }

    /// The mean length.
    pub fn mean(&self) -> f64 {
        self.tokens() / self.sorted.len() as f64
    }

    /// The quantile of the lengths at `share`.
    pub fn quantile(&self, share: f64) -> usize {
        let last = self.sorted.len() - 1;
        self.sorted[((share.clamp(0.0, 1.0) * last as f64).round() as usize).min(last)]
    }

    /// The shortest length.
    pub fn shortest(&self) -> usize {
        self.sorted[0]
    }

    /// The largest length that a sample can have. It determines the memory of padded batches.
    pub fn longest(&self) -> usize {
        self.most
    }

    /// The mean over tokens of the length of the token's sample. If all samples had this length,
    /// the same number of tokens would have the same number of attention scores within samples.
    pub fn mean_of_tokens(&self) -> f64 {
        self.sorted.iter().map(|length| (*length as f64).powi(2)).sum::<f64>() / self.tokens()
    }

    fn tokens(&self) -> f64 {
        self.sorted.iter().map(|length| *length as f64).sum()
    }

    /// Share of the positions that tokens fill, if samples are packed into as few rows of
    /// `positions` as possible: best fit, the longest first, as TRL packs (`bfd`).
    pub fn packed_share(&self, positions: usize) -> f64 {
        // Number of rows by their free positions.
        let mut open: BTreeMap<usize, usize> = BTreeMap::new();
        let mut rows = 0usize;
        for length in self.cut_at(positions).sorted.into_iter().rev() {
            let left = open.range(length..).next().map(|(left, _)| *left);
            let left = match left {
                Some(left) => {
                    if let Some(count) = open.get_mut(&left) {
                        *count -= 1;
                        if *count == 0 {
                            open.remove(&left);
                        }
                    }
                    left
                }
                None => {
                    rows += 1;
                    positions
                }
            };
            *open.entry(left - length).or_default() += 1;
        }
        self.cut_at(positions).tokens() / (rows.max(1) as f64 * positions as f64)
    }

    /// Statistics of steps over padded samples. `step` returns how long a step takes if all its
    /// rows have that many positions. Each micro-batch takes an equal part of that time.
    pub fn padded_course(&self, shape: BatchShape, order: SampleOrder, step: &dyn Fn(f64) -> Seconds, seed: u64) -> LengthCourse {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let rows = shape.rows.max(1);
        let of_step = rows * shape.ranks.max(1) * shape.micro_batches.max(1);
        let steps = (MOST_SAMPLES / of_step).clamp(1, MOST_STEPS);
        // A block is sorted as a whole, even if it spans several steps.
        let block = match order {
            SampleOrder::Shuffled => rows,
            SampleOrder::ByLength => BATCHES_SORTED_TOGETHER * rows * shape.micro_batches.max(1),
        };
        let mut drawn: Vec<usize> = Vec::new();
        let mut micro_batch = |random: &mut ChaCha8Rng| -> (usize, usize) {
            if drawn.len() < rows {
                drawn = (0..block).map(|_| self.sorted[random.random_range(0..self.sorted.len())]).collect();
                // Batches are taken from the end, so the longest come first.
                drawn.sort_unstable();
            }
            let taken = drawn.split_off(drawn.len() - rows);
            (taken.iter().copied().max().unwrap_or(1), taken.iter().sum())
        };
        let (mut times, mut tokens, mut positions) = (Vec::with_capacity(steps), 0usize, 0usize);
        for _ in 0..steps {
            let mut of_ranks = vec![0.0; shape.ranks.max(1)];
            let mut together = 0.0;
            for _ in 0..shape.micro_batches.max(1) {
                let mut slowest: f64 = 0.0;
                for of_rank in &mut of_ranks {
                    let (longest, sum) = micro_batch(&mut random);
                    let time = step(longest as f64).value() / shape.micro_batches.max(1) as f64;
                    (tokens, positions) = (tokens + sum, positions + longest * rows);
                    *of_rank += time;
                    slowest = slowest.max(time);
                }
                together += slowest;
            }
            times.push(match shape.waits_for {
                WaitsFor::EveryMicroBatch => together,
                WaitsFor::EveryStep => of_ranks.into_iter().fold(0.0, f64::max),
            });
        }
        times.sort_by(f64::total_cmp);
        let at = |share: f64| Seconds::new(times[(share * (steps - 1) as f64).round() as usize]);
        LengthCourse {
            mean: Seconds::new(times.iter().sum::<f64>() / steps as f64),
            p10: at(0.1),
            p90: at(0.9),
            samples: of_step as f64,
            tokens: tokens as f64 / steps as f64,
            padding: 1.0 - tokens as f64 / positions as f64,
        }
    }

    /// Statistics of steps over packed rows of `positions`, each of which takes `step`.
    pub fn packed_course(&self, shape: BatchShape, positions: usize, step: Seconds) -> LengthCourse {
        let filled = self.packed_share(positions);
        let rows = (shape.rows * shape.ranks * shape.micro_batches) as f64;
        let tokens = rows * positions as f64 * filled;
        let samples = tokens / self.cut_at(positions).mean();
        LengthCourse { mean: step, p10: step, p90: step, samples, tokens, padding: 1.0 - filled }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: BatchShape = BatchShape { rows: 4, micro_batches: 8, ranks: 8, waits_for: WaitsFor::EveryMicroBatch };

    fn proportional(positions: f64) -> Seconds {
        Seconds::new(positions * 1e-3)
    }

    #[test]
    fn samples_of_one_length_have_no_padding_and_equal_steps() {
        let lengths = SampleLengths::measured(vec![512; 7]).expect("they are lengths");
        for order in [SampleOrder::Shuffled, SampleOrder::ByLength] {
            let course = lengths.padded_course(SHAPE, order, &proportional, 0);
            let times = [course.mean, course.p10, course.p90].map(|time| time.value());
            assert!(times.iter().all(|time| (time - 0.512).abs() < 1e-9), "{times:?}");
            assert_eq!((course.padding, course.tokens), (0.0, 512.0 * 256.0));
        }
        assert_eq!(lengths.packed_share(1024), 1024.0 * 3.0 / (1024.0 * 4.0) + 512.0 / (1024.0 * 4.0));
    }

    #[test]
    fn padding_is_that_of_the_longest_of_a_micro_batch() {
        // Of two equally likely lengths the longest of 4 is the longer one in 15 of 16 batches.
        let lengths = SampleLengths::measured(vec![100, 900]).expect("they are lengths");
        let alone = BatchShape { ranks: 1, micro_batches: 1, ..SHAPE };
        let course = lengths.padded_course(alone, SampleOrder::Shuffled, &proportional, 1);
        assert!((course.mean.value() - (900.0 * 15.0 + 100.0) / 16.0 * 1e-3).abs() < 0.02, "{:?}", course.mean);
        assert!((course.padding - (1.0 - 500.0 / 850.0)).abs() < 0.02, "{}", course.padding);
    }

    #[test]
    fn sorted_batches_have_little_padding_and_packed_ones_less() {
        let lengths = SampleLengths::log_normal(512, 1536, 4096);
        assert!((lengths.mean() - 512.0).abs() < 5.0 && lengths.longest() == 4096);
        let padding = |order| lengths.padded_course(SHAPE, order, &proportional, 0).padding;
        let (padded, grouped, packed) =
            (padding(SampleOrder::Shuffled), padding(SampleOrder::ByLength), 1.0 - lengths.packed_share(4096));
        assert!(padded > 0.4 && grouped < 0.1 && packed < 0.01, "{padded} {grouped} {packed}");
    }

    #[test]
    fn ranks_wait_longer_in_every_micro_batch_than_once() {
        let lengths = SampleLengths::log_normal(512, 1536, 4096);
        let mean =
            |waits_for| lengths.padded_course(BatchShape { waits_for, ..SHAPE }, SampleOrder::Shuffled, &proportional, 0).mean;
        let alone = lengths.padded_course(BatchShape { ranks: 1, ..SHAPE }, SampleOrder::Shuffled, &proportional, 0).mean;
        let (often, once) = (mean(WaitsFor::EveryMicroBatch), mean(WaitsFor::EveryStep));
        assert!(often > once * 1.2 && once > alone, "{often} {once} {alone}");
    }

    #[test]
    fn packing_fills_rows_as_well_as_they_can_be() {
        let lengths = |lengths: &[usize]| SampleLengths::measured(lengths.to_vec()).expect("they are lengths");
        assert_eq!(lengths(&[6, 5, 4, 3, 2]).packed_share(10), 1.0);
        assert_eq!(lengths(&[7, 7, 7]).packed_share(10), 0.7);
        // What is longer than a row is cut.
        assert_eq!(lengths(&[30]).packed_share(10), 1.0);
    }

    #[test]
    fn what_cannot_be_a_length_is_refused() {
        assert_eq!((SampleLengths::measured(vec![]), SampleLengths::measured(vec![0, 4])), (None, None));
    }
}
