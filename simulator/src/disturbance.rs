//! What makes ranks that should be alike different: jitter, drawn for each rank, and stragglers, which are named.
//!
//! A rank's pace is how many times as long as foretold its device takes for everything in this step. It must not know what that is.

use foretell_program::Rank;

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
        let mut paces: Vec<f64> = (0..ranks as u64).map(|rank| self.draw(rank)).collect();
        for &(rank, times) in &self.stragglers {
            if let Some(pace) = paces.get_mut(rank.0) {
                *pace *= times;
            }
        }
        paces
    }

    /// A log-normal draw of mean 1. It follows from the seed and the rank alone.
    fn draw(&self, rank: u64) -> f64 {
        let variance = (self.jitter * self.jitter).ln_1p();
        let uniform = |nth: u64| {
            let bits = mix(mix(self.seed).wrapping_add(2 * rank + nth)) >> 11;
            (bits as f64 + 0.5) / (1u64 << 53) as f64
        };
        // Box and Muller (1958).
        let normal = (-2.0 * uniform(0).ln()).sqrt() * (std::f64::consts::TAU * uniform(1)).cos();
        (normal * variance.sqrt() - variance / 2.0).exp()
    }
}

/// A number of which every bit depends on every bit of another (SplitMix64; Steele, Lea and Flood 2014).
fn mix(number: u64) -> u64 {
    let mut mixed = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
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
