//! One clock for all processes of a machine: the operating system's monotonic clock, in nanoseconds.

use rustix::time::{ClockId, clock_gettime};

/// Nanoseconds since some instant that is the same for every process of the machine.
pub(crate) fn now() -> u64 {
    nanoseconds(ClockId::Monotonic)
}

/// Nanoseconds for which the calling thread has had a processor.
pub(crate) fn thread_processor_time() -> u64 {
    nanoseconds(ClockId::ThreadCPUTime)
}

fn nanoseconds(clock: ClockId) -> u64 {
    let time = clock_gettime(clock);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}
