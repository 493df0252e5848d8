//! Fusion: merging operators that one kernel does in a single pass over memory.
//!
//! It is a compiler pass, so stacks with and without a fusion have different Programs.
//! [`epilogues`] merges biases, activations and gradients into matrix products; [`packing`] merges
//! the split of a packed projection into attention. It must not know devices: a plan's options say
//! which fusions a stack makes.

mod epilogues;
mod packing;

use crate::plan::{Plan, Recompute};
use crate::strategy::{Sharding, consumers, producers, retain_others};
use foretell_models::{Graph, OperatorId, TensorId};

/// The optional fusions of a plan. All plans merge a bias and a ReLU into their product, and pack
/// attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Fusions {
    /// Merge a GELU into the product before it.
    pub(crate) gelu: bool,
    /// Merge a GELU's gradient into the gradient of the product after it.
    pub(crate) gradients: bool,
    /// Merge a bias's gradient into that of the weight. Not with eight-bit operands: the bias's
    /// gradient would be the sum of rounded values.
    pub(crate) bias_gradients: bool,
}

impl Fusions {
    /// The fusions of a plan. Further fusions of other stacks are factors in their profiles. If
    /// recomputation keeps the results of products, a GELU stays separate: merged into a product,
    /// its result would be kept as well.
    pub(crate) fn of(plan: &Plan) -> Self {
        let is_own = plan.stack.is_own();
        let keeps_products = matches!(plan.layout.recompute, Recompute::AllBut(kept) if kept.products || kept.odd_products);
        Self { gelu: is_own && !keeps_products, gradients: is_own, bias_gradients: is_own && !plan.quantises() }
    }
}

/// Merges operators between which no placement is converted. Strategies and placements stay as in
/// `sharding`.
pub(crate) fn fuse(graph: &Graph, sharding: Sharding, fusions: Fusions) -> (Graph, Sharding) {
    let mut fusion = Fusion::new(graph, &sharding);
    fusion.epilogues(fusions);
    fusion.packed_attention();
    let Fusion { mut fused, dropped, .. } = fusion;
    remove(&mut fused, &dropped);
    (fused, sharding.without(&dropped))
}

/// A graph under fusion.
struct Fusion<'a> {
    /// The original graph.
    graph: &'a Graph,
    sharding: &'a Sharding,
    /// The original readers of each tensor.
    consumers: Vec<Vec<OperatorId>>,
    /// The original producer of each tensor.
    producers: Vec<Option<OperatorId>>,
    /// The graph so far. Dropped operators are still in it.
    fused: Graph,
    /// By operator: whether it was merged into another.
    dropped: Vec<bool>,
}

impl<'a> Fusion<'a> {
    fn new(graph: &'a Graph, sharding: &'a Sharding) -> Self {
        let dropped = vec![false; graph.operators.len()];
        Self { graph, sharding, consumers: consumers(graph), producers: producers(graph), fused: graph.clone(), dropped }
    }

    /// Whether a reader reads a tensor in the placements in which its producer leaves it.
    fn needs_no_conversion(&self, tensor: TensorId, reader: OperatorId) -> bool {
        let mut inputs = self.graph.operators[reader.0].inputs.iter().filter(|input| input.tensor == tensor);
        let produced = self.sharding.produced(tensor);
        produced == self.sharding.settled(tensor) && inputs.all(|input| produced == self.sharding.wanted(reader, input))
    }

    /// Whether two operators run in the same pass through the same block.
    fn are_in_one_pass(&self, one: OperatorId, other: OperatorId) -> bool {
        let [one, other] = [one, other].map(|id| &self.graph.operators[id.0]);
        one.block == other.block && one.pass == other.pass
    }
}

/// Removes operators and renumbers the references to the others. Gradients of a removed operator
/// lose their reference.
fn remove(graph: &mut Graph, dropped: &[bool]) {
    let mut renumbered = Vec::with_capacity(dropped.len());
    let mut remaining = 0;
    for &is_dropped in dropped {
        renumbered.push(OperatorId(remaining));
        remaining += usize::from(!is_dropped);
    }
    retain_others(&mut graph.operators, dropped);
    for operator in &mut graph.operators {
        operator.forward = operator.forward.filter(|forward| !dropped[forward.0]).map(|forward| renumbered[forward.0]);
    }
}
