//! Facts about a run under another software stack that costs depend on, besides the layout and the
//! sizes. The compiler ignores them; the simulator reads them.

use super::preference::Preference;
use super::routing::Routing;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Facts about a run under another software stack. Each has a default, so that a plan states what
/// differs only.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct PlannedWorkload {
    /// The number format of the operands of matrix products, if narrower than the precision.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub products: Option<OperandFormat>,
    /// The parameters that are trained.
    #[serde(skip_serializing_if = "Trained::is_all")]
    pub trains: Trained,
    /// True if the loss is computed operator by operator, under a stack that can compile it.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub eager_loss: bool,
    /// The share of a sequence's tokens that are computed, if padding is left out; the stack's if
    /// `None`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unpadded: Option<f64>,
    /// Tokens of a document, where each sequence packs several and tokens attend to their own
    /// document alone. The mean over tokens, so that long documents count more.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub packed: Option<usize>,
    /// How evenly tokens choose experts, where no token is dropped.
    #[serde(skip_serializing_if = "Routing::is_balanced")]
    pub routing: Routing,
    /// Nodes on which the experts of a token lie at most (node-limited routing; DeepSeek-AI 2024,
    /// "DeepSeek-V3 Technical Report", section 2.1.2). No limit if `None`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nodes_per_token: Option<usize>,
    /// True if parameters have no copy in single precision: the optimizer updates the narrow ones,
    /// from gradients in the same format ("pure bf16").
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub no_master_copy: bool,
    /// The number format of the optimizer's moments.
    #[serde(skip_serializing_if = "MomentFormat::is_single")]
    pub moments: MomentFormat,
    /// True if the moments lie in memory that device and host share, which leaves the device where
    /// it has no room (bitsandbytes' paged optimizers), under a stack.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub paged_moments: bool,
    /// True if a parameter is updated, and its gradient dropped, as soon as the backward pass has
    /// made that (torchtune's `optimizer_in_bwd`), under a stack.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub updates_in_backward: bool,
    /// The attention kernel, under a stack whose users choose it; the stack's usual one if `None`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub attention: Option<AttentionKernel>,
    /// How the loss is computed, under a stack whose users choose it.
    #[serde(skip_serializing_if = "LossKernel::is_plain")]
    pub loss: LossKernel,
    /// Bits of the frozen weights of linear layers, where they are quantised (QLoRA: Dettmers et
    /// al. 2023): 4 for NF4 with double quantisation, 8 for LLM.int8 (Dettmers et al. 2022).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub base_bits: Option<u8>,
    /// The preferences that are trained on, under a stack whose operators were traced.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub preference: Option<Preference>,
    /// True if the log-probabilities of the reference that preferences are compared with were
    /// computed before the training (TRL's `precompute_ref_log_probs`): it is neither in memory nor
    /// part of a step.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub precomputed_reference: bool,
    /// Whether adapters drop some of their input, under a stack.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub adapter_dropout: bool,
    /// True if the interval is that of stacks without measured runs: the stack only stands in.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub unknown_stack: bool,
}

impl PlannedWorkload {
    /// The fields that say which kernels of a framework run, and that only frameworks with operator
    /// tables read: the name of the first that is stated.
    pub fn stated_kernels(&self) -> Option<&'static str> {
        let stated = [
            ("attention", self.attention.is_some()),
            ("base_bits", self.base_bits.is_some()),
            ("preference", self.preference.is_some()),
            ("precomputed_reference", self.precomputed_reference),
            ("paged_moments", self.paged_moments),
            ("updates_in_backward", self.updates_in_backward),
            ("adapter_dropout", self.adapter_dropout),
            // The last: profiles know what a loss in parts keeps.
            ("loss", !self.loss.is_plain()),
        ];
        stated.into_iter().find(|(_, is_stated)| *is_stated).map(|(name, _)| name)
    }

    /// The method of fine-tuning that these facts are of, which only other software trains by.
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

/// An attention kernel that users of a framework choose among.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum AttentionKernel {
    /// FlashAttention.
    Flash,
    /// PyTorch's `scaled_dot_product_attention`.
    Sdpa,
    /// Products and a softmax, each a kernel.
    Eager,
}

/// How a loss over a vocabulary is computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum LossKernel {
    /// From all logits at once.
    #[default]
    Plain,
    /// From the logits of some positions at a time, with the framework's own kernels.
    Chunked,
    /// By Liger's kernel, which also makes norms, rotary embeddings and gates one kernel each.
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
    /// The second one alone, as one number for each row and column, in single precision (Adafactor:
    /// Shazeer and Stern 2018).
    Factored,
}

impl MomentFormat {
    fn is_single(&self) -> bool {
        *self == Self::Single
    }

    /// The bytes of a moment of one parameter.
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
