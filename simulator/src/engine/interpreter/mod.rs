//! The interpreter: runs the blocks of every simulated rank and finds when each begins and ends.
//!
//! A block begins when the previous one of its stream has ended, and every block of another stream
//! that it depends on has ended at least a handoff earlier. So a handoff delays only blocks that
//! wait for it. A block takes its uncontended duration unless it shares a processor or a link. If
//! it shares one, it is a fluid activity, whose rate follows from max-min fairness.
//!
//! Rates are relative: at rate 1 an activity takes its uncontended duration. A kernel needs its
//! whole processor for that. A communication needs a share of each member's processor, and its load
//! on the links. A kernel that has its processor to itself bypasses the solver.
//!
//! The state of a rank is the progress of each of its streams, and the end times that blocks may
//! still need. Its size depends on the slots of the block list, not on the number of instructions.
//! Spans are kept only if requested. Nothing is allocated during a run once its queues have reached
//! their largest size.
//!
//! The interpreter knows no schedules, layouts or kernels.

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

use super::block_times::{BlockTimes, block_times};
use super::scenario::FastPath;
use super::{EventQueue, Recording, ResolvedCosts, RunOutcome, Runnable, Scenario};
use crate::error::SimulationError;
use crate::lowering::Lowered;
use crate::network::FairShare;
use communication::{Arrivals, Buffer, Messages};
use deadline::{Cutoff, RemainingTimes};
use event::{Event, Task};
use fast_path::RunAheadState;
use foretell_units::Picoseconds;
use meter::Meter;
use processors::{Fluids, Processors};
use quota::Quotas;
use recorder::Recorder;
use ring_steps::Rings;
use state::{Memory, Progress, RankState};

/// Runs a Program once.
pub(crate) fn interpret(runnable: &Runnable<'_>, scenario: &Scenario) -> Result<RunOutcome, SimulationError> {
    let costs = ResolvedCosts::new(&runnable.lowered, scenario.quantile);
    let times = block_times(&runnable.lowered, &runnable.block_lists, scenario.quantile);
    let mut interpreter = Interpreter::new(runnable, scenario, &costs, &times);
    interpreter.start_all();
    let mut events = 0_u64;
    while interpreter.cutoff.least_step.is_none() && interpreter.advance() {
        events += 1;
        if events.is_multiple_of(EVENTS_BETWEEN_CHECKS) && scenario.stop.is_raised() {
            return Err(SimulationError::Interrupted);
        }
    }
    match interpreter.cutoff.least_step {
        Some(at_least) => Err(SimulationError::PastDeadline { at_least }),
        None if interpreter.queue.now() > LATEST => Err(interpreter.too_long()),
        None => interpreter.into_outcome(),
    }
}

/// The latest end of a step. At later instants durations could saturate at the largest
/// [`Picoseconds`], and an activity that never ends would be restarted at the same instant forever.
const LATEST: Picoseconds = Picoseconds(u64::MAX / 4);

/// The number of events between two checks of [`Stop`](super::Stop): few, since events are slow
/// with thousands of flows.
const EVENTS_BETWEEN_CHECKS: u64 = 64;

/// With at least this many ranks, their state (some 6 KB each) exceeds the nearest caches, and
/// prefetching pays.
const PREFETCH_RANKS: usize = 512;

struct Interpreter<'a> {
    lowered: &'a Lowered<'a>,
    scenario: &'a Scenario,
    costs: &'a ResolvedCosts<'a>,
    queue: EventQueue<Event>,
    ranks: Vec<RankState<'a>>,
    /// For each rank and stream, the progress of the stream.
    progress: Vec<Progress>,
    /// For each rank and slot, an end time.
    ends: Vec<Picoseconds>,
    /// `None` if no spans are kept.
    recorder: Option<Recorder>,
    /// Blocks that begin at this instant, the next one last.
    ready: Vec<Task>,
    fluids: Fluids,
    processors: Processors,
    run_ahead: RunAheadState,
    /// For each rank, its communicators: see [`RankState::first_communicator`].
    communicators: Vec<u32>,
    arrivals: Arrivals,
    messages: Messages,
    /// For each channel, its buffer.
    buffers: Vec<Buffer>,
    rings: Rings,
    /// Whether blocks may be planned in advance: no two ranks share a processor, and no two
    /// collectives of one group, or messages to one peer, can overlap.
    can_start_in_advance: bool,
    /// Instructions that have not ended.
    unfinished: usize,
    cutoff: Cutoff,
}

impl<'a> Interpreter<'a> {
    fn new(
        runnable: &'a Runnable<'a>,
        scenario: &'a Scenario,
        costs: &'a ResolvedCosts<'a>,
        times: &'a [Vec<Vec<BlockTimes>>],
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
                times: &times[rank.list][rank.times],
                pace: scenario.paces.get(rank.rank.0).copied().unwrap_or(1.0),
                handoff: handoff.into(),
                max_rate: quota.map_or(1.0, |speed| 1.0 / speed),
                interruption: parameters.interruption.into(),
                processor: rank.processor,
                first_stream: streams,
                first_slot: slots,
                first_communicator: communicators.len() as u32,
                end: Picoseconds::ZERO,
                has_launches: !lowered.times[rank.list][rank.times].launched.is_empty(),
                meter: Meter::default(),
                host_delay: Picoseconds::ZERO,
            });
            let channels = rank.sends.iter().chain(&rank.receives).map(|&channel| channel + lowered.groups.len() as u32);
            communicators.extend(rank.groups.iter().copied().chain(channels));
            streams += block_list.stream_count() as u32;
            slots += block_list.slots;
        }
        let mut fair_share = FairShare::new(lowered.capacities.iter().copied());
        let quotas = Quotas::new(lowered, &scenario.periods, &mut fair_share);
        let processors = Processors::new(lowered, quotas.resources());
        let can_start_in_advance = !lowered.shares_processors() && !lowered.communication_overlaps();
        let may_run_ahead = can_start_in_advance && lowered.hops.is_empty() && scenario.fast_path == FastPath::On;
        let remaining = scenario.deadline.as_deref().map(|deadline| RemainingTimes::new(deadline, &runnable.block_lists));
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
            recorder: (scenario.recording == Recording::Spans).then(|| Recorder::new(lowered)),
            ready: Vec::new(),
            fluids: Fluids { fair_share, activities: Vec::new(), quotas },
            processors,
            run_ahead: RunAheadState::new(lowered.ranks.len(), may_run_ahead),
            communicators,
            arrivals: Arrivals::new(lowered),
            messages: Messages::new(lowered),
            buffers: vec![Buffer::default(); lowered.channels.len()],
            rings: Rings::new(lowered, |rank| costs.never_saturates(lowered, rank)),
            can_start_in_advance,
            unfinished: lowered.ranks.iter().map(|rank| lowered.lists[rank.list].actions.len()).sum(),
            cutoff: Cutoff { remaining, least_step: None },
            ranks,
        }
    }

    /// Starts every block that has no predecessors.
    fn start_all(&mut self) {
        let may_run_ahead = self.run_ahead.forbid();
        for rank in 0..self.ranks.len() as u32 {
            for stream in 0..self.ranks[rank as usize].block_list.stream_count() as u16 {
                self.try_stream(rank, stream);
            }
        }
        self.run_ahead.restore(may_run_ahead);
        // The last entry of `ready` starts first, so reverse it to begin with the first rank.
        self.ready.reverse();
        self.start_ready();
    }

    /// Handles the next event; returns `false` if there is none, or if it comes after [`LATEST`].
    fn advance(&mut self) -> bool {
        // Solve the rates once per instant: if one kernel replaces another, the rates stay the
        // same.
        if self.fluids.fair_share.is_stale() && self.queue.next_time().is_none_or(|time| time > self.queue.now()) {
            self.update_rates();
        }
        let Some(event) = self.next_event().filter(|_| self.queue.now() <= LATEST) else { return false };
        match event {
            Event::Start(task) => self.start(task),
            Event::TimerEnds(task) => self.finish(task),
            Event::MembersArrived(collective) => self.all_have_arrived(collective),
            Event::LatencyEnds(communication) => self.begin_flow(communication),
            Event::CommunicationEnds(communication) => self.finish_communication(communication),
            Event::MemberEntered(member) => self.member_entered(member),
            Event::HopFlows(hop) => self.hop_flows(hop),
            Event::HopArrived(hop) => self.hop_arrived(hop),
            Event::ExclusiveEnds { task, generation } => {
                let processor = self.processor_index(task.rank);
                let state = &mut self.processors.states[processor];
                if state.generation == generation {
                    state.exclusive = None;
                    state.generation += 1;
                    self.record_exclusive_progress(task, self.queue.now(), self.queue.now());
                    self.finish(task);
                }
            }
            Event::ExclusiveCommunicationEnds { communication, generation } => {
                if self.processors.exclusive_generations[communication.communicator as usize] == generation {
                    self.release_processors(communication);
                    self.finish_communication(communication);
                }
            }
            Event::RunAheadEnds { rank, generation } => self.finish_run_ahead(rank, generation),
            Event::QuotaIsUsedUp { number, generation } => self.stop_device(number, generation),
            Event::PeriodBegins(number) => self.start_device(number),
            Event::FluidEnds { activity, generation } => self.finish_fluid(activity, generation),
        }
        self.start_ready();
        true
    }

    /// The next event. With many ranks, most of an event's time is spent on fetching the rank's
    /// state from memory. So the ranks of events that follow soon are prefetched, several at once.
    fn next_event(&mut self) -> Option<Event> {
        if self.ranks.len() < PREFETCH_RANKS {
            return self.queue.pop();
        }
        let Self { queue, ranks, progress, ends, communicators, processors, .. } = self;
        let memory = Memory { ranks, progress, ends, communicators, processors: &processors.states };
        let mut fetched = 0;
        let event = queue.pop_with_preview(|event| {
            if let Event::ExclusiveEnds { task, .. } | Event::Start(task) = event {
                fetched ^= memory.prefetch(task.rank);
            }
        });
        std::hint::black_box(fetched);
        event
    }

    /// Prefetches the state of ranks that will be needed soon.
    fn prefetch(&self, ranks: impl Iterator<Item = u32>) {
        if self.ranks.len() < PREFETCH_RANKS {
            return;
        }
        let Self { ranks: states, progress, ends, communicators, processors, .. } = self;
        let memory = Memory { ranks: states, progress, ends, communicators, processors: &processors.states };
        std::hint::black_box(ranks.fold(0, |fetched, rank| fetched ^ memory.prefetch(rank)));
    }
}

/// A duration on a device that takes `pace` times as long as its costs.
fn at_pace(duration: Picoseconds, pace: f64) -> Picoseconds {
    if pace == 1.0 { duration } else { Picoseconds((duration.0 as f64 * pace).round() as u64) }
}
