//! Dropout of attention's probabilities: a part drops what the whole drops there, and the output
//! stays what it is on average.

use super::{Tensor, attention, dropped};
use crate::{Backend as _, CpuBackend, Hyperparameters, KernelCall, Operand};
use foretell_models::{Attention, AttentionDropout, DropoutRate, DropoutSite, Kernel};
use foretell_units::DataType;
use rand::{RngExt as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;

/// Which rank a call is of, and when it is made.
#[derive(Clone, Copy, Default)]
struct When {
    group_index: usize,
    samples_before: usize,
    step: u64,
    seed: u64,
}

fn run(kernel: &Kernel, reads: &[Tensor], written: &[usize], when: When) -> Vec<Tensor> {
    let singles = |numbers: &[f64]| numbers.iter().map(|&x| x as f32).collect::<Vec<f32>>();
    let mut memory: Vec<Vec<f32>> = reads.iter().map(|read| singles(read)).collect();
    memory.extend(written.iter().map(|&count| vec![0.0; count]));
    let all: Vec<Operand> =
        memory.iter_mut().map(|buffer| Operand { pointer: buffer.as_mut_ptr().cast(), bytes: 4 * buffer.len() }).collect();
    let (reads, writes) = all.split_at(reads.len());
    let When { group_index, samples_before, step, seed } = when;
    let hyperparameters = Hyperparameters { step, seed, ..Hyperparameters::default() };
    let hyperparameters = &hyperparameters;
    let precision = DataType::Fp32;
    let call = KernelCall { kernel, reads, writes, accumulate: false, hyperparameters, group_index, samples_before, precision };
    // SAFETY: the operands are vectors that live until the end and do not overlap.
    unsafe { CpuBackend::new().run(&call) }.unwrap();
    let count = reads.len();
    memory[count..].iter().map(|buffer| buffer.iter().map(|&x| f64::from(x)).collect()).collect()
}

/// The share of each query's keys that is kept, and so scaled: of equal scores and values of one
/// the output is just that.
fn shares(sizes: Attention, when: When) -> Tensor {
    let (q, k) = (vec![0.0; sizes.query_elements()], vec![0.0; sizes.key_elements()]);
    let v = vec![1.0; sizes.key_elements()];
    run(&Kernel::Attention(sizes), &[q, k, v], &[sizes.query_elements(), sizes.rows()], when).remove(0)
}

fn with_rate(sizes: Attention, share: f64) -> Attention {
    let site = DropoutSite { rate: DropoutRate::try_from(share).unwrap(), site: 1 };
    Attention { dropout: Some(AttentionDropout { site, ..dropped() }), ..sizes }
}

#[test]
fn the_expected_output_is_that_without_dropout() {
    for share in [0.1, 0.5, 0.9] {
        let sizes = with_rate(attention([4, 250, 3, 1], false, false), share);
        for (seed, step) in [(0, 1), (3, 1), (3, 77)] {
            let outputs = shares(sizes, When { seed, step, ..When::default() });
            let mean = outputs.iter().sum::<f64>() / outputs.len() as f64;
            // Of so many independent draws, each with the variance rate / (1 - rate) about 1.
            let deviation = (share / (1.0 - share) / (outputs.len() * sizes.keys) as f64).sqrt();
            assert!((mean - 1.0).abs() <= 4.0 * deviation, "{mean} for 1 ± {deviation}");
            // No query is like another: each has draws of its own.
            let row = (share / (1.0 - share) / sizes.keys as f64).sqrt();
            let variance = outputs.iter().map(|x| (x - 1.0).powi(2)).sum::<f64>() / outputs.len() as f64;
            assert!((variance.sqrt() / row - 1.0).abs() < 0.1, "{} for {row}", variance.sqrt());
        }
    }
}

#[test]
fn other_places_and_times_drop_otherwise() {
    let sizes = with_rate(attention([2, 64, 2, 1], false, false), 0.5);
    let dropout = sizes.dropout.unwrap();
    let base = shares(sizes, When::default());
    let with = |dropout| shares(Attention { dropout: Some(dropout), ..sizes }, When::default());
    let others = [
        ("the next step", shares(sizes, When { step: 1, ..When::default() })),
        ("another seed", shares(sizes, When { seed: 1, ..When::default() })),
        ("the samples after", shares(sizes, When { samples_before: 2, ..When::default() })),
        ("another site", with(AttentionDropout { site: DropoutSite { site: 2, ..dropout.site }, ..dropout })),
        ("the next micro-batch", with(AttentionDropout { first_sample: 4, ..dropout })),
    ];
    for (what, other) in others {
        let covariance = base.iter().zip(&other).map(|(a, b)| (a - 1.0) * (b - 1.0)).sum::<f64>() / base.len() as f64;
        // The outputs' variance is 1 / 64 each.
        let deviation = 1.0 / 64.0 / (base.len() as f64).sqrt();
        assert!(covariance.abs() <= 4.0 * deviation, "{what}: {covariance} for 0 ± {deviation}");
    }
}

/// `x[outer, extent, inner]`: a part of `extent`.
fn part(x: &[f64], [outer, extent, inner]: [usize; 3], parts: usize, index: usize) -> Tensor {
    assert_eq!(x.len(), outer * extent * inner);
    let own = extent / parts * inner;
    x.chunks(extent * inner).flat_map(|line| line[index * own..(index + 1) * own].to_vec()).collect()
}

#[test]
fn a_part_of_attention_drops_what_the_whole_drops_there() {
    const SAMPLES: usize = 4;
    let mut random = ChaCha8Rng::seed_from_u64(5);
    for causal in [false, true] {
        let whole = Attention { group: 2, ..attention([SAMPLES, 24, 2, 5], causal, false) };
        let whole = Attention { dropout: Some(dropped()), ..whole };
        let mut numbers =
            |count: usize| -> Tensor { (0..count).map(|_| f64::from(random.random_range(-1.0_f32..1.0))).collect() };
        let [q, k, v, dout] =
            [whole.query_elements(), whole.key_elements(), whole.key_elements(), whole.query_elements()].map(&mut numbers);
        let when = When { step: 3, seed: 9, ..When::default() };
        let made = [whole.query_elements(), whole.rows()];
        let forward = run(&Kernel::Attention(whole), &[q.clone(), k.clone(), v.clone()], &made, when);
        let reads = [dout.clone(), q.clone(), k.clone(), v.clone(), forward[0].clone(), forward[1].clone()];
        let gradients = [whole.query_elements(), whole.key_elements(), whole.key_elements()];
        let backward = run(&Kernel::AttentionGradient(whole), &reads, &gradients, when);
        for (batch_parts, position_parts, head_parts, group_parts) in
            [(2, 1, 1, 1), (1, 3, 1, 1), (1, 1, 2, 1), (1, 1, 1, 2), (2, 2, 2, 1), (4, 3, 1, 2), (1, 2, 2, 2)]
        {
            let samples = SAMPLES / batch_parts;
            let dropout = AttentionDropout { position_parts, head_parts, group_parts, ..dropped() };
            let sizes = Attention {
                batch: samples,
                queries: whole.queries / position_parts,
                key_heads: whole.key_heads / head_parts,
                group: whole.group / group_parts,
                query_parts: if causal { position_parts } else { 1 },
                dropout: Some(dropout),
                ..whole
            };
            for [batch_part, position, head, member] in (0..batch_parts * position_parts * head_parts * group_parts).map(|n| {
                let (n, member) = (n / group_parts, n % group_parts);
                let (n, head) = (n / head_parts, n % head_parts);
                [n / position_parts, n % position_parts, head, member]
            }) {
                let (heads, group, d, length) = (whole.key_heads, whole.group, whole.head_dimension, whole.queries);
                let of_queries = |x: &[f64]| {
                    let x = part(x, [1, SAMPLES, length * heads * group * d], batch_parts, batch_part);
                    let x = part(&x, [samples, length, heads * group * d], position_parts, position);
                    let rows = samples * sizes.queries;
                    let x = part(&x, [rows, heads, group * d], head_parts, head);
                    part(&x, [rows * sizes.key_heads, group, d], group_parts, member)
                };
                let of_keys = |x: &[f64]| {
                    let x = part(x, [1, SAMPLES, whole.keys * heads * d], batch_parts, batch_part);
                    part(&x, [samples * whole.keys, heads, d], head_parts, head)
                };
                let when = When {
                    group_index: (position * head_parts + head) * group_parts + member,
                    samples_before: batch_part * samples,
                    ..when
                };
                let inputs = [of_queries(&q), of_keys(&k), of_keys(&v)];
                let found = run(&Kernel::Attention(sizes), &inputs, &[sizes.query_elements(), sizes.rows()], when);
                let near = |found: &[f64], expected: &[f64]| {
                    assert_eq!(found.len(), expected.len());
                    found.iter().zip(expected).all(|(left, right)| (left - right).abs() < 1e-5)
                };
                assert!(near(&found[0], &of_queries(&forward[0])), "{sizes:?} {position} {head} {member} {batch_part}");
                let [q, k, v] = inputs;
                let reads = [of_queries(&dout), q, k, v, found[0].clone(), found[1].clone()];
                let writes = [sizes.query_elements(), sizes.key_elements(), sizes.key_elements()];
                let found = run(&Kernel::AttentionGradient(sizes), &reads, &writes, when);
                assert!(near(&found[0], &of_queries(&backward[0])), "the gradient of {sizes:?}");
            }
        }
    }
}
