//! The exchange between replicas at the end of a round, bucket by bucket: each sends its
//! parameters, or how far they have moved in the round. The mode decides which of them, and to
//! whom.
//!
//! An exchange begins right after a bucket's update and ends after all updates, so that it overlaps
//! with those of other buckets. It works on the single-precision values: those of the master copy,
//! if there is one.

use super::list::{Label, ListBuilder};
use super::persistent::BucketBuffers;
use super::stage::Stage;
use crate::mesh::{Axis, Group, Rank};
use crate::plan::{AveragingGraph, Mode, OuterRule};
use crate::program::{BufferId, BufferRole, Peer, PeerId, Phase};
use foretell_models::Kernel;
use foretell_units::DataType;

/// The exchange at the end of a step.
pub(super) struct Exchange<'a> {
    stage: &'a Stage<'a>,
    /// The neighbours of each replica: whom it sends to, and whom it receives from. Empty if all
    /// replicas exchange with all by all-reduces.
    neighbours: Vec<(PeerId, PeerId)>,
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
    /// The exchange of a stage. `round` is the number of the round's kind, which selects the
    /// neighbours if they change.
    pub(super) fn new(stage: &'a Stage<'a>, round: usize, list: &mut ListBuilder) -> Self {
        let mut exchange = Self { stage, neighbours: Vec::new() };
        let Mode::Decentralised(mode) = stage.plan.mode else { return exchange };
        let replicas = exchange.replicas();
        let distances = match mode.graph {
            // In a ring of two the next replica is also the previous one.
            AveragingGraph::Ring if replicas > 2 => vec![1, replicas - 1],
            AveragingGraph::Ring => vec![1],
            AveragingGraph::Exponential => vec![1 << round],
            AveragingGraph::Complete => (1..replicas).collect(),
        };
        for distance in distances {
            let [to, from] = [distance, replicas - distance].map(|distance| list.peer(exchange.peer(distance)));
            exchange.neighbours.push((to, from));
        }
        exchange
    }

    /// Begins the exchange of a bucket whose update read `gradients` and wrote `updated`.
    pub(super) fn begin(
        &self,
        list: &mut ListBuilder,
        index: usize,
        buffers: &BucketBuffers,
        gradients: BufferId,
        updated: BufferId,
    ) -> Begun {
        let master = self.stage.state.has_master_copy.then(|| buffers.states.last().copied()).flatten();
        let values = master.unwrap_or(updated);
        let mut begun = Begun { index, values, change: None, received: Vec::new(), rounded: master.map(|_| updated) };
        let name = name_of(index);
        let along_replicas = Group::along(Axis::Data);
        match (self.stage.plan.mode, buffers.outer.first()) {
            (Mode::Decentralised(_), _) => begun.received = self.send_to_neighbours(list, &name, values),
            (_, Some(&outer)) => {
                // The gradients are used up, so their buffer is free.
                let kernel = Kernel::Difference { elements: list.elements(values) };
                list.compute(Label::of_step(&name, Phase::Update), kernel, &[outer, values], &[gradients]);
                list.all_reduce_of_step(&name, along_replicas, gradients);
                begun.change = Some(gradients);
            }
            _ => list.all_reduce_of_step(&name, along_replicas, values),
        }
        begun
    }

    /// Sends values to the neighbours of each replica and receives theirs.
    fn send_to_neighbours(&self, list: &mut ListBuilder, name: &str, values: BufferId) -> Vec<BufferId> {
        let label = Label::of_step(name, Phase::Update);
        let receive = |&(to, from): &(PeerId, PeerId)| {
            list.send(label, to, values);
            let received = list.add_buffer(name, BufferRole::Workspace, vec![list.elements(values)], DataType::Fp32);
            list.receive(label, from, received);
            received
        };
        self.neighbours.iter().map(receive).collect()
    }

    /// The ranks of the replica `distance` places after each rank's own.
    fn peer(&self, distance: usize) -> Peer {
        let (mesh, index) = (self.stage.mesh, self.stage.index);
        let peer_of = |rank: Rank| {
            let own = mesh.coordinates(rank);
            (rank, mesh.rank(own.with(Axis::Data, (own.along(Axis::Data) + distance) % self.replicas())))
        };
        let ranks = (0..mesh.world_size()).map(Rank).filter(|&rank| mesh.stage_of(rank) == index);
        Peer { stage: index, ranks: Some(ranks.map(peer_of).collect()) }
    }

    fn replicas(&self) -> usize {
        self.stage.plan.replicas()
    }

    /// Ends the exchange of a bucket: the values become the mean, or what the outer optimizer makes
    /// of it.
    pub(super) fn end(&self, list: &mut ListBuilder, buffers: &BucketBuffers, begun: &Begun) {
        let (name, elements) = (name_of(begun.index), list.elements(begun.values));
        let label = Label::of_step(&name, Phase::Update);
        match (begun.change, self.stage.plan.mode.outer()) {
            (Some(change), Some(outer)) => {
                let (momentum, nesterov) = (outer.momentum != 0.0, outer.optimizer == OuterRule::Nesterov);
                let kernel = Kernel::OuterStep { elements, replicas: self.replicas(), momentum, nesterov, mixed: false };
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
    pub(super) fn average(&self, list: &mut ListBuilder, name: &str, values: &[BufferId]) {
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
