//! Buffers: the purpose, offset, lifetime and initial contents of everything in a rank's memory.

use super::ids::{BufferId, InstructionId};
use crate::mesh::Axis;
use crate::placement::Placements;
use foretell_models::{TensorId, Zigzag};
use foretell_units::{Bytes, DataType};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// One of the two memories of a rank. On a CPU they are the same memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MemoryKind {
    /// The device's memory, which kernels work on.
    #[default]
    Device,
    /// The memory of the device's host.
    Host,
}

impl MemoryKind {
    /// The name in reports.
    pub const fn name(self) -> &'static str {
        match self {
            MemoryKind::Device => "device",
            MemoryKind::Host => "host",
        }
    }
}

/// The purpose of a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BufferRole {
    /// Parameters.
    Parameter,
    /// Tensors computed from parameters only, once for all micro-batches: eight-bit copies and
    /// their factors.
    ParameterCopy,
    /// Gradients of parameters.
    Gradient,
    /// Moments, velocities and single-precision copies of parameters.
    OptimizerState,
    /// The running statistics of batch norm.
    Running,
    /// Samples and labels.
    Input,
    /// Results of operators that other operators read.
    Activation,
    /// Sums over the batch, such as the loss.
    Sum,
    /// Intermediate results of communication and rearrangement.
    Workspace,
}

/// A buffer: a range of a rank's arena.
#[derive(Clone, Debug)]
pub struct Buffer {
    /// The tensor's name.
    pub name: Arc<str>,
    /// The purpose.
    pub role: BufferRole,
    /// The shape on one rank.
    pub shape: Arc<[usize]>,
    /// The number format of an element.
    pub data_type: DataType,
    /// The buffer that this one is a view of; `None` if it is no view: a parameter, for example, is
    /// a view of its bucket.
    pub parent: Option<BufferId>,
    /// The memory that holds it.
    pub memory: MemoryKind,
    /// The offset in that memory's arena.
    pub offset: Bytes,
    /// The size.
    pub bytes: Bytes,
    /// Whether it keeps its contents from step to step.
    pub persistent: bool,
    /// The first and the last instruction that touch it; `None` if none does.
    pub lifetime: Option<(InstructionId, InstructionId)>,
    /// Its part of the state of training; `None` if it has none and starts as zeros.
    pub state: Option<Box<StateContents>>,
}

/// A persistent buffer's part of the state of training. The state is everything that a run needs to
/// resume after a step.
#[derive(Clone, Debug, PartialEq)]
pub enum StateContents {
    /// Shards of tensors of the model, one after the other.
    Tensors {
        /// The value that is kept for each element of the tensors.
        value: StateValue,
        /// The shards, each with the element at which it starts. Elements between them are zero.
        members: Arc<[(usize, TensorShard)]>,
        /// The axes over whose ranks the shards are divided into equal parts, in ascending order;
        /// empty if the buffer holds the shards whole.
        axes: Arc<[Axis]>,
        /// The axis along which each rank holds its own values, since replicas differ even after an
        /// exchange; `None` if all ranks hold the same.
        replicas: Option<Axis>,
    },
    /// The update control: it starts with these values, followed by zeros.
    Control(Vec<f32>),
    /// These constants, which follow from the plan. No step changes them, and checkpoints leave
    /// them out.
    Constant(Arc<[f32]>),
}

/// A value that training keeps for each element of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum StateValue {
    /// The parameter, in the format that operators read.
    Parameter,
    /// The parameter in single precision, of which [`Self::Parameter`] is a rounded copy.
    Master,
    /// One of the values that the optimizer keeps, counted from 0. It starts as zero.
    Optimizer(usize),
    /// The running statistics of batch norm.
    Running,
    /// The outer parameters, which all replicas share: the parameters at the last exchange. They
    /// start as the parameters in single precision.
    OuterParameter,
    /// The velocity of the outer optimizer. It starts as zero.
    OuterVelocity,
    /// The rounding errors of a worker's pushes so far, to be added to the next push. It starts as
    /// zero.
    Residual,
}

/// A rank's shard of a parameter or of running statistics.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorShard {
    /// The tensor of the model's graph.
    pub tensor: TensorId,
    /// The placements of the tensor.
    pub placements: Placements,
    /// The order in which rows for the positions of a sequence are stored; `None` if it is the
    /// order of positions.
    pub zigzag: Option<Zigzag>,
}
