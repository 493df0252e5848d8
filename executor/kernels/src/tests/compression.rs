//! Messages in few bits: what is left of numbers that are compressed and decompressed again.

use super::{Tensor, all_backends, run_on};
use crate::Backend;
use foretell_models::{Compression, Kernel};
use rand::{RngExt as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;

const FORMATS: [Compression; 3] = [Compression::Bf16, Compression::Fp16, Compression::Int8];

/// The writes of a kernel on a backend.
fn run(backend: &mut dyn Backend, kernel: &Kernel, reads: &[Tensor], before: &[Tensor]) -> Vec<Tensor> {
    run_on(backend, kernel, reads, before, false, false, 0)
}

/// Every format on every backend.
fn on_all(mut check: impl FnMut(&mut dyn Backend, Compression)) {
    for mut backend in all_backends() {
        FORMATS.into_iter().for_each(|format| check(backend.as_mut(), format));
    }
}

fn numbers(count: usize, seed: u64) -> Tensor {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    (0..count).map(|_| f64::from(random.random_range(-1.0_f32..1.0) * random.random_range(0.0_f32..1e-2))).collect()
}

/// The message of `x`, and the error that is left if there was one before.
fn compressed(
    backend: &mut dyn Backend,
    x: &Tensor,
    parts: usize,
    format: Compression,
    error: Option<&Tensor>,
) -> (Tensor, Option<Tensor>) {
    let elements = x.len();
    let kernel = Kernel::Compress { elements, parts, format, feedback: error.is_some() };
    let message = vec![0.0; parts * format.bytes(format.part(elements, parts))];
    let before: Vec<Tensor> = std::iter::once(message).chain(error.cloned()).collect();
    let mut written = run(backend, &kernel, std::slice::from_ref(x), &before).into_iter();
    (written.next().expect("a message"), written.next())
}

fn decompressed(backend: &mut dyn Backend, messages: Tensor, elements: usize, sources: usize, format: Compression) -> Tensor {
    let kernel = Kernel::Decompress { elements, sources, format };
    run(backend, &kernel, &[messages], &[vec![7.0; elements]]).remove(0)
}

/// The most that rounding may change a number of a chunk.
fn half_a_step(format: Compression, number: f64, chunk: &[f64]) -> f64 {
    let largest = chunk.iter().fold(0.0_f64, |largest, x| largest.max(x.abs()));
    match format {
        // Half of the last place, also of the least normal number.
        Compression::Bf16 => number.abs() * 2f64.powi(-8),
        Compression::Fp16 => (number.abs() * 2f64.powi(-12)).max(2f64.powi(-25)) * 2.0,
        Compression::Int8 => largest / 254.0 * 1.001,
    }
}

#[test]
fn compressed_numbers_come_back_within_half_a_step_of_the_format() {
    on_all(|backend, format| {
        for (elements, parts) in [(1, 1), (31, 2), (256, 1), (257, 3), (1037, 2), (4096, 4)] {
            let x = numbers(elements, 3);
            let (message, _) = compressed(backend, &x, parts, format, None);
            // All parts together are one message, with zeros behind the last number.
            let padded = format.part(elements, parts) * parts;
            let y = decompressed(backend, message, padded, 1, format);
            for (index, (y, chunk)) in y.iter().zip((0..padded).map(|index| index / format.chunk() * format.chunk())).enumerate()
            {
                let number = x.get(index).copied().unwrap_or(0.0);
                let chunk = &x[chunk.min(elements)..(chunk + format.chunk()).min(elements)];
                let most = half_a_step(format, number, chunk);
                assert!((y - number).abs() <= most, "{format:?}, {elements} in {parts}: {number} became {y}");
            }
        }
    });
}

#[test]
fn decompression_adds_the_numbers_of_all_messages() {
    on_all(|backend, format| {
        let elements = 300;
        let messages: Vec<Tensor> = (0..3).map(|seed| compressed(backend, &numbers(elements, seed), 1, format, None).0).collect();
        let apart: Vec<Tensor> =
            messages.iter().map(|message| decompressed(backend, message.clone(), elements, 1, format)).collect();
        let together = decompressed(backend, messages.concat(), elements, 3, format);
        for (index, sum) in together.iter().enumerate() {
            let expected: f64 = apart.iter().map(|source| source[index]).sum();
            assert!((sum - expected).abs() <= 1e-6, "{format:?}");
        }
    });
}

/// Each message makes up for the rounding of the one before, so their sum is off by one rounding.
#[test]
fn fed_back_errors_make_the_sum_of_messages_right() {
    on_all(|backend, format| {
        let x = numbers(500, 5);
        let (mut error, mut sum) = (vec![0.0; x.len()], vec![0.0; x.len()]);
        let rounds = 20;
        for _ in 0..rounds {
            let (message, left) = compressed(backend, &x, 1, format, Some(&error));
            error = left.expect("an error");
            let sent = decompressed(backend, message, x.len(), 1, format);
            sum.iter_mut().zip(&sent).for_each(|(sum, sent)| *sum += sent);
        }
        for ((sum, x), error) in sum.iter().zip(&x).zip(&error) {
            assert!((sum + error - f64::from(rounds) * x).abs() <= 1e-6, "{format:?}: {sum} of {x}, {error} left");
        }
    });
}

#[test]
fn a_number_that_is_not_finite_stays_visible_in_a_message() {
    on_all(|backend, format| {
        for bad in [f64::NAN, f64::INFINITY] {
            let mut x = numbers(300, 1);
            x[270] = bad;
            let (message, _) = compressed(backend, &x, 1, format, None);
            let y = decompressed(backend, message, x.len(), 1, format);
            assert!(!y[270].is_finite() && y[3].is_finite(), "{format:?}: {} of {bad}", y[270]);
        }
    });
}
