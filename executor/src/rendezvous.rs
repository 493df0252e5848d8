//! Runs whose processes an external launcher started: torchrun, `mpirun` or Slurm's `srun`.
//!
//! Such a launcher starts one process per rank and tells each, in environment variables, its rank
//! and the number of ranks. Rank 0 becomes Foretell's launcher and starts a process for itself;
//! every other process becomes its rank and joins rank 0.
//!
//! All of them hold the run's secret, from `FORETELL_RUN_KEY` or from a file that rank 0 writes,
//! readable by its own user alone, into a folder that all ranks share. A process without the secret
//! is not let in, and a rank that does not join in time is named. The environment is only read, and
//! every number in it is checked.

mod starter;

pub use starter::Starter;

use crate::backend_kind::BackendKind;
use crate::environment::{START_VARIABLE, STARTER_VARIABLE};
use crate::error::ExecutorError;
use crate::rank_command::RankCommand;
use crate::transport::{KeyFile, Mpi, RunKey, TransportKind};
use starter::{StartedRank, Variables, invalid_variable};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs, UdpSocket};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// How long the ranks wait for each other at the start, unless [`START_VARIABLE`] says otherwise.
const JOIN_TIMEOUT: Duration = Duration::from_secs(120);
/// The port at which rank 0 listens.
const PORT_VARIABLE: &str = "FORETELL_PORT";
/// The folder, shared by all ranks, for the file with the run's secret.
const FOLDER_VARIABLE: &str = "FORETELL_RENDEZVOUS_DIR";
/// Ports for runs whose environment names none. They lie below Linux's ephemeral ports.
const PORTS: std::ops::Range<u16> = 20_000..32_000;

/// This process's position among the processes that an external launcher started.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct World {
    /// The launcher that started them.
    pub starter: Starter,
    /// This process's rank, from 0.
    pub rank: usize,
    /// The number of ranks.
    pub size: usize,
    /// This process's number among those on its machine, from 0; `None` where the environment does
    /// not say.
    pub local_rank: Option<usize>,
    /// The number of machines; `None` where the environment does not say.
    pub nodes: Option<usize>,
    /// The host of rank 0.
    pub host: String,
    /// The port at which rank 0 listens.
    pub port: u16,
    /// How long the ranks wait for each other at the start.
    pub join_timeout: Duration,
    /// The file for the run's secret; `None` where no folder for it is known.
    key_file: Option<PathBuf>,
}

impl World {
    /// Reads this process's environment. Returns `None` if no external launcher started it together
    /// with others.
    ///
    /// # Errors
    /// [`ExecutorError::Unsupported`] if a variable has no valid value, or if the environment does
    /// not say on which host rank 0 is.
    pub fn from_environment() -> Result<Option<Self>, ExecutorError> {
        Self::from_variables(&|name| std::env::var(name).ok())
    }

    fn from_variables(lookup: &dyn Fn(&str) -> Option<String>) -> Result<Option<Self>, ExecutorError> {
        let variables = Variables(lookup);
        let Some(own) = StartedRank::find(&variables)?.filter(|own| own.size > 1) else { return Ok(None) };
        let host = match (variables.text("MASTER_ADDR")?, own.host) {
            (Some(host), _) | (None, Some(host)) => host,
            (None, None) if own.nodes == Some(1) => Ipv4Addr::LOCALHOST.to_string(),
            (None, None) => {
                let what = format!("rank {}, which {} started without saying where rank 0 is,", own.rank, own.starter);
                let hint = "set MASTER_ADDR to the host of rank 0 for all ranks".into();
                return Err(ExecutorError::Unsupported { what, hint });
            }
        };
        let port = |name| variables.number(name, usize::from(u16::MAX)).map(|port| port.map(|port| port as u16));
        let port = match (port(PORT_VARIABLE)?, port("MASTER_PORT")?) {
            (Some(port), _) => port,
            // torchrun's own store listens on MASTER_PORT itself.
            (None, Some(port)) => {
                port.checked_add(1).ok_or_else(|| invalid_variable("MASTER_PORT", "65535", "a number below 65535"))?
            }
            (None, None) => PORTS.start + (hash(&own.run_id) % u64::from(PORTS.end - PORTS.start)) as u16,
        };
        let join_timeout = variables.number(START_VARIABLE, 86_400)?.map(|seconds| Duration::from_secs(seconds as u64));
        let folder = match (variables.text(FOLDER_VARIABLE)?, variables.text("HOME")?) {
            (Some(folder), _) => Some(PathBuf::from(folder)),
            (None, Some(home)) => Some(Path::new(&home).join(".cache").join("foretell").join("rendezvous")),
            (None, None) => None,
        };
        let file_name = format!("{:016x}.key", hash(&format!("{} {} {host} {port}", own.starter, own.run_id)));
        Ok(Some(Self {
            starter: own.starter,
            rank: own.rank,
            size: own.size,
            local_rank: own.local_rank,
            nodes: own.nodes,
            host,
            port,
            join_timeout: join_timeout.unwrap_or(JOIN_TIMEOUT),
            key_file: folder.map(|folder| folder.join(file_name)),
        }))
    }

    /// The number of ranks on this machine, if ranks are spread evenly. All of them where the
    /// environment does not say how many machines there are.
    pub fn local_size(&self) -> usize {
        self.size.div_ceil(self.nodes.unwrap_or(1).max(1))
    }

    /// The address of rank 0, as seen from this machine.
    fn first_rank_address(&self) -> Result<SocketAddr, ExecutorError> {
        let unknown = |error| {
            let doing = format!("find host `{}` of rank 0 from rank {} (MASTER_ADDR names another)", self.host, self.rank);
            ExecutorError::system(doing, error)
        };
        let mut found: Vec<SocketAddr> = (self.host.as_str(), self.port).to_socket_addrs().map_err(unknown)?.collect();
        found.sort_by_key(|address| !address.is_ipv4());
        let no_address = || unknown(std::io::ErrorKind::AddrNotAvailable.into());
        let mut address = *found.first().ok_or_else(no_address)?;
        // Many machines resolve their own name to the loopback address. Ranks on other machines
        // need the address of a real interface.
        if address.ip().is_loopback()
            && self.nodes.is_none_or(|nodes| nodes > 1)
            && let Some(outside) = outside_address()
        {
            address.set_ip(outside);
        }
        Ok(address)
    }

    /// The address on which rank 0 listens, and the one at which its own rank process connects to
    /// it.
    ///
    /// Rank 0 listens on every interface, since other ranks may reach it by another address. On one
    /// machine it may listen on the loopback interface alone. The run's secret keeps strangers out.
    pub(crate) fn listening(&self) -> Result<(SocketAddr, SocketAddr), ExecutorError> {
        let first = self.first_rank_address()?;
        let address = if first.ip().is_loopback() { first.ip() } else { unspecified(&first) };
        Ok((SocketAddr::new(address, self.port), first))
    }

    /// Creates the run's secret on rank 0 and writes it to the file where the other ranks look for
    /// it. If the environment has a secret, that one is used and there is no file.
    pub(crate) fn create_key(&self) -> Result<(RunKey, Option<KeyFile>), ExecutorError> {
        if RunKey::is_in_environment() {
            return Ok((RunKey::from_environment()?, None));
        }
        let key = RunKey::generate()?;
        let path = self.key_file.as_ref().ok_or_else(|| self.no_folder())?;
        Ok((key.clone(), Some(KeyFile::write(path, &key)?)))
    }

    /// Refuses MPI where Open MPI's `mpirun` did not start the ranks, where its library cannot be
    /// used, and between GPUs. `world` is `None` where no external launcher started ranks.
    ///
    /// # Errors
    /// [`ExecutorError::Unsupported`] or [`TransportError::Mpi`](crate::transport::TransportError).
    pub fn check_transport(world: Option<&Self>, transport: TransportKind, backend: BackendKind) -> Result<(), ExecutorError> {
        if transport != TransportKind::Mpi {
            return Ok(());
        }
        let refused = |what: String| {
            let hint = "start one process for each rank: `mpirun -n RANKS foretell execute --transport mpi ...`".into();
            Err(ExecutorError::Unsupported { what, hint })
        };
        match world.map(|world| world.starter) {
            Some(Starter::OpenMpi) => {}
            Some(other) => return refused(format!("`--transport mpi` in ranks that {other} started")),
            None => return refused("`--transport mpi` without several ranks that mpirun started".into()),
        }
        if backend != BackendKind::Cpu {
            let what = "`--transport mpi` between GPUs".into();
            return Err(ExecutorError::Unsupported { what, hint: "leave `--transport` out".into() });
        }
        Ok(Mpi::version().map(drop)?)
    }

    /// The GPU of this rank; `None` on CPUs.
    ///
    /// # Errors
    /// [`ExecutorError::Unsupported`] if several ranks of this machine have several GPUs, and the
    /// environment does not number these ranks.
    fn gpu(&self, backend: BackendKind) -> Result<Option<usize>, ExecutorError> {
        match (backend, self.local_rank) {
            (BackendKind::Cuda { gpus }, None) if gpus > 1 && self.local_size() > 1 => Err(ExecutorError::Unsupported {
                what: format!("a choice of GPUs for ranks that {} started without a number on their machine", self.starter),
                hint: "set LOCAL_RANK (MPI_LOCALRANKID under PMI) to each rank's number on its machine".into(),
            }),
            (_, local_rank) => Ok(backend.gpu_of(local_rank.unwrap_or(0))),
        }
    }

    /// The command that runs this rank. `first` is the address of rank 0.
    ///
    /// # Errors
    /// [`ExecutorError::Unsupported`] if it is not known which GPU the rank has.
    pub(crate) fn rank_command(
        &self,
        program: &Path,
        first: SocketAddr,
        backend: BackendKind,
        transport: TransportKind,
    ) -> Result<Command, ExecutorError> {
        let rank_command = RankCommand {
            program,
            rank: self.rank,
            world_size: self.size,
            launcher: first,
            // The rank listens on every interface. Its control connection shows which address the
            // others can reach.
            address: unspecified(&first),
            // Ranks of one machine share no memory here: no common parent could create it for them.
            transport: if transport == TransportKind::Mpi { "mpi" } else { "tcp" },
            gpu: self.gpu(backend)?,
            uses_nccl: backend.is_direct(self.local_size().max(2)),
        };
        let mut command = rank_command.build();
        command.env(START_VARIABLE, self.join_timeout.as_secs().to_string());
        Ok(command)
    }

    /// Replaces this process by its rank, which joins rank 0. Returns only if that fails.
    pub fn become_rank(&self, program: &Path, backend: BackendKind, transport: TransportKind) -> ExecutorError {
        let become_rank = || {
            let first = self.first_rank_address()?;
            let mut command = self.rank_command(program, first, backend, transport)?;
            command.env(STARTER_VARIABLE, self.starter.to_string());
            if !RunKey::is_in_environment() {
                KeyFile::pass_to(self.key_file.as_ref().ok_or_else(|| self.no_folder())?, &mut command);
            }
            Ok(ExecutorError::system(format!("become rank {}", self.rank), command.exec()))
        };
        become_rank().unwrap_or_else(|error| error)
    }

    fn no_folder(&self) -> ExecutorError {
        let what = format!("rank {} without a folder for the run's secret", self.rank);
        let hint = format!(
            "set {FOLDER_VARIABLE} to a folder that all ranks share, or FORETELL_RUN_KEY to 96 random hexadecimal digits"
        );
        ExecutorError::Unsupported { what, hint }
    }
}

/// Every interface, in the address family of `address`.
fn unspecified(address: &SocketAddr) -> IpAddr {
    if address.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() }
}

/// The address of the interface that leads out of this machine. Nothing is sent.
fn outside_address() -> Option<IpAddr> {
    // An address reserved for documentation (RFC 5737), to which only the default route leads.
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).ok()?;
    socket.connect((Ipv4Addr::new(192, 0, 2, 1), 9)).ok()?;
    socket.local_addr().ok().map(|address| address.ip()).filter(|address| !address.is_loopback())
}

/// The FNV-1a hash. All ranks must compute the same value; the standard library's hash does not
/// promise that.
fn hash(text: &str) -> u64 {
    text.bytes().fold(0xCBF2_9CE4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01B3))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that fails may panic")]

    use super::*;
    use foretell_units::diagnostic::one_line;

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
    fn the_environment_of_each_external_launcher_is_read() {
        let torchrun = world(&TORCHRUN).unwrap().unwrap();
        assert_eq!((torchrun.starter, torchrun.rank, torchrun.size, torchrun.local_rank), (Starter::Torchrun, 3, 8, Some(1)));
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
        assert_eq!((own.starter, own.rank, own.size, own.local_rank), (Starter::Slurm, 5, 6, Some(2)));
        assert_eq!((own.nodes, own.host.as_str(), own.local_size()), (Some(2), "gpu003", 3));
        assert!(PORTS.contains(&own.port));
        // All ranks of a run have the same address and key file. Another run has others.
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
        // Under `mpirun`, Slurm's variables describe the daemon that `mpirun` started with `srun`,
        // so they are ignored.
        let within_slurm = world(&[&mpi[..], &slurm[..]].concat()).unwrap().unwrap();
        assert_eq!((within_slurm.starter, within_slurm.rank, within_slurm.host.as_str()), (Starter::OpenMpi, 1, "127.0.0.1"));
        let pmi = [("PMI_RANK", "5"), ("PMI_SIZE", "6")];
        assert_eq!(world(&[&pmi[..], &slurm[..]].concat()).unwrap().unwrap().starter, Starter::Slurm);
        let other = [("PMI_RANK", "5"), ("PMI_SIZE", "7"), ("MASTER_ADDR", "a")];
        assert_eq!(world(&[&other[..], &slurm[..]].concat()).unwrap().unwrap().starter, Starter::Pmi);
    }

    #[test]
    fn a_process_that_was_started_alone_is_no_rank() {
        assert_eq!(world(&[]).unwrap(), None);
        assert_eq!(world(&[("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "a")]).unwrap(), None);
        // A batch script runs once, whatever the number of its job's tasks.
        assert_eq!(world(&[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "8"), ("SLURM_JOB_NODELIST", "a")]).unwrap(), None);
    }

    #[test]
    fn a_variable_without_a_valid_value_is_refused_by_name() {
        let long = "9".repeat((1 << 16) + 1);
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
            let text = one_line(&refused.expect_err(name));
            assert!(text.contains(if name == "WORLD_SIZE" && value == "0" { "RANK" } else { name }), "{text}");
        }
        let nowhere = [("OMPI_COMM_WORLD_RANK", "1"), ("OMPI_COMM_WORLD_SIZE", "2"), ("OMPI_COMM_WORLD_LOCAL_SIZE", "1")];
        assert!(one_line(&world(&nowhere).expect_err("no host")).contains("MASTER_ADDR"));
    }
}
