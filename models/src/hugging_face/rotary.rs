//! Rotary positions: `rope_parameters`, and the fields that it replaced.

use super::fields::{ConfigError, Fields, inexpressible};
use crate::families::Decoder;
use serde_json::{Map, Value, json};

/// The rotary positions of a configuration.
pub(super) struct Rotary {
    pub(super) theta: usize,
    /// Whether frequencies are scaled for long sequences.
    pub(super) is_scaled: bool,
    /// Share of a head's features that is rotated.
    share: f64,
}

impl Rotary {
    /// The features of a head that are rotated. `None`: all.
    pub(super) fn rotated(&self, decoder: &Decoder) -> Result<Option<usize>, ConfigError> {
        let features = decoder.head_features();
        let rotated = (features as f64 * self.share) as usize;
        if rotated == 0 || !rotated.is_multiple_of(2) {
            let hint = format!("{rotated} of {features} features would be rotated, and they form pairs");
            return Err(inexpressible("partial_rotary_factor", &json!(self.share), &hint));
        }
        Ok(Some(rotated).filter(|&rotated| rotated != features))
    }
}

/// Reads `rope_parameters`, or the fields that it replaced.
///
/// `theta` and `share` are the type's usual base and share of rotated features.
pub(super) fn rotary(fields: &mut Fields, theta: f64, share: f64) -> Result<Rotary, ConfigError> {
    let mut theta = fields.number_or("rope_theta", theta)?;
    let mut share = fields.number_or("partial_rotary_factor", share)?;
    let mut is_scaled = false;
    for name in ["rope_scaling", "rope_parameters"] {
        let Some(mut object) = fields.object(name)? else { continue };
        // Gemma 3 has one object for each kind of layer; only the frequencies of full attention may
        // be scaled.
        if let Some(Value::Object(full)) = object.get("full_attention") {
            let full = full.clone();
            if let Some(Value::Object(local)) = object.get("sliding_attention")
                && (local.get("rope_theta") != full.get("rope_theta") || local.get("rope_type") != full.get("rope_type"))
            {
                fields.note("all layers rotate with the frequencies of those that see every position");
            }
            object = full;
        }
        let is_unknown = |(key, value): &(&String, &Value)| !value.is_null() && !ROPE.contains(&key.as_str());
        if let Some((unknown, _)) = object.iter().find(is_unknown) {
            return Err(fields.unknown(format!("{name}.{unknown}")));
        }
        theta = number(name, &object, "rope_theta")?.unwrap_or(theta);
        share = number(name, &object, "partial_rotary_factor")?.unwrap_or(share);
        is_scaled |= is_scaling(name, &object)?;
    }
    let mut whole = theta.round();
    if whole < 1.0 {
        return Err(inexpressible("rope_theta", &json!(theta), "the base of the frequencies is at least 1"));
    }
    // StarCoder2 3B has 999999.44.
    if (whole - theta).abs() > 1e-6 {
        fields.note(format!("`rope_theta` {theta} is taken as {whole}: the base of the frequencies changes no time"));
    }
    if whole > MOST_THETA {
        fields.note(format!("`rope_theta` {whole} is taken as {MOST_THETA}: the base of the frequencies changes no time"));
        whole = MOST_THETA;
    }
    Ok(Rotary { theta: whole as usize, is_scaled, share })
}

/// The largest base of a model's frequencies.
const MOST_THETA: f64 = 16_777_216.0;

/// Known fields of `rope_parameters`: the base, the share that is rotated, and how positions are
/// scaled.
const ROPE: [&str; 20] = [
    "attention_factor",
    "attn_factor",
    "beta_fast",
    "beta_slow",
    "factor",
    "finetuned",
    "high_freq_factor",
    "long_factor",
    "low_freq_factor",
    "mrope_interleaved",
    "mrope_section",
    "mscale",
    "mscale_all_dim",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "rope_theta",
    "rope_type",
    "short_factor",
    "truncate",
    "type",
];

fn number(field: &str, object: &Map<String, Value>, name: &str) -> Result<Option<f64>, ConfigError> {
    let Some(value) = object.get(name).filter(|value| !value.is_null()) else { return Ok(None) };
    let wrong = || ConfigError::Value { field: format!("{field}.{name}"), reason: format!("is {value}"), expected: "a number" };
    value.as_f64().map(Some).ok_or_else(wrong)
}

/// Whether positions are scaled. Refuses kinds of scaling that are unknown.
fn is_scaling(field: &str, object: &Map<String, Value>) -> Result<bool, ConfigError> {
    let kind = object.get("rope_type").or_else(|| object.get("type"));
    match kind.and_then(Value::as_str) {
        None | Some("default") => Ok(false),
        Some("linear" | "dynamic" | "llama3" | "yarn" | "longrope" | "su") => Ok(true),
        Some(other) => Err(inexpressible(
            &format!("{field}.rope_type"),
            &json!(other),
            "kinds: default, linear, dynamic, llama3, yarn, longrope",
        )),
    }
}
