//! `foretell simulate`: what a plan's step will be.

use crate::beside;
use crate::failure::Failure;
use crate::inputs;
use crate::output;
use crate::plan_file::PlanFile;
use crate::predict::{self, Foretold};
use clap::Args;
use foretell_program::Program;
use foretell_reports::{Column, Plot, Section, page, table, write_trace};
use foretell_simulator::{CriticalPath, Folding, critical_path};
use foretell_units::Seconds;
use serde_json::{Value, json};
use std::path::PathBuf;

/// Foretell a plan's step: its time with an interval, its memory, and where the time goes
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  foretell simulate --plan plan.yaml --profile profile.yaml --trace trace.json --plots plots")]
pub struct Arguments {
    /// The plan
    #[arg(long, value_name = "FILE")]
    plan: PathBuf,
    /// Measured costs, from `foretell calibrate`
    #[arg(long, value_name = "FILE")]
    profile: Option<PathBuf>,
    /// Write a Chrome/Perfetto trace
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Write the plots (SVG and PNG) into a folder
    #[arg(long, value_name = "DIR")]
    plots: Option<PathBuf>,
    /// Write one self-contained HTML page
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,
    /// Say what the step time is made of: the chain of instructions, across ranks, that each waited for the one before
    #[arg(long)]
    critical_path: bool,
    /// Another job on the same topology, which runs a step beside this one: on the nodes after those of the job before it, or from a node on
    #[arg(long, value_name = "PLAN[@NODE]")]
    beside: Vec<String>,
    /// Whether ranks that must behave alike are simulated once: the same answer, sooner
    #[arg(long, value_enum, default_value_t = Fold::On)]
    fold: Fold,
    /// Print the Program: every instruction of every stage, and where its operands lie
    #[arg(long)]
    dump_program: bool,
    /// Let several ranks share a device: to check layouts, not to time them
    #[arg(long)]
    oversubscribe: bool,
}

/// Whether ranks are folded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Fold {
    On,
    Off,
}

impl From<Fold> for Folding {
    fn from(fold: Fold) -> Self {
        match fold {
            Fold::On => Folding::On,
            Fold::Off => Folding::Off,
        }
    }
}

/// Runs the command.
pub fn run(arguments: &Arguments, json: bool) -> Result<(), Failure> {
    let loaded = PlanFile::load(&arguments.plan)?;
    let profile = inputs::profile(arguments.profile.as_deref())?;
    let foretold = predict::foretell_folding(&loaded, profile.as_ref(), arguments.oversubscribe, arguments.fold.into())?;
    let program = &foretold.compiled.training;
    predict::remarks(&loaded.topology, &foretold.prediction, program.mesh.world_size());
    if let Some(path) = &arguments.trace {
        let mut text = Vec::new();
        write_trace(program, &[&foretold.simulation.timeline], &mut text)?;
        output::write(path, &text)?;
    }
    let plots = plots(&foretold);
    if let Some(folder) = &arguments.plots {
        for (name, plot) in &plots {
            output::write(&folder.join(format!("{name}.svg")), plot.svg()?.as_bytes())?;
            output::write(&folder.join(format!("{name}.png")), &plot.png()?)?;
        }
    }
    if let Some(path) = &arguments.report {
        let mut sections = vec![
            Section::Listing { heading: "Prediction".into(), text: predict::table(&foretold.prediction, &loaded.topology) },
            Section::Listing { heading: "Plan".into(), text: loaded.file.to_yaml()? },
        ];
        for (name, plot) in plots {
            sections.push(Section::Figure { heading: name.into(), plot: Box::new(plot), caption: String::new() });
        }
        output::write(path, page(&format!("{}: foretold", loaded.model.name), &sections)?.as_bytes())?;
    }
    let path = arguments.critical_path.then(|| critical_path(&foretold.simulation.timeline, program)).transpose()?;
    let jobs = match arguments.beside.as_slice() {
        [] => Vec::new(),
        others => beside::foretell(&loaded, others, profile.as_ref(), arguments.fold.into())?,
    };
    if json {
        let mut document = serde_json::to_value(&foretold.prediction).map_err(|error| Failure::Undone(error.to_string()))?;
        if let Some(path) = &path {
            document["critical_path"] = path_document(path, program);
        }
        if !jobs.is_empty() {
            document["jobs"] = beside::document(&jobs);
        }
        output::json(&document)?;
    } else if arguments.dump_program {
        output::line(&program.to_string())?;
    } else {
        output::line(&predict::table(&foretold.prediction, &loaded.topology))?;
        if let Some(path) = &path {
            output::line(&format!("\n{}", path_table(path)))?;
        }
        if !jobs.is_empty() {
            output::line(&format!("\n{}", beside::listing(&jobs, &loaded.topology)))?;
        }
    }
    // The answer is there, and says so too; but such a plan cannot be run.
    predict::fitting(&foretold, &loaded)
}

/// The kinds on the critical path, longest first, and what lies between instructions.
fn path_kinds(path: &CriticalPath) -> Vec<(&str, Seconds)> {
    let kinds = path.by_kind.iter().map(|(kind, time)| (kind.as_str(), *time));
    kinds.chain([("between instructions", path.between)]).collect()
}

fn path_table(path: &CriticalPath) -> String {
    let kinds = path_kinds(path);
    let step: f64 = kinds.iter().map(|(_, time)| time.value()).sum();
    let share = |time: Seconds| if step > 0.0 { time.value() / step * 100.0 } else { 0.0 };
    let rows: Vec<Vec<String>> =
        kinds.iter().map(|(kind, time)| vec![(*kind).into(), time.to_string(), format!("{:.1} %", share(*time))]).collect();
    let columns = [Column::words("on the critical path"), Column::numbers("time"), Column::numbers("of the step")];
    table(&columns, &rows)
}

fn path_document(path: &CriticalPath, program: &Program) -> Value {
    let segments = path.segments.iter().map(|segment| {
        let stage = program.list_of(segment.rank);
        let instruction = stage.instruction(segment.instruction);
        let (start, end) = (Seconds::from(segment.start), Seconds::from(segment.end));
        json!({
            "rank": segment.rank.0, "instruction": segment.instruction.0, "name": stage.names.get(instruction.name as usize),
            "kind": instruction.operation.kind(), "start_seconds": start.value(), "end_seconds": end.value(),
        })
    });
    json!({
        "by_kind": path.by_kind.iter().map(|(kind, time)| json!({"kind": kind, "seconds": time.value()})).collect::<Vec<_>>(),
        "between_seconds": path.between.value(),
        "segments": segments.collect::<Vec<_>>(),
    })
}

fn plots(foretold: &Foretold) -> Vec<(&'static str, Plot)> {
    let program = &foretold.compiled.training;
    let timeline = &foretold.simulation.timeline;
    vec![
        ("timeline", Plot::timeline("One step, foretold", program, &[timeline])),
        ("memory", Plot::memory("Memory over the step", program, timeline)),
    ]
}
