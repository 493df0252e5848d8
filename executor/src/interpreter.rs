//! The interpreter: takes a rank's next instruction, waits for what it depends on, has it done, records its span.
//!
//! It knows no layouts. Each stream of the Programs is a thread that owns what the stream needs: a process group, a channel to one
//! peer, the data set; kernels run on the calling thread. Training and evaluation are two Programs over one arena and the same streams.
//! Where the arena is a GPU's memory, each stream has one of the GPU's, too: to be done is then to be queued there, and to wait for another stream is to
//! have the GPU wait for its event ([`gpu`]).

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

pub(crate) use solo::SoloInterpreter;
pub(crate) use stream_numbers::{OUTSIDE_PROGRAMS, STREAM_COUNT};

use crate::arena::Arenas;
use crate::backend::cuda::CudaBackend;
use crate::backend::{CpuBackend, Hyperparameters};
use crate::error::ExecutorError;
use crate::samples::Samples;
use crate::transport::{StreamNumber, Transport};
use foretell_program::{Group, Mesh, MetricKind, Program, Rank};
use gpu::GpuStreams;
use prepared_program::PreparedProgram;
use progress::{MAX_STREAMS, Progress};
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use stream_key::{StreamKey, stream_keys};
use stream_numbers::stream_number;
use stream_runner::StreamRunner;

/// When an instruction ran, in nanoseconds of the machine's clock.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RawSpan {
    pub(crate) start: u64,
    pub(crate) end: u64,
}

/// What one run of a Program works on.
#[derive(Clone, Debug)]
pub(crate) struct StepRequest {
    /// Which Program.
    pub(crate) program: usize,
    /// The samples of the global batch.
    pub(crate) samples: Arc<Samples>,
    /// The samples of the next run of the same Program, if they are known: they are made ready while this one runs.
    pub(crate) next: Option<Arc<Samples>>,
    /// What the optimizer is told.
    pub(crate) hyperparameters: Hyperparameters,
    /// Whether it must be known when each instruction ran. A processor's interpreter knows it anyway; a GPU's is faster without.
    pub(crate) is_timed: bool,
}

struct SharedState {
    /// By slot: what its stream is for.
    keys: Vec<StreamKey>,
    /// By slot: on which of the transport's streams it waits for other ranks.
    numbers: Vec<Option<StreamNumber>>,
    programs: Vec<PreparedProgram>,
    progress: Progress,
    step: RwLock<StepRequest>,
    /// Counts the steps that were begun; workers run one each time it grows. `u64::MAX` ends them.
    begun: AtomicU64,
    /// By slot: how many steps it has ended.
    ended: Vec<AtomicU64>,
    /// By slot: the spans of its list, of the last step.
    spans: Vec<Mutex<Vec<RawSpan>>>,
    main: std::thread::Thread,
    transport: Arc<dyn Transport>,
    /// Where the arena is a GPU's memory.
    gpu_streams: Option<GpuStreams>,
}

/// What runs kernels.
enum Processor {
    Cpu(Box<CpuBackend>),
    Cuda(Box<CudaBackend>),
}

/// One rank's streams.
pub(crate) struct Interpreter {
    shared: Arc<SharedState>,
    processor: Processor,
    workers: Vec<std::thread::JoinHandle<()>>,
    step_number: u64,
}

const END: u64 = u64::MAX;
/// The slot of the compute stream.
const COMPUTE: usize = 0;

impl Interpreter {
    /// Prepares `programs` for `rank` over the same arenas and starts the threads of their streams. What the device's arena holds is lost where GPUs
    /// reach each other directly: it is all zeros afterwards.
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
        let programs = programs
            .iter()
            .map(|program| PreparedProgram::new(program, &mesh, rank, &keys, arenas))
            .collect::<Result<Vec<_>, _>>()?;
        let (processor, gpu_streams) = match arenas.driver() {
            None => (Processor::Cpu(Box::default()), None),
            Some(driver) => {
                let mut backend = CudaBackend::new(Arc::clone(driver))?;
                let gpu_streams = GpuStreams::new(driver, &backend, &programs, &keys)?;
                if driver.collectives().is_some() {
                    gpu::load_kernels(driver, &mut backend, &programs, &arenas.device)?;
                }
                (Processor::Cuda(Box::new(backend)), Some(gpu_streams))
            }
        };
        let step = StepRequest {
            program: 0,
            samples: Arc::clone(&samples),
            next: None,
            hyperparameters: Hyperparameters::default(),
            is_timed: false,
        };
        let shared = Arc::new(SharedState {
            programs,
            gpu_streams,
            numbers: keys.iter().map(|key| stream_number(key, &groups, &mesh, rank)).collect(),
            progress: Progress::new(keys.len()),
            step: RwLock::new(step),
            begun: AtomicU64::new(0),
            ended: keys.iter().map(|_| AtomicU64::new(0)).collect(),
            spans: keys.iter().map(|_| Mutex::new(Vec::new())).collect(),
            keys,
            main: std::thread::current(),
            transport: Arc::clone(&transport),
        });
        shared.progress.enter(0);
        // From here on it ends the threads that it has, should one not start.
        let mut interpreter = Self { shared: Arc::clone(&shared), processor, workers: Vec::new(), step_number: 0 };
        let mut runners: Vec<Option<StreamRunner>> = vec![None];
        for key in shared.keys.iter().skip(1) {
            runners.push(Some(StreamRunner::open(key, &groups, &mesh, precision, rank, &transport)?));
        }
        let mut communication = match &shared.gpu_streams {
            Some(gpu_streams) => {
                gpu::connect(gpu_streams, &shared.keys, &groups, rank, &mut runners)?.into_iter().map(Some).collect()
            }
            None => Vec::new(),
        };
        for (slot, (key, runner)) in shared.keys.iter().zip(runners).enumerate() {
            let Some(runner) = runner else { continue };
            let communication = communication.get_mut(slot).and_then(Option::take);
            let shared = Arc::clone(&shared);
            let worker = std::thread::Builder::new()
                .name(format!("{key} stream"))
                .spawn(move || threads::live(&shared, slot, runner, communication))
                .map_err(|error| ExecutorError::system("start a stream's thread", error))?;
            interpreter.workers.push(worker);
        }
        Ok(interpreter)
    }

    /// Runs one step on all streams and returns when every instruction is done.
    pub(crate) fn run(&mut self, step: StepRequest) -> Result<(), ExecutorError> {
        let shared = &self.shared;
        shared.progress.reset();
        let prepared = &shared.programs[step.program];
        let own = step.clone();
        if let Some(gpu_streams) = &shared.gpu_streams {
            gpu_streams.begin(&own, prepared)?;
        }
        *shared.step.write().unwrap_or_else(PoisonError::into_inner) = step;
        self.step_number += 1;
        shared.begun.store(self.step_number, Ordering::SeqCst);
        for worker in &self.workers {
            worker.thread().unpark();
        }
        let result = match &mut self.processor {
            Processor::Cpu(backend) => threads::compute(shared, prepared, backend, &own.hyperparameters),
            Processor::Cuda(backend) => gpu::compute(shared, prepared, backend, &own),
        };
        if let Err(error) = result {
            shared.fail(error);
        }
        for slot in 1..shared.ended.len() {
            while shared.ended[slot].load(Ordering::SeqCst) < self.step_number {
                // No thread ends within a step unless something went very wrong; what, it has said itself if it could.
                if self.workers.get(slot - 1).is_none_or(std::thread::JoinHandle::is_finished) {
                    let (stream, message) = (shared.keys[slot].to_string(), "its thread is gone".into());
                    shared.fail(ExecutorError::Panicked { stream, message });
                    break;
                }
                std::thread::park_timeout(std::time::Duration::from_millis(50));
            }
        }
        match shared.progress.has_failed() {
            true => Err(shared.progress.take_failure().unwrap_or(ExecutorError::OtherStream)),
            false => Ok(()),
        }
    }

    /// The sums that a Program's last run left on this rank, as far as they count.
    pub(crate) fn metrics(&self, program: usize, mesh: &Mesh, rank: Rank) -> Result<Vec<(MetricKind, f64)>, ExecutorError> {
        let prepared = &self.shared.programs[program];
        let coordinates = mesh.coordinates(rank);
        let counting = prepared.metrics.iter().filter(|(metric, _)| metric.counts_at(coordinates));
        let value = |operand: &crate::backend::Operand| match &self.shared.gpu_streams {
            // SAFETY: the operand lies in the arena, is aligned, holds one `f32`, and no stream runs between steps.
            None => Ok(unsafe { operand.pointer.cast::<f32>().read() }),
            Some(gpu_streams) => gpu_streams.number(operand),
        };
        counting.map(|(metric, operand)| Ok((metric.kind, f64::from(value(operand)?)))).collect()
    }

    /// When each instruction of a Program's last run ran, in the order of the list; nothing where that was not asked for and is not known.
    pub(crate) fn spans(&self, program: usize) -> Result<Vec<RawSpan>, ExecutorError> {
        let prepared = &self.shared.programs[program];
        if let Some(gpu_streams) = &self.shared.gpu_streams {
            return gpu_streams.spans(program);
        }
        let mut spans = vec![RawSpan::default(); prepared.stage.instructions.len()];
        for (list, recorded) in prepared.lists.iter().zip(&self.shared.spans) {
            let recorded = recorded.lock().unwrap_or_else(PoisonError::into_inner);
            for (&id, &span) in list.iter().zip(recorded.iter()) {
                spans[id as usize] = span;
            }
        }
        Ok(spans)
    }
}

impl SharedState {
    /// Remembers why the rank cannot go on, and wakes all who wait: for its streams, here and elsewhere. The transport comes first, so
    /// that nobody who is woken by the progress goes on to wait there.
    fn fail(&self, error: ExecutorError) {
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
            // The streams wait for what this thread will not do any more, and their threads are waited for below.
            self.shared
                .fail(ExecutorError::Panicked { stream: StreamKey::Compute.to_string(), message: "see standard error".into() });
        }
        self.shared.begun.store(END, Ordering::SeqCst);
        for worker in self.workers.drain(..) {
            worker.thread().unpark();
            // A worker that panicked has said so.
            let _ = worker.join();
        }
    }
}
