//! Least time and memory of the passes of one instruction list.
//!
//! A [`TimedList`] is an instruction list with the time that each instruction takes alone. From it
//! follow the longest dependency chains of a pass ([`PassTime`]), the time that collectives and
//! kernels take one after another ([`StreamTime`], `kernel_time`), and the bytes that persist or
//! are held for a micro-batch ([`PersistentMemory`], [`MicroBatchMemory`]). Everything that a pass
//! needs from other passes counts as done, so these are lower bounds in any order of the passes.
//!
//! Nothing here knows layouts, schedules or pipelines.

mod buckets;
mod chain;
mod memory;
mod processor;
mod streams;

pub(super) use chain::{Chain, PassTime};
pub(super) use memory::{MicroBatchMemory, PersistentMemory, gathers_parameters_once};
pub(super) use streams::StreamTime;

use foretell_program::{Overlap, StageProgram, Stream};
use foretell_simulator::LeastTimes;

/// An instruction list and the time that each of its instructions takes alone.
#[derive(Clone, Copy)]
pub(super) struct TimedList<'a> {
    pub(super) list: &'a StageProgram,
    pub(super) times: &'a LeastTimes,
    pub(super) overlap: &'a Overlap,
}

impl TimedList<'_> {
    fn is_compute_stream(&self, stream: usize) -> bool {
        self.list.streams[stream] == Stream::Compute
    }

    fn is_kernel(&self, index: usize) -> bool {
        self.is_compute_stream(self.list.instructions[index].stream.0 as usize)
    }
}
