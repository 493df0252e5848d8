//! ONNX graphs as a [`Model`] of the family `network`.
//!
//! A file is read ([`messages`]), shapes are inferred node by node, and each node becomes a layer
//! ([`translate`]). Whole numbers that only make shapes are computed on the way ([`values`]). A
//! graph is refused, with the names, if it has operators that are not understood. It must not know
//! layouts or devices: it ends with a model.

mod batch;
mod images;
mod messages;
mod movement;
mod nodes;
mod numbers;
mod shapes;
mod translate;
mod translator;
mod values;

use crate::hugging_face::ImportedModel;
use crate::model::Model;
use miette::Diagnostic;
use prost::Message;
use prost::bytes::Bytes;
use thiserror::Error;

/// Why an ONNX file was not read.
#[derive(Clone, Debug, PartialEq, Eq, Error, Diagnostic)]
pub enum OnnxError {
    /// It is not an ONNX file.
    #[error("this is not an ONNX file: {reason}")]
    #[diagnostic(code(onnx::not_onnx), help("`torch.onnx.export` writes one"))]
    NotOnnx {
        /// What is wrong with it.
        reason: String,
    },
    /// Operators that no layer expresses.
    #[error("{} {} not understood", quoted(names), if names.len() == 1 { "is an operator that is" } else { "are operators that are" })]
    #[diagnostic(
        code(onnx::unknown_operators),
        help("export an image model, a transformer or a multi-layer network without control flow")
    )]
    UnknownOperators {
        /// Their names.
        names: Vec<String>,
    },
    /// An input of the graph that cannot be a sample.
    #[error("input `{name}` {reason}")]
    #[diagnostic(code(onnx::input), help("{hint}"))]
    Input {
        /// Its name.
        name: String,
        /// What is wrong with it.
        reason: String,
        /// What can be read.
        hint: &'static str,
    },
    /// A node that no layer expresses.
    #[error("node `{node}` ({operator}): {reason}")]
    #[diagnostic(code(onnx::node), help("export the graph with fixed sizes but for the batch, and with constants folded"))]
    Node {
        /// The node's name.
        node: String,
        /// Its operator.
        operator: String,
        /// What cannot be expressed.
        reason: String,
    },
}

fn quoted(names: &[String]) -> String {
    names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ")
}

/// Reads an ONNX graph. Its weights are not read, only their shapes.
///
/// # Errors
/// [`OnnxError`], with the operators that are unknown, or the first node that cannot be expressed.
pub fn from_onnx(file: Vec<u8>) -> Result<ImportedModel, OnnxError> {
    let not_onnx = |reason: String| OnnxError::NotOnnx { reason };
    let file = messages::ModelFile::decode(Bytes::from(file)).map_err(|error| not_onnx(error.to_string()))?;
    let graph = file.graph.filter(|graph| !graph.nodes.is_empty()).ok_or_else(|| not_onnx("it has no graph".into()))?;
    let (network, notes) = translate::network(&graph)?;
    Ok(ImportedModel { model: Model::Network(network), notes })
}
