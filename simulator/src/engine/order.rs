//! The order of a list's instructions: stream by stream, and across streams.

use crate::lowering::LoweredList;
use foretell_program::StageProgram;

/// What of a list is in each stream, and who waits for whom across streams.
pub(crate) struct Order {
    /// The instructions stream by stream, and where those of each begin; one more than there are streams.
    pub(super) by_stream: Vec<u32>,
    pub(super) streams: Vec<u32>,
    /// An instruction's place among these.
    pub(crate) place: Vec<u32>,
    /// Of each instruction in turn those of other streams that it waits for, and where they begin; one more than there are instructions.
    pub(super) before: Vec<u32>,
    before_offsets: Vec<u32>,
    /// Of each instruction in turn those of other streams that wait for it, and where they begin.
    after: Vec<u32>,
    after_offsets: Vec<u32>,
}

impl Order {
    pub(crate) fn new(list: &StageProgram, lowered: &LoweredList) -> Self {
        let count = list.instructions.len();
        let mut streams = vec![0u32; list.streams.len() + 1];
        lowered.streams.iter().for_each(|&stream| streams[stream as usize + 1] += 1);
        for stream in 0..list.streams.len() {
            streams[stream + 1] += streams[stream];
        }
        let mut next = streams.clone();
        let mut order = Self {
            by_stream: vec![0; count],
            streams,
            place: Vec::with_capacity(count),
            before: Vec::with_capacity(count),
            before_offsets: Vec::with_capacity(count + 1),
            after: Vec::new(),
            after_offsets: vec![0; count + 1],
        };
        order.before_offsets.push(0);
        for (index, instruction) in (0..).zip(&list.instructions) {
            let own_stream = lowered.streams[index as usize];
            let place = &mut next[own_stream as usize];
            order.by_stream[*place as usize] = index;
            order.place.push(*place);
            *place += 1;
            let first = order.before.len();
            for before in instruction.after.iter().map(|one| one.0) {
                let is_elsewhere = lowered.streams[before as usize] != own_stream;
                if is_elsewhere && !order.before[first..].contains(&before) {
                    order.before.push(before);
                    order.after_offsets[before as usize + 1] += 1;
                }
            }
            order.before_offsets.push(order.before.len() as u32);
        }
        order.turn_around();
        order
    }

    /// From whom each waits for to who waits for each.
    fn turn_around(&mut self) {
        for index in 1..self.after_offsets.len() {
            self.after_offsets[index] += self.after_offsets[index - 1];
        }
        let mut next = self.after_offsets.clone();
        self.after = vec![0; self.before.len()];
        for (instruction, range) in (0..).zip(self.before_offsets.windows(2)) {
            for &before in &self.before[range[0] as usize..range[1] as usize] {
                let next = &mut next[before as usize];
                self.after[*next as usize] = instruction;
                *next += 1;
            }
        }
    }

    pub(crate) fn stream_count(&self) -> usize {
        self.streams.len() - 1
    }

    /// Whether an instruction is the last of its stream.
    pub(crate) fn is_last(&self, instruction: u32, stream: u16) -> bool {
        self.place[instruction as usize] + 1 == self.streams[stream as usize + 1]
    }

    pub(crate) fn waits(&self, instruction: u32) -> &[u32] {
        let offsets = &self.before_offsets[instruction as usize..instruction as usize + 2];
        &self.before[offsets[0] as usize..offsets[1] as usize]
    }

    pub(crate) fn consumers(&self, instruction: u32) -> &[u32] {
        let offsets = &self.after_offsets[instruction as usize..instruction as usize + 2];
        &self.after[offsets[0] as usize..offsets[1] as usize]
    }
}

/// What begins when an instruction ends, of all that waits for it or comes after it in its stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Successor {
    /// That is not certain.
    Unknown,
    /// This, and nothing else before it has ended.
    One(u32),
    /// Two, and when both have ended a third, and nothing else before.
    Fork(InstructionFork),
}

/// Two things that begin at the end of one, and what begins when both have ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct InstructionFork {
    /// The first and the last of each of the two, with none from one to the other that waits or is waited for.
    pub(crate) branches: [(u32, u32); 2],
    pub(crate) join: u32,
}

/// Of a block whose end nobody asks for.
pub(crate) const NO_SLOT: u32 = u32::MAX;
