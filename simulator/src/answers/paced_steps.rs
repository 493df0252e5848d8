//! The step of an unsynchronised worker: its transfers and computations, and the links and
//! processors that they use.
//!
//! One simulated step of all workers together gives the computation of each while parameters
//! arrive, after that, and while gradients leave. The time of transfers depends on the activities
//! of other workers at that time, so transfers are flows on links here ([`super::paced_course`]).

use super::simulation::Options;
use crate::cost::{CostModel, Quantile};
use crate::engine::{ResolvedCosts, growth};
use crate::equivalence::{self, Folding};
use crate::error::SimulationError;
use crate::lowering::{Action, Channel, Lowered};
use crate::network::ResourceId;
use foretell_program::{Axis, Pacing, Phase, Program, Rank, Timeline};
use foretell_topologies::Topology;
use foretell_units::{Picoseconds, Seconds};

/// A computation or transfer, which takes longer while others use the same links or processors.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Activity {
    /// Seconds before it uses resources.
    pub(super) latency: f64,
    /// Seconds that it then takes alone.
    pub(super) seconds: f64,
    /// Resources, each with the amount that is used at full speed.
    pub(super) demands: Vec<(ResourceId, f64)>,
    /// Its weight in max-min sharing ([`crate::network::FairShare`]).
    pub(super) growth: f64,
    /// Whether it is a transfer of data, whose size is the same in each step.
    pub(super) is_flow: bool,
    /// The queue in which a flow waits for its turn; `None` without a queue.
    pub(super) queue: Option<QueuePlace>,
}

/// A flow's place in the queue of a link.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct QueuePlace {
    pub(super) link: ResourceId,
    /// Seconds that the bytes in flight (the window) take alone.
    pub(super) window: f64,
}

/// The bytes that a connection has in flight on a busy link. In a lab, whose sockets hold 1 MiB
/// including the kernel's overhead, a sender finished 33.5 ms before the last byte had crossed a
/// link of 25 MB/s. For other machines it is an assumption.
const IN_FLIGHT: f64 = 0.84e6;

/// The most turns of a flow. Larger flows have larger windows, so that simulating them does not
/// take longer.
const MOST_TURNS: f64 = 16.0;

impl Activity {
    /// An activity that takes `seconds` and shares no resources.
    pub(super) fn alone(seconds: f64) -> Self {
        Self { seconds, growth: 1.0, ..Self::default() }
    }

    /// The amount of a resource that it uses at full speed.
    pub(super) fn demand_of(&self, resource: ResourceId) -> f64 {
        self.demands.iter().filter(|&&(demand, _)| demand == resource).map(|&(_, demand)| demand).sum()
    }
}

/// The activities of a worker's step. Parts run one after the other, the activities of a part
/// together.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct WorkerStep {
    /// Pulling parameters, computing after the pull, waiting for other ranks of the worker, pushing
    /// gradients.
    pub(super) parts: [Vec<Activity>; 4],
    /// Seconds of the worker's turns at a server: `snapshot` copies the parameters, `update` adds
    /// or updates for each push that counts.
    pub(super) snapshot: f64,
    pub(super) update: f64,
}

/// The steps of all workers, and the capacities of the resources that they share.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct PacedSteps {
    pub(super) workers: Vec<WorkerStep>,
    pub(super) capacities: Vec<f64>,
}

/// The role of a rank.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    Server,
    /// A rank of the worker with this number.
    Worker(usize),
}

/// The kernels of a rank in the simulated step of all workers, in seconds that they take alone.
#[derive(Clone, Copy, Debug, Default)]
struct Kernels {
    beside_pull: f64,
    between: f64,
    beside_push: f64,
    /// The time of that step in which the rank neither transfers nor computes.
    waits: f64,
}

impl PacedSteps {
    /// Reads the steps from one simulated step that all workers begin together.
    ///
    /// # Errors
    /// [`SimulationError`] if the Program does not fit the topology.
    pub(super) fn new(
        program: &Program,
        topology: &Topology,
        costs: &CostModel,
        options: &Options,
        timeline: &Timeline,
        pacing: Pacing,
    ) -> Result<Self, SimulationError> {
        let paces = mean_paces(program, costs, options);
        let modes = (options.oversubscription, options.collectives);
        let lowered = equivalence::lower(program, topology, costs, modes, Folding::Off, &paces)?;
        let roles: Vec<Role> = (0..program.mesh.world_size()).map(|rank| role(program, Rank(rank))).collect();
        let reader = Reader { costs: ResolvedCosts::new(&lowered, Quantile::Median), lowered: &lowered, roles, paces, timeline };
        let mut workers: Vec<WorkerStep> = (0..pacing.workers).map(|worker| reader.worker(worker)).collect();
        let (snapshot, update) = reader.turns(pacing.workers);
        workers.iter_mut().for_each(|worker| (worker.snapshot, worker.update) = (snapshot, update));
        let mut steps = Self { workers, capacities: lowered.capacities.clone() };
        steps.queue_flows(&lowered.has_queue);
        Ok(steps)
    }

    /// Assigns each flow to the queue of the busiest network link on its route, if it has one.
    fn queue_flows(&mut self, has_queue: &[bool]) {
        let mut busy = vec![0.0; self.capacities.len()];
        let flows = self.workers.iter().flat_map(|worker| worker.parts.iter().flatten()).filter(|worker| worker.is_flow);
        for (&(resource, demand), flow) in flows.flat_map(|flow| flow.demands.iter().map(move |demand| (demand, flow))) {
            busy[resource as usize] += demand * flow.seconds / self.capacities[resource as usize];
        }
        for flow in self.workers.iter_mut().flat_map(|worker| worker.parts.iter_mut().flatten()).filter(|worker| worker.is_flow) {
            let links = flow.demands.iter().filter(|&&(link, _)| has_queue.get(link as usize) == Some(&true));
            // Among equally busy links, take the first.
            let busiest = links.rev().max_by(|(link, _), (other, _)| busy[*link as usize].total_cmp(&busy[*other as usize]));
            let place = |&(link, demand): &(ResourceId, f64)| QueuePlace {
                link,
                window: (IN_FLIGHT / demand).max(flow.seconds / MOST_TURNS),
            };
            flow.queue = busiest.map(place);
        }
    }
}

/// The factor by which each rank's device is slower than its costs on average, as in the steps of a
/// prediction.
pub(super) fn mean_paces(program: &Program, costs: &CostModel, options: &Options) -> Vec<f64> {
    let observed = &options.observed_paces;
    let mut paces = options.disturbance.paces(program.mesh.world_size());
    paces.resize(program.mesh.world_size(), 1.0);
    for (rank, pace) in paces.iter_mut().enumerate() {
        *pace *= mean(costs.paces.iter().copied());
        *pace *= mean(observed.iter().filter_map(|of_step| of_step.get(rank).copied()));
    }
    paces
}

/// The mean; 1 without values.
fn mean(values: impl Iterator<Item = f64>) -> f64 {
    let (sum, count) = values.fold((0.0, 0_u32), |(sum, count), value| (sum + value, count + 1));
    if count > 0 { sum / f64::from(count) } else { 1.0 }
}

/// Returns the role of a rank. It is a server if its list has no passes and loads nothing.
pub(super) fn role(program: &Program, rank: Rank) -> Role {
    let list = program.list_of(rank);
    let loads =
        list.instructions.iter().any(|instruction| matches!(*instruction.operation, foretell_program::Operation::Load { .. }));
    match list.passes.is_empty() && !loads {
        true => Role::Server,
        false => Role::Worker(program.mesh.coordinates(rank).along(Axis::Data)),
    }
}

struct Reader<'a> {
    lowered: &'a Lowered<'a>,
    costs: ResolvedCosts<'a>,
    roles: Vec<Role>,
    paces: Vec<f64>,
    timeline: &'a Timeline,
}

impl Reader<'_> {
    /// The step of a worker. Its computation is that of the rank that ends last.
    fn worker(&self, worker: usize) -> WorkerStep {
        let ranks = (0..self.roles.len()).filter(|&rank| self.roles[rank] == Role::Worker(worker));
        let Some(last) = ranks.max_by_key(|&rank| (self.timeline.ranks[rank].end, std::cmp::Reverse(rank))) else {
            return WorkerStep::default();
        };
        let Kernels { beside_pull, between, beside_push, waits } = self.kernels(last);
        let (processor, share) = self.costs.processor(self.lowered, last as u32);
        let computing = |seconds: f64| {
            let demands = if share > 0.0 { vec![(processor, share)] } else { Vec::new() };
            (seconds > 0.0).then_some(Activity { demands, ..Activity::alone(seconds) })
        };
        let (mut pull, mut push) = (Vec::new(), Vec::new());
        for (number, channel) in self.lowered.channels.iter().enumerate() {
            match self.ends(channel) {
                (Role::Server, Role::Worker(one)) if one == worker => pull.push(self.flow(number, channel)),
                (Role::Worker(one), Role::Server) if one == worker => push.push(self.flow(number, channel)),
                _ => {}
            }
        }
        pull.extend(computing(beside_pull));
        push.extend(computing(beside_push));
        let waiting = Some(Activity::alone(waits)).filter(|part| part.seconds > 0.0);
        let parts = [pull, computing(between).into_iter().collect(), waiting.into_iter().collect(), push];
        WorkerStep { parts, ..WorkerStep::default() }
    }

    fn ends(&self, channel: &Channel) -> (Role, Role) {
        (self.roles[channel.sender as usize], self.roles[channel.receiver as usize])
    }

    /// All messages of a channel in a step, as one flow.
    fn flow(&self, number: usize, channel: &Channel) -> Activity {
        let communicator = (self.lowered.groups.len() + number) as u32;
        let (mut latency, mut seconds, mut bytes) = (Seconds::ZERO, Seconds::ZERO, 0.0);
        let (mut of_processors, mut largest_share) = ([0.0; 2], 0.0_f64);
        let ends = [channel.sender, channel.receiver];
        let mut processors = [0; 2];
        for nth in 0..channel.bytes.len() {
            let cost = self.costs.of(communicator, channel.bytes.index(nth));
            latency += cost.latency.into();
            seconds += cost.flow.into();
            bytes += cost.bytes;
            for (end, rank) in ends.into_iter().enumerate() {
                let (processor, share) = self.costs.processor_share(self.lowered, cost, rank);
                processors[end] = processor;
                of_processors[end] += share * Seconds::from(cost.flow).value();
                largest_share = largest_share.max(share);
            }
        }
        let loads = &channel.shape.loads;
        let on_link = |&(link, load): &(usize, f64)| load * bytes / self.lowered.capacities[link];
        // A burst in one step may exceed the link's rate, but the mean over steps may not.
        let seconds = loads.iter().map(on_link).fold(seconds.value(), f64::max);
        let of_seconds = |used: f64| if seconds > 0.0 { used / seconds } else { 0.0 };
        let links = loads.iter().map(|&(link, load)| (link as ResourceId, of_seconds(load * bytes)));
        let processors = processors.into_iter().zip(of_processors.map(of_seconds));
        let demands = links.chain(processors).filter(|&(_, used)| used > 0.0).collect();
        let kind = self.lowered.ranks[channel.sender as usize].kind;
        let growth = growth(self.lowered, Some(kind), largest_share);
        Activity { latency: latency.value(), seconds, demands, growth, is_flow: true, queue: None }
    }

    /// The kernels of a rank, by what they overlap in the simulated step.
    fn kernels(&self, rank: usize) -> Kernels {
        let (list, times) = self.lowered.list_and_times(rank);
        let own = &self.lowered.ranks[rank];
        let spans = &self.timeline.ranks[rank].spans;
        let end = self.timeline.ranks[rank].end;
        let slower = self.paces.get(rank).copied().unwrap_or(1.0) / self.lowered.quota(own).unwrap_or(1.0);
        let is_server = |peer: &u32, ends: &dyn Fn(&Channel) -> u32| {
            self.roles[ends(&self.lowered.channels[*peer as usize]) as usize] == Role::Server
        };
        let (mut pulled, mut pushes) = (Picoseconds::ZERO, end);
        let mut interruptions = 0;
        for (action, span) in list.actions.iter().zip(spans) {
            match *action {
                Action::Receive { peer, .. } if is_server(&own.receives[peer as usize], &|channel| channel.sender) => {
                    pulled = pulled.max(span.end);
                    interruptions += 1;
                }
                Action::Send { peer, .. } if is_server(&own.sends[peer as usize], &|channel| channel.receiver) => {
                    pushes = pushes.min(span.start);
                }
                _ => {}
            }
        }
        let mut kernels = Kernels::default();
        let mut busy_between = Picoseconds::ZERO;
        for ((index, action), span) in (0..).zip(&list.actions).zip(spans) {
            if !matches!(action, Action::Compute | Action::Load | Action::Copy) {
                continue;
            }
            let seconds = Seconds::from(times.duration(list, index, Quantile::Median)).value() * slower;
            let middle = Picoseconds(span.start.0.midpoint(span.end.0));
            if middle >= pushes {
                kernels.beside_push += seconds;
            } else if middle < pulled {
                kernels.beside_pull += seconds;
            } else {
                kernels.between += seconds;
                busy_between += span.duration();
            }
        }
        let interruption = self.lowered.costs.parameters(own.kind).interruption.value();
        kernels.beside_pull += interruption * f64::from(interruptions);
        kernels.waits = Seconds::from(pushes.saturating_sub(pulled).saturating_sub(busy_between)).value();
        kernels
    }

    /// The seconds of the slowest server for one worker's copy of the parameters, and for adding
    /// and updating with one push.
    fn turns(&self, workers: usize) -> (f64, f64) {
        let mut slowest = [0.0_f64; 2];
        for rank in (0..self.roles.len()).filter(|&rank| self.roles[rank] == Role::Server) {
            let (list, times) = self.lowered.list_and_times(rank);
            for (of_phase, phase) in slowest.iter_mut().zip([Phase::Forward, Phase::Update]) {
                let is_of_phase = |index: &u32| {
                    matches!(list.actions[*index as usize], Action::Compute) && list.phases[*index as usize] == phase
                };
                let each = (0..list.actions.len() as u32).filter(is_of_phase);
                let sum: f64 = each.map(|index| Seconds::from(times.duration(list, index, Quantile::Median)).value()).sum();
                *of_phase = of_phase.max(sum * self.paces.get(rank).copied().unwrap_or(1.0) / workers as f64);
            }
        }
        (slowest[0], slowest[1])
    }
}
