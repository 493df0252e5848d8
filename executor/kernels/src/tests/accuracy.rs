//! How far a backend's results may be from the reference.

use super::Tensor;
use crate::cuda::tests::on_gpu::GpuBackend;
use foretell_models::{Activation, Kernel};

/// The arithmetic that a backend under test computes with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Arithmetic {
    /// The CPU's: its kernels, and the CUDA kernels in the emulator.
    Cpu,
    /// A GPU's.
    Gpu,
}

/// Error of a GPU's elementary functions, which are two to four units in the last place off (CUDA
/// C++ Programming Guide, Mathematical Functions). It shows where a tensor is one number.
const GPU_FUNCTIONS: f64 = 1.6e-5;
/// Error of a GPU's sums on tensor cores, which truncate what is below a sum's last place, always
/// towards zero (Fasi, Higham, Mikaitis and Pranesh 2021, Numerical behavior of NVIDIA tensor
/// cores): over 3,000 products, up to 400 times half of the last place.
const GPU_SUMS: f64 = 3e-5;
/// Error of fp8 products on Hopper, which accumulates with about 13 bits of mantissa (DeepSeek-AI
/// 2024, DeepSeek-V3, 3.3.2).
const HOPPER_FP8: f64 = 1.0 / 1024.0;
/// Error of GELU in a library's epilogue, which may use `tanh.approx`: a relative error of 2^-11
/// (PTX ISA, tanh).
const APPROXIMATE_GELU: f64 = 1.0 / 1024.0;

impl Arithmetic {
    /// Returns the arithmetic of the CUDA backend under test.
    pub(super) fn of_cuda() -> Self {
        if GpuBackend::is_requested() { Self::Gpu } else { Self::Cpu }
    }

    /// Returns how far an element of written operand `write` may be off in single precision, as a
    /// fraction of the operand's largest magnitude. Errors grow with the terms of a sum, so they
    /// are measured against the largest element, not each one's own.
    pub(super) fn single_precision(self, kernel: &Kernel, write: usize) -> f64 {
        match self {
            Self::Cpu => 4e-6,
            Self::Gpu => gpu_products(kernel, write).max(GPU_FUNCTIONS),
        }
    }

    /// Returns the same for 16-bit precisions, before the result is rounded.
    pub(super) fn half_precision(self, kernel: &Kernel, write: usize) -> f64 {
        match self {
            Self::Cpu => 6e-6,
            Self::Gpu => gpu_products(kernel, write).max(GPU_SUMS),
        }
    }
}

/// Returns the error of a kernel whose product a GPU's library computes with less precision.
fn gpu_products(kernel: &Kernel, write: usize) -> f64 {
    match kernel {
        _ if is_fp8_product(kernel) => HOPPER_FP8,
        // GELU's argument, the second write, is a plain product.
        _ if without_gelu(kernel).is_some() && write == 0 => APPROXIMATE_GELU,
        _ => 0.0,
    }
}

/// Returns the largest of the terms that cancel in a kernel's result, 0 for most kernels. Rounding
/// errors are relative to it where it is larger than the result.
pub(super) fn largest_term(kernel: &Kernel, reads: &[Tensor]) -> f64 {
    match kernel {
        // A row of one feature is its own root mean square, so that only epsilon's part remains.
        Kernel::RmsNormInputGradient { features: 1, .. } => {
            let [dy, _, weight, factor] = reads else { return 0.0 };
            dy.iter().zip(factor).fold(0.0, |largest, (dy, factor)| f64::max(largest, (dy * weight[0] * factor).abs()))
        }
        // A row of one feature is its own mean.
        Kernel::LayerNormInputGradient { features: 1, .. } => {
            let [dy, _, weight, saved] = reads else { return 0.0 };
            // The mean of each row and one over its deviation.
            let factors = saved.iter().skip(1).step_by(2);
            dy.iter().zip(factors).fold(0.0, |largest, (dy, factor)| f64::max(largest, (dy * weight[0] * factor).abs()))
        }
        _ => 0.0,
    }
}

/// Returns how often more a GPU's result is rounded in 16 bits than once: a product to which a bias
/// is added, or GELU or its slope applied, may be rounded before.
pub(super) fn further_roundings(arithmetic: Arithmetic, kernel: &Kernel) -> f64 {
    let has_bias = matches!(kernel, Kernel::Matmul { bias: true, .. } | Kernel::EightBitMatmul { bias: true, .. });
    match arithmetic {
        // Each of fifteen products is rounded, also where an emulator runs the GPU's kernels.
        _ if matches!(kernel, Kernel::Orthogonalise { .. }) => 15.0,
        Arithmetic::Gpu if has_bias || without_gelu(kernel).is_some() => 1.0,
        Arithmetic::Gpu | Arithmetic::Cpu => 0.0,
    }
}

/// Returns `true` for a product of fp8 matrices.
pub(super) fn is_fp8_product(kernel: &Kernel) -> bool {
    matches!(
        kernel,
        Kernel::EightBitMatmul { .. } | Kernel::EightBitMatmulInputGradient { .. } | Kernel::EightBitMatmulWeightGradient { .. }
    )
}

/// Returns `true` for a kernel that makes or multiplies fp8 matrices.
pub(super) fn is_fp8(kernel: &Kernel) -> bool {
    is_fp8_product(kernel) || matches!(kernel, Kernel::Quantise { .. })
}

/// Returns the plain product of a kernel that fuses GELU or its gradient into one, with the number
/// of operands that the plain one reads. `None` for other kernels.
pub(super) fn without_gelu(kernel: &Kernel) -> Option<(Kernel, usize)> {
    let (mut plain, mut reads) = (*kernel, 0);
    match &mut plain {
        Kernel::Matmul { activation: activation @ (Activation::Gelu | Activation::GeluKept), bias, .. } => {
            *activation = Activation::None;
            reads += 2 + usize::from(*bias);
        }
        Kernel::EightBitMatmul { activation: activation @ (Activation::Gelu | Activation::GeluKept), bias, .. } => {
            *activation = Activation::None;
            reads += 4 + usize::from(*bias);
        }
        Kernel::MatmulInputGradient { gelu: gelu @ true, .. } => {
            *gelu = false;
            reads += 2;
        }
        Kernel::EightBitMatmulInputGradient { gelu: gelu @ true, .. } => {
            *gelu = false;
            reads += 4;
        }
        _ => return None,
    }
    Some((plain, reads))
}
