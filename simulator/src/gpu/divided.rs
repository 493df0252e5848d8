//! Lower bounds on the device time of kernels, for any division of the work.
//!
//! Ranks and micro-batches divide a kernel into parts. No part reaches a higher rate than a very
//! large kernel does, and all parts together do at least the arithmetic and move at least the bytes
//! of the whole kernel. Incomplete waves and penalties for odd sizes are left out, since parts may
//! have better sizes than the whole. So is skewed routing, which only adds rows. Launches count
//! only where parts are small enough for the last-level cache.

use super::attention::{Direction, divided_attention_time, scan_products_time};
use super::category::Category;
use super::costs::GpuCosts;
use super::format::ProductFormat;
use foretell_models::Kernel;
use foretell_units::{DataType, FlopsPerSecond, Seconds};

impl GpuCosts<'_> {
    /// Returns a lower bound on the total device time of all parts into which a kernel may be
    /// divided.
    pub fn least_total_time(&self, kernel: &Kernel, accumulate: bool, precision: DataType) -> Seconds {
        if self.is_skipped(Category::of(kernel), kernel) {
            return Seconds::ZERO;
        }
        let at = |rate: FlopsPerSecond, sizes: &[usize]| {
            let operations = 2.0 * sizes.iter().map(|&size| size as f64).product::<f64>();
            Seconds::new(operations / rate.value())
        };
        let product = |sizes: &[usize]| at(self.fastest_products(), sizes);
        // Products whose sizes eight-bit kernels do not support run in bf16.
        let [fp8, bf16] = [ProductFormat::Fp8, ProductFormat::Bf16].map(|format| self.product_rate(format));
        let eight_bit = self.fastest_products().max(fp8).max(bf16);
        match *kernel {
            Kernel::Matmul { rows, columns, contracted, .. }
            | Kernel::MatmulInputGradient { rows, columns, contracted, .. }
            | Kernel::MatmulWeightGradient { rows, columns, contracted, .. } => product(&[rows, columns, contracted]),
            Kernel::EightBitMatmul { rows, columns, contracted, .. }
            | Kernel::EightBitMatmulInputGradient { rows, columns, contracted, .. }
            | Kernel::EightBitMatmulWeightGradient { rows, columns, contracted, .. } => {
                at(eight_bit, &[rows, columns, contracted])
            }
            Kernel::ExpertMatmul { experts, rows, columns, contracted }
            | Kernel::ExpertMatmulInputGradient { experts, rows, columns, contracted }
            | Kernel::ExpertMatmulWeightGradient { experts, rows, columns, contracted } => {
                product(&[experts, rows, columns, contracted]) / self.stack.products.expert_product
            }
            Kernel::Planned(work) if work.is_product() => product(&work.product()),
            Kernel::Convolution(window)
            | Kernel::ConvolutionInputGradient(window)
            | Kernel::ConvolutionWeightGradient(window) => {
                let pixels = [window.batch, window.out_height(), window.out_width()];
                product(&[&pixels[..], &[window.out_channels, window.in_channels, window.size, window.size]].concat())
            }
            Kernel::Lstm(sizes) | Kernel::LstmGradient { sizes, .. } => {
                product(&[sizes.batch, sizes.sequence, 4, sizes.hidden, sizes.hidden])
            }
            Kernel::Scan(_) => scan_products_time(self, kernel, Direction::Forward),
            Kernel::ScanGradient(_) => scan_products_time(self, kernel, Direction::Backward),
            Kernel::Attention(sizes) => divided_attention_time(self, &sizes, Direction::Forward),
            Kernel::AttentionGradient(sizes) => divided_attention_time(self, &sizes, Direction::Backward),
            kernel => match self.moved(&kernel, accumulate, precision) {
                Some((bytes, slowdown)) => self.divided_moving_time(bytes, slowdown),
                None => Seconds::ZERO,
            },
        }
    }

    /// Lower bound on the time to move `bytes`, by any number of kernels. Either the kernels move
    /// them at memory speed, and launches are left out, or each kernel moves one filling of the
    /// last-level cache and pays one launch.
    fn divided_moving_time(&self, bytes: f64, slowdown: f64) -> Seconds {
        let gpu = &self.cluster.gpu;
        let rate = gpu.memory_bandwidth.value() * gpu.memory_efficiency;
        let filling = gpu.cache.value() / rate * slowdown;
        let share = 1.0 / gpu.cache_speed.max(1.0) + gpu.launch.value() / filling;
        Seconds::new(bytes / rate * slowdown * share.min(1.0))
    }
}
