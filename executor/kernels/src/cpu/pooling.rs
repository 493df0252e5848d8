//! Pooling over windows and over whole images, channels last.

use foretell_models::Window;

use super::memory::{Scratch, check_indices, floats, floats_mut, integers, integers_mut};
use super::sums::column_sums;
use super::vector::multiversion;
use crate::{BackendError, KernelCall};

/// # Safety
///
/// The call's operands are checked and valid.
pub(super) unsafe fn maximum(call: &KernelCall<'_>, window: &Window) {
    // SAFETY: reads and writes are valid and do not overlap.
    unsafe {
        let (y, indices) = (floats_mut(&call.writes[0]), integers_mut(&call.writes[1]));
        maximum_windows(floats(&call.reads[0]), y, indices, window);
    }
}

/// # Safety
///
/// The call's operands are checked and valid.
pub(super) unsafe fn maximum_gradient(call: &KernelCall<'_>) -> Result<(), BackendError> {
    // SAFETY: reads and writes are valid and do not overlap.
    let (dy, indices, dx) = unsafe { (floats(&call.reads[0]), integers(&call.reads[1]), floats_mut(&call.writes[0])) };
    check_indices(call.kernel.name(), indices, dx.len(), None)?;
    dx.fill(0.0);
    for (&dy, &index) in dy.iter().zip(indices) {
        dx[index as usize] += dy;
    }
    Ok(())
}

/// # Safety
///
/// The call's operands are checked and valid.
pub(super) unsafe fn average(call: &KernelCall<'_>, positions: usize, channels: usize, scratch: &mut Scratch) {
    // SAFETY: reads and writes are valid and do not overlap.
    let (y, x) = unsafe { (floats_mut(&call.writes[0]), floats(&call.reads[0])) };
    let (channels, factor) = (channels.max(1), 1.0 / positions as f32);
    let [partial] = scratch.pieces([channels]);
    for (y, x) in y.chunks_exact_mut(channels).zip(x.chunks_exact((positions * channels).max(1))) {
        y.fill(0.0);
        column_sums(x, y, partial);
        y.iter_mut().for_each(|y| *y *= factor);
    }
}

/// # Safety
///
/// The call's operands are checked and valid.
pub(super) unsafe fn average_gradient(call: &KernelCall<'_>, positions: usize, channels: usize) {
    // SAFETY: reads and writes are valid and do not overlap.
    unsafe { spread_positions(floats_mut(&call.writes[0]), floats(&call.reads[0]), positions, channels.max(1)) }
}

multiversion! {
    fn maximum_windows(x: &[f32], y: &mut [f32], indices: &mut [i32], window: &Window) {
        let channels = window.in_channels.max(1);
        let (out_height, out_width) = (window.out_height(), window.out_width());
        for (position, (y, indices)) in y.chunks_exact_mut(channels).zip(indices.chunks_exact_mut(channels)).enumerate() {
            let (column, row, image) =
                (position % out_width, position / out_width % out_height, position / out_width / out_height);
            let rows = within(row, window.height, window);
            let columns = within(column, window.width, window);
            let mut first = true;
            for input_row in rows {
                for input_column in columns.clone() {
                    let offset = ((image * window.height + input_row) * window.width + input_column) * channels;
                    let x = &x[offset..][..channels];
                    if first {
                        y.copy_from_slice(x);
                        indices.iter_mut().zip(offset as i32..).for_each(|(index, value)| *index = value);
                        first = false;
                        continue;
                    }
                    for channel in 0..channels {
                        let larger = x[channel] > y[channel];
                        y[channel] = if larger { x[channel] } else { y[channel] };
                        indices[channel] = if larger { (offset + channel) as i32 } else { indices[channel] };
                    }
                }
            }
        }
    }

    fn spread_positions(dx: &mut [f32], dy: &[f32], positions: usize, channels: usize) {
        let factor = 1.0 / positions as f32;
        for (dx, dy) in dx.chunks_exact_mut((positions * channels).max(1)).zip(dy.chunks_exact(channels)) {
            for dx in dx.chunks_exact_mut(channels) {
                for (dx, &dy) in dx.iter_mut().zip(dy) {
                    *dx = dy * factor;
                }
            }
        }
    }
}

/// Rows (or columns) of an image that the window of output `index` covers.
#[inline(always)]
fn within(index: usize, extent: usize, window: &Window) -> std::ops::Range<usize> {
    let start = index * window.stride;
    start.saturating_sub(window.padding)..(start + window.size).saturating_sub(window.padding).min(extent)
}
