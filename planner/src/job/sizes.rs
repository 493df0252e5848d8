//! The best layout for each number of devices, and for each memory limit: scaling curves and Pareto
//! fronts.

use super::{PlanJob, PlanJobError, plan_job, usual_headroom};
use crate::error::PlannerError;
use foretell_topologies::Topology;
use foretell_units::{Bytes, DataType, Seconds};
use schemars::JsonSchema;
use serde::Serialize;

/// The best layout on a given number of devices.
#[derive(Clone, Debug, Serialize, JsonSchema)]
#[schemars(rename = "Point")]
pub struct SizePoint {
    /// Number of devices that the layout uses.
    pub devices: usize,
    /// Number of nodes in the topology.
    pub nodes: usize,
    /// The layout in words.
    pub layout: String,
    /// The number format of the plan.
    pub precision: DataType,
    /// The predicted step time.
    pub step_seconds: f64,
    /// Samples per second.
    pub samples_per_second: f64,
    /// Peak memory of the fullest device.
    pub memory_bytes: u64,
    /// Price of all nodes per hour, if every node has a price.
    pub price_per_hour: Option<f64>,
    /// Samples per second and device, relative to the first point.
    pub efficiency: f64,
    /// How far the step may be above the best layout, by the search's bounds.
    pub gap: f64,
}

/// The best layouts of several sizes.
#[derive(Clone, Debug)]
pub struct SizePoints {
    /// Those that were found, in the order of their sizes.
    pub points: Vec<SizePoint>,
    /// Sizes whose search ran out of time: the size in words, and the error.
    pub left_out: Vec<(String, PlannerError)>,
}

/// The result of a search at one size.
enum Outcome {
    Found(SizePoint),
    /// No layout fits.
    NoFit,
    /// The search was stopped before it had a layout.
    OutOfTime(PlannerError),
}

/// Finds the best layout at each size. The number of devices doubles from `sizes.0` up to
/// `sizes.1`; sizes at which nothing fits, or whose search ran out of time, are left out.
///
/// # Errors
/// [`PlanJobError`] if no size has a layout.
pub fn scaling(job: &PlanJob<'_>, sizes: (usize, usize)) -> Result<SizePoints, PlanJobError> {
    let mut found = SizePoints { points: Vec::new(), left_out: Vec::new() };
    let first = sizes.0.max(1);
    let all: Vec<usize> =
        std::iter::successors(Some(first), |size| size.checked_mul(2)).take_while(|&size| size <= sizes.1).collect();
    for (done, &devices) in all.iter().enumerate() {
        match point(job, (devices, None), share_of_time(job, all.len() - done))? {
            Outcome::Found(point) => found.points.push(point),
            Outcome::NoFit => {}
            Outcome::OutOfTime(error) => found.left_out.push((format!("{devices} devices"), error)),
        }
    }
    found.complete()
}

/// Finds the Pareto front of step time, memory and devices, over halvings of the number of devices
/// and four memory limits.
///
/// # Errors
/// [`PlanJobError`] if no size has a layout.
pub fn front(job: &PlanJob<'_>) -> Result<SizePoints, PlanJobError> {
    const SHARES_OF_MEMORY: [f64; 4] = [1.0, 0.75, 0.5, 0.25];
    let all = job.devices_on(job.topology);
    let memory = least_memory(job);
    let mut found = SizePoints { points: Vec::new(), left_out: Vec::new() };
    let halved = |devices: &usize| Some(devices / 2).filter(|half| devices.is_multiple_of(2) && *half > 0);
    let sizes: Vec<usize> = std::iter::successors(Some(all).filter(|&all| all > 0), halved).collect();
    for (done, &devices) in sizes.iter().enumerate() {
        for (smaller, share) in SHARES_OF_MEMORY.iter().enumerate() {
            let limit = Bytes::new((memory.value() * share) as u64);
            let left = (sizes.len() - done) * SHARES_OF_MEMORY.len() - smaller;
            match point(job, (devices, Some(limit)), share_of_time(job, left))? {
                Outcome::Found(point) => found.points.push(point),
                // Smaller limits cannot fit either.
                Outcome::NoFit => break,
                Outcome::OutOfTime(error) => found.left_out.push((format!("{devices} devices with {limit} each"), error)),
            }
        }
    }
    let all = std::mem::take(&mut found.points);
    let is_beaten = |point: &SizePoint| all.iter().any(|other| beats(other, point));
    found.points = all.iter().filter(|point| !is_beaten(point)).cloned().collect();
    found
        .points
        .sort_by(|point, other| point.devices.cmp(&other.devices).then(point.step_seconds.total_cmp(&other.step_seconds)));
    let figures = |point: &SizePoint| (point.step_seconds, point.memory_bytes, point.devices);
    found.points.dedup_by(|point, other| figures(point) == figures(other));
    found.complete()
}

/// For a job in which no layout fits: returns how many nodes would be enough, as the least of 2, 4,
/// 8 and 16 times as many. `None` if none of these is enough, if there are several kinds of node,
/// or if the job's time is over before.
///
/// # Errors
/// [`PlanJobError`] if the job contradicts itself.
pub fn enough_nodes(job: &PlanJob<'_>) -> Result<Option<usize>, PlanJobError> {
    if job.topology.node_groups().len() != 1 {
        return Ok(None);
    }
    for times in [2, 4, 8, 16] {
        if job.is_over() {
            break;
        }
        match point(job, (job.topology.device_count() * times, None), job.end)? {
            Outcome::Found(point) => return Ok(Some(point.nodes)),
            Outcome::NoFit => {}
            Outcome::OutOfTime(_) => break,
        }
    }
    Ok(None)
}

/// Whether a point is no worse than another in time, memory and devices, and better in one of
/// these.
fn beats(one: &SizePoint, other: &SizePoint) -> bool {
    let no_worse =
        one.step_seconds <= other.step_seconds && one.memory_bytes <= other.memory_bytes && one.devices <= other.devices;
    let better = one.step_seconds < other.step_seconds || one.memory_bytes < other.memory_bytes || one.devices < other.devices;
    no_worse && better
}

impl SizePoints {
    /// Sets the points' efficiencies. Returns an error if there is no point.
    fn complete(mut self) -> Result<Self, PlanJobError> {
        let of_device = |point: &SizePoint| point.samples_per_second / point.devices.max(1) as f64;
        let Some(first) = self.points.first().map(of_device) else {
            return Err(self.left_out.pop().map_or(PlanJobError::NoSizeFits, |(_, error)| error.into()));
        };
        self.points.iter_mut().for_each(|point| point.efficiency = of_device(point) / first);
        Ok(self)
    }
}

/// When the next of `searches_left` searches has to end, so that all end within the job's time.
fn share_of_time(job: &PlanJob<'_>, searches_left: usize) -> Option<Seconds> {
    let now = job.clock.now();
    let left = (job.end?.value() - now.value()).max(0.0);
    Some(now + Seconds::new(left / searches_left.max(1) as f64))
}

/// Finds the fastest layout on `devices` devices within `memory` on each, before `end`.
fn point(job: &PlanJob<'_>, (devices, memory): (usize, Option<Bytes>), end: Option<Seconds>) -> Result<Outcome, PlanJobError> {
    let groups = job.topology.node_groups();
    let topology = match groups {
        [group] => job.topology.clone().with_nodes(devices.div_ceil(group.devices.max(1)))?,
        _ => job.topology.clone(),
    };
    if topology.device_count() < devices {
        return Ok(Outcome::NoFit);
    }
    let of_size = PlanJob {
        topology: &topology,
        devices: Some(devices),
        memory_limit: memory.or(job.memory_limit),
        // The headroom is already subtracted from `memory`.
        headroom: if memory.is_some() { Some(0.0) } else { job.headroom },
        keeps_node_order: true,
        top: 1,
        end,
        watch: &|_| {},
        ..job.clone()
    };
    let planned = match plan_job(&of_size) {
        Ok(answer) => answer.planned,
        Err(PlanJobError::Search(PlannerError::OutOfMemory { .. } | PlannerError::NoLayout { .. })) => {
            return Ok(Outcome::NoFit);
        }
        Err(PlanJobError::Search(error @ PlannerError::OutOfTime { .. })) => return Ok(Outcome::OutOfTime(error)),
        Err(error) => return Err(error),
    };
    let Some(best) = planned.candidates.first() else { return Ok(Outcome::NoFit) };
    let mesh = best.plan.mesh().expect("invariant: a simulated plan has a mesh");
    let format = if job.formats().len() > 1 { format!("{}, ", best.plan.precision) } else { String::new() };
    Ok(Outcome::Found(SizePoint {
        devices: mesh.world_size(),
        nodes: topology.node_count(),
        layout: format!("{format}{}", best.plan.layout.in_words()),
        precision: best.plan.precision,
        step_seconds: best.prediction.step_seconds.value(),
        samples_per_second: best.prediction.samples_per_second,
        memory_bytes: best.prediction.peak_memory_bytes.iter().map(|bytes| bytes.count()).max().unwrap_or(0),
        price_per_hour: topology.price_per_hour(),
        efficiency: 1.0,
        gap: planned.search.gap,
    }))
}

/// Memory limit of a device: the smallest device's memory less the headroom, or the job's limit if
/// that is less.
fn least_memory(job: &PlanJob<'_>) -> Bytes {
    let free = job.headroom.unwrap_or_else(|| usual_headroom(&job.base.stack, job.memory_limit));
    let least = Bytes::new((Topology::least_memory(job.topology).value() * (1.0 - free)) as u64);
    job.memory_limit.map_or(least, |limit| limit.min(least))
}
