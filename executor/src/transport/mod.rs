//! How the ranks of a run move bytes between their processes: channels, collectives, and the launcher's line to every rank.
//!
//! Three nouns. A [`Transport`] opens one [`Channel`] to each peer on each numbered stream; a [`Group`] runs collectives (ring
//! all-reduce and its kin) over such channels; a [`ControlServer`] with its [`ControlClient`]s brings the ranks together at the
//! start and stays open for reports and orders. [`SharedMemory`] joins the ranks of one machine, [`Tcp`] those of several, and
//! [`Mixed`] picks whichever of the two reaches a peer.
//!
//! ```
//! use std::sync::Arc;
//! use foretell_executor::transport::{Group, Patience, Segment, SegmentShape, SharedMemory, StreamNumber, TransportError};
//!
//! // Two ranks as threads; in a run each is a process that inherits the segment.
//! let segment = Segment::create(&SegmentShape::new(vec![0, 1], 1))?;
//! let rank = |rank: usize| -> Result<f32, TransportError> {
//!     let transport = Arc::new(SharedMemory::attach(&segment, rank, 2, Patience::default())?);
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
//! Nothing here knows layouts, Programs or kernels: only ranks, streams, sizes, bytes, and sums (or maxima) of `f32`.

mod acceptor;
mod channel;
mod control;
mod error;
mod frame;
mod group;
mod handshake;
mod key;
mod key_file;
mod message;
mod mixed;
mod neighbours;
mod reduce;
mod shared_memory;
mod tcp;
#[cfg(test)]
mod tests;

pub use channel::{
    Channel, Endpoint, Patience, ReceiveHalf, Receiving, SendHalf, Sending, Waiter, drive, exchange, spin_only_while,
};
pub use control::{Announcement, ControlClient, ControlServer, Event, PeerTable};
pub use error::{Party, TransportError};
pub use frame::{MOST_FRAME_BYTES, Message};
pub use group::{Group, chunk_range};
pub use key::RunKey;
pub use key_file::KeyFile;
pub use message::{Incoming, Outgoing, WrongLength};
pub use mixed::Mixed;
pub use reduce::{Number, Reduction};
pub use shared_memory::{Segment, SegmentShape, SharedMemory};
pub use tcp::{Tcp, TcpOptions};

use std::fmt;

/// A first-in, first-out order of messages between ranks: one process group's traffic, or one point-to-point direction's.
///
/// Threads of a rank that use different streams never see each other's messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StreamNumber(pub u16);

impl fmt::Display for StreamNumber {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "stream {}", self.0)
    }
}

/// A way for the ranks of one run to reach each other.
pub trait Transport: Send + Sync {
    /// The rank this process is.
    fn rank(&self) -> usize;

    /// How many ranks the run has.
    fn world_size(&self) -> usize;

    /// The channel to `peer` on `stream`. Either side opens it once; opening may block until the peer's process can be reached.
    fn open(&self, peer: usize, stream: StreamNumber) -> Result<Channel, TransportError>;

    /// Has this process's threads that block on a stream look again whether they may spin ([`spin_only_while`]). A hint: what cannot be
    /// told so wakes when its bytes come.
    fn nudge(&self, stream: StreamNumber);

    /// Makes every wait of this process fail soon with [`TransportError::PeerLost`] naming `lost`, or, without a name,
    /// with [`TransportError::Aborted`]. The first call decides.
    fn abort(&self, lost: Option<usize>);
}
