//! Workers and parameter servers: the messages between them, and the step of a server.
//!
//! A step begins with the pull: servers send every bucket's parameters, in the order in which the
//! forward pass reads them. Then workers push each bucket's gradients as soon as these are
//! complete. A server adds the pushes of a bucket in the order of the workers, so that the sum has
//! the same bits in every run. It updates a bucket while the pushes of the next ones arrive.

use super::list::{Label, ListBuilder};
use super::persistent::PersistentBuffers;
use super::stage::Stage;
use super::update::Update;
use super::{Duty, StageEmitter};
use crate::compile::programs::Wanted;
use crate::mesh::{Axis, Rank};
use crate::program::{BufferRole, Peer, PeerId, Phase};
use foretell_models::Kernel;
use foretell_units::DataType;

/// The messages of a worker, to and from all servers.
pub(super) struct WorkerMessages {
    /// The servers, in the order of their parts.
    servers: Vec<PeerId>,
    /// The buckets that were pushed, in order.
    pub(super) pushed: Vec<usize>,
}

impl WorkerMessages {
    pub(super) fn new(list: &mut ListBuilder, stage: &Stage<'_>) -> Self {
        let servers = match stage.duty {
            Duty::Worker => peers(list, stage, stage.index + stage.cuts.stages, stage.plan.mode.servers()),
            Duty::Alone | Duty::Server => Vec::new(),
        };
        Self { servers, pushed: Vec::new() }
    }

    /// Receives all parameters.
    pub(super) fn pull(&self, list: &mut ListBuilder, stage: &Stage<'_>, persistent: &PersistentBuffers) {
        for bucket in in_forward_order(stage) {
            let name = format!("parameters {bucket}");
            for (&server, &[parameters, _]) in self.servers.iter().zip(&persistent.buckets[bucket].parts) {
                list.receive(Label::of_step(&name, Phase::Forward), server, parameters);
            }
        }
    }

    /// Sends the gradients of a bucket.
    pub(super) fn push(&mut self, list: &mut ListBuilder, persistent: &PersistentBuffers, bucket: usize) {
        let name = format!("gradients {bucket}");
        for (&server, &[_, gradients]) in self.servers.iter().zip(&persistent.buckets[bucket].parts) {
            list.send(Label::of_step(&name, Phase::Update), server, gradients);
        }
        self.pushed.push(bucket);
    }
}

impl StageEmitter<'_> {
    /// Emits what a server does in a Program. `pushed` has the buckets in the order in which
    /// workers push them.
    pub(in crate::compile) fn serve(&mut self, wanted: Wanted, pushed: &[usize]) {
        let Self { stage, list, persistent, gradients, .. } = self;
        let workers = peers(list, stage, stage.index - stage.cuts.stages, stage.plan.layout.data);
        if wanted == Wanted::Logits {
            return;
        }
        for bucket in in_forward_order(stage) {
            for &worker in &workers {
                let label = format!("parameters {bucket}");
                list.send(Label::of_step(&label, Phase::Forward), worker, persistent.buckets[bucket].parameters);
            }
        }
        if matches!(wanted, Wanted::Step(_)) {
            gradients.take_whole(persistent);
            let mut update = Update { list, stage, persistent, gradients, exchange: None };
            for &bucket in pushed {
                sum_pushes(update.list, persistent, bucket, &workers);
                update.run_early(bucket);
            }
            update.run_late();
        }
    }
}

/// Receives the gradients of a bucket from all workers, and adds them.
fn sum_pushes(list: &mut ListBuilder, persistent: &PersistentBuffers, bucket: usize, workers: &[PeerId]) {
    let Some(sum) = persistent.buckets[bucket].gradients else { return };
    let (name, elements) = (format!("gradients {bucket}"), list.elements(sum));
    let label = Label::of_step(&name, Phase::Update);
    let mut others = Vec::new();
    for (number, &worker) in workers.iter().enumerate() {
        let received = match number {
            0 => sum,
            _ => list.add_buffer(&name, BufferRole::Workspace, vec![elements], DataType::Fp32),
        };
        list.receive(label, worker, received);
        others.extend((number > 0).then_some(received));
    }
    for received in others {
        list.compute(label, Kernel::Accumulate { elements }, &[received], &[sum]);
    }
}

/// The trained buckets in the order in which the forward pass reads them: buckets are numbered as
/// the backward pass completes them.
fn in_forward_order(stage: &Stage<'_>) -> Vec<usize> {
    let mut buckets: Vec<usize> = stage.state.trained_buckets().collect();
    buckets.reverse();
    buckets
}

/// The ranks of `stage` with the same coordinates, one for each of `count` positions along `data`.
fn peers(list: &mut ListBuilder, own: &Stage<'_>, stage: usize, count: usize) -> Vec<PeerId> {
    let mesh = own.mesh;
    let peer = |position: usize| {
        let peer_of = |rank: Rank| {
            let coordinates = mesh.coordinates(rank).with(Axis::Pipeline, stage).with(Axis::Data, position);
            (rank, mesh.rank(coordinates))
        };
        Peer { stage, ranks: Some(mesh.stage_ranks(own.index).into_iter().map(peer_of).collect()) }
    };
    (0..count).map(|position| list.peer(peer(position))).collect()
}
