//! Updates and exchanges during the backward pass.
//!
//! A replica that exchanges with others at the end of a step updates a bucket as soon as no kernel
//! of the step reads its parameters any more. Its exchange then overlaps the rest of the backward
//! pass. Two kinds wait for the end of the step: buckets whose gradients are still to be summed
//! within the replica, and all buckets where the update depends on the norm of all gradients.

use super::StageEmitter;
use super::exchange::{Begun, Exchange};
use super::update::Update;
use crate::schedule::Task;
use foretell_models::OperatorId;

/// The buckets that are updated during the backward pass.
#[derive(Default)]
pub(super) struct EarlyUpdates {
    /// Complete buckets, each with the position in the task of the last operator that reads its
    /// parameters; the update waits for that operator.
    waiting: Vec<(usize, usize)>,
    /// Exchanges that have begun.
    pub(super) begun: Vec<Begun>,
}

impl<'a> StageEmitter<'a> {
    /// The step's exchange, if buckets may be updated before the end of the step.
    fn early_exchange(&self) -> Option<&Exchange<'a>> {
        let may_update = self.persistent.control.is_none() && !self.stage.plan.layout.offload.is_of_optimizer();
        self.exchange.as_ref().filter(|exchange| may_update && exchange.may_begin_early())
    }

    /// Updates the buckets that are complete and that no later operator of the task reads. `place`
    /// is the position of operator `id` in the task.
    pub(super) fn update_early(&mut self, task: &Task, place: usize, id: OperatorId) {
        let Some(exchange) = self.early_exchange() else { return };
        let stage = self.stage;
        let reads = |bucket: usize, id: &OperatorId| {
            let mut names = stage.operator(*id).inputs.iter().map(|input| stage.name(input.tensor));
            names.any(|name| stage.state.bucket_of_parameter(name) == Some(bucket))
        };
        let last_reader = |bucket: usize| {
            let last = stage.operators_of(task).iter().rposition(|id| reads(bucket, id));
            (bucket, last.map_or(place, |last| last.max(place)))
        };
        let written = stage.state.buckets_written(&stage.lowering.graph, stage.operator(id)).into_iter();
        let complete = written.filter(|&bucket| exchange.concerns(bucket) && self.gradients.are_whole(stage, bucket));
        let complete: Vec<(usize, usize)> = complete.map(last_reader).collect();
        self.early.waiting.extend(complete);
        let is_ready = |&(_, last): &(usize, usize)| last <= place;
        let ready: Vec<(usize, usize)> = self.early.waiting.extract_if(.., |bucket| is_ready(bucket)).collect();
        for (bucket, _) in ready {
            let Self { stage, list, persistent, gradients, exchange, .. } = self;
            let mut update = Update { list, stage, persistent, gradients, exchange: exchange.as_ref() };
            let begun = update.run_bucket_early(bucket);
            self.early.begun.extend(begun);
        }
    }
}
