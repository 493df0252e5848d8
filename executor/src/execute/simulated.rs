//! Whole short trainings with faults that a seed decides: those of the simulated network, full
//! disks, power cuts and damaged checkpoints.
//!
//! Compiler, interpreter, kernels, collectives, sessions, checkpoints, resuming, and the launcher's
//! watch over ranks and links are the real ones; the network, the clock and the disk are simulated.
//! Every run must end with the right losses or with a true error. After an error the run is resumed
//! from its last complete checkpoint, and must then have the losses of a run without faults, bit
//! for bit. A checkpoint that was reported survives.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that fails may panic")]

use super::checkpoints::SavedCheckpoints;
use super::collector::Collector;
use crate::checkpoint::{CheckpointError, last_whole};
use crate::data::{DataSource, Dataset, InputOptions};
use crate::disk::{Disk, DiskFault, SimulatedDisk};
use crate::error::ExecutorError;
use crate::job::{Checkpoints, Length, OnDivergence, Report, ReportSink, Start, TrainingJob};
use crate::launcher::links::{Link, LinkWatch, Missing};
use crate::member::Member;
use crate::stopping::StepGate;
use crate::training::train;
use crate::transport::simulated::{Fault, NEVER, PlannedFault, Scheduling, SimulatedNetwork};
use crate::transport::{LifeWatch, Peer, StarvedWatch, Transport, TransportError};
use foretell_models::{Mlp, Model, Optimizer};
use foretell_program::{Layout, Period, Plan, Rank, compile};
use rand::{RngExt as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};
use std::time::Duration;

const STEPS: usize = 4;
/// Most time for one seed, also on a busy machine.
const MOST_TIME: Duration = Duration::from_secs(120);
/// How long the launcher waits for a sign of life, and for bytes that were sent.
const PEER_TIMEOUT: Duration = Duration::from_secs(10);
/// Time without a report after which the launcher looks whether the network is idle.
const POLL_INTERVAL: Duration = Duration::from_millis(1);

/// What the launcher detects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Finding {
    /// A rank sends no sign of life.
    Silent(usize),
    /// Bytes of one rank do not reach the other.
    Lost(usize, usize),
}

/// The launcher's watches over ranks and links.
struct Watch {
    life: LifeWatch,
    links: LinkWatch,
    starved: Vec<StarvedWatch>,
    transports: Vec<Arc<dyn Transport>>,
    /// The second of the last look.
    second: u64,
}

impl Watch {
    fn new(network: &Arc<SimulatedNetwork>, size: usize) -> Self {
        let mut life = LifeWatch::new(size, network.now());
        (0..size).for_each(|rank| life.hear(rank, network.now()));
        let transports = (0..size).map(|rank| network.transport(rank)).collect();
        Self { life, links: LinkWatch::default(), starved: vec![StarvedWatch::default(); size], transports, second: 0 }
    }

    /// Does what ranks and launcher do each second.
    fn look(&mut self, network: &SimulatedNetwork) -> Option<Finding> {
        let now = network.now();
        let second = network.seconds();
        if second == std::mem::replace(&mut self.second, second) {
            return None;
        }
        let alive: Vec<usize> = (0..self.transports.len()).filter(|&rank| network.is_alive(rank)).collect();
        alive.iter().for_each(|&rank| self.life.hear(rank, now));
        for &to in &alive {
            for starved in self.starved[to].still(self.transports[to].starved()) {
                let (from, stream) = (starved.peer, starved.stream);
                let link = Link { from, to, stream };
                match self.links.note_starved(&link, starved.received, now) {
                    Missing::Unknown => {
                        let sent = self.transports[from].sent(to, stream).filter(|_| alive.contains(&from));
                        sent.into_iter().for_each(|sent| self.links.note_sent(&link, sent, now));
                    }
                    Missing::For(time) if time >= PEER_TIMEOUT => return Some(Finding::Lost(from, to)),
                    Missing::For(_) => {}
                }
            }
        }
        self.life.silent(PEER_TIMEOUT, now).first().map(|&rank| Finding::Silent(rank))
    }
}

/// A job, and what it does without faults.
struct Case {
    job: TrainingJob,
    /// The bits of the loss of each step.
    losses: BTreeMap<usize, u64>,
    /// The operations of a rank on the network, and of all on the disk.
    operations: (usize, usize),
}

fn job(layout: Layout, every: usize) -> TrainingJob {
    let mut plan = Plan::new(layout, 8);
    plan.optimizer = Optimizer::Adam;
    TrainingJob {
        model: Model::Mlp(Mlp { widths: vec![6, 8, 8, 3] }),
        name: "tiny".into(),
        plan,
        data: DataSource::Synthetic,
        input: InputOptions::default(),
        cores_per_rank: 1,
        seed: 7,
        length: Length::Steps(STEPS),
        evaluate: false,
        timeline: None,
        start: Start::Fresh,
        checkpoints: Some(Checkpoints::new(Some(Period::Steps(every)), Some(2))),
        replay: None,
        on_divergence: OnDivergence::default(),
    }
}

fn cases() -> Vec<Case> {
    let data = Layout { data: 2, micro_batch: 4, ..Layout::default() };
    let layouts = [
        data.clone(),
        Layout { zero: 1, ..data.clone() },
        Layout { zero: 3, ..data.clone() },
        Layout { tensor: 2, micro_batch: 4, ..Layout::default() },
        Layout { pipeline: 2, micro_batch: 2, ..Layout::default() },
        Layout { data: 2, pipeline: 2, zero: 1, micro_batch: 2, ..Layout::default() },
    ];
    let case = |(number, layout)| {
        let job = job(layout, 1 + number % 2);
        let folder = tempfile::tempdir().unwrap();
        let disk = Arc::new(SimulatedDisk::new(0, None));
        let network = network(&job, 0, Vec::new());
        let whole = attempt(&job, folder.path(), &network, &disk);
        assert_eq!((whole.errors.len(), whole.losses.len()), (0, STEPS), "{:?}", whole.errors);
        Case { job, losses: whole.losses, operations: (network.operations(), disk.operations()) }
    };
    layouts.into_iter().enumerate().map(case).collect()
}

fn network(job: &TrainingJob, seed: u64, planned: Vec<PlannedFault>) -> Arc<SimulatedNetwork> {
    SimulatedNetwork::new(world_size(job), Scheduling::Threads, PEER_TIMEOUT, seed, planned)
}

fn world_size(job: &TrainingJob) -> usize {
    job.plan.mesh().unwrap().world_size()
}

/// The outcome of one run.
#[derive(Default)]
struct Attempt {
    losses: BTreeMap<usize, u64>,
    errors: Vec<ExecutorError>,
    finding: Option<Finding>,
    /// The last checkpoint that was reported as complete.
    saved: Option<PathBuf>,
}

enum Event {
    Report(Report),
    End(Result<(), ExecutorError>),
}

struct Reports {
    rank: usize,
    network: Arc<SimulatedNetwork>,
    sender: mpsc::Sender<(usize, Event)>,
}

impl ReportSink for Reports {
    fn send(&self, report: &Report) -> Result<(), TransportError> {
        self.network.hold(self.rank)?;
        self.sender.send((self.rank, Event::Report(report.clone()))).map_err(|_| TransportError::Aborted)
    }
}

/// Trains with one thread per rank, and does what the launcher does.
fn attempt(job: &TrainingJob, folder: &Path, network: &Arc<SimulatedNetwork>, disk: &Arc<SimulatedDisk>) -> Attempt {
    let mut job = job.clone();
    let mut attempt = Attempt::default();
    let size = world_size(&job);
    let compiled = compile(&job.model, &job.name, &job.plan).unwrap();
    let dataset = Dataset::open_with(&job.data, &job.model.sample(), job.seed, &job.input).unwrap();
    let steps_per_epoch = dataset.steps_per_epoch(job.plan.global_batch).unwrap();
    let files: Arc<dyn Disk> = Arc::clone(disk) as _;
    let mut saving = match SavedCheckpoints::prepare(&mut job, Some(folder), steps_per_epoch, size, Arc::clone(&files)) {
        Ok(saving) => saving.unwrap(),
        Err(error) => return Attempt { errors: vec![error], ..attempt },
    };
    let training = &compiled.training;
    let mut collector = Collector::new(size, training.predictions, training.samples, None);
    let gates: Vec<Arc<StepGate>> = (0..size).map(|_| Arc::default()).collect();
    let (sender, events) = mpsc::channel();
    let mut watch = Watch::new(network, size);
    std::thread::scope(|scope| {
        for (rank, gate) in gates.iter().enumerate() {
            let member = Member {
                rank: Rank(rank),
                world_size: size,
                control: Arc::new(Reports { rank, network: Arc::clone(network), sender: sender.clone() }),
                transport: network.transport(rank),
                device: None,
                cpus: vec![0],
                disk: Arc::clone(&files),
                gate: Arc::clone(gate),
            };
            let (sender, job) = (sender.clone(), &job);
            scope.spawn(move || {
                let result = train(&member, job);
                let _ = sender.send((rank, Event::End(result)));
            });
        }
        drop(sender);
        let abort = || {
            network.abort_all();
            gates.iter().for_each(|gate| gate.abort());
        };
        loop {
            let (rank, event) = match events.recv_timeout(POLL_INTERVAL) {
                Ok(event) => event,
                Err(mpsc::RecvTimeoutError::Disconnected) => break,
                Err(mpsc::RecvTimeoutError::Timeout) => {
                    if network.advance_if_idle() && attempt.finding.is_none() && attempt.errors.is_empty() {
                        attempt.finding = watch.look(network);
                        attempt.finding.iter().for_each(|_| abort());
                    }
                    continue;
                }
            };
            let error = match event {
                Event::Report(Report::Steps(steps)) => {
                    let metrics = steps.into_iter().filter_map(|step| collector.step(rank, step));
                    attempt.losses.extend(metrics.map(|metrics| (metrics.step, metrics.loss.to_bits())));
                    None
                }
                Event::Report(Report::CheckpointWritten { step }) => saving.add_written(rank, step).err(),
                Event::Report(Report::CheckpointPart { step, scaler, times }) => saving.add_part(rank, step, scaler, times).err(),
                Event::Report(Report::Failed { message, hint, .. }) => {
                    Some(ExecutorError::RankFailed { rank, host: None, message, hint })
                }
                Event::Report(_) => None,
                Event::End(result) => result.err(),
            };
            if let Some(error) = error {
                attempt.errors.push(error);
                abort();
            }
        }
    });
    // A checkpoint that was reported counts also when a later one fails.
    attempt.errors.extend(saving.wait().err());
    attempt.saved = saving.last.take();
    attempt
}

/// The counts of many seeds.
#[derive(Debug, Default)]
struct Counts {
    /// By fault: how often it happened.
    faults: BTreeMap<String, usize>,
    right: usize,
    resumed: usize,
    fresh: usize,
}

impl Counts {
    fn add(&mut self, network: &SimulatedNetwork) {
        for (fault, count) in network.injected() {
            *self.faults.entry(format!("{fault:?}")).or_default() += count;
        }
    }
}

/// A random place for a fault that does nothing yet.
fn place(case: &Case, random: &mut ChaCha8Rng) -> PlannedFault {
    let rank = random.random_range(0..world_size(&case.job));
    let at = random.random_range(1..case.operations.0 + 1);
    PlannedFault { rank, at, fault: Fault::Delay, lasts: Duration::ZERO }
}

/// Up to three faults that pass before the launcher's patience ends.
fn short_faults(case: &Case, random: &mut ChaCha8Rng) -> Vec<PlannedFault> {
    let kinds = [Fault::Stall, Fault::Suspend, Fault::Delay, Fault::Partition];
    let count = [0, 0, 1, 2, 3][random.random_range(0..5)];
    let short = |_| {
        let fault = kinds[random.random_range(0..kinds.len())];
        // The launcher is stopped too while the whole run is, so that may take any time.
        let lasts = if fault == Fault::Suspend { PEER_TIMEOUT * random.random_range(1..1000) } else { PEER_TIMEOUT / 2 };
        PlannedFault { fault, lasts, ..place(case, random) }
    };
    (0..count).map(short).collect()
}

fn step_of(path: &Path) -> usize {
    path.file_name().unwrap().to_str().unwrap().parse().unwrap()
}

/// Flips a bit of a random file of a checkpoint.
fn damage(checkpoint: &Path, random: &mut ChaCha8Rng) {
    let files = ["state.json", "model.safetensors", "optimizer.safetensors"];
    let path = checkpoint.join(files[random.random_range(0..files.len())]);
    let mut bytes = std::fs::read(&path).unwrap();
    let at = random.random_range(0..bytes.len());
    bytes[at] ^= 1 << random.random_range(0..8);
    std::fs::write(&path, bytes).unwrap();
}

/// Runs one seed: a training with a fault, and the training that resumes from it.
fn simulate(cases: &[Case], seed: u64, counts: &mut Counts) {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let case = &cases[random.random_range(0..cases.len())];
    let deadly =
        [Fault::Crash, Fault::Stall, Fault::Break, Fault::Swallow, Fault::Partition, Fault::Drop, Fault::Duplicate, Fault::Flip];
    let kind = random.random_range(0..12);
    let mut planned = short_faults(case, &mut random);
    if let Some(&fault) = deadly.get(kind) {
        let lasts = if random.random_ratio(1, 2) { NEVER } else { PEER_TIMEOUT * 2 };
        planned.push(PlannedFault { fault, lasts, ..place(case, &mut random) });
    }
    let disk_fault = match kind {
        8 => Some(DiskFault::Full),
        9 | 10 => Some(DiskFault::PowerCut),
        _ => None,
    };
    let disk_fault = disk_fault.map(|fault| (random.random_range(1..case.operations.1 + 1), fault));
    let folder = tempfile::tempdir().unwrap();
    let (run, first_network) = (folder.path(), network(&case.job, seed, planned));
    let disk = Arc::new(SimulatedDisk::new(seed, disk_fault));
    let first = attempt(&case.job, run, &first_network, &disk);
    let (hit, disk_failure) = (first_network.hit(), disk.failed());
    check_truth(seed, &first, &hit, disk_failure);
    for (step, loss) in &first.losses {
        assert_eq!(Some(loss), case.losses.get(step), "seed {seed}: a wrong loss at step {step}");
    }
    counts.add(&first_network);
    if let Some(failure) = disk_failure {
        *counts.faults.entry(format!("{failure:?}")).or_default() += 1;
    }
    if disk_failure == Some(DiskFault::PowerCut) {
        disk.lose_unsynced();
    }
    let newest = last_whole(run).ok();
    let promised = first.saved.as_deref().map(step_of);
    assert!(newest.as_ref().map(|found| found.state.step) >= promised, "seed {seed}: checkpoint {promised:?} is lost");
    if let Some(newest) = newest.filter(|_| random.random_ratio(1, 4)) {
        damage(&newest.path, &mut random);
        *counts.faults.entry("Damage".into()).or_default() += 1;
    }
    let start = match last_whole(run) {
        Ok(found) => Start::Checkpoint { path: found.path, step: found.state.step },
        Err(CheckpointError::None { .. } | CheckpointError::Damaged { .. }) => Start::Fresh,
        Err(error) => panic!("seed {seed}: {error}"),
    };
    if first.errors.is_empty() {
        assert_eq!(first.losses, case.losses, "seed {seed}");
        counts.right += 1;
    }
    let made = start.step();
    if made >= STEPS {
        return;
    }
    *(if made > 0 { &mut counts.resumed } else { &mut counts.fresh }) += 1;
    let job = TrainingJob { start, ..case.job.clone() };
    let second_network = network(&case.job, seed, short_faults(case, &mut random));
    let second = attempt(&job, run, &second_network, &Arc::new(SimulatedDisk::new(seed, None)));
    counts.add(&second_network);
    assert_eq!(second.finding, None, "seed {seed}: faults that pass end the run");
    assert!(second.errors.is_empty(), "seed {seed}: it does not go on: {:?}", second.errors);
    let rest: BTreeMap<usize, u64> = case.losses.range(made..).map(|(step, loss)| (*step, *loss)).collect();
    assert_eq!(second.losses, rest, "seed {seed}: other losses after step {made}");
}

/// Checks that every error has a cause, and that the cause is named.
fn check_truth(seed: u64, run: &Attempt, hit: &BTreeSet<usize>, disk: Option<DiskFault>) {
    let finding = run.finding;
    let mut is_named = match finding {
        Some(Finding::Silent(rank)) => hit.contains(&rank),
        Some(Finding::Lost(from, to)) => hit.contains(&from) && hit.contains(&to),
        None => false,
    };
    assert!(finding.is_none() || is_named, "seed {seed} blames the wrong ranks: {finding:?} for {hit:?}");
    for error in &run.errors {
        let is_true = match error {
            ExecutorError::Transport(
                TransportError::PeerLost { rank, .. } | TransportError::Tampered { peer: Peer::Rank(rank) },
            ) => {
                is_named |= hit.contains(rank);
                hit.contains(rank)
            }
            ExecutorError::Transport(TransportError::Aborted) | ExecutorError::OtherStream => !hit.is_empty() || disk.is_some(),
            ExecutorError::Checkpoint(_) | ExecutorError::RankFailed { .. } => {
                is_named |= disk.is_some();
                disk.is_some()
            }
            _ => false,
        };
        assert!(is_true, "seed {seed}: `{error}` is not true: {hit:?}, {disk:?}");
    }
    // The launcher learns of a crash from the process's end.
    let is_crash = run.errors.iter().all(ExecutorError::is_consequence);
    assert!(run.errors.is_empty() || is_named || is_crash && !hit.is_empty(), "seed {seed}: {:?}", run.errors);
}

#[test]
fn every_simulated_training_ends_right_or_goes_on_to_the_right_end() {
    let number = |name: &str, default: u64| std::env::var(name).map_or(default, |text| text.parse().unwrap());
    let (first, seeds) = (number("FORETELL_FAULT_SEED", 0), number("FORETELL_FAULT_SEEDS", 60));
    let (sender, progress) = mpsc::channel();
    let worker = std::thread::spawn(move || {
        let cases = cases();
        let mut counts = Counts::default();
        for seed in first..first + seeds {
            simulate(&cases, seed, &mut counts);
            sender.send(seed).unwrap();
        }
        counts
    });
    let mut next = first;
    while next < first + seeds {
        match progress.recv_timeout(MOST_TIME) {
            Ok(seed) => next = seed + 1,
            Err(mpsc::RecvTimeoutError::Timeout) => panic!("seed {next} hangs"),
            Err(mpsc::RecvTimeoutError::Disconnected) => break,
        }
    }
    let counts = worker.join().unwrap();
    println!("{seeds} trainings from seed {first}: {counts:?}");
    assert!(seeds < 50 || (counts.right > 0 && counts.resumed > 0 && counts.faults.len() >= 11));
}
