//! How long an exchange takes alone by the alpha-beta model (Hockney 1994; for collectives Thakur,
//! Rabenseifner and Gropp 2005) over the links that it uses.

use super::shape::Shape;
use crate::cost::{CommunicationCost, Quantile, Source, data_sheet_factor};
use foretell_units::Seconds;

/// The share of the bytes that each flow of an algorithm carries, and its steps one after the
/// other.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct AlgorithmTerms {
    /// Bytes of a flow for each byte of the whole tensor.
    pub(crate) share: f64,
    /// Hops of latency.
    pub(crate) steps: f64,
}

impl AlgorithmTerms {
    /// One message.
    pub(crate) const MESSAGE: Self = Self { share: 1.0, steps: 1.0 };

    /// A reduce-scatter or an all-gather around a ring.
    pub(crate) fn ring_half(members: usize) -> Self {
        let steps = members as f64 - 1.0;
        Self { share: steps / members as f64, steps }
    }

    /// Both, which make an all-reduce.
    pub(crate) fn ring_whole(members: usize) -> Self {
        let half = Self::ring_half(members);
        Self { share: 2.0 * half.share, steps: 2.0 * half.steps }
    }

    /// Up and down a tree.
    pub(crate) fn double_tree(members: usize) -> Self {
        Self { share: 1.0, steps: 2.0 * (members as f64).log2().ceil() }
    }

    /// All messages at once; the shape has the parts.
    pub(crate) const ALL_PAIRS: Self = Self { share: 1.0, steps: 1.0 };

    /// What it takes by the data sheet of the links.
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
