//! The tables that are compiled into the program, compressed: `python -m foretell.trace.pack`
//! writes them.
//!
//! Many tables share parts, so the file has the lines of each part once (`body N`), and tables
//! refer to them (`part NAME N`). Lines that several parts share are stored once too (`piece N`),
//! and parts refer to them by a line `= N`. Allocations are packed as distances ([`Numbers`]).

use super::error::TableError;
use super::table::OperatorTable;
use flate2::read::ZlibDecoder;
use std::collections::BTreeMap;
use std::io::Read;
use std::sync::LazyLock;

static PACKED: &[u8] = include_bytes!("../../operator-tables.zlib");

/// The decompressed file, and the ranges of its sections.
struct Library {
    text: String,
    /// The lines that several parts share.
    pieces: Vec<std::ops::Range<usize>>,
    /// The lines of each part.
    bodies: Vec<std::ops::Range<usize>>,
    /// The header and parts of each table.
    tables: Vec<std::ops::Range<usize>>,
}

static LIBRARY: LazyLock<Library> = LazyLock::new(Library::open);

/// How a table begins.
const HEADER: &str = "foretell-operator-table 1\n";

impl Library {
    fn open() -> Self {
        let mut text = String::new();
        ZlibDecoder::new(PACKED).read_to_string(&mut text).expect("invariant: the program's own tables are sound");
        let starts = |mark: &str| -> Vec<usize> {
            let first = text.starts_with(mark).then_some(0);
            first.into_iter().chain(text.match_indices(&format!("\n{mark}")).map(|(at, _)| at + 1)).collect()
        };
        let tables = starts(HEADER);
        let (pieces, bodies) = (starts("piece "), starts("body "));
        let end = tables.first().copied().unwrap_or(text.len());
        let end_of_pieces = bodies.first().copied().unwrap_or(end);
        let ranges = |starts: &[usize], end: usize| -> Vec<_> {
            let ends = starts.iter().skip(1).copied().chain([end]);
            starts.iter().zip(ends).map(|(&start, end)| start..end).collect()
        };
        Library {
            pieces: ranges(&pieces, end_of_pieces),
            bodies: ranges(&bodies, end),
            tables: ranges(&tables, text.len()),
            text,
        }
    }

    fn key_of(&self, table: usize) -> BTreeMap<&str, &str> {
        let lines = self.text[self.tables[table].clone()].lines();
        let key = lines.filter_map(|line| line.strip_prefix("key ")).next().unwrap_or("");
        key.split(' ').filter_map(|pair| pair.split_once('=')).collect()
    }

    /// The table's own text, with the lines of its parts.
    fn table(&self, index: usize) -> String {
        let mut whole = String::new();
        for line in self.text[self.tables[index].clone()].lines() {
            let body = line.strip_prefix("part ").and_then(|part| part.rsplit_once(' '));
            let Some((name, number)) = body else {
                whole.push_str(line);
                whole.push('\n');
                continue;
            };
            whole.push_str(&format!("part {name}\n"));
            let mut numbers = Numbers::default();
            for line in self.section(&self.bodies, number).lines() {
                let piece = line.strip_prefix("= ").map(|number| self.section(&self.pieces, number));
                for line in piece.unwrap_or(line).lines() {
                    numbers.write(line, &mut whole);
                }
            }
        }
        whole
    }

    /// The lines of a piece or of a part.
    fn section(&self, sections: &[std::ops::Range<usize>], number: &str) -> &str {
        let range = number.parse().ok().and_then(|number: usize| sections.get(number));
        let range = range.expect("invariant: what a table refers to is there");
        self.text[range.clone()].split_once('\n').map_or("", |(_, lines)| lines)
    }
}

/// Writes the lines of a part with allocations' numbers in place of their distances: `+SIZE` gets
/// the number after the last one; `-D` and `gD NAME` the number D before the last one; `-PLACE:D`
/// the number D before the one that PLACE last resolved to (at first 0).
#[derive(Default)]
struct Numbers<'a> {
    last: i64,
    places: BTreeMap<&'a str, i64>,
}

impl<'a> Numbers<'a> {
    fn write(&mut self, line: &'a str, whole: &mut String) {
        let number = |text: &str| -> i64 { text.parse().expect("invariant: a packed number") };
        if let Some(own) = line.strip_prefix("+ ") {
            self.last = number(own.split(' ').next().unwrap_or_default());
            whole.push_str(line);
        } else if let Some(size) = line.strip_prefix('+') {
            self.last += 1;
            whole.push_str(&format!("+ {} {size}", self.last));
        } else if line.starts_with(['-', 'g']) {
            let (word, rest) = line.split_at(1);
            let (reference, name) = rest.split_at(rest.find(' ').unwrap_or(rest.len()));
            let (place, distance) = reference.split_at(reference.rfind(':').map_or(0, |colon| colon + 1));
            let before = if place.is_empty() { self.last } else { self.places.get(place).copied().unwrap_or(0) };
            let found = before - number(distance);
            if !place.is_empty() {
                self.places.insert(place, found);
            }
            whole.push_str(&format!("{word} {place}{found}{name}"));
        } else {
            whole.push_str(line);
        }
        whole.push('\n');
    }
}

impl OperatorTable {
    /// The library's table whose key has all of these values. Tables of compiled steps are
    /// considered only if `wanted` has `compiled`.
    ///
    /// # Errors
    /// [`TableError`] if the table cannot be read, which a test rules out.
    pub fn library(wanted: &[(&str, &str)]) -> Result<Option<Self>, TableError> {
        let of_eager = |name: &str| (name == "compiled").then_some("none");
        let is_compiled = wanted.iter().any(|(name, _)| *name == "compiled");
        let found = (0..LIBRARY.tables.len()).find(|&table| {
            let key = LIBRARY.key_of(table);
            let has = |name: &str, value: &str| key.get(name).copied().or_else(|| of_eager(name)) == Some(value);
            wanted.iter().all(|(name, value)| has(name, value)) && (is_compiled || has("compiled", "none"))
        });
        found.map(|table| Self::parse(&LIBRARY.table(table))).transpose()
    }

    /// The keys of the library's tables.
    pub fn library_keys() -> Vec<BTreeMap<&'static str, &'static str>> {
        (0..LIBRARY.tables.len()).map(|table| LIBRARY.key_of(table)).collect()
    }
}
