//! Matrix products of any size and orientation with the micro-kernel, in the blocks of Goto and van
//! de Geijn (2008). Each tile reads a panel of the right factor from the nearest caches; a block of
//! the left factor stays in the L2 cache. A factor is packed if its memory order is not the one
//! that the micro-kernel reads. The right factor is never packed as a whole: for a language model's
//! head the copy would cost too much.

use std::ops::Range;

use super::memory::Scratch;
use super::micro_kernel::{MOST_ROWS, MicroKernel, Rows, Step, Taps};
use super::transpose::transpose;
use super::vector::multiversion;
use super::view::{Destination, View, ViewMut};

/// Terms of the sum in one call of the micro-kernel. Its panel of 64 KiB comes from the L2 cache,
/// which is fast enough. A smaller panel in the L1 cache would read and write the destination more
/// often.
const DEPTH: usize = 512;

/// Rows per block of the left factor: 504 KiB, half of a server core's L2 cache.
const BLOCK_ROWS: usize = 252;

/// Columns per block of the right factor: 2 MiB, which the last-level cache holds.
const BLOCK_COLUMNS: usize = 1024;

/// Lines of a factor that are packed together: few enough that all stay in the L1 cache at any
/// stride, and enough that the packed block is written in whole pages.
const PACKED_LINES: usize = 8;

/// A part of the product that is complete and still in the cache.
#[derive(Clone, Debug)]
pub(super) struct Part {
    pub(super) rows: Range<usize>,
    pub(super) columns: Range<usize>,
}

/// `destination (+)= left[rows, contracted] · right[contracted, columns]`. Calls `finish` once for
/// every part of the destination.
///
/// # Safety
///
/// The views are valid at these extents. Each has one stride of 1; the destination has column
/// stride 1. The destination overlaps neither factor nor itself.
#[allow(clippy::too_many_arguments)]
pub(super) unsafe fn multiply_blocked(
    [rows, columns, contracted]: [usize; 3],
    destination: ViewMut,
    left: View,
    right: View,
    mode: Destination,
    kernel: &MicroKernel,
    scratch: &mut Scratch,
    mut finish: impl FnMut(Part),
) {
    debug_assert!(destination.column_stride == 1);
    let depth = evenly(contracted, DEPTH);
    let block_columns = evenly(columns, BLOCK_COLUMNS).next_multiple_of(kernel.panel_width);
    let block_rows = evenly(rows, BLOCK_ROWS).next_multiple_of(kernel.most_rows());
    // Contiguous rows are read in place.
    let sliver = (left.column_stride != 1).then(|| kernel.most_rows().next_power_of_two());
    let left_elements = sliver.map_or(0, |sliver| block_rows / kernel.most_rows() * sliver * depth);
    let [packed_right, packed_left] = scratch.pieces([block_columns * depth, left_elements]);
    for first_column in (0..columns).step_by(block_columns) {
        let count = block_columns.min(columns - first_column);
        // With `contracted` 0 there is one empty round, so that the destination is written.
        for start in (0..contracted.max(1)).step_by(depth) {
            let length = depth.min(contracted - start);
            let add = mode == Destination::Add || start > 0;
            // SAFETY: the block lies in the right factor.
            unsafe { pack_right(packed_right, right, [start, first_column], [length, count], kernel.panel_width) };
            for first_row in (0..rows).step_by(block_rows) {
                let block = LeftBlock { first_row, rows: block_rows.min(rows - first_row), start, length };
                if let Some(sliver) = sliver {
                    // SAFETY: the block lies in the left factor.
                    unsafe { pack_left(packed_left, left, &block, kernel.most_rows(), sliver) };
                }
                for (index, panel) in packed_right.chunks_exact(length.max(1) * kernel.panel_width).enumerate() {
                    let column = index * kernel.panel_width;
                    if column >= count {
                        break;
                    }
                    let columns = kernel.panel_width.min(count - column);
                    // SAFETY: as this function's own contract: the rows and columns are the
                    // product's.
                    unsafe {
                        let target = destination.pointer.add(first_row * destination.row_stride + first_column + column);
                        let target = ViewMut { pointer: target, ..destination };
                        run_panel(
                            &block,
                            left,
                            sliver.map(|sliver| (&*packed_left, sliver)),
                            panel,
                            target,
                            columns,
                            add,
                            kernel,
                        );
                    }
                }
                if start + length == contracted {
                    finish(Part { rows: first_row..first_row + block.rows, columns: first_column..first_column + count });
                }
            }
        }
    }
}

/// A block of the left factor: its rows, and the range `start..start + length` of the contracted
/// dimension.
struct LeftBlock {
    first_row: usize,
    rows: usize,
    start: usize,
    length: usize,
}

/// Multiplies all rows of a block by one panel of the right factor.
///
/// # Safety
///
/// The block lies in the left factor. `packed`, if given, is the block in packed form, with the
/// width of its slivers. The target is valid for the block's rows and for the panel's columns.
#[allow(clippy::too_many_arguments)]
unsafe fn run_panel(
    block: &LeftBlock,
    left: View,
    packed: Option<(&[f32], usize)>,
    panel: &[f32],
    target: ViewMut,
    columns: usize,
    add: bool,
    kernel: &MicroKernel,
) {
    let panel_step = Step { within: kernel.panel_width, between: 0 };
    let row_step = Step { within: packed.map_or(1, |(_, sliver)| sliver), between: 0 };
    let taps = Taps { segments: 1, length: block.length, row: row_step, panel: panel_step };
    let most = kernel.most_rows();
    for (index, first) in (0..block.rows).step_by(most).enumerate() {
        let count = most.min(block.rows - first);
        let destinations: [*mut f32; MOST_ROWS] =
            std::array::from_fn(|row| target.pointer.wrapping_add((first + row) * target.row_stride));
        let destinations = &destinations[..count];
        // SAFETY: as this function's own contract.
        unsafe {
            match packed {
                Some((packed, sliver)) => {
                    let rows = Rows::Neighbours(packed[index * sliver * block.length..].as_ptr());
                    kernel.tile(&taps, rows, panel.as_ptr(), destinations, columns, add);
                }
                None => {
                    let row = left.pointer.wrapping_add((block.first_row + first) * left.row_stride + block.start);
                    let rows: [*const f32; MOST_ROWS] = std::array::from_fn(|index| row.wrapping_add(index * left.row_stride));
                    kernel.tile(&taps, Rows::Anywhere(&rows[..count]), panel.as_ptr(), destinations, columns, add);
                }
            }
        }
    }
}

/// Packs a block of the right factor into panels `[length, width]`, with zeros beyond the last
/// column.
///
/// # Safety
///
/// The block is valid, and one of the view's strides is one.
unsafe fn pack_right(
    packed: &mut [f32],
    right: View,
    [start, first_column]: [usize; 2],
    [length, count]: [usize; 2],
    width: usize,
) {
    if length == 0 {
        return;
    }
    let first = right.pointer.wrapping_add(start * right.row_stride + first_column * right.column_stride);
    if right.column_stride == 1 {
        // SAFETY: the block is valid, and these are its extents.
        let source = unsafe { std::slice::from_raw_parts(first, (length - 1) * right.row_stride + count) };
        pack_lines(packed, [length, width, width], source, right.row_stride, count);
        return;
    }
    // SAFETY: as above.
    let source = unsafe { std::slice::from_raw_parts(first, (count - 1) * right.column_stride + length) };
    for (panel, column) in packed.chunks_exact_mut(length * width).zip((0..count).step_by(width)) {
        let columns = width.min(count - column);
        if columns < width {
            panel.fill(0.0);
        }
        transpose::<false>(panel, width, &source[column * right.column_stride..], right.column_stride, [columns, length]);
    }
}

/// Packs a block of a left factor with row stride 1 into slivers `[length, sliver]`. Each sliver
/// holds `most` rows; the next sliver starts `most` rows further.
///
/// # Safety
///
/// The block is valid, and the view's row stride is one.
unsafe fn pack_left(packed: &mut [f32], left: View, block: &LeftBlock, most: usize, sliver: usize) {
    debug_assert!(left.row_stride == 1);
    let LeftBlock { first_row, rows, start, length } = *block;
    if length == 0 {
        return;
    }
    let first = left.pointer.wrapping_add(start * left.column_stride + first_row);
    // SAFETY: the block is valid, and these are its extents.
    let source = unsafe { std::slice::from_raw_parts(first, (length - 1) * left.column_stride + rows) };
    pack_lines(packed, [length, sliver, most], source, left.column_stride, rows);
}

/// Packs `length` lines of `count` elements into pieces `[length, width]`. Piece `i` starts at
/// element `i * step` of each line; elements past the end of a line are zero. If `width > step`,
/// pieces overlap: copying `width` elements takes one vector move, and the elements past `step` are
/// not read.
fn pack_lines(packed: &mut [f32], [length, width, step]: [usize; 3], source: &[f32], source_stride: usize, count: usize) {
    for first in (0..length).step_by(PACKED_LINES) {
        let lines = PACKED_LINES.min(length - first);
        for (piece, start) in packed.chunks_exact_mut(length * width).zip((0..count).step_by(step)) {
            let target = &mut piece[first * width..][..lines * width];
            copy_lines(target, width, &source[first * source_stride + start..], source_stride, width.min(count - start));
        }
    }
}

/// Copies lines of `count` elements from stride `source_stride` to stride `width`, and fills each
/// line up to `width` with zeros.
fn copy_lines(target: &mut [f32], width: usize, source: &[f32], source_stride: usize, count: usize) {
    match (width, count) {
        (32, 32) => copy_32(target, source, source_stride),
        (16, 16) => copy_16(target, source, source_stride),
        (8, 8) => copy_8(target, source, source_stride),
        _ => {
            for (target, source) in target.chunks_exact_mut(width).zip(source.chunks(source_stride.max(1))) {
                target[..count].copy_from_slice(&source[..count]);
                target[count..].fill(0.0);
            }
        }
    }
}

#[inline(always)]
fn copy_arrays<const COUNT: usize>(target: &mut [f32], source: &[f32], source_stride: usize) {
    let (targets, _) = target.as_chunks_mut::<COUNT>();
    for (target, source) in targets.iter_mut().zip(source.chunks(source_stride.max(1))) {
        if let Some(source) = source.first_chunk::<COUNT>() {
            *target = *source;
        }
    }
}

multiversion! {
    fn copy_32(target: &mut [f32], source: &[f32], source_stride: usize) {
        copy_arrays::<32>(target, source, source_stride);
    }

    fn copy_16(target: &mut [f32], source: &[f32], source_stride: usize) {
        copy_arrays::<16>(target, source, source_stride);
    }

    fn copy_8(target: &mut [f32], source: &[f32], source_stride: usize) {
        copy_arrays::<8>(target, source, source_stride);
    }
}

/// Size of equal parts of `total`, at most `most` each; at least 1.
fn evenly(total: usize, most: usize) -> usize {
    total.div_ceil(total.div_ceil(most).max(1)).max(1)
}
