//! Dependencies between streams: an instruction waits for the instructions whose data it touches.
//!
//! Within a stream, the order of the list is enough. Across streams, a read waits for earlier
//! writes, and a write for earlier reads and writes. A view counts as its whole buffer, which adds
//! few dependencies: the uses of a bucket's views are mostly in one stream.
//!
//! Kernels, saves, and communication that the plan does not overlap with kernels run one after
//! another: each waits for the one before it.

use crate::plan::Overlap;
use crate::program::{BufferId, Few, InstructionId, Operation, StageProgram, StreamId};

/// Sets [`after`](crate::Instruction::after) of every instruction, from its reads and writes and
/// from the plan's overlap. The last instruction of each other stream is enough.
pub(super) fn connect(program: &mut StageProgram, overlap: &Overlap) {
    // The last kernel, save, or communication that does not overlap with kernels.
    let mut last_in_turn: Option<Use> = None;
    let mut uses = Uses { of_buffer: vec![[Use::NONE; 2]; program.buffers.len()], others: Vec::new() };
    let roots: Vec<u32> = (0..).zip(&program.buffers).map(|(id, buffer)| buffer.parent.map_or(id, |parent| parent.0)).collect();
    let root = |buffer: &BufferId| roots[buffer.0 as usize];
    let mut latest = Latest { of_stream: vec![NONE; program.streams.len()], found: Vec::with_capacity(program.streams.len()) };
    for (id, instruction) in (0..).zip(&mut program.instructions) {
        let own = Use { id, stream: instruction.stream, others: NONE };
        for buffer in instruction.reads.iter().map(root) {
            uses.each(buffer, WRITE, |dependency| latest.add(dependency, own.stream));
            uses.remember(buffer, READ, own);
        }
        for buffer in instruction.writes.iter().map(root) {
            uses.each(buffer, WRITE, |dependency| latest.add(dependency, own.stream));
            uses.each(buffer, READ, |dependency| latest.add(dependency, own.stream));
            uses.remember(buffer, WRITE, own);
        }
        if matches!(*instruction.operation, Operation::Compute { .. }) || !overlap.allows(&instruction.operation) {
            last_in_turn.replace(own).into_iter().for_each(|before| latest.add(before, own.stream));
        }
        latest.take(&mut instruction.after);
    }
}

/// A use of a buffer by an instruction.
#[derive(Clone, Copy)]
struct Use {
    /// The instruction, or [`NONE`].
    id: u32,
    stream: StreamId,
    /// The index in [`Uses::others`] of the last uses from other streams, or [`NONE`].
    others: u32,
}

const NONE: u32 = u32::MAX;

impl Use {
    const NONE: Self = Self { id: NONE, stream: StreamId(0), others: NONE };
}

/// The last uses of each buffer from each stream. Most buffers are written by one stream and read
/// by one stream, so further uses are stored separately.
struct Uses {
    /// The last read and the last write of each buffer ([`READ`], [`WRITE`]) by the first stream
    /// that reads or writes it.
    of_buffer: Vec<[Use; 2]>,
    others: Vec<Vec<Use>>,
}

const READ: usize = 0;
const WRITE: usize = 1;

impl Uses {
    fn each(&self, buffer: u32, kind: usize, mut act: impl FnMut(Use)) {
        let one = self.of_buffer[buffer as usize][kind];
        if one.id != NONE {
            act(one);
            if one.others != NONE {
                self.others[one.others as usize].iter().copied().for_each(act);
            }
        }
    }

    fn remember(&mut self, buffer: u32, kind: usize, own: Use) {
        let one = &mut self.of_buffer[buffer as usize][kind];
        if one.id == NONE || one.stream == own.stream {
            *one = Use { others: one.others, ..own };
            return;
        }
        if one.others == NONE {
            one.others = self.others.len() as u32;
            self.others.push(Vec::new());
        }
        let others = &mut self.others[one.others as usize];
        match others.iter_mut().find(|known| known.stream == own.stream) {
            Some(known) => *known = own,
            None => others.push(own),
        }
    }
}

/// The last instruction of each other stream that an instruction waits for.
struct Latest {
    /// Indexed by stream; [`NONE`] for streams that it does not wait for.
    of_stream: Vec<u32>,
    /// The streams that it waits for.
    found: Vec<StreamId>,
}

impl Latest {
    /// Adds a use, unless it is in the instruction's own stream.
    fn add(&mut self, one: Use, own: StreamId) {
        if one.stream == own {
            return;
        }
        let latest = &mut self.of_stream[one.stream.0 as usize];
        if *latest == NONE {
            self.found.push(one.stream);
            *latest = one.id;
        } else {
            *latest = one.id.max(*latest);
        }
    }

    /// Moves all instructions to `after`.
    fn take(&mut self, after: &mut Few<InstructionId>) {
        after.clear();
        for stream in self.found.drain(..) {
            after.push(InstructionId(std::mem::replace(&mut self.of_stream[stream.0 as usize], NONE)));
        }
    }
}

/// Drops implied dependencies: those that an earlier instruction of the same stream, or another
/// instruction in `after`, has already waited for.
pub(super) fn prune(program: &mut StageProgram) {
    let streams = program.streams.len();
    // For each stream, the vector clock of its latest instruction. A vector clock has one number
    // for every stream: one more than the index of that stream's last instruction that must have
    // finished.
    let mut known = vec![0u32; streams * streams];
    // The vector clock of each instruction, one row after the other.
    let mut known_at: Vec<u32> = Vec::with_capacity(program.instructions.len() * streams);
    let stream_of: Vec<u16> = program.instructions.iter().map(|instruction| instruction.stream.0).collect();
    for (index, instruction) in (0..).zip(&mut program.instructions) {
        let own = instruction.stream.0 as usize;
        let known = &mut known[own * streams..(own + 1) * streams];
        let after = &mut instruction.after;
        if after.len() > 1 {
            // The latest comes first: it may imply the earlier ones.
            after.sort_unstable_by(|a, b| b.cmp(a));
        }
        after.retain(|id| {
            let row = id.0 as usize;
            let other = stream_of[row] as usize;
            // A duplicate is implied by its first occurrence.
            let is_news = known[other] <= id.0;
            if is_news {
                for (mine, &theirs) in known.iter_mut().zip(&known_at[row * streams..(row + 1) * streams]) {
                    *mine = (*mine).max(theirs);
                }
            }
            is_news
        });
        after.reverse();
        known[own] = index + 1;
        known_at.extend_from_slice(known);
    }
}
