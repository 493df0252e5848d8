//! The state files: one for each lab that was brought up, written once the lab is complete.

use crate::blueprint::Host;
use crate::error::LabError;
use foretell_executor::write_whole;
use foretell_topologies::Topology;
use serde::{Deserialize, Serialize};
use std::fs;
use std::path::{Path, PathBuf};

/// The folder of the state files. Like the labs, they do not survive a restart of the machine.
const FOLDER: &str = "/run/foretell/labs";

/// The description of a lab that is up.
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

    /// Reads the state of a lab; `None` if there is no file or it cannot be read.
    pub(crate) fn read(id: &str) -> Option<Self> {
        serde_json::from_slice(&fs::read(path(id)).ok()?).ok()
    }
}

/// Deletes the state of a lab, if it has one.
pub(crate) fn forget(id: &str) {
    let _ = fs::remove_file(path(id));
}

/// The ids of the labs that have a state file.
pub(crate) fn known() -> Vec<String> {
    let files = fs::read_dir(FOLDER).into_iter().flatten().flatten();
    files.filter_map(|file| Some(file.file_name().to_str()?.strip_suffix(".json")?.to_owned())).collect()
}
