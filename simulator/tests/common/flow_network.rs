//! Flows without Programs: data between devices over a topology's routes, with links shared by
//! max-min fairness.
//!
//! It shows collisions, the cost of oversubscription and the solver's speed. The caller starts
//! flows, and may start more whenever one ends.

#![allow(dead_code)]

#[path = "deadlines.rs"]
pub mod deadlines;

use deadlines::Deadlines;
use foretell_simulator::{EventQueue, FairShare, LinkEfficiency};
use foretell_topologies::{DeviceId, Topology, TopologyError};
use foretell_units::{Bytes, Picoseconds};

/// Data that one device sends to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Flow {
    /// The sender.
    pub from: DeviceId,
    /// The receiver.
    pub to: DeviceId,
    /// The size.
    pub bytes: Bytes,
}

/// A flow's number, in order of start from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FlowId(pub u64);

/// A topology's links and the flows on them.
#[derive(Debug)]
pub struct FlowNetwork<'a> {
    topology: &'a Topology,
    share: FairShare,
    now: Picoseconds,
    /// Flows whose first byte arrives.
    arrivals: EventQueue<u32>,
    /// End of each activity at the current rates.
    ends: Deadlines,
    /// Flows that share links, by activity.
    live: Vec<Live>,
    /// Started flows whose first byte has not arrived.
    begun: Vec<Begun>,
    free: Vec<u32>,
    started: u64,
    rate_changes: u64,
}

/// A flow that shares links.
#[derive(Clone, Copy, Debug)]
struct Live {
    id: FlowId,
    /// Bytes that were left at `since`.
    left: f64,
    since: Picoseconds,
}

/// A flow whose first byte is on its way.
#[derive(Clone, Debug)]
struct Begun {
    id: FlowId,
    bytes: f64,
    /// Its links, each with a demand of one byte per byte of the flow.
    demands: Vec<(u32, f64)>,
    limit: f64,
}

const PICOSECONDS_PER_SECOND: f64 = 1e12;

impl<'a> FlowNetwork<'a> {
    /// Creates the links of a topology, with bandwidths scaled by `efficiency`.
    pub fn new(topology: &'a Topology, efficiency: &LinkEfficiency) -> Self {
        Self {
            topology,
            share: FairShare::new(topology.links().iter().map(|link| link.bandwidth.value() * efficiency.of(link.class))),
            now: Picoseconds::ZERO,
            arrivals: EventQueue::new(),
            ends: Deadlines::default(),
            live: Vec::new(),
            begun: Vec::new(),
            free: Vec::new(),
            started: 0,
            rate_changes: 0,
        }
    }

    /// Returns the time of the last event.
    pub fn now(&self) -> Picoseconds {
        self.now
    }

    /// Returns the number of rate changes so far.
    pub fn rate_changes(&self) -> u64 {
        self.rate_changes
    }

    /// Starts a flow now. It uses links once its route's latency has passed.
    ///
    /// # Errors
    /// If no route joins the two devices.
    pub fn start(&mut self, flow: &Flow) -> Result<FlowId, TopologyError> {
        let route = self.topology.route(flow.from, flow.to)?;
        let id = FlowId(self.started);
        self.started += 1;
        let place = self.free.pop().unwrap_or_else(|| {
            self.begun.push(Begun { id, bytes: 0.0, demands: Vec::new(), limit: 0.0 });
            (self.begun.len() - 1) as u32
        });
        let begun = &mut self.begun[place as usize];
        (begun.id, begun.bytes) = (id, flow.bytes.value());
        begun.demands.clear();
        begun.demands.extend(route.links.iter().map(|link| (link.0 as u32, 1.0)));
        begun.limit = route.single_flow_limit.map_or(f64::INFINITY, |limit| limit.value());
        self.arrivals.schedule(self.now + route.latency.into(), place);
        Ok(id)
    }

    /// Runs until a flow ends, and returns the flow and the time; `None` if no flow is left. Of
    /// flows that end at one instant, the one with the lowest activity comes first.
    pub fn next_end(&mut self) -> Option<(FlowId, Picoseconds)> {
        loop {
            let next = || [self.arrivals.next_time(), self.ends.first().map(|(time, _)| time)].into_iter().flatten().min();
            if self.share.is_stale() && next().is_none_or(|time| time > self.now) {
                self.update_rates();
            }
            match (self.arrivals.next_time(), self.ends.first()) {
                (arrival, Some((end, activity))) if arrival.is_none_or(|arrival| end <= arrival) => {
                    self.now = end;
                    self.ends.remove(activity);
                    self.share.remove(activity);
                    return Some((self.live[activity as usize].id, end));
                }
                _ => {
                    let place = self.arrivals.pop()?;
                    self.now = self.arrivals.now();
                    self.begin(place);
                }
            }
        }
    }

    fn begin(&mut self, place: u32) {
        let Begun { id, bytes, ref demands, limit } = self.begun[place as usize];
        let activity = self.share.add(demands.iter().copied(), limit, 1.0);
        self.free.push(place);
        let index = activity as usize;
        let flow = Live { id, left: bytes, since: self.now };
        if index < self.live.len() {
            self.live[index] = flow;
        } else {
            self.live.push(flow);
        }
        if self.share.rate(activity) > 0.0 {
            // It crosses no link.
            self.ends.set(activity, self.now);
        }
    }

    /// Recomputes the rates at the current time and the ends of the affected flows.
    fn update_rates(&mut self) {
        let Self { share, live, ends, rate_changes, now, .. } = self;
        let now = *now;
        share.solve(|activity, before, rate| {
            *rate_changes += 1;
            let flow = &mut live[activity as usize];
            let passed = now.saturating_sub(flow.since).0 as f64 / PICOSECONDS_PER_SECOND;
            flow.left = (flow.left - before * passed).max(0.0);
            flow.since = now;
            ends.set(activity, now + Picoseconds((flow.left / rate * PICOSECONDS_PER_SECOND).ceil() as u64));
        });
    }
}
