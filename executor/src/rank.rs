//! A rank's process: joins the run, does its job, says how it went.

use crate::backend::cuda::{Driver, GpuTransport, NvidiaDriver};
use crate::calibration;
use crate::environment::{
    ADDRESS_VARIABLE, CORE_VARIABLE, GPU_VARIABLE, LAUNCHER_VARIABLE, NCCL_VARIABLE, RANK_VARIABLE, SPIN_VARIABLE, START_TIME,
    START_VARIABLE, STARTER_VARIABLE, TRANSPORT_VARIABLE, WORLD_VARIABLE,
};
use crate::error::ExecutorError;
use crate::interpreter::STREAM_COUNT;
use crate::job::{Job, Order, Report};
use crate::machine;
use crate::member::Member;
use crate::training;
use crate::transport::{
    Announcement, ControlClient, KeyFile, Mixed, RunKey, Segment, SharedMemory, Tcp, TcpOptions, Transport, TransportError,
    WaitPolicy,
};
use foretell_program::Rank;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::panic::{self, AssertUnwindSafe};
use std::process::ExitCode;
use std::sync::{Arc, mpsc};
use std::time::Duration;

/// Runs this process as a rank of the run that its environment names; what a launcher's children call.
pub fn run_rank() -> ExitCode {
    // Whose child this is otherwise ends its own; and may start them from a thread that does not live as long.
    if std::env::var_os(STARTER_VARIABLE).is_none() {
        machine::die_with_parent();
    }
    machine::flush_denormals();
    match join() {
        Ok(member) => match member.receive_job().and_then(|job| Ok((job, member.listen_for_orders()?))) {
            Ok((job, leave)) => {
                let work = || member.work(&job);
                let result = panic::catch_unwind(AssertUnwindSafe(work))
                    .unwrap_or_else(|panic| Err(ExecutorError::panicked("compute", panic.as_ref())));
                if let Err(error) = &result {
                    member.report(error);
                }
                // One that left by itself could look like the cause of what it only noticed, or be missed by those that are not done.
                // The thread that hears the launcher's orders ends with the connection: a launcher that is gone lets go, too.
                let _ = leave.recv();
                if result.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
            }
            Err(error) => {
                member.report(&error);
                ExitCode::FAILURE
            }
        },
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

impl Member {
    fn receive_job(&self) -> Result<Job, ExecutorError> {
        Ok(self.control.receive(Some(START_TIME))?)
    }

    fn work(&self, job: &Job) -> Result<(), ExecutorError> {
        match job {
            Job::Train(job) => training::train(self, job),
            Job::Calibrate(job) => calibration::measure(self, job),
        }
    }

    /// Says what went wrong, here and to the launcher, which may be the one that is gone.
    fn report(&self, error: &ExecutorError) {
        eprintln!("error: {error}");
        let report = Report::Failed { message: error.to_string(), consequence: error.is_consequence() };
        let _ = self.control.send(&report);
    }

    /// A thread that wakes this rank's streams when the launcher says that another rank is lost, or is lost itself; what it returns hears
    /// when the rank may leave.
    fn listen_for_orders(&self) -> Result<mpsc::Receiver<()>, ExecutorError> {
        let (control, transport) = (Arc::clone(&self.control), Arc::clone(&self.transport));
        let device = self.device.clone();
        let abort = move |lost| {
            transport.abort(lost);
            if let Some(collectives) = device.as_ref().and_then(|device| device.collectives()) {
                collectives.abort();
            }
        };
        let (sender, receiver) = mpsc::channel();
        let listen = move || {
            loop {
                match control.receive(None) {
                    Ok(Order::Abort { lost }) => abort(lost),
                    Ok(Order::Leave) => break,
                    Err(_) => {
                        abort(None);
                        break;
                    }
                }
            }
            // Nobody listens where the rank has left already.
            let _ = sender.send(());
        };
        let thread = std::thread::Builder::new().name("orders".into()).spawn(listen);
        thread.map(|_| receiver).map_err(|error| ExecutorError::system("start the thread that listens to the launcher", error))
    }
}

fn join() -> Result<Member, ExecutorError> {
    let rank = number(RANK_VARIABLE)?;
    let world_size = number(WORLD_VARIABLE)?;
    let launcher: SocketAddr = variable(LAUNCHER_VARIABLE)?.parse().map_err(|_| not_set(LAUNCHER_VARIABLE))?;
    if let Ok(core) = number(CORE_VARIABLE) {
        machine::pin_to_core(core)?;
    }
    let key_file = KeyFile::path_from_environment();
    let find_key = || match &key_file {
        Some(path) => KeyFile::read(path),
        None => RunKey::from_environment().map(Some),
    };
    let mut wait_policy = WaitPolicy::default();
    if let Ok(microseconds) = number(SPIN_VARIABLE) {
        wait_policy.spin = Duration::from_micros(microseconds as u64);
    }
    let timeout = number(START_VARIABLE).map_or(START_TIME, |seconds| Duration::from_secs(seconds as u64));
    let device = match number(GPU_VARIABLE) {
        Ok(index) => {
            let reach = if std::env::var_os(NCCL_VARIABLE).is_some() { GpuTransport::Nccl } else { GpuTransport::Host };
            Some(Arc::new(NvidiaDriver::open(index, reach)?) as Arc<dyn Driver>)
        }
        Err(_) => None,
    };
    let near = match variable(TRANSPORT_VARIABLE)?.as_str() {
        "tcp" => None,
        _ => {
            let segment = Segment::from_environment()?.ok_or_else(|| not_set("FORETELL_SHARED_MEMORY"))?;
            debug_assert!(segment.streams() >= STREAM_COUNT);
            Some(SharedMemory::attach(&segment, rank, world_size, wait_policy)?)
        }
    };
    let mut announcement = Announcement { address: None, machine: machine::host_name() };
    if variable(TRANSPORT_VARIABLE)? == "shared_memory" {
        let near = near.ok_or_else(|| not_set(TRANSPORT_VARIABLE))?;
        let (control, ..) = ControlClient::join_with(launcher, &find_key, rank, &announcement, timeout)?;
        return Ok(Member { rank: Rank(rank), world_size, control: Arc::new(control), transport: Arc::new(near), device });
    }
    let address: IpAddr = variable(ADDRESS_VARIABLE)?.parse().map_err(|_| not_set(ADDRESS_VARIABLE))?;
    let listener = TcpListener::bind(SocketAddr::new(address, 0))
        .map_err(|error| ExecutorError::system(format!("listen for other ranks at {address}"), error))?;
    let address = listener.local_addr().map_err(|error| ExecutorError::system("learn the rank's address", error))?;
    announcement.address = Some(address);
    let (control, table, key) = ControlClient::join_with(launcher, &find_key, rank, &announcement, timeout)?;
    let peers = table.addresses().map_err(|rank| TransportError::PeerLost { rank })?;
    let far = Tcp::new(rank, listener, peers, key, TcpOptions { wait_policy, ..TcpOptions::default() })?;
    let transport: Arc<dyn Transport> = match near {
        Some(near) => Arc::new(Mixed::new(near, far)?),
        None => Arc::new(far),
    };
    Ok(Member { rank: Rank(rank), world_size, control: Arc::new(control), transport, device })
}

fn variable(name: &str) -> Result<String, ExecutorError> {
    std::env::var(name).map_err(|_| not_set(name))
}

fn number(name: &str) -> Result<usize, ExecutorError> {
    variable(name)?.parse().map_err(|_| not_set(name))
}

fn not_set(name: &str) -> ExecutorError {
    let what = format!("a rank whose environment does not have a valid {name}");
    ExecutorError::Unsupported { what, hint: "ranks are started by `foretell execute`, not by hand".into() }
}
