//! Records about layouts that were simulated or do not fit, and about estimates that were off.

use super::queue::LayoutIndex;
use super::simulation::Outcome;
use foretell_program::{Layout, Offload};
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// A family, and one variant of it; `None` means all its variants.
pub(super) type Place = (usize, Option<usize>);

/// The offloaded forms that do not fit.
#[derive(Default)]
pub(super) struct OffloadedTooLarge(BTreeSet<(usize, Option<usize>, Offload)>);

/// By layout, how often it was refitted, and the smallest memory budget that each of its stages
/// had.
pub(super) type Refits = BTreeMap<LayoutIndex, (usize, Vec<f64>)>;

/// A manner of layouts: whether `tensor`, `context` and `expert` shard blocks, whether there is a
/// pipeline, and whether its stages have several chunks. Estimates of one manner are off by much
/// the same factor, and each manner is some expert's first choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Manner {
    tensor: bool,
    context: bool,
    expert: bool,
    pipeline: bool,
    virtual_stages: bool,
}

/// By manner, the least simulated value over its estimate.
pub(super) type Corrections = BTreeMap<Manner, f64>;

/// Sizes of a mesh: `data`, `tensor`, `pipeline`, `context` and `expert`.
pub(super) type MeshSizes = [usize; 5];

/// Returns the sizes of a layout's mesh.
pub(super) fn mesh(layout: &Layout) -> MeshSizes {
    let Layout { data, tensor, pipeline, context, expert, .. } = *layout;
    [data, tensor, pipeline, context, expert]
}

/// Returns the manner of a layout.
pub(super) fn manner(layout: &Layout) -> Manner {
    let Layout { tensor, context, expert, pipeline, virtual_stages, .. } = *layout;
    Manner {
        tensor: tensor > 1,
        context: context > 1,
        expert: expert > 1,
        pipeline: pipeline > 1,
        virtual_stages: virtual_stages > 1,
    }
}

/// The known result of a layout that was compiled or simulated.
#[derive(Clone, Debug)]
pub(super) enum Known {
    /// It was simulated to its end and became an incumbent. It still is an incumbent, unless
    /// another search has a better layout.
    Simulated,
    /// Its value is at least this number, and it is no incumbent.
    AtLeast(f64),
    /// It does not fit. Contains the weighted bytes of each stage.
    TooLarge(Vec<f64>),
}

/// The known results of layouts, so that none is compiled and simulated twice.
#[derive(Default)]
pub(super) struct KnownLayouts(HashMap<Layout, Known>);

impl KnownLayouts {
    /// Records the outcome of a layout. Outcomes that say nothing about its value or memory are not
    /// recorded.
    pub(super) fn note(&mut self, layout: &Layout, outcome: &Outcome) {
        let known = match outcome {
            Outcome::Simulated(_) => Known::Simulated,
            Outcome::Stopped(at_least) => Known::AtLeast(*at_least),
            Outcome::OutOfMemory(held) => Known::TooLarge(held.clone()),
            Outcome::Indivisible(_) | Outcome::OutOfHostMemory | Outcome::Interrupted => return,
        };
        self.0.insert(layout.clone(), known);
    }

    /// Records that a layout's value is at least `value`. The search simulates it again if it needs
    /// more than that.
    pub(super) fn note_at_least(&mut self, layout: &Layout, value: f64) {
        self.0.insert(layout.clone(), Known::AtLeast(value));
    }

    /// Records that a simulated layout does not fit after all.
    pub(super) fn refuse(&mut self, layout: &Layout, held: Vec<f64>) {
        self.0.insert(layout.clone(), Known::TooLarge(held));
    }

    pub(super) fn get(&self, layout: &Layout) -> Option<&Known> {
        self.0.get(layout)
    }
}

impl OffloadedTooLarge {
    pub(super) fn insert(&mut self, (family, variant): Place, offload: Offload) {
        self.0.insert((family, variant, offload));
    }

    /// Returns `true` if this offloaded form of `place`, or of its whole family, does not fit.
    pub(super) fn contains(&self, (family, variant): Place, offload: Offload) -> bool {
        self.0.contains(&(family, variant, offload)) || self.0.contains(&(family, None, offload))
    }
}
