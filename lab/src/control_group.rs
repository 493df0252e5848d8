//! Linux control groups, versions 1 and 2: where they are mounted, and how a group is given a share
//! of a core.

use crate::error::LabError;
use crate::names::{PREFIX, identifier};
use foretell_topologies::QUOTA_PERIOD;
use std::fs;
use std::path::{Path, PathBuf};

/// The period of a quota, in microseconds.
const PERIOD: u64 = (QUOTA_PERIOD.value() * 1e6 + 0.5) as u64;
/// The smallest quota that the kernel accepts, in microseconds.
const MIN_QUOTA: f64 = 1000.0;

/// The hierarchy of control groups that limits CPU time.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Hierarchy {
    root: PathBuf,
    /// `true` for version 2.
    is_unified: bool,
}

impl Hierarchy {
    /// This machine's hierarchy, if it has one.
    pub(crate) fn find() -> Option<Self> {
        Self::find_in(&fs::read_to_string("/proc/mounts").unwrap_or_default(), |root| {
            fs::read_to_string(root.join("cgroup.controllers"))
                .is_ok_and(|text| text.split_whitespace().any(|controller| controller == "cpu"))
        })
    }

    /// Finds the hierarchy in the text of `/proc/mounts`. `has_cpu` tells whether the unified
    /// hierarchy at a path can limit CPU time.
    fn find_in(mounts: &str, has_cpu: impl Fn(&Path) -> bool) -> Option<Self> {
        mounts.lines().find_map(|line| {
            let fields: Vec<&str> = line.split_whitespace().collect();
            let [_, root, kind, options, ..] = fields.as_slice() else { return None };
            let root = PathBuf::from(root);
            match *kind {
                "cgroup" if options.split(',').any(|option| option == "cpu") => Some(Self { root, is_unified: false }),
                "cgroup2" if has_cpu(&root) => Some(Self { root, is_unified: true }),
                _ => None,
            }
        })
    }

    /// The folder of a lab's groups.
    fn folder(&self, id: &str) -> PathBuf {
        self.root.join(format!("{PREFIX}{}", identifier(id)))
    }

    /// The file that a process id is written to in order to move the process into a group.
    pub(crate) fn process_file(&self, id: &str, group: &str) -> PathBuf {
        self.folder(id).join(group).join("cgroup.procs")
    }

    /// Makes a group with a share of a core, from 0 to 1.
    pub(crate) fn make(&self, id: &str, group: &str, share: f64) -> Result<(), LabError> {
        let lab = self.folder(id);
        let folder = lab.join(group);
        let write = |path: PathBuf, text: String| {
            fs::write(&path, text).map_err(|error| LabError::system(format!("write `{}`", path.display()), error))
        };
        if self.is_unified {
            write(self.root.join("cgroup.subtree_control"), "+cpu".into())?;
        }
        fs::create_dir_all(&lab).map_err(|error| LabError::system(format!("make `{}`", lab.display()), error))?;
        if self.is_unified {
            write(lab.join("cgroup.subtree_control"), "+cpu".into())?;
        }
        fs::create_dir_all(&folder).map_err(|error| LabError::system(format!("make `{}`", folder.display()), error))?;
        let quota = (PERIOD as f64 * share).round().max(MIN_QUOTA);
        if self.is_unified {
            return write(folder.join("cpu.max"), format!("{quota} {PERIOD}"));
        }
        write(folder.join("cpu.cfs_period_us"), PERIOD.to_string())?;
        write(folder.join("cpu.cfs_quota_us"), quota.to_string())
    }

    /// The processes in a lab's groups.
    pub(crate) fn processes(&self, id: &str) -> Vec<i32> {
        let groups = fs::read_dir(self.folder(id)).into_iter().flatten().flatten();
        let lists = groups.filter_map(|group| fs::read_to_string(group.path().join("cgroup.procs")).ok());
        lists.flat_map(|list| list.lines().filter_map(|line| line.parse().ok()).collect::<Vec<i32>>()).collect()
    }

    /// Removes a lab's groups, if no process is in them. Returns whether all are gone.
    pub(crate) fn remove(&self, id: &str) -> bool {
        let lab = self.folder(id);
        for group in fs::read_dir(&lab).into_iter().flatten().flatten() {
            if group.path().is_dir() {
                // The caller retries while anything is left.
                let _ = fs::remove_dir(group.path());
            }
        }
        let _ = fs::remove_dir(&lab);
        !lab.exists()
    }

    /// The ids of the labs that have groups.
    pub(crate) fn labs(&self) -> Vec<String> {
        let folders = fs::read_dir(&self.root).into_iter().flatten().flatten();
        folders.filter_map(|folder| Some(folder.file_name().to_str()?.strip_prefix(PREFIX)?.to_owned())).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_versions_are_found() {
        let version_1 = "tmpfs /sys/fs/cgroup tmpfs rw 0 0\ncgroup /sys/fs/cgroup/cpuset cgroup rw,cpuset 0 0\n\
                         cgroup /sys/fs/cgroup/cpu,cpuacct cgroup rw,relatime,cpu,cpuacct 0 0\n\
                         cgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0\n";
        let found = Hierarchy::find_in(version_1, |_| false).expect("version 1");
        assert_eq!(found, Hierarchy { root: "/sys/fs/cgroup/cpu,cpuacct".into(), is_unified: false });
        let version_2 = "cgroup2 /sys/fs/cgroup cgroup2 rw,nosuid 0 0\n";
        assert_eq!(Hierarchy::find_in(version_2, |_| true), Some(Hierarchy { root: "/sys/fs/cgroup".into(), is_unified: true }));
        assert_eq!(Hierarchy::find_in(version_2, |_| false), None);
        assert_eq!(Hierarchy::find_in("", |_| true), None);
    }

    #[test]
    fn in_version_2_the_share_is_written_as_time_per_period() {
        let folder = tempfile::tempdir().expect("a folder");
        let hierarchy = Hierarchy { root: folder.path().into(), is_unified: true };
        hierarchy.make("x", "device-3", 0.25).expect("it is written");
        let group = folder.path().join("foretell-lab_x").join("device-3");
        assert_eq!(fs::read_to_string(group.join("cpu.max")).expect("written"), "2500 10000");
        assert_eq!(fs::read_to_string(folder.path().join("cgroup.subtree_control")).expect("written"), "+cpu");
    }
}
