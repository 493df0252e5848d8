//! Prints the number of instructions per second that the simulator interprets: `cargo run --release
//! -p foretell-simulator --example throughput`.
#![allow(clippy::unwrap_used)]

#[path = "../tests/common/mod.rs"]
mod common;

use common::*;
use foretell_program::{Axis, Collective, Group, Program};
use foretell_simulator::{Folding, Options, Oversubscription, predict, simulate};
use std::time::Instant;

/// Returns a network of `layers` layers, forward and backward. Its gradients are reduced in buckets
/// during the backward pass.
fn training(data: usize, tensor: usize, layers: usize, micro_batches: usize) -> Program {
    let mut stage = StageBuilder::new(0);
    let mut last = Vec::new();
    for micro_batch in 0..micro_batches {
        for layer in 0..layers {
            let forward = stage.compute(10_000 + 100 * layer, &std::mem::take(&mut last));
            if tensor > 1 && layer % 4 == 3 {
                last.push(stage.collective(Collective::AllReduce, Group::along(Axis::Tensor), 40_000, &[forward]));
            }
        }
        for layer in (0..layers).rev() {
            let backward = stage.compute(20_000 + 200 * layer, &std::mem::take(&mut last));
            if micro_batch + 1 == micro_batches && layer % 16 == 0 {
                stage.collective(Collective::AllReduce, Group::along(Axis::Data), 4_000_000, &[backward]);
            }
        }
    }
    program(data, tensor, vec![stage.done()])
}

/// Returns a pipeline of two stages.
fn pipeline(data: usize, layers: usize, micro_batches: usize) -> Program {
    let (mut first, mut second) = (StageBuilder::new(0), StageBuilder::new(1));
    for _ in 0..micro_batches {
        let mut last = None;
        for layer in 0..layers {
            last = Some(first.compute(10_000 + 100 * layer, &[]));
        }
        first.send(1, 40_000, last.as_slice());
        let receive = second.receive(0, 40_000, &[]);
        second.compute(1000, &[receive]);
        for layer in 0..layers {
            last = Some(second.compute(10_000 + 100 * layer, &[]));
        }
        second.send(0, 40_000, last.as_slice());
    }
    for _ in 0..micro_batches {
        let receive = first.receive(1, 40_000, &[]);
        first.compute(1000, &[receive]);
    }
    program(data, 1, vec![first.done(), second.done()])
}

fn main() {
    let topology = node(8);
    for (name, program) in [
        ("data 8, 1 micro-batch", training(8, 1, 250, 1)),
        ("data 8, 8 micro-batches", training(8, 1, 250, 8)),
        ("data 2, tensor 4, 8 micro-batches", training(2, 4, 250, 8)),
        ("data 4, pipeline 2, 8 micro-batches", pipeline(4, 250, 8)),
    ] {
        for share in [0.0, 0.5, 1.0] {
            let mut costs = ideal(&topology);
            costs.parameters_mut(0).communication_share = share;
            let stages = program.lists.len();
            let instructions: usize = program.lists.iter().map(|stage| stage.instructions.len() * 8 / stages).sum();
            let runs = 1 + 2_000_000 / instructions;
            let start = Instant::now();
            let mut events = 0;
            for _ in 0..runs {
                events += simulate(&program, &topology, &costs, &Options::default()).unwrap().events;
            }
            let seconds = start.elapsed().as_secs_f64();
            let start = Instant::now();
            predict(&program, &topology, &costs, Oversubscription::Refused, Folding::On).unwrap();
            let predicted = start.elapsed().as_secs_f64();
            println!(
                "{name:36} share {share:3}: {:6.2} M instructions/s, {:6.2} M events/s, {:7.3} ms a simulation, {:7.3} ms a prediction",
                (instructions * runs) as f64 / seconds / 1e6,
                events as f64 / seconds / 1e6,
                seconds / runs as f64 * 1e3,
                predicted * 1e3,
            );
        }
    }
}
