//! The command that starts a rank's process, and the environment by which it learns its part of the
//! run. `rank.rs` reads these variables.

use crate::environment::{
    ADDRESS_VARIABLE, CONNECTIONS, GPU_VARIABLE, LAUNCHER_VARIABLE, NCCL_VARIABLE, RANK_VARIABLE, TRANSPORT_VARIABLE,
    WORLD_VARIABLE,
};
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::process::{Command, Stdio};

/// The facts that a rank needs in order to join its run, apart from the run's secret.
pub(crate) struct RankCommand<'a> {
    /// The program, which calls [`crate::run_rank`] when its first argument is `rank`.
    pub(crate) program: &'a Path,
    pub(crate) rank: usize,
    pub(crate) world_size: usize,
    /// Where the launcher's control server listens.
    pub(crate) launcher: SocketAddr,
    /// Where the rank listens for other ranks. An unspecified address means every interface.
    pub(crate) address: IpAddr,
    /// `shared_memory`, `tcp`, `mixed` or `mpi`.
    pub(crate) transport: &'static str,
    /// The GPU, numbered within the machine; `None` on CPUs.
    pub(crate) gpu: Option<usize>,
    /// `true` if the ranks' GPUs communicate by NCCL.
    pub(crate) uses_nccl: bool,
}

impl RankCommand<'_> {
    /// Builds the command. Its standard input is closed.
    pub(crate) fn build(&self) -> Command {
        let mut command = Command::new(self.program);
        command
            .arg("rank")
            .env(RANK_VARIABLE, self.rank.to_string())
            .env(WORLD_VARIABLE, self.world_size.to_string())
            .env(LAUNCHER_VARIABLE, self.launcher.to_string())
            .env(ADDRESS_VARIABLE, self.address.to_string())
            .env(TRANSPORT_VARIABLE, self.transport)
            .stdin(Stdio::null());
        match self.gpu {
            Some(gpu) => command.env(GPU_VARIABLE, gpu.to_string()),
            None => command.env_remove(GPU_VARIABLE),
        };
        match self.uses_nccl {
            true => command.env(NCCL_VARIABLE, "1"),
            false => command.env_remove(NCCL_VARIABLE),
        };
        if std::env::var_os(CONNECTIONS.0).is_none() {
            command.env(CONNECTIONS.0, CONNECTIONS.1);
        }
        command
    }
}
