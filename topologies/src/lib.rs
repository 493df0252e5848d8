//! Clusters: nodes, devices, links, switches and routes.
//!
//! The nouns: a [`Topology`] has [`NodeGroup`]s of equal nodes. A node has devices of one
//! [`DeviceKind`], joined by a [`NodeLink`], and [`Nics`] into the [`Network`]. Data moves over
//! one-way [`Link`] resources that flows share. A [`Route`] lists the links between two devices.
//!
//! The flow: text → [`TopologySpec`] (the schema, each value with its place in the file) →
//! [`Topology`] (names resolved, units parsed, defaults filled in and noted, everything numbered) →
//! queries. [`from_smi_topo`], [`from_nccl_xml`] and [`from_discovered`] make such a text from the
//! output of NVIDIA's tools. The topology `local`, which is this machine, comes from [`discover`]
//! instead. This crate must not know models or plans, and reads only the text that it is given.
//!
//! All rates are one way. A node's `link` rate is the rate at which one device sends over all its
//! lanes together. So the NVLink of an A100, sold as "600 GB/s" in both directions, is stated as
//! `nvswitch-300GB/s`. A file may state more than the device's ports carry; [`Topology::notes`]
//! then says so.
//!
//! ```
//! use foretell_topologies::{DeviceId, Topology};
//! let cluster = Topology::library("dgx-a100-80g")?.with_nodes(4)?;
//! assert_eq!(cluster.device_count(), 32);
//!
//! let route = cluster.route(DeviceId(0), DeviceId(8))?;
//! let names: Vec<&str> = route.links.iter().map(|link| cluster.links()[link.0].name.as_str()).collect();
//! assert_eq!(names, ["dgx-0/nic-0/egress", "dgx-1/nic-0/ingress"]);
//! # Ok::<(), foretell_topologies::TopologyError>(())
//! ```

mod assemble;
mod device;
mod device_kinds;
mod discovery;
mod error;
mod fabric;
mod file;
mod import;
mod layout;
mod library;
mod link;
mod node;
mod node_links;
mod sentence;
mod spec;
mod text;
mod topology;
mod wires;
mod yaml;

pub use device::{Architecture, DeviceKind, QUOTA_PERIOD};
pub use discovery::{LOCAL_DEVICE, discover};
pub use error::{Place, TopologyError, TopologyProblem};
pub use fabric::{
    CrossRail, DEFAULT_NETWORK_LATENCY, Dimensions, Dragonfly, Fabric, FatTree, Leaf, LeafSwitches, Network, Pods, Routing,
    StatedRoute, Torus, Transport, Uplinks,
};
pub use import::{
    Discovered, DiscoveredGpu, ImportError, ImportOptions, SlurmGpus, SlurmNode, from_discovered, from_nccl_xml, from_rocm_topo,
    from_slurm_nodes, from_smi_topo,
};
pub use layout::{DeviceId, InterchangeableNodes, NodeId, Route};
pub use link::{Junction, Link, LinkClass, LinkId};
pub use node::{Nics, NodeGroup, NodeLink, NodeLinkKind, PcieTree, Sockets};
pub use sentence::SaidTopology;
pub use spec::{TopologyReference, TopologySpec};
pub use topology::{LinkScale, MAXIMUM_DEVICES, Topology};
pub use wires::Wires;
pub use yaml::{YamlError, read_yaml};
