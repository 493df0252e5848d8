//! The loops that each axis may shard: `data`, `shard` and `expert` shard the batch or the experts,
//! `context` the sequence, and `tensor` any loop that divides evenly.

use super::{Strategy, consumers, producers};
use crate::mesh::{Axis, StageMesh};
use crate::plan::{ContextMethod, Layout, PlanError};
use foretell_models::{Attention, BATCH, EXPERTS, Extent, Graph, Kernel, LoopId, Operand, Operator, OperatorId, SEQUENCE};

/// The rules for a graph on a mesh. Nothing here depends on earlier choices.
pub(super) struct Rules<'a> {
    pub(super) graph: &'a Graph,
    pub(super) mesh: &'a StageMesh,
    pub(super) sequence_parallel: bool,
    context_method: ContextMethod,
    /// Whether `tensor` spreads whole experts over ranks instead of sharding each expert.
    pub(super) spreads_experts: bool,
    /// The operators that read each tensor, indexed by tensor.
    pub(super) consumers: Vec<Vec<OperatorId>>,
    /// The operator that writes each tensor, indexed by tensor.
    pub(super) producers: Vec<Option<OperatorId>>,
}

impl<'a> Rules<'a> {
    pub(super) fn new(graph: &'a Graph, mesh: &'a StageMesh, layout: &Layout) -> Self {
        Self {
            graph,
            mesh,
            sequence_parallel: layout.sequence_parallel,
            context_method: layout.context_method,
            spreads_experts: layout.expert_tensor == Some(1) && mesh.size(Axis::Tensor) > 1,
            consumers: consumers(graph),
            producers: producers(graph),
        }
    }

    /// The number of parts that a sequence has if both `context` and `tensor` shard it.
    pub(super) fn sequence_parts(&self) -> usize {
        self.mesh.size(Axis::Tensor) * self.mesh.size(Axis::Context)
    }

    /// The strategy of an operator for all axes but `tensor`.
    pub(super) fn without_tensor(&self, operator: &Operator) -> Result<Strategy, PlanError> {
        let mut strategy = Strategy::default();
        self.shard_batch(operator, &mut strategy)?;
        if self.mesh.size(Axis::Context) > 1 {
            strategy.set(Axis::Context, self.context_loop(operator)?);
        }
        Ok(strategy)
    }

    /// The loop that `context` shards: the sequence, or for attention with `all_to_all` the heads.
    fn context_loop(&self, operator: &Operator) -> Result<Option<LoopId>, PlanError> {
        let ranks = self.mesh.size(Axis::Context);
        let sequence = self.sequence_loop(operator, ranks);
        let (ContextMethod::AllToAll, Some(_), Kernel::Attention(Attention { relative: None, .. })) =
            (self.context_method, sequence, operator.kind)
        else {
            return Ok(sequence);
        };
        if self.mesh.size(Axis::Tensor) > 1 {
            return Err(PlanError::Invalid {
                field: "context_method",
                reason: "`all_to_all` shards the heads of attention, which `tensor` shards already".into(),
                hint: "use `tensor: 1`, or `context_method: ring`".into(),
            });
        }
        let heads = operator.loops.iter().position(|dimension| dimension.role == Extent::Heads).map(LoopId);
        let heads = heads.filter(|heads| operator.loops[heads.0].shardable);
        match heads.map(|heads| (heads, operator.loops[heads.0].extent)) {
            Some((heads, extent)) if extent.is_multiple_of(ranks) => Ok(Some(heads)),
            Some((_, extent)) => Err(PlanError::Indivisible {
                what: format!("the number of key heads of `{}`", operator.name),
                value: extent,
                by: "context".into(),
                divisor: ranks,
                hint: "`context_method: all_to_all` gives each rank whole heads: choose a divisor, or another method".into(),
            }),
            None => Ok(sequence),
        }
    }

    /// Lets `expert` shard the experts, if there are any, and all other axes of the batch the
    /// samples.
    fn shard_batch(&self, operator: &Operator, strategy: &mut Strategy) -> Result<(), PlanError> {
        let mut parts = 1;
        for axis in Axis::BATCH {
            let size = self.mesh.size(axis);
            if size == 1 {
                continue;
            }
            if axis == Axis::Expert
                && let Some(experts) = self.expert_loop(operator)
            {
                let extent = operator.loops[experts.0].extent;
                if !extent.is_multiple_of(size) {
                    return Err(PlanError::Indivisible {
                        what: format!("the number of experts of `{}`", operator.name),
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

    /// The loop over experts, if it can be sharded.
    pub(super) fn expert_loop(&self, operator: &Operator) -> Option<LoopId> {
        operator.find_loop(EXPERTS).filter(|walked| operator.loops[walked.0].shardable)
    }

    /// The loop over positions, if it can be sharded into this many parts.
    pub(super) fn sequence_loop(&self, operator: &Operator, parts: usize) -> Option<LoopId> {
        let found = operator.find_loop(SEQUENCE)?;
        (operator.loops[found.0].shardable && self.divides_evenly(operator, found, parts)).then_some(found)
    }

    /// Whether a loop, and every dimension that it walks, divides into this many equal parts. A
    /// loop may walk a dimension with another extent: slots of tokens, for example, of which there
    /// are fewer than positions.
    fn divides_evenly(&self, operator: &Operator, chosen: LoopId, parts: usize) -> bool {
        let extents = |operand: &Operand| -> Vec<usize> {
            let dimensions = &self.graph.tensor(operand.tensor).dimensions;
            let walked = operand.axes.iter().zip(dimensions).filter(|(axis, _)| **axis == Some(chosen));
            walked.map(|(_, dimension)| dimension.extent).collect()
        };
        let mut walked = operator.inputs.iter().chain(&operator.outputs).flat_map(extents);
        operator.loops[chosen.0].extent.is_multiple_of(parts) && walked.all(|extent| extent.is_multiple_of(parts))
    }

    /// Whether `tensor` can shard a loop in addition to the other axes of a strategy.
    pub(super) fn can_add_tensor(&self, operator: &Operator, chosen: LoopId, strategy: &Strategy) -> bool {
        let others = Axis::WITHIN_STAGE.iter().filter(|&&axis| axis != Axis::Tensor && strategy.get(axis) == Some(chosen));
        let parts: usize = others.map(|&axis| self.mesh.size(axis)).product();
        // Most kernels that depend on the rank's part of a sequence take the part's index along one
        // axis only.
        let is_positional_twice = strategy.get(Axis::Context) == Some(chosen) && is_positional_along_one_axis(operator);
        self.divides_evenly(operator, chosen, parts * self.mesh.size(Axis::Tensor)) && !is_positional_twice
    }

    /// Whether `tensor` alone can shard a loop.
    pub(super) fn can_shard(&self, operator: &Operator, chosen: LoopId) -> bool {
        let one = &operator.loops[chosen.0];
        one.shardable && one.extent.is_multiple_of(self.mesh.size(Axis::Tensor))
    }

    /// The loop over keys if an operator is to use ring attention, else `None`. There must be as
    /// many keys as queries, since a part is masked by its distance on the ring (cross-attention
    /// over a sequence of the same length has no mask, and works too). Relative positions and
    /// windows are not supported.
    pub(super) fn ring(&self, operator: &Operator, strategy: Strategy) -> Option<LoopId> {
        let Kernel::Attention(Attention { relative: None, window: None, packed: false, .. }) = operator.kind else { return None };
        let queries = strategy.get(Axis::Context)?;
        let keys = operator.loops.iter().position(|dimension| dimension.role == Extent::Keys).map(LoopId)?;
        let have_equal_lengths = operator.loops[keys.0].extent == operator.loops[queries.0].extent;
        (self.context_method == ContextMethod::Ring && have_equal_lengths).then_some(keys)
    }
}

/// Whether an operator's kernel depends on the rank's part of a sequence, and takes the part's
/// index along one axis only.
pub(super) fn is_positional_along_one_axis(operator: &Operator) -> bool {
    operator.positional_role().is_some() && !operator.is_positional_along_several_axes()
}
