//! The part of the interpreter that runs collectives step by step around rings.
//!
//! A member's next message begins when its last has arrived and so has the last one to it, the first one when both ends have entered the
//! collective. So a member may be steps ahead of one that came late, and is held up by it only as far as messages come round.

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
    /// Where each rank's groups begin in `member_of`, and the member that it is of each.
    first_group: Vec<u32>,
    member_of: Vec<u32>,
    /// Where each member's hops begin, and the hops that leave it; one more than there are members.
    first_hop: Vec<u32>,
    hops_of: Vec<u32>,
    /// Hops that nobody else can meet, on a link or on a processor.
    shares_nothing: Vec<bool>,
}

/// A hop while it runs.
#[derive(Clone, Copy, Debug, Default)]
struct HopState {
    sender: u32,
    receiver: u32,
    before: u32,
    after: u32,
    /// Messages that have arrived, over all collectives so far.
    arrived: u32,
    /// How many are under way, one after the other; none where it does not move.
    moving: u32,
    latency: Picoseconds,
    flow: Picoseconds,
}

/// A member while it runs.
#[derive(Clone, Copy, Debug, Default)]
struct MemberState {
    rank: u32,
    block: u32,
    /// Messages of each hop before this collective began, and of this collective.
    before: u32,
    steps: u32,
    /// Hops from it and to it that are not through.
    left: u32,
    /// How many of them there are.
    hops: u32,
    is_here: bool,
    /// Whether data have moved from it or to it.
    has_moved: bool,
    /// Which of the group's different collectives.
    group: u32,
    which: u32,
}

impl Rings {
    pub(super) fn new(lowered: &Lowered<'_>, is_roomy: impl Fn(u32) -> bool) -> Self {
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
            for &(rank, place) in &group.members {
                let member = &mut rings.member_of[(rings.first_group[rank as usize] + place) as usize];
                *member = rings.members.len() as u32;
                rings.members.push(MemberState { rank, group: number, ..MemberState::default() });
            }
            let places: FxHashMap<u32, u32> = (first..).zip(&group.members).map(|(member, &(rank, _))| (rank, member)).collect();
            for hop in &lowered.hops[group.hops.start as usize..group.hops.end as usize] {
                let (sender, receiver) = (places[&hop.sender], places[&hop.receiver]);
                rings.members[sender as usize].hops += 1;
                rings.members[receiver as usize].hops += 1;
                let Hop { before, after, .. } = *hop;
                rings.hops.push(HopState { sender, receiver, before, after, ..HopState::default() });
                rings.shares_nothing.push(hop.shape.loads.is_empty() && is_roomy(hop.sender) && is_roomy(hop.receiver));
            }
        }
        rings.sort_hops();
        rings
    }

    /// Finds the hops that leave each member.
    fn sort_hops(&mut self) {
        self.hops_of = (0..self.hops.len() as u32).collect();
        self.hops_of.sort_by_key(|&hop| self.hops[hop as usize].sender);
        self.first_hop = vec![0; self.members.len() + 1];
        for hop in &self.hops {
            self.first_hop[hop.sender as usize + 1] += 1;
        }
        for member in 0..self.members.len() {
            self.first_hop[member + 1] += self.first_hop[member];
        }
    }

    fn hops_of(&self, member: u32) -> std::ops::Range<usize> {
        self.first_hop[member as usize] as usize..self.first_hop[member as usize + 1] as usize
    }
}

impl Interpreter<'_> {
    /// A rank has reached a collective that is run step by step.
    pub(super) fn enter(&mut self, task: Task, number: u32, which: u32) {
        let first = self.rings.first_group[task.rank as usize];
        let member = self.rings.member_of[(first + number) as usize];
        let state = &mut self.rings.members[member as usize];
        (state.block, state.which) = (task.block, which);
        let kind = self.lowered.groups[state.group as usize].kind;
        let overhead = self.lowered.costs.parameters(kind).exchange_overhead * data_sheet_factor(self.scenario.quantile);
        let now = self.queue.now();
        let time = now + overhead.into();
        if time > now {
            self.queue.schedule(time, Event::Entered(member));
        } else {
            self.entered(member);
        }
    }

    /// It has been set up.
    pub(super) fn entered(&mut self, member: u32) {
        let lowered = self.lowered;
        let state = &mut self.rings.members[member as usize];
        let group = &lowered.groups[state.group as usize];
        let call = group.collectives.distinct()[state.which as usize];
        state.steps = steps(call.kind, group.size);
        state.left = state.hops;
        (state.is_here, state.has_moved) = (true, false);
        let bytes = call.bytes / (group.size as f64 * f64::from(group.rings));
        for place in self.rings.hops_of(member) {
            let hop = self.rings.hops_of[place];
            let cost = message(&lowered.hops[hop as usize], bytes, self.scenario.quantile);
            let state = &mut self.rings.hops[hop as usize];
            (state.latency, state.flow) = cost;
        }
        for place in self.rings.hops_of(member) {
            let hop = self.rings.hops_of[place];
            self.try_hop(hop);
            // The member before may have waited for this one.
            let before = self.rings.hops[hop as usize].before;
            self.try_hop(before);
        }
    }

    /// Sends a hop's next message if nothing is in its way.
    fn try_hop(&mut self, hop: u32) {
        let rings = &mut self.rings;
        let state = rings.hops[hop as usize];
        let sender = &rings.members[state.sender as usize];
        let last = sender.before + sender.steps;
        if state.moving > 0 || !sender.is_here || state.arrived == last {
            return;
        }
        if state.arrived == sender.before {
            let receiver = &rings.members[state.receiver as usize];
            if !receiver.is_here || receiver.before != sender.before {
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
        // A ring that is folded onto one member waits for itself alone: if it shares nothing, each message leaves when the one before has arrived.
        let shares_nothing = rings.shares_nothing[hop as usize];
        let at_once = if shares_nothing && state.before == hop { last - state.arrived } else { 1 };
        rings.hops[hop as usize].moving = at_once;
        let flows = self.queue.now() + state.latency;
        if shares_nothing {
            let others = Picoseconds((state.latency + state.flow).0 * u64::from(at_once - 1));
            self.queue.schedule(flows + state.flow + others, Event::Hopped(hop));
            self.run_ahead.passed += u64::from(at_once - 1);
        } else {
            self.queue.schedule(flows, Event::HopFlows(hop));
        }
    }

    /// A message's data begin to flow: it takes its part of links and processors. A member sends and receives at once, each with half of what the
    /// collective takes of its processor.
    pub(super) fn hop_flows(&mut self, hop: u32) {
        let lowered = self.lowered;
        let state = self.rings.hops[hop as usize];
        if state.flow == Picoseconds::ZERO {
            self.hopped(hop);
            return;
        }
        let Hop { group, sender, receiver, shape, weights, .. } = &lowered.hops[hop as usize];
        let rings = f64::from(lowered.groups[*group as usize].rings);
        let pace = 1.0 / shape.seconds_per_byte;
        let links = shape.loads.iter().map(move |&(link, load)| (link as u32, (load * pace).min(lowered.capacities[link])));
        let prices = self.costs;
        let ends = [(*sender, weights[0]), (*receiver, weights[1])].map(move |(rank, weight)| {
            let (resource, share) = prices.communication_share(lowered, rank);
            (resource, share * weight / (2.0 * rings))
        });
        let mut largest: f64 = 0.0;
        for (resource, share) in ends {
            if share > 0.0 {
                largest = largest.max(share);
                self.join(resource);
            }
        }
        let kind = lowered.ranks[*sender as usize].kind;
        let growth = growth(lowered, Some(kind), largest);
        self.add_fluid(FluidOwner::Hop(hop), state.flow.0 as f64, links.chain(ends), growth);
    }

    /// A message has arrived.
    pub(super) fn hopped(&mut self, hop: u32) {
        let state = &mut self.rings.hops[hop as usize];
        state.arrived += std::mem::take(&mut state.moving);
        let HopState { sender, receiver, after, arrived, .. } = *state;
        let from = &self.rings.members[sender as usize];
        if arrived < from.before + from.steps {
            self.try_hop(hop);
            if after != hop {
                self.try_hop(after);
            }
            return;
        }
        if after != hop {
            self.try_hop(after);
        }
        self.is_through(sender);
        self.is_through(receiver);
    }

    /// A hop from a member or to it is through.
    fn is_through(&mut self, member: u32) {
        let now = self.queue.now();
        let state = &mut self.rings.members[member as usize];
        state.left -= 1;
        if state.left == 0 {
            state.is_here = false;
            state.before += state.steps;
            let (rank, block) = (state.rank, state.block);
            self.ranks[rank as usize].meter.end(TimeCategory::Communication, now);
            self.interrupt(rank);
            self.finish(Task { rank, block });
        }
    }
}

/// What a message of a hop takes alone: its latency, and the time that its data flow.
fn message(hop: &Hop, bytes: f64, quantile: Quantile) -> (Picoseconds, Picoseconds) {
    let cost = AlgorithmTerms::MESSAGE.cost(&hop.shape, Seconds::ZERO, bytes, quantile);
    (cost.latency.into(), cost.flow.into())
}
