//! Costs of one software stack on one cluster, and helpers that all kinds of kernels share.

use super::cluster::Cluster;
use super::format::ProductFormat;
use super::product::{Product, product_time};
use super::stack::StackProfile;
use super::workload::Workload;
use foretell_units::{FlopsPerSecond, Seconds};

/// Costs of one software stack on one cluster.
#[derive(Clone, Debug)]
pub struct GpuCosts<'a> {
    /// Devices, links and network.
    pub cluster: &'a Cluster,
    /// The software stack.
    pub stack: &'a StackProfile,
    /// Number format of matrix products.
    pub format: ProductFormat,
    /// Properties of the run.
    pub workload: Workload,
}

impl GpuCosts<'_> {
    /// Returns the device time of a matrix product in the run's format.
    pub(super) fn product_time(&self, product: &Product) -> Seconds {
        self.product_time_in(product, self.format)
    }

    /// Returns the device time of a matrix product in a format.
    pub(super) fn product_time_in(&self, product: &Product, format: ProductFormat) -> Seconds {
        let share = self.stack.product_share(&self.cluster.device, format, self.workload.fp8_scaling);
        product_time(product, format, &self.cluster.gpu, share)
    }

    /// Returns an upper bound on the rate of matrix products.
    pub(crate) fn fastest_products(&self) -> FlopsPerSecond {
        // Products whose sizes eight-bit kernels do not support run in bf16.
        let (own, bf16) = (self.product_rate(self.format), self.product_rate(ProductFormat::Bf16));
        if self.format.is_cast() && bf16 > own { bf16 } else { own }
    }

    /// Returns the rate of very large matrix products in a format.
    pub(super) fn product_rate(&self, format: ProductFormat) -> FlopsPerSecond {
        let gpu = &self.cluster.gpu;
        let share = self.stack.product_share(&self.cluster.device, format, self.workload.fp8_scaling);
        gpu.peak(format) * (gpu.product_efficiency(format) * share)
    }

    /// Returns the time in which the memory moves `bytes` bytes. The last-level cache may still
    /// hold the bytes that the previous kernel wrote last.
    pub(super) fn moving_time(&self, bytes: f64) -> Seconds {
        let gpu = &self.cluster.gpu;
        let cached = bytes.min(gpu.cache.value());
        let weight = bytes - cached + cached / gpu.cache_speed;
        Seconds::new(weight / (gpu.memory_bandwidth.value() * gpu.memory_efficiency))
    }

    /// Returns the time to cast `elements` operand elements to a narrow format. For each product,
    /// activations and their gradients are cast once, and transposed for the weight gradient.
    pub(super) fn cast_time(&self, elements: usize) -> Seconds {
        if self.format.is_cast() { self.moving_time(elements as f64 * self.stack.products.cast_bytes) } else { Seconds::ZERO }
    }
}
