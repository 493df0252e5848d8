//! The files of a folder of pictures: `SPLIT/CLASS/...`, a folder per class, as torchvision's
//! `ImageFolder` reads it. Classes are numbered in the order of their names; files of a class come
//! in the order of their paths. This module knows no picture formats but their endings.

use crate::data::DataError;
use crate::data::options::OnBadSample;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// The endings that are read, in lower case.
const READ: [&str; 3] = ["jpg", "jpeg", "png"];
/// Endings of other pictures, which torchvision reads and this does not.
const OTHER: [&str; 7] = ["bmp", "pgm", "ppm", "tif", "tiff", "webp", "gif"];
/// How deep folders may be nested in a class.
const MAX_DEPTH: usize = 16;

/// The pictures of one split, sorted by class and path.
#[derive(Debug, Default)]
pub(super) struct Listing {
    root: PathBuf,
    /// The paths below `root`, one after the other. One allocation instead of a million.
    paths: Vec<u8>,
    /// The end of each path in `paths`.
    ends: Vec<usize>,
    labels: Vec<u32>,
    /// Number of pictures and classes that were left out: empty classes, and pictures of formats
    /// that are not read.
    pub(super) bad: usize,
}

impl Listing {
    pub(super) fn len(&self) -> usize {
        self.labels.len()
    }

    /// The file and the class of a picture.
    pub(super) fn get(&self, index: usize) -> Option<(PathBuf, u32)> {
        let label = *self.labels.get(index)?;
        let start = index.checked_sub(1).map_or(Some(0), |before| self.ends.get(before).copied())?;
        let path = self.paths.get(start..*self.ends.get(index)?)?;
        Some((self.root.join(OsStr::from_bytes(path)), label))
    }

    /// The picture after `index` in its class; after the last one, the first.
    pub(super) fn next_of_class(&self, index: usize) -> usize {
        let Some(&label) = self.labels.get(index) else { return index };
        match self.labels.get(index + 1) {
            Some(&next) if next == label => index + 1,
            _ => self.labels.partition_point(|&other| other < label),
        }
    }

    /// The number of pictures in the class of a picture.
    pub(super) fn class_size(&self, index: usize) -> usize {
        let Some(&label) = self.labels.get(index) else { return 0 };
        self.labels.partition_point(|&other| other <= label) - self.labels.partition_point(|&other| other < label)
    }

    /// Lists the pictures of the given classes below `root`.
    pub(super) fn read(root: &Path, classes: &[Vec<u8>], policy: OnBadSample) -> Result<Listing, DataError> {
        let mut listing = Listing { root: root.to_path_buf(), ..Listing::default() };
        for (label, class) in classes.iter().enumerate() {
            let folder = root.join(OsStr::from_bytes(class));
            if !folder.is_dir() {
                continue;
            }
            let before = listing.len();
            listing.add_folder(&folder, label as u32, MAX_DEPTH, policy)?;
            if listing.len() == before {
                let problem = format!("has no `.{}` file", READ.join("`, `."));
                let hint = "put pictures into it, remove the folder, or use `--on-bad-sample skip`";
                listing.bad_or(policy, DataError::malformed(&folder.display().to_string(), problem, hint))?;
            }
        }
        Ok(listing)
    }

    fn bad_or(&mut self, policy: OnBadSample, error: DataError) -> Result<(), DataError> {
        match policy {
            OnBadSample::Error => Err(error),
            OnBadSample::Skip => {
                self.bad += 1;
                Ok(())
            }
        }
    }

    /// Adds the pictures of a folder, then those of the folders in it: the order of Python's sorted
    /// `os.walk`.
    fn add_folder(&mut self, folder: &Path, label: u32, depth: usize, policy: OnBadSample) -> Result<(), DataError> {
        let (files, folders) = entries(folder)?;
        for path in files {
            let ending = path.extension().and_then(OsStr::to_str).unwrap_or_default().to_ascii_lowercase();
            if READ.contains(&ending.as_str()) {
                let below = path.strip_prefix(&self.root).unwrap_or(&path);
                self.paths.extend(below.as_os_str().as_bytes());
                self.ends.push(self.paths.len());
                self.labels.push(label);
            } else if OTHER.contains(&ending.as_str()) {
                let hint = "convert it to JPEG or PNG, or use `--on-bad-sample skip`";
                let problem = "is a picture in a format that is not read";
                self.bad_or(policy, DataError::malformed(&path.display().to_string(), problem, hint))?;
            }
        }
        for inner in folders {
            let Some(depth) = depth.checked_sub(1) else {
                let problem = format!("is nested more than {MAX_DEPTH} folders deep");
                return Err(DataError::malformed(&inner.display().to_string(), problem, "is a link to a folder above it there?"));
            };
            self.add_folder(&inner, label, depth, policy)?;
        }
        Ok(())
    }
}

/// The names of the folders in a folder, sorted: its classes.
pub(super) fn class_names(folder: &Path) -> Result<Vec<Vec<u8>>, DataError> {
    let (_, folders) = entries(folder)?;
    Ok(folders.iter().filter_map(|path| path.file_name()).map(|name| name.as_bytes().to_vec()).collect())
}

/// The files and the folders in a folder, each sorted by the bytes of their names.
fn entries(folder: &Path) -> Result<(Vec<PathBuf>, Vec<PathBuf>), DataError> {
    let unreadable = |error: std::io::Error| DataError::io(folder, &error);
    let (mut files, mut folders) = (Vec::new(), Vec::new());
    for entry in fs::read_dir(folder).map_err(unreadable)? {
        let entry = entry.map_err(unreadable)?;
        let kind = entry.file_type().map_err(unreadable)?;
        // Links are followed. Only they need a system call to learn what they lead to.
        let is_folder = if kind.is_symlink() { entry.path().is_dir() } else { kind.is_dir() };
        if is_folder { folders.push(entry.path()) } else { files.push(entry.path()) }
    }
    let by_name = |path: &PathBuf| path.file_name().unwrap_or_default().as_bytes().to_vec();
    files.sort_by_cached_key(by_name);
    folders.sort_by_cached_key(by_name);
    Ok((files, folders))
}
