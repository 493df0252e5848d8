//! Chooses a flow's path among several: by a hash of the flow's ends, as stated in the file, or by
//! spreading over all paths.

/// The routing rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Routing {
    /// Every flow spreads evenly over all shortest paths, as with ideal adaptive routing, so that
    /// parallel links are one resource. Fabrics with one path per pair have this rule, too.
    Spread,
    /// A hash of its ends assigns each flow to one shortest path (equal-cost multi-path, RFC 2992).
    /// Flows may collide on a link while other links are idle.
    Ecmp,
    /// In a torus: along the first dimension, then the second, and so on.
    DimensionOrder,
    /// In a dragonfly: directly to the other group. The hash chooses among the links with the
    /// fewest hops.
    Minimal,
    /// In a dragonfly: through a third group, chosen by hash (Valiant 1982). The load doubles but
    /// spreads over all global links.
    Valiant,
}

impl Routing {
    /// All rules.
    pub const ALL: [Routing; 5] = [Routing::Spread, Routing::Ecmp, Routing::DimensionOrder, Routing::Minimal, Routing::Valiant];

    /// The name used in topology files.
    pub const fn name(self) -> &'static str {
        match self {
            Routing::Spread => "spread",
            Routing::Ecmp => "ecmp",
            Routing::DimensionOrder => "dimension-order",
            Routing::Minimal => "minimal",
            Routing::Valiant => "valiant",
        }
    }
}

/// A route stated in the file for all flows between two nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StatedRoute {
    /// The sending node.
    pub from: usize,
    /// The receiving node.
    pub to: usize,
    /// Index among the shortest paths.
    pub path: usize,
}

/// Which of several paths a flow takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Choice {
    Stated(usize),
    Hash(u64),
}

impl Choice {
    /// Chooses an index below `count`.
    pub(super) fn among(self, count: usize) -> usize {
        match self {
            Choice::Stated(path) => path.min(count.saturating_sub(1)),
            // The upper half of the product is distributed as uniformly as the hash, and cheaper to
            // compute than a remainder.
            Choice::Hash(hash) => ((u128::from(hash) * count as u128) >> 64) as usize,
        }
    }

    /// Derives a new choice from this one.
    pub(super) fn next(self) -> Self {
        match self {
            Choice::Stated(path) => Choice::Stated(path),
            Choice::Hash(hash) => Choice::Hash(mix(hash)),
        }
    }
}

/// Derives the choice of a flow from a hash of the seed and its two devices.
pub(super) fn choice(seed: u64, from: usize, to: usize) -> Choice {
    Choice::Hash(mix(mix(mix(seed) ^ from as u64) ^ to as u64))
}

/// SplitMix64 (Steele, Lea and Flood 2014): every input bit flips every output bit with probability
/// about one half.
const fn mix(value: u64) -> u64 {
    let value = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hash_is_even_and_follows_the_seed() {
        let mut counts = [0usize; 7];
        let mut same = 0;
        for from in 0..100 {
            for to in 0..100 {
                counts[choice(0, from, to).among(7)] += 1;
                same += usize::from(choice(0, from, to).among(7) == choice(1, from, to).among(7));
            }
        }
        // Of 10,000 draws among 7, each index has 1,429 on average, with a standard deviation of
        // 35.
        assert!(counts.iter().all(|count| count.abs_diff(1429) < 140), "{counts:?}");
        assert!(same.abs_diff(1429) < 140, "{same} alike under two seeds");
    }
}
