//! The signals that ask a run to stop: SIGTERM, SIGINT (Ctrl-C) and SIGUSR1 (Slurm's warning).

use crate::error::ExecutorError;
use signal_hook::consts::{SIGINT, SIGTERM, SIGUSR1};
use signal_hook::flag;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

const SIGNALS: [i32; 3] = [SIGTERM, SIGINT, SIGUSR1];

/// The last signal that asked this process to stop. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct StopSignals {
    received: Arc<AtomicUsize>,
}

impl StopSignals {
    /// Catches the signals from here on. A second SIGTERM or SIGINT ends the process at once.
    ///
    /// # Errors
    /// [`ExecutorError::System`] if the system refuses.
    pub fn catch() -> Result<Self, ExecutorError> {
        let (signals, is_second) = (Self::default(), Arc::new(AtomicBool::new(false)));
        let register = || -> std::io::Result<()> {
            for signal in SIGNALS {
                // Handlers run in this order: the first signal only arms the second.
                if signal != SIGUSR1 {
                    flag::register_conditional_shutdown(signal, 128 + signal, Arc::clone(&is_second))?;
                    flag::register(signal, Arc::clone(&is_second))?;
                }
                flag::register_usize(signal, Arc::clone(&signals.received), signal as usize)?;
            }
            Ok(())
        };
        register().map_err(|error| ExecutorError::system("catch the signals that stop a run", error))?;
        Ok(signals)
    }

    /// The last signal that asked to stop, if there was one.
    pub fn received(&self) -> Option<i32> {
        match self.received.load(Ordering::Relaxed) {
            0 => None,
            signal => Some(signal as i32),
        }
    }
}
