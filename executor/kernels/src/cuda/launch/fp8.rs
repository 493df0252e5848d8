//! Quantisation to fp8, and products of fp8 matrices: by cuBLASLt where the device has them (Ada,
//! Hopper and later), else as products of the decoded matrices.

use super::dispatcher::{BLOCK, Dispatcher, Grid, LaunchConfig};
use super::multiply::fp8_format_number;
use crate::cuda::driver::{CudaError, Epilogue, EpilogueActivation, Fp8Scales, MatrixOperand, Product};
use crate::operands::EightBitCopies;
use foretell_models::{Activation, EightBits, Kernel, WeightLayout};
use foretell_units::DataType;

/// Fewest elements of which one thread finds the largest magnitude.
const ELEMENTS_PER_THREAD: usize = 32;
/// Most blocks that find magnitudes: enough to keep a large GPU busy.
const MAX_BLOCKS: usize = 1024;
/// Rows and columns of a tile, as in `kernels/fp8.cu`.
const TILE: usize = 64;

impl Dispatcher<'_> {
    /// Queues a kernel of this family, or returns `false`.
    ///
    /// # Safety
    /// As for [`super::dispatch`].
    pub(super) unsafe fn fp8_kernel(&mut self, kernel: &Kernel) -> Result<bool, CudaError> {
        use EightBits::{E4M3, E5M2};
        let (first, second, result) = (self.read(0), self.read(1), self.written(0));
        let scales = [self.read(2), self.read(3)];
        // Both operands are contiguous along the contracted dimension, as Hopper's tensor cores
        // require of fp8.
        let product =
            |sizes, left, right| self.product(sizes, MatrixOperand::plain(left), MatrixOperand::transposed(right), result);
        let product = match *kernel {
            Kernel::Quantise { rows, columns, format, straight, transposed } => {
                // SAFETY: the caller's promise.
                unsafe { self.quantise([rows, columns], format, EightBitCopies { straight, transposed }) }?;
                return Ok(true);
            }
            Kernel::EightBitMatmul { rows, columns, contracted, bias, activation } => {
                let activation = match activation {
                    Activation::None => EpilogueActivation::None,
                    Activation::Relu => EpilogueActivation::Relu,
                    Activation::Gelu => EpilogueActivation::Gelu,
                    Activation::GeluKept => EpilogueActivation::GeluAux(self.written(1)),
                };
                let epilogue = Epilogue { bias: bias.then(|| self.read(4)), activation, bias_gradient: None };
                let fp8 = Fp8Scales { formats: [E4M3; 2], scales, fast_accumulation: true };
                Product { epilogue, fp8: Some(fp8), ..product([rows, columns, contracted], first, second) }
            }
            Kernel::EightBitMatmulInputGradient { rows, columns, contracted, gelu } => {
                let activation = if gelu { EpilogueActivation::GeluGradient(self.read(4)) } else { EpilogueActivation::None };
                let epilogue = Epilogue { activation, ..Epilogue::default() };
                let fp8 = Fp8Scales { formats: [E5M2, E4M3], scales, fast_accumulation: false };
                Product { epilogue, fp8: Some(fp8), ..product([rows, contracted, columns], first, second) }
            }
            Kernel::EightBitMatmulWeightGradient { rows, columns, contracted, weight } => {
                let [dy, x] = scales;
                let (product, formats, scales) = match weight {
                    WeightLayout::OutIn => (product([columns, contracted, rows], first, second), [E5M2, E4M3], [dy, x]),
                    WeightLayout::InOut => (product([contracted, columns, rows], second, first), [E4M3, E5M2], [x, dy]),
                };
                let fp8 = Some(Fp8Scales { formats, scales, fast_accumulation: false });
                Product { output: DataType::Fp32, accumulate: self.call.accumulate, fp8, ..product }
            }
            _ => return Ok(false),
        };
        // SAFETY: the caller's promise.
        unsafe { self.multiply(product) }?;
        Ok(true)
    }

    /// Queues quantisation: the largest magnitude of each part of the matrix, then the fp8 matrix
    /// with a scale from the largest of these. `straight` and `transposed` say which copies are
    /// written.
    unsafe fn quantise(
        &mut self,
        [rows, columns]: [usize; 2],
        format: EightBits,
        EightBitCopies { straight, transposed }: EightBitCopies,
    ) -> Result<(), CudaError> {
        let elements = rows * columns;
        let parts = elements.div_ceil(BLOCK * ELEMENTS_PER_THREAD).clamp(1, MAX_BLOCKS);
        self.scratch(parts * size_of::<u32>())?;
        let flags = [straight, transposed].map(usize::from);
        let tiles = rows.div_ceil(TILE) * columns.div_ceil(TILE);
        // SAFETY: the caller's promise; the scratch memory holds one number for each part.
        unsafe {
            self.launch(LaunchConfig::new("largest_magnitudes", Grid::Blocks([parts, 1, 1]), &[elements]))?;
            let sizes = [rows, columns, parts, fp8_format_number(format), flags[0], flags[1]];
            self.launch(LaunchConfig::new("quantise", Grid::Blocks([tiles, 1, 1]), &sizes))
        }
    }
}
