//! The read-only inputs of emitting one list, and the operators of each of its passes.

use super::recompute::Recomputation;
use crate::compile::cuts::{ChunkPass, Cuts};
use crate::compile::lowering::Lowering;
use crate::compile::reshard::Routes;
use crate::compile::state::StageState;
use crate::mesh::{Axis, Mesh};
use crate::placement::Placements;
use crate::plan::Plan;
use crate::schedule::{StagePass, Task};
use foretell_models::{BATCH, Operator, OperatorId, TensorId};
use rustc_hash::FxHashMap;
use std::ops::Range;

/// The part of a list's ranks in updating parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::compile) enum Duty {
    /// Everything: there are no parameter servers.
    Alone,
    /// They train, and push gradients to servers.
    Worker,
    /// They update the parameters that workers pull.
    Server,
}

/// One pipeline stage of a lowered model, as the ranks of one list see it.
pub(in crate::compile) struct Stage<'a> {
    pub(super) lowering: &'a Lowering,
    pub(super) plan: &'a Plan,
    pub(super) mesh: &'a Mesh,
    pub(super) cuts: &'a Cuts,
    /// The stage's position on the pipeline axis.
    pub(super) index: usize,
    pub(super) state: &'a StageState,
    pub(super) duty: Duty,
    /// Transfers to and from stages with other meshes.
    pub(super) routes: &'a Routes,
    pub(super) recomputation: Recomputation,
    /// The operators of each pass through each chunk, in the graph's order.
    operators: FxHashMap<ChunkPass, Vec<OperatorId>>,
}

impl<'a> Stage<'a> {
    pub(in crate::compile) fn new(
        lowering: &'a Lowering,
        plan: &'a Plan,
        mesh: &'a Mesh,
        cuts: &'a Cuts,
        index: usize,
        state: &'a StageState,
        routes: &'a Routes,
    ) -> Self {
        let duty = match plan.mode.servers() {
            0 => Duty::Alone,
            _ if index < cuts.stages => Duty::Worker,
            _ => Duty::Server,
        };
        let mut operators: FxHashMap<ChunkPass, Vec<OperatorId>> = FxHashMap::default();
        for (id, operator) in lowering.graph.operators.iter().enumerate() {
            if cuts.stage(operator) == index {
                for pass in cuts.chunk_passes(operator) {
                    operators.entry(pass).or_default().push(OperatorId(id));
                }
            }
        }
        let mut stage =
            Self { lowering, plan, mesh, cuts, index, state, duty, routes, recomputation: Recomputation::default(), operators };
        stage.recomputation = Recomputation::new(lowering, &stage.forward_operators(), &plan.layout.recompute.of_stage(index));
        stage
    }

    /// The stages that update parameters.
    pub(super) fn updating_stages(&self) -> Range<usize> {
        let first = if self.duty == Duty::Alone { 0 } else { self.cuts.stages };
        first..self.mesh.stage_count()
    }

    pub(super) fn operator(&self, id: OperatorId) -> &'a Operator {
        &self.lowering.graph.operators[id.0]
    }

    pub(super) fn name(&self, tensor: TensorId) -> &'a str {
        &self.lowering.graph.tensor(tensor).name
    }

    /// The axes along which a step sums a tensor with these placements: those that hold partial
    /// sums, except the axis of replicas if each replica has its own parameters.
    pub(super) fn summed_axes(&self, placements: Placements) -> Vec<Axis> {
        placements.partial_axes().filter(|&axis| self.plan.replica_axis() != Some(axis)).collect()
    }

    /// The number of predictions of a step, over all ranks of a replica.
    pub(super) fn predictions(&self) -> usize {
        self.plan.global_batch / self.plan.replicas() * self.lowering.graph.predictions_per_sample
    }

    /// The number of micro-batches of a step.
    pub(super) fn micro_batches(&self) -> usize {
        self.plan.global_batch / self.plan.layout.samples_at_once()
    }

    /// The placements of a sum as its operators leave it.
    pub(super) fn placements_of_sum(&self, name: &str) -> Placements {
        let tensor = self.lowering.graph.tensors.iter().position(|tensor| tensor.name == name);
        self.lowering.sharding.produced(TensorId(tensor.expect("invariant: the graph has the sum")))
    }

    /// The operators that a task runs, in order.
    pub(super) fn operators_of(&self, task: &Task) -> &[OperatorId] {
        self.operators.get(&(task.chunk, task.pass)).map_or(&[], Vec::as_slice)
    }

    /// The forward operators of all chunks, in the graph's order.
    pub(super) fn forward_operators(&self) -> Vec<OperatorId> {
        let forward = self.operators.iter().filter(|((_, pass), _)| *pass == StagePass::Forward);
        let mut operators: Vec<OperatorId> = forward.flat_map(|(_, operators)| operators.iter().copied()).collect();
        operators.sort_unstable();
        operators
    }

    /// The index of the first sample of a micro-batch in the global batch.
    pub(super) fn first_sample(&self, micro_batch: usize) -> usize {
        micro_batch * self.plan.layout.samples_at_once()
    }

    /// The axes for which an operator's kernel must know the rank's index: its work depends on
    /// which part of a loop the rank has.
    pub(super) fn positional_axes(&self, id: OperatorId) -> Vec<Axis> {
        let operator = self.operator(id);
        let strategy = self.lowering.sharding.strategy(id);
        // The axes of the batch do not matter: a rank knows which samples it has without a group.
        let cuts_dropout_samples = |axis: Axis| operator.has_dropout() && self.sample_axes(id).any(|cut| cut == axis);
        let cuts_positions =
            |axis: Axis| strategy.get(axis).is_some_and(|walked| operator.depends_on_part_of(operator.loops[walked.0].role));
        Axis::WITHIN_STAGE.into_iter().filter(|&axis| cuts_positions(axis) || cuts_dropout_samples(axis)).collect()
    }

    /// The axes that shard an operator's samples, other than the axes of the batch.
    fn sample_axes(&self, id: OperatorId) -> impl Iterator<Item = Axis> {
        let batch = self.operator(id).find_loop(BATCH);
        let strategy = self.lowering.sharding.strategy(id);
        let others = Axis::WITHIN_STAGE.into_iter().filter(|axis| !Axis::BATCH.contains(axis));
        others.filter(move |&axis| batch.is_some() && strategy.get(axis) == batch)
    }

    /// The number of parts that the axes of [`Self::sample_axes`] cut the samples into.
    pub(super) fn sample_parts(&self, id: OperatorId) -> usize {
        self.sample_axes(id).map(|axis| self.lowering.mesh.size(axis)).product()
    }
}
