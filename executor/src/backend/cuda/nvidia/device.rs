//! Discovery: starts NVIDIA's driver and describes its GPUs.

use super::checked;
use crate::backend::cuda::driver::{CudaError, DeviceDescription, Library};
use cudarc::driver::result;
use cudarc::driver::sys::{self, CUdevice_attribute};

/// Oldest driver that has every function called here: CUDA 12.8.
const OLDEST_DRIVER: i32 = 12_080;

/// Describes all GPUs that the driver reports.
///
/// # Errors
/// [`CudaError`] if the driver is missing, too old, or fails.
pub fn devices() -> Result<Vec<DeviceDescription>, CudaError> {
    let count = start()?;
    (0..count).map(|index| describe(index as i32).map(|(_, device)| device)).collect()
}

/// Starts the driver, and returns how many devices it has.
pub(super) fn start() -> Result<usize, CudaError> {
    if !Library::Driver.is_present() {
        return Err(CudaError::MissingLibrary { library: Library::Driver });
    }
    let mut version = 0;
    // SAFETY: the library is present, and the pointer is valid.
    checked("reading the driver's version", unsafe { sys::cuDriverGetVersion(&mut version) }.result())?;
    if version < OLDEST_DRIVER {
        let reason = format!("it supports CUDA {}.{}, and 12.8 is required", version / 1000, version % 1000 / 10);
        return Err(CudaError::Call { action: "using the driver", reason });
    }
    checked("starting the driver", result::init())?;
    Ok(checked("counting GPUs", result::device::get_count())?.max(0) as usize)
}

/// Returns the device of an index, from 0, and its properties.
pub(super) fn describe(index: i32) -> Result<(sys::CUdevice, DeviceDescription), CudaError> {
    let action = "reading a GPU's properties";
    let device = checked(action, result::device::get(index))?;
    let attribute = |which| {
        // SAFETY: the driver just returned the device.
        checked(action, unsafe { result::device::get_attribute(device, which) }).map(|value| value.max(0) as usize)
    };
    let major = attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
    let minor = attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
    let description = DeviceDescription {
        name: checked(action, result::device::get_name(device))?,
        capability: (major as u32, minor as u32),
        multiprocessors: attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        shared_memory: attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
        // SAFETY: the driver just returned the device.
        memory: checked(action, unsafe { result::device::total_mem(device) })?,
    };
    Ok((device, description))
}
