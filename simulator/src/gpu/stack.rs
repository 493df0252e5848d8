//! Software stacks: what a framework makes of devices and links.

use super::format::ProductFormat;
use foretell_units::{Bytes, Seconds};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

fn half() -> ProductFormat {
    ProductFormat::Bf16
}

fn each() -> usize {
    1
}

fn selective() -> foretell_program::Recompute {
    foretell_program::Recompute::Selective
}

fn yes() -> bool {
    true
}

fn one() -> f64 {
    1.0
}

fn two() -> f64 {
    2.0
}

/// What kind of work an instruction is, as far as frameworks launch or fuse it differently.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Category {
    /// Matrix products and convolutions.
    Product,
    /// Attention.
    Attention,
    /// Collectives and messages.
    Exchange,
    /// Adding a bias.
    Bias,
    /// The sum of a gradient over rows, for a bias.
    BiasGradient,
    /// GELU, SiLU, ReLU and their gradients.
    Activation,
    /// Residual additions and dropout.
    Residual,
    /// Norms and their gradients.
    Norm,
    /// Rotary embedding.
    Rope,
    /// Rearranging: splits, joins, what gathers leave.
    Rearrange,
    /// Embedding look-ups.
    Embedding,
    /// Cross-entropy.
    Loss,
    /// Routing to experts and back.
    Routing,
    /// The optimizer.
    Optimizer,
    /// The gradient's norm, zeroing, narrowing and other work on whole buckets.
    Bucket,
    /// Pooling and everything else.
    Other,
}

/// How attention is computed.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum AttentionKind {
    /// One kernel (FlashAttention, cuDNN): so much of what the device's profile says it reaches.
    Fused {
        /// The share.
        scale: f64,
    },
    /// Products, softmax and dropout one after the other: bytes moved for each score, forward and backward.
    Unfused {
        /// Forward: products' scores, scale, mask, softmax, dropout.
        forward_bytes: f64,
        /// Backward.
        backward_bytes: f64,
        /// How many times as many they are in single precision: 2, or less where the softmax of half-precision runs is in single precision, too
        /// (autocast).
        #[serde(default = "two")]
        single: f64,
        /// Softmax is one kernel with scale and mask where a rank's sequences times heads are a multiple of this; elsewhere PyTorch's
        /// operators do it.
        #[serde(default = "each")]
        fused_by: usize,
    },
}

/// How a framework's memory differs from the Program's arena.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MemoryRules {
    /// Bytes of a parameter.
    pub parameter: f64,
    /// Bytes of its gradient.
    pub gradient: f64,
    /// The same in runs in IEEE half precision, where it is another.
    #[serde(default)]
    pub half_gradient: Option<f64>,
    /// Bytes of its optimizer state, master copy included.
    pub optimizer: f64,
    /// What activations take, as a share of the Program's.
    pub activations: f64,
    /// Bytes kept of each score of attention that is not fused: softmax, what dropout keeps and leaves.
    #[serde(default)]
    pub score: f64,
    /// Bytes kept of each logit beside the Program's: copies and gradients in single precision.
    #[serde(default)]
    pub logit: f64,
    /// The same beside that where the loss is not compiled ([`StackKind::has_eager_loss`]).
    #[serde(default)]
    pub eager_loss: f64,
    /// And beside that where ranks share out the vocabulary.
    #[serde(default)]
    pub eager_loss_of_parts: f64,
    /// Whether what ranks of `tensor` gather for a product is kept for the gradient of its weights, and not gathered again.
    #[serde(default)]
    pub keeps_gathered: bool,
    /// What it allocates whatever the model: buckets of a fixed size, workspaces.
    #[serde(default)]
    pub buffers: Bytes,
    /// CUDA's context, NCCL's buffers, cuBLAS's workspaces: in what the allocator does not count.
    pub context: Bytes,
    /// Reserved and not used by the allocator, as a share of what is allocated.
    pub fragmentation: f64,
    /// Whether peaks that it prints are of what its allocator holds, used or not, where a figure does not say which it is.
    #[serde(default)]
    pub prints_reserved: bool,
    /// Whether its memory is the Program's arena and nothing else: our own executor's.
    #[serde(default)]
    pub is_arena: bool,
}

/// A software stack.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StackKind {
    /// Of stacks that are built alike.
    pub family: String,
    /// The stack of the same software, run otherwise, with which it has more in common than with its family.
    #[serde(default)]
    pub variant_of: Option<String>,
    /// The share of the devices' product efficiency that its kernels reach.
    #[serde(default = "one")]
    pub product_scale: f64,
    /// The same beside [`StackKind::product_scale`], by device; 1 where none is stated.
    #[serde(default)]
    pub product: BTreeMap<String, f64>,
    /// The same, by the format of the product; 1 where none is stated.
    #[serde(default)]
    pub format: BTreeMap<ProductFormat, f64>,
    /// The share of that, that products of many experts in one kernel reach.
    #[serde(default = "one")]
    pub expert_product: f64,
    /// Kernels that the host launches for each expert's product: 1 where they are launched one by one, 0 where one kernel does all.
    #[serde(default)]
    pub expert_launches: f64,
    /// The time of exchanges of tokens between experts over what the links' rates give.
    #[serde(default = "one")]
    pub exchange: f64,
    /// Whether `tensor` leaves experts whole, which spread over it, unless the run says.
    #[serde(default)]
    pub whole_experts: bool,
    /// Whether a token that goes to several experts of one node crosses the network once (DeepEP, HybridEP).
    #[serde(default)]
    pub once_per_node: bool,
    /// How attention is computed.
    pub attention: AttentionKind,
    /// The bytes that memory-bound kernels move, as a share of the Program's; 1 where none is stated, 0 where they are fused away.
    #[serde(default)]
    pub traffic: BTreeMap<Category, f64>,
    /// The time of memory-bound kernels over what their bytes take: how far the stack's are from streaming.
    #[serde(default = "one")]
    pub elementwise: f64,
    /// The time of collectives and messages over what NCCL's rule and the links' rates give: other traffic, skew between ranks.
    #[serde(default = "one")]
    pub communication: f64,
    /// What a collective of `tensor` that nothing overlaps takes longer for each doubling of its ranks: it waits for the last of them.
    #[serde(default)]
    pub tensor_wait: Seconds,
    /// Kernels that the host launches for an instruction of each of these kinds; 1 where none is stated.
    #[serde(default)]
    pub launches: BTreeMap<Category, f64>,
    /// What the host needs to launch a kernel. It runs ahead of the device as far as it can.
    pub host_launch: Seconds,
    /// What a launch in the backward pass takes of that: less where autograd launches it from compiled code.
    #[serde(default = "one")]
    pub backward_launch: f64,
    /// Whether the host waits for the device between the passes of a micro-batch (Megatron's timers did).
    #[serde(default)]
    pub waits_between_passes: bool,
    /// Whether the host waits for messages between stages before it launches more.
    #[serde(default)]
    pub waits_for_messages: bool,
    /// What the host needs between two micro-batches of a stage (schedule, timers, loss).
    #[serde(default)]
    pub micro_batch_overhead: Seconds,
    /// What a step takes beside all that.
    pub step_overhead: Seconds,
    /// What communication runs beside kernels, where the plan does not say.
    pub overlap: foretell_program::Overlap,
    /// How much longer kernels take beside communication.
    pub compute_slowdown: f64,
    /// How much longer communication takes beside kernels.
    pub communication_slowdown: f64,
    /// Bytes of a gradient's element on the network.
    pub gradient_bytes: f64,
    /// Whether parameters are gathered in the narrow format of products, where they have one.
    #[serde(default)]
    pub narrow_gather: bool,
    /// Whether what ranks of `tensor` gather of a sequence is in the narrow format of products, where they have one.
    #[serde(default)]
    pub narrow_operands: bool,
    /// Bytes moved to cast one element of an operand to a narrow format.
    #[serde(default)]
    pub cast_bytes: f64,
    /// The format of matrix products, where the run does not say.
    #[serde(default = "half")]
    pub precision: ProductFormat,
    /// Bytes of parameters or gradients that are communicated together; more than a block has is all of the block.
    pub bucket: Bytes,
    /// What is computed again, where the run does not say.
    #[serde(default)]
    pub recompute: foretell_program::Recompute,
    /// Whether that holds whatever a run says: of runs whose times contradict what is said of them.
    #[serde(default)]
    pub recomputes_as_known: bool,
    /// What is computed again where the run says `selective`: each framework means something else.
    #[serde(default = "selective")]
    pub selective: foretell_program::Recompute,
    /// Whether, where the run does not say, more is computed again than that if it would not fit into the device's memory.
    #[serde(default)]
    pub recompute_to_fit: bool,
    /// Whether Megatron's sequence parallelism is on where tensor parallelism is, unless the run says.
    #[serde(default)]
    pub sequence_parallel: bool,
    /// Whether each rank of `context` has as much of a causal sequence to do as any other, as frameworks share it out: a part from its beginning
    /// and one from its end (Megatron Core, torchtitan). Our own executor's parts are contiguous, so that the last has the most.
    #[serde(default = "yes")]
    pub balances_parts: bool,
    /// The vocabulary is made a multiple of this and the tensor-parallel size together; 1 where it is left as it is.
    #[serde(default = "each")]
    pub vocabulary_multiple: usize,
    /// The share of BERT's longest sequences (512) that is computed: less than 1 where padding is left out, wholly or by bins of lengths.
    #[serde(default = "one")]
    pub sequence_share: f64,
    /// What a message takes longer where ranks of `tensor` send parts of it, which the receivers put together (DeepSpeed's partitioned tensors, whose
    /// sizes the host waits for).
    #[serde(default)]
    pub partitioned_message: Seconds,
    /// The share of product efficiency in eight bits that is left where they are scaled by row.
    #[serde(default = "one")]
    pub scaled_by_row: f64,
    /// Whether they are in this run.
    #[serde(skip)]
    pub scales_by_row: bool,
    /// Bytes of a message between stages for each byte of the Program's: 2 where activations travel in single precision.
    #[serde(default = "one")]
    pub message_scale: f64,
    /// Whether the loss of this run is computed operator by operator, of a stack that can compile it.
    #[serde(skip)]
    pub has_eager_loss: bool,
    /// How its memory differs from the Program's.
    pub memory: MemoryRules,
    /// The 10th and 90th percentile of a measurement over its prediction, from the rows that it was fitted on.
    pub spread: [f64; 2],
    /// Where the figures are from.
    pub source: String,
    /// Whether it was fitted on measurements.
    #[serde(default)]
    pub estimated: bool,
}

impl StackKind {
    /// The share of a device's product efficiency.
    pub fn product_share(&self, device: &str, format: ProductFormat) -> f64 {
        let by_row = if self.scales_by_row && format == ProductFormat::Fp8 { self.scaled_by_row } else { 1.0 };
        self.product_scale * self.product.get(device).copied().unwrap_or(1.0) * self.format_of(format) * by_row
    }

    /// The share of product efficiency in a format, beside other shares.
    pub fn format_of(&self, format: ProductFormat) -> f64 {
        self.format.get(&format).copied().unwrap_or(1.0)
    }

    /// The share of a kind's bytes that are moved.
    pub fn traffic_of(&self, category: Category) -> f64 {
        self.traffic.get(&category).copied().unwrap_or(1.0)
    }

    /// Kernels launched for an instruction of a kind.
    pub fn launches_of(&self, category: Category) -> f64 {
        self.launches.get(&category).copied().unwrap_or(1.0)
    }
}
