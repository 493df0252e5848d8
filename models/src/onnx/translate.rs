//! From the nodes of a graph to the layers of a network, node by node.

use super::OnnxError;
use super::messages::GraphMessage;
use super::nodes;
use super::translator::Translator;
use crate::families::Network;
use std::collections::BTreeSet;

/// Translates a graph. Returns what differs from it.
///
/// # Errors
/// [`OnnxError`]
pub(super) fn network(graph: &GraphMessage) -> Result<(Network, Vec<String>), OnnxError> {
    let unknown: BTreeSet<&str> = graph
        .nodes
        .iter()
        .filter(|node| !matches!(node.domain.as_str(), "" | "ai.onnx") || !nodes::is_known(&node.operator))
        .map(|node| node.operator.as_str())
        .collect();
    if !unknown.is_empty() {
        return Err(OnnxError::UnknownOperators { names: unknown.into_iter().map(String::from).collect() });
    }
    // If all sizes are fixed, the batch is assumed to be the first dimension. PyTorch's attention
    // modules have it second by default, so that is tried next.
    let first = with_batch(graph, 0);
    match first {
        Err(OnnxError::Node { .. }) => with_batch(graph, 1).or(first),
        other => other,
    }
}

fn with_batch(graph: &GraphMessage, axis: usize) -> Result<(Network, Vec<String>), OnnxError> {
    let mut translator = Translator::new(graph, axis)?;
    for node in &graph.nodes {
        translator.node(node).map_err(|reason| OnnxError::Node {
            node: node.title().into(),
            operator: node.operator.clone(),
            reason,
        })?;
    }
    translator.finish(graph)
}
