//! Orders in which members of a group pass data on: rings through nodes, and binary trees.

use foretell_topologies::{DeviceId, NodeId, Topology};

/// Returns the orders in which rings visit the members. An entry is an index into `members`. See
/// [`Shape::ring`].
pub(crate) fn ring_orders(topology: &Topology, members: &[DeviceId]) -> Vec<Vec<usize>> {
    let nodes: Vec<NodeId> = members.iter().map(|&member| topology.node_of(member)).collect();
    let in_node = nodes.chunk_by(NodeId::eq).next().map_or(0, <[_]>::len);
    let is_even = in_node < nodes.len() && nodes.chunk_by(NodeId::eq).all(|node| node.len() == in_node);
    let places: Vec<usize> = (0..members.len()).collect();
    if !is_even || in_node == 1 {
        return vec![places];
    }
    (0..in_node).map(|rotation| along_rails(&places, in_node, rotation)).collect()
}

/// Returns a ring through nodes of `size` members each that begins at member `rotation` of the
/// first node.
///
/// The ring leaves a node from the member with the same index as the one by which it enters the
/// next. On a rail-optimised network both are under one switch. Where the numbers of nodes and
/// members allow it, the ring visits all nodes in the same pattern. All rotations together load
/// every member's links equally, whatever the fabric.
pub(super) fn along_rails<Member: Copy>(members: &[Member], size: usize, rotation: usize) -> Vec<Member> {
    let count = members.len() / size;
    // A ring leaves a node `back` positions before the position at which it enters. If possible,
    // `back` is such that the ring ends on the rail where it began.
    let common = greatest_common_divisor(count, size);
    let back = if common > 1 { size / common } else { 1 };
    let mut order = Vec::with_capacity(members.len());
    let mut entry = rotation;
    for (node, members) in members.chunks_exact(size).enumerate() {
        // The last node's exit is fixed to the rail where the ring began, so it cannot also be the
        // entry. The first node's exit shifts to avoid that. No ring over an odd number of
        // two-member nodes keeps to its rails everywhere.
        let would_meet = node == 0 && common == 1 && size > 2 && (count - 1).is_multiple_of(size);
        let exit = if node + 1 == count { rotation } else { (entry + size - if would_meet { 2 } else { back }) % size };
        let places = (0..size).map(|step| (entry + step) % size);
        let between = places.filter(|&place| exit == entry || place != exit).chain((exit != entry).then_some(exit));
        order.extend(between.filter_map(|place| members.get(place).copied()));
        entry = exit;
    }
    order
}

fn greatest_common_divisor(one: usize, other: usize) -> usize {
    if other == 0 { one } else { greatest_common_divisor(other, one % other) }
}

/// Returns a node's parent in the in-order binary tree over `0..count` with root 0. A node's height
/// is its number of trailing zero bits (NCCL's `trees.cc`).
pub(super) fn tree_parent(node: usize, count: usize) -> Option<usize> {
    if node == 0 {
        return None;
    }
    let bit = node & node.wrapping_neg();
    let up = (node ^ bit) | (bit << 1);
    Some(if up >= count { node ^ bit } else { up })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_binary_tree_has_logarithmic_depth() {
        for count in 2usize..70 {
            for node in 0..count {
                let mut steps = 0;
                let mut at = node;
                while let Some(parent) = tree_parent(at, count) {
                    at = parent;
                    steps += 1;
                }
                assert!(steps <= count.ilog2() + 1, "node {node} of {count}: {steps}");
            }
            for parent in 0..count {
                let children = (0..count).filter(|&node| tree_parent(node, count) == Some(parent)).count();
                assert!(children <= 2, "node {parent} of {count} has {children} children");
            }
        }
    }
}
