//! The exchange between replicas in a round, bucket by bucket: each replica sends its parameters,
//! or their change over the round. The mode decides which of the two, and to whom.
//!
//! A whole exchange begins right after a bucket's update and ends after all updates, so that it
//! overlaps with those of other buckets. An exchange that overlaps with steps takes the changes at
//! the end of one step, sends one slice of them while the kernels of each following step run, and
//! ends with the last of those steps. All exchanges work on single-precision values: the master
//! copy, or else the parameters.

use super::averaging::{Averaging, Slice};
use super::list::{Label, ListBuilder};
use super::persistent::{BucketBuffers, PersistentBuffers};
use super::stage::Stage;
use crate::cycle::{ExchangePart, ExchangeTask};
use crate::mesh::{Axis, Group, Rank};
use crate::plan::{AveragingGraph, Mode, OuterRule};
use crate::program::{BufferId, BufferRole, Peer, PeerId, Phase};
use foretell_models::Kernel;
use foretell_units::DataType;

/// A step's part of an exchange.
pub(super) struct Exchange<'a> {
    stage: &'a Stage<'a>,
    part: ExchangePart,
    averaging: Averaging,
    /// By bucket: messages that arrive while the step's kernels run, and that kernels add at the
    /// end of the step.
    arrived: Vec<(usize, BufferId)>,
    /// The neighbours of each replica: for each, the peer that it sends to, and the peer that it
    /// receives from. Empty if all replicas exchange with all.
    neighbours: Vec<(PeerId, PeerId)>,
}

/// A bucket after its update.
pub(super) struct Updated<'a> {
    pub(super) index: usize,
    pub(super) buffers: &'a BucketBuffers,
    /// The gradients. Nothing reads them again, so the exchange may overwrite the buffer.
    pub(super) gradients: BufferId,
    pub(super) parameters: BufferId,
}

/// An exchange of a bucket that ends with the step.
pub(super) struct Begun {
    pub(super) index: usize,
    /// The updated parameters, or the rank's shard of them.
    pub(super) parameters: BufferId,
    /// The values that the exchange replaces: the master copy, or the parameters.
    values: BufferId,
    /// The sum of the replicas' changes, if the outer optimizer gets it.
    change: Option<BufferId>,
    /// The slices of changes that are exchanged, each with the received messages that this replica
    /// must still add.
    slices: Vec<(Slice, Option<BufferId>)>,
    /// The values received from the neighbours.
    received: Vec<BufferId>,
    /// True if the parameters are a rounded copy of the values.
    is_rounded: bool,
}

impl<'a> Exchange<'a> {
    /// Begins a step's part of an exchange of a stage: sends the slices that overlap with its
    /// kernels.
    pub(super) fn new(stage: &'a Stage<'a>, part: ExchangePart, list: &mut ListBuilder, persistent: &PersistentBuffers) -> Self {
        let (averaging, arrived, neighbours) = (Averaging::of(stage.plan), Vec::new(), Vec::new());
        let mut exchange = Self { stage, part, averaging, arrived, neighbours };
        exchange.send_changes(list, persistent);
        let Mode::Decentralised(mode) = stage.plan.mode else { return exchange };
        let replicas = exchange.replicas();
        let distances = match mode.graph {
            // In a ring of two the next replica is also the previous one.
            AveragingGraph::Ring if replicas > 2 => vec![1, replicas - 1],
            AveragingGraph::Ring => vec![1],
            AveragingGraph::Exponential => vec![1 << part.round],
            AveragingGraph::Complete => (1..replicas).collect(),
        };
        for distance in distances {
            let [to, from] = [distance, replicas - distance].map(|distance| list.peer(exchange.peer(distance)));
            exchange.neighbours.push((to, from));
        }
        exchange
    }

    fn send_changes(&mut self, list: &mut ListBuilder, persistent: &PersistentBuffers) {
        let ExchangeTask::Send(step) = self.part.task else { return };
        for index in self.stage.state.trained_buckets().filter(|&index| self.concerns(index)).collect::<Vec<_>>() {
            let (name, travelling) = (name_of(index), &persistent.buckets[index].travelling);
            if let Some(slice) = travelling.slices.get(step) {
                let messages = self.averaging.send(list, &name, travelling.changes, slice);
                self.arrived.extend(messages.map(|messages| (index, messages)));
            }
            if let Some(slice) = step.checked_sub(1).and_then(|before| travelling.slices.get(before)) {
                self.averaging.send_back(list, &name, slice);
            }
        }
    }

    /// Returns whether buckets may be exchanged before the end of the step.
    pub(super) fn may_begin_early(&self) -> bool {
        self.part.task == ExchangeTask::Whole && self.neighbours.is_empty()
    }

    /// Returns whether a bucket is part of the exchange.
    pub(super) fn concerns(&self, bucket: usize) -> bool {
        self.stage.state.buckets[bucket].fragment == self.part.fragment
    }

    /// The step's part for a bucket, right after its update. `None` if the exchange does not end
    /// with this step.
    pub(super) fn begin(&self, list: &mut ListBuilder, updated: &Updated<'_>) -> Option<Begun> {
        let &Updated { index, buffers, gradients, parameters } = updated;
        let master = self.stage.state.has_master_copy.then(|| buffers.states.last().copied()).flatten();
        let values = master.unwrap_or(parameters);
        let (change, slices, received) = (None, Vec::new(), Vec::new());
        let begun = Begun { index, parameters, values, change, slices, received, is_rounded: master.is_some() };
        let name = name_of(index);
        let Some(&outer) = buffers.outer.first() else {
            if matches!(self.stage.plan.mode, Mode::Decentralised(_)) {
                return Some(Begun { received: self.send_to_neighbours(list, &name, values), ..begun });
            }
            list.all_reduce_of_step(&name, Group::along(Axis::Data), values);
            return Some(begun);
        };
        let difference = Kernel::Difference { elements: list.elements(values) };
        let travelling = &buffers.travelling;
        // Compressed changes are stored in message buffers only.
        let changes = travelling.changes.unwrap_or(gradients);
        match self.part.task {
            ExchangeTask::Whole => {
                list.compute(Label::of_step(&name, Phase::Update), difference, &[outer, values], &[gradients]);
                let elements = list.elements(values);
                let sizes = self.averaging.sizes(elements, 0).into_iter().filter(|_| self.averaging.is_compressed());
                let place = |bytes| list.add_buffer(&name, BufferRole::Workspace, vec![bytes], DataType::Int8);
                let buffers: Vec<BufferId> = sizes.map(place).collect();
                let slices = self.averaging.cut(elements, 0, &mut buffers.into_iter());
                let send = |slice: Slice| {
                    self.averaging.compress(list, &name, gradients, &slice);
                    let messages = self.averaging.send(list, &name, Some(gradients), &slice);
                    (slice, messages)
                };
                Some(Begun { change: Some(gradients), slices: slices.into_iter().map(send).collect(), ..begun })
            }
            ExchangeTask::Take => {
                list.compute(Label::of_step(&name, Phase::Update), difference, &[outer, values], &[changes]);
                travelling.slices.iter().for_each(|slice| self.averaging.compress(list, &name, changes, slice));
                None
            }
            ExchangeTask::Send(step) => {
                let arrived = self.arrived.iter().find(|(bucket, _)| *bucket == index);
                if let (Some(&(_, messages)), Some(slice)) = (arrived, travelling.slices.get(step)) {
                    self.averaging.add(list, &name, messages, slice);
                }
                let is_last = step + 1 == self.stage.plan.mode.overlap();
                let slices = || travelling.slices.iter().map(|slice| (slice.clone(), None)).collect();
                is_last.then(|| Begun { change: Some(changes), slices: slices(), ..begun })
            }
        }
    }

    /// Adds the received changes of a bucket, if kernels add them, and sends the sums back.
    pub(super) fn add(&self, list: &mut ListBuilder, begun: &Begun) {
        let name = name_of(begun.index);
        for (slice, messages) in &begun.slices {
            if let Some(messages) = *messages {
                self.averaging.add(list, &name, messages, slice);
                self.averaging.send_back(list, &name, slice);
            }
        }
    }

    /// Sends values to each neighbour and receives the neighbour's values.
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

    /// The peers in the replica `distance` positions after each rank's own replica, wrapping
    /// around.
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

    /// Ends the exchange of a bucket: the values become the mean, or the result of the outer
    /// optimizer's step.
    pub(super) fn end(&self, list: &mut ListBuilder, buffers: &BucketBuffers, begun: &Begun) {
        let (name, elements) = (name_of(begun.index), list.elements(begun.values));
        let label = Label::of_step(&name, Phase::Update);
        match (begun.change, self.stage.plan.mode.outer()) {
            (Some(change), Some(outer)) => {
                begun.slices.iter().for_each(|(slice, _)| self.averaging.decompress(list, &name, change, slice));
                let mixed = self.stage.plan.mode.mixing() > 0.0;
                let (momentum, nesterov) = (outer.momentum != 0.0, outer.optimizer == OuterRule::Nesterov);
                let kernel = Kernel::OuterStep { elements, replicas: self.replicas(), momentum, nesterov, mixed };
                let writes: Vec<BufferId> = std::iter::once(begun.values).chain(buffers.outer.iter().copied()).collect();
                list.compute(label, kernel, &[change], &writes);
            }
            (None, None) => {
                for &received in &begun.received {
                    list.compute(label, Kernel::Accumulate { elements }, &[received], &[begun.values]);
                }
                let parts = if begun.received.is_empty() { self.replicas() } else { begun.received.len() + 1 };
                list.compute(label, Kernel::Average { elements, parts }, &[], &[begun.values]);
            }
            (Some(_), None) | (None, Some(_)) => {
                unreachable!("invariant: an outer optimizer, and it alone, gets the sum of changes")
            }
        }
        if begun.is_rounded {
            list.compute(label, Kernel::Narrow { elements }, &[begun.values], &[begun.parameters]);
        }
    }

    /// Averages running statistics over all replicas at the end of a round, whatever the averaging
    /// graph: they are small.
    pub(super) fn average(&self, list: &mut ListBuilder, name: &str, values: &[BufferId]) {
        let mode = self.stage.plan.mode;
        let is_over = match self.part.task {
            ExchangeTask::Whole => true,
            ExchangeTask::Take => false,
            ExchangeTask::Send(step) => step + 1 == mode.overlap(),
        };
        if !is_over || self.part.fragment + 1 < mode.fragments() {
            return;
        }
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
