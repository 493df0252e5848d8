//! cuDNN's backend interface (`cudnnBackend*`, cuDNN 9), as far as convolutions need it: descriptors that are made, told their attributes, and
//! finalised. A trait, so that tests see each call; what attributes are of which type is NVIDIA's header's (`cudnn_graph_v9.h`).

use crate::backend::cuda::libraries::{OLDEST_CUDNN, cudnn_version};
use crate::loading;
use cudarc::cudnn::sys;
use std::ffi::{CStr, OsStr, c_void};
use std::fmt;
pub(super) use sys::cudnnBackendAttributeName_t as Attribute;
use sys::cudnnBackendAttributeType_t as AttributeKind;
pub(super) use sys::cudnnBackendDescriptorType_t as DescriptorKind;

/// A descriptor of the library's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Raw(pub(super) u64);

impl Raw {
    fn pointer(self) -> sys::cudnnBackendDescriptor_t {
        std::ptr::with_exposed_provenance_mut(self.0 as usize)
    }
}

/// The values of an attribute, of the type that the library knows them by.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Values {
    Integers(Vec<i64>),
    Single(f32),
    DataType(sys::cudnnDataType_t),
    ConvolutionMode(sys::cudnnConvolutionMode_t),
    HeuristicMode(sys::cudnnBackendHeurMode_t),
    Descriptors(Vec<Raw>),
    /// Of the device's memory.
    Pointers(Vec<u64>),
    /// The library's own handle, which is bound to a device.
    Handle(u64),
    /// Text, with the zero at its end.
    #[cfg(test)]
    Text(Vec<u8>),
}

impl Values {
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

    /// How many there are, and where they lie. Addresses are as wide as pointers on every system that has cuDNN.
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

const _: () = assert!(size_of::<Raw>() == size_of::<*mut c_void>(), "a descriptor is handed over as a pointer");

/// What the library said when it did not do what it was asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Failure {
    pub(super) doing: &'static str,
    pub(super) reason: String,
}

impl fmt::Display for Failure {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}: {}", self.doing, self.reason)
    }
}

/// The calls. Descriptors are those that `create` gave and `destroy` has not taken.
pub(super) trait Calls: fmt::Debug + Send + Sync {
    /// A new descriptor.
    fn create(&self, kind: DescriptorKind) -> Result<Raw, Failure>;

    /// Gives it back.
    fn destroy(&self, descriptor: Raw);

    /// Sets an attribute; the library copies the values.
    fn set(&self, descriptor: Raw, attribute: Attribute, values: &Values) -> Result<(), Failure>;

    /// Has the library look at all that was set: after it the descriptor does not change.
    fn finalize(&self, descriptor: Raw) -> Result<(), Failure>;

    /// An attribute that is one whole number.
    fn integer(&self, descriptor: Raw, attribute: Attribute) -> Result<i64, Failure>;

    /// The numerical notes of a finalised engine, as numbers: a newer library has some that the bindings do not know.
    fn numerical_notes(&self, engine: Raw) -> Result<Vec<u32>, Failure>;

    /// Has descriptors become those of an attribute, as many as there are at most; how many became so.
    fn descriptors(&self, descriptor: Raw, attribute: Attribute, into: &[Raw]) -> Result<usize, Failure>;

    /// Queues a plan's work on a stream.
    ///
    /// # Safety
    /// The pack's addresses are memory of the device, as long as its tensors say, and nobody else's until the work is done.
    unsafe fn execute(&self, plan: Raw, pack: Raw, stream: u64) -> Result<(), Failure>;
}

/// The library itself.
#[derive(Debug)]
pub(super) struct Loaded {
    /// Bound to the device that was current when it was made; zero where only descriptors are made.
    handle: u64,
    /// The stream that the handle was told last. Behind the lock of whoever owns this.
    stream: std::sync::atomic::AtomicU64,
}

/// What a call came to; `doing` is the call's name.
fn called(doing: &'static str, status: sys::cudnnStatus_t) -> Result<(), Failure> {
    if status == sys::cudnnStatus_t::CUDNN_STATUS_SUCCESS {
        return Ok(());
    }
    let mut message = [0; 512];
    // SAFETY: the buffer is as long as it is said to be; the library ends what it writes with a zero.
    unsafe { sys::cudnnGetLastErrorString(message.as_mut_ptr(), message.len()) };
    let bytes: Vec<u8> = message.iter().map(|&character| character as u8).collect();
    let message = CStr::from_bytes_until_nul(&bytes).map(CStr::to_string_lossy).unwrap_or_default();
    Err(Failure { doing, reason: format!("{status:?} {message}").trim_end().to_owned() })
}

/// Whether a version of the library has these calls. An older one has not even words for its failures (`cudnnGetLastErrorString`), so it is asked for
/// its version before anything else.
pub(super) fn new_enough(version: u64) -> Result<(), Failure> {
    let reason = || format!("{} is older than cuDNN 9", cudnn_version(version));
    if version < OLDEST_CUDNN { Err(Failure { doing: "looking at its version", reason: reason() }) } else { Ok(()) }
}

/// Whether the library is one that these calls are for, and has what it needs.
fn usable() -> Result<(), Failure> {
    // SAFETY: the library is there.
    new_enough(unsafe { sys::cudnnGetVersion() } as u64)?;
    have_cublas_lt()
}

/// Loads cuBLASLt under the name by which cuDNN looks for it, which follows from the CUDA that it was built with: cuDNN 9 (seen with 9.19) ends the
/// process where it does not find it, and finds what is loaded already.
fn have_cublas_lt() -> Result<(), Failure> {
    // SAFETY: the library is there.
    let name = format!("libcublasLt.so.{}", unsafe { sys::cudnnGetCudartVersion() } / 1000);
    // SAFETY: cuBLASLt only sets up its own state when it is loaded. It stays loaded: cuDNN uses it.
    unsafe { loading::open(OsStr::new(&name)) }
        .map(std::mem::forget)
        .map_err(|reason| Failure { doing: "looking for what cuDNN needs", reason: format!("{name} cannot be loaded: {reason}") })
}

/// Of an attribute that has more or fewer values than is known.
fn unexpected(count: i64, known: &str) -> Failure {
    Failure { doing: "cudnnBackendGetAttribute", reason: format!("{count} values, and not {known}") }
}

impl Loaded {
    /// For the current device. The library is there.
    pub(super) fn for_device() -> Result<Self, Failure> {
        usable()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: the library is there, a device is current, and the place is valid.
        called("cudnnCreate", unsafe { sys::cudnnCreate(&mut handle) })?;
        Ok(Self { handle: handle.expose_provenance() as u64, stream: 0.into() })
    }

    /// For descriptors alone, without a device. The library is there.
    pub(super) fn without_device() -> Result<Self, Failure> {
        usable()?;
        Ok(Self { handle: 0, stream: 0.into() })
    }

    /// What plans are made for: the handle's device.
    pub(super) fn handle(&self) -> u64 {
        self.handle
    }

    fn pointer(&self) -> sys::cudnnHandle_t {
        std::ptr::with_exposed_provenance_mut(self.handle as usize)
    }
}

impl Calls for Loaded {
    fn create(&self, kind: DescriptorKind) -> Result<Raw, Failure> {
        let mut descriptor = std::ptr::null_mut();
        // SAFETY: the library is there, and the place is valid.
        called("cudnnBackendCreateDescriptor", unsafe { sys::cudnnBackendCreateDescriptor(kind, &mut descriptor) })?;
        Ok(Raw(descriptor.expose_provenance() as u64))
    }

    fn destroy(&self, descriptor: Raw) {
        // SAFETY: the descriptor is the library's, and is not used any more. What it says changes nothing.
        let _ = unsafe { sys::cudnnBackendDestroyDescriptor(descriptor.pointer()) };
    }

    fn set(&self, descriptor: Raw, attribute: Attribute, values: &Values) -> Result<(), Failure> {
        let (count, place) = values.elements();
        // SAFETY: the descriptor is the library's, and so many values of that type lie there.
        let status =
            unsafe { sys::cudnnBackendSetAttribute(descriptor.pointer(), attribute, values.kind(), count as i64, place) };
        called("cudnnBackendSetAttribute", status)
    }

    fn finalize(&self, descriptor: Raw) -> Result<(), Failure> {
        // SAFETY: the descriptor is the library's.
        called("cudnnBackendFinalize", unsafe { sys::cudnnBackendFinalize(descriptor.pointer()) })
    }

    fn integer(&self, descriptor: Raw, attribute: Attribute) -> Result<i64, Failure> {
        let (mut value, mut count) = (0_i64, 0_i64);
        let kind = AttributeKind::CUDNN_TYPE_INT64;
        // SAFETY: the descriptor is the library's; there is room for the one value that is asked for.
        let status = unsafe {
            sys::cudnnBackendGetAttribute(descriptor.pointer(), attribute, kind, 1, &mut count, (&raw mut value).cast())
        };
        called("cudnnBackendGetAttribute", status)?;
        // What was not written would be taken for nothing: of a workspace, for needing none.
        if count == 1 { Ok(value) } else { Err(unexpected(count, "one value")) }
    }

    fn numerical_notes(&self, engine: Raw) -> Result<Vec<u32>, Failure> {
        let (mut notes, mut count) = ([0_u32; 32], 0_i64);
        let (attribute, kind) = (Attribute::CUDNN_ATTR_ENGINE_NUMERICAL_NOTE, AttributeKind::CUDNN_TYPE_NUMERICAL_NOTE);
        let most = notes.len() as i64;
        // SAFETY: as above; a note is an enumeration of C's, as wide as these numbers.
        let status = unsafe {
            sys::cudnnBackendGetAttribute(engine.pointer(), attribute, kind, most, &mut count, notes.as_mut_ptr().cast())
        };
        called("cudnnBackendGetAttribute", status)?;
        // One that is not seen may be one that is not admissible.
        if (0..=most).contains(&count) {
            Ok(notes.into_iter().take(count as usize).collect())
        } else {
            Err(unexpected(count, "at most 32 notes"))
        }
    }

    fn descriptors(&self, descriptor: Raw, attribute: Attribute, into: &[Raw]) -> Result<usize, Failure> {
        let (mut places, mut count) = (into.to_vec(), 0_i64);
        let (kind, most) = (AttributeKind::CUDNN_TYPE_BACKEND_DESCRIPTOR, into.len() as i64);
        // SAFETY: as above; the descriptors that are written to were made for it.
        let status = unsafe {
            let places = places.as_mut_ptr().cast();
            sys::cudnnBackendGetAttribute(descriptor.pointer(), attribute, kind, most, &mut count, places)
        };
        called("cudnnBackendGetAttribute", status)?;
        Ok((count.max(0) as usize).min(into.len()))
    }

    unsafe fn execute(&self, plan: Raw, pack: Raw, stream: u64) -> Result<(), Failure> {
        use std::sync::atomic::Ordering;
        if self.stream.load(Ordering::Relaxed) != stream {
            let pointer: sys::cudaStream_t = std::ptr::with_exposed_provenance_mut(stream as usize);
            // SAFETY: both are of this device's context.
            called("cudnnSetStream", unsafe { sys::cudnnSetStream(self.pointer(), pointer) })?;
            self.stream.store(stream, Ordering::Relaxed);
        }
        // SAFETY: the caller's promise.
        let status = unsafe { sys::cudnnBackendExecute(self.pointer(), plan.pointer(), pack.pointer()) };
        called("cudnnBackendExecute", status)
    }
}
