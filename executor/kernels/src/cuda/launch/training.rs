//! Losses, and the optimizers' updates.

use super::dispatcher::{Dispatcher, Grid, LaunchConfig};
use crate::cuda::driver::{CudaError, MatrixOperand, Product};
use foretell_models::{Compression, Kernel, NEWTON_SCHULZ, NEWTON_SCHULZ_STEPS, muon_length};

/// Alignment of the parts of scratch memory, in bytes: tensor cores read aligned rows.
const SCRATCH_ALIGNMENT: usize = 256;

impl Dispatcher<'_> {
    /// Queues a kernel of this family, or returns `false`.
    ///
    /// # Safety
    /// As for [`super::dispatch`].
    pub(super) unsafe fn training_kernel(&mut self, kernel: &Kernel) -> Result<bool, CudaError> {
        let index = self.call.group_index;
        let first_class = |parts: usize, classes: usize| if parts > 1 { index * classes } else { 0 };
        // In mixed precision the master copy is the last write; 0 means that there is none.
        let master = if self.call.precision.has_master_copies() { self.call.writes.len().saturating_sub(1) } else { 0 };
        // SAFETY: the caller's promise, throughout; the scratch memory holds the rows' losses.
        unsafe {
            match *kernel {
                Kernel::CrossEntropy { rows, classes } => {
                    self.scratch(rows * 2 * size_of::<f32>())?;
                    self.launch(LaunchConfig::new("cross_entropy_rows", Grid::Rows(rows), &[rows, classes]))?;
                    self.launch(LaunchConfig::new("cross_entropy_sums", Grid::Rows(1), &[rows]))?;
                }
                Kernel::LogitStatistics { rows, classes, parts } => {
                    let sizes = [rows, classes, first_class(parts, classes), parts * classes];
                    self.launch(LaunchConfig::new("logit_statistics", Grid::Rows(rows), &sizes))?;
                }
                Kernel::CrossEntropyOfStatistics { rows, parts } => {
                    self.scratch(rows * 2 * size_of::<f32>())?;
                    let grid = Grid::Elements(rows);
                    self.launch(LaunchConfig::new("cross_entropy_of_statistics", grid, &[rows, parts]))?;
                    self.launch(LaunchConfig::new("cross_entropy_sums", Grid::Rows(1), &[rows]))?;
                }
                Kernel::CrossEntropyGradient { rows, classes, normalizer, parts, scaled } => {
                    let sizes = [rows, classes, first_class(parts, classes), parts * classes, usize::from(scaled)];
                    let config = LaunchConfig::new("cross_entropy_gradient", Grid::Rows(rows), &sizes);
                    self.launch(LaunchConfig { numbers: &[normalizer as f32], ..config })?;
                }
                Kernel::LabelRanks { rows, classes, parts } => {
                    let sizes = [rows, classes, first_class(parts, classes), parts * classes, parts];
                    self.launch(LaunchConfig::new("label_ranks", Grid::Rows(rows), &sizes))?;
                }
                Kernel::TopLabels { rows, top } => {
                    self.launch(LaunchConfig::new("top_labels", Grid::Rows(1), &[rows, top]))?;
                }
                Kernel::ClassScores { rows, classes } => {
                    self.launch(LaunchConfig::new("class_scores", Grid::Rows(rows), &[rows, classes]))?;
                }
                Kernel::WeightedCrossEntropy { rows, classes, smoothing } => {
                    self.scratch(rows * 3 * size_of::<f32>())?;
                    let sizes = [rows, classes];
                    let config = LaunchConfig::new("weighted_cross_entropy_rows", Grid::Rows(rows), &sizes);
                    self.launch(LaunchConfig { numbers: &smoothing.parts(classes).map(|part| part as f32), ..config })?;
                    self.launch(LaunchConfig::new("weighted_cross_entropy_sums", Grid::Rows(1), &[rows]))?;
                }
                Kernel::WeightedCrossEntropyGradient { rows, classes, smoothing, normalizer, scaled } => {
                    let sizes = [rows, classes, usize::from(scaled)];
                    let [kept, spread] = smoothing.parts(classes).map(|part| part as f32);
                    let config = LaunchConfig::new("weighted_cross_entropy_gradient", Grid::Rows(rows), &sizes);
                    self.launch(LaunchConfig { numbers: &[kept, spread, normalizer as f32], ..config })?;
                }
                Kernel::Sgd { elements, controlled, momentum, nesterov, exempt } => {
                    let flags = [controlled, momentum, nesterov, exempt].map(usize::from);
                    let sizes = [elements, flags[0], flags[1], flags[2], master, flags[3]];
                    self.launch(LaunchConfig::new("sgd", Grid::Elements(elements), &sizes))?;
                }
                Kernel::OuterStep { elements, replicas, momentum, nesterov, mixed } => {
                    let flags = [momentum, nesterov, mixed].map(usize::from);
                    let sizes = [elements, replicas, flags[0], flags[1], flags[2]];
                    self.launch(LaunchConfig::new("outer_step", Grid::Elements(elements), &sizes))?;
                }
                Kernel::Compress { elements, parts, format, feedback } => {
                    let numbers = parts * format.part(elements, parts);
                    let (function, grid) = match format {
                        Compression::Bf16 => ("compress_bf16", Grid::Elements(numbers)),
                        Compression::Fp16 => ("compress_fp16", Grid::Elements(numbers)),
                        Compression::Int8 => ("compress_int8", Grid::Rows(numbers / format.chunk())),
                    };
                    self.launch(LaunchConfig::new(function, grid, &[elements, numbers, usize::from(feedback)]))?;
                }
                Kernel::Decompress { elements, sources, format } => {
                    let function = match format {
                        Compression::Bf16 => "decompress_bf16",
                        Compression::Fp16 => "decompress_fp16",
                        Compression::Int8 => "decompress_int8",
                    };
                    let sizes = [elements, sources, format.part(elements, 1)];
                    self.launch(LaunchConfig::new(function, Grid::Elements(elements), &sizes))?;
                }
                Kernel::AdamW { elements, controlled, exempt } => {
                    let sizes = [elements, usize::from(controlled), master, usize::from(exempt)];
                    self.launch(LaunchConfig::new("adamw", Grid::Elements(elements), &sizes))?;
                }
                Kernel::LambDirection { elements, controlled, exempt } => {
                    let sizes = [elements, usize::from(controlled), usize::from(exempt)];
                    self.launch(LaunchConfig::new("lamb_direction", Grid::Elements(elements), &sizes))?;
                    let parameter = self.read(self.call.reads.len() - 1);
                    let (direction, norms) = (self.written(0), self.written(3));
                    self.sum_between(elements, true, parameter, norms)?;
                    self.sum_between(elements, true, direction, norms.offset(size_of::<f32>()))?;
                }
                Kernel::LambStep { elements, controlled } => {
                    let sizes = [elements, usize::from(controlled), master];
                    self.launch(LaunchConfig::new("lamb_step", Grid::Elements(elements), &sizes))?;
                }
                Kernel::MuonDirection { elements, controlled } => {
                    let sizes = [elements, usize::from(controlled)];
                    self.launch(LaunchConfig::new("muon_direction", Grid::Elements(elements), &sizes))?;
                }
                Kernel::Orthogonalise { matrices, rows, columns } => self.orthogonalise(matrices, [rows, columns])?,
                Kernel::MuonStep { elements, longest, controlled, exempt } => {
                    let sizes = [elements, usize::from(controlled), master, usize::from(exempt)];
                    let config = LaunchConfig::new("muon_step", Grid::Elements(elements), &sizes);
                    self.launch(LaunchConfig { numbers: &[muon_length(longest)], ..config })?;
                }
                Kernel::UpdateControl { clip, scaled, predictions } => {
                    let sizes = [usize::from(clip), usize::from(scaled), predictions];
                    self.launch(LaunchConfig::new("update_control", Grid::Rows(1), &sizes))?;
                }
                _ => return Ok(false),
            }
        }
        Ok(true)
    }

    /// Queues the steps of Newton and Schulz on all matrices together. X, A and the polynomial of A
    /// are in the run's precision, as Muon's own code has them.
    unsafe fn orthogonalise(&mut self, matrices: usize, [rows, columns]: [usize; 2]) -> Result<(), CudaError> {
        let (elements, short) = (rows * columns, rows.min(columns));
        if matrices * elements == 0 {
            return Ok(());
        }
        let blocks = elements.div_ceil(4096).clamp(1, 64);
        let (sums, matrix, square) =
            (matrices * blocks * size_of::<f64>(), matrices * elements * self.width(), matrices * short * short * self.width());
        let parts = [sums, matrix, square].map(|bytes| bytes.next_multiple_of(SCRATCH_ALIGNMENT));
        let scratch = self.scratch(parts.iter().sum::<usize>() + square)?;
        let other = scratch.offset(parts[0]);
        let gram = other.offset(parts[1]);
        let polynomial = gram.offset(parts[2]);
        let (x, y) = (self.read(0), self.written(0));
        let sizes = [elements, blocks];
        let grid = Grid::Blocks([matrices * blocks, 1, 1]);
        let squares = [matrices * short * short, short];
        let polynomials = LaunchConfig::new("square_polynomials", Grid::Elements(squares[0]), &squares);
        let polynomials = LaunchConfig { numbers: &NEWTON_SCHULZ, ..polynomials };
        let (plain, transposed) = (MatrixOperand::plain, MatrixOperand::transposed);
        // SAFETY: the caller's promise; the scratch memory holds the sums, a matrix and two
        // squares.
        unsafe {
            self.launch(LaunchConfig::new("matrix_squares", grid, &sizes))?;
            self.launch_between(LaunchConfig::new("matrices_over_norms", grid, &sizes), x, other)?;
            // The number of steps is odd, so that the last one writes y.
            let (mut from, mut to) = (other, y);
            for _ in 0..NEWTON_SCHULZ_STEPS {
                let is_wide = rows <= columns;
                let (left, right) = if is_wide { (plain(from), transposed(from)) } else { (transposed(from), plain(from)) };
                let products = [
                    self.product([short, short, rows.max(columns)], left, right, gram),
                    self.product([short; 3], plain(gram), plain(gram), polynomial),
                ];
                for product in products {
                    self.multiply(Product { batch: matrices, ..product })?;
                }
                self.launch_between(polynomials, gram, polynomial)?;
                let (left, right) = if is_wide { (polynomial, from) } else { (from, polynomial) };
                let next = self.product([rows, columns, short], plain(left), plain(right), to);
                self.multiply(Product { batch: matrices, ..next })?;
                std::mem::swap(&mut from, &mut to);
            }
        }
        Ok(())
    }
}
