//! Matrix products: strided views in, one thread, overwrite or add. With a micro-kernel they are made in its blocks; without, this is the
//! one door to the `gemm` crate.

use super::blocked::multiply_blocked;
use super::memory::Scratch;
use super::micro_kernel::MicroKernel;

/// A matrix in memory that somebody else owns.
#[derive(Clone, Copy, Debug)]
pub(super) struct View {
    pub(super) pointer: *const f32,
    /// Elements from a row to the next.
    pub(super) row_stride: usize,
    /// Elements from a column to the next.
    pub(super) column_stride: usize,
}

/// As [`View`], to be written.
#[derive(Clone, Copy, Debug)]
pub(super) struct ViewMut {
    pub(super) pointer: *mut f32,
    pub(super) row_stride: usize,
    pub(super) column_stride: usize,
}

impl View {
    /// Rows one after the other, each contiguous.
    pub(super) fn rows(pointer: *const f32, row_stride: usize) -> Self {
        View { pointer, row_stride, column_stride: 1 }
    }

    /// The same memory with rows and columns exchanged.
    pub(super) fn transposed(self) -> Self {
        View { pointer: self.pointer, row_stride: self.column_stride, column_stride: self.row_stride }
    }
}

impl ViewMut {
    /// Rows one after the other, each contiguous.
    pub(super) fn rows(pointer: *mut f32, row_stride: usize) -> Self {
        ViewMut { pointer, row_stride, column_stride: 1 }
    }
}

/// What a product does with what its destination holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Destination {
    /// Replaces it, without reading it.
    Overwrite,
    /// Adds to it.
    Add,
}

impl Destination {
    /// What a call's `accumulate` asks for.
    pub(super) fn accumulating(accumulate: bool) -> Self {
        if accumulate { Destination::Add } else { Destination::Overwrite }
    }
}

/// Columns of the product from which on packing a transposed left factor for the micro-kernel is little beside the product.
const LEAST_COLUMNS: usize = 256;

/// As [`multiply`], with the micro-kernel where it is faster: where a factor lies transposed.
///
/// # Safety
///
/// As [`multiply`]; moreover each view has a stride of one, the destination that of its columns.
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
