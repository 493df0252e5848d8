//! The answer of `foretell plan`: the best layout over number formats and orders of nodes.
//!
//! A [`PlanJob`] is one question, a [`JobAnswer`] its answer. A job is several searches: one for
//! each number format, and on clusters with several kinds of node one for each kind that may hold
//! the first ranks. The searches share the job's time. This module reads no files and no clock: the
//! caller passes both in.

mod node_orders;
mod price;
mod sizes;

use foretell_simulator::gpu::StackLimits;
pub use sizes::{SizePoint, SizePoints, enough_nodes, front, scaling};

use crate::error::PlannerError;
use crate::search::{SearchResult, plan};
use crate::space::{Fixed, Objective, Progress, Request};
use foretell_models::Model;
use foretell_program::{Plan, Profile, Stack};
use foretell_simulator::gpu::Profiles;
use foretell_simulator::{CostModel, Oversubscription, PlanCostError, Stop, plan_costs};
use foretell_topologies::Topology;
use foretell_units::{Bytes, DataType, Price, Seconds};
use miette::Diagnostic;
use node_orders::{NodeOrder, other_orders};
use std::sync::Arc;
use thiserror::Error;

/// How long a search without an answer continues beyond its end. Most find an answer within that
/// time.
const LATE_ANSWER: Seconds = Seconds::new(0.25);

/// How much slower a simpler layout may be to be preferred, as a fraction of the step time.
/// Predictions are less accurate than that.
const SIMPLICITY_MARGIN: f64 = 0.005;

/// A clock that shows the time since a job was started.
#[derive(Clone)]
pub struct Clock(Arc<dyn Fn() -> Seconds + Send + Sync>);

impl Clock {
    /// A clock whose time is `now()`. It is read often, from any thread.
    pub fn new(now: impl Fn() -> Seconds + Send + Sync + 'static) -> Self {
        Self(Arc::new(now))
    }

    /// The time since the job was started.
    pub fn now(&self) -> Seconds {
        (self.0)()
    }
}

impl Default for Clock {
    /// A clock that stands still: jobs have all the time that they need.
    fn default() -> Self {
        Self::new(|| Seconds::ZERO)
    }
}

/// A job to plan.
#[derive(Clone)]
pub struct PlanJob<'a> {
    /// The model.
    pub model: &'a Model,
    /// Its name, for messages.
    pub name: &'a str,
    /// The devices.
    pub topology: &'a Topology,
    /// Measured costs.
    pub profile: Option<&'a Profile>,
    /// The plan without its layout, which the search varies. Its number format is tried first.
    pub base: &'a Plan,
    /// Number formats to try; that of `base` is always one.
    pub formats: Vec<DataType>,
    /// Layout fields that the user has fixed. Fields for which the stack allows one value only are
    /// fixed too.
    pub fixed: Fixed,
    /// Whether the topology's first nodes hold the first ranks. Otherwise other kinds of node may
    /// come first.
    pub keeps_node_order: bool,
    /// Devices that may be used. `None`: all, or those within the price limit.
    pub devices: Option<usize>,
    /// Whether ranks may share devices. The number of ranks then follows from `fixed`.
    pub oversubscribes: bool,
    /// Memory limit of a rank. The device's own memory applies where it is smaller.
    pub memory_limit: Option<Bytes>,
    /// Share of each GPU's memory to leave free. `None`: [`usual_headroom`].
    pub headroom: Option<f64>,
    /// Highest price per hour of the nodes used.
    pub price_limit: Option<Price>,
    /// Whether a simpler layout is preferred to one that is faster by less than half a per cent.
    pub prefers_simple: bool,
    /// Number of layouts to return.
    pub top: usize,
    /// The quantity to minimise.
    pub objective: Objective,
    /// The clock of the job.
    pub clock: Clock,
    /// When the search has to end, on `clock`.
    pub end: Option<Seconds>,
    /// Called with the progress of a search.
    pub watch: &'a (dyn Fn(Progress) + Sync),
}

/// The answer to a job.
#[derive(Clone, Debug)]
pub struct JobAnswer {
    /// The layouts, and what the searches did.
    pub planned: SearchResult,
    /// The topology with its nodes in the order that the layouts use.
    pub topology: Topology,
    /// The node kind that holds the first ranks, if it differs from the job's.
    pub first_nodes: Option<String>,
}

/// Why a job has no answer.
#[derive(Clone, Debug, PartialEq, Error, Diagnostic)]
pub enum PlanJobError {
    /// A search found nothing.
    #[error(transparent)]
    #[diagnostic(transparent)]
    Search(#[from] PlannerError),
    /// The job has a setting whose costs are not known.
    #[error(transparent)]
    #[diagnostic(transparent)]
    Costs(#[from] PlanCostError),
    /// The topology is not valid at another size.
    #[error(transparent)]
    #[diagnostic(transparent)]
    Topology(#[from] foretell_topologies::TopologyError),
    /// Several number formats, and an objective other than time.
    #[error("several number formats can only be compared by step time")]
    #[diagnostic(code(planner::formats), help("omit `--objective`, or name one format"))]
    FormatsByTime,
    /// The price limit is below the price of any node.
    #[error("no node of `{topology}` costs so little")]
    #[diagnostic(code(planner::price_limit), help("raise or omit `--price-limit`; every node needs a `price_per_hour`"))]
    NoNodeWithinPrice {
        /// Name of the topology.
        topology: String,
    },
    /// The price limit is in another currency than the prices.
    #[error("`--price-limit` is in `{asked}`, and the prices of `{topology}` are in `{stated}`")]
    #[diagnostic(code(planner::currency), help("give the limit in `{stated}`"))]
    OtherCurrency {
        /// The limit's currency.
        asked: String,
        /// Name of the topology.
        topology: String,
        /// The currency of its prices.
        stated: String,
    },
    /// None of several sizes has a layout that fits.
    #[error("the model fits at none of these sizes")]
    #[diagnostic(code(planner::no_size_fits), help("give a range with larger ones, or use more nodes"))]
    NoSizeFits,
}

/// The share of each GPU's memory that layouts leave free by default.
///
/// Our own executor maps one arena: the driver's context and the libraries need about 2 GiB of 80.
/// Allocators of frameworks also lose some between blocks, unless their allocations are replayed
/// one by one. With a stated memory limit, nothing more is left free.
pub fn usual_headroom(stack: &Stack, memory_limit: Option<Bytes>) -> f64 {
    let knows_allocator = || {
        let profile = Profiles::library().and_then(|profiles| profiles.stack(stack.name()));
        profile.is_ok_and(|profile| profile.tables.is_some())
    };
    match memory_limit {
        Some(_) => 0.0,
        None if stack.is_own() || knows_allocator() => 0.025,
        None => 0.06,
    }
}

impl<'a> PlanJob<'a> {
    /// A job on all devices of a topology: find the fastest layout, without a time limit.
    pub fn new(model: &'a Model, name: &'a str, topology: &'a Topology, base: &'a Plan) -> Self {
        Self {
            model,
            name,
            topology,
            profile: None,
            base,
            formats: Vec::new(),
            fixed: Fixed::default(),
            keeps_node_order: false,
            devices: None,
            oversubscribes: false,
            memory_limit: None,
            headroom: None,
            price_limit: None,
            prefers_simple: true,
            top: 1,
            objective: Objective::Time,
            clock: Clock::default(),
            end: None,
            watch: &|_| {},
        }
    }

    /// Whether the job is one search, so that its progress is that of the whole.
    pub fn is_one_search(&self) -> bool {
        self.formats().len() == 1 && other_orders(self).is_empty()
    }

    /// The number formats to try, that of the plan first.
    fn formats(&self) -> Vec<DataType> {
        let mut formats = vec![self.base.precision];
        for format in &self.formats {
            if !formats.contains(format) {
                formats.push(*format);
            }
        }
        formats
    }

    /// The number of ranks that a search may use on a topology: one for each device that may be
    /// used. If ranks may share devices, it is the number of ranks of the fixed layout.
    fn devices_on(&self, topology: &Topology) -> usize {
        match (self.oversubscribes, self.fixed.data, self.fixed.tensor, self.fixed.pipeline) {
            (true, Some(data), Some(tensor), Some(pipeline)) => {
                let others = [tensor, pipeline, self.fixed.context.unwrap_or(1), self.fixed.expert.unwrap_or(1)];
                others.into_iter().fold(data, usize::saturating_mul)
            }
            _ => self.devices.unwrap_or_else(|| match &self.price_limit {
                Some(limit) => price::affordable(topology, limit),
                None => topology.device_count(),
            }),
        }
    }

    /// The number of ranks that a search may use on the job's topology.
    pub fn devices(&self) -> usize {
        self.devices_on(self.topology)
    }

    /// The search over layouts of a plan, on the job's topology as it is.
    pub fn request<'b>(&'b self, costs: &'b CostModel, base: &'b Plan) -> Request<'b> {
        let mut fixed = self.fixed.clone();
        if let Some(limits) = StackLimits::of(&base.stack) {
            fixed.within(limits);
        }
        Request {
            fixed,
            devices: self.devices(),
            objective: self.objective,
            // A search without an answer continues a little beyond `stop`, until `give_up`.
            stop: self.stop_after(Seconds::ZERO),
            give_up: self.stop_after(LATE_ANSWER),
            watch: self.watch,
            oversubscription: if self.oversubscribes { Oversubscription::Allowed } else { Oversubscription::Refused },
            memory_limit: self.memory_limit,
            headroom: self.headroom.unwrap_or_else(|| usual_headroom(&base.stack, self.memory_limit)),
            searches_locally: true,
            simplicity_margin: if self.prefers_simple { SIMPLICITY_MARGIN } else { 0.0 },
            top: self.top,
            ..Request::new(self.model, self.name, self.topology, costs, base)
        }
    }

    /// Whether the job's time is over.
    fn is_over(&self) -> bool {
        self.end.is_some_and(|end| self.clock.now() > end)
    }

    /// Stops searches `late` after the job's end.
    fn stop_after(&self, late: Seconds) -> Stop {
        let (clock, end) = (self.clock.clone(), self.end);
        Stop::when(move || end.is_some_and(|end| clock.now() > end + late))
    }
}

/// Answers a job.
///
/// # Errors
/// [`PlanJobError`] if no layout was found, or the job contradicts itself.
pub fn plan_job(job: &PlanJob<'_>) -> Result<JobAnswer, PlanJobError> {
    if job.formats().len() > 1 && job.objective != Objective::Time {
        return Err(PlanJobError::FormatsByTime);
    }
    let mut planned = search_order(job, (job.topology, job.devices_on(job.topology)), None);
    let (mut best_topology, mut first_nodes) = (job.topology.clone(), None);
    // Other searches leave out some kinds of devices, so keep this search's bound for all devices.
    let on_all_devices = planned.as_ref().ok().and_then(|planned| planned.search.all_devices_seconds);
    for NodeOrder { first, topology, devices } in other_orders(job) {
        if planned.is_ok() && job.is_over() {
            // Without a price limit, the other orders have no more devices, so this search's bounds
            // hold for them too.
            let is_bounded = job.price_limit.is_none() && job.objective == Objective::Time;
            planned = planned.map(if is_bounded { SearchResult::cut_off_on_fewer_devices } else { SearchResult::cut_off });
            break;
        }
        let elsewhere = planned.as_ref().ok().map(|planned| planned.value);
        let found = search_order(job, (&topology, devices), elsewhere);
        planned = match (planned, found) {
            (Ok(before), Ok(found)) if found.candidates.is_empty() => Ok(before.counting(&found)),
            (Ok(before), Err(_)) => Ok(before),
            (before, Ok(found)) => {
                (best_topology, first_nodes) = (topology, Some(first));
                Ok(match before {
                    Ok(before) => found.counting(&before),
                    Err(_) => found,
                })
            }
            (before, Err(_)) => before,
        };
    }
    let mut planned = planned?;
    planned.search.all_devices_seconds = on_all_devices;
    planned.search.wall_seconds = job.clock.now().value();
    Ok(JobAnswer { planned, topology: best_topology, first_nodes })
}

/// Searches the first `devices` of a topology in every number format. `elsewhere` is the best value
/// on other topologies: only better layouts count.
fn search_order(
    job: &PlanJob<'_>,
    (topology, devices): (&Topology, usize),
    elsewhere: Option<f64>,
) -> Result<SearchResult, PlanJobError> {
    if let Some(limit) = &job.price_limit {
        price::check_currency(topology, limit)?;
    }
    if devices == 0 {
        return Err(PlanJobError::NoNodeWithinPrice { topology: topology.name().into() });
    }
    let stop = job.stop_after(Seconds::ZERO);
    let search = |base: &Plan| -> Result<SearchResult, PlanJobError> {
        let costs = plan_costs(job.profile, topology, base, job.model)?;
        let request = Request { topology, devices, must_beat: elsewhere, stop: stop.clone(), ..job.request(&costs, base) };
        Ok(plan(&request)?)
    };
    let mut planned = search(job.base);
    for &precision in &job.formats()[1..] {
        if planned.is_ok() && stop.is_raised() {
            return planned.map(SearchResult::cut_off);
        }
        // A model that does not fit in one format may fit in another.
        planned = match (planned, search(&Plan { precision, ..job.base.clone() })) {
            (Ok(one), Ok(other)) => Ok(one.merged(other, job.top)),
            (Err(_), other) => other,
            (one, Err(_)) => one,
        };
    }
    planned
}
