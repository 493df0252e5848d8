//! A row of the table of measured runs. `tests/published/INDEX.md` describes the columns.

use crate::table::{TableError, read_table};
use crate::unclear::{self, Remarks};
use std::collections::BTreeMap;

/// One measured run.
///
/// An empty cell counts as not stated, and so does text where a number belongs.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Row {
    /// The row's unique name.
    pub row_id: String,
    /// Source of the measurement, such as `mlperf_bert`.
    pub table: String,
    /// Model name.
    pub model: String,
    /// Device name; several kinds as `3 nodes A + 1 node B`.
    pub gpu: String,
    /// Precision, normalised where the table has a column for that.
    pub precision: String,
    /// Precision in the source's words.
    pub stated_precision: String,
    /// Framework that ran the training, often with its release.
    pub framework: String,
    /// Link between the devices of a node.
    pub intra_link: String,
    /// Recomputation: `none`, `selective`, `full` or free text.
    pub recompute: String,
    /// ZeRO stage, or free text about FSDP.
    pub zero: String,
    /// Kind of memory figure: allocated, reserved, or as `nvidia-smi` prints it.
    pub mem_kind: String,
    /// Reliability, from A (direct measurement of a completely stated layout) to D (implausible).
    pub quality: String,
    /// Remarks.
    pub notes: String,
    /// One sentence for each cell that was replaced because it is unclear.
    pub unclear: Vec<String>,
    /// Why the measurement is unclear: other rows of the source contradict it. The row is not used
    /// in a fit.
    pub doubt: Option<String>,
    /// All non-empty cells by column name.
    pub(crate) cells: BTreeMap<String, String>,
}

impl Row {
    /// Returns the finite number in a column, if the column states one.
    pub fn number(&self, column: &str) -> Option<f64> {
        self.cells.get(column)?.replace(',', "").parse().ok().filter(|value: &f64| value.is_finite())
    }

    /// Returns the number in a column as a count of at least one, if the column states one.
    pub fn count(&self, column: &str) -> Option<usize> {
        let value = self.number(column)?;
        (1.0..1e12).contains(&value).then_some(value.round() as usize)
    }

    /// Returns the measured seconds of an optimizer step.
    pub fn step_seconds(&self) -> Option<f64> {
        self.number("step_s").filter(|seconds| *seconds > 0.0)
    }

    /// Returns the measured bytes of memory on a device.
    pub fn memory_bytes(&self) -> Option<f64> {
        self.number("mem_gib").filter(|gib| *gib > 0.0).map(|gib| gib * 1073741824.0)
    }
}

/// Reads rows from CSV text. Ignores unknown columns.
///
/// # Errors
/// [`TableError`] if the text is not a table or has no `row_id` column.
pub fn read_rows(text: &str) -> Result<Vec<Row>, TableError> {
    let table = read_table(text)?;
    let rows: Vec<Row> = table
        .into_iter()
        .filter(|cells| !cells.is_empty())
        .map(|mut cells| {
            let Remarks { replaced, doubt } = unclear::replace(&mut cells);
            let text = |column: &str| cells.get(column).cloned().unwrap_or_default();
            let first_stated =
                |left: &str, right: &str| Some(text(left)).filter(|cell| !cell.is_empty()).unwrap_or_else(|| text(right));
            Row {
                row_id: text("row_id"),
                table: first_stated("table", "source_id"),
                model: text("model"),
                gpu: first_stated("gpu", "gpu_norm"),
                precision: first_stated("prec_norm", "precision"),
                stated_precision: text("precision"),
                framework: text("framework"),
                intra_link: text("intra_link"),
                recompute: text("recompute"),
                zero: text("zero"),
                mem_kind: text("mem_kind"),
                quality: text("quality"),
                notes: text("notes"),
                unclear: replaced,
                doubt,
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
    fn unknown_columns_are_ignored_and_empty_cells_are_not_stated() {
        let rows = read_rows("row_id,hair,step_s,dp,tp\nx,long,1.5,,many\n").expect("rows");
        assert_eq!(rows[0].step_seconds(), Some(1.5));
        assert_eq!((rows[0].count("dp"), rows[0].count("tp"), rows[0].count("pp")), (None, None, None));
        assert!(read_rows("a,b\n1,2\n").is_err());
    }
}
