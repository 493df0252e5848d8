//! The Program: the instructions that each rank runs in one step, and the offset of every buffer in
//! its memory.
//!
//! Ranks that run the same instructions on their own shards share one list: all ranks of a pipeline
//! stage, or those of them with equal numbers of samples and equal transfers. The simulator gives
//! every instruction a duration, the executor a thread and a kernel. Neither needs to know why an
//! instruction is there.

mod buffer;
mod ids;
mod instruction;

pub use buffer::{Buffer, BufferRole, MemoryKind, StateContents, StateValue, TensorShard};
pub use ids::{BufferId, Few, GroupId, InstructionId, PeerId, StreamId};
pub use instruction::{Instruction, Operation, Phase, Stream};

use crate::mesh::{Axis, Coordinates, Group, Mesh, Rank};
use crate::placement::{Placement, Placements};
use crate::schedule::Task;
use foretell_units::{Bytes, DataType, Flops};
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// The instructions of one step for every rank of a mesh.
#[derive(Clone, Debug)]
pub struct Program {
    /// The ranks.
    pub mesh: Mesh,
    /// The number format of tensors, and of products whose kernel does not state another.
    pub precision: DataType,
    /// The plan's number format, whose peak rate is the base of utilisation. It is narrower than
    /// `precision` if products have eight-bit operands.
    pub format: DataType,
    /// The instruction lists, in the order of their pipeline stages. A stage has several if its
    /// ranks differ in samples or transfers.
    pub lists: Vec<StageProgram>,
    /// The index in `lists` of each rank's list.
    pub list_of_rank: Vec<u32>,
    /// The number of samples that the step takes from the data set.
    pub samples: usize,
    /// The number of predictions that the loss is summed over.
    pub predictions: usize,
    /// The number of tokens that the step takes, if samples are sequences.
    pub tokens: Option<usize>,
    /// The FLOPs of the step over all ranks that count for model FLOPs utilisation.
    pub model_flops: Flops,
    /// The matrix-product FLOPs of the step over all ranks, counted as in `model_flops` (attention
    /// in full), plus recomputation and duplicated work. Never less than `model_flops`.
    pub hardware_flops: Flops,
}

impl Program {
    /// The list that a rank runs.
    pub fn list_of(&self, rank: Rank) -> &StageProgram {
        &self.lists[self.list_index(rank)]
    }

    /// The index of the list that a rank runs.
    pub fn list_index(&self, rank: Rank) -> usize {
        self.list_of_rank[rank.0] as usize
    }

    /// The value of [`Program::list_of_rank`] if every stage has one list.
    pub fn one_list_per_stage(mesh: &Mesh) -> Vec<u32> {
        (0..mesh.world_size()).map(|rank| mesh.stage_of(Rank(rank)) as u32).collect()
    }

    /// Changes the order of the ranks over the devices. Returns whether that was possible.
    ///
    /// A rank's instructions follow from its coordinates in the mesh, not from its number. So plans
    /// that differ only in rank order and stage positions have the same lists. Returns `false` and
    /// changes nothing if `mesh` has other stages, or if a stage has several lists.
    pub fn reorder_ranks(&mut self, mesh: Mesh) -> bool {
        let stages = mesh.stage_count();
        let has_same_stages = self.lists.len() == stages
            && self.mesh.stage_count() == stages
            && (0..stages).all(|stage| self.lists[stage].stage == stage && self.mesh.stage(stage) == mesh.stage(stage));
        if has_same_stages {
            self.list_of_rank = Self::one_list_per_stage(&mesh);
            self.mesh = mesh;
        }
        has_same_stages
    }

    /// The size of each stage's largest arena.
    pub fn arenas(&self) -> Vec<Bytes> {
        self.largest_of_stages(|list| list.arena)
    }

    /// The size of each stage's largest host arena.
    pub fn host_arenas(&self) -> Vec<Bytes> {
        self.largest_of_stages(|list| list.host_arena)
    }

    fn largest_of_stages(&self, size: impl Fn(&StageProgram) -> Bytes) -> Vec<Bytes> {
        let mut largest = vec![Bytes::ZERO; self.mesh.stage_count()];
        for list in &self.lists {
            if let Some(known) = largest.get_mut(list.stage) {
                *known = size(list).max(*known);
            }
        }
        largest
    }
}

/// An instruction list: one step of the ranks of a pipeline stage that share it.
#[derive(Clone, Debug)]
pub struct StageProgram {
    /// The stage's position on the pipeline axis.
    pub stage: usize,
    /// The streams. Instructions of a stream run one after the other, in the order of the list.
    pub streams: Vec<Stream>,
    /// The process groups of its collectives.
    pub groups: Vec<Group>,
    /// The ranks of other stages that its ranks send to and receive from.
    pub peers: Vec<Peer>,
    /// The buffers, on the device and on the host.
    pub buffers: Vec<Buffer>,
    /// The instructions, in an order in which a single stream could run them all.
    pub instructions: Vec<Instruction>,
    /// The names of instructions, each once; [`Instruction::name`] is an index.
    pub names: Vec<String>,
    /// The passes of the stage's schedule, in order. Instructions that belong to no pass come after
    /// them.
    pub passes: Vec<ScheduledPass>,
    /// The sums that the step leaves for the run to report.
    pub metrics: Vec<Metric>,
    /// The size of the one allocation that holds every buffer of the device's memory.
    pub arena: Bytes,
    /// The size of the allocation that holds every buffer of the host's memory; zero without
    /// offloading.
    pub host_arena: Bytes,
}

impl StageProgram {
    /// A list without instructions, whose ranks have `peers`. Kernels are in the first stream of
    /// every list.
    pub(crate) fn empty(stage: usize, peers: Vec<Peer>) -> Self {
        Self {
            stage,
            streams: vec![Stream::Compute],
            groups: Vec::new(),
            peers,
            buffers: Vec::new(),
            instructions: Vec::new(),
            names: Vec::new(),
            passes: Vec::new(),
            metrics: Vec::new(),
            arena: Bytes::ZERO,
            host_arena: Bytes::ZERO,
        }
    }

    /// The id of a stream, which is added if the list does not have it.
    pub(crate) fn stream_id(&mut self, stream: Stream) -> StreamId {
        StreamId(index_or_push(&mut self.streams, stream))
    }

    /// The buffer with an id.
    pub fn buffer(&self, id: BufferId) -> &Buffer {
        &self.buffers[id.0 as usize]
    }

    /// The instruction with an id.
    pub fn instruction(&self, id: InstructionId) -> &Instruction {
        &self.instructions[id.0 as usize]
    }

    /// Whether the list has kernels, and otherwise only loads: no instruction waits for another
    /// rank or for a copy. A GPU can then capture the step and launch it as a whole; otherwise
    /// kernels are launched one by one.
    pub fn is_alone(&self) -> bool {
        let is_kernel = |instruction: &Instruction| matches!(*instruction.operation, Operation::Compute { .. });
        let is_load = |instruction: &Instruction| matches!(*instruction.operation, Operation::Load { .. });
        self.instructions.iter().any(is_kernel)
            && self.instructions.iter().all(|instruction| is_kernel(instruction) || is_load(instruction))
    }

    /// The name of an instruction's operator or tensor.
    pub fn name_of(&self, instruction: &Instruction) -> &str {
        &self.names[instruction.name as usize]
    }
}

/// A pass of a stage's schedule, and the part of the list that runs it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScheduledPass {
    /// The pass, micro-batch and chunk.
    pub task: Task,
    /// The indices of the pass's instructions, which begin with the receives before it. The range
    /// of two woven passes is halved between them; each half has instructions of both.
    pub instructions: Range<u32>,
}

/// A rank of another stage, for each of the ranks that share a list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    /// The other stage.
    pub stage: usize,
    /// Pairs of a rank of the list and its peer, ascending. `None` if the two stages have equal
    /// meshes: then the peer has the rank's own coordinates in the other stage.
    pub ranks: Option<Vec<(Rank, Rank)>>,
}

impl Peer {
    /// The peer of `rank`.
    pub fn of(&self, mesh: &Mesh, rank: Rank) -> Rank {
        let listed = self.ranks.as_ref().and_then(|ranks| {
            let index = ranks.binary_search_by_key(&rank, |&(own, _)| own).ok()?;
            Some(ranks[index].1)
        });
        listed.unwrap_or_else(|| mesh.rank(mesh.coordinates(rank).with(Axis::Pipeline, self.stage)))
    }
}

/// A number that a step leaves in a buffer. It is the sum of the ranks' parts.
#[derive(Clone, Debug, PartialEq)]
pub struct Metric {
    /// The quantity.
    pub kind: MetricKind,
    /// The buffer: one `Fp32`.
    pub buffer: BufferId,
    /// The placements of the number. Ranks along a replicated axis hold the same part, and only the
    /// first of these ranks counts.
    pub placements: Placements,
}

impl Metric {
    /// Whether the rank at `coordinates` contributes its value to the sum over all ranks.
    pub fn counts_at(&self, coordinates: Coordinates) -> bool {
        Axis::WITHIN_STAGE.iter().all(|&axis| self.placements.get(axis) != Placement::Replicate || coordinates.along(axis) == 0)
    }
}

/// The quantity of a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MetricKind {
    /// The loss, summed over predictions.
    Loss,
    /// The number of correct predictions.
    Correct,
    /// The number of labels among the five best classes.
    TopFive,
    /// The sum of the weights of the labels' classes.
    Weight,
    /// The sum of squares of the gradient.
    SquaredGradientNorm,
    /// The number of expert choices that found no free slot.
    Dropped,
    /// The factor on the loss in `fp16`.
    LossScale,
    /// The number of updates skipped so far because the gradient overflowed.
    SkippedSteps,
}

/// The index of an item, pushed if it is not there yet.
pub(crate) fn index_or_push<Item: PartialEq>(items: &mut Vec<Item>, item: Item) -> u16 {
    let index = items.iter().position(|known| *known == item).unwrap_or_else(|| {
        items.push(item);
        items.len() - 1
    });
    index as u16
}
