//! Costs of a framework's kernels, host and communication.

use crate::gpu::category::Category;
use crate::gpu::defaults::one;
use crate::gpu::format::ProductFormat;
use foretell_units::Seconds;
use serde::Deserialize;
use std::collections::BTreeMap;

fn two() -> f64 {
    2.0
}

fn always() -> usize {
    1
}

/// Costs of matrix products.
#[derive(Clone, Debug, Deserialize)]
pub struct ProductCosts {
    /// Ratio of the product efficiency that the stack's kernels reach to that in the device's
    /// profile.
    #[serde(default = "one")]
    pub product_scale: f64,
    /// Further factor on product efficiency by device. 1 without an entry.
    #[serde(default)]
    pub product: BTreeMap<String, f64>,
    /// Further factor on product efficiency by number format. 1 without an entry.
    #[serde(default)]
    pub format: BTreeMap<ProductFormat, f64>,
    /// Further factor on the efficiency of fp8 products that are scaled by row.
    #[serde(default = "one")]
    pub scaled_by_row: f64,
    /// Further factor on the efficiency of the products of experts.
    #[serde(default = "one")]
    pub expert_product: f64,
    /// Kernels that the host launches per expert: 1 if each expert's product is a kernel of its
    /// own, 0 if one kernel computes all.
    #[serde(default)]
    pub expert_launches: f64,
    /// Bytes moved to cast an element of an operand to a narrow format.
    #[serde(default)]
    pub cast_bytes: f64,
}

/// Implementation of attention.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum AttentionKind {
    /// A single kernel, such as FlashAttention's or cuDNN's.
    Fused {
        /// Ratio of the efficiency to that in the device's profile.
        scale: f64,
        /// True if the kernel is written for Ampere's instructions, as FlashAttention-2 and kernels
        /// in Triton are. `ampere_attention` of [`GpuProfile`](crate::gpu::GpuProfile) says what
        /// that costs on the device.
        #[serde(default)]
        for_ampere: bool,
    },
    /// Separate products, softmax and dropout.
    Unfused {
        /// Bytes moved per score in the forward pass: by the products, scale, mask, softmax and
        /// dropout.
        forward_bytes: f64,
        /// Bytes moved per score in the backward pass.
        backward_bytes: f64,
        /// Factor on these bytes in single precision. 2, or less if the softmax of half-precision
        /// runs is in single precision as well (autocast).
        #[serde(default = "two")]
        single: f64,
        /// Scale, mask and softmax are one kernel if the product of a rank's sequences and heads is
        /// a multiple of this. Otherwise PyTorch's operators compute them one by one.
        #[serde(default = "always")]
        fused_by: usize,
    },
}

/// Costs of kernels that are bound by memory.
#[derive(Clone, Debug, Deserialize)]
pub struct MemoryBoundCosts {
    /// Ratio of the bytes that kernels of a category move to the Program's bytes. 1 without an
    /// entry, 0 if the kernels are fused away.
    #[serde(default)]
    pub traffic: BTreeMap<Category, f64>,
    /// Ratio of the kernels' time to the time in which memory would stream their bytes.
    #[serde(default = "one")]
    pub elementwise: f64,
}

/// Costs of the host, which launches kernels ahead of the device where it can.
#[derive(Clone, Debug, Deserialize)]
pub struct HostCosts {
    /// Kernels launched for an instruction, by category. 1 without an entry.
    #[serde(default)]
    pub launches: BTreeMap<Category, f64>,
    /// Host time of a kernel launch.
    pub host_launch: Seconds,
    /// Factor on `host_launch` in the backward pass. Less than 1 if autograd launches kernels from
    /// compiled code.
    #[serde(default = "one")]
    pub backward_launch: f64,
    /// True if the host waits for the device between the passes of a micro-batch, as Megatron's
    /// timers made it do.
    #[serde(default)]
    pub waits_between_passes: bool,
    /// True if the host waits for messages between stages before it launches further kernels.
    #[serde(default)]
    pub waits_for_messages: bool,
    /// Host time between two micro-batches of a stage: schedule, timers, loss.
    #[serde(default)]
    pub micro_batch_overhead: Seconds,
    /// Fixed time of a step.
    pub step_overhead: Seconds,
}

/// Costs of collectives and messages.
#[derive(Clone, Debug, Deserialize)]
pub struct CommunicationCosts {
    /// Ratio of the time of collectives and messages to that of NCCL's rule. It covers other
    /// traffic and skew between ranks.
    #[serde(default = "one")]
    pub communication: f64,
    /// Further factor on the time of the all-to-alls of experts.
    #[serde(default = "one", rename = "exchange")]
    pub expert_all_to_all: f64,
    /// True if a token that goes to several experts of one node crosses the network once (DeepEP,
    /// HybridEP).
    #[serde(default)]
    pub once_per_node: bool,
    /// Time that a collective over `tensor` waits for the slowest rank, for each doubling of the
    /// number of ranks.
    #[serde(default)]
    pub tensor_wait: Seconds,
    /// Slowdown of kernels beside communication: 0.1 means 10 % longer.
    pub compute_slowdown: f64,
    /// Slowdown of communication beside kernels.
    pub communication_slowdown: f64,
    /// Bytes per element of a gradient on the network.
    pub gradient_bytes: f64,
    /// True if parameters are gathered in the narrow format of products, if that is narrow.
    #[serde(default)]
    pub narrow_gather: bool,
    /// True if sequence-parallel products gather their input in the narrow format of products, if
    /// that is narrow.
    #[serde(default)]
    pub narrow_operands: bool,
    /// Ratio of the bytes of a message between stages to the Program's: 2 if activations are sent
    /// in single precision.
    #[serde(default = "one")]
    pub message_scale: f64,
    /// Additional time of a message between stages if the ranks of `tensor` each send a part of it,
    /// which the receivers concatenate. DeepSpeed's host waits for the sizes of such partitioned
    /// tensors.
    #[serde(default)]
    pub partitioned_message: Seconds,
}
