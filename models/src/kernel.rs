//! Kernels: operators whose loops have sizes.
//!
//! A [`Kernel`] is the smallest unit that is timed, modelled and executed. The calibration times
//! kernels, the cost model predicts the time of kernels, and a backend runs kernels. A kernel has
//! the sizes of one rank's work and does not know how a layout led to them.
//!
//! Tensors are dense and row-major in the order that a variant states. Images have their channels
//! last. Statistics (mean, reciprocal standard deviation, log-sum-exp) are in single precision in
//! every run.
//!
//! [`table`] describes each kernel: its name, its operands in order, its arithmetic. Traffic and
//! operand sizes follow from the description ([`spec`]). To add a kernel, add a variant, its arm in
//! [`Kernel::describe`], and its function in a file of the table.

mod control;
mod derived;
mod members;
mod planned_work;
mod sizes;
mod spec;
mod table;

pub use control::Control;
pub(crate) use planned_work::{GradientReads, MOST_PLANNED_READS};
pub use planned_work::{Planned, PlannedKind};
pub use sizes::{
    Activation, EightBits, Epsilon, Mixture, NEWTON_SCHULZ, NEWTON_SCHULZ_STEPS, Recurrence, Scan, ScanRule, Smoothing,
    WeightLayout, Window, muon_length, scale_factor,
};
pub use spec::{KernelFamily, KernelOperand, KernelSpec, MOST_OPERANDS, Traffic};

use crate::attention::{Attention, Rope};
use crate::compression::Compression;
use crate::defaults::{is_one, is_zero, one};
use crate::dropout::Dropout;
use serde::{Deserialize, Serialize};
use table::{
    activations, attention, images, loss, mixtures, movement, norms, planned, products, recurrence, scan, sequences, training,
};

/// One computation on one rank, with all its sizes.
///
/// [`Kernel::spec`] lists the operands in order. Gradients of parameters, and sums over the batch
/// such as a loss, can accumulate: the kernel then adds to the output. The instruction says so.
///
/// A size means the same in each variant:
/// - `rows`: rows of a matrix. These are samples, or samples times positions.
/// - `columns`, `contracted`: columns of a product, and the dimension that it sums over.
/// - `elements`: elements of the result.
/// - `batch`, `positions`, `features`: samples, positions of each (pixels of an image), features of
///   a position.
/// - `groups`: groups of samples that share batch-norm statistics.
/// - `tokens`, `hidden`: positions of all samples, and features of each.
/// - `vocabulary`, `classes`: rows of an embedding's table and columns of logits, of the rank's
///   part.
/// - `experts`, `top`: experts, and experts that a token is sent to.
/// - `parts`: parts into which a group of ranks has cut a dimension; 1 if it is whole. The rank's
///   index in its group says which part the kernel works on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs, reason = "sizes are described above, once for all variants")]
#[rustfmt::skip]
pub enum Kernel {
    /// `y[rows, columns] = activation(x[rows, contracted] · w + bias[columns])`, with or without
    /// the bias. [`Activation::GeluKept`] also writes the activation's argument, `[rows, columns]`.
    Matmul {
        rows: usize,
        columns: usize,
        contracted: usize,
        /// Order of w's dimensions.
        weight: WeightLayout,
        /// Whether a bias is added.
        bias: bool,
        #[serde(alias = "relu", deserialize_with = "sizes::activation")]
        activation: Activation,
    },
    /// `dx[rows, contracted] = dy[rows, columns] · wᵀ`. With `gelu` each element is multiplied by
    /// the slope of a [`Kernel::Gelu`] at its argument, `[rows, contracted]`.
    MatmulInputGradient {
        rows: usize,
        columns: usize,
        contracted: usize,
        weight: WeightLayout,
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        gelu: bool,
    },
    /// `dw = xᵀ · dy`, in the order of w's dimensions, and with `bias` also
    /// `dbias[columns] = Σ_rows dy`.
    MatmulWeightGradient {
        rows: usize,
        columns: usize,
        contracted: usize,
        weight: WeightLayout,
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        bias: bool,
    },
    /// x `[rows, columns]` in eight bits: `x · 2^e`, rounded, with the largest whole `e` for which
    /// the largest element fits the format. Writes the factor `2^-e` `[1]` and the matrix as it is
    /// (`straight`), transposed `[columns, rows]`, or both.
    ///
    /// Scaling by a power of two rounds all but the smallest numbers in the same way, whatever `e`
    /// is. Results are thus the same in every layout, though each rank finds the `e` of its part.
    Quantise {
        rows: usize,
        columns: usize,
        format: EightBits,
        straight: bool,
        /// Products in eight bits need both operands with the contracted dimension last.
        transposed: bool,
    },
    /// [`Kernel::Matmul`] of quantised x `[rows, contracted]` and w `[columns, contracted]`, both
    /// [`EightBits::E4M3`], and the factor of each.
    EightBitMatmul { rows: usize, columns: usize, contracted: usize, bias: bool, activation: Activation },
    /// [`Kernel::MatmulInputGradient`] of quantised dy `[rows, columns]` ([`EightBits::E5M2`]) and
    /// w `[contracted, columns]` ([`EightBits::E4M3`]), and the factor of each.
    EightBitMatmulInputGradient { rows: usize, columns: usize, contracted: usize, gelu: bool },
    /// [`Kernel::MatmulWeightGradient`] of quantised and transposed dy `[columns, rows]`
    /// ([`EightBits::E5M2`]) and x `[contracted, rows]` ([`EightBits::E4M3`]), and the factor of
    /// each. `weight` is the order of dw's dimensions.
    EightBitMatmulWeightGradient { rows: usize, columns: usize, contracted: usize, weight: WeightLayout },
    /// `y[rows, columns] = x[rows, columns] + bias[columns]`.
    BiasAdd { rows: usize, columns: usize },
    /// `dbias[columns] = Σ_rows dy[rows, columns]`.
    BiasGradient { rows: usize, columns: usize },
    /// `y = max(0, x)`.
    Relu { elements: usize },
    /// `dx = dy` where `y > 0`, else 0.
    ReluGradient { elements: usize },
    /// GELU by its tanh approximation, as in GPT-2.
    Gelu { elements: usize },
    /// `dx = dy · gelu'(x)`.
    GeluGradient { elements: usize },
    /// GELU as defined, by the error function (Hendrycks and Gimpel 2016).
    GeluExact { elements: usize },
    /// `dx = dy · gelu'(x)`.
    GeluExactGradient { elements: usize },
    /// `y = gate · σ(gate) · x`, the product of SwiGLU (Shazeer 2020).
    SiluMultiply { elements: usize },
    /// Gradients of [`Kernel::SiluMultiply`] for `gate` and `x`.
    SiluMultiplyGradient { elements: usize },
    /// `y = a + b`.
    Add { elements: usize },
    /// Cross-correlation of x `[batch, height, width, in]` with w `[out, size, size, in]`, which
    /// frameworks call convolution. y is `[batch, out_height, out_width, out]`.
    Convolution(Window),
    ConvolutionInputGradient(Window),
    ConvolutionWeightGradient(Window),
    /// Batch normalisation of x `[groups, positions, channels]` over the positions of each group.
    /// Writes y and `saved [groups, 2, channels]` (mean, reciprocal standard deviation). If the
    /// instruction lists them, it also writes `statistics [2, channels]`: the sums over groups of
    /// mean and unbiased variance (may accumulate). `positions` counts samples of a group times
    /// pixels.
    BatchNorm { groups: usize, positions: usize, channels: usize },
    /// Writes dx and `sums [groups, 2, channels]`: `Σ dy` and `Σ dy · x̂` of each group.
    BatchNormInputGradient { groups: usize, positions: usize, channels: usize },
    /// `dscale` and `dshift`: the second and the first of the sums, added over groups.
    BatchNormWeightGradient { groups: usize, channels: usize },
    /// Batch normalisation by `running [2, channels]` (mean, variance), for evaluation. `positions`
    /// counts samples times pixels.
    BatchNormInference { positions: usize, channels: usize },
    /// `running = 0.9 running + 0.1 statistics / contributions`, both `[2, channels]`.
    RunningStatistics {
        channels: usize,
        /// Groups, over ranks and micro-batches, that were summed into the statistics.
        contributions: usize,
    },
    /// Maximum over windows, with as many output channels as input channels. Writes y and indices:
    /// for each output element the offset of its maximum in the input.
    MaxPool(Window),
    MaxPoolGradient(Window),
    /// Mean over the positions of x `[batch, positions, channels]`.
    GlobalAveragePool { batch: usize, positions: usize, channels: usize },
    GlobalAveragePoolGradient { batch: usize, positions: usize, channels: usize },
    /// Layer normalisation of each row, with a scale and a shift. Writes y and `saved [rows, 2]`
    /// (mean, reciprocal standard deviation).
    LayerNorm {
        rows: usize,
        features: usize,
        /// Number added to the variance.
        epsilon: Epsilon,
    },
    LayerNormInputGradient { rows: usize, features: usize },
    LayerNormWeightGradient { rows: usize, features: usize },
    /// Each row over its root mean square, with a scale (Zhang and Sennrich 2019). Writes y and
    /// `saved [rows]` (the reciprocal of the root).
    RmsNorm {
        rows: usize,
        features: usize,
        /// Number added to the mean square.
        epsilon: Epsilon,
    },
    RmsNormInputGradient { rows: usize, features: usize },
    RmsNormWeightGradient { rows: usize, features: usize },
    /// Rotary position embedding of x `[batch, positions, heads, head_dimension]`.
    Rope(Rope),
    /// Rotation of dy in the opposite direction.
    RopeGradient(Rope),
    /// `y = x / (1 - rate)` for elements that are kept, else 0. It is its own gradient, since the
    /// same elements are kept.
    Dropout(Dropout),
    /// y `[batch, positions + 1, features]`: the row `[features]` before each sequence of x.
    Prepend { batch: usize, positions: usize, features: usize },
    PrependInputGradient { batch: usize, positions: usize, features: usize },
    PrependWeightGradient { batch: usize, positions: usize, features: usize },
    /// y `[batch, features]`: the first position of each sequence of x
    /// `[batch, positions, features]`.
    First { batch: usize, positions: usize, features: usize },
    /// dx, zero except at the first positions.
    FirstGradient { batch: usize, positions: usize, features: usize },
    /// `y[t] = table[ids[t]]`, and zero if that row is in another part. The table
    /// `[vocabulary, hidden]` is the rank's part.
    Embedding { tokens: usize, vocabulary: usize, hidden: usize, parts: usize },
    /// `dtable[ids[t]] += dy[t]`, from zero, for the rows of the rank's part.
    EmbeddingWeightGradient { tokens: usize, vocabulary: usize, hidden: usize, parts: usize },
    /// Softmax attention of q `[batch, queries, heads, head_dimension]` over k and v
    /// `[batch, keys, key_heads, head_dimension]`, which are one tensor with q if packed. A table
    /// of relative positions is `[buckets, heads]`. Writes out, shaped as q, and the log-sum-exp
    /// `[batch, heads, queries]`.
    ///
    /// A step of a ring ([`Attention::ring`]) writes out in single precision. Steps after the first
    /// merge their results with out and log-sum-exp.
    Attention(Attention),
    /// Gradients for q, k, v (one tensor if packed) and the table (may accumulate). It recomputes
    /// the scores, as FlashAttention does (Dao et al. 2022).
    ///
    /// A step of a ring reads the out and the log-sum-exp of all steps, and writes gradients in
    /// single precision. Steps after the first add to dq.
    AttentionGradient(Attention),
    /// x `[rows, parts, columns]` as `parts` tensors `[rows, columns]`: at most [`MOST_OPERANDS`].
    Split { rows: usize, parts: usize, columns: usize },
    /// The reverse of [`Kernel::Split`].
    Join { rows: usize, parts: usize, columns: usize },
    /// Softmax cross-entropy of logits `[rows, classes]`. Labels of -1 are ignored. Writes
    /// `loss [1]` (a sum over rows; may accumulate), `correct [1]` (rows whose largest logit is the
    /// label's; may accumulate) and the log-sum-exp `[rows]`.
    CrossEntropy { rows: usize, classes: usize },
    /// Contribution of the rank's part of the classes to [`Kernel::CrossEntropy`]. Writes
    /// `statistics [rows, 4]`: the largest logit, the sum of exponentials relative to it, the
    /// label's logit (minus infinity if it is in another part), and 1 if the first of the largest
    /// logits is the label's.
    LogitStatistics { rows: usize, classes: usize, parts: usize },
    /// [`Kernel::CrossEntropy`] from `statistics [parts, rows, 4]` of all parts of the classes.
    CrossEntropyOfStatistics { rows: usize, parts: usize },
    /// `dlogits = (softmax - onehot) / normalizer`. With `scaled` it is multiplied by the loss
    /// scale ([`Control::LossScale`]).
    CrossEntropyGradient {
        rows: usize,
        classes: usize,
        /// Predictions of the global batch, over which the loss is a mean.
        normalizer: usize,
        parts: usize,
        scaled: bool,
    },
    /// The number of classes, of the rank's part, that come before the label's: with a larger
    /// logit, or an equal one and a smaller number. Reads logits, labels and, if there are several
    /// parts, the statistics `[parts, rows, 4]` of [`Kernel::LogitStatistics`]. Writes `ranks
    /// [rows]`, 0 where the label is ignored.
    LabelRanks { rows: usize, classes: usize, parts: usize },
    /// The number of labels among the `top` best classes: reads `ranks [rows]` over all classes and
    /// labels, and writes `count [1]` (may accumulate).
    TopLabels { rows: usize, top: usize },
    /// The probabilities of all classes, from logits, labels and log-sum-exp, and behind them the
    /// label, -1 if it is ignored: `scores [rows, classes + 1]`.
    ClassScores { rows: usize, classes: usize },
    /// [`Kernel::CrossEntropy`] against smoothed targets and with a weight for each class, as
    /// PyTorch's `CrossEntropyLoss` with `label_smoothing` and `weight`. Also reads
    /// `weights [classes]`. The target of class c is `w_c ((1 - s) [c = label] + s / classes)`, and
    /// the loss of a row is the sum of `target · (log-sum-exp - logit)`. Writes loss, correct and
    /// log-sum-exp as [`Kernel::CrossEntropy`], then `weight [1]`: the sum over rows of the label's
    /// weight (may accumulate).
    WeightedCrossEntropy { rows: usize, classes: usize, smoothing: Smoothing },
    /// `dlogits = (softmax Σ target - target) / normalizer`, times the loss scale with `scaled`.
    WeightedCrossEntropyGradient { rows: usize, classes: usize, smoothing: Smoothing, normalizer: usize, scaled: bool },
    /// The `top` largest of each token's logits `[tokens, experts]`, and the softmax over them (the
    /// router of Mixtral, Jiang et al. 2024). Of equal logits the first is taken. Writes gates
    /// `[tokens, top]` and choices `[tokens, top]`, largest first.
    Route { tokens: usize, experts: usize, top: usize },
    /// dlogits, zero for experts that were not chosen.
    RouteGradient { tokens: usize, experts: usize, top: usize },
    /// Tokens x `[tokens, hidden]` in the slots of the experts that they chose. Slots are filled in
    /// the order of tokens, and of a token's choices, until an expert is full. Writes dispatched
    /// `[experts, capacity, hidden]` (zero in empty slots) and places `[tokens, top]` (the slot
    /// within the expert, -1 if it was full). If the instruction lists it, it also writes
    /// `dropped [1]`: the number of choices that found no slot (may accumulate).
    Dispatch(Mixture),
    DispatchGradient(Mixture),
    /// `y[token] = Σ gate · row` over the slots `[experts, capacity, hidden]` that the token's
    /// choices found.
    Combine(Mixture),
    /// drows, zero in empty slots.
    CombineInputGradient(Mixture),
    /// dgates, zero for choices that found no slot.
    CombineGateGradient(Mixture),
    /// A product for each expert: `y[e] = x[e] · w[e]ᵀ`, of x `[experts, rows, contracted]` and w
    /// `[experts, columns, contracted]`. `experts` are those on this rank, `rows` the slots of
    /// each.
    ExpertMatmul { experts: usize, rows: usize, columns: usize, contracted: usize },
    ExpertMatmulInputGradient { experts: usize, rows: usize, columns: usize, contracted: usize },
    ExpertMatmulWeightGradient { experts: usize, rows: usize, columns: usize, contracted: usize },
    /// A layer of PyTorch's `LSTM` over a whole sequence (Hochreiter and Schmidhuber 1997).
    ///
    /// Reads projected `[batch, sequence, 4, hidden]` (contributions of inputs and biases to the
    /// gates i, f, g, o), w `[4 hidden, hidden]` and possibly an initial state `[batch, 2, hidden]`
    /// (output, cell). Writes y `[batch, sequence, hidden]`, gates `[batch, sequence, 4, hidden]`,
    /// cells `[batch, sequence, hidden]` and the last state `[batch, 2, hidden]`.
    Lstm(Recurrence),
    /// Backpropagation through time, to dprojected and possibly dstate.
    LstmGradient {
        sizes: Recurrence,
        /// Whether there is a gradient of y.
        outputs: bool,
        /// Whether there is a gradient of the last state.
        last: bool,
    },
    LstmWeightGradient(Recurrence),
    /// Linear attention: at each position a state is updated by key and value and read by a query.
    /// No backend has it.
    ///
    /// Reads keys and queries `[batch, positions, key_heads, 2, key_dimension]`, values
    /// `[batch, positions, key_heads, group, value_dimension]`, controls `[batch, positions,
    /// key_heads, group, controls]` and the heads' parameters. Writes y like the values.
    Scan(Scan),
    /// All gradients of a scan. It recomputes the states.
    ScanGradient(Scan),
    /// `y = x · times / √square`. It is its own gradient.
    Scale {
        elements: usize,
        #[serde(default = "one", skip_serializing_if = "is_one")]
        times: usize,
        square: usize,
    },
    /// `y = a · b`, element by element. Its gradients are products too.
    Multiply { elements: usize },
    /// Stochastic gradient descent, as PyTorch's `SGD`.
    ///
    /// In mixed precision it updates the master copy of the parameter, and writes the parameter as
    /// the copy rounded (Micikevicius et al. 2018).
    Sgd {
        elements: usize,
        /// Whether it follows a control ([`Kernel::UpdateControl`]): clipping, loss scaling.
        controlled: bool,
        /// Whether there is a velocity.
        momentum: bool,
        /// Whether the momentum is Nesterov's.
        nesterov: bool,
        /// Whether the parameters are exempt from weight decay.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        exempt: bool,
    },
    /// AdamW (Loshchilov and Hutter 2019); Adam if the weight decay is zero. In mixed precision as
    /// [`Kernel::Sgd`].
    AdamW {
        elements: usize,
        controlled: bool,
        /// Whether the parameters are exempt from weight decay.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        exempt: bool,
    },
    /// The first half of LAMB (You et al. 2020): updates the moments of one parameter, and writes
    /// the direction of its update, Adam's step plus the weight decay. Also writes the squared
    /// norms of the parameter and of the direction, `norms [2]`. It reads the master copy of the
    /// parameter in mixed precision.
    LambDirection {
        elements: usize,
        controlled: bool,
        /// Whether the parameter is exempt from weight decay.
        exempt: bool,
    },
    /// The second half of LAMB: steps along the direction, by the learning rate times the ratio of
    /// the two norms. The ratio is 1 if either norm is zero. In mixed precision as
    /// [`Kernel::Sgd`].
    LambStep { elements: usize, controlled: bool },
    /// The first part of Muon (Jordan et al. 2024): updates the momentum of a shard, and writes
    /// Nesterov's direction, the gradient plus the momentum ahead.
    MuonDirection { elements: usize, controlled: bool },
    /// The middle of Muon: writes, for each of `matrices` matrices x `[rows, columns]`, nearly the
    /// closest matrix with orthonormal rows or columns, by [`NEWTON_SCHULZ_STEPS`] steps of Newton
    /// and Schulz. Zeros stay zeros. A backend has memory of its own for one matrix's steps.
    Orthogonalise { matrices: usize, rows: usize, columns: usize },
    /// The last part of Muon: decays the parameters, and steps along the orthogonal direction by
    /// the learning rate times `0.2 √longest`, so that an update is as long as AdamW's (Liu et al.
    /// 2025). In mixed precision as [`Kernel::Sgd`].
    MuonStep {
        elements: usize,
        /// The larger of the whole matrix's rows and columns.
        longest: usize,
        controlled: bool,
        /// Whether the parameter is exempt from weight decay.
        exempt: bool,
    },
    /// `y /= parts`, in single precision: the sum over `parts` replicas becomes their mean.
    Average { elements: usize, parts: usize },
    /// `y = a - b`, in single precision: how far a replica has moved from the parameters that it
    /// started a round with.
    Difference { elements: usize },
    /// The outer step of local SGD (DiLoCo, Douillard et al. 2023): SGD on the outer parameters,
    /// whose gradient is the mean of the replicas' [`Kernel::Difference`]s. The replica's
    /// parameters become the outer ones, or a mixture of the two. In single precision.
    OuterStep {
        elements: usize,
        /// The number of replicas. The kernel reads the sum of their differences.
        replicas: usize,
        /// Whether there is a velocity.
        momentum: bool,
        /// Whether the momentum is Nesterov's.
        nesterov: bool,
        /// True if the result is a mean of the replica's own parameters and the outer ones.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        mixed: bool,
    },
    /// Rounds x to few bits for a message of `parts` equal parts ([`Compression::part`]), to
    /// nearest, ties to even. With `feedback` it also adds to x the error that was left last time,
    /// and leaves the error of this time (Seide et al. 2014).
    Compress { elements: usize, parts: usize, format: Compression, feedback: bool },
    /// `y = Σ x`, in single precision: the sum of `sources` messages of `elements` numbers each.
    Decompress { elements: usize, sources: usize, format: Compression },
    /// Decides how optimizers use this step's gradient, from the sum of its squares over the whole
    /// model. Updates the [`Control`].
    UpdateControl {
        /// Whether the gradient is clipped.
        clip: bool,
        /// Whether the loss is scaled. The scale then follows overflows (Micikevicius et al. 2018).
        scaled: bool,
        /// With weighted classes, the predictions of the global batch, else 0. The kernel then also
        /// reads the weight of their labels `[1]`, and the gradient is divided by it in place of
        /// the predictions.
        #[serde(default, skip_serializing_if = "is_zero")]
        predictions: usize,
    },
    /// `y[1] = Σ x`.
    Sum { elements: usize },
    /// `y += x`, in single precision.
    Accumulate { elements: usize },
    /// `y = x`, from single precision to the run's.
    Narrow { elements: usize },
    /// Zeros in single precision.
    Zero { elements: usize },
    /// `y[1] = Σ x²`.
    SumOfSquares { elements: usize },
    /// The rank's part y `[outer, inner]` of a replicated x `[outer, parts, inner]`. `outer` is the
    /// product of the dimensions before the one that is cut. `inner` is the product of a part's
    /// extent and the dimensions after it.
    Slice { outer: usize, parts: usize, inner: usize },
    /// x `[parts, outer, inner]` to `[outer, parts, inner]`: restores order after an all-gather.
    Interleave { outer: usize, parts: usize, inner: usize },
    /// x `[outer, parts, inner]` to `[parts, outer, inner]`: the order for a reduce-scatter.
    Deinterleave { outer: usize, parts: usize, inner: usize },
    /// y `[rows, part]`: `part` columns of x `[rows, columns]` from `start` on, for a rank of
    /// another mesh.
    TakeColumns { rows: usize, columns: usize, start: usize, part: usize },
    /// The reverse of [`Kernel::TakeColumns`]. It leaves the other columns of y.
    PutColumns { rows: usize, columns: usize, start: usize, part: usize },
    /// Work that is planned and simulated, but that no backend has a kernel for.
    Planned(Planned),
}

impl Kernel {
    /// Returns the kernel's description: name, operands in order, arithmetic.
    pub fn spec(&self) -> KernelSpec {
        self.describe(|spec| *spec)
    }

    /// Returns what `fact` finds in the kernel's description.
    ///
    /// Each arm calls `fact`, so that the optimiser reduces the arm to the arithmetic of that fact.
    /// A description is large, and building all of it takes ten times as long. `fact` must be
    /// inlined everywhere: a short closure, or a function that says so.
    #[inline(always)]
    fn describe<Fact>(&self, fact: impl Fn(&KernelSpec) -> Fact) -> Fact {
        match *self {
            Kernel::Matmul { rows, columns, contracted, weight, bias, activation } => {
                fact(&products::matmul([rows, columns, contracted], weight, bias, activation))
            }
            Kernel::MatmulInputGradient { rows, columns, contracted, weight, gelu } => {
                fact(&products::matmul_input_gradient([rows, columns, contracted], weight, gelu))
            }
            Kernel::MatmulWeightGradient { rows, columns, contracted, weight, bias } => {
                fact(&products::matmul_weight_gradient([rows, columns, contracted], weight, bias))
            }
            Kernel::Quantise { rows, columns, straight, transposed, .. } => {
                fact(&products::quantise(rows, columns, straight, transposed))
            }
            Kernel::EightBitMatmul { rows, columns, contracted, bias, activation } => {
                fact(&products::eight_bit_matmul([rows, columns, contracted], bias, activation))
            }
            Kernel::EightBitMatmulInputGradient { rows, columns, contracted, gelu } => {
                fact(&products::eight_bit_matmul_input_gradient([rows, columns, contracted], gelu))
            }
            Kernel::EightBitMatmulWeightGradient { rows, columns, contracted, weight } => {
                fact(&products::eight_bit_matmul_weight_gradient([rows, columns, contracted], weight))
            }
            Kernel::BiasAdd { rows, columns } => fact(&products::bias_add(rows, columns)),
            Kernel::BiasGradient { rows, columns } => fact(&products::bias_gradient(rows, columns)),
            Kernel::Relu { elements } => fact(&activations::relu(elements)),
            Kernel::ReluGradient { elements } => fact(&activations::relu_gradient(elements)),
            Kernel::Gelu { elements } => fact(&activations::gelu(elements)),
            Kernel::GeluGradient { elements } => fact(&activations::gelu_gradient(elements)),
            Kernel::GeluExact { elements } => fact(&activations::gelu_exact(elements)),
            Kernel::GeluExactGradient { elements } => fact(&activations::gelu_exact_gradient(elements)),
            Kernel::SiluMultiply { elements } => fact(&activations::silu_multiply(elements)),
            Kernel::SiluMultiplyGradient { elements } => fact(&activations::silu_multiply_gradient(elements)),
            Kernel::Add { elements } => fact(&activations::add(elements)),
            Kernel::Convolution(window) => fact(&images::convolution(&window)),
            Kernel::ConvolutionInputGradient(window) => fact(&images::convolution_input_gradient(&window)),
            Kernel::ConvolutionWeightGradient(window) => fact(&images::convolution_weight_gradient(&window)),
            Kernel::BatchNorm { groups, positions, channels } => fact(&images::batch_norm(groups, positions, channels)),
            Kernel::BatchNormInputGradient { groups, positions, channels } => {
                fact(&images::batch_norm_input_gradient(groups, positions, channels))
            }
            Kernel::BatchNormWeightGradient { groups, channels } => fact(&images::batch_norm_weight_gradient(groups, channels)),
            Kernel::BatchNormInference { positions, channels } => fact(&images::batch_norm_inference(positions, channels)),
            Kernel::RunningStatistics { channels, .. } => fact(&images::running_statistics(channels)),
            Kernel::MaxPool(window) => fact(&images::max_pool(&window)),
            Kernel::MaxPoolGradient(window) => fact(&images::max_pool_gradient(&window)),
            Kernel::GlobalAveragePool { batch, positions, channels } => {
                fact(&images::global_average_pool(batch, positions, channels))
            }
            Kernel::GlobalAveragePoolGradient { batch, positions, channels } => {
                fact(&images::global_average_pool_gradient(batch, positions, channels))
            }
            Kernel::LayerNorm { rows, features, .. } => fact(&norms::layer_norm(rows, features)),
            Kernel::LayerNormInputGradient { rows, features } => fact(&norms::layer_norm_input_gradient(rows, features)),
            Kernel::LayerNormWeightGradient { rows, features } => fact(&norms::layer_norm_weight_gradient(rows, features)),
            Kernel::RmsNorm { rows, features, .. } => fact(&norms::rms_norm(rows, features)),
            Kernel::RmsNormInputGradient { rows, features } => fact(&norms::rms_norm_input_gradient(rows, features)),
            Kernel::RmsNormWeightGradient { rows, features } => fact(&norms::rms_norm_weight_gradient(rows, features)),
            Kernel::Rope(sizes) => fact(&attention::rope("rope", ["x", "y"], &sizes)),
            Kernel::RopeGradient(sizes) => fact(&attention::rope("rope_gradient", ["dy", "dx"], &sizes)),
            Kernel::Dropout(sizes) => fact(&activations::dropout(&sizes)),
            Kernel::Prepend { batch, positions, features } => fact(&sequences::prepend(batch, positions, features)),
            Kernel::PrependInputGradient { batch, positions, features } => {
                fact(&sequences::prepend_input_gradient(batch, positions, features))
            }
            Kernel::PrependWeightGradient { batch, positions, features } => {
                fact(&sequences::prepend_weight_gradient(batch, positions, features))
            }
            Kernel::First { batch, positions, features } => fact(&sequences::first(batch, positions, features)),
            Kernel::FirstGradient { batch, positions, features } => fact(&sequences::first_gradient(batch, positions, features)),
            Kernel::Embedding { tokens, vocabulary, hidden, parts } => {
                fact(&sequences::embedding([tokens, vocabulary, hidden, parts]))
            }
            Kernel::EmbeddingWeightGradient { tokens, vocabulary, hidden, parts } => {
                fact(&sequences::embedding_weight_gradient([tokens, vocabulary, hidden, parts]))
            }
            Kernel::Attention(sizes) => fact(&attention::attention(&sizes)),
            Kernel::AttentionGradient(sizes) => fact(&attention::attention_gradient(&sizes)),
            Kernel::Split { rows, parts, columns } => fact(&sequences::split(rows, parts, columns)),
            Kernel::Join { rows, parts, columns } => fact(&sequences::join(rows, parts, columns)),
            Kernel::CrossEntropy { rows, classes } => fact(&loss::cross_entropy(rows, classes)),
            Kernel::LogitStatistics { rows, classes, parts } => fact(&loss::logit_statistics(rows, classes, parts)),
            Kernel::CrossEntropyOfStatistics { rows, parts } => fact(&loss::cross_entropy_of_statistics(rows, parts)),
            Kernel::CrossEntropyGradient { rows, classes, parts, scaled, .. } => {
                fact(&loss::cross_entropy_gradient(rows, classes, parts, scaled))
            }
            Kernel::LabelRanks { rows, classes, parts } => fact(&loss::label_ranks(rows, classes, parts)),
            Kernel::TopLabels { rows, .. } => fact(&loss::top_labels(rows)),
            Kernel::ClassScores { rows, classes } => fact(&loss::class_scores(rows, classes)),
            Kernel::WeightedCrossEntropy { rows, classes, .. } => fact(&loss::weighted_cross_entropy(rows, classes)),
            Kernel::WeightedCrossEntropyGradient { rows, classes, scaled, .. } => {
                fact(&loss::weighted_cross_entropy_gradient(rows, classes, scaled))
            }
            Kernel::Route { tokens, experts, top } => fact(&mixtures::route(tokens, experts, top)),
            Kernel::RouteGradient { tokens, experts, top } => fact(&mixtures::route_gradient(tokens, experts, top)),
            Kernel::Dispatch(mixture) => fact(&mixtures::dispatch(&mixture)),
            Kernel::DispatchGradient(mixture) => fact(&mixtures::dispatch_gradient(&mixture)),
            Kernel::Combine(mixture) => fact(&mixtures::combine(&mixture)),
            Kernel::CombineInputGradient(mixture) => fact(&mixtures::combine_input_gradient(&mixture)),
            Kernel::CombineGateGradient(mixture) => fact(&mixtures::combine_gate_gradient(&mixture)),
            Kernel::ExpertMatmul { experts, rows, columns, contracted } => {
                fact(&products::expert_matmul([experts, rows, columns, contracted]))
            }
            Kernel::ExpertMatmulInputGradient { experts, rows, columns, contracted } => {
                fact(&products::expert_matmul_input_gradient([experts, rows, columns, contracted]))
            }
            Kernel::ExpertMatmulWeightGradient { experts, rows, columns, contracted } => {
                fact(&products::expert_matmul_weight_gradient([experts, rows, columns, contracted]))
            }
            Kernel::Lstm(sizes) => fact(&recurrence::lstm(&sizes)),
            Kernel::LstmGradient { sizes, outputs, last } => fact(&recurrence::lstm_gradient(&sizes, outputs, last)),
            Kernel::LstmWeightGradient(sizes) => fact(&recurrence::lstm_weight_gradient(&sizes)),
            Kernel::Scan(sizes) => fact(&scan::scan(&sizes)),
            Kernel::ScanGradient(sizes) => fact(&scan::scan_gradient(&sizes)),
            Kernel::Scale { elements, .. } => fact(&activations::scale(elements)),
            Kernel::Multiply { elements } => fact(&activations::multiply(elements)),
            Kernel::Sgd { elements, controlled, momentum, nesterov, .. } => {
                fact(&training::sgd(elements, controlled, momentum, nesterov))
            }
            Kernel::AdamW { elements, controlled, .. } => fact(&training::adamw(elements, controlled)),
            Kernel::LambDirection { elements, controlled, .. } => fact(&training::lamb_direction(elements, controlled)),
            Kernel::LambStep { elements, controlled } => fact(&training::lamb_step(elements, controlled)),
            Kernel::MuonDirection { elements, controlled } => fact(&training::muon_direction(elements, controlled)),
            Kernel::Orthogonalise { matrices, rows, columns } => fact(&training::orthogonalise([matrices, rows, columns])),
            Kernel::MuonStep { elements, controlled, .. } => fact(&training::muon_step(elements, controlled)),
            Kernel::Average { elements, .. } => fact(&training::average(elements)),
            Kernel::Difference { elements } => fact(&training::difference(elements)),
            Kernel::OuterStep { elements, momentum, nesterov, mixed, .. } => {
                fact(&training::outer_step(elements, momentum, nesterov, mixed))
            }
            Kernel::Compress { elements, parts, format, feedback } => {
                fact(&training::compress(elements, parts, format, feedback))
            }
            Kernel::Decompress { elements, sources, format } => fact(&training::decompress(elements, sources, format)),
            Kernel::UpdateControl { predictions, .. } => fact(&training::update_control(predictions > 0)),
            Kernel::Sum { elements } => fact(&training::sum("sum", elements)),
            Kernel::Accumulate { elements } => fact(&training::accumulate(elements)),
            Kernel::Narrow { elements } => fact(&training::narrow(elements)),
            Kernel::Zero { elements } => fact(&training::zero(elements)),
            Kernel::SumOfSquares { elements } => fact(&training::sum("sum_of_squares", elements)),
            Kernel::Slice { outer, parts, inner } => fact(&movement::slice(outer, parts, inner)),
            Kernel::Interleave { outer, parts, inner } => fact(&movement::interleave("interleave", outer, parts, inner)),
            Kernel::Deinterleave { outer, parts, inner } => fact(&movement::interleave("deinterleave", outer, parts, inner)),
            Kernel::TakeColumns { rows, columns, part, .. } => fact(&movement::take_columns(rows, columns, part)),
            Kernel::PutColumns { rows, columns, part, .. } => fact(&movement::put_columns(rows, columns, part)),
            Kernel::Planned(work) => fact(&planned::planned(&work)),
        }
    }
}
