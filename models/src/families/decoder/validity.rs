//! Which sizes and parts of a decoder go together.

use super::{Decoder, LayerKind, ParallelBlock, PositionKind};
use crate::error::ModelError;
use crate::families::Check;

impl Decoder {
    /// Refuses kinds of layers whose parts have no sizes.
    pub(super) fn validate_kinds(&self, check: &Check<'_>) -> Result<(), ModelError> {
        let has = |part: fn(LayerKind) -> bool| self.layer_kinds.iter().any(|&kind| part(kind));
        if has(LayerKind::has_linear) && self.linear.is_none() {
            return check.refuse("`layer_kinds` has linear attention, and `linear` is missing".into(), "give `linear` its sizes");
        }
        if has(|kind| kind == LayerKind::MixtureAlone) && self.mixtures.is_none() {
            return check.refuse("`layer_kinds` has mixtures, and `mixtures` is missing".into(), "give `mixtures` its sizes");
        }
        if !self.layer_kinds.is_empty() && self.parallel_block != ParallelBlock::None {
            return check.refuse("`layer_kinds` beside a `parallel_block`".into(), "leave out one of them");
        }
        self.linear.as_ref().map_or(Ok(()), |linear| linear.validate(check))
    }

    /// Refuses sizes that are too large or contradict each other.
    pub(super) fn validate_sizes(&self, check: &Check<'_>) -> Result<(), ModelError> {
        let Self { layers, hidden, heads, ffn, vocab, sequence, .. } = *self;
        check.sizes(&[
            ("layers", layers),
            ("hidden", hidden),
            ("heads", heads),
            ("kv_heads", self.kv_heads.unwrap_or(1)),
            ("query_rank", self.query_rank.unwrap_or(1)),
            ("key_value_rank", self.key_value_rank.unwrap_or(1)),
            ("rotary_part", self.rotary_part.unwrap_or(1)),
            ("value_dimension", self.value_dimension.unwrap_or(1)),
            ("ffn", ffn),
            ("vocab", vocab),
            ("sequence", sequence),
            ("rope_theta", self.rope_theta),
            ("position_rows", self.position_rows.unwrap_or(1)),
            ("first_position", self.first_position.max(1)),
            ("window", self.window.unwrap_or(1)),
            ("full_attention_every", self.full_attention_every.unwrap_or(1)),
            ("unrotated_every", self.unrotated_every.unwrap_or(1)),
        ])?;
        check.layers(layers.saturating_add(self.prediction_modules))?;
        check.key_heads(heads, self.kv_heads.unwrap_or(heads))
    }

    /// Refuses choices of positions that contradict each other.
    pub(super) fn validate_positions(&self, check: &Check<'_>) -> Result<(), ModelError> {
        let features = check.head_features(self.hidden, self.heads, self.head_dimension)?;
        if self.positions == PositionKind::Rotary && self.rotary_dimension.is_none() {
            check.pairs_of_features(self.rotary_part.unwrap_or(features))?;
        }
        if self.unrotated_every.is_some() && (self.positions != PositionKind::Rotary || self.rotary_part.is_some()) {
            return check.refuse("`unrotated_every` beside another choice of positions".into(), "leave out one of them");
        }
        let has_other_positions = !matches!(self.positions, PositionKind::Rotary | PositionKind::None);
        if self.rotary_part.is_some() && (has_other_positions || self.rotary_dimension.is_some()) {
            return check.refuse(
                "`rotary_part` beside another choice of positions".into(),
                "leave out `rotary_dimension`, and let `positions` be rotary or none",
            );
        }
        if let Some(rotated) = self.rotary_dimension
            && (rotated == 0 || rotated > features || !rotated.is_multiple_of(2))
        {
            let reason = format!("`rotary_dimension` is {rotated}, and a head has {features} features");
            return check.refuse(reason, "give an even number from 2 to a head's features");
        }
        if let Some(rows) = self.position_rows
            && rows < self.sequence.saturating_add(self.first_position)
        {
            let reason = format!("a table of {rows} positions, and a sequence of {} from {}", self.sequence, self.first_position);
            return check.refuse(reason, "use a shorter `sequence`, or more `position_rows`");
        }
        if self.positions != PositionKind::Learned && (self.position_rows.is_some() || self.first_position > 0) {
            return check.refuse("`position_rows` without learned positions".into(), "leave it out, or say `positions: learned`");
        }
        Ok(())
    }
}
