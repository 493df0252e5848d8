//! The library's convolution as the test device computes it: in double precision, after filling the
//! workspace with NaNs.

use super::reference_product::{get, put};
use crate::cuda::driver::{Convolution, ConvolutionKind, DeviceAddress};
use foretell_models::Window;

/// Bytes of workspace that every convolution asks for. It is odd, so that nothing relies on it
/// being aligned.
pub(super) const WORKSPACE: usize = 1003;

/// Computes a convolution.
///
/// # Safety
/// The tensors are valid, and the workspace has [`WORKSPACE`] bytes.
pub(super) unsafe fn convolve(convolution: &Convolution, workspace: DeviceAddress) {
    assert!(workspace.0.is_multiple_of(256), "the workspace is not aligned as an allocation is");
    // SAFETY: the caller's promise.
    unsafe { workspace.pointer().write_bytes(0xFF, WORKSPACE) };
    let Convolution { kind, window, format, image, weight, output } = *convolution;
    let elements = [window.input_elements(), window.weight_elements(), window.output_elements()];
    let [image, weight, output] = [(image, elements[0]), (weight, elements[1]), (output, elements[2])];
    let (read, (to, count)) = match kind {
        ConvolutionKind::Forward => ([image, weight], output),
        ConvolutionKind::InputGradient => ([output, weight], image),
        ConvolutionKind::WeightGradient => ([output, image], weight),
    };
    let all = |(address, elements): (DeviceAddress, usize)| -> Vec<f64> {
        // SAFETY: the caller's promise.
        (0..elements).map(|index| unsafe { get(address, format, index) }).collect()
    };
    let [left, right] = read.map(all);
    let mut sums = vec![0.0; count];
    for_each_multiplication(&window, |x, w, y| match kind {
        ConvolutionKind::Forward => sums[y] += left[x] * right[w],
        ConvolutionKind::InputGradient => sums[x] += left[y] * right[w],
        ConvolutionKind::WeightGradient => sums[w] += left[y] * right[x],
    });
    for (index, sum) in sums.into_iter().enumerate() {
        // SAFETY: the caller's promise.
        unsafe { put(to, format, index, sum) };
    }
}

/// Calls `each(image, weight, output)` with the indices of every multiplication.
fn for_each_multiplication(window: &Window, mut each: impl FnMut(usize, usize, usize)) {
    let Window { batch, height, width, in_channels, out_channels, size, stride, padding } = *window;
    let (out_height, out_width) = (window.out_height(), window.out_width());
    for y in 0..batch * out_height * out_width * out_channels {
        let (out_channel, pixel) = (y % out_channels, y / out_channels);
        let (column, row, n) = (pixel % out_width, pixel / out_width % out_height, pixel / out_width / out_height);
        for tap in 0..size * size {
            let (in_row, in_column) = (row * stride + tap / size, column * stride + tap % size);
            let is_inside = (padding..padding + height).contains(&in_row) && (padding..padding + width).contains(&in_column);
            if !is_inside {
                continue;
            }
            let x = ((n * height + in_row - padding) * width + in_column - padding) * in_channels;
            let w = (out_channel * size * size + tap) * in_channels;
            (0..in_channels).for_each(|channel| each(x + channel, w + channel, y));
        }
    }
}
