//! The parts of layers that norm their input and whose products have biases, as in Whisper, CLIP
//! and SigLIP: attention, and a feed-forward network with one GELU.

use crate::builder::{AttentionKind, GraphBuilder, dimension};
use crate::dropout::DropoutRate;
use crate::graph::{Initialisation, TensorId};
use crate::kernel::Epsilon;

/// Initial values of weights.
pub(super) const WEIGHTS: Initialisation = Initialisation::Normal(0.02);

/// Sizes of a layer.
#[derive(Clone, Copy)]
pub(super) struct LayerSizes {
    /// Features of a position.
    pub(super) hidden: usize,
    /// Attention heads. They divide `hidden`.
    pub(super) heads: usize,
    /// Inner width of the feed-forward network.
    pub(super) ffn: usize,
    /// Name of the dimension over `hidden`.
    pub(super) features: &'static str,
    /// Epsilon of the norms.
    pub(super) epsilon: Epsilon,
    /// Dropout rate of what each part adds to the residual stream.
    pub(super) dropout: DropoutRate,
}

/// Names of an attention part.
pub(super) struct AttentionNames {
    /// The attention.
    pub(super) module: String,
    /// The norm of its input.
    pub(super) norm: String,
    /// Whether its product of keys has a bias: all but Whisper's have.
    pub(super) key_bias: bool,
}

/// Adds attention of x over itself or over `memory`, with its norm and its residual.
pub(super) fn attention(
    builder: &mut GraphBuilder,
    names: &AttentionNames,
    x: TensorId,
    memory: Option<TensorId>,
    sizes: LayerSizes,
    kind: AttentionKind,
) -> TensorId {
    let LayerSizes { hidden, heads, features, .. } = sizes;
    let AttentionNames { module, norm, key_bias } = names;
    let zeros = Some(Initialisation::Zeros);
    let by_head = [dimension("heads", heads), dimension("head_dimension", hidden / heads)];
    let normed = builder.layer_norm(norm, x, sizes.epsilon);
    let attended = memory.unwrap_or(normed);
    let q = builder.linear(&format!("{module}.q_proj"), normed, 1, &by_head, WEIGHTS, zeros);
    let k = builder.linear(&format!("{module}.k_proj"), attended, 1, &by_head, WEIGHTS, zeros.filter(|_| *key_bias));
    let v = builder.linear(&format!("{module}.v_proj"), attended, 1, &by_head, WEIGHTS, zeros);
    let y = builder.attention(module, [q, k, v], kind);
    let y = builder.linear(&format!("{module}.out_proj"), y, 2, &[dimension(features, hidden)], WEIGHTS, zeros);
    let y = builder.dropout(&format!("{module}.dropout"), y, sizes.dropout);
    builder.add(&format!("{module}.residual"), x, y)
}

/// Adds a feed-forward network with its norm and its residual. `module` is the beginning of its
/// products' names.
pub(super) fn feed_forward(builder: &mut GraphBuilder, module: &str, norm: &str, x: TensorId, sizes: LayerSizes) -> TensorId {
    let zeros = Some(Initialisation::Zeros);
    let y = builder.layer_norm(norm, x, sizes.epsilon);
    let y = builder.linear(&format!("{module}.fc1"), y, 1, &[dimension("ffn", sizes.ffn)], WEIGHTS, zeros);
    let y = builder.gelu_exact(&format!("{module}.act"), y);
    let y = builder.linear(&format!("{module}.fc2"), y, 1, &[dimension(sizes.features, sizes.hidden)], WEIGHTS, zeros);
    let y = builder.dropout(&format!("{module}.dropout"), y, sizes.dropout);
    builder.add(&format!("{module}.residual"), x, y)
}
