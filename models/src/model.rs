//! Models as users name them or write them into model files: a family with its sizes.

use crate::builder::GraphOptions;
use crate::error::ModelError;
use crate::families::{
    Bert, Check, Clip, Decoder, Family, Gpt, Llama, LstmSeq2seq, Mlp, ModernBert, Moe, Network, Resnet, T5, Vgg, Vit, Whisper,
};
use crate::graph::{Graph, Tensor};
use crate::optimizer::Optimizer;
use crate::sample::SampleShape;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A family with its sizes. Model files have this form.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "family", rename_all = "lowercase")]
#[allow(missing_docs, reason = "each family documents itself")]
#[allow(clippy::large_enum_variant, reason = "a job has one model")]
pub enum Model {
    Mlp(Mlp),
    Resnet(Resnet),
    Vgg(Vgg),
    Vit(Vit),
    Gpt(Gpt),
    Llama(Llama),
    Moe(Moe),
    Decoder(Decoder),
    T5(T5),
    #[serde(rename = "lstm-seq2seq")]
    LstmSeq2seq(LstmSeq2seq),
    Bert(Bert),
    ModernBert(ModernBert),
    Whisper(Whisper),
    Clip(Clip),
    Network(Network),
}

/// Evaluates an expression on the sizes of a model of any family.
macro_rules! with_family {
    ($model:expr, $sizes:ident => $value:expr) => {
        match $model {
            Model::Mlp($sizes) => $value,
            Model::Resnet($sizes) => $value,
            Model::Vgg($sizes) => $value,
            Model::Vit($sizes) => $value,
            Model::Gpt($sizes) => $value,
            Model::Llama($sizes) => $value,
            Model::Moe($sizes) => $value,
            Model::Decoder($sizes) => $value,
            Model::T5($sizes) => $value,
            Model::LstmSeq2seq($sizes) => $value,
            Model::Bert($sizes) => $value,
            Model::ModernBert($sizes) => $value,
            Model::Whisper($sizes) => $value,
            Model::Clip($sizes) => $value,
            Model::Network($sizes) => $value,
        }
    };
}

/// Lists models by a function of [`Family`], family by family.
macro_rules! of_all_families {
    ($list:ident) => {
        [
            named(Mlp::$list(), Model::Mlp),
            named(Resnet::$list(), Model::Resnet),
            named(Vgg::$list(), Model::Vgg),
            named(Vit::$list(), Model::Vit),
            named(Gpt::$list(), Model::Gpt),
            named(Llama::$list(), Model::Llama),
            named(Moe::$list(), Model::Moe),
            named(Decoder::$list(), Model::Decoder),
            named(T5::$list(), Model::T5),
            named(LstmSeq2seq::$list(), Model::LstmSeq2seq),
            named(Bert::$list(), Model::Bert),
            named(ModernBert::$list(), Model::ModernBert),
            named(Whisper::$list(), Model::Whisper),
            named(Clip::$list(), Model::Clip),
            named(Network::$list(), Model::Network),
        ]
        .into_iter()
        .flatten()
    };
}

/// Returns named models of a family as [`Model`]s.
fn named<F>(models: Vec<(&'static str, F)>, variant: fn(F) -> Model) -> Vec<(&'static str, Model)> {
    models.into_iter().map(|(name, sizes)| (name, variant(sizes))).collect()
}

fn name_of<F: Family>(_: &F) -> &'static str {
    F::NAME
}

fn optimizer_of<F: Family>(sizes: &F) -> Optimizer {
    sizes.usual_optimizer()
}

/// The most elements of a tensor over all ranks. Sums of elements, bytes or traffic of a few
/// tensors then fit 64 bits.
const MOST_ELEMENTS: usize = 1 << 48;

/// The most samples of a batch. The product with the pixels of the largest image (2^26) fits 64
/// bits.
const MOST_SAMPLES: usize = 1 << 32;

impl Model {
    /// Returns the named models that the families define.
    pub(crate) fn of_families() -> impl Iterator<Item = (&'static str, Model)> {
        of_all_families!(zoo)
    }

    /// Returns small models of every family with their names. A calibration without a model times
    /// their kernels.
    pub fn examples() -> impl Iterator<Item = (&'static str, Model)> {
        of_all_families!(examples)
    }

    /// Returns the name of the family in model files.
    pub fn family(&self) -> &'static str {
        with_family!(self, sizes => name_of(sizes))
    }

    /// Returns the optimizer that usually trains models of the family.
    pub fn usual_optimizer(&self) -> Optimizer {
        with_family!(self, sizes => optimizer_of(sizes))
    }

    /// Whether the model is a stack of blocks with attention.
    pub fn is_transformer(&self) -> bool {
        with_family!(self, sizes => sizes.is_transformer())
    }

    /// Returns the form of a training sample.
    pub fn sample(&self) -> SampleShape {
        with_family!(self, sizes => sizes.sample())
    }

    /// Returns the number of equal blocks between the first block and the last. `None` if the model
    /// is not a stack of equal blocks.
    pub fn repeated_layers(&self) -> Option<usize> {
        with_family!(self, sizes => sizes.repeated_layers())
    }

    /// Returns the model's number of layers. `None` if its family has no such number.
    pub fn layers(&self) -> Option<usize> {
        with_family!(&mut self.clone(), sizes => sizes.layers_mut()).copied()
    }

    /// Returns the model with another number of layers. `None` if its family has no such number.
    pub fn with_layers(&self, count: usize) -> Option<Self> {
        let mut model = self.clone();
        *with_family!(&mut model, sizes => sizes.layers_mut())? = count;
        Some(model)
    }

    /// Returns the model as a decoder. `None` if it is of another kind.
    pub fn as_decoder(&self) -> Option<Decoder> {
        match self {
            Model::Llama(sizes) => Some(sizes.decoder()),
            Model::Moe(sizes) => Some(sizes.decoder()),
            Model::Decoder(sizes) => Some(sizes.clone()),
            _ => None,
        }
    }

    /// Returns a decoder as a model of the first family that has all of its parts: Llama, Mixtral,
    /// or decoders in general.
    pub fn of_decoder(decoder: Decoder) -> Self {
        let llama = Llama::of_decoder(&decoder);
        if llama.decoder() == decoder {
            return Model::Llama(llama);
        }
        match Moe::of_decoder(&decoder).filter(|moe| moe.decoder() == decoder) {
            Some(moe) => Model::Moe(moe),
            None => Model::Decoder(decoder),
        }
    }

    /// Returns the model with samples of another length. `None` if it has no such length.
    pub fn with_sequence(&self, length: usize) -> Option<Self> {
        let mut model = self.clone();
        match &mut model {
            Model::Gpt(sizes) => sizes.sequence = length,
            Model::Llama(sizes) => sizes.sequence = length,
            Model::Moe(sizes) => sizes.sequence = length,
            Model::Decoder(sizes) => sizes.sequence = length,
            Model::Bert(sizes) => sizes.sequence = length,
            Model::ModernBert(sizes) => sizes.sequence = length,
            Model::Whisper(sizes) => sizes.set_target(length),
            _ => return None,
        }
        Some(model)
    }

    /// Returns the number of experts in each mixture. `None` without mixtures.
    pub fn experts(&self) -> Option<usize> {
        self.as_decoder()?.mixtures.map(|mixtures| mixtures.experts)
    }

    /// Returns the number of experts that a token is sent to in each mixture. 1 without mixtures.
    pub fn experts_per_token(&self) -> usize {
        self.as_decoder().and_then(|decoder| decoder.mixtures).map_or(1, |mixtures| mixtures.top_k)
    }

    /// Returns the number of layers with a mixture of experts.
    pub fn mixture_layers(&self) -> usize {
        let Some(decoder) = self.as_decoder() else { return 0 };
        let is_mixture = |layer: &usize| decoder.mixtures.is_some_and(|mixtures| mixtures.includes(*layer));
        (0..decoder.layers).filter(is_mixture).count()
    }

    /// Returns the parts of the model that are planned and simulated, but not executed, as a model
    /// file names them.
    pub fn planned_only(&self) -> Vec<&'static str> {
        with_family!(self, sizes => sizes.planned_only())
    }

    /// Whether the model has batch normalisation, whose statistics depend on the grouping of
    /// samples.
    pub fn has_batch_norm(&self) -> bool {
        with_family!(self, sizes => sizes.has_batch_norm())
    }

    /// Builds the forward graph over a batch. `name` is the model's name in the graph and in
    /// messages.
    ///
    /// # Errors
    /// [`ModelError::Inconsistent`] if sizes contradict each other, or a tensor has more than 2^48
    /// elements.
    pub fn graph(&self, name: &str, options: &GraphOptions) -> Result<Graph, ModelError> {
        let check = Check { name };
        with_family!(self, sizes => sizes.validate(&check))?;
        let GraphOptions { batch, normalization_groups: groups, .. } = *options;
        if batch == 0 || batch > MOST_SAMPLES || groups == 0 || !batch.is_multiple_of(groups) {
            return Err(check.error(
                format!("a batch of {batch} samples in {groups} groups"),
                "a batch has 1 to 4,294,967,296 samples, in groups of equal size",
            ));
        }
        let graph = with_family!(self, sizes => sizes.graph(name, options));
        let is_too_large = |tensor: &&Tensor| tensor.checked_elements().is_none_or(|elements| elements > MOST_ELEMENTS);
        match graph.tensors.iter().find(is_too_large) {
            None => Ok(graph),
            Some(tensor) => {
                let shape: Vec<String> =
                    tensor.dimensions.iter().map(|dimension| format!("{} {}", dimension.name, dimension.extent)).collect();
                Err(check.error(
                    format!("`{}` ({}) has more than 2^48 elements", tensor.name, shape.join(", ")),
                    "use a smaller micro-batch, or smaller sizes in the model",
                ))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Model;

    #[test]
    fn the_name_of_a_family_is_its_tag_in_model_files() {
        for (name, model) in Model::zoo().chain(Model::examples()) {
            let document = serde_json::to_value(&model).expect("it can be written");
            assert_eq!(document["family"], model.family(), "{name}");
            assert_eq!(serde_json::from_value::<Model>(document).expect("it reads back"), model, "{name}");
        }
    }

    #[test]
    fn a_field_that_a_family_does_not_have_is_refused() {
        let error =
            serde_json::from_str::<Model>(r#"{"family": "mlp", "widths": [4, 2], "depth": 3}"#).expect_err("no such field");
        assert!(error.to_string().contains("unknown field `depth`"), "{error}");
    }
}
