//! How a flow's way is chosen among several: by a hash of its two ends, as stated, or not at all, since it is spread over all of them.

/// The rule by which flows find their way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Routing {
    /// Every flow is spread evenly over all ways of the fewest hops, as with ideal adaptive routing. Parallel links are then one resource.
    /// Also where a fabric has one way only.
    Spread,
    /// Each flow keeps to one of the ways of the fewest hops, which a hash of its ends chooses (equal-cost multi-path, RFC 2992). Flows
    /// may collide on a link while others are idle.
    Ecmp,
    /// Along the first dimension of a torus, then along the second, and so on.
    DimensionOrder,
    /// In a dragonfly straight to the other group, over one of the links between the two that need the fewest hops, by hash.
    Minimal,
    /// In a dragonfly by way of a third group, which a hash chooses (Valiant 1982): twice the load, but spread over all global links.
    Valiant,
}

impl Routing {
    /// Every rule there is.
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

/// A way that the file states for all flows from one node to another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StatedRoute {
    /// The node that sends.
    pub from: usize,
    /// The node that receives.
    pub to: usize,
    /// Which of the ways of the fewest hops.
    pub path: usize,
}

/// Which of several ways a flow takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Choice {
    Stated(usize),
    Hash(u64),
}

impl Choice {
    /// One of so many.
    pub(super) fn among(self, count: usize) -> usize {
        match self {
            Choice::Stated(path) => path.min(count.saturating_sub(1)),
            // The upper half of a product is as even as the hash, and cheaper than a remainder.
            Choice::Hash(hash) => ((u128::from(hash) * count as u128) >> 64) as usize,
        }
    }

    /// A fresh choice that follows from this one.
    pub(super) fn next(self) -> Self {
        match self {
            Choice::Stated(path) => Choice::Stated(path),
            Choice::Hash(hash) => Choice::Hash(mix(hash)),
        }
    }
}

/// The choice by hash of a flow from one device to another.
pub(super) fn choice(seed: u64, from: usize, to: usize) -> Choice {
    Choice::Hash(mix(mix(mix(seed) ^ from as u64) ^ to as u64))
}

/// SplitMix64 (Steele, Lea and Flood 2014): every bit of the input changes every bit of the output with about even odds.
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
        // Of 10,000 draws among 7 each is drawn 1,429 times, with a standard deviation of 35.
        assert!(counts.iter().all(|count| count.abs_diff(1429) < 140), "{counts:?}");
        assert!(same.abs_diff(1429) < 140, "{same} alike under two seeds");
    }
}
