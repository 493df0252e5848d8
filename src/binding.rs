//! What binds a plan's step, how full its devices are, and what to change: sentences for the
//! terminal and the report. It reads a prediction and simulates nothing.

use crate::failure::Failure;
use foretell_program::{Offload, Plan, Rank, Recompute};
use foretell_reports::{Fact, Section};
use foretell_simulator::Prediction;
use foretell_topologies::{Architecture, DeviceKind, Topology};
use foretell_units::{Bytes, Seconds};

/// A share of the step from which a loss is worth a sentence.
const NOTABLE: f64 = 0.05;

/// The percentage of the step from which compute counts as the bottleneck, whatever the other parts
/// are.
const MOSTLY: f64 = 85.0;

/// Limits of a device's memory.
#[derive(Clone, Copy, Debug, Default)]
pub struct Limits {
    /// The most that a rank may hold.
    pub memory_limit: Option<Bytes>,
    /// Share of a GPU's memory to leave free.
    pub headroom: f64,
}

/// Names the bottleneck (compute, or the largest part of the rest of the step), and how full the
/// fullest device is.
pub fn what_binds(plan: &Plan, prediction: &Prediction, topology: &Topology, limits: Limits) -> Result<String, Failure> {
    let parts = &prediction.breakdown_seconds;
    let share = |time: Seconds| share_of_step(prediction, time) * 100.0;
    let (full, limit) = fullest(plan, prediction, topology, limits)?;
    let of_limit = full.value() / limit.value().max(1.0) * 100.0;
    // Without a pipeline, devices are idle because the host launches kernels too slowly or because
    // ranks wait.
    let bubble = if plan.layout.pipeline > 1 { "pipeline bubble" } else { "waiting for launches or slower ranks" };
    let lost = [
        ("exposed communication", parts.exposed_communication),
        (bubble, parts.bubble),
        ("optimizer", parts.optimizer),
        ("input", parts.data),
    ];
    let largest =
        lost.into_iter().max_by(|a, b| a.1.value().total_cmp(&b.1.value())).map_or(("nothing", Seconds::ZERO), |kind| kind);
    let compute = share(parts.compute);
    let first = if compute > MOSTLY {
        format!("compute, {compute:.1} % of the step")
    } else {
        format!("{}, {:.1} % of the step (compute: {compute:.1} %)", largest.0, share(largest.1))
    };
    let on_hosts = prediction.host_memory_bytes.iter().copied().fold(Bytes::ZERO, Bytes::max);
    let hosts = if on_hosts > Bytes::ZERO { format!(", and {on_hosts} on its host") } else { String::new() };
    Ok(format!("{first}; the fullest device holds {full} of {limit} ({of_limit:.0} %){hosts}"))
}

/// Memory held and memory limit of the device that is fullest relative to its limit.
fn fullest(plan: &Plan, prediction: &Prediction, topology: &Topology, limits: Limits) -> Result<(Bytes, Bytes), Failure> {
    let mesh = plan.mesh()?;
    // A framework's allocator also uses memory that the limit leaves free, as long as there is
    // some.
    let limits = if prediction.is_traced() { Limits::default() } else { limits };
    let held = &prediction.peak_memory_bytes;
    let mut fullest = (Bytes::ZERO, least_limit(topology, limits));
    for rank in (0..mesh.world_size()).map(Rank) {
        let may = may_hold(topology.device_kind(topology.device_of_rank(rank.0)), limits);
        let holds = held.get(mesh.stage_of(rank)).copied().unwrap_or_default();
        if holds.value() * fullest.1.value() > fullest.0.value() * may.value() {
            fullest = (holds, may);
        }
    }
    Ok(fullest)
}

/// The most that a rank on a device may hold.
fn may_hold(kind: &DeviceKind, limits: Limits) -> Bytes {
    let free = if kind.architecture == Architecture::Cpu { 0.0 } else { limits.headroom };
    let memory = Bytes::new((kind.memory.value() * (1.0 - free)) as u64);
    limits.memory_limit.map_or(memory, |limit| limit.min(memory))
}

/// The most that a rank on any device may hold.
pub fn least_limit(topology: &Topology, limits: Limits) -> Bytes {
    topology.device_kinds().iter().map(|kind| may_hold(kind, limits)).min().expect("invariant: a topology has a kind of device")
}

fn share_of_step(prediction: &Prediction, time: Seconds) -> f64 {
    time.value() / prediction.step_seconds.value().max(f64::MIN_POSITIVE)
}

/// The answer at the top of a report. `measured` is the step time of the plan's run, if there is
/// one.
pub fn answer(
    plan: &Plan,
    prediction: &Prediction,
    topology: &Topology,
    limits: Limits,
    measured: Option<Seconds>,
) -> Result<Section, Failure> {
    let ranks = plan.mesh()?.world_size();
    let (full, limit) = fullest(plan, prediction, topology, limits)?;
    let percent = full.value() / limit.value().max(1.0) * 100.0;
    let interval = format!("80 % interval {} to {}", prediction.step_seconds_p10, prediction.step_seconds_p90);
    let mut facts = vec![Fact::new("predicted step", prediction.step_seconds.to_string(), interval)];
    if let Some(measured) = measured.filter(|measured| *measured > Seconds::ZERO) {
        let error = (prediction.step_seconds / measured - 1.0) * 100.0;
        facts.push(Fact::new("measured step", measured.to_string(), format!("the prediction is {error:+.1} % off")));
    }
    facts.push(Fact {
        percent: Some(percent.round() as u32),
        ..Fact::new("memory of the fullest device", full.to_string(), format!("{percent:.0} % of {limit}"))
    });
    if prediction.mfu > 0.0 {
        let with_recomputation = format!("{:.1} % with recomputation (HFU)", prediction.hfu * 100.0);
        facts.push(Fact::new("MFU", format!("{:.1} %", prediction.mfu * 100.0), with_recomputation));
    } else {
        facts.push(Fact::new("MFU", "unknown", "no peak rate of these devices is known"));
    }
    let (rate, what) = match prediction.tokens_per_second {
        Some(tokens) => (tokens, "tokens"),
        None => (prediction.samples_per_second, "samples"),
    };
    let each = rate / ranks.max(1) as f64;
    facts.push(Fact::new("throughput", format!("{rate:.0} {what}/s"), format!("{each:.1} {what}/s on each of {ranks} devices")));
    let mut sentences = vec![format!("Bottleneck: {}.", what_binds(plan, prediction, topology, limits)?)];
    let changes = what_to_change(plan, prediction, percent / 100.0);
    if changes.is_empty() {
        let none =
            "No part of the step that a plan can change takes more than 5 %. Only faster kernels or devices would shorten it.";
        sentences.push(none.to_owned());
    }
    sentences.extend(changes.into_iter().map(|change| format!("To change: {change}.")));
    if !prediction.calibrated {
        let count = prediction.uncalibrated.len();
        sentences.push(format!("Not calibrated: {count} durations are estimates. `foretell calibrate` measures them."));
    }
    Ok(Section::Answer { facts, sentences })
}

/// Suggests changes of the plan that reduce its largest losses, the largest first.
fn what_to_change(plan: &Plan, prediction: &Prediction, memory: f64) -> Vec<String> {
    let (layout, parts) = (&plan.layout, &prediction.breakdown_seconds);
    let mut losses: Vec<(f64, String)> = Vec::new();
    let mut add = |share: f64, applies: bool, text: String| {
        if applies && share > NOTABLE {
            losses.push((share, text));
        }
    };
    let bubble = share_of_step(prediction, parts.bubble);
    let more = if layout.micro_batch > 1 { "a smaller `micro_batch`" } else { "a larger `global_batch`" };
    add(
        bubble,
        layout.pipeline > 1,
        format!(
            "the bubble is {:.0} % of the step; {more} gives the pipeline more micro-batches, and more `virtual_stages` or fewer stages make it shorter",
            bubble * 100.0
        ),
    );
    add(
        bubble,
        layout.pipeline == 1,
        format!(
            "devices wait {:.0} % of the step for the host to launch kernels, or for slower ranks; a larger `micro_batch` needs \
             fewer launches, and even work fewer waits",
            bubble * 100.0
        ),
    );
    let exposed = share_of_step(prediction, parts.exposed_communication);
    let words = if layout.tensor > 1 {
        "a smaller `tensor` has less to send, and its groups belong within a node"
    } else if plan.layout.data > 1 && layout.zero < 3 {
        "more samples per rank (a larger `global_batch`) give the gradients' reduction more to hide behind"
    } else if layout.data == 1 && layout.pipeline > 1 {
        "fewer stages, or a larger `micro_batch`, send fewer messages"
    } else if layout.data == 1 {
        "more samples per rank leave less to wait for"
    } else {
        "a smaller shard group, or more samples per rank, leaves less to wait for"
    };
    add(exposed, true, format!("exposed communication is {:.0} % of the step; {words}", exposed * 100.0));
    let update = share_of_step(prediction, parts.optimizer);
    let spread = layout.zero == 0 && layout.data > 1;
    add(update, spread, format!("the update is {:.0} % of the step; `zero: 1` spreads it over the `data` ranks", update * 100.0));
    let loading = share_of_step(prediction, parts.data);
    add(loading, true, format!("the step waits {:.0} % for samples; raise `--workers` of `foretell execute`", loading * 100.0));
    losses.sort_by(|loss, other| other.0.total_cmp(&loss.0));
    let mut said: Vec<String> = losses.into_iter().map(|(_, text)| text).collect();
    if memory > 0.9 {
        let way = match (layout.zero, &layout.recompute, layout.offload) {
            (0, _, _) if layout.data > 1 => "`zero: 1` shards the optimizer's state",
            (_, Recompute::None, _) => "`recompute: selective` or `full` keeps fewer activations",
            (_, _, Offload::None) => "`offload: optimizer` moves state to the hosts",
            _ => "a larger `tensor` or `pipeline` splits the model further",
        };
        said.push(format!("the fullest device has {:.0} % of its memory in use; {way}", memory * 100.0));
    }
    said
}
