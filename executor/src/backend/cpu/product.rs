//! The one door to the matrix product of the `gemm` crate: strided views in, one thread, overwrite or add.

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
