//! The search over parallelism layouts: from a model and devices to the fastest plan that fits,
//! with a proof of how far it is from the best.
//!
//! The nouns:
//! - A [`PlanJob`] is one question to `foretell plan`: several searches, over number formats and
//!   orders of nodes. [`plan_job`] answers it.
//! - A [`Request`] is one search. It names the model, the devices, and the layout fields that are
//!   [`Fixed`].
//! - The *search space* is every [`Layout`](foretell_program::Layout) that the request allows. A
//!   *family* is the layouts with one mesh, micro-batch, schedule and recomputation; its *variants*
//!   differ in ZeRO, rank order, cuts and buckets.
//! - A *lower bound* limits the step time or memory of a layout, or of all layouts of a family,
//!   from below. Bounds come from *truncated models*: short versions of the model that are compiled
//!   and timed instruction by instruction.
//! - *Incumbents* are the best layouts simulated so far.
//! - [`SearchResult`] is the answer: [`Candidate`]s, the best first, and what the search did. Its
//!   `gap` is how far the best candidate may be above the best layout of the space.
//!
//! The flow: [`plan()`] lists the families, bounds them, and opens the one with the least bound. It
//! simulates layouts in parallel, in the order of their bounds, until no remaining bound is below
//! the incumbents. The answer does not depend on the number of threads.
//!
//! For models that are no stack of equal blocks, [`operator_sharding`] chooses how `tensor` shards
//! each operator. This crate knows no kernels and reads no files.
//!
//! ```
//! use foretell_models::Model;
//! use foretell_planner::{Request, plan};
//! use foretell_program::{Layout, Plan};
//! use foretell_simulator::CostModel;
//! use foretell_topologies::Topology;
//! let topology = Topology::library("dgx-a100-80g")?;
//! let costs = CostModel::new(None, &topology);
//! let model = Model::named("mlp")?;
//! let base = Plan::new(Layout::default(), 256);
//! let request = Request::new(&model, "mlp", &topology, &costs, &base);
//! let request = Request { fixed: "tensor=1".parse()?, ..request };
//! let planned = plan(&request)?;
//! let best = &planned.candidates[0];
//! assert!(best.prediction.fits && best.plan.layout.tensor == 1);
//! assert!(planned.search.lower_bound_seconds <= best.prediction.step_seconds.value());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod bounds;
mod error;
mod estimate;
mod job;
mod objective;
pub mod operator_sharding;
mod post_training;
mod queries;
mod search;
mod space;

pub use error::PlannerError;
pub use job::{
    Clock, JobAnswer, PlanJob, PlanJobError, SizePoint, SizePoints, enough_nodes, front, plan_job, scaling, usual_headroom,
};
pub use objective::checkpoint_bytes;
pub use post_training::{
    FixedRollout, Framework, PlacedRoles, PlacementSearch, PlannedRoles, PostTrainingPlanError, PostTrainingRequest,
    plan_post_training,
};
pub use queries::{LowerBounds, families, layouts, lower_bounds};
pub use search::{Candidate, Search, SearchResult, deadline, plan};
pub use space::{Dimension, Fixed, FixedError, Objective, Progress, Request};
