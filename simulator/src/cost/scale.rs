//! Factors by which a what-if question changes costs.

use foretell_topologies::LinkScale;

/// The factors from the costs of the actual devices and links to those of a what-if question.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct CostScale {
    pub(crate) peak: f64,
    pub(crate) memory_bandwidth: f64,
    pub(crate) speed: f64,
    pub(crate) launch: f64,
    pub(crate) exchange_overhead: f64,
    pub(crate) links: LinkScale,
}

impl CostScale {
    pub(crate) const NONE: Self =
        Self { peak: 1.0, memory_bandwidth: 1.0, speed: 1.0, launch: 1.0, exchange_overhead: 1.0, links: LinkScale::NONE };
}
