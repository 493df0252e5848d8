//! The static memory plan: where each buffer lies in a rank's one arena of the device's memory, or in that of the host's, and from when to when.
//!
//! What is kept from step to step lies first, in the order in which it was declared. The rest is placed by going once through the
//! instructions: the smallest hole that fits (best fit), at the end if none does. An operator that may work in place takes over the place
//! of an input that dies with it. A place that another stream may still be using is left alone for a while, and whoever takes it
//! over waits for those who used it: so the plan is right whatever the streams' relative speeds.

use crate::program::{BufferId, BufferRole, InstructionId, MemoryKind, Operation, Phase, StageProgram, Stream, StreamId};
use arena::{Arena, BlockId, NO_BLOCK};
use foretell_models::Kernel;
use foretell_units::Bytes;
use smallvec::SmallVec;
use std::collections::VecDeque;

mod arena;

/// Every buffer starts at a multiple of it: a cache line, and enough for any vector unit.
const ALIGNMENT: u64 = 64;

/// How many instructions of its own a stream other than compute is given before its buffers' places are reused.
/// Without it the next kernel would take the place of what is being sent, and wait for it.
const GRACE: usize = 64;

/// The most that it is of activations that go to the host from a stage of a pipeline, and the share of the instructions that made all of them that are
/// out at once. Copying them takes longer than the forward pass that leaves them, and is caught up with beside the pass back that follows: with
/// no more than [`GRACE`] passes forward wait for the link one by one; with this a stage holds that share of what it sends away.
const GRACE_TO_HOST: usize = 256;
const SHARE_ON_ITS_WAY: f64 = 0.125;

/// Places all buffers of a stage, sets their lifetimes and the arenas' sizes, and adds the dependencies that sharing a place needs.
pub(crate) fn plan(program: &mut StageProgram) {
    let kept = place_persistent(program);
    let mut planner = Planner::new(program, kept);
    planner.run();
    planner.finish_plan();
}

/// The grace of activations that go to the host. Where there is no pipeline the way there is all of the model, so that it comes to the link's pace in
/// the end.
fn grace_to_host(program: &StageProgram) -> usize {
    if program.peers.is_empty() {
        return GRACE;
    }
    let (mut copies, mut out, mut most, mut forward) = (0usize, 0usize, 0usize, 0usize);
    for instruction in &program.instructions {
        let is_activation = |buffer: &BufferId| program.buffer(*buffer).role == BufferRole::Activation;
        match *instruction.operation {
            Operation::Copy { to: MemoryKind::Host, .. } if instruction.reads.iter().any(is_activation) => {
                copies += 1;
                out += 1;
                most = most.max(out);
            }
            Operation::Copy { to: MemoryKind::Device, .. } if instruction.writes.iter().any(is_activation) => {
                out = out.saturating_sub(1);
            }
            Operation::Compute { .. } if instruction.phase == Phase::Forward => forward += 1,
            _ => {}
        }
    }
    let of_a_copy = (copies + forward) as f64 / copies.max(1) as f64;
    ((most as f64 * of_a_copy * SHARE_ON_ITS_WAY) as usize).clamp(GRACE, GRACE_TO_HOST)
}

/// By memory, where what is kept ends.
fn place_persistent(program: &mut StageProgram) -> [u64; 2] {
    let mut ends = [0u64; 2];
    for buffer in program.buffers.iter_mut().filter(|buffer| buffer.persistent && buffer.parent.is_none()) {
        let end = &mut ends[buffer.memory as usize];
        buffer.offset = Bytes::new(*end);
        *end += buffer.bytes.count().next_multiple_of(ALIGNMENT);
    }
    ends
}

/// Who used a place last, by stream.
type Users = SmallVec<[(StreamId, InstructionId); 2]>;

/// What the plan knows of a buffer, in one line of the cache.
#[derive(Clone)]
struct Lot {
    /// The buffer that has a place of its own: a piece has its parent's.
    root: BufferId,
    is_persistent: bool,
    memory: MemoryKind,
    /// The first and the last instruction that touch it; [`NEVER`] where none does.
    first: u32,
    last: u32,
    /// Where it lies while it lives.
    block: BlockId,
    bytes: u64,
    offset: u64,
    /// Its last uses so far.
    users: Users,
}

const NEVER: u32 = u32::MAX;

impl Lot {
    /// An instruction after all that have touched it does so, too. Returns the buffer that has the place.
    fn touch(&mut self, index: u32) -> BufferId {
        self.first = self.first.min(index);
        self.last = index;
        self.root
    }
}

struct Planner<'a> {
    program: &'a mut StageProgram,
    lots: Vec<Lot>,
    /// By memory.
    arenas: [Arena; 2],
    /// Buffers that are over but for another stream: with the instruction after which they are free, the earliest first.
    waiting: VecDeque<(usize, BufferId)>,
    /// What an instruction is the last to touch: kept to be filled again.
    finished: Vec<BufferId>,
    grace_to_host: usize,
}

impl<'a> Planner<'a> {
    fn new(program: &'a mut StageProgram, kept: [u64; 2]) -> Self {
        let lot = |(id, buffer): (u32, &crate::program::Buffer)| Lot {
            root: buffer.parent.unwrap_or(BufferId(id)),
            is_persistent: buffer.persistent,
            memory: buffer.memory,
            first: NEVER,
            last: 0,
            block: NO_BLOCK,
            bytes: buffer.bytes.count(),
            offset: buffer.offset.count(),
            users: Users::new(),
        };
        let mut lots: Vec<Lot> = (0..).zip(&program.buffers).map(lot).collect();
        for (index, instruction) in (0..).zip(&program.instructions) {
            for &buffer in instruction.reads.iter().chain(&instruction.writes) {
                let root = lots[buffer.0 as usize].touch(index);
                if root != buffer {
                    lots[root.0 as usize].touch(index);
                }
            }
        }
        for (buffer, lot) in program.buffers.iter_mut().zip(&lots) {
            buffer.lifetime = (lot.first != NEVER).then_some((InstructionId(lot.first), InstructionId(lot.last)));
        }
        let (arenas, grace_to_host) = (kept.map(Arena::new), grace_to_host(program));
        Self { program, lots, arenas, waiting: VecDeque::new(), finished: Vec::new(), grace_to_host }
    }

    fn lot(&self, buffer: BufferId) -> &Lot {
        &self.lots[buffer.0 as usize]
    }

    fn lot_mut(&mut self, buffer: BufferId) -> &mut Lot {
        &mut self.lots[buffer.0 as usize]
    }

    fn root(&self, buffer: BufferId) -> BufferId {
        self.lot(buffer).root
    }

    fn run(&mut self) {
        for index in 0..self.program.instructions.len() {
            self.release_waiting(index);
            for position in 0..self.program.instructions[index].writes.len() {
                let writes = &self.program.instructions[index].writes;
                let buffer = self.root(writes[position]);
                if writes[..position].iter().any(|&one| self.root(one) == buffer) {
                    continue;
                }
                let lot = self.lot(buffer);
                if lot.first == index as u32 && !lot.is_persistent {
                    match self.place_to_take_over(index, buffer) {
                        Some(dying) => self.take_over(index, dying, buffer),
                        None => self.allocate(index, buffer),
                    }
                }
            }
            let id = InstructionId(index as u32);
            let instruction = &self.program.instructions[index];
            let stream = instruction.stream;
            let mut finished = std::mem::take(&mut self.finished);
            for &buffer in instruction.reads.iter().chain(&instruction.writes) {
                let root = self.lots[buffer.0 as usize].root;
                let lot = &mut self.lots[root.0 as usize];
                remember(&mut lot.users, stream, id);
                // One whose place was taken over has no place of its own any more.
                if lot.last == index as u32 && !lot.is_persistent && lot.block != NO_BLOCK {
                    finished.push(root);
                }
            }
            if finished.len() > 1 {
                finished.sort_unstable();
                finished.dedup();
            }
            finished.drain(..).for_each(|buffer| self.finish(index, buffer));
            self.finished = finished;
        }
    }

    /// The input whose place an operator's first output may have: it dies here, is as large, and the kernel works in place.
    fn place_to_take_over(&self, index: usize, output: BufferId) -> Option<BufferId> {
        let instruction = &self.program.instructions[index];
        let Operation::Compute { kernel, .. } = &*instruction.operation else { return None };
        if instruction.writes.first() != Some(&output) {
            return None;
        }
        let input = *instruction.reads.get(in_place_input(kernel)?)?;
        let once = instruction.reads.iter().filter(|&&read| self.root(read) == input).count() == 1;
        let (dying, new) = (self.lot(input), self.lot(output));
        let dies = dying.last == index as u32 && !dying.is_persistent && dying.root == input && dying.bytes == new.bytes;
        // What is on its way to another stage may be taken there only when that stage has come so far: to write over it would be to wait
        // for that within a task, and perhaps for a stage that waits for this task.
        let is_sent =
            |&(stream, _): &(StreamId, InstructionId)| matches!(self.program.streams[stream.0 as usize], Stream::SendTo(_));
        let is_free = !dying.users.iter().any(is_sent);
        (once && dies && is_free).then_some(input)
    }

    fn take_over(&mut self, index: usize, dying: BufferId, output: BufferId) {
        let dying = self.lot_mut(dying);
        let (users, offset) = (std::mem::take(&mut dying.users), dying.offset);
        let block = std::mem::replace(&mut dying.block, NO_BLOCK);
        self.wait_for(index, &users);
        let output = self.lot_mut(output);
        (output.users, output.offset, output.block) = (users, offset, block);
    }

    fn allocate(&mut self, index: usize, buffer: BufferId) {
        let (length, memory) = (self.lot(buffer).bytes.next_multiple_of(ALIGNMENT), self.lot(buffer).memory);
        if length == 0 {
            return;
        }
        let mut users = Users::new();
        let (block, start) = self.arenas[memory as usize].take(length, &mut users);
        let lot = self.lot_mut(buffer);
        (lot.block, lot.offset) = (block, start);
        self.wait_for(index, &users);
    }

    fn wait_for(&mut self, index: usize, users: &Users) {
        let instruction = &mut self.program.instructions[index];
        for &(stream, id) in users {
            if stream != instruction.stream {
                instruction.after.push(id);
            }
        }
    }

    /// A buffer's last instruction has been passed.
    fn finish(&mut self, index: usize, buffer: BufferId) {
        let compute = |stream: StreamId| self.program.streams[stream.0 as usize] == Stream::Compute;
        let users = &self.lot(buffer).users;
        // Gathered parameters, and copies of them in eight bits, are done with when the last kernel has read them: it waited for the gather.
        // What is gathered next goes there only after that kernel, which is early enough; with a grace, a block or two of parameters
        // more would be held (FSDP).
        let last_kernel = users.iter().filter(|&&(stream, _)| compute(stream)).map(|&(_, id)| id).max();
        let role = self.program.buffers[buffer.0 as usize].role;
        let is_parameter = matches!(role, BufferRole::Parameter | BufferRole::ParameterCopy);
        let is_over = |id: InstructionId| is_parameter && last_kernel.is_some_and(|kernel| id < kernel);
        let to_host = if role == BufferRole::Activation { self.grace_to_host } else { GRACE };
        let grace = |&(stream, id): &(StreamId, InstructionId)| {
            let grace = match self.program.streams[stream.0 as usize] {
                Stream::Compute => 0,
                Stream::CopyTo(MemoryKind::Host) => to_host,
                _ => GRACE,
            };
            if id.0 as usize + grace > index && !is_over(id) { grace } else { 0 }
        };
        match users.iter().map(grace).max().unwrap_or(0) {
            0 => self.release(buffer),
            grace => {
                let until = index + grace;
                let place = self.waiting.partition_point(|&(other, _)| other <= until);
                self.waiting.insert(place, (until, buffer));
            }
        }
    }

    fn release_waiting(&mut self, index: usize) {
        while let Some(&(until, buffer)) = self.waiting.front()
            && until <= index
        {
            self.waiting.pop_front();
            self.release(buffer);
        }
    }

    fn release(&mut self, buffer: BufferId) {
        let lot = self.lot_mut(buffer);
        let (block, memory, users) = (lot.block, lot.memory, std::mem::take(&mut lot.users));
        self.arenas[memory as usize].give_back(block, users);
    }

    /// Writes down where everything lies. A piece's offset was counted from its parent's start until now.
    fn finish_plan(self) {
        let Self { program, lots, arenas, .. } = self;
        [program.arena, program.host_arena] = arenas.map(|arena| Bytes::new(arena.end().next_multiple_of(ALIGNMENT)));
        for (buffer, lot) in program.buffers.iter_mut().zip(&lots) {
            let start = if buffer.parent.is_some() { lots[lot.root.0 as usize].offset } else { 0 };
            buffer.offset = Bytes::new(lot.offset + start);
        }
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
