//! Settings that a framework uses if a run does not state them.

use crate::gpu::defaults::one;
use crate::gpu::format::ProductFormat;
use foretell_program::{Overlap, Recompute, Trained};
use foretell_units::Bytes;
use serde::Deserialize;

fn bf16() -> ProductFormat {
    ProductFormat::Bf16
}

fn attention_only() -> Recompute {
    Recompute::Selective
}

fn unpadded() -> usize {
    1
}

/// Settings of a framework's runs.
///
/// `overlap` and `bucket` apply to every plan of the stack, and `trains` to searches that name no
/// method. All others serve to interpret published rows, and only `score` reads them. They do not
/// change a plan's own settings: a plan's `recompute: selective` always recomputes only attention.
#[derive(Clone, Debug, Deserialize)]
pub struct RunDefaults {
    /// Which communication overlaps kernels.
    pub overlap: Overlap,
    /// Bytes of parameters or gradients that are communicated together. A block with fewer bytes is
    /// one bucket.
    pub bucket: Bytes,
    /// The parameters that its runs train.
    #[serde(default)]
    pub trains: Trained,
    /// Number format of matrix products.
    #[serde(default = "bf16")]
    pub precision: ProductFormat,
    /// Recomputation in rows that do not state one.
    #[serde(default)]
    pub recompute: Recompute,
    /// Recomputation in rows that state `selective`, a word that each framework uses differently.
    #[serde(default = "attention_only")]
    pub selective: Recompute,
    /// True if a row that states no recomputation is assumed to use more than `recompute` if the
    /// run would otherwise not fit into device memory.
    #[serde(default)]
    pub recompute_to_fit: bool,
    /// True if runs with tensor parallelism use Megatron's sequence parallelism.
    #[serde(default)]
    pub sequence_parallel: bool,
    /// True if runs with tensor parallelism keep each expert on one rank.
    #[serde(default)]
    pub whole_experts: bool,
    /// The vocabulary is padded to a multiple of this times the tensor-parallel size.
    #[serde(default = "unpadded")]
    pub vocabulary_multiple: usize,
    /// Share of the tokens in BERT's longest sequences (512 tokens) that is computed. Less than 1
    /// if padding is skipped, entirely or by batching sequences of similar lengths.
    #[serde(default = "one")]
    pub sequence_share: f64,
}
