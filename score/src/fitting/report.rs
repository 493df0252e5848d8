//! Writes a fit as `fitted.yaml` or JSON, and lists its residuals.

use super::cases::Case;
use super::parameters::{Owner, Parameter, factor_of, physical_bounds};
use super::solve::Fit;
use foretell_simulator::gpu::Profiles;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

/// Weight of the residuals of all stacks in the interval of one stack, in rows of that stack.
const COMMON_ROWS: f64 = 6.0;

/// Values by name.
type Values = Vec<(String, f64)>;

/// Values found for some parameters.
pub(super) struct Found<'a> {
    pub(super) parameters: &'a [Parameter],
    pub(super) values: &'a [f64],
}

/// How many rows the values were fitted on, and how far predictions with them are from
/// measurements.
#[derive(Clone, Debug, Default)]
pub(super) struct Support {
    /// Rows of each stack, and the 10th and 90th percentile of measured over predicted when rows of
    /// the same group are held out.
    pub(super) stacks: BTreeMap<String, (usize, [f64; 2])>,
    /// Rows on each device.
    pub(super) devices: BTreeMap<String, usize>,
    /// The same percentiles when the row's source is held out.
    pub(super) unseen: [f64; 2],
    /// The same percentiles when all rows on the row's device are held out.
    pub(super) unseen_device: [f64; 2],
}

/// Returns the text of `fitted.yaml` for a fit of step times and one of memory.
pub fn yaml_of_fit(cases: &[Case], time: &Fit, memory: &Fit, profiles: &Profiles) -> String {
    let found = [time, memory].map(|fit| Found { parameters: &fit.parameters, values: &fit.values });
    yaml(&found, &support(cases, time, profiles), profiles)
}

/// Returns the support of the values of a fit.
fn support(cases: &[Case], time: &Fit, profiles: &Profiles) -> Support {
    let all = by_equal_sources(cases, &time.without_group);
    let of_stack = |name: &str| {
        let own = time.without_group.iter().filter(|(index, _)| cases[**index].run.stack_name == name);
        let own: Vec<f64> = own.map(|(_, residual)| -residual).collect();
        (name.to_string(), (own.len(), stack_interval(&own, &all)))
    };
    let uses = |index: usize, device: &str| cases[index].run.clusters().any(|cluster| cluster.device == device);
    let on_device = |name: &str| (name.to_string(), time.residuals.keys().filter(|index| uses(**index, name)).count());
    Support {
        stacks: profiles.stack_names().filter(|name| profiles.is_stack(name)).map(of_stack).collect(),
        devices: profiles.gpu_names().map(on_device).collect(),
        unseen: interval(by_equal_sources(cases, &time.without_source)),
        unseen_device: interval(by_equal_sources(cases, &time.without_device)),
    }
}

/// Returns the interval of a stack, from the logarithms of measured over predicted of its own rows,
/// and of all rows with their weights. All rows together weigh [`COMMON_ROWS`] rows.
pub(super) fn stack_interval(own: &[f64], all: &[(f64, f64)]) -> [f64; 2] {
    let share = COMMON_ROWS / all.iter().map(|(_, weight)| weight).sum::<f64>().max(1e-9);
    let own = own.iter().map(|ratio| (*ratio, 1.0));
    interval(own.chain(all.iter().map(|(ratio, weight)| (*ratio, weight * share))).collect())
}

/// Returns the 10th and 90th percentile of weighted logarithms as factors, which are at least 0.5 %
/// below and above 1.
pub(super) fn interval(mut ratios: Vec<(f64, f64)>) -> [f64; 2] {
    ratios.sort_by(|ratio, other| ratio.0.total_cmp(&other.0));
    [quantile(&ratios, 0.1).min(-0.005).exp(), quantile(&ratios, 0.9).max(0.005).exp()]
}

/// Returns the text of `fitted.yaml`.
pub(super) fn yaml(found: &[Found<'_>], support: &Support, profiles: &Profiles) -> String {
    let mut stacks: BTreeMap<String, Values> = BTreeMap::new();
    let mut network: Values = Vec::new();
    let mut factors: BTreeMap<(Owner, String), f64> = BTreeMap::new();
    for found in found {
        for (parameter, value) in found.parameters.iter().zip(found.values) {
            let entry = (parameter.name.clone(), *value);
            match &parameter.owner {
                Owner::Stack(name) => stacks.entry(name.clone()).or_default().push(entry),
                Owner::Network => network.push(entry),
                Owner::Family(_) | Owner::AllStacks => {
                    factors.insert((parameter.owner.clone(), parameter.name.clone()), *value);
                }
            }
        }
    }
    add_unfitted(&mut stacks, &factors, profiles);
    let free = found.iter().flat_map(|found| found.parameters).filter(|parameter| !parameter.is_tied()).count();
    let mut text = String::from(
        "# Written by `cargo run --release -p foretell-score --example fit -- fit FILE`, from the\n\
         # rows that tests/published/split.yaml declares for fitting. Each value replaces the\n\
         # prior in links.yaml or stacks/. `free_values` of them the fit chose; the others\n\
         # follow, since stacks share factors. `rows` counts the rows of a stack or on a device.\n\
         # `spread` is the 10th and 90th percentile of measured over predicted when rows of the\n\
         # same group are held out, `unseen` when the source is, `unseen_device` when all rows on\n\
         # the device are.\n\
",
    );
    let _ = writeln!(text, "free_values: {free}\nstacks:");
    let line = |values: &Values| {
        let values: Vec<String> = values.iter().map(|(name, value)| format!("'{name}': {}", significant(*value))).collect();
        values.join(", ")
    };
    for (name, values) in &stacks {
        let (rows, [low, high]) = support.stacks.get(name).copied().unwrap_or((0, support.unseen));
        let _ =
            writeln!(text, "  {name}:\n    rows: {rows}\n    spread: [{low:.3}, {high:.3}]\n    values: {{{}}}", line(values));
    }
    text.push_str("devices:\n");
    for (name, rows) in support.devices.iter().filter(|(_, rows)| **rows > 0) {
        let _ = writeln!(text, "  {name}: {rows}");
    }
    let _ = writeln!(text, "network: {{{}}}", line(&network));
    let [low, high] = support.unseen;
    let _ = writeln!(text, "unseen: [{low:.3}, {high:.3}]");
    let [low, high] = support.unseen_device;
    let _ = writeln!(text, "unseen_device: [{low:.3}, {high:.3}]");
    text
}

/// Adds the values that no row of their stack determined: the prior times the shared factor.
fn add_unfitted(stacks: &mut BTreeMap<String, Values>, factors: &BTreeMap<(Owner, String), f64>, profiles: &Profiles) {
    for name in profiles.stack_names().filter(|name| profiles.is_stack(name)) {
        let Ok(stack) = profiles.stack(name) else { continue };
        let fitted: BTreeSet<String> = stacks.get(name).into_iter().flatten().map(|(value, _)| value.clone()).collect();
        let is_open = |value: &&String| {
            // These are fitted on some kinds of runs but affect all runs, and the stack's rows were
            // predicted with the prior.
            let acts_on_rows = !fitted.is_empty() && ["traffic:norm", "launches:exchange"].contains(&value.as_str());
            // An arena's size is planned exactly.
            let is_planned = stack.memory.is_arena && value.starts_with("memory_");
            !fitted.contains(*value) && !acts_on_rows && !is_planned
        };
        let value = |value: &String| {
            let factor = factors.get(&factor_of(&Owner::Stack(name.into()), value, profiles)?)?;
            let [least, most] = physical_bounds(value);
            let found = stack.value(value).filter(|prior| *prior > 0.0)? * factor;
            Some((value.clone(), found.clamp(least, most)))
        };
        let values: Values = factor_names(factors).iter().filter(is_open).filter_map(value).collect();
        if !values.is_empty() {
            stacks.entry(name.into()).or_default().extend(values);
        }
    }
}

/// Returns the names of the stack values that have a shared factor.
fn factor_names(factors: &BTreeMap<(Owner, String), f64>) -> BTreeSet<String> {
    let names = factors.keys().map(|(_, name)| name.as_str());
    names.map(|name| if name.starts_with("attention") { "attention".to_string() } else { name.to_string() }).collect()
}

/// Returns the logarithms of measured over predicted, weighted so that all sources have the same
/// weight.
pub(super) fn by_equal_sources(cases: &[Case], residuals: &BTreeMap<usize, f64>) -> Vec<(f64, f64)> {
    let mut rows: BTreeMap<&str, f64> = BTreeMap::new();
    residuals.keys().for_each(|index| *rows.entry(&cases[*index].row.table).or_default() += 1.0);
    residuals.iter().map(|(index, residual)| (-residual, 1.0 / rows[cases[*index].row.table.as_str()])).collect()
}

/// Returns the quantile at `share` of sorted values with weights.
fn quantile(sorted: &[(f64, f64)], share: f64) -> f64 {
    foretell_units::weighted_quantile(sorted, share).unwrap_or(0.0)
}

/// A value with four significant digits.
fn significant(value: f64) -> String {
    let digits = 3 - value.abs().max(1e-12).log10().floor() as i32;
    if digits > 8 {
        return format!("{value:.3e}");
    }
    let scale = 10f64.powi(digits);
    format!("{}", (value * scale).round() / scale)
}

/// Returns the linearised fit as JSON: its parameters, its rows, and the slopes as (row, parameter,
/// slope). `benches/hyperparameters.py` reads it.
pub fn fit_json(cases: &[Case], fit: &Fit) -> String {
    let parameter = |(parameter, offset): (&Parameter, &f64)| {
        let Parameter { owner, name, spread, factor, .. } = parameter;
        serde_json::json!({"owner": format!("{owner:?}"), "name": name, "spread": spread, "kin": factor, "offset": offset})
    };
    let parameters: Vec<_> = fit.parameters.iter().zip(&fit.offsets).map(parameter).collect();
    let row = |(index, residual): (&usize, &f64)| {
        let case = &cases[*index];
        serde_json::json!({"id": case.row.row_id, "source": case.row.table, "group": case.group, "residual": residual})
    };
    let rows: Vec<_> = fit.residuals.iter().map(row).collect();
    let slopes = fit.jacobian.iter().enumerate();
    let slopes: Vec<(usize, usize, f64)> =
        slopes.flat_map(|(parameter, column)| column.iter().map(move |(row, slope)| (*row, parameter, *slope))).collect();
    serde_json::json!({"parameters": parameters, "rows": rows, "slopes": slopes}).to_string()
}

/// Returns the four relative errors of a case: fitted, row held out, group held out, source held
/// out.
fn errors(fit: &Fit, index: usize, residual: f64) -> [f64; 4] {
    let held_out = |residuals: &BTreeMap<usize, f64>| residuals.get(&index).copied().unwrap_or(residual);
    [residual, held_out(&fit.without_row), held_out(&fit.without_group), held_out(&fit.without_source)]
        .map(|residual| residual.exp() - 1.0)
}

/// Lists the values, and the errors of each row and source in the order of `errors`.
pub fn print_fit(cases: &[Case], time: &Fit, memory: &Fit) -> String {
    let mut text = String::new();
    for fit in [time, memory] {
        for (parameter, value) in fit.parameters.iter().zip(&fit.values) {
            let moved = (value / parameter.prior).ln();
            let _ = writeln!(
                text,
                "value {:?} {} {:.4} prior {:.4} moved {:+.2} of {:.2}",
                parameter.owner, parameter.name, value, parameter.prior, moved, parameter.spread
            );
        }
    }
    let mut sources: BTreeMap<&str, Vec<[f64; 4]>> = BTreeMap::new();
    for (index, residual) in &time.residuals {
        let case = &cases[*index];
        let errors = errors(time, *index, *residual);
        sources.entry(&case.row.table).or_default().push(errors);
        let _ = writeln!(text, "{}", row_line(case, errors));
    }
    text.push_str(&print_memory_fit(cases, memory));
    let mut totals = [0.0; 4];
    for (source, errors) in &sources {
        let mean = |of: &dyn Fn(&[f64; 4]) -> f64| errors.iter().map(of).sum::<f64>() / errors.len() as f64;
        let means = [0, 1, 2, 3].map(|index| mean(&|error| error[index].abs()));
        let biases = [2, 3].map(|index| mean(&|error| error[index]));
        let _ = writeln!(
            text,
            "source {source:24} {:4} rows {:.3} row left out {:.3} group left out {:.3} bias {:+.3} source left out {:.3} bias {:+.3}",
            errors.len(),
            means[0],
            means[1],
            means[2],
            biases[0],
            means[3],
            biases[1],
        );
        for (total, mean) in totals.iter_mut().zip(means) {
            *total += mean / sources.len() as f64;
        }
    }
    let [all, row, group, source] = totals;
    let _ =
        writeln!(text, "mean over sources {all:.4} row left out {row:.4} group left out {group:.4} source left out {source:.4}");
    text
}

fn row_line(case: &Case, errors: [f64; 4]) -> String {
    let layout = &case.run.plan.layout;
    format!(
        "row {:+.3} {:+.3} {:+.3} {:+.3} {} {} {} {} n{} d{} e{} t{} p{} c{} v{} z{} {:?} mb{} gb{} s{} {:.4}s {} | {}",
        errors[0],
        errors[1],
        errors[2],
        errors[3],
        case.row.row_id,
        case.row.model,
        case.run.cluster.device,
        case.run.format,
        case.run.devices(),
        layout.data,
        layout.expert,
        layout.tensor,
        layout.pipeline,
        layout.context,
        layout.virtual_stages,
        layout.zero,
        layout.recompute,
        layout.micro_batch,
        case.run.plan.global_batch,
        case.row.count("seq").unwrap_or(0),
        case.row.step_seconds().unwrap_or(0.0),
        case.run.stack_name,
        case.row.framework,
    )
}

/// Lists the memory values, and the memory errors of each row and source in the order of
/// `errors`.
pub fn print_memory_fit(cases: &[Case], memory: &Fit) -> String {
    let mut text = String::new();
    let mut sources: BTreeMap<&str, Vec<[f64; 4]>> = BTreeMap::new();
    for (index, residual) in &memory.residuals {
        let case = &cases[*index];
        let errors = errors(memory, *index, *residual);
        sources.entry(&case.row.table).or_default().push(errors);
        let _ = writeln!(
            text,
            "memory {:+.3} {:+.3} {:+.3} {:+.3} {} {} {}",
            errors[0], errors[1], errors[2], errors[3], case.row.row_id, case.run.stack_name, case.row.mem_kind
        );
    }
    for (parameter, value) in memory.parameters.iter().zip(&memory.values) {
        let _ = writeln!(text, "value {:?} {} {value:.4} prior {:.4}", parameter.owner, parameter.name, parameter.prior);
    }
    for (source, errors) in &sources {
        let mean = |index: usize| errors.iter().map(|error| error[index].abs()).sum::<f64>() / errors.len() as f64;
        let _ = writeln!(
            text,
            "memory of {source:24} {:4} rows {:.3} row left out {:.3} group left out {:.3} source left out {:.3}",
            errors.len(),
            mean(0),
            mean(1),
            mean(2),
            mean(3),
        );
    }
    text
}
