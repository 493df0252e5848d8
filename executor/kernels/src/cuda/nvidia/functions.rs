//! Kernels as functions of loaded modules, looked up once.

use super::Handle;
use super::driver_functions::DriverFunctions;
use crate::cuda::driver::{CudaError, Launch};
use crate::cuda::kernels::{KernelSource, precision_number};
use cudarc::driver::sys::{self, CUfunction_attribute};
use std::collections::HashMap;
use std::ffi::CString;
use std::sync::{Mutex, PoisonError};

/// Bytes of shared memory that a block gets without asking, static and dynamic together.
const DEFAULT_SHARED: u32 = 48 * 1024;

/// A kernel, and the bytes of dynamic shared memory that its launches may use so far.
#[derive(Clone, Copy)]
struct LoadedFunction {
    function: Handle<sys::CUfunction>,
    shared: u32,
}

/// The modules and functions that one device has loaded. Every method expects that the device's
/// context is current.
#[derive(Default)]
pub(super) struct Functions {
    /// By source file and precision.
    modules: Mutex<HashMap<(&'static str, u32), Handle<sys::CUmodule>>>,
    /// By kernel and precision.
    functions: Mutex<HashMap<(&'static str, u32), LoadedFunction>>,
}

impl Functions {
    /// Returns the function of a launch, after raising its limit of dynamic shared memory if
    /// needed.
    pub(super) fn get(
        &self,
        driver: &DriverFunctions,
        launch: &Launch,
        capability: (u32, u32),
    ) -> Result<sys::CUfunction, CudaError> {
        let key = (launch.function, precision_number(launch.precision));
        let mut functions = self.functions.lock().unwrap_or_else(PoisonError::into_inner);
        let LoadedFunction { function, shared: limit } = match functions.get(&key) {
            Some(&known) => known,
            None => {
                let function = self.find(driver, launch, key.1, capability)?;
                let attribute = CUfunction_attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES;
                let mut declared = 0;
                // SAFETY: the function belongs to a loaded module, and the pointer is valid.
                driver.checked("reading a kernel's static shared memory", unsafe {
                    (driver.cuFuncGetAttribute)(&mut declared, attribute, function)
                })?;
                LoadedFunction { function: Handle(function), shared: DEFAULT_SHARED.saturating_sub(declared.max(0) as u32) }
            }
        };
        let shared = limit.max(launch.shared);
        if shared > limit {
            let attribute = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: the function belongs to a loaded module.
            let raised = unsafe { (driver.cuFuncSetAttribute)(function.0, attribute, shared as i32) };
            driver.checked("raising a kernel's limit of shared memory", raised)?;
        }
        functions.insert(key, LoadedFunction { function, shared });
        Ok(function.0)
    }

    /// Finds a kernel in its module, which is compiled and loaded if it is new.
    fn find(
        &self,
        driver: &DriverFunctions,
        launch: &Launch,
        precision: u32,
        capability: (u32, u32),
    ) -> Result<sys::CUfunction, CudaError> {
        let action = "looking up a kernel";
        let missing = || CudaError::Call { action, reason: format!("there is no kernel `{}`", launch.function) };
        let source = KernelSource::of(launch.function).ok_or_else(missing)?;
        let mut modules = self.modules.lock().unwrap_or_else(PoisonError::into_inner);
        let module = match modules.get(&(source.file, precision)) {
            Some(&known) => known,
            None => {
                let code = source.compiled(launch.precision, capability)?;
                let mut module = std::ptr::null_mut();
                // SAFETY: NVRTC compiled the code for this device, and the pointer is valid.
                driver.checked("loading kernels", unsafe { (driver.cuModuleLoadData)(&mut module, code.as_ptr().cast()) })?;
                modules.insert((source.file, precision), Handle(module));
                Handle(module)
            }
        };
        let name = CString::new(launch.function).map_err(|_| missing())?;
        let mut function = std::ptr::null_mut();
        // SAFETY: the module is loaded, and never unloaded; the name ends with a zero byte.
        driver.checked(action, unsafe { (driver.cuModuleGetFunction)(&mut function, module.0, name.as_ptr()) })?;
        Ok(function)
    }
}
