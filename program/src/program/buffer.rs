//! What lies in a rank's memory: what for, where, how long, and what it holds at the start.

use super::{BufferId, InstructionId};
use crate::mesh::Axis;
use crate::placement::Placements;
use foretell_units::{Bytes, DataType};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// Which memory: a processor's own is both.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MemoryKind {
    /// The device's, in which kernels work.
    #[default]
    Device,
    /// That of the device's host.
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

/// What a buffer is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BufferRole {
    /// Weights.
    Parameter,
    /// What a step makes of weights alone and uses for all micro-batches: copies in eight bits and their factors.
    ParameterCopy,
    /// Gradients of weights.
    Gradient,
    /// Moments, velocities and single-precision copies of weights.
    OptimizerState,
    /// Batch norm's running statistics.
    Running,
    /// Samples and labels.
    Input,
    /// What operators make for others.
    Activation,
    /// Sums over the batch.
    Sum,
    /// Room for communication and rearrangement.
    Workspace,
}

/// A piece of a rank's arena.
#[derive(Clone, Debug)]
pub struct Buffer {
    /// The tensor's name.
    pub name: Arc<str>,
    /// What it is for.
    pub role: BufferRole,
    /// The rank's share of the shape.
    pub shape: Arc<[usize]>,
    /// The format of an element.
    pub data_type: DataType,
    /// The buffer that it is a part of, if it is one: parameters lie in buckets.
    pub parent: Option<BufferId>,
    /// In which memory it lies.
    pub memory: MemoryKind,
    /// Where it starts in that memory's arena.
    pub offset: Bytes,
    /// How long it is.
    pub bytes: Bytes,
    /// Whether it keeps its contents from step to step.
    pub persistent: bool,
    /// The first and last instruction that touch it.
    pub lifetime: Option<(InstructionId, InstructionId)>,
    /// What initialises it, if it starts with something else than zeros.
    pub initial: Option<Box<Initial>>,
}

/// What a buffer holds before the first step.
#[derive(Clone, Debug, PartialEq)]
pub enum Initial {
    /// A rank's share of a tensor of the model.
    Share(InitialShare),
    /// Several shares one after the other, of which the buffer holds the part of the rank's position along an axis: parameters that ZeRO
    /// shards.
    Bucket {
        /// The shares, each with the element at which it starts. What lies between them is zero.
        members: Vec<(usize, InitialShare)>,
        /// The axis that cuts the whole into equal parts; `None` where the buffer holds all of it.
        axis: Option<Axis>,
    },
    /// These values, and then zeros.
    Values(Vec<f32>),
}

/// A rank's share of the start of a parameter or of running statistics.
#[derive(Clone, Debug, PartialEq)]
pub struct InitialShare {
    /// The tensor in the model's graph.
    pub tensor: foretell_models::TensorId,
    /// How that is shared out over the mesh.
    pub placements: Placements,
}
