//! Benchmark of the duration of simulations on one core: `cargo bench -p foretell-simulator --bench
//! speed`.
//!
//! - "whole" prepares a Program and simulates it once.
//! - "run" simulates a prepared Program once.
//! - "predict" prepares a Program once and simulates it at the median, the 10th and the 90th
//!   percentile.
//!
//! No case includes compilation, and none records spans. The cases are in `cases/mod.rs`. Cases too
//! large for a benchmark are in `examples/scale.rs`.
#![allow(clippy::unwrap_used, missing_docs)]

mod cases;

use cases::{Case, all_reduce, gpt_175b, small_transformer};
use criterion::{Criterion, criterion_group, criterion_main};
use foretell_simulator::{Collectives, Folding, Options, Quantile, Recording, predict_with, prepare, simulate};
use std::time::Duration;

fn whole(criterion: &mut Criterion, name: &str, case: &Case, options: &Options) {
    let run = || simulate(&case.program, &case.topology, &case.costs, options).unwrap();
    let simulation = run();
    println!("{name}: {} of {} ranks, {} events", simulation.simulated_ranks, case.ranks(), simulation.events);
    criterion.bench_function(&format!("{name}/whole"), |bencher| bencher.iter(run));
}

fn alone(criterion: &mut Criterion, name: &str, case: &Case, options: &Options) {
    let prepared = prepare(&case.program, &case.topology, &case.costs, options).unwrap();
    let run = || prepared.simulate(Quantile::Median, Recording::Ends).unwrap();
    criterion.bench_function(&format!("{name}/run"), |bencher| bencher.iter(run));
}

fn options(folding: Folding, collectives: Collectives) -> Options {
    Options { folding, collectives, recording: Recording::Ends, ..Options::default() }
}

fn speed(criterion: &mut Criterion) {
    let ring = all_reduce(1024);
    let stepped = options(Folding::Off, Collectives::Steps);
    whole(criterion, "ring all-reduce, 1,024 ranks, step by step", &ring, &stepped);
    let folded = options(Folding::On, Collectives::Steps);
    whole(criterion, "ring all-reduce, 1,024 ranks, step by step, folded", &ring, &folded);
    alone(criterion, "ring all-reduce, 1,024 ranks, step by step, folded", &ring, &folded);
    let small = small_transformer();
    whole(criterion, "small transformer, 256 ranks", &small, &options(Folding::Off, Collectives::Flow));
    let large = gpt_175b();
    let folded = options(Folding::On, Collectives::Flow);
    whole(criterion, "GPT-175B, 1,024 GPUs, folded", &large, &folded);
    alone(criterion, "GPT-175B, 1,024 GPUs, folded", &large, &folded);
    let predict = || predict_with(&large.program, &large.topology, &large.costs, &folded).unwrap();
    criterion.bench_function("GPT-175B, 1,024 GPUs, folded/predict", |bencher| bencher.iter(predict));
}

fn configuration() -> Criterion {
    Criterion::default().sample_size(10).warm_up_time(Duration::from_millis(500)).measurement_time(Duration::from_secs(3))
}

criterion_group! {name = benches; config = configuration(); targets = speed}
criterion_main!(benches);
