//! Failures and checkpoints, compared with the formulas of Young and Daly.
#![allow(clippy::unwrap_used)]

use foretell_simulator::Reliability;
use foretell_units::Seconds;
use proptest::prelude::*;

/// Checkpoints and restarts short beside the time between failures, where the formulas hold.
fn reliability() -> impl Strategy<Value = Reliability> {
    (1e3f64..1e6, 1e-4f64..0.05, 0.0f64..0.1).prop_map(|(mean, checkpoint, restart)| Reliability {
        mean_time_between_failures: Seconds::new(mean),
        checkpoint: Seconds::new(mean * checkpoint),
        write: Seconds::ZERO,
        restart: Seconds::new(mean * restart),
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]

    #[test]
    fn simulated_goodput_agrees_with_dalys_expectation(reliability in reliability(), writing in 0.0f64..0.2, share in 0.02f64..1.5, seed in 0u64..1000) {
        let reliability = Reliability { write: reliability.mean_time_between_failures * writing, ..reliability };
        let interval = reliability.mean_time_between_failures * share;
        let work = reliability.mean_time_between_failures * 20_000.0;
        let run = reliability.simulate(work, interval, seed, u64::MAX);
        let (simulated, expected) = (run.goodput(), reliability.expected_goodput(interval));
        // With some ten thousand failures, three standard deviations are some 0.03.
        prop_assert!((simulated / expected - 1.0).abs() < 0.03, "{simulated} and not {expected}");
        let parts = run.useful + run.lost + run.checkpointing + run.restarting;
        prop_assert!((parts / run.wall - 1.0).abs() < 1e-9, "the parts sum to the whole");
    }

    /// The simulation advances over many intervals without failure in one event. The result equals
    /// that of single intervals.
    #[test]
    fn a_run_has_one_checkpoint_between_successive_intervals(reliability in reliability(), share in 0.001f64..1.5, stretches in 1usize..2000, seed in 0u64..1000) {
        let interval = reliability.mean_time_between_failures * share;
        let work = interval * stretches as f64;
        let run = reliability.simulate(work, interval, seed, u64::MAX);
        // One checkpoint follows every interval but the last, whatever fails in between.
        let checkpoints = run.checkpointing / reliability.checkpoint;
        prop_assert!((checkpoints - (stretches as f64 - 1.0)).abs() < 1e-6, "{checkpoints} for {stretches}");
        prop_assert!((run.useful / work - 1.0).abs() < 1e-9);
    }

    #[test]
    fn the_best_interval_agrees_with_young_and_daly(reliability in reliability(), seed in 0u64..1000) {
        let (best, goodput) = reliability.best_interval(reliability.checkpoint / 10.0, seed);
        // The optimum is flat, so the test compares goodput more strictly than the interval.
        let at = |interval| reliability.expected_goodput(interval);
        prop_assert!((goodput / at(best) - 1.0).abs() < 0.03);
        prop_assert!(at(best) > at(reliability.daly()) * 0.995, "{best} and Daly's {}", reliability.daly());
        let ratio = best / reliability.daly();
        prop_assert!((0.75..1.33).contains(&ratio), "{best} and Daly's {}", reliability.daly());
        // Young's formula omits terms that are small for short checkpoints.
        if reliability.checkpoint / reliability.mean_time_between_failures < 0.002 {
            prop_assert!((reliability.young() / reliability.daly() - 1.0).abs() < 0.05);
        }
    }

    #[test]
    fn the_same_seed_gives_the_same_failures(reliability in reliability(), seed in 0u64..1000) {
        let run = || reliability.simulate(Seconds::new(1e7), reliability.daly(), seed, 10_000);
        prop_assert_eq!(run(), run());
    }
}

#[test]
fn without_failures_only_checkpoints_cost() {
    let never = Reliability {
        mean_time_between_failures: Seconds::new(1e15),
        checkpoint: Seconds::new(10.0),
        write: Seconds::ZERO,
        restart: Seconds::new(100.0),
    };
    let run = never.simulate(Seconds::new(1000.0), Seconds::new(100.0), 0, 10);
    // There is no checkpoint after the last interval.
    assert_eq!((run.wall, run.failures), (Seconds::new(1090.0), 0));
}

#[test]
fn a_checkpoint_waits_until_the_one_before_it_is_written() {
    let slow = Reliability {
        mean_time_between_failures: Seconds::new(1e15),
        checkpoint: Seconds::new(10.0),
        write: Seconds::new(150.0),
        restart: Seconds::new(100.0),
    };
    let run = slow.simulate(Seconds::new(1000.0), Seconds::new(100.0), 0, 10);
    assert_eq!((run.wall, run.checkpointing), (Seconds::new(9.0 * 160.0 + 100.0), Seconds::new(540.0)));
}

#[test]
fn a_run_that_only_fails_ends_at_the_failure_limit() {
    let always = Reliability {
        mean_time_between_failures: Seconds::new(1.0),
        checkpoint: Seconds::new(1000.0),
        write: Seconds::ZERO,
        restart: Seconds::new(1000.0),
    };
    let run = always.simulate(Seconds::new(1e6), Seconds::new(100.0), 0, 1000);
    assert_eq!((run.failures, run.useful), (1000, Seconds::ZERO));
}

#[test]
fn young_and_daly_give_their_published_intervals() {
    // With 24 h between failures and checkpoints of 5 min, Young's interval is 2.0 h. Daly's is
    // shorter by about the checkpoint itself.
    let hours = |hours: f64| Seconds::new(hours * 3600.0);
    let cluster = Reliability {
        mean_time_between_failures: hours(24.0),
        checkpoint: hours(1.0 / 12.0),
        write: Seconds::ZERO,
        restart: hours(1.0 / 6.0),
    };
    assert!((cluster.young() / hours(2.0) - 1.0).abs() < 1e-9);
    let daly = 2.0 * (1.0 + (1.0f64 / 576.0).sqrt() / 3.0 + 1.0 / 576.0 / 9.0) - 1.0 / 12.0;
    assert!((cluster.daly() / hours(daly) - 1.0).abs() < 1e-9);
}
