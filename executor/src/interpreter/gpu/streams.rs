//! What a rank's streams on a GPU share: the GPU's streams, the events by which they wait for each other and by which instructions are timed, and
//! pinned memory for samples.

use crate::backend::Operand;
use crate::backend::cuda::{CudaBackend, CudaError, DeviceAddress, Driver, EventHandle, GraphHandle, StreamHandle};
use crate::clock;
use crate::error::ExecutorError;
use crate::interpreter::prepared_program::PreparedProgram;
use crate::interpreter::stream_key::StreamKey;
use crate::interpreter::stream_runner::StreamRunner;
use crate::interpreter::{COMPUTE, RawSpan, StepRequest};
use crate::samples::Samples;
use foretell_program::Operation;
use std::collections::HashMap;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Runs of a Program after which its kernels are loaded and its scratch memory is as large as it gets, so that it can be captured.
const WARM_UP: u64 = 2;

/// What the streams share.
pub(in crate::interpreter) struct GpuStreams {
    pub(in crate::interpreter) driver: Arc<dyn Driver>,
    /// By slot.
    pub(in crate::interpreter) streams: Vec<StreamHandle>,
    programs: Vec<ProgramState>,
    /// When the step's first event happened, by the GPU and by the machine's clock.
    origin: EventHandle,
    origin_time: AtomicU64,
    /// How this step is run.
    mode: Mutex<StepMode>,
}

/// What belongs to one of the Programs.
struct ProgramState {
    /// By instruction: what happens when it ends, where another stream waits for that.
    ends: Vec<Option<EventHandle>>,
    /// By instruction: what happens when it begins and when it ends, once it was timed.
    spans: Mutex<Vec<(EventHandle, EventHandle)>>,
    /// By turn: pinned memory of each load.
    staging: [HashMap<u32, Pinned>; 2],
    /// The samples that lie in the staging memory of a turn.
    ready: Mutex<[Option<Arc<Samples>>; 2]>,
    /// By turn: the whole step.
    graphs: Mutex<[Option<GraphHandle>; 2]>,
    runs: AtomicU64,
    /// Whether it can be captured ([`foretell_program::StageProgram::is_alone`]).
    is_alone: bool,
}

/// How a step is run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::interpreter) struct StepMode {
    /// Which of two sets of staging memory, and of graphs, it has.
    pub(in crate::interpreter) turn: usize,
    /// Whether all of it is launched at once.
    pub(in crate::interpreter) is_graph: bool,
    pub(in crate::interpreter) is_timed: bool,
}

/// Memory of the host that the GPU copies from and to by itself.
pub(in crate::interpreter) struct Pinned {
    driver: Arc<dyn Driver>,
    pub(in crate::interpreter) pointer: NonNull<u8>,
    pub(in crate::interpreter) bytes: usize,
}

// SAFETY: it is plain memory; who touches it when is its users' to say.
unsafe impl Send for Pinned {}
// SAFETY: as above.
unsafe impl Sync for Pinned {}

impl Pinned {
    pub(in crate::interpreter) fn new(driver: &Arc<dyn Driver>, bytes: usize) -> Result<Self, CudaError> {
        Ok(Self { driver: Arc::clone(driver), pointer: driver.allocate_pinned(bytes)?, bytes })
    }

    /// As an operand of so many bytes, which it has at least.
    pub(in crate::interpreter) fn operand(&self, bytes: usize) -> Operand {
        Operand { pointer: self.pointer.as_ptr(), bytes: bytes.min(self.bytes) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // SAFETY: it was allocated by this driver, and nobody uses it any more: steps end with all their copies.
        unsafe { self.driver.free_pinned(self.pointer) };
    }
}

impl GpuStreams {
    pub(in crate::interpreter) fn new(
        driver: &Arc<dyn Driver>,
        backend: &CudaBackend,
        programs: &[PreparedProgram],
        keys: &[StreamKey],
    ) -> Result<Self, CudaError> {
        let streams = (0..keys.len())
            .map(|slot| if slot == COMPUTE { Ok(backend.stream()) } else { driver.create_stream() })
            .collect::<Result<_, _>>()?;
        let programs = programs.iter().map(|prepared| ProgramState::new(driver, prepared, keys)).collect::<Result<_, _>>()?;
        let origin = driver.create_event()?;
        let (origin_time, mode) = (AtomicU64::new(0), Mutex::default());
        Ok(Self { driver: Arc::clone(driver), streams, programs, origin, origin_time, mode })
    }

    /// Decides how a step is run, before any stream begins it.
    pub(in crate::interpreter) fn begin(&self, step: &StepRequest, prepared: &PreparedProgram) -> Result<(), CudaError> {
        let program = &self.programs[step.program];
        let run = program.runs.fetch_add(1, Ordering::SeqCst);
        let is_graph = program.is_alone && !step.is_timed && run >= WARM_UP;
        let mode = StepMode { turn: (run % 2) as usize, is_graph, is_timed: step.is_timed };
        *self.mode.lock().unwrap_or_else(PoisonError::into_inner) = mode;
        if step.is_timed { self.mark_origin(step.program, prepared) } else { Ok(()) }
    }

    pub(in crate::interpreter) fn mode(&self) -> StepMode {
        *self.mode.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Marks the beginning of a timed step.
    fn mark_origin(&self, program: usize, prepared: &PreparedProgram) -> Result<(), CudaError> {
        let mut spans = self.programs[program].spans.lock().unwrap_or_else(PoisonError::into_inner);
        while spans.len() < prepared.stage.instructions.len() {
            spans.push((self.driver.create_event()?, self.driver.create_event()?));
        }
        drop(spans);
        self.driver.record(self.origin, self.streams[COMPUTE])?;
        // The stream is empty between steps, so that the event happens at once.
        self.driver.synchronize_event(self.origin)?;
        self.origin_time.store(clock::now(), Ordering::SeqCst);
        Ok(())
    }

    /// Has a stream wait for an instruction of another, which was queued.
    pub(in crate::interpreter) fn wait_for(&self, program: usize, slot: usize, instruction: u32) -> Result<(), CudaError> {
        match self.programs[program].ends[instruction as usize] {
            Some(end) => self.driver.stream_wait_event(self.streams[slot], end),
            None => Ok(()),
        }
    }

    /// Behind what an instruction waits for, before what it does.
    pub(in crate::interpreter) fn mark_start(
        &self,
        program: usize,
        slot: usize,
        instruction: u32,
        mode: StepMode,
    ) -> Result<(), CudaError> {
        match mode.is_timed {
            true => self.driver.record(self.timed(program, instruction).0, self.streams[slot]),
            false => Ok(()),
        }
    }

    /// Behind what an instruction does.
    pub(in crate::interpreter) fn mark_end(
        &self,
        program: usize,
        slot: usize,
        instruction: u32,
        mode: StepMode,
    ) -> Result<(), CudaError> {
        if mode.is_timed {
            self.driver.record(self.timed(program, instruction).1, self.streams[slot])?;
        }
        match self.programs[program].ends[instruction as usize] {
            Some(end) => self.driver.record(end, self.streams[slot]),
            None => Ok(()),
        }
    }

    fn timed(&self, program: usize, instruction: u32) -> (EventHandle, EventHandle) {
        self.programs[program].spans.lock().unwrap_or_else(PoisonError::into_inner)[instruction as usize]
    }

    /// When each instruction of the last step ran, by the machine's clock; nothing where it was not timed.
    pub(in crate::interpreter) fn spans(&self, program: usize) -> Result<Vec<RawSpan>, ExecutorError> {
        if !self.mode().is_timed {
            return Ok(Vec::new());
        }
        let origin = self.origin_time.load(Ordering::SeqCst);
        let at = |event| {
            let since = self.driver.elapsed_milliseconds(self.origin, event)?;
            Ok::<u64, CudaError>(origin + (f64::from(since.max(0.0)) * 1e6) as u64)
        };
        let events = self.programs[program].spans.lock().unwrap_or_else(PoisonError::into_inner);
        events.iter().map(|&(start, end)| Ok(RawSpan { start: at(start)?, end: at(end)? })).collect()
    }

    /// The pinned memory of a load.
    pub(in crate::interpreter) fn staging(
        &self,
        program: usize,
        turn: usize,
        instruction: u32,
    ) -> Result<&Pinned, ExecutorError> {
        let found = self.programs[program].staging[turn].get(&instruction);
        found.ok_or_else(|| CudaError::Call { action: "loading samples", reason: "no memory for this load".into() }.into())
    }

    /// Whether samples lie in the staging memory of a turn already.
    pub(in crate::interpreter) fn are_ready(&self, program: usize, turn: usize, samples: &Arc<Samples>) -> bool {
        let ready = self.programs[program].ready.lock().unwrap_or_else(PoisonError::into_inner);
        ready[turn].as_ref().is_some_and(|known| Arc::ptr_eq(known, samples))
    }

    /// After a step, on the load stream's thread: the samples of the next one into the other staging memory.
    /// `turn` is that of the step.
    pub(in crate::interpreter) fn make_ready(
        &self,
        prepared: &PreparedProgram,
        slot: usize,
        turn: usize,
        runner: &mut StreamRunner,
        step: &StepRequest,
    ) -> Result<(), ExecutorError> {
        let (Some(next), StreamRunner::Load { .. }) = (&step.next, &*runner) else { return Ok(()) };
        let turn = 1 - turn;
        for &id in &prepared.lists[slot] {
            self.fill(prepared, step.program, turn, id, runner, next)?;
        }
        self.programs[step.program].ready.lock().unwrap_or_else(PoisonError::into_inner)[turn] = Some(Arc::clone(next));
        Ok(())
    }

    /// The samples of one load into its staging memory.
    pub(in crate::interpreter) fn fill(
        &self,
        prepared: &PreparedProgram,
        program: usize,
        turn: usize,
        instruction: u32,
        runner: &mut StreamRunner,
        samples: &Samples,
    ) -> Result<(), ExecutorError> {
        let operands = &prepared.operands[instruction as usize];
        let pinned = self.staging(program, turn, instruction)?;
        let write = pinned.operand(operands.writes.first().map_or(0, |write| write.bytes));
        // SAFETY: the memory is this load's alone, and its last copy ended with its step.
        unsafe { runner.run(&prepared.stage.instructions[instruction as usize].operation, &[], &[write], samples) }
    }

    /// The step of a turn, if it was captured.
    pub(in crate::interpreter) fn graph(&self, program: usize, turn: usize) -> Option<GraphHandle> {
        self.programs[program].graphs.lock().unwrap_or_else(PoisonError::into_inner)[turn]
    }

    pub(in crate::interpreter) fn keep_graph(&self, program: usize, turn: usize, graph: GraphHandle) {
        self.programs[program].graphs.lock().unwrap_or_else(PoisonError::into_inner)[turn] = Some(graph);
    }

    /// One number, between steps.
    pub(in crate::interpreter) fn number(&self, operand: &Operand) -> Result<f32, ExecutorError> {
        let mut value = 0.0_f32;
        let stream = self.streams[COMPUTE];
        // SAFETY: the operand lies in the arena and holds one `f32`; the place lives until the stream is done.
        unsafe {
            self.driver.copy_out((&raw mut value).cast(), DeviceAddress::from_pointer(operand.pointer), size_of::<f32>(), stream)
        }?;
        self.driver.synchronize(stream)?;
        Ok(value)
    }
}

impl ProgramState {
    fn new(driver: &Arc<dyn Driver>, prepared: &PreparedProgram, keys: &[StreamKey]) -> Result<Self, CudaError> {
        let mut ends = vec![None; prepared.after.len()];
        let slot_of = |id: u32| prepared.lists.iter().position(|list| list.contains(&id));
        for (slot, list) in prepared.lists.iter().enumerate() {
            for &id in list {
                for &(other, awaited) in prepared.after[id as usize].iter().filter(|(other, _)| *other != slot) {
                    debug_assert_eq!(slot_of(awaited), Some(other));
                    let end: &mut Option<EventHandle> = &mut ends[awaited as usize];
                    if end.is_none() {
                        *end = Some(driver.create_event()?);
                    }
                }
            }
        }
        let mut staging = [HashMap::new(), HashMap::new()];
        let loads = keys.iter().position(|key| *key == StreamKey::Load).map_or(&[][..], |slot| &prepared.lists[slot]);
        for &id in loads {
            debug_assert!(matches!(*prepared.stage.instructions[id as usize].operation, Operation::Load { .. }));
            let bytes = prepared.operands[id as usize].writes.first().map_or(0, |write| write.bytes);
            for turn in &mut staging {
                turn.insert(id, Pinned::new(driver, bytes)?);
            }
        }
        let (spans, ready, graphs, runs) = (Mutex::default(), Mutex::default(), Mutex::default(), AtomicU64::new(0));
        Ok(Self { ends, spans, staging, ready, graphs, runs, is_alone: prepared.stage.is_alone() })
    }
}
