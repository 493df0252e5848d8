//! Exchanges between GPUs by NCCL. Every rank has a GPU of its own: NCCL refuses two on one.

use super::{Handle, NvidiaDriver};
use crate::backend::cuda::collectives::{Collectives, CommunicatorHandle, Exchange, ExchangeKind, Identity, Piece};
use crate::backend::cuda::driver::StreamHandle;
use crate::backend::cuda::error::CudaError;
use cudarc::nccl::result::{self, NcclError, NcclStatus};
use cudarc::nccl::sys;
use foretell_units::DataType;
use std::ffi::{CStr, c_int, c_void};
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
    handle: Handle<sys::ncclComm_t>,
    size: usize,
    position: usize,
}

/// What a call of the library came to.
fn called(doing: &'static str, result: Result<NcclStatus, NcclError>) -> Result<(), CudaError> {
    result.map(|_| ()).map_err(|error| {
        // SAFETY: the library gives a text of its own for every status.
        let words = unsafe { CStr::from_ptr(sys::ncclGetErrorString(error.0)) };
        CudaError::Call { doing, reason: words.to_string_lossy().into_owned() }
    })
}

fn format_of(data_type: DataType) -> sys::ncclDataType_t {
    match data_type {
        DataType::Bf16 => sys::ncclDataType_t::ncclBfloat16,
        DataType::Fp16 => sys::ncclDataType_t::ncclFloat16,
        _ => sys::ncclDataType_t::ncclFloat32,
    }
}

const BYTES: sys::ncclDataType_t = sys::ncclDataType_t::ncclUint8;
const EXCHANGING: &str = "an exchange between GPUs";

fn pointer(piece: Piece) -> *mut c_void {
    piece.address.pointer().cast()
}

impl Collectives for NvidiaDriver {
    fn new_identity(&self) -> Result<Identity, CudaError> {
        self.enter()?;
        let identity = result::get_uniqueid();
        let refused = |error| called("making a communicator", Err(error)).err();
        match identity {
            Ok(identity) => Ok(identity.internal.map(|byte| byte as u8)),
            Err(error) => Err(refused(error).unwrap_or(CudaError::Aborted)),
        }
    }

    fn join(&self, identity: &Identity, size: usize, position: usize) -> Result<CommunicatorHandle, CudaError> {
        self.enter()?;
        let identity = sys::ncclUniqueId { internal: identity.map(|byte| byte as _) };
        let mut communicator = std::ptr::null_mut();
        // SAFETY: the place is valid; the other ranks do the same.
        let joined = unsafe { result::comm_init_rank(&mut communicator, size as c_int, identity, position as c_int) };
        called("joining a communicator", joined)?;
        let mut all = self.communicators.joined.lock().unwrap_or_else(PoisonError::into_inner);
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
        let stream: sys::cudaStream_t = std::ptr::with_exposed_provenance_mut(stream.0 as usize);
        let (format, sum) = (format_of(exchange.data_type), sys::ncclRedOp_t::ncclSum);
        let width = exchange.data_type.size().count().max(1) as usize;
        // SAFETY: the pieces are as long as they say, which is the caller's promise; the communicator was joined, here and below.
        let send = |piece: Piece, part: usize, bytes: usize, to: usize| unsafe {
            let from = pointer(piece).cast::<u8>().wrapping_add(part * bytes).cast();
            called(EXCHANGING, result::send(from, bytes, BYTES, to as c_int, handle, stream))
        };
        // SAFETY: as above.
        let receive = |piece: Piece, part: usize, bytes: usize, from: usize| unsafe {
            let to = pointer(piece).cast::<u8>().wrapping_add(part * bytes).cast();
            called(EXCHANGING, result::recv(to, bytes, BYTES, from as c_int, handle, stream))
        };
        match exchange.kind {
            ExchangeKind::AllReduce => {
                let (_, write) = exchange.both()?;
                let (place, count) = (pointer(write), write.bytes / width);
                // SAFETY: as above; it works in place.
                called(EXCHANGING, unsafe { result::all_reduce(place, place, count, format, sum, handle, stream) })
            }
            ExchangeKind::ReduceScatter => {
                let (read, write) = exchange.both()?;
                let (from, to, count) = (pointer(read), pointer(write), write.bytes / width);
                // SAFETY: as above.
                called(EXCHANGING, unsafe { result::reduce_scatter(from, to, count, format, sum, handle, stream) })
            }
            ExchangeKind::AllGather => {
                let (read, write) = exchange.both()?;
                // SAFETY: as above.
                called(EXCHANGING, unsafe {
                    result::all_gather(pointer(read), pointer(write), read.bytes, BYTES, handle, stream)
                })
            }
            ExchangeKind::AllToAll => {
                let (read, write) = exchange.both()?;
                let bytes = read.bytes / size.max(1);
                grouped(|| {
                    (0..size).try_for_each(|other| {
                        send(read, other, bytes, other)?;
                        receive(write, other, bytes, other)
                    })
                })
            }
            ExchangeKind::Shift => {
                let (read, write) = exchange.both()?;
                grouped(|| {
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
            let _ = unsafe { result::comm_abort(handle.0) };
        }
    }

    fn is_aborted(&self) -> bool {
        self.communicators.is_aborted.load(Ordering::SeqCst)
    }
}

/// Sends and receives that are under way together.
fn grouped(inner: impl FnOnce() -> Result<(), CudaError>) -> Result<(), CudaError> {
    called(EXCHANGING, result::group_start())?;
    let queued = inner();
    // The group ends whatever became of it.
    let ended = called(EXCHANGING, result::group_end());
    queued.and(ended)
}
