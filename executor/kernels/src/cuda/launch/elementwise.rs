//! Elementwise kernels, sums of all elements, and sums of columns.

use super::dispatcher::{Dispatcher, Grid, LaunchConfig, order_sizes};
use crate::cuda::driver::{CudaError, DeviceAddress, addresses};
use foretell_models::{Kernel, scale_factor};
use std::ops::Range;

/// Fewest rows of a column that one block sums.
const MIN_CHUNK_ROWS: usize = 256;
/// Blocks to aim for: enough to keep a large GPU busy.
const TARGET_BLOCKS: usize = 1024;
/// Most chunks that a column is split into.
const MAX_CHUNKS: usize = 512;
/// Columns of a block that sums chunks, as in `kernels/sums.cu`.
pub(super) const CHUNK_COLUMNS: usize = 64;
/// Columns of a block that sums the chunks' sums, as in `kernels/sums.cu`.
pub(super) const SUM_COLUMNS: usize = 32;

/// Returns the rows of a chunk and the number of chunks. They depend on the sizes alone, so that
/// sums are equal on every device.
pub(super) fn chunks(rows: usize, columns: usize) -> (usize, usize) {
    let limit = (TARGET_BLOCKS / columns.div_ceil(CHUNK_COLUMNS).max(1)).clamp(8, MAX_CHUNKS);
    let chunk_rows = rows.div_ceil(limit).max(MIN_CHUNK_ROWS);
    (chunk_rows, rows.div_ceil(chunk_rows).max(1))
}

impl Dispatcher<'_> {
    /// Queues a kernel of this family, or returns `false`.
    ///
    /// # Safety
    /// As for [`super::dispatch`].
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
            Kernel::Average { elements, .. } => ("average", elements),
            Kernel::Difference { elements } => ("difference", elements),
            Kernel::Narrow { elements } => ("narrow_elements", elements),
            Kernel::Dropout(sizes) => ("dropout", sizes.elements()),
            Kernel::BiasGradient { rows, columns } => {
                // SAFETY: the caller's promise.
                unsafe { self.sum_columns(rows, columns, columns, 0) }?;
                return Ok(true);
            }
            Kernel::Sum { elements } | Kernel::SumOfSquares { elements } => {
                // SAFETY: the caller's promise.
                unsafe {
                    self.sum_between(elements, matches!(kernel, Kernel::SumOfSquares { .. }), self.read(0), self.written(0))
                }?;
                return Ok(true);
            }
            Kernel::Zero { .. } => {
                // SAFETY: the caller's promise.
                unsafe { self.clear(0) }?;
                return Ok(true);
            }
            _ => return Ok(false),
        };
        let (mut sizes, mut numbers) = ([elements, 0, 0, 0, 0, 0, 0, 0, 0], [0.0]);
        match *kernel {
            Kernel::Scale { times, square, .. } => numbers[0] = scale_factor(times, square) as f32,
            Kernel::BiasAdd { columns, .. } => sizes[1] = columns,
            Kernel::Average { parts, .. } => sizes[1] = parts,
            Kernel::Dropout(dropout) => {
                let row = dropout.positions * dropout.features;
                let sample = dropout.first_sample + self.call.samples_before;
                let threshold = dropout.site.rate.threshold() as usize;
                let [ranks, chunk] = order_sizes(dropout.zigzag);
                let first = self.call.group_index * row;
                sizes = [elements, row, first, sample, dropout.site.site, threshold, dropout.features, ranks, chunk];
                numbers[0] = dropout.site.rate.scale();
            }
            _ => {}
        }
        let config = LaunchConfig { numbers: &numbers, ..LaunchConfig::new(function, Grid::Elements(elements), &sizes) };
        // SAFETY: the caller's promise.
        unsafe { self.launch(config) }?;
        Ok(true)
    }

    /// Queues the sums of the first read's columns, to written operand `to`. Rows are `stride`
    /// elements apart.
    pub(super) unsafe fn sum_columns(&mut self, rows: usize, columns: usize, stride: usize, to: usize) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        unsafe { self.column_sums("column_parts", [rows, columns, stride], to..to + 1) }
    }

    /// Queues sums of each column: `function` leaves sums of chunks in scratch memory, one for each
    /// written operand of `to`, and a second kernel adds the chunks in order. `sizes`: rows,
    /// columns, elements from one row to the next.
    pub(super) unsafe fn column_sums(
        &mut self,
        function: &'static str,
        [rows, columns, stride]: [usize; 3],
        to: Range<usize>,
    ) -> Result<(), CudaError> {
        let (chunk_rows, chunks) = chunks(rows, columns);
        let sums = to.len();
        self.scratch(chunks * sums * columns * size_of::<f32>())?;
        let chunk_sizes = [rows, columns, chunk_rows, stride];
        let sum_sizes = [chunks, columns, sums];
        let grid = Grid::Rows((sums * columns).div_ceil(SUM_COLUMNS));
        let summing = LaunchConfig::new("column_sums", grid, &sum_sizes);
        // SAFETY: the caller's promise; the scratch memory holds the chunks' sums.
        unsafe {
            let grid = Grid::Blocks([columns.div_ceil(CHUNK_COLUMNS), chunks, 1]);
            self.launch(LaunchConfig::new(function, grid, &chunk_sizes))?;
            let mut arguments = self.arguments(&summing);
            arguments.writes = addresses(to.map(|index| self.written(index)));
            self.launch_with(summing, arguments)
        }
    }

    /// Queues the sum of the elements at `from`, or of their squares, into the number at `to`.
    ///
    /// # Safety
    /// As for [`super::dispatch`].
    pub(super) unsafe fn sum_between(
        &mut self,
        elements: usize,
        is_squared: bool,
        from: DeviceAddress,
        to: DeviceAddress,
    ) -> Result<(), CudaError> {
        // A thread sums at least 16 elements; one block can then sum all blocks' sums at once.
        let blocks = elements.div_ceil(4096).clamp(1, 1024);
        self.scratch(blocks * size_of::<f64>())?;
        let sizes = [elements, usize::from(is_squared)];
        let parts = LaunchConfig::new("sum_parts", Grid::Rows(blocks), &sizes);
        let mut part_arguments = self.arguments(&parts);
        part_arguments.reads[0] = from.0;
        let blocks = [blocks];
        let whole = LaunchConfig::new("sum_of_parts", Grid::Rows(1), &blocks);
        let mut arguments = self.arguments(&whole);
        // These kernels always overwrite.
        (arguments.accumulate, arguments.writes[0]) = (0, to.0);
        // SAFETY: the caller's promise; the scratch memory holds the blocks' sums.
        unsafe {
            self.launch_with(parts, part_arguments)?;
            self.launch_with(whole, arguments)
        }
    }
}
