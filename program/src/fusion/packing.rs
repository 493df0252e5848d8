//! Packed attention: attention whose queries, keys and values are split from one projection reads
//! the projection directly, if nothing is converted in between.

use super::Fusion;
use crate::strategy::Sharding;
use foretell_models::{Graph, Kernel, Operand, OperatorId};

impl Fusion<'_> {
    pub(super) fn packed_attention(&mut self) {
        for index in 0..self.graph.operators.len() {
            if let Some(packing) = Packing::find(self.graph, self.sharding, &self.consumers, OperatorId(index)) {
                packing.apply(self.graph, &mut self.fused, &mut self.dropped);
            }
        }
    }
}

/// Attention that can read its packed projection, and write the gradient of the projection.
struct Packing {
    split: OperatorId,
    attention: OperatorId,
    /// The gradient of attention, and the join of its outputs, if the graph has gradients.
    backward: Option<(OperatorId, OperatorId)>,
}

impl Packing {
    fn find(graph: &Graph, sharding: &Sharding, consumers: &[Vec<OperatorId>], split: OperatorId) -> Option<Self> {
        let operator = |id: OperatorId| &graph.operators[id.0];
        if !matches!(operator(split).kind, Kernel::Split { .. }) {
            return None;
        }
        let is_attention = |id: &OperatorId| matches!(operator(*id).kind, Kernel::Attention(_));
        let attention = consumers[operator(split).outputs.first()?.tensor.0].iter().copied().find(is_attention)?;
        let gradient_of = |is_wanted: fn(&Kernel) -> bool, forward: OperatorId| {
            (0..graph.operators.len())
                .map(OperatorId)
                .find(|&id| operator(id).forward == Some(forward) && is_wanted(&operator(id).kind))
        };
        let gradient = gradient_of(|kind| matches!(kind, Kernel::AttentionGradient(_)), attention);
        let join = gradient_of(|kind| matches!(kind, Kernel::Join { .. }), split);
        let backward = match (gradient, join) {
            (None, None) => None,
            (gradient, join) => Some((gradient?, join?)),
        };
        // Tensors in between must be read by the merged operators only, in the placements in which
        // they are produced.
        let same_block = operator(split).block == operator(attention).block;
        let direct = |maker: OperatorId, output: usize, reader: OperatorId, input: usize| {
            let (Some(made), Some(read)) = (operator(maker).outputs.get(output), operator(reader).inputs.get(input)) else {
                return false;
            };
            let merged =
                |id: &OperatorId| *id == attention || backward.is_some_and(|(gradient, join)| [gradient, join].contains(id));
            made.tensor == read.tensor
                && consumers[made.tensor.0].iter().all(merged)
                && sharding.produced(made.tensor) == sharding.settled(made.tensor)
                && sharding.settled(made.tensor) == sharding.wanted(reader, read)
        };
        let forward_direct = (0..3).all(|part| direct(split, part, attention, part));
        let backward_direct = backward.is_none_or(|(gradient, join)| {
            (0..3).all(|part| direct(gradient, part, join, part) && direct(split, part, gradient, 1 + part))
        });
        // The kernel reads the projection by strides, so queries, keys and values must have equal
        // heads.
        let ungrouped = operator(split).inputs[0].axes.len() == 5 && operator(attention).inputs[0].axes.len() == 4;
        // Ring attention passes keys and values on without the queries, so the three cannot stay
        // packed.
        let is_ring = sharding.is_ring(attention);
        (same_block && ungrouped && !is_ring && forward_direct && backward_direct).then_some(Self { split, attention, backward })
    }

    fn apply(&self, graph: &Graph, fused: &mut Graph, dropped: &mut [bool]) {
        let pack = |kind: &mut Kernel| {
            if let Kernel::Attention(sizes) | Kernel::AttentionGradient(sizes) = kind {
                sizes.packed = true;
            }
        };
        // The packed tensor has the dimensions of q, with the three projections as an additional
        // third one.
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
