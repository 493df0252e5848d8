//! The CUDA backend: kernels of its own (`kernels/*.cu`, compiled by NVRTC for the machine's GPU),
//! matrix products by cuBLASLt, convolutions by cuDNN, and communication between GPUs by NCCL.
//!
//! Each folder imports only folders before it in this list: `driver` is the seam to the device,
//! `library` binds NVIDIA's libraries, `kernels` compiles the sources, `nvidia` implements the
//! seam, `launch` turns a kernel call into launches, and `timer` times calls.
//!
//! Results are deterministic: equal sizes give the same order of every sum, and no kernel adds
//! atomically. Nothing here knows Programs, ranks or layouts.

mod driver;
mod kernels;
mod launch;
mod library;
mod nvidia;
#[cfg(any(test, feature = "testing"))]
pub mod tests;
mod timer;

pub use driver::{
    CommunicationKind, CommunicatorHandle, CommunicatorId, DeviceAddress, DeviceCommunication, DeviceRange, Driver, EventHandle,
    GraphHandle, StreamHandle,
};
pub use driver::{CudaError, DeviceDescription, Library};
pub use launch::CudaBackend;
#[cfg(any(test, feature = "testing"))]
pub use launch::LaunchLimits;
pub use nvidia::devices;
pub use nvidia::{GpuTransport, NvidiaDriver};
pub use timer::{CudaTimer, StreamTimer};
