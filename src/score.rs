//! `foretell score`: compares predictions with published measurements.

use crate::failure::Failure;
use crate::{inputs, output};
use foretell_reports::{Plot, ScatterPoint};
use foretell_score::{Scores, Split, Subset, published, read_rows, score, to_csv};
use foretell_simulator::gpu::Profiles;
use foretell_units::Seconds;
use std::path::PathBuf;

/// Predict published runs and report the errors
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// Tables of measured runs (columns: tests/published/INDEX.md) [default: the project's own]
    files: Vec<PathBuf>,
    /// Write scores.csv and the plot of predicted over measured step times into a folder
    #[arg(long, value_name = "DIR")]
    plots: Option<PathBuf>,
    /// Include rows on which parameters were fitted
    #[arg(long)]
    all: bool,
}

/// Runs the command.
pub fn run(arguments: &Arguments, json: bool) -> Result<(), Failure> {
    let input = |error: &dyn std::fmt::Display| Failure::Input(error.to_string());
    let mut rows = Vec::new();
    for file in &arguments.files {
        let text = inputs::read(file)?;
        rows.extend(read_rows(&text).map_err(|error| Failure::in_file(file, &error))?);
    }
    if arguments.files.is_empty() {
        rows = published().map_err(|error| input(&error))?;
    }
    let split = Split::library().map_err(|error| input(&error))?;
    let profiles = Profiles::library().map_err(|error| input(&error))?;
    let scores = score(&rows, &split, profiles);
    if let Some(folder) = &arguments.plots {
        let undone = |error: &dyn std::fmt::Display| Failure::Undone(format!("{}: {error}", folder.display()));
        std::fs::create_dir_all(folder).map_err(|error| undone(&error))?;
        output::write(&folder.join("scores.csv"), to_csv(&scores.rows).as_bytes())?;
        let plot = plot(&scores);
        output::write(&folder.join("predicted-over-measured.svg"), plot.svg()?.as_bytes())?;
        output::write(&folder.join("predicted-over-measured.png"), &plot.png()?)?;
    }
    if json {
        return output::json(&scores);
    }
    let subset = if arguments.all { None } else { Some(Subset::Score) };
    output::line(&scores.table(subset))?;
    let refused: usize = scores.refused.values().sum();
    if refused > 0 {
        output::line(&format!("\n{refused} of {} rows cannot be simulated:", scores.rows.len()))?;
        let mut reasons: Vec<(&String, &usize)> = scores.refused.iter().collect();
        reasons.sort_by(|one, two| two.1.cmp(one.1).then(one.0.cmp(two.0)));
        for (reason, count) in reasons {
            output::line(&format!("{count:>6}  {reason}"))?;
        }
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
