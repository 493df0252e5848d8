//! The rule for `tensor`: operators follow their inputs, and a product of a whole input shares out its columns where that pays.

use super::{Chooser, is_product};
use crate::mesh::Axis;
use crate::placement::Placement;
use crate::plan::PlanError;
use foretell_models::{EXPERTS, Extent, LoopId, Operator, OperatorKind, Pass, Role, SEQUENCE, TensorId};

impl Chooser<'_> {
    /// The loop along `tensor`: that of a sharded input, or for a product of whole inputs its columns if that pays.
    pub(super) fn tensor_loop(&self, operator: &Operator) -> Result<Option<LoopId>, PlanError> {
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
        if operator.kind == OperatorKind::LogitStatistics {
            // What it makes has a place for each rank's part of the classes.
            let classes = operator.loops.iter().position(|one| one.role == Extent::Features).map(LoopId);
            return classes.filter(|&classes| self.can_share(operator, classes));
        }
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

    pub(super) fn can_share(&self, operator: &Operator, chosen: LoopId) -> bool {
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
