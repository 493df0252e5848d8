//! Facts about a run under another software stack, on which costs depend besides the layout and the
//! sizes. The compiler ignores them; the simulator reads them.

use super::preference::Preference;
use super::routing::Routing;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Facts about a run under another software stack. Each has a default, so that a plan states only
/// what differs.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct PlannedWorkload {
    /// The number format of the operands of matrix products, if narrower than the precision.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub products: Option<OperandFormat>,
    /// The parameters that are trained.
    #[serde(skip_serializing_if = "Trained::is_all")]
    pub trains: Trained,
    /// True if the loss is computed operator by operator. It matters under stacks that can compile
    /// the loss.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub eager_loss: bool,
    /// The share of a sequence's tokens that are computed if padding is left out; the stack's
    /// default if `None`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unpadded: Option<f64>,
    /// The mean length of a document in tokens, if sequences pack several documents and tokens
    /// attend only to their own document. The mean is over tokens, so long documents count more.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub packed: Option<usize>,
    /// How evenly tokens choose experts, if no token is dropped.
    #[serde(skip_serializing_if = "Routing::is_balanced")]
    pub routing: Routing,
    /// The most nodes over which the experts of one token are spread (node-limited routing;
    /// DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 2.1.2). No limit if `None`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nodes_per_token: Option<usize>,
    /// True if parameters have no copy in single precision: the optimizer updates parameters in the
    /// narrow format, from gradients in the same format ("pure bf16").
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub no_master_copy: bool,
    /// The number format of the optimizer's moments.
    #[serde(skip_serializing_if = "MomentFormat::is_single")]
    pub moments: MomentFormat,
    /// True if the moments are in memory that device and host share, and are paged out to the host
    /// when the device has no space (bitsandbytes' paged optimizers). Only for stacks with operator
    /// tables.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub paged_moments: bool,
    /// True if a parameter is updated, and its gradient dropped, as soon as the backward pass has
    /// computed the gradient (torchtune's `optimizer_in_bwd`). Only for stacks with operator
    /// tables.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub updates_in_backward: bool,
    /// The attention kernel, for stacks whose users choose it; the stack's usual kernel if `None`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub attention: Option<AttentionKernel>,
    /// How the loss is computed, for stacks whose users choose it.
    #[serde(skip_serializing_if = "LossKernel::is_plain")]
    pub loss: LossKernel,
    /// Bits of the frozen weights of linear layers, where they are quantised (QLoRA: Dettmers et
    /// al. 2023): 4 for NF4 with double quantisation, 8 for LLM.int8 (Dettmers et al. 2022).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub base_bits: Option<u8>,
    /// The method of training on preferences, for stacks whose operators were traced.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub preference: Option<Preference>,
    /// True if the log-probabilities of the reference that preferences are compared with were
    /// computed before the training (TRL's `precompute_ref_log_probs`): the reference is then
    /// neither in memory nor part of a step.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub precomputed_reference: bool,
    /// Whether adapters have dropout on their input.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub adapter_dropout: bool,
    /// True if `stack` only stands in for another one without measured runs. The interval is then
    /// the wider one of such stacks.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub unknown_stack: bool,
}

impl PlannedWorkload {
    /// The name of the first stated field that selects kernels of a framework. Only frameworks with
    /// operator tables read these fields.
    pub fn stated_kernels(&self) -> Option<&'static str> {
        let stated = [
            ("attention", self.attention.is_some()),
            ("base_bits", self.base_bits.is_some()),
            ("preference", self.preference.is_some()),
            ("precomputed_reference", self.precomputed_reference),
            ("paged_moments", self.paged_moments),
            ("updates_in_backward", self.updates_in_backward),
            ("adapter_dropout", self.adapter_dropout),
            // `loss` comes last: profiles without operator tables support it, so fields that they
            // do not support must be found first.
            ("loss", !self.loss.is_plain()),
        ];
        stated.into_iter().find(|(_, is_stated)| *is_stated).map(|(name, _)| name)
    }

    /// The fine-tuning method that these facts state, if it is one that our own executor does not
    /// have.
    pub(super) fn method_of_others(&self) -> Option<&'static str> {
        match (self.preference, self.base_bits) {
            (Some(preference), _) => Some(preference.name()),
            (None, Some(4)) => Some("qlora"),
            (None, Some(_)) => Some("lora with base_bits"),
            (None, None) => None,
        }
    }

    /// Whether nothing is stated.
    pub fn is_usual(&self) -> bool {
        *self == Self::default()
    }
}

/// An attention kernel that users of a framework can choose.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum AttentionKernel {
    /// FlashAttention.
    Flash,
    /// PyTorch's `scaled_dot_product_attention`.
    Sdpa,
    /// Products and a softmax, as separate kernels.
    Eager,
}

/// How a loss over a vocabulary is computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum LossKernel {
    /// From all logits at once.
    #[default]
    Plain,
    /// From the logits of one chunk of positions after the other, with the framework's own kernels.
    Chunked,
    /// By Liger's kernel, which also fuses each norm, rotary embedding and gate into one kernel.
    Liger,
}

impl LossKernel {
    fn is_plain(&self) -> bool {
        *self == Self::Plain
    }

    /// The name in plan files.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::Chunked => "chunked",
            Self::Liger => "liger",
        }
    }
}

/// A number format of the optimizer's moments.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum MomentFormat {
    /// Single precision.
    #[default]
    Single,
    /// Sixteen bits.
    Half,
    /// Eight bits, with a scale in single precision for each block of 256 (Dettmers et al. 2022;
    /// bitsandbytes, torchao).
    EightBit,
    /// The second moment alone, as one number for each row and column, in single precision
    /// (Adafactor: Shazeer and Stern 2018).
    Factored,
}

impl MomentFormat {
    fn is_single(&self) -> bool {
        *self == Self::Single
    }

    /// The bytes of one moment of one element of a parameter. 0 for `Factored`, whose rows and
    /// columns are negligible.
    pub const fn bytes(self) -> f64 {
        match self {
            Self::Single => 4.0,
            Self::Half => 2.0,
            Self::EightBit => 1.0 + 4.0 / 256.0,
            Self::Factored => 0.0,
        }
    }
}

/// A number format of the operands of matrix products that is narrower than that of tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum OperandFormat {
    /// Floating point of eight bits, with one scale for each tensor.
    Fp8,
    /// The same with one scale for each row.
    Fp8ByRow,
    /// Eight bits with a scale for each block of 32.
    Mxfp8,
    /// Four bits with a scale for each block of 16.
    Nvfp4,
}

/// The parameters that are trained.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Trained {
    /// All of them.
    #[default]
    All,
    /// Only small adapters beside them (LoRA).
    Adapters,
}

impl Trained {
    fn is_all(&self) -> bool {
        *self == Self::All
    }
}
