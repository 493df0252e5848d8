//! A rank's process: joins the run that its environment names, does its job, reports the result.

use crate::backend::cuda::{Driver, GpuTransport, NvidiaDriver};
use crate::calibration;
use crate::disk::SystemDisk;
use crate::environment::{
    ADDRESS_VARIABLE, CORE_VARIABLE, GPU_VARIABLE, LAUNCHER_VARIABLE, NCCL_VARIABLE, RANK_VARIABLE, SPIN_VARIABLE, START_TIME,
    START_VARIABLE, STARTER_VARIABLE, TRANSPORT_VARIABLE, WORLD_VARIABLE,
};
use crate::error::ExecutorError;
use crate::interpreter::STREAM_COUNT;
use crate::job::{Job, LauncherMessage, Report};
use crate::log::log;
use crate::machine;
use crate::member::Member;
use crate::signals::StopSignals;
use crate::training;
use crate::transport::{
    Announcement, ControlClient, KeyFile, Mixed, Mpi, RunKey, Segment, SharedMemory, StarvedWatch, Tcp, TcpOptions, Transport,
    TransportError, WaitPolicy,
};
use foretell_program::Rank;
use foretell_units::diagnostic::one_line;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::panic::{self, AssertUnwindSafe};
use std::process::ExitCode;
use std::sync::{Arc, mpsc};
use std::time::Duration;

/// How often a rank looks for signals that ask to stop.
const SIGNAL_INTERVAL: Duration = Duration::from_millis(200);
/// How often a rank looks for connections on which no byte arrives.
const LINK_INTERVAL: Duration = Duration::from_secs(1);

/// Runs this process as a rank of the run that its environment names. A launcher starts it with
/// the argument `rank`.
pub fn run_rank() -> ExitCode {
    // Only a child of Foretell's launcher dies with its parent. A foreign launcher ends its own
    // children, and may start them from a thread that ends early, which counts as the parent.
    if std::env::var_os(STARTER_VARIABLE).is_none() {
        machine::die_with_parent();
    }
    machine::flush_denormals();
    let (member, control) = match join() {
        Ok(joined) => joined,
        Err(error) => {
            log(&format!("error: {}", one_line(&error)));
            return ExitCode::FAILURE;
        }
    };
    let start = |job| {
        let leave = listen_for_orders(&member, &control)?;
        watch_links(&member)?;
        Ok((job, leave))
    };
    let (job, leave) = match receive_job(&control).and_then(start) {
        Ok(received) => received,
        Err(error) => {
            report_failure(&member, &error);
            return ExitCode::FAILURE;
        }
    };
    if matches!(job, Job::Train(_))
        && let Err(error) = pass_on_signals(&member)
    {
        report_failure(&member, &error);
        return ExitCode::FAILURE;
    }
    let result = panic::catch_unwind(AssertUnwindSafe(|| work(&member, &job)))
        .unwrap_or_else(|panic| Err(ExecutorError::panicked("compute", panic.as_ref())));
    if let Err(error) = &result {
        report_failure(&member, error);
    }
    // The rank waits for the order to leave. If it exited first, ranks that are not done would miss
    // it, and a failure that it only noticed could look like its own. Without the order the run has
    // failed, also where this rank's work was done.
    let is_told = leave.recv().is_ok();
    if result.is_err() || !is_told {
        return ExitCode::FAILURE;
    }
    match member.transport.leave(START_TIME / 2) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            report_failure(&member, &error.into());
            ExitCode::FAILURE
        }
    }
}

fn receive_job(control: &ControlClient) -> Result<Job, ExecutorError> {
    Ok(control.receive(Some(START_TIME))?)
}

fn work(member: &Member, job: &Job) -> Result<(), ExecutorError> {
    match job {
        Job::Train(job) => training::train(member, job),
        Job::Calibrate(job) => calibration::measure(member, job),
    }
}

/// Reports an error on standard error and to the launcher, which may be gone.
fn report_failure(member: &Member, error: &ExecutorError) {
    log(&format!("error: {}", one_line(error)));
    let report = Report::failed(error, error.is_consequence());
    let _ = member.control.send(&report);
}

/// Starts a thread that listens to the launcher. If another rank is lost, or the launcher is, the
/// thread wakes this rank's streams. The returned channel gets a message when the rank may leave,
/// and closes without one if messages of the launcher no longer arrive.
fn listen_for_orders(member: &Member, control: &Arc<ControlClient>) -> Result<mpsc::Receiver<()>, ExecutorError> {
    let (control, transport) = (Arc::clone(control), Arc::clone(&member.transport));
    let device = member.device.clone();
    let gate = Arc::clone(&member.gate);
    let (own_gate, counting) = (Arc::clone(&gate), Arc::clone(&transport));
    let abort = move |lost| {
        own_gate.abort();
        transport.abort(lost);
        if let Some(collectives) = device.as_ref().and_then(|device| device.collectives()) {
            collectives.abort();
        }
    };
    let (sender, receiver) = mpsc::channel();
    let listen = move || {
        loop {
            match control.receive(None) {
                Ok(LauncherMessage::Abort { lost }) => abort(lost),
                Ok(LauncherMessage::Hold) => {
                    // A launcher that is gone ends the run, as the next message shows.
                    let _ = control.send(&Report::Held { started: gate.hold() });
                }
                Ok(LauncherMessage::StopAfter { steps }) => gate.stop_after(steps),
                Ok(LauncherMessage::CountSent { to, stream }) => {
                    if let Some(bytes) = counting.sent(to, stream) {
                        let _ = control.send(&Report::Sent { to, stream, bytes });
                    }
                }
                Ok(LauncherMessage::Leave) => {
                    // The receiver is gone if the rank has already left.
                    let _ = sender.send(());
                    break;
                }
                Err(error) => {
                    // If only the connection from the launcher is disturbed, the launcher can still
                    // learn why.
                    if !matches!(error, TransportError::LauncherLost { .. }) {
                        log(&format!("error: {}", one_line(&error)));
                        let _ = control.send(&Report::failed(&error, false));
                    }
                    abort(None);
                    break;
                }
            }
        }
    };
    let thread = std::thread::Builder::new().name("orders".into()).spawn(listen);
    thread.map(|_| receiver).map_err(|error| ExecutorError::system("start the thread that listens to the launcher", error))
}

/// Starts a thread that tells the launcher on which connections no byte arrives, so that it can
/// find out whether their peers have sent any.
fn watch_links(member: &Member) -> Result<(), ExecutorError> {
    let (control, transport) = (Arc::clone(&member.control), Arc::clone(&member.transport));
    let watch = move || {
        let mut watch = StarvedWatch::default();
        loop {
            std::thread::sleep(LINK_INTERVAL);
            let starved = watch.still(transport.starved());
            if !starved.is_empty() && control.send(&Report::Starved(starved)).is_err() {
                break;
            }
        }
    };
    let thread = std::thread::Builder::new().name("links".into()).spawn(watch);
    thread.map(drop).map_err(|error| ExecutorError::system("start the thread that watches the links", error))
}

/// Starts a thread that passes signals that ask to stop on to the launcher, which stops all ranks
/// together. A terminal and Slurm signal the ranks too.
fn pass_on_signals(member: &Member) -> Result<(), ExecutorError> {
    let (signals, control) = (StopSignals::catch()?, Arc::clone(&member.control));
    let watch = move || {
        let signal = loop {
            if let Some(signal) = signals.received() {
                break signal;
            }
            std::thread::sleep(SIGNAL_INTERVAL);
        };
        // A launcher that is gone has ended the run.
        let _ = control.send(&Report::AskedToStop { signal });
    };
    let thread = std::thread::Builder::new().name("signals".into()).spawn(watch);
    thread.map(drop).map_err(|error| ExecutorError::system("start the thread that waits for signals", error))
}

/// Joins the run: pins the process, opens the GPU and the transport, connects to the launcher.
fn join() -> Result<(Member, Arc<ControlClient>), ExecutorError> {
    let rank = number(RANK_VARIABLE)?;
    let world_size = number(WORLD_VARIABLE)?;
    let launcher: SocketAddr = variable(LAUNCHER_VARIABLE)?.parse().map_err(|_| not_set(LAUNCHER_VARIABLE))?;
    let cpus = machine::allowed_cores();
    if let Some(core) = optional_number(CORE_VARIABLE)? {
        machine::pin_to_core(core)?;
    }
    let key_file = KeyFile::path_from_environment();
    let find_key = || match &key_file {
        Some(path) => KeyFile::read(path),
        None => RunKey::from_environment().map(Some),
    };
    let mut wait_policy = WaitPolicy::default();
    if let Some(microseconds) = optional_number(SPIN_VARIABLE)? {
        wait_policy.spin = Duration::from_micros(microseconds as u64);
    }
    let timeout = optional_number(START_VARIABLE)?.map_or(START_TIME, |seconds| Duration::from_secs(seconds as u64));
    let device = open_gpu()?;
    let transport_kind = variable(TRANSPORT_VARIABLE)?;
    let shared_memory = match transport_kind.as_str() {
        "tcp" | "mpi" => None,
        "shared_memory" | "mixed" => {
            let segment = Segment::from_environment()?.ok_or_else(|| not_set("FORETELL_SHARED_MEMORY"))?;
            debug_assert!(segment.streams() >= STREAM_COUNT);
            Some(SharedMemory::attach(&segment, rank, world_size, wait_policy)?)
        }
        _ => return Err(not_set(TRANSPORT_VARIABLE)),
    };
    let mut announcement = Announcement { address: None, machine: machine::host_name() };
    if transport_kind == "shared_memory" {
        let shared_memory = shared_memory.ok_or_else(|| not_set(TRANSPORT_VARIABLE))?;
        let (control, ..) = ControlClient::join_with(launcher, &find_key, rank, &announcement, timeout)?;
        return Ok(member(rank, world_size, control, Arc::new(shared_memory), device, cpus));
    }
    if transport_kind == "mpi" {
        let (control, ..) = ControlClient::join_with(launcher, &find_key, rank, &announcement, timeout)?;
        // All ranks have joined, so MPI waits for none that never comes.
        let mpi = Mpi::start(rank, world_size, wait_policy, timeout).inspect_err(|error| {
            let _ = control.send(&Report::failed(error, false));
        })?;
        return Ok(member(rank, world_size, control, Arc::new(mpi), device, cpus));
    }
    let address: IpAddr = variable(ADDRESS_VARIABLE)?.parse().map_err(|_| not_set(ADDRESS_VARIABLE))?;
    let listener = TcpListener::bind(SocketAddr::new(address, 0))
        .map_err(|error| ExecutorError::system(format!("listen for other ranks at `{address}`"), error))?;
    let address = listener.local_addr().map_err(|error| ExecutorError::system("learn the rank's address", error))?;
    announcement.address = Some(address);
    let (control, table, key) = ControlClient::join_with(launcher, &find_key, rank, &announcement, timeout)?;
    let peers = table.addresses().map_err(|rank| TransportError::PeerLost { rank, reason: None })?;
    let tcp = Tcp::new(rank, listener, peers, key, TcpOptions { wait_policy, ..TcpOptions::default() })?;
    let transport: Arc<dyn Transport> = match shared_memory {
        Some(shared_memory) => Arc::new(Mixed::new(shared_memory, tcp)?),
        None => Arc::new(tcp),
    };
    Ok(member(rank, world_size, control, transport, device, cpus))
}

fn member(
    rank: usize,
    world_size: usize,
    control: ControlClient,
    transport: Arc<dyn Transport>,
    device: Option<Arc<dyn Driver>>,
    cpus: Vec<usize>,
) -> (Member, Arc<ControlClient>) {
    let control = Arc::new(control);
    let (reports, disk) = (Arc::clone(&control), Arc::new(SystemDisk));
    let member = Member { rank: Rank(rank), world_size, control: reports, transport, device, cpus, disk, gate: Arc::default() };
    (member, control)
}

/// Opens the GPU that the environment assigns; `None` if it assigns none.
fn open_gpu() -> Result<Option<Arc<dyn Driver>>, ExecutorError> {
    let Ok(index) = number(GPU_VARIABLE) else { return Ok(None) };
    let transport = if std::env::var_os(NCCL_VARIABLE).is_some() { GpuTransport::Nccl } else { GpuTransport::Host };
    Ok(Some(Arc::new(NvidiaDriver::open(index, transport)?)))
}

fn variable(name: &str) -> Result<String, ExecutorError> {
    std::env::var(name).map_err(|_| not_set(name))
}

fn number(name: &str) -> Result<usize, ExecutorError> {
    variable(name)?.parse().map_err(|_| not_set(name))
}

/// The number in a variable that may be left out.
fn optional_number(name: &str) -> Result<Option<usize>, ExecutorError> {
    std::env::var_os(name).map(|_| number(name)).transpose()
}

fn not_set(name: &str) -> ExecutorError {
    let what = format!("a rank without a valid `{name}` in its environment");
    ExecutorError::Unsupported { what, hint: "`foretell execute` starts ranks; they cannot be started by hand".into() }
}
