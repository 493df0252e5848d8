//! The interpreter: takes a rank's next instruction, waits for what it depends on, has it done, records its span.
//!
//! It knows no layouts. Each stream of the Programs is a thread that owns what the stream needs: a process group, a channel to one
//! peer, the data set; kernels run on the calling thread. Training and evaluation are two Programs over one arena and the same streams.

use crate::arena::Arena;
use crate::backend::{Backend, CpuBackend, Hyperparameters, KernelCall, Operand};
use crate::board::{Board, MOST_STREAMS};
use crate::clock;
use crate::error::ExecutorError;
use crate::line::Line;
use crate::machine;
use crate::samples::Samples;
use crate::transport::Transport;
use foretell_program::{Group, GroupId, Mesh, Metric, MetricKind, Operation, PeerId, Program, Rank, StageProgram, Stream};
use foretell_units::DataType;
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::{fmt, panic};

/// A stream of either Program, by what it is for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum StreamKey {
    Compute,
    Load,
    Group(Group),
    SendTo(Rank),
    ReceiveFrom(Rank),
}

impl StreamKey {
    fn of(program: &Program, rank: Rank, stream: &Stream) -> Self {
        let list = program.list_of(rank);
        let peer = |PeerId(index): &PeerId| list.peers[*index as usize].of(&program.mesh, rank);
        match stream {
            Stream::Compute => StreamKey::Compute,
            Stream::Load => StreamKey::Load,
            Stream::Group(GroupId(index)) => StreamKey::Group(list.groups[*index as usize].clone()),
            Stream::SendTo(id) => StreamKey::SendTo(peer(id)),
            Stream::ReceiveFrom(id) => StreamKey::ReceiveFrom(peer(id)),
        }
    }
}

impl fmt::Display for StreamKey {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StreamKey::Compute => formatter.write_str("compute"),
            StreamKey::Load => formatter.write_str("load"),
            StreamKey::Group(group) => write!(formatter, "`{group}` group's"),
            StreamKey::SendTo(Rank(rank)) => write!(formatter, "to-rank-{rank}"),
            StreamKey::ReceiveFrom(Rank(rank)) => write!(formatter, "from-rank-{rank}"),
        }
    }
}

/// When an instruction ran, in nanoseconds of the machine's clock.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RawSpan {
    pub(crate) start: u64,
    pub(crate) end: u64,
}

/// A Program made ready to run: for each stream its instructions, for each instruction whom it waits for.
struct Playlist {
    stage: StageProgram,
    /// By slot: the instructions of its stream.
    lists: Vec<Vec<u32>>,
    /// By instruction: slot and instruction that must be done.
    after: Vec<Vec<(usize, u32)>>,
    /// By instruction: its operands.
    operands: Vec<Operands>,
    /// By group: which part the rank has of what the group's axes cut.
    group_index: Vec<usize>,
    /// Samples of a micro-batch that lie on ranks before this one.
    samples_before: usize,
    precision: DataType,
    /// What the run reports: one number each.
    metrics: Vec<(Metric, Operand)>,
}

struct Operands {
    reads: Vec<Operand>,
    writes: Vec<Operand>,
}

// SAFETY: operands are places in the arena, which outlives the playlist; who touches them when is the Program's order.
unsafe impl Send for Playlist {}
// SAFETY: as above.
unsafe impl Sync for Playlist {}

/// What one run of a Program works on.
#[derive(Clone, Debug)]
pub(crate) struct Step {
    /// Which Program.
    pub(crate) program: usize,
    /// The samples of the global batch.
    pub(crate) samples: Arc<Samples>,
    /// What the optimizer is told.
    pub(crate) hyperparameters: Hyperparameters,
}

struct Shared {
    /// By slot: what its stream is for.
    keys: Vec<StreamKey>,
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
}

/// One rank's streams.
pub(crate) struct Interpreter {
    shared: Arc<Shared>,
    backend: CpuBackend,
    workers: Vec<std::thread::JoinHandle<()>>,
    step_number: u64,
}

const END: u64 = u64::MAX;

impl Interpreter {
    /// Prepares `programs` for `rank` over one arena and starts the threads of their streams.
    pub(crate) fn start(
        programs: &[&Program],
        rank: Rank,
        arena: &Arena,
        transport: Arc<dyn Transport>,
        samples: Arc<Samples>,
    ) -> Result<Self, ExecutorError> {
        let first = programs.first().ok_or(ExecutorError::OtherStream)?;
        let (mesh, precision) = (first.mesh.clone(), first.precision);
        let mut keys = vec![StreamKey::Compute];
        for program in programs {
            for stream in &program.list_of(rank).streams {
                let key = StreamKey::of(program, rank, stream);
                if !keys.contains(&key) {
                    keys.push(key);
                }
            }
        }
        if keys.len() > MOST_STREAMS {
            let what = format!("a rank with {} streams", keys.len());
            return Err(ExecutorError::Unsupported { what, hint: "use fewer pipeline stages".into() });
        }
        let stages = programs.iter().flat_map(|program| &program.lists);
        let groups: Vec<Group> =
            stages.flat_map(|stage| stage.groups.iter().cloned()).collect::<BTreeSet<_>>().into_iter().collect();
        let playlists =
            programs.iter().map(|program| Playlist::new(program, &mesh, rank, &keys, arena)).collect::<Result<Vec<_>, _>>()?;
        let shared = Arc::new(Shared {
            playlists,
            board: Board::new(keys.len()),
            step: RwLock::new(Step { program: 0, samples: Arc::clone(&samples), hyperparameters: Hyperparameters::default() }),
            begun: AtomicU64::new(0),
            ended: keys.iter().map(|_| AtomicU64::new(0)).collect(),
            spans: keys.iter().map(|_| Mutex::new(Vec::new())).collect(),
            keys,
            main: std::thread::current(),
            transport: Arc::clone(&transport),
        });
        shared.board.enter(0);
        // From here on it ends the threads that it has, should one not start.
        let mut interpreter =
            Self { shared: Arc::clone(&shared), backend: CpuBackend::new(), workers: Vec::new(), step_number: 0 };
        for (slot, key) in shared.keys.iter().enumerate().skip(1) {
            let line = Line::open(key, &groups, &mesh, precision, rank, &transport)?;
            let shared = Arc::clone(&shared);
            let worker = std::thread::Builder::new()
                .name(format!("{key} stream"))
                .spawn(move || live(&shared, slot, line))
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
        let hyperparameters = step.hyperparameters;
        *shared.step.write().unwrap_or_else(PoisonError::into_inner) = step;
        self.step_number += 1;
        shared.begun.store(self.step_number, Ordering::SeqCst);
        for worker in &self.workers {
            worker.thread().unpark();
        }
        let result = compute(shared, playlist, &mut self.backend, &hyperparameters);
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
    pub(crate) fn metrics(&self, program: usize, mesh: &Mesh, rank: Rank) -> Vec<(MetricKind, f64)> {
        let playlist = &self.shared.playlists[program];
        let coordinates = mesh.coordinates(rank);
        let counting = playlist.metrics.iter().filter(|(metric, _)| metric.counts_at(coordinates));
        // SAFETY: the operand lies in the arena, is aligned, holds one `f32`, and no stream runs between steps.
        counting.map(|(metric, operand)| (metric.kind, f64::from(unsafe { operand.pointer.cast::<f32>().read() }))).collect()
    }

    /// When each instruction of a Program's last run ran, in the order of the list.
    pub(crate) fn spans(&self, program: usize) -> Vec<RawSpan> {
        let playlist = &self.shared.playlists[program];
        let mut spans = vec![RawSpan::default(); playlist.stage.instructions.len()];
        for (list, recorded) in playlist.lists.iter().zip(&self.shared.spans) {
            let recorded = recorded.lock().unwrap_or_else(PoisonError::into_inner);
            for (&id, &span) in list.iter().zip(recorded.iter()) {
                spans[id as usize] = span;
            }
        }
        spans
    }
}

impl Shared {
    /// Remembers why the rank cannot go on, and wakes all who wait: for its streams, here and elsewhere. The transport comes first, so
    /// that nobody who is woken by the board goes on to wait there.
    fn fail(&self, error: ExecutorError) {
        self.transport.abort(None);
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

impl Playlist {
    fn new(program: &Program, mesh: &Mesh, rank: Rank, keys: &[StreamKey], arena: &Arena) -> Result<Self, ExecutorError> {
        let stage = program.list_of(rank);
        let slot_of: Vec<usize> = stage
            .streams
            .iter()
            .map(|stream| keys.iter().position(|key| *key == StreamKey::of(program, rank, stream)).unwrap_or(0))
            .collect();
        let mut lists = vec![Vec::new(); keys.len()];
        let mut after = Vec::with_capacity(stage.instructions.len());
        let mut operands = Vec::with_capacity(stage.instructions.len());
        let place = |id: &foretell_program::BufferId| {
            let buffer = stage.buffer(*id);
            let outside =
                || ExecutorError::OutOfMemory { wanted: stage.arena, reason: format!("`{}` lies outside", buffer.name) };
            let pointer = arena.at(buffer.offset, buffer.bytes).ok_or_else(outside)?;
            Ok::<Operand, ExecutorError>(Operand { pointer, bytes: buffer.bytes.count() as usize })
        };
        for (index, instruction) in stage.instructions.iter().enumerate() {
            lists[slot_of[instruction.stream.0 as usize]].push(index as u32);
            let slot = |id: u32| slot_of[stage.instructions[id as usize].stream.0 as usize];
            after.push(instruction.after.iter().map(|id| (slot(id.0), id.0)).collect());
            operands.push(Operands {
                reads: instruction.reads.iter().map(place).collect::<Result<_, _>>()?,
                writes: instruction.writes.iter().map(place).collect::<Result<_, _>>()?,
            });
        }
        let coordinates = mesh.coordinates(rank);
        let stage_mesh = mesh.stage_at(coordinates);
        let group_index = stage.groups.iter().map(|group| stage_mesh.part_along(&group.axes, coordinates)).collect();
        let samples_before = stage_mesh.samples_before(coordinates);
        let metrics = stage
            .metrics
            .iter()
            .map(|metric| Ok((metric.clone(), place(&metric.buffer)?)))
            .collect::<Result<_, ExecutorError>>()?;
        let precision = program.precision;
        Ok(Self { stage: stage.clone(), lists, after, operands, group_index, samples_before, precision, metrics })
    }
}

/// Runs the compute stream on the calling thread.
fn compute(
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
        let mut waited = false;
        for &(slot, instruction) in &playlist.after[id as usize] {
            waited |= shared.board.wait(0, slot, instruction)?;
        }
        if waited {
            start = clock::now();
        }
        let instruction = &playlist.stage.instructions[id as usize];
        if let Operation::Compute { kernel, accumulate, group } = &instruction.operation {
            let operands = &playlist.operands[id as usize];
            let call = KernelCall {
                kernel,
                reads: &operands.reads,
                writes: &operands.writes,
                accumulate: *accumulate,
                hyperparameters,
                group_index: group.map_or(0, |group| playlist.group_index[group.0 as usize]),
                samples_before: playlist.samples_before,
                precision: playlist.precision,
            };
            // SAFETY: operands are places in the arena that the memory plan gave to live buffers; whoever wrote them is done and
            // nobody else touches them now, because the dependencies say so and were waited for.
            unsafe { backend.run(&call) }.map_err(|source| ExecutorError::Kernel {
                instruction: id,
                name: playlist.stage.name_of(instruction).into(),
                source,
            })?;
        }
        let end = clock::now();
        spans.push(RawSpan { start, end });
        start = end;
        shared.board.post(0, id);
    }
    Ok(())
}

/// The life of a stream's thread. One that panics must not leave the others waiting for it.
fn live(shared: &Shared, slot: usize, line: Line) {
    let lived = panic::catch_unwind(panic::AssertUnwindSafe(|| work(shared, slot, line)));
    if let Err(panic) = lived {
        shared.fail(ExecutorError::panicked(shared.keys[slot].to_string(), panic.as_ref()));
        shared.main.unpark();
    }
}

/// A list for each step that is begun.
fn work(shared: &Shared, slot: usize, mut line: Line) {
    shared.board.enter(slot);
    machine::flush_denormals();
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
        if let Err(error) = stream(shared, playlist, slot, &mut line, &step) {
            shared.fail(error);
        }
        shared.ended[slot].store(step_number, Ordering::SeqCst);
        shared.main.unpark();
    }
}

/// Runs one step of a stream other than compute.
fn stream(shared: &Shared, playlist: &Playlist, slot: usize, line: &mut Line, step: &Step) -> Result<(), ExecutorError> {
    let mut spans = shared.spans[slot].lock().unwrap_or_else(PoisonError::into_inner);
    spans.clear();
    spans.reserve(playlist.lists[slot].len());
    for &id in &playlist.lists[slot] {
        for &(other, instruction) in &playlist.after[id as usize] {
            shared.board.wait(slot, other, instruction)?;
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
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::{DataSource, Dataset, SampleShape, Split};
    use crate::transport::{Patience, Segment, SegmentShape, SharedMemory};
    use foretell_models::{InputKind, Kernel};
    use foretell_program::{Axis, Buffer, BufferId, BufferRole, Collective, Instruction, Phase, StreamId};
    use foretell_units::{Bytes, DataType, Flops};
    use std::time::{Duration, Instant};

    const BYTES: Bytes = Bytes::new(64);

    /// A Program of two ranks whose instructions, one a stream, wait for nothing: an all-reduce that needs both ranks, and `other`.
    fn program(stream: Stream, other: Operation) -> Program {
        let buffer = Buffer {
            name: "x".into(),
            role: BufferRole::Gradient,
            shape: vec![16],
            data_type: DataType::Fp32,
            parent: None,
            offset: Bytes::ZERO,
            bytes: BYTES,
            persistent: true,
            lifetime: None,
            initial: None,
        };
        let all_reduce =
            Operation::Collective { kind: Collective::AllReduce, group: GroupId(0), bytes: BYTES, data_type: DataType::Fp32 };
        let instruction = |stream: u16, operation: Operation| {
            // What computes here has too few operands, and fails.
            let reads = if matches!(operation, Operation::Compute { .. }) { Vec::new() } else { vec![BufferId(0)] };
            let writes = vec![BufferId(0)];
            let stream = StreamId(stream);
            Instruction { name: 0, operation, stream, after: Vec::new(), reads, writes, micro_batch: None, phase: Phase::Forward }
        };
        let stage = StageProgram {
            stage: 0,
            streams: vec![Stream::Group(GroupId(0)), stream],
            peers: Vec::new(),
            groups: vec![Group::along(Axis::Data)],
            buffers: vec![buffer],
            instructions: vec![instruction(0, all_reduce), instruction(1, other)],
            names: vec!["made to fail".into()],
            metrics: Vec::new(),
            arena: BYTES,
        };
        Program {
            lists: vec![stage],
            list_of_rank: vec![0, 0],
            mesh: Mesh::new(|axis| if axis == Axis::Data { 2 } else { 1 }, &[]).expect("two ranks"),
            precision: DataType::Fp32,
            samples: 1,
            predictions: 1,
            tokens: None,
            model_flops: Flops::ZERO,
            hardware_flops: Flops::ZERO,
        }
    }

    /// Runs rank 0, while rank 1 lives but never comes to the all-reduce.
    fn run_alone(program: &Program) -> ExecutorError {
        let segment = Segment::create(&SegmentShape::new(vec![0, 1], crate::line::STREAM_COUNT)).expect("shared memory");
        let attach = |rank| SharedMemory::attach(&segment, rank, 2, Patience::default()).expect("the rank attaches");
        let (transport, _other) = (Arc::new(attach(0)), attach(1));
        let arena = Arena::new(BYTES).expect("64 bytes");
        let shape = SampleShape::Features { width: 1, classes: 2 };
        let dataset = Arc::new(Dataset::open(&DataSource::Synthetic, &shape, 0).expect("synthetic data"));
        let samples = Arc::new(Samples { dataset, split: Split::Training, indices: vec![0] });
        let mut interpreter =
            Interpreter::start(&[program], Rank(0), &arena, transport, Arc::clone(&samples)).expect("the streams start");
        let begun = Instant::now();
        let error = interpreter.run(Step { program: 0, samples, hyperparameters: Hyperparameters::default() });
        drop(interpreter);
        assert!(begun.elapsed() < Duration::from_secs(5), "it waited for {:?}", begun.elapsed());
        error.expect_err("the step cannot be done")
    }

    #[test]
    fn a_kernel_that_fails_wakes_streams_that_wait_for_other_ranks() {
        let kernel = Kernel::Relu { elements: 16 };
        let error = run_alone(&program(Stream::Compute, Operation::Compute { kernel, accumulate: false, group: None }));
        assert!(matches!(error, ExecutorError::Kernel { .. }), "{error}");
    }

    /// Where arithmetic is not checked it is an error like others.
    #[cfg(debug_assertions)]
    #[test]
    fn a_stream_that_panics_is_named_and_wakes_the_others() {
        let load = Operation::Load { input: InputKind::Features, first_sample: usize::MAX, samples: 1 };
        let error = run_alone(&program(Stream::Load, load));
        assert!(matches!(error, ExecutorError::Panicked { .. }), "{error}");
        assert!(error.to_string().starts_with("the load stream panicked: "), "{error}");
    }
}
