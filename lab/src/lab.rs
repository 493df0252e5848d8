//! Labs that are up: making, finding and using them.

use crate::blueprint::{Blueprint, Host};
use crate::command::Command;
use crate::control_group::Hierarchy;
use crate::error::LabError;
use crate::inventory::{OWNER, abandoned_ids, all_ids};
use crate::keeper::Keeper;
use crate::machine::{missing, missing_for_quotas};
use crate::names::identifier;
use crate::namespaces::namespace_file;
use crate::state::State;
use crate::teardown::remove;
use foretell_executor::{RankSlot, machine};
use foretell_topologies::Topology;
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use std::fs::File;
use std::os::fd::AsFd;
use std::path::Path;

/// A lab that is up. If it was made for this process only, dropping it takes it down.
#[derive(Debug)]
pub struct Lab {
    id: String,
    hosts: Vec<Host>,
    /// The keeper of a lab that was made for this process only.
    keeper: Option<Keeper>,
}

impl Lab {
    /// Makes a lab that stays until it is taken down. `program` is this program's file, which is
    /// started as the keeper while the lab is made.
    ///
    /// # Errors
    /// [`LabError`] if the lab is already up, if it cannot be made from this topology or on this
    /// machine, or if a command failed. In the last case nothing is left.
    pub fn up(topology: &Topology, program: &Path) -> Result<Self, LabError> {
        let id = identifier(topology.name());
        if let Some(lab) = Self::find(topology)? {
            return Err(LabError::IsUp { name: lab.id.clone(), state: "already" });
        }
        let mut lab = Self::make(topology, id, program)?;
        State { topology: topology.clone(), hosts: lab.hosts.clone() }.write(&lab.id)?;
        if let Some(keeper) = lab.keeper.take() {
            keeper.release()?;
        }
        Ok(lab)
    }

    /// The lab of this topology, if it is up.
    ///
    /// # Errors
    /// [`LabError::IsUp`] if the lab of that name was made of another description, or only part of
    /// it is up.
    pub fn find(topology: &Topology) -> Result<Option<Self>, LabError> {
        let name = identifier(topology.name());
        if !all_ids().contains(&name) {
            return Ok(None);
        }
        let is_up = |state| Err(LabError::IsUp { name: name.clone(), state });
        let Some(state) = State::read(&name) else { return is_up("in part, because the command that made it was interrupted") };
        if state.topology != *topology {
            return is_up("with another description");
        }
        if state.hosts.iter().any(|host| !namespace_file(&host.namespace).exists()) {
            return is_up("in part, because some of it was removed");
        }
        Ok(Some(Self { id: name, hosts: state.hosts, keeper: None }))
    }

    /// The lab of this topology if it is up; otherwise one made for this process only.
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
        let missing = missing();
        if !missing.is_empty() {
            return Err(LabError::NotPossible(format!("it needs {}", missing.join(" and "))));
        }
        let has_quotas = blueprint.hosts.iter().flat_map(|host| &host.devices).any(|device| device.quota.is_some());
        if let Some(missing) = has_quotas.then(missing_for_quotas).flatten() {
            return Err(LabError::NotPossible(format!("devices with a `cpu_quota` need {missing}")));
        }
        let mut keeper = Keeper::start(program, &id)?;
        let mut commands = blueprint.commands.iter();
        // The process that made the first namespace, and no other, may remove the parts with the
        // lab's name.
        commands.next().map_or(Ok(()), Command::run)?;
        keeper.own()?;
        let lab = Self { id, hosts: blueprint.hosts, keeper: Some(keeper) };
        commands.try_for_each(Command::run)?;
        for (group, share) in lab.hosts.iter().flat_map(|host| &host.devices).filter_map(|device| device.quota.as_ref()) {
            let hierarchy = Hierarchy::find().ok_or_else(|| LabError::NotPossible("it needs control groups".into()))?;
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
    /// [`LabError::NoSuchNode`], which names the lab's nodes.
    pub fn host(&self, node: &str) -> Result<&Host, LabError> {
        self.hosts.iter().find(|host| host.name == node).ok_or_else(|| {
            let known: Vec<String> = self.hosts.iter().map(|host| format!("`{}`", host.name)).collect();
            LabError::NoSuchNode { name: self.id.clone(), node: node.into(), known: known.join(", ") }
        })
    }

    /// One slot per device, in the order of the devices' numbers. Devices take this machine's cores
    /// in turn, so they share cores if there are more devices than cores.
    pub fn slots(&self) -> Vec<RankSlot> {
        let cores = machine::cores();
        let hierarchy = Hierarchy::find();
        let slot = |(node, host): (usize, &Host), number: usize, quota: Option<&(String, f64)>| RankSlot {
            node,
            host: host.name.clone(),
            namespace: Some(namespace_file(&host.namespace)),
            address: host.address.into(),
            core: cores.get(number % cores.len().max(1)).copied(),
            control_group: quota.zip(hierarchy.as_ref()).map(|((group, _), hierarchy)| hierarchy.process_file(&self.id, group)),
            speed: quota.map_or(1.0, |(_, share)| *share),
        };
        let hosts = self.hosts.iter().enumerate();
        let devices = hosts.flat_map(|host| host.1.devices.iter().map(move |device| (host, device)));
        devices.map(|(host, device)| slot(host, device.number, device.quota.as_ref())).collect()
    }

    /// Takes down a lab that was made for this process. A lab that was brought up stays.
    ///
    /// # Errors
    /// [`LabError::NotRemoved`] if something could not be removed.
    pub fn close(mut self) -> Result<(), LabError> {
        let Some(mut keeper) = self.keeper.take() else { return Ok(()) };
        if keeper.end()? { Ok(()) } else { remove(&self.id) }
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        if let Some(keeper) = &mut self.keeper {
            // The keeper reports what it could not remove. `foretell lab down` can remove it later.
            let _ = keeper.end();
        }
    }
}

/// Moves the calling thread, and all processes that it starts from now on, into a slot of a lab.
///
/// # Errors
/// [`LabError::System`] if the rights are missing or the host is gone.
pub fn enter(slot: &RankSlot) -> Result<(), LabError> {
    if let Some(namespace) = &slot.namespace {
        let doing = || format!("enter `{}`", namespace.display());
        let file = File::open(namespace).map_err(|error| LabError::system(doing(), error))?;
        move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network))
            .map_err(|error| LabError::system(doing(), error))?;
    }
    if let Some(group) = &slot.control_group {
        // Process id 0 means the process that writes it.
        std::fs::write(group, "0").map_err(|error| LabError::system(format!("write `{}`", group.display()), error))?;
    }
    Ok(())
}
