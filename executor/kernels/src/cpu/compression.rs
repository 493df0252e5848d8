//! Compression of messages between ranks: each chunk is converted through a single-precision buffer
//! in the cache. [`Compression`] defines the layout of a message.

use super::memory::{floats, floats_mut, numbers, numbers_mut};
use super::vector::multiversion;
use crate::KernelCall;
use crate::half::SixteenBits;
use foretell_models::Compression;

/// Elements of the largest chunk of any format.
const MOST: usize = 256;

/// Bytes of a chunk's scale factor.
const FACTOR: usize = size_of::<f32>();

/// Largest magnitude of an integer code.
const LARGEST: f32 = 127.0;

/// # Safety
///
/// The call's operands are checked and valid.
pub(super) unsafe fn compress(call: &KernelCall<'_>, format: Compression, feedback: bool) {
    // SAFETY: reads and writes are valid and do not overlap; with feedback there is a second write.
    let (x, message, mut error) = unsafe {
        let error = feedback.then(|| floats_mut(&call.writes[1]));
        (floats(&call.reads[0]), numbers_mut::<u8>(&call.writes[0]), error)
    };
    let mut room = [0.0; MOST];
    let mut sent = [0.0; MOST];
    for (index, message) in message.chunks_exact_mut(format.chunk_bytes()).enumerate() {
        let start = (index * format.chunk()).min(x.len());
        let end = (start + format.chunk()).min(x.len());
        let numbers = &mut room[..format.chunk()];
        numbers[end - start..].fill(0.0);
        numbers[..end - start].copy_from_slice(&x[start..end]);
        let Some(error) = error.as_deref_mut().map(|error| &mut error[start..end]) else {
            encode(message, numbers, format);
            continue;
        };
        add(numbers, error);
        encode(message, numbers, format);
        let sent = &mut sent[..format.chunk()];
        sent.fill(0.0);
        add_decoded(sent, message, format);
        error.iter_mut().zip(numbers).zip(sent).for_each(|((error, number), sent)| *error = *number - *sent);
    }
}

/// # Safety
///
/// The call's operands are checked and valid.
pub(super) unsafe fn decompress(call: &KernelCall<'_>, format: Compression) {
    // SAFETY: reads and writes are valid and do not overlap.
    let (messages, y) = unsafe { (numbers::<u8>(&call.reads[0]), floats_mut(&call.writes[0])) };
    y.fill(0.0);
    for message in messages.chunks_exact(format.bytes(y.len()).max(1)) {
        for (y, message) in y.chunks_mut(format.chunk()).zip(message.chunks_exact(format.chunk_bytes())) {
            add_decoded(y, message, format);
        }
    }
}

/// The 16-bit format of a message; `None` if it consists of integers.
fn half(format: Compression) -> Option<SixteenBits> {
    match format {
        Compression::Bf16 => Some(SixteenBits::Bf16),
        Compression::Fp16 => Some(SixteenBits::Fp16),
        Compression::Int8 => None,
    }
}

/// Writes one chunk of a message.
fn encode(message: &mut [u8], numbers: &[f32], format: Compression) {
    match half(format) {
        Some(half) => {
            for (pair, &number) in message.as_chunks_mut::<2>().0.iter_mut().zip(numbers) {
                *pair = half.nearest(number).to_ne_bytes();
            }
        }
        None => {
            let (factor, codes) = message.split_at_mut(FACTOR);
            let scale = encode_integers(codes, numbers);
            factor.copy_from_slice(&scale.to_ne_bytes());
        }
    }
}

/// Decodes a chunk of a message and adds its first `y.len()` elements to `y`.
fn add_decoded(y: &mut [f32], message: &[u8], format: Compression) {
    match half(format) {
        Some(half) => {
            for (y, &pair) in y.iter_mut().zip(message.as_chunks::<2>().0) {
                *y += half.to_single(u16::from_ne_bytes(pair));
            }
        }
        None => {
            let (factor, codes) = message.split_at(FACTOR);
            let factor = f32::from_ne_bytes(factor.try_into().expect("invariant: a factor has its bytes"));
            add_integers(y, codes, factor);
        }
    }
}

multiversion! {
    fn add(y: &mut [f32], x: &[f32]) {
        for (y, &x) in y.iter_mut().zip(x) {
            *y += x;
        }
    }

    /// Writes the integer codes of a chunk and returns their scale factor: the largest magnitude
    /// over the largest integer. One element that is not finite makes the whole chunk NaN.
    fn encode_integers(codes: &mut [u8], numbers: &[f32]) -> f32 {
        let largest = numbers.iter().fold(0, |largest: u32, number| largest.max(number.to_bits() & 0x7fff_ffff));
        let largest = f32::from_bits(largest);
        if !largest.is_finite() {
            codes.fill(0);
            return f32::NAN;
        }
        let factor = largest / LARGEST;
        let inverse = if factor > 0.0 { 1.0 / factor } else { 0.0 };
        for (code, &number) in codes.iter_mut().zip(numbers) {
            *code = (number * inverse).round_ties_even().clamp(-LARGEST, LARGEST) as i8 as u8;
        }
        factor
    }

    fn add_integers(y: &mut [f32], codes: &[u8], factor: f32) {
        for (y, &code) in y.iter_mut().zip(codes) {
            *y += f32::from(code as i8) * factor;
        }
    }
}
