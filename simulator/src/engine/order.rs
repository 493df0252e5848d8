//! The order of a list's instructions: stream by stream, and the dependencies between streams.

use crate::lowering::LoweredList;
use foretell_program::StageProgram;

/// The order of a list's instructions.
pub(crate) struct InstructionOrder {
    /// The instructions stream by stream.
    pub(super) by_stream: Vec<u32>,
    /// The start of each stream in `by_stream`, and the end of the last one.
    pub(super) streams: Vec<u32>,
    /// For each instruction, its position in `by_stream`.
    pub(crate) position: Vec<u32>,
    /// For each instruction in turn, the instructions of other streams that it depends on.
    pub(super) dependencies: Vec<u32>,
    /// The start of each instruction's entries in `dependencies`, and the end of the last one's.
    dependency_offsets: Vec<u32>,
    /// For each instruction in turn, the instructions of other streams that depend on it.
    dependents: Vec<u32>,
    /// The start of each instruction's entries in `dependents`, and the end of the last one's.
    dependent_offsets: Vec<u32>,
}

impl InstructionOrder {
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
            position: Vec::with_capacity(count),
            dependencies: Vec::with_capacity(count),
            dependency_offsets: Vec::with_capacity(count + 1),
            dependents: Vec::new(),
            dependent_offsets: vec![0; count + 1],
        };
        order.dependency_offsets.push(0);
        for (index, instruction) in (0..).zip(&list.instructions) {
            let own_stream = lowered.streams[index as usize];
            let position = &mut next[own_stream as usize];
            order.by_stream[*position as usize] = index;
            order.position.push(*position);
            *position += 1;
            let first = order.dependencies.len();
            for dependency in instruction.after.iter().map(|id| id.0) {
                let is_elsewhere = lowered.streams[dependency as usize] != own_stream;
                if is_elsewhere && !order.dependencies[first..].contains(&dependency) {
                    order.dependencies.push(dependency);
                    order.dependent_offsets[dependency as usize + 1] += 1;
                }
            }
            order.dependency_offsets.push(order.dependencies.len() as u32);
        }
        order.find_dependents();
        order
    }

    /// Inverts the dependencies. On entry, `dependent_offsets[i + 1]` is the number of dependents
    /// of instruction `i`.
    fn find_dependents(&mut self) {
        for index in 1..self.dependent_offsets.len() {
            self.dependent_offsets[index] += self.dependent_offsets[index - 1];
        }
        let mut next = self.dependent_offsets.clone();
        self.dependents = vec![0; self.dependencies.len()];
        for (instruction, range) in (0..).zip(self.dependency_offsets.windows(2)) {
            for &dependency in &self.dependencies[range[0] as usize..range[1] as usize] {
                let next = &mut next[dependency as usize];
                self.dependents[*next as usize] = instruction;
                *next += 1;
            }
        }
    }

    pub(crate) fn stream_count(&self) -> usize {
        self.streams.len() - 1
    }

    /// Whether an instruction is the last of its stream.
    pub(crate) fn is_last(&self, instruction: u32, stream: u16) -> bool {
        self.position[instruction as usize] + 1 == self.streams[stream as usize + 1]
    }

    /// The instructions of other streams that an instruction depends on, each once.
    pub(crate) fn dependencies(&self, instruction: u32) -> &[u32] {
        let offsets = &self.dependency_offsets[instruction as usize..instruction as usize + 2];
        &self.dependencies[offsets[0] as usize..offsets[1] as usize]
    }

    /// The instructions of other streams that depend on an instruction, in the order of the list.
    pub(crate) fn dependents(&self, instruction: u32) -> &[u32] {
        let offsets = &self.dependent_offsets[instruction as usize..instruction as usize + 2];
        &self.dependents[offsets[0] as usize..offsets[1] as usize]
    }
}

/// Which of an instruction's dependents, and of the next instruction in its stream, begin when it
/// ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Successor {
    /// The durations of instructions decide.
    Unknown,
    /// Only this instruction begins. None of the others does before it has ended.
    One(u32),
    /// Two branches begin, and later the instruction that joins them. None of the others begins
    /// before the join has ended.
    Fork(InstructionFork),
}

/// Two branches that begin when one instruction ends, and the instruction that begins when both
/// branches have ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct InstructionFork {
    /// The first and the last instruction of each branch. A branch lies in one stream, and no
    /// dependency leads into it after its first instruction or out of it before its last.
    pub(crate) branches: [(u32, u32); 2],
    pub(crate) join: u32,
}

/// Marks an instruction or block whose end time is not kept.
pub(crate) const NO_SLOT: u32 = u32::MAX;
