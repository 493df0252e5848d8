//! `foretell plan --scaling` and `--front`: the best layout for each number of devices and memory
//! limit.

use crate::choices::{Choices, Setting};
use crate::failure::{Failure, code};
use crate::host::Instant;
use crate::{output, predict};
use foretell_planner::{Planned, PlannerError, Request, plan};
use foretell_program::Plan;
use foretell_reports::{Column, CurvePoint, Plot, table};
use foretell_simulator::Stop;
use foretell_topologies::Topology;
use foretell_units::diagnostic::one_line;
use foretell_units::{Bytes, DataType, Seconds};
use schemars::JsonSchema;
use serde::Serialize;
use std::time::Duration;

/// The best layout at a number of devices.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct Point {
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

/// What a search at one size found.
enum Outcome {
    Found(Point),
    /// No layout fits.
    NoFit,
    /// The search was stopped before it had a layout.
    OutOfTime(PlannerError),
}

/// Finds the best layout at each size. The number of devices doubles from `sizes.0` up to
/// `sizes.1`; sizes at which nothing fits, or whose search ran out of time, are left out.
pub fn scaling(choices: &Choices, setting: &Setting, sizes: (usize, usize), started: Instant) -> Result<Vec<Point>, Failure> {
    let mut points: Vec<Point> = Vec::new();
    let mut cut_off = None;
    let first = sizes.0.max(1);
    let all: Vec<usize> =
        std::iter::successors(Some(first), |size| size.checked_mul(2)).take_while(|&size| size <= sizes.1).collect();
    for (done, &devices) in all.iter().enumerate() {
        let end = end_of_search(choices, started, all.len() - done);
        match point(choices, setting, (devices, None), end)? {
            Outcome::Found(point) => points.push(point),
            Outcome::NoFit => {}
            Outcome::OutOfTime(error) => {
                output::note(&format!("{devices} devices are left out: {}", one_line(&error)));
                cut_off = Some(error);
            }
        }
    }
    if points.is_empty() {
        if let Some(error) = cut_off {
            return Err(error.into());
        }
        return Err(
            Failure::undone(code::NOTHING_FITS, "the model fits at none of these sizes").hint("give a range with larger ones")
        );
    }
    Ok(with_efficiency(points))
}

fn with_efficiency(mut points: Vec<Point>) -> Vec<Point> {
    let each = |point: &Point| point.samples_per_second / point.devices.max(1) as f64;
    let first = points.first().map_or(1.0, each);
    points.iter_mut().for_each(|point| point.efficiency = each(point) / first);
    points
}

/// Returns when the next of so many searches has to end, so that all keep `--time-limit` together.
/// `None` without a limit.
fn end_of_search(choices: &Choices, started: Instant, searches_left: usize) -> Option<Instant> {
    let limit = Duration::try_from_secs_f64(choices.time_limit?.value()).ok()?;
    let now = Instant::now();
    let left = started.checked_add(limit)?.saturating_duration_since(now);
    Some(now + left / u32::try_from(searches_left.max(1)).unwrap_or(u32::MAX))
}

/// Finds the fastest layout on so many devices within a memory limit per device, before `end`.
fn point(
    choices: &Choices,
    setting: &Setting,
    (devices, memory): (usize, Option<Bytes>),
    end: Option<Instant>,
) -> Result<Outcome, Failure> {
    let of_node = setting.topology.node_groups().first().map_or(1, |group| group.devices.max(1));
    let topology = if setting.topology.node_groups().len() == 1 {
        setting.topology.clone().with_nodes(devices.div_ceil(of_node))?
    } else {
        setting.topology.clone()
    };
    if topology.device_count() < devices {
        return Ok(Outcome::NoFit);
    }
    let is_over = Stop::when(move || end.is_some_and(|end| Instant::now() > end));
    let mut planned: Option<Planned> = None;
    let mut cut_off = None;
    let formats = choices.formats(setting);
    for &precision in &formats {
        let base = Plan { precision, ..setting.base.clone() };
        let costs = predict::costs(None, &topology, &base, &setting.model.model)?;
        let request = Request {
            fixed: choices.fixed(&base.stack),
            devices,
            memory_limit: memory.or(choices.memory_limit),
            headroom: if memory.is_some() { 0.0 } else { choices.headroom(&base.stack) },
            stop: is_over.clone(),
            give_up: is_over.clone(),
            ..Request::new(&setting.model.model, &setting.model.name, &topology, &costs, &base)
        };
        let found = match plan(&request) {
            Ok(planned) => planned,
            // A model that does not fit in one format may fit in another.
            Err(PlannerError::OutOfMemory { .. } | PlannerError::NoLayout { .. }) => continue,
            Err(error @ PlannerError::OutOfTime { .. }) => {
                cut_off = Some(error);
                continue;
            }
            Err(error) => return Err(error.into()),
        };
        planned = Some(match planned {
            Some(before) => before.merged(found, 1),
            None => found,
        });
    }
    // Nothing bounds the layouts of a format whose search was stopped.
    let planned = if cut_off.is_some() { planned.map(Planned::cut_off) } else { planned };
    let Some((planned, best)) = planned.as_ref().and_then(|planned| Some((planned, planned.candidates.first()?))) else {
        return Ok(cut_off.map_or(Outcome::NoFit, Outcome::OutOfTime));
    };
    let ranks = best.plan.mesh()?.world_size();
    let format = if formats.len() > 1 { format!("{}, ", best.plan.precision) } else { String::new() };
    Ok(Outcome::Found(Point {
        devices: ranks,
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

/// Finds the Pareto front of step time, memory and devices, over halvings of the number of devices
/// and four memory limits.
pub fn front(choices: &Choices, setting: &Setting, started: Instant) -> Result<Vec<Point>, Failure> {
    const SHARES_OF_MEMORY: [f64; 4] = [1.0, 0.75, 0.5, 0.25];
    let all = choices.devices(&setting.topology);
    let memory = limit(choices, &setting.topology);
    let mut points: Vec<Point> = Vec::new();
    let mut cut_off = None;
    let halved = |devices: &usize| Some(devices / 2).filter(|half| devices.is_multiple_of(2) && *half > 0);
    let sizes: Vec<usize> = std::iter::successors(Some(all).filter(|&all| all > 0), halved).collect();
    for (done, &devices) in sizes.iter().enumerate() {
        for (smaller, share) in SHARES_OF_MEMORY.iter().enumerate() {
            let limit = Bytes::new((memory.value() * share) as u64);
            let left = (sizes.len() - done) * SHARES_OF_MEMORY.len() - smaller;
            match point(choices, setting, (devices, Some(limit)), end_of_search(choices, started, left))? {
                Outcome::Found(point) => points.push(point),
                // Smaller limits cannot fit either.
                Outcome::NoFit => break,
                Outcome::OutOfTime(error) => {
                    output::note(&format!("{devices} devices with {limit} each are left out: {}", one_line(&error)));
                    cut_off = Some(error);
                }
            }
        }
    }
    let is_beaten = |one: &Point| {
        let beats = |other: &Point| {
            let no_worse =
                other.step_seconds <= one.step_seconds && other.memory_bytes <= one.memory_bytes && other.devices <= one.devices;
            let better =
                other.step_seconds < one.step_seconds || other.memory_bytes < one.memory_bytes || other.devices < one.devices;
            no_worse && better
        };
        points.iter().any(beats)
    };
    let mut front: Vec<Point> = points.iter().filter(|one| !is_beaten(one)).cloned().collect();
    front.sort_by(|a, b| a.devices.cmp(&b.devices).then(a.step_seconds.total_cmp(&b.step_seconds)));
    front.dedup_by(|a, b| a.step_seconds == b.step_seconds && a.memory_bytes == b.memory_bytes && a.devices == b.devices);
    if front.is_empty() {
        if let Some(error) = cut_off {
            return Err(error.into());
        }
        return Err(Failure::undone(code::NOTHING_FITS, "the model fits on none of these devices").hint("use more nodes"));
    }
    Ok(with_efficiency(front))
}

/// Formats points as a table.
pub fn points_table(points: &[Point]) -> String {
    let columns = [
        Column::numbers("devices"),
        Column::numbers("step"),
        Column::numbers("samples/s"),
        Column::numbers("efficiency"),
        Column::numbers("memory"),
        Column::numbers("price/h"),
        Column::numbers("gap"),
        Column::words("layout"),
    ];
    let row = |point: &Point| {
        vec![
            point.devices.to_string(),
            Seconds::new(point.step_seconds).to_string(),
            format!("{:.1}", point.samples_per_second),
            format!("{:.1} %", point.efficiency * 100.0),
            Bytes::new(point.memory_bytes).to_string(),
            point.price_per_hour.map_or_else(|| "-".into(), |price| format!("{price:.2}")),
            if point.gap.is_finite() { format!("{:.1} %", point.gap * 100.0) } else { "-".into() },
            point.layout.clone(),
        ]
    };
    table(&columns, &points.iter().map(row).collect::<Vec<_>>())
}

/// Plots points: samples per second over devices; for a front, step time over memory with a series
/// per number of devices.
pub fn plot(name: &str, setting: &Setting, points: &[Point]) -> Plot {
    let title = format!("{} on {}: {name}", setting.model.name, setting.topology.name());
    if name == "scaling" {
        let curve = |series: &str, y: &dyn Fn(&Point) -> f64| -> Vec<CurvePoint> {
            points.iter().map(|point| CurvePoint { series: series.into(), x: point.devices as f64, y: y(point) }).collect()
        };
        let first = points.first().map_or(1.0, |point| point.samples_per_second / point.devices.max(1) as f64);
        let all = [
            curve("best layout", &|point| point.samples_per_second),
            curve("linear scaling", &|point| first * point.devices as f64),
        ];
        return Plot::curve(title, ["devices", "samples per second"], &all.concat());
    }
    let mut of_devices: Vec<CurvePoint> = points
        .iter()
        .map(|point| CurvePoint {
            series: format!("{} devices", point.devices),
            x: point.memory_bytes as f64 / 2f64.powi(30),
            y: point.step_seconds,
        })
        .collect();
    of_devices.sort_by(|a, b| a.series.cmp(&b.series).then(a.x.total_cmp(&b.x)));
    Plot::curve(title, ["peak memory of a device (GiB)", "step time (s)"], &of_devices)
}

/// Returns how many nodes would be enough when nothing fits: the least of 2, 4, 8 and 16 times as
/// many. `None` also if `--time-limit` is over before that is known.
pub fn enough_nodes(choices: &Choices, setting: &Setting, started: Instant) -> Result<Option<usize>, Failure> {
    if setting.topology.node_groups().len() != 1 {
        return Ok(None);
    }
    for times in [2, 4, 8, 16] {
        if choices.is_over(started) {
            break;
        }
        let devices = setting.topology.device_count() * times;
        match point(choices, setting, (devices, choices.memory_limit), end_of_search(choices, started, 1))? {
            Outcome::Found(point) => return Ok(Some(point.nodes)),
            Outcome::NoFit => {}
            Outcome::OutOfTime(_) => break,
        }
    }
    Ok(None)
}

/// Memory limit per device: the smallest device's memory, or `--memory-limit` if that is less.
pub fn limit(choices: &Choices, topology: &Topology) -> Bytes {
    let least = topology.least_memory();
    choices.memory_limit.map_or(least, |limit| limit.min(least))
}
