//! The zoo: named models, and each family's layers in its authors' order and with their names.

mod gpt;
mod lstm;
mod mlp;
mod resnet;

use crate::specification::{Model, Stem};

pub(crate) use gpt::{GptShape, gpt};
pub(crate) use lstm::{LstmShape, lstm_seq2seq};
pub(crate) use mlp::mlp;
pub(crate) use resnet::{ResnetShape, resnet};

/// Every name in the zoo.
pub(crate) const NAMES: &[&str] = &[
    "mlp",
    "resnet18",
    "resnet34",
    "resnet50",
    "resnet101",
    "resnet152",
    "gpt2",
    "gpt2-medium",
    "gpt2-large",
    "gpt2-xl",
    "lstm-seq2seq",
];

/// The model of a name.
pub(crate) fn named(name: &str) -> Option<Model> {
    let resnet = |depth| Model::Resnet { depth, stem: Stem::Imagenet, image: 224, channels: 3, classes: 1000, width: 64 };
    let gpt2 = |layers, hidden, heads| Model::Gpt {
        layers,
        hidden,
        heads,
        ffn: None,
        vocab: 50257,
        sequence: 1024,
        tied_embeddings: true,
    };
    Some(match name {
        "mlp" => Model::Mlp { widths: vec![784, 512, 512, 10] },
        "resnet18" => resnet(18),
        "resnet34" => resnet(34),
        "resnet50" => resnet(50),
        "resnet101" => resnet(101),
        "resnet152" => resnet(152),
        "gpt2" => gpt2(12, 768, 12),
        "gpt2-medium" => gpt2(24, 1024, 16),
        "gpt2-large" => gpt2(36, 1280, 20),
        "gpt2-xl" => gpt2(48, 1600, 25),
        "lstm-seq2seq" => Model::LstmSeq2seq {
            layers: 2,
            hidden: 512,
            embedding: Some(256),
            source_vocab: 7853,
            target_vocab: 5893,
            source_sequence: 32,
            target_sequence: 32,
        },
        _ => return None,
    })
}
