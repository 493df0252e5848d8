//! The streams at work: each takes its next instruction, waits for what that depends on, has it done, records its span.

use super::ways::Way;
use super::{COMPUTE, END, Playlist, RawSpan, Shared, Step, StreamKey, device};
use crate::backend::{Backend, CpuBackend, Hyperparameters};
use crate::clock;
use crate::error::ExecutorError;
use crate::line::Line;
use crate::machine;
use crate::transport::spin_only_while;
use std::panic;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};

/// Runs the compute stream on the calling thread.
pub(super) fn compute(
    shared: &Shared,
    playlist: &Playlist,
    backend: &mut CpuBackend,
    hyperparameters: &Hyperparameters,
) -> Result<(), ExecutorError> {
    let mut spans = shared.spans[0].lock().unwrap_or_else(PoisonError::into_inner);
    spans.clear();
    spans.reserve(playlist.lists[0].len());
    let mut start = clock::now();
    for &id in &playlist.lists[0] {
        let after = &playlist.after[id as usize];
        for &(slot, instruction) in after {
            // The core has nothing else to do now: who waits for the peer may spin.
            let nudge = || shared.numbers[slot].map_or((), |number| shared.transport.nudge(number));
            shared.board.wait(COMPUTE, slot, instruction, nudge)?;
        }
        // A stream that was woken by the last instruction may have had the core since, and be done by now.
        if after.iter().any(|&(slot, _)| slot != COMPUTE) {
            start = clock::now();
        }
        // SAFETY: operands are places in the arena that the memory plan gave to live buffers; whoever wrote them is done and
        // nobody else touches them now, because the dependencies say so and were waited for.
        playlist.run_kernel(id, hyperparameters, |call| unsafe { backend.run(call) })?;
        let end = clock::now();
        spans.push(RawSpan { start, end });
        start = end;
        shared.board.post(0, id);
    }
    Ok(())
}

/// The life of a stream's thread. One that panics must not leave the others waiting for it.
/// `way` is how it reaches other ranks from a GPU.
pub(super) fn live(shared: &Arc<Shared>, slot: usize, line: Line, way: Option<Way>) {
    let lived = panic::catch_unwind(panic::AssertUnwindSafe(|| work(shared, slot, line, way)));
    if let Err(panic) = lived {
        shared.fail(ExecutorError::panicked(shared.keys[slot].to_string(), panic.as_ref()));
        shared.main.unpark();
    }
}

/// A list for each step that is begun.
fn work(shared: &Arc<Shared>, slot: usize, mut line: Line, mut way: Option<Way>) {
    shared.board.enter(slot);
    let board = Arc::clone(shared);
    spin_only_while(move || board.board.sleeps_for(COMPUTE, slot));
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
        let playlist = &shared.playlists[step.program];
        // Asked before the step ends: the next may begin as soon as it has.
        let turn = shared.queues.as_ref().map_or(0, |queues| queues.mode().turn);
        let done = match (&shared.queues, &mut way) {
            (Some(queues), Some(way)) => device::stream(shared, queues, playlist, slot, &mut line, way, &step),
            _ => stream(shared, playlist, slot, &mut line, &step),
        };
        if let Err(error) = done {
            shared.fail(error);
        }
        shared.ended[slot].store(step_number, Ordering::SeqCst);
        shared.main.unpark();
        if let Some(queues) = &shared.queues
            && let Err(error) = queues.make_ready(playlist, slot, turn, &mut line, &step)
        {
            shared.fail(error);
        }
    }
}

/// Runs one step of a stream other than compute.
fn stream(shared: &Shared, playlist: &Playlist, slot: usize, line: &mut Line, step: &Step) -> Result<(), ExecutorError> {
    let mut spans = shared.spans[slot].lock().unwrap_or_else(PoisonError::into_inner);
    spans.clear();
    spans.reserve(playlist.lists[slot].len());
    for &id in &playlist.lists[slot] {
        for &(other, instruction) in &playlist.after[id as usize] {
            shared.board.wait(slot, other, instruction, || ())?;
        }
        if shared.board.has_failed() {
            return Err(ExecutorError::OtherStream);
        }
        let start = clock::now();
        let operands = &playlist.operands[id as usize];
        // SAFETY: as for kernels: the operands are this instruction's alone until it posts.
        unsafe {
            line.run(&playlist.stage.instructions[id as usize].operation, &operands.reads, &operands.writes, &step.samples)
        }?;
        spans.push(RawSpan { start, end: clock::now() });
        shared.board.post(slot, id);
        if shared.keys[slot] == StreamKey::Load {
            // Kernels first: what is read now is for later micro-batches. Without this the first kernel of a pipeline's step was seen to begin
            // when the samples of the last micro-batch were there: who is woken does not get the core from one whose turn is not over.
            std::thread::yield_now();
        }
    }
    Ok(())
}
