//! bf16 products on machines that sum products of pairs in single precision (AVX-512 BF16).
//!
//! Two neighbours along the contracted dimension form one word, as wide as a float. A row of `2n`
//! numbers is then a row of `n` words, and the micro-kernel of single precision serves pairs with
//! another multiply instruction. An odd last number is paired with a zero.

use std::arch::x86_64::*;

use foretell_models::Activation;

use crate::cpu::elementwise::{gelu_gradient_in_place, gelu_in_place};
use crate::cpu::memory::Scratch;
use crate::cpu::micro_kernel::{MOST_ROWS, MicroKernel, Rows, Step, Taps};
use crate::cpu::transpose::transpose;
use crate::cpu::vector::multiversion;

/// Columns of the micro-kernel's panel.
pub(super) const WIDTH: usize = 32;

/// Rows of its largest tile, and of a packed left factor.
pub(super) const TILE: usize = 14;

/// Pairs summed in one call of the micro-kernel: their panel, 32 KiB, stays in the L1 cache.
pub(super) const CHUNK: usize = 256;

/// The usual words per band of rows over which all panels pass: 256 KiB, which stay in the L2
/// cache. A band has at least a minimum of rows, so bands of long rows are larger.
const BAND_WORDS: usize = 64 << 10;

/// Rows and columns per block of a weight gradient: with [`CHUNK`] pairs each, 224 KiB and 512 KiB.
const BLOCK: [usize; 2] = [16 * TILE, 16 * WIDTH];

/// The right factor of a product, by its memory order.
#[derive(Clone, Copy)]
pub(super) enum Right<'a> {
    /// `[columns, contracted]`.
    Columns(&'a [u16]),
    /// `[contracted, columns]`.
    Rows(&'a [u16]),
}

/// The epilogue of a product, applied before narrowing.
pub(super) struct Finish<'a> {
    pub(super) bias: Option<&'a [u16]>,
    pub(super) last: Last<'a>,
}

/// The last step of an epilogue.
pub(super) enum Last<'a> {
    /// An activation, after the bias. GELU also writes its argument if a destination is given;
    /// other activations ignore the destination.
    Activation(Activation, Option<&'a mut [u16]>),
    /// Multiplication by GELU's slope at these arguments. The bias is ignored.
    GeluSlope(&'a [u16]),
}

/// Views pairs of numbers as words. Panics if their address is not a multiple of four.
pub(super) fn words(halves: &[u16]) -> &[f32] {
    assert!(halves.as_ptr().cast::<f32>().is_aligned());
    // SAFETY: aligned as was just seen, and every bit pattern is a valid value.
    unsafe { std::slice::from_raw_parts(halves.as_ptr().cast(), halves.len() / 2) }
}

/// Views words as pairs of half-precision numbers.
pub(super) fn halves_of(words: &[f32]) -> &[u16] {
    // SAFETY: half of a word needs less alignment, and every bit pattern is a valid value.
    unsafe { std::slice::from_raw_parts(words.as_ptr().cast(), 2 * words.len()) }
}

/// As [`halves_of`], writable.
pub(super) fn halves_of_mut(words: &mut [f32]) -> &mut [u16] {
    // SAFETY: as in [`halves_of`].
    unsafe { std::slice::from_raw_parts_mut(words.as_mut_ptr().cast(), 2 * words.len()) }
}

/// `y[rows, columns] = x[rows, contracted] · right`, with epilogue. Each panel of the right factor
/// passes over a band of rows that stays in the cache. Each sum is narrowed as soon as it is
/// complete.
pub(super) fn multiply(
    y: &mut [u16],
    x: &[u16],
    right: Right<'_>,
    [rows, columns, contracted]: [usize; 3],
    mut finish: Finish<'_>,
    kernel: &MicroKernel,
    scratch: &mut Scratch,
) {
    let pairs = contracted.div_ceil(2);
    let is_odd = contracted % 2 == 1;
    let band = (BAND_WORDS / pairs).clamp(8 * TILE, 64 * TILE) / TILE * TILE;
    let copied = if is_odd { rows * pairs } else { 0 };
    let padded_columns = if is_odd && matches!(right, Right::Columns(_)) { columns * pairs } else { 0 };
    let [packed, left, sums, padded] =
        scratch.pieces([columns.next_multiple_of(WIDTH) * pairs, copied, band.min(rows) * WIDTH, padded_columns]);
    match right {
        Right::Columns(w) => {
            let w = if is_odd { pad_rows(padded, w, contracted) } else { words(w) };
            pack_columns(packed, w, columns, pairs);
        }
        Right::Rows(w) => pack_rows::<WIDTH>(packed, w, columns, 0..columns, contracted),
    }
    let x = if is_odd { pad_rows(left, x, contracted) } else { words(x) };
    assert!(x.len() >= rows * pairs && y.len() >= rows * columns);
    let chunk = pairs.div_ceil(pairs.div_ceil(CHUNK));
    for first_row in (0..rows).step_by(band) {
        let count = band.min(rows - first_row);
        for (index, panel) in packed.chunks_exact(pairs * WIDTH).enumerate() {
            let column = index * WIDTH;
            let width = WIDTH.min(columns - column);
            let mut bias = [0.0; WIDTH];
            if let Some(numbers) = finish.bias {
                crate::half::SixteenBits::Bf16.widen(&mut bias[..width], &numbers[column..][..width]);
            }
            for first in (0..pairs).step_by(chunk) {
                let length = chunk.min(pairs - first);
                let taps =
                    Taps { segments: 1, length, row: Step { within: 1, between: 0 }, panel: Step { within: WIDTH, between: 0 } };
                for row in (0..count).step_by(TILE) {
                    let height = TILE.min(count - row);
                    let left: [*const f32; MOST_ROWS] =
                        std::array::from_fn(|index| x.as_ptr().wrapping_add((first_row + row + index) * pairs + first));
                    let sums = sums[row * WIDTH..][..height * WIDTH].as_mut_ptr();
                    let targets: [*mut f32; MOST_ROWS] = std::array::from_fn(|index| sums.wrapping_add(index * WIDTH));
                    let panel = panel[first * WIDTH..].as_ptr();
                    // SAFETY: the row pointers lie in `x`, the panel has one line per pair, and
                    // `sums` lies in the scratch.
                    unsafe { kernel.tile(&taps, Rows::Anywhere(&left[..height]), panel, &targets[..height], WIDTH, first > 0) };
                    if first + length == pairs {
                        let place = (first_row + row) * columns + column;
                        // SAFETY: nothing else uses these sums.
                        let tile = unsafe { std::slice::from_raw_parts_mut(sums, height * WIDTH) };
                        // SAFETY: the machine has AVX-512 BF16; `y` has `height` rows of `width`
                        // numbers from `place` on.
                        unsafe { finish_tile(tile, &mut y[place..], columns, [height, width], &bias, &mut finish.last, place) };
                    }
                }
            }
        }
    }
}

/// Applies the epilogue to sums and writes them as bf16.
///
/// # Safety
///
/// As [`narrow_tile`]. The slice in `last` also has such rows, from `place` on.
unsafe fn finish_tile(
    sums: &mut [f32],
    y: &mut [u16],
    stride: usize,
    [height, width]: [usize; 2],
    bias: &[f32; WIDTH],
    last: &mut Last<'_>,
    place: usize,
) {
    const NO_BIAS: [f32; WIDTH] = [0.0; WIDTH];
    // SAFETY: this function's own contract.
    let narrow = |sums: &[f32], target: &mut [u16], bias, relu| unsafe {
        narrow_tile(sums.as_ptr(), target.as_mut_ptr(), stride, [height, width], bias, relu);
    };
    match last {
        Last::Activation(activation, argument) if activation.is_gelu() => {
            for row in sums.chunks_exact_mut(WIDTH) {
                row.iter_mut().zip(bias).for_each(|(sum, bias)| *sum += bias);
            }
            if let Some(argument) = argument {
                narrow(sums, &mut argument[place..], &NO_BIAS, false);
            }
            gelu_in_place(sums);
            narrow(sums, y, &NO_BIAS, false);
        }
        Last::Activation(activation, _) => narrow(sums, y, bias, *activation == Activation::Relu),
        Last::GeluSlope(argument) => {
            for (row, sums) in sums.chunks_exact_mut(WIDTH).enumerate() {
                let mut given = NO_BIAS;
                crate::half::SixteenBits::Bf16.widen(&mut given[..width], &argument[place + row * stride..][..width]);
                gelu_gradient_in_place(&mut sums[..width], &given[..width]);
            }
            narrow(sums, y, &NO_BIAS, false);
        }
    }
}

/// Adds the bias to sums, applies ReLU if `relu`, and writes them as bf16.
///
/// # Safety
///
/// The machine has AVX-512 BF16. There are `height` rows of [`WIDTH`] sums, and `height` writable
/// rows of `width` numbers at distance `stride`.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn narrow_tile(
    sums: *const f32,
    target: *mut u16,
    stride: usize,
    [height, width]: [usize; 2],
    bias: &[f32; WIDTH],
    relu: bool,
) {
    let mask = if width < WIDTH { (1_u32 << width) - 1 } else { u32::MAX };
    for row in 0..height {
        // SAFETY: the caller vouches for the rows; masked-out elements are not written.
        unsafe {
            let sums = sums.add(row * WIDTH);
            let mut low = _mm512_add_ps(_mm512_loadu_ps(sums), _mm512_loadu_ps(bias.as_ptr()));
            let mut high = _mm512_add_ps(_mm512_loadu_ps(sums.add(16)), _mm512_loadu_ps(bias.as_ptr().add(16)));
            if relu {
                low = _mm512_max_ps(low, _mm512_setzero_ps());
                high = _mm512_max_ps(high, _mm512_setzero_ps());
            }
            let bits: __m512i = std::mem::transmute(_mm512_cvtne2ps_pbh(high, low));
            _mm512_mask_storeu_epi16(target.add(row * stride).cast(), mask, bits);
        }
    }
}

/// `target[rows, columns] (+)= leftᵀ · right`, with left `[contracted, rows]` and right
/// `[contracted, columns]`, in single precision. Both factors are packed block by block.
pub(super) fn multiply_transposed(
    target: &mut [f32],
    left: &[u16],
    right: &[u16],
    [rows, columns, contracted]: [usize; 3],
    add: bool,
    kernel: &MicroKernel,
    scratch: &mut Scratch,
) {
    let [most_rows, most_columns] = BLOCK;
    let pairs = contracted.div_ceil(2);
    let chunk = pairs.div_ceil(pairs.div_ceil(CHUNK));
    let [packed_left, packed_right] = scratch.pieces([most_rows * chunk, most_columns * chunk]);
    assert!(target.len() >= rows * columns && left.len() >= contracted * rows && right.len() >= contracted * columns);
    for first in (0..pairs).step_by(chunk) {
        let length = chunk.min(pairs - first);
        let depth = (2 * length).min(contracted - 2 * first);
        let (left, right) = (&left[2 * first * rows..], &right[2 * first * columns..]);
        let taps =
            Taps { segments: 1, length, row: Step { within: TILE, between: 0 }, panel: Step { within: WIDTH, between: 0 } };
        for column_block in (0..columns).step_by(most_columns) {
            let block = column_block..(column_block + most_columns).min(columns);
            pack_rows::<WIDTH>(packed_right, right, columns, block.clone(), depth);
            for row_block in (0..rows).step_by(most_rows) {
                let row_end = (row_block + most_rows).min(rows);
                pack_rows::<TILE>(packed_left, left, rows, row_block..row_end, depth);
                for (row, tile) in (row_block..row_end).step_by(TILE).zip(packed_left.chunks_exact(length * TILE)) {
                    let height = TILE.min(row_end - row);
                    for (column, panel) in block.clone().step_by(WIDTH).zip(packed_right.chunks_exact(length * WIDTH)) {
                        let first_target = target[row * columns + column..].as_mut_ptr();
                        let targets: [*mut f32; MOST_ROWS] =
                            std::array::from_fn(|index| first_target.wrapping_add(index * columns));
                        let (rows, width) = (Rows::Neighbours(tile.as_ptr()), WIDTH.min(block.end - column));
                        // SAFETY: tile and panel have one line per pair, and the destinations are
                        // different rows of `target`.
                        unsafe { kernel.tile(&taps, rows, panel.as_ptr(), &targets[..height], width, add || first > 0) };
                    }
                }
            }
        }
    }
}

/// Copies rows of odd length, appending a zero to each.
pub(super) fn pad_rows<'a>(padded: &'a mut [f32], halves: &[u16], length: usize) -> &'a [f32] {
    for (padded, row) in padded.chunks_exact_mut(length.div_ceil(2)).zip(halves.chunks_exact(length)) {
        for (word, pair) in padded.iter_mut().zip(row.chunks(2)) {
            *word = word_of(pair[0], pair.get(1).copied().unwrap_or(0));
        }
    }
    padded
}

#[inline(always)]
pub(super) fn word_of(first: u16, second: u16) -> f32 {
    f32::from_bits(u32::from(first) | u32::from(second) << 16)
}

/// Packs `[columns, pairs]` into panels `[pairs, WIDTH]` of columns, padded with zeros.
pub(super) fn pack_columns(packed: &mut [f32], w: &[f32], columns: usize, pairs: usize) {
    for (index, panel) in packed.chunks_exact_mut(pairs * WIDTH).enumerate().take(columns.div_ceil(WIDTH)) {
        let count = WIDTH.min(columns - index * WIDTH);
        if count < WIDTH {
            panel.fill(0.0);
        }
        transpose::<false>(panel, WIDTH, &w[index * WIDTH * pairs..][..count * pairs], pairs, [count, pairs]);
    }
}

/// Packs the range `columns` of the `contracted` rows of `w` (row stride `stride`) into panels
/// `[pairs, PANEL]` of columns, padded with zeros.
fn pack_rows<const PANEL: usize>(
    packed: &mut [f32],
    w: &[u16],
    stride: usize,
    columns: std::ops::Range<usize>,
    contracted: usize,
) {
    let pairs = contracted.div_ceil(2);
    for pair in 0..pairs {
        let row = |row: usize| if row < contracted { &w[row * stride..][columns.clone()] } else { &[] };
        let packed = &mut packed[pair * PANEL..];
        if PANEL == TILE {
            pack_tile_line(packed, pairs * PANEL, row(2 * pair), row(2 * pair + 1));
        } else {
            pack_panel_line(packed, pairs * PANEL, row(2 * pair), row(2 * pair + 1));
        }
    }
}

#[inline(always)]
fn pack_line<const PANEL: usize>(packed: &mut [f32], stride: usize, first: &[u16], second: &[u16]) {
    for (index, first) in first.chunks(PANEL).enumerate() {
        let target = &mut packed[index * stride..][..PANEL];
        // A missing second row counts as zero.
        match (<&[u16; PANEL]>::try_from(first), second.get(index * PANEL..).and_then(|rest| rest.first_chunk::<PANEL>())) {
            (Ok(first), Some(second)) => {
                for column in 0..PANEL {
                    target[column] = word_of(first[column], second[column]);
                }
            }
            _ => {
                for (column, target) in target.iter_mut().enumerate() {
                    let number = |row: &[u16], at: usize| row.get(at).copied().unwrap_or(0);
                    *target = word_of(number(first, column), number(second, index * PANEL + column));
                }
            }
        }
    }
}

multiversion! {
    fn pack_panel_line(packed: &mut [f32], stride: usize, first: &[u16], second: &[u16]) {
        pack_line::<WIDTH>(packed, stride, first, second);
    }

    fn pack_tile_line(packed: &mut [f32], stride: usize, first: &[u16], second: &[u16]) {
        pack_line::<TILE>(packed, stride, first, second);
    }

    /// Sets `words[i]` to the pair of `first[i]` and `second[i]`.
    pub(super) fn interleave(words: &mut [f32], first: &[u16], second: &[u16]) {
        for ((word, &first), &second) in words.iter_mut().zip(first).zip(second) {
            *word = word_of(first, second);
        }
    }
}
