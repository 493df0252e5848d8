//! What a search still has to look at: families of layouts, and layouts, the least bound first.

use crate::space::Family;
use foretell_program::Layout;

/// Something that is still to be looked at, the least bound first; of equal ones the first in the space.
#[derive(Debug)]
pub(crate) struct Open {
    pub(crate) bound: f64,
    /// The family, and the member of it.
    pub(crate) index: (usize, usize),
    pub(crate) what: What,
}

#[derive(Debug)]
pub(crate) enum What {
    /// Of which only their arithmetic is known.
    Unbounded(Box<Family>),
    Family(Box<Family>),
    /// Layouts whose ranks do the same and only lie otherwise on the devices, the least bound first: compiled once for all of them.
    Members(Vec<Member>),
}

/// A layout that may be worth simulating.
#[derive(Debug)]
pub(crate) struct Member {
    pub(crate) bound: f64,
    pub(crate) index: (usize, usize),
    pub(crate) layout: Layout,
    /// Whether its simulation was stopped when that had the bound.
    pub(crate) is_stopped: bool,
}

impl Member {
    /// Whether its ranks do what those of another do, so that one Program tells of both.
    fn does_as(&self, other: &Self) -> bool {
        let anywhere = |layout: &Layout| Layout { placement: None, stage_places: None, ..layout.clone() };
        self.layout.shares.is_none()
            && self.layout.stages.is_none()
            && self.index.0 == other.index.0
            && anywhere(&self.layout) == anywhere(&other.layout)
    }
}

impl Open {
    /// How many of its layouts were simulated until it was certain that they are not the best.
    pub(crate) fn stopped(&self) -> usize {
        match &self.what {
            What::Unbounded(_) | What::Family(_) => 0,
            What::Members(members) => members.iter().filter(|member| member.is_stopped).count(),
        }
    }
}

impl PartialEq for Open {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Open {}

impl PartialOrd for Open {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Open {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.bound.total_cmp(&other.bound).then(self.index.cmp(&other.index))
    }
}

/// Layouts to be looked at, those together that one Program tells of.
pub(crate) fn in_groups(members: Vec<Member>) -> Vec<Open> {
    let mut groups: Vec<Vec<Member>> = Vec::new();
    for member in members {
        // Those of one family come one after the other.
        let mut own = groups.iter_mut().rev().take_while(|group| group[0].index.0 == member.index.0);
        match own.find(|group| group[0].does_as(&member)) {
            Some(group) => group.push(member),
            None => groups.push(vec![member]),
        }
    }
    let open = |mut group: Vec<Member>| {
        group.sort_by(|a, b| a.bound.total_cmp(&b.bound).then(a.index.cmp(&b.index)));
        Open { bound: group[0].bound, index: group[0].index, what: What::Members(group) }
    };
    groups.into_iter().map(open).collect()
}
