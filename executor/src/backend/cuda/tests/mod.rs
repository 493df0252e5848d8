//! The CUDA backend without a GPU.
//!
//! The kernels' sources run on the CPU ([`emulator`]), NVRTC compiles them ([`compilation`]), and a
//! test device ([`device`]) implements the seam: it runs work as late as it may.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that fails may panic")]

mod compilation;
mod convolutions;
pub(crate) mod device;
pub(crate) mod emulator;
mod host_collectives;
mod launches;
pub(crate) mod limited_driver;
pub(crate) mod on_gpu;
mod reference_convolution;
mod reference_product;
