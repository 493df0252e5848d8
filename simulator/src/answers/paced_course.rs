//! Simulation of many steps of unsynchronised workers, event by event.
//!
//! Turns at a server follow the rules of [`Versions`], as in the executor, one after the other. One
//! server represents all, since each worker's messages reach all servers at about the same time.
//! Between turns, a worker's activities share links and processors with other workers' activities
//! ([`Sharing`]). So workers that pull and push at different times do not slow each other, unlike
//! workers that begin together.

use super::paced_sharing::Sharing;
use super::paced_steps::{Activity, PacedSteps};
use crate::network::ActivityId;
use foretell_program::{Effect, Pacing, Turn, Versions};
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// What happens at an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Happens {
    /// A worker asks for a turn at a server.
    Wants(Turn),
    /// An activity begins to use resources.
    Begins { worker: u32, activity: u32 },
    /// An activity that uses no resources ends.
    Ends { worker: u32 },
    /// The turn of an activity that uses resources ends, unless its rate has changed since.
    TurnEnds { id: ActivityId, generation: u32 },
}

/// A worker's progress in its step.
#[derive(Clone, Copy, Debug, Default)]
struct Progress {
    part: usize,
    /// Number of activities of the current part that have not ended.
    open: usize,
    /// The factor by which this step computes more slowly than usual.
    factor: f64,
    began: f64,
    seconds: f64,
    steps: usize,
}

/// The steps of each worker in a course: those before counting starts, and those that count.
#[derive(Clone, Copy, Debug)]
pub(super) struct Length {
    pub(super) warm_up: usize,
    pub(super) counted: usize,
}

/// One course of many steps.
#[derive(Debug, Default)]
pub(super) struct Course {
    /// Updates per second.
    pub(super) rate: f64,
    /// For each staleness the number of pushes that had it.
    pub(super) staleness: Vec<u64>,
    /// The share of the time for which a server is busy with turns.
    pub(super) load: f64,
    /// The mean time of each worker's step, from the end of its pull's turn to its push.
    pub(super) worker_seconds: Vec<f64>,
    /// Steps per second of each worker.
    pub(super) worker_rates: Vec<f64>,
}

impl Course {
    /// Simulates a course. `spread` bounds 80 % of step times relative to the median; `seed` is the
    /// seed of the random step times.
    pub(super) fn new(steps: &PacedSteps, pacing: Pacing, spread: [f64; 2], length: Length, seed: u64) -> Self {
        let state = State {
            steps,
            spread,
            random: seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1,
            now: 0.0,
            sharing: Sharing::new(&steps.capacities),
            progress: vec![Progress::default(); steps.workers.len()],
            events: BinaryHeap::new(),
            number: 0,
        };
        state.run(pacing, length)
    }
}

struct State<'a> {
    steps: &'a PacedSteps,
    spread: [f64; 2],
    random: u64,
    /// Seconds since the start.
    now: f64,
    sharing: Sharing<'a>,
    progress: Vec<Progress>,
    /// Ordered by nanoseconds, then by the order in which they were added. Each event has its exact
    /// time as the bits of a float in seconds.
    events: BinaryHeap<Reverse<(u64, u64, u64, Happens)>>,
    number: u64,
}

impl State<'_> {
    fn run(mut self, pacing: Pacing, length: Length) -> Course {
        let mut versions = Versions::new(pacing);
        let (warm, total) = (pacing.updates_in(length.warm_up), pacing.updates_in(length.warm_up + length.counted));
        let mut course = Course::default();
        let mut delayed: Vec<Turn> = Vec::new();
        let (mut free, mut busy) = (0.0_f64, 0.0);
        let (mut counted, mut began) = (0_usize, None);
        // The steps of each worker before counting starts, and the start of counting.
        let (mut before_counting, mut counting_since) = (vec![0; self.progress.len()], 0.0);
        for worker in 0..self.steps.workers.len() as u32 {
            self.add(0.0, Happens::Wants(Turn::Pull(worker)));
        }
        while let Some(Reverse((_, _, bits, happens))) = self.events.pop() {
            if versions.version() == total {
                break;
            }
            // Events of one nanosecond come in the order in which they were added.
            self.now = self.now.max(f64::from_bits(bits));
            match happens {
                Happens::Wants(turn) if !versions.allows(turn) => delayed.push(turn),
                Happens::Wants(turn) => {
                    let (Turn::Pull(worker) | Turn::Push(worker)) = turn;
                    let own = &self.steps.workers[worker as usize];
                    let effects = versions.effects(turn);
                    let duration = match effects.first() {
                        Some(Effect::Snapshot) => own.snapshot,
                        Some(Effect::Add | Effect::Update) => own.update,
                        None => 0.0,
                    };
                    let start = self.now.max(free);
                    (free, busy) = (start + duration, busy + duration);
                    let awaited = versions.awaited();
                    if let Some(staleness) = versions.take(turn)
                        && versions.version() > warm
                    {
                        if began.is_none() {
                            counting_since = self.now;
                            before_counting = self.progress.iter().map(|worker| worker.steps).collect();
                        }
                        let (since, _) = *began.get_or_insert((start, busy));
                        let known = course.staleness.len().max(staleness + 1);
                        course.staleness.resize(known, 0);
                        course.staleness[staleness] += 1;
                        counted += usize::from(start > since && effects.contains(&Effect::Update));
                    }
                    if versions.awaited() != awaited {
                        delayed.drain(..).for_each(|turn| self.add(free, Happens::Wants(turn)));
                    }
                    match turn {
                        Turn::Pull(_) => self.begin_step(worker, free),
                        Turn::Push(_) => self.add(free, Happens::Wants(Turn::Pull(worker))),
                    }
                }
                Happens::Begins { worker, activity } => self.begin(worker, activity as usize),
                Happens::Ends { worker } => self.end_activity(worker),
                Happens::TurnEnds { id, generation } => {
                    if let Some(worker) = self.sharing.end_turn(id, generation, self.now) {
                        self.end_activity(worker);
                    }
                }
            }
            // Solve rates once for all events of the same time.
            if self.events.peek().is_none_or(|Reverse((_, _, bits, _))| f64::from_bits(*bits) > self.now) {
                self.share();
            }
        }
        if let Some((since, before)) = began.filter(|&(since, _)| free > since) {
            course.rate = counted as f64 / (free - since);
            course.load = ((busy - before) / (free - since)).min(1.0);
        }
        let counted_seconds = (self.now - counting_since).max(1e-12);
        let steps = self.progress.iter().zip(&before_counting).map(|(worker, before)| (worker.steps - before) as f64);
        course.worker_rates = steps.map(|steps| steps / counted_seconds).collect();
        course.worker_seconds = self.progress.iter().map(|worker| worker.seconds / worker.steps.max(1) as f64).collect();
        course
    }

    /// Adds an event at a number of seconds.
    fn add(&mut self, at: f64, happens: Happens) {
        self.number += 1;
        self.events.push(Reverse(((at * 1e9) as u64, self.number, at.to_bits(), happens)));
    }

    /// Begins a worker's step.
    fn begin_step(&mut self, worker: u32, at: f64) {
        let factor = varied(&mut self.random, self.spread);
        let one = &mut self.progress[worker as usize];
        (one.part, one.open, one.factor, one.began) = (0, 0, factor, at);
        self.begin_part(worker, at);
    }

    /// Begins the next part of a worker's step that has activities, or ends the step.
    fn begin_part(&mut self, worker: u32, at: f64) {
        let steps = self.steps;
        let one = &mut self.progress[worker as usize];
        let parts = &steps.workers[worker as usize].parts;
        while parts.get(one.part).is_some_and(Vec::is_empty) {
            one.part += 1;
        }
        let Some(part) = parts.get(one.part) else {
            (one.seconds, one.steps) = (one.seconds + at - one.began, one.steps + 1);
            return self.add(at, Happens::Wants(Turn::Push(worker)));
        };
        one.open = part.len();
        for (activity, of_part) in (0..).zip(part) {
            self.add(at + of_part.latency, Happens::Begins { worker, activity });
        }
    }

    fn begin(&mut self, worker: u32, activity: usize) {
        let steps = self.steps;
        let Progress { part, factor, .. } = self.progress[worker as usize];
        let activity @ Activity { seconds, demands, is_flow, .. } = &steps.workers[worker as usize].parts[part][activity];
        // A flow carries the same bytes in each step.
        let seconds = if *is_flow { *seconds } else { seconds * factor };
        match demands.is_empty() {
            true => self.add(self.now + seconds, Happens::Ends { worker }),
            false => self.sharing.begin(worker, activity, seconds, self.now),
        }
    }

    fn end_activity(&mut self, worker: u32) {
        let one = &mut self.progress[worker as usize];
        one.open -= 1;
        if one.open == 0 {
            one.part += 1;
            self.begin_part(worker, self.now);
        }
    }

    /// Divides links and processors anew after a change, and schedules the new ends of turns.
    fn share(&mut self) {
        for end in self.sharing.share(self.now) {
            self.add(end.at, Happens::TurnEnds { id: end.id, generation: end.generation });
        }
    }
}

/// A number from 0 to 1.
fn uniform(random: &mut u64) -> f64 {
    *random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    (*random >> 11) as f64 / (1u64 << 53) as f64
}

/// A random factor around 1, with 10 % of draws below `low` and 10 % above `high`.
fn varied(random: &mut u64, [low, high]: [f64; 2]) -> f64 {
    let share = uniform(random);
    // Linear through the deciles and the median.
    let factor = if share < 0.5 { 1.0 - (1.0 - low) * (0.5 - share) / 0.4 } else { 1.0 + (high - 1.0) * (share - 0.5) / 0.4 };
    factor.max(0.0)
}

#[cfg(test)]
mod tests {
    use super::super::paced_steps::{QueuePlace, WorkerStep};
    use super::*;
    use foretell_program::StalenessDistribution;

    const USUAL: Length = Length { warm_up: 20, counted: 100 };

    fn alone(seconds: f64) -> WorkerStep {
        WorkerStep { parts: [vec![], vec![Activity::alone(seconds)], vec![], vec![]], ..WorkerStep::default() }
    }

    fn equal(count: usize, seconds: f64) -> PacedSteps {
        PacedSteps { workers: vec![alone(seconds); count], capacities: Vec::new() }
    }

    fn course(steps: &PacedSteps, bound: Option<usize>, quorum: Option<usize>, spread: [f64; 2]) -> Course {
        let pacing = Pacing { workers: steps.workers.len(), bound, quorum };
        Course::new(steps, pacing, spread, USUAL, 1)
    }

    #[test]
    fn equal_workers_see_each_other_once_a_step() {
        let course = course(&equal(4, 0.1), None, None, [0.9, 1.1]);
        let staleness = StalenessDistribution::of_counts(&course.staleness);
        assert!((staleness.mean - 3.0).abs() < 0.1, "{staleness:?}");
        assert!((course.rate - 40.0).abs() < 1.0, "{} steps a second", course.rate);
        assert!(course.worker_seconds.iter().all(|seconds| (seconds - 0.1).abs() < 0.005), "{course:?}");
    }

    #[test]
    fn a_slow_worker_slows_the_others_only_with_a_bound() {
        let mut steps = equal(4, 0.1);
        steps.workers[0] = alone(0.4);
        let rate = |bound| course(&steps, bound, None, [1.0, 1.0]).rate;
        assert!((rate(None) - 32.5).abs() < 0.7, "{}", rate(None));
        assert!((rate(Some(1)) - 10.0).abs() < 0.5, "{}", rate(Some(1)));
    }

    #[test]
    fn a_slow_worker_slows_no_update_that_does_not_wait_for_it() {
        let mut steps = equal(4, 0.1);
        steps.workers[0] = alone(0.4);
        let course = |quorum| course(&steps, None, Some(quorum), [1.0, 1.0]);
        assert!((course(4).rate - 2.5).abs() < 0.05, "{}", course(4).rate);
        assert!((course(3).rate - 10.0).abs() < 0.2, "{}", course(3).rate);
        assert_eq!(StalenessDistribution::of_counts(&course(4).staleness).max, 0);
        // Its gradients are some versions old when they arrive, and are dropped.
        assert!((2..=4).contains(&StalenessDistribution::of_counts(&course(3).staleness).max));
    }

    #[test]
    fn a_server_that_takes_turns_all_the_time_limits_the_rate() {
        let worker = WorkerStep { snapshot: 0.01, update: 0.04, ..alone(0.01) };
        let steps = PacedSteps { workers: vec![worker; 8], capacities: Vec::new() };
        let course = course(&steps, Some(2), None, [1.0, 1.0]);
        assert!((course.rate - 20.0).abs() < 0.5 && course.load > 0.98, "{} {}", course.rate, course.load);
    }

    #[test]
    fn one_worker_pulls_while_another_pushes() {
        // One link for each direction. Together, two pulls and then two pushes take four seconds.
        let flow = |link| {
            let queue = Some(QueuePlace { link, window: 0.1 });
            Activity { demands: vec![(link, 1.0)], is_flow: true, queue, ..Activity::alone(1.0) }
        };
        let worker = WorkerStep { parts: [vec![flow(0)], vec![], vec![], vec![flow(1)]], ..WorkerStep::default() };
        let steps = PacedSteps { workers: vec![worker; 2], capacities: vec![1.0; 2] };
        let rate = course(&steps, None, None, [0.8, 1.2]).rate;
        assert!((0.98..=1.0).contains(&rate), "{rate} steps a second");
        // A third worker shares the same links: they carry no more.
        let three = PacedSteps { workers: vec![steps.workers[0].clone(); 3], ..steps };
        let rate = course(&three, None, None, [0.8, 1.2]).rate;
        assert!((0.8..=1.02).contains(&rate), "{rate} steps a second");
    }

    #[test]
    fn computation_beside_a_transfer_takes_no_time_of_its_own() {
        let flow = Activity { latency: 0.5, demands: vec![(0, 1.0)], is_flow: true, ..Activity::alone(1.0) };
        let both = vec![flow, Activity { demands: vec![(1, 1.0)], ..Activity::alone(1.2) }];
        let worker = WorkerStep { parts: [both, vec![Activity::alone(0.5)], vec![], vec![]], ..WorkerStep::default() };
        let steps = PacedSteps { workers: vec![worker], capacities: vec![1.0; 2] };
        let rate = course(&steps, None, None, [1.0, 1.0]).rate;
        assert!((rate - 0.5).abs() < 0.01, "{rate} steps a second");
    }
}
