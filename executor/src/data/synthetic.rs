//! Synthetic data of any shape, from which a model can learn something.
//!
//! An image or feature vector is a pattern of its class plus noise. Tokens are a walk through a
//! small Markov chain. A sample depends on the seed, the split and its index alone, and is computed
//! on request. So memory does not grow with the number of classes or samples. This module knows no
//! batches.

use super::order::{Purpose, below, stream};
use super::{SampleShape, Split};
use rand_chacha::rand_core::Rng;

/// Training samples in an epoch: enough for the global batch of a large layout.
const TRAINING_SAMPLES: usize = 65_536;
/// Evaluation samples. Few, because large models are evaluated on CPUs too.
const EVALUATION_SAMPLES: usize = 1_024;
/// Cells per side of an image's pattern; a feature vector's pattern has the square of this number.
/// Each cell covers several pixels, so that the noise averages out, even under strided
/// convolutions.
const CELLS: usize = 8;
/// The weights of pattern and noise in a value. 0.6² + 0.8² = 1, so the variance is one.
const PATTERN: f32 = 0.6;
const NOISE: f32 = 0.8;
/// States of the Markov chain. Few, so that the loss falls early even with a large vocabulary.
const STATES: usize = 64;
/// Possible successors of a state. Their probabilities are 1/2, 1/4, 1/8 and 1/8: an entropy of
/// 1.75 bits.
const SUCCESSORS: usize = 4;

/// Seeded random data of a given shape.
#[derive(Debug)]
pub(crate) struct Synthetic {
    seed: u64,
    shape: SampleShape,
    /// The successors of each state of the Markov chain; empty unless samples are tokens.
    successors: Vec<[u32; SUCCESSORS]>,
}

impl Synthetic {
    /// Data of a shape whose sizes have been checked.
    pub(crate) fn new(shape: SampleShape, seed: u64) -> Self {
        let states = shape.tokens().map_or(0, |(_, vocabulary)| vocabulary.min(STATES));
        let mut random = stream(seed, Purpose::MarkovChain, 0);
        let mut next = || below(&mut random, states as u64) as u32;
        let successors = (0..states).map(|_| std::array::from_fn(|_| next())).collect();
        Synthetic { seed, shape, successors }
    }

    /// The number of samples of a split.
    pub(crate) fn len(&self, split: Split) -> usize {
        match split {
            Split::Training => TRAINING_SAMPLES,
            Split::Evaluation => EVALUATION_SAMPLES,
        }
    }

    /// The class of a sample.
    pub(crate) fn label(&self, split: Split, index: usize) -> usize {
        let classes = match self.shape {
            SampleShape::Image { classes, .. } | SampleShape::Features { classes, .. } => classes,
            SampleShape::Tokens { .. } | SampleShape::MaskedTokens { .. } | SampleShape::Pair { .. } => {
                unreachable!("invariant: sequences have no class")
            }
        };
        below(&mut self.sample_stream(split, index), classes as u64) as usize
    }

    /// Fills one image or feature vector.
    pub(crate) fn fill(&self, split: Split, index: usize, out: &mut [f32]) {
        // Features are an image with one row.
        let (channels, height, width) = match self.shape {
            SampleShape::Image { channels, height, width, .. } => (channels, height, width),
            SampleShape::Features { width, .. } => (1, 1, width),
            SampleShape::Tokens { .. } | SampleShape::MaskedTokens { .. } | SampleShape::Pair { .. } => {
                unreachable!("invariant: sequences are no images")
            }
        };
        let label = self.label(split, index);
        let mut class = stream(self.seed, Purpose::ClassPattern, label as u64);
        let rows = height.min(CELLS);
        let columns = if height == 1 { width.min(CELLS * CELLS) } else { width.min(CELLS) };
        let pattern: Vec<f32> = (0..rows * columns * channels).map(|_| unit_variance(class.next_u32())).collect();
        let mut noise = self.sample_stream(split, index);
        noise.next_u64();
        for (y, row) in out.chunks_exact_mut(width * channels).enumerate() {
            let cells = pattern.chunks_exact(columns * channels).nth(y * rows / height);
            let cells = cells.expect("invariant: each row has cells");
            for (x, values) in row.chunks_exact_mut(channels).enumerate() {
                let cell = cells.chunks_exact(channels).nth(x * columns / width).expect("invariant: each pixel has a cell");
                for (value, part) in values.iter_mut().zip(cell) {
                    *value = PATTERN * part + NOISE * unit_variance(noise.next_u32());
                }
            }
        }
    }

    /// Fills the inputs and the labels of one sample: a walk through the Markov chain.
    pub(crate) fn fill_tokens(&self, split: Split, index: usize, inputs: &mut [i32], labels: &mut [i32]) {
        let mut random = self.sample_stream(split, index);
        let mut state = below(&mut random, self.successors.len() as u64) as u32;
        for (input, label) in inputs.iter_mut().zip(labels) {
            *input = state as i32;
            let choice = (random.next_u32().leading_ones() as usize).min(SUCCESSORS - 1);
            state = self.successors[state as usize][choice];
            *label = state as i32;
        }
    }

    /// Fills a pair whose target is the source reversed: a random `source`, the target as `labels`,
    /// and a zero followed by the target as `tokens`. A target longer than the source repeats it.
    /// Tokens beyond the target's vocabulary wrap around.
    pub(crate) fn fill_pair(&self, split: Split, index: usize, source: &mut [i32], tokens: &mut [i32], labels: &mut [i32]) {
        let SampleShape::Pair { source_vocabulary, target_vocabulary, .. } = self.shape else { return };
        let mut random = self.sample_stream(split, index);
        source.iter_mut().for_each(|token| *token = below(&mut random, source_vocabulary.min(STATES) as u64) as i32);
        labels.iter_mut().zip(source.iter().rev().cycle()).for_each(|(label, &token)| *label = token % target_vocabulary as i32);
        let shifted = std::iter::once(&0).chain(labels.iter());
        tokens.iter_mut().zip(shifted).for_each(|(token, &label)| *token = label);
    }

    fn sample_stream(&self, split: Split, index: usize) -> rand_chacha::ChaCha8Rng {
        let purpose = match split {
            Split::Training => Purpose::TrainingSample,
            Split::Evaluation => Purpose::EvaluationSample,
        };
        stream(self.seed, purpose, index as u64)
    }
}

/// A uniformly distributed number of mean zero and variance one, from 32 random bits.
fn unit_variance(bits: u32) -> f32 {
    /// The square root of 3: a uniform distribution from -√3 to √3 has variance one.
    const HALF_WIDTH: f32 = 1.732_050_8;
    // A single-precision number holds the upper 24 bits exactly.
    ((bits >> 8) as f32 / 8_388_608.0 - 1.0) * HALF_WIDTH
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image(side: usize) -> SampleShape {
        SampleShape::Image { channels: 3, height: side, width: side, classes: 4 }
    }

    fn sample(data: &Synthetic, split: Split, index: usize, size: usize) -> Vec<f32> {
        let mut out = vec![0.0; size];
        data.fill(split, index, &mut out);
        out
    }

    #[test]
    fn a_sample_depends_on_the_seed_the_split_and_the_index_alone() {
        let data = Synthetic::new(image(16), 5);
        let first = sample(&data, Split::Training, 9, 768);
        assert_eq!(first, sample(&Synthetic::new(image(16), 5), Split::Training, 9, 768));
        assert_ne!(first, sample(&data, Split::Training, 10, 768));
        assert_ne!(first, sample(&data, Split::Evaluation, 9, 768));
        assert_ne!(first, sample(&Synthetic::new(image(16), 6), Split::Training, 9, 768));
    }

    #[test]
    fn values_have_mean_zero_and_variance_one() {
        let data = Synthetic::new(image(16), 5);
        let values: Vec<f32> = (0..200).flat_map(|index| sample(&data, Split::Training, index, 768)).collect();
        let mean = values.iter().sum::<f32>() / values.len() as f32;
        let variance = values.iter().map(|value| (value - mean).powi(2)).sum::<f32>() / values.len() as f32;
        assert!(mean.abs() < 0.1 && (variance - 1.0).abs() < 0.1, "{mean} {variance}");
    }

    #[test]
    fn class_means_of_training_samples_classify_evaluation_samples() {
        for (shape, size) in [(image(16), 768), (image(5), 75), (SampleShape::Features { width: 100, classes: 4 }, 100)] {
            let data = Synthetic::new(shape, 1);
            let mut means = vec![vec![0.0; size]; 4];
            for index in 0..400 {
                let values = sample(&data, Split::Training, index, size);
                means[data.label(Split::Training, index)].iter_mut().zip(values).for_each(|(mean, value)| *mean += value);
            }
            let right = (0..100).filter(|&index| {
                let values = sample(&data, Split::Evaluation, index, size);
                let score = |class: &usize| means[*class].iter().zip(&values).map(|(a, b)| a * b).sum::<f32>();
                let best = (0..4).max_by(|a, b| score(a).total_cmp(&score(b))).unwrap();
                best == data.label(Split::Evaluation, index)
            });
            assert!(right.count() > 90);
        }
    }

    #[test]
    fn a_pair_is_a_sequence_and_its_reverse() {
        let shape = |target| SampleShape::Pair { source: 4, target, source_vocabulary: 50, target_vocabulary: 20 };
        let data = Synthetic::new(shape(6), 3);
        let (mut source, mut tokens, mut labels) = ([0; 4], [0; 6], [0; 6]);
        data.fill_pair(Split::Training, 5, &mut source, &mut tokens, &mut labels);
        assert_eq!(labels, [3, 2, 1, 0, 3, 2].map(|place: usize| source[place] % 20));
        assert_eq!((tokens[0], &tokens[1..]), (0, &labels[..5]));
        let mut other = [0; 4];
        data.fill_pair(Split::Evaluation, 5, &mut other, &mut tokens, &mut labels);
        assert_ne!(source, other);
    }

    #[test]
    fn every_token_has_at_most_four_successors() {
        let data = Synthetic::new(SampleShape::Tokens { sequence: 256, vocabulary: 50_257 }, 3);
        let mut followers = std::collections::BTreeMap::<i32, std::collections::BTreeMap<i32, u32>>::new();
        let (mut inputs, mut labels) = ([0; 256], [0; 256]);
        for index in 0..50 {
            data.fill_tokens(Split::Training, index, &mut inputs, &mut labels);
            assert_eq!(inputs[1..], labels[..255]);
            inputs
                .iter()
                .zip(labels)
                .for_each(|(input, label)| *followers.entry(*input).or_default().entry(label).or_default() += 1);
        }
        assert!(followers.len() > STATES / 2);
        assert!(followers.iter().all(|(token, after)| *token < STATES as i32 && after.len() <= SUCCESSORS));
    }
}
