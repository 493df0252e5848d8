//! An encoder-decoder of LSTMs without attention (Sutskever, Vinyals and Le 2014), named as in the first tutorial of
//! github.com/bentrevett/pytorch-seq2seq: `encoder` and `decoder`, each with an `embedding` and an `rnn`, and `decoder.fc_out`.

use crate::builder::{GraphBuilder, dimension};
use crate::graph::{BATCH, Graph, Initialisation, InputKind, TensorId};
use crate::kernel::WeightLayout;
use crate::specification::GraphOptions;

/// An encoder-decoder's sizes; of pairs the encoder's comes first.
pub(crate) struct LstmShape {
    pub(crate) layers: usize,
    pub(crate) hidden: usize,
    pub(crate) embedding: usize,
    pub(crate) vocabularies: [usize; 2],
    pub(crate) sequences: [usize; 2],
}

pub(crate) fn lstm_seq2seq(name: &str, shape: &LstmShape, options: &GraphOptions) -> Graph {
    let mut builder = GraphBuilder::new(name, options);
    let LstmShape { layers, hidden, vocabularies, sequences, .. } = *shape;
    let positions = sequences.map(|sequence| vec![dimension(BATCH, options.batch), dimension("sequence", sequence)]);
    builder.block("encoder embedding", false);
    let source = builder.input(InputKind::SourceTokens, positions[0].clone());
    let mut x = embedding(&mut builder, "encoder", source, shape, vocabularies[0]);
    let mut states = Vec::with_capacity(layers);
    for layer in 0..layers {
        builder.block(format!("encoder layer {layer}"), true);
        let (y, last) = builder.lstm("encoder.rnn", layer, x, hidden, None);
        x = y;
        states.push(last);
    }
    builder.block("decoder embedding", false);
    let tokens = builder.input(InputKind::Tokens, positions[1].clone());
    let mut x = embedding(&mut builder, "decoder", tokens, shape, vocabularies[1]);
    for (layer, state) in states.into_iter().enumerate() {
        builder.block(format!("decoder layer {layer}"), true);
        (x, _) = builder.lstm("decoder.rnn", layer, x, hidden, Some(state));
    }
    builder.block("head", false);
    // PyTorch's default: uniform within 1/sqrt(inputs), for weight and bias alike.
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

/// Tokens looked up in a table that starts as PyTorch starts it.
fn embedding(builder: &mut GraphBuilder, part: &str, tokens: TensorId, shape: &LstmShape, vocabulary: usize) -> TensorId {
    let dimensions = vec![dimension("vocabulary", vocabulary), dimension("embedding", shape.embedding)];
    let name = format!("{part}.embedding");
    let public = vec![vocabulary, shape.embedding];
    let table = builder.parameter(format!("{name}.weight"), dimensions, public, Initialisation::Normal(1.0));
    builder.embedding(&name, tokens, table)
}
