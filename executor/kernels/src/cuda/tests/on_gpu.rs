//! A real GPU as the tests of backends use it. Operands are in host memory, and are copied to the
//! GPU and back around each call.

use super::limited_driver::{LimitedDriver, ProductSupport};
use crate::cuda::{CudaBackend, DeviceAddress, Driver, GpuTransport, NvidiaDriver};
use crate::{Backend, BackendError, KernelCall, Operand};
use std::sync::Arc;

/// Environment variable with the index of the GPU that kernel tests run on, instead of the
/// emulator.
const GPU: &str = "FORETELL_TEST_GPU";

/// The CUDA backend on a GPU.
pub struct GpuBackend {
    backend: CudaBackend,
    driver: Arc<dyn Driver>,
}

impl GpuBackend {
    /// Returns `true` if tests are to run on a GPU.
    pub fn is_requested() -> bool {
        std::env::var_os(GPU).is_some()
    }

    /// Opens the requested GPU, if any, with these of the library's products, and cuDNN only with
    /// all of them.
    pub fn with_products(products: ProductSupport) -> Option<Self> {
        let driver = Self::driver()?;
        Some(match products {
            ProductSupport::Full => Self::on(driver),
            _ => Self::on(LimitedDriver { driver, products, has_convolutions: false }),
        })
    }

    /// Opens the requested GPU, if any, with all of the library's products and without cuDNN.
    pub fn without_convolutions() -> Option<Self> {
        let products = ProductSupport::Full;
        Some(Self::on(LimitedDriver { driver: Self::driver()?, products, has_convolutions: false }))
    }

    /// Opens the requested GPU's driver, if any.
    pub fn driver() -> Option<NvidiaDriver> {
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
            let is_same =
                |(known, _): &&(Operand, DeviceAddress)| known.pointer == operand.pointer && known.bytes == operand.bytes;
            let address = match copies.iter().find(is_same) {
                Some((_, address)) => *address,
                None => {
                    let address = self.driver.allocate(operand.bytes).unwrap();
                    // SAFETY: the operand is valid, and the memory was just allocated, with its
                    // length.
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
                // SAFETY: the operand is the caller's to write, and has the copy's length.
                unsafe { self.driver.copy_out(operand.pointer, address, operand.bytes, stream) }.unwrap();
            }
            self.driver.synchronize(stream).unwrap();
            // SAFETY: the memory is this call's own, and the stream is done.
            unsafe { self.driver.free(address) };
        }
        result
    }
}
