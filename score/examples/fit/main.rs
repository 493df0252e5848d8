//! Fits the values in `simulator/src/gpu/profiles/fitted.yaml` on the rows that
//! `tests/published/split.yaml` declares for fitting, and on no others.
//!
//! Every value has a prior: what the other profile files say, with a spread by kind of value. The
//! fit finds the most probable values of devices, network and stacks together, by the Gauss-Newton
//! method on logarithms. Residuals count with a pseudo-Huber loss, so outliers do not dominate. A
//! stack with few rows stays near its prior. Intervals come from residuals of rows that were held
//! out group by group, which the linearised fit gives without further simulations.
//!
//! Usage: `cargo run --release -p foretell-score --example fit -- COMMAND`. The commands are:
//!
//! - `fit FILE` fits everything and writes FILE. It also writes FILE.json, the linearised fit of
//!   step times, for `benches/hyperparameters.py`.
//! - `memory` fits memory alone and prints its residuals.
//! - `only FILE SOURCE...` fits on these sources alone, prints the residuals and writes the
//!   linearised fit to FILE.
//! - `declared FILE [SOURCE...]` scores the declared rows (of these sources), and writes them to
//!   FILE.
//! - `scores FILE` scores all rows and writes them to FILE.
//! - `without SOURCE,SOURCE...` fits without these sources and scores their declared rows, once for
//!   each list.
//! - `left-out FILE source|device|stack|model` scores all rows as `foretell score --leave-out`
//!   does, and writes them to FILE.
//! - `kernels ROW STAGE` prints a stage's memory and the time of its instructions.
//!
//! The environment variable PROFILES names a folder of profile files to use in place of the
//! library's, to try values without a build.

mod kernels;

use foretell_score::{
    Case, Fit, LeaveOut, Quantity, Row, Split, Subset, declared, fit, fit_json, print_fit, print_memory_fit, published, score,
    score_left_out, to_csv, yaml_of_fit,
};
use foretell_simulator::gpu::Profiles;

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

const USAGE: &str = "usage: fit FILE | memory | only FILE SOURCE... | declared FILE [SOURCE...] | scores FILE | \
                     without SOURCE,SOURCE... | left-out FILE WHAT | kernels ROW STAGE";

/// A `fitted.yaml` without values, which leaves the priors.
const NOTHING_FITTED: &str = "stacks: {}\ndevices: {}\nnetwork: {}\n";

fn main() -> Outcome<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments.as_slice() {
        ["fit", file] => {
            let priors = profiles(Some(NOTHING_FITTED))?;
            let cases = declared(&priors)?;
            eprintln!("{} rows declared for fitting are simulated", cases.len());
            let (time, memory) = fit_both(&cases, &priors)?;
            std::fs::write(file, yaml_of_fit(&cases, &time, &memory, &priors))?;
            print!("{}", print_fit(&cases, &time, &memory));
            std::fs::write(format!("{file}.json"), fit_json(&cases, &time))?;
        }
        ["only", file, sources @ ..] if !sources.is_empty() => {
            let priors = profiles(Some(NOTHING_FITTED))?;
            let mut cases = declared(&priors)?;
            cases.retain(|case| sources.contains(&case.row.table.as_str()));
            let (time, memory) = fit_both(&cases, &priors)?;
            print!("{}", print_fit(&cases, &time, &memory));
            std::fs::write(file, fit_json(&cases, &time))?;
        }
        ["memory"] => {
            let priors = profiles(Some(NOTHING_FITTED))?;
            let cases = declared(&priors)?;
            print!("{}", print_memory_fit(&cases, &fit(&cases, Quantity::Memory, &priors, &progress)?));
        }
        ["scores", file] => {
            let scores = score(&published()?, &Split::library()?, &profiles(None)?);
            println!("declared:\n{}\nheld out:\n{}", scores.table(Some(Subset::Fit)), scores.table(Some(Subset::Score)));
            std::fs::write(file, to_csv(&scores.rows))?;
        }
        ["declared", file, sources @ ..] => {
            let split = Split::library()?;
            let rows = declared_rows(&split, |row| sources.is_empty() || sources.contains(&row.table.as_str()))?;
            let scores = score(&rows, &split, &profiles(None)?);
            println!("{}", scores.table(Some(Subset::Fit)));
            std::fs::write(file, to_csv(&scores.rows))?;
        }
        ["without", lists @ ..] if !lists.is_empty() => {
            for sources in lists {
                score_without(&sources.split(',').collect::<Vec<_>>())?;
            }
        }
        ["left-out", file, what] => {
            let by = match *what {
                "source" => LeaveOut::Source,
                "device" => LeaveOut::Device,
                "stack" => LeaveOut::Stack,
                "model" => LeaveOut::Model,
                _ => return Err(USAGE.into()),
            };
            let scores = score_left_out(&published()?, &Split::library()?, by, &progress)?;
            println!("{}", scores.table(None));
            std::fs::write(file, to_csv(&scores.rows))?;
        }
        ["kernels", row, stage] => kernels::print(&profiles(None)?, row, stage.parse()?)?,
        _ => return Err(USAGE.into()),
    }
    Ok(())
}

fn progress(line: &str) {
    eprintln!("{line}");
}

fn fit_both(cases: &[Case], priors: &Profiles) -> Outcome<(Fit, Fit)> {
    Ok((fit(cases, Quantity::Step, priors, &progress)?, fit(cases, Quantity::Memory, priors, &progress)?))
}

fn declared_rows(split: &Split, is_wanted: impl Fn(&Row) -> bool) -> Outcome<Vec<Row>> {
    Ok(published()?.into_iter().filter(|row| split.subset(row) == Subset::Fit && is_wanted(row)).collect())
}

/// Fits without some sources and prints the score of their declared rows.
fn score_without(sources: &[&str]) -> Outcome<()> {
    let is_left_out = |row: &Row| sources.contains(&row.table.as_str());
    let priors = profiles(Some(NOTHING_FITTED))?;
    let cases: Vec<_> = declared(&priors)?.into_iter().filter(|case| !is_left_out(&case.row)).collect();
    let (time, memory) = fit_both(&cases, &priors)?;
    let fitted = profiles(Some(&yaml_of_fit(&cases, &time, &memory, &priors)))?;
    let split = Split::library()?;
    let rows = declared_rows(&split, is_left_out)?;
    println!("without {sources:?}:\n{}", score(&rows, &split, &fitted).table(Some(Subset::Fit)));
    Ok(())
}

/// Reads the profiles, from the folder in PROFILES if it is set. `fitted` replaces `fitted.yaml`.
fn profiles(fitted: Option<&str>) -> Outcome<Profiles> {
    let folder = std::env::var("PROFILES")
        .unwrap_or_else(|_| concat!(env!("CARGO_MANIFEST_DIR"), "/../simulator/src/gpu/profiles").into());
    let read = |name: &str| std::fs::read_to_string(format!("{folder}/{name}.yaml"));
    let fitted = match fitted {
        Some(text) => text.to_string(),
        None => read("fitted")?,
    };
    Ok(Profiles::read(&read("devices")?, &read("links")?, &read("stacks")?, &fitted)?)
}
