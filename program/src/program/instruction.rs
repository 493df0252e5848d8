//! Instructions: the operation of each, the stream it runs on, and the buffers it reads and writes.

use super::buffer::MemoryKind;
use super::ids::{BufferId, Few, GroupId, InstructionId, PeerId, StreamId};
use crate::collective::{Collective, CollectiveAlgorithm, CollectiveRole};
use crate::mesh::Axis;
use foretell_models::{InputKind, Kernel, Zigzag};
use foretell_units::{Bytes, DataType};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::sync::Arc;

/// One instruction of a list.
#[derive(Clone, Debug)]
pub struct Instruction {
    /// The name of its operator or tensor: an index into
    /// [`StageProgram::names`](super::StageProgram::names).
    pub name: u32,
    /// The operation. Instructions that do the same for other micro-batches share it.
    pub operation: Arc<Operation>,
    /// The stream.
    pub stream: StreamId,
    /// Instructions of other streams that must have finished first. Earlier instructions of the
    /// same stream must have finished, too.
    pub after: Few<InstructionId>,
    /// The buffers that it reads, in the order of its kernel's operands.
    pub reads: Few<BufferId>,
    /// The buffers that it writes, in the order of its kernel's operands.
    pub writes: Few<BufferId>,
    /// The micro-batch; `None` if it belongs to the whole step.
    pub micro_batch: Option<u32>,
    /// The part of the step.
    pub phase: Phase,
}

/// A stream: instructions that run one after the other.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Stream {
    /// Kernels.
    Compute,
    /// Loads of samples.
    Load,
    /// Collectives of one group.
    Group(GroupId),
    /// Sends to one peer.
    SendTo(PeerId),
    /// Receives from one peer.
    ReceiveFrom(PeerId),
    /// Copies into this memory from the other.
    CopyTo(MemoryKind),
    /// Writes to storage. They overlap with later steps.
    Storage,
}

impl fmt::Display for Stream {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Stream::Compute => formatter.pad("compute"),
            Stream::Load => formatter.pad("load"),
            Stream::Group(group) => formatter.pad(&format!("group {}", group.0)),
            Stream::SendTo(peer) => formatter.pad(&format!("to peer {}", peer.0)),
            Stream::ReceiveFrom(peer) => formatter.pad(&format!("from peer {}", peer.0)),
            Stream::CopyTo(memory) => formatter.pad(&format!("to {}", memory.name())),
            Stream::Storage => formatter.pad("storage"),
        }
    }
}

/// The operation of an instruction.
#[derive(Clone, Debug, PartialEq)]
pub enum Operation {
    /// Runs a kernel.
    Compute {
        /// The kernel, with its sizes.
        kernel: Kernel,
        /// Whether the kernel adds to the sums that it writes. Otherwise it overwrites them.
        accumulate: bool,
        /// The group in which the rank's index selects its part, for kernels that depend on the
        /// index ([`Kernel::Slice`], a part of a vocabulary).
        group: Option<GroupId>,
    },
    /// Runs an operator of a traced framework ([`crate::traced`]), or work of its wrapper or
    /// optimizer that the operator table does not have. The executor has no kernel for it.
    Traced {
        /// Its name, such as `aten.mm`.
        operator: Arc<str>,
        /// The bytes that it reads and writes.
        bytes: Bytes,
    },
    /// Runs a collective of a group, from the one buffer that it reads to the one that it writes.
    /// In place, they are the same buffer.
    Collective {
        /// The kind of collective.
        kind: Collective,
        /// The group.
        group: GroupId,
        /// The bytes of the larger side: the whole tensor.
        bytes: Bytes,
        /// The number format of an element.
        data_type: DataType,
        /// The purpose.
        role: CollectiveRole,
        /// The algorithm.
        algorithm: CollectiveAlgorithm,
    },
    /// Sends the one buffer that it reads to a rank of another stage.
    Send {
        /// The receiver.
        peer: PeerId,
        /// The size of the message.
        bytes: Bytes,
    },
    /// Receives the one buffer that it writes from a rank of another stage.
    Receive {
        /// The sender.
        peer: PeerId,
        /// The size of the message.
        bytes: Bytes,
    },
    /// Loads the rank's samples of a micro-batch into the one buffer that it writes.
    Load {
        /// The part of each sample to load.
        input: InputKind,
        /// The first sample of the micro-batch, counted within the step's global batch. A rank's
        /// own samples start [`StageMesh::samples_before`](crate::StageMesh::samples_before) later.
        first_sample: usize,
        /// The number of samples of the rank.
        samples: usize,
        /// The order in which the positions of a sample are stored; `None` if it is the order of
        /// positions.
        order: Option<Zigzag>,
    },
    /// Copies the one buffer that it reads to the one that it writes, in the other memory.
    Copy {
        /// The memory that it copies to.
        to: MemoryKind,
        /// The size of the copy.
        bytes: Bytes,
    },
    /// Copies the rank's part of the state in the one buffer that it reads out of the arenas, in
    /// single precision. The next step waits for it.
    Save {
        /// The tensors of the buffer that are saved, as indices into its
        /// [`StateContents::Tensors`](super::StateContents::Tensors).
        members: Arc<[usize]>,
        /// The axes whose ranks hold the same elements. Each of them saves an equal part.
        sharers: Arc<[Axis]>,
        /// The size of the copy on the rank that saves the most.
        bytes: Bytes,
    },
    /// Writes what the rank saved to storage. No step waits for this, but the next checkpoint does.
    Write {
        /// The size of what is written.
        bytes: Bytes,
    },
}

impl Operation {
    /// The name in reports: that of the kernel or the kind of communication.
    pub fn kind(&self) -> &str {
        match self {
            Operation::Compute { kernel, .. } => kernel.name(),
            Operation::Traced { operator, .. } => operator,
            Operation::Collective { kind, .. } => kind.name(),
            Operation::Send { .. } => "send",
            Operation::Receive { .. } => "receive",
            Operation::Load { .. } => "load",
            Operation::Copy { to: MemoryKind::Device, .. } => "copy_to_device",
            Operation::Copy { to: MemoryKind::Host, .. } => "copy_to_host",
            Operation::Save { .. } => "save",
            Operation::Write { .. } => "write",
        }
    }
}

/// The part of a step that an instruction belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// From samples to the loss.
    Forward,
    /// A forward operator that the backward pass runs a second time.
    Recompute,
    /// The computation of gradients.
    Backward,
    /// The reduction of gradients and the update of parameters.
    Update,
}
