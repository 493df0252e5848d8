//! `foretell plan --explain`: why the best layout is the best, and where the others lose time.

use crate::binding::what_binds;
use crate::changes::Changes;
use crate::choices::{Choices, Objective, Setting};
use crate::failure::Failure;
use crate::idle::idle_devices;
use crate::objective_words::ObjectiveWords;
use crate::predict;
use foretell_models::GraphOptions;
use foretell_planner::{Candidate, Dimension, Search, SearchResult};
use foretell_program::{Layout, Plan, Profile, usual_cuts, work_of_blocks};
use foretell_simulator::Prediction;
use foretell_simulator::gpu::StackLimits;
use foretell_topologies::{Architecture, Topology};
use foretell_units::Seconds;

/// Explains an answer: what was searched, what binds, what the other layouts lose and where, and
/// which change of hardware would change the answer.
pub fn explanation(
    planned: &SearchResult,
    setting: &Setting,
    profile: Option<&Profile>,
    choices: &Choices,
) -> Result<String, Failure> {
    let search = &planned.search;
    let Some(best) = planned.candidates.first() else { return Ok(String::new()) };
    let stopped = match search.stopped {
        0 => String::new(),
        stopped => format!(" ({stopped} of them during their simulation)"),
    };
    let mut text = format!(
        "searched {} layouts in {:.2} s: {} duplicates, {} with needless offload or recomputation, {} that do not divide the model, \
         {} that do not fit, {} ruled out by their lower bound{}, {} simulated, {} more for a first answer and around the best;\n{}\n",
        search.layouts,
        search.wall_seconds,
        search.alike,
        search.needless,
        search.indivisible,
        search.out_of_memory,
        search.bounded_out,
        stopped,
        search.simulated,
        search.probed,
        bound_of(search)
    );
    text.push_str(&stated_space(search));
    text.push_str(&format!("\nlayout 1\n{}", predict::table(&best.prediction, &setting.topology)));
    let limits = choices.limits(&best.plan.stack);
    text.push_str(&format!("\nbottleneck: {}\n", what_binds(&best.plan, &best.prediction, &setting.topology, limits)?));
    for (index, candidate) in planned.candidates.iter().enumerate().skip(1) {
        text.push_str(&format!("\nlayout {}: {}\n", index + 1, what_it_loses(best, candidate)));
    }
    // Other objectives do not choose by time.
    if matches!(choices.objective, Objective::Time | Objective::TimeToLoss) {
        text.push_str(&Changes::new(planned, setting, profile)?.in_full()?);
    }
    Ok(text)
}

/// States the space: each dimension with its values, and the values that are left out of it.
fn stated_space(search: &Search) -> String {
    let mut text = format!(
        "\nthe space; {} values are left out by judgement, and lists of numbers that cannot be counted; \
         the bound of the space covers what is listed, and all of {}; the bound of plan files covers every value:\n",
        search.heuristic_exclusions,
        search.covers.join(", ")
    );
    for dimension in &search.space {
        let left_out = match (dimension.is_covered(), dimension.left_out) {
            (true, _) => String::new(),
            (false, Some(0)) => format!("; not in every layout: {}", dimension.reason),
            (false, Some(count)) => format!("; left out: {count}, since {}", dimension.reason),
            (false, None) => format!("; left out: {}", dimension.reason),
        };
        text.push_str(&format!("  {:<15} {}{left_out}\n", dimension.name, dimension.values));
    }
    text
}

/// States the bounds of a search: that of the space, and that of everything that a plan file can
/// say.
fn bound_of(search: &Search) -> String {
    let of_space = if search.gap.is_finite() {
        let bound = Seconds::new(search.lower_bound_seconds);
        format!("no remaining layout of the space can be faster than {bound} (gap {:.2} %)", search.gap * 100.0)
    } else {
        "nothing is proven about the remaining layouts".into()
    };
    let any = search.bound_of_any_layout_seconds;
    let of_any = if any > 0.0 {
        format!(
            "no plan file of this job, whatever its mesh, buckets, cuts and rank order, can be faster than {} (gap {:.1} %): \
             the job's kernels, divided perfectly among the devices, and the stack's fixed time of a step take as long",
            Seconds::new(any),
            (search.best_seconds / any - 1.0) * 100.0
        )
    } else {
        "nothing is proven about plan files beyond the space: the least time of the kernels is not known".into()
    };
    format!("{of_space};\n{of_any}")
}

/// Says that a search was ended early, and how far its answer may be from the best; `None` if the
/// search was complete.
pub fn cut_off(planned: &SearchResult, objective: &ObjectiveWords) -> Option<String> {
    let search = &planned.search;
    let gap = if search.gap.is_finite() {
        let (what, more) = objective.names();
        format!("{what} may be up to {:.1} % {more} than that of the best layout", search.gap * 100.0)
    } else {
        "nothing is proven about it".to_owned()
    };
    search
        .is_cut_off
        .then(|| format!("search cut off after {:.1} s: this is the best layout so far, and {gap}", search.wall_seconds))
}

/// Says which job was searched: model, cluster, and the software that trains.
pub fn title(setting: &Setting) -> String {
    let topology = &setting.topology;
    let (devices, stack) = (topology.device_count(), setting.base.stack.name());
    format!("{} on {} ({devices} devices), trained by {stack}", setting.model.name, topology.name())
}

/// Chance of running out of memory from which an answer mentions it, and says what would free
/// memory.
pub const RISKY: f64 = 0.1;

/// Largest step, as a multiple of the fastest layout's, at which a layout that is unlikely to run
/// out of memory is preferred.
const WORTH_SAFETY: f64 = 1.5;

/// Number of fastest layouts that [`safest`] chooses from.
pub const LAYOUTS_TO_CHOOSE_FROM: usize = 5;

/// The best of some candidates, the fastest first: the first that is unlikely to run out of memory
/// and not much slower than the fastest, else the first that probably does not run out.
pub fn safest(candidates: &[Candidate]) -> Option<&Candidate> {
    let mut likely = candidates.iter().filter(|candidate| !candidate.prediction.probably_runs_out());
    let first = likely.clone().next()?;
    let longest = first.prediction.step_seconds * WORTH_SAFETY;
    let is_safe = |prediction: &Prediction| prediction.chance_of_running_out.is_none_or(|chance| chance <= RISKY);
    let safe = likely.find(|candidate| is_safe(&candidate.prediction) && candidate.prediction.step_seconds <= longest);
    Some(safe.unwrap_or(first))
}

/// A chance of running out of memory in words, if it is worth mentioning.
pub fn risk(chance: Option<f64>) -> Option<String> {
    chance.filter(|&chance| chance > RISKY).map(|chance| format!("runs out with a chance of {:.0} %", chance * 100.0))
}

/// Whether an answer fits, the chance that it does not, and what holds the memory at its peak, for
/// predictions from a framework's own allocations; `None` for other predictions, unless the job is
/// fine-tuning.
pub fn fit(prediction: &Prediction, topology: &Topology, is_fine_tuning: bool) -> Option<String> {
    let device = topology.device_kinds().first()?;
    let held = prediction.peak_memory_bytes.iter().copied().max()?;
    let (Some(chance), Some(peak)) = (prediction.chance_of_running_out, prediction.memory_peak.as_ref()) else {
        let line = format!("fits: {held} of {} on each `{}`, by the stack's profile", device.memory, device.name);
        return is_fine_tuning.then_some(line);
    };
    let verdict = match chance {
        _ if prediction.probably_runs_out() => "probably does not fit",
        chance if chance > RISKY => "fits, but may run out",
        _ => "fits",
    };
    let chance = if chance < 0.005 { "less than 1 %".into() } else { format!("{:.0} %", chance * 100.0) };
    Some(format!(
        "{verdict}: {held} of {} on each `{}`; chance of running out: {chance}; peak: {peak}",
        device.memory, device.name
    ))
}

/// Explains an answer in a few lines: what binds, the second best layout, how certain their order
/// is, which `changes` of hardware would change the answer, what is unusual about it, and how much
/// memory stays free.
pub fn in_short(
    planned: &SearchResult,
    setting: &Setting,
    choices: &Choices,
    changes: Option<String>,
) -> Result<Vec<String>, Failure> {
    let Some(best) = planned.candidates.first() else { return Ok(Vec::new()) };
    let stack = &best.plan.stack;
    let binds = what_binds(&best.plan, &best.prediction, &setting.topology, choices.limits(stack))?;
    let mut lines = vec![format!("bottleneck: {binds}")];
    if let Some(second) = planned.candidates.get(1) {
        let objective = ObjectiveWords::new(choices.objective, setting.topology.currency());
        let loses = what_it_loses(best, second);
        // For samples of different lengths the mean step decides, not the step of the longest
        // samples.
        let is_by_step = [best, second].iter().all(|candidate| candidate.value <= candidate.prediction.step_seconds.value());
        lines.push(if objective.column().is_none() && is_by_step && !objective.is_less(second, best) {
            let sure = likelihood_of_order(best, second) * 100.0;
            format!("second best: layout 2, {loses}; layout 1 is faster with a likelihood of {sure:.0} %")
        } else {
            format!("second best: layout 2: {}; step {loses}", objective.difference(best, second))
        });
    }
    lines.extend(changes);
    if !planned.search.is_cut_off {
        lines.push(certificate(&planned.search));
    }
    lines.extend(oddities(best, &planned.search, setting, choices)?);
    if let Some(limits) = StackLimits::of(stack) {
        lines.push(format!("the space is what `{}` runs: {}", stack.name(), limits.in_words()));
    }
    let kinds = setting.topology.device_kinds();
    let whose = kinds.iter().find_map(|kind| match kind.architecture {
        Architecture::Cpu => None,
        Architecture::Gpu => Some("GPU"),
        Architecture::Tpu => Some("TPU"),
    });
    let share = choices.headroom(stack) * 100.0;
    if let Some(whose) = whose.filter(|_| share > 0.0 && !best.prediction.is_traced()) {
        lines.push(format!("{share:.1} % of each {whose}'s memory stays free for the driver and its libraries (`--headroom`)"));
    }
    Ok(lines)
}

/// Says how far the answer may be from the best layout of the space, what the space leaves out, and
/// how far it may be from any plan.
fn certificate(search: &Search) -> String {
    let gap = search.gap * 100.0;
    let of_space = if search.gap < ROUNDED_AWAY {
        format!("optimal within the searched space (gap {gap:.2} %)")
    } else {
        format!("within {gap:.2} % of the best layout of the searched space")
    };
    let lacks_values = |part: &&Dimension| !part.is_covered() && part.left_out != Some(0);
    let cut: Vec<&str> = search.space.iter().filter(lacks_values).map(|part| part.name.as_str()).collect();
    let (named, others): (Vec<&str>, Vec<&str>) = cut.iter().partition(|name| OFTEN_MATTER.contains(name));
    let left_out = match (named.len(), others.len()) {
        (0, 0) => String::new(),
        (0, count) => format!("; not searched: some values of {count} dimensions"),
        (_, 0) => format!("; not searched: some values of {}", named.join(", ")),
        (_, count) => format!("; not searched: some values of {} and {count} others", named.join(", ")),
    };
    let of_any = match search.best_seconds / search.bound_of_any_layout_seconds - 1.0 {
        share if share < MOST_SAID => format!("; bound over all plans: none can be more than {:.0} % faster", share * 100.0),
        _ => String::new(),
    };
    format!("{of_space}{left_out}{of_any} (`--explain` states the space)")
}

/// Dimensions whose values outside of the space are most likely to matter.
const OFTEN_MATTER: [&str; 5] = ["micro_batch", "recompute", "bucket", "cuts", "stages"];

/// The largest gap that is printed as zero.
const ROUNDED_AWAY: f64 = 0.000_05;

/// The largest lead over the bound of all plan files that is mentioned.
const MOST_SAID: f64 = 10.0;

/// The probability that the first of two layouts is the faster one, if the errors of their
/// predictions are independent. Errors of layouts of one job mostly agree, so the true probability
/// is higher. The slow ends of the intervals are left out: what slows a whole run slows it in
/// either layout.
fn likelihood_of_order(first: &Candidate, second: &Candidate) -> f64 {
    /// Standard deviations between the 10th percentile and the median.
    const DEVIATIONS: f64 = 1.282;
    /// Factor that makes the logistic function approximate the normal distribution (Bowling et al.
    /// 2009).
    const LOGISTIC: f64 = 1.702;
    let deviation =
        |candidate: &Candidate| (candidate.prediction.step_seconds - candidate.prediction.step_seconds_p10).value() / DEVIATIONS;
    let apart = (second.prediction.step_seconds - first.prediction.step_seconds).value();
    let both = deviation(first).hypot(deviation(second)).max(f64::MIN_POSITIVE);
    1.0 / (1.0 + (-LOGISTIC * apart / both).exp())
}

/// Stages from which on a pipeline is unusually long.
const MANY_STAGES: usize = 30;

/// Names what an expert would ask about: idle devices, a tensor group that spans nodes, very many
/// stages, stages without a layer.
fn oddities(best: &Candidate, search: &Search, setting: &Setting, choices: &Choices) -> Result<Vec<String>, Failure> {
    let topology = &setting.topology;
    let (layout, ranks) = (&best.plan.layout, best.plan.mesh()?.world_size());
    let devices = choices.devices(setting).min(topology.device_count());
    let mut said = Vec::new();
    if ranks < devices {
        said.push(idle_devices(best, search, topology, ranks..devices));
    }
    let per_node = topology.node_groups().iter().map(|group| group.devices).min().expect("invariant: a topology has nodes");
    if layout.tensor > per_node && choices.fix.tensor.is_none() {
        said.push(format!(
            "`tensor` spans {} nodes: no layout with smaller groups is known to be faster",
            layout.tensor.div_ceil(per_node)
        ));
    }
    if layout.pipeline > MANY_STAGES && choices.fix.pipeline.is_none() {
        said.push(format!("{} stages are many: no shorter pipeline is known to be faster", layout.pipeline));
    }
    said.extend(stages_without_layers(&best.plan, setting, choices)?);
    Ok(said)
}

/// Names the stages that hold none of the model's layers, but only the parts before or after them,
/// such as the embedding.
fn stages_without_layers(plan: &Plan, setting: &Setting, choices: &Choices) -> Result<Option<String>, Failure> {
    let Layout { pipeline, virtual_stages, schedule, .. } = plan.layout;
    if pipeline == 1 || choices.fix.cuts.is_some() {
        return Ok(None);
    }
    let graph = plan.training.graph(&setting.model.model, &setting.model.name, &GraphOptions::ONE)?;
    let cuts = plan.layout.cuts.clone().unwrap_or_else(|| usual_cuts(&work_of_blocks(&graph), pipeline, virtual_stages));
    let mut layers = vec![0; pipeline];
    let mut others = vec![Vec::new(); pipeline];
    let mut blocks = graph.blocks.iter();
    for (chunk, count) in cuts.into_iter().enumerate() {
        let stage = schedule.place(pipeline, chunk).0;
        for block in blocks.by_ref().take(count) {
            if block.recomputable {
                layers[stage] += 1;
            } else {
                others[stage].push(block.name.as_str());
            }
        }
    }
    let alone: Vec<String> = (0..pipeline)
        .filter(|&stage| layers[stage] == 0)
        .map(|stage| format!("stage {stage} has no layer, but {}", others[stage].join(" and ")))
        .collect();
    Ok((!alone.is_empty() && layers.iter().any(|&count| count > 0))
        .then(|| format!("{}: no layout without such a stage is known to be faster", alone.join("; "))))
}

/// Compares a plan of the user's with the answer.
pub fn comparison(best: &Candidate, mine: &Candidate, name: &str) -> String {
    let fits = if mine.prediction.fits { "" } else { ", and it does not fit" };
    format!(
        "{name}: {}; {} against {} of layout 1{fits}: {}",
        mine.plan.layout.in_words(),
        mine.prediction.step_seconds,
        best.prediction.step_seconds,
        what_it_loses(best, mine)
    )
}

/// Says how much slower a layout is than the best one, and which parts of its step make the
/// difference.
fn what_it_loses(best: &Candidate, other: &Candidate) -> String {
    let (fast, slow) = (&best.prediction, &other.prediction);
    let change = (slow.step_seconds / fast.step_seconds - 1.0) * 100.0;
    // Avoids printing "-0.0 %".
    let change = if change.abs() < 0.05 { 0.0 } else { change };
    let parts = |candidate: &Candidate| {
        let parts = &candidate.prediction.breakdown_seconds;
        [
            ("compute", parts.compute.value()),
            ("exposed communication", parts.exposed_communication.value()),
            ("bubble", parts.bubble.value()),
            ("input", parts.data.value()),
            ("optimizer", parts.optimizer.value()),
        ]
    };
    let mut differences: Vec<(&str, f64)> =
        parts(best).into_iter().zip(parts(other)).map(|((name, best), (_, other))| (name, other - best)).collect();
    differences.sort_by(|a, b| b.1.abs().total_cmp(&a.1.abs()));
    let told = differences.iter().take(3).filter(|(_, difference)| difference.abs() > 0.001 * fast.step_seconds.value());
    let told: Vec<String> = told
        .map(|(name, difference)| {
            format!("{name} {}{}", if *difference < 0.0 { "-" } else { "+" }, Seconds::new(difference.abs()))
        })
        .collect();
    let because = if told.is_empty() { "no part differs measurably".to_owned() } else { told.join(", ") };
    format!("{change:+.1} %: {because}")
}
