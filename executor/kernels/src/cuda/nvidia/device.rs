//! Discovery: starts NVIDIA's driver and describes its GPUs.

use super::driver_functions::DriverFunctions;
use crate::cuda::driver::{CudaError, DeviceDescription, Library};
use crate::cuda::library::versions;
use cudarc::driver::sys::{self, CUdevice_attribute};
use std::ffi::{CStr, c_int};

/// Oldest driver that has every function called here: CUDA 12.8.
const OLDEST_DRIVER: u64 = 12_080;

/// Describes all GPUs that the driver reports.
///
/// # Errors
/// [`CudaError`] if the driver is missing, too old, or fails.
pub fn devices() -> Result<Vec<DeviceDescription>, CudaError> {
    let (driver, count) = start()?;
    (0..count).map(|index| describe(driver, index as c_int).map(|(_, device)| device)).collect()
}

/// Starts the driver, and returns it with the number of its devices.
pub(super) fn start() -> Result<(&'static DriverFunctions, usize), CudaError> {
    // An old driver lacks functions. Its version says more than their absence does.
    let version = versions::number(Library::Driver).ok_or(CudaError::MissingLibrary { library: Library::Driver })?;
    if version < OLDEST_DRIVER {
        let reason = format!("it supports CUDA {}.{}, and 12.8 is required", version / 1000, version % 1000 / 10);
        return Err(CudaError::Call { action: "using the driver", reason });
    }
    let driver = DriverFunctions::get()?;
    // SAFETY: it may be called more than once.
    driver.checked("starting the driver", unsafe { (driver.cuInit)(0) })?;
    let mut count = 0;
    // SAFETY: the pointer is valid.
    driver.checked("counting GPUs", unsafe { (driver.cuDeviceGetCount)(&mut count) })?;
    Ok((driver, count.max(0) as usize))
}

/// Returns the device of an index, from 0, and its properties.
pub(super) fn describe(driver: &DriverFunctions, index: c_int) -> Result<(sys::CUdevice, DeviceDescription), CudaError> {
    let action = "reading a GPU's properties";
    let mut device = 0;
    // SAFETY: the pointer is valid; so below.
    driver.checked(action, unsafe { (driver.cuDeviceGet)(&mut device, index) })?;
    let attribute = |which| {
        let mut value = 0;
        // SAFETY: the driver just returned the device; so below.
        driver.checked(action, unsafe { (driver.cuDeviceGetAttribute)(&mut value, which, device) })?;
        Ok::<usize, CudaError>(value.max(0) as usize)
    };
    let major = attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
    let minor = attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
    let (mut name, mut memory) = ([0_u8; 256], 0);
    // SAFETY: the buffer has this length.
    driver.checked(action, unsafe { (driver.cuDeviceGetName)(name.as_mut_ptr().cast(), name.len() as c_int, device) })?;
    // SAFETY: the pointer is valid.
    driver.checked(action, unsafe { (driver.cuDeviceTotalMem_v2)(&mut memory, device) })?;
    let description = DeviceDescription {
        name: CStr::from_bytes_until_nul(&name).unwrap_or_default().to_string_lossy().into_owned(),
        capability: (major as u32, minor as u32),
        multiprocessors: attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        shared_memory: attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
        memory,
    };
    Ok((device, description))
}
