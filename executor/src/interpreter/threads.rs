//! The streams at work: each takes its next instruction, waits for what that depends on, has it done, records its span.

use super::gpu::{self, GpuCommunication};
use super::prepared_program::PreparedProgram;
use super::stream_key::StreamKey;
use super::stream_runner::StreamRunner;
use super::{COMPUTE, END, RawSpan, SharedState, StepRequest};
use crate::backend::{Backend, CpuBackend, Hyperparameters};
use crate::clock;
use crate::error::ExecutorError;
use crate::machine;
use crate::transport::spin_only_while;
use std::panic;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};

/// Runs the compute stream on the calling thread.
pub(super) fn compute(
    shared: &SharedState,
    prepared: &PreparedProgram,
    backend: &mut CpuBackend,
    hyperparameters: &Hyperparameters,
) -> Result<(), ExecutorError> {
    let mut spans = shared.spans[0].lock().unwrap_or_else(PoisonError::into_inner);
    spans.clear();
    spans.reserve(prepared.lists[0].len());
    let mut start = clock::now();
    for &id in &prepared.lists[0] {
        let after = &prepared.after[id as usize];
        for &(slot, instruction) in after {
            // The core has nothing else to do now: who waits for the peer may spin.
            let nudge = || shared.numbers[slot].map_or((), |number| shared.transport.nudge(number));
            shared.progress.wait(COMPUTE, slot, instruction, nudge)?;
        }
        // A stream that was woken by the last instruction may have had the core since, and be done by now.
        if after.iter().any(|&(slot, _)| slot != COMPUTE) {
            start = clock::now();
        }
        // SAFETY: operands are places in the arena that the memory plan gave to live buffers; whoever wrote them is done and
        // nobody else touches them now, because the dependencies say so and were waited for.
        prepared.run_kernel(id, hyperparameters, |call| unsafe { backend.run(call) })?;
        let end = clock::now();
        spans.push(RawSpan { start, end });
        start = end;
        shared.progress.post(0, id);
    }
    Ok(())
}

/// The life of a stream's thread. One that panics must not leave the others waiting for it.
/// `communication` is how it reaches other ranks from a GPU.
pub(super) fn live(shared: &Arc<SharedState>, slot: usize, runner: StreamRunner, communication: Option<GpuCommunication>) {
    let lived = panic::catch_unwind(panic::AssertUnwindSafe(|| work(shared, slot, runner, communication)));
    if let Err(panic) = lived {
        shared.fail(ExecutorError::panicked(shared.keys[slot].to_string(), panic.as_ref()));
        shared.main.unpark();
    }
}

/// A list for each step that is begun.
fn work(shared: &Arc<SharedState>, slot: usize, mut runner: StreamRunner, mut communication: Option<GpuCommunication>) {
    shared.progress.enter(slot);
    let progress = Arc::clone(shared);
    spin_only_while(move || progress.progress.sleeps_for(COMPUTE, slot));
    machine::flush_denormals();
    if shared.keys[slot] != StreamKey::Load {
        machine::run_in_short_slices();
    }
    let mut step_number = 0;
    loop {
        loop {
            let begun = shared.begun.load(Ordering::SeqCst);
            if begun == END {
                return;
            }
            if begun > step_number {
                step_number = begun;
                break;
            }
            std::thread::park();
        }
        let step = shared.step.read().unwrap_or_else(PoisonError::into_inner).clone();
        let prepared = &shared.programs[step.program];
        // Asked before the step ends: the next may begin as soon as it has.
        let turn = shared.gpu_streams.as_ref().map_or(0, |gpu_streams| gpu_streams.mode().turn);
        let done = match (&shared.gpu_streams, &mut communication) {
            (Some(gpu_streams), Some(communication)) => {
                gpu::stream(shared, gpu_streams, prepared, slot, &mut runner, communication, &step)
            }
            _ => stream(shared, prepared, slot, &mut runner, &step),
        };
        if let Err(error) = done {
            shared.fail(error);
        }
        shared.ended[slot].store(step_number, Ordering::SeqCst);
        shared.main.unpark();
        if let Some(gpu_streams) = &shared.gpu_streams
            && let Err(error) = gpu_streams.make_ready(prepared, slot, turn, &mut runner, &step)
        {
            shared.fail(error);
        }
    }
}

/// Runs one step of a stream other than compute.
fn stream(
    shared: &SharedState,
    prepared: &PreparedProgram,
    slot: usize,
    runner: &mut StreamRunner,
    step: &StepRequest,
) -> Result<(), ExecutorError> {
    let mut spans = shared.spans[slot].lock().unwrap_or_else(PoisonError::into_inner);
    spans.clear();
    spans.reserve(prepared.lists[slot].len());
    for &id in &prepared.lists[slot] {
        for &(other, instruction) in &prepared.after[id as usize] {
            shared.progress.wait(slot, other, instruction, || ())?;
        }
        if shared.progress.has_failed() {
            return Err(ExecutorError::OtherStream);
        }
        let start = clock::now();
        let operands = &prepared.operands[id as usize];
        // SAFETY: as for kernels: the operands are this instruction's alone until it posts.
        unsafe {
            runner.run(&prepared.stage.instructions[id as usize].operation, &operands.reads, &operands.writes, &step.samples)
        }?;
        spans.push(RawSpan { start, end: clock::now() });
        shared.progress.post(slot, id);
        if shared.keys[slot] == StreamKey::Load {
            // Kernels first: what is read now is for later micro-batches. Without this the first kernel of a pipeline's step was seen to begin
            // when the samples of the last micro-batch were there: who is woken does not get the core from one whose turn is not over.
            std::thread::yield_now();
        }
    }
    Ok(())
}
