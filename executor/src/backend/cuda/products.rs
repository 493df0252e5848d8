//! Products with a weight, of experts too.

use super::CudaError;
use super::driver::{DeviceAddress, Epilogue, Factor, Product};
use super::queue::Queue;
use foretell_models::{Kernel, WeightLayout};
use foretell_units::DataType;

/// As it lies in memory.
pub(super) fn plain(address: DeviceAddress) -> Factor {
    Factor { address, is_transposed: false }
}

/// The rows in memory are its columns.
pub(super) fn transposed(address: DeviceAddress) -> Factor {
    Factor { address, is_transposed: true }
}

impl Queue<'_> {
    /// Queues a kernel of this family; whether it is one.
    ///
    /// # Safety
    /// As for [`Queue::enqueue`].
    pub(super) unsafe fn product_kernel(&mut self, kernel: &Kernel) -> Result<bool, CudaError> {
        let (first, second, result) = (self.read(0), self.read(1), self.written(0));
        // Gradients of weights are in single precision, and may be added to.
        let of_weight = |product: Product| Product { output: DataType::Fp32, accumulate: self.call.accumulate, ..product };
        let product = match *kernel {
            Kernel::Matmul { rows, columns, contracted, weight, bias, relu } => {
                let right = if weight == WeightLayout::OutIn { transposed(second) } else { plain(second) };
                let epilogue = Epilogue { bias: bias.then(|| self.read(2)), relu };
                Product { epilogue, ..self.product([rows, columns, contracted], plain(first), right, result) }
            }
            Kernel::MatmulInputGradient { rows, columns, contracted, weight } => {
                let right = if weight == WeightLayout::OutIn { plain(second) } else { transposed(second) };
                self.product([rows, contracted, columns], plain(first), right, result)
            }
            // Reads dy, x.
            Kernel::MatmulWeightGradient { rows, columns, contracted, weight: WeightLayout::OutIn } => {
                of_weight(self.product([columns, contracted, rows], transposed(first), plain(second), result))
            }
            Kernel::MatmulWeightGradient { rows, columns, contracted, weight: WeightLayout::InOut } => {
                of_weight(self.product([contracted, columns, rows], transposed(second), plain(first), result))
            }
            Kernel::ExpertMatmul { experts, rows, columns, contracted } => {
                let product = self.product([rows, columns, contracted], plain(first), transposed(second), result);
                Product { batch: experts, ..product }
            }
            Kernel::ExpertMatmulInputGradient { experts, rows, columns, contracted } => {
                let product = self.product([rows, contracted, columns], plain(first), plain(second), result);
                Product { batch: experts, ..product }
            }
            Kernel::ExpertMatmulWeightGradient { experts, rows, columns, contracted } => {
                let product = self.product([columns, contracted, rows], transposed(first), plain(second), result);
                Product { batch: experts, ..of_weight(product) }
            }
            _ => return Ok(false),
        };
        // SAFETY: the caller's promise.
        unsafe { self.multiply(product) }?;
        Ok(true)
    }
}
