//! The CUDA backend without a GPU: its kernels' text runs on the processor ([`emulator`]), NVRTC compiles it ([`compilation`]), and the
//! seam's recording side ([`device`]) does what streams are told as late as it may.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that fails may panic")]

mod compilation;
mod convolutions;
mod convolving;
pub(crate) mod device;
pub(crate) mod emulator;
mod meeting;
pub(crate) mod on_gpu;
mod queueing;
