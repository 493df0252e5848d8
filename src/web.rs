//! The planner's page without a server: the commands that it asks for as a WebAssembly module,
//! which `web/build` makes. An instance answers one question.
//!
//! The page calls `question` to allocate memory for the question's bytes, then `answer`, and reads
//! the answer's bytes at `text`. The question has the form of the body of `POST /ask` of `foretell
//! serve`, and the answer that of its response, except that it includes the report as a text.
//! `known` returns what the page knows from the start. The root of the program itself is `main.rs`.
#![cfg(target_family = "wasm")]
#![allow(dead_code, unused_imports, reason = "the modules are the program's, of which a page asks only a part")]
#![allow(unexpected_cfgs, reason = "features are the program's")]

mod ask;
mod beside;
mod best_of_job;
mod binding;
mod breakeven;
mod changes;
mod choices;
mod confined;
mod escaping;
mod explain;
mod export;
mod failure;
mod fit_table;
mod foreign;
mod gpus_needed;
mod host;
mod idle;
mod import;
mod input;
mod inputs;
mod lengths;
mod library;
#[path = "web/math.rs"]
mod math;
mod method;
mod modes;
mod objective_words;
mod output;
mod plan;
mod plan_file;
mod post_training;
mod predict;
mod replaced_method;
mod rollout;
mod running_cost;
mod search_progress;
mod search_report;
mod simulate;
mod sizes;
mod stated_method;
mod stated_overlap;
mod tokenizer;
mod trace_file;
mod usual_stack;
mod what_fits;
mod what_if;

use ask::Refusal;
use clap::{CommandFactory, Parser, Subcommand};
use failure::{Failure, usage};
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

/// The command line, as far as a page asks for it.
#[derive(Debug, Parser)]
#[command(name = "foretell", version)]
struct Arguments {
    /// Print exactly one JSON document.
    #[arg(long, global = true)]
    json: bool,
    /// Read and write only files of a folder.
    #[arg(long, global = true, value_name = "DIR")]
    confined: Option<PathBuf>,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Plan(plan::Arguments),
    Simulate(simulate::Arguments),
    Export(export::Arguments),
    Import(import::Arguments),
    Models(library::Models),
    Topologies(library::Topologies),
}

/// The bytes of the question, and later those of the answer.
static TEXT: Mutex<Vec<u8>> = Mutex::new(Vec::new());

fn keep(text: Vec<u8>) -> usize {
    let length = text.len();
    *TEXT.lock().unwrap_or_else(PoisonError::into_inner) = text;
    length
}

/// Allocates memory for a question of `length` bytes, and returns its address.
#[unsafe(no_mangle)]
extern "C" fn question(length: usize) -> *const u8 {
    host::report_panics();
    keep(vec![0; length]);
    text()
}

/// Answers the question, and returns the length of the answer in bytes.
#[unsafe(no_mangle)]
extern "C" fn answer() -> usize {
    let question = std::mem::take(&mut *TEXT.lock().unwrap_or_else(PoisonError::into_inner));
    let request = serde_json::from_slice(&question).map_err(|error| {
        Refusal::Question(format!("the question cannot be read: {error}"), "send a command with its options".into())
    });
    let answer = request.and_then(|request| ask::answer(&Arguments::command(), &request, run));
    keep(match answer {
        Ok(mut answer) => {
            let report = answer.report.take();
            answer.text(&report.into()).into_bytes()
        }
        Err(refusal) => serde_json::to_vec(&refusal.document()).expect("invariant: a refusal is texts"),
    })
}

/// Answers the names and types of the page's fields, and returns the answer's length in bytes.
#[unsafe(no_mangle)]
extern "C" fn known() -> usize {
    host::report_panics();
    let known = ask::known(&Arguments::command(), &[]);
    keep(known.unwrap_or_else(|failure| failure.one_line()).into_bytes())
}

/// Returns the address of the question's or the answer's bytes.
#[unsafe(no_mangle)]
extern "C" fn text() -> *const u8 {
    TEXT.lock().unwrap_or_else(PoisonError::into_inner).as_ptr()
}

/// Runs a command line as `main.rs` does, and returns its exit status.
fn run(words: &[String]) -> u8 {
    let arguments = match Arguments::try_parse_from(words) {
        Ok(arguments) => arguments,
        Err(error) => {
            let failure = usage::of_value(&error).unwrap_or_else(|| usage::of_command_line(&error));
            output::report(&failure, true);
            return Failure::INPUT;
        }
    };
    match carry_out(&arguments) {
        Ok(()) => 0,
        Err(failure) => {
            output::report(&failure, arguments.json);
            failure.status()
        }
    }
}

fn carry_out(arguments: &Arguments) -> Result<(), Failure> {
    let json = arguments.json;
    arguments.confined.as_deref().map(|folder| confined::enter(folder, None)).transpose()?;
    match &arguments.command {
        Command::Plan(arguments) => plan::run(arguments, json),
        Command::Simulate(arguments) => simulate::run(arguments, json),
        Command::Export(arguments) => export::run(arguments, json),
        Command::Import(arguments) => import::run(arguments, json),
        Command::Models(arguments) => library::models(arguments, json),
        Command::Topologies(arguments) => library::topologies(arguments, json),
    }
}
