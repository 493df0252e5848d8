//! PyTorch's operators in a step: the kind of work of each, and the shape by which its instruction
//! is found. It must not know times or Programs.

use foretell_models::KernelFamily;
use foretell_program::Exchange;
use serde_json::Value;

/// The work of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Work {
    /// Kernels of one kind. A product also has its shape.
    Kernel(KernelFamily, Option<ProductShape>),
    /// Communication.
    Exchange(Exchange),
    /// Reading of samples.
    Load,
}

/// The shape of a product, without the order of its two sides: frameworks may compute the
/// transpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct ProductShape {
    contracted: usize,
    sides: [usize; 2],
}

impl ProductShape {
    pub(super) fn new(contracted: usize, rows: usize, columns: usize) -> Self {
        Self { contracted, sides: [rows.min(columns), rows.max(columns)] }
    }
}

/// Operators of ATen by kind of work. If operators are nested, the outermost one counts.
const KINDS: [(KernelFamily, &[&str]); 12] = [
    (
        KernelFamily::Attention,
        &["scaled_dot_product_attention", "_scaled_dot_product", "_flash_attention", "_efficient_attention", "_cudnn_attention"],
    ),
    (
        KernelFamily::Norm,
        &[
            "layer_norm",
            "native_layer_norm",
            "rms_norm",
            "_fused_rms_norm",
            "group_norm",
            "native_group_norm",
            "batch_norm",
            "native_batch_norm",
            "cudnn_batch_norm",
            "miopen_batch_norm",
            "_batch_norm",
        ],
    ),
    (KernelFamily::Activation, &["gelu", "relu", "threshold_backward", "silu", "hardtanh", "sigmoid", "tanh"]),
    (KernelFamily::Residual, &["add", "dropout", "native_dropout"]),
    (KernelFamily::Embedding, &["embedding"]),
    (KernelFamily::Loss, &["cross_entropy_loss", "log_softmax", "_log_softmax", "nll_loss"]),
    (KernelFamily::Convolution, &["conv2d", "convolution", "_convolution", "cudnn_convolution", "mkldnn_convolution"]),
    (KernelFamily::Other, &["max_pool2d", "avg_pool2d", "adaptive_avg_pool2d", "_adaptive_avg_pool2d", "mean"]),
    (KernelFamily::BiasGradient, &["sum"]),
    (KernelFamily::Rearrangement, &["cat", "clone", "contiguous", "copy"]),
    (KernelFamily::Bucket, &["linalg_vector_norm", "_foreach_norm", "_foreach_mul"]),
    (KernelFamily::Optimizer, &["_fused_adam", "_fused_adamw", "_fused_sgd"]),
];

/// Products, with the index of the first factor among the inputs.
const PRODUCTS: [(&str, usize); 7] =
    [("mm", 0), ("bmm", 0), ("addmm", 1), ("baddbmm", 1), ("_addmm_activation", 1), ("_scaled_mm", 0), ("mkldnn_linear", 0)];

/// Collectives by a part of their names, in PyTorch's and NCCL's spelling.
const EXCHANGES: [(&str, Exchange); 7] = [
    ("all_reduce", Exchange::AllReduce),
    ("allreduce", Exchange::AllReduce),
    ("reduce_scatter", Exchange::ReduceScatter),
    ("reducescatter", Exchange::ReduceScatter),
    ("all_gather", Exchange::AllGather),
    ("allgather", Exchange::AllGather),
    ("send", Exchange::SendReceive),
];

/// The work of an operator or annotation. `None` if it is unknown, or only a part of other
/// operators. `dimensions` are the profiler's `Input Dims`.
pub(super) fn work_of(name: &str, dimensions: &Value) -> Option<Work> {
    if let Some(operator) = name.strip_prefix("aten::") {
        return aten(operator, dimensions);
    }
    if let Some(collective) = name.strip_prefix("gloo:").or_else(|| name.strip_prefix("nccl:")) {
        return exchange_of(collective).map(Work::Exchange);
    }
    if name.starts_with("Optimizer.step#") {
        return Some(Work::Kernel(KernelFamily::Optimizer, None));
    }
    if name.starts_with("enumerate(DataLoader)#") {
        return Some(Work::Load);
    }
    let is_flash = name.starts_with("flash_attn::") || name.starts_with("FlashAttn");
    let is_bucket = name == "torch::autograd::AccumulateGrad" || name.starts_with("torch::distributed::reducer::");
    if is_flash {
        return Some(Work::Kernel(KernelFamily::Attention, None));
    }
    is_bucket.then_some(Work::Kernel(KernelFamily::Bucket, None))
}

/// The collective that a device's kernel runs, such as `ncclDevKernel_AllReduce_Sum_f32_RING_LL`.
pub(super) fn exchange_of(name: &str) -> Option<Exchange> {
    let name = name.to_ascii_lowercase();
    EXCHANGES.iter().find(|(part, _)| name.contains(part)).map(|(_, exchange)| *exchange)
}

fn aten(operator: &str, dimensions: &Value) -> Option<Work> {
    // In-place and backward variants have the same kind of work.
    let plain = operator.trim_end_matches('_');
    if let Some((_, first)) = PRODUCTS.iter().find(|(name, _)| *name == plain) {
        return Some(Work::Kernel(KernelFamily::Product, product_shape(plain, &dimensions[*first], &dimensions[first + 1])));
    }
    let is_kind = |start: &&str| {
        let rest = plain.strip_prefix(*start);
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('_') || start.starts_with('_'))
    };
    let (family, _) = KINDS.iter().find(|(_, names)| names.iter().any(is_kind))?;
    Some(Work::Kernel(*family, None))
}

/// The shape of a product of two factors.
fn product_shape(operator: &str, one: &Value, other: &Value) -> Option<ProductShape> {
    let (one, other) = (sizes(one)?, sizes(other)?);
    let (&contracted, rest) = one.split_last()?;
    // A batch of products is one product with the rows of all.
    let rows = rest.iter().try_fold(1usize, |product, &size| product.checked_mul(size))?;
    let columns = if operator == "mkldnn_linear" { *other.first()? } else { *other.last()? };
    Some(ProductShape::new(contracted, rows, columns))
}

fn sizes(dimensions: &Value) -> Option<Vec<usize>> {
    dimensions.as_array()?.iter().map(|size| size.as_u64().and_then(|size| usize::try_from(size).ok())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn operators_of_one_kind_are_found_in_all_their_variants() {
        let family = |name: &str| match work_of(name, &Value::Null) {
            Some(Work::Kernel(family, _)) => Some(family),
            _ => None,
        };
        assert_eq!(family("aten::native_layer_norm_backward"), Some(KernelFamily::Norm));
        assert_eq!(family("aten::relu_"), Some(KernelFamily::Activation));
        assert_eq!(family("aten::_scaled_dot_product_flash_attention_for_cpu_backward"), Some(KernelFamily::Attention));
        assert_eq!(family("aten::embedding_dense_backward"), Some(KernelFamily::Embedding));
        assert_eq!(family("aten::addcmul"), None);
        assert_eq!(family("aten::view"), None);
        assert_eq!(work_of("gloo:all_reduce", &Value::Null), Some(Work::Exchange(Exchange::AllReduce)));
        assert_eq!(exchange_of("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL"), Some(Exchange::ReduceScatter));
    }

    #[test]
    fn a_product_has_the_shape_of_its_factors() {
        let shape = |name: &str, dimensions: Value| match work_of(name, &dimensions) {
            Some(Work::Kernel(_, shape)) => shape,
            _ => None,
        };
        let expected = Some(ProductShape::new(128, 256, 384));
        assert_eq!(shape("aten::addmm", json!([[384], [256, 128], [128, 384], [], []])), expected);
        assert_eq!(shape("aten::mm", json!([[384, 128], [128, 256]])), expected);
        assert_eq!(shape("aten::bmm", json!([[4, 64, 128], [4, 128, 384]])), expected);
        assert_eq!(shape("aten::mm", json!([])), None);
    }
}
