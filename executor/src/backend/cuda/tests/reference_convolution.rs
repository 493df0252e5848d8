//! The library's convolution as the test device makes it: in double precision, and with a workspace that it fills with what is no number.

use super::reference_product::{get, put};
use crate::backend::cuda::driver::DeviceAddress;
use crate::backend::cuda::driver::{Convolution, ConvolutionKind};
use foretell_models::Window;

/// Bytes that each one works in: a number that nothing divides.
pub(super) const WORKSPACE: usize = 1003;

/// # Safety
/// The tensors are valid, and the workspace is as long as it was said to be.
pub(super) unsafe fn convolve(convolution: &Convolution, workspace: DeviceAddress) {
    assert!(workspace.0.is_multiple_of(256), "a workspace is aligned as an allocation is");
    // SAFETY: the caller's promise.
    unsafe { workspace.pointer().write_bytes(0xFF, WORKSPACE) };
    let Convolution { kind, window, format, image, weight, output } = *convolution;
    let (read, written) = match kind {
        ConvolutionKind::Forward => ([image, weight], output),
        ConvolutionKind::InputGradient => ([output, weight], image),
        ConvolutionKind::WeightGradient => ([output, image], weight),
    };
    let elements = [window.input_elements(), window.weight_elements(), window.output_elements()];
    let count = |address: DeviceAddress| {
        if address == image {
            elements[0]
        } else if address == weight {
            elements[1]
        } else {
            elements[2]
        }
    };
    let all = |address: DeviceAddress| -> Vec<f64> {
        // SAFETY: the caller's promise.
        (0..count(address)).map(|at| unsafe { get(address, format, at) }).collect()
    };
    let [left, right] = read.map(all);
    let mut sums = vec![0.0; count(written)];
    taps(&window, |x, w, y| match kind {
        ConvolutionKind::Forward => sums[y] += left[x] * right[w],
        ConvolutionKind::InputGradient => sums[x] += left[y] * right[w],
        ConvolutionKind::WeightGradient => sums[w] += left[y] * right[x],
    });
    for (at, sum) in sums.into_iter().enumerate() {
        // SAFETY: the caller's promise.
        unsafe { put(written, format, at, sum) };
    }
}

/// CudnnApi `each(image, weight, output)` with the places of every multiplication.
fn taps(window: &Window, mut each: impl FnMut(usize, usize, usize)) {
    let Window { batch, height, width, in_channels, out_channels, size, stride, padding } = *window;
    let (out_height, out_width) = (window.out_height(), window.out_width());
    for y in 0..batch * out_height * out_width * out_channels {
        let (out, pixel) = (y % out_channels, y / out_channels);
        let (column, row, n) = (pixel % out_width, pixel / out_width % out_height, pixel / out_width / out_height);
        for tap in 0..size * size {
            let (down, along) = (row * stride + tap / size, column * stride + tap % size);
            if down < padding || down - padding >= height || along < padding || along - padding >= width {
                continue;
            }
            let x = ((n * height + down - padding) * width + along - padding) * in_channels;
            let w = (out * size * size + tap) * in_channels;
            (0..in_channels).for_each(|channel| each(x + channel, w + channel, y));
        }
    }
}
