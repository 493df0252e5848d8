//! The three products of attention between a block of queries and the keys or values of one head.
//! With a micro-kernel, tiles above the diagonal are skipped, and factors that a head's blocks
//! share are packed once per head. Without one they are plain matrix products.

use super::micro_kernel::{MOST_ROWS, MicroKernel, Rows, Step, Taps};
use super::product::multiply;
use super::transpose::transpose;
use super::view::{Destination, View, ViewMut};

/// A block of queries of one head: the range `first..first + count` in the order of keys, how many
/// keys the block sees, and the number of features.
#[derive(Clone, Copy)]
pub(super) struct HeadBlock {
    pub(super) first: usize,
    pub(super) count: usize,
    pub(super) visible: usize,
    pub(super) features: usize,
    pub(super) causal: bool,
}

impl HeadBlock {
    /// Number of keys that the block's first `queries` queries see.
    fn seen_by(&self, queries: usize) -> usize {
        if self.causal { self.first + queries } else { self.visible }
    }
}

/// Rows of `features` floats, packed if there is a micro-kernel.
#[derive(Clone, Copy)]
pub(super) struct Factor<'a> {
    rows: &'a [f32],
    stride: usize,
    packed: &'a [f32],
}

/// Length of the buffer of [`Factor::transposed`].
pub(super) fn transposed_elements(kernel: Option<&MicroKernel>, rows: usize, features: usize) -> usize {
    kernel.map_or(0, |kernel| rows.next_multiple_of(kernel.panel_width) * features)
}

/// Length of the buffer of [`Factor::plain`].
pub(super) fn plain_elements(kernel: Option<&MicroKernel>, rows: usize, features: usize) -> usize {
    kernel.map_or(0, |kernel| rows * features.next_multiple_of(kernel.panel_width))
}

impl<'a> Factor<'a> {
    /// Packs panels `[features, width]` of rows, for [`scores`].
    pub(super) fn transposed(
        kernel: Option<&MicroKernel>,
        rows: &'a [f32],
        stride: usize,
        [count, features]: [usize; 2],
        packed: &'a mut [f32],
    ) -> Self {
        if let Some(kernel) = kernel {
            let width = kernel.panel_width;
            for (index, panel) in packed.chunks_exact_mut(features * width).enumerate() {
                let height = width.min(count - index * width);
                if height < width {
                    panel.fill(0.0);
                }
                transpose::<false>(panel, width, &rows[index * width * stride..], stride, [height, features]);
            }
        }
        Factor { rows, stride, packed }
    }

    /// Packs panels `[rows, width]` of features, for [`mixture`] and [`spread`].
    pub(super) fn plain(
        kernel: Option<&MicroKernel>,
        rows: &'a [f32],
        stride: usize,
        [count, features]: [usize; 2],
        packed: &'a mut [f32],
    ) -> Self {
        if let Some(kernel) = kernel {
            let width = kernel.panel_width;
            for (index, panel) in packed.chunks_exact_mut(count * width).enumerate() {
                let columns = width.min(features - index * width);
                for (target, row) in panel.chunks_exact_mut(width).zip(rows.chunks(stride)) {
                    target[..columns].copy_from_slice(&row[index * width..][..columns]);
                    target[columns..].fill(0.0);
                }
            }
        }
        Factor { rows, stride, packed }
    }
}

/// `scores[count, visible] = queries · keysᵀ`. Values above the diagonal are arbitrary.
///
/// # Safety
///
/// The queries are valid, `keys` is [`Factor::transposed`] of at least the visible rows, and
/// `scores` overlaps neither.
pub(super) unsafe fn scores(
    kernel: Option<&MicroKernel>,
    block: &HeadBlock,
    scores: &mut [f32],
    queries: View,
    keys: Factor<'_>,
) {
    let HeadBlock { count, visible, features, .. } = *block;
    assert!(count * visible <= scores.len());
    let Some(kernel) = kernel else {
        // SAFETY: as this function's own contract.
        unsafe {
            let right = View::rows(keys.rows.as_ptr(), keys.stride).transposed();
            multiply(
                [count, visible, features],
                ViewMut::rows(scores.as_mut_ptr(), visible),
                queries,
                right,
                Destination::Overwrite,
            );
        }
        return;
    };
    let taps = taps(features, 1, kernel);
    for (index, panel) in keys.packed.chunks_exact(features * kernel.panel_width).enumerate() {
        let column = index * kernel.panel_width;
        for first in (0..count).step_by(kernel.most_rows()) {
            let rows = kernel.most_rows().min(count - first);
            if column >= block.seen_by(first + rows).min(visible) {
                continue;
            }
            let pointers: [*const f32; MOST_ROWS] =
                std::array::from_fn(|row| queries.pointer.wrapping_add((first + row) * queries.row_stride));
            let destinations = destinations(scores.as_mut_ptr(), first * visible + column, visible);
            let columns = kernel.panel_width.min(visible - column);
            // SAFETY: the rows are queries of the block; the destinations lie in `scores`.
            unsafe {
                kernel.tile(&taps, Rows::Anywhere(&pointers[..rows]), panel.as_ptr(), &destinations[..rows], columns, false)
            };
        }
    }
}

/// `target[count, features] (+)= weights[count, visible] · values`; the weights above the diagonal
/// are zero.
///
/// # Safety
///
/// `values` is [`Factor::plain`] of `packed_rows` rows, at least the visible ones. The target is
/// valid and overlaps neither factor.
pub(super) unsafe fn mixture(
    kernel: Option<&MicroKernel>,
    block: &HeadBlock,
    target: ViewMut,
    weights: &[f32],
    values: Factor<'_>,
    packed_rows: usize,
    mode: Destination,
) {
    let HeadBlock { count, visible, features, .. } = *block;
    assert!(count * visible <= weights.len());
    let Some(kernel) = kernel else {
        // SAFETY: as this function's own contract.
        unsafe {
            let (left, right) = (View::rows(weights.as_ptr(), visible), View::rows(values.rows.as_ptr(), values.stride));
            multiply([count, features, visible], target, left, right, mode);
        }
        return;
    };
    for first in (0..count).step_by(kernel.most_rows()) {
        let rows = kernel.most_rows().min(count - first);
        let taps = taps(block.seen_by(first + rows).min(visible), 1, kernel);
        let pointers: [*const f32; MOST_ROWS] = std::array::from_fn(|row| weights.as_ptr().wrapping_add((first + row) * visible));
        for (index, panel) in values.packed.chunks_exact(packed_rows * kernel.panel_width).enumerate() {
            let column = index * kernel.panel_width;
            let destinations = destinations(target.pointer, first * target.row_stride + column, target.row_stride);
            let columns = kernel.panel_width.min(features - column);
            // SAFETY: the rows are the block's weights; the destinations are rows of the target.
            unsafe {
                kernel.tile(
                    &taps,
                    Rows::Anywhere(&pointers[..rows]),
                    panel.as_ptr(),
                    &destinations[..rows],
                    columns,
                    mode == Destination::Add,
                )
            };
        }
    }
}

/// `target[visible, features] (+)= weightsᵀ · queries`; the weights above the diagonal are zero.
///
/// # Safety
///
/// `queries` is [`Factor::plain`] of the block's rows. The target is valid and overlaps neither
/// factor.
pub(super) unsafe fn spread(
    kernel: Option<&MicroKernel>,
    block: &HeadBlock,
    target: ViewMut,
    weights: &[f32],
    queries: Factor<'_>,
    mode: Destination,
) {
    let HeadBlock { first, count, visible, features, causal } = *block;
    assert!(count * visible <= weights.len());
    let Some(kernel) = kernel else {
        // SAFETY: as this function's own contract.
        unsafe {
            let (left, right) =
                (View::rows(weights.as_ptr(), visible).transposed(), View::rows(queries.rows.as_ptr(), queries.stride));
            multiply([visible, features, count], target, left, right, mode);
        }
        return;
    };
    for key in (0..visible).step_by(kernel.most_rows()) {
        let rows = kernel.most_rows().min(visible - key);
        // Earlier queries do not see these keys.
        let query = if causal { key.saturating_sub(first) } else { 0 };
        let taps = taps(count - query, visible, kernel);
        for (index, panel) in queries.packed.chunks_exact(count * kernel.panel_width).enumerate() {
            let column = index * kernel.panel_width;
            let destinations = destinations(target.pointer, key * target.row_stride + column, target.row_stride);
            let columns = kernel.panel_width.min(features - column);
            let left = Rows::Neighbours(weights[query * visible + key..].as_ptr());
            let panel = panel[query * kernel.panel_width..].as_ptr();
            // SAFETY: the rows are columns of the block's weights; the destinations are rows of the
            // target.
            unsafe { kernel.tile(&taps, left, panel, &destinations[..rows], columns, mode == Destination::Add) };
        }
    }
}

/// Taps of one contiguous sum of `length`, with a packed panel.
fn taps(length: usize, row_step: usize, kernel: &MicroKernel) -> Taps {
    Taps {
        segments: 1,
        length,
        row: Step { within: row_step, between: 0 },
        panel: Step { within: kernel.panel_width, between: 0 },
    }
}

/// Pointers to rows at distance `stride`.
fn destinations(target: *mut f32, first: usize, stride: usize) -> [*mut f32; MOST_ROWS] {
    std::array::from_fn(|row| target.wrapping_add(first + row * stride))
}
