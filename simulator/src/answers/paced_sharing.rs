//! Links and processors that many unsynchronised workers share.
//!
//! A link's queue is first come, first served. A sender has a window of bytes in flight, and sends
//! more as these arrive. So a new flow waits behind the windows of flows that are under way, and
//! then flows take turns of one window each. In a lab of 200 Mbit/s links a second transfer, begun
//! 40 ms after a first, got its first byte after 32 ms, and the first one took 177 ms instead of
//! the 184 ms of equal shares. Such differences add up, step by step, until one worker pushes while
//! the other pulls.
//!
//! A flow waits in the queue of the busiest link on its route. Flows that the link carries
//! together, and all activities of a processor, share it fairly. This file must not know steps or
//! turns at servers.

use super::paced_steps::Activity;
use crate::network::{ActivityId, FairShare, ResourceId};
use std::collections::{BTreeMap, VecDeque};

/// A relative difference below which times are equal.
const ROUNDING: f64 = 1e-9;

/// A waiting flow begins beside others only if the link has at least this share of the flow's
/// demand left. (A measured flow may use a little less than the whole link, and the remainder must
/// not admit another.)
const LEAST: f64 = 0.5;

/// The links and processors, and the activities that use them.
pub(super) struct Sharing<'a> {
    fair: FairShare,
    capacities: &'a [f64],
    /// Indexed by the activity's number in `fair`.
    running: Vec<Running<'a>>,
    queues: BTreeMap<ResourceId, Queue<'a>>,
    /// Activities whose turn changed, even if their rate did not.
    changed: Vec<ActivityId>,
}

/// An activity of a worker.
#[derive(Clone, Copy)]
struct User<'a> {
    worker: u32,
    activity: &'a Activity,
}

/// An activity that uses its resources now.
struct Running<'a> {
    user: User<'a>,
    /// Seconds of work at full speed: what remained of this turn at time `since`, and (`after`)
    /// what follows after this turn.
    turn: f64,
    after: f64,
    since: f64,
    rate: f64,
    /// Changes with every new turn or rate. An end that was scheduled with an older generation is
    /// ignored.
    generation: u32,
    has_ended: bool,
}

/// The flows of a link.
#[derive(Default)]
struct Queue<'a> {
    in_service: Vec<ActivityId>,
    /// Each with its remaining work in seconds.
    waiting: VecDeque<(User<'a>, f64)>,
}

/// When the turn of an activity ends, unless its generation has changed by then.
pub(super) struct TurnEnd {
    pub(super) at: f64,
    pub(super) id: ActivityId,
    pub(super) generation: u32,
}

impl User<'_> {
    /// The work of the next turn, if `left` remains. A remainder that is mere rounding gets no
    /// further turn.
    fn turn(&self, left: f64) -> f64 {
        let window = self.activity.queue.map_or(left, |place| place.window);
        if left <= window * (1.0 + ROUNDING) { left } else { window }
    }
}

impl Running<'_> {
    fn settle(&mut self, now: f64) {
        self.turn = (self.turn - (now - self.since) * self.rate).max(0.0);
        self.since = now;
    }
}

impl<'a> Sharing<'a> {
    pub(super) fn new(capacities: &'a [f64]) -> Self {
        let fair = FairShare::new(capacities.iter().copied());
        Self { fair, capacities, running: Vec::new(), queues: BTreeMap::new(), changed: Vec::new() }
    }

    /// Begins an activity that takes `seconds` alone.
    pub(super) fn begin(&mut self, worker: u32, activity: &'a Activity, seconds: f64, now: f64) {
        let user = User { worker, activity };
        let Some(place) = activity.queue else {
            self.run(user, seconds, 0.0, now);
            return;
        };
        let queue = self.queues.entry(place.link).or_default();
        if queue.waiting.is_empty() {
            // Of each flow in service, at most one window is ahead of the new flow.
            for &id in &queue.in_service {
                let one = &mut self.running[id as usize];
                one.settle(now);
                let left = one.turn + one.after;
                one.turn = one.user.turn(left);
                one.after = left - one.turn;
                self.changed.push(id);
            }
        }
        queue.waiting.push_back((user, seconds));
        self.admit(place.link, now);
    }

    /// Ends the turn of an activity. Returns its worker if the activity ends with it.
    pub(super) fn end_turn(&mut self, id: ActivityId, generation: u32, now: f64) -> Option<u32> {
        let one = self.running.get_mut(id as usize).filter(|activity| activity.generation == generation)?;
        (one.generation, one.has_ended) = (one.generation + 1, true);
        let (user, after) = (one.user, one.after);
        let ended = (after <= 0.0).then_some(user.worker);
        let Some(place) = user.activity.queue else {
            self.fair.remove(id);
            return ended;
        };
        let queue = self.queues.entry(place.link).or_default();
        if ended.is_none() && queue.waiting.is_empty() {
            (one.turn, one.after, one.since, one.has_ended) = (after, 0.0, now, false);
            self.changed.push(id);
            return None;
        }
        queue.in_service.retain(|&other| other != id);
        if ended.is_none() {
            queue.waiting.push_back((user, after));
        }
        self.fair.remove(id);
        self.admit(place.link, now);
        ended
    }

    /// Lets flows of a queue begin their turns while its link has capacity left.
    fn admit(&mut self, link: ResourceId, now: f64) {
        loop {
            let Some(queue) = self.queues.get_mut(&link) else { return };
            let on_link = |id: &ActivityId| self.running[*id as usize].user.activity.demand_of(link);
            let used: f64 = queue.in_service.iter().map(on_link).sum();
            let Some((first, _)) = queue.waiting.front() else { return };
            let free = self.capacities[link as usize] - used;
            if !queue.in_service.is_empty() && free < first.activity.demand_of(link) * LEAST {
                return;
            }
            let Some((user, left)) = queue.waiting.pop_front() else { return };
            // If no flow waits behind it, its turn lasts until its work ends.
            let turn = if queue.waiting.is_empty() { left } else { user.turn(left) };
            let id = self.run(user, turn, left - turn, now);
            self.queues.entry(link).or_default().in_service.push(id);
        }
    }

    fn run(&mut self, user: User<'a>, turn: f64, after: f64, now: f64) -> ActivityId {
        let Activity { demands, growth, .. } = user.activity;
        let id = self.fair.add(demands.iter().copied(), 1.0, *growth);
        let generation = self.running.get(id as usize).map_or(0, |before| before.generation + 1);
        let one = Running { user, turn, after, since: now, rate: 0.0, generation, has_ended: false };
        match self.running.get_mut(id as usize) {
            Some(place) => *place = one,
            // `fair` gives out consecutive numbers.
            None => self.running.push(one),
        }
        id
    }

    /// Solves the rates after changes. Returns the new ends of turns.
    pub(super) fn share(&mut self, now: f64) -> Vec<TurnEnd> {
        let Self { fair, running, changed, .. } = self;
        if fair.is_stale() {
            fair.solve(|id, _, rate| {
                let one = &mut running[id as usize];
                one.settle(now);
                one.rate = rate;
                changed.push(id);
            });
        }
        let end = |id: ActivityId| {
            let one = &mut running[id as usize];
            one.generation += 1;
            let moves = one.rate > 0.0 && !one.has_ended;
            moves.then(|| TurnEnd { at: one.since + one.turn / one.rate, id, generation: one.generation })
        };
        changed.drain(..).filter_map(end).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::super::paced_steps::QueuePlace;
    use super::*;

    /// Ends of transfers of `seconds` each over one link, which begin at these times.
    fn ends(begins: &[f64], seconds: f64, window: f64) -> Vec<f64> {
        ends_of(begins, 1.0, seconds, window)
    }

    fn ends_of(begins: &[f64], demand: f64, seconds: f64, window: f64) -> Vec<f64> {
        let queue = Some(QueuePlace { link: 0, window });
        let flow = Activity { demands: vec![(0, demand)], queue, is_flow: true, ..Activity::alone(seconds) };
        let mut sharing = Sharing::new(&[1.0]);
        let (mut found, mut next) = (vec![0.0; begins.len()], 0);
        let mut open: Vec<TurnEnd> = Vec::new();
        loop {
            let first = open.iter().map(|end| end.at).fold(f64::INFINITY, f64::min);
            let at = match begins.get(next) {
                Some(&at) if at <= first => {
                    sharing.begin(next as u32, &flow, seconds, at);
                    next += 1;
                    at
                }
                _ if first.is_finite() => {
                    let place = open.iter().position(|end| end.at == first).expect("the first");
                    let TurnEnd { at, id, generation } = open.swap_remove(place);
                    if let Some(worker) = sharing.end_turn(id, generation, at) {
                        found[worker as usize] = at;
                    }
                    at
                }
                _ => return found,
            };
            open.extend(sharing.share(at));
        }
    }

    #[test]
    fn a_second_transfer_waits_behind_what_is_in_flight_as_in_a_lab() {
        // Two TCP connections over 200 Mbit/s in `lab-4x1g-200m`, 2.68 MB each, three times for
        // each offset of the second one. A transfer alone takes 112 ms, and 33.5 ms of it are in
        // flight.
        for (offset, measured) in [(0.04, 0.177), (0.06, 0.150), (0.08, 0.112), (0.1, 0.112)] {
            let ends = ends(&[0.0, offset], 0.112, 0.0335);
            assert!((ends[0] - measured).abs() < 0.007, "{offset}: {} instead of {measured}", ends[0]);
            assert!((ends[1] - 0.224).abs() < 1e-6, "{offset}: {}", ends[1]);
        }
    }

    #[test]
    fn a_little_of_a_link_that_is_left_over_is_not_shared() {
        // The link has 0.3 % more than one needs, or as much as two.
        let nearly_all = ends_of(&[0.0, 0.04], 0.997, 0.112, 0.0335);
        assert!((nearly_all[0] - 0.179).abs() < 1e-3 && (nearly_all[1] - 0.224).abs() < 1e-3, "{nearly_all:?}");
        let half = ends_of(&[0.0, 0.04], 0.5, 0.112, 0.0335);
        assert!((half[0] - 0.112).abs() < 1e-6 && (half[1] - 0.152).abs() < 1e-6, "{half:?}");
    }

    #[test]
    fn many_small_windows_are_equal_shares() {
        let ends = ends(&[0.0, 0.04], 0.112, 1e-4);
        assert!((ends[0] - 0.184).abs() < 5e-4 && (ends[1] - 0.224).abs() < 1e-6, "{ends:?}");
    }
}
