//! The driver's functions that are called.

use crate::cuda::driver::{CudaError, Library};
use crate::cuda::library::loader::functions;
use cudarc::driver::sys;
use std::ffi::{CStr, c_char, c_int, c_uchar, c_uint, c_ulonglong, c_void};

functions! {
    /// The driver's functions.
    DriverFunctions of Library::Driver, cudarc::driver::sys {
        cuInit(c_uint) -> sys::CUresult;
        cuGetErrorString(sys::CUresult, *mut *const c_char) -> sys::CUresult;
        cuDeviceGetCount(*mut c_int) -> sys::CUresult;
        cuDeviceGet(*mut sys::CUdevice, c_int) -> sys::CUresult;
        cuDeviceGetAttribute(*mut c_int, sys::CUdevice_attribute, sys::CUdevice) -> sys::CUresult;
        cuDeviceGetName(*mut c_char, c_int, sys::CUdevice) -> sys::CUresult;
        cuDeviceTotalMem_v2(*mut usize, sys::CUdevice) -> sys::CUresult;
        cuDevicePrimaryCtxRetain(*mut sys::CUcontext, sys::CUdevice) -> sys::CUresult;
        cuCtxSetCurrent(sys::CUcontext) -> sys::CUresult;
        cuModuleLoadData(*mut sys::CUmodule, *const c_void) -> sys::CUresult;
        cuModuleGetFunction(*mut sys::CUfunction, sys::CUmodule, *const c_char) -> sys::CUresult;
        cuFuncGetAttribute(*mut c_int, sys::CUfunction_attribute, sys::CUfunction) -> sys::CUresult;
        cuFuncSetAttribute(sys::CUfunction, sys::CUfunction_attribute, c_int) -> sys::CUresult;
        cuLaunchKernel(
            sys::CUfunction, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, sys::CUstream, *mut *mut c_void,
            *mut *mut c_void,
        ) -> sys::CUresult;
        cuMemAlloc_v2(*mut sys::CUdeviceptr, usize) -> sys::CUresult;
        cuMemFree_v2(sys::CUdeviceptr) -> sys::CUresult;
        cuMemHostAlloc(*mut *mut c_void, usize, c_uint) -> sys::CUresult;
        cuMemFreeHost(*mut c_void) -> sys::CUresult;
        cuMemGetInfo_v2(*mut usize, *mut usize) -> sys::CUresult;
        cuMemcpyHtoDAsync_v2(sys::CUdeviceptr, *const c_void, usize, sys::CUstream) -> sys::CUresult;
        cuMemcpyDtoHAsync_v2(*mut c_void, sys::CUdeviceptr, usize, sys::CUstream) -> sys::CUresult;
        cuMemsetD8Async(sys::CUdeviceptr, c_uchar, usize, sys::CUstream) -> sys::CUresult;
        cuStreamCreate(*mut sys::CUstream, c_uint) -> sys::CUresult;
        cuStreamSynchronize(sys::CUstream) -> sys::CUresult;
        cuStreamWaitEvent(sys::CUstream, sys::CUevent, c_uint) -> sys::CUresult;
        cuStreamBeginCapture_v2(sys::CUstream, sys::CUstreamCaptureMode) -> sys::CUresult;
        cuStreamEndCapture(sys::CUstream, *mut sys::CUgraph) -> sys::CUresult;
        cuEventCreate(*mut sys::CUevent, c_uint) -> sys::CUresult;
        cuEventRecord(sys::CUevent, sys::CUstream) -> sys::CUresult;
        cuEventSynchronize(sys::CUevent) -> sys::CUresult;
        cuEventElapsedTime_v2(*mut f32, sys::CUevent, sys::CUevent) -> sys::CUresult;
        cuGraphInstantiateWithFlags(*mut sys::CUgraphExec, sys::CUgraph, c_ulonglong) -> sys::CUresult;
        cuGraphDestroy(sys::CUgraph) -> sys::CUresult;
        cuGraphLaunch(sys::CUgraphExec, sys::CUstream) -> sys::CUresult;
        cuGraphExecDestroy(sys::CUgraphExec) -> sys::CUresult;
    }
}

impl DriverFunctions {
    /// Converts a call's result; `action` is what was attempted.
    pub(super) fn checked(&self, action: &'static str, result: sys::CUresult) -> Result<(), CudaError> {
        if result == sys::CUresult::CUDA_SUCCESS {
            return Ok(());
        }
        let mut text = std::ptr::null();
        // SAFETY: the pointer is valid.
        let known = unsafe { (self.cuGetErrorString)(result, &mut text) };
        let reason = match known == sys::CUresult::CUDA_SUCCESS && !text.is_null() {
            // SAFETY: the driver's message is static, and ends with a zero byte.
            true => unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned(),
            false => format!("{result:?}"),
        };
        Err(CudaError::Call { action, reason })
    }
}
