//! `foretell simulate`: predicts a plan's step.

use crate::beside;
use crate::failure::Failure;
use crate::output;
use crate::plan_file::PlanFile;
use crate::predict::{self, PredictedPlan};
use crate::running_cost;
use crate::what_if;
use crate::{input, inputs};
use clap::Args;
use foretell_program::Rank;
use foretell_reports::{Column, Plot, Section, page, table, write_trace};
use foretell_simulator::{Collectives, Disturbance, Folding, Options, Recording, critical_path};
use foretell_units::Seconds;
use serde_json::{Value, json};
use std::path::PathBuf;

/// Predict a plan's step: time with an interval, memory, and where the time goes
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
    /// Write plots into a folder (SVG and PNG)
    #[arg(long, value_name = "DIR")]
    plots: Option<PathBuf>,
    /// Write one self-contained HTML page
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,
    /// Critical path: the chain of instructions, across ranks, that each waited for the one before
    #[arg(long)]
    critical_path: bool,
    /// Another job that runs a step on the same topology: on the nodes after the previous job's, or
    /// from NODE on
    #[arg(long, value_name = "PLAN[@NODE]")]
    beside: Vec<String>,
    /// Answer again for other devices or links, beside the step as it is: `inter_node.bandwidth*2`;
    /// each use is a question of its own
    #[arg(long, value_name = "CHANGE")]
    what_if: Vec<String>,
    #[command(flatten)]
    running: running_cost::Questions,
    /// Simulate equivalent ranks once: the same answer in less time
    #[arg(long, value_enum, default_value_t = Fold::On)]
    fold: Fold,
    /// Simulate a collective as one flow, or each step of each rank of its rings as a message
    #[arg(long, value_enum, default_value_t = CollectivesAs::Flow)]
    collectives: CollectivesAs,
    /// Random pace per rank: coefficient of variation of a log-normal distribution with mean 1,
    /// such as 0.02
    #[arg(long, value_name = "CV", default_value_t = 0.0, value_parser = jitter)]
    jitter: f64,
    /// A rank that is slower by a factor, such as 7=1.3; repeatable
    #[arg(long = "straggler", value_name = "RANK=TIMES", value_parser = straggler)]
    stragglers: Vec<(Rank, f64)>,
    /// Print the Program: every instruction of every stage, with its operands' offsets
    #[arg(long)]
    dump_program: bool,
    /// Let ranks share devices, to check a layout without timing it
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

/// How collectives are simulated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum CollectivesAs {
    Flow,
    Steps,
}

impl From<CollectivesAs> for Collectives {
    fn from(collectives: CollectivesAs) -> Self {
        match collectives {
            CollectivesAs::Flow => Collectives::Flow,
            CollectivesAs::Steps => Collectives::Steps,
        }
    }
}

fn jitter(text: &str) -> Result<f64, String> {
    // With more variation the slowest of many ranks alone decides the step.
    let most = 2.0;
    let jitter: f64 = text.parse().map_err(|_| "not a number; hint: 0.02 means two per cent".to_string())?;
    if (0.0..=most).contains(&jitter) {
        Ok(jitter)
    } else {
        Err(format!("not between 0 and {most}; hint: 0.02 means two per cent"))
    }
}

fn straggler(text: &str) -> Result<(Rank, f64), String> {
    let hint = "hint: 7=1.3 makes rank 7 take 1.3 times as long";
    let (rank, times) = text.split_once('=').ok_or_else(|| format!("no `=`; {hint}"))?;
    let rank = rank.trim().parse().map_err(|_| format!("`{rank}` is not a rank; {hint}"))?;
    let times: f64 = times.trim().parse().map_err(|_| format!("`{times}` is not a number; {hint}"))?;
    if times.is_finite() && times > 0.0 {
        Ok((Rank(rank), times))
    } else {
        Err(format!("`{times}` is not a finite number above 0; {hint}"))
    }
}

/// Runs the command.
pub fn run(arguments: &Arguments, json: bool) -> Result<(), Failure> {
    let questions = what_if::read(&arguments.what_if)?;
    let loaded = PlanFile::load(&arguments.plan)?;
    let profile = inputs::profile(arguments.profile.as_deref())?;
    let options = options(arguments, json);
    let mut predicted = predict::predict_as(&loaded, profile.as_ref(), &options)?;
    let waiting = input::waiting(&loaded, &predicted.compiled.training, &predicted.prediction);
    if let Some(waiting) = &waiting {
        predicted.prediction = waiting.applied(predicted.prediction);
    }
    let predicted = predicted;
    let program = &predicted.compiled.training;
    predict::print_caveats(&loaded.topology, &predicted.prediction, program.mesh.world_size());
    if let Some(path) = &arguments.trace {
        let mut text = Vec::new();
        write_trace(program, &[&predicted.simulation.timeline], &mut text)?;
        output::write(path, &text)?;
    }
    if let Some(folder) = &arguments.plots {
        for (name, plot) in &plots(&predicted) {
            output::write(&folder.join(format!("{name}.svg")), plot.svg()?.as_bytes())?;
            output::write(&folder.join(format!("{name}.png")), &plot.png()?)?;
        }
    }
    if let Some(path) = &arguments.report {
        let mut sections = vec![
            Section::Listing { heading: "Prediction".into(), text: predict::table(&predicted.prediction, &loaded.topology) },
            Section::Listing { heading: "Plan".into(), text: loaded.file.to_yaml()? },
        ];
        for (name, plot) in plots(&predicted) {
            sections.push(Section::Figure { heading: name.into(), plot: Box::new(plot), caption: String::new() });
        }
        output::write(path, page(&format!("{}: predicted", loaded.model.name), &sections)?.as_bytes())?;
    }
    let path = arguments.critical_path.then(|| critical_path(&predicted.simulation.timeline, program)).transpose()?;
    let jobs = match arguments.beside.as_slice() {
        [] => Vec::new(),
        others => beside::predict(&loaded, others, profile.as_ref(), arguments.fold.into())?,
    };
    let (oversubscription, folding) = (predict::oversubscription(arguments.oversubscribe), arguments.fold.into());
    let answers = what_if::answer(questions, &predicted, &loaded, profile.as_ref(), oversubscription, folding)?;
    let running = running_cost::answer(&arguments.running, &predicted, &predicted.prediction, &loaded)?;
    if json {
        let mut document = serde_json::to_value(&predicted.prediction).map_err(|error| Failure::Undone(error.to_string()))?;
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
            document["what_if"] = what_if::answers_document(&predicted.prediction, &answers)?;
        }
        if let Some(undisturbed) = predicted.undisturbed {
            document["disturbance"] = disturbance_document(&options.disturbance, undisturbed, predicted.prediction.step_seconds);
        }
        if !jobs.is_empty() {
            document["jobs"] = beside::document(&jobs);
        }
        output::json(&document)?;
    } else if arguments.dump_program {
        output::line(&program.to_string())?;
    } else {
        output::line(&predict::table(&predicted.prediction, &loaded.topology))?;
        if let Some(undisturbed) = predicted.undisturbed {
            output::line(&format!(
                "\n{}",
                disturbance_table(&options.disturbance, undisturbed, predicted.prediction.step_seconds)
            ))?;
        }
        if let Some(path) = &path {
            output::line(&format!("\n{}", what_if::path_table(path)))?;
        }
        let parts = [waiting.map(|waiting| waiting.table(&loaded)), running.table()];
        for part in parts.into_iter().flatten() {
            output::line(&format!("\n{part}"))?;
        }
        if !answers.is_empty() {
            output::line(&format!("\n{}", what_if::answers_table(&predicted.prediction, &answers)))?;
        }
        if !jobs.is_empty() {
            output::line(&format!("\n{}", beside::listing(&jobs, &loaded.topology)))?;
        }
    }
    // The answer is printed and says so too, but the plan cannot run.
    predict::require_fit(&predicted, &loaded)
}

/// Options of the simulation. Records spans only if an output needs them.
fn options(arguments: &Arguments, json: bool) -> Options {
    let draws = arguments.trace.is_some() || arguments.plots.is_some() || arguments.report.is_some();
    // Energy needs to know what each device does when.
    let needs_spans = draws || arguments.critical_path || json || arguments.running.asks_for_cost();
    Options {
        oversubscription: predict::oversubscription(arguments.oversubscribe),
        folding: arguments.fold.into(),
        collectives: arguments.collectives.into(),
        recording: if needs_spans { Recording::Spans } else { Recording::Ends },
        disturbance: Disturbance {
            jitter: arguments.jitter,
            seed: arguments.running.seed,
            stragglers: arguments.stragglers.clone(),
        },
        ..Options::default()
    }
}

fn disturbance_table(disturbance: &Disturbance, undisturbed: Seconds, step: Seconds) -> String {
    let mut rows = Vec::new();
    if disturbance.jitter > 0.0 {
        let (jitter, seed) = (disturbance.jitter, disturbance.seed);
        rows.push(vec![format!("jitter, log-normal, seed {seed}"), format!("{:.1} % per rank", jitter * 100.0)]);
    }
    for (rank, times) in &disturbance.stragglers {
        rows.push(vec![format!("{rank} is slower"), format!("{times} times")]);
    }
    let cost = step - undisturbed;
    let share = if undisturbed > Seconds::ZERO { cost / undisturbed * 100.0 } else { 0.0 };
    rows.push(vec!["step without it".into(), undisturbed.to_string()]);
    rows.push(vec!["it costs".into(), format!("{cost} ({share:.1} %)")]);
    table(&[Column::words("disturbance"), Column::numbers("")], &rows)
}

fn disturbance_document(disturbance: &Disturbance, undisturbed: Seconds, step: Seconds) -> Value {
    let stragglers = disturbance.stragglers.iter().map(|(rank, times)| json!({"rank": rank.0, "times": times}));
    json!({
        "jitter": disturbance.jitter, "seed": disturbance.seed, "stragglers": stragglers.collect::<Vec<_>>(),
        "undisturbed_step_seconds": undisturbed.value(), "cost_seconds": (step - undisturbed).value(),
    })
}

fn plots(predicted: &PredictedPlan) -> Vec<(&'static str, Plot)> {
    let program = &predicted.compiled.training;
    let timeline = &predicted.simulation.timeline;
    vec![
        ("timeline", Plot::timeline("One step, predicted", program, &[timeline])),
        ("memory", Plot::memory("Memory over the step", program, timeline)),
    ]
}
