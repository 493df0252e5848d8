//! Runs the instructions of one rank without the other ranks, for calibration.
//!
//! Instructions run one after the other on the arenas that the memory plan lays out, so that each
//! kernel finds in the caches what a step leaves there. Data from other ranks is replaced by data
//! of this one. The module measures no durations.

use super::prepared_program::PreparedProgram;
use super::stream_key::stream_keys;
use super::stream_runner::StreamRunner;
use crate::arena::Arenas;
use crate::backend::{Backend, CpuBackend, Hyperparameters, Operand};
use crate::error::ExecutorError;
use crate::half::SixteenBits;
use crate::samples::Samples;
use foretell_models::Kernel;
use foretell_program::{BufferId, Collective, Operation, Program, Rank};
use foretell_units::DataType;

/// One rank's list of a Program, prepared to run without other ranks.
pub(crate) struct SoloInterpreter {
    prepared: PreparedProgram,
    load: StreamRunner,
}

impl SoloInterpreter {
    /// Prepares the list of `rank`. The arenas are host memory and must outlive the interpreter.
    ///
    /// # Errors
    /// [`ExecutorError::OutOfMemory`] if a buffer lies outside the arenas.
    pub(crate) fn new(program: &Program, rank: Rank, arenas: &Arenas) -> Result<Self, ExecutorError> {
        let prepared = PreparedProgram::new(program, &program.mesh, rank, &stream_keys(&[program], rank), arenas)?;
        let load = StreamRunner::Load { samples_before: prepared.samples_before, half: SixteenBits::of(program.precision) };
        Ok(Self { prepared, load })
    }

    /// The kernel of an instruction as this rank runs it, and whether it accumulates into its
    /// output. `None` if the instruction is not a kernel.
    pub(crate) fn kernel(&self, instruction: u32) -> Option<(Kernel, bool)> {
        match *self.prepared.operation(instruction) {
            Operation::Compute { kernel, accumulate, group } => {
                let index = group.map_or(0, |group| self.prepared.group_index[group.0 as usize]);
                Some((kernel.for_member(index), accumulate))
            }
            _ => None,
        }
    }

    /// The bytes that an instruction reads and writes.
    pub(crate) fn bytes_touched(&self, instruction: u32) -> usize {
        let operands = &self.prepared.operands[instruction as usize];
        operands.reads.iter().chain(&operands.writes).map(|operand| operand.bytes).sum()
    }

    /// The instructions that last write the integers that `instruction` reads. Without them it
    /// would find arbitrary numbers in place of indices.
    pub(crate) fn writers_of_integer_reads(&self, instruction: u32) -> Vec<u32> {
        let stage = &self.prepared.stage;
        let reads = &stage.instructions[instruction as usize].reads;
        let integers = reads.iter().filter(|&&id| stage.buffer(id).data_type == DataType::Int32);
        let last_writer =
            |id: &BufferId| (0..instruction).rev().find(|&before| stage.instructions[before as usize].writes.contains(id));
        integers.filter_map(last_writer).collect()
    }

    /// The number of instructions in the list.
    pub(crate) fn len(&self) -> usize {
        self.prepared.stage.instructions.len()
    }

    /// Runs one instruction, as if every other rank had this rank's data.
    pub(crate) fn run(
        &mut self,
        instruction: u32,
        backend: &mut CpuBackend,
        (hyperparameters, samples): (&Hyperparameters, &Samples),
    ) -> Result<(), ExecutorError> {
        let operands = &self.prepared.operands[instruction as usize];
        let operation = self.prepared.operation(instruction);
        match (operation, &operands.reads[..], &operands.writes[..]) {
            (Operation::Compute { .. }, ..) => {
                // SAFETY: operands are places in the arenas that the memory plan gave to live
                // buffers, and nothing else accesses the arenas.
                self.prepared.run_kernel(instruction, hyperparameters, |call| unsafe { backend.run(call) })?;
            }
            // SAFETY: as above.
            (Operation::Load { .. }, ..) => unsafe {
                self.load.run(operation, &operands.reads, &operands.writes, samples)?;
            },
            // SAFETY: as above.
            (Operation::Copy { .. }, ..) => unsafe {
                StreamRunner::Copy.run(operation, &operands.reads, &operands.writes, samples)?;
            },
            (Operation::Collective { kind, group, .. }, [read], [write]) => {
                let part = self.prepared.group_index[group.0 as usize];
                // SAFETY: as above; only an all-reduce works in place.
                unsafe { collective_alone(*kind, part, read, write) };
            }
            // SAFETY: as above.
            (Operation::Receive { .. }, _, [write]) => unsafe { touch(write) },
            (Operation::Collective { .. } | Operation::Receive { .. }, ..) => {
                unreachable!("invariant: communication writes one buffer, and a collective reads one")
            }
            (Operation::Send { .. } | Operation::Save { .. } | Operation::Write { .. }, ..) => {}
            (Operation::Traced { operator, .. }, ..) => {
                return Err(ExecutorError::Unsupported {
                    what: format!("`{operator}` of a traced framework"),
                    hint: "this is a fault in the compiler: please report it".into(),
                });
            }
        }
        Ok(())
    }
}

/// Leaves what a collective would leave if every rank had this rank's data, except that an
/// all-reduce does not sum: the numbers keep their magnitude over any number of runs. `part` is the
/// rank's part of a reduce-scatter.
///
/// # Safety
/// The operands are valid, not in use elsewhere, and disjoint except for an all-reduce.
unsafe fn collective_alone(kind: Collective, part: usize, read: &Operand, write: &Operand) {
    // SAFETY: the caller's promise.
    let input = || unsafe { std::slice::from_raw_parts(read.pointer, read.bytes) };
    // SAFETY: the caller's promise.
    let output = || unsafe { std::slice::from_raw_parts_mut(write.pointer, write.bytes) };
    match kind {
        // SAFETY: the caller's promise.
        Collective::AllReduce => unsafe { touch(write) },
        Collective::ReduceScatter => {
            let (whole, own) = (input(), output());
            let start = (part * own.len()).min(whole.len().saturating_sub(own.len()));
            let length = own.len().min(whole.len());
            own[..length].copy_from_slice(&whole[start..start + length]);
        }
        Collective::AllGather => {
            let own = input();
            for part in output().chunks_mut(own.len().max(1)) {
                part.copy_from_slice(&own[..part.len()]);
            }
        }
        Collective::AllToAll | Collective::Shift => {
            let (sent, received) = (input(), output());
            let length = sent.len().min(received.len());
            received[..length].copy_from_slice(&sent[..length]);
        }
    }
}

/// Rewrites one byte of each cache line with its own value, so that the line enters the caches, as
/// an arriving message would.
///
/// # Safety
/// The operand is valid and not in use elsewhere.
unsafe fn touch(operand: &Operand) {
    const CACHE_LINE: usize = 64;
    for offset in (0..operand.bytes).step_by(CACHE_LINE) {
        // SAFETY: the offset lies in the operand.
        unsafe {
            let place = operand.pointer.add(offset);
            place.write_volatile(place.read_volatile());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn operand(bytes: &mut [u8]) -> Operand {
        Operand { pointer: bytes.as_mut_ptr(), bytes: bytes.len() }
    }

    #[test]
    fn a_collective_alone_leaves_the_result_of_equal_data_on_all_ranks() {
        let result = |kind, part, input: &[u8], length: usize| {
            let (mut input, mut output) = (input.to_vec(), vec![9; length]);
            // SAFETY: the operands are different vectors.
            unsafe { collective_alone(kind, part, &operand(&mut input), &operand(&mut output)) };
            output
        };
        assert_eq!(result(Collective::AllGather, 1, &[1, 2], 6), [1, 2, 1, 2, 1, 2]);
        assert_eq!(result(Collective::ReduceScatter, 1, &[1, 2, 3, 4], 2), [3, 4]);
        assert_eq!(result(Collective::AllToAll, 0, &[1, 2], 2), [1, 2]);
        assert_eq!(result(Collective::Shift, 0, &[1, 2], 2), [1, 2]);
        let mut numbers: Vec<u8> = (0..200).collect();
        let one = operand(&mut numbers);
        // SAFETY: an all-reduce works in place, on this vector.
        unsafe { collective_alone(Collective::AllReduce, 0, &one, &one) };
        assert!(numbers.iter().copied().eq(0..200), "an all-reduce keeps the numbers");
    }
}
