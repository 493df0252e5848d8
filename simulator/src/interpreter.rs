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

use crate::code::{Block, NO_SLOT};
use crate::cost::Parameters;
use crate::engine::EventQueue;
use crate::error::SimulationError;
use crate::fairness::{ActivityId, FairShare};
use crate::lists::Step;
use crate::lowering::Lowered;
use crate::simulation::{Breakdown, Pacing, Recording, Scenario};
use crate::work::BlockWork;
use foretell_program::Timeline;
use foretell_units::Picoseconds;
use meter::Meter;
pub(crate) use prices::Prices;
pub(crate) use quota::Periods;
use state::{Memory, Progress, RankState};

mod ahead;
mod ending;
mod exchanges;
mod fluids;
mod meter;
mod pair;
mod prices;
mod quota;
mod recorder;
mod rest;
mod state;
mod steps;

/// What a run leaves.
#[derive(Debug)]
pub(crate) struct Run {
    /// Without spans where none were asked for.
    pub(crate) timeline: Timeline,
    /// What each rank that was simulated spent the step on.
    pub(crate) breakdowns: Vec<Breakdown>,
    pub(crate) events: u64,
    /// Those of them that the queue handed out.
    #[cfg(test)]
    pub(crate) queue_events: u64,
    /// Exchanges that no sample says anything of.
    pub(crate) uncalibrated: Vec<String>,
    /// Where devices that have a share of a processor stand after the step.
    pub(crate) periods: Periods,
}

/// Runs a Program once.
pub(crate) fn interpret(lowered: &Lowered<'_>, scenario: &Scenario) -> Result<Run, SimulationError> {
    let prices = Prices::new(lowered, scenario.quantile);
    let work = lowered.work_of_blocks(scenario.quantile);
    let mut interpreter = Interpreter::new(lowered, scenario, &prices, &work);
    interpreter.start_all();
    while interpreter.later.is_none() && interpreter.advance() {}
    match interpreter.later {
        Some(at_least) => Err(SimulationError::Later { at_least }),
        None => interpreter.into_run(),
    }
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
    /// The same of an exchange that has its members' processors to itself.
    LoneExchange {
        exchange: Exchange,
        generation: u32,
    },
    /// The last is done of the blocks through which a rank was taken ahead, unless someone came in between.
    Ahead {
        rank: u32,
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
    /// A device has used up what it may of the period, unless its use changed in between; the period after that begins.
    QuotaIsUsedUp {
        number: u32,
        generation: u32,
    },
    PeriodBegins(u32),
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

/// What has a processor to itself, perhaps only from some time to come.
#[derive(Clone, Copy, Debug)]
struct Alone {
    owner: Lone,
    end: Picoseconds,
}

#[derive(Clone, Copy, Debug)]
enum Lone {
    Task(Task),
    /// An exchange that loads no link, and has all of its members' processors so.
    Exchange(Exchange),
    /// The blocks through which this rank was taken ahead.
    Ahead(u32),
}

#[derive(Clone, Copy, Debug, Default)]
struct Processor {
    alone: Option<Alone>,
    generation: u32,
    /// Whether its device has a share of its time. What runs there is always a fluid activity.
    has_quota: bool,
}

/// The messages of a channel that are in the buffer, and the one that waits for room.
#[derive(Clone, Copy, Debug, Default)]
struct Buffered {
    bytes: u64,
    blocked: Option<u32>,
}

/// From so many ranks on what is known of them, some 6 KB each, lies beyond the nearest caches.
const FAR_APART: usize = 512;

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
    quotas: quota::Quotas,
    processors: Vec<Processor>,
    first_processor: u32,
    /// Of each group and channel, how often an exchange has ceased to have its members' processors to itself.
    lone: Vec<u32>,
    ahead: ahead::Ahead,
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
    rest: Option<rest::Rest>,
    /// What the step takes at least, once that is later than it is worth simulating.
    later: Option<Picoseconds>,
}

impl<'a> Interpreter<'a> {
    fn new(lowered: &'a Lowered<'a>, scenario: &'a Scenario, prices: &'a Prices<'a>, work: &'a [Vec<Vec<BlockWork>>]) -> Self {
        let (mut streams, mut slots) = (0, 0);
        let mut parties: Vec<u32> = Vec::new();
        let mut ranks = Vec::with_capacity(lowered.ranks.len());
        for rank in &lowered.ranks {
            let parameters = lowered.costs.parameters(rank.kind);
            let code = &lowered.codes[rank.list];
            let quota = lowered.quota(rank);
            let handoff = parameters.stream_handoff.at(scenario.quantile) * quota.unwrap_or(1.0);
            ranks.push(RankState {
                code,
                work: &work[rank.list][rank.work],
                pace: scenario.paces.get(rank.rank.0).copied().unwrap_or(1.0),
                handoff: handoff.into(),
                fastest: quota.map_or(1.0, |speed| 1.0 / speed),
                interruption: parameters.interruption.into(),
                processor: rank.processor,
                first_stream: streams,
                first_slot: slots,
                first_party: parties.len() as u32,
                end: Picoseconds::ZERO,
                has_launches: !lowered.lists[rank.list].work[rank.work].launched.is_empty(),
                meter: Meter::default(),
                behind: Picoseconds::ZERO,
            });
            let channels = rank.sends.iter().chain(&rank.receives).map(|&channel| channel + lowered.groups.len() as u32);
            parties.extend(rank.groups.iter().copied().chain(channels));
            streams += code.stream_count() as u32;
            slots += code.slots;
        }
        let first_processor = lowered.first_processor() as u32;
        let mut share = FairShare::new(lowered.capacities.iter().copied());
        let quotas = quota::Quotas::new(lowered, &scenario.periods, &mut share);
        let mut processors = vec![Processor::default(); lowered.processors];
        quotas.resources().for_each(|resource| processors[(resource - first_processor) as usize].has_quota = true);
        let looks_ahead = !lowered.shares_processors() && !lowered.codes.iter().any(|code| code.exchanges_overlap);
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
            share,
            fluids: Vec::new(),
            quotas,
            processors,
            first_processor,
            lone: vec![0; lowered.groups.len() + lowered.channels.len()],
            ahead: ahead::Ahead::new(
                lowered.ranks.len(),
                looks_ahead && lowered.hops.is_empty() && scenario.pacing == Pacing::Ahead,
            ),
            parties,
            gatherings: exchanges::Gatherings::new(lowered),
            messages: vec![0; (lowered.exchanges - first_message) as usize],
            first_message,
            buffered: vec![Buffered::default(); lowered.channels.len()],
            rings: steps::Rings::new(lowered, |rank| prices.is_roomy(lowered, rank)),
            looks_ahead,
            unfinished: lowered.ranks.iter().map(|rank| lowered.lists[rank.list].steps.len()).sum(),
            rest: scenario.deadline.as_deref().map(|deadline| rest::Rest::new(deadline, &lowered.codes)),
            later: None,
            ranks,
        }
    }

    /// Starts what waits for nothing.
    fn start_all(&mut self) {
        let may_go_ahead = self.ahead.forbid();
        for rank in 0..self.ranks.len() as u32 {
            for stream in 0..self.ranks[rank as usize].code.stream_count() as u16 {
                self.look_at(rank, stream);
            }
        }
        self.ahead.allow(may_go_ahead);
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
                    self.mark_alone(task, self.queue.now(), self.queue.now());
                    self.finish(task);
                }
            }
            Event::LoneExchange { exchange, generation } => {
                if self.lone[exchange.party as usize] == generation {
                    self.leave_processors(exchange);
                    self.finish_exchange(exchange);
                }
            }
            Event::Ahead { rank, generation } => self.finish_ahead(rank, generation),
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
        if self.ranks.len() < FAR_APART {
            return;
        }
        let Self { ranks: states, progress, ends, parties, processors, .. } = self;
        let memory = Memory { ranks: states, progress, ends, parties, processors };
        std::hint::black_box(ranks.fold(0, |fetched, rank| fetched ^ memory.fetch(rank)));
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
        at_pace(rank.work[task.block as usize].duration, rank.pace)
    }

    fn start(&mut self, task: Task) {
        self.catch_up(task.rank);
        let now = self.queue.now();
        let block = self.block(task);
        if let Some(recorder) = &mut self.recorder {
            recorder.begin(task.rank, self.ranks[task.rank as usize].code, block, now);
        }
        match block.step {
            Step::Compute => self.compute(task),
            Step::Load => {
                let share = self.parameters(task.rank).communication_share;
                self.beside_kernels(task, share);
            }
            Step::Copy => {
                let share = self.parameters(task.rank).copy_share;
                self.beside_kernels(task, share);
            }
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

    fn parameters(&self, rank: u32) -> &'a Parameters {
        self.lowered.costs.parameters(self.lowered.ranks[rank as usize].kind)
    }

    /// The `number`-th group or channel of a rank.
    fn party(&self, rank: u32, number: u32) -> u32 {
        self.parties[(self.ranks[rank as usize].first_party + number) as usize]
    }

    /// Notes a block's end, and sees who waited for it.
    fn finish(&mut self, task: Task) {
        self.catch_up(task.rank);
        let now = self.queue.now();
        let block = self.block(task);
        let rank = &mut self.ranks[task.rank as usize];
        rank.end = now;
        let (code, first_stream, first_slot) = (rank.code, rank.first_stream as usize, rank.first_slot as usize);
        let work = &rank.work[task.block as usize];
        if work.host_waits {
            // The host launches what follows from now on.
            rank.behind = rank.behind.max(now.saturating_sub(work.launched));
        }
        self.unfinished -= block.places().len();
        if let Some(recorder) = &mut self.recorder {
            recorder.end(task.rank, code, block, now);
        }
        if matches!(block.step, Step::Compute | Step::Load | Step::Copy) {
            self.ranks[task.rank as usize].meter.end(block.counts_as, now);
        }
        self.progress[first_stream + block.stream as usize] = Progress::at(task.block + 1);
        if block.slot != NO_SLOT {
            self.ends[first_slot + block.slot as usize] = now;
        }
        self.note_rest(task, now);
        match self.following(task.rank, block, now) {
            Following::Nobody => {}
            Following::One(next, start) => self.begin_at(Task { rank: task.rank, block: next }, start),
            Following::Several => {
                // Those of which one begins must not see what would come of another.
                let may_go_ahead = self.ahead.forbid();
                for stream in code.streams_of(woken(block)).chain([block.stream]) {
                    self.look_at(task.rank, stream);
                }
                self.ahead.allow(may_go_ahead);
            }
        }
    }

    /// What may begin when a block has ended.
    fn following(&self, rank: u32, block: &Block, now: Picoseconds) -> Following {
        let code = self.ranks[rank as usize].code;
        let mut following = Following::Nobody;
        for stream in code.streams_of(woken(block)).chain([block.stream]) {
            if let Some((next, start)) = self.next_of(rank, stream, now) {
                match following {
                    Following::Nobody => following = Following::One(next, start),
                    Following::One(other, _) if other == next => {}
                    Following::One(..) | Following::Several => return Following::Several,
                }
            }
        }
        following
    }

    /// Starts a stream's next block if nothing is in its way.
    fn look_at(&mut self, rank: u32, stream: u16) {
        if let Some((next, start)) = self.next_of(rank, stream, self.queue.now()) {
            self.begin_at(Task { rank, block: next }, start);
        }
    }

    /// Has a block begin now or later.
    fn begin_at(&mut self, task: Task, start: Picoseconds) {
        let stream = self.block(task).stream as usize;
        self.progress[self.ranks[task.rank as usize].first_stream as usize + stream] = Progress::at(task.block).busy();
        if start == self.queue.now() {
            self.ready.push(task);
        } else if !self.start_later(task, start) {
            self.queue.schedule(start, Event::Start(task));
        }
    }

    /// A stream's next block, and when it begins, if nothing is in its way.
    fn next_of(&self, rank: u32, stream: u16, now: Picoseconds) -> Option<(u32, Picoseconds)> {
        let state = &self.ranks[rank as usize];
        let first = state.first_stream as usize;
        let progress = self.progress[first + stream as usize];
        let next = progress.block();
        if progress.is_busy() || next == state.code.streams[stream as usize + 1] {
            return None;
        }
        let block = &state.code.blocks[next as usize];
        let mut start = now;
        for wait in state.code.waits(block) {
            if self.progress[first + wait.stream as usize].block() <= wait.block {
                return None;
            }
            start = start.max(self.ends[(state.first_slot + wait.slot) as usize] + state.handoff);
        }
        if state.has_launches {
            start = start.max(state.work[next as usize].launched + state.behind);
        }
        Some((next, start))
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
}

/// What may begin when a block has ended.
enum Following {
    Nobody,
    /// This block, at this time.
    One(u32, Picoseconds),
    Several,
}

/// The streams in which someone waits for a block, bit by bit.
fn woken(block: &Block) -> u64 {
    if block.slot == NO_SLOT { 0 } else { block.wakes }
}

/// A duration on a device that is so much slower than its costs.
fn at_pace(duration: Picoseconds, pace: f64) -> Picoseconds {
    if pace == 1.0 { duration } else { Picoseconds((duration.0 as f64 * pace).round() as u64) }
}
