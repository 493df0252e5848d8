//! A process that has joined a run as one of its ranks, with everything that connects it to the others.

use crate::arena::{Arena, Arenas};
use crate::backend::cuda::Driver;
use crate::error::ExecutorError;
use crate::transport::{ControlClient, Transport};
use foretell_program::Rank;
use foretell_units::Bytes;
use std::sync::Arc;

/// A process that has joined a run.
pub(crate) struct Member {
    pub(crate) rank: Rank,
    pub(crate) world_size: usize,
    pub(crate) control: Arc<ControlClient>,
    pub(crate) transport: Arc<dyn Transport>,
    /// The GPU on which it runs kernels; none where the processor does.
    pub(crate) device: Option<Arc<dyn Driver>>,
}

impl Member {
    /// Memory for a rank's arena: the host's, or that of the rank's GPU.
    pub(crate) fn arena(&self, size: Bytes) -> Result<Arena, ExecutorError> {
        Ok(self.arenas(size, Bytes::ZERO)?.device)
    }

    /// The same with what it has in the host's memory.
    pub(crate) fn arenas(&self, device: Bytes, host: Bytes) -> Result<Arenas, ExecutorError> {
        Arenas::new(device, host, self.device.as_ref())
    }
}
