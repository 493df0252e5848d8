//! Where ranks are put: cores of this machine, or the hosts of a lab.

use super::LaunchOptions;
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

/// Where a rank is put.
#[derive(Clone, Debug, PartialEq)]
pub struct Place {
    /// The number of its host: ranks of one host share memory.
    pub node: usize,
    /// The file of the host's network namespace; none for this machine's own.
    pub namespace: Option<PathBuf>,
    /// The address at which ranks of other hosts reach it.
    pub address: IpAddr,
    /// The core that it stays on.
    pub core: Option<usize>,
    /// The file of a control group to which a process's number is written to put it there.
    pub control_group: Option<PathBuf>,
    /// The share of a core that the group has; 1 without one.
    pub speed: f64,
}

impl Place {
    /// On this machine, at a core.
    pub(crate) fn here(core: Option<usize>) -> Self {
        let address = IpAddr::V4(Ipv4Addr::LOCALHOST);
        Self { node: 0, namespace: None, address, core, control_group: None, speed: 1.0 }
    }
}

/// Where the ranks of a run are.
#[derive(Clone, Debug)]
pub(crate) struct Places {
    places: Vec<Place>,
    /// Whether they were given, and are hosts of a lab.
    pub(crate) is_lab: bool,
}

impl Places {
    pub(crate) fn new(options: &LaunchOptions) -> Self {
        let mut places = options.places.clone();
        let is_lab = !places.is_empty();
        if !is_lab {
            places = machine::cpus_for_ranks().into_iter().map(|core| Place::here(Some(core))).collect();
        }
        if places.is_empty() {
            places.push(Place::here(None));
        }
        Self { places, is_lab }
    }

    pub(crate) fn of(&self, rank: usize) -> &Place {
        &self.places[rank % self.places.len()]
    }

    /// The ranks of each host, in the order of the first.
    pub(super) fn by_node(&self, world_size: usize) -> Vec<Vec<usize>> {
        let mut nodes: Vec<Vec<usize>> = Vec::new();
        for rank in 0..world_size {
            let same = |ranks: &&mut Vec<usize>| ranks.first().is_some_and(|&first| self.of(first).node == self.of(rank).node);
            match nodes.iter_mut().find(same) {
                Some(ranks) => ranks.push(rank),
                None => nodes.push(vec![rank]),
            }
        }
        nodes
    }
}

/// Listens for ranks at the loopback interface of a host.
pub(super) fn listen_at(place: &Place) -> Result<TcpListener, ExecutorError> {
    let loopback = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 0);
    let bind = || TcpListener::bind(loopback).map_err(|error| ExecutorError::system("listen for the ranks", error));
    let Some(namespace) = &place.namespace else { return bind() };
    // A socket stays in the namespace in which it was made, so only a thread that ends at once has to go there.
    let there = || {
        let namespace = open_namespace(namespace)?;
        move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))
            .map_err(|error| ExecutorError::system("enter a host of the lab", error.into()))?;
        bind()
    };
    let ended = std::thread::scope(|scope| scope.spawn(there).join());
    ended.unwrap_or_else(|panic| Err(ExecutorError::panicked("launching", panic.as_ref())))
}

fn open_namespace(path: &Path) -> Result<File, ExecutorError> {
    File::open(path).map_err(|error| ExecutorError::system(format!("open the host's namespace `{}`", path.display()), error))
}

/// Has a command start in a host's namespace and in a device's control group.
pub(super) fn put_at(place: &Place, command: &mut Command) -> Result<(), ExecutorError> {
    let namespace = place.namespace.as_deref().map(open_namespace).transpose()?;
    let open = |path: &PathBuf| {
        let opened = OpenOptions::new().write(true).open(path);
        opened.map_err(|error| ExecutorError::system(format!("open the control group `{}`", path.display()), error))
    };
    let group = place.control_group.as_ref().map(open).transpose()?;
    if namespace.is_none() && group.is_none() {
        return Ok(());
    }
    // SAFETY: between fork and exec the closure makes two system calls on files that are open, allocates nothing and takes no lock.
    unsafe {
        command.pre_exec(move || {
            if let Some(namespace) = &namespace {
                move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))?;
            }
            // To the kernel 0 is whoever writes it.
            group.as_ref().map_or(Ok(()), |mut group| group.write_all(b"0"))
        });
    }
    Ok(())
}
