//! Runs collectives and messages: waits for their members, lets their data flow over links and
//! processors, and ends the blocks of all members.

use super::Interpreter;
use super::event::{Communication, Event, Task};
use super::processors::{Exclusive, ExclusiveOwner, FluidOwner};
use crate::engine::blocks::TimeCategory;
use crate::engine::resolved_costs::{Communicator, ResolvedCost, communicator, growth};
use crate::lowering::{Lowered, ProcessGroup, backlog};
use foretell_units::Picoseconds;

/// The state of a message, as bits.
mod flag {
    pub(super) const SENDER_IS_READY: u32 = 1;
    pub(super) const RECEIVER_IS_READY: u32 = 2;
    pub(super) const HAS_BEGUN: u32 = 4;
    pub(super) const HAS_ENDED: u32 = 8;
    /// The message was sent into the buffer before the receiver was ready.
    pub(super) const IS_BUFFERED: u32 = 16;
}

/// The messages of all channels.
#[derive(Debug)]
pub(super) struct Messages {
    /// For each message of each channel, the bits of [`flag`].
    flags: Vec<u32>,
    /// The number of the first message: collectives are numbered before messages.
    first: u32,
}

impl Messages {
    pub(super) fn new(lowered: &Lowered<'_>) -> Self {
        let first = lowered.channels.first().map_or(lowered.communications, |channel| channel.first_communication);
        Self { flags: vec![0; (lowered.communications - first) as usize], first }
    }
}

/// The buffer of a channel.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Buffer {
    /// Bytes of the messages in the buffer.
    bytes: u64,
    /// The message that does not fit yet.
    blocked: Option<u32>,
}

/// The members that have reached each collective.
#[derive(Debug)]
pub(super) struct Arrivals {
    /// One entry for each group if collectives of a group never overlap, else one for each
    /// collective.
    entries: Vec<CollectiveArrivals>,
    is_one_per_group: bool,
}

/// The members that have reached one collective.
#[derive(Clone, Copy, Debug, Default)]
struct CollectiveArrivals {
    latest: Picoseconds,
    count: u32,
}

impl Arrivals {
    pub(super) fn new(lowered: &Lowered<'_>) -> Self {
        let is_one_per_group = !lowered.communication_overlaps();
        let collectives = lowered.groups.iter().map(|group| group.collectives.len()).sum();
        let count = if is_one_per_group { lowered.groups.len() } else { collectives };
        Self { entries: vec![CollectiveArrivals::default(); count], is_one_per_group }
    }

    /// Adds a member's arrival. Returns the time of the latest arrival once all members have
    /// arrived.
    fn add(&mut self, group: &ProcessGroup, collective: Communication, time: Picoseconds) -> Option<Picoseconds> {
        let index = if self.is_one_per_group { collective.communicator } else { group.first_communication + collective.nth };
        let entry = &mut self.entries[index as usize];
        entry.count += 1;
        entry.latest = entry.latest.max(time);
        (entry.count as usize == group.members.len()).then(|| std::mem::take(entry).latest)
    }
}

impl<'a> Interpreter<'a> {
    /// A member reaches the `nth` collective of the group that its list calls `number`, now or at a
    /// later time. Returns `false`, and changes nothing, if the arrival cannot be recorded ahead of
    /// its time.
    pub(super) fn reach_collective(&mut self, task: Task, number: u32, nth: u32, time: Picoseconds) -> bool {
        let communicator = self.communicator_of(task.rank, number);
        let group = &self.lowered.groups[communicator as usize];
        let now = self.queue.now();
        let distinct = group.collectives.index(nth as usize);
        if group.is_stepped(distinct as usize) {
            if time > now {
                return false;
            }
            self.enter(task, number, distinct);
            return true;
        }
        if self.try_run_ahead(task, time) {
            return true;
        }
        let collective = Communication { communicator, nth };
        let Some(time) = self.arrivals.add(group, collective, time) else { return true };
        group.members.iter().for_each(|&(member, _)| self.catch_up(member));
        let expects_none = |&(member, _): &(u32, u32)| self.ranks[member as usize].meter.expects_no_collective(now);
        if time <= now {
            self.all_have_arrived(collective);
        } else if group.members.iter().all(expects_none) {
            for &(member, _) in &group.members {
                self.ranks[member as usize].meter.collective_begins(time, now);
            }
            self.begin_communication(collective, time);
        } else {
            self.queue.schedule(time, Event::MembersArrived(collective));
        }
        true
    }

    /// Begins a collective that all members have reached.
    pub(super) fn all_have_arrived(&mut self, collective: Communication) {
        let Communicator::Group(group) = communicator(self.lowered, collective.communicator) else { return };
        let now = self.queue.now();
        for &(member, _) in &group.members {
            self.catch_up(member);
            self.ranks[member as usize].meter.begin(TimeCategory::Communication, now);
        }
        self.begin_communication(collective, now);
    }

    /// A sender reaches a message.
    pub(super) fn send(&mut self, message: Communication) {
        if let Some(flags) = self.flags_of(message) {
            *flags |= flag::SENDER_IS_READY;
            self.try_message(message);
        }
    }

    /// A receiver reaches a message.
    pub(super) fn receive(&mut self, message: Communication, task: Task) {
        let Communicator::Channel(number, channel) = communicator(self.lowered, message.communicator) else { return };
        let Some(flags) = self.flags_of(message) else { return };
        *flags |= flag::RECEIVER_IS_READY;
        let flags = *flags;
        if flags & flag::IS_BUFFERED == 0 {
            self.try_message(message);
            return;
        }
        let buffer = &mut self.buffers[number as usize];
        buffer.bytes -= channel.bytes.get(message.nth as usize);
        let blocked = buffer.blocked.take();
        if flags & flag::HAS_ENDED != 0 {
            self.finish(task);
        } else {
            self.ranks[task.rank as usize].meter.begin(TimeCategory::Communication, self.queue.now());
        }
        if let Some(nth) = blocked {
            self.try_message(Communication { nth, ..message });
        }
    }

    /// Begins a message if both ends are ready, or if the sender is and the message fits the
    /// buffer.
    fn try_message(&mut self, message: Communication) {
        let Communicator::Channel(number, channel) = communicator(self.lowered, message.communicator) else { return };
        let capacity = self.lowered.costs.buffered.count();
        let index = (channel.first_communication - self.messages.first + message.nth) as usize;
        let flags = &mut self.messages.flags[index];
        if *flags & flag::HAS_BEGUN != 0 || *flags & flag::SENDER_IS_READY == 0 {
            return;
        }
        if *flags & flag::RECEIVER_IS_READY == 0 {
            let bytes = channel.bytes.get(message.nth as usize);
            let buffer = &mut self.buffers[number as usize];
            if buffer.bytes + bytes > capacity {
                buffer.blocked = Some(message.nth);
                return;
            }
            buffer.bytes += bytes;
            *flags |= flag::IS_BUFFERED;
        }
        *flags |= flag::HAS_BEGUN;
        let now = self.queue.now();
        self.catch_up(channel.sender);
        self.catch_up(channel.receiver);
        self.ranks[channel.sender as usize].meter.begin(TimeCategory::Communication, now);
        if self.messages.flags[index] & flag::RECEIVER_IS_READY != 0 {
            self.ranks[channel.receiver as usize].meter.begin(TimeCategory::Communication, now);
        }
        self.begin_communication(message, now);
    }

    fn begin_communication(&mut self, communication: Communication, time: Picoseconds) {
        let cost = self.cost_of(communication);
        let flow_start = time + cost.latency;
        if cost.is_uncontended {
            self.queue.schedule(flow_start + cost.flow, Event::CommunicationEnds(communication));
        } else if !(cost.loads().is_empty() && self.take_processors(communication, flow_start + cost.flow)) {
            self.queue.schedule(flow_start, Event::LatencyEnds(communication));
        }
    }

    /// Gives a communication that loads no link the exclusive use of its members' processors, if
    /// they are idle. It then runs at rate 1 without the solver, until another activity needs one
    /// of these processors ([`Self::share_processors`]).
    fn take_processors(&mut self, communication: Communication, end: Picoseconds) -> bool {
        if !self.can_start_in_advance {
            return false;
        }
        let mut needed = self.processors_of(communication);
        if needed.any(|(rank, resource)| !self.is_idle(resource) || self.ranks[rank as usize].interruption > Picoseconds::ZERO) {
            return false;
        }
        self.hold_processors(communication, end);
        true
    }

    /// Gives a communication the exclusive use of its members' processors, which are idle.
    pub(super) fn hold_processors(&mut self, communication: Communication, end: Picoseconds) {
        for (_, resource) in self.processors_of(communication) {
            self.processors.of(resource).exclusive = Some(Exclusive { owner: ExclusiveOwner::Communication(communication), end });
        }
        let generation = self.processors.exclusive_generations[communication.communicator as usize];
        self.queue.schedule(end, Event::ExclusiveCommunicationEnds { communication, generation });
    }

    /// Ends a communication's exclusive use of its members' processors.
    pub(super) fn release_processors(&mut self, communication: Communication) {
        self.processors.exclusive_generations[communication.communicator as usize] += 1;
        for (_, resource) in self.processors_of(communication) {
            self.processors.of(resource).exclusive = None;
        }
    }

    /// Ends a communication's exclusive use early, because another activity needs a processor. The
    /// communication becomes a fluid activity, now or when its data begin to flow.
    pub(super) fn share_processors(&mut self, communication: Communication, end: Picoseconds) {
        self.release_processors(communication);
        let flow = self.cost_of(communication).flow;
        let left = end.saturating_sub(self.queue.now());
        if left > flow {
            self.queue.schedule(end.saturating_sub(flow), Event::LatencyEnds(communication));
        } else {
            self.add_flow(communication, left.0 as f64);
        }
    }

    /// The members whose processor a communication uses, each with that processor.
    fn processors_of(&self, communication: Communication) -> impl Iterator<Item = (u32, u32)> + Clone + use<'a> {
        let (lowered, costs, cost) = (self.lowered, self.costs, self.cost_of(communication));
        let shares = members(lowered, communication).map(move |rank| (rank, costs.processor_share(lowered, cost, rank)));
        shares.filter(|&(_, (_, share))| share > 0.0).map(|(rank, (resource, _))| (rank, resource))
    }

    /// Begins the flow of a communication's data.
    pub(super) fn begin_flow(&mut self, communication: Communication) {
        let flow = self.cost_of(communication).flow;
        if flow == Picoseconds::ZERO {
            self.finish_communication(communication);
        } else {
            self.add_flow(communication, flow.0 as f64);
        }
    }

    /// Makes the flow of a communication a fluid activity on its links and processors, with `left`
    /// picoseconds of work left at rate 1.
    pub(super) fn add_flow(&mut self, communication: Communication, left: f64) {
        let (lowered, costs, cost) = (self.lowered, self.costs, self.cost_of(communication));
        let links = cost.loads().iter().map(move |&(link, load)| {
            // A sample may be faster than the link's stated rate; that rate must remain possible.
            (link as u32, (load * cost.bytes_per_second).min(lowered.capacities[link]))
        });
        let members = members(lowered, communication);
        let first = members.clone().next();
        let processors = members.map(move |rank| costs.processor_share(lowered, cost, rank));
        let mut largest_share: f64 = 0.0;
        for (resource, share) in processors.clone() {
            if share > 0.0 {
                largest_share = largest_share.max(share);
                self.end_exclusive_use(resource);
            }
        }
        let growth = growth(lowered, first.map(|rank| lowered.ranks[rank as usize].kind), largest_share);
        self.add_fluid(FluidOwner::Communication(communication), left, links.chain(processors), growth);
    }

    /// Keeps links of a network busy with the backlog of a communication that has ended. A traffic
    /// shaper or a port lets the start of a message pass at once. So a short message by itself
    /// arrives earlier than the link's rate allows, and the next message waits for the difference.
    fn add_backlogs(&mut self, communication: Communication) {
        let cost = self.cost_of(communication);
        let lowered = self.lowered;
        for &(link, load) in cost.loads() {
            let capacity = lowered.capacities[link];
            if lowered.has_queue[link]
                && let Some(backlog) = backlog(load, cost.bytes, capacity, cost.flow_seconds)
            {
                self.add_fluid(FluidOwner::Nothing, Picoseconds::from(backlog).0 as f64, [(link as u32, capacity)], 1.0);
            }
        }
    }

    /// Ends a communication, and the blocks of all members in it.
    pub(super) fn finish_communication(&mut self, communication: Communication) {
        let now = self.queue.now();
        self.add_backlogs(communication);
        match communicator(self.lowered, communication.communicator) {
            Communicator::Group(group) => {
                // Data of more members would be evicted from the cache before their turn.
                self.prefetch(group.members.iter().take(16).map(|&(member, _)| member));
                for &(member, number) in &group.members {
                    self.catch_up(member);
                    self.ranks[member as usize].meter.end(TimeCategory::Communication, now);
                    self.interrupt(member);
                    let block_list = self.ranks[member as usize].block_list;
                    let block = block_list.collectives[number as usize][communication.nth as usize];
                    self.finish(Task { rank: member, block });
                }
            }
            Communicator::Channel(_, channel) => {
                let index = channel.first_communication - self.messages.first + communication.nth;
                let flags = &mut self.messages.flags[index as usize];
                *flags |= flag::HAS_ENDED;
                let receiver_is_ready = *flags & flag::RECEIVER_IS_READY != 0;
                self.catch_up(channel.sender);
                self.catch_up(channel.receiver);
                self.interrupt(channel.receiver);
                self.ranks[channel.sender as usize].meter.end(TimeCategory::Communication, now);
                let block_list = self.ranks[channel.sender as usize].block_list;
                let block = block_list.sends[channel.send_peer as usize][communication.nth as usize];
                self.finish(Task { rank: channel.sender, block });
                if receiver_is_ready {
                    self.ranks[channel.receiver as usize].meter.end(TimeCategory::Communication, now);
                    let block_list = self.ranks[channel.receiver as usize].block_list;
                    let block = block_list.receives[channel.receive_peer as usize][communication.nth as usize];
                    self.finish(Task { rank: channel.receiver, block });
                }
            }
        }
    }

    pub(super) fn cost_of(&self, communication: Communication) -> &'a ResolvedCost<'a> {
        let distinct = match communicator(self.lowered, communication.communicator) {
            Communicator::Group(group) => group.collectives.index(communication.nth as usize),
            Communicator::Channel(_, channel) => channel.bytes.index(communication.nth as usize),
        };
        self.costs.of(communication.communicator, distinct)
    }

    /// The flags of a message; `None` for a collective.
    fn flags_of(&mut self, message: Communication) -> Option<&mut u32> {
        match communicator(self.lowered, message.communicator) {
            Communicator::Channel(_, channel) => {
                let index = channel.first_communication - self.messages.first + message.nth;
                self.messages.flags.get_mut(index as usize)
            }
            Communicator::Group(_) => None,
        }
    }
}

/// The simulated ranks that take part in a communication.
fn members<'a>(lowered: &'a Lowered<'_>, communication: Communication) -> impl Iterator<Item = u32> + Clone + use<'a> {
    let (members, ends): (&[(u32, u32)], [Option<u32>; 2]) = match communicator(lowered, communication.communicator) {
        Communicator::Group(group) => (&group.members, [None; 2]),
        Communicator::Channel(_, channel) => (&[], [Some(channel.sender), Some(channel.receiver)]),
    };
    members.iter().map(|&(member, _)| member).chain(ends.into_iter().flatten())
}
