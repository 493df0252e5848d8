//! Clocks, in nanoseconds. The monotonic clock is the same for all processes of a machine.

use rustix::time::{ClockId, clock_gettime};

/// Monotonic time since an origin that all processes of the machine share.
pub(crate) fn now() -> u64 {
    nanoseconds(ClockId::Monotonic)
}

/// CPU time that the calling thread has used.
pub(crate) fn thread_cpu_time() -> u64 {
    nanoseconds(ClockId::ThreadCPUTime)
}

fn nanoseconds(clock: ClockId) -> u64 {
    let time = clock_gettime(clock);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}
