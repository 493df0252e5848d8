//! Losses, and the optimizers' steps.

use super::CudaError;
use super::queue::{Grid, Queue, Work};
use foretell_models::Kernel;

impl Queue<'_> {
    /// Queues a kernel of this family; whether it is one.
    ///
    /// # Safety
    /// As for [`Queue::enqueue`].
    pub(super) unsafe fn training_kernel(&mut self, kernel: &Kernel) -> Result<bool, CudaError> {
        let index = self.call.group_index;
        let first = |parts: usize, classes: usize| if parts > 1 { index * classes } else { 0 };
        // The master copy is the last write, where there is one.
        let master = if self.call.precision.has_master_copies() { self.call.writes.len().saturating_sub(1) } else { 0 };
        // SAFETY: the caller's promise, in all that follows; scratch memory is as large as the rows' losses.
        unsafe {
            match *kernel {
                Kernel::CrossEntropy { rows, classes } => {
                    self.scratch(rows * 2 * size_of::<f32>())?;
                    self.launch(Work::new("cross_entropy_rows", Grid::Rows(rows), &[rows, classes]))?;
                    self.launch(Work::new("cross_entropy_sums", Grid::Rows(1), &[rows]))?;
                }
                Kernel::LogitStatistics { rows, classes, parts } => {
                    let sizes = [rows, classes, first(parts, classes), parts * classes];
                    self.launch(Work::new("logit_statistics", Grid::Rows(rows), &sizes))?;
                }
                Kernel::CrossEntropyOfStatistics { rows, parts } => {
                    self.scratch(rows * 2 * size_of::<f32>())?;
                    self.launch(Work::new("cross_entropy_of_statistics", Grid::Elements(rows), &[rows, parts]))?;
                    self.launch(Work::new("cross_entropy_sums", Grid::Rows(1), &[rows]))?;
                }
                Kernel::CrossEntropyGradient { rows, classes, normalizer, parts, scaled } => {
                    let sizes = [rows, classes, first(parts, classes), parts * classes, usize::from(scaled)];
                    let work = Work::new("cross_entropy_gradient", Grid::Rows(rows), &sizes);
                    self.launch(Work { numbers: &[normalizer as f32], ..work })?;
                }
                Kernel::Sgd { elements, controlled, momentum, nesterov } => {
                    let flags = [controlled, momentum, nesterov].map(usize::from);
                    let sizes = [elements, flags[0], flags[1], flags[2], master];
                    self.launch(Work::new("sgd", Grid::Elements(elements), &sizes))?;
                }
                Kernel::AdamW { elements, controlled } => {
                    let sizes = [elements, usize::from(controlled), master];
                    self.launch(Work::new("adamw", Grid::Elements(elements), &sizes))?;
                }
                Kernel::UpdateControl { clip, scaled } => {
                    self.update_control([clip, scaled])?;
                }
                _ => return Ok(false),
            }
        }
        Ok(true)
    }

    unsafe fn update_control(&mut self, flags: [bool; 2]) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        unsafe { self.launch(Work::new("update_control", Grid::Rows(1), &flags.map(usize::from))) }
    }
}
