//! Reads comma-separated tables: a header line, then rows with at most as many cells.

use miette::Diagnostic;
use std::collections::BTreeMap;
use thiserror::Error;

/// An error in a table's text.
#[derive(Clone, Debug, PartialEq, Eq, Error, Diagnostic)]
pub enum TableError {
    /// The text has no header.
    #[error("the table is empty")]
    #[diagnostic(code(published::empty), help("its first line names the columns"))]
    Empty,
    /// A row has more cells than the header.
    #[error("line {line} has {cells} cells under {columns} columns")]
    #[diagnostic(code(published::cells), help("quote cells that contain a comma"))]
    Cells {
        /// Line on which the row begins, counted from 1.
        line: u64,
        /// Number of cells in the row.
        cells: usize,
        /// Number of columns in the header.
        columns: usize,
    },
    /// The CSV reader rejects the text.
    #[error("{0}")]
    #[diagnostic(code(published::unreadable))]
    Unreadable(String),
    /// A required column is missing.
    #[error("the table has no column `{column}`")]
    #[diagnostic(code(published::column), help("name the columns as tests/published/INDEX.md does"))]
    Column {
        /// Name of the missing column.
        column: &'static str,
    },
}

/// Reads a table. Returns the non-empty cells of each row by column name.
///
/// # Errors
/// [`TableError`] if the text is not a table.
pub fn read_table(text: &str) -> Result<Vec<BTreeMap<String, String>>, TableError> {
    let unreadable = |error: csv::Error| TableError::Unreadable(error.to_string());
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let mut reader = csv::ReaderBuilder::new().flexible(true).trim(csv::Trim::All).from_reader(text.as_bytes());
    let header = reader.headers().map_err(unreadable)?.clone();
    if header.is_empty() {
        return Err(TableError::Empty);
    }
    let row = |record: Result<csv::StringRecord, csv::Error>| {
        let record = record.map_err(unreadable)?;
        if record.len() > header.len() {
            let line = record.position().map_or(0, csv::Position::line);
            return Err(TableError::Cells { line, cells: record.len(), columns: header.len() });
        }
        let named = header.iter().zip(record.iter()).filter(|(_, cell)| !cell.is_empty());
        Ok(named.map(|(name, cell)| (name.to_string(), cell.to_string())).collect())
    };
    reader.records().map(row).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quoted_cells_may_contain_commas_quotes_and_line_ends() {
        let table = read_table("a,b\r\n\"x, \"\"y\"\"\nz\",\n\n1,2\n").expect("a table");
        assert_eq!(table.len(), 2);
        assert_eq!(table[0].get("a").map(String::as_str), Some("x, \"y\"\nz"));
        assert_eq!(table[0].get("b"), None);
        assert_eq!(table[1].get("b").map(String::as_str), Some("2"));
    }

    #[test]
    fn malformed_tables_are_errors() {
        assert_eq!(read_table(""), Err(TableError::Empty));
        assert_eq!(read_table("a\n1,2\n"), Err(TableError::Cells { line: 2, cells: 2, columns: 1 }));
    }
}
