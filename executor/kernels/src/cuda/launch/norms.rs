//! Layer norm, RMS norm and batch norm.

use super::dispatcher::{BLOCK, Dispatcher, Grid, LaunchConfig};
use super::elementwise::{CHUNK_COLUMNS, SUM_COLUMNS, chunks};
use crate::cuda::driver::CudaError;
use foretell_models::Kernel;

/// Bytes of one thread's widest memory access.
const PACK_BYTES: usize = 16;
/// Threads of a warp.
const WARP: usize = 32;

impl Dispatcher<'_> {
    /// Queues a kernel of this family, or returns `false`.
    ///
    /// # Safety
    /// As for [`super::dispatch`].
    pub(super) unsafe fn norm_kernel(&mut self, kernel: &Kernel) -> Result<bool, CudaError> {
        // SAFETY: the caller's promise, throughout.
        unsafe {
            match *kernel {
                Kernel::LayerNorm { rows, features, epsilon } => {
                    self.norm_rows("layer_norm", [rows, features], epsilon.value() as f32)?;
                }
                Kernel::RmsNorm { rows, features, epsilon } => {
                    self.norm_rows("rms_norm", [rows, features], epsilon.value() as f32)?;
                }
                Kernel::LayerNormInputGradient { rows, features } => {
                    self.norm_rows("layer_norm_input_gradient", [rows, features], 0.0)?;
                }
                Kernel::RmsNormInputGradient { rows, features } => {
                    self.norm_rows("rms_norm_input_gradient", [rows, features], 0.0)?;
                }
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
                    let grid = Grid::Elements(channels);
                    self.launch(LaunchConfig::new("batch_norm_weight_gradient", grid, &[groups, channels]))?;
                }
                Kernel::BatchNormInference { positions, channels } => {
                    let elements = positions * channels;
                    let grid = Grid::Elements(elements);
                    self.launch(LaunchConfig::new("batch_norm_inference", grid, &[elements, channels]))?;
                }
                Kernel::RunningStatistics { channels, contributions } => {
                    let (sizes, numbers) = ([2 * channels], [contributions as f32]);
                    let config = LaunchConfig::new("running_statistics", Grid::Elements(2 * channels), &sizes);
                    self.launch(LaunchConfig { numbers: &numbers, ..config })?;
                }
                _ => return Ok(false),
            }
        }
        Ok(true)
    }

    /// Queues a kernel with one block for each row.
    unsafe fn norm_rows(&mut self, function: &'static str, [rows, features]: [usize; 2], epsilon: f32) -> Result<(), CudaError> {
        // One thread for each pack, for kernels that read rows in packs.
        let packs = (features * self.width()).div_ceil(PACK_BYTES);
        let threads = packs.next_multiple_of(WARP).clamp(WARP, BLOCK);
        let (sizes, numbers) = ([rows, features], [epsilon]);
        let config = LaunchConfig::new(function, Grid::Rows(rows), &sizes);
        // SAFETY: the caller's promise.
        unsafe { self.launch(LaunchConfig { numbers: &numbers, threads, ..config }) }
    }

    unsafe fn batch_norm(&mut self, [groups, positions, channels]: [usize; 3]) -> Result<(), CudaError> {
        let (chunk_rows, chunks) = chunks(positions, channels);
        self.scratch(groups * chunks * 2 * channels * size_of::<f32>())?;
        let has_statistics = usize::from(self.call.writes.len() > 2);
        let elements = groups * positions * channels;
        // SAFETY: the caller's promise; the scratch memory holds the chunks' sums.
        unsafe {
            let grid = Grid::Blocks([channels.div_ceil(CHUNK_COLUMNS), chunks, groups]);
            self.launch(LaunchConfig::new("batch_norm_parts", grid, &[positions, channels, chunk_rows, chunks]))?;
            let sizes = [positions, channels, groups, chunks, has_statistics];
            let grid = Grid::Rows(channels.div_ceil(SUM_COLUMNS));
            self.launch(LaunchConfig::new("batch_norm_statistics", grid, &sizes))?;
            let sizes = [elements, channels, positions * channels];
            self.launch(LaunchConfig::new("batch_norm", Grid::Elements(elements), &sizes))
        }
    }

    unsafe fn batch_norm_input_gradient(&mut self, [groups, positions, channels]: [usize; 3]) -> Result<(), CudaError> {
        let (chunk_rows, chunks) = chunks(positions, channels);
        self.scratch(groups * chunks * 2 * channels * size_of::<f32>())?;
        let elements = groups * positions * channels;
        // SAFETY: the caller's promise; the scratch memory holds the chunks' sums.
        unsafe {
            let grid = Grid::Blocks([channels.div_ceil(CHUNK_COLUMNS), chunks, groups]);
            self.launch(LaunchConfig::new("batch_norm_gradient_parts", grid, &[positions, channels, chunk_rows, chunks]))?;
            let grid = Grid::Blocks([(2 * channels).div_ceil(SUM_COLUMNS), groups, 1]);
            self.launch(LaunchConfig::new("batch_norm_gradient_sums", grid, &[channels, groups, chunks]))?;
            let sizes = [elements, channels, positions * channels, positions];
            self.launch(LaunchConfig::new("batch_norm_input_gradient", Grid::Elements(elements), &sizes))
        }
    }
}
