//! The arithmetic of reductions: element-wise sums of bytes as they arrive.
//!
//! The addition of two numbers is commutative, bit for bit except for NaN payloads. So a result
//! depends only on the order in which ranks are added, which the collective decides.

use crate::half::SixteenBits;

/// How the elements of a reduction are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ElementType {
    /// Single precision.
    Fp32,
    /// Sixteen bits. Sums are computed in single precision, and each is rounded once.
    SixteenBits(SixteenBits),
}

impl ElementType {
    /// Bytes per element.
    pub const fn width(self) -> usize {
        match self {
            ElementType::Fp32 => 4,
            ElementType::SixteenBits(_) => 2,
        }
    }
}

/// Computes `into[i] += received[i]` over little-endian elements at any alignment. Both slices must
/// have the same length.
pub(super) fn accumulate(element: ElementType, into: &mut [u8], received: &[u8]) {
    if let ElementType::SixteenBits(half) = element {
        return add_halves(half, into, None, received);
    }
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has AVX2, as was just asked.
        unsafe { accumulate_avx2(into, received) };
        return;
    }
    accumulate_portable(into, received);
}

/// Computes `into[i] = own[i] + received[i]`; otherwise as [`accumulate`].
pub(super) fn combine(element: ElementType, into: &mut [u8], own: &[u8], received: &[u8]) {
    if let ElementType::SixteenBits(half) = element {
        return add_halves(half, into, Some(own), received);
    }
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has AVX2, as was just asked.
        unsafe { combine_avx2(into, own, received) };
        return;
    }
    combine_portable(into, own, received);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn accumulate_avx2(into: &mut [u8], received: &[u8]) {
    accumulate_portable(into, received);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn combine_avx2(into: &mut [u8], own: &[u8], received: &[u8]) {
    combine_portable(into, own, received);
}

// Inlined into the functions above, so that the compiler vectorises the same loop with their wider
// registers.
#[inline(always)]
fn accumulate_portable(into: &mut [u8], received: &[u8]) {
    for (value, bytes) in into.as_chunks_mut::<4>().0.iter_mut().zip(received.as_chunks::<4>().0) {
        *value = (f32::from_le_bytes(*value) + f32::from_le_bytes(*bytes)).to_le_bytes();
    }
}

#[inline(always)]
fn combine_portable(into: &mut [u8], own: &[u8], received: &[u8]) {
    let (own, received) = (own.as_chunks::<4>().0, received.as_chunks::<4>().0);
    for ((value, own), bytes) in into.as_chunks_mut::<4>().0.iter_mut().zip(own).zip(received) {
        *value = (f32::from_le_bytes(*own) + f32::from_le_bytes(*bytes)).to_le_bytes();
    }
}

/// Elements of sixteen bits that are widened at a time.
const BLOCK: usize = 256;

/// [`combine`] for elements of sixteen bits; without `own`, [`accumulate`].
fn add_halves(half: SixteenBits, into: &mut [u8], own: Option<&[u8]>, received: &[u8]) {
    let widen = |bytes: &[u8], singles: &mut [f32; BLOCK]| {
        let mut bits = [0; BLOCK];
        bits.iter_mut().zip(bytes.as_chunks::<2>().0).for_each(|(bits, bytes)| *bits = u16::from_le_bytes(*bytes));
        half.widen(singles, &bits);
    };
    for (block, (into, received)) in into.chunks_mut(2 * BLOCK).zip(received.chunks(2 * BLOCK)).enumerate() {
        let mut sums = [0.0; BLOCK];
        let mut addends = [0.0; BLOCK];
        match own {
            Some(own) => widen(&own[2 * BLOCK * block..][..into.len()], &mut sums),
            None => widen(into, &mut sums),
        }
        widen(received, &mut addends);
        sums.iter_mut().zip(&addends).for_each(|(sum, &addend)| *sum += addend);
        let mut bits = [0; BLOCK];
        half.narrow(&mut bits, &sums);
        into.as_chunks_mut::<2>().0.iter_mut().zip(bits).for_each(|(bytes, bits)| *bytes = bits.to_le_bytes());
    }
}

/// The bytes of `values` as they lie in memory.
pub(super) fn bytes_of(values: &[f32]) -> &[u8] {
    // SAFETY: every byte of an `f32` is initialised, a byte needs no alignment, and the length is
    // that of the slice in bytes.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast::<u8>(), size_of_val(values)) }
}

/// The bytes of `values`, for writing.
pub(super) fn bytes_of_mut(values: &mut [f32]) -> &mut [u8] {
    // SAFETY: as in `bytes_of`; and every bit pattern is an `f32`.
    unsafe { std::slice::from_raw_parts_mut(values.as_mut_ptr().cast::<u8>(), size_of_val(values)) }
}

// Elements are sent as they lie in memory, and added as little-endian numbers.
#[cfg(target_endian = "big")]
compile_error!("the transport needs a little-endian processor");
