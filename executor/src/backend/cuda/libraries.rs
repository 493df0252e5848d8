//! NVIDIA's libraries: whether each can be loaded, and what version it is. None is linked: all are looked for when they are needed, and a
//! machine without them says so.

use super::nvidia::Nccl;
use cudarc::{cublaslt, cudnn, driver, nvrtc};
use std::fmt;

/// The oldest cuDNN whose calls are those that are made, as it says itself.
pub(super) const OLDEST_CUDNN: u64 = 90_000;

/// A version of cuDNN's as people write it, of the number that it says: 91900 is 9.19.0, and 8905, before cuDNN 9, 8.9.5.
pub(super) fn cudnn_version(version: u64) -> String {
    dotted(version, if version < OLDEST_CUDNN { 1000 } else { 10_000 })
}

/// A version as people write it, of a number in which the major one counts so much, and the minor one a hundred.
fn dotted(version: u64, major: u64) -> String {
    format!("{}.{}.{}", version / major, version % major / 100, version % 100)
}

/// A library that the executor can use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Library {
    /// `libcuda`, which the driver brings.
    Driver,
    /// `libnvrtc`, which compiles the kernels.
    Nvrtc,
    /// `libcublasLt`, which makes matrix products.
    CublasLt,
    /// `libcudnn`.
    Cudnn,
    /// `libnccl`, by which GPUs reach each other.
    Nccl,
}

impl Library {
    /// All of them, those first that nothing works without.
    pub const ALL: [Self; 5] = [Self::Driver, Self::Nvrtc, Self::CublasLt, Self::Nccl, Self::Cudnn];

    /// Whether it can be loaded. Asked before any call: cudarc panics in a call into a library that is not there.
    pub fn is_present(self) -> bool {
        // SAFETY: loading these libraries runs their initialisers alone, which any CUDA program does.
        unsafe {
            match self {
                Self::Driver => driver::sys::is_culib_present(),
                Self::Nvrtc => nvrtc::sys::is_culib_present(),
                Self::CublasLt => cublaslt::sys::is_culib_present(),
                Self::Cudnn => cudnn::sys::is_culib_present(),
                Self::Nccl => Nccl::get().is_some(),
            }
        }
    }

    /// Its version, as it says itself.
    pub fn version(self) -> Option<String> {
        if !self.is_present() {
            return None;
        }
        match self {
            Self::Driver => {
                let mut version = 0;
                // SAFETY: the library is there, and the place is valid.
                unsafe { driver::sys::cuDriverGetVersion(&mut version) }.result().ok()?;
                Some(format!("CUDA {}.{}", version / 1000, version % 1000 / 10))
            }
            Self::Nvrtc => {
                let (mut major, mut minor) = (0, 0);
                // SAFETY: as above.
                unsafe { nvrtc::sys::nvrtcVersion(&mut major, &mut minor) }.result().ok()?;
                Some(format!("{major}.{minor}"))
            }
            Self::CublasLt => {
                // SAFETY: as above.
                let version = unsafe { cublaslt::sys::cublasLtGetVersion() };
                Some(dotted(version as u64, 10_000))
            }
            Self::Cudnn => {
                // SAFETY: as above.
                let version = unsafe { cudnn::sys::cudnnGetVersion() };
                Some(cudnn_version(version as u64))
            }
            Self::Nccl => {
                let version = Nccl::get()?.version()?;
                Some(dotted(u64::try_from(version).ok()?, 10_000))
            }
        }
    }

    /// What is wrong with it although it can be loaded: cuDNN's parts are files of their own, which need the driver and other libraries.
    pub fn fault(self) -> Option<String> {
        match self {
            Self::Cudnn if self.is_present() => super::nvidia::cudnn_fault(),
            _ => None,
        }
    }

    /// What it is for.
    pub fn purpose(self) -> &'static str {
        match self {
            Self::Driver => "reaches GPUs",
            Self::Nvrtc => "compiles the kernels for the GPU that is there",
            Self::CublasLt => "makes matrix products; without it they are slow",
            Self::Cudnn => {
                "makes convolutions in bf16, fp16 and tf32; without it they are products over windows, which is slower"
            }
            Self::Nccl => "moves data between GPUs; without it through the host",
        }
    }

    /// How to come by it.
    pub fn hint(self) -> &'static str {
        match self {
            Self::Driver => "install NVIDIA's driver",
            Self::Nvrtc => "`pip install nvidia-cuda-nvrtc`, and put its folder of libraries into LD_LIBRARY_PATH",
            Self::CublasLt => "`pip install nvidia-cublas`, and put its folder of libraries into LD_LIBRARY_PATH",
            Self::Cudnn => "`pip install nvidia-cudnn-cu13`, and put its folder of libraries into LD_LIBRARY_PATH",
            Self::Nccl => "`pip install nvidia-nccl-cu13`, and put its folder of libraries into LD_LIBRARY_PATH",
        }
    }
}

impl fmt::Display for Library {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Driver => "NVIDIA's driver (libcuda)",
            Self::Nvrtc => "NVRTC (libnvrtc)",
            Self::CublasLt => "cuBLASLt (libcublasLt)",
            Self::Cudnn => "cuDNN (libcudnn)",
            Self::Nccl => "NCCL (libnccl)",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_as_people_write_them() {
        assert_eq!([91900, 90000, 8905].map(cudnn_version), ["9.19.0", "9.0.0", "8.9.5"]);
        // NCCL's.
        assert_eq!(dotted(22805, 10_000), "2.28.5");
    }
}
