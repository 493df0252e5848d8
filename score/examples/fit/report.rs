//! `fitted.yaml`, and the residuals for who reads along.

use crate::cases::Case;
use crate::parameters::{Owner, kin_of};
use crate::solve::Fit;
use foretell_simulator::gpu::Profiles;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

/// So many rows' worth of all stacks' residuals stand beside a stack's own when its interval is made.
const COMMON: f64 = 6.0;

/// The file.
pub fn yaml(cases: &[Case], time: &Fit, memory: &Fit, profiles: &Profiles) -> String {
    let mut stacks: BTreeMap<String, Vec<(String, f64)>> = BTreeMap::new();
    let mut devices: BTreeMap<String, Vec<(String, f64)>> = BTreeMap::new();
    let mut network: Vec<(String, f64)> = Vec::new();
    let mut common: BTreeMap<(Owner, String), f64> = BTreeMap::new();
    for fit in [time, memory] {
        for (parameter, value) in fit.parameters.iter().zip(&fit.values) {
            let entry = (parameter.name.clone(), *value);
            match &parameter.owner {
                Owner::Stack(name) => stacks.entry(name.clone()).or_default().push(entry),
                Owner::Device(name) => devices.entry(name.clone()).or_default().push(entry),
                Owner::Network => network.push(entry),
                Owner::Family(_) | Owner::Branch(_) | Owner::Generation(_) => {
                    common.insert((parameter.owner.clone(), parameter.name.clone()), *value);
                }
            }
        }
    }
    // What nothing was fitted on has what its kin have in common.
    let factor = |owner: Owner, name: &str| {
        kin_of(&owner, name, profiles).iter().filter_map(|kin| common.get(kin)).copied().reduce(|one, other| one * other)
    };
    for name in profiles.stack_names().filter(|name| profiles.is_stack(name) && !stacks.contains_key(*name)).collect::<Vec<_>>() {
        let Ok(stack) = profiles.stack(name) else { continue };
        let value = |value: &String| {
            Some((value.clone(), stack.value(value)? * factor(Owner::Stack(name.into()), value)?))
                .filter(|(_, found)| *found > 0.0)
        };
        let values: Vec<_> = common_names(&common).iter().filter_map(value).collect();
        if !values.is_empty() {
            stacks.insert(name.into(), values);
        }
    }
    for name in profiles.gpu_names().filter(|name| !devices.contains_key(*name)).collect::<Vec<_>>() {
        let Ok(gpu) = profiles.gpu(name) else { continue };
        let value = |value: &String| {
            let found = gpu.value(value)? * factor(Owner::Device(name.into()), value)?;
            Some((value.clone(), found.min(1.0)))
        };
        let formats = ["fp32", "tf32", "fp16", "bf16", "fp8", "mxfp8", "nvfp4"].map(|format| format!("product:{format}"));
        let names: Vec<String> = formats.into_iter().chain(["attention".to_string()]).collect();
        let values: Vec<_> = names.iter().filter_map(value).collect();
        if !values.is_empty() {
            devices.insert(name.into(), values);
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
    let all = of_sources(cases, &time.left_out);
    let common = COMMON / all.iter().map(|(_, weight)| weight).sum::<f64>().max(1e-9);
    for (name, values) in &stacks {
        let own: Vec<usize> = time.residuals.keys().copied().filter(|place| cases[*place].run.stack_name == *name).collect();
        let mut ratios: Vec<(f64, f64)> = own.iter().filter_map(|place| Some((-time.left_out.get(place)?, 1.0))).collect();
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
        let on = |place: &&usize| cases[**place].run.clusters().iter().any(|cluster| cluster.device == *name);
        let rows = time.residuals.keys().filter(on).count();
        let _ = writeln!(text, "  {name}: {{rows: {rows}, values: {{{}}}}}", line(values));
    }
    let _ = writeln!(text, "network: {{{}}}", line(&network));
    let [low, high] = unseen(cases, time);
    let _ = writeln!(text, "unseen: [{low:.3}, {high:.3}]");
    text
}

/// The names of what stacks have in common with their kin, as a stack has them.
fn common_names(common: &BTreeMap<(Owner, String), f64>) -> BTreeSet<String> {
    let names = common.keys().filter(|(owner, _)| matches!(owner, Owner::Family(_))).map(|(_, name)| name.as_str());
    names.map(|name| if name.starts_with("attention") { "attention".to_string() } else { name.to_string() }).collect()
}

/// The 10th and 90th percentile of measured over predicted of sources that are left out whole, every source counting alike.
fn unseen(cases: &[Case], time: &Fit) -> [f64; 2] {
    let mut ratios = of_sources(cases, &time.without_source);
    ratios.sort_by(|one, two| one.0.total_cmp(&two.0));
    [quantile(&ratios, 0.1).exp(), quantile(&ratios, 0.9).exp()]
}

/// Logarithms of measured over predicted with weights such that every source counts alike.
fn of_sources(cases: &[Case], residuals: &BTreeMap<usize, f64>) -> Vec<(f64, f64)> {
    let mut rows: BTreeMap<&str, f64> = BTreeMap::new();
    residuals.keys().for_each(|place| *rows.entry(&cases[*place].row.table).or_default() += 1.0);
    residuals.iter().map(|(place, residual)| (-residual, 1.0 / rows[cases[*place].row.table.as_str()])).collect()
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

/// What was found and what it misses by.
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
    for (place, residual) in &time.residuals {
        let without = |those: &BTreeMap<usize, f64>| those.get(place).copied().unwrap_or(*residual);
        let errors = [*residual, without(&time.without_row), without(&time.left_out), without(&time.without_source)];
        let errors = errors.map(|one| one.exp() - 1.0);
        sources.entry(&cases[*place].row.table).or_default().push(errors);
        let case = &cases[*place];
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
    print_memory(cases, memory);
    let mean = |errors: &[[f64; 4]], of: &dyn Fn(&[f64; 4]) -> f64| errors.iter().map(of).sum::<f64>() / errors.len() as f64;
    let mut totals = [0.0; 4];
    for (source, errors) in &sources {
        let means = [0, 1, 2, 3].map(|place| mean(errors, &|error| error[place].abs()));
        let biases = [2, 3].map(|place| mean(errors, &|error| error[place]));
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

/// What memory is missed by, and by source.
pub fn print_memory(cases: &[Case], memory: &Fit) {
    let mut sources: BTreeMap<&str, Vec<[f64; 4]>> = BTreeMap::new();
    for (place, residual) in &memory.residuals {
        let case = &cases[*place];
        let without = |those: &BTreeMap<usize, f64>| those.get(place).copied().unwrap_or(*residual);
        let errors = [*residual, without(&memory.without_row), without(&memory.left_out), without(&memory.without_source)];
        let errors = errors.map(|one| one.exp() - 1.0);
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
        let mean = |place: usize| errors.iter().map(|error| error[place].abs()).sum::<f64>() / errors.len() as f64;
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
