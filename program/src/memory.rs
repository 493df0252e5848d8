//! The static memory plan: where each buffer lies in a rank's one arena, and from when to when.
//!
//! What is kept from step to step lies first, in the order in which it was declared. The rest is placed by going once through the
//! instructions: the smallest hole that fits (best fit), at the end if none does. An operator that may work in place takes over the place
//! of an input that dies with it. A place that another stream may still be using is left alone for a while, and whoever takes it
//! over waits for those who used it: so the plan is right whatever the streams' relative speeds.

use crate::program::{BufferId, InstructionId, Operation, StageProgram, Stream, StreamId};
use foretell_models::Kernel;
use foretell_units::Bytes;
use std::collections::BTreeMap;

/// Every buffer starts at a multiple of it: a cache line, and enough for any vector unit.
const ALIGNMENT: u64 = 64;

/// How many instructions of its own a stream other than compute is given before its buffers' places are reused.
/// Without it the next kernel would take the place of what is being sent, and wait for it.
const GRACE: usize = 64;

/// Places all buffers of a stage, sets their lifetimes and the arena's size, and adds the dependencies that sharing a place needs.
pub(crate) fn plan(program: &mut StageProgram) {
    let kept = place_persistent(program);
    let end = Planner::new(program, kept).run();
    program.arena = Bytes::new(end.next_multiple_of(ALIGNMENT));
    place_pieces(program);
}

fn place_persistent(program: &mut StageProgram) -> u64 {
    let mut end = 0u64;
    for buffer in program.buffers.iter_mut().filter(|buffer| buffer.persistent && buffer.parent.is_none()) {
        buffer.offset = Bytes::new(end);
        end += buffer.bytes.count().next_multiple_of(ALIGNMENT);
    }
    end
}

/// A piece's offset was counted from its parent's start until now.
fn place_pieces(program: &mut StageProgram) {
    for index in 0..program.buffers.len() {
        if let Some(parent) = program.buffers[index].parent {
            let start = program.buffer(parent).offset;
            program.buffers[index].offset += start;
        }
    }
}

/// Who used a place last, by stream.
type Users = Vec<(StreamId, InstructionId)>;

struct Planner<'a> {
    program: &'a mut StageProgram,
    first: Vec<Option<usize>>,
    last: Vec<usize>,
    /// Free places: start to length.
    holes: BTreeMap<u64, u64>,
    /// Where the arena ends so far.
    end: u64,
    /// Who used what lies from a start to an end before: disjoint.
    history: BTreeMap<u64, (u64, Users)>,
    /// The last uses of each buffer, by stream.
    users: Vec<Users>,
    /// Buffers that are over but for another stream: with the instruction after which they are free.
    waiting: Vec<(usize, BufferId)>,
    /// What an instruction reads and writes: kept to be filled again.
    touched: Vec<BufferId>,
}

impl<'a> Planner<'a> {
    fn new(program: &'a mut StageProgram, kept: u64) -> Self {
        let count = program.buffers.len();
        let mut planner = Self {
            first: vec![None; count],
            last: vec![0; count],
            holes: BTreeMap::new(),
            end: kept,
            history: BTreeMap::new(),
            users: vec![Users::new(); count],
            waiting: Vec::new(),
            touched: Vec::new(),
            program,
        };
        for (index, instruction) in planner.program.instructions.iter().enumerate() {
            for &buffer in instruction.reads.iter().chain(&instruction.writes) {
                for buffer in [buffer, planner.root(buffer)].map(|buffer| buffer.0 as usize) {
                    planner.first[buffer].get_or_insert(index);
                    planner.last[buffer] = index;
                }
            }
        }
        for buffer in 0..count {
            let last = InstructionId(planner.last[buffer] as u32);
            planner.program.buffers[buffer].lifetime = planner.first[buffer].map(|first| (InstructionId(first as u32), last));
        }
        planner
    }

    /// The buffer that has a place of its own: a piece has its parent's.
    fn root(&self, buffer: BufferId) -> BufferId {
        self.program.buffer(buffer).parent.unwrap_or(buffer)
    }

    fn run(mut self) -> u64 {
        for index in 0..self.program.instructions.len() {
            self.release_waiting(index);
            let instruction = &self.program.instructions[index];
            let stream = instruction.stream;
            for position in 0..instruction.writes.len() {
                let buffer = self.root(self.program.instructions[index].writes[position]);
                let is_placed = self.program.instructions[index].writes[..position].iter().any(|&one| self.root(one) == buffer);
                if is_placed {
                    continue;
                }
                if self.first[buffer.0 as usize] == Some(index) && !self.program.buffer(buffer).persistent {
                    match self.place_to_take_over(index, buffer) {
                        Some(dying) => self.take_over(index, dying, buffer),
                        None => self.allocate(index, buffer),
                    }
                }
            }
            let id = InstructionId(index as u32);
            let instruction = &self.program.instructions[index];
            let mut touched = std::mem::take(&mut self.touched);
            touched.clear();
            touched.extend(instruction.reads.iter().chain(&instruction.writes).map(|&buffer| self.root(buffer)));
            touched.sort_unstable();
            touched.dedup();
            for &buffer in &touched {
                remember(&mut self.users[buffer.0 as usize], stream, id);
                let over = self.last[buffer.0 as usize] == index && !self.program.buffer(buffer).persistent;
                // One whose place was taken over has no place of its own any more.
                if over && self.program.buffer(buffer).bytes > Bytes::ZERO && !self.taken_over(buffer) {
                    self.finish(index, buffer);
                }
            }
            self.touched = touched;
        }
        self.end
    }

    fn taken_over(&self, buffer: BufferId) -> bool {
        self.last[buffer.0 as usize] == usize::MAX
    }

    /// The input whose place an operator's first output may have: it dies here, is as large, and the kernel works in place.
    fn place_to_take_over(&self, index: usize, output: BufferId) -> Option<BufferId> {
        let instruction = &self.program.instructions[index];
        let Operation::Compute { kernel, .. } = &instruction.operation else { return None };
        if instruction.writes.first() != Some(&output) {
            return None;
        }
        let input = *instruction.reads.get(in_place_input(kernel)?)?;
        let once = instruction.reads.iter().filter(|&&read| self.root(read) == input).count() == 1;
        let (dying, new) = (self.program.buffer(input), self.program.buffer(output));
        let dies =
            self.last[input.0 as usize] == index && !dying.persistent && dying.parent.is_none() && dying.bytes == new.bytes;
        // What is on its way to another stage may be taken there only when that stage has come so far: to write over it would be to wait
        // for that within a task, and perhaps for a stage that waits for this task.
        let is_sent =
            |&(stream, _): &(StreamId, InstructionId)| matches!(self.program.streams[stream.0 as usize], Stream::SendTo(_));
        let is_free = !self.users[input.0 as usize].iter().any(is_sent);
        (once && dies && is_free).then_some(input)
    }

    fn take_over(&mut self, index: usize, dying: BufferId, output: BufferId) {
        self.program.buffers[output.0 as usize].offset = self.program.buffer(dying).offset;
        let users = std::mem::take(&mut self.users[dying.0 as usize]);
        self.wait_for(index, &users);
        self.users[output.0 as usize] = users;
        self.last[dying.0 as usize] = usize::MAX;
    }

    fn allocate(&mut self, index: usize, buffer: BufferId) {
        let length = self.program.buffer(buffer).bytes.count().next_multiple_of(ALIGNMENT);
        if length == 0 {
            return;
        }
        let best = self.holes.iter().filter(|&(_, &hole)| hole >= length).min_by_key(|&(&start, &hole)| (hole, start));
        let start = match best.map(|(&start, &hole)| (start, hole)) {
            Some((start, hole)) => {
                self.holes.remove(&start);
                if hole > length {
                    self.holes.insert(start + length, hole - length);
                }
                start
            }
            None => self.extend(length),
        };
        self.program.buffers[buffer.0 as usize].offset = Bytes::new(start);
        let users = self.forget_history(start, start + length);
        self.wait_for(index, &users);
    }

    /// Makes room at the end, from a hole that reaches it if there is one.
    fn extend(&mut self, length: u64) -> u64 {
        let open = self.holes.last_key_value().map(|(&start, &hole)| (start, hole));
        let start = match open {
            Some((start, hole)) if start + hole == self.end => {
                self.holes.remove(&start);
                start
            }
            _ => self.end,
        };
        self.end = start + length;
        start
    }

    /// Who used any of a place before; that is then forgotten.
    fn forget_history(&mut self, start: u64, end: u64) -> Users {
        let mut users = Users::new();
        let before = self.history.range(..start).next_back().filter(|(_, (until, _))| *until > start).map(|(&from, _)| from);
        let overlapping: Vec<u64> = before.into_iter().chain(self.history.range(start..end).map(|(&from, _)| from)).collect();
        for from in overlapping {
            let Some((until, past)) = self.history.remove(&from) else { continue };
            for &(stream, id) in &past {
                remember(&mut users, stream, id);
            }
            if from < start {
                self.history.insert(from, (start, past.clone()));
            }
            if until > end {
                self.history.insert(end, (until, past));
            }
        }
        users
    }

    fn wait_for(&mut self, index: usize, users: &Users) {
        let instruction = &mut self.program.instructions[index];
        let stream = instruction.stream;
        instruction.after.extend(users.iter().filter(|(other, _)| *other != stream).map(|&(_, id)| id));
    }

    /// A buffer's last instruction has been passed.
    fn finish(&mut self, index: usize, buffer: BufferId) {
        let compute = |stream: StreamId| self.program.streams[stream.0 as usize] == Stream::Compute;
        let other_last =
            self.users[buffer.0 as usize].iter().any(|&(stream, id)| !compute(stream) && id.0 as usize + GRACE > index);
        if other_last {
            self.waiting.push((index + GRACE, buffer));
        } else {
            self.release(buffer);
        }
    }

    fn release_waiting(&mut self, index: usize) {
        let mut waiting = std::mem::take(&mut self.waiting);
        waiting.retain(|&(until, buffer)| {
            if until <= index {
                self.release(buffer);
            }
            until > index
        });
        self.waiting = waiting;
    }

    fn release(&mut self, buffer: BufferId) {
        let start = self.program.buffer(buffer).offset.count();
        let length = self.program.buffer(buffer).bytes.count().next_multiple_of(ALIGNMENT);
        let users = std::mem::take(&mut self.users[buffer.0 as usize]);
        self.history.insert(start, (start + length, users));
        let (mut from, mut until) = (start, start + length);
        if let Some((&before, &hole)) = self.holes.range(..start).next_back()
            && before + hole == start
        {
            self.holes.remove(&before);
            from = before;
        }
        if let Some(&hole) = self.holes.get(&until) {
            self.holes.remove(&until);
            until += hole;
        }
        self.holes.insert(from, until - from);
    }
}

fn remember(users: &mut Users, stream: StreamId, id: InstructionId) {
    match users.iter_mut().find(|(known, _)| *known == stream) {
        Some(entry) => entry.1 = entry.1.max(id),
        None => users.push((stream, id)),
    }
}

/// Which input a kernel may overwrite with its first output, as its documentation allows.
pub fn in_place_input(kernel: &Kernel) -> Option<usize> {
    kernel.may_work_in_place().then_some(0)
}
