//! The profile files: devices, links and software stacks, read once from what is compiled in.

use foretell_topologies::DeviceKind;
use foretell_units::{Bytes, BytesPerSecond, DataType, FlopsPerSecond, Seconds};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;
use std::sync::LazyLock;
use thiserror::Error;

const DEVICES: &str = include_str!("profiles/devices.yaml");
const LINKS: &str = include_str!("profiles/links.yaml");
const STACKS: &str = include_str!("profiles/stacks.yaml");
const FITTED: &str = include_str!("profiles/fitted.yaml");

/// What plans may call a stack, and the profile that holds for it.
const ALIASES: [(&str, &str); 3] = [("fsdp2", "torchtitan"), ("megatron-lm", "megatron-core"), ("deepspeed", "deepspeed-3d")];

/// Why the profiles do not say what was asked.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ProfileError {
    /// A file is not sound.
    #[error("profile `{file}`: {reason}")]
    Unreadable {
        /// Which file.
        file: &'static str,
        /// What is wrong with it.
        reason: String,
    },
    /// There is no such entry.
    #[error("no {what} profile is called `{name}`")]
    Unknown {
        /// `device`, `link` or `stack`.
        what: &'static str,
        /// What was asked for.
        name: String,
    },
}

/// The number format of the operands of matrix products.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ProductFormat {
    /// IEEE single precision, without tensor cores.
    Fp32,
    /// TensorFloat-32.
    Tf32,
    /// IEEE half precision.
    Fp16,
    /// bfloat16.
    Bf16,
    /// 8-bit floating point, scaled by tensor or by row.
    Fp8,
    /// 8-bit floating point, scaled by blocks of 32.
    Mxfp8,
    /// 4-bit floating point, scaled by blocks of 16.
    Nvfp4,
}

impl ProductFormat {
    /// The name in profiles and tables.
    pub const fn name(self) -> &'static str {
        match self {
            ProductFormat::Fp32 => "fp32",
            ProductFormat::Tf32 => "tf32",
            ProductFormat::Fp16 => "fp16",
            ProductFormat::Bf16 => "bf16",
            ProductFormat::Fp8 => "fp8",
            ProductFormat::Mxfp8 => "mxfp8",
            ProductFormat::Nvfp4 => "nvfp4",
        }
    }

    /// Bytes of an operand's element.
    pub const fn bytes(self) -> f64 {
        match self {
            ProductFormat::Fp32 | ProductFormat::Tf32 => 4.0,
            ProductFormat::Fp16 | ProductFormat::Bf16 => 2.0,
            ProductFormat::Fp8 | ProductFormat::Mxfp8 => 1.0,
            ProductFormat::Nvfp4 => 0.5625,
        }
    }

    /// That of products in a run's number format.
    pub const fn of(precision: DataType) -> Self {
        match precision {
            DataType::Fp32 | DataType::Fp64 | DataType::Int32 => ProductFormat::Fp32,
            DataType::Tf32 => ProductFormat::Tf32,
            DataType::Fp16 => ProductFormat::Fp16,
            DataType::Bf16 => ProductFormat::Bf16,
            DataType::Fp8 => ProductFormat::Fp8,
        }
    }

    /// Whether operands are narrower than activations and are made from them by a kernel of their own.
    pub const fn is_cast(self) -> bool {
        matches!(self, ProductFormat::Fp8 | ProductFormat::Mxfp8 | ProductFormat::Nvfp4)
    }

    /// The format that stands in where a device has no figure for this one.
    const fn wider(self) -> Option<Self> {
        match self {
            ProductFormat::Nvfp4 => Some(ProductFormat::Mxfp8),
            ProductFormat::Mxfp8 => Some(ProductFormat::Fp8),
            ProductFormat::Fp8 => Some(ProductFormat::Bf16),
            ProductFormat::Bf16 => Some(ProductFormat::Fp16),
            ProductFormat::Fp16 => Some(ProductFormat::Tf32),
            ProductFormat::Tf32 => Some(ProductFormat::Fp32),
            ProductFormat::Fp32 => None,
        }
    }
}

impl fmt::Display for ProductFormat {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(self.name())
    }
}

/// A device: its data sheet, and what of it kernels reach.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GpuKind {
    /// Streaming multiprocessors (or compute units).
    pub multiprocessors: f64,
    /// The dense peak of each format.
    peak: BTreeMap<ProductFormat, FlopsPerSecond>,
    /// How much memory there is.
    pub memory: Bytes,
    /// The data sheet's memory bandwidth.
    pub memory_bandwidth: BytesPerSecond,
    /// The share of it that streaming kernels reach.
    pub memory_efficiency: f64,
    /// Bytes of an operand that the last level of cache still has from the kernel before.
    pub cache: Bytes,
    /// How many times faster than memory it is.
    pub cache_speed: f64,
    /// The share of the peak that large products reach in sustained runs, by format; a wider format's where there is none.
    pub(super) product: BTreeMap<ProductFormat, f64>,
    /// What a tile costs beside its work, as that many more of the contracted dimension.
    pub product_ramp: f64,
    /// How fast efficiency falls with the tile's area: its power.
    pub small_tile: f64,
    /// How much of a wave that is not full is lost.
    pub quantisation: f64,
    /// The share of the sixteen-bit peak that fused attention reaches forward and backward, for long sequences and heads of 128.
    pub attention: [f64; 2],
    /// What the smallest kernel takes on the device, from the end of the one before it.
    pub launch: Seconds,
    /// The link between devices of a node, where the run does not say another.
    pub link: String,
    /// What a device's node has of the network for each device, where the run does not say.
    pub network_rate: BytesPerSecond,
    /// Where the figures are from.
    pub source: String,
    /// Whether kernels on it were measured, or the efficiencies are taken from a kin.
    #[serde(default)]
    pub estimated: bool,
}

impl GpuKind {
    /// The dense peak of products in a format, or of the nearest wider one that the device has.
    pub fn peak(&self, format: ProductFormat) -> FlopsPerSecond {
        let mut format = Some(format);
        while let Some(one) = format {
            if let Some(&peak) = self.peak.get(&one) {
                return peak;
            }
            format = one.wider();
        }
        FlopsPerSecond::new(1.0)
    }

    /// Takes over what a topology states of a device: it may be changed there.
    pub(crate) fn take_data_sheet(&mut self, kind: &DeviceKind) {
        for (&precision, &peak) in &kind.peak {
            self.peak.insert(ProductFormat::of(precision), peak);
        }
        self.memory = kind.memory;
        self.memory_bandwidth = kind.memory_bandwidth;
    }

    /// Peaks, in every format, and memory so many times as fast.
    pub(crate) fn scale(&mut self, peak: f64, memory_bandwidth: f64) {
        self.peak.values_mut().for_each(|rate| *rate = *rate * peak);
        self.memory_bandwidth = self.memory_bandwidth * memory_bandwidth;
    }

    /// The share of [`GpuKind::peak`] that large products reach.
    pub fn product_efficiency(&self, format: ProductFormat) -> f64 {
        let mut format = Some(format);
        while let Some(one) = format {
            if let Some(&share) = self.product.get(&one) {
                return share;
            }
            format = one.wider();
        }
        0.7
    }
}

/// What joins the devices of a node.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LinkKind {
    /// Bus bandwidth (as nccl-tests define it) of a long ring over so many members; between two entries the smaller counts.
    pub ring: BTreeMap<usize, BytesPerSecond>,
    /// Bus bandwidth of an all-reduce in the switch (NVLS), where it has that, among all devices of a node.
    #[serde(default)]
    pub in_switch: Option<BytesPerSecond>,
    /// What one device sends to one other.
    pub point_to_point: BytesPerSecond,
    /// What one device sends to all others at once.
    pub all_to_all: BytesPerSecond,
    /// Devices that it joins, where those are more than share a host.
    #[serde(default)]
    pub domain: Option<usize>,
    /// From the call to the first byte of a collective, beyond NCCL's own figures.
    pub launch: Seconds,
    /// The share of NCCL's latency constants that applies.
    #[serde(default = "one")]
    pub latency_scale: f64,
    /// Where the figures are from.
    pub source: String,
}

impl LinkKind {
    /// The same wires, so many times as many.
    pub(crate) fn scale(&mut self, times: f64) {
        let rates = self.ring.values_mut().chain(&mut self.in_switch).chain([&mut self.point_to_point, &mut self.all_to_all]);
        rates.for_each(|rate| *rate = *rate * times);
    }
}

fn half() -> ProductFormat {
    ProductFormat::Bf16
}

fn unpadded() -> usize {
    1
}

fn one() -> f64 {
    1.0
}

/// What joins the nodes.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Network {
    /// The share of the data sheet's rate that long messages reach.
    pub efficiency: f64,
    /// The share of NCCL's network latency constants that applies.
    pub latency_scale: f64,
    /// Where the figures are from.
    pub source: String,
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
    /// CUDA's context, NCCL's buffers, cuBLAS's workspaces: in what the allocator does not count.
    pub context: Bytes,
    /// Reserved and not used by the allocator, as a share of what is allocated.
    pub fragmentation: f64,
}

/// A software stack.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StackKind {
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
    /// Whether, where the run does not say, more is computed again than that if it would not fit into the device's memory.
    #[serde(default)]
    pub recompute_to_fit: bool,
    /// Whether Megatron's sequence parallelism is on where tensor parallelism is, unless the run says.
    #[serde(default)]
    pub sequence_parallel: bool,
    /// The vocabulary is made a multiple of this and the tensor-parallel size together; 1 where it is left as it is.
    #[serde(default = "unpadded")]
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
    /// Bytes of a message between stages for each byte of the Program's: 2 where activations travel in single precision.
    #[serde(default = "one")]
    pub message_scale: f64,
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
        self.product_scale * self.product.get(device).copied().unwrap_or(1.0) * self.format_of(format)
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

/// Devices, links and a network.
#[derive(Clone, Debug)]
pub struct Cluster {
    /// The device's name in the profiles.
    pub device: String,
    /// The device.
    pub gpu: GpuKind,
    /// What joins the devices of a node.
    pub link: LinkKind,
    /// What joins nodes.
    pub network: Network,
    /// Devices that the link joins.
    pub devices_per_node: usize,
    /// What a node sends to others, one way, by the data sheet.
    pub node_rate: BytesPerSecond,
}

/// What a fit found.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Fitted {
    stacks: BTreeMap<String, FittedStack>,
    devices: BTreeMap<String, FittedDevice>,
    network: BTreeMap<String, f64>,
}

/// What a fit found of a device.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct FittedDevice {
    /// Measured runs that it was fitted on.
    rows: usize,
    values: BTreeMap<String, f64>,
}

/// Runs that a device or a stack was fitted on at least, so that it does not count as assumed.
const FITTED_ROWS: usize = 3;

/// What a fit found of a stack.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct FittedStack {
    /// Measured runs that it was fitted on.
    rows: usize,
    values: BTreeMap<String, f64>,
    spread: [f64; 2],
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct LinksFile {
    links: BTreeMap<String, LinkKind>,
    network: Network,
}

/// All profiles.
#[derive(Clone, Debug)]
pub struct Profiles {
    devices: BTreeMap<String, GpuKind>,
    links: BTreeMap<String, LinkKind>,
    network: Network,
    stacks: BTreeMap<String, StackKind>,
}

static LIBRARY: LazyLock<Result<Profiles, ProfileError>> = LazyLock::new(|| Profiles::read(DEVICES, LINKS, STACKS, FITTED));

impl Profiles {
    /// What is compiled in.
    ///
    /// # Errors
    /// [`ProfileError::Unreadable`], which a test excludes.
    pub fn library() -> Result<&'static Self, ProfileError> {
        LIBRARY.as_ref().map_err(Clone::clone)
    }

    /// Reads the four files: what is known or assumed of devices, links and stacks, and what a fit found in place of that.
    ///
    /// # Errors
    /// [`ProfileError::Unreadable`] with the place.
    pub fn read(devices: &str, links: &str, stacks: &str, fitted: &str) -> Result<Self, ProfileError> {
        let LinksFile { links, network } = parsed("links.yaml", links)?;
        let mut profiles =
            Self { devices: parsed("devices.yaml", devices)?, links, network, stacks: parsed("stacks.yaml", stacks)? };
        profiles.apply(&parsed("fitted.yaml", fitted)?)?;
        Ok(profiles)
    }

    fn apply(&mut self, fitted: &Fitted) -> Result<(), ProfileError> {
        let unknown = |what: &str| ProfileError::Unreadable { file: "fitted.yaml", reason: format!("no profile has {what}") };
        for (name, found) in &fitted.stacks {
            let stack = self.stacks.get_mut(name).ok_or_else(|| unknown(&format!("the stack {name}")))?;
            for (value, number) in &found.values {
                if !stack.set_value(value, *number) {
                    return Err(unknown(&format!("the value {value} of the stack {name}")));
                }
            }
            stack.spread = found.spread;
            stack.estimated = found.rows < FITTED_ROWS;
        }
        for (name, FittedDevice { rows, values }) in &fitted.devices {
            let device = self.devices.get_mut(name).ok_or_else(|| unknown(&format!("the device {name}")))?;
            for (value, number) in values {
                if !device.set_value(value, *number) {
                    return Err(unknown(&format!("the value {value} of the device {name}")));
                }
            }
            device.estimated &= *rows < FITTED_ROWS;
        }
        for (value, number) in &fitted.network {
            match value.as_str() {
                "efficiency" => self.network.efficiency = *number,
                "latency_scale" => self.network.latency_scale = *number,
                _ => return Err(unknown(&format!("the value {value} of the network"))),
            }
        }
        Ok(())
    }

    /// A device.
    ///
    /// # Errors
    /// [`ProfileError::Unknown`].
    pub fn gpu(&self, name: &str) -> Result<&GpuKind, ProfileError> {
        find(&self.devices, "device", name)
    }

    /// A link.
    ///
    /// # Errors
    /// [`ProfileError::Unknown`].
    pub fn link(&self, name: &str) -> Result<&LinkKind, ProfileError> {
        find(&self.links, "link", name)
    }

    /// A stack, by its name or by the one that users know it by.
    ///
    /// # Errors
    /// [`ProfileError::Unknown`].
    pub fn stack(&self, name: &str) -> Result<&StackKind, ProfileError> {
        let known = ALIASES.iter().find(|(alias, _)| *alias == name).map_or(name, |&(_, known)| known);
        find(&self.stacks, "stack", known)
    }

    /// The names of the stacks.
    pub fn stack_names(&self) -> impl Iterator<Item = &str> {
        self.stacks.keys().map(String::as_str).chain(ALIASES.map(|(alias, _)| alias))
    }

    /// A cluster of `devices` devices in nodes of `devices_per_node`; link and rate of a node are the device's and the network's own where left out.
    ///
    /// # Errors
    /// [`ProfileError::Unknown`].
    pub fn cluster(
        &self,
        device: &str,
        link: Option<&str>,
        devices_per_node: usize,
        devices: usize,
        node_rate: Option<BytesPerSecond>,
    ) -> Result<Cluster, ProfileError> {
        let gpu = self.gpu(device)?.clone();
        let link = self.link(link.unwrap_or(&gpu.link))?.clone();
        let network = self.network.clone();
        let node_rate = node_rate.unwrap_or(gpu.network_rate * devices_per_node.max(1) as f64);
        // Jobs that need several domains take a power of two of each, so that no group of theirs straddles two.
        let hosts = match link.domain {
            Some(domain) if devices > domain => 1 << domain.ilog2(),
            Some(_) => devices.max(devices_per_node),
            None => devices_per_node,
        };
        let hosts = hosts.max(1);
        // All hosts of a domain send side by side.
        let node_rate = node_rate * (hosts as f64 / devices_per_node.max(1) as f64);
        Ok(Cluster { device: device.into(), gpu, link, network, devices_per_node: hosts, node_rate })
    }
}

fn parsed<T: for<'a> Deserialize<'a>>(file: &'static str, text: &str) -> Result<T, ProfileError> {
    serde_saphyr::from_str(text).map_err(|error| ProfileError::Unreadable { file, reason: error.to_string() })
}

fn find<'a, T>(entries: &'a BTreeMap<String, T>, what: &'static str, name: &str) -> Result<&'a T, ProfileError> {
    entries.get(name).ok_or_else(|| ProfileError::Unknown { what, name: name.into() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_library_is_sound() {
        let profiles = Profiles::library().expect("readable");
        for (name, gpu) in &profiles.devices {
            assert!(profiles.links.contains_key(&gpu.link), "{name}'s link {}", gpu.link);
            assert!(gpu.multiprocessors > 0.0 && gpu.quantisation <= 1.0, "{name}");
            assert!(gpu.product.values().all(|share| (0.05..=1.0).contains(share)), "{name}");
        }
        for (name, stack) in &profiles.stacks {
            assert!(stack.spread[0] <= 1.0 && stack.spread[1] >= 1.0, "{name}");
            assert!(stack.product.keys().all(|device| profiles.devices.contains_key(device)), "{name}");
        }
    }

    #[test]
    fn what_is_unknown_is_named() {
        let profiles = Profiles::library().expect("readable");
        let error = profiles.gpu("abacus").expect_err("unknown");
        assert_eq!(error.to_string(), "no device profile is called `abacus`");
    }
}
