//! Memory of a traced step: the allocated bytes, the bytes that the caching allocator reserves for
//! them, and the contents at the peak.

use super::allocator::{CachingAllocator, rounded};
use foretell_models::operator_tables::TableError;
use foretell_program::traced::{Contents, RankEvent, TracedJob, TracedPhase};
use foretell_units::Bytes;
use rustc_hash::FxHashMap;
use std::collections::BTreeMap;

/// Memory of a rank over its first steps.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TracedMemory {
    /// The largest number of bytes allocated at the same time.
    pub allocated: Bytes,
    /// The largest number of bytes that the allocator reserves.
    pub reserved: Bytes,
    /// The phase of the peak.
    pub phase: &'static str,
    /// The operator at the peak.
    pub operator: String,
    /// The contents of the allocated bytes at the peak.
    pub contents: BTreeMap<Contents, Bytes>,
    /// How often the allocator returns all cached memory in a step, for lack of free memory.
    pub flushes: u64,
    /// The bytes that the allocator would reserve on a device of unlimited memory.
    pub wanted: Bytes,
    /// The least bytes with which the job is known to run: usually the allocated bytes. If those
    /// would fit but fragmentation makes the job run out of memory, [`Self::wanted`].
    pub needed: Bytes,
    /// Bytes that the rank holds in its host's memory.
    pub host: Bytes,
    /// Bytes that it holds in memory that device and host share.
    pub paged: Bytes,
    /// Whether the paged memory does not fit on the device beside the allocated bytes.
    pub pages_out: bool,
    /// Whether the job runs out of device memory, even after returning all cached memory.
    pub runs_out: bool,
}

/// Number of steps after which the allocator's blocks repeat.
const STEPS: usize = 3;

/// Returns the memory of a job whose allocator may reserve `limit` bytes; without a limit, any
/// number.
///
/// # Errors
/// [`TableError`] if the table needs a size that is not given.
pub fn traced_memory(job: &TracedJob, limit: Option<Bytes>) -> Result<TracedMemory, TableError> {
    let mut allocator = CachingAllocator::limited(limit.map(Bytes::count));
    let mut live: FxHashMap<u64, (u64, Contents)> = FxHashMap::default();
    let mut now = [0_u64; Contents::ALL.len()];
    let mut at_peak = now;
    let (mut total, mut peak) = (0_u64, 0_u64);
    let (mut phase, mut operator) = (TracedPhase::Idle, "");
    let mut peak_operator = "";
    let mut memory = TracedMemory::default();
    job.emit(STEPS, |event| match event {
        RankEvent::Phase(next) => phase = next,
        RankEvent::Operator(next) => operator = &next.name,
        RankEvent::Moves { name, .. } => operator = name,
        RankEvent::Allocate { id, bytes, contents, stream } => {
            let size = rounded(bytes);
            allocator.allocate(id, bytes, stream as u32);
            live.insert(id, (size, contents));
            now[contents as usize] += size;
            total += size;
            if total > peak {
                peak = total;
                at_peak = now;
                (memory.phase, peak_operator) = (phase.name(), operator);
            }
        }
        RankEvent::Release { id } => {
            if let Some((size, contents)) = live.remove(&id) {
                now[contents as usize] -= size;
                total -= size;
                allocator.release(id);
            }
        }
        RankEvent::Becomes { id, contents } => {
            if let Some((size, before)) = live.get_mut(&id) {
                now[*before as usize] -= *size;
                now[contents as usize] += *size;
                *before = contents;
            }
        }
        RankEvent::HostMemory { bytes } => memory.host += Bytes::new(bytes),
        RankEvent::PagedMemory { bytes } => memory.paged += Bytes::new(bytes),
        RankEvent::Part { .. }
        | RankEvent::Collective { .. }
        | RankEvent::Wait(_)
        | RankEvent::Hooks { .. }
        | RankEvent::HostCopy { .. }
        | RankEvent::HostUpdate { .. } => {}
    })?;
    let held = Contents::ALL.into_iter().zip(at_peak).filter(|(_, bytes)| *bytes > 0);
    memory.contents = held.map(|(contents, bytes)| (contents, Bytes::new(bytes))).collect();
    memory.operator = peak_operator.into();
    memory.allocated = Bytes::new(peak);
    memory.reserved = Bytes::new(allocator.peak_reserved);
    memory.wanted = memory.reserved;
    memory.runs_out = allocator.runs_out;
    memory.flushes = allocator.flushes.div_ceil(STEPS as u64);
    Ok(memory)
}
