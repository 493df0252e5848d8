//! The arithmetic of reductions: element-wise sums and maxima over bytes as they arrive.
//!
//! Addition of two numbers commutes bit for bit (NaN payloads apart), so only the order over *ranks* matters, and that is the
//! collective's business.

use crate::half::Half;

/// How the elements of several ranks become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reduction {
    /// The sum.
    Sum,
    /// The greater of both; a NaN on either side stays a NaN.
    Maximum,
}

/// How the numbers of a reduction are stored. Those of sixteen bits are added in single precision, and each sum is rounded once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Number {
    /// Single precision.
    Fp32,
    /// Sixteen bits.
    Half(Half),
}

impl Number {
    /// Bytes of one.
    pub const fn width(self) -> usize {
        match self {
            Number::Fp32 => 4,
            Number::Half(_) => 2,
        }
    }
}

/// `into[i] = into[i] (reduction) received[i]`, where both hold little-endian numbers at any alignment.
///
/// Lengths must agree; excess on either side is left alone.
pub(super) fn accumulate(number: Number, reduction: Reduction, into: &mut [u8], received: &[u8]) {
    if let Number::Half(half) = number {
        return halves(half, reduction, into, None, received);
    }
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has AVX2, as was just asked.
        unsafe { accumulate_avx2(reduction, into, received) };
        return;
    }
    accumulate_portable(reduction, into, received);
}

/// `into[i] = own[i] (reduction) received[i]`; as [`accumulate`] otherwise.
pub(super) fn combine(number: Number, reduction: Reduction, into: &mut [u8], own: &[u8], received: &[u8]) {
    if let Number::Half(half) = number {
        return halves(half, reduction, into, Some(own), received);
    }
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has AVX2, as was just asked.
        unsafe { combine_avx2(reduction, into, own, received) };
        return;
    }
    combine_portable(reduction, into, own, received);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn accumulate_avx2(reduction: Reduction, into: &mut [u8], received: &[u8]) {
    accumulate_portable(reduction, into, received);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn combine_avx2(reduction: Reduction, into: &mut [u8], own: &[u8], received: &[u8]) {
    combine_portable(reduction, into, own, received);
}

#[inline(always)]
fn reduced(reduction: Reduction, left: f32, right: f32) -> f32 {
    match reduction {
        Reduction::Sum => left + right,
        Reduction::Maximum => maximum(left, right),
    }
}

// Inlined into the functions above, so that the compiler vectorises the same loop with the wider registers.
#[inline(always)]
fn accumulate_portable(reduction: Reduction, into: &mut [u8], received: &[u8]) {
    #[inline(always)]
    fn each(into: &mut [u8], received: &[u8], reduced: impl Fn(f32, f32) -> f32) {
        for (value, bytes) in into.as_chunks_mut::<4>().0.iter_mut().zip(received.as_chunks::<4>().0) {
            *value = reduced(f32::from_le_bytes(*value), f32::from_le_bytes(*bytes)).to_le_bytes();
        }
    }
    match reduction {
        Reduction::Sum => each(into, received, |left, right| left + right),
        Reduction::Maximum => each(into, received, maximum),
    }
}

#[inline(always)]
fn combine_portable(reduction: Reduction, into: &mut [u8], own: &[u8], received: &[u8]) {
    #[inline(always)]
    fn each(into: &mut [u8], own: &[u8], received: &[u8], reduced: impl Fn(f32, f32) -> f32) {
        let (own, received) = (own.as_chunks::<4>().0, received.as_chunks::<4>().0);
        for ((value, own), bytes) in into.as_chunks_mut::<4>().0.iter_mut().zip(own).zip(received) {
            *value = reduced(f32::from_le_bytes(*own), f32::from_le_bytes(*bytes)).to_le_bytes();
        }
    }
    match reduction {
        Reduction::Sum => each(into, own, received, |left, right| left + right),
        Reduction::Maximum => each(into, own, received, maximum),
    }
}

/// Numbers of sixteen bits that are widened at once.
const BLOCK: usize = 256;

/// Both of the above for numbers of sixteen bits; without `own` it is `into` itself that is added to.
fn halves(half: Half, reduction: Reduction, into: &mut [u8], own: Option<&[u8]>, received: &[u8]) {
    for (block, (into, received)) in into.chunks_mut(2 * BLOCK).zip(received.chunks(2 * BLOCK)).enumerate() {
        let mut left = [0.0; BLOCK];
        let mut right = [0.0; BLOCK];
        let widened = |bytes: &[u8], singles: &mut [f32; BLOCK]| {
            let mut bits = [0; BLOCK];
            bits.iter_mut().zip(bytes.as_chunks::<2>().0).for_each(|(bits, bytes)| *bits = u16::from_le_bytes(*bytes));
            half.widen(singles, &bits);
        };
        match own {
            Some(own) => widened(&own[2 * BLOCK * block..][..into.len()], &mut left),
            None => widened(into, &mut left),
        }
        widened(received, &mut right);
        left.iter_mut().zip(&right).for_each(|(left, &right)| *left = reduced(reduction, *left, right));
        let mut bits = [0; BLOCK];
        half.narrow(&mut bits, &left);
        into.as_chunks_mut::<2>().0.iter_mut().zip(bits).for_each(|(bytes, bits)| *bytes = bits.to_le_bytes());
    }
}

// `f32::max` would drop a NaN, and with it the only sign that a gradient overflowed.
#[inline(always)]
fn maximum(left: f32, right: f32) -> f32 {
    if left.is_nan() || left > right { left } else { right }
}

/// The bytes of `values` as they lie in memory.
pub(super) fn bytes_of(values: &[f32]) -> &[u8] {
    // SAFETY: every byte of an `f32` is initialised, a byte needs no alignment, and the length in bytes is that of the slice.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast::<u8>(), size_of_val(values)) }
}

/// The bytes of `values`, to be written.
pub(super) fn bytes_of_mut(values: &mut [f32]) -> &mut [u8] {
    // SAFETY: as in `bytes_of`; and every pattern of bytes is an `f32`.
    unsafe { std::slice::from_raw_parts_mut(values.as_mut_ptr().cast::<u8>(), size_of_val(values)) }
}

// The bytes on the wire are the bytes in memory.
#[cfg(target_endian = "big")]
compile_error!("foretell's transports send little-endian numbers as they lie in memory");
