//! What can go wrong with a GPU.

use super::libraries::Library;

/// Why the GPU did not do what it was asked for.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CudaError {
    /// A library cannot be loaded.
    #[error("{library} cannot be loaded; hint: {}", library.hint())]
    MissingLibrary {
        /// Which.
        library: Library,
    },
    /// There is no such device.
    #[error("there is no GPU {index}: the driver shows {count}")]
    NoDevice {
        /// The one that was asked for.
        index: usize,
        /// How many there are.
        count: usize,
    },
    /// A call of the driver or of a library failed.
    #[error("{doing} failed: {reason}")]
    Call {
        /// What was being done.
        doing: &'static str,
        /// What the driver says.
        reason: String,
    },
    /// Another rank is lost, and exchanges with it were broken off.
    #[error("exchanges between GPUs were broken off")]
    Aborted,
    /// The device's memory is used up.
    #[error("the GPU has no {wanted} bytes left ({free} are free)")]
    OutOfMemory {
        /// Bytes that were asked for.
        wanted: usize,
        /// Bytes that are free.
        free: usize,
    },
    /// A kernel's source did not compile: a fault of ours.
    #[error("kernels of `{file}` do not compile for {architecture}: {log}")]
    Compilation {
        /// The source.
        file: &'static str,
        /// For which devices.
        architecture: String,
        /// What the compiler says.
        log: String,
    },
    /// cuBLASLt has no algorithm for a product of these sizes and places.
    #[error("cuBLASLt has no way to make a product of {rows} by {columns} over {contracted}")]
    ProductNotSupported {
        /// Rows of the result.
        rows: usize,
        /// Columns of the result.
        columns: usize,
        /// The dimension summed over.
        contracted: usize,
    },
    /// cuDNN has no way to make a convolution that is deterministic and sums in single precision.
    #[error("cuDNN has no way to make a convolution: {reason}")]
    ConvolutionNotSupported {
        /// What it says.
        reason: String,
    },
}
