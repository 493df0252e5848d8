//! Matrix products with a weight, and those of experts.

use super::dispatcher::{Dispatcher, Grid, LaunchConfig};
use super::multiply::ROW_ALIGNMENT;
use crate::cuda::driver::{
    BiasGradient, CudaError, DeviceAddress, Epilogue, EpilogueActivation, MatrixOperand, Product, addresses,
};
use foretell_models::{Activation, Kernel, WeightLayout};
use foretell_units::DataType;

/// Parts have a multiple of this many rows, so that they consist of whole tiles.
const PART_ROWS: usize = 256;

/// The three matrices of a product in the order of [`Product::stored`].
const LEFT: usize = 0;
const RIGHT: usize = 1;
const RESULT: usize = 2;

/// Returns `true` if a product with unaligned rows is split along the contracted dimension. Both
/// operands then store that dimension as their rows.
fn splits_contracted(product: &Product) -> bool {
    product.left.is_transposed && !product.right.is_transposed && product.output == DataType::Fp32
}

impl Dispatcher<'_> {
    /// Queues a kernel of this family, or returns `false`.
    ///
    /// # Safety
    /// As for [`super::dispatch`].
    pub(super) unsafe fn product_kernel(&mut self, kernel: &Kernel) -> Result<bool, CudaError> {
        let (first, second, result) = (self.read(0), self.read(1), self.written(0));
        let (plain, transposed) = (MatrixOperand::plain, MatrixOperand::transposed);
        // Weight gradients are in single precision, and may accumulate.
        let of_weight = |product: Product| Product { output: DataType::Fp32, accumulate: self.call.accumulate, ..product };
        let product = match *kernel {
            Kernel::Matmul { rows, columns, contracted, weight, bias, activation } => {
                let right = if weight == WeightLayout::OutIn { transposed(second) } else { plain(second) };
                let activation = match activation {
                    Activation::None => EpilogueActivation::None,
                    Activation::Relu => EpilogueActivation::Relu,
                    Activation::Gelu => EpilogueActivation::Gelu,
                    Activation::GeluKept => EpilogueActivation::GeluAux(self.written(1)),
                };
                let epilogue = Epilogue { bias: bias.then(|| self.read(2)), activation, bias_gradient: None };
                Product { epilogue, ..self.product([rows, columns, contracted], plain(first), right, result) }
            }
            Kernel::MatmulInputGradient { rows, columns, contracted, weight, gelu } => {
                let right = if weight == WeightLayout::OutIn { plain(second) } else { transposed(second) };
                let activation = if gelu { EpilogueActivation::GeluGradient(self.read(2)) } else { EpilogueActivation::None };
                let epilogue = Epilogue { activation, ..Epilogue::default() };
                Product { epilogue, ..self.product([rows, contracted, columns], plain(first), right, result) }
            }
            // Reads dy, x.
            Kernel::MatmulWeightGradient { rows, columns, contracted, weight, bias } => {
                let product = match weight {
                    WeightLayout::OutIn => self.product([columns, contracted, rows], transposed(first), plain(second), result),
                    WeightLayout::InOut => self.product([contracted, columns, rows], transposed(second), plain(first), result),
                };
                if bias {
                    // SAFETY: the caller's promise.
                    unsafe { self.multiply_with_bias_gradient(of_weight(product), weight, [rows, columns]) }?;
                    return Ok(true);
                }
                of_weight(product)
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
        unsafe { self.multiply_aligned(product) }?;
        Ok(true)
    }

    /// Queues a weight gradient and the bias gradient, which is the sum of dy's rows. The library
    /// overwrites the bias gradient; to accumulate, it goes to scratch memory and is added.
    unsafe fn multiply_with_bias_gradient(
        &mut self,
        product: Product,
        weight: WeightLayout,
        [rows, columns]: [usize; 2],
    ) -> Result<(), CudaError> {
        let bias = self.written(1);
        let accumulates = self.call.accumulate;
        let sums = if accumulates { self.scratch(columns * size_of::<f32>())? } else { bias };
        let bias_gradient = match weight {
            WeightLayout::OutIn => BiasGradient::OfLeft(sums),
            WeightLayout::InOut => BiasGradient::OfRight(sums),
        };
        let epilogue = Epilogue { bias_gradient: Some(bias_gradient), ..Epilogue::default() };
        let mut is_fused = false;
        if !self.unaligned(&product).contains(&true) {
            // SAFETY: the caller's promise; the scratch memory holds the sums.
            is_fused = match unsafe { self.multiply(Product { epilogue, ..product }) } {
                Ok(()) => true,
                Err(CudaError::ProductNotSupported { .. }) => false,
                Err(error) => return Err(error),
            };
        }
        // SAFETY: as above.
        unsafe {
            if !is_fused {
                self.multiply_aligned(product)?;
                return self.sum_columns(rows, columns, columns, 1);
            }
            if accumulates {
                let sizes = [columns];
                let config = LaunchConfig::new("accumulate", Grid::Elements(columns), &sizes);
                let mut arguments = self.arguments(&config);
                (arguments.reads, arguments.writes) = (addresses([sums]), addresses([bias]));
                self.launch_with(config, arguments)?;
            }
        }
        Ok(())
    }

    /// Returns which of left operand, right operand and result have rows that must be copied to
    /// aligned ones.
    fn unaligned(&self, product: &Product) -> [bool; 3] {
        let Product { rows, columns, contracted, left, .. } = *product;
        let width = self.width();
        if width != 2 || product.batch != 1 || rows * columns * contracted < self.backend.limits.min_aligned_multiplications {
            return [false; 3];
        }
        let is_unaligned = |[_, columns, _]: [usize; 3]| !(columns * width).is_multiple_of(ROW_ALIGNMENT);
        let by_contracted = splits_contracted(product);
        // Otherwise the product is split along the rows of the left operand and of the result.
        let by_rows = !left.is_transposed;
        let stored = product.stored();
        [
            is_unaligned(stored[LEFT]) && (by_contracted || by_rows),
            is_unaligned(stored[RIGHT]) && by_contracted,
            is_unaligned(stored[RESULT]) && by_rows && product.output == product.input && !product.accumulate,
        ]
    }

    /// Queues a product. 16-bit rows that tensor cores cannot read, for example with a vocabulary
    /// of 50,257, are copied to aligned rows in scratch memory, part by part. The library has
    /// kernels for unaligned rows too, but those are many times slower.
    unsafe fn multiply_aligned(&mut self, product: Product) -> Result<(), CudaError> {
        let Product { rows, contracted, left, right, .. } = product;
        let unaligned = self.unaligned(&product);
        if !unaligned.contains(&true) {
            // SAFETY: the caller's promise.
            return unsafe { self.multiply(product) };
        }
        let width = self.width();
        let aligned = |columns: usize| columns.next_multiple_of(ROW_ALIGNMENT / width);
        let columns = product.stored().map(|[_, columns, _]| columns);
        let by_contracted = splits_contracted(&product);
        let row_bytes: [usize; 3] =
            std::array::from_fn(|index| if unaligned[index] { aligned(columns[index]) * width } else { 0 });
        let total = if by_contracted { contracted } else { rows };
        let fitting = self.backend.limits.max_aligned_bytes / row_bytes.iter().sum::<usize>();
        let part_rows = if fitting > PART_ROWS { fitting - fitting % PART_ROWS } else { fitting }.clamp(1, total);
        let scratch = self.scratch(part_rows * row_bytes.iter().sum::<usize>())?;
        let copies = [
            scratch,
            scratch.offset(part_rows * row_bytes[LEFT]),
            scratch.offset(part_rows * (row_bytes[LEFT] + row_bytes[RIGHT])),
        ];
        for first in (0..total).step_by(part_rows) {
            let count = part_rows.min(total - first);
            let mut part = product;
            part.left.address = left.address.offset(first * columns[LEFT] * width);
            if by_contracted {
                part.contracted = count;
                part.accumulate = product.accumulate || first > 0;
                part.right.address = right.address.offset(first * columns[RIGHT] * width);
            } else {
                part.rows = count;
                let at_part = |address: DeviceAddress| address.offset(first * columns[RESULT] * width);
                part.epilogue.activation = match product.epilogue.activation {
                    EpilogueActivation::GeluAux(aux) => EpilogueActivation::GeluAux(at_part(aux)),
                    EpilogueActivation::GeluGradient(argument) => EpilogueActivation::GeluGradient(at_part(argument)),
                    other => other,
                };
                part.result = product.result.offset(first * columns[RESULT] * product.output.size().count() as usize);
            }
            let originals = [part.left.address, part.right.address, part.result];
            // SAFETY: the caller's promise; the scratch memory holds the part's rows of each
            // matrix.
            unsafe {
                for (index, operand) in [(LEFT, &mut part.left), (RIGHT, &mut part.right)] {
                    if unaligned[index] {
                        let pitch = aligned(columns[index]);
                        let sizes = [count, columns[index], columns[index], pitch];
                        self.copy_to_pitch(originals[index], copies[index], sizes)?;
                        *operand = MatrixOperand { address: copies[index], pitch: Some(pitch), ..*operand };
                    }
                }
                if unaligned[RESULT] {
                    (part.result, part.result_pitch) = (copies[RESULT], Some(aligned(columns[RESULT])));
                }
                self.multiply(part)?;
                if unaligned[RESULT] {
                    let sizes = [count, columns[RESULT], aligned(columns[RESULT]), columns[RESULT]];
                    self.copy_to_pitch(copies[RESULT], originals[RESULT], sizes)?;
                }
            }
        }
        Ok(())
    }

    /// Queues a copy of rows in the run's precision from one pitch to another. `sizes`: rows,
    /// elements of a row, pitch of the source, pitch of the target.
    unsafe fn copy_to_pitch(&mut self, from: DeviceAddress, to: DeviceAddress, sizes: [usize; 4]) -> Result<(), CudaError> {
        let config = LaunchConfig::new("copy_to_pitch", Grid::Rows(sizes[0]), &sizes);
        // SAFETY: the caller's promise.
        unsafe { self.launch_between(config, from, to) }
    }
}
