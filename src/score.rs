//! `foretell score`: compares predictions with published measurements.

use crate::failure::{Failure, code};
use crate::plan_file::{ModelReference, PlanFile};
use crate::{inputs, output};
use foretell_program::{Layout, Plan};
use foretell_reports::{Column, Plot, ScatterPoint, table};
use foretell_score::{
    CompiledRun, LeaveOut, RolloutErrors, RolloutScores, Row, Run, ScoredRollout, Scores, Split, Subset, are_rollouts, published,
    read_rows, score, score_left_out, score_rollouts, to_csv,
};
use foretell_simulator::gpu::Profiles;
use foretell_topologies::TopologyReference;
use foretell_units::Seconds;
use std::path::{Path, PathBuf};

/// Predict published runs and report the errors
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// Tables of measured runs (columns: tests/published/INDEX.md) [default: the project's own]
    files: Vec<PathBuf>,
    /// Write scores.csv and the plot of predicted over measured step times into a folder
    #[arg(long, value_name = "DIR")]
    plots: Option<PathBuf>,
    /// Write a plan for each row into a folder: `simulate --ranks one-per-stage` predicts it as
    /// `score` does, but for rows of traced frameworks, whose plans name their profile
    #[arg(long, value_name = "DIR")]
    plans: Option<PathBuf>,
    /// Show rows on which parameters were fitted in the table, too
    #[arg(long)]
    all: bool,
    /// Score each row with values that were fitted without its source, its device, its stack or its
    /// model: the error to expect of jobs that nobody fitted. Takes minutes
    #[arg(long, value_enum, value_name = "WHAT")]
    leave_out: Option<Left>,
}

/// What a refit leaves out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Left {
    Source,
    Device,
    Stack,
    Model,
}

impl From<Left> for LeaveOut {
    fn from(left: Left) -> Self {
        match left {
            Left::Source => LeaveOut::Source,
            Left::Device => LeaveOut::Device,
            Left::Stack => LeaveOut::Stack,
            Left::Model => LeaveOut::Model,
        }
    }
}

/// Runs the command.
pub fn run(arguments: &Arguments, json: bool) -> Result<(), Failure> {
    let mut rows = Vec::new();
    for file in &arguments.files {
        let text = inputs::read(file)?;
        rows.extend(read_rows(&text).map_err(|error| Failure::of_input(error).in_file(file))?);
    }
    if arguments.files.is_empty() {
        rows = published().map_err(Failure::of_input)?;
    }
    let split = Split::library().map_err(Failure::of_input)?;
    let profiles = Profiles::library().map_err(Failure::of_input)?;
    if are_rollouts(&rows) {
        arguments.refuse_of_rollouts()?;
        let scores = output::with_spinner("score", || score_rollouts(&rows, profiles));
        return if json { output::json(&scores) } else { output::line(&rollouts(&scores)) };
    }
    let scores = match arguments.leave_out {
        Some(left) => {
            let progress = |line: &str| output::note(line);
            score_left_out(&rows, &split, left.into(), &progress).map_err(Failure::of_undone)?
        }
        None => output::with_spinner("score", || score(&rows, &split, profiles)),
    };
    if let Some(folder) = &arguments.plans {
        write_plans(&rows, profiles, folder)?;
    }
    if let Some(folder) = &arguments.plots {
        let undone =
            |error: &dyn std::fmt::Display| Failure::undone(code::FILE_UNWRITABLE, format!("{}: {error}", folder.display()));
        std::fs::create_dir_all(folder).map_err(|error| undone(&error))?;
        output::write(&folder.join("scores.csv"), to_csv(&scores.rows).as_bytes())?;
        let plot = plot(&scores);
        output::write(&folder.join("predicted-over-measured.svg"), plot.svg()?.as_bytes())?;
        output::write(&folder.join("predicted-over-measured.png"), &plot.png()?)?;
    }
    if json {
        return output::json(&scores);
    }
    // With `--leave-out` no row is scored with values fitted on it, so all rows are shown.
    let subset = if arguments.all || arguments.leave_out.is_some() { None } else { Some(Subset::Score) };
    output::line(&scores.table(subset))?;
    output::line(&format!("{} fitted values", scores.fitted_values))?;
    let far_off: Vec<_> = scores.rows.iter().filter(|row| subset.is_none_or(|subset| row.subset == subset)).collect();
    let far_off: Vec<_> = far_off.into_iter().filter_map(|row| Some((row, row.error?, row.implausible.as_ref()?))).collect();
    if !far_off.is_empty() {
        output::line(&format!("\n{} rows are off by more than 25 %; what is implausible:", far_off.len()))?;
        for (row, error, part) in far_off {
            output::line(&format!("{:+6.0} %  {}  {part}", 100.0 * error, row.row_id))?;
        }
    }
    let unclear: Vec<_> = scores.rows.iter().filter_map(|row| Some((&row.row_id, row.error, row.doubt.as_ref()?))).collect();
    if !unclear.is_empty() {
        output::line(&format!("\n{} measurements are unclear, have no part in the fit, and count like others:", unclear.len()))?;
        for (name, error, reason) in unclear {
            let error = error.map_or_else(String::new, |error| format!("{:+.0} %", 100.0 * error));
            output::line(&format!("{error:>8}  {name}  {reason}"))?;
        }
    }
    let refused: usize = scores.refused.values().sum();
    if refused > 0 {
        output::line(&format!("\n{refused} of {} rows cannot be simulated:", scores.rows.len()))?;
        let mut reasons: Vec<(&String, &usize)> = scores.refused.iter().collect();
        reasons.sort_by(|reason, other| other.1.cmp(reason.1).then(reason.0.cmp(other.0)));
        for (reason, count) in reasons {
            output::line(&format!("{count:>6}  {reason}"))?;
        }
    }
    Ok(())
}

impl Arguments {
    /// Refuses options that have no answer for rows of RL post-training.
    fn refuse_of_rollouts(&self) -> Result<(), Failure> {
        let stated =
            [("--plots", self.plots.is_some()), ("--plans", self.plans.is_some()), ("--leave-out", self.leave_out.is_some())];
        match stated.into_iter().find(|(_, is_stated)| *is_stated) {
            None => Ok(()),
            Some((name, _)) => {
                let message = format!("`{name}` has no answer for rows of RL post-training");
                Err(Failure::input(code::OPTION_VALUE, message).hint("leave it out: nothing is fitted on such rows"))
            }
        }
    }
}

/// Rows of RL post-training beside their predictions, and the errors of both halves.
fn rollouts(scores: &RolloutScores) -> String {
    let seconds = |seconds: Option<f64>| seconds.map_or_else(String::new, |seconds| format!("{seconds:.1}"));
    let percent = |error: Option<f64>| error.map_or_else(String::new, |error| format!("{:+.0} %", 100.0 * error));
    let row = |row: &ScoredRollout| {
        vec![
            row.row_id.clone(),
            if row.held_out { "held out" } else { "seen" }.into(),
            seconds(row.measured_step_seconds),
            seconds(row.predicted_step_seconds),
            percent(row.error),
            percent(row.memory_error),
        ]
    };
    let columns = [
        Column::words("row"),
        Column::words("source"),
        Column::numbers("step, s"),
        Column::numbers("predicted"),
        Column::numbers("error"),
        Column::numbers("memory"),
    ];
    let predicted: Vec<Vec<String>> = scores.rows.iter().filter(|row| row.refused.is_none()).map(row).collect();
    let half = |name: &str, errors: &RolloutErrors| {
        let share = |error: Option<f64>| error.map_or("none".into(), |error| format!("{:.0} %", 100.0 * error));
        format!(
            "{name}: {} rows, mean error of the step {}, median {}, {} within 25 %, {} said to fit; {} rows with memory, mean \
             error {}",
            errors.rows,
            share(errors.mean_error),
            share(errors.median_error),
            errors.within_a_quarter,
            errors.said_to_fit,
            errors.rows_with_memory,
            share(errors.mean_memory_error)
        )
    };
    let refused = scores.rows.iter().filter_map(|row| Some(format!("{}: {}", row.row_id, row.refused.as_ref()?)));
    let lines = [
        table(&columns, &predicted),
        half("sources that were seen", &scores.seen),
        half("sources held out", &scores.held_out),
        format!("{} of {} rows cannot be predicted:", scores.rows.len() - predicted.len(), scores.rows.len()),
    ];
    lines.into_iter().chain(refused).collect::<Vec<_>>().join("\n")
}

/// Writes a plan for each row that can be simulated.
fn write_plans(rows: &[Row], profiles: &Profiles, folder: &Path) -> Result<(), Failure> {
    std::fs::create_dir_all(folder)
        .map_err(|error| Failure::undone(code::FILE_UNWRITABLE, format!("{}: {error}", folder.display())))?;
    for row in rows {
        let Ok((run, compiled)) = Run::of(row, profiles).and_then(|run| CompiledRun::new(&run).map(|compiled| (run, compiled)))
        else {
            continue;
        };
        let topology = run.topology().map_err(|refusal| Failure::undone(code::SYSTEM, format!("{}: {refusal}", row.row_id)))?;
        let layout = Layout { recompute: compiled.recompute, ..run.plan.layout };
        let plan = Plan { layout, ..run.plan };
        let topology = TopologyReference::InPlace(Box::new(topology.into()));
        let file = PlanFile::new(ModelReference::InPlace(run.model), topology, None, &plan);
        let name: String = row.row_id.chars().map(|letter| if letter == '/' { '-' } else { letter }).collect();
        output::write(&folder.join(format!("{name}.yaml")), file.to_yaml()?.as_bytes())?;
    }
    Ok(())
}

fn plot(scores: &Scores) -> Plot {
    let points: Vec<ScatterPoint> = scores
        .rows
        .iter()
        .filter(|row| row.subset == Subset::Score)
        .filter_map(|row| {
            let (predicted, measured) = (row.predicted_step_seconds?, row.measured_step_seconds?);
            Some(ScatterPoint { series: row.table.clone(), predicted: Seconds::new(predicted), measured: Seconds::new(measured) })
        })
        .collect();
    Plot::scatter("Published step times: predicted over measured (rows kept from fitting)", &points)
}
