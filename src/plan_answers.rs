//! What `foretell plan` says beside the layouts: why they are the best, how the model scales, what can be traded for what.

use crate::failure::Failure;
use crate::plan::{Choices, Setting};
use crate::predict;
use foretell_planner::{Candidate, Planned, PlannerError, Request, plan};
use foretell_program::{Layout, Plan, Profile, Rank, Recompute, StageLayout, compile_training};
use foretell_reports::{Column, CurvePoint, Plot, table};
use foretell_simulator::{Folding, WhatIf, predict as foretell};
use foretell_topologies::Topology;
use foretell_units::{Bytes, DataType, Seconds};
use serde::Serialize;

/// What is asked of those that are shown: whether they would still stand in that order.
const QUESTIONS: [&str; 4] = ["inter_node.bandwidth*2", "inter_node.bandwidth/2", "intra_node.bandwidth/2", "peak*2"];

/// Why the best is best: what was searched, what the others lose and where, what binds, and what would change the answer.
pub fn explanation(
    planned: &Planned,
    setting: &Setting,
    profile: Option<&Profile>,
    limit: Option<Bytes>,
) -> Result<String, Failure> {
    let search = &planned.search;
    let Some(best) = planned.candidates.first() else { return Ok(String::new()) };
    let stopped = match search.stopped {
        0 => String::new(),
        stopped => format!(" ({stopped} of them as their simulations went on)"),
    };
    let mut text = format!(
        "searched {} layouts in {:.2} s: {} are the same Program as another, {} offload or recompute what fits without, {} do not divide \
         the model, {} do not fit, {} cannot be better by their bounds{}, {} simulated;\nnone left can be better than {:.3} ms (gap {:.2} %)\n",
        search.layouts,
        search.wall_seconds,
        search.alike,
        search.needless,
        search.indivisible,
        search.out_of_memory,
        search.bounded_out,
        stopped,
        search.simulated,
        search.lower_bound_seconds * 1e3,
        search.gap * 100.0
    );
    text.push_str(&format!("\nlayout 1\n{}", predict::table(&best.prediction, &setting.topology)));
    text.push_str(&format!("\nwhat binds: {}\n", what_binds(best, &setting.topology, limit)?));
    for (index, candidate) in planned.candidates.iter().enumerate().skip(1) {
        text.push_str(&format!("\nlayout {}: {}\n", index + 1, what_it_loses(best, candidate)));
    }
    text.push_str(&what_would_change(planned, setting, profile)?);
    Ok(text)
}

/// The largest part of the step that is not arithmetic, and how full the fullest device is.
fn what_binds(candidate: &Candidate, topology: &Topology, limit: Option<Bytes>) -> Result<String, Failure> {
    let prediction = &candidate.prediction;
    let parts = &prediction.breakdown_seconds;
    let step = prediction.step_seconds.value().max(f64::MIN_POSITIVE);
    let share = |time: Seconds| time.value() / step * 100.0;
    let (full, limit) = fullest(candidate, topology, limit)?;
    let of_limit = full.value() / limit.value().max(1.0) * 100.0;
    let lost = [
        ("waiting for communication", parts.exposed_communication),
        ("the pipeline's bubble", parts.bubble),
        ("the update", parts.optimizer),
    ];
    let largest =
        lost.into_iter().max_by(|a, b| a.1.value().total_cmp(&b.1.value())).map_or(("nothing", Seconds::ZERO), |one| one);
    let kernels = share(parts.compute);
    let memory = if of_limit > 90.0 { ", and memory leaves no room" } else { "" };
    let first = if kernels > 85.0 {
        "the devices' arithmetic".to_owned()
    } else {
        format!("{} ({:.1} % of the step)", largest.0, share(largest.1))
    };
    let on_hosts = prediction.host_memory_bytes.iter().copied().fold(Bytes::ZERO, Bytes::max);
    let hosts = if on_hosts > Bytes::ZERO { format!(", and {on_hosts} on its host") } else { String::new() };
    Ok(format!(
        "{first}; kernels take {kernels:.1} % of it, and the fullest device holds {full} of {limit} ({of_limit:.0} %){hosts}{memory}"
    ))
}

/// What the fullest device holds, for what it may: of devices of several kinds each stage has its own.
fn fullest(candidate: &Candidate, topology: &Topology, limit: Option<Bytes>) -> Result<(Bytes, Bytes), Failure> {
    let mesh = candidate.plan.mesh()?;
    let held = &candidate.prediction.peak_memory_bytes;
    let mut fullest = (Bytes::ZERO, topology.least_memory());
    for rank in (0..mesh.world_size()).map(Rank) {
        let memory = topology.device_kind(topology.device_of_rank(rank.0)).memory;
        let may = limit.map_or(memory, |limit| limit.min(memory));
        let holds = held.get(mesh.stage_of(rank)).copied().unwrap_or_default();
        if holds.value() * fullest.1.value() > fullest.0.value() * may.value() {
            fullest = (holds, may);
        }
    }
    Ok(fullest)
}

/// How a layout differs from the best, and which part of its step makes the difference.
fn what_it_loses(best: &Candidate, other: &Candidate) -> String {
    let (fast, slow) = (&best.prediction, &other.prediction);
    let change = (slow.step_seconds / fast.step_seconds - 1.0) * 100.0;
    let parts = |candidate: &Candidate| {
        let parts = &candidate.prediction.breakdown_seconds;
        [
            ("kernels", parts.compute.value()),
            ("communication that is waited for", parts.exposed_communication.value()),
            ("the bubble", parts.bubble.value()),
            ("loading", parts.data.value()),
            ("the update", parts.optimizer.value()),
        ]
    };
    let mut differences: Vec<(&str, f64)> =
        parts(best).into_iter().zip(parts(other)).map(|((name, best), (_, other))| (name, other - best)).collect();
    differences.sort_by(|a, b| b.1.abs().total_cmp(&a.1.abs()));
    let told = differences.iter().take(3).filter(|(_, difference)| difference.abs() > 0.001 * fast.step_seconds.value());
    let told: Vec<String> = told.map(|(name, difference)| format!("{name} {:+.1} ms", difference * 1e3)).collect();
    let because = if told.is_empty() { "nothing that can be told apart".to_owned() } else { told.join(", ") };
    format!("{change:+.1} %, with {}: {because}", words(&other.plan.layout))
}

/// A layout in words.
pub fn words(layout: &Layout) -> String {
    let mut words = match &layout.stages {
        Some(stages) => vec![format!("pipeline {}, of {}", layout.pipeline, meshes(stages))],
        None => vec![format!("data {}, tensor {}, pipeline {}", layout.data, layout.tensor, layout.pipeline)],
    };
    let mut add = |condition: bool, text: String| words.extend(condition.then_some(text));
    add(layout.context > 1, format!("context {}", layout.context));
    add(layout.expert > 1, format!("expert {}", layout.expert));
    let chunks = if layout.virtual_stages > 1 { format!(" of {} chunks", layout.virtual_stages) } else { String::new() };
    add(layout.follows_schedule(), format!("{}{chunks}", layout.schedule));
    add(layout.zero > 0, format!("ZeRO {}", layout.zero));
    add(layout.shard_group.is_some(), format!("shard groups of {}", layout.shard_group.unwrap_or(0)));
    add(layout.sequence_parallel, "sequence parallel".into());
    add(layout.recompute != Recompute::None, format!("recompute {}", layout.recompute));
    add(layout.offload.is_of_optimizer(), "optimizer state on the hosts".into());
    add(layout.offload.is_of_activations(), "activations on the hosts".into());
    add(!layout.collective.is_automatic(), format!("all-reduces by {}", layout.collective.name()));
    add(layout.placement.is_some(), "the pipeline inside the nodes".into());
    add(!layout.operators.is_empty(), "operators placed one by one".into());
    add(layout.cuts.is_some(), format!("blocks {}", in_runs(layout.cuts.as_deref().unwrap_or_default())));
    add(
        layout.stage_places.is_some(),
        format!("stages at places {}", in_stretches(layout.stage_places.as_deref().unwrap_or_default())),
    );
    add(layout.shares.is_some(), format!("shares of samples {}", in_runs(layout.shares.as_deref().unwrap_or_default())));
    add(layout.bucket != Layout::default().bucket, format!("buckets of {}", layout.bucket));
    words.push(format!("micro-batch {}", layout.micro_batch));
    words.join(", ")
}

/// Stages' own meshes: `2 stages of data 4, tensor 2, then 4 stages of data 6, tensor 1`.
fn meshes(stages: &[StageLayout]) -> String {
    let of_run = |run: &[StageLayout]| {
        let StageLayout { data, tensor, context, expert, .. } = &run[0];
        let plural = if run.len() > 1 { "s" } else { "" };
        let others = [("context", context), ("expert", expert)].into_iter().filter(|(_, size)| **size > 1);
        let others: String = others.map(|(name, size)| format!(", {name} {size}")).collect();
        format!("{} stage{plural} of data {data}, tensor {tensor}{others}", run.len())
    };
    stages.chunk_by(|one, next| one == next).map(of_run).collect::<Vec<_>>().join(", then ")
}

/// Numbers of which many follow each other: `25-49, 0-24`.
fn in_stretches(numbers: &[usize]) -> String {
    let stretches = numbers.chunk_by(|one, next| *next == one + 1);
    stretches
        .map(|stretch| match stretch {
            [first, .., last] => format!("{first}-{last}"),
            _ => stretch.iter().map(usize::to_string).collect(),
        })
        .collect::<Vec<_>>()
        .join(", ")
}

/// Numbers of which many are alike: `8 x 5, 8 x 3`.
fn in_runs(numbers: &[usize]) -> String {
    let runs = numbers.chunk_by(|one, next| one == next);
    runs.map(|run| if run.len() > 1 { format!("{} x {}", run.len(), run[0]) } else { run[0].to_string() })
        .collect::<Vec<_>>()
        .join(", ")
}

/// Whether another of the layouts shown would be the best with other devices or links.
fn what_would_change(planned: &Planned, setting: &Setting, profile: Option<&Profile>) -> Result<String, Failure> {
    let mut text = String::from("\nwhat would change the answer, of the layouts shown:\n");
    let oversubscription = predict::oversubscription(false);
    for question in QUESTIONS {
        let what_if: WhatIf = question.parse().map_err(|error| Failure::Input(format!("{error}")))?;
        let topology = what_if.topology(&setting.topology)?;
        let mut steps: Vec<(usize, Seconds)> = Vec::new();
        for (index, candidate) in planned.candidates.iter().enumerate() {
            let costs = what_if.costs(&predict::costs(profile, &setting.topology, &candidate.plan)?);
            let program = compile_training(&setting.model.model, &setting.model.name, &candidate.plan)?;
            let (prediction, _) = foretell(&program, &topology, &costs, oversubscription, Folding::On)?;
            steps.push((index, prediction.step_seconds));
        }
        let fastest = steps.iter().min_by(|a, b| a.1.value().total_cmp(&b.1.value()));
        if let (Some(&(index, step)), Some(&(_, first))) = (fastest, steps.first()) {
            let verdict = if index == 0 {
                "layout 1 stays the fastest".to_owned()
            } else {
                format!("layout {} would be the fastest, and layout 1 take {first}", index + 1)
            };
            text.push_str(&format!("  {question:<24} {verdict}: {step}\n"));
        }
    }
    Ok(text)
}

/// The best layout at a number of devices.
#[derive(Clone, Debug, Serialize)]
pub struct Point {
    /// Devices that the layout uses.
    pub devices: usize,
    /// Nodes that there are.
    pub nodes: usize,
    /// The layout in words.
    pub layout: String,
    /// The number format.
    pub precision: DataType,
    /// The step.
    pub step_seconds: f64,
    /// Samples over it.
    pub samples_per_second: f64,
    /// What the fullest device holds.
    pub memory_bytes: u64,
    /// What the nodes cost an hour, if that is known.
    pub price_per_hour: Option<f64>,
    /// Samples a second and device over those of the first point.
    pub efficiency: f64,
    /// How far the step is above the least bound left.
    pub gap: f64,
}

/// The best layout at each size: the nodes double from those that have the first number of devices to those that have the second.
pub fn scaling(choices: &Choices, setting: &Setting, sizes: (usize, usize)) -> Result<Vec<Point>, Failure> {
    let mut points: Vec<Point> = Vec::new();
    let mut devices = sizes.0.max(1);
    while devices <= sizes.1 {
        if let Some(point) = point(choices, setting, devices, None)? {
            points.push(point);
        }
        devices *= 2;
    }
    if points.is_empty() {
        return Err(Failure::Undone("the model fits at none of these sizes; hint: ask for larger ones".into()));
    }
    Ok(with_efficiency(points))
}

fn with_efficiency(mut points: Vec<Point>) -> Vec<Point> {
    let each = |point: &Point| point.samples_per_second / point.devices.max(1) as f64;
    let first = points.first().map_or(1.0, each);
    points.iter_mut().for_each(|point| point.efficiency = each(point) / first);
    points
}

/// The fastest layout on so many devices that holds no more than so much on any; `None` where nothing fits.
fn point(choices: &Choices, setting: &Setting, devices: usize, memory: Option<Bytes>) -> Result<Option<Point>, Failure> {
    let of_node = setting.topology.node_groups().first().map_or(1, |group| group.devices.max(1));
    let topology = if setting.topology.node_groups().len() == 1 {
        setting.topology.clone().with_nodes(devices.div_ceil(of_node))?
    } else {
        setting.topology.clone()
    };
    if topology.device_count() < devices {
        return Ok(None);
    }
    let mut planned: Option<Planned> = None;
    let formats = choices.formats(setting);
    for &precision in &formats {
        let base = Plan { precision, ..setting.base.clone() };
        let costs = predict::costs(None, &topology, &base)?;
        let request = Request {
            fixed: choices.fix.clone(),
            devices,
            memory_limit: memory.or(choices.memory_limit),
            ..Request::new(&setting.model.model, &setting.model.name, &topology, &costs, &base)
        };
        let found = match plan(&request) {
            Ok(planned) => planned,
            // What does not fit in one format may in another.
            Err(PlannerError::OutOfMemory { .. } | PlannerError::NoLayout { .. }) => continue,
            Err(error) => return Err(error.into()),
        };
        planned = Some(match planned {
            Some(before) => before.merged(found, 1),
            None => found,
        });
    }
    let Some((planned, best)) = planned.as_ref().and_then(|planned| Some((planned, planned.candidates.first()?))) else {
        return Ok(None);
    };
    let ranks = best.plan.mesh()?.world_size();
    let format = if formats.len() > 1 { format!("{}, ", best.plan.precision) } else { String::new() };
    Ok(Some(Point {
        devices: ranks,
        nodes: topology.node_count(),
        layout: format!("{format}{}", words(&best.plan.layout)),
        precision: best.plan.precision,
        step_seconds: best.prediction.step_seconds.value(),
        samples_per_second: best.prediction.samples_per_second,
        memory_bytes: best.prediction.peak_memory_bytes.iter().map(|bytes| bytes.count()).max().unwrap_or(0),
        price_per_hour: topology.price_per_hour(),
        efficiency: 1.0,
        gap: planned.search.gap,
    }))
}

/// What can be traded for what: over sizes that double up to all devices, and limits of memory, the layouts than which no other is faster, smaller and
/// on fewer devices at once.
pub fn front(choices: &Choices, setting: &Setting) -> Result<Vec<Point>, Failure> {
    const SHARES_OF_MEMORY: [f64; 4] = [1.0, 0.75, 0.5, 0.25];
    let all = choices.devices(&setting.topology);
    let memory = limit(choices, &setting.topology);
    let mut points: Vec<Point> = Vec::new();
    let mut devices = all;
    while devices > 0 && points.len() < 64 {
        for share in SHARES_OF_MEMORY {
            let limit = Bytes::new((memory.value() * share) as u64);
            match point(choices, setting, devices, Some(limit))? {
                Some(point) => points.push(point),
                // What does not fit in so much does not fit in less.
                None => break,
            }
        }
        if devices % 2 == 1 {
            break;
        }
        devices /= 2;
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
        return Err(Failure::Undone("the model fits on none of these devices; hint: use more nodes".into()));
    }
    Ok(with_efficiency(front))
}

/// Points in a table.
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
            format!("{:.1} %", point.gap * 100.0),
            point.layout.clone(),
        ]
    };
    table(&columns, &points.iter().map(row).collect::<Vec<_>>())
}

/// Points as a plot: samples a second over devices; of a front those of one memory in a series.
pub fn plot(name: &str, setting: &Setting, points: &[Point]) -> Plot {
    let title = format!("{} on {}: {name}", setting.model.name, setting.topology.name());
    if name == "scaling" {
        let curve = |series: &str, y: &dyn Fn(&Point) -> f64| -> Vec<CurvePoint> {
            points.iter().map(|point| CurvePoint { series: series.into(), x: point.devices as f64, y: y(point) }).collect()
        };
        let first = points.first().map_or(1.0, |point| point.samples_per_second / point.devices.max(1) as f64);
        let all = [
            curve("the best layout", &|point| point.samples_per_second),
            curve("as efficient as the first", &|point| first * point.devices as f64),
        ];
        return Plot::curve(title, ["devices", "samples a second"], &all.concat());
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
    Plot::curve(title, ["GiB on the fullest device", "seconds a step"], &of_devices)
}

/// How many nodes would be enough where nothing fits: the least of two, four, eight and sixteen times as many.
pub fn enough_nodes(choices: &Choices, setting: &Setting) -> Result<Option<usize>, Failure> {
    if setting.topology.node_groups().len() != 1 {
        return Ok(None);
    }
    for times in [2, 4, 8, 16] {
        if let Some(point) = point(choices, setting, setting.topology.device_count() * times, choices.memory_limit)? {
            return Ok(Some(point.nodes));
        }
    }
    Ok(None)
}

/// The least memory of the devices that a request may use.
pub fn limit(choices: &Choices, topology: &Topology) -> Bytes {
    let least = topology.least_memory();
    choices.memory_limit.map_or(least, |limit| limit.min(least))
}
