//! NCCL itself: those of its functions that are called, with the declarations of `nccl.h`. It is loaded by its soname, `libnccl.so.2`, which is the one
//! name that PyTorch's package and NVIDIA's both have; cudarc looks for names without a version, or with one of CUDA's.

use crate::loading;
use libloading::Library;
use std::ffi::{CStr, OsStr, c_char, c_int, c_void};
use std::sync::OnceLock;

/// By what it is looked for, where the loader looks.
const NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];

/// `ncclComm_t`.
pub(super) type CommunicatorPointer = *mut c_void;
/// `cudaStream_t`.
type StreamPointer = *mut c_void;

/// Of which communicator an exchange is, and on which stream.
#[derive(Clone, Copy, Debug)]
pub(super) struct On {
    pub(super) communicator: CommunicatorPointer,
    pub(super) stream: StreamPointer,
}

/// The exchanges that sum up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sum {
    /// `ncclAllReduce`: the count is that of what each gives, and gets.
    AllReduce,
    /// `ncclReduceScatter`: the count is that of what each gets.
    ReduceScatter,
}

/// `ncclUniqueId`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct UniqueId {
    pub(super) internal: [u8; 128],
}

/// `ncclDataType_t`, of which so many are used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub(super) enum Format {
    Byte = 1,
    Half = 6,
    Single = 7,
    Bfloat16 = 9,
}

/// `ncclSum`.
const SUM: c_int = 0;

/// A status other than `ncclSuccess`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Refused(c_int);

type Both = unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, c_int, CommunicatorPointer, StreamPointer) -> c_int;

/// The library, loaded for as long as the process lives.
#[derive(Debug)]
pub(in crate::backend::cuda) struct Nccl {
    version: unsafe extern "C" fn(*mut c_int) -> c_int,
    error_string: unsafe extern "C" fn(c_int) -> *const c_char,
    unique_id: unsafe extern "C" fn(*mut UniqueId) -> c_int,
    init_rank: unsafe extern "C" fn(*mut CommunicatorPointer, c_int, UniqueId, c_int) -> c_int,
    abort: unsafe extern "C" fn(CommunicatorPointer) -> c_int,
    all_reduce: Both,
    reduce_scatter: Both,
    all_gather: unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, CommunicatorPointer, StreamPointer) -> c_int,
    send: unsafe extern "C" fn(*const c_void, usize, c_int, c_int, CommunicatorPointer, StreamPointer) -> c_int,
    receive: unsafe extern "C" fn(*mut c_void, usize, c_int, c_int, CommunicatorPointer, StreamPointer) -> c_int,
    group_start: unsafe extern "C" fn() -> c_int,
    group_end: unsafe extern "C" fn() -> c_int,
    /// Keeps the functions valid.
    _library: Library,
}

impl Nccl {
    /// The library, if the loader finds it and it has all that is called.
    pub(in crate::backend::cuda) fn get() -> Option<&'static Self> {
        static LIBRARY: OnceLock<Option<Nccl>> = OnceLock::new();
        LIBRARY.get_or_init(|| NAMES.iter().find_map(|name| Self::open(OsStr::new(name)))).as_ref()
    }

    fn open(name: &OsStr) -> Option<Self> {
        // SAFETY: NCCL only sets up its own state when it is loaded.
        let library = unsafe { loading::open(name) }.ok()?;
        // SAFETY: so `nccl.h` declares them.
        unsafe {
            Some(Self {
                version: loading::function(&library, "ncclGetVersion")?,
                error_string: loading::function(&library, "ncclGetErrorString")?,
                unique_id: loading::function(&library, "ncclGetUniqueId")?,
                init_rank: loading::function(&library, "ncclCommInitRank")?,
                abort: loading::function(&library, "ncclCommAbort")?,
                all_reduce: loading::function(&library, "ncclAllReduce")?,
                reduce_scatter: loading::function(&library, "ncclReduceScatter")?,
                all_gather: loading::function(&library, "ncclAllGather")?,
                send: loading::function(&library, "ncclSend")?,
                receive: loading::function(&library, "ncclRecv")?,
                group_start: loading::function(&library, "ncclGroupStart")?,
                group_end: loading::function(&library, "ncclGroupEnd")?,
                _library: library,
            })
        }
    }

    /// Its version, as it says itself: 22805 is 2.28.5.
    pub(in crate::backend::cuda) fn version(&self) -> Option<c_int> {
        let mut version = 0;
        // SAFETY: the place is valid.
        done(unsafe { (self.version)(&mut version) }).ok().map(|()| version)
    }

    /// What it says of a status.
    pub(super) fn words(&self, refused: Refused) -> String {
        // SAFETY: the library has a text of its own for every status.
        unsafe { CStr::from_ptr((self.error_string)(refused.0)) }.to_string_lossy().into_owned()
    }

    pub(super) fn unique_id(&self) -> Result<UniqueId, Refused> {
        let mut identity = UniqueId { internal: [0; 128] };
        // SAFETY: the place is valid.
        done(unsafe { (self.unique_id)(&mut identity) }).map(|()| identity)
    }

    /// Joins as the `position`-th of `size`; returns when all have.
    pub(super) fn join(&self, identity: UniqueId, size: c_int, position: c_int) -> Result<CommunicatorPointer, Refused> {
        let mut communicator = std::ptr::null_mut();
        // SAFETY: the place is valid.
        done(unsafe { (self.init_rank)(&mut communicator, size, identity, position) }).map(|()| communicator)
    }

    /// # Safety
    /// The communicator was joined, and nobody uses it any more.
    pub(super) unsafe fn abort(&self, communicator: CommunicatorPointer) -> Result<(), Refused> {
        // SAFETY: the caller's promise.
        done(unsafe { (self.abort)(communicator) })
    }

    /// # Safety
    /// The communicator was joined; the memory is the device's, as long as is said, and nobody else's until it is done: here and below.
    pub(super) unsafe fn sum(
        &self,
        kind: Sum,
        [from, to]: [*mut c_void; 2],
        count: usize,
        format: Format,
        on: On,
    ) -> Result<(), Refused> {
        let call = match kind {
            Sum::AllReduce => self.all_reduce,
            Sum::ReduceScatter => self.reduce_scatter,
        };
        // SAFETY: the caller's promise.
        done(unsafe { call(from, to, count, format as c_int, SUM, on.communicator, on.stream) })
    }

    /// # Safety
    /// As for [`Nccl::sum`].
    pub(super) unsafe fn all_gather(&self, [from, to]: [*mut c_void; 2], bytes: usize, on: On) -> Result<(), Refused> {
        // SAFETY: the caller's promise.
        done(unsafe { (self.all_gather)(from, to, bytes, Format::Byte as c_int, on.communicator, on.stream) })
    }

    /// # Safety
    /// As for [`Nccl::sum`].
    pub(super) unsafe fn send(&self, from: *const c_void, bytes: usize, to: c_int, on: On) -> Result<(), Refused> {
        // SAFETY: the caller's promise.
        done(unsafe { (self.send)(from, bytes, Format::Byte as c_int, to, on.communicator, on.stream) })
    }

    /// # Safety
    /// As for [`Nccl::sum`].
    pub(super) unsafe fn receive(&self, to: *mut c_void, bytes: usize, from: c_int, on: On) -> Result<(), Refused> {
        // SAFETY: the caller's promise.
        done(unsafe { (self.receive)(to, bytes, Format::Byte as c_int, from, on.communicator, on.stream) })
    }

    pub(super) fn group_start(&self) -> Result<(), Refused> {
        // SAFETY: it only begins what `group_end` ends.
        done(unsafe { (self.group_start)() })
    }

    pub(super) fn group_end(&self) -> Result<(), Refused> {
        // SAFETY: as above.
        done(unsafe { (self.group_end)() })
    }
}

fn done(status: c_int) -> Result<(), Refused> {
    if status == 0 { Ok(()) } else { Err(Refused(status)) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::cuda::tests::emulator::has_compiled;
    use std::path::{Path, PathBuf};
    use std::process::Command;

    /// The library's functions as `nccl.h` declares them, which leave what they were given in the first and only message.
    const STAND_IN: &str = r#"
#include <cstddef>
#include <cstdio>
#include <cstring>
typedef struct { char internal[128]; } id_t_;
typedef void *comm_t, *stream_t;
static char made[4] = "abc";
extern "C" {
int ncclGetVersion(int *version) { *version = 22805; return 0; }
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

    /// The stand-in, compiled under the name that packages have; none where there is no compiler, which is then said.
    fn stand_in(folder: &Path) -> Option<PathBuf> {
        let (source, library) = (folder.join("nccl.cpp"), folder.join(NAMES[0]));
        std::fs::write(&source, STAND_IN).expect("the folder can be written to");
        let mut compiler = Command::new("g++");
        compiler.args(["-shared", "-fPIC", "-w", "-Wl,-soname,libnccl.so.2"]).arg(&source).arg("-o").arg(&library);
        has_compiled(&mut compiler).then_some(library)
    }

    #[test]
    fn the_library_is_given_what_its_header_says() {
        let folder = tempfile::tempdir().expect("a folder");
        let Some(path) = stand_in(folder.path()) else { return };
        let nccl = Nccl::open(path.as_os_str()).expect("it has all functions");
        assert_eq!(nccl.version(), Some(22805));
        let identity = nccl.unique_id().expect("it makes one");
        let joined = nccl.join(identity, 2, 1).expect("it joins");
        assert_eq!(nccl.join(identity, 2, 2).map_err(|refused| nccl.words(refused)), Err("invalid argument".into()));
        let mut memory = [0_u8; 64];
        let place: *mut c_void = memory.as_mut_ptr().cast();
        let on = On { communicator: joined, stream: std::ptr::without_provenance_mut(0x7) };
        let said = |result: Result<(), Refused>| {
            assert_eq!(result, Ok(()));
            // SAFETY: the memory is this function's, and the call is over.
            unsafe { CStr::from_ptr(place.cast()) }.to_str().expect("it is ASCII").to_owned()
        };
        // SAFETY: the memory has room for what the stand-in says, here and below.
        unsafe {
            assert_eq!(said(nccl.sum(Sum::AllReduce, [place; 2], 5, Format::Bfloat16, on)), "all_reduce 5 9 0 1 0x7");
            assert_eq!(said(nccl.sum(Sum::ReduceScatter, [place; 2], 6, Format::Single, on)), "reduce_scatter 6 7 0 1 0x7");
            assert_eq!(said(nccl.all_gather([place; 2], 7, on)), "all_gather 7 1 0 1 0x7");
            assert_eq!(said(nccl.send(place, 8, 3, on)), "send 8 1 3 1 0x7");
            assert_eq!(said(nccl.receive(place, 9, 2, on)), "receive 9 1 2 1 0x7");
            assert_eq!(nccl.abort(joined), Ok(()));
        }
        assert_eq!((nccl.group_start(), nccl.group_end()), (Ok(()), Err(Refused(4))));
    }

    #[test]
    fn a_library_that_is_not_there_or_is_another_is_none() {
        assert!(Nccl::open(OsStr::new("/nowhere/libnccl.so.2")).is_none());
        // This one is there in every process, and has none of the functions.
        assert!(Nccl::open(OsStr::new("libc.so.6")).is_none());
    }
}
