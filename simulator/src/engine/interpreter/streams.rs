//! Starts and ends blocks, stream by stream.

use super::event::{Communication, Event, Task};
use super::state::Progress;
use super::{Interpreter, at_pace};
use crate::cost::Parameters;
use crate::engine::blocks::Block;
use crate::engine::order::NO_SLOT;
use crate::lowering::Action;
use foretell_units::Picoseconds;

impl<'a> Interpreter<'a> {
    pub(super) fn start_ready(&mut self) {
        while let Some(task) = self.ready.pop() {
            self.start(task);
        }
    }

    pub(super) fn block(&self, task: Task) -> &'a Block {
        &self.ranks[task.rank as usize].block_list.blocks[task.block as usize]
    }

    /// What a block takes of a rank's device at its pace.
    pub(super) fn work(&self, task: Task) -> Picoseconds {
        let rank = &self.ranks[task.rank as usize];
        at_pace(rank.work[task.block as usize].duration, rank.pace)
    }

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
                self.beside_kernels(task, share);
            }
            Action::Copy => {
                let share = self.parameters(task.rank).copy_share;
                self.beside_kernels(task, share);
            }
            Action::Collective { group, nth } => {
                self.interrupt(task.rank);
                self.reach(task, group, nth, now);
            }
            Action::Send { peer, nth } => {
                self.interrupt(task.rank);
                let groups = self.ranks[task.rank as usize].block_list.collectives.len() as u32;
                self.send(Communication { communicator: self.communicator(task.rank, groups + peer), nth });
            }
            Action::Receive { peer, nth } => {
                let block_list = self.ranks[task.rank as usize].block_list;
                let first = (block_list.collectives.len() + block_list.sends.len()) as u32;
                self.receive(Communication { communicator: self.communicator(task.rank, first + peer), nth }, task);
            }
        }
    }

    pub(super) fn parameters(&self, rank: u32) -> &'a Parameters {
        self.lowered.costs.parameters(self.lowered.ranks[rank as usize].kind)
    }

    /// The `number`-th group or channel of a rank.
    pub(super) fn communicator(&self, rank: u32, number: u32) -> u32 {
        self.communicators[(self.ranks[rank as usize].first_communicator + number) as usize]
    }

    /// Notes a block's end, and sees who waited for it.
    pub(super) fn finish(&mut self, task: Task) {
        self.catch_up(task.rank);
        let now = self.queue.now();
        let block = self.block(task);
        let rank = &mut self.ranks[task.rank as usize];
        rank.end = now;
        let (block_list, first_stream, first_slot) = (rank.block_list, rank.first_stream as usize, rank.first_slot as usize);
        let work = &rank.work[task.block as usize];
        if work.host_waits {
            // The host launches what follows from now on.
            rank.behind = rank.behind.max(now.saturating_sub(work.launched));
        }
        self.unfinished -= block.places().len();
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
            Following::Nobody => {}
            Following::One(next, start) => self.begin_at(Task { rank: task.rank, block: next }, start),
            Following::Several => {
                // Those of which one begins must not see what would come of another.
                let may_run_ahead = self.run_ahead.forbid();
                for stream in block_list.streams_of(woken(block)).chain([block.stream]) {
                    self.look_at(task.rank, stream);
                }
                self.run_ahead.allow(may_run_ahead);
            }
        }
    }

    /// What may begin when a block has ended.
    fn following(&self, rank: u32, block: &Block, now: Picoseconds) -> Following {
        let block_list = self.ranks[rank as usize].block_list;
        let mut following = Following::Nobody;
        for stream in block_list.streams_of(woken(block)).chain([block.stream]) {
            if let Some((next, start)) = self.next_of(rank, stream, now) {
                match following {
                    Following::Nobody => following = Following::One(next, start),
                    Following::One(other, _) if other == next => {}
                    Following::One(..) | Following::Several => return Following::Several,
                }
            }
        }
        following
    }

    /// Starts a stream's next block if nothing is in its way.
    pub(super) fn look_at(&mut self, rank: u32, stream: u16) {
        if let Some((next, start)) = self.next_of(rank, stream, self.queue.now()) {
            self.begin_at(Task { rank, block: next }, start);
        }
    }

    /// Has a block begin now or later.
    pub(super) fn begin_at(&mut self, task: Task, start: Picoseconds) {
        let stream = self.block(task).stream as usize;
        self.progress[self.ranks[task.rank as usize].first_stream as usize + stream] = Progress::at(task.block).busy();
        if start == self.queue.now() {
            self.ready.push(task);
        } else if !self.start_later(task, start) {
            self.queue.schedule(start, Event::Start(task));
        }
    }

    /// A stream's next block, and when it begins, if nothing is in its way.
    pub(super) fn next_of(&self, rank: u32, stream: u16, now: Picoseconds) -> Option<(u32, Picoseconds)> {
        let state = &self.ranks[rank as usize];
        let first = state.first_stream as usize;
        let progress = self.progress[first + stream as usize];
        let next = progress.block();
        if progress.is_busy() || next == state.block_list.streams[stream as usize + 1] {
            return None;
        }
        let block = &state.block_list.blocks[next as usize];
        let mut start = now;
        for wait in state.block_list.waits(block) {
            if self.progress[first + wait.stream as usize].block() <= wait.block {
                return None;
            }
            start = start.max(self.ends[(state.first_slot + wait.slot) as usize] + state.handoff);
        }
        if state.has_launches {
            start = start.max(state.work[next as usize].launched + state.behind);
        }
        Some((next, start))
    }

    /// Starts a block at a time to come, if what it does then is certain now: a kernel on an idle processor, which whoever comes onto that before
    /// puts off again; a member's arrival at a collective. That saves an event.
    pub(super) fn start_later(&mut self, task: Task, start: Picoseconds) -> bool {
        let block = self.block(task);
        let rank = &self.ranks[task.rank as usize];
        if !self.looks_ahead || rank.interruption > Picoseconds::ZERO {
            return false;
        }
        let block_list = rank.block_list;
        let is_started = match block.action {
            Action::Compute => self.compute_later(task, start),
            Action::Collective { group, nth } => self.reach(task, group, nth, start),
            _ => false,
        };
        if let Some(recorder) = self.recorder.as_mut().filter(|_| is_started) {
            recorder.begin(task.rank, block_list, block, start);
        }
        is_started
    }

    pub(super) fn processor_of(&self, rank: u32) -> usize {
        (self.ranks[rank as usize].processor - self.first_processor) as usize
    }
}

/// What may begin when a block has ended.
enum Following {
    Nobody,
    /// This block, at this time.
    One(u32, Picoseconds),
    Several,
}

/// The streams in which someone waits for a block, bit by bit.
fn woken(block: &Block) -> u64 {
    if block.slot == NO_SLOT { 0 } else { block.wakes }
}
