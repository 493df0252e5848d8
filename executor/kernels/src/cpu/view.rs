//! Strided views of matrices, the operands of products.

/// A read-only matrix in borrowed memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct View {
    pub(super) pointer: *const f32,
    /// Elements from one row to the next.
    pub(super) row_stride: usize,
    /// Elements from one column to the next.
    pub(super) column_stride: usize,
}

/// As [`View`], but writable.
#[derive(Clone, Copy, Debug)]
pub(super) struct ViewMut {
    pub(super) pointer: *mut f32,
    pub(super) row_stride: usize,
    pub(super) column_stride: usize,
}

impl View {
    /// A matrix with contiguous rows.
    pub(super) fn rows(pointer: *const f32, row_stride: usize) -> Self {
        View { pointer, row_stride, column_stride: 1 }
    }

    /// The transposed matrix over the same memory.
    pub(super) fn transposed(self) -> Self {
        View { pointer: self.pointer, row_stride: self.column_stride, column_stride: self.row_stride }
    }
}

impl ViewMut {
    /// A matrix with contiguous rows.
    pub(super) fn rows(pointer: *mut f32, row_stride: usize) -> Self {
        ViewMut { pointer, row_stride, column_stride: 1 }
    }

    /// The transposed matrix over the same memory.
    pub(super) fn transposed(self) -> Self {
        ViewMut { pointer: self.pointer, row_stride: self.column_stride, column_stride: self.row_stride }
    }
}

/// Whether a product overwrites its destination or adds to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Destination {
    /// Overwrites without reading.
    Overwrite,
    /// Adds.
    Add,
}

impl Destination {
    /// From a call's `accumulate` flag.
    pub(super) fn accumulating(accumulate: bool) -> Self {
        if accumulate { Destination::Add } else { Destination::Overwrite }
    }
}
