//! Sizes of a convolution's windows as matrices in scratch memory.

use super::multiply::ROW_ALIGNMENT;
use foretell_models::Window;

/// Alignment in bytes of each tensor in scratch memory: that of an allocation.
pub(super) const SCRATCH_ALIGNMENT: usize = 256;

/// Returns the pixels of an output image.
pub(super) fn output_pixels(window: &Window) -> usize {
    window.out_height() * window.out_width()
}

/// Returns the elements under one window.
pub(super) fn window_elements(window: &Window) -> usize {
    window.size * window.size * window.in_channels
}

/// Returns the elements from one window's row of the column matrix to the next, for elements of
/// `width` bytes. Rows are padded to [`ROW_ALIGNMENT`]; the padding is never read. Pointwise
/// windows need no padding, because the image itself is the matrix.
pub(super) fn column_pitch(window: &Window, width: usize) -> usize {
    let elements = window_elements(window);
    if is_pointwise(window) { elements } else { elements.next_multiple_of(ROW_ALIGNMENT / width) }
}

/// Returns `true` if a window is a single pixel, so that the image itself is the matrix.
pub(super) fn is_pointwise(window: &Window) -> bool {
    window.size == 1 && window.stride == 1 && window.padding == 0
}

/// Consecutive images of a batch.
#[derive(Clone, Copy, Debug)]
pub(super) struct BatchPart {
    pub(super) first: usize,
    pub(super) images: usize,
}

/// Splits the batch, from image `first` on, into parts whose columns of `width`-byte elements fit
/// `max_bytes`.
pub(super) fn batch_parts(
    window: &Window,
    width: usize,
    first: usize,
    max_bytes: usize,
) -> impl Iterator<Item = BatchPart> + use<> {
    let (batch, image_bytes) = (window.batch, output_pixels(window) * column_pitch(window, width) * width);
    let limit = if is_pointwise(window) { batch } else { max_bytes / image_bytes.max(1) }.clamp(1, batch.max(1));
    (first..batch).step_by(limit).map(move |first| BatchPart { first, images: limit.min(batch - first) })
}

/// Returns the sizes that `images.cu` takes, for a part of the batch.
pub(super) fn window_sizes(window: &Window, part: BatchPart) -> [usize; 10] {
    let Window { height, width, in_channels, size, stride, padding, .. } = *window;
    let (out_height, out_width) = (window.out_height(), window.out_width());
    [part.images, height, width, in_channels, out_height, out_width, size, stride, padding, part.first]
}
