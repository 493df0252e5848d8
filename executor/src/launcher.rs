//! The launcher: starts one process a rank, hands out the job, listens to all of them, and leaves none behind.

mod places;

pub use places::Place;
pub(crate) use places::Places;

use crate::backend::Library;
use crate::environment::{
    ADDRESS_VARIABLE, CONNECTIONS, CORE_VARIABLE, GPU_VARIABLE, LAUNCHER_VARIABLE, NCCL_VARIABLE, RANK_VARIABLE, SPIN_VARIABLE,
    START_TIME, TRANSPORT_VARIABLE, WORLD_VARIABLE,
};
use crate::error::ExecutorError;
use crate::interpreter::STREAM_COUNT;
use crate::job::{Job, Order, Report};
use crate::rendezvous::World;
use crate::transport::{ControlServer, Event, KeyFile, RunKey, Segment, SegmentShape, TransportError};
use foretell_program::CollectiveAlgorithm;
use places::{listen_at, put_at};
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::net::TcpListener;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// How ranks of one machine reach each other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TransportKind {
    /// Memory that they share.
    #[default]
    SharedMemory,
    /// Connections over the loopback interface, as between machines.
    Tcp,
}

/// What runs the kernels of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Backend {
    /// A core of the processor for each rank.
    #[default]
    Cpu,
    /// NVIDIA GPUs: one for each rank, in turn where there are fewer.
    Cuda {
        /// How many of this machine's are used.
        gpus: usize,
    },
}

impl Backend {
    /// As reports and the command line call it.
    pub fn name(self) -> &'static str {
        match self {
            Backend::Cpu => "cpu",
            Backend::Cuda { .. } => "cuda",
        }
    }

    /// Whether the GPUs of so many ranks reach each other without the host: each rank has one of its own, and NCCL is there.
    pub fn is_direct(self, world_size: usize) -> bool {
        matches!(self, Backend::Cuda { gpus } if world_size > 1 && world_size <= gpus) && Library::Nccl.is_present()
    }

    /// The GPU of a rank.
    pub(crate) fn gpu_of(self, rank: usize) -> Option<usize> {
        match self {
            Backend::Cpu => None,
            Backend::Cuda { gpus } => Some(rank % gpus.max(1)),
        }
    }
}

/// How to start ranks.
#[derive(Clone, Debug)]
pub struct LaunchOptions {
    /// The program to start, which calls [`crate::run_rank`] when its first argument is `rank`.
    pub program: PathBuf,
    /// How ranks reach each other.
    pub transport: TransportKind,
    /// The folder for each rank's log; without one their words go to standard error.
    pub logs: Option<PathBuf>,
    /// Where ranks are put, in turn; none to put them on this machine's cores.
    pub places: Vec<Place>,
    /// What runs their kernels.
    pub backend: Backend,
    /// The processes that somebody else started together, of which this is the first; none where all ranks are to be started here.
    pub world: Option<World>,
}

/// How long a run waits for the cause of a failure, and for ranks to end after it.
const GRACE: Duration = Duration::from_millis(700);
/// How often children are looked after when nothing happens; seldom, because the launcher shares their cores.
const GLANCE: Duration = Duration::from_millis(100);

/// The ranks of a run. Dropping it ends them.
pub(crate) struct Ranks {
    server: ControlServer,
    segments: Vec<Segment>,
    /// Those that were started here, from the first rank on.
    children: Vec<Child>,
    ended: Vec<Option<ExitStatus>>,
    /// How long ranks may take to join.
    patience: Duration,
    /// Where the others find the secret, if they were started by somebody else.
    _key_file: Option<KeyFile>,
}

impl Ranks {
    /// Starts `world_size` ranks on this machine, gathers them, and gives them their job.
    pub(crate) fn start(world_size: usize, job: &Job, options: &LaunchOptions) -> Result<Self, ExecutorError> {
        if let Some(world) = &options.world {
            return Self::start_first(world, world_size, job, options);
        }
        let key = RunKey::generate()?;
        let places = Places::new(options);
        let nodes = places.by_node(world_size);
        // Ranks reach the launcher through the loopback interface of their own host, so that what they say loads no link.
        let listeners = nodes.iter().map(|ranks| listen_at(places.of(ranks[0]))).collect::<Result<Vec<_>, _>>()?;
        let (server, addresses) = ControlServer::listen(listeners, &key, world_size)?;
        let mut segments = Vec::new();
        let shares_memory = |ranks: &Vec<usize>| nodes.len() == 1 || ranks.len() > 1;
        if options.transport == TransportKind::SharedMemory {
            for ranks in nodes.iter().filter(|ranks| shares_memory(ranks)) {
                segments.push(Segment::create(&SegmentShape::new(ranks.clone(), STREAM_COUNT))?);
            }
        }
        let mut ranks = Self { server, segments, children: Vec::new(), ended: Vec::new(), patience: START_TIME, _key_file: None };
        let is_direct = options.backend.is_direct(world_size);
        // Of NCCL's algorithms this one makes collectives of every kind.
        let goes_round = matches!(job, Job::Train(job) if job.plan.layout.collective == CollectiveAlgorithm::Ring);
        let algorithm = goes_round.then_some("Ring");
        for rank in 0..world_size {
            let place = places.of(rank);
            let node = nodes.iter().position(|ranks| ranks.contains(&rank)).unwrap_or_default();
            let segment = ranks.segments.iter().find(|segment| segment.ranks().contains(&rank));
            let transport = match segment {
                Some(_) if nodes.len() == 1 => "shared_memory",
                Some(_) => "mixed",
                None => "tcp",
            };
            let mut command = Command::new(&options.program);
            command
                .arg("rank")
                .env(RANK_VARIABLE, rank.to_string())
                .env(WORLD_VARIABLE, world_size.to_string())
                .env(LAUNCHER_VARIABLE, addresses[node].to_string())
                .env(ADDRESS_VARIABLE, place.address.to_string())
                .env(TRANSPORT_VARIABLE, transport)
                .stdin(Stdio::null())
                .stdout(Stdio::null());
            // A rank with a GPU has a thread that launches and one that reads samples: they need a core each.
            let gpu = options.backend.gpu_of(rank);
            if let Some(core) = place.core.filter(|_| gpu.is_none()) {
                command.env(CORE_VARIABLE, core.to_string());
            }
            match gpu {
                Some(gpu) => command.env(GPU_VARIABLE, gpu.to_string()),
                None => command.env_remove(GPU_VARIABLE),
            };
            match is_direct {
                true => command.env(NCCL_VARIABLE, "1").envs(algorithm.map(|name| ("NCCL_ALGO", name))),
                false => command.env_remove(NCCL_VARIABLE),
            };
            if std::env::var_os(CONNECTIONS.0).is_none() {
                command.env(CONNECTIONS.0, CONNECTIONS.1);
            }
            // Messages between hosts take long beside a wake-up, and who waits by trying again and again takes time from its own
            // kernels, from those that it shares a core with, or from its quota.
            if places.is_lab {
                command.env(SPIN_VARIABLE, "0");
            }
            if let Some(folder) = &options.logs {
                command.stderr(log_file(folder, rank)?);
            }
            key.pass_to(&mut command);
            if let Some(segment) = segment {
                segment.pass_to(&mut command);
            }
            put_at(place, &mut command)?;
            let child = command.spawn().map_err(|error| ExecutorError::system(format!("start rank {rank}"), error))?;
            ranks.children.push(child);
            ranks.ended.push(None);
        }
        ranks.gather()?;
        ranks.tell(job)?;
        Ok(ranks)
    }

    /// Starts the first rank, waits for those that somebody else starts, and gives them their job.
    fn start_first(world: &World, world_size: usize, job: &Job, options: &LaunchOptions) -> Result<Self, ExecutorError> {
        if world.size != world_size {
            let what = format!("a plan for {world_size} ranks, of which {} started {},", world.starter, world.size);
            let hint = format!("have it start {world_size}, or plan for {}", world.size);
            return Err(ExecutorError::Unsupported { what, hint });
        }
        let (listening, first) = world.listening()?;
        let listener = TcpListener::bind(listening).map_err(|error| {
            ExecutorError::system(format!("listen for the ranks at {listening} (FORETELL_PORT chooses another port)"), error)
        })?;
        let (key, key_file) = world.make_key()?;
        let (server, _) = ControlServer::listen(vec![listener], &key, world_size)?;
        let mut ranks = Self {
            server,
            segments: Vec::new(),
            children: Vec::new(),
            ended: Vec::new(),
            patience: world.patience,
            _key_file: key_file,
        };
        let mut command = Command::new(&options.program);
        world.tell(&mut command, first, options.backend);
        key.pass_to(&mut command);
        command.stdout(Stdio::null());
        if let Some(folder) = &options.logs {
            command.stderr(log_file(folder, world.rank)?);
        }
        let child = command.spawn().map_err(|error| ExecutorError::system(format!("start rank {}", world.rank), error))?;
        ranks.children.push(child);
        ranks.ended.push(None);
        ranks.gather()?;
        ranks.tell(job)?;
        Ok(ranks)
    }

    /// The process identifiers, by rank.
    pub(crate) fn process_ids(&self) -> Vec<u32> {
        self.children.iter().map(Child::id).collect()
    }

    /// Waits for all ranks to join; one that ends before is the cause if they do not.
    fn gather(&mut self) -> Result<(), ExecutorError> {
        let started = Instant::now();
        loop {
            match self.server.gather(Duration::from_millis(250)) {
                Ok(_) => return Ok(()),
                Err(TransportError::MissingRanks { ranks, waited }) => {
                    self.glance();
                    if let Some((rank, status)) = self.first_ended(|_| true) {
                        return Err(ExecutorError::RankDied { rank, cause: format!("{} before it had joined", said(status)) });
                    }
                    if started.elapsed() > self.patience {
                        return Err(TransportError::MissingRanks { ranks, waited: waited.max(started.elapsed()) }.into());
                    }
                }
                Err(error) => return Err(self.why(error)),
            }
        }
    }

    /// Says something to all ranks, which are all there; of one that is not any more the cause is found.
    fn tell<T: Serialize>(&mut self, message: &T) -> Result<(), ExecutorError> {
        self.server.broadcast(message).map_err(|error| self.why(error))
    }

    /// What is behind an error of the control connection: what became of a rank says more than that it cannot be reached.
    fn why(&mut self, error: TransportError) -> ExecutorError {
        match error {
            TransportError::PeerLost { rank } => self.fail(rank, None, false),
            error => error.into(),
        }
    }

    /// The next report of any rank. An error ends the run: its cause is found, the others are told, nobody is left.
    pub(crate) fn next(&mut self) -> Result<(usize, Report), ExecutorError> {
        loop {
            match self.server.next_event(GLANCE) {
                Some((rank, Event::Message(message))) => match message.parse::<Report>()? {
                    Report::Failed { message, consequence } => return Err(self.fail(rank, Some(message), consequence)),
                    report => return Ok((rank, report)),
                },
                Some((rank, Event::Lost(_))) => return Err(self.fail(rank, None, false)),
                None => {
                    self.glance();
                    if let Some((rank, _)) = self.first_ended(|status| !status.success()) {
                        return Err(self.fail(rank, None, false));
                    }
                }
            }
        }
    }

    /// Waits for all ranks to end by themselves.
    pub(crate) fn finish(mut self) -> Result<(), ExecutorError> {
        self.tell(&Order::Leave)?;
        let started = Instant::now();
        while self.ended.iter().any(Option::is_none) {
            self.glance();
            if let Some((rank, _)) = self.first_ended(|status| !status.success()) {
                return Err(self.fail(rank, None, false));
            }
            if started.elapsed() > START_TIME {
                let rank = self.ended.iter().position(Option::is_none).unwrap_or(0);
                return Err(ExecutorError::RankDied { rank, cause: "did not end when its work was done".into() });
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok(())
    }

    /// Tells the others, gives them a moment, and finds out who failed first: a rank that was killed, then one that failed for a reason of
    /// its own, then the one that was noticed.
    fn fail(&mut self, noticed: usize, message: Option<String>, consequence: bool) -> ExecutorError {
        let mut stories: Vec<(usize, String, bool)> = message.map(|text| (noticed, text, consequence)).into_iter().collect();
        let mut lost = vec![noticed];
        let started = Instant::now();
        let mut told = false;
        while started.elapsed() < GRACE && self.ended.iter().any(Option::is_none) {
            if !told && started.elapsed() > GRACE / 4 {
                told = true;
                self.abort(None);
            }
            match self.server.next_event(GLANCE) {
                Some((rank, Event::Message(message))) => {
                    if let Ok(Report::Failed { message, consequence }) = message.parse::<Report>() {
                        stories.push((rank, message, consequence));
                    }
                }
                Some((rank, Event::Lost(_))) => lost.push(rank),
                None => {}
            }
            self.glance();
        }
        let killed = self.first_ended(|status| status.signal().is_some()).map(|(rank, status)| (rank, said(status)));
        let own =
            || stories.iter().find(|(.., consequence)| !consequence).map(|(rank, text, _)| (*rank, format!("failed: {text}")));
        let ended = || self.first_ended(|status| !status.success()).map(|(rank, status)| (rank, said(status)));
        let (rank, cause) = killed.or_else(own).or_else(ended).unwrap_or_else(|| {
            let rank = lost.first().copied().unwrap_or(noticed);
            (rank, "does not answer any more".into())
        });
        ExecutorError::RankDied { rank, cause }
    }

    /// Wakes whoever waits for a rank that will not answer.
    fn abort(&self, lost: Option<usize>) {
        for segment in &self.segments {
            segment.abort(lost);
        }
        // Those that are gone cannot be told.
        let _ = self.server.broadcast(&Order::Abort { lost });
    }

    /// Looks which children have ended.
    fn glance(&mut self) {
        for (child, ended) in self.children.iter_mut().zip(&mut self.ended) {
            if ended.is_none() {
                *ended = child.try_wait().ok().flatten();
            }
        }
    }

    fn first_ended(&self, which: impl Fn(&ExitStatus) -> bool) -> Option<(usize, ExitStatus)> {
        self.ended
            .iter()
            .enumerate()
            .find_map(|(rank, status)| status.filter(|status| which(status)).map(|status| (rank, status)))
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        self.glance();
        for (child, ended) in self.children.iter_mut().zip(&self.ended) {
            if ended.is_none() {
                // One that ended in this very moment cannot be killed, and need not be.
                let _ = child.kill();
                let _ = child.wait();
            }
        }
    }
}

fn log_file(folder: &Path, rank: usize) -> Result<File, ExecutorError> {
    let path = folder.join(format!("{rank}.log"));
    std::fs::create_dir_all(folder)
        .and_then(|()| File::create(&path))
        .map_err(|error| ExecutorError::system(format!("write `{}`", path.display()), error))
}

/// How a process ended, after "rank N".
fn said(status: ExitStatus) -> String {
    match (status.signal(), status.code()) {
        (Some(signal), _) => format!("was killed by signal {signal}{}", signal_name(signal)),
        (None, Some(code)) => format!("ended with status {code}"),
        (None, None) => "ended".into(),
    }
}

fn signal_name(signal: i32) -> &'static str {
    match signal {
        libc::SIGKILL => " (SIGKILL; the system kills so when memory runs out)",
        libc::SIGTERM => " (SIGTERM)",
        libc::SIGINT => " (SIGINT)",
        libc::SIGSEGV => " (SIGSEGV)",
        libc::SIGBUS => " (SIGBUS)",
        libc::SIGABRT => " (SIGABRT)",
        _ => "",
    }
}
