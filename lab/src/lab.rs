//! Labs that are up: made, found, used and taken down.

use crate::blueprint::{Blueprint, Host, PREFIX, identifier};
use crate::control_group::Hierarchy;
use crate::error::LabError;
use crate::keeper::Keeper;
use crate::machine;
use crate::state::{self, State};
use foretell_executor::{Place, machine as cores};
use foretell_topologies::Topology;
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use std::collections::BTreeSet;
use std::fs::File;
use std::os::fd::AsFd;
use std::path::Path;
use std::time::{Duration, Instant};

/// What stands between a topology's name and the number of the process that a passing lab belongs to.
const OWNER: char = '~';

/// How long processes may take to end when a lab is taken down.
const PATIENCE: Duration = Duration::from_secs(5);

/// A lab that is up. One that was made for this process only is taken down when it is dropped.
#[derive(Debug)]
pub struct Lab {
    id: String,
    hosts: Vec<Host>,
    keeper: Option<Keeper>,
}

impl Lab {
    /// Makes a lab that stays until it is taken down. `program` is this program, started again as the lab's keeper meanwhile.
    ///
    /// # Errors
    /// [`LabError`]: it is up already, cannot be made of this topology or on this machine, or a command failed; nothing is left then.
    pub fn up(topology: &Topology, program: &Path) -> Result<Self, LabError> {
        let id = identifier(topology.name());
        if let Some(lab) = Self::find(topology)? {
            return Err(LabError::IsUp { name: lab.id.clone(), how: "already" });
        }
        let mut lab = Self::make(topology, id, program)?;
        State { topology: topology.clone(), hosts: lab.hosts.clone() }.write(&lab.id)?;
        if let Some(keeper) = lab.keeper.take() {
            keeper.leave()?;
        }
        Ok(lab)
    }

    /// The lab of a topology that is up, if one is.
    ///
    /// # Errors
    /// [`LabError::IsUp`] where one of that name is up that is of another description, or only in part.
    pub fn find(topology: &Topology) -> Result<Option<Self>, LabError> {
        let name = identifier(topology.name());
        if !all_ids().contains(&name) {
            return Ok(None);
        }
        let is_up = |how| Err(LabError::IsUp { name: name.clone(), how });
        let Some(state) = State::read(&name) else { return is_up("in part, because what made it was ended") };
        if state.topology != *topology {
            return is_up("with another description");
        }
        if state.hosts.iter().any(|host| !machine::namespace_file(&host.namespace).exists()) {
            return is_up("in part, because some of it was removed");
        }
        Ok(Some(Self { id: name, hosts: state.hosts, keeper: None }))
    }

    /// The lab of a topology: the one that is up, or one made for this process, which goes when it goes.
    ///
    /// # Errors
    /// As for [`Lab::up`].
    pub fn open(topology: &Topology, program: &Path) -> Result<Self, LabError> {
        if let Some(lab) = Self::find(topology)? {
            return Ok(lab);
        }
        let name = identifier(topology.name());
        for id in all_ids().into_iter().filter(|id| is_of(id, &name) && is_abandoned(id)) {
            remove(&id)?;
        }
        Self::make(topology, format!("{name}{OWNER}{}", std::process::id()), program)
    }

    fn make(topology: &Topology, id: String, program: &Path) -> Result<Self, LabError> {
        let blueprint = Blueprint::new(topology, &id)?;
        let missing = machine::missing();
        if !missing.is_empty() {
            return Err(LabError::NotHere(format!("it needs {}", missing.join(" and "))));
        }
        let has_quotas = blueprint.hosts.iter().flat_map(|host| &host.devices).any(|device| device.quota.is_some());
        if let Some(missing) = has_quotas.then(machine::missing_for_quotas).flatten() {
            return Err(LabError::NotHere(format!("devices with a `cpu_quota` need {missing}")));
        }
        let mut keeper = Keeper::start(program, &id)?;
        let mut commands = blueprint.commands.iter();
        // Only who has made the first namespace may remove what has its name.
        commands.next().map_or(Ok(()), machine::run)?;
        keeper.own()?;
        let lab = Self { id, hosts: blueprint.hosts, keeper: Some(keeper) };
        commands.try_for_each(machine::run)?;
        for (group, share) in lab.hosts.iter().flat_map(|host| &host.devices).filter_map(|device| device.quota.as_ref()) {
            let hierarchy = Hierarchy::find().ok_or_else(|| LabError::NotHere("it needs control groups".into()))?;
            hierarchy.make(&lab.id, group, *share)?;
        }
        Ok(lab)
    }

    /// The hosts, in the order of the topology's nodes.
    pub fn hosts(&self) -> &[Host] {
        &self.hosts
    }

    /// The host of a node.
    ///
    /// # Errors
    /// [`LabError::NoSuchNode`], which names those that there are.
    pub fn host(&self, node: &str) -> Result<&Host, LabError> {
        self.hosts.iter().find(|host| host.name == node).ok_or_else(|| {
            let known: Vec<String> = self.hosts.iter().map(|host| format!("`{}`", host.name)).collect();
            LabError::NoSuchNode { name: self.id.clone(), node: node.into(), known: known.join(", ") }
        })
    }

    /// Where the executor is to put ranks: for each device its host, and a core, which devices share in turn where there are more of them.
    pub fn places(&self) -> Vec<Place> {
        let cores = cores::cores();
        let hierarchy = Hierarchy::find();
        let place = |(node, host): (usize, &Host), number: usize, quota: Option<&(String, f64)>| Place {
            node,
            namespace: Some(machine::namespace_file(&host.namespace)),
            address: host.address.into(),
            core: cores.get(number % cores.len().max(1)).copied(),
            control_group: quota.zip(hierarchy.as_ref()).map(|((group, _), hierarchy)| hierarchy.entrance(&self.id, group)),
            speed: quota.map_or(1.0, |(_, share)| *share),
        };
        let hosts = self.hosts.iter().enumerate();
        let devices = hosts.flat_map(|host| host.1.devices.iter().map(move |device| (host, device)));
        devices.map(|(host, device)| place(host, device.number, device.quota.as_ref())).collect()
    }

    /// Takes down a lab that was made for this process; another stays.
    ///
    /// # Errors
    /// [`LabError::Left`] where something could not be removed.
    pub fn close(mut self) -> Result<(), LabError> {
        let Some(mut keeper) = self.keeper.take() else { return Ok(()) };
        if keeper.end()? { Ok(()) } else { remove(&self.id) }
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        if let Some(keeper) = &mut self.keeper {
            // What could not be removed is said by the keeper itself, and removed by `foretell lab down`.
            let _ = keeper.end();
        }
    }
}

/// Puts the calling thread, and what it starts, into a host of a lab.
///
/// # Errors
/// [`LabError::System`] without the rights, or where the host is gone.
pub fn enter(place: &Place) -> Result<(), LabError> {
    if let Some(namespace) = &place.namespace {
        let doing = || format!("enter `{}`", namespace.display());
        let file = File::open(namespace).map_err(|error| LabError::system(doing(), error))?;
        move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network))
            .map_err(|error| LabError::system(doing(), error))?;
    }
    if let Some(entrance) = &place.control_group {
        std::fs::write(entrance, "0").map_err(|error| LabError::system(format!("write `{}`", entrance.display()), error))?;
    }
    Ok(())
}

/// Takes down the labs of a topology's name, whole or in part: the one that was brought up, and those that processes left which are gone.
/// Returns whether there was anything.
///
/// # Errors
/// [`LabError::Left`] where something could not be removed.
pub fn take_down(name: &str) -> Result<bool, LabError> {
    let name = identifier(name);
    let ids: Vec<String> = all_ids().into_iter().filter(|id| *id == name || (is_of(id, &name) && is_abandoned(id))).collect();
    ids.iter().try_for_each(|id| remove(id))?;
    Ok(!ids.is_empty())
}

/// The labs that there is anything of, in order of their names; those that a living process has made for itself are not listed.
pub fn labs() -> Vec<String> {
    all_ids().into_iter().filter(|id| !id.contains(OWNER) || is_abandoned(id)).collect()
}

/// The names of all labs that there is anything of.
fn all_ids() -> BTreeSet<String> {
    let of_namespace = |name: String| Some(name.strip_prefix(PREFIX)?.split_once('_')?.0.to_owned());
    let groups = Hierarchy::find().map_or_else(Vec::new, |hierarchy| hierarchy.labs());
    machine::namespaces().into_iter().filter_map(of_namespace).chain(groups).chain(state::known()).collect()
}

/// Whether a lab was made for a process of its own from the topology of that name.
fn is_of(id: &str, name: &str) -> bool {
    id.rsplit_once(OWNER).is_some_and(|(topology, _)| topology == name)
}

/// Whether the process that a lab was made for is gone. Another program may have got its number since.
fn is_abandoned(id: &str) -> bool {
    let program = |process: &str| Some(std::fs::read_link(format!("/proc/{process}/exe")).ok()?.file_name()?.to_owned());
    let Some((_, owner)) = id.rsplit_once(OWNER) else { return false };
    // A program that was built anew while it ran is called so.
    let name = |process: &str| program(process).map(|name| name.to_string_lossy().trim_end_matches(" (deleted)").to_owned());
    name(owner).is_none_or(|owner| Some(owner) != name("self"))
}

/// Removes everything of a lab, whatever there is of it, and ends what runs in it.
pub(crate) fn remove(id: &str) -> Result<(), LabError> {
    let hierarchy = Hierarchy::find();
    let of_lab = format!("{PREFIX}{id}_");
    state::forget(id);
    let started = Instant::now();
    loop {
        let namespaces: Vec<String> = machine::namespaces().into_iter().filter(|name| name.starts_with(&of_lab)).collect();
        let members = || {
            let mut members: Vec<i32> = namespaces.iter().flat_map(|name| machine::processes_in(name)).collect();
            members.extend(hierarchy.as_ref().map_or_else(Vec::new, |hierarchy| hierarchy.processes(id)));
            members.retain(|process| *process as u32 != std::process::id());
            members
        };
        let processes = members();
        processes.iter().copied().for_each(machine::kill);
        let mut refused = None;
        if processes.is_empty() || members().is_empty() {
            // A namespace that is deleted while somebody is in it would live on without a name.
            refused = namespaces.iter().find_map(|name| machine::delete_namespace(name).err());
            let groups_are_gone = hierarchy.as_ref().is_none_or(|hierarchy| hierarchy.remove(id));
            if refused.is_none() && groups_are_gone {
                return Ok(());
            }
        }
        if started.elapsed() > PATIENCE {
            let left =
                refused.map_or_else(|| format!("{} and what runs in it", namespaces.join(", ")), |error| error.to_string());
            return Err(LabError::Left { name: id.into(), left });
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}
