//! Models as arguments of Megatron-LM, and back.

mod read;
mod vocabulary;

pub(super) use read::read;

use super::super::FrameworkError;
use super::{Arguments, FRAMEWORK};
use foretell_models::{CapacityFactor, Decoder, DropoutRate, Gpt, Mixtures, Model, NormKind, PositionKind};

/// The flags of a model.
pub(super) fn arguments(model: &Model) -> Result<Arguments, FrameworkError> {
    if let Model::Gpt(gpt) = model {
        return Ok(gpt_arguments(gpt));
    }
    let refuse = |reason: &str| FrameworkError::Model {
        framework: FRAMEWORK,
        reason: reason.into(),
        hint: "`pretrain_gpt.py` trains decoders: families `gpt`, `llama`, `moe`, and `decoder` of Llama's kind",
    };
    let decoder = model.as_decoder().ok_or_else(|| refuse(&format!("`{}` is no decoder", model.family())))?;
    if !has_megatrons_parts(&decoder) {
        return Err(refuse("it has parts beyond Llama's, biases of queries, keys and values, norms of them, and mixtures"));
    }
    Ok(decoder_arguments(&decoder))
}

/// Whether every part of a decoder has a flag.
fn has_megatrons_parts(decoder: &Decoder) -> bool {
    let Decoder { layers, hidden, heads, ffn, vocab, sequence, .. } = *decoder;
    let with_parts = Decoder {
        kv_heads: decoder.kv_heads,
        head_dimension: decoder.head_dimension,
        tied_embeddings: decoder.tied_embeddings,
        norm_epsilon: decoder.norm_epsilon,
        rope_theta: decoder.rope_theta,
        qkv_bias: decoder.qkv_bias,
        query_key_norm: decoder.query_key_norm,
        mixtures: decoder.mixtures.map(|mixtures| Mixtures {
            unnormalised_gates: false,
            shared_gate: false,
            router_bias: false,
            expert_bias: false,
            ..mixtures
        }),
        dropout: decoder.dropout,
        attention_dropout: decoder.attention_dropout,
        ..Decoder::llama([layers, hidden, heads, ffn, vocab, sequence])
    };
    with_parts == *decoder && decoder.positions == PositionKind::Rotary && decoder.norm == NormKind::Rms
}

/// The flags that all models have. Megatron's tokenizer without a vocabulary adds one word.
fn common([layers, hidden, heads, ffn, vocab, sequence]: [usize; 6], dropout: [DropoutRate; 2], tied: bool) -> Arguments {
    let mut arguments: Arguments = vec![
        ("num-layers", layers.to_string()),
        ("hidden-size", hidden.to_string()),
        ("num-attention-heads", heads.to_string()),
        ("ffn-hidden-size", ffn.to_string()),
        ("seq-length", sequence.to_string()),
        ("max-position-embeddings", sequence.to_string()),
        ("tokenizer-type", "NullTokenizer".into()),
        ("vocab-size", vocab.saturating_sub(1).to_string()),
        ("hidden-dropout", dropout[0].value().to_string()),
        ("attention-dropout", dropout[1].value().to_string()),
    ];
    if !tied {
        arguments.push(("untie-embeddings-and-output-weights", String::new()));
    }
    arguments
}

fn gpt_arguments(gpt: &Gpt) -> Arguments {
    let ffn = gpt.ffn.unwrap_or(4 * gpt.hidden);
    let sizes = [gpt.layers, gpt.hidden, gpt.heads, ffn, gpt.vocab, gpt.sequence];
    let mut arguments = common(sizes, [gpt.dropout, gpt.attention_dropout], gpt.tied_embeddings);
    arguments.push(("position-embedding-type", "learned_absolute".into()));
    arguments
}

fn decoder_arguments(decoder: &Decoder) -> Arguments {
    let Decoder { layers, hidden, heads, ffn, vocab, sequence, .. } = *decoder;
    let dropout = [decoder.dropout, decoder.attention_dropout];
    let mut arguments = common([layers, hidden, heads, ffn, vocab, sequence], dropout, decoder.tied_embeddings);
    arguments.extend([
        ("position-embedding-type", "rope".into()),
        ("rotary-base", decoder.rope_theta.to_string()),
        ("normalization", "RMSNorm".into()),
        ("norm-epsilon", f64::from(decoder.norm_epsilon).to_string()),
        ("swiglu", String::new()),
        ("disable-bias-linear", String::new()),
    ]);
    if let Some(kv_heads) = decoder.kv_heads {
        arguments.push(("group-query-attention", String::new()));
        arguments.push(("num-query-groups", kv_heads.to_string()));
    }
    if let Some(features) = decoder.head_dimension {
        arguments.push(("kv-channels", features.to_string()));
    }
    if decoder.qkv_bias {
        arguments.push(("add-qkv-bias", String::new()));
    }
    if decoder.query_key_norm {
        arguments.push(("qk-layernorm", String::new()));
    }
    if let Some(mixtures) = decoder.mixtures {
        arguments.extend([
            ("num-experts", mixtures.experts.to_string()),
            ("moe-router-topk", mixtures.top_k.to_string()),
            ("moe-ffn-hidden-size", mixtures.ffn.to_string()),
            ("moe-token-dispatcher-type", "alltoall".into()),
            ("moe-router-load-balancing-type", "none".into()),
            ("moe-grouped-gemm", String::new()),
            ("moe-layer-freq", layer_frequency(layers, &mixtures)),
        ]);
        if mixtures.capacity_factor != CapacityFactor::BALANCED {
            arguments.push(("moe-expert-capacity-factor", f64::from(mixtures.capacity_factor).to_string()));
            arguments.push(("moe-pad-expert-input-to-capacity", String::new()));
        }
        if let Some(shared) = mixtures.shared_ffn {
            arguments.push(("moe-shared-expert-intermediate-size", shared.to_string()));
        }
    }
    arguments
}

/// Megatron's pattern of mixtures: a Python list with 1 for a mixture.
fn layer_frequency(layers: usize, mixtures: &Mixtures) -> String {
    let first = mixtures.first.min(layers);
    let dense = vec!["0"; mixtures.every.saturating_sub(1)];
    let period = [&dense[..], &["1"]].concat();
    let rest: Vec<&str> = period.into_iter().cycle().take(layers - first).collect();
    let all: Vec<&str> = std::iter::repeat_n("0", first).chain(rest).collect();
    format!("[{}]", all.join(","))
}
