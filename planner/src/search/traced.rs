//! Plans under a framework whose steps were traced: every layout that the framework can run is
//! predicted from its traced operators, so no bounds are needed.
//!
//! Such frameworks shard only the batch and the state of parameters. The space is the number of
//! ranks, the micro-batch, recomputation and ZeRO, and the offload if the user states one.

use super::answer::{Candidate, Search, SearchResult};
use crate::error::PlannerError;
use crate::objective;
use crate::space::{Dimension, Fixed, Objective, Request};
use foretell_program::traced::{stages_of_zero, traced_offloads, traced_stages};
use foretell_program::{Layout, Offload, Plan, Recompute};
use foretell_simulator::{PowerModel, Prediction, TracedOutcome, TracedPrediction, traced_energy, traced_plan, traced_within};
use foretell_topologies::DeviceId;
use foretell_units::Bytes;
use rayon::prelude::*;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};

/// Up to this many ranks, every number of ranks is tried; beyond it, only powers of two, ends of
/// groups of nodes, and all devices.
const MOST_RANK_COUNTS: usize = 64;

/// The most samples of a micro-batch that are tried.
const MOST_MICRO_BATCH: usize = 256;

/// A layout that fits.
struct Fitting {
    plan: Plan,
    prediction: Prediction,
    value: f64,
    needed: Bytes,
}

/// The results of layouts that differ only in their micro-batch: the layouts that fit, and the
/// least memory that one that does not fit needs.
#[derive(Default)]
struct GroupResult {
    fitting: Vec<Fitting>,
    needed: Option<Bytes>,
    too_large: usize,
    untraced: usize,
    /// Layouts without a result, since the search ended before them.
    unseen: usize,
}

/// Plans a request whose framework was traced; `None` if it was not traced for this model.
///
/// # Errors
/// [`PlannerError`] if no layout fits.
pub(super) fn plan_traced(request: &Request<'_>) -> Result<Option<SearchResult>, PlannerError> {
    let kind = request.topology.kind_index(DeviceId(0));
    let Some(tables) = request.costs.tables(kind) else { return Ok(None) };
    if traced_plan(request.base, request.model, request.costs, kind).is_err() {
        return Ok(None);
    }
    let stages_of_zero = stages_of_zero(tables);
    let offloads = traced_offloads(tables);
    if let Some(field) = unknown_field(&request.fixed, stages_of_zero, offloads) {
        let reason = format!("`{field}` as fixed: the operators of this stack were traced for layouts of data-parallel ranks");
        let stages: Vec<String> = stages_of_zero.iter().map(usize::to_string).collect();
        let offloads: Vec<&str> = offloads.iter().map(|offload| offload.name()).collect();
        let chunked = if field == "loss_chunk" { "`--loss chunked` has the loss in chunks; " } else { "" };
        let hint = format!(
            "{chunked}fix `data`, `micro_batch`, `recompute` (none, full), `zero` ({}) and `offload` ({}) alone, or use another `--stack`",
            stages.join(", "),
            offloads.join(", ")
        );
        return Err(PlannerError::no_layout(request, reason, &hint));
    }
    let limit = memory_limit(request);
    let groups = layouts(request, tables, request.fixed.offload.unwrap_or_default());
    let looked = look_at_all(request, &groups, limit);
    let count = groups.iter().map(Vec::len).sum::<usize>();
    let untraced = looked.iter().map(|looked| looked.untraced).sum::<usize>();
    if untraced == count {
        return Ok(None);
    }
    let is_cut_off = looked.iter().any(|looked| looked.unseen > 0);
    let out_of_memory = looked.iter().map(|looked| looked.too_large).sum::<usize>();
    let least = looked.iter().filter_map(|looked| looked.needed).min();
    let mut fitting: Vec<Fitting> = looked.into_iter().flat_map(|looked| looked.fitting).collect();
    let simulated = fitting.len();
    // Layouts that probably run out of memory are returned only if there is no other. Among equal
    // values the earliest layout wins, which has the fewest ranks.
    let is_risky = |layout: &Fitting| layout.prediction.probably_runs_out();
    fitting.sort_by(|left, right| is_risky(left).cmp(&is_risky(right)).then(left.value.total_cmp(&right.value)));
    if let Some(risky) = fitting.iter().position(is_risky).filter(|&first| first > 0) {
        fitting.truncate(risky);
    }
    // If no layout on all devices has traced operators, as for models with two sharded stacks of
    // layers, leave the search to the stack's profile, which covers more layouts.
    if untraced > 0 && fitting.iter().all(|layout| layout.plan.layout.data < request.devices) {
        return Ok(None);
    }
    let least_value = fitting.first().map(|fastest| fastest.value);
    prefer_simple(&mut fitting, request.simplicity_margin);
    if let Some(value) = request.must_beat {
        fitting.retain(|layout| layout.value < value);
    }
    let Some(best) = fitting.first() else {
        return match (request.must_beat, least) {
            (None, _) if is_cut_off => Err(PlannerError::OutOfTime { layouts: count, out_of_memory }),
            (None, Some(needed)) => {
                let hint = "use more devices, a smaller global batch, or a smaller model".to_owned();
                Err(PlannerError::out_of_memory(request, needed, limit, hint))
            }
            (None, None) => Ok(None),
            (Some(_), _) => Ok(Some(SearchResult { candidates: Vec::new(), value: f64::INFINITY, search: Search::default() })),
        };
    };
    let seconds = best.prediction.step_seconds.value();
    // Every layout was predicted, so the fastest bounds them all. Layouts outside of this space
    // have no bound.
    let gap = best.value / least_value.unwrap_or(best.value) - 1.0;
    let on_all = fitting.iter().filter(|layout| layout.plan.layout.data == request.devices);
    let search = Search {
        layouts: count,
        indivisible: untraced,
        out_of_memory,
        simulated,
        covers: ["data", "micro_batch", "recompute", "zero", "offload"].map(str::to_owned).into(),
        space: dimensions(&groups.concat()),
        best_seconds: seconds,
        all_devices_seconds: on_all.map(|layout| layout.prediction.step_seconds.value()).reduce(f64::min),
        lower_bound_seconds: seconds / (1.0 + gap),
        gap,
        ..Search::default()
    };
    let value = best.value;
    let candidates = fitting
        .into_iter()
        .take(request.top.max(1))
        .map(|layout| Candidate { plan: layout.plan, prediction: layout.prediction, value: layout.value })
        .collect();
    let planned = SearchResult { candidates, value, search };
    Ok(Some(if is_cut_off { planned.cut_off() } else { planned }))
}

/// Moves the simplest of the layouts that are at most `margin` slower than the first to the front:
/// the one with the least sharding, then the least memory.
fn prefer_simple(fitting: &mut [Fitting], margin: f64) {
    let Some(limit) = fitting.first().map(|best| best.value * (1.0 + margin)) else { return };
    let alike = fitting.iter().take_while(|layout| layout.value <= limit).count();
    let simplest = (0..alike).min_by_key(|&place| (fitting[place].plan.layout.zero, fitting[place].needed));
    if let Some(place) = simplest {
        fitting[..=place].rotate_right(1);
    }
}

/// The first fixed field with a value that no layout of a traced framework can have.
fn unknown_field(fixed: &Fixed, stages_of_zero: &[usize], offloads: &[Offload]) -> Option<&'static str> {
    let splits = [
        ("tensor", fixed.tensor),
        ("pipeline", fixed.pipeline),
        ("context", fixed.context),
        ("expert", fixed.expert),
        ("virtual_stages", fixed.virtual_stages),
    ];
    let split = splits.into_iter().find(|(_, size)| size.is_some_and(|size| size > 1)).map(|(name, _)| name);
    let others = [
        ("zero", fixed.zero.is_some_and(|zero| !stages_of_zero.contains(&zero))),
        ("recompute", fixed.recompute.as_ref().is_some_and(|setting| !matches!(setting, Recompute::None | Recompute::Full))),
        ("offload", fixed.offload.is_some_and(|offload| !offloads.contains(&offload))),
        ("schedule", fixed.schedule.is_some()),
        ("shard_group", fixed.shard_group.is_some()),
        ("sequence_parallel", fixed.sequence_parallel == Some(true)),
        ("collective", fixed.collective.is_some()),
        ("bucket", fixed.bucket.is_some()),
        ("stages", fixed.stages.is_some() || fixed.stage_places.is_some()),
        ("cuts", fixed.cuts.is_some()),
        ("placement", fixed.rank_order.is_some()),
        ("shares", fixed.shares.is_some()),
        ("context_method", fixed.context_method.is_some()),
        ("context_order", fixed.context_order.is_some()),
        ("loss_chunk", fixed.loss_chunk.is_some()),
        ("mlp_chunk", fixed.mlp_chunk.is_some()),
    ];
    split.or_else(|| others.into_iter().find(|(_, is_fixed)| *is_fixed).map(|(name, _)| name))
}

/// Predicts all groups, those with the most ranks first, so that a search that ends early has
/// usually predicted the fastest.
fn look_at_all(request: &Request<'_>, groups: &[Vec<Layout>], limit: Bytes) -> Vec<GroupResult> {
    let has_answer = AtomicBool::new(false);
    let mut order: Vec<usize> = (0..groups.len()).collect();
    order.sort_by_key(|&index| Reverse(groups[index].first().map(|layout| layout.data)));
    let look = |&index: &usize| (index, predict_group(request, &groups[index], limit, &has_answer));
    let mut looked: Vec<(usize, GroupResult)> = order.par_iter().map(look).collect();
    looked.sort_by_key(|(index, _)| *index);
    looked.into_iter().map(|(_, looked)| looked).collect()
}

/// Predicts layouts with larger and larger micro-batches until one does not fit, since larger ones
/// need more memory. The largest is predicted in any case: with one micro-batch, no gradients are
/// accumulated. `has_answer` is whether a layout of any group fits; if so, the search ends at
/// `stop`, else at `give_up`.
fn predict_group(request: &Request<'_>, group: &[Layout], limit: Bytes, has_answer: &AtomicBool) -> GroupResult {
    let mut looked = GroupResult::default();
    let mut is_too_large = false;
    for (index, layout) in group.iter().enumerate() {
        let stop = if has_answer.load(Ordering::Relaxed) { &request.stop } else { &request.give_up };
        if stop.is_raised() {
            looked.unseen = group.len() - index;
            break;
        }
        if is_too_large && index + 1 < group.len() {
            looked.too_large += 1;
            continue;
        }
        let plan = Plan { layout: layout.clone(), ..request.base.clone() };
        match traced_within(&plan, request.model, request.topology, request.costs, Some(limit)) {
            Ok(TracedOutcome::Predicted(traced)) => {
                let value = value(request, layout.data, &traced);
                let prediction = traced.prediction;
                let needed = traced.memory_use.needed_by_stage.iter().copied().max().expect("invariant: a mesh has a stage");
                looked.fitting.push(Fitting { plan, prediction, value, needed });
                has_answer.store(true, Ordering::Relaxed);
            }
            Ok(TracedOutcome::TooLarge(needed)) => {
                looked.needed = Some(looked.needed.map_or(needed, |least| least.min(needed)));
                looked.too_large += 1;
                is_too_large = true;
            }
            Err(_) => looked.untraced += 1,
        }
    }
    looked
}

/// The value of a predicted layout on `ranks` ranks.
fn value(request: &Request<'_>, ranks: usize, traced: &TracedPrediction) -> f64 {
    if request.objective == Objective::Energy {
        let energy = traced_energy(&traced.time, ranks, request.topology, &PowerModel::default());
        return energy.expect("invariant: `objective::check` has found every power").value();
    }
    traced.prediction.step_seconds.value() * objective::value_per_second(request, ranks)
}

/// The memory of a device that layouts may use.
fn memory_limit(request: &Request<'_>) -> Bytes {
    let device = request.topology.device_kind(DeviceId(0)).memory;
    let device = Bytes::new((device.value() * (1.0 - request.headroom)) as u64);
    request.memory_limit.map_or(device, |limit| limit.min(device))
}

/// Every layout that the framework can run, in groups that differ in the micro-batch alone, smaller
/// ones first; groups with fewer ranks first.
fn layouts(request: &Request<'_>, tables: &BTreeMap<String, String>, offload: Offload) -> Vec<Vec<Layout>> {
    let (fixed, batch) = (&request.fixed, request.base.global_batch);
    let is_free = |field: Option<usize>, value: usize| field.is_none_or(|fixed| fixed == value);
    let mut groups = Vec::new();
    for data in rank_counts(request).into_iter().filter(|&data| batch.is_multiple_of(data) && is_free(fixed.data, data)) {
        let samples = batch / data;
        let sizes = (1..=samples.min(MOST_MICRO_BATCH)).filter(|&size| samples.is_multiple_of(size));
        let sizes: Vec<usize> = sizes.filter(|&size| is_free(fixed.micro_batch, size)).collect();
        for recompute in [Recompute::None, Recompute::Full] {
            let zeros = traced_stages(tables, data, offload).iter().filter(|&&zero| data == 1 || is_free(fixed.zero, zero));
            if fixed.recompute.as_ref().is_none_or(|fixed| *fixed == recompute) {
                groups.extend(zeros.map(|&zero| {
                    let layout = Layout { data, recompute: recompute.clone(), zero, offload, ..request.base.layout.clone() };
                    sizes.iter().map(|&micro_batch| Layout { micro_batch, ..layout.clone() }).collect()
                }));
            }
        }
    }
    groups
}

/// The numbers of ranks that are tried, ascending.
fn rank_counts(request: &Request<'_>) -> BTreeSet<usize> {
    let devices = request.devices.min(request.topology.device_count());
    let nodes = request.topology.node_groups().iter().scan(0, |sum, group| {
        *sum += group.devices * group.count;
        Some(*sum)
    });
    let few = (1..=devices.min(MOST_RANK_COUNTS)).chain((0..usize::BITS).map(|power| 1 << power)).chain(nodes).chain([devices]);
    few.filter(|count| (1..=devices).contains(count)).collect()
}

fn dimensions(layouts: &[Layout]) -> Vec<Dimension> {
    let sizes = |name: &str, of: &dyn Fn(&Layout) -> String| {
        let mut values: Vec<String> = Vec::new();
        for layout in layouts {
            let value = of(layout);
            if !values.contains(&value) {
                values.push(value);
            }
        }
        Dimension { name: name.into(), values: values.join(", "), left_out: Some(0), reason: String::new() }
    };
    vec![
        sizes("data", &|layout| layout.data.to_string()),
        sizes("micro_batch", &|layout| layout.micro_batch.to_string()),
        sizes("recompute", &|layout| if layout.recompute == Recompute::Full { "full".into() } else { "none".into() }),
        sizes("zero", &|layout| layout.zero.to_string()),
        sizes("offload", &|layout| layout.offload.name().to_owned()),
    ]
}
