//! Fusion: operators whose work is one pass over memory when a kernel does them together. A compiler pass over the graph, so that
//! a stack that fuses and one that does not are different Programs.

use crate::strategy::{Sharding, consumers};
use foretell_models::{Graph, OperatorId, OperatorKind};

/// Merges a bias, and then a ReLU, into the product before it where nothing else reads what lies between. A product whose partial sums
/// must be made first cannot take the bias. Operators keep the shares that `sharding` gave them.
pub(crate) fn fuse(graph: &Graph, sharding: Sharding) -> (Graph, Sharding) {
    let mut fused = graph.clone();
    let consumers = consumers(graph);
    let mut dropped = vec![false; graph.operators.len()];
    for index in 0..graph.operators.len() {
        let OperatorKind::Matmul { weight, .. } = graph.operators[index].kind else { continue };
        let product = graph.operators[index].outputs[0].tensor;
        let [bias_id] = consumers[product.0][..] else { continue };
        let bias = &graph.operators[bias_id.0];
        let same_block = bias.block == graph.operators[index].block;
        let whole = sharding.produced(product).partial_axes().next().is_none();
        let same_columns =
            bias.inputs.get(1).is_some_and(|parameter| parameter.axes.len() == column_count(graph, OperatorId(index)));
        if bias.kind != OperatorKind::BiasAdd || !same_block || !whole || !same_columns {
            continue;
        }
        // The bias walks the product's own column loops.
        let mut parameter = bias.inputs[1].clone();
        let output = &graph.operators[index].outputs[0];
        parameter.axes = output.axes[output.axes.len() - parameter.axes.len()..].to_vec();
        let mut result = bias.outputs[0].tensor;
        let mut relu = false;
        dropped[bias_id.0] = true;
        if let [relu_id] = consumers[result.0][..]
            && graph.operators[relu_id.0].kind == OperatorKind::Relu
            && graph.operators[relu_id.0].block == bias.block
        {
            relu = true;
            result = graph.operators[relu_id.0].outputs[0].tensor;
            dropped[relu_id.0] = true;
        }
        let operator = &mut fused.operators[index];
        operator.kind = OperatorKind::Matmul { weight, relu };
        operator.inputs.push(parameter);
        operator.outputs[0].tensor = result;
    }
    remove(&mut fused, &dropped);
    (fused, sharding.without(&dropped))
}

/// The number of the product's column loops.
fn column_count(graph: &Graph, id: OperatorId) -> usize {
    graph.operators[id.0].loops.iter().filter(|one| one.role == foretell_models::Extent::Columns).count()
}

/// Takes operators out and renumbers the references to the others; gradients of one that was merged lose theirs.
fn remove(graph: &mut Graph, dropped: &[bool]) {
    let mut renumbered = Vec::with_capacity(dropped.len());
    let mut kept = 0;
    for &gone in dropped {
        renumbered.push(OperatorId(kept));
        kept += usize::from(!gone);
    }
    let mut flags = dropped.iter();
    graph.operators.retain(|_| !flags.next().copied().unwrap_or(false));
    for operator in &mut graph.operators {
        operator.forward = operator.forward.filter(|forward| !dropped[forward.0]).map(|forward| renumbered[forward.0]);
    }
}
