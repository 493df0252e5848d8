//! From a call's raw operands to slices, and the scratch memory that the backend owns.
//! Whoever calls these has checked the operands' sizes.

use crate::backend::{BackendError, Operand};

/// The operand as numbers to read.
///
/// # Safety
///
/// The operand is valid, initialised and aligned, and nobody writes to it while the slice lives.
#[inline]
pub(super) unsafe fn floats<'a>(operand: &Operand) -> &'a [f32] {
    // SAFETY: as this function's own contract.
    unsafe { numbers(operand) }
}

/// The operand as numbers to write.
///
/// # Safety
///
/// The operand is valid and aligned, and nobody else uses it while the slice lives.
#[inline]
pub(super) unsafe fn floats_mut<'a>(operand: &Operand) -> &'a mut [f32] {
    // SAFETY: as this function's own contract.
    unsafe { numbers_mut(operand) }
}

/// A number as memory holds it: every bit pattern is one.
pub(super) trait Number: Copy {
    /// What zero is as.
    const ZERO: Self;
}

impl Number for f32 {
    const ZERO: f32 = 0.0;
}

/// Of either format of sixteen bits.
impl Number for u16 {
    const ZERO: u16 = 0;
}

/// The operand as numbers of a kind to read.
///
/// # Safety
///
/// As [`floats`].
#[inline]
pub(super) unsafe fn numbers<'a, N: Number>(operand: &Operand) -> &'a [N] {
    // SAFETY: as this function's own contract.
    unsafe { std::slice::from_raw_parts(operand.pointer.cast(), operand.bytes / size_of::<N>()) }
}

/// The operand as numbers of a kind to write.
///
/// # Safety
///
/// As [`floats_mut`].
#[inline]
pub(super) unsafe fn numbers_mut<'a, N: Number>(operand: &Operand) -> &'a mut [N] {
    // SAFETY: as this function's own contract; every bit pattern is a number.
    unsafe { std::slice::from_raw_parts_mut(operand.pointer.cast(), operand.bytes / size_of::<N>()) }
}

/// The operand as integers to read.
///
/// # Safety
///
/// As [`floats`].
#[inline]
pub(super) unsafe fn integers<'a>(operand: &Operand) -> &'a [i32] {
    // SAFETY: as this function's own contract.
    unsafe { std::slice::from_raw_parts(operand.pointer.cast(), operand.bytes / 4) }
}

/// The operand as integers to write.
///
/// # Safety
///
/// As [`floats_mut`].
#[inline]
pub(super) unsafe fn integers_mut<'a>(operand: &Operand) -> &'a mut [i32] {
    // SAFETY: as this function's own contract; every bit pattern is a number.
    unsafe { std::slice::from_raw_parts_mut(operand.pointer.cast(), operand.bytes / 4) }
}

/// The operand as numbers of sixteen bits to read.
///
/// # Safety
///
/// As [`floats`].
#[inline]
pub(super) unsafe fn halves<'a>(operand: &Operand) -> &'a [u16] {
    // SAFETY: as this function's own contract.
    unsafe { numbers(operand) }
}

/// The operand as numbers of sixteen bits to write.
///
/// # Safety
///
/// As [`floats_mut`].
#[inline]
pub(super) unsafe fn halves_mut<'a>(operand: &Operand) -> &'a mut [u16] {
    // SAFETY: as this function's own contract.
    unsafe { numbers_mut(operand) }
}

/// Whether a write is the read itself.
#[inline]
pub(super) fn same(read: &Operand, write: &Operand) -> bool {
    std::ptr::eq(read.pointer, write.pointer)
}

/// Refuses indices outside of `0..limit`, before anything is written by them; `ignored` may stand anywhere.
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

/// Memory for intermediate results that no program plans: tiles of patches, blocks of attention scores, partial sums.
/// Grows to the largest need that it has seen, which a first step shows.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    memory: Vec<Line>,
}

/// A cache line, for the alignment.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
struct Line([f32; 16]);

impl Scratch {
    /// Disjoint pieces of the stated lengths, each at a cache line; what stands in them is arbitrary.
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
            // SAFETY: a line is sixteen numbers and nothing else, and `length` is at most sixteen times `count`.
            unsafe { std::slice::from_raw_parts_mut(piece.as_mut_ptr().cast(), length) }
        })
    }
}
