//! Runs the forward pass of a language model on one CPU core, on tokens that the caller gives.
//!
//! Instructions run one after the other, in the order of the list. This module knows no data sets
//! and no other ranks.

use super::prepared_program::PreparedProgram;
use super::stream_key::stream_keys;
use crate::arena::Arenas;
use crate::backend::{Backend, CpuBackend, Hyperparameters, Operand};
use crate::error::ExecutorError;
use foretell_models::{InputKind, LOGITS};
use foretell_program::{Operation, Program, Rank};

/// The only rank.
const ALONE: Rank = Rank(0);

/// The forward pass of one sequence, prepared to run.
pub(crate) struct ForwardInterpreter<'a> {
    prepared: PreparedProgram,
    backend: CpuBackend,
    /// The logits of all positions, one row for each.
    logits: Operand,
    /// The arenas that the operands lie in. Nothing else accesses them meanwhile.
    _arenas: &'a mut Arenas,
}

impl<'a> ForwardInterpreter<'a> {
    /// Prepares a Program that [`Compiler::logits`](foretell_program::Compiler::logits) made for
    /// one rank. The arenas are host memory.
    ///
    /// # Errors
    /// [`ExecutorError::OutOfMemory`] if a buffer lies outside the arenas;
    /// [`ExecutorError::Unsupported`] if the Program keeps no logits.
    pub(crate) fn new(program: &Program, arenas: &'a mut Arenas) -> Result<Self, ExecutorError> {
        let prepared = PreparedProgram::new(program, &program.mesh, ALONE, &stream_keys(&[program], ALONE), arenas)?;
        let logits = program.list_of(ALONE).buffers.iter().find(|buffer| *buffer.name == *LOGITS);
        let logits = logits.and_then(|buffer| Some((arenas.at(buffer)?, buffer.bytes)));
        let (pointer, bytes) = logits.ok_or_else(|| unsupported("a Program that keeps no logits"))?;
        let logits = Operand { pointer, bytes: bytes.count() as usize };
        Ok(Self { prepared, backend: CpuBackend::default(), logits, _arenas: arenas })
    }

    /// Runs the forward pass over `tokens`; positions beyond them are zero. Returns the logits of
    /// all positions, one row after the other.
    ///
    /// # Errors
    /// The error of a kernel, or of an instruction that needs more than one rank.
    pub(crate) fn run(&mut self, tokens: &[i32]) -> Result<&[f32], ExecutorError> {
        let hyperparameters = Hyperparameters::default();
        for instruction in 0..self.prepared.stage.instructions.len() as u32 {
            match (self.prepared.operation(instruction), &self.prepared.operands[instruction as usize].writes[..]) {
                (Operation::Compute { .. }, _) => {
                    let backend = &mut self.backend;
                    // SAFETY: operands are places in the arenas that the memory plan gave to live
                    // buffers, and the arenas are borrowed mutably, so nothing else accesses them.
                    self.prepared.run_kernel(instruction, &hyperparameters, |call| unsafe { backend.run(call) })?;
                }
                (Operation::Load { input, .. }, [write]) => {
                    // SAFETY: the operand is a place in the arenas of that many integers, and the
                    // arenas are borrowed mutably, so nothing else accesses it.
                    let places = unsafe { std::slice::from_raw_parts_mut(write.pointer.cast::<i32>(), write.bytes / 4) };
                    load(*input, tokens, places)?;
                }
                (operation, _) => return Err(unsupported(&format!("`{}` with one rank", operation.kind()))),
            }
        }
        // SAFETY: the operand lies in the arenas, is aligned and holds single-precision numbers. No
        // kernel runs while the slice is borrowed: it borrows this interpreter, which alone
        // accesses the arenas.
        Ok(unsafe { std::slice::from_raw_parts(self.logits.pointer.cast::<f32>(), self.logits.bytes / 4) })
    }
}

/// Fills an input of one sequence.
fn load(input: InputKind, tokens: &[i32], places: &mut [i32]) -> Result<(), ExecutorError> {
    match input {
        InputKind::Tokens => {
            places.fill(0);
            places.iter_mut().zip(tokens).for_each(|(place, &token)| *place = token);
        }
        InputKind::Positions { first } => places.iter_mut().zip(first..).for_each(|(place, row)| *place = row as i32),
        other => return Err(unsupported(&format!("a model that reads {other:?}"))),
    }
    Ok(())
}

fn unsupported(what: &str) -> ExecutorError {
    ExecutorError::Unsupported { what: what.into(), hint: "generate with a GPT, a Llama, or another decoder".into() }
}
