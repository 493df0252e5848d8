//! The environment variables by which a launcher tells a process which rank it is.

use std::time::Duration;

pub(crate) const RANK_VARIABLE: &str = "FORETELL_RANK";
pub(crate) const WORLD_VARIABLE: &str = "FORETELL_WORLD_SIZE";
pub(crate) const LAUNCHER_VARIABLE: &str = "FORETELL_LAUNCHER";
pub(crate) const CORE_VARIABLE: &str = "FORETELL_CORE";
pub(crate) const ADDRESS_VARIABLE: &str = "FORETELL_ADDRESS";
pub(crate) const SPIN_VARIABLE: &str = "FORETELL_SPIN_MICROSECONDS";
pub(crate) const TRANSPORT_VARIABLE: &str = "FORETELL_TRANSPORT";
/// The GPU of a rank that has one.
pub(crate) const GPU_VARIABLE: &str = "FORETELL_GPU";
/// Set where the ranks' GPUs reach each other by NCCL.
pub(crate) const NCCL_VARIABLE: &str = "FORETELL_NCCL";
/// How many queues the driver has for streams, and the most that it takes: 8 unless set. Streams that share one hold each other up, and an
/// exchange that waits for another rank behind one that waits for this rank would do so forever.
pub(crate) const CONNECTIONS: (&str, &str) = ("CUDA_DEVICE_MAX_CONNECTIONS", "32");

/// How many seconds ranks wait for each other at the start, where that is not [`START_TIME`].
pub(crate) const START_VARIABLE: &str = "FORETELL_START_SECONDS";
/// Who started this process, where that was not Foretell's launcher.
pub(crate) const STARTER_VARIABLE: &str = "FORETELL_STARTER";

/// How long ranks wait for each other at the start.
pub(crate) const START_TIME: Duration = Duration::from_secs(30);
