//! Facts about the order of a list's instructions that hold for all durations.
//!
//! Two things follow from the vector clocks of the streams ([`super::vector_clocks`]):
//!
//! - The end time of an instruction need not be kept once all of its dependents have ended. Another
//!   end time can reuse its slot.
//! - An instruction's successor is forced in two cases: the instruction is certain to be the last
//!   predecessor of another one to end, or it starts two branches that one join waits for. No other
//!   follower may start before that one (or the join) has ended. There the interpreter may run
//!   ahead of the event queue.
//!
//! The predecessors of an instruction are its dependencies and the previous instruction of its
//! stream. Its followers are its dependents and the next instruction of its stream.

use super::vector_clocks::VectorClocks;
use crate::engine::order::{InstructionFork, InstructionOrder, NO_SLOT, Successor};
use crate::lowering::LoweredList;
use std::collections::VecDeque;

/// Facts about the order of a list's instructions that hold for all durations.
pub(in crate::engine) struct ForcedOrder {
    /// The slot of each instruction's end time, or [`NO_SLOT`] if no other stream depends on it.
    pub(in crate::engine) slot_of: Vec<u32>,
    /// Number of slots.
    pub(in crate::engine) slots: u32,
    /// For each instruction, the candidate for its forced successor.
    candidates: Vec<Candidate>,
    forks: Vec<InstructionFork>,
}

/// The number of a stream's oldest slots that are tried for reuse.
const SLOTS_TRIED: usize = 4;

/// No instruction.
const NONE: u32 = u32::MAX;

/// A candidate for an instruction's forced successor.
#[derive(Clone, Copy, Debug)]
struct Candidate {
    kind: CandidateKind,
    /// The successor; for a fork its index in [`ForcedOrder::forks`].
    target: u32,
    /// How many followers are accounted for: the target or the two branches, and those proven to
    /// start only after the target or the join has ended. [`ForcedOrder::successor`] answers only
    /// if all are.
    confirmed: u32,
    /// The instruction whose end starts this one, directly or through earlier instructions of its
    /// stream that have no dependents. [`NONE`] if that is not certain.
    cause: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CandidateKind {
    Unknown,
    One,
    Fork,
    /// The instruction is the end of a branch of a fork; the target is the join.
    BranchEnd,
}

/// The predecessor of an instruction that is certain to end last, or two of which one is.
enum LastPredecessor {
    Unknown,
    One(u32),
    /// Two predecessors with the same cause.
    Two([u32; 2]),
}

impl ForcedOrder {
    pub(in crate::engine) fn new(list: &LoweredList, order: &InstructionOrder) -> Self {
        let (count, streams) = (list.streams.len(), order.stream_count());
        let candidate = Candidate { kind: CandidateKind::Unknown, target: NONE, confirmed: 0, cause: NONE };
        let candidates = vec![candidate; count];
        let mut forced = Self { slot_of: vec![NO_SLOT; count], slots: 0, candidates, forks: Vec::new() };
        // For each stream, the instructions whose slots may be reused, oldest first.
        let mut slot_holders: Vec<VecDeque<u32>> = vec![VecDeque::new(); streams];
        // For each stream, the latest instruction, and the cause that the next one gets if it has
        // no dependencies.
        let mut latest: Vec<Option<(u32, u32)>> = vec![None; streams];
        let mut clocks = VectorClocks::new(list, order);
        for (index, &stream) in (0..).zip(&list.streams) {
            let (dependencies, dependents) = (order.dependencies(index), order.dependents(index));
            let before = latest[stream as usize];
            let previous = before.map(|(before, _)| before);
            let (last, branches) = match forced.last_predecessor(&clocks, dependencies, previous) {
                LastPredecessor::Unknown => (None, None),
                LastPredecessor::One(last) => (Some(last), None),
                LastPredecessor::Two(branches) => (None, Some(branches)),
            };
            let cause = before.filter(|_| dependencies.is_empty()).map(|(_, cause)| cause).or(last).unwrap_or(NONE);
            forced.candidates[index as usize].cause = cause;
            latest[stream as usize] = Some((index, if dependents.is_empty() { cause } else { index }));
            clocks.advance(index, dependencies, last, previous);
            if let Some(branches) = branches {
                forced.join(&clocks, index, branches);
            }
            let clock = clocks.of_stream(stream as usize);
            for &before in dependencies {
                forced.add_follower(&clocks, clock, before, index, last == Some(before));
            }
            if let Some(before) = previous {
                forced.add_follower(&clocks, clock, before, index, last == previous);
            }
            if dependents.is_empty() {
                continue;
            }
            let is_free = |holder: &u32| order.dependents(*holder).iter().all(|&dependent| clocks.has_ended(clock, dependent));
            let holders = &mut slot_holders[stream as usize];
            let free = match (0..holders.len().min(SLOTS_TRIED)).find(|&place| is_free(&holders[place])) {
                // Usually the oldest slot is free, and popping it is much faster.
                Some(0) => holders.pop_front(),
                place => place.and_then(|place| holders.remove(place)),
            };
            forced.slot_of[index as usize] = free.map_or(forced.slots, |holder| forced.slot_of[holder as usize]);
            forced.slots += u32::from(free.is_none());
            holders.push_back(index);
        }
        forced
    }

    /// The forced successor of an instruction.
    pub(in crate::engine) fn successor(&self, list: &LoweredList, order: &InstructionOrder, instruction: u32) -> Successor {
        let is_confirmed = |instruction: u32| {
            let followers = order.dependents(instruction).len()
                + usize::from(!order.is_last(instruction, list.streams[instruction as usize]));
            self.candidates[instruction as usize].confirmed as usize == followers
        };
        let candidate = self.candidates[instruction as usize];
        match candidate.kind {
            CandidateKind::One if is_confirmed(instruction) => Successor::One(candidate.target),
            CandidateKind::Fork => {
                let fork = self.forks[candidate.target as usize];
                let is_complete = fork.join != NONE && fork.branches.iter().all(|&(_, last)| is_confirmed(last));
                if is_complete && is_confirmed(instruction) { Successor::Fork(fork) } else { Successor::Unknown }
            }
            CandidateKind::One | CandidateKind::Unknown | CandidateKind::BranchEnd => Successor::Unknown,
        }
    }

    /// The predecessor of an instruction that must be the last to end. `previous` is the previous
    /// instruction of its stream.
    fn last_predecessor(&self, clocks: &VectorClocks<'_>, dependencies: &[u32], previous: Option<u32>) -> LastPredecessor {
        let have_ended = |clock: &[u32]| dependencies.iter().all(|&dependency| clocks.has_ended(clock, dependency));
        if let Some(previous) = previous
            && have_ended(clocks.of_stream(clocks.stream(previous)))
        {
            return LastPredecessor::One(previous);
        }
        let is_last = |clock: &[u32]| previous.is_none_or(|before| clocks.has_ended(clock, before)) && have_ended(clock);
        if let Some(&last) = dependencies.iter().find(|&&dependency| clocks.of(dependency).is_some_and(is_last)) {
            return LastPredecessor::One(last);
        }
        let clock = |instruction: u32| {
            if Some(instruction) == previous {
                Some(clocks.of_stream(clocks.stream(instruction)))
            } else {
                clocks.of(instruction)
            }
        };
        let cause = |instruction: u32| self.candidates[instruction as usize].cause;
        let all_have_ended = |first: &[u32], second: &[u32]| {
            let has_ended = |instruction: u32| clocks.has_ended(first, instruction) || clocks.has_ended(second, instruction);
            previous.is_none_or(has_ended) && dependencies.iter().all(|&dependency| has_ended(dependency))
        };
        let are_last = |left: u32, right: u32| {
            cause(left) != NONE
                && cause(left) == cause(right)
                && clock(left).zip(clock(right)).is_some_and(|(first, second)| all_have_ended(first, second))
        };
        // `are_last` is symmetric, so each pair is tried in one order only.
        let with_previous =
            previous.and_then(|before| dependencies.iter().find(|&&other| are_last(before, other)).map(|&other| [before, other]));
        let pair = with_previous.or_else(|| {
            let rest = |index: usize| dependencies[index + 1..].iter();
            let mut pairs = dependencies
                .iter()
                .enumerate()
                .flat_map(|(index, &dependency)| rest(index).map(move |&other| [dependency, other]));
            pairs.find(|&[pair, other]| are_last(pair, other))
        });
        pair.map_or(LastPredecessor::Unknown, LastPredecessor::Two)
    }

    /// Makes an instruction the join of a fork whose branches end with `last`. Both of `last` have
    /// the same cause, and the instruction starts when both have ended. Does nothing unless they
    /// are open ends in the branches' streams and the fork has no join yet.
    fn join(&mut self, clocks: &VectorClocks<'_>, instruction: u32, mut last: [u32; 2]) {
        let cause = self.candidates[last[0] as usize].cause;
        let Candidate { kind: CandidateKind::Fork, target, .. } = self.candidates[cause as usize] else { return };
        let fork = &mut self.forks[target as usize];
        let streams = |ones: [u32; 2]| ones.map(|dependency| clocks.stream(dependency));
        let first = fork.branches.map(|(first, _)| first);
        if streams(first) != streams(last) {
            last.reverse();
        }
        let is_open = last.iter().all(|&candidate| self.candidates[candidate as usize].kind == CandidateKind::Unknown);
        if fork.join == NONE && is_open && streams(first) == streams(last) {
            fork.join = instruction;
            fork.branches.iter_mut().zip(last).for_each(|(branch, last)| branch.1 = last);
            for one in last {
                let candidate = &mut self.candidates[one as usize];
                (candidate.kind, candidate.target) = (CandidateKind::BranchEnd, instruction);
            }
        }
    }

    /// Adds a follower of `before`. The first of which `before` is the last predecessor becomes the
    /// target; a second one turns the candidate into a fork. A follower that starts only after the
    /// target or the join has ended is confirmed. `clock` is the follower's clock; `is_last` is
    /// true if `before` is the last of the follower's predecessors to end.
    fn add_follower(&mut self, clocks: &VectorClocks<'_>, clock: &[u32], before: u32, follower: u32, is_last: bool) {
        let candidate = &mut self.candidates[before as usize];
        let target = match candidate.kind {
            CandidateKind::Unknown if is_last => {
                (candidate.kind, candidate.target) = (CandidateKind::One, follower);
                candidate.confirmed += 1;
                return;
            }
            CandidateKind::Unknown => return,
            CandidateKind::One | CandidateKind::BranchEnd => candidate.target,
            CandidateKind::Fork => self.forks[candidate.target as usize].join,
        };
        if target != NONE && clocks.has_ended(clock, target) {
            candidate.confirmed += 1;
        } else if candidate.kind == CandidateKind::One && is_last && candidate.confirmed == 1 {
            let fork = InstructionFork { branches: [(candidate.target, NONE), (follower, NONE)], join: NONE };
            (candidate.kind, candidate.target, candidate.confirmed) = (CandidateKind::Fork, self.forks.len() as u32, 2);
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

    /// A list of instructions, each given by its stream and its dependencies.
    pub(crate) fn list(instructions: &[(u16, Vec<u32>)], streams: usize) -> StageProgram {
        let operation = Arc::new(Operation::Load { input: InputKind::Tokens, first_sample: 0, samples: 1, order: None });
        let instructions = instructions.iter().map(|(stream, dependencies)| Instruction {
            name: 0,
            operation: Arc::clone(&operation),
            stream: StreamId(*stream),
            after: dependencies.iter().map(|&dependency| InstructionId(dependency)).collect(),
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

    /// The start and end of each instruction, for given durations.
    fn times(instructions: &[(u16, Vec<u32>)], durations: &[u64]) -> Vec<(u64, u64)> {
        let mut times: Vec<(u64, u64)> = Vec::new();
        for (index, (stream, dependencies)) in instructions.iter().enumerate() {
            let previous = (0..index).rev().find(|&other| instructions[other].0 == *stream);
            let before = dependencies.iter().map(|&dependency| dependency as usize).chain(previous);
            let start = before.map(|before| times[before].1).max().unwrap_or(0);
            times.push((start, start + durations[index]));
        }
        times
    }

    /// Random lists in four streams.
    pub(crate) fn instructions() -> impl Strategy<Value = Vec<(u16, Vec<u32>)>> {
        let one = (0u16..4, proptest::collection::vec(any::<prop::sample::Index>(), 0..3));
        proptest::collection::vec(one, 2..24).prop_map(|ones| {
            let dependencies = |index: usize, choices: Vec<prop::sample::Index>| -> Vec<u32> {
                // One of the few instructions before it, as in lists of kernels.
                let near = |drawn: prop::sample::Index| (index - 1 - drawn.index(index.min(4))) as u32;
                if index == 0 { Vec::new() } else { choices.into_iter().map(near).collect() }
            };
            let ones = ones.into_iter().enumerate();
            ones.map(|(index, (stream, choices))| (stream, dependencies(index, choices))).collect()
        })
    }

    proptest! {
        #[test]
        fn forced_successors_and_slots_hold_for_all_durations(
            instructions in instructions(),
            runs in proptest::collection::vec(proptest::collection::vec(1u64..1000, 24), 8),
        ) {
            let list = list(&instructions, 4);
            let lowered = LoweredList::new(&list).expect("it is sound");
            let order = InstructionOrder::new(&list, &lowered);
            let forced = ForcedOrder::new(&lowered, &order);
            for durations in runs {
                let times = times(&instructions, &durations);
                let start = |instruction: u32| times[instruction as usize].0;
                let end = |instruction: u32| times[instruction as usize].1;
                for index in 0..instructions.len() as u32 {
                    let later = || index + 1..instructions.len() as u32;
                    let next = later().find(|&other| instructions[other as usize].0 == instructions[index as usize].0);
                    // A slot is reused only after all dependents of its holder have ended.
                    let slot = forced.slot_of[index as usize];
                    let reuses = |index: &u32| slot != NO_SLOT && forced.slot_of[*index as usize] == slot;
                    let next_holder = later().find(reuses);
                    let dependents = order.dependents(index);
                    prop_assert!(dependents.iter().all(|&dependent| next_holder.is_none_or(|other| end(dependent) <= end(other))));
                    let followers = || dependents.iter().copied().chain(next);
                    match forced.successor(&lowered, &order, index) {
                        Successor::Unknown => {}
                        Successor::One(next) => {
                            prop_assert_eq!(start(next), end(index));
                            prop_assert!(followers().all(|follower| follower == next || start(follower) >= end(next)));
                        }
                        Successor::Fork(InstructionFork { branches, join }) => {
                            let firsts = branches.map(|(first, _)| first);
                            let both_end = branches.iter().map(|&(_, last)| end(last)).max().unwrap_or(0);
                            prop_assert!(firsts.iter().all(|&first| start(first) == end(index)));
                            prop_assert_eq!(start(join), both_end);
                            let is_part = |branch: u32| firsts.contains(&branch) || branch == join;
                            prop_assert!(followers().all(|follower| is_part(follower) || start(follower) >= end(join)));
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn a_collective_beside_a_kernel_is_a_fork() {
        // Kernel 0 is followed by kernel 1 of its stream and by collective 2 of its result. Kernel
        // 3 waits for both.
        let mut instructions = vec![(0, vec![]), (0, vec![]), (1, vec![0]), (0, vec![2]), (0, vec![])];
        let successors = |instructions: &[(u16, Vec<u32>)]| {
            let list = list(instructions, 3);
            let lowered = LoweredList::new(&list).expect("it is sound");
            let order = InstructionOrder::new(&list, &lowered);
            let forced = ForcedOrder::new(&lowered, &order);
            (0..instructions.len() as u32).map(|index| forced.successor(&lowered, &order, index)).collect::<Vec<_>>()
        };
        let fork = Successor::Fork(InstructionFork { branches: [(1, 1), (2, 2)], join: 3 });
        let unknown = Successor::Unknown;
        assert_eq!(successors(&instructions), [fork, unknown, unknown, Successor::One(4), unknown]);
        // An instruction of a third stream that waits for kernel 0 alone breaks the fork.
        instructions.push((2, vec![0]));
        assert_eq!(successors(&instructions)[0], Successor::Unknown);
    }
}
