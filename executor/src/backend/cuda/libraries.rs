//! NVIDIA's libraries: whether each can be loaded, and what version it is. None is linked: all are looked for when they are needed, and a
//! machine without them says so.

use cudarc::{cublaslt, cudnn, driver, nccl, nvrtc};
use std::fmt;

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
                Self::Nccl => nccl::sys::is_culib_present(),
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
                Some(format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100))
            }
            Self::Cudnn => {
                // SAFETY: as above.
                let version = unsafe { cudnn::sys::cudnnGetVersion() };
                Some(format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100))
            }
            Self::Nccl => {
                let version = nccl::result::get_nccl_version().ok()?;
                Some(format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100))
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
            Self::Nccl => {
                "`pip install nvidia-nccl-cu13`, link its libnccl.so.2 as libnccl.so, and put the folder into LD_LIBRARY_PATH"
            }
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
