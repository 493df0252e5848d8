//! Norms of rows, and batch normalisation.

use super::CudaError;
use super::elementwise::{COLUMNS, SUMMED_COLUMNS, chunks};
use super::queue::{BLOCK, Grid, Queue, Work};
use foretell_models::Kernel;

/// Bytes that one access to memory moves.
const PACK: usize = 16;
/// Threads of a warp.
const WARP: usize = 32;

impl Queue<'_> {
    /// Queues a kernel of this family; whether it is one.
    ///
    /// # Safety
    /// As for [`Queue::enqueue`].
    pub(super) unsafe fn norm_kernel(&mut self, kernel: &Kernel) -> Result<bool, CudaError> {
        // SAFETY: the caller's promise, in all that follows.
        unsafe {
            match *kernel {
                Kernel::LayerNorm { rows, features, epsilon } => {
                    self.rows("layer_norm", [rows, features], epsilon.value() as f32)?
                }
                Kernel::RmsNorm { rows, features, epsilon } => self.rows("rms_norm", [rows, features], epsilon.value() as f32)?,
                Kernel::LayerNormInputGradient { rows, features } => {
                    self.rows("layer_norm_input_gradient", [rows, features], 0.0)?;
                }
                Kernel::RmsNormInputGradient { rows, features } => self.rows("rms_norm_input_gradient", [rows, features], 0.0)?,
                Kernel::LayerNormWeightGradient { rows, features } => {
                    self.column_sums("layer_norm_weight_parts", [rows, features, features], 0..2)?;
                }
                Kernel::RmsNormWeightGradient { rows, features } => {
                    self.column_sums("rms_norm_weight_parts", [rows, features, features], 0..1)?;
                }
                Kernel::BatchNorm { groups, positions, channels } => self.batch_norm([groups, positions, channels])?,
                Kernel::BatchNormInputGradient { groups, positions, channels } => {
                    self.batch_norm_input_gradient([groups, positions, channels])?;
                }
                Kernel::BatchNormWeightGradient { groups, channels } => {
                    self.launch(Work::new("batch_norm_weight_gradient", Grid::Elements(channels), &[groups, channels]))?;
                }
                Kernel::BatchNormInference { positions, channels } => {
                    let elements = positions * channels;
                    self.launch(Work::new("batch_norm_inference", Grid::Elements(elements), &[elements, channels]))?;
                }
                Kernel::RunningStatistics { channels, contributions } => {
                    let numbers = [contributions as f32];
                    let work = Work::new("running_statistics", Grid::Elements(2 * channels), &[]);
                    self.launch(Work { numbers: &numbers, sizes: &[2 * channels], ..work })?;
                }
                _ => return Ok(false),
            }
        }
        Ok(true)
    }

    unsafe fn rows(&mut self, function: &'static str, [rows, features]: [usize; 2], epsilon: f32) -> Result<(), CudaError> {
        // As many as have a pack each, where rows are read by packs.
        let packs = (features * self.width()).div_ceil(PACK);
        let threads = packs.next_multiple_of(WARP).clamp(WARP, BLOCK);
        // SAFETY: the caller's promise.
        unsafe { self.launch(Work { numbers: &[epsilon], threads, ..Work::new(function, Grid::Rows(rows), &[rows, features]) }) }
    }

    unsafe fn batch_norm(&mut self, [groups, positions, channels]: [usize; 3]) -> Result<(), CudaError> {
        let (of_chunk, chunks) = chunks(positions, channels);
        self.scratch(groups * chunks * 2 * channels * size_of::<f32>())?;
        let has_statistics = usize::from(self.call.writes.len() > 2);
        let elements = groups * positions * channels;
        // SAFETY: the caller's promise; the scratch is as large as the parts.
        unsafe {
            let grid = Grid::Blocks([channels.div_ceil(COLUMNS), chunks, groups]);
            self.launch(Work::new("batch_norm_parts", grid, &[positions, channels, of_chunk, chunks]))?;
            let sizes = [positions, channels, groups, chunks, has_statistics];
            let channels_at_once = Grid::Rows(channels.div_ceil(SUMMED_COLUMNS));
            self.launch(Work::new("batch_norm_statistics", channels_at_once, &sizes))?;
            self.launch(Work::new("batch_norm", Grid::Elements(elements), &[elements, channels, positions * channels]))
        }
    }

    unsafe fn batch_norm_input_gradient(&mut self, [groups, positions, channels]: [usize; 3]) -> Result<(), CudaError> {
        let (of_chunk, chunks) = chunks(positions, channels);
        self.scratch(groups * chunks * 2 * channels * size_of::<f32>())?;
        let elements = groups * positions * channels;
        // SAFETY: the caller's promise; the scratch is as large as the parts.
        unsafe {
            let grid = Grid::Blocks([channels.div_ceil(COLUMNS), chunks, groups]);
            self.launch(Work::new("batch_norm_gradient_parts", grid, &[positions, channels, of_chunk, chunks]))?;
            let sums = Grid::Blocks([(2 * channels).div_ceil(SUMMED_COLUMNS), groups, 1]);
            self.launch(Work::new("batch_norm_gradient_sums", sums, &[channels, groups, chunks]))?;
            let sizes = [elements, channels, positions * channels, positions];
            self.launch(Work::new("batch_norm_input_gradient", Grid::Elements(elements), &sizes))
        }
    }
}
