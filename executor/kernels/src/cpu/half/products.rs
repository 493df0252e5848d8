//! Dispatches bf16 products and convolutions to the kernels that multiply pairs.

use super::convolutions;
use super::dot::{Finish, Last, Right, TILE, WIDTH, multiply, multiply_transposed};
use crate::KernelCall;
use crate::cpu::memory::{Scratch, floats_mut, halves, halves_mut};
use crate::cpu::micro_kernel::MicroKernel;
use foretell_models::{Activation, Kernel, WeightLayout};

/// Runs a product or convolution, and returns `true`; returns `false` for any other call, and for
/// empty products.
///
/// # Safety
///
/// The call's operands are checked and valid, and the micro-kernel is the one for pairs.
pub(super) unsafe fn run(call: &KernelCall<'_>, kernel: &MicroKernel, [scratch, packing]: [&mut Scratch; 2]) -> bool {
    debug_assert_eq!((kernel.panel_width, kernel.most_rows()), (WIDTH, TILE));
    // SAFETY: reads are valid and do not overlap the writes.
    let read = |index: usize| unsafe { halves(&call.reads[index]) };
    // SAFETY: as above.
    let write = || unsafe { halves_mut(&call.writes[0]) };
    match *call.kernel {
        Kernel::Matmul { rows, columns, contracted, .. }
        | Kernel::MatmulInputGradient { rows, columns, contracted, .. }
        | Kernel::MatmulWeightGradient { rows, columns, contracted, .. }
            if rows * columns * contracted == 0 =>
        {
            return false;
        }
        Kernel::Matmul { rows, columns, contracted, weight, bias, activation } => {
            let w = match weight {
                WeightLayout::OutIn => Right::Columns(read(1)),
                WeightLayout::InOut => Right::Rows(read(1)),
            };
            // SAFETY: the writes are valid and do not overlap.
            let argument = activation.keeps_argument().then(|| unsafe { halves_mut(&call.writes[1]) });
            let finish = Finish { bias: bias.then(|| read(2)), last: Last::Activation(activation, argument) };
            multiply(write(), read(0), w, [rows, columns, contracted], finish, kernel, scratch);
        }
        Kernel::MatmulInputGradient { rows, columns, contracted, weight, gelu } => {
            let w = match weight {
                WeightLayout::OutIn => Right::Rows(read(1)),
                WeightLayout::InOut => Right::Columns(read(1)),
            };
            let last = if gelu { Last::GeluSlope(read(2)) } else { Last::Activation(Activation::None, None) };
            multiply(write(), read(0), w, [rows, contracted, columns], Finish { bias: None, last }, kernel, scratch);
        }
        Kernel::MatmulWeightGradient { rows, columns, contracted, weight, .. } => {
            // SAFETY: as above; a weight gradient is single precision.
            let dw = unsafe { floats_mut(&call.writes[0]) };
            let (dy, x) = (read(0), read(1));
            match weight {
                WeightLayout::OutIn => {
                    multiply_transposed(dw, dy, x, [columns, contracted, rows], call.accumulate, kernel, scratch);
                }
                WeightLayout::InOut => {
                    multiply_transposed(dw, x, dy, [contracted, columns, rows], call.accumulate, kernel, scratch);
                }
            }
        }
        Kernel::Convolution(ref window) => return convolutions::forward(write(), read(0), read(1), window, kernel, scratch),
        Kernel::ConvolutionInputGradient(ref window) => {
            return convolutions::input_gradient(write(), read(0), read(1), window, kernel, scratch);
        }
        Kernel::ConvolutionWeightGradient(ref window) => {
            // SAFETY: as above; a weight gradient is single precision.
            let dw = unsafe { floats_mut(&call.writes[0]) };
            return convolutions::weight_gradient(dw, read(0), read(1), call.accumulate, window, kernel, [scratch, packing]);
        }
        _ => return false,
    }
    true
}
