//! What a stage keeps from step to step, as buffers: the same, in the same order, for training and for evaluation.

use super::emit::StageEmitter;
use super::state::{Member, Running};
use crate::mesh::Axis;
use crate::program::{BufferId, BufferRole, Initial, InitialShare, Metric, MetricKind};
use foretell_models::Role;
use foretell_units::DataType;
use std::collections::BTreeMap;

/// A bucket's places in memory.
pub(super) struct BucketBuffers {
    /// All of them, or where ZeRO shards parameters the rank's shard.
    pub(super) parameters: BufferId,
    /// All of them, or where ZeRO shards gradients the rank's shard.
    pub(super) gradients: BufferId,
    pub(super) states: Vec<BufferId>,
    /// Where the reduced gradients are, once they are: all of them, or the rank's shard.
    pub(super) reduced: Option<BufferId>,
}

impl StageEmitter<'_> {
    /// Parameters, gradients and optimizer state, bucket by bucket; then running statistics.
    pub(super) fn keep_state(&mut self) {
        for (index, bucket) in self.state.buckets.iter().enumerate() {
            let (whole, shard) = (vec![bucket.elements], vec![bucket.shard_elements()]);
            let sharded = |is_sharded: bool| if is_sharded { shard.clone() } else { whole.clone() };
            let name = format!("parameters {index}");
            let shards_parameters = self.state.shards_parameters && bucket.shards > 1;
            let parameters = self.persistent(&name, BufferRole::Parameter, sharded(shards_parameters), self.state.precision);
            let shape = sharded(self.shards_gradients(index));
            let gradients = self.persistent(&format!("gradients {index}"), BufferRole::Gradient, shape, DataType::Fp32);
            let copies = self.state.optimizer_states + usize::from(self.state.master);
            let states: Vec<BufferId> = (0..copies)
                .map(|copy| {
                    let name = format!("optimizer state {index}.{copy}");
                    let state = self.persistent(&name, BufferRole::OptimizerState, shard.clone(), DataType::Fp32);
                    self.program.buffers[state.0 as usize].memory = self.state_memory();
                    state
                })
                .collect();
            let share = |member: &Member| InitialShare { tensor: member.parameter, placements: member.placements };
            let start = || Initial::Bucket {
                members: bucket.members.iter().map(|member| (member.offset, share(member))).collect(),
                axis: (bucket.shards > 1).then_some(Axis::Shard),
            };
            if shards_parameters {
                self.program.buffers[parameters.0 as usize].initial = Some(Box::new(start()));
            }
            // The single-precision copy is the last of the states.
            if let Some(master) = states.last().filter(|_| self.state.master) {
                self.program.buffers[master.0 as usize].initial = Some(Box::new(start()));
            }
            for member in &bucket.members {
                if !shards_parameters {
                    let parameter = self.piece(&member.name, parameters, member.offset, member.shape.clone());
                    self.program.buffers[parameter.0 as usize].initial = Some(Box::new(Initial::Share(share(member))));
                    self.kept.insert(member.name.clone(), parameter);
                }
                if !self.shards_gradients(index) {
                    let name = format!("{}.gradient", member.name);
                    let gradient = self.piece(&name, gradients, member.offset, member.shape.clone());
                    self.kept.insert(name, gradient);
                }
            }
            self.buckets.push(BucketBuffers { parameters, gradients, states, reduced: None });
        }
        self.keep_norms();
        self.keep_control();
        self.keep_statistics();
    }

    /// Running statistics, and the sums of batch statistics that update them: those that are summed over the same axes together.
    fn keep_statistics(&mut self) {
        let mut alike: BTreeMap<Vec<Axis>, Vec<&Running>> = BTreeMap::new();
        for running in &self.state.running {
            alike.entry(running.statistics_placements.partial_axes().collect()).or_default().push(running);
        }
        for (axes, members) in alike {
            let elements: usize = members.iter().map(|one| one.shape.iter().product::<usize>()).sum();
            let root = self.persistent("batch statistics", BufferRole::Sum, vec![elements], DataType::Fp32);
            let mut offset = 0;
            for running in members {
                let statistics = self.piece(&running.statistics, root, offset, running.shape.clone());
                self.kept.insert(running.statistics.clone(), statistics);
                offset += running.shape.iter().product::<usize>();
                let buffer = self.persistent(&running.name, BufferRole::Running, running.shape.clone(), DataType::Fp32);
                self.program.buffers[buffer.0 as usize].initial =
                    Some(Box::new(Initial::Share(InitialShare { tensor: running.tensor, placements: running.placements })));
                self.kept.insert(running.name.clone(), buffer);
            }
            self.statistics.push((axes, root));
        }
    }

    /// The loss and the count of right predictions, in the stage that makes them.
    pub(super) fn keep_sums(&mut self) {
        for id in self.forward_operators() {
            for output in &self.lowering.graph.operators[id.0].outputs {
                let tensor = self.lowering.graph.tensor(output.tensor);
                if tensor.role != Role::Sum || self.kept.contains_key(&tensor.name) {
                    continue;
                }
                let buffer = self.persistent(&tensor.name, BufferRole::Sum, vec![1], DataType::Fp32);
                self.kept.insert(tensor.name.clone(), buffer);
                let kind = match tensor.name.as_str() {
                    "loss" => MetricKind::Loss,
                    "dropped" => MetricKind::Dropped,
                    _ => MetricKind::Correct,
                };
                let placements = self.lowering.sharding.produced(output.tensor);
                self.program.metrics.push(Metric { kind, buffer, placements });
            }
        }
    }

    /// The buffer kept under a name.
    pub(super) fn kept(&self, name: &str) -> Option<BufferId> {
        self.kept.get(name).copied()
    }
}
