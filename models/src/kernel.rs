//! Kernels: what an operator is once every loop has a size.
//!
//! A [`Kernel`] is the smallest thing that is timed, modelled and executed: the calibration times kernels, the cost model answers
//! for kernels, a backend runs kernels. It carries the sizes of *one rank's* share and nothing of why they are so.
//! Every tensor is dense and row-major in the order that the variant states; images have their channels last.
//! `Fp32` statistics (mean, reciprocal standard deviation, log-sum-exp) stay in single precision in every precision.

mod control;
mod derived;
mod members;
mod sizes;
mod spec;
mod table;

pub use control::Control;
pub use sizes::{Activation, EightBits, Epsilon, Mixture, Recurrence, WeightLayout, Window};
pub use spec::{KernelFamily, KernelOperand, KernelSpec, MOST_OPERANDS, Traffic};

use crate::attention::{Attention, Rope};
use crate::dropout::Dropout;
use serde::{Deserialize, Serialize};
use table::{activations, attention, images, loss, mixtures, movement, norms, products, recurrence, sequences, training};

/// One computation on one rank, with all its sizes. "Reads" and "writes" name the operands in the order in which an
/// instruction lists them. Kernels that write gradients of parameters can also *accumulate* (add to what is there); the
/// instruction says so.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kernel {
    /// `y[rows, columns] = activation(x[rows, contracted] · w (+ bias[columns]))`. Reads x, w (, bias); writes y (, the activation's argument).
    Matmul {
        /// Rows of x and y: samples, or samples times positions.
        rows: usize,
        /// Columns of y.
        columns: usize,
        /// The dimension summed over.
        contracted: usize,
        /// How w lies in memory.
        weight: WeightLayout,
        /// Whether a bias is added in the same pass.
        bias: bool,
        /// What is applied in the same pass.
        #[serde(alias = "relu", deserialize_with = "sizes::activation")]
        activation: Activation,
    },
    /// `dx[rows, contracted] = dy[rows, columns] · wᵀ`, or that times the slope of a GELU at its argument. Reads dy, w (, the argument
    /// `[rows, contracted]`); writes dx.
    MatmulInputGradient {
        /// As in [`Kernel::Matmul`].
        rows: usize,
        /// As in [`Kernel::Matmul`].
        columns: usize,
        /// As in [`Kernel::Matmul`].
        contracted: usize,
        /// As in [`Kernel::Matmul`].
        weight: WeightLayout,
        /// Whether what it makes is the gradient of what a GELU ([`Kernel::Gelu`]) made, and goes on through that in the same pass.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        gelu: bool,
    },
    /// `dw = xᵀ · dy`, laid out as w, and in the same pass `dbias[columns] = Σ_rows dy`. Reads dy, x; writes dw (, dbias) (both may accumulate).
    MatmulWeightGradient {
        /// As in [`Kernel::Matmul`].
        rows: usize,
        /// As in [`Kernel::Matmul`].
        columns: usize,
        /// As in [`Kernel::Matmul`].
        contracted: usize,
        /// As in [`Kernel::Matmul`].
        weight: WeightLayout,
        /// Whether the gradient of a bias is made in the same pass.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        bias: bool,
    },
    /// A matrix in eight bits: `x · 2^e` rounded, e the largest whole number for which the largest element has a place in the format. Reads x
    /// `[rows, columns]`; writes `2^-e` `[1]` (single precision) and, as many as are asked for, the matrix `[rows, columns]` and transposed
    /// `[columns, rows]`. That the factor is a power of two makes the rounding of all but the smallest numbers the same whatever e is, and so
    /// the same in every layout, though ranks have parts of a tensor and each its own e.
    Quantise {
        /// Rows of x.
        rows: usize,
        /// Columns of x.
        columns: usize,
        /// The format of the result.
        format: EightBits,
        /// Whether the matrix is written as it lies.
        straight: bool,
        /// Whether it is written transposed: products of eight bits want of both operands that what is summed over lies together.
        transposed: bool,
    },
    /// [`Kernel::Matmul`] of operands in eight bits ([`Kernel::Quantise`]). Reads x `[rows, contracted]` and w `[columns, contracted]`, both
    /// [`EightBits::E4M3`], the factor of each (, bias); writes y (, the activation's argument).
    EightBitMatmul {
        /// As in [`Kernel::Matmul`].
        rows: usize,
        /// As in [`Kernel::Matmul`].
        columns: usize,
        /// As in [`Kernel::Matmul`].
        contracted: usize,
        /// As in [`Kernel::Matmul`].
        bias: bool,
        /// As in [`Kernel::Matmul`].
        activation: Activation,
    },
    /// [`Kernel::MatmulInputGradient`] of operands in eight bits. Reads dy `[rows, columns]`, [`EightBits::E5M2`], and w `[contracted, columns]`,
    /// [`EightBits::E4M3`], the factor of each (, the argument `[rows, contracted]`); writes dx `[rows, contracted]`.
    EightBitMatmulInputGradient {
        /// As in [`Kernel::Matmul`].
        rows: usize,
        /// As in [`Kernel::Matmul`].
        columns: usize,
        /// As in [`Kernel::Matmul`].
        contracted: usize,
        /// As in [`Kernel::MatmulInputGradient`].
        gelu: bool,
    },
    /// [`Kernel::MatmulWeightGradient`] of operands in eight bits. Reads dy transposed `[columns, rows]`, [`EightBits::E5M2`], and x transposed
    /// `[contracted, rows]`, [`EightBits::E4M3`], and the factor of each; writes dw, laid out as w (may accumulate).
    EightBitMatmulWeightGradient {
        /// As in [`Kernel::Matmul`].
        rows: usize,
        /// As in [`Kernel::Matmul`].
        columns: usize,
        /// As in [`Kernel::Matmul`].
        contracted: usize,
        /// How dw lies in memory.
        weight: WeightLayout,
    },
    /// `y[rows, columns] = x[rows, columns] + bias[columns]`. Reads x, bias; writes y (may be x itself).
    BiasAdd {
        /// Rows.
        rows: usize,
        /// Columns.
        columns: usize,
    },
    /// `dbias[columns] = Σ_rows dy`. Reads dy; writes dbias (may accumulate).
    BiasGradient {
        /// Rows.
        rows: usize,
        /// Columns.
        columns: usize,
    },
    /// `y = max(0, x)`. Reads x; writes y (may be x itself).
    Relu {
        /// Elements.
        elements: usize,
    },
    /// `dx = dy where y > 0`. Reads dy, y; writes dx (may be dy itself).
    ReluGradient {
        /// Elements.
        elements: usize,
    },
    /// GELU by its tanh approximation, as GPT-2 has it. Reads x; writes y.
    Gelu {
        /// Elements.
        elements: usize,
    },
    /// Reads dy, x; writes dx (may be dy itself).
    GeluGradient {
        /// Elements.
        elements: usize,
    },
    /// GELU as it is defined, by the error function (Hendrycks and Gimpel 2016). Reads x; writes y.
    GeluExact {
        /// Elements.
        elements: usize,
    },
    /// Reads dy, x; writes dx (may be dy itself).
    GeluExactGradient {
        /// Elements.
        elements: usize,
    },
    /// `y = gate · σ(gate) · x`, the product in SwiGLU (Shazeer 2020). Reads gate, x; writes y.
    SiluMultiply {
        /// Elements.
        elements: usize,
    },
    /// Reads dy, gate, x; writes dgate (may be dy itself), dx.
    SiluMultiplyGradient {
        /// Elements.
        elements: usize,
    },
    /// `y = a + b`. Reads a, b; writes y (may be a itself).
    Add {
        /// Elements.
        elements: usize,
    },
    /// Cross-correlation as every framework calls convolution. Reads x `[batch, height, width, in]`,
    /// w `[out, size, size, in]`; writes y `[batch, out_height, out_width, out]`.
    Convolution(Window),
    /// Reads dy, w; writes dx.
    ConvolutionInputGradient(Window),
    /// Reads dy, x; writes dw (may accumulate).
    ConvolutionWeightGradient(Window),
    /// Batch normalisation of x `[groups, positions, channels]` over the positions of each group. Reads x, scale, shift;
    /// writes y, saved `[groups, 2, channels]` (mean, reciprocal standard deviation) and, when the instruction lists it,
    /// statistics `[2, channels]`: the sums over groups of mean and unbiased variance (may accumulate).
    BatchNorm {
        /// Groups of samples that share statistics.
        groups: usize,
        /// Samples of a group times pixels.
        positions: usize,
        /// Channels.
        channels: usize,
    },
    /// Reads dy, x, scale, saved; writes dx, sums `[groups, 2, channels]`: Σ dy and Σ dy·x̂ of each group.
    BatchNormInputGradient {
        /// As in [`Kernel::BatchNorm`].
        groups: usize,
        /// As in [`Kernel::BatchNorm`].
        positions: usize,
        /// As in [`Kernel::BatchNorm`].
        channels: usize,
    },
    /// Reads sums; writes dscale (= Σ of the second), dshift (= Σ of the first) (both may accumulate).
    BatchNormWeightGradient {
        /// As in [`Kernel::BatchNorm`].
        groups: usize,
        /// As in [`Kernel::BatchNorm`].
        channels: usize,
    },
    /// Batch normalisation by running statistics, for evaluation. Reads x, scale, shift, running `[2, channels]` (mean, variance); writes y.
    BatchNormInference {
        /// Samples times pixels.
        positions: usize,
        /// Channels.
        channels: usize,
    },
    /// `running = 0.9 running + 0.1 statistics / contributions`. Reads statistics `[2, channels]`; writes running `[2, channels]` in place.
    RunningStatistics {
        /// Channels.
        channels: usize,
        /// How many groups, over ranks and micro-batches, were summed into the statistics.
        contributions: usize,
    },
    /// Maximum over windows; `Window::out_channels == in_channels`. Reads x; writes y, indices (`Int32`: offset of the maximum in the input, per output element).
    MaxPool(Window),
    /// Reads dy, indices; writes dx.
    MaxPoolGradient(Window),
    /// Mean over positions: x `[batch, positions, channels]` to y `[batch, channels]`. Reads x; writes y.
    GlobalAveragePool {
        /// Images.
        batch: usize,
        /// Pixels of an image.
        positions: usize,
        /// Channels.
        channels: usize,
    },
    /// Reads dy; writes dx.
    GlobalAveragePoolGradient {
        /// Images.
        batch: usize,
        /// Pixels of an image.
        positions: usize,
        /// Channels.
        channels: usize,
    },
    /// Layer normalisation of each row. Reads x, scale, shift; writes y, saved `[rows, 2]` (mean, reciprocal standard deviation).
    LayerNorm {
        /// Rows.
        rows: usize,
        /// Features of a row.
        features: usize,
        /// What is added to the variance.
        epsilon: Epsilon,
    },
    /// Reads dy, x, scale, saved; writes dx.
    LayerNormInputGradient {
        /// Rows.
        rows: usize,
        /// Features of a row.
        features: usize,
    },
    /// Reads dy, x, saved; writes dscale, dshift (both may accumulate).
    LayerNormWeightGradient {
        /// Rows.
        rows: usize,
        /// Features of a row.
        features: usize,
    },
    /// Each row over its root mean square (Zhang and Sennrich 2019). Reads x, scale; writes y, saved `[rows]` (the reciprocal of the root).
    RmsNorm {
        /// Rows.
        rows: usize,
        /// Features of a row.
        features: usize,
        /// What is added to the mean square.
        epsilon: Epsilon,
    },
    /// Reads dy, x, scale, saved; writes dx.
    RmsNormInputGradient {
        /// Rows.
        rows: usize,
        /// Features of a row.
        features: usize,
    },
    /// Reads dy, x, saved; writes dscale (may accumulate).
    RmsNormWeightGradient {
        /// Rows.
        rows: usize,
        /// Features of a row.
        features: usize,
    },
    /// Rotary position embedding. Reads x `[batch, positions, heads, head_dimension]`; writes y (may be x itself).
    Rope(Rope),
    /// The same turned back. Reads dy; writes dx (may be dy itself).
    RopeGradient(Rope),
    /// `y = x / (1 - rate)` where an element is kept, else 0. Reads x; writes y (may be x itself). Its own gradient: the same elements are kept.
    Dropout(Dropout),
    /// Puts one row before the others: reads x `[batch, positions, features]`, row `[features]`; writes y `[batch, positions + 1, features]`.
    Prepend {
        /// Sequences.
        batch: usize,
        /// Positions of x.
        positions: usize,
        /// Features of a position.
        features: usize,
    },
    /// Reads dy; writes dx.
    PrependInputGradient {
        /// As in [`Kernel::Prepend`].
        batch: usize,
        /// As in [`Kernel::Prepend`].
        positions: usize,
        /// As in [`Kernel::Prepend`].
        features: usize,
    },
    /// Reads dy; writes drow (may accumulate).
    PrependWeightGradient {
        /// As in [`Kernel::Prepend`].
        batch: usize,
        /// As in [`Kernel::Prepend`].
        positions: usize,
        /// As in [`Kernel::Prepend`].
        features: usize,
    },
    /// The first position of each sequence: reads x `[batch, positions, features]`; writes y `[batch, features]`.
    First {
        /// Sequences.
        batch: usize,
        /// Positions of x.
        positions: usize,
        /// Features of a position.
        features: usize,
    },
    /// Reads dy; writes dx, zero but at the first positions.
    FirstGradient {
        /// As in [`Kernel::First`].
        batch: usize,
        /// As in [`Kernel::First`].
        positions: usize,
        /// As in [`Kernel::First`].
        features: usize,
    },
    /// `y[t] = table[ids[t]]`, and zero where that row is another part's. Reads ids (`Int32`), table `[vocabulary, hidden]`, which is the
    /// part of the rank's index in its group; writes y `[tokens, hidden]`.
    Embedding {
        /// Positions looked up.
        tokens: usize,
        /// Rows of the part of the table.
        vocabulary: usize,
        /// Features.
        hidden: usize,
        /// Parts that the table is cut into; 1 where it is whole.
        parts: usize,
    },
    /// `dtable[ids[t]] += dy[t]`, the rest zero, for the rows of the rank's part. Reads dy, ids; writes dtable (may accumulate).
    EmbeddingWeightGradient {
        /// Positions looked up.
        tokens: usize,
        /// Rows of the part of the table.
        vocabulary: usize,
        /// Features.
        hidden: usize,
        /// As in [`Kernel::Embedding`].
        parts: usize,
    },
    /// Softmax attention. Reads q `[batch, queries, heads, head_dimension]`, k and v `[batch, keys, key_heads, head_dimension]` (packed: one
    /// tensor) and, with relative positions, a table `[buckets, heads]`; writes out, shaped as q, and log-sum-exp `[batch, heads, queries]`.
    /// A step of a ring ([`Attention::ring`]) writes out in single precision, and each but the first merges both with what is there.
    Attention(Attention),
    /// Reads dout, q, k, v (packed: one tensor), out, log-sum-exp (, table); writes dq, dk, dv (packed: one tensor) (, dtable, which may
    /// accumulate). Recomputes the scores, as FlashAttention does (Dao et al. 2022). A step of a ring reads the out and the log-sum-exp of all
    /// steps and writes in single precision; each but the first adds to dq.
    AttentionGradient(Attention),
    /// One tensor to several: reads x `[rows, parts, columns]`; writes `parts` tensors `[rows, columns]`.
    Split {
        /// Rows of each.
        rows: usize,
        /// How many there are: eight at most.
        parts: usize,
        /// Columns of each.
        columns: usize,
    },
    /// The reverse of [`Kernel::Split`]: reads `parts` tensors; writes one.
    Join {
        /// As in [`Kernel::Split`].
        rows: usize,
        /// As in [`Kernel::Split`].
        parts: usize,
        /// As in [`Kernel::Split`].
        columns: usize,
    },
    /// Softmax cross-entropy. Reads logits `[rows, classes]`, labels (`Int32` `[rows]`, -1 is ignored); writes loss `[1]` (sum over rows; may
    /// accumulate), correct `[1]` (rows whose largest logit is the label's; may accumulate), log-sum-exp `[rows]`.
    CrossEntropy {
        /// Predictions.
        rows: usize,
        /// Classes, or the vocabulary.
        classes: usize,
    },
    /// What a part of each row of logits contributes to its cross-entropy. Reads logits `[rows, classes]`, which are the classes of the rank's
    /// index in its group, labels (`Int32` `[rows]`, -1 is ignored); writes statistics `[rows, 4]`: the largest logit, the sum of
    /// exponentials relative to it, the label's logit (minus infinity where that is another part's), and 1 where the first of the
    /// largest is the label's.
    LogitStatistics {
        /// Predictions.
        rows: usize,
        /// Classes of the part.
        classes: usize,
        /// Parts that the classes are cut into.
        parts: usize,
    },
    /// [`Kernel::CrossEntropy`] from the statistics of all parts of the classes. Reads statistics `[parts, rows, 4]`, labels; writes
    /// loss `[1]` (may accumulate), correct `[1]` (may accumulate), log-sum-exp `[rows]`.
    CrossEntropyOfStatistics {
        /// Predictions.
        rows: usize,
        /// Parts that the classes were cut into.
        parts: usize,
    },
    /// `dlogits = (softmax - onehot) / normalizer`. Reads logits, labels, log-sum-exp (, control); writes dlogits (may be the logits
    /// themselves).
    CrossEntropyGradient {
        /// Predictions.
        rows: usize,
        /// Classes, or the vocabulary; of the part of the rank's index in its group.
        classes: usize,
        /// Predictions of the whole global batch, over which the loss is a mean.
        normalizer: usize,
        /// Parts that the classes are cut into; 1 where they are whole.
        parts: usize,
        /// Whether it is multiplied by the loss scale of the control ([`Kernel::UpdateControl`]).
        scaled: bool,
    },
    /// Each token's `top` largest logits and the softmax over them (Mixtral's router, Jiang et al. 2024); of equal logits the first.
    /// Reads logits `[tokens, experts]`; writes gates `[tokens, top]`, choices (`Int32` `[tokens, top]`, largest first).
    Route {
        /// Positions.
        tokens: usize,
        /// Experts to choose from.
        experts: usize,
        /// Experts that a token is sent to.
        top: usize,
    },
    /// Reads dgates, gates, choices; writes dlogits, zero where an expert was not chosen.
    RouteGradient {
        /// As in [`Kernel::Route`].
        tokens: usize,
        /// As in [`Kernel::Route`].
        experts: usize,
        /// As in [`Kernel::Route`].
        top: usize,
    },
    /// Tokens into the slots of the experts that they chose, in the order of the tokens, and of a token's choices, until an expert is full.
    /// Reads x `[tokens, hidden]`, choices `[tokens, top]`; writes dispatched `[experts, capacity, hidden]` (zero where no token came),
    /// places (`Int32` `[tokens, top]`: the slot within the expert, -1 where it was full) and, when the instruction lists it, dropped
    /// `[1]`: how many choices found no slot (may accumulate).
    Dispatch(Mixture),
    /// Reads ddispatched, choices, places; writes dx.
    DispatchGradient(Mixture),
    /// `y[token] = Σ gate · row of the token's slot`, over the choices that found one. Reads rows `[experts, capacity, hidden]`,
    /// gates `[tokens, top]`, choices, places as [`Kernel::Dispatch`] has them; writes y `[tokens, hidden]`.
    Combine(Mixture),
    /// Reads dy, gates, choices, places; writes drows, zero where no token came.
    CombineInputGradient(Mixture),
    /// Reads dy, rows, choices, places; writes dgates, zero where a choice found no slot.
    CombineGateGradient(Mixture),
    /// A product for each expert: `y[e] = x[e] · w[e]ᵀ`. Reads x `[experts, rows, contracted]`, w `[experts, columns, contracted]`;
    /// writes y `[experts, rows, columns]`.
    ExpertMatmul {
        /// Experts on this rank.
        experts: usize,
        /// Slots of an expert.
        rows: usize,
        /// Columns of y.
        columns: usize,
        /// The dimension summed over.
        contracted: usize,
    },
    /// Reads dy, w; writes dx.
    ExpertMatmulInputGradient {
        /// As in [`Kernel::ExpertMatmul`].
        experts: usize,
        /// As in [`Kernel::ExpertMatmul`].
        rows: usize,
        /// As in [`Kernel::ExpertMatmul`].
        columns: usize,
        /// As in [`Kernel::ExpertMatmul`].
        contracted: usize,
    },
    /// Reads dy, x; writes dw (may accumulate).
    ExpertMatmulWeightGradient {
        /// As in [`Kernel::ExpertMatmul`].
        experts: usize,
        /// As in [`Kernel::ExpertMatmul`].
        rows: usize,
        /// As in [`Kernel::ExpertMatmul`].
        columns: usize,
        /// As in [`Kernel::ExpertMatmul`].
        contracted: usize,
    },
    /// A layer of LSTM (Hochreiter and Schmidhuber 1997) over a whole sequence, as PyTorch's `LSTM` has it. Reads projected
    /// `[batch, sequence, 4, hidden]` (what inputs and biases give to the gates i, f, g, o), w `[4 hidden, hidden]` (, state
    /// `[batch, 2, hidden]` to begin with: output and cell); writes y `[batch, sequence, hidden]`, gates `[batch, sequence, 4, hidden]`,
    /// cells `[batch, sequence, hidden]`, last `[batch, 2, hidden]`: the state at the end.
    Lstm(Recurrence),
    /// Back through time. Reads (dy,) (dlast,) w, gates, cells (, state); writes dprojected (, dstate).
    LstmGradient {
        /// As in [`Kernel::Lstm`].
        sizes: Recurrence,
        /// Whether there is a dy.
        outputs: bool,
        /// Whether there is a dlast.
        last: bool,
    },
    /// Reads dprojected, y (, state); writes dw (may accumulate).
    LstmWeightGradient(Recurrence),
    /// `y = x / √square`. Reads x; writes y (may be x itself). Its own gradient.
    Scale {
        /// Elements.
        elements: usize,
        /// What the divisor is the root of.
        square: usize,
    },
    /// `y = a b`, element by element. Reads a, b; writes y (may be a itself). The gradients of both are products too.
    Multiply {
        /// Elements.
        elements: usize,
    },
    /// Stochastic gradient descent as PyTorch's `SGD`. Reads gradient (, control); writes parameter, and velocity when there is momentum, in
    /// place.
    /// In mixed precision the last write is the master copy of the parameter, which is what is updated: the parameter itself is written
    /// as the nearest to it and not read (Micikevicius et al. 2018).
    Sgd {
        /// Elements.
        elements: usize,
        /// Whether clipping and loss scaling have a say ([`Kernel::UpdateControl`]).
        controlled: bool,
        /// Whether there is a velocity buffer.
        momentum: bool,
        /// Whether the step looks ahead (Nesterov).
        nesterov: bool,
    },
    /// AdamW (Loshchilov and Hutter 2019); Adam when the weight decay is zero. Reads gradient (, control); writes parameter, first moment,
    /// second moment, in place.
    /// In mixed precision the last write is the master copy, as for [`Kernel::Sgd`].
    AdamW {
        /// Elements.
        elements: usize,
        /// As in [`Kernel::Sgd`].
        controlled: bool,
    },
    /// Decides how this step's gradient is used. Reads the sum of its squares over the whole model `[1]`; writes the [`Control`] in place.
    UpdateControl {
        /// Whether the gradient is clipped.
        clip: bool,
        /// Whether the loss is scaled, and the scale follows overflows (Micikevicius et al. 2018).
        scaled: bool,
    },
    /// `y = Σ x`. Reads x; writes y `[1]`.
    Sum {
        /// Elements.
        elements: usize,
    },
    /// `y += x`, both in single precision. Reads x; writes y in place.
    Accumulate {
        /// Elements.
        elements: usize,
    },
    /// `y = x` from single precision to the run's. Reads x; writes y.
    Narrow {
        /// Elements.
        elements: usize,
    },
    /// Writes zeros, in single precision.
    Zero {
        /// Elements.
        elements: usize,
    },
    /// Reads x; writes `Σ x²` `[1]`.
    SumOfSquares {
        /// Elements.
        elements: usize,
    },
    /// A rank's own part of a replicated tensor: x `[outer, parts, inner]` to y `[outer, inner]`, the part of the rank's index in its group. Reads x; writes y.
    Slice {
        /// Product of the dimensions before the one that is cut.
        outer: usize,
        /// Ranks of the group.
        parts: usize,
        /// Product of the cut dimension's local extent and those after it.
        inner: usize,
    },
    /// `[parts, outer, inner]` to `[outer, parts, inner]`: what an all-gather leaves, put in order. Reads x; writes y.
    Interleave {
        /// Product of the dimensions before the gathered one.
        outer: usize,
        /// Ranks of the group.
        parts: usize,
        /// Product of the gathered dimension's local extent and those after it.
        inner: usize,
    },
    /// `[outer, parts, inner]` to `[parts, outer, inner]`: what a reduce-scatter needs. Reads x; writes y.
    Deinterleave {
        /// As in [`Kernel::Interleave`].
        outer: usize,
        /// As in [`Kernel::Interleave`].
        parts: usize,
        /// As in [`Kernel::Interleave`].
        inner: usize,
    },
    /// Some neighbouring columns of a matrix: what of a tensor goes to one rank of another mesh. Reads x `[rows, columns]`; writes y
    /// `[rows, part]`.
    TakeColumns {
        /// Rows of both.
        rows: usize,
        /// Columns of the whole.
        columns: usize,
        /// The first column that is taken.
        start: usize,
        /// How many are.
        part: usize,
    },
    /// The reverse: reads x `[rows, part]`; writes these columns of y `[rows, columns]`, and leaves its others.
    PutColumns {
        /// As in [`Kernel::TakeColumns`].
        rows: usize,
        /// As in [`Kernel::TakeColumns`].
        columns: usize,
        /// As in [`Kernel::TakeColumns`].
        start: usize,
        /// As in [`Kernel::TakeColumns`].
        part: usize,
    },
}

impl Kernel {
    /// The kernel's description: name, operands in order, arithmetic.
    pub fn spec(&self) -> KernelSpec {
        self.describe()
    }

    #[inline(always)]
    fn describe(&self) -> KernelSpec {
        match *self {
            Kernel::Matmul { rows, columns, contracted, weight, bias, activation } => {
                products::matmul([rows, columns, contracted], weight, bias, activation)
            }
            Kernel::MatmulInputGradient { rows, columns, contracted, weight, gelu } => {
                products::matmul_input_gradient([rows, columns, contracted], weight, gelu)
            }
            Kernel::MatmulWeightGradient { rows, columns, contracted, weight, bias } => {
                products::matmul_weight_gradient([rows, columns, contracted], weight, bias)
            }
            Kernel::Quantise { rows, columns, straight, transposed, .. } => {
                products::quantise(rows, columns, straight, transposed)
            }
            Kernel::EightBitMatmul { rows, columns, contracted, bias, activation } => {
                products::eight_bit_matmul([rows, columns, contracted], bias, activation)
            }
            Kernel::EightBitMatmulInputGradient { rows, columns, contracted, gelu } => {
                products::eight_bit_matmul_input_gradient([rows, columns, contracted], gelu)
            }
            Kernel::EightBitMatmulWeightGradient { rows, columns, contracted, weight } => {
                products::eight_bit_matmul_weight_gradient([rows, columns, contracted], weight)
            }
            Kernel::BiasAdd { rows, columns } => products::bias_add(rows, columns),
            Kernel::BiasGradient { rows, columns } => products::bias_gradient(rows, columns),
            Kernel::Relu { elements } => activations::relu(elements),
            Kernel::ReluGradient { elements } => activations::relu_gradient(elements),
            Kernel::Gelu { elements } => activations::gelu(elements),
            Kernel::GeluGradient { elements } => activations::gelu_gradient(elements),
            Kernel::GeluExact { elements } => activations::gelu_exact(elements),
            Kernel::GeluExactGradient { elements } => activations::gelu_exact_gradient(elements),
            Kernel::SiluMultiply { elements } => activations::silu_multiply(elements),
            Kernel::SiluMultiplyGradient { elements } => activations::silu_multiply_gradient(elements),
            Kernel::Add { elements } => activations::add(elements),
            Kernel::Convolution(window) => images::convolution(&window),
            Kernel::ConvolutionInputGradient(window) => images::convolution_input_gradient(&window),
            Kernel::ConvolutionWeightGradient(window) => images::convolution_weight_gradient(&window),
            Kernel::BatchNorm { groups, positions, channels } => images::batch_norm(groups, positions, channels),
            Kernel::BatchNormInputGradient { groups, positions, channels } => {
                images::batch_norm_input_gradient(groups, positions, channels)
            }
            Kernel::BatchNormWeightGradient { groups, channels } => images::batch_norm_weight_gradient(groups, channels),
            Kernel::BatchNormInference { positions, channels } => images::batch_norm_inference(positions, channels),
            Kernel::RunningStatistics { channels, .. } => images::running_statistics(channels),
            Kernel::MaxPool(window) => images::max_pool(&window),
            Kernel::MaxPoolGradient(window) => images::max_pool_gradient(&window),
            Kernel::GlobalAveragePool { batch, positions, channels } => images::global_average_pool(batch, positions, channels),
            Kernel::GlobalAveragePoolGradient { batch, positions, channels } => {
                images::global_average_pool_gradient(batch, positions, channels)
            }
            Kernel::LayerNorm { rows, features, .. } => norms::layer_norm(rows, features),
            Kernel::LayerNormInputGradient { rows, features } => norms::layer_norm_input_gradient(rows, features),
            Kernel::LayerNormWeightGradient { rows, features } => norms::layer_norm_weight_gradient(rows, features),
            Kernel::RmsNorm { rows, features, .. } => norms::rms_norm(rows, features),
            Kernel::RmsNormInputGradient { rows, features } => norms::rms_norm_input_gradient(rows, features),
            Kernel::RmsNormWeightGradient { rows, features } => norms::rms_norm_weight_gradient(rows, features),
            Kernel::Rope(sizes) => attention::rope("rope", ["x", "y"], &sizes),
            Kernel::RopeGradient(sizes) => attention::rope("rope_gradient", ["dy", "dx"], &sizes),
            Kernel::Dropout(sizes) => activations::dropout(&sizes),
            Kernel::Prepend { batch, positions, features } => sequences::prepend(batch, positions, features),
            Kernel::PrependInputGradient { batch, positions, features } => {
                sequences::prepend_input_gradient(batch, positions, features)
            }
            Kernel::PrependWeightGradient { batch, positions, features } => {
                sequences::prepend_weight_gradient(batch, positions, features)
            }
            Kernel::First { batch, positions, features } => sequences::first(batch, positions, features),
            Kernel::FirstGradient { batch, positions, features } => sequences::first_gradient(batch, positions, features),
            Kernel::Embedding { tokens, vocabulary, hidden, parts } => sequences::embedding([tokens, vocabulary, hidden, parts]),
            Kernel::EmbeddingWeightGradient { tokens, vocabulary, hidden, parts } => {
                sequences::embedding_weight_gradient([tokens, vocabulary, hidden, parts])
            }
            Kernel::Attention(sizes) => attention::attention(&sizes),
            Kernel::AttentionGradient(sizes) => attention::attention_gradient(&sizes),
            Kernel::Split { rows, parts, columns } => sequences::split(rows, parts, columns),
            Kernel::Join { rows, parts, columns } => sequences::join(rows, parts, columns),
            Kernel::CrossEntropy { rows, classes } => loss::cross_entropy(rows, classes),
            Kernel::LogitStatistics { rows, classes, parts } => loss::logit_statistics(rows, classes, parts),
            Kernel::CrossEntropyOfStatistics { rows, parts } => loss::cross_entropy_of_statistics(rows, parts),
            Kernel::CrossEntropyGradient { rows, classes, parts, scaled, .. } => {
                loss::cross_entropy_gradient(rows, classes, parts, scaled)
            }
            Kernel::Route { tokens, experts, top } => mixtures::route(tokens, experts, top),
            Kernel::RouteGradient { tokens, experts, top } => mixtures::route_gradient(tokens, experts, top),
            Kernel::Dispatch(mixture) => mixtures::dispatch(&mixture),
            Kernel::DispatchGradient(mixture) => mixtures::dispatch_gradient(&mixture),
            Kernel::Combine(mixture) => mixtures::combine(&mixture),
            Kernel::CombineInputGradient(mixture) => mixtures::combine_input_gradient(&mixture),
            Kernel::CombineGateGradient(mixture) => mixtures::combine_gate_gradient(&mixture),
            Kernel::ExpertMatmul { experts, rows, columns, contracted } => {
                products::expert_matmul([experts, rows, columns, contracted])
            }
            Kernel::ExpertMatmulInputGradient { experts, rows, columns, contracted } => {
                products::expert_matmul_input_gradient([experts, rows, columns, contracted])
            }
            Kernel::ExpertMatmulWeightGradient { experts, rows, columns, contracted } => {
                products::expert_matmul_weight_gradient([experts, rows, columns, contracted])
            }
            Kernel::Lstm(sizes) => recurrence::lstm(&sizes),
            Kernel::LstmGradient { sizes, outputs, last } => recurrence::lstm_gradient(&sizes, outputs, last),
            Kernel::LstmWeightGradient(sizes) => recurrence::lstm_weight_gradient(&sizes),
            Kernel::Scale { elements, .. } => activations::scale(elements),
            Kernel::Multiply { elements } => activations::multiply(elements),
            Kernel::Sgd { elements, controlled, momentum, nesterov } => training::sgd(elements, controlled, momentum, nesterov),
            Kernel::AdamW { elements, controlled } => training::adamw(elements, controlled),
            Kernel::UpdateControl { .. } => training::update_control(),
            Kernel::Sum { elements } => training::sum("sum", elements),
            Kernel::Accumulate { elements } => training::accumulate(elements),
            Kernel::Narrow { elements } => training::narrow(elements),
            Kernel::Zero { elements } => training::zero(elements),
            Kernel::SumOfSquares { elements } => training::sum("sum_of_squares", elements),
            Kernel::Slice { outer, parts, inner } => movement::slice(outer, parts, inner),
            Kernel::Interleave { outer, parts, inner } => movement::interleave("interleave", outer, parts, inner),
            Kernel::Deinterleave { outer, parts, inner } => movement::interleave("deinterleave", outer, parts, inner),
            Kernel::TakeColumns { rows, columns, part, .. } => movement::take_columns(rows, columns, part),
            Kernel::PutColumns { rows, columns, part, .. } => movement::put_columns(rows, columns, part),
        }
    }
}
