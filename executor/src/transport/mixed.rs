//! Shared memory to the ranks of this machine, TCP to all others.

use super::{Channel, SharedMemory, StreamNumber, Tcp, Transport, TransportError};

/// The transport of a rank on one of several machines that each run several ranks.
#[derive(Debug)]
pub struct Mixed {
    near: SharedMemory,
    far: Tcp,
}

impl Mixed {
    /// Joins the two; both must be of the same rank.
    pub fn new(near: SharedMemory, far: Tcp) -> Result<Self, TransportError> {
        if near.rank() == far.rank() {
            Ok(Mixed { near, far })
        } else {
            Err(TransportError::NoSuchPeer { rank: near.rank(), from: far.rank() })
        }
    }
}

impl Transport for Mixed {
    fn rank(&self) -> usize {
        self.far.rank()
    }

    fn world_size(&self) -> usize {
        self.far.world_size()
    }

    fn open(&self, peer: usize, stream: StreamNumber) -> Result<Channel, TransportError> {
        if self.near.ranks().contains(&peer) { self.near.open(peer, stream) } else { self.far.open(peer, stream) }
    }

    fn nudge(&self, stream: StreamNumber) {
        self.near.nudge(stream);
        self.far.nudge(stream);
    }

    fn abort(&self, lost: Option<usize>) {
        self.near.abort(lost);
        self.far.abort(lost);
    }
}
