//! The command line of Foretell: one file per subcommand. Answers go to standard output (with
//! `--json` exactly one document), progress and warnings to standard error. The exit status is 0
//! for success, 1 if the command could not be carried out, and 2 for wrong input.

mod beside;
mod calibrate;
mod check;
mod choices;
mod doctor;
mod execute;
mod explain;
mod export;
mod failure;
mod import;
mod input;
mod inputs;
mod lab;
mod launch;
mod library;
mod output;
mod plan;

mod plan_file;
mod predict;
mod run;
mod run_folder;
mod running_cost;
mod score;
mod simulate;
mod sizes;
mod what_if;

use clap::{Parser, Subcommand};
use failure::Failure;
use std::process::ExitCode;

/// A search compiles hundreds of Programs on all cores; with glibc's allocator it took a fifth
/// longer.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Predicts how a distributed training run will go, then runs it and shows how far off it was.
#[derive(Debug, Parser)]
#[command(name = "foretell", version, about, propagate_version = true, max_term_width = 110)]
struct Arguments {
    /// Print exactly one JSON document on standard output.
    #[arg(long, global = true)]
    json: bool,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Plan(plan::Arguments),
    Simulate(simulate::Arguments),
    Calibrate(calibrate::Arguments),
    Execute(execute::Arguments),
    Check(check::Arguments),
    Score(score::Arguments),
    Export(export::Arguments),
    Import(import::Arguments),
    Run(run::Arguments),
    Models(library::Models),
    Topologies(library::Topologies),
    Lab(lab::Arguments),
    Doctor(doctor::Arguments),
    /// Runs as one rank; started by `execute`.
    #[command(hide = true)]
    Rank,
    /// Takes a lab down when the process that uses it ends; started by `lab up` and `execute`.
    #[command(hide = true)]
    Keeper {
        /// The lab.
        id: String,
    },
}

fn main() -> ExitCode {
    foretell_executor::machine::keep_freed_memory();
    let arguments = match Arguments::try_parse() {
        Ok(arguments) => arguments,
        Err(error) => {
            // A request for help or the version is not a mistake.
            let status = if error.use_stderr() { Failure::INPUT } else { 0 };
            let _ = error.print();
            return ExitCode::from(status);
        }
    };
    let json = arguments.json;
    let result = match arguments.command {
        Command::Plan(arguments) => plan::run(&arguments, json),
        Command::Simulate(arguments) => simulate::run(&arguments, json),
        Command::Calibrate(arguments) => calibrate::run(&arguments, json),
        Command::Execute(arguments) => execute::run(&arguments, json),
        Command::Check(arguments) => check::run(&arguments, json),
        Command::Score(arguments) => score::run(&arguments, json),
        Command::Export(arguments) => export::run(&arguments, json),
        Command::Import(arguments) => import::run(&arguments, json),
        Command::Run(arguments) => run::run(&arguments, json),
        Command::Models(arguments) => library::models(&arguments, json),
        Command::Topologies(arguments) => library::topologies(&arguments, json),
        Command::Lab(arguments) => match lab::run(&arguments, json) {
            Ok(status) => return status,
            Err(failure) => Err(failure),
        },
        Command::Keeper { id } => foretell_lab::keep(&id).map_err(Failure::from),
        Command::Doctor(arguments) => doctor::run(&arguments, json),
        Command::Rank => return foretell_executor::run_rank(),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("error: {failure}");
            ExitCode::from(failure.status())
        }
    }
}
