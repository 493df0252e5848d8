//! The interpreter: takes a rank's next instruction, waits for what it depends on, has it done, records its span.
//!
//! It knows no layouts. Each stream of the Programs is a thread that owns what the stream needs: a process group, a channel to one
//! peer, the data set; kernels run on the calling thread. Training and evaluation are two Programs over one arena and the same streams.
//! Where the arena is a GPU's memory, each stream has one of the GPU's, too: to be done is then to be queued there, and to wait for another stream is to
//! have the GPU wait for its event ([`queues`]).

mod device;
#[cfg(test)]
mod device_tests;
mod playlist;
mod queues;
mod rehearsal;
mod streams;
#[cfg(test)]
mod tests;
mod ways;

pub(crate) use playlist::StreamKey;
pub(crate) use rehearsal::Rehearsal;

use crate::arena::Arenas;
use crate::backend::cuda::CudaBackend;
use crate::backend::{CpuBackend, Hyperparameters};
use crate::board::{Board, MOST_STREAMS};
use crate::error::ExecutorError;
use crate::line::{Line, stream_number};
use crate::samples::Samples;
use crate::transport::{StreamNumber, Transport};
use foretell_program::{Group, Mesh, MetricKind, Program, Rank};
use playlist::Playlist;
use queues::Queues;
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use streams::{compute, live};

/// When an instruction ran, in nanoseconds of the machine's clock.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RawSpan {
    pub(crate) start: u64,
    pub(crate) end: u64,
}

/// What one run of a Program works on.
#[derive(Clone, Debug)]
pub(crate) struct Step {
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

struct Shared {
    /// By slot: what its stream is for.
    keys: Vec<StreamKey>,
    /// By slot: on which of the transport's streams it waits for other ranks.
    numbers: Vec<Option<StreamNumber>>,
    playlists: Vec<Playlist>,
    board: Board,
    step: RwLock<Step>,
    /// Counts the steps that were begun; workers run one each time it grows. `u64::MAX` ends them.
    begun: AtomicU64,
    /// By slot: how many steps it has ended.
    ended: Vec<AtomicU64>,
    /// By slot: the spans of its list, of the last step.
    spans: Vec<Mutex<Vec<RawSpan>>>,
    main: std::thread::Thread,
    transport: Arc<dyn Transport>,
    /// Where the arena is a GPU's memory.
    queues: Option<Queues>,
}

/// What runs kernels.
enum Processor {
    Cpu(Box<CpuBackend>),
    Cuda(Box<CudaBackend>),
}

/// One rank's streams.
pub(crate) struct Interpreter {
    shared: Arc<Shared>,
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
        if keys.len() > MOST_STREAMS {
            let what = format!("a rank with {} streams", keys.len());
            return Err(ExecutorError::Unsupported { what, hint: "use fewer pipeline stages".into() });
        }
        let stages = programs.iter().flat_map(|program| &program.lists);
        let groups: Vec<Group> =
            stages.flat_map(|stage| stage.groups.iter().cloned()).collect::<BTreeSet<_>>().into_iter().collect();
        let playlists =
            programs.iter().map(|program| Playlist::new(program, &mesh, rank, &keys, arenas)).collect::<Result<Vec<_>, _>>()?;
        let (processor, queues) = match arenas.driver() {
            None => (Processor::Cpu(Box::default()), None),
            Some(driver) => {
                let mut backend = CudaBackend::new(Arc::clone(driver))?;
                let queues = Queues::new(driver, &backend, &playlists, &keys)?;
                if driver.collectives().is_some() {
                    device::load_kernels(driver, &mut backend, &playlists, &arenas.device)?;
                }
                (Processor::Cuda(Box::new(backend)), Some(queues))
            }
        };
        let step = Step {
            program: 0,
            samples: Arc::clone(&samples),
            next: None,
            hyperparameters: Hyperparameters::default(),
            is_timed: false,
        };
        let shared = Arc::new(Shared {
            playlists,
            queues,
            numbers: keys.iter().map(|key| stream_number(key, &groups, &mesh, rank)).collect(),
            board: Board::new(keys.len()),
            step: RwLock::new(step),
            begun: AtomicU64::new(0),
            ended: keys.iter().map(|_| AtomicU64::new(0)).collect(),
            spans: keys.iter().map(|_| Mutex::new(Vec::new())).collect(),
            keys,
            main: std::thread::current(),
            transport: Arc::clone(&transport),
        });
        shared.board.enter(0);
        // From here on it ends the threads that it has, should one not start.
        let mut interpreter = Self { shared: Arc::clone(&shared), processor, workers: Vec::new(), step_number: 0 };
        let mut lines: Vec<Option<Line>> = vec![None];
        for key in shared.keys.iter().skip(1) {
            lines.push(Some(Line::open(key, &groups, &mesh, precision, rank, &transport)?));
        }
        let mut ways = match &shared.queues {
            Some(queues) => ways::connect(queues, &shared.keys, &groups, rank, &mut lines)?.into_iter().map(Some).collect(),
            None => Vec::new(),
        };
        for (slot, (key, line)) in shared.keys.iter().zip(lines).enumerate() {
            let Some(line) = line else { continue };
            let way = ways.get_mut(slot).and_then(Option::take);
            let shared = Arc::clone(&shared);
            let worker = std::thread::Builder::new()
                .name(format!("{key} stream"))
                .spawn(move || live(&shared, slot, line, way))
                .map_err(|error| ExecutorError::system("start a stream's thread", error))?;
            interpreter.workers.push(worker);
        }
        Ok(interpreter)
    }

    /// Runs one step on all streams and returns when every instruction is done.
    pub(crate) fn run(&mut self, step: Step) -> Result<(), ExecutorError> {
        let shared = &self.shared;
        shared.board.reset();
        let playlist = &shared.playlists[step.program];
        let own = step.clone();
        if let Some(queues) = &shared.queues {
            queues.begin(&own, playlist)?;
        }
        *shared.step.write().unwrap_or_else(PoisonError::into_inner) = step;
        self.step_number += 1;
        shared.begun.store(self.step_number, Ordering::SeqCst);
        for worker in &self.workers {
            worker.thread().unpark();
        }
        let result = match &mut self.processor {
            Processor::Cpu(backend) => compute(shared, playlist, backend, &own.hyperparameters),
            Processor::Cuda(backend) => device::compute(shared, playlist, backend, &own),
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
        match shared.board.has_failed() {
            true => Err(shared.board.take_failure().unwrap_or(ExecutorError::OtherStream)),
            false => Ok(()),
        }
    }

    /// The sums that a Program's last run left on this rank, as far as they count.
    pub(crate) fn metrics(&self, program: usize, mesh: &Mesh, rank: Rank) -> Result<Vec<(MetricKind, f64)>, ExecutorError> {
        let playlist = &self.shared.playlists[program];
        let coordinates = mesh.coordinates(rank);
        let counting = playlist.metrics.iter().filter(|(metric, _)| metric.counts_at(coordinates));
        let value = |operand: &crate::backend::Operand| match &self.shared.queues {
            // SAFETY: the operand lies in the arena, is aligned, holds one `f32`, and no stream runs between steps.
            None => Ok(unsafe { operand.pointer.cast::<f32>().read() }),
            Some(queues) => queues.number(operand),
        };
        counting.map(|(metric, operand)| Ok((metric.kind, f64::from(value(operand)?)))).collect()
    }

    /// When each instruction of a Program's last run ran, in the order of the list; nothing where that was not asked for and is not known.
    pub(crate) fn spans(&self, program: usize) -> Result<Vec<RawSpan>, ExecutorError> {
        let playlist = &self.shared.playlists[program];
        if let Some(queues) = &self.shared.queues {
            return queues.spans(program);
        }
        let mut spans = vec![RawSpan::default(); playlist.stage.instructions.len()];
        for (list, recorded) in playlist.lists.iter().zip(&self.shared.spans) {
            let recorded = recorded.lock().unwrap_or_else(PoisonError::into_inner);
            for (&id, &span) in list.iter().zip(recorded.iter()) {
                spans[id as usize] = span;
            }
        }
        Ok(spans)
    }
}

/// The streams of a rank's lists, each once; the compute stream first.
fn stream_keys(programs: &[&Program], rank: Rank) -> Vec<StreamKey> {
    let mut keys = vec![StreamKey::Compute];
    for program in programs {
        for stream in &program.list_of(rank).streams {
            let key = StreamKey::of(program, rank, stream);
            if !keys.contains(&key) {
                keys.push(key);
            }
        }
    }
    keys
}

impl Shared {
    /// Remembers why the rank cannot go on, and wakes all who wait: for its streams, here and elsewhere. The transport comes first, so
    /// that nobody who is woken by the board goes on to wait there.
    fn fail(&self, error: ExecutorError) {
        self.transport.abort(None);
        if let Some(collectives) = self.queues.as_ref().and_then(|queues| queues.driver.collectives()) {
            collectives.abort();
        }
        self.board.fail(error);
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
