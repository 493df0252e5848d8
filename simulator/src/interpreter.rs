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

use crate::code::{Block, Code, NO_SLOT};
use crate::engine::EventQueue;
use crate::error::SimulationError;
use crate::fairness::{ActivityId, FairShare};
use crate::lowering::{Lowered, Step};
use crate::simulation::{Breakdown, Recording, Scenario};
use foretell_program::{Origin, RankTimeline, Timeline};
use foretell_units::Picoseconds;
use meter::Meter;
use prices::Prices;
use std::sync::Arc;

mod exchanges;
mod fluids;
mod meter;
mod prices;
mod recorder;
mod steps;

/// What a run leaves.
#[derive(Debug)]
pub(crate) struct Run {
    /// Without spans where none were asked for.
    pub(crate) timeline: Timeline,
    /// What each rank that was simulated spent the step on.
    pub(crate) breakdowns: Vec<Breakdown>,
    pub(crate) events: u64,
    /// Exchanges that no sample says anything of.
    pub(crate) uncalibrated: Vec<String>,
}

/// Runs a Program once.
pub(crate) fn interpret(lowered: &Lowered<'_>, scenario: &Scenario) -> Result<Run, SimulationError> {
    let prices = Prices::new(lowered, scenario.quantile);
    let work = lowered.work_of_blocks(scenario.quantile);
    let mut interpreter = Interpreter::new(lowered, scenario, &prices, &work);
    interpreter.start_all();
    while interpreter.advance() {}
    interpreter.into_run()
}

#[derive(Clone, Copy, Debug)]
enum Event {
    /// A block's handoffs are over.
    Start(Task),
    /// A block that has its processor to itself is done, unless someone came in between.
    Alone {
        task: Task,
        generation: u32,
    },
    /// Something that shares nothing is done.
    Timer(Task),
    /// All members have reached a collective.
    Reached(Exchange),
    /// The latency of an exchange is over.
    Latency(Exchange),
    /// An exchange that shares nothing is done.
    Exchanged(Exchange),
    /// A member of a collective that is run step by step has been set up for it.
    Entered(u32),
    /// The latency of a hop's message is over; the message has arrived.
    HopFlows(u32),
    Hopped(u32),
    /// A fluid activity is done, unless its rate changed in between.
    Fluid {
        activity: ActivityId,
        generation: u32,
    },
}

/// A block of a rank.
#[derive(Clone, Copy, Debug)]
struct Task {
    rank: u32,
    block: u32,
}

/// The `nth` exchange of a group or channel: the groups come first, then the channels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Exchange {
    party: u32,
    nth: u32,
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
    Exchange(Exchange),
    /// The message of a hop.
    Hop(u32),
    /// What nobody waits for: a link's queue that still holds what has arrived, a stream that interrupts a kernel.
    Nobody,
}

/// The block that has a processor to itself.
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

/// The messages of a channel that are in the buffer, and the one that waits for room.
#[derive(Clone, Copy, Debug, Default)]
struct Buffered {
    bytes: u64,
    blocked: Option<u32>,
}

/// A rank while it runs.
#[derive(Clone, Copy, Debug)]
struct RankState<'a> {
    code: &'a Code,
    /// What each of its blocks takes.
    work: &'a [Picoseconds],
    /// How much slower than its costs its device is.
    pace: f64,
    handoff: Picoseconds,
    interruption: Picoseconds,
    processor: u32,
    /// Where its streams begin in [`Interpreter::progress`], and its slots in [`Interpreter::ends`].
    first_stream: u32,
    first_slot: u32,
    /// Where its groups, and after them those whom it sends to and those from whom it receives, begin in [`Interpreter::parties`].
    first_party: u32,
    /// When its last block so far ended.
    end: Picoseconds,
    /// When its host has launched each instruction, if it never waits; empty where launches take no time.
    launched: &'a [Picoseconds],
    meter: Meter,
    /// How far its host is behind that, for what held it up.
    behind: Picoseconds,
    /// Whether the host launches nothing more before an instruction has ended; empty where it waits for none.
    host_waits: &'a [bool],
}

impl RankState<'_> {
    /// Whether its host launches nothing more before a block has ended.
    fn is_waited_for(&self, block: &Block) -> bool {
        let last = self.code.instructions(block).last().and_then(|&last| self.host_waits.get(last as usize));
        last.copied().unwrap_or(false)
    }

    /// When its host has launched a block, if it never waits.
    fn launch_of(&self, block: &Block) -> Picoseconds {
        let launched = self.code.instructions(block).first().and_then(|&first| self.launched.get(first as usize));
        launched.copied().unwrap_or(Picoseconds::MAX)
    }
}

/// Where what is known of ranks lies.
struct Memory<'a> {
    ranks: &'a [RankState<'a>],
    progress: &'a [Progress],
    ends: &'a [Picoseconds],
    parties: &'a [u32],
    processors: &'a [Processor],
}

impl Memory<'_> {
    /// Reads a word of each place, so that they are at hand. What they are does not matter.
    fn fetch(&self, rank: u32) -> u64 {
        let Some(state) = self.ranks.get(rank as usize) else { return 0 };
        let word = |one: Option<&Picoseconds>| one.map_or(0, |time| time.0);
        let progress = self.progress.get(state.first_stream as usize).map_or(0, |progress| u64::from(progress.0));
        let party = self.parties.get(state.first_party as usize).copied().map_or(0, u64::from);
        let processor = self.processors.get(rank as usize).map_or(0, |processor| u64::from(processor.generation));
        state.end.0
            ^ state.meter.fetch()
            ^ state.behind.0
            ^ progress
            ^ party
            ^ processor
            ^ word(self.ends.get(state.first_slot as usize))
    }
}

/// How far a stream is: the block that is next, and whether that has begun or will at a time that is known.
#[derive(Clone, Copy, Debug, Default)]
struct Progress(u32);

impl Progress {
    fn at(block: u32) -> Self {
        Self(block << 1)
    }

    fn block(self) -> u32 {
        self.0 >> 1
    }

    fn is_busy(self) -> bool {
        self.0 & 1 == 1
    }

    fn busy(self) -> Self {
        Self(self.0 | 1)
    }
}

struct Interpreter<'a> {
    lowered: &'a Lowered<'a>,
    scenario: &'a Scenario,
    prices: &'a Prices<'a>,
    queue: EventQueue<Event>,
    ranks: Vec<RankState<'a>>,
    progress: Vec<Progress>,
    ends: Vec<Picoseconds>,
    recorder: Option<recorder::Recorder>,
    /// Blocks that begin now.
    ready: Vec<Task>,
    share: FairShare,
    fluids: Vec<Fluid>,
    processors: Vec<Processor>,
    first_processor: u32,
    /// By rank, the numbers of its groups and channels: see [`Exchange::party`].
    parties: Vec<u32>,
    gatherings: exchanges::Gatherings,
    /// How far each message is, and the number of the first.
    messages: Vec<u32>,
    first_message: u32,
    buffered: Vec<Buffered>,
    rings: steps::Rings,
    /// Whether no two ranks share a processor, and no two exchanges of a group can go on at once.
    looks_ahead: bool,
    unfinished: usize,
}

impl<'a> Interpreter<'a> {
    fn new(lowered: &'a Lowered<'a>, scenario: &'a Scenario, prices: &'a Prices<'a>, work: &'a [Vec<Vec<Picoseconds>>]) -> Self {
        let (mut streams, mut slots) = (0, 0);
        let mut parties: Vec<u32> = Vec::new();
        let mut ranks = Vec::with_capacity(lowered.ranks.len());
        for rank in &lowered.ranks {
            let parameters = lowered.costs.parameters(rank.kind);
            let code = &lowered.codes[rank.list];
            ranks.push(RankState {
                code,
                work: &work[rank.list][rank.work],
                pace: scenario.paces.get(rank.rank.0).copied().unwrap_or(1.0),
                handoff: parameters.stream_handoff.at(scenario.quantile).into(),
                interruption: parameters.interruption.into(),
                processor: rank.processor,
                first_stream: streams,
                first_slot: slots,
                first_party: parties.len() as u32,
                end: Picoseconds::ZERO,
                launched: &lowered.lists[rank.list].work[rank.work].launched,
                meter: Meter::default(),
                behind: Picoseconds::ZERO,
                host_waits: &lowered.lists[rank.list].work[rank.work].host_waits,
            });
            let channels = rank.sends.iter().chain(&rank.receives).map(|&channel| channel + lowered.groups.len() as u32);
            parties.extend(rank.groups.iter().copied().chain(channels));
            streams += code.stream_count() as u32;
            slots += code.slots;
        }
        let processors = lowered.processors;
        let first_message = lowered.channels.first().map_or(lowered.exchanges, |channel| channel.first_exchange);
        let records = scenario.recording == Recording::Spans;
        let mut progress = Vec::with_capacity(streams as usize);
        for rank in &ranks {
            progress.extend(rank.code.streams[..rank.code.stream_count()].iter().map(|&first| Progress::at(first)));
        }
        Self {
            lowered,
            scenario,
            prices,
            queue: EventQueue::new(),
            progress,
            ends: vec![Picoseconds::ZERO; slots as usize],
            recorder: records.then(|| recorder::Recorder::new(lowered)),
            ready: Vec::new(),
            share: FairShare::new(lowered.capacities.iter().copied()),
            fluids: Vec::new(),
            processors: vec![Processor::default(); processors],
            first_processor: (lowered.capacities.len() - processors) as u32,
            parties,
            gatherings: exchanges::Gatherings::new(lowered),
            messages: vec![0; (lowered.exchanges - first_message) as usize],
            first_message,
            buffered: vec![Buffered::default(); lowered.channels.len()],
            rings: steps::Rings::new(lowered, |rank| prices.is_roomy(lowered, rank)),
            looks_ahead: lowered.ranks.len() <= processors && !lowered.codes.iter().any(|code| code.exchanges_overlap),
            unfinished: lowered.ranks.iter().map(|rank| lowered.lists[rank.list].steps.len()).sum(),
            ranks,
        }
    }

    /// Starts what waits for nothing.
    fn start_all(&mut self) {
        for rank in 0..self.ranks.len() as u32 {
            for stream in 0..self.ranks[rank as usize].code.stream_count() as u16 {
                self.look_at(rank, stream);
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
        let Some(event) = self.next_event() else { return false };
        match event {
            Event::Start(task) => self.start(task),
            Event::Timer(task) => self.finish(task),
            Event::Reached(exchange) => self.all_are_there(exchange),
            Event::Latency(exchange) => self.flow(exchange),
            Event::Exchanged(exchange) => self.finish_exchange(exchange),
            Event::Entered(member) => self.entered(member),
            Event::HopFlows(hop) => self.hop_flows(hop),
            Event::Hopped(hop) => self.hopped(hop),
            Event::Alone { task, generation } => {
                let processor = self.processor_of(task.rank);
                let state = &mut self.processors[processor];
                if state.generation == generation {
                    state.alone = None;
                    state.generation += 1;
                    self.mark_alone(task, self.queue.now());
                    self.finish(task);
                }
            }
            Event::Fluid { activity, generation } => self.finish_fluid(activity, generation),
        }
        self.start_ready();
        true
    }

    /// The next event. Those that come soon are looked up beforehand: of many ranks that are far apart in memory the time to fetch them is most of what
    /// an event takes, and they can be fetched all at once.
    fn next_event(&mut self) -> Option<Event> {
        let Self { queue, ranks, progress, ends, parties, processors, .. } = self;
        let memory = Memory { ranks, progress, ends, parties, processors };
        let mut fetched = 0;
        let event = queue.next_showing(|event| {
            if let Event::Alone { task, .. } | Event::Start(task) = event {
                fetched ^= memory.fetch(task.rank);
            }
        });
        std::hint::black_box(fetched);
        event
    }

    /// Fetches ranks that are about to go on.
    fn fetch(&self, ranks: impl Iterator<Item = u32>) {
        let Self { ranks: states, progress, ends, parties, processors, .. } = self;
        let memory = Memory { ranks: states, progress, ends, parties, processors };
        std::hint::black_box(ranks.fold(0, |fetched, rank| fetched ^ memory.fetch(rank)));
    }

    fn into_run(self) -> Result<Run, SimulationError> {
        if self.unfinished > 0 {
            return Err(self.deadlock());
        }
        let quantile = self.scenario.quantile;
        let mut ranks = self.recorder.map_or_else(Vec::new, |recorder| recorder.spans);
        ranks.resize_with(self.ranks.len(), Vec::new);
        let mut breakdowns = Vec::with_capacity(self.ranks.len());
        let mut timelines = Vec::with_capacity(self.ranks.len());
        // Ranks that were simulated as one have one timeline.
        for ((spans, rank), state) in ranks.into_iter().zip(&self.lowered.ranks).zip(&self.ranks) {
            let parameters = self.lowered.costs.parameters(rank.kind);
            let micro_batches = f64::from(self.lowered.lists[rank.list].micro_batches);
            let overhead = parameters.step_overhead.at(quantile) + parameters.micro_batch_overhead * micro_batches;
            let end = state.end + overhead.into();
            breakdowns.push(state.meter.breakdown(end));
            timelines.push(Arc::new(RankTimeline { spans, end }));
        }
        let of_rank = self.lowered.of_rank.iter().map(|&place| Arc::clone(&timelines[place as usize]));
        Ok(Run {
            timeline: Timeline { origin: Origin::Predicted, ranks: of_rank.collect() },
            breakdowns,
            events: self.queue.handled(),
            uncalibrated: self.prices.uncalibrated.iter().cloned().collect(),
        })
    }

    fn start_ready(&mut self) {
        while let Some(task) = self.ready.pop() {
            self.start(task);
        }
    }

    fn block(&self, task: Task) -> &'a Block {
        &self.ranks[task.rank as usize].code.blocks[task.block as usize]
    }

    /// What a block takes of a rank's device at its pace.
    fn work(&self, task: Task) -> Picoseconds {
        let rank = &self.ranks[task.rank as usize];
        at_pace(rank.work[task.block as usize], rank.pace)
    }

    fn start(&mut self, task: Task) {
        let now = self.queue.now();
        let block = self.block(task);
        if let Some(recorder) = &mut self.recorder {
            recorder.begin(task.rank, self.ranks[task.rank as usize].code, block, now);
        }
        match block.step {
            Step::Compute => self.compute(task),
            Step::Load => self.load(task),
            Step::Collective { group, nth } => {
                self.interrupt(task.rank);
                self.reach(task, group, nth, now);
            }
            Step::Send { peer, nth } => {
                self.interrupt(task.rank);
                let groups = self.ranks[task.rank as usize].code.collectives.len() as u32;
                self.send(Exchange { party: self.party(task.rank, groups + peer), nth });
            }
            Step::Receive { peer, nth } => {
                let code = self.ranks[task.rank as usize].code;
                let first = (code.collectives.len() + code.sends.len()) as u32;
                self.receive(Exchange { party: self.party(task.rank, first + peer), nth }, task);
            }
        }
    }

    /// The `number`-th group or channel of a rank.
    fn party(&self, rank: u32, number: u32) -> u32 {
        self.parties[(self.ranks[rank as usize].first_party + number) as usize]
    }

    /// Notes a block's end, and sees who waited for it.
    fn finish(&mut self, task: Task) {
        let now = self.queue.now();
        let block = self.block(task);
        let rank = &mut self.ranks[task.rank as usize];
        rank.end = now;
        let (code, first_stream, first_slot) = (rank.code, rank.first_stream as usize, rank.first_slot as usize);
        if rank.is_waited_for(block) {
            // The host launches what follows from now on.
            rank.behind = rank.behind.max(now.saturating_sub(rank.launch_of(block)));
        }
        self.unfinished -= block.places().len();
        if let Some(recorder) = &mut self.recorder {
            recorder.end(task.rank, code, block, now);
        }
        if matches!(block.step, Step::Compute | Step::Load) {
            self.ranks[task.rank as usize].meter.end(block.counts_as, now);
        }
        self.progress[first_stream + block.stream as usize] = Progress::at(task.block + 1);
        if block.slot != NO_SLOT {
            self.ends[first_slot + block.slot as usize] = now;
            for stream in code.streams_of(block.wakes) {
                self.look_at(task.rank, stream);
            }
        }
        self.look_at(task.rank, block.stream);
    }

    /// Starts a stream's next block if nothing is in its way.
    fn look_at(&mut self, rank: u32, stream: u16) {
        let state = &self.ranks[rank as usize];
        let first = state.first_stream as usize;
        let progress = self.progress[first + stream as usize];
        let next = progress.block();
        if progress.is_busy() || next == state.code.streams[stream as usize + 1] {
            return;
        }
        let now = self.queue.now();
        let block = &state.code.blocks[next as usize];
        let mut start = now;
        for wait in state.code.waits(block) {
            if self.progress[first + wait.stream as usize].block() <= wait.block {
                return;
            }
            start = start.max(self.ends[(state.first_slot + wait.slot) as usize] + state.handoff);
        }
        if !state.launched.is_empty() {
            start = start.max(state.launch_of(block) + state.behind);
        }
        self.progress[first + stream as usize] = progress.busy();
        let task = Task { rank, block: next };
        if start == now {
            self.ready.push(task);
        } else if !self.start_later(task, start) {
            self.queue.schedule(start, Event::Start(task));
        }
    }

    /// Starts a block at a time to come, if what it does then is certain now: a kernel on an idle processor, which whoever comes onto that before
    /// puts off again; a member's arrival at a collective. That saves an event.
    fn start_later(&mut self, task: Task, start: Picoseconds) -> bool {
        let block = self.block(task);
        let rank = &self.ranks[task.rank as usize];
        if !self.looks_ahead || rank.interruption > Picoseconds::ZERO {
            return false;
        }
        let code = rank.code;
        let is_started = match block.step {
            Step::Compute => self.compute_later(task, start),
            Step::Collective { group, nth } => self.reach(task, group, nth, start),
            _ => false,
        };
        if let Some(recorder) = self.recorder.as_mut().filter(|_| is_started) {
            recorder.begin(task.rank, code, block, start);
        }
        is_started
    }

    fn processor_of(&self, rank: u32) -> usize {
        (self.ranks[rank as usize].processor - self.first_processor) as usize
    }

    fn deadlock(&self) -> SimulationError {
        // Enough to see the circle, few enough to read.
        const SHOWN: usize = 8;
        let total: usize = self.lowered.ranks.iter().map(|rank| self.lowered.lists[rank.list].steps.len()).sum();
        let mut waiting = Vec::new();
        for (index, rank) in self.ranks.iter().enumerate() {
            let ends = &rank.code.streams[1..];
            let streams = self.progress[rank.first_stream as usize..].iter().zip(ends);
            let next = |busy: bool| {
                let open = streams.clone().filter(move |(progress, end)| progress.block() < **end && progress.is_busy() == busy);
                let instructions = open.filter_map(|(progress, _)| {
                    let block = &rank.code.blocks[progress.block() as usize];
                    rank.code.instructions(block).first().copied()
                });
                let mut instructions: Vec<u32> = instructions.collect();
                instructions.sort_unstable();
                instructions
            };
            // Those that started and did not end are what the rank hangs in; where there are none, it waits for itself.
            let mut hanging = next(true);
            if hanging.is_empty() {
                hanging = next(false).into_iter().take(1).collect();
            }
            waiting.extend(hanging.into_iter().map(|instruction| self.lowered.describe(index, instruction)));
        }
        let more = waiting.len().saturating_sub(SHOWN);
        waiting.truncate(SHOWN);
        if more > 0 {
            waiting.push(format!("and {more} more"));
        }
        SimulationError::Deadlock { done: total - self.unfinished, total, waiting }
    }
}

/// A duration on a device that is so much slower than its costs.
fn at_pace(duration: Picoseconds, pace: f64) -> Picoseconds {
    if pace == 1.0 { duration } else { Picoseconds((duration.0 as f64 * pace).round() as u64) }
}
