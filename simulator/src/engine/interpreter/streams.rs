//! Starts and ends blocks, in the order of each stream.

use super::event::{Communication, Event, Task};
use super::state::Progress;
use super::{Interpreter, at_pace};
use crate::cost::Parameters;
use crate::engine::blocks::StreamBlock;
use crate::engine::order::NO_SLOT;
use crate::lowering::Action;
use foretell_units::Picoseconds;

/// The blocks that may begin when one block has ended.
enum Following {
    Nothing,
    /// This block, at this time.
    One(u32, Picoseconds),
    Several,
}

impl<'a> Interpreter<'a> {
    /// Starts every block that begins at this instant.
    pub(super) fn start_ready(&mut self) {
        while let Some(task) = self.ready.pop() {
            self.start(task);
        }
    }

    /// Starts a block.
    pub(super) fn start(&mut self, task: Task) {
        self.catch_up(task.rank);
        let now = self.queue.now();
        let block = self.block(task);
        if let Some(recorder) = &mut self.recorder {
            recorder.begin(task.rank, self.ranks[task.rank as usize].block_list, block, now);
        }
        match block.action {
            Action::Compute => self.compute(task),
            Action::Load => {
                let share = self.parameters(task.rank).communication_share;
                self.run_beside_kernels(task, share);
            }
            Action::Copy => {
                let share = self.parameters(task.rank).copy_share;
                self.run_beside_kernels(task, share);
            }
            Action::Collective { group, nth } => {
                self.interrupt(task.rank);
                self.reach_collective(task, group, nth, now);
            }
            Action::Send { peer, nth } => {
                self.interrupt(task.rank);
                let groups = self.ranks[task.rank as usize].block_list.collectives.len() as u32;
                self.send(Communication { communicator: self.communicator_of(task.rank, groups + peer), nth });
            }
            Action::Receive { peer, nth } => {
                let block_list = self.ranks[task.rank as usize].block_list;
                let first = (block_list.collectives.len() + block_list.sends.len()) as u32;
                self.receive(Communication { communicator: self.communicator_of(task.rank, first + peer), nth }, task);
            }
        }
    }

    /// Ends a block at this instant, and starts or plans the blocks that waited for it.
    pub(super) fn finish(&mut self, task: Task) {
        self.catch_up(task.rank);
        let now = self.queue.now();
        let block = self.block(task);
        let rank = &mut self.ranks[task.rank as usize];
        rank.end = now;
        let (block_list, first_stream, first_slot) = (rank.block_list, rank.first_stream as usize, rank.first_slot as usize);
        let times = &rank.times[task.block as usize];
        if times.host_waits {
            // The host waited for this block, so all its later launches are at least this late.
            rank.host_delay = rank.host_delay.max(now.saturating_sub(times.launched));
        }
        self.unfinished -= block.range().len();
        if let Some(recorder) = &mut self.recorder {
            recorder.end(task.rank, block_list, block, now);
        }
        if matches!(block.action, Action::Compute | Action::Load | Action::Copy) {
            self.ranks[task.rank as usize].meter.end(block.category, now);
        }
        self.progress[first_stream + block.stream as usize] = Progress::at(task.block + 1);
        if block.slot != NO_SLOT {
            self.ends[first_slot + block.slot as usize] = now;
        }
        self.check_deadline(task, now);
        match self.following(task.rank, block, now) {
            Following::Nothing => {}
            Following::One(next, start) => self.plan_at(Task { rank: task.rank, block: next }, start),
            Following::Several => {
                // No block may run ahead before all these blocks have begun.
                let may_run_ahead = self.run_ahead.forbid();
                for stream in block_list.streams_of(dependent_streams(block)).chain([block.stream]) {
                    self.try_stream(task.rank, stream);
                }
                self.run_ahead.restore(may_run_ahead);
            }
        }
    }

    /// The blocks that may begin when a block has ended.
    fn following(&self, rank: u32, block: &StreamBlock, now: Picoseconds) -> Following {
        let block_list = self.ranks[rank as usize].block_list;
        let mut following = Following::Nothing;
        for stream in block_list.streams_of(dependent_streams(block)).chain([block.stream]) {
            if let Some((next, start)) = self.next_block(rank, stream, now) {
                match following {
                    Following::Nothing => following = Following::One(next, start),
                    Following::One(other, _) if other == next => {}
                    Following::One(..) | Following::Several => return Following::Several,
                }
            }
        }
        following
    }

    /// Plans the start of a stream's next block if all of its predecessors have ended.
    pub(super) fn try_stream(&mut self, rank: u32, stream: u16) {
        if let Some((next, start)) = self.next_block(rank, stream, self.queue.now()) {
            self.plan_at(Task { rank, block: next }, start);
        }
    }

    /// A stream's next block and its start, if all of its predecessors have ended.
    fn next_block(&self, rank: u32, stream: u16, now: Picoseconds) -> Option<(u32, Picoseconds)> {
        let state = &self.ranks[rank as usize];
        let first = state.first_stream as usize;
        let progress = self.progress[first + stream as usize];
        let next = progress.block();
        if progress.is_busy() || next == state.block_list.streams[stream as usize + 1] {
            return None;
        }
        let block = &state.block_list.blocks[next as usize];
        let mut start = now;
        for dependency in state.block_list.dependencies(block) {
            if self.progress[first + dependency.stream as usize].block() <= dependency.block {
                return None;
            }
            start = start.max(self.ends[(state.first_slot + dependency.slot) as usize] + state.handoff);
        }
        if state.has_launches {
            start = start.max(state.times[next as usize].launched + state.host_delay);
        }
        Some((next, start))
    }

    /// Starts a block now or at a later time.
    fn plan_at(&mut self, task: Task, start: Picoseconds) {
        let stream = self.block(task).stream as usize;
        self.progress[self.ranks[task.rank as usize].first_stream as usize + stream] = Progress::at(task.block).busy();
        if start == self.queue.now() {
            self.ready.push(task);
        } else if !self.start_in_advance(task, start) {
            self.queue.schedule(start, Event::Start(task));
        }
    }

    /// Starts a block at a later time without a start event. Returns `false` unless the block is a
    /// kernel on an idle processor or a member's arrival at a collective. If another activity
    /// starts on the processor before `start`, the kernel is planned again.
    fn start_in_advance(&mut self, task: Task, start: Picoseconds) -> bool {
        let block = self.block(task);
        let rank = &self.ranks[task.rank as usize];
        if !self.can_start_in_advance || rank.interruption > Picoseconds::ZERO {
            return false;
        }
        let block_list = rank.block_list;
        let is_started = match block.action {
            Action::Compute => self.compute_in_advance(task, start),
            Action::Collective { group, nth } => self.reach_collective(task, group, nth, start),
            _ => false,
        };
        if let Some(recorder) = self.recorder.as_mut().filter(|_| is_started) {
            recorder.begin(task.rank, block_list, block, start);
        }
        is_started
    }

    pub(super) fn block(&self, task: Task) -> &'a StreamBlock {
        &self.ranks[task.rank as usize].block_list.blocks[task.block as usize]
    }

    /// The duration of a block without contention, at the pace of its rank.
    pub(super) fn duration(&self, task: Task) -> Picoseconds {
        let rank = &self.ranks[task.rank as usize];
        at_pace(rank.times[task.block as usize].duration, rank.pace)
    }

    pub(super) fn parameters(&self, rank: u32) -> &'a Parameters {
        self.lowered.costs.parameters(self.lowered.ranks[rank as usize].kind)
    }

    /// The communicator with this number on a rank. A rank numbers its groups first, then its send
    /// channels, then its receive channels.
    pub(super) fn communicator_of(&self, rank: u32, number: u32) -> u32 {
        self.communicators[(self.ranks[rank as usize].first_communicator + number) as usize]
    }

    /// The index of a rank's processor in [`Interpreter::processors`].
    pub(super) fn processor_index(&self, rank: u32) -> usize {
        self.processors.index(self.ranks[rank as usize].processor)
    }
}

/// A bit mask of the streams that have a dependent of `block`.
fn dependent_streams(block: &StreamBlock) -> u64 {
    if block.slot == NO_SLOT { 0 } else { block.dependent_streams }
}
