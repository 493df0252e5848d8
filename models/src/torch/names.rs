//! The names of aten operators, by kind of work.

use crate::families::NetworkWork;

/// Whether an operator makes numbers that depend on no input.
pub(super) fn is_maker(name: &str) -> bool {
    words(MAKERS).any(|known| known == name)
}

/// The kind of work of an operator that has no layer of its own. `operands`: those that depend on a
/// parameter or an input. `None` if the name is not known.
pub(super) fn work(name: &str, operands: usize) -> Option<NetworkWork> {
    let is_of = |list: &'static str| words(list).any(|known| known == name);
    Some(match name {
        // With a constant operand, a product is as much work as a sum: its gradient reads no
        // operand.
        _ if is_of(SUMS) || (is_of(COMBINATIONS) && operands < 2) => NetworkWork::Sum,
        _ if is_of(COMBINATIONS) => NetworkWork::Combination,
        _ if is_of(FUNCTIONS) => NetworkWork::Function,
        _ if is_of(MOVES) => NetworkWork::Move,
        _ if is_of(REDUCTIONS) => NetworkWork::Reduce,
        _ if name.contains("softmax") => NetworkWork::Softmax,
        _ => return None,
    })
}

fn words(list: &'static str) -> impl Iterator<Item = &'static str> {
    list.split_ascii_whitespace()
}

/// Operators that make numbers from nothing, or constants of the shape of what they read.
const MAKERS: &str = "\
    arange bernoulli empty empty_like eye full full_like linspace new_empty new_full new_ones new_zeros normal \
    ones ones_like rand rand_like randn randn_like zeros zeros_like";

/// Functions of each element whose gradient needs no tensor that would not be kept anyway.
const SUMS: &str = "\
    add bitwise_and bitwise_not bitwise_or ceil eq fill floor floor_divide ge gt isfinite isinf isnan le lerp \
    lift_fresh logical_and logical_not logical_or logical_xor lt masked_fill ne neg remainder round rsub sign sub \
    threshold trunc where zero";

/// Functions of each element whose gradient reads the element.
const FUNCTIONS: &str = "\
    abs acos asin atan atan2 binary_cross_entropy celu clamp clamp_max clamp_min cos cosh elu erf erfc exp exp2 \
    expm1 gelu glu hardsigmoid hardswish hardtanh huber_loss hypot leaky_relu log log10 log1p log2 \
    log_sigmoid_forward logit maximum minimum mish mse_loss native_dropout pow prelu reciprocal relu relu6 rrelu_with_noise \
    rsqrt selu sigmoid silu sin sinc sinh smooth_l1_loss softplus softshrink sqrt square tan tanh";

/// Element-wise products and quotients.
const COMBINATIONS: &str = "\
    addcdiv addcmul complex div mul polar";

/// Changes of order, copies, and look-ups.
const MOVES: &str = "\
    _to_copy _unsafe_index cat clone col2im constant_pad_nd contiguous copy diagonal_copy flip gather \
    grid_sampler_2d im2col index index_add index_copy index_put index_select masked_scatter masked_select \
    pixel_shuffle pixel_unshuffle reflection_pad1d reflection_pad2d repeat repeat_interleave replication_pad2d \
    roll scatter scatter_add scatter_reduce select_scatter slice_scatter stack tril triu unfold unfold_backward \
    upsample_bicubic2d upsample_bilinear2d upsample_nearest2d view_as_complex";

/// Sums, means and other statistics, including running ones.
const REDUCTIONS: &str = "\
    _adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_avg_pool1d adaptive_max_pool2d all amax amin any argmax \
    argmin argsort avg_pool1d avg_pool2d avg_pool3d bincount count_nonzero cummax cumprod cumsum histc \
    linalg_vector_norm logcumsumexp logsumexp max max_pool2d_with_indices max_pool3d_with_indices mean median min \
    multinomial nonzero norm prod searchsorted sort std sum topk var var_mean";
