//! Matrix products over strided views on one thread. With a micro-kernel they run in its blocks.
//! Without one they run in the `gemm-f32` crate, which only this module calls.

use super::blocked::multiply_blocked;
use super::memory::Scratch;
use super::micro_kernel::MicroKernel;
use super::view::{Destination, View, ViewMut};

/// Least number of columns for which packing a transposed left factor is cheap compared with the
/// product.
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
    // The library is fastest if the destination is stored by columns. For one stored by rows,
    // compute the transposed product, `destination^T = right^T left^T`.
    let by_rows = destination.column_stride < destination.row_stride;
    let (rows, columns) = if by_rows { (columns, rows) } else { (rows, columns) };
    let destination = if by_rows { destination.transposed() } else { destination };
    let (left, right) = if by_rows { (right.transposed(), left.transposed()) } else { (left, right) };
    let [kept, scaled] = [1.0, 1.0];
    let [conjugate_destination, conjugate_left, conjugate_right] = [false; 3];
    // SAFETY: the strides describe valid memory, by this function's own contract.
    unsafe {
        gemm_f32::gemm::f32::get_gemm_fn()(
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
            kept,
            scaled,
            conjugate_destination,
            conjugate_left,
            conjugate_right,
            gemm_common::Parallelism::None,
        );
    }
}
