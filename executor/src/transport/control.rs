//! The control connections between the launcher and every rank, from the start of a run to its end.
//!
//! The launcher holds a [`ControlServer`]. Each rank joins it through a [`ControlClient`],
//! announces where other ranks can reach it, and receives everyone's announcements once the last
//! rank has joined. The connections stay open: ranks send reports, the launcher sends orders, and a
//! connection that ends tells the launcher which rank is gone. A rank whose process is stopped, or
//! whose host cannot be reached, is known by its missing heartbeats. This module does not know what
//! the messages mean.

mod client;
pub(super) mod frame;
mod life;
mod server;

pub use client::ControlClient;
pub use frame::{MAX_FRAME_BYTES, Message};
#[cfg(test)]
pub(crate) use life::LifeWatch;
pub use server::{ControlServer, Event};

use std::net::SocketAddr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// How often a rank tells the launcher that its process runs.
pub(super) const HEARTBEAT: Duration = Duration::from_secs(1);
/// The least time after which a rank without heartbeats may be called silent: it outlasts two that
/// are late.
pub const LEAST_PEER_TIMEOUT: Duration = Duration::from_secs(3);

/// Longest time for the rest of a message that has begun to arrive, and for a write.
const STALL_TIME: Duration = Duration::from_secs(30);

/// A rank's announcement to the others when it joins.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Announcement {
    /// Where it accepts connections of other ranks; `None` if it does not. An unspecified IP
    /// address (`0.0.0.0`) stands for the one from which the rank has connected to the launcher.
    pub address: Option<SocketAddr>,
    /// The name of its machine. Ranks on one machine can share memory.
    pub machine: String,
}

/// The announcements of all ranks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PeerTable {
    /// Announcements, indexed by rank.
    pub ranks: Vec<Announcement>,
}

impl PeerTable {
    /// All ranks' addresses, indexed by rank. The error is the first rank without an address.
    pub fn addresses(&self) -> Result<Vec<SocketAddr>, usize> {
        self.ranks.iter().enumerate().map(|(rank, announcement)| announcement.address.ok_or(rank)).collect()
    }
}
