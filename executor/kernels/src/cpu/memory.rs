//! Converts a call's raw operands to slices, and holds the backend's scratch memory. Callers have
//! checked the operands' sizes.

use crate::{BackendError, Operand};

/// Returns an operand as floats to read.
///
/// # Safety
///
/// The operand is valid, initialised and aligned, and is not written while the slice lives.
#[inline]
pub(super) unsafe fn floats<'a>(operand: &Operand) -> &'a [f32] {
    // SAFETY: as this function's own contract.
    unsafe { numbers(operand) }
}

/// Returns an operand as floats to write.
///
/// # Safety
///
/// The operand is valid and aligned, and is used only through this slice while it lives.
#[inline]
pub(super) unsafe fn floats_mut<'a>(operand: &Operand) -> &'a mut [f32] {
    // SAFETY: as this function's own contract.
    unsafe { numbers_mut(operand) }
}

/// A number type for which every bit pattern is valid.
pub(super) trait Number: Copy {
    /// The representation of zero.
    const ZERO: Self;
}

impl Number for f32 {
    const ZERO: f32 = 0.0;
}

/// Half precision, in either format.
impl Number for u16 {
    const ZERO: u16 = 0;
}

/// Returns an operand as numbers of type `N` to read.
///
/// # Safety
///
/// As [`floats`].
#[inline]
pub(super) unsafe fn numbers<'a, N: Number>(operand: &Operand) -> &'a [N] {
    // SAFETY: as this function's own contract.
    unsafe { std::slice::from_raw_parts(operand.pointer.cast(), operand.bytes / size_of::<N>()) }
}

/// Returns an operand as numbers of type `N` to write.
///
/// # Safety
///
/// As [`floats_mut`].
#[inline]
pub(super) unsafe fn numbers_mut<'a, N: Number>(operand: &Operand) -> &'a mut [N] {
    // SAFETY: as this function's own contract; every bit pattern is a number.
    unsafe { std::slice::from_raw_parts_mut(operand.pointer.cast(), operand.bytes / size_of::<N>()) }
}

/// Returns an operand as integers to read.
///
/// # Safety
///
/// As [`floats`].
#[inline]
pub(super) unsafe fn integers<'a>(operand: &Operand) -> &'a [i32] {
    // SAFETY: as this function's own contract.
    unsafe { std::slice::from_raw_parts(operand.pointer.cast(), operand.bytes / 4) }
}

/// Returns an operand as integers to write.
///
/// # Safety
///
/// As [`floats_mut`].
#[inline]
pub(super) unsafe fn integers_mut<'a>(operand: &Operand) -> &'a mut [i32] {
    // SAFETY: as this function's own contract; every bit pattern is a number.
    unsafe { std::slice::from_raw_parts_mut(operand.pointer.cast(), operand.bytes / 4) }
}

/// Returns an operand as half-precision numbers to read.
///
/// # Safety
///
/// As [`floats`].
#[inline]
pub(super) unsafe fn halves<'a>(operand: &Operand) -> &'a [u16] {
    // SAFETY: as this function's own contract.
    unsafe { numbers(operand) }
}

/// Returns an operand as half-precision numbers to write.
///
/// # Safety
///
/// As [`floats_mut`].
#[inline]
pub(super) unsafe fn halves_mut<'a>(operand: &Operand) -> &'a mut [u16] {
    // SAFETY: as this function's own contract.
    unsafe { numbers_mut(operand) }
}

/// Whether a write and a read are the same memory.
#[inline]
pub(super) fn same(read: &Operand, write: &Operand) -> bool {
    std::ptr::eq(read.pointer, write.pointer)
}

/// Refuses indices outside `0..limit` before anything is written. The value `ignored` is always
/// allowed.
pub(super) fn check_indices(
    kernel: &'static str,
    indices: &[i32],
    limit: usize,
    ignored: Option<i32>,
) -> Result<(), BackendError> {
    let inside = |value: i32| usize::try_from(value).is_ok_and(|index| index < limit) || Some(value) == ignored;
    match indices.iter().position(|&value| !inside(value)) {
        None => Ok(()),
        Some(position) => Err(BackendError::IndexOutOfRange { kernel, position, value: indices[position], limit }),
    }
}

/// Scratch memory for intermediate results outside the memory plan: tiles of patches, blocks of
/// attention scores, partial sums. It grows to the largest need seen, usually in the first step.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    memory: Vec<Line>,
}

/// A cache line, for alignment.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
struct Line([f32; 16]);

impl Scratch {
    /// Returns disjoint pieces of these lengths, aligned to cache lines, with arbitrary content.
    pub(super) fn pieces<const COUNT: usize>(&mut self, lengths: [usize; COUNT]) -> [&mut [f32]; COUNT] {
        let lines = lengths.map(|length| length.div_ceil(16));
        let needed = lines.iter().sum();
        if self.memory.len() < needed {
            self.memory.resize(needed, Line([0.0; 16]));
        }
        let mut rest = self.memory.as_mut_slice();
        let mut index = 0;
        lines.map(|count| {
            let (piece, after) = std::mem::take(&mut rest).split_at_mut(count);
            rest = after;
            let length = lengths[index];
            index += 1;
            // SAFETY: a line is sixteen numbers and nothing else, and `length` is at most sixteen
            // times `count`.
            unsafe { std::slice::from_raw_parts_mut(piece.as_mut_ptr().cast(), length) }
        })
    }
}
