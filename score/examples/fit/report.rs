//! `fitted.yaml`, and the residuals for who reads along.

use crate::cases::Case;
use crate::parameters::Owner;
use crate::solve::Fit;
use std::collections::BTreeMap;
use std::fmt::Write;

/// So many rows' worth of all stacks' residuals stand beside a stack's own when its interval is made.
const COMMON: f64 = 6.0;

/// The file.
pub fn yaml(cases: &[Case], time: &Fit, memory: &Fit) -> String {
    let mut stacks: BTreeMap<String, Vec<(String, f64)>> = BTreeMap::new();
    let mut devices: BTreeMap<String, Vec<(String, f64)>> = BTreeMap::new();
    let mut network: Vec<(String, f64)> = Vec::new();
    for fit in [time, memory] {
        for (parameter, value) in fit.parameters.iter().zip(&fit.values) {
            let entry = (parameter.name.clone(), *value);
            match &parameter.owner {
                Owner::Stack(name) => stacks.entry(name.clone()).or_default().push(entry),
                Owner::Device(name) => devices.entry(name.clone()).or_default().push(entry),
                Owner::Network => network.push(entry),
            }
        }
    }
    let mut text = String::from(
        "# Written by `cargo run --release -p foretell-score --example fit -- fit FILE` from the rows that tests/published/split.yaml declares:\n\
         # what was found in place of what devices.yaml, links.yaml and stacks.yaml assume. `spread` is the 10th and 90th percentile of measured\n\
         # over predicted where rows of the same group are left out.\nstacks:\n",
    );
    let line = |values: &[(String, f64)]| {
        let values: Vec<String> = values.iter().map(|(name, value)| format!("'{name}': {}", significant(*value))).collect();
        values.join(", ")
    };
    let all: Vec<(f64, f64)> = time.left_out.values().map(|residual| (-residual, 1.0)).collect();
    let common = COMMON / all.len().max(1) as f64;
    for (name, values) in &stacks {
        let own: Vec<usize> = time.residuals.keys().copied().filter(|place| cases[*place].run.stack_name == *name).collect();
        let mut ratios: Vec<(f64, f64)> = own.iter().filter_map(|place| Some((-time.left_out.get(place)?, 1.0))).collect();
        ratios.extend(all.iter().map(|(ratio, _)| (*ratio, common)));
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
        let on = |place: &&usize| cases[**place].run.clusters().iter().any(|cluster| cluster.device == *name);
        let rows = time.residuals.keys().filter(on).count();
        let _ = writeln!(text, "  {name}: {{rows: {rows}, values: {{{}}}}}", line(values));
    }
    let _ = writeln!(text, "network: {{{}}}", line(&network));
    print(cases, time, memory);
    text
}

/// Of weighted values in order.
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

/// Four significant digits.
fn significant(value: f64) -> String {
    let digits = 3 - value.abs().max(1e-12).log10().floor() as i32;
    if digits > 8 {
        return format!("{value:.3e}");
    }
    let scale = 10f64.powi(digits);
    format!("{}", (value * scale).round() / scale)
}

fn print(cases: &[Case], time: &Fit, memory: &Fit) {
    for fit in [time, memory] {
        for (parameter, value) in fit.parameters.iter().zip(&fit.values) {
            let moved = (value / parameter.prior).ln();
            println!(
                "value {:?} {} {:.4} prior {:.4} moved {:+.2} of {:.2}",
                parameter.owner, parameter.name, value, parameter.prior, moved, parameter.spread
            );
        }
    }
    let mut sources: BTreeMap<&str, Vec<(f64, f64)>> = BTreeMap::new();
    for (place, residual) in &time.residuals {
        let left_out = time.left_out.get(place).copied().unwrap_or(*residual);
        sources.entry(&cases[*place].row.table).or_default().push((residual.exp() - 1.0, left_out.exp() - 1.0));
        let case = &cases[*place];
        let layout = &case.run.plan.layout;
        println!(
            "row {:+.3} {:+.3} {} {} {} {} n{} d{} e{} t{} p{} c{} v{} z{} {:?} mb{} gb{} s{} {:.4}s {} | {}",
            residual.exp() - 1.0,
            left_out.exp() - 1.0,
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
    for (place, residual) in &memory.residuals {
        let case = &cases[*place];
        let left_out = memory.left_out.get(place).copied().unwrap_or(*residual);
        println!(
            "memory {:+.3} {:+.3} {} {} {}",
            residual.exp() - 1.0,
            left_out.exp() - 1.0,
            case.row.row_id,
            case.run.stack_name,
            case.row.mem_kind
        );
    }
    let mean =
        |values: &[(f64, f64)], of: fn(&(f64, f64)) -> f64| values.iter().map(of).sum::<f64>() / values.len().max(1) as f64;
    let (mut total, mut total_left_out) = (0.0, 0.0);
    for (source, errors) in &sources {
        let (one, two) = (mean(errors, |error| error.0.abs()), mean(errors, |error| error.1.abs()));
        println!(
            "source {source:24} {:4} rows {one:.3} left out {two:.3} bias {:+.3}",
            errors.len(),
            mean(errors, |error| error.1)
        );
        total += one / sources.len() as f64;
        total_left_out += two / sources.len() as f64;
    }
    println!("source mean {total:.4} left out {total_left_out:.4}");
}
