//! A process that has joined a run as one of its ranks.

use crate::arena::{Arena, Arenas};
use crate::backend::cuda::Driver;
use crate::disk::Disk;
use crate::error::ExecutorError;
use crate::job::ReportSink;
use crate::stopping::StepGate;
use crate::transport::Transport;
use foretell_program::Rank;
use foretell_units::Bytes;
use std::sync::Arc;

/// A rank's connections and its device.
pub(crate) struct Member {
    pub(crate) rank: Rank,
    pub(crate) world_size: usize,
    /// The connection to the launcher, for reports.
    pub(crate) control: Arc<dyn ReportSink>,
    /// The connections to the other ranks.
    pub(crate) transport: Arc<dyn Transport>,
    /// The GPU that runs the kernels; `None` if the CPU does.
    pub(crate) device: Option<Arc<dyn Driver>>,
    /// The logical CPUs that the process might use before it was pinned to one.
    pub(crate) cpus: Vec<usize>,
    /// The file system that checkpoints are written to.
    pub(crate) disk: Arc<dyn Disk>,
    /// Lets the rank start its steps until the launcher stops it.
    pub(crate) gate: Arc<StepGate>,
}

impl Member {
    /// Allocates `size` bytes of the device's memory: the GPU's, or the host's without one.
    pub(crate) fn arena(&self, size: Bytes) -> Result<Arena, ExecutorError> {
        Ok(self.arenas(size, Bytes::ZERO)?.device)
    }

    /// Allocates arenas of these sizes on the device and on the host.
    pub(crate) fn arenas(&self, device: Bytes, host: Bytes) -> Result<Arenas, ExecutorError> {
        Arenas::new(device, host, self.device.as_ref())
    }
}
