//! The fields of a `config.json`, and which of them have been read.

mod names;

pub(super) use names::is_neutral;

use super::{Unknown, python_json};
use crate::dropout::DropoutRate;
use crate::families::{MOST, NormEpsilon};
use miette::Diagnostic;
use names::{NEUTRAL, may_decide};
use serde_json::{Map, Value};
use std::collections::BTreeSet;
use thiserror::Error;

/// Why a `config.json` was not read.
#[derive(Clone, Debug, PartialEq, Eq, Error, Diagnostic)]
pub enum ConfigError {
    /// The text is not a JSON object with a `model_type`.
    #[error("this is not a `config.json` of Transformers: {reason}")]
    #[diagnostic(code(hugging_face::not_a_config), help("give the file that lies beside a model's weights"))]
    NotAConfig {
        /// What is wrong with it.
        reason: String,
    },
    /// The file does not state its `model_type`; files before 2020 do not.
    #[error("it has no `model_type`")]
    #[diagnostic(code(hugging_face::no_type), help("say it: `foretell import hf-config FILE --as bert`, or `gpt2`"))]
    NoType,
    /// No reader for the model type.
    #[error("models of type `{name}` cannot be read")]
    #[diagnostic(code(hugging_face::unknown_type), help("{hint}"))]
    UnknownType {
        /// The type.
        name: String,
        /// The types that can be read.
        hint: String,
    },
    /// A field that the model needs, or whose value has another type.
    #[error("`{field}` {reason}")]
    #[diagnostic(code(hugging_face::value), help("Transformers writes it as {expected}"))]
    Value {
        /// The field.
        field: String,
        /// What is wrong with it.
        reason: String,
        /// The usual form.
        expected: &'static str,
    },
    /// A value that no graph can express.
    #[error("`{field}: {value}` cannot be expressed")]
    #[diagnostic(code(hugging_face::inexpressible), help("{hint}"))]
    Inexpressible {
        /// The field.
        field: String,
        /// Its value.
        value: String,
        /// The values that can be expressed.
        hint: String,
    },
    /// Fields that no reader knows.
    #[error("{} {} not understood for models of type `{model_type}`", quoted(names), if names.len() == 1 { "is" } else { "are" })]
    #[diagnostic(
        code(hugging_face::unknown),
        help(
            "remove what changes neither time nor memory nor results, or \
         write a model file (`foretell models show`)"
        )
    )]
    Unknown {
        /// The fields.
        names: Vec<String>,
        /// The model type.
        model_type: String,
    },
}

fn quoted(names: &[String]) -> String {
    names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ")
}

/// Parses a configuration that says its type.
pub(super) fn parse(text: &str) -> Result<Map<String, Value>, ConfigError> {
    let object = parse_any(text)?;
    if object.get("model_type").is_some_and(Value::is_string) { Ok(object) } else { Err(ConfigError::NoType) }
}

/// Parses a configuration.
pub(super) fn parse_any(text: &str) -> Result<Map<String, Value>, ConfigError> {
    let not_a_config = |reason: String| ConfigError::NotAConfig { reason };
    let value: Value = python_json::parse(text).map_err(|error| not_a_config(error.to_string()))?;
    match value {
        Value::Object(object) => Ok(object),
        _ => Err(not_a_config("it is not an object".into())),
    }
}

/// Whether a value means that a feature is absent.
pub(super) fn is_off(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Array(list) => list.is_empty(),
        Value::Object(object) => object.is_empty(),
        _ => false,
    }
}

/// A configuration being read.
pub(super) struct Fields {
    object: Map<String, Value>,
    read: BTreeSet<String>,
    notes: Vec<String>,
    /// The sequence that the user asked for.
    sequence: Option<usize>,
}

impl Fields {
    /// Begins to read the fields of a configuration.
    pub(super) fn new(object: Map<String, Value>, sequence: Option<usize>) -> Result<Self, ConfigError> {
        let mut fields = Self { object, read: BTreeSet::new(), notes: Vec::new(), sequence };
        fields.neutral(&NEUTRAL);
        // Encoder-decoders share weights between their halves only if this says so.
        fields.must_be("tie_encoder_decoder", &[Value::Bool(false)], "encoder and decoder have weights of their own")?;
        fields.must_be("pruned_heads", &[Value::Object(Map::new())], "every layer has all heads")?;
        fields.must_be("chunk_size_feed_forward", &[Value::from(0)], "feed-forward networks take all positions at once")?;
        fields.run_settings()?;
        Ok(fields)
    }

    /// Notes settings that belong in a plan, and settings that make Transformers keep more tensors.
    fn run_settings(&mut self) -> Result<(), ConfigError> {
        for field in ["quantization_config", "compression_config"] {
            if self.object(field)?.is_some() {
                self.note(format!(
                    "weights have the precision of the plan, and not that of `{field}`; `--base-bits 4` freezes weights of 4 bits beside adapters"
                ));
            }
        }
        if self.flag_or("gradient_checkpointing", false)? {
            self.note("`gradient_checkpointing` is ignored; set `recompute: full` in the plan");
        }
        if self.flag_or("output_attentions", false)? {
            self.note("`output_attentions` makes Transformers keep the scores of every layer; none are kept here");
        }
        if self.flag_or("output_hidden_states", false)? {
            self.note(
                "`output_hidden_states` makes Transformers keep the result of every layer; \
                 here results are kept only for gradients",
            );
        }
        for field in ["_attn_implementation", "attn_implementation"] {
            if self.take(field).is_some_and(|value| value == "eager") {
                self.note(format!("`{field}: eager` makes Transformers keep all scores; attention is one kernel here"));
            }
        }
        Ok(())
    }

    /// Notes that the file names a class other than `planned`.
    pub(super) fn architecture(&mut self, planned: &str) -> Result<(), ConfigError> {
        let names = self.list("architectures")?.unwrap_or_default();
        let names: Vec<&str> = names.iter().filter_map(Value::as_str).collect();
        if !names.is_empty() && !names.contains(&planned) {
            self.note(format!(
                "`architectures` says {}; the model is planned as {planned}, with the head of {planned}",
                names.join(", ")
            ));
        }
        Ok(())
    }

    /// Notes that Transformers splits products into slices.
    pub(super) fn sliced_products(&mut self, are_sliced: bool) -> Result<(), ConfigError> {
        let slices = self.count_or("pretraining_tp", 1)?;
        if are_sliced && slices > 1 {
            self.note(format!(
                "Transformers splits some products into {slices} slices (`pretraining_tp`); here each is one product"
            ));
        }
        Ok(())
    }

    /// The model type.
    pub(super) fn model_type(&self) -> &str {
        self.object.get("model_type").and_then(Value::as_str).unwrap_or_default()
    }

    /// The value of a field, which counts as read. `None` if it is missing or null.
    pub(super) fn take(&mut self, field: &str) -> Option<Value> {
        self.read.insert(field.into());
        self.object.get(field).filter(|value| !value.is_null()).cloned()
    }

    /// The value of a field, which does not count as read.
    pub(super) fn peek(&self, field: &str) -> Option<&Value> {
        self.object.get(field)
    }

    /// Whether the field is there, even if null.
    pub(super) fn has(&self, field: &str) -> bool {
        self.object.contains_key(field)
    }

    /// Marks fields as read that change neither time nor memory nor results.
    pub(super) fn neutral(&mut self, names: &[&str]) {
        self.read.extend(names.iter().map(ToString::to_string));
    }

    /// Adds a sentence on a difference from Transformers' model.
    pub(super) fn note(&mut self, note: impl Into<String>) {
        self.notes.push(note.into());
    }

    /// A whole number of at least 1, if there is one.
    pub(super) fn optional(&mut self, field: &str) -> Result<Option<usize>, ConfigError> {
        self.take(field).map(|value| whole(field, &value)).transpose()
    }

    /// A whole number of at least 1.
    pub(super) fn size(&mut self, field: &str) -> Result<usize, ConfigError> {
        self.optional(field)?.ok_or_else(|| ConfigError::Value {
            field: field.into(),
            reason: "is missing".into(),
            expected: "a whole number from 1 to 16,777,216",
        })
    }

    /// A whole number of at least 1, or Transformers' default.
    pub(super) fn size_or(&mut self, field: &str, default: usize) -> Result<usize, ConfigError> {
        Ok(self.optional(field)?.unwrap_or(default))
    }

    /// A whole number that may be 0.
    pub(super) fn count_or(&mut self, field: &str, default: usize) -> Result<usize, ConfigError> {
        match self.take(field) {
            Some(value) if value.as_u64() == Some(0) => Ok(0),
            Some(value) => whole(field, &value),
            None => Ok(default),
        }
    }

    /// A switch, or Transformers' default.
    pub(super) fn flag_or(&mut self, field: &str, default: bool) -> Result<bool, ConfigError> {
        match self.take(field) {
            None => Ok(default),
            Some(Value::Bool(flag)) => Ok(flag),
            Some(other) => {
                Err(ConfigError::Value { field: field.into(), reason: format!("is {other}"), expected: "true or false" })
            }
        }
    }

    /// A number, or Transformers' default.
    pub(super) fn number_or(&mut self, field: &str, default: f64) -> Result<f64, ConfigError> {
        match self.take(field) {
            None => Ok(default),
            Some(value) => value.as_f64().ok_or_else(|| ConfigError::Value {
                field: field.into(),
                reason: format!("is {value}"),
                expected: "a number",
            }),
        }
    }

    /// A text, or Transformers' default.
    pub(super) fn text_or(&mut self, field: &str, default: &str) -> Result<String, ConfigError> {
        match self.take(field) {
            None => Ok(default.into()),
            Some(Value::String(text)) => Ok(text),
            Some(other) => Err(ConfigError::Value { field: field.into(), reason: format!("is {other}"), expected: "a text" }),
        }
    }

    /// A list of values, if there is one.
    pub(super) fn list(&mut self, field: &str) -> Result<Option<Vec<Value>>, ConfigError> {
        match self.take(field) {
            None => Ok(None),
            Some(Value::Array(list)) => Ok(Some(list)),
            Some(other) => Err(ConfigError::Value { field: field.into(), reason: format!("is {other}"), expected: "a list" }),
        }
    }

    /// An object's fields, if there is one.
    pub(super) fn object(&mut self, field: &str) -> Result<Option<Map<String, Value>>, ConfigError> {
        match self.take(field) {
            None => Ok(None),
            Some(Value::Object(object)) => Ok(Some(object)),
            Some(other) => Err(ConfigError::Value { field: field.into(), reason: format!("is {other}"), expected: "an object" }),
        }
    }

    /// Refuses a value other than these. A missing or null field is the usual value.
    pub(super) fn must_be(&mut self, field: &str, allowed: &[Value], hint: &str) -> Result<(), ConfigError> {
        match self.take(field) {
            Some(value) if !allowed.contains(&value) => Err(inexpressible(field, &value, hint)),
            _ => Ok(()),
        }
    }

    /// Refuses a switch that is on.
    pub(super) fn must_be_off(&mut self, field: &str, hint: &str) -> Result<(), ConfigError> {
        self.must_be(field, &[Value::Bool(false)], hint)
    }

    /// Positions of a sample: what the user asked for, or the longest that the field allows.
    pub(super) fn sequence(&mut self, field: &str, default: usize) -> Result<usize, ConfigError> {
        let longest = self.size_or(field, default)?;
        Ok(self.sequence.unwrap_or(longest))
    }

    /// The sequence that the user asked for.
    pub(super) fn asked_sequence(&self) -> Option<usize> {
        self.sequence
    }

    /// The share that is dropped by one of several fields, which must agree.
    pub(super) fn dropout(&mut self, names: &[(&str, f64)]) -> Result<DropoutRate, ConfigError> {
        let mut rates = Vec::new();
        for &(name, default) in names {
            rates.push(self.number_or(name, default)?);
        }
        let first = *rates.first().expect("invariant: a rate has a name");
        if let Some(((name, _), rate)) = names.iter().zip(&rates).find(|(_, rate)| **rate != first) {
            return Err(inexpressible(name, &Value::from(*rate), "the embedding and all layers drop the same share"));
        }
        let name = names.first().map_or("dropout", |(name, _)| name);
        DropoutRate::try_from(first).map_err(|mistake| inexpressible(name, &Value::from(first), &mistake.hint))
    }

    /// The number that norms add to the variance.
    pub(super) fn epsilon(&mut self, field: &str, default: f64) -> Result<NormEpsilon, ConfigError> {
        let number = self.number_or(field, default)?;
        NormEpsilon::try_from(number)
            .map_err(|_| inexpressible(field, &Value::from(number), "norms add a power of ten, such as 1e-5"))
    }

    /// Notes a norm's number that differs from our family's.
    pub(super) fn fixed_epsilon(&mut self, field: &str, default: f64, ours: f64) -> Result<(), ConfigError> {
        let number = self.number_or(field, default)?;
        if (number / ours - 1.0).abs() > 1e-6 {
            self.note(format!("norms add {ours:e} to the variance, and `{field}` says {number:e}"));
        }
        Ok(())
    }

    /// The error for an unknown nested field.
    pub(super) fn unknown(&self, name: String) -> ConfigError {
        ConfigError::Unknown { names: vec![name], model_type: self.model_type().into() }
    }

    /// Sets a field of the configuration.
    pub(super) fn set(&mut self, field: &str, value: Value) {
        self.object.insert(field.into(), value);
    }

    /// Sets the share of a head's features that is rotated, where the file does not state it.
    pub(super) fn default_rotary_share(&mut self, share: f64) {
        const FIELD: &str = "partial_rotary_factor";
        let nested = self.object.get("rope_parameters").and_then(|rope| rope.get(FIELD));
        if nested.is_none() && !self.has(FIELD) {
            self.set(FIELD, Value::from(share));
        }
    }

    /// Returns the notes if every field has been read.
    pub(super) fn finish(mut self, unknown: Unknown) -> Result<Vec<String>, ConfigError> {
        let unread = self.object.iter().filter(|(name, value)| !self.read.contains(*name) && !is_off(value));
        let (names, others): (Vec<String>, Vec<String>) =
            unread.map(|(name, _)| name.clone()).partition(|name| unknown == Unknown::Noted || may_decide(name));
        if !others.is_empty() {
            self.note(format!("not understood, and taken for fields without effect on a step: {}", quoted(&others)));
        }
        if names.is_empty() {
            return Ok(self.notes);
        }
        if unknown == Unknown::Noted {
            self.note(format!("{LEFT_OUT}{}", quoted(&names)));
            return Ok(self.notes);
        }
        Err(ConfigError::Unknown { names, model_type: self.model_type().into() })
    }
}

/// Beginning of the note on fields that are left out.
pub(super) const LEFT_OUT: &str = "not understood, and left out: ";

/// The error for a value that no graph can express.
pub(super) fn inexpressible(field: &str, value: &Value, hint: &str) -> ConfigError {
    ConfigError::Inexpressible { field: field.into(), value: value.to_string(), hint: hint.into() }
}

fn whole(field: &str, value: &Value) -> Result<usize, ConfigError> {
    // Some files write 32.0.
    let from_float =
        || value.as_f64().filter(|number| number.fract() == 0.0 && (1.0..9e15).contains(number)).map(|number| number as u64);
    let number = value.as_u64().or_else(from_float).filter(|number| (1..=MOST as u64).contains(number));
    number.and_then(|number| usize::try_from(number).ok()).ok_or_else(|| ConfigError::Value {
        field: field.into(),
        reason: format!("is {value}"),
        expected: "a whole number above 0",
    })
}
