//! The part of the interpreter that takes a rank ahead of the event queue: while all that a rank does follows from itself, block after block with one at a
//! time, when each begins and ends is a sum. So it is worked out at once, and one event stands for all of them.
//!
//! Such a block is a kernel on an idle processor, or a collective that only this rank has to reach (those that are folded onto it do as it does) and that
//! loads no link; or a pair of the two beside each other ([`super::pair`]). Which comes next is known from the list ([`crate::certain`]). Nothing of the
//! rank changes before its event. Whoever meets it sooner has it caught up first: what is over by then is noted, and what goes on goes on as
//! any other.
//! It must not know what others do.

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

/// Where a rank is that was taken ahead.
enum Stopped {
    At(TimedBlock),
    Within(OverlappedPair),
}

/// Through how many blocks at once: enough that the event which they take is nothing, few enough that little is lost when someone comes.
const MOST: usize = 256;

impl Interpreter<'_> {
    /// Takes a rank ahead that begins a block now or at a time that is certain, if another follows of itself. Else nothing is done.
    pub(in crate::engine::interpreter) fn try_run_ahead(&mut self, task: Task, start: Picoseconds) -> bool {
        let Task { rank, block } = task;
        // Who else begins now would have it caught up at once.
        if !self.run_ahead.is_allowed || !self.ready.is_empty() {
            return false;
        }
        let state = &self.ranks[rank as usize];
        if state.interruption > Picoseconds::ZERO || !self.is_idle(state.processor) {
            return false;
        }
        let Some(duration) = self.duration_alone(task) else { return false };
        let first = TimedBlock { block, start, end: start + duration };
        let Some(mut last) = self.after(rank, &first) else { return false };
        let place = self.run_ahead.take_way();
        let mut way = std::mem::take(&mut self.run_ahead.ways[place as usize]);
        way.extend([first, last]);
        while way.len() < MOST
            && let Some(next) = self.after(rank, &last)
        {
            last = next;
            way.push(last);
        }
        self.run_ahead.ways[place as usize] = way;
        self.run_ahead.of_rank[rank as usize] = place;
        let processor = self.processor_of(rank);
        let state = &mut self.processors[processor];
        state.exclusive = Some(Exclusive { owner: ExclusiveOwner::RunAhead(rank), end: last.end });
        self.queue.schedule(last.end, Event::RunAheadEnds { rank, generation: state.generation });
        true
    }

    /// What a rank that is by itself does after a block, if that follows from it: at once, or after a pair.
    fn after(&self, rank: u32, passed: &TimedBlock) -> Option<TimedBlock> {
        let state = &self.ranks[rank as usize];
        if state.work[passed.block as usize].host_waits {
            return None;
        }
        let (next, start) = match state.block_list.next(passed.block) {
            NextBlock::Unknown => return None,
            NextBlock::Block(next) => (next, self.start_after(rank, next, &[*passed])),
            NextBlock::Fork(fork) => {
                let pair = self.pair(rank, passed, fork)?;
                (fork.join, self.start_after(rank, fork.join, &[pair.kernel, pair.exchange]))
            }
        };
        let duration = self.duration_alone(Task { rank, block: next })?;
        Some(TimedBlock { block: next, start, end: start + duration })
    }

    /// The pair between a block and the one after it, if there is one.
    fn pair_after(&self, rank: u32, passed: &TimedBlock) -> Option<OverlappedPair> {
        match self.ranks[rank as usize].block_list.next(passed.block) {
            NextBlock::Fork(fork) => self.pair(rank, passed, fork),
            NextBlock::Unknown | NextBlock::Block(_) => None,
        }
    }

    /// When a block begins that waits for the last of some.
    pub(super) fn start_after(&self, rank: u32, next: u32, before: &[TimedBlock]) -> Picoseconds {
        let state = &self.ranks[rank as usize];
        let stream = |block: u32| state.block_list.blocks[block as usize].stream;
        let launched = if state.has_launches { state.work[next as usize].launched + state.behind } else { Picoseconds::ZERO };
        let own = stream(next);
        let ends = before.iter().map(|one| if stream(one.block) == own { one.end } else { one.end + state.handoff });
        ends.fold(launched, Picoseconds::max)
    }

    /// How long a block takes that meets nobody, where it is one that can.
    pub(super) fn duration_alone(&self, task: Task) -> Option<Picoseconds> {
        match self.block(task).action {
            Action::Compute => Some(self.work(task)),
            Action::Collective { .. } => {
                let exchange = self.exchange_of(task)?;
                let group = &self.lowered.groups[exchange.communicator as usize];
                let price = self.price(exchange);
                (group.members.len() == 1 && price.loads().is_empty()).then(|| price.latency + price.flow)
            }
            Action::Load | Action::Copy | Action::Send { .. } | Action::Receive { .. } => None,
        }
    }

    /// Which collective a block is.
    pub(super) fn exchange_of(&self, task: Task) -> Option<Communication> {
        match self.block(task).action {
            Action::Collective { group, nth } => Some(Communication { communicator: self.communicator(task.rank, group), nth }),
            _ => None,
        }
    }

    /// A rank is through all blocks through which it was taken ahead, unless someone came in between.
    pub(in crate::engine::interpreter) fn finish_run_ahead(&mut self, rank: u32, generation: u32) {
        if self.processors[self.processor_of(rank)].generation != generation {
            return;
        }
        let Some(Stopped::At(last)) = self.stop_run_ahead(rank, Picoseconds::MAX) else { return };
        let task = Task { rank, block: last.block };
        let category = self.note_start(task, last.start);
        self.mark_alone_if_kernel(task, last.end);
        if category == TimeCategory::Communication {
            self.ranks[rank as usize].meter.end(category, last.end);
        }
        self.finish(task);
    }

    /// Has a rank be where it is now, if it was taken ahead, for someone who meets it.
    pub(in crate::engine::interpreter) fn catch_up(&mut self, rank: u32) {
        if self.run_ahead.of_rank[rank as usize] == NONE {
            return;
        }
        match self.stop_run_ahead(rank, self.queue.now()) {
            Some(Stopped::At(passed)) => self.go_on(rank, &passed),
            Some(Stopped::Within(pair)) => self.go_on_within(rank, &pair),
            None => {}
        }
    }

    /// Has a block that is next go on as any other.
    fn go_on(&mut self, rank: u32, passed: &TimedBlock) {
        let TimedBlock { block, start, end } = *passed;
        let task = Task { rank, block };
        if start > self.queue.now() {
            return self.begin_again(task);
        }
        let place = self.place_of(task);
        self.progress[place] = Progress::at(task.block).busy();
        self.note_start(task, start);
        match self.exchange_of(task) {
            Some(exchange) if self.price(exchange).shares_nothing => self.queue.schedule(end, Event::CommunicationEnds(exchange)),
            Some(exchange) => self.hold_processors(exchange, end),
            None => {
                let processor = self.processor_of(task.rank);
                let state = &mut self.processors[processor];
                state.exclusive = Some(Exclusive { owner: ExclusiveOwner::Task(task), end });
                self.queue.schedule(end, Event::ExclusiveEnds { task, generation: state.generation });
            }
        }
    }

    /// Has a block begin, in its time, that has not yet.
    pub(super) fn begin_again(&mut self, task: Task) {
        let (place, stream) = (self.place_of(task), self.block(task).stream);
        self.progress[place] = Progress::at(task.block);
        // It would go ahead again.
        let may_run_ahead = self.run_ahead.forbid();
        self.look_at(task.rank, stream);
        self.run_ahead.allow(may_run_ahead);
    }

    /// Where the progress of a block's stream is.
    pub(super) fn place_of(&self, task: Task) -> usize {
        self.ranks[task.rank as usize].first_stream as usize + self.block(task).stream as usize
    }

    /// Has a rank go ahead no more: notes what is over by a time, but for the last block, whose end is an event, and returns what goes on then.
    fn stop_run_ahead(&mut self, rank: u32, time: Picoseconds) -> Option<Stopped> {
        let place = std::mem::replace(&mut self.run_ahead.of_rank[rank as usize], NONE) as usize;
        let mut way = std::mem::take(self.run_ahead.ways.get_mut(place)?);
        let processor = self.processor_of(rank);
        let state = &mut self.processors[processor];
        state.exclusive = None;
        state.generation += 1;
        let mut stopped = None;
        for passed in way.split_last().map_or(&[][..], |(_, before)| before) {
            if passed.end > time {
                stopped = Some(Stopped::At(*passed));
                break;
            }
            self.note(rank, passed);
            if let Some(pair) = self.pair_after(rank, passed) {
                if pair.end() > time {
                    stopped = Some(Stopped::Within(pair));
                    break;
                }
                self.note_pair(rank, &pair);
            }
        }
        let stopped = stopped.or_else(|| way.last().map(|&last| Stopped::At(last)));
        way.clear();
        self.run_ahead.ways[place] = way;
        self.run_ahead.free.push(place as u32);
        stopped
    }

    /// Notes all of a block that is over.
    fn note(&mut self, rank: u32, passed: &TimedBlock) {
        let task = Task { rank, block: passed.block };
        let block = self.block(task);
        let state = &mut self.ranks[rank as usize];
        state.meter.pass(block.category, passed.start, passed.end);
        if let Some(recorder) = &mut self.recorder {
            recorder.begin(rank, state.block_list, block, passed.start);
            self.mark_alone_if_kernel(task, passed.end);
        }
        self.note_end(task, passed.end);
    }

    /// Notes a block's end.
    pub(super) fn note_end(&mut self, task: Task, end: Picoseconds) {
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
        self.unfinished -= block.places().len();
        self.run_ahead.passed += 1;
        self.check_deadline(task, end);
    }

    /// Notes a block's start, and returns what it counts as.
    pub(super) fn note_start(&mut self, task: Task, start: Picoseconds) -> TimeCategory {
        let block = self.block(task);
        let state = &mut self.ranks[task.rank as usize];
        if let Some(recorder) = &mut self.recorder {
            recorder.begin(task.rank, state.block_list, block, start);
        }
        state.meter.begin(block.category, start);
        block.category
    }

    fn mark_alone_if_kernel(&mut self, task: Task, end: Picoseconds) {
        if self.recorder.is_some() && matches!(self.block(task).action, Action::Compute) {
            self.mark_exclusive(task, end, self.queue.now());
        }
    }
}
