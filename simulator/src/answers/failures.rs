//! Failures, checkpoints and restarts: how much of a long run's time is progress, and how often to write a checkpoint.
//!
//! Any node's failure ends the whole run: what was done since the last checkpoint is lost, and the run begins there again after a restart. Failures come
//! as a Poisson process, also while a checkpoint is written and while the run restarts. Writing a checkpoint stops the run.
//!
//! It is simulated event by event, because that takes any of these rules; for these ones Daly 2006 ("A higher order estimate of the optimum checkpoint
//! interval for restart dumps", Future Generation Computer Systems 22) has the expectation in closed form ([`Reliability::expected_goodput`]), and
//! with Young 1974 formulas for the best interval, which the tests hold the simulation to. It must not know Programs or topologies.

use foretell_units::Seconds;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// What makes a long run lose time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Reliability {
    /// From one failure of any part of the run to the next, on average.
    pub mean_time_between_failures: Seconds,
    /// Writing a checkpoint, during which nothing else is done.
    pub checkpoint: Seconds,
    /// From a failure until the run does again what it did at the last checkpoint.
    pub restart: Seconds,
}

/// A run that was simulated with failures.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct FailingRun {
    /// How long it took.
    pub wall: Seconds,
    /// What of it was progress.
    pub useful: Seconds,
    /// What was done and lost again, checkpoints that were not finished among it.
    pub lost: Seconds,
    /// Writing checkpoints that were finished.
    pub checkpointing: Seconds,
    /// Restarting.
    pub restarting: Seconds,
    /// Failures that there were.
    pub failures: u64,
}

impl FailingRun {
    /// The share of its time that was progress.
    pub fn goodput(&self) -> f64 {
        if self.wall > Seconds::ZERO { self.useful / self.wall } else { 1.0 }
    }
}

impl Reliability {
    /// Simulates so much work with a checkpoint after each `interval` of it, and none after the last. A run that fails so often that it makes
    /// next to no progress is ended after `most_failures`.
    pub fn simulate(&self, work: Seconds, interval: Seconds, seed: u64, most_failures: u64) -> FailingRun {
        let mut failures = Failures { mean: self.mean_time_between_failures, random: ChaCha8Rng::seed_from_u64(seed) };
        let mut run = FailingRun::default();
        let mut until_failure = failures.next();
        let cycle = interval + self.checkpoint;
        // Stretches are counted, so that no sum of them rounds to one more; a last one of next to nothing is none.
        let stretches = (work / interval - 1e-9).ceil().max(0.0);
        let last = work - interval * (stretches - 1.0);
        let mut done = 0.0;
        while done < stretches {
            // Stretches that end before the next failure are one event, however many. The last, which has no checkpoint, is not among them.
            let whole = (until_failure / cycle).floor().min(stretches - 1.0 - done);
            if whole >= 1.0 {
                until_failure = (until_failure - cycle * whole).max(Seconds::ZERO);
                run.wall += cycle * whole;
                run.checkpointing += self.checkpoint * whole;
                done += whole;
                run.useful = interval * done;
            }
            if done + 1.0 >= stretches && last <= until_failure {
                run.wall += last;
                run.useful = work;
                return run;
            }
            run.wall += until_failure;
            run.lost += until_failure;
            run.failures += 1;
            until_failure = failures.next();
            // A failure during the restart begins it again.
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

    /// A run of so many failures that little of its goodput is chance: ten thousand leave about a hundredth. The same seed has the same chance for
    /// every interval.
    pub fn long_run(&self, interval: Seconds, seed: u64) -> FailingRun {
        const FAILURES: f64 = 1e4;
        self.simulate(self.mean_time_between_failures * FAILURES, interval, seed, 2 * FAILURES as u64)
    }

    /// The share of time that is progress in the long run (Daly 2006, whose model this is): with M the mean time between failures, R the
    /// restart, d the checkpoint and t the interval, a stretch takes M e^(R/M) (e^((t+d)/M) - 1).
    pub fn expected_goodput(&self, interval: Seconds) -> f64 {
        let mean = self.mean_time_between_failures.value();
        let stretch = mean * (self.restart.value() / mean).exp() * ((interval + self.checkpoint).value() / mean).exp_m1();
        if stretch > 0.0 { interval.value() / stretch } else { 1.0 }
    }

    /// Young's interval (1974): the square root of 2 d M.
    pub fn young(&self) -> Seconds {
        Seconds::new((2.0 * self.checkpoint.value() * self.mean_time_between_failures.value()).sqrt())
    }

    /// Daly's interval (2006): better than Young's where checkpoints are not short beside the time between failures.
    pub fn daly(&self) -> Seconds {
        let (checkpoint, mean) = (self.checkpoint.value(), self.mean_time_between_failures.value());
        let half = checkpoint / (2.0 * mean);
        if half >= 1.0 {
            return self.mean_time_between_failures;
        }
        Seconds::new((2.0 * checkpoint * mean).sqrt() * (1.0 + half.sqrt() / 3.0 + half / 9.0) - checkpoint)
    }

    /// The interval with the best simulated goodput, and that goodput: a search over intervals that are whole multiples of `step`, each over the
    /// same failures, so that luck favours none.
    pub fn best_interval(&self, step: Seconds, seed: u64) -> (Seconds, f64) {
        let goodput = |steps: f64| self.long_run(step * steps, seed).goodput();
        let most = (self.mean_time_between_failures * 4.0 / step).floor().max(1.0);
        // Goodput rises to one summit and falls (Daly's closed form has one): thirds over the logarithm, then the best of what is left.
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

/// Thirds that the search goes through: each leaves two thirds of what there was.
const SEARCHED: usize = 24;

/// When failures come, one after the other.
struct Failures {
    mean: Seconds,
    random: ChaCha8Rng,
}

impl Failures {
    /// From one failure to the next.
    fn next(&mut self) -> Seconds {
        let uniform: f64 = self.random.random();
        self.mean * -(-uniform).ln_1p()
    }
}
