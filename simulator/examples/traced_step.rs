//! Memory and time of a traced framework's step, to compare with other traces and runs.
//!
//! After `cargo run --release -p foretell-simulator --example traced_step --`, such arguments as:
//!
//! ```text
//! architecture=llama attention=flash checkpoint=full precision=mixed adapter=none -- \
//!     fsdp1 8 f32 foreach a100-sxm-80g 32 b=1 s=4096 h=4096 n=32 k=8 d=128 f=14336 v=128256
//! ```
#![allow(clippy::unwrap_used, reason = "a tool of ours")]

use foretell_models::operator_tables::{Element, OperatorTable, TableSizes};
use foretell_program::traced::{Fsdp2Groups, Sharding, TracedJob, TracedOptimizer};
use foretell_simulator::gpu::Profiles;
use foretell_simulator::gpu::traced::{traced_memory, traced_time};
use std::sync::Arc;
use std::time::Instant;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let mut halves = arguments.split(|argument| argument == "--");
    let pairs = |words: &[String]| -> Vec<(String, String)> {
        words.iter().filter_map(|word| word.split_once('=')).map(|(name, value)| (name.into(), value.into())).collect()
    };
    let key = pairs(halves.next().unwrap());
    let key: Vec<(&str, &str)> = key.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
    let rest = halves.next().unwrap();
    let [sharding, ranks, stored, optimizer, device, layers, ..] = rest else { unreachable!("too few words") };
    let started = Instant::now();
    let table = Arc::new(OperatorTable::library(&key).unwrap().expect("a table has this key"));
    let sizes = TableSizes {
        layers: layers.parse().unwrap(),
        symbols: pairs(rest).into_iter().map(|(name, value)| (name, value.parse().unwrap())).collect(),
    };
    let sharding = match sharding.as_str() {
        "fsdp1" => Sharding::Fsdp1,
        "fsdp2" => Sharding::Fsdp2 { reduce: Element::F32, groups: Fsdp2Groups::Root },
        "ddp" => Sharding::Ddp,
        _ => Sharding::Replicated,
    };
    let stored = if stored == "f32" { Element::F32 } else { Element::Bf16 };
    let optimizer = if optimizer == "foreach" { TracedOptimizer::AdamWForeach } else { TracedOptimizer::AdamWFused };
    let job = TracedJob::new(table, sizes, ranks.parse().unwrap(), sharding, stored, optimizer);
    let memory = traced_memory(&job, None).unwrap();
    println!("{:?} {} in {} at {}", memory.allocated, memory.reserved, memory.phase, memory.operator);
    println!("{:?}", memory.contents);
    let profiles = Profiles::library().unwrap();
    let cluster = profiles.cluster(device, None, 8, job.ranks, None).unwrap();
    let time = traced_time(&job, &cluster, memory.flushes).unwrap();
    println!("{time:#?}");
    println!("{:?}", started.elapsed());
}
