//! Which instructions of a list have ended when another has, whatever things take: vector clocks of its streams (Fidge 1988; Mattern 1989).
//!
//! It must not know time, and what is made of it ([`crate::certain`]).

use crate::engine::order::Order;
use crate::lowering::LoweredList;

/// No clock.
const NONE: u32 = u32::MAX;

/// How far each stream is, at the least, at the end of instructions.
pub(crate) struct VectorClocks<'a> {
    order: &'a Order,
    list: &'a LoweredList,
    /// Of how many numbers a clock is: the streams, rounded up to [`LANES`].
    width: usize,
    /// Of each stream at the end of its last so far.
    now: Vec<u32>,
    /// Of each instruction that someone still to come waits for, where [`Self::row_of`] says.
    kept: Vec<u32>,
    row_of: Vec<u32>,
    /// Where in [`Self::kept`] there were clocks that nobody asks for any more: few are in use at a time, so they stay in the cache.
    free: Vec<u32>,
}

/// How many numbers of a clock are copied and compared at a time.
const LANES: usize = 4;

impl VectorClocks<'_> {
    pub(crate) fn new<'a>(list: &'a LoweredList, order: &'a Order) -> VectorClocks<'a> {
        let streams = order.stream_count();
        let width = streams.next_multiple_of(LANES);
        let (now, row_of) = (vec![0; streams * width], vec![NONE; list.streams.len()]);
        VectorClocks { order, list, width, now, kept: Vec::new(), row_of, free: Vec::new() }
    }

    pub(crate) fn stream(&self, instruction: u32) -> usize {
        self.list.streams[instruction as usize] as usize
    }

    pub(crate) fn of_stream(&self, stream: usize) -> &[u32] {
        &self.now[stream * self.width..(stream + 1) * self.width]
    }

    /// That at the end of one that someone still to come waits for. Of one that comes later in the list nothing is known.
    pub(crate) fn of(&self, instruction: u32) -> Option<&[u32]> {
        let row = Some(self.row_of[instruction as usize]).filter(|&row| row != NONE)? as usize;
        Some(&self.kept[row..row + self.width])
    }

    pub(crate) fn has_ended(&self, clock: &[u32], instruction: u32) -> bool {
        clock[self.stream(instruction)] > self.order.place[instruction as usize]
    }

    /// Has a stream be past an instruction, and past all that this waits for. Where it is known at whose end all of that has ended, and which comes
    /// before it in its stream, it is past what that one was: a clock that knows the end of an instruction knows all that this knew.
    pub(crate) fn pass(&mut self, instruction: u32, waits: &[u32], last: Option<u32>, previous: Option<u32>) {
        let (stream, width) = (self.stream(instruction), self.width);
        let now = &mut self.now[stream * width..(stream + 1) * width];
        match last {
            _ if last == previous && last.is_some() => {}
            Some(last) if self.row_of[last as usize] != NONE => {
                let row = self.row_of[last as usize] as usize;
                overwrite(now, &self.kept[row..row + width]);
            }
            _ => {
                for row in waits.iter().map(|&one| self.row_of[one as usize]).filter(|&row| row != NONE) {
                    raise(now, &self.kept[row as usize..row as usize + width]);
                }
            }
        }
        now[stream] = self.order.place[instruction as usize] + 1;
        for &before in waits {
            // Those who wait for one stand in the order of the list.
            let row = &mut self.row_of[before as usize];
            if *row != NONE && self.order.consumers(before).last() == Some(&instruction) {
                self.free.push(*row);
                *row = NONE;
            }
        }
        if self.order.consumers(instruction).last().is_some_and(|&last| last > instruction) {
            let row = self.free.pop().unwrap_or_else(|| {
                self.kept.resize(self.kept.len() + width, 0);
                (self.kept.len() - width) as u32
            });
            self.row_of[instruction as usize] = row;
            overwrite(&mut self.kept[row as usize..row as usize + width], now);
        }
    }
}

/// Has a clock be what another is. VectorClocks are too short to be worth a call for it.
fn overwrite(own: &mut [u32], theirs: &[u32]) {
    for (own, theirs) in own.chunks_exact_mut(LANES).zip(theirs.chunks_exact(LANES)) {
        own.copy_from_slice(theirs);
    }
}

/// Has a clock be as far as another, stream by stream.
fn raise(own: &mut [u32], theirs: &[u32]) {
    for (own, theirs) in own.chunks_exact_mut(LANES).zip(theirs.chunks_exact(LANES)) {
        own.iter_mut().zip(theirs).for_each(|(own, &theirs)| *own = (*own).max(theirs));
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
        fn a_clock_knows_all_that_is_waited_for_and_nothing_else(instructions in instructions()) {
            let list = list(&instructions, 4);
            let lowered = LoweredList::new(&list).expect("it is sound");
            let order = Order::new(&list, &lowered);
            let mut clocks = VectorClocks::new(&lowered, &order);
            // Of each instruction all that have ended when it has, itself among them.
            let mut ended: Vec<BTreeSet<u32>> = Vec::new();
            for (index, &stream) in (0u32..).zip(&lowered.streams) {
                let previous = (0..index).rev().find(|&one| lowered.streams[one as usize] == stream);
                let before = || previous.into_iter().chain(order.waits(index).iter().copied());
                let last = before().find(|&one| before().all(|other| ended[one as usize].contains(&other)));
                clocks.pass(index, order.waits(index), last, previous);
                let known = before().flat_map(|one| ended[one as usize].iter().copied()).chain([index]).collect::<BTreeSet<u32>>();
                for one in 0..instructions.len() as u32 {
                    prop_assert_eq!(clocks.has_ended(clocks.of_stream(stream as usize), one), known.contains(&one));
                }
                ended.push(known);
                for one in 0..=index {
                    let is_asked_for = order.consumers(one).iter().any(|&other| other > index);
                    prop_assert_eq!(clocks.of(one).is_some(), is_asked_for);
                    for other in (0..=index).filter(|_| is_asked_for) {
                        let clock = clocks.of(one).unwrap_or_default();
                        prop_assert_eq!(clocks.has_ended(clock, other), ended[one as usize].contains(&other));
                    }
                }
            }
        }
    }
}
