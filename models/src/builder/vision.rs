//! Operators between images and text, which are planned and simulated only.

use super::{AttentionKind, GraphBuilder, dimension, shardable, walk};
use crate::dropout::DropoutRate;
use crate::graph::{Dimension, Extent, Loop, LoopId, TensorId};
use crate::kernel::PlannedKind;

impl GraphBuilder {
    /// Adds work whose result has `dimensions`, the batch first. Ranks shard samples alone.
    fn by_samples(&mut self, name: &str, kind: PlannedKind, x: TensorId, dimensions: Vec<Dimension>) -> TensorId {
        let own = self.dimensions(x);
        let whole = |dimension: &Dimension| Loop { shardable: false, ..shardable(dimension, Extent::Parts) };
        let mut loops = vec![shardable(&own[0], Extent::Rows)];
        loops.extend(own[1..].iter().chain(&dimensions[1..]).map(whole));
        let batch = [Some(LoopId(0))];
        let axes = [&batch[..], &walk(1, own.len() - 1)].concat();
        let result = [&batch[..], &walk(own.len(), dimensions.len() - 1)].concat();
        self.planned(name, kind, loops, vec![(x, axes)], (dimensions, result))
    }

    /// Adds x `[batch, positions, features]` behind a learned row `[features]`.
    pub(crate) fn prepend_row(&mut self, name: &str, x: TensorId, row: TensorId) -> TensorId {
        let own = self.dimensions(x);
        let longer = Dimension { extent: own[1].extent + 1, ..own[1] };
        let whole = |dimension: &Dimension| Loop { shardable: false, ..shardable(dimension, Extent::Parts) };
        let loops = vec![shardable(&own[0], Extent::Rows), whole(&own[1]), whole(&longer), shardable(&own[2], Extent::Rows)];
        let axes = |positions: usize| [0, positions, 3].map(|index| Some(LoopId(index))).to_vec();
        let inputs = vec![(x, axes(1)), (row, vec![Some(LoopId(3))])];
        self.planned(name, PlannedKind::Rearrangement, loops, inputs, (vec![own[0], longer, own[2]], axes(2)))
    }

    /// Adds x `[batch, positions, features]` without its first position.
    pub(crate) fn without_first(&mut self, name: &str, x: TensorId) -> TensorId {
        let mut dimensions = self.dimensions(x);
        dimensions[1].extent -= 1;
        self.by_samples(name, PlannedKind::Slice, x, dimensions)
    }

    /// Adds x `[batch, positions, features]` with `joins` positions side by side.
    pub(crate) fn join_positions(&mut self, name: &str, x: TensorId, joins: usize) -> TensorId {
        let mut dimensions = self.dimensions(x);
        dimensions[1].extent /= joins;
        dimensions[2].extent *= joins;
        self.by_samples(name, PlannedKind::Reshape, x, dimensions)
    }

    /// Adds the means of `joins` positions each.
    pub(crate) fn mean_of_positions(&mut self, name: &str, x: TensorId, joins: usize) -> TensorId {
        let mut dimensions = self.dimensions(x);
        dimensions[1].extent /= joins;
        self.by_samples(name, PlannedKind::Pool, x, dimensions)
    }

    /// Adds rows of a table `[rows, features]` to the positions of x
    /// `[batch, positions, features]`.
    pub(crate) fn add_table(&mut self, name: &str, x: TensorId, table: TensorId) -> TensorId {
        let dimensions = self.dimensions(x);
        let rows = self.dimensions(table)[0];
        let mut loops: Vec<Loop> = dimensions.iter().map(|dimension| shardable(dimension, Extent::Rows)).collect();
        loops[1].shardable = false;
        loops.push(Loop { shardable: false, ..shardable(&rows, Extent::Parts) });
        let all = walk(0, 3);
        let inputs = vec![(x, all.clone()), (table, vec![Some(LoopId(3)), Some(LoopId(2))])];
        self.planned(name, PlannedKind::Sum, loops, inputs, (dimensions, all))
    }

    /// Adds attention in which each position sees `attended` positions: those of its window, or of
    /// its image. Its arithmetic is that of attention over as many keys.
    pub(crate) fn attention_over_parts(&mut self, name: &str, [q, k, v]: [TensorId; 3], attended: usize) -> TensorId {
        let keys = self.dimensions(k);
        let [k, v] = [("keys", k), ("values", v)].map(|(part, tensor)| {
            if attended >= keys[1].extent {
                return tensor;
            }
            let mut dimensions = keys.clone();
            dimensions[1].extent = attended;
            self.seen_positions(&format!("{name}.{part}"), tensor, dimensions)
        });
        let kind = AttentionKind { causal: false, scaled: true, window: None, relative: None, dropout: DropoutRate::NONE };
        self.attention(name, [q, k, v], kind)
    }

    /// Adds the positions of keys `[batch, positions, heads, features]` that attention sees.
    fn seen_positions(&mut self, name: &str, x: TensorId, dimensions: Vec<Dimension>) -> TensorId {
        let own = self.dimensions(x);
        let whole = |dimension: &Dimension| Loop { shardable: false, ..shardable(dimension, Extent::Parts) };
        let shared = |dimension: &Dimension| shardable(dimension, Extent::Rows);
        let loops = vec![shared(&own[0]), whole(&own[1]), whole(&dimensions[1]), shared(&own[2]), shared(&own[3])];
        let axes = |positions: usize| [0, positions, 3, 4].map(|index| Some(LoopId(index))).to_vec();
        self.planned(name, PlannedKind::Slice, loops, vec![(x, axes(1))], (dimensions, axes(2)))
    }

    /// Adds x `[batch, sequence, hidden]` with `tokens` `[batch, tokens, hidden]` at some of its
    /// positions.
    pub(crate) fn place_tokens(&mut self, name: &str, x: TensorId, tokens: TensorId) -> TensorId {
        let dimensions = self.dimensions(x);
        let placed = dimension("tokens", self.dimensions(tokens)[1].extent);
        let mut loops: Vec<Loop> = dimensions.iter().map(|dimension| shardable(dimension, Extent::Rows)).collect();
        loops.push(Loop { shardable: false, ..shardable(&placed, Extent::Parts) });
        let all = walk(0, 3);
        let inputs = vec![(x, all.clone()), (tokens, vec![Some(LoopId(0)), Some(LoopId(3)), Some(LoopId(2))])];
        self.planned(name, PlannedKind::Rearrangement, loops, inputs, (dimensions, all))
    }
}
