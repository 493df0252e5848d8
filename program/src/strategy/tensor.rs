//! The rule for `tensor`: operators follow their inputs, and a product of whole inputs shards its
//! columns if the shards can be used as they are.

use super::rules::Rules;
use super::{Sharding, is_product};
use crate::mesh::Axis;
use crate::placement::Placement;
use crate::plan::PlanError;
use foretell_models::{Extent, Kernel, LoopId, Operator, Pass, Role, SEQUENCE, TensorId};

/// The rule for `tensor`, given the choices so far.
pub(super) struct TensorRule<'a> {
    pub(super) rules: &'a Rules<'a>,
    pub(super) sharding: &'a Sharding,
    /// By tensor: whether it is a parameter or an input whose placements are chosen.
    pub(super) is_placed: &'a [bool],
}

impl TensorRule<'_> {
    /// The loop of an operator that `tensor` shards.
    pub(super) fn tensor_loop(&self, operator: &Operator) -> Result<Option<LoopId>, PlanError> {
        let rules = self.rules;
        let Some(experts) = rules.expert_loop(operator).filter(|_| rules.spreads_experts) else {
            return Ok(self.followed_or_columns(operator));
        };
        let extent = operator.loops[experts.0].extent;
        let divisor = rules.mesh.size(Axis::Expert) * rules.mesh.size(Axis::Tensor);
        if !extent.is_multiple_of(divisor) {
            return Err(PlanError::Indivisible {
                what: format!("the number of experts of `{}`", operator.name),
                value: extent,
                by: "expert x tensor".into(),
                divisor,
                hint: "choose sizes of `expert` and `tensor` whose product divides the number of experts, or leave out `expert_tensor`"
                    .into(),
            });
        }
        Ok(Some(experts))
    }

    fn followed_or_columns(&self, operator: &Operator) -> Option<LoopId> {
        let rules = self.rules;
        let shardable_of_role = |role: Extent| {
            let mut loops = (0..operator.loops.len()).map(LoopId);
            loops.find(|&dimension| operator.loops[dimension.0].role == role && rules.can_shard(operator, dimension))
        };
        if operator.works_on_parts_of_classes() {
            // The outputs have a slot for each rank's part of the classes.
            let classes = operator.loops.iter().position(|dimension| dimension.role == Extent::Features).map(LoopId);
            return classes.filter(|&classes| rules.can_shard(operator, classes));
        }
        let followed = operator.inputs.iter().find_map(|input| {
            let is_activation = rules.graph.tensor(input.tensor).role == Role::Activation;
            let Placement::Shard(dimension) = self.sharding.settled(input.tensor).get(Axis::Tensor) else { return None };
            let walked = input.axes[dimension].filter(|_| is_activation)?;
            // A product gathers a sharded sequence and shards its columns, if it can. Attention
            // gathers it, too.
            let gathers_sequence = operator.loops[walked.0].name == SEQUENCE
                && (operator.is_attention() || is_product(operator) && shardable_of_role(Extent::Columns).is_some());
            (rules.can_shard(operator, walked) && !gathers_sequence).then_some(walked)
        });
        if followed.is_some() {
            return followed;
        }
        if matches!(operator.kind, Kernel::Embedding { .. }) {
            // Each rank looks up the tokens in its rows, and leaves zeros for the others to the
            // sum.
            return shardable_of_role(Extent::Vocabulary);
        }
        if is_product(operator) { self.columns(operator) } else { None }
    }

    /// The loop over a product's columns, if it can be sharded and the shards need not be gathered
    /// before they are summed over.
    fn columns(&self, operator: &Operator) -> Option<LoopId> {
        let (weight, output) = (&operator.inputs[1], &operator.outputs[0]);
        let dimension_of = |axes: &[Option<LoopId>], column| axes.iter().position(|&walked| walked == Some(column));
        (0..operator.loops.len()).map(LoopId).find(|&column| {
            // A weight that another operator also uses, such as that of a tied head, keeps its
            // placement.
            let placed = self.sharding.settled(weight.tensor).get(Axis::Tensor);
            let keeps_placement = dimension_of(&weight.axes, column).map(Placement::Shard) == Some(placed);
            operator.loops[column.0].role == Extent::Columns
                && self.rules.can_shard(operator, column)
                && (!self.is_placed[weight.tensor.0] || keeps_placement)
                && dimension_of(&output.axes, column).is_some_and(|dimension| self.stays_sharded(output.tensor, dimension))
        })
    }

    /// Whether shards of `dimension` can be used as they are until products have summed over them.
    fn stays_sharded(&self, tensor: TensorId, dimension: usize) -> bool {
        let mut seen = vec![(tensor, dimension)];
        let mut next = 0;
        let mut is_summed = false;
        while let Some(&(tensor, dimension)) = seen.get(next) {
            next += 1;
            for &id in &self.rules.consumers[tensor.0] {
                let operator = &self.rules.graph.operators[id.0];
                if operator.pass != Pass::Forward {
                    continue;
                }
                let Some(input) = operator.inputs.iter().find(|input| input.tensor == tensor) else { continue };
                let Some(walked) = input.axes[dimension] else { return false };
                if !self.rules.can_shard(operator, walked) {
                    return false;
                }
                if operator.loops[walked.0].role == Extent::Contracted || operator.works_on_parts_of_classes() {
                    is_summed = true;
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
        is_summed
    }
}
