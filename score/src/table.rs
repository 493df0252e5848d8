//! Comma-separated tables: a header, and rows of at most as many cells.

use std::collections::BTreeMap;
use thiserror::Error;

/// Why a text is no table.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum TableError {
    /// There is no header.
    #[error("the table is empty; hint: its first line names the columns")]
    Empty,
    /// A line has more cells than the header.
    #[error("line {line}: {cells} cells under {columns} columns; hint: put a cell that has a comma in quotes")]
    Cells {
        /// Where the row begins.
        line: u64,
        /// How many it has.
        cells: usize,
        /// How many there should be at most.
        columns: usize,
    },
    /// What cannot be read.
    #[error("{0}")]
    Unreadable(String),
    /// A column that every table has is not there.
    #[error("there is no column `{column}`; hint: the first line names the columns as validation/INDEX.md does")]
    Column {
        /// Which.
        column: &'static str,
    },
}

/// Reads a table: for every row its cells that are not empty, by column.
///
/// # Errors
/// [`TableError`] where the text is no table.
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
    fn quotes_hold_commas_quotes_and_line_ends() {
        let table = read_table("a,b\r\n\"x, \"\"y\"\"\nz\",\n\n1,2\n").expect("a table");
        assert_eq!(table.len(), 2);
        assert_eq!(table[0].get("a").map(String::as_str), Some("x, \"y\"\nz"));
        assert_eq!(table[0].get("b"), None);
        assert_eq!(table[1].get("b").map(String::as_str), Some("2"));
    }

    #[test]
    fn what_is_no_table_is_said() {
        assert_eq!(read_table(""), Err(TableError::Empty));
        assert_eq!(read_table("a\n1,2\n"), Err(TableError::Cells { line: 2, cells: 2, columns: 1 }));
    }
}
