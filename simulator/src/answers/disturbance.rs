//! Disturbances make equal ranks differ: jitter is drawn for every rank, stragglers are named.
//!
//! A rank's pace is a factor on the predicted time of everything that its device does in a step.

use foretell_program::Rank;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, LogNormal};

/// Jitter and stragglers. Equal disturbances give equal paces, whatever else is simulated.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Disturbance {
    /// The coefficient of variation of the ranks' paces. They are log-normal with mean 1, since the
    /// causes of slowness multiply. 0 for none.
    pub jitter: f64,
    /// The seed of the random paces.
    pub seed: u64,
    /// Slow ranks, each with a factor on its pace. The factors of a rank that is named twice
    /// multiply.
    pub stragglers: Vec<(Rank, f64)>,
}

impl Disturbance {
    /// Returns `true` if no rank is disturbed.
    pub fn is_none(&self) -> bool {
        self.jitter == 0.0 && self.stragglers.is_empty()
    }

    /// Each rank's pace; an empty list if nothing is disturbed.
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

    /// Draws of mean 1, one per rank. Each rank has its own random stream, so its draw depends only
    /// on the seed and the rank.
    fn draws(&self, ranks: u64) -> Vec<f64> {
        // An invalid jitter (negative or not a number) has no distribution and disturbs nothing.
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
    fn paces_have_the_mean_and_spread_that_were_asked_for() {
        for jitter in [0.02, 0.3] {
            let paces = Disturbance { jitter, seed: 7, stragglers: Vec::new() }.paces(100_000);
            let mean = paces.iter().sum::<f64>() / paces.len() as f64;
            let variance = paces.iter().map(|pace| (pace - mean).powi(2)).sum::<f64>() / paces.len() as f64;
            assert!((mean - 1.0).abs() < 0.01 * jitter.max(0.1), "{mean}");
            assert!((variance.sqrt() / jitter - 1.0).abs() < 0.02, "{}", variance.sqrt());
        }
    }

    #[test]
    fn paces_follow_from_the_seed_and_the_rank() {
        let of = |seed, ranks| Disturbance { jitter: 0.1, seed, stragglers: Vec::new() }.paces(ranks);
        assert_eq!(of(1, 10), of(1, 20)[..10]);
        assert_ne!(of(1, 10), of(2, 10));
        assert!(Disturbance::default().paces(10).is_empty());
    }

    #[test]
    fn a_straggler_is_as_slow_as_it_is_said_to_be() {
        let disturbance = Disturbance { stragglers: vec![(Rank(2), 1.5), (Rank(9), 2.0)], ..Disturbance::default() };
        assert_eq!(disturbance.paces(4), [1.0, 1.0, 1.5, 1.0]);
    }
}
