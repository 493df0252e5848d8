//! Products with a weight, of experts too.

use super::CudaError;
use super::arguments::addresses;
use super::driver::{DeviceAddress, Epilogue, Factor, Last, Product, Sums};
use super::queue::{Grid, Queue, Work};
use foretell_models::{Activation, Kernel, WeightLayout};
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

/// Whether a product whose rows are moved is cut into parts of what is contracted, since both factors have that along their rows in memory.
fn cuts_contracted(product: &Product) -> bool {
    product.left.is_transposed && !product.right.is_transposed && product.output == DataType::Fp32
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
            Kernel::Matmul { rows, columns, contracted, weight, bias, activation } => {
                let right = if weight == WeightLayout::OutIn { transposed(second) } else { plain(second) };
                let last = match activation {
                    Activation::None => Last::Nothing,
                    Activation::Relu => Last::Relu,
                    Activation::Gelu => Last::Gelu,
                    Activation::GeluKept => Last::GeluKept(self.written(1)),
                };
                let epilogue = Epilogue { bias: bias.then(|| self.read(2)), last, sums: None };
                Product { epilogue, ..self.product([rows, columns, contracted], plain(first), right, result) }
            }
            Kernel::MatmulInputGradient { rows, columns, contracted, weight, gelu } => {
                let right = if weight == WeightLayout::OutIn { plain(second) } else { transposed(second) };
                let last = if gelu { Last::GeluSlope(self.read(2)) } else { Last::Nothing };
                let epilogue = Epilogue { last, ..Epilogue::default() };
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
                    unsafe { self.with_bias_gradient(of_weight(product), weight, [rows, columns]) }?;
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

    /// A weight's gradient with that of a bias, which is the sum of dy's rows. The library replaces what is there, so what is added to it is in scratch
    /// memory first.
    unsafe fn with_bias_gradient(
        &mut self,
        product: Product,
        weight: WeightLayout,
        [rows, columns]: [usize; 2],
    ) -> Result<(), CudaError> {
        let given = self.written(1);
        let is_added = self.call.accumulate;
        let sums_at = if is_added { self.scratch(columns * size_of::<f32>())? } else { given };
        let sums = match weight {
            WeightLayout::OutIn => Sums::OfLeft(sums_at),
            WeightLayout::InOut => Sums::OfRight(sums_at),
        };
        let with_sums = Product { epilogue: Epilogue { sums: Some(sums), ..Epilogue::default() }, ..product };
        let mut made = false;
        if !self.moves(&product).contains(&true) {
            // SAFETY: the caller's promise; the scratch has room for the sums.
            made = match unsafe { self.multiply(with_sums) } {
                Ok(()) => true,
                Err(CudaError::ProductNotSupported { .. }) => false,
                Err(error) => return Err(error),
            };
        }
        // SAFETY: as above.
        unsafe {
            if !made {
                self.multiply_aligned(product)?;
                return self.sum_columns(rows, columns, columns, 1);
            }
            if is_added {
                let sizes = [columns];
                let work = Work::new("accumulate", Grid::Elements(columns), &sizes);
                let mut arguments = self.arguments(&work);
                (arguments.reads, arguments.writes) = (addresses([sums_at]), addresses([given]));
                self.launch_with(work, arguments)?;
            }
        }
        Ok(())
    }

    /// Whether the rows of the left factor, the right one and the result are to be moved to where tensor cores take them.
    fn moves(&self, product: &Product) -> [bool; 3] {
        let Product { rows, columns, contracted, left, .. } = *product;
        let width = self.width();
        if width != 2 || product.batch != 1 || rows * columns * contracted < WORTH_ALIGNING {
            return [false; 3];
        }
        let is_ragged = |[_, columns, _]: [usize; 3]| !(columns * width).is_multiple_of(ROW_ALIGNMENT);
        let by_contracted = cuts_contracted(product);
        // Else the rows of the result are.
        let by_rows = !left.is_transposed;
        let stored = product.stored();
        [
            is_ragged(stored[0]) && (by_contracted || by_rows),
            is_ragged(stored[1]) && by_contracted,
            is_ragged(stored[2]) && by_rows && product.output == product.input && !product.accumulate,
        ]
    }

    /// A product. Where rows of sixteen bits do not begin at multiples of what tensor cores take, as with a vocabulary of 50,257, they do in
    /// scratch memory, part by part: the library has kernels for them as they are, and those are many times slower.
    unsafe fn multiply_aligned(&mut self, product: Product) -> Result<(), CudaError> {
        let Product { rows, contracted, left, right, .. } = product;
        let width = self.width();
        let aligned = |columns: usize| columns.next_multiple_of(ROW_ALIGNMENT / width);
        let stored = product.stored();
        let [left_columns, right_columns, result_columns] = stored.map(|[_, columns, _]| columns);
        let by_contracted = cuts_contracted(&product);
        let [moves_left, moves_right, moves_result] = self.moves(&product);
        if !(moves_left || moves_right || moves_result) {
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
                let from_there = |address: DeviceAddress| address.after(first * result_columns * width);
                part.epilogue.last = match product.epilogue.last {
                    Last::GeluKept(argument) => Last::GeluKept(from_there(argument)),
                    Last::GeluSlope(argument) => Last::GeluSlope(from_there(argument)),
                    same => same,
                };
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
