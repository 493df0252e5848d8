//! Channels, and making progress on several of them at once.
//!
//! A channel is a pair of independent halves, so that one thread can send to a neighbour while it receives from the same one.
//! [`drive`] pushes any number of messages forward together, which is what lets every rank of a ring send and receive at once
//! without deadlock. A thread that waits spins for a moment if its core has nothing else to do, then blocks.

use std::cell::RefCell;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU32, Ordering, fence};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::thread::futex;

use super::message::{Incoming, Outgoing};
use super::reduce::{self, Number, Reduction};
use super::{StreamNumber, TransportError};

/// Blocked ranks wake up this often to see whether the run was aborted or the peer has gone.
const CHECK_INTERVAL: Duration = Duration::from_millis(100);
/// Waiting for channels of different kinds at once has no single thing to block on: look again this often.
const MIXED_INTERVAL: Duration = Duration::from_micros(200);

/// How long a channel waits, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Patience {
    /// Spin (yielding the core to whoever wants it) for so long before blocking, where that hinders nobody: see [`spin_only_while`].
    pub spin: Duration,
    /// Give up, naming the peer, after so long without a byte moved.
    pub timeout: Duration,
}

impl Default for Patience {
    fn default() -> Self {
        // A blocked process takes some 20-50 us to wake on a virtual machine whose core fell asleep. Five minutes outlast slow checkpoints
        // and evaluations on another rank.
        Patience { spin: Duration::from_millis(1), timeout: Duration::from_secs(300) }
    }
}

/// What both halves of a channel can say about themselves.
pub trait Endpoint: Send {
    /// The rank at the other end.
    fn peer(&self) -> usize;
    /// The stream this channel belongs to.
    fn stream(&self) -> StreamNumber;
    /// Whether trying now would move bytes (or find the channel broken). Cheap.
    fn ready(&self) -> bool;
    /// What to block on until [`ready`](Self::ready).
    fn waiter(&self) -> Waiter<'_>;
    /// An error if the run was aborted or the peer is known to be gone.
    fn check(&self) -> Result<(), TransportError>;
    /// How long to wait.
    fn patience(&self) -> Patience;
}

/// The sending half of a channel.
pub trait SendHalf: Endpoint {
    /// Hands over as much of `message` as fits without blocking, and returns how many bytes that was.
    fn try_send(&mut self, message: &mut Outgoing<'_>) -> Result<usize, TransportError>;
}

/// The receiving half of a channel.
pub trait ReceiveHalf: Endpoint {
    /// Takes as much of `message` as is here without blocking, and returns how many bytes that was.
    fn try_receive(&mut self, message: &mut Incoming<'_>) -> Result<usize, TransportError>;
}

/// A two-way channel to one peer on one stream. Messages arrive whole, in order, each with the length both sides expect.
pub struct Channel {
    /// Towards the peer.
    pub sender: Box<dyn SendHalf>,
    /// From the peer.
    pub receiver: Box<dyn ReceiveHalf>,
}

impl std::fmt::Debug for Channel {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "Channel(rank {}, {})", self.sender.peer(), self.sender.stream())
    }
}

impl Channel {
    /// Sends `bytes` as one message; returns once all of it is handed over (the peer may not have taken it yet).
    pub fn send(&mut self, bytes: &[u8]) -> Result<(), TransportError> {
        drive(&mut [Sending { half: &mut *self.sender, message: Outgoing::new(bytes) }], &mut [])
    }

    /// Receives one message of exactly `into.len()` bytes.
    pub fn receive(&mut self, into: &mut [u8]) -> Result<(), TransportError> {
        drive(&mut [], &mut [Receiving { half: &mut *self.receiver, message: Incoming::copy(into) }])
    }

    /// [`send`](Self::send) for numbers.
    pub fn send_f32(&mut self, values: &[f32]) -> Result<(), TransportError> {
        self.send(reduce::bytes_of(values))
    }

    /// [`receive`](Self::receive) for numbers.
    pub fn receive_f32(&mut self, into: &mut [f32]) -> Result<(), TransportError> {
        self.receive(reduce::bytes_of_mut(into))
    }

    /// Receives one message of `into.len()` numbers and reduces them into `into`.
    pub fn receive_reduce(&mut self, reduction: Reduction, into: &mut [f32]) -> Result<(), TransportError> {
        drive(
            &mut [],
            &mut [Receiving {
                half: &mut *self.receiver,
                message: Incoming::reduce(Number::Fp32, reduction, reduce::bytes_of_mut(into)),
            }],
        )
    }
}

/// A message and the half that is to send it.
pub struct Sending<'half, 'message> {
    /// Where to.
    pub half: &'half mut dyn SendHalf,
    /// What.
    pub message: Outgoing<'message>,
}

/// A message and the half that is to receive it.
pub struct Receiving<'half, 'message> {
    /// Where from.
    pub half: &'half mut dyn ReceiveHalf,
    /// What.
    pub message: Incoming<'message>,
}

/// Sends one message and receives another, both at once.
pub fn exchange(
    sender: &mut dyn SendHalf,
    outgoing: Outgoing<'_>,
    receiver: &mut dyn ReceiveHalf,
    incoming: Incoming<'_>,
) -> Result<(), TransportError> {
    drive(&mut [Sending { half: sender, message: outgoing }], &mut [Receiving { half: receiver, message: incoming }])
}

/// Sends and receives all these messages, each as its peer allows; returns when all are done.
pub fn drive(sends: &mut [Sending<'_, '_>], receives: &mut [Receiving<'_, '_>]) -> Result<(), TransportError> {
    loop {
        match advance(sends, receives)? {
            Advance::Finished => return Ok(()),
            Advance::Moved => {}
            Advance::Stuck => wait_for_any(sends, receives)?,
        }
    }
}

enum Advance {
    Finished,
    Moved,
    Stuck,
}

fn advance(sends: &mut [Sending<'_, '_>], receives: &mut [Receiving<'_, '_>]) -> Result<Advance, TransportError> {
    let mut moved = 0;
    let mut finished = true;
    for Sending { half, message } in sends {
        if !message.is_done() {
            moved += half.try_send(message)?;
            finished &= message.is_done();
        }
    }
    for Receiving { half, message } in receives {
        if !message.is_done() {
            moved += half.try_receive(message)?;
            finished &= message.is_done();
        }
    }
    Ok(match (finished, moved) {
        (true, _) => Advance::Finished,
        (false, 0) => Advance::Stuck,
        (false, _) => Advance::Moved,
    })
}

thread_local! {
    /// Whether the calling thread may spin now.
    static MAY_SPIN: RefCell<Option<Box<dyn Fn() -> bool>>> = const { RefCell::new(None) };
}

/// From now on the calling thread's waits spin only while `idle` says that its core has nothing else to do; a thread that never says so
/// always may. A thread that spins beside one that computes takes as much of the core as the kernel's idea of fairness gives it, whether it
/// yields or not: steps of a pipeline of `small-bert` on two cores took 19.5 ms so, and 17.8 ms when nobody spun. Whoever becomes idle has
/// [`Transport::nudge`](super::Transport::nudge) wake those that block already.
pub fn spin_only_while(idle: impl Fn() -> bool + 'static) {
    MAY_SPIN.with(|may| *may.borrow_mut() = Some(Box::new(idle)));
}

fn may_spin() -> bool {
    MAY_SPIN.with(|may| may.borrow().as_ref().is_none_or(|idle| idle()))
}

/// Returns as soon as one of the unfinished messages can move, or with the reason why none will.
fn wait_for_any(sends: &[Sending<'_, '_>], receives: &[Receiving<'_, '_>]) -> Result<(), TransportError> {
    // Receives first: when all are stuck it is the peer that owes us data that a time-out should name.
    let pending: Vec<(&dyn Endpoint, &'static str)> = receives
        .iter()
        .filter(|receiving| !receiving.message.is_done())
        .map(|receiving| (&*receiving.half as &dyn Endpoint, "send"))
        .chain(
            sends.iter().filter(|sending| !sending.message.is_done()).map(|sending| (&*sending.half as &dyn Endpoint, "receive")),
        )
        .collect();
    let Some((first, activity)) = pending.first() else { return Ok(()) };
    let any_ready = || pending.iter().any(|(endpoint, _)| endpoint.ready());
    let patience = first.patience();
    let started = Instant::now();
    let mut has_spun = patience.spin.is_zero();
    let spins = |has_spun: bool| !has_spun && may_spin();
    loop {
        if spins(has_spun) {
            let begun = Instant::now();
            while begun.elapsed() < patience.spin && may_spin() {
                // Half of the looks are cheap and close together, then the core goes to whoever wants it.
                for _ in 0..32 {
                    if any_ready() {
                        return Ok(());
                    }
                    std::hint::spin_loop();
                }
                std::thread::yield_now();
            }
            has_spun |= begun.elapsed() >= patience.spin;
        }
        for (endpoint, _) in &pending {
            if let Err(error) = endpoint.check() {
                // The peer may have sent its last bytes and left between the two looks.
                return if any_ready() { Ok(()) } else { Err(error) };
            }
        }
        let waited = started.elapsed();
        if waited >= patience.timeout {
            return Err(TransportError::TimedOut { rank: first.peer(), stream: first.stream(), activity, waited });
        }
        block(&pending, || any_ready() || spins(has_spun))?;
        if any_ready() {
            return Ok(());
        }
    }
}

/// What a half blocks on.
#[derive(Clone, Copy)]
pub enum Waiter<'a> {
    /// A doorbell in shared memory.
    Doorbell(&'a Doorbell),
    /// A socket that is to become readable or writable.
    Socket(BorrowedFd<'a>, PollFlags),
}

/// Blocks until something may have happened, for [`CHECK_INTERVAL`] at the most.
fn block(pending: &[(&dyn Endpoint, &'static str)], any_ready: impl Fn() -> bool) -> Result<(), TransportError> {
    let waiters: Vec<Waiter<'_>> = pending.iter().map(|(endpoint, _)| endpoint.waiter()).collect();
    let mut sockets: Vec<PollFd<'_>> = Vec::new();
    let mut doorbell: Option<&Doorbell> = None;
    let mut several_doorbells = false;
    for waiter in &waiters {
        match *waiter {
            Waiter::Doorbell(bell) => {
                several_doorbells |= doorbell.is_some_and(|known| !std::ptr::eq(known, bell));
                doorbell = Some(bell);
            }
            Waiter::Socket(socket, flags) => sockets.push(PollFd::from_borrowed_fd(socket, flags)),
        }
    }
    let mixed = several_doorbells || (doorbell.is_some() && !sockets.is_empty());
    let interval = if mixed { MIXED_INTERVAL } else { CHECK_INTERVAL };
    if !sockets.is_empty() {
        match poll(&mut sockets, Some(&timespec(interval))) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(TransportError::system("wait for the sockets of other ranks", error)),
        }
    } else if let Some(doorbell) = doorbell {
        doorbell.wait(interval, any_ready);
        Ok(())
    } else {
        Ok(())
    }
}

/// Where the threads that wait for one stream of one rank sleep, in memory that all processes share.
#[repr(C, align(128))]
#[derive(Debug, Default)]
pub struct Doorbell {
    rings: AtomicU32,
    sleepers: AtomicU32,
}

impl Doorbell {
    /// Wakes those who sleep here, if any. To be called after the change they wait for was published.
    pub(super) fn ring(&self) {
        // Pairs with the fence in `wait`: either we see the sleeper here, or it sees our change before it sleeps.
        fence(Ordering::SeqCst);
        if self.sleepers.load(Ordering::Relaxed) != 0 {
            self.rings.fetch_add(1, Ordering::Relaxed);
            // No FUTEX_PRIVATE flag: the sleeper is another process. A failure can only mean that nobody is there.
            let _ = futex::wake(&self.rings, futex::Flags::empty(), i32::MAX as u32);
        }
    }

    /// Sleeps until the bell rings, unless `happened` already, for `interval` at the most.
    fn wait(&self, interval: Duration, happened: impl Fn() -> bool) {
        self.sleepers.fetch_add(1, Ordering::Relaxed);
        let rings = self.rings.load(Ordering::Relaxed);
        fence(Ordering::SeqCst);
        if !happened() {
            // Any error (a ring in between, a signal, the time-out) means: look again.
            let _ = futex::wait(&self.rings, futex::Flags::empty(), rings, Some(&timespec(interval)));
        }
        self.sleepers.fetch_sub(1, Ordering::Relaxed);
    }
}

fn timespec(duration: Duration) -> Timespec {
    Timespec { tv_sec: duration.as_secs() as _, tv_nsec: duration.subsec_nanos() as _ }
}
