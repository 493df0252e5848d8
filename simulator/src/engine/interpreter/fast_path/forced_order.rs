//! What is certain of a list's order whatever things take, by the clocks of its streams ([`crate::clocks`]).
//!
//! Two things follow. The end of an instruction need not be kept once all have ended who asked for it, so that another's can be kept in its
//! place. And what begins when an instruction ends is known beforehand where that is the last that one other waits for, or the last for two others
//! that a third waits for.
//! It must not know time, and what instructions do.

use super::vector_clocks::VectorClocks;
use crate::engine::order::{InstructionFork, NO_SLOT, Order, Successor};
use crate::lowering::LoweredList;
use std::collections::VecDeque;

/// What is certain of a list.
pub(crate) struct ForcedOrder {
    /// Where each instruction's end is kept, or [`NO_SLOT`] where nobody in another stream waits for it.
    pub(crate) slot_of: Vec<u32>,
    /// How many places there are for ends.
    pub(crate) slots: u32,
    next: Vec<Next>,
    forks: Vec<InstructionFork>,
}

/// How many of a stream's oldest slots are looked at.
const LOOKED_AT: usize = 4;

/// No instruction.
const NONE: u32 = u32::MAX;

/// What is known so far of what follows an instruction.
#[derive(Clone, Copy, Debug)]
struct Next {
    sort: Sort,
    /// The one that follows, or a fork's place.
    which: u32,
    /// Of how many that wait for it or come after it in its stream it is known that they come no sooner than what follows.
    known: u32,
    /// The one at whose end it begins, or began what it follows without waiting for anybody.
    cause: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sort {
    Unknown,
    One,
    Fork,
    /// One of two, and what follows is the join.
    Branch,
}

impl ForcedOrder {
    pub(crate) fn new(list: &LoweredList, order: &Order) -> Self {
        let (count, streams) = (list.streams.len(), order.stream_count());
        let next = Next { sort: Sort::Unknown, which: NONE, known: 0, cause: NONE };
        let mut certain = Self { slot_of: vec![NO_SLOT; count], slots: 0, next: vec![next; count], forks: Vec::new() };
        let mut taken: Vec<VecDeque<u32>> = vec![VecDeque::new(); streams];
        // Of each stream the last so far, and the one at whose end what follows that begins, if it waits for nobody.
        let mut latest: Vec<Option<(u32, u32)>> = vec![None; streams];
        let mut clocks = VectorClocks::new(list, order);
        for (index, &stream) in (0..).zip(&list.streams) {
            let (waits, consumers) = (order.waits(index), order.consumers(index));
            let before = latest[stream as usize];
            let previous = before.map(|(one, _)| one);
            let (last, branches) = if waits.is_empty() { (previous, None) } else { certain.last(&clocks, waits, previous) };
            let cause = before.filter(|_| waits.is_empty()).map(|(_, cause)| cause).or(last).unwrap_or(NONE);
            certain.next[index as usize].cause = cause;
            latest[stream as usize] = Some((index, if consumers.is_empty() { cause } else { index }));
            clocks.pass(index, waits, last, previous);
            if let Some(branches) = branches {
                certain.join(&clocks, index, branches);
            }
            let clock = clocks.of_stream(stream as usize);
            for &before in waits {
                certain.follow(&clocks, clock, before, index, last == Some(before));
            }
            if let Some(before) = previous {
                certain.follow(&clocks, clock, before, index, last == previous);
            }
            if consumers.is_empty() {
                continue;
            }
            let is_free = |holder: &u32| order.consumers(*holder).iter().all(|&one| clocks.has_ended(clock, one));
            let taken = &mut taken[stream as usize];
            let free = match (0..taken.len().min(LOOKED_AT)).find(|&place| is_free(&taken[place])) {
                // Mostly, and much quicker.
                Some(0) => taken.pop_front(),
                place => place.and_then(|place| taken.remove(place)),
            };
            certain.slot_of[index as usize] = free.map_or(certain.slots, |holder| certain.slot_of[holder as usize]);
            certain.slots += u32::from(free.is_none());
            taken.push_back(index);
        }
        certain
    }

    /// What follows an instruction.
    pub(crate) fn successor(&self, list: &LoweredList, order: &Order, instruction: u32) -> Successor {
        let is_complete = |one: u32| {
            let all = order.consumers(one).len() + usize::from(!order.is_last(one, list.streams[one as usize]));
            self.next[one as usize].known as usize == all
        };
        let next = self.next[instruction as usize];
        match next.sort {
            Sort::One if is_complete(instruction) => Successor::One(next.which),
            Sort::Fork => {
                let fork = self.forks[next.which as usize];
                let is_whole = fork.join != NONE && fork.branches.iter().all(|&(_, last)| is_complete(last));
                if is_whole && is_complete(instruction) { Successor::Fork(fork) } else { Successor::Unknown }
            }
            Sort::One | Sort::Unknown | Sort::Branch => Successor::Unknown,
        }
    }

    /// Of those that an instruction waits for, of which there are some, or comes after in its stream, the one at whose end all others have ended; or the two, if these began at
    /// the end of one.
    fn last(&self, clocks: &VectorClocks<'_>, waits: &[u32], previous: Option<u32>) -> (Option<u32>, Option<[u32; 2]>) {
        let have_ended = |clock: &[u32]| waits.iter().all(|&one| clocks.has_ended(clock, one));
        if previous.is_some_and(|one| have_ended(clocks.of_stream(clocks.stream(one)))) {
            return (previous, None);
        }
        let is_last = |clock: &[u32]| previous.is_none_or(|one| clocks.has_ended(clock, one)) && have_ended(clock);
        if let Some(&last) = waits.iter().find(|&&one| clocks.of(one).is_some_and(is_last)) {
            return (Some(last), None);
        }
        let clock = |one: u32| {
            if Some(one) == previous { Some(clocks.of_stream(clocks.stream(one))) } else { clocks.of(one) }
        };
        let cause = |one: u32| self.next[one as usize].cause;
        let all = |first: &[u32], second: &[u32]| {
            let has_ended = |one: u32| clocks.has_ended(first, one) || clocks.has_ended(second, one);
            previous.is_none_or(has_ended) && waits.iter().all(|&one| has_ended(one))
        };
        let are_last = |one: u32, other: u32| {
            cause(one) != NONE
                && cause(one) == cause(other)
                && clock(one).zip(clock(other)).is_some_and(|(first, second)| all(first, second))
        };
        // Which of the two comes first makes no difference.
        let with_previous = previous.and_then(|one| waits.iter().find(|&&other| are_last(one, other)).map(|&other| [one, other]));
        let pair = with_previous.or_else(|| {
            let mut pairs =
                waits.iter().enumerate().flat_map(|(place, &one)| waits[place + 1..].iter().map(move |&other| [one, other]));
            pairs.find(|&[one, other]| are_last(one, other))
        });
        (None, pair)
    }

    /// An instruction begins when two have ended that began at the end of one.
    fn join(&mut self, clocks: &VectorClocks<'_>, instruction: u32, mut last: [u32; 2]) {
        let Next { sort: Sort::Fork, which, .. } = self.next[self.next[last[0] as usize].cause as usize] else { return };
        let fork = &mut self.forks[which as usize];
        let streams = |ones: [u32; 2]| ones.map(|one| clocks.stream(one));
        let first = fork.branches.map(|(first, _)| first);
        if streams(first) != streams(last) {
            last.reverse();
        }
        let is_open = last.iter().all(|&one| self.next[one as usize].sort == Sort::Unknown);
        if fork.join == NONE && is_open && streams(first) == streams(last) {
            fork.join = instruction;
            fork.branches.iter_mut().zip(last).for_each(|(branch, last)| branch.1 = last);
            for one in last {
                let next = &mut self.next[one as usize];
                (next.sort, next.which) = (Sort::Branch, instruction);
            }
        }
    }

    /// Notes of an instruction that waits for another, or comes after it in its stream, whether it follows it, or comes no sooner than what does.
    /// The `clock` is that at its end.
    fn follow(&mut self, clocks: &VectorClocks<'_>, clock: &[u32], before: u32, instruction: u32, is_last: bool) {
        let next = &mut self.next[before as usize];
        let target = match next.sort {
            Sort::Unknown if is_last => {
                (next.sort, next.which, next.known) = (Sort::One, instruction, next.known + 1);
                return;
            }
            Sort::Unknown => return,
            Sort::One | Sort::Branch => next.which,
            Sort::Fork => self.forks[next.which as usize].join,
        };
        if target != NONE && clocks.has_ended(clock, target) {
            next.known += 1;
        } else if next.sort == Sort::One && is_last && next.known == 1 {
            let fork = InstructionFork { branches: [(next.which, NONE), (instruction, NONE)], join: NONE };
            (next.sort, next.which, next.known) = (Sort::Fork, self.forks.len() as u32, 2);
            self.forks.push(fork);
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use foretell_models::InputKind;
    use foretell_program::{Few, Instruction, InstructionId, Operation, Phase, StageProgram, Stream, StreamId};
    use foretell_units::Bytes;
    use proptest::prelude::*;
    use std::sync::Arc;

    /// A list of instructions, each with its stream and those before it that it waits for.
    pub(crate) fn list(instructions: &[(u16, Vec<u32>)], streams: usize) -> StageProgram {
        let operation = Arc::new(Operation::Load { input: InputKind::Tokens, first_sample: 0, samples: 1 });
        let instructions = instructions.iter().map(|(stream, waits)| Instruction {
            name: 0,
            operation: Arc::clone(&operation),
            stream: StreamId(*stream),
            after: waits.iter().map(|&one| InstructionId(one)).collect(),
            reads: Few::new(),
            writes: Few::new(),
            micro_batch: None,
            phase: Phase::Forward,
        });
        StageProgram {
            stage: 0,
            streams: vec![Stream::Load; streams],
            groups: Vec::new(),
            peers: Vec::new(),
            buffers: Vec::new(),
            instructions: instructions.collect(),
            names: vec![String::new()],
            passes: Vec::new(),
            metrics: Vec::new(),
            arena: Bytes::ZERO,
            host_arena: Bytes::ZERO,
        }
    }

    /// When each begins and ends, if it takes so long.
    fn times(instructions: &[(u16, Vec<u32>)], durations: &[u64]) -> Vec<(u64, u64)> {
        let mut times: Vec<(u64, u64)> = Vec::new();
        for (index, (stream, waits)) in instructions.iter().enumerate() {
            let previous = (0..index).rev().find(|&other| instructions[other].0 == *stream);
            let before = waits.iter().map(|&one| one as usize).chain(previous);
            let start = before.map(|one| times[one].1).max().unwrap_or(0);
            times.push((start, start + durations[index]));
        }
        times
    }

    /// Lists in four streams.
    pub(crate) fn instructions() -> impl Strategy<Value = Vec<(u16, Vec<u32>)>> {
        let one = (0u16..4, proptest::collection::vec(any::<prop::sample::Index>(), 0..3));
        proptest::collection::vec(one, 2..24).prop_map(|ones| {
            let waits = |(index, waits): (usize, Vec<prop::sample::Index>)| -> Vec<u32> {
                // Mostly for one that came just before, as in lists of kernels.
                let near = |one: prop::sample::Index| (index - 1 - one.index(index.min(4))) as u32;
                if index == 0 { Vec::new() } else { waits.into_iter().map(near).collect() }
            };
            ones.into_iter().enumerate().map(|(index, (stream, ones))| (stream, waits((index, ones)))).collect()
        })
    }

    proptest! {
        #[test]
        fn what_follows_does_so_and_ends_are_kept_whatever_things_take(
            instructions in instructions(),
            runs in proptest::collection::vec(proptest::collection::vec(1u64..1000, 24), 8),
        ) {
            let list = list(&instructions, 4);
            let lowered = LoweredList::new(&list).expect("it is sound");
            let order = Order::new(&list, &lowered);
            let certain = ForcedOrder::new(&lowered, &order);
            for durations in runs {
                let times = times(&instructions, &durations);
                let start = |one: u32| times[one as usize].0;
                let end = |one: u32| times[one as usize].1;
                for index in 0..instructions.len() as u32 {
                    let next = (index + 1..instructions.len() as u32).find(|&one| instructions[one as usize].0 == instructions[index as usize].0);
                    // Where an end is kept is taken over by no end before all have ended that ask for the first.
                    let slot = certain.slot_of[index as usize];
                    let takes_over = |one: &u32| slot != NO_SLOT && certain.slot_of[*one as usize] == slot;
                    let taken_over = (index + 1..instructions.len() as u32).find(takes_over);
                    prop_assert!(order.consumers(index).iter().all(|&one| taken_over.is_none_or(|other| end(one) <= end(other))));
                    let candidates = || order.consumers(index).iter().copied().chain(next);
                    match certain.successor(&lowered, &order, index) {
                        Successor::Unknown => {}
                        Successor::One(next) => {
                            prop_assert_eq!(start(next), end(index));
                            prop_assert!(candidates().all(|one| one == next || start(one) >= end(next)));
                        }
                        Successor::Fork(InstructionFork { branches, join }) => {
                            let firsts = branches.map(|(first, _)| first);
                            let over = branches.iter().map(|&(_, last)| end(last)).max().unwrap_or(0);
                            prop_assert!(firsts.iter().all(|&first| start(first) == end(index)));
                            prop_assert_eq!(start(join), over);
                            prop_assert!(candidates().all(|one| firsts.contains(&one) || one == join || start(one) >= end(join)));
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn a_collective_beside_a_kernel_is_a_fork() {
        // A kernel; one in its stream beside a collective of its result; one that waits for that; one that waits for the first alone, in a
        // third stream, is a second thing that begins.
        let mut instructions = vec![(0, vec![]), (0, vec![]), (1, vec![0]), (0, vec![2]), (0, vec![])];
        let follows = |instructions: &[(u16, Vec<u32>)]| {
            let list = list(instructions, 3);
            let lowered = LoweredList::new(&list).expect("it is sound");
            let order = Order::new(&list, &lowered);
            let certain = ForcedOrder::new(&lowered, &order);
            (0..instructions.len() as u32).map(|one| certain.successor(&lowered, &order, one)).collect::<Vec<_>>()
        };
        let fork = Successor::Fork(InstructionFork { branches: [(1, 1), (2, 2)], join: 3 });
        assert_eq!(follows(&instructions), [fork, Successor::Unknown, Successor::Unknown, Successor::One(4), Successor::Unknown]);
        instructions.push((2, vec![0]));
        assert_eq!(follows(&instructions)[0], Successor::Unknown);
    }
}
