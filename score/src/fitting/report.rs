//! Writes a fit as `fitted.yaml` or JSON, and lists its residuals.

use super::cases::Case;
use super::parameters::{Parameter, factors};
use super::solve::{Fit, LeftOut};
use foretell_simulator::gpu::{Factors, FactorsByName};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

/// Weight of all stacks' residuals in the interval of one stack, in rows of that stack.
const COMMON_ROWS: f64 = 6.0;

/// How many rows stand behind the values, and how far off predictions with them are.
#[derive(Clone, Debug, Default)]
pub(super) struct Support {
    /// Rows of each stack, and the 10th and 90th percentile of measured over predicted.
    stacks: BTreeMap<String, (usize, [f64; 2])>,
    /// Rows on each device.
    devices: BTreeMap<String, usize>,
    /// The percentiles when the whole source is held out, of rows whose stack no other source has.
    unseen: [f64; 2],
    /// The percentiles when all rows on the device are held out.
    unseen_device: [f64; 2],
}

impl Support {
    /// Returns the support of values that were fitted on the cases that `is_kept` chooses. No other
    /// case's residual counts.
    ///
    /// A stack's interval is that of rows held out with their source, if another source has the
    /// stack, and else with their group. Every source counts alike in what stacks share.
    pub(super) fn of(cases: &[Case], left_out: &LeftOut, is_kept: &dyn Fn(&Case) -> bool) -> Self {
        let kept: Vec<usize> = left_out.group.keys().copied().filter(|index| is_kept(&cases[*index])).collect();
        let mut sources_of: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
        let mut rows_of: BTreeMap<&str, f64> = BTreeMap::new();
        for case in kept.iter().map(|index| &cases[*index]) {
            sources_of.entry(&case.run.stack_name).or_default().insert(&case.row.table);
            *rows_of.entry(&case.row.table).or_default() += 1.0;
        }
        let is_shared = |index: usize| sources_of[cases[index].run.stack_name.as_str()].len() > 1;
        // Measured over predicted.
        let known = |index: usize| {
            let residuals = if is_shared(index) { &left_out.source } else { &left_out.group };
            residuals.get(&index).map_or(0.0, |residual| -residual)
        };
        let source_weight = |index: usize| 1.0 / rows_of[cases[index].row.table.as_str()];
        let common: Vec<(f64, f64)> = kept.iter().map(|&index| (known(index), source_weight(index))).collect();
        let share = COMMON_ROWS / common.iter().map(|(_, weight)| weight).sum::<f64>().max(1e-9);
        let of_stack = |(name, _): (&&str, &BTreeSet<&str>)| {
            let own: Vec<usize> = kept.iter().copied().filter(|index| cases[*index].run.stack_name == **name).collect();
            let own_ratios = own.iter().map(|&index| (known(index), 1.0));
            let ratios = own_ratios.chain(common.iter().map(|(ratio, weight)| (*ratio, weight * share)));
            ((*name).to_string(), (own.len(), interval(ratios.collect())))
        };
        let mut devices: BTreeMap<String, usize> = BTreeMap::new();
        for index in &kept {
            let names: BTreeSet<&str> = cases[*index].run.clusters().map(|cluster| cluster.device.as_str()).collect();
            names.into_iter().for_each(|device| *devices.entry(device.into()).or_default() += 1);
        }
        let unseen: Vec<usize> = kept.iter().copied().filter(|index| !is_shared(*index)).collect();
        let of = |rows: &[usize], residuals: &BTreeMap<usize, f64>| {
            interval(rows.iter().filter_map(|index| Some((-residuals.get(index)?, source_weight(*index)))).collect())
        };
        Self {
            stacks: sources_of.iter().map(of_stack).collect(),
            devices,
            unseen: of(&unseen, &left_out.source),
            unseen_device: of(&kept, &left_out.device),
        }
    }
}

/// Returns the 10th and 90th percentile of weighted logarithms, as factors.
fn interval(mut ratios: Vec<(f64, f64)>) -> [f64; 2] {
    ratios.sort_by(|one, two| one.0.total_cmp(&two.0));
    [quantile(&ratios, 0.1).min(-0.005).exp(), quantile(&ratios, 0.9).max(0.005).exp()]
}

/// Returns the quantile at `share` of sorted values with weights.
fn quantile(sorted: &[(f64, f64)], share: f64) -> f64 {
    let total: f64 = sorted.iter().map(|(_, weight)| weight).sum();
    let mut sum = 0.0;
    for (value, weight) in sorted {
        sum += weight;
        if sum >= share * total {
            return *value;
        }
    }
    0.0
}

/// Returns the text of `fitted.yaml` for a fit of step times and one of memory.
pub fn yaml_of_fit(cases: &[Case], time: &Fit, memory: &Fit) -> String {
    let found = joined(factors(&time.parameters, &time.offsets), factors(&memory.parameters, &memory.offsets));
    yaml(&found, &Support::of(cases, &time.left_out, &|_| true))
}

/// Returns the factors of both, which have different names.
pub(super) fn joined(mut one: Factors, other: Factors) -> Factors {
    let join = |one: &mut BTreeMap<String, FactorsByName>, other: BTreeMap<String, FactorsByName>| {
        other.into_iter().for_each(|(name, values)| one.entry(name).or_default().extend(values));
    };
    one.every_stack.extend(other.every_stack);
    one.network.extend(other.network);
    join(&mut one.families, other.families);
    join(&mut one.stacks, other.stacks);
    join(&mut one.generations, other.generations);
    one
}

/// Returns the text of `fitted.yaml`.
pub(super) fn yaml(factors: &Factors, support: &Support) -> String {
    let mut text = String::from(
        "# Written by `cargo run --release -p foretell-score --example fit -- fit FILE`, from the\n\
         # rows that tests/published/split.yaml declares for fitting. Each factor multiplies the\n\
         # prior in devices.yaml, links.yaml or stacks.yaml; those of all levels multiply. `spread`\n\
         # is the 10th and 90th percentile of measured over predicted when rows of the same group\n\
         # are held out (or of the same source, if another source has the stack), `unseen` when the\n\
         # only source of a stack is, `unseen_device` when all rows on the device are.\n\
         factors:\n",
    );
    let line = |values: &FactorsByName| {
        let values: Vec<String> = values.iter().map(|(name, value)| format!("{name}: {}", significant(*value))).collect();
        format!("{{{}}}", values.join(", "))
    };
    let mut level = |name: &str, owners: &BTreeMap<String, FactorsByName>| {
        let _ = writeln!(text, "  {name}:{}", if owners.is_empty() { " {}" } else { "" });
        for (owner, values) in owners {
            let _ = writeln!(text, "    {owner}: {}", line(values));
        }
    };
    level("families", &factors.families);
    level("stacks", &factors.stacks);
    level("generations", &factors.generations);
    let _ = writeln!(text, "  every_stack: {}\n  network: {}\nstacks:", line(&factors.every_stack), line(&factors.network));
    for (name, (rows, [low, high])) in &support.stacks {
        let _ = writeln!(text, "  {name}: {{rows: {rows}, spread: [{low:.3}, {high:.3}]}}");
    }
    let devices: Vec<String> = support.devices.iter().map(|(name, rows)| format!("{name}: {rows}")).collect();
    let _ = writeln!(text, "devices: {{{}}}", devices.join(", "));
    for (name, [low, high]) in [("unseen", support.unseen), ("unseen_device", support.unseen_device)] {
        let _ = writeln!(text, "{name}: [{low:.3}, {high:.3}]");
    }
    text
}

/// Prints four significant digits.
fn significant(value: f64) -> String {
    let digits = (3 - value.abs().max(1e-12).log10().floor() as i32).clamp(0, 9);
    let scale = 10f64.powi(digits);
    format!("{}", (value * scale).round() / scale)
}

/// Returns the linearised fit as JSON: its parameters, its rows, and the slopes as (row, parameter,
/// slope). `benches/hyperparameters.py` reads it.
pub fn fit_json(cases: &[Case], fit: &Fit) -> String {
    let parameter = |(one, offset): (&Parameter, &f64)| {
        let Parameter { owner, name, spread } = one;
        serde_json::json!({"owner": format!("{owner:?}"), "name": name, "spread": spread, "offset": offset})
    };
    let parameters: Vec<_> = fit.parameters.iter().zip(&fit.offsets).map(parameter).collect();
    let row = |(index, residual): (&usize, &f64)| {
        let case = &cases[*index];
        let run = &case.run;
        serde_json::json!({
            "id": case.row.row_id,
            "source": case.row.table,
            "group": case.group,
            "stack": run.stack_name,
            "family": run.stack.family,
            "device": run.cluster.device,
            "generation": run.cluster.gpu.generation,
            "residual": residual,
        })
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
    [residual, held_out(&fit.without_row), held_out(&fit.left_out.group), held_out(&fit.left_out.source)]
        .map(|residual| residual.exp() - 1.0)
}

/// Lists the values, and the errors of each row and source in the order of `errors`.
pub fn print_fit(cases: &[Case], time: &Fit, memory: &Fit) -> String {
    let mut text = String::new();
    for fit in [time, memory] {
        for (Parameter { owner, name, spread }, offset) in fit.parameters.iter().zip(&fit.offsets) {
            let _ = writeln!(text, "factor {owner:?} {name} {:.4} moved {offset:+.3} of {spread:.2}", offset.exp());
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
