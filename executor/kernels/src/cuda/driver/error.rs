//! Errors of a GPU, its driver and its libraries.

use super::Library;

/// Why the GPU did not do what it was asked for.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, miette::Diagnostic)]
pub enum CudaError {
    /// A library cannot be loaded, or lacks a function that is called.
    #[error("{library} cannot be loaded, or is too old")]
    #[diagnostic(code(cuda::missing_library), help("{}", library.hint()))]
    MissingLibrary {
        /// The library.
        library: Library,
    },
    /// The driver has no device of this index.
    #[error("there is no GPU `{index}`: the driver reports {count}")]
    #[diagnostic(code(cuda::no_device))]
    NoDevice {
        /// Index that was asked for, from 0.
        index: usize,
        /// Number of devices that the driver reports.
        count: usize,
    },
    /// A call of the driver or of a library failed.
    #[error("{action} failed: {reason}")]
    #[diagnostic(code(cuda::call))]
    Call {
        /// What was attempted, as a noun phrase that starts a sentence.
        action: &'static str,
        /// The message of the driver or library.
        reason: String,
    },
    /// Communication was aborted because another rank was lost.
    #[error("communication between GPUs was aborted")]
    #[diagnostic(code(cuda::aborted))]
    Aborted,
    /// The device's memory is used up.
    #[error("the GPU cannot allocate {wanted} bytes: {free} are free")]
    #[diagnostic(code(cuda::out_of_memory))]
    OutOfMemory {
        /// Bytes that were asked for.
        wanted: usize,
        /// Bytes that are free.
        free: usize,
    },
    /// A kernel's source does not compile: a bug of Foretell.
    #[error("kernels of `{file}` do not compile for {architecture}: {log}")]
    #[diagnostic(code(cuda::compilation))]
    Compilation {
        /// The source file.
        file: &'static str,
        /// Architecture that it was compiled for, such as `sm_90`.
        architecture: String,
        /// The compiler's log.
        log: String,
    },
    /// cuBLASLt has no algorithm for a product of these sizes, formats and alignments.
    #[error("cuBLASLt has no algorithm for a product of {rows} x {columns} over {contracted}")]
    #[diagnostic(code(cuda::product_not_supported))]
    ProductNotSupported {
        /// Rows of the result.
        rows: usize,
        /// Columns of the result.
        columns: usize,
        /// Length of the dimension that is summed over.
        contracted: usize,
    },
    /// cuDNN has no engine for a convolution that is deterministic and sums in single precision.
    #[error("cuDNN has no engine for a convolution: {reason}")]
    #[diagnostic(code(cuda::convolution_not_supported))]
    ConvolutionNotSupported {
        /// cuDNN's message.
        reason: String,
    },
}
