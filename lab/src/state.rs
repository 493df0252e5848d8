//! The state files: which labs are up, and what each is made of. Written whole, and only when the lab is.

use crate::blueprint::Host;
use crate::error::LabError;
use foretell_executor::write_whole;
use foretell_topologies::Topology;
use serde::{Deserialize, Serialize};
use std::fs;
use std::path::{Path, PathBuf};

/// Where the state files lie: gone after a restart of the machine, as the labs are.
const FOLDER: &str = "/run/foretell/labs";

/// What is known of a lab that is up.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct State {
    /// The topology that it was made of.
    pub(crate) topology: Topology,
    /// Its hosts.
    pub(crate) hosts: Vec<Host>,
}

fn path(id: &str) -> PathBuf {
    Path::new(FOLDER).join(format!("{id}.json"))
}

impl State {
    pub(crate) fn write(&self, id: &str) -> Result<(), LabError> {
        let text = serde_json::to_vec_pretty(self).map_err(|error| LabError::system("write the lab's state", error))?;
        Ok(write_whole(&path(id), &text)?)
    }

    /// Of a lab that is up; a file that cannot be read is that of none.
    pub(crate) fn read(id: &str) -> Option<Self> {
        serde_json::from_slice(&fs::read(path(id)).ok()?).ok()
    }
}

/// Forgets a lab.
pub(crate) fn forget(id: &str) {
    // It may never have been written.
    let _ = fs::remove_file(path(id));
}

/// The labs that have a state file.
pub(crate) fn known() -> Vec<String> {
    let files = fs::read_dir(FOLDER).into_iter().flatten().flatten();
    files.filter_map(|file| Some(file.file_name().to_str()?.strip_suffix(".json")?.to_owned())).collect()
}
