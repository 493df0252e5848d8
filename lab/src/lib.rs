//! The lab: hosts that a topology file describes, made on this machine, so that a plan can be
//! executed on them.
//!
//! A [`Blueprint`] lists what has to be made for a topology, down to the commands. It is a pure
//! function of the topology. A [`Lab`] is a lab that is up. Each node is a network namespace. Each
//! switch is a bridge, all of them in one more namespace. Each link is a veth pair whose ends are
//! shaped to the file's rate. Each device with a `cpu_quota` is a control group. Every part has a
//! name that begins with [`PREFIX`], and nothing changes in the machine's own network. So taking a
//! lab down means deleting what has its name.
//!
//! A helper process, the keeper, takes a lab down if the process that makes or uses it ends early,
//! for whatever reason: see [`keep`].
//!
//! It must not know plans or Programs: the caller decides what runs on the hosts.
//!
//! ```
//! use foretell_lab::Blueprint;
//! use foretell_topologies::Topology;
//! let blueprint = Blueprint::new(&Topology::library("lab-2x1g")?, "example")?;
//! assert_eq!(blueprint.hosts[1].address.to_string(), "10.77.0.2");
//! assert!(blueprint.commands[0].to_string().starts_with("ip netns add"));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod blueprint;
mod command;
mod control_group;
mod error;
mod inventory;
mod keeper;
mod lab;
mod machine;
mod names;
mod namespaces;
mod state;
mod teardown;

pub use blueprint::{Blueprint, Host, LabDevice};
pub use command::Command;
pub use error::LabError;
pub use inventory::labs;
pub use keeper::keep;
pub use lab::{Lab, enter};
pub use machine::{missing, missing_for_quotas};
pub use names::PREFIX;
pub use teardown::take_down;
