//! `foretell simulate`: what a plan's step will be.

use crate::failure::Failure;
use crate::inputs;
use crate::output;
use crate::plan_file::PlanFile;
use crate::predict::{self, Foretold};
use clap::Args;
use foretell_reports::{Plot, Section, page, write_trace};
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
    /// Print the Program: every instruction of every stage, and where its operands lie
    #[arg(long)]
    dump_program: bool,
    /// Let several ranks share a device: to check layouts, not to time them
    #[arg(long)]
    oversubscribe: bool,
}

/// Runs the command.
pub fn run(arguments: &Arguments, json: bool) -> Result<(), Failure> {
    let loaded = PlanFile::load(&arguments.plan)?;
    let profile = inputs::profile(arguments.profile.as_deref())?;
    let foretold = predict::foretell(&loaded, profile.as_ref(), arguments.oversubscribe)?;
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
    if json {
        return output::json(&foretold.prediction);
    }
    if arguments.dump_program {
        return output::line(&program.to_string());
    }
    output::line(&predict::table(&foretold.prediction, &loaded.topology))
}

fn plots(foretold: &Foretold) -> Vec<(&'static str, Plot)> {
    let program = &foretold.compiled.training;
    let timeline = &foretold.simulation.timeline;
    vec![
        ("timeline", Plot::timeline("One step, foretold", program, &[timeline])),
        ("memory", Plot::memory("Memory over the step", program, timeline)),
    ]
}
