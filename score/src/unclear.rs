//! Unclear rows of the published table: `data/unclear.yaml` lists cells with the value to read
//! instead, and rows whose measurement is contradicted by others, each with the reason.

use serde::Deserialize;
use std::collections::BTreeMap;
use std::sync::LazyLock;

const UNCLEAR: &str = include_str!("../data/unclear.yaml");

/// An entry of the list, which may match several rows.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Unclear {
    /// Name of a row, or the part of it before the last dash.
    rows: String,
    /// The cell to replace. Without it the measurement itself is unclear.
    column: Option<String>,
    /// The value to read instead.
    read_as: Option<String>,
    reason: String,
}

/// The list. A test excludes that it is malformed.
static LIST: LazyLock<Result<Vec<Unclear>, String>> =
    LazyLock::new(|| serde_saphyr::from_str(UNCLEAR).map_err(|error| error.to_string()));

/// What the list states about a row.
#[derive(Clone, Debug, Default)]
pub(crate) struct Remarks {
    /// A sentence about each replaced cell.
    pub(crate) replaced: Vec<String>,
    /// Why the measurement itself is unclear.
    pub(crate) doubt: Option<String>,
}

/// Replaces the unclear cells of a row, and returns what the list states about it.
pub(crate) fn replace(cells: &mut BTreeMap<String, String>) -> Remarks {
    let Some(name) = cells.get("row_id").cloned() else { return Remarks::default() };
    let is_of = |unclear: &&Unclear| name == unclear.rows || name.rsplit_once('-').is_some_and(|(part, _)| part == unclear.rows);
    let mut remarks = Remarks::default();
    for Unclear { column, read_as, reason, .. } in
        LIST.as_deref().expect("invariant: the compiled-in list is sound").iter().filter(is_of)
    {
        match column.as_ref().zip(read_as.as_ref()) {
            Some((column, read_as)) => {
                cells.insert(column.clone(), read_as.clone());
                remarks.replaced.push(format!("`{column}` is read as `{read_as}`: {reason}"));
            }
            None => remarks.doubt = Some(reason.clone()),
        }
    }
    remarks
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_is_sound_and_each_entry_has_rows() {
        let list = LIST.as_ref().expect("sound");
        let rows = crate::published().expect("sound");
        for one in list {
            assert_eq!(one.column.is_some(), one.read_as.is_some(), "{}", one.rows);
            let has_reason =
                |row: &&crate::Row| row.unclear.iter().chain(&row.doubt).any(|sentence| sentence.contains(one.reason.trim()));
            assert!(rows.iter().any(|row| has_reason(&row)), "{} {:?}", one.rows, one.column);
        }
        assert!(rows.iter().any(|row| row.unclear.is_empty()));
    }
}
