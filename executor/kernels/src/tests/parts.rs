//! Kernels that work on a part of a whole, against the kernel that works on all of it; and the
//! control of updates, step by step.

use super::PARAMETERS;
use crate::{Backend, CpuBackend, Hyperparameters, KernelCall, Operand};
use foretell_models::Kernel;
use foretell_units::DataType;

fn operand(values: &mut [f32]) -> Operand {
    Operand { pointer: values.as_mut_ptr().cast(), bytes: 4 * values.len() }
}

/// Runs a kernel on vectors; integers are given as the bits of floats.
fn run(kernel: Kernel, reads: &mut [Vec<f32>], writes: &mut [Vec<f32>], group_index: usize, hyperparameters: &Hyperparameters) {
    let mut others: Vec<_> =
        super::cuda_backend(super::ProductSupport::Full).into_iter().map(|backend| (backend, writes.to_vec())).collect();
    for (backend, writes) in &mut others {
        run_on(backend.as_mut(), kernel, reads, writes, group_index, hyperparameters);
    }
    run_on(&mut CpuBackend::new(), kernel, reads, writes, group_index, hyperparameters);
    for (_, others) in others {
        for (own, other) in writes.iter().flatten().zip(others.iter().flatten()) {
            // Processors differ in the sign of a NaN that they make.
            let close = own.to_bits() == other.to_bits()
                || (own.is_nan() && other.is_nan())
                || (own - other).abs() <= 1e-5 * own.abs().max(1e-3);
            assert!(close, "{kernel:?}: {other} where the CPU has {own}");
        }
    }
}

fn run_on(
    backend: &mut dyn Backend,
    kernel: Kernel,
    reads: &mut [Vec<f32>],
    writes: &mut [Vec<f32>],
    group_index: usize,
    hyperparameters: &Hyperparameters,
) {
    let reads: Vec<Operand> = reads.iter_mut().map(|values| operand(values)).collect();
    let writes: Vec<Operand> = writes.iter_mut().map(|values| operand(values)).collect();
    let (kernel, reads, writes, precision) = (&kernel, reads.as_slice(), writes.as_slice(), DataType::Fp32);
    let call =
        KernelCall { kernel, reads, writes, accumulate: false, hyperparameters, group_index, samples_before: 0, precision };
    // SAFETY: the operands are vectors of the right sizes, apart from each other, that outlive the
    // call.
    unsafe { backend.run(&call) }.expect("the call is sound");
}

fn integers(values: &[i32]) -> Vec<f32> {
    values.iter().map(|&value| f32::from_bits(value as u32)).collect()
}

fn noise(count: usize, seed: u32) -> Vec<f32> {
    (0..count as u32).map(|index| ((index + seed).wrapping_mul(2_654_435_769) >> 8) as f32 / 2_097_152.0 - 4.0).collect()
}

/// The columns of one part of a matrix.
fn columns(matrix: &[f32], rows: usize, parts: usize, part: usize) -> Vec<f32> {
    let width = matrix.len() / rows;
    let own = width / parts;
    matrix.chunks(width).flat_map(|row| row[part * own..(part + 1) * own].to_vec()).collect()
}

#[test]
fn cross_entropy_in_parts_is_that_of_the_whole() {
    let (rows, classes, parts) = (7, 12, 3);
    let mut logits = noise(rows * classes, 3);
    // The largest logit twice in one row, in two parts: the first is the prediction.
    logits[classes + 2] = 9.0;
    logits[classes + 6] = 9.0;
    let labels = integers(&[0, 2, 11, -1, 5, 6, 3]);
    let mut whole = [vec![0.0], vec![0.0], vec![0.0; rows]];
    run(Kernel::CrossEntropy { rows, classes }, &mut [logits.clone(), labels.clone()], &mut whole, 0, &PARAMETERS);
    let mut statistics = Vec::new();
    for part in 0..parts {
        let mut written = [vec![0.0; 4 * rows]];
        let kernel = Kernel::LogitStatistics { rows, classes: classes / parts, parts };
        run(kernel, &mut [columns(&logits, rows, parts, part), labels.clone()], &mut written, part, &PARAMETERS);
        statistics.extend_from_slice(&written[0]);
    }
    let mut joined = [vec![0.0], vec![0.0], vec![0.0; rows]];
    let mut whole_ranks = [vec![0.0; rows]];
    let ranks = |classes, parts| Kernel::LabelRanks { rows, classes, parts };
    run(ranks(classes, 1), &mut [logits.clone(), labels.clone()], &mut whole_ranks, 0, &PARAMETERS);
    let mut sum = vec![0.0; rows];
    for part in 0..parts {
        let mut own = [vec![0.0; rows]];
        let mut reads = [columns(&logits, rows, parts, part), labels.clone(), statistics.clone()];
        run(ranks(classes / parts, parts), &mut reads, &mut own, part, &PARAMETERS);
        sum.iter_mut().zip(&own[0]).for_each(|(sum, own)| *sum += own);
    }
    assert_eq!(sum, whole_ranks[0]);
    assert!(sum.iter().any(|&rank| rank > 0.0), "some label is not the best class");
    run(Kernel::CrossEntropyOfStatistics { rows, parts }, &mut [statistics, labels.clone()], &mut joined, 0, &PARAMETERS);
    assert_eq!(whole[1], joined[1], "right predictions");
    for (one, other) in whole.iter().flatten().zip(joined.iter().flatten()) {
        assert!((one - other).abs() < 1e-5 * one.abs().max(1.0), "{whole:?} and {joined:?}");
    }
    let gradient = |classes, parts| Kernel::CrossEntropyGradient { rows, classes, normalizer: 5, parts, scaled: false };
    let mut all = [vec![0.0; rows * classes]];
    run(gradient(classes, 1), &mut [logits.clone(), labels.clone(), whole[2].clone()], &mut all, 0, &PARAMETERS);
    for part in 0..parts {
        let mut own = [vec![0.0; rows * classes / parts]];
        let mut reads = [columns(&logits, rows, parts, part), labels.clone(), whole[2].clone()];
        run(gradient(classes / parts, parts), &mut reads, &mut own, part, &PARAMETERS);
        assert_eq!(own[0], columns(&all[0], rows, parts, part));
    }
}

#[test]
fn an_embedding_in_parts_adds_up_to_the_whole() {
    let (tokens, vocabulary, hidden, parts) = (5, 6, 3, 2);
    let ids = integers(&[0, 5, 3, 3, 2]);
    let table = noise(vocabulary * hidden, 1);
    let mut whole = [vec![0.0; tokens * hidden]];
    let kernel = |vocabulary, parts| Kernel::Embedding { tokens, vocabulary, hidden, parts };
    run(kernel(vocabulary, 1), &mut [ids.clone(), table.clone()], &mut whole, 0, &PARAMETERS);
    let gradient = |vocabulary, parts| Kernel::EmbeddingWeightGradient { tokens, vocabulary, hidden, parts };
    let mut whole_gradient = [vec![0.0; vocabulary * hidden]];
    run(gradient(vocabulary, 1), &mut [whole[0].clone(), ids.clone()], &mut whole_gradient, 0, &PARAMETERS);
    let own = vocabulary / parts;
    let mut sum = vec![0.0; tokens * hidden];
    for part in 0..parts {
        let rows = part * own * hidden..(part + 1) * own * hidden;
        let mut written = [vec![1.0; tokens * hidden]];
        run(kernel(own, parts), &mut [ids.clone(), table[rows.clone()].to_vec()], &mut written, part, &PARAMETERS);
        sum.iter_mut().zip(&written[0]).for_each(|(sum, part)| *sum += part);
        let mut written = [vec![1.0; own * hidden]];
        run(gradient(own, parts), &mut [whole[0].clone(), ids.clone()], &mut written, part, &PARAMETERS);
        assert_eq!(written[0], whole_gradient[0][rows]);
    }
    assert_eq!(sum, whole[0]);
}

/// The control after each of some squared norms.
fn controls(kernel: Kernel, scale: f32, norms: &[f32]) -> Vec<Vec<f32>> {
    let mut control = [vec![scale, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]];
    let mut all = Vec::new();
    for &norm in norms {
        run(kernel, &mut [vec![norm]], &mut control, 0, &PARAMETERS);
        all.push(control[0].clone());
    }
    all
}

#[test]
fn a_long_gradient_is_shortened_and_a_short_one_is_not() {
    let controls = controls(Kernel::UpdateControl { clip: true, scaled: false, predictions: 0 }, 1.0, &[4.0, 0.25]);
    assert!((controls[0][1] - 0.5).abs() < 1e-6, "norm 2 to the limit of 1: {controls:?}");
    assert_eq!(controls[1][1], 1.0);
    assert_eq!(controls[1][3], 2.0, "both are updates");
}

#[test]
fn an_overflow_halves_the_loss_scale_and_skips_and_a_streak_doubles_it() {
    let norms = [f32::INFINITY, f32::NAN, 16.0, 16.0, 16.0, 16.0];
    let controls = controls(Kernel::UpdateControl { clip: false, scaled: true, predictions: 0 }, 16.0, &norms);
    let scales: Vec<f32> = controls.iter().map(|control| control[0]).collect();
    assert_eq!(scales, [8.0, 4.0, 4.0, 4.0, 8.0, 8.0], "the growth interval is three steps");
    let skipped: Vec<f32> = controls.iter().map(|control| control[2]).collect();
    assert_eq!(skipped, [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]);
    assert_eq!(controls[5][3], 4.0, "updates");
    assert_eq!(controls[5][6], 2.0, "skipped");
    assert_eq!(controls[2][1], 0.25, "the gradient is divided by the scale it was made with");
    assert_eq!(controls[5][5], 0.25, "the norm is reported without the scale: 16 / 8 / 8");
}

#[test]
fn weighted_classes_divide_the_gradient_by_their_weight() {
    let kernel = Kernel::UpdateControl { clip: false, scaled: false, predictions: 8 };
    let mut control = [vec![1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]];
    run(kernel, &mut [vec![9.0], vec![2.0]], &mut control, 0, &PARAMETERS);
    assert_eq!(control[0][1], 4.0, "eight predictions of weight two");
    assert_eq!(control[0][5], 144.0, "the norm is that of the divided gradient");
}

#[test]
fn a_skipped_step_of_lamb_leaves_the_moments_and_the_parameter() {
    let control = vec![1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0];
    let mut writes = [vec![7.0; 3], vec![0.5; 3], vec![0.25; 3], vec![7.0; 2]];
    let direction = Kernel::LambDirection { elements: 3, controlled: true, exempt: false };
    run(direction, &mut [vec![f32::NAN; 3], control.clone(), vec![1.0; 3]], &mut writes, 0, &PARAMETERS);
    assert_eq!(writes, [vec![0.0; 3], vec![0.5; 3], vec![0.25; 3], vec![3.0, 0.0]]);
    let mut parameter = [vec![1.0, 2.0, 3.0]];
    let step = Kernel::LambStep { elements: 3, controlled: true };
    run(step, &mut [vec![f32::NAN; 3], control, vec![f32::NAN; 2]], &mut parameter, 0, &PARAMETERS);
    assert_eq!(parameter[0], [1.0, 2.0, 3.0]);
}

#[test]
fn a_skipped_update_leaves_everything_as_it_is() {
    let mut reads = [vec![f32::NAN; 3], vec![1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]];
    let mut writes = [vec![1.0, 2.0, 3.0], vec![0.5; 3], vec![0.25; 3]];
    let before = writes.clone();
    run(Kernel::AdamW { elements: 3, controlled: true, exempt: false }, &mut reads, &mut writes, 0, &PARAMETERS);
    assert_eq!(writes, before);
    let sgd = Kernel::Sgd { elements: 3, momentum: true, nesterov: false, controlled: true, exempt: false };
    run(sgd, &mut reads, &mut writes[..2], 0, &PARAMETERS);
    assert_eq!(writes, before);
    reads[0].fill(1.0);
    reads[1][2] = 0.0;
    run(sgd, &mut reads, &mut writes[..2], 0, &PARAMETERS);
    assert_ne!(writes, before);
}
