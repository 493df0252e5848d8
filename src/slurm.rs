//! Slurm's commands: their output and their errors. Knows no plans and no runs.

use crate::failure::{Failure, code};
use foretell_topologies::SlurmNode;
use std::path::Path;
use std::process::Command;

/// A job as `squeue` lists it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlurmJob {
    /// Its number.
    pub id: u64,
    /// The job's name.
    pub name: String,
    /// Its state, such as `RUNNING`.
    pub state: String,
    /// How long it has run, as Slurm writes it.
    pub time: String,
    /// Number of its nodes.
    pub nodes: usize,
    /// Its nodes, or why it waits.
    pub place: String,
    /// Number of its CPUs.
    pub cpus: usize,
    /// The folder that it was submitted in.
    pub folder: String,
}

/// The fields that `squeue` prints of a job.
const FORMAT: &str = "%i|%T|%M|%D|%C|%R|%Z|%j";

/// Runs one of Slurm's commands, and returns what it printed.
pub fn ask(program: &str, arguments: &[&str], folder: &Path) -> Result<String, Failure> {
    let output = Command::new(program).args(arguments).current_dir(folder).env("FORETELL", this_program()).output();
    let output = output.map_err(|error| {
        let hint = "run this on a login node of a Slurm cluster, where `sinfo` works";
        Failure::undone(code::PROGRAM_NOT_STARTED, format!("`{program}` cannot be started: {error}")).hint(hint)
    })?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        let said = said.lines().next_back().unwrap_or("it gave no reason").trim_start_matches(&format!("{program}: error: "));
        let hint = format!("try `{program} {}` by hand", arguments.join(" "));
        return Err(Failure::undone(code::SLURM, format!("`{program}` failed: {said}")).hint(hint));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// The path of this program: the job's nodes run the same.
fn this_program() -> String {
    std::env::current_exe().map_or_else(|_| "foretell".into(), |path| path.to_string_lossy().into_owned())
}

/// All nodes of the cluster.
pub fn nodes() -> Result<Vec<SlurmNode>, Failure> {
    let text = ask("scontrol", &["show", "node", "--oneliner"], Path::new("."))?;
    SlurmNode::parse_all(&text).map_err(Failure::of_undone)
}

/// The jobs that wait or run: all, or one.
pub fn jobs(id: Option<u64>) -> Result<Vec<SlurmJob>, Failure> {
    let id = id.map(|id| id.to_string());
    let mut arguments = vec!["--noheader", "--states=all", "--format", FORMAT];
    if let Some(id) = &id {
        arguments.extend(["--jobs", id]);
    }
    let text = ask("squeue", &arguments, Path::new("."))?;
    Ok(text.lines().filter_map(read_job).collect())
}

/// Reads a line of `squeue`. The name comes last, since it may have any characters.
fn read_job(line: &str) -> Option<SlurmJob> {
    let fields: Vec<&str> = line.splitn(8, '|').map(str::trim).collect();
    let [id, state, time, nodes, cpus, place, folder, name] = fields[..] else { return None };
    Some(SlurmJob {
        // A job of an array is `12_3`, a part of a heterogeneous job `12+0`; the number before is
        // enough to find it.
        id: id.split(['_', '+']).next()?.parse().ok()?,
        name: name.into(),
        state: state.into(),
        time: time.into(),
        nodes: nodes.parse().ok()?,
        place: place.into(),
        cpus: cpus.parse().ok()?,
        folder: folder.into(),
    })
}

impl SlurmJob {
    /// Whether the job waits or runs.
    pub fn is_alive(&self) -> bool {
        !matches!(
            self.state.as_str(),
            "COMPLETED"
                | "FAILED"
                | "CANCELLED"
                | "TIMEOUT"
                | "NODE_FAIL"
                | "OUT_OF_MEMORY"
                | "BOOT_FAIL"
                | "DEADLINE"
                | "PREEMPTED"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_squeue_is_a_job_whatever_its_name() {
        let job = read_job("12_3|RUNNING|1:02|2|4|n[1-2]|/home/a b|x|y").expect("a job");
        assert_eq!((job.id, job.nodes, job.cpus, job.name.as_str(), job.folder.as_str()), (12, 2, 4, "x|y", "/home/a b"));
        assert!(job.is_alive());
        let part = read_job("12+0|PENDING|0:00|1|4|(Resources)|/home/a|x").expect("a job");
        assert_eq!((part.id, part.place.as_str()), (12, "(Resources)"));
        assert_eq!(read_job("slurm_load_jobs error"), None);
    }
}
