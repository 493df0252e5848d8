//! Low-rank adapters as a recipe states them.

use super::{NamePatterns, PlanError};
use foretell_models::{AdapterSizes, Graph, WeightLayout, is_adapter, linear_layers, with_adapters};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The largest rank of an adapter.
const MOST_RANK: usize = 1 << 16;

/// Low-rank adapters on linear layers. All other parameters are frozen, except those that
/// [`Lora::also_train`] names.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Lora {
    /// The rank r of an adapter's two matrices.
    pub rank: usize,
    /// The scale of an adapter: its result is multiplied by `alpha / rank`.
    pub alpha: usize,
    /// Patterns for the names of the linear layers that have an adapter.
    pub targets: NamePatterns,
    /// Patterns for parameters that are trained beside the adapters, such as those of a new head.
    #[serde(skip_serializing_if = "NamePatterns::is_empty")]
    pub also_train: NamePatterns,
}

impl Default for Lora {
    /// `peft`'s default sizes, with adapters on all linear layers.
    fn default() -> Self {
        Self { rank: 8, alpha: 8, targets: NamePatterns::from_iter(["*"]), also_train: NamePatterns::default() }
    }
}

impl Lora {
    /// The rank that peft's examples and most fine-tuning jobs use.
    pub const USUAL_RANK: usize = 16;

    /// The alpha that most fine-tuning jobs use with this rank.
    pub const fn usual_alpha(rank: usize) -> usize {
        rank.saturating_mul(2)
    }

    /// Patterns for layers, given the names that fine-tuning tools use: the last part of a layer's
    /// name (`q_proj`), or `all` and `all-linear` for every linear layer.
    pub fn targets_named<'a>(names: impl IntoIterator<Item = &'a str>) -> NamePatterns {
        let pattern = |name| if matches!(name, "all" | "all-linear") { "*".into() } else { format!("*{name}") };
        names.into_iter().map(pattern).collect()
    }

    /// The linear layers that have an adapter, each with the layout of its weight.
    pub fn layers<'a>(&'a self, graph: &'a Graph) -> impl Iterator<Item = (&'a str, WeightLayout)> {
        linear_layers(graph).filter(|(name, _)| self.targets.match_name(name))
    }

    /// A forward graph with the adapters.
    ///
    /// # Errors
    /// [`PlanError::Invalid`] if a pattern matches no linear layer.
    pub(crate) fn apply(&self, graph: Graph) -> Result<Graph, PlanError> {
        let names: Vec<&str> = linear_layers(&graph).map(|(name, _)| name).collect();
        if let Some(pattern) = self.targets.unmatched(names.iter().copied()) {
            let hint = match names.first() {
                Some(example) => format!("its linear layers have names such as `{example}`, and `*` stands for any characters"),
                None => "the model has no linear layers but the one that makes predictions".into(),
            };
            let reason = format!("`{pattern}` matches no linear layer of the model");
            return Err(PlanError::Invalid { field: "training.lora.targets", reason, hint });
        }
        Ok(with_adapters(graph, AdapterSizes { rank: self.rank, alpha: self.alpha }, |name| self.targets.match_name(name)))
    }

    /// Whether a parameter is trained.
    pub(super) fn trains(&self, parameter: &str) -> bool {
        is_adapter(parameter) || self.also_train.match_name(parameter)
    }

    /// Refuses a rank or an alpha out of range, and an empty list of targets.
    pub(super) fn validate(&self) -> Result<(), PlanError> {
        let sizes =
            [("training.lora.rank", self.rank, "leave it out for 8"), ("training.lora.alpha", self.alpha, "leave it out for 8")];
        for (field, size, hint) in sizes {
            if !(1..=MOST_RANK).contains(&size) {
                let reason = format!("{size} is not between 1 and {MOST_RANK}");
                return Err(PlanError::Invalid { field, reason, hint: hint.into() });
            }
        }
        match self.targets.is_empty() {
            true => Err(PlanError::Invalid {
                field: "training.lora.targets",
                reason: "it names no layer".into(),
                hint: "leave it out to adapt all linear layers".into(),
            }),
            false => Ok(()),
        }
    }
}
