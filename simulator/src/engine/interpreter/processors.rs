//! Runs blocks on processors, alone or as fluid activities that share processors and links.

use super::event::{Communication, Event, Task};
use super::quota::Quotas;
use super::{Interpreter, at_pace};
use crate::lowering::Lowered;
use crate::network::{ActivityId, FairShare};
use foretell_units::Picoseconds;

/// An activity that shares resources with others, so that its rate may change.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fluid {
    pub(super) owner: FluidOwner,
    /// Work left at `since`, in picoseconds at rate 1.
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
    /// Nothing waits for its end: the backlog of a link, or the interruption of a kernel.
    Nothing,
}

/// The exclusive use of a processor, from now or from a later time.
#[derive(Clone, Copy, Debug)]
pub(super) struct Exclusive {
    pub(super) owner: ExclusiveOwner,
    pub(super) end: Picoseconds,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum ExclusiveOwner {
    Task(Task),
    /// A communication that loads no link. It has exclusive use of the processors of all its
    /// members.
    Communication(Communication),
    /// The blocks through which this rank runs ahead.
    RunAhead(u32),
}

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Processor {
    pub(super) exclusive: Option<Exclusive>,
    /// Changes when an exclusive use ends. An end event of an older generation is ignored.
    pub(super) generation: u32,
    /// Whether its device has a quota. If so, everything on it is a fluid activity.
    pub(super) has_quota: bool,
}

/// The processors of a run. A processor is identified by a resource number; the numbers of links
/// come first.
#[derive(Debug)]
pub(super) struct Processors {
    pub(super) states: Vec<Processor>,
    /// The resource number of the first processor.
    first: u32,
    /// For each communicator, the generation of its exclusive use of its members' processors. An
    /// end event of an older generation is ignored.
    pub(super) exclusive_generations: Vec<u32>,
}

impl Processors {
    /// The processors of a lowered Program. `with_quota` are the resources of those with quotas.
    pub(super) fn new(lowered: &Lowered<'_>, with_quota: impl Iterator<Item = u32>) -> Self {
        let mut states = vec![Processor::default(); lowered.processors];
        let first = lowered.first_processor() as u32;
        with_quota.for_each(|resource| states[(resource - first) as usize].has_quota = true);
        Self { states, first, exclusive_generations: vec![0; lowered.groups.len() + lowered.channels.len()] }
    }

    /// The processor with a resource number.
    pub(super) fn of(&mut self, resource: u32) -> &mut Processor {
        &mut self.states[(resource - self.first) as usize]
    }

    /// The index in `states` of the processor with a resource number.
    pub(super) fn index(&self, resource: u32) -> usize {
        (resource - self.first) as usize
    }
}

/// The activities that share links and processors.
#[derive(Debug)]
pub(super) struct Fluids {
    /// The solver of their rates.
    pub(super) fair_share: FairShare,
    /// The activities, indexed by their number in `fair_share`.
    pub(super) activities: Vec<Fluid>,
    pub(super) quotas: Quotas,
}

/// The processor use of loads and copies beside a kernel, relative to the kernel's use: almost
/// zero, but positive, so that they end.
const SHARE_BESIDE_KERNEL: f64 = 0.01;

impl Interpreter<'_> {
    /// Starts a kernel block.
    pub(super) fn compute(&mut self, task: Task) {
        if self.try_run_ahead(task, self.queue.now()) {
            return;
        }
        let (now, work) = (self.queue.now(), self.duration(task));
        let category = self.block(task).category;
        self.ranks[task.rank as usize].meter.begin(category, now);
        let processor = self.processor_index(task.rank);
        let resource = self.ranks[task.rank as usize].processor;
        self.end_exclusive_use(resource);
        if self.is_idle(resource) {
            let end = now + work;
            let state = &mut self.processors.states[processor];
            state.exclusive = Some(Exclusive { owner: ExclusiveOwner::Task(task), end });
            self.queue.schedule(end, Event::ExclusiveEnds { task, generation: state.generation });
        } else {
            self.add_fluid(FluidOwner::Task(task), work.0 as f64, [(resource, 1.0)], 1.0);
        }
    }

    /// Reserves an idle processor for a kernel block that begins at a later time. Returns `false`
    /// if the processor is in use.
    pub(super) fn compute_in_advance(&mut self, task: Task, start: Picoseconds) -> bool {
        if self.try_run_ahead(task, start) {
            return true;
        }
        let processor = self.processor_index(task.rank);
        let resource = self.ranks[task.rank as usize].processor;
        if !self.is_idle(resource) {
            return false;
        }
        let (end, category) = (start + self.duration(task), self.block(task).category);
        let state = &mut self.processors.states[processor];
        state.exclusive = Some(Exclusive { owner: ExclusiveOwner::Task(task), end });
        self.queue.schedule(end, Event::ExclusiveEnds { task, generation: state.generation });
        self.ranks[task.rank as usize].meter.kernel_begins(category, start);
        true
    }

    /// Starts a load or a copy, which takes a share of the processor and no link. As in the
    /// executor, it yields the processor to kernels, and proceeds when they wait.
    pub(super) fn run_beside_kernels(&mut self, task: Task, share: f64) {
        let (now, work) = (self.queue.now(), self.duration(task));
        let category = self.block(task).category;
        self.ranks[task.rank as usize].meter.begin(category, now);
        if share > 0.0 {
            let resource = self.ranks[task.rank as usize].processor;
            self.end_exclusive_use(resource);
            self.add_fluid(FluidOwner::Task(task), work.0 as f64, [(resource, share)], SHARE_BESIDE_KERNEL / share);
        } else {
            self.queue.schedule(now + work, Event::TimerEnds(task));
        }
    }

    /// Ends the exclusive use of a processor, if there is one, because another activity needs it.
    /// The owner becomes a fluid activity, or is planned again if it has not begun.
    pub(super) fn end_exclusive_use(&mut self, resource: u32) {
        let now = self.queue.now();
        let state = self.processors.of(resource);
        let Some(Exclusive { owner, end }) = state.exclusive else { return };
        let task = match owner {
            ExclusiveOwner::Task(task) => task,
            ExclusiveOwner::Communication(communication) => return self.share_processors(communication, end),
            ExclusiveOwner::RunAhead(rank) => {
                self.catch_up(rank);
                return self.end_exclusive_use(resource);
            }
        };
        state.exclusive = None;
        state.generation += 1;
        let left = end.saturating_sub(now);
        if left > self.duration(task) {
            // The block has not begun yet.
            self.ranks[task.rank as usize].meter.cancel_kernel();
            self.queue.schedule(end.saturating_sub(self.duration(task)), Event::Start(task));
            return;
        }
        self.record_exclusive_progress(task, end, now);
        self.add_fluid(FluidOwner::Task(task), left.0 as f64, [(resource, 1.0)], 1.0);
    }

    /// Whether a processor is neither used nor reserved, and has no quota.
    pub(super) fn is_idle(&self, resource: u32) -> bool {
        let processor = &self.processors.states[self.processors.index(resource)];
        processor.exclusive.is_none() && !processor.has_quota && self.fluids.fair_share.users(resource) == 0
    }

    /// Delays the activities on a rank's processor by the time of an interruption. An idle
    /// processor loses nothing: the wake-up of a stream's thread is part of the handoff.
    pub(super) fn interrupt(&mut self, rank: u32) {
        let work = self.ranks[rank as usize].interruption;
        if work > Picoseconds::ZERO && self.is_busy(rank) {
            let resource = self.ranks[rank as usize].processor;
            self.end_exclusive_use(resource);
            self.add_fluid(FluidOwner::Nothing, work.0 as f64, [(resource, 1.0)], 1.0);
        }
    }

    /// Whether something runs on a rank's processor.
    fn is_busy(&self, rank: u32) -> bool {
        let resource = self.ranks[rank as usize].processor;
        self.processors.states[self.processors.index(resource)].exclusive.is_some() || self.fluids.fair_share.users(resource) > 0
    }

    /// Adds a fluid activity of `work` picoseconds at rate 1. `demands` has resources, each with
    /// its use at rate 1.
    pub(super) fn add_fluid(&mut self, owner: FluidOwner, work: f64, demands: impl IntoIterator<Item = (u32, f64)>, growth: f64) {
        let now = self.queue.now();
        // While a device with a quota runs, it is faster than its long-run pace.
        let bound = if let FluidOwner::Task(task) = owner { self.ranks[task.rank as usize].max_rate } else { 1.0 };
        let activity = self.fluids.fair_share.add(demands, bound, growth);
        let index = activity as usize;
        let generation = self.fluids.activities.get(index).map_or(0, |fluid| fluid.generation);
        let fluid = Fluid { owner, left: work, since: now, generation };
        if index < self.fluids.activities.len() {
            self.fluids.activities[index] = fluid;
        } else {
            self.fluids.activities.push(fluid);
        }
        if self.fluids.fair_share.rate(activity) > 0.0 {
            // The activity uses no shared resource, so its rate is known and never changes.
            self.queue.schedule(now + Picoseconds((work / bound).ceil() as u64), Event::FluidEnds { activity, generation });
        }
    }

    /// Solves for the rates after the changes of this instant, and schedules the new ends.
    pub(super) fn update_rates(&mut self) {
        let now = self.queue.now();
        let mut fair_share = std::mem::take(&mut self.fluids.fair_share);
        fair_share.solve(|activity, before, rate| {
            let fluid = self.fluids.activities[activity as usize];
            self.record_fluid_progress(&fluid, before, now);
            let fluid = &mut self.fluids.activities[activity as usize];
            fluid.left = (fluid.left - before * now.saturating_sub(fluid.since).0 as f64).max(0.0);
            fluid.since = now;
            fluid.generation += 1;
            if rate > 0.0 {
                let end = now + Picoseconds((fluid.left / rate).ceil() as u64);
                self.queue.schedule(end, Event::FluidEnds { activity, generation: fluid.generation });
            }
        });
        self.fluids.fair_share = fair_share;
        self.update_quotas();
    }

    /// Handles the end of a fluid activity.
    pub(super) fn finish_fluid(&mut self, activity: ActivityId, generation: u32) {
        let fluid = self.fluids.activities[activity as usize];
        if fluid.generation != generation {
            return;
        }
        self.fluids.activities[activity as usize].generation += 1;
        self.record_fluid_progress(&fluid, self.fluids.fair_share.rate(activity), self.queue.now());
        self.fluids.fair_share.remove(activity);
        match fluid.owner {
            FluidOwner::Task(task) => self.finish(task),
            FluidOwner::Communication(communication) => self.finish_communication(communication),
            FluidOwner::Hop(hop) => self.hop_arrived(hop),
            FluidOwner::Nothing => {}
        }
    }

    /// Records which kernels of a block have ended by `now`. The block has had its processor to
    /// itself and would end at `end`.
    pub(super) fn record_exclusive_progress(&mut self, task: Task, end: Picoseconds, now: Picoseconds) {
        let work = self.duration(task);
        self.record_progress(task, work.0 as f64 - end.saturating_sub(now).0 as f64, |done| {
            Picoseconds((end.0 + done.round() as u64).saturating_sub(work.0))
        });
    }

    /// As [`Self::record_exclusive_progress`], for a block that is a fluid activity and has had
    /// rate `rate` since `fluid.since`.
    pub(super) fn record_fluid_progress(&mut self, fluid: &Fluid, rate: f64, now: Picoseconds) {
        if let FluidOwner::Task(task) = fluid.owner
            && rate > 0.0
        {
            let before = self.duration(task).0 as f64 - fluid.left;
            let done = before + rate * now.saturating_sub(fluid.since).0 as f64;
            let since = fluid.since;
            self.record_progress(task, done, |done| {
                let time = since + Picoseconds(((done - before).max(0.0) / rate).round() as u64);
                time.min(now)
            });
        }
    }

    /// Records the kernels of a block that end within its first `done` picoseconds of work.
    /// `time_of` maps an amount of work to the time at which it was done.
    fn record_progress(&mut self, task: Task, done: f64, time_of: impl Fn(f64) -> Picoseconds) {
        let Some(recorder) = &mut self.recorder else { return };
        let state = &self.ranks[task.rank as usize];
        let instructions = state.block_list.instructions(&state.block_list.blocks[task.block as usize]);
        if instructions.len() < 2 {
            return;
        }
        let (list, times) = self.lowered.list_and_times(task.rank as usize);
        let quantile = self.scenario.quantile;
        let ends = instructions.iter().scan(Picoseconds::ZERO, |sum, &instruction| {
            *sum += times.duration(list, instruction, quantile);
            Some(at_pace(*sum, state.pace).0 as f64)
        });
        recorder.progress(task.rank, instructions, ends, done, time_of);
    }
}
