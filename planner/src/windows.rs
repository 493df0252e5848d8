//! What a pass over some blocks takes at least, by itself: the longest chain of instructions within it.
//!
//! What a pass waits for that came before it counts as done, so that no order of passes is faster than their windows say. It knows lists of
//! instructions, and no layouts.

use crate::processor::Processor;
use foretell_models::Kernel;
use foretell_program::{
    Axis, Buffer, BufferId, BufferRole, CollectiveRole, GroupId, MemoryKind, Operation, Overlap, Phase, StageProgram, Stream,
};
use foretell_simulator::LeastTimes;
use std::ops::Range;

/// What a pass takes at least, in picoseconds: from when the pass before it leaves it the device, and from when what it receives has arrived.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Window {
    pub(crate) free: Chain,
    /// Zero where nothing is received.
    pub(crate) arrival: Chain,
    /// From when the pass before it leaves it the stream of the exchanges that its kernels wait for: what that pass ends with may still go on
    /// there when its kernels are over.
    pub(crate) exchange: Chain,
    /// The time that its host takes to launch it.
    pub(crate) launches: f64,
    /// What of that is for its sends, and for its receives.
    pub(crate) of_sends: f64,
    pub(crate) of_receives: f64,
}

/// The longest chains of instructions from some beginning.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Chain {
    /// Until the next pass's first kernel may begin.
    pub(crate) busy: f64,
    /// Until what is sent has arrived; [`Chain::busy`] where nothing is.
    pub(crate) passed: f64,
    /// Until everything is over.
    pub(crate) over: f64,
    /// Until the last exchange that kernels wait for is over; zero where that does not follow from the beginning.
    pub(crate) exchanged: f64,
}

impl Chain {
    pub(crate) fn then(self, other: Self) -> Self {
        Self {
            busy: self.busy + other.busy,
            passed: self.busy + other.passed,
            over: self.busy + other.over,
            exchanged: if other.exchanged > 0.0 { self.busy + other.exchanged } else { self.exchanged },
        }
    }

    pub(crate) fn with(self, other: Self, choose: impl Fn(f64, f64) -> f64) -> Self {
        Self {
            busy: choose(self.busy, other.busy),
            passed: choose(self.passed, other.passed),
            over: choose(self.over, other.over),
            exchanged: choose(self.exchanged, other.exchanged),
        }
    }
}

impl Window {
    /// What one takes after the other at least, where what the former sends the latter receives without a message.
    pub(crate) fn then(self, other: Self) -> Self {
        Self {
            free: self.free.then(other.free),
            arrival: self.arrival.then(other.free),
            exchange: self.exchange.then(other.free),
            launches: self.launches + other.launches,
            of_sends: other.of_sends,
            of_receives: self.of_receives,
        }
    }

    /// The value that `choose` finds of each number of it and of another.
    pub(crate) fn with(self, other: Self, choose: impl Fn(f64, f64) -> f64) -> Self {
        Self {
            free: self.free.with(other.free, &choose),
            arrival: self.arrival.with(other.arrival, &choose),
            exchange: self.exchange.with(other.exchange, &choose),
            launches: choose(self.launches, other.launches),
            of_sends: choose(self.of_sends, other.of_sends),
            of_receives: choose(self.of_receives, other.of_receives),
        }
    }
}

/// Where a chain begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Beginning {
    /// With the device.
    Free,
    /// With what is received.
    Arrival,
    /// With the stream of the exchanges that kernels wait for.
    Exchange,
    /// With the step: nothing has to be waited for.
    Step,
}

/// The window of some instructions of a list.
pub(crate) fn window(list: &StageProgram, alone: &LeastTimes, overlap: &Overlap, range: &Range<u32>) -> Window {
    window_with(list, alone, overlap, range, 0.0)
}

/// The window of a list's instructions from its last pass on. Kernels that come after all passes count as [`kernels`] counts them.
pub(crate) fn tail(list: &StageProgram, alone: &LeastTimes, overlap: &Overlap) -> Window {
    let start = list.passes.last().map_or(0, |pass| pass.instructions.start);
    window_with(list, alone, overlap, &(start..list.instructions.len() as u32), shortest_kernel(list, alone))
}

fn window_with(list: &StageProgram, alone: &LeastTimes, overlap: &Overlap, range: &Range<u32>, less: f64) -> Window {
    // When all before an instruction are launched.
    let launched = |end: usize| end.checked_sub(1).and_then(|last| alone.launched.get(last)).map_or(0.0, |time| time.0 as f64);
    let of_buckets = OfBuckets::new(list, overlap, range);
    let launches_of = |is_meant: &dyn Fn(&Operation) -> bool| -> f64 {
        let meant = range.clone().map(|index| index as usize).filter(|&index| is_meant(&list.instructions[index].operation));
        meant.filter(|&index| !of_buckets.has(index)).map(|index| launched(index + 1) - launched(index)).sum()
    };
    let launches = launches_of(&|_| true);
    let of_sends = launches_of(&|operation| matches!(operation, Operation::Send { .. }));
    let of_receives = launches_of(&|operation| matches!(operation, Operation::Receive { .. }));
    let from = |beginning| chain(list, alone, overlap, range, beginning, less);
    Window {
        free: from(Beginning::Free),
        arrival: from(Beginning::Arrival),
        exchange: from(Beginning::Exchange),
        launches,
        of_sends,
        of_receives,
    }
}

/// Instructions of a range that come bucket by bucket. A bucket may have gradients of several chunks, or of more blocks than the range: its reduction may
/// come with another pass, the last one may be of little, and there may be no gaps. So these count for nothing, unless the range is the whole
/// list; but reductions from the last pass on keep their stream busy.
struct OfBuckets<'a> {
    list: &'a StageProgram,
    is_tail: bool,
    is_whole: bool,
    /// Reductions go on beside the backward pass, so that little may be left after it.
    are_beside: bool,
}

impl<'a> OfBuckets<'a> {
    fn new(list: &'a StageProgram, overlap: &Overlap, range: &Range<u32>) -> Self {
        let is_tail = list.passes.last().is_none_or(|pass| range.end > pass.instructions.end);
        let is_whole = *range == (0..list.instructions.len() as u32);
        Self { list, is_tail, is_whole, are_beside: !is_whole && (!is_tail || overlap.gradients) }
    }

    fn has(&self, index: usize) -> bool {
        let instruction = &self.list.instructions[index];
        match *instruction.operation {
            Operation::Collective { .. } => self.is_beside(index),
            Operation::Copy { .. } | Operation::Compute { kernel: Kernel::Zero { .. }, .. } => !self.is_whole,
            Operation::Compute { .. } => instruction.after.iter().any(|one| self.is_beside(one.0 as usize)),
            _ => false,
        }
    }

    /// Whether it is a reduction that goes on beside passes.
    fn is_beside(&self, index: usize) -> bool {
        let operation = &*self.list.instructions[index].operation;
        self.are_beside && matches!(operation, Operation::Collective { role: CollectiveRole::Gradients, .. })
    }
}

/// Kernels after all passes take so much `less`.
fn chain(
    list: &StageProgram,
    alone: &LeastTimes,
    overlap: &Overlap,
    range: &Range<u32>,
    beginning: Beginning,
    less: f64,
) -> Chain {
    let end = list.passes.last().map_or(0, |pass| pass.instructions.end as usize);
    let first = range.start as usize;
    // When each is over, if that follows from the beginning.
    let mut ends: Vec<Option<f64>> = Vec::with_capacity(range.len());
    let mut of_stream: Vec<Option<f64>> = vec![None; list.streams.len()];
    let handoff = alone.handoff.0 as f64;
    let is_compute = |stream: usize| list.streams[stream] == Stream::Compute;
    let exchanges = exchange_stream(list);
    for (stream, over) in of_stream.iter_mut().enumerate() {
        let begins = match beginning {
            Beginning::Step => true,
            Beginning::Free => is_compute(stream),
            Beginning::Exchange => Some(stream) == exchanges,
            Beginning::Arrival => false,
        };
        *over = begins.then_some(0.0);
    }
    let of_buckets = OfBuckets::new(list, overlap, range);
    let taken = if of_buckets.is_whole { &alone.durations } else { &alone.in_full_buckets };
    let mut reduced = vec![0.0; list.streams.len()];
    let (mut busy, mut all, mut exchanged) = (0.0f64, 0.0f64, 0.0f64);
    let mut passed: Option<f64> = None;
    let mut processor = Processor::new(list.streams.len());
    for index in range.clone().map(|index| index as usize) {
        let instruction = &list.instructions[index];
        let stream = instruction.stream.0 as usize;
        let over = match *instruction.operation {
            Operation::Receive { .. } => matches!(beginning, Beginning::Arrival | Beginning::Step).then_some(0.0),
            Operation::Load { .. } => None,
            // They come bucket by bucket, too.
            Operation::Copy { .. } if !of_buckets.is_whole => None,
            _ if of_buckets.is_beside(index) => {
                // Whatever buckets the last pass's gradients are in, they are reduced one after the other from that pass on.
                if of_buckets.is_tail && matches!(beginning, Beginning::Free | Beginning::Step) {
                    reduced[stream] += taken[index].0 as f64;
                    all = all.max(reduced[stream]);
                }
                None
            }
            _ => {
                let before = instruction.after.iter().filter(|one| !of_buckets.is_beside(one.0 as usize));
                let before = before.filter_map(|one| (one.0 as usize).checked_sub(first));
                let awaited = before.filter_map(|place| ends.get(place).copied().flatten()).map(|over| over + handoff);
                let start = awaited.chain(of_stream[stream]).reduce(f64::max);
                let less = if is_compute(stream) && index >= end { less } else { 0.0 };
                let duration = if of_buckets.has(index) { 0.0 } else { (taken[index].0 as f64 - less).max(0.0) };
                let own = start.map(|start| start + duration);
                match start {
                    Some(start) if is_compute(stream) => {
                        let waits = of_stream[stream].is_none_or(|over| over < start);
                        own.map(|own| own.max(processor.kernel(list, first, index, start, duration, waits)))
                    }
                    Some(_) => {
                        processor.exchange(list, first, index, alone.processor[index].0 as f64);
                        own
                    }
                    None => own,
                }
            }
        };
        ends.push(over);
        let Some(over) = over else { continue };
        of_stream[stream] = Some(over);
        all = all.max(over);
        if Some(stream) == exchanges {
            exchanged = exchanged.max(over);
        }
        if is_compute(stream) {
            busy = busy.max(over);
        } else if !overlap.allows(&instruction.operation) && !of_buckets.has(index) {
            busy = busy.max(over + handoff);
        }
        if matches!(*instruction.operation, Operation::Send { .. }) {
            passed = Some(passed.map_or(over, |passed: f64| passed.min(over)));
        }
    }
    Chain { busy, passed: passed.unwrap_or(busy), over: all, exchanged }
}

/// The stream of the exchanges that kernels of every block wait for, one after the other in the order of the list: that of the ranks that share out
/// operators, if there is one.
fn exchange_stream(list: &StageProgram) -> Option<usize> {
    let tensor = |stream: &Stream| match stream {
        Stream::Group(GroupId(group)) => list.groups[*group as usize].axes.contains(&Axis::Tensor),
        _ => false,
    };
    list.streams.iter().position(tensor)
}

/// The longest chain of a list's first instructions, from the beginning of the step.
pub(crate) fn head(list: &StageProgram, alone: &LeastTimes, overlap: &Overlap, end: u32) -> Chain {
    chain(list, alone, overlap, &(0..end), Beginning::Step, 0.0)
}

/// How long a stream is busy with collectives, which come one after the other.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Busy {
    /// For each micro-batch.
    pub(crate) each: f64,
    /// Beside that, once a step.
    pub(crate) once: f64,
}

impl Busy {
    pub(crate) fn with(self, other: Self, choose: impl Fn(f64, f64) -> f64) -> Self {
        Self { each: choose(self.each, other.each), once: choose(self.once, other.once) }
    }
}

/// How long collectives keep busy the stream of those groups, of which `is_meant` says so by their axes, that has the most to do.
pub(crate) fn busy(list: &StageProgram, alone: &LeastTimes, micro_batches: usize, is_meant: impl Fn(&[Axis]) -> bool) -> Busy {
    let groups = list.groups.iter().enumerate().filter(|(_, group)| is_meant(&group.axes));
    // What one micro-batch needs and another does not, such as parameters in the first and gradients in the last, is not for each.
    let of_role = |group: usize, role: CollectiveRole| {
        let is_own = |index: usize| match *list.instructions[index].operation {
            Operation::Collective { group: GroupId(own), role: for_what, .. } => own as usize == group && for_what == role,
            _ => false,
        };
        let sum = |range: Range<usize>| -> f64 {
            range.filter(|&index| is_own(index)).map(|index| alone.in_full_buckets[index].0 as f64).sum()
        };
        let mut each = vec![0.0; micro_batches];
        for pass in &list.passes {
            if let Some(each) = each.get_mut(pass.task.micro_batch) {
                *each += sum(pass.instructions.start as usize..pass.instructions.end as usize);
            }
        }
        let each = each.into_iter().reduce(f64::min).unwrap_or(0.0);
        Busy { each, once: sum(0..list.instructions.len()) - each * micro_batches as f64 }
    };
    let of_group = |group: usize| {
        let roles = [CollectiveRole::Gradients, CollectiveRole::Parameters].map(|role| of_role(group, role));
        roles[0].with(roles[1], |one, other| one + other)
    };
    let total = |busy: &Busy| busy.each * micro_batches as f64 + busy.once;
    groups.map(|(group, _)| of_group(group)).max_by(|a, b| total(a).total_cmp(&total(b))).unwrap_or_default()
}

/// How long parameters are gathered among a list's first instructions.
pub(crate) fn gathers(list: &StageProgram, alone: &LeastTimes, end: u32) -> f64 {
    let of_parameters =
        |operation: &Operation| matches!(operation, Operation::Collective { role: CollectiveRole::Parameters, .. });
    let first = list.instructions.iter().zip(&alone.in_full_buckets).take(end as usize);
    first.filter(|(instruction, _)| of_parameters(&instruction.operation)).map(|(_, duration)| duration.0 as f64).sum()
}

/// What kernels of a range take one after the other, whatever they wait for, less for each what the shortest of the list takes: as little as it would
/// take in one kernel with others.
pub(crate) fn kernels(list: &StageProgram, alone: &LeastTimes, range: Range<usize>) -> f64 {
    let shortest = shortest_kernel(list, alone);
    range.filter(|&index| is_kernel(list, index)).map(|index| (alone.durations[index].0 as f64 - shortest).max(0.0)).sum()
}

fn shortest_kernel(list: &StageProgram, alone: &LeastTimes) -> f64 {
    let kernels = (0..list.instructions.len()).filter(|&index| is_kernel(list, index));
    // What is fused with others takes no time of its own.
    kernels.map(|index| alone.durations[index].0 as f64).filter(|&time| time > 0.0).reduce(f64::min).unwrap_or(0.0)
}

fn is_kernel(list: &StageProgram, index: usize) -> bool {
    list.streams[list.instructions[index].stream.0 as usize] == Stream::Compute
}

/// Bytes of the device's memory that are kept from step to step, by what ZeRO may share out.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Kept {
    pub(crate) parameters: f64,
    /// Of these such as only forward passes read: tables of embeddings.
    pub(crate) only_forward: f64,
    pub(crate) gradients: f64,
    pub(crate) optimizer_state: f64,
    pub(crate) others: f64,
}

impl Kept {
    pub(crate) fn of(list: &StageProgram) -> Self {
        let mut kept = Self::default();
        let is_kept = |buffer: &&Buffer| buffer.persistent && buffer.parent.is_none() && buffer.memory == MemoryKind::Device;
        for buffer in list.buffers.iter().filter(is_kept) {
            let part = match buffer.role {
                BufferRole::Parameter => &mut kept.parameters,
                BufferRole::Gradient => &mut kept.gradients,
                BufferRole::OptimizerState => &mut kept.optimizer_state,
                _ => &mut kept.others,
            };
            *part += buffer.bytes.value();
        }
        kept.only_forward = only_forward(list);
        kept
    }

    pub(crate) fn total(self) -> f64 {
        self.parameters + self.gradients + self.optimizer_state + self.others
    }

    /// What is left at least where a stage of ZeRO shares it out among so many ranks.
    pub(crate) fn shared_out(self, zero: usize, ranks: usize) -> Self {
        let share = |from: usize| if zero >= from { 1.0 / ranks as f64 } else { 1.0 };
        // What is shared out and gathered for the step goes when its last pass has read it, and may be gone when the most is held.
        let is_gone = if gathers_for_a_step(zero, ranks) { self.only_forward } else { 0.0 };
        Self {
            only_forward: 0.0,
            optimizer_state: self.optimizer_state * share(1),
            gradients: self.gradients * share(2),
            parameters: (self.parameters - is_gone) * share(3),
            // Room for sums may be less with ZeRO.
            others: if zero > 0 { 0.0 } else { self.others },
        }
    }

    pub(crate) fn with(self, other: Self, choose: impl Fn(f64, f64) -> f64) -> Self {
        Self {
            parameters: choose(self.parameters, other.parameters),
            only_forward: choose(self.only_forward, other.only_forward),
            gradients: choose(self.gradients, other.gradients),
            optimizer_state: choose(self.optimizer_state, other.optimizer_state),
            others: choose(self.others, other.others),
        }
    }
}

/// Whether a stage of ZeRO shares parameters out, and has them gathered for all passes of a step.
pub(crate) fn gathers_for_a_step(zero: usize, ranks: usize) -> bool {
    (1..3).contains(&zero) && ranks > 1
}

/// Bytes of the parameters that a list reads in forward passes alone.
fn only_forward(list: &StageProgram) -> f64 {
    let mut is_read = [vec![false; list.buffers.len()], vec![false; list.buffers.len()]];
    for instruction in &list.instructions {
        let place = match instruction.phase {
            Phase::Forward => 0,
            Phase::Backward | Phase::Recompute => 1,
            Phase::Update => continue,
        };
        instruction.reads.iter().for_each(|buffer| is_read[place][buffer.0 as usize] = true);
    }
    let is_meant = |index: &usize| {
        let buffer = &list.buffers[*index];
        buffer.persistent && buffer.role == BufferRole::Parameter && is_read[0][*index] && !is_read[1][*index]
    };
    (0..list.buffers.len()).filter(is_meant).map(|index| list.buffers[index].bytes.value()).sum()
}

/// Bytes of a micro-batch.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Held {
    /// Between the forward pass and the next over the same blocks.
    pub(crate) between: f64,
    /// Of these, what operators made for others.
    pub(crate) activations: f64,
    /// Between the pass of the input's gradient and that of the parameters', where that is one of its own.
    pub(crate) for_weights: f64,
    /// The most there are of it at any time of the forward pass, all that included.
    pub(crate) forward: f64,
    /// The same of the backward pass, or that of the input's gradient alone.
    pub(crate) backward: f64,
}

impl Held {
    /// Those of the first micro-batch of a list.
    pub(crate) fn of(list: &StageProgram) -> Self {
        let mut passes = list.passes.iter().filter(|pass| pass.task.micro_batch == 0);
        let (Some(forward), Some(backward)) = (passes.next(), passes.next()) else { return Self::default() };
        let weights = passes.next_back();
        let ranges = [forward, backward, weights.unwrap_or(backward)]
            .map(|pass| pass.instructions.start as usize..pass.instructions.end as usize);
        let is_own = |index: usize| ranges.iter().any(|range| range.contains(&index));
        // The first and the last instruction that touch each buffer, if all that do are the micro-batch's.
        let mut touched: Vec<Option<(usize, usize)>> = vec![None; list.buffers.len()];
        let mut is_shared = vec![false; list.buffers.len()];
        for (index, instruction) in list.instructions.iter().enumerate() {
            for &BufferId(buffer) in instruction.reads.iter().chain(&instruction.writes) {
                let root = list.buffers[buffer as usize].parent.map_or(buffer, |parent| parent.0) as usize;
                is_shared[root] |= !is_own(index);
                touched[root] = Some(touched[root].map_or((index, index), |(first, _)| (first, index)));
            }
        }
        let mut changes: Vec<(usize, f64)> = Vec::new();
        let (mut between, mut activations, mut for_weights) = (0.0, 0.0, 0.0);
        for (root, buffer) in list.buffers.iter().enumerate() {
            // Copies of weights are the step's: they grow neither with samples nor with micro-batches.
            let is_copy = buffer.role == BufferRole::ParameterCopy;
            let is_own = !buffer.persistent && buffer.parent.is_none() && buffer.memory == MemoryKind::Device && !is_copy;
            let is_candidate = is_own && !is_shared[root];
            let Some((first, last)) = touched[root].filter(|_| is_candidate) else { continue };
            let bytes = buffer.bytes.value();
            if first < ranges[0].end && last >= ranges[1].start {
                between += bytes;
                activations += if buffer.role == BufferRole::Activation { bytes } else { 0.0 };
            }
            if weights.is_some() && first < ranges[1].end && last >= ranges[2].start {
                for_weights += bytes;
            }
            // What dies where another is made may have its place taken over.
            changes.push((2 * first + 1, bytes));
            changes.push((2 * last.max(first + 1), -bytes));
        }
        changes.sort_by(|a, b| a.0.cmp(&b.0).then(a.1.total_cmp(&b.1)));
        let (mut now, mut forward, mut backward) = (0.0f64, between, between);
        for (time, change) in changes {
            now += change;
            if time < 2 * ranges[0].end {
                forward = forward.max(now);
            } else if time < 2 * ranges[1].end {
                backward = backward.max(now);
            }
        }
        Self { between, activations, for_weights, forward, backward }
    }

    /// The most there are of it at any time.
    pub(crate) fn most(self) -> f64 {
        self.forward.max(self.backward)
    }

    pub(crate) fn with(self, other: Self, choose: impl Fn(f64, f64) -> f64) -> Self {
        Self {
            between: choose(self.between, other.between),
            activations: choose(self.activations, other.activations),
            for_weights: choose(self.for_weights, other.for_weights),
            forward: choose(self.forward, other.forward),
            backward: choose(self.backward, other.backward),
        }
    }
}
