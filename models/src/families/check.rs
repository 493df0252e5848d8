//! Checks of sizes that several families make before a graph is built.

use crate::error::ModelError;

/// The most layers of a model: about a hundred times those of the deepest language models.
pub(super) const MOST_LAYERS: usize = 10_000;

/// The largest size of any kind.
pub(crate) const MOST: usize = 1 << 24;

/// The most features of a head.
const MOST_HEAD_FEATURES: usize = 1 << 16;

/// Checks of one model's sizes.
pub(crate) struct Check<'a> {
    /// Name of the model, for messages.
    pub(crate) name: &'a str,
}

impl Check<'_> {
    /// Returns the error for a model that is refused.
    pub(crate) fn error(&self, reason: String, hint: &str) -> ModelError {
        ModelError::Inconsistent { name: self.name.into(), reason, hint: hint.into() }
    }

    /// Refuses the model.
    pub(super) fn refuse(&self, reason: String, hint: &str) -> Result<(), ModelError> {
        Err(self.error(reason, hint))
    }

    /// Refuses sizes that are 0 or too large.
    pub(super) fn sizes(&self, sizes: &[(&str, usize)]) -> Result<(), ModelError> {
        sizes.iter().try_for_each(|&(name, value)| match value {
            0 => self.refuse(format!("`{name}` is 0"), "every size is at least 1"),
            value if value > MOST => self.refuse(format!("`{name}` is {value}"), "no size is larger than 16,777,216"),
            _ => Ok(()),
        })
    }

    /// Refuses too many layers.
    pub(super) fn layers(&self, layers: usize) -> Result<(), ModelError> {
        if layers > MOST_LAYERS {
            return self.refuse(format!("`layers` is {layers}"), "a model has 10,000 layers at most");
        }
        Ok(())
    }

    /// Refuses an encoder and a decoder of too many layers each.
    pub(super) fn layers_of_each(&self, layers: usize) -> Result<(), ModelError> {
        if layers > MOST_LAYERS / 2 {
            return self.refuse(format!("`layers` is {layers}"), "encoder and decoder have 5,000 layers each at most");
        }
        Ok(())
    }

    /// Refuses a transformer with bad sizes, or whose heads do not divide its features.
    pub(super) fn transformer(&self, [layers, hidden, heads, ffn]: [usize; 4]) -> Result<(), ModelError> {
        self.sizes(&[("layers", layers), ("hidden", hidden), ("heads", heads), ("ffn", ffn)])?;
        self.layers(layers)?;
        if !hidden.is_multiple_of(heads) {
            return self.refuse(format!("hidden {hidden} is not a multiple of heads {heads}"), "choose heads that divide hidden");
        }
        Ok(())
    }

    /// Refuses query heads that are not a multiple of the key heads.
    pub(super) fn key_heads(&self, heads: usize, kv_heads: usize) -> Result<(), ModelError> {
        if !heads.is_multiple_of(kv_heads) {
            return self
                .refuse(format!("heads {heads} is not a multiple of kv_heads {kv_heads}"), "choose kv_heads that divide heads");
        }
        Ok(())
    }

    /// The features of a head. Refuses heads without features or with too many, and a `hidden` that
    /// the heads do not divide. `heads` is at least 1.
    pub(super) fn head_features(&self, hidden: usize, heads: usize, head_dimension: Option<usize>) -> Result<usize, ModelError> {
        match head_dimension {
            Some(features) if features == 0 || features > MOST_HEAD_FEATURES => {
                Err(self.error(format!("`head_dimension` is {features}"), "it is from 1 to 65,536"))
            }
            Some(features) => Ok(features),
            None if hidden.is_multiple_of(heads) => Ok(hidden / heads),
            None => {
                let reason = format!("hidden {hidden} is not a multiple of heads {heads}");
                Err(self.error(reason, "choose heads that divide hidden, or give `head_dimension`"))
            }
        }
    }

    /// Refuses heads whose features do not form pairs, which rotary positions rotate.
    pub(super) fn pairs_of_features(&self, features: usize) -> Result<(), ModelError> {
        if features == 0 || !features.is_multiple_of(2) {
            return self.refuse(
                format!("a head has {features} features, which do not form pairs for rotary positions"),
                "choose hidden and heads so that a head has an even number of features, or give an even `head_dimension`",
            );
        }
        Ok(())
    }
}
