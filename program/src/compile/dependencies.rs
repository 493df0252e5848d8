//! Dependencies between streams: an instruction waits for those whose data it touches.
//!
//! Within a stream the order of the list is enough. Across streams a read waits for the writes before it, and a write for the reads and
//! writes before it. A part of a bucket counts as the bucket: what looks like too much waiting costs nothing, as it is within one stream.
//!
//! Communication beside which the plan has no kernels run waits for those before it, and those after it wait for it.

use crate::plan::Overlap;
use crate::program::{BufferId, Few, InstructionId, Operation, StageProgram, StreamId};
use smallvec::SmallVec;

/// Finds every instruction's `after` from what it reads and writes, and from what may run beside kernels.
pub(super) fn connect(program: &mut StageProgram, overlap: &Overlap) {
    // The last kernel, or the last communication since then that kernels wait for.
    let mut last: Option<InstructionId> = None;
    let mut accesses: Vec<Accesses> = vec![Accesses::default(); program.buffers.len()];
    let roots: Vec<u32> = (0..).zip(&program.buffers).map(|(id, buffer)| buffer.parent.map_or(id, |parent| parent.0)).collect();
    let root = |buffer: &BufferId| roots[buffer.0 as usize] as usize;
    for index in 0..program.instructions.len() {
        let id = InstructionId(index as u32);
        let instruction = &program.instructions[index];
        let stream = instruction.stream;
        let mut after: Few<InstructionId> = Few::new();
        for buffer in instruction.reads.iter().map(root) {
            after.extend(others(&accesses[buffer].writes, stream));
        }
        for buffer in instruction.writes.iter().map(root) {
            after.extend(others(&accesses[buffer].writes, stream));
            after.extend(others(&accesses[buffer].reads, stream));
        }
        if matches!(*instruction.operation, Operation::Compute { .. }) || !overlap.allows(&instruction.operation) {
            after.extend(last.replace(id).filter(|one| program.instructions[one.0 as usize].stream != stream));
        }
        for buffer in instruction.reads.iter().map(root) {
            remember(&mut accesses[buffer].reads, stream, id);
        }
        for buffer in instruction.writes.iter().map(root) {
            remember(&mut accesses[buffer].writes, stream, id);
        }
        program.instructions[index].after = after;
    }
}

/// The last of each stream; mostly of one or two.
type LastUses = SmallVec<[(StreamId, InstructionId); 2]>;

/// The last access from each stream.
#[derive(Clone, Default)]
struct Accesses {
    writes: LastUses,
    reads: LastUses,
}

fn others(accesses: &[(StreamId, InstructionId)], stream: StreamId) -> impl Iterator<Item = InstructionId> + '_ {
    accesses.iter().filter(move |(other, _)| *other != stream).map(|&(_, id)| id)
}

fn remember(accesses: &mut LastUses, stream: StreamId, id: InstructionId) {
    match accesses.iter_mut().find(|(known, _)| *known == stream) {
        Some(entry) => entry.1 = id,
        None => accesses.push((stream, id)),
    }
}

/// Drops what is waited for already: by an instruction before it in the stream, or by one that it waits for.
pub(super) fn prune(program: &mut StageProgram) {
    let streams = program.streams.len();
    // Of each stream, how far every stream is known to have come: the number of instructions of the list that must be over.
    let mut known = vec![vec![0u32; streams]; streams];
    // The same as of each instruction, one row after the other.
    let mut known_at: Vec<u32> = Vec::with_capacity(program.instructions.len() * streams);
    for index in 0..program.instructions.len() {
        let stream = program.instructions[index].stream.0 as usize;
        let mut after = std::mem::take(&mut program.instructions[index].after);
        // The latest first: it may imply the earlier ones.
        after.sort_unstable_by(|a, b| b.cmp(a));
        after.dedup();
        after.retain(|id| {
            let row = id.0 as usize;
            let other = program.instructions[row].stream.0 as usize;
            let is_news = known[stream][other] <= id.0;
            if is_news {
                for (mine, &theirs) in known[stream].iter_mut().zip(&known_at[row * streams..(row + 1) * streams]) {
                    *mine = (*mine).max(theirs);
                }
            }
            is_news
        });
        after.reverse();
        program.instructions[index].after = after;
        known[stream][stream] = index as u32 + 1;
        known_at.extend_from_slice(&known[stream]);
    }
}
