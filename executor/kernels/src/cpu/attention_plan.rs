//! What attention's kernels derive from its sizes: offsets of heads, blocks of queries, and the
//! keys that a block sees. It computes no scores.
//!
//! In a zigzag order the rank's queries are two runs of positions. Each head's keys are copied into
//! position order, which costs little compared with the products, so that a query sees a prefix of
//! the copy. The keys of a ring step are in position order already.

use super::dropout::ProbabilityDropout;
use super::head_products::HeadBlock;
use super::ordered::in_order_of_positions;
use foretell_models::{Attention, PositionRun, RingHalf, Zigzag, position_runs};

/// Strides of q, k and v (or their gradients), in elements: from one position to the next, and from
/// one sequence to the next.
#[derive(Clone, Copy)]
pub(super) struct Strides {
    pub(super) query: usize,
    pub(super) key: usize,
    pub(super) query_image: usize,
    pub(super) key_image: usize,
}

/// Quantities derived from the sizes: offsets of heads, blocks of queries, and the keys that a
/// block sees.
pub(super) struct AttentionPlan<'a> {
    pub(super) sizes: &'a Attention,
    pub(super) strides: Strides,
    pub(super) scale: f32,
    /// Elements from one output position to the next.
    pub(super) hidden: usize,
    /// The order in which keys are stored, if they are not stored by position.
    pub(super) order: Option<Zigzag>,
    /// Number of keys that the queries can see: in some steps of a ring only the first half.
    pub(super) reach: usize,
    /// The positions of keys, for dropout.
    pub(super) key_runs: Vec<PositionRun>,
    /// All blocks of queries, in the order of positions.
    pub(super) blocks: Vec<QueryBlock>,
}

/// A block of queries.
#[derive(Clone, Copy)]
pub(super) struct QueryBlock {
    /// Its first query on this rank.
    pub(super) row: usize,
    /// The position of that query in the whole sequence, for dropout.
    pub(super) position: usize,
    /// The keys that it sees.
    pub(super) block: HeadBlock,
}

impl<'a> AttentionPlan<'a> {
    pub(super) fn new(sizes: &'a Attention, dropout: Option<&ProbabilityDropout>) -> Self {
        let hidden = sizes.heads() * sizes.head_dimension;
        let (query, key) = if sizes.packed { (3 * hidden, 3 * hidden) } else { (hidden, sizes.key_heads * sizes.head_dimension) };
        let strides = Strides { query, key, query_image: sizes.queries * query, key_image: sizes.keys * key };
        let scale = if sizes.scaled { 1.0 / (sizes.head_dimension as f32).sqrt() } else { 1.0 };
        let half = sizes.ring.and_then(|ring| ring.half);
        let reach = if half == Some(RingHalf::Keys) { sizes.keys / 2 } else { sizes.keys };
        // In position order the keys are one run.
        let key_runs = match dropout {
            Some(dropout) if sizes.zigzag.is_none() => dropout.keys(sizes.keys).collect(),
            _ => vec![PositionRun { start: 0, position: 0, length: sizes.keys }],
        };
        let (order, blocks) = (sizes.zigzag, Vec::new());
        let mut plan = Self { sizes, strides, scale, hidden, order, reach, key_runs, blocks };
        let first = if half == Some(RingHalf::Queries) { sizes.queries / 2 } else { 0 };
        match dropout {
            Some(dropout) => dropout.queries(sizes.queries).for_each(|run| plan.add_blocks(run, first)),
            None => {
                let indices = sizes.query_offset..sizes.query_offset + sizes.queries;
                position_runs(sizes.zigzag, indices).for_each(|run| plan.add_blocks(run, first));
            }
        }
        plan
    }

    /// Adds the blocks of a run of queries, leaving out queries before `first`.
    pub(super) fn add_blocks(&mut self, run: PositionRun, first: usize) {
        let end = run.start + run.length;
        for row in (run.start.max(first)..end).step_by(self.block()) {
            let position = run.position + row - run.start;
            // Without `order`, keys are counted from the same origin as `query_offset`.
            let place = if self.order.is_some() { position } else { self.sizes.query_offset + row };
            let block = self.block_at(place, self.block().min(end - row));
            self.blocks.push(QueryBlock { row, position, block });
        }
    }

    /// Number of queries per block. Its scores have at most 128 Ki elements: a quarter of the L2
    /// cache, since the gradient has two such blocks. Blocks are small enough to waste little above
    /// a causal diagonal, large enough for fast products, and whole tiles of the micro-kernel.
    pub(super) fn block(&self) -> usize {
        ((1 << 17) / self.sizes.keys.max(1)).clamp(14, 56)
    }

    /// The block of `count` queries, the first of which has `first` keys before its own position.
    pub(super) fn block_at(&self, first: usize, count: usize) -> HeadBlock {
        let visible = if self.sizes.causal { (first + count).min(self.reach) } else { self.reach };
        HeadBlock { first, count, visible, features: self.sizes.head_dimension, causal: self.sizes.causal }
    }

    /// Number of keys that a block's first query sees, and how many more each later query sees.
    pub(super) fn diagonal(&self, block: &HeadBlock) -> (usize, usize) {
        if self.sizes.causal { (block.first + 1, 1) } else { (self.reach, 0) }
    }

    /// Offset of a query head's q in a sequence.
    pub(super) fn query(&self, image: usize, head: usize) -> usize {
        image * self.strides.query_image + head * self.sizes.head_dimension
    }

    /// Offset of a key head's k or v in a sequence.
    pub(super) fn key(&self, image: usize, head: usize) -> usize {
        image * self.strides.key_image + head * self.sizes.head_dimension
    }

    /// Offset of a head's output for a query.
    pub(super) fn output(&self, image: usize, first: usize, head: usize) -> usize {
        (image * self.sizes.queries + first) * self.hidden + head * self.sizes.head_dimension
    }

    pub(super) fn is_empty(&self) -> bool {
        self.sizes.query_elements() == 0 || self.sizes.keys == 0
    }

    /// Length of the buffer for a copy of one head's keys in position order.
    pub(super) fn ordered_elements(&self) -> usize {
        if self.order.is_some() { self.sizes.keys * self.sizes.head_dimension } else { 0 }
    }

    /// The keys or values of a head, and the stride of their rows in elements: `stored` itself, or
    /// `copy` filled in position order.
    pub(super) fn keys_of<'k>(&self, stored: &'k [f32], copy: &'k mut [f32]) -> (&'k [f32], usize) {
        match self.order {
            None => (stored, self.strides.key),
            Some(order) => {
                let features = self.sizes.head_dimension;
                (in_order_of_positions(order, stored, self.strides.key, features, copy), features)
            }
        }
    }

    /// Length of the buffer of [`AttentionPlan::fill_bias`].
    pub(super) fn bias_elements(&self) -> usize {
        if self.sizes.relative.is_some() { self.sizes.queries + self.sizes.keys } else { 0 }
    }

    /// Writes a head's bias of scores by distance, starting with the distance from the last query
    /// to the first key.
    pub(super) fn fill_bias(&self, bias: &mut [f32], table: &[f32], head: usize) {
        self.each_distance(head, |place, entry| bias[place] = table[entry]);
    }

    /// Calls `each(index in a head's bias, index in the table)` for every distance between a query
    /// and a key.
    pub(super) fn each_distance(&self, head: usize, mut each: impl FnMut(usize, usize)) {
        let Some(relative) = self.sizes.relative else { return };
        let last = (self.sizes.query_offset + self.sizes.queries - 1) as isize;
        for place in 0..self.sizes.queries + self.sizes.keys - 1 {
            each(place, relative.bucket(place as isize - last) * self.sizes.heads() + head);
        }
    }

    /// Start of the bias row of query `first`, an index among this rank's queries.
    pub(super) fn bias_line(&self, first: usize) -> usize {
        self.sizes.queries - 1 - first
    }
}
