//! Flavors of torchtitan's model registries that our zoo lacks, as models.

use foretell_models::{Decoder, Model, NormEpsilon};

/// Finds a flavor (`1.7B` of `qwen3`).
pub(super) fn find(module: &str, flavor: &str) -> Option<Model> {
    let model = match (module, flavor) {
        ("llama3", "1B") => llama3([16, 2048, 32, 8192], true),
        ("llama3", "3B") => llama3([28, 3072, 24, 8192], true),
        ("qwen3", "1.7B") => qwen3([28, 2048, 16, 6144], true),
        ("qwen3", "4B") => qwen3([36, 2560, 32, 9728], true),
        ("qwen3", "8B") => qwen3([36, 4096, 32, 12_288], false),
        ("qwen3", "14B") => qwen3([40, 5120, 40, 17_408], false),
        _ => return None,
    };
    Some(Model::of_decoder(model))
}

/// Llama 3.2 (the `config.json` of Llama-3.2-1B and 3B).
fn llama3([layers, hidden, heads, ffn]: [usize; 4], tied_embeddings: bool) -> Decoder {
    Decoder {
        kv_heads: Some(8),
        tied_embeddings,
        rope_theta: 500_000,
        rope_scaling: true,
        ..Decoder::llama([layers, hidden, heads, ffn, 128_256, 8192])
    }
}

/// Qwen3 (the `config.json` of Qwen3-1.7B, 4B, 8B and 14B).
fn qwen3([layers, hidden, heads, ffn]: [usize; 4], tied_embeddings: bool) -> Decoder {
    Decoder {
        kv_heads: Some(8),
        head_dimension: Some(128).filter(|features| features * heads != hidden),
        tied_embeddings,
        norm_epsilon: NormEpsilon::SIXTH,
        rope_theta: 1_000_000,
        query_key_norm: true,
        ..Decoder::llama([layers, hidden, heads, ffn, 151_936, 4096])
    }
}
