//! Kernels that only move numbers, of sixteen bits.

use crate::backend::cpu::memory::{check_indices, halves, halves_mut, integers};
use crate::backend::cpu::movement::first_row;
use crate::backend::{BackendError, KernelCall};

/// # Safety
///
/// The call's operands are checked and valid, and its group index is below `parts`.
pub(super) unsafe fn slice(call: &KernelCall<'_>, parts: usize, inner: usize) -> Result<(), BackendError> {
    // SAFETY: reads and writes are valid and do not overlap.
    let (x, y) = unsafe { (halves(&call.reads[0]), halves_mut(&call.writes[0])) };
    let inner = inner.max(1);
    for (y, x) in y.chunks_exact_mut(inner).zip(x.chunks_exact(parts * inner)) {
        y.copy_from_slice(&x[call.group_index * inner..][..inner]);
    }
    Ok(())
}

/// # Safety
///
/// The call's operands are checked and valid, and `start + part` is at most `columns`.
pub(super) unsafe fn take_columns(call: &KernelCall<'_>, columns: usize, start: usize, part: usize) -> Result<(), BackendError> {
    // SAFETY: reads and writes are valid and do not overlap.
    let (x, y) = unsafe { (halves(&call.reads[0]), halves_mut(&call.writes[0])) };
    for (y, x) in y.chunks_exact_mut(part.max(1)).zip(x.chunks_exact(columns.max(1))) {
        y.copy_from_slice(&x[start..][..part]);
    }
    Ok(())
}

/// # Safety
///
/// As for [`take_columns`].
pub(super) unsafe fn put_columns(call: &KernelCall<'_>, columns: usize, start: usize, part: usize) -> Result<(), BackendError> {
    // SAFETY: reads and writes are valid and do not overlap.
    let (x, y) = unsafe { (halves(&call.reads[0]), halves_mut(&call.writes[0])) };
    for (y, x) in y.chunks_exact_mut(columns.max(1)).zip(x.chunks_exact(part.max(1))) {
        y[start..][..part].copy_from_slice(x);
    }
    Ok(())
}

/// `[first, second, inner]` to `[second, first, inner]`.
///
/// # Safety
///
/// The call's operands are checked and valid.
pub(super) unsafe fn exchange(call: &KernelCall<'_>, first: usize, second: usize, inner: usize) -> Result<(), BackendError> {
    // SAFETY: reads and writes are valid and do not overlap.
    let (x, y) = unsafe { (halves(&call.reads[0]), halves_mut(&call.writes[0])) };
    for i in 0..first {
        for j in 0..second {
            y[(j * first + i) * inner..][..inner].copy_from_slice(&x[(i * second + j) * inner..][..inner]);
        }
    }
    Ok(())
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
    let (ids, table, y) = unsafe { (integers(&call.reads[0]), halves(&call.reads[1]), halves_mut(&call.writes[0])) };
    check_indices(call.kernel.name(), ids, parts * vocabulary, None)?;
    let first = first_row(call, vocabulary, parts);
    for (y, &id) in y.chunks_exact_mut(hidden.max(1)).zip(ids) {
        match (id as usize).checked_sub(first).filter(|&row| row < vocabulary) {
            Some(row) => y.copy_from_slice(&table[row * hidden..][..hidden]),
            None => y.fill(0),
        }
    }
    Ok(())
}
