//! cuDNN 9's backend interface (`cudnnBackend*`), as far as convolutions need it: descriptors that
//! are created, given attributes, and finalised. The types of attributes are those of
//! `cudnn_graph_v9.h`. It is a trait, so that tests can record the calls.

use super::{OLDEST_CUDNN, cudnn_version};
use crate::cuda::driver::{CudaError, Library};
use crate::cuda::library::loader::functions;
use crate::loading;
use cudarc::cudnn::sys;
use std::ffi::{CStr, OsStr, c_char, c_void};
use std::fmt;
pub(super) use sys::cudnnBackendAttributeName_t as Attribute;
use sys::cudnnBackendAttributeType_t as AttributeKind;
pub(super) use sys::cudnnBackendDescriptorType_t as DescriptorKind;

functions! {
    /// cuDNN's functions.
    CudnnFunctions of Library::Cudnn, cudarc::cudnn::sys {
        cudnnGetVersion() -> usize;
        cudnnGetCudartVersion() -> usize;
        cudnnGetLastErrorString(*mut c_char, usize);
        cudnnCreate(*mut sys::cudnnHandle_t) -> sys::cudnnStatus_t;
        cudnnSetStream(sys::cudnnHandle_t, sys::cudaStream_t) -> sys::cudnnStatus_t;
        cudnnBackendCreateDescriptor(
            sys::cudnnBackendDescriptorType_t, *mut sys::cudnnBackendDescriptor_t,
        ) -> sys::cudnnStatus_t;
        cudnnBackendDestroyDescriptor(sys::cudnnBackendDescriptor_t) -> sys::cudnnStatus_t;
        cudnnBackendSetAttribute(
            sys::cudnnBackendDescriptor_t, sys::cudnnBackendAttributeName_t, sys::cudnnBackendAttributeType_t, i64,
            *const c_void,
        ) -> sys::cudnnStatus_t;
        cudnnBackendFinalize(sys::cudnnBackendDescriptor_t) -> sys::cudnnStatus_t;
        cudnnBackendGetAttribute(
            sys::cudnnBackendDescriptor_t, sys::cudnnBackendAttributeName_t, sys::cudnnBackendAttributeType_t, i64, *mut i64,
            *mut c_void,
        ) -> sys::cudnnStatus_t;
        cudnnBackendExecute(
            sys::cudnnHandle_t, sys::cudnnBackendDescriptor_t, sys::cudnnBackendDescriptor_t,
        ) -> sys::cudnnStatus_t;
    }
}

/// The library's handle of a descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct RawDescriptor(pub(super) u64);

impl RawDescriptor {
    fn pointer(self) -> sys::cudnnBackendDescriptor_t {
        std::ptr::with_exposed_provenance_mut(self.0 as usize)
    }
}

/// The values of an attribute, in one of the types that cuDNN has for them.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum AttributeValues {
    Integers(Vec<i64>),
    Single(f32),
    DataType(sys::cudnnDataType_t),
    ConvolutionMode(sys::cudnnConvolutionMode_t),
    HeuristicMode(sys::cudnnBackendHeurMode_t),
    Descriptors(Vec<RawDescriptor>),
    /// Addresses in device memory.
    Pointers(Vec<u64>),
    /// A `cudnnHandle_t`, which is bound to a device.
    Handle(u64),
    /// Text, with a zero byte at its end.
    #[cfg(test)]
    Text(Vec<u8>),
}

impl AttributeValues {
    fn kind(&self) -> AttributeKind {
        match self {
            Self::Integers(_) => AttributeKind::CUDNN_TYPE_INT64,
            Self::Single(_) => AttributeKind::CUDNN_TYPE_FLOAT,
            Self::DataType(_) => AttributeKind::CUDNN_TYPE_DATA_TYPE,
            Self::ConvolutionMode(_) => AttributeKind::CUDNN_TYPE_CONVOLUTION_MODE,
            Self::HeuristicMode(_) => AttributeKind::CUDNN_TYPE_HEUR_MODE,
            Self::Descriptors(_) => AttributeKind::CUDNN_TYPE_BACKEND_DESCRIPTOR,
            Self::Pointers(_) => AttributeKind::CUDNN_TYPE_VOID_PTR,
            Self::Handle(_) => AttributeKind::CUDNN_TYPE_HANDLE,
            #[cfg(test)]
            Self::Text(_) => AttributeKind::CUDNN_TYPE_CHAR,
        }
    }

    /// Returns the number of values, and a pointer to them. Device addresses are as wide as
    /// pointers on every system that has cuDNN.
    fn elements(&self) -> (usize, *const c_void) {
        match self {
            Self::Integers(values) => (values.len(), values.as_ptr().cast()),
            Self::Single(value) => (1, (&raw const *value).cast()),
            Self::DataType(value) => (1, (&raw const *value).cast()),
            Self::ConvolutionMode(value) => (1, (&raw const *value).cast()),
            Self::HeuristicMode(value) => (1, (&raw const *value).cast()),
            Self::Descriptors(values) => (values.len(), values.as_ptr().cast()),
            Self::Pointers(values) => (values.len(), values.as_ptr().cast()),
            Self::Handle(value) => (1, (&raw const *value).cast()),
            #[cfg(test)]
            Self::Text(values) => (values.len(), values.as_ptr().cast()),
        }
    }
}

const _: () = assert!(size_of::<RawDescriptor>() == size_of::<*mut c_void>(), "a descriptor is passed as a pointer");

/// A call that cuDNN refused, and its message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct CudnnFailure {
    pub(super) call: &'static str,
    pub(super) reason: String,
}

impl fmt::Display for CudnnFailure {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}: {}", self.call, self.reason)
    }
}

/// The library's calls. Every descriptor that is passed came from `create`, and was not destroyed.
pub(super) trait CudnnApi: fmt::Debug + Send + Sync {
    /// Creates a descriptor.
    fn create(&self, kind: DescriptorKind) -> Result<RawDescriptor, CudnnFailure>;

    /// Destroys a descriptor.
    fn destroy(&self, descriptor: RawDescriptor);

    /// Sets an attribute. The library copies the values.
    fn set(&self, descriptor: RawDescriptor, attribute: Attribute, values: &AttributeValues) -> Result<(), CudnnFailure>;

    /// Finalises a descriptor: the library validates it, and it no longer changes.
    fn finalize(&self, descriptor: RawDescriptor) -> Result<(), CudnnFailure>;

    /// Returns an attribute that is one integer.
    fn integer(&self, descriptor: RawDescriptor, attribute: Attribute) -> Result<i64, CudnnFailure>;

    /// Returns the numerical notes of a finalised engine, as numbers: a newer library may have
    /// notes that the bindings lack.
    fn numerical_notes(&self, engine: RawDescriptor) -> Result<Vec<u32>, CudnnFailure>;

    /// Fills the descriptors `into` with an attribute's, and returns how many were filled.
    fn descriptors(&self, descriptor: RawDescriptor, attribute: Attribute, into: &[RawDescriptor])
    -> Result<usize, CudnnFailure>;

    /// Queues a plan on a stream.
    ///
    /// # Safety
    /// The pack's addresses are device memory, as long as the plan's tensors, and nothing else uses
    /// them until the work is done.
    unsafe fn execute(&self, plan: RawDescriptor, pack: RawDescriptor, stream: u64) -> Result<(), CudnnFailure>;
}

/// cuDNN itself.
#[derive(Debug)]
pub(super) struct LoadedCudnn {
    functions: &'static CudnnFunctions,
    /// A handle on the device that was current when it was created; 0 if no device is used.
    handle: u64,
    /// The stream that the handle is set to. The owner holds this structure behind a lock.
    stream: std::sync::atomic::AtomicU64,
}

impl CudnnFunctions {
    /// Returns the functions of a version that is new enough, after loading its own dependencies.
    fn get_usable() -> Result<&'static Self, CudnnFailure> {
        let missing = |error: CudaError| CudnnFailure { call: "loading cuDNN", reason: error.to_string() };
        let functions = Self::get().map_err(missing)?;
        // SAFETY: it has no arguments.
        check_version(unsafe { (functions.cudnnGetVersion)() } as u64)?;
        functions.load_cublas_lt()?;
        Ok(functions)
    }

    /// Loads cuBLASLt under the soname that cuDNN uses, which has the major version of cuDNN's
    /// CUDA. cuDNN 9 (seen with 9.19) ends the process if it cannot load cuBLASLt. It finds a
    /// library that is already loaded.
    fn load_cublas_lt(&self) -> Result<(), CudnnFailure> {
        // SAFETY: it has no arguments.
        let name = format!("libcublasLt.so.{}", unsafe { (self.cudnnGetCudartVersion)() } / 1000);
        // The backend's own cuBLASLt comes first, which may have this soname.
        let _ = Library::CublasLt.is_present();
        // SAFETY: cuBLASLt only sets up its own state when it is loaded. It stays loaded, for
        // cuDNN.
        unsafe { loading::open(OsStr::new(&name)) }.map(std::mem::forget).map_err(|reason| CudnnFailure {
            call: "loading cuDNN's dependencies",
            reason: format!("{name} cannot be loaded: {reason}"),
        })
    }

    /// Converts a status to a result; `call` is the function's name.
    fn checked(&self, call: &'static str, status: sys::cudnnStatus_t) -> Result<(), CudnnFailure> {
        if status == sys::cudnnStatus_t::CUDNN_STATUS_SUCCESS {
            return Ok(());
        }
        let mut message = [0; 512];
        // SAFETY: the buffer has this length, and the library ends its message with a zero byte.
        unsafe { (self.cudnnGetLastErrorString)(message.as_mut_ptr(), message.len()) };
        let bytes: Vec<u8> = message.iter().map(|&character| character as u8).collect();
        let message = CStr::from_bytes_until_nul(&bytes).map(CStr::to_string_lossy).unwrap_or_default();
        Err(CudnnFailure { call, reason: format!("{status:?} {message}").trim_end().to_owned() })
    }
}

/// Refuses versions that lack these calls. Check it before any other call: versions before 9 lack
/// even `cudnnGetLastErrorString`.
pub(super) fn check_version(version: u64) -> Result<(), CudnnFailure> {
    let reason = || format!("{} is older than cuDNN 9", cudnn_version(version));
    if version < OLDEST_CUDNN { Err(CudnnFailure { call: "checking its version", reason: reason() }) } else { Ok(()) }
}

/// The failure of an attribute with an unexpected number of values.
fn unexpected_count(count: i64, expected: &str) -> CudnnFailure {
    CudnnFailure { call: "cudnnBackendGetAttribute", reason: format!("it returned {count} values, and not {expected}") }
}

impl LoadedCudnn {
    /// Creates a handle on the current device.
    pub(super) fn for_device() -> Result<Self, CudnnFailure> {
        let functions = CudnnFunctions::get_usable()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: a device is current, and the pointer is valid.
        functions.checked("cudnnCreate", unsafe { (functions.cudnnCreate)(&mut handle) })?;
        Ok(Self { functions, handle: handle.expose_provenance() as u64, stream: 0.into() })
    }

    /// Loads cuDNN without a device: descriptors can be built, but nothing can be executed.
    pub(super) fn without_device() -> Result<Self, CudnnFailure> {
        Ok(Self { functions: CudnnFunctions::get_usable()?, handle: 0, stream: 0.into() })
    }

    /// Returns the handle; 0 without a device.
    pub(super) fn handle(&self) -> u64 {
        self.handle
    }

    fn pointer(&self) -> sys::cudnnHandle_t {
        std::ptr::with_exposed_provenance_mut(self.handle as usize)
    }
}

impl CudnnApi for LoadedCudnn {
    fn create(&self, kind: DescriptorKind) -> Result<RawDescriptor, CudnnFailure> {
        let mut descriptor = std::ptr::null_mut();
        // SAFETY: the pointer is valid.
        self.functions.checked("cudnnBackendCreateDescriptor", unsafe {
            (self.functions.cudnnBackendCreateDescriptor)(kind, &mut descriptor)
        })?;
        Ok(RawDescriptor(descriptor.expose_provenance() as u64))
    }

    fn destroy(&self, descriptor: RawDescriptor) {
        // SAFETY: the descriptor is the library's, and nothing uses it any more. A failure leaks
        // it.
        let _ = unsafe { (self.functions.cudnnBackendDestroyDescriptor)(descriptor.pointer()) };
    }

    fn set(&self, descriptor: RawDescriptor, attribute: Attribute, values: &AttributeValues) -> Result<(), CudnnFailure> {
        let (count, pointer) = values.elements();
        // SAFETY: the descriptor is the library's, and `count` values of that type are at the
        // pointer.
        let status = unsafe {
            (self.functions.cudnnBackendSetAttribute)(descriptor.pointer(), attribute, values.kind(), count as i64, pointer)
        };
        self.functions.checked("cudnnBackendSetAttribute", status)
    }

    fn finalize(&self, descriptor: RawDescriptor) -> Result<(), CudnnFailure> {
        // SAFETY: the descriptor is the library's.
        self.functions.checked("cudnnBackendFinalize", unsafe { (self.functions.cudnnBackendFinalize)(descriptor.pointer()) })
    }

    fn integer(&self, descriptor: RawDescriptor, attribute: Attribute) -> Result<i64, CudnnFailure> {
        let (mut value, mut count) = (0_i64, 0_i64);
        let kind = AttributeKind::CUDNN_TYPE_INT64;
        // SAFETY: the descriptor is the library's, and the one value that is asked for fits.
        let status = unsafe {
            (self.functions.cudnnBackendGetAttribute)(
                descriptor.pointer(),
                attribute,
                kind,
                1,
                &mut count,
                (&raw mut value).cast(),
            )
        };
        self.functions.checked("cudnnBackendGetAttribute", status)?;
        // An unwritten value would read as 0, for example as no workspace.
        if count == 1 { Ok(value) } else { Err(unexpected_count(count, "one value")) }
    }

    fn numerical_notes(&self, engine: RawDescriptor) -> Result<Vec<u32>, CudnnFailure> {
        let (mut notes, mut count) = ([0_u32; 32], 0_i64);
        let (attribute, kind) = (Attribute::CUDNN_ATTR_ENGINE_NUMERICAL_NOTE, AttributeKind::CUDNN_TYPE_NUMERICAL_NOTE);
        let limit = notes.len() as i64;
        // SAFETY: as above; a note is a C enumeration, as wide as these numbers.
        let status = unsafe {
            (self.functions.cudnnBackendGetAttribute)(
                engine.pointer(),
                attribute,
                kind,
                limit,
                &mut count,
                notes.as_mut_ptr().cast(),
            )
        };
        self.functions.checked("cudnnBackendGetAttribute", status)?;
        // A note that does not fit may be one that rules the engine out.
        if (0..=limit).contains(&count) {
            Ok(notes.into_iter().take(count as usize).collect())
        } else {
            Err(unexpected_count(count, "at most 32 notes"))
        }
    }

    fn descriptors(
        &self,
        descriptor: RawDescriptor,
        attribute: Attribute,
        into: &[RawDescriptor],
    ) -> Result<usize, CudnnFailure> {
        let (mut raw, mut count) = (into.to_vec(), 0_i64);
        let (kind, limit) = (AttributeKind::CUDNN_TYPE_BACKEND_DESCRIPTOR, into.len() as i64);
        // SAFETY: as above; the descriptors that are filled are of the kind that is asked for.
        let status = unsafe {
            let raw = raw.as_mut_ptr().cast();
            (self.functions.cudnnBackendGetAttribute)(descriptor.pointer(), attribute, kind, limit, &mut count, raw)
        };
        self.functions.checked("cudnnBackendGetAttribute", status)?;
        Ok((count.max(0) as usize).min(into.len()))
    }

    unsafe fn execute(&self, plan: RawDescriptor, pack: RawDescriptor, stream: u64) -> Result<(), CudnnFailure> {
        use std::sync::atomic::Ordering;
        if self.stream.load(Ordering::Relaxed) != stream {
            let pointer: sys::cudaStream_t = std::ptr::with_exposed_provenance_mut(stream as usize);
            // SAFETY: the handle and the stream belong to this device's context.
            self.functions.checked("cudnnSetStream", unsafe { (self.functions.cudnnSetStream)(self.pointer(), pointer) })?;
            self.stream.store(stream, Ordering::Relaxed);
        }
        // SAFETY: the caller's promise.
        let status = unsafe { (self.functions.cudnnBackendExecute)(self.pointer(), plan.pointer(), pack.pointer()) };
        self.functions.checked("cudnnBackendExecute", status)
    }
}
