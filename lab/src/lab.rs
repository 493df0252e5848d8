//! Labs that are up: made, found, used and taken down.

use crate::blueprint::{Blueprint, Host, identifier};
use crate::control_group::Hierarchy;
use crate::error::LabError;
use crate::inventory::{OWNER, abandoned_ids, all_ids};
use crate::keeper::Keeper;
use crate::machine;
use crate::state::State;
use crate::teardown::remove;
use foretell_executor::{Slot, machine as cores};
use foretell_topologies::Topology;
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use std::fs::File;
use std::os::fd::AsFd;
use std::path::Path;

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
        abandoned_ids(&name).iter().try_for_each(|id| remove(id))?;
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
    pub fn slots(&self) -> Vec<Slot> {
        let cores = cores::cores();
        let hierarchy = Hierarchy::find();
        let slot = |(node, host): (usize, &Host), number: usize, quota: Option<&(String, f64)>| Slot {
            node,
            namespace: Some(machine::namespace_file(&host.namespace)),
            address: host.address.into(),
            core: cores.get(number % cores.len().max(1)).copied(),
            control_group: quota.zip(hierarchy.as_ref()).map(|((group, _), hierarchy)| hierarchy.entrance(&self.id, group)),
            speed: quota.map_or(1.0, |(_, share)| *share),
        };
        let hosts = self.hosts.iter().enumerate();
        let devices = hosts.flat_map(|host| host.1.devices.iter().map(move |device| (host, device)));
        devices.map(|(host, device)| slot(host, device.number, device.quota.as_ref())).collect()
    }

    /// Takes down a lab that was made for this process; another stays.
    ///
    /// # Errors
    /// [`LabError::NotRemoved`] where something could not be removed.
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
pub fn enter(slot: &Slot) -> Result<(), LabError> {
    if let Some(namespace) = &slot.namespace {
        let doing = || format!("enter `{}`", namespace.display());
        let file = File::open(namespace).map_err(|error| LabError::system(doing(), error))?;
        move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network))
            .map_err(|error| LabError::system(doing(), error))?;
    }
    if let Some(entrance) = &slot.control_group {
        std::fs::write(entrance, "0").map_err(|error| LabError::system(format!("write `{}`", entrance.display()), error))?;
    }
    Ok(())
}
