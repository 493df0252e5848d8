//! The nearest plan that a framework expresses. This file has what all frameworks lack; each
//! framework's own file has the rest.

use super::FrameworkError;
use foretell_program::{CollectiveAlgorithm, Layout, Optimizer, Overlap, Plan, Recompute, Schedule, Stack, Training};
use foretell_units::Bytes;

/// A plan on its way to a framework.
pub(super) struct Nearest {
    pub(super) framework: &'static str,
    pub(super) plan: Plan,
    pub(super) differences: Vec<String>,
}

impl Nearest {
    /// Starts from a plan, without what no framework expresses.
    pub(super) fn new(plan: &Plan, framework: &'static str, stack: &str) -> Result<Self, FrameworkError> {
        let layout = plan.layout.clone().normalised();
        if layout.stages.is_some() {
            return Err(FrameworkError::Layout {
                framework,
                reason: "all of its stages have the same mesh".into(),
                hint: "fix `data`, `tensor` and `context` with `foretell plan --fix`, and export that plan".into(),
            });
        }
        // The stack's own overlap and buckets apply.
        let plan = Plan { layout, stack: Stack::new(stack), overlap: Overlap::default(), ..plan.clone() };
        let mut nearest = Self { framework, plan, differences: Vec::new() };
        nearest.uniform();
        nearest.without_recipe();
        // Adam without weight decay and AdamW without it are the same.
        if nearest.plan.training.weight_decay == 0.0 && nearest.plan.optimizer == Optimizer::AdamW {
            nearest.plan.optimizer = Optimizer::Adam;
        }
        Ok(nearest)
    }

    /// Removes what differs between ranks, stages or operators.
    fn uniform(&mut self) {
        let usual = Layout::default();
        let layout = &mut self.plan.layout;
        if layout.shares.take().is_some() {
            self.differences.push("every rank of `data` gets `micro_batch` samples, and `shares` is left out".into());
        }
        if layout.stage_places.take().is_some() {
            self.differences.push("stages lie in order, and `stage_places` is left out".into());
        }
        if layout.placement.take().is_some() {
            self.differences.push("ranks are in the framework's order, and `placement` is left out".into());
        }
        if !layout.operators.is_empty() {
            layout.operators = usual.operators;
            self.differences.push("`tensor` shards operators by the rule, and `operators` is left out".into());
        }
        if layout.collective != CollectiveAlgorithm::Automatic {
            layout.collective = CollectiveAlgorithm::Automatic;
            self.differences.push("NCCL chooses the algorithm of all-reduces".into());
        }
        if self.plan.batch_norm_group.take().is_some() {
            self.differences.push("samples of a rank's micro-batch share batch statistics".into());
        }
    }

    /// Removes what of a recipe is code in frameworks, and not an option that all of them have.
    fn without_recipe(&mut self) {
        let usual = Training::default();
        let optimizer = if self.plan.optimizer == Optimizer::Lamb { Optimizer::AdamW } else { self.plan.optimizer };
        self.replace(|plan| &mut plan.optimizer, optimizer, "the optimizer is AdamW, and not LAMB");
        self.replace(|plan| &mut plan.training.optimizer, usual.optimizer, String::new());
        self.replace(|plan| &mut plan.training.schedule, usual.schedule, "the learning rate is constant: `schedule` is left out");
        self.replace(|plan| &mut plan.training.warm_up, usual.warm_up, "`warm_up` is left out");
        self.replace(|plan| &mut plan.training.no_decay, usual.no_decay, "the framework decides which weights decay");
        self.replace(|plan| &mut plan.training.label_smoothing, usual.label_smoothing, "`label_smoothing` is left out");
        self.replace(|plan| &mut plan.training.class_weights, usual.class_weights, "`class_weights` are left out");
        self.replace(|plan| &mut plan.training.frozen, usual.frozen, "every parameter is trained: `frozen` is left out");
        self.replace(|plan| &mut plan.training.print_every, usual.print_every, String::new());
        self.replace(|plan| &mut plan.training.save_every, usual.save_every, String::new());
        self.replace(|plan| &mut plan.training.evaluate_every, usual.evaluate_every, String::new());
    }

    /// Replaces a value that the framework lacks. An empty `difference` is not told: it changes
    /// nothing that the framework does.
    pub(super) fn replace<T: PartialEq>(&mut self, field: fn(&mut Plan) -> &mut T, value: T, difference: impl Into<String>) {
        let place = field(&mut self.plan);
        if *place != value {
            *place = value;
            let difference = difference.into();
            if !difference.is_empty() {
                self.differences.push(difference);
            }
        }
    }

    /// Refuses a plan that uses an axis which the framework lacks.
    pub(super) fn without_axis(&self, size: usize, axis: &str) -> Result<(), FrameworkError> {
        if size == 1 {
            return Ok(());
        }
        Err(FrameworkError::Layout {
            framework: self.framework,
            reason: format!("it does not shard over `{axis}`"),
            hint: format!("`foretell plan --fix {axis}=1` finds the best layout without it"),
        })
    }

    /// Makes the schedule 1F1B, or interleaved with several chunks.
    pub(super) fn plain_schedule(&mut self) {
        let layout = &self.plan.layout;
        let allowed = [Schedule::OneForwardOneBackward, Schedule::Interleaved];
        if allowed.contains(&layout.schedule) {
            return;
        }
        let was = layout.schedule;
        if layout.pipeline > 1 {
            self.differences.push(format!("the schedule is 1f1b with one chunk on each stage, and not {was}"));
        }
        let layout = &mut self.plan.layout;
        layout.schedule = Schedule::OneForwardOneBackward;
        if layout.virtual_stages > 1 {
            layout.virtual_stages = 1;
            // Chunks of another schedule lie on other stages.
            layout.cuts = None;
        }
    }

    /// Sets the bucket to the default, which reads back as no choice.
    pub(super) fn usual_bucket(&mut self) {
        self.replace(|plan| &mut plan.layout.bucket, Bytes::new(25 << 20), "the framework chooses the size of `bucket`");
    }

    /// Replaces recomputation that is finer than all blocks, attention or nothing.
    pub(super) fn coarse_recompute(&mut self, allowed: &[Recompute]) {
        if allowed.contains(&self.plan.layout.recompute) {
            return;
        }
        self.plan.layout.recompute = Recompute::Full;
        self.differences.push("every block is recomputed: `recompute: full`".into());
    }
}
