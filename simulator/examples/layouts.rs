//! Prints the duration of each part of a prediction, for layouts that a planner tries. The parts
//! compile, prepare, simulate and predict a step of GPT-175B on 1,024 GPUs, on one core.
//!
//! `MIMALLOC_PURGE_DELAY=-1 cargo run --release -p foretell-simulator --example layouts [-- --times
//! N] [--only PART_OF_A_NAME] [--stack STACK]`
#![allow(clippy::unwrap_used)]

use foretell_models::Model;
use foretell_program::{Plan, compile_training};
use foretell_simulator::{CostModel, Folding, Options, Quantile, Recording, predict_with, prepare};
use foretell_topologies::Topology;
use std::time::Instant;

const MODEL: &str = r#"{"family": "gpt", "layers": 96, "hidden": 12288, "heads": 96, "vocab": 51200, "sequence": 2048}"#;

/// Layouts of 1,536 sequences on 1,024 GPUs, and one layout on about 10,000 GPUs. Each has a name
/// and the JSON of its layout.
const LAYOUTS: [(&str, &str); 7] = [
    ("8x8x16, 96 of 1, 1f1b", r#""data": 16, "tensor": 8, "pipeline": 8, "micro_batch": 1"#),
    ("8x16x8, 64 of 3, 1f1b", r#""data": 8, "tensor": 8, "pipeline": 16, "micro_batch": 3"#),
    (
        "8x8x16, 48 of 2, interleaved 2",
        r#""data": 16, "tensor": 8, "pipeline": 8, "micro_batch": 2, "schedule": "interleaved", "virtual_stages": 2"#,
    ),
    (
        "8x8x16, 96 of 1, interleaved 12",
        r#""data": 16, "tensor": 8, "pipeline": 8, "micro_batch": 1, "schedule": "interleaved", "virtual_stages": 12"#,
    ),
    ("8x8x16, 48 of 2, zb-h1", r#""data": 16, "tensor": 8, "pipeline": 8, "micro_batch": 2, "schedule": "zb-h1""#),
    ("4x16x16, 32 of 3, full recomputation", r#""data": 16, "tensor": 4, "pipeline": 16, "micro_batch": 3, "recompute": "full""#),
    ("8x16x78 on 10,000 GPUs, 32 of 1, 1f1b", r#""data": 78, "tensor": 8, "pipeline": 16, "micro_batch": 1"#),
];

/// The allocator of the `foretell` program. With `MIMALLOC_PURGE_DELAY=-1` it keeps freed memory,
/// as the program does.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let value = |name: &str| arguments.iter().position(|argument| argument == name).map(|at| arguments[at + 1].clone());
    let times: usize = value("--times").map_or(3, |text| text.parse().unwrap());
    let only = value("--only").unwrap_or_default();
    let stack = value("--stack").unwrap_or("megatron-core".into());
    let model: Model = serde_json::from_str(MODEL).unwrap();
    for (name, layout) in LAYOUTS.iter().filter(|(name, _)| name.contains(&only)) {
        let (nodes, batch) = if name.contains("10,000") { (1250, 78 * 32) } else { (128, 1536) };
        let topology = Topology::library("dgx-h100").unwrap().with_nodes(nodes).unwrap();
        let text = format!(
            r#"{{"global_batch": {batch}, "precision": "bf16", "optimizer": "adam", "stack": "{stack}", "layout": {{{layout}, "zero": 1, "sequence_parallel": true}}}}"#
        );
        let plan: Plan = serde_json::from_str(&text).unwrap();
        let costs = CostModel::new(None, &topology).with_stack(&topology, plan.stack.name(), plan.unstated_format()).unwrap();
        let options = Options { folding: Folding::On, recording: Recording::Ends, ..Options::default() };
        let mut least = [f64::INFINITY; 5];
        let mut summary = String::new();
        for _ in 0..times {
            let mut start = Instant::now();
            let mut lap = |part: usize| {
                least[part] = least[part].min(start.elapsed().as_secs_f64() * 1e3);
                start = Instant::now();
            };
            let program = compile_training(&model, "gpt", &plan).unwrap();
            lap(0);
            let prepared = prepare(&program, &topology, &costs, &options).unwrap();
            lap(1);
            let simulation = prepared.simulate(Quantile::Median, Recording::Ends).unwrap();
            lap(2);
            drop(prepared);
            let _ = start;
            let start = Instant::now();
            let (prediction, _) = predict_with(&program, &topology, &costs, &options).unwrap();
            least[3] = least[3].min(start.elapsed().as_secs_f64() * 1e3);
            let instructions: usize = program.lists.iter().map(|list| list.instructions.len()).sum();
            summary = format!(
                "step {:.6} s, {} lists of {instructions} instructions, {} ranks, {} events",
                prediction.step_seconds.value(),
                program.lists.len(),
                simulation.simulated_ranks,
                simulation.events
            );
            let start = Instant::now();
            drop(program);
            least[4] = least[4].min(start.elapsed().as_secs_f64() * 1e3);
        }
        let [compiled, ready, run, predicted, dropped] = least;
        println!(
            "{name}: compiled in {compiled:.1} ms, prepared in {ready:.1}, simulated in {run:.1}, predicted in {predicted:.1}, dropped in {dropped:.1}; {summary}"
        );
    }
}
