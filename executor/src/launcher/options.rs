//! How a run's ranks are to be started.

use super::slots::RankSlot;
use crate::backend_kind::BackendKind;
use crate::rendezvous::World;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// The transport between ranks of one machine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TransportKind {
    /// Shared memory.
    #[default]
    SharedMemory,
    /// TCP over the loopback interface, as between machines.
    Tcp,
}

/// How to start the ranks of a run.
#[derive(Clone, Debug)]
pub struct LaunchOptions {
    /// The program to start, which calls [`crate::run_rank`] when its first argument is `rank`.
    pub program: PathBuf,
    /// The transport between ranks of one machine.
    pub transport: TransportKind,
    /// The folder for the ranks' logs, one file per rank. `None` leaves them on standard error.
    pub logs: Option<PathBuf>,
    /// The slots of a lab, which ranks take in turn. Empty to use the cores of this machine.
    pub slots: Vec<RankSlot>,
    /// The backend that runs the kernels.
    pub backend: BackendKind,
    /// The processes that an external launcher started; this process is the first of them. `None`
    /// to start every rank on this machine.
    pub world: Option<World>,
}
