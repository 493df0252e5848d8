//! The part of the interpreter that knows how a kernel and a collective beside each other end, on a rank that is by itself: they share nothing but its
//! processor, so their ends follow from when both begin. It works out what the events of the two would.
//!
//! It must not know what comes before and after.

use super::TimedBlock;
use crate::engine::blocks::BlockFork;
use crate::engine::interpreter::Interpreter;
use crate::engine::interpreter::event::{Communication, Event, Task};
use crate::engine::interpreter::processors::{Exclusive, ExclusiveOwner, Fluid, FluidOwner};
use crate::engine::interpreter::state::Progress;
use crate::lowering::Action;
use foretell_units::Picoseconds;

/// A kernel and a collective.
#[derive(Clone, Copy, Debug)]
pub(super) struct OverlappedPair {
    pub(super) kernel: TimedBlock,
    pub(super) exchange: TimedBlock,
    /// Which collective it is, and when its data begin to flow.
    which: Communication,
    flows: Picoseconds,
    shared: Option<SharedPeriod>,
}

/// The time in which both take a part of the processor.
#[derive(Clone, Copy, Debug)]
struct SharedPeriod {
    from: Picoseconds,
    until: Picoseconds,
    /// What each has left at its beginning, and its rate: the kernel's first.
    left: [Picoseconds; 2],
    rates: [f64; 2],
}

impl OverlappedPair {
    /// When both have ended.
    pub(super) fn end(&self) -> Picoseconds {
        self.kernel.end.max(self.exchange.end)
    }
}

impl SharedPeriod {
    fn new(from: Picoseconds, left: [Picoseconds; 2], rates: [f64; 2]) -> Self {
        let ends = [0, 1].map(|one| Self::end_at(from, left[one].0 as f64, rates[one]));
        Self { from, until: ends[0].min(ends[1]), left, rates }
    }

    fn end_at(since: Picoseconds, left: f64, rate: f64) -> Picoseconds {
        since + Picoseconds((left / rate).ceil() as u64)
    }

    /// What one has left at a time.
    fn left(&self, one: usize, now: Picoseconds) -> f64 {
        (self.left[one].0 as f64 - self.rates[one] * now.saturating_sub(self.from).0 as f64).max(0.0)
    }

    /// When one ends, which is by itself from the other's end on.
    fn end(&self, one: usize) -> Picoseconds {
        let end = Self::end_at(self.from, self.left[one].0 as f64, self.rates[one]);
        if end == self.until || self.rates[one] == 1.0 { end } else { Self::end_at(self.until, self.left(one, self.until), 1.0) }
    }
}

impl Interpreter<'_> {
    /// How a fork's two blocks end, if they are a kernel and a collective that meet nobody else.
    pub(super) fn pair(&self, rank: u32, before: &TimedBlock, fork: &BlockFork) -> Option<OverlappedPair> {
        let is_kernel = |&block: &u32| matches!(self.block(Task { rank, block }).action, Action::Compute);
        let [one, other] = fork.branches;
        let [kernel, exchange] = match [one, other].map(|block| is_kernel(&block)) {
            [true, false] => [one, other],
            [false, true] => [other, one],
            _ => return None,
        };
        let [kernel, exchange] = [kernel, exchange].map(|block| {
            let start = self.start_after(rank, block, &[*before]);
            self.duration_alone(Task { rank, block }).map(|duration| TimedBlock { block, start, end: start + duration })
        });
        let (mut kernel, mut exchange) = kernel.zip(exchange)?;
        let which = self.exchange_of(Task { rank, block: exchange.block })?;
        let price = self.price(which);
        let flows = exchange.start + price.latency;
        let from = flows.max(kernel.start);
        let meet = !price.shares_nothing && from < kernel.end.min(exchange.end);
        let shared = price
            .beside_kernel
            .filter(|_| meet)
            .map(|rates| SharedPeriod::new(from, [kernel.end, exchange.end].map(|end| end.saturating_sub(from)), rates));
        if let Some(shared) = shared {
            (kernel.end, exchange.end) = (shared.end(0), shared.end(1));
        }
        Some(OverlappedPair { kernel, exchange, which, flows, shared })
    }

    /// Notes a pair that is over.
    pub(super) fn note_pair(&mut self, rank: u32, pair: &OverlappedPair) {
        self.note_until(rank, pair, Picoseconds::MAX);
    }

    /// Notes what has begun of a pair by a time, and what has ended.
    fn note_until(&mut self, rank: u32, pair: &OverlappedPair, time: Picoseconds) {
        let OverlappedPair { kernel, exchange, .. } = pair;
        let mut changes = [
            (kernel.start, false, kernel),
            (exchange.start, false, exchange),
            (kernel.end, true, kernel),
            (exchange.end, true, exchange),
        ];
        changes.sort_by_key(|&(when, ..)| when);
        for (when, is_end, one) in changes.into_iter().filter(|&(when, ..)| when <= time) {
            let task = Task { rank, block: one.block };
            if !is_end {
                self.note_start(task, when);
                continue;
            }
            if self.recorder.is_some() && one.block == kernel.block {
                self.mark_kernel(task, pair, when);
            }
            let category = self.block(task).category;
            self.ranks[rank as usize].meter.end(category, when);
            self.note_end(task, when);
        }
    }

    /// Notes which kernels of a pair's block have ended by a time.
    fn mark_kernel(&mut self, task: Task, pair: &OverlappedPair, time: Picoseconds) {
        let Some(shared) = pair.shared else { return self.mark_exclusive(task, pair.kernel.end, time) };
        self.mark_exclusive(task, shared.from + shared.left[0], shared.from.min(time));
        let fluid =
            |since: Picoseconds| Fluid { owner: FluidOwner::Task(task), left: shared.left(0, since), since, generation: 0 };
        if time > shared.from {
            self.mark_fluid(&fluid(shared.from), shared.rates[0], shared.until.min(time));
        }
        if time > shared.until {
            self.mark_fluid(&fluid(shared.until), 1.0, time);
        }
    }

    /// Has the blocks of a pair go on as any other.
    pub(super) fn go_on_within(&mut self, rank: u32, pair: &OverlappedPair) {
        let now = self.queue.now();
        self.note_until(rank, pair, now);
        let OverlappedPair { kernel, exchange, which, flows, shared } = pair;
        let task = Task { rank, block: kernel.block };
        let goes_on = |one: &TimedBlock| one.start <= now && one.end > now;
        let resource = self.ranks[rank as usize].processor;
        for one in [kernel, exchange].into_iter().filter(|one| goes_on(one)) {
            let place = self.place_of(Task { rank, block: one.block });
            self.progress[place] = Progress::at(one.block).busy();
        }
        if goes_on(kernel) && self.recorder.is_some() {
            self.mark_kernel(task, pair, now);
        }
        match shared.filter(|shared| shared.from <= now && now < shared.until) {
            Some(shared) => {
                let left = [0, 1].map(|one| shared.left(one, now));
                self.add_fluid(FluidOwner::Task(task), left[0], [(resource, 1.0)], 1.0);
                self.flow_on(*which, left[1]);
            }
            None => {
                let is_to_come = shared.is_some_and(|shared| now < shared.from);
                if goes_on(kernel) {
                    let end = if is_to_come { kernel.start + self.work(task) } else { kernel.end };
                    let processor = self.processor_of(rank);
                    let state = &mut self.processors[processor];
                    state.exclusive = Some(Exclusive { owner: ExclusiveOwner::Task(task), end });
                    self.queue.schedule(end, Event::ExclusiveEnds { task, generation: state.generation });
                }
                if goes_on(exchange) {
                    let price = self.price(*which);
                    if price.shares_nothing {
                        self.queue.schedule(exchange.end, Event::CommunicationEnds(*which));
                    } else if price.beside_kernel.is_some() && goes_on(kernel) {
                        self.queue.schedule(*flows, Event::LatencyEnds(*which));
                    } else {
                        let end = if is_to_come { *flows + price.flow } else { exchange.end };
                        self.hold_processors(*which, end);
                    }
                }
            }
        }
        for one in [kernel, exchange].into_iter().filter(|one| one.start > now) {
            self.begin_again(Task { rank, block: one.block });
        }
    }
}
