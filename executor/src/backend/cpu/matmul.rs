//! Products with a weight matrix and what is fused with them, and bias as a kernel of its own.

use foretell_models::WeightLayout;

use super::blocked::{Part, multiply_blocked};
use super::memory::{Scratch, floats, floats_mut, same};
use super::micro_kernel::MicroKernel;
use super::product::{Destination, View, ViewMut, multiply, multiply_with};
use super::sums::column_sums;
use super::vector::multiversion;
use crate::backend::KernelCall;

/// The extents of [`Kernel::Matmul`](foretell_models::Kernel::Matmul) and its gradients.
#[derive(Clone, Copy)]
pub(super) struct Sizes {
    pub(super) rows: usize,
    pub(super) columns: usize,
    pub(super) contracted: usize,
    pub(super) weight: WeightLayout,
}

/// Elements of a block of y that get their bias while they are in the second-level cache: 1 MiB of the 1-2 MiB that a server core has.
/// Smaller blocks lose more by packing the weights once a block than they gain.
const EPILOGUE_BLOCK: usize = 1 << 18;

impl Sizes {
    /// The weight as `[contracted, columns]`.
    fn weight(&self, pointer: *const f32) -> View {
        match self.weight {
            WeightLayout::InOut => View::rows(pointer, self.columns),
            WeightLayout::OutIn => View::rows(pointer, self.contracted).transposed(),
        }
    }
}

/// # Safety
///
/// The call's operands are checked and valid.
pub(super) unsafe fn forward(
    call: &KernelCall<'_>,
    sizes: Sizes,
    bias: bool,
    relu: bool,
    kernel: Option<&MicroKernel>,
    scratch: &mut Scratch,
) {
    let Sizes { rows, columns, contracted, .. } = sizes;
    // SAFETY: reads and writes are valid and do not overlap.
    let (x, w, y) = unsafe { (floats(&call.reads[0]), floats(&call.reads[1]), floats_mut(&call.writes[0])) };
    let destination = ViewMut::rows(y.as_mut_ptr(), columns);
    // SAFETY: a third read is there when there is a bias.
    let bias = bias.then(|| unsafe { floats(&call.reads[2]) });
    if rows == 0 || columns == 0 {
        return;
    }
    let fused = bias.is_some() || relu;
    if let Some(kernel) = kernel
        && (fused || sizes.weight == WeightLayout::OutIn)
    {
        let finish = |part: Part| {
            if !fused {
                return;
            }
            let bias = bias.map(|bias| &bias[part.columns.clone()]);
            for row in part.rows {
                let start = destination.pointer.wrapping_add(row * columns + part.columns.start);
                // SAFETY: the part is one of y, complete, and nobody has a slice of y.
                epilogue(unsafe { std::slice::from_raw_parts_mut(start, part.columns.len()) }, bias, relu);
            }
        };
        let extents = [rows, columns, contracted];
        // SAFETY: the views are the operands'.
        unsafe {
            let (left, right) = (View::rows(x.as_ptr(), contracted), sizes.weight(w.as_ptr()));
            multiply_blocked(extents, destination, left, right, Destination::Overwrite, kernel, scratch, finish);
        }
        return;
    }
    let block = if fused { (EPILOGUE_BLOCK / columns).max(64) } else { rows };
    // Blocks of nearly one size: a short last one would pack the weights for little.
    let block = rows.div_ceil(rows.div_ceil(block));
    for first in (0..rows).step_by(block) {
        let count = block.min(rows - first);
        let y = &mut y[first * columns..(first + count) * columns];
        // SAFETY: the views lie inside of their slices.
        unsafe {
            let left = View::rows(x[first * contracted..].as_ptr(), contracted);
            let destination = ViewMut::rows(y.as_mut_ptr(), columns);
            multiply([count, columns, contracted], destination, left, sizes.weight(w.as_ptr()), Destination::Overwrite);
        }
        epilogue(y, bias, relu);
    }
}

/// What is fused with a product.
fn epilogue(y: &mut [f32], bias: Option<&[f32]>, relu: bool) {
    match (bias, relu) {
        (Some(bias), true) => bias_and_relu(y, bias),
        (Some(bias), false) => add_bias(y, bias),
        (None, true) => super::elementwise::relu_in_place(y),
        (None, false) => {}
    }
}

/// # Safety
///
/// The call's operands are checked and valid.
pub(super) unsafe fn input_gradient(call: &KernelCall<'_>, sizes: Sizes, kernel: Option<&MicroKernel>, scratch: &mut Scratch) {
    let Sizes { rows, columns, contracted, .. } = sizes;
    // SAFETY: reads and writes are valid and do not overlap.
    unsafe {
        let dy = View::rows(call.reads[0].pointer.cast(), columns);
        let w = sizes.weight(call.reads[1].pointer.cast());
        let dx = ViewMut::rows(call.writes[0].pointer.cast(), contracted);
        multiply_with(kernel, scratch, [rows, contracted, columns], dx, dy, w.transposed(), Destination::Overwrite);
    }
}

/// # Safety
///
/// The call's operands are checked and valid.
pub(super) unsafe fn weight_gradient(call: &KernelCall<'_>, sizes: Sizes, kernel: Option<&MicroKernel>, scratch: &mut Scratch) {
    let Sizes { rows, columns, contracted, .. } = sizes;
    let mode = Destination::accumulating(call.accumulate);
    // SAFETY: reads and writes are valid and do not overlap.
    unsafe {
        let dy = View::rows(call.reads[0].pointer.cast(), columns);
        let x = View::rows(call.reads[1].pointer.cast(), contracted);
        let dw = call.writes[0].pointer.cast();
        match sizes.weight {
            WeightLayout::InOut => {
                let dw = ViewMut::rows(dw, columns);
                multiply_with(kernel, scratch, [contracted, columns, rows], dw, x.transposed(), dy, mode);
            }
            WeightLayout::OutIn => {
                let dw = ViewMut::rows(dw, contracted);
                multiply_with(kernel, scratch, [columns, contracted, rows], dw, dy.transposed(), x, mode);
            }
        }
    }
}

/// # Safety
///
/// The call's operands are checked and valid; y may be x.
pub(super) unsafe fn bias_add(call: &KernelCall<'_>) {
    // SAFETY: reads and writes are valid; when y is x only y's slice is made.
    unsafe {
        let (bias, y) = (floats(&call.reads[1]), floats_mut(&call.writes[0]));
        if same(&call.reads[0], &call.writes[0]) { add_bias(y, bias) } else { add_bias_to(y, floats(&call.reads[0]), bias) }
    }
}

/// # Safety
///
/// The call's operands are checked and valid.
pub(super) unsafe fn bias_gradient(call: &KernelCall<'_>, partial: &mut [f32]) {
    // SAFETY: reads and writes are valid and do not overlap.
    let (dy, dbias) = unsafe { (floats(&call.reads[0]), floats_mut(&call.writes[0])) };
    if !call.accumulate {
        dbias.fill(0.0);
    }
    column_sums(dy, dbias, partial);
}

multiversion! {
    fn add_bias(y: &mut [f32], bias: &[f32]) {
        for row in y.chunks_exact_mut(bias.len().max(1)) {
            for (y, &bias) in row.iter_mut().zip(bias) {
                *y += bias;
            }
        }
    }

    fn bias_and_relu(y: &mut [f32], bias: &[f32]) {
        for row in y.chunks_exact_mut(bias.len().max(1)) {
            for (y, &bias) in row.iter_mut().zip(bias) {
                let sum = *y + bias;
                *y = if sum > 0.0 { sum } else { 0.0 };
            }
        }
    }

    fn add_bias_to(y: &mut [f32], x: &[f32], bias: &[f32]) {
        let columns = bias.len().max(1);
        for (row, x) in y.chunks_exact_mut(columns).zip(x.chunks_exact(columns)) {
            for ((y, &x), &bias) in row.iter_mut().zip(x).zip(bias) {
                *y = x + bias;
            }
        }
    }
}
