//! The lab: the hosts that a topology file describes, made on this machine so that a plan can really be executed on them.
//!
//! The nouns: a [`Blueprint`] is what is to be made of a topology, down to the commands, and is a pure function of it; a [`Lab`] is one
//! that is up. Each node is a network namespace, each switch a bridge (all in one more namespace), each link a veth pair whose two
//! ends are shaped to the file's rate, and each device with a `cpu_quota` a control group. So everything has a name that begins with
//! [`PREFIX`], nothing is changed in the machine's own network, and taking down is deleting what has that name.
//!
//! A helper process, the keeper, takes a lab down when the process that makes or uses it ends before its time, however it ends:
//! see [`keep`].
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
mod control_group;
mod error;
mod inventory;
mod keeper;
mod lab;
mod machine;
mod state;
mod teardown;

pub use blueprint::{Blueprint, Command, Host, LabDevice, PREFIX};
pub use error::LabError;
pub use inventory::labs;
pub use keeper::keep;
pub use lab::{Lab, enter};
pub use machine::{missing, missing_for_quotas};
pub use teardown::take_down;
