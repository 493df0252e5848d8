//! What behaves alike: the coarsest equitable partition of a graph, by colour refinement (Weisfeiler and Leman 1968).
//!
//! Two things are of one class when they begin alike and, for every class and every kind of tie, have as many ties of that kind with
//! members of that class. A system in which everything follows only from such counts then treats all members of a class alike, always, so that one
//! of them can stand for all. This file does not know what the things are.

use rustc_hash::{FxHashMap, FxHasher};
use std::hash::{Hash, Hasher};

/// Things and their ties.
#[derive(Clone, Debug, Default)]
pub(crate) struct Graph {
    /// What each thing is before its ties are looked at.
    kinds: Vec<u64>,
    /// One thing, another, and what the tie is as the one sees it.
    ties: Vec<(u32, u32, u64)>,
}

impl Graph {
    /// A new thing, which is like others of its kind as far as one can see from itself.
    pub(crate) fn add_node(&mut self, kind: u64) -> u32 {
        self.kinds.push(kind);
        self.kinds.len() as u32 - 1
    }

    /// Ties two things; `kind` is that of the tie from both sides.
    pub(crate) fn add_edge(&mut self, one: u32, other: u32, kind: u64) {
        self.ties.push((one, other, kind));
        self.ties.push((other, one, kind));
    }

    /// Ties two things that see the tie differently.
    pub(crate) fn add_edge_seen_as(&mut self, one: u32, other: u32, seen_from_one: u64, seen_from_other: u64) {
        self.ties.push((one, other, seen_from_one));
        self.ties.push((other, one, seen_from_other));
    }

    /// The class of each thing. Classes are numbered in the order of their first members.
    pub(crate) fn classes(self) -> Vec<u32> {
        let Self { kinds, ties } = self;
        // The ties of each thing one after the other, by counting.
        let mut offsets = vec![0u32; kinds.len() + 1];
        ties.iter().for_each(|&(one, ..)| offsets[one as usize + 1] += 1);
        for index in 1..offsets.len() {
            offsets[index] += offsets[index - 1];
        }
        let mut next = offsets.clone();
        let mut sorted = vec![(0, 0); ties.len()];
        for (one, other, kind) in ties {
            let place = &mut next[one as usize];
            sorted[*place as usize] = (kind, other);
            *place += 1;
        }
        let mut known: FxHashMap<u64, u32> = FxHashMap::default();
        let mut classes: Vec<u32> = kinds.iter().map(|kind| number(&mut known, *kind)).collect();
        let mut count = known.len();
        let mut seen: Vec<(u64, u32)> = Vec::new();
        loop {
            let mut signatures = Signatures::default();
            let refined: Vec<u32> = (0..classes.len())
                .map(|thing| {
                    let own = &sorted[offsets[thing] as usize..offsets[thing + 1] as usize];
                    seen.clear();
                    seen.extend(own.iter().map(|&(kind, other)| (kind, classes[other as usize])));
                    seen.sort_unstable();
                    signatures.number(classes[thing], &seen)
                })
                .collect();
            // Classes are only ever split: as many as before are the same as before.
            if signatures.known.len() == count {
                return classes;
            }
            count = signatures.known.len();
            classes = refined;
        }
    }
}

/// What things see of each other, numbered in the order of first use.
#[derive(Default)]
struct Signatures {
    /// Of each the class before, and where in `seen` it begins and ends.
    known: Vec<(u32, usize, usize)>,
    seen: Vec<(u64, u32)>,
    /// By hash, those that have it. Only looked up.
    by_hash: FxHashMap<u64, Vec<u32>>,
}

impl Signatures {
    fn number(&mut self, class: u32, seen: &[(u64, u32)]) -> u32 {
        let mut hasher = FxHasher::default();
        (class, seen).hash(&mut hasher);
        let alike = self.by_hash.entry(hasher.finish()).or_default();
        let is_it = |&&one: &&u32| {
            let (before, first, end) = self.known[one as usize];
            before == class && self.seen[first..end] == *seen
        };
        if let Some(&known) = alike.iter().find(is_it) {
            return known;
        }
        let next = self.known.len() as u32;
        alike.push(next);
        let first = self.seen.len();
        self.seen.extend_from_slice(seen);
        self.known.push((class, first, self.seen.len()));
        next
    }
}

/// The number of a key, in the order of first use; so it does not depend on the map's own order.
fn number(known: &mut FxHashMap<u64, u32>, key: u64) -> u32 {
    let next = known.len() as u32;
    *known.entry(key).or_insert(next)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn ring(length: u32, odd_one: Option<u32>) -> Vec<u32> {
        let mut graph = Graph::default();
        for index in 0..length {
            graph.add_node(u64::from(odd_one == Some(index)));
        }
        for index in 0..length {
            graph.add_edge(index, (index + 1) % length, 7);
        }
        graph.classes()
    }

    #[test]
    fn a_ring_is_one_class_until_someone_is_different() {
        assert_eq!(ring(8, None), [0; 8]);
        // Then what counts is the distance to that one.
        assert_eq!(ring(8, Some(0)), [0, 1, 2, 3, 4, 3, 2, 1]);
    }

    #[test]
    fn kinds_of_ties_tell_apart() {
        let mut graph = Graph::default();
        let things: Vec<u32> = (0..4).map(|_| graph.add_node(0)).collect();
        graph.add_edge(things[0], things[1], 1);
        graph.add_edge(things[2], things[3], 2);
        assert_eq!(graph.classes(), [0, 0, 1, 1]);
    }

    proptest! {
        /// Within a class all have as many ties of each kind with each class, and no coarser partition that respects the kinds has this.
        #[test]
        fn classes_are_equitable(
            kinds in proptest::collection::vec(0u64..2, 1..12),
            pairs in proptest::collection::vec((0u32..12, 0u32..12, 0u64..2), 0..20),
        ) {
            let mut graph = Graph::default();
            for &kind in &kinds {
                graph.add_node(kind);
            }
            let inside = |&(one, other, _): &(u32, u32, u64)| (one as usize) < kinds.len() && (other as usize) < kinds.len();
            let pairs: Vec<_> = pairs.into_iter().filter(inside).collect();
            for &(one, other, kind) in &pairs {
                graph.add_edge(one, other, kind);
            }
            let classes = graph.classes();
            let seen = |thing: usize| {
                let mut seen: Vec<(u64, u32)> = pairs
                    .iter()
                    .flat_map(|&(one, other, kind)| [(one, other, kind), (other, one, kind)])
                    .filter(|&(one, ..)| one as usize == thing)
                    .map(|(_, other, kind)| (kind, classes[other as usize]))
                    .collect();
                seen.sort_unstable();
                seen
            };
            for one in 0..kinds.len() {
                for other in 0..one {
                    if classes[one] == classes[other] {
                        prop_assert_eq!(kinds[one], kinds[other]);
                        prop_assert_eq!(seen(one), seen(other));
                    }
                }
            }
        }
    }
}
