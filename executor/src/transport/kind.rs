//! The transports that a user can choose.

use serde::{Deserialize, Serialize};

/// The transport between ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TransportKind {
    /// Shared memory if Foretell's launcher starts the ranks; TCP if an external launcher does.
    #[default]
    SharedMemory,
    /// TCP, also over the loopback interface of one machine.
    Tcp,
    /// Open MPI, whose `mpirun` starts the ranks.
    Mpi,
}
