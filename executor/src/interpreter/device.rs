//! The streams at work on a GPU: each queues its next instruction behind what that depends on, and says that it is queued. A step ends when all
//! of it is done. A step of one rank that waits for nobody is captured once, and then launched at once.

use super::queues::{Mode, Queues};
use super::ways::Way;
use super::{COMPUTE, Playlist, Shared, Step, StreamKey};
use crate::arena::Arena;
use crate::backend::cuda::{CudaBackend, CudaError, DeviceAddress, Driver};
use crate::backend::{BackendError, Hyperparameters};
use crate::error::ExecutorError;
use crate::line::Line;
use foretell_program::{MemoryKind, Operation};
use foretell_units::Bytes;
use std::sync::Arc;

/// Runs all kernels once, on what the arena holds, and clears it: so that none is loaded, and no memory allocated, once ranks exchange. An
/// exchange from GPU to GPU waits on the GPU for the other rank, and what is loaded meanwhile may wait for all that the GPU is doing (CUDA C++
/// Programming Guide, Lazy Loading): two ranks could wait for each other forever.
pub(super) fn load_kernels(
    driver: &Arc<dyn Driver>,
    backend: &mut CudaBackend,
    playlists: &[Playlist],
    arena: &Arena,
) -> Result<(), ExecutorError> {
    let start = arena.at(Bytes::ZERO, arena.size()).ok_or(ExecutorError::OtherStream)?;
    let clear = |backend: &CudaBackend| {
        // SAFETY: the arena is the device's memory of that size, and no stream runs yet.
        unsafe { driver.clear(DeviceAddress::from_pointer(start), arena.size().count() as usize, backend.stream()) }
    };
    clear(backend)?;
    backend.upload_hyperparameters(&Hyperparameters::default())?;
    for playlist in playlists {
        for &id in &playlist.lists[COMPUTE] {
            enqueue(playlist, backend, &Hyperparameters::default(), id)?;
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
pub(super) fn compute(shared: &Shared, playlist: &Playlist, backend: &mut CudaBackend, step: &Step) -> Result<(), ExecutorError> {
    let Some(queues) = &shared.queues else { return Err(ExecutorError::OtherStream) };
    let mode = queues.mode();
    backend.upload_hyperparameters(&step.hyperparameters)?;
    if mode.is_graph {
        run_graph(shared, queues, playlist, backend, step, mode)?;
    } else {
        for &id in &playlist.lists[COMPUTE] {
            for &(slot, instruction) in &playlist.after[id as usize] {
                shared.board.wait(COMPUTE, slot, instruction, || ())?;
                queues.wait_for(step.program, COMPUTE, instruction)?;
            }
            queues.mark_start(step.program, COMPUTE, id, mode)?;
            enqueue(playlist, backend, &step.hyperparameters, id)?;
            queues.mark_end(step.program, COMPUTE, id, mode)?;
            shared.board.post(COMPUTE, id);
        }
    }
    backend.check_indices().map_err(|source| ExecutorError::Kernel { instruction: 0, name: "one of this step".into(), source })
}

/// Queues one kernel.
fn enqueue(
    playlist: &Playlist,
    backend: &mut CudaBackend,
    hyperparameters: &Hyperparameters,
    id: u32,
) -> Result<(), ExecutorError> {
    // SAFETY: operands are places in the arena that the memory plan gave to live buffers; whoever wrote them was queued before, and the GPU
    // waits for them, because the dependencies say so.
    playlist.run_kernel(id, hyperparameters, |call| unsafe { backend.enqueue(call) })
}

/// Runs a whole step as one launch, captured before if it was not yet. The load stream has filled the staging memory and queues nothing.
fn run_graph(
    shared: &Shared,
    queues: &Queues,
    playlist: &Playlist,
    backend: &mut CudaBackend,
    step: &Step,
    mode: Mode,
) -> Result<(), ExecutorError> {
    let load = shared.keys.iter().position(|key| *key == StreamKey::Load);
    if let Some((slot, &last)) = load.and_then(|slot| Some((slot, playlist.lists[slot].last()?))) {
        shared.board.wait(COMPUTE, slot, last, || ())?;
    }
    let graph = match queues.graph(step.program, mode.turn) {
        Some(known) => known,
        None => {
            queues.driver.begin_capture(queues.streams[COMPUTE])?;
            let captured = capture(queues, playlist, backend, step, load, mode);
            // The capture ends whatever became of it.
            let graph = queues.driver.end_capture(queues.streams[COMPUTE]);
            captured?;
            let graph = graph?;
            queues.keep_graph(step.program, mode.turn, graph);
            graph
        }
    };
    // SAFETY: the arena, scratch and staging memory of the capture are still where they were; the load stream has filled the latter.
    Ok(unsafe { queues.driver.launch_graph(graph, queues.streams[COMPUTE]) }?)
}

/// Queues a step on streams that are being captured.
fn capture(
    queues: &Queues,
    playlist: &Playlist,
    backend: &mut CudaBackend,
    step: &Step,
    load: Option<usize>,
    mode: Mode,
) -> Result<(), ExecutorError> {
    let driver = &queues.driver;
    // The load stream comes in by waiting for the first event, and is waited for at the end.
    if let Some(slot) = load {
        let fork = driver.create_event()?;
        driver.record(fork, queues.streams[COMPUTE])?;
        driver.stream_wait_event(queues.streams[slot], fork)?;
    }
    let slot_of = |id: u32| if playlist.lists[COMPUTE].binary_search(&id).is_ok() { COMPUTE } else { load.unwrap_or(COMPUTE) };
    for id in 0..playlist.after.len() as u32 {
        let slot = slot_of(id);
        for &(other, instruction) in playlist.after[id as usize].iter().filter(|(other, _)| *other != slot) {
            debug_assert!(instruction < id, "what an instruction of slot {other} waits for comes before it");
            queues.wait_for(step.program, slot, instruction)?;
        }
        match slot {
            COMPUTE => enqueue(playlist, backend, &step.hyperparameters, id)?,
            _ => copy_samples(queues, playlist, step.program, slot, id, mode)?,
        }
        queues.mark_end(step.program, slot, id, Mode { is_timed: false, ..mode })?;
    }
    if let Some(slot) = load {
        let join = driver.create_event()?;
        driver.record(join, queues.streams[slot])?;
        driver.stream_wait_event(queues.streams[COMPUTE], join)?;
    }
    Ok(())
}

/// Queues the copy of a load's samples from its staging memory.
fn copy_samples(
    queues: &Queues,
    playlist: &Playlist,
    program: usize,
    slot: usize,
    id: u32,
    mode: Mode,
) -> Result<(), ExecutorError> {
    let Some(write) = playlist.operands[id as usize].writes.first() else { return Ok(()) };
    let from = queues.staging(program, mode.turn, id)?.operand(write.bytes);
    let to = DeviceAddress::from_pointer(write.pointer);
    // SAFETY: the operand is this load's until it is done, and the pinned memory until the step is.
    Ok(unsafe { queues.driver.copy_in(to, from.pointer, from.bytes, queues.streams[slot]) }?)
}

/// Queues a copy between the GPU's memory and pinned memory of the host.
fn copy(queues: &Queues, playlist: &Playlist, slot: usize, id: u32) -> Result<(), ExecutorError> {
    let operands = &playlist.operands[id as usize];
    let (Operation::Copy { to, .. }, [read], [write]) =
        (&*playlist.stage.instructions[id as usize].operation, &operands.reads[..], &operands.writes[..])
    else {
        let what = "something else than a copy on a stream of copies".into();
        return Err(ExecutorError::Unsupported { what, hint: "this is a fault in the compiler: please report it".into() });
    };
    let (driver, stream, bytes) = (&queues.driver, queues.streams[slot], read.bytes.min(write.bytes));
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
    shared: &Shared,
    queues: &Queues,
    playlist: &Playlist,
    slot: usize,
    line: &mut Line,
    way: &mut Way,
    step: &Step,
) -> Result<(), ExecutorError> {
    let mode = queues.mode();
    let program = step.program;
    let are_ready = queues.are_ready(program, mode.turn, &step.samples);
    for &id in &playlist.lists[slot] {
        let is_load = matches!(line, Line::Load { .. });
        if is_load && !are_ready {
            queues.fill(playlist, program, mode.turn, id, line, &step.samples)?;
        }
        if !(is_load && mode.is_graph) {
            for &(other, instruction) in &playlist.after[id as usize] {
                shared.board.wait(slot, other, instruction, || ())?;
                if other != slot {
                    queues.wait_for(program, slot, instruction)?;
                }
            }
            if shared.board.has_failed() {
                return Err(ExecutorError::OtherStream);
            }
            queues.mark_start(program, slot, id, mode)?;
            match line {
                Line::Load { .. } => copy_samples(queues, playlist, program, slot, id, mode)?,
                Line::Copy => copy(queues, playlist, slot, id)?,
                Line::Group(_) | Line::Peer(_) => way.exchange(queues, playlist, slot, line, step, id)?,
            }
            queues.mark_end(program, slot, id, mode)?;
        }
        shared.board.post(slot, id);
    }
    // A step ends when all of it is done. What a graph has of loads is part of it, and the compute stream waits for that: who waited for the load
    // stream here could do so while it is being captured, which the driver forbids.
    if !(mode.is_graph && matches!(line, Line::Load { .. })) {
        queues.driver.synchronize(queues.streams[slot])?;
    }
    match queues.driver.collectives() {
        // What was broken off ends, too, with anything in its place.
        Some(collectives) if collectives.is_aborted() => Err(CudaError::Aborted.into()),
        _ => Ok(()),
    }
}
