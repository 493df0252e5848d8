//! The confinement of a process that answers a question of `serve` or `mcp`: it reads and writes
//! only files of one folder, and ends with the process that asked. Knows no commands. Every path
//! that a user or a user's file can name passes [`permit`], in `inputs.rs` and `output.rs`.

use crate::failure::{Failure, code};
use crate::host;
use std::path::{Component, Path, PathBuf};
use std::sync::OnceLock;

/// The folder, with symbolic links resolved. Not set in a process that is not confined.
static FOLDER: OnceLock<PathBuf> = OnceLock::new();

/// Confines this process to a folder for the rest of its life. It ends when the process `parent`
/// ends.
pub fn enter(folder: &Path, parent: Option<i32>) -> Result<(), Failure> {
    host::end_with_parent(parent)?;
    let folder =
        host::resolved(folder).map_err(|error| Failure::input(code::FILE_UNREADABLE, error.to_string()).in_file(folder))?;
    FOLDER.set(folder).map_err(|_| Failure::undone(code::SYSTEM, "this process is confined already"))
}

/// The file, in the folder, with the reason why the process failed, in one line.
pub const FAILURE: &str = "failure.txt";

/// Tells the process that asked why this one failed, if this one is confined.
pub fn tell(failure: &Failure) {
    if let Some(folder) = FOLDER.get() {
        // Without the file the exit status tells the failure.
        let _ = host::write(&folder.join(FAILURE), failure.one_line().as_bytes());
    }
}

/// Whether this process is confined.
pub fn is_confined() -> bool {
    FOLDER.get().is_some()
}

/// Refuses a path outside the folder of a confined process.
pub fn permit(path: &Path) -> Result<(), Failure> {
    let is_inside = FOLDER.get().is_none_or(|folder| lies_in(path, folder));
    if is_inside {
        return Ok(());
    }
    let hint = "give a name of the library, or the contents of the file";
    Err(Failure::input(code::FILE_CONFINED, format!("`{}` is a path, and no other file is read or written here", path.display()))
        .hint(hint))
}

/// Whether a path leads into a folder. For a path that does not exist yet, its nearest existing
/// parent counts.
fn lies_in(path: &Path, folder: &Path) -> bool {
    let Ok(path) = host::absolute(path) else { return false };
    if path.components().any(|component| component == Component::ParentDir) {
        return false;
    }
    let existing = path.ancestors().find_map(|ancestor| host::resolved(ancestor).ok());
    existing.is_some_and(|existing| existing.starts_with(folder))
}

#[cfg(test)]
mod tests {
    use super::lies_in;
    use std::path::Path;

    #[test]
    fn only_paths_inside_the_folder_are_permitted() {
        let folder = tempfile::tempdir().expect("a folder");
        let inside = folder.path().canonicalize().expect("it is there");
        std::fs::write(inside.join("plan.yaml"), "").expect("it is written");
        std::os::unix::fs::symlink("/etc", inside.join("link")).expect("a link");
        for good in ["plan.yaml", "later/plan.yaml", "."] {
            assert!(lies_in(&inside.join(good), &inside), "{good}");
        }
        for bad in ["../plan.yaml", "later/../../x", "link/passwd", "link"] {
            assert!(!lies_in(&inside.join(bad), &inside), "{bad}");
        }
        assert!(!lies_in(Path::new("/etc/passwd"), &inside) && !lies_in(Path::new("plan.yaml"), &inside));
    }
}
