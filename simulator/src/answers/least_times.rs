//! The least time of each instruction of a Program: its duration when nothing else runs. No
//! simulation of the Program can be faster.
//!
//! This file must not know dependencies. The planner adds the durations up for its lower bounds.

use crate::cost::{CollectiveCall, CostModel, Quantile};
use crate::engine::ResolvedCosts;
use crate::equivalence::one_rank_per_stage;
use crate::error::SimulationError;
use crate::lowering::{Action, Draft, JobOffset, ListTimes, Lowered, LoweredList, Oversubscription, SimulatedRank, Threads};
use crate::network::Collectives;
use foretell_program::{CollectiveRole, Program, Rank};
use foretell_topologies::Topology;
use foretell_units::{Bytes, Picoseconds, Seconds};
use std::collections::BTreeMap;

/// The least times of one instruction list, on the fastest kind of device that runs it.
///
/// If ranks have uneven parts of a sequence, the times are those of a rank with the most work,
/// because other ranks wait for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeastTimes {
    /// The duration of each instruction: a kernel's on its device, a collective's from the start of
    /// its last member, a message's at its sender (0 at its receiver).
    pub durations: Vec<Picoseconds>,
    /// The same durations, but with a gradient or parameter collective charged at most by bytes, at
    /// the rate of a full bucket. That is a lower bound for a longer model too, whose buckets are
    /// fuller.
    pub in_full_buckets: Vec<Picoseconds>,
    /// The total processor time that each collective takes from kernels on a member's processor; 0
    /// for other instructions.
    pub processor: Vec<Picoseconds>,
    /// The time at which the host has launched each instruction if it never waits; empty if
    /// launches take no time.
    pub launched: Vec<Picoseconds>,
    /// The delay until a stream sees that another stream has finished.
    pub handoff: Picoseconds,
}

/// Returns the least times of every list, at the median. A bucket counts as full from `bucket`
/// bytes.
///
/// # Errors
/// [`SimulationError`]: the Program contradicts itself, or there are too few devices.
pub fn least_times(
    program: &Program,
    topology: &Topology,
    costs: &CostModel,
    oversubscription: Oversubscription,
    bucket: Bytes,
) -> Result<Vec<LeastTimes>, SimulationError> {
    let stages = program.mesh.stage_count();
    let kind_of = |rank: usize| topology.kind_index(topology.device_of_rank(rank));
    let are_known = (0..topology.device_kinds().len()).all(|kind| costs.knows_collectives(kind));
    let enough = program.mesh.world_size() <= topology.device_count() || oversubscription != Oversubscription::Refused;
    if are_known && enough && program.lists.len() == stages {
        // GPU profiles give the costs of communication, so one rank for each stage and kind of
        // device is enough.
        let mut kinds: Vec<Vec<usize>> = vec![Vec::new(); stages];
        for rank in 0..program.mesh.world_size() {
            let (of_stage, kind) = (&mut kinds[program.mesh.stage_of(Rank(rank))], kind_of(rank));
            if !of_stage.contains(&kind) {
                of_stage.push(kind);
            }
        }
        let most = kinds.iter().map(Vec::len).max().unwrap_or(0);
        let mut fastest: Option<Vec<LeastTimes>> = None;
        for turn in 0..most {
            let found = least_times_on(program, costs, bucket, |stage| kinds[stage][turn % kinds[stage].len()])?;
            fastest = Some(match fastest {
                Some(before) => before.into_iter().zip(found).map(|(left, right)| left.faster(right)).collect(),
                None => found,
            });
        }
        return Ok(fastest.expect("invariant: a mesh has a rank"));
    }
    let draft = Draft::new(program, topology, costs, oversubscription, JobOffset::default(), Threads::Caller)?;
    let lowered = draft.lower(None, Collectives::Flow)?.with_resources_numbered(topology);
    Ok(durations(program, &lowered, bucket))
}

/// Returns the least times if all devices of each stage were of kind `kind_of_stage(stage)`.
/// Communication costs come from the GPU profiles.
///
/// # Errors
/// [`SimulationError::NoRepresentative`] if a profile lacks these costs, and as [`least_times`].
pub fn least_times_on(
    program: &Program,
    costs: &CostModel,
    bucket: Bytes,
    kind_of_stage: impl Fn(usize) -> usize,
) -> Result<Vec<LeastTimes>, SimulationError> {
    Ok(durations(program, &one_rank_per_stage::lower(program, costs, kind_of_stage)?, bucket))
}

impl LeastTimes {
    /// Returns the element-wise minimum.
    fn faster(self, other: Self) -> Self {
        let least = |own: Vec<Picoseconds>, other: Vec<Picoseconds>| own.into_iter().zip(other).map(|(a, b)| a.min(b)).collect();
        Self {
            durations: least(self.durations, other.durations),
            in_full_buckets: least(self.in_full_buckets, other.in_full_buckets),
            processor: least(self.processor, other.processor),
            launched: least(self.launched, other.launched),
            handoff: self.handoff.min(other.handoff),
        }
    }
}

fn durations(program: &Program, lowered: &Lowered<'_>, bucket: Bytes) -> Vec<LeastTimes> {
    let prices = ResolvedCosts::new(lowered, Quantile::Median);
    let calls = lowered.groups.iter().flat_map(|group| group.collectives.distinct()).filter(|call| is_bucketed(call));
    // The tensor that fills a bucket is still added to it, so a bucket exceeds its limit by at most
    // one tensor.
    let full = bucket.value() + calls.map(|call| call.bytes).fold(0.0, f64::max);
    let mut lists: Vec<Option<LeastTimes>> = vec![None; program.lists.len()];
    for rank in busiest_ranks(lowered) {
        let found = of_rank(lowered, &prices, rank, full);
        let list = &mut lists[rank.list];
        *list = Some(match list.take() {
            Some(before) => before.faster(found),
            None => found,
        });
    }
    lists.into_iter().flatten().collect()
}

/// Returns the ranks with the most work for each list and kind of device. If parts of a sequence
/// are uneven, other ranks wait for these.
fn busiest_ranks<'a>(lowered: &'a Lowered<'_>) -> impl Iterator<Item = &'a SimulatedRank> {
    let total = |list: &LoweredList, work: &ListTimes| -> Picoseconds {
        (0..list.actions.len() as u32).map(|instruction| work.duration(list, instruction, Quantile::Median)).sum()
    };
    let totals = |(list, work): (&LoweredList, &Vec<ListTimes>)| -> Vec<Picoseconds> {
        work.iter().map(|work| total(list, work)).collect()
    };
    let totals: Vec<Vec<Picoseconds>> = lowered.lists.iter().zip(&lowered.times).map(totals).collect();
    let total = move |rank: &SimulatedRank| totals[rank.list][rank.times];
    let mut most: BTreeMap<(usize, usize), Picoseconds> = BTreeMap::new();
    for rank in &lowered.ranks {
        let known = most.entry((rank.list, rank.kind)).or_default();
        *known = (*known).max(total(rank));
    }
    lowered.ranks.iter().filter(move |rank| most.get(&(rank.list, rank.kind)) == Some(&total(rank)))
}

fn is_bucketed(call: &CollectiveCall) -> bool {
    matches!(call.role, CollectiveRole::Gradients | CollectiveRole::Parameters)
}

fn of_rank(lowered: &Lowered<'_>, prices: &ResolvedCosts<'_>, rank: &SimulatedRank, full: f64) -> LeastTimes {
    let list = &lowered.lists[rank.list];
    let work = &lowered.times[rank.list][rank.times];
    let parameters = lowered.costs.parameters(rank.kind);
    let quota = lowered.quota(rank);
    let at_best = |time: Picoseconds| quota.map_or(time, |speed| Picoseconds((time.0 as f64 * speed).floor() as u64));
    let price = |party: u32, which: u32| {
        let price = prices.of(party, which);
        price.latency + price.flow
    };
    let of_group = |group: u32, nth: u32| {
        let party = rank.groups[group as usize];
        (party, lowered.groups[party as usize].collectives.index(nth as usize))
    };
    let processor = |action: &Action| match *action {
        Action::Collective { group, nth } => {
            let (party, which) = of_group(group, nth);
            at_best(ResolvedCosts::processor_time(lowered, prices.of(party, which), rank.kind))
        }
        _ => Picoseconds::ZERO,
    };
    let duration = |(instruction, action): (u32, &Action)| match *action {
        // A device with a processor quota is no slower than at full speed while it has budget left.
        Action::Compute | Action::Load | Action::Copy => at_best(work.duration(list, instruction, Quantile::Median)),
        Action::Collective { group, nth } => {
            let (party, which) = of_group(group, nth);
            price(party, which)
        }
        Action::Send { peer, nth } => {
            let channel = rank.sends[peer as usize];
            let party = channel + lowered.groups.len() as u32;
            price(party, lowered.channels[channel as usize].bytes.index(nth as usize))
        }
        Action::Receive { .. } => Picoseconds::ZERO,
    };
    let durations: Vec<Picoseconds> = (0..).zip(&list.actions).map(duration).collect();
    let mut known: Vec<(CollectiveCall, u32, f64)> = Vec::new();
    let in_full_bucket = |(action, &duration): (&Action, &Picoseconds)| {
        let Action::Collective { group, nth } = *action else { return duration };
        let group = rank.groups[group as usize];
        let call = lowered.groups[group as usize].collectives.get(nth as usize);
        if !is_bucketed(&call) || call.bytes >= full {
            return duration;
        }
        let whole = CollectiveCall { bytes: full, ..call };
        let found = known.iter().find(|(other, of, _)| *other == whole && *of == group).map(|&(.., share)| share);
        let per_byte = found.unwrap_or_else(|| {
            let cost = lowered.groups[group as usize].cost_of(lowered.costs, whole, Quantile::Median).0;
            let per_byte = (cost.latency + cost.flow).value() / full;
            known.push((whole, group, per_byte));
            per_byte
        });
        duration.min(Seconds::new(per_byte * call.bytes).into())
    };
    LeastTimes {
        in_full_buckets: list.actions.iter().zip(&durations).map(in_full_bucket).collect(),
        processor: list.actions.iter().map(processor).collect(),
        durations,
        launched: work.launched.clone(),
        handoff: at_best(parameters.stream_handoff.at(Quantile::Median).into()),
    }
}
