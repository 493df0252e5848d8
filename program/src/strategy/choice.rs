//! The loop along each axis for one operator: `data`, `shard` and `expert` along the batch or the experts, `context` along the sequence, and along
//! `tensor` what the plan asks for, or what follows from the inputs ([`super::tensor`]).

use super::{Chooser, Strategy};
use crate::mesh::Axis;
use crate::plan::{ContextMethod, PlanError};
use foretell_models::{BATCH, EXPERTS, Extent, LoopId, Operand, Operator, OperatorId, OperatorKind, Pass, SEQUENCE};

impl Chooser<'_> {
    pub(super) fn choose(&self, id: OperatorId, operator: &Operator) -> Result<Strategy, PlanError> {
        let mut strategy = Strategy::default();
        self.share_others(operator, &mut strategy)?;
        if let Some(asked) = self.asked[id.0] {
            strategy.set(Axis::Tensor, asked);
        } else if self.mesh.size(Axis::Tensor) > 1 {
            let mut chosen = match self.loop_of_sum(operator) {
                Some(chosen) => Some(chosen),
                None => self.tensor_loop(operator)?,
            };
            if chosen.is_some_and(|one| !self.divides(operator, one, &strategy)) {
                chosen = None;
            }
            if chosen.is_some_and(|one| self.is_positional_twice(operator, one, &strategy)) {
                chosen = None;
            }
            let positional = is_positional_along_one_axis(operator) && operator.kind.positional_role() == Some(Extent::Positions);
            if chosen.is_none() && self.sequence_parallel && !positional {
                let parts = self.mesh.size(Axis::Tensor) * self.mesh.size(Axis::Context);
                chosen = self.sequence_loop(operator, parts);
            }
            strategy.set(Axis::Tensor, chosen);
        }
        Ok(strategy)
    }

    /// Where the plan asks for anything, gradients of a tensor are added as their sum is wanted.
    fn loop_of_sum(&self, operator: &Operator) -> Option<LoopId> {
        let is_sum = operator.pass != Pass::Forward && operator.forward.is_none() && self.asks;
        let total = operator.outputs.first().filter(|_| is_sum)?;
        let dimension = self.wanted_by_all(total.tensor, Axis::Tensor)?;
        total.axes.get(dimension).copied().flatten()
    }

    /// Lays all axes but `tensor` along their loops.
    pub(super) fn share_others(&self, operator: &Operator, strategy: &mut Strategy) -> Result<(), PlanError> {
        self.share_batch(operator, strategy)?;
        if self.mesh.size(Axis::Context) > 1 {
            strategy.set(Axis::Context, self.sequence_loop(operator, self.mesh.size(Axis::Context)));
        }
        Ok(())
    }

    /// Whether `tensor` would cut what `context` cuts, of a kernel that is told of one axis only which part a rank has.
    pub(super) fn is_positional_twice(&self, operator: &Operator, chosen: LoopId, strategy: &Strategy) -> bool {
        strategy.get(Axis::Context) == Some(chosen) && is_positional_along_one_axis(operator)
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
    pub(super) fn is_cut_evenly(&self, operator: &Operator, chosen: LoopId, parts: usize) -> bool {
        let extents = |operand: &Operand| -> Vec<usize> {
            let dimensions = &self.graph.tensor(operand.tensor).dimensions;
            let walked = operand.axes.iter().zip(dimensions).filter(|(axis, _)| **axis == Some(chosen));
            walked.map(|(_, dimension)| dimension.extent).collect()
        };
        let mut walked = operator.inputs.iter().chain(&operator.outputs).flat_map(extents);
        operator.loops[chosen.0].extent.is_multiple_of(parts) && walked.all(|extent| extent.is_multiple_of(parts))
    }

    /// Whether `tensor` can take a loop beside the axes that have it already.
    pub(super) fn divides(&self, operator: &Operator, chosen: LoopId, strategy: &Strategy) -> bool {
        let others = Axis::WITHIN_STAGE.iter().filter(|&&axis| axis != Axis::Tensor && strategy.get(axis) == Some(chosen));
        let parts: usize = others.map(|&axis| self.mesh.size(axis)).product();
        self.is_cut_evenly(operator, chosen, parts * self.mesh.size(Axis::Tensor))
    }

    /// The loop over keys of attention that is to see them part by part: over as many as there are queries, as a part is masked by its distance on the
    /// ring (so is attention over another sequence of the same length, which has no mask), and without relative positions.
    pub(super) fn ring(&self, operator: &Operator, strategy: Strategy) -> Option<LoopId> {
        let OperatorKind::Attention { relative: None, packed: false, .. } = operator.kind else { return None };
        let positions = strategy.get(Axis::Context)?;
        let keys = operator.loops.iter().position(|one| one.role == Extent::Keys).map(LoopId)?;
        let is_as_long = operator.loops[keys.0].extent == operator.loops[positions.0].extent;
        (self.context_method == ContextMethod::Ring && is_as_long).then_some(keys)
    }
}

/// Most kernels that must know which part of a sequence a rank has are told of one axis only.
fn is_positional_along_one_axis(operator: &Operator) -> bool {
    operator.kind.positional_role().is_some() && !operator.kind.is_positional_along_several_axes()
}
