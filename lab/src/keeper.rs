//! The keeper: a process that takes a lab down when the one that makes or uses it has ended.
//!
//! The two are joined by a pipe, which the system closes when a process ends, however it ends; so no signal needs handling, and
//! also a process that was killed leaves no lab behind. The keeper is in a process group of its own, out of the reach of a terminal's ^C.

use crate::error::LabError;
use crate::teardown::remove;
use std::io::{Read, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// The lab is this process's: take it down if it ends.
const OWN: u8 = b'o';
/// The lab is to stay.
const LEAVE: u8 = b'l';

/// How long what a killed process had begun may go on: a command that makes a namespace.
const SETTLE: Duration = Duration::from_millis(300);

/// The side of the process that has a keeper.
#[derive(Debug)]
pub(crate) struct Keeper {
    child: Child,
}

impl Keeper {
    /// Starts a keeper for the lab `id`: `program` again, with the arguments `keeper ID`, upon which it calls [`keep`].
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

    /// From now on the lab is taken down when this process ends.
    pub(crate) fn own(&mut self) -> Result<(), LabError> {
        self.tell(OWN)
    }

    /// Lets the lab stay, and the keeper go.
    pub(crate) fn leave(mut self) -> Result<(), LabError> {
        self.tell(LEAVE)?;
        self.end().map(drop)
    }

    fn tell(&mut self, word: u8) -> Result<(), LabError> {
        let written = self.child.stdin.as_mut().map(|pipe| pipe.write_all(&[word]));
        written.unwrap_or(Ok(())).map_err(|error| LabError::system("reach the process that keeps the lab", error))
    }

    /// Has the keeper do what is left to do; whether it did it.
    pub(crate) fn end(&mut self) -> Result<bool, LabError> {
        drop(self.child.stdin.take());
        let status = self.child.wait().map_err(|error| LabError::system("wait for the process that keeps the lab", error))?;
        Ok(status.success())
    }
}

/// Keeps the lab `id` until standard input ends: what the keeper's process does.
///
/// # Errors
/// [`LabError::NotRemoved`] where something could not be removed.
pub fn keep(id: &str) -> Result<(), LabError> {
    let mut last = None;
    let mut word = [0];
    while matches!(std::io::stdin().read(&mut word), Ok(1)) {
        last = Some(word[0]);
    }
    if last != Some(OWN) {
        return Ok(());
    }
    remove(id)?;
    std::thread::sleep(SETTLE);
    remove(id)
}
