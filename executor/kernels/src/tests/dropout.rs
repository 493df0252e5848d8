//! What dropout drops: as many as it should, nothing that goes together, and of a part what it
//! drops of the whole.

use foretell_models::{Dropout, DropoutRate, DropoutSite, Kernel, Zigzag};
use foretell_units::DataType;

use crate::{Backend as _, CpuBackend, Hyperparameters, KernelCall, Operand};

fn rate(share: f64) -> DropoutRate {
    DropoutRate::try_from(share).unwrap()
}

const fn site(rate: DropoutRate) -> DropoutSite {
    DropoutSite { rate, site: 3 }
}

const WHOLE: Dropout = Dropout {
    first_sample: 0,
    samples: 12,
    positions: 24,
    features: 40,
    parts: 1,
    sample_parts: 1,
    zigzag: None,
    site: site(DropoutRate::TENTH),
};

pub(super) fn cases() -> Vec<Kernel> {
    let sizes = [
        Dropout { samples: 1, positions: 1, features: 1, ..WHOLE },
        Dropout { samples: 3, positions: 7, features: 33, first_sample: 5, site: site(rate(0.5)), ..WHOLE },
        Dropout { samples: 2, positions: 19, features: 1, parts: 3, site: site(rate(0.25)), ..WHOLE },
        // Three parts of a zigzag order.
        Dropout { samples: 2, positions: 14, features: 3, parts: 3, zigzag: Zigzag::new(3, 42), ..WHOLE },
        // Longer than a block of numbers that are widened.
        Dropout { samples: 2, positions: 51, features: 203, parts: 2, site: DropoutSite { site: 0, ..WHOLE.site }, ..WHOLE },
    ];
    sizes.map(Kernel::Dropout).to_vec()
}

/// Which elements of a rank's part are kept.
fn kept(sizes: Dropout, group_index: usize, samples_before: usize, step: u64, seed: u64) -> Vec<bool> {
    let mut memory = vec![1.0_f32; sizes.elements()];
    let operand = [Operand { pointer: memory.as_mut_ptr().cast(), bytes: 4 * memory.len() }];
    let hyperparameters = Hyperparameters { step, seed, ..Hyperparameters::default() };
    let call = KernelCall {
        kernel: &Kernel::Dropout(sizes),
        reads: &operand,
        writes: &operand,
        accumulate: false,
        hyperparameters: &hyperparameters,
        group_index,
        samples_before,
        precision: DataType::Fp32,
    };
    // SAFETY: the operand is a vector that lives until the end; dropout may work in place.
    unsafe { CpuBackend::new().run(&call) }.unwrap();
    assert!(memory.iter().all(|&value| value == 0.0 || value == sizes.site.rate.scale()));
    memory.into_iter().map(|value| value != 0.0).collect()
}

/// That a share of so many independent draws is within four standard deviations of what is
/// expected.
fn assert_share(what: &str, found: usize, of: usize, expected: f64) {
    let deviation = (expected * (1.0 - expected) / of as f64).sqrt();
    let share = found as f64 / of as f64;
    assert!((share - expected).abs() <= 4.0 * deviation, "{what}: {share} for {expected} ± {deviation}");
}

fn count(kept: &[bool]) -> usize {
    kept.iter().filter(|&&kept| kept).count()
}

#[test]
fn the_share_that_is_kept_is_that_of_the_rate() {
    for share in [0.0001, 0.1, 0.2, 0.5, 0.9] {
        for (seed, step) in [(0, 1), (1, 1), (7, 900)] {
            let sizes = Dropout { positions: 300, features: 100, site: site(rate(share)), ..WHOLE };
            let all = kept(sizes, 0, 0, step, seed);
            assert_share("all", count(&all), all.len(), 1.0 - share);
            // Every sample and every feature for itself.
            for sample in all.chunks(30_000) {
                assert_share("a sample", count(sample), sample.len(), 1.0 - share);
            }
        }
    }
}

#[test]
fn what_is_dropped_at_different_places_and_times_has_nothing_in_common() {
    let sizes = Dropout { positions: 100, features: 100, site: site(rate(0.5)), ..WHOLE };
    let base = kept(sizes, 0, 0, 1, 0);
    let agree = |what: &str, other: &[bool]| {
        let equal = base.iter().zip(other).filter(|(left, right)| left == right).count();
        assert_share(what, equal, other.len().min(base.len()), 0.5);
    };
    let other = DropoutSite { site: 4, ..sizes.site };
    agree("another site", &kept(Dropout { site: other, ..sizes }, 0, 0, 1, 0));
    agree("the next step", &kept(sizes, 0, 0, 2, 0));
    agree("another seed", &kept(sizes, 0, 0, 1, 1));
    agree("the samples after", &kept(sizes, 0, 1, 1, 0));
    agree("the next micro-batch", &kept(Dropout { first_sample: 12, ..sizes }, 0, 0, 1, 0));
    agree("the next part of the sequence", &kept(Dropout { parts: 2, ..sizes }, 1, 0, 1, 0));
    agree("the next sample", &base[10_000..]);
    agree("the next position", &base[100..]);
    agree("the next feature", &base[1..]);
    // Two of these at once: neither is the other's inverse, shifted.
    let both = kept(Dropout { site: other, first_sample: 1, ..sizes }, 0, 0, 2, 1);
    agree("another site, sample, step and seed", &both);
}

#[test]
fn a_part_drops_what_the_whole_drops_there() {
    let whole = kept(WHOLE, 0, 0, 5, 2);
    let (rows, features) = (WHOLE.positions, WHOLE.features);
    // Micro-batches of samples, each sharded among ranks, each of which has a part of the
    // positions.
    for (batches, batch_parts, parts) in [(1, 2, 1), (3, 1, 1), (1, 1, 4), (2, 3, 3), (3, 4, 6)] {
        let samples = WHOLE.samples / batches / batch_parts;
        for batch in 0..batches {
            for batch_part in 0..batch_parts {
                for part in 0..parts {
                    let positions = rows / parts;
                    let first_sample = batch * samples * batch_parts;
                    let sizes = Dropout { first_sample, samples, positions, parts, ..WHOLE };
                    let found = kept(sizes, part, batch_part * samples, 5, 2);
                    for (sample, found) in found.chunks(positions * features).enumerate() {
                        let number = first_sample + batch_part * samples + sample;
                        let start = (number * rows + part * positions) * features;
                        assert_eq!(found, &whole[start..start + positions * features], "{sizes:?} {part} {batch_part}");
                    }
                }
            }
        }
    }
}
