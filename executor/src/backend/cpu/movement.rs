//! Kernels that only move or pick: slices, interleavings, the embedding table.

use super::memory::{check_indices, floats, floats_mut, integers};
use super::vector::multiversion;
use crate::backend::{BackendError, KernelCall};

/// # Safety
///
/// The call's operands are checked and valid, and its group index is below `parts`.
pub(super) unsafe fn slice(call: &KernelCall<'_>, parts: usize, inner: usize) {
    // SAFETY: reads and writes are valid and do not overlap.
    let (x, y) = unsafe { (floats(&call.reads[0]), floats_mut(&call.writes[0])) };
    let inner = inner.max(1);
    for (y, x) in y.chunks_exact_mut(inner).zip(x.chunks_exact(parts * inner)) {
        y.copy_from_slice(&x[call.group_index * inner..][..inner]);
    }
}

/// `[first, second, inner]` to `[second, first, inner]`.
///
/// # Safety
///
/// The call's operands are checked and valid.
pub(super) unsafe fn exchange(call: &KernelCall<'_>, first: usize, second: usize, inner: usize) {
    // SAFETY: reads and writes are valid and do not overlap.
    let (x, y) = unsafe { (floats(&call.reads[0]), floats_mut(&call.writes[0])) };
    for i in 0..first {
        for j in 0..second {
            y[(j * first + i) * inner..][..inner].copy_from_slice(&x[(i * second + j) * inner..][..inner]);
        }
    }
}

/// # Safety
///
/// The call's operands are checked and valid.
pub(super) unsafe fn embedding(
    call: &KernelCall<'_>,
    vocabulary: usize,
    hidden: usize,
    parts: usize,
) -> Result<(), BackendError> {
    // SAFETY: reads and writes are valid and do not overlap.
    let (ids, table, y) = unsafe { (integers(&call.reads[0]), floats(&call.reads[1]), floats_mut(&call.writes[0])) };
    check_indices(call.kernel.name(), ids, parts * vocabulary, None)?;
    let first = first_row(call, vocabulary, parts);
    for (y, &id) in y.chunks_exact_mut(hidden.max(1)).zip(ids) {
        match (id as usize).checked_sub(first).filter(|&row| row < vocabulary) {
            Some(row) => y.copy_from_slice(&table[row * hidden..][..hidden]),
            None => y.fill(0.0),
        }
    }
    Ok(())
}

/// # Safety
///
/// The call's operands are checked and valid.
pub(super) unsafe fn embedding_gradient(
    call: &KernelCall<'_>,
    vocabulary: usize,
    hidden: usize,
    parts: usize,
) -> Result<(), BackendError> {
    // SAFETY: reads and writes are valid and do not overlap.
    let (dy, ids, dtable) = unsafe { (floats(&call.reads[0]), integers(&call.reads[1]), floats_mut(&call.writes[0])) };
    check_indices(call.kernel.name(), ids, parts * vocabulary, None)?;
    if !call.accumulate {
        dtable.fill(0.0);
    }
    scatter_rows(dtable, dy, ids, hidden, first_row(call, vocabulary, parts));
    Ok(())
}

/// The row of the whole table with which a rank's part begins.
pub(super) fn first_row(call: &KernelCall<'_>, vocabulary: usize, parts: usize) -> usize {
    if parts > 1 { call.group_index * vocabulary } else { 0 }
}

multiversion! {
    fn scatter_rows(table: &mut [f32], rows: &[f32], ids: &[i32], hidden: usize, first: usize) {
        for (row, &id) in rows.chunks_exact(hidden.max(1)).zip(ids) {
            let place = (id as usize).checked_sub(first).and_then(|place| table.get_mut(place * hidden..(place + 1) * hidden));
            for (sum, &x) in place.into_iter().flatten().zip(row) {
                *sum += x;
            }
        }
    }
}
