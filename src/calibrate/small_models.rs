//! What is timed where no model is named: layers such as models of each family have.

use crate::inputs::NamedModel;
use foretell_models::{CapacityFactor, DropoutRate, Model};

/// A small model of each family.
pub(super) fn small_models() -> Vec<NamedModel> {
    let gpt = Model::Gpt {
        layers: 1,
        hidden: 256,
        heads: 4,
        ffn: None,
        vocab: 1024,
        sequence: 128,
        tied_embeddings: true,
        dropout: DropoutRate::TENTH,
        attention_dropout: DropoutRate::NONE,
    };
    // What attention costs with dropout; all else is the same.
    let mut dropping_gpt = gpt.clone();
    if let Model::Gpt { attention_dropout, .. } = &mut dropping_gpt {
        *attention_dropout = DropoutRate::TENTH;
    }
    let resnet = Model::Resnet { depth: 18, stem: foretell_models::Stem::Small, image: 16, channels: 3, classes: 10, width: 32 };
    let mlp = Model::Mlp { widths: vec![784, 512, 512, 10] };
    let llama = Model::Llama {
        layers: 1,
        hidden: 256,
        heads: 4,
        kv_heads: Some(2),
        head_dimension: None,
        ffn: 768,
        vocab: 1024,
        sequence: 128,
        tied_embeddings: false,
        rope_theta: 10_000,
    };
    let bert = Model::Bert {
        layers: 1,
        hidden: 256,
        heads: 4,
        ffn: None,
        vocab: 1024,
        sequence: 128,
        dropout: DropoutRate::NONE,
        attention_dropout: DropoutRate::NONE,
    };
    let vit = Model::Vit {
        layers: 1,
        hidden: 256,
        heads: 4,
        ffn: None,
        patch: 4,
        image: 32,
        channels: 3,
        classes: 10,
        dropout: DropoutRate::NONE,
        attention_dropout: DropoutRate::NONE,
    };
    let vgg = Model::Vgg {
        depth: 11,
        batch_norm: false,
        stem: foretell_models::Stem::Small,
        image: 32,
        channels: 3,
        classes: 10,
        width: 32,
        hidden: 512,
        dropout: DropoutRate::NONE,
    };
    let moe = Model::Moe {
        layers: 1,
        hidden: 256,
        heads: 4,
        kv_heads: None,
        head_dimension: None,
        query_rank: None,
        key_value_rank: None,
        ffn: 256,
        dense_ffn: None,
        shared_ffn: None,
        dense_layers: 0,
        vocab: 1024,
        sequence: 128,
        experts: 4,
        top_k: 2,
        moe_every: 1,
        capacity_factor: CapacityFactor::default(),
        rope_theta: 10_000,
        tied_embeddings: false,
    };
    let t5 = Model::T5 {
        layers: 1,
        hidden: 256,
        heads: 4,
        head_dimension: None,
        ffn: 512,
        vocab: 1024,
        source_sequence: 64,
        target_sequence: 64,
        relative_buckets: 32,
        relative_max_distance: 128,
        gated: true,
        tied_embeddings: true,
        dropout: DropoutRate::NONE,
        attention_dropout: DropoutRate::NONE,
    };
    let lstm = Model::LstmSeq2seq {
        layers: 1,
        hidden: 128,
        embedding: None,
        source_vocab: 1024,
        target_vocab: 1024,
        source_sequence: 32,
        target_sequence: 32,
    };
    let sequences = [("small-moe", moe), ("small-t5", t5), ("small-lstm", lstm)];
    let others = [("small-llama", llama), ("small-bert", bert), ("small-vit", vit), ("small-vgg", vgg)];
    [("mlp", mlp), ("small-resnet", resnet), ("small-gpt", gpt), ("small-dropping-gpt", dropping_gpt)]
        .into_iter()
        .chain(others)
        .chain(sequences)
        .map(|(name, model)| NamedModel { name: name.into(), model })
        .collect()
}
