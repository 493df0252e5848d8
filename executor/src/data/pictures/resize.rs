//! Resizing with a triangle filter that widens as a picture shrinks: "bilinear, antialiased".
//!
//! The arithmetic is Pillow's (`src/libImaging/Resample.c`), to the bit: weights in fixed point
//! with 22 bits after the point, first along rows, then along columns, rounded to bytes after each.
//! So a model sees the pixels that torchvision would give it.

use super::decode::{PIXEL, Pixels};
use std::ops::Range;

/// Bits of a weight after the point.
const PRECISION: u32 = 32 - 8 - 2;

/// The rectangle of a picture that is resized.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Rectangle {
    pub left: usize,
    pub top: usize,
    pub width: usize,
    pub height: usize,
}

/// The inputs of one output position: the first one, and a weight for each.
#[derive(Clone, Debug, PartialEq)]
struct Taps {
    first: usize,
    weights: Vec<i32>,
}

/// The weights for resizing `input` positions to `output`, for the output positions in `wanted`.
fn taps(input: usize, output: usize, wanted: Range<usize>) -> Vec<Taps> {
    let scale = input as f64 / output as f64;
    let support = scale.max(1.0);
    let taps_at = |position: usize| {
        let center = (position as f64 + 0.5) * scale;
        let first = (center - support + 0.5).max(0.0) as usize;
        let end = ((center + support + 0.5) as usize).min(input);
        let weight = |place: usize| (1.0 - ((place as f64 - center + 0.5) / support).abs()).max(0.0);
        let weights: Vec<f64> = (first..end).map(weight).collect();
        let total: f64 = weights.iter().sum();
        let fixed = |weight: f64| (0.5 + weight / total * f64::from(1_u32 << PRECISION)) as i32;
        Taps { first, weights: weights.into_iter().map(fixed).collect() }
    };
    wanted.map(taps_at).collect()
}

/// Resizes a rectangle of a picture to `width` x `height` and returns the part of the result in
/// `columns` and `rows`.
pub(super) fn resize(
    picture: &Pixels,
    from: Rectangle,
    [width, height]: [usize; 2],
    columns: Range<usize>,
    rows: Range<usize>,
) -> Pixels {
    let horizontal = taps(from.width, width, columns);
    let vertical = taps(from.height, height, rows);
    let first_row = vertical.first().map_or(0, |taps| taps.first);
    let end_row = vertical.last().map_or(0, |taps| taps.first + taps.weights.len());
    // Only the rows that the second pass reads.
    let mut narrowed = Pixels { width: horizontal.len(), height: end_row - first_row, bytes: Vec::new() };
    narrowed.bytes.resize(narrowed.width * narrowed.height * PIXEL, 0);
    let line = narrowed.width * PIXEL;
    for (row, out) in (first_row..end_row).zip(narrowed.bytes.chunks_exact_mut(line.max(1))) {
        let source = &picture.row(from.top + row)[from.left * PIXEL..(from.left + from.width) * PIXEL];
        if from.width == width {
            let first = horizontal.first().map_or(0, |taps| taps.first) * PIXEL;
            out.copy_from_slice(&source[first..first + line]);
        } else {
            vectorised(OutputLine::Row { source, taps: &horizontal }, out);
        }
    }
    if from.height == height {
        return narrowed;
    }
    let mut result = Pixels { width: narrowed.width, height: vertical.len(), bytes: Vec::new() };
    result.bytes.resize(line * result.height, 0);
    for (taps, out) in vertical.iter().zip(result.bytes.chunks_exact_mut(line.max(1))) {
        let start = (taps.first - first_row) * line;
        let source = &narrowed.bytes[start..start + taps.weights.len() * line];
        vectorised(OutputLine::Column { source, weights: &taps.weights }, out);
    }
    result
}

/// One line of output of either pass.
#[derive(Clone, Copy)]
enum OutputLine<'a> {
    /// Each pixel from its taps in one row.
    Row { source: &'a [u8], taps: &'a [Taps] },
    /// The weighted sum of whole rows.
    Column { source: &'a [u8], weights: &'a [i32] },
}

/// Runs a pass with AVX2 if the machine has it. The results are the same without it: the arithmetic
/// is in integers.
fn vectorised(pass: OutputLine<'_>, out: &mut [u8]) {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") {
        #[target_feature(enable = "avx2")]
        fn wide(pass: OutputLine<'_>, out: &mut [u8]) {
            run(pass, out);
        }
        // SAFETY: the machine was seen to have the feature.
        return unsafe { wide(pass, out) };
    }
    run(pass, out);
}

#[inline(always)]
fn run(pass: OutputLine<'_>, out: &mut [u8]) {
    match pass {
        OutputLine::Row { source, taps } => row_pass(source, taps, out),
        OutputLine::Column { source, weights } => column_pass(source, weights, out),
    }
}

#[inline(always)]
fn row_pass(source: &[u8], taps: &[Taps], out: &mut [u8]) {
    for (out, taps) in out.as_chunks_mut::<PIXEL>().0.iter_mut().zip(taps) {
        let mut sums = [HALF; PIXEL];
        let inputs = source[taps.first * PIXEL..].as_chunks::<PIXEL>().0;
        for (pixel, &weight) in inputs.iter().zip(&taps.weights) {
            for (sum, &value) in sums.iter_mut().zip(pixel) {
                *sum += i32::from(value) * weight;
            }
        }
        *out = sums.map(to_byte);
    }
}

#[inline(always)]
fn column_pass(source: &[u8], weights: &[i32], out: &mut [u8]) {
    /// Bytes whose sums fit the registers.
    const BLOCK: usize = 32;
    let line = out.len();
    let (blocks, rest) = out.as_chunks_mut::<BLOCK>();
    for (number, block) in blocks.iter_mut().enumerate() {
        let mut sums = [HALF; BLOCK];
        for (row, &weight) in source.chunks_exact(line).zip(weights) {
            if let Some(values) = row.as_chunks::<BLOCK>().0.get(number) {
                for (sum, &value) in sums.iter_mut().zip(values) {
                    *sum += i32::from(value) * weight;
                }
            }
        }
        *block = sums.map(to_byte);
    }
    let start = line - rest.len();
    for (offset, byte) in rest.iter_mut().enumerate() {
        let inputs = source.iter().skip(start + offset).step_by(line.max(1)).zip(weights);
        *byte = to_byte(HALF + inputs.map(|(&value, &weight)| i32::from(value) * weight).sum::<i32>());
    }
}

/// A half, in fixed point.
const HALF: i32 = 1 << (PRECISION - 1);

#[inline(always)]
fn to_byte(sum: i32) -> u8 {
    (sum >> PRECISION).clamp(0, 255) as u8
}
