//! Waiting until one of several channels can move bytes: first by spinning, then by blocking.

use std::cell::RefCell;
use std::time::Duration;

use rustix::event::{PollFd, poll};

use super::TransportError;
use super::doorbell::{Doorbell, timespec};
use super::endpoint::{Endpoint, WakeSource};
use super::patience::{MOST_GAP, Patience};

/// How often a blocked thread wakes up to see whether the run was aborted or its peer has gone.
const CHECK_INTERVAL: Duration = Duration::from_millis(100);
/// As [`CHECK_INTERVAL`], if no single call can block on all the wake sources: the thread polls
/// this often.
const MIXED_INTERVAL: Duration = Duration::from_micros(200);
/// How many times a spinning thread polls before it yields its core.
const POLLS_PER_YIELD: usize = 32;

thread_local! {
    /// Tells whether the calling thread may spin now; `None` if it always may.
    static MAY_SPIN: RefCell<Option<Box<dyn Fn() -> bool>>> = const { RefCell::new(None) };
}

/// From now on the calling thread's waits spin only while `idle` returns `true`. Without this call
/// they always may.
///
/// `idle` must say that the thread's core has nothing else to do. The kernel's scheduler gives a
/// spinning thread a fair share of the core, even if it yields, and so takes time from a thread
/// that computes. The steps of a `small-bert` pipeline on two cores took 19.5 ms with spinning and
/// 17.8 ms without.
///
/// When a core becomes idle, call [`Transport::nudge`](super::Transport::nudge) to wake the threads
/// that have blocked already.
pub fn spin_only_while(idle: impl Fn() -> bool + 'static) {
    MAY_SPIN.with(|may| *may.borrow_mut() = Some(Box::new(idle)));
}

fn may_spin() -> bool {
    MAY_SPIN.with(|may| may.borrow().as_ref().is_none_or(|idle| idle()))
}

/// Blocks until one of the endpoints is ready. Each comes with what its peer has to do: `send` or
/// `receive`.
///
/// # Errors
/// The reason why none of them will become ready. A time-out names the first endpoint's peer.
pub(super) fn wait_for_any(pending: &[(&dyn Endpoint, &'static str)]) -> Result<(), TransportError> {
    let Some((first, activity)) = pending.first() else { return Ok(()) };
    let any_ready = || pending.iter().any(|(endpoint, _)| endpoint.ready());
    let policy = first.wait_policy();
    let mut patience = Patience::new(policy.timeout, MOST_GAP, first.now());
    let mut has_spun = policy.spin.is_zero();
    let spins = |has_spun: bool| !has_spun && may_spin();
    loop {
        if spins(has_spun) {
            let spinning_since = first.now();
            let spun = || first.now().saturating_duration_since(spinning_since);
            while spun() < policy.spin && may_spin() && !patience.left(first.now()).is_zero() {
                for _ in 0..POLLS_PER_YIELD {
                    if any_ready() {
                        return Ok(());
                    }
                    std::hint::spin_loop();
                }
                std::thread::yield_now();
            }
            has_spun |= spun() >= policy.spin;
        }
        for (endpoint, _) in pending {
            if let Err(error) = endpoint.check() {
                // The peer may have sent its last bytes and left since the last look.
                return if any_ready() { Ok(()) } else { Err(error) };
            }
        }
        if patience.left(first.now()).is_zero() {
            let waited = patience.waited();
            return Err(TransportError::TimedOut { rank: first.peer(), stream: first.stream(), activity, waited });
        }
        block(pending, || any_ready() || spins(has_spun))?;
        if any_ready() {
            return Ok(());
        }
    }
}

/// Blocks until something may have happened, for at most [`CHECK_INTERVAL`].
fn block(pending: &[(&dyn Endpoint, &'static str)], is_over: impl Fn() -> bool) -> Result<(), TransportError> {
    let mut sockets: Vec<PollFd<'_>> = Vec::new();
    let mut doorbell: Option<&Doorbell> = None;
    let mut has_several_doorbells = false;
    let mut has_to_look = false;
    for (endpoint, _) in pending {
        match endpoint.wake_source() {
            WakeSource::Doorbell(bell) => {
                has_several_doorbells |= doorbell.is_some_and(|known| !std::ptr::eq(known, bell));
                doorbell = Some(bell);
            }
            WakeSource::Socket(socket, flags) => sockets.push(PollFd::from_borrowed_fd(socket, flags)),
            WakeSource::Nothing => has_to_look = true,
        }
    }
    let is_mixed = has_to_look || has_several_doorbells || (doorbell.is_some() && !sockets.is_empty());
    let interval = if is_mixed { MIXED_INTERVAL } else { CHECK_INTERVAL };
    if !sockets.is_empty() {
        match poll(&mut sockets, Some(&timespec(interval))) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(TransportError::system("wait for the sockets of other ranks", error)),
        }
    } else if let Some(doorbell) = doorbell {
        doorbell.wait(interval, is_over);
        Ok(())
    } else {
        std::thread::sleep(interval);
        Ok(())
    }
}
