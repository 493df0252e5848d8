//! Strategies: the loop of each operator that every mesh axis shards, and the placements of tensors
//! that follow from them.
//!
//! `data` and `shard` shard the batch of every operator, `expert` the experts or else the batch,
//! `context` the sequence. For `tensor`, operators follow their inputs: an operator shards the loop
//! along which an input is sharded, if that loop can be sharded. A matrix product of whole inputs
//! shards its columns, if the shards can stay until another product sums over them. On a
//! transformer this gives Megatron-LM's layout (Shoeybi et al. 2019), on a perceptron alternating
//! columns and rows. No model is named here.
//!
//! With sequence parallelism (Korthikanti et al. 2022), `tensor` shards the sequence of the
//! remaining operators. A plan may request other loops for single operators; all others still
//! follow their inputs. It must not know pipeline stages, the optimizer or devices.

mod checks;
mod chooser;
mod order;
mod requests;
mod rules;
mod sums;
mod tensor;

pub(crate) use requests::choices;

use crate::mesh::{Axis, StageMesh};
use crate::placement::{Placement, Placements};
use crate::plan::{Layout, PlanError};
use foretell_models::{Graph, Kernel, LoopId, Operand, Operator, OperatorId, SEQUENCE, TensorId, Zigzag};

/// The strategy of an operator: the loop that each axis within a stage shards, in the order of
/// [`Axis::WITHIN_STAGE`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Strategy([Option<LoopId>; Axis::WITHIN_STAGE.len()]);

impl Strategy {
    /// The loop that an axis shards.
    pub(crate) fn get(self, axis: Axis) -> Option<LoopId> {
        self.0.get(axis.index()).copied().flatten()
    }

    fn set(&mut self, axis: Axis, chosen: Option<LoopId>) {
        if let Some(own) = self.0.get_mut(axis.index()) {
            *own = chosen;
        }
    }

    /// The extents of an operator's loops on one rank.
    pub(crate) fn local_extents(self, operator: &Operator, mesh: &StageMesh) -> Vec<usize> {
        let mut extents = operator.extents();
        for axis in Axis::WITHIN_STAGE {
            if let Some(LoopId(index)) = self.get(axis) {
                extents[index] /= mesh.size(axis);
            }
        }
        extents
    }

    /// The placements of an operand. Along an axis that shards a loop which the operand does not
    /// have, the placement is `without_loop`: [`Placement::Replicate`] for an input,
    /// [`Placement::Partial`] for an output.
    pub(crate) fn placements(self, operand: &Operand, without_loop: Placement) -> Placements {
        let mut placements = Placements::default();
        for axis in Axis::WITHIN_STAGE {
            if let Some(chosen) = self.get(axis) {
                let dimension = operand.axes.iter().position(|&walked| walked == Some(chosen));
                placements = placements.with(axis, dimension.map_or(without_loop, Placement::Shard));
            }
        }
        placements
    }
}

/// The strategies of all operators of a graph, and the placements of all tensors.
#[derive(Clone, Debug)]
pub(crate) struct Sharding {
    strategies: Vec<Strategy>,
    /// By operator: the placements of all its operands, in place of those of its strategy. For
    /// additions of partial sums, and for quantisation.
    fixed: Vec<Option<Placements>>,
    /// By tensor: the placements after those partial sums are reduced that are not left for later.
    /// For parameters and inputs, the placements in which they are kept.
    settled: Vec<Placements>,
    /// By tensor: the placements in which its producer leaves it.
    produced: Vec<Placements>,
    /// By operator: the loop over keys, for ring attention.
    rings: Vec<Option<LoopId>>,
    /// The order in which a sequence's positions are stored; `None` if it is the order of
    /// positions.
    order: Option<Zigzag>,
}

impl Sharding {
    /// Chooses the strategies of a graph, with or without gradients.
    pub(crate) fn choose(graph: &Graph, mesh: &StageMesh, layout: &Layout) -> Result<Self, PlanError> {
        chooser::choose(graph, mesh, layout)
    }

    /// A sharding in which nothing is sharded.
    fn replicated(graph: &Graph) -> Self {
        Self {
            strategies: vec![Strategy::default(); graph.operators.len()],
            fixed: vec![None; graph.operators.len()],
            settled: vec![Placements::default(); graph.tensors.len()],
            produced: vec![Placements::default(); graph.tensors.len()],
            rings: vec![None; graph.operators.len()],
            order: None,
        }
    }

    /// The strategy of an operator. It does not apply to additions of partial sums and to
    /// quantisation.
    pub(crate) fn strategy(&self, id: OperatorId) -> Strategy {
        self.strategies[id.0]
    }

    /// The extents of an operator's loops on one rank.
    pub(crate) fn local_extents(&self, graph: &Graph, id: OperatorId, mesh: &StageMesh) -> Vec<usize> {
        let operator = &graph.operators[id.0];
        match self.fixed[id.0] {
            Some(placements) => placements.local_shape(&operator.extents(), mesh),
            None => self.strategies[id.0].local_extents(operator, mesh),
        }
    }

    /// The placements in which an operator reads an input.
    pub(crate) fn wanted(&self, id: OperatorId, operand: &Operand) -> Placements {
        self.fixed[id.0].unwrap_or_else(|| self.placements(id, operand, Placement::Replicate))
    }

    /// The placements in which an operator leaves an output, or would leave one that is yet to be
    /// added.
    pub(crate) fn output_placements(&self, id: OperatorId, operand: &Operand) -> Placements {
        self.fixed[id.0].unwrap_or_else(|| self.placements(id, operand, Placement::Partial))
    }

    fn placements(&self, id: OperatorId, operand: &Operand, without_loop: Placement) -> Placements {
        let placements = self.strategies[id.0].placements(operand, without_loop);
        // In ring attention, keys and values start and end on the rank that has their positions.
        let keys = self.rings[id.0].and_then(|keys| operand.axes.iter().position(|&walked| walked == Some(keys)));
        keys.map_or(placements, |dimension| placements.with(Axis::Context, Placement::Shard(dimension)))
    }

    /// The order in which an operator's positions are stored, or `None` if it is the order of
    /// positions.
    pub(crate) fn order_of(&self, operator: &Operator) -> Option<Zigzag> {
        self.order.filter(|_| operator.find_loop(SEQUENCE).is_some())
    }

    /// The order in which a tensor's positions are stored, or `None` if it is the order of
    /// positions.
    pub(crate) fn order_of_tensor(&self, graph: &Graph, tensor: TensorId) -> Option<Zigzag> {
        let has_positions = |order: &Zigzag| {
            graph
                .tensor(tensor)
                .dimensions
                .iter()
                .any(|dimension| dimension.name == SEQUENCE && dimension.extent == order.positions())
        };
        self.order.filter(has_positions)
    }

    /// Whether an operator is ring attention.
    pub(crate) fn is_ring(&self, id: OperatorId) -> bool {
        self.rings[id.0].is_some()
    }

    /// This sharding for the graph without some operators.
    pub(crate) fn without(mut self, dropped: &[bool]) -> Self {
        retain_others(&mut self.strategies, dropped);
        retain_others(&mut self.fixed, dropped);
        retain_others(&mut self.rings, dropped);
        self
    }

    /// This sharding for a graph with more operators, and with more tensors that have these
    /// placements.
    pub(crate) fn with(mut self, sources: &[OperatorSource], tensors: &[Placements]) -> Self {
        self.strategies = sources.iter().map(|source| source.take(&self.strategies, |_| Strategy::default())).collect();
        self.rings = sources.iter().map(|source| source.take(&self.rings, |_| None)).collect();
        self.fixed = sources.iter().map(|source| source.take(&self.fixed, Some)).collect();
        self.settled.extend(tensors);
        self.produced.extend(tensors);
        self
    }

    /// The placements in which a tensor's producer leaves it.
    pub(crate) fn produced(&self, tensor: TensorId) -> Placements {
        self.produced[tensor.0]
    }

    /// The placements of a tensor after those partial sums are reduced that are not left for later.
    /// For parameters and inputs, the placements in which they are kept.
    pub(crate) fn settled(&self, tensor: TensorId) -> Placements {
        self.settled[tensor.0]
    }
}

/// Keeps the items that are not dropped; `dropped` has a flag for each.
pub(crate) fn retain_others<T>(items: &mut Vec<T>, dropped: &[bool]) {
    let mut flags = dropped.iter();
    items.retain(|_| !flags.next().expect("invariant: each item has a flag"));
}

/// The source of an operator in a changed graph.
#[derive(Clone, Copy, Debug)]
pub(crate) enum OperatorSource {
    /// An operator of the original graph.
    Original(OperatorId),
    /// A new operator, all of whose operands have these placements.
    Added(Placements),
}

impl OperatorSource {
    fn take<T: Copy>(self, originals: &[T], added: impl Fn(Placements) -> T) -> T {
        match self {
            OperatorSource::Original(id) => originals[id.0],
            OperatorSource::Added(placements) => added(placements),
        }
    }
}

/// Whether an operator has a weight whose columns can be sharded.
pub(crate) fn is_product(operator: &Operator) -> bool {
    matches!(
        operator.kind,
        Kernel::Matmul { .. } | Kernel::EightBitMatmul { .. } | Kernel::Convolution(_) | Kernel::ExpertMatmul { .. }
    )
}

/// The operators that read each tensor, indexed by tensor.
pub(crate) fn consumers(graph: &Graph) -> Vec<Vec<OperatorId>> {
    let mut consumers = vec![Vec::new(); graph.tensors.len()];
    for (index, operator) in graph.operators.iter().enumerate() {
        for input in &operator.inputs {
            consumers[input.tensor.0].push(OperatorId(index));
        }
    }
    consumers
}

/// The operator that writes each tensor, indexed by tensor. For a sum that several operators add
/// to, the last.
pub(crate) fn producers(graph: &Graph) -> Vec<Option<OperatorId>> {
    let mut producers = vec![None; graph.tensors.len()];
    for (index, operator) in graph.operators.iter().enumerate() {
        for output in &operator.outputs {
            producers[output.tensor.0] = Some(OperatorId(index));
        }
    }
    producers
}
