//! What makes ranks that should be alike different: jitter, drawn for each rank, and stragglers, which are named.
//!
//! A rank's pace is how many times as long as foretold its device takes for everything in this step. It must not know what that is.

use foretell_program::Rank;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, LogNormal};

/// How ranks differ from their costs. The same one gives the same paces, whatever else is simulated.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Disturbance {
    /// The coefficient of variation of the ranks' paces, which are log-normal with mean 1: what slows a device multiplies. 0 for none.
    pub jitter: f64,
    /// Which draw of them.
    pub seed: u64,
    /// Ranks that are slower, and how many times; those that are named twice are slower by both.
    pub stragglers: Vec<(Rank, f64)>,
}

impl Disturbance {
    /// Whether there is none.
    pub fn is_none(&self) -> bool {
        self.jitter == 0.0 && self.stragglers.is_empty()
    }

    /// Each rank's pace; nothing where all are 1.
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

    /// Draws of mean 1, each from a stream of its own: a rank's follows from the seed and the rank alone.
    fn draws(&self, ranks: u64) -> Vec<f64> {
        // A coefficient of variation that is no number of at least 0 is of no distribution, and disturbs nothing.
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
