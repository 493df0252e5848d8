//! Prints the duration and the peak memory of single simulations.
//!
//! `MIMALLOC_PURGE_DELAY=-1 cargo run --release -p foretell-simulator --example scale -- CASE
//! [--jitter CV] [--all] [--steps] [--spans] [--times N]`
//!
//! - `CASE` is `small-transformer`, `gpt-175b`, `trillion` or `all-reduce`.
//! - `--all` simulates all ranks.
//! - `--steps` simulates each step of a collective.
//! - `--spans` records spans.
#![allow(clippy::unwrap_used)]

#[path = "../benches/cases/mod.rs"]
mod cases;

use cases::{all_reduce, gpt_175b, small_transformer, trillion};
use foretell_simulator::{Collectives, Disturbance, Folding, Options, Recording, prepare, simulate};
use std::time::Instant;

/// The allocator of the `foretell` program. With `MIMALLOC_PURGE_DELAY=-1` it keeps freed memory,
/// as the program does.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let value =
        |name: &str| arguments.iter().position(|argument| argument == name).map(|at| arguments[at + 1].parse::<f64>().unwrap());
    let start = Instant::now();
    let case = match arguments.get(1).map(String::as_str) {
        Some("small-transformer") => small_transformer(),
        Some("gpt-175b") => gpt_175b(),
        Some("trillion") => trillion(),
        Some("all-reduce") => all_reduce(1024),
        _ => {
            println!(
                "the case is missing or unknown\nhint: name one of `small-transformer`, `gpt-175b`, `trillion` or `all-reduce`"
            );
            return;
        }
    };
    println!("{} ranks, {} instructions; compiled in {:.3} s", case.ranks(), case.instructions(), start.elapsed().as_secs_f64());
    let options = Options {
        folding: if arguments.iter().any(|argument| argument == "--all") { Folding::Off } else { Folding::On },
        recording: if arguments.iter().any(|argument| argument == "--spans") { Recording::Spans } else { Recording::Ends },
        collectives: if arguments.iter().any(|argument| argument == "--steps") { Collectives::Steps } else { Collectives::Flow },
        disturbance: Disturbance { jitter: value("--jitter").unwrap_or(0.0), seed: 1, ..Disturbance::default() },
        ..Options::default()
    };
    let start = Instant::now();
    drop(prepare(&case.program, &case.topology, &case.costs, &options).unwrap());
    println!("prepared in {:.4} s", start.elapsed().as_secs_f64());
    for _ in 0..value("--times").unwrap_or(1.0) as usize {
        let start = Instant::now();
        let simulation = simulate(&case.program, &case.topology, &case.costs, &options).unwrap();
        let seconds = start.elapsed().as_secs_f64();
        let simulated: usize = simulation.simulated_ranks;
        println!(
            "step {:.6} s, {simulated} ranks simulated, {} events, {seconds:.4} s, {:.2} M events/s",
            simulation.step.0 as f64 / 1e12,
            simulation.events,
            simulation.events as f64 / seconds / 1e6
        );
    }
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    println!("{}", status.lines().find(|line| line.starts_with("VmHWM")).unwrap_or_default());
}
