//! Fusion: operators whose work is one pass over memory when a kernel does them together. A compiler pass over the graph, so that
//! a stack that fuses and one that does not are different Programs. Each file knows one kind of what is merged: [`epilogues`] what products do
//! beside themselves, [`packing`] what attention reads without its being split.

mod epilogues;
mod packing;

use crate::plan::{Plan, Recompute};
use crate::strategy::{Sharding, consumers, producers};
use foretell_models::{Graph, OperatorId, TensorId};

/// What of the fusions that there are a plan has. A bias and a ReLU into their product, and packed attention, all have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Fusions {
    /// A GELU into the product before it.
    pub(crate) gelu: bool,
    /// On through a GELU, in the gradient of the product after it.
    pub(crate) gradients: bool,
    /// A bias's gradient beside its weight's: not where that is of operands of eight bits, which would be summed up as they are rounded.
    pub(crate) bias_gradients: bool,
}

impl Fusions {
    /// Those of a plan. What else other stacks fuse is in their profiles, as factors of what apart would take. Where a product's result is kept
    /// and what follows it is made again, a GELU is not the product's: it would be kept with it.
    pub(crate) fn of(plan: &Plan) -> Self {
        let is_own = plan.stack.is_own();
        let keeps_products = matches!(plan.layout.recompute, Recompute::AllBut(kept) if kept.products || kept.odd_products);
        Self { gelu: is_own && !keeps_products, gradients: is_own, bias_gradients: is_own && !plan.quantises() }
    }
}

/// Merges what a kernel does in one pass where nothing is to be converted in between. Operators keep the shares that `sharding` gave them.
pub(crate) fn fuse(graph: &Graph, sharding: Sharding, fusions: Fusions) -> (Graph, Sharding) {
    let mut fusion = Fusion::new(graph, &sharding);
    fusion.epilogues(fusions);
    fusion.packed_attention();
    let Fusion { mut fused, dropped, .. } = fusion;
    remove(&mut fused, &dropped);
    (fused, sharding.without(&dropped))
}

/// A graph that is being fused.
struct Fusion<'a> {
    /// As it was.
    graph: &'a Graph,
    sharding: &'a Sharding,
    /// For each tensor its readers and its maker, as they were.
    consumers: Vec<Vec<OperatorId>>,
    producers: Vec<Option<OperatorId>>,
    /// As it is by now, with the operators that are dropped still in it.
    fused: Graph,
    dropped: Vec<bool>,
}

impl<'a> Fusion<'a> {
    fn new(graph: &'a Graph, sharding: &'a Sharding) -> Self {
        let dropped = vec![false; graph.operators.len()];
        Self { graph, sharding, consumers: consumers(graph), producers: producers(graph), fused: graph.clone(), dropped }
    }

    /// Whether a reader finds a tensor as its maker left it.
    fn lies_as_wanted(&self, tensor: TensorId, reader: OperatorId) -> bool {
        let mut read = self.graph.operators[reader.0].inputs.iter().filter(|input| input.tensor == tensor);
        let left = self.sharding.produced(tensor);
        left == self.sharding.settled(tensor) && read.all(|input| left == self.sharding.wanted(reader, input))
    }

    /// Whether two operators run in the same pass through the same block.
    fn is_beside(&self, one: OperatorId, other: OperatorId) -> bool {
        let [one, other] = [one, other].map(|id| &self.graph.operators[id.0]);
        one.block == other.block && one.pass == other.pass
    }
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
