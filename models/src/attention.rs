//! Sizes of attention and of rotary positions, and the part of a sequence that a rank works on.

use crate::dropout::{AttentionDropout, AttentionPlace};
use crate::zigzag::Zigzag;
use serde::{Deserialize, Serialize};
use std::num::NonZeroU32;

/// Relative positions as in T5 (Raffel et al. 2020): a learned number for each head and each bucket
/// of distances is added to the scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct RelativePositions {
    /// Rows of the table.
    pub buckets: usize,
    /// Distances from this on share the last bucket.
    pub max_distance: usize,
    /// Whether keys after a query have buckets of their own. Otherwise they share bucket 0 with the
    /// query itself.
    pub bidirectional: bool,
}

impl RelativePositions {
    /// Attention sinks (Xiao et al. 2023; gpt-oss): one learned number for each head, which the
    /// softmax counts like the score of a key without a value. Planned and simulated, not executed.
    pub const SINKS: Self = Self { buckets: 1, max_distance: 1, bidirectional: false };

    /// Returns the bucket of a key `distance` positions after its query. Half of the buckets hold
    /// one distance each, the others hold ranges that grow with the distance.
    ///
    /// It rounds in single precision step by step like `T5Attention._relative_position_bucket`, so
    /// that distances at the border of two buckets get the same one.
    pub fn bucket(&self, distance: isize) -> usize {
        let (first, buckets, distance) = match self.bidirectional {
            true => (if distance > 0 { self.buckets / 2 } else { 0 }, self.buckets / 2, distance.unsigned_abs()),
            false => (0, self.buckets, distance.min(0).unsigned_abs()),
        };
        let exact = buckets / 2;
        if distance < exact {
            return first + distance;
        }
        let exact_float = exact.max(1) as f64;
        let full_range = (self.max_distance as f64 / exact_float).ln() as f32;
        let offset = (distance as f32 / exact_float as f32).ln() / full_range * (buckets - exact) as f32;
        first + exact.saturating_add(offset.max(0.0) as usize).min(buckets.saturating_sub(1))
    }
}

/// Sizes of softmax attention (Vaswani et al. 2017) with grouped queries (Ainslie et al. 2023):
/// query head `h` attends to key head `h / group`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Attention {
    /// Sequences.
    pub batch: usize,
    /// Positions of queries on this rank.
    pub queries: usize,
    /// Positions of keys and values on this rank: the whole sequence, or one part of it in a ring.
    pub keys: usize,
    /// Heads of keys and values on this rank.
    pub key_heads: usize,
    /// Query heads of each key head: 1 without grouping.
    pub group: usize,
    /// Features of a head of queries and keys.
    pub head_dimension: usize,
    /// Features of a head of values and of the output. `None`: `head_dimension`. Models with
    /// another value are planned and simulated, not executed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub value_dimension: Option<NonZeroU32>,
    /// Whether a position only attends to itself and to positions before it.
    pub causal: bool,
    /// Whether scores are multiplied by `1/√head_dimension`.
    pub scaled: bool,
    /// Keys that a query sees: itself and those just before it, and as many after it if it is not
    /// causal. `None`: all of them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub window: Option<usize>,
    /// Relative positions that are added to the scores.
    pub relative: Option<RelativePositions>,
    /// Whether q, k and v are one tensor `[batch, queries, 3, heads, head_dimension]`, and their
    /// gradients too. Requires as many keys as queries, and no grouping.
    pub packed: bool,
    /// Parts into which a group of ranks has cut the queries. The rank's index in the group says
    /// which part it has. 1 if the work does not depend on the part.
    pub query_parts: usize,
    /// Position of the first query of the first part. With a zigzag order, its index in that order.
    pub query_offset: usize,
    /// The order in which queries and keys are stored, if it is not that of their positions.
    /// Requires causal attention to the same sequence, without relative positions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub zigzag: Option<Zigzag>,
    /// The step of ring attention that this kernel is. `None` without a ring.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ring: Option<RingStep>,
    /// Dropout of the probabilities. It changes the output only: the log-sum-exp is that of all
    /// keys.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dropout: Option<AttentionDropout>,
}

/// A step of ring attention (Liu et al. 2023).
///
/// A group of ranks cuts the keys and values of a sequence into one part a rank. The parts travel
/// round the group while each rank keeps its part of the queries. In step t the rank of index i has
/// the part that began on rank (i - t) mod parts. The results of a step are merged with those of
/// the steps before it, in single precision in every run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct RingStep {
    /// The step, from 0. In step 0 queries and keys have the same positions.
    pub step: usize,
    /// Parts of the sequence. 1 in the kernel of one member ([`Attention::for_member`]).
    pub parts: usize,
    /// Whether all keys come after all queries, so that causal attention sees none of them.
    pub unseen: bool,
    /// The only pairs that causal attention sees in a zigzag order, in the kernel of one member.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub half: Option<RingHalf>,
}

/// The half of a ring step's pairs that causal attention sees in a zigzag order. A part has a chunk
/// from the first half of the sequence and one from the second.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RingHalf {
    /// All queries see the first half of the keys: these began on an earlier rank.
    Keys,
    /// The second half of the queries sees all keys: these began on a later rank.
    Queries,
}

impl RingStep {
    /// Whether results are merged with those of earlier steps.
    pub fn merges(self) -> bool {
        self.step > 0
    }
}

impl Attention {
    /// Returns the query heads.
    pub fn heads(&self) -> usize {
        self.key_heads * self.group
    }

    /// Returns the features of a head of values, and of the output.
    pub fn value_features(&self) -> usize {
        self.value_dimension.map_or(self.head_dimension, |features| features.get() as usize)
    }

    /// Returns the elements of q.
    pub fn query_elements(&self) -> usize {
        self.batch * self.queries * self.heads() * self.head_dimension
    }

    /// Returns the elements of the output.
    pub fn output_elements(&self) -> usize {
        self.batch * self.queries * self.heads() * self.value_features()
    }

    /// Returns the elements of k.
    pub fn key_elements(&self) -> usize {
        self.batch * self.keys * self.key_heads * self.head_dimension
    }

    /// Returns the elements of v.
    pub fn value_elements(&self) -> usize {
        self.batch * self.keys * self.key_heads * self.value_features()
    }

    /// Returns the elements of the log-sum-exp.
    pub fn rows(&self) -> usize {
        self.batch * self.heads() * self.queries
    }

    /// Returns the elements of the table of relative positions, `[buckets, heads]`.
    pub fn table_elements(&self) -> usize {
        self.relative.map_or(0, |relative| relative.buckets * self.heads())
    }

    /// Returns the work of the member `index` of the group that has cut the queries.
    pub fn for_member(self, index: usize) -> Self {
        let index = self.position_part(index);
        if let Some(ring) = self.ring {
            return self.for_member_of_ring(ring, index);
        }
        let depends_on_position = self.causal || self.relative.is_some();
        let query_offset =
            if depends_on_position { self.query_offset + (index % self.query_parts.max(1)) * self.queries } else { 0 };
        Self { query_parts: 1, query_offset, ..self }
    }

    /// Returns the part of the positions that the member `index` of a group has.
    fn position_part(&self, index: usize) -> usize {
        index / self.dropout.map_or(1, |dropout| dropout.sample_parts.max(1) * dropout.head_ranks())
    }

    /// Returns the indices in the whole sequence of the first query and the first key of the member
    /// `index` of a group that has cut the positions.
    pub fn first_indices(&self, index: usize) -> [usize; 2] {
        let parts = match (self.dropout, self.ring) {
            (Some(dropout), _) => dropout.position_parts,
            (None, Some(ring)) => ring.parts,
            (None, None) => self.query_parts,
        };
        let parts = parts.max(1);
        let part = self.position_part(index) % parts;
        let key_part = self.ring.map_or(0, |ring| (part + parts - ring.step % parts) % parts);
        [part * self.queries, key_part * self.keys]
    }

    /// Returns where in the whole the work of the member `index` of a group begins.
    /// `samples_before` is the number of samples of the micro-batch on earlier ranks.
    pub fn place(&self, dropout: &AttentionDropout, index: usize, samples_before: usize) -> AttentionPlace {
        let [query, key] = self.first_indices(index);
        let head_part = index % dropout.head_ranks();
        let group_parts = dropout.group_parts.max(1);
        AttentionPlace {
            sample: dropout.first_sample + samples_before,
            query,
            key,
            key_head: head_part / group_parts * self.key_heads,
            member: head_part % group_parts * self.group,
            group: self.group * group_parts,
        }
    }

    /// Causal attention sees all keys of an earlier part, half of the pairs of its own part, and no
    /// keys of a later part.
    ///
    /// In zigzag order it sees half of the pairs of every other part. Within a part indices are in
    /// the order of positions, so its own part has the mask of a contiguous one.
    fn for_member_of_ring(self, ring: RingStep, index: usize) -> Self {
        if !self.causal || ring.parts <= 1 {
            return self;
        }
        let (own, step) = (index % ring.parts, ring.step % ring.parts);
        if self.zigzag.is_some() {
            let half = if step > own { RingHalf::Queries } else { RingHalf::Keys };
            let ring = Some(RingStep { parts: 1, half: (step > 0).then_some(half), ..ring });
            return Self { causal: step == 0, ring, zigzag: None, ..self };
        }
        let ring = Some(RingStep { parts: 1, unseen: step > own, ..ring });
        Self { causal: step == 0, ring, ..self }
    }

    /// Returns the parts into which the whole is cut, if the work depends on the part; else 1.
    pub(crate) fn parts(&self) -> usize {
        if let Some(dropout) = self.dropout {
            return dropout.position_parts * dropout.head_ranks() * dropout.sample_parts;
        }
        match self.ring {
            Some(ring) if self.causal => ring.parts,
            Some(_) => 1,
            None => self.query_parts,
        }
    }

    /// Whether some member of the group has more work than another.
    pub(crate) fn is_uneven(&self) -> bool {
        self.for_member(0) != *self && (self.zigzag.is_none() || self.ring.is_some())
    }

    /// The sizes as they are timed. All merging steps of a ring take equally long, dropout takes
    /// equally long at every position, and every part of a zigzag order has the same work.
    pub(crate) fn without_constants(self) -> Self {
        let is_even_part = self.zigzag.is_some() && self.query_parts <= 1;
        Self {
            query_offset: if is_even_part { 0 } else { self.query_offset },
            ring: self.ring.map(|ring| RingStep { step: if ring.parts <= 1 { ring.step.min(1) } else { ring.step }, ..ring }),
            dropout: self.dropout.map(AttentionDropout::without_constants),
            ..self
        }
    }

    /// Returns the query-key pairs of one head and sequence that are not masked. If the queries are
    /// cut into parts, this is the mean over the members. It is also the value for one member's
    /// part of a zigzag order, although with a window the first member has slightly fewer.
    pub fn scores(&self) -> f64 {
        let [queries, keys] = [self.queries as f64, self.keys as f64];
        if let Some(ring) = self.ring
            && (ring.half.is_some() || (self.zigzag.is_some() && ring.merges()))
        {
            return queries * keys / 2.0;
        }
        if let Some(ring) = self.ring
            && (ring.unseen || (self.causal && ring.merges()))
        {
            // In step t the last `parts - t` members see all keys, and the first t see none.
            let seeing = if ring.unseen { 0.0 } else { 1.0 - (ring.step as f64 / ring.parts.max(1) as f64).min(1.0) };
            return queries * keys * seeing;
        }
        if !self.causal {
            let seen = match self.window.map(|window| window as f64).filter(|&window| window < keys) {
                // As many keys on each side, except for queries near the ends.
                Some(window) => (2.0 * window - 1.0 - window * (window - 1.0) / keys).min(keys),
                None => keys,
            };
            return queries * seen;
        }
        // A ring's own part is in the order of positions.
        if let Some(order) = self.zigzag.filter(|_| self.ring.is_none()) {
            let positions = order.positions().max(1) as f64;
            return self.seen_by(0.0, positions) * queries / positions;
        }
        // The members' queries are consecutive, so their mean is the total over all members,
        // divided by the number of members.
        let parts = self.query_parts.max(1) as f64;
        self.seen_by(self.query_offset as f64, parts * queries) / parts
    }

    /// Returns the pairs of causal queries at consecutive positions.
    fn seen_by(&self, first: f64, queries: f64) -> f64 {
        if let Some(window) = self.window {
            let before = |positions: f64| {
                let within = positions.min(window as f64);
                within * (within + 1.0) / 2.0 + (positions - within) * window as f64
            };
            return before(first + queries) - before(first);
        }
        // Queries beyond the last key see every key.
        let keys = self.keys as f64;
        let partial = (keys - first).clamp(0.0, queries);
        partial * first + partial * (partial + 1.0) / 2.0 + (queries - partial) * keys
    }
}

/// Sizes of a rotary position embedding (Su et al. 2021). It rotates the pairs
/// `(f, f + rotated / 2)` of each head's features by `position · theta^(-2f / rotated)`, with the
/// pairs of Hugging Face's Llama.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Rope {
    /// Sequences.
    pub batch: usize,
    /// Positions of a sequence on this rank.
    pub positions: usize,
    /// Heads.
    pub heads: usize,
    /// Features of a head: an even number.
    pub head_dimension: usize,
    /// The first features of each head that are rotated, an even number; the others stay as they
    /// are, as in GPT-NeoX. `None`: all of them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rotated: Option<usize>,
    /// Base of the frequencies.
    pub theta: usize,
    /// Parts into which a group of ranks has cut the positions. The rank's index in the group says
    /// which part it has.
    pub position_parts: usize,
    /// First position of the first part. With a zigzag order, its index in that order.
    pub position_offset: usize,
    /// The order of the positions, if it is not their own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub zigzag: Option<Zigzag>,
}

impl Rope {
    /// Returns the elements of the input, and of the output.
    pub fn elements(&self) -> usize {
        self.batch * self.positions * self.heads * self.head_dimension
    }

    /// Returns the features of a head that are rotated.
    pub fn rotated_features(&self) -> usize {
        self.rotated.unwrap_or(self.head_dimension)
    }

    /// The sizes as they are timed. Neither the positions nor the base change the time.
    pub(crate) fn without_constants(self) -> Self {
        Self { theta: 10_000, position_parts: 1, position_offset: 0, zigzag: None, ..self }
    }

    /// Returns the work of the member `index` of the group that has cut the positions.
    pub fn for_member(self, index: usize) -> Self {
        let position_offset = self.position_offset + (index % self.position_parts.max(1)) * self.positions;
        Self { position_parts: 1, position_offset, ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::{Attention, RelativePositions, RingHalf, RingStep, Zigzag};

    #[test]
    #[cfg_attr(miri, ignore = "Miri rounds `ln` at random, and a distance at the edge of a bucket changes it")]
    fn distances_have_the_buckets_of_t5() {
        // From Hugging Face's `T5Attention._relative_position_bucket` with 32 buckets and a maximum
        // distance of 128.
        let both = RelativePositions { buckets: 32, max_distance: 128, bidirectional: true };
        let cases = [(0, 0), (-1, 1), (1, 17), (-7, 7), (-8, 8), (8, 24), (-11, 8), (-12, 9), (-16, 10), (16, 26), (-32, 12)];
        for (distance, bucket) in cases.into_iter().chain([(-64, 14), (-90, 14), (-91, 15), (-128, 15), (500, 31)]) {
            assert_eq!(both.bucket(distance), bucket, "{distance}");
        }
        let past = RelativePositions { bidirectional: false, ..both };
        for (distance, bucket) in [(3, 0), (0, 0), (-15, 15), (-16, 16), (-32, 21), (-64, 26), (-127, 31), (-128, 31), (-999, 31)]
        {
            assert_eq!(past.bucket(distance), bucket, "{distance}");
        }
    }

    /// Causal attention of one head.
    const WHOLE: Attention = Attention {
        batch: 1,
        queries: 24,
        keys: 24,
        key_heads: 1,
        group: 1,
        head_dimension: 4,
        value_dimension: None,
        causal: true,
        scaled: true,
        window: None,
        relative: None,
        packed: false,
        query_parts: 1,
        query_offset: 0,
        zigzag: None,
        ring: None,
        dropout: None,
    };

    #[test]
    fn the_parts_of_causal_attention_add_up_to_the_whole() {
        let whole = WHOLE;
        assert_eq!(whole.scores(), 300.0);
        let part = Attention { queries: 6, query_parts: 4, ..whole };
        let parts: Vec<f64> = (0..4).map(|index| part.for_member(index).scores()).collect();
        assert_eq!(parts, [21.0, 57.0, 93.0, 129.0]);
        assert_eq!(part.scores() * 4.0, 300.0);
        assert_eq!(Attention { queries: 30, ..whole }.scores(), 300.0 + 6.0 * 24.0);
        // Queries 0 to 4 see 1 to 5 keys, the other 19 see five each.
        let window = Attention { window: Some(5), ..whole };
        assert_eq!(window.scores(), 15.0 + 19.0 * 5.0);
        let part = Attention { queries: 6, query_parts: 4, ..window };
        assert_eq!((0..4).map(|index| part.for_member(index).scores()).sum::<f64>(), window.scores());
        assert_eq!(part.scores() * 4.0, window.scores());
        assert_eq!(Attention { window: Some(24), ..whole }.scores(), whole.scores());
        // Without a direction a window of 5 leaves 9 keys, less 4, 3, 2 and 1 at each end.
        let around = Attention { causal: false, ..window };
        assert_eq!(around.scores(), 24.0 * 9.0 - 20.0);
        assert_eq!(Attention { window: Some(24), ..around }.scores(), 24.0 * 24.0);
    }

    #[test]
    fn all_parts_of_a_zigzag_order_have_the_mean_work() {
        let zigzag = Zigzag::new(3, 24);
        let part = Attention { queries: 8, query_parts: 3, zigzag, ..WHOLE };
        assert!(!part.is_uneven());
        for (window, whole) in [(None, 300.0), (Some(5), 15.0 + 19.0 * 5.0)] {
            let part = Attention { window, ..part };
            let parts = [0, 1, 2].map(|index| part.for_member(index).scores());
            assert_eq!((parts, part.scores()), ([whole / 3.0; 3], whole / 3.0), "{window:?}");
        }
        let timed: Vec<Attention> = (0..3).map(|index| part.for_member(index).without_constants()).collect();
        assert!(timed.iter().all(|kernel| *kernel == timed[0]));
        // As the positions of each part have it.
        let order = zigzag.expect("it divides");
        let of_positions = |rank: usize| (0..8).map(|index| 1.0 + order.position(8 * rank + index) as f64).sum::<f64>();
        assert_eq!([0, 1, 2].map(of_positions), [100.0; 3]);
    }

    #[test]
    fn a_ring_in_zigzag_order_has_equal_steps() {
        let step = |step| {
            let ring = Some(RingStep { step, parts: 3, unseen: false, half: None });
            Attention { queries: 8, keys: 8, zigzag: Zigzag::new(3, 24), ring, ..WHOLE }
        };
        let of_members = |t: usize| [0, 1, 2].map(|index| step(t).for_member(index).scores());
        assert_eq!((of_members(0), of_members(1), of_members(2)), ([36.0; 3], [32.0; 3], [32.0; 3]));
        assert_eq!([0, 1, 2].map(|t| step(t).scores()), [36.0, 32.0, 32.0]);
        let half = |t: usize, index: usize| step(t).for_member(index).ring.and_then(|ring| ring.half);
        // In step 1 rank 2 has the part of rank 1, and rank 0 that of rank 2.
        assert_eq!([half(0, 1), half(1, 2), half(1, 0)], [None, Some(RingHalf::Keys), Some(RingHalf::Queries)]);
    }

    #[test]
    fn the_steps_of_a_ring_add_up_to_the_whole() {
        let step = |causal, step| {
            let ring = Some(RingStep { step, parts: 4, unseen: false, half: None });
            Attention { queries: 6, keys: 6, causal, ring, ..WHOLE }
        };
        let of_members =
            |causal| (0..4).map(move |index| (0..4).map(|t| step(causal, t).for_member(index).scores()).sum::<f64>());
        // As many pairs as the same members have without a ring, in the test above.
        assert_eq!(of_members(true).collect::<Vec<_>>(), [21.0, 57.0, 93.0, 129.0]);
        assert_eq!(of_members(false).collect::<Vec<_>>(), [144.0; 4]);
        // Without `for_member` the scores are the mean over the members.
        assert_eq!((0..4).map(|t| 4.0 * step(true, t).scores()).sum::<f64>(), 300.0);
        assert_eq!(step(false, 1).for_member(0), step(false, 1), "without a mask all members have the same work");
    }
}
