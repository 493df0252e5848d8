//! How long a kernel takes on a device under a software stack, and which of its work the stack fuses away.

use super::format::ProductFormat;
use super::nccl::Reachable;
use super::product::{Product, product_time};
use super::profile::Cluster;
use super::stack::{AttentionKind, Category, StackKind};
use foretell_models::{Attention, Kernel, KernelFamily, Window};
use foretell_program::{Collective, CollectiveAlgorithm, CollectiveRole, Phase};
use foretell_units::{DataType, Seconds};

/// Tiles of queries that FlashAttention's kernels hand to multiprocessors.
const QUERY_TILE: usize = 128;
/// What columns, and what is summed over, are multiples of in products of eight bits (cuBLASLt: sixteen bytes).
const EIGHT_BITS_GRANULE: usize = 16;
/// Waves of such tiles at which half of the efficiency is reached: fits `bf16_op_efficiency.csv`, 4 to 128 heads.
const HALF_WAVES: f64 = 1.2;
/// The share of their rate that products of sixteen bits keep whose weights have an odd dimension, so that rows begin at addresses from which
/// tensor cores' loads cannot take two elements at a time. GPT's 50,257 words, made a multiple of nothing, take 4.7 ms for a sequence and each
/// 1,024 features on vTrain's A100s (`benches/vtrain_slopes.py`): 68 of 312 TFLOP/s, where products of layers reach some 213.
const UNEVEN: f64 = 0.32;
/// Kernels beside the one of a fused softmax, in each pass, where PyTorch's operators do it: cast, scale, mask, softmax and cast
/// (`forward_torch_softmax` in Megatron's fused_softmax.py).
const SOFTMAX_OPERATORS: f64 = 4.0;
/// Bytes of a score that these read and write beside what that one does: 2 + 4, 4 + 4, 4 + 4, 4 + 4 and 4 + 2 for its 2 + 2.
const SOFTMAX_BYTES: f64 = 32.0;
/// How much of its efficiency fused attention keeps with heads narrower than 128: half of them at half the width loses 15 %
/// (Dao 2023, figures 4 to 6).
const NARROW_HEADS: f64 = 0.23;

/// Durations of the kernels of one stack on one cluster.
#[derive(Clone, Copy, Debug)]
pub struct GpuCosts<'a> {
    /// Devices and links.
    pub cluster: &'a Cluster,
    /// The framework.
    pub stack: &'a StackKind,
    /// The format of matrix products.
    pub format: ProductFormat,
    /// What of the run decides on costs beside kernels' sizes.
    pub workload: Workload,
}

/// What of a run decides on costs beside kernels' sizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Workload {
    /// Experts that a token goes to, in models that have any.
    pub copies: usize,
    /// What is trained.
    pub trained: Trained,
    /// Ranks of `tensor`, each of which sends a part of what goes from stage to stage.
    pub tensor: usize,
}

impl Default for Workload {
    fn default() -> Self {
        Self { copies: 1, trained: Trained::All, tensor: 1 }
    }
}

/// Which parameters are trained.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Trained {
    /// All of them.
    #[default]
    All,
    /// Adapters beside them (LoRA), which are small: no gradients of the others are made, summed or applied.
    Adapters,
}

impl GpuCosts<'_> {
    /// What the device takes for an instruction's kernels, and what the host takes to launch them; nothing where the stack fuses them away.
    pub fn kernel_time(&self, kernel: &Kernel, accumulate: bool, precision: DataType) -> KernelTime {
        let (device, kernels, category) = self.device_time(kernel, accumulate, precision);
        if kernels == 0.0 || (self.workload.trained == Trained::Adapters && is_of_parameters(kernel, category)) {
            return KernelTime::default();
        }
        let launches = kernels * self.stack.launches_of(category);
        KernelTime { device: device + self.cluster.gpu.launch * kernels, host: self.stack.host_launch * launches }
    }

    /// What the host takes for a launch in a phase over what it takes in the forward pass.
    pub fn launch_share(&self, phase: Phase) -> f64 {
        if phase == Phase::Backward { self.stack.backward_launch } else { 1.0 }
    }

    /// What the host takes to launch a collective or a message.
    pub fn exchange_launch(&self) -> Seconds {
        self.stack.host_launch * self.stack.launches_of(Category::Exchange)
    }

    /// What travels of a collective's bytes in the Program, whose gradients are in single precision and whose parameters are in that of
    /// activations.
    pub fn travelling(&self, kind: Collective, role: CollectiveRole) -> f64 {
        let of_parameters = matches!(role, CollectiveRole::Gradients | CollectiveRole::Parameters);
        match role {
            _ if of_parameters && self.workload.trained == Trained::Adapters => 0.0,
            CollectiveRole::Gradients => self.stack.gradient_bytes / 4.0,
            CollectiveRole::Parameters if self.stack.narrow_gather && self.format.is_cast() => 0.5,
            // What a sequence-parallel product gathers is its operand.
            CollectiveRole::Tensor if kind == Collective::AllGather && self.stack.narrow_operands && self.format.is_cast() => {
                self.format.bytes() / 2.0
            }
            _ => 1.0,
        }
    }

    /// What a collective of so many bytes in the Program takes under this stack.
    pub fn collective_time(
        &self,
        kind: Collective,
        role: CollectiveRole,
        group: &Reachable,
        bytes: f64,
        algorithm: CollectiveAlgorithm,
    ) -> Seconds {
        let travelling = self.travelling(kind, role);
        if travelling == 0.0 {
            return Seconds::ZERO;
        }
        let bytes = bytes * travelling;
        match kind {
            Collective::AllToAll => {
                let copies = if self.stack.once_per_node { self.workload.copies } else { 1 };
                group.exchange(bytes, copies, self.cluster) * (self.stack.communication * self.stack.exchange)
            }
            kind => {
                group.choose_of(algorithm, kind, bytes, self.cluster).0 * self.stack.communication + self.waiting(role, group)
            }
        }
    }

    /// What a collective's ranks wait for the last of them.
    fn waiting(&self, role: CollectiveRole, group: &Reachable) -> Seconds {
        match role {
            CollectiveRole::Tensor => self.stack.tensor_wait * (group.members as f64).log2(),
            _ => Seconds::ZERO,
        }
    }

    /// Work on the device, in how many kernels, and of what kind.
    fn device_time(&self, kernel: &Kernel, accumulate: bool, precision: DataType) -> (Seconds, f64, Category) {
        let output = if accumulate { 8.0 } else { 4.0 };
        let element = precision.size().value();
        let plain = |batch, rows, columns, contracted, output_bytes, cast: usize| {
            let product = Product { batch, rows, columns, contracted, operand_bytes: self.format.bytes(), output_bytes };
            (self.product(&product) + self.casts(batch * cast), 1.0, Category::Product)
        };
        let uneven = |columns: usize, contracted: usize, (time, kernels, category)| {
            let is_uneven = self.format.bytes() == 2.0 && !(columns.is_multiple_of(2) && contracted.is_multiple_of(2));
            (if is_uneven { time * (1.0 / UNEVEN) } else { time }, kernels, category)
        };
        let of_experts = |experts: usize, rows, columns, contracted, output_bytes, cast: usize| {
            let product = Product { batch: experts, rows, columns, contracted, operand_bytes: self.format.bytes(), output_bytes };
            let time = self.product(&product) * (1.0 / self.stack.expert_product) + self.casts(experts * cast);
            (time, 1.0 + self.stack.expert_launches * experts as f64, Category::Product)
        };
        // Of operands that a kernel of the Program made: the stack casts nothing. Of sizes that libraries do not take in eight bits (a rank's share
        // of a layer, or rows that a weight's gradient sums over) operands are made sixteen bits again before.
        let eight_bits = |rows: usize, columns: usize, contracted: usize, output_bytes| {
            let is_taken = columns.is_multiple_of(EIGHT_BITS_GRANULE) && contracted.is_multiple_of(EIGHT_BITS_GRANULE);
            let format = if is_taken { ProductFormat::Fp8 } else { ProductFormat::Bf16 };
            let product = Product { batch: 1, rows, columns, contracted, operand_bytes: format.bytes(), output_bytes };
            let share = self.stack.product_share(&self.cluster.device, format);
            let time = product_time(&product, format, &self.cluster.gpu, share);
            let decoded = (ProductFormat::Fp8.bytes() + ProductFormat::Bf16.bytes()) * ((rows + columns) * contracted) as f64;
            if is_taken { (time, 1.0, Category::Product) } else { (time + self.moved(decoded), 3.0, Category::Product) }
        };
        match *kernel {
            // What epilogues read or write beside the product is as large as that.
            Kernel::Matmul { rows, columns, contracted, activation, .. } => {
                let output = if activation.keeps_argument() { 2.0 * element } else { element };
                uneven(columns, contracted, plain(1, rows, columns, contracted, output, rows * contracted))
            }
            Kernel::MatmulInputGradient { rows, columns, contracted, gelu, .. } => {
                let output = if gelu { 2.0 * element } else { element };
                uneven(columns, contracted, plain(1, rows, contracted, columns, output, rows * columns))
            }
            // A bias's gradient is summed of a factor on the way, which costs what reading it does (cuBLASLt's `BGRAD`): nothing more.
            Kernel::MatmulWeightGradient { rows, columns, contracted, .. } => {
                uneven(columns, contracted, plain(1, columns, contracted, rows, output, 0))
            }
            Kernel::EightBitMatmul { rows, columns, contracted, activation, .. } => {
                eight_bits(rows, columns, contracted, if activation.keeps_argument() { 2.0 * element } else { element })
            }
            Kernel::EightBitMatmulInputGradient { rows, columns, contracted, gelu } => {
                eight_bits(rows, contracted, columns, if gelu { 2.0 * element } else { element })
            }
            Kernel::EightBitMatmulWeightGradient { rows, columns, contracted, .. } => {
                eight_bits(columns, contracted, rows, output)
            }
            // One for the largest element and one to round all.
            Kernel::Quantise { .. } => (self.memory_bound(kernel, accumulate, precision).0, 2.0, category(kernel)),
            Kernel::ExpertMatmul { experts, rows, columns, contracted } => {
                of_experts(experts, rows, columns, contracted, element, rows * contracted)
            }
            Kernel::ExpertMatmulInputGradient { experts, rows, columns, contracted } => {
                of_experts(experts, rows, contracted, columns, element, rows * columns)
            }
            Kernel::ExpertMatmulWeightGradient { experts, rows, columns, contracted } => {
                of_experts(experts, columns, contracted, rows, output, 0)
            }
            Kernel::Convolution(window) => (self.convolution(window, precision), 1.0, Category::Product),
            Kernel::ConvolutionInputGradient(window) | Kernel::ConvolutionWeightGradient(window) => {
                (self.convolution(window, precision), 1.0, Category::Product)
            }
            Kernel::Attention(sizes) => {
                let (time, kernels) = self.attention(&sizes, Pass::Forward, precision);
                (time, kernels, Category::Attention)
            }
            Kernel::AttentionGradient(sizes) => {
                let (time, kernels) = self.attention(&sizes, Pass::Backward, precision);
                (time, kernels, Category::Attention)
            }
            Kernel::Lstm(sizes) | Kernel::LstmGradient { sizes, .. } => {
                let step = Product {
                    batch: 1,
                    rows: sizes.batch,
                    columns: 4 * sizes.hidden,
                    contracted: sizes.hidden,
                    operand_bytes: element,
                    output_bytes: element,
                };
                (self.product(&step) * sizes.sequence as f64, sizes.sequence as f64, Category::Product)
            }
            kernel => self.memory_bound(&kernel, accumulate, precision),
        }
    }

    fn product(&self, product: &Product) -> Seconds {
        product_time(product, self.format, &self.cluster.gpu, self.stack.product_share(&self.cluster.device, self.format))
    }

    /// Activations and their gradients are cast to a narrow format, and transposed for the weight's gradient, once; weights once a step.
    fn casts(&self, elements: usize) -> Seconds {
        if self.format.is_cast() { self.moved(elements as f64 * self.stack.cast_bytes) } else { Seconds::ZERO }
    }

    /// Moving so many bytes, of which the last that the kernel before left may still be in the cache.
    fn moved(&self, bytes: f64) -> Seconds {
        let gpu = &self.cluster.gpu;
        let cached = bytes.min(gpu.cache.value());
        let weight = bytes - cached + cached / gpu.cache_speed;
        Seconds::new(weight / (gpu.memory_bandwidth.value() * gpu.memory_efficiency))
    }

    /// A convolution is a product whose rows are the output's pixels (implicit GEMM). Sixteen-bit even in fp8 runs.
    fn convolution(&self, window: Window, precision: DataType) -> Seconds {
        let Window { batch, in_channels, out_channels, size, .. } = window;
        let product = Product {
            batch: 1,
            rows: batch * window.out_height() * window.out_width(),
            columns: out_channels,
            contracted: in_channels * size * size,
            operand_bytes: precision.size().value(),
            output_bytes: precision.size().value(),
        };
        // The window's overlaps come from caches: the input crosses the memory's border once.
        let moved = Kernel::Convolution(window).bytes(precision).value();
        let alone = Product { operand_bytes: 0.0, output_bytes: 0.0, ..product };
        self.product(&alone).max(self.moved(moved))
    }

    fn attention(&self, sizes: &Attention, pass: Pass, precision: DataType) -> (Seconds, f64) {
        match self.stack.attention {
            AttentionKind::Fused { scale } => {
                (self.fused_attention(sizes, pass, scale), if pass == Pass::Forward { 1.0 } else { 2.0 })
            }
            AttentionKind::Unfused { forward_bytes, backward_bytes, single, fused_by } => {
                let pairs = sizes.batch * sizes.heads();
                let (products, bytes) = match pass {
                    Pass::Forward => (1.0, forward_bytes),
                    Pass::Backward => (2.0, backward_bytes),
                };
                let element = precision.size().value();
                let product = |columns, contracted| Product {
                    batch: pairs,
                    rows: sizes.queries,
                    columns,
                    contracted,
                    operand_bytes: element,
                    // What the scores move is in the stack's bytes for each score.
                    output_bytes: 0.0,
                };
                let scores = self.product(&product(sizes.keys, sizes.head_dimension));
                let values = self.product(&product(sizes.head_dimension, sizes.keys));
                let elements = pairs as f64 * sizes.queries as f64 * sizes.keys as f64;
                let wider = if precision.size().count() < 4 { 1.0 } else { single };
                let (kernels, more) =
                    if pairs.is_multiple_of(fused_by) { (0.0, 0.0) } else { (SOFTMAX_OPERATORS, SOFTMAX_BYTES) };
                let moved = self.moved(elements * (bytes * wider + more));
                ((scores + values) * products + moved, 4.0 * products + kernels)
            }
        }
    }

    fn fused_attention(&self, sizes: &Attention, pass: Pass, scale: f64) -> Seconds {
        let gpu = &self.cluster.gpu;
        let kernel = match pass {
            Pass::Forward => Kernel::Attention(*sizes),
            Pass::Backward => Kernel::AttentionGradient(*sizes),
        };
        let format = if self.format.is_cast() { ProductFormat::Bf16 } else { self.format };
        let tiles = (sizes.batch * sizes.heads() * sizes.queries.div_ceil(QUERY_TILE)) as f64;
        let waves = tiles / gpu.multiprocessors;
        let narrow = (sizes.head_dimension as f64 / 128.0).min(1.0).powf(NARROW_HEADS);
        let reached = gpu.attention[pass as usize] * scale * narrow * waves / (waves + HALF_WAVES);
        Seconds::new(kernel.flops().value() / (gpu.peak(format).value() * reached))
    }

    fn memory_bound(&self, kernel: &Kernel, accumulate: bool, precision: DataType) -> (Seconds, f64, Category) {
        let category = category(kernel);
        let share = self.stack.traffic_of(category);
        if share == 0.0 {
            return (Seconds::ZERO, 0.0, category);
        }
        // Whole buckets stream in every stack.
        let slower = if matches!(category, Category::Optimizer | Category::Bucket) { 1.0 } else { self.stack.elementwise };
        let traffic = kernel.traffic();
        let mut bytes = traffic.bytes(precision).value();
        if accumulate {
            bytes += 4.0 * traffic.single as f64;
        }
        (self.moved(bytes * share) * slower, 1.0, category)
    }
}

/// What an instruction's kernels take.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct KernelTime {
    /// On the device.
    pub device: Seconds,
    /// On the host, which launches them ahead of the device where it can.
    pub host: Seconds,
}

/// Whether a kernel is there only for what changes parameters.
fn is_of_parameters(kernel: &Kernel, category: Category) -> bool {
    matches!(category, Category::Optimizer | Category::Bucket | Category::BiasGradient)
        || matches!(
            kernel,
            Kernel::MatmulWeightGradient { .. }
                | Kernel::EightBitMatmulWeightGradient { .. }
                | Kernel::ExpertMatmulWeightGradient { .. }
                | Kernel::ConvolutionWeightGradient(_)
                | Kernel::EmbeddingWeightGradient { .. }
                | Kernel::LayerNormWeightGradient { .. }
                | Kernel::RmsNormWeightGradient { .. }
                | Kernel::BatchNormWeightGradient { .. }
                | Kernel::PrependWeightGradient { .. }
        )
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pass {
    Forward,
    Backward,
}

/// What kind of work a kernel is.
pub(super) fn category(kernel: &Kernel) -> Category {
    // Priced by its traffic: `device_time` has no product for it.
    if let Kernel::LstmWeightGradient(_) = kernel {
        return Category::Other;
    }
    match kernel.family() {
        KernelFamily::Product | KernelFamily::Convolution => Category::Product,
        KernelFamily::Attention => Category::Attention,
        KernelFamily::Bias => Category::Bias,
        KernelFamily::BiasGradient => Category::BiasGradient,
        KernelFamily::Activation => Category::Activation,
        KernelFamily::Residual => Category::Residual,
        KernelFamily::Norm => Category::Norm,
        KernelFamily::Rope => Category::Rope,
        KernelFamily::Rearrangement => Category::Rearrange,
        KernelFamily::Embedding => Category::Embedding,
        KernelFamily::Loss => Category::Loss,
        KernelFamily::Routing => Category::Routing,
        KernelFamily::Optimizer => Category::Optimizer,
        KernelFamily::Bucket => Category::Bucket,
        KernelFamily::Other => Category::Other,
    }
}

#[cfg(test)]
mod tests;
