//! The static memory plan: the lifetime of each buffer, and its offset in the arena of the device's
//! or the host's memory.
//!
//! Persistent buffers come first, in the order in which they were declared. All others are placed
//! in one pass over the instructions by best fit: the smallest hole that is large enough, or the
//! end of the arena. A kernel that may work in place takes over the block of an input whose
//! lifetime ends with it.
//!
//! A block that another stream may still use is not reused for some instructions, and the
//! instruction that reuses it waits for its last users. So the plan is correct whatever the
//! relative speeds of the streams. It must not know layouts or schedules: it sees instructions,
//! buffers and streams.

use crate::program::{Buffer, BufferId, BufferRole, InstructionId, MemoryKind, Operation, Phase, StageProgram, Stream, StreamId};
use arena::{Arena, BlockId, NO_BLOCK};
use foretell_models::Kernel;
use foretell_units::Bytes;
use smallvec::SmallVec;
use std::collections::VecDeque;

mod arena;

/// The alignment of every buffer in bytes: a cache line, and enough for any vector unit.
const ALIGNMENT: u64 = 64;

/// After a buffer's last use by a stream other than compute, the number of instructions before its
/// block is reused. Without this grace, the next kernel would take the block of a buffer that is
/// being sent, and wait for the send.
const GRACE: usize = 64;

/// The largest grace of activations that a pipeline stage copies to the host, in instructions.
///
/// Copying activations takes longer than the forward pass that leaves them. The copies catch up
/// during the backward pass that follows. With only [`GRACE`], each forward pass would wait for the
/// link.
const GRACE_TO_HOST: usize = 256;

/// The grace of these activations as a fraction of the instructions that produce all activations
/// that are on the host at once. A stage then holds about this fraction of the activations that it
/// offloads.
const FRACTION_IN_TRANSIT: f64 = 0.125;

/// Places all buffers of a list, sets their lifetimes and the sizes of the arenas, and adds the
/// dependencies that reusing a block needs.
pub(crate) fn plan(program: &mut StageProgram) {
    let ends = place_persistent(program);
    let mut planner = MemoryPlanner::new(program, ends);
    planner.run();
    planner.finish();
}

/// The grace of activations that are copied to the host. Without a pipeline, the forward pass
/// covers the whole model, so it runs at the pace of the link whatever the grace.
fn grace_to_host(program: &StageProgram) -> usize {
    if program.peers.is_empty() {
        return GRACE;
    }
    let (mut copies, mut on_host, mut most_on_host, mut forward_kernels) = (0usize, 0usize, 0usize, 0usize);
    for instruction in &program.instructions {
        let is_activation = |buffer: &BufferId| program.buffer(*buffer).role == BufferRole::Activation;
        match *instruction.operation {
            Operation::Copy { to: MemoryKind::Host, .. } if instruction.reads.iter().any(is_activation) => {
                copies += 1;
                on_host += 1;
                most_on_host = most_on_host.max(on_host);
            }
            Operation::Copy { to: MemoryKind::Device, .. } if instruction.writes.iter().any(is_activation) => {
                on_host = on_host.saturating_sub(1);
            }
            Operation::Compute { .. } if instruction.phase == Phase::Forward => forward_kernels += 1,
            _ => {}
        }
    }
    let instructions_per_copy = (copies + forward_kernels) as f64 / copies.max(1) as f64;
    ((most_on_host as f64 * instructions_per_copy * FRACTION_IN_TRANSIT) as usize).clamp(GRACE, GRACE_TO_HOST)
}

/// Places the persistent buffers. Returns where they end in each memory.
fn place_persistent(program: &mut StageProgram) -> [u64; 2] {
    let mut ends = [0u64; 2];
    for buffer in program.buffers.iter_mut().filter(|buffer| buffer.persistent && buffer.parent.is_none()) {
        let end = &mut ends[buffer.memory as usize];
        buffer.offset = Bytes::new(*end);
        *end += buffer.bytes.count().next_multiple_of(ALIGNMENT);
    }
    ends
}

/// The last user of a block in each stream.
type Users = SmallVec<[(StreamId, InstructionId); 2]>;

/// The planner's view of a buffer, in one cache line.
#[derive(Clone)]
struct PlannedBuffer {
    /// The buffer that has a block: the parent of a view, else the buffer itself.
    root: BufferId,
    is_persistent: bool,
    memory: MemoryKind,
    /// The first instruction that touches it; [`NEVER`] if none does.
    first: u32,
    /// The last instruction that touches it; 0 if none does.
    last: u32,
    /// Its block during its lifetime.
    block: BlockId,
    bytes: u64,
    offset: u64,
    /// Its last users so far.
    users: Users,
}

const NEVER: u32 = u32::MAX;

impl PlannedBuffer {
    /// Extends the lifetime to an instruction that comes after all that touched the buffer so far.
    /// Returns the buffer that has the block.
    fn touch(&mut self, index: u32) -> BufferId {
        self.first = self.first.min(index);
        self.last = index;
        self.root
    }
}

struct MemoryPlanner<'a> {
    program: &'a mut StageProgram,
    /// Indexed by buffer.
    buffers: Vec<PlannedBuffer>,
    /// Indexed by memory.
    arenas: [Arena; 2],
    /// Buffers in their grace period, each with the instruction at which its block becomes free,
    /// the earliest first.
    in_grace: VecDeque<(usize, BufferId)>,
    /// The buffers whose lifetime ends with the current instruction; reused to save allocations.
    ended: Vec<BufferId>,
    grace_to_host: usize,
}

impl<'a> MemoryPlanner<'a> {
    fn new(program: &'a mut StageProgram, ends: [u64; 2]) -> Self {
        let planned = |(id, buffer): (u32, &Buffer)| PlannedBuffer {
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
        let mut buffers: Vec<PlannedBuffer> = (0..).zip(&program.buffers).map(planned).collect();
        for (index, instruction) in (0..).zip(&program.instructions) {
            for &buffer in instruction.reads.iter().chain(&instruction.writes) {
                let root = buffers[buffer.0 as usize].touch(index);
                if root != buffer {
                    buffers[root.0 as usize].touch(index);
                }
            }
        }
        for (buffer, planned) in program.buffers.iter_mut().zip(&buffers) {
            buffer.lifetime = (planned.first != NEVER).then_some((InstructionId(planned.first), InstructionId(planned.last)));
        }
        let (arenas, grace_to_host) = (ends.map(Arena::new), grace_to_host(program));
        Self { program, buffers, arenas, in_grace: VecDeque::new(), ended: Vec::new(), grace_to_host }
    }

    fn planned(&self, buffer: BufferId) -> &PlannedBuffer {
        &self.buffers[buffer.0 as usize]
    }

    fn planned_mut(&mut self, buffer: BufferId) -> &mut PlannedBuffer {
        &mut self.buffers[buffer.0 as usize]
    }

    fn root(&self, buffer: BufferId) -> BufferId {
        self.planned(buffer).root
    }

    fn run(&mut self) {
        for index in 0..self.program.instructions.len() {
            self.release_after_grace(index);
            for position in 0..self.program.instructions[index].writes.len() {
                let writes = &self.program.instructions[index].writes;
                let buffer = self.root(writes[position]);
                if writes[..position].iter().any(|&write| self.root(write) == buffer) {
                    continue;
                }
                let planned = self.planned(buffer);
                if planned.first == index as u32 && !planned.is_persistent {
                    match self.block_to_take_over(index, buffer) {
                        Some(dying) => self.take_over(index, dying, buffer),
                        None => self.allocate(index, buffer),
                    }
                }
            }
            let id = InstructionId(index as u32);
            let instruction = &self.program.instructions[index];
            let stream = instruction.stream;
            let mut ended = std::mem::take(&mut self.ended);
            for &buffer in instruction.reads.iter().chain(&instruction.writes) {
                let root = self.buffers[buffer.0 as usize].root;
                let planned = &mut self.buffers[root.0 as usize];
                remember(&mut planned.users, stream, id);
                // A buffer whose block was taken over no longer has a block.
                if planned.last == index as u32 && !planned.is_persistent && planned.block != NO_BLOCK {
                    ended.push(root);
                }
            }
            if ended.len() > 1 {
                ended.sort_unstable();
                ended.dedup();
            }
            ended.drain(..).for_each(|buffer| self.end_lifetime(index, buffer));
            self.ended = ended;
        }
    }

    /// The input whose block a kernel's first output may take over: the kernel can work in place,
    /// the input's lifetime ends here, and the sizes are equal.
    fn block_to_take_over(&self, index: usize, output: BufferId) -> Option<BufferId> {
        let instruction = &self.program.instructions[index];
        let Operation::Compute { kernel, .. } = &*instruction.operation else { return None };
        if instruction.writes.first() != Some(&output) {
            return None;
        }
        let input = *instruction.reads.get(in_place_input(kernel)?)?;
        let once = instruction.reads.iter().filter(|&&read| self.root(read) == input).count() == 1;
        let (dying, new) = (self.planned(input), self.planned(output));
        let dies = dying.last == index as u32 && !dying.is_persistent && dying.root == input && dying.bytes == new.bytes;
        // A buffer that is being sent stays in use until the other stage receives it. An
        // instruction that overwrites it would wait for that receive in the middle of a task, and
        // the other stage may be waiting for this task.
        let is_sent =
            |&(stream, _): &(StreamId, InstructionId)| matches!(self.program.streams[stream.0 as usize], Stream::SendTo(_));
        let is_free = !dying.users.iter().any(is_sent);
        (once && dies && is_free).then_some(input)
    }

    fn take_over(&mut self, index: usize, dying: BufferId, output: BufferId) {
        let dying = self.planned_mut(dying);
        let (users, offset) = (std::mem::take(&mut dying.users), dying.offset);
        let block = std::mem::replace(&mut dying.block, NO_BLOCK);
        self.wait_for(index, &users);
        let output = self.planned_mut(output);
        (output.users, output.offset, output.block) = (users, offset, block);
    }

    fn allocate(&mut self, index: usize, buffer: BufferId) {
        let (length, memory) = (self.planned(buffer).bytes.next_multiple_of(ALIGNMENT), self.planned(buffer).memory);
        if length == 0 {
            return;
        }
        let mut users = Users::new();
        let (block, start) = self.arenas[memory as usize].allocate(length, &mut users);
        let planned = self.planned_mut(buffer);
        (planned.block, planned.offset) = (block, start);
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

    /// Releases a buffer after its last instruction, or starts its grace period.
    fn end_lifetime(&mut self, index: usize, buffer: BufferId) {
        let compute = |stream: StreamId| self.program.streams[stream.0 as usize] == Stream::Compute;
        let users = &self.planned(buffer).users;
        // Gathered parameters and their eight-bit copies get no grace once a later kernel has read
        // them: that kernel waited for the gather. The next gather into this block waits for that
        // kernel, which is early enough. A grace would hold the parameters of another block or two
        // (FSDP).
        let last_kernel = users.iter().filter(|&&(stream, _)| compute(stream)).map(|&(_, id)| id).max();
        let role = self.program.buffers[buffer.0 as usize].role;
        let is_parameter = matches!(role, BufferRole::Parameter | BufferRole::ParameterCopy);
        let needs_no_grace = |id: InstructionId| is_parameter && last_kernel.is_some_and(|kernel| id < kernel);
        let to_host = if role == BufferRole::Activation { self.grace_to_host } else { GRACE };
        let grace = |&(stream, id): &(StreamId, InstructionId)| {
            let grace = match self.program.streams[stream.0 as usize] {
                Stream::Compute => 0,
                Stream::CopyTo(MemoryKind::Host) => to_host,
                _ => GRACE,
            };
            if id.0 as usize + grace > index && !needs_no_grace(id) { grace } else { 0 }
        };
        match users.iter().map(grace).max().unwrap_or(0) {
            0 => self.release(buffer),
            grace => {
                let until = index + grace;
                let place = self.in_grace.partition_point(|&(other, _)| other <= until);
                self.in_grace.insert(place, (until, buffer));
            }
        }
    }

    fn release_after_grace(&mut self, index: usize) {
        while let Some(&(until, buffer)) = self.in_grace.front()
            && until <= index
        {
            self.in_grace.pop_front();
            self.release(buffer);
        }
    }

    fn release(&mut self, buffer: BufferId) {
        let planned = self.planned_mut(buffer);
        let (block, memory, users) = (planned.block, planned.memory, std::mem::take(&mut planned.users));
        self.arenas[memory as usize].free(block, users);
    }

    /// Stores all offsets and the sizes of the arenas. The offsets of views were relative to their
    /// parents.
    fn finish(self) {
        let Self { program, buffers, arenas, .. } = self;
        [program.arena, program.host_arena] = arenas.map(|arena| Bytes::new(arena.end().next_multiple_of(ALIGNMENT)));
        for (buffer, planned) in program.buffers.iter_mut().zip(&buffers) {
            let start = if buffer.parent.is_some() { buffers[planned.root.0 as usize].offset } else { 0 };
            buffer.offset = Bytes::new(planned.offset + start);
        }
    }
}

fn remember(users: &mut Users, stream: StreamId, id: InstructionId) {
    match users.iter_mut().find(|(known, _)| *known == stream) {
        Some(entry) => entry.1 = entry.1.max(id),
        None => users.push((stream, id)),
    }
}

/// The index of the input that a kernel may overwrite with its first output, if its documentation
/// allows it.
pub fn in_place_input(kernel: &Kernel) -> Option<usize> {
    kernel.may_work_in_place().then_some(0)
}
