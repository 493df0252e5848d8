//! Workers that go at their own pace: their throughput and the staleness of their gradients, over
//! many steps.
//!
//! One simulated step gives the time of each worker's own step, with all workers communicating at
//! once, and the times of its two turns at a server. From there many steps are simulated by the
//! rules of [`Versions`], which the executor follows, too: a worker pulls when the bound lets it,
//! computes, and pushes; turns at a server come one after the other. One server stands for all,
//! since each worker's messages reach all servers at about the same time.
//!
//! Steps vary by the spread that the prediction of one step has. The variation is drawn from a
//! fixed sequence, so the same Program gives the same answer.

use super::paced::PacedPrediction;
use super::prediction::Prediction;
use foretell_program::{Axis, Effect, Operation, Pacing, Phase, Program, Rank, StalenessDistribution, Timeline, Turn, Versions};
use foretell_units::{Picoseconds, Seconds};
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// The number of steps of each worker in a draw, and those before them, which are not counted.
const STEPS: usize = 100;
const WARM_UP: usize = 20;
/// The number of draws: enough for stable deciles.
const DRAWS: u64 = 16;

/// The times of a worker's step.
#[derive(Clone, Copy, Debug, PartialEq)]
struct WorkerTimes {
    /// From the pull to the push, both without their turns at the server.
    step: f64,
    snapshot: f64,
    /// Adding and updating, for each push that counts.
    update: f64,
}

/// One draw's result.
struct Draw {
    /// Updates a second.
    rate: f64,
    staleness: Vec<u64>,
    load: f64,
}

impl Prediction {
    /// The prediction of workers that go at their own pace, from that of one step and its timeline.
    /// Times and rates become those of the mean step of all workers.
    #[must_use]
    pub fn at_own_paces(self, program: &Program, timeline: &Timeline, pacing: Pacing) -> Self {
        let workers = worker_times(program, timeline, pacing);
        if workers.is_empty() {
            return self;
        }
        let spread =
            [self.step_seconds_p10, self.step_seconds_p90].map(|bound| bound.value() / self.step_seconds.value().max(1e-12));
        let draws: Vec<Draw> = (0..DRAWS).map(|seed| draw(&workers, pacing, spread, seed)).collect();
        let mut staleness = Vec::new();
        for one in &draws {
            let known = one.staleness.len().max(staleness.len());
            staleness.resize(known, 0);
            staleness.iter_mut().zip(&one.staleness).for_each(|(sum, count)| *sum += count);
        }
        // A step of all is one step of each worker, or the update that waits for several.
        let updates = pacing.updates_in(1) as f64;
        let mut steps: Vec<f64> = draws.iter().map(|one| updates / one.rate.max(1e-12)).collect();
        steps.sort_by(f64::total_cmp);
        let median = steps[steps.len() / 2];
        // Over many steps their variation averages out; the error of the model itself does not.
        let [fast, slow] = spread.map(|factor| Seconds::new(median * factor));
        let own = |choose: fn(f64, f64) -> f64| workers.iter().map(|one| one.step).reduce(choose).unwrap_or(0.0);
        let paces = PacedPrediction {
            staleness: StalenessDistribution::of_counts(&staleness),
            server_load: draws.iter().map(|one| one.load).sum::<f64>() / draws.len() as f64,
            worker_seconds: [own(f64::min), own(f64::max)],
        };
        Self { paces: Some(paces), ..self.with_step(Seconds::new(median), [fast, slow]) }
    }
}

/// The times of each worker, from one simulated step.
fn worker_times(program: &Program, timeline: &Timeline, pacing: Pacing) -> Vec<WorkerTimes> {
    let mut times = vec![WorkerTimes { step: 0.0, snapshot: 0.0, update: 0.0 }; pacing.workers];
    for (rank, measured) in (0..).map(Rank).zip(&timeline.ranks) {
        let list = program.list_of(rank);
        let loads = list.instructions.iter().any(|one| matches!(*one.operation, Operation::Load { .. }));
        let position = program.mesh.coordinates(rank).along(Axis::Data);
        // Ranks of servers touch what belongs to no pass, and nothing else.
        if !list.passes.is_empty() || loads {
            if let Some(worker) = times.get_mut(position) {
                worker.step = worker.step.max(Seconds::from(measured.end).value());
            }
            continue;
        }
        let kernels = |phase: Phase| {
            let of_phase = list
                .instructions
                .iter()
                .zip(&measured.spans)
                .filter(move |(one, _)| one.phase == phase && matches!(*one.operation, Operation::Compute { .. }));
            let sum = of_phase.map(|(_, span)| span.duration().0).sum::<u64>();
            Seconds::from(Picoseconds(sum)).value() / pacing.workers as f64
        };
        let (snapshot, update) = (kernels(Phase::Forward), kernels(Phase::Update));
        for worker in &mut times {
            (worker.snapshot, worker.update) = (worker.snapshot.max(snapshot), worker.update.max(update));
        }
    }
    for worker in &mut times {
        // The step waited for the copies of all workers, which are made at its start.
        worker.step = (worker.step - worker.snapshot * pacing.workers as f64).max(worker.step * 0.01);
    }
    times
}

/// Simulates many steps of all workers.
fn draw(workers: &[WorkerTimes], pacing: Pacing, spread: [f64; 2], seed: u64) -> Draw {
    let mut random = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut versions = Versions::new(pacing);
    let nanoseconds = |seconds: f64| (seconds * 1e9) as u64;
    // What each worker wants next, and when it is ready for that.
    let mut ready: BinaryHeap<Reverse<(u64, Turn)>> =
        (0..workers.len() as u32).map(|worker| Reverse((0, Turn::Pull(worker)))).collect();
    let mut delayed: Vec<(u64, Turn)> = Vec::new();
    let (mut free, mut busy) = (0, 0);
    let mut draw = Draw { rate: 0.0, staleness: Vec::new(), load: 0.0 };
    let (mut counted, mut began) = (0usize, None);
    let warm = pacing.updates_in(WARM_UP);
    let total = pacing.updates_in(WARM_UP + STEPS);
    while let Some(Reverse((at, turn))) = ready.pop() {
        if versions.version() == total {
            break;
        }
        if !versions.allows(turn) {
            delayed.push((at, turn));
            continue;
        }
        let (Turn::Pull(worker) | Turn::Push(worker)) = turn;
        let times = workers[worker as usize];
        let effects = versions.effects(turn);
        let duration = match effects.first() {
            Some(Effect::Snapshot) => nanoseconds(times.snapshot),
            Some(Effect::Add | Effect::Update) => nanoseconds(times.update),
            None => 0,
        };
        let start = at.max(free);
        (free, busy) = (start + duration, busy + duration);
        let staleness = versions.take(turn);
        let next = match turn {
            Turn::Pull(_) => (free + nanoseconds(times.step * varied(&mut random, spread)), Turn::Push(worker)),
            Turn::Push(_) => (free, Turn::Pull(worker)),
        };
        if let Some(staleness) = staleness {
            if versions.version() > warm {
                let (since, _) = *began.get_or_insert((start, busy));
                let known = draw.staleness.len().max(staleness + 1);
                draw.staleness.resize(known, 0);
                draw.staleness[staleness] += 1;
                counted += usize::from(start > since && effects.contains(&Effect::Update));
            }
            // A push may let others pull.
            ready.extend(delayed.drain(..).map(|(at, turn)| Reverse((at.max(free), turn))));
        }
        ready.push(Reverse(next));
    }
    if let Some((since, before)) = began.filter(|&(since, _)| free > since) {
        draw.rate = counted as f64 / ((free - since) as f64 * 1e-9);
        draw.load = ((busy - before) as f64 / (free - since) as f64).min(1.0);
    }
    draw
}

/// A factor between the bounds of an 80 % interval around 1, with as much beyond each.
fn varied(random: &mut u64, [low, high]: [f64; 2]) -> f64 {
    *random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    let share = (*random >> 11) as f64 / (1u64 << 53) as f64;
    // Linear through the deciles and the median.
    if share < 0.5 { 1.0 - (1.0 - low) * (0.5 - share) / 0.4 } else { 1.0 + (high - 1.0) * (share - 0.5) / 0.4 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn equal(count: usize, step: f64) -> Vec<WorkerTimes> {
        vec![WorkerTimes { step, snapshot: 0.0, update: 0.0 }; count]
    }

    #[test]
    fn equal_workers_see_each_other_once_a_step() {
        let pacing = Pacing { workers: 4, bound: None, quorum: None };
        let draw = draw(&equal(4, 0.1), pacing, [0.9, 1.1], 1);
        let staleness = StalenessDistribution::of_counts(&draw.staleness);
        assert!((staleness.mean - 3.0).abs() < 0.1, "{staleness:?}");
        assert!((draw.rate - 40.0).abs() < 1.0, "{} steps a second", draw.rate);
    }

    #[test]
    fn a_slow_worker_slows_the_others_only_with_a_bound() {
        let mut workers = equal(4, 0.1);
        workers[0].step = 0.4;
        let rate = |bound| draw(&workers, Pacing { workers: 4, bound, quorum: None }, [1.0, 1.0], 1).rate;
        assert!((rate(None) - 32.5).abs() < 0.7, "{}", rate(None));
        assert!((rate(Some(1)) - 10.0).abs() < 0.5, "{}", rate(Some(1)));
    }

    #[test]
    fn a_slow_worker_slows_no_update_that_does_not_wait_for_it() {
        let mut workers = equal(4, 0.1);
        workers[0].step = 0.4;
        let draw = |quorum| draw(&workers, Pacing { workers: 4, bound: None, quorum: Some(quorum) }, [1.0, 1.0], 1);
        assert!((draw(4).rate - 2.5).abs() < 0.05, "{}", draw(4).rate);
        assert!((draw(3).rate - 10.0).abs() < 0.2, "{}", draw(3).rate);
        assert_eq!(StalenessDistribution::of_counts(&draw(4).staleness).max, 0);
        // Its gradients are some versions old when they arrive, and are dropped.
        assert!((2..=4).contains(&StalenessDistribution::of_counts(&draw(3).staleness).max));
    }

    #[test]
    fn a_server_that_takes_turns_all_the_time_limits_the_rate() {
        let workers = vec![WorkerTimes { step: 0.01, snapshot: 0.01, update: 0.04 }; 8];
        let draw = draw(&workers, Pacing { workers: 8, bound: Some(2), quorum: None }, [1.0, 1.0], 1);
        assert!((draw.rate - 20.0).abs() < 0.5 && draw.load > 0.98, "{} {}", draw.rate, draw.load);
    }
}
