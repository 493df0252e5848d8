//! A real GPU as the tests of backends use it: what they hand over lies in the host's memory, and is copied there and back around each call.

use super::limited_driver::{LimitedDriver, ProductSupport};
use crate::backend::cuda::{CudaBackend, DeviceAddress, Driver, GpuTransport, NvidiaDriver};
use crate::backend::{Backend, BackendError, KernelCall, Operand};
use std::sync::Arc;

/// Set to a GPU's index where the tests of kernels are to run on it, instead of on the processor.
const GPU: &str = "FORETELL_TEST_GPU";

/// The CUDA backend on a GPU.
pub(crate) struct GpuBackend {
    backend: CudaBackend,
    driver: Arc<dyn Driver>,
}

impl GpuBackend {
    /// Whether one was asked for.
    pub(crate) fn is_wanted() -> bool {
        std::env::var_os(GPU).is_some()
    }

    /// On the GPU that was asked for, if one was; with these of the library's products, and cuDNN's convolutions with all of them.
    pub(crate) fn wanted(makes: ProductSupport) -> Option<Self> {
        let driver = Self::driver()?;
        Some(match makes {
            ProductSupport::Products => Self::on(driver),
            _ => Self::on(LimitedDriver { driver, makes, has_convolutions: false }),
        })
    }

    /// The same with the library's products, and without cuDNN.
    pub(crate) fn wanted_without_convolutions() -> Option<Self> {
        Some(Self::on(LimitedDriver { driver: Self::driver()?, makes: ProductSupport::Products, has_convolutions: false }))
    }

    /// The driver of the GPU that was asked for, if one was.
    pub(crate) fn driver() -> Option<NvidiaDriver> {
        let index = std::env::var(GPU).ok()?.parse().unwrap();
        Some(NvidiaDriver::open(index, GpuTransport::Host).unwrap())
    }

    fn on(driver: impl Driver + 'static) -> Self {
        let driver: Arc<dyn Driver> = Arc::new(driver);
        Self { backend: CudaBackend::new(Arc::clone(&driver)).unwrap(), driver }
    }
}

impl Backend for GpuBackend {
    fn name(&self) -> &'static str {
        self.backend.name()
    }

    unsafe fn run(&mut self, call: &KernelCall<'_>) -> Result<(), BackendError> {
        let stream = self.backend.stream();
        let mut copies: Vec<(Operand, DeviceAddress)> = Vec::new();
        let mut copy = |operand: &Operand| {
            let same = |(known, _): &&(Operand, DeviceAddress)| known.pointer == operand.pointer && known.bytes == operand.bytes;
            let address = match copies.iter().find(same) {
                Some((_, address)) => *address,
                None => {
                    let address = self.driver.allocate(operand.bytes).unwrap();
                    // SAFETY: the operand is valid, and the memory was just allocated, of its length.
                    unsafe { self.driver.copy_in(address, operand.pointer, operand.bytes, stream) }.unwrap();
                    copies.push((*operand, address));
                    address
                }
            };
            Operand { pointer: address.pointer(), bytes: operand.bytes }
        };
        let reads: Vec<Operand> = call.reads.iter().map(&mut copy).collect();
        let writes: Vec<Operand> = call.writes.iter().map(&mut copy).collect();
        // SAFETY: the operands are copies of the caller's.
        let result = unsafe { self.backend.run(&KernelCall { reads: &reads, writes: &writes, ..*call }) };
        for (operand, address) in copies {
            let is_written = call.writes.iter().any(|write| write.pointer == operand.pointer);
            if is_written && result.is_ok() {
                // SAFETY: the operand is the caller's to write, and as long as the copy.
                unsafe { self.driver.copy_out(operand.pointer, address, operand.bytes, stream) }.unwrap();
            }
            self.driver.synchronize(stream).unwrap();
            // SAFETY: the memory is this call's own, and the stream is done.
            unsafe { self.driver.free(address) };
        }
        result
    }
}
