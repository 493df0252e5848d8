//! NVIDIA's libraries: whether each can be loaded, its version, and what cuBLASLt, cuDNN and NCCL
//! are asked for. Nothing is linked. A library is loaded when it is first needed, and a machine
//! without it gets an error that names it.
//!
//! These modules know the seam's types ([`super::driver`]), and not the driver itself: the caller
//! makes the device's context current.

mod cublaslt;
mod cudnn;
pub(super) mod loader;
mod nccl;
pub(super) mod versions;

pub(super) use cublaslt::CublasLt;
pub(super) use cudnn::Cudnn;
pub(super) use nccl::Communicators;

use super::driver::Library;
use std::path::Path;

/// Oldest cuDNN whose backend interface is used here, as `cudnnGetVersion` reports it.
const OLDEST_CUDNN: u64 = 90_000;

/// Formats cuDNN's version number: 91900 is 9.19.0, and 8905, from before cuDNN 9, is 8.9.5.
fn cudnn_version(version: u64) -> String {
    dotted(version, if version < OLDEST_CUDNN { 1000 } else { 10_000 })
}

/// Formats a version number in which the minor version counts 100 and the major one `major`.
fn dotted(version: u64, major: u64) -> String {
    format!("{}.{}.{}", version / major, version % major / 100, version % 100)
}

impl Library {
    /// Returns `true` if the library can be loaded.
    pub fn is_present(self) -> bool {
        loader::get(self).is_some()
    }

    /// Returns the file that the library was loaded from; `None` if it cannot be loaded.
    pub fn file(self) -> Option<&'static Path> {
        Some(&loader::get(self)?.path)
    }

    /// Returns the version that the library reports; `None` if it cannot be loaded.
    pub fn version(self) -> Option<String> {
        let number = versions::number(self)?;
        Some(match self {
            Self::Driver => format!("CUDA {}.{}", number / 1000, number % 1000 / 10),
            Self::Nvrtc => format!("{}.{}", number / 1000, number % 1000),
            Self::CublasLt | Self::Nccl => dotted(number, 10_000),
            Self::Cudnn => cudnn_version(number),
        })
    }

    /// Returns why a library cannot be used although it can be loaded; `None` if it can be used.
    /// Only cuDNN is checked: its parts are separate files, which need the driver and cuBLASLt.
    pub fn fault(self) -> Option<String> {
        match self {
            Self::Cudnn if self.is_present() => cudnn::load_error(),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn version_numbers_are_formatted_with_dots() {
        assert_eq!([91900, 90000, 8905].map(cudnn_version), ["9.19.0", "9.0.0", "8.9.5"]);
        // NCCL's.
        assert_eq!(dotted(22805, 10_000), "2.28.5");
    }
}
