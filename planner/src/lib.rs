//! The search over parallelism layouts.
//!
//! The nouns: a [`Request`] says what is to be laid out where, and which choices are [`Fixed`]; [`plan()`] enumerates the
//! [`Layout`](foretell_program::Layout)s of the [`space`] family by family, drops those that cannot fit and those of which a lower bound
//! ([`least`]) says that they cannot be the best, has the simulator decide among the rest, in parallel, the least bound first, and
//! returns [`Planned`]: [`Candidate`]s in order, and what the search did.
//! The answer does not depend on the number of threads. This crate knows no kernels and reads no files.
//!
//! ```
//! use foretell_models::Model;
//! use foretell_planner::{Fixed, Request, plan};
//! use foretell_program::{Layout, Plan};
//! use foretell_simulator::CostModel;
//! use foretell_topologies::Topology;
//! let topology = Topology::library("dgx-a100-80g")?;
//! let costs = CostModel::new(None, &topology);
//! let model = Model::named("mlp")?;
//! let base = Plan::new(Layout::default(), 256);
//! let request = Request::new(&model, "mlp", &topology, &costs, &base);
//! let planned = plan(&request)?;
//! assert!(planned.candidates[0].prediction.fits);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod answer;
mod arithmetic;
mod bounds;
mod devices;
mod fitting;
mod fixed;
mod least_state;
mod members;
mod memo;
mod objective;
mod offloading;
mod own_meshes;
mod pipeline;
pub mod placements;
mod probe;
mod processor;
mod queries;
mod queue;
mod remaining;
mod request;
mod search;
mod setting;
mod shares;
pub mod space;
mod whole;
mod windows;

pub use answer::{Candidate, Planned, PlannerError, Search};
pub use fixed::{Fixed, FixedError};
pub use objective::{Objective, checkpoint_bytes};
pub use own_meshes::Run;
pub use queries::{Least, families, layouts, least};
pub use remaining::deadline;
pub use request::Request;
pub use search::plan;
