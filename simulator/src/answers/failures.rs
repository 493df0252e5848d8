//! Failures, checkpoints and restarts: the goodput of a long run, and the best interval between
//! checkpoints.
//!
//! The failure of any node ends the whole run. Work since the last checkpoint is lost, and after a
//! restart the run continues from that checkpoint. Failures are a Poisson process and also strike
//! while a checkpoint is written or the run restarts. Training stops while a checkpoint is copied,
//! and continues while the copy is written to storage. The checkpoint counts once it is written.
//!
//! The simulation goes event by event, so that other rules can be added. For these rules the
//! expected goodput has a closed form ([`Reliability::expected_goodput`]; Daly 2006, "A higher
//! order estimate of the optimum checkpoint interval for restart dumps", Future Generation Computer
//! Systems 22). Young (1974) and Daly give formulas for the best interval. The tests compare the
//! simulation with all three. This file must not know Programs or topologies.

use foretell_units::Seconds;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// Times that determine how much a long run loses to failures and checkpoints.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Reliability {
    /// The mean time between failures of any part of the run.
    pub mean_time_between_failures: Seconds,
    /// The time for which training stops for a checkpoint.
    pub checkpoint: Seconds,
    /// The time from then until the checkpoint is on storage, while training continues. The next
    /// checkpoint waits until it has passed.
    pub write: Seconds,
    /// The time from a failure until the run continues from its last checkpoint.
    pub restart: Seconds,
}

/// The result of simulating a run with failures.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct FailingRun {
    /// The duration of the run.
    pub wall: Seconds,
    /// Time spent on work that was kept.
    pub useful: Seconds,
    /// Time spent on work that a failure undid, and on checkpoints that it interrupted.
    pub lost: Seconds,
    /// Time in which training stopped for checkpoints that were completed.
    pub checkpointing: Seconds,
    /// Time spent restarting.
    pub restarting: Seconds,
    /// Number of failures.
    pub failures: u64,
}

impl FailingRun {
    /// The share of the run that was spent on work that was kept, from 0 to 1; 1 for an empty run.
    pub fn goodput(&self) -> f64 {
        if self.wall > Seconds::ZERO { self.useful / self.wall } else { 1.0 }
    }
}

impl Reliability {
    /// Simulates a run of `work` with a checkpoint after each `interval` of work and none at the
    /// end. It stops after `most_failures`, since a run may make almost no progress.
    pub fn simulate(&self, work: Seconds, interval: Seconds, seed: u64, most_failures: u64) -> FailingRun {
        let mut failures = Failures { mean: self.mean_time_between_failures, random: ChaCha8Rng::seed_from_u64(seed) };
        let mut run = FailingRun::default();
        let mut until_failure = failures.next();
        let cycle = self.cycle(interval);
        // Count the intervals of work as whole numbers, so that rounding errors cannot add one. A
        // last stretch shorter than 1e-9 of an interval is dropped.
        let stretches = (work / interval - 1e-9).ceil().max(0.0);
        let last = work - interval * (stretches - 1.0);
        let mut done = 0.0;
        while done < stretches {
            // No checkpoint follows the last interval of work.
            let checkpoints = stretches - 1.0 - done;
            let to_end = cycle * checkpoints + last;
            if to_end <= until_failure {
                run.wall += to_end;
                run.checkpointing += (cycle - interval) * checkpoints;
                run.useful = work;
                return run;
            }
            // All checkpoints completed before the failure are one event.
            let whole = ((until_failure - self.write) / cycle).floor().clamp(0.0, checkpoints);
            run.wall += until_failure;
            run.checkpointing += (cycle - interval) * whole;
            run.lost += (until_failure - cycle * whole).max(Seconds::ZERO);
            done += whole;
            run.useful = interval * done;
            run.failures += 1;
            until_failure = failures.next();
            // A failure during the restart starts the restart again.
            while until_failure < self.restart {
                run.wall += until_failure;
                run.restarting += until_failure;
                run.failures += 1;
                until_failure = failures.next();
                if run.failures >= most_failures {
                    return run;
                }
            }
            run.wall += self.restart;
            run.restarting += self.restart;
            until_failure = until_failure - self.restart;
            if run.failures >= most_failures {
                return run;
            }
        }
        run
    }

    /// The time from one checkpoint to the next: an interval of work, or the write of the last
    /// checkpoint if that is longer, and the stop for a checkpoint.
    fn cycle(&self, interval: Seconds) -> Seconds {
        self.checkpoint + interval.max(self.write)
    }

    /// Simulates about ten thousand failures, which leaves the goodput uncertain by about 1 %. With
    /// the same seed, every interval has the same failures.
    pub fn long_run(&self, interval: Seconds, seed: u64) -> FailingRun {
        const FAILURES: f64 = 1e4;
        self.simulate(self.mean_time_between_failures * FAILURES, interval, seed, 2 * FAILURES as u64)
    }

    /// Returns the expected long-run goodput by Daly's model (2006).
    ///
    /// With M the mean time between failures, R the restart, d the checkpoint and t the interval,
    /// an interval of work takes M e^(R/M) (e^((t+d)/M) - 1) on average. If a checkpoint counts
    /// only after a further time w, the k-th one after a start counts if no failure strikes within
    /// k (t+d) + w. Summed over k, e^(-w/M) times as many checkpoints count.
    pub fn expected_goodput(&self, interval: Seconds) -> f64 {
        let mean = self.mean_time_between_failures.value();
        let of_cycle = (self.cycle(interval).value() / mean).exp_m1();
        let stretch = mean * ((self.restart + self.write).value() / mean).exp() * of_cycle;
        if stretch > 0.0 { interval.value() / stretch } else { 1.0 }
    }

    /// Returns Young's interval (1974): the square root of 2 d M.
    pub fn young(&self) -> Seconds {
        Seconds::new((2.0 * self.checkpoint.value() * self.mean_time_between_failures.value()).sqrt())
    }

    /// Returns Daly's interval (2006). It is better than Young's if a checkpoint is not short
    /// compared with the time between failures.
    pub fn daly(&self) -> Seconds {
        let (checkpoint, mean) = (self.checkpoint.value(), self.mean_time_between_failures.value());
        let half = checkpoint / (2.0 * mean);
        if half >= 1.0 {
            return self.mean_time_between_failures;
        }
        Seconds::new((2.0 * checkpoint * mean).sqrt() * (1.0 + half.sqrt() / 3.0 + half / 9.0) - checkpoint)
    }

    /// Returns the interval with the best simulated goodput, and that goodput. It searches whole
    /// multiples of `step`. All candidates have the same failures, so chance favours none.
    pub fn best_interval(&self, step: Seconds, seed: u64) -> (Seconds, f64) {
        let goodput = |steps: f64| self.long_run(step * steps, seed).goodput();
        let most = (self.mean_time_between_failures * 4.0 / step).floor().max(1.0);
        // Goodput has a single maximum over the interval (as Daly's closed form has), so a ternary
        // search over the logarithm finds it.
        let (mut low, mut high) = (1f64.ln(), most.ln());
        for _ in 0..SEARCHED {
            let third = (high - low) / 3.0;
            let [left, right] = [low + third, high - third].map(|at| goodput(at.exp().round().max(1.0)));
            if left < right { low += third } else { high -= third }
        }
        let middle = ((low + high) / 2.0).exp().round().max(1.0);
        (step * middle, goodput(middle))
    }
}

/// Iterations of the ternary search. Each keeps two thirds of the range.
const SEARCHED: usize = 24;

/// A random sequence of failures.
struct Failures {
    mean: Seconds,
    random: ChaCha8Rng,
}

impl Failures {
    /// Draws the time to the next failure.
    fn next(&mut self) -> Seconds {
        let uniform: f64 = self.random.random();
        self.mean * -(-uniform).ln_1p()
    }
}
