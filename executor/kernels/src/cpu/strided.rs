//! Direct input gradient of a strided convolution. The input's rows fall into `stride` phases by
//! their offset from the starts of windows, and so do its columns. The same taps reach all pixels
//! of a phase. So each phase is a convolution of stride 1 of dy with these taps, written to every
//! `stride`-th pixel.

use foretell_models::Window;

use super::direct::{BAND_ELEMENTS, LEAST_BAND, Positions, Reach, Source, evenly, run_positions};
use super::memory::Scratch;
use super::micro_kernel::MicroKernel;

/// A phase: rows (or columns) with the same offset from the starts of windows, and the taps that
/// reach them.
#[derive(Clone, Copy, Debug)]
struct Phase {
    /// First tap; further taps follow at distance `stride`.
    first_tap: usize,
    taps: usize,
    /// First pixel of the phase, along its axis.
    first_pixel: usize,
    /// Index of the dy element, along the axis, that `first_tap` reads for the first pixel.
    first_output: usize,
    pixels: usize,
}

impl Phase {
    /// The phase of the rows `r` of dx with `(r + padding) % stride == index`.
    fn new(index: usize, extent: usize, window: &Window) -> Self {
        let Window { size, stride, padding, .. } = *window;
        let taps = size.saturating_sub(index).div_ceil(stride);
        let first_output = padding.saturating_sub(index).div_ceil(stride);
        let last = (extent + padding).checked_sub(index + 1).map(|last| last / stride);
        let pixels = last.map_or(0, |last| (last + 1).saturating_sub(first_output));
        let first_pixel = (first_output * stride + index).saturating_sub(padding);
        Phase { first_tap: index, taps, first_pixel, first_output, pixels }
    }

    /// Rows (or columns) of zeros that the phase reads before dy.
    fn margin(&self) -> usize {
        self.taps.saturating_sub(1 + self.first_output)
    }

    /// Whether any tap reaches a pixel of the phase.
    fn is_nonempty(&self) -> bool {
        self.taps > 0 && self.pixels > 0
    }
}

/// dy with the margin of zeros that the phases read.
struct PaddedGradient {
    margin: usize,
    height: usize,
    width: usize,
}

impl PaddedGradient {
    fn new(rows: &[Phase], columns: &[Phase], window: &Window) -> Self {
        let margin = rows.iter().chain(columns).filter(|phase| phase.is_nonempty()).map(Phase::margin).max().unwrap_or(0);
        let extent = |phases: &[Phase], outputs: usize| {
            let met = phases.iter().filter(|phase| phase.is_nonempty()).map(|phase| phase.first_output + phase.pixels);
            margin + met.max().unwrap_or(0).max(outputs)
        };
        PaddedGradient { margin, height: extent(rows, window.out_height()), width: extent(columns, window.out_width()) }
    }

    fn is_needed(&self, window: &Window) -> bool {
        (self.height, self.width) != (window.out_height(), window.out_width())
    }

    /// Copies images of dy into the padded buffer.
    fn copy(&self, copied: &mut [f32], dy: &[f32], window: &Window) {
        let length = window.out_width() * window.out_channels;
        let (line, before) = (self.width * window.out_channels, self.margin * window.out_channels);
        let images = copied.chunks_exact_mut(self.height * line).zip(dy.chunks_exact(window.out_height() * length));
        for (copied, dy) in images {
            let mut lines = dy.chunks_exact(length);
            for (row, copied) in copied.chunks_exact_mut(line).enumerate() {
                let source = if row < self.margin { None } else { lines.next() };
                match source {
                    None => copied.fill(0.0),
                    Some(source) => {
                        copied[..before].fill(0.0);
                        copied[before..before + length].copy_from_slice(source);
                        copied[before + length..].fill(0.0);
                    }
                }
            }
        }
    }
}

/// Computes `dx` from `dy` and w `[out, size, size, in]`.
pub(super) fn input_gradient(
    dy: &[f32],
    w: &[f32],
    dx: &mut [f32],
    window: &Window,
    kernel: &MicroKernel,
    scratch: &mut Scratch,
) {
    let Window { batch, height, width, in_channels, out_channels, stride, .. } = *window;
    if window.weight_elements() == 0 {
        dx.fill(0.0);
        return;
    }
    let rows: Vec<Phase> = (0..stride).map(|index| Phase::new(index, height, window)).collect();
    let columns: Vec<Phase> = (0..stride).map(|index| Phase::new(index, width, window)).collect();
    let padded = PaddedGradient::new(&rows, &columns, window);
    let dy_image = window.out_height() * window.out_width() * out_channels;
    let (line, image) = (padded.width * out_channels, padded.height * padded.width * out_channels);
    let dx_image = height * width * in_channels;
    let positions = (height * width).div_ceil(stride * stride);
    let most = (BAND_ELEMENTS / (image + dx_image).max(1)).max(LEAST_BAND / positions.max(1));
    let band = evenly(batch, most);
    let panel = in_channels.next_multiple_of(kernel.panel_width);
    let packed_elements = window.size * window.size * out_channels * panel;
    let copied_elements = if padded.is_needed(window) { band * image } else { 0 };
    let [packed, copied] = scratch.pieces([packed_elements, copied_elements]);
    let phase_pairs = || rows.iter().flat_map(|row| columns.iter().map(move |column| (row, column)));
    let mut rest = &mut *packed;
    for (row, column) in phase_pairs() {
        let (phase, after) = rest.split_at_mut(row.taps * column.taps * out_channels * panel);
        pack(phase, w, [row, column], window, kernel.panel_width);
        rest = after;
    }
    if phase_pairs().any(|(row, column)| row.pixels * column.pixels > 0 && row.taps * column.taps == 0) {
        dx.fill(0.0);
    }
    for first in (0..batch).step_by(band) {
        let images = band.min(batch - first);
        let dy = &dy[first * dy_image..][..images * dy_image];
        let dx = &mut dx[first * dx_image..][..images * dx_image];
        let source = if padded.is_needed(window) {
            padded.copy(&mut copied[..images * image], dy, window);
            copied.as_ptr()
        } else {
            dy.as_ptr()
        };
        let mut rest = &*packed;
        for (row, column) in phase_pairs() {
            let (phase, after) = rest.split_at(row.taps * column.taps * out_channels * panel);
            rest = after;
            if !row.is_nonempty() || !column.is_nonempty() {
                continue;
            }
            let start = |phase: &Phase| padded.margin + phase.first_output + 1 - phase.taps;
            let reach = Reach { rows: row.taps, line: column.taps * out_channels, row_step: line, column_step: out_channels };
            // SAFETY: the margin before dy is as wide as any phase needs, and the source reaches to
            // the last row that any phase reads. All pixels of a phase lie in the image.
            unsafe {
                let pointer = source.add(start(row) * line + start(column) * out_channels);
                let pixels = Positions {
                    pointer: dx.as_mut_ptr().add((row.first_pixel * width + column.first_pixel) * in_channels),
                    images,
                    rows: row.pixels,
                    columns: column.pixels,
                    channels: in_channels,
                    image_step: dx_image,
                    row_step: stride * width * in_channels,
                    column_step: stride * in_channels,
                };
                run_positions(Source { pointer, line, image }, phase, pixels, &reach, kernel);
            }
        }
    }
}

/// Packs a phase's taps, rotated by 180 degrees, into panels `[tap rows, tap columns, out, width]`
/// of `width` input channels each.
fn pack(packed: &mut [f32], w: &[f32], [row, column]: [&Phase; 2], window: &Window, width: usize) {
    let Window { in_channels, out_channels, size, stride, .. } = *window;
    let lines = row.taps * column.taps * out_channels;
    if lines == 0 {
        return;
    }
    for (index, panel) in packed.chunks_exact_mut(lines * width).enumerate() {
        let first = index * width;
        let count = width.min(in_channels - first);
        for (k, target) in panel.chunks_exact_mut(width).enumerate() {
            let (tap, out) = (k / out_channels, k % out_channels);
            let tap_row = row.first_tap + stride * (row.taps - 1 - tap / column.taps);
            let tap_column = column.first_tap + stride * (column.taps - 1 - tap % column.taps);
            let source = ((out * size + tap_row) * size + tap_column) * in_channels + first;
            target[..count].copy_from_slice(&w[source..][..count]);
            target[count..].fill(0.0);
        }
    }
}
