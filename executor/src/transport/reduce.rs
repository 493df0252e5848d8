//! The arithmetic of reductions: element-wise `f32` sums and maxima over bytes as they arrive.
//!
//! Addition of two numbers commutes bit for bit (NaN payloads apart), so only the order over *ranks* matters, and that is the
//! collective's business.

/// How the elements of several ranks become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reduction {
    /// The sum.
    Sum,
    /// The greater of both; a NaN on either side stays a NaN.
    Maximum,
}

/// `into[i] = into[i] (reduction) received[i]`, where `received` holds little-endian `f32`s at any alignment.
///
/// Lengths must agree (`received.len() == 4 * into.len()`); excess on either side is left alone.
pub(super) fn accumulate(reduction: Reduction, into: &mut [f32], received: &[u8]) {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has AVX2, as was just asked.
        unsafe { accumulate_avx2(reduction, into, received) };
        return;
    }
    accumulate_portable(reduction, into, received);
}

/// `into[i] = own[i] (reduction) received[i]`; as [`accumulate`] otherwise.
pub(super) fn combine(reduction: Reduction, into: &mut [f32], own: &[f32], received: &[u8]) {
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
fn accumulate_avx2(reduction: Reduction, into: &mut [f32], received: &[u8]) {
    accumulate_portable(reduction, into, received);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn combine_avx2(reduction: Reduction, into: &mut [f32], own: &[f32], received: &[u8]) {
    combine_portable(reduction, into, own, received);
}

// Inlined into the functions above, so that the compiler vectorises the same loop with the wider registers.
#[inline(always)]
fn accumulate_portable(reduction: Reduction, into: &mut [f32], received: &[u8]) {
    let (received, _) = received.as_chunks::<4>();
    match reduction {
        Reduction::Sum => into.iter_mut().zip(received).for_each(|(value, bytes)| *value += f32::from_le_bytes(*bytes)),
        Reduction::Maximum => {
            into.iter_mut().zip(received).for_each(|(value, bytes)| *value = maximum(*value, f32::from_le_bytes(*bytes)));
        }
    }
}

#[inline(always)]
fn combine_portable(reduction: Reduction, into: &mut [f32], own: &[f32], received: &[u8]) {
    let (received, _) = received.as_chunks::<4>();
    let elements = into.iter_mut().zip(own).zip(received);
    match reduction {
        Reduction::Sum => elements.for_each(|((value, own), bytes)| *value = own + f32::from_le_bytes(*bytes)),
        Reduction::Maximum => elements.for_each(|((value, own), bytes)| *value = maximum(*own, f32::from_le_bytes(*bytes))),
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
