//! The input pipeline against its closed form.
#![allow(clippy::unwrap_used)]

use foretell_simulator::{InputBound, InputPipeline};
use foretell_units::{Bytes, BytesPerSecond, Seconds};
use proptest::prelude::*;

const PIPELINE: InputPipeline = InputPipeline {
    bytes_per_sample: Bytes::new(1_000_000),
    storage: Some(BytesPerSecond::new(1e9)),
    decode: Seconds::new(0.008),
    workers: 4,
    prefetch: 2,
    samples: 32,
};

#[test]
fn a_step_takes_as_long_as_the_slowest_part() {
    let deep = InputPipeline { prefetch: 8, ..PIPELINE };
    for (pipeline, step, seconds, bound) in [
        (deep, 0.1, 0.1, InputBound::Step),
        // Four workers decode 32 samples of 8 ms.
        (deep, 0.05, 0.064, InputBound::Workers),
        (InputPipeline { workers: 16, ..deep }, 0.02, 0.032, InputBound::Storage),
        (InputPipeline { workers: 16, storage: None, ..deep }, 0.02, 0.02, InputBound::Step),
        // With one batch in flight, its first millisecond of storage comes before the workers.
        (InputPipeline { prefetch: 1, ..PIPELINE }, 0.05, 0.065 + 0.003, InputBound::Prefetch),
    ] {
        let (closed, by) = pipeline.bound(Seconds::new(step));
        let simulated = pipeline.steady_step(Seconds::new(step));
        assert_eq!(by, bound, "{pipeline:?}");
        assert!((closed.value() - seconds).abs() < 1e-9, "{closed} and not {seconds}");
        assert!((simulated.value() - seconds).abs() < 1e-9, "simulated {simulated} and not {seconds}");
    }
}

#[test]
fn a_full_queue_carries_the_first_steps() {
    // Workers fall behind by 14 ms a step. Two batches are prefetched before the first step begins.
    let run = PIPELINE.simulate(Seconds::new(0.05), 40);
    assert!(run.waits[0] > Seconds::new(0.06), "the first batch has to be made");
    let late: Seconds = run.waits[20..].iter().copied().sum();
    assert!((late.value() / 20.0 - 0.014).abs() < 1e-9, "{late}");
    // A pipeline faster than the steps catches up after the first batch.
    let quick = PIPELINE.simulate(Seconds::new(0.1), 10);
    assert!(quick.waits[0] > Seconds::ZERO && quick.waits[1..].iter().all(|wait| *wait == Seconds::ZERO));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn steady_steps_agree_with_the_closed_form(
        bytes in 1u64..10_000_000,
        storage in prop_oneof![Just(None), (1e7f64..1e10).prop_map(Some)],
        decode in 0.0f64..0.02,
        workers in 1usize..17,
        batches in 1usize..5,
        step in 0.0f64..0.5,
    ) {
        let pipeline = InputPipeline {
            bytes_per_sample: Bytes::new(bytes),
            storage: storage.map(BytesPerSecond::new),
            decode: Seconds::new(decode),
            workers,
            // Deep enough that every part can be busy at once.
            prefetch: 24,
            samples: workers * batches,
        };
        let (closed, bound) = pipeline.bound(Seconds::new(step));
        let simulated = pipeline.steady_step(Seconds::new(step));
        prop_assert!(bound != InputBound::Prefetch);
        prop_assert!((simulated.value() - closed.value()).abs() <= 1e-9 + 1e-6 * closed.value(), "{simulated} and not {closed}");
    }

    /// Any prefetch depth gives a step between the slowest part and the sum of all parts.
    #[test]
    fn no_queue_is_faster_than_the_parts_or_slower_than_their_sum(
        decode in 0.0f64..0.02, workers in 1usize..9, samples in 1usize..40, prefetch in 1usize..6, step in 0.0f64..0.2,
    ) {
        let pipeline = InputPipeline { decode: Seconds::new(decode), workers, samples, prefetch, ..PIPELINE };
        let simulated = pipeline.steady_step(Seconds::new(step)).value();
        let reading = samples as f64 * 1e-3;
        let rounds = samples.div_ceil(workers) as f64 * decode;
        // Workers may get unequal parts of a batch. Over some tens of batches the parts differ by
        // at most one sample.
        let rounding = decode / 30.0 + 1e-9;
        prop_assert!(simulated >= step.max(reading).max(samples as f64 * decode / workers as f64) - rounding, "{simulated}");
        prop_assert!(simulated <= step + reading + rounds + rounding, "{simulated}");
    }
}
