//! Exchanges between GPUs by NCCL. Every rank has a GPU of its own: NCCL refuses two on one.

use super::nccl_library::{CommunicatorPointer, Format, Nccl, On, Refused, Sum, UniqueId};
use super::{Handle, NvidiaDriver};
use crate::backend::cuda::collectives::{Collectives, CommunicatorHandle, Exchange, ExchangeKind, Identity, Piece};
use crate::backend::cuda::driver::StreamHandle;
use crate::backend::cuda::error::CudaError;
use crate::backend::cuda::libraries::Library;
use foretell_units::DataType;
use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

/// The communicators of a process.
#[derive(Default)]
pub(super) struct Communicators {
    joined: Mutex<Vec<Communicator>>,
    is_aborted: AtomicBool,
}

#[derive(Clone, Copy)]
struct Communicator {
    handle: Handle<CommunicatorPointer>,
    size: usize,
    position: usize,
}

/// The library, once one was made with it.
fn library() -> Result<&'static Nccl, CudaError> {
    Nccl::get().ok_or(CudaError::MissingLibrary { library: Library::Nccl })
}

/// What a call of the library came to.
fn called<T>(doing: &'static str, result: Result<T, Refused>) -> Result<T, CudaError> {
    let words = |refused| Nccl::get().map(|library| library.words(refused)).unwrap_or_default();
    result.map_err(|refused| CudaError::Call { doing, reason: words(refused) })
}

fn format_of(data_type: DataType) -> Format {
    match data_type {
        DataType::Bf16 => Format::Bfloat16,
        DataType::Fp16 => Format::Half,
        _ => Format::Single,
    }
}

const EXCHANGING: &str = "an exchange between GPUs";

fn pointer(piece: Piece) -> *mut c_void {
    piece.address.pointer().cast()
}

impl Collectives for NvidiaDriver {
    fn new_identity(&self) -> Result<Identity, CudaError> {
        self.enter()?;
        called("making a communicator", library()?.unique_id()).map(|identity| identity.internal)
    }

    fn join(&self, identity: &Identity, size: usize, position: usize) -> Result<CommunicatorHandle, CudaError> {
        self.enter()?;
        if self.is_aborted() {
            return Err(CudaError::Aborted);
        }
        let identity = UniqueId { internal: *identity };
        let joined = library()?.join(identity, size as c_int, position as c_int);
        let communicator = called("joining a communicator", joined)?;
        let mut all = self.communicators.joined.lock().unwrap_or_else(PoisonError::into_inner);
        // Broken off while it was joined: `abort` has taken what there was, or takes the lock after this.
        if self.is_aborted() {
            // SAFETY: it was joined just now, and nobody else knows it.
            let _ = library().map(|nccl| unsafe { nccl.abort(communicator) });
            return Err(CudaError::Aborted);
        }
        all.push(Communicator { handle: Handle(communicator), size, position });
        Ok(CommunicatorHandle(all.len() - 1))
    }

    unsafe fn exchange(
        &self,
        communicator: CommunicatorHandle,
        exchange: &Exchange,
        stream: StreamHandle,
    ) -> Result<(), CudaError> {
        self.enter()?;
        if self.is_aborted() {
            return Err(CudaError::Aborted);
        }
        // The lock is not held over the call, which may wait for other ranks.
        let found = self.communicators.joined.lock().unwrap_or_else(PoisonError::into_inner).get(communicator.0).copied();
        let Communicator { handle: Handle(handle), size, position } = found.ok_or(CudaError::Aborted)?;
        let (nccl, format) = (library()?, format_of(exchange.data_type));
        let on = On { communicator: handle, stream: std::ptr::with_exposed_provenance_mut(stream.0 as usize) };
        let width = exchange.data_type.size().count().max(1) as usize;
        // SAFETY: the pieces are as long as they say, which is the caller's promise; the communicator was joined, here and below.
        let send = |piece: Piece, part: usize, bytes: usize, to: usize| unsafe {
            let from = pointer(piece).cast::<u8>().wrapping_add(part * bytes).cast();
            called(EXCHANGING, nccl.send(from, bytes, to as c_int, on))
        };
        // SAFETY: as above.
        let receive = |piece: Piece, part: usize, bytes: usize, from: usize| unsafe {
            let to = pointer(piece).cast::<u8>().wrapping_add(part * bytes).cast();
            called(EXCHANGING, nccl.receive(to, bytes, from as c_int, on))
        };
        match exchange.kind {
            ExchangeKind::AllReduce => {
                let (_, write) = exchange.both()?;
                let (place, count) = (pointer(write), write.bytes / width);
                // SAFETY: as above; it works in place.
                called(EXCHANGING, unsafe { nccl.sum(Sum::AllReduce, [place; 2], count, format, on) })
            }
            ExchangeKind::ReduceScatter => {
                let (read, write) = exchange.both()?;
                let (from, to, count) = (pointer(read), pointer(write), write.bytes / width);
                // SAFETY: as above.
                called(EXCHANGING, unsafe { nccl.sum(Sum::ReduceScatter, [from, to], count, format, on) })
            }
            ExchangeKind::AllGather => {
                let (read, write) = exchange.both()?;
                // SAFETY: as above.
                called(EXCHANGING, unsafe { nccl.all_gather([pointer(read), pointer(write)], read.bytes, on) })
            }
            ExchangeKind::AllToAll => {
                let (read, write) = exchange.both()?;
                let bytes = read.bytes / size.max(1);
                grouped(nccl, || {
                    (0..size).try_for_each(|other| {
                        send(read, other, bytes, other)?;
                        receive(write, other, bytes, other)
                    })
                })
            }
            ExchangeKind::Shift => {
                let (read, write) = exchange.both()?;
                grouped(nccl, || {
                    send(read, 0, read.bytes, (position + 1) % size)?;
                    receive(write, 0, write.bytes, (position + size - 1) % size)
                })
            }
            ExchangeKind::Send => exchange.read.map_or(Ok(()), |read| send(read, 0, read.bytes, 1)),
            ExchangeKind::Receive => exchange.write.map_or(Ok(()), |write| receive(write, 0, write.bytes, 0)),
        }
    }

    fn abort(&self) {
        if self.communicators.is_aborted.swap(true, Ordering::SeqCst) || self.enter().is_err() {
            return;
        }
        let all = std::mem::take(&mut *self.communicators.joined.lock().unwrap_or_else(PoisonError::into_inner));
        for Communicator { handle, .. } in all {
            // SAFETY: it was joined, and is not handed out any more. Its kernels end, so that who waits for them goes on, and fails.
            let _ = library().map(|nccl| unsafe { nccl.abort(handle.0) });
        }
    }

    fn is_aborted(&self) -> bool {
        self.communicators.is_aborted.load(Ordering::SeqCst)
    }
}

/// Sends and receives that are under way together.
fn grouped(nccl: &Nccl, inner: impl FnOnce() -> Result<(), CudaError>) -> Result<(), CudaError> {
    called(EXCHANGING, nccl.group_start())?;
    let queued = inner();
    // The group ends whatever became of it.
    let ended = called(EXCHANGING, nccl.group_end());
    queued.and(ended)
}
