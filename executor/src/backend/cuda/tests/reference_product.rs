//! What the device's library computes, in double precision.

use crate::backend::cuda::driver::{BiasGradient, DeviceAddress, EpilogueActivation, MatrixOperand, Product};
use crate::fp8::to_single;
use crate::half::Half;
use foretell_units::DataType;

/// The library's product, in double precision.
///
/// # Safety
/// The matrices are valid.
pub(super) unsafe fn multiply(product: &Product) {
    let Product { batch, rows, columns, contracted, left, right, result, input, output, accumulate, epilogue, .. } = *product;
    // SAFETY: the caller's promise, here and below.
    let number = |address: DeviceAddress, at: usize| unsafe { get(address, input, at) };
    let of_factor = |index: usize, address: DeviceAddress, at: usize| match product.fp8 {
        None => number(address, at),
        // SAFETY: as above.
        Some(fp8) => unsafe {
            let code = address.pointer().add(at).read();
            f64::from(to_single(fp8.formats[index], code)) * get(fp8.scales[index], DataType::Fp32, 0)
        },
    };
    for image in 0..batch {
        let [left_stored, right_stored, [.., result_pitch]] = product.stored();
        let matrix =
            |index: usize, factor: MatrixOperand, [rows, columns]: [usize; 2], [stored, _, pitch]: [usize; 3]| -> Vec<f64> {
                let base = image * stored * pitch;
                (0..rows * columns)
                    .map(|at| match factor.is_transposed {
                        true => of_factor(index, factor.address, base + at % columns * pitch + at / columns),
                        false => of_factor(index, factor.address, base + at / columns * pitch + at % columns),
                    })
                    .collect()
            };
        let left = matrix(0, left, [rows, contracted], left_stored);
        let right = matrix(1, right, [contracted, columns], right_stored);
        if let Some(sums) = epilogue.bias_gradient {
            let (to, count) = match sums {
                BiasGradient::OfLeft(to) => (to, rows),
                BiasGradient::OfRight(to) => (to, columns),
            };
            for at in 0..count {
                let sum: f64 = match sums {
                    BiasGradient::OfLeft(_) => left[at * contracted..][..contracted].iter().sum(),
                    BiasGradient::OfRight(_) => right[at..].iter().step_by(columns).sum(),
                };
                // SAFETY: the caller's promise.
                unsafe { put(to, output, at, sum) };
            }
        }
        let mut sums = vec![0.0; columns];
        for row in 0..rows {
            sums.fill(0.0);
            for k in 0..contracted {
                let factor = left[row * contracted + k];
                sums.iter_mut().zip(&right[k * columns..]).for_each(|(sum, other)| *sum += factor * other);
            }
            for (column, sum) in sums.iter().enumerate() {
                let at = (image * rows + row) * result_pitch + column;
                let mut value = sum + epilogue.bias.map_or(0.0, |bias| number(bias, column));
                if accumulate {
                    // SAFETY: the caller's promise.
                    value += unsafe { get(result, output, at) };
                }
                let dense = row * columns + column;
                let tangent = |x: f64| (0.797_884_560_802_865_4 * (x + 0.044_715 * x * x * x)).tanh();
                let gelu = |x: f64| 0.5 * x * (1.0 + tangent(x));
                value = match epilogue.activation {
                    EpilogueActivation::None => value,
                    EpilogueActivation::Relu => value.max(0.0),
                    EpilogueActivation::Gelu => gelu(value),
                    EpilogueActivation::GeluAux(kept) => {
                        // SAFETY: the caller's promise.
                        unsafe { put(kept, output, dense, value) };
                        gelu(value)
                    }
                    EpilogueActivation::GeluGradient(given) => {
                        let x = number(given, dense);
                        value * (gelu(x + 1e-5) - gelu(x - 1e-5)) / 2e-5
                    }
                };
                // SAFETY: the caller's promise.
                unsafe { put(result, output, at, value) };
            }
        }
    }
}

pub(crate) unsafe fn get(address: DeviceAddress, data_type: DataType, at: usize) -> f64 {
    let (halves, singles) = (address.pointer().cast::<u16>(), address.pointer().cast::<f32>());
    match Half::of(data_type) {
        // SAFETY: the caller's promise.
        Some(half) => f64::from(half.to_single(unsafe { halves.add(at).read() })),
        // SAFETY: the caller's promise.
        None => f64::from(unsafe { singles.add(at).read() }),
    }
}

pub(crate) unsafe fn put(address: DeviceAddress, data_type: DataType, at: usize, value: f64) {
    let (halves, singles) = (address.pointer().cast::<u16>(), address.pointer().cast::<f32>());
    match Half::of(data_type) {
        // SAFETY: the caller's promise.
        Some(half) => unsafe { halves.add(at).write(half.nearest(value as f32)) },
        // SAFETY: the caller's promise.
        None => unsafe { singles.add(at).write(value as f32) },
    }
}
