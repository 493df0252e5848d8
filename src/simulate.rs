//! `foretell simulate`: what a plan's step will be.

use crate::beside;
use crate::failure::Failure;
use crate::output;
use crate::plan_file::PlanFile;
use crate::predict::{self, Foretold};
use crate::running_cost;
use crate::what_if;
use crate::{input, inputs};
use clap::Args;
use foretell_reports::{Plot, Section, page, write_trace};
use foretell_simulator::{Folding, critical_path};
use std::path::PathBuf;

/// Foretell a plan's step: its time with an interval, its memory, and where the time goes
#[derive(Debug, Args)]
#[command(
    after_help = "Example:\n  foretell simulate --plan plan.yaml --profile profile.yaml --trace trace.json --plots plots",
    after_long_help = what_if::help()
)]
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
    /// Answer again for other devices or links, beside the step as it is: `inter_node.bandwidth*2`; each use is a question of its own
    #[arg(long, value_name = "CHANGE")]
    what_if: Vec<String>,
    #[command(flatten)]
    running: running_cost::Questions,
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
    let questions = what_if::read(&arguments.what_if)?;
    let loaded = PlanFile::load(&arguments.plan)?;
    let profile = inputs::profile(arguments.profile.as_deref())?;
    let mut foretold = predict::foretell_folding(&loaded, profile.as_ref(), arguments.oversubscribe, arguments.fold.into())?;
    let waiting = input::waiting(&loaded, &foretold.compiled.training, &foretold.prediction);
    if let Some(waiting) = &waiting {
        foretold.prediction = waiting.applied(foretold.prediction);
    }
    let foretold = foretold;
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
    let (oversubscription, folding) = (predict::oversubscription(arguments.oversubscribe), arguments.fold.into());
    let answers = what_if::answer(questions, &foretold, &loaded, profile.as_ref(), oversubscription, folding)?;
    let running = running_cost::answer(&arguments.running, &foretold, &foretold.prediction, &loaded)?;
    if json {
        let mut document = serde_json::to_value(&foretold.prediction).map_err(|error| Failure::Undone(error.to_string()))?;
        if let Some(path) = &path {
            document["critical_path"] = what_if::path_document(path, program);
        }
        let (cost, goodput) = running.documents();
        document["cost"] = cost;
        if let Some(goodput) = goodput {
            document["goodput"] = goodput;
        }
        if let Some(waiting) = &waiting {
            document["input"] = waiting.document();
        }
        if !answers.is_empty() {
            document["what_if"] = what_if::answers_document(&foretold.prediction, &answers)?;
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
            output::line(&format!("\n{}", what_if::path_table(path)))?;
        }
        let parts = [waiting.map(|waiting| waiting.table(&loaded)), running.table()];
        for part in parts.into_iter().flatten() {
            output::line(&format!("\n{part}"))?;
        }
        if !answers.is_empty() {
            output::line(&format!("\n{}", what_if::answers_table(&foretold.prediction, &answers)))?;
        }
        if !jobs.is_empty() {
            output::line(&format!("\n{}", beside::listing(&jobs, &loaded.topology)))?;
        }
    }
    // The answer is there, and says so too; but such a plan cannot be run.
    predict::fitting(&foretold, &loaded)
}

fn plots(foretold: &Foretold) -> Vec<(&'static str, Plot)> {
    let program = &foretold.compiled.training;
    let timeline = &foretold.simulation.timeline;
    vec![
        ("timeline", Plot::timeline("One step, foretold", program, &[timeline])),
        ("memory", Plot::memory("Memory over the step", program, timeline)),
    ]
}
