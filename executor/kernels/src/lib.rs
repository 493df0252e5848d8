//! Backends, which run a [`Kernel`] on the memory that they are given.
//!
//! The nouns: an [`Operand`] is a piece of a rank's arena; a [`KernelCall`] is a kernel with its
//! operands, in the order that [`Kernel`] documents; a [`Backend`] runs calls; [`CpuBackend`] is
//! available on every machine. [`operand_bytes`] gives the sizes that a kernel's operands must
//! have, [`operand_types`] their number formats. A backend knows nothing of Programs, layouts,
//! ranks or time, and owns no tensor.

mod cpu;
pub mod cuda;
pub mod fp8;
pub mod half;
pub mod loading;
mod operands;
#[cfg(test)]
mod tests;

pub use cpu::CpuBackend;
pub use cuda::{CudaError, DeviceDescription, Library, devices};
pub use operands::{OperandBytes, OperandTypes, operand_bytes, operand_types};

use foretell_models::Kernel;
use foretell_units::DataType;

/// A piece of a rank's arena, aligned to at least four bytes.
#[derive(Clone, Copy, Debug)]
pub struct Operand {
    /// Its first byte.
    pub pointer: *mut u8,
    /// Its length.
    pub bytes: usize,
}

/// Values that change from step to step while the Program stays the same: the optimizers'
/// hyperparameters, the step and the seed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Hyperparameters {
    /// The learning rate of this step, schedule included.
    pub learning_rate: f32,
    /// Momentum of [`Kernel::Sgd`] and Muon. The kernel says whether it uses momentum, and whether
    /// Nesterov's.
    pub momentum: f32,
    /// Weight decay: SGD adds `weight_decay · parameter` to the gradient; AdamW and Muon subtract
    /// `learning_rate · weight_decay · parameter` from the parameter.
    pub weight_decay: f32,
    /// Decay of the first moment in AdamW and LAMB.
    pub beta1: f32,
    /// Decay of the second moment in AdamW and LAMB.
    pub beta2: f32,
    /// Added to the root of the second moment in AdamW and LAMB.
    pub epsilon: f32,
    /// Factor on every gradient that an optimizer reads: clipping's factor times the reciprocal of
    /// the loss scale; 1 without either.
    pub gradient_scale: f32,
    /// Largest gradient norm: [`Kernel::UpdateControl`] scales a longer gradient down to it.
    pub clip_norm: f32,
    /// The learning rate of [`Kernel::OuterStep`].
    pub outer_learning_rate: f32,
    /// The momentum of [`Kernel::OuterStep`].
    pub outer_momentum: f32,
    /// The fraction of its own parameters that a replica keeps in [`Kernel::OuterStep`].
    pub outer_mixing: f32,
    /// Steps without an overflow after which [`Kernel::UpdateControl`] doubles the loss scale.
    pub growth_interval: u32,
    /// The step's number, from 1, for bias correction and for the choice of elements that dropout
    /// drops.
    pub step: u64,
    /// The run's seed, for the choice of elements that dropout drops.
    pub seed: u64,
}

impl Default for Hyperparameters {
    /// PyTorch's defaults of `AdamW`, without weight decay, at the first step.
    fn default() -> Self {
        Hyperparameters {
            learning_rate: 1e-3,
            momentum: 0.0,
            weight_decay: 0.0,
            beta1: 0.9,
            beta2: 0.999,
            epsilon: 1e-8,
            gradient_scale: 1.0,
            clip_norm: 1.0,
            outer_learning_rate: 1.0,
            outer_momentum: 0.0,
            outer_mixing: 0.0,
            growth_interval: 2000,
            step: 1,
            seed: 0,
        }
    }
}

/// One kernel with all of its operands and settings.
#[derive(Clone, Copy, Debug)]
pub struct KernelCall<'a> {
    /// The kernel to run.
    pub kernel: &'a Kernel,
    /// The operands that it reads, in [`Kernel`]'s order.
    pub reads: &'a [Operand],
    /// The operands that it writes, in [`Kernel`]'s order.
    pub writes: &'a [Operand],
    /// Whether to add to the writes that may accumulate, rather than to overwrite them. Kernels
    /// without such writes ignore it.
    pub accumulate: bool,
    /// Hyperparameters, for kernels of optimizers, of the update and of dropout.
    pub hyperparameters: &'a Hyperparameters,
    /// The rank's index in its group, for kernels that work on one part of a whole
    /// ([`Kernel::parts`]).
    pub group_index: usize,
    /// Number of samples of the micro-batch that lie on ranks before this one, for dropout.
    pub samples_before: usize,
    /// Format of the operands that are stored in the run's precision. Other operands are in single
    /// precision or integers. Sums are in single precision or better.
    pub precision: DataType,
}

/// Why a call could not be run. If the operands do not fit the kernel, nothing was written.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, miette::Diagnostic)]
pub enum BackendError {
    /// A call lists too many or too few operands.
    #[error("kernel `{kernel}` {side} {wanted} operands, and the call lists {given}")]
    #[diagnostic(code(kernel::operand_count))]
    OperandCount {
        /// The kernel's name.
        kernel: &'static str,
        /// "reads" or "writes".
        side: &'static str,
        /// Number of operands that the kernel has on this side.
        wanted: usize,
        /// Number of operands that the call lists.
        given: usize,
    },
    /// An operand's length differs from the kernel's.
    #[error("kernel `{kernel}` {side} {wanted} bytes as its operand {index}, and the call gives {given}")]
    #[diagnostic(code(kernel::operand_size))]
    OperandSize {
        /// The kernel's name.
        kernel: &'static str,
        /// "reads" or "writes".
        side: &'static str,
        /// The operand's index on its side.
        index: usize,
        /// Bytes that the kernel needs.
        wanted: usize,
        /// Bytes that the call gives.
        given: usize,
    },
    /// An operand does not begin at a multiple of four bytes.
    #[error("kernel `{kernel}` {side} an operand {index} that is not aligned to four bytes")]
    #[diagnostic(code(kernel::operand_alignment))]
    OperandAlignment {
        /// The kernel's name.
        kernel: &'static str,
        /// "reads" or "writes".
        side: &'static str,
        /// The operand's index on its side.
        index: usize,
    },
    /// A label, an id or another index is out of range.
    #[error("kernel `{kernel}` found {value} at position {position} where an index below {limit} belongs")]
    #[diagnostic(code(kernel::index_out_of_range))]
    IndexOutOfRange {
        /// The kernel's name.
        kernel: &'static str,
        /// Position of the index in its operand.
        position: usize,
        /// The index found.
        value: i32,
        /// Bound that the index must be below.
        limit: usize,
    },
    /// The GPU, its driver or one of its libraries failed.
    #[error(transparent)]
    #[diagnostic(transparent)]
    Cuda(#[from] cuda::CudaError),
    /// The backend does not support the call's precision.
    #[error("kernel `{kernel}` cannot be run in {precision}, only in fp32, bf16 and fp16")]
    #[diagnostic(code(kernel::unknown_precision))]
    UnknownPrecision {
        /// The kernel's name.
        kernel: &'static str,
        /// The call's precision.
        precision: DataType,
    },
    /// A kernel's own sizes contradict each other, such as a window larger than its padded image.
    #[error("kernel `{kernel}` has impossible sizes: {reason}")]
    #[diagnostic(code(kernel::impossible_sizes))]
    ImpossibleSizes {
        /// The kernel's name.
        kernel: &'static str,
        /// The contradiction.
        reason: &'static str,
    },
}

/// Runs kernels on the memory that it is given. Deterministic: the same call on the same bytes
/// leaves the same bytes.
pub trait Backend {
    /// The backend's name in reports and on the command line.
    fn name(&self) -> &'static str;

    /// Runs one call to its end. Refuses operands of the wrong number or size before it reads or
    /// writes any.
    ///
    /// # Errors
    ///
    /// As [`BackendError`] lists them.
    ///
    /// # Safety
    ///
    /// For the duration of the call, every operand must be valid over its length: for reading, and
    /// those of `writes` also for writing. Operands of `reads` must be initialised. No other thread
    /// may use any operand. A write may overlap no other operand, except that it may equal the read
    /// that [`Kernel`] lets it overwrite.
    unsafe fn run(&mut self, call: &KernelCall<'_>) -> Result<(), BackendError>;
}
