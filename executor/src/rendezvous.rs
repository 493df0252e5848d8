//! Ranks that somebody else starts: torchrun, an MPI launcher or Slurm's `srun` start a process each and tell it in its environment which of
//! how many it is. The first of them becomes the launcher and starts its own rank; each of the others becomes a rank, and joins it.
//!
//! All of them hold the run's secret: from `FORETELL_RUN_KEY`, or from a file that the first writes for its own user alone, in a folder that
//! they share. Whoever comes without it is not let in, and who does not come is named after a time-out. The environment is only read, and
//! believed no further than its numbers make sense.

use crate::environment::{
    ADDRESS_VARIABLE, CONNECTIONS, GPU_VARIABLE, LAUNCHER_VARIABLE, NCCL_VARIABLE, RANK_VARIABLE, START_VARIABLE,
    STARTER_VARIABLE, TRANSPORT_VARIABLE, WORLD_VARIABLE,
};
use crate::error::ExecutorError;
use crate::launcher::Backend;
use crate::transport::{KeyFile, RunKey};
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs, UdpSocket};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

/// More ranks than any environment has.
const MOST_RANKS: usize = 1 << 20;
/// No variable that is read is longer: lists of nodes are.
const LONGEST_VARIABLE: usize = 1 << 16;
/// How long such ranks wait for each other at the start, unless [`START_VARIABLE`] says otherwise.
const START_TIME: Duration = Duration::from_secs(120);
/// The port at which the first rank listens.
const PORT_VARIABLE: &str = "FORETELL_PORT";
/// The folder, shared by all ranks, for the file with the run's secret.
const FOLDER_VARIABLE: &str = "FORETELL_RENDEZVOUS_DIR";
/// Ports of runs whose environment names none: below those that Linux gives out by itself.
const PORTS: std::ops::Range<u16> = 20_000..32_000;

/// Who started the processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Starter {
    /// PyTorch's torchrun, or whoever sets `RANK`, `WORLD_SIZE` and `MASTER_ADDR` as it does.
    Torchrun,
    /// Open MPI's mpirun.
    OpenMpi,
    /// An MPI launcher with the process management interface: MPICH's, Intel's.
    Pmi,
    /// Slurm's srun.
    Slurm,
}

impl fmt::Display for Starter {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Starter::Torchrun => "torchrun",
            Starter::OpenMpi => "mpirun (Open MPI)",
            Starter::Pmi => "mpirun (PMI)",
            Starter::Slurm => "srun",
        })
    }
}

/// This process's place among those that were started together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct World {
    /// Who started them.
    pub starter: Starter,
    /// This one, from 0 on.
    pub rank: usize,
    /// All of them.
    pub size: usize,
    /// This one among those of its machine.
    pub local_rank: usize,
    /// Machines; none where the environment does not say.
    pub nodes: Option<usize>,
    /// The host of the first rank.
    pub host: String,
    /// The port at which the first rank listens.
    pub port: u16,
    /// How long they wait for each other at the start.
    pub patience: Duration,
    /// What the file of the run's secret is called, and where it is, if there is a folder.
    key_file: Option<PathBuf>,
}

/// What a process was told.
struct Environment<'a>(&'a dyn Fn(&str) -> Option<String>);

impl Environment<'_> {
    fn text(&self, name: &str) -> Result<Option<String>, ExecutorError> {
        match (self.0)(name).map(|text| text.trim().to_owned()).filter(|text| !text.is_empty()) {
            Some(text) if text.len() > LONGEST_VARIABLE || text.contains(|c: char| c.is_control()) => {
                Err(senseless(name, "text"))
            }
            text => Ok(text),
        }
    }

    fn number(&self, name: &str, most: usize) -> Result<Option<usize>, ExecutorError> {
        let number = |text: String| text.parse().ok().filter(|&number| number <= most).ok_or_else(|| senseless(name, "number"));
        self.text(name)?.map(number).transpose()
    }

    /// The first of these that is set.
    fn any(&self, names: &[&str]) -> Result<Option<String>, ExecutorError> {
        for name in names {
            if let Some(text) = self.text(name)? {
                return Ok(Some(text));
            }
        }
        Ok(None)
    }

    fn any_number(&self, names: &[&str], most: usize) -> Result<Option<usize>, ExecutorError> {
        for name in names {
            if let Some(number) = self.number(name, most)? {
                return Ok(Some(number));
            }
        }
        Ok(None)
    }
}

fn senseless(name: &str, what: &str) -> ExecutorError {
    let what = format!("a rank whose environment has {name}, which is no {what} that makes sense,");
    ExecutorError::Unsupported {
        what,
        hint: format!("unset {name} to start ranks on this machine, or have it set by the launcher"),
    }
}

/// The numbers of one process, before it is known where the first is.
struct Numbers {
    starter: Starter,
    rank: usize,
    size: usize,
    local_rank: usize,
    nodes: Option<usize>,
    /// The host of the first rank, where the environment says.
    host: Option<String>,
    /// What tells this run from others.
    run: String,
}

impl Numbers {
    /// Those of a starter, whose variables are: rank, size, rank on this machine, ranks on this machine.
    fn of(environment: &Environment<'_>, starter: Starter, names: [&str; 4]) -> Result<Option<Self>, ExecutorError> {
        let [rank, size, local_rank, local_size] = names;
        let (Some(own), Some(all)) = (environment.number(rank, MOST_RANKS)?, environment.number(size, MOST_RANKS)?) else {
            return Ok(None);
        };
        if own >= all {
            return Err(senseless(rank, &format!("number below {size}")));
        }
        let local_rank = environment.number(local_rank, MOST_RANKS)?.unwrap_or(0);
        let local_size = environment.number(local_size, MOST_RANKS)?.filter(|&count| count > 0);
        let nodes = local_size.map(|count| all.div_ceil(count));
        Ok(Some(Self { starter, rank: own, size: all, local_rank, nodes, host: None, run: String::new() }))
    }

    fn torchrun(environment: &Environment<'_>) -> Result<Option<Self>, ExecutorError> {
        let names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"];
        let Some(own) = Self::of(environment, Starter::Torchrun, names)? else { return Ok(None) };
        let parts = ["TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_PORT"];
        let parts = parts.map(|name| environment.text(name).map(Option::unwrap_or_default));
        let [run, restarts, port] = parts;
        Ok(Some(Self { run: format!("{}-{}-{}", run?, restarts?, port?), ..own }))
    }

    fn open_mpi(environment: &Environment<'_>) -> Result<Option<Self>, ExecutorError> {
        let names = ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"];
        let Some(own) = Self::of(environment, Starter::OpenMpi, names)? else { return Ok(None) };
        let run = environment.any(&["PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"])?.unwrap_or_default();
        Ok(Some(Self { run, ..own }))
    }

    fn pmi(environment: &Environment<'_>) -> Result<Option<Self>, ExecutorError> {
        let names = ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"];
        let Some(own) = Self::of(environment, Starter::Pmi, names)? else { return Ok(None) };
        let run = environment.any(&["PMI_JOBID", "PBS_JOBID", "LSB_JOBID"])?.unwrap_or_default();
        Ok(Some(Self { run, ..own }))
    }

    /// Of a step that `srun` made: a batch script and an allocation's shell have some of the variables too, and are no ranks.
    fn slurm(environment: &Environment<'_>) -> Result<Option<Self>, ExecutorError> {
        let Some(step) = environment.any(&["SLURM_STEP_ID", "SLURM_STEPID"])? else { return Ok(None) };
        let size = if environment.text("SLURM_STEP_NUM_TASKS")?.is_some() { "SLURM_STEP_NUM_TASKS" } else { "SLURM_NTASKS" };
        let Some(own) = Self::of(environment, Starter::Slurm, ["SLURM_PROCID", size, "SLURM_LOCALID", ""])? else {
            return Ok(None);
        };
        let nodes = environment.any_number(&["SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES"], MOST_RANKS)?;
        let list = environment.any(&["SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST"])?;
        let job = environment.any(&["SLURM_JOB_ID", "SLURM_JOBID"])?.unwrap_or_default();
        Ok(Some(Self { nodes, host: list.as_deref().map(first_host), run: format!("{job}.{step}"), ..own }))
    }

    /// Those of whoever started this process. An MPI launcher within a Slurm job has Slurm's variables too, those of the launcher's own
    /// steps; `srun` may set an MPI library's, which then are the same.
    fn find(environment: &Environment<'_>) -> Result<Option<Self>, ExecutorError> {
        if let Some(own) = Self::torchrun(environment)? {
            return Ok(Some(own));
        }
        if let Some(own) = Self::open_mpi(environment)? {
            return Ok(Some(own));
        }
        match (Self::pmi(environment)?, Self::slurm(environment)?) {
            (Some(mpi), Some(slurm)) if (mpi.rank, mpi.size) != (slurm.rank, slurm.size) => Ok(Some(mpi)),
            (mpi, slurm) => Ok(slurm.or(mpi)),
        }
    }
}

/// The first host of Slurm's list, such as `gpu[003-005,9],login`.
fn first_host(list: &str) -> String {
    let end = list.find([',', '[']).unwrap_or(list.len());
    let (head, rest) = list.split_at(end);
    let Some(inside) = rest.strip_prefix('[') else { return head.to_owned() };
    let first = inside.split([',', '-', ']']).next().unwrap_or_default();
    let tail = inside.split_once(']').map_or("", |(_, tail)| tail.split(',').next().unwrap_or_default());
    // Lists in several dimensions, `rack[1-2]node[3-4]`, have a first host too.
    format!("{head}{first}{}", if tail.is_empty() { String::new() } else { first_host(tail) })
}

impl World {
    /// What this process's environment says; nothing where nobody started it together with others.
    ///
    /// # Errors
    /// [`ExecutorError::Unsupported`] where it says what makes no sense, or not where the first rank is.
    pub fn from_environment() -> Result<Option<Self>, ExecutorError> {
        Self::from_variables(&|name| std::env::var(name).ok())
    }

    fn from_variables(variables: &dyn Fn(&str) -> Option<String>) -> Result<Option<Self>, ExecutorError> {
        let environment = Environment(variables);
        let Some(own) = Numbers::find(&environment)?.filter(|numbers| numbers.size > 1) else { return Ok(None) };
        let host = match (environment.text("MASTER_ADDR")?, own.host) {
            (Some(host), _) | (None, Some(host)) => host,
            (None, None) if own.nodes == Some(1) => Ipv4Addr::LOCALHOST.to_string(),
            (None, None) => {
                let what = format!("a rank that {} started without saying where the first one is", own.starter);
                let hint = "set MASTER_ADDR to the first rank's host for all of them".into();
                return Err(ExecutorError::Unsupported { what, hint });
            }
        };
        let port = |name| environment.number(name, usize::from(u16::MAX)).map(|port| port.map(|port| port as u16));
        let port = match (port(PORT_VARIABLE)?, port("MASTER_PORT")?) {
            (Some(port), _) => port,
            // On the port itself torchrun has a store of its own.
            (None, Some(port)) => port.checked_add(1).ok_or_else(|| senseless("MASTER_PORT", "number below 65535"))?,
            (None, None) => PORTS.start + (hash(&own.run) % u64::from(PORTS.end - PORTS.start)) as u16,
        };
        let patience = environment.number(START_VARIABLE, 86_400)?.map(|seconds| Duration::from_secs(seconds as u64));
        let folder = match (environment.text(FOLDER_VARIABLE)?, environment.text("HOME")?) {
            (Some(folder), _) => Some(PathBuf::from(folder)),
            (None, Some(home)) => Some(Path::new(&home).join(".cache").join("foretell").join("rendezvous")),
            (None, None) => None,
        };
        let name = format!("{:016x}.key", hash(&format!("{} {} {host} {port}", own.starter, own.run)));
        Ok(Some(Self {
            starter: own.starter,
            rank: own.rank,
            size: own.size,
            local_rank: own.local_rank,
            nodes: own.nodes,
            host,
            port,
            patience: patience.unwrap_or(START_TIME),
            key_file: folder.map(|folder| folder.join(name)),
        }))
    }

    /// Ranks of this machine, as far as the environment says how many machines there are.
    pub fn local_size(&self) -> usize {
        self.size.div_ceil(self.nodes.unwrap_or(1).max(1))
    }

    /// Where the first rank can be reached from here.
    fn first(&self) -> Result<SocketAddr, ExecutorError> {
        let unknown = |error| ExecutorError::system(format!("find the first rank's host `{}`", self.host), error);
        let mut found: Vec<SocketAddr> = (self.host.as_str(), self.port).to_socket_addrs().map_err(unknown)?.collect();
        found.sort_by_key(|address| !address.is_ipv4());
        let nowhere = || unknown(std::io::ErrorKind::AddrNotAvailable.into());
        let mut address = *found.first().ok_or_else(nowhere)?;
        // A machine's own name is often its loopback interface to itself; what ranks here say of themselves must be true elsewhere.
        if address.ip().is_loopback()
            && self.nodes.is_none_or(|nodes| nodes > 1)
            && let Some(outside) = outside_address()
        {
            address.set_ip(outside);
        }
        Ok(address)
    }

    /// Where the first rank listens: at all of its addresses, as it may have others for other ranks, and lets in who has the secret.
    pub(crate) fn listening(&self) -> Result<(SocketAddr, SocketAddr), ExecutorError> {
        let first = self.first()?;
        let all: IpAddr = if first.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
        let all = if first.ip().is_loopback() { first.ip() } else { all };
        Ok((SocketAddr::new(all, self.port), first))
    }

    /// The run's secret for the first rank, which makes it, and leaves it where the others find it.
    pub(crate) fn make_key(&self) -> Result<(RunKey, Option<KeyFile>), ExecutorError> {
        if RunKey::is_in_environment() {
            return Ok((RunKey::from_environment()?, None));
        }
        let key = RunKey::generate()?;
        let path = self.key_file.as_ref().ok_or_else(no_folder)?;
        Ok((key.clone(), Some(KeyFile::write(path, &key)?)))
    }

    /// Has a command be this rank.
    pub(crate) fn tell(&self, command: &mut Command, first: SocketAddr, backend: Backend) {
        // Any of this machine's addresses: which one others see is seen where the connection comes from.
        let anywhere: IpAddr = if first.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
        command
            .arg("rank")
            .env(RANK_VARIABLE, self.rank.to_string())
            .env(WORLD_VARIABLE, self.size.to_string())
            .env(LAUNCHER_VARIABLE, first.to_string())
            .env(ADDRESS_VARIABLE, anywhere.to_string())
            .env(TRANSPORT_VARIABLE, "tcp")
            .env(START_VARIABLE, self.patience.as_secs().to_string())
            .stdin(Stdio::null());
        match backend.gpu_of(self.local_rank) {
            Some(gpu) => command.env(GPU_VARIABLE, gpu.to_string()),
            None => command.env_remove(GPU_VARIABLE),
        };
        match backend.is_direct(self.local_size().max(2)) {
            true => command.env(NCCL_VARIABLE, "1"),
            false => command.env_remove(NCCL_VARIABLE),
        };
        if std::env::var_os(CONNECTIONS.0).is_none() {
            command.env(CONNECTIONS.0, CONNECTIONS.1);
        }
    }

    /// Has this process be a rank of the run that the first one launches; only returns where that cannot be.
    pub fn become_rank(&self, program: &Path, backend: Backend) -> ExecutorError {
        let become_rank = || {
            let first = self.first()?;
            let mut command = Command::new(program);
            self.tell(&mut command, first, backend);
            command.env(STARTER_VARIABLE, self.starter.to_string());
            if !RunKey::is_in_environment() {
                KeyFile::pass_to(self.key_file.as_ref().ok_or_else(no_folder)?, &mut command);
            }
            Ok(ExecutorError::system(format!("become rank {}", self.rank), command.exec()))
        };
        become_rank().unwrap_or_else(|error| error)
    }
}

fn no_folder() -> ExecutorError {
    let hint =
        format!("set {FOLDER_VARIABLE} to a folder that all ranks share, or FORETELL_RUN_KEY to 96 random hexadecimal digits");
    ExecutorError::Unsupported { what: "a rank without a place for the run's secret".into(), hint }
}

/// The address of this machine's way to others. Nothing is sent.
fn outside_address() -> Option<IpAddr> {
    // An address of the range for documentation (RFC 5737): its way is the default one.
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).ok()?;
    socket.connect((Ipv4Addr::new(192, 0, 2, 1), 9)).ok()?;
    socket.local_addr().ok().map(|address| address.ip()).filter(|address| !address.is_loopback())
}

/// FNV-1a: the same in every process, which the standard library's is not promised to be.
fn hash(text: &str) -> u64 {
    text.bytes().fold(0xCBF2_9CE4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01B3))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that fails may panic")]

    use super::*;

    fn world(variables: &[(&str, &str)]) -> Result<Option<World>, ExecutorError> {
        World::from_variables(&|name| variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned()))
    }

    const TORCHRUN: [(&str, &str); 6] = [
        ("RANK", "3"),
        ("WORLD_SIZE", "8"),
        ("LOCAL_RANK", "1"),
        ("LOCAL_WORLD_SIZE", "2"),
        ("MASTER_ADDR", "node-7"),
        ("MASTER_PORT", "29500"),
    ];

    #[test]
    fn each_launchers_environment_is_understood() {
        let torchrun = world(&TORCHRUN).unwrap().unwrap();
        assert_eq!((torchrun.starter, torchrun.rank, torchrun.size, torchrun.local_rank), (Starter::Torchrun, 3, 8, 1));
        assert_eq!((torchrun.nodes, torchrun.host.as_str(), torchrun.port), (Some(4), "node-7", 29501));
        let slurm = [
            ("SLURM_PROCID", "5"),
            ("SLURM_STEP_NUM_TASKS", "6"),
            ("SLURM_NTASKS", "12"),
            ("SLURM_LOCALID", "2"),
            ("SLURM_STEP_NODELIST", "gpu[003-004]"),
            ("SLURM_STEP_NUM_NODES", "2"),
            ("SLURM_JOB_ID", "77"),
            ("SLURM_STEP_ID", "1"),
        ];
        let own = world(&slurm).unwrap().unwrap();
        assert_eq!((own.starter, own.rank, own.size, own.local_rank), (Starter::Slurm, 5, 6, 2));
        assert_eq!((own.nodes, own.host.as_str(), own.local_size()), (Some(2), "gpu003", 3));
        assert!(PORTS.contains(&own.port));
        // All ranks of a run meet at one place, and those of another elsewhere.
        let first = world(&[&[("SLURM_PROCID", "0")], &slurm[1..]].concat()).unwrap().unwrap();
        assert_eq!((&first.key_file, first.port, &first.host), (&own.key_file, own.port, &own.host));
        let with_home = |job| world(&[&[("HOME", "/h"), ("SLURM_JOB_ID", job)], &slurm[..]].concat()).unwrap().unwrap();
        assert_ne!(with_home("77").key_file, with_home("78").key_file);
        let mpi = [
            ("OMPI_COMM_WORLD_RANK", "1"),
            ("OMPI_COMM_WORLD_SIZE", "2"),
            ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
            ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
        ];
        // Slurm's are those of the daemon that mpirun had srun start.
        let within_slurm = world(&[&mpi[..], &slurm[..]].concat()).unwrap().unwrap();
        assert_eq!((within_slurm.starter, within_slurm.rank, within_slurm.host.as_str()), (Starter::OpenMpi, 1, "127.0.0.1"));
        let pmi = [("PMI_RANK", "5"), ("PMI_SIZE", "6")];
        assert_eq!(world(&[&pmi[..], &slurm[..]].concat()).unwrap().unwrap().starter, Starter::Slurm);
        let other = [("PMI_RANK", "5"), ("PMI_SIZE", "7"), ("MASTER_ADDR", "a")];
        assert_eq!(world(&[&other[..], &slurm[..]].concat()).unwrap().unwrap().starter, Starter::Pmi);
    }

    #[test]
    fn who_is_alone_is_no_rank() {
        assert_eq!(world(&[]).unwrap(), None);
        assert_eq!(world(&[("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "a")]).unwrap(), None);
        // A batch script, which runs once however many tasks its job may have.
        assert_eq!(world(&[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "8"), ("SLURM_JOB_NODELIST", "a")]).unwrap(), None);
    }

    #[test]
    fn what_makes_no_sense_is_refused_by_its_name() {
        let long = "9".repeat(LONGEST_VARIABLE + 1);
        for (name, value) in [
            ("RANK", "8"),
            ("RANK", "-1"),
            ("RANK", "three"),
            ("WORLD_SIZE", "99999999999999999999"),
            ("WORLD_SIZE", "0"),
            ("LOCAL_RANK", "1 2"),
            ("MASTER_PORT", "65535"),
            ("MASTER_PORT", "70000"),
            ("FORETELL_PORT", "http"),
            ("FORETELL_START_SECONDS", "86401"),
            ("MASTER_ADDR", "a\nb"),
            ("MASTER_ADDR", &long),
        ] {
            let refused = world(&[&[(name, value)], &TORCHRUN[..]].concat());
            let text = refused.expect_err(name).to_string();
            assert!(text.contains(if name == "WORLD_SIZE" && value == "0" { "RANK" } else { name }), "{text}");
        }
        let nowhere = [("OMPI_COMM_WORLD_RANK", "1"), ("OMPI_COMM_WORLD_SIZE", "2"), ("OMPI_COMM_WORLD_LOCAL_SIZE", "1")];
        assert!(world(&nowhere).expect_err("no host").to_string().contains("MASTER_ADDR"));
    }

    #[test]
    fn the_first_host_of_a_list_is_found() {
        for (list, first) in [
            ("alone", "alone"),
            ("a,b", "a"),
            ("gpu[3,5-7],login", "gpu3"),
            ("gpu[003-005]", "gpu003"),
            ("rack[1-2]node[03-04]-ib", "rack1node03-ib"),
            ("rack[1-2]-x,other[1-2]", "rack1-x"),
            ("broken[", "broken"),
            ("", ""),
        ] {
            assert_eq!(first_host(list), first, "{list}");
        }
    }
}
