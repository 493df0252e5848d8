//! The threads of a rank's streams.
//!
//! On a CPU each thread takes its stream's next instruction, waits for the dependencies, executes
//! the instruction and records its span. On a GPU the work of a step is in [`gpu`](super::gpu).

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

/// Runs one step of the compute stream, on the calling thread.
pub(super) fn run_compute_stream(
    shared: &SharedState,
    prepared: &PreparedProgram,
    backend: &mut CpuBackend,
    hyperparameters: &Hyperparameters,
) -> Result<(), ExecutorError> {
    let mut spans = shared.spans[COMPUTE].lock().unwrap_or_else(PoisonError::into_inner);
    spans.clear();
    spans.reserve(prepared.stream_instructions[COMPUTE].len());
    let mut start = clock::now();
    for &id in &prepared.stream_instructions[COMPUTE] {
        let dependencies = &prepared.dependencies[id as usize];
        for &(stream, instruction) in dependencies {
            // While this thread sleeps the core is idle, so the awaited stream may spin.
            let nudge = || shared.transport_streams[stream].map_or((), |number| shared.transport.nudge(number));
            shared.progress.wait(COMPUTE, stream, instruction, nudge)?;
        }
        // A kernel normally starts when the previous one ends. But a stream that the previous one
        // woke may have used the core in between and be done by now, so take the time anew.
        if dependencies.iter().any(|&(stream, _)| stream != COMPUTE) {
            start = clock::now();
        }
        // SAFETY: operands are places in the arenas that the memory plan gave to live buffers. The
        // dependencies are done, so the reads are written and nothing else accesses the writes.
        prepared.run_kernel(id, hyperparameters, |call| unsafe { backend.run(call) })?;
        let end = clock::now();
        spans.push(RawSpan { start, end });
        start = end;
        shared.progress.mark_done(COMPUTE, id);
    }
    Ok(())
}

/// The body of a stream's thread. A panic counts as a failure of the rank, so that no other stream
/// waits for it. `communication` is `None` on a CPU.
pub(super) fn stream_thread(
    shared: &Arc<SharedState>,
    stream: usize,
    runner: StreamRunner,
    communication: Option<GpuCommunication>,
) {
    let result = panic::catch_unwind(panic::AssertUnwindSafe(|| run_steps(shared, stream, runner, communication)));
    if let Err(panic) = result {
        shared.fail(ExecutorError::panicked(shared.keys[stream].to_string(), panic.as_ref()));
        shared.main.unpark();
    }
}

/// Runs the stream's part of each step that is started, until the interpreter ends.
fn run_steps(shared: &Arc<SharedState>, stream: usize, mut runner: StreamRunner, mut communication: Option<GpuCommunication>) {
    shared.progress.register_thread(stream);
    let state = Arc::clone(shared);
    spin_only_while(move || state.progress.is_waiting(COMPUTE, stream));
    machine::flush_denormals();
    if shared.keys[stream] != StreamKey::Load {
        machine::run_in_short_slices();
    }
    let mut step_number = 0;
    loop {
        loop {
            let started = shared.steps_started.load(Ordering::SeqCst);
            if started == END {
                return;
            }
            if started > step_number {
                step_number = started;
                break;
            }
            std::thread::park();
        }
        let step = shared.step.read().unwrap_or_else(PoisonError::into_inner).clone();
        let prepared = &shared.programs[step.program];
        // Read before this stream finishes the step: the next one may start right after and change
        // it.
        let buffer_set = shared.gpu_streams.as_ref().map_or(0, |gpu_streams| gpu_streams.mode().buffer_set);
        let result = match (&shared.gpu_streams, &mut communication) {
            (Some(gpu_streams), Some(communication)) => {
                gpu::run_stream(shared, gpu_streams, prepared, stream, &mut runner, communication, &step)
            }
            (None, None) => run_stream(shared, prepared, stream, &mut runner, &step),
            (Some(_), None) | (None, Some(_)) => {
                unreachable!("invariant: a stream has communication of its own exactly on a GPU")
            }
        };
        if let Err(error) = result {
            shared.fail(error);
        }
        shared.steps_finished[stream].store(step_number, Ordering::SeqCst);
        shared.main.unpark();
        if let Some(gpu_streams) = &shared.gpu_streams
            && let Err(error) = gpu_streams.prepare_next_samples(prepared, stream, buffer_set, &mut runner, &step)
        {
            shared.fail(error);
        }
    }
}

/// Runs one step of a stream other than compute, on a CPU.
fn run_stream(
    shared: &SharedState,
    prepared: &PreparedProgram,
    stream: usize,
    runner: &mut StreamRunner,
    step: &StepRequest,
) -> Result<(), ExecutorError> {
    let mut spans = shared.spans[stream].lock().unwrap_or_else(PoisonError::into_inner);
    spans.clear();
    spans.reserve(prepared.stream_instructions[stream].len());
    for &id in &prepared.stream_instructions[stream] {
        for &(other, instruction) in &prepared.dependencies[id as usize] {
            shared.progress.wait(stream, other, instruction, || ())?;
        }
        if shared.progress.has_failed() {
            return Err(ExecutorError::OtherStream);
        }
        let start = clock::now();
        let operands = &prepared.operands[id as usize];
        // SAFETY: as for kernels: nothing else accesses the writes until the instruction is marked
        // as done.
        unsafe { runner.run(prepared.operation(id), &operands.reads, &operands.writes, &step.samples) }?;
        spans.push(RawSpan { start, end: clock::now() });
        shared.progress.mark_done(stream, id);
        if shared.keys[stream] == StreamKey::Load {
            // Yield to the kernels, which need only the first micro-batch's samples. A woken thread
            // does not preempt one that still has a time slice. Without this, the first kernel of a
            // pipeline's step started only after the samples of the last micro-batch.
            std::thread::yield_now();
        }
    }
    Ok(())
}
