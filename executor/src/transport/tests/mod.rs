//! Tests of the transports. Ranks are threads, except in `processes`.
#![allow(clippy::unwrap_used, clippy::panic)]

mod collectives;
mod hostile;
mod middle;
mod processes;
mod relay;
mod rendezvous;
mod simulated;
mod speed;
mod waiting;

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::Duration;

use super::*;

/// A transport, or a mixture of two.
#[derive(Clone, Copy, Debug)]
enum Kind {
    SharedMemory,
    /// Shared memory whose rings are one page.
    SmallRings,
    Tcp,
    /// Ranks 0 and 1 as if on one machine, the others as if on another.
    Mixed,
}

const ALL_KINDS: [Kind; 4] = [Kind::SharedMemory, Kind::SmallRings, Kind::Tcp, Kind::Mixed];

fn local() -> SocketAddr {
    (Ipv4Addr::LOCALHOST, 0).into()
}

fn wait_policy(timeout: Duration) -> WaitPolicy {
    WaitPolicy { timeout, ..WaitPolicy::default() }
}

/// The transports of all ranks of a run, for threads of this process.
fn world(kind: Kind, size: usize) -> Vec<Arc<dyn Transport>> {
    world_with(kind, size, Duration::from_secs(20))
}

fn world_with(kind: Kind, size: usize, timeout: Duration) -> Vec<Arc<dyn Transport>> {
    match kind {
        Kind::SharedMemory => erase(shared_memory_world(&all(size), size, SegmentShape::DEFAULT_RING_BYTES, timeout)),
        Kind::SmallRings => erase(shared_memory_world(&all(size), size, 4096, timeout)),
        Kind::Tcp => erase(tcp_world(size, timeout)),
        Kind::Mixed => {
            let machines = [all(size.min(2)), (2..size).collect::<Vec<_>>()];
            let near = machines
                .iter()
                .filter(|ranks| !ranks.is_empty())
                .flat_map(|ranks| shared_memory_world(ranks, size, 1 << 16, timeout));
            erase(near.zip(tcp_world(size, timeout)).map(|(near, far)| Mixed::new(near, far).unwrap()).collect())
        }
    }
}

fn all(size: usize) -> Vec<usize> {
    (0..size).collect()
}

fn erase<T: Transport + 'static>(transports: Vec<T>) -> Vec<Arc<dyn Transport>> {
    transports.into_iter().map(|transport| Arc::new(transport) as Arc<dyn Transport>).collect()
}

fn shared_memory_world(ranks: &[usize], world_size: usize, ring_bytes: usize, timeout: Duration) -> Vec<SharedMemory> {
    let segment = Segment::create(&SegmentShape { ranks: ranks.to_vec(), streams: 4, ring_bytes }).unwrap();
    ranks.iter().map(|rank| SharedMemory::attach(&segment, *rank, world_size, wait_policy(timeout)).unwrap()).collect()
}

fn tcp_world(size: usize, timeout: Duration) -> Vec<Tcp> {
    let key = RunKey::generate().unwrap();
    let listeners: Vec<TcpListener> = (0..size).map(|_| TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap()).collect();
    let addresses: Vec<_> = listeners.iter().map(|listener| listener.local_addr().unwrap()).collect();
    let options = TcpOptions { connect_timeout: timeout, wait_policy: wait_policy(timeout) };
    let start = |(rank, listener)| Tcp::new(rank, listener, addresses.clone(), key.clone(), options).unwrap();
    listeners.into_iter().enumerate().map(start).collect()
}

/// Runs `work` once per rank, each on a thread of its own. Returns the results by rank.
fn on_every_rank<R: Send>(transports: &[Arc<dyn Transport>], work: impl Fn(Arc<dyn Transport>) -> R + Sync) -> Vec<R> {
    let work = &work;
    std::thread::scope(|scope| {
        let threads: Vec<_> = transports.iter().map(|transport| scope.spawn(move || work(Arc::clone(transport)))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Numbers that differ by rank and index. They are small integers, so their sums are exact in any
/// order.
fn whole_numbers(rank: usize, length: usize) -> Vec<f32> {
    (0..length).map(|index| ((index * 7 + rank * 131) % 1009) as f32 - 500.0).collect()
}

/// Numbers whose sums depend on the order of summation.
fn uneven_numbers(rank: usize, length: usize) -> Vec<f32> {
    (0..length).map(|index| ((index * 31 + rank * 17) as f32 * 0.37).sin() * 10f32.powi((index % 13) as i32 - 6)).collect()
}

fn some_bytes(rank: usize, length: usize) -> Vec<u8> {
    (0..length).map(|index| (index * 13 + rank * 101 + index / 251) as u8).collect()
}
