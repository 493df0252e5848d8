//! The seam to what moves data between GPUs without the host: communicators of ranks that have a GPU each. NCCL is one side, a meeting place in
//! memory the other, for tests.

use super::driver::{DeviceAddress, StreamHandle};
use super::error::CudaError;
use foretell_units::DataType;
use std::fmt::Debug;

/// By what the ranks of a communicator find each other; made by one of them and told to the others.
pub(crate) type Identity = [u8; 128];

/// A communicator that this rank has joined.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct CommunicatorHandle(pub(crate) usize);

/// What the ranks of a communicator do together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ExchangeKind {
    /// The sum of all, in place of what is written.
    AllReduce,
    /// To each its part of the sum.
    ReduceScatter,
    /// All parts to all, in the order of the ranks.
    AllGather,
    /// Each rank's j-th part to rank j's place of that rank.
    AllToAll,
    /// To the next rank, the last to the first.
    Shift,
    /// From the first of two ranks to the second.
    Send,
    /// The other side of it.
    Receive,
}

/// Memory of the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) address: DeviceAddress,
    pub(crate) bytes: usize,
}

/// One exchange from this rank's side; the others ask for the same at the same place in their order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Exchange {
    pub(crate) kind: ExchangeKind,
    /// Nothing where nothing is read.
    pub(crate) read: Option<Piece>,
    /// Nothing where nothing is written.
    pub(crate) write: Option<Piece>,
    /// The format of what is summed.
    pub(crate) data_type: DataType,
}

impl Exchange {
    /// Both sides of what reads and writes.
    pub(crate) fn both(&self) -> Result<(Piece, Piece), CudaError> {
        let missing = CudaError::Call { doing: "an exchange between GPUs", reason: "an operand is missing".into() };
        self.read.zip(self.write).ok_or(missing)
    }
}

/// Communicators of one rank.
pub(crate) trait Collectives: Debug + Send + Sync {
    /// A new communicator's identity.
    fn new_identity(&self) -> Result<Identity, CudaError>;

    /// Joins as one of `size` ranks; returns when all have. Fails once exchanges were broken off.
    fn join(&self, identity: &Identity, size: usize, position: usize) -> Result<CommunicatorHandle, CudaError>;

    /// Queues an exchange on a stream.
    ///
    /// # Safety
    /// The pieces are this device's memory, and nobody else's until it is done.
    unsafe fn exchange(
        &self,
        communicator: CommunicatorHandle,
        exchange: &Exchange,
        stream: StreamHandle,
    ) -> Result<(), CudaError>;

    /// Breaks all exchanges off, those that are under way too: a rank of them is lost. Later ones fail, and so does joining.
    fn abort(&self);

    /// Whether they were broken off.
    fn is_aborted(&self) -> bool;
}
