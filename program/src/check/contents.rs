//! Checks that every buffer that is read was written before, and that no other buffer overwrote it
//! in between. Runs a list over a memory of buffer ids.

use super::Unsound;
use crate::program::{BufferId, MemoryKind, StageProgram};
use std::collections::{BTreeMap, BTreeSet};

/// The buffers whose contents a memory holds, keyed by their start. They do not overlap. Empty
/// buffers are kept apart.
#[derive(Default)]
struct Held {
    by_start: BTreeMap<u64, (u64, BufferId)>,
    empty: BTreeSet<u32>,
}

pub(super) fn check(list: &StageProgram) -> Result<(), Unsound> {
    let whole = |id: BufferId| list.buffer(id).parent.unwrap_or(id);
    let (mut device, mut host) = (Held::default(), Held::default());
    for (index, buffer) in list.buffers.iter().enumerate().filter(|(_, buffer)| buffer.persistent && buffer.parent.is_none()) {
        let held = if buffer.memory == MemoryKind::Host { &mut host } else { &mut device };
        held.write(buffer.offset.count(), buffer.bytes.count(), BufferId(index as u32));
    }
    for instruction in &list.instructions {
        for &id in &instruction.reads {
            let id = whole(id);
            let buffer = list.buffer(id);
            let held = if buffer.memory == MemoryKind::Host { &host } else { &device };
            if !held.has(buffer.offset.count(), id) {
                let (stage, instruction) = (list.stage, list.name_of(instruction).to_string());
                return Err(Unsound::Unwritten { stage, instruction, buffer: buffer.name.to_string() });
            }
        }
        for &id in &instruction.writes {
            let id = whole(id);
            let buffer = list.buffer(id);
            let held = if buffer.memory == MemoryKind::Host { &mut host } else { &mut device };
            held.write(buffer.offset.count(), buffer.bytes.count(), id);
        }
    }
    Ok(())
}

impl Held {
    fn has(&self, start: u64, id: BufferId) -> bool {
        self.empty.contains(&id.0) || self.by_start.get(&start).is_some_and(|&(_, held)| held == id)
    }

    /// Records that a buffer was written, and drops the buffers that it overwrites.
    fn write(&mut self, start: u64, bytes: u64, id: BufferId) {
        if bytes == 0 {
            self.empty.insert(id.0);
            return;
        }
        let end = start + bytes;
        let before = self.by_start.range(..start).next_back().filter(|(_, (until, _))| *until > start).map(|(&from, _)| from);
        let inside = self.by_start.range(start..end).map(|(&from, _)| from);
        for from in inside.chain(before).collect::<Vec<_>>() {
            self.by_start.remove(&from);
        }
        self.by_start.insert(start, (end, id));
    }
}
