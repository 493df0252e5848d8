//! The keeper: a process that takes a lab down if the process that makes or uses it ends.
//!
//! A pipe connects the two processes. The kernel closes it when a process ends, for whatever
//! reason, so no signal has to be handled, and even a process that was killed leaves no lab. The
//! keeper has its own process group, so ^C in the terminal does not reach it.

use crate::error::LabError;
use crate::teardown::remove;
use std::io::{Read, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// Tells the keeper that the lab belongs to this process: take it down when the process ends.
const OWN: u8 = b'o';
/// Tells the keeper that the lab stays.
const RELEASE: u8 = b'l';

/// How long a command may continue after the process that started it was killed. It can still make
/// a namespace in that time.
const SETTLE_TIME: Duration = Duration::from_millis(300);

/// A running keeper, as its owner sees it.
#[derive(Debug)]
pub(crate) struct Keeper {
    child: Child,
}

impl Keeper {
    /// Starts a keeper for the lab `id`. It runs `program` with the arguments `keeper ID`, which
    /// must call [`keep`].
    pub(crate) fn start(program: &Path, id: &str) -> Result<Self, LabError> {
        let child = Command::new(program)
            .args(["keeper", id])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .process_group(0)
            .spawn()
            .map_err(|error| LabError::system("start the process that keeps the lab", error))?;
        Ok(Self { child })
    }

    /// From now on the keeper takes the lab down when this process ends.
    pub(crate) fn own(&mut self) -> Result<(), LabError> {
        self.tell(OWN)
    }

    /// Ends the keeper and leaves the lab up.
    pub(crate) fn release(mut self) -> Result<(), LabError> {
        self.tell(RELEASE)?;
        self.end().map(drop)
    }

    fn tell(&mut self, message: u8) -> Result<(), LabError> {
        let pipe = self.child.stdin.as_mut().expect("invariant: the keeper has not been told to end");
        pipe.write_all(&[message]).map_err(|error| LabError::system("reach the process that keeps the lab", error))
    }

    /// Ends the keeper, which takes down a lab that this process owns. Returns whether it
    /// succeeded.
    pub(crate) fn end(&mut self) -> Result<bool, LabError> {
        drop(self.child.stdin.take());
        let status = self.child.wait().map_err(|error| LabError::system("wait for the process that keeps the lab", error))?;
        Ok(status.success())
    }
}

/// The work of the keeper's process: waits until standard input ends, then takes the lab `id` down
/// if its maker owned it to the end.
///
/// # Errors
/// [`LabError::NotRemoved`] if something could not be removed.
pub fn keep(id: &str) -> Result<(), LabError> {
    let mut last = None;
    let mut message = [0];
    while matches!(std::io::stdin().read(&mut message), Ok(1)) {
        last = Some(message[0]);
    }
    if last != Some(OWN) {
        return Ok(());
    }
    remove(id)?;
    std::thread::sleep(SETTLE_TIME);
    remove(id)
}
