//! Kernels: what an operator is once every loop has a size.
//!
//! A [`Kernel`] is the smallest thing that is timed, modelled and executed: the calibration times kernels, the cost model answers
//! for kernels, a backend runs kernels. It carries the sizes of *one rank's* share and nothing of why they are so.
//! Every tensor is dense and row-major in the order that the variant states; images have their channels last.
//! `Fp32` statistics (mean, reciprocal standard deviation, log-sum-exp) stay in single precision in every precision.

use crate::attention::{Attention, Rope};
use crate::dropout::Dropout;
use foretell_units::{Bytes, DataType, Flops};
use serde::{Deserialize, Serialize};

/// How a weight matrix lies in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WeightLayout {
    /// `[columns, contracted]`, as PyTorch's `Linear` keeps it.
    OutIn,
    /// `[contracted, columns]`, as GPT-2's `Conv1D` keeps it.
    InOut,
}

/// What a norm adds to the variance: `10^-digits`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Epsilon {
    digits: u8,
}

impl Epsilon {
    /// `10^-digits`.
    pub const fn new(digits: u8) -> Self {
        Self { digits }
    }

    /// The number.
    pub fn value(self) -> f64 {
        10f64.powi(-i32::from(self.digits))
    }
}

/// The sizes of a two-dimensional convolution or pooling; `height` and `width` are the *input's*.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Window {
    /// Images.
    pub batch: usize,
    /// Rows of the input image.
    pub height: usize,
    /// Columns of the input image.
    pub width: usize,
    /// Channels of the input.
    pub in_channels: usize,
    /// Channels of the output; a pooling has as many as it takes.
    pub out_channels: usize,
    /// Side of the square window.
    pub size: usize,
    /// Step of the window in both directions.
    pub stride: usize,
    /// Zeros (for a pooling: nothing) added on each side.
    pub padding: usize,
}

impl Window {
    /// Rows of the output image.
    pub fn out_height(&self) -> usize {
        (self.height + 2 * self.padding - self.size) / self.stride + 1
    }

    /// Columns of the output image.
    pub fn out_width(&self) -> usize {
        (self.width + 2 * self.padding - self.size) / self.stride + 1
    }

    /// Elements of the input.
    pub fn input_elements(&self) -> usize {
        self.batch * self.height * self.width * self.in_channels
    }

    /// Elements of the output.
    pub fn output_elements(&self) -> usize {
        self.batch * self.out_height() * self.out_width() * self.out_channels
    }

    /// Elements of a convolution's weight, `[out_channels, size, size, in_channels]`.
    pub fn weight_elements(&self) -> usize {
        self.out_channels * self.size * self.size * self.in_channels
    }
}

/// The sizes of a recurrent layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Recurrence {
    /// Sequences.
    pub batch: usize,
    /// Positions of a sequence.
    pub sequence: usize,
    /// Features of its state.
    pub hidden: usize,
    /// Whether it begins in a state that is given, instead of in zeros.
    pub initial: bool,
}

impl Recurrence {
    /// Elements of the outputs at all positions.
    pub fn output_elements(&self) -> usize {
        self.batch * self.sequence * self.hidden
    }

    /// Elements of a state: what goes out and the cell.
    pub fn state_elements(&self) -> usize {
        2 * self.batch * self.hidden
    }

    /// Elements of a state that is given.
    pub fn initial_elements(&self) -> usize {
        if self.initial { self.state_elements() } else { 0 }
    }

    /// Elements of the recurrent weight, `[4 hidden, hidden]`.
    pub fn weight_elements(&self) -> usize {
        4 * self.hidden * self.hidden
    }
}

/// The sizes of a mixture of experts' exchange between tokens and the experts' slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Mixture {
    /// Positions: samples times positions of a sample.
    pub tokens: usize,
    /// Experts, over all ranks.
    pub experts: usize,
    /// Slots of an expert for this rank's tokens.
    pub capacity: usize,
    /// Experts that a token is sent to.
    pub top: usize,
    /// Features of a token.
    pub hidden: usize,
}

impl Mixture {
    /// Elements of the tokens' rows.
    pub fn token_elements(&self) -> usize {
        self.tokens * self.hidden
    }

    /// Elements of the experts' slots.
    pub fn slot_elements(&self) -> usize {
        self.experts * self.capacity * self.hidden
    }

    /// Choices of all tokens.
    pub fn choices(&self) -> usize {
        self.tokens * self.top
    }
}

/// One computation on one rank, with all its sizes. "Reads" and "writes" name the operands in the order in which an
/// instruction lists them. Kernels that write gradients of parameters can also *accumulate* (add to what is there); the
/// instruction says so.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kernel {
    /// `y[rows, columns] = x[rows, contracted] · w (+ bias[columns]) (then max(0, ·))`. Reads x, w (, bias); writes y.
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
        /// Whether a ReLU is applied in the same pass.
        relu: bool,
    },
    /// `dx[rows, contracted] = dy[rows, columns] · wᵀ`. Reads dy, w; writes dx.
    MatmulInputGradient {
        /// As in [`Kernel::Matmul`].
        rows: usize,
        /// As in [`Kernel::Matmul`].
        columns: usize,
        /// As in [`Kernel::Matmul`].
        contracted: usize,
        /// As in [`Kernel::Matmul`].
        weight: WeightLayout,
    },
    /// `dw = xᵀ · dy`, laid out as w. Reads dy, x; writes dw (may accumulate).
    MatmulWeightGradient {
        /// As in [`Kernel::Matmul`].
        rows: usize,
        /// As in [`Kernel::Matmul`].
        columns: usize,
        /// As in [`Kernel::Matmul`].
        contracted: usize,
        /// As in [`Kernel::Matmul`].
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
    /// Decides how this step's gradient is used. Reads the sum of its squares over the whole model `[1]`; writes the control `[8]` in place:
    /// loss scale, factor on the gradient (clipping's and the reciprocal of the loss scale), 1 where the update is skipped, updates
    /// made so far, steps since the scale last changed, the gradient's squared norm without the loss scale, steps skipped so far, unused.
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

/// Elements read and written, by the kind of number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Elements in the precision of the run, read.
    pub read: usize,
    /// Elements in the precision of the run, written.
    pub written: usize,
    /// Elements of four bytes in every precision (statistics, ids, gradients of parameters, optimizer state), read or written.
    pub single: usize,
}

impl Kernel {
    /// The kernel's name in reports, as in [`Kernel`]'s serialised form.
    pub fn name(&self) -> &'static str {
        match self {
            Kernel::Matmul { .. } => "matmul",
            Kernel::MatmulInputGradient { .. } => "matmul_input_gradient",
            Kernel::MatmulWeightGradient { .. } => "matmul_weight_gradient",
            Kernel::BiasAdd { .. } => "bias_add",
            Kernel::BiasGradient { .. } => "bias_gradient",
            Kernel::Relu { .. } => "relu",
            Kernel::ReluGradient { .. } => "relu_gradient",
            Kernel::Gelu { .. } => "gelu",
            Kernel::GeluGradient { .. } => "gelu_gradient",
            Kernel::GeluExact { .. } => "gelu_exact",
            Kernel::GeluExactGradient { .. } => "gelu_exact_gradient",
            Kernel::SiluMultiply { .. } => "silu_multiply",
            Kernel::SiluMultiplyGradient { .. } => "silu_multiply_gradient",
            Kernel::Add { .. } => "add",
            Kernel::Convolution(_) => "convolution",
            Kernel::ConvolutionInputGradient(_) => "convolution_input_gradient",
            Kernel::ConvolutionWeightGradient(_) => "convolution_weight_gradient",
            Kernel::BatchNorm { .. } => "batch_norm",
            Kernel::BatchNormInputGradient { .. } => "batch_norm_input_gradient",
            Kernel::BatchNormWeightGradient { .. } => "batch_norm_weight_gradient",
            Kernel::BatchNormInference { .. } => "batch_norm_inference",
            Kernel::RunningStatistics { .. } => "running_statistics",
            Kernel::MaxPool(_) => "max_pool",
            Kernel::MaxPoolGradient(_) => "max_pool_gradient",
            Kernel::GlobalAveragePool { .. } => "global_average_pool",
            Kernel::GlobalAveragePoolGradient { .. } => "global_average_pool_gradient",
            Kernel::LayerNorm { .. } => "layer_norm",
            Kernel::LayerNormInputGradient { .. } => "layer_norm_input_gradient",
            Kernel::LayerNormWeightGradient { .. } => "layer_norm_weight_gradient",
            Kernel::RmsNorm { .. } => "rms_norm",
            Kernel::RmsNormInputGradient { .. } => "rms_norm_input_gradient",
            Kernel::RmsNormWeightGradient { .. } => "rms_norm_weight_gradient",
            Kernel::Rope(_) => "rope",
            Kernel::RopeGradient(_) => "rope_gradient",
            Kernel::Dropout(_) => "dropout",
            Kernel::Prepend { .. } => "prepend",
            Kernel::PrependInputGradient { .. } => "prepend_input_gradient",
            Kernel::PrependWeightGradient { .. } => "prepend_weight_gradient",
            Kernel::First { .. } => "first",
            Kernel::FirstGradient { .. } => "first_gradient",
            Kernel::Embedding { .. } => "embedding",
            Kernel::EmbeddingWeightGradient { .. } => "embedding_weight_gradient",
            Kernel::Attention(_) => "attention",
            Kernel::AttentionGradient(_) => "attention_gradient",
            Kernel::Split { .. } => "split",
            Kernel::Join { .. } => "join",
            Kernel::CrossEntropy { .. } => "cross_entropy",
            Kernel::LogitStatistics { .. } => "logit_statistics",
            Kernel::CrossEntropyOfStatistics { .. } => "cross_entropy_of_statistics",
            Kernel::CrossEntropyGradient { .. } => "cross_entropy_gradient",
            Kernel::Route { .. } => "route",
            Kernel::RouteGradient { .. } => "route_gradient",
            Kernel::Dispatch(_) => "dispatch",
            Kernel::DispatchGradient(_) => "dispatch_gradient",
            Kernel::Combine(_) => "combine",
            Kernel::CombineInputGradient(_) => "combine_input_gradient",
            Kernel::CombineGateGradient(_) => "combine_gate_gradient",
            Kernel::ExpertMatmul { .. } => "expert_matmul",
            Kernel::ExpertMatmulInputGradient { .. } => "expert_matmul_input_gradient",
            Kernel::ExpertMatmulWeightGradient { .. } => "expert_matmul_weight_gradient",
            Kernel::Lstm(_) => "lstm",
            Kernel::LstmGradient { .. } => "lstm_gradient",
            Kernel::LstmWeightGradient(_) => "lstm_weight_gradient",
            Kernel::Scale { .. } => "scale",
            Kernel::Multiply { .. } => "multiply",
            Kernel::Sgd { .. } => "sgd",
            Kernel::AdamW { .. } => "adamw",
            Kernel::UpdateControl { .. } => "update_control",
            Kernel::Sum { .. } => "sum",
            Kernel::Accumulate { .. } => "accumulate",
            Kernel::Narrow { .. } => "narrow",
            Kernel::Zero { .. } => "zero",
            Kernel::SumOfSquares { .. } => "sum_of_squares",
            Kernel::Slice { .. } => "slice",
            Kernel::Interleave { .. } => "interleave",
            Kernel::Deinterleave { .. } => "deinterleave",
            Kernel::TakeColumns { .. } => "take_columns",
            Kernel::PutColumns { .. } => "put_columns",
        }
    }

    /// What the member `index` of a group of ranks runs: kernels whose work depends on which part of a sequence the rank has, made concrete.
    pub fn for_member(self, index: usize) -> Self {
        match self {
            Kernel::Attention(sizes) => Kernel::Attention(sizes.for_member(index)),
            Kernel::AttentionGradient(sizes) => Kernel::AttentionGradient(sizes.for_member(index)),
            Kernel::Rope(sizes) => Kernel::Rope(sizes.for_member(index)),
            Kernel::RopeGradient(sizes) => Kernel::RopeGradient(sizes.for_member(index)),
            kernel => kernel,
        }
    }

    /// The kernel without what changes what it computes but not how long it takes: as it is timed.
    pub fn without_constants(self) -> Self {
        match self {
            Kernel::LogitStatistics { rows, classes, .. } => Kernel::LogitStatistics { rows, classes, parts: 1 },
            Kernel::CrossEntropyGradient { rows, classes, .. } => {
                Kernel::CrossEntropyGradient { rows, classes, normalizer: 1, parts: 1, scaled: false }
            }
            Kernel::RunningStatistics { channels, .. } => Kernel::RunningStatistics { channels, contributions: 1 },
            Kernel::Sgd { elements, momentum, nesterov, .. } => Kernel::Sgd { elements, momentum, nesterov, controlled: false },
            Kernel::AdamW { elements, .. } => Kernel::AdamW { elements, controlled: false },
            Kernel::LayerNorm { rows, features, .. } => Kernel::LayerNorm { rows, features, epsilon: Epsilon::new(5) },
            Kernel::RmsNorm { rows, features, .. } => Kernel::RmsNorm { rows, features, epsilon: Epsilon::new(5) },
            Kernel::Rope(sizes) => Kernel::Rope(sizes.without_positions()),
            Kernel::RopeGradient(sizes) => Kernel::RopeGradient(sizes.without_positions()),
            Kernel::Attention(sizes) => Kernel::Attention(sizes.without_step()),
            Kernel::AttentionGradient(sizes) => Kernel::AttentionGradient(sizes.without_step()),
            Kernel::Dropout(sizes) => Kernel::Dropout(sizes.without_place()),
            kernel => kernel,
        }
    }

    /// Into how many parts the whole is cut of which the kernel works on the one of the rank's index in its group; 1 for those that need not
    /// know.
    pub fn parts(&self) -> usize {
        match *self {
            Kernel::Slice { parts, .. }
            | Kernel::Embedding { parts, .. }
            | Kernel::EmbeddingWeightGradient { parts, .. }
            | Kernel::LogitStatistics { parts, .. }
            | Kernel::CrossEntropyGradient { parts, .. } => parts,
            Kernel::Attention(sizes) | Kernel::AttentionGradient(sizes) => sizes.parts(),
            Kernel::Rope(sizes) | Kernel::RopeGradient(sizes) => sizes.position_parts,
            Kernel::Dropout(sizes) => sizes.parts,
            _ => 1,
        }
    }

    /// Whether the time goes into matrix products, which run at a device's peak, rather than into moving memory.
    pub fn is_matrix_product(&self) -> bool {
        matches!(
            self,
            Kernel::Matmul { .. }
                | Kernel::MatmulInputGradient { .. }
                | Kernel::MatmulWeightGradient { .. }
                | Kernel::Lstm(_)
                | Kernel::LstmGradient { .. }
                | Kernel::LstmWeightGradient(_)
                | Kernel::ExpertMatmul { .. }
                | Kernel::ExpertMatmulInputGradient { .. }
                | Kernel::ExpertMatmulWeightGradient { .. }
                | Kernel::Convolution(_)
                | Kernel::ConvolutionInputGradient(_)
                | Kernel::ConvolutionWeightGradient(_)
                | Kernel::Attention(_)
                | Kernel::AttentionGradient(_)
        )
    }

    /// The arithmetic that it does: a multiply-add is two operations; causal attention does half of the scores.
    pub fn flops(&self) -> Flops {
        Flops::new(match *self {
            Kernel::Matmul { rows, columns, contracted, .. }
            | Kernel::MatmulInputGradient { rows, columns, contracted, .. }
            | Kernel::MatmulWeightGradient { rows, columns, contracted, .. } => 2.0 * product(&[rows, columns, contracted]),
            Kernel::ExpertMatmul { experts, rows, columns, contracted }
            | Kernel::ExpertMatmulInputGradient { experts, rows, columns, contracted }
            | Kernel::ExpertMatmulWeightGradient { experts, rows, columns, contracted } => {
                2.0 * product(&[experts, rows, columns, contracted])
            }
            Kernel::Lstm(sizes) | Kernel::LstmGradient { sizes, .. } | Kernel::LstmWeightGradient(sizes) => {
                2.0 * product(&[sizes.batch, sizes.sequence, sizes.weight_elements()])
            }
            Kernel::Combine(mixture) | Kernel::CombineGateGradient(mixture) => {
                2.0 * product(&[mixture.tokens, mixture.top, mixture.hidden])
            }
            Kernel::Convolution(window)
            | Kernel::ConvolutionInputGradient(window)
            | Kernel::ConvolutionWeightGradient(window) => {
                2.0 * window.output_elements() as f64 * product(&[window.size, window.size, window.in_channels])
            }
            Kernel::Attention(sizes) => 4.0 * product(&[sizes.batch, sizes.heads(), sizes.head_dimension]) * sizes.scores(),
            Kernel::AttentionGradient(sizes) => {
                // One product to recompute the scores and four for the gradients.
                10.0 * product(&[sizes.batch, sizes.heads(), sizes.head_dimension]) * sizes.scores()
            }
            Kernel::AdamW { elements, .. } => 12.0 * elements as f64,
            Kernel::Gelu { elements } | Kernel::GeluGradient { elements } => 12.0 * elements as f64,
            Kernel::GeluExact { elements } | Kernel::GeluExactGradient { elements } => 20.0 * elements as f64,
            Kernel::SiluMultiply { elements } => 10.0 * elements as f64,
            Kernel::SiluMultiplyGradient { elements } => 14.0 * elements as f64,
            Kernel::Rope(sizes) | Kernel::RopeGradient(sizes) => 3.0 * sizes.elements() as f64,
            // The hash of an element is four products and their mixing.
            Kernel::Dropout(sizes) => 20.0 * sizes.elements() as f64,
            _ => {
                let traffic = self.traffic();
                (traffic.read.max(traffic.written).max(traffic.single)) as f64
            }
        })
    }

    /// The arithmetic that counts for model FLOPs utilisation: matrix products only, attention in full and without recomputation,
    /// as Megatron-LM and PaLM count it (Chowdhery et al. 2022, appendix B).
    pub fn model_flops(&self) -> Flops {
        let full = |sizes: &Attention| product(&[sizes.batch, sizes.heads(), sizes.head_dimension, sizes.queries, sizes.keys]);
        match *self {
            Kernel::Attention(sizes) => Flops::new(4.0 * full(&sizes)),
            Kernel::AttentionGradient(sizes) => Flops::new(8.0 * full(&sizes)),
            kernel if kernel.is_matrix_product() => kernel.flops(),
            _ => Flops::ZERO,
        }
    }

    /// The elements that must cross the memory's border at least once.
    pub fn traffic(&self) -> Traffic {
        let traffic = |read, written, single| Traffic { read, written, single };
        match *self {
            Kernel::Matmul { rows, columns, contracted, bias, .. } => {
                traffic(rows * contracted + columns * contracted + if bias { columns } else { 0 }, rows * columns, 0)
            }
            Kernel::MatmulInputGradient { rows, columns, contracted, .. } => {
                traffic(rows * columns + columns * contracted, rows * contracted, 0)
            }
            Kernel::MatmulWeightGradient { rows, columns, contracted, .. } => {
                traffic(rows * columns + rows * contracted, 0, columns * contracted)
            }
            Kernel::BiasAdd { rows, columns } => traffic(rows * columns + columns, rows * columns, 0),
            Kernel::BiasGradient { rows, columns } => traffic(rows * columns, 0, columns),
            Kernel::Multiply { elements } => traffic(2 * elements, elements, 0),
            Kernel::Scale { elements, .. } => traffic(elements, elements, 0),
            Kernel::Relu { elements } | Kernel::Gelu { elements } | Kernel::GeluExact { elements } => {
                traffic(elements, elements, 0)
            }
            Kernel::ReluGradient { elements }
            | Kernel::GeluGradient { elements }
            | Kernel::GeluExactGradient { elements }
            | Kernel::SiluMultiply { elements }
            | Kernel::Add { elements } => traffic(2 * elements, elements, 0),
            Kernel::SiluMultiplyGradient { elements } => traffic(3 * elements, 2 * elements, 0),
            Kernel::Convolution(window) => {
                traffic(window.input_elements() + window.weight_elements(), window.output_elements(), 0)
            }
            Kernel::ConvolutionInputGradient(window) => {
                traffic(window.output_elements() + window.weight_elements(), window.input_elements(), 0)
            }
            Kernel::ConvolutionWeightGradient(window) => {
                traffic(window.output_elements() + window.input_elements(), 0, window.weight_elements())
            }
            // Once for the statistics and once to normalise.
            Kernel::BatchNorm { groups, positions, channels } => {
                let elements = groups * positions * channels;
                traffic(2 * elements, elements, 2 * groups * channels)
            }
            Kernel::BatchNormInputGradient { groups, positions, channels } => {
                let elements = groups * positions * channels;
                traffic(4 * elements, elements, 4 * groups * channels)
            }
            Kernel::BatchNormWeightGradient { groups, channels } => traffic(0, 0, 2 * (groups + 1) * channels),
            Kernel::BatchNormInference { positions, channels } => {
                traffic(positions * channels, positions * channels, 2 * channels)
            }
            Kernel::RunningStatistics { channels, .. } => traffic(0, 0, 6 * channels),
            Kernel::MaxPool(window) => traffic(window.input_elements(), window.output_elements(), window.output_elements()),
            Kernel::MaxPoolGradient(window) => {
                traffic(window.output_elements(), window.input_elements(), window.output_elements())
            }
            Kernel::GlobalAveragePool { batch, positions, channels } => {
                traffic(batch * positions * channels, batch * channels, 0)
            }
            Kernel::GlobalAveragePoolGradient { batch, positions, channels } => {
                traffic(batch * channels, batch * positions * channels, 0)
            }
            Kernel::LayerNorm { rows, features, .. } => traffic(rows * features, rows * features, 2 * rows),
            Kernel::RmsNorm { rows, features, .. } => traffic(rows * features, rows * features, rows),
            Kernel::RmsNormInputGradient { rows, features } => traffic(2 * rows * features, rows * features, rows),
            Kernel::RmsNormWeightGradient { rows, features } => traffic(2 * rows * features, 0, rows + features),
            Kernel::Rope(sizes) | Kernel::RopeGradient(sizes) => traffic(sizes.elements(), sizes.elements(), 0),
            Kernel::Dropout(sizes) => traffic(sizes.elements(), sizes.elements(), 0),
            Kernel::Prepend { batch, positions, features } => {
                traffic((batch * positions + 1) * features, batch * (positions + 1) * features, 0)
            }
            Kernel::PrependInputGradient { batch, positions, features } => {
                let elements = batch * positions * features;
                traffic(elements, elements, 0)
            }
            Kernel::PrependWeightGradient { batch, features, .. } => traffic(batch * features, 0, features),
            Kernel::First { batch, features, .. } => traffic(batch * features, batch * features, 0),
            Kernel::FirstGradient { batch, positions, features } => traffic(batch * features, batch * positions * features, 0),
            Kernel::LayerNormInputGradient { rows, features } => traffic(2 * rows * features, rows * features, 2 * rows),
            Kernel::LayerNormWeightGradient { rows, features } => traffic(2 * rows * features, 0, 2 * rows + 2 * features),
            Kernel::Embedding { tokens, hidden, .. } => traffic(tokens * hidden, tokens * hidden, tokens),
            Kernel::EmbeddingWeightGradient { tokens, vocabulary, hidden, .. } => {
                traffic(tokens * hidden, 0, vocabulary * hidden + 2 * tokens * hidden)
            }
            Kernel::Attention(Attention { ring: Some(ring), .. }) if ring.unseen => traffic(0, 0, 0),
            Kernel::AttentionGradient(sizes @ Attention { ring: Some(ring), .. }) if ring.unseen => {
                traffic(0, 0, 2 * sizes.key_elements())
            }
            // What is merged is read, too.
            Kernel::Attention(sizes @ Attention { ring: Some(ring), .. }) => {
                let [q, k, passes] = [sizes.query_elements(), sizes.key_elements(), 1 + usize::from(ring.merges())];
                traffic(q + 2 * k, 0, passes * (q + sizes.rows()))
            }
            Kernel::AttentionGradient(sizes @ Attention { ring: Some(ring), .. }) => {
                let [q, k, passes] = [sizes.query_elements(), sizes.key_elements(), 1 + usize::from(ring.merges())];
                traffic(3 * q + 2 * k, 0, passes * q + 2 * k + sizes.rows())
            }
            Kernel::Attention(sizes) => {
                let [q, k] = [sizes.query_elements(), sizes.key_elements()];
                traffic(q + 2 * k + sizes.table_elements(), q, sizes.rows())
            }
            Kernel::AttentionGradient(sizes) => {
                let [q, k, table] = [sizes.query_elements(), sizes.key_elements(), sizes.table_elements()];
                traffic(3 * q + 2 * k + table, q + 2 * k, sizes.rows() + table)
            }
            Kernel::Split { rows, parts, columns } | Kernel::Join { rows, parts, columns } => {
                traffic(rows * parts * columns, rows * parts * columns, 0)
            }
            Kernel::CrossEntropy { rows, classes } => traffic(rows * classes, 0, 2 * rows),
            Kernel::LogitStatistics { rows, classes, .. } => traffic(rows * classes, 0, 5 * rows),
            Kernel::CrossEntropyOfStatistics { rows, parts } => traffic(0, 0, (4 * parts + 2) * rows),
            Kernel::CrossEntropyGradient { rows, classes, .. } => traffic(rows * classes, rows * classes, 2 * rows),
            Kernel::Route { tokens, experts, top } => traffic(tokens * experts, tokens * top, tokens * top),
            Kernel::RouteGradient { tokens, experts, top } => traffic(2 * tokens * top, tokens * experts, tokens * top),
            Kernel::Dispatch(mixture) => traffic(mixture.token_elements(), mixture.slot_elements(), 2 * mixture.choices() + 1),
            Kernel::DispatchGradient(mixture) => {
                traffic(mixture.choices() * mixture.hidden, mixture.token_elements(), 2 * mixture.choices())
            }
            Kernel::Combine(mixture) => {
                traffic(mixture.choices() * (mixture.hidden + 1), mixture.token_elements(), 2 * mixture.choices())
            }
            Kernel::CombineInputGradient(mixture) => {
                traffic(mixture.token_elements() + mixture.choices(), mixture.slot_elements(), 2 * mixture.choices())
            }
            Kernel::CombineGateGradient(mixture) => {
                let read = mixture.token_elements() + mixture.choices() * mixture.hidden;
                traffic(read, mixture.choices(), 2 * mixture.choices())
            }
            Kernel::ExpertMatmul { experts, rows, columns, contracted } => {
                traffic(experts * (rows + columns) * contracted, experts * rows * columns, 0)
            }
            Kernel::ExpertMatmulInputGradient { experts, rows, columns, contracted } => {
                traffic(experts * (rows + contracted) * columns, experts * rows * contracted, 0)
            }
            Kernel::ExpertMatmulWeightGradient { experts, rows, columns, contracted } => {
                traffic(experts * rows * (columns + contracted), 0, experts * columns * contracted)
            }
            Kernel::Lstm(sizes) => {
                let y = sizes.output_elements();
                traffic(4 * y + sizes.weight_elements() + sizes.initial_elements(), 6 * y + sizes.state_elements(), 0)
            }
            Kernel::LstmGradient { sizes, outputs, last } => {
                let y = sizes.output_elements();
                let upstream = usize::from(outputs) * y + usize::from(last) * sizes.state_elements();
                let kept = 5 * y + sizes.weight_elements() + sizes.initial_elements();
                traffic(upstream + kept, 4 * y + sizes.initial_elements(), 0)
            }
            Kernel::LstmWeightGradient(sizes) => {
                traffic(5 * sizes.output_elements() + sizes.initial_elements() / 2, 0, sizes.weight_elements())
            }
            Kernel::Sgd { elements, momentum, .. } => traffic(0, 0, if momentum { 5 } else { 3 } * elements),
            Kernel::AdamW { elements, .. } => traffic(0, 0, 7 * elements),
            Kernel::SumOfSquares { elements } | Kernel::Sum { elements } | Kernel::Zero { elements } => traffic(0, 0, elements),
            Kernel::Accumulate { elements } => traffic(0, 0, 3 * elements),
            Kernel::Narrow { elements } => traffic(0, elements, elements),
            Kernel::UpdateControl { .. } => traffic(0, 0, 17),
            Kernel::Slice { outer, inner, .. } => traffic(outer * inner, outer * inner, 0),
            Kernel::Interleave { outer, parts, inner } | Kernel::Deinterleave { outer, parts, inner } => {
                traffic(outer * parts * inner, outer * parts * inner, 0)
            }
            Kernel::TakeColumns { rows, part, .. } | Kernel::PutColumns { rows, part, .. } => {
                traffic(rows * part, rows * part, 0)
            }
        }
    }

    /// The bytes that must cross the memory's border at least once, when the run's precision is `precision`.
    pub fn bytes(&self, precision: DataType) -> Bytes {
        let traffic = self.traffic();
        // In mixed precision an optimizer updates the master copy and writes the parameter beside it.
        let narrowed = match *self {
            Kernel::Sgd { elements, .. } | Kernel::AdamW { elements, .. } if precision.size() < Bytes::new(4) => elements,
            _ => 0,
        };
        precision.size() * (traffic.read + traffic.written + narrowed) as u64 + Bytes::new(4 * traffic.single as u64)
    }
}

fn product(extents: &[usize]) -> f64 {
    extents.iter().map(|&extent| extent as f64).product()
}
