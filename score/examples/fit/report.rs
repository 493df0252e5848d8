//! Writes a fit as `fitted.yaml` or JSON, and prints its residuals.

use crate::cases::Case;
use crate::parameters::{Owner, Parameter, factors_of};
use crate::solve::Fit;
use foretell_simulator::gpu::Profiles;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

/// Weight of all stacks' residuals in the interval of one stack, in rows of that stack.
const COMMON_ROWS: f64 = 6.0;

/// Values by name.
type Values = Vec<(String, f64)>;

/// Returns the text of `fitted.yaml`.
pub fn yaml(cases: &[Case], time: &Fit, memory: &Fit, profiles: &Profiles) -> String {
    let mut stacks: BTreeMap<String, Values> = BTreeMap::new();
    let mut devices: BTreeMap<String, Values> = BTreeMap::new();
    let mut network: Values = Vec::new();
    let mut factors: BTreeMap<(Owner, String), f64> = BTreeMap::new();
    for fit in [time, memory] {
        for (parameter, value) in fit.parameters.iter().zip(&fit.values) {
            let entry = (parameter.name.clone(), *value);
            match &parameter.owner {
                Owner::Stack(name) => stacks.entry(name.clone()).or_default().push(entry),
                Owner::Device(name) => devices.entry(name.clone()).or_default().push(entry),
                Owner::Network => network.push(entry),
                Owner::Family(_) | Owner::Branch(_) | Owner::Generation(_) => {
                    factors.insert((parameter.owner.clone(), parameter.name.clone()), *value);
                }
            }
        }
    }
    add_unfitted(&mut stacks, &mut devices, &factors, profiles);
    let mut text = String::from(
        "# Written by `cargo run --release -p foretell-score --example fit -- fit FILE`, from the\n\
         # rows that tests/published/split.yaml declares for fitting. Each value replaces the\n\
         # prior in devices.yaml, links.yaml or stacks.yaml. `spread` is the 10th and 90th\n\
         # percentile of measured over predicted when rows of the same group are held out.\n\
         stacks:\n",
    );
    let line = |values: &Values| {
        let values: Vec<String> = values.iter().map(|(name, value)| format!("'{name}': {}", significant(*value))).collect();
        values.join(", ")
    };
    let all = by_equal_sources(cases, &time.without_group);
    let common = COMMON_ROWS / all.iter().map(|(_, weight)| weight).sum::<f64>().max(1e-9);
    for (name, values) in &stacks {
        let own: Vec<usize> = time.residuals.keys().copied().filter(|index| cases[*index].run.stack_name == *name).collect();
        let mut ratios: Vec<(f64, f64)> = own.iter().filter_map(|index| Some((-time.without_group.get(index)?, 1.0))).collect();
        ratios.extend(all.iter().map(|(ratio, weight)| (*ratio, weight * common)));
        ratios.sort_by(|one, two| one.0.total_cmp(&two.0));
        let low = quantile(&ratios, 0.1).min(-0.005).exp();
        let high = quantile(&ratios, 0.9).max(0.005).exp();
        let _ = writeln!(
            text,
            "  {name}:\n    rows: {}\n    spread: [{low:.3}, {high:.3}]\n    values: {{{}}}",
            own.len(),
            line(values)
        );
    }
    text.push_str("devices:\n");
    for (name, values) in &devices {
        let uses_device = |index: &&usize| cases[**index].run.clusters().any(|cluster| cluster.device == *name);
        let rows = time.residuals.keys().filter(uses_device).count();
        let _ = writeln!(text, "  {name}: {{rows: {rows}, values: {{{}}}}}", line(values));
    }
    let _ = writeln!(text, "network: {{{}}}", line(&network));
    let [low, high] = unseen(cases, time);
    let _ = writeln!(text, "unseen: [{low:.3}, {high:.3}]");
    text
}

/// Adds stacks and devices that no row was fitted on, with their prior times the factors that they
/// share with fitted ones.
fn add_unfitted(
    stacks: &mut BTreeMap<String, Values>,
    devices: &mut BTreeMap<String, Values>,
    factors: &BTreeMap<(Owner, String), f64>,
    profiles: &Profiles,
) {
    let factor = |owner: Owner, name: &str| {
        let fitted = factors_of(&owner, name, profiles);
        fitted.iter().filter_map(|factor| factors.get(factor)).copied().reduce(|one, other| one * other)
    };
    for name in profiles.stack_names().filter(|name| profiles.is_stack(name)) {
        if stacks.contains_key(name) {
            continue;
        }
        let Ok(stack) = profiles.stack(name) else { continue };
        let value = |value: &String| {
            Some((value.clone(), stack.value(value)? * factor(Owner::Stack(name.into()), value)?))
                .filter(|(_, value)| *value > 0.0)
        };
        let values: Values = factor_names(factors).iter().filter_map(value).collect();
        if !values.is_empty() {
            stacks.insert(name.into(), values);
        }
    }
    for name in profiles.gpu_names() {
        if devices.contains_key(name) {
            continue;
        }
        let Ok(gpu) = profiles.gpu(name) else { continue };
        let value = |value: &String| {
            let share = gpu.value(value)? * factor(Owner::Device(name.into()), value)?;
            Some((value.clone(), share.min(1.0)))
        };
        let formats = ["fp32", "tf32", "fp16", "bf16", "fp8", "mxfp8", "nvfp4"].map(|format| format!("product:{format}"));
        let names: Vec<String> = formats.into_iter().chain(["attention".to_string()]).collect();
        let values: Values = names.iter().filter_map(value).collect();
        if !values.is_empty() {
            devices.insert(name.into(), values);
        }
    }
}

/// Returns the names of the stack values that have a shared factor.
fn factor_names(factors: &BTreeMap<(Owner, String), f64>) -> BTreeSet<String> {
    let names = factors.keys().filter(|(owner, _)| matches!(owner, Owner::Family(_))).map(|(_, name)| name.as_str());
    names.map(|name| if name.starts_with("attention") { "attention".to_string() } else { name.to_string() }).collect()
}

/// Returns the 10th and 90th percentile of measured over predicted when the whole source is held
/// out, with equal weights of the sources.
fn unseen(cases: &[Case], time: &Fit) -> [f64; 2] {
    let mut ratios = by_equal_sources(cases, &time.without_source);
    ratios.sort_by(|one, two| one.0.total_cmp(&two.0));
    [quantile(&ratios, 0.1).exp(), quantile(&ratios, 0.9).exp()]
}

/// Returns the logarithms of measured over predicted, weighted so that all sources weigh the same.
fn by_equal_sources(cases: &[Case], residuals: &BTreeMap<usize, f64>) -> Vec<(f64, f64)> {
    let mut rows: BTreeMap<&str, f64> = BTreeMap::new();
    residuals.keys().for_each(|index| *rows.entry(&cases[*index].row.table).or_default() += 1.0);
    residuals.iter().map(|(index, residual)| (-residual, 1.0 / rows[cases[*index].row.table.as_str()])).collect()
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

/// Prints four significant digits.
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
pub fn json(cases: &[Case], fit: &Fit) -> String {
    let parameter = |(one, offset): (&Parameter, &f64)| {
        let Parameter { owner, name, spread, factor, .. } = one;
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

/// Prints the values, and the errors of each row and source in the order of [`errors`].
pub fn print(cases: &[Case], time: &Fit, memory: &Fit) {
    for fit in [time, memory] {
        for (parameter, value) in fit.parameters.iter().zip(&fit.values) {
            let moved = (value / parameter.prior).ln();
            println!(
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
        print_row(case, errors);
    }
    print_memory(cases, memory);
    let mut totals = [0.0; 4];
    for (source, errors) in &sources {
        let mean = |of: &dyn Fn(&[f64; 4]) -> f64| errors.iter().map(of).sum::<f64>() / errors.len() as f64;
        let means = [0, 1, 2, 3].map(|index| mean(&|error| error[index].abs()));
        let biases = [2, 3].map(|index| mean(&|error| error[index]));
        println!(
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
    println!("mean over sources {all:.4} row left out {row:.4} group left out {group:.4} source left out {source:.4}");
}

fn print_row(case: &Case, errors: [f64; 4]) {
    let layout = &case.run.plan.layout;
    println!(
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
    );
}

/// Prints the memory values, and the memory errors of each row and source in the order of
/// [`errors`].
pub fn print_memory(cases: &[Case], memory: &Fit) {
    let mut sources: BTreeMap<&str, Vec<[f64; 4]>> = BTreeMap::new();
    for (index, residual) in &memory.residuals {
        let case = &cases[*index];
        let errors = errors(memory, *index, *residual);
        sources.entry(&case.row.table).or_default().push(errors);
        println!(
            "memory {:+.3} {:+.3} {:+.3} {:+.3} {} {} {}",
            errors[0], errors[1], errors[2], errors[3], case.row.row_id, case.run.stack_name, case.row.mem_kind
        );
    }
    for (parameter, value) in memory.parameters.iter().zip(&memory.values) {
        println!("value {:?} {} {value:.4} prior {:.4}", parameter.owner, parameter.name, parameter.prior);
    }
    for (source, errors) in &sources {
        let mean = |index: usize| errors.iter().map(|error| error[index].abs()).sum::<f64>() / errors.len() as f64;
        println!(
            "memory of {source:24} {:4} rows {:.3} row left out {:.3} group left out {:.3} source left out {:.3}",
            errors.len(),
            mean(0),
            mean(1),
            mean(2),
            mean(3),
        );
    }
}
