//! `foretell plan`: searches the fastest layouts of a model on a topology.

use crate::choices::{Choices, Setting};
use crate::failure::Failure;
use crate::{explain, inputs, output, predict, sizes};
use clap::Args;
use foretell_planner::Planned;
use foretell_program::MOST_RANKS;
use foretell_reports::layouts_table;
use serde_json::json;
use std::path::PathBuf;

/// Find the fastest layouts of a model on a topology
#[derive(Debug, Args)]
#[command(
    after_help = "Example:\n  foretell plan --model resnet50 --topology dgx-a100-80g --global-batch 256 --precision bf16 --top 3"
)]
pub struct Arguments {
    #[command(flatten)]
    pub choices: Choices,
    /// Measured costs, from `foretell calibrate`
    #[arg(long, value_name = "FILE")]
    profile: Option<PathBuf>,
    /// Number of layouts to show
    #[arg(long, default_value_t = 5, value_name = "K")]
    top: usize,
    /// Explain the answer: what was searched, what binds, what the others lose, what would change
    /// it
    #[arg(long)]
    explain: bool,
    /// Find the best layout at each size; the number of devices doubles from the first to the
    /// second
    #[arg(long, value_name = "8..4096", value_parser = device_range, conflicts_with_all = ["output", "explain", "front"])]
    scaling: Option<(usize, usize)>,
    /// Pareto front of step time, memory and devices
    #[arg(long, conflicts_with_all = ["output", "explain"])]
    front: bool,
    /// Write the plot of `--scaling` or `--front` into a folder (SVG and PNG)
    #[arg(long, value_name = "DIR")]
    plots: Option<PathBuf>,
    /// Write the best plan to a file
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
}

/// Runs the command.
pub fn run(arguments: &Arguments, json: bool) -> Result<(), Failure> {
    let mut setting = arguments.choices.setting()?;
    let profile = inputs::profile(arguments.profile.as_deref())?;
    if arguments.scaling.is_some() || arguments.front {
        return points(arguments, &setting, json);
    }
    let planned = match arguments.choices.search(&mut setting, profile.as_ref(), arguments.top) {
        Err(Failure::Undone(reason)) if reason.starts_with("no layout fits") && !arguments.choices.oversubscribe => {
            let enough = sizes::enough_nodes(&arguments.choices, &setting)?;
            let change = enough.map_or_else(String::new, |nodes| format!("; it fits on {nodes} such nodes"));
            return Err(Failure::Undone(format!("{reason}{change}")));
        }
        planned => planned?,
    };
    let Some(best) = planned.candidates.first() else {
        return Err(Failure::Undone("the search returned nothing".into()));
    };
    if let Some(path) = &arguments.output {
        let mut file = arguments.choices.plan_file(&setting, &best.plan);
        file.absolute_paths()?;
        output::write(path, file.to_yaml()?.as_bytes())?;
    }
    predict::print_caveats(&setting.topology, &best.prediction, best.plan.mesh()?.world_size());
    if json {
        return output::json(&document(&arguments.choices, &setting, &planned));
    }
    let rows: Vec<_> = planned.candidates.iter().map(|candidate| predict::row(&candidate.plan, &candidate.prediction)).collect();
    let title = format!("{} on {} ({} devices)", setting.model.name, setting.topology.name(), setting.topology.device_count());
    output::line(&format!("{title}\n{}", layouts_table(&rows)))?;
    for (index, candidate) in planned.candidates.iter().enumerate() {
        let format =
            if arguments.choices.precision.len() > 1 { format!("{}, ", candidate.plan.precision) } else { String::new() };
        output::line(&format!("{}: {format}{}", index + 1, explain::words(&candidate.plan.layout)))?;
    }
    if !setting.taken.is_empty() {
        output::line(&format!("defaults: {}", setting.taken.join(", ")))?;
    }
    if arguments.explain {
        let limit = arguments.choices.memory_limit;
        output::line(&explain::explanation(&planned, &setting, profile.as_ref(), limit)?)?;
    }
    match &arguments.output {
        Some(path) => output::line(&format!("layout 1 is in {}", path.display())),
        None => Ok(()),
    }
}

/// The JSON document of `plan`.
pub fn document(choices: &Choices, setting: &Setting, planned: &Planned) -> serde_json::Value {
    let candidate = |candidate: &foretell_planner::Candidate| json!({"plan": choices.plan_file(setting, &candidate.plan), "predicted": candidate.prediction});
    let best = planned.candidates.first();
    json!({
        "plan": best.map(|best| choices.plan_file(setting, &best.plan)),
        "predicted": best.map(|best| &best.prediction),
        "alternatives": planned.candidates.iter().skip(1).map(candidate).collect::<Vec<_>>(),
        "search": planned.search,
    })
}

/// Answers `--scaling` or `--front`.
fn points(arguments: &Arguments, setting: &Setting, json: bool) -> Result<(), Failure> {
    let (name, points) = match arguments.scaling {
        Some(sizes) => ("scaling", sizes::scaling(&arguments.choices, setting, sizes)?),
        None => ("front", sizes::front(&arguments.choices, setting)?),
    };
    if let Some(folder) = &arguments.plots {
        let plot = sizes::plot(name, setting, &points);
        output::write(&folder.join(format!("{name}.svg")), plot.svg()?.as_bytes())?;
        output::write(&folder.join(format!("{name}.png")), &plot.png()?)?;
    }
    if json {
        return output::json(&json!({ name: points }));
    }
    output::line(&format!("{} on {}\n{}", setting.model.name, setting.topology.name(), sizes::points_table(&points)))
}

/// Parses a range of device counts, such as `8..4096`.
fn device_range(text: &str) -> Result<(usize, usize), String> {
    let wrong = || format!("`{text}` is not a range of device counts; hint: write for example 8..4096");
    let (from, to) = text.split_once("..").ok_or_else(wrong)?;
    match (from.trim().parse(), to.trim().parse()) {
        (Ok(from), Ok(to)) if from > 0 && from <= to && to <= MOST_RANKS => Ok((from, to)),
        _ => Err(wrong()),
    }
}
