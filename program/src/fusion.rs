//! Fusion: operators whose work is one pass over memory when a kernel does them together. A compiler pass over the graph, so that
//! a stack that fuses and one that does not are different Programs.

use crate::strategy::{Sharding, consumers};
use foretell_models::{Graph, Operand, OperatorId, OperatorKind, TensorId};

/// Merges a bias, and then a ReLU, into the product before it where nothing else reads what lies between. A product whose partial sums
/// must be made first cannot take the bias, nor one whose ranks
/// make other parts of the output than they add the bias to. Attention whose queries, keys and values were split from one tensor reads that tensor, where
/// nothing is to be converted in between. Operators keep the shares that `sharding` gave them.
pub(crate) fn fuse(graph: &Graph, sharding: Sharding) -> (Graph, Sharding) {
    let mut fused = graph.clone();
    let consumers = consumers(graph);
    let mut dropped = vec![false; graph.operators.len()];
    let lies_as_wanted = |tensor: TensorId, reader: OperatorId| {
        let mut read = graph.operators[reader.0].inputs.iter().filter(|input| input.tensor == tensor);
        read.all(|input| sharding.settled(tensor) == sharding.wanted(reader, input))
    };
    for index in 0..graph.operators.len() {
        let OperatorKind::Matmul { weight, .. } = graph.operators[index].kind else { continue };
        let product = graph.operators[index].outputs[0].tensor;
        let [bias_id] = consumers[product.0][..] else { continue };
        let bias = &graph.operators[bias_id.0];
        let same_block = bias.block == graph.operators[index].block;
        let whole = sharding.produced(product).partial_axes().next().is_none();
        let same_columns =
            bias.inputs.get(1).is_some_and(|parameter| parameter.axes.len() == column_count(graph, OperatorId(index)));
        if bias.kind != OperatorKind::BiasAdd || !same_block || !whole || !same_columns || !lies_as_wanted(product, bias_id) {
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
            && lies_as_wanted(result, relu_id)
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
    for index in 0..graph.operators.len() {
        if let Some(packing) = Packing::find(graph, &sharding, &consumers, OperatorId(index)) {
            packing.apply(graph, &mut fused, &mut dropped);
        }
    }
    remove(&mut fused, &dropped);
    (fused, sharding.without(&dropped))
}

/// Attention that can read its packed projection as it is, and write the gradient of that in one.
struct Packing {
    split: OperatorId,
    attention: OperatorId,
    /// The gradient of attention, and the join of what it makes, where the graph has gradients.
    backward: Option<(OperatorId, OperatorId)>,
}

impl Packing {
    fn find(graph: &Graph, sharding: &Sharding, consumers: &[Vec<OperatorId>], split: OperatorId) -> Option<Self> {
        let operator = |id: OperatorId| &graph.operators[id.0];
        if operator(split).kind != OperatorKind::Split {
            return None;
        }
        let is_attention = |id: &OperatorId| matches!(operator(*id).kind, OperatorKind::Attention { .. });
        let attention = consumers[operator(split).outputs.first()?.tensor.0].iter().copied().find(is_attention)?;
        let followers = |kind: fn(&OperatorKind) -> bool, forward: OperatorId| {
            (0..graph.operators.len())
                .map(OperatorId)
                .find(|&id| operator(id).forward == Some(forward) && kind(&operator(id).kind))
        };
        let gradient = followers(|kind| matches!(kind, OperatorKind::AttentionGradient { .. }), attention);
        let join = followers(|kind| *kind == OperatorKind::Join, split);
        let backward = match (gradient, join) {
            (None, None) => None,
            (gradient, join) => Some((gradient?, join?)),
        };
        // What lies in between must be read by the operators that are merged only, as it was made.
        let same_block = operator(split).block == operator(attention).block;
        let direct = |maker: OperatorId, output: usize, reader: OperatorId, input: usize| {
            let (Some(made), Some(read)) = (operator(maker).outputs.get(output), operator(reader).inputs.get(input)) else {
                return false;
            };
            let merged = |id: &OperatorId| *id == attention || backward.is_some_and(|(one, two)| [one, two].contains(id));
            made.tensor == read.tensor
                && consumers[made.tensor.0].iter().all(merged)
                && sharding.produced(made.tensor) == sharding.settled(made.tensor)
                && sharding.settled(made.tensor) == sharding.wanted(reader, read)
        };
        let forward_direct = (0..3).all(|part| direct(split, part, attention, part));
        let backward_direct = backward.is_none_or(|(gradient, join)| {
            (0..3).all(|part| direct(gradient, part, join, part) && direct(split, part, gradient, 1 + part))
        });
        // Rows of the projection are read by strides: its heads must be those of keys and queries alike.
        let ungrouped = operator(split).inputs[0].axes.len() == 5 && operator(attention).inputs[0].axes.len() == 4;
        // Of a packed projection keys and values could not be passed on without the queries.
        let is_ring = sharding.is_ring(attention);
        (same_block && ungrouped && !is_ring && forward_direct && backward_direct).then_some(Self { split, attention, backward })
    }

    fn apply(&self, graph: &Graph, fused: &mut Graph, dropped: &mut [bool]) {
        let pack = |kind: &mut OperatorKind| {
            if let OperatorKind::Attention { packed, .. } | OperatorKind::AttentionGradient { packed, .. } = kind {
                *packed = true;
            }
        };
        // The packed tensor is walked as q is, with its projections in the third place.
        let packed = |like: &Operand, tensor| {
            let mut axes = like.axes.clone();
            axes.insert(2, None);
            Operand { tensor, axes }
        };
        let whole = graph.operators[self.split.0].inputs[0].tensor;
        let attention = &mut fused.operators[self.attention.0];
        pack(&mut attention.kind);
        let q = packed(&attention.inputs[0], whole);
        attention.inputs.splice(0..3, [q]);
        dropped[self.split.0] = true;
        if let Some((gradient, join)) = self.backward {
            let whole_gradient = graph.operators[join.0].outputs[0].tensor;
            let gradient = &mut fused.operators[gradient.0];
            pack(&mut gradient.kind);
            let q = packed(&gradient.inputs[1], whole);
            gradient.inputs.splice(1..4, [q]);
            let dq = packed(&gradient.outputs[0], whole_gradient);
            gradient.outputs.splice(0..3, [dq]);
            dropped[join.0] = true;
        }
    }
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
