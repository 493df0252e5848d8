//! Matrices of eight bits and their products: what they should be by the formats' definitions.
//! Codes are numbers here, as integers are.

use super::reference::{self, Given};
use super::{PARAMETERS, Tensor, counts, run};
use foretell_models::{Activation, EightBits, Kernel, WeightLayout};
use rand::{RngExt as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;

/// Matrices in either format and every way to write them, and products at sizes that tensor cores
/// take and that they do not.
pub(super) fn cases() -> Vec<Kernel> {
    let mut cases = Vec::new();
    for [rows, columns] in [[1, 1], [37, 53], [130, 64], [64, 200], [129, 390]] {
        for (format, straight, transposed) in [
            (EightBits::E4M3, true, true),
            (EightBits::E5M2, true, true),
            (EightBits::E4M3, true, false),
            (EightBits::E5M2, false, true),
        ] {
            cases.push(Kernel::Quantise { rows, columns, format, straight, transposed });
        }
    }
    for [rows, columns, contracted] in [[1, 1, 1], [37, 29, 53], [16, 48, 32], [130, 72, 264], [128, 96, 160]] {
        for (bias, activation) in [
            (false, Activation::None),
            (true, Activation::None),
            (true, Activation::Relu),
            (false, Activation::Gelu),
            (true, Activation::GeluKept),
        ] {
            cases.push(Kernel::EightBitMatmul { rows, columns, contracted, bias, activation });
        }
        for gelu in [false, true] {
            cases.push(Kernel::EightBitMatmulInputGradient { rows, columns, contracted, gelu });
        }
        for weight in [WeightLayout::OutIn, WeightLayout::InOut] {
            cases.push(Kernel::EightBitMatmulWeightGradient { rows, columns, contracted, weight });
        }
    }
    cases
}

/// Gives a matrix zeros, and numbers too small for the format beside its largest.
pub(super) fn make_wide(rows: usize, x: &mut Tensor) {
    let largest = x.iter().fold(0.0_f64, |largest, value| largest.max(value.abs()));
    for (index, value) in x.iter_mut().enumerate() {
        match index % 7 {
            3 => *value *= 2f64.powi(-10 - (index % 16) as i32),
            5 if rows > 1 => *value = if index % 2 == 0 { 0.0 } else { -largest },
            _ => {}
        }
    }
}

/// Makes operands codes of finite numbers, and their factors powers of two.
pub(super) fn make_codes(kernel: &Kernel, reads: &mut [Tensor]) {
    for (index, format) in formats(kernel).into_iter().enumerate() {
        let count = finite(format).len() as f64;
        let code = |value: f64| {
            let magnitude = (value.abs() * count).floor().min(count - 1.0);
            if value < 0.0 { magnitude + 128.0 } else { magnitude }
        };
        reads[index].iter_mut().for_each(|value| *value = code(*value));
        // Each number of either format is then one of fp16, to which the CPU decodes it, and the
        // largest sum of products fits too.
        reads[2 + index] = vec![2f64.powi(-8 - index as i32)];
    }
}

fn formats(kernel: &Kernel) -> [EightBits; 2] {
    let left = if matches!(kernel, Kernel::EightBitMatmul { .. }) { EightBits::E4M3 } else { EightBits::E5M2 };
    [left, EightBits::E4M3]
}

/// The finite numbers of a format that are not negative, by their codes.
fn finite(format: EightBits) -> Vec<f64> {
    let (fraction, bias, count) = match format {
        EightBits::E4M3 => (3, 7, 0x7f),
        EightBits::E5M2 => (2, 15, 0x7c),
    };
    let value = |code: u32| {
        let (exponent, last) = ((code >> fraction) as i32, f64::from(code % (1 << fraction)) / f64::from(1 << fraction));
        if exponent == 0 { last * 2f64.powi(1 - bias) } else { (1.0 + last) * 2f64.powi(exponent - bias) }
    };
    (0..count).map(value).collect()
}

/// The factor, and the matrix in the ways that are asked for.
pub(super) fn quantised(kernel: &Kernel, reads: &[Tensor]) -> Vec<Tensor> {
    let Kernel::Quantise { rows, columns, format, straight, transposed } = *kernel else {
        unreachable!("it is asked for no other")
    };
    let numbers = finite(format);
    let most = numbers[numbers.len() - 1];
    let largest = reads[0].iter().fold(0.0_f64, |largest, value| largest.max(value.abs()));
    let scale = match largest {
        0.0 => 1.0,
        _ => (-126..=126).rev().map(|exponent| 2f64.powi(exponent)).find(|scale| largest * scale <= most).unwrap(),
    };
    let code = |value: &f64| {
        let magnitude = value.abs() * scale;
        let above = numbers.partition_point(|&number| number < magnitude).min(numbers.len() - 1);
        let below = above.saturating_sub(1);
        let [to_below, to_above] = [below, above].map(|code| (numbers[code] - magnitude).abs());
        let nearest = if to_below < to_above || (to_below == to_above && below % 2 == 0) { below } else { above };
        (nearest + if value.is_sign_negative() { 128 } else { 0 }) as f64
    };
    let codes: Tensor = reads[0].iter().map(code).collect();
    let turned = (0..columns * rows).map(|index| codes[index % rows * columns + index / rows]).collect();
    let written = straight.then(|| codes.clone()).into_iter().chain(transposed.then_some(turned));
    std::iter::once(vec![1.0 / scale]).chain(written).collect()
}

/// The product of the numbers that the codes stand for.
pub(super) fn product(kernel: &Kernel, given: &Given<'_>) -> Vec<Tensor> {
    let decoded = |index: usize| -> Tensor {
        let numbers = finite(formats(kernel)[index]);
        let value = |code: &f64| if *code >= 128.0 { -numbers[*code as usize - 128] } else { numbers[*code as usize] };
        given.reads[index].iter().map(|code| value(code) * given.reads[2 + index][0]).collect()
    };
    let turned = |matrix: Tensor, rows: usize| -> Tensor {
        let columns = matrix.len() / rows;
        (0..matrix.len()).map(|index| matrix[index % rows * columns + index / rows]).collect()
    };
    let (plain, operands) = match *kernel {
        Kernel::EightBitMatmul { rows, columns, contracted, bias, activation } => (
            Kernel::Matmul { rows, columns, contracted, weight: WeightLayout::OutIn, bias, activation },
            [decoded(0), decoded(1)],
        ),
        Kernel::EightBitMatmulInputGradient { rows, columns, contracted, gelu } => (
            Kernel::MatmulInputGradient { rows, columns, contracted, weight: WeightLayout::InOut, gelu },
            [decoded(0), decoded(1)],
        ),
        Kernel::EightBitMatmulWeightGradient { rows, columns, contracted, weight } => (
            Kernel::MatmulWeightGradient { rows, columns, contracted, weight, bias: false },
            [turned(decoded(0), columns), turned(decoded(1), contracted)],
        ),
        _ => unreachable!("it is asked for no other"),
    };
    let reads: Vec<Tensor> = operands.into_iter().chain(given.reads[4..].iter().cloned()).collect();
    reference::run(&plain, &reads, given.before, given.accumulate, &PARAMETERS, 0)
}

/// A product and its gradients of what is rounded to eight bits, against those of what is not: as
/// far apart as rounding is, half of the last of four places in E4M3 and of three in E5M2 at most
/// and a third to a half of that in the mean.
#[test]
fn rounding_to_eight_bits_moves_products_by_what_the_formats_leave_out() {
    let [rows, columns, contracted] = [96, 64, 128];
    let mut random = ChaCha8Rng::seed_from_u64(7);
    let mut matrix = |rows: usize, columns: usize| -> Tensor {
        (0..rows * columns).map(|_| f64::from(random.random_range(-1.0_f32..1.0) * random.random_range(0.0_f32..1e-3))).collect()
    };
    let [x, w, dy] = [matrix(rows, contracted), matrix(columns, contracted), matrix(rows, columns)];
    let in_eight = |given: &Tensor, rows: usize, columns: usize, format: EightBits| {
        let kernel = Kernel::Quantise { rows, columns, format, straight: true, transposed: true };
        let before = [vec![0.0], vec![0.0; rows * columns], vec![0.0; rows * columns]];
        let [factor, straight, transposed] =
            <[Tensor; 3]>::try_from(run(&kernel, std::slice::from_ref(given), &before, false, false, 0)).unwrap();
        (factor, straight, transposed)
    };
    let (of_x, x8, xt8) = in_eight(&x, rows, contracted, EightBits::E4M3);
    let (of_w, w8, wt8) = in_eight(&w, columns, contracted, EightBits::E4M3);
    let (of_dy, dy8, dyt8) = in_eight(&dy, rows, columns, EightBits::E5M2);
    let weight = WeightLayout::OutIn;
    let activation = Activation::None;
    let cases = [
        (
            Kernel::EightBitMatmul { rows, columns, contracted, bias: false, activation },
            vec![x8, w8, of_x.clone(), of_w.clone()],
            Kernel::Matmul { rows, columns, contracted, weight, bias: false, activation },
            vec![x.clone(), w.clone()],
            0.01..0.045,
        ),
        (
            Kernel::EightBitMatmulInputGradient { rows, columns, contracted, gelu: false },
            vec![dy8, wt8, of_dy.clone(), of_w],
            Kernel::MatmulInputGradient { rows, columns, contracted, weight, gelu: false },
            vec![dy.clone(), w],
            0.02..0.075,
        ),
        (
            Kernel::EightBitMatmulWeightGradient { rows, columns, contracted, weight },
            vec![dyt8, xt8, of_dy, of_x],
            Kernel::MatmulWeightGradient { rows, columns, contracted, weight, bias: false },
            vec![dy, x],
            0.02..0.075,
        ),
    ];
    for (narrow, codes, wide, numbers, expected) in cases {
        let before: Vec<Tensor> = counts(&wide).1.into_iter().map(|count| vec![0.0; count]).collect();
        let rounded = run(&narrow, &codes, &before, false, false, 0).remove(0);
        let exact = reference::run(&wide, &numbers, &before, false, &PARAMETERS, 0).remove(0);
        let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|value| value * value).sum::<f64>().sqrt();
        let apart = norm(&mut rounded.iter().zip(&exact).map(|(left, right)| left - right)) / norm(&mut exact.iter().copied());
        assert!(expected.contains(&apart), "{narrow:?}: {apart}");
    }
}
