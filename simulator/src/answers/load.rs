//! The load of parameter servers and links: the share of the time for which each is busy.
//!
//! It sums the bytes and the computation of a step, whenever they occur. So it holds for
//! unsynchronised workers too, each of which makes steps at its own rate.

use super::paced::PacedPrediction;
use super::paced_steps::{Role, mean_paces, role};
use super::simulation::Options;
use crate::cost::{CommunicationCost, CostModel, Quantile};
use crate::engine::processor_share;
use crate::equivalence;
use crate::error::SimulationError;
use crate::lowering::{Action, Lowered};
use crate::network::{Shape, capacity};
use foretell_program::Program;
use foretell_topologies::Topology;
use foretell_units::Seconds;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The most links that an answer lists.
const MOST_LINKS: usize = 64;

/// The load of servers and links.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Load {
    /// The ranks that are parameter servers only; the first of each set of equivalent ranks.
    pub servers: Vec<ServerLoad>,
    /// The links that carry data, the busiest first, at most 64; the first of each set of
    /// equivalent links.
    pub links: Vec<LinkLoad>,
}

/// The load of a parameter server.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ServerLoad {
    /// Its rank.
    pub rank: usize,
    /// The share of the time for which its processor computes or moves messages.
    pub busy: f64,
}

/// The load of a link.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct LinkLoad {
    /// Its name in the topology. Links have one direction.
    pub link: String,
    /// Its mean rate over its full rate.
    pub busy: f64,
}

/// Returns the load by the Programs of a cycle, each with the number of its steps in the cycle.
/// `step` is the predicted time of the mean step, `paces` the prediction of unsynchronised workers.
///
/// # Errors
/// [`SimulationError`] if a Program does not fit the topology.
pub fn load(
    steps: &[(&Program, usize)],
    topology: &Topology,
    costs: &CostModel,
    options: &Options,
    (step, paces): (Seconds, Option<&PacedPrediction>),
) -> Result<Load, SimulationError> {
    let total: usize = steps.iter().map(|(_, count)| count).sum();
    let mut work = Work::default();
    for &(program, count) in steps {
        let own_paces = options.disturbance.paces(program.mesh.world_size());
        let lowered = equivalence::lower_by_topology(program, topology, costs, options.oversubscription, &own_paces)?;
        let slower = mean_paces(program, costs, options);
        let counter = Counter { program, topology, lowered: &lowered, slower, step, paces };
        counter.add_to(&mut work, count as f64 / total.max(1) as f64);
    }
    let step = step.value();
    let share = |seconds: f64| if step > 0.0 { (seconds / step).min(1.0) } else { 0.0 };
    // The load of unsynchronised workers' turns comes from the simulation of many steps, since late
    // pushes may do nothing.
    let busiest = work.servers.values().map(|[computes, _]| *computes).fold(0.0, f64::max);
    let of_turns = paces.filter(|_| busiest > 0.0).map(|paces| paces.server_load * step / busiest);
    let server = |(&rank, &[computes, moves]): (&usize, &[f64; 2])| ServerLoad {
        rank,
        busy: share(computes * of_turns.unwrap_or(1.0) + moves),
    };
    let mut links: Vec<LinkLoad> = work
        .links
        .iter()
        .map(|(&link, &seconds)| LinkLoad { link: topology.links()[link].name.clone(), busy: share(seconds) })
        .filter(|link| link.busy > 0.0)
        .collect();
    // A stable sort, so that links with equal loads keep the topology's order.
    links.sort_by(|link, other| other.busy.total_cmp(&link.busy));
    links.truncate(MOST_LINKS);
    Ok(Load { servers: work.servers.iter().map(server).collect(), links })
}

impl Load {
    /// The load if each step takes `1 / pace` times as long, at most 1.
    pub(super) fn at_pace(mut self, pace: f64) -> Self {
        self.servers.iter_mut().for_each(|server| server.busy = (server.busy * pace).min(1.0));
        self.links.iter_mut().for_each(|link| link.busy = (link.busy * pace).min(1.0));
        self
    }
}

/// The seconds of work in a mean step of the cycle.
#[derive(Default)]
struct Work {
    /// Keyed by rank: seconds of computation, and of messages.
    servers: BTreeMap<usize, [f64; 2]>,
    /// Keyed by link of the topology.
    links: BTreeMap<usize, f64>,
}

/// Counts the work of a Program's step.
struct Counter<'a> {
    program: &'a Program,
    topology: &'a Topology,
    lowered: &'a Lowered<'a>,
    /// The factor by which each rank is slower than its costs.
    slower: Vec<f64>,
    step: Seconds,
    paces: Option<&'a PacedPrediction>,
}

impl Counter<'_> {
    fn add_to(&self, work: &mut Work, times: f64) {
        let lowered = self.lowered;
        let roles: Vec<Role> = lowered.ranks.iter().map(|rank| role(self.program, rank.rank)).collect();
        for index in (0..roles.len()).filter(|&index| roles[index] == Role::Server) {
            let of_rank = work.servers.entry(lowered.ranks[index].rank.0).or_default();
            of_rank[0] += times * self.computes(index);
        }
        for group in &lowered.groups {
            let members = || group.members.iter().map(|&(member, _)| member as usize);
            let steps = times * self.steps_of(members().map(|member| roles[member]));
            let counts =
                counts(group.collectives.distinct().len(), (0..group.collectives.len()).map(|nth| group.collectives.index(nth)));
            for (index, count) in counts {
                let (cost, shape) = group.cost(lowered.costs, index, Quantile::Median);
                let servers = members().filter(|&member| roles[member] == Role::Server);
                self.add(work, (&cost, shape), servers, steps * count);
            }
        }
        for channel in &lowered.channels {
            let ends = [channel.sender as usize, channel.receiver as usize];
            let steps = times * self.steps_of(ends.into_iter().map(|end| roles[end]));
            let counts = counts(channel.bytes.distinct().len(), (0..channel.bytes.len()).map(|nth| channel.bytes.index(nth)));
            for (index, count) in counts {
                let cost = channel.cost(lowered.costs, index, Quantile::Median);
                let servers = ends.into_iter().filter(|&end| roles[end] == Role::Server);
                self.add(work, (&cost, Some(&channel.shape)), servers, steps * count);
            }
        }
    }

    /// Adds a communication that occurs `times` times, in which `servers` take part.
    fn add(
        &self,
        work: &mut Work,
        (cost, shape): (&CommunicationCost, Option<&Shape>),
        servers: impl Iterator<Item = usize>,
        times: f64,
    ) {
        let costs = self.lowered.costs;
        for &(link, load) in shape.into_iter().flat_map(|shape| &shape.loads) {
            let seconds = load * cost.bytes / capacity(self.topology, &costs.links, link);
            *work.links.entry(link).or_default() += times * seconds;
        }
        for rank in servers.map(|server| &self.lowered.ranks[server]) {
            let share = processor_share(costs, cost.processor_share, rank.kind);
            work.servers.entry(rank.rank.0).or_default()[1] += times * share * cost.flow.value();
        }
    }

    /// The number of steps that the worker among `roles` makes in the time of a mean step; 1 for
    /// synchronised workers.
    fn steps_of(&self, mut roles: impl Iterator<Item = Role>) -> f64 {
        let Some(paces) = self.paces else { return 1.0 };
        let worker = roles.find_map(|role| if let Role::Worker(worker) = role { Some(worker) } else { None });
        let rate = worker.and_then(|worker| paces.worker_rates.get(worker));
        rate.map_or(1.0, |rate| rate * self.step.value())
    }

    /// The seconds for which a rank's device computes in a step.
    fn computes(&self, index: usize) -> f64 {
        let own = &self.lowered.ranks[index];
        let (list, times) = self.lowered.list_and_times(index);
        let is_work = |action: &Action| matches!(action, Action::Compute | Action::Load | Action::Copy);
        let instructions = (0..).zip(&list.actions).filter(|(_, action)| is_work(action));
        let seconds: f64 =
            instructions.map(|(index, _)| Seconds::from(times.duration(list, index, Quantile::Median)).value()).sum();
        seconds * self.slower.get(own.rank.0).copied().unwrap_or(1.0) / self.lowered.quota(own).unwrap_or(1.0)
    }
}

/// How often each index below `distinct` occurs in `indices`.
fn counts(distinct: usize, indices: impl Iterator<Item = u32>) -> impl Iterator<Item = (usize, f64)> {
    let mut counts = vec![0.0; distinct];
    indices.for_each(|index| counts[index as usize] += 1.0);
    counts.into_iter().enumerate()
}
