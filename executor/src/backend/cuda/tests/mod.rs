//! The CUDA backend without a GPU.
//!
//! The kernels' sources run on the CPU ([`emulator`]), NVRTC compiles them ([`compilation`]), and a
//! test device ([`device`]) implements the seam: it runs work as late as it may.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that fails may panic")]

use super::LaunchLimits;

/// Limits with which small operands are copied and split too.
pub(crate) const SMALL_LIMITS: LaunchLimits =
    LaunchLimits { min_aligned_multiplications: 1, max_aligned_bytes: 1 << 10, max_column_bytes: 1 << 14 };

mod compilation;
mod convolutions;
pub(crate) mod device;
pub(crate) mod emulator;
mod faults;
mod host_collectives;
mod launches;
pub(crate) mod limited_driver;
pub(crate) mod on_gpu;
mod reference_convolution;
mod reference_product;
mod resources;
