//! Records about layouts that do not fit.

use super::queue::LayoutIndex;
use foretell_program::Offload;
use std::collections::{BTreeMap, BTreeSet};

/// A family, and one variant of it; `None` means all its variants.
pub(super) type Place = (usize, Option<usize>);

/// The offloaded forms that were found not to fit.
#[derive(Default)]
pub(super) struct OffloadedTooLarge(BTreeSet<(usize, Option<usize>, Offload)>);

/// By layout, how often it was refitted, and the smallest memory budget that each of its stages
/// had.
pub(super) type Refits = BTreeMap<LayoutIndex, (usize, Vec<f64>)>;

impl OffloadedTooLarge {
    pub(super) fn insert(&mut self, (family, variant): Place, offload: Offload) {
        self.0.insert((family, variant, offload));
    }

    /// Returns `true` if the form of `place`, or that of its whole family, does not fit.
    pub(super) fn contains(&self, (family, variant): Place, offload: Offload) -> bool {
        self.0.contains(&(family, variant, offload)) || self.0.contains(&(family, None, offload))
    }
}
