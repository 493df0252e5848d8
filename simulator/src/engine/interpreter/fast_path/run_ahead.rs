//! Runs a rank through blocks ahead of the event queue, and lets it catch up when something else
//! needs it. See [`super`] for when that is possible.
//!
//! Nothing here depends on other ranks.

use super::overlapped_pair::OverlappedPair;
use super::{NONE, TimedBlock};
use crate::engine::blocks::{NextBlock, TimeCategory};
use crate::engine::interpreter::Interpreter;
use crate::engine::interpreter::event::{Communication, Event, Task};
use crate::engine::interpreter::processors::{Exclusive, ExclusiveOwner};
use crate::engine::interpreter::state::Progress;
use crate::engine::order::NO_SLOT;
use crate::lowering::Action;
use foretell_units::Picoseconds;

/// The position at which a run ahead was stopped. All blocks before it have ended.
enum Stopped {
    At(TimedBlock),
    Within(OverlappedPair),
}

/// The most blocks to run ahead per event: enough to amortise the event, few enough that stopping
/// early is cheap.
const MAX_BLOCKS: usize = 256;

impl Interpreter<'_> {
    /// Runs a rank ahead from a block that begins at `start`, now or at a time that is certain.
    /// Returns `false`, and changes nothing, if that is not possible or no block is sure to follow.
    pub(in crate::engine::interpreter) fn try_run_ahead(&mut self, task: Task, start: Picoseconds) -> bool {
        let Task { rank, block } = task;
        // Another block that begins at this instant might need the rank.
        if !self.run_ahead.is_allowed || !self.ready.is_empty() {
            return false;
        }
        let state = &self.ranks[rank as usize];
        if state.interruption > Picoseconds::ZERO || !self.is_idle(state.processor) {
            return false;
        }
        let Some(duration) = self.uncontended_duration(task) else { return false };
        let first = TimedBlock { block, start, end: start + duration };
        let Some(mut last) = self.block_after(rank, &first) else { return false };
        let index = self.run_ahead.take_run();
        let mut run = std::mem::take(&mut self.run_ahead.runs[index as usize]);
        run.extend([first, last]);
        while run.len() < MAX_BLOCKS
            && let Some(next) = self.block_after(rank, &last)
        {
            last = next;
            run.push(last);
        }
        self.run_ahead.runs[index as usize] = run;
        self.run_ahead.run_of_rank[rank as usize] = index;
        let processor = self.processor_index(rank);
        let state = &mut self.processors.states[processor];
        state.exclusive = Some(Exclusive { owner: ExclusiveOwner::RunAhead(rank), end: last.end });
        self.queue.schedule(last.end, Event::RunAheadEnds { rank, generation: state.generation });
        true
    }

    /// The block that must follow another, directly or after an overlapped pair, and that involves
    /// no other rank.
    fn block_after(&self, rank: u32, before: &TimedBlock) -> Option<TimedBlock> {
        let state = &self.ranks[rank as usize];
        if state.times[before.block as usize].host_waits {
            return None;
        }
        let (next, start) = match state.block_list.next(before.block) {
            NextBlock::Unknown => return None,
            NextBlock::StreamBlock(next) => (next, self.start_after(rank, next, &[*before])),
            NextBlock::Fork(fork) => {
                let pair = self.pair(rank, before, fork)?;
                (fork.join, self.start_after(rank, fork.join, &[pair.kernel, pair.collective]))
            }
        };
        let duration = self.uncontended_duration(Task { rank, block: next })?;
        Some(TimedBlock { block: next, start, end: start + duration })
    }

    /// The pair that follows a block, if one does.
    fn pair_after(&self, rank: u32, before: &TimedBlock) -> Option<OverlappedPair> {
        match self.ranks[rank as usize].block_list.next(before.block) {
            NextBlock::Fork(fork) => self.pair(rank, before, fork),
            NextBlock::Unknown | NextBlock::StreamBlock(_) => None,
        }
    }

    /// The start of a block whose last predecessors are `before`.
    pub(super) fn start_after(&self, rank: u32, block: u32, before: &[TimedBlock]) -> Picoseconds {
        let state = &self.ranks[rank as usize];
        let stream = |block: u32| state.block_list.blocks[block as usize].stream;
        let launched =
            if state.has_launches { state.times[block as usize].launched + state.host_delay } else { Picoseconds::ZERO };
        let own = stream(block);
        let ends = before
            .iter()
            .map(|dependency| if stream(dependency.block) == own { dependency.end } else { dependency.end + state.handoff });
        ends.fold(launched, Picoseconds::max)
    }

    /// The duration of a block that involves no other rank: a kernel, or a collective of a group
    /// with one simulated member that loads no link. `None` for other blocks.
    pub(super) fn uncontended_duration(&self, task: Task) -> Option<Picoseconds> {
        match self.block(task).action {
            Action::Compute => Some(self.duration(task)),
            Action::Collective { .. } => {
                let collective = self.collective_of(task)?;
                let group = &self.lowered.groups[collective.communicator as usize];
                let cost = self.cost_of(collective);
                (group.members.len() == 1 && cost.loads().is_empty()).then(|| cost.latency + cost.flow)
            }
            Action::Load | Action::Copy | Action::Send { .. } | Action::Receive { .. } => None,
        }
    }

    /// The collective of a block; `None` for other blocks.
    pub(super) fn collective_of(&self, task: Task) -> Option<Communication> {
        match self.block(task).action {
            Action::Collective { group, nth } => {
                Some(Communication { communicator: self.communicator_of(task.rank, group), nth })
            }
            _ => None,
        }
    }

    /// Handles the event of a run ahead: the rank has run all blocks, unless it caught up before.
    pub(in crate::engine::interpreter) fn finish_run_ahead(&mut self, rank: u32, generation: u32) {
        if self.processors.states[self.processor_index(rank)].generation != generation {
            return;
        }
        let Some(Stopped::At(last)) = self.stop_run_ahead(rank, Picoseconds::MAX) else { return };
        let task = Task { rank, block: last.block };
        let category = self.record_start(task, last.start);
        self.record_progress_of_kernel(task, last.end);
        if category == TimeCategory::Communication {
            self.ranks[rank as usize].meter.end(category, last.end);
        }
        self.finish(task);
    }

    /// Brings a rank that runs ahead to its state at this instant, because something else needs it.
    pub(in crate::engine::interpreter) fn catch_up(&mut self, rank: u32) {
        if self.run_ahead.run_of_rank[rank as usize] == NONE {
            return;
        }
        match self.stop_run_ahead(rank, self.queue.now()) {
            Some(Stopped::At(block)) => self.resume(rank, &block),
            Some(Stopped::Within(pair)) => self.resume_pair(rank, &pair),
            None => {}
        }
    }

    /// Turns a block that is under way or yet to start into an ordinary block.
    fn resume(&mut self, rank: u32, timed: &TimedBlock) {
        let TimedBlock { block, start, end } = *timed;
        let task = Task { rank, block };
        if start > self.queue.now() {
            return self.plan_again(task);
        }
        let index = self.progress_index(task);
        self.progress[index] = Progress::at(task.block).busy();
        self.record_start(task, start);
        match self.collective_of(task) {
            Some(collective) if self.cost_of(collective).is_uncontended => {
                self.queue.schedule(end, Event::CommunicationEnds(collective));
            }
            Some(collective) => self.hold_processors(collective, end),
            None => {
                let processor = self.processor_index(task.rank);
                let state = &mut self.processors.states[processor];
                state.exclusive = Some(Exclusive { owner: ExclusiveOwner::Task(task), end });
                self.queue.schedule(end, Event::ExclusiveEnds { task, generation: state.generation });
            }
        }
    }

    /// Plans the start of a block that has not begun.
    pub(super) fn plan_again(&mut self, task: Task) {
        let (index, stream) = (self.progress_index(task), self.block(task).stream);
        self.progress[index] = Progress::at(task.block);
        // Without this, the rank would run ahead again.
        let may_run_ahead = self.run_ahead.forbid();
        self.try_stream(task.rank, stream);
        self.run_ahead.restore(may_run_ahead);
    }

    /// The index of the progress of a block's stream.
    pub(super) fn progress_index(&self, task: Task) -> usize {
        self.ranks[task.rank as usize].first_stream as usize + self.block(task).stream as usize
    }

    /// Ends a rank's run ahead. Records the blocks that have ended by `time`, and returns the block
    /// or pair that is under way then. The last block is never recorded, since its end is an event.
    fn stop_run_ahead(&mut self, rank: u32, time: Picoseconds) -> Option<Stopped> {
        let index = std::mem::replace(&mut self.run_ahead.run_of_rank[rank as usize], NONE) as usize;
        let mut run = std::mem::take(self.run_ahead.runs.get_mut(index)?);
        let processor = self.processor_index(rank);
        let state = &mut self.processors.states[processor];
        state.exclusive = None;
        state.generation += 1;
        let mut stopped = None;
        for block in run.split_last().map_or(&[][..], |(_, before)| before) {
            if block.end > time {
                stopped = Some(Stopped::At(*block));
                break;
            }
            self.record_block(rank, block);
            if let Some(pair) = self.pair_after(rank, block) {
                if pair.end() > time {
                    stopped = Some(Stopped::Within(pair));
                    break;
                }
                self.record_pair(rank, &pair);
            }
        }
        let stopped = stopped.or_else(|| run.last().map(|&last| Stopped::At(last)));
        run.clear();
        self.run_ahead.runs[index] = run;
        self.run_ahead.free.push(index as u32);
        stopped
    }

    /// Records a block that has ended.
    fn record_block(&mut self, rank: u32, timed: &TimedBlock) {
        let task = Task { rank, block: timed.block };
        let block = self.block(task);
        let state = &mut self.ranks[rank as usize];
        state.meter.pass(block.category, timed.start, timed.end);
        if let Some(recorder) = &mut self.recorder {
            recorder.begin(rank, state.block_list, block, timed.start);
            self.record_progress_of_kernel(task, timed.end);
        }
        self.record_end(task, timed.end);
    }

    /// Records a block's end, except in the meter.
    pub(super) fn record_end(&mut self, task: Task, end: Picoseconds) {
        let block = self.block(task);
        let state = &mut self.ranks[task.rank as usize];
        state.end = end;
        self.progress[state.first_stream as usize + block.stream as usize] = Progress::at(task.block + 1);
        if block.slot != NO_SLOT {
            self.ends[(state.first_slot + block.slot) as usize] = end;
        }
        if let Some(recorder) = &mut self.recorder {
            recorder.end(task.rank, state.block_list, block, end);
        }
        self.unfinished -= block.range().len();
        self.run_ahead.blocks_without_event += 1;
        self.check_deadline(task, end);
    }

    /// Records a block's start, and returns its category.
    pub(super) fn record_start(&mut self, task: Task, start: Picoseconds) -> TimeCategory {
        let block = self.block(task);
        let state = &mut self.ranks[task.rank as usize];
        if let Some(recorder) = &mut self.recorder {
            recorder.begin(task.rank, state.block_list, block, start);
        }
        state.meter.begin(block.category, start);
        block.category
    }

    fn record_progress_of_kernel(&mut self, task: Task, end: Picoseconds) {
        if self.recorder.is_some() && matches!(self.block(task).action, Action::Compute) {
            self.record_exclusive_progress(task, end, self.queue.now());
        }
    }
}
