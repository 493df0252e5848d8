//! The Program: what each rank does in one step, instruction by instruction, and where everything lies in its memory.
//!
//! There is one list for all ranks that run the same code on their own shards: a pipeline stage, or the part of it that has as many samples and
//! sends and receives alike. The simulator gives an instruction a duration, the executor a thread and a kernel; neither needs to know why it
//! is there.

mod buffer;

pub use buffer::{Buffer, BufferRole, Initial, InitialShare, MemoryKind};

use crate::collective::{Collective, CollectiveAlgorithm, CollectiveRole};
use crate::mesh::{Axis, Coordinates, Group, Mesh, Rank};
use crate::placement::{Placement, Placements};
use crate::schedule::Task;
use foretell_models::{InputKind, Kernel};
use foretell_units::{Bytes, DataType, Flops};
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

/// Ids of which there are mostly few: they lie in place, and only many on the heap. A Program has hundreds of thousands of such lists.
pub type Few<Id> = SmallVec<[Id; 4]>;

/// A buffer's place in [`StageProgram::buffers`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct BufferId(pub u32);

/// An instruction's place in [`StageProgram::instructions`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct InstructionId(pub u32);

/// A stream's place in [`StageProgram::streams`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct StreamId(pub u16);

/// A group's place in [`StageProgram::groups`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct GroupId(pub u16);

/// A peer's place in [`StageProgram::peers`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PeerId(pub u16);

/// A program for every rank of a mesh.
#[derive(Clone, Debug)]
pub struct Program {
    /// The ranks.
    pub mesh: Mesh,
    /// The number format of what operators read and write, and of products whose kernel does not say another.
    pub precision: DataType,
    /// The number format of the plan, over whose peak utilisation is stated: narrower than `precision` where products have operands of eight
    /// bits.
    pub format: DataType,
    /// The lists of instructions, in the order of their pipeline stages: one for each of these, or several for ranks that do not do alike.
    pub lists: Vec<StageProgram>,
    /// By rank: which of the lists it runs.
    pub list_of_rank: Vec<u32>,
    /// Samples that one run of it takes from the data set.
    pub samples: usize,
    /// Predictions that the loss is summed over.
    pub predictions: usize,
    /// Tokens that one run takes, if samples are sequences.
    pub tokens: Option<usize>,
    /// Arithmetic of one run over all ranks that counts for model FLOPs utilisation.
    pub model_flops: Flops,
    /// Arithmetic of matrix products of one run over all ranks, counted as [`Program::model_flops`] counts it (attention in full) but with
    /// recomputation and duplicated work; so it is never less.
    pub hardware_flops: Flops,
}

impl Program {
    /// The list that a rank runs.
    pub fn list_of(&self, rank: Rank) -> &StageProgram {
        &self.lists[self.list_index(rank)]
    }

    /// Which of the lists a rank runs.
    pub fn list_index(&self, rank: Rank) -> usize {
        self.list_of_rank[rank.0] as usize
    }

    /// Each rank's list, where a stage has one: what [`Program::list_of_rank`] is then.
    pub fn one_list_a_stage(mesh: &Mesh) -> Vec<u32> {
        (0..mesh.world_size()).map(|rank| mesh.stage_of(Rank(rank)) as u32).collect()
    }

    /// Lays the ranks out in another order over the devices, and says whether it could: what a rank does follows from its place in the mesh and not
    /// from its number, so that plans which differ only in `placement` and `stage_places` have the same lists. Nothing is changed where stages are of
    /// other sizes, or have several lists.
    pub fn lay_out(&mut self, mesh: Mesh) -> bool {
        let stages = mesh.stage_count();
        let are_alike = self.lists.len() == stages
            && self.mesh.stage_count() == stages
            && (0..stages).all(|stage| self.lists[stage].stage == stage && self.mesh.stage(stage) == mesh.stage(stage));
        if are_alike {
            self.list_of_rank = Self::one_list_a_stage(&mesh);
            self.mesh = mesh;
        }
        are_alike
    }

    /// The bytes of each stage's largest arena.
    pub fn arenas(&self) -> Vec<Bytes> {
        self.largest(|list| list.arena)
    }

    /// What a rank of each stage has in its host's memory, at most.
    pub fn host_arenas(&self) -> Vec<Bytes> {
        self.largest(|list| list.host_arena)
    }

    fn largest(&self, size: impl Fn(&StageProgram) -> Bytes) -> Vec<Bytes> {
        let mut largest = vec![Bytes::ZERO; self.mesh.stage_count()];
        for list in &self.lists {
            if let Some(known) = largest.get_mut(list.stage) {
                *known = size(list).max(*known);
            }
        }
        largest
    }
}

/// What ranks of one pipeline stage run.
#[derive(Clone, Debug)]
pub struct StageProgram {
    /// The stage's position on the pipeline axis.
    pub stage: usize,
    /// The queues; instructions of one stream run one after the other, in the order of the list.
    pub streams: Vec<Stream>,
    /// The process groups that its collectives use.
    pub groups: Vec<Group>,
    /// Whom its ranks send to and receive from.
    pub peers: Vec<Peer>,
    /// Everything that lies in memory.
    pub buffers: Vec<Buffer>,
    /// One step. The order is one in which a single stream could run them all.
    pub instructions: Vec<Instruction>,
    /// What instructions are called, once each; [`Instruction::name`] points here.
    pub names: Vec<String>,
    /// The passes of the stage's schedule, in order: what belongs to none comes before or after them.
    pub passes: Vec<Pass>,
    /// The sums that a step leaves behind for the run to report.
    pub metrics: Vec<Metric>,
    /// The size of the one allocation in which every buffer of the device's memory lies.
    pub arena: Bytes,
    /// The same of the host's memory; none where nothing is offloaded.
    pub host_arena: Bytes,
}

impl StageProgram {
    /// The buffer of an id.
    pub fn buffer(&self, id: BufferId) -> &Buffer {
        &self.buffers[id.0 as usize]
    }

    /// The instruction of an id.
    pub fn instruction(&self, id: InstructionId) -> &Instruction {
        &self.instructions[id.0 as usize]
    }

    /// Whether there are kernels, and nothing beside them and loads takes time: neither other ranks nor the host are waited for. On a GPU such a step can
    /// be captured and launched as one; of any other its kernels are launched one by one.
    pub fn is_alone(&self) -> bool {
        let is_kernel = |one: &Instruction| matches!(*one.operation, Operation::Compute { .. });
        let is_load = |one: &Instruction| matches!(*one.operation, Operation::Load { .. });
        self.instructions.iter().any(is_kernel) && self.instructions.iter().all(|one| is_kernel(one) || is_load(one))
    }

    /// The name of an instruction's operator or tensor.
    pub fn name_of(&self, instruction: &Instruction) -> &str {
        &self.names[instruction.name as usize]
    }
}

/// A pass of a stage's schedule, and what a list does for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pass {
    /// Which.
    pub task: Task,
    /// Its instructions, from the first that receives something for it.
    pub instructions: Range<u32>,
}

/// A rank of another stage, for each of those that run a list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    /// The stage.
    pub stage: usize,
    /// For each rank of the list, in order, which. Where there is none it is the one of the same position: the two stages' meshes are
    /// equal.
    pub ranks: Option<Vec<(Rank, Rank)>>,
}

impl Peer {
    /// Who it is to a rank.
    pub fn of(&self, mesh: &Mesh, rank: Rank) -> Rank {
        let listed = self.ranks.as_ref().and_then(|ranks| {
            let place = ranks.binary_search_by_key(&rank, |&(own, _)| own).ok()?;
            Some(ranks[place].1)
        });
        listed.unwrap_or_else(|| mesh.rank(mesh.coordinates(rank).with(Axis::Pipeline, self.stage)))
    }
}

/// A queue of instructions.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Stream {
    /// Kernels.
    Compute,
    /// Reading samples.
    Load,
    /// Collectives of one group, by its place in [`StageProgram::groups`].
    Group(GroupId),
    /// Sends to one peer.
    SendTo(PeerId),
    /// Receives from one peer.
    ReceiveFrom(PeerId),
    /// Copies into one of the memories from the other.
    CopyTo(MemoryKind),
}

/// What an instruction does.
#[derive(Clone, Debug, PartialEq)]
pub enum Operation {
    /// Runs a kernel on the reads and writes.
    Compute {
        /// Which, with its sizes.
        kernel: Kernel,
        /// Whether the kernel adds to the sums that it writes instead of replacing them.
        accumulate: bool,
        /// For kernels that must know which part of a whole the rank has ([`Kernel::Slice`], a part of a vocabulary): the group in which
        /// the rank's index says it.
        group: Option<GroupId>,
    },
    /// A collective of a group: from the one read to the one write (the same buffer where it works in place).
    Collective {
        /// Which.
        kind: Collective,
        /// Among whom.
        group: GroupId,
        /// Bytes of the larger side: the whole tensor.
        bytes: Bytes,
        /// The format of an element.
        data_type: DataType,
        /// What it is for.
        role: CollectiveRole,
        /// How it is made.
        algorithm: CollectiveAlgorithm,
    },
    /// Sends the one read to a rank of another stage.
    Send {
        /// Which.
        peer: PeerId,
        /// How much.
        bytes: Bytes,
    },
    /// Receives the one write from a rank of another stage.
    Receive {
        /// Which.
        peer: PeerId,
        /// How much.
        bytes: Bytes,
    },
    /// Reads the rank's samples of a micro-batch into the one write.
    Load {
        /// What of a sample.
        input: InputKind,
        /// The first sample of the micro-batch, counted within the step's global batch; a rank's own begin later by as many as
        /// [`crate::StageMesh::samples_before`] says.
        first_sample: usize,
        /// Samples of the rank.
        samples: usize,
    },
    /// Copies the one read to the one write, which lies in the other memory.
    Copy {
        /// The memory of the write.
        to: MemoryKind,
        /// How much.
        bytes: Bytes,
    },
}

impl Operation {
    /// The name in reports: the kernel's, or what is communicated.
    pub fn kind(&self) -> &'static str {
        match self {
            Operation::Compute { kernel, .. } => kernel.name(),
            Operation::Collective { kind, .. } => kind.name(),
            Operation::Send { .. } => "send",
            Operation::Receive { .. } => "receive",
            Operation::Load { .. } => "load",
            Operation::Copy { to: MemoryKind::Device, .. } => "copy_to_device",
            Operation::Copy { to: MemoryKind::Host, .. } => "copy_to_host",
        }
    }
}

/// Which part of a step an instruction belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// From samples to loss.
    Forward,
    /// A forward operator run again for the backward pass.
    Recompute,
    /// Gradients.
    Backward,
    /// Reducing gradients and updating parameters.
    Update,
}

/// One thing that a rank does.
#[derive(Clone, Debug)]
pub struct Instruction {
    /// Its operator's or tensor's name: an index into [`StageProgram::names`].
    pub name: u32,
    /// What it does. Those that do the same for other micro-batches share it.
    pub operation: Arc<Operation>,
    /// The queue that it stands in.
    pub stream: StreamId,
    /// Instructions of other streams that must have finished. Those before it in its own stream must have, too.
    pub after: Few<InstructionId>,
    /// What it reads, in its kernel's order.
    pub reads: Few<BufferId>,
    /// What it writes, in its kernel's order.
    pub writes: Few<BufferId>,
    /// The micro-batch that it is for.
    pub micro_batch: Option<u32>,
    /// The part of the step.
    pub phase: Phase,
}

/// A number that a step leaves in a buffer, of which every rank holds a part.
#[derive(Clone, Debug, PartialEq)]
pub struct Metric {
    /// What it is.
    pub kind: MetricKind,
    /// Where it lies: one `Fp32`.
    pub buffer: BufferId,
    /// How it is shared out: ranks along a replicated axis hold the same, and only the first of them counts.
    pub placements: Placements,
}

impl Metric {
    /// Whether the rank at a position contributes its value to the sum over all ranks.
    pub fn counts_at(&self, coordinates: Coordinates) -> bool {
        Axis::WITHIN_STAGE.iter().all(|&axis| self.placements.get(axis) != Placement::Replicate || coordinates.along(axis) == 0)
    }
}

/// What a metric is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MetricKind {
    /// The sum of the loss over predictions.
    Loss,
    /// The number of right predictions.
    Correct,
    /// The sum of squares of the gradient.
    SquaredGradientNorm,
    /// Choices of experts that found no slot.
    Dropped,
    /// The factor on the loss in `fp16`.
    LossScale,
    /// Steps whose update was skipped so far, since the gradient overflowed.
    SkippedSteps,
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
        }
    }
}
