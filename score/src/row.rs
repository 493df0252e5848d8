//! A row of the unified schema: what somebody measured, as far as it is stated.

use crate::table::{TableError, read_table};
use std::collections::BTreeMap;

/// One measured run. What is `None` or empty is not stated; what is no number where one belongs counts as not stated.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Row {
    /// Its name.
    pub row_id: String,
    /// Its source.
    pub table: String,
    /// The model's name.
    pub model: String,
    /// The device's name.
    pub gpu: String,
    /// The precision's name.
    pub precision: String,
    /// The precision in the source's words.
    pub stated_precision: String,
    /// Who trained.
    pub framework: String,
    /// What joins devices.
    pub intra_link: String,
    /// What is computed again.
    pub recompute: String,
    /// What is sharded.
    pub zero: String,
    /// What kind of memory figure it is.
    pub mem_kind: String,
    /// How far it is to be believed.
    pub quality: String,
    /// Anything else.
    pub notes: String,
    pub(crate) cells: BTreeMap<String, String>,
}

impl Row {
    /// A number, if it is stated.
    pub fn number(&self, column: &str) -> Option<f64> {
        self.cells.get(column)?.replace(',', "").parse().ok().filter(|value: &f64| value.is_finite())
    }

    /// A count of at least one, if it is stated.
    pub fn count(&self, column: &str) -> Option<usize> {
        let value = self.number(column)?;
        (1.0..1e12).contains(&value).then_some(value.round() as usize)
    }

    /// Seconds of an optimizer step, as measured.
    pub fn step_seconds(&self) -> Option<f64> {
        self.number("step_s").filter(|seconds| *seconds > 0.0)
    }

    /// Bytes of memory, as measured.
    pub fn memory_bytes(&self) -> Option<f64> {
        self.number("mem_gib").filter(|gib| *gib > 0.0).map(|gib| gib * 1073741824.0)
    }
}

/// Reads rows. Unknown columns are ignored.
///
/// # Errors
/// [`TableError`] where the text is no table, or has no `row_id`.
pub fn read_rows(text: &str) -> Result<Vec<Row>, TableError> {
    let table = read_table(text)?;
    let rows: Vec<Row> = table
        .into_iter()
        .filter(|cells| !cells.is_empty())
        .map(|cells| {
            let text = |column: &str| cells.get(column).cloned().unwrap_or_default();
            let either = |one: &str, other: &str| Some(text(one)).filter(|cell| !cell.is_empty()).unwrap_or_else(|| text(other));
            Row {
                row_id: text("row_id"),
                table: either("table", "source_id"),
                model: text("model"),
                gpu: either("gpu", "gpu_norm"),
                precision: either("prec_norm", "precision"),
                stated_precision: text("precision"),
                framework: text("framework"),
                intra_link: text("intra_link"),
                recompute: text("recompute"),
                zero: text("zero"),
                mem_kind: text("mem_kind"),
                quality: text("quality"),
                notes: text("notes"),
                cells,
            }
        })
        .collect();
    if !rows.is_empty() && rows.iter().all(|row| row.row_id.is_empty()) {
        return Err(TableError::Column { column: "row_id" });
    }
    Ok(rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_columns_are_ignored_and_empty_cells_not_stated() {
        let rows = read_rows("row_id,hair,step_s,dp,tp\nx,long,1.5,,many\n").expect("rows");
        assert_eq!(rows[0].step_seconds(), Some(1.5));
        assert_eq!((rows[0].count("dp"), rows[0].count("tp"), rows[0].count("pp")), (None, None, None));
        assert!(read_rows("a,b\n1,2\n").is_err());
    }
}
