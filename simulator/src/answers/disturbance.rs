//! Differences between ranks with the same work: random jitter on every rank, and stragglers that
//! the user names.
//!
//! A rank's pace is a factor on all durations of its device in this step: 1.5 means 1.5 times as
//! long. This file must not know what the durations are.

use foretell_program::Rank;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, LogNormal};

/// Jitter and stragglers. Equal values always give the same paces.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Disturbance {
    /// The coefficient of variation of the paces, or 0 for no jitter. Paces are log-normal with
    /// mean 1, because slowdowns multiply.
    pub jitter: f64,
    /// The seed of the random paces.
    pub seed: u64,
    /// Slower ranks, each with the factor on its durations. If a rank is listed twice, its factors
    /// multiply.
    pub stragglers: Vec<(Rank, f64)>,
}

impl Disturbance {
    /// Whether all paces are 1.
    pub fn is_none(&self) -> bool {
        self.jitter == 0.0 && self.stragglers.is_empty()
    }

    /// Returns the pace of each rank, or an empty list if all are 1.
    pub(crate) fn paces(&self, ranks: usize) -> Vec<f64> {
        if self.is_none() {
            return Vec::new();
        }
        let mut paces = self.draws(ranks as u64);
        for &(rank, times) in &self.stragglers {
            if let Some(pace) = paces.get_mut(rank.0) {
                *pace *= times;
            }
        }
        paces
    }

    /// Draws the paces. Each rank has its own random stream, so its pace depends only on the seed
    /// and the rank.
    fn draws(&self, ranks: u64) -> Vec<f64> {
        // An invalid coefficient of variation (negative or not finite) means no jitter.
        let Ok(paces) = LogNormal::from_mean_cv(1.0, self.jitter) else { return vec![1.0; ranks as usize] };
        let draw = |rank| {
            let mut random = ChaCha8Rng::seed_from_u64(self.seed);
            random.set_stream(rank);
            paces.sample(&mut random)
        };
        (0..ranks).map(draw).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paces_have_mean_one_and_the_given_spread() {
        for jitter in [0.02, 0.3] {
            let paces = Disturbance { jitter, seed: 7, stragglers: Vec::new() }.paces(100_000);
            let mean = paces.iter().sum::<f64>() / paces.len() as f64;
            let variance = paces.iter().map(|pace| (pace - mean).powi(2)).sum::<f64>() / paces.len() as f64;
            assert!((mean - 1.0).abs() < 0.01 * jitter.max(0.1), "{mean}");
            assert!((variance.sqrt() / jitter - 1.0).abs() < 0.02, "{}", variance.sqrt());
        }
    }

    #[test]
    fn paces_depend_only_on_seed_and_rank() {
        let paces = |seed, ranks| Disturbance { jitter: 0.1, seed, stragglers: Vec::new() }.paces(ranks);
        assert_eq!(paces(1, 10), paces(1, 20)[..10]);
        assert_ne!(paces(1, 10), paces(2, 10));
        assert!(Disturbance::default().paces(10).is_empty());
    }

    #[test]
    fn a_straggler_has_exactly_its_given_factor() {
        let disturbance = Disturbance { stragglers: vec![(Rank(2), 1.5), (Rank(9), 2.0)], ..Disturbance::default() };
        assert_eq!(disturbance.paces(4), [1.0, 1.0, 1.5, 1.0]);
    }
}
