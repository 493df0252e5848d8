//! A log-normal distribution of lengths, truncated at a largest length.
//!
//! Its spread follows from the 95th percentile. Its median follows from the mean, which truncation
//! lowers.

use foretell_program::Rollout;
use statrs::distribution::{ContinuousCDF, Normal};

/// The ratio of the 95th percentile to the mean, if nothing states it. An assumption.
const USUAL_P95: f64 = 2.0;

/// The 95th percentile of the standard normal distribution.
const P95: f64 = 1.644_853_6;

/// Number of parts of equal probability with which means are computed.
const PARTS: usize = 1000;

/// A distribution of lengths, in tokens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Lengths {
    /// Logarithm of the median, before truncation.
    median: f64,
    spread: f64,
    most: f64,
}

impl Lengths {
    /// The lengths of a rollout's responses.
    pub fn of(rollout: &Rollout) -> Self {
        Self::new(rollout.response, rollout.response_p95, rollout.response_max)
    }

    /// Lengths with this mean and 95th percentile, none above `most`.
    pub fn new(mean: usize, p95: Option<usize>, most: usize) -> Self {
        let (mean, most) = (mean as f64, most as f64);
        let p95 = p95.map_or((USUAL_P95 * mean).min(most), |p95| p95 as f64);
        // ln(p95 / mean) = P95 x spread - spread^2 / 2, whose largest value is P95^2 / 2.
        let ratio = (p95 / mean).ln().clamp(0.0, P95 * P95 / 2.0);
        let spread = P95 - (P95 * P95 - 2.0 * ratio).max(0.0).sqrt();
        let [mut low, mut high] = [mean.ln() - 4.0, most.ln() + 4.0];
        for _ in 0..60 {
            let median = (low + high) / 2.0;
            if (Self { median, spread, most }).mean() < mean { low = median } else { high = median }
        }
        Self { median: (low + high) / 2.0, spread, most }
    }

    /// The quantile of the lengths at `share`.
    pub fn quantile(&self, share: f64) -> f64 {
        let normal = Normal::standard().inverse_cdf(share.clamp(1e-9, 1.0 - 1e-9));
        (self.median + self.spread * normal).exp().clamp(1.0, self.most)
    }

    /// The mean length.
    pub fn mean(&self) -> f64 {
        let part = |index: usize| self.quantile((index as f64 + 0.5) / PARTS as f64);
        (0..PARTS).map(part).sum::<f64>() / PARTS as f64
    }

    /// Let each sequence be a prompt of `prompt` tokens and a response. Returns the mean over
    /// tokens of the length of the token's sequence.
    pub fn mean_of_tokens(&self, prompt: f64) -> f64 {
        let part = |index: usize| prompt + self.quantile((index as f64 + 0.5) / PARTS as f64);
        let squares: f64 = (0..PARTS).map(part).map(|length| length * length).sum();
        squares / (0..PARTS).map(part).sum::<f64>()
    }

    /// The mean of the longest of `count` responses.
    pub fn mean_longest_of(&self, count: usize) -> f64 {
        let power = 1.0 / count.max(1) as f64;
        let part = |index: usize| self.quantile(((index as f64 + 0.5) / PARTS as f64).powf(power));
        (0..PARTS).map(part).sum::<f64>() / PARTS as f64
    }

    /// The median of the longest of `count` responses.
    pub fn longest_of(&self, count: usize) -> f64 {
        self.quantile(0.5f64.powf(1.0 / count.max(1) as f64))
    }

    /// The lengths of the `count` responses of one engine: the one that has the longest of all
    /// `total` responses. They are shuffled deterministically.
    pub fn of_engine(&self, count: usize, total: usize) -> Vec<f64> {
        let mut lengths: Vec<f64> = (0..count).map(|index| self.quantile((index as f64 + 0.5) / count as f64)).collect();
        if let Some(last) = lengths.last_mut() {
            *last = self.longest_of(total);
        }
        // Multiples of the golden ratio, modulo 1, are spread evenly (Kronecker's sequence).
        let mut order: Vec<(f64, f64)> =
            lengths.iter().enumerate().map(|(index, &length)| ((index as f64 * 0.618_033_988_75).fract(), length)).collect();
        order.sort_by(|left, right| left.0.total_cmp(&right.0));
        order.into_iter().map(|(_, length)| length).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lengths(response: usize, p95: Option<usize>, most: usize) -> Lengths {
        Lengths::of(&Rollout { response_p95: p95, ..Rollout::new([64, 8], [512, response, most]) })
    }

    #[test]
    fn lengths_have_the_stated_mean_and_percentile() {
        for (response, p95, most) in [(1024, Some(2048), 16_384), (1024, None, 8192), (5_570, None, 8192), (900, Some(950), 1000)]
        {
            let lengths = lengths(response, p95, most);
            let mean = lengths.mean() / response as f64;
            assert!((0.999..1.001).contains(&mean), "{response}: {mean}");
            if let Some(p95) = p95 {
                let found = lengths.quantile(0.95) / p95 as f64;
                assert!((0.98..1.02).contains(&found), "{p95}: {found}");
            }
            assert!(lengths.longest_of(4096) <= most as f64);
        }
    }

    #[test]
    fn the_longest_of_several_is_longer_than_the_mean() {
        let lengths = lengths(1024, None, 8192);
        assert!((lengths.mean_longest_of(1) - lengths.mean()).abs() < 1e-6);
        assert!(lengths.mean_longest_of(8) > 1.5 * lengths.mean());
        assert!(lengths.mean_of_tokens(0.0) > 1.1 * lengths.mean());
    }

    #[test]
    fn responses_of_one_length_are_of_that_length() {
        let lengths = lengths(256, None, 256);
        assert!([0.01, 0.5, 0.99].into_iter().all(|share| (lengths.quantile(share) - 256.0).abs() < 1.0));
    }

    #[test]
    fn one_engine_has_the_longest_of_all() {
        let of_engine = lengths(1024, None, 32_768).of_engine(64, 4096);
        let longest = of_engine.iter().copied().fold(0.0, f64::max);
        assert_eq!(longest, lengths(1024, None, 32_768).longest_of(4096));
    }
}
