//! The sizes of attention, and what of its work depends on which part of the sequence a rank has.

use crate::dropout::{AttentionDropout, AttentionPlace};
use serde::{Deserialize, Serialize};

/// T5's relative positions (Raffel et al. 2020): a learned number for each head and each bucket of distances is added to the scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct RelativePositions {
    /// Rows of the table.
    pub buckets: usize,
    /// Distances from this on share the last bucket.
    pub max_distance: usize,
    /// Whether keys after a query have buckets of their own; else they share that of the query itself.
    pub bidirectional: bool,
}

impl RelativePositions {
    /// The bucket of a key `distance` positions after its query: half of them one a distance, the others wider and wider.
    /// In the same single-precision steps as `T5Attention._relative_position_bucket`, whose rounding decides at the borders.
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
        let whole = (self.max_distance as f64 / exact_float).ln() as f32;
        let part = (distance as f32 / exact_float as f32).ln() / whole * (buckets - exact) as f32;
        first + exact.saturating_add(part.max(0.0) as usize).min(buckets.saturating_sub(1))
    }
}

/// The sizes of softmax attention (Vaswani et al. 2017), with grouped queries (Ainslie et al. 2023): query head `h` attends to key head
/// `h / group`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Attention {
    /// Sequences.
    pub batch: usize,
    /// Positions that ask, on this rank.
    pub queries: usize,
    /// Positions that are asked: all of them.
    pub keys: usize,
    /// Heads of keys and values on this rank.
    pub key_heads: usize,
    /// Query heads of each key head: 1 without grouping.
    pub group: usize,
    /// Features of a head.
    pub head_dimension: usize,
    /// Whether a position sees only those before it and itself.
    pub causal: bool,
    /// Whether scores are multiplied by `1/√head_dimension`.
    pub scaled: bool,
    /// What is added to the scores, if anything is.
    pub relative: Option<RelativePositions>,
    /// Whether q, k and v lie in one tensor `[batch, queries, 3, heads, head_dimension]`, and their gradients too; needs as many keys as
    /// queries and no grouping.
    pub packed: bool,
    /// Into how many parts a group of ranks has cut the queries; the rank's index in the group says which part this is.
    pub query_parts: usize,
    /// The position of the first query of the first part.
    pub query_offset: usize,
    /// Which part of the keys this is, where they go round a ring of ranks; then `keys` are those of one part.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ring: Option<KeyStep>,
    /// The dropout of the probabilities, if there is one. It changes the output alone: the log-sum-exp is that of all keys.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dropout: Option<AttentionDropout>,
}

/// A step of ring attention (Liu et al. 2023): the keys and values of a sequence, cut into as many parts as a group has ranks, go round the group
/// while each rank keeps its part of the queries. In step t the rank of index i has the part that began on rank (i - t) mod parts. What a step
/// leaves is merged with what the steps before it left; in single precision, whatever the run's is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct KeyStep {
    /// The step, from 0 on. In step 0 queries and keys are of the same positions.
    pub step: usize,
    /// Parts of the whole that the rank's index in its group has to be known for; 1 where it is known already.
    pub parts: usize,
    /// Whether all keys come after all queries, and causal attention sees none.
    pub unseen: bool,
}

impl KeyStep {
    /// Whether what there is is added to instead of replaced.
    pub fn merges(self) -> bool {
        self.step > 0
    }
}

impl Attention {
    /// Query heads.
    pub fn heads(&self) -> usize {
        self.key_heads * self.group
    }

    /// Elements of q and of the output.
    pub fn query_elements(&self) -> usize {
        self.batch * self.queries * self.heads() * self.head_dimension
    }

    /// Elements of k, and of v.
    pub fn key_elements(&self) -> usize {
        self.batch * self.keys * self.key_heads * self.head_dimension
    }

    /// Elements of the log-sum-exp.
    pub fn rows(&self) -> usize {
        self.batch * self.heads() * self.queries
    }

    /// Elements of the table of relative positions, `[buckets, heads]`.
    pub fn table_elements(&self) -> usize {
        self.relative.map_or(0, |relative| relative.buckets * self.heads())
    }

    /// The work of the member `index` of a group that has cut the queries into parts.
    pub fn for_member(self, index: usize) -> Self {
        let index = self.position_part(index);
        if let Some(ring) = self.ring {
            return self.for_member_of_ring(ring, index);
        }
        let positioned = self.causal || self.relative.is_some();
        let query_offset = if positioned { self.query_offset + (index % self.query_parts.max(1)) * self.queries } else { 0 };
        Self { query_parts: 1, query_offset, ..self }
    }

    /// Which part of the positions the member `index` of a group has.
    fn position_part(&self, index: usize) -> usize {
        index / self.dropout.map_or(1, |dropout| dropout.sample_parts.max(1) * dropout.head_ranks())
    }

    /// Where in the whole the member `index` of a group is before which `samples_before` samples of the micro-batch lie on other ranks.
    pub fn place(&self, dropout: &AttentionDropout, index: usize, samples_before: usize) -> AttentionPlace {
        let part = self.position_part(index) % dropout.position_parts.max(1);
        let key_part = match self.ring {
            Some(ring) => {
                (part + dropout.position_parts - ring.step % dropout.position_parts.max(1)) % dropout.position_parts.max(1)
            }
            None => 0,
        };
        let head_part = index % dropout.head_ranks();
        let group_parts = dropout.group_parts.max(1);
        AttentionPlace {
            sample: dropout.first_sample + samples_before,
            query: part * self.queries,
            key: key_part * self.keys,
            key_head: head_part / group_parts * self.key_heads,
            member: head_part % group_parts * self.group,
            group: self.group * group_parts,
        }
    }

    /// Causal attention sees all of a part that lies before the rank's own, half of its own, and nothing of one that lies after it.
    fn for_member_of_ring(self, ring: KeyStep, index: usize) -> Self {
        if !self.causal || ring.parts <= 1 {
            return self;
        }
        let (own, step) = (index % ring.parts, ring.step % ring.parts);
        let ring = Some(KeyStep { parts: 1, unseen: step > own, ..ring });
        Self { causal: step == 0, ring, ..self }
    }

    /// Into how many parts the whole is cut of which the rank's index in its group says which one is its own.
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

    /// The same at any step of a ring but the first, as merging takes as long in all of them; and whatever is dropped.
    pub(crate) fn without_step(self) -> Self {
        Self {
            ring: self.ring.map(|ring| KeyStep { step: if ring.parts <= 1 { ring.step.min(1) } else { ring.step }, ..ring }),
            dropout: self.dropout.map(AttentionDropout::without_place),
            ..self
        }
    }

    /// Query-key pairs of one head of one sequence; of the mean member where queries are cut into parts.
    pub fn scores(&self) -> f64 {
        let [queries, keys] = [self.queries as f64, self.keys as f64];
        if let Some(ring) = self.ring
            && (ring.unseen || (self.causal && ring.merges()))
        {
            // In step t the last `parts - t` members see all, and the others nothing.
            let seeing = if ring.unseen { 0.0 } else { 1.0 - (ring.step as f64 / ring.parts.max(1) as f64).min(1.0) };
            return queries * keys * seeing;
        }
        if !self.causal {
            return queries * keys;
        }
        let offset = self.query_offset as f64 + (self.query_parts.max(1) - 1) as f64 / 2.0 * queries;
        // Queries whose position is beyond the last key see every key.
        let partial = (keys - offset).clamp(0.0, queries);
        partial * offset + partial * (partial + 1.0) / 2.0 + (queries - partial) * keys
    }
}

/// The sizes of a rotary position embedding (Su et al. 2021), which turns the pairs `(f, f + head_dimension / 2)` of features of each head by
/// `position · theta^(-2f / head_dimension)`, as Hugging Face's Llama pairs them.
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
    /// The base of the frequencies.
    pub theta: usize,
    /// Into how many parts a group of ranks has cut the positions; the rank's index in the group says which part this is.
    pub position_parts: usize,
    /// The first position of the first part.
    pub position_offset: usize,
}

impl Rope {
    /// Elements of the input and of the output.
    pub fn elements(&self) -> usize {
        self.batch * self.positions * self.heads * self.head_dimension
    }

    /// The same wherever it is in a sequence, and with the usual base: turning takes as long.
    pub fn without_positions(self) -> Self {
        Self { theta: 10_000, position_parts: 1, position_offset: 0, ..self }
    }

    /// The work of the member `index` of a group that has cut the positions into parts.
    pub fn for_member(self, index: usize) -> Self {
        let position_offset = self.position_offset + (index % self.position_parts.max(1)) * self.positions;
        Self { position_parts: 1, position_offset, ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::{Attention, KeyStep, RelativePositions};

    #[test]
    fn buckets_are_those_of_t5() {
        // From Hugging Face's `T5Attention._relative_position_bucket` with 32 buckets and a maximum distance of 128.
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

    #[test]
    fn the_parts_of_causal_attention_add_up_to_the_whole() {
        let whole = Attention {
            batch: 1,
            queries: 24,
            keys: 24,
            key_heads: 1,
            group: 1,
            head_dimension: 4,
            causal: true,
            scaled: true,
            relative: None,
            packed: false,
            query_parts: 1,
            query_offset: 0,
            ring: None,
            dropout: None,
        };
        assert_eq!(whole.scores(), 300.0);
        let part = Attention { queries: 6, query_parts: 4, ..whole };
        let parts: Vec<f64> = (0..4).map(|index| part.for_member(index).scores()).collect();
        assert_eq!(parts, [21.0, 57.0, 93.0, 129.0]);
        assert_eq!(part.scores() * 4.0, 300.0);
        assert_eq!(Attention { queries: 30, ..whole }.scores(), 300.0 + 6.0 * 24.0);
    }

    #[test]
    fn the_steps_of_a_ring_add_up_to_the_whole() {
        let step = |causal, step| Attention {
            batch: 1,
            queries: 6,
            keys: 6,
            key_heads: 1,
            group: 1,
            head_dimension: 4,
            causal,
            scaled: true,
            relative: None,
            packed: false,
            query_parts: 1,
            query_offset: 0,
            ring: Some(KeyStep { step, parts: 4, unseen: false }),
            dropout: None,
        };
        let of_members =
            |causal| (0..4).map(move |index| (0..4).map(|t| step(causal, t).for_member(index).scores()).sum::<f64>());
        // As many as the same members' queries see of all keys (the test above).
        assert_eq!(of_members(true).collect::<Vec<_>>(), [21.0, 57.0, 93.0, 129.0]);
        assert_eq!(of_members(false).collect::<Vec<_>>(), [144.0; 4]);
        // A kernel that nobody has made concrete is that of the mean member.
        assert_eq!((0..4).map(|t| 4.0 * step(true, t).scores()).sum::<f64>(), 300.0);
        assert_eq!(step(false, 1).for_member(0), step(false, 1), "without a mask all members do the same");
    }
}
