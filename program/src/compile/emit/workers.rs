//! The messages of a worker to and from parameter servers.
//!
//! A step begins with the pull of every bucket's parameters. Kernels of the first layers run while
//! the parameters of later ones arrive. Each bucket's gradients are pushed as soon as they are
//! complete.

use super::list::{Label, ListBuilder};
use super::persistent::PersistentBuffers;
use super::push::Push;
use super::stage::{Duty, Stage};
use crate::mesh::{Axis, Rank};
use crate::program::{Peer, PeerId, Phase};

/// The messages of a worker, to and from all servers.
pub(super) struct WorkerMessages {
    /// The servers, in the order of their parts.
    servers: Vec<PeerId>,
    format: Push,
    /// The buckets that were pushed, in order.
    pub(super) pushed: Vec<usize>,
}

impl WorkerMessages {
    pub(super) fn new(list: &mut ListBuilder, stage: &Stage<'_>) -> Self {
        let servers = match stage.duty {
            Duty::Worker => peers(list, stage, stage.index + stage.cuts.stages, stage.plan.mode.servers()),
            Duty::Alone | Duty::Server => Vec::new(),
        };
        Self { servers, format: Push::of(stage.plan), pushed: Vec::new() }
    }

    /// Receives all parameters.
    pub(super) fn pull(&self, list: &mut ListBuilder, stage: &Stage<'_>, persistent: &PersistentBuffers) {
        for bucket in in_forward_order(stage) {
            let name = format!("parameters {bucket}");
            for (&server, part) in self.servers.iter().zip(&persistent.buckets[bucket].parts) {
                list.receive(Label::of_step(&name, Phase::Forward), server, part.parameters);
            }
        }
    }

    /// Sends the gradients of a bucket.
    pub(super) fn push(&mut self, list: &mut ListBuilder, persistent: &PersistentBuffers, bucket: usize) {
        let name = format!("gradients {bucket}");
        for (&server, part) in self.servers.iter().zip(&persistent.buckets[bucket].parts) {
            let message = self.format.compress(list, &name, part.gradients, part.residual);
            list.send(Label::of_step(&name, Phase::Update), server, message);
        }
        self.pushed.push(bucket);
    }
}

/// The trained buckets in the order in which the forward pass reads them: buckets are numbered as
/// the backward pass completes them.
pub(super) fn in_forward_order(stage: &Stage<'_>) -> Vec<usize> {
    let mut buckets: Vec<usize> = stage.state.trained_buckets().collect();
    buckets.reverse();
    buckets
}

/// For the ranks of `own`, the peers in `stage` with the same coordinates: one for each of `count`
/// positions along `data`.
pub(super) fn peers(list: &mut ListBuilder, own: &Stage<'_>, stage: usize, count: usize) -> Vec<PeerId> {
    (0..count).map(|position| peer(list, own, stage, position)).collect()
}

/// For the ranks of `own`, the peer in `stage` with the same coordinates, except for `position`
/// along `data`.
pub(super) fn peer(list: &mut ListBuilder, own: &Stage<'_>, stage: usize, position: usize) -> PeerId {
    let mesh = own.mesh;
    let peer_of = |rank: Rank| {
        let coordinates = mesh.coordinates(rank).with(Axis::Pipeline, stage).with(Axis::Data, position);
        (rank, mesh.rank(coordinates))
    };
    list.peer(Peer { stage, ranks: Some(mesh.stage_ranks(own.index).into_iter().map(peer_of).collect()) })
}
