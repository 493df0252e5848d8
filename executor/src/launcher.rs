//! The launcher: starts the ranks' processes, gives them their job, receives their reports, and
//! leaves no process behind.
//!
//! It starts one process per rank. Where an external launcher such as `srun` has started a process
//! per rank already, it starts only the first rank and waits for the others to join. All it reads
//! of a job is the collective algorithm, which NCCL must be told.

mod departure;
mod failure;
pub(crate) mod links;
mod options;
mod slots;

pub use options::LaunchOptions;
pub use slots::RankSlot;

use crate::environment::{CORE_VARIABLE, SPIN_VARIABLE, START_TIME};
use crate::error::ExecutorError;
use crate::interpreter::STREAM_COUNT;
use crate::job::{Job, LauncherMessage, Report};
use crate::rank_command::RankCommand;
use crate::regular;
use crate::rendezvous::World;
use crate::signals::StopSignals;
use crate::transport::patience::{MOST_GAP, Patience};
use crate::transport::{ControlServer, Event, KeyFile, RunKey, Segment, SegmentShape, TransportError, TransportKind};
use departure::Departures;
pub(crate) use departure::News;
use failure::describe_exit;
use foretell_program::CollectiveAlgorithm;
use foretell_units::diagnostic::Mistake;
use links::{Link, LinkWatch};
use serde::Serialize;
use slots::{Slots, listen_at, start_in};
use std::fs::{File, OpenOptions};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// Longest wait for a report before the launcher looks whether a child has ended. Long, because the
/// launcher shares the ranks' cores.
const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// [`POLL_INTERVAL`] while ranks join.
const JOIN_POLL_INTERVAL: Duration = Duration::from_millis(250);

/// The ranks of a run, as the launcher sees them. Dropping it kills those that it started.
pub(crate) struct Ranks {
    server: ControlServer,
    segments: Vec<Segment>,
    /// The processes started here, indexed by rank. If an external launcher started the run, only
    /// rank 0's.
    children: Vec<Child>,
    /// How each of the `children` ended; `None` while it runs.
    exits: Vec<Option<ExitStatus>>,
    /// The names of the ranks' nodes, indexed by rank. Empty while an external launcher's ranks
    /// join.
    hosts: Vec<String>,
    /// The folder of the logs of the `children`, if they have logs.
    logs: Option<PathBuf>,
    /// How long ranks may take to join.
    join_timeout: Duration,
    /// The signals that stop the run; `None` once it is being stopped.
    signals: Option<StopSignals>,
    /// The signal that stopped the run.
    stopped_by: Option<i32>,
    /// How long a rank may be silent.
    peer_timeout: Duration,
    /// The ranks' reports of bytes that do not arrive.
    links: LinkWatch,
    /// Which ranks may be lost without ending the run, and which were.
    departures: Departures,
    /// The file from which externally started ranks read the run's secret. Dropping it deletes it.
    _key_file: Option<KeyFile>,
}

impl Ranks {
    /// Starts `world_size` ranks, waits until all have joined, and gives them their job.
    ///
    /// # Errors
    /// [`ExecutorError`] if a process cannot be started, a rank ends before it has joined or does
    /// not join in time, or an external launcher started another number of processes.
    pub(crate) fn start(world_size: usize, job: &Job, options: &LaunchOptions) -> Result<Self, ExecutorError> {
        World::check_transport(options.world.as_ref(), options.transport, options.backend)?;
        let mut ranks = match &options.world {
            Some(world) => Self::start_first(world, world_size, options)?,
            None => Self::start_all(world_size, job, options)?,
        };
        ranks.signals = options.signals.clone();
        ranks.wait_for_all()?;
        ranks.broadcast(job)?;
        Ok(ranks)
    }

    /// Starts all ranks on this machine, in the options' slots.
    fn start_all(world_size: usize, job: &Job, options: &LaunchOptions) -> Result<Self, ExecutorError> {
        let key = RunKey::generate()?;
        let slots = Slots::new(&options.slots);
        let nodes = slots.ranks_by_node(world_size);
        // Ranks reach the launcher through their own node's loopback interface, so that control
        // messages load none of a lab's links.
        let listeners = nodes.iter().map(|ranks| listen_at(slots.of(ranks[0]))).collect::<Result<Vec<_>, _>>()?;
        let (server, addresses) = ControlServer::listen(listeners, &key, world_size)?;
        let segments = match options.transport {
            TransportKind::SharedMemory => segments(&nodes)?,
            TransportKind::Tcp | TransportKind::Mpi => Vec::new(),
        };
        let mut ranks = Self {
            server,
            segments,
            children: Vec::new(),
            exits: Vec::new(),
            hosts: (0..world_size).map(|rank| slots.of(rank).host.clone()).collect(),
            logs: options.logs.clone(),
            join_timeout: START_TIME,
            signals: None,
            stopped_by: None,
            peer_timeout: options.peer_timeout,
            links: LinkWatch::default(),
            departures: Departures::default(),
            _key_file: None,
        };
        let uses_nccl = options.backend.is_direct(world_size);
        for rank in 0..world_size {
            let slot = slots.of(rank);
            let node = nodes.iter().position(|ranks| ranks.contains(&rank)).expect("invariant: every rank is on a node");
            let segment = ranks.segments.iter().find(|segment| segment.ranks().contains(&rank));
            let transport = match segment {
                Some(_) if nodes.len() == 1 => "shared_memory",
                Some(_) => "mixed",
                None => "tcp",
            };
            let gpu = options.backend.gpu_of(rank);
            let rank_command = RankCommand {
                program: &options.program,
                rank,
                world_size,
                launcher: addresses[node],
                address: slot.address,
                transport,
                gpu,
                uses_nccl,
            };
            let mut command = rank_command.build();
            // A rank with a GPU has a thread that launches kernels and one that reads samples; each
            // needs a core.
            if let Some(core) = slot.core.filter(|_| gpu.is_none()) {
                command.env(CORE_VARIABLE, core.to_string());
            }
            if uses_nccl && is_ring(job) {
                // The only one of NCCL's algorithms that has every kind of collective.
                command.env("NCCL_ALGO", "Ring");
            }
            // Between hosts of a lab a message takes long compared with a wake-up. Spinning would
            // take time from the rank's own kernels, from ranks that share its core, or from its
            // quota.
            if slots.is_lab {
                command.env(SPIN_VARIABLE, "0");
            }
            key.pass_to(&mut command);
            if let Some(segment) = segment {
                segment.pass_to(&mut command);
            }
            start_in(slot, &mut command)?;
            ranks.spawn(command, rank)?;
        }
        Ok(ranks)
    }

    /// Starts rank 0 of a run whose other ranks an external launcher started.
    fn start_first(world: &World, world_size: usize, options: &LaunchOptions) -> Result<Self, ExecutorError> {
        if world.size != world_size {
            let what = format!("a plan for {world_size} ranks, where {} started {},", world.starter, world.size);
            let hint = format!("have it start {world_size}, or plan for {}", world.size);
            return Err(ExecutorError::Unsupported { what, hint });
        }
        let (listening, first) = world.listening()?;
        let listener = TcpListener::bind(listening).map_err(|error| {
            ExecutorError::system(format!("listen for the ranks at {listening} (FORETELL_PORT chooses another port)"), error)
        })?;
        let (key, key_file) = world.create_key()?;
        let (server, _) = ControlServer::listen(vec![listener], &key, world_size)?;
        let mut ranks = Self {
            server,
            segments: Vec::new(),
            children: Vec::new(),
            exits: Vec::new(),
            hosts: Vec::new(),
            logs: options.logs.clone(),
            join_timeout: world.join_timeout,
            signals: None,
            stopped_by: None,
            peer_timeout: options.peer_timeout,
            links: LinkWatch::default(),
            departures: Departures::default(),
            _key_file: key_file,
        };
        let mut command = world.rank_command(&options.program, first, options.backend, options.transport)?;
        key.pass_to(&mut command);
        ranks.spawn(command, world.rank)?;
        Ok(ranks)
    }

    /// Starts a rank's process, its standard error going to its log.
    fn spawn(&mut self, mut command: Command, rank: usize) -> Result<(), ExecutorError> {
        command.stdout(Stdio::null());
        if let Some(folder) = &self.logs {
            command.stderr(create_log(folder, rank)?);
        }
        let child = command.spawn().map_err(|error| ExecutorError::system(format!("start rank {rank}"), error))?;
        self.children.push(child);
        self.exits.push(None);
        Ok(())
    }

    /// The ids of the processes started here, indexed by rank.
    pub(crate) fn process_ids(&self) -> Vec<u32> {
        self.children.iter().map(Child::id).collect()
    }

    /// Waits for all ranks to join. If a child ends first, that is the error.
    fn wait_for_all(&mut self) -> Result<(), ExecutorError> {
        let mut patience = Patience::new(self.join_timeout, MOST_GAP, Instant::now());
        loop {
            match self.server.wait_for_ranks(JOIN_POLL_INTERVAL) {
                Ok(table) => {
                    if self.hosts.is_empty() {
                        self.hosts = table.ranks.into_iter().map(|announcement| announcement.machine).collect();
                    }
                    return Ok(());
                }
                Err(TransportError::MissingRanks { ranks, waited }) => {
                    if let Some(signal) = self.signals.as_ref().and_then(StopSignals::received) {
                        return Err(ExecutorError::Stopped { signal, steps: 0, checkpoint: None });
                    }
                    self.poll_children();
                    // A rank that had not joined is the cause; others may have ended because of it.
                    let ended = self.exits.iter().enumerate().filter_map(|(rank, exit)| Some((rank, (*exit)?)));
                    if let Some((rank, status)) = ended.min_by_key(|(rank, _)| !ranks.contains(rank)) {
                        return Err(self.died(rank, format!("{} before it had joined", describe_exit(status))));
                    }
                    self.require_signs_of_life()?;
                    if patience.left(Instant::now()).is_zero() {
                        return Err(TransportError::MissingRanks { ranks, waited: waited.max(patience.waited()) }.into());
                    }
                }
                Err(error) => return Err(self.explain(error)),
            }
        }
    }

    /// Sends `message` to all ranks that have not left. If one is gone, the error says why.
    fn broadcast<T: Serialize>(&mut self, message: &T) -> Result<(), ExecutorError> {
        let sent = (0..self.hosts.len()).map(|rank| match self.server.send(rank, message) {
            // The rank has left, or `next` will detect its loss.
            Err(TransportError::PeerLost { .. }) if self.departures.may_leave(rank) => Ok(()),
            result => result,
        });
        let sent = sent.fold(Ok(()), Result::and);
        sent.map_err(|error| self.explain(error))
    }

    /// Replaces the loss of a rank's connection by the reason for which the rank ended.
    fn explain(&mut self, error: TransportError) -> ExecutorError {
        match error {
            TransportError::PeerLost { rank, .. } => self.diagnose(rank, None, false),
            error => error.into(),
        }
    }

    /// Returns the next report of any rank, or the news that some have left.
    ///
    /// # Errors
    /// The cause of the run's failure, once a rank fails, or a rank is lost that may not leave. The
    /// other ranks have then been told to stop.
    pub(crate) fn next(&mut self) -> Result<News, ExecutorError> {
        loop {
            if let Some(signal) = self.signals.as_ref().and_then(StopSignals::received) {
                self.hold(signal)?;
            }
            if let Some(news) = self.leave_silent() {
                return Ok(news);
            }
            self.require_signs_of_life()?;
            match self.server.next_event(POLL_INTERVAL) {
                Some((rank, _)) if self.departures.has_left(rank) => {}
                Some((rank, Event::Message(message))) => match message.parse::<Report>()? {
                    Report::Failed { message, hint, consequence } => {
                        if consequence && let Some(news) = self.leave_ended(None) {
                            return Ok(news);
                        }
                        return Err(self.diagnose(rank, Some(Mistake { message, hint }), consequence));
                    }
                    Report::AskedToStop { signal } => self.hold(signal)?,
                    Report::Starved(starved) => self.require_links(rank, &starved)?,
                    Report::Sent { to, stream, bytes } => {
                        self.links.note_sent(&Link { from: rank, to, stream }, bytes, Instant::now())
                    }
                    report => return Ok(News::Report(rank, report)),
                },
                Some((rank, Event::Lost(TransportError::PeerLost { .. }))) => {
                    return self.leave_ended(Some(rank)).map_or_else(|| Err(self.diagnose(rank, None, false)), Ok);
                }
                Some((rank, Event::Lost(error))) => return Err(self.diagnose(rank, Some(Mistake::of(&error)), false)),
                None => {
                    self.poll_children();
                    if let Some((rank, _)) = self.first_exit(|status| !status.success()) {
                        return self.leave_ended(Some(rank)).map_or_else(|| Err(self.diagnose(rank, None, false)), Ok);
                    }
                }
            }
        }
    }

    /// Tells all ranks, because of a signal, to start no more steps. They report how many they have
    /// started.
    fn hold(&mut self, signal: i32) -> Result<(), ExecutorError> {
        if self.stopped_by.is_none() {
            self.stopped_by = Some(signal);
            self.signals = None;
            self.broadcast(&LauncherMessage::Hold)?;
        }
        Ok(())
    }

    /// Tells all ranks, none of which starts further steps, to end training after `steps` steps.
    pub(crate) fn stop_after(&mut self, steps: usize) -> Result<(), ExecutorError> {
        self.broadcast(&LauncherMessage::StopAfter { steps })
    }

    /// The signal that stopped the run, if one did.
    pub(crate) fn stopped_by(&self) -> Option<i32> {
        self.stopped_by
    }

    /// Tells the ranks that their work is done, and waits until all have ended.
    ///
    /// # Errors
    /// [`ExecutorError::RankDied`] if a rank ends in failure or does not end.
    pub(crate) fn finish(mut self) -> Result<(), ExecutorError> {
        self.broadcast(&LauncherMessage::Leave)?;
        let mut patience = Patience::new(START_TIME, MOST_GAP, Instant::now());
        while self.exits.iter().any(Option::is_none) {
            self.poll_children();
            if let Some((rank, _)) = self.first_exit(|status| !status.success()) {
                return Err(self.diagnose(rank, None, false));
            }
            // The last may have ended since the loop looked.
            if patience.left(Instant::now()).is_zero()
                && let Some(rank) = self.exits.iter().position(Option::is_none)
            {
                return Err(self.died(rank, "did not end when its work was done".into()));
            }
            self.require_signs_of_life()?;
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok(())
    }

    /// Records which children have ended.
    fn poll_children(&mut self) {
        for (child, exit) in self.children.iter_mut().zip(&mut self.exits) {
            if exit.is_none() {
                *exit = child.try_wait().ok().flatten();
            }
        }
    }

    /// The first rank that has not left and whose exit status `is_wanted` accepts, with that
    /// status.
    fn first_exit(&self, is_wanted: impl Fn(&ExitStatus) -> bool) -> Option<(usize, ExitStatus)> {
        let ended = self.exits.iter().enumerate().filter_map(|(rank, exit)| Some((rank, (*exit)?)));
        ended.into_iter().find(|(rank, status)| !self.departures.has_left(*rank) && is_wanted(status))
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        self.poll_children();
        for (child, exit) in self.children.iter_mut().zip(&self.exits) {
            if exit.is_none() {
                // The child may have ended since the poll. Then there is nothing to kill.
                let _ = child.kill();
                let _ = child.wait();
            }
        }
    }
}

/// Creates one segment for the ranks of each node. A rank that is alone on its node needs none,
/// unless it is the whole run.
fn segments(nodes: &[Vec<usize>]) -> Result<Vec<Segment>, ExecutorError> {
    let shares_memory = |ranks: &&Vec<usize>| nodes.len() == 1 || ranks.len() > 1;
    let create = |ranks: &Vec<usize>| Ok(Segment::create(&SegmentShape::new(ranks.clone(), STREAM_COUNT))?);
    nodes.iter().filter(shares_memory).map(create).collect()
}

/// Returns whether the job trains with ring collectives.
fn is_ring(job: &Job) -> bool {
    matches!(job, Job::Train(job) if job.plan.layout.collective == CollectiveAlgorithm::Ring)
}

/// The log of a rank.
fn log_path(folder: &Path, rank: usize) -> PathBuf {
    folder.join(format!("{rank}.log"))
}

fn create_log(folder: &Path, rank: usize) -> Result<File, ExecutorError> {
    let path = log_path(folder, rank);
    std::fs::create_dir_all(folder)
        .and_then(|()| regular::open_to_write(&path, OpenOptions::new().write(true).create(true).truncate(true)))
        .map_err(|error| ExecutorError::system(format!("write `{}`", path.display()), error))
}
