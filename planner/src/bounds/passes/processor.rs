//! Least time of kernels and collectives that compete for a device's processor.
//!
//! A kernel uses the whole processor; a collective that overlaps it takes a share. So from any
//! kernel on, a later kernel ends no sooner than the processor has done the work of both. The
//! [`Processor`] counts that work from several starting kernels at once and keeps the largest sum:
//! a later starting kernel includes more waiting, an earlier one includes more collectives.
//!
//! Nothing here knows passes or layouts.

use foretell_program::{CollectiveRole, Operation, StageProgram, Stream};
use std::collections::VecDeque;

/// The most starting kernels to count from. Older ones hardly ever give the largest sum.
const MOST_STARTS: usize = 8;

/// A processor that works through the instructions of a range in order. An instruction's *place* is
/// its index within the range.
pub(super) struct Processor {
    /// Starting kernels with their sums: the range's first, and each kernel that waited, since the
    /// processor may have been idle before it.
    sums: VecDeque<Sum>,
    /// By stream, the collectives that no kernel has waited for yet, in order.
    pending: Vec<VecDeque<Pending>>,
    /// By place: for a collective, the place of the last kernel that it depends on.
    kernel_before: Vec<Option<usize>>,
}

#[derive(Clone, Copy)]
struct Sum {
    /// Place of the starting kernel.
    start: usize,
    /// The time at which all work counted from the starting kernel on is done, in picoseconds.
    end: f64,
}

#[derive(Clone, Copy)]
struct Pending {
    place: usize,
    /// Place of the last kernel that the collective depends on.
    kernel_before: usize,
    /// Processor time that the collective takes, in picoseconds.
    work: f64,
}

impl Processor {
    /// Creates an idle processor for a list with `streams` streams.
    pub(super) fn new(streams: usize) -> Self {
        let start = Sum { start: 0, end: 0.0 };
        Self { sums: VecDeque::from([start]), pending: vec![VecDeque::new(); streams], kernel_before: Vec::new() }
    }

    /// Adds the kernel `index`, which starts no sooner than `start` and takes `duration`; `waits`
    /// is true if the compute stream is idle before it. Returns the earliest time at which the
    /// processor is done with it. The range begins at instruction `first`.
    pub(super) fn kernel(
        &mut self,
        list: &StageProgram,
        first: usize,
        index: usize,
        start: f64,
        duration: f64,
        waits: bool,
    ) -> f64 {
        let place = index - first;
        let Self { sums, pending, .. } = self;
        for before in list.instructions[index].after.iter().filter_map(|before| (before.0 as usize).checked_sub(first)) {
            let stream = list.instructions[first + before].stream.0 as usize;
            // Collectives that precede an awaited one in its stream have ended, too.
            while let Some(done) = pending[stream].front().copied().filter(|done| done.place <= before) {
                pending[stream].pop_front();
                sums.iter_mut().filter(|sum| sum.start <= done.kernel_before).for_each(|sum| sum.end += done.work);
            }
        }
        if waits {
            sums.push_back(Sum { start: place, end: start });
        }
        sums.iter_mut().for_each(|sum| sum.end += duration);
        let mut latest = f64::NEG_INFINITY;
        sums.retain(|sum| {
            let is_later = sum.end > latest;
            latest = latest.max(sum.end);
            is_later
        });
        if sums.len() > MOST_STARTS {
            sums.pop_front();
        }
        latest
    }

    /// Adds the collective `index`, which takes `work` picoseconds of the processor.
    pub(super) fn collective(&mut self, list: &StageProgram, first: usize, index: usize, work: f64) {
        // A longer model may bucket gradients and parameters differently, so their collectives do
        // not count.
        let is_in_pass = matches!(
            *list.instructions[index].operation,
            Operation::Collective { role: CollectiveRole::Tensor | CollectiveRole::Context | CollectiveRole::Expert, .. }
        );
        if !is_in_pass {
            return;
        }
        let instruction = &list.instructions[index];
        let is_kernel = |place: usize| {
            let stream = list.instructions[first + place].stream;
            list.streams[stream.0 as usize] == Stream::Compute
        };
        let places = instruction.after.iter().filter_map(|before| (before.0 as usize).checked_sub(first));
        let kernel_of =
            |place: usize| if is_kernel(place) { Some(place) } else { self.kernel_before.get(place).copied().flatten() };
        let kernel_before = places.filter_map(kernel_of).max().unwrap_or(0);
        let place = index - first;
        self.kernel_before.resize(place + 1, None);
        self.kernel_before[place] = Some(kernel_before);
        if work > 0.0 {
            self.pending[instruction.stream.0 as usize].push_back(Pending { place, kernel_before, work });
        }
    }
}
