//! The choices of a decoder: norms, positions, feed-forward networks, mixtures of experts.

use super::super::Check;
use crate::builder::MixtureShape;
use crate::defaults::{is_false, one};
use crate::error::ModelError;
use crate::kernel::Epsilon;
use foretell_units::diagnostic::{Mistake, deserialize_from};
use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize};

/// Kind of a norm.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum NormKind {
    /// Each position over its root mean square, with a scale.
    #[default]
    Rms,
    /// Layer normalisation, with a scale and a shift.
    Layer,
    /// Layer normalisation with a scale alone, as in MPT and Command R.
    LayerWithoutShift,
}

/// The number that a norm adds to the variance: a power of ten.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(try_from = "f64", into = "f64")]
pub struct NormEpsilon(u8);

impl NormEpsilon {
    /// One millionth.
    pub const MILLIONTH: Self = Self(6);

    /// The number as kernels take it.
    pub(crate) fn epsilon(self) -> Epsilon {
        Epsilon::new(self.0)
    }
}

impl Default for NormEpsilon {
    /// 1e-5, as in Llama 2 and 3.
    fn default() -> Self {
        Self(5)
    }
}

impl<'de> Deserialize<'de> for NormEpsilon {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserialize_from::<f64, _, _>(deserializer)
    }
}

impl TryFrom<f64> for NormEpsilon {
    type Error = Mistake;

    fn try_from(number: f64) -> Result<Self, Mistake> {
        let found = (1..=30).find(|&digits: &u8| (number * 10f64.powi(i32::from(digits)) - 1.0).abs() < 1e-9);
        found.map(Self).ok_or_else(|| Mistake::new(format!("`norm_epsilon` is {number}"), "give a power of ten, such as 1e-5"))
    }
}

impl From<NormEpsilon> for f64 {
    fn from(epsilon: NormEpsilon) -> f64 {
        10f64.powi(-i32::from(epsilon.0))
    }
}

/// How the model knows positions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum PositionKind {
    /// Queries and keys are rotated (Su et al. 2021).
    #[default]
    Rotary,
    /// A table is added to the embedding.
    Learned,
    /// Scores fall with the distance (Press et al. 2022).
    Alibi,
    /// Not at all.
    None,
}

/// A feed-forward network: its activation, and whether a second product gates it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum FeedForward {
    /// SwiGLU (Shazeer 2020).
    #[default]
    GatedSilu,
    /// A gate with GELU's tanh approximation, as in Gemma.
    GatedGeluTanh,
    /// GELU as defined.
    Gelu,
    /// GELU by its tanh approximation.
    GeluTanh,
    /// `max(0, x)`.
    Relu,
    /// `max(0, x)²`, as in Nemotron.
    SquaredRelu,
}

impl FeedForward {
    /// Whether a second product gates the activation.
    pub fn is_gated(self) -> bool {
        matches!(self, Self::GatedSilu | Self::GatedGeluTanh)
    }
}

/// Whether attention and the feed-forward network of a layer read the same input.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ParallelBlock {
    /// In sequence: the feed-forward network reads the residual stream after attention.
    #[default]
    None,
    /// Both read one norm of the layer's input, as in Phi and Falcon 7B.
    OneNorm,
    /// Each has its own norm of the layer's input, as in GPT-NeoX.
    OwnNorms,
}

impl ParallelBlock {
    /// Whether the parts of a layer follow each other.
    pub fn is_none(&self) -> bool {
        *self == Self::None
    }
}

/// The layers that are mixtures of experts, and their sizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Mixtures {
    /// Experts of a mixture.
    pub experts: usize,
    /// Experts that a token is sent to.
    pub top_k: usize,
    /// Inner width of an expert.
    pub ffn: usize,
    /// Inner width of all shared experts together, to which every token goes. `None`: there are
    /// none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shared_ffn: Option<usize>,
    /// Whether a gate of each token weighs what the shared experts give, as in Qwen2's mixtures.
    #[serde(default, skip_serializing_if = "is_false")]
    pub shared_gate: bool,
    /// Period of mixtures among the layers after the first dense ones: the last layer of each
    /// period is a mixture, the others are dense.
    #[serde(default = "one")]
    pub every: usize,
    /// Dense layers before the first period.
    #[serde(default)]
    pub first: usize,
    /// Ratio of an expert's slots to the slots that balanced routing needs.
    #[serde(default)]
    pub capacity_factor: CapacityFactor,
    /// Whether the router has a bias, as in gpt-oss.
    #[serde(default, skip_serializing_if = "is_false")]
    pub router_bias: bool,
    /// Whether each expert's products have biases, as in gpt-oss.
    #[serde(default, skip_serializing_if = "is_false")]
    pub expert_bias: bool,
    /// Whether the gates of the chosen experts keep their values from the softmax over all experts.
    /// Otherwise they are normalised to a sum of 1.
    #[serde(default, skip_serializing_if = "is_false")]
    pub unnormalised_gates: bool,
}

/// The most experts of a mixture.
const MOST_EXPERTS: usize = 1 << 14;

/// An expert with at least this many slots has a multiple of [`SLOT_GRANULE`], so that ranks which
/// shard the sequence can shard the slots.
const MANY_SLOTS: usize = 256;

const SLOT_GRANULE: usize = 16;

impl Mixtures {
    /// Whether the layer of this index is a mixture.
    pub(crate) fn includes(&self, layer: usize) -> bool {
        layer >= self.first && (layer - self.first + 1).is_multiple_of(self.every)
    }

    /// Slots of an expert for a sample of this many positions: at most the positions, since an
    /// expert gets each token at most once.
    pub fn slots(&self, sequence: usize) -> usize {
        let balanced = sequence as f64 * self.top_k as f64 / self.experts as f64;
        let slots = (f64::from(self.capacity_factor) * balanced).ceil() as usize;
        let slots = if slots >= MANY_SLOTS { slots.next_multiple_of(SLOT_GRANULE) } else { slots };
        slots.clamp(1, sequence)
    }

    /// The sizes of a mixture for samples of this many positions.
    pub(super) fn shape(&self, sequence: usize) -> MixtureShape {
        MixtureShape { experts: self.experts, top: self.top_k, slots_per_sample: self.slots(sequence) }
    }

    /// Refuses sizes that no graph can be built from.
    pub(super) fn validate(&self, check: &Check<'_>) -> Result<(), ModelError> {
        let Self { experts, top_k, ffn, shared_ffn, every, .. } = *self;
        check.sizes(&[
            ("ffn", ffn),
            ("shared_ffn", shared_ffn.unwrap_or(1)),
            ("experts", experts),
            ("top_k", top_k),
            ("moe_every", every),
        ])?;
        if top_k > experts || experts > MOST_EXPERTS {
            return check.refuse(
                format!("each token goes to {top_k} of {experts} experts"),
                "`top_k` is at most `experts`, and that at most 16,384",
            );
        }
        Ok(())
    }
}

/// Ratio of the experts' slots to those that balanced routing needs: a positive, finite number.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, JsonSchema)]
#[serde(try_from = "f64", into = "f64")]
pub struct CapacityFactor(f64);

// The number is never NaN.
impl Eq for CapacityFactor {}

impl CapacityFactor {
    /// As many slots as balanced routing needs: what a framework that drops no token computes.
    pub const BALANCED: Self = Self(1.0);
}

impl Default for CapacityFactor {
    /// The usual factor of Switch Transformer (Fedus et al. 2021).
    fn default() -> Self {
        Self(1.25)
    }
}

impl<'de> Deserialize<'de> for CapacityFactor {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserialize_from::<f64, _, _>(deserializer)
    }
}

impl TryFrom<f64> for CapacityFactor {
    type Error = Mistake;

    fn try_from(factor: f64) -> Result<Self, Mistake> {
        if factor > 0.0 && factor <= 1e6 {
            return Ok(Self(factor));
        }
        let hint = "give a number above 0 and at most 1,000,000, such as 1.25";
        Err(Mistake::new(format!("`capacity_factor` is {factor}"), hint))
    }
}

impl From<CapacityFactor> for f64 {
    fn from(factor: CapacityFactor) -> f64 {
        factor.0
    }
}
