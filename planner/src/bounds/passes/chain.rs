//! The longest dependency chains of a pass.

use super::TimedList;
use super::buckets::BucketedInstructions;
use super::processor::Processor;
use foretell_program::{Axis, GroupId, Operation, StageProgram, Stream};
use std::ops::Range;

/// Least time of a pass, in picoseconds, from each event that it may wait for.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(in crate::bounds) struct PassTime {
    /// From the end of the previous pass's kernels.
    pub(in crate::bounds) from_compute: Chain,
    /// From the arrival of the message that the pass receives. Zero if it receives none.
    pub(in crate::bounds) from_arrival: Chain,
    /// From the end of the previous pass's tensor-parallel collectives. A pass's last collective
    /// may still run after its last kernel.
    pub(in crate::bounds) from_collective: Chain,
    /// Time that the host takes to launch the pass.
    pub(in crate::bounds) launch: f64,
    /// Part of `launch` for sends.
    pub(in crate::bounds) send_launch: f64,
    /// Part of `launch` for receives.
    pub(in crate::bounds) receive_launch: f64,
}

/// Lengths, in picoseconds, of the longest chains of instructions from one event. A zero means that
/// no such chain exists.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(in crate::bounds) struct Chain {
    /// Until the next pass may start its first kernel.
    pub(in crate::bounds) compute: f64,
    /// Until the first message that the pass sends has arrived; equal to `compute` if it sends
    /// none.
    pub(in crate::bounds) message: f64,
    /// Until every instruction has ended.
    pub(in crate::bounds) end: f64,
    /// Until the last tensor-parallel collective has ended.
    pub(in crate::bounds) collective: f64,
}

impl Chain {
    /// Returns this chain followed by another one that starts when the compute stream is free.
    pub(in crate::bounds) fn then(self, next: Self) -> Self {
        Self {
            compute: self.compute + next.compute,
            message: self.compute + next.message,
            end: self.compute + next.end,
            collective: if next.collective > 0.0 { self.compute + next.collective } else { self.collective },
        }
    }

    /// Combines each length with that of another chain.
    pub(in crate::bounds) fn with(self, other: Self, combine: impl Fn(f64, f64) -> f64) -> Self {
        Self {
            compute: combine(self.compute, other.compute),
            message: combine(self.message, other.message),
            end: combine(self.end, other.end),
            collective: combine(self.collective, other.collective),
        }
    }
}

impl PassTime {
    /// Returns the time of this pass followed by another over the next blocks of the same chunk,
    /// with no message in between.
    pub(in crate::bounds) fn then(self, next: Self) -> Self {
        Self {
            from_compute: self.from_compute.then(next.from_compute),
            from_arrival: self.from_arrival.then(next.from_compute),
            from_collective: self.from_collective.then(next.from_compute),
            launch: self.launch + next.launch,
            send_launch: next.send_launch,
            receive_launch: self.receive_launch,
        }
    }

    /// Combines each number with that of another pass.
    pub(in crate::bounds) fn with(self, other: Self, combine: impl Fn(f64, f64) -> f64) -> Self {
        Self {
            from_compute: self.from_compute.with(other.from_compute, &combine),
            from_arrival: self.from_arrival.with(other.from_arrival, &combine),
            from_collective: self.from_collective.with(other.from_collective, &combine),
            launch: combine(self.launch, other.launch),
            send_launch: combine(self.send_launch, other.send_launch),
            receive_launch: combine(self.receive_launch, other.receive_launch),
        }
    }
}

/// The event from which a chain is measured. Other streams contribute nothing, since it is not
/// known when they become free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Origin {
    /// The compute stream becomes free.
    Compute,
    /// The received message arrives.
    Arrival,
    /// The stream of tensor-parallel collectives becomes free.
    Collective,
    /// The step begins: all streams are free and nothing has to be received.
    Step,
}

impl TimedList<'_> {
    /// Returns the least time of the instructions in `range`.
    pub(in crate::bounds) fn pass_time(&self, range: &Range<u32>) -> PassTime {
        self.pass_time_less(range, 0.0)
    }

    /// Returns the least time from the start of the last pass to the end of the list. Kernels after
    /// the last pass count as in [`kernel_time`](Self::kernel_time).
    pub(in crate::bounds) fn tail_time(&self) -> PassTime {
        let start = self.list.passes.last().map_or(0, |pass| pass.instructions.start);
        self.pass_time_less(&(start..self.list.instructions.len() as u32), self.shortest_kernel())
    }

    /// Returns the longest chains from the start of the step through the first `end` instructions.
    pub(in crate::bounds) fn head_chain(&self, end: u32) -> Chain {
        self.chain(&(0..end), Origin::Step, 0.0)
    }

    fn pass_time_less(&self, range: &Range<u32>, discount: f64) -> PassTime {
        let Self { list, times, .. } = self;
        // The time at which the host has launched the first `end` instructions.
        let launched =
            |end: usize| end.checked_sub(1).and_then(|last| times.launched.get(last)).map_or(0.0, |time| time.0 as f64);
        let bucketed = BucketedInstructions::new(self, range);
        let launch_of = |counts: &dyn Fn(&Operation) -> bool| -> f64 {
            let counted = range.clone().map(|index| index as usize).filter(|&index| counts(&list.instructions[index].operation));
            counted.filter(|&index| !bucketed.contains(index)).map(|index| launched(index + 1) - launched(index)).sum()
        };
        let launch = launch_of(&|_| true);
        let send_launch = launch_of(&|operation| matches!(operation, Operation::Send { .. }));
        let receive_launch = launch_of(&|operation| matches!(operation, Operation::Receive { .. }));
        PassTime {
            from_compute: self.chain(range, Origin::Compute, discount),
            from_arrival: self.chain(range, Origin::Arrival, discount),
            from_collective: self.chain(range, Origin::Collective, discount),
            launch,
            send_launch,
            receive_launch,
        }
    }

    /// Returns the longest chains through the instructions in `range`, measured from `origin`. Each
    /// kernel after the last pass takes `discount` picoseconds less than alone.
    fn chain(&self, range: &Range<u32>, origin: Origin, discount: f64) -> Chain {
        let Self { list, times, overlap } = *self;
        let first = range.start as usize;
        let end_of_passes = list.passes.last().map_or(0, |pass| pass.instructions.end as usize);
        let handoff = times.handoff.0 as f64;
        let tensor_stream = tensor_stream(list);
        // When each instruction of the range, and each stream's latest one, ends at the earliest;
        // `None` if no chain from the origin leads to it.
        let mut ends: Vec<Option<f64>> = Vec::with_capacity(range.len());
        let mut stream_ends: Vec<Option<f64>> = vec![None; list.streams.len()];
        for (stream, end) in stream_ends.iter_mut().enumerate() {
            let is_free = match origin {
                Origin::Step => true,
                Origin::Compute => self.is_compute_stream(stream),
                Origin::Collective => Some(stream) == tensor_stream,
                Origin::Arrival => false,
            };
            *end = is_free.then_some(0.0);
        }
        let bucketed = BucketedInstructions::new(self, range);
        let durations = if bucketed.is_whole { &times.durations } else { &times.in_full_buckets };
        let mut reductions_end = vec![0.0; list.streams.len()];
        let mut chain = Chain::default();
        let mut first_message: Option<f64> = None;
        let mut processor = Processor::new(list.streams.len());
        for index in range.clone().map(|index| index as usize) {
            let instruction = &list.instructions[index];
            let stream = instruction.stream.0 as usize;
            let end = match *instruction.operation {
                Operation::Receive { .. } => matches!(origin, Origin::Arrival | Origin::Step).then_some(0.0),
                Operation::Load { .. } => None,
                // Optimizer state is copied bucket by bucket.
                Operation::Copy { .. } if !bucketed.is_whole => None,
                _ if bucketed.is_overlapping_reduction(index) => {
                    // However the last pass's gradients are bucketed, their reductions run one
                    // after another from that pass on.
                    if bucketed.is_tail && matches!(origin, Origin::Compute | Origin::Step) {
                        reductions_end[stream] += durations[index].0 as f64;
                        chain.end = chain.end.max(reductions_end[stream]);
                    }
                    None
                }
                _ => {
                    let before = instruction.after.iter().filter(|before| !bucketed.is_overlapping_reduction(before.0 as usize));
                    let before = before.filter_map(|before| (before.0 as usize).checked_sub(first));
                    let awaited = before.filter_map(|place| ends.get(place).copied().flatten()).map(|end| end + handoff);
                    let start = awaited.chain(stream_ends[stream]).reduce(f64::max);
                    let is_compute = self.is_compute_stream(stream);
                    let discount = if is_compute && index >= end_of_passes { discount } else { 0.0 };
                    let is_free = bucketed.contains(index);
                    let duration = if is_free { 0.0 } else { (durations[index].0 as f64 - discount).max(0.0) };
                    let end = start.map(|start| start + duration);
                    match start {
                        Some(start) if is_compute => {
                            let waits = stream_ends[stream].is_none_or(|end| end < start);
                            end.map(|end| end.max(processor.kernel(list, first, index, start, duration, waits)))
                        }
                        Some(_) => {
                            processor.collective(list, first, index, times.processor[index].0 as f64);
                            end
                        }
                        None => end,
                    }
                }
            };
            ends.push(end);
            let Some(end) = end else { continue };
            stream_ends[stream] = Some(end);
            chain.end = chain.end.max(end);
            if Some(stream) == tensor_stream {
                chain.collective = chain.collective.max(end);
            }
            if self.is_compute_stream(stream) {
                chain.compute = chain.compute.max(end);
            } else if !overlap.allows(&instruction.operation) && !bucketed.contains(index) {
                chain.compute = chain.compute.max(end + handoff);
            }
            if matches!(*instruction.operation, Operation::Send { .. }) {
                first_message = Some(first_message.map_or(end, |message: f64| message.min(end)));
            }
        }
        Chain { message: first_message.unwrap_or(chain.compute), ..chain }
    }
}

/// Returns the stream of tensor-parallel collectives, if there is one. Kernels of every block wait
/// for its collectives, which run one after another in list order.
fn tensor_stream(list: &StageProgram) -> Option<usize> {
    let is_tensor = |stream: &Stream| match stream {
        Stream::Group(GroupId(group)) => list.groups[*group as usize].axes.contains(&Axis::Tensor),
        _ => false,
    };
    list.streams.iter().position(is_tensor)
}
