//! A futex on which threads of one process sleep until another process wakes them.

use std::sync::atomic::{AtomicU32, Ordering, fence};
use std::time::Duration;

use rustix::event::Timespec;
use rustix::thread::futex;

/// Where the threads that wait on one stream of one rank sleep. It lies in memory that all
/// processes of a machine share.
#[repr(C, align(128))]
#[derive(Debug, Default)]
pub struct Doorbell {
    rings: AtomicU32,
    sleepers: AtomicU32,
}

impl Doorbell {
    /// Wakes all sleepers. Call it after publishing the change that they wait for.
    pub(super) fn ring(&self) {
        // Pairs with the fence in `wait`: either the sleeper is seen here, or it sees the change
        // before it sleeps.
        fence(Ordering::SeqCst);
        if self.sleepers.load(Ordering::Relaxed) != 0 {
            self.rings.fetch_add(1, Ordering::Relaxed);
            // Not FUTEX_PRIVATE: the sleeper is in another process. The call fails only if there is
            // none.
            let _ = futex::wake(&self.rings, futex::Flags::empty(), i32::MAX as u32);
        }
    }

    /// Sleeps until the bell rings, for at most `interval`. Returns at once if `happened` says that
    /// there is nothing to wait for.
    pub(super) fn wait(&self, interval: Duration, happened: impl Fn() -> bool) {
        self.sleepers.fetch_add(1, Ordering::Relaxed);
        let rings = self.rings.load(Ordering::Relaxed);
        fence(Ordering::SeqCst);
        if !happened() {
            // Every error (the bell has rung since, a signal, the interval has passed) means: look
            // again.
            let _ = futex::wait(&self.rings, futex::Flags::empty(), rings, Some(&timespec(interval)));
        }
        self.sleepers.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A duration as the kernel takes it.
pub(super) fn timespec(duration: Duration) -> Timespec {
    Timespec { tv_sec: duration.as_secs() as _, tv_nsec: duration.subsec_nanos() as _ }
}
