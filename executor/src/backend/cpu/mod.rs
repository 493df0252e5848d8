//! The CPU backend.
use super::{Backend, BackendError, KernelCall, operands};

/// Runs kernels in single precision on one core.
#[derive(Debug, Default)]
pub struct CpuBackend {}

impl CpuBackend {
    /// A backend without scratch memory yet.
    pub fn new() -> Self {
        Self::default()
    }
}

impl Backend for CpuBackend {
    fn name(&self) -> &'static str {
        "cpu"
    }

    unsafe fn run(&mut self, call: &KernelCall<'_>) -> Result<(), BackendError> {
        operands::check(call)
    }
}
