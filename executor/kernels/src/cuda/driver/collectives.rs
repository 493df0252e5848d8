//! The seam to communication between GPUs: communicators of ranks that have one GPU each. NCCL
//! implements it; so does a test device that passes messages through host memory.

use super::{CudaError, DeviceAddress, StreamHandle};
use foretell_units::DataType;
use std::fmt::Debug;

/// Token by which the ranks of a communicator find each other (`ncclUniqueId`). One rank creates it
/// and sends it to the others.
pub type CommunicatorId = [u8; 128];

/// A communicator that this rank has joined.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CommunicatorHandle(pub usize);

/// A collective, or one side of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CommunicationKind {
    /// Replaces `write` on every rank by the sum of all ranks' `write`.
    AllReduce,
    /// Sums all ranks' `read`, and gives each rank its shard of the sum.
    ReduceScatter,
    /// Concatenates all ranks' `read` in rank order, on every rank.
    AllGather,
    /// Sends the j-th part of `read` to rank j, which puts it at the sender's position in `write`.
    AllToAll,
    /// Sends `read` to the next rank, and the last rank's to the first.
    Shift,
    /// Sends `read` from rank 0 of two to rank 1.
    Send,
    /// Receives on rank 1 of two what rank 0 sends.
    Receive,
}

/// A range of the device's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceRange {
    /// Its first byte.
    pub address: DeviceAddress,
    /// Its length.
    pub bytes: usize,
}

/// One collective or message, from this rank's side. Every rank of the communicator queues the same
/// sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceCommunication {
    /// The collective or message, by its kind.
    pub kind: CommunicationKind,
    /// `None` where the kind reads nothing.
    pub read: Option<DeviceRange>,
    /// `None` where the kind writes nothing.
    pub write: Option<DeviceRange>,
    /// Number format, for the kinds that sum.
    pub data_type: DataType,
}

impl DeviceCommunication {
    /// Returns both operands of a kind that reads and writes.
    ///
    /// # Errors
    /// [`CudaError::Call`] if either is missing.
    pub fn operands(&self) -> Result<(DeviceRange, DeviceRange), CudaError> {
        let missing = CudaError::Call { action: "communication between GPUs", reason: "an operand is missing".into() };
        self.read.zip(self.write).ok_or(missing)
    }
}

/// The communicators of one rank.
pub trait Collectives: Debug + Send + Sync {
    /// Creates the id of a new communicator.
    fn new_communicator_id(&self) -> Result<CommunicatorId, CudaError>;

    /// Joins as rank `position` of `size`. Returns once all ranks have joined; fails after
    /// [`Collectives::abort`].
    fn join(&self, id: &CommunicatorId, size: usize, position: usize) -> Result<CommunicatorHandle, CudaError>;

    /// Queues a collective or message on a stream.
    ///
    /// # Safety
    /// The operands are this device's memory, and nothing else uses them until the work is done.
    unsafe fn communicate(
        &self,
        communicator: CommunicatorHandle,
        communication: &DeviceCommunication,
        stream: StreamHandle,
    ) -> Result<(), CudaError>;

    /// Aborts all communication, also what is running, because a rank was lost. Later calls fail.
    fn abort(&self);

    /// Returns `true` after [`Collectives::abort`].
    fn is_aborted(&self) -> bool;
}
