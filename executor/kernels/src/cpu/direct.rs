//! Direct convolution with channels last. Rows of windows are read in place from the image, instead
//! of being gathered into patches of nine times its size. An image with padding is first copied
//! once with its border of zeros.

use foretell_models::Window;

use super::memory::Scratch;
use super::micro_kernel::{MOST_ROWS, MicroKernel, Rows, Step, Taps};
use super::transpose::transpose;

/// Terms of the sum in one call of the micro-kernel: a window of 3 x 3 pixels and 64 channels. Its
/// panel of weights, 72 KiB, comes from the L2 cache, which is fast enough. A smaller panel in the
/// L1 cache would read and write the output more often.
const CHUNK: usize = 576;

/// Elements of a band's input and output: 640 KiB, which stay in the L2 cache while all panels pass
/// over them.
pub(super) const BAND_ELEMENTS: usize = 160 << 10;

/// Least number of output positions per band. With fewer, reading the panels would dominate.
pub(super) const LEAST_BAND: usize = 112;

/// Elements of weights packed for `window`.
pub(super) fn packed_elements(window: &Window, kernel: &MicroKernel) -> usize {
    window.size * window.size * window.in_channels * window.out_channels.next_multiple_of(kernel.panel_width)
}

/// `y = x * w`, with w `[out, size, size, in]`.
pub(super) fn correlate(x: &[f32], w: &[f32], y: &mut [f32], window: &Window, kernel: &MicroKernel, scratch: &mut Scratch) {
    let band = Band::of(window);
    let [packed, padded] = scratch.pieces([packed_elements(window, kernel), band.copied_elements(window)]);
    pack_transposed(packed, w, window.out_channels, kernel.panel_width);
    run(x, packed, y, window, &band, padded, kernel);
}

/// Input gradient of a convolution of stride 1 whose padding is smaller than its window: the
/// convolution of dy with the weights rotated by 180 degrees.
pub(super) fn input_gradient(
    dy: &[f32],
    w: &[f32],
    dx: &mut [f32],
    window: &Window,
    kernel: &MicroKernel,
    scratch: &mut Scratch,
) {
    let turned = Window {
        batch: window.batch,
        height: window.out_height(),
        width: window.out_width(),
        in_channels: window.out_channels,
        out_channels: window.in_channels,
        size: window.size,
        stride: 1,
        padding: window.size - 1 - window.padding,
    };
    let band = Band::of(&turned);
    let [packed, padded] = scratch.pieces([packed_elements(&turned, kernel), band.copied_elements(&turned)]);
    pack_turned(packed, w, window, kernel.panel_width);
    run(dy, packed, dx, &turned, &band, padded, kernel);
}

/// Whether [`weight_gradient`] supports the window and is faster than a product with gathered
/// patches. Its sums run over one image at a time, so on small images they are too short.
pub(super) fn has_weight_gradient(window: &Window, kernel: &MicroKernel) -> bool {
    let positions = window.out_height() * window.out_width();
    window.out_channels.is_multiple_of(kernel.panel_width) && window.weight_elements() > 0 && positions >= LEAST_POSITIONS
}

/// Least number of positions per image for which [`weight_gradient`] beats a product with gathered
/// patches.
const LEAST_POSITIONS: usize = 128;

/// `dw (+)= x ⋆ dy`. A tile's rows are taps, its columns output channels. Its sums run over the
/// positions of a band of output rows, whose dy stays in the L1 cache meanwhile.
pub(super) fn weight_gradient(
    dy: &[f32],
    x: &[f32],
    dw: &mut [f32],
    add: bool,
    window: &Window,
    kernel: &MicroKernel,
    scratch: &mut Scratch,
) {
    let Window { in_channels, out_channels, size, stride, .. } = *window;
    let (out_height, out_width) = (window.out_height(), window.out_width());
    let taps = size * size * in_channels;
    let band = Band { images: 1, out_rows: (CHUNK / out_width).clamp(1, out_height) };
    let [turned, padded] = scratch.pieces([taps * out_channels, band.copied_elements(window)]);
    let mut first_band = true;
    for image in 0..window.batch {
        for first_row in (0..out_height).step_by(band.out_rows) {
            let out_rows = band.out_rows.min(out_height - first_row);
            let source = band_source(x, image, 1, first_row, out_rows, padded, window);
            let position = (image * out_height + first_row) * out_width;
            let sums = Taps {
                segments: out_rows,
                length: out_width,
                row: Step { within: stride * in_channels, between: stride * source.line },
                panel: Step { within: out_channels, between: out_width * out_channels },
            };
            for column in (0..out_channels).step_by(kernel.panel_width) {
                let panel = dy[position * out_channels + column..].as_ptr();
                let line = size * in_channels;
                for (row, first) in (0..size).flat_map(|row| (0..line).step_by(kernel.most_rows()).map(move |first| (row, first)))
                {
                    let count = kernel.most_rows().min(line - first);
                    let destinations: [*mut f32; MOST_ROWS] = std::array::from_fn(|index| {
                        turned.as_mut_ptr().wrapping_add((row * line + first + index) * out_channels + column)
                    });
                    let rows = Rows::Neighbours(source.pointer.wrapping_add(row * source.line + first));
                    // SAFETY: from each tap on, the source holds all positions of these lines; dy
                    // has a whole panel at each position, since the panel's width divides the
                    // channels; the destinations are different lines of the scratch memory.
                    unsafe { kernel.tile(&sums, rows, panel, &destinations[..count], kernel.panel_width, !first_band) };
                }
            }
            first_band = false;
        }
    }
    if first_band {
        turned.fill(0.0);
    }
    let extents = [taps, out_channels];
    if add {
        transpose::<true>(dw, taps, turned, out_channels, extents);
    } else {
        transpose::<false>(dw, taps, turned, out_channels, extents);
    }
}

/// A band: the part of the work whose input stays in the cache. It is several whole images, or
/// several output rows of one.
#[derive(Clone, Copy, Debug)]
pub(super) struct Band {
    pub(super) images: usize,
    pub(super) out_rows: usize,
}

impl Band {
    pub(super) fn of(window: &Window) -> Self {
        let (out_height, out_width) = (window.out_height(), window.out_width());
        let line = (window.width + 2 * window.padding) * window.in_channels;
        let out_line = out_width * window.out_channels;
        let image = Band::lines(out_height, window) * line + out_height * out_line;
        if image <= BAND_ELEMENTS {
            let most = (BAND_ELEMENTS / image.max(1)).max(LEAST_BAND / (out_height * out_width));
            return Band { images: evenly(window.batch, most), out_rows: out_height };
        }
        let most = BAND_ELEMENTS.saturating_sub(window.size * line) / (window.stride * line + out_line);
        Band { images: 1, out_rows: evenly(out_height, most.max(LEAST_BAND.div_ceil(out_width))) }
    }

    /// Rows of the bordered image that `out_rows` output rows read.
    fn lines(out_rows: usize, window: &Window) -> usize {
        (out_rows - 1) * window.stride + window.size
    }

    /// Elements of the band's output.
    pub(super) fn output_elements(&self, window: &Window) -> usize {
        self.images.min(window.batch) * self.out_rows * window.out_width() * window.out_channels
    }

    /// Elements of the bordered copy; 0 if none is made.
    pub(super) fn copied_elements(&self, window: &Window) -> usize {
        if window.padding == 0 {
            return 0;
        }
        self.images * Band::lines(self.out_rows, window) * (window.width + 2 * window.padding) * window.in_channels
    }
}

/// Size of equal parts of `total`, at most `most` each.
pub(super) fn evenly(total: usize, most: usize) -> usize {
    total.div_ceil(total.div_ceil(most.max(1)).max(1)).max(1)
}

/// Images that the micro-kernel reads: first element, and strides of rows and images in elements.
#[derive(Clone, Copy)]
pub(super) struct Source {
    pub(super) pointer: *const f32,
    pub(super) line: usize,
    pub(super) image: usize,
}

/// Destination of a band's output, and the band's extents.
#[derive(Clone, Copy)]
pub(super) struct Target {
    pub(super) pointer: *mut f32,
    pub(super) images: usize,
    pub(super) out_rows: usize,
}

/// Output positions of a band: their extents, and the distance in elements from one image, row and
/// column to the next.
#[derive(Clone, Copy)]
pub(super) struct Positions {
    pub(super) pointer: *mut f32,
    pub(super) images: usize,
    pub(super) rows: usize,
    pub(super) columns: usize,
    pub(super) channels: usize,
    pub(super) image_step: usize,
    pub(super) row_step: usize,
    pub(super) column_step: usize,
}

/// The source elements that one output position reads: `rows` contiguous rows of `line` floats. The
/// steps are the distances in the source between neighbouring output rows and columns.
#[derive(Clone, Copy)]
pub(super) struct Reach {
    pub(super) rows: usize,
    pub(super) line: usize,
    pub(super) row_step: usize,
    pub(super) column_step: usize,
}

#[allow(clippy::too_many_arguments)]
fn run(x: &[f32], packed: &[f32], y: &mut [f32], window: &Window, band: &Band, padded: &mut [f32], kernel: &MicroKernel) {
    let (out_height, out_width) = (window.out_height(), window.out_width());
    if window.weight_elements() == 0 {
        y.fill(0.0);
        return;
    }
    for first_image in (0..window.batch).step_by(band.images.max(1)) {
        let images = band.images.min(window.batch - first_image);
        for first_row in (0..out_height).step_by(band.out_rows) {
            let out_rows = band.out_rows.min(out_height - first_row);
            let source = band_source(x, first_image, images, first_row, out_rows, padded, window);
            let start = (first_image * out_height + first_row) * out_width * window.out_channels;
            let y = &mut y[start..][..images * out_rows * out_width * window.out_channels];
            let target = Target { pointer: y.as_mut_ptr(), images, out_rows };
            // SAFETY: the source holds every pixel that the windows of these images' rows cover,
            // and the target is exactly the part of y computed from them.
            unsafe { run_band(source, packed, target, window, kernel) };
        }
    }
}

/// Returns a band's images with their border: in place without padding, otherwise copied into
/// `padded`.
pub(super) fn band_source(
    x: &[f32],
    first_image: usize,
    images: usize,
    first_row: usize,
    out_rows: usize,
    padded: &mut [f32],
    window: &Window,
) -> Source {
    let first_line = first_row * window.stride;
    if window.padding == 0 {
        let line = window.width * window.in_channels;
        let start = (first_image * window.height + first_line) * line;
        return Source { pointer: x[start..].as_ptr(), line, image: window.height * line };
    }
    let line = (window.width + 2 * window.padding) * window.in_channels;
    let lines = Band::lines(out_rows, window);
    for (image, padded) in (first_image..).zip(padded.chunks_exact_mut(lines * line).take(images)) {
        pad(padded, &x[image * window.height * window.width * window.in_channels..], first_line, window);
    }
    Source { pointer: padded.as_ptr(), line, image: lines * line }
}

/// # Safety
///
/// The source holds the windows of the target's positions. The target's elements are valid, and no
/// other thread uses them.
pub(super) unsafe fn run_band(source: Source, packed: &[f32], target: Target, window: &Window, kernel: &MicroKernel) {
    let line = window.out_width() * window.out_channels;
    let positions = Positions {
        pointer: target.pointer,
        images: target.images,
        rows: target.out_rows,
        columns: window.out_width(),
        channels: window.out_channels,
        image_step: target.out_rows * line,
        row_step: line,
        column_step: window.out_channels,
    };
    let reach = Reach {
        rows: window.size,
        line: window.size * window.in_channels,
        row_step: window.stride * source.line,
        column_step: window.stride * window.in_channels,
    };
    // SAFETY: as this function's own contract.
    unsafe { run_positions(source, packed, positions, &reach, kernel) }
}

/// # Safety
///
/// The source holds all elements that the positions read. The positions' elements are valid, and no
/// other thread uses them. `packed` has one panel for each `panel_width` channels, with as many
/// lines as a position reads elements.
pub(super) unsafe fn run_positions(source: Source, packed: &[f32], positions: Positions, reach: &Reach, kernel: &MicroKernel) {
    let line = reach.line;
    let contracted = reach.rows * line;
    // A chunk is several rows of the window, or part of a row that is longer than a chunk.
    let rows = (CHUNK / line).clamp(1, reach.rows);
    let length = evenly(line, CHUNK);
    for first_row in (0..reach.rows).step_by(rows) {
        for start in (0..line).step_by(length) {
            let taps = Taps {
                segments: rows.min(reach.rows - first_row),
                length: length.min(line - start),
                row: Step { within: 1, between: source.line },
                panel: Step { within: kernel.panel_width, between: line * kernel.panel_width },
            };
            let first = first_row * line + start;
            for (index, panel) in packed.chunks_exact(contracted * kernel.panel_width).enumerate() {
                let column = index * kernel.panel_width;
                // SAFETY: the offsets stay within the elements that a position reads and within the
                // channels.
                unsafe {
                    let source = Source { pointer: source.pointer.add(first_row * source.line + start), ..source };
                    let channels = kernel.panel_width.min(positions.channels - column);
                    let positions = Positions { pointer: positions.pointer.add(column), channels, ..positions };
                    let panel = panel[first * kernel.panel_width..].as_ptr();
                    run_panel(source, &taps, panel, positions, first > 0, reach, kernel);
                }
            }
        }
    }
}

/// Runs one panel over all positions.
///
/// # Safety
///
/// As [`run_positions`], with the pointers moved to the first tap and the first channel.
unsafe fn run_panel(
    source: Source,
    taps: &Taps,
    panel: *const f32,
    target: Positions,
    add: bool,
    reach: &Reach,
    kernel: &MicroKernel,
) {
    let mut rows = [std::ptr::null(); MOST_ROWS];
    let mut destinations = [std::ptr::null_mut(); MOST_ROWS];
    let (mut count, mut position) = (0, 0);
    let positions = target.images * target.rows * target.columns;
    for image in 0..target.images {
        for row in 0..target.rows {
            let line = image * source.image + row * reach.row_step;
            let out_line = image * target.image_step + row * target.row_step;
            for column in 0..target.columns {
                // SAFETY: the position is one of these.
                unsafe {
                    rows[count] = source.pointer.add(line + column * reach.column_step);
                    destinations[count] = target.pointer.add(out_line + column * target.column_step);
                }
                count += 1;
                position += 1;
                if count == kernel.most_rows() || position == positions {
                    // SAFETY: the positions' windows lie in the source, and their destinations are
                    // all different.
                    unsafe {
                        kernel.tile(taps, Rows::Anywhere(&rows[..count]), panel, &destinations[..count], target.channels, add);
                    }
                    count = 0;
                }
            }
        }
    }
}

/// Copies rows of an image with its border, starting at row `first_line` of the bordered image.
fn pad(padded: &mut [f32], image: &[f32], first_line: usize, window: &Window) {
    let border = window.padding * window.in_channels;
    let length = window.width * window.in_channels;
    for (line, padded) in padded.chunks_exact_mut(length + 2 * border).enumerate() {
        match (first_line + line).checked_sub(window.padding).filter(|&row| row < window.height) {
            None => padded.fill(0.0),
            Some(row) => {
                padded[..border].fill(0.0);
                padded[border..border + length].copy_from_slice(&image[row * length..][..length]);
                padded[border + length..].fill(0.0);
            }
        }
    }
}

/// Packs weights `[out, contracted]` into panels `[contracted, width]` of outputs, padded with
/// zeros.
fn pack_transposed(packed: &mut [f32], w: &[f32], out: usize, width: usize) {
    let contracted = w.len() / out.max(1);
    if contracted == 0 {
        return;
    }
    for (panel, w) in packed.chunks_exact_mut(contracted * width).zip(w.chunks(contracted * width)) {
        if w.len() < panel.len() {
            panel.fill(0.0);
        }
        transpose::<false>(panel, width, w, contracted, [w.len() / contracted, contracted]);
    }
}

/// Packs weights `[out, size, size, in]` for the input gradient: the window is rotated by 180
/// degrees, and panels `[size, size, out, width]` hold inputs.
fn pack_turned(packed: &mut [f32], w: &[f32], window: &Window, width: usize) {
    let Window { in_channels, out_channels, size, .. } = *window;
    let taps = size * size;
    if taps * out_channels == 0 {
        return;
    }
    for (index, panel) in packed.chunks_exact_mut(taps * out_channels * width).enumerate() {
        let first = index * width;
        let count = width.min(in_channels - first);
        for (k, target) in panel.chunks_exact_mut(width).enumerate() {
            let (tap, out) = (k / out_channels, k % out_channels);
            let source = (out * taps + taps - 1 - tap) * in_channels + first;
            target[..count].copy_from_slice(&w[source..][..count]);
            target[count..].fill(0.0);
        }
    }
}
