//! bf16 convolutions with channels last. A pixel of `2n` channels is a pixel of `n` words
//! ([`dot`](super::dot)), so the direct convolution of single precision runs on words. An odd
//! number of channels, as in a network's first convolution, is padded with a channel of zeros.

use foretell_models::Window;

use super::dot::{CHUNK, halves_of, halves_of_mut, interleave, multiply_transposed, pack_columns, pad_rows, word_of, words};
use crate::cpu::convolution::gather_patches;
use crate::cpu::direct::{Band, Target, band_source, has_weight_gradient, packed_elements, run_band};
use crate::cpu::memory::Scratch;
use crate::cpu::micro_kernel::{MOST_ROWS, MicroKernel, Rows, Step, Taps};
use crate::cpu::transpose::transpose;
use crate::half::SixteenBits;

/// Positions whose patches are gathered together for a weight gradient.
const POSITIONS: usize = 512;

/// `y = x * w`. Returns `false`, and writes nothing, if the convolution is not supported.
pub(super) fn forward(y: &mut [u16], x: &[u16], w: &[u16], window: &Window, kernel: &MicroKernel, scratch: &mut Scratch) -> bool {
    if window.weight_elements() == 0 || y.is_empty() {
        return false;
    }
    let pairs = in_pairs(window);
    let band = Band::of(&pairs);
    let [packed, padded, sums, even_x, even_w] = scratch.pieces([
        packed_elements(&pairs, kernel),
        band.copied_elements(&pairs),
        band.output_elements(&pairs),
        even_elements(window, pairs.input_elements()),
        even_elements(window, pairs.weight_elements()),
    ]);
    let x = with_even_channels(even_x, x, window);
    let w = with_even_channels(even_w, w, window);
    pack_columns(packed, w, window.out_channels, window.size * window.size * pairs.in_channels);
    correlate(y, x, packed, &pairs, &band, padded, sums, kernel);
    true
}

/// The same window over words.
fn in_pairs(window: &Window) -> Window {
    Window { in_channels: window.in_channels.div_ceil(2), ..*window }
}

/// Length of the copy that [`with_even_channels`] makes, in words; 0 if it makes none.
fn even_elements(window: &Window, words: usize) -> usize {
    if window.in_channels.is_multiple_of(2) { 0 } else { words }
}

/// Returns pixels of input channels as words; copies them if a channel of zeros is needed.
fn with_even_channels<'a>(copy: &'a mut [f32], pixels: &'a [u16], window: &Window) -> &'a [f32] {
    if window.in_channels.is_multiple_of(2) { words(pixels) } else { pad_rows(copy, pixels, window.in_channels) }
}

/// Input gradient of a convolution of stride 1: the convolution of dy with the weights rotated by
/// 180 degrees.
pub(super) fn input_gradient(
    dx: &mut [u16],
    dy: &[u16],
    w: &[u16],
    window: &Window,
    kernel: &MicroKernel,
    scratch: &mut Scratch,
) -> bool {
    let is_turned_convolution = window.stride == 1 && window.padding < window.size && window.out_channels.is_multiple_of(2);
    // With few channels most of a panel would be padding.
    if !is_turned_convolution || 2 * window.in_channels < kernel.panel_width || window.weight_elements() == 0 || dy.is_empty() {
        return false;
    }
    let turned = Window {
        batch: window.batch,
        height: window.out_height(),
        width: window.out_width(),
        in_channels: window.out_channels / 2,
        out_channels: window.in_channels,
        size: window.size,
        stride: 1,
        padding: window.size - 1 - window.padding,
    };
    let band = Band::of(&turned);
    let [packed, padded, sums] =
        scratch.pieces([packed_elements(&turned, kernel), band.copied_elements(&turned), band.output_elements(&turned)]);
    pack_turned(packed, w, window, kernel.panel_width);
    correlate(dx, words(dy), packed, &turned, &band, padded, sums, kernel);
    true
}

/// `dw (+)= x ⋆ dy`, directly or as a product with gathered patches, `[out, patch] = dyᵀ ·
/// patches`.
pub(super) fn weight_gradient(
    dw: &mut [f32],
    dy: &[u16],
    x: &[u16],
    add: bool,
    window: &Window,
    kernel: &MicroKernel,
    [scratch, packing]: [&mut Scratch; 2],
) -> bool {
    if window.weight_elements() == 0 || dy.is_empty() {
        return false;
    }
    if has_weight_gradient(window, kernel) {
        weight_gradient_of_pairs(dw, dy, x, add, window, kernel, scratch);
        return true;
    }
    let pairs = in_pairs(window);
    let (taps, out) = (window.size * window.size, window.out_channels);
    // Includes the channel of zeros, if any.
    let patch = taps * 2 * pairs.in_channels;
    let positions = window.batch * window.out_height() * window.out_width();
    let [patches, even_x, even_dw] = scratch.pieces([
        POSITIONS.min(positions) * patch / 2,
        even_elements(window, pairs.input_elements()),
        even_elements(window, out * patch),
    ]);
    let x = with_even_channels(even_x, x, window);
    let is_even = window.in_channels.is_multiple_of(2);
    for first in (0..positions).step_by(POSITIONS) {
        let count = POSITIONS.min(positions - first);
        let patches = &mut patches[..count * patch / 2];
        gather_patches(patches, x, first, &pairs);
        let dy = &dy[first * out..][..count * out];
        let target = if is_even { &mut *dw } else { &mut *even_dw };
        multiply_transposed(target, dy, halves_of(patches), [out, patch, count], first > 0 || (is_even && add), kernel, packing);
    }
    if !is_even {
        for (dw, sums) in dw.chunks_exact_mut(window.in_channels).zip(even_dw.chunks_exact(2 * pairs.in_channels)) {
            dw.iter_mut().zip(sums).for_each(|(dw, &sum)| *dw = if add { *dw + sum } else { sum });
        }
    }
    true
}

/// As the direct weight gradient of single precision ([`direct`](crate::cpu::direct)), but each sum
/// runs over pairs of positions. A pair's positions are neighbours in an output row. Their pixels
/// lie one stride apart in x, so each line is copied with the two pixels of a pair side by side.
fn weight_gradient_of_pairs(
    dw: &mut [f32],
    dy: &[u16],
    x: &[u16],
    add: bool,
    window: &Window,
    kernel: &MicroKernel,
    scratch: &mut Scratch,
) {
    let Window { in_channels, out_channels, size, stride, padding, .. } = *window;
    let (out_height, out_width) = (window.out_height(), window.out_width());
    let (taps, pairs) = (size * size * in_channels, out_width.div_ceil(2));
    // A line with its border, and one more stride of zeros: the second pixels of the last pairs.
    let line = (window.width + 2 * padding) * in_channels;
    let bordered = line + stride * in_channels;
    let most_rows = (CHUNK / pairs).clamp(1, out_height);
    let most_lines = (most_rows - 1) * stride + size;
    let [turned, paired_x, paired_dy, line_copy] =
        scratch.pieces([taps * out_channels, most_lines * line, most_rows * pairs * out_channels, bordered.div_ceil(2)]);
    let line_copy = &mut halves_of_mut(line_copy)[..bordered];
    line_copy.fill(0);
    let mut first_band = true;
    for image in 0..window.batch {
        for first_row in (0..out_height).step_by(most_rows) {
            let rows = most_rows.min(out_height - first_row);
            for (index, paired) in paired_x.chunks_exact_mut(line).take((rows - 1) * stride + size).enumerate() {
                match (first_row * stride + index).checked_sub(padding).filter(|&row| row < window.height) {
                    None => paired.fill(0.0),
                    Some(row) => {
                        let length = window.width * in_channels;
                        let pixels = &x[(image * window.height + row) * length..][..length];
                        line_copy[padding * in_channels..][..length].copy_from_slice(pixels);
                        interleave(paired, line_copy, &line_copy[stride * in_channels..]);
                    }
                }
            }
            let position = (image * out_height + first_row) * out_width;
            for (row, paired) in paired_dy.chunks_exact_mut(pairs * out_channels).take(rows).enumerate() {
                let dy = &dy[(position + row * out_width) * out_channels..][..out_width * out_channels];
                for (paired, dy) in paired.chunks_exact_mut(out_channels).zip(dy.chunks(2 * out_channels)) {
                    match dy.split_at(out_channels) {
                        (first, []) => paired.iter_mut().zip(first).for_each(|(word, &half)| *word = word_of(half, 0)),
                        (first, second) => interleave(paired, first, second),
                    }
                }
            }
            let sums = Taps {
                segments: rows,
                length: pairs,
                row: Step { within: 2 * stride * in_channels, between: stride * line },
                panel: Step { within: out_channels, between: pairs * out_channels },
            };
            for column in (0..out_channels).step_by(kernel.panel_width) {
                let panel = paired_dy[column..].as_ptr();
                let window_line = size * in_channels;
                for row in 0..size {
                    for first in (0..window_line).step_by(kernel.most_rows()) {
                        let count = kernel.most_rows().min(window_line - first);
                        let targets: [*mut f32; MOST_ROWS] = std::array::from_fn(|index| {
                            turned.as_mut_ptr().wrapping_add((row * window_line + first + index) * out_channels + column)
                        });
                        let left = Rows::Neighbours(paired_x.as_ptr().wrapping_add(row * line + first));
                        // SAFETY: from each tap on, the lines hold the pairs of all positions of
                        // these rows; dy has a whole panel at each pair, since the panel's width
                        // divides the channels; the targets are different lines of the scratch
                        // memory.
                        unsafe { kernel.tile(&sums, left, panel, &targets[..count], kernel.panel_width, !first_band) };
                    }
                }
            }
            first_band = false;
        }
    }
    if add {
        transpose::<true>(dw, taps, turned, out_channels, [taps, out_channels]);
    } else {
        transpose::<false>(dw, taps, turned, out_channels, [taps, out_channels]);
    }
}

/// Convolves words with packed weights. Sums of a band stay in single precision until they are
/// complete.
#[allow(clippy::too_many_arguments)]
fn correlate(
    y: &mut [u16],
    x: &[f32],
    packed: &[f32],
    window: &Window,
    band: &Band,
    padded: &mut [f32],
    sums: &mut [f32],
    kernel: &MicroKernel,
) {
    let (out_height, out_width) = (window.out_height(), window.out_width());
    for first_image in (0..window.batch).step_by(band.images.max(1)) {
        let images = band.images.min(window.batch - first_image);
        for first_row in (0..out_height).step_by(band.out_rows) {
            let out_rows = band.out_rows.min(out_height - first_row);
            let source = band_source(x, first_image, images, first_row, out_rows, padded, window);
            let sums = &mut sums[..images * out_rows * out_width * window.out_channels];
            let target = Target { pointer: sums.as_mut_ptr(), images, out_rows };
            // SAFETY: the source holds every pixel that the windows of these images' rows cover,
            // and `sums` has one element for each output.
            unsafe { run_band(source, packed, target, window, kernel) };
            let start = (first_image * out_height + first_row) * out_width * window.out_channels;
            SixteenBits::Bf16.narrow(&mut y[start..][..sums.len()], sums);
        }
    }
}

/// Packs weights `[out, size, size, in]` for the input gradient: the window is rotated by 180
/// degrees, and panels `[size, size, out / 2, width]` hold inputs.
fn pack_turned(packed: &mut [f32], w: &[u16], window: &Window, width: usize) {
    let Window { in_channels, out_channels, size, .. } = *window;
    let taps = size * size;
    for (index, panel) in packed.chunks_exact_mut(taps * out_channels / 2 * width).enumerate() {
        let first = index * width;
        let count = width.min(in_channels - first);
        for (k, target) in panel.chunks_exact_mut(width).enumerate() {
            let (tap, out) = (k / (out_channels / 2), 2 * (k % (out_channels / 2)));
            let row = |out: usize| &w[(out * taps + taps - 1 - tap) * in_channels + first..][..count];
            interleave(&mut target[..count], row(out), row(out + 1));
            target[count..].fill(0.0);
        }
    }
}
