//! The CUDA backend without a GPU.
//!
//! The kernels' sources run on the CPU (`emulator`), NVRTC compiles them (`compilation`), and a
//! test device (`device`) implements the seam: it runs work as late as it may.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that fails may panic")]
#![allow(missing_docs, reason = "tests of this crate and of the executor see it, users do not")]

use super::LaunchLimits;

/// Limits with which small operands are copied and split too.
pub const SMALL_LIMITS: LaunchLimits =
    LaunchLimits { min_aligned_multiplications: 1, max_aligned_bytes: 1 << 10, max_column_bytes: 1 << 14 };

#[cfg(test)]
mod compilation;
#[cfg(test)]
mod convolutions;
pub mod device;
pub mod emulator;
#[cfg(test)]
mod faults;
mod host_collectives;
#[cfg(test)]
mod launches;
pub mod limited_driver;
pub mod on_gpu;
mod reference_convolution;
mod reference_product;
#[cfg(test)]
mod resources;
