//! The interpreter: runs a lowered Program, every rank with its streams, and finds when each instruction begins and ends.
//!
//! An instruction begins when the one before it in its stream has finished and those that it waits for have, the latter a
//! handoff earlier where they stand in another stream; a handoff therefore delays only who has to wait for it. What it does then
//! takes its cost alone; what shares a processor or a link with others is a fluid activity, whose rate max-min fairness decides.
//!
//! Rates are relative: 1 is the pace of being alone. A kernel needs its whole processor for that, an exchange a part of each
//! member's processor and its load on the links. A kernel that has its processor to itself goes past the solver.
//!
//! What a rank remembers is where its streams are and when what others may still wait for ended: its size is that of the code's slots, not of the
//! list. Spans are kept for whoever asks for them. Nothing is allocated while it runs, once its queues are as long as they get.
//! It must not know schedules, layouts or what kernels are.

mod communication;
mod deadline;
mod event;
pub(super) mod fast_path;
mod meter;
mod outcome;
mod processors;
mod quota;
mod recorder;
mod ring_steps;
mod state;
mod streams;

use super::block_work::{BlockWork, block_work};
use super::{EventQueue, Recording, ResolvedCosts, RunOutcome, Runnable, Scenario, scenario::FastPath};
use crate::error::SimulationError;
use crate::lowering::Lowered;
use crate::network::FairShare;
use communication::{Arrivals, Buffered};
use deadline::RemainingTimes;
use event::{Event, Task};
use fast_path::RunAheadState;
use foretell_units::Picoseconds;
use meter::Meter;
use processors::{Fluid, Processor};
use quota::Quotas;
use recorder::Recorder;
use ring_steps::Rings;
use state::{Memory, Progress, RankState};

/// Runs a Program once.
pub(crate) fn interpret(runnable: &Runnable<'_>, scenario: &Scenario) -> Result<RunOutcome, SimulationError> {
    let costs = ResolvedCosts::new(&runnable.lowered, scenario.quantile);
    let work = block_work(&runnable.lowered, &runnable.block_lists, scenario.quantile);
    let mut interpreter = Interpreter::new(runnable, scenario, &costs, &work);
    interpreter.start_all();
    while interpreter.past_deadline.is_none() && interpreter.advance() {}
    match interpreter.past_deadline {
        Some(at_least) => Err(SimulationError::PastDeadline { at_least }),
        None => interpreter.into_outcome(),
    }
}

/// From so many ranks on what is known of them, some 6 KB each, lies beyond the nearest caches.
const FAR_APART: usize = 512;

struct Interpreter<'a> {
    lowered: &'a Lowered<'a>,
    scenario: &'a Scenario,
    costs: &'a ResolvedCosts<'a>,
    queue: EventQueue<Event>,
    ranks: Vec<RankState<'a>>,
    progress: Vec<Progress>,
    ends: Vec<Picoseconds>,
    recorder: Option<Recorder>,
    /// Blocks that begin now.
    ready: Vec<Task>,
    share: FairShare,
    fluids: Vec<Fluid>,
    quotas: Quotas,
    processors: Vec<Processor>,
    first_processor: u32,
    /// Of each group and channel, how often an exchange has ceased to have its members' processors to itself.
    exclusive_generations: Vec<u32>,
    run_ahead: RunAheadState,
    /// By rank, the numbers of its groups and channels: see [`Communication::communicator`].
    communicators: Vec<u32>,
    arrivals: Arrivals,
    /// How far each message is, and the number of the first.
    messages: Vec<u32>,
    first_message: u32,
    buffered: Vec<Buffered>,
    rings: Rings,
    /// Whether no two ranks share a processor, and no two exchanges of a group can go on at once.
    looks_ahead: bool,
    unfinished: usize,
    deadline: Option<RemainingTimes>,
    /// What the step takes at least, once that is later than it is worth simulating.
    past_deadline: Option<Picoseconds>,
}

impl<'a> Interpreter<'a> {
    fn new(
        runnable: &'a Runnable<'a>,
        scenario: &'a Scenario,
        costs: &'a ResolvedCosts<'a>,
        work: &'a [Vec<Vec<BlockWork>>],
    ) -> Self {
        let lowered = &runnable.lowered;
        let (mut streams, mut slots) = (0, 0);
        let mut communicators: Vec<u32> = Vec::new();
        let mut ranks = Vec::with_capacity(lowered.ranks.len());
        for rank in &lowered.ranks {
            let parameters = lowered.costs.parameters(rank.kind);
            let block_list = &runnable.block_lists[rank.list];
            let quota = lowered.quota(rank);
            let handoff = parameters.stream_handoff.at(scenario.quantile) * quota.unwrap_or(1.0);
            ranks.push(RankState {
                block_list,
                work: &work[rank.list][rank.work],
                pace: scenario.paces.get(rank.rank.0).copied().unwrap_or(1.0),
                handoff: handoff.into(),
                fastest: quota.map_or(1.0, |speed| 1.0 / speed),
                interruption: parameters.interruption.into(),
                processor: rank.processor,
                first_stream: streams,
                first_slot: slots,
                first_communicator: communicators.len() as u32,
                end: Picoseconds::ZERO,
                has_launches: !lowered.work[rank.list][rank.work].launched.is_empty(),
                meter: Meter::default(),
                behind: Picoseconds::ZERO,
            });
            let channels = rank.sends.iter().chain(&rank.receives).map(|&channel| channel + lowered.groups.len() as u32);
            communicators.extend(rank.groups.iter().copied().chain(channels));
            streams += block_list.stream_count() as u32;
            slots += block_list.slots;
        }
        let first_processor = lowered.first_processor() as u32;
        let mut share = FairShare::new(lowered.capacities.iter().copied());
        let quotas = Quotas::new(lowered, &scenario.periods, &mut share);
        let mut processors = vec![Processor::default(); lowered.processors];
        quotas.resources().for_each(|resource| processors[(resource - first_processor) as usize].has_quota = true);
        let looks_ahead = !lowered.shares_processors() && !lowered.communication_overlaps();
        let first_message = lowered.channels.first().map_or(lowered.communications, |channel| channel.first_communication);
        let records = scenario.recording == Recording::Spans;
        let mut progress = Vec::with_capacity(streams as usize);
        for rank in &ranks {
            progress.extend(rank.block_list.streams[..rank.block_list.stream_count()].iter().map(|&first| Progress::at(first)));
        }
        Self {
            lowered,
            scenario,
            costs,
            queue: EventQueue::new(),
            progress,
            ends: vec![Picoseconds::ZERO; slots as usize],
            recorder: records.then(|| Recorder::new(lowered)),
            ready: Vec::new(),
            share,
            fluids: Vec::new(),
            quotas,
            processors,
            first_processor,
            exclusive_generations: vec![0; lowered.groups.len() + lowered.channels.len()],
            run_ahead: RunAheadState::new(
                lowered.ranks.len(),
                looks_ahead && lowered.hops.is_empty() && scenario.fast_path == FastPath::On,
            ),
            communicators,
            arrivals: Arrivals::new(lowered),
            messages: vec![0; (lowered.communications - first_message) as usize],
            first_message,
            buffered: vec![Buffered::default(); lowered.channels.len()],
            rings: Rings::new(lowered, |rank| costs.is_roomy(lowered, rank)),
            looks_ahead,
            unfinished: lowered.ranks.iter().map(|rank| lowered.lists[rank.list].actions.len()).sum(),
            deadline: scenario.deadline.as_deref().map(|deadline| RemainingTimes::new(deadline, &runnable.block_lists)),
            past_deadline: None,
            ranks,
        }
    }

    /// Starts what waits for nothing.
    fn start_all(&mut self) {
        let may_run_ahead = self.run_ahead.forbid();
        for rank in 0..self.ranks.len() as u32 {
            for stream in 0..self.ranks[rank as usize].block_list.stream_count() as u16 {
                self.look_at(rank, stream);
            }
        }
        self.run_ahead.allow(may_run_ahead);
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
        let Some(event) = self.next_event() else { return false };
        match event {
            Event::Start(task) => self.start(task),
            Event::TimerEnds(task) => self.finish(task),
            Event::MembersArrived(exchange) => self.all_are_there(exchange),
            Event::LatencyEnds(exchange) => self.flow(exchange),
            Event::CommunicationEnds(exchange) => self.finish_communication(exchange),
            Event::Entered(member) => self.entered(member),
            Event::HopFlows(hop) => self.hop_flows(hop),
            Event::Hopped(hop) => self.hopped(hop),
            Event::ExclusiveEnds { task, generation } => {
                let processor = self.processor_of(task.rank);
                let state = &mut self.processors[processor];
                if state.generation == generation {
                    state.exclusive = None;
                    state.generation += 1;
                    self.mark_exclusive(task, self.queue.now(), self.queue.now());
                    self.finish(task);
                }
            }
            Event::ExclusiveCommunicationEnds { communication, generation } => {
                if self.exclusive_generations[communication.communicator as usize] == generation {
                    self.leave_processors(communication);
                    self.finish_communication(communication);
                }
            }
            Event::RunAheadEnds { rank, generation } => self.finish_run_ahead(rank, generation),
            Event::QuotaIsUsedUp { number, generation } => self.stop_device(number, generation),
            Event::PeriodBegins(number) => self.start_device(number),
            Event::Fluid { activity, generation } => self.finish_fluid(activity, generation),
        }
        self.start_ready();
        true
    }

    /// The next event. Those that come soon are looked up beforehand: of many ranks that are far apart in memory the time to fetch them is most of what
    /// an event takes, and they can be fetched all at once.
    fn next_event(&mut self) -> Option<Event> {
        if self.ranks.len() < FAR_APART {
            return self.queue.next();
        }
        let Self { queue, ranks, progress, ends, communicators, processors, .. } = self;
        let memory = Memory { ranks, progress, ends, communicators, processors };
        let mut fetched = 0;
        let event = queue.next_showing(|event| {
            if let Event::ExclusiveEnds { task, .. } | Event::Start(task) = event {
                fetched ^= memory.fetch(task.rank);
            }
        });
        std::hint::black_box(fetched);
        event
    }

    /// Fetches ranks that are about to go on.
    fn fetch(&self, ranks: impl Iterator<Item = u32>) {
        if self.ranks.len() < FAR_APART {
            return;
        }
        let Self { ranks: states, progress, ends, communicators, processors, .. } = self;
        let memory = Memory { ranks: states, progress, ends, communicators, processors };
        std::hint::black_box(ranks.fold(0, |fetched, rank| fetched ^ memory.fetch(rank)));
    }
}

/// A duration on a device that is so much slower than its costs.
fn at_pace(duration: Picoseconds, pace: f64) -> Picoseconds {
    if pace == 1.0 { duration } else { Picoseconds((duration.0 as f64 * pace).round() as u64) }
}
