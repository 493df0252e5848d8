//! Models from Megatron-LM's arguments.

use super::super::super::stated::Stated;
use super::super::super::{FrameworkError, Surroundings};
use super::vocabulary::read_vocabulary;
use foretell_models::{
    CapacityFactor, Decoder, DropoutRate, FeedForward, Gpt, Mixtures, Model, NormEpsilon, NormKind, PositionKind,
};
use foretell_units::diagnostic::Mistake;
use serde_json::Value;

/// Reads the model, and whether the arguments state its sequence length. `None` if they state no
/// model.
///
/// # Errors
/// If the arguments state only part of a model.
pub(in super::super) fn read(
    stated: &mut Stated,
    surroundings: &Surroundings<'_>,
) -> Result<(Option<Model>, bool), FrameworkError> {
    const SIZES: [&str; 3] = ["num-layers", "hidden-size", "num-attention-heads"];
    if !SIZES.iter().any(|name| stated.has(name)) {
        return Ok((None, false));
    }
    let mut sizes = [0; 3];
    for (size, name) in sizes.iter_mut().zip(SIZES) {
        *size = stated.size(name)?.ok_or_else(|| FrameworkError::Form {
            reason: format!("the arguments state a part of the model, and no `--{name}`"),
            hint: "give all of the model's arguments, or none of them and `--model`".into(),
        })?;
    }
    let [layers, hidden, heads] = sizes;
    let sequence = stated.size("seq-length")?.or(surroundings.sequence);
    let vocab = read_vocabulary(stated, surroundings)?;
    let decoder = read_decoder(stated, [layers, hidden, heads, vocab], sequence.unwrap_or(1024))?;
    Ok((Some(as_gpt(&decoder).map_or_else(|| Model::of_decoder(decoder), Model::Gpt)), sequence.is_some()))
}

fn read_decoder(
    stated: &mut Stated,
    [layers, hidden, heads, vocab]: [usize; 4],
    sequence: usize,
) -> Result<Decoder, FrameworkError> {
    let is_gated = stated.is_on("swiglu")?;
    // Widths beyond any model are refused later, by name. By default, Megatron's gated network has
    // two thirds of the usual width, rounded down to a multiple of 64.
    let four_widths = hidden.saturating_mul(4);
    let usual = if is_gated { four_widths.saturating_mul(2) / 3 / 64 * 64 } else { four_widths };
    let ffn = stated.size("ffn-hidden-size")?.unwrap_or(usual);
    let longest = stated.size("max-position-embeddings")?;
    if let Some(longest) = longest.filter(|&longest| longest < sequence) {
        return Err(FrameworkError::Form {
            reason: format!("`--seq-length {sequence}` exceeds `--max-position-embeddings {longest}`"),
            hint: "raise the latter, as Megatron demands".into(),
        });
    }
    // Megatron's default.
    let rate = |share: Option<f32>| {
        let exact = share.map_or(0.1, |share| share.to_string().parse::<f64>().expect("invariant: a number's text is a number"));
        DropoutRate::try_from(exact).map_err(|Mistake { hint, .. }| FrameworkError::Form { reason: "dropout".into(), hint })
    };
    let is_rms = match stated.text("normalization")?.map(|norm| norm.to_ascii_lowercase()).as_deref() {
        None | Some("layernorm") => false,
        Some("rmsnorm") => true,
        Some(_) => return Err(stated.unknown("normalization", "norms: LayerNorm, RMSNorm")),
    };
    stated.rename("layernorm-epsilon", "norm-epsilon")?;
    let has_biases = !stated.is_on("disable-bias-linear")?;
    let mut decoder = Decoder {
        kv_heads: read_groups(stated, heads)?,
        head_dimension: stated.size("kv-channels")?.filter(|features| features.saturating_mul(heads) != hidden),
        tied_embeddings: !stated.is_on("untie-embeddings-and-output-weights")?,
        norm: if is_rms { NormKind::Rms } else { NormKind::Layer },
        norm_epsilon: read_epsilon(stated)?,
        rope_theta: stated.size("rotary-base")?.unwrap_or(10_000),
        feed_forward: if is_gated { FeedForward::GatedSilu } else { FeedForward::GeluTanh },
        qkv_bias: stated.is_on("add-qkv-bias")? || has_biases,
        attention_output_bias: has_biases,
        ffn_bias: has_biases,
        query_key_norm: stated.is_on("qk-layernorm")?,
        dropout: rate(stated.number("hidden-dropout")?)?,
        attention_dropout: rate(stated.number("attention-dropout")?)?,
        prediction_modules: stated.count("mtp-num-layers")?.unwrap_or(0),
        ..Decoder::llama([layers, hidden, heads, ffn, vocab, sequence])
    };
    read_positions(stated, &mut decoder, longest)?;
    if stated.is_on("multi-latent-attention")? {
        read_latent_attention(stated, &mut decoder)?;
    }
    if let Some(experts) = stated.size("num-experts")? {
        decoder.mixtures = Some(read_mixtures(stated, experts, ffn, layers)?);
    }
    if let Some(window) = stated.list("window-size")?.first() {
        let hint = "leave it out of the file to plan the job with all positions seen".into();
        return Err(FrameworkError::Form { reason: format!("`--window-size {window}` is not read"), hint });
    }
    Ok(decoder)
}

/// A decoder as GPT-2's family, if it has the same parts.
fn as_gpt(decoder: &Decoder) -> Option<Gpt> {
    let Decoder { layers, hidden, heads, ffn, vocab, sequence, tied_embeddings, dropout, attention_dropout, .. } = *decoder;
    let plain = Decoder {
        tied_embeddings,
        norm: NormKind::Layer,
        positions: PositionKind::Learned,
        feed_forward: FeedForward::GeluTanh,
        qkv_bias: true,
        attention_output_bias: true,
        ffn_bias: true,
        rope_theta: decoder.rope_theta,
        dropout,
        attention_dropout,
        ..Decoder::llama([layers, hidden, heads, ffn, vocab, sequence])
    };
    let ffn = Some(ffn).filter(|&ffn| ffn != hidden.saturating_mul(4));
    (plain == *decoder).then_some(Gpt {
        layers,
        hidden,
        heads,
        ffn,
        vocab,
        sequence,
        tied_embeddings,
        dropout,
        attention_dropout,
    })
}

fn read_epsilon(stated: &mut Stated) -> Result<NormEpsilon, FrameworkError> {
    let number = stated.number("norm-epsilon")?.unwrap_or(1e-5);
    // The nearest number of double precision: a text such as 1e-6 means that.
    let exact = number.to_string().parse::<f64>().unwrap_or(f64::from(number));
    NormEpsilon::try_from(exact).map_err(|Mistake { hint, .. }| FrameworkError::Form { reason: "`--norm-epsilon`".into(), hint })
}

/// Heads of keys and values.
fn read_groups(stated: &mut Stated, heads: usize) -> Result<Option<usize>, FrameworkError> {
    // Megatron-DeepSpeed's name, which needs no second switch.
    if stated.has("num-key-value-heads") {
        stated.rename("num-key-value-heads", "num-query-groups")?;
        stated.provide("group-query-attention", Value::Bool(true));
    }
    let has_groups = stated.is_on("group-query-attention")?;
    let groups = stated.size("num-query-groups")?;
    match (has_groups, groups) {
        (true, None) => Ok(Some(1).filter(|_| heads != 1)),
        (true, groups) => Ok(groups.filter(|&groups| groups != heads)),
        (false, None) => Ok(None),
        (false, Some(_)) => {
            stated.assume("`--num-query-groups` has no effect without `--group-query-attention`, as in Megatron");
            Ok(None)
        }
    }
}

fn read_positions(stated: &mut Stated, decoder: &mut Decoder, longest: Option<usize>) -> Result<(), FrameworkError> {
    // Megatron's names before `position-embedding-type` existed.
    let is_rotary = stated.is_on("use-rotary-position-embeddings")?;
    let has_none = stated.is_on("no-position-embedding")?;
    let kind = stated.text("position-embedding-type")?;
    decoder.positions = match kind.as_deref() {
        _ if is_rotary => PositionKind::Rotary,
        None | Some("learned_absolute") if has_none => PositionKind::None,
        None | Some("learned_absolute") => PositionKind::Learned,
        Some("rope") => PositionKind::Rotary,
        Some("yarn") => {
            decoder.rope_scaling = true;
            PositionKind::Rotary
        }
        Some("none") => PositionKind::None,
        Some(_) => return Err(stated.unknown("position-embedding-type", "positions: learned_absolute, rope, yarn, none")),
    };
    if decoder.positions == PositionKind::Learned {
        decoder.position_rows = longest.filter(|&longest| longest != decoder.sequence);
    }
    decoder.rope_scaling |= stated.is_on("use-rope-scaling")?;
    // The scaling of frequencies costs no time.
    stated.neutral(&[
        "rope-scaling-factor",
        "rotary-scaling-factor",
        "rotary-seq-len-interpolation-factor",
        "rotary-interleaved",
    ]);
    stated.neutral(&["mscale", "mscale-all-dim", "beta-fast", "beta-slow", "original-max-position-embeddings", "rope-type"]);
    let share = stated.number("rotary-percent")?.unwrap_or(1.0);
    if share < 1.0 && decoder.positions == PositionKind::Rotary {
        let features = decoder.head_dimension.unwrap_or(decoder.hidden / decoder.heads);
        decoder.rotary_dimension = Some((features as f32 * share) as usize);
    }
    Ok(())
}

/// Reads DeepSeek's latent attention.
fn read_latent_attention(stated: &mut Stated, decoder: &mut Decoder) -> Result<(), FrameworkError> {
    let features = stated.size("qk-head-dim")?.unwrap_or(128);
    let values = stated.size("v-head-dim")?.unwrap_or(128);
    decoder.query_rank = stated.size("q-lora-rank")?;
    decoder.key_value_rank = Some(stated.size("kv-lora-rank")?.ok_or_else(|| FrameworkError::Form {
        reason: "`--multi-latent-attention` without `--kv-lora-rank`".into(),
        hint: "add the rank of keys and values, which is 512 in DeepSeek's models".into(),
    })?);
    decoder.rotary_part = Some(stated.size("qk-pos-emb-head-dim")?.unwrap_or(64));
    decoder.head_dimension = Some(features);
    decoder.value_dimension = Some(values).filter(|&values| values != features);
    decoder.kv_heads = None;
    // The low-rank norms exist in any case, and rotary positions apply to the separate part.
    decoder.query_key_norm = false;
    decoder.positions = PositionKind::Rotary;
    decoder.position_rows = None;
    Ok(())
}

fn read_mixtures(stated: &mut Stated, experts: usize, ffn: usize, layers: usize) -> Result<Mixtures, FrameworkError> {
    // The scoring and balancing of a router costs little next to the experts.
    stated.neutral(&["moe-router-score-function", "moe-router-num-groups", "moe-router-group-topk", "moe-token-drop-policy"]);
    stated.neutral(&["moe-shared-expert-overlap", "moe-enable-deepep", "moe-deepep-num-sms", "moe-router-padding-for-*"]);
    stated.neutral(&["moe-router-force-load-balancing", "moe-router-load-balancing-type", "moe-input-jitter-eps"]);
    let [first, every] = match stated.list("moe-layer-freq")?.as_slice() {
        [] => [0, 1],
        words => {
            let words: Vec<&str> = words.iter().filter_map(serde_json::Value::as_str).collect();
            let text = words.concat();
            if text.contains('$') {
                return Err(stated.wrong("moe-layer-freq", "a list of 0 and 1"));
            }
            read_frequency(&text, layers)?
        }
    };
    let exact = |factor: f32| factor.to_string().parse::<f64>().expect("invariant: a number's text is a number");
    let capacity = stated.number("moe-expert-capacity-factor")?.map(exact);
    if capacity.is_none() {
        stated.assume("`capacity_factor` 1: without `--moe-expert-capacity-factor` Megatron drops no token, and routing is taken as balanced");
    }
    let capacity_factor = capacity.map_or(Ok(CapacityFactor::BALANCED), CapacityFactor::try_from);
    Ok(Mixtures {
        experts,
        top_k: stated.size("moe-router-topk")?.unwrap_or(2),
        ffn: stated.size("moe-ffn-hidden-size")?.unwrap_or(ffn),
        shared_ffn: stated.size("moe-shared-expert-intermediate-size")?,
        every,
        first,
        capacity_factor: capacity_factor
            .map_err(|Mistake { hint, .. }| FrameworkError::Form { reason: "`--moe-expert-capacity-factor`".into(), hint })?,
        router_bias: false,
        expert_bias: false,
        unnormalised_gates: stated.is_on("moe-router-pre-softmax")?,
        shared_gate: stated.is_on("moe-shared-expert-gate")?,
    })
}

/// Reads the pattern of mixtures: the number of dense first layers, and the period after them.
fn read_frequency(text: &str, layers: usize) -> Result<[usize; 2], FrameworkError> {
    let wrong = |reason: &str| FrameworkError::Form {
        reason: format!("`--moe-layer-freq {text}`: {reason}"),
        hint: "give a number, or a list such as `[0,1,1]` or `([0]*3+[1]*58)`".into(),
    };
    if let Ok(every) = text.parse::<usize>() {
        // A single number N makes the first layer of each period a mixture; ours is the last.
        return if every == 1 { Ok([0, 1]) } else { Err(wrong("mixtures begin each period")) };
    }
    let marks = Pattern { rest: text, most: layers }.whole().ok_or_else(|| wrong("it is no list of 0 and 1"))?;
    if marks.len() != layers {
        return Err(wrong(&format!("it is for {} layers, and there are {layers}", marks.len())));
    }
    let places: Vec<usize> = (0..marks.len()).filter(|&index| marks.get(index) == Some(&true)).collect();
    let first_mixture = *places.first().ok_or_else(|| wrong("no layer is a mixture"))?;
    let every = places.get(1).map_or(1, |second| second - first_mixture);
    let first = (first_mixture + 1).checked_sub(every).ok_or_else(|| wrong("mixtures have no period"))?;
    let expected = |index: usize| index >= first && (index - first + 1).is_multiple_of(every);
    if marks.iter().enumerate().any(|(index, &mark)| mark != expected(index)) {
        return Err(wrong("mixtures have no period"));
    }
    Ok([first, every])
}

/// A Python list of 0 and 1 with `+`, `*` and brackets, of at most `most` elements.
struct Pattern<'a> {
    rest: &'a str,
    most: usize,
}

impl Pattern<'_> {
    fn whole(mut self) -> Option<Vec<bool>> {
        let marks = self.sum(0)?;
        self.rest.trim().is_empty().then_some(marks)
    }

    fn next_is(&mut self, sign: char) -> bool {
        let found = self.rest.trim_start().strip_prefix(sign);
        if let Some(rest) = found {
            self.rest = rest;
        }
        found.is_some()
    }

    fn number(&mut self) -> Option<usize> {
        let text = self.rest.trim_start();
        let length = text.len() - text.trim_start_matches(|letter: char| letter.is_ascii_digit()).len();
        let (number, rest) = text.split_at_checked(length)?;
        self.rest = rest;
        number.parse().ok()
    }

    fn sum(&mut self, depth: usize) -> Option<Vec<bool>> {
        let mut marks = self.product(depth)?;
        while self.next_is('+') {
            marks.extend(self.product(depth)?);
        }
        (marks.len() <= self.most).then_some(marks)
    }

    fn product(&mut self, depth: usize) -> Option<Vec<bool>> {
        const DEEPEST: usize = 16;
        let mut marks = if self.next_is('(') {
            let inner = if depth < DEEPEST { self.sum(depth + 1)? } else { return None };
            self.next_is(')').then_some(inner)?
        } else {
            self.next_is('[').then_some(())?;
            let mut marks = Vec::new();
            while !self.next_is(']') {
                marks.push(match self.number()? {
                    0 => false,
                    1 => true,
                    _ => return None,
                });
                self.next_is(',');
            }
            marks
        };
        while self.next_is('*') {
            let times = self.number()?;
            marks = if marks.len().checked_mul(times)? <= self.most { marks.repeat(times) } else { return None };
        }
        Some(marks)
    }
}
