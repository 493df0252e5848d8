//! Matrix products over strided views on one thread. With a micro-kernel they run in its blocks.
//! Without one they run in the `gemm` crate, which only this module calls.

use super::blocked::multiply_blocked;
use super::memory::Scratch;
use super::micro_kernel::MicroKernel;
use super::view::{Destination, View, ViewMut};

/// Least number of columns for which packing a transposed left factor is cheap beside the product.
const LEAST_COLUMNS: usize = 256;

/// As [`multiply`], but with the micro-kernel if a factor is transposed, where it is faster.
///
/// # Safety
///
/// As [`multiply`]. Each view has one stride of 1; the destination has column stride 1.
pub(super) unsafe fn multiply_with(
    kernel: Option<&MicroKernel>,
    scratch: &mut Scratch,
    extents: [usize; 3],
    destination: ViewMut,
    left: View,
    right: View,
    mode: Destination,
) {
    let left_transposed = left.column_stride != 1 && extents[1] >= LEAST_COLUMNS;
    let right_transposed = left.column_stride == 1 && right.column_stride != 1;
    // SAFETY: as this function's own contract.
    unsafe {
        match kernel.filter(|_| left_transposed || right_transposed) {
            Some(kernel) => multiply_blocked(extents, destination, left, right, mode, kernel, scratch, |_| {}),
            None => multiply(extents, destination, left, right, mode),
        }
    }
}

/// `destination (+)= left[rows, contracted] · right[contracted, columns]`.
///
/// # Safety
///
/// The views are valid at these extents, and the destination overlaps neither factor nor itself.
pub(super) unsafe fn multiply(
    [rows, columns, contracted]: [usize; 3],
    destination: ViewMut,
    left: View,
    right: View,
    mode: Destination,
) {
    // SAFETY: the strides describe valid memory, by this function's own contract.
    unsafe {
        gemm::gemm(
            rows,
            columns,
            contracted,
            destination.pointer,
            destination.column_stride as isize,
            destination.row_stride as isize,
            mode == Destination::Add,
            left.pointer,
            left.column_stride as isize,
            left.row_stride as isize,
            right.pointer,
            right.column_stride as isize,
            right.row_stride as isize,
            1.0,
            1.0,
            false,
            false,
            false,
            gemm::Parallelism::None,
        );
    }
}
