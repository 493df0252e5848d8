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
//! A row of [`Kernel`] has a variant and the function of [`table`] that describes it: its name, its
//! operands in order, its arithmetic. Traffic and operand sizes follow from the description
//! ([`spec`]). An operator of a graph is a kernel too, whose sizes are those of loops.

#[macro_use]
mod row;

mod bounds;
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

kernels! {
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
    } => products::matmul([rows, columns, contracted], weight, bias, activation);
    /// `dx[rows, contracted] = dy[rows, columns] · wᵀ`. With `gelu` each element is multiplied by
    /// the slope of a [`Kernel::Gelu`] at its argument, `[rows, contracted]`.
    MatmulInputGradient {
        rows: usize,
        columns: usize,
        contracted: usize,
        weight: WeightLayout,
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        gelu: bool,
    } => products::matmul_input_gradient([rows, columns, contracted], weight, gelu);
    /// `dw = xᵀ · dy`, in the order of w's dimensions, and with `bias` also
    /// `dbias[columns] = Σ_rows dy`.
    MatmulWeightGradient {
        rows: usize,
        columns: usize,
        contracted: usize,
        weight: WeightLayout,
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        bias: bool,
    } => products::matmul_weight_gradient([rows, columns, contracted], weight, bias);
    /// x `[rows, columns]` in eight bits: `x · 2^e`, rounded, with the largest whole `e` for which
    /// the largest element fits the format. Writes the factor `2^-e` `[1]` and the matrix in its
    /// own order (`straight`), transposed `[columns, rows]`, or both.
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
    } => products::quantise(rows, columns, straight, transposed);
    /// [`Kernel::Matmul`] of quantised x `[rows, contracted]` and w `[columns, contracted]`, both
    /// [`EightBits::E4M3`], and the factor of each.
    EightBitMatmul { rows: usize, columns: usize, contracted: usize, bias: bool, activation: Activation }
        => products::eight_bit_matmul([rows, columns, contracted], bias, activation);
    /// [`Kernel::MatmulInputGradient`] of quantised dy `[rows, columns]` ([`EightBits::E5M2`]) and
    /// w `[contracted, columns]` ([`EightBits::E4M3`]), and the factor of each.
    EightBitMatmulInputGradient { rows: usize, columns: usize, contracted: usize, gelu: bool }
        => products::eight_bit_matmul_input_gradient([rows, columns, contracted], gelu);
    /// [`Kernel::MatmulWeightGradient`] of quantised and transposed dy `[columns, rows]`
    /// ([`EightBits::E5M2`]) and x `[contracted, rows]` ([`EightBits::E4M3`]), and the factor of
    /// each. `weight` is the order of dw's dimensions.
    EightBitMatmulWeightGradient { rows: usize, columns: usize, contracted: usize, weight: WeightLayout }
        => products::eight_bit_matmul_weight_gradient([rows, columns, contracted], weight);
    /// `y[rows, columns] = x[rows, columns] + bias[columns]`.
    BiasAdd { rows: usize, columns: usize } => products::bias_add(rows, columns);
    /// `dbias[columns] = Σ_rows dy[rows, columns]`.
    BiasGradient { rows: usize, columns: usize } => products::bias_gradient(rows, columns);
    /// `y = max(0, x)`.
    Relu { elements: usize } => activations::relu(elements);
    /// `dx = dy` where `y > 0`, else 0.
    ReluGradient { elements: usize } => activations::relu_gradient(elements);
    /// GELU by its tanh approximation, as in GPT-2.
    Gelu { elements: usize } => activations::gelu(elements);
    /// `dx = dy · gelu'(x)`.
    GeluGradient { elements: usize } => activations::gelu_gradient(elements);
    /// GELU as defined, by the error function (Hendrycks and Gimpel 2016).
    GeluExact { elements: usize } => activations::gelu_exact(elements);
    /// `dx = dy · gelu'(x)`.
    GeluExactGradient { elements: usize } => activations::gelu_exact_gradient(elements);
    /// `y = gate · σ(gate) · x`, the product of SwiGLU (Shazeer 2020).
    SiluMultiply { elements: usize } => activations::silu_multiply(elements);
    /// Gradients of [`Kernel::SiluMultiply`] for `gate` and `x`.
    SiluMultiplyGradient { elements: usize } => activations::silu_multiply_gradient(elements);
    /// `y = a + b`.
    Add { elements: usize } => activations::add(elements);
    /// Cross-correlation of x `[batch, height, width, in]` with w `[out, size, size, in]`, which
    /// frameworks call convolution. y is `[batch, out_height, out_width, out]`.
    Convolution(window: Window) => images::convolution(&window);
    ConvolutionInputGradient(window: Window) => images::convolution_input_gradient(&window);
    ConvolutionWeightGradient(window: Window) => images::convolution_weight_gradient(&window);
    /// Batch normalisation of x `[groups, positions, channels]` over the positions of each group.
    /// Writes y and `saved [groups, 2, channels]` (mean, reciprocal standard deviation). If the
    /// instruction lists them, it also writes `statistics [2, channels]`: the sums over groups of
    /// mean and unbiased variance (may accumulate). `positions` counts samples of a group times
    /// pixels.
    BatchNorm { groups: usize, positions: usize, channels: usize } => images::batch_norm(groups, positions, channels);
    /// Writes dx and `sums [groups, 2, channels]`: `Σ dy` and `Σ dy · x̂` of each group.
    BatchNormInputGradient { groups: usize, positions: usize, channels: usize }
        => images::batch_norm_input_gradient(groups, positions, channels);
    /// `dscale` and `dshift`: the second and the first of the sums, added over groups.
    BatchNormWeightGradient { groups: usize, channels: usize } => images::batch_norm_weight_gradient(groups, channels);
    /// Batch normalisation by `running [2, channels]` (mean, variance), for evaluation. `positions`
    /// counts samples times pixels.
    BatchNormInference { positions: usize, channels: usize } => images::batch_norm_inference(positions, channels);
    /// `running = 0.9 running + 0.1 statistics / contributions`, both `[2, channels]`.
    RunningStatistics {
        channels: usize,
        /// Groups, over ranks and micro-batches, that were summed into the statistics.
        contributions: usize,
    } => images::running_statistics(channels);
    /// Maximum over windows, with as many output channels as input channels. Writes y and indices:
    /// for each output element the offset of its maximum in the input.
    MaxPool(window: Window) => images::max_pool(&window);
    MaxPoolGradient(window: Window) => images::max_pool_gradient(&window);
    /// Mean over the positions of x `[batch, positions, channels]`.
    GlobalAveragePool { batch: usize, positions: usize, channels: usize }
        => images::global_average_pool(batch, positions, channels);
    GlobalAveragePoolGradient { batch: usize, positions: usize, channels: usize }
        => images::global_average_pool_gradient(batch, positions, channels);
    /// Layer normalisation of each row, with a scale and a shift. Writes y and `saved [rows, 2]`
    /// (mean, reciprocal standard deviation).
    LayerNorm {
        rows: usize,
        features: usize,
        /// Number added to the variance.
        epsilon: Epsilon,
    } => norms::layer_norm(rows, features);
    LayerNormInputGradient { rows: usize, features: usize } => norms::layer_norm_input_gradient(rows, features);
    LayerNormWeightGradient { rows: usize, features: usize } => norms::layer_norm_weight_gradient(rows, features);
    /// Each row over its root mean square, with a scale (Zhang and Sennrich 2019). Writes y and
    /// `saved [rows]` (the reciprocal of the root).
    RmsNorm {
        rows: usize,
        features: usize,
        /// Number added to the mean square.
        epsilon: Epsilon,
    } => norms::rms_norm(rows, features);
    RmsNormInputGradient { rows: usize, features: usize } => norms::rms_norm_input_gradient(rows, features);
    RmsNormWeightGradient { rows: usize, features: usize } => norms::rms_norm_weight_gradient(rows, features);
    /// Rotary position embedding of x `[batch, positions, heads, head_dimension]`.
    Rope(sizes: Rope) => attention::rope("rope", ["x", "y"], &sizes);
    /// Rotation of dy in the opposite direction.
    RopeGradient(sizes: Rope) => attention::rope("rope_gradient", ["dy", "dx"], &sizes);
    /// `y = x / (1 - rate)` for elements that are kept, else 0. It is its own gradient, since the
    /// same elements are kept.
    Dropout(sizes: Dropout) => activations::dropout(&sizes);
    /// y `[batch, positions + 1, features]`: the row `[features]` before each sequence of x.
    Prepend { batch: usize, positions: usize, features: usize } => sequences::prepend(batch, positions, features);
    PrependInputGradient { batch: usize, positions: usize, features: usize }
        => sequences::prepend_input_gradient(batch, positions, features);
    PrependWeightGradient { batch: usize, positions: usize, features: usize }
        => sequences::prepend_weight_gradient(batch, positions, features);
    /// y `[batch, features]`: the first position of each sequence of x
    /// `[batch, positions, features]`.
    First { batch: usize, positions: usize, features: usize } => sequences::first(batch, positions, features);
    /// dx, zero except at the first positions.
    FirstGradient { batch: usize, positions: usize, features: usize } => sequences::first_gradient(batch, positions, features);
    /// `y[t] = table[ids[t]]`, and zero if that row is in another part. The table
    /// `[vocabulary, hidden]` is the rank's part.
    Embedding { tokens: usize, vocabulary: usize, hidden: usize, parts: usize }
        => sequences::embedding([tokens, vocabulary, hidden, parts]);
    /// `dtable[ids[t]] += dy[t]`, from zero, for the rows of the rank's part.
    EmbeddingWeightGradient { tokens: usize, vocabulary: usize, hidden: usize, parts: usize }
        => sequences::embedding_weight_gradient([tokens, vocabulary, hidden, parts]);
    /// Softmax attention of q `[batch, queries, heads, head_dimension]` over k and v
    /// `[batch, keys, key_heads, head_dimension]`, which are one tensor with q if packed. A table
    /// of relative positions is `[buckets, heads]`. Writes out, shaped as q, and the log-sum-exp
    /// `[batch, heads, queries]`.
    ///
    /// A step of a ring ([`Attention::ring`]) writes out in single precision. Steps after the first
    /// merge their results with out and log-sum-exp.
    Attention(sizes: Attention) => attention::attention(&sizes);
    /// Gradients for q, k, v (one tensor if packed) and the table (may accumulate). It recomputes
    /// the scores, as FlashAttention does (Dao et al. 2022).
    ///
    /// A step of a ring reads the out and the log-sum-exp of all steps, and writes gradients in
    /// single precision. Steps after the first add to dq.
    AttentionGradient(sizes: Attention) => attention::attention_gradient(&sizes);
    /// x `[rows, parts, columns]` as `parts` tensors `[rows, columns]`: at most [`MOST_OPERANDS`].
    Split { rows: usize, parts: usize, columns: usize } => sequences::split(rows, parts, columns);
    /// The reverse of [`Kernel::Split`].
    Join { rows: usize, parts: usize, columns: usize } => sequences::join(rows, parts, columns);
    /// Softmax cross-entropy of logits `[rows, classes]`. Labels of -1 are ignored. Writes
    /// `loss [1]` (a sum over rows; may accumulate), `correct [1]` (rows whose largest logit is the
    /// label's; may accumulate) and the log-sum-exp `[rows]`.
    CrossEntropy { rows: usize, classes: usize } => loss::cross_entropy(rows, classes);
    /// Contribution of the rank's part of the classes to [`Kernel::CrossEntropy`]. Writes
    /// `statistics [rows, 4]`: the largest logit, the sum of exponentials relative to it, the
    /// label's logit (minus infinity if it is in another part), and 1 if the first of the largest
    /// logits is the label's.
    LogitStatistics { rows: usize, classes: usize, parts: usize } => loss::logit_statistics(rows, classes, parts);
    /// [`Kernel::CrossEntropy`] from `statistics [parts, rows, 4]` of all parts of the classes.
    CrossEntropyOfStatistics { rows: usize, parts: usize } => loss::cross_entropy_of_statistics(rows, parts);
    /// `dlogits = (softmax - onehot) / normalizer`. With `scaled` it is multiplied by the loss
    /// scale ([`Control::LossScale`]).
    CrossEntropyGradient {
        rows: usize,
        classes: usize,
        /// Predictions of the global batch, over which the loss is a mean.
        normalizer: usize,
        parts: usize,
        scaled: bool,
    } => loss::cross_entropy_gradient(rows, classes, parts, scaled);
    /// The number of classes, of the rank's part, that come before the label's: with a larger
    /// logit, or an equal one and a smaller number. Reads logits, labels and, if there are several
    /// parts, the statistics `[parts, rows, 4]` of [`Kernel::LogitStatistics`]. Writes `ranks
    /// [rows]`, 0 where the label is ignored.
    LabelRanks { rows: usize, classes: usize, parts: usize } => loss::label_ranks(rows, classes, parts);
    /// The number of labels among the `top` best classes: reads `ranks [rows]` over all classes and
    /// labels, and writes `count [1]` (may accumulate).
    TopLabels { rows: usize, top: usize } => loss::top_labels(rows);
    /// The probabilities of all classes, from logits, labels and log-sum-exp, and behind them the
    /// label, -1 if it is ignored: `scores [rows, classes + 1]`.
    ClassScores { rows: usize, classes: usize } => loss::class_scores(rows, classes);
    /// [`Kernel::CrossEntropy`] against smoothed targets and with a weight for each class, as
    /// PyTorch's `CrossEntropyLoss` with `label_smoothing` and `weight`. Also reads
    /// `weights [classes]`. The target of class c is `w_c ((1 - s) [c = label] + s / classes)`, and
    /// the loss of a row is the sum of `target · (log-sum-exp - logit)`. Writes loss, correct and
    /// log-sum-exp as [`Kernel::CrossEntropy`], then `weight [1]`: the sum over rows of the label's
    /// weight (may accumulate).
    WeightedCrossEntropy { rows: usize, classes: usize, smoothing: Smoothing } => loss::weighted_cross_entropy(rows, classes);
    /// `dlogits = (softmax Σ target - target) / normalizer`, times the loss scale with `scaled`.
    WeightedCrossEntropyGradient { rows: usize, classes: usize, smoothing: Smoothing, normalizer: usize, scaled: bool }
        => loss::weighted_cross_entropy_gradient(rows, classes, scaled);
    /// The `top` largest of each token's logits `[tokens, experts]`, and the softmax over them (the
    /// router of Mixtral, Jiang et al. 2024). Of equal logits the first is taken. Writes gates
    /// `[tokens, top]` and choices `[tokens, top]`, largest first.
    Route { tokens: usize, experts: usize, top: usize } => mixtures::route(tokens, experts, top);
    /// dlogits, zero for experts that were not chosen.
    RouteGradient { tokens: usize, experts: usize, top: usize } => mixtures::route_gradient(tokens, experts, top);
    /// Tokens x `[tokens, hidden]` in the slots of the experts that they chose. Slots are filled in
    /// the order of tokens, and of a token's choices, until an expert is full. Writes dispatched
    /// `[experts, capacity, hidden]` (zero in empty slots) and places `[tokens, top]` (the slot
    /// within the expert, -1 if it was full). If the instruction lists it, it also writes
    /// `dropped [1]`: the number of choices that found no slot (may accumulate).
    Dispatch(mixture: Mixture) => mixtures::dispatch(&mixture);
    DispatchGradient(mixture: Mixture) => mixtures::dispatch_gradient(&mixture);
    /// `y[token] = Σ gate · row` over the slots `[experts, capacity, hidden]` that the token's
    /// choices found.
    Combine(mixture: Mixture) => mixtures::combine(&mixture);
    /// drows, zero in empty slots.
    CombineInputGradient(mixture: Mixture) => mixtures::combine_input_gradient(&mixture);
    /// dgates, zero for choices that found no slot.
    CombineGateGradient(mixture: Mixture) => mixtures::combine_gate_gradient(&mixture);
    /// A product for each expert: `y[e] = x[e] · w[e]ᵀ`, of x `[experts, rows, contracted]` and w
    /// `[experts, columns, contracted]`. `experts` are those on this rank, `rows` the slots of
    /// each.
    ExpertMatmul { experts: usize, rows: usize, columns: usize, contracted: usize }
        => products::expert_matmul([experts, rows, columns, contracted]);
    ExpertMatmulInputGradient { experts: usize, rows: usize, columns: usize, contracted: usize }
        => products::expert_matmul_input_gradient([experts, rows, columns, contracted]);
    ExpertMatmulWeightGradient { experts: usize, rows: usize, columns: usize, contracted: usize }
        => products::expert_matmul_weight_gradient([experts, rows, columns, contracted]);
    /// A layer of PyTorch's `LSTM` over a whole sequence (Hochreiter and Schmidhuber 1997).
    ///
    /// Reads projected `[batch, sequence, 4, hidden]` (contributions of inputs and biases to the
    /// gates i, f, g, o), w `[4 hidden, hidden]` and possibly an initial state `[batch, 2, hidden]`
    /// (output, cell). Writes y `[batch, sequence, hidden]`, gates `[batch, sequence, 4, hidden]`,
    /// cells `[batch, sequence, hidden]` and the last state `[batch, 2, hidden]`.
    Lstm(sizes: Recurrence) => recurrence::lstm(&sizes);
    /// Backpropagation through time, to dprojected and possibly dstate.
    LstmGradient {
        sizes: Recurrence,
        /// Whether there is a gradient of y.
        outputs: bool,
        /// Whether there is a gradient of the last state.
        last: bool,
    } => recurrence::lstm_gradient(&sizes, outputs, last);
    LstmWeightGradient(sizes: Recurrence) => recurrence::lstm_weight_gradient(&sizes);
    /// Linear attention: at each position a state is updated by key and value, and read by a query.
    /// No backend has a kernel for it.
    ///
    /// Reads keys and queries `[batch, positions, key_heads, 2, key_dimension]`, values `[batch,
    /// positions, key_heads, group, value_dimension]`, controls `[batch, positions, key_heads,
    /// group, controls]` and the heads' parameters. Writes y, shaped as the values.
    Scan(sizes: Scan) => scan::scan(&sizes);
    /// All gradients of a scan. It recomputes the states.
    ScanGradient(sizes: Scan) => scan::scan_gradient(&sizes);
    /// `y = x · times / √square`. It is its own gradient.
    Scale {
        elements: usize,
        #[serde(default = "one", skip_serializing_if = "is_one")]
        times: usize,
        square: usize,
    } => activations::scale(elements);
    /// `y = a · b`, element by element. Its gradients are products too.
    Multiply { elements: usize } => activations::multiply(elements);
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
    } => training::sgd(elements, controlled, momentum, nesterov);
    /// AdamW (Loshchilov and Hutter 2019); Adam if the weight decay is zero. In mixed precision as
    /// [`Kernel::Sgd`].
    AdamW {
        elements: usize,
        controlled: bool,
        /// Whether the parameters are exempt from weight decay.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        exempt: bool,
    } => training::adamw(elements, controlled);
    /// The first half of LAMB (You et al. 2020): updates the moments of one parameter, and writes
    /// the direction of its update, Adam's step plus the weight decay. Also writes the squared
    /// norms of the parameter and of the direction, `norms [2]`. It reads the master copy of the
    /// parameter in mixed precision.
    LambDirection {
        elements: usize,
        controlled: bool,
        /// Whether the parameter is exempt from weight decay.
        exempt: bool,
    } => training::lamb_direction(elements, controlled);
    /// The second half of LAMB: steps along the direction, by the learning rate times the ratio of
    /// the two norms. The ratio is 1 if either norm is zero. In mixed precision as
    /// [`Kernel::Sgd`].
    LambStep { elements: usize, controlled: bool } => training::lamb_step(elements, controlled);
    /// The first part of Muon (Jordan et al. 2024): updates the momentum of a shard, and writes
    /// Nesterov's direction, the gradient plus the momentum ahead.
    MuonDirection { elements: usize, controlled: bool } => training::muon_direction(elements, controlled);
    /// The middle of Muon: writes, for each of `matrices` matrices x `[rows, columns]`, nearly the
    /// closest matrix with orthonormal rows or columns, by [`NEWTON_SCHULZ_STEPS`] steps of Newton
    /// and Schulz. Zeros stay zeros. A backend has memory of its own for one matrix's steps.
    Orthogonalise { matrices: usize, rows: usize, columns: usize } => training::orthogonalise([matrices, rows, columns]);
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
    } => training::muon_step(elements, controlled);
    /// `y /= parts`, in single precision: the sum over `parts` replicas becomes their mean.
    Average { elements: usize, parts: usize } => training::average(elements);
    /// `y = a - b`, in single precision: how far a replica has moved from the parameters that it
    /// started a round with.
    Difference { elements: usize } => training::difference(elements);
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
    } => training::outer_step(elements, momentum, nesterov, mixed);
    /// Rounds x to few bits for a message of `parts` equal parts ([`Compression::part`]), to
    /// nearest, ties to even. With `feedback` it also adds to x the error that was left last time,
    /// and leaves the error of this time (Seide et al. 2014).
    Compress { elements: usize, parts: usize, format: Compression, feedback: bool }
        => training::compress(elements, parts, format, feedback);
    /// `y = Σ x`, in single precision: the sum of `sources` messages of `elements` numbers each.
    Decompress { elements: usize, sources: usize, format: Compression } => training::decompress(elements, sources, format);
    /// Decides how optimizers use this step's gradient, from the sum of its squares over the whole
    /// model. Updates the [`Control`].
    UpdateControl {
        /// Whether the gradient is clipped.
        clip: bool,
        /// Whether the loss is scaled. The scale then follows overflows (Micikevicius et al. 2018).
        scaled: bool,
        /// With weighted classes, the number of predictions of the global batch; else 0. The kernel
        /// then also reads the sum of the labels' weights `[1]`, and divides the gradient by it
        /// instead of the number of predictions.
        #[serde(default, skip_serializing_if = "is_zero")]
        predictions: usize,
    } => training::update_control(predictions > 0);
    /// `y[1] = Σ x`.
    Sum { elements: usize } => training::sum("sum", elements);
    /// `y += x`, in single precision.
    Accumulate { elements: usize } => training::accumulate(elements);
    /// `y = x`, from single precision to the run's.
    Narrow { elements: usize } => training::narrow(elements);
    /// Zeros in single precision.
    Zero { elements: usize } => training::zero(elements);
    /// `y[1] = Σ x²`.
    SumOfSquares { elements: usize } => training::sum("sum_of_squares", elements);
    /// The rank's part y `[outer, inner]` of a replicated x `[outer, parts, inner]`. `outer` is the
    /// product of the dimensions before the one that is cut. `inner` is the product of a part's
    /// extent and the dimensions after it.
    Slice { outer: usize, parts: usize, inner: usize } => movement::slice(outer, parts, inner);
    /// x `[parts, outer, inner]` to `[outer, parts, inner]`: restores order after an all-gather.
    Interleave { outer: usize, parts: usize, inner: usize } => movement::interleave("interleave", outer, parts, inner);
    /// x `[outer, parts, inner]` to `[parts, outer, inner]`: the order for a reduce-scatter.
    Deinterleave { outer: usize, parts: usize, inner: usize } => movement::interleave("deinterleave", outer, parts, inner);
    /// y `[rows, part]`: `part` columns of x `[rows, columns]` from `start` on, for a rank of
    /// another mesh.
    TakeColumns { rows: usize, columns: usize, start: usize, part: usize } => movement::take_columns(rows, columns, part);
    /// The reverse of [`Kernel::TakeColumns`]. It leaves the other columns of y.
    PutColumns { rows: usize, columns: usize, start: usize, part: usize } => movement::put_columns(rows, columns, part);
    /// Work that is planned and simulated, but that no backend has a kernel for.
    Planned(work: Planned) => planned::planned(&work);
}
}

impl Kernel {
    /// Returns the kernel's description: name, operands in order, arithmetic.
    pub fn spec(&self) -> KernelSpec {
        self.describe(|spec| *spec)
    }
}
