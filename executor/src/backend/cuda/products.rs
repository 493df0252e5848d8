//! Products with a weight, of experts too.

use super::CudaError;
use super::driver::{DeviceAddress, Epilogue, Factor, Product};
use super::queue::{Grid, Queue, Work};
use foretell_models::{Kernel, WeightLayout};
use foretell_units::DataType;

/// Bytes at whose multiples a matrix's rows begin for tensor cores to take it: what TMA asks of strides, and `wgmma` of its operands' rows.
pub(super) const ROW_ALIGNMENT: usize = 16;
/// Multiplications of a product from which on rows are moved. Tests have theirs moved whatever they take.
const WORTH_ALIGNING: usize = if cfg!(test) { 1 } else { 1 << 30 };
/// The most bytes of scratch memory that rows are moved to at a time.
const MOST_ALIGNED: usize = if cfg!(test) { 1 << 10 } else { 256 << 20 };
/// Parts are as many rows as whole tiles have.
const ROWS_AT_ONCE: usize = 256;

/// As it lies in memory.
pub(super) fn plain(address: DeviceAddress) -> Factor {
    Factor { address, is_transposed: false, pitch: None }
}

/// The rows in memory are its columns.
pub(super) fn transposed(address: DeviceAddress) -> Factor {
    Factor { address, is_transposed: true, pitch: None }
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
        unsafe { self.multiply_aligned(product) }?;
        Ok(true)
    }

    /// A product. Where rows of sixteen bits do not begin at multiples of what tensor cores take, as with a vocabulary of 50,257, they do in
    /// scratch memory, part by part: the library has kernels for them as they are, and those are many times slower.
    unsafe fn multiply_aligned(&mut self, product: Product) -> Result<(), CudaError> {
        let Product { rows, contracted, left, right, .. } = product;
        let width = self.width();
        let is_ragged = |[_, columns, _]: [usize; 3]| !(columns * width).is_multiple_of(ROW_ALIGNMENT);
        let aligned = |columns: usize| columns.next_multiple_of(ROW_ALIGNMENT / width);
        let stored = product.stored();
        let [left_columns, right_columns, result_columns] = stored.map(|[_, columns, _]| columns);
        let is_worth_it = rows * product.columns * contracted >= WORTH_ALIGNING;
        // What is cut into parts: what is contracted, where both factors have it along their rows in memory; else the rows of the result.
        let by_contracted = left.is_transposed && !right.is_transposed && product.output == DataType::Fp32;
        let by_rows = !left.is_transposed;
        let moves_left = is_ragged(stored[0]) && (by_contracted || by_rows);
        let moves_right = is_ragged(stored[1]) && by_contracted;
        let moves_result = is_ragged(stored[2]) && by_rows && product.output == product.input && !product.accumulate;
        if width != 2 || product.batch != 1 || !is_worth_it || !(moves_left || moves_right || moves_result) {
            // SAFETY: the caller's promise.
            return unsafe { self.multiply(product) };
        }
        let row = |moves: bool, columns: usize| if moves { aligned(columns) * width } else { 0 };
        let rows_in_scratch = [row(moves_left, left_columns), row(moves_right, right_columns), row(moves_result, result_columns)];
        let all = if by_contracted { contracted } else { rows };
        let fitting = MOST_ALIGNED / rows_in_scratch.iter().sum::<usize>();
        let at_once = if fitting > ROWS_AT_ONCE { fitting - fitting % ROWS_AT_ONCE } else { fitting }.clamp(1, all);
        let scratch = self.scratch(at_once * rows_in_scratch.iter().sum::<usize>())?;
        let places = [
            scratch,
            scratch.after(at_once * rows_in_scratch[0]),
            scratch.after(at_once * (rows_in_scratch[0] + rows_in_scratch[1])),
        ];
        for first in (0..all).step_by(at_once) {
            let count = at_once.min(all - first);
            let mut part = product;
            if by_contracted {
                part.contracted = count;
                part.accumulate = product.accumulate || first > 0;
                part.right.address = right.address.after(first * right_columns * width);
            } else {
                part.rows = count;
                part.result = product.result.after(first * result_columns * product.output.size().count() as usize);
            }
            part.left.address = left.address.after(first * left_columns * width);
            let (given_left, given_right, wanted) = (part.left.address, part.right.address, part.result);
            // SAFETY: the caller's promise; the scratch has room for so many rows of each.
            unsafe {
                if moves_left {
                    self.space_rows(given_left, places[0], [count, left_columns, left_columns, aligned(left_columns)])?;
                    part.left = Factor { address: places[0], pitch: Some(aligned(left_columns)), ..left };
                }
                if moves_right {
                    self.space_rows(given_right, places[1], [count, right_columns, right_columns, aligned(right_columns)])?;
                    part.right = Factor { address: places[1], pitch: Some(aligned(right_columns)), ..right };
                }
                if moves_result {
                    (part.result, part.result_pitch) = (places[2], Some(aligned(result_columns)));
                }
                self.multiply(part)?;
                if moves_result {
                    self.space_rows(places[2], wanted, [count, result_columns, aligned(result_columns), result_columns])?;
                }
            }
        }
        Ok(())
    }

    /// Moves rows of the run's precision: so many, of so many elements, from places so far apart to places so far apart.
    unsafe fn space_rows(&mut self, from: DeviceAddress, to: DeviceAddress, sizes: [usize; 4]) -> Result<(), CudaError> {
        let work = Work::new("space_rows", Grid::Rows(sizes[0]), &sizes);
        let mut arguments = self.arguments(&work);
        (arguments.reads[0], arguments.writes[0]) = (from.0, to.0);
        // SAFETY: the caller's promise.
        unsafe { self.launch_with(work, arguments) }
    }
}
