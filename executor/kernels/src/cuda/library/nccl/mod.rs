//! Communication between GPUs by NCCL. Every rank has a GPU of its own: NCCL refuses two ranks on
//! one. It must not know Programs: a call has addresses, counts and a communicator.

mod bindings;

pub(super) use bindings::Nccl;

use crate::cuda::driver::{
    CommunicationKind, CommunicatorHandle, CommunicatorId, CudaError, DeviceCommunication, DeviceRange, Library, StreamHandle,
};
use bindings::{CommunicatorPointer, CommunicatorStream, NcclDataType, NcclError, Reduction, UniqueId};
use foretell_units::DataType;
use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

/// The communicators of one process. Every method expects that the device's context is current.
#[derive(Default)]
pub(in crate::cuda) struct Communicators {
    joined: Mutex<Vec<Communicator>>,
    is_aborted: AtomicBool,
}

#[derive(Clone, Copy)]
struct Communicator {
    pointer: CommunicatorPointer,
    size: usize,
    position: usize,
}

// SAFETY: NCCL's communicators may be used from any thread.
unsafe impl Send for Communicator {}

/// Returns the library, after it was found to be present.
fn library() -> Result<&'static Nccl, CudaError> {
    Nccl::get().ok_or(CudaError::MissingLibrary { library: Library::Nccl })
}

fn checked<T>(action: &'static str, result: Result<T, NcclError>) -> Result<T, CudaError> {
    let message = |error| Nccl::get().map(|nccl| nccl.error_message(error)).unwrap_or_default();
    result.map_err(|error| CudaError::Call { action, reason: message(error) })
}

fn nccl_type(data_type: DataType) -> NcclDataType {
    match data_type {
        DataType::Bf16 => NcclDataType::Bfloat16,
        DataType::Fp16 => NcclDataType::Half,
        DataType::Int8 => NcclDataType::Byte,
        // Indices are moved, and not summed.
        DataType::Fp32 | DataType::Tf32 | DataType::Int32 => NcclDataType::Float,
        DataType::Fp64 | DataType::Fp8 => unreachable!("invariant: ranks exchange nothing in {data_type}"),
    }
}

const COMMUNICATING: &str = "communication between GPUs";

fn pointer(range: DeviceRange) -> *mut c_void {
    range.address.pointer().cast()
}

impl Communicators {
    /// Creates the id of a new communicator.
    pub(in crate::cuda) fn new_id(&self) -> Result<CommunicatorId, CudaError> {
        checked("creating a communicator's id", library()?.unique_id()).map(|id| id.internal)
    }

    /// Joins a communicator as rank `position` of `size`.
    pub(in crate::cuda) fn join(
        &self,
        id: &CommunicatorId,
        size: usize,
        position: usize,
    ) -> Result<CommunicatorHandle, CudaError> {
        if self.is_aborted() {
            return Err(CudaError::Aborted);
        }
        let joined = library()?.join(UniqueId { internal: *id }, size as c_int, position as c_int);
        let pointer = checked("joining a communicator", joined)?;
        let mut all = self.joined.lock().unwrap_or_else(PoisonError::into_inner);
        // `abort` may have run meanwhile. It either took the list before this lock, or takes it
        // after.
        if self.is_aborted() {
            // SAFETY: it was just joined, and is known here only.
            let _ = library().map(|nccl| unsafe { nccl.abort(pointer) });
            return Err(CudaError::Aborted);
        }
        all.push(Communicator { pointer, size, position });
        Ok(CommunicatorHandle(all.len() - 1))
    }

    /// Queues a collective or message.
    ///
    /// # Safety
    /// As for [`Collectives::communicate`](crate::cuda::driver::Collectives::communicate).
    pub(in crate::cuda) unsafe fn communicate(
        &self,
        communicator: CommunicatorHandle,
        communication: &DeviceCommunication,
        stream: StreamHandle,
    ) -> Result<(), CudaError> {
        if self.is_aborted() {
            return Err(CudaError::Aborted);
        }
        // The lock is not held during the call, which may wait for other ranks.
        let found = self.joined.lock().unwrap_or_else(PoisonError::into_inner).get(communicator.0).copied();
        let Communicator { pointer: own, size, position } = found.ok_or(CudaError::Aborted)?;
        let (nccl, data_type) = (library()?, nccl_type(communication.data_type));
        let on = CommunicatorStream { communicator: own, stream: std::ptr::with_exposed_provenance_mut(stream.0 as usize) };
        let width = communication.data_type.size().count().max(1) as usize;
        // SAFETY: the ranges are valid, by the caller's promise, and the communicator is joined;
        // so below.
        let send = |range: DeviceRange, part: usize, bytes: usize, to: usize| unsafe {
            let from = pointer(range).cast::<u8>().wrapping_add(part * bytes).cast();
            checked(COMMUNICATING, nccl.send(from, bytes, to as c_int, on))
        };
        // SAFETY: as above.
        let receive = |range: DeviceRange, part: usize, bytes: usize, from: usize| unsafe {
            let to = pointer(range).cast::<u8>().wrapping_add(part * bytes).cast();
            checked(COMMUNICATING, nccl.receive(to, bytes, from as c_int, on))
        };
        match communication.kind {
            CommunicationKind::AllReduce => {
                let (_, write) = communication.operands()?;
                let (in_place, count) = ([pointer(write); 2], write.bytes / width);
                // SAFETY: as above.
                checked(COMMUNICATING, unsafe { nccl.reduce(Reduction::AllReduce, in_place, count, data_type, on) })
            }
            CommunicationKind::ReduceScatter => {
                let (read, write) = communication.operands()?;
                let (operands, count) = ([pointer(read), pointer(write)], write.bytes / width);
                // SAFETY: as above.
                checked(COMMUNICATING, unsafe { nccl.reduce(Reduction::ReduceScatter, operands, count, data_type, on) })
            }
            CommunicationKind::AllGather => {
                let (read, write) = communication.operands()?;
                // SAFETY: as above.
                checked(COMMUNICATING, unsafe { nccl.all_gather([pointer(read), pointer(write)], read.bytes, on) })
            }
            CommunicationKind::AllToAll => {
                let (read, write) = communication.operands()?;
                let bytes = read.bytes / size.max(1);
                grouped(nccl, || {
                    (0..size).try_for_each(|other| {
                        send(read, other, bytes, other)?;
                        receive(write, other, bytes, other)
                    })
                })
            }
            CommunicationKind::Shift => {
                let (read, write) = communication.operands()?;
                grouped(nccl, || {
                    send(read, 0, read.bytes, (position + 1) % size)?;
                    receive(write, 0, write.bytes, (position + size - 1) % size)
                })
            }
            CommunicationKind::Send => communication.read.map_or(Ok(()), |read| send(read, 0, read.bytes, 1)),
            CommunicationKind::Receive => communication.write.map_or(Ok(()), |write| receive(write, 0, write.bytes, 0)),
        }
    }

    /// Marks all communication as aborted, and returns `true` if it was not before. From then on
    /// [`Communicators::join`] and [`Communicators::communicate`] fail.
    pub(in crate::cuda) fn mark_aborted(&self) -> bool {
        !self.is_aborted.swap(true, Ordering::SeqCst)
    }

    /// Aborts every communicator. The kernels that wait for lost ranks end, with an error.
    pub(in crate::cuda) fn abort_joined(&self) {
        let all = std::mem::take(&mut *self.joined.lock().unwrap_or_else(PoisonError::into_inner));
        for Communicator { pointer, .. } in all {
            // SAFETY: it is joined, and no longer in the list.
            let _ = library().map(|nccl| unsafe { nccl.abort(pointer) });
        }
    }

    /// Returns `true` once communication was aborted.
    pub(in crate::cuda) fn is_aborted(&self) -> bool {
        self.is_aborted.load(Ordering::SeqCst)
    }
}

/// Queues sends and receives as one NCCL group, so that they progress together.
fn grouped(nccl: &Nccl, queue: impl FnOnce() -> Result<(), CudaError>) -> Result<(), CudaError> {
    checked(COMMUNICATING, nccl.group_start())?;
    let queued = queue();
    // The group must end even if queueing failed.
    let ended = checked(COMMUNICATING, nccl.group_end());
    queued.and(ended)
}
