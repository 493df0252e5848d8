//! Backends: what runs a [`Kernel`] on the memory that it is given.
//!
//! The nouns: an [`Operand`] is a piece of a rank's arena; a [`KernelCall`] is a kernel with its
//! operands, in the order that [`Kernel`] documents; a [`Backend`] runs calls; [`CpuBackend`] is
//! the one that is always there. The sizes that a kernel's operands must have are
//! [`operand_bytes`]'s to say, their number formats [`operand_types`]'s. A backend knows nothing of
//! programs, layouts, ranks or time, and owns no tensor.

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

/// What changes from step to step without changing the program: the optimizers' parameters.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Hyperparameters {
    /// The learning rate of this step, schedule included.
    pub learning_rate: f32,
    /// [`Kernel::Sgd`]'s momentum. Whether there is one, and whether it is Nesterov's, the kernel
    /// says.
    pub momentum: f32,
    /// Decay of the weights: SGD adds it to the gradient, AdamW takes it from the parameter.
    pub weight_decay: f32,
    /// Decay of [`Kernel::AdamW`]'s first moment.
    pub beta1: f32,
    /// Decay of [`Kernel::AdamW`]'s second moment.
    pub beta2: f32,
    /// What [`Kernel::AdamW`] adds to the root of the second moment.
    pub epsilon: f32,
    /// Factor on every gradient that an optimizer reads: clipping's factor times the reciprocal of
    /// the loss scale; 1 without either.
    pub gradient_scale: f32,
    /// The norm to which [`Kernel::UpdateControl`] shortens a longer gradient.
    pub clip_norm: f32,
    /// The learning rate of [`Kernel::OuterStep`].
    pub outer_learning_rate: f32,
    /// The momentum of [`Kernel::OuterStep`].
    pub outer_momentum: f32,
    /// The share of its own parameters that a replica keeps in [`Kernel::OuterStep`].
    pub outer_mixing: f32,
    /// Steps without an overflow after which [`Kernel::UpdateControl`] doubles the loss scale.
    pub growth_interval: u32,
    /// The step's number, from 1, for [`Kernel::AdamW`]'s bias correction and for what
    /// [`Kernel::Dropout`] drops.
    pub step: u64,
    /// The run's seed, for what [`Kernel::Dropout`] drops.
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

/// One kernel with everything that it works on.
#[derive(Clone, Copy, Debug)]
pub struct KernelCall<'a> {
    /// What to compute.
    pub kernel: &'a Kernel,
    /// The operands that it reads, in [`Kernel`]'s order.
    pub reads: &'a [Operand],
    /// The operands that it writes, in [`Kernel`]'s order.
    pub writes: &'a [Operand],
    /// Whether to add to the writes that may accumulate, rather than to overwrite them. Of no
    /// effect on other kernels.
    pub accumulate: bool,
    /// For [`Kernel::Sgd`], [`Kernel::AdamW`] and [`Kernel::Dropout`].
    pub hyperparameters: &'a Hyperparameters,
    /// The rank's part of what its group has cut, for kernels of which [`Kernel::parts`] says that
    /// they work on a part of a whole.
    pub group_index: usize,
    /// Samples of the micro-batch that lie on ranks before this one, for [`Kernel::Dropout`].
    pub samples_before: usize,
    /// The format of the operands that are stored in the run's precision; the others are single
    /// precision or integers whatever it is. Sums are made in single precision in every precision.
    pub precision: DataType,
}

/// Why a call could not be run. Nothing was written when the operands do not fit.
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
        /// How many the kernel has.
        wanted: usize,
        /// How many the call has.
        given: usize,
    },
    /// An operand is not as large as the kernel says.
    #[error("kernel `{kernel}` {side} {wanted} bytes as its operand {index}, and the call gives {given}")]
    #[diagnostic(code(kernel::operand_size))]
    OperandSize {
        /// The kernel's name.
        kernel: &'static str,
        /// "reads" or "writes".
        side: &'static str,
        /// The operand's index on its side.
        index: usize,
        /// Bytes that the kernel says.
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
    /// A label, an id or an index lies outside of what it indexes.
    #[error("kernel `{kernel}` found {value} at position {position} where an index below {limit} belongs")]
    #[diagnostic(code(kernel::index_out_of_range))]
    IndexOutOfRange {
        /// The kernel's name.
        kernel: &'static str,
        /// Where in its operand it stands.
        position: usize,
        /// The index found.
        value: i32,
        /// What it must be smaller than.
        limit: usize,
    },
    /// The GPU, or what belongs to it, fails.
    #[error(transparent)]
    #[diagnostic(transparent)]
    Cuda(#[from] cuda::CudaError),
    /// The call is in a precision that the backend does not have.
    #[error("kernel `{kernel}` cannot be run in {precision}, only in fp32, bf16 and fp16")]
    #[diagnostic(code(kernel::unknown_precision))]
    UnknownPrecision {
        /// The kernel's name.
        kernel: &'static str,
        /// What was asked for.
        precision: DataType,
    },
    /// A kernel's own sizes contradict each other, such as a window larger than its padded image.
    #[error("kernel `{kernel}` has impossible sizes: {reason}")]
    #[diagnostic(code(kernel::impossible_sizes))]
    ImpossibleSizes {
        /// The kernel's name.
        kernel: &'static str,
        /// What contradicts.
        reason: &'static str,
    },
}

/// Runs kernels on the memory that it is given. Deterministic: the same call on the same bytes
/// leaves the same bytes.
pub trait Backend {
    /// The backend's name in reports and on the command line.
    fn name(&self) -> &'static str;

    /// Runs one call to its end. Operands whose count or size is not the kernel's are refused
    /// before anything is touched.
    ///
    /// # Errors
    ///
    /// As [`BackendError`] lists them.
    ///
    /// # Safety
    ///
    /// Every operand must be valid for reading (and those of `writes` for writing) over its length
    /// for as long as the call runs, must be used by nobody else meanwhile, and those of `reads`
    /// must be initialised. A write may overlap no other operand, except that it may be exactly the
    /// read that [`Kernel`] allows it to be.
    unsafe fn run(&mut self, call: &KernelCall<'_>) -> Result<(), BackendError>;
}
