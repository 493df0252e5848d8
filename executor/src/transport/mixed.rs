//! Shared memory to the ranks of this machine, TCP to all others.

use super::{Channel, SharedMemory, Starved, StreamNumber, Tcp, Transport, TransportError};

/// The transport of a run on several machines that each have several ranks.
#[derive(Debug)]
pub struct Mixed {
    shared_memory: SharedMemory,
    tcp: Tcp,
}

impl Mixed {
    /// Joins two transports, which must be of the same rank.
    pub fn new(shared_memory: SharedMemory, tcp: Tcp) -> Result<Self, TransportError> {
        if shared_memory.rank() == tcp.rank() {
            Ok(Mixed { shared_memory, tcp })
        } else {
            Err(TransportError::NoSuchPeer { rank: shared_memory.rank(), from: tcp.rank() })
        }
    }
}

impl Transport for Mixed {
    fn rank(&self) -> usize {
        self.tcp.rank()
    }

    fn world_size(&self) -> usize {
        self.tcp.world_size()
    }

    fn open(&self, peer: usize, stream: StreamNumber) -> Result<Channel, TransportError> {
        if self.shared_memory.ranks().contains(&peer) {
            self.shared_memory.open(peer, stream)
        } else {
            self.tcp.open(peer, stream)
        }
    }

    fn nudge(&self, stream: StreamNumber) {
        self.shared_memory.nudge(stream);
        self.tcp.nudge(stream);
    }

    fn abort(&self, lost: Option<usize>) {
        self.shared_memory.abort(lost);
        self.tcp.abort(lost);
    }

    fn starved(&self) -> Vec<Starved> {
        self.tcp.starved()
    }

    fn sent(&self, peer: usize, stream: StreamNumber) -> Option<u64> {
        self.tcp.sent(peer, stream)
    }
}
