//! How a run's ranks are to be started.

use super::slots::RankSlot;
use crate::backend_kind::BackendKind;
use crate::rendezvous::World;
use crate::signals::StopSignals;
use crate::transport::TransportKind;
use std::path::PathBuf;
use std::time::Duration;

/// How to start the ranks of a run.
#[derive(Clone, Debug)]
pub struct LaunchOptions {
    /// The program to start, which calls [`crate::run_rank`] when its first argument is `rank`.
    pub program: PathBuf,
    /// The transport between ranks.
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
    /// The signals that stop a training run after a checkpoint. `None` leaves signals as they are.
    pub signals: Option<StopSignals>,
    /// How long a rank may send no sign of life before the run ends and names it.
    pub peer_timeout: Duration,
}

impl LaunchOptions {
    /// The usual [`peer_timeout`](Self::peer_timeout): ten heartbeats.
    pub const PEER_TIMEOUT: Duration = Duration::from_secs(10);
}
