//! Convolutions with channels last: direct if the micro-kernel supports them, otherwise as matrix
//! products over tiles of patches (im2col). A patch's rows are contiguous in a channels-last image,
//! so a tile is filled by copies of `size * channels` floats.

use foretell_models::Window;

use super::direct;
use super::memory::{Scratch, floats, floats_mut};
use super::micro_kernel::MicroKernel;
use super::product::{multiply, multiply_with};
use super::strided;
use super::vector::multiversion;
use super::view::{Destination, View, ViewMut};
use crate::KernelCall;

/// Elements per tile of patches: 512 KiB, a quarter to half of a server core's L2 cache.
const TILE_ELEMENTS: usize = 1 << 17;

/// Elements of a patch: the length of a convolution's sums.
fn patch(window: &Window) -> usize {
    window.size * window.size * window.in_channels
}

/// Number of output positions of all images.
fn positions(window: &Window) -> usize {
    window.batch * window.out_height() * window.out_width()
}

/// Positions per tile, for tiles of nearly equal size.
fn tile(window: &Window) -> usize {
    let most = (TILE_ELEMENTS / patch(window).max(1)).max(64);
    let positions = positions(window);
    positions.div_ceil(positions.div_ceil(most).max(1)).max(1)
}

/// Whether patches are single pixels, so that no gathering is needed.
fn is_pixelwise(window: &Window) -> bool {
    window.size == 1 && window.stride == 1 && window.padding == 0
}

/// For images of one pixel: the offset of the window's centre weights `[out, in]`, and the elements
/// from one output channel to the next. The rest of the window covers only the border's zeros.
/// `None` for larger images.
fn only_tap(window: &Window) -> Option<(usize, usize)> {
    let Window { height, width, in_channels, size, padding, .. } = *window;
    let one = height == 1 && width == 1 && size > 1 && window.out_height() == 1 && window.out_width() == 1;
    one.then(|| ((padding * size + padding) * in_channels, size * size * in_channels))
}

/// # Safety
///
/// The call's operands are checked and valid.
pub(super) unsafe fn forward(call: &KernelCall<'_>, window: &Window, kernel: Option<&MicroKernel>, scratch: &mut Scratch) {
    // SAFETY: reads and writes are valid and do not overlap.
    let (x, w, y) = unsafe { (floats(&call.reads[0]), floats(&call.reads[1]), floats_mut(&call.writes[0])) };
    if let Some((first, stride)) = only_tap(window) {
        let Window { batch, in_channels, out_channels, .. } = *window;
        // SAFETY: the views lie in the slices.
        unsafe {
            let (left, right) =
                (View::rows(x.as_ptr(), in_channels), View::rows(w.as_ptr().wrapping_add(first), stride).transposed());
            let destination = ViewMut::rows(y.as_mut_ptr(), out_channels);
            multiply_with(kernel, scratch, [batch, out_channels, in_channels], destination, left, right, Destination::Overwrite);
        }
        return;
    }
    match kernel {
        Some(kernel) => direct::correlate(x, w, y, window, kernel, scratch),
        None => correlate(x, w, y, window, scratch),
    }
}

/// # Safety
///
/// The call's operands are checked and valid.
pub(super) unsafe fn input_gradient(call: &KernelCall<'_>, window: &Window, kernel: Option<&MicroKernel>, scratch: &mut Scratch) {
    // SAFETY: reads and writes are valid and do not overlap.
    let (dy, w, dx) = unsafe { (floats(&call.reads[0]), floats(&call.reads[1]), floats_mut(&call.writes[0])) };
    if let Some((first, stride)) = only_tap(window) {
        let Window { batch, in_channels, out_channels, .. } = *window;
        // SAFETY: the views lie in the slices.
        unsafe {
            let (left, right) = (View::rows(dy.as_ptr(), out_channels), View::rows(w.as_ptr().wrapping_add(first), stride));
            let destination = ViewMut::rows(dx.as_mut_ptr(), in_channels);
            multiply([batch, in_channels, out_channels], destination, left, right, Destination::Overwrite);
        }
        return;
    }
    if let Some(kernel) = kernel
        && window.padding < window.size
        // With few channels most of a panel would be padding.
        && 2 * window.in_channels >= kernel.panel_width
    {
        match window.stride {
            1 => direct::input_gradient(dy, w, dx, window, kernel, scratch),
            _ => strided::input_gradient(dy, w, dx, window, kernel, scratch),
        }
        return;
    }
    let (patch, out) = (patch(window), window.out_channels);
    if is_pixelwise(window) {
        // SAFETY: the views are the slices'.
        unsafe {
            let destination = ViewMut::rows(dx.as_mut_ptr(), patch);
            let (left, right) = (View::rows(dy.as_ptr(), out), View::rows(w.as_ptr(), patch));
            multiply([positions(window), patch, out], destination, left, right, Destination::Overwrite);
        }
        return;
    }
    dx.fill(0.0);
    let tile = tile(window);
    let [patches] = scratch.pieces([tile * patch]);
    for first in (0..positions(window)).step_by(tile) {
        let count = tile.min(positions(window) - first);
        // SAFETY: the views lie in the slices and in the scratch.
        unsafe {
            let destination = ViewMut::rows(patches.as_mut_ptr(), patch);
            let (left, right) = (View::rows(dy[first * out..].as_ptr(), out), View::rows(w.as_ptr(), patch));
            multiply([count, patch, out], destination, left, right, Destination::Overwrite);
        }
        scatter_patches(&patches[..count * patch], dx, first, window);
    }
}

/// # Safety
///
/// The call's operands are checked and valid.
pub(super) unsafe fn weight_gradient(
    call: &KernelCall<'_>,
    window: &Window,
    kernel: Option<&MicroKernel>,
    scratch: &mut Scratch,
) {
    // SAFETY: reads and writes are valid and do not overlap.
    let (dy, x, dw) = unsafe { (floats(&call.reads[0]), floats(&call.reads[1]), floats_mut(&call.writes[0])) };
    if let Some((first, stride)) = only_tap(window) {
        let Window { batch, in_channels, out_channels, .. } = *window;
        if !call.accumulate {
            dw.fill(0.0);
        }
        // SAFETY: the views lie in the slices.
        unsafe {
            let (left, right) = (View::rows(dy.as_ptr(), out_channels).transposed(), View::rows(x.as_ptr(), in_channels));
            let destination = ViewMut::rows(dw.as_mut_ptr().wrapping_add(first), stride);
            multiply_with(kernel, scratch, [out_channels, in_channels, batch], destination, left, right, Destination::Add);
        }
        return;
    }
    if let Some(kernel) = kernel
        && direct::has_weight_gradient(window, kernel)
    {
        direct::weight_gradient(dy, x, dw, call.accumulate, window, kernel, scratch);
        return;
    }
    let (patch, out) = (patch(window), window.out_channels);
    let tile = if is_pixelwise(window) { positions(window).max(1) } else { tile(window) };
    let [patches] = scratch.pieces([if is_pixelwise(window) { 0 } else { tile * patch }]);
    let mut mode = Destination::accumulating(call.accumulate);
    if positions(window) == 0 && mode == Destination::Overwrite {
        dw.fill(0.0);
    }
    for first in (0..positions(window)).step_by(tile) {
        let count = tile.min(positions(window) - first);
        let right = if is_pixelwise(window) {
            View::rows(x.as_ptr(), patch)
        } else {
            gather_patches(&mut patches[..count * patch], x, first, window);
            View::rows(patches.as_ptr(), patch)
        };
        // SAFETY: the views lie in the slices and in the scratch.
        unsafe {
            let left = View::rows(dy[first * out..].as_ptr(), out).transposed();
            multiply([out, patch, count], ViewMut::rows(dw.as_mut_ptr(), patch), left, right, mode);
        }
        mode = Destination::Add;
    }
}

/// The forward convolution through patches.
fn correlate(x: &[f32], w: &[f32], y: &mut [f32], window: &Window, scratch: &mut Scratch) {
    let (patch, out) = (patch(window), window.out_channels);
    let tile = if is_pixelwise(window) { positions(window).max(1) } else { tile(window) };
    let [patches] = scratch.pieces([if is_pixelwise(window) { 0 } else { tile * patch }]);
    for first in (0..positions(window)).step_by(tile) {
        let count = tile.min(positions(window) - first);
        let left = if is_pixelwise(window) {
            View::rows(x.as_ptr(), patch)
        } else {
            gather_patches(&mut patches[..count * patch], x, first, window);
            View::rows(patches.as_ptr(), patch)
        };
        // SAFETY: the views lie in the slices and in the scratch.
        unsafe {
            let destination = ViewMut::rows(y[first * out..].as_mut_ptr(), out);
            let right = View::rows(w.as_ptr(), patch).transposed();
            multiply([count, out, patch], destination, left, right, Destination::Overwrite);
        }
    }
}

/// The part of one window row inside the image: offset in the patch, offset in the image, length.
struct Stretch {
    patch: usize,
    image: usize,
    length: usize,
}

/// Returns the part of row `row` of the window at output position `position` that is inside the
/// image, if any.
#[inline(always)]
fn stretch(position: usize, row: usize, window: &Window) -> Option<Stretch> {
    let (out_height, out_width) = (window.out_height(), window.out_width());
    let (column, line, image) = (position % out_width, position / out_width % out_height, position / out_width / out_height);
    let input_row = (line * window.stride + row).checked_sub(window.padding).filter(|&row| row < window.height)?;
    let start = column * window.stride;
    let first = start.max(window.padding);
    let last = (start + window.size).min(window.width + window.padding);
    (first < last).then(|| Stretch {
        patch: (row * window.size + first - start) * window.in_channels,
        image: ((image * window.height + input_row) * window.width + first - window.padding) * window.in_channels,
        length: (last - first) * window.in_channels,
    })
}

multiversion! {
    /// Fills `patches` with the windows of the positions from `first` on, with zeros outside the
    /// image.
    pub(super) fn gather_patches(patches: &mut [f32], x: &[f32], first: usize, window: &Window) {
        let patch = patch(window);
        let line = window.size * window.in_channels;
        for (position, patch) in patches.chunks_exact_mut(patch.max(1)).enumerate() {
            for row in 0..window.size {
                let target = &mut patch[row * line..][..line];
                match stretch(first + position, row, window) {
                    None => target.fill(0.0),
                    Some(Stretch { patch, image, length }) => {
                        let start = patch - row * line;
                        target[..start].fill(0.0);
                        copy(&mut target[start..][..length], &x[image..][..length]);
                        target[start + length..].fill(0.0);
                    }
                }
            }
        }
    }

    /// Adds patches back to the pixels that they were gathered from.
    fn scatter_patches(patches: &[f32], dx: &mut [f32], first: usize, window: &Window) {
        for (position, values) in patches.chunks_exact(patch(window).max(1)).enumerate() {
            for row in 0..window.size {
                if let Some(Stretch { patch, image, length }) = stretch(first + position, row, window) {
                    for (dx, &value) in dx[image..][..length].iter_mut().zip(&values[patch..][..length]) {
                        *dx += value;
                    }
                }
            }
        }
    }
}

/// An inlined copy: most copies have tens or hundreds of elements.
#[inline(always)]
fn copy(target: &mut [f32], source: &[f32]) {
    if source.len() >= 64 {
        target.copy_from_slice(source);
    } else {
        for (target, &source) in target.iter_mut().zip(source) {
            *target = source;
        }
    }
}
