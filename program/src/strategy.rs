//! Strategies: which loop of each operator every mesh axis is laid along, and the placements that follow.
//!
//! `data` and `shard` take every operator's batch, `expert` the experts where there are any and else the batch, `context` the sequence. For
//! `tensor` operators follow their inputs: one whose input is sharded along a loop that may be shared out keeps that loop, and a product
//! of a whole input shares out its columns if the shards can stay until another product sums over them. On a transformer this gives
//! Megatron-LM's layout (Shoeybi et al. 2019), on a perceptron the alternation of columns and rows; no model is named here. With
//! sequence parallelism (Korthikanti et al. 2022) `tensor` takes the sequence of those that are left. A plan may ask for another loop of single
//! operators; those that it leaves out follow still.

mod asked;
mod checks;
mod choice;
mod sums;
mod tensor;

pub(crate) use asked::choices;

use crate::mesh::{Axis, StageMesh};
use crate::placement::{Placement, Placements};
use crate::plan::{ContextMethod, Layout, PlanError};
use foretell_models::{EXPERTS, Graph, LoopId, Operand, Operator, OperatorId, OperatorKind, Role, TensorId};

/// The loop along each axis within a stage, in the order of [`Axis::WITHIN_STAGE`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Strategy([Option<LoopId>; Axis::WITHIN_STAGE.len()]);

impl Strategy {
    /// The loop along an axis.
    pub(crate) fn get(self, axis: Axis) -> Option<LoopId> {
        Axis::WITHIN_STAGE.iter().position(|&one| one == axis).and_then(|slot| self.0[slot])
    }

    fn set(&mut self, axis: Axis, chosen: Option<LoopId>) {
        if let Some(slot) = Axis::WITHIN_STAGE.iter().position(|&one| one == axis) {
            self.0[slot] = chosen;
        }
    }

    /// One rank's extents of an operator's loops.
    pub(crate) fn local_extents(self, operator: &Operator, mesh: &StageMesh) -> Vec<usize> {
        let mut extents = operator.extents();
        for axis in Axis::WITHIN_STAGE {
            if let Some(LoopId(index)) = self.get(axis) {
                extents[index] /= mesh.size(axis);
            }
        }
        extents
    }

    /// How an operator must find an input, or leaves an output (where what lacks the loop is a partial sum).
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

/// How every operator is shared out, and so how every tensor lies.
#[derive(Clone, Debug)]
pub(crate) struct Sharding {
    strategies: Vec<Strategy>,
    /// For additions that keep partial sums as they are, and what makes operands of eight bits: the placements of all operands.
    kept: Vec<Option<Placements>>,
    /// How a tensor lies where it was made (parameters and inputs: where they are kept), after sums that are made at once.
    placements: Vec<Placements>,
    /// How its maker leaves a tensor, before sums are made.
    produced: Vec<Placements>,
    /// Of attention whose keys and values go round the ranks of `context` part by part: the loop over keys.
    rings: Vec<Option<LoopId>>,
}

impl Sharding {
    /// Chooses strategies for a graph with or without gradients.
    pub(crate) fn choose(graph: &Graph, mesh: &StageMesh, layout: &Layout) -> Result<Self, PlanError> {
        let mut chooser = Chooser::new(graph, mesh, layout);
        chooser.resolve_asked(&layout.operators)?;
        for index in 0..graph.operators.len() {
            chooser.operator(OperatorId(index))?;
        }
        chooser.tensor_is_used()?;
        chooser.axis_is_used(Axis::Context, "context", "sequence")?;
        chooser.axis_is_used(Axis::Expert, "expert", EXPERTS)?;
        Ok(chooser.sharding)
    }

    /// How an operator is shared out; an addition that keeps partial sums is not asked.
    pub(crate) fn strategy(&self, id: OperatorId) -> Strategy {
        self.strategies[id.0]
    }

    /// One rank's extents of an operator's loops.
    pub(crate) fn local_extents(&self, graph: &Graph, id: OperatorId, mesh: &StageMesh) -> Vec<usize> {
        let operator = &graph.operators[id.0];
        match self.kept[id.0] {
            Some(placements) => placements.local_shape(&operator.extents(), mesh),
            None => self.strategies[id.0].local_extents(operator, mesh),
        }
    }

    /// How an operator must find an input.
    pub(crate) fn wanted(&self, id: OperatorId, operand: &Operand) -> Placements {
        self.kept[id.0].unwrap_or_else(|| self.placements(id, operand, Placement::Replicate))
    }

    /// How an operator must find an input, or leaves an output, as its strategy has it.
    fn placements(&self, id: OperatorId, operand: &Operand, without_loop: Placement) -> Placements {
        let placements = self.strategies[id.0].placements(operand, without_loop);
        // What goes round a ring comes from, and goes home to, the rank of its positions.
        let keys = self.rings[id.0].and_then(|keys| operand.axes.iter().position(|&walked| walked == Some(keys)));
        keys.map_or(placements, |dimension| placements.with(Axis::Context, Placement::Shard(dimension)))
    }

    /// How an operator would leave an output that it does not have yet.
    pub(crate) fn left(&self, id: OperatorId, operand: &Operand) -> Placements {
        self.kept[id.0].unwrap_or_else(|| self.placements(id, operand, Placement::Partial))
    }

    /// Whether an operator is attention whose keys and values go round the ranks of `context`.
    pub(crate) fn is_ring(&self, id: OperatorId) -> bool {
        self.rings[id.0].is_some()
    }

    /// The same sharding of a graph from which operators were dropped.
    pub(crate) fn without(mut self, dropped: &[bool]) -> Self {
        let mut flags = dropped.iter();
        self.strategies.retain(|_| !flags.next().copied().unwrap_or(false));
        let mut flags = dropped.iter();
        self.kept.retain(|_| !flags.next().copied().unwrap_or(false));
        let mut flags = dropped.iter();
        self.rings.retain(|_| !flags.next().copied().unwrap_or(false));
        self
    }

    /// The same sharding of a graph to whose operators others were added, and to whose tensors these.
    pub(crate) fn with(mut self, origins: &[Origin], tensors: &[Placements]) -> Self {
        self.strategies = origins.iter().map(|one| one.of(&self.strategies, |_| Strategy::default())).collect();
        self.rings = origins.iter().map(|one| one.of(&self.rings, |_| None)).collect();
        self.kept = origins.iter().map(|one| one.of(&self.kept, Some)).collect();
        self.placements.extend(tensors);
        self.produced.extend(tensors);
        self
    }

    /// How a tensor's maker leaves it.
    pub(crate) fn produced(&self, tensor: TensorId) -> Placements {
        self.produced[tensor.0]
    }

    /// How a tensor lies once sums that are made at once are made; parameters and inputs: how they are kept.
    pub(crate) fn settled(&self, tensor: TensorId) -> Placements {
        self.placements[tensor.0]
    }
}

/// Where an operator of a changed graph comes from.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Origin {
    /// It was there.
    Was(OperatorId),
    /// It was not, and wants all that it reads so.
    Added(Placements),
}

impl Origin {
    fn of<T: Copy>(self, were: &[T], added: impl Fn(Placements) -> T) -> T {
        match self {
            Origin::Was(id) => were[id.0],
            Origin::Added(placements) => added(placements),
        }
    }
}

/// Whether it has a weight whose columns ranks may share out.
pub(crate) fn is_product(operator: &Operator) -> bool {
    matches!(
        operator.kind,
        OperatorKind::Matmul { .. }
            | OperatorKind::EightBitMatmul { .. }
            | OperatorKind::Convolution(_)
            | OperatorKind::ExpertMatmul
    )
}

/// For each tensor the operators that read it.
pub(crate) fn consumers(graph: &Graph) -> Vec<Vec<OperatorId>> {
    let mut consumers = vec![Vec::new(); graph.tensors.len()];
    for (index, operator) in graph.operators.iter().enumerate() {
        for input in &operator.inputs {
            consumers[input.tensor.0].push(OperatorId(index));
        }
    }
    consumers
}

/// For each tensor the operator that makes it (of several that add to a sum, the last).
pub(crate) fn producers(graph: &Graph) -> Vec<Option<OperatorId>> {
    let mut producers = vec![None; graph.tensors.len()];
    for (index, operator) in graph.operators.iter().enumerate() {
        for output in &operator.outputs {
            producers[output.tensor.0] = Some(OperatorId(index));
        }
    }
    producers
}

struct Chooser<'a> {
    graph: &'a Graph,
    mesh: &'a StageMesh,
    sequence_parallel: bool,
    context_method: ContextMethod,
    /// Whether `tensor` takes whole experts instead of parts of each.
    spreads_experts: bool,
    consumers: Vec<Vec<OperatorId>>,
    producers: Vec<Option<OperatorId>>,
    sharding: Sharding,
    parameter_placed: Vec<bool>,
    /// Of each tensor that is a gradient of a parameter, whether an operator has made some of it.
    has_gradient: Vec<bool>,
    /// What the plan asks of an operator, where it does: the loop along `tensor`, or that there is to be none.
    asked: Vec<Option<Option<LoopId>>>,
    /// Whether it asks anything of any.
    asks: bool,
}

impl<'a> Chooser<'a> {
    /// Before anything is chosen.
    fn new(graph: &'a Graph, mesh: &'a StageMesh, layout: &Layout) -> Self {
        Self {
            graph,
            mesh,
            sequence_parallel: layout.sequence_parallel,
            context_method: layout.context_method,
            spreads_experts: layout.expert_tensor == Some(1) && mesh.size(Axis::Tensor) > 1,
            consumers: consumers(graph),
            producers: producers(graph),
            sharding: Sharding {
                strategies: vec![Strategy::default(); graph.operators.len()],
                kept: vec![None; graph.operators.len()],
                placements: vec![Placements::default(); graph.tensors.len()],
                produced: vec![Placements::default(); graph.tensors.len()],
                rings: vec![None; graph.operators.len()],
            },
            parameter_placed: vec![false; graph.tensors.len()],
            has_gradient: vec![false; graph.tensors.len()],
            asked: vec![None; graph.operators.len()],
            asks: false,
        }
    }

    fn operator(&mut self, id: OperatorId) -> Result<(), PlanError> {
        let operator = &self.graph.operators[id.0];
        let strategy = match operator.forward {
            Some(forward) => self.sharding.strategies[forward.0],
            None => self.choose(id, operator)?,
        };
        if operator.kind == OperatorKind::Add {
            self.sharding.kept[id.0] = self.common_partial(operator);
        }
        self.sharding.strategies[id.0] = strategy;
        self.sharding.rings[id.0] = match operator.forward {
            Some(forward) if operator.kind.is_attention() => self.sharding.rings[forward.0],
            Some(_) => None,
            None => self.ring(operator, strategy),
        };
        for input in &operator.inputs {
            let role = &self.graph.tensor(input.tensor).role;
            let kept = matches!(role, Role::Parameter(_) | Role::Running | Role::Input(_));
            if kept && !self.parameter_placed[input.tensor.0] {
                self.parameter_placed[input.tensor.0] = true;
                let mut placements = strategy.placements(input, Placement::Replicate);
                if matches!(role, Role::Input(_)) {
                    // Whole samples are read; who wants a part of one cuts it out.
                    let others = Axis::WITHIN_STAGE.iter().filter(|axis| !Axis::BATCH.contains(axis));
                    placements = others.fold(placements, |kept, &axis| kept.with(axis, Placement::Replicate));
                }
                self.sharding.placements[input.tensor.0] = placements;
            }
        }
        for output in &operator.outputs {
            let produced = self.sharding.kept[id.0].unwrap_or_else(|| self.sharding.placements(id, output, Placement::Partial));
            self.gradients_agree(output.tensor, produced)?;
            self.sharding.produced[output.tensor.0] = produced;
            self.sharding.placements[output.tensor.0] = self.settle(output.tensor, produced);
        }
        Ok(())
    }
}
