//! Checks that any two accesses of the same memory are ordered, if one of them is a write.

use super::Unsound;
use super::order::HappensBefore;
use crate::program::{Buffer, MemoryKind, StageProgram};
use std::collections::BTreeMap;

/// The last write of a stretch of memory, and the reads since. Happens-before is transitive: an
/// access that is ordered after these is ordered after all earlier ones.
#[derive(Clone, Default)]
struct Stretch {
    end: u64,
    writer: Option<usize>,
    /// The last reader on each stream.
    readers: Vec<usize>,
}

/// A memory's stretches by their beginnings. They do not overlap.
#[derive(Default)]
struct Memory {
    stretches: BTreeMap<u64, Stretch>,
}

pub(super) fn check(list: &StageProgram) -> Result<(), Unsound> {
    let order = HappensBefore::of(list)?;
    let (mut device, mut host) = (Memory::default(), Memory::default());
    for (index, instruction) in list.instructions.iter().enumerate() {
        for (ids, writes) in [(&instruction.reads, false), (&instruction.writes, true)] {
            for &id in ids {
                let buffer = list.buffer(id);
                if !lies_inside(buffer, list) {
                    return Err(Unsound::Outside { stage: list.stage, buffer: buffer.name.to_string() });
                }
                let memory = if buffer.memory == MemoryKind::Host { &mut host } else { &mut device };
                let range = (buffer.offset.count(), buffer.offset.count() + buffer.bytes.count());
                if let Err(first) = memory.access(range, index, writes, &order) {
                    let name = |index: usize| list.name_of(&list.instructions[index]).to_string();
                    let (stage, buffer) = (list.stage, buffer.name.to_string());
                    return Err(Unsound::Race { stage, first: name(first), second: name(index), buffer });
                }
            }
        }
    }
    Ok(())
}

/// Whether a buffer lies inside its arena, and inside the buffer that it is a part of.
fn lies_inside(buffer: &Buffer, list: &StageProgram) -> bool {
    let range = |buffer: &Buffer| (buffer.offset.count(), buffer.offset.count() + buffer.bytes.count());
    let (start, end) = range(buffer);
    let arena = if buffer.memory == MemoryKind::Host { list.host_arena } else { list.arena };
    let whole = buffer.parent.map_or(buffer, |parent| list.buffer(parent));
    let (whole_start, whole_end) = range(whole);
    end <= arena.count() && start >= whole_start && end <= whole_end && buffer.memory == whole.memory
}

impl Memory {
    /// Records an access. Returns an earlier instruction that it races with.
    fn access(&mut self, (start, end): (u64, u64), index: usize, writes: bool, order: &HappensBefore) -> Result<(), usize> {
        if start == end {
            return Ok(());
        }
        self.split(start);
        self.split(end);
        let mut covered = start;
        let mut gaps = Vec::new();
        for (&from, stretch) in self.stretches.range_mut(start..end) {
            if from > covered {
                gaps.push((covered, from));
            }
            covered = stretch.end;
            let readers = if writes { stretch.readers.as_slice() } else { &[] };
            let before =
                stretch.writer.iter().chain(readers).copied().find(|&other| other != index && !order.is_before(other, index));
            if let Some(other) = before {
                return Err(other);
            }
            if writes {
                (stretch.writer, stretch.readers) = (Some(index), Vec::new());
            } else {
                stretch.readers.retain(|&reader| order.stream(reader) != order.stream(index));
                stretch.readers.push(index);
            }
        }
        if covered < end {
            gaps.push((covered, end));
        }
        for (from, end) in gaps {
            let (writer, readers) = if writes { (Some(index), Vec::new()) } else { (None, vec![index]) };
            self.stretches.insert(from, Stretch { end, writer, readers });
        }
        Ok(())
    }

    /// Makes a boundary between stretches.
    fn split(&mut self, at: u64) {
        if let Some((_, stretch)) = self.stretches.range_mut(..at).next_back()
            && stretch.end > at
        {
            let rest = stretch.clone();
            stretch.end = at;
            self.stretches.insert(at, rest);
        }
    }
}
