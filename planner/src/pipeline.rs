//! What a pipeline of pieces takes at least, and holds at least: in closed form for every layout, and pass by pass for those that matter.
//!
//! It knows how many chunks of which sizes there are and in which order a schedule takes them, not what is in them.

use crate::probe::{Piece, Probe};
use crate::remaining::longer_between;
use crate::windows::{Chain, Held, Window, gathers_for_a_step};
use foretell_program::{Offload, PassTimes, Schedule, StagePass, Task, pass_starts, usual_cuts};
use std::cell::Cell;
use std::sync::Arc;

/// Which blocks each chunk of a pipeline has.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Cutting {
    /// Different chunks.
    kinds: Vec<Chunk>,
    /// The kind of the chunk at each position of the model.
    of_position: Vec<usize>,
}

/// What blocks a chunk has.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Chunk {
    /// How many equal blocks.
    layers: usize,
    /// How many of these are computed again, where that is said of each.
    again: usize,
    /// Whether the model's first and last blocks are with them.
    has_first: bool,
    has_last: bool,
}

impl Cutting {
    /// The usual cuts of blocks of so much work into chunks: the first and the last block are the model's ends, the others are alike.
    pub(crate) fn usual(work: &[f64], stages: usize, chunks: usize) -> Self {
        Self::new(&usual_cuts(work, stages, chunks))
    }

    /// That of so many blocks for each chunk.
    pub(crate) fn new(cuts: &[usize]) -> Self {
        let positions = cuts.len();
        let chunks = cuts.iter().enumerate().map(|(position, &blocks)| {
            let (has_first, has_last) = (position == 0, position + 1 == positions);
            let layers = blocks - usize::from(has_first) - usize::from(has_last && blocks > usize::from(has_first));
            Chunk { layers, again: 0, has_first, has_last }
        });
        Self::of(chunks)
    }

    fn of(chunks: impl Iterator<Item = Chunk>) -> Self {
        let mut kinds = Vec::new();
        let of_position = chunks.map(|chunk| {
            kinds.iter().position(|one| *one == chunk).unwrap_or_else(|| {
                kinds.push(chunk);
                kinds.len() - 1
            })
        });
        let of_position = of_position.collect();
        Self { kinds, of_position }
    }

    /// The same where so many blocks of each stage, the first, are computed again.
    pub(crate) fn recomputing(&self, mut left: Vec<usize>, schedule: Schedule) -> Self {
        let stages = left.len();
        let chunks = self.of_position.len() / stages.max(1);
        let chunks = self.of_position.iter().enumerate().map(|(position, &kind)| {
            let chunk = self.kinds[kind];
            let left = &mut left[schedule.place(stages, chunks, position).0];
            let again = chunk.layers.min(*left);
            *left -= again;
            Chunk { again, ..chunk }
        });
        Self::of(chunks)
    }
}

/// What each stage holds when it holds the most micro-batches, and when most of them wait for their pass of the parameters' gradients.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct InFlight(Vec<[Holding; 2]>);

/// What a stage holds at some time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Holding {
    /// By chunk, micro-batches between the way there and the way back.
    held: Vec<usize>,
    /// By chunk, those between the way back and the pass of the parameters' gradients, where that is one of its own.
    waiting: Vec<usize>,
    /// The chunk whose forward pass runs then, and that of the next pass back, before which nothing is given up; where it is known.
    forward: Option<usize>,
    backward: Option<usize>,
}

impl InFlight {
    /// At least: without going through all micro-batches.
    pub(crate) fn least(schedule: Schedule, stages: usize, micro_batches: usize, chunks: usize) -> Self {
        let all = schedule.beginnings(stages, micro_batches, chunks).into_iter().map(|orders| Self::of(&orders, chunks));
        let of_stage = |([one, two], [other, another]): ([Holding; 2], [Holding; 2])| [one.least(other), two.least(another)];
        let less = |one: Self, other: Self| Self(one.0.into_iter().zip(other.0).map(of_stage).collect());
        all.reduce(less).unwrap_or(Self(Vec::new()))
    }

    /// The most micro-batches that a stage holds between the way there and the way back.
    pub(crate) fn most(&self, stage: usize) -> usize {
        self.0[stage].iter().map(|holding| holding.held.iter().sum()).max().unwrap_or(0)
    }

    /// What a stage holds at these times.
    pub(crate) fn of_stage(&self, stage: usize) -> &[Holding] {
        &self.0[stage]
    }

    fn of(orders: &[Vec<Task>], chunks: usize) -> Self {
        Self(orders.iter().map(|order| [most_held(order, chunks), most_waiting(order, chunks)]).collect())
    }
}

impl Holding {
    fn least(self, other: Self) -> Self {
        let less = |one: Vec<usize>, other: Vec<usize>| one.into_iter().zip(other).map(|(one, other)| one.min(other)).collect();
        Self {
            held: less(self.held, other.held),
            waiting: less(self.waiting, other.waiting),
            forward: self.forward.filter(|_| self.forward == other.forward),
            backward: self.backward.filter(|_| self.backward == other.backward),
        }
    }
}

/// When a schedule's stages take which pass, and what they hold when they hold the most.
#[derive(Clone, Debug)]
pub(crate) struct Timetable {
    pub(crate) schedule: Schedule,
    pub(crate) stages: usize,
    pub(crate) chunks: usize,
    pub(crate) micro_batches: usize,
    pub(crate) orders: Vec<Vec<Task>>,
    in_flight: InFlight,
    /// By stage, the micro-batches and chunks whose way back follows their way there at once, in order.
    returning: Vec<Vec<(usize, usize)>>,
    /// Whether chunks that follow each other are of different stages.
    alternates: bool,
}

impl Timetable {
    pub(crate) fn new(schedule: Schedule, stages: usize, micro_batches: usize, chunks: usize) -> Self {
        let orders = schedule.orders(stages, micro_batches, chunks);
        let in_flight = InFlight::of(&orders, chunks);
        let returning = |order: &Vec<Task>| {
            let pairs = order.windows(2).filter(|pair| pair[0].returns_with(&pair[1]));
            let mut found: Vec<(usize, usize)> = pairs.map(|pair| (pair[0].micro_batch, pair[0].chunk)).collect();
            found.sort_unstable();
            found
        };
        let returning = orders.iter().map(returning).collect();
        let stage_of = |position: usize| schedule.place(stages, chunks, position).0;
        let alternates = (1..stages * chunks).all(|position| stage_of(position - 1) != stage_of(position));
        Self { schedule, stages, chunks, micro_batches, orders, in_flight, returning, alternates }
    }

    /// Whether the way back of a stage's pass follows it at once.
    fn returns_at_once(&self, stage: usize, task: &Task) -> bool {
        self.returning[stage].binary_search(&(task.micro_batch, task.chunk)).is_ok()
    }

    pub(crate) fn in_flight(&self) -> &InFlight {
        &self.in_flight
    }
}

fn most_held(order: &[Task], chunks: usize) -> Holding {
    let mut now = Holding::none(chunks);
    let (mut most, mut most_total) = (now.clone(), 0);
    for task in order {
        if matches!(task.pass, StagePass::Backward | StagePass::InputGradient)
            && now.total() == most_total
            && most.backward.is_none()
        {
            most.backward = Some(task.chunk);
        }
        now.pass(task);
        if now.total() > most_total {
            most_total = now.total();
            most = Holding { forward: Some(task.chunk), ..now.clone() };
        }
    }
    most
}

/// Before the last pass on the way there: what follows it may be in another order where there are more micro-batches.
fn most_waiting(order: &[Task], chunks: usize) -> Holding {
    let last = order.iter().rposition(|task| task.pass == StagePass::Forward).map_or(0, |last| last + 1);
    let mut now = Holding::none(chunks);
    let mut most = now.clone();
    // Where there is no pass of its own for them, nothing waits.
    if order.iter().any(|task| task.pass == StagePass::WeightGradient) {
        for task in &order[..last] {
            now.pass(task);
            let counts = |holding: &Holding| (holding.waiting.iter().sum::<usize>(), holding.total());
            if counts(&now) > counts(&most) {
                most = now.clone();
            }
        }
    }
    most
}

impl Holding {
    fn none(chunks: usize) -> Self {
        Self { held: vec![0; chunks], waiting: vec![0; chunks], ..Self::default() }
    }

    /// Micro-batches on the way.
    fn total(&self) -> usize {
        self.held.iter().sum()
    }

    /// What is held after a task.
    fn pass(&mut self, task: &Task) {
        let (held, waiting) = (&mut self.held[task.chunk], &mut self.waiting[task.chunk]);
        match task.pass {
            StagePass::Forward => *held += 1,
            // Some of it may be over when only the parameters' gradients are left.
            StagePass::Backward | StagePass::InputGradient => {
                *held = held.saturating_sub(1);
                *waiting += usize::from(task.pass == StagePass::InputGradient);
            }
            StagePass::WeightGradient => *waiting = waiting.saturating_sub(1),
        }
    }
}

/// The pieces of a layout in the chunks of its pipeline.
pub(crate) struct Pieces<'a> {
    cutting: &'a Cutting,
    /// By the device's kind, and the chunk's.
    kinds: Vec<Vec<Piece>>,
    /// Of each stage, the place of its devices' kind among these.
    of_stage: &'a [usize],
    /// By the device's kind, what a byte on it counts.
    weights: &'a [f64],
    schedule: Schedule,
    stages: usize,
    chunks: usize,
    offloaded: Option<Offloaded<'a>>,
}

/// What lies on the hosts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Offloaded<'a> {
    pub(crate) what: Offload,
    /// By the device's kind, picoseconds in which it copies a byte to its host.
    pub(crate) paces: &'a [f64],
    /// Ranks that share out what the pieces have, at most.
    pub(crate) shards: usize,
    /// What the device with the least memory has.
    pub(crate) limit: f64,
}

/// Bytes that the states of a stage may be fewer than its pieces' together: buckets are rounded.
pub(crate) const UNEVEN: f64 = 65536.0;

/// Whether what comes after the last pass counts: ranks may share it out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Update {
    Counted,
    LeftOut,
}

impl<'a> Pieces<'a> {
    /// Those of a pipeline each of whose stages is on devices of one kind: `of_stage` says of which of the probes.
    pub(crate) fn new(
        probes: &[Arc<Probe>],
        of_stage: &'a [usize],
        weights: &'a [f64],
        cutting: &'a Cutting,
        schedule: Schedule,
        chunks: usize,
    ) -> Self {
        let stages = of_stage.len();
        let kinds = probes.iter().map(|probe| pieces_on(probe, cutting, schedule, stages, chunks)).collect();
        Self { cutting, kinds, of_stage, weights, schedule, stages, chunks, offloaded: None }
    }

    /// The same where something lies on the hosts, if it does.
    pub(crate) fn offloading(self, offloaded: Option<Offloaded<'a>>) -> Self {
        Self { offloaded, ..self }
    }

    /// Bytes of a stage's optimizer state that each rank has on its host at least.
    fn on_host(&self, stage: usize) -> f64 {
        let Some(offloaded) = self.offloaded.filter(|offloaded| offloaded.what.is_of_optimizer()) else { return 0.0 };
        let all: f64 = (0..self.chunks).map(|chunk| self.of(stage, chunk).kept.optimizer_state).sum();
        (all / offloaded.shards.max(1) as f64 - UNEVEN).max(0.0)
    }

    /// The least of what any rank has on its host.
    pub(crate) fn least_on_host(&self) -> f64 {
        (0..self.stages).map(|stage| self.on_host(stage)).reduce(f64::min).unwrap_or(0.0)
    }

    /// How long a stage's optimizer state takes back to the host. All of it goes there after the last pass, when it has been updated.
    fn copied(&self, stage: usize) -> f64 {
        self.on_host(stage) * self.pace_to_host(stage)
    }

    /// What micro-batches' activations take to the host and back, where they go there. Where a stage holds one at a time, what goes out
    /// last is what comes in first: so the way there ends, and the way back begins, no earlier than everything is out.
    fn returned(&self, stage: usize, micro_batches: usize) -> f64 {
        if !self.offloaded.is_some_and(|offloaded| offloaded.what.is_of_activations()) {
            return 0.0;
        }
        let pace = self.pace_to_host(stage);
        let returning = (0..self.chunks).map(|chunk| self.of(stage, chunk).returning);
        let of_each: f64 = if self.schedule.in_flight_bound(self.stages, micro_batches, self.chunks, stage) == 1 {
            returning.map(|one| one.forward.max(one.bytes * pace) + one.backward.max(one.bytes * pace)).sum()
        } else {
            returning.map(|one| one.bytes * pace).sum()
        };
        micro_batches as f64 * of_each
    }

    /// Picoseconds in which a stage's devices copy a byte to the host.
    fn pace_to_host(&self, stage: usize) -> f64 {
        self.offloaded.and_then(|offloaded| offloaded.paces.get(self.of_stage[stage]).copied()).unwrap_or(0.0)
    }

    /// Bytes that a pass leaves to go to the host: until they are there they lie on the device.
    fn leaves(&self, timetable: &Timetable, stage: usize, task: &Task) -> f64 {
        let is_meant = self.offloaded.is_some_and(|offloaded| offloaded.what.is_of_activations());
        if !is_meant || task.pass != StagePass::Forward {
            return 0.0;
        }
        let returning = self.of(stage, task.chunk).returning;
        let all_leave = timetable.alternates && !timetable.returns_at_once(stage, task);
        if all_leave { returning.of_all } else { returning.bytes }
    }

    /// Bytes that there is room for on a stage's devices beside what they keep.
    fn room(&self, stage: usize) -> f64 {
        let Some(offloaded) = self.offloaded else { return f64::INFINITY };
        let kept = |chunk: usize| {
            let kept = self.of(stage, chunk).kept;
            kept.total() - if offloaded.what.is_of_optimizer() { kept.optimizer_state } else { 0.0 }
        };
        let kept: f64 = (0..self.chunks).map(kept).sum();
        let weight = self.weights.get(self.of_stage[stage]).copied().unwrap_or(1.0);
        (offloaded.limit / weight - kept + UNEVEN).max(0.0)
    }

    pub(crate) fn of(&self, stage: usize, chunk: usize) -> &Piece {
        let position = self.schedule.position(self.stages, stage, chunk);
        &self.kinds[self.of_stage[stage]][self.cutting.of_position[position]]
    }

    /// What the launches of a micro-batch's passes through a chunk take. Between chunks of one stage there are no messages.
    fn launches(&self, stage: usize, chunk: usize) -> f64 {
        let position = self.schedule.position(self.stages, stage, chunk);
        let is_here =
            |other: usize| other < self.stages * self.chunks && self.schedule.place(self.stages, self.chunks, other).0 == stage;
        let piece = self.of(stage, chunk);
        let all = piece.forward.launches + piece.backward.launches + piece.weights.launches;
        let next = if is_here(position + 1) { piece.forward.of_sends + piece.backward.of_receives } else { 0.0 };
        let before =
            if position.checked_sub(1).is_some_and(is_here) { piece.forward.of_receives + piece.backward.of_sends } else { 0.0 };
        (all - next - before).max(0.0)
    }

    /// In closed form: of each stage, what passes before its first chunk on the way there, all its own passes, and what passes on the way back.
    pub(crate) fn least_time(&self, micro_batches: usize, update: Update) -> f64 {
        let share = if update == Update::Counted { 1.0 } else { 0.0 };
        let count = micro_batches as f64;
        let (mut there, mut back) = (0.0, 0.0);
        let mut most: f64 = 0.0;
        // The first chunks of the stages come first in the model, stage by stage.
        for stage in 0..self.stages {
            let (mut needed, mut all, mut launches, mut update) = (0.0, 0.0, 0.0, 0.0);
            let (mut sharing, mut alike) = (0.0, 0.0);
            for chunk in 0..self.chunks {
                let piece = self.of(stage, chunk);
                needed += piece.forward.free.busy + piece.backward.free.busy;
                all += piece.forward.free.busy + piece.backward.free.busy + piece.weights.free.busy;
                launches += self.launches(stage, chunk) * count;
                update += piece.update * share;
                sharing += piece.sharing.each * count + piece.sharing.once;
                alike += piece.alike.each * count + piece.alike.once;
            }
            let update = update.max(self.copied(stage));
            most = most.max(self.returned(stage, micro_batches));
            most =
                most.max(there + needed * count + back).max(there + all * count + update).max(launches).max(sharing).max(alike);
            let own = self.of(stage, 0);
            // What a pass does before it needs what it receives, as what it computes again, may be done by then.
            there += if stage == 0 { own.forward.free.passed } else { own.forward.arrival.passed };
            back += own.backward.arrival.passed;
        }
        most
    }

    /// What a stage's task takes by itself.
    pub(crate) fn window(&self, stage: usize, task: &Task) -> Window {
        let piece = self.of(stage, task.chunk);
        match task.pass {
            StagePass::Forward => piece.forward,
            StagePass::Backward | StagePass::InputGradient => piece.backward,
            StagePass::WeightGradient => piece.weights,
        }
    }

    /// The position in the model whose pass needs what a stage's task sends, and its stage, if it sends anything to another.
    pub(crate) fn receiver(&self, timetable: &Timetable, stage: usize, task: &Task) -> Option<(usize, usize)> {
        let Timetable { schedule, stages, chunks, .. } = timetable;
        let position = schedule.position(*stages, stage, task.chunk);
        let next = match task.pass {
            StagePass::Forward => Some(position + 1),
            StagePass::Backward | StagePass::InputGradient => position.checked_sub(1),
            StagePass::WeightGradient => None,
        };
        let next = next.filter(|&next| next < stages * chunks)?;
        Some((next, schedule.place(*stages, *chunks, next).0)).filter(|&(_, other)| other != stage)
    }

    /// What a stage does at least after the last kernel of its last pass.
    pub(crate) fn after_passes(&self, stage: usize) -> f64 {
        let update: f64 = (0..self.chunks).map(|chunk| self.of(stage, chunk).update).sum();
        update.max(self.copied(stage))
    }

    /// Pass by pass in the schedule's order, where messages between a stage and the next one round take so much longer than the pieces say.
    pub(crate) fn least_time_by_pass(&self, timetable: &Timetable, longer: &[f64]) -> f64 {
        let Timetable { schedule, stages, chunks, micro_batches, orders, .. } = timetable;
        let updates: Vec<f64> = (0..*stages).map(|stage| self.after_passes(stage)).collect();
        let most = Cell::new(self.least_time(*micro_batches, Update::Counted));
        // Until when exchanges that kernels wait for go on in each stage; zero where that is not known.
        let exchanged = vec![Cell::new(0.0f64); *stages];
        // Until when what passes have left by then goes to the host, at least, and for how long what there is room for on the device may be late.
        let leaving = vec![Cell::new(0.0f64); *stages];
        let late: Vec<f64> = (0..*stages).map(|stage| self.room(stage) * self.pace_to_host(stage)).collect();
        let times = |stage: usize, task: &Task, free: u64, ready: u64| {
            let (free_at, ready_at, exchanged_at) = (free as f64, ready as f64, exchanged[stage].get());
            let after = |beginning: f64, value: f64| if value > 0.0 { beginning + value } else { 0.0 };
            let latest = |window: &Window, value: fn(&Chain) -> f64| {
                let own = (free_at + value(&window.free)).max(ready_at + value(&window.arrival));
                own.max(after(exchanged_at, value(&window.exchange)))
            };
            let own = self.window(stage, task);
            let until = [(free_at, own.free), (ready_at, own.arrival), (exchanged_at, own.exchange)];
            let until = until.map(|(beginning, chain)| after(beginning, chain.exchanged));
            exchanged[stage].set(until.into_iter().fold(exchanged_at, f64::max));
            let (mut over, mut passed) = (latest(&own, |chain| chain.busy), latest(&own, |chain| chain.passed));
            if task.pass == StagePass::Forward && task.micro_batch == 0 {
                // What the chunk's parameters are gathered after.
                let gathered: f64 = (0..task.chunk).map(|chunk| self.of(stage, chunk).gathers).sum();
                let head = self.of(stage, task.chunk).head;
                (over, passed) = (over.max(gathered + head.busy), passed.max(gathered + head.passed));
            }
            let leaves = self.leaves(timetable, stage, task) * self.pace_to_host(stage);
            if leaves > 0.0 {
                leaving[stage].set(leaving[stage].get().max(free_at.max(ready_at)) + leaves);
                over = over.max(leaving[stage].get() - late[stage]);
            }
            // Within a stage the order of its list is enough.
            let receiver = self.receiver(timetable, stage, task);
            let passed = receiver.map_or(0.0, |(_, other)| passed + longer_between(longer, *stages, stage, other));
            if orders[stage].last() == Some(task) {
                let tail = latest(&self.of(stage, task.chunk).tail, |chain| chain.over);
                most.set(most.get().max(tail).max(over + updates[stage]));
            }
            PassTimes { start: free.max(ready), free: over as u64, passed: passed as u64 }
        };
        // Every schedule's lists end, so that all last passes are seen.
        let _ = pass_starts(*schedule, *stages, *chunks, orders, times);
        most.get()
    }

    /// The bytes, weighed by their devices, that the fullest stage holds at least: what it keeps, of which a stage of ZeRO shares out
    /// some among so many ranks of each, and the micro-batches that it has begun, with so many times the samples of the pieces'.
    pub(crate) fn least_memory(&self, in_flight: &InFlight, zero: usize, ranks: impl Fn(usize) -> usize, times: f64) -> f64 {
        let offload = self.offloaded.map_or(Offload::None, |offloaded| offloaded.what);
        let of_time = |stage: usize, holding: &Holding| -> f64 {
            let pieces: Vec<&Piece> = (0..self.chunks).map(|chunk| self.of(stage, chunk)).collect();
            let weight = self.weights.get(self.of_stage[stage]).copied().unwrap_or(1.0);
            stage_needs(&pieces, holding, zero, ranks(stage), times, offload) * weight
        };
        let times = |stage: usize| in_flight.0[stage].iter().map(move |holding| (stage, holding));
        (0..self.stages).flat_map(times).map(|(stage, holding)| of_time(stage, holding)).fold(0.0, f64::max)
    }
}

/// The bytes that a stage of these chunks holds at some time at least ([`Pieces::least_memory`]).
pub(crate) fn stage_needs(pieces: &[&Piece], holding: &Holding, zero: usize, ranks: usize, times: f64, offload: Offload) -> f64 {
    let Holding { held, waiting, forward, backward } = holding;
    // What is on its way to the host or back is not counted.
    let of_activations = if offload.is_of_activations() { 0.0 } else { 1.0 };
    let of_chunk = |(chunk, piece): (usize, &&Piece)| {
        let mut kept = piece.kept.shared_out(zero, ranks);
        if offload.is_of_optimizer() {
            kept.optimizer_state = 0.0;
        }
        let held = piece.held.between * held[chunk] as f64 + piece.held.for_weights * waiting[chunk] as f64;
        kept.total() + of_activations * times * held
    };
    // What a pass has beside that while it runs.
    let beside = |chunk: &Option<usize>, most: fn(Held) -> f64| {
        chunk.map_or(0.0, |chunk| most(pieces[chunk].held) - pieces[chunk].held.between)
    };
    let extra = beside(forward, |held| held.forward).max(beside(backward, |held| held.backward));
    let all: f64 = pieces.iter().enumerate().map(of_chunk).sum();
    // Beside a pass after which no other comes, gathered parameters go one after the other.
    let may_be_last = gathers_for_a_step(zero, ranks) && held.iter().sum::<usize>() <= 1;
    all + of_activations * if may_be_last { 0.0 } else { extra }
}

/// Every kind of chunk on devices of one kind.
fn pieces_on(probe: &Probe, cutting: &Cutting, schedule: Schedule, stages: usize, chunks: usize) -> Vec<Piece> {
    let mut kinds: Vec<Piece> =
        cutting.kinds.iter().map(|chunk| probe.chunk(chunk.layers, chunk.again, chunk.has_first, chunk.has_last)).collect();
    let stage_of = |position: usize| schedule.place(stages, chunks, position).0;
    let (end, is_cut) = (stages * chunks - 1, stages * chunks > 1);
    if let Some(&kind) = cutting.of_position.last().filter(|_| is_cut && stage_of(0) == stage_of(end)) {
        // Where the model's first and last blocks share a table, a stage that has both has it once: what the table adds to what is kept and updated is
        // counted with the first. Nor need the stage bring together what two have of the table's gradient, which follows the last pass; or is
        // part of it where the probe has one micro-batch, as much less than half of what the last block adds to the backward pass.
        let without = |kind: usize| probe.chunk(cutting.kinds[kind].layers, cutting.kinds[kind].again, false, false);
        let half = |without: f64, with: f64| 0.5 * (without + with);
        if let Some(&first) = cutting.of_position.first() {
            kinds[first].tail = without(first).tail;
        }
        let (without, last) = (without(kind), &mut kinds[kind]);
        if !probe.has_several_micro_batches {
            last.backward = without.backward.with(last.backward, half);
            last.weights = without.weights.with(last.weights, half);
        }
        (last.kept, last.update, last.tail) = (without.kept, without.update, without.tail);
    }
    kinds
}
