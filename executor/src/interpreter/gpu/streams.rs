//! The state that a rank's streams on a GPU share: the GPU's streams, the events for dependencies
//! and timing, the captured graphs, and pinned staging memory for samples.

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

/// Runs of a Program before it is captured. After them its kernels are loaded and its scratch
/// memory has its final size.
const WARM_UP_RUNS: u64 = 2;

/// The shared state. Programs and streams are given by their index.
pub(in crate::interpreter) struct GpuStreams {
    pub(in crate::interpreter) driver: Arc<dyn Driver>,
    /// The GPU's stream of each stream of the rank.
    pub(super) streams: Vec<StreamHandle>,
    programs: Vec<ProgramState>,
    /// An event at the start of a timed step. Spans are relative to it.
    origin: EventHandle,
    /// The time of `origin` by the monotonic clock, in nanoseconds.
    origin_time: AtomicU64,
    /// The mode of the current step.
    mode: Mutex<StepMode>,
}

/// The state of one Program. Samples and graphs have two sets, used by alternate runs of the
/// Program: while one run is in progress, the samples of the next are staged in the other set.
struct ProgramState {
    /// Per instruction, the event at its end; `None` if no other stream depends on it.
    ends: Vec<Option<EventHandle>>,
    /// Per instruction, the events at its start and end. Empty until the Program is first timed.
    spans: Mutex<Vec<(EventHandle, EventHandle)>>,
    /// Per set, the pinned memory of each load instruction.
    staging: [HashMap<u32, Pinned>; 2],
    /// Per set, the samples that were staged ahead of their step.
    staged: Mutex<[Option<Arc<Samples>>; 2]>,
    /// Per set, the graph of the whole step; `None` until it is captured.
    graphs: Mutex<[Option<GraphHandle>; 2]>,
    /// The number of runs so far.
    runs: AtomicU64,
    /// Whether the Program can be captured ([`foretell_program::StageProgram::is_alone`]).
    can_be_captured: bool,
}

/// How a step runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::interpreter) struct StepMode {
    /// The set of staging memory and graphs that the step uses: 0 or 1.
    pub(in crate::interpreter) buffer_set: usize,
    /// Whether the step is launched as one graph.
    pub(super) is_graph: bool,
    /// Whether each instruction is timed.
    pub(super) is_timed: bool,
}

/// Pinned host memory, which the GPU can copy from and to directly.
pub(super) struct Pinned {
    driver: Arc<dyn Driver>,
    pointer: NonNull<u8>,
    pub(super) bytes: usize,
}

// SAFETY: it is plain memory, and its users order their accesses.
unsafe impl Send for Pinned {}
// SAFETY: as above.
unsafe impl Sync for Pinned {}

impl Pinned {
    pub(super) fn new(driver: &Arc<dyn Driver>, bytes: usize) -> Result<Self, CudaError> {
        Ok(Self { driver: Arc::clone(driver), pointer: driver.allocate_pinned(bytes)?, bytes })
    }

    /// The first `bytes` bytes as an operand.
    pub(super) fn operand(&self, bytes: usize) -> Operand {
        Operand { pointer: self.pointer.as_ptr(), bytes: bytes.min(self.bytes) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // SAFETY: this driver allocated the memory. All copies ended with their steps.
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
            .map(|stream| if stream == COMPUTE { Ok(backend.stream()) } else { driver.create_stream() })
            .collect::<Result<_, _>>()?;
        let programs = programs.iter().map(|prepared| ProgramState::new(driver, prepared, keys)).collect::<Result<_, _>>()?;
        let origin = driver.create_event()?;
        let (origin_time, mode) = (AtomicU64::new(0), Mutex::default());
        Ok(Self { driver: Arc::clone(driver), streams, programs, origin, origin_time, mode })
    }

    /// Chooses the mode of a step. Call it before any stream starts the step.
    pub(in crate::interpreter) fn begin_step(&self, step: &StepRequest, prepared: &PreparedProgram) -> Result<(), CudaError> {
        let program = &self.programs[step.program];
        let run = program.runs.fetch_add(1, Ordering::SeqCst);
        let is_graph = program.can_be_captured && !step.is_timed && run >= WARM_UP_RUNS;
        let mode = StepMode { buffer_set: (run % 2) as usize, is_graph, is_timed: step.is_timed };
        *self.mode.lock().unwrap_or_else(PoisonError::into_inner) = mode;
        if step.is_timed { self.record_origin(step.program, prepared) } else { Ok(()) }
    }

    /// The mode of the current step.
    pub(in crate::interpreter) fn mode(&self) -> StepMode {
        *self.mode.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records the start of a timed step.
    fn record_origin(&self, program: usize, prepared: &PreparedProgram) -> Result<(), CudaError> {
        let mut spans = self.programs[program].spans.lock().unwrap_or_else(PoisonError::into_inner);
        while spans.len() < prepared.stage.instructions.len() {
            spans.push((self.driver.create_event()?, self.driver.create_event()?));
        }
        drop(spans);
        self.driver.record(self.origin, self.streams[COMPUTE])?;
        // The stream is empty between steps, so the event happens at once.
        self.driver.synchronize_event(self.origin)?;
        self.origin_time.store(clock::now(), Ordering::SeqCst);
        Ok(())
    }

    /// Makes a stream wait for an instruction that is queued on another stream.
    pub(super) fn wait_for(&self, program: usize, stream: usize, instruction: u32) -> Result<(), CudaError> {
        match self.programs[program].ends[instruction as usize] {
            Some(end) => self.driver.stream_wait_event(self.streams[stream], end),
            None => Ok(()),
        }
    }

    /// Records the start of an instruction in a timed step. Call it after the instruction's waits
    /// are queued, and before its work is.
    pub(super) fn record_start(&self, program: usize, stream: usize, instruction: u32, mode: StepMode) -> Result<(), CudaError> {
        match mode.is_timed {
            true => self.driver.record(self.span_events(program, instruction).0, self.streams[stream]),
            false => Ok(()),
        }
    }

    /// Records the end of an instruction, for other streams and in a timed step for its span. Call
    /// it after the instruction's work is queued.
    pub(super) fn record_end(&self, program: usize, stream: usize, instruction: u32, mode: StepMode) -> Result<(), CudaError> {
        if mode.is_timed {
            self.driver.record(self.span_events(program, instruction).1, self.streams[stream])?;
        }
        match self.programs[program].ends[instruction as usize] {
            Some(end) => self.driver.record(end, self.streams[stream]),
            None => Ok(()),
        }
    }

    fn span_events(&self, program: usize, instruction: u32) -> (EventHandle, EventHandle) {
        self.programs[program].spans.lock().unwrap_or_else(PoisonError::into_inner)[instruction as usize]
    }

    /// The spans of the last step, by the monotonic clock. Empty if the step was not timed.
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

    /// The staging memory of a load instruction.
    pub(super) fn staging(&self, program: usize, buffer_set: usize, instruction: u32) -> Result<&Pinned, ExecutorError> {
        let found = self.programs[program].staging[buffer_set].get(&instruction);
        found
            .ok_or_else(|| CudaError::Call { action: "loading samples", reason: "no staging memory for this load".into() }.into())
    }

    /// Whether exactly these samples were staged ahead in a set.
    pub(super) fn samples_are_staged(&self, program: usize, buffer_set: usize, samples: &Arc<Samples>) -> bool {
        let staged = self.programs[program].staged.lock().unwrap_or_else(PoisonError::into_inner);
        staged[buffer_set].as_ref().is_some_and(|known| Arc::ptr_eq(known, samples))
    }

    /// Stages the samples of the next step in the set that this step does not use. Does nothing on
    /// streams other than load. Call it after `step`, whose set is `buffer_set`.
    pub(in crate::interpreter) fn prepare_next_samples(
        &self,
        prepared: &PreparedProgram,
        stream: usize,
        buffer_set: usize,
        runner: &mut StreamRunner,
        step: &StepRequest,
    ) -> Result<(), ExecutorError> {
        let (Some(next), StreamRunner::Load { .. }) = (&step.next, &*runner) else { return Ok(()) };
        let next_set = 1 - buffer_set;
        for &id in &prepared.stream_instructions[stream] {
            self.stage_samples(prepared, step.program, next_set, id, runner, next)?;
        }
        self.programs[step.program].staged.lock().unwrap_or_else(PoisonError::into_inner)[next_set] = Some(Arc::clone(next));
        Ok(())
    }

    /// Fills the staging memory of a load instruction.
    pub(super) fn stage_samples(
        &self,
        prepared: &PreparedProgram,
        program: usize,
        buffer_set: usize,
        instruction: u32,
        runner: &mut StreamRunner,
        samples: &Samples,
    ) -> Result<(), ExecutorError> {
        let operands = &prepared.operands[instruction as usize];
        let pinned = self.staging(program, buffer_set, instruction)?;
        let write = pinned.operand(operands.writes.first().expect("invariant: a load has a write").bytes);
        // SAFETY: the memory belongs to this load alone. Its last copy ended with its step.
        unsafe { runner.run(prepared.operation(instruction), &[], &[write], samples) }
    }

    /// The graph of a step, if it is captured.
    pub(super) fn graph(&self, program: usize, buffer_set: usize) -> Option<GraphHandle> {
        self.programs[program].graphs.lock().unwrap_or_else(PoisonError::into_inner)[buffer_set]
    }

    pub(super) fn keep_graph(&self, program: usize, buffer_set: usize, graph: GraphHandle) {
        self.programs[program].graphs.lock().unwrap_or_else(PoisonError::into_inner)[buffer_set] = Some(graph);
    }

    /// Reads one number from the device arena. Call it between steps.
    pub(in crate::interpreter) fn read_f32(&self, operand: &Operand) -> Result<f32, ExecutorError> {
        let mut value = [0.0_f32];
        self.read_into(operand, &mut value)?;
        Ok(value[0])
    }

    /// Reads numbers from the start of an operand in the device arena. Call it between steps.
    pub(in crate::interpreter) fn read_into(&self, operand: &Operand, values: &mut [f32]) -> Result<(), ExecutorError> {
        let stream = self.streams[COMPUTE];
        let from = DeviceAddress::from_pointer(operand.pointer);
        let bytes = size_of_val(values).min(operand.bytes);
        // SAFETY: the operand lies in the arena and is as long. `values` lives until the stream is
        // done.
        unsafe { self.driver.copy_out(values.as_mut_ptr().cast(), from, bytes, stream) }?;
        Ok(self.driver.synchronize(stream)?)
    }
}

impl ProgramState {
    fn new(driver: &Arc<dyn Driver>, prepared: &PreparedProgram, keys: &[StreamKey]) -> Result<Self, CudaError> {
        let mut ends = vec![None; prepared.dependencies.len()];
        let stream_of = |id: u32| prepared.stream_instructions.iter().position(|list| list.contains(&id));
        for (stream, instructions) in prepared.stream_instructions.iter().enumerate() {
            for &id in instructions {
                for &(other, awaited) in prepared.dependencies[id as usize].iter().filter(|(other, _)| *other != stream) {
                    debug_assert_eq!(stream_of(awaited), Some(other));
                    let end: &mut Option<EventHandle> = &mut ends[awaited as usize];
                    if end.is_none() {
                        *end = Some(driver.create_event()?);
                    }
                }
            }
        }
        let mut staging = [HashMap::new(), HashMap::new()];
        let load = keys.iter().position(|key| *key == StreamKey::Load);
        for &id in load.map_or(&[][..], |stream| &prepared.stream_instructions[stream]) {
            debug_assert!(matches!(prepared.operation(id), Operation::Load { .. }));
            let bytes = prepared.operands[id as usize].writes.first().expect("invariant: a load has a write").bytes;
            for set in &mut staging {
                set.insert(id, Pinned::new(driver, bytes)?);
            }
        }
        let (spans, staged, graphs, runs) = (Mutex::default(), Mutex::default(), Mutex::default(), AtomicU64::new(0));
        Ok(Self { ends, spans, staging, staged, graphs, runs, can_be_captured: prepared.stage.is_alone() })
    }
}
