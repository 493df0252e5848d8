//! Vector clocks of a list's streams (Fidge 1988; Mattern 1989): which instructions must have ended
//! when another has ended, whatever the durations.

use crate::engine::order::InstructionOrder;
use crate::lowering::LoweredList;

/// No clock.
const NONE: u32 = u32::MAX;

/// A clock has, for each stream, the least number of its instructions that have ended at some
/// instant. Its length is the number of streams rounded up to a multiple of [`LANES`].
pub(super) struct VectorClocks<'a> {
    order: &'a InstructionOrder,
    list: &'a LoweredList,
    /// Length of a clock.
    width: usize,
    /// For each stream, the clock at the end of its latest instruction.
    now: Vec<u32>,
    /// Clocks at the ends of instructions that have dependents still to come.
    kept: Vec<u32>,
    /// For each instruction, the start of its clock in `kept`, or [`NONE`].
    kept_at: Vec<u32>,
    /// The starts of unused clocks in `kept`. Few clocks are in use at once, so they stay in the
    /// cache.
    free: Vec<u32>,
}

/// The number of entries of a clock that are copied and compared together.
const LANES: usize = 4;

impl VectorClocks<'_> {
    pub(super) fn new<'a>(list: &'a LoweredList, order: &'a InstructionOrder) -> VectorClocks<'a> {
        let streams = order.stream_count();
        let width = streams.next_multiple_of(LANES);
        let (now, kept_at) = (vec![0; streams * width], vec![NONE; list.streams.len()]);
        VectorClocks { order, list, width, now, kept: Vec::new(), kept_at, free: Vec::new() }
    }

    /// The stream of an instruction.
    pub(super) fn stream(&self, instruction: u32) -> usize {
        self.list.streams[instruction as usize] as usize
    }

    /// The clock at the end of a stream's latest instruction.
    pub(super) fn of_stream(&self, stream: usize) -> &[u32] {
        &self.now[stream * self.width..(stream + 1) * self.width]
    }

    /// The clock at the end of an instruction that has dependents still to come; else `None`.
    pub(super) fn of(&self, instruction: u32) -> Option<&[u32]> {
        let at = Some(self.kept_at[instruction as usize]).filter(|&at| at != NONE)? as usize;
        Some(&self.kept[at..at + self.width])
    }

    /// Whether an instruction must have ended at the instant of a clock.
    pub(super) fn has_ended(&self, clock: &[u32], instruction: u32) -> bool {
        clock[self.stream(instruction)] > self.order.position[instruction as usize]
    }

    /// Advances a stream to the end of its next instruction, which has these dependencies.
    ///
    /// `last` is the predecessor after whose end all predecessors have ended, if one is certain.
    /// The new clock is then that of `last`: a clock that includes the end of an instruction
    /// includes everything in that instruction's clock. `previous` is the previous instruction of
    /// the stream.
    pub(super) fn advance(&mut self, instruction: u32, dependencies: &[u32], last: Option<u32>, previous: Option<u32>) {
        let (stream, width) = (self.stream(instruction), self.width);
        let now = &mut self.now[stream * width..(stream + 1) * width];
        match last {
            _ if last == previous && last.is_some() => {}
            Some(last) if self.kept_at[last as usize] != NONE => {
                let at = self.kept_at[last as usize] as usize;
                overwrite(now, &self.kept[at..at + width]);
            }
            _ => {
                for at in dependencies.iter().map(|&dependency| self.kept_at[dependency as usize]).filter(|&at| at != NONE) {
                    raise(now, &self.kept[at as usize..at as usize + width]);
                }
            }
        }
        now[stream] = self.order.position[instruction as usize] + 1;
        for &dependency in dependencies {
            // Dependents are in list order, so this is the last one that reads the clock.
            let at = &mut self.kept_at[dependency as usize];
            if *at != NONE && self.order.dependents(dependency).last() == Some(&instruction) {
                self.free.push(*at);
                *at = NONE;
            }
        }
        if self.order.dependents(instruction).last().is_some_and(|&last| last > instruction) {
            let at = self.free.pop().unwrap_or_else(|| {
                self.kept.resize(self.kept.len() + width, 0);
                (self.kept.len() - width) as u32
            });
            self.kept_at[instruction as usize] = at;
            overwrite(&mut self.kept[at as usize..at as usize + width], now);
        }
    }
}

/// Copies a clock, inline: clocks are too short for a call to `memcpy`.
fn overwrite(own: &mut [u32], other: &[u32]) {
    for (own, other) in own.chunks_exact_mut(LANES).zip(other.chunks_exact(LANES)) {
        own.copy_from_slice(other);
    }
}

/// Raises each number of a clock to at least that of another clock.
fn raise(own: &mut [u32], other: &[u32]) {
    for (own, other) in own.chunks_exact_mut(LANES).zip(other.chunks_exact(LANES)) {
        own.iter_mut().zip(other).for_each(|(own, &other)| *own = (*own).max(other));
    }
}

#[cfg(test)]
mod tests {
    use super::super::forced_order::tests::{instructions, list};
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    proptest! {
        #[test]
        fn a_clock_knows_exactly_the_transitive_predecessors(instructions in instructions()) {
            let list = list(&instructions, 4);
            let lowered = LoweredList::new(&list).expect("it is sound");
            let order = InstructionOrder::new(&list, &lowered);
            let mut clocks = VectorClocks::new(&lowered, &order);
            // For each instruction, all that have ended when it has, itself included.
            let mut ended: Vec<BTreeSet<u32>> = Vec::new();
            for (index, &stream) in (0u32..).zip(&lowered.streams) {
                let previous = (0..index).rev().find(|&earlier| lowered.streams[earlier as usize] == stream);
                let before = || previous.into_iter().chain(order.dependencies(index).iter().copied());
                let last = before().find(|&last| before().all(|other| ended[last as usize].contains(&other)));
                clocks.advance(index, order.dependencies(index), last, previous);
                let known = before().flat_map(|before| ended[before as usize].iter().copied()).chain([index]).collect::<BTreeSet<u32>>();
                for one in 0..instructions.len() as u32 {
                    prop_assert_eq!(clocks.has_ended(clocks.of_stream(stream as usize), one), known.contains(&one));
                }
                ended.push(known);
                for one in 0..=index {
                    let has_dependents_to_come = order.dependents(one).iter().any(|&other| other > index);
                    prop_assert_eq!(clocks.of(one).is_some(), has_dependents_to_come);
                    for other in (0..=index).filter(|_| has_dependents_to_come) {
                        let clock = clocks.of(one).unwrap_or_default();
                        prop_assert_eq!(clocks.has_ended(clock, other), ended[one as usize].contains(&other));
                    }
                }
            }
        }
    }
}
