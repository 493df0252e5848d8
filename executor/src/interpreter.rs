//! Runs the Programs of one rank: each instruction after its dependencies, with its span recorded.
//!
//! Every stream of the Programs is a thread that owns what the stream needs: a process group, a
//! channel to one peer, or the data set. Kernels run on the thread that calls [`Interpreter::run`].
//! Training and evaluation are two Programs over the same arenas and streams.
//!
//! On a GPU each of these streams also has one of the GPU's streams. An instruction then counts as
//! done when it is queued there, and a dependency becomes a wait for a GPU event ([`gpu`]).
//!
//! The interpreter knows no layouts.

#[cfg(test)]
mod exchanges;
mod forward;
mod gpu;
mod prepared_program;
mod progress;
mod solo;
mod stream_key;
mod stream_numbers;
mod stream_runner;
#[cfg(test)]
mod tests;
mod threads;

pub(crate) use forward::ForwardInterpreter;
pub(crate) use solo::SoloInterpreter;
pub(crate) use stream_numbers::{OUTSIDE_PROGRAMS, STREAM_COUNT};

use crate::arena::Arenas;
use crate::backend::cuda::CudaBackend;
use crate::backend::{CpuBackend, Hyperparameters, Operand};
use crate::error::ExecutorError;
use crate::samples::Samples;
use crate::transport::{StreamNumber, Transport, TransportError};
use foretell_program::{Group, Mesh, MetricKind, Program, Rank};
use gpu::GpuStreams;
use prepared_program::PreparedProgram;
use progress::{MAX_STREAMS, StreamProgress};
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::thread::JoinHandle;
use stream_key::{StreamKey, stream_keys};
use stream_numbers::stream_number;
use stream_runner::StreamRunner;

/// Start and end of an instruction, in nanoseconds of the monotonic clock.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RawSpan {
    pub(crate) start: u64,
    pub(crate) end: u64,
}

/// The inputs of one run of a Program.
#[derive(Clone, Debug)]
pub(crate) struct StepRequest {
    /// The Program's index among those given to [`Interpreter::start`].
    pub(crate) program: usize,
    /// The samples of the global batch.
    pub(crate) samples: Arc<Samples>,
    /// The samples of the next run of the same Program, if they are known. On a GPU they are
    /// prepared while this run is in progress.
    pub(crate) next: Option<Arc<Samples>>,
    pub(crate) hyperparameters: Hyperparameters,
    /// Whether to time each instruction. A CPU always does; a GPU runs faster without.
    pub(crate) is_timed: bool,
}

/// The state that all threads of a rank share. Vectors are indexed by stream, in the order of
/// `keys`.
struct SharedState {
    keys: Vec<StreamKey>,
    /// The transport's stream that each stream uses; `None` for streams without peers.
    transport_streams: Vec<Option<StreamNumber>>,
    /// The prepared Programs, by index.
    programs: Vec<PreparedProgram>,
    progress: StreamProgress,
    /// The step in progress, or the last one.
    step: RwLock<StepRequest>,
    /// The number of steps started. Each thread runs a step whenever it grows, and ends at [`END`].
    steps_started: AtomicU64,
    /// The number of the last step that each stream has finished.
    steps_finished: Vec<AtomicU64>,
    /// The spans of each stream's instructions in the last step. Not used on a GPU.
    spans: Vec<Mutex<Vec<RawSpan>>>,
    /// The thread that runs the interpreter, woken when a stream finishes a step.
    main: std::thread::Thread,
    transport: Arc<dyn Transport>,
    /// Whether this rank continues after the loss of a peer of this interpreter.
    outlives_peers: AtomicBool,
    /// `None` on a CPU.
    gpu_streams: Option<GpuStreams>,
}

/// The backend that runs the kernels.
enum KernelBackend {
    Cpu(Box<CpuBackend>),
    Cuda(Box<CudaBackend>),
}

/// The interpreter of one rank.
pub(crate) struct Interpreter {
    shared: Arc<SharedState>,
    backend: KernelBackend,
    /// The threads of all streams but compute, in the order of `SharedState::keys`.
    workers: Vec<JoinHandle<()>>,
    step_number: u64,
}

/// The value of `SharedState::steps_started` that ends all threads.
const END: u64 = u64::MAX;
/// The index of the compute stream.
const COMPUTE: usize = 0;

impl Interpreter {
    /// Prepares `programs` for `rank` over the same arenas and starts the threads of their streams.
    /// If GPUs communicate directly, this zeroes the device arena.
    ///
    /// # Errors
    /// [`ExecutorError::Unsupported`] if the rank has too many streams; errors of the arenas, the
    /// transport and the GPU.
    pub(crate) fn start(
        programs: &[&Program],
        rank: Rank,
        arenas: &Arenas,
        transport: Arc<dyn Transport>,
        samples: Arc<Samples>,
    ) -> Result<Self, ExecutorError> {
        let first = programs.first().ok_or(ExecutorError::OtherStream)?;
        let (mesh, precision) = (first.mesh.clone(), first.precision);
        let keys = stream_keys(programs, rank);
        if keys.len() > MAX_STREAMS {
            let what = format!("a rank with {} streams", keys.len());
            return Err(ExecutorError::Unsupported { what, hint: "use fewer pipeline stages".into() });
        }
        let stages = programs.iter().flat_map(|program| &program.lists);
        let groups: Vec<Group> =
            stages.flat_map(|stage| stage.groups.iter().cloned()).collect::<BTreeSet<_>>().into_iter().collect();
        let prepared = programs
            .iter()
            .map(|program| PreparedProgram::new(program, &mesh, rank, &keys, arenas))
            .collect::<Result<Vec<_>, _>>()?;
        let (backend, gpu_streams) = open_backend(arenas, &prepared, &keys)?;
        let step = StepRequest { program: 0, samples, next: None, hyperparameters: Hyperparameters::default(), is_timed: false };
        let shared = Arc::new(SharedState {
            programs: prepared,
            gpu_streams,
            transport_streams: keys.iter().map(|key| stream_number(key, &groups, &mesh, rank)).collect(),
            progress: StreamProgress::new(keys.len()),
            step: RwLock::new(step),
            steps_started: AtomicU64::new(0),
            steps_finished: keys.iter().map(|_| AtomicU64::new(0)).collect(),
            spans: keys.iter().map(|_| Mutex::new(Vec::new())).collect(),
            keys,
            main: std::thread::current(),
            transport: Arc::clone(&transport),
            outlives_peers: AtomicBool::new(false),
        });
        shared.progress.register_thread(COMPUTE);
        // From here on, an error drops the interpreter, which ends the threads that have started.
        let mut interpreter = Self { shared: Arc::clone(&shared), backend, workers: Vec::new(), step_number: 0 };
        // The compute stream has no runner: it is the calling thread.
        let mut runners: Vec<Option<StreamRunner>> = vec![None];
        for key in shared.keys.iter().skip(1) {
            runners.push(Some(StreamRunner::open(key, &groups, &mesh, precision, rank, &transport)?));
        }
        let mut communications = match &shared.gpu_streams {
            Some(gpu_streams) => {
                let connected = gpu::connect(gpu_streams, &shared.keys, &groups, rank, &mut runners)?;
                connected.into_iter().map(Some).collect()
            }
            None => Vec::new(),
        };
        for (stream, (key, runner)) in shared.keys.iter().zip(runners).enumerate() {
            let Some(runner) = runner else { continue };
            let communication = communications.get_mut(stream).and_then(Option::take);
            let shared = Arc::clone(&shared);
            let worker = std::thread::Builder::new()
                .name(format!("{key} stream"))
                .spawn(move || threads::stream_thread(&shared, stream, runner, communication))
                .map_err(|error| ExecutorError::system("start a stream's thread", error))?;
            interpreter.workers.push(worker);
        }
        Ok(interpreter)
    }

    /// From now on the loss of a peer fails only the step in progress: the rank's transport is not
    /// aborted.
    pub(crate) fn outlive_peers(&self) {
        self.shared.outlives_peers.store(true, Ordering::SeqCst);
    }

    /// Runs one step on all streams. Returns when every instruction is done.
    ///
    /// # Errors
    /// The first failure of a stream.
    pub(crate) fn run(&mut self, step: StepRequest) -> Result<(), ExecutorError> {
        let shared = &self.shared;
        shared.progress.reset();
        let prepared = &shared.programs[step.program];
        let own_step = step.clone();
        if let Some(gpu_streams) = &shared.gpu_streams {
            gpu_streams.begin_step(&own_step, prepared)?;
        }
        *shared.step.write().unwrap_or_else(PoisonError::into_inner) = step;
        self.step_number += 1;
        shared.steps_started.store(self.step_number, Ordering::SeqCst);
        for worker in &self.workers {
            worker.thread().unpark();
        }
        let result = match &mut self.backend {
            KernelBackend::Cpu(backend) => threads::run_compute_stream(shared, prepared, backend, &own_step.hyperparameters),
            KernelBackend::Cuda(backend) => gpu::run_compute_stream(shared, prepared, backend, &own_step),
        };
        if let Err(error) = result {
            shared.fail(error);
        }
        self.wait_for_workers();
        match shared.progress.has_failed() {
            true => Err(shared.progress.take_failure().unwrap_or(ExecutorError::OtherStream)),
            false => Ok(()),
        }
    }

    /// Waits until all workers have finished the step in progress.
    fn wait_for_workers(&self) {
        let shared = &self.shared;
        for stream in 1..shared.keys.len() {
            while shared.steps_finished[stream].load(Ordering::SeqCst) < self.step_number {
                // A thread that panics reports that itself. This only catches one that could not.
                if self.workers.get(stream - 1).is_none_or(JoinHandle::is_finished) {
                    let (stream, message) = (shared.keys[stream].to_string(), "its thread has ended".into());
                    shared.fail(ExecutorError::Panicked { stream, message });
                    break;
                }
                std::thread::park_timeout(std::time::Duration::from_millis(50));
            }
        }
    }

    /// The metrics of a Program's last run on this rank. Metrics that this rank does not contribute
    /// to the sum over ranks are left out.
    pub(crate) fn metrics(&self, program: usize, mesh: &Mesh, rank: Rank) -> Result<Vec<(MetricKind, f64)>, ExecutorError> {
        let prepared = &self.shared.programs[program];
        let coordinates = mesh.coordinates(rank);
        let counted = prepared.metrics.iter().filter(|(metric, _)| metric.counts_at(coordinates));
        let value = |operand: &Operand| match &self.shared.gpu_streams {
            // SAFETY: the operand lies in the arena, is aligned, holds one `f32`, and no stream
            // runs between steps.
            None => Ok(unsafe { operand.pointer.cast::<f32>().read() }),
            Some(gpu_streams) => gpu_streams.read_f32(operand),
        };
        counted.map(|(metric, operand)| Ok((metric.kind, f64::from(value(operand)?)))).collect()
    }

    /// The scores of the samples of a Program's last run: for each sample the probability of each
    /// class, then its label. Empty if the Program leaves no scores, or if another rank reports
    /// these.
    pub(crate) fn scores(&self, program: usize, mesh: &Mesh, rank: Rank) -> Result<Vec<Vec<f32>>, ExecutorError> {
        let prepared = &self.shared.programs[program];
        let coordinates = mesh.coordinates(rank);
        // A rank reports scores if its count of correct predictions is part of the sum over ranks:
        // then each sample is reported once.
        let counts =
            prepared.metrics.iter().any(|(metric, _)| metric.kind == MetricKind::Correct && metric.counts_at(coordinates));
        let mut samples = Vec::new();
        for (width, operand) in prepared.scores.iter().filter(|_| counts) {
            let count = operand.bytes / size_of::<f32>();
            let values = match &self.shared.gpu_streams {
                // SAFETY: the operand lies in the arena, is aligned, holds that many `f32`s, and no
                // stream runs between steps.
                None => unsafe { std::slice::from_raw_parts(operand.pointer.cast::<f32>(), count) }.to_vec(),
                Some(gpu_streams) => {
                    let mut values = vec![0.0; count];
                    gpu_streams.read_into(operand, &mut values)?;
                    values
                }
            };
            samples.extend(values.chunks_exact(*width).map(<[f32]>::to_vec));
        }
        Ok(samples)
    }

    /// The spans of a Program's last run, in the order of the list. Empty if a GPU did not time it.
    pub(crate) fn spans(&self, program: usize) -> Result<Vec<RawSpan>, ExecutorError> {
        let prepared = &self.shared.programs[program];
        if let Some(gpu_streams) = &self.shared.gpu_streams {
            return gpu_streams.spans(program);
        }
        let mut spans = vec![RawSpan::default(); prepared.stage.instructions.len()];
        for (instructions, recorded) in prepared.stream_instructions.iter().zip(&self.shared.spans) {
            let recorded = recorded.lock().unwrap_or_else(PoisonError::into_inner);
            for (&id, &span) in instructions.iter().zip(recorded.iter()) {
                spans[id as usize] = span;
            }
        }
        Ok(spans)
    }
}

/// Opens the backend of the device that holds the arenas, and on a GPU its streams.
fn open_backend(
    arenas: &Arenas,
    programs: &[PreparedProgram],
    keys: &[StreamKey],
) -> Result<(KernelBackend, Option<GpuStreams>), ExecutorError> {
    let Some(driver) = arenas.driver() else { return Ok((KernelBackend::Cpu(Box::default()), None)) };
    let mut backend = CudaBackend::new(Arc::clone(driver))?;
    let gpu_streams = GpuStreams::new(driver, &backend, programs, keys)?;
    if driver.collectives().is_some() {
        gpu::load_kernels(driver, &mut backend, programs, &arenas.device)?;
    }
    Ok((KernelBackend::Cuda(Box::new(backend)), Some(gpu_streams)))
}

impl SharedState {
    /// Records a failure and wakes all streams of this rank. The transport is aborted first, so
    /// that no woken stream waits there again. If the rank outlives its peers, the transport is not
    /// aborted: streams that wait for a lost peer detect the loss themselves.
    fn fail(&self, error: ExecutorError) {
        let is_loss = matches!(error, ExecutorError::Transport(TransportError::PeerLost { .. }) | ExecutorError::OtherStream);
        if is_loss && self.outlives_peers.load(Ordering::SeqCst) {
            self.progress.fail(error);
            return;
        }
        self.transport.abort(None);
        if let Some(collectives) = self.gpu_streams.as_ref().and_then(|gpu_streams| gpu_streams.driver.collectives()) {
            collectives.abort();
        }
        self.progress.fail(error);
    }
}

impl Drop for Interpreter {
    fn drop(&mut self) {
        if std::thread::panicking() {
            // This thread will not run its kernels any more. Wake the workers that wait for these
            // kernels, because they are joined below.
            self.shared
                .fail(ExecutorError::Panicked { stream: StreamKey::Compute.to_string(), message: "see standard error".into() });
        }
        self.shared.steps_started.store(END, Ordering::SeqCst);
        for worker in self.workers.drain(..) {
            worker.thread().unpark();
            // A worker that panicked has reported it.
            let _ = worker.join();
        }
    }
}
