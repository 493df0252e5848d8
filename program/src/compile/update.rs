//! The end of a step: gradients and batch statistics are summed over the ranks that hold parts of them, parameters updated.

use super::emit::StageEmitter;
use crate::mesh::{Axis, Group};
use crate::placement::Placement;
use crate::plan::Optimizer;
use crate::program::{BufferId, Collective, Metric, MetricKind, Operation, Phase, Stream};
use foretell_models::Kernel;

impl StageEmitter<'_> {
    /// Sums a bucket's gradients over every axis along which they are parts, and over the stages that share its parameters.
    pub(super) fn reduce(&mut self, index: usize) {
        let bucket = &self.state.buckets[index];
        let gradients = self.buckets[index].gradients;
        let axes: Vec<Axis> = bucket.gradient.partial_axes().collect();
        let stages = bucket.stages.clone();
        for axis in axes {
            self.sum_over(&format!("gradients {index}"), gradients, Group::along(axis));
        }
        if stages.len() > 1 {
            self.sum_over(&format!("gradients {index}"), gradients, Group::across(stages));
        }
    }

    fn sum_over(&mut self, name: &str, buffer: BufferId, group: Group) {
        let operation = self.collective_operation(Collective::AllReduce, group, buffer, buffer);
        let Operation::Collective { group, .. } = operation else { unreachable!("just made") };
        self.push(name, operation, Stream::Group(group), vec![buffer], vec![buffer], None, Phase::Update);
    }

    /// Emits what follows the last backward pass.
    pub(super) fn update(&mut self) {
        for index in 0..self.state.buckets.len() {
            self.update_bucket(index);
        }
        self.update_running_statistics();
    }

    fn update_bucket(&mut self, index: usize) {
        let bucket = &self.state.buckets[index];
        let elements = bucket.elements;
        let (parameters, gradients) = (self.buckets[index].parameters, self.buckets[index].gradients);
        let squared_norm = self.buckets[index].squared_norm;
        let states = self.buckets[index].states.clone();
        let name = format!("parameters {index}");
        let compute = |kernel| Operation::Compute { kernel, accumulate: false, group: None };
        let norm = compute(Kernel::SumOfSquares { elements });
        self.push(&name, norm, Stream::Compute, vec![gradients], vec![squared_norm], None, Phase::Update);
        // Parameters that several stages share are counted in the first of them.
        if bucket.stages.first() == Some(&self.program.stage) {
            let whole = bucket.gradient.partial_axes().fold(bucket.gradient, |kept, axis| kept.with(axis, Placement::Replicate));
            let metric = Metric { kind: MetricKind::SquaredGradientNorm, buffer: squared_norm, placements: whole };
            self.program.metrics.push(metric);
        }
        let training = self.plan.training;
        let kernel = match self.plan.optimizer {
            Optimizer::Sgd => Kernel::Sgd { elements, momentum: training.momentum != 0.0, nesterov: training.nesterov },
            Optimizer::Adam | Optimizer::AdamW => Kernel::AdamW { elements },
        };
        let writes = std::iter::once(parameters).chain(states).collect();
        self.push(&name, compute(kernel), Stream::Compute, vec![gradients], writes, None, Phase::Update);
    }

    fn update_running_statistics(&mut self) {
        let Some(root) = self.statistics else { return };
        let state = self.state;
        let axes: Vec<Axis> =
            state.running.first().map(|one| one.statistics_placements.partial_axes().collect()).unwrap_or_default();
        for axis in axes {
            self.sum_over("batch statistics", root, Group::along(axis));
        }
        let micro_batches = self.plan.global_batch / (self.plan.layout.micro_batch * self.plan.layout.data);
        for running in &state.running {
            let [Some(statistics), Some(buffer)] = [self.kept(&running.statistics), self.kept(&running.name)] else { continue };
            let channels = running.shape.last().copied().unwrap_or(1);
            let kernel = Kernel::RunningStatistics { channels, contributions: running.contributions * micro_batches };
            let operation = Operation::Compute { kernel, accumulate: false, group: None };
            self.push(&running.name, operation, Stream::Compute, vec![statistics], vec![buffer], None, Phase::Update);
        }
    }
}
