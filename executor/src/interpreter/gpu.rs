//! A step on a GPU. Each stream queues its next instruction behind the instruction's dependencies
//! and marks it as done once it is queued. The step ends when the GPU has done all queued work.
//!
//! If a rank's step waits for no other rank and no copy to the host, it is captured as a CUDA graph
//! and launched as a whole from then on.

mod communication;
mod streams;
#[cfg(test)]
mod tests;

pub(super) use communication::{GpuCommunication, connect};
pub(super) use streams::GpuStreams;

use super::prepared_program::PreparedProgram;
use super::stream_key::StreamKey;
use super::stream_runner::StreamRunner;
use super::{COMPUTE, SharedState, StepRequest};
use crate::arena::Arena;
use crate::backend::cuda::{CudaBackend, CudaError, DeviceAddress, Driver};
use crate::backend::{BackendError, Hyperparameters};
use crate::error::ExecutorError;
use foretell_program::{MemoryKind, Operation};
use foretell_units::Bytes;
use std::sync::Arc;
use streams::StepMode;

/// Runs every kernel once on the zeroed arena and clears the arena again.
///
/// This loads all kernels and allocates all scratch memory before ranks communicate. Communication
/// between GPUs waits on the GPU for the other rank, and loading a kernel may wait for everything
/// that the GPU is doing (CUDA C++ Programming Guide, Lazy Loading). Two ranks could otherwise wait
/// for each other forever.
pub(super) fn load_kernels(
    driver: &Arc<dyn Driver>,
    backend: &mut CudaBackend,
    programs: &[PreparedProgram],
    arena: &Arena,
) -> Result<(), ExecutorError> {
    let start = arena.at(Bytes::ZERO, arena.size()).ok_or(ExecutorError::OtherStream)?;
    let clear = |backend: &CudaBackend| {
        // SAFETY: the arena is device memory of that size, and no stream runs yet.
        unsafe { driver.clear(DeviceAddress::from_pointer(start), arena.size().count() as usize, backend.stream()) }
    };
    clear(backend)?;
    backend.upload_hyperparameters(&Hyperparameters::default())?;
    for prepared in programs {
        for &id in &prepared.stream_instructions[COMPUTE] {
            enqueue_kernel(prepared, backend, &Hyperparameters::default(), id)?;
        }
    }
    match backend.check_indices() {
        // No samples are loaded, so the indices are arbitrary.
        Ok(()) | Err(BackendError::IndexOutOfRange { .. }) => {}
        Err(source) => return Err(ExecutorError::Kernel { instruction: 0, name: "a kernel on its first run".into(), source }),
    }
    clear(backend)?;
    Ok(driver.synchronize(backend.stream())?)
}

/// Runs one step of the compute stream, on the calling thread, and waits for the GPU.
pub(super) fn run_compute_stream(
    shared: &SharedState,
    prepared: &PreparedProgram,
    backend: &mut CudaBackend,
    step: &StepRequest,
) -> Result<(), ExecutorError> {
    let Some(gpu_streams) = &shared.gpu_streams else { return Err(ExecutorError::OtherStream) };
    let mode = gpu_streams.mode();
    backend.upload_hyperparameters(&step.hyperparameters)?;
    if mode.is_graph {
        run_graph(shared, gpu_streams, prepared, backend, step, mode)?;
    } else {
        for &id in &prepared.stream_instructions[COMPUTE] {
            for &(stream, instruction) in &prepared.dependencies[id as usize] {
                shared.progress.wait(COMPUTE, stream, instruction, || ())?;
                gpu_streams.wait_for(step.program, COMPUTE, instruction)?;
            }
            gpu_streams.record_start(step.program, COMPUTE, id, mode)?;
            enqueue_kernel(prepared, backend, &step.hyperparameters, id)?;
            gpu_streams.record_end(step.program, COMPUTE, id, mode)?;
            shared.progress.mark_done(COMPUTE, id);
        }
    }
    // The GPU reports an index out of range once per step, without the instruction.
    let name = "a kernel of this step";
    backend.check_indices().map_err(|source| ExecutorError::Kernel { instruction: 0, name: name.into(), source })
}

/// Queues one kernel.
fn enqueue_kernel(
    prepared: &PreparedProgram,
    backend: &mut CudaBackend,
    hyperparameters: &Hyperparameters,
    id: u32,
) -> Result<(), ExecutorError> {
    // SAFETY: operands are places in the arenas that the memory plan gave to live buffers. Their
    // writers were queued before, and the dependencies make the GPU wait for them.
    prepared.run_kernel(id, hyperparameters, |call| unsafe { backend.enqueue(call) })
}

/// Launches a step as one graph, which is captured at the first time. The load stream fills the
/// staging memory and queues nothing.
fn run_graph(
    shared: &SharedState,
    gpu_streams: &GpuStreams,
    prepared: &PreparedProgram,
    backend: &mut CudaBackend,
    step: &StepRequest,
    mode: StepMode,
) -> Result<(), ExecutorError> {
    let load = shared.keys.iter().position(|key| *key == StreamKey::Load);
    if let Some((stream, &last)) = load.and_then(|stream| Some((stream, prepared.stream_instructions[stream].last()?))) {
        shared.progress.wait(COMPUTE, stream, last, || ())?;
    }
    let graph = match gpu_streams.graph(step.program, mode.buffer_set) {
        Some(known) => known,
        None => {
            gpu_streams.driver.begin_capture(gpu_streams.streams[COMPUTE])?;
            let captured = capture_step(gpu_streams, prepared, backend, step, load, mode);
            // The capture must end even if it failed.
            let graph = gpu_streams.driver.end_capture(gpu_streams.streams[COMPUTE]);
            captured?;
            let graph = graph?;
            gpu_streams.keep_graph(step.program, mode.buffer_set, graph);
            graph
        }
    };
    // SAFETY: the arenas, the scratch memory and the staging memory have not moved since the
    // capture, and the load stream has filled the staging memory.
    Ok(unsafe { gpu_streams.driver.launch_graph(graph, gpu_streams.streams[COMPUTE]) }?)
}

/// Queues a step on streams that are being captured.
fn capture_step(
    gpu_streams: &GpuStreams,
    prepared: &PreparedProgram,
    backend: &mut CudaBackend,
    step: &StepRequest,
    load: Option<usize>,
    mode: StepMode,
) -> Result<(), ExecutorError> {
    let driver = &gpu_streams.driver;
    // The load stream joins the capture by waiting for an event of the compute stream. The compute
    // stream waits for it at the end.
    if let Some(stream) = load {
        let fork = driver.create_event()?;
        driver.record(fork, gpu_streams.streams[COMPUTE])?;
        driver.stream_wait_event(gpu_streams.streams[stream], fork)?;
    }
    let is_kernel = |id: u32| prepared.stream_instructions[COMPUTE].binary_search(&id).is_ok();
    let load_stream = || load.expect("invariant: a step that is captured has kernels and loads only");
    let stream_of = |id: u32| if is_kernel(id) { COMPUTE } else { load_stream() };
    for id in 0..prepared.dependencies.len() as u32 {
        let stream = stream_of(id);
        for &(other, instruction) in prepared.dependencies[id as usize].iter().filter(|(other, _)| *other != stream) {
            debug_assert!(instruction < id, "instruction {id} depends on a later one, {instruction} of stream {other}");
            gpu_streams.wait_for(step.program, stream, instruction)?;
        }
        match stream {
            COMPUTE => enqueue_kernel(prepared, backend, &step.hyperparameters, id)?,
            _ => enqueue_sample_copy(gpu_streams, prepared, step.program, stream, id, mode)?,
        }
        gpu_streams.record_end(step.program, stream, id, StepMode { is_timed: false, ..mode })?;
    }
    if let Some(stream) = load {
        let join = driver.create_event()?;
        driver.record(join, gpu_streams.streams[stream])?;
        driver.stream_wait_event(gpu_streams.streams[COMPUTE], join)?;
    }
    Ok(())
}

/// Queues the copy of a load's samples from their staging memory to the device.
fn enqueue_sample_copy(
    gpu_streams: &GpuStreams,
    prepared: &PreparedProgram,
    program: usize,
    stream: usize,
    id: u32,
    mode: StepMode,
) -> Result<(), ExecutorError> {
    let write = prepared.operands[id as usize].writes.first().expect("invariant: a load has a write");
    let from = gpu_streams.staging(program, mode.buffer_set, id)?.operand(write.bytes);
    let to = DeviceAddress::from_pointer(write.pointer);
    // SAFETY: the operand belongs to this load until it is done, and the staging memory until the
    // step is done.
    Ok(unsafe { gpu_streams.driver.copy_in(to, from.pointer, from.bytes, gpu_streams.streams[stream]) }?)
}

/// Queues a copy between the device arena and the pinned host arena.
fn enqueue_copy(gpu_streams: &GpuStreams, prepared: &PreparedProgram, stream: usize, id: u32) -> Result<(), ExecutorError> {
    let operands = &prepared.operands[id as usize];
    let (Operation::Copy { to, .. }, [read], [write]) = (prepared.operation(id), &operands.reads[..], &operands.writes[..])
    else {
        let what = format!("`{}` on a copy stream", prepared.operation(id).kind());
        return Err(ExecutorError::Unsupported { what, hint: "this is a fault in the compiler: please report it".into() });
    };
    let (driver, stream, bytes) = (&gpu_streams.driver, gpu_streams.streams[stream], read.bytes.min(write.bytes));
    // SAFETY: both operands belong to this instruction until it is done, and live as long as the
    // rank's arenas.
    unsafe {
        match to {
            MemoryKind::Device => driver.copy_in(DeviceAddress::from_pointer(write.pointer), read.pointer, bytes, stream),
            MemoryKind::Host => driver.copy_out(write.pointer, DeviceAddress::from_pointer(read.pointer), bytes, stream),
        }
    }?;
    Ok(())
}

/// Runs one step of a stream other than compute, and waits for the GPU.
pub(super) fn run_stream(
    shared: &SharedState,
    gpu_streams: &GpuStreams,
    prepared: &PreparedProgram,
    stream: usize,
    runner: &mut StreamRunner,
    communication: &mut GpuCommunication,
    step: &StepRequest,
) -> Result<(), ExecutorError> {
    let mode = gpu_streams.mode();
    let program = step.program;
    let is_load = matches!(runner, StreamRunner::Load { .. });
    // A graph contains the copies of its samples, and the compute stream waits for it.
    let is_in_graph = is_load && mode.is_graph;
    let samples_are_staged = gpu_streams.samples_are_staged(program, mode.buffer_set, &step.samples);
    for &id in &prepared.stream_instructions[stream] {
        if is_load && !samples_are_staged {
            gpu_streams.stage_samples(prepared, program, mode.buffer_set, id, runner, &step.samples)?;
        }
        if !is_in_graph {
            for &(other, instruction) in &prepared.dependencies[id as usize] {
                shared.progress.wait(stream, other, instruction, || ())?;
                if other != stream {
                    gpu_streams.wait_for(program, stream, instruction)?;
                }
            }
            if shared.progress.has_failed() {
                return Err(ExecutorError::OtherStream);
            }
            gpu_streams.record_start(program, stream, id, mode)?;
            match runner {
                StreamRunner::Load { .. } => enqueue_sample_copy(gpu_streams, prepared, program, stream, id, mode)?,
                StreamRunner::Copy => enqueue_copy(gpu_streams, prepared, stream, id)?,
                StreamRunner::Group(_) | StreamRunner::Peer(_) => {
                    communication.communicate(gpu_streams, prepared, stream, runner, step, id)?;
                }
            }
            gpu_streams.record_end(program, stream, id, mode)?;
        }
        shared.progress.mark_done(stream, id);
    }
    // The driver forbids waiting for a stream that is being captured, as the load stream may be.
    if !is_in_graph {
        gpu_streams.driver.synchronize(gpu_streams.streams[stream])?;
    }
    match gpu_streams.driver.collectives() {
        // Aborted communication also ends, and leaves arbitrary data.
        Some(collectives) if collectives.is_aborted() => Err(CudaError::Aborted.into()),
        _ => Ok(()),
    }
}
