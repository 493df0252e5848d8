//! The traits of the two halves of a channel. Each transport implements them.

use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use rustix::event::PollFlags;

use super::doorbell::Doorbell;
use super::message::{Incoming, Outgoing};
use super::{StreamNumber, TransportError};

/// How a thread waits for its peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WaitPolicy {
    /// How long to spin, yielding the core, before blocking. Spinning also ends where it would take
    /// time from other work: see [`spin_only_while`](super::spin_only_while).
    pub spin: Duration,
    /// How long to wait without any progress before giving up with an error that names the peer.
    pub timeout: Duration,
}

impl Default for WaitPolicy {
    fn default() -> Self {
        // A blocked process takes some 20-50 us to wake on a virtual machine whose core fell
        // asleep. Five minutes outlast slow checkpoints and evaluations on another rank.
        WaitPolicy { spin: Duration::from_millis(1), timeout: Duration::from_secs(300) }
    }
}

/// The part that both halves of a channel have in common.
pub trait Endpoint: Send {
    /// The rank at the other end.
    fn peer(&self) -> usize;
    /// The stream that the channel belongs to.
    fn stream(&self) -> StreamNumber;
    /// Returns whether trying now would move bytes or find the channel broken. Cheap.
    fn ready(&self) -> bool;
    /// The object to block on until the half is [`ready`](Self::ready).
    fn wake_source(&self) -> WakeSource<'_>;
    /// Returns an error if the run was aborted or the peer is known to be gone.
    fn check(&self) -> Result<(), TransportError>;
    /// How to wait for the peer.
    fn wait_policy(&self) -> WaitPolicy;
    /// The time by which waits are limited. A simulation has its own.
    fn now(&self) -> Instant {
        Instant::now()
    }
}

/// The sending half of a channel.
pub trait SendHalf: Endpoint {
    /// Sends as much of `message` as fits without blocking. Returns the number of bytes.
    fn try_send(&mut self, message: &mut Outgoing<'_>) -> Result<usize, TransportError>;
}

/// The receiving half of a channel.
pub trait ReceiveHalf: Endpoint {
    /// Receives as much of `message` as has arrived, without blocking. Returns the number of bytes.
    fn try_receive(&mut self, message: &mut Incoming<'_>) -> Result<usize, TransportError>;
}

/// The object that a half blocks on.
#[derive(Clone, Copy)]
pub enum WakeSource<'a> {
    /// A doorbell in shared memory.
    Doorbell(&'a Doorbell),
    /// A socket that is to become readable or writable.
    Socket(BorrowedFd<'a>, PollFlags),
    /// Nothing: the thread has to poll.
    Nothing,
}
