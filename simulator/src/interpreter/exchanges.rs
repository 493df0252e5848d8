//! The part of the interpreter that deals with collectives and messages: who has arrived, when data begin to flow, what the flow
//! takes of links and processors, and who may go on when it ends.

use super::{Event, Interpreter, Owner, Parties, Task};
use crate::exchange::Cost;
use crate::network::Shape;
use foretell_units::{Picoseconds, Seconds};

impl<'a> Interpreter<'a> {
    pub(super) fn receive(&mut self, exchange: u32, channel: u32, nth: u32, task: Task) {
        let state = &mut self.exchanges[exchange as usize];
        state.receiver_is_there = true;
        if !state.is_ahead {
            self.try_message(exchange);
            return;
        }
        let is_done = state.is_done;
        let buffered = &mut self.buffered[channel as usize];
        buffered.bytes -= self.lowered.channels[channel as usize].bytes[nth as usize];
        let blocked = buffered.blocked.take();
        if is_done {
            self.finish(task);
        }
        if let Some(blocked) = blocked {
            self.try_message(blocked);
        }
    }

    /// Begins a message if both are there, or if the sender is and the buffer has room.
    pub(super) fn try_message(&mut self, exchange: u32) {
        let Parties::Channel { channel, nth } = self.parties[exchange as usize] else { return };
        let state = &mut self.exchanges[exchange as usize];
        if state.has_begun || !state.sender_is_there {
            return;
        }
        if !state.receiver_is_there {
            let bytes = self.lowered.channels[channel as usize].bytes[nth as usize];
            let buffered = &mut self.buffered[channel as usize];
            if buffered.bytes + bytes > self.lowered.costs.buffered.count() {
                buffered.blocked = Some(exchange);
                return;
            }
            buffered.bytes += bytes;
            state.is_ahead = true;
        }
        self.begin(exchange);
    }

    pub(super) fn begin(&mut self, exchange: u32) {
        let now = self.queue.now();
        let state = &mut self.exchanges[exchange as usize];
        (state.has_begun, state.began) = (true, now);
        let (cost, _) = self.cost(exchange);
        if !cost.source.is_calibrated() {
            let what = self.describe(exchange);
            self.uncalibrated.insert(what);
        }
        self.queue.schedule(now + cost.latency.into(), Event::Latency(exchange));
    }

    /// Data begin to flow: the exchange takes its part of links and processors.
    pub(super) fn flow(&mut self, exchange: u32) {
        let (cost, shape) = self.cost(exchange);
        let work = Picoseconds::from(cost.flow);
        if work == Picoseconds::ZERO {
            self.finish_exchange(exchange);
            return;
        }
        let lowered = self.lowered;
        // Bytes a second of each flow when nothing hinders them.
        let pace = cost.bytes / cost.flow.value();
        let links = shape.map_or(&[][..], |shape| shape.loads.as_slice()).iter().map(move |&(link, load)| {
            // What was measured faster than the link is stated must still be possible.
            (link as u32, (load * pace).min(lowered.capacities[link]))
        });
        let share_of = |rank: u32| {
            let rank = &lowered.ranks[rank as usize];
            let whole = cost.processor_share.unwrap_or(lowered.costs.parameters(rank.kind).communication_share);
            (rank.processor, (whole / lowered.costs.speed(rank.kind)).min(1.0))
        };
        let (members, ends): (&[(u32, u32)], [Option<u32>; 2]) = match self.parties[exchange as usize] {
            Parties::Group { group, .. } => (&lowered.groups[group as usize].members, [None; 2]),
            Parties::Channel { channel, .. } => {
                let channel = &lowered.channels[channel as usize];
                (&[], [Some(channel.sender), Some(channel.receiver)])
            }
        };
        let members = members.iter().map(|&(member, _)| member);
        let first = members.clone().chain(ends.into_iter().flatten()).next();
        let own_growth = first.and_then(|rank| lowered.costs.parameters(lowered.ranks[rank as usize].kind).communication_growth);
        let processors = members.chain(ends.into_iter().flatten()).map(share_of);
        let mut largest_share: f64 = 0.0;
        for (resource, share) in processors.clone() {
            if share > 0.0 {
                largest_share = largest_share.max(share);
                self.join(resource);
            }
        }
        // Processors are shared as an operating system shares them: equal use until one needs no more. So a flow that needs the
        // share s grows 1/s times as fast as a kernel. On a link flows of one share lose the same part of their own pace.
        let growth = own_growth.unwrap_or(if largest_share > 0.0 { 1.0 / largest_share } else { 1.0 });
        self.add_fluid(Owner::Exchange(exchange), work, links.chain(processors), growth);
    }

    /// Keeps the network's links busy for what an exchange that has ended took of them beyond their rates. A shaper or a port lets the first of
    /// a message pass at once, so a short message that is alone arrives sooner than the rate has it; the next one pays for that.
    fn pay_queues(&mut self, exchange: u32) {
        let (cost, Some(shape)) = self.cost(exchange) else { return };
        let lowered = self.lowered;
        for &(link, load) in &shape.loads {
            let capacity = lowered.capacities[link];
            let owed = Seconds::new(load * cost.bytes / capacity - cost.flow.value());
            if lowered.has_queue[link] && owed > Seconds::ZERO {
                self.add_fluid(Owner::Nobody, owed.into(), [(link as u32, capacity)], 1.0);
            }
        }
    }

    pub(super) fn finish_exchange(&mut self, exchange: u32) {
        let lowered = self.lowered;
        self.pay_queues(exchange);
        self.exchanges[exchange as usize].is_done = true;
        match self.parties[exchange as usize] {
            Parties::Group { group, nth } => {
                for &(member, number) in &lowered.groups[group as usize].members {
                    self.interrupt(member, self.interruption[member as usize]);
                    let stage = &lowered.lists[lowered.ranks[member as usize].list];
                    let instruction = stage.collectives[number as usize][nth as usize];
                    self.finish(Task { rank: member, instruction });
                }
            }
            Parties::Channel { channel, nth } => {
                let channel = &lowered.channels[channel as usize];
                self.interrupt(channel.receiver, self.interruption[channel.receiver as usize]);
                let sends = &lowered.lists[lowered.ranks[channel.sender as usize].list].sends[channel.send_peer as usize];
                self.finish(Task { rank: channel.sender, instruction: sends.instructions[nth as usize] });
                if self.exchanges[exchange as usize].receiver_is_there {
                    let stage = &lowered.lists[lowered.ranks[channel.receiver as usize].list];
                    let receives = &stage.receives[channel.receive_peer as usize];
                    self.finish(Task { rank: channel.receiver, instruction: receives.instructions[nth as usize] });
                }
            }
        }
    }

    fn cost(&self, exchange: u32) -> (Cost, Option<&'a Shape>) {
        let lowered = self.lowered;
        match self.parties[exchange as usize] {
            Parties::Group { group, nth } => lowered.groups[group as usize].cost(lowered.costs, nth, self.quantile),
            Parties::Channel { channel, nth } => {
                let channel = &lowered.channels[channel as usize];
                (channel.cost(lowered.costs, nth, self.quantile), Some(&channel.shape))
            }
        }
    }

    fn describe(&self, exchange: u32) -> String {
        match self.parties[exchange as usize] {
            Parties::Group { group, nth } => {
                let group = &self.lowered.groups[group as usize];
                format!("{} of {} ranks", group.collectives[nth as usize].kind.name(), group.size)
            }
            Parties::Channel { .. } => "send and receive".into(),
        }
    }
}
