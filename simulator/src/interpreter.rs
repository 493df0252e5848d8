//! The interpreter: runs a lowered Program, every rank with its streams, and notes when each instruction begins and ends.
//!
//! An instruction begins when the one before it in its stream has finished and those that it waits for have, the latter a
//! handoff earlier where they stand in another stream; a handoff therefore delays only who has to wait for it. What it does then
//! takes its cost alone; what shares a processor or a link with others is a fluid activity, whose rate max-min fairness decides.
//!
//! Rates are relative: 1 is the pace of being alone. A kernel needs its whole processor for that, an exchange a part of each
//! member's processor and its load on the links. A kernel that has its processor to itself goes past the solver.
//! It must not know schedules, layouts or what kernels are.

use crate::engine::EventQueue;
use crate::error::SimulationError;
use crate::fairness::{ActivityId, FairShare};
use crate::lowering::{Lowered, Step, Work};
use crate::simulation::{Quantile, Scenario};
use foretell_program::{InstructionId, Origin, RankTimeline, Span, Timeline};
use foretell_units::Picoseconds;
use std::collections::BTreeSet;
use std::sync::Arc;

mod exchanges;

/// How much of a processor reading gets beside a kernel, as a share of the kernel's: next to nothing, and not nothing, so that it ends.
const READING: f64 = 0.01;

/// What a run leaves.
#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) timeline: Timeline,
    /// When each exchange began: when all its members had reached it.
    pub(crate) began: Vec<Picoseconds>,
    pub(crate) events: u64,
    /// Exchanges that no sample says anything of.
    pub(crate) uncalibrated: BTreeSet<String>,
}

/// Runs a Program once.
pub(crate) fn interpret(lowered: &Lowered<'_>, scenario: &Scenario) -> Result<Run, SimulationError> {
    let mut interpreter = Interpreter::new(lowered, scenario);
    interpreter.start_all();
    while interpreter.advance() {}
    interpreter.into_run()
}

#[derive(Clone, Copy, Debug)]
enum Event {
    /// An instruction's handoffs are over.
    Start(Task),
    /// A kernel that has its processor to itself is done, unless someone came in between.
    Alone { task: Task, generation: u32 },
    /// Something that shares nothing is done.
    Timer(Task),
    /// The latency of an exchange is over.
    Latency(u32),
    /// A fluid activity is done, unless its rate changed in between.
    Fluid { activity: ActivityId, generation: u32 },
}

/// An instruction of a rank.
#[derive(Clone, Copy, Debug)]
struct Task {
    rank: u32,
    instruction: u32,
}

/// Something whose rate depends on others.
#[derive(Clone, Copy, Debug)]
struct Fluid {
    owner: Owner,
    /// Picoseconds of work that were left at `since`.
    left: f64,
    since: Picoseconds,
    generation: u32,
}

#[derive(Clone, Copy, Debug)]
enum Owner {
    Task(Task),
    Exchange(u32),
    /// What nobody waits for: a link's queue that still holds what has arrived, a stream that interrupts a kernel.
    Nobody,
}

/// The kernel that has a processor to itself.
#[derive(Clone, Copy, Debug)]
struct Alone {
    task: Task,
    end: Picoseconds,
}

#[derive(Clone, Copy, Debug, Default)]
struct Processor {
    alone: Option<Alone>,
    generation: u32,
}

/// How far an exchange is.
#[derive(Clone, Copy, Debug, Default)]
struct ExchangeState {
    /// Members that have reached it.
    arrived: u32,
    sender_is_there: bool,
    receiver_is_there: bool,
    has_begun: bool,
    is_done: bool,
    /// A message that its sender put into the buffer before anyone asked for it.
    is_ahead: bool,
    began: Picoseconds,
}

/// Whose an exchange is, and the how-many-eth.
#[derive(Clone, Copy, Debug)]
enum Parties {
    Group { group: u32, nth: u32 },
    Channel { channel: u32, nth: u32 },
}

/// The messages of a channel that are in the buffer, and the one that waits for room.
#[derive(Clone, Copy, Debug, Default)]
struct Buffered {
    bytes: u64,
    blocked: Option<u32>,
}

struct Interpreter<'a> {
    lowered: &'a Lowered<'a>,
    quantile: Quantile,
    /// How much slower than its costs each rank's device is in this step; empty where none is.
    paces: &'a [f64],
    work: Vec<&'a Work>,
    handoff: Vec<Picoseconds>,
    interruption: Vec<Picoseconds>,
    /// How far each rank's host is behind one that never waits.
    behind: Vec<Picoseconds>,
    queue: EventQueue<Event>,
    /// An instruction's `start` is the earliest that is known so far, until it starts.
    ranks: Vec<RankTimeline>,
    waits_for: Vec<Vec<u32>>,
    /// Instructions that begin now.
    ready: Vec<Task>,
    share: FairShare,
    fluids: Vec<Fluid>,
    processors: Vec<Processor>,
    first_processor: u32,
    parties: Vec<Parties>,
    exchanges: Vec<ExchangeState>,
    buffered: Vec<Buffered>,
    unfinished: usize,
    uncalibrated: BTreeSet<String>,
}

impl<'a> Interpreter<'a> {
    fn new(lowered: &'a Lowered<'a>, scenario: &'a Scenario) -> Self {
        let quantile = scenario.quantile;
        let ranks: Vec<RankTimeline> = lowered
            .ranks
            .iter()
            .map(|rank| {
                let count = lowered.lists[rank.list].steps.len() as u32;
                let launched = &lowered.lists[rank.list].work[rank.work].launched;
                let at_start = |instruction: u32| Span {
                    instruction: InstructionId(instruction),
                    start: launched.get(instruction as usize).copied().unwrap_or(Picoseconds::ZERO),
                    end: Picoseconds::MAX,
                };
                RankTimeline { spans: (0..count).map(at_start).collect(), end: Picoseconds::ZERO }
            })
            .collect();
        let mut parties = Vec::with_capacity(lowered.exchanges as usize);
        for (group, set) in (0..).zip(&lowered.groups) {
            parties.extend((0..set.collectives.len() as u32).map(|nth| Parties::Group { group, nth }));
        }
        for (channel, one) in (0..).zip(&lowered.channels) {
            parties.extend((0..one.bytes.len() as u32).map(|nth| Parties::Channel { channel, nth }));
        }
        let processors = lowered.processors;
        let parameters = || lowered.ranks.iter().map(|rank| lowered.costs.parameters(rank.kind));
        Self {
            lowered,
            quantile,
            paces: &scenario.paces,
            work: (0..lowered.ranks.len()).map(|rank| lowered.work(rank)).collect(),
            handoff: parameters().map(|parameters| parameters.stream_handoff.at(quantile).into()).collect(),
            interruption: parameters().map(|parameters| parameters.interruption.into()).collect(),
            behind: vec![Picoseconds::ZERO; lowered.ranks.len()],
            queue: EventQueue::new(),
            unfinished: ranks.iter().map(|rank| rank.spans.len()).sum(),
            waits_for: lowered.ranks.iter().map(|rank| lowered.lists[rank.list].waits_for.clone()).collect(),
            ranks,
            ready: Vec::new(),
            share: FairShare::new(lowered.capacities.iter().copied()),
            fluids: Vec::new(),
            processors: vec![Processor::default(); processors],
            first_processor: (lowered.capacities.len() - processors) as u32,
            exchanges: vec![ExchangeState::default(); parties.len()],
            parties,
            buffered: vec![Buffered::default(); lowered.channels.len()],
            uncalibrated: BTreeSet::new(),
        }
    }

    /// Starts what waits for nothing.
    fn start_all(&mut self) {
        for (rank, waits_for) in (0..).zip(&self.waits_for) {
            for (instruction, &count) in (0..).zip(waits_for) {
                let start = self.ranks[rank as usize].spans[instruction as usize].start;
                match count {
                    0 if start > Picoseconds::ZERO => self.queue.schedule(start, Event::Start(Task { rank, instruction })),
                    0 => self.ready.push(Task { rank, instruction }),
                    _ => {}
                }
            }
        }
        // The stack gives the last first; the first rank is to be first.
        self.ready.reverse();
        self.start_ready();
    }

    /// Handles the next event; false when there is none.
    fn advance(&mut self) -> bool {
        // Rates are found when all that happens at an instant has happened: one kernel replacing another changes nothing.
        if self.share.is_stale() && self.queue.next_time().is_none_or(|time| time > self.queue.now()) {
            self.update_rates();
        }
        let Some(event) = self.queue.next() else { return false };
        match event {
            Event::Start(task) => self.start(task),
            Event::Timer(task) => self.finish(task),
            Event::Latency(exchange) => self.flow(exchange),
            Event::Alone { task, generation } => {
                let processor = self.processor_of(task.rank);
                let state = &mut self.processors[processor];
                if state.generation == generation {
                    state.alone = None;
                    state.generation += 1;
                    self.finish(task);
                }
            }
            Event::Fluid { activity, generation } => {
                let fluid = &mut self.fluids[activity as usize];
                if fluid.generation == generation {
                    fluid.generation += 1;
                    let owner = fluid.owner;
                    self.share.remove(activity);
                    match owner {
                        Owner::Task(task) => self.finish(task),
                        Owner::Exchange(exchange) => self.finish_exchange(exchange),
                        Owner::Nobody => {}
                    }
                }
            }
        }
        self.start_ready();
        true
    }

    fn into_run(self) -> Result<Run, SimulationError> {
        if self.unfinished > 0 {
            return Err(self.deadlock());
        }
        let mut ranks = self.ranks;
        for (timeline, rank) in ranks.iter_mut().zip(&self.lowered.ranks) {
            let parameters = self.lowered.costs.parameters(rank.kind);
            let micro_batches = f64::from(self.lowered.lists[rank.list].micro_batches);
            let overhead = parameters.step_overhead.at(self.quantile) + parameters.micro_batch_overhead * micro_batches;
            timeline.end += overhead.into();
        }
        // Ranks that were simulated as one have one timeline.
        let ranks: Vec<Arc<RankTimeline>> = ranks.into_iter().map(Arc::new).collect();
        let of_rank = self.lowered.of_rank.iter().map(|&place| Arc::clone(&ranks[place as usize]));
        Ok(Run {
            timeline: Timeline { origin: Origin::Predicted, ranks: of_rank.collect() },
            began: self.exchanges.iter().map(|exchange| exchange.began).collect(),
            events: self.queue.handled(),
            uncalibrated: self.uncalibrated,
        })
    }

    /// A duration at the pace of a rank's device.
    fn paced(&self, rank: usize, duration: Picoseconds) -> Picoseconds {
        match self.paces.get(rank) {
            Some(pace) => Picoseconds((duration.0 as f64 * pace).round() as u64),
            None => duration,
        }
    }

    fn start_ready(&mut self) {
        while let Some(task) = self.ready.pop() {
            self.start(task);
        }
    }

    fn start(&mut self, task: Task) {
        let now = self.queue.now();
        let (rank, instruction) = (task.rank as usize, task.instruction as usize);
        self.ranks[rank].spans[instruction].start = now;
        let simulated = &self.lowered.ranks[rank];
        let stage = &self.lowered.lists[simulated.list];
        match stage.steps[instruction] {
            Step::Compute => self.compute(task, self.paced(rank, self.work[rank].durations[instruction][self.quantile as usize])),
            Step::Load => self.load(task, self.paced(rank, self.work[rank].durations[instruction][self.quantile as usize])),
            Step::Collective { group, nth } => {
                self.interrupt(task.rank, self.interruption[rank]);
                let group = simulated.groups[group as usize];
                let set = &self.lowered.groups[group as usize];
                let exchange = set.first_exchange + nth;
                let state = &mut self.exchanges[exchange as usize];
                state.arrived += 1;
                if state.arrived as usize == set.members.len() {
                    self.begin(exchange);
                }
            }
            Step::Send { peer, nth } => {
                self.interrupt(task.rank, self.interruption[rank]);
                let channel = simulated.sends[peer as usize];
                let exchange = self.lowered.channels[channel as usize].first_exchange + nth;
                self.exchanges[exchange as usize].sender_is_there = true;
                self.try_message(exchange);
            }
            Step::Receive { peer, nth } => {
                let channel = simulated.receives[peer as usize];
                let exchange = self.lowered.channels[channel as usize].first_exchange + nth;
                self.receive(exchange, channel, nth, task);
            }
        }
    }

    /// Notes an instruction's end, and sees who waited for it.
    fn finish(&mut self, task: Task) {
        let now = self.queue.now();
        let (rank, instruction) = (task.rank as usize, task.instruction as usize);
        let timeline = &mut self.ranks[rank];
        timeline.spans[instruction].end = now;
        timeline.end = now;
        self.unfinished -= 1;
        let stage = &self.lowered.lists[self.lowered.ranks[rank].list];
        let Work { launched, host_waits, .. } = self.work[rank];
        if host_waits.get(instruction).is_some_and(|&waits| waits) {
            // The host launches what follows from now on.
            let behind = &mut self.behind[rank];
            *behind = (*behind).max(now.saturating_sub(launched.get(instruction).copied().unwrap_or(now)));
        }
        let behind = self.behind[rank];
        let waits_for = &mut self.waits_for[rank];
        let after_handoff = now + self.handoff[rank];
        let successors = stage.offsets[instruction] as usize..stage.offsets[instruction + 1] as usize;
        for successor in &stage.successors[successors] {
            let index = successor.instruction as usize;
            let start = &mut timeline.spans[index].start;
            *start = (*start).max(if successor.is_elsewhere { after_handoff } else { now });
            if behind > Picoseconds::ZERO {
                *start = (*start).max(launched[index] + behind);
            }
            waits_for[index] -= 1;
            if waits_for[index] == 0 {
                let task = Task { rank: task.rank, instruction: successor.instruction };
                if *start > now {
                    self.queue.schedule(*start, Event::Start(task));
                } else {
                    self.ready.push(task);
                }
            }
        }
    }

    fn compute(&mut self, task: Task, work: Picoseconds) {
        let processor = self.processor_of(task.rank);
        let resource = self.first_processor + processor as u32;
        if self.processors[processor].alone.is_none() && self.share.users(resource) == 0 {
            let end = self.queue.now() + work;
            let state = &mut self.processors[processor];
            state.alone = Some(Alone { task, end });
            self.queue.schedule(end, Event::Alone { task, generation: state.generation });
        } else {
            self.join(resource);
            self.add_fluid(Owner::Task(task), work, [(resource, 1.0)], 1.0);
        }
    }

    /// Reading takes the processor's share that communication takes, and no link. It leaves the processor to kernels, as the executor's
    /// streams do, and goes on when they wait.
    fn load(&mut self, task: Task, work: Picoseconds) {
        let rank = &self.lowered.ranks[task.rank as usize];
        let share = self.lowered.costs.parameters(rank.kind).communication_share;
        if share > 0.0 {
            let resource = rank.processor;
            self.join(resource);
            self.add_fluid(Owner::Task(task), work, [(resource, share)], READING / share);
        } else {
            self.queue.schedule(self.queue.now() + work, Event::Timer(task));
        }
    }

    /// Someone else comes onto a processor: the kernel that had it to itself becomes a fluid activity.
    fn join(&mut self, resource: u32) {
        let state = &mut self.processors[(resource - self.first_processor) as usize];
        if let Some(Alone { task, end }) = state.alone.take() {
            state.generation += 1;
            let left = end.saturating_sub(self.queue.now());
            self.add_fluid(Owner::Task(task), left, [(resource, 1.0)], 1.0);
        }
    }

    /// Whether something runs on a rank's processor.
    fn is_busy(&self, rank: u32) -> bool {
        let processor = self.processor_of(rank);
        self.processors[processor].alone.is_some() || self.share.users(self.first_processor + processor as u32) > 0
    }

    /// Takes some of a rank's processor from what runs there, if anything does. Who is idle loses nothing: that a stream's thread has to
    /// be gone over to is in its handoff.
    fn interrupt(&mut self, rank: u32, work: Picoseconds) {
        if work > Picoseconds::ZERO && self.is_busy(rank) {
            let resource = self.lowered.ranks[rank as usize].processor;
            self.join(resource);
            self.add_fluid(Owner::Nobody, work, [(resource, 1.0)], 1.0);
        }
    }

    fn add_fluid(&mut self, owner: Owner, work: Picoseconds, demands: impl IntoIterator<Item = (u32, f64)>, growth: f64) {
        let now = self.queue.now();
        let activity = self.share.add(demands, 1.0, growth);
        let index = activity as usize;
        let generation = self.fluids.get(index).map_or(0, |fluid| fluid.generation);
        let fluid = Fluid { owner, left: work.0 as f64, since: now, generation };
        if index < self.fluids.len() {
            self.fluids[index] = fluid;
        } else {
            self.fluids.push(fluid);
        }
        if self.share.rate(activity) > 0.0 {
            // It uses nothing that anyone shares, and will not be heard of again.
            self.queue.schedule(now + work, Event::Fluid { activity, generation });
        }
    }

    /// Finds the rates after what changed at this instant, and foretells anew who ends when.
    fn update_rates(&mut self) {
        let Self { share, fluids, queue, .. } = self;
        let now = queue.now();
        share.solve(|activity, before, rate| {
            let fluid = &mut fluids[activity as usize];
            fluid.left = (fluid.left - before * now.saturating_sub(fluid.since).0 as f64).max(0.0);
            fluid.since = now;
            fluid.generation += 1;
            if rate > 0.0 {
                let end = now + Picoseconds((fluid.left / rate).ceil() as u64);
                queue.schedule(end, Event::Fluid { activity, generation: fluid.generation });
            }
        });
    }

    fn processor_of(&self, rank: u32) -> usize {
        (self.lowered.ranks[rank as usize].processor - self.first_processor) as usize
    }

    fn deadlock(&self) -> SimulationError {
        // Enough to see the circle, few enough to read.
        const SHOWN: usize = 8;
        let total: usize = self.ranks.iter().map(|rank| rank.spans.len()).sum();
        let mut waiting = Vec::new();
        for (index, rank) in self.ranks.iter().enumerate() {
            // Those that started and did not end are what the rank hangs in; where there are none, it waits for itself.
            let open = |started: bool| {
                let spans = rank.spans.iter().zip(&self.waits_for[index]);
                spans.filter(move |(span, waits)| span.end == Picoseconds::MAX && (**waits == 0) == started)
            };
            let hanging = open(true).chain(open(false).take(usize::from(open(true).next().is_none())));
            waiting.extend(hanging.map(|(span, _)| self.lowered.describe(index, span.instruction.0)));
        }
        let more = waiting.len().saturating_sub(SHOWN);
        waiting.truncate(SHOWN);
        if more > 0 {
            waiting.push(format!("and {more} more"));
        }
        SimulationError::Deadlock { done: total - self.unfinished, total, waiting }
    }
}
