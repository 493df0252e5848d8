//! The event loop of a simulation allocates no memory. A run allocates only its initial state,
//! whatever the Program's length.
#![allow(clippy::unwrap_used)]

mod common;

use common::*;
use foretell_program::{Axis, Collective, Group, Program};
use foretell_simulator::{Collectives, Options, Quantile, Recording, prepare};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

/// The system's allocator, with a count of allocations per thread.
struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: every call is forwarded unchanged to the system's allocator. The thread-local cell has a
// constant initialiser, so its access allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.with(|count| count.set(count.get() + 1));
        // SAFETY: the caller upholds the contract of `System`, which is the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        ALLOCATIONS.with(|count| count.set(count.get() + 1));
        // SAFETY: as above.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Two stages with kernels, overlapping collectives, and messages to each other.
fn training(micro_batches: usize) -> Program {
    let (mut first, mut second) = (StageBuilder::new(0), StageBuilder::new(1));
    for _ in 0..micro_batches {
        let mut last = Vec::new();
        for size in [10_000, 20_000, 30_000] {
            let kernel = first.compute(size, &last);
            first.compute(size, &[]);
            last = vec![first.collective(Collective::AllReduce, Group::along(Axis::Tensor), 40_000, &[kernel])];
            first.collective(Collective::AllReduce, Group::along(Axis::Data), 400_000, &[kernel]);
        }
        first.send(1, 40_000, &last);
        let receive = second.receive(0, 40_000, &[]);
        let kernel = second.compute(100_000, &[receive]);
        second.collective(Collective::ReduceScatter, Group::along(Axis::Data), 400_000, &[kernel]);
        second.send(0, 40_000, &[kernel]);
        let receive = first.receive(1, 40_000, &[]);
        first.compute(1000, &[receive]);
    }
    program(4, 2, vec![first.done(), second.done()])
}

#[test]
fn a_run_allocates_no_more_for_a_longer_program() {
    let topology = cluster(4, 4, "nvswitch-1GB/s");
    for share in [0.0, 0.3] {
        let mut costs = ideal(&topology);
        costs.parameters_mut(0).communication_share = share;
        for collectives in [Collectives::Flow, Collectives::Steps] {
            let run = |micro_batches: usize| {
                let program = training(micro_batches);
                let options = Options { collectives, ..Options::default() };
                let prepared = prepare(&program, &topology, &costs, &options).unwrap();
                let before = ALLOCATIONS.with(Cell::get);
                let simulation = prepared.simulate(Quantile::Median, Recording::Ends).unwrap();
                (ALLOCATIONS.with(Cell::get) - before, simulation.events)
            };
            let (few, events) = run(10);
            let (many, more_events) = run(100);
            assert!(more_events > 9 * events, "{events} {more_events}");
            // The event queue has a list per bit of the time, and these may grow a few more times.
            assert!(many <= few + 64, "share {share}, {collectives:?}: {few} for {events} events, {many} for {more_events}");
        }
    }
}
