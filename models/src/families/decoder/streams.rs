//! Several residual streams of which a layer updates one and predicts the others (AltUp, Baykal et
//! al. 2023), with a low-rank product beside attention (LAuReL, Menghani et al. 2024), as in Gemma
//! 3n.
//!
//! A layer predicts all streams by weights made of the active one, runs its usual parts on that
//! prediction, and adds the difference to every stream. Planned, and not executed.

use super::super::Check;
use super::layers::{Layers, WEIGHTS};
use super::{Decoder, ParallelBlock};
use crate::builder::dimension;
use crate::error::ModelError;
use crate::graph::{Initialisation, TensorId};
use crate::kernel::WeightLayout;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Residual streams of which each layer updates one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ResidualStreams {
    /// Number of streams, including the active one.
    pub streams: usize,
    /// Features between the two products beside attention.
    pub rank: usize,
}

/// The most streams.
const MOST_STREAMS: usize = 64;

/// Weights that one layer uses to predict its streams and to correct them.
pub(super) struct Router {
    norm: TensorId,
    weight: TensorId,
}

impl Decoder {
    /// Refuses streams that no graph can be built from.
    pub(super) fn validate_streams(&self, check: &Check<'_>) -> Result<(), ModelError> {
        if self.sparse_activation_layers > 0 && !self.feed_forward.is_gated() {
            let reason = "`sparse_activation_layers` without a gate".into();
            return check.refuse(reason, "leave it out, or choose a `feed_forward` with a gate");
        }
        let Some(streams) = self.residual_streams else { return Ok(()) };
        check.sizes(&[("residual_streams.streams", streams.streams), ("residual_streams.rank", streams.rank)])?;
        if !(2..=MOST_STREAMS).contains(&streams.streams) {
            let reason = format!("`residual_streams.streams` is {}", streams.streams);
            return check.refuse(reason, "there are 2 to 64 streams; leave out `residual_streams` for one");
        }
        let has_others = self.parallel_block != ParallelBlock::None
            || !self.layer_kinds.is_empty()
            || self.residual_after_norm
            || self.no_input_norms
            || self.vision.is_some()
            || self.prediction_modules > 0;
        match has_others {
            true => check.refuse(
                "`residual_streams` beside `parallel_block`, `layer_kinds`, `vision`, `prediction_modules` or other places of norms"
                    .into(),
                "leave out one of them",
            ),
            false => Ok(()),
        }
    }
}

impl Layers<'_> {
    /// Adds the streams `[batch, sequence, streams, hidden]` that an embedding begins.
    pub(super) fn begin_streams(&mut self, x: TensorId, streams: ResidualStreams) -> TensorId {
        let others = [dimension("streams", streams.streams - 1), dimension("hidden", self.sizes.hidden)];
        let name = "model.altup_projections";
        let made = self.linear(name, x, 1, &others, false);
        // Each is scaled to the length of the embedding.
        let made = self.builder.scale(&format!("{name}.magnitude"), made, 1);
        self.builder.stacked("model.streams", x, made)
    }

    /// Adds the mean of all streams, in the active one's features.
    pub(super) fn end_streams(&mut self, x: TensorId, streams: ResidualStreams) -> TensorId {
        let hidden = [dimension("hidden", self.sizes.hidden)];
        let mut sum = self.builder.without_layers("model.streams.0", x);
        for stream in 1..streams.streams {
            let y = self.builder.without_layers(&format!("model.streams.{stream}"), x);
            let name = format!("model.altup_unembed_projections.{}", stream - 1);
            let y = self.linear(&name, y, 1, &hidden, false);
            let y = self.builder.scale(&format!("{name}.magnitude"), y, 1);
            sum = self.builder.add(&format!("{name}.sum"), sum, y);
        }
        self.builder.scale("model.streams.mean", sum, streams.streams * streams.streams)
    }

    /// Adds weights for each stream `[batch, sequence, streams]`, computed from the active one.
    fn modalities(&mut self, name: &str, x: TensorId, router: &Router) -> TensorId {
        let epsilon = self.sizes.norm_epsilon.epsilon();
        let normed = self.builder.rms_norm_with(&format!("{name}.norm"), x, epsilon, router.norm);
        let routed = self.builder.matmul(&format!("{name}.modality_router"), normed, router.weight, 1, WeightLayout::OutIn);
        // A tanh, with the traffic of a scale.
        self.builder.scale(&format!("{name}.tanh"), routed, 1)
    }

    /// Adds a layer between the prediction of its streams and their correction. Returns them.
    pub(super) fn layer_of_streams(&mut self, layer: usize, x: TensorId, streams: ResidualStreams) -> TensorId {
        let name = |part: &str| format!("model.layers.{layer}.altup.{part}");
        let (hidden, count) = (dimension("hidden", self.sizes.hidden), dimension("weights", streams.streams));
        let norm = self.builder.parameter(name("router_norm.weight"), vec![hidden], vec![hidden.extent], Initialisation::Ones);
        let shape = vec![count.extent, hidden.extent];
        let weight = self.builder.parameter(name("modality_router.weight"), vec![count, hidden], shape, WEIGHTS);
        let router = Router { norm, weight };

        let active = self.builder.without_layers(&name("active"), x);
        let modalities = self.modalities(&name("predict"), active, &router);
        let pairs = [count, dimension("predicted", streams.streams)];
        let weights = self.linear(&name("prediction_coefs"), modalities, 1, &pairs, false);
        let predicted = self.builder.mixed_streams(&name("predicted"), x, weights);
        let predicted = self.builder.add(&name("predicted.residual"), predicted, x);

        let active = self.builder.without_layers(&name("active_prediction"), predicted);
        let y = self.usual_parts(layer, active);
        let modalities = self.modalities(&name("correct"), y, &router);
        let weights = self.linear(&name("correction_coefs"), modalities, 1, &[count], false);
        let innovation = self.builder.add(&name("innovation"), y, active);
        let corrected = self.builder.corrected_streams(&name("corrected"), predicted, innovation, weights);
        let first = self.builder.without_layers(&name("first"), corrected);
        let scale = self.builder.parameter(name("correct_output_scale"), vec![hidden], vec![hidden.extent], Initialisation::Ones);
        let first = self.builder.scaled_features(&name("correct_output"), first, scale);
        match self.layer_inputs {
            Some(inputs) => {
                let y = self.layer_input(layer, first, inputs);
                self.builder.added_to_streams(&format!("model.layers.{layer}.per_layer_input.residual"), corrected, y)
            }
            None => self.builder.added_to_streams(&name("correct_output.residual"), corrected, first),
        }
    }

    /// Adds the low-rank product of a layer's normed input to the stream after attention.
    pub(super) fn beside_attention(&mut self, layer: usize, x: TensorId, normed: TensorId, streams: ResidualStreams) -> TensorId {
        let name = |part: &str| format!("model.layers.{layer}.laurel.{part}");
        let y = self.linear(&name("linear_left"), normed, 1, &[dimension("rank", streams.rank)], false);
        let y = self.linear(&name("linear_right"), y, 1, &[dimension("hidden", self.sizes.hidden)], false);
        let y = self.norm(&name("post_laurel_norm"), y);
        let y = self.builder.add(&name("residual"), normed, y);
        let x = self.builder.add(&name("sum"), x, y);
        self.builder.scale(&name("scale"), x, 2)
    }
}
