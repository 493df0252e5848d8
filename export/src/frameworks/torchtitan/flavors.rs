//! Flavors of torchtitan's model registries that our zoo lacks, as models.

use foretell_models::{Decoder, Mixtures, Model, NormEpsilon};

/// Finds a flavor (`1.7B` of `qwen3`).
pub(super) fn find(module: &str, flavor: &str) -> Option<Model> {
    let model = match (module, flavor) {
        ("llama3", "1B") => llama3([16, 2048, 32, 8192], true),
        ("llama3", "3B") => llama3([28, 3072, 24, 8192], true),
        ("qwen3", "1.7B") => qwen3([28, 2048, 16, 6144], true),
        ("qwen3", "4B") => qwen3([36, 2560, 32, 9728], true),
        ("qwen3", "8B") => qwen3([36, 4096, 32, 12_288], false),
        ("qwen3", "14B") => qwen3([40, 5120, 40, 17_408], false),
        ("qwen3", "30B-A3B") => qwen3_moe([48, 2048, 32, 6144], 768),
        ("qwen3", "235B-A22B") => qwen3_moe([94, 4096, 64, 12_288], 1536),
        ("deepseek_v3", "16B") => deepseek([27, 2048, 16, 10_944, 102_400], None, [64, 6, 1408], 2, 1),
        ("deepseek_v3", "236B") => deepseek([60, 5120, 128, 12_288, 102_400], Some(1536), [160, 6, 1536], 2, 1),
        ("deepseek_v3", "671B") => deepseek([61, 7168, 128, 18_432, 129_280], Some(1536), [256, 8, 2048], 1, 3),
        _ => return None,
    };
    Some(Model::of_decoder(model))
}

/// Qwen3's mixtures (the `config.json` of Qwen3-30B-A3B and 235B-A22B).
fn qwen3_moe(sizes: [usize; 4], expert_ffn: usize) -> Decoder {
    let mixtures = mixtures([128, 8, expert_ffn], None, 0);
    Decoder { kv_heads: Some(4), mixtures: Some(mixtures), ..qwen3(sizes, false) }
}

/// DeepSeek's models (the `config.json` of DeepSeek-V2-Lite, V2 and V3).
fn deepseek(
    [layers, hidden, heads, ffn, vocab]: [usize; 5],
    query_rank: Option<usize>,
    [experts, top_k, expert_ffn]: [usize; 3],
    shared: usize,
    first: usize,
) -> Decoder {
    Decoder {
        head_dimension: Some(128),
        query_rank,
        key_value_rank: Some(512),
        rotary_part: Some(64),
        norm_epsilon: NormEpsilon::SIXTH,
        mixtures: Some(mixtures([experts, top_k, expert_ffn], Some(expert_ffn * shared), first)),
        ..Decoder::llama([layers, hidden, heads, ffn, vocab, 4096])
    }
}

fn mixtures([experts, top_k, ffn]: [usize; 3], shared_ffn: Option<usize>, first: usize) -> Mixtures {
    Mixtures {
        experts,
        top_k,
        ffn,
        shared_ffn,
        shared_gate: false,
        every: 1,
        first,
        capacity_factor: Default::default(),
        router_bias: false,
        expert_bias: false,
        unnormalised_gates: false,
    }
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
