//! A step's kernels run where they stand, without any other rank: on the arena that the memory plan lays out, one after the other as in the
//! step, so that each finds in the caches what the step leaves it there. What other ranks would send is taken from what is here.
//!
//! It knows no durations.

use super::prepared_program::PreparedProgram;
use super::stream_key::stream_keys;
use super::stream_runner::StreamRunner;
use crate::arena::Arenas;
use crate::backend::{Backend, CpuBackend, Hyperparameters, Operand};
use crate::error::ExecutorError;
use crate::half::Half;
use crate::samples::Samples;
use foretell_models::Kernel;
use foretell_program::{BufferId, Collective, Mesh, Operation, Program, Rank};
use foretell_units::DataType;

/// A rank's list of a Program, ready to be run without others.
pub(crate) struct SoloInterpreter {
    prepared: PreparedProgram,
    load: StreamRunner,
}

impl SoloInterpreter {
    /// Prepares the list of `rank` over arenas of the host's memory, which must outlive it.
    pub(crate) fn new(program: &Program, rank: Rank, arenas: &Arenas) -> Result<Self, ExecutorError> {
        let mesh: &Mesh = &program.mesh;
        let prepared = PreparedProgram::new(program, mesh, rank, &stream_keys(&[program], rank), arenas)?;
        let load = StreamRunner::Load { samples_before: prepared.samples_before, half: Half::of(program.precision) };
        Ok(Self { prepared, load })
    }

    /// The kernel of an instruction as this rank runs it, and whether it adds to what is there; nothing of what is no kernel.
    pub(crate) fn kernel(&self, instruction: u32) -> Option<(Kernel, bool)> {
        match *self.prepared.stage.instructions[instruction as usize].operation {
            Operation::Compute { kernel, accumulate, group } => {
                let index = group.map_or(0, |group| self.prepared.group_index[group.0 as usize]);
                Some((kernel.for_member(index), accumulate))
            }
            _ => None,
        }
    }

    /// Bytes that an instruction reads and writes.
    pub(crate) fn touched(&self, instruction: u32) -> usize {
        let operands = &self.prepared.operands[instruction as usize];
        operands.reads.iter().chain(&operands.writes).map(|operand| operand.bytes).sum()
    }

    /// The instructions before this one that write the integers which it reads: without them it would find numbers that are no indices.
    pub(crate) fn makers_of_integers(&self, instruction: u32) -> Vec<u32> {
        let stage = &self.prepared.stage;
        let reads = &stage.instructions[instruction as usize].reads;
        let integers = reads.iter().filter(|&&id| stage.buffer(id).data_type == DataType::Int32);
        let maker =
            |id: &BufferId| (0..instruction).rev().find(|&before| stage.instructions[before as usize].writes.contains(id));
        integers.filter_map(maker).collect()
    }

    /// How many instructions the list has.
    pub(crate) fn len(&self) -> usize {
        self.prepared.stage.instructions.len()
    }

    /// Runs one instruction, as if every rank had what this one has.
    pub(crate) fn run(
        &mut self,
        instruction: u32,
        backend: &mut CpuBackend,
        (hyperparameters, samples): (&Hyperparameters, &Samples),
    ) -> Result<(), ExecutorError> {
        let operands = &self.prepared.operands[instruction as usize];
        let operation = &*self.prepared.stage.instructions[instruction as usize].operation;
        match (operation, &operands.reads[..], &operands.writes[..]) {
            (Operation::Compute { .. }, ..) => {
                // SAFETY: operands are places in the arena that the memory plan gave to live buffers, and nobody else touches the arena.
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
                // SAFETY: as above; only an all-reduce reads where it writes.
                unsafe { alone(*kind, part, read, write) };
            }
            // SAFETY: as above.
            (Operation::Receive { .. }, _, [write]) => unsafe { touch(write) },
            _ => {}
        }
        Ok(())
    }
}

/// What an exchange leaves where every rank has what this one has, up to what they would have added: numbers of the same size in the same places.
///
/// # Safety
/// The operands are valid, nobody else's, and apart but for an all-reduce.
unsafe fn alone(kind: Collective, part: usize, read: &Operand, write: &Operand) {
    // SAFETY: the caller's promise.
    let bytes = |operand: &Operand| unsafe { std::slice::from_raw_parts_mut(operand.pointer, operand.bytes) };
    match kind {
        // SAFETY: the caller's promise.
        Collective::AllReduce => unsafe { touch(write) },
        Collective::ReduceScatter => {
            let (whole, own) = (bytes(read), bytes(write));
            let start = (part * own.len()).min(whole.len().saturating_sub(own.len()));
            let length = own.len().min(whole.len());
            own[..length].copy_from_slice(&whole[start..start + length]);
        }
        Collective::AllGather => {
            let own = bytes(read);
            for part in bytes(write).chunks_mut(own.len().max(1)) {
                part.copy_from_slice(&own[..part.len()]);
            }
        }
        Collective::AllToAll | Collective::Shift => {
            let (given, taken) = (bytes(read), bytes(write));
            let length = given.len().min(taken.len());
            taken[..length].copy_from_slice(&given[..length]);
        }
    }
}

/// Writes what is there already, runner by runner: a message that arrives comes through the caches.
///
/// # Safety
/// The operand is valid and nobody else's.
unsafe fn touch(operand: &Operand) {
    const LINE: usize = 64;
    for offset in (0..operand.bytes).step_by(LINE) {
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
    fn an_exchange_leaves_what_it_would_if_all_had_the_same() {
        let after = |kind, part, given: &[u8], length: usize| {
            let (mut given, mut taken) = (given.to_vec(), vec![9; length]);
            // SAFETY: both are vectors of their own.
            unsafe { alone(kind, part, &operand(&mut given), &operand(&mut taken)) };
            taken
        };
        assert_eq!(after(Collective::AllGather, 1, &[1, 2], 6), [1, 2, 1, 2, 1, 2]);
        assert_eq!(after(Collective::ReduceScatter, 1, &[1, 2, 3, 4], 2), [3, 4]);
        assert_eq!(after(Collective::AllToAll, 0, &[1, 2], 2), [1, 2]);
        assert_eq!(after(Collective::Shift, 0, &[1, 2], 2), [1, 2]);
        let mut numbers: Vec<u8> = (0..200).collect();
        let one = operand(&mut numbers);
        // SAFETY: an all-reduce has one place, this vector.
        unsafe { alone(Collective::AllReduce, 0, &one, &one) };
        assert!(numbers.iter().copied().eq(0..200), "a sum leaves numbers of the same size");
    }
}
