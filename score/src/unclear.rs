//! Cells of the published table that are unclear: `tests/published/unclear.yaml` lists them, each
//! with the value to read in its place and the reason.

use serde::Deserialize;
use std::collections::BTreeMap;
use std::sync::LazyLock;

const UNCLEAR: &str = include_str!("../data/unclear.yaml");

/// An unclear cell of some rows.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Unclear {
    /// Name of a row, or the part of it before its number.
    rows: String,
    column: String,
    read_as: String,
    reason: String,
}

/// The list. A test excludes that it is malformed.
static LIST: LazyLock<Result<Vec<Unclear>, String>> =
    LazyLock::new(|| serde_saphyr::from_str(UNCLEAR).map_err(|error| error.to_string()));

/// Replaces the unclear cells of a row, and returns a sentence about each.
pub(crate) fn replace(cells: &mut BTreeMap<String, String>) -> Vec<String> {
    let Some(name) = cells.get("row_id").cloned() else { return Vec::new() };
    let is_of = |one: &&Unclear| name == one.rows || name.rsplit_once('-').is_some_and(|(part, _)| part == one.rows);
    let mut sentences = Vec::new();
    for Unclear { column, read_as, reason, .. } in LIST.as_deref().unwrap_or_default().iter().filter(is_of) {
        cells.insert(column.clone(), read_as.clone());
        sentences.push(format!("`{column}` is read as `{read_as}`: {reason}"));
    }
    sentences
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_is_sound_and_each_entry_has_rows() {
        let list = LIST.as_ref().expect("sound");
        let rows = crate::published().expect("sound");
        for one in list {
            let has_reason = |row: &&crate::Row| row.unclear.iter().any(|sentence| sentence.contains(one.reason.trim()));
            assert!(rows.iter().any(|row| has_reason(&row)), "{} {}", one.rows, one.column);
        }
        assert!(rows.iter().any(|row| row.unclear.is_empty()));
    }
}
