//! A Program made ready to run on one rank: who runs which instruction on what, and after whom.

use super::stream_key::StreamKey;
use crate::arena::Arenas;
use crate::backend::{BackendError, Hyperparameters, KernelCall, Operand};
use crate::error::ExecutorError;
use foretell_program::{Mesh, Metric, Operation, Program, Rank, StageProgram};
use foretell_units::DataType;

/// A Program made ready to run: for each stream its instructions, for each instruction whom it waits for.
pub(super) struct PreparedProgram {
    pub(super) stage: StageProgram,
    /// By slot: the instructions of its stream.
    pub(super) lists: Vec<Vec<u32>>,
    /// By instruction: slot and instruction that must be done.
    pub(super) after: Vec<Vec<(usize, u32)>>,
    /// By instruction: its operands.
    pub(super) operands: Vec<Operands>,
    /// By group: which part the rank has of what the group's axes cut.
    pub(super) group_index: Vec<usize>,
    /// Samples of a micro-batch that lie on ranks before this one.
    pub(super) samples_before: usize,
    pub(super) precision: DataType,
    /// What the run reports: one number each.
    pub(super) metrics: Vec<(Metric, Operand)>,
}

pub(super) struct Operands {
    pub(super) reads: Vec<Operand>,
    pub(super) writes: Vec<Operand>,
}

// SAFETY: operands are places in the arena, which outlives the prepared; who touches them when is the Program's order.
unsafe impl Send for PreparedProgram {}
// SAFETY: as above.
unsafe impl Sync for PreparedProgram {}

impl PreparedProgram {
    pub(super) fn new(
        program: &Program,
        mesh: &Mesh,
        rank: Rank,
        keys: &[StreamKey],
        arenas: &Arenas,
    ) -> Result<Self, ExecutorError> {
        let stage = program.list_of(rank);
        let slot_of: Vec<usize> = stage
            .streams
            .iter()
            .map(|stream| keys.iter().position(|key| *key == StreamKey::of(program, rank, stream)).unwrap_or(0))
            .collect();
        let mut lists = vec![Vec::new(); keys.len()];
        let mut after = Vec::with_capacity(stage.instructions.len());
        let mut operands = Vec::with_capacity(stage.instructions.len());
        let place = |id: &foretell_program::BufferId| {
            let buffer = stage.buffer(*id);
            let outside =
                || ExecutorError::OutOfMemory { wanted: stage.arena, reason: format!("`{}` lies outside", buffer.name) };
            let pointer = arenas.at(buffer).ok_or_else(outside)?;
            Ok::<Operand, ExecutorError>(Operand { pointer, bytes: buffer.bytes.count() as usize })
        };
        for (index, instruction) in stage.instructions.iter().enumerate() {
            lists[slot_of[instruction.stream.0 as usize]].push(index as u32);
            let slot = |id: u32| slot_of[stage.instructions[id as usize].stream.0 as usize];
            after.push(instruction.after.iter().map(|id| (slot(id.0), id.0)).collect());
            operands.push(Operands {
                reads: instruction.reads.iter().map(place).collect::<Result<_, _>>()?,
                writes: instruction.writes.iter().map(place).collect::<Result<_, _>>()?,
            });
        }
        let coordinates = mesh.coordinates(rank);
        let stage_mesh = mesh.stage_at(coordinates);
        let group_index = stage.groups.iter().map(|group| stage_mesh.part_along(&group.axes, coordinates)).collect();
        let samples_before = stage_mesh.samples_before(coordinates);
        let metrics = stage
            .metrics
            .iter()
            .map(|metric| Ok((metric.clone(), place(&metric.buffer)?)))
            .collect::<Result<_, ExecutorError>>()?;
        let precision = program.precision;
        Ok(Self { stage: stage.clone(), lists, after, operands, group_index, samples_before, precision, metrics })
    }
    /// Has `run` do the kernel of an instruction, if it is one.
    pub(super) fn run_kernel(
        &self,
        id: u32,
        hyperparameters: &Hyperparameters,
        run: impl FnOnce(&KernelCall<'_>) -> Result<(), BackendError>,
    ) -> Result<(), ExecutorError> {
        let instruction = &self.stage.instructions[id as usize];
        let Operation::Compute { kernel, accumulate, group } = &*instruction.operation else { return Ok(()) };
        let operands = &self.operands[id as usize];
        let index = group.map_or(0, |group| self.group_index[group.0 as usize]);
        let (kernel, group_index, samples_before) = kernel.resolve_samples(index, self.samples_before);
        let call = KernelCall {
            kernel: &kernel,
            reads: &operands.reads,
            writes: &operands.writes,
            accumulate: *accumulate,
            hyperparameters,
            group_index,
            samples_before,
            precision: self.precision,
        };
        let name = || self.stage.name_of(instruction).into();
        run(&call).map_err(|source| ExecutorError::Kernel { instruction: id, name: name(), source })
    }
}
