//! Choosing the order in which a sequence's positions are stored. All operators of a graph share
//! it, so that none moves positions between ranks.

use crate::plan::Layout;
use foretell_models::{Graph, InputKind, Kernel, Operator, Role, SEQUENCE, Tensor, Zigzag};

/// The zigzag order of a graph's sequence. `None` if positions are stored in their own order: the
/// layout states so, there is no attention, or an operator, an input or the sequence's length does
/// not allow a zigzag.
pub(super) fn zigzag(graph: &Graph, layout: &Layout) -> Option<Zigzag> {
    let ranks = layout.zigzag_ranks();
    if ranks < 2 {
        return None;
    }
    let along_sequence = || graph.operators.iter().filter(|operator| operator.find_loop(SEQUENCE).is_some());
    if !along_sequence().all(|operator| operator.follows_order_of_positions()) {
        return None;
    }
    // Images and features are stored as they are read, so their sequences have no zigzag order.
    let is_of_numbers = |tensor: &&Tensor| matches!(tensor.role, Role::Input(InputKind::Images | InputKind::Features));
    if graph
        .tensors
        .iter()
        .filter(is_of_numbers)
        .any(|tensor| tensor.dimensions.iter().any(|dimension| dimension.name == SEQUENCE))
    {
        return None;
    }
    // Only causal attention within its own sequence is left here: other kinds depend on the order
    // of positions.
    let mut attention = along_sequence().filter(|operator| matches!(operator.kind, Kernel::Attention(_)));
    let first = attention.next()?;
    let extent = |operator: &Operator| operator.find_loop(SEQUENCE).map(|walked| operator.loops[walked.0].extent);
    let positions = extent(first)?;
    if !attention.all(|operator| extent(operator) == Some(positions)) {
        return None;
    }
    Zigzag::new(ranks, positions)
}
