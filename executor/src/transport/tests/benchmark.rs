//! Figures of the transports between two processes; run by hand, in release mode:
//! `cargo test --release -p foretell-executor benchmark -- --ignored --nocapture --test-threads=1`.

use std::process::{Child, Stdio};
use std::time::Instant;

use super::*;

/// What each rank of the benchmark does; rank 0 prints.
pub(super) fn rank(transport: Arc<dyn Transport>, world_size: usize) {
    let rank = transport.rank();
    let mut group = Group::new(Arc::clone(&transport), &all(world_size), StreamNumber(0)).unwrap();
    if rank == 0 {
        eprintln!("{:>12}  {:>12}  {:>10}  {:>10}", "bytes", "least us", "mean us", "GB/s");
    }
    for bytes in
        [4, 64, 1 << 10, 4 << 10, 8 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20]
    {
        let mut values = vec![1.0f32; bytes / 4];
        group.all_reduce_f32(&mut values).unwrap();
        assert!(values.iter().all(|value| *value == world_size as f32));
        // Back to back, in batches: a single one may find the peer's data there already and seem to take no time.
        values.fill(0.0);
        let batch = ((1 << 20) / bytes).clamp(1, 200);
        let times: Vec<Duration> = (0..((400 << 20) / bytes).clamp(4, 100))
            .map(|_| {
                group.barrier().unwrap();
                let started = Instant::now();
                (0..batch).for_each(|_| group.all_reduce_f32(&mut values).unwrap());
                started.elapsed() / batch as u32
            })
            .collect();
        report(rank, bytes, &times);
    }
    if rank == 0 {
        eprintln!("one way, in pairs there and back:");
    }
    if rank < 2 {
        let mut channel = transport.open(1 - rank, StreamNumber(1)).unwrap();
        for bytes in [4, 1 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20] {
            let mut buffer = vec![1; bytes];
            let mut times = Vec::new();
            for _ in 0..(100 << 20 >> (bytes as f64).log2() as u32).clamp(4, 3000) {
                let started = Instant::now();
                if rank == 0 {
                    channel.send(&buffer).unwrap();
                    channel.receive(&mut buffer).unwrap();
                } else {
                    channel.receive(&mut buffer).unwrap();
                    channel.send(&buffer).unwrap();
                }
                times.push(started.elapsed() / 2);
            }
            report(rank, bytes, &times);
        }
    }
}

fn report(rank: usize, bytes: usize, times: &[Duration]) {
    if rank == 0 {
        let least = times.iter().min().unwrap().as_secs_f64();
        let mean = times.iter().sum::<Duration>().as_secs_f64() / times.len() as f64;
        eprintln!("{bytes:>12}  {:>12.2}  {:>10.2}  {:>10.2}", least * 1e6, mean * 1e6, bytes as f64 / least / 1e9);
    }
}

fn show(children: Vec<Child>) {
    for mut child in children {
        assert!(child.wait().unwrap().success());
    }
}

#[test]
#[ignore = "prints figures"]
fn benchmark_shared_memory() {
    let number = |name: &str, default| std::env::var(name).map_or(default, |text| text.parse::<usize>().unwrap());
    let (ranks, ring_bytes) = (number("RANKS", 2), number("RING_BYTES", SegmentShape::DEFAULT_RING_BYTES));
    let segment = Segment::create(&SegmentShape { ranks: all(ranks), streams: 2, ring_bytes }).unwrap();
    eprintln!("{ranks} processes, shared memory, rings of {ring_bytes} bytes: all-reduce");
    show(processes::start("benchmark in shared memory", ranks, |command| {
        segment.pass_to(command);
        command.stderr(Stdio::inherit());
    }));
}

#[test]
#[ignore = "prints figures"]
fn benchmark_tcp() {
    eprintln!("2 processes, TCP over loopback: all-reduce");
    show(processes::with_server("benchmark over tcp", 2).0);
}
