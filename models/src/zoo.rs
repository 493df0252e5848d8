//! The zoo: named models, and each family's layers in its authors' order and with their names.

mod bert;
mod gpt;
mod llama;
mod mlp;
mod resnet;
mod vgg;
mod vit;

use crate::specification::{Model, Stem};

pub(crate) use bert::{BertShape, bert};
pub(crate) use gpt::{GptShape, gpt};
pub(crate) use llama::{LlamaShape, llama};
pub(crate) use mlp::mlp;
pub(crate) use resnet::{ResnetShape, resnet};
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
    };
    let llama2 = |layers, hidden, heads, kv_heads, ffn| Model::Llama {
        layers,
        hidden,
        heads,
        kv_heads: Some(kv_heads),
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
        ffn,
        vocab: 128_256,
        sequence: 8192,
        tied_embeddings: false,
        rope_theta: 500_000,
    };
    let bert = |layers, hidden, heads| Model::Bert { layers, hidden, heads, ffn: None, vocab: 30522, sequence: 512 };
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
        _ => return None,
    })
}
