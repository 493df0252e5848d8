//! Products with a weight matrix and their fused epilogues, and bias as a separate kernel.

use foretell_models::{Activation, Kernel, WeightLayout};

use super::blocked::{Part, multiply_blocked};
use super::elementwise::{gelu_gradient_in_place, gelu_in_place, relu_in_place};
use super::memory::{Scratch, floats, floats_mut, same};
use super::micro_kernel::MicroKernel;
use super::product::{multiply, multiply_with};
use super::sums::column_sums;
use super::vector::multiversion;
use super::view::{Destination, View, ViewMut};
use crate::KernelCall;

/// Extents of [`Kernel::Matmul`](foretell_models::Kernel::Matmul) and its gradients.
#[derive(Clone, Copy)]
pub(super) struct Sizes {
    pub(super) rows: usize,
    pub(super) columns: usize,
    pub(super) contracted: usize,
    pub(super) weight: WeightLayout,
}

/// Elements of a block of y that gets its bias while in the L2 cache: 1 MiB of a server core's 1 to
/// 2 MiB. Smaller blocks lose more by packing the weights once per block than they gain.
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

/// Splits a product that also computes a bias gradient into two kernels. A CPU sums columns no
/// faster inside the product than in a separate pass.
pub(super) fn apart(kernel: &Kernel) -> Option<[Kernel; 2]> {
    let Kernel::MatmulWeightGradient { rows, columns, contracted, weight, bias: true } = *kernel else { return None };
    let product = Kernel::MatmulWeightGradient { rows, columns, contracted, weight, bias: false };
    Some([product, Kernel::BiasGradient { rows, columns }])
}

/// # Safety
///
/// The call's operands are checked and valid.
pub(super) unsafe fn forward(
    call: &KernelCall<'_>,
    sizes: Sizes,
    bias: bool,
    activation: Activation,
    kernel: Option<&MicroKernel>,
    scratch: &mut Scratch,
) {
    let Sizes { rows, columns, contracted, weight } = sizes;
    // SAFETY: reads and writes are valid and do not overlap.
    let (x, w, y) = unsafe { (floats(&call.reads[0]), floats(&call.reads[1]), floats_mut(&call.writes[0])) };
    let argument = activation.keeps_argument().then(|| call.writes[1].pointer.cast::<f32>());
    // SAFETY: a third read is there when there is a bias.
    let bias = bias.then(|| unsafe { floats(&call.reads[2]) });
    if rows == 0 || columns == 0 {
        return;
    }
    let y = ViewMut::rows(y.as_mut_ptr(), columns);
    let (extents, left, right) = ([rows, columns, contracted], View::rows(x.as_ptr(), contracted), sizes.weight(w.as_ptr()));
    if bias.is_none() && activation == Activation::None {
        let kernel = kernel.filter(|_| weight == WeightLayout::OutIn);
        // SAFETY: the views are the operands'.
        return unsafe { multiply_with(kernel, scratch, extents, y, left, right, Destination::Overwrite) };
    }
    let finish = |part: Part| {
        let bias = bias.map(|bias| &bias[part.columns.clone()]);
        for row in part.rows {
            let start = row * columns + part.columns.start;
            let row = |pointer: *mut f32| {
                // SAFETY: the part lies in y, or in GELU's argument, which has y's shape. It is
                // complete, and no slice of either exists.
                unsafe { std::slice::from_raw_parts_mut(pointer.wrapping_add(start), part.columns.len()) }
            };
            epilogue(row(y.pointer), bias, activation, argument.map(row));
        }
    };
    // SAFETY: the views are the operands'.
    unsafe { multiply_finished(kernel, scratch, extents, y, left, right, finish) };
}

/// `destination = left[rows, contracted] · right[contracted, columns]`. Calls `finish` once for
/// every part of the destination while that part is in the cache.
///
/// # Safety
///
/// As [`multiply_blocked`].
unsafe fn multiply_finished(
    kernel: Option<&MicroKernel>,
    scratch: &mut Scratch,
    [rows, columns, contracted]: [usize; 3],
    destination: ViewMut,
    left: View,
    right: View,
    mut finish: impl FnMut(Part),
) {
    if rows == 0 || columns == 0 {
        return;
    }
    let mode = Destination::Overwrite;
    if let Some(kernel) = kernel {
        // SAFETY: as this function's own contract.
        return unsafe { multiply_blocked([rows, columns, contracted], destination, left, right, mode, kernel, scratch, finish) };
    }
    let block = (EPILOGUE_BLOCK / columns).max(64);
    // Blocks have nearly equal sizes: a short last block would pack the weights for little work.
    let block = rows.div_ceil(rows.div_ceil(block));
    for first in (0..rows).step_by(block) {
        let count = block.min(rows - first);
        let left = View { pointer: left.pointer.wrapping_add(first * left.row_stride), ..left };
        let target = ViewMut { pointer: destination.pointer.wrapping_add(first * destination.row_stride), ..destination };
        // SAFETY: the rows are the product's.
        unsafe { multiply([count, columns, contracted], target, left, right, mode) };
        finish(Part { rows: first..first + count, columns: 0..columns });
    }
}

/// Applies a product's epilogue to part of a row.
fn epilogue(y: &mut [f32], bias: Option<&[f32]>, activation: Activation, argument: Option<&mut [f32]>) {
    match (bias, activation) {
        (Some(bias), Activation::Relu) => return bias_and_relu(y, bias),
        (Some(bias), _) => add_bias(y, bias),
        (None, Activation::Relu) => return relu_in_place(y),
        (None, _) => {}
    }
    if let Some(argument) = argument {
        argument.copy_from_slice(y);
    }
    if activation.is_gelu() {
        gelu_in_place(y);
    }
}

/// # Safety
///
/// The call's operands are checked and valid.
pub(super) unsafe fn input_gradient(
    call: &KernelCall<'_>,
    sizes: Sizes,
    gelu: bool,
    kernel: Option<&MicroKernel>,
    scratch: &mut Scratch,
) {
    let Sizes { rows, columns, contracted, .. } = sizes;
    let extents = [rows, contracted, columns];
    let dy = View::rows(call.reads[0].pointer.cast(), columns);
    let w = sizes.weight(call.reads[1].pointer.cast()).transposed();
    let dx = ViewMut::rows(call.writes[0].pointer.cast(), contracted);
    if !gelu {
        // SAFETY: reads and writes are valid and do not overlap.
        return unsafe { multiply_with(kernel, scratch, extents, dx, dy, w, Destination::Overwrite) };
    }
    // SAFETY: a third read is there when there is a GELU.
    let argument = unsafe { floats(&call.reads[2]) };
    let finish = |part: Part| {
        for row in part.rows {
            let (start, count) = (row * contracted + part.columns.start, part.columns.len());
            // SAFETY: the part lies in dx and is complete, and no slice of dx exists.
            let dx = unsafe { std::slice::from_raw_parts_mut(dx.pointer.wrapping_add(start), count) };
            gelu_gradient_in_place(dx, &argument[start..start + count]);
        }
    };
    // SAFETY: reads and writes are valid and do not overlap.
    unsafe { multiply_finished(kernel, scratch, extents, dx, dy, w, finish) };
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
