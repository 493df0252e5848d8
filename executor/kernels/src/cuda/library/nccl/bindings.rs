//! Bindings to the NCCL functions that are called, as `nccl.h` declares them.
//!
//! They are declared here, because cudarc is built without its NCCL bindings.

use crate::cuda::driver::Library;
use crate::cuda::library::loader;
use crate::loading;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::OnceLock;

/// `ncclComm_t`.
pub(super) type CommunicatorPointer = *mut c_void;
/// `cudaStream_t`.
type StreamPointer = *mut c_void;

/// The communicator that a call uses, and the stream that it is queued on.
#[derive(Clone, Copy, Debug)]
pub(super) struct CommunicatorStream {
    pub(super) communicator: CommunicatorPointer,
    pub(super) stream: StreamPointer,
}

/// A collective that sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reduction {
    /// `ncclAllReduce`: the count is that of a rank's input, which is also that of its output.
    AllReduce,
    /// `ncclReduceScatter`: the count is that of a rank's output.
    ReduceScatter,
}

/// `ncclUniqueId`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct UniqueId {
    pub(super) internal: [u8; 128],
}

/// The values of `ncclDataType_t` that are used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub(super) enum NcclDataType {
    Byte = 1,
    Half = 6,
    Float = 7,
    Bfloat16 = 9,
}

/// `ncclSum`.
const SUM: c_int = 0;

/// A status other than `ncclSuccess`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NcclError(c_int);

type ReduceFunction =
    unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, c_int, CommunicatorPointer, StreamPointer) -> c_int;

/// The library's functions. It stays loaded for as long as the process lives.
#[derive(Debug)]
pub(in crate::cuda::library) struct Nccl {
    error_string: unsafe extern "C" fn(c_int) -> *const c_char,
    unique_id: unsafe extern "C" fn(*mut UniqueId) -> c_int,
    init_rank: unsafe extern "C" fn(*mut CommunicatorPointer, c_int, UniqueId, c_int) -> c_int,
    abort: unsafe extern "C" fn(CommunicatorPointer) -> c_int,
    all_reduce: ReduceFunction,
    reduce_scatter: ReduceFunction,
    all_gather: unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, CommunicatorPointer, StreamPointer) -> c_int,
    send: unsafe extern "C" fn(*const c_void, usize, c_int, c_int, CommunicatorPointer, StreamPointer) -> c_int,
    receive: unsafe extern "C" fn(*mut c_void, usize, c_int, c_int, CommunicatorPointer, StreamPointer) -> c_int,
    group_start: unsafe extern "C" fn() -> c_int,
    group_end: unsafe extern "C" fn() -> c_int,
}

impl Nccl {
    /// Returns the library; `None` if it cannot be loaded, or lacks a function.
    pub(in crate::cuda::library) fn get() -> Option<&'static Self> {
        static LIBRARY: OnceLock<Option<Nccl>> = OnceLock::new();
        LIBRARY.get_or_init(|| Self::of(&loader::get(Library::Nccl)?.library)).as_ref()
    }

    /// Returns the functions of a loaded library, which must stay loaded; `None` if it lacks one.
    fn of(library: &libloading::Library) -> Option<Self> {
        // SAFETY: these are the types that `nccl.h` declares.
        unsafe {
            Some(Self {
                error_string: loading::function(library, "ncclGetErrorString")?,
                unique_id: loading::function(library, "ncclGetUniqueId")?,
                init_rank: loading::function(library, "ncclCommInitRank")?,
                abort: loading::function(library, "ncclCommAbort")?,
                all_reduce: loading::function(library, "ncclAllReduce")?,
                reduce_scatter: loading::function(library, "ncclReduceScatter")?,
                all_gather: loading::function(library, "ncclAllGather")?,
                send: loading::function(library, "ncclSend")?,
                receive: loading::function(library, "ncclRecv")?,
                group_start: loading::function(library, "ncclGroupStart")?,
                group_end: loading::function(library, "ncclGroupEnd")?,
            })
        }
    }

    /// Returns the library's message for a status.
    pub(super) fn error_message(&self, error: NcclError) -> String {
        // SAFETY: the library has a static string for every status.
        unsafe { CStr::from_ptr((self.error_string)(error.0)) }.to_string_lossy().into_owned()
    }

    /// Creates the id of a new communicator.
    pub(super) fn unique_id(&self) -> Result<UniqueId, NcclError> {
        let mut id = UniqueId { internal: [0; 128] };
        // SAFETY: the pointer is valid.
        checked(unsafe { (self.unique_id)(&mut id) }).map(|()| id)
    }

    /// Joins as rank `position` of `size`. Returns once all ranks have joined.
    pub(super) fn join(&self, id: UniqueId, size: c_int, position: c_int) -> Result<CommunicatorPointer, NcclError> {
        let mut communicator = std::ptr::null_mut();
        // SAFETY: the pointer is valid.
        checked(unsafe { (self.init_rank)(&mut communicator, size, id, position) }).map(|()| communicator)
    }

    /// Aborts a communicator and frees it.
    ///
    /// # Safety
    /// The communicator was joined, and nothing uses it any more.
    pub(super) unsafe fn abort(&self, communicator: CommunicatorPointer) -> Result<(), NcclError> {
        // SAFETY: the caller's promise.
        checked(unsafe { (self.abort)(communicator) })
    }

    /// Queues a collective that sums.
    ///
    /// # Safety
    /// The communicator was joined. Each pointer leads to device memory of the length that the call
    /// implies. Nothing else uses that memory until the work is done.
    pub(super) unsafe fn reduce(
        &self,
        kind: Reduction,
        [from, to]: [*mut c_void; 2],
        count: usize,
        data_type: NcclDataType,
        on: CommunicatorStream,
    ) -> Result<(), NcclError> {
        let call = match kind {
            Reduction::AllReduce => self.all_reduce,
            Reduction::ReduceScatter => self.reduce_scatter,
        };
        // SAFETY: the caller's promise.
        checked(unsafe { call(from, to, count, data_type as c_int, SUM, on.communicator, on.stream) })
    }

    /// Queues an all-gather; `bytes` is the length of each rank's input.
    ///
    /// # Safety
    /// As for [`Nccl::reduce`].
    pub(super) unsafe fn all_gather(
        &self,
        [from, to]: [*mut c_void; 2],
        bytes: usize,
        on: CommunicatorStream,
    ) -> Result<(), NcclError> {
        // SAFETY: the caller's promise.
        checked(unsafe { (self.all_gather)(from, to, bytes, NcclDataType::Byte as c_int, on.communicator, on.stream) })
    }

    /// Queues sending bytes to a rank.
    ///
    /// # Safety
    /// As for [`Nccl::reduce`].
    pub(super) unsafe fn send(
        &self,
        from: *const c_void,
        bytes: usize,
        to: c_int,
        on: CommunicatorStream,
    ) -> Result<(), NcclError> {
        // SAFETY: the caller's promise.
        checked(unsafe { (self.send)(from, bytes, NcclDataType::Byte as c_int, to, on.communicator, on.stream) })
    }

    /// Queues receiving bytes from a rank.
    ///
    /// # Safety
    /// As for [`Nccl::reduce`].
    pub(super) unsafe fn receive(
        &self,
        to: *mut c_void,
        bytes: usize,
        from: c_int,
        on: CommunicatorStream,
    ) -> Result<(), NcclError> {
        // SAFETY: the caller's promise.
        checked(unsafe { (self.receive)(to, bytes, NcclDataType::Byte as c_int, from, on.communicator, on.stream) })
    }

    /// Opens a group: calls until [`Nccl::group_end`] progress together.
    pub(super) fn group_start(&self) -> Result<(), NcclError> {
        // SAFETY: it has no arguments, and `group_end` follows.
        checked(unsafe { (self.group_start)() })
    }

    /// Closes a group, which queues its calls.
    pub(super) fn group_end(&self) -> Result<(), NcclError> {
        // SAFETY: it has no arguments.
        checked(unsafe { (self.group_end)() })
    }
}

fn checked(status: c_int) -> Result<(), NcclError> {
    if status == 0 { Ok(()) } else { Err(NcclError(status)) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::tests::emulator::has_compiled;
    use std::path::{Path, PathBuf};
    use std::process::Command;

    /// A stand-in with the functions that `nccl.h` declares. Each writes its arguments, as text, to
    /// the memory of its message.
    const STAND_IN: &str = r#"
#include <cstddef>
#include <cstdio>
#include <cstring>
typedef struct { char internal[128]; } id_t_;
typedef void *comm_t, *stream_t;
static char made[4] = "abc";
extern "C" {
const char *ncclGetErrorString(int status) { return status == 4 ? "invalid argument" : "unknown"; }
int ncclGetUniqueId(id_t_ *id) { for (int i = 0; i < 128; i++) id->internal[i] = (char)(200 + i); return 0; }
int ncclCommInitRank(comm_t *comm, int size, id_t_ id, int rank) {
    if (id.internal[127] != (char)(200 + 127) || rank >= size) return 4;
    *comm = made;
    return 0;
}
int ncclCommAbort(comm_t comm) { return comm == made ? 0 : 4; }
static int say(const char *what, void *to, size_t count, int type, int other, comm_t comm, stream_t stream) {
    std::snprintf((char *)to, 64, "%s %zu %d %d %d %p", what, count, type, other, comm == made, stream);
    return 0;
}
int ncclAllReduce(const void *, void *to, size_t n, int type, int op, comm_t c, stream_t s) { return say("all_reduce", to, n, type, op, c, s); }
int ncclReduceScatter(const void *, void *to, size_t n, int type, int op, comm_t c, stream_t s) { return say("reduce_scatter", to, n, type, op, c, s); }
int ncclAllGather(const void *, void *to, size_t n, int type, comm_t c, stream_t s) { return say("all_gather", to, n, type, 0, c, s); }
int ncclSend(const void *from, size_t n, int type, int peer, comm_t c, stream_t s) { return say("send", (void *)from, n, type, peer, c, s); }
int ncclRecv(void *to, size_t n, int type, int peer, comm_t c, stream_t s) { return say("receive", to, n, type, peer, c, s); }
int ncclGroupStart(void) { return 0; }
int ncclGroupEnd(void) { return 4; }
}
"#;

    /// Compiles the stand-in under NCCL's soname. `None`, with a note, if there is no compiler.
    fn compile_stand_in(folder: &Path) -> Option<PathBuf> {
        let (source, library) = (folder.join("nccl.cpp"), folder.join("libnccl.so.2"));
        std::fs::write(&source, STAND_IN).expect("the folder can be written to");
        let mut compiler = Command::new("g++");
        compiler.args(["-shared", "-fPIC", "-w", "-Wl,-soname,libnccl.so.2"]).arg(&source).arg("-o").arg(&library);
        has_compiled(&mut compiler).then_some(library)
    }

    /// Loads a library, and leaves it loaded.
    fn open(path: &Path) -> Option<Nccl> {
        // SAFETY: the stand-in and the C library have no initialisers that matter here.
        let library = unsafe { loading::open(path.as_os_str()) }.expect("it can be loaded");
        Nccl::of(Box::leak(Box::new(library)))
    }

    #[test]
    fn every_call_passes_the_arguments_that_the_header_declares() {
        let folder = tempfile::tempdir().expect("a folder");
        let Some(path) = compile_stand_in(folder.path()) else { return };
        let nccl = open(&path).expect("all functions");
        let id = nccl.unique_id().expect("an id");
        let joined = nccl.join(id, 2, 1).expect("it joins");
        assert_eq!(nccl.join(id, 2, 2).map_err(|error| nccl.error_message(error)), Err("invalid argument".into()));
        let mut memory = [0_u8; 64];
        let message: *mut c_void = memory.as_mut_ptr().cast();
        let on = CommunicatorStream { communicator: joined, stream: std::ptr::without_provenance_mut(0x7) };
        let text = |result: Result<(), NcclError>| {
            assert_eq!(result, Ok(()));
            // SAFETY: the memory is this function's, and the call has returned.
            unsafe { CStr::from_ptr(message.cast()) }.to_str().expect("it is ASCII").to_owned()
        };
        // SAFETY: the memory holds the 64 bytes that the stand-in writes; so below.
        unsafe {
            assert_eq!(
                text(nccl.reduce(Reduction::AllReduce, [message; 2], 5, NcclDataType::Bfloat16, on)),
                "all_reduce 5 9 0 1 0x7"
            );
            assert_eq!(
                text(nccl.reduce(Reduction::ReduceScatter, [message; 2], 6, NcclDataType::Float, on)),
                "reduce_scatter 6 7 0 1 0x7"
            );
            assert_eq!(text(nccl.all_gather([message; 2], 7, on)), "all_gather 7 1 0 1 0x7");
            assert_eq!(text(nccl.send(message, 8, 3, on)), "send 8 1 3 1 0x7");
            assert_eq!(text(nccl.receive(message, 9, 2, on)), "receive 9 1 2 1 0x7");
            assert_eq!(nccl.abort(joined), Ok(()));
        }
        assert_eq!((nccl.group_start(), nccl.group_end()), (Ok(()), Err(NcclError(4))));
    }

    #[test]
    fn a_library_without_nccls_functions_is_not_accepted() {
        assert!(open(Path::new("libc.so.6")).is_none());
    }
}
