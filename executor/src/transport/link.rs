//! Signs that bytes between two ranks do not arrive although both ranks run.
//!
//! Each end of a connection counts its bytes. If a rank waits for bytes that its peer has sent long
//! ago, the link is lost. Neither end can know that alone: a peer that has nothing to send looks
//! the same to the receiver, and the sender cannot know what its kernel, or a device on the way,
//! has done with the bytes. So each end reports its counts, and the launcher compares them. A
//! connection that cannot be made counts as lost without a comparison, since peers accept
//! connections at any time.

use super::StreamNumber;
use serde::{Deserialize, Serialize};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// A connection on which a rank waits for bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Starved {
    /// The rank that should send them.
    pub peer: usize,
    /// The stream.
    pub stream: StreamNumber,
    /// The bytes that have arrived since the connection was made; `None` while it is being made.
    pub received: Option<u64>,
}

/// Which waits to report to the launcher: those that have lasted since the last look.
#[derive(Clone, Debug, Default)]
pub struct StarvedWatch(Vec<Starved>);

impl StarvedWatch {
    /// The waits of `now` that the last look found too.
    pub fn still(&mut self, now: Vec<Starved>) -> Vec<Starved> {
        let still = now.iter().filter(|starved| self.0.contains(*starved)).copied().collect();
        self.0 = now;
        still
    }
}

/// The bytes of one connection, as one end counts them.
#[derive(Debug, Default)]
pub(super) struct Traffic {
    sent: AtomicU64,
    received: AtomicU64,
    /// Whether the last attempt to receive found nothing.
    is_starved: AtomicBool,
}

impl Traffic {
    /// Counts bytes that the kernel has taken.
    pub(super) fn add_sent(&self, count: usize) {
        self.sent.fetch_add(count as u64, Ordering::Relaxed);
    }

    /// Counts the bytes of an attempt to receive, which may be none.
    pub(super) fn add_received(&self, count: usize) {
        self.received.fetch_add(count as u64, Ordering::Relaxed);
        self.is_starved.store(count == 0, Ordering::Relaxed);
    }

    pub(super) fn sent(&self) -> u64 {
        self.sent.load(Ordering::Relaxed)
    }

    /// The bytes that have arrived, if this end waits for more.
    pub(super) fn starved_after(&self) -> Option<u64> {
        self.is_starved.load(Ordering::Relaxed).then(|| self.received.load(Ordering::Relaxed))
    }
}
