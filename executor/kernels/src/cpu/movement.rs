//! Kernels that only move data: slices, interleavings, embedding look-ups. They work on numbers of
//! any width.

use super::memory::{Number, check_indices, floats, floats_mut, integers, numbers, numbers_mut};
use super::vector::multiversion;
use crate::{BackendError, KernelCall};

/// # Safety
///
/// The call's operands are checked and valid, and its group index is below `parts`.
pub(super) unsafe fn slice<N: Number>(call: &KernelCall<'_>, parts: usize, inner: usize) {
    // SAFETY: reads and writes are valid and do not overlap.
    let (x, y) = unsafe { (numbers::<N>(&call.reads[0]), numbers_mut::<N>(&call.writes[0])) };
    let inner = inner.max(1);
    for (y, x) in y.chunks_exact_mut(inner).zip(x.chunks_exact(parts * inner)) {
        y.copy_from_slice(&x[call.group_index * inner..][..inner]);
    }
}

/// # Safety
///
/// The call's operands are checked and valid, and `start + part` is at most `columns`.
pub(super) unsafe fn take_columns<N: Number>(call: &KernelCall<'_>, columns: usize, start: usize, part: usize) {
    // SAFETY: reads and writes are valid and do not overlap.
    let (x, y) = unsafe { (numbers::<N>(&call.reads[0]), numbers_mut::<N>(&call.writes[0])) };
    for (y, x) in y.chunks_exact_mut(part.max(1)).zip(x.chunks_exact(columns.max(1))) {
        y.copy_from_slice(&x[start..][..part]);
    }
}

/// # Safety
///
/// As [`take_columns`].
pub(super) unsafe fn put_columns<N: Number>(call: &KernelCall<'_>, columns: usize, start: usize, part: usize) {
    // SAFETY: reads and writes are valid and do not overlap.
    let (x, y) = unsafe { (numbers::<N>(&call.reads[0]), numbers_mut::<N>(&call.writes[0])) };
    for (y, x) in y.chunks_exact_mut(columns.max(1)).zip(x.chunks_exact(part.max(1))) {
        y[start..][..part].copy_from_slice(x);
    }
}

/// Transposes `[first, second, inner]` to `[second, first, inner]`.
///
/// # Safety
///
/// The call's operands are checked and valid.
pub(super) unsafe fn exchange<N: Number>(call: &KernelCall<'_>, first: usize, second: usize, inner: usize) {
    // SAFETY: reads and writes are valid and do not overlap.
    let (x, y) = unsafe { (numbers::<N>(&call.reads[0]), numbers_mut::<N>(&call.writes[0])) };
    for i in 0..first {
        for j in 0..second {
            y[(j * first + i) * inner..][..inner].copy_from_slice(&x[(i * second + j) * inner..][..inner]);
        }
    }
}

/// # Safety
///
/// The call's operands are checked and valid.
pub(super) unsafe fn split<N: Number>(call: &KernelCall<'_>, columns: usize) {
    // SAFETY: reads and writes are valid and do not overlap.
    let x = unsafe { numbers::<N>(&call.reads[0]) };
    let (columns, parts) = (columns.max(1), call.writes.len());
    for (index, write) in call.writes.iter().enumerate() {
        // SAFETY: as above; one part at a time.
        let part = unsafe { numbers_mut::<N>(write) };
        for (row, x) in part.chunks_exact_mut(columns).zip(x.chunks_exact(parts * columns)) {
            row.copy_from_slice(&x[index * columns..][..columns]);
        }
    }
}

/// # Safety
///
/// The call's operands are checked and valid.
pub(super) unsafe fn join<N: Number>(call: &KernelCall<'_>, columns: usize) {
    // SAFETY: reads and writes are valid and do not overlap.
    let y = unsafe { numbers_mut::<N>(&call.writes[0]) };
    let (columns, parts) = (columns.max(1), call.reads.len());
    for (index, read) in call.reads.iter().enumerate() {
        // SAFETY: as above.
        let part = unsafe { numbers::<N>(read) };
        for (row, y) in part.chunks_exact(columns).zip(y.chunks_exact_mut(parts * columns)) {
            y[index * columns..][..columns].copy_from_slice(row);
        }
    }
}

/// # Safety
///
/// The call's operands are checked and valid.
pub(super) unsafe fn prepend<N: Number>(call: &KernelCall<'_>, positions: usize, features: usize) {
    // SAFETY: reads and writes are valid and do not overlap.
    let (x, row, y) = unsafe { (numbers::<N>(&call.reads[0]), numbers::<N>(&call.reads[1]), numbers_mut::<N>(&call.writes[0])) };
    if features == 0 {
        return;
    }
    for (index, y) in y.chunks_exact_mut((positions + 1) * features).enumerate() {
        let (first, rest) = y.split_at_mut(features);
        first.copy_from_slice(row);
        rest.copy_from_slice(&x[index * positions * features..][..positions * features]);
    }
}

/// # Safety
///
/// The call's operands are checked and valid.
pub(super) unsafe fn prepend_input_gradient<N: Number>(call: &KernelCall<'_>, positions: usize, features: usize) {
    // SAFETY: reads and writes are valid and do not overlap.
    let (dy, dx) = unsafe { (numbers::<N>(&call.reads[0]), numbers_mut::<N>(&call.writes[0])) };
    let length = (positions * features).max(1);
    for (dx, dy) in dx.chunks_exact_mut(length).zip(dy.chunks_exact((positions + 1) * features.max(1))) {
        dx.copy_from_slice(&dy[features..]);
    }
}

/// # Safety
///
/// The call's operands are checked and valid.
pub(super) unsafe fn prepend_weight_gradient(call: &KernelCall<'_>, positions: usize) {
    // SAFETY: reads and writes are valid and do not overlap.
    let (dy, drow) = unsafe { (floats(&call.reads[0]), floats_mut(&call.writes[0])) };
    if !call.accumulate {
        drow.fill(0.0);
    }
    let features = drow.len().max(1);
    for dy in dy.chunks_exact((positions + 1) * features) {
        drow.iter_mut().zip(dy).for_each(|(sum, &dy)| *sum += dy);
    }
}

/// # Safety
///
/// The call's operands are checked and valid.
pub(super) unsafe fn first<N: Number>(call: &KernelCall<'_>, positions: usize, features: usize) {
    // SAFETY: reads and writes are valid and do not overlap.
    let (x, y) = unsafe { (numbers::<N>(&call.reads[0]), numbers_mut::<N>(&call.writes[0])) };
    for (y, x) in y.chunks_exact_mut(features.max(1)).zip(x.chunks_exact((positions * features).max(1))) {
        y.copy_from_slice(&x[..features]);
    }
}

/// # Safety
///
/// The call's operands are checked and valid.
pub(super) unsafe fn first_gradient<N: Number>(call: &KernelCall<'_>, positions: usize, features: usize) {
    // SAFETY: reads and writes are valid and do not overlap.
    let (dy, dx) = unsafe { (numbers::<N>(&call.reads[0]), numbers_mut::<N>(&call.writes[0])) };
    for (dx, dy) in dx.chunks_exact_mut((positions * features).max(1)).zip(dy.chunks_exact(features.max(1))) {
        let (first, rest) = dx.split_at_mut(features);
        first.copy_from_slice(dy);
        rest.fill(N::ZERO);
    }
}

/// # Safety
///
/// The call's operands are checked and valid.
pub(super) unsafe fn embedding<N: Number>(
    call: &KernelCall<'_>,
    vocabulary: usize,
    hidden: usize,
    parts: usize,
) -> Result<(), BackendError> {
    // SAFETY: reads and writes are valid and do not overlap.
    let (ids, table, y) = unsafe { (integers(&call.reads[0]), numbers::<N>(&call.reads[1]), numbers_mut::<N>(&call.writes[0])) };
    check_indices(call.kernel.name(), ids, parts * vocabulary, None)?;
    let first = first_row(call, vocabulary, parts);
    for (y, &id) in y.chunks_exact_mut(hidden.max(1)).zip(ids) {
        match (id as usize).checked_sub(first).filter(|&row| row < vocabulary) {
            Some(row) => y.copy_from_slice(&table[row * hidden..][..hidden]),
            None => y.fill(N::ZERO),
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

/// First row of a rank's shard within the whole table.
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
