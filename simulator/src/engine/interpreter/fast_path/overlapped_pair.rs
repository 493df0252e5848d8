//! A kernel and a collective that overlap on a rank and involve no other rank. They share only its
//! processor, so their ends follow from their starts. Computes the same times as their events
//! would.

use super::TimedBlock;
use crate::engine::blocks::BlockFork;
use crate::engine::interpreter::Interpreter;
use crate::engine::interpreter::event::{Communication, Event, Task};
use crate::engine::interpreter::processors::{Exclusive, ExclusiveOwner, Fluid, FluidOwner};
use crate::engine::interpreter::state::Progress;
use crate::lowering::Action;
use foretell_units::Picoseconds;

/// A kernel and a collective that overlap.
#[derive(Clone, Copy, Debug)]
pub(super) struct OverlappedPair {
    pub(super) kernel: TimedBlock,
    pub(super) collective: TimedBlock,
    communication: Communication,
    /// When the collective's data begin to flow.
    flow_start: Picoseconds,
    /// The period in which both use the processor, if there is one.
    shared: Option<SharedPeriod>,
}

/// The time in which a kernel (index 0) and a collective (index 1) share a processor.
#[derive(Clone, Copy, Debug)]
struct SharedPeriod {
    from: Picoseconds,
    until: Picoseconds,
    /// Work left to each at `from`, in picoseconds at rate 1.
    left: [Picoseconds; 2],
    /// Rate of each, relative to running alone.
    rates: [f64; 2],
}

impl OverlappedPair {
    /// When both have ended.
    pub(super) fn end(&self) -> Picoseconds {
        self.kernel.end.max(self.collective.end)
    }
}

impl SharedPeriod {
    fn new(from: Picoseconds, left: [Picoseconds; 2], rates: [f64; 2]) -> Self {
        let ends = [0, 1].map(|index| Self::end_at(from, left[index].0 as f64, rates[index]));
        Self { from, until: ends[0].min(ends[1]), left, rates }
    }

    fn end_at(since: Picoseconds, left: f64, rate: f64) -> Picoseconds {
        since + Picoseconds((left / rate).ceil() as u64)
    }

    /// Work left to one of them at time `now` in the period.
    fn left(&self, one: usize, now: Picoseconds) -> f64 {
        (self.left[one].0 as f64 - self.rates[one] * now.saturating_sub(self.from).0 as f64).max(0.0)
    }

    /// When one of them ends. It runs alone once the other has ended.
    fn end(&self, one: usize) -> Picoseconds {
        let end = Self::end_at(self.from, self.left[one].0 as f64, self.rates[one]);
        if end == self.until || self.rates[one] == 1.0 { end } else { Self::end_at(self.until, self.left(one, self.until), 1.0) }
    }
}

impl Interpreter<'_> {
    /// The pair of a fork's two branches, if one is a kernel and the other a collective, and
    /// neither involves another rank.
    pub(super) fn pair(&self, rank: u32, before: &TimedBlock, fork: &BlockFork) -> Option<OverlappedPair> {
        let is_kernel = |&block: &u32| matches!(self.block(Task { rank, block }).action, Action::Compute);
        let [one, other] = fork.branches;
        let [kernel, collective] = match [one, other].map(|block| is_kernel(&block)) {
            [true, false] => [one, other],
            [false, true] => [other, one],
            _ => return None,
        };
        let [kernel, collective] = [kernel, collective].map(|block| {
            let start = self.start_after(rank, block, &[*before]);
            self.uncontended_duration(Task { rank, block }).map(|duration| TimedBlock { block, start, end: start + duration })
        });
        let (mut kernel, mut collective) = kernel.zip(collective)?;
        let communication = self.collective_of(Task { rank, block: collective.block })?;
        let cost = self.cost_of(communication);
        let flow_start = collective.start + cost.latency;
        let from = flow_start.max(kernel.start);
        let meet = !cost.is_uncontended && from < kernel.end.min(collective.end);
        let shared = cost
            .rates_beside_kernel
            .filter(|_| meet)
            .map(|rates| SharedPeriod::new(from, [kernel.end, collective.end].map(|end| end.saturating_sub(from)), rates));
        if let Some(shared) = shared {
            (kernel.end, collective.end) = (shared.end(0), shared.end(1));
        }
        Some(OverlappedPair { kernel, collective, communication, flow_start, shared })
    }

    /// Records a pair that has ended.
    pub(super) fn record_pair(&mut self, rank: u32, pair: &OverlappedPair) {
        self.record_pair_until(rank, pair, Picoseconds::MAX);
    }

    /// Records the starts and ends of a pair up to a time.
    fn record_pair_until(&mut self, rank: u32, pair: &OverlappedPair, time: Picoseconds) {
        let OverlappedPair { kernel, collective, .. } = pair;
        let mut changes = [
            (kernel.start, false, kernel),
            (collective.start, false, collective),
            (kernel.end, true, kernel),
            (collective.end, true, collective),
        ];
        changes.sort_by_key(|&(when, ..)| when);
        for (when, is_end, one) in changes.into_iter().filter(|&(when, ..)| when <= time) {
            let task = Task { rank, block: one.block };
            if !is_end {
                self.record_start(task, when);
                continue;
            }
            if self.recorder.is_some() && one.block == kernel.block {
                self.record_kernel_of_pair(task, pair, when);
            }
            let category = self.block(task).category;
            self.ranks[rank as usize].meter.end(category, when);
            self.record_end(task, when);
        }
    }

    /// Records the instructions of a pair's kernel block that have ended by a time.
    fn record_kernel_of_pair(&mut self, task: Task, pair: &OverlappedPair, time: Picoseconds) {
        let Some(shared) = pair.shared else { return self.record_exclusive_progress(task, pair.kernel.end, time) };
        self.record_exclusive_progress(task, shared.from + shared.left[0], shared.from.min(time));
        let fluid =
            |since: Picoseconds| Fluid { owner: FluidOwner::Task(task), left: shared.left(0, since), since, generation: 0 };
        if time > shared.from {
            self.record_fluid_progress(&fluid(shared.from), shared.rates[0], shared.until.min(time));
        }
        if time > shared.until {
            self.record_fluid_progress(&fluid(shared.until), 1.0, time);
        }
    }

    /// Turns the blocks of a pair into ordinary blocks, at an instant within the pair.
    pub(super) fn resume_pair(&mut self, rank: u32, pair: &OverlappedPair) {
        let now = self.queue.now();
        self.record_pair_until(rank, pair, now);
        let OverlappedPair { kernel, collective, communication, flow_start, shared } = pair;
        let task = Task { rank, block: kernel.block };
        let is_under_way = |block: &TimedBlock| block.start <= now && block.end > now;
        let resource = self.ranks[rank as usize].processor;
        for one in [kernel, collective].into_iter().filter(|exchange| is_under_way(exchange)) {
            let index = self.progress_index(Task { rank, block: one.block });
            self.progress[index] = Progress::at(one.block).busy();
        }
        if is_under_way(kernel) && self.recorder.is_some() {
            self.record_kernel_of_pair(task, pair, now);
        }
        match shared.filter(|shared| shared.from <= now && now < shared.until) {
            Some(shared) => {
                let left = [0, 1].map(|index| shared.left(index, now));
                self.add_fluid(FluidOwner::Task(task), left[0], [(resource, 1.0)], 1.0);
                self.add_flow(*communication, left[1]);
            }
            None => {
                let is_to_come = shared.is_some_and(|shared| now < shared.from);
                if is_under_way(kernel) {
                    let end = if is_to_come { kernel.start + self.duration(task) } else { kernel.end };
                    let processor = self.processor_index(rank);
                    let state = &mut self.processors.states[processor];
                    state.exclusive = Some(Exclusive { owner: ExclusiveOwner::Task(task), end });
                    self.queue.schedule(end, Event::ExclusiveEnds { task, generation: state.generation });
                }
                if is_under_way(collective) {
                    let cost = self.cost_of(*communication);
                    if cost.is_uncontended {
                        self.queue.schedule(collective.end, Event::CommunicationEnds(*communication));
                    } else if cost.rates_beside_kernel.is_some() && is_under_way(kernel) {
                        self.queue.schedule(*flow_start, Event::LatencyEnds(*communication));
                    } else {
                        let end = if is_to_come { *flow_start + cost.flow } else { collective.end };
                        self.hold_processors(*communication, end);
                    }
                }
            }
        }
        for one in [kernel, collective].into_iter().filter(|start| start.start > now) {
            self.plan_again(Task { rank, block: one.block });
        }
    }
}
