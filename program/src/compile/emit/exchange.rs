//! What replicas exchange at the end of a round, bucket by bucket: parameters, or how far they have
//! moved in the round. The mode decides what and with whom.
//!
//! An exchange begins right after a bucket's update and ends after all updates, so that it overlaps
//! with those of other buckets. It works on the single-precision values: those of the master copy,
//! if there is one.

use super::buckets::GradientBuckets;
use super::list::{Label, ListBuilder};
use super::persistent::BucketBuffers;
use super::stage::Stage;
use crate::mesh::{Axis, Group, Rank};
use crate::plan::{AveragingGraph, Decentralised, Mode, OuterRule};
use crate::program::{BufferId, BufferRole, Peer, Phase};
use foretell_models::Kernel;
use foretell_units::DataType;

/// The exchange at the end of a step.
#[derive(Clone, Copy)]
pub(super) struct Exchange<'a> {
    stage: &'a Stage<'a>,
    /// The number of the round's kind, which selects the neighbours if they change.
    round: usize,
}

/// An exchange of a bucket that has begun.
pub(super) struct Begun {
    index: usize,
    /// The values that the exchange replaces.
    values: BufferId,
    /// The sum of the replicas' changes, if the outer optimizer gets it.
    change: Option<BufferId>,
    /// The values of the neighbours.
    received: Vec<BufferId>,
    /// The parameters, if they are a rounded copy of the values.
    rounded: Option<BufferId>,
}

impl<'a> Exchange<'a> {
    pub(super) fn new(stage: &'a Stage<'a>, round: usize) -> Self {
        Self { stage, round }
    }

    /// Begins the exchange of a bucket whose update wrote `updated`.
    pub(super) fn begin(
        self,
        list: &mut ListBuilder,
        index: usize,
        buffers: &BucketBuffers,
        gradients: &GradientBuckets,
        updated: BufferId,
    ) -> Begun {
        let master = self.stage.state.has_master_copy.then(|| buffers.states.last().copied()).flatten();
        let values = master.unwrap_or(updated);
        let mut begun = Begun { index, values, change: None, received: Vec::new(), rounded: master.map(|_| updated) };
        let name = name_of(index);
        let along_replicas = Group::along(Axis::Data);
        match (&self.stage.plan.mode, buffers.outer.first()) {
            (Mode::Decentralised(mode), _) => begun.received = self.send_to_neighbours(list, *mode, &name, values),
            (_, Some(&outer)) => {
                // The gradient is used up, so its buffer is free.
                let Some(change) = gradients.reduced(index).or(buffers.gradients) else { return begun };
                let kernel = Kernel::Difference { elements: list.elements(values) };
                list.compute(Label::of_step(&name, Phase::Update), kernel, &[outer, values], &[change]);
                list.all_reduce_of_step(&name, along_replicas, change);
                begun.change = Some(change);
            }
            _ => list.all_reduce_of_step(&name, along_replicas, values),
        }
        begun
    }

    /// Sends values to the neighbours of each replica and receives theirs.
    fn send_to_neighbours(self, list: &mut ListBuilder, mode: Decentralised, name: &str, values: BufferId) -> Vec<BufferId> {
        let replicas = self.replicas();
        let distances = match mode.graph {
            // In a ring of two the next replica is also the previous one.
            AveragingGraph::Ring if replicas > 2 => vec![1, replicas - 1],
            AveragingGraph::Ring => vec![1],
            AveragingGraph::Exponential => vec![1 << self.round],
            AveragingGraph::Complete => (1..replicas).collect(),
        };
        let label = Label::of_step(name, Phase::Update);
        let receive = |distance: usize| {
            let to = list.peer(self.peer(distance));
            list.send(label, to, values);
            let from = list.peer(self.peer(replicas - distance));
            let received = list.add_buffer(name, BufferRole::Workspace, vec![list.elements(values)], DataType::Fp32);
            list.receive(label, from, received);
            received
        };
        distances.into_iter().map(receive).collect()
    }

    /// The ranks of the replica `distance` places after each rank's own.
    fn peer(self, distance: usize) -> Peer {
        let (mesh, index) = (self.stage.mesh, self.stage.index);
        let peer_of = |rank: Rank| {
            let own = mesh.coordinates(rank);
            (rank, mesh.rank(own.with(Axis::Data, (own.along(Axis::Data) + distance) % self.replicas())))
        };
        let ranks = (0..mesh.world_size()).map(Rank).filter(|&rank| mesh.stage_of(rank) == index);
        Peer { stage: index, ranks: Some(ranks.map(peer_of).collect()) }
    }

    fn replicas(self) -> usize {
        self.stage.lowering.mesh.size(Axis::Data)
    }

    /// Ends the exchange of a bucket: the values become the mean, or what the outer optimizer makes
    /// of it.
    pub(super) fn end(self, list: &mut ListBuilder, buffers: &BucketBuffers, begun: &Begun) {
        let (name, elements) = (name_of(begun.index), list.elements(begun.values));
        let label = Label::of_step(&name, Phase::Update);
        match (begun.change, self.stage.plan.mode.outer()) {
            (Some(change), Some(outer)) => {
                let (momentum, nesterov) = (outer.momentum != 0.0, outer.optimizer == OuterRule::Nesterov);
                let kernel = Kernel::OuterStep { elements, replicas: self.replicas(), momentum, nesterov };
                let writes: Vec<BufferId> = std::iter::once(begun.values).chain(buffers.outer.iter().copied()).collect();
                list.compute(label, kernel, &[change], &writes);
            }
            _ => {
                for &received in &begun.received {
                    list.compute(label, Kernel::Accumulate { elements }, &[received], &[begun.values]);
                }
                let parts = if begun.received.is_empty() { self.replicas() } else { begun.received.len() + 1 };
                list.compute(label, Kernel::Average { elements, parts }, &[], &[begun.values]);
            }
        }
        if let Some(rounded) = begun.rounded {
            list.compute(label, Kernel::Narrow { elements }, &[begun.values], &[rounded]);
        }
    }

    /// Averages running statistics over all replicas, whatever the graph: they are few.
    pub(super) fn average(self, list: &mut ListBuilder, name: &str, values: &[BufferId]) {
        for &buffer in values {
            list.all_reduce_of_step(name, Group::along(Axis::Data), buffer);
        }
        for &buffer in values {
            let kernel = Kernel::Average { elements: list.elements(buffer), parts: self.replicas() };
            list.compute(Label::of_step(name, Phase::Update), kernel, &[], &[buffer]);
        }
    }
}

fn name_of(bucket: usize) -> String {
    format!("parameters {bucket}")
}
