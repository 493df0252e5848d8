//! A disk that a test fills, or whose power it cuts, at any operation. It works on the real files
//! of a folder. A power cut loses part of the bytes and names that were not synced; a seed decides
//! which.

#![allow(clippy::unwrap_used, reason = "a test that fails may panic")]

use super::{Disk, SystemDisk};
use rand::{RngExt as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;
use rustix::fs::{fstat, renameat};
use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A fault of the disk, injected at one operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DiskFault {
    /// No more bytes and no more names fit.
    Full,
    /// Nothing works any more, and what was not synced may be lost.
    PowerCut,
}

#[derive(Debug)]
pub(crate) struct SimulatedDisk {
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    random: ChaCha8Rng,
    /// The operations so far.
    operations: usize,
    /// The operation that fails, and how.
    fault: Option<(usize, DiskFault)>,
    /// The fault, once it has happened.
    failed: Option<DiskFault>,
    /// Changes of contents that are not durable, in their order.
    contents: Vec<Written>,
    /// Changes of names that are not durable, in their order.
    names: Vec<Renamed>,
    /// A folder outside of the run for what was removed.
    removed: tempfile::TempDir,
}

/// Bytes that were written over others.
#[derive(Debug)]
struct Written {
    file: File,
    inode: u64,
    place: u64,
    before: Vec<u8>,
    /// The file's length before.
    length: u64,
}

/// A name that appeared, moved or disappeared. Folders are held open, so that they are found
/// wherever they are now.
#[derive(Debug)]
struct Renamed {
    /// Where it was; for a new name, where it goes when the change is undone.
    from: (File, PathBuf),
    /// Where it is now.
    to: (File, PathBuf),
    /// The folders that must be synced for the change to be durable.
    folders: Vec<u64>,
}

impl SimulatedDisk {
    pub(crate) fn new(seed: u64, fault: Option<(usize, DiskFault)>) -> Self {
        let state = State {
            random: ChaCha8Rng::seed_from_u64(seed),
            operations: 0,
            fault,
            failed: None,
            contents: Vec::new(),
            names: Vec::new(),
            removed: tempfile::tempdir().unwrap(),
        };
        Self { state: Mutex::new(state) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The number of operations so far.
    pub(crate) fn operations(&self) -> usize {
        self.state().operations
    }

    /// The fault, if it has happened.
    pub(crate) fn failed(&self) -> Option<DiskFault> {
        self.state().failed
    }

    /// Loses what was not synced when the power failed. Names are lost from the last on, contents
    /// each by itself.
    pub(crate) fn lose_unsynced(&self) {
        let mut state = self.state();
        while let Some(written) = state.contents.pop() {
            match state.random.random_range(0..3) {
                0 => {}
                1 => {
                    written.file.write_all_at(&written.before, written.place).unwrap();
                    written.file.set_len(written.length).unwrap();
                }
                _ => {
                    // A sector of it arrived, the rest holds anything.
                    let noise = vec![0xA5; written.before.len() / 2];
                    written.file.write_all_at(&noise, written.place).unwrap();
                }
            }
        }
        let names = state.names.len();
        let lost = state.random.random_range(0..names + 1);
        for _ in 0..lost {
            let Some(Renamed { from, to, .. }) = state.names.pop() else { break };
            renameat(&to.0, &to.1, &from.0, &from.1).unwrap();
        }
    }
}

impl State {
    /// Counts an operation. `grows` says that it takes space.
    fn operate(&mut self, grows: bool) -> io::Result<()> {
        self.operations += 1;
        if let Some((at, fault)) = self.fault
            && self.operations >= at
            && (fault == DiskFault::PowerCut || grows)
        {
            self.failed = Some(fault);
        }
        match self.failed {
            Some(DiskFault::PowerCut) => Err(io::Error::other("the power is off")),
            Some(DiskFault::Full) if grows => Err(ErrorKind::StorageFull.into()),
            _ => Ok(()),
        }
    }

    /// A name among what was removed.
    fn grave(&mut self) -> (File, PathBuf) {
        (folder(self.removed.path()).unwrap(), self.random.random::<u64>().to_string().into())
    }

    fn note_new(&mut self, path: &Path) -> io::Result<()> {
        let (from, to) = (self.grave(), place(path)?);
        let folders = vec![inode(&to.0)];
        self.names.push(Renamed { from, to, folders });
        Ok(())
    }
}

fn folder(path: &Path) -> io::Result<File> {
    File::open(if path.as_os_str().is_empty() { Path::new(".") } else { path })
}

fn inode(file: &File) -> u64 {
    fstat(file).unwrap().st_ino
}

/// The folder and the name of a path.
fn place(path: &Path) -> io::Result<(File, PathBuf)> {
    let name = path.file_name().ok_or(ErrorKind::InvalidInput)?;
    Ok((folder(path.parent().unwrap_or(Path::new(".")))?, name.into()))
}

impl Disk for SimulatedDisk {
    fn create_folder(&self, path: &Path) -> io::Result<()> {
        let mut state = self.state();
        let missing: Vec<&Path> = path.ancestors().take_while(|folder| !folder.exists()).collect();
        for folder in missing.into_iter().rev() {
            state.operate(true)?;
            std::fs::create_dir(folder)?;
            state.note_new(folder)?;
        }
        state.operate(false)
    }

    fn open(&self, path: &Path) -> io::Result<File> {
        let mut state = self.state();
        let is_new = !path.exists();
        state.operate(is_new)?;
        // Readable too, for the bytes that are written over.
        let file = File::options().create(true).truncate(false).read(true).write(true).open(path)?;
        if is_new {
            state.note_new(path)?;
        }
        Ok(file)
    }

    fn reserve(&self, file: &File, bytes: u64) -> io::Result<()> {
        self.state().operate(true)?;
        SystemDisk.reserve(file, bytes)
    }

    fn write_at(&self, file: &File, bytes: &[u8], start: u64) -> io::Result<()> {
        let mut state = self.state();
        let metadata = file.metadata()?;
        let mut before = vec![0; bytes.len()];
        let mut read = 0;
        while read < before.len() {
            match file.read_at(&mut before[read..], start + read as u64)? {
                0 => break,
                count => read += count,
            }
        }
        let (inode, length) = (metadata.ino(), metadata.len());
        state.contents.push(Written { file: file.try_clone()?, inode, place: start, before, length });
        match state.operate(true) {
            Ok(()) => file.write_all_at(bytes, start),
            Err(error) => {
                // A part of it was written.
                let part = state.random.random_range(0..bytes.len() + 1);
                file.write_all_at(&bytes[..part], start)?;
                Err(error)
            }
        }
    }

    fn sync(&self, file: &File) -> io::Result<()> {
        let mut state = self.state();
        state.operate(false)?;
        let inode = inode(file);
        state.contents.retain(|written| written.inode != inode);
        Ok(())
    }

    fn sync_folder(&self, path: &Path) -> io::Result<()> {
        let mut state = self.state();
        state.operate(false)?;
        let inode = inode(&folder(path)?);
        for renamed in &mut state.names {
            renamed.folders.retain(|folder| *folder != inode);
        }
        state.names.retain(|renamed| !renamed.folders.is_empty());
        Ok(())
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        let mut state = self.state();
        state.operate(false)?;
        let (from_place, to_place) = (place(from)?, place(to)?);
        std::fs::rename(from, to)?;
        let mut folders = vec![inode(&from_place.0), inode(&to_place.0)];
        folders.dedup();
        state.names.push(Renamed { from: from_place, to: to_place, folders });
        Ok(())
    }

    fn remove_folder(&self, path: &Path) -> io::Result<()> {
        let mut state = self.state();
        state.operate(false)?;
        let (from, to) = (place(path)?, state.grave());
        renameat(&from.0, &from.1, &to.0, &to.1)?;
        let folders = vec![inode(&from.0)];
        state.names.push(Renamed { from, to, folders });
        Ok(())
    }
}
