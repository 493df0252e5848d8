//! The flag that ends all waits of a run's processes.

use std::sync::atomic::{AtomicU32, Ordering};

use super::TransportError;

const NOT_ABORTED: u32 = 0;
const ABORTED_BY_LAUNCHER: u32 = u32::MAX;

/// A flag that the run is aborted, with the rank that was lost. It is a single word, so it may lie
/// in memory that several processes share; zero bytes are a flag that is not set.
#[repr(transparent)]
#[derive(Debug, Default)]
pub(super) struct AbortFlag(AtomicU32);

impl AbortFlag {
    /// Sets the flag, naming the rank that is lost if there is one. Only the first call has an
    /// effect.
    pub(super) fn set(&self, lost: Option<usize>) {
        // The word of a lost rank is its number plus one.
        let word = lost.and_then(|rank| u32::try_from(rank).ok()).map_or(ABORTED_BY_LAUNCHER, |rank| rank.saturating_add(1));
        let _ = self.0.compare_exchange(NOT_ABORTED, word, Ordering::AcqRel, Ordering::Relaxed);
    }

    /// Returns the error with which waits must end, once the flag is set.
    pub(super) fn check(&self) -> Result<(), TransportError> {
        match self.0.load(Ordering::Acquire) {
            NOT_ABORTED => Ok(()),
            ABORTED_BY_LAUNCHER => Err(TransportError::Aborted),
            word => Err(TransportError::PeerLost { rank: word as usize - 1 }),
        }
    }
}
