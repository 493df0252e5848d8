//! Memory of a traced step: what is allocated, what the caching allocator holds for it, and what
//! lives at the peak.

use super::allocator::{CachingAllocator, rounded};
use foretell_models::operator_tables::TableError;
use foretell_program::traced::{Contents, RankEvent, TracedJob, TracedPhase};
use foretell_units::Bytes;
use std::collections::{BTreeMap, HashMap};

/// Memory of a rank over its first steps.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TracedMemory {
    /// The most bytes that are allocated at once.
    pub allocated: Bytes,
    /// The most bytes that the allocator holds.
    pub reserved: Bytes,
    /// The phase in which most is allocated.
    pub phase: &'static str,
    /// The operator at which most is allocated.
    pub operator: String,
    /// What the allocated bytes hold at that point.
    pub contents: BTreeMap<Contents, Bytes>,
    /// How often a step returned all cached memory for lack of more.
    pub flushes: u64,
}

/// Steps until the allocator's blocks repeat.
const STEPS: usize = 3;

/// The memory of a job whose device has `limit` bytes for the allocator; without one it has any
/// number.
///
/// # Errors
/// [`TableError`] if the table needs a size that is not given.
pub fn traced_memory(job: &TracedJob<'_>, limit: Option<Bytes>) -> Result<TracedMemory, TableError> {
    let mut allocator = CachingAllocator::limited(limit.map(Bytes::count));
    let mut live: HashMap<u64, (u64, Contents)> = HashMap::new();
    let mut now: BTreeMap<Contents, u64> = BTreeMap::new();
    let (mut total, mut peak) = (0_u64, 0_u64);
    let (mut phase, mut operator) = (TracedPhase::Idle, "");
    let mut memory = TracedMemory::default();
    job.emit(STEPS, |event| match event {
        RankEvent::Phase(next) => phase = next,
        RankEvent::Operator(next) => operator = &next.name,
        RankEvent::Moves { name, .. } => operator = name,
        RankEvent::Allocate { id, bytes, contents, stream } => {
            let size = rounded(bytes);
            allocator.allocate(id, bytes, stream as u32);
            live.insert(id, (size, contents));
            *now.entry(contents).or_default() += size;
            total += size;
            if total > peak {
                peak = total;
                memory.phase = phase.name();
                memory.operator.clear();
                memory.operator.push_str(operator);
                memory.contents = now.iter().map(|(contents, bytes)| (*contents, Bytes::new(*bytes))).collect();
            }
        }
        RankEvent::Release { id } => {
            if let Some((size, contents)) = live.remove(&id) {
                *now.entry(contents).or_default() -= size;
                total -= size;
                allocator.release(id);
            }
        }
        RankEvent::Becomes { id, contents } => {
            if let Some((size, before)) = live.get_mut(&id) {
                *now.entry(*before).or_default() -= *size;
                *now.entry(contents).or_default() += *size;
                *before = contents;
            }
        }
        RankEvent::Part(_) | RankEvent::Collective { .. } | RankEvent::Wait(_) => {}
    })?;
    memory.allocated = Bytes::new(peak);
    memory.reserved = Bytes::new(allocator.peak_reserved);
    memory.flushes = allocator.flushes.div_ceil(STEPS as u64);
    Ok(memory)
}
