//! Strategies: which loop of each operator every mesh axis is laid along, and the placements that follow.
//!
//! `data` and `shard` take every operator's batch, `expert` the experts where there are any and else the batch, `context` the sequence. For
//! `tensor` operators follow their inputs: one whose input is sharded along a loop that may be shared out keeps that loop, and a product
//! of a whole input shares out its columns if the shards can stay until another product sums over them. On a transformer this gives
//! Megatron-LM's layout (Shoeybi et al. 2019), on a perceptron the alternation of columns and rows; no model is named here. With
//! sequence parallelism (Korthikanti et al. 2022) `tensor` takes the sequence of those that are left.

use crate::mesh::{Axis, StageMesh};
use crate::placement::{Placement, Placements};
use crate::plan::{ContextMethod, Layout, PlanError};
use foretell_models::{
    BATCH, EXPERTS, Extent, Graph, LoopId, Operand, Operator, OperatorId, OperatorKind, Pass, Role, SEQUENCE, TensorId,
};

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
    /// Of attention whose keys and values go round the ranks of `context` part by part: the loop over keys.
    rings: Vec<Option<LoopId>>,
}

impl Sharding {
    /// Chooses strategies for a graph with or without gradients.
    pub(crate) fn choose(graph: &Graph, mesh: &StageMesh, layout: &Layout) -> Result<Self, PlanError> {
        let mut chooser = Chooser {
            graph,
            mesh,
            sequence_parallel: layout.sequence_parallel,
            context_method: layout.context_method,
            spreads_experts: layout.expert_tensor == Some(1) && mesh.size(Axis::Tensor) > 1,
            consumers: consumers(graph),
            makers: makers(graph),
            sharding: Sharding {
                strategies: vec![Strategy::default(); graph.operators.len()],
                kept: vec![None; graph.operators.len()],
                placements: vec![Placements::default(); graph.tensors.len()],
                produced: vec![Placements::default(); graph.tensors.len()],
                rings: vec![None; graph.operators.len()],
            },
            parameter_placed: vec![false; graph.tensors.len()],
        };
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
    mesh: &'a StageMesh,
    sequence_parallel: bool,
    context_method: ContextMethod,
    /// Whether `tensor` takes whole experts instead of parts of each.
    spreads_experts: bool,
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
            self.gradients_agree(operator, output.tensor, produced)?;
            self.sharding.produced[output.tensor.0] = produced;
            self.sharding.placements[output.tensor.0] = self.settle(output.tensor, produced);
        }
        Ok(())
    }

    /// The loop over keys of attention that is to see them part by part: over as many as there are queries, as a part is masked by its distance on the
    /// ring (so is attention over another sequence of the same length, which has no mask), and without relative positions.
    fn ring(&self, operator: &Operator, strategy: Strategy) -> Option<LoopId> {
        let OperatorKind::Attention { relative: None, packed: false, .. } = operator.kind else { return None };
        let positions = strategy.get(Axis::Context)?;
        let keys = operator.loops.iter().position(|one| one.role == Extent::Keys).map(LoopId)?;
        let is_as_long = operator.loops[keys.0].extent == operator.loops[positions.0].extent;
        (self.context_method == ContextMethod::Ring && is_as_long).then_some(keys)
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
        let maker = self.makers[tensor.0].map(|id| self.graph.operators[id.0].pass);
        produced.partial_axes().fold(produced, |settled, axis| {
            let wanted = match maker {
                Some(Pass::Forward) | None => self.sequence_shard(tensor, axis),
                Some(_) => self.wanted_by_all(tensor, axis),
            };
            // A part that another axis would cut into larger parts only later is not made.
            let wanted = wanted.filter(|&dimension| !settled.is_cut_finer(axis, dimension));
            settled.with(axis, wanted.map_or(Placement::Replicate, Placement::Shard))
        })
    }

    /// With sequence parallelism the dimension of a tensor that `tensor` cuts outside of products.
    fn sequence_shard(&self, tensor: TensorId, axis: Axis) -> Option<usize> {
        if !self.sequence_parallel || axis != Axis::Tensor {
            return None;
        }
        let parts = self.mesh.size(Axis::Tensor) * self.mesh.size(Axis::Context);
        let dimensions = &self.graph.tensor(tensor).dimensions;
        dimensions.iter().position(|one| one.name == SEQUENCE && one.extent.is_multiple_of(parts))
    }

    /// The dimension that all readers of a gradient want to be cut along an axis, if they agree.
    fn wanted_by_all(&self, tensor: TensorId, axis: Axis) -> Option<usize> {
        let mut agreed = None;
        for &id in &self.consumers[tensor.0] {
            let operator = &self.graph.operators[id.0];
            let input = operator.inputs.iter().find(|input| input.tensor == tensor)?;
            let wanted = match operator.forward {
                Some(forward) => match self.sharding.strategies[forward.0].placements(input, Placement::Replicate).get(axis) {
                    Placement::Shard(dimension) => Some(dimension),
                    _ => None,
                },
                None => self.sequence_shard(tensor, axis),
            };
            if wanted.is_none() || agreed.is_some_and(|dimension| wanted != Some(dimension)) {
                return None;
            }
            agreed = wanted;
        }
        agreed
    }

    /// Refuses a parameter whose gradient one operator leaves in parts and another whole: their sum would be neither.
    fn gradients_agree(&self, operator: &Operator, tensor: TensorId, produced: Placements) -> Result<(), PlanError> {
        let Role::ParameterGradient(parameter) = self.graph.tensor(tensor).role else { return Ok(()) };
        let is_first = self.graph.operators.iter().find(|one| one.outputs.iter().any(|output| output.tensor == tensor));
        if is_first.is_some_and(|first| std::ptr::eq(first, operator)) || self.sharding.produced[tensor.0] == produced {
            return Ok(());
        }
        Err(PlanError::Invalid {
            field: "layout",
            reason: format!(
                "`{}` is used by several operators, which this layout shares out in different ways",
                self.graph.tensor(parameter).name
            ),
            hint:
                "use sizes of `tensor` and `context` that divide every sequence, or leave `sequence_parallel` and `context` out"
                    .into(),
        })
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
            // The sum of what several readers send back, which is a partial sum where all of these are.
            (Some(maker), None) if maker.kind == OperatorKind::Add && maker.pass != Pass::Forward => {
                let mut parts = maker.inputs.iter().map(|input| self.will_be_produced(input.tensor));
                let first = parts.next().unwrap_or_default();
                if parts.all(|other| other == first) { first } else { self.sharding.produced[tensor.0] }
            }
            _ => self.sharding.produced[tensor.0],
        }
    }

    fn choose(&self, operator: &Operator) -> Result<Strategy, PlanError> {
        let mut strategy = Strategy::default();
        self.share_batch(operator, &mut strategy)?;
        if self.mesh.size(Axis::Context) > 1 {
            strategy.set(Axis::Context, self.sequence_loop(operator, self.mesh.size(Axis::Context)));
        }
        if self.mesh.size(Axis::Tensor) > 1 {
            let mut chosen = self.tensor_loop(operator)?;
            if chosen.is_some_and(|one| !self.divides(operator, one, &strategy)) {
                chosen = None;
            }
            // Most kernels that must know which part of a sequence a rank has are told of one axis only.
            let one_axis = operator.kind.positional().is_some() && !operator.kind.is_positional_along_several_axes();
            if chosen.is_some() && chosen == strategy.get(Axis::Context) && one_axis {
                chosen = None;
            }
            let positional = one_axis && operator.kind.positional() == Some(Extent::Positions);
            if chosen.is_none() && self.sequence_parallel && !positional {
                let parts = self.mesh.size(Axis::Tensor) * self.mesh.size(Axis::Context);
                chosen = self.sequence_loop(operator, parts);
            }
            strategy.set(Axis::Tensor, chosen);
        }
        Ok(strategy)
    }

    /// Lays `expert` along the experts, where there are any, and all other axes that share out samples along the batch.
    fn share_batch(&self, operator: &Operator, strategy: &mut Strategy) -> Result<(), PlanError> {
        let mut parts = 1;
        for axis in Axis::BATCH {
            let size = self.mesh.size(axis);
            if size == 1 {
                continue;
            }
            let experts = operator.find_loop(EXPERTS).filter(|one| operator.loops[one.0].shardable && axis == Axis::Expert);
            if let Some(experts) = experts {
                let extent = operator.loops[experts.0].extent;
                if !extent.is_multiple_of(size) {
                    return Err(PlanError::Indivisible {
                        what: format!("the experts of `{}`", operator.name),
                        value: extent,
                        by: "expert".into(),
                        divisor: size,
                        hint: "choose a size of `expert` that divides the number of experts".into(),
                    });
                }
                strategy.set(axis, Some(experts));
                continue;
            }
            parts *= size;
            let Some(batch) = operator.find_loop(BATCH) else { continue };
            let extent = operator.loops[batch.0].extent;
            if !extent.is_multiple_of(parts) {
                return Err(PlanError::Indivisible {
                    what: format!("the batch of `{}`", operator.name),
                    value: extent,
                    by: "data x expert".into(),
                    divisor: parts,
                    hint: "choose a micro-batch that is a multiple of `batch_norm_group`".into(),
                });
            }
            strategy.set(axis, Some(batch));
        }
        Ok(())
    }

    /// The loop over positions, where it may be shared out among so many.
    fn sequence_loop(&self, operator: &Operator, parts: usize) -> Option<LoopId> {
        let found = operator.find_loop(SEQUENCE)?;
        (operator.loops[found.0].shardable && self.is_cut_evenly(operator, found, parts)).then_some(found)
    }

    /// Whether a loop, and what of tensors it walks, can be cut into so many equal parts: it may walk slots of which there are fewer than positions.
    fn is_cut_evenly(&self, operator: &Operator, chosen: LoopId, parts: usize) -> bool {
        let extents = |operand: &Operand| -> Vec<usize> {
            let dimensions = &self.graph.tensor(operand.tensor).dimensions;
            let walked = operand.axes.iter().zip(dimensions).filter(|(axis, _)| **axis == Some(chosen));
            walked.map(|(_, dimension)| dimension.extent).collect()
        };
        let mut walked = operator.inputs.iter().chain(&operator.outputs).flat_map(extents);
        operator.loops[chosen.0].extent.is_multiple_of(parts) && walked.all(|extent| extent.is_multiple_of(parts))
    }

    /// Whether `tensor` can take a loop beside the axes that have it already.
    fn divides(&self, operator: &Operator, chosen: LoopId, strategy: &Strategy) -> bool {
        let others = Axis::WITHIN_STAGE.iter().filter(|&&axis| axis != Axis::Tensor && strategy.get(axis) == Some(chosen));
        let parts: usize = others.map(|&axis| self.mesh.size(axis)).product();
        self.is_cut_evenly(operator, chosen, parts * self.mesh.size(Axis::Tensor))
    }

    /// Refuses ranks along an axis that would all do the same, since the model has no loop for it.
    fn axis_is_used(&self, axis: Axis, field: &'static str, what: &str) -> Result<(), PlanError> {
        let divisor = self.mesh.size(axis);
        let is_used = |(operator, strategy): (&Operator, &Strategy)| {
            strategy.get(axis).is_some_and(|one| operator.loops[one.0].name == what)
        };
        if divisor == 1 || self.graph.operators.iter().zip(&self.sharding.strategies).any(is_used) {
            return Ok(());
        }
        Err(PlanError::Invalid {
            field,
            reason: format!("`{}` has no {what} that {divisor} ranks could share out", self.graph.name),
            hint: format!("use `{field}: 1`, or a size that divides the model's"),
        })
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
    fn tensor_loop(&self, operator: &Operator) -> Result<Option<LoopId>, PlanError> {
        if self.spreads_experts
            && let Some(experts) = operator.find_loop(EXPERTS).filter(|one| operator.loops[one.0].shardable)
        {
            let (extent, divisor) =
                (operator.loops[experts.0].extent, self.mesh.size(Axis::Expert) * self.mesh.size(Axis::Tensor));
            if !extent.is_multiple_of(divisor) {
                return Err(PlanError::Indivisible {
                    what: format!("the experts of `{}`", operator.name),
                    value: extent,
                    by: "expert x tensor".into(),
                    divisor,
                    hint: "choose sizes of `expert` and `tensor` whose product divides the number of experts, or leave out `expert_tensor`"
                        .into(),
                });
            }
            return Ok(Some(experts));
        }
        Ok(self.followed_or_columns(operator))
    }

    fn followed_or_columns(&self, operator: &Operator) -> Option<LoopId> {
        // A product gathers the sequence that is shared out, and shares out its columns; one whose columns cannot be keeps its part.
        let has_columns = operator
            .loops
            .iter()
            .enumerate()
            .any(|(index, one)| one.role == Extent::Columns && self.can_share(operator, LoopId(index)));
        for input in &operator.inputs {
            let tensor = self.graph.tensor(input.tensor);
            if tensor.role != Role::Activation {
                continue;
            }
            if let Placement::Shard(dimension) = self.sharding.placements[input.tensor.0].get(Axis::Tensor)
                && let Some(walked) = input.axes[dimension]
                && self.can_share(operator, walked)
                && !(operator.loops[walked.0].name == SEQUENCE
                    && (is_product(operator) && has_columns || operator.kind.is_attention()))
            {
                return Some(walked);
            }
        }
        if operator.kind == OperatorKind::Embedding {
            // Each rank looks up the tokens of its rows; the rest it leaves to the sum.
            let vocabulary = (0..operator.loops.len()).map(LoopId);
            return vocabulary
                .into_iter()
                .find(|&one| operator.loops[one.0].role == Extent::Vocabulary && self.can_share(operator, one));
        }
        if !is_product(operator) {
            return None;
        }
        let weight = &operator.inputs[1];
        let output = &operator.outputs[0];
        (0..operator.loops.len()).map(LoopId).find(|&column| {
            // A weight that another operator uses, too (a language model's tied head), is cut as that one cuts it, or stays whole.
            let placed = self.sharding.placements[weight.tensor.0].get(Axis::Tensor);
            let as_placed = weight.axes.iter().position(|&walked| walked == Some(column)).map(Placement::Shard);
            operator.loops[column.0].role == Extent::Columns
                && self.can_share(operator, column)
                && (!self.parameter_placed[weight.tensor.0] || as_placed == Some(placed))
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
                if operator.loops[walked.0].role == Extent::Contracted || operator.kind == OperatorKind::LogitStatistics {
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
