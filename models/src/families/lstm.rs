//! An encoder-decoder of LSTMs without attention (Sutskever, Vinyals and Le 2014). Names are those
//! of the first tutorial of github.com/bentrevett/pytorch-seq2seq: `encoder` and `decoder`, each
//! with an `embedding` and an `rnn`, and `decoder.fc_out`.

use super::{Check, Family};
use crate::builder::{GraphBuilder, GraphOptions, dimension};
use crate::error::ModelError;
use crate::graph::{BATCH, Graph, Initialisation, InputKind, TensorId};
use crate::kernel::WeightLayout;
use crate::optimizer::Optimizer;
use crate::sample::SampleShape;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// An encoder and a decoder of LSTM layers. The decoder begins in the last states of the encoder.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct LstmSeq2seq {
    /// Layers of the encoder, and of the decoder.
    pub layers: usize,
    /// Features of a state.
    pub hidden: usize,
    /// Features of a token. `None`: `hidden`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub embedding: Option<usize>,
    /// Size of the source's vocabulary.
    pub source_vocab: usize,
    /// Size of the target's vocabulary.
    pub target_vocab: usize,
    /// Positions of the source.
    pub source_sequence: usize,
    /// Positions of the target.
    pub target_sequence: usize,
}

/// The most features of a state. The gates have four times as many, in one matrix.
const MOST_HIDDEN: usize = 1 << 22;

impl Family for LstmSeq2seq {
    const NAME: &'static str = "lstm-seq2seq";
    const OPTIMIZER: Optimizer = Optimizer::AdamW;

    fn zoo() -> Vec<(&'static str, Self)> {
        let tutorial = Self {
            layers: 2,
            hidden: 512,
            embedding: Some(256),
            source_vocab: 7853,
            target_vocab: 5893,
            source_sequence: 32,
            target_sequence: 32,
        };
        vec![("lstm-seq2seq", tutorial)]
    }

    fn examples() -> Vec<(&'static str, Self)> {
        let small = Self {
            layers: 1,
            hidden: 128,
            embedding: None,
            source_vocab: 1024,
            target_vocab: 1024,
            source_sequence: 32,
            target_sequence: 32,
        };
        vec![("small-lstm", small)]
    }

    fn validate(&self, check: &Check<'_>) -> Result<(), ModelError> {
        let Self { layers, hidden, embedding, source_vocab, target_vocab, source_sequence, target_sequence } = *self;
        check.sizes(&[
            ("layers", layers),
            ("hidden", hidden),
            ("embedding", embedding.unwrap_or(1)),
            ("source_vocab", source_vocab),
            ("target_vocab", target_vocab),
            ("source_sequence", source_sequence),
            ("target_sequence", target_sequence),
        ])?;
        if hidden > MOST_HIDDEN {
            return check.refuse(format!("`hidden` is {hidden}"), "a recurrent layer has 4,194,304 features at most");
        }
        check.layers_of_each(layers)
    }

    fn sample(&self) -> SampleShape {
        let Self { source_vocab, target_vocab, source_sequence, target_sequence, .. } = *self;
        SampleShape::Pair {
            source: source_sequence,
            target: target_sequence,
            source_vocabulary: source_vocab,
            target_vocabulary: target_vocab,
        }
    }

    fn graph(&self, name: &str, options: &GraphOptions) -> Graph {
        let mut builder = GraphBuilder::new(name, options);
        let Self { layers, hidden, .. } = *self;
        let vocabularies = [self.source_vocab, self.target_vocab];
        let sequences = [self.source_sequence, self.target_sequence];
        let features = self.embedding.unwrap_or(hidden);
        let positions = sequences.map(|sequence| vec![dimension(BATCH, options.batch), dimension("sequence", sequence)]);
        builder.block("encoder embedding", false);
        let source = builder.input(InputKind::SourceTokens, positions[0].clone());
        let mut x = embedding(&mut builder, "encoder", source, features, vocabularies[0]);
        let mut states = Vec::with_capacity(layers);
        for layer in 0..layers {
            builder.block(format!("encoder layer {layer}"), true);
            let (y, last) = builder.lstm("encoder.rnn", layer, x, hidden, None);
            x = y;
            states.push(last);
        }
        builder.block("decoder embedding", false);
        let tokens = builder.input(InputKind::Tokens, positions[1].clone());
        let mut x = embedding(&mut builder, "decoder", tokens, features, vocabularies[1]);
        for (layer, state) in states.into_iter().enumerate() {
            builder.block(format!("decoder layer {layer}"), true);
            (x, _) = builder.lstm("decoder.rnn", layer, x, hidden, Some(state));
        }
        builder.block("head", false);
        // PyTorch's default for both weight and bias: uniform within 1/√inputs.
        let initialisation = Initialisation::Uniform(1.0 / (hidden as f64).sqrt());
        let [vocabulary, features] = [dimension("vocabulary", vocabularies[1]), dimension("hidden", hidden)];
        let shape = vec![vocabulary.extent, features.extent];
        let weight = builder.parameter("decoder.fc_out.weight".into(), vec![vocabulary, features], shape, initialisation);
        let bias = builder.parameter("decoder.fc_out.bias".into(), vec![vocabulary], vec![vocabulary.extent], initialisation);
        let logits = builder.matmul("decoder.fc_out", x, weight, 1, WeightLayout::OutIn);
        let logits = builder.bias_add("decoder.fc_out.bias", logits, bias);
        let labels = builder.input(InputKind::Labels, positions[1].clone());
        builder.cross_entropy("loss", logits, labels);
        builder.finish(sequences[1], Some(sequences[0] + sequences[1]))
    }
}

/// Adds a look-up of tokens in a table with PyTorch's initial values.
fn embedding(builder: &mut GraphBuilder, part: &str, tokens: TensorId, features: usize, vocabulary: usize) -> TensorId {
    let dimensions = vec![dimension("vocabulary", vocabulary), dimension("embedding", features)];
    let name = format!("{part}.embedding");
    let public = vec![vocabulary, features];
    let table = builder.parameter(format!("{name}.weight"), dimensions, public, Initialisation::Normal(1.0));
    builder.embedding(&name, tokens, table)
}
