//! How the ranks of a run exchange bytes: channels, collectives, and control connections to the
//! launcher.
//!
//! - A [`Transport`] opens one [`Channel`] to each peer on each numbered stream. [`SharedMemory`]
//!   connects the ranks of one machine, [`Tcp`] those of several, and [`Mixed`] chooses between the
//!   two for each peer. [`Mpi`] connects those that Open MPI's `mpirun` started.
//! - A [`Group`] runs collectives, such as a ring all-reduce, over these channels.
//! - A [`ControlServer`] and its [`ControlClient`]s bring the ranks together at the start, and
//!   carry reports and orders until the end.
//!
//! ```
//! use std::sync::Arc;
//! use foretell_executor::transport::{
//!     Group, Segment, SegmentShape, SharedMemory, StreamNumber, TransportError, WaitPolicy,
//! };
//!
//! // Two ranks as threads. In a run each is a process that inherits the segment.
//! let segment = Segment::create(&SegmentShape::new(vec![0, 1], 1))?;
//! let rank = |rank: usize| -> Result<f32, TransportError> {
//!     let transport = Arc::new(SharedMemory::attach(&segment, rank, 2, WaitPolicy::default())?);
//!     let mut values = [rank as f32 + 1.0];
//!     Group::new(transport, &[0, 1], StreamNumber(0))?.all_reduce_f32(&mut values)?;
//!     Ok(values[0])
//! };
//! std::thread::scope(|scope| -> Result<(), TransportError> {
//!     let other = scope.spawn(|| rank(1));
//!     assert_eq!(rank(0)?, 3.0);
//!     assert_eq!(other.join().unwrap()?, 3.0);
//!     Ok(())
//! })?;
//! # Ok::<(), TransportError>(())
//! ```
//!
//! Nothing here knows layouts, Programs or kernels: only ranks, streams, bytes, and sums of
//! numbers.

mod abort_flag;
mod acceptor;
mod channel;
mod control;
mod doorbell;
mod endpoint;
mod error;
mod group;
mod handshake;
mod key;
mod key_file;
mod kind;
mod link;
mod message;
mod mixed;
mod mpi;
mod neighbours;
pub(crate) mod patience;
mod reduce;
mod session;
mod shared_memory;
#[cfg(test)]
pub(crate) mod simulated;
mod tcp;
#[cfg(test)]
mod tests;
mod waiting;

pub use channel::{Channel, PendingReceive, PendingSend, send_receive, transfer};
#[cfg(test)]
pub(crate) use control::LifeWatch;
pub use control::{Announcement, ControlClient, ControlServer, Event, LEAST_PEER_TIMEOUT, MAX_FRAME_BYTES, Message, PeerTable};
pub use doorbell::Doorbell;
pub use endpoint::{Endpoint, ReceiveHalf, SendHalf, WaitPolicy, WakeSource};
pub use error::{Peer, TransportError};
pub use group::{Group, chunk_range};
pub use key::RunKey;
pub use key_file::KeyFile;
pub use kind::TransportKind;
pub use link::{Starved, StarvedWatch};
pub use message::{Incoming, Outgoing, WrongLength};
pub use mixed::Mixed;
pub use mpi::Mpi;
pub use reduce::ElementType;
pub use shared_memory::{Segment, SegmentShape, SharedMemory};
pub use tcp::{Tcp, TcpOptions};
pub use waiting::spin_only_while;

use serde::{Deserialize, Serialize};
use std::fmt;
use std::time::Duration;

/// The number of a first-in, first-out order of messages between ranks: the traffic of one process
/// group, or of one direction of point-to-point messages.
///
/// Threads of a rank that use different streams never see each other's messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct StreamNumber(pub u16);

impl fmt::Display for StreamNumber {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "stream {}", self.0)
    }
}

/// A way for the ranks of one run to reach each other.
pub trait Transport: Send + Sync {
    /// This process's rank.
    fn rank(&self) -> usize;

    /// The number of ranks of the run.
    fn world_size(&self) -> usize;

    /// Opens the channel to `peer` on `stream`. Each side opens it once. The call may block until
    /// the peer's process can be reached.
    fn open(&self, peer: usize, stream: StreamNumber) -> Result<Channel, TransportError>;

    /// Wakes this process's threads that block on a stream, so that they check again whether they
    /// may spin ([`spin_only_while`]). It is only a hint: a thread that it does not reach wakes
    /// when its bytes arrive.
    fn nudge(&self, stream: StreamNumber);

    /// Makes all waits of this process fail soon: with [`TransportError::PeerLost`] if a rank is
    /// `lost`, else with [`TransportError::Aborted`]. Only the first call has an effect.
    fn abort(&self, lost: Option<usize>);

    /// The connections on which this rank waits for bytes now. Empty for transports that cannot
    /// lose bytes.
    fn starved(&self) -> Vec<Starved> {
        Vec::new()
    }

    /// The bytes that this rank has sent to `peer` on `stream`; `None` if they have no connection.
    fn sent(&self, _peer: usize, _stream: StreamNumber) -> Option<u64> {
        None
    }

    /// Ends the transport, within `timeout`. All ranks call it once their work is done and their
    /// channels are closed; a rank that fails does not.
    fn leave(&self, _timeout: Duration) -> Result<(), TransportError> {
        Ok(())
    }
}
