//! A Program prepared for one rank: instructions by stream, dependencies, and operand addresses.

use super::stream_key::StreamKey;
use crate::arena::Arenas;
use crate::backend::{BackendError, Hyperparameters, KernelCall, Operand};
use crate::error::ExecutorError;
use foretell_models::Kernel;
use foretell_program::{BufferId, Mesh, Metric, Operation, Program, Rank, StageProgram};
use foretell_units::DataType;

/// One rank's list of a Program, ready to run.
pub(super) struct PreparedProgram {
    /// The rank's instruction list.
    pub(super) stage: StageProgram,
    /// Per stream, its instructions, ascending.
    pub(super) stream_instructions: Vec<Vec<u32>>,
    /// Per instruction, the instructions that must be done before it, each with its stream.
    pub(super) dependencies: Vec<Vec<(usize, u32)>>,
    /// Per instruction, its operands.
    pub(super) operands: Vec<Operands>,
    /// Per group of the list, the rank's index among the parts into which the group's axes divide
    /// a tensor.
    pub(super) group_index: Vec<usize>,
    /// The samples of a micro-batch that lie on ranks before this one.
    pub(super) samples_before: usize,
    pub(super) precision: DataType,
    /// The reported metrics, each with the buffer that holds its value, one `f32`.
    pub(super) metrics: Vec<(Metric, Operand)>,
    /// The buffers of scores that an evaluation leaves, each with the number of values per sample.
    pub(super) scores: Vec<(usize, Operand)>,
}

/// The operands of an instruction, in the order of its reads and writes.
pub(super) struct Operands {
    pub(super) reads: Vec<Operand>,
    pub(super) writes: Vec<Operand>,
}

// SAFETY: operands are places in the arenas, which outlive this value. The Program's dependencies
// order all accesses.
unsafe impl Send for PreparedProgram {}
// SAFETY: as above.
unsafe impl Sync for PreparedProgram {}

impl PreparedProgram {
    /// Prepares the list of `rank`. `keys` holds the streams of the rank, which may be more than
    /// the list's.
    ///
    /// # Errors
    /// [`ExecutorError::OutOfMemory`] if a buffer lies outside the arenas.
    pub(super) fn new(
        program: &Program,
        mesh: &Mesh,
        rank: Rank,
        keys: &[StreamKey],
        arenas: &Arenas,
    ) -> Result<Self, ExecutorError> {
        let stage = program.list_of(rank);
        // The rank's stream for each stream of the list.
        let streams: Vec<usize> = stage
            .streams
            .iter()
            .map(|stream| {
                let own = StreamKey::of(program, rank, stream);
                keys.iter().position(|key| *key == own).expect("invariant: a rank has every stream of its list")
            })
            .collect();
        let mut stream_instructions = vec![Vec::new(); keys.len()];
        let mut dependencies = Vec::with_capacity(stage.instructions.len());
        let mut operands = Vec::with_capacity(stage.instructions.len());
        let operand = |id: &BufferId| {
            let buffer = stage.buffer(*id);
            let outside = || ExecutorError::OutOfMemory {
                wanted: stage.arena,
                reason: format!("buffer `{}` lies outside of it", buffer.name),
            };
            let pointer = arenas.at(buffer).ok_or_else(outside)?;
            Ok::<Operand, ExecutorError>(Operand { pointer, bytes: buffer.bytes.count() as usize })
        };
        for (index, instruction) in stage.instructions.iter().enumerate() {
            stream_instructions[streams[instruction.stream.0 as usize]].push(index as u32);
            let stream_of = |id: u32| streams[stage.instructions[id as usize].stream.0 as usize];
            dependencies.push(instruction.after.iter().map(|id| (stream_of(id.0), id.0)).collect());
            operands.push(Operands {
                reads: instruction.reads.iter().map(operand).collect::<Result<_, _>>()?,
                writes: instruction.writes.iter().map(operand).collect::<Result<_, _>>()?,
            });
        }
        let coordinates = mesh.coordinates(rank);
        let stage_mesh = mesh.stage_at(coordinates);
        let group_index = stage.groups.iter().map(|group| stage_mesh.part_along(&group.axes, coordinates)).collect();
        let samples_before = stage_mesh.samples_before(coordinates);
        let metrics = stage
            .metrics
            .iter()
            .map(|metric| Ok((metric.clone(), operand(&metric.buffer)?)))
            .collect::<Result<_, ExecutorError>>()?;
        let scores = scores(stage).map(|(width, buffer)| Ok((width, operand(&buffer)?))).collect::<Result<_, ExecutorError>>()?;
        Ok(Self {
            stage: stage.clone(),
            stream_instructions,
            dependencies,
            operands,
            group_index,
            samples_before,
            precision: program.precision,
            metrics,
            scores,
        })
    }

    /// The operation of an instruction.
    pub(super) fn operation(&self, instruction: u32) -> &Operation {
        &self.stage.instructions[instruction as usize].operation
    }

    /// Calls `run` with the kernel of an instruction.
    ///
    /// # Panics
    /// Panics if the instruction is no kernel: only instructions of the compute stream may be
    /// passed.
    ///
    /// # Errors
    /// [`ExecutorError::Kernel`], with the error of `run`.
    pub(super) fn run_kernel(
        &self,
        instruction: u32,
        hyperparameters: &Hyperparameters,
        run: impl FnOnce(&KernelCall<'_>) -> Result<(), BackendError>,
    ) -> Result<(), ExecutorError> {
        let Operation::Compute { kernel, accumulate, group } = self.operation(instruction) else {
            unreachable!("instruction {instruction} is no kernel")
        };
        let operands = &self.operands[instruction as usize];
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
        let name = || self.stage.name_of(&self.stage.instructions[instruction as usize]).into();
        run(&call).map_err(|source| ExecutorError::Kernel { instruction, name: name(), source })
    }
}

/// The buffers in which a list leaves scores, in the order of its micro-batches, each with the
/// number of values per sample.
fn scores(stage: &StageProgram) -> impl Iterator<Item = (usize, BufferId)> {
    stage.instructions.iter().filter_map(|instruction| match *instruction.operation {
        Operation::Compute { kernel: Kernel::ClassScores { classes, .. }, .. } => {
            instruction.writes.first().map(|&buffer| (classes + 1, buffer))
        }
        _ => None,
    })
}
