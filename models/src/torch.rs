//! Traces of PyTorch steps as a [`Model`] of the family `network`.
//!
//! `python -m foretell.trace` writes the forward graph of a step as aten operators, with every
//! dimension as a formula of batch and sequence ([`document`]). Each operator becomes a layer, or
//! nothing if it only views memory ([`operators`]). An operator without a mapping counts as reading
//! and writing its operands, and is noted. It must not know layouts or devices: it ends with a
//! model.

mod blocks;
mod document;
mod losses;
mod names;
mod notes;
mod operators;
mod products;
mod translator;
mod values;

use crate::hugging_face::ImportedModel;
use crate::model::Model;
use document::Document;
use miette::Diagnostic;
use thiserror::Error;
use translator::Translator;

/// Why a trace cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, Error, Diagnostic)]
pub enum TorchError {
    /// The text is not a trace.
    #[error("this is not a trace of a PyTorch step: {reason}")]
    #[diagnostic(code(torch::not_a_trace), help("`python -m foretell.trace FILE.py:step -o trace.json` writes one"))]
    NotATrace {
        /// Why the text is not a trace.
        reason: String,
    },
    /// A value's shape that is no size.
    #[error("{place}: {reason}")]
    #[diagnostic(code(torch::shape), help("{hint}"))]
    Shape {
        /// The value.
        place: String,
        /// What is wrong with it.
        reason: String,
        /// Which shapes can be read.
        hint: &'static str,
    },
    /// An operator that no layer can express.
    #[error("operator {index} (`{operator}` in `{module}`): {reason}")]
    #[diagnostic(code(torch::operator), help("{hint}"))]
    Operator {
        /// The operator's number, from 0.
        index: usize,
        /// The operator's name.
        operator: String,
        /// The path of its module.
        module: String,
        /// Why it cannot be expressed.
        reason: String,
        /// What can be expressed.
        hint: &'static str,
    },
    /// A loss that depends on no input and no parameter.
    #[error("the loss {reason}")]
    #[diagnostic(code(torch::loss), help("trace a step whose loss is a sum or a mean over the samples"))]
    Loss {
        /// Why the loss cannot be used.
        reason: String,
    },
    /// Another sequence length was asked for, and the trace has a single one.
    #[error("the trace has one length of a sequence")]
    #[diagnostic(code(torch::fixed_sequence), help("let the step take `sequence`, and trace it again"))]
    FixedSequence,
}

/// Whether a text is a trace of a PyTorch step.
pub fn is_torch_trace(text: &str) -> bool {
    let head = text.get(..256).unwrap_or(text);
    head.trim_start().starts_with('{') && head.contains(document::FORMAT)
}

/// Reads a trace. `sequence`: another length than the trace's.
///
/// # Errors
/// [`TorchError`], with the first operator that cannot be expressed.
pub fn from_torch(text: &str, sequence: Option<usize>) -> Result<ImportedModel, TorchError> {
    let document: Document = serde_json::from_str(text).map_err(|error| TorchError::NotATrace { reason: error.to_string() })?;
    document.check()?;
    if sequence.is_some() && !document.has_sequence() {
        return Err(TorchError::FixedSequence);
    }
    let mut translator = Translator::new(&document, sequence)?;
    for (index, operator) in document.operators.iter().enumerate() {
        translator.operator(operator).map_err(|problem| TorchError::Operator {
            index,
            operator: operator.op.clone(),
            module: operator.module.clone(),
            reason: problem.reason,
            hint: problem.hint,
        })?;
    }
    let (network, notes) = translator.finish(&document)?;
    Ok(ImportedModel { model: Model::Network(network), notes })
}
