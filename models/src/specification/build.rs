//! From the sizes that a user wrote to the graph that the zoo builds of them.

use super::{GraphOptions, Model, ModelError};
use crate::builder::MixtureShape;
use crate::graph::{Graph, Tensor};
use crate::zoo;

/// The most elements of a tensor over all ranks. What is counted in elements, bytes or reads of a few tensors stays far below what a
/// 64-bit number holds.
const MOST_ELEMENTS: usize = 1 << 48;

/// The most samples of a batch. With images of 8192 x 8192 pixels their product still is a 64-bit number.
const MOST_SAMPLES: usize = 1 << 32;

impl Model {
    /// The forward graph over a batch.
    ///
    /// # Errors
    /// [`ModelError::Inconsistent`] when sizes contradict each other, or a tensor would be larger than can be counted with.
    pub fn graph(&self, name: &str, options: &GraphOptions) -> Result<Graph, ModelError> {
        self.validate(name)?;
        let GraphOptions { batch, normalization_groups: groups, .. } = *options;
        let wrong = |reason, hint: &str| Err(ModelError::Inconsistent { name: name.into(), reason, hint: hint.into() });
        if batch == 0 || batch > MOST_SAMPLES || groups == 0 || !batch.is_multiple_of(groups) {
            return wrong(
                format!("a batch of {batch} samples in {groups} groups"),
                "a batch has 1 to 4,294,967,296 samples, in groups of equal size",
            );
        }
        let graph = self.build(name, options);
        let too_large = |tensor: &&Tensor| tensor.checked_elements().is_none_or(|elements| elements > MOST_ELEMENTS);
        match graph.tensors.iter().find(too_large) {
            None => Ok(graph),
            Some(tensor) => {
                let shape: Vec<String> = tensor.dimensions.iter().map(|one| format!("{} {}", one.name, one.extent)).collect();
                wrong(
                    format!("`{}` ({}) has more than 2^48 elements", tensor.name, shape.join(", ")),
                    "use a smaller micro-batch, or smaller sizes in the model",
                )
            }
        }
    }

    /// The graph of sizes that were found to be sound.
    fn build(&self, name: &str, options: &GraphOptions) -> Graph {
        match self {
            Model::Mlp { widths } => zoo::mlp(name, widths, options),
            Model::Resnet { depth, stem, image, channels, classes, width } => {
                let shape = zoo::ResnetShape {
                    depth: *depth,
                    stem: *stem,
                    image: *image,
                    channels: *channels,
                    classes: *classes,
                    width: *width,
                };
                zoo::resnet(name, &shape, options)
            }
            Model::Gpt { layers, hidden, heads, ffn, vocab, sequence, tied_embeddings, dropout, attention_dropout } => {
                let shape = zoo::GptShape {
                    layers: *layers,
                    hidden: *hidden,
                    heads: *heads,
                    ffn: ffn.unwrap_or(4 * hidden),
                    vocabulary: *vocab,
                    sequence: *sequence,
                    tied_embeddings: *tied_embeddings,
                    dropout: *dropout,
                    attention_dropout: *attention_dropout,
                };
                zoo::gpt(name, &shape, options)
            }
            &Model::Moe {
                layers,
                hidden,
                heads,
                kv_heads,
                head_dimension,
                query_rank,
                key_value_rank,
                ffn,
                dense_ffn,
                shared_ffn,
                dense_layers,
                vocab,
                sequence,
                experts,
                top_k,
                moe_every,
                capacity_factor,
                rope_theta,
                tied_embeddings,
            } => {
                let balanced = sequence as f64 * top_k as f64 / experts as f64;
                // No expert gets a token twice.
                let slots = (f64::from(capacity_factor) * balanced).ceil() as usize;
                // Many are made a few more, so that they can be cut where the sequence is.
                let slots = if slots >= 256 { slots.next_multiple_of(16) } else { slots };
                let slots_per_sample = slots.clamp(1, sequence);
                let shape = zoo::LlamaShape {
                    layers,
                    hidden,
                    heads,
                    kv_heads: kv_heads.unwrap_or(heads),
                    head_dimension: head_dimension.unwrap_or(hidden / heads),
                    query_rank,
                    key_value_rank,
                    ffn: dense_ffn.unwrap_or(ffn),
                    vocabulary: vocab,
                    sequence,
                    tied_embeddings,
                    rope_theta,
                    mixtures: Some(zoo::Mixtures {
                        shape: MixtureShape { experts, top: top_k, slots_per_sample },
                        ffn,
                        shared_ffn,
                        every: moe_every,
                        first: dense_layers,
                    }),
                };
                zoo::llama(name, &shape, options)
            }
            &Model::T5 {
                layers,
                hidden,
                heads,
                head_dimension,
                ffn,
                vocab,
                source_sequence,
                target_sequence,
                relative_buckets,
                relative_max_distance,
                gated,
                tied_embeddings,
                dropout,
                attention_dropout,
            } => {
                let shape = zoo::T5Shape {
                    layers,
                    hidden,
                    heads,
                    head_dimension: head_dimension.unwrap_or(hidden / heads),
                    ffn,
                    vocabulary: vocab,
                    sequences: [source_sequence, target_sequence],
                    buckets: relative_buckets,
                    max_distance: relative_max_distance,
                    gated,
                    tied_embeddings,
                    dropout,
                    attention_dropout,
                };
                zoo::t5(name, &shape, options)
            }
            Model::LstmSeq2seq { layers, hidden, embedding, source_vocab, target_vocab, source_sequence, target_sequence } => {
                let shape = zoo::LstmShape {
                    layers: *layers,
                    hidden: *hidden,
                    embedding: embedding.unwrap_or(*hidden),
                    vocabularies: [*source_vocab, *target_vocab],
                    sequences: [*source_sequence, *target_sequence],
                };
                zoo::lstm_seq2seq(name, &shape, options)
            }
            Model::Llama {
                layers,
                hidden,
                heads,
                kv_heads,
                head_dimension,
                ffn,
                vocab,
                sequence,
                tied_embeddings,
                rope_theta,
            } => {
                let shape = zoo::LlamaShape {
                    layers: *layers,
                    hidden: *hidden,
                    heads: *heads,
                    kv_heads: kv_heads.unwrap_or(*heads),
                    head_dimension: head_dimension.unwrap_or(*hidden / *heads),
                    query_rank: None,
                    key_value_rank: None,
                    ffn: *ffn,
                    vocabulary: *vocab,
                    sequence: *sequence,
                    tied_embeddings: *tied_embeddings,
                    rope_theta: *rope_theta,
                    mixtures: None,
                };
                zoo::llama(name, &shape, options)
            }
            Model::Bert { layers, hidden, heads, ffn, vocab, sequence, dropout, attention_dropout } => {
                let shape = zoo::BertShape {
                    layers: *layers,
                    hidden: *hidden,
                    heads: *heads,
                    ffn: ffn.unwrap_or(4 * hidden),
                    vocabulary: *vocab,
                    sequence: *sequence,
                    dropout: *dropout,
                    attention_dropout: *attention_dropout,
                };
                zoo::bert(name, &shape, options)
            }
            Model::Vit { layers, hidden, heads, ffn, patch, image, channels, classes, dropout, attention_dropout } => {
                let shape = zoo::VitShape {
                    layers: *layers,
                    hidden: *hidden,
                    heads: *heads,
                    ffn: ffn.unwrap_or(4 * hidden),
                    patch: *patch,
                    image: *image,
                    channels: *channels,
                    classes: *classes,
                    dropout: *dropout,
                    attention_dropout: *attention_dropout,
                };
                zoo::vit(name, &shape, options)
            }
            Model::Vgg { depth, batch_norm, stem, image, channels, classes, width, hidden, dropout } => {
                let shape = zoo::VggShape {
                    depth: *depth,
                    batch_norm: *batch_norm,
                    stem: *stem,
                    image: *image,
                    channels: *channels,
                    classes: *classes,
                    width: *width,
                    hidden: *hidden,
                    dropout: *dropout,
                };
                zoo::vgg(name, &shape, options)
            }
        }
    }
}
