//! Recomputation: the results of forward operators that the backward pass computes a second time
//! instead of keeping them.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::fmt;

/// The results that the backward pass recomputes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Recompute {
    /// None: every activation that the backward pass reads is kept.
    #[default]
    None,
    /// The results of attention: its output, and the logarithms of its softmax sums. Scores are
    /// never stored, so this frees less memory than the selective recomputation of Korthikanti et
    /// al. (2022), where they are.
    Selective,
    /// All results within each repeated block, from the block's input.
    Full,
    /// As `full`, but only in the first blocks of each stage, this many.
    FullLayers(usize),
    /// As [`Recompute::FullLayers`], with a number of blocks for each stage, since the first stages
    /// hold the most micro-batches (AdaPipe, Sun et al. 2024).
    FullLayersOfStages(Vec<usize>),
    /// As `full`, except for the results of these kinds of operators. PyTorch's selective
    /// checkpointing and JAX's `remat` have such policies.
    AllBut(Kept),
}

/// The kinds of operators whose results are kept although their block is recomputed. A plan file
/// lists them: `{all_but: [attention, odd_products]}`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(from = "Vec<Keep>", into = "Vec<Keep>")]
pub struct Kept {
    /// Attention.
    pub attention: bool,
    /// Matrix products and convolutions.
    pub products: bool,
    /// Matrix products before a block's attention: queries, keys and values (MaxText's
    /// `save_qkv_proj`).
    pub projections: bool,
    /// The first of every two matrix products of a block, in the order in which the block computes
    /// them (torchtitan).
    pub odd_products: bool,
    /// Operators whose results are summed over ranks, so that no sum is reduced twice.
    pub sums: bool,
}

/// One kind of operator whose results are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Keep {
    /// [`Kept::attention`].
    Attention,
    /// [`Kept::products`].
    Products,
    /// [`Kept::projections`].
    Projections,
    /// [`Kept::odd_products`].
    OddProducts,
    /// [`Kept::sums`].
    Sums,
}

impl From<Vec<Keep>> for Kept {
    fn from(kinds: Vec<Keep>) -> Self {
        let has = |kind| kinds.contains(&kind);
        Self {
            attention: has(Keep::Attention),
            products: has(Keep::Products),
            projections: has(Keep::Projections),
            odd_products: has(Keep::OddProducts),
            sums: has(Keep::Sums),
        }
    }
}

impl From<Kept> for Vec<Keep> {
    fn from(kept: Kept) -> Self {
        let all = [
            (kept.attention, Keep::Attention),
            (kept.products, Keep::Products),
            (kept.projections, Keep::Projections),
            (kept.odd_products, Keep::OddProducts),
            (kept.sums, Keep::Sums),
        ];
        all.into_iter().filter_map(|(is_kept, kind)| is_kept.then_some(kind)).collect()
    }
}

impl Recompute {
    /// Full recomputation of the first blocks of each stage, given the number of blocks of each
    /// stage. The result is in normal form: [`Recompute::None`] if all numbers are 0, and
    /// [`Recompute::FullLayers`] if all are equal.
    pub fn full_layers(of_stages: Vec<usize>) -> Self {
        match of_stages.first() {
            Some(&layers) if of_stages.iter().any(|&other| other != layers) => Recompute::FullLayersOfStages(of_stages),
            None | Some(0) => Recompute::None,
            Some(&layers) => Recompute::FullLayers(layers),
        }
    }

    /// The recomputation of one stage. Never [`Recompute::FullLayersOfStages`].
    pub fn of_stage(&self, stage: usize) -> Self {
        match self {
            Recompute::FullLayersOfStages(layers) => match layers.get(stage) {
                None | Some(0) => Recompute::None,
                Some(&layers) => Recompute::FullLayers(layers),
            },
            other => other.clone(),
        }
    }
}

impl fmt::Display for Recompute {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Recompute::None => formatter.write_str("none"),
            Recompute::Selective => formatter.write_str("selective"),
            Recompute::Full => formatter.write_str("full"),
            Recompute::FullLayers(layers) => write!(formatter, "full, {layers} layers"),
            Recompute::FullLayersOfStages(layers) => {
                let runs = layers.chunk_by(|layer, other| layer == other).map(|run| match run {
                    [one] => one.to_string(),
                    _ => format!("{}x{}", run.len(), run[0]),
                });
                write!(formatter, "full, {} layers", runs.collect::<Vec<_>>().join("+"))
            }
            Recompute::AllBut(kept) => write!(formatter, "all but {kept}"),
        }
    }
}

impl fmt::Display for Kept {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = Vec::from(*self).into_iter().map(|kind| match kind {
            Keep::Attention => "attention",
            Keep::Products => "products",
            Keep::Projections => "projections",
            Keep::OddProducts => "odd products",
            Keep::Sums => "sums",
        });
        formatter.write_str(&names.collect::<Vec<_>>().join(", "))
    }
}
