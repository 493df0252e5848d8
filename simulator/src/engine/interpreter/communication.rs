//! The part of the interpreter that deals with collectives and messages: who has arrived, when data begin to flow, what the flow
//! takes of links and processors, and who may go on when it ends.

use super::Interpreter;
use super::event::{Communication, Event, Task};
use super::processors::{Exclusive, ExclusiveOwner, FluidOwner};
use crate::engine::blocks::TimeCategory;
use crate::engine::resolved_costs::{Communicator, ResolvedCost, communicator, growth};
use crate::lowering::{Lowered, ProcessGroup, backlog};
use foretell_units::Picoseconds;

/// How far a message is: bits of its state.
mod flag {
    pub(super) const SENDER_IS_THERE: u32 = 1;
    pub(super) const RECEIVER_IS_THERE: u32 = 2;
    pub(super) const HAS_BEGUN: u32 = 4;
    pub(super) const IS_DONE: u32 = 8;
    /// Its sender put it into the buffer before anyone asked for it.
    pub(super) const IS_AHEAD: u32 = 16;
}

/// The messages of a channel that are in the buffer, and the one that waits for room.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Buffered {
    pub(super) bytes: u64,
    pub(super) blocked: Option<u32>,
}

/// Who has reached which collective.
#[derive(Debug)]
pub(super) struct Arrivals {
    /// One a group: its members come to one collective after the other; or one a collective, where they may go on at once.
    arrivals: Vec<CollectiveArrivals>,
    is_one_a_group: bool,
}

/// The members that have reached a collective, and the time of the last.
#[derive(Clone, Copy, Debug, Default)]
struct CollectiveArrivals {
    latest: Picoseconds,
    arrived: u32,
}

impl Arrivals {
    pub(super) fn new(lowered: &Lowered<'_>) -> Self {
        let is_one_a_group = !lowered.communication_overlaps();
        let collectives = lowered.groups.iter().map(|group| group.collectives.len()).sum();
        let count = if is_one_a_group { lowered.groups.len() } else { collectives };
        Self { arrivals: vec![CollectiveArrivals::default(); count], is_one_a_group }
    }

    /// A member arrives. Returns the time of the last when all have.
    fn arrive(&mut self, group: &ProcessGroup, exchange: Communication, time: Picoseconds) -> Option<Picoseconds> {
        let place = if self.is_one_a_group { exchange.communicator } else { group.first_communication + exchange.nth };
        let arrivals_here = &mut self.arrivals[place as usize];
        arrivals_here.arrived += 1;
        arrivals_here.latest = arrivals_here.latest.max(time);
        (arrivals_here.arrived as usize == group.members.len()).then(|| std::mem::take(arrivals_here).latest)
    }
}

impl<'a> Interpreter<'a> {
    /// A member reaches a collective now or at a time that is certain. Returns false where it has to come again then.
    pub(super) fn reach(&mut self, task: Task, number: u32, nth: u32, time: Picoseconds) -> bool {
        let communicator = self.communicator(task.rank, number);
        let group = &self.lowered.groups[communicator as usize];
        let now = self.queue.now();
        let which = group.collectives.which(nth as usize);
        if group.is_stepped(which as usize) {
            if time > now {
                return false;
            }
            self.enter(task, number, which);
            return true;
        }
        if self.try_run_ahead(task, time) {
            return true;
        }
        let exchange = Communication { communicator, nth };
        let Some(time) = self.arrivals.arrive(group, exchange, time) else { return true };
        group.members.iter().for_each(|&(member, _)| self.catch_up(member));
        let expects_none = |&(member, _): &(u32, u32)| self.ranks[member as usize].meter.expects_no_exchange(now);
        if time <= now {
            self.all_are_there(exchange);
        } else if group.members.iter().all(expects_none) {
            for &(member, _) in &group.members {
                self.ranks[member as usize].meter.exchange_begins(time, now);
            }
            self.begin(exchange, time);
        } else {
            self.queue.schedule(time, Event::MembersArrived(exchange));
        }
        true
    }

    /// The last member of a collective has come just now.
    pub(super) fn all_are_there(&mut self, exchange: Communication) {
        let Communicator::Group(group) = communicator(self.lowered, exchange.communicator) else { return };
        let now = self.queue.now();
        for &(member, _) in &group.members {
            self.catch_up(member);
            self.ranks[member as usize].meter.begin(TimeCategory::Communication, now);
        }
        self.begin(exchange, now);
    }

    /// A sender has reached a message.
    pub(super) fn send(&mut self, message: Communication) {
        if let Some(state) = self.state(message) {
            *state |= flag::SENDER_IS_THERE;
            self.try_message(message);
        }
    }

    /// A receiver has.
    pub(super) fn receive(&mut self, message: Communication, task: Task) {
        let Communicator::Channel(channel, of) = communicator(self.lowered, message.communicator) else { return };
        let Some(state) = self.state(message) else { return };
        *state |= flag::RECEIVER_IS_THERE;
        let state = *state;
        if state & flag::IS_AHEAD == 0 {
            self.try_message(message);
            return;
        }
        let buffered = &mut self.buffered[channel as usize];
        buffered.bytes -= of.bytes.get(message.nth as usize);
        let blocked = buffered.blocked.take();
        if state & flag::IS_DONE != 0 {
            self.finish(task);
        } else {
            self.ranks[task.rank as usize].meter.begin(TimeCategory::Communication, self.queue.now());
        }
        if let Some(nth) = blocked {
            self.try_message(Communication { nth, ..message });
        }
    }

    /// Begins a message if both are there, or if the sender is and the buffer has room.
    fn try_message(&mut self, message: Communication) {
        let Communicator::Channel(channel, of) = communicator(self.lowered, message.communicator) else { return };
        let buffer = self.lowered.costs.buffered.count();
        let index = (of.first_communication - self.first_message + message.nth) as usize;
        let state = &mut self.messages[index];
        if *state & flag::HAS_BEGUN != 0 || *state & flag::SENDER_IS_THERE == 0 {
            return;
        }
        if *state & flag::RECEIVER_IS_THERE == 0 {
            let bytes = of.bytes.get(message.nth as usize);
            let buffered = &mut self.buffered[channel as usize];
            if buffered.bytes + bytes > buffer {
                buffered.blocked = Some(message.nth);
                return;
            }
            buffered.bytes += bytes;
            *state |= flag::IS_AHEAD;
        }
        *state |= flag::HAS_BEGUN;
        let now = self.queue.now();
        self.catch_up(of.sender);
        self.catch_up(of.receiver);
        self.ranks[of.sender as usize].meter.begin(TimeCategory::Communication, now);
        if self.messages[index] & flag::RECEIVER_IS_THERE != 0 {
            self.ranks[of.receiver as usize].meter.begin(TimeCategory::Communication, now);
        }
        self.begin(message, now);
    }

    fn begin(&mut self, exchange: Communication, time: Picoseconds) {
        let price = self.price(exchange);
        let flows = time + price.latency;
        if price.shares_nothing {
            self.queue.schedule(flows + price.flow, Event::CommunicationEnds(exchange));
        } else if !(price.loads().is_empty() && self.take_processors(exchange, flows + price.flow)) {
            self.queue.schedule(flows, Event::LatencyEnds(exchange));
        }
    }

    /// Has an exchange that loads no link have its members' processors to itself until it ends, if they are idle: it goes on at its own pace then,
    /// and nothing has to be solved. Whoever comes onto one of them puts an end to that ([`Self::give_up_processors`]).
    fn take_processors(&mut self, exchange: Communication, end: Picoseconds) -> bool {
        if !self.looks_ahead {
            return false;
        }
        let mut wanted = self.wanted_processors(exchange);
        if wanted.any(|(rank, resource)| !self.is_idle(resource) || self.ranks[rank as usize].interruption > Picoseconds::ZERO) {
            return false;
        }
        self.hold_processors(exchange, end);
        true
    }

    /// Has it have them, which are idle.
    pub(super) fn hold_processors(&mut self, exchange: Communication, end: Picoseconds) {
        for (_, resource) in self.wanted_processors(exchange) {
            self.processors[(resource - self.first_processor) as usize].exclusive =
                Some(Exclusive { owner: ExclusiveOwner::Communication(exchange), end });
        }
        self.queue.schedule(
            end,
            Event::ExclusiveCommunicationEnds {
                communication: exchange,
                generation: self.exclusive_generations[exchange.communicator as usize],
            },
        );
    }

    /// An exchange that has its members' processors to itself leaves them.
    pub(super) fn leave_processors(&mut self, exchange: Communication) {
        self.exclusive_generations[exchange.communicator as usize] += 1;
        for (_, resource) in self.wanted_processors(exchange) {
            self.processors[(resource - self.first_processor) as usize].exclusive = None;
        }
    }

    /// The same before its end, as someone else comes: it goes on as a fluid activity, or has to come again if its data do not flow yet.
    pub(super) fn give_up_processors(&mut self, exchange: Communication, end: Picoseconds) {
        self.leave_processors(exchange);
        let flow = self.price(exchange).flow;
        let left = end.saturating_sub(self.queue.now());
        if left > flow {
            self.queue.schedule(end.saturating_sub(flow), Event::LatencyEnds(exchange));
        } else {
            self.flow_on(exchange, left.0 as f64);
        }
    }

    /// The ranks that an exchange takes a part of the processor of, and these processors.
    fn wanted_processors(&self, exchange: Communication) -> impl Iterator<Item = (u32, u32)> + Clone + use<'a> {
        let (lowered, prices, price) = (self.lowered, self.costs, self.price(exchange));
        let shares = members(lowered, exchange).map(move |rank| (rank, prices.processor_share(lowered, price, rank)));
        shares.filter(|&(_, (_, share))| share > 0.0).map(|(rank, (resource, _))| (rank, resource))
    }

    /// Data begin to flow: the exchange takes its part of links and processors.
    pub(super) fn flow(&mut self, exchange: Communication) {
        let flow = self.price(exchange).flow;
        if flow == Picoseconds::ZERO {
            self.finish_communication(exchange);
        } else {
            self.flow_on(exchange, flow.0 as f64);
        }
    }

    /// The same of an exchange that has so many picoseconds left of its flow.
    pub(super) fn flow_on(&mut self, exchange: Communication, left: f64) {
        let (lowered, prices, price) = (self.lowered, self.costs, self.price(exchange));
        let links = price.loads().iter().map(move |&(link, load)| {
            // What was measured faster than the link is stated must still be possible.
            (link as u32, (load * price.pace).min(lowered.capacities[link]))
        });
        let members = members(lowered, exchange);
        let first = members.clone().next();
        let processors = members.map(move |rank| prices.processor_share(lowered, price, rank));
        let mut largest_share: f64 = 0.0;
        for (resource, share) in processors.clone() {
            if share > 0.0 {
                largest_share = largest_share.max(share);
                self.join(resource);
            }
        }
        let growth = growth(lowered, first.map(|rank| lowered.ranks[rank as usize].kind), largest_share);
        self.add_fluid(FluidOwner::Communication(exchange), left, links.chain(processors), growth);
    }

    /// Keeps the network's links busy for what an exchange that has ended took of them beyond their rates. A shaper or a port lets the first of
    /// a message pass at once, so a short message that is alone arrives sooner than the rate has it; the next one pays for that.
    fn add_backlogs(&mut self, exchange: Communication) {
        let price = self.price(exchange);
        let lowered = self.lowered;
        for &(link, load) in price.loads() {
            let capacity = lowered.capacities[link];
            if lowered.has_queue[link]
                && let Some(owed) = backlog(load, price.bytes, capacity, price.flow_seconds)
            {
                self.add_fluid(FluidOwner::Nothing, Picoseconds::from(owed).0 as f64, [(link as u32, capacity)], 1.0);
            }
        }
    }

    pub(super) fn finish_communication(&mut self, exchange: Communication) {
        let now = self.queue.now();
        self.add_backlogs(exchange);
        match communicator(self.lowered, exchange.communicator) {
            Communicator::Group(group) => {
                // Those of the largest groups would be gone again before it is their turn.
                self.fetch(group.members.iter().take(16).map(|&(member, _)| member));
                for &(member, number) in &group.members {
                    self.catch_up(member);
                    self.ranks[member as usize].meter.end(TimeCategory::Communication, now);
                    self.interrupt(member);
                    let block = self.ranks[member as usize].block_list.collectives[number as usize][exchange.nth as usize];
                    self.finish(Task { rank: member, block });
                }
            }
            Communicator::Channel(_, channel) => {
                let state = &mut self.messages[(channel.first_communication - self.first_message + exchange.nth) as usize];
                *state |= flag::IS_DONE;
                let receiver_is_there = *state & flag::RECEIVER_IS_THERE != 0;
                self.catch_up(channel.sender);
                self.catch_up(channel.receiver);
                self.interrupt(channel.receiver);
                self.ranks[channel.sender as usize].meter.end(TimeCategory::Communication, now);
                let block_list = self.ranks[channel.sender as usize].block_list;
                let block = block_list.sends[channel.send_peer as usize][exchange.nth as usize];
                self.finish(Task { rank: channel.sender, block });
                if receiver_is_there {
                    self.ranks[channel.receiver as usize].meter.end(TimeCategory::Communication, now);
                    let block_list = self.ranks[channel.receiver as usize].block_list;
                    let block = block_list.receives[channel.receive_peer as usize][exchange.nth as usize];
                    self.finish(Task { rank: channel.receiver, block });
                }
            }
        }
    }

    pub(super) fn price(&self, exchange: Communication) -> &'a ResolvedCost<'a> {
        let which = match communicator(self.lowered, exchange.communicator) {
            Communicator::Group(group) => group.collectives.which(exchange.nth as usize),
            Communicator::Channel(_, channel) => channel.bytes.which(exchange.nth as usize),
        };
        self.costs.of(exchange.communicator, which)
    }

    /// The flags of a message.
    fn state(&mut self, message: Communication) -> Option<&mut u32> {
        match communicator(self.lowered, message.communicator) {
            Communicator::Channel(_, channel) => {
                let index = channel.first_communication - self.first_message + message.nth;
                self.messages.get_mut(index as usize)
            }
            Communicator::Group(_) => None,
        }
    }
}

/// Those who take part in an exchange.
fn members<'a>(lowered: &'a Lowered<'_>, exchange: Communication) -> impl Iterator<Item = u32> + Clone + use<'a> {
    let (members, ends): (&[(u32, u32)], [Option<u32>; 2]) = match communicator(lowered, exchange.communicator) {
        Communicator::Group(group) => (&group.members, [None; 2]),
        Communicator::Channel(_, channel) => (&[], [Some(channel.sender), Some(channel.receiver)]),
    };
    members.iter().map(|&(member, _)| member).chain(ends.into_iter().flatten())
}
