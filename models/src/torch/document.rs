//! The form of a trace, as `python/foretell/trace/export.py` writes it. Every value is checked,
//! here or where it is used: the file may come from anyone.

use super::TorchError;
use serde::Deserialize;
use serde_json::Value as Json;
use std::collections::BTreeMap;

/// The value of `format`.
pub(super) const FORMAT: &str = "foretell-torch-trace";

/// The version that is read.
const VERSION: u32 = 1;

/// The most parameters, inputs, constants or operators.
const MOST_ENTRIES: usize = 100_000;

/// The most dimensions of a value.
const MOST_DIMENSIONS: usize = 16;

/// A dimension: a number, or `[p, a, b, c]` for `batch^p * (a + b*sequence + c*sequence^2)`.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(untagged)]
pub(super) enum TracedDimension {
    Fixed(u64),
    Formula(Vec<f64>),
}

/// A value: its shape, and PyTorch's number format in short.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub(super) struct TracedValue {
    pub(super) shape: Vec<TracedDimension>,
    #[serde(default = "single")]
    pub(super) dtype: String,
}

fn single() -> String {
    "f32".into()
}

/// A parameter of the traced modules.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub(super) struct TracedParameter {
    pub(super) name: String,
    pub(super) shape: Vec<u64>,
    pub(super) dtype: String,
    pub(super) trained: bool,
}

/// An aten operator of the forward pass. Values are numbered: parameters, inputs, constants, then
/// the results of the operators in order.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub(super) struct TracedOperator {
    pub(super) op: String,
    pub(super) module: String,
    #[serde(rename = "in")]
    pub(super) reads: Vec<usize>,
    #[serde(rename = "out")]
    pub(super) results: Vec<TracedValue>,
    #[serde(default)]
    pub(super) args: BTreeMap<String, Json>,
    /// Floating-point operations by PyTorch's own count, at the traced sizes.
    #[serde(default)]
    pub(super) flops: u64,
    #[serde(default)]
    pub(super) view: bool,
    /// Whether it has one result for each sample, as a split of the batch has.
    #[serde(default)]
    pub(super) samples: bool,
    /// The number of the checkpoint that it ran in.
    #[serde(default)]
    pub(super) checkpoint: Option<u64>,
}

impl TracedOperator {
    /// The operator's name without its library, and without the underscore of in-place operators.
    pub(super) fn short(&self) -> &str {
        let name = self.op.rsplit('.').next().unwrap_or(&self.op);
        name.strip_suffix('_').unwrap_or(name)
    }

    /// An argument as a switch.
    pub(super) fn switch(&self, name: &str) -> bool {
        self.args.get(name).and_then(Json::as_bool).unwrap_or(false)
    }

    /// An argument as sizes. A single number counts as a list of one.
    pub(super) fn sizes(&self, name: &str) -> Vec<usize> {
        let size = |value: &Json| value.as_u64().and_then(|size| usize::try_from(size).ok());
        match self.args.get(name) {
            Some(Json::Array(values)) => values.iter().filter_map(size).collect(),
            Some(value) => size(value).into_iter().collect(),
            None => Vec::new(),
        }
    }
}

/// The optimizer of the traced step.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub(super) struct TracedOptimizer {
    pub(super) name: String,
}

/// What one of the traces of the step measured while it ran.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub(super) struct Measured {
    pub(super) batch: u64,
    #[serde(default)]
    pub(super) sequence: Option<u64>,
    pub(super) peak_bytes: u64,
    pub(super) forward_flops: u64,
    pub(super) backward_flops: u64,
}

/// The sizes of the first trace.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub(super) struct Sizes {
    pub(super) batch: u64,
    #[serde(default)]
    pub(super) sequence: Option<u64>,
}

/// A trace.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub(super) struct Document {
    format: String,
    version: u32,
    pub(super) sizes: Sizes,
    pub(super) parameters: Vec<TracedParameter>,
    pub(super) inputs: Vec<TracedValue>,
    pub(super) constants: Vec<TracedValue>,
    pub(super) operators: Vec<TracedOperator>,
    /// The values on which `backward()` was called.
    pub(super) losses: Vec<usize>,
    /// Paths of modules that repeat.
    pub(super) blocks: Vec<String>,
    pub(super) optimizer: Option<TracedOptimizer>,
    pub(super) assumed: Vec<String>,
    pub(super) measured: Vec<Measured>,
}

impl Document {
    /// Refuses documents of other forms.
    pub(super) fn check(&self) -> Result<(), TorchError> {
        let refuse = |reason: String| Err(TorchError::NotATrace { reason });
        if self.format != FORMAT || self.version != VERSION {
            return refuse(format!("`format` is `{}` and `version` {}", self.format, self.version));
        }
        let lists = [
            ("parameters", self.parameters.len()),
            ("inputs", self.inputs.len()),
            ("constants", self.constants.len()),
            ("operators", self.operators.len()),
            ("blocks", self.blocks.len()),
        ];
        if let Some((name, count)) = lists.into_iter().find(|&(_, count)| count > MOST_ENTRIES) {
            return refuse(format!("it has {count} `{name}`, and {MOST_ENTRIES} can be read"));
        }
        if self.operators.is_empty() || self.losses.is_empty() {
            return refuse("it has no operators, or no loss".into());
        }
        let results = self.operators.iter().flat_map(|operator| &operator.results);
        if self.inputs.iter().chain(&self.constants).chain(results).any(|value| value.shape.len() > MOST_DIMENSIONS) {
            return refuse(format!("a value has more than {MOST_DIMENSIONS} dimensions"));
        }
        match self.sizes.batch {
            0 => refuse("the batch is 0".into()),
            _ => Ok(()),
        }
    }

    /// Whether the trace has two lengths of a sequence.
    pub(super) fn has_sequence(&self) -> bool {
        let mut lengths: Vec<Option<u64>> = self.measured.iter().map(|length| length.sequence).collect();
        lengths.dedup();
        lengths.len() > 1 && !self.assumed.iter().any(|line| line.starts_with("the sequence is fixed"))
    }
}
