//! The graph: tensors with named dimensions, and operators with loop dimensions, as an einsum has them.
//!
//! An operator says which loop walks which dimension of which operand. That is all a compiler needs to know in order to shard it:
//! a mesh axis laid along a loop shards every dimension that the loop walks, replicates the operands that it does not touch, and
//! leaves partial sums in an output that it does not appear in. The graph knows no devices and no plans.

use crate::attention::{Attention, RelativePositions, Rope};
use crate::dropout::{Dropout, DropoutRate};
use crate::kernel::{Epsilon, Kernel, Mixture, Recurrence, WeightLayout, Window};
use foretell_units::{DataType, Flops};

/// A tensor's place in [`Graph::tensors`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TensorId(pub usize);

/// An operator's place in [`Graph::operators`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct OperatorId(pub usize);

/// A loop's place in [`Operator::loops`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LoopId(pub usize);

/// A named extent of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dimension {
    /// What a person calls it: `batch`, `hidden`, `heads`.
    pub name: &'static str,
    /// Its size over all ranks.
    pub extent: usize,
}

/// How the elements of a tensor are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Storage {
    /// In the precision of the run.
    Precision,
    /// In single precision whatever the run's: statistics, losses, gradients of parameters.
    Single,
    /// As 32-bit integers.
    Integer,
}

impl Storage {
    /// The number format in a run of `precision`.
    pub fn data_type(self, precision: DataType) -> DataType {
        match self {
            Storage::Precision => precision,
            Storage::Single => DataType::Fp32,
            Storage::Integer => DataType::Int32,
        }
    }
}

/// What the training data supplies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum InputKind {
    /// Images `[batch, height, width, channels]`.
    Images,
    /// Feature vectors `[batch, features]`.
    Features,
    /// Token ids `[batch, sequence]`; of a sequence to be made from another, those that come before each of its own.
    Tokens,
    /// Token ids `[batch, sequence]` of the sequence from which another is made.
    SourceTokens,
    /// A class per sample, or per position of a sequence.
    Labels,
    /// To which of the texts of a sample a token belongs, `[batch, sequence]`: all to the first.
    TokenTypes,
}

/// How a parameter starts, as the model's authors start it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Initialisation {
    /// All zero.
    Zeros,
    /// All one.
    Ones,
    /// Normal with this standard deviation.
    Normal(f64),
    /// Uniform between minus and plus this bound.
    Uniform(f64),
}

/// A parameter as its users know it.
#[derive(Clone, Debug, PartialEq)]
pub struct Parameter {
    /// How it starts.
    pub initialisation: Initialisation,
    /// The order of our dimensions that gives the public tensor: torchvision keeps a convolution's weight as `[out, in, r, s]`.
    pub permutation: Vec<usize>,
    /// The public shape, whose elements are ours permuted.
    pub shape: Vec<usize>,
    /// Where the public form is several tensors, as the experts of a mixture are: their names. Each is one index of the first dimension of
    /// `shape` and has the shape of the others. Empty where it is one tensor, under the tensor's own name.
    pub parts: Vec<String>,
}

/// What a tensor is for.
#[derive(Clone, Debug, PartialEq)]
pub enum Role {
    /// Read from the data set.
    Input(InputKind),
    /// Trained.
    Parameter(Parameter),
    /// Kept between steps but not trained: batch norm's running mean and variance.
    Running,
    /// Made by an operator and used by others.
    Activation,
    /// The gradient of a parameter, summed over micro-batches.
    ParameterGradient(TensorId),
    /// A sum over the batch that the run reports or keeps: loss, correct predictions, batch statistics; summed over micro-batches.
    Sum,
}

/// A tensor of the graph, in its full size.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    /// The name under which its users know it (`transformer.h.0.attn.c_attn.weight`), or that of the operator that makes it.
    pub name: String,
    /// What it is for.
    pub role: Role,
    /// Its shape.
    pub dimensions: Vec<Dimension>,
    /// How its elements are stored.
    pub storage: Storage,
}

/// A tensor of a parameter's public form: what a file of weights has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PublicTensor {
    /// Its name.
    pub name: String,
    /// Its shape.
    pub shape: Vec<usize>,
    /// Its elements, counted in the order of [`Parameter::shape`].
    pub elements: std::ops::Range<usize>,
}

impl Tensor {
    /// The tensors under which a parameter is publicly known, in order: one, but for the stacked experts of a mixture. None of what is
    /// not a parameter.
    pub fn public_tensors(&self) -> Vec<PublicTensor> {
        let Role::Parameter(Parameter { shape, parts, .. }) = &self.role else { return Vec::new() };
        if parts.is_empty() {
            return vec![PublicTensor { name: self.name.clone(), shape: shape.clone(), elements: 0..self.elements() }];
        }
        let shape = shape.get(1..).unwrap_or_default().to_vec();
        let length: usize = shape.iter().product();
        let part = |(index, name): (usize, &String)| PublicTensor {
            name: name.clone(),
            shape: shape.clone(),
            elements: index * length..(index + 1) * length,
        };
        parts.iter().enumerate().map(part).collect()
    }

    /// The number of elements over all ranks.
    pub fn elements(&self) -> usize {
        self.dimensions.iter().map(|dimension| dimension.extent).product()
    }

    /// The same where that is a number that can be counted with.
    pub(crate) fn checked_elements(&self) -> Option<usize> {
        self.dimensions.iter().try_fold(1usize, |product, dimension| product.checked_mul(dimension.extent))
    }
}

/// Which of its kernel's sizes a loop multiplies into.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Extent {
    /// Samples, positions: the rows of a product or a norm; elements of an element-wise operator.
    Rows,
    /// Columns of a product.
    Columns,
    /// The summed dimension of a product; input channels of a convolution.
    Contracted,
    /// Features of a norm, classes of a loss, channels that are not summed over.
    Features,
    /// Positions within a group, sequence or image.
    Positions,
    /// Attention heads; of keys and values where these have fewer.
    Heads,
    /// Query heads of each key head.
    Group,
    /// Positions that are attended to.
    Keys,
    /// Tensors that one is split into.
    Parts,
    /// Rows of an embedding's table.
    Vocabulary,
    /// Experts of a mixture.
    Experts,
}

/// A loop dimension of an operator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Loop {
    /// What a person calls it.
    pub name: &'static str,
    /// Its size over all ranks.
    pub extent: usize,
    /// Which of the kernel's sizes it multiplies into.
    pub role: Extent,
    /// Whether ranks may share it out. Where an output lacks it, what they make are partial sums.
    pub shardable: bool,
}

/// The loop that every operator calls the same, and that data parallelism shares out.
pub const BATCH: &str = "batch";

/// The loop that every operator on sequences calls the same, and that context and sequence parallelism share out.
pub const SEQUENCE: &str = "sequence";

/// The loop over experts, that expert parallelism shares out.
pub const EXPERTS: &str = "experts";

/// An operator's use of a tensor.
#[derive(Clone, Debug, PartialEq)]
pub struct Operand {
    /// Which tensor.
    pub tensor: TensorId,
    /// For each of its dimensions the loop that walks it; `None` where every rank needs (or makes) all of it.
    pub axes: Vec<Option<LoopId>>,
}

/// How tokens are shared out to the slots of a mixture's experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slots {
    /// Experts that a token is sent to.
    pub top: usize,
    /// Slots of an expert for each sample. A rank's samples share theirs.
    pub per_sample: usize,
}

/// What an operator computes. The loops carry the sizes, this the rest.
#[derive(Clone, Copy, Debug, PartialEq)]
#[allow(missing_docs)] // Each is described at the kernel of the same name.
pub enum OperatorKind {
    /// `relu` is set by fusion only.
    Matmul {
        weight: WeightLayout,
        relu: bool,
    },
    MatmulInputGradient(WeightLayout),
    MatmulWeightGradient(WeightLayout),
    BiasAdd,
    BiasGradient,
    Relu,
    ReluGradient,
    Gelu,
    GeluGradient,
    GeluExact,
    GeluExactGradient,
    SiluMultiply,
    SiluMultiplyGradient,
    Add,
    /// The window's batch and channels are those of the loops.
    Convolution(Window),
    ConvolutionInputGradient(Window),
    ConvolutionWeightGradient(Window),
    BatchNorm,
    BatchNormInputGradient,
    BatchNormWeightGradient,
    BatchNormInference,
    MaxPool(Window),
    MaxPoolGradient(Window),
    GlobalAveragePool,
    GlobalAveragePoolGradient,
    LayerNorm(Epsilon),
    LayerNormInputGradient,
    LayerNormWeightGradient,
    RmsNorm(Epsilon),
    RmsNormInputGradient,
    RmsNormWeightGradient,
    /// The base of the frequencies.
    Rope {
        theta: usize,
    },
    RopeGradient {
        theta: usize,
    },
    /// Its own gradient.
    Dropout {
        rate: DropoutRate,
        site: usize,
    },
    Prepend,
    PrependInputGradient,
    PrependWeightGradient,
    First,
    FirstGradient,
    Embedding,
    EmbeddingWeightGradient,
    /// `packed` is set by fusion only.
    Attention {
        causal: bool,
        scaled: bool,
        relative: Option<RelativePositions>,
        packed: bool,
    },
    AttentionGradient {
        causal: bool,
        scaled: bool,
        relative: Option<RelativePositions>,
        packed: bool,
    },
    Split,
    Join,
    CrossEntropy,
    LogitStatistics,
    CrossEntropyOfStatistics,
    /// The number of predictions in the global batch, over which the loss is a mean.
    CrossEntropyGradient {
        normalizer: usize,
    },
    /// Experts that a token is sent to.
    Route {
        top: usize,
    },
    RouteGradient {
        top: usize,
    },
    Dispatch(Slots),
    DispatchGradient(Slots),
    Combine(Slots),
    CombineInputGradient(Slots),
    CombineGateGradient(Slots),
    ExpertMatmul,
    ExpertMatmulInputGradient,
    ExpertMatmulWeightGradient,
    /// What the divisor is the root of.
    Scale {
        square: usize,
    },
    Multiply,
    Lstm {
        initial: bool,
    },
    LstmGradient {
        initial: bool,
        outputs: bool,
        last: bool,
    },
    LstmWeightGradient {
        initial: bool,
    },
}

/// When an operator runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Pass {
    /// From inputs to loss.
    Forward,
    /// From the loss to the gradients of activations: on the path between stages.
    InputGradient,
    /// The gradients of parameters: nobody waits for them but the optimizer.
    WeightGradient,
}

/// A node of the graph.
#[derive(Clone, Debug, PartialEq)]
pub struct Operator {
    /// The module it belongs to, as its users know it: `layer1.0.conv1`.
    pub name: String,
    /// What it computes.
    pub kind: OperatorKind,
    /// Its loop dimensions.
    pub loops: Vec<Loop>,
    /// What it reads, in its kernel's order.
    pub inputs: Vec<Operand>,
    /// What it writes, in its kernel's order.
    pub outputs: Vec<Operand>,
    /// The block it belongs to: the unit between which a pipeline may cut, and that recomputation repeats.
    pub block: usize,
    /// When it runs.
    pub pass: Pass,
    /// For a gradient operator the forward operator whose loops (and so whose sharding) it shares.
    pub forward: Option<OperatorId>,
}

/// A pipeline's smallest unit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Block {
    /// What a person calls it: `layer 3`, `head`.
    pub name: String,
    /// Whether full recomputation may drop its activations and make them again.
    pub recomputable: bool,
}

/// A model for one (global) batch of a given size, forward only or with its gradients ([`crate::differentiate`]).
#[derive(Clone, Debug, PartialEq)]
pub struct Graph {
    /// The model's name.
    pub name: String,
    /// All tensors.
    pub tensors: Vec<Tensor>,
    /// All operators, each after those whose outputs it reads.
    pub operators: Vec<Operator>,
    /// The blocks, in order.
    pub blocks: Vec<Block>,
    /// Samples in the batch that the shapes are for.
    pub batch: usize,
    /// Predictions a sample makes: 1 for a class per image, the sequence's length for a language model.
    pub predictions_per_sample: usize,
    /// Tokens in a sample, if it is a sequence.
    pub tokens_per_sample: Option<usize>,
}

impl Graph {
    /// The tensor of an id.
    pub fn tensor(&self, id: TensorId) -> &Tensor {
        &self.tensors[id.0]
    }

    /// The trained tensors, in the order in which the model declares them.
    pub fn parameters(&self) -> impl Iterator<Item = (TensorId, &Tensor)> {
        self.tensors
            .iter()
            .enumerate()
            .filter(|(_, tensor)| matches!(tensor.role, Role::Parameter(_)))
            .map(|(index, tensor)| (TensorId(index), tensor))
    }

    /// The number of trained values.
    pub fn parameter_count(&self) -> usize {
        self.parameters().map(|(_, tensor)| tensor.elements()).sum()
    }

    /// The arithmetic of one pass over the batch that counts for model FLOPs utilisation (see [`Kernel::model_flops`]).
    pub fn model_flops(&self) -> Flops {
        self.operators.iter().map(|operator| operator.kernel(&operator.extents()).model_flops()).sum()
    }
}

impl OperatorKind {
    /// Whether it is attention itself, whose sequence is shared out by other means than that of operators that work position by position.
    pub fn is_attention(&self) -> bool {
        matches!(self, OperatorKind::Attention { .. } | OperatorKind::AttentionGradient { .. })
    }

    /// The role of the loop of which a kernel must know which part a rank has, if there is one.
    pub fn positional(&self) -> Option<Extent> {
        match self {
            OperatorKind::Embedding | OperatorKind::EmbeddingWeightGradient => Some(Extent::Vocabulary),
            OperatorKind::LogitStatistics | OperatorKind::CrossEntropyGradient { .. } => Some(Extent::Features),
            OperatorKind::Attention { .. }
            | OperatorKind::AttentionGradient { .. }
            | OperatorKind::Rope { .. }
            | OperatorKind::RopeGradient { .. }
            | OperatorKind::Dropout { .. } => Some(Extent::Positions),
            _ => None,
        }
    }

    /// Whether the loop of [`OperatorKind::positional`] may be cut along several axes of the mesh at a time.
    pub fn is_positional_along_several_axes(&self) -> bool {
        matches!(self, OperatorKind::Dropout { .. })
    }
}

impl Operator {
    /// The full extents of the loops.
    pub fn extents(&self) -> Vec<usize> {
        self.loops.iter().map(|one| one.extent).collect()
    }

    /// The loop of a name.
    pub fn find_loop(&self, name: &str) -> Option<LoopId> {
        self.loops.iter().position(|one| one.name == name).map(LoopId)
    }

    /// What one rank runs when its share of the loops is `extents`, one for each loop.
    pub fn kernel(&self, extents: &[usize]) -> Kernel {
        let size = |role: Extent| -> usize {
            self.loops.iter().zip(extents).filter(|(one, _)| one.role == role).map(|(_, &extent)| extent).product()
        };
        let rows = size(Extent::Rows);
        let columns = size(Extent::Columns);
        let contracted = size(Extent::Contracted);
        let features = size(Extent::Features);
        let positions = size(Extent::Positions);
        let experts = size(Extent::Experts);
        let mixture = |Slots { top, per_sample }: Slots| Mixture {
            tokens: rows * positions,
            experts,
            capacity: rows * per_sample,
            top,
            hidden: features,
        };
        let recurrence = |initial| Recurrence { batch: rows, sequence: positions, hidden: features, initial };
        // Into how many parts ranks have cut the loops of a role.
        let parts = |role: Extent| -> usize {
            let cut = |(one, &extent): (&Loop, &usize)| if one.role == role { one.extent / extent.max(1) } else { 1 };
            self.loops.iter().zip(extents).map(cut).product()
        };
        // Only of element-wise operators, whose loops walk a tensor: a product's loops may multiply to more than a `usize` holds.
        let elements = || extents.iter().product();
        let window = |window: Window| Window { batch: rows, in_channels: contracted, out_channels: columns, ..window };
        let pooled = |window: Window| Window { batch: rows, in_channels: features, out_channels: features, ..window };
        let attention = |causal, scaled, relative, packed| Attention {
            batch: rows,
            queries: positions,
            keys: size(Extent::Keys),
            key_heads: size(Extent::Heads),
            group: size(Extent::Group),
            head_dimension: features,
            causal,
            scaled,
            relative,
            packed,
            query_parts: if causal || relative.is_some() { parts(Extent::Positions) } else { 1 },
            query_offset: 0,
            ring: None,
        };
        let rope = |theta| Rope {
            batch: rows,
            positions,
            heads: size(Extent::Heads),
            head_dimension: features,
            theta,
            position_parts: parts(Extent::Positions),
            position_offset: 0,
        };
        match self.kind {
            OperatorKind::Matmul { weight, relu } => {
                Kernel::Matmul { rows, columns, contracted, weight, bias: self.inputs.len() > 2, relu }
            }
            OperatorKind::MatmulInputGradient(weight) => Kernel::MatmulInputGradient { rows, columns, contracted, weight },
            OperatorKind::MatmulWeightGradient(weight) => Kernel::MatmulWeightGradient { rows, columns, contracted, weight },
            OperatorKind::BiasAdd => Kernel::BiasAdd { rows, columns },
            OperatorKind::BiasGradient => Kernel::BiasGradient { rows, columns },
            OperatorKind::Relu => Kernel::Relu { elements: elements() },
            OperatorKind::ReluGradient => Kernel::ReluGradient { elements: elements() },
            OperatorKind::Gelu => Kernel::Gelu { elements: elements() },
            OperatorKind::GeluGradient => Kernel::GeluGradient { elements: elements() },
            OperatorKind::GeluExact => Kernel::GeluExact { elements: elements() },
            OperatorKind::GeluExactGradient => Kernel::GeluExactGradient { elements: elements() },
            OperatorKind::SiluMultiply => Kernel::SiluMultiply { elements: elements() },
            OperatorKind::SiluMultiplyGradient => Kernel::SiluMultiplyGradient { elements: elements() },
            OperatorKind::Add => Kernel::Add { elements: elements() },
            OperatorKind::Convolution(shape) => Kernel::Convolution(window(shape)),
            OperatorKind::ConvolutionInputGradient(shape) => Kernel::ConvolutionInputGradient(window(shape)),
            OperatorKind::ConvolutionWeightGradient(shape) => Kernel::ConvolutionWeightGradient(window(shape)),
            OperatorKind::BatchNorm => Kernel::BatchNorm { groups: rows, positions, channels: features },
            OperatorKind::BatchNormInputGradient => {
                Kernel::BatchNormInputGradient { groups: rows, positions, channels: features }
            }
            OperatorKind::BatchNormWeightGradient => Kernel::BatchNormWeightGradient { groups: rows, channels: features },
            OperatorKind::BatchNormInference => Kernel::BatchNormInference { positions: rows * positions, channels: features },
            OperatorKind::MaxPool(shape) => Kernel::MaxPool(pooled(shape)),
            OperatorKind::MaxPoolGradient(shape) => Kernel::MaxPoolGradient(pooled(shape)),
            OperatorKind::GlobalAveragePool => Kernel::GlobalAveragePool { batch: rows, positions, channels: features },
            OperatorKind::GlobalAveragePoolGradient => {
                Kernel::GlobalAveragePoolGradient { batch: rows, positions, channels: features }
            }
            OperatorKind::LayerNorm(epsilon) => Kernel::LayerNorm { rows, features, epsilon },
            OperatorKind::LayerNormInputGradient => Kernel::LayerNormInputGradient { rows, features },
            OperatorKind::LayerNormWeightGradient => Kernel::LayerNormWeightGradient { rows, features },
            OperatorKind::RmsNorm(epsilon) => Kernel::RmsNorm { rows, features, epsilon },
            OperatorKind::RmsNormInputGradient => Kernel::RmsNormInputGradient { rows, features },
            OperatorKind::RmsNormWeightGradient => Kernel::RmsNormWeightGradient { rows, features },
            OperatorKind::Rope { theta } => Kernel::Rope(rope(theta)),
            OperatorKind::RopeGradient { theta } => Kernel::RopeGradient(rope(theta)),
            // Which samples it works on is known where it is emitted.
            OperatorKind::Dropout { rate, site } => Kernel::Dropout(Dropout {
                first_sample: 0,
                samples: rows,
                positions,
                features,
                parts: parts(Extent::Positions),
                rate,
                site,
            }),
            OperatorKind::Prepend => Kernel::Prepend { batch: rows, positions, features },
            OperatorKind::PrependInputGradient => Kernel::PrependInputGradient { batch: rows, positions, features },
            OperatorKind::PrependWeightGradient => Kernel::PrependWeightGradient { batch: rows, positions, features },
            OperatorKind::First => Kernel::First { batch: rows, positions, features },
            OperatorKind::FirstGradient => Kernel::FirstGradient { batch: rows, positions, features },
            OperatorKind::Embedding => Kernel::Embedding {
                tokens: rows,
                vocabulary: size(Extent::Vocabulary),
                hidden: features,
                parts: parts(Extent::Vocabulary),
            },
            OperatorKind::EmbeddingWeightGradient => Kernel::EmbeddingWeightGradient {
                tokens: rows,
                vocabulary: size(Extent::Vocabulary),
                hidden: features,
                parts: parts(Extent::Vocabulary),
            },
            OperatorKind::Attention { causal, scaled, relative, packed } => {
                Kernel::Attention(attention(causal, scaled, relative, packed))
            }
            OperatorKind::AttentionGradient { causal, scaled, relative, packed } => {
                Kernel::AttentionGradient(attention(causal, scaled, relative, packed))
            }
            OperatorKind::Split => Kernel::Split { rows, parts: size(Extent::Parts), columns: features },
            OperatorKind::Join => Kernel::Join { rows, parts: size(Extent::Parts), columns: features },
            OperatorKind::CrossEntropy => Kernel::CrossEntropy { rows, classes: features },
            OperatorKind::LogitStatistics => Kernel::LogitStatistics { rows, classes: features, parts: parts(Extent::Features) },
            OperatorKind::CrossEntropyOfStatistics => Kernel::CrossEntropyOfStatistics { rows, parts: positions },
            OperatorKind::CrossEntropyGradient { normalizer } => Kernel::CrossEntropyGradient {
                rows,
                classes: features,
                normalizer,
                parts: parts(Extent::Features),
                scaled: false,
            },
            OperatorKind::Route { top } => Kernel::Route { tokens: rows * positions, experts, top },
            OperatorKind::RouteGradient { top } => Kernel::RouteGradient { tokens: rows * positions, experts, top },
            OperatorKind::Dispatch(slots) => Kernel::Dispatch(mixture(slots)),
            OperatorKind::DispatchGradient(slots) => Kernel::DispatchGradient(mixture(slots)),
            OperatorKind::Combine(slots) => Kernel::Combine(mixture(slots)),
            OperatorKind::CombineInputGradient(slots) => Kernel::CombineInputGradient(mixture(slots)),
            OperatorKind::CombineGateGradient(slots) => Kernel::CombineGateGradient(mixture(slots)),
            OperatorKind::Lstm { initial } => Kernel::Lstm(recurrence(initial)),
            OperatorKind::LstmGradient { initial, outputs, last } => {
                Kernel::LstmGradient { sizes: recurrence(initial), outputs, last }
            }
            OperatorKind::LstmWeightGradient { initial } => Kernel::LstmWeightGradient(recurrence(initial)),
            OperatorKind::Multiply => Kernel::Multiply { elements: elements() },
            OperatorKind::Scale { square } => Kernel::Scale { elements: elements(), square },
            OperatorKind::ExpertMatmul => Kernel::ExpertMatmul { experts, rows, columns, contracted },
            OperatorKind::ExpertMatmulInputGradient => Kernel::ExpertMatmulInputGradient { experts, rows, columns, contracted },
            OperatorKind::ExpertMatmulWeightGradient => Kernel::ExpertMatmulWeightGradient { experts, rows, columns, contracted },
        }
    }
}
