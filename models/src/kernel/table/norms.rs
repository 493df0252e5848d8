//! Norms of rows. Scales and shifts are left out of the traffic, since caches keep them between
//! rows.

use super::{KernelFamily, KernelSpec, read, write};

#[inline(always)]
pub(in crate::kernel) fn layer_norm(rows: usize, features: usize) -> KernelSpec {
    KernelSpec::new("layer_norm", KernelFamily::Norm, [rows, features], [
        read("x", rows * features), read("scale", features).uncounted(), read("shift", features).uncounted(),
        write("y", rows * features), write("saved", 2 * rows).single(),
    ])
}

#[inline(always)]
pub(in crate::kernel) fn layer_norm_input_gradient(rows: usize, features: usize) -> KernelSpec {
    KernelSpec::new("layer_norm_input_gradient", KernelFamily::Norm, [rows, features], [
        read("dy", rows * features), read("x", rows * features), read("scale", features).uncounted(),
        read("saved", 2 * rows).single(),
        write("dx", rows * features),
    ])
}

#[inline(always)]
pub(in crate::kernel) fn layer_norm_weight_gradient(rows: usize, features: usize) -> KernelSpec {
    KernelSpec::new("layer_norm_weight_gradient", KernelFamily::Norm, [rows, features], [
        read("dy", rows * features), read("x", rows * features), read("saved", 2 * rows).single(),
        write("dscale", features).single(), write("dshift", features).single(),
    ])
}

#[inline(always)]
pub(in crate::kernel) fn rms_norm(rows: usize, features: usize) -> KernelSpec {
    KernelSpec::new("rms_norm", KernelFamily::Norm, [rows, features], [
        read("x", rows * features), read("scale", features).uncounted(),
        write("y", rows * features), write("saved", rows).single(),
    ])
}

#[inline(always)]
pub(in crate::kernel) fn rms_norm_input_gradient(rows: usize, features: usize) -> KernelSpec {
    KernelSpec::new("rms_norm_input_gradient", KernelFamily::Norm, [rows, features], [
        read("dy", rows * features), read("x", rows * features), read("scale", features).uncounted(),
        read("saved", rows).single(),
        write("dx", rows * features),
    ])
}

#[inline(always)]
pub(in crate::kernel) fn rms_norm_weight_gradient(rows: usize, features: usize) -> KernelSpec {
    KernelSpec::new("rms_norm_weight_gradient", KernelFamily::Norm, [rows, features], [
        read("dy", rows * features), read("x", rows * features), read("saved", rows).single(),
        write("dscale", features).single(),
    ])
}
