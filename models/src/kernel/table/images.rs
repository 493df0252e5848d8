//! Kernels of images: convolutions, poolings, batch normalisation.

use super::{KernelFamily, KernelSpec, indices, product, read, update, write};
use crate::kernel::sizes::Window;

#[inline(always)]
fn extents(window: &Window) -> [usize; 7] {
    let Window { batch, height, width, in_channels, out_channels, size, stride, padding: _ } = *window;
    [batch, height, width, in_channels, out_channels, size, stride]
}

/// Operations of a convolution, or of one of its gradients.
#[inline(always)]
fn convolution_flops(window: &Window) -> Option<f64> {
    Some(2.0 * window.output_elements() as f64 * product(&[window.size, window.size, window.in_channels]))
}

#[inline(always)]
pub(in crate::kernel) fn convolution(window: &Window) -> KernelSpec {
    KernelSpec {
        flops: convolution_flops(window),
        ..KernelSpec::new("convolution", KernelFamily::Convolution, extents(window), [
            // Caches serve the overlaps of windows.
            read("x", window.input_elements()), read("w", window.weight_elements()),
            write("y", window.output_elements()),
        ])
    }
}

#[inline(always)]
pub(in crate::kernel) fn convolution_input_gradient(window: &Window) -> KernelSpec {
    KernelSpec {
        flops: convolution_flops(window),
        ..KernelSpec::new("convolution_input_gradient", KernelFamily::Convolution, extents(window), [
            read("dy", window.output_elements()), read("w", window.weight_elements()),
            write("dx", window.input_elements()),
        ])
    }
}

#[inline(always)]
pub(in crate::kernel) fn convolution_weight_gradient(window: &Window) -> KernelSpec {
    KernelSpec {
        flops: convolution_flops(window),
        ..KernelSpec::new("convolution_weight_gradient", KernelFamily::Convolution, extents(window), [
            read("dy", window.output_elements()), read("x", window.input_elements()),
            write("dw", window.weight_elements()).single(),
        ])
    }
}

#[inline(always)]
pub(in crate::kernel) fn batch_norm(groups: usize, positions: usize, channels: usize) -> KernelSpec {
    let elements = groups * positions * channels;
    KernelSpec::new("batch_norm", KernelFamily::Norm, [groups, positions, channels], [
        // It is read once for the statistics and once to normalise.
        read("x", elements).moving(2 * elements), read("scale", channels).uncounted(),
        read("shift", channels).uncounted(),
        write("y", elements), write("saved", 2 * groups * channels).single(),
        write("statistics", 2 * channels).single().optional().uncounted(),
    ])
}

#[inline(always)]
pub(in crate::kernel) fn batch_norm_input_gradient(groups: usize, positions: usize, channels: usize) -> KernelSpec {
    let elements = groups * positions * channels;
    KernelSpec::new("batch_norm_input_gradient", KernelFamily::Norm, [groups, positions, channels], [
        // Both are read once for the sums and once for dx.
        read("dy", elements).moving(2 * elements), read("x", elements).moving(2 * elements),
        read("scale", channels).uncounted(), read("saved", 2 * groups * channels).single(),
        write("dx", elements), write("sums", 2 * groups * channels).single(),
    ])
}

#[inline(always)]
pub(in crate::kernel) fn batch_norm_weight_gradient(groups: usize, channels: usize) -> KernelSpec {
    KernelSpec::new("batch_norm_weight_gradient", KernelFamily::Norm, [groups, channels], [
        read("sums", 2 * groups * channels).single(),
        write("dscale", channels).single(), write("dshift", channels).single(),
    ])
}

#[inline(always)]
pub(in crate::kernel) fn batch_norm_inference(positions: usize, channels: usize) -> KernelSpec {
    let elements = positions * channels;
    KernelSpec::new("batch_norm_inference", KernelFamily::Norm, [positions, channels], [
        read("x", elements), read("scale", channels).uncounted(), read("shift", channels).uncounted(),
        read("running", 2 * channels).single(),
        write("y", elements),
    ])
}

#[inline(always)]
pub(in crate::kernel) fn running_statistics(channels: usize) -> KernelSpec {
    KernelSpec::new("running_statistics", KernelFamily::Norm, [channels], [
        read("statistics", 2 * channels).single(),
        update("running", 2 * channels),
    ])
}

#[inline(always)]
pub(in crate::kernel) fn max_pool(window: &Window) -> KernelSpec {
    let outputs = window.output_elements();
    KernelSpec::new("max_pool", KernelFamily::Other, extents(window), [
        read("x", window.input_elements()),
        write("y", outputs), write("indices", outputs).integers(),
    ])
}

#[inline(always)]
pub(in crate::kernel) fn max_pool_gradient(window: &Window) -> KernelSpec {
    let outputs = window.output_elements();
    KernelSpec::new("max_pool_gradient", KernelFamily::Other, extents(window), [
        read("dy", outputs), indices("indices", outputs, window.input_elements()),
        write("dx", window.input_elements()),
    ])
}

#[inline(always)]
pub(in crate::kernel) fn global_average_pool(batch: usize, positions: usize, channels: usize) -> KernelSpec {
    KernelSpec::new("global_average_pool", KernelFamily::Other, [batch, positions, channels], [
        read("x", batch * positions * channels),
        write("y", batch * channels),
    ])
}

#[inline(always)]
pub(in crate::kernel) fn global_average_pool_gradient(batch: usize, positions: usize, channels: usize) -> KernelSpec {
    KernelSpec::new("global_average_pool_gradient", KernelFamily::Other, [batch, positions, channels], [
        read("dy", batch * channels),
        write("dx", batch * positions * channels),
    ])
}
