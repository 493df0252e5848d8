//! The environment variables by which torchrun, `mpirun` and `srun` tell each process its rank.

use crate::error::ExecutorError;
use std::fmt;

/// More ranks than any launcher starts: a larger number is a mistake.
const MAX_RANKS: usize = 1 << 20;
/// The longest value of a variable that is read, in bytes. Slurm's lists of nodes are long.
const MAX_VARIABLE_BYTES: usize = 1 << 16;

/// The launcher that started the processes of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Starter {
    /// PyTorch's torchrun, or any launcher that sets `RANK`, `WORLD_SIZE` and `MASTER_ADDR` as it
    /// does.
    Torchrun,
    /// Open MPI's mpirun.
    OpenMpi,
    /// An MPI launcher with the process management interface, such as MPICH's or Intel's.
    Pmi,
    /// Slurm's srun.
    Slurm,
}

impl fmt::Display for Starter {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Starter::Torchrun => "torchrun",
            Starter::OpenMpi => "mpirun (Open MPI)",
            Starter::Pmi => "mpirun (PMI)",
            Starter::Slurm => "srun",
        })
    }
}

/// The environment variables of a process, checked as they are read. An empty variable counts as
/// unset.
pub(super) struct Variables<'a>(pub(super) &'a dyn Fn(&str) -> Option<String>);

impl Variables<'_> {
    /// The value without surrounding white space.
    ///
    /// # Errors
    /// If the value is very long or contains control characters.
    pub(super) fn text(&self, name: &str) -> Result<Option<String>, ExecutorError> {
        match (self.0)(name).map(|text| text.trim().to_owned()).filter(|text| !text.is_empty()) {
            Some(text) if text.len() > MAX_VARIABLE_BYTES || text.contains(|c: char| c.is_control()) => {
                Err(invalid_variable(name, &text, "a line of text"))
            }
            text => Ok(text),
        }
    }

    /// The value as a number of at most `maximum`.
    pub(super) fn number(&self, name: &str, maximum: usize) -> Result<Option<usize>, ExecutorError> {
        let number = |text: String| {
            let number = text.parse().ok().filter(|&number| number <= maximum);
            number.ok_or_else(|| invalid_variable(name, &text, &format!("a number up to {maximum}")))
        };
        self.text(name)?.map(number).transpose()
    }

    /// The value of the first of these variables that is set.
    fn first_text(&self, names: &[&str]) -> Result<Option<String>, ExecutorError> {
        names.iter().find_map(|name| self.text(name).transpose()).transpose()
    }

    /// The number in the first of these variables that is set.
    fn first_number(&self, names: &[&str], maximum: usize) -> Result<Option<usize>, ExecutorError> {
        names.iter().find_map(|name| self.number(name, maximum).transpose()).transpose()
    }
}

/// The error for a variable whose value is not `expected`.
pub(super) fn invalid_variable(name: &str, value: &str, expected: &str) -> ExecutorError {
    // Enough of a long value to recognise it.
    let start: String = value.chars().take(40).flat_map(char::escape_debug).collect();
    ExecutorError::Unsupported {
        what: format!("a rank whose environment has `{name}={start}`, which is not {expected},"),
        hint: format!("unset {name} to start all ranks on this machine, or let your launcher set it"),
    }
}

/// The numbers that one process was given, before the host of rank 0 is certain.
pub(super) struct StartedRank {
    pub(super) starter: Starter,
    pub(super) rank: usize,
    /// The number of ranks.
    pub(super) size: usize,
    /// The rank's number on its machine.
    pub(super) local_rank: Option<usize>,
    /// The number of machines; `None` where the environment does not say.
    pub(super) nodes: Option<usize>,
    /// The host of rank 0; `None` where the launcher's own variables do not say.
    pub(super) host: Option<String>,
    /// Equal on all ranks of a run, and different from other runs' ids.
    pub(super) run_id: String,
}

/// The names of a launcher's variables.
struct VariableNames<'a> {
    rank: &'a str,
    size: &'a str,
    local_rank: &'a str,
    /// The number of ranks on this machine; `None` if the launcher has no such variable.
    local_size: Option<&'a str>,
}

impl StartedRank {
    /// Reads the variables of the launcher that started this process; `None` if none did.
    ///
    /// An MPI launcher inside a Slurm job leaves Slurm's variables of its own steps in place, so
    /// its variables win where the two disagree. `srun` may set those of an MPI library as well;
    /// then they agree.
    pub(super) fn find(variables: &Variables<'_>) -> Result<Option<Self>, ExecutorError> {
        if let Some(own) = Self::torchrun(variables)? {
            return Ok(Some(own));
        }
        if let Some(own) = Self::open_mpi(variables)? {
            return Ok(Some(own));
        }
        match (Self::pmi(variables)?, Self::slurm(variables)?) {
            (Some(mpi), Some(slurm)) if (mpi.rank, mpi.size) != (slurm.rank, slurm.size) => Ok(Some(mpi)),
            (mpi, slurm) => Ok(slurm.or(mpi)),
        }
    }

    fn torchrun(variables: &Variables<'_>) -> Result<Option<Self>, ExecutorError> {
        let names =
            VariableNames { rank: "RANK", size: "WORLD_SIZE", local_rank: "LOCAL_RANK", local_size: Some("LOCAL_WORLD_SIZE") };
        let Some(own) = Self::read(variables, Starter::Torchrun, &names)? else { return Ok(None) };
        let parts = ["TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_PORT"];
        let [run, restarts, port] = parts.map(|name| variables.text(name).map(Option::unwrap_or_default));
        Ok(Some(Self { run_id: format!("{}-{}-{}", run?, restarts?, port?), ..own }))
    }

    fn open_mpi(variables: &Variables<'_>) -> Result<Option<Self>, ExecutorError> {
        let names = VariableNames {
            rank: "OMPI_COMM_WORLD_RANK",
            size: "OMPI_COMM_WORLD_SIZE",
            local_rank: "OMPI_COMM_WORLD_LOCAL_RANK",
            local_size: Some("OMPI_COMM_WORLD_LOCAL_SIZE"),
        };
        let Some(own) = Self::read(variables, Starter::OpenMpi, &names)? else { return Ok(None) };
        let run_id = variables.first_text(&["PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"])?.unwrap_or_default();
        Ok(Some(Self { run_id, ..own }))
    }

    fn pmi(variables: &Variables<'_>) -> Result<Option<Self>, ExecutorError> {
        let names = VariableNames {
            rank: "PMI_RANK",
            size: "PMI_SIZE",
            local_rank: "MPI_LOCALRANKID",
            local_size: Some("MPI_LOCALNRANKS"),
        };
        let Some(own) = Self::read(variables, Starter::Pmi, &names)? else { return Ok(None) };
        let run_id = variables.first_text(&["PMI_JOBID", "PBS_JOBID", "LSB_JOBID"])?.unwrap_or_default();
        Ok(Some(Self { run_id, ..own }))
    }

    fn slurm(variables: &Variables<'_>) -> Result<Option<Self>, ExecutorError> {
        // A batch script and an allocation's shell have some of Slurm's variables without being
        // ranks. Only `srun` sets a step.
        let Some(step) = variables.first_text(&["SLURM_STEP_ID", "SLURM_STEPID"])? else { return Ok(None) };
        let has_step_size = variables.text("SLURM_STEP_NUM_TASKS")?.is_some();
        let names = VariableNames {
            rank: "SLURM_PROCID",
            size: if has_step_size { "SLURM_STEP_NUM_TASKS" } else { "SLURM_NTASKS" },
            local_rank: "SLURM_LOCALID",
            local_size: None,
        };
        let Some(own) = Self::read(variables, Starter::Slurm, &names)? else { return Ok(None) };
        let nodes = variables.first_number(&["SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES"], MAX_RANKS)?;
        let list = variables.first_text(&["SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST"])?;
        let job = variables.first_text(&["SLURM_JOB_ID", "SLURM_JOBID"])?.unwrap_or_default();
        Ok(Some(Self { nodes, host: list.as_deref().map(first_host), run_id: format!("{job}.{step}"), ..own }))
    }

    /// Reads the variables with these names. Returns `None` unless both the rank and the size are
    /// set.
    fn read(variables: &Variables<'_>, starter: Starter, names: &VariableNames<'_>) -> Result<Option<Self>, ExecutorError> {
        let (rank, size) = (variables.number(names.rank, MAX_RANKS)?, variables.number(names.size, MAX_RANKS)?);
        let (Some(rank), Some(size)) = (rank, size) else { return Ok(None) };
        if rank >= size {
            return Err(invalid_variable(names.rank, &rank.to_string(), &format!("a number below `{}={size}`", names.size)));
        }
        let local_rank = variables.number(names.local_rank, MAX_RANKS)?;
        let local_size = names.local_size.map(|name| variables.number(name, MAX_RANKS)).transpose()?.flatten();
        let nodes = local_size.filter(|&count| count > 0).map(|count| size.div_ceil(count));
        Ok(Some(Self { starter, rank, size, local_rank, nodes, host: None, run_id: String::new() }))
    }
}

/// The first host of a Slurm list, such as `gpu003` of `gpu[003-005,9],login`.
fn first_host(list: &str) -> String {
    let end = list.find([',', '[']).unwrap_or(list.len());
    let (head, rest) = list.split_at(end);
    let Some(inside) = rest.strip_prefix('[') else { return head.to_owned() };
    let first = inside.split([',', '-', ']']).next().unwrap_or_default();
    let tail = inside.split_once(']').map_or("", |(_, tail)| tail.split(',').next().unwrap_or_default());
    // A list may have several ranges: `rack[1-2]node[3-4]`.
    format!("{head}{first}{}", if tail.is_empty() { String::new() } else { first_host(tail) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_host_of_a_list_is_found() {
        for (list, first) in [
            ("alone", "alone"),
            ("a,b", "a"),
            ("gpu[3,5-7],login", "gpu3"),
            ("gpu[003-005]", "gpu003"),
            ("rack[1-2]node[03-04]-ib", "rack1node03-ib"),
            ("rack[1-2]-x,other[1-2]", "rack1-x"),
            ("broken[", "broken"),
            ("", ""),
        ] {
            assert_eq!(first_host(list), first, "{list}");
        }
    }
}
