//! Costs on GPUs that we have not timed, from profiles of devices, links and software stacks.
//!
//! The nouns: a [`GpuProfile`] is a device's data sheet with the share of it that kernels reach. A
//! [`LinkProfile`] and a [`NetworkProfile`] join devices and nodes, and a [`Cluster`] has all
//! three. A [`StackProfile`] is a framework's behaviour: fusions, host costs, number formats,
//! memory. A [`Workload`] has the few properties of a run that costs depend on besides kernel
//! sizes, among them a [`RoutingSkew`]: how many tokens the fullest rank of experts receives.
//!
//! The flow: [`Profiles::library`] reads the YAML files in `profiles/`, in which every value has
//! its source. [`GpuCosts`] gives the time of kernels and collectives. [`NodeSpread`] chooses the
//! algorithm of a collective by NCCL's own rule. [`StageMemory`] gives the memory of a device, and
//! [`MemoryRates`] a lower bound on it.
//!
//! This module must not know plans, layouts or names of frameworks. Two runs differ only by their
//! Programs, profiles and workloads.

mod attention;
mod category;
mod cluster;
mod communication;
mod costs;
mod defaults;
mod device;
mod divided;
mod expert_rows;
mod fitted;
mod fitted_values;
mod format;
mod kernels;
mod link;
mod memory;
mod memory_rates;
mod nccl;
mod product;
mod profiles;
mod routing;
mod stack;
pub mod traced;
mod workload;

pub use category::Category;
pub use cluster::{Cluster, ClusterPaces};
pub use costs::GpuCosts;
pub use device::{GpuProfile, Tiling};
pub(crate) use expert_rows::ExpertRows;
pub use format::ProductFormat;
pub use kernels::KernelTime;
pub use link::{LinkProfile, NetworkProfile};
pub use memory::StageMemory;
pub use memory_rates::{MemoryRates, StateKind};
pub use nccl::{Algorithm, NodeSpread, Protocol};
pub use profiles::{ProfileError, Profiles};
pub use routing::RoutingSkew;
pub use stack::{
    AttentionKind, CommunicationCosts, HostCosts, MemoryBoundCosts, MemoryRules, ProductCosts, RunDefaults, StackLimits,
    StackProfile,
};
pub use workload::{Fp8Scaling, TrainedParameters, Workload, without_padding};
