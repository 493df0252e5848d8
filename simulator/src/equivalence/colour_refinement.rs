//! Colour refinement (Weisfeiler and Leman 1968): the coarsest equitable partition of a graph.
//!
//! Two nodes are in one class if they have the same kind and, for every class and every kind of
//! edge, the same number of such edges to nodes of that class. If the behaviour of a system depends
//! only on node kinds and on these counts, all nodes of a class behave alike at all times. So one
//! of them can represent its class.
//!
//! Nothing here depends on what the nodes are.

use rustc_hash::{FxHashMap, FxHasher};
use std::hash::{Hash, Hasher};

/// A graph whose nodes and edges have kinds.
#[derive(Clone, Debug, Default)]
pub(super) struct Graph {
    /// The kind of each node.
    kinds: Vec<u64>,
    /// A node, its neighbour, and the kind of the edge as the node sees it. Each edge has two
    /// entries, one for each end.
    edges: Vec<(u32, u32, u64)>,
}

impl Graph {
    /// Adds a node and returns its number.
    pub(super) fn add_node(&mut self, kind: u64) -> u32 {
        self.kinds.push(kind);
        self.kinds.len() as u32 - 1
    }

    /// Adds an edge, which both nodes see as the same kind.
    pub(super) fn add_edge(&mut self, one: u32, other: u32, kind: u64) {
        self.edges.push((one, other, kind));
        self.edges.push((other, one, kind));
    }

    /// Adds an edge, which the nodes see as different kinds.
    pub(super) fn add_edge_seen_as(&mut self, one: u32, other: u32, seen_from_one: u64, seen_from_other: u64) {
        self.edges.push((one, other, seen_from_one));
        self.edges.push((other, one, seen_from_other));
    }

    /// The class of each node. Classes are numbered in the order of their first nodes.
    pub(super) fn classes(self) -> Vec<u32> {
        let Self { kinds, edges } = self;
        // Sorts the edges by node, with a counting sort.
        let mut offsets = vec![0u32; kinds.len() + 1];
        edges.iter().for_each(|&(edge, ..)| offsets[edge as usize + 1] += 1);
        for index in 1..offsets.len() {
            offsets[index] += offsets[index - 1];
        }
        let mut next = offsets.clone();
        let mut sorted = vec![(0, 0); edges.len()];
        for (one, other, kind) in edges {
            let next = &mut next[one as usize];
            sorted[*next as usize] = (kind, other);
            *next += 1;
        }
        let mut known: FxHashMap<u64, u32> = FxHashMap::default();
        let mut classes: Vec<u32> = kinds.iter().map(|kind| number(&mut known, *kind)).collect();
        let mut count = known.len();
        let mut seen: Vec<(u64, u32)> = Vec::new();
        loop {
            let mut signatures = Signatures::default();
            let refined: Vec<u32> = (0..classes.len())
                .map(|node| {
                    let own = &sorted[offsets[node] as usize..offsets[node + 1] as usize];
                    seen.clear();
                    seen.extend(own.iter().map(|&(kind, other)| (kind, classes[other as usize])));
                    seen.sort_unstable();
                    signatures.number(classes[node], &seen)
                })
                .collect();
            // Classes only ever split. So if their number is unchanged, no class has split.
            if signatures.known.len() == count {
                return classes;
            }
            count = signatures.known.len();
            classes = refined;
        }
    }
}

/// Numbers signatures in the order of first use. The signature of a node consists of its class, and
/// of the kind of each of its edges with the class at the other end.
#[derive(Default)]
struct Signatures {
    /// For each signature, the class of its nodes before, and the range of its edges in `seen`.
    known: Vec<(u32, usize, usize)>,
    seen: Vec<(u64, u32)>,
    /// The signatures with each hash. The map is never iterated, so its order does not matter.
    by_hash: FxHashMap<u64, Vec<u32>>,
}

impl Signatures {
    fn number(&mut self, class: u32, seen: &[(u64, u32)]) -> u32 {
        let mut hasher = FxHasher::default();
        (class, seen).hash(&mut hasher);
        let candidates = self.by_hash.entry(hasher.finish()).or_default();
        let is_equal = |&&colour: &&u32| {
            let (before, first, end) = self.known[colour as usize];
            before == class && self.seen[first..end] == *seen
        };
        if let Some(&known) = candidates.iter().find(is_equal) {
            return known;
        }
        let next = self.known.len() as u32;
        candidates.push(next);
        let first = self.seen.len();
        self.seen.extend_from_slice(seen);
        self.known.push((class, first, self.seen.len()));
        next
    }
}

/// The number of a key, in the order of first use.
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
    fn a_ring_is_one_class_unless_a_node_differs() {
        assert_eq!(ring(8, None), [0; 8]);
        // Then the distance to that node decides.
        assert_eq!(ring(8, Some(0)), [0, 1, 2, 3, 4, 3, 2, 1]);
    }

    #[test]
    fn kinds_of_edges_distinguish_nodes() {
        let mut graph = Graph::default();
        let nodes: Vec<u32> = (0..4).map(|_| graph.add_node(0)).collect();
        graph.add_edge(nodes[0], nodes[1], 1);
        graph.add_edge(nodes[2], nodes[3], 2);
        assert_eq!(graph.classes(), [0, 0, 1, 1]);
    }

    proptest! {
        /// Nodes of one class have equal numbers of edges of each kind to each class.
        #[test]
        fn classes_are_equitable(
            kinds in proptest::collection::vec(0u64..2, 1..12),
            pairs in proptest::collection::vec((0u32..12, 0u32..12, 0u64..2), 0..20),
        ) {
            let mut graph = Graph::default();
            for &kind in &kinds {
                graph.add_node(kind);
            }
            let inside = |&(left, right, _): &(u32, u32, u64)| (left as usize) < kinds.len() && (right as usize) < kinds.len();
            let pairs: Vec<_> = pairs.into_iter().filter(inside).collect();
            for &(one, other, kind) in &pairs {
                graph.add_edge(one, other, kind);
            }
            let classes = graph.classes();
            let seen = |node: usize| {
                let mut seen: Vec<(u64, u32)> = pairs
                    .iter()
                    .flat_map(|&(pair, other, kind)| [(pair, other, kind), (other, pair, kind)])
                    .filter(|&(pair, ..)| pair as usize == node)
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
