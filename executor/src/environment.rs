//! Environment variables by which a launcher tells a process which rank it is.

use std::time::Duration;

/// The rank.
pub(crate) const RANK_VARIABLE: &str = "FORETELL_RANK";
/// The number of ranks.
pub(crate) const WORLD_VARIABLE: &str = "FORETELL_WORLD_SIZE";
/// Address and port of the launcher's control server.
pub(crate) const LAUNCHER_VARIABLE: &str = "FORETELL_LAUNCHER";
/// The core to pin the rank to. Not set: the rank is not pinned.
pub(crate) const CORE_VARIABLE: &str = "FORETELL_CORE";
/// The IP address at which a rank listens for the TCP connections of others.
pub(crate) const ADDRESS_VARIABLE: &str = "FORETELL_ADDRESS";
/// How long a rank spins before it sleeps when it waits for a message, in microseconds.
pub(crate) const SPIN_VARIABLE: &str = "FORETELL_SPIN_MICROSECONDS";
/// `tcp`, `shared_memory`, `mixed` or `mpi`.
pub(crate) const TRANSPORT_VARIABLE: &str = "FORETELL_TRANSPORT";
/// The index of the rank's GPU. Not set: the rank runs kernels on its core.
pub(crate) const GPU_VARIABLE: &str = "FORETELL_GPU";
/// Set if the ranks' GPUs communicate through NCCL.
pub(crate) const NCCL_VARIABLE: &str = "FORETELL_NCCL";
/// Hardware queues of the CUDA driver: its variable, and the largest value that the driver takes
/// (the default is 8). Streams that share a queue block each other. A communication that waits for
/// another rank could then block the one that this rank waits for, forever.
pub(crate) const CONNECTIONS: (&str, &str) = ("CUDA_DEVICE_MAX_CONNECTIONS", "32");

/// How long ranks wait for each other at the start, in seconds. Not set: [`START_TIME`].
pub(crate) const START_VARIABLE: &str = "FORETELL_START_SECONDS";
/// The name of the foreign launcher that started this process, such as `torchrun`. Not set: it was
/// Foretell's own.
pub(crate) const STARTER_VARIABLE: &str = "FORETELL_STARTER";

/// How long ranks wait for each other at the start, by default.
pub(crate) const START_TIME: Duration = Duration::from_secs(30);
