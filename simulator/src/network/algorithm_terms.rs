//! Duration of an uncontended communication by the alpha-beta model (Hockney 1994). For collectives
//! see Thakur, Rabenseifner and Gropp 2005.

use super::shape::Shape;
use crate::cost::{CommunicationCost, Quantile, Source, data_sheet_factor};
use foretell_units::Seconds;

/// The bytes that each flow of an algorithm carries and the number of its sequential steps.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct AlgorithmTerms {
    /// Bytes that each flow carries per byte of the whole tensor.
    pub(crate) share: f64,
    /// Number of hops in sequence, each of which costs the hop latency.
    pub(crate) steps: f64,
}

impl AlgorithmTerms {
    /// A single message.
    pub(crate) const MESSAGE: Self = Self { share: 1.0, steps: 1.0 };

    /// A reduce-scatter or an all-gather around a ring.
    pub(crate) fn ring_half(members: usize) -> Self {
        let steps = members as f64 - 1.0;
        Self { share: steps / members as f64, steps }
    }

    /// An all-reduce around a ring: a reduce-scatter, then an all-gather.
    pub(crate) fn ring_whole(members: usize) -> Self {
        let half = Self::ring_half(members);
        Self { share: 2.0 * half.share, steps: 2.0 * half.steps }
    }

    /// An all-reduce over a double binary tree: a reduction to the root, then a broadcast.
    pub(crate) fn double_tree(members: usize) -> Self {
        Self { share: 1.0, steps: 2.0 * (members as f64).log2().ceil() }
    }

    /// An all-to-all, which sends all messages at the same time. [`Shape::all_pairs`] accounts for
    /// their sizes.
    pub(crate) const ALL_PAIRS: Self = Self { share: 1.0, steps: 1.0 };

    /// Returns the cost by the links' data sheets, for `bytes` of the whole tensor.
    pub(crate) fn cost(self, shape: &Shape, overhead: Seconds, bytes: f64, quantile: Quantile) -> CommunicationCost {
        let factor = data_sheet_factor(quantile);
        let bytes = bytes * self.share;
        CommunicationCost {
            latency: (overhead + shape.hop_latency * self.steps) * factor,
            flow: Seconds::new(bytes * shape.seconds_per_byte * factor),
            bytes,
            processor_share: None,
            source: Source::Roofline,
        }
    }
}
