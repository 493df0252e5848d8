//! Strategies: which loop of each operator every mesh axis is laid along, and the placements that follow.
//!
//! `data` takes every operator's batch. For `tensor`, where a plan does not say otherwise, operators follow their inputs: one whose input is
//! sharded along a loop that may be shared out keeps that loop, and a product of a whole input shares out its columns if
//! the shards can stay until another product sums over them. On a transformer this gives Megatron-LM's layout (Shoeybi et al.
//! 2019), on a perceptron the alternation of columns and rows; no model is named here.

use crate::mesh::{Axis, Mesh};
use crate::placement::{Placement, Placements};
use crate::plan::PlanError;
use foretell_models::{BATCH, Extent, Graph, LoopId, Operand, Operator, OperatorId, OperatorKind, Pass, Role, TensorId};

/// The loop along each axis within a stage, in the order of [`Axis::WITHIN_STAGE`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Strategy([Option<LoopId>; 4]);

impl Strategy {
    fn get(self, axis: Axis) -> Option<LoopId> {
        Axis::WITHIN_STAGE.iter().position(|&one| one == axis).and_then(|slot| self.0[slot])
    }

    fn set(&mut self, axis: Axis, chosen: Option<LoopId>) {
        if let Some(slot) = Axis::WITHIN_STAGE.iter().position(|&one| one == axis) {
            self.0[slot] = chosen;
        }
    }

    /// One rank's extents of an operator's loops.
    pub(crate) fn local_extents(self, operator: &Operator, mesh: &Mesh) -> Vec<usize> {
        let mut extents = operator.extents();
        for axis in Axis::WITHIN_STAGE {
            if let Some(LoopId(index)) = self.get(axis) {
                extents[index] /= mesh.size(axis);
            }
        }
        extents
    }

    /// How an operator must find an input, or leaves an output (where what lacks the loop is a partial sum).
    fn placements(self, operand: &Operand, without_loop: Placement) -> Placements {
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
    /// For additions that keep partial sums as they are: the placements of all operands.
    kept: Vec<Option<Placements>>,
    /// How a tensor lies where it was made (parameters and inputs: where they are kept), after sums that are made at once.
    placements: Vec<Placements>,
    /// How its maker leaves a tensor, before sums are made.
    produced: Vec<Placements>,
}

impl Sharding {
    /// Chooses strategies for a graph with or without gradients.
    pub(crate) fn choose(graph: &Graph, mesh: &Mesh) -> Result<Self, PlanError> {
        let mut chooser = Chooser {
            graph,
            mesh,
            consumers: consumers(graph),
            makers: makers(graph),
            sharding: Sharding {
                strategies: vec![Strategy::default(); graph.operators.len()],
                kept: vec![None; graph.operators.len()],
                placements: vec![Placements::default(); graph.tensors.len()],
                produced: vec![Placements::default(); graph.tensors.len()],
            },
            parameter_placed: vec![false; graph.tensors.len()],
        };
        for index in 0..graph.operators.len() {
            chooser.operator(OperatorId(index))?;
        }
        chooser.tensor_is_used()?;
        Ok(chooser.sharding)
    }

    /// One rank's extents of an operator's loops.
    pub(crate) fn local_extents(&self, graph: &Graph, id: OperatorId, mesh: &Mesh) -> Vec<usize> {
        let operator = &graph.operators[id.0];
        match self.kept[id.0] {
            Some(placements) => placements.local_shape(&operator.extents(), mesh),
            None => self.strategies[id.0].local_extents(operator, mesh),
        }
    }

    /// How an operator must find an input.
    pub(crate) fn wanted(&self, id: OperatorId, operand: &Operand) -> Placements {
        self.kept[id.0].unwrap_or_else(|| self.strategies[id.0].placements(operand, Placement::Replicate))
    }

    /// The same sharding of a graph from which operators were dropped.
    pub(crate) fn without(mut self, dropped: &[bool]) -> Self {
        let mut flags = dropped.iter();
        self.strategies.retain(|_| !flags.next().copied().unwrap_or(false));
        let mut flags = dropped.iter();
        self.kept.retain(|_| !flags.next().copied().unwrap_or(false));
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

/// Whether it has a weight whose columns ranks may share out.
fn is_product(operator: &Operator) -> bool {
    matches!(operator.kind, OperatorKind::Matmul { .. } | OperatorKind::Convolution(_) | OperatorKind::ExpertMatmul)
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
pub(crate) fn makers(graph: &Graph) -> Vec<Option<OperatorId>> {
    let mut makers = vec![None; graph.tensors.len()];
    for (index, operator) in graph.operators.iter().enumerate() {
        for output in &operator.outputs {
            makers[output.tensor.0] = Some(OperatorId(index));
        }
    }
    makers
}

struct Chooser<'a> {
    graph: &'a Graph,
    mesh: &'a Mesh,
    consumers: Vec<Vec<OperatorId>>,
    makers: Vec<Option<OperatorId>>,
    sharding: Sharding,
    parameter_placed: Vec<bool>,
}

impl Chooser<'_> {
    fn operator(&mut self, id: OperatorId) -> Result<(), PlanError> {
        let operator = &self.graph.operators[id.0];
        let strategy = match operator.forward {
            Some(forward) => self.sharding.strategies[forward.0],
            None => self.choose(operator)?,
        };
        if operator.kind == OperatorKind::Add {
            self.sharding.kept[id.0] = self.common_partial(operator);
        }
        self.sharding.strategies[id.0] = strategy;
        for input in &operator.inputs {
            let kept = matches!(self.graph.tensor(input.tensor).role, Role::Parameter(_) | Role::Running | Role::Input(_));
            if kept && !self.parameter_placed[input.tensor.0] {
                self.parameter_placed[input.tensor.0] = true;
                self.sharding.placements[input.tensor.0] = strategy.placements(input, Placement::Replicate);
            }
        }
        for output in &operator.outputs {
            let produced = self.sharding.kept[id.0].unwrap_or_else(|| strategy.placements(output, Placement::Partial));
            self.sharding.produced[output.tensor.0] = produced;
            self.sharding.placements[output.tensor.0] = self.settle(output.tensor, produced);
        }
        Ok(())
    }

    /// An addition of partial sums is itself a partial sum: making one sum instead of two.
    fn common_partial(&self, operator: &Operator) -> Option<Placements> {
        let mut all = operator.inputs.iter().map(|input| self.sharding.placements[input.tensor.0]);
        let first = all.next()?;
        (first.partial_axes().next().is_some() && all.all(|other| other == first)).then_some(first)
    }

    /// Partial sums of activations are made at once, and every rank has the whole then (who wants a shard of it cuts that out); only where
    /// all who read them are additions of sums that lie alike do they wait. Sums over the batch wait for the end of the step.
    fn settle(&self, tensor: TensorId, produced: Placements) -> Placements {
        if self.graph.tensor(tensor).role != Role::Activation {
            return produced;
        }
        let consumers = &self.consumers[tensor.0];
        let only_additions = !consumers.is_empty()
            && consumers.iter().all(|&id| self.graph.operators[id.0].kind == OperatorKind::Add)
            && consumers.iter().all(|&id| {
                let inputs = &self.graph.operators[id.0].inputs;
                inputs.iter().all(|input| input.tensor == tensor || self.will_be_produced(input.tensor) == produced)
            });
        if only_additions {
            return produced;
        }
        produced.partial_axes().fold(produced, |settled, axis| settled.with(axis, Placement::Replicate))
    }

    /// How a tensor's maker leaves it or, when its turn has not come, will leave it: a gradient operator shares its forward operator's strategy.
    fn will_be_produced(&self, tensor: TensorId) -> Placements {
        let maker = self.makers[tensor.0].map(|id| &self.graph.operators[id.0]);
        let forward = maker.and_then(|maker| maker.forward);
        match (maker, forward) {
            (Some(maker), Some(forward)) => maker
                .outputs
                .iter()
                .find(|output| output.tensor == tensor)
                .map(|output| self.sharding.strategies[forward.0].placements(output, Placement::Partial))
                .unwrap_or_default(),
            _ => self.sharding.produced[tensor.0],
        }
    }

    fn choose(&self, operator: &Operator) -> Result<Strategy, PlanError> {
        let mut strategy = Strategy::default();
        let data = self.mesh.size(Axis::Data);
        if data > 1
            && let Some(batch) = operator.find_loop(BATCH)
        {
            let extent = operator.loops[batch.0].extent;
            if !extent.is_multiple_of(data) {
                return Err(PlanError::Indivisible {
                    what: format!("the batch of `{}`", operator.name),
                    value: extent,
                    by: "data".into(),
                    divisor: data,
                    hint: "choose a micro-batch that is a multiple of `batch_norm_group`".into(),
                });
            }
            strategy.set(Axis::Data, Some(batch));
        }
        if self.mesh.size(Axis::Tensor) > 1 {
            strategy.set(Axis::Tensor, self.tensor_loop(operator));
        }
        Ok(strategy)
    }

    /// Refuses ranks along `tensor` that would all do the same, since nothing of the model could be shared out among them.
    fn tensor_is_used(&self) -> Result<(), PlanError> {
        let divisor = self.mesh.size(Axis::Tensor);
        let is_used = self.sharding.strategies.iter().any(|strategy| strategy.get(Axis::Tensor).is_some());
        if divisor == 1 || is_used {
            return Ok(());
        }
        let products = self.graph.operators.iter().filter(|operator| is_product(operator) && operator.pass == Pass::Forward);
        let mut columns = products.flat_map(|operator| operator.loops.iter().map(move |one| (operator, one)));
        let found = columns
            .find(|(_, one)| one.role == Extent::Columns && one.shardable && !one.extent.is_multiple_of(divisor))
            .map(|(operator, one)| (format!("`{}` of `{}`", one.name, operator.name), one.extent));
        match found {
            Some((what, value)) => Err(PlanError::Indivisible {
                what,
                value,
                by: "tensor".into(),
                divisor,
                hint: format!("nor does any other width of `{}`: use `tensor: 1`, or what divides {value}", self.graph.name),
            }),
            None => Err(PlanError::Invalid {
                field: "tensor",
                reason: format!("`{}` has no width that {divisor} ranks could share out", self.graph.name),
                hint: "use `tensor: 1`".into(),
            }),
        }
    }

    /// The loop along `tensor`: that of a sharded input, or for a product of whole inputs its columns if that pays.
    fn tensor_loop(&self, operator: &Operator) -> Option<LoopId> {
        for input in &operator.inputs {
            let tensor = self.graph.tensor(input.tensor);
            if tensor.role != Role::Activation {
                continue;
            }
            if let Placement::Shard(dimension) = self.sharding.placements[input.tensor.0].get(Axis::Tensor)
                && let Some(walked) = input.axes[dimension]
                && self.can_share(operator, walked)
            {
                return Some(walked);
            }
        }
        if !is_product(operator) {
            return None;
        }
        // A weight that another operator keeps whole stays whole: a language model's tied head.
        let weight = &operator.inputs[1];
        if self.parameter_placed[weight.tensor.0] {
            return None;
        }
        let output = &operator.outputs[0];
        (0..operator.loops.len()).map(LoopId).find(|&column| {
            operator.loops[column.0].role == Extent::Columns
                && self.can_share(operator, column)
                && output
                    .axes
                    .iter()
                    .position(|&walked| walked == Some(column))
                    .is_some_and(|dimension| self.stays_sharded(output.tensor, dimension))
        })
    }

    fn can_share(&self, operator: &Operator, chosen: LoopId) -> bool {
        let one = &operator.loops[chosen.0];
        one.shardable && one.extent.is_multiple_of(self.mesh.size(Axis::Tensor))
    }

    /// Whether shards of `dimension` can be used as they are until products have summed over them.
    fn stays_sharded(&self, tensor: TensorId, dimension: usize) -> bool {
        let mut seen = vec![(tensor, dimension)];
        let mut next = 0;
        let mut summed = false;
        while let Some(&(tensor, dimension)) = seen.get(next) {
            next += 1;
            for &id in &self.consumers[tensor.0] {
                let operator = &self.graph.operators[id.0];
                if operator.pass != Pass::Forward {
                    continue;
                }
                let Some(input) = operator.inputs.iter().find(|input| input.tensor == tensor) else { continue };
                let Some(walked) = input.axes[dimension] else { return false };
                if !self.can_share(operator, walked) {
                    return false;
                }
                if operator.loops[walked.0].role == Extent::Contracted {
                    summed = true;
                    continue;
                }
                let Some(output) = operator.outputs.first() else { continue };
                match output.axes.iter().position(|&axis| axis == Some(walked)) {
                    Some(dimension) if !seen.contains(&(output.tensor, dimension)) => seen.push((output.tensor, dimension)),
                    Some(_) => {}
                    None => return false,
                }
            }
        }
        summed
    }
}
