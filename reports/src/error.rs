//! Errors of making a report.

use miette::Diagnostic;
use thiserror::Error;

/// Why a report could not be made.
#[derive(Debug, Error, Diagnostic)]
pub enum ReportError {
    /// The plot's lines, areas or text could not be drawn.
    #[error("cannot draw the plot: {0}")]
    #[diagnostic(code(report::draw))]
    Draw(String),
    /// The pixels could not be encoded.
    #[error("cannot encode the plot as PNG: {0}")]
    #[diagnostic(code(report::encode))]
    Encode(#[from] png::EncodingError),
    /// A chart's document could not be written.
    #[error("cannot write the chart as JSON: {0}")]
    #[diagnostic(code(report::document))]
    Document(#[from] serde_json::Error),
    /// The writer that receives the trace failed.
    #[error("cannot write the trace: {0}")]
    #[diagnostic(code(report::write))]
    Write(#[from] std::io::Error),
}
