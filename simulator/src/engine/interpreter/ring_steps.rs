//! Runs collectives around rings step by step.
//!
//! A member sends its first message when it and its receiver have entered the collective. It sends
//! each next message when its previous message has arrived at the receiver and the previous message
//! of the member before it has arrived here. So a member may be several steps ahead of one that
//! entered late, and is delayed only once that delay has come around the ring.

use super::Interpreter;
use super::event::{Event, Task};
use super::processors::FluidOwner;
use crate::cost::{Quantile, data_sheet_factor};
use crate::engine::blocks::TimeCategory;
use crate::engine::resolved_costs::growth;
use crate::lowering::Lowered;
use crate::network::{AlgorithmTerms, Hop, steps};
use foretell_units::{Picoseconds, Seconds};
use rustc_hash::FxHashMap;

/// The state of all rings.
#[derive(Debug, Default)]
pub(super) struct Rings {
    hops: Vec<HopState>,
    members: Vec<MemberState>,
    /// For each rank, the start of its groups in `member_of`.
    first_group: Vec<u32>,
    /// For each group of each rank, the rank's index in `members`.
    member_of: Vec<u32>,
    /// For each member, the start of its hops in `hops_by_sender`, and the end of the last
    /// member's.
    first_hop: Vec<u32>,
    /// The hops, sorted by sender.
    hops_by_sender: Vec<u32>,
    /// For each hop, whether it loads no link and no processor that can saturate, so that nothing
    /// slows it.
    is_uncontended: Vec<bool>,
}

/// A hop of a ring during a run.
#[derive(Clone, Copy, Debug, Default)]
struct HopState {
    sender: u32,
    receiver: u32,
    /// The hop of the ring whose receiver is this hop's sender.
    before: u32,
    /// The hop of the ring whose sender is this hop's receiver.
    after: u32,
    /// Number of messages that have arrived, over all collectives so far.
    arrived: u32,
    /// Number of messages in flight. They follow one another.
    under_way: u32,
    latency: Picoseconds,
    flow: Picoseconds,
}

/// A member of a group during a run.
#[derive(Clone, Copy, Debug, Default)]
struct MemberState {
    rank: u32,
    /// The block of the current collective, which waits for its end.
    block: u32,
    /// Messages that each of its hops carried in all earlier collectives.
    messages_before: u32,
    /// Messages that each of its hops carries in the current collective.
    steps: u32,
    /// Number of hops that start or end at this member and have not finished the current
    /// collective.
    unfinished_hops: u32,
    /// Number of hops that start or end at this member.
    hops: u32,
    has_entered: bool,
    /// Whether a message of the current collective has begun to flow from this member or to it.
    has_moved: bool,
    group: u32,
    /// The index of the current collective among the distinct collectives of its group.
    distinct: u32,
}

impl Rings {
    pub(super) fn new(lowered: &Lowered<'_>, never_saturates: impl Fn(u32) -> bool) -> Self {
        if lowered.hops.is_empty() {
            return Self::default();
        }
        let mut rings = Self::default();
        for rank in &lowered.ranks {
            rings.first_group.push(rings.member_of.len() as u32);
            rings.member_of.resize(rings.member_of.len() + rank.groups.len(), u32::MAX);
        }
        for (number, group) in (0..).zip(&lowered.groups) {
            let first = rings.members.len() as u32;
            for &(rank, number_in_list) in &group.members {
                let member = &mut rings.member_of[(rings.first_group[rank as usize] + number_in_list) as usize];
                *member = rings.members.len() as u32;
                rings.members.push(MemberState { rank, group: number, ..MemberState::default() });
            }
            let members: FxHashMap<u32, u32> = (first..).zip(&group.members).map(|(member, &(rank, _))| (rank, member)).collect();
            for hop in &lowered.hops[group.hops.start as usize..group.hops.end as usize] {
                let (sender, receiver) = (members[&hop.sender], members[&hop.receiver]);
                rings.members[sender as usize].hops += 1;
                rings.members[receiver as usize].hops += 1;
                let Hop { before, after, .. } = *hop;
                rings.hops.push(HopState { sender, receiver, before, after, ..HopState::default() });
                let none_saturates = never_saturates(hop.sender) && never_saturates(hop.receiver);
                rings.is_uncontended.push(hop.shape.loads.is_empty() && none_saturates);
            }
        }
        rings.sort_hops();
        rings
    }

    /// Sorts the hops by sender.
    fn sort_hops(&mut self) {
        self.hops_by_sender = (0..self.hops.len() as u32).collect();
        self.hops_by_sender.sort_by_key(|&hop| self.hops[hop as usize].sender);
        self.first_hop = vec![0; self.members.len() + 1];
        for hop in &self.hops {
            self.first_hop[hop.sender as usize + 1] += 1;
        }
        for member in 0..self.members.len() {
            self.first_hop[member + 1] += self.first_hop[member];
        }
    }

    /// The range of a member's outgoing hops in `hops_by_sender`.
    fn hops_from(&self, member: u32) -> std::ops::Range<usize> {
        self.first_hop[member as usize] as usize..self.first_hop[member as usize + 1] as usize
    }
}

impl Interpreter<'_> {
    /// A rank enters a collective that runs step by step: number `distinct` of the distinct
    /// collectives of the group that the rank's list calls `number`.
    pub(super) fn enter(&mut self, task: Task, number: u32, distinct: u32) {
        let first = self.rings.first_group[task.rank as usize];
        let member = self.rings.member_of[(first + number) as usize];
        let state = &mut self.rings.members[member as usize];
        (state.block, state.distinct) = (task.block, distinct);
        let kind = self.lowered.groups[state.group as usize].kind;
        let overhead = self.lowered.costs.parameters(kind).exchange_overhead * data_sheet_factor(self.scenario.quantile);
        let now = self.queue.now();
        let time = now + overhead.into();
        if time > now {
            self.queue.schedule(time, Event::MemberEntered(member));
        } else {
            self.member_entered(member);
        }
    }

    /// Starts a member's part in a collective, once its set-up overhead has passed.
    pub(super) fn member_entered(&mut self, member: u32) {
        let lowered = self.lowered;
        let state = &mut self.rings.members[member as usize];
        let group = &lowered.groups[state.group as usize];
        let call = group.collectives.distinct()[state.distinct as usize];
        state.steps = steps(call.kind, group.size);
        state.unfinished_hops = state.hops;
        (state.has_entered, state.has_moved) = (true, false);
        let bytes = call.bytes / (group.size as f64 * f64::from(group.rings));
        for index in self.rings.hops_from(member) {
            let hop = self.rings.hops_by_sender[index];
            let cost = message_cost(&lowered.hops[hop as usize], bytes, self.scenario.quantile);
            let state = &mut self.rings.hops[hop as usize];
            (state.latency, state.flow) = cost;
        }
        for index in self.rings.hops_from(member) {
            let hop = self.rings.hops_by_sender[index];
            self.try_hop(hop);
            // The previous hop may have waited for this member to enter.
            let before = self.rings.hops[hop as usize].before;
            self.try_hop(before);
        }
    }

    /// Sends a hop's next message if it can be sent.
    fn try_hop(&mut self, hop: u32) {
        let rings = &mut self.rings;
        let state = rings.hops[hop as usize];
        let sender = &rings.members[state.sender as usize];
        let last = sender.messages_before + sender.steps;
        if state.under_way > 0 || !sender.has_entered || state.arrived == last {
            return;
        }
        if state.arrived == sender.messages_before {
            let receiver = &rings.members[state.receiver as usize];
            if !receiver.has_entered || receiver.messages_before != sender.messages_before {
                return;
            }
            let now = self.queue.now();
            for member in [state.sender, state.receiver] {
                let member = &mut rings.members[member as usize];
                if !std::mem::replace(&mut member.has_moved, true) {
                    self.ranks[member.rank as usize].meter.begin(TimeCategory::Communication, now);
                }
            }
        } else if rings.hops[state.before as usize].arrived < state.arrived {
            return;
        }
        // A ring that is folded onto one member waits only for itself. If it is uncontended, all of
        // its messages follow one another without a gap, and one event covers them.
        let is_uncontended = rings.is_uncontended[hop as usize];
        let messages = if is_uncontended && state.before == hop { last - state.arrived } else { 1 };
        rings.hops[hop as usize].under_way = messages;
        let flow_start = self.queue.now() + state.latency;
        if is_uncontended {
            let others = Picoseconds((state.latency + state.flow).0 * u64::from(messages - 1));
            self.queue.schedule(flow_start + state.flow + others, Event::HopArrived(hop));
            self.run_ahead.blocks_without_event += u64::from(messages - 1);
        } else {
            self.queue.schedule(flow_start, Event::HopFlows(hop));
        }
    }

    /// Makes the flow of a hop's message a fluid activity on its links and processors. A member
    /// sends and receives at the same time, each with half of the collective's processor share,
    /// which the rings divide equally.
    pub(super) fn hop_flows(&mut self, hop: u32) {
        let lowered = self.lowered;
        let state = self.rings.hops[hop as usize];
        if state.flow == Picoseconds::ZERO {
            self.hop_arrived(hop);
            return;
        }
        let Hop { group, sender, receiver, shape, weights, .. } = &lowered.hops[hop as usize];
        let rings = f64::from(lowered.groups[*group as usize].rings);
        let bytes_per_second = 1.0 / shape.seconds_per_byte;
        let links =
            shape.loads.iter().map(move |&(link, load)| (link as u32, (load * bytes_per_second).min(lowered.capacities[link])));
        let costs = self.costs;
        let ends = [(*sender, weights[0]), (*receiver, weights[1])].map(move |(rank, weight)| {
            let (resource, share) = costs.communication_share(lowered, rank);
            (resource, share * weight / (2.0 * rings))
        });
        let mut largest_share: f64 = 0.0;
        for (resource, share) in ends {
            if share > 0.0 {
                largest_share = largest_share.max(share);
                self.end_exclusive_use(resource);
            }
        }
        let kind = lowered.ranks[*sender as usize].kind;
        let growth = growth(lowered, Some(kind), largest_share);
        self.add_fluid(FluidOwner::Hop(hop), state.flow.0 as f64, links.chain(ends), growth);
    }

    /// Handles the arrival of a hop's messages in flight: one, or several that followed one
    /// another.
    pub(super) fn hop_arrived(&mut self, hop: u32) {
        let state = &mut self.rings.hops[hop as usize];
        state.arrived += std::mem::take(&mut state.under_way);
        let HopState { sender, receiver, after, arrived, .. } = *state;
        let from = &self.rings.members[sender as usize];
        if arrived < from.messages_before + from.steps {
            self.try_hop(hop);
            if after != hop {
                self.try_hop(after);
            }
            return;
        }
        if after != hop {
            self.try_hop(after);
        }
        self.finish_hop_of(sender);
        self.finish_hop_of(receiver);
    }

    /// A hop that starts or ends at this member has finished the collective. With the last such hop
    /// the member's block ends.
    fn finish_hop_of(&mut self, member: u32) {
        let now = self.queue.now();
        let state = &mut self.rings.members[member as usize];
        state.unfinished_hops -= 1;
        if state.unfinished_hops == 0 {
            state.has_entered = false;
            state.messages_before += state.steps;
            let (rank, block) = (state.rank, state.block);
            self.ranks[rank as usize].meter.end(TimeCategory::Communication, now);
            self.interrupt(rank);
            self.finish(Task { rank, block });
        }
    }
}

/// The latency and the flow time of a hop's message without contention.
fn message_cost(hop: &Hop, bytes: f64, quantile: Quantile) -> (Picoseconds, Picoseconds) {
    let cost = AlgorithmTerms::MESSAGE.cost(&hop.shape, Seconds::ZERO, bytes, quantile);
    (cost.latency.into(), cost.flow.into())
}
