//! Comma-separated tables (RFC 4180): a header, and rows of as many cells; quotes may hold commas, quotes and line ends.

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
        line: usize,
        /// How many it has.
        cells: usize,
        /// How many there should be at most.
        columns: usize,
    },
    /// A quote that is not closed.
    #[error("line {line}: a quote is not closed")]
    Quote {
        /// Where the row begins.
        line: usize,
    },
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
    let mut lines = records(text)?.into_iter();
    let (_, header) = lines.next().ok_or(TableError::Empty)?;
    let header: Vec<String> = header.iter().map(|name| name.trim().to_string()).collect();
    lines
        .map(|(line, cells)| {
            if cells.len() > header.len() {
                return Err(TableError::Cells { line, cells: cells.len(), columns: header.len() });
            }
            let named = header.iter().cloned().zip(cells.into_iter().map(|cell| cell.trim().to_string()));
            Ok(named.filter(|(_, cell)| !cell.is_empty()).collect())
        })
        .collect()
}

/// The lines' cells, each with the number of its first line. Empty lines are none.
fn records(text: &str) -> Result<Vec<(usize, Vec<String>)>, TableError> {
    let mut records = Vec::new();
    let (mut cells, mut cell) = (Vec::new(), String::new());
    let (mut line, mut began) = (1, 1);
    let mut is_quoted = false;
    let mut letters = text.strip_prefix('\u{feff}').unwrap_or(text).chars().peekable();
    while let Some(letter) = letters.next() {
        if letter == '\n' {
            line += 1;
        }
        match letter {
            '"' if is_quoted && letters.peek() == Some(&'"') => {
                cell.push('"');
                letters.next();
            }
            '"' if is_quoted => is_quoted = false,
            '"' if cell.is_empty() => is_quoted = true,
            ',' if !is_quoted => cells.push(std::mem::take(&mut cell)),
            '\r' if !is_quoted => {}
            '\n' if !is_quoted => {
                cells.push(std::mem::take(&mut cell));
                if cells.len() > 1 || cells.iter().any(|cell| !cell.is_empty()) {
                    records.push((began, std::mem::take(&mut cells)));
                }
                cells.clear();
                began = line;
            }
            letter => cell.push(letter),
        }
    }
    if is_quoted {
        return Err(TableError::Quote { line: began });
    }
    if !cell.is_empty() || !cells.is_empty() {
        cells.push(cell);
        records.push((began, cells));
    }
    Ok(records)
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
        assert_eq!(read_table("a\n\"1\n"), Err(TableError::Quote { line: 2 }));
    }
}
