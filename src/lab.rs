//! `foretell lab`: creates described hosts as network namespaces on this machine, and removes them.

use crate::failure::{Failure, code};
use crate::inputs;
use crate::launch::this_program;
use crate::output;
use clap::{Args, Subcommand};
use foretell_lab::{Host, Lab, LabError, enter, labs, take_down};
use schemars::JsonSchema;
use serde::Serialize;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::ExitCode;

/// Make the hosts of a topology file that says `lab: true`, from network namespaces on this machine
#[derive(Debug, Args)]
#[command(
    after_help = "Example:\n  foretell lab up --topology lab-2x1g\n  foretell lab exec --topology lab-2x1g host-0 -- ip route\n  foretell lab down --topology lab-2x1g"
)]
pub struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Make the hosts, links and switches; they stay until `down`
    Up(Which),
    /// Remove everything, including what a crash left
    Down {
        /// The topology's name or file
        #[arg(long, required_unless_present = "all")]
        topology: Option<String>,
        /// Remove every lab on this machine
        #[arg(long, conflicts_with = "topology")]
        all: bool,
    },
    /// Run a command on a node
    Exec {
        #[command(flatten)]
        which: Which,
        /// The node's name, as `up` lists it
        node: String,
        /// The command
        #[arg(required = true, last = true)]
        command: Vec<String>,
    },
}

#[derive(Debug, Args)]
struct Which {
    /// A library name (see `foretell topologies`) or a topology file that says `lab: true`
    #[arg(long)]
    topology: String,
    /// Number of nodes of the topology's node template
    #[arg(long, value_name = "N")]
    nodes: Option<usize>,
}

/// Runs the command. If it runs a command on a node, that command's exit status is returned.
pub fn run(arguments: &Arguments, json: bool) -> Result<ExitCode, Failure> {
    match &arguments.command {
        Command::Up(which) => up(which, json)?,
        Command::Down { topology, .. } => down(topology.as_deref(), json)?,
        Command::Exec { which, node, command } => return exec(which, node, command, json),
    }
    Ok(ExitCode::SUCCESS)
}

/// The document of `lab up`.
#[derive(Debug, Serialize, JsonSchema)]
pub struct LabUpAnswer {
    /// The topology's name.
    lab: String,
    /// The hosts.
    nodes: Vec<Host>,
}

/// The document of `lab down`.
#[derive(Debug, Serialize, JsonSchema)]
pub struct LabDownAnswer {
    /// Whether there was a lab.
    taken_down: bool,
}

/// The document of `lab exec`.
#[derive(Debug, Serialize, JsonSchema)]
pub struct LabExecAnswer {
    /// The command's exit status.
    status: Option<i32>,
    /// The signal that ended it.
    signal: Option<i32>,
    /// Its standard output.
    stdout: String,
    /// Its standard error.
    stderr: String,
}

fn up(which: &Which, json: bool) -> Result<(), Failure> {
    let topology = inputs::topology(&which.topology, which.nodes)?;
    let program = this_program()?;
    let lab = output::with_spinner("lab", || Lab::up(&topology, &program))?;
    if json {
        return output::json(&LabUpAnswer { lab: topology.name().into(), nodes: lab.hosts().to_vec() });
    }
    for host in lab.hosts() {
        output::line(&format!("{:<12} {:<12} {}", host.name, host.address, host.namespace))?;
    }
    output::line(&format!("the lab is up; `foretell lab down --topology {}` takes it down", which.topology))
}

fn down(topology: Option<&str>, json: bool) -> Result<(), Failure> {
    let mut found = false;
    match topology {
        // The name alone suffices, so a lab can be removed even if its topology file is gone.
        Some(name) => {
            let named = inputs::topology(name, None).map(|topology| topology.name().to_owned());
            found |= take_down(&named.unwrap_or_else(|_| name.to_owned()))?;
        }
        None => {
            for id in labs() {
                found |= take_down(&id)?;
            }
        }
    }
    if json {
        return output::json(&LabDownAnswer { taken_down: found });
    }
    output::line(if found { "the lab is down" } else { "there was no lab" })
}

fn exec(which: &Which, node: &str, command: &[String], json: bool) -> Result<ExitCode, Failure> {
    let topology = inputs::topology(&which.topology, which.nodes)?;
    let lab = Lab::find(&topology)?.ok_or_else(|| LabError::IsDown { name: topology.name().into() })?;
    let first_device = lab.host(node)?.devices.first().expect("invariant: a node has a device").number;
    let slots = lab.slots();
    enter(slots.get(first_device).expect("invariant: every device has a slot"))?;
    let Some((program, words)) = command.split_first() else { return Ok(ExitCode::SUCCESS) };
    let refused = |error: std::io::Error| {
        Failure::input(code::PROGRAM_NOT_STARTED, format!("`{program}` cannot be started: {error}")).hint("check its name")
    };
    let mut command = std::process::Command::new(program);
    command.args(words);
    if !json {
        // `exec` returns only on failure.
        return Err(refused(command.exec()));
    }
    let ended = command.output().map_err(refused)?;
    output::json(&LabExecAnswer {
        status: ended.status.code(),
        signal: ended.status.signal(),
        stdout: String::from_utf8_lossy(&ended.stdout).into(),
        stderr: String::from_utf8_lossy(&ended.stderr).into(),
    })?;
    Ok(if ended.status.success() { ExitCode::SUCCESS } else { ExitCode::from(1) })
}
