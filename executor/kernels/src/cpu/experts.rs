//! Products of a mixture's experts, one after the other, with the kernels of plain products.

use foretell_models::{Activation, WeightLayout};

use super::matmul::{self, Sizes};
use super::memory::Scratch;
use super::micro_kernel::MicroKernel;
use crate::{KernelCall, Operand};

/// Calls `each` with the operands of each expert in turn. Every operand consists of equal
/// contiguous pieces, one per expert.
///
/// # Safety
///
/// The call's operands are checked and valid.
unsafe fn for_each(call: &KernelCall<'_>, experts: usize, mut each: impl FnMut(&KernelCall<'_>)) {
    for expert in 0..experts {
        let piece = |operand: &Operand| {
            let bytes = operand.bytes / experts;
            // SAFETY: the piece lies within its operand.
            Operand { pointer: unsafe { operand.pointer.add(expert * bytes) }, bytes }
        };
        let (reads, writes) = ([piece(&call.reads[0]), piece(&call.reads[1])], [piece(&call.writes[0])]);
        each(&KernelCall { reads: &reads, writes: &writes, ..*call });
    }
}

fn sizes([rows, columns, contracted]: [usize; 3]) -> Sizes {
    Sizes { rows, columns, contracted, weight: WeightLayout::OutIn }
}

/// # Safety
///
/// The call's operands are checked and valid.
pub(super) unsafe fn forward(
    call: &KernelCall<'_>,
    experts: usize,
    extents: [usize; 3],
    kernel: Option<&MicroKernel>,
    scratch: &mut Scratch,
) {
    // SAFETY: the pieces are those of a product of these sizes.
    unsafe { for_each(call, experts, |call| matmul::forward(call, sizes(extents), false, Activation::None, kernel, scratch)) }
}

/// # Safety
///
/// The call's operands are checked and valid.
pub(super) unsafe fn input_gradient(
    call: &KernelCall<'_>,
    experts: usize,
    extents: [usize; 3],
    kernel: Option<&MicroKernel>,
    scratch: &mut Scratch,
) {
    // SAFETY: the pieces are those of a product of these sizes.
    unsafe { for_each(call, experts, |call| matmul::input_gradient(call, sizes(extents), false, kernel, scratch)) }
}

/// # Safety
///
/// The call's operands are checked and valid.
pub(super) unsafe fn weight_gradient(
    call: &KernelCall<'_>,
    experts: usize,
    extents: [usize; 3],
    kernel: Option<&MicroKernel>,
    scratch: &mut Scratch,
) {
    // SAFETY: the pieces are those of a product of these sizes.
    unsafe { for_each(call, experts, |call| matmul::weight_gradient(call, sizes(extents), kernel, scratch)) }
}
