//! Skewed routing: how many tokens the fullest rank of experts receives.
//!
//! Sending tokens to experts, their products, and sending the results back are synchronous in a
//! group of ranks. So the fullest rank determines how long a layer takes for all of them. Let each
//! rank have `e` of the `E` experts, and let the loads of a layer sum to 1. Then the fullest rank
//! receives `(E / e) x (the largest sum of loads of a rank's e experts)` times the mean of all
//! ranks. With all experts on each rank that ratio is 1.

use foretell_models::Model;
use foretell_program::Routing;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::f64::consts::PI;
use std::sync::Arc;

/// How many tokens the fullest rank of experts receives, where none is dropped.
#[derive(Clone, Debug, PartialEq)]
pub struct RoutingSkew {
    /// Number of experts in a mixture.
    experts: usize,
    /// For each possible number of experts per rank, in ascending order: the fullest rank.
    fullest: Arc<[(usize, Fullest)]>,
}

/// The load of the fullest rank of experts.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Fullest {
    /// Its tokens over the mean of all ranks, averaged over layers.
    tokens: f64,
    /// Its rows over its slots, averaged over layers. At least 1 in each layer, since empty slots
    /// count, too.
    rows: f64,
    /// Its rows over its slots in the measured layer where this ratio is largest. For a
    /// distribution, the average over layers.
    most_rows: f64,
}

impl RoutingSkew {
    /// Returns the skew of a model's routing. `None` if the model has no experts, if its routing is
    /// balanced, or if a measured layer does not have one load per expert.
    pub fn of(routing: &Routing, model: &Model) -> Option<Self> {
        let decoder = model.as_decoder()?;
        let mixtures = decoder.mixtures?;
        let experts = mixtures.experts;
        // A token goes to an expert at most once.
        let most = 1.0 / mixtures.top_k.max(1) as f64;
        let layers: Vec<Vec<f64>> = match routing {
            Routing::Balanced => return None,
            Routing::Lognormal(sigma) => {
                shuffled(limited((0..experts).map(|i| (sigma * normal_quantile(i, experts)).exp()), most))
            }
            Routing::Zipf(exponent) => shuffled(limited((1..=experts).map(|i| (i as f64).powf(-exponent)), most)),
            Routing::Measured(layers) if layers.iter().all(|loads| loads.len() == experts) => {
                layers.iter().map(|loads| limited(loads.iter().copied(), most)).collect()
            }
            Routing::Measured(_) => return None,
        };
        let balanced = decoder.sequence as f64 * mixtures.top_k as f64 / experts as f64;
        let slots = mixtures.slots(decoder.sequence) as f64 / balanced;
        let is_measured = matches!(routing, Routing::Measured(_));
        let on_rank = (1..=experts).filter(|&on_rank| experts.is_multiple_of(on_rank));
        let fullest = on_rank.map(|on_rank| (on_rank, Fullest::of(&layers, on_rank, slots, is_measured))).collect();
        Some(Self { experts, fullest })
    }

    /// Returns the tokens of the fullest rank over the mean of all ranks, with `experts` experts on
    /// each rank. At least 1.
    pub fn fullest(&self, experts: usize) -> f64 {
        self.of_rank(experts).map_or(1.0, |fullest| fullest.tokens)
    }

    /// Returns the rows of the fullest rank over the slots that the Program has for them, averaged
    /// over layers. At least 1, since empty slots count, too.
    pub fn over_slots(&self, experts: usize) -> f64 {
        self.of_rank(experts).map_or(1.0, |fullest| fullest.rows)
    }

    /// Returns the rows of the fullest rank over its slots, in the measured layer where this ratio
    /// is largest. For a distribution, the average over layers.
    pub fn most_over_slots(&self, experts: usize) -> f64 {
        self.of_rank(experts).map_or(1.0, |fullest| fullest.most_rows)
    }

    fn of_rank(&self, experts: usize) -> Option<Fullest> {
        // The table has only divisors of the number of experts. Others use the next smaller
        // divisor: fewer experts on a rank are at least as skewed.
        let place = self.fullest.partition_point(|&(on_rank, _)| on_rank <= experts.max(1));
        self.fullest.get(place.saturating_sub(1)).map(|&(_, fullest)| fullest)
    }

    /// Returns the number of experts on each rank, if `ranks` ranks divide all experts.
    pub fn on_each_of(&self, ranks: usize) -> usize {
        (self.experts / ranks.max(1)).max(1)
    }
}

/// Returns loads that sum to 1, none above `most`. The excess over `most` goes to the other
/// experts, in proportion to their loads.
fn limited(loads: impl Iterator<Item = f64>, most: f64) -> Vec<f64> {
    let mut loads: Vec<f64> = loads.collect();
    let all: f64 = loads.iter().sum();
    loads.iter_mut().for_each(|load| *load /= all);
    let most = most.max(1.0 / loads.len().max(1) as f64);
    // Each pass but the last fills at least one more expert.
    for _ in 0..=loads.len() {
        let is_full = |load: f64| load >= most;
        let full = loads.iter().filter(|&&load| is_full(load)).count();
        let others: f64 = loads.iter().filter(|&&load| !is_full(load)).sum();
        let left = (1.0 - full as f64 * most).max(0.0);
        let rest = loads.len() - full;
        for load in &mut loads {
            *load = if is_full(*load) {
                most
            } else if others > 0.0 {
                *load * (left / others)
            } else {
                left / rest as f64
            };
        }
        if loads.iter().filter(|&&load| is_full(load)).count() == full {
            break;
        }
    }
    loads
}

/// Returns the loads of several layers, each in another random order. The seed is fixed.
fn shuffled(loads: Vec<f64>) -> Vec<Vec<f64>> {
    let layer = |number| {
        let mut random = ChaCha8Rng::seed_from_u64(0);
        random.set_stream(number);
        let mut loads = loads.clone();
        for place in (1..loads.len()).rev() {
            loads.swap(place, random.random_range(0..=place));
        }
        loads
    };
    (0..layers(loads.len())).map(layer).collect()
}

/// Returns the number of layers over which the loads of a distribution are averaged. Each layer has
/// another random order of experts. With few experts the order matters more, so there are more
/// layers.
fn layers(experts: usize) -> u64 {
    (65_536 / experts.max(1)).clamp(64, 1024) as u64
}

impl Fullest {
    /// Returns the load of the fullest rank over some layers, with `on_rank` experts on each rank.
    /// `slots` is an expert's number of slots over its tokens under balanced routing.
    fn of(layers: &[Vec<f64>], on_rank: usize, slots: f64, is_measured: bool) -> Self {
        let of_layer = |loads: &Vec<f64>| {
            let of_ranks = loads.chunks(on_rank).map(|loads| loads.iter().sum::<f64>());
            of_ranks.fold(0.0, f64::max) * (loads.len() as f64 / on_rank as f64)
        };
        // Avoids a skew from the rounding of sums.
        let rounded = |value: f64| ((value * 1e9).round() / 1e9).max(1.0);
        let tokens: Vec<f64> = layers.iter().map(of_layer).collect();
        let rows: Vec<f64> = tokens.iter().map(|tokens| rounded(tokens / slots)).collect();
        let mean = |values: &[f64]| rounded(values.iter().sum::<f64>() / values.len().max(1) as f64);
        let most_rows = if is_measured { rows.iter().copied().fold(1.0, f64::max) } else { mean(&rows) };
        Self { tokens: mean(&tokens), rows: mean(&rows), most_rows }
    }
}

/// Returns the quantile of a standard normal distribution in the middle of part `index` of `parts`
/// parts of equal probability. Winitzki's formula (2008) for the error function gives it within 0.3
/// %.
fn normal_quantile(index: usize, parts: usize) -> f64 {
    const A: f64 = 0.147;
    // The argument of the inverse error function, from -1 to 1.
    let argument = (2 * index + 1) as f64 / parts as f64 - 1.0;
    let logarithm = (1.0 - argument * argument).ln();
    let half = 2.0 / (PI * A) + logarithm / 2.0;
    argument.signum() * (2.0 * ((half * half - logarithm / A).sqrt() - half)).sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn skew(routing: &Routing, [experts, top_k]: [usize; 2], capacity: f64) -> RoutingSkew {
        let text = format!(
            r#"{{"family": "moe", "layers": 1, "hidden": 8, "heads": 1, "ffn": 8, "vocab": 8, "sequence": 4096,
                "experts": {experts}, "top_k": {top_k}, "capacity_factor": {capacity}}}"#
        );
        let model: Model = serde_json::from_str(&text).expect("sound");
        RoutingSkew::of(routing, &model).expect("it has experts")
    }

    fn divisors(experts: usize) -> Vec<usize> {
        (1..=experts).filter(|&ranks| experts.is_multiple_of(ranks)).collect()
    }

    #[test]
    fn loads_without_a_skew_fill_all_ranks_alike() {
        for routing in [Routing::Lognormal(0.0), Routing::Zipf(0.0), Routing::measured(vec![vec![3.0; 8]]).expect("sound")] {
            let skew = skew(&routing, [8, 2], 1.25);
            for on_rank in divisors(8) {
                assert!((skew.fullest(on_rank) - 1.0).abs() < 1e-12, "{routing}: {}", skew.fullest(on_rank));
            }
        }
    }

    #[test]
    fn the_fullest_rank_grows_with_the_skew_and_with_the_ranks() {
        let laws: [fn(f64) -> Routing; 2] = [Routing::Lognormal, Routing::Zipf];
        for (sizes, law) in [[8, 2], [60, 4], [256, 8]].into_iter().flat_map(|sizes| laws.map(|law| (sizes, law))) {
            let skews: Vec<RoutingSkew> = (0..=10).map(|fifth| skew(&law(f64::from(fifth) / 5.0), sizes, 1.0)).collect();
            let divisors = divisors(sizes[0]);
            for skew in &skews {
                assert_eq!(skew.fullest(sizes[0]), 1.0);
                for (&few, &many) in divisors.iter().zip(&divisors[1..]).filter(|(few, many)| many.is_multiple_of(**few)) {
                    assert!(skew.fullest(few) >= skew.fullest(many) - 1e-12, "{few} and {many} of {sizes:?}");
                }
            }
            for (less, more) in skews.iter().zip(&skews[1..]) {
                for &on_rank in &divisors {
                    let [less, more] = [less, more].map(|skew| skew.fullest(on_rank));
                    // Up to the chance of the orders.
                    assert!(more >= less * 0.998, "{on_rank} of {sizes:?}: {more} after {less}");
                }
            }
        }
    }

    #[test]
    fn measured_loads_are_those_of_the_ranks_in_their_order() {
        let layers = vec![vec![4.0, 0.0, 1.0, 3.0], vec![1.0, 1.0, 1.0, 1.0]];
        let skew = skew(&Routing::measured(layers).expect("sound"), [4, 1], 1.25);
        // The ranks of the first layer have 4 and 4 of 8, or 4, 0, 1 and 3.
        assert_eq!([4, 2, 1].map(|on_rank| skew.fullest(on_rank)), [1.0, 1.0, 1.5]);
        // 1.25 times the tokens of balanced routing find a slot. The first layer has 2.
        assert_eq!([2, 1].map(|on_rank| skew.over_slots(on_rank)), [1.0, (2.0 / 1.25 + 1.0) / 2.0]);
        assert_eq!([2, 1].map(|on_rank| skew.most_over_slots(on_rank)), [1.0, 2.0 / 1.25]);
    }

    #[test]
    fn no_expert_receives_a_token_twice() {
        // Each token goes to two experts of four, so one has at most half of all choices.
        let skew = skew(&Routing::measured(vec![vec![9.0, 1.0, 0.0, 0.0]]).expect("sound"), [4, 2], 1.0);
        assert_eq!([1, 2].map(|on_rank| skew.fullest(on_rank)), [2.0, 2.0]);
        assert_eq!(limited([9.0, 0.0, 0.0].into_iter(), 0.5), [0.5, 0.25, 0.25]);
        let within = limited([6.0, 3.0, 1.0].into_iter(), 1.0);
        assert!(within.iter().zip([0.6, 0.3, 0.1]).all(|(load, expected)| (load - expected).abs() < 1e-12), "{within:?}");
    }

    #[test]
    fn quantiles_are_those_of_a_normal_distribution() {
        // The first of eight parts has its middle at a probability of 1/16.
        assert!((normal_quantile(0, 8) + 1.5341).abs() < 0.005, "{}", normal_quantile(0, 8));
        assert!((normal_quantile(7, 8) - 1.5341).abs() < 0.005);
        assert_eq!(normal_quantile(1, 3), 0.0);
    }
}
