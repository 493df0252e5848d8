//! Slots: the cores of this machine, or the hosts of a lab, that ranks are started on.

use crate::error::ExecutorError;
use crate::machine;
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A node, and the core on it, that ranks are started on.
#[derive(Clone, Debug, PartialEq)]
pub struct RankSlot {
    /// The number of the node. Ranks on one node share memory.
    pub node: usize,
    /// The name of the node, for messages.
    pub host: String,
    /// The file of the node's network namespace; `None` for this machine's own.
    pub namespace: Option<PathBuf>,
    /// The address at which ranks of other nodes reach it.
    pub address: IpAddr,
    /// The core that ranks in this slot are pinned to; `None` leaves the choice to the kernel.
    pub core: Option<usize>,
    /// The file that a process id is written to in order to move the process into the slot's
    /// control group; `None` without a group.
    pub control_group: Option<PathBuf>,
    /// The share of a core's time that the control group has, from 0 to 1; 1 without a group.
    pub speed: f64,
}

impl RankSlot {
    /// A slot on this machine, outside any lab.
    fn on_this_machine(core: Option<usize>) -> Self {
        let address = IpAddr::V4(Ipv4Addr::LOCALHOST);
        Self { node: 0, host: machine::host_name(), namespace: None, address, core, control_group: None, speed: 1.0 }
    }
}

/// The slots of a run's ranks. Rank `r` has slot `r` modulo their number.
#[derive(Clone, Debug)]
pub(super) struct Slots {
    slots: Vec<RankSlot>,
    /// `true` if the slots are on hosts of a lab.
    pub(super) is_lab: bool,
}

impl Slots {
    /// The slots `lab`, or the cores of this machine if `lab` is empty.
    pub(super) fn new(lab: &[RankSlot]) -> Self {
        let is_lab = !lab.is_empty();
        let mut slots = lab.to_vec();
        if !is_lab {
            slots = machine::cpus_for_ranks().into_iter().map(|core| RankSlot::on_this_machine(Some(core))).collect();
        }
        if slots.is_empty() {
            slots.push(RankSlot::on_this_machine(None));
        }
        Self { slots, is_lab }
    }

    /// The slot of a rank.
    pub(super) fn of(&self, rank: usize) -> &RankSlot {
        &self.slots[rank % self.slots.len()]
    }

    /// The ranks of each node, ascending. Nodes are in the order of their first rank.
    pub(super) fn ranks_by_node(&self, world_size: usize) -> Vec<Vec<usize>> {
        let mut nodes: Vec<Vec<usize>> = Vec::new();
        for rank in 0..world_size {
            let is_same = |ranks: &&mut Vec<usize>| ranks.first().is_some_and(|&first| self.of(first).node == self.of(rank).node);
            match nodes.iter_mut().find(is_same) {
                Some(ranks) => ranks.push(rank),
                None => nodes.push(vec![rank]),
            }
        }
        nodes
    }
}

/// Listens for ranks on the loopback interface of a slot's node.
pub(super) fn listen_at(slot: &RankSlot) -> Result<TcpListener, ExecutorError> {
    let loopback = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 0);
    let bind = || TcpListener::bind(loopback).map_err(|error| ExecutorError::system("listen for the ranks", error));
    let Some(namespace) = &slot.namespace else { return bind() };
    // A socket stays in the namespace in which it was created, so a short-lived thread is enough.
    let bind_inside = || {
        let file = open_namespace(namespace)?;
        move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network)).map_err(|error| {
            ExecutorError::system(format!("enter the lab's network namespace `{}`", namespace.display()), error.into())
        })?;
        bind()
    };
    let result = std::thread::scope(|scope| scope.spawn(bind_inside).join());
    result.unwrap_or_else(|panic| Err(ExecutorError::panicked("launching", panic.as_ref())))
}

fn open_namespace(path: &Path) -> Result<File, ExecutorError> {
    File::open(path)
        .map_err(|error| ExecutorError::system(format!("open the lab's network namespace `{}`", path.display()), error))
}

/// Makes `command` start in the slot's network namespace and control group, if it has them.
pub(super) fn start_in(slot: &RankSlot, command: &mut Command) -> Result<(), ExecutorError> {
    let namespace = slot.namespace.as_deref().map(open_namespace).transpose()?;
    let open = |path: &PathBuf| {
        let opened = OpenOptions::new().write(true).open(path);
        opened.map_err(|error| ExecutorError::system(format!("open the control group `{}`", path.display()), error))
    };
    let group = slot.control_group.as_ref().map(open).transpose()?;
    if namespace.is_none() && group.is_none() {
        return Ok(());
    }
    // SAFETY: between fork and exec the closure makes two system calls on open files. It allocates
    // nothing and takes no lock.
    unsafe {
        command.pre_exec(move || {
            if let Some(namespace) = &namespace {
                move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))?;
            }
            // Process id 0 means the process that writes it.
            group.as_ref().map_or(Ok(()), |mut group| group.write_all(b"0"))
        });
    }
    Ok(())
}
