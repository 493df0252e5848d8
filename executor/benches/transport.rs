//! Times all-reduces and messages between processes, over shared memory and over TCP.
//!
//! `cargo bench -p foretell-executor --bench transport`. The environment variables `RANKS` (2) and
//! `RING_BYTES` set the number of processes and the size of the rings in shared memory.

use std::error::Error;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::process::{Child, Command};
use std::sync::Arc;
use std::time::{Duration, Instant};

use foretell_executor::transport::{
    Announcement, ControlClient, ControlServer, Group, RunKey, Segment, SegmentShape, SharedMemory, StreamNumber, Tcp,
    TcpOptions, Transport, TransportError, WaitPolicy,
};

/// Set in the processes that this program starts: their rank.
const RANK: &str = "FORETELL_BENCH_RANK";
/// Set as well for a benchmark of TCP: the address of the control server.
const SERVER: &str = "FORETELL_BENCH_SERVER";
const JOIN_TIMEOUT: Duration = Duration::from_secs(30);

fn main() -> Result<(), Box<dyn Error>> {
    let world_size = number("RANKS")?.unwrap_or(2);
    match number(RANK)? {
        Some(rank) => Ok(run_rank(rank, world_size)?),
        None => launch(world_size),
    }
}

fn number(name: &str) -> Result<Option<usize>, std::num::ParseIntError> {
    std::env::var(name).ok().map(|text| text.parse()).transpose()
}

/// Starts this program once per rank, for each transport in turn.
fn launch(world_size: usize) -> Result<(), Box<dyn Error>> {
    let ring_bytes = number("RING_BYTES")?.unwrap_or(SegmentShape::DEFAULT_RING_BYTES);
    let segment = Segment::create(&SegmentShape { ranks: (0..world_size).collect(), streams: 2, ring_bytes })?;
    println!("{world_size} processes, shared memory, rings of {ring_bytes} bytes");
    wait_for_all(start(world_size, |command| segment.pass_to(command))?)?;
    println!("{world_size} processes, TCP over the loopback interface");
    let key = RunKey::generate()?;
    let server = ControlServer::bind((Ipv4Addr::LOCALHOST, 0).into(), &key, world_size)?;
    let children = start(world_size, |command| {
        key.pass_to(command);
        command.env(SERVER, server.address().to_string());
    })?;
    server.wait_for_ranks(JOIN_TIMEOUT)?;
    wait_for_all(children)
}

fn start(world_size: usize, prepare: impl Fn(&mut Command)) -> std::io::Result<Vec<Child>> {
    let child = |rank: usize| {
        let mut command = Command::new(std::env::current_exe()?);
        command.env(RANK, rank.to_string());
        prepare(&mut command);
        command.spawn()
    };
    (0..world_size).map(child).collect()
}

fn wait_for_all(children: Vec<Child>) -> Result<(), Box<dyn Error>> {
    for (rank, mut child) in children.into_iter().enumerate() {
        let status = child.wait()?;
        if !status.success() {
            return Err(format!("rank {rank} ended with {status}").into());
        }
    }
    Ok(())
}

fn run_rank(rank: usize, world_size: usize) -> Result<(), Box<dyn Error>> {
    if let Some(segment) = Segment::from_environment()? {
        let transport = SharedMemory::attach(&segment, rank, world_size, WaitPolicy::default())?;
        return Ok(benchmark(&(Arc::new(transport) as Arc<dyn Transport>))?);
    }
    let server: SocketAddr = std::env::var(SERVER)?.parse()?;
    let key = RunKey::from_environment()?;
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let announcement = Announcement { address: Some(listener.local_addr()?), machine: "here".into() };
    let (_client, table) = ControlClient::join(server, &key, rank, &announcement, JOIN_TIMEOUT)?;
    let addresses = table.addresses().map_err(|rank| TransportError::PeerLost { rank })?;
    let transport = Tcp::new(rank, listener, addresses, key, TcpOptions::default())?;
    Ok(benchmark(&(Arc::new(transport) as Arc<dyn Transport>))?)
}

/// The work of each rank. Rank 0 prints the times.
fn benchmark(transport: &Arc<dyn Transport>) -> Result<(), TransportError> {
    let rank = transport.rank();
    let members: Vec<usize> = (0..transport.world_size()).collect();
    let mut group = Group::new(Arc::clone(transport), &members, StreamNumber(0))?;
    if rank == 0 {
        println!("{:>12}  {:>12}  {:>10}  {:>10}  all-reduce", "bytes", "least us", "mean us", "GB/s");
    }
    for kibibytes in [0, 1, 4, 8, 16, 64, 256, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10] {
        let bytes = (kibibytes << 10).max(4);
        let mut values = vec![0.0f32; bytes / 4];
        group.all_reduce_f32(&mut values)?;
        // Several in a row: a single one may find its peer's data there already and seem to take no
        // time.
        let batch = ((1 << 20) / bytes).clamp(1, 200);
        let mut times = Vec::new();
        for _ in 0..((400 << 20) / bytes).clamp(4, 100) {
            group.barrier()?;
            let started = Instant::now();
            for _ in 0..batch {
                group.all_reduce_f32(&mut values)?;
            }
            times.push(started.elapsed() / batch as u32);
        }
        report(rank, bytes, &times);
    }
    if rank == 0 {
        println!("{:>12}  {:>12}  {:>10}  {:>10}  one message, half of a round trip", "bytes", "least us", "mean us", "GB/s");
    }
    if rank < 2 && members.len() > 1 {
        let mut channel = transport.open(1 - rank, StreamNumber(1))?;
        for bytes in [4, 1 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20] {
            let mut buffer = vec![1; bytes];
            let mut times = Vec::new();
            for _ in 0..((100 << 20) / bytes).clamp(4, 3000) {
                let started = Instant::now();
                if rank == 0 {
                    channel.send(&buffer)?;
                    channel.receive(&mut buffer)?;
                } else {
                    channel.receive(&mut buffer)?;
                    channel.send(&buffer)?;
                }
                times.push(started.elapsed() / 2);
            }
            report(rank, bytes, &times);
        }
    }
    group.barrier()
}

fn report(rank: usize, bytes: usize, times: &[Duration]) {
    if rank == 0 {
        let least = times.iter().min().map_or(0.0, Duration::as_secs_f64);
        let mean = times.iter().sum::<Duration>().as_secs_f64() / times.len() as f64;
        println!("{bytes:>12}  {:>12.2}  {:>10.2}  {:>10.2}", least * 1e6, mean * 1e6, bytes as f64 / least / 1e9);
    }
}
