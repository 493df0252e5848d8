//! The part of the interpreter that deals with processors, and with what shares them or links.

use super::event::{Communication, Event, Task};
use super::{Interpreter, at_pace};
use crate::network::ActivityId;
use foretell_units::Picoseconds;

/// Something whose rate depends on others.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fluid {
    pub(super) owner: FluidOwner,
    /// Picoseconds of work that were left at `since`.
    pub(super) left: f64,
    pub(super) since: Picoseconds,
    pub(super) generation: u32,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum FluidOwner {
    Task(Task),
    Communication(Communication),
    /// The message of a hop.
    Hop(u32),
    /// What nobody waits for: a link's queue that still holds what has arrived, a stream that interrupts a kernel.
    Nothing,
}

/// What has a processor to itself, perhaps only from some time to come.
#[derive(Clone, Copy, Debug)]
pub(super) struct Exclusive {
    pub(super) owner: ExclusiveOwner,
    pub(super) end: Picoseconds,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum ExclusiveOwner {
    Task(Task),
    /// An exchange that loads no link, and has all of its members' processors so.
    Communication(Communication),
    /// The blocks through which this rank was taken ahead.
    RunAhead(u32),
}

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Processor {
    pub(super) exclusive: Option<Exclusive>,
    pub(super) generation: u32,
    /// Whether its device has a share of its time. What runs there is always a fluid activity.
    pub(super) has_quota: bool,
}

/// How much of a processor reading gets beside a kernel, as a share of the kernel's: next to nothing, and not nothing, so that it ends.
const READING: f64 = 0.01;

impl Interpreter<'_> {
    pub(super) fn compute(&mut self, task: Task) {
        if self.try_run_ahead(task, self.queue.now()) {
            return;
        }
        let (now, work) = (self.queue.now(), self.work(task));
        let category = self.block(task).category;
        self.ranks[task.rank as usize].meter.begin(category, now);
        let processor = self.processor_of(task.rank);
        let resource = self.ranks[task.rank as usize].processor;
        self.join(resource);
        if self.is_idle(resource) {
            let end = now + work;
            let state = &mut self.processors[processor];
            state.exclusive = Some(Exclusive { owner: ExclusiveOwner::Task(task), end });
            self.queue.schedule(end, Event::ExclusiveEnds { task, generation: state.generation });
        } else {
            self.add_fluid(FluidOwner::Task(task), work.0 as f64, [(resource, 1.0)], 1.0);
        }
    }

    /// Lets a block that has its processor to itself from now on begin at a time to come.
    pub(super) fn compute_later(&mut self, task: Task, start: Picoseconds) -> bool {
        if self.try_run_ahead(task, start) {
            return true;
        }
        let processor = self.processor_of(task.rank);
        let resource = self.ranks[task.rank as usize].processor;
        if !self.is_idle(resource) {
            return false;
        }
        let (end, category) = (start + self.work(task), self.block(task).category);
        let state = &mut self.processors[processor];
        state.exclusive = Some(Exclusive { owner: ExclusiveOwner::Task(task), end });
        self.queue.schedule(end, Event::ExclusiveEnds { task, generation: state.generation });
        self.ranks[task.rank as usize].meter.kernel_begins(category, start);
        true
    }

    /// Reading and copying take a share of the processor, and no link. They leave the processor to kernels, as the executor's streams do, and go
    /// on when these wait.
    pub(super) fn beside_kernels(&mut self, task: Task, share: f64) {
        let (now, work) = (self.queue.now(), self.work(task));
        let category = self.block(task).category;
        self.ranks[task.rank as usize].meter.begin(category, now);
        if share > 0.0 {
            let resource = self.ranks[task.rank as usize].processor;
            self.join(resource);
            self.add_fluid(FluidOwner::Task(task), work.0 as f64, [(resource, share)], READING / share);
        } else {
            self.queue.schedule(now + work, Event::TimerEnds(task));
        }
    }

    /// Someone else comes onto a processor: what had it to itself becomes a fluid activity, or has to come again if it has not begun.
    pub(super) fn join(&mut self, resource: u32) {
        let now = self.queue.now();
        let state = &mut self.processors[(resource - self.first_processor) as usize];
        let Some(Exclusive { owner, end }) = state.exclusive else { return };
        let task = match owner {
            ExclusiveOwner::Task(task) => task,
            ExclusiveOwner::Communication(exchange) => return self.give_up_processors(exchange, end),
            ExclusiveOwner::RunAhead(rank) => {
                self.catch_up(rank);
                return self.join(resource);
            }
        };
        state.exclusive = None;
        state.generation += 1;
        let left = end.saturating_sub(now);
        if left > self.work(task) {
            // It has not begun yet.
            self.ranks[task.rank as usize].meter.cancel_kernel();
            self.queue.schedule(end.saturating_sub(self.work(task)), Event::Start(task));
            return;
        }
        self.mark_exclusive(task, end, now);
        self.add_fluid(FluidOwner::Task(task), left.0 as f64, [(resource, 1.0)], 1.0);
    }

    /// Whether nothing runs on a processor, nor will for all that is known, and what comes runs there until it is done.
    pub(super) fn is_idle(&self, resource: u32) -> bool {
        let processor = &self.processors[(resource - self.first_processor) as usize];
        processor.exclusive.is_none() && !processor.has_quota && self.share.users(resource) == 0
    }

    /// Takes some of a rank's processor from what runs there, if anything does. Who is idle loses nothing: that a stream's thread has to
    /// be gone over to is in its handoff.
    pub(super) fn interrupt(&mut self, rank: u32) {
        let work = self.ranks[rank as usize].interruption;
        if work > Picoseconds::ZERO && self.is_busy(rank) {
            let resource = self.ranks[rank as usize].processor;
            self.join(resource);
            self.add_fluid(FluidOwner::Nothing, work.0 as f64, [(resource, 1.0)], 1.0);
        }
    }

    /// Whether something runs on a rank's processor.
    fn is_busy(&self, rank: u32) -> bool {
        let resource = self.ranks[rank as usize].processor;
        self.processors[(resource - self.first_processor) as usize].exclusive.is_some() || self.share.users(resource) > 0
    }

    /// Begins what takes so many picoseconds when nothing hinders it.
    pub(super) fn add_fluid(&mut self, owner: FluidOwner, work: f64, demands: impl IntoIterator<Item = (u32, f64)>, growth: f64) {
        let now = self.queue.now();
        // What a device does goes as fast as that does while it runs.
        let bound = if let FluidOwner::Task(task) = owner { self.ranks[task.rank as usize].fastest } else { 1.0 };
        let activity = self.share.add(demands, bound, growth);
        let index = activity as usize;
        let generation = self.fluids.get(index).map_or(0, |fluid| fluid.generation);
        let fluid = Fluid { owner, left: work, since: now, generation };
        if index < self.fluids.len() {
            self.fluids[index] = fluid;
        } else {
            self.fluids.push(fluid);
        }
        if self.share.rate(activity) > 0.0 {
            // It uses nothing that anyone shares, and will not be heard of again.
            self.queue.schedule(now + Picoseconds((work / bound).ceil() as u64), Event::Fluid { activity, generation });
        }
    }

    /// Finds the rates after what changed at this instant, and foretells anew who ends when.
    pub(super) fn update_rates(&mut self) {
        let now = self.queue.now();
        let mut share = std::mem::take(&mut self.share);
        share.solve(|activity, before, rate| {
            let fluid = self.fluids[activity as usize];
            self.mark_fluid(&fluid, before, now);
            let fluid = &mut self.fluids[activity as usize];
            fluid.left = (fluid.left - before * now.saturating_sub(fluid.since).0 as f64).max(0.0);
            fluid.since = now;
            fluid.generation += 1;
            if rate > 0.0 {
                let end = now + Picoseconds((fluid.left / rate).ceil() as u64);
                self.queue.schedule(end, Event::Fluid { activity, generation: fluid.generation });
            }
        });
        self.share = share;
        self.update_quotas();
    }

    pub(super) fn finish_fluid(&mut self, activity: ActivityId, generation: u32) {
        let fluid = self.fluids[activity as usize];
        if fluid.generation != generation {
            return;
        }
        self.fluids[activity as usize].generation += 1;
        self.mark_fluid(&fluid, self.share.rate(activity), self.queue.now());
        self.share.remove(activity);
        match fluid.owner {
            FluidOwner::Task(task) => self.finish(task),
            FluidOwner::Communication(exchange) => self.finish_communication(exchange),
            FluidOwner::Hop(hop) => self.hopped(hop),
            FluidOwner::Nothing => {}
        }
    }

    /// Notes which kernels of a block have ended by a time, that had the processor to itself and would end then.
    pub(super) fn mark_exclusive(&mut self, task: Task, end: Picoseconds, now: Picoseconds) {
        let work = self.work(task);
        self.mark(task, work.0 as f64 - end.saturating_sub(now).0 as f64, |done| {
            Picoseconds((end.0 + done.round() as u64).saturating_sub(work.0))
        });
    }

    /// The same of one that went on at a rate since its rate was last found.
    pub(super) fn mark_fluid(&mut self, fluid: &Fluid, rate: f64, now: Picoseconds) {
        if let FluidOwner::Task(task) = fluid.owner
            && rate > 0.0
        {
            let before = self.work(task).0 as f64 - fluid.left;
            let done = before + rate * now.saturating_sub(fluid.since).0 as f64;
            let since = fluid.since;
            self.mark(task, done, |done| {
                let time = since + Picoseconds(((done - before).max(0.0) / rate).round() as u64);
                time.min(now)
            });
        }
    }

    fn mark(&mut self, task: Task, done: f64, time_of: impl Fn(f64) -> Picoseconds) {
        let Some(recorder) = &mut self.recorder else { return };
        let state = &self.ranks[task.rank as usize];
        let instructions = state.block_list.instructions(&state.block_list.blocks[task.block as usize]);
        if instructions.len() < 2 {
            return;
        }
        let (list, work) = self.lowered.work(task.rank as usize);
        let quantile = self.scenario.quantile;
        let ends = instructions.iter().scan(Picoseconds::ZERO, |sum, &one| {
            *sum += work.duration(list, one, quantile);
            Some(at_pace(*sum, state.pace).0 as f64)
        });
        recorder.progress(task.rank, instructions, ends, done, time_of);
    }
}
