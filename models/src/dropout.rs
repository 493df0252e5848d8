//! Dropout (Srivastava et al. 2014): its rate, and the part of the whole that one rank has, of an
//! activation or of attention's probabilities. It does not know how layouts lead to such parts.

use crate::defaults::{is_one, one};
use crate::zigzag::Zigzag;
use foretell_units::diagnostic::{Mistake, deserialize_from};
use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize};

/// The share of elements that dropout drops: from 0 to below 1, in ten-thousandths.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, JsonSchema)]
#[serde(try_from = "f64", into = "f64")]
pub struct DropoutRate {
    ten_thousandths: u16,
}

impl DropoutRate {
    /// No dropout.
    pub const NONE: Self = Self { ten_thousandths: 0 };

    /// One tenth, the usual rate of transformers.
    pub const TENTH: Self = Self { ten_thousandths: 1000 };

    /// Whether nothing is dropped.
    pub const fn is_none(&self) -> bool {
        self.ten_thousandths == 0
    }

    /// Returns the share that is dropped.
    pub fn value(self) -> f64 {
        f64::from(self.ten_thousandths) / 1e4
    }

    /// Returns the factor on elements that are kept, which preserves the mean of a sum.
    pub fn scale(self) -> f32 {
        (1.0 / (1.0 - self.value())) as f32
    }

    /// Returns the bound below which a uniformly distributed 32-bit number drops its element.
    pub fn threshold(self) -> u32 {
        ((u64::from(self.ten_thousandths) << 32) / 10_000) as u32
    }
}

impl<'de> Deserialize<'de> for DropoutRate {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserialize_from::<f64, _, _>(deserializer)
    }
}

impl TryFrom<f64> for DropoutRate {
    type Error = Mistake;

    fn try_from(rate: f64) -> Result<Self, Mistake> {
        let ten_thousandths = (rate * 1e4).round();
        if (0.0..1e4).contains(&ten_thousandths) && (rate * 1e4 - ten_thousandths).abs() < 1e-6 {
            return Ok(Self { ten_thousandths: ten_thousandths as u16 });
        }
        Err(Mistake::new(
            format!("`dropout` is {rate}"),
            "it is a number from 0 to below 1 with at most four decimals, such as 0.1",
        ))
    }
}

impl From<DropoutRate> for f64 {
    fn from(rate: DropoutRate) -> f64 {
        rate.value()
    }
}

/// One dropout of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct DropoutSite {
    /// The share that is dropped.
    pub rate: DropoutRate,
    /// Index among the model's dropouts.
    pub site: usize,
}

impl DropoutSite {
    /// The site for which kernels are timed.
    pub(crate) const TIMED: Self = Self { rate: DropoutRate::TENTH, site: 0 };
}

/// Sizes of a dropout on one rank, and the part of the whole that the rank has.
///
/// The whole is `[samples of the global batch, parts * positions, features]`. The rank's sample `s`
/// is number `first_sample + samples_before + s` of the batch. Its first position is stored at
/// index `part * positions`. A call gives `samples_before`, the micro-batch's samples on earlier
/// ranks, and `part`.
///
/// An element is kept or dropped by a hash of seed, step, site, sample number and the element's
/// index in its sample. The result is thus the same in every layout, in the gradient and in a
/// recomputation, and no mask is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Dropout {
    /// Number in the global batch of the micro-batch's first sample on any rank.
    pub first_sample: usize,
    /// Samples on this rank.
    pub samples: usize,
    /// Positions of a sample on this rank. For a tensor without a sequence these are its features.
    pub positions: usize,
    /// Features of a position. 1 for a tensor without a sequence.
    pub features: usize,
    /// Parts into which ranks have cut the positions.
    pub parts: usize,
    /// Parts into which the ranks of the group have cut the samples. This part varies fastest with
    /// a rank's index in the group.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub sample_parts: usize,
    /// The order of the positions, if it is not their own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub zigzag: Option<Zigzag>,
    /// The rate, and which dropout of the model it is.
    #[serde(flatten)]
    pub site: DropoutSite,
}

impl Dropout {
    /// Returns the elements of the input, and of the output.
    pub fn elements(&self) -> usize {
        self.samples * self.positions * self.features
    }

    /// The sizes as they are timed. Neither the rate nor the part of the whole change the time.
    pub(crate) fn without_constants(self) -> Self {
        Self { first_sample: 0, parts: 1, sample_parts: 1, zigzag: None, site: DropoutSite::TIMED, ..self }
    }
}

/// Dropout of attention's probabilities on one rank, and the part of the whole that the rank has.
///
/// A probability is kept or dropped by a hash of seed, step, site, sample number in the global
/// batch, query head, query position and key position. The result is thus the same in every layout,
/// in the gradient and in a recomputation, and no mask is stored.
///
/// With a rank's index in its group the part of the samples varies fastest, then the part of each
/// key head's queries, then that of the key heads, then that of the positions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct AttentionDropout {
    /// The rate, and which dropout of the model it is.
    #[serde(flatten)]
    pub site: DropoutSite,
    /// Number in the global batch of the micro-batch's first sample on any rank. In a kernel of
    /// only some of a rank's samples it is larger by the number of samples before them.
    pub first_sample: usize,
    /// Parts into which ranks have cut the positions.
    pub position_parts: usize,
    /// Parts into which ranks have cut the key heads.
    pub head_parts: usize,
    /// Parts into which ranks have cut the query heads of each key head.
    pub group_parts: usize,
    /// Parts into which the ranks of the group have cut the samples.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub sample_parts: usize,
}

impl AttentionDropout {
    /// Returns the number of ranks among which heads are cut.
    pub(crate) fn head_ranks(&self) -> usize {
        (self.head_parts * self.group_parts).max(1)
    }

    /// The sizes as they are timed. Neither the rate nor the part of the whole change the time.
    pub(crate) fn without_constants(self) -> Self {
        Self { site: DropoutSite::TIMED, first_sample: 0, position_parts: 1, head_parts: 1, group_parts: 1, sample_parts: 1 }
    }
}

/// Where in the whole a rank's attention begins. Its dropout depends on that.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionPlace {
    /// First sample, as its number in the global batch.
    pub sample: usize,
    /// First position of the queries; with a zigzag order its index.
    pub query: usize,
    /// First position of the keys; with a zigzag order its index.
    pub key: usize,
    /// First head of keys and values.
    pub key_head: usize,
    /// First query head of each key head.
    pub member: usize,
    /// Query heads of each key head over all ranks.
    pub group: usize,
}

impl AttentionPlace {
    /// Returns the number over all ranks of this rank's query head `head`. `group` is the number of
    /// query heads of each key head on this rank.
    pub fn head(&self, head: usize, group: usize) -> usize {
        let group = group.max(1);
        (self.key_head + head / group) * self.group + self.member + head % group
    }
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
            assert!(DropoutRate::try_from(bad).unwrap_err().hint.contains("from 0 to below 1"), "{bad}");
        }
        assert_eq!(DropoutRate::try_from(0.5).unwrap().threshold(), 1 << 31);
        assert_eq!(DropoutRate::try_from(0.5).unwrap().scale(), 2.0);
        assert_eq!(DropoutRate::NONE.threshold(), 0);
    }
}
