//! Errors of operator tables.

/// Why a table cannot be read or expanded.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, miette::Diagnostic)]
pub enum TableError {
    /// A text is not a formula, or names a symbol that the table does not list.
    #[error("`{text}` is not a formula of the table's symbols")]
    #[diagnostic(code(operator_table::formula))]
    Formula {
        /// The text.
        text: String,
    },
    /// A line does not have the format.
    #[error("line `{line}` of an operator table {problem}")]
    #[diagnostic(code(operator_table::line))]
    Line {
        /// The line.
        line: String,
        /// What is wrong with the line.
        problem: &'static str,
    },
    /// A size that the table needs is not given.
    #[error("the operator table needs the size `{symbol}`")]
    #[diagnostic(code(operator_table::size))]
    Size {
        /// Its symbol.
        symbol: String,
    },
    /// A part releases memory that is not allocated.
    #[error("part `{part}` of layer {layer} releases allocation {number}, which is not allocated")]
    #[diagnostic(code(operator_table::release))]
    Release {
        /// The part.
        part: String,
        /// The layer, 0 outside of layers.
        layer: usize,
        /// The allocation's number.
        number: u32,
    },
}
