//! The queue of families and layouts that a search has yet to examine, the least bound first.

use crate::space::Family;
use foretell_program::Layout;

/// The family number of layouts that are simulated before their turn. No family of the space has
/// this number, nor [`NEIGHBOURS`].
pub(super) const PROBED: usize = usize::MAX;

/// The family number of layouts that the local search simulates.
pub(super) const NEIGHBOURS: usize = usize::MAX - 1;

/// A layout's index in the space: its family, and its number among the family's variants.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct LayoutIndex {
    pub(super) family: usize,
    pub(super) variant: usize,
}

/// One entry of the queue. The entry with the least bound comes first; among equal bounds, the one
/// that comes first in the space.
#[derive(Debug)]
pub(super) struct QueueEntry {
    /// Lower bound on the value of every layout of the entry.
    pub(super) bound: f64,
    /// Index of its first layout.
    pub(super) index: LayoutIndex,
    /// The number of layouts of the space that the entry represents.
    pub(super) layouts: usize,
    pub(super) content: QueueContent,
}

#[derive(Debug)]
pub(super) enum QueueContent {
    /// A family that has only its arithmetic bound: no bound is known from truncated models yet.
    UnboundedFamily(Box<Family>),
    /// A family with a lower bound that holds for all its variants.
    Family(Box<Family>),
    /// Layouts that share one Program and differ only in the devices that its ranks run on. The
    /// least bound comes first.
    Layouts(Vec<QueuedLayout>),
}

/// A layout that may be worth simulating.
#[derive(Debug)]
pub(super) struct QueuedLayout {
    /// Lower bound on its value.
    pub(super) bound: f64,
    pub(super) index: LayoutIndex,
    pub(super) layout: Layout,
    /// Whether its next simulation runs to the end: an earlier one was stopped at `bound`, or the
    /// local search needs the exact value.
    pub(super) is_stopped: bool,
}

impl QueuedLayout {
    /// Returns `true` if another layout of the family has the same Program apart from the devices
    /// of its ranks. Returns `false` for layouts with unequal shares or their own meshes of stages.
    fn shares_program_with(&self, other: &Self) -> bool {
        let anywhere = |layout: &Layout| Layout { placement: None, stage_places: None, ..layout.clone() };
        self.layout.shares.is_none()
            && self.layout.stages.is_none()
            && self.index.family == other.index.family
            && anywhere(&self.layout) == anywhere(&other.layout)
    }
}

impl QueueEntry {
    /// Returns how many of its layouts had their simulation stopped, because they could not beat
    /// the best value by more than the tolerance.
    pub(super) fn stopped(&self) -> usize {
        match &self.content {
            QueueContent::UnboundedFamily(_) | QueueContent::Family(_) => 0,
            QueueContent::Layouts(layouts) => layouts.iter().filter(|layout| layout.is_stopped).count(),
        }
    }
}

impl PartialEq for QueueEntry {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for QueueEntry {}

impl PartialOrd for QueueEntry {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for QueueEntry {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.bound.total_cmp(&other.bound).then(self.index.cmp(&other.index))
    }
}

/// Groups layouts that share a Program. Layouts of one family must be adjacent. A layout represents
/// `forms(layout)` layouts of the space.
pub(super) fn grouped_by_program(layouts: Vec<QueuedLayout>, forms: impl Fn(&Layout) -> usize) -> Vec<QueueEntry> {
    let mut groups: Vec<Vec<QueuedLayout>> = Vec::new();
    for layout in layouts {
        let mut of_family = groups.iter_mut().rev().take_while(|group| group[0].index.family == layout.index.family);
        match of_family.find(|group| group[0].shares_program_with(&layout)) {
            Some(group) => group.push(layout),
            None => groups.push(vec![layout]),
        }
    }
    let entry = |mut group: Vec<QueuedLayout>| {
        group.sort_by(|a, b| a.bound.total_cmp(&b.bound).then(a.index.cmp(&b.index)));
        let layouts = group.iter().map(|queued| forms(&queued.layout)).sum();
        QueueEntry { bound: group[0].bound, index: group[0].index, layouts, content: QueueContent::Layouts(group) }
    };
    groups.into_iter().map(entry).collect()
}
