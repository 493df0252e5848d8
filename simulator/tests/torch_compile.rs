//! Steps under `torch.compile`, and optimizers that run in the backward pass or page their states.
#![allow(clippy::unwrap_used)]

use foretell_models::operator_tables::{Element, OperatorTable, StepEvent, TableSizes};
use foretell_program::traced::{Sharding, TracedJob, TracedOptimizer};
use foretell_simulator::gpu::Profiles;
use foretell_simulator::gpu::traced::{TracedTime, traced_memory, traced_time};
use foretell_units::Bytes;
use std::collections::HashMap;
use std::sync::Arc;

fn table(key: &[(&str, &str)]) -> Arc<OperatorTable> {
    Arc::new(OperatorTable::library(key).unwrap().unwrap())
}

fn sizes(layers: usize, symbols: &[(&str, usize)]) -> TableSizes {
    let empty = TableSizes { layers, ..TableSizes::default() };
    symbols.iter().fold(empty, |sizes, &(symbol, size)| sizes.with(symbol, size))
}

/// The most bytes that a step has beside its parameters, in blocks of 512.
fn peak(table: &OperatorTable, sizes: &TableSizes) -> u64 {
    let (mut live, mut now, mut peak) = (HashMap::new(), 0, 0);
    let expanded = table.expand(sizes, |event| match event {
        StepEvent::Allocate { id, bytes } => {
            let bytes = bytes.next_multiple_of(512);
            live.insert(id, bytes);
            now += bytes;
            peak = peak.max(now);
        }
        StepEvent::Release { id } => now -= live.remove(&id).unwrap(),
        StepEvent::Workspace { bytes } => peak = peak.max(now + bytes),
        _ => {}
    });
    expanded.unwrap();
    peak
}

/// A trace at these sizes on 29 November 2026 (torch 2.15), not the trace that the table was made
/// of.
#[test]
fn compiled_steps_allocate_what_a_fresh_trace_does() {
    let nanogpt = table(&[("framework", "nanogpt"), ("compiled", "inductor")]);
    let gpt2 = sizes(12, &[("b", 12), ("s", 1024), ("p", 1024), ("h", 768), ("n", 12), ("d", 64), ("f", 3072), ("v", 50304)]);
    assert_eq!(peak(&nanogpt, &gpt2), 7_872_796_160);
    let TracedJob { table, sizes, .. } = torchtune("inductor", "full");
    assert_eq!(peak(&table, &sizes), 16_094_143_488);
}

const LLAMA_3_8B: [(&str, usize); 8] =
    [("b", 2), ("s", 2048), ("h", 4096), ("n", 32), ("k", 8), ("d", 128), ("f", 14336), ("v", 128_256)];

fn torchtune(compiled: &str, checkpoint: &str) -> TracedJob {
    let table = table(&[
        ("framework", "torchtune"),
        ("precision", "bf16"),
        ("adapter", "none"),
        ("loss", "model"),
        ("checkpoint", checkpoint),
        ("compiled", compiled),
    ]);
    let sizes = sizes(32, &LLAMA_3_8B);
    TracedJob::new(table, sizes, 1, Sharding::Replicated, Element::Bf16, TracedOptimizer::AdamWFused)
}

fn time(job: &TracedJob) -> TracedTime {
    let cluster = Profiles::library().unwrap().cluster("a100-sxm-80g", None, 8, 1, None).unwrap();
    traced_time(job, &cluster, 0).unwrap()
}

#[test]
fn a_compiled_step_has_fewer_kernels_moves_less_and_keeps_less() {
    let (eager, compiled) = (torchtune("none", "none"), torchtune("inductor", "none"));
    let (slow, fast) = (time(&eager), time(&compiled));
    assert!(fast.launches * 3 < slow.launches * 2, "{} beside {}", fast.launches, slow.launches);
    assert!(fast.memory_bound.value() < 0.7 * slow.memory_bound.value(), "{} beside {}", fast.memory_bound, slow.memory_bound);
    // The products are the same.
    assert!((fast.arithmetic / slow.arithmetic - 1.0).abs() < 0.02, "{} beside {}", fast.arithmetic, slow.arithmetic);
    let kept = |job| traced_memory(job, None).unwrap().allocated;
    assert!(kept(&compiled) < kept(&eager), "{} beside {}", kept(&compiled), kept(&eager));
}

#[test]
fn generated_code_launches_faster_than_eager_python() {
    let tiny = |compiled| {
        let job = torchtune(compiled, "none");
        time(&TracedJob { sizes: job.sizes.clone().with("s", 16).with("b", 1), ..job })
    };
    let (eager, compiled) = (tiny("none"), tiny("inductor"));
    // Reading the weights takes most of either.
    assert!(compiled.step.value() < 0.97 * eager.step.value(), "{} beside {}", compiled.step, eager.step);
}

/// Gradients of 8 billion parameters in sixteen bits are 16 GB; in the backward pass few live at
/// once.
#[test]
fn updates_in_the_backward_pass_drop_gradients() {
    let usual = TracedJob { optimizer: TracedOptimizer::AdamWEightBits, ..torchtune("inductor", "full") };
    let early = TracedJob { updates_in_backward: true, ..usual.clone() };
    let [whole, dropped] = [&usual, &early].map(|job| traced_memory(job, None).unwrap().allocated.value());
    assert!(whole - dropped > 10e9, "{whole} beside {dropped}");
    assert_eq!(time(&usual).forward_flops, time(&early).forward_flops);
}

#[test]
fn paged_states_leave_the_allocator_and_travel_only_without_room() {
    let usual = TracedJob { optimizer: TracedOptimizer::AdamWEightBits, ..torchtune("inductor", "full") };
    let paged = TracedJob { optimizer: TracedOptimizer::AdamWPaged, ..usual.clone() };
    let (whole, apart) = (traced_memory(&usual, None).unwrap(), traced_memory(&paged, None).unwrap());
    assert!(apart.paged > Bytes::new(15_000_000_000), "{}", apart.paged);
    let moved = whole.allocated.value() - apart.allocated.value();
    assert!((moved / apart.paged.value() - 1.0).abs() < 0.01, "{moved} beside {}", apart.paged);
    assert_eq!(time(&usual).step, time(&paged).step);
    let travels = time(&TracedJob { pages_out: true, ..paged.clone() });
    assert!(travels.step > time(&paged).step, "{}", travels.step);
}

#[test]
fn adafactor_has_hardly_any_states_and_passing_copies_of_a_parameter() {
    let adam = torchtune("inductor", "full");
    let adafactor = TracedJob { optimizer: TracedOptimizer::Adafactor, ..adam.clone() };
    let [two, none] = [&adam, &adafactor].map(|job| traced_memory(job, None).unwrap().allocated.value());
    // Two moments in sixteen bits, less four copies of the largest parameter in single precision.
    let largest = 16.0 * 4096.0 * 128_256.0;
    assert!((two - none - (32.1e9 - largest)).abs() < 2e9, "{two} beside {none}");
}
