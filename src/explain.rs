//! `foretell plan --explain`: why the best layout is best, and where the others lose.

use crate::choices::Setting;
use crate::failure::Failure;
use crate::predict;
use foretell_planner::{Candidate, Planned};
use foretell_program::{Layout, Profile, Rank, Recompute, StageLayout, compile_training};
use foretell_simulator::{Folding, WhatIf, predict as simulate};
use foretell_topologies::Topology;
use foretell_units::{Bytes, Seconds};

/// Changes of hardware for which `--explain` simulates the shown layouts again.
const QUESTIONS: [&str; 4] = ["inter_node.bandwidth*2", "inter_node.bandwidth/2", "intra_node.bandwidth/2", "peak*2"];

/// Explains an answer: what was searched, what binds, what the other layouts lose and where, and
/// which change of hardware would change the answer.
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
        stopped => format!(" ({stopped} of them during their simulation)"),
    };
    let mut text = format!(
        "searched {} layouts in {:.2} s: {} duplicates, {} with needless offload or recomputation, {} that do not divide the model, \
         {} that do not fit, {} ruled out by their lower bound{}, {} simulated;\nno remaining layout can be faster than {:.3} ms (gap {:.2} %)\n",
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

/// Names the resource that binds: arithmetic, or the largest part of the step without it; and how
/// full the fullest device is.
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
    let memory = if of_limit > 90.0 { "; memory is nearly full" } else { "" };
    let first = if kernels > 85.0 {
        "the devices' arithmetic".to_owned()
    } else {
        format!("{} ({:.1} % of the step)", largest.0, share(largest.1))
    };
    let on_hosts = prediction.host_memory_bytes.iter().copied().fold(Bytes::ZERO, Bytes::max);
    let hosts = if on_hosts > Bytes::ZERO { format!(", and {on_hosts} on its host") } else { String::new() };
    Ok(format!(
        "{first}; kernels take {kernels:.1} % of the step, and the fullest device holds {full} of {limit} ({of_limit:.0} %){hosts}{memory}"
    ))
}

/// Memory held and memory limit of the device that is fullest relative to its limit.
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

/// Says how much slower a layout is than the best one, and which parts of its step make the
/// difference.
fn what_it_loses(best: &Candidate, other: &Candidate) -> String {
    let (fast, slow) = (&best.prediction, &other.prediction);
    let change = (slow.step_seconds / fast.step_seconds - 1.0) * 100.0;
    let parts = |candidate: &Candidate| {
        let parts = &candidate.prediction.breakdown_seconds;
        [
            ("kernels", parts.compute.value()),
            ("exposed communication", parts.exposed_communication.value()),
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
    let because = if told.is_empty() { "no part differs measurably".to_owned() } else { told.join(", ") };
    format!("{change:+.1} %, with {}: {because}", words(&other.plan.layout))
}

/// Describes a layout in words.
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
    add(layout.offload.is_of_optimizer(), "optimizer state offloaded".into());
    add(layout.offload.is_of_activations(), "activations offloaded".into());
    add(!layout.collective.is_automatic(), format!("all-reduce by {}", layout.collective.name()));
    add(layout.placement.is_some(), "the pipeline inside the nodes".into());
    add(!layout.operators.is_empty(), "operators sharded one by one".into());
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

/// Describes stages with their own meshes: `2 stages of data 4, tensor 2, then 4 stages of data 6,
/// tensor 1`.
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

/// Formats numbers with consecutive runs joined: `25-49, 0-24`.
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

/// Formats numbers with repeats counted: `8 x 5, 8 x 3`.
fn in_runs(numbers: &[usize]) -> String {
    let runs = numbers.chunk_by(|one, next| one == next);
    runs.map(|run| if run.len() > 1 { format!("{} x {}", run.len(), run[0]) } else { run[0].to_string() })
        .collect::<Vec<_>>()
        .join(", ")
}

/// Says which of the shown layouts would be fastest with other devices or links.
fn what_would_change(planned: &Planned, setting: &Setting, profile: Option<&Profile>) -> Result<String, Failure> {
    let mut text = String::from("\nwhat would change the answer, among the layouts shown:\n");
    let oversubscription = predict::oversubscription(false);
    for question in QUESTIONS {
        let what_if: WhatIf = question.parse().map_err(|error| Failure::Input(format!("{error}")))?;
        let topology = what_if.topology(&setting.topology)?;
        let mut steps: Vec<(usize, Seconds)> = Vec::new();
        for (index, candidate) in planned.candidates.iter().enumerate() {
            let costs = what_if.costs(&predict::costs(profile, &setting.topology, &candidate.plan)?);
            let program = compile_training(&setting.model.model, &setting.model.name, &candidate.plan)?;
            let (prediction, _) = simulate(&program, &topology, &costs, oversubscription, Folding::On)?;
            steps.push((index, prediction.step_seconds));
        }
        let fastest = steps.iter().min_by(|a, b| a.1.value().total_cmp(&b.1.value()));
        if let (Some(&(index, step)), Some(&(_, first))) = (fastest, steps.first()) {
            let verdict = if index == 0 {
                "layout 1 stays the fastest".to_owned()
            } else {
                format!("layout {} would be the fastest; layout 1 would take {first}", index + 1)
            };
            text.push_str(&format!("  {question:<24} {verdict}: {step}\n"));
        }
    }
    Ok(text)
}
