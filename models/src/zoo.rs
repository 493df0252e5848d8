//! The zoo: named models, and each family's layers in its authors' order and with their names.

mod bert;
mod gpt;
mod llama;
mod lstm;
mod mixtral;
mod mlp;
mod resnet;
mod t5;
mod vgg;
mod vit;

use crate::dropout::DropoutRate;
use crate::specification::{CapacityFactor, Model, Stem};

pub(crate) use bert::{BertShape, bert};
pub(crate) use gpt::{GptShape, gpt};
pub(crate) use llama::{LlamaShape, llama};
pub(crate) use lstm::{LstmShape, lstm_seq2seq};
pub(crate) use mixtral::Mixtures;
pub(crate) use mlp::mlp;
pub(crate) use resnet::{ResnetShape, resnet};
pub(crate) use t5::{T5Shape, t5};
pub(crate) use vgg::{VggShape, vgg};
pub(crate) use vit::{VitShape, vit};

/// Every name in the zoo.
pub(crate) const NAMES: &[&str] = &[
    "mlp",
    "resnet18",
    "resnet34",
    "resnet50",
    "resnet101",
    "resnet152",
    "vgg11",
    "vgg13",
    "vgg16",
    "vgg19",
    "vgg11_bn",
    "vgg13_bn",
    "vgg16_bn",
    "vgg19_bn",
    "vit_b_16",
    "vit_b_32",
    "vit_l_16",
    "gpt2",
    "gpt2-medium",
    "gpt2-large",
    "gpt2-xl",
    "llama2-7b",
    "llama2-13b",
    "llama2-70b",
    "llama3-8b",
    "llama3-70b",
    "llama3-405b",
    "mixtral-8x7b",
    "mixtral-8x22b",
    "t5-small",
    "t5-base",
    "flan-t5-small",
    "lstm-seq2seq",
    "bert-base-uncased",
    "bert-large-uncased",
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
        dropout: DropoutRate::NONE,
        attention_dropout: DropoutRate::NONE,
    };
    let vgg = |depth, batch_norm| Model::Vgg {
        depth,
        batch_norm,
        stem: Stem::Imagenet,
        image: 224,
        channels: 3,
        classes: 1000,
        width: 64,
        hidden: 4096,
        dropout: DropoutRate::NONE,
    };
    let vit = |patch, layers, hidden, heads| Model::Vit {
        layers,
        hidden,
        heads,
        ffn: None,
        patch,
        image: 224,
        channels: 3,
        classes: 1000,
        dropout: DropoutRate::NONE,
        attention_dropout: DropoutRate::NONE,
    };
    let llama2 = |layers, hidden, heads, kv_heads, ffn| Model::Llama {
        layers,
        hidden,
        heads,
        kv_heads: Some(kv_heads),
        head_dimension: None,
        ffn,
        vocab: 32000,
        sequence: 4096,
        tied_embeddings: false,
        rope_theta: 10_000,
    };
    let llama3 = |layers, hidden, heads, ffn| Model::Llama {
        layers,
        hidden,
        heads,
        kv_heads: Some(8),
        head_dimension: None,
        ffn,
        vocab: 128_256,
        sequence: 8192,
        tied_embeddings: false,
        rope_theta: 500_000,
    };
    let bert = |layers, hidden, heads| Model::Bert {
        layers,
        hidden,
        heads,
        ffn: None,
        vocab: 30522,
        sequence: 512,
        dropout: DropoutRate::NONE,
        attention_dropout: DropoutRate::NONE,
    };
    let mixtral = |layers, hidden, heads, ffn| Model::Moe {
        layers,
        hidden,
        heads,
        kv_heads: Some(8),
        head_dimension: None,
        query_rank: None,
        key_value_rank: None,
        ffn,
        dense_ffn: None,
        shared_ffn: None,
        dense_layers: 0,
        vocab: 32000,
        sequence: 4096,
        experts: 8,
        top_k: 2,
        moe_every: 1,
        capacity_factor: CapacityFactor::default(),
        rope_theta: 1_000_000,
        tied_embeddings: false,
    };
    let t5 = |layers, hidden, heads, ffn| Model::T5 {
        layers,
        hidden,
        heads,
        head_dimension: Some(64),
        ffn,
        vocab: 32128,
        source_sequence: 512,
        target_sequence: 128,
        relative_buckets: 32,
        relative_max_distance: 128,
        gated: false,
        tied_embeddings: true,
        dropout: DropoutRate::NONE,
        attention_dropout: DropoutRate::NONE,
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
        "vgg11" => vgg(11, false),
        "vgg13" => vgg(13, false),
        "vgg16" => vgg(16, false),
        "vgg19" => vgg(19, false),
        "vgg11_bn" => vgg(11, true),
        "vgg13_bn" => vgg(13, true),
        "vgg16_bn" => vgg(16, true),
        "vgg19_bn" => vgg(19, true),
        "vit_b_16" => vit(16, 12, 768, 12),
        "vit_b_32" => vit(32, 12, 768, 12),
        "vit_l_16" => vit(16, 24, 1024, 16),
        "llama2-7b" => llama2(32, 4096, 32, 32, 11_008),
        "llama2-13b" => llama2(40, 5120, 40, 40, 13_824),
        "llama2-70b" => llama2(80, 8192, 64, 8, 28_672),
        "llama3-8b" => llama3(32, 4096, 32, 14_336),
        "llama3-70b" => llama3(80, 8192, 64, 28_672),
        "llama3-405b" => llama3(126, 16_384, 128, 53_248),
        "bert-base-uncased" => bert(12, 768, 12),
        "bert-large-uncased" => bert(24, 1024, 16),
        "mixtral-8x7b" => mixtral(32, 4096, 32, 14336),
        "mixtral-8x22b" => mixtral(56, 6144, 48, 16384),
        "t5-small" => t5(6, 512, 8, 2048),
        "t5-base" => t5(12, 768, 12, 3072),
        "flan-t5-small" => Model::T5 {
            layers: 8,
            hidden: 512,
            heads: 6,
            head_dimension: Some(64),
            ffn: 1024,
            vocab: 32128,
            source_sequence: 512,
            target_sequence: 128,
            relative_buckets: 32,
            relative_max_distance: 128,
            gated: true,
            tied_embeddings: false,
            dropout: DropoutRate::NONE,
            attention_dropout: DropoutRate::NONE,
        },
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
