//! The streams at work on a GPU: each gpu_streams its next instruction behind what that depends on, and says that it is queued. A step ends when all
//! of it is done. A step of one rank that waits for nobody is captured once, and then launched at once.

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

/// Runs all kernels once, on what the arena holds, and clears it: so that none is loaded, and no memory allocated, once ranks exchange. An
/// exchange from GPU to GPU waits on the GPU for the other rank, and what is loaded meanwhile may wait for all that the GPU is doing (CUDA C++
/// Programming Guide, Lazy Loading): two ranks could wait for each other forever.
pub(super) fn load_kernels(
    driver: &Arc<dyn Driver>,
    backend: &mut CudaBackend,
    programs: &[PreparedProgram],
    arena: &Arena,
) -> Result<(), ExecutorError> {
    let start = arena.at(Bytes::ZERO, arena.size()).ok_or(ExecutorError::OtherStream)?;
    let clear = |backend: &CudaBackend| {
        // SAFETY: the arena is the device's memory of that size, and no stream runs yet.
        unsafe { driver.clear(DeviceAddress::from_pointer(start), arena.size().count() as usize, backend.stream()) }
    };
    clear(backend)?;
    backend.upload_hyperparameters(&Hyperparameters::default())?;
    for prepared in programs {
        for &id in &prepared.lists[COMPUTE] {
            enqueue(prepared, backend, &Hyperparameters::default(), id)?;
        }
    }
    match backend.check_indices() {
        // Nothing was loaded: indices may be anything.
        Ok(()) | Err(BackendError::IndexOutOfRange { .. }) => {}
        Err(source) => return Err(ExecutorError::Kernel { instruction: 0, name: "one of those that are loaded".into(), source }),
    }
    clear(backend)?;
    Ok(driver.synchronize(backend.stream())?)
}

/// Runs a step's kernels, on the calling thread, and waits for the GPU.
pub(super) fn compute(
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
        for &id in &prepared.lists[COMPUTE] {
            for &(slot, instruction) in &prepared.after[id as usize] {
                shared.progress.wait(COMPUTE, slot, instruction, || ())?;
                gpu_streams.wait_for(step.program, COMPUTE, instruction)?;
            }
            gpu_streams.mark_start(step.program, COMPUTE, id, mode)?;
            enqueue(prepared, backend, &step.hyperparameters, id)?;
            gpu_streams.mark_end(step.program, COMPUTE, id, mode)?;
            shared.progress.post(COMPUTE, id);
        }
    }
    backend.check_indices().map_err(|source| ExecutorError::Kernel { instruction: 0, name: "one of this step".into(), source })
}

/// GpuStreams one kernel.
fn enqueue(
    prepared: &PreparedProgram,
    backend: &mut CudaBackend,
    hyperparameters: &Hyperparameters,
    id: u32,
) -> Result<(), ExecutorError> {
    // SAFETY: operands are places in the arena that the memory plan gave to live buffers; whoever wrote them was queued before, and the GPU
    // waits for them, because the dependencies say so.
    prepared.run_kernel(id, hyperparameters, |call| unsafe { backend.enqueue(call) })
}

/// Runs a whole step as one launch, captured before if it was not yet. The load stream has filled the staging memory and gpu_streams nothing.
fn run_graph(
    shared: &SharedState,
    gpu_streams: &GpuStreams,
    prepared: &PreparedProgram,
    backend: &mut CudaBackend,
    step: &StepRequest,
    mode: StepMode,
) -> Result<(), ExecutorError> {
    let load = shared.keys.iter().position(|key| *key == StreamKey::Load);
    if let Some((slot, &last)) = load.and_then(|slot| Some((slot, prepared.lists[slot].last()?))) {
        shared.progress.wait(COMPUTE, slot, last, || ())?;
    }
    let graph = match gpu_streams.graph(step.program, mode.turn) {
        Some(known) => known,
        None => {
            gpu_streams.driver.begin_capture(gpu_streams.streams[COMPUTE])?;
            let captured = capture(gpu_streams, prepared, backend, step, load, mode);
            // The capture ends whatever became of it.
            let graph = gpu_streams.driver.end_capture(gpu_streams.streams[COMPUTE]);
            captured?;
            let graph = graph?;
            gpu_streams.keep_graph(step.program, mode.turn, graph);
            graph
        }
    };
    // SAFETY: the arena, scratch and staging memory of the capture are still where they were; the load stream has filled the latter.
    Ok(unsafe { gpu_streams.driver.launch_graph(graph, gpu_streams.streams[COMPUTE]) }?)
}

/// GpuStreams a step on streams that are being captured.
fn capture(
    gpu_streams: &GpuStreams,
    prepared: &PreparedProgram,
    backend: &mut CudaBackend,
    step: &StepRequest,
    load: Option<usize>,
    mode: StepMode,
) -> Result<(), ExecutorError> {
    let driver = &gpu_streams.driver;
    // The load stream comes in by waiting for the first event, and is waited for at the end.
    if let Some(slot) = load {
        let fork = driver.create_event()?;
        driver.record(fork, gpu_streams.streams[COMPUTE])?;
        driver.stream_wait_event(gpu_streams.streams[slot], fork)?;
    }
    let slot_of = |id: u32| if prepared.lists[COMPUTE].binary_search(&id).is_ok() { COMPUTE } else { load.unwrap_or(COMPUTE) };
    for id in 0..prepared.after.len() as u32 {
        let slot = slot_of(id);
        for &(other, instruction) in prepared.after[id as usize].iter().filter(|(other, _)| *other != slot) {
            debug_assert!(instruction < id, "what an instruction of slot {other} waits for comes before it");
            gpu_streams.wait_for(step.program, slot, instruction)?;
        }
        match slot {
            COMPUTE => enqueue(prepared, backend, &step.hyperparameters, id)?,
            _ => copy_samples(gpu_streams, prepared, step.program, slot, id, mode)?,
        }
        gpu_streams.mark_end(step.program, slot, id, StepMode { is_timed: false, ..mode })?;
    }
    if let Some(slot) = load {
        let join = driver.create_event()?;
        driver.record(join, gpu_streams.streams[slot])?;
        driver.stream_wait_event(gpu_streams.streams[COMPUTE], join)?;
    }
    Ok(())
}

/// GpuStreams the copy of a load's samples from its staging memory.
fn copy_samples(
    gpu_streams: &GpuStreams,
    prepared: &PreparedProgram,
    program: usize,
    slot: usize,
    id: u32,
    mode: StepMode,
) -> Result<(), ExecutorError> {
    let Some(write) = prepared.operands[id as usize].writes.first() else { return Ok(()) };
    let from = gpu_streams.staging(program, mode.turn, id)?.operand(write.bytes);
    let to = DeviceAddress::from_pointer(write.pointer);
    // SAFETY: the operand is this load's until it is done, and the pinned memory until the step is.
    Ok(unsafe { gpu_streams.driver.copy_in(to, from.pointer, from.bytes, gpu_streams.streams[slot]) }?)
}

/// GpuStreams a copy between the GPU's memory and pinned memory of the host.
fn copy(gpu_streams: &GpuStreams, prepared: &PreparedProgram, slot: usize, id: u32) -> Result<(), ExecutorError> {
    let operands = &prepared.operands[id as usize];
    let (Operation::Copy { to, .. }, [read], [write]) =
        (&*prepared.stage.instructions[id as usize].operation, &operands.reads[..], &operands.writes[..])
    else {
        let what = "something else than a copy on a stream of copies".into();
        return Err(ExecutorError::Unsupported { what, hint: "this is a fault in the compiler: please report it".into() });
    };
    let (driver, stream, bytes) = (&gpu_streams.driver, gpu_streams.streams[slot], read.bytes.min(write.bytes));
    // SAFETY: both are this instruction's until it is done, and live as long as the rank's arenas.
    unsafe {
        match to {
            MemoryKind::Device => driver.copy_in(DeviceAddress::from_pointer(write.pointer), read.pointer, bytes, stream),
            MemoryKind::Host => driver.copy_out(write.pointer, DeviceAddress::from_pointer(read.pointer), bytes, stream),
        }
    }?;
    Ok(())
}

/// Runs one step of a stream other than compute.
pub(super) fn stream(
    shared: &SharedState,
    gpu_streams: &GpuStreams,
    prepared: &PreparedProgram,
    slot: usize,
    runner: &mut StreamRunner,
    communication: &mut GpuCommunication,
    step: &StepRequest,
) -> Result<(), ExecutorError> {
    let mode = gpu_streams.mode();
    let program = step.program;
    let are_ready = gpu_streams.are_ready(program, mode.turn, &step.samples);
    for &id in &prepared.lists[slot] {
        let is_load = matches!(runner, StreamRunner::Load { .. });
        if is_load && !are_ready {
            gpu_streams.fill(prepared, program, mode.turn, id, runner, &step.samples)?;
        }
        if !(is_load && mode.is_graph) {
            for &(other, instruction) in &prepared.after[id as usize] {
                shared.progress.wait(slot, other, instruction, || ())?;
                if other != slot {
                    gpu_streams.wait_for(program, slot, instruction)?;
                }
            }
            if shared.progress.has_failed() {
                return Err(ExecutorError::OtherStream);
            }
            gpu_streams.mark_start(program, slot, id, mode)?;
            match runner {
                StreamRunner::Load { .. } => copy_samples(gpu_streams, prepared, program, slot, id, mode)?,
                StreamRunner::Copy => copy(gpu_streams, prepared, slot, id)?,
                StreamRunner::Group(_) | StreamRunner::Peer(_) => {
                    communication.exchange(gpu_streams, prepared, slot, runner, step, id)?
                }
            }
            gpu_streams.mark_end(program, slot, id, mode)?;
        }
        shared.progress.post(slot, id);
    }
    // A step ends when all of it is done. What a graph has of loads is part of it, and the compute stream waits for that: who waited for the load
    // stream here could do so while it is being captured, which the driver forbids.
    if !(mode.is_graph && matches!(runner, StreamRunner::Load { .. })) {
        gpu_streams.driver.synchronize(gpu_streams.streams[slot])?;
    }
    match gpu_streams.driver.collectives() {
        // What was broken off ends, too, with anything in its place.
        Some(collectives) if collectives.is_aborted() => Err(CudaError::Aborted.into()),
        _ => Ok(()),
    }
}
