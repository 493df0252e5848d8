//! The command line of Foretell: one file per subcommand. Answers go to standard output (with
//! `--json` exactly one document), progress and warnings to standard error. The exit status is 0
//! for success, 1 if the command could not be carried out, and 2 for wrong input.
#![warn(clippy::print_stdout, clippy::print_stderr)] // They panic if the stream is closed.

mod ask;
mod beside;
mod best_of_job;
mod binding;
mod breakeven;
mod calibrate;
mod changes;
mod check;
mod choices;
mod confined;
mod data;
mod doctor;
mod escaping;
mod execute;
mod explain;
mod export;
mod failure;
mod fit_table;
mod foreign;
mod framework;
mod generate;
mod gpus_needed;
mod host;
mod idle;
mod import;
mod input;
mod inputs;
mod lab;
mod launch;
mod lengths;
mod library;
mod live;
mod mcp;
mod method;
mod modes;
mod objective_words;
mod output;
mod plan;
mod plan_file;
mod post_training;
mod predict;
mod progress_of;
mod recovery;
mod replaced_method;
mod rollout;
mod run;
mod run_folder;
mod running_cost;
mod schema;
mod score;
mod search_progress;
mod search_report;
mod serve;
mod simulate;
mod sizes;
mod slurm;
mod stated_method;
mod stated_overlap;
mod status;
mod submit;
mod tensorboard;
mod tokenizer;
mod trace_file;
mod training;
mod usual_stack;
mod what_fits;
mod what_if;

use clap::{CommandFactory, Parser, Subcommand};
use failure::{Failure, usage};
use output::Verbosity;
use std::process::ExitCode;

/// A search compiles hundreds of Programs on all cores. With glibc's allocator it took a fifth
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
    /// Say what is done and how long it takes; twice: also every file that is read.
    #[arg(short, long, global = true, action = clap::ArgAction::Count)]
    verbose: u8,
    /// Say nothing but errors on standard error.
    #[arg(short, long, global = true, conflicts_with = "verbose")]
    quiet: bool,
    /// Read and write only files of a folder, and end with the parent: for answers of `serve` and
    /// `mcp`.
    #[arg(long, global = true, hide = true, value_name = "DIR")]
    confined: Option<std::path::PathBuf>,
    /// The parent of a confined process.
    #[arg(long, global = true, hide = true, value_name = "PID")]
    parent: Option<i32>,
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
    Data(data::Arguments),
    Generate(generate::Arguments),
    Score(score::Arguments),
    Export(export::Arguments),
    Import(import::Arguments),
    Submit(submit::Arguments),
    Status(status::Arguments),
    Run(run::Arguments),
    Models(library::Models),
    Topologies(library::Topologies),
    Lab(lab::Arguments),
    Doctor(doctor::Arguments),
    Schema(schema::Arguments),
    Serve(serve::Arguments),
    Mcp(mcp::Arguments),
    /// Print the completions of a shell
    #[command(after_help = "Example:\n  foretell completions bash > ~/.local/share/bash-completion/completions/foretell")]
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },
    /// Writes a manual page for each command into a folder.
    #[command(hide = true)]
    Manual {
        /// The folder
        folder: std::path::PathBuf,
    },
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
            let asks_for_json = status != 0 && std::env::args_os().any(|argument| argument == "--json");
            if let Some(failure) = usage::of_value(&error) {
                output::report(&failure, asks_for_json);
                return ExitCode::from(status);
            }
            let _ = error.print();
            if asks_for_json {
                let _ = output::json(&usage::of_command_line(&error).document());
            }
            return ExitCode::from(status);
        }
    };
    let json = arguments.json;
    output::set_verbosity(match (arguments.quiet, arguments.verbose) {
        (true, _) => Verbosity::Quiet,
        (_, 0) => Verbosity::Usual,
        (_, 1) => Verbosity::Verbose,
        _ => Verbosity::Detailed,
    });
    if let Some(folder) = &arguments.confined
        && let Err(failure) = confined::enter(folder, arguments.parent)
    {
        output::report(&failure, json);
        return ExitCode::from(failure.status());
    }
    let result = match arguments.command {
        Command::Plan(arguments) => plan::run(&arguments, json),
        Command::Simulate(arguments) => simulate::run(&arguments, json),
        Command::Calibrate(arguments) => calibrate::run(&arguments, json),
        Command::Execute(arguments) => execute::run(&arguments, json),
        Command::Check(arguments) => check::run(&arguments, json),
        Command::Data(arguments) => data::run(&arguments, json),
        Command::Generate(arguments) => generate::run(&arguments, json),
        Command::Score(arguments) => score::run(&arguments, json),
        Command::Export(arguments) => export::run(&arguments, json),
        Command::Import(arguments) => import::run(&arguments, json),
        Command::Submit(arguments) => submit::run(&arguments, json),
        Command::Status(arguments) => status::run(&arguments, json),
        Command::Run(arguments) => run::run(&arguments, json),
        Command::Models(arguments) => library::models(&arguments, json),
        Command::Topologies(arguments) => library::topologies(&arguments, json),
        Command::Lab(arguments) => match lab::run(&arguments, json) {
            Ok(status) => return status,
            Err(failure) => Err(failure),
        },
        Command::Keeper { id } => foretell_lab::keep(&id).map_err(Failure::from),
        Command::Doctor(arguments) => doctor::run(&arguments, json),
        Command::Schema(arguments) => schema::run(&arguments),
        Command::Serve(arguments) => serve::run(&arguments, Arguments::command(), json),
        Command::Mcp(arguments) => mcp::run(&arguments, Arguments::command()),
        Command::Completions { shell } => {
            let mut text = Vec::new();
            clap_complete::generate(shell, &mut Arguments::command(), "foretell", &mut text);
            output::line(String::from_utf8_lossy(&text).trim_end())
        }
        Command::Manual { folder } => {
            std::fs::create_dir_all(&folder).and_then(|()| clap_mangen::generate_to(Arguments::command(), &folder)).map_err(
                |error| Failure::undone(failure::code::FILE_UNWRITABLE, format!("the manual pages cannot be written: {error}")),
            )
        }
        Command::Rank => return foretell_executor::run_rank(),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            output::report(&failure, json);
            ExitCode::from(failure.status())
        }
    }
}
