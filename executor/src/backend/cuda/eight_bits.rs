//! Matrices of eight bits: making them, and their products: by cuBLASLt where it has them (Ada, Hopper and later), else as products of the
//! run's precision of what they are decoded to.

use super::CudaError;
use super::arguments::addresses;
use super::driver::{Epilogue, Factor, Factors, Last, Product};
use super::products::{ROW_ALIGNMENT, plain, transposed};
use super::queue::{BLOCK, Grid, Queue, Work};
use foretell_models::{Activation, EightBits, Kernel, WeightLayout};
use foretell_units::DataType;

/// Elements of which one thread finds the largest at least, and blocks that do so at most: enough to keep a large GPU busy.
const ELEMENTS_OF_A_THREAD: usize = 32;
const MOST_BLOCKS: usize = 1024;
/// Rows and columns of a tile, as `kernels/eight_bits.cu` has them.
const TILE: usize = 64;

/// How that file knows a format.
fn number_of(format: EightBits) -> usize {
    match format {
        EightBits::E4M3 => 0,
        EightBits::E5M2 => 1,
    }
}

impl Queue<'_> {
    /// Queues a kernel of this family; whether it is one.
    ///
    /// # Safety
    /// As for [`Queue::enqueue`].
    pub(super) unsafe fn eight_bit_kernel(&mut self, kernel: &Kernel) -> Result<bool, CudaError> {
        use EightBits::{E4M3, E5M2};
        let (first, second, result) = (self.read(0), self.read(1), self.written(0));
        let factors = [self.read(2), self.read(3)];
        // Both lie with what is summed over together, as Hopper's tensor cores want operands of eight bits.
        let product = |sizes, left, right| self.product(sizes, plain(left), transposed(right), result);
        let product = match *kernel {
            Kernel::Quantise { rows, columns, format, straight, transposed } => {
                // SAFETY: the caller's promise.
                unsafe { self.quantise([rows, columns], format, [straight, transposed]) }?;
                return Ok(true);
            }
            Kernel::EightBitMatmul { rows, columns, contracted, bias, activation } => {
                let last = match activation {
                    Activation::None => Last::Nothing,
                    Activation::Relu => Last::Relu,
                    Activation::Gelu => Last::Gelu,
                    Activation::GeluKept => Last::GeluKept(self.written(1)),
                };
                let epilogue = Epilogue { bias: bias.then(|| self.read(4)), last, sums: None };
                let factors = Factors { formats: [E4M3; 2], factors, sums_fast: true };
                Product { epilogue, factors: Some(factors), ..product([rows, columns, contracted], first, second) }
            }
            Kernel::EightBitMatmulInputGradient { rows, columns, contracted, gelu } => {
                let last = if gelu { Last::GeluSlope(self.read(4)) } else { Last::Nothing };
                let epilogue = Epilogue { last, ..Epilogue::default() };
                let factors = Factors { formats: [E5M2, E4M3], factors, sums_fast: false };
                Product { epilogue, factors: Some(factors), ..product([rows, contracted, columns], first, second) }
            }
            Kernel::EightBitMatmulWeightGradient { rows, columns, contracted, weight } => {
                let [dy, x] = factors;
                let (product, formats, factors) = match weight {
                    WeightLayout::OutIn => (product([columns, contracted, rows], first, second), [E5M2, E4M3], [dy, x]),
                    WeightLayout::InOut => (product([contracted, columns, rows], second, first), [E4M3, E5M2], [x, dy]),
                };
                let factors = Some(Factors { formats, factors, sums_fast: false });
                Product { output: DataType::Fp32, accumulate: self.call.accumulate, factors, ..product }
            }
            _ => return Ok(false),
        };
        // SAFETY: the caller's promise.
        unsafe { self.multiply(product) }?;
        Ok(true)
    }

    /// The largest magnitude of each of some parts, and with the largest of these the matrix in eight bits.
    unsafe fn quantise(
        &mut self,
        [rows, columns]: [usize; 2],
        format: EightBits,
        [straight, transposed]: [bool; 2],
    ) -> Result<(), CudaError> {
        let elements = rows * columns;
        let parts = elements.div_ceil(BLOCK * ELEMENTS_OF_A_THREAD).clamp(1, MOST_BLOCKS);
        self.scratch(parts * size_of::<u32>())?;
        let flags = [straight, transposed].map(usize::from);
        let tiles = rows.div_ceil(TILE) * columns.div_ceil(TILE);
        // SAFETY: the caller's promise; the scratch has room for a number a part.
        unsafe {
            self.launch(Work::new("largest_magnitudes", Grid::Blocks([parts, 1, 1]), &[elements]))?;
            let sizes = [rows, columns, parts, number_of(format), flags[0], flags[1]];
            self.launch(Work::new("quantise", Grid::Blocks([tiles, 1, 1]), &sizes))
        }
    }

    /// The product of what operands of eight bits are decoded to: numbers of bfloat16 exactly, since factors are powers of two. It is made
    /// where the library has no way with eight bits: on devices that have no such products, and for sizes that they do not take.
    ///
    /// # Safety
    /// As for [`Queue::multiply`].
    pub(super) unsafe fn multiply_decoded(&mut self, product: &Product, factors: Factors) -> Result<(), CudaError> {
        let width = self.width();
        let pitch = product.contracted.next_multiple_of(ROW_ALIGNMENT / width);
        let [left_rows, right_rows] = [product.rows, product.columns];
        let left = self.scratch((left_rows + right_rows) * pitch * width)?;
        let right = left.after(left_rows * pitch * width);
        let codes = [(product.left, left, left_rows), (product.right, right, right_rows)];
        for (index, (given, to, rows)) in codes.into_iter().enumerate() {
            let sizes = [rows, product.contracted, pitch, number_of(factors.formats[index])];
            let work = Work::new("decode_eight_bits", Grid::Rows(rows), &sizes);
            let mut arguments = self.arguments(&work);
            arguments.reads = addresses([given.address, factors.factors[index]]);
            arguments.writes = addresses([to]);
            // SAFETY: the caller's promise; the scratch has room for both.
            unsafe { self.launch_with(work, arguments) }?;
        }
        let there = |address, is_transposed| Factor { address, is_transposed, pitch: Some(pitch) };
        let decoded = Product { left: there(left, false), right: there(right, true), factors: None, ..*product };
        // SAFETY: as above.
        unsafe { self.multiply(decoded) }
    }
}
