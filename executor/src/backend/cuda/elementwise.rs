//! What is done to each element apart from the others, and sums of columns.

use super::CudaError;
use super::arguments::addresses;
use super::queue::{Grid, Queue, Work};
use foretell_models::Kernel;
use std::ops::Range;

/// Rows that one block sums of a column at least; how many blocks there should be, to keep a large GPU busy; the most that share a column.
const CHUNK: usize = 256;
const BLOCKS: usize = 1024;
const MOST_CHUNKS: usize = 512;
/// Columns of a block, and of one that sums what such blocks left: as `kernels/sums.cu` has them.
pub(super) const COLUMNS: usize = 64;
pub(super) const SUMMED_COLUMNS: usize = 32;

/// Rows of a chunk, and how many chunks there are: from the sizes alone, so that sums are the same on every device.
pub(super) fn chunks(rows: usize, columns: usize) -> (usize, usize) {
    let most = (BLOCKS / columns.div_ceil(COLUMNS).max(1)).clamp(8, MOST_CHUNKS);
    let of_chunk = rows.div_ceil(most).max(CHUNK);
    (of_chunk, rows.div_ceil(of_chunk).max(1))
}

impl Queue<'_> {
    /// Queues a kernel of this family; whether it is one.
    ///
    /// # Safety
    /// As for [`Queue::enqueue`].
    pub(super) unsafe fn elementwise_kernel(&mut self, kernel: &Kernel) -> Result<bool, CudaError> {
        let (function, elements) = match *kernel {
            Kernel::Relu { elements } => ("relu", elements),
            Kernel::ReluGradient { elements } => ("relu_gradient", elements),
            Kernel::Gelu { elements } => ("gelu", elements),
            Kernel::GeluGradient { elements } => ("gelu_gradient", elements),
            Kernel::GeluExact { elements } => ("gelu_exact", elements),
            Kernel::GeluExactGradient { elements } => ("gelu_exact_gradient", elements),
            Kernel::SiluMultiply { elements } => ("silu_multiply", elements),
            Kernel::SiluMultiplyGradient { elements } => ("silu_multiply_gradient", elements),
            Kernel::Add { elements } => ("add", elements),
            Kernel::Multiply { elements } => ("multiply", elements),
            Kernel::Scale { elements, .. } => ("scale", elements),
            Kernel::BiasAdd { rows, columns } => ("bias_add", rows * columns),
            Kernel::Accumulate { elements } => ("accumulate", elements),
            Kernel::Narrow { elements } => ("narrow_numbers", elements),
            Kernel::Dropout(sizes) => ("dropout", sizes.elements()),
            Kernel::BiasGradient { rows, columns } => {
                // SAFETY: the caller's promise.
                unsafe { self.sum_columns(rows, columns, columns, 0) }?;
                return Ok(true);
            }
            Kernel::Sum { elements } | Kernel::SumOfSquares { elements } => {
                // SAFETY: the caller's promise.
                unsafe { self.sum(elements, matches!(kernel, Kernel::SumOfSquares { .. })) }?;
                return Ok(true);
            }
            Kernel::Zero { .. } => {
                // SAFETY: the caller's promise.
                unsafe { self.clear(0) }?;
                return Ok(true);
            }
            _ => return Ok(false),
        };
        let (mut sizes, mut numbers) = ([elements, 0, 0, 0, 0, 0], [0.0]);
        match *kernel {
            Kernel::Scale { square, .. } => numbers[0] = (1.0 / (square as f64).sqrt()) as f32,
            Kernel::BiasAdd { columns, .. } => sizes[1] = columns,
            Kernel::Dropout(dropout) => {
                let row = dropout.positions * dropout.features;
                let sample = dropout.first_sample + self.call.samples_before;
                let threshold = dropout.site.rate.threshold() as usize;
                sizes = [elements, row, self.call.group_index * row, sample, dropout.site.site, threshold];
                numbers[0] = dropout.site.rate.scale();
            }
            _ => {}
        }
        // SAFETY: the caller's promise.
        unsafe { self.launch(Work { numbers: &numbers, ..Work::new(function, Grid::Elements(elements), &sizes) }) }?;
        Ok(true)
    }

    /// `[columns]` sums over rows of the first read that are `stride` elements apart, to a write.
    pub(super) unsafe fn sum_columns(&mut self, rows: usize, columns: usize, stride: usize, to: usize) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        unsafe { self.column_sums("column_parts", [rows, columns, stride], to..to + 1) }
    }

    /// Sums of each column, by a kernel that leaves those of chunks; one for each of these writes.
    pub(super) unsafe fn column_sums(
        &mut self,
        function: &'static str,
        [rows, columns, stride]: [usize; 3],
        to: Range<usize>,
    ) -> Result<(), CudaError> {
        let (of_chunk, chunks) = chunks(rows, columns);
        let sums = to.len();
        self.scratch(chunks * sums * columns * size_of::<f32>())?;
        let parts = [rows, columns, of_chunk, stride];
        let sizes = [chunks, columns, sums];
        let summing = Work::new("column_sums", Grid::Rows((sums * columns).div_ceil(SUMMED_COLUMNS)), &sizes);
        // SAFETY: the caller's promise; the scratch is as large as the parts.
        unsafe {
            self.launch(Work::new(function, Grid::Blocks([columns.div_ceil(COLUMNS), chunks, 1]), &parts))?;
            let mut arguments = self.arguments(&summing);
            arguments.writes = addresses(to.map(|write| self.written(write)));
            self.launch_with(summing, arguments)
        }
    }

    unsafe fn sum(&mut self, elements: usize, is_squared: bool) -> Result<(), CudaError> {
        // A thread sums a few elements at least; as many blocks as one block sums afterwards at once.
        let blocks = elements.div_ceil(4096).clamp(1, 1024);
        self.scratch(blocks * size_of::<f64>())?;
        let mut arguments = self.arguments(&Work::new("sum_of_parts", Grid::Rows(1), &[blocks]));
        // These never add to what is there.
        arguments.accumulate = 0;
        // SAFETY: the caller's promise; the scratch is as large as the parts.
        unsafe {
            self.launch(Work::new("sum_parts", Grid::Rows(blocks), &[elements, usize::from(is_squared)]))?;
            self.launch_with(Work::new("sum_of_parts", Grid::Rows(1), &[blocks]), arguments)
        }
    }
}
