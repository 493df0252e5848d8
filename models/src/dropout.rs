//! Dropout (Srivastava et al. 2014): the share that is dropped, and which part of the whole one rank has: of an activation, or of attention's
//! probabilities. It must not know how layouts come to such parts.

use serde::{Deserialize, Serialize};

/// The share of elements that dropout drops: from 0 to below 1, in ten-thousandths.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "f64", into = "f64")]
pub struct DropoutRate {
    ten_thousandths: u16,
}

impl DropoutRate {
    /// Nothing is dropped.
    pub const NONE: Self = Self { ten_thousandths: 0 };

    /// One tenth, the usual rate of transformers.
    pub const TENTH: Self = Self { ten_thousandths: 1000 };

    /// Whether nothing is dropped.
    pub const fn is_none(&self) -> bool {
        self.ten_thousandths == 0
    }

    /// The share that is dropped.
    pub fn value(self) -> f64 {
        f64::from(self.ten_thousandths) / 1e4
    }

    /// What elements that are kept are multiplied by, so that a sum stays the same on average.
    pub fn scale(self) -> f32 {
        (1.0 / (1.0 - self.value())) as f32
    }

    /// Of uniformly distributed 32-bit numbers those below this are drops.
    pub fn threshold(self) -> u32 {
        ((u64::from(self.ten_thousandths) << 32) / 10_000) as u32
    }
}

impl TryFrom<f64> for DropoutRate {
    type Error = String;

    fn try_from(rate: f64) -> Result<Self, String> {
        let ten_thousandths = (rate * 1e4).round();
        if (0.0..1e4).contains(&ten_thousandths) && (rate * 1e4 - ten_thousandths).abs() < 1e-6 {
            return Ok(Self { ten_thousandths: ten_thousandths as u16 });
        }
        Err(format!("`dropout` is {rate}; hint: it is a number from 0 to below 1 with at most four decimals, such as 0.1"))
    }
}

impl From<DropoutRate> for f64 {
    fn from(rate: DropoutRate) -> f64 {
        rate.value()
    }
}

/// One of a model's dropouts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct DropoutSite {
    /// The share that is dropped.
    pub rate: DropoutRate,
    /// Which of the model's dropouts it is.
    pub site: usize,
}

/// The sizes of a dropout on one rank, and which part of the whole it is.
///
/// The whole is `[samples of the batch, parts * positions, features]`. Of sample `s` of this rank's the number in the batch is
/// `first_sample + samples_before + s`, with what of the micro-batch lies on ranks before this one, and its first position is `part * positions`, with
/// the rank's part of the positions; a call says both. Whether an element is kept is a hash of the seed, the step, the site, the sample's number and the
/// element's index in its sample, so it is the same in every layout, when it is computed again and in the gradient; no mask is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Dropout {
    /// The first sample of the global batch that is at work on any rank.
    pub first_sample: usize,
    /// Samples on this rank.
    pub samples: usize,
    /// Positions of a sample on this rank; of a tensor without a sequence its features.
    pub positions: usize,
    /// Features of a position; 1 for a tensor without a sequence.
    pub features: usize,
    /// Into how many parts ranks have cut the positions.
    pub parts: usize,
    /// Into how many parts ranks of the group have cut the samples, too: of the rank's index in it that part varies fastest.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub sample_parts: usize,
    /// The share that is dropped, and which of the model's dropouts it is.
    #[serde(flatten)]
    pub site: DropoutSite,
}

impl Dropout {
    /// Elements of the input and of the output.
    pub fn elements(&self) -> usize {
        self.samples * self.positions * self.features
    }

    /// The same wherever it is in a batch and a model, at the usual rate: it takes as long.
    pub fn without_place(self) -> Self {
        Self { first_sample: 0, parts: 1, sample_parts: 1, site: DropoutSite::ANY, ..self }
    }
}

impl DropoutSite {
    /// Of the usual rate, wherever it is.
    pub(crate) const ANY: Self = Self { rate: DropoutRate::TENTH, site: 0 };
}

/// Dropout of attention's probabilities on one rank, and which part of the whole that has.
///
/// Whether a probability is kept is a hash of the seed, the step, the site, the sample's number in the global batch, the query head, the
/// query's position and the key's: so it is the same in every layout, when it is computed again and in the gradient; no mask is stored.
/// Of the rank's index in its group the heads' part varies fastest, of that the part of each key head's queries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct AttentionDropout {
    /// The share that is dropped, and which of the model's dropouts it is.
    #[serde(flatten)]
    pub site: DropoutSite,
    /// The first sample of the global batch that is at work on any rank; or, of a kernel that is given some of a rank's samples, so many
    /// samples later.
    pub first_sample: usize,
    /// Into how many parts ranks have cut the positions.
    pub position_parts: usize,
    /// Into how many parts ranks have cut the key heads.
    pub head_parts: usize,
    /// Into how many parts ranks have cut the query heads of each key head.
    pub group_parts: usize,
    /// Into how many parts ranks of the group have cut the samples, too: of the rank's index in it that part varies fastest of all.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub sample_parts: usize,
}

/// What of the whole a rank's attention has, as its dropout must know it: the first of each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionPlace {
    /// Sample of the global batch.
    pub sample: usize,
    /// Position of a query.
    pub query: usize,
    /// Position of a key.
    pub key: usize,
    /// Head of keys and values.
    pub key_head: usize,
    /// Among the query heads of each key head.
    pub member: usize,
    /// Query heads of each key head, over all ranks.
    pub group: usize,
}

impl AttentionPlace {
    /// The number of the query head `head` of this rank's, each of whose key heads has `group` query heads here.
    pub fn head(&self, head: usize, group: usize) -> usize {
        let group = group.max(1);
        (self.key_head + head / group) * self.group + self.member + head % group
    }
}

impl AttentionDropout {
    /// Ranks among whom heads are cut.
    pub(crate) fn head_ranks(&self) -> usize {
        (self.head_parts * self.group_parts).max(1)
    }

    /// The same wherever it is in a batch and a model, at the usual rate: it takes as long.
    pub(crate) fn without_place(self) -> Self {
        Self { site: DropoutSite::ANY, first_sample: 0, position_parts: 1, head_parts: 1, group_parts: 1, sample_parts: 1 }
    }
}

fn one() -> usize {
    1
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_one(parts: &usize) -> bool {
    *parts == 1
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that fails may panic")]

    use super::DropoutRate;

    #[test]
    fn a_rate_is_a_share_below_one_with_four_decimals() {
        for good in [0.0, 0.1, 0.2, 0.5, 0.3333, 0.9999] {
            assert_eq!(f64::from(DropoutRate::try_from(good).unwrap()), good);
        }
        for bad in [-0.1, 1.0, 1.5, 0.12345, f64::NAN, f64::INFINITY, 0.99999] {
            assert!(DropoutRate::try_from(bad).unwrap_err().contains("from 0 to below 1"), "{bad}");
        }
        assert_eq!(DropoutRate::try_from(0.5).unwrap().threshold(), 1 << 31);
        assert_eq!(DropoutRate::try_from(0.5).unwrap().scale(), 2.0);
        assert_eq!(DropoutRate::NONE.threshold(), 0);
    }
}
