//! The library's matrix product as the test device computes it: in double precision, or with the
//! arithmetic of a Hopper GPU.

use crate::cuda::driver::{BiasGradient, DeviceAddress, EpilogueActivation, MatrixOperand, Product};
use crate::fp8::to_single;
use crate::half::SixteenBits;
use foretell_units::DataType;

/// The arithmetic of a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ProductArithmetic {
    /// Double precision.
    Exact,
    /// Fp8 products are accumulated with [`HOPPER_FRACTION`] bits, and GELU uses `tanh.approx`.
    Hopper,
}

/// Fraction bits of Hopper's fp8 accumulation: of the products that one instruction adds, and of
/// the accumulator, what is below the largest by more bits is truncated (Khattak and Mikaitis 2025,
/// Accurate models of NVIDIA tensor cores).
const HOPPER_FRACTION: i32 = 13;
/// Products that one fp8 instruction adds.
const HOPPER_PRODUCTS: usize = 32;
/// Products after which cuBLASLt adds the accumulator to single precision, without fast
/// accumulation.
const PROMOTED_PRODUCTS: usize = 128;

/// Computes a product with its epilogue.
///
/// # Safety
/// The matrices are valid.
pub(super) unsafe fn multiply(product: &Product, arithmetic: ProductArithmetic) {
    let Product { batch, rows, columns, contracted, result, input, output, accumulate, epilogue, .. } = *product;
    // SAFETY: the caller's promise; so below.
    let number = |address: DeviceAddress, index: usize| unsafe { get(address, input, index) };
    let [.., [.., result_pitch]] = product.stored();
    for matrix in 0..batch {
        // SAFETY: the caller's promise.
        let [left, right] = unsafe { operands(product, matrix) };
        if let Some(bias_gradient) = epilogue.bias_gradient {
            let (to, count) = match bias_gradient {
                BiasGradient::OfLeft(to) => (to, rows),
                BiasGradient::OfRight(to) => (to, columns),
            };
            for index in 0..count {
                let sum: f64 = match bias_gradient {
                    BiasGradient::OfLeft(_) => left[index * contracted..][..contracted].iter().sum(),
                    BiasGradient::OfRight(_) => right[index..].iter().step_by(columns).sum(),
                };
                // SAFETY: the caller's promise.
                unsafe { put(to, output, index, sum) };
            }
        }
        for row in 0..rows {
            let sums = row_of_product(product, arithmetic, &left[row * contracted..][..contracted], &right);
            for (column, sum) in sums.iter().enumerate() {
                let index = (matrix * rows + row) * result_pitch + column;
                let mut value = sum + epilogue.bias.map_or(0.0, |bias| number(bias, column));
                if accumulate {
                    // SAFETY: the caller's promise.
                    value += unsafe { get(result, output, index) };
                }
                // SAFETY: the caller's promise.
                value = unsafe { activated(arithmetic, epilogue.activation, value, [input, output], row * columns + column) };
                // SAFETY: the caller's promise.
                unsafe { put(result, output, index, value) };
            }
        }
    }
}

/// Returns one row of a product, from a row of the left operand and the right operand.
fn row_of_product(product: &Product, arithmetic: ProductArithmetic, left: &[f64], right: &[f64]) -> Vec<f64> {
    let columns = product.columns;
    match product.fp8.filter(|_| arithmetic == ProductArithmetic::Hopper) {
        Some(fp8) => {
            let promoted = if fp8.fast_accumulation { usize::MAX } else { PROMOTED_PRODUCTS };
            let products = |column: usize| left.iter().zip(right[column..].iter().step_by(columns)).map(|(a, b)| a * b).collect();
            (0..columns).map(|column| hopper_sum(products(column), promoted)).collect()
        }
        None => {
            let mut sums = vec![0.0; columns];
            for (element, right) in left.iter().zip(right.chunks(columns)) {
                sums.iter_mut().zip(right).for_each(|(sum, other)| *sum += element * other);
            }
            sums
        }
    }
}

/// Adds products as Hopper's tensor cores add those of fp8 numbers.
fn hopper_sum(products: Vec<f64>, promoted: usize) -> f64 {
    let mut sum = 0.0_f64;
    for promoted in products.chunks(promoted.min(products.len().max(1))) {
        let mut accumulator = 0.0_f64;
        for added in promoted.chunks(HOPPER_PRODUCTS) {
            let terms = || added.iter().chain([&accumulator]);
            let largest = terms().fold(0.0_f64, |largest, term| largest.max(term.abs()));
            if largest > 0.0 {
                let last_place = 2f64.powi(largest.log2().floor() as i32 - HOPPER_FRACTION);
                accumulator = terms().map(|term| (term / last_place).trunc() * last_place).sum();
            }
        }
        sum += accumulator;
    }
    sum
}

/// Returns left and right operand of one matrix of the batch, dense.
///
/// # Safety
/// The matrices are valid.
unsafe fn operands(product: &Product, matrix: usize) -> [Vec<f64>; 2] {
    let Product { rows, columns, contracted, left, right, input, .. } = *product;
    let element = |side: usize, address: DeviceAddress, index: usize| match product.fp8 {
        // SAFETY: the caller's promise, here and below.
        None => unsafe { get(address, input, index) },
        // SAFETY: the same promise: address and scales are those of a valid matrix.
        Some(fp8) => unsafe {
            let code = address.pointer().add(index).read();
            f64::from(to_single(fp8.formats[side], code)) * get(fp8.scales[side], DataType::Fp32, 0)
        },
    };
    let [left_stored, right_stored, _] = product.stored();
    let dense = |side: usize, operand: MatrixOperand, [rows, columns]: [usize; 2], [stored_rows, _, pitch]: [usize; 3]| {
        let base = matrix * stored_rows * pitch;
        (0..rows * columns)
            .map(|index| match operand.is_transposed {
                true => element(side, operand.address, base + index % columns * pitch + index / columns),
                false => element(side, operand.address, base + index / columns * pitch + index % columns),
            })
            .collect::<Vec<f64>>()
    };
    [dense(0, left, [rows, contracted], left_stored), dense(1, right, [contracted, columns], right_stored)]
}

/// Returns the activation of a value. `index` is its position in dense tensors beside the result,
/// and `formats` are those of the operands and the result.
///
/// # Safety
/// The tensors beside the result are valid.
unsafe fn activated(
    arithmetic: ProductArithmetic,
    activation: EpilogueActivation,
    value: f64,
    [input, output]: [DataType; 2],
    index: usize,
) -> f64 {
    // The relative error of `tanh.approx`, up or down.
    let error = match arithmetic {
        ProductArithmetic::Exact => 0.0,
        ProductArithmetic::Hopper if index.is_multiple_of(2) => 1.0 / 2048.0,
        ProductArithmetic::Hopper => -1.0 / 2048.0,
    };
    let tanh = |x: f64| (0.797_884_560_802_865_4 * (x + 0.044_715 * x * x * x)).tanh() * (1.0 + error);
    let gelu = |x: f64| 0.5 * x * (1.0 + tanh(x));
    match activation {
        EpilogueActivation::None => value,
        EpilogueActivation::Relu => value.max(0.0),
        EpilogueActivation::Gelu => gelu(value),
        EpilogueActivation::GeluAux(auxiliary) => {
            // SAFETY: the caller's promise.
            unsafe { put(auxiliary, output, index, value) };
            gelu(value)
        }
        EpilogueActivation::GeluGradient(argument) => {
            // SAFETY: the caller's promise.
            let x = unsafe { get(argument, input, index) };
            value * (gelu(x + 1e-5) - gelu(x - 1e-5)) / 2e-5
        }
    }
}

/// Reads element `index` of a tensor.
///
/// # Safety
/// The element is valid.
pub(super) unsafe fn get(address: DeviceAddress, data_type: DataType, index: usize) -> f64 {
    let (halves, singles) = (address.pointer().cast::<u16>(), address.pointer().cast::<f32>());
    match SixteenBits::of(data_type) {
        // SAFETY: the caller's promise.
        Some(half) => f64::from(half.to_single(unsafe { halves.add(index).read() })),
        // SAFETY: the caller's promise.
        None => f64::from(unsafe { singles.add(index).read() }),
    }
}

/// Writes element `index` of a tensor, rounded to its format.
///
/// # Safety
/// The element is valid.
pub(super) unsafe fn put(address: DeviceAddress, data_type: DataType, index: usize, value: f64) {
    let (halves, singles) = (address.pointer().cast::<u16>(), address.pointer().cast::<f32>());
    match SixteenBits::of(data_type) {
        // SAFETY: the caller's promise.
        Some(half) => unsafe { halves.add(index).write(half.nearest(value as f32)) },
        // SAFETY: the caller's promise.
        None => unsafe { singles.add(index).write(value as f32) },
    }
}
