//! Models as arguments of Megatron-LM, and back.

use super::super::FrameworkError;
use super::super::arguments::Flags;
use super::{Arguments, FRAMEWORK};
use foretell_models::{
    CapacityFactor, Decoder, DropoutRate, FeedForward, Gpt, Mixtures, Model, NormEpsilon, NormKind, PositionKind,
};

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
        mixtures: decoder.mixtures.map(|mixtures| Mixtures { unnormalised_gates: false, shared_gate: false, ..mixtures }),
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
            ("moe-expert-capacity-factor", f64::from(mixtures.capacity_factor).to_string()),
            ("moe-pad-expert-input-to-capacity", String::new()),
            ("moe-token-dispatcher-type", "alltoall".into()),
            ("moe-router-load-balancing-type", "none".into()),
            ("moe-grouped-gemm", String::new()),
            ("moe-layer-freq", layer_frequency(layers, &mixtures)),
        ]);
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

/// Reads the pattern of mixtures: the first layers that are dense, and the period after them.
fn read_frequency(text: &str) -> Result<[usize; 2], FrameworkError> {
    let wrong = |reason: &str| FrameworkError::Form {
        reason: format!("`--moe-layer-freq {text}`: {reason}"),
        hint: "give a number, or a list such as `[0,1,1]`".into(),
    };
    if let Ok(every) = text.parse::<usize>() {
        // A single number N has the first layer of each period as a mixture, and ours the last.
        return if every == 1 { Ok([0, 1]) } else { Err(wrong("mixtures begin each period")) };
    }
    let inner =
        text.trim().strip_prefix('[').and_then(|text| text.strip_suffix(']')).ok_or_else(|| wrong("it is no list of 0 and 1"))?;
    let marks: Vec<&str> = inner.split(',').map(str::trim).collect();
    let is_mixture = |index: usize| marks.get(index) == Some(&"1");
    let places: Vec<usize> = (0..marks.len()).filter(|&index| is_mixture(index)).collect();
    let first_mixture = *places.first().ok_or_else(|| wrong("no layer is a mixture"))?;
    let every = places.get(1).map_or(1, |second| second - first_mixture);
    let first = (first_mixture + 1).checked_sub(every).ok_or_else(|| wrong("mixtures have no period"))?;
    let expected = |index: usize| index >= first && (index - first + 1).is_multiple_of(every);
    if (0..marks.len()).any(|index| is_mixture(index) != expected(index)) {
        return Err(wrong("mixtures have no period"));
    }
    Ok([first, every])
}

/// Reads the model. `None` if the arguments state none.
pub(super) fn read(flags: &mut Flags) -> Result<Option<Model>, FrameworkError> {
    let sizes = ["num-layers", "hidden-size", "num-attention-heads"].map(|name| flags.number::<usize>(name));
    let [Some(layers), Some(hidden), Some(heads)] = [sizes[0].clone()?, sizes[1].clone()?, sizes[2].clone()?] else {
        return Ok(None);
    };
    let is_gated = flags.switch("swiglu");
    let ffn = flags.number("ffn-hidden-size")?;
    // A width beyond any model is refused later, with its name.
    let four_widths = hidden.saturating_mul(4);
    let sequence = flags.number("seq-length")?.unwrap_or(1024usize);
    flags.neutral(&["max-position-embeddings", "make-vocab-size-divisible-by"]);
    let is_null = flags.text("tokenizer-type").is_some_and(|kind| kind == "NullTokenizer");
    let vocab = flags.number::<usize>("vocab-size")?.map_or(50_257, |words| words.saturating_add(usize::from(is_null)));
    let tied_embeddings = !flags.switch("untie-embeddings-and-output-weights");
    // Megatron's own default.
    let rate = |share: Option<f64>| {
        DropoutRate::try_from(share.unwrap_or(0.1)).map_err(|hint| FrameworkError::Form { reason: "dropout".into(), hint })
    };
    let dropout = rate(flags.number("hidden-dropout")?)?;
    let attention_dropout = rate(flags.number("attention-dropout")?)?;
    let positions = flags.text("position-embedding-type").unwrap_or_else(|| "learned_absolute".into());
    let is_rms = flags.text("normalization").is_some_and(|norm| norm == "RMSNorm");
    if positions == "learned_absolute" && !is_rms && !is_gated {
        let ffn = ffn.filter(|&ffn: &usize| ffn != four_widths);
        return Ok(Some(Model::Gpt(Gpt {
            layers,
            hidden,
            heads,
            ffn,
            vocab,
            sequence,
            tied_embeddings,
            dropout,
            attention_dropout,
        })));
    }
    // A gated network of Megatron has two thirds of the usual width by default.
    let ffn = ffn.unwrap_or(if is_gated { four_widths.saturating_mul(2) / 3 } else { four_widths });
    let epsilon = flags.number("norm-epsilon")?.unwrap_or(1e-5f64);
    let has_groups = flags.switch("group-query-attention");
    let groups = flags.number("num-query-groups")?.filter(|&groups: &usize| has_groups && groups != heads);
    let has_biases = !flags.switch("disable-bias-linear");
    let mut decoder = Decoder {
        kv_heads: groups,
        head_dimension: flags.number("kv-channels")?.filter(|features: &usize| features.saturating_mul(heads) != hidden),
        tied_embeddings,
        norm: if is_rms { NormKind::Rms } else { NormKind::Layer },
        norm_epsilon: NormEpsilon::try_from(epsilon)
            .map_err(|hint| FrameworkError::Form { reason: "`--norm-epsilon`".into(), hint })?,
        positions: if positions == "rope" { PositionKind::Rotary } else { PositionKind::Learned },
        rope_theta: flags.number("rotary-base")?.unwrap_or(10_000usize),
        feed_forward: if is_gated { FeedForward::GatedSilu } else { FeedForward::GeluTanh },
        qkv_bias: flags.switch("add-qkv-bias") || has_biases,
        attention_output_bias: has_biases,
        ffn_bias: has_biases,
        query_key_norm: flags.switch("qk-layernorm"),
        dropout,
        attention_dropout,
        ..Decoder::llama([layers, hidden, heads, ffn, vocab, sequence])
    };
    if let Some(experts) = flags.number::<usize>("num-experts")? {
        decoder.mixtures = Some(read_mixtures(flags, experts, ffn)?);
    }
    Ok(Some(Model::of_decoder(decoder)))
}

fn read_mixtures(flags: &mut Flags, experts: usize, ffn: usize) -> Result<Mixtures, FrameworkError> {
    flags.neutral(&["moe-grouped-gemm", "moe-token-dispatcher-type", "moe-router-load-balancing-type", "moe-aux-loss-coeff"]);
    flags.neutral(&["moe-pad-expert-input-to-capacity"]);
    let [first, every] = flags.text("moe-layer-freq").map_or(Ok([0, 1]), |text| read_frequency(&text))?;
    let capacity = flags.number::<f64>("moe-expert-capacity-factor")?;
    let capacity_factor = capacity.map_or(Ok(CapacityFactor::default()), CapacityFactor::try_from);
    Ok(Mixtures {
        experts,
        top_k: flags.number("moe-router-topk")?.unwrap_or(2),
        ffn: flags.number("moe-ffn-hidden-size")?.unwrap_or(ffn),
        shared_ffn: flags.number("moe-shared-expert-intermediate-size")?,
        every,
        first,
        capacity_factor: capacity_factor
            .map_err(|hint| FrameworkError::Form { reason: "`--moe-expert-capacity-factor`".into(), hint })?,
        unnormalised_gates: false,
        shared_gate: false,
    })
}
