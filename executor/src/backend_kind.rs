//! The choice of backend for a whole run, as a launcher and the command line know it.

use crate::backend::Library;
use serde::{Deserialize, Serialize};

/// The backend that runs a run's kernels, and the devices that it uses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BackendKind {
    /// One CPU core per rank.
    #[default]
    Cpu,
    /// NVIDIA GPUs, one per rank. With fewer GPUs than ranks, several ranks share one: local rank
    /// `r` uses GPU `r % gpus`.
    Cuda {
        /// GPUs of this machine to use.
        gpus: usize,
    },
}

impl BackendKind {
    /// The name in reports and on the command line.
    pub fn name(self) -> &'static str {
        match self {
            BackendKind::Cpu => "cpu",
            BackendKind::Cuda { .. } => "cuda",
        }
    }

    /// Returns whether `world_size` ranks on one machine communicate by NCCL: if each rank has a
    /// GPU of its own and the library is installed.
    pub fn is_direct(self, world_size: usize) -> bool {
        matches!(self, BackendKind::Cuda { gpus } if world_size > 1 && world_size <= gpus) && Library::Nccl.is_present()
    }

    /// The GPU of the rank with this number on its machine; `None` on CPUs.
    pub(crate) fn gpu_of(self, local_rank: usize) -> Option<usize> {
        match self {
            BackendKind::Cpu => None,
            BackendKind::Cuda { gpus } => Some(local_rank % gpus.max(1)),
        }
    }
}
