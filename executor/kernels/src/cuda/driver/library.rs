//! NVIDIA's libraries by name: purpose, and how to install each. Loading them is not this module's
//! business.

use std::fmt;

/// A library that the CUDA backend can use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Library {
    /// `libcuda`, which comes with the driver.
    Driver,
    /// `libnvrtc`, which compiles the kernels.
    Nvrtc,
    /// `libcublasLt`, for matrix products.
    CublasLt,
    /// `libcudnn`, for convolutions.
    Cudnn,
    /// `libnccl`, for communication between GPUs.
    Nccl,
}

impl Library {
    /// All libraries; those that the backend cannot work without come first.
    pub const ALL: [Self; 5] = [Self::Driver, Self::Nvrtc, Self::CublasLt, Self::Nccl, Self::Cudnn];

    /// Returns what the library is for and, if the backend works without it, what happens then.
    pub fn purpose(self) -> &'static str {
        match self {
            Self::Driver => "gives access to GPUs",
            Self::Nvrtc => "compiles the kernels for this machine's GPU",
            Self::CublasLt => "computes matrix products; without it they are slow",
            Self::Cudnn => {
                "computes convolutions in bf16, fp16 and tf32; without it they are matrix products over windows, which is slower"
            }
            Self::Nccl => "moves data between GPUs; without it data goes through host memory",
        }
    }

    /// Returns how to install the library.
    pub fn hint(self) -> &'static str {
        match self {
            Self::Driver => "install NVIDIA's driver",
            Self::Nvrtc => "`pip install nvidia-cuda-nvrtc`, and add its library folder to LD_LIBRARY_PATH",
            Self::CublasLt => "`pip install nvidia-cublas`, and add its library folder to LD_LIBRARY_PATH",
            Self::Cudnn => "`pip install nvidia-cudnn-cu13`, and add its library folder to LD_LIBRARY_PATH",
            Self::Nccl => "`pip install nvidia-nccl-cu13`, and add its library folder to LD_LIBRARY_PATH",
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
