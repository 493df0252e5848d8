//! How the values in `simulator/src/gpu/profiles/stacks.yaml` that say "fitted" were found: coordinate descent on the mean magnitude of the
//! logarithmic error over the rows that `tests/published/split.yaml` declares for fitting, and no others.
//!
//! `cargo run --release -p foretell-score --example fit -- STACK[,STACK...] MOST_ROWS PASSES NAME...`
//! where a NAME is a value of the stack such as `step_overhead` or `product:h100-sxm-80g`. Prints what was found, then every row's error.

use foretell_score::{Part, Prepared, Row, Run, Split, prepare, published, stated_memory};
use foretell_simulator::gpu::{AttentionKind, Category, Profiles};
use foretell_units::{Bytes, Seconds};
use rayon::prelude::*;

struct Case {
    row: Row,
    run: Run,
    prepared: Prepared,
    measured: f64,
}

/// What a value costs the objective for each e-fold that it is away from where the profile had it.
const PULL: f64 = 0.003;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [stacks, most, passes, names @ ..] = arguments.as_slice() else { return Err("STACK MOST_ROWS PASSES NAME...".into()) };
    let (most, passes): (usize, usize) = (most.parse()?, passes.parse()?);
    let filter = std::env::var("ROWS").unwrap_or_default();
    let split = Split::library()?;
    // From a folder, to try values without a build.
    let profiles = match std::env::var("PROFILES") {
        Ok(folder) => {
            let read = |name: &str| std::fs::read_to_string(format!("{folder}/{name}.yaml"));
            Profiles::read(&read("devices")?, &read("links")?, &read("stacks")?)?
        }
        Err(_) => Profiles::library()?.clone(),
    };
    let profiles = &profiles;
    if stacks == "all" {
        let scores = foretell_score::score(&published()?, &split, profiles);
        println!("fit:\n{}\nscore:\n{}", scores.table(Some(Part::Fit)), scores.table(Some(Part::Score)));
        std::fs::write(names.first().map_or("/tmp/scores.csv", String::as_str), foretell_score::to_csv(&scores.rows))?;
        return Ok(());
    }
    let rows = published()?;
    let mut candidates: Vec<(Row, Run)> = rows
        .into_iter()
        .filter(|row| split.part(row) == Part::Fit && row.step_seconds().is_some() && !row.quality.starts_with(['C', 'D']))
        .filter(|row| format!("{} {} {} {} {}", row.table, row.model, row.gpu, row.framework, row.precision).contains(&filter))
        .filter_map(|row| Run::of(&row, profiles).ok().map(|run| (row, run)))
        .filter(|(_, run)| stacks.split(',').any(|stack| stack == run.stack_name))
        .collect();
    let stride = candidates.len().div_ceil(most.max(1)).max(1);
    candidates = candidates.into_iter().step_by(stride).collect();
    let mut cases: Vec<Case> = candidates
        .into_par_iter()
        .filter_map(|(row, run)| {
            let (prepared, measured) = (prepare(&run).ok()?, row.step_seconds()?);
            Some(Case { row, run, prepared, measured })
        })
        .collect();
    let mut values: Vec<f64> = names.iter().map(|name| cases.first().map_or(1.0, |case| get(&case.run, name))).collect();
    let priors = values.clone();
    // Values that the rows do not determine stay where physics put them.
    let objective = |cases: &[Case], values: &[f64]| {
        let far = |(value, prior): (&f64, &f64)| if *prior > 0.0 { (value / prior).ln().abs() } else { 0.0 };
        error(cases) + PULL * values.iter().zip(&priors).map(far).sum::<f64>()
    };
    let mut best = objective(&cases, &values);
    eprintln!("{} rows, at first {best:.4}", cases.len());
    let mut step = 0.3;
    for _ in 0..passes {
        for (place, name) in names.iter().enumerate() {
            for factor in [1.0 + step, 1.0 / (1.0 + step)] {
                let old = values[place];
                let tried = if old == 0.0 { smallest(name) } else { old * factor };
                cases.iter_mut().for_each(|case| set(&mut case.run, name, tried));
                values[place] = tried;
                let found = objective(&cases, &values);
                if found < best {
                    best = found;
                } else {
                    values[place] = old;
                    cases.iter_mut().for_each(|case| set(&mut case.run, name, old));
                }
            }
        }
        step *= 0.75;
    }
    for (name, value) in names.iter().zip(&values) {
        println!("{name} = {value:.6}");
    }
    let mut ratios: Vec<f64> = Vec::new();
    for case in &cases {
        let predicted = case.prepared.predict(&case.run).map_err(|refusal| refusal.to_string())?;
        let error = predicted.step.value() / case.measured - 1.0;
        ratios.push(case.measured / predicted.step.value());
        let layout = &case.run.plan.layout;
        println!(
            "{:+.3} {} {:>24} {:22} {:9} {:>4} n{:<5} d{} e{} t{} p{} c{} v{} sp{} z{} {:?} mb{} gb{} {:?} {:.4}s compute {:.3} {}",
            error,
            case.row.memory_bytes().map_or(String::new(), |bytes| format!(
                "mem {:+.3} of {:.1}",
                stated_memory(&case.row, &case.run, predicted.memory) / bytes - 1.0,
                bytes / 1073741824.0
            )),
            case.row.row_id,
            case.row.model,
            case.run.cluster.device.split('-').next().unwrap_or(""),
            case.run.format.name(),
            case.row.count("n_gpus").unwrap_or(0),
            layout.data,
            layout.expert,
            layout.tensor,
            layout.pipeline,
            layout.context,
            layout.virtual_stages,
            u8::from(layout.sequence_parallel),
            layout.zero,
            layout.recompute,
            layout.micro_batch,
            case.run.plan.global_batch,
            case.row.count("seq").unwrap_or(0),
            case.measured,
            predicted.compute.value() / predicted.step.value(),
            case.row.framework,
        );
    }
    if std::env::var("KERNELS").is_ok() {
        cases.iter().for_each(kernels);
    }
    ratios.sort_by(f64::total_cmp);
    let at = |share: f64| ratios.get((share * (ratios.len().saturating_sub(1)) as f64).round() as usize).copied().unwrap_or(1.0);
    println!("mean magnitude {:.4}; spread [{:.3}, {:.3}]", error(&cases), at(0.1), at(0.9));
    Ok(())
}

fn error(cases: &[Case]) -> f64 {
    let of_memory = std::env::var("OBJECTIVE").is_ok_and(|objective| objective == "memory");
    let errors: Vec<f64> = cases
        .par_iter()
        .filter(|case| !of_memory || case.row.memory_bytes().is_some())
        .map(|case| match case.prepared.predict(&case.run) {
            Ok(predicted) if of_memory => {
                let stated = stated_memory(&case.row, &case.run, predicted.memory);
                (stated / case.row.memory_bytes().unwrap_or(1.0)).ln().abs()
            }
            Ok(predicted) => (predicted.step.value() / case.measured).ln().abs(),
            Err(_) => 1.0,
        })
        .collect();
    errors.iter().sum::<f64>() / errors.len().max(1) as f64
}

/// What the kernels of a case's busiest stage take, the most first.
fn kernels(case: &Case) {
    use foretell_program::{Axis, Operation, Rank};
    use foretell_simulator::gpu::{GpuCosts, Reachable};
    let costs = GpuCosts { cluster: &case.run.cluster, stack: &case.run.stack, format: case.run.format };
    let Some((count, program)) = case.prepared.programs.first() else { return };
    let Some(stage) = std::env::var("KERNELS").ok().and_then(|stage| program.lists.get(stage.parse::<usize>().ok()?)) else {
        return;
    };
    let mut totals: std::collections::BTreeMap<String, (f64, usize)> = Default::default();
    for instruction in &stage.instructions {
        let (name, time) = match &instruction.operation {
            Operation::Compute { kernel, accumulate, .. } => (
                format!("{:?} {kernel:?}", instruction.phase),
                costs.kernel_time(kernel, *accumulate, program.precision).device.value(),
            ),
            Operation::Collective { kind, group, bytes, .. } => {
                let place = &stage.groups[group.0 as usize];
                let rank = program.mesh.rank(program.mesh.coordinates(Rank(0)).with(Axis::Pipeline, stage.stage));
                let group = Reachable::of(place, &program.mesh, rank, &case.run.cluster);
                let time = group.time(*kind, bytes.value(), &case.run.cluster).value();
                (format!("{:?} {kind:?} {place} {bytes} {group:?}", instruction.phase), time)
            }
            other => (other.kind().to_string(), 0.0),
        };
        let total = totals.entry(name).or_default();
        *total = (total.0 + time, total.1 + 1);
    }
    let mut totals: Vec<_> = totals.into_iter().collect();
    totals.sort_by(|one, two| two.1.0.total_cmp(&one.1.0));
    println!("{} with {count} micro-batches:", case.row.row_id);
    for (name, (time, times)) in totals.iter().take(24) {
        println!("   {:9.6} s {times:5} {}", time, name.chars().take(150).collect::<String>());
    }
}

fn smallest(name: &str) -> f64 {
    if name.contains("overhead") || name.contains("launch") { 1e-4 } else { 0.05 }
}

fn category(name: &str) -> Option<Category> {
    Some(match name {
        "product" => Category::Product,
        "attention" => Category::Attention,
        "exchange" => Category::Exchange,
        "bias" => Category::Bias,
        "bias_gradient" => Category::BiasGradient,
        "activation" => Category::Activation,
        "residual" => Category::Residual,
        "norm" => Category::Norm,
        "rope" => Category::Rope,
        "rearrange" => Category::Rearrange,
        "embedding" => Category::Embedding,
        "loss" => Category::Loss,
        "routing" => Category::Routing,
        "optimizer" => Category::Optimizer,
        "bucket" => Category::Bucket,
        _ => return None,
    })
}

fn get(run: &Run, name: &str) -> f64 {
    let stack = &run.stack;
    match name.split_once(':') {
        Some(("product", device)) => stack.product_scale(device),
        Some(("traffic", kind)) => category(kind).map_or(1.0, |kind| stack.traffic_of(kind)),
        Some(("launches", kind)) => category(kind).map_or(1.0, |kind| stack.launches_of(kind)),
        Some(("memory", "gradient")) => stack.memory.gradient,
        Some(("memory", "optimizer")) => stack.memory.optimizer,
        Some(("memory", "activations")) => stack.memory.activations,
        Some(("memory", "score")) => stack.memory.score,
        Some(("memory", "context")) => stack.memory.context.value() / 1e9,
        _ => match name {
            "attention" => match stack.attention {
                AttentionKind::Fused { scale } => scale,
                AttentionKind::Unfused { forward_bytes, .. } => forward_bytes,
            },
            "elementwise" => stack.elementwise,
            "host_launch" => stack.host_launch.value(),
            "micro_batch_overhead" => stack.micro_batch_overhead.value(),
            "step_overhead" => stack.step_overhead.value(),
            "compute_slowdown" => stack.compute_slowdown,
            "communication_slowdown" => stack.communication_slowdown,
            "communication" => stack.communication,
            "cast_bytes" => stack.cast_bytes,
            "network" => run.cluster.network.efficiency,
            "network_latency" => run.cluster.network.latency_scale,
            "message_scale" => stack.message_scale,
            _ => 1.0,
        },
    }
}

fn set(run: &mut Run, name: &str, value: f64) {
    let stack = &mut run.stack;
    match name.split_once(':') {
        Some(("product", device)) => {
            stack.product.insert(device.into(), value);
        }
        Some(("traffic", kind)) => {
            category(kind).map(|kind| stack.traffic.insert(kind, value));
        }
        Some(("launches", kind)) => {
            category(kind).map(|kind| stack.launches.insert(kind, value));
        }
        Some(("memory", "gradient")) => stack.memory.gradient = value,
        Some(("memory", "optimizer")) => stack.memory.optimizer = value,
        Some(("memory", "activations")) => stack.memory.activations = value,
        Some(("memory", "score")) => stack.memory.score = value,
        Some(("memory", "context")) => stack.memory.context = Bytes::new((value * 1e9) as u64),
        _ => match name {
            "attention" => match &mut stack.attention {
                AttentionKind::Fused { scale } => *scale = value,
                AttentionKind::Unfused { forward_bytes, backward_bytes } => {
                    *backward_bytes *= value / *forward_bytes;
                    *forward_bytes = value;
                }
            },
            "elementwise" => stack.elementwise = value,
            "host_launch" => stack.host_launch = Seconds::new(value),
            "micro_batch_overhead" => stack.micro_batch_overhead = Seconds::new(value),
            "step_overhead" => stack.step_overhead = Seconds::new(value),
            "compute_slowdown" => stack.compute_slowdown = value,
            "communication_slowdown" => stack.communication_slowdown = value,
            "communication" => stack.communication = value,
            "cast_bytes" => stack.cast_bytes = value,
            "network" => run.cluster.network.efficiency = value,
            "network_latency" => run.cluster.network.latency_scale = value,
            "message_scale" => stack.message_scale = value,
            _ => {}
        },
    }
}
