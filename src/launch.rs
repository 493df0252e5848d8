//! Where and how ranks start: on this machine or in a lab, on CPU cores or GPUs. Shared by
//! `execute`, `calibrate`, `run` and `lab`.

use crate::failure::{Failure, code};
use foretell_executor::backend::devices;
use foretell_executor::{BackendKind, LaunchOptions, RankSlot, TransportKind, World, machine};
use foretell_lab::Lab;
use foretell_topologies::{Architecture, Topology};
use foretell_units::diagnostic::help;
use std::path::PathBuf;

/// The hosts on which ranks run: this machine, or a lab that stays up while this value lives.
pub struct Hosts {
    lab: Option<Lab>,
    /// How ranks are started there.
    pub options: LaunchOptions,
}

impl Hosts {
    /// Opens the hosts of a topology. A lab that is not up is brought up; it goes down with
    /// [`close`](Self::close) or with the end of this process. `world` describes ranks that another
    /// launcher (torchrun, Slurm) started; they are not moved.
    pub fn open(
        topology: &Topology,
        transport: TransportKind,
        logs: Option<PathBuf>,
        world: Option<World>,
    ) -> Result<Self, Failure> {
        let mut options = launch_options(transport, logs)?;
        options.backend = backend_for(topology, world.as_ref())?;
        options.world = world;
        if !topology.is_lab() {
            return Ok(Self { lab: None, options });
        }
        let lab = Lab::open(topology, &options.program)?;
        options.slots = lab.slots();
        Ok(Self { lab: Some(lab), options })
    }

    /// The slot of each device of a lab; empty on this machine itself.
    pub fn slots(&self) -> &[RankSlot] {
        &self.options.slots
    }

    /// Takes the lab down if this process brought it up.
    pub fn close(self) -> Result<(), Failure> {
        Ok(self.lab.map_or(Ok(()), Lab::close)?)
    }
}

/// As [`backend_for`], for ranks that this process starts.
pub fn backend_here(topology: &Topology) -> Result<BackendKind, Failure> {
    backend_for(topology, None)
}

/// Returns the backend for a topology's devices. Refuses devices that are not on this machine, and
/// a topology whose number of nodes differs from the one on which another launcher started the
/// ranks.
pub fn backend_for(topology: &Topology, world: Option<&World>) -> Result<BackendKind, Failure> {
    let name = topology.name();
    let refused = |why: String, hint: &str| Err(Failure::input(code::OTHER_MACHINE, why).hint(hint));
    let mut architectures: Vec<Architecture> = topology.device_kinds().iter().map(|kind| kind.architecture).collect();
    architectures.dedup();
    let backend = match architectures[..] {
        [Architecture::Cpu] => BackendKind::Cpu,
        [Architecture::Gpu] => match devices() {
            Ok(gpus) if !gpus.is_empty() => BackendKind::Cuda { gpus: gpus.len() },
            Ok(_) => return refused(format!("the devices of `{name}` are GPUs, but the driver lists none"), "use `local`"),
            Err(error) => {
                let hint = help(&error).map_or_else(|| "use `local`".to_owned(), |help| format!("{help}, or use `local`"));
                return refused(format!("the GPUs of `{name}` cannot be used: {error}"), &hint);
            }
        },
        _ => {
            return refused(format!("this machine does not have the devices of `{name}`"), "use `local` or `local-gpus`");
        }
    };
    if let Some(world) = world {
        let (started, nodes) = (world.nodes.unwrap_or(topology.node_count()), topology.node_count());
        if topology.is_lab() || started != nodes {
            let why = format!("{} started ranks on {started} nodes, but `{name}` has {nodes}", world.starter);
            let hint = if topology.is_lab() {
                "only `foretell execute` can start the ranks of a lab"
            } else {
                "use a topology with as many nodes"
            };
            return refused(why, hint);
        }
    } else if topology.node_count() > 1 && !topology.is_lab() {
        let nodes = topology.node_count();
        let hint = "use `local`, or a topology that says `lab: true`, whose hosts are made on this machine";
        return refused(format!("`{name}` has {nodes} nodes, but this is one machine"), hint);
    }
    Ok(backend)
}

/// Refuses more ranks than this machine has cores or GPUs, whatever its topology file states,
/// unless `oversubscribe` allows it. A lab's devices may share cores; its calibration measures how
/// fast they then are.
pub fn enough_devices(ranks: usize, topology: &Topology, backend: BackendKind, oversubscribe: bool) -> Result<(), Failure> {
    if topology.is_lab() {
        return Ok(());
    }
    let (devices, each) = match backend {
        BackendKind::Cpu => (machine::core_count(), "core"),
        BackendKind::Cuda { gpus } => (gpus, "GPU"),
    };
    if ranks > devices && !oversubscribe {
        let hint = "use a smaller layout, or `--oversubscribe` to check this one without timing it";
        return Err(Failure::input(
            code::TOO_FEW_DEVICES,
            format!("{ranks} ranks need a {each} each, but this machine has {devices}"),
        )
        .hint(hint));
    }
    Ok(())
}

/// The path of this program, which starts itself again for ranks and for labs.
pub fn this_program() -> Result<PathBuf, Failure> {
    std::env::current_exe()
        .map_err(|error| Failure::undone(code::SYSTEM, format!("this program cannot find its own file: {error}")))
}

/// Options that start ranks as this program again, on this machine's cores.
fn launch_options(transport: TransportKind, logs: Option<PathBuf>) -> Result<LaunchOptions, Failure> {
    Ok(LaunchOptions {
        program: this_program()?,
        transport,
        logs,
        slots: Vec::new(),
        backend: BackendKind::Cpu,
        world: None,
        signals: None,
        peer_timeout: LaunchOptions::PEER_TIMEOUT,
    })
}
