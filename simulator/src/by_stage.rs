//! One step of a Program in which all ranks of a stage behave alike, simulated with one rank a stage.
//!
//! Devices of one kind, a network that treats all groups of an axis alike and the same list for every rank of a stage: then every member of a
//! collective reaches it at the same instant, and one rank tells what all do. That is exact as long as those three hold; it does not
//! see stragglers, groups that lie differently on nodes (the group of the stage's first rank stands for all), or flows of different axes that
//! meet on a link. For those there is [`crate::simulate`].
//!
//! The host of each rank launches its kernels in order and runs ahead of the device where it can: small kernels wait for it.
//!
//! The stack says which communication blocks kernels: that runs in the kernels' lane, in the Program's order. What does not has a lane of its
//! own, and slows kernels and is slowed by them while both run.

use crate::gpu::{GpuCosts, Reachable};
use foretell_program::{Axis, Collective, Group, Mesh, Operation, Phase, Program, Rank, StageProgram, Stream};
use foretell_units::{Picoseconds, Seconds};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, HashMap};
use thiserror::Error;

/// Why a Program cannot be simulated by one rank a stage.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum StageSimulationError {
    /// Ranks of one stage do not do alike.
    #[error("the ranks of {stages} stages run {lists} lists: they do not do alike; hint: simulate every rank")]
    Unlike {
        /// Lists of instructions.
        lists: usize,
        /// Stages.
        stages: usize,
    },
    /// Instructions wait for each other in a circle.
    #[error("a deadlock: {unfinished} instructions wait for each other")]
    Deadlock {
        /// How many never ran.
        unfinished: usize,
    },
}

/// What a step of the representative ranks takes.
#[derive(Clone, Debug, PartialEq)]
pub struct StageStep {
    /// From the first instruction to the end of the last stage's last.
    pub step: Seconds,
    /// Time in kernels, by stage.
    pub compute: Vec<Seconds>,
    /// Time in which a collective or a send ran in the kernels' lane, by stage.
    pub blocked: Vec<Seconds>,
    /// Instructions run.
    pub events: u64,
}

/// A lane: one thing at a time, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Lane {
    Compute,
    Group(u16),
    Gradients,
    SendTo(usize),
    ReceiveFrom(usize),
    Load,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Work {
    /// A kernel of so long.
    Kernel(Picoseconds),
    /// An exchange within the stage.
    Exchange(Picoseconds),
    /// With the same collective of other stages.
    Together { exchange: u32, duration: Picoseconds },
    /// Arrives at the other side when it ends.
    Send { message: u32, duration: Picoseconds },
    /// Ends when the message is there.
    Receive { message: u32 },
}

struct Step {
    work: Work,
    lane: u16,
    /// What the host takes to launch it; of the kernels' lane only.
    host: Picoseconds,
    /// Whether the host waits for the device before it launches it.
    waits: bool,
}

struct Stage {
    steps: Vec<Step>,
    successors: Successors,
    waits_for: Vec<u32>,
    lanes: usize,
}

/// Who waits for each step, all in one list.
struct Successors {
    /// Where each step's begin in `all`, and where the last's end.
    first: Vec<u32>,
    all: Vec<u32>,
}

impl Successors {
    /// From pairs of who is waited for and who waits, in the order of the latter.
    fn of(steps: usize, pairs: &[(u32, u32)]) -> Self {
        let mut first = vec![0u32; steps + 1];
        for (before, _) in pairs {
            first[*before as usize + 1] += 1;
        }
        for step in 0..steps {
            first[step + 1] += first[step];
        }
        let mut next = first.clone();
        let mut all = vec![0u32; pairs.len()];
        for (before, after) in pairs {
            let place = &mut next[*before as usize];
            all[*place as usize] = *after;
            *place += 1;
        }
        Self { first, all }
    }

    fn of_step(&self, step: usize) -> &[u32] {
        &self.all[self.first[step] as usize..self.first[step + 1] as usize]
    }
}

/// Simulates one step of `program` by one rank a stage. `costs` says what a stage runs on: where its ranks have devices of several kinds, the
/// slowest, for which the others wait.
///
/// # Errors
/// [`StageSimulationError::Deadlock`] where the Program's instructions wait for each other.
pub fn simulate_by_stage<'a>(
    program: &Program,
    costs: impl Fn(usize) -> GpuCosts<'a>,
) -> Result<StageStep, StageSimulationError> {
    if program.lists.len() != program.mesh.stage_count() {
        return Err(StageSimulationError::Unlike { lists: program.lists.len(), stages: program.mesh.stage_count() });
    }
    let mut messages = Messages::default();
    let stages: Vec<Stage> =
        program.lists.iter().map(|stage| lower(stage, program, &costs(stage.stage), &mut messages)).collect();
    Run::new(&stages, &messages, &costs(0)).run()
}

/// Messages and collectives that join stages, numbered as they are met.
#[derive(Default)]
struct Messages {
    /// By sender, receiver and the how-many-eth.
    numbers: HashMap<(usize, usize, u32), u32>,
    /// By the stages that take part and the how-many-eth: number, and how many take part.
    exchanges: HashMap<(Vec<usize>, u32), u32>,
    participants: Vec<usize>,
}

impl Messages {
    fn message(&mut self, from: usize, to: usize, nth: u32) -> u32 {
        let next = self.numbers.len() as u32;
        *self.numbers.entry((from, to, nth)).or_insert(next)
    }

    fn exchange(&mut self, stages: &[usize], nth: u32) -> u32 {
        let next = self.exchanges.len() as u32;
        let number = *self.exchanges.entry((stages.to_vec(), nth)).or_insert(next);
        if number == next {
            self.participants.push(stages.len());
        }
        number
    }
}

/// The stage's first rank stands for all.
fn first_rank(mesh: &Mesh, stage: usize) -> Rank {
    mesh.rank(mesh.coordinates(Rank(0)).with(Axis::Pipeline, stage))
}

fn lower(stage: &StageProgram, program: &Program, costs: &GpuCosts, messages: &mut Messages) -> Stage {
    let mesh = &program.mesh;
    let rank = first_rank(mesh, stage.stage);
    let reachable: Vec<Reachable> = stage.groups.iter().map(|group| Reachable::of(group, mesh, rank, costs.cluster)).collect();
    let overlap = &costs.stack.overlap;
    let mut kernels: HashMap<(foretell_models::Kernel, bool, bool), [Picoseconds; 2]> = HashMap::new();
    let mut lanes: Vec<Lane> = vec![Lane::Compute];
    let mut sent: BTreeMap<usize, u32> = BTreeMap::new();
    let mut received: BTreeMap<usize, u32> = BTreeMap::new();
    let mut crossed: BTreeMap<Vec<usize>, u32> = BTreeMap::new();
    let mut last_backward = None;
    let mut steps: Vec<Step> = Vec::with_capacity(stage.instructions.len());
    let mut deferred = Vec::new();
    let exchange_launch = costs.exchange_launch();
    let mut pass = None;
    for (index, instruction) in (0u32..).zip(&stage.instructions) {
        let launch_share = costs.launch_share(instruction.phase);
        let mut host = Picoseconds::from(exchange_launch * launch_share);
        let mut waits = false;
        let (lane, work) = match &instruction.operation {
            Operation::Compute { kernel, accumulate, group } => {
                if instruction.phase == Phase::Backward || instruction.phase == Phase::Recompute {
                    last_backward = Some(index);
                }
                let index_in_group = group.map_or(0, |group| {
                    // Of ranks whose parts differ (causal attention over `context`) the mean has half of the sequence before it;
                    // frameworks that balance parts give every rank that.
                    reachable[group.0 as usize].members / 2
                });
                let kernel = kernel.without_constants();
                let [duration, launch] =
                    *kernels.entry((kernel, *accumulate, instruction.phase == Phase::Backward)).or_insert_with(|| {
                        let time = costs.kernel_time(&kernel.for_member(index_in_group), *accumulate, program.precision);
                        [time.device.into(), (time.host * launch_share).into()]
                    });
                host = launch;
                let this = (instruction.phase == Phase::Forward, instruction.micro_batch);
                if costs.stack.waits_between_passes && instruction.phase != Phase::Update && pass != Some(this) {
                    (waits, pass) = (true, Some(this));
                }
                (Lane::Compute, Work::Kernel(duration))
            }
            Operation::Collective { kind, group, bytes, role: stated, .. } => {
                let place = &stage.groups[group.0 as usize];
                let role = role(*kind, place, instruction.phase);
                let duration =
                    Picoseconds::from(costs.collective_time(*kind, *stated, &reachable[group.0 as usize], bytes.value()));
                let is_beside = match role {
                    Role::Tensor => overlap.tensor,
                    Role::Context => overlap.context,
                    Role::Expert => overlap.expert,
                    Role::Gradients => overlap.gradients,
                    Role::Parameters => overlap.parameters,
                };
                let lane = match role {
                    _ if is_beside => Lane::Group(group.0),
                    Role::Gradients if instruction.phase == Phase::Update => {
                        deferred.push(index);
                        Lane::Gradients
                    }
                    _ => Lane::Compute,
                };
                if place.axes.contains(&Axis::Pipeline) {
                    let nth = crossed.entry(place.stages.clone()).or_default();
                    let exchange = messages.exchange(&place.stages, *nth);
                    *nth += 1;
                    (lane, Work::Together { exchange, duration })
                } else {
                    (lane, Work::Exchange(duration))
                }
            }
            Operation::Send { peer, bytes } => {
                let to = stage.peers[peer.0 as usize].stage;
                let nth = sent.entry(to).or_default();
                let message = messages.message(stage.stage, to, *nth);
                *nth += 1;
                let ranks = Group::across(vec![stage.stage.min(to), stage.stage.max(to)]);
                let path = Reachable::of(&ranks, mesh, rank, costs.cluster);
                let size = bytes.value() * costs.stack.message_scale;
                let duration = Picoseconds::from(path.message(size, costs.cluster) * costs.stack.communication);
                let lane = if overlap.pipeline { Lane::SendTo(to) } else { Lane::Compute };
                (lane, Work::Send { message, duration })
            }
            Operation::Receive { peer, .. } => {
                let from = stage.peers[peer.0 as usize].stage;
                let nth = received.entry(from).or_default();
                let message = messages.message(from, stage.stage, *nth);
                *nth += 1;
                (Lane::ReceiveFrom(from), Work::Receive { message })
            }
            Operation::Load { .. } => (Lane::Load, Work::Exchange(Picoseconds::ZERO)),
        };
        let lane = lanes.iter().position(|&known| known == lane).unwrap_or_else(|| {
            lanes.push(lane);
            lanes.len() - 1
        });
        steps.push(Step { work, lane: lane as u16, host, waits });
    }
    let (waits_for, successors) = connect(stage, &steps, lanes.len(), last_backward, &deferred);
    Stage { steps, successors, waits_for, lanes: lanes.len() }
}

/// What a collective is for, which decides whether a framework lets kernels go on beside it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    Tensor,
    Context,
    Expert,
    Gradients,
    Parameters,
}

fn role(kind: Collective, group: &Group, phase: Phase) -> Role {
    if phase != Phase::Update {
        match group.axes.as_slice() {
            [Axis::Tensor] => return Role::Tensor,
            [Axis::Context] => return Role::Context,
            [Axis::Expert] if kind == Collective::AllToAll => return Role::Expert,
            _ if kind == Collective::AllToAll => return Role::Expert,
            _ => {}
        }
    }
    if kind == Collective::AllGather { Role::Parameters } else { Role::Gradients }
}

/// Who waits for whom: the Program's dependencies, the order within a lane and, for reductions that a framework defers, the last kernel of
/// the backward pass.
fn connect(
    stage: &StageProgram,
    steps: &[Step],
    lanes: usize,
    last_backward: Option<u32>,
    deferred: &[u32],
) -> (Vec<u32>, Successors) {
    let mut pairs: Vec<(u32, u32)> = Vec::with_capacity(2 * steps.len());
    let mut before: Vec<u32> = Vec::new();
    let mut waits_for = vec![0u32; steps.len()];
    let mut last_in_lane: Vec<Option<u32>> = vec![None; lanes];
    let mut last_in_stream: Vec<Option<u32>> = vec![None; stage.streams.len()];
    for index in 0..steps.len() {
        let instruction = &stage.instructions[index];
        let lane = steps[index].lane as usize;
        let stream = instruction.stream.0 as usize;
        let is_deferred = deferred.binary_search(&(index as u32)).is_ok();
        // Order within a stream is the Program's promise; a group's stream that a stack lays into several lanes keeps it, but for sends and
        // receives, which their channel orders.
        let in_stream = last_in_stream[stream].filter(|_| !matches!(stage.streams[stream], Stream::Compute));
        before.clear();
        before.extend(instruction.after.iter().map(|one| one.0));
        before.extend(last_in_lane[lane]);
        before.extend(in_stream.filter(|_| !is_deferred));
        if is_deferred {
            before.extend(last_backward);
        }
        before.sort_unstable();
        before.dedup();
        for &one in &before {
            if one as usize != index {
                pairs.push((one, index as u32));
                waits_for[index] += 1;
            }
        }
        last_in_lane[lane] = Some(index as u32);
        if !is_deferred {
            last_in_stream[stream] = Some(index as u32);
        }
    }
    let successors = Successors::of(steps.len(), &pairs);
    (waits_for, successors)
}

/// Something that runs.
#[derive(Clone, Copy, Debug)]
struct Running {
    step: u32,
    /// Picoseconds of work left at `since`.
    left: f64,
    rate: f64,
    since: Picoseconds,
    generation: u32,
}

/// An event: when, in which order of those at the same time, the stage, its lane, and the generation that it was foretold in.
type Event = Reverse<(Picoseconds, u64, u32, u16, u32)>;

struct Run<'a> {
    stages: &'a [Stage],
    participants: &'a [usize],
    slowdowns: [f64; 2],
    now: Picoseconds,
    events: BinaryHeap<Event>,
    sequence: u64,
    waits_for: Vec<Vec<u32>>,
    running: Vec<Vec<Option<Running>>>,
    generations: Vec<Vec<u32>>,
    /// Messages that have arrived, and receivers that wait: stage and instruction.
    arrived: Vec<bool>,
    waiting: Vec<Option<(u32, u32)>>,
    /// Who has reached a collective of several stages.
    gathered: Vec<Vec<(u32, u32)>>,
    ready: Vec<(u32, u32)>,
    unfinished: usize,
    /// When each stage's host has launched what it has launched.
    host: Vec<Picoseconds>,
    waits_for_messages: bool,
    compute: Vec<Picoseconds>,
    blocked: Vec<Picoseconds>,
    handled: u64,
}

impl<'a> Run<'a> {
    fn new(stages: &'a [Stage], messages: &'a Messages, costs: &GpuCosts) -> Self {
        Self {
            stages,
            participants: &messages.participants,
            slowdowns: [1.0 / (1.0 + costs.stack.compute_slowdown), 1.0 / (1.0 + costs.stack.communication_slowdown)],
            now: Picoseconds::ZERO,
            events: BinaryHeap::new(),
            sequence: 0,
            waits_for: stages.iter().map(|stage| stage.waits_for.clone()).collect(),
            running: stages.iter().map(|stage| vec![None; stage.lanes]).collect(),
            generations: stages.iter().map(|stage| vec![0; stage.lanes]).collect(),
            arrived: vec![false; messages.numbers.len()],
            waiting: vec![None; messages.numbers.len()],
            gathered: vec![Vec::new(); messages.participants.len()],
            ready: Vec::new(),
            unfinished: stages.iter().map(|stage| stage.steps.len()).sum(),
            host: vec![Picoseconds::ZERO; stages.len()],
            waits_for_messages: costs.stack.waits_for_messages,
            compute: vec![Picoseconds::ZERO; stages.len()],
            blocked: vec![Picoseconds::ZERO; stages.len()],
            handled: 0,
        }
    }

    fn run(mut self) -> Result<StageStep, StageSimulationError> {
        for (stage, waits_for) in (0u32..).zip(&self.waits_for) {
            self.ready.extend((0u32..).zip(waits_for).filter(|(_, count)| **count == 0).map(|(step, _)| (stage, step)));
        }
        self.ready.reverse();
        self.start_ready();
        while let Some(Reverse((time, _, stage, lane, generation))) = self.events.pop() {
            let (stage, lane) = (stage as usize, lane as usize);
            let Some(running) = self.running[stage][lane].filter(|running| running.generation == generation) else { continue };
            self.now = time;
            self.running[stage][lane] = None;
            self.end(stage, running.step);
            self.start_ready();
            self.share(stage);
        }
        if self.unfinished > 0 {
            return Err(StageSimulationError::Deadlock { unfinished: self.unfinished });
        }
        let seconds = |times: Vec<Picoseconds>| times.into_iter().map(Seconds::from).collect();
        Ok(StageStep {
            step: self.now.into(),
            compute: seconds(self.compute),
            blocked: seconds(self.blocked),
            events: self.handled,
        })
    }

    fn start_ready(&mut self) {
        while let Some((stage, step)) = self.ready.pop() {
            self.start(stage, step);
        }
    }

    fn start(&mut self, stage: u32, step: u32) {
        match self.stages[stage as usize].steps[step as usize].work {
            Work::Kernel(duration) | Work::Exchange(duration) => self.begin(stage, step, duration),
            Work::Send { duration, .. } => self.begin(stage, step, duration),
            Work::Receive { message } => {
                if self.arrived[message as usize] {
                    self.end(stage as usize, step);
                } else {
                    self.waiting[message as usize] = Some((stage, step));
                }
            }
            Work::Together { exchange, duration } => {
                let gathered = &mut self.gathered[exchange as usize];
                gathered.push((stage, step));
                if gathered.len() == self.participants[exchange as usize] {
                    for (stage, step) in std::mem::take(gathered) {
                        self.begin(stage, step, duration);
                    }
                }
            }
        }
    }

    fn begin(&mut self, stage: u32, step: u32, duration: Picoseconds) {
        let index = stage as usize;
        let one = &self.stages[index].steps[step as usize];
        let lane = one.lane as usize;
        // The host launches the kernels' lane in its order, ahead of the device where it can; a kernel waits for its launch.
        let mut late = Picoseconds::ZERO;
        if lane == 0 {
            if one.waits {
                self.host[index] = self.host[index].max(self.now);
            }
            self.host[index] += one.host;
            late = self.host[index].saturating_sub(self.now);
        }
        if duration + late == Picoseconds::ZERO {
            self.end(index, step);
            return;
        }
        if lane == 0 {
            let time = match one.work {
                Work::Kernel(_) => &mut self.compute[index],
                _ => &mut self.blocked[index],
            };
            *time += duration;
        }
        self.generations[index][lane] += 1;
        let generation = self.generations[index][lane];
        self.running[index][lane] =
            Some(Running { step, left: (duration + late).0 as f64, rate: 0.0, since: self.now, generation });
        self.share(index);
    }

    /// The rates of what runs on a stage: kernels beside communication, and the reverse, are slower.
    fn share(&mut self, stage: usize) {
        let running = &mut self.running[stage];
        let computes = running[0].is_some();
        let communicates = running.iter().skip(1).any(Option::is_some);
        for (lane, slot) in (0u16..).zip(running.iter_mut()) {
            let Some(one) = slot else { continue };
            let rate = match lane {
                0 if communicates => self.slowdowns[0],
                0 => 1.0,
                _ if computes => self.slowdowns[1],
                _ => 1.0,
            };
            if rate == one.rate {
                continue;
            }
            one.left = (one.left - one.rate * self.now.saturating_sub(one.since).0 as f64).max(0.0);
            one.since = self.now;
            one.rate = rate;
            self.generations[stage][lane as usize] += 1;
            one.generation = self.generations[stage][lane as usize];
            let end = self.now + Picoseconds((one.left / rate).ceil() as u64);
            self.sequence += 1;
            self.events.push(Reverse((end, self.sequence, stage as u32, lane, one.generation)));
        }
    }

    fn end(&mut self, stage: usize, step: u32) {
        self.handled += 1;
        self.unfinished -= 1;
        let stages = self.stages;
        let one = &stages[stage].steps[step as usize];
        if self.waits_for_messages && matches!(one.work, Work::Receive { .. }) {
            self.host[stage] = self.host[stage].max(self.now);
        }
        if let Work::Send { message, .. } = one.work {
            self.arrived[message as usize] = true;
            if let Some((receiver, receive)) = self.waiting[message as usize].take() {
                self.end(receiver as usize, receive);
            }
        }
        for &successor in stages[stage].successors.of_step(step as usize) {
            let count = &mut self.waits_for[stage][successor as usize];
            *count -= 1;
            if *count == 0 {
                self.ready.push((stage as u32, successor));
            }
        }
    }
}
