//! How the values in `simulator/src/gpu/profiles/fitted.yaml` were found, on the rows that `tests/published/split.yaml` declares for
//! fitting, and no others.
//!
//! Every value has a prior: what the other profile files say of it, with a spread by its kind (`Kind::of`). Found is the most
//! probable of all values at once, of devices, network and stacks, by Gauss and Newton's method on logarithms; residuals count as
//! pseudo-Huber loss, so that a few rows that are far off do not pull. A stack with few rows stays near its prior. Intervals come from
//! residuals of rows that were left out group by group (a model on a device by a framework), which the fit's linearisation tells without
//! another simulation.
//!
//! `cargo run --release -p foretell-score --example fit -- COMMAND`:
//! `fit FILE` fits and writes FILE, and FILE.json with the linearised fit of times, which `benches/hyperparameters.py` reads; `memory` fits
//! memory alone and prints what it misses by; `only FILE SOURCE...` fits on these sources alone, prints, and writes the linearised fit to FILE;
//! `declared FILE [SOURCE...]` prints the table of the declared rows (of these sources) and writes them, and does not look at the others;
//! `scores FILE` does so of all rows; `kernels ROW STAGE` prints what a stage holds and what its instructions take; `without SOURCE,SOURCE...`
//! fits without these sources and prints the table of their declared rows, once for each set. Profiles are read from the folder in the
//! environment's PROFILES, if it is set, so that values can be tried without a build.

mod cases;
mod kernels;
mod linear;
mod parameters;
mod report;
mod solve;

use cases::Quantity;
use foretell_score::{Part, Row, Split, published};
use foretell_simulator::gpu::Profiles;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments.as_slice() {
        ["fit", file] => {
            let profiles = profiles("stacks: {}\ndevices: {}\nnetwork: {}\n")?;
            let cases = cases::declared(&profiles)?;
            eprintln!("{} rows declared for fitting are simulated", cases.len());
            let time = solve::fit(&cases, Quantity::Step, &profiles)?;
            let memory = solve::fit(&cases, Quantity::Memory, &profiles)?;
            std::fs::write(file, report::yaml(&cases, &time, &memory, &profiles))?;
            report::print(&cases, &time, &memory);
            std::fs::write(format!("{file}.json"), linear::json(&cases, &time))?;
        }
        ["only", file, sources @ ..] if !sources.is_empty() => {
            let profiles = profiles("stacks: {}\ndevices: {}\nnetwork: {}\n")?;
            let mut cases = cases::declared(&profiles)?;
            cases.retain(|case| sources.contains(&case.row.table.as_str()));
            let time = solve::fit(&cases, Quantity::Step, &profiles)?;
            let memory = solve::fit(&cases, Quantity::Memory, &profiles)?;
            report::print(&cases, &time, &memory);
            std::fs::write(file, linear::json(&cases, &time))?;
        }
        ["memory"] => {
            let profiles = profiles("stacks: {}\ndevices: {}\nnetwork: {}\n")?;
            let cases = cases::declared(&profiles)?;
            report::print_memory(&cases, &solve::fit(&cases, Quantity::Memory, &profiles)?);
        }
        ["scores", file] => {
            let scores = foretell_score::score(&published()?, &Split::library()?, &profiles("")?);
            println!("declared:\n{}\nkept:\n{}", scores.table(Some(Part::Fit)), scores.table(Some(Part::Score)));
            std::fs::write(file, foretell_score::to_csv(&scores.rows))?;
        }
        ["declared", file, sources @ ..] => {
            let split = Split::library()?;
            let is_asked = |row: &Row| sources.is_empty() || sources.contains(&row.table.as_str());
            let rows: Vec<_> = published()?.into_iter().filter(|row| split.part(row) == Part::Fit && is_asked(row)).collect();
            let scores = foretell_score::score(&rows, &split, &profiles("")?);
            println!("{}", scores.table(Some(Part::Fit)));
            std::fs::write(file, foretell_score::to_csv(&scores.rows))?;
        }
        ["without", sets @ ..] if !sets.is_empty() => {
            for set in sets {
                without(&set.split(',').collect::<Vec<_>>())?;
            }
        }
        ["kernels", row, stage] => kernels::print(&profiles("")?, row, stage.parse()?)?,
        _ => {
            return Err(
                "fit FILE, memory, declared FILE [SOURCE...], scores FILE, without SOURCE,SOURCE... or kernels ROW STAGE".into(),
            );
        }
    }
    Ok(())
}

/// Fits without some sources, and prints what that foretells of their declared rows.
fn without(sources: &[&str]) -> Result<(), Box<dyn std::error::Error>> {
    let is_left_out = |row: &Row| sources.contains(&row.table.as_str());
    let priors = profiles("stacks: {}\ndevices: {}\nnetwork: {}\n")?;
    let cases: Vec<_> = cases::declared(&priors)?.into_iter().filter(|case| !is_left_out(&case.row)).collect();
    let time = solve::fit(&cases, Quantity::Step, &priors)?;
    let memory = solve::fit(&cases, Quantity::Memory, &priors)?;
    let found = profiles(&report::yaml(&cases, &time, &memory, &priors))?;
    let split = Split::library()?;
    let rows: Vec<Row> = published()?.into_iter().filter(|row| split.part(row) == Part::Fit && is_left_out(row)).collect();
    println!("without {sources:?}:\n{}", foretell_score::score(&rows, &split, &found).table(Some(Part::Fit)));
    Ok(())
}

/// The library's profiles, or those of the folder that the environment names; with this in place of `fitted.yaml` unless it is empty.
fn profiles(fitted: &str) -> Result<Profiles, Box<dyn std::error::Error>> {
    let folder = std::env::var("PROFILES")
        .unwrap_or_else(|_| concat!(env!("CARGO_MANIFEST_DIR"), "/../simulator/src/gpu/profiles").into());
    let read = |name: &str| std::fs::read_to_string(format!("{folder}/{name}.yaml"));
    let fitted = if fitted.is_empty() { read("fitted")? } else { fitted.into() };
    Ok(Profiles::read(&read("devices")?, &read("links")?, &read("stacks")?, &fitted)?)
}
