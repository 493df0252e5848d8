//! Times all-reduces of two processes over shared memory, for `benches/pytorch.py`: prints the
//! seconds of each as JSON, by bytes.
//!
//! `cargo run --release -p foretell-executor --example all_reduce -- REPEATS BYTES...`

use std::collections::BTreeMap;
use std::error::Error;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use foretell_executor::machine;
use foretell_executor::transport::{Group, Segment, SegmentShape, SharedMemory, StreamNumber, WaitPolicy};

const RANK: &str = "FORETELL_EXAMPLE_RANK";
const RANKS: usize = 2;

fn main() -> Result<(), Box<dyn Error>> {
    match std::env::var(RANK) {
        Ok(rank) => run(rank.parse()?),
        Err(_) => launch(),
    }
}

/// Starts this program again, once a rank.
fn launch() -> Result<(), Box<dyn Error>> {
    let segment = Segment::create(&SegmentShape::new((0..RANKS).collect(), 1))?;
    let mut children = Vec::new();
    for rank in 0..RANKS {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(std::env::args_os().skip(1)).env(RANK, rank.to_string());
        segment.pass_to(&mut command);
        children.push(command.spawn()?);
    }
    for mut child in children {
        let status = child.wait()?;
        if !status.success() {
            return Err(format!("a rank ended with {status}").into());
        }
    }
    Ok(())
}

fn run(rank: usize) -> Result<(), Box<dyn Error>> {
    let numbers: Vec<usize> = std::env::args().skip(1).map(|text| text.parse()).collect::<Result<_, _>>()?;
    let (&repeats, sizes) = numbers.split_first().ok_or("say how often, and which sizes in bytes")?;
    if let Some(&core) = machine::cores().get(rank) {
        machine::pin_to_core(core)?;
    }
    let segment = Segment::from_environment()?.ok_or("ranks are started by this program itself")?;
    let patience = WaitPolicy { timeout: Duration::from_secs(60), ..WaitPolicy::default() };
    let transport = Arc::new(SharedMemory::attach(&segment, rank, RANKS, patience)?);
    let mut group = Group::new(transport, &[0, 1], StreamNumber(0))?;
    let mut result = BTreeMap::new();
    for &size in sizes {
        let mut values = vec![0.0f32; size / 4];
        // Back to back, in batches: a single one may find the peer's data there already and seem to
        // take no time.
        let batch = ((1 << 20) / size.max(1)).clamp(1, 200);
        let repeats = if size < 64 << 20 { repeats } else { repeats / 4 }.max(2);
        group.all_reduce_f32(&mut values)?;
        let mut seconds = Vec::with_capacity(repeats);
        for _ in 0..repeats {
            group.barrier()?;
            let started = Instant::now();
            for _ in 0..batch {
                group.all_reduce_f32(&mut values)?;
            }
            seconds.push(started.elapsed().as_secs_f64() / batch as f64);
        }
        result.insert(size.to_string(), seconds);
    }
    if rank == 0 {
        println!("{}", serde_json::to_string(&result)?);
    }
    Ok(())
}
