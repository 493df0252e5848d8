//! A cache of the costs of whole Programs of one replica. It does not know how the costs are
//! computed.

use super::memo::Memo;
use super::truncated::ChunkCost;
use foretell_program::Layout;
use foretell_units::diagnostic::Mistake;
use std::sync::Arc;

/// The most micro-batches that are compiled. A pass counts in every micro-batch with the least of
/// its compiled times.
const COMPILED_MICRO_BATCHES: usize = 2;

/// What the passes of one replica depend on: its layout, and the number of compiled micro-batches.
type ReplicaKey = (Layout, usize);

/// The costs of a replica's chunks, indexed by position in the model. `None` if they are not known;
/// `Err` with the compiler's message if the layout does not divide the model.
pub(super) type Replica = Result<Option<Arc<Vec<ChunkCost>>>, Mistake>;

/// Costs of whole Programs of one replica, each compiled once.
pub(super) struct Replicas(Memo<ReplicaKey, Replica>);

impl Replicas {
    pub(super) fn new() -> Self {
        Self(Memo::new())
    }

    /// The costs of one replica of `layout`. `find` computes them from the replica's own layout and
    /// the number of micro-batches to compile.
    pub(super) fn of(&self, layout: &Layout, micro_batches: usize, find: impl FnOnce(Layout, usize) -> Replica) -> Replica {
        // With one chunk on each stage, passes are equal in all schedules with the same kinds of
        // passes.
        let schedule = if layout.virtual_stages == 1 { layout.schedule.of_one_chunk() } else { layout.schedule };
        let own = Layout { data: 1, zero: 0, shard_group: None, schedule, ..layout.clone() };
        let micro_batches = micro_batches.min(COMPILED_MICRO_BATCHES);
        self.0.get((own.clone(), micro_batches), || find(own, micro_batches))
    }
}
