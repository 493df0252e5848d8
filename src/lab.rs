//! `foretell lab`: the described hosts, made of network namespaces on this machine; and how `execute` and `calibrate` come to run in them.

use crate::calibrate::{launch_options, this_program};
use crate::execute::executable_in;
use crate::failure::Failure;
use crate::inputs;
use crate::output;
use clap::{Args, Subcommand};
use foretell_executor::{LaunchOptions, Slot, TransportKind, World};
use foretell_lab::{Lab, LabError, enter, labs, take_down};
use foretell_topologies::Topology;
use serde_json::json;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::ExitCode;

/// Make the hosts that a topology file with `lab: true` describes, of network namespaces on this machine
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
    /// Make the hosts, their links and switches; they stay until they are taken down
    Up(Which),
    /// Take everything down, also what a crash left
    Down {
        /// The topology's name or file
        #[arg(long, required_unless_present = "all")]
        topology: Option<String>,
        /// Take down every lab of this machine
        #[arg(long, conflicts_with = "topology")]
        all: bool,
    },
    /// Run a command in a node
    Exec {
        #[command(flatten)]
        which: Which,
        /// The node, as `up` lists it
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
    /// How many of the topology's node template there are
    #[arg(long, value_name = "N")]
    nodes: Option<usize>,
}

/// Runs the command; a command run in a node gives its own status.
pub fn run(arguments: &Arguments, json: bool) -> Result<ExitCode, Failure> {
    match &arguments.command {
        Command::Up(which) => up(which, json)?,
        Command::Down { topology, .. } => down(topology.as_deref(), json)?,
        Command::Exec { which, node, command } => return exec(which, node, command, json),
    }
    Ok(ExitCode::SUCCESS)
}

fn up(which: &Which, json: bool) -> Result<(), Failure> {
    let topology = inputs::topology(&which.topology, which.nodes)?;
    let lab = Lab::up(&topology, &this_program()?)?;
    if json {
        return output::json(&json!({"lab": topology.name(), "nodes": lab.hosts()}));
    }
    for host in lab.hosts() {
        output::line(&format!("{:<12} {:<12} {}", host.name, host.address, host.namespace))?;
    }
    output::line(&format!("the lab is up; `foretell lab down --topology {}` takes it down", which.topology))
}

fn down(topology: Option<&str>, json: bool) -> Result<(), Failure> {
    let mut found = false;
    match topology {
        // By its name, so that also a lab whose file is gone can be taken down.
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
        return output::json(&json!({"taken_down": found}));
    }
    output::line(if found { "the lab is down" } else { "there was no lab" })
}

fn exec(which: &Which, node: &str, command: &[String], json: bool) -> Result<ExitCode, Failure> {
    let topology = inputs::topology(&which.topology, which.nodes)?;
    let lab = Lab::find(&topology)?.ok_or_else(|| LabError::IsDown { name: topology.name().into() })?;
    let first_device = lab.host(node)?.devices.first().map_or(0, |device| device.number);
    let slots = lab.slots();
    slots.get(first_device).map_or(Ok(()), enter)?;
    let Some((program, words)) = command.split_first() else { return Ok(ExitCode::SUCCESS) };
    let refused = |error: std::io::Error| Failure::Input(format!("`{program}` cannot be started: {error}; hint: check its name"));
    let mut command = std::process::Command::new(program);
    command.args(words);
    if !json {
        // Only comes back where it fails.
        return Err(refused(command.exec()));
    }
    let ended = command.output().map_err(refused)?;
    output::json(&json!({
        "status": ended.status.code(),
        "signal": ended.status.signal(),
        "stdout": String::from_utf8_lossy(&ended.stdout),
        "stderr": String::from_utf8_lossy(&ended.stderr),
    }))?;
    Ok(if ended.status.success() { ExitCode::SUCCESS } else { ExitCode::from(1) })
}

/// Where ranks run: on this machine, or in a lab, which is up as long as this is there.
pub struct Ground {
    lab: Option<Lab>,
    /// How ranks are started there.
    pub options: LaunchOptions,
}

impl Ground {
    /// That of a topology. A lab that is not up is brought up, and taken down by [`close`](Self::close), or however else this process ends.
    /// Where somebody else started the ranks, they are where they are.
    pub fn of(
        topology: &Topology,
        transport: TransportKind,
        logs: Option<PathBuf>,
        world: Option<World>,
    ) -> Result<Self, Failure> {
        let mut options = launch_options(transport, logs)?;
        options.backend = executable_in(topology, world.as_ref())?;
        options.world = world;
        if !topology.is_lab() {
            return Ok(Self { lab: None, options });
        }
        let lab = Lab::open(topology, &options.program)?;
        options.slots = lab.slots();
        Ok(Self { lab: Some(lab), options })
    }

    /// Where each device of a lab is; none on this machine itself.
    pub fn slots(&self) -> &[Slot] {
        &self.options.slots
    }

    /// Takes a lab down that was brought up for this process.
    pub fn close(self) -> Result<(), Failure> {
        Ok(self.lab.map_or(Ok(()), Lab::close)?)
    }
}
