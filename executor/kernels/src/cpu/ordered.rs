//! Copies rows of keys and values between position order and the order in which they are stored.

use super::view::ViewMut;
use foretell_models::{Zigzag, position_runs};

/// Copies rows of `features` floats, `stride` apart in storage order, to contiguous rows in
/// position order. Returns the copy.
pub(super) fn in_order_of_positions<'a>(
    order: Zigzag,
    stored: &[f32],
    stride: usize,
    features: usize,
    ordered: &'a mut [f32],
) -> &'a [f32] {
    for run in position_runs(Some(order), 0..order.positions()) {
        let rows = ordered[run.position * features..][..run.length * features].chunks_exact_mut(features);
        for (row, index) in rows.zip(run.start..) {
            row.copy_from_slice(&stored[index * stride..][..features]);
        }
    }
    ordered
}

/// Copies rows back to the order in which they are stored.
///
/// # Safety
///
/// `stored` has a valid row of `features` floats for each position, and no other thread uses them.
pub(super) unsafe fn store_in_order(order: Zigzag, ordered: &[f32], features: usize, stored: ViewMut) {
    for run in position_runs(Some(order), 0..order.positions()) {
        let rows = ordered[run.position * features..][..run.length * features].chunks_exact(features);
        for (row, index) in rows.zip(run.start..) {
            // SAFETY: as this function's own contract.
            unsafe { std::slice::from_raw_parts_mut(stored.pointer.add(index * stored.row_stride), features) }
                .copy_from_slice(row);
        }
    }
}
